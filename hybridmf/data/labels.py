"""Labels to positions and back: triplets with the labels of both sides, factorization of ids, lookups."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES
from ..core.validate import (
    MAX_AXIS,
    MERGE_HINT,
    check_ids,
    check_int,
    from_triplets,
    frozen_csr,
    in_matrix_order,
    make_csr,
    pair_numbers,
    refuse_masked,
    repeats,
    repeats_text,
)
from ..errors import DuplicateEntriesError, RatingsError, UnknownLabelError

logger = logging.getLogger("hybridmf")

MISSING = ("error", "drop", "keep")
"""Values of ``missing=``: what to do with entries without the id of a user or an item."""

MISSING_WORDS = frozenset(
    ("", "NULL", "Null", "null", "None", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-nan", "NaT", "\\N")
)
"""Text that SQL, Spark, Hive, R and pandas write for a missing value."""

EXAMPLES = 3  # labels, names or values shown in a message
MAX_PADDED = 256  # longest label, in characters, of a NumPy string array, which pads all elements to the longest one

MAX_VALUE = float(np.finfo(np.float32).max)


class NoEntriesError(RatingsError):
    """A source, or a part of it, has no entries that are kept."""


@dataclass
class Entries:
    """Triplets before they become a matrix; `where` describes locations of entries in the source."""

    users: np.ndarray  # (nnz,) positions
    items: np.ndarray  # (nnz,) positions
    values: np.ndarray  # (nnz,)
    user_ids: np.ndarray | None
    item_ids: np.ndarray | None
    shape: tuple[int, int]
    source: str = "ratings"
    where: Callable[[int, int], str] = lambda first, second: f"entries {first} and {second}"
    times: np.ndarray | None = None  # (nnz,)
    valued: bool = False  # rows of a source with values: one that repeats another whole is a copy
    weights: np.ndarray | None = None  # (nnz,)

    def keep(self, mask: np.ndarray) -> Entries:
        """Entries where `mask` is true; labels without entries disappear."""
        kept = np.flatnonzero(mask)
        users, user_ids = _used(self.users[kept], self.user_ids)
        items, item_ids = _used(self.items[kept], self.item_ids)
        shape = [size if ids is None else len(ids) for size, ids in zip(self.shape, (user_ids, item_ids), strict=True)]
        times, weights = (None if each is None else each[kept] for each in (self.times, self.weights))
        return replace(
            self, users=users, items=items, values=self.values[kept], user_ids=user_ids, item_ids=item_ids,
            shape=(shape[0], shape[1]), times=times, weights=weights,
            where=lambda first, second: self.where(int(kept[first]), int(kept[second])),
        )  # fmt: skip

    def without_missing(self, missing: str) -> Entries:
        """Entries with ids that are no `MISSING_WORDS`; under "keep", all."""
        sides = ((cast(np.ndarray, self.user_ids), self.users), (cast(np.ndarray, self.item_ids), self.items))
        absent = [are_missing(ids) for ids, _ in sides]
        if missing == "keep" or not any(map(np.any, absent)):
            return self
        lost = [found[codes] for found, (_, codes) in zip(absent, sides, strict=True)]
        gone = lost[0] | lost[1]
        if missing == "error":
            first, side = first_lost(*lost)
            ids, codes = sides[side]
            where, count = self.where(first, first), int(np.count_nonzero(gone))
            raise missing_error(self.source, where, SIDES[side], str(ids[codes[first]]), count, len(gone))
        note_dropped(self.source, int(np.count_nonzero(gone)), len(gone))
        return self.keep(~gone)

    def times_of(self, duplicates: str) -> np.ndarray | None:
        """Time of each entry of `to_matrix`, in its order; for merged entries the latest, or that of the entry kept."""
        if self.times is None:
            return None
        if duplicates == "error":  # no pair repeats
            return in_matrix_order(self.users, self.items, self.times, self.shape)
        order, rule = np.arange(len(self.times)), duplicates
        if duplicates not in ("first", "last"):
            order, rule = np.argsort(self.times, kind="stable"), "max"
        return np.ascontiguousarray(self.times[self._merged(order, rule)])

    def _merged(self, order: np.ndarray, rule: str) -> np.ndarray:
        """Index of the entry of each pair that the rule chooses by its place in `order`; as ordered in `to_matrix`."""
        places = np.empty(len(order))
        places[order] = np.arange(len(order))  # exact in float64
        kept = from_triplets(self.users, self.items, places, self.shape, dtype=np.float64, duplicates=rule)
        return np.asarray(order[kept.data.astype(np.int64)])

    def weights_of(self, duplicates: str) -> np.ndarray | None:
        """Weight of each entry of `to_matrix`, in its order.

        Of merged entries: under "mean" the sum, so that the squared errors of a fit do not change; under "sum" the mean
        by value, so that value times weight is a sum, too; else that of the entry kept, under "max" the largest of
        equal ones.
        """
        if self.weights is None:
            return None
        if duplicates in ("mean", "sum"):
            shares = np.ones(len(self.values)) if duplicates == "mean" else np.abs(np.asarray(self.values, np.float64))
            total = self._summed(self.weights * shares)
            if duplicates == "mean":
                return total.astype(np.float32)
            parts = self._summed(shares)
            plain = self._summed(self.weights) / self._summed(np.ones(len(shares)))
            return np.where(parts > 0, total / np.where(parts > 0, parts, 1), plain).astype(np.float32)
        order = np.lexsort((self.weights, self.values)) if duplicates == "max" else np.arange(len(self.values))
        return np.ascontiguousarray(self.weights[self._merged(order, duplicates)])

    def _summed(self, numbers: np.ndarray) -> np.ndarray:
        """Sum for each pair, float64, in the order of `to_matrix`."""
        matrix = from_triplets(self.users, self.items, numbers, self.shape, dtype=np.float64, duplicates="sum")
        return np.asarray(matrix.data)

    def to_matrix(self, duplicates: str) -> sp.csr_array:
        """Check positions and values, and convert them to canonical CSR, float32."""
        try:
            matrix = from_triplets(self.users, self.items, self.values, self.shape, duplicates=duplicates)
        except DuplicateEntriesError:
            raise self.duplicate_error() from None
        if self.weights is None or duplicates != "mean" or matrix.nnz == len(self.values):
            return matrix
        means = self._summed(self.weights * np.asarray(self.values, np.float64)) / self._summed(self.weights)
        return frozen_csr(make_csr(matrix.indptr, matrix.indices, means.astype(np.float32), self.shape))

    def without_copies(self) -> Entries:
        """Entries without those that have user, item, value and time of an earlier one."""
        found = repeats(self.users, self.items, self.values)
        if not self.valued or self.values.min() == self.values.max():  # a log, in which a repeat is another event
            raise self.duplicate_error(found)
        copies = whole_repeats(self.users, self.items, self.values, self.times, self.weights)
        kept = self.keep(~copies)
        if repeats(kept.users, kept.items, kept.values)[0]:
            raise kept.duplicate_error(found)
        note_copies(self.source, int(np.count_nonzero(copies)))
        return kept

    def duplicate_error(self, found: np.ndarray | None = None) -> DuplicateEntriesError:
        """Name the first entry that repeats a pair, and the one it repeats; `found`: `repeats`."""
        found = repeats(self.users, self.items, self.values) if found is None else found
        first, second = first_repeat(self.users, self.items)
        user, item = label_of(self.user_ids, self.users[first]), label_of(self.item_ids, self.items[first])
        where = self.where(first, second)
        if self.weights is not None:
            where += f", weights {float(self.weights[first]):g} and {float(self.weights[second]):g}"
        return duplicate_error(
            self.source, user, item, where, self.values[[first, second]],
            found, bool(self.values.min() == self.values.max()),
        )  # fmt: skip


def are_missing(ids: np.ndarray) -> np.ndarray:
    if ids.dtype.kind not in "UO":
        return np.zeros(len(ids), dtype=bool)
    return np.fromiter((label in MISSING_WORDS for label in ids.tolist()), bool, len(ids))


def first_lost(users: np.ndarray, items: np.ndarray) -> tuple[int, int]:
    """The first entry without a user or an item, and the axis of the one that it lacks."""
    first = int(np.argmax(users | items))
    return first, int(not users[first])


def missing_error(source: str, where: str, side: str, found: str, count: int, total: int) -> RatingsError:
    """The error for entries without an id; all arguments but the last two describe the first one."""
    more = f"{count:,} of {total:,} entries have" if count > 1 else f"1 of {total:,} entries has"
    return RatingsError(
        f'{source}, {where} has no {side} ({found!r}); {more} no user or no item. missing="drop" leaves such entries '
        f'out, missing="keep" takes {found!r} for an id like any other'
    )


def note_dropped(source: str, count: int, total: int) -> None:
    """Report entries without ids that ``missing="drop"`` leaves out."""
    if count == total:
        raise NoEntriesError(f"{source} holds no ratings: each of its {total:,} entries has no user or no item")
    logger.warning("%s: left out %s of %s entries, which have no user or no item", source, f"{count:,}", f"{total:,}")


def _used(positions: np.ndarray, ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions among the labels with entries, and these labels."""
    if ids is None:
        return positions, None
    used = np.zeros(len(ids), dtype=bool)
    used[positions] = True
    return (np.cumsum(used, dtype=np.int32) - 1)[positions], ids[used]


