"""Epochs of stochastic gradient descent on multicore CPUs (Li et al., MSGD, IEEE TPDS 2017, and its rivals).

An update of the entry (u, i, r), with e = r - mu - b_u - b_i - x_u . y_i (MSGD eq. 3):

    x_u += rate (e y_i - lambda x_u)              y_i += rate (e x_u - lambda y_i)
    b_u += bias_rate (e - bias_lambda b_u)        b_i += bias_rate (e - bias_lambda b_i)

AdaGrad and RPCS divide each step s by sqrt(root + G), and those of biases by sqrt(bias_root + G); G sums squares of s.

rows         MSGD Alg. 1: each row of one side is updated by its entries in order with the other side fixed; parallel
             over rows, which share no updated data (eqs. 15 and 16)
entries      Hogwild! (Niu et al. 2011): entries in the given order, split among threads that do not synchronize
diagonals    DSGD (Gemulla et al. 2011): a grid of blocks by shuffled diagonals. A block waits only for its
             predecessors in its row and its column: no barrier, and the same factors for any number of threads
free_blocks  FPSGD (Zhuang et al. 2013): any block left in this epoch whose row and column are free.
             The result is that of the blocks in the order in which they were taken

Rows of factors are copies whose length is padded to whole cache lines with zeros, aligned to one. Every function works
on the entries that it receives, so on any range of rows and columns; the caller adds the offsets of both sides.
"""

import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t, uint64_t

from hybridmf._openmp cimport hmf_usable_threads
from hybridmf.native.kernels cimport hmf_kernels, real


cdef extern from "kernels.h" nogil:
    ctypedef struct sgd_terms "hmf_sgd_terms":
        double rate
        double penalty
        double bias_rate
        double bias_penalty
        double mean
        double root
        double bias_root
        Py_ssize_t rank
        int head_only

    ctypedef struct sgd_table "hmf_kernel_table":
        double (*sgd_entries_f)(Py_ssize_t n, Py_ssize_t ld, const int32_t* users, const int32_t* items,
                                const float* ratings, float* x, float* y, float* user_bias, float* item_bias,
                                const sgd_terms* terms) noexcept nogil
        double (*sgd_entries_d)(Py_ssize_t n, Py_ssize_t ld, const int32_t* users, const int32_t* items,
                                const double* ratings, double* x, double* y, double* user_bias, double* item_bias,
                                const sgd_terms* terms) noexcept nogil
        double (*sgd_rows_f)(Py_ssize_t n, Py_ssize_t ld, const int64_t* order, const int64_t* starts,
                             const int64_t* ends, const int32_t* columns, const float* ratings, float* moved,
                             const float* fixed, float* moved_bias, const float* fixed_bias,
                             const sgd_terms* terms) noexcept nogil
        double (*sgd_rows_d)(Py_ssize_t n, Py_ssize_t ld, const int64_t* order, const int64_t* starts,
                             const int64_t* ends, const int32_t* columns, const double* ratings, double* moved,
                             const double* fixed, double* moved_bias, const double* fixed_bias,
                             const sgd_terms* terms) noexcept nogil
        double (*adagrad_entries_f)(Py_ssize_t n, Py_ssize_t ld, const int32_t* users, const int32_t* items,
                                    const float* ratings, float* x, float* y, float* user_bias, float* item_bias,
                                    float* x_squares, float* y_squares, float* user_bias_squares,
                                    float* item_bias_squares, const sgd_terms* terms) noexcept nogil
        double (*adagrad_entries_d)(Py_ssize_t n, Py_ssize_t ld, const int32_t* users, const int32_t* items,
                                    const double* ratings, double* x, double* y, double* user_bias, double* item_bias,
                                    double* x_squares, double* y_squares, double* user_bias_squares,
                                    double* item_bias_squares, const sgd_terms* terms) noexcept nogil
        double (*adagrad_rows_f)(Py_ssize_t n, Py_ssize_t ld, const int64_t* order, const int64_t* starts,
                                 const int64_t* ends, const int32_t* columns, const float* ratings, float* moved,
                                 const float* fixed, float* moved_bias, const float* fixed_bias, float* squares,
                                 float* bias_squares, const sgd_terms* terms) noexcept nogil
        double (*adagrad_rows_d)(Py_ssize_t n, Py_ssize_t ld, const int64_t* order, const int64_t* starts,
                                 const int64_t* ends, const int32_t* columns, const double* ratings, double* moved,
                                 const double* fixed, double* moved_bias, const double* fixed_bias, double* squares,
                                 double* bias_squares, const sgd_terms* terms) noexcept nogil


