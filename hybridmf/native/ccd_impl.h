/* ccd_impl.h - source of the CCD++ kernels, included twice (float, double) per instruction set.
 *
 * The including file defines REAL, TYPE (the suffix of the names), HMF_WIDE (1 for float, whose pairs are read as one
 * double) and HMF_BYTES (vector width). Vectors are those of GCC's and clang's extensions.
 *
 * Error: CCD_BLOCK entries are summed in REAL, one chain per lane; these sums are added in double. The error of a sum in
 * float32 is at most (CCD_BLOCK / lanes + log2(lanes) + 2) 2^-24 times sum |terms|: 2.3e-6 with AVX-512, 8e-6 with four
 * lanes; typically the square root of the sum in parentheses takes its place.
 */
#ifndef HMF_CCD_COMMON
#define HMF_CCD_COMMON
#define HMF_CAT2(a, b) a##b
#define HMF_CAT(a, b) HMF_CAT2(a, b)
#define HMF_INLINE static inline __attribute__((always_inline))
#if !defined(__GNUC__)
#error "the kernels need GCC's or clang's vector extensions (on Windows: clang-cl)"
#endif
enum {
    CCD_BLOCK = 512,  /* entries summed in REAL */
    CCD_TOGETHER = 4, /* rows of the fixed side that share a pass over x */
    CCD_AHEAD = 8     /* entries between a prefetch and its use */
};
typedef double hmf_ccd_pair __attribute__((may_alias)); /* two floats */

/* The even and the odd elements of (low, high), four at a time within 16 bytes: one shuffle at any width. */
#if HMF_BYTES == 64
#define CCD_ODD_OR_EVEN(v, w, o)                                                                                    \
    __builtin_shufflevector(v, w, o, 2 + o, 16 + o, 18 + o, 4 + o, 6 + o, 20 + o, 22 + o, 8 + o, 10 + o, 24 + o, \
                            26 + o, 12 + o, 14 + o, 28 + o, 30 + o)
#elif HMF_BYTES == 32
#define CCD_ODD_OR_EVEN(v, w, o) __builtin_shufflevector(v, w, o, 2 + o, 8 + o, 10 + o, 4 + o, 6 + o, 12 + o, 14 + o)
#else
#define CCD_ODD_OR_EVEN(v, w, o) __builtin_shufflevector(v, w, o, 2 + o, 4 + o, 6 + o)
#endif
#endif

#define FN(name) HMF_CAT(HMF_CAT(name, _), TYPE)
#define VEC FN(vec)
#define LANES ((ptrdiff_t)(HMF_BYTES / sizeof(REAL)))
#define SPLAT(s) ((s) - (VEC){0})

/* aligned to the element only: rows start anywhere; may_alias: read through plain arrays */
typedef REAL VEC __attribute__((vector_size(HMF_BYTES), aligned(sizeof(REAL)), may_alias));

/* four lanes, for the entries after the last whole vector */
#define QUAD FN(quad)
typedef REAL QUAD __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

#define QUAD_TOTAL(v) (((v)[0] + (v)[2]) + ((v)[1] + (v)[3]))

/* sum of the lanes; halves are added in registers down to four lanes */
HMF_INLINE REAL FN(lanes_total)(VEC v) {
    enum { QUADS = HMF_BYTES / (4 * sizeof(REAL)) };
    if (QUADS == 0) return v[0] + v[1]; /* doubles in 16 bytes */
    QUAD part[QUADS ? QUADS : 1];
    memcpy(part, &v, sizeof v < sizeof part ? sizeof v : sizeof part);
    if (QUADS == 4) {
        part[0] += part[2];
        part[1] += part[QUADS == 4 ? 3 : 0];
    }
    if (QUADS >= 2) part[0] += part[QUADS >= 2];
    return QUAD_TOTAL(part[0]);
}