def whole_repeats(users: np.ndarray, items: np.ndarray, values: np.ndarray, *more: np.ndarray | None) -> np.ndarray:
    """Mask of the entries that repeat an earlier one in all columns; `more` columns are times and weights, if any."""
    columns = [column for column in (*more, values, items, users) if column is not None]
    order = np.lexsort(columns)
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in columns:
        same &= column[order[1:]] == column[order[:-1]]
    mask = np.zeros(len(order), dtype=bool)
    mask[order[1:]] = same
    return mask


def note_copies(source: str, count: int) -> None:
    logger.warning("%s: merged %s rows that repeat another row whole", source, f"{count:,}")


def first_repeat(users: np.ndarray, items: np.ndarray) -> tuple[int, int]:
    """Indices of the two entries of the first repeated pair: the earlier entry and its repetition."""
    pairs = pair_numbers(users, items)
    order = np.argsort(pairs, kind="stable")
    again = np.flatnonzero(pairs[order[1:]] == pairs[order[:-1]])
    place = again[np.argmin(order[again + 1])]
    return int(order[place]), int(order[place + 1])


def duplicate_error(
    source: str, user: str, item: str, where: str, values: np.ndarray, found: np.ndarray, log: bool
) -> DuplicateEntriesError:
    """The error for repeated pairs; all arguments but the last two describe the first one."""
    fitting = '"sum" counts them, "first" keeps one' if log else '"sum" adds counts, "last" or "mean" suit ratings'
    return DuplicateEntriesError(
        f"{source} has more than one entry for the pair (user {user}, item {item}): "
        f"{where}, values {float(values[0]):g} and {float(values[1]):g}. {repeats_text(found)}. {MERGE_HINT}: {fitting}"
    )


