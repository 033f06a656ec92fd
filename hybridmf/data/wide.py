"""Wide frames (pivot tables): a row for each user, a column for each item, and their labels."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.column_names import role_of
from ..core.triplets import frame_names, named_like_entries, refuse_triplets
from ..errors import RatingsError
from .labels import label_array, plain_array

logger = logging.getLogger("hybridmf")

_NUMBERS = "fiubO"  # kinds of dtypes of cells; objects may be numbers


Wide = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""Cells of a wide frame, shape (n_users, n_items), without missing ones; labels of users and items, or None."""


def is_wide(given: Any) -> bool:
    """Whether `given` is a frame, and not one of entries."""
    names = frame_names(given)
    return names is not None and not named_like_entries(names)


def read_wide(frame: Any, name: str, *, users: bool = True) -> Wide:
    """Cells and labels of a wide frame.

    The names of the columns are labels of items, and the index those of users. A default index of pandas (0, 1, 2, ...)
    has no labels: rows are positions. Missing cells (NaN, null) become 0, which is no entry. `users=False` ignores the
    index, whose labels may then repeat: rows of new users.
    """
    refuse_triplets(frame, name)
    frame = frame.collect() if hasattr(frame, "collect_schema") and hasattr(frame, "collect") else frame
    names = frame_names(frame)
    assert names is not None
    _refuse_log(name, names)
    _refuse_ids(frame, name, names)
    cells = _cells(frame, name, names)
    user_ids = _axis_labels(f"{name}.index", getattr(frame, "index", None)) if users else None
    columns = frame.columns if hasattr(frame, "iloc") else names
    item_ids = _axis_labels(f"{name}.columns", columns)
    if user_ids is not None and item_ids is not None:
        last = [user_ids[-1:].tolist(), item_ids[-1:].tolist()]
        if last == [["All"], ["All"]]:
            raise RatingsError(
                f"{name} has a last row and a last column 'All', the totals of pandas.pivot_table(margins=True), which "
                f"would be a user and an item: make it without margins, or pass {name}.iloc[:-1, :-1]"
            )
    return _without_missing(cells, name), user_ids, item_ids


def without_rows(frame: Any) -> Any:
    """The columns of a frame without its rows."""
    frame = frame.head(0) if hasattr(frame, "head") else frame.slice(0, 0)
    return frame.collect() if hasattr(frame, "collect_schema") and hasattr(frame, "collect") else frame


def _axis_labels(name: str, index: Any) -> np.ndarray | None:
    """Labels of an axis; None for one that has none, or a default one."""
    if index is None or (type(index).__name__ == "RangeIndex" and index.start == 0 and index.step == 1):
        return None
    try:
        return label_array(name, plain_array(list(index.tolist() if hasattr(index, "tolist") else index)), len(index))
    except ValueError as error:
        way_out = "; or let rows be positions: frame.reset_index(drop=True)" if name.endswith(".index") else ""
        raise RatingsError(f"{error}{way_out}") from None


def _column(frame: Any, place: int) -> np.ndarray:
    if hasattr(frame, "iloc"):
        return np.asarray(frame.iloc[:, place])
    return np.asarray(frame[frame_names(frame)[place]])  # type: ignore[index]


def _refuse_log(name: str, names: Sequence[Any]) -> None:
    """Refuse a table of entries with more columns than `named_like_entries` decides by names that end in "id"."""
    roles = [role_of(column) for column in names]
    if {"user", "item"} <= set(roles) and 10 * sum(role is not None for role in roles) >= len(roles):
        user, item = (names[roles.index(role)] for role in ("user", "item"))
        raise RatingsError(
            f"{name} has {len(names)} columns, with {user!r} and {item!r} among them, so it may have an entry in each "
            f"row, or an item in each column. Of entries make Ratings.from_frame({name}, user={user!r}, item={item!r}, "
            f"...); of items pass a SciPy matrix: Ratings.from_matrix(scipy.sparse.csr_array({name}), item_ids=...)"
        )


def _refuse_ids(frame: Any, name: str, names: Sequence[Any]) -> None:
    """Refuse ids of users in a column of a frame, where they would be ratings of an item."""
    for place, column in enumerate(names):
        if role_of(column) not in ("user", "row"):
            continue
        values = _column(frame, place).tolist()
        named = str(column).strip().lower().endswith("id")
        if named or (len(values) > 1 and len(set(map(str, values))) == len(values)):
            raise RatingsError(
                f"{name} has the column {column!r}, by its name and values ids of the rows, beside columns of items. "
                f"Make it labels: {name}.set_index({column!r}) in pandas, or "
                f"Ratings.from_matrix({name}.drop({column!r}), user_ids={name}[{column!r}])"
            )


def _cells(frame: Any, name: str, names: Sequence[Any]) -> np.ndarray:
    """Values of a frame; missing ones are NaN."""
    if hasattr(frame, "iloc"):
        cells = np.asarray(frame)
        if cells.dtype == object and all(dtype.kind in _NUMBERS for dtype in frame.dtypes):
            with contextlib.suppress(TypeError, ValueError):
                cells = frame.to_numpy(dtype=np.float64, na_value=np.nan)  # also of pandas.NA
    else:
        import narwhals.stable.v2 as nw

        cells = nw.from_native(frame, eager_only=True).to_numpy()
    if cells.dtype.kind in "fiub":
        return cells
    for place, column in enumerate(names):
        values = _column(frame, place)
        try:
            if values.dtype.kind not in _NUMBERS:
                raise TypeError(f"dtype {values.dtype}")
            values.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name} has the column {column!r} of something else than numbers ({error}), where each column is an "
                "item; leave it out, or make it the index if it has the ids of users"
            ) from error
    return cells.astype(np.float64)


def _without_missing(cells: np.ndarray, name: str) -> np.ndarray:
    """Cells with 0 in place of NaN, reported."""
    missing = np.isnan(cells) if cells.dtype.kind == "f" else np.zeros(0, dtype=bool)
    count = int(np.count_nonzero(missing))
    if not count:
        return cells
    zeros = int(np.count_nonzero(cells == 0))
    logger.info("%s: %s of %s cells are missing (NaN or null), and no entries", name, f"{count:,}", f"{cells.size:,}")
    if zeros:
        logger.warning(
            "%s has %s cells of 0 beside %s missing ones (NaN or null); both count as no entry. If 0 is a rating, pass "
            "a table with a row for each entry: Ratings.from_frame",
            name, f"{zeros:,}", f"{count:,}",
        )  # fmt: skip
    return np.where(missing, cells.dtype.type(0), cells)
