"""Requests to a fitted model as positions and matrices (users, histories, candidates), and labels of answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Side
from ..core.sparse import entries_in, entry_rows, keep_entries, rows_or_empty, take_rows
from ..core.validate import MAX_N, check_bool, check_choice, check_ids, check_int, check_shape, from_triplets, one_row
from ..data.align import IN_ORDER, align, are_positions, labels_of
from ..data.labels import check_label_types, look_up, plain_array, refuse_other_index
from ..data.layout import FileOptions
from ..data.readers import frame_entries
from ..data.wide import is_wide
from ..errors import RatingsError, UnknownLabelError
from ..ratings import Ratings, as_ratings, is_pairs
from .learned import Labelled, Learned

logger = logging.getLogger("hybridmf")

COLD_USERS = ("popular", "mask")  # values of ``cold_users=`` of `recommend`
UNKNOWN_IDS = ("error", "drop", "popular")  # values of ``unknown=`` of requests


class Unknown:
    """Treatment of ids that the model does not have, and those that one call has met.

    The rule "error" raises; the others give unknown ids the position -1. `of_entries`, "error" or "drop", is the rule
    for entries of labelled ratings, which `align` knows.
    """

    __slots__ = ("_met", "of_entries", "rule")

    def __init__(self, rule: Any, rules: tuple[str, ...] = UNKNOWN_IDS) -> None:
        self.rule: str = check_choice("unknown", rule, rules)
        self.of_entries = "error" if self.rule == "error" else "drop"
        self._met: dict[str, tuple[list[Any], str]] = {}

    @classmethod
    def check(cls, rule: Any, rules: tuple[str, ...] = UNKNOWN_IDS) -> Unknown:
        return _STRICT if isinstance(rule, str) and rule == "error" else cls(rule, rules)

    def meet(self, name: str, strangers: list[Any], text: str) -> None:
        """Keep the unknown ids of the argument `name`, and their number as text."""
        self._met[name] = (strangers, text)

    def strangers(self, name: str) -> list[Any]:
        """Unknown ids of the argument `name`, in their order."""
        return self._met[name][0] if name in self._met else []

    def absent(self, positions: np.ndarray) -> np.ndarray | None:
        """Mask of the unknown ids, bool; None if all are known."""
        if not self._met:
            return None
        mask = positions < 0
        return mask if mask.any() else None

    def report(self) -> None:
        """Log what the call has met, in one message."""
        if self._met:
            parts = [f"{name} has {text}" for name, (_, text) in self._met.items()]
            logger.warning("ids unknown to the model (unknown=%r): %s", self.rule, "; ".join(parts))


_STRICT = Unknown("error")  # meets nothing, so that all calls share it


def positions_of(
    learned: Labelled, side: Side, name: str, given: Any, by_label: bool, unknown: Unknown | None = None
) -> np.ndarray:
    """Positions of users or items, int64, from an id or a vector of them; -1 for unknown ones.

    Ids are positions, or labels if `by_label` and the side has them. `unknown` is None in methods that offer no choice.
    """
    count, ids = learned.count(side), learned.labels(side)
    lenient = unknown is not None and unknown.rule != "error"
    if isinstance(given, (set, frozenset)):
        if len(given) > 1 and name not in ("items", "filter_items"):
            raise TypeError(f"{name} is a set, which has no order for the results to follow; pass a list of it")
        given = list(given)
    if not by_label or ids is None:
        if not lenient:
            try:
                return check_ids(name, given, count, f"n_{side}s")
            except (TypeError, ValueError) as error:
                if ids is None:
                    raise
                raise type(error)(f"{error}. The model has {side} labels: labels=True takes these") from error
        positions = check_ids(name, given, 2**31 - 1, "2**31 - 1")
        strangers: list[Any] = positions[positions >= count].tolist()
        positions = np.where(positions < count, positions, -1)
    else:
        strangers = []
        try:
            found = look_up(side, given, ids, learned.label_table(side), count, strangers if lenient else None)
        except UnknownLabelError as error:
            hint = "" if unknown is None else '; unknown="drop" leaves such ids out'
            raise UnknownLabelError(f"{name}: {error.args[0]}{hint}") from error
        except (TypeError, RatingsError) as error:
            raise type(error)(f"{name}: {error}") from error
        positions = np.atleast_1d(np.asarray(found, dtype=np.int64))
        if strangers:  # of types that no label of the model has, such as "101" where these are numbers
            given = [label for label in strangers if label is not None and label == label]  # a missing id has no type
            check_label_types(side, ("the model", ids), (name, plain_array(given)))
    if strangers and unknown is not None:
        unknown.meet(name, strangers, _counted(strangers, len(positions), f"{side}s"))
    return positions


def _counted(strangers: list[Any], total: int, things: str, count: int | None = None) -> str:
    """Number of unknown ids, or of `count` pairs with one, and an example as text."""
    return f"{len(strangers) if count is None else count:,} of {total:,} {things}, such as {strangers[0]!r}"


def pairs_of(
    learned: Labelled, users: Any, items: Any, by_label: bool, unknown: Unknown
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the users and items of pairs, int64, equally many of both; -1 for unknown ids.

    Users and items are broadcast against each other. `items` is None if `users` is a table of pairs, whose own ids
    decide whether they are labels.
    """
    if items is None:
        return _positions_of_table(learned, users, unknown)
    places = positions_of(learned, "user", "users", users, by_label, unknown)
    columns = positions_of(learned, "item", "items", items, by_label, unknown)
    if len(places) != len(columns) and 1 not in (len(places), len(columns)):
        raise ValueError(f"users has {len(places)} ids and items has {len(columns)}; expected as many of each")
    if len(places) != len(columns):
        places, columns = np.broadcast_arrays(places, columns)
    elif len(places) > 1:
        refuse_other_index(users=users, items=items)
    return np.ascontiguousarray(places), np.ascontiguousarray(columns)


