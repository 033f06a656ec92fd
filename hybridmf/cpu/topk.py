"""Top-K on the CPU: the candidates, what to leave out, and ids in the caller's numbering."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from .._validate import csr_arrays
from . import _topk


def top_k(
    users: np.ndarray,
    items: np.ndarray,
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
    items : float array, shape (n_items, rank)
    n : int
    seen : csr_array, shape (n_users, n_items), optional
        Entries (also explicit zeros) are left out.
    candidates : int64 array, ascending, optional
        Only these items take part.
    num_threads : int

    Returns
    -------
    ids : int32 array, shape (n_users, n)
        -1 where fewer than `n` items are left.
    scores : float array, shape (n_users, n)
        -inf where ids is -1.
    """
    seen_ptr, seen_ids = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    if seen is not None:
        seen_ptr, seen_ids, _ = csr_arrays(seen)
    if candidates is not None:
        items = items[candidates]
        if seen is not None:
            seen_ptr, seen_ids = _renumber(seen_ptr, seen_ids, candidates, seen.shape[1])
    ids, scores = _topk.top_k(
        np.ascontiguousarray(users), np.ascontiguousarray(items, dtype=users.dtype), seen_ptr, seen_ids, n, num_threads
    )
    if candidates is not None and len(candidates):
        ids = np.where(ids >= 0, candidates[ids], -1).astype(np.int32)
    return ids, scores


def _renumber(
    pointer: np.ndarray, ids: np.ndarray, candidates: np.ndarray, n_items: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seen items as positions within `candidates`; those that are no candidates disappear."""
    position = np.full(n_items, -1, dtype=np.int32)
    position[candidates] = np.arange(len(candidates), dtype=np.int32)
    renumbered = position[ids]
    keep = renumbered >= 0
    return np.concatenate(([0], np.cumsum(keep)))[pointer].astype(np.int64), renumbered[keep]
