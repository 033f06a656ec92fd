"""Delimited text: detect the layout from the first lines, then read it.

If installed, pyarrow reads regular text of some size (`arrow_text`). All other text is split block by block; the csv
module reads the blocks that have quotation marks, or a fault, whose line it names.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.column_names import role_of
from ..core.files import FORMATS, reading
from ..core.progress import reading_progress
from ..core.validate import MAX_AXIS, check_bool
from ..errors import RatingsError
from . import arrow_text
from .columns import AUTO, DEFAULT_PLACES, Columns, resolve_columns
from .labels import MAX_VALUE, MISSING_WORDS, Entries, NoEntriesError, as_times, factorize_integers, factorize_objects
from .layout import Chunk, FileOptions, TextLayout, TimedChunk, open_text
from .lines import Lines, bounded_lines, line_blocks

logger = logging.getLogger("hybridmf")

SEPARATORS = ("::", "\t", ",", ";", "|", " ")
"""Separators tried in this order if none is given; a blank stands for any white space."""

BLOCK_CHARS = 1 << 16
"""Characters split at a time, to bound memory, and less than the longest field that the csv module reads."""

SNIFFED_LINES = 50
LIST_SEPARATORS = (" ", "\t", ",")  # separators of a user's items in files of lists

UNEQUAL = "unequal numbers of fields"
LISTS_HINT = '; a file whose lines hold a user and then all items of that user is read by format="lists"'
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")  # -0, 007 and +7 are labels, not the numbers 0 and 7
_ID_NAME = re.compile(r"(?i)ids?$|^users?$|^items?$")  # other names of users and items, such as "song", may be labels
_UNIX_TIME = re.compile(r"[0-9]{9,19}")  # seconds since 1973, up to nanoseconds
_MONTH = (
    "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|(?:nov|dec)(?:ember)?)\b\.?"
)
_DATE = re.compile(
    r"\d{4}[-/.]\d\d?[-/.]\d\d?(?:[T ].*)?|\d\d?[-/.]\d\d?[-/.]\d{4}(?:[T ].*)?"
    rf"|(?i:(?:[a-z]{{3,9}},? )?(?:\d\d?[- ]{_MONTH}|{_MONTH}[- ]\d\d?\b).*\d{{4}}.*)"
)
_COORDINATE = re.compile(r"[-+]?\d{1,3}\.\d{5,}")
_ITEM_LIST = re.compile(r"[0-9]+(?:[ ,;|]+[0-9]+)+")
NOTHING: Chunk = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0))


# --------------------------------------------------------------------------------------------------------------- layout


def find_layout(path: str, head: bytes, options: FileOptions) -> TextLayout:
    """Detect separator, header and columns from the first lines."""
    comment, timestamp = options.comment, options.timestamp
    separator = options.separator or {"csv": ",", "tsv": "\t"}.get(options.format)
    selectors = options.selectors
    codec = text_encoding(path, head, options.encoding)
    lines = first_lines(path, codec, comment)
    found, quoting = separator is None, (options.quote, options.escape)
    separator = _sniff_separator(path, lines, selectors[2], quoting) if separator is None else separator
    if (separator == " " or len(separator) > 1) and quoting not in ((AUTO, None), (None, None)):
        raise ValueError(
            f"quote={options.quote!r} and escape={options.escape!r} need a separator of one character other than a "
            f"blank, and that of {path} is {separator!r}; leave them out"
        )
    rows = _sample(lines, separator, quoting)
    n_fields = _usual_width(rows)[0]
    first = [field.strip() for field in rows[0]]
    has_header = _has_header(
        rows, n_fields, options.header, selectors, (timestamp, options.weight, *(options.where or ()))
    )
    if has_header and len(first) != n_fields:
        raise RatingsError(
            f"{path}: the header has {len(first)} fields, {first}, but the lines below have {n_fields}; name each "
            "column in it (R and pandas leave out the name of row numbers)"
        )
    columns = resolve_columns(
        path, first if has_header else None, n_fields, *selectors, timestamp=timestamp, weight=options.weight
    )
    user, item, value = columns.user, columns.item, columns.value
    whole = [row for row in rows[has_header:] if len(row) == n_fields]
    if columns.names is None:
        _check_places(path, columns, whole)
    if timestamp == AUTO:
        columns = replace(columns, time=_time_column(path, columns, whole))
    if found and n_fields == 2 and any(_ITEM_LIST.fullmatch(row[item].strip()) for row in whole):
        raise RatingsError(f"{path} has several items in a field, such as {_cut(lines[-1])}{LISTS_HINT}")
    sample = whole[0] if whole else rows[0]
    integer_ids = all(INTEGER.fullmatch(sample[column].strip()) for column in (user, item))
    return TextLayout(path, options, codec, separator, has_header, n_fields, columns, user, item, value, integer_ids)


def _time_column(path: str, columns: Columns, rows: list[list[str]]) -> int | None:
    """Column of times by its name; without a header, the fourth if it has dates, or of four, Unix times (MovieLens)."""
    place, taken = columns.time, (columns.user, columns.item, columns.value, columns.weight)
    if columns.names is None and rows and len(rows[0]) > 3 and 3 not in taken:
        fourth = [row[3].strip() for row in rows]
        unix = len(rows[0]) == 4 and all(map(_UNIX_TIME.fullmatch, fourth))
        place = 3 if unix or 2 * sum(_DATE.fullmatch(text) is not None for text in fourth) >= len(fourth) else None
    if place is None or not rows:
        return None
    texts = [row[place].strip() for row in rows]
    try:
        parse_times(texts)
    except ValueError as error:
        if columns.names is None:
            raise RatingsError(
                f"{path} has no header, and column {place} looks like times that cannot be read "
                f"({_bad_time(place, texts)}): write dates as 2026-11-23T12:00:00, or pass timestamp=None to do "
                "without times"
            ) from error
        warn_times(path, place, texts)
        return None
    return place


def warn_times(path: str, place: int, texts: list[str]) -> None:
    logger.warning(
        "%s has no times: %s; write them as numbers or as 2026-11-23T12:00:00 (pandas.to_datetime reads many forms), "
        "or pass timestamp=None to do without",
        path, _bad_time(place, texts),
    )  # fmt: skip


def _bad_time(place: int, texts: list[str]) -> str:
    """Name the first text of a column that is no time."""
    kinds = {_time_kind(text) for text in texts}
    if len(kinds - {""}) > 1:
        return f"column {place} has numbers and dates"
    k = next((k for k, text in enumerate(texts) if not _time_kind(text)), 0)
    empty = sum(not text for text in texts)
    more = f"; {empty:,} of {len(texts):,} are empty" if empty else ""
    return f"column {place} has {_cut(texts[k])} at entry {k}{more}"


def _time_kind(text: str) -> str:
    if _is_number(text):
        return "number"
    try:
        return "" if np.isnat(parse_dates([text])[0]) else "date"
    except ValueError:
        return ""


def _check_places(path: str, columns: Columns, rows: list[list[str]]) -> None:
    """Raise if a column that is taken for its place, without a header, holds something else."""
    fields = [[row[k].strip() for row in rows] for k in range(len(rows[0]) if rows else 0)]
    looks = [_look(column, "value" if k == columns.value else "", len(fields)) for k, column in enumerate(fields)]
    for role in columns.guessed:
        place = getattr(columns, role)
        if not rows or (look := looks[place]) is None or (role == "value" and look == "fractions"):
            continue
        raise RatingsError(
            f"{path} has no header, and column {place}, where {role}s are expected, looks like {look} "
            f"({fields[place][0]}): pass {_other_places(columns, looks)} if these are the columns (value=None makes "
            f"each value 1), or {role}={place} if they are {role}s"
        )


def _other_places(columns: Columns, looks: list[str | None]) -> str:
    """Arguments for the usual columns, or for others if these hold something else."""
    free = [k for k, look in enumerate(looks) if look is None]
    if len(free) < 2:
        return "user=, item= and value= (numbers from 0)"
    user = columns.user if columns.user in free else free[0]
    others = sorted((k for k in free if k != user), key=lambda k: k == columns.value)
    item = columns.item if columns.item in others else others[0]
    kept = columns.value is not None and looks[columns.value] in (None, "fractions") and columns.value != item
    time = next((k for k, look in enumerate(looks) if look == "times"), None)
    told = f"user={user}, item={item}, value={columns.value if kept else None}"
    return told if time is None else f"{told}, timestamp={time}"


def _look(fields: list[str], role: str, width: int) -> str | None:
    """What a column without a name holds if it can hold neither ids nor, fractions excepted, values."""
    if all(map(_UNIX_TIME.fullmatch, fields)) and (len(fields) > 2 or role == "value"):
        recent = [1e9 <= int(field) / 10.0 ** (len(field) - 10) <= 2.2e9 for field in fields if len(field) > 9]
        if role == "value" or (recent.count(True) == len(fields)):
            return "times"
    if all(map(_DATE.fullmatch, fields)):
        return "times"
    if not all(map(_is_number, fields)):
        return None
    if width > 3 and 2 * sum(_COORDINATE.fullmatch(field) is not None for field in fields) >= len(fields):
        return "coordinates"
    return "fractions" if 2 * sum(not float(field).is_integer() for field in fields) >= len(fields) else None


LARGE = 100_000
MANY_LARGE = 1000
"""Distinct integers above `LARGE` from which values without a name count as ids of something: plays are rarer."""


def large_integers(values: np.ndarray) -> np.ndarray:
    large = values[values > LARGE]
    return np.unique(large[large == np.floor(large)])


def refuse_ids_as_values(layout: TextLayout, large: np.ndarray) -> None:
    """Raise if values, whose column is a guess, are ids, such as those of categories."""
    if len(large) > MANY_LARGE and layout.columns.names is None and "value" in layout.columns.guessed:
        raise RatingsError(
            f"{layout.path} has no header, and column {layout.value}, where values are expected, looks like ids: it "
            f"has more than {MANY_LARGE:,} distinct integers above {LARGE:,}, such as {large[0]:.0f}. Pass value=None "
            f"if each entry counts 1 (or the column of values), or value={layout.value} if they are values"
        )


def parse_times(fields: list[str]) -> np.ndarray:
    """Numbers as int64 or float64, dates and times of ISO 8601 as datetime64."""
    if all(map(INTEGER.fullmatch, fields)):
        with contextlib.suppress(OverflowError):
            return np.fromiter(map(int, fields), np.int64, len(fields))  # float64 rounds nanoseconds
    numbers = [_number(field) for field in fields]
    if None not in numbers:
        return as_times(np.array(numbers, dtype=np.float64))
    if any(number is not None and not 0 < number < 10_000 for number in numbers):  # NumPy takes them for years
        raise ValueError("it has numbers and dates")
    return as_times(parse_dates(fields))


def parse_dates(dates: Any) -> np.ndarray:
    """Text in ISO 8601, or datetime objects, as datetime64: nanoseconds, or microseconds for years beyond 1678-2261."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about time zones, which NumPy applies
        coarse = np.array(dates, dtype="datetime64[us]")
        try:
            fine = np.array(dates, dtype="datetime64[ns]")  # wraps around silently before NumPy 2.5
        except OverflowError:
            return coarse
    return fine if np.array_equal(fine.astype(coarse.dtype), coarse, equal_nan=True) else coarse