cdef extern from *:
    """
    #if !defined(_WIN32)
    #include <sched.h>
    #endif
    static inline int32_t hmf_load(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void hmf_store(int32_t *p, int32_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
    static inline int32_t hmf_add(int32_t *p, int32_t value) { return __atomic_add_fetch(p, value, __ATOMIC_ACQ_REL); }
    static inline int hmf_take(int32_t *p) { return !__atomic_exchange_n(p, 1, __ATOMIC_ACQUIRE); }
    static inline void hmf_wait(void) {
    #if !defined(_WIN32)
        sched_yield();
    #endif
    }
    """
    int32_t hmf_load(const int32_t* p) noexcept nogil
    void hmf_store(int32_t* p, int32_t value) noexcept nogil
    int32_t hmf_add(int32_t* p, int32_t value) noexcept nogil
    bint hmf_take(int32_t* p) noexcept nogil
    void hmf_wait() noexcept nogil


# Users interleaved inside a block: consecutive updates then rarely share a row, so that their chains of operations
# overlap, and each user's row is still in the first-level cache at its next turn. At ML-10M's shape and f = 32 an epoch
# takes 0.031 s, users one after the other 0.051 s, 32 in turn 0.035 s (two cores of an EPYC 9005).
cdef enum:
    TURNS = 8

# Elements copied or checked by a thread at a time.
cdef Py_ssize_t COPY_CHUNK = 1 << 16


cdef struct Side:
    # one side's working copies; NULL where there are none
    void* rows
    void* bias
    void* squares
    void* bias_squares


cdef inline void* _rows(real[:, ::1] array) noexcept nogil:
    return &array[0, 0] if array.shape[0] and array.shape[1] else NULL


cdef inline void* _vector(real[::1] array) noexcept nogil:
    return &array[0] if array.shape[0] else NULL


cdef inline double _entries(const sgd_terms* terms, Py_ssize_t ld, Side user, Side item, Py_ssize_t n,
                            const int32_t* users, const int32_t* items, const real* ratings) noexcept nogil:
    cdef const sgd_table* table = <const sgd_table*> hmf_kernels()
    if n <= 0:
        return 0.0
    if user.squares:
        if real is float:
            return table.adagrad_entries_f(
                n, ld, users, items, ratings, <float*> user.rows, <float*> item.rows, <float*> user.bias,
                <float*> item.bias, <float*> user.squares, <float*> item.squares, <float*> user.bias_squares,
                <float*> item.bias_squares, terms)
        else:
            return table.adagrad_entries_d(
                n, ld, users, items, ratings, <double*> user.rows, <double*> item.rows, <double*> user.bias,
                <double*> item.bias, <double*> user.squares, <double*> item.squares, <double*> user.bias_squares,
                <double*> item.bias_squares, terms)
    if real is float:
        return table.sgd_entries_f(n, ld, users, items, ratings, <float*> user.rows, <float*> item.rows,
                                   <float*> user.bias, <float*> item.bias, terms)
    else:
        return table.sgd_entries_d(n, ld, users, items, ratings, <double*> user.rows, <double*> item.rows,
                                   <double*> user.bias, <double*> item.bias, terms)


# ------------------------------------------------------------------------------------------------------------- MSGD


