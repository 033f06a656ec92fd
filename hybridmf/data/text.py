"""Delimited text: detect the layout from the first lines, then read it.

If installed, pyarrow reads regular text (`arrow_text`); otherwise ``numpy.loadtxt`` reads it if ids are integers. The
csv module reads all other text, including invalid text, line by line, which is slower and gives line numbers.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import io
import itertools
import logging
import os
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.column_names import role_of
from ..core.files import FORMATS, reading
from ..core.progress import reading_progress
from ..core.validate import check_bool
from ..errors import RatingsError
from . import arrow_text
from .columns import AUTO, DEFAULT_PLACES, Columns, resolve_columns
from .labels import MAX_POSITION, MAX_VALUE, Entries, as_times, factorize_integers, factorize_objects
from .layout import Chunk, TextLayout, TimedChunk, open_text
from .lines import Lines, line_blocks

logger = logging.getLogger("hybridmf")

SEPARATORS = ("::", "\t", ",", ";", "|", " ")
"""Separators tried in this order if none is given; a blank stands for any white space."""

BLOCK_CHARS = 1 << 24
"""Characters parsed at a time on the fast path, to bound memory for files of any size."""

BLOCK_RECORDS = 1 << 20
"""Records collected at a time on the slow path."""

SNIFFED_LINES = 50
LIST_SEPARATORS = (" ", "\t", ",")
"""Separators of a user's items in files of lists."""

UNEQUAL = "unequal numbers of fields"
LISTS_HINT = '; a file whose lines hold a user and then all items of that user is read by format="lists"'
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")  # -0, 007 and +7 are labels, not the numbers 0 and 7
_ID_NAME = re.compile(r"(?i)ids?$|^users?$|^items?$")  # other names of users and items, such as "song", may be labels
_UNIX_TIME = re.compile(r"[0-9]{9,19}")  # seconds since 1973, up to nanoseconds
_ITEM_LIST = re.compile(r"[0-9]+(?:[ ,;|]+[0-9]+)+")
Columnar = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray]
"""(positions, labels) of users, the same of items, and values."""

NOTHING: Chunk = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0))


# --------------------------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class TextOptions:
    """Options of a text file with a rating on each line.

    Attributes
    ----------
    separator : str or None
        None: detected.
    header : bool or "auto"
    selectors : (int or str, int or str, int or str or None)
        Columns of user, item and value.
    encoding, comment : str or None
    timestamp : int, str or None
        Column of times.
    others : iterable of int or str
        Other columns named by arguments.
    """

    separator: str | None
    header: bool | str
    selectors: tuple[int | str, int | str, int | str | None]
    encoding: str | None
    comment: str | None
    timestamp: int | str | None = None
    others: Iterable[int | str] = ()


def find_layout(path: str, head: bytes, options: TextOptions) -> TextLayout:
    """Detect separator, header and columns from the first lines."""
    separator, comment, selectors, timestamp = options.separator, options.comment, options.selectors, options.timestamp
    codec = text_encoding(path, head, options.encoding)
    check_text_options(separator, comment)
    lines = first_lines(path, codec, comment)
    found = separator is None
    separator = _sniff_separator(path, lines, selectors[2]) if separator is None else separator
    rows = _sample(lines, separator)
    n_fields = _usual_width(rows)[0]
    first = [field.strip() for field in rows[0]]
    has_header = _has_header(rows, n_fields, options.header, selectors, (timestamp, *options.others))
    if has_header and len(first) != n_fields:
        raise RatingsError(f"{path}: the header has {len(first)} fields, {first}, but the lines below have {n_fields}")
    columns = resolve_columns(path, first if has_header else None, n_fields, *selectors, timestamp=timestamp)
    user, item, value = columns.user, columns.item, columns.value
    whole = [row for row in rows[has_header:] if len(row) == n_fields]
    if columns.names is None and selectors[2] == AUTO and value is not None:
        _refuse_times_as_values(path, value, whole)
    if timestamp == AUTO:
        columns = replace(columns, time=_time_column(columns, whole))
    if found and n_fields == 2 and any(_ITEM_LIST.fullmatch(row[item].strip()) for row in whole):
        raise RatingsError(f"{path} has several items in a field, such as {_cut(lines[-1])}{LISTS_HINT}")
    sample = whole[0] if whole else rows[0]
    integer_ids = all(INTEGER.fullmatch(sample[column].strip()) for column in (user, item))
    return TextLayout(path, codec, comment, separator, has_header, n_fields, user, item, value, integer_ids, columns)


