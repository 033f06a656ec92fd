"""Rank-one updates of CCD++ on multicore CPUs (Yu, Hsieh, Si and Dhillon 2012; MSGD 3.2.2; BALS 6.2).

For factor t with coordinates u (users) and v (items), and R the residual of all factors but t,

    v_i = sum_u w_ui R_ui u_u / (lambda s_i + sum_u w_ui u_u^2)      then the same for u with v; w = 1 if not given

A bias is such a coordinate whose partner is the constant 1; the side that has the ones keeps them.

The residual is stored by rows and by columns; an update reads and writes each once. The items' pass subtracts the
pending product of the previous factor from the columns, adds u v^T of its own factor back, and sums. The
users' pass adds u v^T back in the rows, sums, solves, and subtracts the new product while the row is in the cache.

    bytes per entry and rank-one update (float32, one inner iteration), without gathers of u and v
    ours    2 passes x (index 4 + residual read 4 + written 4)                                                = 24
    naive   add back, both copies 2 x 12; solve, both sides 2 x 8; subtract, both copies 2 x 12               = 64

Another inner iteration adds 2 x 8 to both. Gathers: (product pending, coordinate) of a user and (old, new coordinate)
of an item lie side by side, so that each pass fetches 8 bytes per entry at once; the naive passes fetch 6 x 4.

Both copies of an entry see the same multiply-adds in the same order (x y = y x, and the sequence is add back,
subtract, add back, ...), so they stay equal, bit for bit, and no permutation between them is needed.

Parallel over groups of consecutive rows of about GROUP_ENTRIES entries, dynamic, since threads meet other cache misses;
in the order of memory, since the arrays stream. A row of more than LONG_ROW entries is cut into segments of SEGMENT
entries, which threads share: their sums are added in order, so the bits do not depend on the number of threads.
"""

import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t

from hybridmf._openmp cimport hmf_thread_id, hmf_usable_threads
from hybridmf.native.kernels cimport real


cdef extern from "ccd_kernels.h" nogil:
    ctypedef struct hmf_ccd_table:
        void (*residual_f)(Py_ssize_t n, Py_ssize_t rank, const float* x, const float* fixed, const int32_t* columns,
                           const float* ratings, float* out) noexcept nogil
        void (*residual_d)(Py_ssize_t n, Py_ssize_t rank, const double* x, const double* fixed, const int32_t* columns,
                           const double* ratings, double* out) noexcept nogil
        void (*accumulate_f)(Py_ssize_t n, int terms, const int32_t* columns, const float* pairs, const float* weights,
                             float p, float q, float* e, float* kept, double* sums) noexcept nogil
        void (*accumulate_d)(Py_ssize_t n, int terms, const int32_t* columns, const double* pairs,
                             const double* weights, double p, double q, double* e, double* kept,
                             double* sums) noexcept nogil
        void (*subtract_f)(Py_ssize_t n, float x, const float* b, float* e) noexcept nogil
        void (*subtract_d)(Py_ssize_t n, double x, const double* b, double* e) noexcept nogil

    const hmf_ccd_table* hmf_ccd_kernels() noexcept


# Change of the residual before an update sums it; the value is the number of terms that ccd_kernels.h adds.
KEEP = 0
ADD_BACK = 1
CATCH_UP = 2

# Fixed numbers: how a row is summed must not depend on the thread count. A segment's residual, indices and gathered
# coordinates take 192 KB in float32, which a 256 KB L2 holds between the two passes.
cdef Py_ssize_t _LONG_ROW = 16384
LONG_ROW = SEGMENT = _LONG_ROW

# Entries a thread takes at a time, a few tens of microseconds; an empty row counts as ROW_COST entries.
GROUP_ENTRIES = 16384
ROW_COST = 8


def schedule(const int64_t[::1] indptr):
    """Cut the rows of one side into pieces of work that do not depend on the thread count.

    Returns
    -------
    groups : int64 array, shape (n_groups + 1,)
        Where groups of consecutive rows start; rows of more than LONG_ROW entries in them are passed over.
    segments : int64 array, shape (n_segments, 3)
        Row, first and last entry (exclusive) of the pieces of long rows.
    """
    pointer = np.asarray(indptr)
    degrees = np.diff(pointer)
    long_rows = np.flatnonzero(degrees > LONG_ROW)
    costs = np.where(degrees > LONG_ROW, 0, degrees) + ROW_COST
    marks = np.arange(GROUP_ENTRIES, costs.sum(), GROUP_ENTRIES, dtype=np.int64)
    cuts = np.searchsorted(np.cumsum(costs), marks, side="left") + 1
    groups = np.unique(np.concatenate(([0], cuts, [len(degrees)]))).astype(np.int64)
    segments = [
        (row, start, min(start + SEGMENT, int(pointer[row + 1])))
        for row in long_rows.tolist()
        for start in range(int(pointer[row]), int(pointer[row + 1]), SEGMENT)
    ]
    return groups, np.array(segments, dtype=np.int64).reshape(-1, 3)