def rows(
        real[:, ::1] moved,                # IN OUT (n_rows, ld) factors of the side that moves
        const real[:, ::1] fixed,          # IN     (n_fixed, ld)
        real[::1] moved_bias,              # IN OUT (n_rows,), empty without biases
        const real[::1] fixed_bias,        # IN     (n_fixed,) or empty
        real[:, ::1] squares,              # IN OUT (n_rows, ld), empty without AdaGrad
        real[::1] bias_squares,            # IN OUT (n_rows,) or empty
        const int64_t[::1] order,          # IN     rows to move
        const int64_t[::1] cuts,           # IN     (n_pieces + 1,) pieces of `order`, each for one thread
        const int64_t[::1] starts,         # IN     (n_rows,) entries starts[row] <= k < ends[row] of each row
        const int64_t[::1] ends,           # IN     (n_rows,)
        const int32_t[::1] columns,        # IN     (nnz,) rows of `fixed`
        const real[::1] ratings,           # IN     (nnz,)
        double rate,
        double penalty,
        double mean,
        double bias_rate,
        double bias_penalty,
        double root,
        double bias_root,
        double[::1] losses,                # OUT    (n_pieces,) sums of squared errors, before each update
        int n_threads,
        Py_ssize_t shared_rank=0,          # IN     rank if `squares` is (n_rows, 2): RPCS; 0: as wide as the rows
        bint head_only=False):             # IN     RPCS: the rows' heads alone move
    """MSGD's half epoch: each row walks its entries in order. A row is one thread's, so that no split changes bits."""
    cdef const sgd_table* table = <const sgd_table*> hmf_kernels()
    cdef Py_ssize_t piece, n_pieces = cuts.shape[0] - 1, ld = moved.shape[1]
    cdef real* own_bias = &moved_bias[0] if moved_bias.shape[0] else NULL
    cdef const real* other_bias = &fixed_bias[0] if fixed_bias.shape[0] else NULL
    cdef real* sums = &squares[0, 0] if squares.shape[0] else NULL
    cdef real* bias_sums = &bias_squares[0] if bias_squares.shape[0] else NULL
    cdef sgd_terms terms = sgd_terms(rate, penalty, bias_rate, bias_penalty, mean, root, bias_root, shared_rank,
                                     head_only)
    if n_pieces <= 0 or not columns.shape[0]:
        return
    n_threads = hmf_usable_threads(n_threads)
    # the time of a piece depends on which factors are cached
    for piece in prange(n_pieces, nogil=True, schedule="dynamic", num_threads=n_threads):
        losses[piece] = _rows_piece(
            table, cuts[piece + 1] - cuts[piece], ld, &order[0] + cuts[piece], &starts[0], &ends[0], &columns[0],
            &ratings[0], &moved[0, 0], &fixed[0, 0], own_bias, other_bias, sums, bias_sums, &terms)


cdef inline double _rows_piece(const sgd_table* table, Py_ssize_t n, Py_ssize_t ld, const int64_t* order,
                               const int64_t* starts, const int64_t* ends, const int32_t* columns,
                               const real* ratings, real* moved, const real* fixed, real* moved_bias,
                               const real* fixed_bias, real* squares, real* bias_squares,
                               const sgd_terms* terms) noexcept nogil:
    if squares != NULL:
        if real is float:
            return table.adagrad_rows_f(n, ld, order, starts, ends, columns, ratings, moved, fixed, moved_bias,
                                        fixed_bias, squares, bias_squares, terms)
        else:
            return table.adagrad_rows_d(n, ld, order, starts, ends, columns, ratings, moved, fixed, moved_bias,
                                        fixed_bias, squares, bias_squares, terms)
    if real is float:
        return table.sgd_rows_f(n, ld, order, starts, ends, columns, ratings, moved, fixed, moved_bias, fixed_bias,
                                terms)
    else:
        return table.sgd_rows_d(n, ld, order, starts, ends, columns, ratings, moved, fixed, moved_bias, fixed_bias,
                                terms)


# ---------------------------------------------------------------------------------------------------------- Hogwild!


