"""The N best items of each user, without a users x items matrix.

Users are taken in batches, items in blocks that fit in cache. The scores of one batch and one block are computed
(kernels.h: score), entries to leave out are overwritten with -inf, and what beats a user's N-th best so far goes into
that user's heap. Items come in ascending order and only a strictly better score displaces another, so ties go to the
lower item. Each score is one chain of multiply-adds over the factors: it does not depend on batch, block or thread.

Parallel over batches of users, dynamic because heaps fill at different rates.
"""

import numpy as np

from cython.parallel cimport prange
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

from hybridmf._openmp cimport hmf_thread_id
from hybridmf.cpu.kernels cimport HMF_PANEL, hmf_kernel_table, hmf_kernels, real, score

cdef Py_ssize_t BATCH_USERS = 48     # a multiple of every table's score tile; 48 users share one packed block
cdef Py_ssize_t BLOCK_PANELS = 8     # 256 items: 64 KB packed at f = 64, scores of a batch 48 KB


cdef inline bint _worse(real score_a, int32_t id_a, real score_b, int32_t id_b) noexcept nogil:
    """Whether a ranks behind b: lower score, or equal and a higher item."""
    return score_a < score_b or (score_a == score_b and id_a > id_b)


cdef void _sift_down(real* scores, int32_t* ids, Py_ssize_t size, real new_score, int32_t new_id) noexcept nogil:
    """Put a new element at the root of a heap whose root ranks last, and restore the order."""
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
    """Best first, in place: the last-ranked element goes from the root to the end, again and again."""
    cdef Py_ssize_t end
    cdef real last_score
    cdef int32_t last_id
    for end in range(size - 1, 0, -1):
        last_score = scores[end]
        last_id = ids[end]
        scores[end] = scores[0]
        ids[end] = ids[0]
        _sift_down(scores, ids, end, last_score, last_id)


cdef void _pack_block(Py_ssize_t rank, const real* items, Py_ssize_t n_items, real* packed) noexcept nogil:
    """Rows of `items` -> panels of HMF_PANEL items, factor by factor; missing items are zero."""
    cdef Py_ssize_t panel, lane, k, n_panels = (n_items + HMF_PANEL - 1) // HMF_PANEL, item
    for panel in range(n_panels):
        for lane in range(HMF_PANEL):
            item = panel * HMF_PANEL + lane
            for k in range(rank):
                packed[(panel * rank + k) * HMF_PANEL + lane] = items[item * rank + k] if item < n_items else 0


cdef void _offer(real* scores, Py_ssize_t n_items, int32_t first_item, real* best, int32_t* ids,
                 Py_ssize_t size) noexcept nogil:
    """Let a user's block of scores compete for the heap (best, ids)."""
    cdef Py_ssize_t start, i, stop
    cdef int beats
    cdef real threshold
    for start in range(0, n_items, 16):
        stop = min(start + 16, n_items)
        threshold = best[0]
        beats = 0
        for i in range(start, stop):        # no branch: most groups hold nothing that beats the heap
            beats |= scores[i] > threshold
        if beats:
            for i in range(start, stop):
                if scores[i] > best[0]:
                    _sift_down(best, ids, size, scores[i], first_item + <int32_t> i)


cdef void _batch(
        const hmf_kernel_table* table, Py_ssize_t rank,
        const real* users, Py_ssize_t n_users,          # IN   (n_users, rank)
        const real* items, Py_ssize_t n_items,          # IN   (n_items, rank)
        const int64_t* seen_ptr, const int32_t* seen,   # IN   items to leave out, sorted; seen_ptr NULL: none
        Py_ssize_t size,
        real* work,                                     # scratch
        int64_t* next_seen,                             # scratch (n_users,)
        real* best, int32_t* ids) noexcept nogil:       # OUT  (n_users, size)
    cdef Py_ssize_t block_items = BLOCK_PANELS * HMF_PANEL, first, here, u, i, panel
    cdef real* packed = work
    cdef real* scores = work + block_items * rank
    for i in range(n_users * size):
        best[i] = -INFINITY
        ids[i] = -1
    if seen_ptr != NULL:
        memcpy(next_seen, seen_ptr, n_users * sizeof(int64_t))
    first = 0
    while first < n_items:
        here = min(block_items, n_items - first)
        _pack_block(rank, items + first * rank, here, packed)
        for panel in range((here + HMF_PANEL - 1) // HMF_PANEL):
            score(table, n_users, rank, users, <const real*> packed + panel * rank * HMF_PANEL,
                  scores + panel * HMF_PANEL, block_items)
        for u in range(n_users):
            if seen_ptr != NULL:
                while next_seen[u] < seen_ptr[u + 1] and seen[next_seen[u]] < first + here:
                    scores[u * block_items + seen[next_seen[u]] - first] = -INFINITY
                    next_seen[u] += 1
            _offer(scores + u * block_items, here, <int32_t> first, best + u * size, ids + u * size, size)
        first += here
    for u in range(n_users):
        _sort_heap(best + u * size, ids + u * size, size)


def top_k(
        const real[:, ::1] users,         # IN   (n_users, rank)
        const real[:, ::1] items,         # IN   (n_items, rank)
        const int64_t[::1] seen_ptr,      # IN   (n_users + 1,), or empty: nothing is left out
        const int32_t[::1] seen,          # IN   sorted items of each user to leave out
        Py_ssize_t n, int n_threads):
    """The `n` best items of each user.

    Returns
    -------
    ids : int32 array, shape (n_users, n)
        Best first; -1 where fewer than `n` items are left.
    scores : array, shape (n_users, n), dtype of the factors
        -inf where ids is -1.
    """
    cdef Py_ssize_t n_users = users.shape[0], rank = users.shape[1], n_items = items.shape[0], batch, start
    cdef const hmf_kernel_table* table = hmf_kernels()
    # fewer users than threads x BATCH_USERS: smaller batches, so that every thread has one
    cdef Py_ssize_t per_batch = max(1, min(BATCH_USERS, (n_users + n_threads - 1) // n_threads))
    cdef Py_ssize_t block_items = BLOCK_PANELS * HMF_PANEL
    dtype = np.asarray(users).dtype
    ids = np.empty((n_users, n), dtype=np.int32)
    scores = np.empty((n_users, n), dtype=dtype)
    cdef int32_t[:, ::1] ids_view = ids
    cdef real[:, ::1] scores_view = scores
    cdef real[:, ::1] work = np.empty((n_threads, block_items * (rank + per_batch)), dtype=dtype)
    cdef int64_t[:, ::1] next_seen = np.empty((n_threads, per_batch), dtype=np.int64)
    cdef bint filtered = seen_ptr.shape[0] > 0 and seen.shape[0] > 0
    if n_users == 0 or n == 0:
        return ids, scores
    for batch in prange((n_users + per_batch - 1) // per_batch, nogil=True, schedule="dynamic",
                        num_threads=n_threads):
        start = batch * per_batch
        _batch(table, rank, &users[start, 0], min(per_batch, n_users - start), &items[0, 0], n_items,
               &seen_ptr[start] if filtered else NULL, &seen[0] if filtered else NULL, n,
               &work[hmf_thread_id(), 0], &next_seen[hmf_thread_id(), 0], &scores_view[start, 0], &ids_view[start, 0])
    return ids, scores
