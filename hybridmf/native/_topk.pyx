"""The N best items of each user, without a users x items matrix.

Items are packed once, by descending norm, into blocks that fit in cache. For each batch of users and block of items,
the kernel `score` computes all scores; a score above the user's N-th best enters the user's heap unless the item is
excluded. A user is done when |x| |y| bounds all further scores below the N-th best: exact pruning by norms (Teflioudi
et al., LEMP, SIGMOD 2015), with a margin for rounding. Ties go to the lower item.

Each score is one chain of multiply-adds over the factors and does not depend on batch, block, order or thread.
Parallel over batches of users, dynamic because pruning ends them at different points.
"""

import numpy as np

from cython.parallel cimport prange
from libc.float cimport DBL_EPSILON, FLT_EPSILON
from libc.math cimport INFINITY, fabs, sqrt
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from hybridmf._openmp cimport hmf_thread_id, hmf_usable_threads
from hybridmf.native._kernels cimport hmf_kernels
from hybridmf.native.kernels cimport HMF_PANEL, first_at_least, hmf_kernel_table, real, score

cdef enum:
    BATCH_USERS = 48                 # users that share each block; a multiple of every table's score tile
    BLOCK_ITEMS = 256                # 64 KB packed at f = 64, and the scores of a batch 48 KB


cdef inline bint _worse(real score_a, int32_t id_a, real score_b, int32_t id_b) noexcept nogil:
    """Whether a ranks below b: lower score, or an equal score and a higher item."""
    return score_a < score_b or (score_a == score_b and id_a > id_b)


cdef void _sift_down(real* scores, int32_t* ids, Py_ssize_t size, real new_score, int32_t new_id) noexcept nogil:
    """Replace the root of a heap, its last-ranked element, and restore the heap."""
    cdef Py_ssize_t parent = 0, child = 1
    while child < size:
        if child + 1 < size and _worse(scores[child + 1], ids[child + 1], scores[child], ids[child]):
            child += 1
        if not _worse(scores[child], ids[child], new_score, new_id):
            break
        scores[parent] = scores[child]
        ids[parent] = ids[child]
        parent = child
        child = 2 * parent + 1
    scores[parent] = new_score
    ids[parent] = new_id


cdef void _sort_heap(real* scores, int32_t* ids, Py_ssize_t size) noexcept nogil:
    """Sort a heap in place, best first: moves the root, which ranks last, to the end until none is left."""
    cdef Py_ssize_t end
    cdef real last_score
    cdef int32_t last_id
    for end in range(size - 1, 0, -1):
        last_score = scores[end]
        last_id = ids[end]
        scores[end] = scores[0]
        ids[end] = ids[0]
        _sift_down(scores, ids, end, last_score, last_id)


cdef bint _contains(const int32_t* items, Py_ssize_t n, int32_t item) noexcept nogil:
    """Binary search in a sorted list."""
    cdef Py_ssize_t low = 0, high = n, middle
    while low < high:
        middle = (low + high) // 2
        if items[middle] < item:
            low = middle + 1
        else:
            high = middle
    return low < n and items[low] == item


cdef struct Search:
    # shared by all batches; arrays have the type of the factors
    const hmf_kernel_table* table
    Py_ssize_t rank
    const void* users           # (n_users, rank)
    const void* packed          # see pack
    const int32_t* item_ids     # (n_items,)
    const double* block_norms   # (n_blocks,) largest norm of each block
    Py_ssize_t n_items
    const int64_t* seen_first   # (n_users,) start of each user's seen items; NULL: none are excluded
    const int64_t* seen_last    # (n_users,) and their end
    const int32_t* seen
    Py_ssize_t size             # items of each user
    void* best                  # OUT  (n_users, size) scores
    int32_t* ids                # OUT  (n_users, size)


