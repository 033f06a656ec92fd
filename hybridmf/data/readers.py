"""Readers of data frames and Parquet (triplets with labels), and of .npz and MatrixMarket files (matrices)."""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import logging
import math
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import scipy.sparse as sp

from ..core.column_names import role_of
from ..core.files import TEMPORARY, open_bytes, reading
from ..core.frames import import_before_arrow
from ..core.system import needed
from ..core.triplets import frame_names
from ..core.validate import ROW_BYTES, check_memory
from ..errors import HybridMFError, RatingsError
from . import arrow_text
from .columns import AUTO, Columns, check_distinct_names, column_place, log_columns, resolve_columns
from .labels import (
    MAX_VALUE,
    MISSING_WORDS,
    Entries,
    NoEntriesError,
    as_times,
    as_weights,
    factorize,
    first_lost,
    missing_error,
    note_dropped,
)
from .layout import FileOptions, Where
from .lines import Lines, bounded_lines
from .text import INTEGER, find_layout, parse_dates, parse_times, value_hint

logger = logging.getLogger("hybridmf")

Labels = dict[str, np.ndarray]  # ``user_ids``, ``item_ids``, ``timestamps`` and ``weights``, if a file has them

NPZ_LABELS = ("user_ids", "item_ids", "timestamps", "weights")
NPZ_ARRAYS = (*NPZ_LABELS, "indptr", "indices", "data", "row", "col", "coords", "offsets")
"""Arrays read from an archive; others are not loaded."""

MANY_STRINGS = 1 << 16  # number of strings from which importing pyarrow saves time


def frame_entries(frame: Any, source: str, options: FileOptions) -> Entries:
    """Entries of any frame that narwhals supports; `source` is its name in messages. See `Ratings.from_frame`."""
    import narwhals.stable.v2 as nw

    where, missing = options.where or {}, options.missing
    table, names = _frame(frame, source)
    try:
        columns = resolve_columns(
            source, names, len(names), *options.selectors, timestamp=options.timestamp, weight=options.weight,
            by_place=False,
        )  # fmt: skip
    except RatingsError as error:
        levels = [level for level in getattr(getattr(frame, "index", None), "names", ()) if level is not None]
        if not levels:
            raise
        raise RatingsError(f"{error}. Its index {levels} becomes columns by {source}.reset_index()") from None
    log_columns(source, columns)
    user, item, value, time, weight = columns.titles()
    filters = {column: names[column_place("where", source, names, len(names), column)] for column in where}
    used = [name for name in (user, item, value, time, weight, *filters.values()) if name is not None]
    table = table.select(*map(nw.col, dict.fromkeys(used)))
    eager = table.collect() if isinstance(table, nw.LazyFrame) else table
    rows: np.ndarray | None = None
    if where:
        fields = {column: eager.get_column(name).to_numpy() for column, name in filters.items()}
        mask = row_mask(source, where, fields)
        eager, rows, source = eager.filter(mask.tolist()), np.flatnonzero(mask), f"{source} (rows that where= keeps)"
    present = _rows_with_ids(source, eager, (user, item), missing, rows)
    if not present.all():
        note_dropped(source, int(np.count_nonzero(~present)), len(present))
        rows = np.flatnonzero(present) if rows is None else rows[present]
        eager = eager.filter(present.tolist())
    users, user_ids = _coded_column(source, eager, user)
    items, item_ids = _coded_column(source, eager, item)
    values = np.ones(len(users), np.float32) if value is None else _frame_values(source, eager, value)
    times = None if time is None else _frame_times(source, eager, time, required=options.timestamp != AUTO)

    def place(first: int, second: int) -> str:
        first, second = (first, second) if rows is None else (rows[first], rows[second])
        return f"row {first}" if first == second else f"rows {first} and {second}"

    shape = (len(user_ids), len(item_ids))
    weights = None if weight is None else column_weights(source, weight, _frame_values(source, eager, weight))
    return Entries(users, items, values, user_ids, item_ids, shape, source, place, times, value is not None, weights)


