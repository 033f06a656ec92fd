"""Columns of a table as features: numbers, booleans, categories and tags, each with the names of its features.

A table is a data frame, a text file or a single row. `coded` gives the entries of all of its columns, which
`hybridmf.data.features` holds and aligns.
"""

from __future__ import annotations

import csv
import io
import logging
import numbers
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.column_names import role_of
from ..core.files import open_bytes, read_head, reading, sniff_format
from ..core.objective import Side
from ..core.triplets import frame_names
from ..core.validate import check_bool, check_choice, check_memory, make_csr, row_pointer
from ..errors import RatingsError
from .columns import AUTO, check_distinct_names, column_place
from .labels import MISSING_WORDS, is_missing, label_set, plain_array, some
from .readers import null_rows, plain_ids, read_frame
from .text import INTEGER

logger = logging.getLogger("hybridmf")

KINDS = ("number", "boolean", "category", "tags")
"""Kinds of columns: a number is one feature, as is a boolean; a category or a tag is one feature for each value."""

MERGES = ("error", "merge")  # values of ``duplicates=``
FEW_VALUES = 16  # distinct values up to which a column of text is no list of ids, however few rows there are
ENTRY_BYTES = 48  # memory of an entry while the matrix is made

TEXT_SEPARATORS = ("::", "\t", "|", ";", ",")
"""Separators of the fields of a text file; the one that comes first in its first line is taken."""

_LISTS = (list, tuple, set, frozenset, np.ndarray)
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")  # and no code such as 007
_ID_NAME = re.compile(r"(?:id|ID|Id|isbn|asin|sku)$")


@dataclass(frozen=True)
class Column:
    """One column of a table, and how it becomes features."""

    name: str
    kind: str
    separator: str | None = None


Coded = tuple[sp.csr_array, list[str], np.ndarray | None, list[Column], np.ndarray, np.ndarray]
"""Features of a table: matrix, with a row for each label and a column for each name; names, labels, columns of the
table; shift and scale: numbers are ``(value - shift) / scale``."""


@dataclass(frozen=True)
class Table:
    """A table: names of its columns, their values as a list or a series of narwhals, and the labels of its index."""

    source: str
    names: list[Any]
    n_rows: int
    column: Callable[[Any], Any]
    index: Callable[[], np.ndarray | None] = lambda: None
    labels: Callable[[Any], Any] | None = None  # a column as labels, where that is not the same


# --------------------------------------------------------------------------------------------------------------- tables


def table_of(given: Any, source: str) -> Table:
    """A data frame, or a mapping of names of columns to the values of one row, as a table."""
    if isinstance(given, Mapping):
        return Table(source, list(given), 1, lambda name: [given[name]])
    names = frame_names(given)
    if names is None:
        raise TypeError(
            f"{source} must be a pandas, polars or pyarrow table, got {type(given).__name__}; a matrix goes through "
            "Features(matrix, names=, labels=)"
        )
    import narwhals.stable.v2 as nw

    check_distinct_names(source, names)
    table: Any = nw.from_native(given)
    eager = table.collect() if isinstance(table, nw.LazyFrame) else table
    return Table(source, names, len(eager), eager.get_column, lambda: _index_of(given))


def _index_of(frame: Any) -> np.ndarray | None:
    """Labels of the index of a pandas frame: one that has a name, or is text."""
    index = getattr(frame, "index", None)
    if index is None or not hasattr(frame, "iloc") or not len(index):
        return None
    if index.name is None and not all(isinstance(label, str) for label in index):
        return None
    return plain_array(index.tolist())


