"""Data frames, Parquet, .npz and MatrixMarket: triplets with labels from tables, matrices from the others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.io
import scipy.sparse as sp

from ..core.files import open_bytes, reading
from ..core.system import available_memory
from ..core.validate import ROW_BYTES
from ..errors import DuplicateEntriesError, MemoryBudgetError, RatingsError
from .labels import MAX_VALUE, Entries, factorize
from .text import select_columns

Labels = dict[str, np.ndarray]
"""``user_ids`` and ``item_ids``, as far as a file has them."""


def frame_entries(frame: Any, source: str, user: Any, item: Any, value: Any) -> Entries:
    """Entries of any frame narwhals knows; `source` is what messages call it. See `Ratings.from_frame`."""
    import narwhals as nw

    try:
        table = nw.from_native(frame)
    except TypeError as error:
        raise TypeError(
            f"frame must be a pandas, polars or pyarrow table, got {type(frame).__name__}; "
            "matrices go through Ratings.from_matrix, arrays through Ratings.from_coo"
        ) from error
    names = table.collect_schema().names()
    if value == "rating" and value not in names and len(names) == 2:
        value = None
    wanted = {"user": user, "item": item} | ({} if value is None else {"value": value})
    _check_columns(source, wanted, names)
    table = table.select(*wanted.values())
    eager = table.collect() if isinstance(table, nw.LazyFrame) else table
    users, user_ids = factorize(f"column {user!r} of {source}", _frame_ids(source, eager, user), "row")
    items, item_ids = factorize(f"column {item!r} of {source}", _frame_ids(source, eager, item), "row")
    values = np.ones(len(users), np.float32) if value is None else _frame_values(source, eager, value)
    shape = (len(user_ids), len(item_ids))
    return Entries(users, items, values, user_ids, item_ids, shape, source, lambda a, b: f"rows {a} and {b}")


def _check_columns(source: str, wanted: dict[str, Any], names: list[Any]) -> None:
    for argument, column in wanted.items():
        if column not in names:
            hint = "; value=None makes every entry 1" if argument == "value" else ""
            raise RatingsError(
                f"{source} has no column {column!r} ({argument}={column!r}); its columns are "
                f"{', '.join(map(repr, names))}{hint}"
            )
    if len(set(wanted.values())) < len(wanted):
        named = ", ".join(f"{argument}={column!r}" for argument, column in wanted.items())
        raise ValueError(f"user, item and value must be different columns, got {named}")


def _frame_column(source: str, table: Any, column: Any, first_row: int = 0) -> Any:
    series = table.get_column(column)
    if series.null_count():
        row = first_row + int(np.flatnonzero(series.is_null().to_numpy())[0])
        raise RatingsError(f"column {column!r} of {source} is null at row {row}; remove or fill such rows")
    return series


def _frame_ids(source: str, table: Any, column: Any, first_row: int = 0) -> np.ndarray | list[Any]:
    series = _frame_column(source, table, column, first_row)
    # As a list, strings cost what they are long; a NumPy array pads each one to the longest.
    return series.to_numpy() if series.dtype.is_integer() else series.to_list()


def _frame_values(source: str, table: Any, column: Any, first_row: int = 0) -> np.ndarray:
    given = _frame_column(source, table, column, first_row).to_numpy()
    try:
        if given.dtype.kind not in "fiubO":
            raise TypeError(f"its dtype is {given.dtype}")
        values = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"column {column!r} of {source} holds no real numbers ({error})") from error
    bad = np.flatnonzero(~(np.abs(values) <= MAX_VALUE))
    if bad.size:
        raise RatingsError(
            f"column {column!r} of {source} has the value {values[bad[0]]} at row {first_row + bad[0]}; values must be "
            "finite float32 numbers: remove or replace such rows"
        )
    return values


def read_parquet(path: str, user: int | str, item: int | str, value: int | str | None) -> Entries:
    """Entries of a Parquet file, of which only the named columns are read."""
    with _parquet(path) as file:
        selected = _parquet_columns(path, file, (user, item, value))
        table = file.read(columns=[name for name in selected if name is not None])
    return frame_entries(table, path, *selected)


def parquet_chunks(
    path: str, user: int | str, item: int | str, value: int | str | None, rows: int
) -> Iterator[tuple[np.ndarray | list[Any], np.ndarray | list[Any], np.ndarray]]:
    """Ids (integers as an array, others as a list) and values of some rows of a Parquet file after others."""
    import narwhals as nw
    import pyarrow as pa

    with _parquet(path) as file:
        user, item, value = _parquet_columns(path, file, (user, item, value))
        first = 0
        for batch in file.iter_batches(rows, columns=[name for name in (user, item, value) if name is not None]):
            table = nw.from_native(pa.Table.from_batches([batch]), eager_only=True)
            users, items = (_frame_ids(path, table, column, first) for column in (user, item))
            values = np.ones(len(table)) if value is None else _frame_values(path, table, value, first)
            yield users, items, values
            first += len(table)


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[Any]:
    """The open file; what pyarrow has to say of it in our words."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow, which reads Parquet: pip install pyarrow") from error
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise RatingsError(f"{path} cannot be read as Parquet ({error}); it is damaged or another format") from error


