/* sgd_impl.h - updates of stochastic gradient descent; included at the end of kernels_impl.h, whose names it uses.
 *
 * Rows of factors are ld elements apart, whole cache lines, from an aligned base; elements from the rank on are zero
 * and stay zero. An update computes both rows from their old values (MSGD eq. 3). It adds rate_b (e - lambda_b b) to
 * biases, which have their own learning rate and penalty.
 * Every function returns the sum of e^2, with each error taken before its update.
 */
#ifndef HMF_SGD_COMMON
#define HMF_SGD_COMMON
enum {
    HMF_SGD_AHEAD = 12, /* entries between the prefetch of their rows and their update */
    HMF_LARGEST_ROW = 2048 + 64, /* elements: MAX_FACTORS of core/validate.py, padded */
    HMF_SGD_SLOTS = 16  /* rows that `sgd_rows` interleaves, so that their dependency chains overlap */
};
#define HMF_PREFETCH_WRITE(address) __builtin_prefetch((address), 1)

/* The sum of the lanes is on the critical path of every update. Swapping and adding halves, quarters, ... in registers
 * leaves it in all lanes. `total` goes through memory: at f = 32 an update takes 3.9 ns instead of 3.4. */
#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define HMF_SHUFFLES 1
#endif
#endif
#define HMF_SWAP __builtin_shufflevector
#define HMF_SUM_2(v) v += HMF_SWAP(v, v, 1, 0)
#define HMF_SUM_4(v) (v += HMF_SWAP(v, v, 2, 3, 0, 1), v += HMF_SWAP(v, v, 1, 0, 3, 2))
#define HMF_SUM_8(v)                                                                              \
    (v += HMF_SWAP(v, v, 4, 5, 6, 7, 0, 1, 2, 3), v += HMF_SWAP(v, v, 2, 3, 0, 1, 6, 7, 4, 5),     \
     v += HMF_SWAP(v, v, 1, 0, 3, 2, 5, 4, 7, 6))