def first_lines(path: str, encoding: str, comment: str | None) -> list[str]:
    """Up to `SNIFFED_LINES` lines (at least one) that are neither blank nor comments."""
    with reading(path, encoding), open_text(path, encoding) as stream:
        lines = list(itertools.islice(Lines(bounded_lines(stream), path, comment), SNIFFED_LINES))
    if not lines:
        raise RatingsError(f"{path} holds no ratings, only blank lines or comments")
    return lines


def text_encoding(path: str, head: bytes, encoding: str | None) -> str:
    """Encoding of a text file: `encoding`, else UTF-16 or UTF-32 by its byte order mark, else UTF-8."""
    if encoding is not None:
        try:
            io.TextIOWrapper(io.BytesIO(), encoding=encoding)  # unlike lookup, rejects base64 and the like
            name = codecs.lookup(encoding).name
        except LookupError as error:
            raise ValueError(f"encoding={encoding!r} is no text encoding; try 'utf-8' or 'latin-1'") from error
        return "utf-8-sig" if name == "utf-8" else name
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in head:
        raise RatingsError(
            f"{path} is not text (it has a zero byte at {head.index(0)}); formats that are read: "
            f"{', '.join(FORMATS[1:])}. For text in UTF-16 pass its encoding"
        )
    return "utf-8-sig"