def label_kind(ids: np.ndarray | None) -> str:
    return "positions" if ids is None else "str" if ids.dtype.kind == "U" else ids.dtype.name


_TYPES = {"bool": (bool, np.bool_), "int": (int, np.integer), "float": (float, np.floating), "str": (str,)}
"""Types of labels: those of one type may be equal whatever NumPy or Python class they have."""

_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "U": "str"}  # types of labels by the kind of their dtype


def _type_of(label: Any) -> str:
    return next((name for name, kinds in _TYPES.items() if isinstance(label, kinds)), type(label).__name__)


def _label_types(ids: np.ndarray) -> set[str]:
    """Types of labels; of objects there may be several."""
    if ids.dtype.kind != "O":
        return {_KINDS.get(ids.dtype.kind, ids.dtype.name)} if len(ids) else set()
    return {_type_of(label) for label in {type(label): label for label in ids}.values()}


def check_label_types(side: str, *sources: tuple[str, np.ndarray | None]) -> None:
    """Refuse to match labels of different types, such as "101" and 101, or 17850.0 and 17850.

    They would be strangers, or meet by chance. A source with labels of several types, such as 1 and "guest", may meet
    others unless these spell a label of it with another type. Sources are (name, labels); without labels, ignored.
    """
    labelled = [(name, ids, _label_types(ids)) for name, ids in sources if ids is not None]
    if len(set().union(*(types for _, _, types in labelled))) < 2:
        return
    spelled: dict[str, dict[str, tuple[str, np.ndarray, Any]]] = {}
    for name, ids, _ in labelled:
        for label in ids:
            same = spelled.setdefault(_spelling(label), {})
            kind = _type_of(label)
            others = [each for other, each in same.items() if other != kind and each[0] != name]
            if others and kind not in same:
                raise _types_error(side, others[0], (name, ids, label))
            same.setdefault(kind, (name, ids, label))
    known: set[str] = set()
    for name, ids, types in labelled:
        if known and types and known.isdisjoint(types):
            first = next(each for each in labelled if len(each[1]))
            raise _types_error(side, (first[0], first[1], first[1][0]), (name, ids, ids[0]))
        known |= types


def _spelling(label: Any) -> str:
    """Text that labels of different types may share."""
    return str(int(label)) if isinstance(label, (float, np.floating)) and float(label).is_integer() else str(label)


def _types_error(side: str, *two: tuple[str, np.ndarray, Any]) -> RatingsError:
    plain = [label.item() if isinstance(label, np.generic) else label for _, _, label in two]
    kinds = [
        _type_of(label) if ids.dtype == object else label_kind(ids)
        for (_, ids, _), label in zip(two, plain, strict=True)
    ]
    text = " and ".join(f"of type {kind} in {name}" for kind, (name, _, _) in zip(kinds, two, strict=True))
    return RatingsError(
        f"{side}s are {text} (such as {plain[0]!r} and {plain[1]!r}), and labels meet only if they have one type; "
        f"{_conversion(side, two) or _conversion(side, two[::-1]) or 'write them with one type'}"
    )


_OF_REQUESTS = {"ids", "userid", "itemid", "users", "items", "filter_items", "rows", "labels"}
"""Arguments that are ids, not ratings with labels."""