def column_weights(source: str, column: Any, values: np.ndarray) -> np.ndarray:
    """Weights of a column, from its values or their text."""
    name = f"column {column!r} of {source}"
    try:
        numbers = values.astype(np.float64)
    except ValueError:
        texts = values.tolist()
        bad = [place for place, text in enumerate(texts) if number_of(text) is None]
        raise RatingsError(
            f"{name} has {len(bad):,} of {len(texts):,} values that are no real numbers (the first is "
            f"{texts[bad[0]]!r} at entry {bad[0]}){value_hint(texts[bad[0]]) or '; leave out entries without weight'}"
        ) from None
    return as_weights(numbers, len(numbers), name)


def _frame(frame: Any, source: str) -> tuple[Any, list[Any]]:
    """A frame as a narwhals frame, and the names of its columns."""
    import narwhals.stable.v2 as nw

    check_distinct_names(source, frame_names(frame) or [])
    if type(frame).__module__.split(".")[0] == "pyarrow":
        frame = _plain_strings(frame)
    try:
        table = nw.from_native(frame)
    except TypeError as error:
        raise TypeError(
            f"frame must be a pandas, polars or pyarrow table, got {type(frame).__name__}; "
            "matrices go through Ratings.from_matrix, arrays through Ratings.from_coo"
        ) from error
    return table, table.collect_schema().names()


def _plain_strings(frame: Any) -> Any:
    """A table of pyarrow without columns of string views, which few of its functions take."""
    import pyarrow as pa

    for place, field in enumerate(getattr(frame, "schema", ())):
        if field.type == pa.string_view():
            views = frame.column(place)
            try:
                strings = views.cast(pa.large_string())
            except pa.ArrowNotImplementedError:  # pyarrow before 18
                strings = pa.chunked_array([views.to_pylist()], pa.large_string())
            frame = frame.set_column(place, field.name, strings)
    return frame


def _frame_column(source: str, table: Any, column: Any, first_row: int = 0) -> Any:
    series = table.get_column(column)
    if series.null_count():
        row = first_row + int(np.flatnonzero(series.is_null().to_numpy())[0])
        raise RatingsError(f"column {column!r} of {source} is null at row {row}; remove or fill such rows")
    return series


def _rows_with_ids(
    source: str, table: Any, columns: Sequence[Any], missing: str, rows: np.ndarray | None, first_row: int = 0
) -> np.ndarray:
    """Mask of the rows that have both ids; `rows`: their numbers in the source, by default from `first_row` on."""
    nulls, words = (
        [test(table.get_column(column)) for column in columns] for test in (null_rows, _rows_of_missing_words)
    )
    lost = nulls if missing == "keep" else [null | word for null, word in zip(nulls, words, strict=True)]
    gone = lost[0] | lost[1]
    count = int(np.count_nonzero(gone))
    if count and missing != "drop":
        at, side = first_lost(*lost)
        row = at + first_row if rows is None else int(rows[at])
        if nulls[side][at]:
            raise RatingsError(
                f"column {columns[side]!r} of {source} is null at row {row}; {count:,} of {len(gone):,} rows have no "
                'user or no item: missing="drop" leaves them out, or fill them'
            )
        found = table.get_column(columns[side])[at]
        where = f"column {columns[side]!r}, row {row}"
        raise missing_error(source, where, ("user", "item")[side], str(found), count, len(gone))
    return ~gone


def null_rows(series: Any) -> np.ndarray:
    """Mask of the rows of a series that are null or NaN."""
    absent = series.is_null() | series.is_nan() if series.dtype.is_float() else series.is_null()
    return np.asarray(absent.to_numpy(), dtype=bool)


