"""Rank-one updates of CCD++ on multicore CPUs (Yu, Hsieh, Si and Dhillon 2012; MSGD 3.2.2; BALS 6.2).

For factor t with coordinates u (users) and v (items), and R the residual of all factors but t,

    v_i = sum_u R_ui u_u / (lambda s_i + sum_u u_u^2)      then the same for u with v

A bias is a coordinate whose partner is the constant 1; the side with the ones keeps them.

The residual is stored by rows and by columns; an update reads and writes each once. The items' pass subtracts the
pending product of the previous factor from the columns, adds u v^T of its own factor back, and sums. The users' pass
adds u v^T back in the rows, sums, solves, and subtracts the new product while the row is in the cache.

    bytes per entry and rank-one update (float32, one inner iteration) without gathers of u and v
    ours    2 passes x (index 4 + residual read 4 + written 4)                                                = 24
    naive   add back, both copies 2 x 12; solve, both sides 2 x 8; subtract, both copies 2 x 12               = 64

Another inner iteration adds 2 x 8 to both. Gathers: (product pending, coordinate) of a user and (old, new coordinate)
of an item are adjacent, so each pass fetches 8 bytes per entry at once; the naive passes fetch 6 x 4.

Both copies of an entry see the same multiply-adds in the same order (x y = y x, and the sequence is add back,
subtract, add back, ...), so they stay equal, bit for bit, and no permutation between them is needed.

Parallel over groups of consecutive rows of about GROUP_ENTRIES entries: dynamic, since cache misses differ between
groups; in memory order, since the arrays stream. Threads share rows of more than LONG_ROW entries in segments of
SEGMENT entries, whose sums are added in order, so results do not depend on the number of threads.
"""

import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t

from hybridmf._openmp cimport hmf_thread_id, hmf_usable_threads
from hybridmf.native._kernels cimport hmf_ccd_kernels
from hybridmf.native.ccd_kernels cimport hmf_ccd_entries, hmf_ccd_table
from hybridmf.native.kernels cimport real


# Change of the residual before an update sums it; the value is the number of terms that the kernel adds.
KEEP = 0
ADD_BACK = 1
CATCH_UP = 2

# Fixed: the order of summation must not depend on the thread count. A segment's residual, indices and gathered
# coordinates take 192 KB in float32 and stay in a 256 KB L2 between the two passes.
cdef Py_ssize_t _LONG_ROW = 16384
LONG_ROW = SEGMENT = _LONG_ROW

# Entries per task, a few tens of microseconds; each row counts as ROW_COST more entries.
GROUP_ENTRIES = 16384
ROW_COST = 8