def _conversion(side: str, two: Sequence[tuple[str, np.ndarray, Any]]) -> str | None:
    """How to give the labels of the second source the type of the first; None if that is not possible."""
    (_, wanted, like), (name, given, _) = two
    target = {"int": np.int64, "float": np.float64, "str": np.str_}.get(_type_of(like))
    if target is None or len(_label_types(wanted)) > 1:
        return None
    kind = _type_of(like)
    try:
        if target is np.int64 and given.dtype.kind != "f" and any(str(label).endswith(".0") for label in given):
            kind, given = "float).astype(int", given.astype(np.float64)  # see `warn_spelled_twice`
        with np.errstate(invalid="ignore"):  # of NaN, which equals nothing
            converted: np.ndarray = given.astype(target)
    except (TypeError, ValueError):
        return None
    lossy = given.dtype.kind == "f" and (target is np.str_ or not np.array_equal(converted, given))
    if lossy or len(set(converted.tolist())) < len(given):
        return None
    if name.endswith("features"):
        call = f"column.astype({kind}) of a frame, or Features(matrix, names, labels.astype({kind}))"
    elif name in _OF_REQUESTS:
        call = f"numpy.asarray({name}).astype({kind})"
    else:
        call = f"Ratings(ratings, {side}_ids=ratings.{side}_ids.astype({kind}))"
    return f"convert those of {name}: {call}"


def label_of(ids: np.ndarray | None, position: int) -> str:
    """Text for a row in messages: its label, or its position without labels."""
    return f"at position {position}" if ids is None else repr(ids[position : position + 1].tolist()[0])


def some(values: Any) -> str:
    """A few of several labels or names."""
    plain = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return ", ".join(map(repr, plain[:EXAMPLES])) + (", ..." if len(plain) > EXAMPLES else "")


def as_times(given: Any, name: str = "timestamps", count: int | None = None) -> np.ndarray:
    """Times as int64 (whole numbers), float64 or datetime64, of `count` entries if that is known."""
    times = as_vector(name, given)
    _check_length(name, times, count)
    if times.dtype.kind not in "iufM":
        raise TypeError(
            f"{name} must be numbers or datetime64, got dtype {times.dtype}; dates are converted by "
            "numpy.array(..., dtype='datetime64[us]') or pandas.to_datetime(..., utc=True).tz_localize(None)"
        )
    bad = np.flatnonzero(~np.isfinite(times))
    if bad.size:
        raise RatingsError(f"{name} has no time at entry {bad[0]} ({times[bad[0]]}); remove or fill such entries")
    if times.dtype.kind == "u" and len(times) and times.max() >= 2**63:
        raise RatingsError(f"{name} has {times.max()} at entry {times.argmax()}; integers must be below 2**63")
    whole = times.dtype.kind == "f" and len(times) and np.all(times == np.floor(times)) and np.abs(times).max() < 2**63
    if times.dtype.kind in "iu" or whole:
        return times.astype(np.int64, copy=False)
    return times.astype(np.float64, copy=False) if times.dtype.kind == "f" else times


def as_weights(given: Any, count: int, name: str = "weights") -> np.ndarray:
    """Weights as float32: one for each of `count` entries, finite and above 0."""
    weights = as_vector(name, given)
    if weights.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be numbers, got dtype {weights.dtype}")
    _check_length(name, weights, count)
    with np.errstate(over="ignore"):
        found = weights.astype(np.float32)
    bad = np.flatnonzero(~((found > 0) & np.isfinite(found)))
    if bad.size:
        raise RatingsError(
            f"{name} has {bad.size:,} of {count:,} values that are not finite and above 0 in float32 (the first is "
            f"{weights[bad[0]]} at entry {bad[0]}); leave out entries without weight"
        )
    return found


def refuse_other_index(**vectors: Any) -> None:
    """Refuse pandas series with different indexes: elements at one place belong to different rows."""
    indexes = [(name, vector.index) for name, vector in vectors.items() if hasattr(vector, "iloc")]
    for name, index in indexes[1:]:
        if not index.equals(indexes[0][1]):
            raise RatingsError(
                f"{indexes[0][0]} and {name} are series with different indexes, whose elements at one place belong to "
                f"different rows; pass columns of one frame, or {name}.to_numpy() if their order agrees"
            )


def refuse_series(given: Any, name: str = "weights") -> None:
    """Refuse numbers in the order of the rows of a frame, where that of the entries is expected."""
    if hasattr(given, "to_frame"):
        raise TypeError(
            f"{name} is a series, which has the order of the rows of its frame, and entries are sorted by user and "
            f"item; name the column: Ratings.from_frame(frame, {name[:-1]}=). {name}.to_numpy() counts as sorted"
        )


def _check_length(name: str, given: np.ndarray, count: int | None) -> None:
    if count not in (None, len(given)):
        raise RatingsError(f"{name} has {len(given)} elements; expected one for each of {count} entries")


