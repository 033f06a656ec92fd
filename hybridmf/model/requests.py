"""Requests to a fitted model as positions and matrices (users, histories, candidates), and labels of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Side
from ..core.sparse import take_rows
from ..core.validate import MAX_N, check_bool, check_choice, check_ids, check_int, from_triplets
from ..data.align import UNKNOWN
from ..data.labels import look_up
from ..errors import RatingsError, UnknownLabelError
from .learned import Learned

COLD_USERS = ("popular", "mask")
"""Values of ``cold_users=`` of `recommend`."""


def positions_of(learned: Learned, side: Side, name: str, given: Any, by_label: bool) -> np.ndarray:
    """Positions of users or items, int64, from positions or labels.

    Raises
    ------
    UnknownLabelError, TypeError, ValueError
        The message names the argument `name`.
    """
    count = len(learned.state.side(side))
    ids = learned.labels(side)
    if not by_label or ids is None:
        return check_ids(name, given, count, f"n_{side}s")
    try:
        return np.atleast_1d(np.asarray(look_up(side, given, ids, learned.label_table(side), count), dtype=np.int64))
    except UnknownLabelError as error:
        raise UnknownLabelError(f"{name}: {error.args[0]}") from error


def is_single(given: Any, by_label: bool) -> bool:
    """Whether one id was given and not a vector of them."""
    if isinstance(given, int) or (by_label and isinstance(given, (str, bytes))):
        return True
    several = isinstance(given, Iterable) and not hasattr(given, "__array__")  # sets and generators have no dimensions
    return not several and np.ndim(given) == 0


def labelled(learned: Learned, side: Side, found: np.ndarray) -> np.ndarray:
    """Labels of positions as Python objects, None for -1; positions themselves where that side has no labels.

    Returns
    -------
    object array, shape of `found`
    """

    def make() -> np.ndarray:
        ids = learned.labels(side)
        names = range(len(learned.state.side(side))) if ids is None else ids.tolist()
        table: np.ndarray = np.full(len(names) + 1, None, dtype=object)  # the last one is that of -1
        table[:-1] = list(names)
        return table

    table: np.ndarray = learned.cached(("names", side), make)
    return table[found]


# ------------------------------------------------------------------------------------------------------- histories


@dataclass(frozen=True)
class History:
    """Rows of new users.

    Attributes
    ----------
    matrix : csr_array, shape (n, n_items)
    single : bool
        One user's history, not a list of histories.
    """

    matrix: sp.csr_array
    single: bool


def is_history(rows: Any) -> bool:
    """Whether `rows` are items of one user, or of several users, and not a matrix."""
    if isinstance(rows, (list, tuple, set, frozenset, range, Mapping, str)):
        return True
    return (getattr(rows, "ndim", 2) == 1 and not sp.issparse(rows)) or hasattr(rows, "to_list")  # a Series


def read_history(learned: Learned, rows: Any, by_label: bool, unknown: str) -> History:
    """Histories as a matrix.

    Parameters
    ----------
    learned : Learned
    rows : sequence of items, or mapping from items to values; or a list of these
        Without values each item is an entry of 1, which explicit feedback refuses. Repeats add up.
    by_label : bool
        Whether items are labels.
    unknown : {"error", "drop"}
        Treatment of labels that the model does not have.

    Raises
    ------
    RatingsError, UnknownLabelError, TypeError, ValueError
    """
    check_choice("unknown", unknown, UNKNOWN)
    single = not _are_several(rows)
    histories = [rows] if single else list(rows)
    parts = [_entries(learned, history, by_label, unknown) for history in histories]
    counts = [len(items) for items, _ in parts]
    items = np.concatenate([items for items, _ in parts]) if parts else np.empty(0, np.int64)
    values = np.concatenate([values for _, values in parts]) if parts else np.empty(0)
    matrix = from_triplets(
        np.repeat(np.arange(len(parts)), counts),
        items,
        values,
        (len(parts), len(learned.state.item)),
        name="rows",
        dtype=learned.state.item.matrix.dtype,
        drop_zeros=learned.objective.is_implicit,
        duplicates="sum" if learned.objective.is_implicit else "error",
    )
    return History(matrix, single)


def _are_several(rows: Any) -> bool:
    """Whether `rows` is a list of histories."""
    if not isinstance(rows, (list, tuple)) or not rows:
        return False
    return all(isinstance(row, (list, tuple, set, frozenset, Mapping)) or np.ndim(row) == 1 for row in rows)


def _entries(learned: Learned, history: Any, by_label: bool, unknown: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of one history."""
    if isinstance(history, (str, bytes)):
        raise TypeError(f"rows must be a matrix, or items of one or several users, got {history!r}; pass [{history!r}]")
    weighted = isinstance(history, Mapping)
    if not weighted and not learned.objective.is_implicit:
        raise RatingsError(
            "rows are items without ratings, and this model was fitted on explicit feedback; pass a mapping "
            "{item: rating} for each user, or a matrix"
        )
    tensor = hasattr(history, "__dlpack__") and not isinstance(history, np.ndarray)
    items = np.from_dlpack(history).tolist() if tensor else list(history)
    values = np.asarray(list(history.values()) if weighted else np.ones(len(items)))
    if by_label and unknown == "drop" and learned.item_ids is not None:
        table = learned.label_table("item")
        known = np.array([item in table for item in items], dtype=bool)
        items, values = [item for item, kept in zip(items, known, strict=True) if kept], values[known]
    return positions_of(learned, "item", "rows", items, by_label), values