def _split_lines(
    lines: Iterable[str], separator: str, quote: str | None = AUTO, escape: str | None = None
) -> Iterator[list[str]]:
    """Fields of each record; only with a separator of one character, fields may be quoted and span lines."""
    if separator == " ":
        return (line.split() for line in lines)
    if len(separator) > 1 or (quote is None and escape is None):
        return (line.rstrip("\n").split(separator) for line in lines)
    if escape is not None:  # the csv module would take \\N, a missing value, for N
        null = re.compile(rf"(^|{re.escape(separator)}){re.escape(escape)}N(?={re.escape(separator)}|\n?$)")
        lines = (null.sub(lambda found: f"{found[1]}{escape}{escape}N", line) for line in lines)
    if quote is None:
        return csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE, escapechar=escape)
    mark = '"' if quote == AUTO else quote
    return csv.reader(lines, delimiter=separator, quotechar=mark, escapechar=escape, strict=True)


def _sample(lines: list[str], separator: str, quoting: tuple[str | None, str | None]) -> list[list[str]]:
    """Return the records of the first lines, without lines that cannot be read alone."""
    rows: list[list[str]] = []
    if quoting[0] in (AUTO, None):
        for line in lines:
            try:
                rows.extend(_split_lines([line], separator, *quoting))
            except csv.Error:
                rows += [] if rows else [line.rstrip("\n").split(separator)]
    else:
        with contextlib.suppress(csv.Error):  # up to the first that the csv module rejects
            rows.extend(_split_lines(lines, separator, *quoting))
    return rows or [lines[:1]]


