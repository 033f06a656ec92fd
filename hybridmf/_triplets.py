"""Tables of entries, one (user, item[, value[, time]]) a row, that were passed where a matrix is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from ._column_names import role_of
from .errors import RatingsError

CHANCE = 10.0
"""Repeated pairs that two independent columns would have on average, from which having none is no coincidence."""

SMALL_RATING = 100
"""Largest value taken for a rating; ids of real data exceed it."""

FEW_ROWS = 20
"""Rows below which large ids in an array decide nothing."""


def refuse_triplets(matrix: Any, name: str) -> None:
    """Refuse a frame or dense array whose columns are users, items and values; see `named_like_entries`, `are_entries`.

    Raises
    ------
    RatingsError
        It names the constructors of `Ratings`, and how to pass a matrix that has two to four columns.
    """
    if sp.issparse(matrix):
        return
    names = frame_names(matrix)
    if names is not None and named_like_entries(names):
        raise RatingsError(
            f"{name} has the columns {', '.join(map(repr, names))}: one entry in each row, where a matrix of users "
            "(rows) by items (columns) is expected. Make one with Ratings.from_frame. If these columns are items, "
            f"pass a SciPy matrix: scipy.sparse.csr_array({name}.to_numpy())"
        )
    array = np.asarray(matrix) if isinstance(matrix, (np.ndarray, list)) or names is not None else np.empty(0)
    if are_entries(array):
        width = array.shape[-1]
        columns = ", ".join(("user", "item", "value", "time")[:width])
        raise RatingsError(
            f"{name} of shape {array.shape} has one entry in each row by its values ({columns}), where a matrix of "
            "users (rows) by items (columns) is expected. Make one with Ratings.from_coo, or from_frame where ids are "
            f"labels. If its {width} columns are items, pass a SciPy matrix: scipy.sparse.csr_array({name})"
        )


def frame_names(frame: Any) -> list[Any] | None:
    """Names of the columns of a pandas, polars or pyarrow frame; None for anything else.

    Not through narwhals, which refuses columns that share a name.
    """
    if hasattr(frame, "collect_schema"):  # polars; `columns` of a LazyFrame warns
        return list(frame.collect_schema().names())
    names = getattr(frame, "column_names", None)  # pyarrow, whose `columns` are the data
    if names is None and hasattr(frame, "iloc"):
        names = getattr(frame, "columns", None)
    return None if names is None else list(names)


def named_like_entries(names: Sequence[Any]) -> bool:
    """Whether there are 2 to 4 columns, one of them named as users and one as items."""
    return 2 <= len(names) <= 4 and {"user", "item"} <= set(map(role_of, names))


def are_entries(array: np.ndarray) -> bool:
    """Whether an array has 2 to 4 columns, and the first two are ids of users and items.

    These hold whole numbers from 0 on, and no pair of them occurs twice, although one of these holds:

    - By chance at least `CHANCE` pairs would repeat: n**2 / (2 d0 d1) of n rows whose columns have d0 and d1 values.
      Ratings of two items repeat pairs, as do two items that most users have not rated.
    - There is a third column, no larger than a tenth of the largest id in either of the first two, which both exceed
      `SMALL_RATING`, in at least `FEW_ROWS` rows: a few of many ratings.
    """
    if array.ndim != 2 or not 2 <= array.shape[1] <= 4 or array.dtype.kind not in "iuf" or len(array) < 2:
        return False
    ids = array[:, :2]
    if not np.all((ids >= 0) & (ids < 2**31) & (ids == np.floor(ids))):  # NaN fails all of them
        return False
    users, items = ids.astype(np.int64).T
    largest = min(int(users.max()), int(items.max()))
    rated = array.shape[1] > 2 and len(array) >= FEW_ROWS and largest > SMALL_RATING
    rated = rated and bool(np.all(array[:, 2] <= largest / 10))
    by_chance = len(array) ** 2 / (2 * len(np.unique(users)) * len(np.unique(items)))
    if by_chance < CHANCE and not rated:
        return False
    return len(np.unique(users * 2**31 + items)) == len(array)