def entries(
        real[:, ::1] x,                    # IN OUT (n_users, ld)
        real[:, ::1] y,                    # IN OUT (n_items, ld)
        real[::1] x_bias,                  # IN OUT (n_users,), empty without biases
        real[::1] y_bias,                  # IN OUT (n_items,) or empty
        real[:, ::1] x_squares,            # IN OUT (n_users, ld), empty without AdaGrad
        real[:, ::1] y_squares,            # IN OUT (n_items, ld) or empty
        real[::1] x_bias_squares,          # IN OUT (n_users,) or empty
        real[::1] y_bias_squares,          # IN OUT (n_items,) or empty
        const int32_t[::1] users,          # IN     (n,)
        const int32_t[::1] items,          # IN     (n,)
        const real[::1] ratings,           # IN     (n,)
        double rate,
        double penalty,
        double mean,
        double bias_rate,
        double bias_penalty,
        double root,
        double bias_root,
        double[::1] losses,                # OUT    (n_threads,) sums of squared errors, before each update
        int n_threads,
        Py_ssize_t shared_rank=0,          # IN     as for `rows`
        bint head_only=False):
    """Update entry by entry in the order they come; with several threads each takes a stretch, and they may collide."""
    cdef Side user = Side(_rows(x), _vector(x_bias), _rows(x_squares), _vector(x_bias_squares))
    cdef Side item = Side(_rows(y), _vector(y_bias), _rows(y_squares), _vector(y_bias_squares))
    cdef sgd_terms terms = sgd_terms(rate, penalty, bias_rate, bias_penalty, mean, root, bias_root, shared_rank,
                                     head_only)
    cdef Py_ssize_t ld = x.shape[1]
    cdef Py_ssize_t n = users.shape[0], stretch, first, last
    cdef int n_stretches
    if not n:
        return
    n_threads = hmf_usable_threads(n_threads)
    n_stretches = n_threads
    for stretch in prange(n_stretches, nogil=True, schedule="static", chunksize=1, num_threads=n_threads):
        first, last = n * stretch // n_stretches, n * (stretch + 1) // n_stretches
        losses[stretch] = _entries(&terms, ld, user, item, last - first, &users[0] + first, &items[0] + first,
                                   &ratings[0] + first)


# ------------------------------------------------------------------------------------------------------------- blocks


def deal(
        int32_t[::1] users,                # OUT (nnz,) entries, block by block
        int32_t[::1] items,                # OUT (nnz,)
        real[::1] ratings,                 # OUT (nnz,)
        const int64_t[::1] indptr,         # IN  CSR
        const int32_t[::1] indices,
        const real[::1] data,
        const int64_t[::1] user_order,     # IN  (n_users,) users of block 0, then 1, ...
        const int64_t[::1] user_cuts,      # IN  (grid + 1,)
        const int32_t[::1] item_block,     # IN  (n_items,)
        int n_threads):
    """Bring the entries into blocks: (grid * grid + 1,) offsets of block (p, q) at p * grid + q.

    Inside a block TURNS users at a time take turns, each with its items in ascending order.
    """
    cdef Py_ssize_t grid = user_cuts.shape[0] - 1, p
    counts_array = np.zeros((grid, grid), dtype=np.int64)
    cdef int64_t[:, ::1] counts = counts_array
    n_threads = hmf_usable_threads(n_threads)
    for p in prange(grid, nogil=True, schedule="dynamic", num_threads=n_threads):
        _count(indptr, indices, user_order, user_cuts[p], user_cuts[p + 1], item_block, counts[p])
    pointer = np.zeros(grid * grid + 1, dtype=np.int64)
    np.cumsum(counts_array.ravel(), out=pointer[1:])
    counts_array[:] = pointer[: grid * grid].reshape(grid, grid)  # now the position of each block's next entry
    for p in prange(grid, nogil=True, schedule="dynamic", num_threads=n_threads):
        _deal_row(users, items, ratings, indptr, indices, data, user_order, user_cuts[p], user_cuts[p + 1], item_block,
                  counts[p])
    return pointer


cdef void _count(const int64_t[::1] indptr, const int32_t[::1] indices, const int64_t[::1] user_order, int64_t first,
                 int64_t last, const int32_t[::1] item_block, int64_t[::1] counts) noexcept nogil:
    cdef int64_t at, k
    for at in range(first, last):
        for k in range(indptr[user_order[at]], indptr[user_order[at] + 1]):
            counts[item_block[indices[k]]] += 1