def _parquet_columns(path: str, file: Any, columns: tuple[Any, Any, Any]) -> list[Any]:
    names = file.schema_arrow.names
    return [None if k is None else names[k] for k in select_columns(path, tuple(names), len(names), columns)]


def read_npz(path: str, head: bytes) -> tuple[Any, Labels]:
    """Matrix and labels of a file of `Ratings.save` or ``scipy.sparse.save_npz``; pickles are never loaded."""
    if not head.startswith(b"PK\x03\x04"):
        raise RatingsError(f"{path} is no .npz file (it starts with {head[:8]!r}); write one with Ratings.save")
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files
            ids = {name: archive[name] for name in ("user_ids", "item_ids") if name in names}
        matrix = sp.load_npz(path) if "format" in names else None
    except Exception as error:  # a damaged archive fails in zipfile, zlib, NumPy or SciPy, each in several ways
        raise RatingsError(f"{path} cannot be read as .npz ({error}); it is damaged or not one of ours") from error
    if matrix is None:
        raise RatingsError(
            f"{path} holds no sparse matrix but {', '.join(names[:5]) or 'nothing'}; expected a file of Ratings.save "
            "or scipy.sparse.save_npz (unpack other archives first)"
        )
    return matrix, ids


class MarketHeader(NamedTuple):
    """What a MatrixMarket file says of itself; an "array" has all its entries, row by column."""

    layout: str
    field: str
    symmetry: str
    n_rows: int
    n_columns: int
    entries: int


def market_header(path: str, head: bytes) -> MarketHeader | None:
    """First lines of a MatrixMarket file; None where they say too little for the sizes to be known.

    Raises
    ------
    RatingsError
        A negative size.
    """
    words = head.split(b"\n", 1)[0].decode("latin-1").lower().split()
    if len(words) != 5 or words[1] != "matrix" or words[2] not in ("coordinate", "array"):
        return None
    layout, field, symmetry = words[2:]
    try:
        sizes = _sizes_of(path)
        rows, columns, entries = sizes if layout == "coordinate" else [*sizes, math.prod(sizes)]
    except ValueError:
        return None
    if min(rows, columns, entries) < 0:
        raise RatingsError(f"{path} is damaged: its header says {rows} rows, {columns} columns, {entries} entries")
    return MarketHeader(layout, field, symmetry, rows, columns, entries)


def _sizes_of(path: str) -> list[int]:
    """Numbers of the first line of a MatrixMarket file that is neither comment nor blank."""
    with reading(path), open_bytes(path) as stream:
        lines = (line for line in stream if line.strip() and not line.lstrip().startswith(b"%"))
        return [int(word) for word in next(lines, b"").split()]


def check_market_rows(path: str, header: MarketHeader) -> None:
    """Refuse a header whose rows and columns, though empty, are too many to be counted in memory.

    Raises
    ------
    MemoryBudgetError
    """
    _check_memory(
        path, f"{header.n_rows:,} rows and {header.n_columns:,} columns", "count their entries",
        ROW_BYTES * (header.n_rows + header.n_columns), "number users and items anew, without gaps",
    )  # fmt: skip


def _check_memory(path: str, what: str, work: str, needed: int, way_out: str) -> None:
    free = available_memory()
    if free is not None and needed > free:
        raise MemoryBudgetError(
            f"{path} has {what} by its header: to {work} takes {needed / 2**20:,.0f} MiB of memory and "
            f"{free / 2**20:,.0f} MiB are free; {way_out}"
        )


def read_matrix_market(path: str, head: bytes) -> tuple[Any, Labels]:
    """Matrix of a MatrixMarket file, which has no labels."""
    if not head.startswith(b"%%MatrixMarket"):
        raise RatingsError(f"{path} is no MatrixMarket file: line 1 must start with %%MatrixMarket, got {head[:40]!r}")
    if b"complex" in head.split(b"\n", 1)[0].lower():
        raise RatingsError(f"{path} holds complex values; ratings must be real (real, integer or pattern)")
    header = market_header(path, head)
    if header is not None:
        check_market_rows(path, header)
        needed = header.entries * (8 if header.layout == "array" else 16)
        way_out = "hybridmf.convert reads coordinates of general matrices in bounded memory"
        _check_memory(path, f"{header.entries:,} entries", "hold them", needed, way_out)
    try:
        with reading(path), open_bytes(path) as stream:
            return _mmread(stream), {}
    except RatingsError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise RatingsError(f"{path} cannot be read as MatrixMarket: {error}") from error


def _mmread(stream: Any) -> Any:
    """`scipy.io.mmread` whose errors hold on to nothing.

    Its reader goes back in the stream when it is destroyed, and ends the process if the stream is closed by then.
    """
    try:
        return scipy.io.mmread(stream)
    except Exception as error:
        problem = error.with_traceback(None)
    raise problem


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Put the path in front of what the block has to say of a matrix that was read from it."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = DuplicateEntriesError if isinstance(error, DuplicateEntriesError) else RatingsError
        raise kind(f"{path}: {error}") from error