# ------------------------------------------------------------------------------------------------------ candidates


@dataclass(frozen=True)
class Candidates:
    """Items that may be recommended.

    Attributes
    ----------
    shared : bool array, shape (n_items,), or None
        Candidates of all users; None: all items.
    allowed, denied : csr_array, shape (n, n_items), or None
        Candidates of each user, and items to exclude for each user.
    """

    shared: np.ndarray | None = None
    allowed: sp.csr_array | None = None
    denied: sp.csr_array | None = None

    def of_users(self, start: int, stop: int) -> Candidates:
        """Candidates of some of the users."""
        rows = np.arange(start, stop)
        allowed, denied = (None if part is None else take_rows(part, rows) for part in (self.allowed, self.denied))
        return Candidates(self.shared, allowed, denied)


@dataclass(frozen=True)
class Asked:
    """Arguments of a recommendation that do not name users.

    Attributes
    ----------
    N : int
    filter_liked : bool
        Exclude the items that the user has seen.
    filter_items, items : vector of items for all users; list of such vectors, or matrix, for each; or None
    cold_users : {"popular", "mask"}
    by_label : bool
        Whether items are labels.
    """

    N: int
    filter_liked: bool
    filter_items: Any
    items: Any
    cold_users: str
    by_label: bool

    @classmethod
    def check(cls, N: Any, filter_liked: Any, filter_items: Any, items: Any, cold_users: Any, labels: Any) -> Asked:
        """Read the arguments, except `filter_items` and `items`, which depend on the model.

        Raises
        ------
        TypeError, ValueError
        """
        return cls(
            check_int("N", N, 1, MAX_N),
            check_bool("filter_already_liked_items", filter_liked),
            filter_items,
            items,
            check_choice("cold_users", cold_users, COLD_USERS),
            check_bool("labels", labels),
        )

    def candidates(self, learned: Learned, n_users: int, rows_of: Callable[[str, Any], sp.csr_array]) -> Candidates:
        """Candidates of users; `rows_of` is a function of an argument's name and a matrix: the rows of the users."""
        shared: np.ndarray | None = None
        lists: dict[str, sp.csr_array | None] = {"items": None, "filter_items": None}
        for name, given in (("items", self.items), ("filter_items", self.filter_items)):
            if given is None:
                continue
            if sp.issparse(given) or hasattr(given, "user_items"):
                lists[name] = rows_of(name, given)
            elif _are_several(given) or (isinstance(given, np.ndarray) and given.ndim == 2):
                lists[name] = _lists(learned, name, given, self.by_label, n_users)
            else:
                shared = np.full(len(learned.state.item), name != "items") if shared is None else shared
                shared[positions_of(learned, "item", name, given, self.by_label)] = name == "items"
        return Candidates(shared, lists["items"], lists["filter_items"])


def _lists(learned: Learned, name: str, given: Any, by_label: bool, n_users: int) -> sp.csr_array:
    """Items of each user as a matrix."""
    if len(given) != n_users:
        raise ValueError(
            f"{name} has {len(given)} lists of items; expected one for each of {n_users} users, or one list"
        )
    counts = [len(one) for one in given]
    flat = [item for one in given for item in (one.tolist() if isinstance(one, np.ndarray) else one)]
    columns = positions_of(learned, "item", name, flat, by_label)
    shape = (n_users, len(learned.state.item))
    rows = np.repeat(np.arange(n_users), counts)
    return from_triplets(rows, columns, np.ones(len(columns)), shape, name=name, duplicates="first")