cdef void _deal_row(int32_t[::1] users, int32_t[::1] items, real[::1] ratings, const int64_t[::1] indptr,
                    const int32_t[::1] indices, const real[::1] data, const int64_t[::1] user_order, int64_t first,
                    int64_t last, const int32_t[::1] item_block, int64_t[::1] cursor) noexcept nogil:
    """The blocks of one row of the grid: TURNS users deal an entry each, until they have none left; others follow."""
    cdef int64_t[TURNS] user
    cdef int64_t[TURNS] entry
    cdef int64_t[TURNS] end
    cdef int dealing = 0, left, s
    cdef int64_t at = first, place
    cdef int32_t block
    while True:
        while dealing < TURNS and at < last:
            user[dealing] = user_order[at]
            entry[dealing], end[dealing] = indptr[user[dealing]], indptr[user[dealing] + 1]
            dealing += entry[dealing] < end[dealing]
            at += 1
        if not dealing:
            return
        left = 0
        for s in range(dealing):
            block = item_block[indices[entry[s]]]
            place = cursor[block]
            cursor[block] = place + 1
            users[place], items[place], ratings[place] = <int32_t> user[s], indices[entry[s]], data[entry[s]]
            user[left], entry[left], end[left] = user[s], entry[s] + 1, end[s]
            left += entry[left] < end[left]
        dealing = left


def diagonals(
        real[:, ::1] x,                    # IN OUT as for `entries`
        real[:, ::1] y,
        real[::1] x_bias,
        real[::1] y_bias,
        real[:, ::1] x_squares,
        real[:, ::1] y_squares,
        real[::1] x_bias_squares,
        real[::1] y_bias_squares,
        const int32_t[::1] users,
        const int32_t[::1] items,
        const real[::1] ratings,
        double rate,
        double penalty,
        double mean,
        double bias_rate,
        double bias_penalty,
        double root,
        double bias_root,
        const int64_t[::1] pointer,        # IN  (grid * grid + 1,) entries of block (p, q) from pointer[p * grid + q]
        const int64_t[::1] shifts,         # IN  (n_steps,) distinct, of range(grid): step t visits all blocks
                                           #     (p, (p + shifts[t]) % grid)
        double[:, ::1] losses,             # OUT (grid, grid) sums of squared errors of the blocks visited
        int n_threads,
        Py_ssize_t shared_rank=0,          # IN     as for `rows`
        bint head_only=False):
    """Visit the blocks of some diagonals. The result is that of one diagonal after the other, for any threads."""
    cdef Side user = Side(_rows(x), _vector(x_bias), _rows(x_squares), _vector(x_bias_squares))
    cdef Side item = Side(_rows(y), _vector(y_bias), _rows(y_squares), _vector(y_bias_squares))
    cdef sgd_terms terms = sgd_terms(rate, penalty, bias_rate, bias_penalty, mean, root, bias_root, shared_rank,
                                     head_only)
    cdef Py_ssize_t ld = x.shape[1]
    cdef int32_t grid = <int32_t> losses.shape[0], worker
    cdef int32_t[::1] progress = np.zeros(grid, dtype=np.int32)
    cdef int32_t[::1] busy = np.zeros(grid, dtype=np.int32)
    cdef int32_t[::1] remaining = np.full(1, grid * shifts.shape[0], dtype=np.int32)
    if not users.shape[0] or not shifts.shape[0]:
        return
    n_threads = hmf_usable_threads(n_threads)
    for worker in prange(n_threads, nogil=True, schedule="static", chunksize=1, num_threads=n_threads):
        _visit_diagonals(&terms, ld, user, item, &users[0], &items[0], &ratings[0], &pointer[0], &shifts[0],
                         <int32_t> shifts.shape[0], grid, grid * worker // n_threads, &progress[0], &busy[0],
                         &remaining[0], &losses[0, 0])


