"""Top-K on the CPU: items packed for scoring, and items to exclude."""

from __future__ import annotations

import numpy as np

from ..core.sparse import RowColumns
from ..native import _topk
from ..plan.memory import threads_for

NOTHING = RowColumns(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32), 0)
"""No items to exclude."""


class PackedItems:
    """Items packed for the score kernel, by descending norm; made once, used by any number of calls.

    Without `candidates` these are all items. `ids` (int32) are in packed order; `block_norms` are the largest norms of
    the items of each block, descending; `packed`: see `hybridmf.native._topk.pack`.
    """

    def __init__(self, items: np.ndarray, candidates: np.ndarray | None = None, num_threads: int = 1) -> None:
        self.items = np.ascontiguousarray(items)
        positions = np.arange(len(items)) if candidates is None else np.asarray(candidates, dtype=np.int64)
        norms = _topk.norms(self.items if candidates is None else self.items[positions])
        order = np.argsort(-norms, kind="stable")
        positions = np.ascontiguousarray(positions[order], dtype=np.int64)
        self.ids = positions.astype(np.int32)
        self.block_norms = np.ascontiguousarray(norms[order][:: _topk.block_items()])
        n, rank = len(positions), self.items.shape[1]
        self.packed = _topk.pack(self.items, positions, threads_for(n * rank, n, num_threads))


def top_k(
    users: np.ndarray,
    items: np.ndarray | PackedItems,
    n: int,
    *,
    seen: RowColumns | None = None,
    candidates: np.ndarray | None = None,
    num_threads: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The `n` items with the highest ``users @ items.T`` but those `seen`, ties to the lower item, and their scores.

    Ids (int32) are -1 and scores -inf where fewer than `n` items are left. `candidates` ascend. One thread serves a
    user; the calling thread does small amounts of work alone.
    """
    if candidates is not None:
        items = PackedItems(items.items if isinstance(items, PackedItems) else items, candidates, num_threads)
    elif not isinstance(items, PackedItems):
        items = PackedItems(items, None, num_threads)
    users = np.ascontiguousarray(users, dtype=items.items.dtype)
    kept = min(n, len(items.ids))  # a longer heap would only hold gaps
    threads = threads_for(len(users) * items.packed.size, len(users), num_threads)
    ids, scores = _topk.top_k(users, items, NOTHING if seen is None else seen, kept, threads)
    if kept == n:
        return ids, scores
    gap = ((0, 0), (0, n - kept))
    return np.pad(ids, gap, constant_values=-1), np.pad(scores, gap, constant_values=-np.inf)