def _rows_of_missing_words(series: Any) -> np.ndarray:
    """Mask of the rows whose text is one of `MISSING_WORDS`."""
    import narwhals.stable.v2 as nw

    if series.dtype in (nw.Categorical, nw.Enum):
        series = series.cast(nw.String)
    if series.dtype != nw.String:
        return np.zeros(len(series), dtype=bool)
    return np.asarray(series.is_in(sorted(MISSING_WORDS)).fill_null(False).to_numpy(), dtype=bool)


def _coded_column(source: str, table: Any, column: Any) -> tuple[np.ndarray, np.ndarray]:
    """`factorize` for a column, without a Python object for each of many strings."""
    import narwhals.stable.v2 as nw

    name, series = f"column {column!r} of {source}", _frame_column(source, table, column)
    if len(series) >= MANY_STRINGS and series.dtype == nw.String:
        coded = arrow_text.coded_strings(series)
        if coded is not None:
            positions, labels = factorize(name, coded[1], "row")
            return positions[coded[0]], labels
    return factorize(name, _frame_ids(source, table, column), "row")


def _frame_ids(source: str, table: Any, column: Any, first_row: int = 0) -> np.ndarray | list[Any]:
    series = _frame_column(source, table, column, first_row)
    if series.dtype.is_float():
        _check_exact_ids(source, column, series.to_numpy(), first_row)
    return plain_ids(series)


def plain_ids(series: Any) -> np.ndarray | list[Any]:
    """Integers as an array; others as a list, since an array pads each string to the longest."""
    narrow = series.dtype.is_integer() and "128" not in str(series.dtype)  # NumPy has no integers of 128 bits
    return series.to_numpy() if narrow else series.to_list()


def _check_exact_ids(source: str, column: Any, ids: np.ndarray, first_row: int) -> None:
    """Refuse floating-point numbers so large that different integers become one."""
    digits = 24 if ids.dtype == np.float32 else 53
    bad = np.flatnonzero(~(np.abs(ids) < 2.0**digits))
    if bad.size:
        raise RatingsError(
            f"column {column!r} of {source} has the id {ids[bad[0]]!s} at row {first_row + bad[0]} as a floating-point "
            f"number, in which integers from 2**{digits} on run together: read the column as text or integers "
            '(pandas.read_csv(path, dtype={column: "str"}))'
        )


def _frame_values(source: str, table: Any, column: Any, first_row: int = 0) -> np.ndarray:
    given = _frame_column(source, table, column, first_row).to_numpy()
    try:
        if given.dtype.kind not in "fiubO":
            raise TypeError(f"its dtype is {given.dtype}")
        values = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        texts = given.tolist() if given.dtype == object else []
        hint = next((value_hint(each) for each in texts if isinstance(each, str) and number_of(each) is None), "")
        raise TypeError(f"column {column!r} of {source} holds no real numbers ({error}){hint}") from error
    bad = np.flatnonzero(~(np.abs(values) <= MAX_VALUE))
    if bad.size:
        raise RatingsError(
            f"column {column!r} of {source} has the value {values[bad[0]]} at row {first_row + bad[0]}; values must be "
            "finite float32 numbers: remove or replace such rows"
        )
    return values


def _frame_times(source: str, table: Any, column: Any, required: bool) -> np.ndarray | None:
    """Times of a column; None if they are not required and cannot be used."""
    try:
        series = _frame_column(source, table, column)
        given = series.to_numpy()
        if given.dtype.kind in "OU":
            plain = given.tolist()
            numbers = all(isinstance(time, (int, float)) for time in plain)
            text = all(isinstance(time, str) for time in plain)
            if not numbers and any(
                isinstance(time, (int, float)) for time in plain
            ):  # NumPy takes them for microseconds
                raise ValueError("it has numbers and dates")
            given = parse_times(plain) if text else np.asarray(plain) if numbers else parse_dates(plain)
        return as_times(given, f"column {column!r} of {source}")
    except (RatingsError, TypeError, ValueError) as error:
        if required and not isinstance(error, (RatingsError, TypeError)):
            raise RatingsError(
                f"column {column!r} of {source} is neither numbers nor dates as 2026-11-23T12:00:00 ({error}); "
                "timestamp=None leaves it out"
            ) from error
        if required:
            raise
        logger.warning(
            "column %r of %s is not kept as times: %s; convert it to numbers or dates (pandas.to_datetime reads many "
            "forms), or pass timestamp=None to do without",
            column, source, error,
        )  # fmt: skip
        return None


