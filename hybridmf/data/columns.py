"""Selection of the columns of users, items and values: by the names of a header, else by position.

One rule for text, Parquet, Arrow and data frames: arguments come first, then recognized names in any order, then
positions. Ambiguous columns raise an error that names them. The rule does not depend on how a file is parsed.
"""

from __future__ import annotations

import logging
import numbers
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..core.column_names import role_of
from ..core.validate import check_int
from ..errors import RatingsError

logger = logging.getLogger("hybridmf")

AUTO = "auto"  # value of a column argument: the header decides

DEFAULT_PLACES = {"user": 0, "item": 1, "value": 2}
"""Columns of a file whose header has no recognized name, or that has no header."""


_IDENTIFIER = re.compile(r"(?:^|[\W_])(?:id|ID|Id)$|[a-z]I[Dd]$|(?:transaction|session|review|order|event)id$")


@dataclass(frozen=True)
class Columns:
    """Columns of a table; `names` is None without a header, `time` if times are not read."""

    user: int
    item: int
    value: int | None
    names: tuple[Any, ...] | None
    time: int | None = None
    weight: int | None = None
    guessed: tuple[str, ...] = ()  # roles of columns that are taken for their place, without a name that says so

    def __str__(self) -> str:
        places = {"user": self.user, "item": self.item, "value": self.value}
        more = {"time": self.time, "weight": self.weight}
        places |= {role: place for role, place in more.items() if place is not None}
        return ", ".join(f"{role} = {self._label(place)}" for role, place in places.items())

    def _label(self, place: int | None) -> str:
        if place is None:
            return "1 for every entry"
        return f"column {place}" if self.names is None else f"column {place} {self.names[place]!r}"

    def titles(self) -> tuple[Any, Any, Any, Any, Any]:
        """Names of the columns of users, items, values, times and weights; None for those that are not read."""
        assert self.names is not None
        places = (self.user, self.item, self.value, self.time, self.weight)
        user, item, value, time, weight = (None if place is None else self.names[place] for place in places)
        return user, item, value, time, weight


def resolve_columns(
    source: str,
    names: Iterable[Any] | None,
    n_fields: int,
    user: Any = AUTO,
    item: Any = AUTO,
    value: Any = AUTO,
    *,
    timestamp: Any = None,
    weight: Any = None,
    by_place: bool = True,
) -> Columns:
    """Find the columns of users, items and values of a table with `n_fields` columns; `names` is None without a header.

    A number (from 0) or a name overrides everything. "auto" takes the column with a recognized name
    (`core.column_names.ROLES`) in any position. Without one, columns 0, 1 and 2 are taken, unless their names have
    another meaning, or `by_place` is False. Values are None, every entry 1, on request or if no column is left.
    `timestamp="auto"` takes the only free column with a time-like name, else none; `weight` has to be given.
    """
    table = _NamedColumns(source, None if names is None else tuple(names), n_fields, by_place)
    given = {"user": user, "item": item, "value": value}
    places = {role: table.place(role, given[role]) for role in given if not _is_auto(given[role])}
    if weight is not None:
        places["weight"] = table.place("weight", weight)
    _check_distinct(places)
    for role in ("user", "item"):
        if role not in places:
            places[role] = table.named(role, places)
    for role in ("user", "item"):
        if places[role] is None:
            places[role] = table.at_default(role, places)
    if "value" not in places:
        places["value"] = table.find_value(places)
    _check_distinct(places)
    times = table.free("time", places) if _is_auto(timestamp) else []
    time = times[0] if len(times) == 1 else None
    if timestamp is not None and not _is_auto(timestamp):
        time = places["timestamp"] = table.place("timestamp", timestamp)
        _check_distinct(places)
    guessed = tuple(
        role for role in given
        if _is_auto(given[role]) and (place := places[role]) is not None and table.roles[place] != role
    )  # fmt: skip
    weights = places.get("weight")
    return Columns(places["user"], places["item"], places["value"], table.names, time, weights, guessed)  # type: ignore[arg-type]


def column_place(
    argument: str, source: str, names: Sequence[Any] | None, n_fields: int, selector: Any, hint: str = ""
) -> int:
    listed, one = list(names or ()), argument != "where"  # which may name several columns
    given = f"{argument}={selector!r}" if one else "where="
    if listed.count(selector) > 1:
        raise RatingsError(
            f"{source} has {listed.count(selector)} columns named {selector!r} ({given}); rename them, or "
            "pass a number (from 0)"
        )
    if selector in listed:
        return listed.index(selector)
    if not isinstance(selector, numbers.Real):  # a name: text, or another label of a frame
        raise RatingsError(
            f"{source} has no column {selector!r} ({given}); its columns are {_listed(listed) or 'without names'}{hint}"
        )
    place = check_int(argument, selector, 0, None if one else n_fields - 1)
    if place >= n_fields:
        raise RatingsError(f"{source} has {n_fields} columns, none for {argument}={place} (they count from 0){hint}")
    return place


