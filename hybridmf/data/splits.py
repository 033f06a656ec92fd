"""Selection of held-out entries: masks over the entries of a matrix, True for the test part."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES
from ..core.sparse import entry_rows
from ..core.validate import check_int, check_real
from ..errors import RatingsError

WAYS = ("random", "user", "item", "time", "last")  # values of ``by=`` of `hybridmf.split`


def held_out(
    matrix: sp.csr_array, by: str, test_size: float | int, rng: np.random.Generator, times: np.ndarray | None
) -> np.ndarray:
    """Mask of the entries that one of the `WAYS` holds out."""
    mask = np.zeros(matrix.nnz, dtype=bool)
    if by == "random":
        mask[rng.choice(matrix.nnz, _number(matrix.nnz, test_size, "entries"), replace=False, shuffle=False)] = True
        return mask
    if by in SIDES:
        axis = entry_rows(matrix) if by == "user" else matrix.indices
        known = np.flatnonzero(np.bincount(axis))
        number = _number(len(known), test_size, f"{by}s with entries")
        return np.isin(axis, rng.choice(known, number, replace=False, shuffle=False))
    if times is None:
        raise ValueError(
            f"by={by!r} needs the time of each entry, and ratings has none; read them with timestamp= (from_file, "
            "from_frame) or timestamps= (from_coo)"
        )
    in_time = np.lexsort((rng.random(matrix.nnz), times))  # entries with equal times follow each other at random
    if by == "time":
        mask[in_time[matrix.nnz - _number(matrix.nnz, test_size, "entries") :]] = True
        return mask
    places = np.empty(matrix.nnz, dtype=np.int64)
    places[in_time] = np.arange(matrix.nnz)
    return last_of_each_user(matrix, places, test_size)


def last_of_each_user(
    matrix: sp.csr_array, order: np.ndarray, test_size: float | int, name: str = "test_size"
) -> np.ndarray:
    """The last entries of each user by `order`: a number, of users who have more, or a share rounded down."""
    degrees = np.diff(matrix.indptr).astype(np.int64)
    if isinstance(test_size, (int, np.integer)) and not isinstance(test_size, bool):
        count = check_int("test_size", test_size, 1)
        counts = np.where(degrees > count, count, 0)
    else:
        counts = np.floor(degrees * _share(test_size) * (1 + 1e-12)).astype(np.int64)  # 0.3 * 10 may be below 3
    if not counts.any():
        raise RatingsError(
            f"{name}={test_size} takes no entry of any user: the longest row has {degrees.max(initial=0)} entries, "
            "one of which stays in the training part"
        )
    rows = entry_rows(matrix)
    in_order = np.lexsort((order, rows))  # stable; rows stay in place
    place = np.arange(matrix.nnz) - matrix.indptr[rows]
    mask = np.zeros(matrix.nnz, dtype=bool)
    mask[in_order[place >= (degrees - counts)[rows]]] = True
    return mask


def fold_of_entries(nnz: int, n_splits: int, rng: np.random.Generator) -> np.ndarray:
    """Fold of each entry; sizes of folds differ by at most one."""
    if n_splits > nnz:
        raise RatingsError(f"n_splits={n_splits} folds need as many entries, ratings has {nnz}")
    return rng.permutation(np.arange(nnz) % n_splits)


def _share(test_size: Any) -> float:
    share = check_real("test_size", test_size, 0, strict=True)
    if share >= 1:
        raise ValueError(f"test_size must be a share below 1 or an integer number, got {test_size!r}")
    return share


def _number(total: int, test_size: float | int, what: str) -> int:
    """`test_size` as a number out of `total`; the training part must not be empty."""
    if isinstance(test_size, (int, np.integer)):
        count = check_int("test_size", test_size, 1)
    else:
        count = max(1, round(total * _share(test_size)))
    if count >= total:
        raise RatingsError(f"test_size={test_size} takes {count} of {total} {what} and leaves none to train on")
    return count