cdef void _visit_diagonals(const sgd_terms* terms, Py_ssize_t ld, Side user, Side item, const int32_t* users,
                           const int32_t* items, const real* ratings, const int64_t* pointer, const int64_t* shifts,
                           int32_t n_steps, int32_t grid, int32_t start, int32_t* progress, int32_t* busy,
                           int32_t* remaining, double* losses) noexcept nogil:
    """One worker: rows of the grid in turn, each as far as the rows it depends on have come."""
    cdef int32_t turn, row, t, before
    cdef int64_t block
    cdef bint idle
    while hmf_load(remaining) > 0:
        idle = True
        for turn in range(grid):
            row = (start + turn) % grid
            t = hmf_load(&progress[row])
            if t >= n_steps:
                continue
            # the row that has this column in the previous step: a column has one block in each row
            before = <int32_t> ((row + shifts[t] - shifts[t - 1] + grid) % grid) if t else row
            if hmf_load(&progress[before]) < t or not hmf_take(&busy[row]):
                continue
            if hmf_load(&progress[row]) == t:  # else another worker was faster
                block = row * grid + (row + shifts[t]) % grid
                losses[block] = _entries(terms, ld, user, item, pointer[block + 1] - pointer[block],
                                         users + pointer[block], items + pointer[block], ratings + pointer[block])
                hmf_store(&progress[row], t + 1)
                hmf_add(remaining, -1)
                idle = False
            hmf_store(&busy[row], 0)
        if idle:
            hmf_wait()


def free_blocks(
        real[:, ::1] x,                    # IN OUT as for `entries`
        real[:, ::1] y,
        real[::1] x_bias,
        real[::1] y_bias,
        real[:, ::1] x_squares,
        real[:, ::1] y_squares,
        real[::1] x_bias_squares,
        real[::1] y_bias_squares,
        const int32_t[::1] users,
        const int32_t[::1] items,
        const real[::1] ratings,
        double rate,
        double penalty,
        double mean,
        double bias_rate,
        double bias_penalty,
        double root,
        double bias_root,
        const int64_t[::1] pointer,        # IN     as for `diagonals`
        int32_t[::1] seen,                 # IN OUT (grid * grid,) when this epoch took each block: 1, 2, ...; else 0
        int64_t quota,                     # blocks to visit
        uint64_t seed,
        double[:, ::1] losses,             # OUT    (grid, grid) sums of squared errors of the blocks visited
        int n_threads,
        Py_ssize_t shared_rank=0,          # IN     as for `rows`
        bint head_only=False):
    """Visit up to `quota` blocks that were not seen, each when its row and its column are free."""
    cdef Side user = Side(_rows(x), _vector(x_bias), _rows(x_squares), _vector(x_bias_squares))
    cdef Side item = Side(_rows(y), _vector(y_bias), _rows(y_squares), _vector(y_bias_squares))
    cdef sgd_terms terms = sgd_terms(rate, penalty, bias_rate, bias_penalty, mean, root, bias_root, shared_rank,
                                     head_only)
    cdef Py_ssize_t ld = x.shape[1]
    cdef int32_t grid = <int32_t> losses.shape[0], worker
    cdef int32_t[::1] busy = np.zeros(2 * grid, dtype=np.int32)
    cdef int32_t taken = <int32_t> np.count_nonzero(seen), last = min(taken + quota, grid * grid), lock = 0
    if not users.shape[0]:
        return
    n_threads = hmf_usable_threads(n_threads)
    for worker in prange(n_threads, nogil=True, schedule="static", chunksize=1, num_threads=n_threads):
        _visit_free(&terms, ld, user, item, &users[0], &items[0], &ratings[0], &pointer[0], grid,
                    seed + <uint64_t> worker, &seen[0], &busy[0], &taken, last, &lock, &losses[0, 0])


