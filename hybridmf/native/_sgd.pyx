"""Epochs of stochastic gradient descent on multicore CPUs (Li et al., MSGD, IEEE TPDS 2017, and its rivals).

An update of the entry (u, i, r), with e = r - mu - b_u - b_i - x_u . y_i (MSGD eq. 3):

    x_u += rate (e y_i - lambda x_u)              y_i += rate (e x_u - lambda y_i)
    b_u += bias_rate (e - bias_lambda b_u)        b_i += bias_rate (e - bias_lambda b_i)

AdaGrad and RPCS divide each step s by sqrt(root + G), for biases by sqrt(bias_root + G); G is the sum of squares of s.

rows         MSGD Alg. 1: the entries of each row of one side update it in order, with the other side fixed; parallel
             over rows, which share no updated data (eqs. 15 and 16)
entries      Hogwild! (Niu et al. 2011): entries in the given order, split among threads that do not synchronize
diagonals    DSGD (Gemulla et al. 2011): a grid of blocks by shuffled diagonals. A block waits only for its
             predecessors in its row and its column: no barrier, and the same factors for any number of threads
free_blocks  FPSGD (Zhuang et al. 2013): any remaining block of this epoch whose row and column are free.
             The result equals visiting the blocks one after another in the order in which they were taken

Rows of factors are copies padded with zeros to whole cache lines and aligned to one. Functions take any range of rows
and columns; the caller adds the offsets of both sides.
"""

import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t, uint64_t

from hybridmf._openmp cimport hmf_usable_threads
from hybridmf.native._kernels cimport hmf_kernels
from hybridmf.native.kernels cimport real


cdef extern from "kernels.h" nogil:
    ctypedef struct hmf_sgd_terms:
        double rate
        double penalty
        double bias_rate
        double bias_penalty
        double mean
        double root
        double bias_root
        Py_ssize_t ld
        Py_ssize_t rank
        int head_only

    ctypedef struct hmf_sgd_side:
        void* rows
        void* bias
        void* squares
        void* bias_squares

    ctypedef struct hmf_sgd_entries:
        Py_ssize_t n
        const int32_t* users
        const int32_t* items
        const void* ratings

    ctypedef struct hmf_sgd_row_entries:
        const int64_t* starts
        const int64_t* ends
        const int32_t* columns
        const void* ratings

    ctypedef double (*entries_kernel "hmf_sgd_entries_kernel*")(
        const hmf_sgd_entries* entries, const hmf_sgd_side* user, const hmf_sgd_side* item,
        const hmf_sgd_terms* terms) noexcept nogil
    ctypedef double (*rows_kernel "hmf_sgd_rows_kernel*")(
        Py_ssize_t n, const int64_t* order, const hmf_sgd_row_entries* entries, const hmf_sgd_side* moved,
        const hmf_sgd_side* fixed, const hmf_sgd_terms* terms) noexcept nogil

    ctypedef struct sgd_table "hmf_kernel_table":
        entries_kernel sgd_entries_f
        entries_kernel sgd_entries_d
        rows_kernel sgd_rows_f
        rows_kernel sgd_rows_d


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


# Users interleaved inside a block: consecutive updates then rarely share a row, so that their dependency chains
# overlap, and each user's row is still in L1 for its next update. At ML-10M's shape and f = 32 an epoch takes 0.031 s,
# with users one after the other 0.051 s, with 32 interleaved 0.035 s (two cores of an EPYC 9005).
cdef enum:
    TURNS = 8

# Elements copied or checked by a thread at a time.
cdef Py_ssize_t COPY_CHUNK = 1 << 16


# Arguments are objects of `hybridmf.native.arguments`, which own the arrays that structs point to.


cdef inline void* _matrix(real[:, ::1] array) noexcept nogil:
    return &array[0, 0] if array.shape[0] and array.shape[1] else NULL


cdef inline void* _vector(real[::1] array) noexcept nogil:
    return &array[0] if array.shape[0] else NULL