def joined_times(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Times of several parts, each a result of `as_times`, one after another."""
    dates = [part.dtype.kind == "M" for part in parts]
    if any(dates) and not all(dates):
        raise RatingsError(
            f"timestamps are dates in part {dates.index(True)} and numbers in part {dates.index(False)}; convert one "
            "of them"
        )
    unit = np.result_type(*parts)
    if all(dates):
        for k, part in enumerate(parts):
            try:
                fits = np.array_equal(part.astype(unit).astype(part.dtype), part)
            except OverflowError:  # NumPy wraps around before 2.5
                fits = False
            if not fits:
                raise RatingsError(
                    f"timestamps of part {k} go beyond {unit}, the unit of another part; give all parts one "
                    "unit, such as datetime64[us]"
                )
    return np.concatenate(parts)


def joined_entries(parts: Sequence[Entries], names: Sequence[str] = ()) -> Entries:
    """Entries of several parts, one after another, with labels in order of appearance; `names` as for `joined_axis`."""
    users, user_ids, n_users = joined_axis("user", [(part.user_ids, part.shape[0]) for part in parts], names)
    items, item_ids, n_items = joined_axis("item", [(part.item_ids, part.shape[1]) for part in parts], names)
    times = [part.times for part in parts if part.times is not None]
    if 0 < len(times) < len(parts):
        logger.warning("timestamps are not kept: only %d of %d parts have them", len(times), len(parts))
    weights = None
    if any(part.weights is not None for part in parts):
        own = [np.ones(len(part.values), np.float32) if part.weights is None else part.weights for part in parts]
        weights = np.concatenate(own)
    return Entries(
        np.concatenate([places[part.users] for places, part in zip(users, parts, strict=True)]),
        np.concatenate([places[part.items] for places, part in zip(items, parts, strict=True)]),
        np.concatenate([part.values for part in parts]), user_ids, item_ids, (n_users, n_items),
        times=joined_times(times) if len(times) == len(parts) else None,
        weights=weights,
    )  # fmt: skip


def joined_files(parts: Sequence[Entries], source: str, *, text: bool) -> Entries:
    """Entries of several files, with sorted labels; `text`: integers and other labels of a column may meet."""
    for side in ("user_ids", "item_ids") if text else ():
        ids = [getattr(part, side) for part in parts]
        if len({each.dtype.kind in "iu" for each in ids}) > 1:  # long labels stay objects, see `MAX_PADDED`
            ids = [each.astype(np.str_) if each.dtype.kind in "iu" else each for each in ids]
            parts = [replace(part, **{side: each}) for part, each in zip(parts, ids, strict=True)]
    joined = joined_entries(parts, [part.source for part in parts])
    (user_places, user_ids), (item_places, item_ids) = (
        factorize(f"{side}s of {source}", cast(np.ndarray, ids), "label")
        for side, ids in (("user", joined.user_ids), ("item", joined.item_ids))
    )
    ends = np.cumsum([len(part.values) for part in parts])
    if len({part.valued for part in parts if len(part.values)}) > 1:
        logger.warning("%s: some files have no values, so that each of their entries counts 1", source)

    def place(entry: int) -> str:
        k = int(np.searchsorted(ends, entry, side="right"))
        inside = entry - int(ends[k]) + len(parts[k].values)
        return f"{parts[k].source}, {parts[k].where(inside, inside)}"

    return replace(
        joined, users=user_places[joined.users], items=item_places[joined.items], user_ids=user_ids,
        item_ids=item_ids, source=source, where=lambda first, second: f"{place(first)} and {place(second)}",
        valued=all(part.valued for part in parts),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- labels and positions


def as_vector(name: str, values: Any) -> np.ndarray:
    """Convert a sequence to a 1-D array; mixed lists and tuples stay objects (NumPy converts them to strings, rows)."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a vector, got {values!r} of type {type(values).__name__}")
    if isinstance(values, (set, frozenset)):  # its order differs from run to run
        raise TypeError(f"{name} is a set, which has no order; pass a list of it")
    if hasattr(values, "__array__"):
        refuse_masked(name, values)
        result = np.asarray(values)
        if result.ndim != 1:
            raise RatingsError(f"{name} must be one-dimensional, got shape {result.shape}")
        return result
    members = list(values)
    kinds = set(map(type, members))
    numbers = all(issubclass(kind, (int, float, np.number)) for kind in kinds) and not (
        bool in kinds and len(kinds) > 1
    )
    if numbers or all(isinstance(member, str) and _fits_array(member) for member in members):
        return np.asarray(members)
    return np.fromiter(members, dtype=object, count=len(members))


def _fits_array(label: str) -> bool:
    return len(label) <= MAX_PADDED and not label.endswith("\0")  # NumPy drops NULs at the end


def label_array(name: str, labels: Iterable[Any] | None, count: int) -> np.ndarray | None:
    """Labels as a vector of length `count` without repeats, which no caller can change; None stays None."""
    if labels is None:
        return None
    vector = _distinct(name, _label_vector(name, labels), count)
    if vector.flags.writeable or vector.base is not None:
        vector = vector.copy()
        vector.flags.writeable = False
    return vector