def _usual_width(rows: list[list[str]]) -> tuple[int, float]:
    """Return the most frequent number of fields, and the share of lines with it."""
    widths = Counter(map(len, rows))
    width = max(widths, key=lambda width: (widths[width], width))
    return width, widths[width] / len(rows)


def _sniff_separator(
    path: str, lines: list[str], value: int | str | None, quoting: tuple[str | None, str | None]
) -> str:
    """Return the separator for which the lines look most like ratings; of equal ones, the first."""

    def score(separator: str) -> tuple[bool, bool, float]:
        rows = _sample(lines, separator, quoting)
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
    if any(len(row) > 1 for separator in LIST_SEPARATORS for row in _sample(lines, separator, quoting)):
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


def read_text(layout: TextLayout, mask: np.ndarray | None = None, weights: np.ndarray | None = None) -> Entries:
    """Entries of records in `mask`, with sorted labels, integers if all are; `weights`: of all records, unchecked."""
    with reading_progress(layout.path, layout.options.show_progress) as on_read:
        ((users, user_ids), (items, item_ids), values), times = _read_columns(replace(layout, on_read=on_read), mask)
        if not len(users):
            raise NoEntriesError(f"{layout.path} holds no ratings, only a header")
    refuse_ids_as_values(layout, large_integers(values))
    shape = (len(user_ids), len(item_ids))
    where = functools.partial(lines_of, layout)
    found = entries = Entries(users, items, values, user_ids, item_ids, shape, layout.path, where, times)
    entries.valued = layout.value is not None
    if weights is not None:
        entries.weights = weights if mask is None or len(users) == len(mask) else weights[mask]
    if mask is not None and len(users) == len(mask):
        entries = entries.keep(mask)
    elif mask is not None:
        kept = np.flatnonzero(mask)
        entries.where = lambda first, second: lines_of(layout, int(kept[first]), int(kept[second]))
    return typed_labels(entries.without_missing(layout.options.missing), found)


