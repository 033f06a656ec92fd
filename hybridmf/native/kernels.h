/* kernels.h - vector kernels in one table per instruction set; hmf_kernels() picks the table at run time.
 *
 * kernels_impl.h holds the source of every kernel. kernels_portable.c, kernels_avx2.c, kernels_avx512.c and
 * kernels_neon.c compile it for their instruction set, AVX through a target pragma, so a wheel needs no -m flag. Callers include only this header.
 * Within one table a result never depends on the position of a row in a batch or on the thread count.
 */
#ifndef HMF_KERNELS_H
#define HMF_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#define HMF_X86 1
#elif defined(__aarch64__)
#define HMF_NEON 1
#endif

#define HMF_PREFETCH(address) __builtin_prefetch(address)

enum {
    HMF_PANEL = 32, /* items scored side by side; a packed panel is f x HMF_PANEL */
    HMF_PAD = 16,   /* leading dimensions of systems are multiples of this: whole vectors in every table */
    HMF_SYSTEMS = 2, /* large systems factored side by side; four bring no more than two */
    HMF_LANES = 8, /* small systems factored together */
    HMF_LANES_RANK = 64 /* largest rank of a small system in any table */
};

/* Rows y_k = fixed + columns[k] * stride, k < n; kernels use `width` elements of each, of their own type. */
typedef struct {
    ptrdiff_t n, width, stride;
    const void *fixed;
    const int32_t *columns; /* (n,) */
} hmf_rows;

/* Parameters of all updates in an epoch of stochastic gradient descent. */
typedef struct {
    double rate, penalty;           /* of factors: learning rate, lambda */
    double bias_rate, bias_penalty; /* of biases */
    double mean;                    /* of the ratings */
    double root, bias_root;         /* added to sums of squared steps (AdaGrad, RPCS) below the square root */
    ptrdiff_t ld;                   /* elements between rows */
    ptrdiff_t rank;                 /* RPCS: elements of a row, which share sums; 0: AdaGrad or plain SGD */
    int head_only;                  /* RPCS: update only the heads of rows */
} hmf_sgd_terms;

/* Factors of one side. The arrays in this and the next structs have the type of the kernel that reads them. */
typedef struct {
    void *rows, *bias;             /* (n, ld); (n,) or NULL */
    void *squares, *bias_squares;  /* sums of squared steps: (n, ld), with RPCS (n, 2), or NULL; (n,) or NULL */
} hmf_sgd_side;

/* Entries in the order of their updates. */
typedef struct {
    ptrdiff_t n;
    const int32_t *users, *items; /* (n,) */
    const void *ratings;          /* (n,) */
} hmf_sgd_entries;

/* Entries starts[row] <= k < ends[row] of each row, in the order of its updates. */
typedef struct {
    const int64_t *starts, *ends; /* (n_rows,) */
    const int32_t *columns;       /* (nnz,) rows of the fixed side */
    const void *ratings;          /* (nnz,) */
} hmf_sgd_row_entries;

/* Update both rows of each entry, in order; or n distinct rows of one side, with the other side fixed. If `squares` is
 * set, steps follow RPCS (terms->rank > 0) or AdaGrad. Return the sum of squared errors. */
typedef double hmf_sgd_entries_kernel(const hmf_sgd_entries *entries, const hmf_sgd_side *user,
                                      const hmf_sgd_side *item, const hmf_sgd_terms *terms);