cdef void _offer(
        const Search* search, Py_ssize_t user,
        const real* scores, Py_ssize_t first, Py_ssize_t n_items) noexcept nogil:   # IN   the user's scores of a block
    """Add the best items of a block to a user's heap. Only items that would enter are checked against seen ones."""
    cdef real* best = <real*> search.best + user * search.size
    cdef int32_t* ids = search.ids + user * search.size
    cdef const int32_t* block_ids = search.item_ids + first
    cdef const int32_t* seen = NULL
    cdef Py_ssize_t n_seen = 0, i
    if search.seen_first != NULL:
        seen = search.seen + search.seen_first[user]
        n_seen = search.seen_last[user] - search.seen_first[user]
    i = first_at_least(search.table, n_items, scores, best[0], 0)
    while i < n_items:
        if _worse(best[0], ids[0], scores[i], block_ids[i]) and not _contains(seen, n_seen, block_ids[i]):
            _sift_down(best, ids, search.size, scores[i], block_ids[i])
        i = first_at_least(search.table, n_items, scores, best[0], i + 1)


cdef double _norm(const real* row, Py_ssize_t rank) noexcept nogil:
    """Length of a row in float64, scaled so that squares of tiny or huge factors neither underflow nor overflow."""
    cdef double largest = 0, total = 0, scaled
    cdef Py_ssize_t k
    for k in range(rank):
        largest = max(largest, fabs(row[k]))
    if largest == 0:
        return 0
    for k in range(rank):
        scaled = row[k] / largest
        total += scaled * scaled
    return sqrt(total) * largest