def read_table(path: Any, separator: str | None = None, encoding: str | None = None) -> Table:
    """A file as a table: Parquet, JSON lines, or text whose first line names the columns.

    Columns of text whose fields are all numbers are numbers, and those of true and false are booleans; an empty field
    is null. The encoding is UTF-8, or latin-1 for what is not valid UTF-8, as in MovieLens.
    """
    name = os.fsdecode(path)
    format = sniff_format(name, read_head(name))
    if format in ("npz", "mtx"):
        raise RatingsError(f"{name} is a matrix without names: load it with scipy and pass it to Features(matrix)")
    if format in ("parquet", "jsonl"):
        return table_of(read_frame(name, format), name)
    rows, mark = read_rows(name, separator, encoding, "a line of the names of its columns, and rows below")
    names = [field.strip() for field in rows[0]]
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            raise RatingsError(
                f"{name}: row {number} has {len(row)} fields, and the first one names {len(names)} columns "
                f"({', '.join(map(repr, names))}), separated by {mark!r}"
            )
    check_distinct_names(name, names)
    columns = {title: [row[place].strip() for row in rows[1:]] for place, title in enumerate(names)}

    def labels(title: Any) -> list[Any]:
        integers = all(map(INTEGER.fullmatch, columns[title]))  # as in ratings
        return [(int(text) if integers else text) if text else None for text in columns[title]]

    return Table(name, names, len(rows) - 1, lambda title: _typed(columns[title]), labels=labels)


def read_rows(
    path: str, separator: str | None, encoding: str | None, expected: str, way_out: str = "name it"
) -> tuple[list[list[str]], str]:
    """Fields of lines with text, and their separator, by default of `TEXT_SEPARATORS`; `way_out`: for errors."""
    with reading(path, encoding or "latin-1"), open_bytes(path) as stream:
        content = stream.read()
        try:
            text = content.decode(encoding or "utf-8-sig")
        except UnicodeDecodeError:
            if encoding is not None:
                raise
            text = content.decode("latin-1")
    lines = [line for line in io.StringIO(text, newline=None) if line.strip()]
    if not lines:
        raise RatingsError(f"{path} is empty; expected {expected}")
    present = [mark for mark in TEXT_SEPARATORS if mark in lines[0]]
    mark = min(present, key=lines[0].index) if separator is None and present else separator
    if mark is None:
        raise RatingsError(f"{path} has no separator in its first line, {lines[0].strip()!r}; {way_out}")
    if mark not in (",", ";"):  # quotation marks are text: "Weird Al" Yankovic
        return [line.rstrip("\n").split(mark) for line in lines], mark
    try:
        return list(csv.reader(lines, delimiter=mark)), mark
    except csv.Error as error:
        raise RatingsError(f"{path} cannot be read as CSV: {error}") from error


def _typed(texts: list[str]) -> list[Any]:
    """Fields of text as numbers or booleans where all of them are; null for `MISSING_WORDS`."""
    given = [None if text in MISSING_WORDS else text for text in texts]
    filled = [text for text in given if text is not None]
    if filled and all(map(_NUMBER.fullmatch, filled)):
        return [None if text is None else float(text) for text in given]
    if {text.lower() for text in filled} == {"true", "false"}:
        return [None if text is None else text.lower() == "true" for text in given]
    return given


# --------------------------------------------------------------------------------------------------- labels and columns


def code_table(
    table: Table,
    side: Side | None = None,
    label: Any = AUTO,
    columns: Sequence[Any] | None = None,
    categories: Sequence[Any] = (),
    separator: Any = None,
    standardize: bool = True,
    duplicates: str = "error",
) -> Coded:
    """See `hybridmf.data.features.Features.from_frame`; `side` is that of the rows, if known."""
    check_choice("duplicates", duplicates, MERGES)
    check_bool("standardize", standardize)
    source, names = table.source, table.names
    labels, place = _labels(table, label, side)
    taken = _taken(source, names, place, columns)
    chosen = set(_names_in("categories", source, names, categories))
    separators = _separators(source, names, taken, separator)
    if not table.n_rows or not taken:
        raise RatingsError(
            f"{source} has {table.n_rows} rows and the columns {', '.join(map(repr, names))}, {len(taken)} of them "
            "features; it needs at least one of each"
        )
    kinds, coded = [], []
    for name in taken:
        values = _Values(source, name, table.column(name))
        column = values.as_column(name in chosen, separators.get(name))
        coded.append(_code(values, column, unlimited=name in chosen))
        kinds.append(column)
    rows, labels = _merged_rows(source, labels, table.n_rows, duplicates)
    return _joined(source, coded, kinds, rows, labels, standardize)