# ---------------------------------------------------------------------------------------------------- kernels, by type


cdef inline void _accumulate(const hmf_ccd_table* table, Py_ssize_t n, int terms, const int32_t* columns,
                             const real* pairs, const real* weights, real p, real q, real* e, real* kept,
                             double* sums) noexcept nogil:
    if real is float:
        table.accumulate_f(n, terms, columns, pairs, weights, p, q, e, kept, sums)
    else:
        table.accumulate_d(n, terms, columns, pairs, weights, p, q, e, kept, sums)


cdef inline void _subtract(const hmf_ccd_table* table, Py_ssize_t n, real x, const real* b, real* e) noexcept nogil:
    if real is float:
        table.subtract_f(n, x, b, e)
    else:
        table.subtract_d(n, x, b, e)


cdef inline void _residual(const hmf_ccd_table* table, Py_ssize_t n, Py_ssize_t rank, const real* x, const real* fixed,
                           const int32_t* columns, const real* ratings, real* out) noexcept nogil:
    if real is float:
        table.residual_f(n, rank, x, fixed, columns, ratings, out)
    else:
        table.residual_d(n, rank, x, fixed, columns, ratings, out)


# ------------------------------------------------------------------------------------------------------------ residual


def residual(
        const real[:, ::1] rows,            # IN   (n_rows, rank)
        const real[:, ::1] fixed,           # IN   (n_columns, rank)
        const int64_t[::1] indptr, const int32_t[::1] indices, const real[::1] ratings,   # IN   CSR
        real[::1] out,                      # OUT  (nnz,)
        const int64_t[::1] groups, const int64_t[:, ::1] segments,   # IN   `schedule`, or a part of it
        int n_threads):
    """out = ratings - rows . fixed for the entries of the given groups and segments.

    Dot products in the type of the factors, by vectors of partial sums: within (rank / lanes + 6) 2^-24 |x| |y| in
    float32. Both orientations of a matrix get the same bits.
    """
    cdef const hmf_ccd_table* table = hmf_ccd_kernels()
    cdef Py_ssize_t task, row, start, n_segments = segments.shape[0], n_groups = groups.shape[0] - 1
    cdef Py_ssize_t rank = rows.shape[1]
    n_threads = hmf_usable_threads(min(n_threads, n_segments + n_groups))
    if ratings.shape[0] == 0 or n_segments + n_groups == 0:
        return
    for task in prange(n_segments + n_groups, nogil=True, schedule="dynamic", num_threads=n_threads):
        if task < n_segments:
            row, start = segments[task, 0], segments[task, 1]
            _residual(table, segments[task, 2] - start, rank, &rows[row, 0], &fixed[0, 0], &indices[0] + start,
                      &ratings[0] + start, &out[0] + start)
        else:
            for row in range(groups[task - n_segments], groups[task - n_segments + 1]):
                start = indptr[row]
                if indptr[row + 1] - start <= _LONG_ROW:
                    _residual(table, indptr[row + 1] - start, rank, &rows[row, 0], &fixed[0, 0], &indices[0] + start,
                              &ratings[0] + start, &out[0] + start)


# ------------------------------------------------------------------------------------------------------ rank-one update


cdef struct Update:
    # of one side; NULL where unused
    const hmf_ccd_table* table
    int terms               # KEEP, ADD_BACK or CATCH_UP
    bint nonnegative
    bint subtract           # the new product from the residual, once the row is solved
    const int64_t* indptr
    const int32_t* columns
    const double* ridge     # (n_rows,) lambda s; NULL: coordinates stay as they are


cdef inline double _solved(Update* how, double* sums, Py_ssize_t row, double old) noexcept nogil:
    """Minimizer over one coordinate; 0 where any value would do (no entry meets it, and no penalty)."""
    if how.ridge == NULL:
        return old
    cdef double curvature = sums[1] + how.ridge[row]
    if curvature == 0:
        return 0.0
    if how.nonnegative and sums[0] <= 0:
        return 0.0
    return sums[0] / curvature


cdef inline void _store(
        Update* how, Py_ssize_t row, real new,
        real* coordinates, real* own, const real* following) noexcept nogil:   # OUT  (n_rows,), (n_rows, 2)
    """Keep a new coordinate, and set the pair that the other side will gather."""
    if following != NULL:   # this product is pending there, and the next factor follows
        own[2 * row] = new
        own[2 * row + 1] = following[row]
    else:
        if how.terms != 0:   # adds back the product of the previous coordinate
            own[2 * row] = coordinates[row]
        own[2 * row + 1] = new
    coordinates[row] = new


cdef void _update_row(
        Update* how, Py_ssize_t row, const real* pairs, const real* weights, const real* pending,
        const real* following, real* kept,
        real* e, real* coordinates, real* own) noexcept nogil:   # IN OUT
    cdef Py_ssize_t start = how.indptr[row], n = how.indptr[row + 1] - start
    cdef double sums[2]
    cdef real new, old = coordinates[row]
    sums[0] = sums[1] = 0
    _accumulate(how.table, n, how.terms, how.columns + start, pairs, weights + start if weights != NULL else NULL,
                -pending[row] if pending != NULL else old, old, e + start, kept if how.subtract else NULL, sums)
    new = <real> _solved(how, sums, row, old)
    _store(how, row, new, coordinates, own, following)
    if how.subtract:
        _subtract(how.table, n, new, <const real*> kept, e + start)