def _positions_of_table(learned: Labelled, given: Any, unknown: Unknown) -> tuple[np.ndarray, np.ndarray]:
    """`pairs_of` for a table."""
    view = getattr(given, "ratings", None)
    codes: tuple[np.ndarray, np.ndarray]
    if isinstance(view, Ratings):
        codes, labels = (entry_rows(view.user_items), view.user_items.indices), (view.user_ids, view.item_ids)
    else:
        try:
            read = frame_entries(given, "users", FileOptions(value=None))
        except RatingsError as error:
            raise type(error)(
                f"{error} (arguments of Ratings.from_frame; or pass two columns: predict(users, items, labels=True))"
            ) from error
        codes, labels = (read.users, read.items), (read.user_ids, read.item_ids)
    users, items = (
        _places(learned, side, ids, code.astype(np.int64), unknown)
        for side, ids, code in zip(SIDES, labels, codes, strict=True)
    )
    return users, items


def _places(learned: Labelled, side: Side, ids: np.ndarray | None, codes: np.ndarray, unknown: Unknown) -> np.ndarray:
    """Positions in the model of the users or items of pairs, given as codes of the labels `ids`."""
    name = f"{side}s"
    if (ids is None) != (learned.labels(side) is None):
        has, lacks = ("the table", "the model") if ids is not None else ("the model", "the table")
        raise RatingsError(
            f"{has} has {side} labels and {lacks} only positions, so {name} cannot be matched; fit on labelled Ratings "
            "and pass a table with labels, or pass positions: predict(users, items)"
        )
    if ids is None:
        return positions_of(learned, side, name, codes, False, unknown)
    found = positions_of(learned, side, name, ids, True, unknown)[codes]
    strangers = unknown.strangers(name)
    if strangers:
        unknown.meet(name, strangers, _counted(strangers, len(found), "pairs", int(np.count_nonzero(found < 0))))
    return found


def is_single(given: Any, by_label: bool) -> bool:
    """Whether one id was given and not a vector of them."""
    if isinstance(given, int) or (by_label and isinstance(given, (str, bytes))):
        return True
    several = isinstance(given, Iterable) and not hasattr(given, "__array__")  # sets and generators have no dimensions
    return not several and np.ndim(given) == 0


def labelled(learned: Labelled, side: Side, found: np.ndarray) -> np.ndarray:
    """Labels of positions as Python objects, None for -1; positions themselves where that side has no labels."""

    def make() -> np.ndarray:
        ids = learned.labels(side)
        names = range(learned.count(side)) if ids is None else ids.tolist()
        table: np.ndarray = np.full(len(names) + 1, None, dtype=object)  # the last one is that of -1
        table[:-1] = list(names)
        return table

    table: np.ndarray = learned.cached(("names", side), make)
    return table[found]