def code_like(table: Table, columns: Sequence[Column]) -> Coded:
    """Features of a table in the way of other `columns`, not standardized; with labels, where it has some."""
    places = {str(name): name for name in table.names}
    missing = [column.name for column in columns if column.name not in places]
    if missing:
        raise RatingsError(
            f"{table.source} lacks the columns {', '.join(map(repr, missing))} of the features of the model; it has "
            f"{', '.join(map(repr, table.names)) or 'none'}"
        )
    used = {column.name for column in columns}
    named = [name for name in table.names if role_of(name) in ("user", "item") and str(name) not in used]
    labels = _column_of_labels(table, named[0]) if len(named) == 1 else table.index()
    coded = []
    for column in columns:
        values = _Values(table.source, column.name, table.column(places[column.name]))
        nothing = bool(values.absent.all())  # null, of which `_code` says what it makes
        kind = column.kind if nothing else values.as_column(column.kind == "category", column.separator).kind
        if kind != column.kind and (column.kind != "tags" or kind != "category"):
            raise RatingsError(
                f"{values} holds values of the kind {kind}, and in the features of the model {column.kind}"
            )
        coded.append(_code(values, column))
    rows, labels = _merged_rows(table.source, labels, table.n_rows, "error")
    return _joined(table.source, coded, list(columns), rows, labels, standardize=False)


def _labels(table: Table, label: Any, side: Side | None) -> tuple[np.ndarray | None, int | None]:
    """Labels of the rows, None for rows that are positions, and the column that has them."""
    source, names = table.source, table.names
    if label is None:
        return None, None
    if not (isinstance(label, str) and label == AUTO):
        place = column_place("label", source, names, len(names), label)
        return _column_of_labels(table, names[place]), place
    wanted = ("user", "item") if side is None else (side,)
    found = [k for k, name in enumerate(names) if role_of(name) in wanted]
    named = [k for k in found if _ID_NAME.search(str(names[k]))]
    if len(found) == 1 or len(named) == 1:
        place = (named if len(named) == 1 else found)[0]
        return _column_of_labels(table, names[place]), place
    if found:
        raise RatingsError(
            f"{source} has {len(found)} columns that could hold the labels by their names: "
            f"{', '.join(repr(names[k]) for k in found)}; pass label= (a name, or a number from 0)"
        )
    index = table.index()
    if index is None:
        raise RatingsError(
            f"{source}: which column holds the labels of its rows is unclear: no name says "
            f"{' or '.join(f'{each}s' for each in wanted)}. Its columns are {', '.join(map(repr, names))}; pass label= "
            "(a name, or a number from 0), or label=None if row k belongs to row k of ratings without labels"
        )
    return index, None


def _column_of_labels(table: Table, name: Any) -> np.ndarray:
    series = (table.labels or table.column)(name)
    plain = isinstance(series, list)
    absent = np.array([_is_absent(each) for each in series], dtype=bool) if plain else null_rows(series)
    if absent.any():
        raise RatingsError(
            f"column {name!r} of {table.source}, its labels, is null in {np.count_nonzero(absent):,} of "
            f"{len(absent):,} rows (the first is row {int(np.argmax(absent))}); leave such rows out"
        )
    ids = series if plain else plain_ids(series)
    return plain_array(ids) if isinstance(ids, list) else ids


def _names_in(argument: str, source: str, names: list[Any], wanted: Any) -> list[Any]:
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise TypeError(f"{argument} must be a sequence of names of columns, got {wanted!r}: write [{wanted!r}]")
    return [names[column_place(argument, source, names, len(names), each)] for each in wanted]


