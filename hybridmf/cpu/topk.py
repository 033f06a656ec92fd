"""Top-K on the CPU: items packed for scoring, and items to exclude."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from ..core.validate import csr_arrays
from ..native import _topk


class PackedItems:
    """Items packed for the score kernel, by descending norm; made once, used by any number of calls.

    Parameters
    ----------
    items : float array, shape (n_items, rank)
    candidates : int64 array, optional
        Consider only these items.
    num_threads : int

    Attributes
    ----------
    packed : float array
        See `hybridmf.native._topk.pack`.
    ids : int32 array, shape (n_items,)
        In packed order.
    block_norms : float64 array, shape (n_blocks,)
        Largest norm of the items of each block, falling.
    """

    def __init__(self, items: np.ndarray, candidates: np.ndarray | None = None, num_threads: int = 1) -> None:
        self.items = np.ascontiguousarray(items)
        positions = np.arange(len(items)) if candidates is None else np.asarray(candidates, dtype=np.int64)
        norms = _norms(self.items if candidates is None else self.items[positions])
        order = np.argsort(-norms, kind="stable")
        positions = np.ascontiguousarray(positions[order], dtype=np.int64)
        self.ids = positions.astype(np.int32)
        self.block_norms = np.ascontiguousarray(norms[order][:: _topk.block_items()])
        self.packed = _topk.pack(self.items, positions, num_threads)


def top_k(
    users: np.ndarray,
    items: np.ndarray | PackedItems,
    n: int,
    *,
    seen: sp.csr_array | None = None,
    candidates: np.ndarray | None = None,
    num_threads: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The `n` items with the highest ``users @ items.T``, ties to the lower item.

    Parameters
    ----------
    users : float array, shape (n_users, rank)
    items : float array, shape (n_items, rank), or PackedItems
    n : int
    seen : csr_array, shape (n_users, n_items), optional
        Pairs to exclude, explicit zeros included.
    candidates : int64 array, ascending, optional
        Consider only these items.
    num_threads : int

    Returns
    -------
    ids : int32 array, shape (n_users, n)
        -1 where fewer than `n` items are left.
    scores : float array, shape (n_users, n)
        -inf where ids is -1.
    """
    if candidates is not None:
        items = PackedItems(items.items if isinstance(items, PackedItems) else items, candidates, num_threads)
    elif not isinstance(items, PackedItems):
        items = PackedItems(items, None, num_threads)
    users = np.ascontiguousarray(users, dtype=items.items.dtype)
    # A computed score exceeds |x| |y| at most by rounding: rank multiply-adds, each within one unit of eps.
    margin = 1.0 + 2.0 * users.shape[1] * float(np.finfo(users.dtype).eps)
    norms = _norms(users) * margin
    seen_ptr, seen_ids = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    if seen is not None:
        seen_ptr, seen_ids, _ = csr_arrays(seen)
    kept = min(n, len(items.ids))  # a longer heap would only hold gaps
    ids, scores = _topk.top_k(users, norms, items, seen_ptr, seen_ids, kept, num_threads)
    if kept == n:
        return ids, scores
    gap = ((0, 0), (0, n - kept))
    return np.pad(ids, gap, constant_values=-1), np.pad(scores, gap, constant_values=-np.inf)


def _norms(rows: np.ndarray) -> np.ndarray:
    """Lengths of rows in float64, scaled so that squares of tiny or huge factors neither underflow nor overflow."""
    largest = float(np.abs(rows).max(initial=0))
    if largest == 0:
        return np.zeros(len(rows))
    scaled = rows / np.float64(largest)
    return np.sqrt(np.einsum("ij,ij->i", scaled, scaled)) * largest