typedef double hmf_sgd_rows_kernel(ptrdiff_t n, const int64_t *order, const hmf_sgd_row_entries *entries,
                                   const hmf_sgd_side *moved, const hmf_sgd_side *fixed, const hmf_sgd_terms *terms);

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
    /* out[u * stride + i] = f elements at users + u * apart times item i of a packed panel (f x HMF_PANEL), u < n_users,
     * i < HMF_PANEL */
    void (*score_f)(ptrdiff_t n_users, ptrdiff_t f, const float *users, ptrdiff_t apart, const float *panel, float *out,
                    ptrdiff_t stride);
    void (*score_d)(ptrdiff_t n_users, ptrdiff_t f, const double *users, ptrdiff_t apart, const double *panel,
                    double *out, ptrdiff_t stride);
    /* upper part of a row-major ld x ld matrix += sign * v^T v; v (n, ld) */
    void (*syrk_upper_f)(ptrdiff_t n, ptrdiff_t ld, const float *v, float sign, float *a);
    void (*syrk_upper_d)(ptrdiff_t n, ptrdiff_t ld, const double *v, double sign, double *a);
    /* weights and targets of implicit feedback: c = 1 + alpha |r|, root = sqrt(max(0, sign (c - unobserved))),
     * target = c where r > 0 and sign > 0, else 0; returns the number of weights of the other sign */
    ptrdiff_t (*weigh_f)(ptrdiff_t n, const float *ratings, float alpha, float unobserved, float sign, float *root,
                         float *target);
    ptrdiff_t (*weigh_d)(ptrdiff_t n, const double *ratings, double alpha, double unobserved, double sign,
                         double *root, double *target);
    /* v[k] = root[k] * y_k (root NULL: 1), zero-padded to ld; b += target[k] * y_k; columns of `rows` is readable up to
     * n_ahead for prefetching */
    void (*gather_f)(const hmf_rows *rows, ptrdiff_t n_ahead, ptrdiff_t ld, const float *root, const float *target,
                     float *v, float *b);
    void (*gather_d)(const hmf_rows *rows, ptrdiff_t n_ahead, ptrdiff_t ld, const double *root, const double *target,
                     double *v, double *b);
    /* solve one or HMF_SYSTEMS systems, ld x ld with ld the rank padded to a multiple of HMF_PAD; a[s] holds the upper
     * part and finite values below it; a[s] and b[s] are overwritten; status[s] is 0, the order of the failing leading
     * minor, or -1 for a pivot that is not finite; work (count * 3 * ld) */
    void (*cholesky_f)(int count, ptrdiff_t rank, float *const *a, float *const *b, float epsilon, float *work,
                       float *const *x, ptrdiff_t *status);
    void (*cholesky_d)(int count, ptrdiff_t rank, double *const *a, double *const *b, double epsilon, double *work,
                       double *const *x, ptrdiff_t *status);
    /* the same for up to HMF_LANES systems of rank up to lanes_rank; overwrites only the padding of their diagonals;
     * work (HMF_LANES * (ld * (ld + HMF_LANES) / 2 + 2 * ld)), x (ld,) */
    ptrdiff_t lanes_rank_f, lanes_rank_d; /* at most HMF_LANES_RANK */
    void (*cholesky_lanes_f)(int count, ptrdiff_t rank, float *const *a, float *const *b, float epsilon, float *work,
                             float *const *x, ptrdiff_t *status);
    void (*cholesky_lanes_d)(int count, ptrdiff_t rank, double *const *a, double *const *b, double epsilon,
                             double *work, double *const *x, ptrdiff_t *status);
    /* upper part of a = S (Y Y^T + shift) S + ridge I, ld x ld, with rows of the unit matrix from n on; root (ld,): S,
     * zero from n on */
    void (*products_f)(const hmf_rows *rows, const float *root, float shift, float ridge, ptrdiff_t ld, float *a);
    void (*products_d)(const hmf_rows *rows, const double *root, double shift, double ridge, ptrdiff_t ld, double *a);
    /* out = sum_k coefficient[k] y_k */
    void (*sum_rows_f)(const hmf_rows *rows, const float *coefficient, float *out);
    void (*sum_rows_d)(const hmf_rows *rows, const double *coefficient, double *out);
    void (*prefetch_rows_f)(const hmf_rows *rows);
    void (*prefetch_rows_d)(const hmf_rows *rows);
    /* out += sum_k (target[k] + sign weight[k] (y_k . p)) y_k; weight NULL: 1, target NULL: 0 */
    void (*apply_f)(const hmf_rows *rows, const float *weight, const float *target, float sign, const float *p,
                    float *out);
    void (*apply_d)(const hmf_rows *rows, const double *weight, const double *target, double sign, const double *p,
                    double *out);
    /* out += sum_k coefficient[k] * row k of a row-major n x rank matrix */
    void (*combine_f)(ptrdiff_t n, ptrdiff_t rank, const float *rows, const float *coefficient, float *out);
    void (*combine_d)(ptrdiff_t n, ptrdiff_t rank, const double *rows, const double *coefficient, double *out);
    /* out[column] = scale * z for n columns, z uniform between `low` (0 or -1, exclusive) and 1, from word column % 4 of
     * Philox4x32-10 with the counter (column / 4, row, side) and the key. Every table gives the same bits. */
    void (*draw)(ptrdiff_t n, uint64_t key, uint64_t row, uint32_t side, int low, float scale, float *out);
    /* first i >= start with scores[i] >= threshold, or n */
    ptrdiff_t (*first_at_least_f)(ptrdiff_t n, const float *scores, float threshold, ptrdiff_t start);
    ptrdiff_t (*first_at_least_d)(ptrdiff_t n, const double *scores, double threshold, ptrdiff_t start);
    /* stochastic gradient descent (sgd_impl.h) */
    hmf_sgd_entries_kernel *sgd_entries_f, *sgd_entries_d;
    hmf_sgd_rows_kernel *sgd_rows_f, *sgd_rows_d;
} hmf_kernel_table;

/* Best table for this processor, or the one HYBRIDMF_ISA names ("avx512", "avx2", "neon", "portable") if it can run here. */
const hmf_kernel_table *hmf_kernels(void);

/* NULL unless the named table exists and this processor can run it. */
const hmf_kernel_table *hmf_kernels_named(const char *name);

extern const hmf_kernel_table hmf_table_portable;
#ifdef HMF_X86
extern const hmf_kernel_table hmf_table_avx2;
extern const hmf_kernel_table hmf_table_avx512;
#endif
#ifdef HMF_NEON
extern const hmf_kernel_table hmf_table_neon;
#endif

#endif