def typed_labels(entries: Entries, before: Entries) -> Entries:
    """A part of the entries `before`, with labels of text as int64 where all are integers in that range."""
    if entries is before:
        return entries
    (users, user_ids), (items, item_ids) = (
        (codes, ids) if ids is None or ids.dtype.kind not in "UO" else sorted_labels(codes, ids.tolist())
        for codes, ids in ((entries.users, entries.user_ids), (entries.items, entries.item_ids))
    )
    return replace(entries, users=users, items=items, user_ids=user_ids, item_ids=item_ids)


def _read_columns(layout: TextLayout, mask: np.ndarray | None = None) -> tuple[Any, np.ndarray | None]:
    """(positions, labels) of users and items, values, and times if any; pyarrow reads records outside `mask`, too."""
    place = layout.columns.time
    if place is None:
        return _read_regular(layout) or _read_records(layout, mask), None
    if place not in (layout.user, layout.item, layout.value):
        kinds = (replace(layout, times=kind) for kind in ("integers", "numbers", "dates"))
        found = next(filter(None, map(_read_regular, kinds)), None)
        if found is not None and len(found[2]):
            times = found[3]
            if times.dtype.kind != "f" or np.all(np.abs(times) < 2**53):  # larger integers may have lost digits
                return found[:3], parse_dates(times) if times.dtype.kind == "M" else as_times(times)
    found = _read_records(layout, mask)
    return found[:3], _parsed_times(layout, place, found[3].tolist()) if len(found[2]) else None


def _parsed_times(layout: TextLayout, place: int, texts: list[str]) -> np.ndarray | None:
    """Times of all entries, from their text; None if they cannot be read and are not required."""
    try:
        return parse_times(texts)
    except ValueError as error:
        if layout.options.timestamp == AUTO:
            warn_times(layout.path, place, texts)
            return None
        raise RatingsError(
            f"{layout.path}, column {place} (timestamp) is neither numbers nor dates as 2026-11-23T12:00:00 ({error}): "
            f"{_bad_time(place, texts)}; timestamp=None leaves it out"
        ) from error


def read_fields(layout: TextLayout, place: int) -> np.ndarray:
    """One column of all records as text, without surrounding white space."""
    texts = [text.strip() for (column,) in _columns(layout, (place,)) for text in column]
    return np.fromiter(texts, dtype=object, count=len(texts))


def _read_regular(layout: TextLayout) -> Any:
    """Columns as by `_read_columns`, with the times, if any, as a fourth one, through pyarrow; None if it declines."""
    numeric = join_chunks(arrow_text.chunks(layout, narrow=True)) if layout.integer_ids else None
    if numeric is not None:
        return factorize_integers(numeric[0]), factorize_integers(numeric[1]), *numeric[2:]
    return joined_labels(functools.partial(arrow_text.chunks, layout))


def _read_records(layout: TextLayout, mask: np.ndarray | None = None) -> Any:
    """The same of any text, with the texts of times."""
    return joined_labels(functools.partial(record_chunks, layout, mask=mask))


