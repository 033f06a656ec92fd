"""Contiguous ranges of rows for ranks and slabs, balanced by entries rather than rows (cuMF 4.3)."""

from __future__ import annotations

import numpy as np


def even_bounds(degrees: np.ndarray, parts: int, row_cost: float = 0.0) -> np.ndarray:
    """Bounds of `parts` consecutive ranges of rows of about equal cost; some may be empty.

    `degrees`: shape (n,), entries of each row. `row_cost`: cost of a row beyond that of its entries, in entries: about
    f / 6 for the solve of exact ALS. Returns int64 array, shape (parts + 1,): nondecreasing, from 0 to n.
    """
    cost = np.cumsum(degrees + row_cost)
    total = cost[-1] if len(cost) else 0.0
    # the bound nearest to its share: searching the middles of rows rounds by half a row's cost either way
    middles = cost - (np.asarray(degrees) + row_cost) / 2
    inner = np.searchsorted(middles, total * np.arange(1, parts) / parts)
    return np.concatenate(([0], inner, [len(degrees)])).astype(np.int64)