def _time_column(columns: Columns, rows: list[list[str]]) -> int | None:
    """Column of times by its name; without a header, the fourth if it has Unix times, as in MovieLens."""
    place = columns.time
    if columns.names is None and rows and len(rows[0]) == 4 and 3 not in (columns.user, columns.item, columns.value):
        place = 3 if all(_UNIX_TIME.fullmatch(row[3].strip()) for row in rows) else None
    if place is None or not rows:
        return None
    try:
        parse_times([row[place].strip() for row in rows])
    except ValueError:
        return None
    return place


def _refuse_times_as_values(path: str, value: int, rows: list[list[str]]) -> None:
    """Raise if an unnamed column of values holds Unix times."""
    if rows and all(_UNIX_TIME.fullmatch(row[value].strip()) for row in rows):
        raise RatingsError(
            f"{path} has no header, and column {value}, where values are expected, looks like times "
            f"({rows[0][value].strip()}): pass value=None, timestamp={value} to read them as such (each value is 1), "
            f"or value={value} if they are values"
        )


def parse_times(fields: list[str]) -> np.ndarray:
    """Numbers as int64 or float64, dates and times of ISO 8601 as datetime64.

    Raises
    ------
    ValueError
    """
    if all(map(INTEGER.fullmatch, fields)) and all(-(2**63) <= time < 2**63 for time in map(int, fields)):
        return np.array(fields, dtype=np.int64)  # float64 rounds nanoseconds
    numbers = [_number(field) for field in fields]
    if None not in numbers:
        return as_times(np.array(numbers, dtype=np.float64))
    return as_times(parse_dates(fields))