def _taken(source: str, names: list[Any], place: int | None, columns: Any) -> list[Any]:
    """Names of the columns of features, in the order of the frame."""
    if columns is None:
        return [name for k, name in enumerate(names) if k != place and role_of(name) != "row"]
    chosen = set(_names_in("columns", source, names, columns))
    if place is not None and names[place] in chosen:
        raise RatingsError(f"columns names {names[place]!r}, which holds the labels of {source}; leave it out")
    return [name for name in names if name in chosen]


def _separators(source: str, names: list[Any], taken: list[Any], separator: Any) -> dict[Any, str]:
    given = separator if isinstance(separator, Mapping) else dict.fromkeys(taken, separator)
    for name, text in given.items():
        if name not in taken:
            column_place("separator", source, names, len(names), name)
            raise RatingsError(f"separator names {name!r}, which is none of the columns of features of {source}")
        if text is not None and (not isinstance(text, str) or not text):
            raise TypeError(f"separator must be text, such as '|', got {text!r}")
    return {name: text for name, text in given.items() if text is not None}


# --------------------------------------------------------------------------------------------------------------- values


class _Values:
    """One column of a frame, or of a single row, as a list or an array."""

    def __init__(self, source: str, name: Any, series: Any) -> None:
        self.source, self.name = source, name
        self.kind: str | None = None
        if isinstance(series, list):
            self.given: Any = series
            self.absent = np.array([_is_absent(each) for each in series], dtype=bool)
            return
        import narwhals.stable.v2 as nw

        dtype = series.dtype
        self.absent = null_rows(series)
        if dtype.is_temporal():
            self._refuse_dates(str(dtype))
        if dtype.is_decimal():
            series = series.cast(nw.Float64)
        if dtype.is_numeric():
            self.kind = "number"
        elif dtype == nw.Boolean:
            self.kind = "boolean"
        elif dtype in (nw.String, nw.Categorical, nw.Enum):
            self.kind = "category"
        elif isinstance(dtype, (nw.List, nw.Array)):
            self.kind = "tags"
        elif dtype != nw.Object:
            raise TypeError(f"{self} has the type {dtype}, of which no features can be made: {self.way_out}")
        plain = self.kind == "number" and "128" not in str(dtype) and not self.absent.any()
        self.given = series.to_numpy() if plain else series.to_list()

    def __str__(self) -> str:
        return f"column {self.name!r} of {self.source}"

    way_out = "convert it to numbers, text or lists of text, or leave it out (columns=)"

    def _refuse_dates(self, kind: str) -> None:
        raise TypeError(
            f"{self} has dates ({kind}), of which no features can be made: convert them to numbers, such as the year, "
            "or to text, such as the decade; or leave the column out (columns=)"
        )

    def as_column(self, category: bool, separator: str | None) -> Column:
        """How this column becomes features, by its type and the arguments."""
        kind = self.kind or self._kind_of_objects()
        if separator is not None and kind == "category":
            kind = "tags"
        else:
            separator = None
        if category and kind != "tags":
            kind = "category"
        return Column(str(self.name), kind, separator)

    def _kind_of_objects(self) -> str:
        kinds = {_kind_of(each) for each, absent in zip(self.given, self.absent, strict=True) if not absent}
        if not kinds:
            return "category"
        if len(kinds) == 1 and next(iter(kinds)) in KINDS:
            return next(iter(kinds))
        if any(kind.startswith("date") for kind in kinds) or kinds <= {"Timestamp", "Timedelta"}:
            self._refuse_dates(", ".join(sorted(kinds)))
        raise TypeError(f"{self} has values of the types {', '.join(sorted(kinds))}: {self.way_out}")

    def numbers(self) -> np.ndarray:
        """Values as float64; all of them have to be finite."""
        if self.absent.any():
            raise RatingsError(
                f"{self} is null in {np.count_nonzero(self.absent):,} of {len(self.absent):,} rows (the first is row "
                f"{int(np.argmax(self.absent))}); fill such numbers, with the mean, for example, or leave the column "
                "out (columns=)"
            )
        values = np.asarray(self.given, dtype=np.float64)
        check_finite(str(self), values)
        return values

    def tags(self, separator: str | None) -> tuple[np.ndarray, list[str]]:
        """(row, tag) of each pair; categories are a tag for each row that has one."""
        rows: list[int] = []
        tags: list[str] = []
        for row, (each, absent) in enumerate(zip(self.given, self.absent, strict=True)):
            if absent:
                continue
            found = self._tags_of(each, separator)
            tags += found
            rows += [row] * len(found)
        return np.array(rows, dtype=np.int64), tags

    def _tags_of(self, given: Any, separator: str | None) -> list[str]:
        if separator is not None:
            return [text for part in given.split(separator) if (text := part.strip())]
        if not isinstance(given, _LISTS):
            whole = isinstance(given, (float, np.floating)) and float(given).is_integer()  # integers beside nulls
            return [str(int(given) if whole else given)] if given != "" else []
        tags = given.tolist() if isinstance(given, np.ndarray) else sorted(given, key=str)
        bad = next((tag for tag in tags if not isinstance(tag, (str, numbers.Integral)) and not _is_absent(tag)), None)
        if bad is not None:
            raise TypeError(
                f"{self} has lists of {type(bad).__name__} (such as {bad!r}); tags are text or integers. Vectors of "
                "numbers go through Features(numpy.stack(...), labels=)"
            )
        return [str(tag) for tag in tags if not _is_absent(tag) and tag != ""]


