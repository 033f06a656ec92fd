"""Tables of entries, one (user, item[, value[, time]]) a row, that were passed where a matrix is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..errors import RatingsError
from .column_names import role_of

CHANCE = 10.0  # expected repeated pairs of independent columns from which almost none is no coincidence
SMALL_RATING = 100  # largest value taken for a rating; ids of real data exceed it
FEW_ROWS = 20  # rows below which large ids in an array are no evidence


def refuse_triplets(matrix: Any, name: str) -> None:
    """Reject a frame or array whose columns are users, items and values; see `named_like_entries`, `are_entries`."""
    if sp.issparse(matrix):
        return
    names = frame_names(matrix)
    if names is not None and named_like_entries(names):
        raise RatingsError(
            f"{name} has the columns {', '.join(map(repr, names))}: one entry in each row, where a matrix of users "
            "(rows) by items (columns) is expected. Make one with Ratings.from_frame. If these columns are items, "
            f"pass a SciPy matrix: scipy.sparse.csr_array({name}.to_numpy())"
        )
    listed = names is not None or isinstance(matrix, (np.ndarray, list, tuple))
    try:
        array: np.ndarray = np.asarray(matrix) if listed else np.empty(0)
    except ValueError as error:  # NumPy speaks of a sequence and its depth
        what = f"a {type(matrix).__name__} of several, or of rows that differ in length"
        raise RatingsError(f"{name} must be one matrix of shape (n_users, n_items), got {what}") from error
    for turned, place in ((False, "row"), (True, "column")):
        if are_entries(array.T if turned else array):
            columns = ", ".join(("user", "item", "value", "time")[: array.shape[not turned]])
            raise RatingsError(
                f"{name} of shape {array.shape} has one entry in each {place} by its values ({columns}), where a "
                "matrix of users (rows) by items (columns) is expected. Make one with Ratings.from_coo, or from_frame "
                f"where ids are labels. If its {array.shape[1]} columns are items, pass a SciPy matrix: "
                f"scipy.sparse.csr_array({name})"
            )


def frame_names(frame: Any) -> list[Any] | None:
    """Names of columns of a pandas, polars or pyarrow frame, else None; narwhals would refuse names that repeat."""
    if hasattr(frame, "collect_schema"):  # polars; `columns` of a LazyFrame warns
        return list(frame.collect_schema().names())
    names = getattr(frame, "column_names", None)  # pyarrow, whose `columns` are the data
    if names is None and hasattr(frame, "iloc"):
        names = getattr(frame, "columns", None)
    return None if names is None else list(names)


def named_like_entries(names: Sequence[Any]) -> bool:
    """Whether one of 2 to 4 columns is named as users and one as items; of more columns, as ids of them."""
    roles = list(map(role_of, names))
    if len(names) <= 4:
        return {"user", "item"} <= set(roles)
    ids = [role for role, name in zip(roles, names, strict=True) if str(name).lower().endswith("id")]
    return {"user", "item"} <= set(ids)


def are_entries(array: np.ndarray) -> bool:
    """Whether an array has 2 to 4 columns, and the first two are ids of users and items.

    These hold whole numbers from 0 on. Their pairs agree in at most a twentieth as many pairs of rows as they would
    by chance, were the columns independent: n (n - 1) / 2 times the shares of each column's values, squared and
    summed, of n rows. The ratings of two items do repeat pairs, also as (0, 0) of users who rated neither. Chance has
    to be `CHANCE` or more; or, in a small sample of many ratings, no pair repeats in at least `FEW_ROWS` rows, both
    columns exceed `SMALL_RATING`, and a third one is no larger than a tenth of either.
    """
    if array.ndim != 2 or not 2 <= array.shape[1] <= 4 or array.dtype.kind not in "iuf" or len(array) < 2:
        return False
    ids, n = array[:, :2].astype(np.float64) if array.dtype == np.float16 else array[:, :2], len(array)
    if not np.all((ids >= 0) & (ids < 2**31) & (ids == np.floor(ids))):  # NaN fails all of them
        return False
    users, items = ids.astype(np.int64).T
    counts = np.unique(users * 2**31 + items, return_counts=True)[1]
    repeated = int(np.sum(counts * (counts - 1))) // 2
    chance = n * (n - 1) / 2 * _concentration(users) * _concentration(items)
    if chance >= CHANCE and repeated <= chance / 20:
        return True
    largest = min(users.max(), items.max())
    large = n >= FEW_ROWS and largest > SMALL_RATING and repeated == 0
    return bool(large and array.shape[1] > 2 and np.all(array[:, 2] <= largest / 10))


def _concentration(values: np.ndarray) -> float:
    """Probability that two of these numbers, drawn at random, are equal."""
    return float(np.sum((np.unique(values, return_counts=True)[1] / len(values)) ** 2))