cdef hmf_sgd_side _side(given, const real[::1] ratings):
    """The C struct of a `WorkingRows`; `ratings`: any array of its type."""
    cdef real[:, ::1] matrix = given.matrix, squares = given.squares
    cdef real[::1] bias = given.bias, bias_squares = given.bias_squares
    return hmf_sgd_side(_matrix[real](matrix), _vector[real](bias), _matrix[real](squares), _vector[real](bias_squares))


cdef hmf_sgd_terms _terms(given, rows):
    """The C struct of a `hybridmf.core.objective.Terms`, for updates of these `WorkingRows`."""
    return hmf_sgd_terms(given.rate, given.regularization, given.bias_rate, given.bias_regularization, given.mean,
                         given.root, given.bias_root, rows.matrix.shape[1], rows.shared_rank, given.head_only)


# ------------------------------------------------------------------------------------------------------------- MSGD


cdef struct RowUpdates:
    rows_kernel update
    hmf_sgd_side moved
    hmf_sgd_side fixed
    hmf_sgd_row_entries entries
    hmf_sgd_terms terms


cdef RowUpdates _row_updates(moved, fixed, entries, terms, const real[::1] ratings):
    cdef const sgd_table* table = <const sgd_table*> hmf_kernels()
    cdef const int64_t[::1] starts = entries.starts, ends = entries.ends
    cdef const int32_t[::1] columns = entries.columns
    cdef rows_kernel update = table.sgd_rows_f if real is float else table.sgd_rows_d
    return RowUpdates(update, _side[real](moved, ratings), _side[real](fixed, ratings),
                      hmf_sgd_row_entries(&starts[0], &ends[0], &columns[0], &ratings[0]), _terms(terms, moved))


def rows(
        moved,                             # IN OUT `WorkingRows` of the side that moves
        fixed,                             # IN     `WorkingRows`, whose sums of squares are not read
        entries,                           # IN     `UpdateRows` of the side that moves
        const int64_t[::1] order,          # IN     rows to move
        const int64_t[::1] cuts,           # IN     (n_pieces + 1,) pieces of `order`, each a task
        terms,                             # IN     `Terms`
        double[::1] losses,                # OUT    (n_pieces,) sums of squared errors, before each update
        int n_threads):
    """MSGD's half epoch: each row takes its entries in order. One thread owns a row, so `cuts` never change results."""
    cdef Py_ssize_t piece, n_pieces = cuts.shape[0] - 1
    cdef RowUpdates its
    if n_pieces <= 0 or not len(entries.columns):
        return
    if entries.ratings.dtype == np.float32:
        its = _row_updates[float](moved, fixed, entries, terms, entries.ratings)
    else:
        its = _row_updates[double](moved, fixed, entries, terms, entries.ratings)
    n_threads = hmf_usable_threads(n_threads)
    # dynamic: the time of a piece depends on which factors are cached
    for piece in prange(n_pieces, nogil=True, schedule="dynamic", num_threads=n_threads):
        losses[piece] = its.update(cuts[piece + 1] - cuts[piece], &order[0] + cuts[piece], &its.entries, &its.moved,
                                   &its.fixed, &its.terms)


# ---------------------------------------------------------------------------------------------------------- Hogwild!


cdef struct EntryUpdates:
    entries_kernel update
    hmf_sgd_side user
    hmf_sgd_side item
    hmf_sgd_entries entries
    Py_ssize_t itemsize         # of a rating
    hmf_sgd_terms terms


cdef EntryUpdates _typed_updates(sides, entries, terms, const real[::1] ratings):
    cdef const sgd_table* table = <const sgd_table*> hmf_kernels()
    cdef const int32_t[::1] users = entries.users, items = entries.items
    cdef entries_kernel update = table.sgd_entries_f if real is float else table.sgd_entries_d
    return EntryUpdates(update, _side[real](sides.user, ratings), _side[real](sides.item, ratings),
                        hmf_sgd_entries(users.shape[0], &users[0], &items[0], &ratings[0]), sizeof(real),
                        _terms(terms, sides.user))