def schedule(const int64_t[::1] indptr):
    """Divide the rows of one side into tasks that do not depend on the thread count.

    Returns
    -------
    groups : int64 array, shape (n_groups + 1,)
        Where groups of consecutive rows start; updates skip their rows of more than LONG_ROW entries.
    segments : int64 array, shape (n_segments, 3)
        Row, first and last entry (exclusive) of each segment of a long row.
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


cdef inline void _accumulate(const hmf_ccd_table* table, const hmf_ccd_entries* entries, int terms, const real* pairs,
                             real p, real q, double* sums) noexcept nogil:
    if real is float:
        table.accumulate_f(entries, terms, pairs, p, q, sums)
    else:
        table.accumulate_d(entries, terms, pairs, p, q, sums)


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
        const real[:, ::1] factors,         # IN   (n_rows, rank)
        const real[:, ::1] fixed,           # IN   (n_columns, rank)
        rows,                               # IN   `hybridmf.native.arguments.ResidualRows`; OUT its residual
        const real[::1] ratings,            # IN   (nnz,)
        int n_threads):
    """residual = ratings - factors . fixed for the entries of the given groups and segments.

    Dot products use the type of the factors and vectors of partial sums: their error is at most
    (rank / lanes + 6) 2^-24 |x| |y| in float32. Both orientations of a matrix get the same bits.
    """
    cdef const hmf_ccd_table* table = hmf_ccd_kernels()
    cdef const int64_t[::1] indptr = rows.indptr, groups = rows.groups
    cdef const int32_t[::1] indices = rows.indices
    cdef const int64_t[:, ::1] segments = rows.segments
    cdef real[::1] out = rows.residual
    cdef Py_ssize_t task, row, start, n_segments = segments.shape[0], n_groups = groups.shape[0] - 1
    cdef Py_ssize_t rank = factors.shape[1]
    n_threads = hmf_usable_threads(min(n_threads, n_segments + n_groups))
    if ratings.shape[0] == 0 or n_segments + n_groups == 0:
        return
    for task in prange(n_segments + n_groups, nogil=True, schedule="dynamic", num_threads=n_threads):
        if task < n_segments:
            row, start = segments[task, 0], segments[task, 1]
            _residual(table, segments[task, 2] - start, rank, &factors[row, 0], &fixed[0, 0], &indices[0] + start,
                      &ratings[0] + start, &out[0] + start)
        else:
            for row in range(groups[task - n_segments], groups[task - n_segments + 1]):
                start = indptr[row]
                if indptr[row + 1] - start <= _LONG_ROW:
                    _residual(table, indptr[row + 1] - start, rank, &factors[row, 0], &fixed[0, 0], &indices[0] + start,
                              &ratings[0] + start, &out[0] + start)


# ------------------------------------------------------------------------------------------------------ rank-one update


cdef struct Update:
    # of one side; arrays have the type of the factors, or are NULL if unused
    const hmf_ccd_table* table
    int terms               # KEEP, ADD_BACK or CATCH_UP
    bint nonnegative
    const int64_t* indptr
    const int32_t* columns
    void* e                 # (nnz,) residual
    const double* ridge     # (n_rows,) lambda s; NULL: keep the coordinates
    void* coordinates       # (n_rows,)
    void* own               # (n_rows, 2) pairs of this side
    const void* pairs       # (n_columns, 2) pairs of the other side
    const void* pending     # (n_rows,)
    const void* following   # (n_rows,) or NULL: the new product stays in the residual


cdef inline double _solved(const Update* how, double* sums, Py_ssize_t row, double old) noexcept nogil:
    """Minimizer over one coordinate; 0 if any value is one (no entries and no penalty)."""
    if how.ridge == NULL:
        return old
    cdef double curvature = sums[1] + how.ridge[row]
    if curvature == 0:
        return 0.0
    if how.nonnegative and sums[0] <= 0:
        return 0.0
    return sums[0] / curvature


cdef inline void _store(const Update* how, Py_ssize_t row, real new) noexcept nogil:
    """Keep a new coordinate, and set the pair that the other side will gather."""
    cdef real* coordinates = <real*> how.coordinates
    cdef real* own = <real*> how.own
    if how.following != NULL:   # the other side still has to subtract this product; then the next factor follows
        own[2 * row] = new
        own[2 * row + 1] = (<const real*> how.following)[row]
    else:
        if how.terms != 0:   # the other side adds back the product of the old coordinate
            own[2 * row] = coordinates[row]
        own[2 * row + 1] = new
    coordinates[row] = new


cdef inline hmf_ccd_entries _entries(const Update* how, Py_ssize_t start, Py_ssize_t n, real* kept) noexcept nogil:
    """`n` entries from position `start` on."""
    return hmf_ccd_entries(n, how.columns + start, <real*> how.e + start, kept)


cdef inline void _sum_entries(const Update* how, Py_ssize_t row, const hmf_ccd_entries* entries, real old,
                              double* sums) noexcept nogil:
    """Change the residual of a row's entries, given its coordinate `old`, and add them to the row's sums."""
    cdef const real* pending = <const real*> how.pending
    _accumulate(how.table, entries, how.terms, <const real*> how.pairs, -pending[row] if pending != NULL else old, old,
                sums)


cdef void _update_row(const Update* how, Py_ssize_t row, real* kept) noexcept nogil:
    cdef Py_ssize_t start = how.indptr[row], n = how.indptr[row + 1] - start
    cdef bint subtract = how.following != NULL
    cdef hmf_ccd_entries entries = _entries(how, start, n, kept)
    cdef double sums[2]
    cdef real new, old = (<real*> how.coordinates)[row]
    sums[0] = sums[1] = 0
    if not subtract:
        entries.kept = NULL
    _sum_entries(how, row, &entries, old, sums)
    new = <real> _solved(how, sums, row, old)
    _store(how, row, new)
    if subtract:
        _subtract(how.table, n, new, <const real*> kept, <real*> entries.e)


def update(
        real[::1] coordinates,              # IN OUT (n_rows,) of this factor
        real[:, ::1] own,                   # IN OUT (n_rows, 2) pairs of this side, which the other side gathers
        const real[:, ::1] pairs,           # IN   (n_columns, 2) pairs of the other side
        rows,                               # IN OUT `hybridmf.native.arguments.ResidualRows`
        change,                             # IN   `hybridmf.native.arguments.Change`
        const double[::1] ridge,            # IN   (n_rows,) lambda s, or empty: keep the coordinates
        bint nonnegative,
        real[:, ::1] workspace):            # scratch (n_threads, LONG_ROW); limits the threads
    """Solve one factor's coordinates of one side and update the residual in the same pass.

    With pairs (a, b): CATCH_UP takes ``e <- e - pending a + coordinate b`` (a: factor of the pending product), ADD_BACK
    ``e <- e + coordinate a`` (a: old, b: new), KEEP leaves e. Then ``coordinate <- sum e b / (ridge + sum b^2)``.
    `following` marks the last update of a factor: ``e <- e - coordinate b``, and `own` then holds the pairs
    (coordinate, following); else (coordinate before this factor's first update, coordinate).
    """
    cdef const int64_t[::1] indptr = rows.indptr, groups = rows.groups
    cdef const int32_t[::1] indices = rows.indices
    cdef const int64_t[:, ::1] segments = rows.segments
    cdef real[::1] e = rows.residual
    cdef const real[::1] pending = change.pending, following = change.following
    cdef Py_ssize_t task, row, k, n_segments = segments.shape[0], n_groups = groups.shape[0] - 1
    cdef double[:, ::1] sums = np.zeros((max(n_segments, 1), 2))
    cdef double total[2]
    # no idle threads: many short calls would also wait for them
    cdef int n_threads = hmf_usable_threads(<int> min(workspace.shape[0], n_segments + n_groups))
    if indices.shape[0] == 0:
        return
    cdef const double* ridge_ = &ridge[0] if ridge.shape[0] else NULL
    cdef const real* pending_ = &pending[0] if pending.shape[0] else NULL
    cdef const real* following_ = &following[0] if following.shape[0] else NULL
    cdef Update how = Update(hmf_ccd_kernels(), change.terms, nonnegative, &indptr[0], &indices[0], &e[0], ridge_,
                             &coordinates[0], &own[0, 0], &pairs[0, 0], pending_, following_)
    for task in prange(n_segments + n_groups, nogil=True, schedule="dynamic", num_threads=n_threads):
        if task < n_segments:
            _sum_segment(&how, &segments[task, 0], coordinates[segments[task, 0]], &sums[task, 0])
        else:
            for row in range(groups[task - n_segments], groups[task - n_segments + 1]):
                if how.indptr[row + 1] - how.indptr[row] <= _LONG_ROW:
                    _update_row(&how, row, &workspace[hmf_thread_id(), 0])
    if n_segments == 0:
        return
    total[0] = total[1] = 0
    for k in range(n_segments):   # in the order of entries
        row = segments[k, 0]
        total[0] += sums[k, 0]
        total[1] += sums[k, 1]
        if k + 1 == n_segments or segments[k + 1, 0] != row:
            _store[real](&how, row, <real> _solved(&how, total, row, coordinates[row]))
            total[0] = total[1] = 0
    if following_ != NULL:
        for k in prange(n_segments, nogil=True, schedule="dynamic", num_threads=n_threads):
            _subtract_segment(&how, &segments[k, 0], coordinates[segments[k, 0]], &workspace[hmf_thread_id(), 0])


cdef void _sum_segment(const Update* how, const int64_t* segment, real old, double* sums) noexcept nogil:
    cdef hmf_ccd_entries entries = _entries[real](how, segment[1], segment[2] - segment[1], NULL)
    _sum_entries(how, segment[0], &entries, old, sums)


cdef void _subtract_segment(const Update* how, const int64_t* segment, real new, real* kept) noexcept nogil:
    cdef hmf_ccd_entries entries = _entries(how, segment[1], segment[2] - segment[1], kept)
    cdef double unused[2]
    unused[0] = unused[1] = 0
    # gathers again: storing the coordinates of all long rows could take as much memory as the residual
    _accumulate(how.table, &entries, 0, <const real*> how.pairs, <real> 0, <real> 0, unused)
    _subtract(how.table, entries.n, new, <const real*> kept, <real*> entries.e)