def joined_labels(chunks_of: Callable[..., Iterator[Any]]) -> Any:
    """(positions, labels) of users and of items, and the other columns of all chunks; None as soon as one is None."""
    tables: tuple[dict[str, int], dict[str, int]] = ({}, {})
    chunk = join_chunks(chunks_of(*tables))
    if chunk is None:
        return None
    return sorted_labels(chunk[0], list(tables[0])), sorted_labels(chunk[1], list(tables[1])), *chunk[2:]


def join_chunks(chunks: Iterator[TimedChunk | None] | Iterator[Chunk]) -> TimedChunk | None:
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
    if ids.dtype != np.int64 or not len(ids) or max(-int(ids.min()), int(ids.max())) > MAX_AXIS:
        return ids
    return ids.astype(np.int32)


def lines_of(layout: TextLayout, first: int, second: int) -> str:
    """Text that says where two entries are in the file."""
    lines = [lines.number for k, (lines, _) in enumerate(_records(layout)) if k in (first, second)]
    return f"line {lines[0]}" if first == second else f"lines {lines[0]} and {lines[1]}"


# --------------------------------------------------------------------------------------------- records, without pyarrow


def record_chunks(
    layout: TextLayout,
    user_table: dict[str, int],
    item_table: dict[str, int],
    size: int = BLOCK_CHARS,
    mask: np.ndarray | None = None,
) -> Iterator[TimedChunk]:
    """Codes (int32) of users and items, and values (float64), in chunks from blocks of `size` characters.

    New labels enter the tables with codes in the order of their first appearance; a missing id is the label "". If the
    layout has a column of times, their texts follow. Records that `mask` excludes are skipped.
    """
    codes = [_TextCodes(table).__getitem__ for table in (user_table, item_table)]
    commented: list[str] = []
    used = (layout.user, layout.item, layout.value, layout.columns.time)
    done = 0
    for fields in _columns(layout, tuple(place for place in used if place is not None), size, commented):
        count = len(fields[0])
        kept = None if mask is None else mask[done : done + count]
        if kept is not None:
            fields = tuple(list(itertools.compress(each, kept)) for each in fields)
        values = np.ones(len(fields[0])) if layout.value is None else _numbers(fields[2])
        if values is None:
            raise _bad_value(layout, fields[2], done + (np.arange(count) if kept is None else np.flatnonzero(kept)))
        done += count
        if len(values):
            ids = (np.fromiter(map(code, each), np.int32, len(each)) for code, each in zip(codes, fields, strict=False))
            times = () if layout.columns.time is None else (np.array(list(map(str.strip, fields[-1])), dtype=object),)
            yield *ids, values, *times
    if commented:
        logger.warning(
            "%s: skipped %s lines that begin with comment=%r but could be entries, such as %s; comment=None reads them",
            layout.path, f"{len(commented):,}", layout.options.comment, _cut(commented[0]),
        )  # fmt: skip


class _TextCodes(dict[str, int]):
    """Code of each text, as it stands in a file, from a table of labels without white space; new ones are added."""

    def __init__(self, table: dict[str, int]) -> None:
        self.table = table

    def __missing__(self, text: str) -> int:
        code = self[text] = self.table.setdefault(text.strip(), len(self.table))
        return code


def _numbers(texts: list[str]) -> np.ndarray | None:
    """Finite float32 numbers, as float64; None if one is none."""
    try:
        numbers = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        return None
    return numbers if np.all(np.abs(numbers) <= MAX_VALUE) and "_" not in "".join(texts) else None


def _bad_value(layout: TextLayout, texts: list[str], entries: np.ndarray) -> RatingsError:
    """The error for the first of some texts, of these entries, that is no finite float32 number."""
    k = next(k for k, text in enumerate(texts) if _numbers([text]) is None)
    lines, _ = next(itertools.islice(_records(layout), int(entries[k]), None))
    if _is_number(texts[k]):
        return _bad_line(layout, lines, f"has the value {_cut(texts[k])}; values must be finite float32 numbers")
    problem = f"has the value {_cut(texts[k])}, which is not a number (value=None ignores values{value_hint(texts[k])})"
    return _bad_line(layout, lines, problem)