def parse_dates(dates: Any) -> np.ndarray:
    """Text in ISO 8601, or datetime objects, as datetime64: in nanoseconds, or microseconds for years beyond 1678-2261.

    Raises
    ------
    ValueError
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about time zones, which NumPy applies
        coarse = np.array(dates, dtype="datetime64[us]")
        fine = np.array(dates, dtype="datetime64[ns]")  # wraps around silently
    return fine if np.array_equal(fine.astype(coarse.dtype), coarse, equal_nan=True) else coarse


def text_separator(format: str, separator: str | None) -> str | None:
    """Separator of text in that format; None if it must be detected."""
    return {"csv": ",", "tsv": "\t"}.get(format) if separator is None else separator


def check_text_options(separator: Any, comment: Any) -> None:
    """Reject a separator or a comment prefix that is not a string."""
    if separator is not None:
        _check_separator(separator)
    if comment is not None and not isinstance(comment, str):
        raise TypeError(f"comment must be the text that comments begin with, or None, got {comment!r}")


def first_lines(path: str, encoding: str, comment: str | None) -> list[str]:
    """Up to `SNIFFED_LINES` lines (at least one) that are neither blank nor comments."""
    with reading(path, encoding), open_text(path, encoding) as stream:
        lines = list(itertools.islice(Lines(stream, path, comment), SNIFFED_LINES))
    if not lines:
        raise RatingsError(f"{path} holds no ratings, only blank lines or comments")
    return lines


def text_encoding(path: str, head: bytes, encoding: str | None) -> str:
    """Encoding of a text file: `encoding`, else UTF-16 if there is its byte order mark, else UTF-8."""
    if encoding is not None:
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=encoding)  # unlike lookup, rejects base64 and the like
            name = codecs.lookup(encoding).name
        except LookupError as error:
            raise ValueError(f"encoding={encoding!r} is no text encoding; try 'utf-8' or 'latin-1'") from error
        return "utf-8-sig" if name == "utf-8" else name
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in head:
        raise RatingsError(
            f"{path} is not text (it has a zero byte at {head.index(0)}); formats that are read: "
            f"{', '.join(FORMATS[1:])}. For text in UTF-16 pass its encoding"
        )
    return "utf-8-sig"


def _check_separator(separator: Any) -> None:
    if not isinstance(separator, str):
        raise TypeError(f"separator must be a string or None, got {separator!r}")
    if not separator or set(separator) & set('\r\n"'):
        raise ValueError(f"separator must be a string without quotes and line ends, got {separator!r}")


def _split_lines(lines: Iterable[str], separator: str) -> Iterator[list[str]]:
    """Fields of each record; only with a separator of one character, fields may be quoted and span lines."""
    if separator == " ":
        return (line.split() for line in lines)
    if len(separator) > 1:
        return (line.rstrip("\n").split(separator) for line in lines)
    return csv.reader(lines, delimiter=separator)


def _sample(lines: list[str], separator: str) -> list[list[str]]:
    """Return the records of the first lines, up to the first that the csv module rejects."""
    rows: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        rows.extend(_split_lines(lines, separator))
    return rows or [lines[:1]]


def _usual_width(rows: list[list[str]]) -> tuple[int, float]:
    """Return the most frequent number of fields, and the share of lines with it."""
    widths = Counter(map(len, rows))
    width = max(widths, key=lambda width: (widths[width], width))
    return width, widths[width] / len(rows)


def _sniff_separator(path: str, lines: list[str], value: int | str | None) -> str:
    """Return the separator for which the lines look most like ratings; of equal ones, the first."""

    def score(separator: str) -> tuple[bool, bool, float]:
        rows = _sample(lines, separator)
        width, share = _usual_width(rows)
        if width < 2 or share < 0.5:
            return False, False, 0.0
        whole = [row for row in rows[1:] if len(row) == width]
        place = _value_place(rows[0], value)
        numeric = place is None or all(_is_number(row[place]) for row in whole if place < width)
        return width > 2 and numeric, width > 2, share

    preferred = {".csv": ",", ".tsv": "\t"}.get(os.path.splitext(path.lower().removesuffix(".gz"))[1])
    candidates = sorted(SEPARATORS, key=lambda separator: separator != preferred)
    # White space is tried separately, last: titles and dates contain it in files with another separator.
    for group in ([separator for separator in candidates if separator != " "], [" "]):
        best = max(group, key=score)
        if score(best)[2]:
            return best
    if any(len(row) > 1 for separator in LIST_SEPARATORS for row in _sample(lines, separator)):
        raise RatingsError(f"{path}: its lines have {UNEQUAL}, such as {_cut(lines[0])}{LISTS_HINT}")
    tried = ", ".join(map(repr, SEPARATORS))
    raise RatingsError(f"{path}: no separator in {_cut(lines[0])}; tried {tried}. Pass the right one as separator=")


def _value_place(first: list[str], value: int | str | None) -> int | None:
    """Column of values; None without values, or if it is given by a name that is not resolved yet."""
    if value != AUTO:
        return value if isinstance(value, int) else None
    roles = [role_of(name.strip()) for name in first]
    if "value" in roles:
        return roles.index("value")
    return None if {"user", "item"} & set(roles) else DEFAULT_PLACES["value"]


def _is_number(text: str) -> bool:
    return _number(text) is not None


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)  # float() would take 1_0 for 10; loadtxt does not
    except ValueError:
        return None


def _has_header(
    rows: list[list[str]],
    n_fields: int,
    header: bool | str,
    selectors: tuple[Any, Any, Any],
    others: Iterable[Any] = (),
) -> bool:
    named = [selector for selector in (*selectors, *others) if isinstance(selector, str) and selector != AUTO]
    if named and header is False:
        raise ValueError(f"column {named[0]!r} is given by name, but header=False says there are none; give its number")
    if header != "auto" or named:
        return True if named else check_bool("header", header)
    first, second = [field.strip() for field in rows[0]], rows[1] if len(rows) > 1 else []
    user, item, value = (
        DEFAULT_PLACES[role] if selector == AUTO else selector
        for role, selector in zip(DEFAULT_PLACES, selectors, strict=True)
    )
    places = [place for place in (user, item) if isinstance(place, int) and 0 <= place < len(first)]
    if any(_is_number(first[place]) for place in places):
        return False
    if {"user", "item"} <= set(map(role_of, first)) and not any(map(_is_number, first)):
        return True
    if value is not None and not (selectors[2] == AUTO and n_fields == 2):
        return isinstance(value, int) and 0 <= value < len(first) and not _is_number(first[value])
    if any(role_of(first[place]) in ("user", "item") and _ID_NAME.search(first[place]) for place in places):
        return True
    return any(INTEGER.fullmatch(second[place].strip()) for place in places if place < len(second))


# -------------------------------------------------------------------------------------------------------------- reading


def read_text(layout: TextLayout, show_progress: bool = False) -> Entries:
    """Entries after the header, with sorted labels: int64 if all ids of a column are integers, else strings."""
    with reading_progress(layout.path, show_progress) as on_read:
        ((users, user_ids), (items, item_ids), values), times = _read_columns(replace(layout, on_read=on_read))
        if not len(users):
            raise RatingsError(f"{layout.path} holds no ratings, only a header")

    shape = (len(user_ids), len(item_ids))
    where = functools.partial(lines_of, layout)
    return Entries(users, items, values, user_ids, item_ids, shape, layout.path, where, times)


def _read_columns(layout: TextLayout) -> tuple[Columnar, np.ndarray | None]:
    """Users, items and values, and the times of all entries if the layout has a column of them."""
    place = layout.columns.time
    if place is None:
        return _read_regular(layout) or _read_any(layout), None
    if place not in (layout.user, layout.item, layout.value):
        integers, numbers, dates = (replace(layout, times=kind) for kind in ("integers", "numbers", "dates"))
        found = _read_regular(integers) or _read_regular(numbers) or _read_regular(dates)
        found = found or _read_integers(integers) or _read_integers(numbers)
        if found is not None and not _rounded(found[3]):
            return found[:3], as_times(found[3])
    # times are parsed later, so that irregular ones do not slow down the other columns
    columns = _read_regular(layout) or _read_integers(layout)
    if columns is not None:
        return columns, _parsed_times(layout, place, [row[place].strip() for _, row in _records(layout)])
    texts: list[str] = []
    return _read_records(layout, place, texts), _parsed_times(layout, place, texts)


def _rounded(times: np.ndarray) -> bool:
    """Whether times are float64 from which integers may have lost digits."""
    return times.dtype.kind == "f" and bool(np.any(np.abs(times) >= 2**53))


def _parsed_times(layout: TextLayout, place: int, texts: list[str]) -> np.ndarray:
    """Times of all entries, from their text.

    Raises
    ------
    RatingsError
    """
    try:
        return parse_times(texts)
    except ValueError as error:
        raise RatingsError(
            f"{layout.path}, column {place} (timestamp) is neither numbers nor dates as 2026-11-23T12:00:00 ({error}); "
            "timestamp=None leaves it out"
        ) from error


def read_fields(layout: TextLayout, place: int) -> np.ndarray:
    """One column of all records as text, without surrounding white space."""
    return np.array([row[place].strip() for _, row in _records(layout)], dtype=object)


def _read_regular(layout: TextLayout) -> Any:
    """`Columnar` through pyarrow, with times as a fourth element if the layout has them; None if pyarrow declines."""
    numeric = _join(arrow_text.integer_chunks(layout, narrow=True)) if layout.integer_ids else None
    if numeric is not None:
        return _with_integer_labels(numeric)
    user_table: dict[str, int] = {}
    item_table: dict[str, int] = {}
    coded = _join(arrow_text.label_chunks(layout, user_table, item_table))
    return None if coded is None else _with_sorted_labels(coded, user_table, item_table)


def _read_integers(layout: TextLayout) -> Any:
    """The result of `_read_regular`, by numpy.loadtxt; None at the first irregularity."""
    numeric = _join(integer_chunks(layout)) if layout.integer_ids else None
    return None if numeric is None else _with_integer_labels(numeric)


def _read_any(layout: TextLayout) -> Columnar:
    """Users, items and values, for regular and irregular files."""
    return _read_integers(layout) or _read_records(layout)


def _with_integer_labels(chunk: TimedChunk) -> Any:
    return factorize_integers(chunk[0]), factorize_integers(chunk[1]), *chunk[2:]


def _with_sorted_labels(chunk: TimedChunk, user_table: dict[str, int], item_table: dict[str, int]) -> Any:
    return sorted_labels(chunk[0], list(user_table)), sorted_labels(chunk[1], list(item_table)), *chunk[2:]


def _join(chunks: Iterator[TimedChunk | None] | Iterator[Chunk]) -> TimedChunk | None:
    """All chunks in one; None as soon as one is None."""
    parts: list[list[np.ndarray]] = []
    for chunk in chunks:
        if chunk is None:
            return None
        parts = parts or [[] for _ in chunk]
        for column, values in zip(parts, chunk, strict=True):
            column.append(_narrow(values))
    # column by column, so that at most one column is in memory twice
    return tuple(np.concatenate(parts.pop(0)) for _ in range(len(parts))) if parts else NOTHING


def _narrow(ids: np.ndarray) -> np.ndarray:
    """Integers as int32 if all fit, which halves the memory of a file's ids; other arrays unchanged."""
    if ids.dtype != np.int64 or not len(ids) or max(-int(ids.min()), int(ids.max())) > MAX_POSITION:
        return ids
    return ids.astype(np.int32)