cdef EntryUpdates _entry_updates(sides, entries, terms):
    if entries.ratings.dtype == np.float32:
        return _typed_updates[float](sides, entries, terms, entries.ratings)
    return _typed_updates[double](sides, entries, terms, entries.ratings)


cdef inline double _update(const EntryUpdates* its, int64_t first, int64_t last) noexcept nogil:
    """Update the entries from `first` to before `last`."""
    cdef hmf_sgd_entries part = hmf_sgd_entries(last - first, its.entries.users + first, its.entries.items + first,
                                                <const char*> its.entries.ratings + first * its.itemsize)
    return its.update(&part, &its.user, &its.item, &its.terms)


def entries(
        sides,                             # IN OUT `BothSides`
        entries,                           # IN     `EntryList`
        terms,                             # IN     `Terms`
        double[::1] losses,                # OUT    (n_threads,) sums of squared errors, before each update
        int n_threads):
    """Update entries in order; each of several threads takes a consecutive range, and their updates may collide."""
    cdef Py_ssize_t n = len(entries.users), stretch
    cdef int n_stretches
    cdef EntryUpdates its
    if not n:
        return
    its = _entry_updates(sides, entries, terms)
    n_threads = hmf_usable_threads(n_threads)
    n_stretches = n_threads
    for stretch in prange(n_stretches, nogil=True, schedule="static", chunksize=1, num_threads=n_threads):
        losses[stretch] = _update(&its, n * stretch // n_stretches, n * (stretch + 1) // n_stretches)


# ------------------------------------------------------------------------------------------------------------- blocks


cdef struct Deal:
    # entries by users, and their destination
    const int64_t* indptr
    const int32_t* indices
    const int64_t* user_order
    const int32_t* item_block
    int32_t* users              # OUT
    int32_t* items


def deal(
        out,                               # OUT `EntryList`, (nnz,): entries, block by block
        const int64_t[::1] indptr,         # IN  CSR
        const int32_t[::1] indices,
        const real[::1] data,
        const int64_t[::1] user_order,     # IN  (n_users,) users of block 0, then 1, ...
        const int64_t[::1] user_cuts,      # IN  (grid + 1,)
        const int32_t[::1] item_block,     # IN  (n_items,)
        int n_threads):
    """Sort the entries into blocks; returns (grid * grid + 1,) offsets, that of block (p, q) at p * grid + q.

    Inside a block the entries of TURNS users at a time are interleaved, each user's items in ascending order.
    """
    cdef Py_ssize_t grid = user_cuts.shape[0] - 1, p
    cdef int32_t[::1] users = out.users, items = out.items
    cdef real[::1] ratings = out.ratings
    cdef Deal how
    counts_array = np.zeros((grid, grid), dtype=np.int64)
    cdef int64_t[:, ::1] counts = counts_array
    pointer = np.zeros(grid * grid + 1, dtype=np.int64)
    if not data.shape[0]:
        return pointer
    how = Deal(&indptr[0], &indices[0], &user_order[0], &item_block[0], &users[0], &items[0])
    n_threads = hmf_usable_threads(n_threads)
    for p in prange(grid, nogil=True, schedule="dynamic", num_threads=n_threads):
        _count(&how, user_cuts[p], user_cuts[p + 1], &counts[p, 0])
    np.cumsum(counts_array.ravel(), out=pointer[1:])
    counts_array[:] = pointer[: grid * grid].reshape(grid, grid)  # now the position of each block's next entry
    for p in prange(grid, nogil=True, schedule="dynamic", num_threads=n_threads):
        _deal_row(&how, user_cuts[p], user_cuts[p + 1], &data[0], &ratings[0], &counts[p, 0])
    return pointer


cdef void _count(const Deal* how, int64_t first, int64_t last, int64_t* counts) noexcept nogil:
    cdef int64_t at, k
    for at in range(first, last):
        for k in range(how.indptr[how.user_order[at]], how.indptr[how.user_order[at] + 1]):
            counts[how.item_block[how.indices[k]]] += 1


cdef void _deal_row(const Deal* how, int64_t first, int64_t last, const real* data, real* ratings,
                    int64_t* cursor) noexcept nogil:
    """Fill the blocks of one row of the grid: TURNS users deal an entry each; the next user replaces a finished one."""
    cdef int64_t[TURNS] user
    cdef int64_t[TURNS] entry
    cdef int64_t[TURNS] end
    cdef int dealing = 0, left, s
    cdef int64_t at = first, place
    cdef int32_t item, block
    cdef const int64_t* indptr = how.indptr
    while True:
        while dealing < TURNS and at < last:
            user[dealing] = how.user_order[at]
            entry[dealing], end[dealing] = indptr[user[dealing]], indptr[user[dealing] + 1]
            dealing += entry[dealing] < end[dealing]
            at += 1
        if not dealing:
            return
        left = 0
        for s in range(dealing):
            item = how.indices[entry[s]]
            block = how.item_block[item]
            place = cursor[block]
            cursor[block] = place + 1
            how.users[place], how.items[place], ratings[place] = <int32_t> user[s], item, data[entry[s]]
            user[left], entry[left], end[left] = user[s], entry[s] + 1, end[s]
            left += entry[left] < end[left]
        dealing = left


cdef struct Diagonals:
    # shared by workers
    const int64_t* pointer
    const int64_t* shifts
    int32_t n_steps
    int32_t grid
    int32_t* progress           # (grid,) finished steps of each row of the grid
    int32_t* busy               # (grid,)
    int32_t remaining           # blocks
    double* losses


def diagonals(
        sides,                             # IN OUT `BothSides`
        blocks,                            # IN     `EntryBlocks`
        const int64_t[::1] shifts,         # IN     (n_steps,) distinct, of range(grid): step t visits all blocks
                                           #        (p, (p + shifts[t]) % grid)
        terms,                             # IN     `Terms`
        double[:, ::1] losses,             # OUT    (grid, grid) sums of squared errors of the blocks visited
        int n_threads):
    """Visit the blocks of some diagonals; equals one diagonal after the other for any number of threads."""
    cdef const int64_t[::1] pointer = blocks.pointer
    cdef int32_t grid = <int32_t> losses.shape[0], n_steps = <int32_t> shifts.shape[0], worker
    cdef int32_t[::1] progress = np.zeros(grid, dtype=np.int32)
    cdef int32_t[::1] busy = np.zeros(grid, dtype=np.int32)
    cdef EntryUpdates its
    cdef Diagonals shared
    if not len(blocks.entries.users) or not n_steps:
        return
    its = _entry_updates(sides, blocks.entries, terms)
    shared = Diagonals(&pointer[0], &shifts[0], n_steps, grid, &progress[0], &busy[0], grid * n_steps, &losses[0, 0])
    n_threads = hmf_usable_threads(n_threads)
    for worker in prange(n_threads, nogil=True, schedule="static", chunksize=1, num_threads=n_threads):
        _visit_diagonals(&its, &shared, grid * worker // n_threads)


cdef void _visit_diagonals(const EntryUpdates* its, Diagonals* shared, int32_t start) noexcept nogil:
    """One worker: advances the rows of the grid in turn, each when the row it depends on is far enough."""
    cdef int32_t turn, row, t, before, grid = shared.grid
    cdef const int64_t* shifts = shared.shifts
    cdef int32_t* progress = shared.progress
    cdef int64_t block
    cdef bint idle
    while hmf_load(&shared.remaining) > 0:
        idle = True
        for turn in range(grid):
            row = (start + turn) % grid
            t = hmf_load(&progress[row])
            if t >= shared.n_steps:
                continue
            # the row that visits this column in the previous step
            before = <int32_t> ((row + shifts[t] - shifts[t - 1] + grid) % grid) if t else row
            if hmf_load(&progress[before]) < t or not hmf_take(&shared.busy[row]):
                continue
            if hmf_load(&progress[row]) == t:  # else another worker was faster
                block = row * grid + (row + shifts[t]) % grid
                shared.losses[block] = _update(its, shared.pointer[block], shared.pointer[block + 1])
                hmf_store(&progress[row], t + 1)
                hmf_add(&shared.remaining, -1)
                idle = False
            hmf_store(&shared.busy[row], 0)
        if idle:
            hmf_wait()


cdef struct FreeBlocks:
    # shared by workers; `lock` protects `seen`, `busy` and `taken`
    const int64_t* pointer
    int32_t grid
    int32_t* seen
    int32_t* busy               # (2 * grid,) rows of the grid, then columns
    int32_t taken               # blocks
    int32_t last                # stop at that many
    int32_t lock
    double* losses


def free_blocks(
        sides,                             # IN OUT `BothSides`
        blocks,                            # IN     `EntryBlocks`
        int32_t[::1] seen,                 # IN OUT (grid * grid,) order in which this epoch took blocks, from 1; else 0
        int64_t quota,                     # blocks to visit
        uint64_t seed,
        terms,                             # IN     `Terms`
        double[:, ::1] losses,             # OUT    (grid, grid) sums of squared errors of the blocks visited
        int n_threads):
    """Visit up to `quota` blocks not seen yet, each when its row and its column are free."""
    cdef const int64_t[::1] pointer = blocks.pointer
    cdef int32_t grid = <int32_t> losses.shape[0], taken = <int32_t> np.count_nonzero(seen), worker
    cdef int32_t[::1] busy = np.zeros(2 * grid, dtype=np.int32)
    cdef EntryUpdates its
    cdef FreeBlocks shared
    if not len(blocks.entries.users):
        return
    its = _entry_updates(sides, blocks.entries, terms)
    shared = FreeBlocks(&pointer[0], grid, &seen[0], &busy[0], taken, min(taken + quota, grid * grid), 0,
                        &losses[0, 0])
    n_threads = hmf_usable_threads(n_threads)
    for worker in prange(n_threads, nogil=True, schedule="static", chunksize=1, num_threads=n_threads):
        _visit_free(&its, &shared, seed + <uint64_t> worker)


cdef void _visit_free(const EntryUpdates* its, FreeBlocks* shared, uint64_t seed) noexcept nogil:
    """One worker: chooses and releases blocks under `lock`, and updates entries outside it."""
    cdef int64_t block
    cdef int32_t row, column, grid = shared.grid
    while True:
        while not hmf_take(&shared.lock):
            hmf_wait()
        if shared.taken >= shared.last:
            hmf_store(&shared.lock, 0)
            return
        seed = seed * <uint64_t> 6364136223846793005 + <uint64_t> 1442695040888963407
        block = _free_block(grid, seed >> 33, shared.seen, shared.busy)
        if block >= 0:
            row, column = <int32_t> (block // grid), <int32_t> (block % grid)
            shared.busy[row] = shared.busy[grid + column] = 1
            shared.taken += 1
            shared.seen[block] = shared.taken
        hmf_store(&shared.lock, 0)
        if block < 0:
            hmf_wait()
            continue
        shared.losses[block] = _update(its, shared.pointer[block], shared.pointer[block + 1])
        while not hmf_take(&shared.lock):
            hmf_wait()
        shared.busy[row] = shared.busy[grid + column] = 0
        hmf_store(&shared.lock, 0)


cdef inline int64_t _free_block(int32_t grid, uint64_t random, const int32_t* seen, const int32_t* busy) noexcept nogil:
    """A block not seen yet whose row and column are free, searched from a random block on; -1 if there is none."""
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
    """Copy rows into longer or shorter ones; False if a copied value is infinite or NaN."""
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
            bad |= not (value - value == 0)  # infinity and NaN give NaN
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