def _label_vector(name: str, labels: Iterable[Any]) -> np.ndarray:
    """Labels by position as a vector; rejects mappings and sets, whose order does not define positions."""
    if isinstance(labels, (Mapping, set, frozenset)):
        raise TypeError(
            f"{name} must be a sequence with the label of each position in order, got a {type(labels).__name__}; of a "
            f"mapping from labels to positions: sorted({name}, key={name}.get)"
        )
    members: Any = labels if hasattr(labels, "__array__") or isinstance(labels, (str, bytes)) else list(labels)
    vector = as_vector(name, members)
    if vector.dtype.kind == "f" and any(isinstance(member, int) and abs(member) >= 2**53 for member in members):
        return np.fromiter(
            members, dtype=object, count=len(members)
        )  # as floating-point numbers, integers run together
    return plain_array(vector.tolist()) if vector.dtype == object else vector


def _distinct(name: str, labels: np.ndarray, count: int) -> np.ndarray:
    if len(labels) != count:
        raise ValueError(f"{name} has {len(labels)} labels; expected one for each of {count} positions")
    plain = labels.tolist()
    unique = label_set(name, plain)
    if labels.dtype.kind in "fMO" and any(map(is_missing, unique)):
        place = next(k for k, label in enumerate(plain) if is_missing(label))
        raise ValueError(f"{name} has no label ({plain[place]}) at position {place}; each position needs one")
    if len(unique) != count:
        raise ValueError(f"{name} has repeated labels; each position needs a label of its own")
    return labels


def axis_sizes(shape: Any) -> tuple[int | None, int | None]:
    """(n_users, n_items) of an argument `shape`; None for an unspecified size."""
    if not isinstance(shape, Sequence) or len(shape) != 2:
        raise ValueError(f"shape must be (n_users, n_items), got {shape!r}")
    n_users, n_items = (
        None if size is None else check_int(f"shape[{axis}]", size, 0, MAX_AXIS) for axis, size in enumerate(shape)
    )
    return n_users, n_items