def update(
        real[::1] coordinates,              # IN OUT (n_rows,) of this factor
        real[:, ::1] own,                   # IN OUT (n_rows, 2) pairs of this side, which the other side gathers
        const real[:, ::1] pairs,           # IN   (n_columns, 2) pairs of the other side
        const int64_t[::1] indptr, const int32_t[::1] indices,   # IN   CSR, one row for each coordinate
        real[::1] e,                        # IN OUT (nnz,) residual
        const real[::1] weights,            # IN   (nnz,) or empty
        const double[::1] ridge,            # IN   (n_rows,) lambda s, or empty: coordinates stay as they are
        const real[::1] pending,            # IN   (n_rows,) with CATCH_UP: coordinates of the product to subtract
        const real[::1] following,          # IN   (n_rows,) coordinates of the next factor, or empty
        const int64_t[::1] groups, const int64_t[:, ::1] segments,   # IN   `schedule`
        real[:, ::1] workspace,             # scratch (n_threads, LONG_ROW)
        int terms, bint nonnegative, int n_threads):
    """Solve one factor's coordinates of one side, with the residual changed in the same pass.

    With pairs (a, b): CATCH_UP takes ``e <- e - pending a + coordinate b`` (a: what is pending there), ADD_BACK
    ``e <- e + coordinate a`` (a: old, b: new), KEEP leaves e. Then ``coordinate <- sum w e b / (ridge + sum w b^2)``.
    `following` marks the last update of a factor: ``e <- e - coordinate b``, and the pairs left in `own` are
    (coordinate, following); else they are (coordinate before the factor's turn, coordinate).
    """
    cdef const hmf_ccd_table* table = hmf_ccd_kernels()
    cdef Py_ssize_t task, row, k, n, start, n_segments = segments.shape[0], n_groups = groups.shape[0] - 1
    cdef double[:, ::1] sums = np.zeros((max(n_segments, 1), 2))
    cdef double total[2]
    cdef real old
    # each of many short calls would have to wait for threads without work, too
    n_threads = hmf_usable_threads(min(n_threads, n_segments + n_groups))
    if indices.shape[0] == 0:
        return
    cdef const double* ridge_ = &ridge[0] if ridge.shape[0] else NULL
    cdef Update how = Update(table, terms, nonnegative, following.shape[0] > 0, &indptr[0], &indices[0], ridge_)
    cdef real* e_ = &e[0]
    cdef real* coordinates_ = &coordinates[0]
    cdef real* own_ = &own[0, 0]
    cdef const real* pairs_ = &pairs[0, 0]
    cdef const real* weights_ = &weights[0] if weights.shape[0] else NULL
    cdef const real* pending_ = &pending[0] if pending.shape[0] else NULL
    cdef const real* following_ = &following[0] if following.shape[0] else NULL
    for task in prange(n_segments + n_groups, nogil=True, schedule="dynamic", num_threads=n_threads):
        if task < n_segments:
            row, start = segments[task, 0], segments[task, 1]
            old = coordinates_[row]
            _accumulate(table, segments[task, 2] - start, terms, &indices[0] + start, pairs_,
                        weights_ + start if weights_ != NULL else NULL,
                        -pending_[row] if pending_ != NULL else old, old, e_ + start, NULL, &sums[task, 0])
        else:
            for row in range(groups[task - n_segments], groups[task - n_segments + 1]):
                if how.indptr[row + 1] - how.indptr[row] <= _LONG_ROW:
                    _update_row(&how, row, pairs_, weights_, pending_, following_, &workspace[hmf_thread_id(), 0], e_,
                                coordinates_, own_)
    if n_segments == 0:
        return
    total[0] = total[1] = 0
    for k in range(n_segments):   # in the order of entries
        row = segments[k, 0]
        total[0] += sums[k, 0]
        total[1] += sums[k, 1]
        if k + 1 == n_segments or segments[k + 1, 0] != row:
            _store(&how, row, <real> _solved(&how, total, row, coordinates_[row]), coordinates_, own_, following_)
            total[0] = total[1] = 0
    if how.subtract:
        for k in prange(n_segments, nogil=True, schedule="dynamic", num_threads=n_threads):
            start = segments[k, 1]
            n = segments[k, 2] - start
            # gathers again: keeping the coordinates of all long rows would take as much memory as the residual
            _accumulate(table, n, 0, &indices[0] + start, pairs_, <const real*> NULL, <real> 0, <real> 0, e_ + start,
                        &workspace[hmf_thread_id(), 0], &sums[k, 0])
            _subtract(table, n, coordinates_[segments[k, 0]], <const real*> &workspace[hmf_thread_id(), 0], e_ + start)