def part_paths(path: Any) -> list[str] | None:
    """Files that are read as one: of a sequence, a pattern or a folder with Parquet files; None for a single file."""
    if isinstance(path, (list, tuple)):
        if not path:
            raise FileNotFoundError("path is an empty list; give the files of ratings")
        return [part for each in path for part in part_paths(each) or [os.fsdecode(each)]]
    name = os.fsdecode(path)
    if os.path.isdir(name):
        inside = sorted(Path(name).rglob("*"))
        parts = [str(each) for each in inside if each.suffix in (".parquet", ".pq") and not _hidden(each, name)]
        return parts or None
    if os.path.exists(name) or not glob.has_magic(name):
        return None
    matches = sorted(glob.glob(name, recursive=True))
    found = [part for each in matches for part in part_paths(each) or ([each] if os.path.isfile(each) else [])]
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no file matches the pattern", name)
    return list(dict.fromkeys(found))  # a file may match by itself and in its folder


def _hidden(path: Path, folder: str) -> bool:
    """Whether a file, or a folder below the given one, is bookkeeping by its name, as in Spark and Delta Lake."""
    return any(part[0] in "._" and "=" not in part for part in path.relative_to(folder).parts)


def hive_columns(path: str) -> dict[str, int | str | None]:
    """Columns of the folders of a path, such as ``year=2024``; Hive and Spark leave them out of the files."""
    columns: dict[str, int | str | None] = {}
    for part in Path(path).parts[:-1]:
        if found := re.fullmatch("([^=]+)=(.*)", part):
            name, text = map(unquote, found.groups())
            integer = INTEGER.fullmatch(text) and abs(int(text)) < 2**63
            columns[name] = None if text == "__HIVE_DEFAULT_PARTITION__" else int(text) if integer else text
    return columns


@contextlib.contextmanager
def file_of(stream: Any) -> Iterator[str]:
    """Path of a temporary file with the content of a file object from its position on; messages name the object."""
    content = stream.read()
    given = getattr(stream, "name", None)
    shown = os.path.basename(given) if isinstance(given, str) else type(stream).__name__
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        path = os.path.join(folder, shown)
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
        try:
            yield path
        except HybridMFError as error:
            raise type(error)(str(error).replace(path, shown)) from error


def read_parquet(path: str, options: FileOptions) -> Entries:
    """Entries of a Parquet file; reads only the required columns."""
    where = options.where or {}
    with _parquet(path) as file:
        found, hive = _resolved(path, file, options)
        log_columns(path, found)
        user, item, value, time, weight = found.titles()
        names = found.names or ()
        filters = [names[column_place("where", path, names, len(names), column)] for column in where]
        table = file.read(columns=list({user, item, value, time, weight, *filters} - {None, *hive}))
    timestamp = AUTO if options.timestamp == AUTO and time is not None else time
    kept = dict(zip(filters, where.values(), strict=True))
    named = replace(options, user=user, item=item, value=value, timestamp=timestamp, weight=weight, where=kept)
    return frame_entries(_with_columns(table, hive), path, named)


def read_frame(path: str, format: str) -> Any:
    """Table of pyarrow of a whole file, "parquet" or "jsonl"."""
    if format == "jsonl":
        return _json_lines(path)
    with _parquet(path) as file:
        return file.read()


