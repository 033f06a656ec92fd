/* kernels_impl.h - the one text of the vector kernels, included twice (float, double) per instruction set.
 *
 * The including file defines REAL, TYPE (the suffix of the names), HMF_BYTES (vector width) and HMF_USERS x
 * HMF_COLUMNS (score tile held in registers). GCC and clang vector extensions carry the width; other compilers get
 * scalars from the same text.
 */
#ifndef HMF_IMPL_COMMON
#define HMF_IMPL_COMMON
#define HMF_CAT2(a, b) a##b
#define HMF_CAT(a, b) HMF_CAT2(a, b)
#define HMF_INLINE static inline __attribute__((always_inline))
#if !defined(__GNUC__)
#undef HMF_INLINE
#define HMF_INLINE static inline
#endif

/* products of floats are exact in double; eight chains, which the compiler puts into vectors */
static double dot_fd(ptrdiff_t n, const float *a, const float *b) {
    double sum[8] = {0};
    ptrdiff_t k = 0;
    for (; k + 8 <= n; k += 8)
        for (int l = 0; l < 8; l++) sum[l] += (double)a[k + l] * (double)b[k + l];
    for (; k < n; k++) sum[0] += (double)a[k] * (double)b[k];
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}
#endif

#define FN(name) HMF_CAT(HMF_CAT(name, _), TYPE)
#define VEC FN(vec)

#if defined(__GNUC__)
/* aligned to the element only: factor rows start anywhere; may_alias: read through plain arrays */
typedef REAL VEC __attribute__((vector_size(HMF_BYTES), aligned(sizeof(REAL)), may_alias));
#define LANES ((ptrdiff_t)(HMF_BYTES / sizeof(REAL)))
#define SPLAT(s) ((s) - (VEC){0})
#define LANE(v, l) ((v)[l])
#else
typedef REAL VEC;
#define LANES ((ptrdiff_t)1)
#define SPLAT(s) (s)
#define LANE(v, l) (v)
#endif

static REAL FN(dot)(ptrdiff_t n, const REAL *a, const REAL *b) {
    VEC even = SPLAT(0), odd = SPLAT(0); /* two chains hide part of the multiply-add latency */
    ptrdiff_t k = 0;
    for (; k + 2 * LANES <= n; k += 2 * LANES) {
        even += *(const VEC *)(a + k) * *(const VEC *)(b + k);
        odd += *(const VEC *)(a + k + LANES) * *(const VEC *)(b + k + LANES);
    }
    even += odd;
    REAL sum = 0;
    for (ptrdiff_t l = 0; l < LANES; l++) sum += LANE(even, l);
    for (; k < n; k++) sum += a[k] * b[k];
    return sum;
}

static void FN(axpy)(ptrdiff_t n, REAL alpha, const REAL *x, REAL *y) {
    const VEC scale = SPLAT(alpha);
    ptrdiff_t k = 0;
    for (; k + LANES <= n; k += LANES) *(VEC *)(y + k) += scale * *(const VEC *)(x + k);
    for (; k < n; k++) y[k] += alpha * x[k];
}

static void FN(syr)(ptrdiff_t n, REAL alpha, const REAL *x, REAL *a) {
    for (ptrdiff_t j = 0; j < n; j++) FN(axpy)(n - j, alpha * x[j], x + j, a + j * n + j);
}

/* One chain of multiply-adds over k for each (user, item): the value does not depend on how users are grouped. */
HMF_INLINE void FN(score_rows)(const int n_users, ptrdiff_t f, const REAL *users, const REAL *panel, REAL *out,
                               ptrdiff_t stride) {
    for (ptrdiff_t half = 0; half < HMF_PANEL; half += HMF_COLUMNS * LANES) {
        VEC sum[HMF_USERS][HMF_COLUMNS];
        for (int u = 0; u < n_users; u++)
            for (int c = 0; c < HMF_COLUMNS; c++) sum[u][c] = SPLAT(0);
        for (ptrdiff_t k = 0; k < f; k++) {
            const REAL *items = panel + k * HMF_PANEL + half;
            for (int u = 0; u < n_users; u++) {
                const VEC x = SPLAT(users[u * f + k]);
                for (int c = 0; c < HMF_COLUMNS; c++) sum[u][c] += x * *(const VEC *)(items + c * LANES);
            }
        }
        for (int u = 0; u < n_users; u++)
            for (int c = 0; c < HMF_COLUMNS; c++) *(VEC *)(out + u * stride + half + c * LANES) = sum[u][c];
    }
}

static void FN(score)(ptrdiff_t n_users, ptrdiff_t f, const REAL *users, const REAL *panel, REAL *out,
                      ptrdiff_t stride) {
    ptrdiff_t u = 0;
    for (; u + HMF_USERS <= n_users; u += HMF_USERS)
        FN(score_rows)(HMF_USERS, f, users + u * f, panel, out + u * stride, stride);
    for (; u < n_users; u++) FN(score_rows)(1, f, users + u * f, panel, out + u * stride, stride);
}

#undef FN
#undef VEC
#undef LANES
#undef SPLAT
#undef LANE
#undef REAL
#undef TYPE