def _is_absent(value: Any) -> bool:
    return not isinstance(value, _LISTS) and is_missing(value)


def _kind_of(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "boolean"
    if isinstance(value, str):
        return "category"
    if isinstance(value, (numbers.Real, Decimal)):
        return "number"
    return "tags" if isinstance(value, _LISTS) else type(value).__name__


Entries = tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]
"""Entries of one column: rows, positions among the names of its features, values, and these names."""


def _code(values: _Values, column: Column, unlimited: bool = True) -> Entries:
    """Entries of one column; `unlimited`: values may be those of nearly one row each."""
    n_rows = len(values.absent)
    if column.kind in ("number", "boolean"):
        numbers_ = values.numbers()
        rows = np.arange(n_rows) if column.kind == "number" else np.flatnonzero(numbers_)
        return rows, np.zeros(len(rows), dtype=np.int64), numbers_[rows], [column.name]
    rows, tags = values.tags(column.separator)
    distinct = sorted(set(tags))
    if not unlimited:
        _refuse_ids(values, tags, distinct)
        _refuse_joined(values, column, tags)
    table = {tag: place for place, tag in enumerate(distinct)}
    codes = np.fromiter(map(table.__getitem__, tags), np.int64, len(tags))
    return rows, codes, np.ones(len(rows)), [f"{column.name}:{tag}" for tag in distinct]