cdef void _visit_free(const sgd_terms* terms, Py_ssize_t ld, Side user, Side item, const int32_t* users,
                      const int32_t* items, const real* ratings, const int64_t* pointer, int32_t grid, uint64_t seed,
                      int32_t* seen, int32_t* busy, int32_t* taken, int32_t last, int32_t* lock,
                      double* losses) noexcept nogil:
    """One worker: the table of blocks is looked at and changed under `lock`, entries are updated outside it."""
    cdef int64_t block
    cdef int32_t row, column
    while True:
        while not hmf_take(lock):
            hmf_wait()
        if taken[0] >= last:
            hmf_store(lock, 0)
            return
        seed = seed * <uint64_t> 6364136223846793005 + <uint64_t> 1442695040888963407
        block = _free_block(grid, seed >> 33, seen, busy)
        if block >= 0:
            row, column = <int32_t> (block // grid), <int32_t> (block % grid)
            busy[row] = busy[grid + column] = 1
            taken[0] += 1
            seen[block] = taken[0]
        hmf_store(lock, 0)
        if block < 0:
            hmf_wait()
            continue
        losses[block] = _entries(terms, ld, user, item, pointer[block + 1] - pointer[block], users + pointer[block],
                                 items + pointer[block], ratings + pointer[block])
        while not hmf_take(lock):
            hmf_wait()
        busy[row] = busy[grid + column] = 0
        hmf_store(lock, 0)


cdef inline int64_t _free_block(int32_t grid, uint64_t random, const int32_t* seen, const int32_t* busy) noexcept nogil:
    """A block not seen yet whose row and column are free, looked for from a random one on; -1 if there is none."""
    cdef int32_t i, j, row, column
    for i in range(grid):
        row = <int32_t> ((random + <uint64_t> i) % <uint64_t> grid)
        if busy[row]:
            continue
        for j in range(grid):
            column = <int32_t> ((random // <uint64_t> grid + <uint64_t> j) % <uint64_t> grid)
            if not busy[grid + column] and not seen[row * <int64_t> grid + column]:
                return row * <int64_t> grid + column
    return -1


# -------------------------------------------------------------------------------------------------- working copies


def copy_rows(
        real[:, ::1] out,                  # OUT (n, width): columns beyond those of `rows` are zeros
        const real[:, ::1] rows,           # IN  (n, other width)
        int n_threads):
    """Copy rows into longer or shorter ones; False if a value of them is infinite or NaN."""
    cdef Py_ssize_t n = rows.shape[0], chunk = max(1, COPY_CHUNK // max(1, rows.shape[1])), c
    cdef Py_ssize_t n_chunks = (n + chunk - 1) // chunk
    cdef int bad = 0
    n_threads = hmf_usable_threads(n_threads)
    for c in prange(n_chunks, nogil=True, schedule="static", num_threads=n_threads):
        bad += _copy_chunk(out, rows, c * chunk, min(n, (c + 1) * chunk))
    return bad == 0


cdef int _copy_chunk(real[:, ::1] out, const real[:, ::1] rows, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
    cdef Py_ssize_t i, j, width = min(out.shape[1], rows.shape[1])
    cdef real value
    cdef int bad = 0
    for i in range(first, last):
        for j in range(width):
            value = rows[i, j]
            out[i, j] = value
            bad |= not (value - value == 0)  # NaN from infinity or NaN on
        for j in range(width, out.shape[1]):
            out[i, j] = 0
    return bad


def all_finite(
        const real[:, ::1] rows,           # IN  (n, width)
        int n_threads):
    """Whether no value is infinite or NaN."""
    cdef Py_ssize_t n = rows.shape[0], chunk = max(1, COPY_CHUNK // max(1, rows.shape[1])), c
    cdef Py_ssize_t n_chunks = (n + chunk - 1) // chunk
    cdef int bad = 0
    n_threads = hmf_usable_threads(n_threads)
    for c in prange(n_chunks, nogil=True, schedule="static", num_threads=n_threads):
        bad += _look_at_chunk(rows, c * chunk, min(n, (c + 1) * chunk))
    return bad == 0


cdef int _look_at_chunk(const real[:, ::1] rows, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
    cdef Py_ssize_t i, j
    cdef int bad = 0
    for i in range(first, last):
        for j in range(rows.shape[1]):
            bad |= not (rows[i, j] - rows[i, j] == 0)
    return bad
