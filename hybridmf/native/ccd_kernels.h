/* ccd_kernels.h - vector kernels of CCD++, one table per instruction set, chosen like those of kernels.h.
 *
 * ccd_impl.h holds the source. Pairs (a, b) of coordinates of the fixed side are adjacent: one load fetches both.
 * An entry sees the same multiply-adds in the same order in both orientations, so the copies of the residual by rows
 * and by columns stay equal, bit for bit.
 */
#ifndef HMF_CCD_KERNELS_H
#define HMF_CCD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

/* Entries of a row; arrays have the type of the kernel that reads them. */
typedef struct {
    ptrdiff_t n;
    const int32_t *columns;
    void *e;    /* residual */
    void *kept; /* receives b of each entry, unless NULL */
} hmf_ccd_entries;

typedef struct {
    const char *name;
    /* out[k] = ratings[k] - x . (row columns[k] of fixed), in REAL: vectors of partial sums */
    void (*residual_f)(ptrdiff_t n, ptrdiff_t rank, const float *x, const float *fixed, const int32_t *columns,
                       const float *ratings, float *out);
    void (*residual_d)(ptrdiff_t n, ptrdiff_t rank, const double *x, const double *fixed, const int32_t *columns,
                       const double *ratings, double *out);
    /* e[k] += p a_k (terms >= 1), e[k] += q b_k (terms == 2), with (a_k, b_k) = pairs[columns[k]];
     * sums[0] += e[k] b_k and sums[1] += b_k^2 */
    void (*accumulate_f)(const hmf_ccd_entries *entries, int terms, const float *pairs, float p, float q, double *sums);
    void (*accumulate_d)(const hmf_ccd_entries *entries, int terms, const double *pairs, double p, double q,
                         double *sums);
    /* e[k] -= x b[k] */
    void (*subtract_f)(ptrdiff_t n, float x, const float *b, float *e);
    void (*subtract_d)(ptrdiff_t n, double x, const double *b, double *e);
} hmf_ccd_table;

/* The table of the instruction set that hmf_kernels() chooses. */
const hmf_ccd_table *hmf_ccd_kernels(void);

extern const hmf_ccd_table hmf_ccd_portable;
#ifdef HMF_X86
extern const hmf_ccd_table hmf_ccd_avx2;
extern const hmf_ccd_table hmf_ccd_avx512;
#endif

#endif