cdef void _batch(
        const Search* search, Py_ssize_t start, Py_ssize_t n_users,
        real* work, int32_t* active) noexcept nogil:   # scratch
    """The best items of `n_users` users from user `start` on."""
    cdef Py_ssize_t block = 0, first = 0, here, u, i, k, panel, n_active = n_users, n_left
    cdef Py_ssize_t rank = search.rank, size = search.size, n_items = search.n_items
    cdef const real* users = <const real*> search.users + start * rank
    cdef const real* packed = <const real*> search.packed
    cdef double user_norms[BATCH_USERS]
    cdef const double* block_norms = search.block_norms
    cdef real* best = <real*> search.best + start * size
    cdef int32_t* ids = search.ids + start * size
    cdef real* rows = work                      # factors of the active users, contiguous
    cdef real* scores = work + n_users * rank
    for i in range(n_users * size):
        best[i] = -INFINITY
        ids[i] = 0x7FFFFFFF
    memcpy(rows, users, n_users * rank * sizeof(real))
    # A computed score exceeds |x| |y| only by rounding: rank multiply-adds, each with an error of at most eps.
    cdef double margin = 1 + 2 * rank * (FLT_EPSILON if real is float else DBL_EPSILON)
    for u in range(n_users):
        active[u] = <int32_t> u
        user_norms[u] = _norm(users + u * rank, rank) * margin
    while first < n_items:
        n_left = 0
        for k in range(n_active):
            u = active[k]
            # only a strictly smaller bound ends the search: an equal score may win by a lower id
            if user_norms[u] * block_norms[block] >= best[u * size]:
                if n_left != k:
                    active[n_left] = <int32_t> u
                    memcpy(rows + n_left * rank, users + u * rank, rank * sizeof(real))
                n_left += 1
        n_active = n_left
        if n_active == 0:
            break
        here = min(BLOCK_ITEMS, n_items - first)
        for panel in range((here + HMF_PANEL - 1) // HMF_PANEL):
            score(search.table, n_active, rank, <const real*> rows, rank, packed + (first + panel * HMF_PANEL) * rank,
                  scores + panel * HMF_PANEL, BLOCK_ITEMS)
        for k in range(n_active):
            _offer(search, start + active[k], <const real*> scores + k * BLOCK_ITEMS, first, here)
        first += here
        block += 1
    for u in range(n_users):
        _sort_heap(best + u * size, ids + u * size, size)
        for i in range(size):
            if ids[u * size + i] == 0x7FFFFFFF:
                ids[u * size + i] = -1


def pack(const real[:, ::1] items, const int64_t[::1] order, int n_threads):
    """Rows ``items[order]`` in panels of HMF_PANEL items, factor by factor, for the score kernel.

    Returns
    -------
    array, shape (n_panels * HMF_PANEL * rank,)
        Element ``(p * rank + k) * HMF_PANEL + l`` is factor k of item ``order[p * HMF_PANEL + l]``; padded with zeros.
    """
    cdef Py_ssize_t n = order.shape[0], rank = items.shape[1], panel, lane, k
    cdef Py_ssize_t n_panels = (n + HMF_PANEL - 1) // HMF_PANEL
    out = np.zeros(n_panels * HMF_PANEL * rank, dtype=np.asarray(items).dtype)
    cdef real[::1] out_view = out
    n_threads = hmf_usable_threads(n_threads)
    for panel in prange(n_panels, nogil=True, schedule="static", num_threads=n_threads):
        for lane in range(min(HMF_PANEL, n - panel * HMF_PANEL)):
            for k in range(rank):
                out_view[(panel * rank + k) * HMF_PANEL + lane] = items[order[panel * HMF_PANEL + lane], k]
    return out


def norms(const real[:, ::1] rows):
    """Lengths of rows, float64."""
    cdef Py_ssize_t i
    out = np.empty(rows.shape[0])
    cdef double[::1] out_view = out
    for i in range(rows.shape[0]):
        out_view[i] = _norm(&rows[i, 0], rows.shape[1])
    return out


def block_items():
    """Items of one block; `block_norms` has one element for each block."""
    return BLOCK_ITEMS


def top_k(
        const real[:, ::1] users,         # IN   (n_users, rank)
        items,                            # IN   `hybridmf.cpu.topk.PackedItems`
        seen,                             # IN   `hybridmf.core.sparse.RowColumns`: items to exclude for each user
        Py_ssize_t n, int n_threads):
    """The `n` best items of each user.

    Returns
    -------
    ids : int32 array, shape (n_users, n)
        Best first; -1 where fewer than `n` items are left.
    scores : array, shape (n_users, n), dtype of the factors
        -inf where ids is -1.
    """
    cdef const real[::1] packed = items.packed
    cdef const int32_t[::1] item_ids = items.ids
    cdef const double[::1] block_norms = items.block_norms
    cdef Py_ssize_t n_users = users.shape[0], rank = users.shape[1], batch, start
    cdef Search search
    n_threads = hmf_usable_threads(n_threads)
    # smaller batches if there are fewer users than threads x BATCH_USERS, so that every thread has one
    cdef Py_ssize_t per_batch = max(1, min(BATCH_USERS, (n_users + n_threads - 1) // n_threads))
    dtype = np.asarray(users).dtype
    ids, scores = np.empty((n_users, n), dtype=np.int32), np.empty((n_users, n), dtype=dtype)
    if n_users == 0 or n == 0:
        return ids, scores
    cdef int32_t[:, ::1] ids_view = ids
    cdef real[:, ::1] scores_view = scores
    cdef real[:, ::1] work = np.empty((n_threads, per_batch * (rank + BLOCK_ITEMS)), dtype=dtype)
    cdef int32_t[:, ::1] active = np.empty((n_threads, per_batch), dtype=np.int32)
    cdef const int32_t[::1] columns = seen.columns
    cdef const int64_t[::1] first = seen.first, last = seen.last
    cdef const int64_t* first_ = NULL
    cdef const int64_t* last_ = NULL
    cdef const int32_t* columns_ = NULL
    if columns.shape[0]:
        first_, last_, columns_ = &first[0], &last[0], &columns[0]
    search = Search(hmf_kernels(), rank, &users[0, 0], &packed[0], &item_ids[0], &block_norms[0], item_ids.shape[0],
                    first_, last_, columns_, n, &scores_view[0, 0], &ids_view[0, 0])
    for batch in prange((n_users + per_batch - 1) // per_batch, nogil=True, schedule="dynamic",
                        num_threads=n_threads):
        start = batch * per_batch
        _batch(&search, start, min(per_batch, n_users - start), &work[hmf_thread_id(), 0],
               &active[hmf_thread_id(), 0])
    return ids, scores
