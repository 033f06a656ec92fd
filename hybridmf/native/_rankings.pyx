"""Metrics of rankings in one pass over users, which looks up the gains of each list and sums the requested metrics.

Parallel over users, dynamic because they differ in relevant items. A user's values are sums in order of rank and do
not depend on other users, other metrics or threads.
"""

import numpy as np

from cython.parallel cimport prange
from libc.math cimport NAN
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport qsort

from hybridmf._openmp cimport hmf_thread_id, hmf_usable_threads

PRECISION = 0
RECALL = 1
AVERAGE_PRECISION = 2
NDCG = 3
RECIPROCAL_RANK = 4
HIT_RATE = 5
NOVELTY = 6

cdef enum:
    _PRECISION = 0
    _RECALL = 1
    _AVERAGE_PRECISION = 2
    _NDCG = 3
    _RECIPROCAL_RANK = 4
    _HIT_RATE = 5
    _NOVELTY = 6
    SHORT = 64       # longest list for which comparing all pairs of ids is faster than sorting
    FEW_USERS = 512  # below this many users a second thread costs more than it saves

ctypedef fused id_t:
    int32_t
    int64_t


cdef int _descending(const void* a, const void* b) noexcept nogil:
    cdef double x = (<const double*> a)[0], y = (<const double*> b)[0]
    return (x < y) - (x > y)


cdef int _ascending(const void* a, const void* b) noexcept nogil:
    cdef int64_t x = (<const int64_t*> a)[0], y = (<const int64_t*> b)[0]
    return (x > y) - (x < y)


cdef bint _is_ranking(
        const id_t* ids, Py_ssize_t n,   # IN   (n,) item positions, -1 for none
        Py_ssize_t n_items,
        int64_t* scratch) noexcept nogil:   # scratch (n,)
    """Whether ids are in range and only -1 repeats."""
    cdef Py_ssize_t j, k
    for j in range(n):
        if ids[j] < -1 or ids[j] >= n_items:
            return False
    if n <= SHORT:
        for j in range(1, n):
            for k in range(j):
                if ids[j] == ids[k] and ids[j] >= 0:
                    return False
        return True
    for j in range(n):
        scratch[j] = ids[j]
    qsort(scratch, n, sizeof(int64_t), _ascending)
    for j in range(1, n):
        if scratch[j] == scratch[j - 1] and scratch[j] >= 0:
            return False
    return True


cdef double _gain_of(id_t item, const int32_t* indices, const float* data, Py_ssize_t n) noexcept nogil:
    """Value of an item in a row with ascending indices, 0 if it is not there."""
    cdef Py_ssize_t low = 0, high = n, middle
    while low < high:
        middle = (low + high) // 2
        if indices[middle] < item:
            low = middle + 1
        else:
            high = middle
    return data[low] if low < n and indices[low] == item else 0.0


cdef struct Metrics:
    # requested for each list
    Py_ssize_t n                # ids of a list
    Py_ssize_t n_items
    Py_ssize_t n_metrics
    const int32_t* kinds        # (n_metrics,)
    const int64_t* cuts         # (n_metrics,)
    const double* discounts     # (longest cut,) weight of each rank
    const double* information   # (n_items,) for NOVELTY
    Py_ssize_t n_shown
    const int64_t* shown_cuts   # (n_shown,)
    uint8_t* shown              # OUT  (n_shown, n_items)


cdef double _metric(
        const Metrics* asked, Py_ssize_t which,
        const id_t* ids,                               # IN   (asked.n,)
        const double* gains,                           # IN   (asked.n,) gain at each rank
        const double* ideal, Py_ssize_t n_relevant     # IN   (n_relevant,) gains of the relevant items, falling
        ) noexcept nogil:
    cdef int kind = asked.kinds[which]
    cdef Py_ssize_t cut = asked.cuts[which], n = asked.n
    cdef Py_ssize_t rank, hits = 0, shown = 0
    cdef double total = 0.0, best = 0.0
    cdef Py_ssize_t last = cut if cut < n else n
    for rank in range(last):
        if kind == _NDCG:
            total += gains[rank] * asked.discounts[rank]
        elif kind == _NOVELTY:
            if ids[rank] >= 0:
                shown += 1
                total += asked.information[ids[rank]]
        elif gains[rank] > 0:
            hits += 1
            total += hits / <double> (rank + 1)
            if kind == _RECIPROCAL_RANK:
                return total
    if kind == _PRECISION:
        return hits / <double> cut
    if kind == _RECALL:
        return hits / <double> n_relevant
    if kind == _AVERAGE_PRECISION:
        return total / n_relevant
    if kind == _RECIPROCAL_RANK:
        return 0.0
    if kind == _HIT_RATE:
        return 1.0 if hits else 0.0
    if kind == _NOVELTY:
        return total / shown if shown else NAN
    for rank in range(cut if cut < n_relevant else n_relevant):
        best += ideal[rank] * asked.discounts[rank]
    # Rounding may lift a ranking that is not ideal above one that is.
    return total / best if total < best else 1.0


cdef struct Relevant:
    # items of a user, with their gains
    const int32_t* indices
    const float* gains
    Py_ssize_t n