/* a and b of LANES columns */
HMF_INLINE void FN(load_pairs)(const REAL *pairs, const int32_t *c, VEC *a, VEC *b) {
#if HMF_WIDE
    typedef double WIDE __attribute__((vector_size(HMF_BYTES)));
    typedef REAL FULL __attribute__((vector_size(HMF_BYTES)));
    const hmf_ccd_pair *pair = (const hmf_ccd_pair *)pairs;
    /* entries 4k, 4k + 1 from the one, 4k + 2, 4k + 3 from the other: their shuffle puts them in order */
#if HMF_BYTES == 64
    const WIDE low = {pair[c[0]], pair[c[1]], pair[c[4]], pair[c[5]], pair[c[8]], pair[c[9]], pair[c[12]], pair[c[13]]};
    const WIDE high = {pair[c[2]],  pair[c[3]],  pair[c[6]],  pair[c[7]],
                       pair[c[10]], pair[c[11]], pair[c[14]], pair[c[15]]};
#elif HMF_BYTES == 32
    const WIDE low = {pair[c[0]], pair[c[1]], pair[c[4]], pair[c[5]]};
    const WIDE high = {pair[c[2]], pair[c[3]], pair[c[6]], pair[c[7]]};
#else
    const WIDE low = {pair[c[0]], pair[c[1]]};
    const WIDE high = {pair[c[2]], pair[c[3]]};
#endif
    const FULL v = (FULL)low, w = (FULL)high;
    *a = (VEC)CCD_ODD_OR_EVEN(v, w, 0);
    *b = (VEC)CCD_ODD_OR_EVEN(v, w, 1);
#else
#define CCD_AT(k, which) pairs[2 * (ptrdiff_t)c[k] + which]
#if HMF_BYTES == 64
    *a = (VEC){CCD_AT(0, 0), CCD_AT(1, 0), CCD_AT(2, 0), CCD_AT(3, 0),
               CCD_AT(4, 0), CCD_AT(5, 0), CCD_AT(6, 0), CCD_AT(7, 0)};
    *b = (VEC){CCD_AT(0, 1), CCD_AT(1, 1), CCD_AT(2, 1), CCD_AT(3, 1),
               CCD_AT(4, 1), CCD_AT(5, 1), CCD_AT(6, 1), CCD_AT(7, 1)};
#elif HMF_BYTES == 32
    *a = (VEC){CCD_AT(0, 0), CCD_AT(1, 0), CCD_AT(2, 0), CCD_AT(3, 0)};
    *b = (VEC){CCD_AT(0, 1), CCD_AT(1, 1), CCD_AT(2, 1), CCD_AT(3, 1)};
#else
    *a = (VEC){CCD_AT(0, 0), CCD_AT(1, 0)};
    *b = (VEC){CCD_AT(0, 1), CCD_AT(1, 1)};
#endif
#undef CCD_AT
#endif
}

HMF_INLINE void FN(load_quad)(const REAL *pairs, const int32_t *c, QUAD *a, QUAD *b) {
    const REAL *first = pairs + 2 * (ptrdiff_t)c[0], *second = pairs + 2 * (ptrdiff_t)c[1];
    const REAL *third = pairs + 2 * (ptrdiff_t)c[2], *fourth = pairs + 2 * (ptrdiff_t)c[3];
    *a = (QUAD){first[0], second[0], third[0], fourth[0]};
    *b = (QUAD){first[1], second[1], third[1], fourth[1]};
}

HMF_INLINE void FN(accumulate_block)(const hmf_ccd_entries entries, const int terms, const REAL *pairs, REAL p, REAL q,
                                     double *sums) {
    const ptrdiff_t n = entries.n;
    const int32_t *const columns = entries.columns;
    REAL *const e = entries.e, *const kept = entries.kept;
    VEC products = SPLAT((REAL)0), squares = SPLAT((REAL)0);
    const VEC ps = SPLAT(p), qs = SPLAT(q);
    ptrdiff_t k = 0;
    for (; k + LANES <= n; k += LANES) {
        VEC a, b, r = *(const VEC *)(e + k);
        FN(load_pairs)(pairs, columns + k, &a, &b);
        if (terms >= 1) r += ps * a;
        if (terms >= 2) r += qs * b;
        if (terms >= 1) *(VEC *)(e + k) = r;
        if (kept) *(VEC *)(kept + k) = b;
        products += b * r;
        squares += b * b;
    }
    REAL product = FN(lanes_total)(products), square = FN(lanes_total)(squares);
    if (LANES > 4 && k + 4 <= n) {
        QUAD few_products = {0}, few_squares = {0};
        for (; k + 4 <= n; k += 4) {
            QUAD a, b, r = *(const QUAD *)(e + k);
            FN(load_quad)(pairs, columns + k, &a, &b);
            if (terms >= 1) r += p * a;
            if (terms >= 2) r += q * b;
            if (terms >= 1) *(QUAD *)(e + k) = r;
            if (kept) *(QUAD *)(kept + k) = b;
            few_products += b * r;
            few_squares += b * b;
        }
        product += QUAD_TOTAL(few_products);
        square += QUAD_TOTAL(few_squares);
    }
    for (; k < n; k++) {
        const REAL a = pairs[2 * (ptrdiff_t)columns[k]], b = pairs[2 * (ptrdiff_t)columns[k] + 1];
        REAL r = e[k];
        if (terms >= 1) r += p * a;
        if (terms >= 2) r += q * b;
        if (terms >= 1) e[k] = r;
        if (kept) kept[k] = b;
        product += b * r;
        square += b * b;
    }
    sums[0] += product;
    sums[1] += square;
}