def log_columns(source: str, columns: Columns) -> None:
    """Report the columns in use; as a warning, if some are a guess."""
    header = "no header" if columns.names is None else "a header"
    if not columns.guessed:
        logger.info("%s has %s; %s", source, header, columns)
        return
    pass_on, guessed = (" or ".join(f"{role}{end}" for role in columns.guessed) for end in ("=", "s"))
    logger.warning(
        "%s has %s%s; a guess by places: %s. If it is wrong, pass %s",
        source, header, "" if columns.names is None else f" without a name that says {guessed}",
        columns, pass_on,
    )  # fmt: skip


def check_distinct_names(source: str, names: Iterable[Any]) -> None:
    counts = Counter(names)
    again = [name for name, count in counts.items() if count > 1]
    if again:
        raise RatingsError(
            f"{source} has {counts[again[0]]} columns named {again[0]!r}; names of columns must be distinct: rename or "
            "drop one"
        )


def _is_auto(selector: Any) -> bool:
    return isinstance(selector, str) and selector == AUTO


def _check_distinct(places: dict[str, int | None]) -> None:
    taken = {role: place for role, place in places.items() if place is not None}
    if len(set(taken.values())) < len(taken):
        *first, last = taken
        raise ValueError(f"{', '.join(first)} and {last} must be different columns, got columns {taken}")


@dataclass(frozen=True)
class _NamedColumns:
    source: str
    names: tuple[Any, ...] | None
    n_fields: int
    by_place: bool

    @property
    def roles(self) -> list[str | None]:
        return [None] * self.n_fields if self.names is None else [role_of(name) for name in self.names]

    def place(self, argument: str, selector: Any) -> int | None:
        if selector is None and argument == "value":
            return None
        hint = "; value=None makes every entry 1" if argument == "value" else ""
        return column_place(argument, self.source, self.names, self.n_fields, selector, hint)

    def named(self, role: str, places: dict[str, int | None]) -> int | None:
        """The only free column with a name of this role; None if there is none."""
        free = self.free(role, places)
        if len(free) > 1:
            assert self.names is not None
            raise RatingsError(
                f"{self.source} has {len(free)} columns that could hold the {role}s by their names: "
                f"{_listed(self.names[k] for k in free)}; pass {role}= (a name, or a number from 0)"
            )
        return free[0] if free else None

    def free(self, role: str | None, places: dict[str, int | None]) -> list[int]:
        return [k for k, found in enumerate(self.roles) if found == role and k not in places.values()]

    def at_default(self, role: str, places: dict[str, int | None]) -> int:
        """Column in the usual position of users or items, unless its name has another role."""
        place = DEFAULT_PLACES[role]
        if self.names is None:
            if place < self.n_fields:
                return place
            raise RatingsError(f"{self.source} has a single column; pass separator= if others separate users and items")
        nothing, why = f"no column has a name that says {role}s", ""
        if not self.by_place:
            why = nothing
        elif place >= self.n_fields:
            why = f"there is no column {place}"
        elif self.roles[place] is not None:
            why = f"{nothing}, and column {place}, their usual place, is {self.names[place]!r}"
        elif place in places.values():
            why = f"{nothing}, and column {place} is taken"
        if why:
            self._refuse(role, why)
        return place

    def find_value(self, places: dict[str, int | None]) -> int | None:
        """Column of values; None if no column is left for them."""
        named = self.named("value", places)
        if named is not None:
            return named
        usual = DEFAULT_PLACES["value"]
        if self.names is None:
            return None if self.n_fields == 2 or usual in places.values() else self.place("value", usual)
        free = self.free(None, places)
        if not free:
            return None
        by_names = all(self.roles[places[role]] == role for role in ("user", "item"))  # type: ignore[index]
        unclear = not self.by_place or usual not in free or (by_names and len(free) > 1)
        if unclear or _IDENTIFIER.search(str(self.names[usual])):
            why = f"no column has a name that says values, and {_listed(self.names[k] for k in free)} could be"
            self._refuse("value", why, "; value=None makes every entry 1")
        return usual

    def _refuse(self, role: str, why: str, hint: str = "") -> NoReturn:
        names = self.names or ()
        pass_on = "value=" if role == "value" else "user= and item="
        raise RatingsError(
            f"{self.source}: which column holds the {role}s is unclear: {why}. Its columns are {_listed(names)}; "
            f"pass {pass_on} (a name, or a number from 0){hint}"
        )


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names))