_COMMA_NUMBER = re.compile(r"[-+]?\d{1,3}(?:[., ']\d{3})*,\d+|[-+]?\d{1,3}(?:[, '\u00a0\u202f]\d{3})+(?:\.\d*)?")


def value_hint(text: str) -> str:
    """The way out for a value that is no number, if its form tells one."""
    text = text.strip()
    if not text or text in MISSING_WORDS:
        return "; leave out rows without one (where={column: function} in Python)"
    if _COMMA_NUMBER.fullmatch(text):
        return '; pandas.read_csv(path, decimal=",", thousands=...) reads it for Ratings.from_frame'
    return ""


def _columns(
    layout: TextLayout, places: tuple[int, ...], size: int = BLOCK_CHARS, commented: list[str] | None = None
) -> Iterator[tuple[list[str], ...]]:
    """Columns of the records below the header, as text, in blocks; `commented` gets comments that could be entries."""
    alone = layout.options.quote in (AUTO, None) and layout.options.escape is None  # no record goes on in another block
    header = layout.header
    with reading(layout.path, layout.encoding), layout.open() as stream:
        for number, block in line_blocks(stream, layout.path, size):
            batches: Iterable[list[list[str]]]
            if commented is not None and layout.options.comment and layout.options.comment in block:
                commented += _commented_entries(block, layout)
            if (plain := _plain_columns(block, layout)) is not None:
                batches = [plain]
            else:
                lines = itertools.chain(io.StringIO(block), () if alone else bounded_lines(stream))
                records = _csv_records(layout, Lines(lines, layout.path, layout.options.comment, number))
                batches = _batches(records, max(1, size // 16))
            for columns in batches:
                if columns[0]:
                    yield tuple(columns[place][header:] for place in places)
                    header = False


def _commented_entries(block: str, layout: TextLayout) -> list[str]:
    """Lines that begin with the prefix of comments and have the fields of an entry: ids may begin with it."""
    lines = (line for line in block.split("\n") if line.lstrip().startswith(layout.options.comment or ""))
    split = ((line, line.split(None if layout.separator == " " else layout.separator)) for line in lines)
    return [
        line
        for line, fields in split
        if len(fields) == layout.n_fields
        and (layout.value is None or _is_number(fields[layout.value].strip().strip(layout.quote_mark or "")))
    ]


def _plain_columns(block: str, layout: TextLayout) -> list[list[str]] | None:
    """All columns of whole lines; None unless each line is a record without faults."""
    comment, separator = layout.options.comment, layout.separator
    if "\0" in block or len(block) > csv.field_size_limit():
        return None
    if "\n\n" in block or block.startswith("\n") or (comment and comment in block):
        lines = filter(str.strip, block.split("\n"))
        block = "\n".join(line for line in lines if not (comment and line.lstrip().startswith(comment)))
    block = block.removesuffix("\n")
    if not block:
        return [[]] * layout.n_fields
    if any(mark in block for mark in layout.marks):
        return _quoted_columns(block, layout)
    # a field of its own marks the end of each line
    step = layout.n_fields + 1
    fields = block.replace("\n", f"{separator}\0{separator}").split(None if separator == " " else separator)
    ends = fields[step - 1 :: step]
    if len(fields) % step != step - 1 or ends.count("\0") < len(ends) or block.count("\n") != len(ends):
        return None
    return [fields[place::step] for place in range(layout.n_fields)]


def _quoted_columns(block: str, layout: TextLayout) -> list[list[str]] | None:
    """`_plain_columns` of lines with quotation marks, by the default rules."""
    if layout.options.quote != AUTO or layout.options.escape is not None or '\\"' in block:
        return None
    lines = block.split("\n")
    try:
        rows = list(_split_lines(lines, layout.separator))
    except csv.Error:
        return None
    if len(rows) != len(lines) or set(map(len, rows)) != {layout.n_fields}:  # fewer: a field that spans lines
        return None
    return [list(column) for column in zip(*rows, strict=True)]


def _batches(records: Iterator[tuple[Lines, list[str]]], size: int) -> Iterator[list[list[str]]]:
    """All columns of up to `size` records at a time; the records before a fault precede its error."""
    while True:
        rows: list[list[str]] = []
        fault: RatingsError | None = None
        try:
            rows.extend(row for _, row in itertools.islice(records, size))
        except RatingsError as error:
            fault = error
        if rows:
            yield [list(column) for column in zip(*rows, strict=True)]
        if fault is not None:
            raise fault
        if not rows:
            return


def _records(layout: TextLayout) -> Iterator[tuple[Lines, list[str]]]:
    """Fields of each record after the header, and the `Lines` that has the start of the record."""
    with reading(layout.path, layout.encoding), layout.open() as stream:
        records = _csv_records(layout, Lines(bounded_lines(stream), layout.path, layout.options.comment))
        yield from itertools.islice(records, int(layout.header), None)


def _csv_records(layout: TextLayout, lines: Lines) -> Iterator[tuple[Lines, list[str]]]:
    rows = _split_lines(lines, layout.separator, layout.options.quote, layout.options.escape)
    while True:
        lines.start()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise _bad_line(layout, lines, *_quoting_problem(layout, lines, error)) from error
        if layout.options.quote == AUTO and layout.quote_mark:
            _check_quotes(layout, lines)
        if len(row) != layout.n_fields:
            problem = f"has {len(row)} field{'s' if len(row) != 1 else ''}"
            lists = layout.separator in LIST_SEPARATORS
            raise _bad_line(layout, lines, problem, f" ({UNEQUAL}{LISTS_HINT})" if lists else "")
        yield lines, row


QUOTE_HINT = (
    "quote=None reads quotation marks as part of the text; quote='\"' reads fields by the rules of CSV, over several "
    "lines if necessary"
)
ESCAPE_HINT = 'escape="\\\\" takes the mark after a backslash as part of the field; ' + QUOTE_HINT


def _check_quotes(layout: TextLayout, lines: Lines) -> None:
    """Raise if a record ends in another line than it begins in, or has a backslash before a quotation mark."""
    if lines.last > lines.number:
        raise _bad_line(layout, lines, *_quoting_problem(layout, lines, None))
    text = lines.text
    if (
        not layout.options.escape
        and '\\"' in text
        and (text.lstrip().startswith('"') or f'{layout.separator}"' in text)
    ):
        raise _bad_line(layout, lines, "has a backslash before a quotation mark", f". {ESCAPE_HINT}")


def _quoting_problem(layout: TextLayout, lines: Lines, error: csv.Error | None) -> tuple[str, str]:
    """What is wrong with a record that is not one line of the csv module, and the arguments that help."""
    if layout.quote_mark is None or layout.quote_mark not in lines.text:
        return f"cannot be split into fields ({error})", ""
    hint = ". " + (QUOTE_HINT if layout.options.escape or '\\"' not in lines.text else ESCAPE_HINT)
    if error is not None and "expected after" in str(error) and lines.last == lines.number:
        return "has a field that goes on after its closing quotation mark", hint
    if error is not None and "field larger" in str(error):
        return f"cannot be split into fields ({error})", hint
    return "has a quotation mark that is not closed in this line", hint


def _bad_line(layout: TextLayout, lines: Lines, problem: str, more: str = "") -> RatingsError:
    columns = f"user={layout.user}, item={layout.item}" + ("" if layout.value is None else f", value={layout.value}")
    hint = f". It runs to line {lines.last}: is a quote left open?" if lines.last > lines.number and not more else ""
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