def shown(
    learned: Labelled, side: Side, found: np.ndarray, scores: np.ndarray, by_label: bool, single: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Answers as a method returns them: ids and scores of each query, or of the single one."""
    found = labelled(learned, side, found) if by_label else found
    return (found[0], scores[0]) if single else (found, scores)


def names_of(learned: Labelled, side: Side, name: str, positions: np.ndarray, asked: Asked) -> np.ndarray:
    """Ids of an argument, from its positions and unknown ids: labels, or positions."""
    ids = learned.labels(side) if asked.by_label else None
    absent = asked.unknown.absent(positions)
    names = positions if ids is None else ids[positions]
    if absent is None:
        return names
    mixed = names.astype(object)
    mixed[absent] = asked.unknown.strangers(name)
    return plain_array(mixed.tolist())


def given_rows(learned: Labelled, users: np.ndarray, name: str, given: Any, unknown: str | None = None) -> sp.csr_array:
    """Rows of an argument, one for each of `users`: by label, in their order, or of them among those of all users."""
    given = one_row(as_ratings(given, name))
    matrix, have, n_users = learned.entries(given, name, repeats=True), labels_of(given), learned.count("user")
    by_position = matrix.shape[0] == n_users != len(users)
    if by_position:
        check_ids("userid", users[users >= 0], n_users, "n_users")  # unknown users have empty rows
    ids = learned.user_ids
    labelled = have is not None and have[0] is not None and not (ids is None and are_positions(have[0], users))
    want = (ids if labelled else IN_ORDER, learned.item_ids)
    matrix, _ = align(matrix, have, want, name=name, unknown=unknown)
    if labelled:
        check_shape(name, matrix, (n_users, None), ("n_users", "n_items"))
    if labelled or by_position:
        matrix = rows_or_empty(matrix, users)
    check_shape(name, matrix, (len(users), learned.count("item")), ("n_userids", "n_items"))
    return matrix


def rows_of_strangers(learned: Labelled, n_rows: int, name: str, given: Any, unknown: str | None) -> sp.csr_array:
    """Rows of an argument, one for each new user, in their order."""
    given = one_row(as_ratings(given, name, users=False))
    matrix = learned.entries(given, name, repeats=True)
    matrix, _ = align(matrix, labels_of(given), (IN_ORDER, learned.item_ids), name=name, unknown=unknown)
    check_shape(name, matrix, (n_rows, learned.count("item")), ("n_rows", "n_items"))
    return matrix


# ------------------------------------------------------------------------------------------------------- histories


def is_history(rows: Any) -> bool:
    """Whether `rows` are items of one user, or of several users, and not a matrix."""
    if isinstance(rows, (list, tuple, set, frozenset, range, Mapping, str)):
        return True
    return (getattr(rows, "ndim", 2) == 1 and not sp.issparse(rows)) or hasattr(rows, "to_list")  # a Series


def read_history(learned: Learned, rows: Any, by_label: bool, unknown: Unknown) -> tuple[sp.csr_array, bool]:
    """Items, or mappings from items to values, of one user or of several, as a matrix; and whether it was one user.

    Without values each item is an entry of 1, which explicit feedback refuses. Repeats add up.
    """
    single = not _are_several(rows)
    parts = [_entries(learned, history) for history in ([rows] if single else rows)]
    if not by_label:
        for history, _ in parts:
            _refuse_dense_row(history, learned.count("item"))
    values = np.concatenate([values for _, values in parts]) if parts else np.empty(0)
    implicit = learned.objective.is_implicit
    how = {"drop_zeros": implicit, "duplicates": "sum" if implicit else "error"}
    lists, dtype = [items for items, _ in parts], learned.state.item.matrix.dtype
    return _matrix_of(learned, "rows", lists, values, by_label, unknown, dtype=dtype, **how), single


def _matrix_of(
    learned: Labelled, name: str, lists: list[Any], values: np.ndarray, by_label: bool, unknown: Unknown, **how: Any
) -> sp.csr_array:
    """Lists of items, one for each row, as a matrix without unknown items; `how` are options of `from_triplets`."""
    items = positions_of(learned, "item", name, [item for one in lists for item in one], by_label, unknown)
    rows, absent = np.repeat(np.arange(len(lists)), [len(one) for one in lists]), unknown.absent(items)
    if absent is not None:
        rows, items, values = rows[~absent], items[~absent], values[~absent]
    return from_triplets(rows, items, values, (len(lists), learned.count("item")), name=name, **how)


def _are_several(rows: Any) -> bool:
    """Whether `rows` is a list of histories."""
    if not isinstance(rows, (list, tuple)) or not rows:
        return False
    return all(isinstance(row, (list, tuple, set, frozenset, Mapping)) or np.ndim(row) == 1 for row in rows)


def _entries(learned: Learned, history: Any) -> tuple[list[Any], np.ndarray]:
    if isinstance(history, (str, bytes)):
        raise TypeError(f"rows must be a matrix, or items of one or several users, got {history!r}; pass [{history!r}]")
    weighted = isinstance(history, Mapping)
    index: Any = getattr(history, "index", None)
    if hasattr(index, "is_unique") and (index.name is not None or index.dtype.kind not in "iu"):  # a Series of pandas
        raise TypeError(
            f"rows is a pandas Series whose index, {index[:1].tolist()}, may name items; pass series.to_dict() if its "
            "values are ratings of the items in its index, or series.to_list() if they are the items"
        )
    if not weighted and not learned.objective.is_implicit and len(history):
        raise RatingsError(
            "rows are items without ratings, and this model was fitted on explicit feedback; pass a mapping "
            "{item: rating} for each user, or a matrix"
        )
    tensor = hasattr(history, "__dlpack__") and not isinstance(history, np.ndarray)
    items = np.from_dlpack(history).tolist() if tensor else list(history)
    return items, np.asarray(list(history.values()) if weighted else np.ones(len(items)))


def _refuse_dense_row(items: list[Any], n_items: int) -> None:
    """Refuse a row of a matrix of integers, whose values would be positions of items."""
    if 4 <= n_items == len(items) and 2 * items.count(0) >= n_items:
        raise RatingsError(
            f"rows has {n_items} integers for a user, one for each item, and {items.count(0)} of them are 0: a row of "
            "a matrix is passed with two dimensions, as in numpy.atleast_2d(rows), and a history as positions of items"
        )


# ------------------------------------------------------------------------------------------------------ candidates


@dataclass(frozen=True)
class Candidates:
    """Items that may be recommended."""

    shared: np.ndarray | None = None  # mask of the candidates of all users; None: all items
    allowed: sp.csr_array | None = None  # (n, n_items): candidates of each user
    denied: sp.csr_array | None = None  # (n, n_items): items to exclude for each user
    include_cold: bool = False  # whether items that have features only are candidates, too

    def pairs(self, *excluded: sp.csr_array | None) -> tuple[np.ndarray, np.ndarray]:
        """Users and items of the lists of candidates, without the entries of `excluded`."""
        assert self.allowed is not None
        pairs = self.allowed
        for each in excluded:
            if each is not None:
                pairs = keep_entries(pairs, ~entries_in(pairs, each))
        if self.shared is not None:
            pairs = keep_entries(pairs, self.shared[pairs.indices])
        return entry_rows(pairs), pairs.indices.astype(np.int64)

    def of_users(self, start: int, stop: int) -> Candidates:
        rows = np.arange(start, stop)
        allowed, denied = (None if part is None else take_rows(part, rows) for part in (self.allowed, self.denied))
        return Candidates(self.shared, allowed, denied, self.include_cold)


class Asked:
    """Arguments of a recommendation that do not name users, validated but for `filter_items` and `items`."""

    def __init__(
        self,
        N: Any,
        filter_liked: Any,
        filter_items: Any,
        items: Any,
        cold_users: Any,
        labels: Any,
        unknown: Any,
        include_cold: Any = False,
    ) -> None:
        self.N = check_int("N", N, 1, MAX_N)
        self.filter_liked = check_bool("filter_already_liked_items", filter_liked)
        self.filter_items, self.items = filter_items, items  # they depend on the model
        self.cold_users = check_choice("cold_users", cold_users, COLD_USERS)
        self.by_label = check_bool("labels", labels)
        self.unknown = Unknown.check(unknown)
        self.include_cold = check_bool("include_cold", include_cold)

    def candidates(self, learned: Labelled, n_users: int, rows_of: Callable[[str, Any], sp.csr_array]) -> Candidates:
        """Candidates of users; `rows_of` is a function of an argument's name and a matrix: the rows of the users."""
        shared: np.ndarray | None = None
        lists: dict[str, sp.csr_array | None] = {"items": None, "filter_items": None}
        for name, given in (("items", self.items), ("filter_items", self.filter_items)):
            if given is None:
                continue
            if sp.issparse(given) or hasattr(given, "user_items") or is_pairs(given) or is_wide(given):
                lists[name] = rows_of(name, given)
            elif _are_several(given) or (isinstance(given, np.ndarray) and given.ndim == 2):
                lists[name] = _lists(learned, name, given, self.by_label, n_users, self.unknown)
            else:
                shared = np.full(learned.count("item"), name != "items") if shared is None else shared
                choose(shared, learned, "item", name, given, self.by_label, self.unknown)
        return Candidates(shared, lists["items"], lists["filter_items"], self.include_cold)


def choose(
    mask: np.ndarray, learned: Labelled, side: Side, name: str, given: Any, by_label: bool, unknown: Unknown
) -> None:
    """Mark the ids of an allow list in a mask of all rows of a side; or unmark those of a list named ``filter_...``."""
    places = positions_of(learned, side, name, given, by_label, unknown)
    absent = unknown.absent(places)
    mask[places if absent is None else places[~absent]] = not name.startswith("filter_")


def _lists(learned: Labelled, name: str, given: Any, by_label: bool, n_users: int, unknown: Unknown) -> sp.csr_array:
    if len(given) != n_users:
        raise ValueError(
            f"{name} has {len(given)} lists of items; expected one for each of {n_users} users, or one list"
        )
    lists = [one.tolist() if isinstance(one, np.ndarray) else list(one) for one in given]
    ones = np.ones(sum(map(len, lists)))
    return _matrix_of(learned, name, lists, ones, by_label, unknown, duplicates="first")