def lines_of(layout: TextLayout, first: int, second: int) -> str:
    """Text that says where two entries are in the file."""
    lines = [lines.number for k, (lines, _) in enumerate(_records(layout)) if k in (first, second)]
    return f"lines {lines[0]} and {lines[1]}"


def integer_chunks(layout: TextLayout, size: int | None = None) -> Iterator[TimedChunk | None]:
    """Users, items (int64) and values (float64) in blocks of `size` characters; None at the first irregularity."""
    kinds = {layout.user: "i8", layout.item: "i8", layout.value: "f8"} | (
        {layout.columns.time: "i8" if layout.times == "integers" else "f8"} if layout.times else {}
    )
    dtype = np.dtype([(f"f{k}", kinds.get(k, "U1")) for k in range(layout.n_fields)])
    separator = r"\s" if layout.separator == " " else re.escape(layout.separator)
    odd = re.compile(rf"(?:\n|{separator})[ \t]*(?:-?0[0-9]|-0(?![0-9.]))")
    header = layout.header
    for block in _blocks(layout, size):
        if "+" in block or odd.search("\n" + block):  # loadtxt would parse text that `INTEGER` rejects as integers
            yield None
            return
        lines = _block_lines(block, layout)
        if header:
            lines = [line for line in lines if line.strip()]
            header, lines = not lines, lines[1:]
        if not any(lines):
            continue
        table = _parse_block(lines, dtype, layout)
        if table is None:
            yield None
            return
        numbers = [np.ones(len(table)) if layout.value is None else table[f"f{layout.value}"]]
        numbers += [table[f"f{layout.columns.time}"]] if layout.times else []
        if not all(np.all(np.abs(column) <= MAX_VALUE) for column in numbers):
            yield None
            return
        yield table[f"f{layout.user}"], table[f"f{layout.item}"], *numbers


