/* kernels.h - vector kernels in one table per instruction set; hmf_kernels() picks the table at run time.
 *
 * kernels_impl.h holds the one text of every kernel. kernels_portable.c, kernels_avx2.c and kernels_avx512.c compile
 * it for their instruction set through a target pragma, so no file of a wheel needs an -m flag. Callers include this
 * header only. Within one table a result never depends on the position of a row in a batch or on the thread count.
 */
#ifndef HMF_KERNELS_H
#define HMF_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { HMF_PANEL = 32 }; /* items scored side by side; a packed panel is f x HMF_PANEL */

typedef struct {
    const char *name;
    /* sum_k a[k] b[k] */
    float (*dot_f)(ptrdiff_t n, const float *a, const float *b);
    double (*dot_d)(ptrdiff_t n, const double *a, const double *b);
    /* the same over float vectors, products and sum in double */
    double (*dot_fd)(ptrdiff_t n, const float *a, const float *b);
    /* y += alpha x */
    void (*axpy_f)(ptrdiff_t n, float alpha, const float *x, float *y);
    void (*axpy_d)(ptrdiff_t n, double alpha, const double *x, double *y);
    /* lower triangle of a column-major n x n matrix += alpha x x^T */
    void (*syr_f)(ptrdiff_t n, float alpha, const float *x, float *a);
    void (*syr_d)(ptrdiff_t n, double alpha, const double *x, double *a);
    /* out[u * stride + i] = users[u] . item i of a packed panel (f x HMF_PANEL), u < n_users, i < HMF_PANEL */
    void (*score_f)(ptrdiff_t n_users, ptrdiff_t f, const float *users, const float *panel, float *out,
                    ptrdiff_t stride);
    void (*score_d)(ptrdiff_t n_users, ptrdiff_t f, const double *users, const double *panel, double *out,
                    ptrdiff_t stride);
} hmf_kernel_table;

/* Best table of this processor, or the one HYBRIDMF_ISA names ("avx512", "avx2", "portable") if it can run here. */
const hmf_kernel_table *hmf_kernels(void);

/* NULL unless the named table exists and this processor can run it. */
const hmf_kernel_table *hmf_kernels_named(const char *name);

extern const hmf_kernel_table hmf_table_portable;
extern const hmf_kernel_table hmf_table_avx2;
extern const hmf_kernel_table hmf_table_avx512;

#endif
