/* kernels_impl.h - source of the vector kernels, included twice (float, double) per instruction set.
 *
 * The including file defines REAL, TYPE (the suffix of the names), HMF_BYTES (vector width) and HMF_USERS x
 * HMF_COLUMNS, HMF_SYRK_ROWS x HMF_SYRK_COLUMNS (register tiles). Vectors are those of GCC's and clang's extensions.
 */
#ifndef HMF_IMPL_COMMON
#define HMF_IMPL_COMMON
#define HMF_CAT2(a, b) a##b
#define HMF_CAT(a, b) HMF_CAT2(a, b)
#define HMF_INLINE static inline __attribute__((always_inline))
#define HMF_ALIGNED __attribute__((aligned(64)))
#if defined(__clang__)
#define HMF_UNROLL _Pragma("unroll")
#define HMF_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define ROW_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define HMF_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (FN(mask)){__VA_ARGS__})
#define ROW_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (FN(row_mask)){__VA_ARGS__})
#define HMF_UNROLL _Pragma("GCC unroll 8")
#endif
enum {
    HMF_AHEAD = 8,    /* entries between a prefetch and its use: covers about the latency of L3 at rank 64 */
    HMF_TOGETHER = 4, /* rows that share a pass over a vector in apply, combine and gather */
    HMF_WIDE = 8,     /* vectors of `out` in registers in apply */
    HMF_BLOCK = 8     /* rows of a Cholesky panel; every table's syrk tiles divide it */
};