def _refuse_ids(values: _Values, tags: list[str], distinct: list[str]) -> None:
    """Refuse a column with a feature for nearly each row."""
    if len(distinct) <= max(FEW_VALUES, len(tags) // 2):
        return
    raise RatingsError(
        f"{values} has {len(distinct):,} different values among {len(tags):,}, as ids or titles have, and each would "
        f"be a feature (such as {some(distinct)}): leave it out (columns=), or give separator= if its values are "
        f"joined tags; categories=[{values.name!r}] takes them nevertheless"
    )


def _refuse_joined(values: _Values, column: Column, tags: list[str]) -> None:
    """Refuse text in which tags seem joined: by "|", or by other marks between parts fewer than the values."""
    distinct = set(tags)
    for mark in ("|", ";", ",") if column.kind == "category" else ():
        joined = [tag for tag in tags if mark in tag]
        parts = {part.strip("[]'\" ") for tag in distinct for part in tag.split(mark)}
        if len(joined) > len(tags) / 20 and (mark == "|" or len(parts) < len(distinct)):
            way_out = "make them lists (ast.literal_eval)" if joined[0][0] == "[" else f"pass separator={mark!r}"
            raise RatingsError(
                f"{values} has {len(joined):,} values such as {joined[0]!r}, which look like several tags: {way_out}; "
                f"categories=[{values.name!r}] takes each for one category"
            )


# --------------------------------------------------------------------------------------------------------------- matrix


def _merged_rows(
    source: str, labels: np.ndarray | None, n_rows: int, duplicates: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """New row of each row of a frame, and the labels of the new rows."""
    if labels is None:
        return np.arange(n_rows), None
    plain = labels.tolist()
    if len(label_set(source, plain)) == n_rows:
        return np.arange(n_rows), labels
    table: dict[Any, int] = {}
    rows = np.fromiter((table.setdefault(label, len(table)) for label in plain), np.int64, n_rows)
    if duplicates == "error":
        again = next(label for label, count in Counter(plain).items() if count > 1)
        first, second = [k for k, label in enumerate(plain) if label == again][:2]
        raise RatingsError(
            f"{source} has {n_rows:,} rows of {len(table):,} labels (rows {first} and {second} have {again!r}); "
            'duplicates="merge" joins their tags and takes the mean of numbers, or leave one row for each label'
        )
    return rows, plain_array(list(table))


def _joined(
    source: str,
    coded: list[Entries],
    columns: list[Column],
    rows: np.ndarray,
    labels: np.ndarray | None,
    standardize: bool,
) -> Coded:
    """Entries of all columns; `rows`: the new row of each row."""
    entries, features = sum(len(rows) for rows, *_ in coded), sum(len(names) for *_, names in coded)
    text = f"{source} has {entries:,} entries of {features:,} features: to hold them"
    check_memory(text, entries * ENTRY_BYTES, "use fewer columns (columns=)")
    n_rows = int(rows.max(initial=-1)) + 1
    names: list[str] = []
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    moments: list[tuple[float, float]] = []
    kept: list[Column] = []
    for (own, codes, given, titles), column in zip(coded, columns, strict=True):
        if column.kind == "number":
            values = np.bincount(rows, weights=given, minlength=n_rows) / np.bincount(rows, minlength=n_rows)
            mean, deviation = (float(values.mean()), float(values.std())) if standardize else (0.0, 1.0)
            if standardize and not deviation > abs(mean) * 1e-12:
                text = "%s: left out the feature %r, which is %g in all rows and says nothing"
                logger.warning(text, source, column.name, mean)
                continue
            part = (np.arange(n_rows), np.zeros(n_rows, dtype=np.int64), (values - mean) / deviation)
            moments.append((mean, deviation))
        else:
            width = max(1, len(titles))
            pairs = np.unique(rows[own] * width + codes)
            part = (pairs // width, pairs % width, np.ones(len(pairs)))
            moments += [(0.0, 1.0)] * len(titles)
        parts.append((part[0], part[1] + len(names), part[2]))
        names += titles
        kept.append(column)
    if not names and standardize:
        raise RatingsError(f"{source} has no feature that differs between its {n_rows:,} rows")
    where, codes, values = (np.concatenate([part[k] for part in parts]) for k in range(3))
    shift, scale = np.array(moments).reshape(-1, 2).T.copy()
    return to_matrix(where, codes, values, (n_rows, len(names))), names, labels, kept, shift, scale


def check_finite(name: str, values: np.ndarray) -> None:
    bad = ~(np.abs(values.astype(np.float64)) <= np.finfo(np.float32).max)
    if bad.any():
        first = np.unravel_index(int(np.argmax(bad)), values.shape)
        where = f"row {first[0]}" + (f", column {first[1]}" if values.ndim > 1 else "")
        raise RatingsError(
            f"{name} has {np.count_nonzero(bad):,} values that are no finite float32 numbers (the first is "
            f"{values[first]} at {where}); replace them"
        )


def to_matrix(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> sp.csr_array:
    """Canonical CSR of entries that do not repeat; a zero stays an entry, as the mean of a number is."""
    order = np.lexsort((columns, rows))
    pointer, data = row_pointer(rows, shape[0]), values[order].astype(np.float32)
    return make_csr(pointer, columns[order].astype(np.int32), data, shape)