def resolve(
    name: str, ids: np.ndarray, ids_name: str, labels: Iterable[Any] | None, size: int | None
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Positions, labels and their number for one side of `from_coo`."""
    if not ids.size:
        ids = ids.astype(np.int32)
    known = None if labels is None else _label_vector(ids_name, labels)
    if ids.dtype.kind in "iu":
        if size is None and known is None:
            largest = int(ids.max()) if ids.size else -1
            if largest >= MAX_AXIS:
                raise RatingsError(
                    f"{name} has {largest} at entry {int(ids.argmax())}; integers are positions here, at most "
                    f"{MAX_AXIS - 1}. If they are labels, pass {name}.astype(object)"
                )
            size = max(largest, -1) + 1  # from_triplets reports negative positions
        size = len(cast(np.ndarray, known)) if size is None else size
        if known is not None and known.dtype.kind in "iu" and ids.size and _are_among(ids, known):
            logger.warning(
                "%s are integers, which are positions, and all of them are among %s, too: if they are labels, pass "
                "%s.astype(object)", name, ids_name, name,
            )  # fmt: skip
        return ids, label_array(ids_name, known, size), size
    if ids.dtype.kind not in "USO":
        raise TypeError(
            f"{name} has dtype {ids.dtype}; expected integers (positions), or strings or objects (labels): "
            f"pass {name}.astype(int) or {name}.astype(object)"
        )
    if known is None:
        codes, found = factorize(name, ids, "entry")
        _warn_missing_words(name, found)
    else:
        found = cast(np.ndarray, label_array(ids_name, known, len(known)))
        codes = places_among(found, ids)
        unknown = np.flatnonzero(codes < 0)
        if unknown.size:
            raise RatingsError(
                f"{name} has the label {label_of(ids, unknown[0])} at entry {unknown[0]}, which is not among the "
                f"{len(found)} {ids_name}"
            )
    if size not in (None, len(found)):
        raise RatingsError(
            f"shape says {size} {name}, but there are {len(found)} labels; leave the shape out, or give all {size} "
            f"labels as {ids_name}"
        )
    return codes, found, len(found)


def _are_among(positions: np.ndarray, labels: np.ndarray) -> bool:
    """Whether all positions are labels, too, but not of themselves; few decide it for labels that are far apart."""
    if np.array_equal(labels, np.arange(len(labels))):
        return False
    return all(np.isin(part, labels).all() for part in (positions[:1000], positions))


def _warn_missing_words(name: str, labels: np.ndarray) -> None:
    """Report labels such as "nan", which ``astype(str)`` makes of missing ids."""
    words = MISSING_WORDS.intersection(labels.tolist()) if labels.dtype.kind in "UO" else set()
    if words:
        logger.warning(
            "%s has the ids %s, which often stand for missing ones; they are kept as labels. Leave such entries out, "
            "or pass a frame to Ratings.from_frame, which refuses or drops them (missing=)",
            name, ", ".join(map(repr, sorted(words))),
        )  # fmt: skip


def warn_spelled_twice(name: str, labels: np.ndarray) -> None:
    """Report text such as "17850.0", which pandas writes for integers of a column with gaps, beside "17850"."""
    ends = labels.dtype.kind == "U" and any(label.endswith(".0") for label in labels[:: len(labels) // 1000 + 1])
    if ends and (twice := sorted(set(labels.tolist()) & {f"{label}.0" for label in labels.tolist()})):
        logger.warning("%s: %d are there without .0, too, and count as others: %s", name, len(twice), some(twice))


def joined_axis(
    side: str, parts: Sequence[tuple[np.ndarray | None, int]], names: Sequence[str] = ()
) -> tuple[list[np.ndarray], np.ndarray | None, int]:
    """New positions of the rows of each part (labels or None, number of rows), labels as they appear, and number."""
    labelled = [ids is not None for ids, _ in parts]
    if not any(labelled):
        return [np.arange(count) for _, count in parts], None, max(count for _, count in parts)
    if not all(labelled):
        raise RatingsError(
            f"{side}s have labels in part {labelled.index(True)} and only positions in part {labelled.index(False)}; "
            "give all parts labels, or none"
        )
    called = names or [f"part {k}" for k in range(len(parts))]
    check_label_types(side, *((name, ids) for name, (ids, _) in zip(called, parts, strict=True)))
    table: dict[Any, int] = {}
    places = [
        np.array([table.setdefault(label, len(table)) for label in cast(np.ndarray, ids).tolist()], dtype=np.int64)
        for ids, _ in parts
    ]
    return places, plain_array(list(table)), len(table)


# -------------------------------------------------------------------------------------------------------- factorization


def factorize(name: str, ids: np.ndarray | list[Any], unit: str) -> tuple[np.ndarray, np.ndarray]:
    """(position of each id, sorted unique labels); `unit` is the name of an entry in the source."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return factorize_integers(ids)
    return factorize_objects(name, ids if isinstance(ids, list) else ids.tolist(), unit)


def factorize_integers(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`factorize` for an integer array; labels are int64, or uint64 if necessary."""
    if ids.size == 0:
        return np.empty(0, np.int32), np.empty(0, np.int64)
    low, high = int(ids.min()), int(ids.max())
    if high > np.iinfo(np.int64).max or high - low >= 4 * ids.size + 2**16:
        labels, codes = np.unique(ids, return_inverse=True)
        return codes, labels if high > np.iinfo(np.int64).max else labels.astype(np.int64)
    # dense ids: a table of the range is far cheaper than sorting all entries
    offsets = np.subtract(ids, low, dtype=np.int64)
    present = np.zeros(high - low + 1, dtype=bool)
    present[offsets] = True
    return (np.cumsum(present, dtype=np.int32) - 1)[offsets], np.flatnonzero(present) + low


def factorize_objects(name: str, ids: list[Any], unit: str) -> tuple[np.ndarray, np.ndarray]:
    """`factorize` for ids that can be hashed and sorted."""
    unique = label_set(name, ids)
    _refuse_mixed_bools(name, unique, ids)
    if any(map(is_missing, unique)):
        place = next(k for k, label in enumerate(ids) if is_missing(label))
        raise RatingsError(f"{name} has no id ({ids[place]}) at {unit} {place}; remove or fill such entries")
    try:
        labels = sorted(unique)
    except TypeError as error:
        kinds = ", ".join(sorted({type(label).__name__ for label in unique}))
        raise TypeError(f"{name} mixes labels that have no order ({kinds}); make them all strings") from error
    table = {label: position for position, label in enumerate(labels)}
    return np.fromiter(map(table.__getitem__, ids), np.int32, len(ids)), plain_array(labels)


def label_set(name: str, labels: list[Any]) -> set[Any]:
    """The distinct labels, which are refused unless a dictionary can have them as keys."""
    try:
        return set(labels)
    except TypeError as error:
        raise TypeError(f"{name} has labels that cannot be used as dictionary keys ({error})") from error


def _refuse_mixed_bools(name: str, unique: set[Any], ids: list[Any]) -> None:
    """Refuse True among numbers: Python takes it for 1, which would be the same label."""
    if not {0, 1} & unique:
        return
    kinds = set(map(type, ids))
    if kinds & {bool, np.bool_} and kinds - {bool, np.bool_}:
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"{name} mixes labels of bool with others ({named}); True equals 1: make them all strings")


def is_missing(label: Any) -> bool:
    """Whether a label is null."""
    try:
        return label is None or bool(label != label)
    except TypeError:  # pandas.NA has no truth value
        return True


def plain_array(labels: list[Any]) -> np.ndarray:
    """Array of numbers, or of strings if that needs little padding; else of objects."""
    kinds = set(map(type, labels))
    if kinds == {int} or kinds == {float} or (kinds == {str} and all(map(_fits_array, labels))):
        array = np.asarray(labels)
        if kinds != {int} or array.dtype.kind != "f":  # NumPy converts [-1, 2**63] to floats
            return array
    return np.fromiter(labels, dtype=object, count=len(labels))


# -------------------------------------------------------------------------------------------------------------- lookups


def label_table(ids: np.ndarray | None) -> dict[Any, int]:
    """Position of each label; empty for None."""
    return {} if ids is None else {label: position for position, label in enumerate(ids.tolist())}


def places_among(ids: np.ndarray | None, labels: np.ndarray) -> np.ndarray:
    """Position of each label among `ids`, int64; -1 for unknown ones."""
    return _find(label_table(ids), labels)


def _find(table: dict[Any, int], labels: np.ndarray) -> np.ndarray:
    try:
        return np.fromiter((table.get(label, -1) for label in labels.tolist()), np.int64, len(labels))
    except TypeError as error:  # of a list in a list
        raise TypeError(f"labels must be one label or a vector of them, got a member that is none ({error})") from None


def look_up(
    side: str,
    labels: Any,
    ids: np.ndarray | None,
    table: dict[Any, int],
    count: int,
    strangers: list[Any] | None = None,
) -> Any:
    """Positions as by `Ratings.user_index`; unknown labels go to `strangers`, if given, and have the position -1."""
    if getattr(labels, "ndim", 1) == 0:  # NumPy scalars and 0-d arrays
        labels = labels.item()
    scalar = isinstance(labels, (str, bytes)) or not isinstance(labels, Iterable)
    scalar = scalar or (isinstance(labels, tuple) and labels in table)
    if ids is None:
        positions = check_ids("labels", labels, count, f"n_{side}s")
        return int(positions[0]) if scalar else positions
    kind = _KINDS.get(ids.dtype.kind)
    if scalar and labels in table and kind in (None, type(labels).__name__):
        return table[labels]
    wanted = np.fromiter([labels], dtype=object, count=1) if scalar else as_vector("labels", labels)
    positions = _find(table, wanted)
    if kind is not None and not _label_types(wanted) <= {kind}:  # 17850.0 is no label 17850, though they are equal
        positions[[_type_of(label) != kind for label in wanted]] = -1
    unknown = np.flatnonzero(positions < 0)
    if unknown.size and strangers is not None:
        strangers.extend(wanted[unknown].tolist())
    elif unknown.size:
        more = f" (and {unknown.size - 1} more)" if unknown.size > 1 else ""
        raise UnknownLabelError(
            f"unknown {side} label {label_of(wanted, unknown[0])}{more}; there are {count} {side} labels of type "
            f"{label_kind(ids)}, such as {', '.join(map(repr, ids[:3].tolist()))}"
        )
    return positions


def storable(name: str, labels: np.ndarray) -> np.ndarray:
    """Labels as an array that can be stored without pickle."""
    if labels.dtype.kind != "O":
        return labels
    if all(isinstance(label, str) for label in labels):
        text = labels.astype(np.str_)
        if text.tolist() != labels.tolist():
            raise ValueError(f"{name} has labels that end in NUL, which a .npz file cannot hold: strip them first")
        return text
    kinds = ", ".join(sorted({type(label).__name__ for label in labels}))
    raise TypeError(
        f"{name} has labels of type {kinds}; a .npz file holds strings, or numbers of at most 64 bits: relabel them "
        f"first, for example by [str(label) for label in {name}]"
    )


def check_storable_labels(name: str, labels: Any) -> list[Any]:
    """Labels as plain Python values, strings or numbers; [] for None, rows without labels."""
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biufU":
        return cast("list[Any]", labels.tolist())
    plain = [
        label.item() if isinstance(label, np.generic) and label.dtype.kind in "biufU" else label
        for label in (() if labels is None else labels)
    ]
    kinds = set(map(type, plain))
    if not kinds <= {str, int, float, bool}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(
            f"{name} holds labels of type {names}; only strings and numbers can be saved in a model file: relabel them "
            f"first, for example by [str(label) for label in {name}]"
        )
    return plain


LABEL_DTYPES = (np.int64, np.uint64, np.uint8)  # dtypes of the results of `encode_labels`


def encode_labels(name: str, labels: np.ndarray) -> np.ndarray:
    """Labels as a tensor: integers unchanged, others as the bytes of a JSON list."""
    if labels.dtype.kind in "iu":
        return labels.astype(np.uint64 if labels.dtype == np.uint64 else np.int64)
    return np.frombuffer(json.dumps(check_storable_labels(name, labels)).encode(), dtype=np.uint8)


def decode_labels(name: str, tensor: np.ndarray) -> np.ndarray:
    if tensor.dtype != np.uint8:
        return tensor
    plain = json.loads(tensor.tobytes().decode())
    if not isinstance(plain, list):
        raise TypeError(f"{name} is a JSON {type(plain).__name__}, expected a list")
    return plain_array(check_storable_labels(name, plain))