HMF_INLINE void FN(accumulate_blocks)(const hmf_ccd_entries *entries, const int terms, const REAL *pairs, REAL p,
                                      REAL q, double *sums) {
    const hmf_ccd_entries all = *entries;
    for (ptrdiff_t k = 0; k < all.n; k += CCD_BLOCK) {
        const hmf_ccd_entries block = {all.n - k < CCD_BLOCK ? all.n - k : CCD_BLOCK, all.columns + k,
                                       (REAL *)all.e + k, all.kept ? (REAL *)all.kept + k : NULL};
        FN(accumulate_block)(block, terms, pairs, p, q, sums);
    }
}

static void FN(accumulate)(const hmf_ccd_entries *entries, int terms, const REAL *pairs, REAL p, REAL q, double *sums) {
    if (terms == 2)
        FN(accumulate_blocks)(entries, 2, pairs, p, q, sums);
    else if (terms == 1)
        FN(accumulate_blocks)(entries, 1, pairs, p, q, sums);
    else
        FN(accumulate_blocks)(entries, 0, pairs, p, q, sums);
}

static void FN(subtract)(ptrdiff_t n, REAL x, const REAL *b, REAL *e) {
    const VEC xs = SPLAT(x);
    ptrdiff_t k = 0;
    for (; k + LANES <= n; k += LANES) *(VEC *)(e + k) -= xs * *(const VEC *)(b + k);
    if (LANES > 4)
        for (; k + 4 <= n; k += 4) *(QUAD *)(e + k) -= x * *(const QUAD *)(b + k);
    for (; k < n; k++) e[k] -= x * b[k];
}

/* dot[r] = x . y[r]; products commute, so both orientations get the same bits */
HMF_INLINE void FN(dot_together)(ptrdiff_t rank, const REAL *x, const REAL *const *y, REAL *dot) {
    VEC sum[CCD_TOGETHER];
    QUAD few[CCD_TOGETHER];
    for (int r = 0; r < CCD_TOGETHER; r++) {
        sum[r] = SPLAT((REAL)0);
        few[r] = (QUAD){0};
    }
    ptrdiff_t j = 0;
    for (; j + LANES <= rank; j += LANES) {
        const VEC part = *(const VEC *)(x + j);
        for (int r = 0; r < CCD_TOGETHER; r++) sum[r] += part * *(const VEC *)(y[r] + j);
    }
    if (LANES > 4)
        for (; j + 4 <= rank; j += 4)
            for (int r = 0; r < CCD_TOGETHER; r++) few[r] += *(const QUAD *)(x + j) * *(const QUAD *)(y[r] + j);
    for (int r = 0; r < CCD_TOGETHER; r++) dot[r] = FN(lanes_total)(sum[r]) + QUAD_TOTAL(few[r]);
    for (; j < rank; j++)
        for (int r = 0; r < CCD_TOGETHER; r++) dot[r] += x[j] * y[r][j];
}

static void FN(residual)(ptrdiff_t n, ptrdiff_t rank, const REAL *x, const REAL *fixed, const int32_t *columns,
                         const REAL *ratings, REAL *out) {
    for (ptrdiff_t k = 0; k < n; k += CCD_TOGETHER) {
        const REAL *y[CCD_TOGETHER];
        REAL dot[CCD_TOGETHER];
        for (ptrdiff_t r = 0; r < CCD_TOGETHER; r++) {
            /* repeats of the last entry fill the last group: all entries take the same code and rounding */
            y[r] = fixed + (ptrdiff_t)columns[k + r < n ? k + r : n - 1] * rank;
            if (k + r + CCD_AHEAD < n) {
                const char *next = (const char *)(fixed + (ptrdiff_t)columns[k + r + CCD_AHEAD] * rank);
                for (ptrdiff_t byte = 0; byte < rank * (ptrdiff_t)sizeof(REAL); byte += 64)
                    __builtin_prefetch(next + byte);
            }
        }
        FN(dot_together)(rank, x, y, dot);
        for (ptrdiff_t r = 0; r < CCD_TOGETHER && k + r < n; r++) out[k + r] = ratings[k + r] - dot[r];
    }
}

#undef FN
#undef VEC
#undef QUAD
#undef QUAD_TOTAL
#undef LANES
#undef SPLAT
#undef REAL
#undef TYPE
#undef HMF_WIDE