#define HMF_SUM_16(v)                                                                             \
    (v += HMF_SWAP(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7),                    \
     v += HMF_SWAP(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11),                    \
     v += HMF_SWAP(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13),                    \
     v += HMF_SWAP(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#if HMF_BYTES == 64
#define HMF_SUM_f HMF_SUM_16
#define HMF_SUM_d HMF_SUM_8
#elif HMF_BYTES == 32
#define HMF_SUM_f HMF_SUM_8
#define HMF_SUM_d HMF_SUM_4
#else
#define HMF_SUM_f HMF_SUM_4
#define HMF_SUM_d HMF_SUM_2
#endif
#endif

HMF_INLINE void FN(prefetch_to_write)(const REAL *row, const int vectors) {
    for (int byte = 0; byte < vectors * HMF_BYTES; byte += 64) HMF_PREFETCH_WRITE((const char *)row + byte);
}

/* x . y in every lane, for rows of `vectors` vectors, a constant for the unrolled widths */
HMF_INLINE VEC FN(sgd_dot)(const int vectors, const REAL *x, const REAL *y) {
    VEC even = SPLAT(0), odd = SPLAT(0);
    for (int v = 0; v + 1 < vectors; v += 2) {
        even += *(const VEC *)(x + v * LANES) * *(const VEC *)(y + v * LANES);
        odd += *(const VEC *)(x + (v + 1) * LANES) * *(const VEC *)(y + (v + 1) * LANES);
    }
    if (vectors % 2) even += *(const VEC *)(x + (vectors - 1) * LANES) * *(const VEC *)(y + (vectors - 1) * LANES);
    even += odd;
#ifdef HMF_SHUFFLES
    HMF_CAT(HMF_SUM_, TYPE)(even);
    return even;
#else
    return SPLAT(FN(total)(even));
#endif
}

/* Shrinkage of a value in one step: 1 - rate lambda. */
HMF_INLINE REAL FN(sgd_keep)(double rate, double penalty) { return (REAL)(1.0 - rate * penalty); }

/* ---- both rows of an entry ------------------------------------------------------------------------------------ */

HMF_INLINE double FN(plain_entries_of)(const int vectors, const hmf_sgd_entries *entries, const hmf_sgd_side *user_side,
                                       const hmf_sgd_side *item_side, const hmf_sgd_terms *terms) {
    const ptrdiff_t n = entries->n, ld = terms->ld;
    const int32_t *const users = entries->users, *const items = entries->items;
    const REAL *const ratings = entries->ratings;
    REAL *const x = user_side->rows, *const y = item_side->rows;
    REAL *const user_bias = user_side->bias, *const item_bias = item_side->bias;
    const REAL rate = (REAL)terms->rate, keep = FN(sgd_keep)(terms->rate, terms->penalty), mean = (REAL)terms->mean;
    const REAL bias_rate = (REAL)terms->bias_rate, bias_keep = FN(sgd_keep)(terms->bias_rate, terms->bias_penalty);
    double loss = 0;
    for (ptrdiff_t k = 0; k < n; k++) {
        if (k + HMF_SGD_AHEAD < n) {
            FN(prefetch_to_write)(x + users[k + HMF_SGD_AHEAD] * ld, vectors);
            FN(prefetch_to_write)(y + items[k + HMF_SGD_AHEAD] * ld, vectors);
        }
        REAL *a = x + users[k] * ld, *b = y + items[k] * ld;
        VEC error = SPLAT(ratings[k] - mean) - FN(sgd_dot)(vectors, a, b);
        if (user_bias) {
            REAL *p = user_bias + users[k], *q = item_bias + items[k];
            error -= SPLAT(*p + *q);
            *p = bias_keep * *p + bias_rate * LANE(error, 0);
            *q = bias_keep * *q + bias_rate * LANE(error, 0);
        }
        loss += (double)LANE(error, 0) * LANE(error, 0);
        const VEC step = rate * error, shrink = SPLAT(keep);
        for (int v = 0; v < vectors; v++) {
            const VEC p = *(const VEC *)(a + v * LANES), q = *(const VEC *)(b + v * LANES);
            *(VEC *)(a + v * LANES) = shrink * p + step * q;
            *(VEC *)(b + v * LANES) = shrink * q + step * p;
        }
    }
    return loss;
}

static double FN(plain_entries)(const hmf_sgd_entries *entries, const hmf_sgd_side *user, const hmf_sgd_side *item,
                                const hmf_sgd_terms *terms) {
#define HMF_WIDTH(vectors) \
    case vectors:          \
        return FN(plain_entries_of)(vectors, entries, user, item, terms)
    switch (terms->ld / LANES) {
        HMF_WIDTH(1);
        HMF_WIDTH(2);
        HMF_WIDTH(3);
        HMF_WIDTH(4);
        HMF_WIDTH(5);
        HMF_WIDTH(6);
        HMF_WIDTH(7);
        HMF_WIDTH(8);
        HMF_WIDTH(16);
    }
#undef HMF_WIDTH
    return FN(plain_entries_of)((int)(terms->ld / LANES), entries, user, item, terms);
}

/* ---- the rows of one side, the other side fixed (MSGD eqs. 15 and 16) ------------------------------------------ */

HMF_INLINE double FN(plain_rows_of)(const int vectors, ptrdiff_t n, const int64_t *order,
                                    const hmf_sgd_row_entries *entries, const hmf_sgd_side *moved_side,
                                    const hmf_sgd_side *fixed_side, const hmf_sgd_terms *terms) {
    const int64_t *const starts = entries->starts, *const ends = entries->ends;
    const int32_t *const columns = entries->columns;
    const REAL *const ratings = entries->ratings;
    REAL *const moved = moved_side->rows, *const moved_bias = moved_side->bias;
    const REAL *const fixed = fixed_side->rows, *const fixed_bias = fixed_side->bias;
    const ptrdiff_t ld = terms->ld;
    const REAL rate = (REAL)terms->rate, keep = FN(sgd_keep)(terms->rate, terms->penalty), mean = (REAL)terms->mean;
    const REAL bias_rate = (REAL)terms->bias_rate, bias_keep = FN(sgd_keep)(terms->bias_rate, terms->bias_penalty);
    int64_t row[HMF_SGD_SLOTS], at[HMF_SGD_SLOTS], end[HMF_SGD_SLOTS];
    int slots = 0;
    ptrdiff_t next = 0;
    double loss = 0;
    for (;;) {
        for (; slots < HMF_SGD_SLOTS && next < n; next++) {
            row[slots] = order[next];
            at[slots] = starts[row[slots]];
            end[slots] = ends[row[slots]];
            if (at[slots] < end[slots]) slots++;
        }
        if (!slots) return loss;
        int64_t turns = end[0] - at[0];
        for (int s = 1; s < slots; s++)
            if (end[s] - at[s] < turns) turns = end[s] - at[s];
        for (int64_t turn = 0; turn < turns; turn++) {
            for (int s = 0; s < slots; s++) {
                const int64_t k = at[s] + turn;
                if (k + 2 < end[s]) FN(prefetch_row)(fixed + columns[k + 2] * ld, vectors * LANES);
                REAL *a = moved + row[s] * ld;
                const REAL *b = fixed + columns[k] * ld;
                VEC error = SPLAT(ratings[k] - mean) - FN(sgd_dot)(vectors, a, b);
                if (moved_bias) {
                    const REAL bias = moved_bias[row[s]];
                    error -= SPLAT(bias + fixed_bias[columns[k]]);
                    moved_bias[row[s]] = bias_keep * bias + bias_rate * LANE(error, 0);
                }
                loss += (double)LANE(error, 0) * LANE(error, 0);
                const VEC step = rate * error, shrink = SPLAT(keep);
                for (int v = 0; v < vectors; v++) {
                    const VEC p = *(const VEC *)(a + v * LANES), q = *(const VEC *)(b + v * LANES);
                    *(VEC *)(a + v * LANES) = shrink * p + step * q;
                }
            }
        }
        int left = 0;
        for (int s = 0; s < slots; s++) {
            row[left] = row[s];
            at[left] = at[s] + turns;
            end[left] = end[s];
            if (at[left] < end[left]) left++;
        }
        slots = left;
    }
}

/* Interleaving rows does not change their factors: each row sees its own entries in order. */
static double FN(plain_rows)(ptrdiff_t n, const int64_t *order, const hmf_sgd_row_entries *entries,
                             const hmf_sgd_side *moved, const hmf_sgd_side *fixed, const hmf_sgd_terms *terms) {
#define HMF_WIDTH(vectors) \
    case vectors:          \
        return FN(plain_rows_of)(vectors, n, order, entries, moved, fixed, terms)
    switch (terms->ld / LANES) {
        HMF_WIDTH(1);
        HMF_WIDTH(2);
        HMF_WIDTH(3);
        HMF_WIDTH(4);
        HMF_WIDTH(5);
        HMF_WIDTH(6);
        HMF_WIDTH(7);
        HMF_WIDTH(8);
        HMF_WIDTH(16);
    }
#undef HMF_WIDTH
    return FN(plain_rows_of)((int)(terms->ld / LANES), n, order, entries, moved, fixed, terms);
}

/* ---- AdaGrad: divides each coordinate's step by the root of a constant plus its sum of squared steps ------------- */

HMF_INLINE REAL FN(adagrad)(REAL value, REAL step, REAL *squares, REAL rate, REAL root) {
    *squares += step * step;
    return value + rate * step / HMF_SQRT(root + *squares);
}

/* The same for the bias of an entry with this error. */
HMF_INLINE void FN(adagrad_bias)(REAL *bias, REAL error, REAL *squares, const hmf_sgd_terms *terms) {
    const REAL step = error - (REAL)terms->bias_penalty * *bias;
    *bias = FN(adagrad)(*bias, step, squares, (REAL)terms->bias_rate, (REAL)terms->bias_root);
}

/* ---- RPCS (Chin et al. 2015): one sum for the first HMF_HEAD coordinates of a row and one for the others ---------- */

#define HMF_HEAD 8

/* a += its step, given the `other` row as it was before the update; adds the mean squares of the steps to the sums
 * c[0] (head) and c[1]. head_only leaves the coordinates after the head unchanged. */
HMF_INLINE void FN(rpcs)(ptrdiff_t ld, REAL *a, const REAL *other, REAL *c, REAL error, const hmf_sgd_terms *terms) {
    const REAL rate = (REAL)terms->rate, lambda = (REAL)terms->penalty, root = (REAL)terms->root;
    const ptrdiff_t rank = terms->rank;
    const int head_only = terms->head_only;
    const ptrdiff_t head = rank < HMF_HEAD ? rank : HMF_HEAD, tail = rank - head;
    const REAL head_rate = rate / HMF_SQRT(root + c[0]), tail_rate = head_only ? 0 : rate / HMF_SQRT(root + c[1]);
    VEC in_head = SPLAT(0), sums[2] = {SPLAT(0), SPLAT(0)};
    for (int lane = 0; lane < LANES && lane < HMF_HEAD; lane++) in_head[lane] = 1;
    const VEC mixed = in_head * SPLAT(head_rate) + (SPLAT(1) - in_head) * SPLAT(tail_rate);
    for (ptrdiff_t j = 0; j < ld; j += LANES) {
        const VEC p = *(const VEC *)(a + j);
        const VEC step = SPLAT(error) * *(const VEC *)(other + j) - SPLAT(lambda) * p;
        if (j >= HMF_HEAD) {
            sums[1] += step * step;
            *(VEC *)(a + j) = p + SPLAT(tail_rate) * step;
        } else {
            sums[0] += in_head * step * step;
            sums[1] += (SPLAT(1) - in_head) * step * step;
            *(VEC *)(a + j) = p + mixed * step;
        }
    }
    c[0] += FN(total)(sums[0]) / head;
    if (tail > 0 && !head_only) c[1] += FN(total)(sums[1]) / tail;
}

static double FN(rpcs_entries)(const hmf_sgd_entries *entries, const hmf_sgd_side *user_side,
                               const hmf_sgd_side *item_side, const hmf_sgd_terms *terms) {
    const ptrdiff_t n = entries->n, ld = terms->ld;
    const int32_t *const users = entries->users, *const items = entries->items;
    const REAL *const ratings = entries->ratings;
    REAL *const x = user_side->rows, *const y = item_side->rows;
    REAL *const x_squares = user_side->squares, *const y_squares = item_side->squares;
    REAL *const user_bias = user_side->bias, *const item_bias = item_side->bias;
    REAL *const user_bias_squares = user_side->bias_squares, *const item_bias_squares = item_side->bias_squares;
    REAL old[HMF_LARGEST_ROW] __attribute__((aligned(64)));
    double loss = 0;
    for (ptrdiff_t k = 0; k < n; k++) {
        if (k + HMF_SGD_AHEAD < n) {
            FN(prefetch_row)(x + users[k + HMF_SGD_AHEAD] * ld, ld);
            FN(prefetch_row)(y + items[k + HMF_SGD_AHEAD] * ld, ld);
        }
        const ptrdiff_t user = users[k], item = items[k];
        REAL *a = x + user * ld, *b = y + item * ld;
        REAL error = ratings[k] - (REAL)terms->mean - FN(dot)(ld, a, b);
        if (user_bias) {
            error -= user_bias[user] + item_bias[item];
            FN(adagrad_bias)(user_bias + user, error, user_bias_squares + user, terms);
            FN(adagrad_bias)(item_bias + item, error, item_bias_squares + item, terms);
        }
        loss += (double)error * error;
        for (ptrdiff_t j = 0; j < ld; j += LANES) *(VEC *)(old + j) = *(const VEC *)(a + j);
        FN(rpcs)(ld, a, b, x_squares + 2 * user, error, terms);
        FN(rpcs)(ld, b, old, y_squares + 2 * item, error, terms);
    }
    return loss;
}

static double FN(rpcs_rows)(ptrdiff_t n, const int64_t *order, const hmf_sgd_row_entries *entries,
                            const hmf_sgd_side *moved_side, const hmf_sgd_side *fixed_side,
                            const hmf_sgd_terms *terms) {
    const int64_t *const starts = entries->starts, *const ends = entries->ends;
    const int32_t *const columns = entries->columns;
    const REAL *const ratings = entries->ratings;
    REAL *const moved = moved_side->rows, *const moved_bias = moved_side->bias;
    REAL *const squares = moved_side->squares, *const bias_squares = moved_side->bias_squares;
    const REAL *const fixed = fixed_side->rows, *const fixed_bias = fixed_side->bias;
    const ptrdiff_t ld = terms->ld;
    double loss = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        const int64_t row = order[i];
        REAL *a = moved + row * ld;
        for (int64_t k = starts[row]; k < ends[row]; k++) {
            const REAL *b = fixed + columns[k] * ld;
            if (k + 2 < ends[row]) FN(prefetch_row)(fixed + columns[k + 2] * ld, ld);
            REAL error = ratings[k] - (REAL)terms->mean - FN(dot)(ld, a, b);
            if (moved_bias) {
                error -= moved_bias[row] + fixed_bias[columns[k]];
                FN(adagrad_bias)(moved_bias + row, error, bias_squares + row, terms);
            }
            loss += (double)error * error;
            FN(rpcs)(ld, a, b, squares + 2 * row, error, terms);
        }
    }
    return loss;
}

static double FN(adagrad_entries)(const hmf_sgd_entries *entries, const hmf_sgd_side *user_side,
                                  const hmf_sgd_side *item_side, const hmf_sgd_terms *terms) {
    const ptrdiff_t n = entries->n, ld = terms->ld;
    const int32_t *const users = entries->users, *const items = entries->items;
    const REAL *const ratings = entries->ratings;
    REAL *const x = user_side->rows, *const y = item_side->rows;
    REAL *const x_squares = user_side->squares, *const y_squares = item_side->squares;
    REAL *const user_bias = user_side->bias, *const item_bias = item_side->bias;
    REAL *const user_bias_squares = user_side->bias_squares, *const item_bias_squares = item_side->bias_squares;
    const REAL rate = (REAL)terms->rate, lambda = (REAL)terms->penalty, root = (REAL)terms->root;
    double loss = 0;
    for (ptrdiff_t k = 0; k < n; k++) {
        if (k + HMF_SGD_AHEAD < n) {
            const ptrdiff_t user = users[k + HMF_SGD_AHEAD] * ld, item = items[k + HMF_SGD_AHEAD] * ld;
            FN(prefetch_row)(x + user, ld);
            FN(prefetch_row)(y + item, ld);
            FN(prefetch_row)(x_squares + user, ld);
            FN(prefetch_row)(y_squares + item, ld);
        }
        const ptrdiff_t user = users[k], item = items[k];
        REAL *restrict a = x + user * ld, *restrict b = y + item * ld;
        REAL *restrict c = x_squares + user * ld, *restrict d = y_squares + item * ld;
        REAL error = ratings[k] - (REAL)terms->mean - FN(dot)(ld, a, b);
        if (user_bias) {
            error -= user_bias[user] + item_bias[item];
            FN(adagrad_bias)(user_bias + user, error, user_bias_squares + user, terms);
            FN(adagrad_bias)(item_bias + item, error, item_bias_squares + item, terms);
        }
        loss += (double)error * error;
        for (ptrdiff_t j = 0; j < ld; j++) {
            const REAL p = a[j], q = b[j];
            a[j] = FN(adagrad)(p, error * q - lambda * p, c + j, rate, root);
            b[j] = FN(adagrad)(q, error * p - lambda * q, d + j, rate, root);
        }
    }
    return loss;
}

static double FN(adagrad_rows)(ptrdiff_t n, const int64_t *order, const hmf_sgd_row_entries *entries,
                               const hmf_sgd_side *moved_side, const hmf_sgd_side *fixed_side,
                               const hmf_sgd_terms *terms) {
    const int64_t *const starts = entries->starts, *const ends = entries->ends;
    const int32_t *const columns = entries->columns;
    const REAL *const ratings = entries->ratings;
    REAL *const moved = moved_side->rows, *const moved_bias = moved_side->bias;
    REAL *const squares = moved_side->squares, *const bias_squares = moved_side->bias_squares;
    const REAL *const fixed = fixed_side->rows, *const fixed_bias = fixed_side->bias;
    const ptrdiff_t ld = terms->ld;
    const REAL rate = (REAL)terms->rate, lambda = (REAL)terms->penalty, root = (REAL)terms->root;
    double loss = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        const int64_t row = order[i];
        REAL *restrict a = moved + row * ld, *restrict c = squares + row * ld;
        for (int64_t k = starts[row]; k < ends[row]; k++) {
            const REAL *restrict b = fixed + columns[k] * ld;
            if (k + 2 < ends[row]) FN(prefetch_row)(fixed + columns[k + 2] * ld, ld);
            REAL error = ratings[k] - (REAL)terms->mean - FN(dot)(ld, a, b);
            if (moved_bias) {
                error -= moved_bias[row] + fixed_bias[columns[k]];
                FN(adagrad_bias)(moved_bias + row, error, bias_squares + row, terms);
            }
            loss += (double)error * error;
            for (ptrdiff_t j = 0; j < ld; j++)
                a[j] = FN(adagrad)(a[j], error * b[j] - lambda * a[j], c + j, rate, root);
        }
    }
    return loss;
}

/* ---- the kernels of the table ----------------------------------------------------------------------------------- */

static double FN(sgd_entries)(const hmf_sgd_entries *entries, const hmf_sgd_side *user, const hmf_sgd_side *item,
                              const hmf_sgd_terms *terms) {
    if (!user->squares) return FN(plain_entries)(entries, user, item, terms);
    return (terms->rank ? FN(rpcs_entries) : FN(adagrad_entries))(entries, user, item, terms);
}

static double FN(sgd_rows)(ptrdiff_t n, const int64_t *order, const hmf_sgd_row_entries *entries,
                           const hmf_sgd_side *moved, const hmf_sgd_side *fixed, const hmf_sgd_terms *terms) {
    if (!moved->squares) return FN(plain_rows)(n, order, entries, moved, fixed, terms);
    return (terms->rank ? FN(rpcs_rows) : FN(adagrad_rows))(n, order, entries, moved, fixed, terms);
}