def _blocks(layout: TextLayout, size: int | None = None) -> Iterator[str]:
    """Blocks of whole lines."""
    with reading(layout.path, layout.encoding), layout.open() as stream:
        yield from line_blocks(stream, layout.path, size or BLOCK_CHARS)


def _block_lines(block: str, layout: TextLayout) -> list[str]:
    if len(layout.separator) > 1 and "\x1f" not in block:  # loadtxt takes one character: ASCII's unit separator
        block = block.replace(layout.separator, "\x1f")
    lines = re.sub("\n\n+", "\n", block).split("\n") if "\n\n" in block else block.split("\n")
    if layout.comment and layout.comment in block:
        lines = [line for line in lines if not line.lstrip().startswith(layout.comment)]
    return lines


def _parse_block(lines: list[str], dtype: np.dtype, layout: TextLayout) -> np.ndarray | None:
    """Structured array of the lines with the fields of `dtype`; None if a line is irregular."""
    delimiter = {" ": None}.get(layout.separator, "\x1f" if len(layout.separator) > 1 else layout.separator)
    with warnings.catch_warnings():
        # NumPy before 2.4 reads the id 1.5 as 1 with a DeprecationWarning; such ids are labels, not integers.
        warnings.simplefilter("error")
        try:
            return np.loadtxt(lines, dtype=dtype, delimiter=delimiter, comments=None, ndmin=1)
        except (ValueError, OverflowError, Warning):
            return None