/* products of floats are exact in double; eight chains, which the compiler vectorizes */
static double dot_fd(ptrdiff_t n, const float *a, const float *b) {
    double sum[8] = {0};
    ptrdiff_t k = 0;
    for (; k + 8 <= n; k += 8)
        for (int l = 0; l < 8; l++) sum[l] += (double)a[k + l] * (double)b[k + l];
    for (; k < n; k++) sum[0] += (double)a[k] * (double)b[k];
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

/* Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011): four words for each of HMF_DRAWN counters that differ in their
 * first word; loops of constant length, which the compiler vectorizes */
enum { HMF_DRAWN = 16, HMF_ROUNDS = 10, HMF_BITS = 24 /* of a float32's mantissa */ };

static void philox(uint64_t key, uint32_t first, uint64_t row, uint32_t side, uint32_t words[4][HMF_DRAWN]) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int i = 0; i < HMF_DRAWN; i++) {
        words[0][i] = first + (uint32_t)i;
        words[1][i] = (uint32_t)row;
        words[2][i] = (uint32_t)(row >> 32);
        words[3][i] = side;
    }
    for (int round = 0; round < HMF_ROUNDS; round++) {
        for (int i = 0; i < HMF_DRAWN; i++) {
            const uint64_t a = (uint64_t)0xD2511F53u * words[0][i], b = (uint64_t)0xCD9E8D57u * words[2][i];
            const uint32_t one = words[1][i], three = words[3][i];
            words[0][i] = (uint32_t)(b >> 32) ^ one ^ k0;
            words[1][i] = (uint32_t)b;
            words[2][i] = (uint32_t)(a >> 32) ^ three ^ k1;
            words[3][i] = (uint32_t)a;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* Numbers come from the upper bits of a word as an odd number below 2^24: exact in float32, and never zero. */
static void draw(ptrdiff_t n, uint64_t key, uint64_t row, uint32_t side, int low, float scale, float *out) {
    uint32_t words[4][HMF_DRAWN];
    float drawn[HMF_DRAWN][4];
    const int32_t shift = low ? 1 << (HMF_BITS - 1) : 0;
    const float unit = scale / (float)(low ? 1 << (HMF_BITS - 1) : 1 << HMF_BITS); /* a power of two: exact */
    for (ptrdiff_t column = 0; column < n; column += 4 * HMF_DRAWN) {
        philox(key, (uint32_t)(column / 4), row, side, words);
        for (int i = 0; i < HMF_DRAWN; i++)
            for (int w = 0; w < 4; w++) drawn[i][w] = (float)((int32_t)(words[w][i] >> 8 | 1) - shift) * unit;
        const ptrdiff_t left = n - column;
        memcpy(out + column, drawn, (size_t)(left < 4 * HMF_DRAWN ? left : 4 * HMF_DRAWN) * sizeof(float));
    }
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
/* a row of a diagonal block; takes several registers in narrower tables */
#define ROW FN(row)
typedef REAL ROW __attribute__((vector_size(8 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
#define ROW_SPLAT(s) ((s) - (ROW){0})
typedef INTEGER FN(row_mask) __attribute__((vector_size(8 * sizeof(REAL))));
#define FOUR FN(four)
#define EIGHT FN(eight)
typedef REAL FOUR __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
typedef INTEGER FN(mask) __attribute__((vector_size(4 * sizeof(REAL))));
typedef REAL EIGHT __attribute__((vector_size(8 * sizeof(REAL))));
#else
#error "the kernels need GCC's or clang's vector extensions (on Windows: clang-cl)"
#endif
#define ROW_LANE(v, l) ((v)[l])

HMF_INLINE void FN(prefetch_row)(const REAL *row, ptrdiff_t n) {
    for (ptrdiff_t byte = 0; byte < n * (ptrdiff_t)sizeof(REAL); byte += 64) HMF_PREFETCH((const char *)row + byte);
}

/* four lanes whose sum is the sum of all lanes; halves are added in registers */
HMF_INLINE void FN(quarter)(VEC v, FOUR *out) {
    enum { BYTES = 4 * sizeof(REAL) };
    FOUR sum = {0};
    if (HMF_BYTES == 4 * BYTES) {
        EIGHT low, high;
        memcpy(&low, &v, 2 * BYTES);
        memcpy(&high, (const char *)&v + 2 * BYTES, 2 * BYTES);
        low += high;
        FOUR other;
        memcpy(&sum, &low, BYTES);
        memcpy(&other, (const char *)&low + BYTES, BYTES);
        sum += other;
    } else if (HMF_BYTES == 2 * BYTES) {
        FOUR other;
        memcpy(&sum, &v, BYTES);
        memcpy(&other, (const char *)&v + BYTES, BYTES);
        sum += other;
    } else {
        memcpy(&sum, &v, HMF_BYTES);
    }
    *out = sum;
}

HMF_INLINE REAL FN(total)(VEC v) {
    if (LANES < 4) return LANE(v, 0) + LANE(v, 1);
    FOUR sum;
    FN(quarter)(v, &sum);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* `total` of each of four vectors, by shared shuffles. */
HMF_INLINE void FN(four_totals)(const VEC *v, FOUR *out) {
    FOUR part[4], pair[2];
    if (LANES < 4) {
        for (int c = 0; c < 4; c++) (*out)[c] = FN(total)(v[c]);
        return;
    }
    for (int c = 0; c < 4; c++) FN(quarter)(v[c], &part[c]);
    for (int c = 0; c < 2; c++)
        pair[c] = HMF_SHUFFLE(part[2 * c], part[2 * c + 1], 0, 4, 1, 5) +
                  HMF_SHUFFLE(part[2 * c], part[2 * c + 1], 2, 6, 3, 7);
    *out = HMF_SHUFFLE(pair[0], pair[1], 0, 1, 4, 5) + HMF_SHUFFLE(pair[0], pair[1], 2, 3, 6, 7);
}

static REAL FN(dot)(ptrdiff_t n, const REAL *a, const REAL *b) {
    VEC even = SPLAT(0), odd = SPLAT(0); /* two chains hide part of the multiply-add latency */
    ptrdiff_t k = 0;
    for (; k + 2 * LANES <= n; k += 2 * LANES) {
        even += *(const VEC *)(a + k) * *(const VEC *)(b + k);
        odd += *(const VEC *)(a + k + LANES) * *(const VEC *)(b + k + LANES);
    }
    if (k + LANES <= n) {
        even += *(const VEC *)(a + k) * *(const VEC *)(b + k);
        k += LANES;
    }
    REAL sum = FN(total)(even + odd);
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

/* One chain of multiply-adds over k for each (user, item), so scores do not depend on how users are grouped. */
HMF_INLINE void FN(score_rows)(const int n_users, ptrdiff_t f, const REAL *users, ptrdiff_t apart,
                               const REAL *panel, REAL *out, ptrdiff_t stride) {
    for (ptrdiff_t half = 0; half < HMF_PANEL; half += HMF_COLUMNS * LANES) {
        VEC sum[HMF_USERS][HMF_COLUMNS];
        for (int u = 0; u < n_users; u++)
            for (int c = 0; c < HMF_COLUMNS; c++) sum[u][c] = SPLAT(0);
        for (ptrdiff_t k = 0; k < f; k++) {
            const REAL *items = panel + k * HMF_PANEL + half;
            for (int u = 0; u < n_users; u++) {
                const VEC x = SPLAT(users[u * apart + k]);
                for (int c = 0; c < HMF_COLUMNS; c++) sum[u][c] += x * *(const VEC *)(items + c * LANES);
            }
        }
        for (int u = 0; u < n_users; u++)
            for (int c = 0; c < HMF_COLUMNS; c++) *(VEC *)(out + u * stride + half + c * LANES) = sum[u][c];
    }
}

static void FN(score)(ptrdiff_t n_users, ptrdiff_t f, const REAL *users, ptrdiff_t apart, const REAL *panel,
                      REAL *out, ptrdiff_t stride) {
    for (ptrdiff_t u = 0, take; u < n_users; u += take) {
        const ptrdiff_t left = n_users - u;
        const REAL *const from = users + u * apart;
        REAL *const to = out + u * stride;
        /* a row alone has too few chains to hide their latency */
        take = left >= HMF_USERS && !(HMF_USERS == 3 && left == 4) ? HMF_USERS
               : left >= 4 && HMF_USERS > 4                        ? 4
               : left >= 2                                         ? 2
                                                                   : 1;
        if (take == HMF_USERS)
            FN(score_rows)(HMF_USERS, f, from, apart, panel, to, stride);
        else if (take == 4 && HMF_USERS > 4)
            FN(score_rows)(4, f, from, apart, panel, to, stride);
        else if (take == 2)
            FN(score_rows)(2, f, from, apart, panel, to, stride);
        else
            FN(score_rows)(1, f, from, apart, panel, to, stride);
    }
}

/* First i >= start with scores[i] >= threshold, or n. */
static ptrdiff_t FN(first_at_least)(ptrdiff_t n, const REAL *scores, REAL threshold, ptrdiff_t start) {
    enum { GROUP = 32 };
    ptrdiff_t i = start;
    for (; i + GROUP <= n; i += GROUP) { /* no branch inside: most groups have no such score */
        int any = 0;
        for (int l = 0; l < GROUP; l++) any |= scores[i + l] >= threshold;
        if (any) break;
    }
    for (; i < n; i++)
        if (scores[i] >= threshold) return i;
    return n;
}

/* ---- symmetric rank-k update and Cholesky of one small system -------------------------------------------------
 *
 * A is row-major, ld x ld with ld a multiple of HMF_PAD. Only A[i][j] with j >= i is used; the rest must be finite.
 * Rows and columns from `rank` on are padding: `v` is zero there, so the update leaves them unchanged. Tiles that
 * cross the diagonal also compute a few elements below it, which are never read.
 */

/* A[i0 .. i0 + rows)[j0 .. j0 + columns * LANES) += sign * sum_k v[k][i] v[k][j]. The rows x columns accumulators stay
 * in registers; each v[k][i] is broadcast once for all columns. */
HMF_INLINE void FN(syrk_tile)(const int rows, const int columns, ptrdiff_t n, ptrdiff_t ld, const REAL *v, REAL sign,
                              ptrdiff_t i0, ptrdiff_t j0, REAL *a) {
    VEC sum[HMF_SYRK_ROWS][HMF_SYRK_COLUMNS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < columns; c++) sum[i][c] = SPLAT(0);
    for (ptrdiff_t k = 0; k < n; k++) {
        VEC right[HMF_SYRK_COLUMNS];
        for (int c = 0; c < columns; c++) right[c] = *(const VEC *)(v + k * ld + j0 + c * LANES);
        for (int i = 0; i < rows; i++) {
            const VEC left = SPLAT(v[k * ld + i0 + i]);
            for (int c = 0; c < columns; c++) sum[i][c] += left * right[c];
        }
    }
    const VEC signs = SPLAT(sign);
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < columns; c++) *(VEC *)(a + (i0 + i) * ld + j0 + c * LANES) += signs * sum[i][c];
}

/* `syrk_tile` for rows that start in the middle of a vector: the first column has half the lanes. */
HMF_INLINE void FN(syrk_half_tile)(const int columns, ptrdiff_t n, ptrdiff_t ld, const REAL *v, REAL sign, ptrdiff_t i0,
                                   REAL *a) {
    enum { ROWS = HMF_SYRK_ROWS, HALF = 8 };
    const ptrdiff_t j0 = i0 + HALF;
    ROW half[ROWS];
    VEC sum[ROWS][HMF_SYRK_COLUMNS];
    for (int i = 0; i < ROWS; i++) {
        half[i] = ROW_SPLAT(0);
        for (int c = 0; c < columns; c++) sum[i][c] = SPLAT(0);
    }
    for (ptrdiff_t k = 0; k < n; k++) {
        const REAL *const row = v + k * ld;
        const ROW first = *(const ROW *)(row + i0);
        VEC right[HMF_SYRK_COLUMNS];
        for (int c = 0; c < columns; c++) right[c] = *(const VEC *)(row + j0 + c * LANES);
        for (int i = 0; i < ROWS; i++) {
            half[i] += ROW_SPLAT(row[i0 + i]) * first;
            for (int c = 0; c < columns; c++) sum[i][c] += SPLAT(row[i0 + i]) * right[c];
        }
    }
    for (int i = 0; i < ROWS; i++) {
        REAL *const out = a + (i0 + i) * ld;
        *(ROW *)(out + i0) += ROW_SPLAT(sign) * half[i];
        for (int c = 0; c < columns; c++) *(VEC *)(out + j0 + c * LANES) += SPLAT(sign) * sum[i][c];
    }
}

/* `syrk_upper` for HMF_SYRK_ROWS rows of A, from i0 on. */
static void FN(syrk_rows)(ptrdiff_t n, ptrdiff_t ld, const REAL *v, REAL sign, ptrdiff_t i0, REAL *a) {
    ptrdiff_t j0 = i0 / LANES * LANES;
    if (HMF_SYRK_ROWS == 8 && LANES == 16 && i0 > j0) {
        /* half a vector can take half the time; what it takes along leaves no last tile of one column */
        const ptrdiff_t whole = (ld - i0) / LANES;
        j0 = i0 + 8;
        if (whole == 0)
            FN(syrk_half_tile)(0, n, ld, v, sign, i0, a);
        else if (whole == 1 || whole == 3)
            FN(syrk_half_tile)(1, n, ld, v, sign, i0, a), j0 += LANES;
        else
            FN(syrk_half_tile)(2, n, ld, v, sign, i0, a), j0 += 2 * LANES;
    }
    /* full tiles; halves what exceeds one tile but not two, to avoid a last tile of one column */
    for (ptrdiff_t left = (ld - j0) / LANES; left > 0;) {
        const ptrdiff_t take = left > HMF_SYRK_COLUMNS && left < 2 * HMF_SYRK_COLUMNS ? (left + 1) / 2
                               : left < HMF_SYRK_COLUMNS                               ? left
                                                                                       : HMF_SYRK_COLUMNS;
        if (take == 1)
            FN(syrk_tile)(HMF_SYRK_ROWS, 1, n, ld, v, sign, i0, j0, a);
        else if (take == 2)
            FN(syrk_tile)(HMF_SYRK_ROWS, 2, n, ld, v, sign, i0, j0, a);
        else
            FN(syrk_tile)(HMF_SYRK_ROWS, HMF_SYRK_COLUMNS, n, ld, v, sign, i0, j0, a);
        j0 += take * LANES;
        left -= take;
    }
}

/* Upper part of A += sign * v^T v; v (n, ld) row-major. */
static void FN(syrk_upper)(ptrdiff_t n, ptrdiff_t ld, const REAL *v, REAL sign, REAL *a) {
    for (ptrdiff_t i0 = 0; i0 < ld; i0 += HMF_SYRK_ROWS) FN(syrk_rows)(n, ld, v, sign, i0, a);
}

/* Implicit feedback: c = 1 + alpha |r|, root = sqrt(sign (c - unobserved)) where that is positive, else 0, and
 * target = c where r > 0, else 0 (sign < 0: always 0). Returns the number of weights of the other sign. */
static ptrdiff_t FN(weigh)(ptrdiff_t n, const REAL *ratings, REAL alpha, REAL unobserved, REAL sign, REAL *root,
                           REAL *target) {
    ptrdiff_t opposite = 0;
    for (ptrdiff_t k = 0; k < n; k++) {
        const REAL confidence = 1 + alpha * (ratings[k] < 0 ? -ratings[k] : ratings[k]);
        const REAL weight = sign * (confidence - unobserved);
        root[k] = HMF_SQRT(weight > 0 ? weight : 0);
        target[k] = ratings[k] > 0 && sign > 0 ? confidence : 0;
        opposite += weight < 0;
    }
    return opposite;
}

/* out += sum_k (target[k] + sign * weight[k] * (y_k . p)) y_k over rows columns[k] of `fixed`; weight NULL: 1,
 * target NULL: 0. `rows` of them share each pass over p and out; rows y_ahead, if any, are prefetched in between. */
HMF_INLINE void FN(apply_few)(const int rows, ptrdiff_t rank, const REAL *const *y, const REAL *const *y_ahead,
                              const REAL *weight, const REAL *target, REAL sign, const REAL *p, REAL *out) {
    enum { LINE = 64 / sizeof(REAL) };
    const ptrdiff_t whole = rank / LANES * LANES;
    REAL factor[HMF_WIDE];
    VEC sum[HMF_WIDE];
    for (int r = 0; r < rows; r++) sum[r] = SPLAT(0);
    for (ptrdiff_t j = 0; j < whole; j += LANES) {
        const VEC part = *(const VEC *)(p + j);
        if (y_ahead && j % LINE == 0)
            for (int r = 0; r < rows / 2; r++) HMF_PREFETCH(y_ahead[r] + j);
        for (int r = 0; r < rows; r++) sum[r] += part * *(const VEC *)(y[r] + j);
    }
    if (rows % 4 == 0)
        for (int r = 0; r < rows; r += 4) {
            FOUR four;
            FN(four_totals)(sum + r, &four);
            memcpy(factor + r, &four, sizeof four);
        }
    else
        for (int r = 0; r < rows; r++) factor[r] = FN(total)(sum[r]);
    for (int r = 0; r < rows; r++) {
        for (ptrdiff_t j = whole; j < rank; j++) factor[r] += p[j] * y[r][j];
        factor[r] = (target ? target[r] : 0) + sign * (weight ? weight[r] : 1) * factor[r];
    }
    for (ptrdiff_t j = 0; j < whole; j += LANES) {
        VEC total = *(const VEC *)(out + j);
        if (y_ahead && j % LINE == 0)
            for (int r = rows / 2; r < rows; r++) HMF_PREFETCH(y_ahead[r] + j);
        for (int r = 0; r < rows; r++) total += SPLAT(factor[r]) * *(const VEC *)(y[r] + j);
        *(VEC *)(out + j) = total;
    }
    for (ptrdiff_t j = whole; j < rank; j++)
        for (int r = 0; r < rows; r++) out[j] += factor[r] * y[r][j];
}

/* The same for all rows, of width `vectors` * LANES: `out` stays in registers, and four inner products share shuffles. */
HMF_INLINE void FN(apply_width)(const int vectors, const hmf_rows *rows, const REAL *weight, const REAL *target, REAL sign,
                                const REAL *p, REAL *out) {
    const ptrdiff_t n = rows->n, stride = rows->stride;
    const REAL *const fixed = rows->fixed;
    const int32_t *const columns = rows->columns;
    VEC total[HMF_WIDE];
    HMF_UNROLL
    for (int v = 0; v < vectors; v++) total[v] = *(const VEC *)(out + v * LANES);
    for (ptrdiff_t k = 0; k + HMF_TOGETHER <= n; k += HMF_TOGETHER) {
        const REAL *y[HMF_TOGETHER];
        VEC sum[HMF_TOGETHER];
        for (int r = 0; r < HMF_TOGETHER; r++) {
            y[r] = fixed + columns[k + r] * stride;
            if (k + r + HMF_AHEAD < n)
                FN(prefetch_row)(fixed + columns[k + r + HMF_AHEAD] * stride, vectors * LANES);
            sum[r] = SPLAT(0);
        }
        HMF_UNROLL
        for (int v = 0; v < vectors; v++) {
            const VEC part = *(const VEC *)(p + v * LANES);
            for (int r = 0; r < HMF_TOGETHER; r++) sum[r] += part * *(const VEC *)(y[r] + v * LANES);
        }
        FOUR factor;
        FN(four_totals)(sum, &factor);
        factor *= sign;
        if (weight) factor *= *(const FOUR *)(weight + k);
        if (target) factor += *(const FOUR *)(target + k);
        HMF_UNROLL
        for (int v = 0; v < vectors; v++)
            for (int r = 0; r < HMF_TOGETHER; r++) total[v] += SPLAT(factor[r]) * *(const VEC *)(y[r] + v * LANES);
    }
    HMF_UNROLL
    for (int v = 0; v < vectors; v++) *(VEC *)(out + v * LANES) = total[v];
}

static void FN(apply)(const hmf_rows *rows, const REAL *weight, const REAL *target, REAL sign, const REAL *p,
                      REAL *out) {
    const ptrdiff_t n = rows->n, rank = rows->width, stride = rows->stride;
    const REAL *const fixed = rows->fixed;
    const int32_t *const columns = rows->columns;
    const REAL *y[HMF_WIDE], *ahead[HMF_WIDE];
    ptrdiff_t k = n / HMF_TOGETHER * HMF_TOGETHER;
    if (rank == 2 * LANES) FN(apply_width)(2, rows, weight, target, sign, p, out);
    else if (rank == 4 * LANES) FN(apply_width)(4, rows, weight, target, sign, p, out);
    else if (rank == HMF_WIDE * LANES) FN(apply_width)(HMF_WIDE, rows, weight, target, sign, p, out);
    else k = 0;
    for (; k + HMF_WIDE <= n; k += HMF_WIDE) {
        for (int r = 0; r < HMF_WIDE; r++) {
            y[r] = fixed + columns[k + r] * stride;
            ahead[r] = fixed + columns[k + r + HMF_WIDE < n ? k + r + HMF_WIDE : n - 1] * stride;
        }
        FN(apply_few)(HMF_WIDE, rank, y, ahead, weight ? weight + k : NULL, target ? target + k : NULL, sign, p, out);
    }
    for (; k < n; k++) {
        y[0] = fixed + columns[k] * stride;
        FN(apply_few)(1, rank, y, NULL, weight ? weight + k : NULL, target ? target + k : NULL, sign, p, out);
    }
}

/* out += sum_k coefficient[k] * row k of a row-major n x rank matrix, HMF_TOGETHER rows at a time. */
static void FN(combine)(ptrdiff_t n, ptrdiff_t rank, const REAL *rows, const REAL *coefficient, REAL *out) {
    const ptrdiff_t whole = rank / LANES * LANES;
    ptrdiff_t k = 0;
    for (; k + HMF_TOGETHER <= n; k += HMF_TOGETHER) {
        const REAL *row = rows + k * rank;
        for (ptrdiff_t j = 0; j < whole; j += LANES) {
            VEC total = *(const VEC *)(out + j);
            for (int r = 0; r < HMF_TOGETHER; r++)
                total += SPLAT(coefficient[k + r]) * *(const VEC *)(row + r * rank + j);
            *(VEC *)(out + j) = total;
        }
        for (ptrdiff_t j = whole; j < rank; j++)
            for (int r = 0; r < HMF_TOGETHER; r++) out[j] += coefficient[k + r] * row[r * rank + j];
    }
    for (; k < n; k++) FN(axpy)(rank, coefficient[k], rows + k * rank, out);
}

/* v[k] = root[k] * (rank elements at fixed + columns[k] * stride; root NULL: 1), padded with zeros to ld;
 * b += target[k] * those elements. */
HMF_INLINE void FN(gather_few)(const int rows, ptrdiff_t rank, ptrdiff_t ld, const REAL *const *y, const REAL *root,
                               const REAL *target, REAL *v, REAL *b) {
    const ptrdiff_t whole = rank / LANES * LANES;
    VEC scale[HMF_TOGETHER], weight[HMF_TOGETHER];
    for (int r = 0; r < rows; r++) {
        scale[r] = SPLAT(root ? root[r] : (REAL)1);
        weight[r] = SPLAT(target[r]);
    }
    for (ptrdiff_t j = 0; j < whole; j += LANES) {
        VEC total = *(const VEC *)(b + j);
        for (int r = 0; r < rows; r++) {
            const VEC part = *(const VEC *)(y[r] + j);
            *(VEC *)(v + r * ld + j) = scale[r] * part;
            total += weight[r] * part;
        }
        *(VEC *)(b + j) = total;
    }
    for (ptrdiff_t j = whole; j < rank; j++)
        for (int r = 0; r < rows; r++) {
            v[r * ld + j] = LANE(scale[r], 0) * y[r][j];
            b[j] += LANE(weight[r], 0) * y[r][j];
        }
    for (int r = 0; r < rows; r++)
        for (ptrdiff_t j = rank; j < ld; j++) v[r * ld + j] = 0;
}

static void FN(gather)(const hmf_rows *rows, ptrdiff_t n_ahead, ptrdiff_t ld, const REAL *root, const REAL *target,
                       REAL *v, REAL *b) {
    const ptrdiff_t n = rows->n, rank = rows->width, stride = rows->stride;
    const REAL *const fixed = rows->fixed;
    const int32_t *const columns = rows->columns;
    const REAL *y[HMF_TOGETHER];
    ptrdiff_t k = 0;
    for (; k + HMF_TOGETHER <= n; k += HMF_TOGETHER) {
        for (int r = 0; r < HMF_TOGETHER; r++) {
            y[r] = fixed + columns[k + r] * stride;
            if (k + r + HMF_AHEAD < n_ahead) FN(prefetch_row)(fixed + columns[k + r + HMF_AHEAD] * stride, rank);
        }
        FN(gather_few)(HMF_TOGETHER, rank, ld, y, root ? root + k : NULL, target + k, v + k * ld, b);
    }
    for (; k < n; k++) {
        y[0] = fixed + columns[k] * stride;
        FN(gather_few)(1, rank, ld, y, root ? root + k : NULL, target + k, v + k * ld, b);
    }
}

/* ---- inner products of a row's entries ------------------------------------------------------------------------ */

/* rows x 4 inner products, from element (i0, j0) of a on. Pointers beyond the last entry repeat it. */
HMF_INLINE void FN(products_tile)(const int rows, ptrdiff_t width, const REAL *const *left, const REAL *const *right,
                                  ptrdiff_t ld, REAL *a) {
    const ptrdiff_t whole = width / LANES * LANES;
    VEC sum[HMF_PRODUCT_ROWS][4];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < 4; c++) sum[i][c] = SPLAT(0);
    for (ptrdiff_t k = 0; k < whole; k += LANES) {
        VEC y[4];
        for (int c = 0; c < 4; c++) y[c] = *(const VEC *)(right[c] + k);
        for (int i = 0; i < rows; i++) {
            const VEC x = *(const VEC *)(left[i] + k);
            for (int c = 0; c < 4; c++) sum[i][c] += x * y[c];
        }
    }
    for (int i = 0; i < rows; i++) {
        FOUR total;
        FN(four_totals)(sum[i], &total);
        for (ptrdiff_t k = whole; k < width; k++)
            total += (left[i][k] - (FOUR){0}) * (FOUR){right[0][k], right[1][k], right[2][k], right[3][k]};
        memcpy(a + i * ld, &total, sizeof total);
    }
}

/* a = S (Y Y^T + shift) S + ridge I, upper part, row-major, ld x ld with ld >= n a multiple of HMF_PAD; rows from n on
 * are those of the unit matrix. root (ld,): S, zero from n on. */
static void FN(products)(const hmf_rows *given, const REAL *root, REAL shift, REAL ridge, ptrdiff_t ld, REAL *a) {
    const ptrdiff_t n = given->n, width = given->width, stride = given->stride;
    const REAL *const fixed = given->fixed;
    const int32_t *const columns = given->columns;
    const REAL *y[HMF_PRODUCT_ROWS], *right[4];
    memset(a, 0, ld * ld * sizeof(REAL));
    for (ptrdiff_t i0 = 0; i0 < n; i0 += HMF_PRODUCT_ROWS) {
        const ptrdiff_t rows = n - i0 < HMF_PRODUCT_ROWS ? n - i0 : HMF_PRODUCT_ROWS;
        for (ptrdiff_t i = 0; i < rows; i++) y[i] = fixed + columns[i0 + i] * stride;
        for (ptrdiff_t j0 = i0 / 4 * 4; j0 < n; j0 += 4) {
            for (ptrdiff_t c = 0; c < 4; c++) right[c] = fixed + columns[j0 + c < n ? j0 + c : n - 1] * stride;
            if (rows == HMF_PRODUCT_ROWS)
                FN(products_tile)(HMF_PRODUCT_ROWS, width, y, right, ld, a + i0 * ld + j0);
            else
                for (ptrdiff_t i = 0; i < rows; i++)
                    FN(products_tile)(1, width, y + i, right, ld, a + (i0 + i) * ld + j0);
        }
        for (ptrdiff_t i = i0; i < i0 + rows; i++) {
            for (ptrdiff_t j = i0 / 4 * 4; j < ld; j += 4) {
                FOUR *at = (FOUR *)(a + i * ld + j);
                *at = (root[i] - (FOUR){0}) * *(const FOUR *)(root + j) * (*at + shift);
            }
            a[i * ld + i] += ridge;
        }
    }
    for (ptrdiff_t i = n; i < ld; i++) a[i * ld + i] = 1;
}

/* out = sum_k coefficient[k] y_k, `width` elements. */
static void FN(sum_rows)(const hmf_rows *rows, const REAL *coefficient, REAL *out) {
    const ptrdiff_t n = rows->n, width = rows->width, stride = rows->stride;
    const REAL *const fixed = rows->fixed;
    const int32_t *const columns = rows->columns;
    enum { PART = 4 }; /* vectors of `out` in registers at a time */
    ptrdiff_t j = 0;
    for (; j + PART * LANES <= width; j += PART * LANES) {
        VEC sum[PART];
        for (int c = 0; c < PART; c++) sum[c] = SPLAT(0);
        for (ptrdiff_t k = 0; k < n; k++)
            for (int c = 0; c < PART; c++)
                sum[c] += SPLAT(coefficient[k]) * *(const VEC *)(fixed + columns[k] * stride + j + c * LANES);
        for (int c = 0; c < PART; c++) *(VEC *)(out + j + c * LANES) = sum[c];
    }
    for (; j < width; j++) {
        out[j] = 0;
        for (ptrdiff_t k = 0; k < n; k++) out[j] += coefficient[k] * fixed[columns[k] * stride + j];
    }
}

static void FN(prefetch_rows)(const hmf_rows *rows) {
    const ptrdiff_t n = rows->n, width = rows->width, stride = rows->stride;
    const REAL *const fixed = rows->fixed;
    const int32_t *const columns = rows->columns;
    for (ptrdiff_t k = 0; k < n; k++) FN(prefetch_row)(fixed + columns[k] * stride, width);
}

_Static_assert(HMF_SYSTEMS == 2, "cholesky takes one system or HMF_SYSTEMS of them");

/* A = U^T U for up to HMF_SYSTEMS systems side by side. A single system is one chain of square roots and divisions that
 * leaves the processor idle; several chains fill it. U overwrites the upper part of A, HMF_BLOCK rows at a time: first
 * one long symmetric update by all earlier rows, so that A is read and written once, then the diagonal block, then the
 * rest of the rows. z = U^-T b is computed along the way.
 */

/* Diagonal blocks of `count` systems, in registers: u (row-major, j >= p), inverse[p] = 1 / u[p][p] and z = u^-T b,
 * which waits for nothing that the pivots do not wait for. A pivot of at most epsilon times its diagonal element, or
 * one that is not finite, sets status and is replaced by 1. */
HMF_INLINE void FN(factor_blocks)(const int count, ptrdiff_t k0, ptrdiff_t ld, REAL *const *a, REAL *const *b,
                                  REAL (*u)[HMF_BLOCK][HMF_BLOCK], REAL (*inverse)[HMF_BLOCK],
                                  REAL *const *diagonal, REAL epsilon, REAL *const *z, ptrdiff_t *status) {
    ROW row[HMF_SYSTEMS][HMF_BLOCK], right[HMF_SYSTEMS];
    for (int s = 0; s < count; s++) {
        right[s] = *(const ROW *)(b[s] + k0);
        HMF_UNROLL for (int p = 0; p < HMF_BLOCK; p++) row[s][p] = *(const ROW *)(a[s] + (k0 + p) * ld + k0);
    }
    HMF_UNROLL for (int k = 0; k < HMF_BLOCK; k++) {
        for (int s = 0; s < count; s++) {
            REAL pivot = ROW_LANE(row[s][k], k);
            if (!(pivot > epsilon * diagonal[s][k0 + k] && pivot <= (REAL)HMF_HUGE)) {
                if (!status[s]) status[s] = pivot <= (REAL)HMF_HUGE ? k0 + k + 1 : -1;
                pivot = 1;
            }
            inverse[s][k] = 1 / HMF_SQRT(pivot);
            row[s][k] *= ROW_SPLAT(inverse[s][k]);
        }
        for (int s = 0; s < count; s++) {
            HMF_UNROLL for (int i = k + 1; i < HMF_BLOCK; i++)
                row[s][i] -= ROW_SPLAT(ROW_LANE(row[s][k], i)) * row[s][k];
            z[s][k0 + k] = ROW_LANE(right[s], k) * inverse[s][k];
            right[s] -= ROW_SPLAT(z[s][k0 + k]) * row[s][k];
        }
    }
    for (int s = 0; s < count; s++)
        HMF_UNROLL for (int p = 0; p < HMF_BLOCK; p++) *(ROW *)u[s][p] = row[s][p];
}

/* Columns from `start` (a multiple of LANES) of a panel's rows: U_panel = U_block^-T A_panel, and b -= z U_panel. */
static void FN(solve_panel)(ptrdiff_t start, ptrdiff_t ld, REAL (*d)[HMF_BLOCK], const REAL *inverse, const REAL *z,
                            REAL *panel, REAL *b) {
    REAL scaled[HMF_BLOCK][HMF_BLOCK]; /* takes the multiplication by the inverse out of the dependency chain */
    for (int p = 0; p < HMF_BLOCK; p++)
        for (int q = 0; q < HMF_BLOCK; q++) scaled[p][q] = d[p][q] * inverse[p];
    for (ptrdiff_t j = start; j < ld; j += LANES) {
        VEC x[HMF_BLOCK], carried = *(const VEC *)(b + j);
        HMF_UNROLL for (int p = 0; p < HMF_BLOCK; p++) x[p] = *(const VEC *)(panel + p * ld + j);
        HMF_UNROLL for (int p = 0; p < HMF_BLOCK; p++)
            HMF_UNROLL for (int q = p + 1; q < HMF_BLOCK; q++) x[q] -= SPLAT(scaled[p][q]) * x[p];
        HMF_UNROLL for (int p = 0; p < HMF_BLOCK; p++) {
            x[p] *= SPLAT(inverse[p]);
            carried -= SPLAT(z[p]) * x[p];
            *(VEC *)(panel + p * ld + j) = x[p];
        }
        *(VEC *)(b + j) = carried;
    }
}

/* Sums of the elements of each of 8 vectors. */
HMF_INLINE void FN(eight_totals)(const ROW *v, ROW *out) {
    ROW two[4], four[2];
    HMF_UNROLL for (int i = 0; i < 4; i++)
        two[i] = ROW_SHUFFLE(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                 ROW_SHUFFLE(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    HMF_UNROLL for (int i = 0; i < 2; i++)
        four[i] = ROW_SHUFFLE(two[2 * i], two[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  ROW_SHUFFLE(two[2 * i], two[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    *out = ROW_SHUFFLE(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           ROW_SHUFFLE(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* Panel k0 of x = U^-1 z, given x from k0 + HMF_BLOCK on: eight inner products at a time, then a small triangle. Vectors
 * of x are as long as a block, so that a load gets what one store wrote. */
HMF_INLINE void FN(backward_block)(ptrdiff_t k0, ptrdiff_t whole, ptrdiff_t ld, const REAL *a, const REAL *z,
                                   const REAL *inverse, REAL *x) {
    ROW sum[HMF_BLOCK], solved;
    HMF_UNROLL for (int p = 0; p < HMF_BLOCK; p++) sum[p] = ROW_SPLAT(0);
    for (ptrdiff_t j = whole - HMF_BLOCK; j > k0; j -= HMF_BLOCK) { /* the latest block of x last */
        const ROW known = *(const ROW *)(x + j);
        HMF_UNROLL for (int p = 0; p < HMF_BLOCK; p++) sum[p] += *(const ROW *)(a + (k0 + p) * ld + j) * known;
    }
    ROW rest;
    FN(eight_totals)(sum, &rest);
    rest = *(const ROW *)(z + k0) - rest;
    HMF_UNROLL for (int p = HMF_BLOCK - 1; p >= 0; p--) {
        REAL value = ROW_LANE(rest, p);
        HMF_UNROLL for (int q = HMF_BLOCK - 1; q > p; q--) value -= a[(k0 + p) * ld + k0 + q] * ROW_LANE(solved, q);
        ROW_LANE(solved, p) = value * inverse[k0 + p];
    }
    *(ROW *)(x + k0) = solved;
}

/* Solve A x = b for each of `count` systems, in place; b, x (ld,), work (count * 3 * ld,). status[s]: 0, the order of
 * the first leading minor that is not positive to working precision, or -1 for a pivot that is not finite. */
static void FN(cholesky)(int count, ptrdiff_t rank, REAL *const *a, REAL *const *b, REAL epsilon, REAL *work,
                         REAL *const *x, ptrdiff_t *status) {
    const ptrdiff_t ld = (rank + HMF_PAD - 1) / HMF_PAD * HMF_PAD;
    REAL u[HMF_SYSTEMS][HMF_BLOCK][HMF_BLOCK] HMF_ALIGNED, inverse[HMF_SYSTEMS][HMF_BLOCK];
    REAL *z[HMF_SYSTEMS], *inverses[HMF_SYSTEMS], *diagonal[HMF_SYSTEMS];
    const ptrdiff_t whole = (rank + HMF_BLOCK - 1) / HMF_BLOCK * HMF_BLOCK;
    for (int s = 0; s < count; s++) {
        z[s] = work + s * 3 * ld;
        inverses[s] = z[s] + ld;
        diagonal[s] = z[s] + 2 * ld;
        status[s] = 0;
        for (ptrdiff_t k = rank; k < whole; k++) a[s][k * ld + k] = 1; /* padding: x = 0 there */
        for (ptrdiff_t k = 0; k < whole; k++) diagonal[s][k] = a[s][k * ld + k];
    }
    for (ptrdiff_t k0 = 0; k0 < whole; k0 += HMF_BLOCK) {
        for (int s = 0; s < count && k0; s++)
            for (ptrdiff_t i0 = k0; i0 < k0 + HMF_BLOCK; i0 += HMF_SYRK_ROWS)
                FN(syrk_rows)(k0, ld, a[s], -1, i0, a[s]);
        if (count == HMF_SYSTEMS)
            FN(factor_blocks)(HMF_SYSTEMS, k0, ld, a, b, u, inverse, diagonal, epsilon, z, status);
        else
            FN(factor_blocks)(1, k0, ld, a, b, u, inverse, diagonal, epsilon, z, status);
        for (int s = 0; s < count; s++) memcpy(inverses[s] + k0, inverse[s], sizeof inverse[s]);
        for (int s = 0; s < count; s++)
            FN(solve_panel)(k0 / LANES * LANES, ld, u[s], inverse[s], z[s] + k0, a[s] + k0 * ld, b[s]);
    }
    for (int s = 0; s < count; s++)
        for (ptrdiff_t j = 0; j < ld; j++) x[s][j] = 0;
    for (ptrdiff_t k0 = whole - HMF_BLOCK; k0 >= 0; k0 -= HMF_BLOCK)
        for (int s = 0; s < count; s++) FN(backward_block)(k0, whole, ld, a[s], z[s], inverses[s], x[s]);
}

_Static_assert(HMF_LANES == 8, "lanes of ROW, and what four_by_four and to_lanes exchange");

/* ---- Cholesky of HMF_LANES small systems, one in each lane ------------------------------------------------------
 *
 * One instruction computes a square root, a division or a multiply-add for all systems, so the chain of pivots costs an
 * eighth per system, and no lane idles in the triangle. l holds row j of L = U^T in whole blocks, (j / HMF_BLOCK + 1) *
 * HMF_BLOCK vectors; the right-hand sides are one more row, which the factorization turns into z = L^-1 b.
 */
/* Largest rank with a gain. Lanes that take several registers lose at higher ranks: doubles with AVX2 took 1.04 times
 * as long at f = 32, and 1.24 times at 64. */
enum { FN(LANES_RANK) = sizeof(ROW) <= HMF_BYTES ? HMF_LANES_RANK : 16 };

HMF_INLINE ROW *FN(lane_row)(ROW *l, ptrdiff_t j) {
    const ptrdiff_t block = j / HMF_BLOCK, length = HMF_BLOCK * (block + 1);
    return l + length * (HMF_BLOCK * block / 2 + j % HMF_BLOCK);
}

/* out[k][to + s] = in[s][at + k] for k, s < 4 */
HMF_INLINE void FN(four_by_four)(const REAL *const *in, ptrdiff_t at, REAL *const *out, ptrdiff_t to) {
    FOUR x[4], y[4];
    for (int s = 0; s < 4; s++) x[s] = *(const FOUR *)(in[s] + at);
    for (int s = 0; s < 4; s += 2) {
        y[s] = HMF_SHUFFLE(x[s], x[s + 1], 0, 4, 1, 5);
        y[s + 1] = HMF_SHUFFLE(x[s], x[s + 1], 2, 6, 3, 7);
    }
    for (int k = 0; k < 2; k++) {
        *(FOUR *)(out[2 * k] + to) = HMF_SHUFFLE(y[k], y[k + 2], 0, 1, 4, 5);
        *(FOUR *)(out[2 * k + 1] + to) = HMF_SHUFFLE(y[k], y[k + 2], 2, 3, 6, 7);
    }
}

/* l[j][i] of all lanes = a[s][i][j], in whole blocks up to the one on the diagonal. Transposes 8 x 8 elements at a time
 * by exchanges between vectors that are 1, 2 and 4 apart. */
HMF_INLINE void FN(to_lanes)(ptrdiff_t whole, ptrdiff_t ld, REAL *const *a, ROW *l) {
    for (ptrdiff_t j = 0; j < whole; j += HMF_BLOCK) {
        ROW *const row = FN(lane_row)(l, j);
        for (ptrdiff_t i = 0; i < j + HMF_BLOCK; i++) {
            ROW x[8], y[8];
            HMF_UNROLL for (int s = 0; s < 8; s++) x[s] = *(const ROW *)(a[s] + i * ld + j);
            HMF_UNROLL for (int s = 0; s < 8; s += 2) {
                y[s] = ROW_SHUFFLE(x[s], x[s + 1], 0, 8, 2, 10, 4, 12, 6, 14);
                y[s + 1] = ROW_SHUFFLE(x[s], x[s + 1], 1, 9, 3, 11, 5, 13, 7, 15);
            }
            HMF_UNROLL for (int s = 0; s < 8; s++) {
                if (s % 4 >= 2) continue;
                x[s] = ROW_SHUFFLE(y[s], y[s + 2], 0, 1, 8, 9, 4, 5, 12, 13);
                x[s + 2] = ROW_SHUFFLE(y[s], y[s + 2], 2, 3, 10, 11, 6, 7, 14, 15);
            }
            HMF_UNROLL for (int s = 0; s < 4; s++) {
                row[s * (j + HMF_BLOCK) + i] = ROW_SHUFFLE(x[s], x[s + 4], 0, 1, 2, 3, 8, 9, 10, 11);
                row[(s + 4) * (j + HMF_BLOCK) + i] = ROW_SHUFFLE(x[s], x[s + 4], 4, 5, 6, 7, 12, 13, 14, 15);
            }
        }
    }
}

/* sum[r][c] -= sum_k row[r][k] column[c][k] over k < n, n a multiple of 4 */
HMF_INLINE void FN(lane_tile)(const int rows, ptrdiff_t n, ROW *const *row, ROW *const *column, ROW (*sum)[4]) {
    for (ptrdiff_t k0 = 0; k0 < n; k0 += 4)
        HMF_UNROLL for (ptrdiff_t k = k0; k < k0 + 4; k++) {
            ROW left[2];
            HMF_UNROLL for (int r = 0; r < rows; r++) left[r] = row[r][k];
            HMF_UNROLL for (int c = 0; c < 4; c++) {
                const ROW right = column[c][k];
                HMF_UNROLL for (int r = 0; r < rows; r++) sum[r][c] -= left[r] * right;
            }
        }
}

/* Columns i0 .. i0 + 4 of `rows` rows below the block on the diagonal. */
HMF_INLINE void FN(lane_rows)(const int rows, ptrdiff_t i0, ROW *const *row, ROW *const *column, const ROW *inverse) {
    ROW sum[2][4];
    HMF_UNROLL for (int r = 0; r < rows; r++)
        HMF_UNROLL for (int c = 0; c < 4; c++) sum[r][c] = row[r][i0 + c];
    FN(lane_tile)(rows, i0, row, column, sum);
    HMF_UNROLL for (int c = 0; c < 4; c++)
        HMF_UNROLL for (int r = 0; r < rows; r++) {
            HMF_UNROLL for (int q = 0; q < c; q++) sum[r][c] -= sum[r][q] * column[c][i0 + q];
            sum[r][c] *= inverse[c];
            row[r][i0 + c] = sum[r][c];
        }
}

/* The block on the diagonal and inverse roots of its pivots. A lane of `bad` is not zero if a pivot is at most epsilon
 * times its diagonal element, or not finite. */
HMF_INLINE void FN(lane_diagonal)(ptrdiff_t i0, ROW *const *column, REAL epsilon, ROW *pivot, ROW *inverse,
                                  FN(row_mask) *bad) {
    ROW d[4][4], least[4];
    HMF_UNROLL for (int r = 0; r < 4; r++) {
        HMF_UNROLL for (int c = 0; c < 4; c++) d[r][c] = column[r][i0 + c];
        least[r] = ROW_SPLAT(epsilon) * d[r][r];
    }
    FN(lane_tile)(2, i0, column, column, d);
    FN(lane_tile)(2, i0, column + 2, column, d + 2);
    *bad = (FN(row_mask)){0};
    HMF_UNROLL for (int c = 0; c < 4; c++) {
        pivot[c] = d[c][c];
        *bad |= ~((pivot[c] > least[c]) & (pivot[c] <= ROW_SPLAT((REAL)HMF_HUGE)));
        HMF_UNROLL for (int s = 0; s < HMF_LANES; s++) inverse[c][s] = 1 / HMF_SQRT(d[c][c][s]);
        HMF_UNROLL for (int r = c + 1; r < 4; r++) column[r][i0 + c] = d[r][c] *= inverse[c];
        HMF_UNROLL for (int r = c + 1; r < 4; r++)
            HMF_UNROLL for (int q = c + 1; q <= r; q++) d[r][q] -= d[r][c] * d[q][c];
    }
}

/* x = L^-T z, in place, four rows at a time. */
HMF_INLINE void FN(lane_backward)(ptrdiff_t whole, ROW *l, const ROW *inverse, ROW *x) {
    for (ptrdiff_t j0 = whole - 4; j0 >= 0; j0 -= 4) {
        ROW *row[4], part[4];
        for (int r = 0; r < 4; r++) {
            row[r] = FN(lane_row)(l, j0 + r);
            part[r] = x[j0 + r];
        }
        for (int r = 3; r >= 0; r--) {
            for (int q = r + 1; q < 4; q++) part[r] -= row[q][j0 + r] * part[q];
            part[r] *= inverse[j0 + r];
            x[j0 + r] = part[r];
        }
        for (ptrdiff_t k = 0; k < j0; k++) {
            ROW rest = x[k];
            HMF_UNROLL for (int r = 0; r < 4; r++) rest -= row[r][k] * part[r];
            x[k] = rest;
        }
    }
}

/* Solve A x = b for each of `count` systems; see kernels.h. */
static void FN(cholesky_lanes)(int count, ptrdiff_t rank, REAL *const *a, REAL *const *b, REAL epsilon, REAL *work,
                               REAL *const *x, ptrdiff_t *status) {
    const ptrdiff_t ld = (rank + HMF_PAD - 1) / HMF_PAD * HMF_PAD;
    const ptrdiff_t whole = (rank + HMF_BLOCK - 1) / HMF_BLOCK * HMF_BLOCK;
    ROW *z = (ROW *)work, *inverse = z + whole, *l = inverse + whole;
    REAL *systems[HMF_LANES], *sides[HMF_LANES], nowhere[HMF_LANES_RANK];
    REAL *solutions[HMF_LANES];
    for (int s = 0; s < HMF_LANES; s++) { /* lanes without a system repeat the first one */
        systems[s] = a[s < count ? s : 0];
        sides[s] = b[s < count ? s : 0];
        solutions[s] = s < count ? x[s] : nowhere;
        for (ptrdiff_t k = rank; k < whole; k++) systems[s][k * ld + k] = 1; /* padding: x = 0 there */
    }
    for (int s = 0; s < count; s++) status[s] = 0;
    FN(to_lanes)(whole, ld, systems, l);
    for (ptrdiff_t k = 0; k < whole; k += 4) {
        REAL *rows[4];
        for (int c = 0; c < 4; c++) rows[c] = (REAL *)(z + k + c);
        for (int s = 0; s < HMF_LANES; s += 4) FN(four_by_four)((const REAL *const *)sides + s, k, rows, s);
    }
    for (ptrdiff_t i0 = 0; i0 < whole; i0 += 4) {
        ROW *column[4], pivot[4];
        FN(row_mask) bad;
        int any = 0;
        for (int c = 0; c < 4; c++) column[c] = FN(lane_row)(l, i0 + c);
        FN(lane_diagonal)(i0, column, epsilon, pivot, inverse + i0, &bad);
        for (int s = 0; s < HMF_LANES; s++) any |= bad[s] != 0;
        if (any)
            for (int s = 0; s < count; s++)
                for (int c = 0; c < 4; c++) {
                    const REAL p = ROW_LANE(pivot[c], s);
                    if (!status[s] && !(p > epsilon * a[s][(i0 + c) * (ld + 1)] && p <= (REAL)HMF_HUGE))
                        status[s] = p <= (REAL)HMF_HUGE ? i0 + c + 1 : -1;
                }
        for (ptrdiff_t j = i0 + 4; j < whole; j += 2) {
            ROW *const row[2] = {FN(lane_row)(l, j), FN(lane_row)(l, j + 1)};
            FN(lane_rows)(2, i0, row, column, inverse + i0);
        }
        ROW *const row[1] = {z};
        FN(lane_rows)(1, i0, row, column, inverse + i0);
    }
    FN(lane_backward)(whole, l, inverse, z);
    for (ptrdiff_t k = 0; k < whole; k += 4)
        for (int s = 0; s < HMF_LANES; s += 4) {
            const REAL *rows[4];
            for (int c = 0; c < 4; c++) rows[c] = (const REAL *)(z + k + c);
            FN(four_by_four)(rows, s, solutions + s, k);
        }
}

#include "sgd_impl.h"

#undef FN
#undef VEC
#undef LANES
#undef SPLAT
#undef LANE
#undef ROW
#undef FOUR
#undef EIGHT
#undef ROW_SPLAT
#undef ROW_LANE
#undef REAL
#undef TYPE
#undef INTEGER
#undef HMF_SQRT
#undef HMF_HUGE