def _json_lines(path: str) -> Any:
    pa, arrow_json = _arrow(path, "json", "JSON lines")
    try:
        with reading(path), open_bytes(path) as stream:
            return arrow_json.read_json(stream)
    except pa.ArrowException as error:
        raise RatingsError(
            f"{path} cannot be read as JSON lines ({error}); expected one object a line, with fields of one type each"
        ) from error


def row_mask(source: str, where: Where, fields: dict[Any, np.ndarray]) -> np.ndarray:
    """Mask of the rows that match `where`; see `Ratings.from_file`."""
    mask = np.ones(len(next(iter(fields.values()))), dtype=bool)
    for column, wanted in where.items():
        mask &= _matches(column, fields[column], wanted)
        if not mask.any():
            some = ", ".join(map(repr, sorted(set(fields[column][:1000].tolist()), key=str)[:5]))
            raise NoEntriesError(
                f"{source}: where= keeps none of {len(mask)} rows; column {column!r} has values such as {some}"
            )
    return mask


def _matches(column: Any, fields: np.ndarray, wanted: Any) -> np.ndarray:
    """Mask of the fields that match `wanted`: a value, several values, or a function of the column."""
    if callable(wanted):
        mask = np.asarray(wanted(_numbers_if_possible(fields)))
        if mask.dtype != bool or mask.shape != fields.shape:
            raise TypeError(
                f"where[{column!r}] must return one True or False for each of {len(fields)} entries, got dtype "
                f"{mask.dtype} and shape {mask.shape}"
            )
        return mask
    values = wanted if isinstance(wanted, list) else [wanted]
    if any(isinstance(value, (int, float, np.number)) and not isinstance(value, bool) for value in values):
        fields = _numbers_if_possible(fields)
    if fields.dtype.kind in "iuf":  # the command line passes numbers as text
        values = [value for value in map(number_of, values) if value is not None]
    if fields.dtype.kind in "iu":  # compared as integers: float64 would merge ids from 2**53 on
        limits = np.iinfo(fields.dtype)
        whole = [int(value) for value in values if value == value // 1 and limits.min <= value <= limits.max]
        return np.isin(fields, np.array(whole, dtype=fields.dtype))
    return np.isin(fields, np.array(values, dtype=fields.dtype if fields.dtype.kind in "OU" else None))


def number_of(value: Any) -> int | float | None:
    """A number from a number or its text; integers stay exact."""
    if isinstance(value, (int, np.integer, str)):
        with contextlib.suppress(ValueError):  # a text such as "2.5"
            return int(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _numbers_if_possible(fields: np.ndarray) -> np.ndarray:
    """Texts of numbers as int64 if all are integers in that range, else as float64; other columns unchanged."""
    if fields.dtype.kind != "O":
        return fields
    try:
        numbers = fields.astype(np.float64)
    except (TypeError, ValueError):
        return fields
    try:
        integers = fields.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        return numbers
    return integers if np.array_equal(integers, numbers) else numbers


def parquet_chunks(
    path: str, options: FileOptions, rows: int
) -> Iterator[tuple[np.ndarray | list[Any], np.ndarray | list[Any], np.ndarray]]:
    """Ids (integers as an array, others as a list) and values of a Parquet file, in chunks of rows."""
    import narwhals.stable.v2 as nw
    import pyarrow as pa

    with _parquet(path) as file:
        found, hive = _resolved(path, file, options)
        log_columns(path, found)
        user, item, value, *_ = found.titles()
        first, dropped, own = 0, 0, [name for name in (user, item, value) if name is not None and name not in hive]
        for batch in file.iter_batches(rows, columns=own):
            table = nw.from_native(_with_columns(pa.Table.from_batches([batch]), hive), eager_only=True)
            present = _rows_with_ids(path, table, [user, item], options.missing, None, first)
            table = table if present.all() else table.filter(present.tolist())
            users, items = (_frame_ids(path, table, column, first) for column in (user, item))
            values = np.ones(len(table)) if value is None else _frame_values(path, table, value, first)
            if len(table):
                yield users, items, values
            first, dropped = first + len(present), dropped + len(present) - len(table)
        if dropped:
            note_dropped(path, dropped, first)


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[Any]:
    """Open a Parquet file; errors of pyarrow become RatingsErrors."""
    pa, pq = _arrow(path, "parquet", "Parquet")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise RatingsError(f"{path} cannot be read as Parquet ({error}); it is damaged or another format") from error


def _arrow(path: str, module: str, kind: str) -> tuple[Any, Any]:
    """pyarrow and one of its modules, to read a file of this kind."""
    import_before_arrow()
    what = f"reading {path} needs pyarrow, which reads {kind}"
    return needed("pyarrow", what, "pyarrow"), needed(f"pyarrow.{module}", what, "pyarrow")


def _resolved(path: str, file: Any, options: FileOptions) -> tuple[Columns, dict[str, Any]]:
    """Columns of a Parquet file, and those in the names of its folders that an argument names or that have a role."""
    names = file.schema_arrow.names
    check_distinct_names(path, names)
    selectors, timestamp, weight = options.selectors, options.timestamp, options.weight
    folders = {name: value for name, value in hive_columns(path).items() if name not in names}
    hive = {
        name: value
        for name, value in folders.items()
        if name in (*selectors, weight) or role_of(name) in ("user", "item", "value")
    }
    others = (timestamp, *(options.where or ()))
    late = {name: value for name, value in folders.items() if name not in hive and name in others}
    names = [*names, *hive]
    known = None if timestamp in late else timestamp
    found = resolve_columns(path, names, len(names), *selectors, timestamp=known, weight=weight)
    names = [*names, *late]
    time = names.index(timestamp) if timestamp in late else found.time
    return replace(found, names=tuple(names), time=time), hive | late


def _with_columns(table: Any, constants: dict[str, Any]) -> Any:
    """An Arrow table with more columns of one value each."""
    import pyarrow as pa

    for name, value in constants.items():
        column = pa.nulls(len(table), pa.string()) if value is None else pa.repeat(value, len(table))
        table = table.append_column(name, column)
    return table


def read_npz(path: str, head: bytes) -> tuple[Any, Labels]:
    """Matrix and labels of a file of `Ratings.save` or ``scipy.sparse.save_npz``; pickles are never loaded."""
    if not head.startswith(b"PK\x03\x04"):
        raise RatingsError(f"{path} is no .npz file (it starts with {head[:8]!r}); write one with Ratings.save")
    _check_npz_memory(path)
    try:
        with open_bytes(path) as stream, np.load(stream, allow_pickle=False) as archive:
            names = archive.files
            ids = {name: archive[name] for name in NPZ_LABELS if name in names}
        matrix = sp.load_npz(path) if "format" in names else None
    except Exception as error:  # damaged archives cause many kinds of errors in zipfile, zlib, NumPy and SciPy
        raise RatingsError(f"{path} cannot be read as .npz ({error}); it is damaged or not one of ours") from error
    if matrix is None:
        raise RatingsError(
            f"{path} is a ZIP archive that holds no sparse matrix but {', '.join(names[:5]) or 'nothing'}; expected a "
            "file of Ratings.save or scipy.sparse.save_npz (unpack other archives first)"
        )
    return matrix, ids


def _check_npz_memory(path: str) -> None:
    """Reject arrays that, by their headers, exceed the memory; the reader reports unreadable archives."""
    sizes = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                if member.endswith(".npy"):
                    with archive.open(member) as stream:
                        first = np.lib.format.read_magic(stream) == (1, 0)
                        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                        shape, _, dtype = read(stream)
                    sizes[member.removesuffix(".npy")] = math.prod(shape) * dtype.itemsize
    except Exception:  # a damaged archive: loading it fails, too, and explains the error
        return
    needed = sum(sizes[name] for name in NPZ_ARRAYS if name in sizes)
    way_out = "convert text, Parquet or MatrixMarket to a store, which is done in bounded memory"
    check_memory(f"{path} has {needed:,} bytes of arrays by its header: to load them", needed, way_out)


class MarketHeader(NamedTuple):
    """Header of a MatrixMarket file; an "array" lists all of its cells."""

    layout: str
    field: str
    symmetry: str
    n_rows: int
    n_columns: int
    entries: int


def market_header(path: str, head: bytes) -> MarketHeader | None:
    """Parse the first lines of a MatrixMarket file; None if they do not contain the sizes."""
    words = head.split(b"\n", 1)[0].decode("latin-1").lower().split()
    if len(words) != 5 or words[1] != "matrix" or words[2] not in ("coordinate", "array"):
        return None
    layout, field, symmetry = words[2:]
    try:
        with reading(path), io.TextIOWrapper(open_bytes(path), encoding="latin-1") as stream:
            lines = Lines(bounded_lines(stream), path, "%")
            sizes = [int(word) for word in next(lines, "").split()]
        rows, columns, entries = sizes if layout == "coordinate" else [*sizes, math.prod(sizes)]
    except RatingsError:
        raise
    except ValueError:
        return None
    if min(rows, columns, entries) < 0:
        raise RatingsError(f"{path} is damaged: its header says {rows} rows, {columns} columns, {entries} entries")
    return MarketHeader(layout, field, symmetry, rows, columns, entries)


def check_market_rows(path: str, header: MarketHeader) -> None:
    """Reject a header with too many rows and columns, even empty ones, to be counted in memory."""
    sizes = f"{header.n_rows:,} rows and {header.n_columns:,} columns"
    needed = ROW_BYTES * (header.n_rows + header.n_columns)
    check_memory(
        f"{path} has {sizes} by its header: to count their entries", needed, "number users and items anew, without gaps"
    )


def read_matrix_market(path: str, head: bytes) -> tuple[Any, Labels]:
    if not head.startswith(b"%%MatrixMarket"):
        raise RatingsError(f"{path} is no MatrixMarket file: line 1 must start with %%MatrixMarket, got {head[:40]!r}")
    if b"complex" in head.split(b"\n", 1)[0].lower():
        raise RatingsError(f"{path} holds complex values; ratings must be real (real, integer or pattern)")
    header = market_header(path, head)
    if header is not None:
        check_market_rows(path, header)
        needed = header.entries * (8 if header.layout == "array" else 16)
        way_out = "hybridmf.convert reads coordinates of general matrices in bounded memory"
        check_memory(f"{path} has {header.entries:,} entries by its header: to hold them", needed, way_out)
    try:
        with reading(path), open_bytes(path) as stream:
            return _mmread(stream), {}
    except RatingsError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise RatingsError(f"{path} cannot be read as MatrixMarket: {error}") from error


def _mmread(stream: Any) -> Any:
    """`scipy.io.mmread` whose errors keep no reader: it seeks when destroyed, fatally once the stream is closed."""
    import scipy.io  # here: it takes a tenth of the time to import all modules of a fit

    try:
        return scipy.io.mmread(stream, spmatrix=False)
    except Exception as error:
        problem = error.with_traceback(None)
    raise problem


def file_columns(path: str, options: FileOptions) -> Columns | None:
    """Columns that `Ratings.from_file` uses with these options, by the first lines; None for files without columns."""
    head, format = options.detect(path)
    if format == "parquet":
        with _parquet(path) as file:
            return _resolved(path, file, options)[0]
    if format == "jsonl":
        names = _json_lines(path).column_names
        return resolve_columns(path, names, len(names), *options.selectors, by_place=False)
    return None if format in ("npz", "mtx", "lists") else find_layout(path, head, options).columns