def _records(layout: TextLayout) -> Iterator[tuple[Lines, list[str]]]:
    """Fields of each record after the header, and the `Lines` that has the start of the record."""
    with reading(layout.path, layout.encoding), layout.open() as stream:
        lines = Lines(stream, layout.path, layout.comment)
        rows = _split_lines(lines, layout.separator)
        if layout.header:
            next(rows)
        while True:
            lines.start()
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise _bad_line(layout, lines, f"cannot be split into fields ({error})") from error
            if len(row) != layout.n_fields:
                problem = f"has {len(row)} field{'s' if len(row) != 1 else ''}"
                lists = layout.separator in LIST_SEPARATORS
                raise _bad_line(layout, lines, problem, f" ({UNEQUAL}{LISTS_HINT})" if lists else "")
            yield lines, row


def _read_records(layout: TextLayout, column: int | None = None, texts: list[str] | None = None) -> Columnar:
    """((positions, labels) of users, the same of items, values) through the csv module; appends a column to `texts`."""
    user_table: dict[str, int] = {}
    item_table: dict[str, int] = {}
    coded = _join(record_chunks(layout, user_table, item_table, column=column, texts=texts))
    assert coded is not None
    columns: Columnar = _with_sorted_labels(coded, user_table, item_table)
    return columns


def record_chunks(
    layout: TextLayout,
    user_table: dict[str, int],
    item_table: dict[str, int],
    size: int = BLOCK_RECORDS,
    column: int | None = None,
    texts: list[str] | None = None,
) -> Iterator[Chunk]:
    """Codes (int32) of users and items, and values (float64), in chunks of `size` records through the csv module.

    New labels enter the tables with codes in the order of their first appearance. The text of a `column` is appended to
    `texts`.
    """
    users, items, values = array("i"), array("i"), array("d")
    for lines, row in _records(layout):
        user, item = row[layout.user].strip(), row[layout.item].strip()
        if not user or not item:
            raise _bad_line(layout, lines, f"has no {'item' if user else 'user'}")
        users.append(user_table.setdefault(user, len(user_table)))
        items.append(item_table.setdefault(item, len(item_table)))
        values.append(1.0 if layout.value is None else _value(layout, lines, row[layout.value]))
        if column is not None and texts is not None:
            texts.append(row[column].strip())
        if len(values) == size:
            yield np.array(users, dtype=np.int32), np.array(items, dtype=np.int32), np.array(values, dtype=np.float64)
            users, items, values = array("i"), array("i"), array("d")
    if values:
        yield np.array(users, dtype=np.int32), np.array(items, dtype=np.int32), np.array(values, dtype=np.float64)


def _value(layout: TextLayout, lines: Lines, text: str) -> float:
    value = _number(text)
    if value is None:
        raise _bad_line(layout, lines, f"has the value {_cut(text)}, which is not a number (value=None ignores values)")
    if not -MAX_VALUE <= value <= MAX_VALUE:
        raise _bad_line(layout, lines, f"has the value {_cut(text)}; values must be finite float32 numbers")
    return value


def _bad_line(layout: TextLayout, lines: Lines, problem: str, more: str = "") -> RatingsError:
    columns = f"user={layout.user}, item={layout.item}" + ("" if layout.value is None else f", value={layout.value}")
    hint = f". It runs to line {lines.last}: is a quote left open?" if lines.last > lines.number else ""
    separator = "white space" if layout.separator == " " else repr(layout.separator)
    return RatingsError(
        f"{layout.path}, line {lines.number} {problem}: {_cut(lines.text)}; "
        f"expected {layout.n_fields} fields separated by {separator} (columns from 0: {columns}){hint}{more}"
    )


def _cut(text: str, length: int = 80) -> str:
    text = text.rstrip("\r\n")
    return repr(text if len(text) <= length else text[:length] + "...")


def sorted_labels(codes: np.ndarray, labels: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Codes for sorted labels, and these labels: int64 if all are integers in that range."""
    limits = np.iinfo(np.int64)
    if all(INTEGER.fullmatch(label) and limits.min <= int(label) <= limits.max for label in labels):
        positions, unique = factorize_integers(np.array(labels, dtype=np.int64))
    else:
        positions, unique = factorize_objects("ids", labels, "label")
    return positions[codes], unique