cdef struct Scratch:
    double* gains               # (ids of a list,)
    double* ideal               # (relevant items,)
    int64_t* ids                # (ids of a list,)


cdef bint _measure(
        const Metrics* asked, const id_t* ids, Relevant relevant, Scratch scratch,
        double* out, Py_ssize_t stride) noexcept nogil:   # OUT  one value for each metric
    """One user's metrics; False if an id is out of range or repeats."""
    cdef Py_ssize_t rank, k
    cdef bint sorted_already = True
    if not _is_ranking(ids, asked.n, asked.n_items, scratch.ids):
        return False
    for rank in range(asked.n):
        scratch.gains[rank] = _gain_of(ids[rank], relevant.indices, relevant.gains, relevant.n)
    for k in range(relevant.n):
        scratch.ideal[k] = relevant.gains[k]
        sorted_already &= relevant.gains[k] <= relevant.gains[k - 1 if k else 0]
    if not sorted_already:
        qsort(scratch.ideal, relevant.n, sizeof(double), _descending)
    for k in range(asked.n_metrics):
        out[k * stride] = NAN
        if relevant.n or asked.kinds[k] == _NOVELTY:
            out[k * stride] = _metric(asked, k, ids, scratch.gains, scratch.ideal, relevant.n)
    for k in range(asked.n_shown):
        for rank in range(min(asked.shown_cuts[k], asked.n)):
            # Threads may mark an item at the same time: all write the same byte, most often already set.
            if ids[rank] >= 0 and not asked.shown[k * asked.n_items + ids[rank]]:
                asked.shown[k * asked.n_items + ids[rank]] = 1
    return True


def measure(const id_t[:, ::1] recommended, const int64_t[::1] rows, relevant, metrics, int num_threads):
    """Metrics of each user's ranking.

    Parameters
    ----------
    recommended : int32 or int64 array, shape (n_users, n_columns)
        Item positions, best first; -1 for none.
    rows : int64 array, shape (n_users,)
        Each user's row of the matrix.
    relevant : tuple of CSR arrays (indptr, indices, data)
        Relevant items and their gains, all positive; indices ascend within rows.
    metrics : hybridmf.native.arguments.RankingMetrics
    num_threads : int

    Returns
    -------
    float64 array, shape (n_metrics, n_users), or None
        NaN for users without a relevant item, and for NOVELTY of empty lists. None if an id is out of range or repeats
        for a user.
    """
    cdef const int64_t[::1] indptr = relevant[0]
    cdef const int32_t[::1] indices = relevant[1]
    cdef const float[::1] data = relevant[2]
    cdef Py_ssize_t n_items = metrics.n_items
    cdef const int32_t[::1] kinds = metrics.kinds
    cdef const int64_t[::1] cuts = metrics.cuts
    cdef const double[::1] discounts = metrics.discounts
    cdef const double[::1] information = metrics.information
    cdef const int64_t[::1] shown_cuts = metrics.shown_cuts
    cdef uint8_t[:, ::1] shown = metrics.shown
    cdef Py_ssize_t n_users = recommended.shape[0], n_columns = recommended.shape[1], user, row, thread
    cdef int n = 1 if n_users < FEW_USERS else hmf_usable_threads(num_threads)
    cdef int faults = 0
    cdef Py_ssize_t longest = np.diff(indptr).max(initial=0)
    out = np.empty((kinds.shape[0], n_users))
    if n_users == 0:
        return out
    cdef double[:, ::1] out_view = out if len(out) else np.empty((1, n_users))
    # one element more, so that empty arrays have an address
    cdef double[:, ::1] gains = np.empty((n, n_columns + 1))
    cdef double[:, ::1] ideal = np.empty((n, longest + 1))
    cdef int64_t[:, ::1] scratch = np.empty((n, n_columns + 1), dtype=np.int64)
    cdef const id_t* ids = &recommended[0, 0] if n_columns else NULL
    cdef const int32_t* items = &indices[0] if indices.shape[0] else NULL
    cdef const float* values = &data[0] if indices.shape[0] else NULL
    cdef const int32_t* which = &kinds[0] if kinds.shape[0] else NULL
    cdef const int64_t* ranks = &cuts[0] if cuts.shape[0] else NULL
    cdef const double* weights = &discounts[0] if discounts.shape[0] else NULL
    cdef const double* bits = &information[0] if information.shape[0] else NULL
    cdef const int64_t* marked = &shown_cuts[0] if shown_cuts.shape[0] else NULL
    cdef uint8_t* marks = &shown[0, 0] if shown.shape[0] and shown.shape[1] else NULL
    cdef Metrics asked = Metrics(n_columns, n_items, kinds.shape[0], which, ranks, weights, bits, shown_cuts.shape[0],
                                 marked, marks)
    for user in prange(n_users, nogil=True, schedule="dynamic", chunksize=256, num_threads=n):
        row = rows[user]
        thread = hmf_thread_id()
        faults += not _measure(&asked, ids + user * n_columns,
                               Relevant(items + indptr[row], values + indptr[row], indptr[row + 1] - indptr[row]),
                               Scratch(&gains[thread, 0], &ideal[thread, 0], &scratch[thread, 0]),
                               &out_view[0, user], n_users)
    return None if faults else out
