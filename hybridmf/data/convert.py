"""Convert ratings of any size to a `Store` in bounded memory: an external bucket sort, first by user, then by item.

    source ──chunks──> work/users.bin, ... ──positions──> work/user-K.bin ──sort, merge──> user slabs
       labels in memory      (raw ids)                     (16 bytes an entry)                  │
                                                           work/item-K.bin <────────────────────┘
                                                                └──sort──> item slabs ──> manifest.json

The manifest is written last: a folder without it is no store, and a conversion that was killed starts again. Slabs,
labels and values equal those of `Ratings.from_file`; repeated pairs are merged in input order. Ratings in memory and
other stores have both orientations, which are cut into slabs as they are.

A database does not keep the memory limit. 20 million lines of 340 MB, two cores, peak of the process: this file takes
9 s and 0.8 GB at a limit of 1 GiB, and 0.15 GB at 64 MiB. DuckDB 2.0 takes 11 s and 1.3 GB at 1 GB, 0.7 GB at 256 MB,
and fails at 64 MB; polars 2.1 (streaming) takes 27 s and 1.4 GB, whatever the limit.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.files import ABANDONED, TEMPORARY, lock, open_bytes, reading, remove_orphans, write_atomically
from ..core.objective import SIDES, Side
from ..core.sparse import ValueSummary, entry_rows, stacked, transposed, without_zeros
from ..core.system import parse_bytes
from ..core.validate import MAX_AXIS, as_csr, check_bool, check_path, from_triplets, make_csr, repeats
from ..errors import DuplicateEntriesError, RatingsError
from ..ratings import Ratings
from . import arrow_text
from .columns import log_columns
from .labels import (
    are_missing,
    duplicate_error,
    encode_labels,
    factorize_objects,
    first_lost,
    first_repeat,
    label_of,
    missing_error,
    note_copies,
    note_dropped,
    whole_repeats,
)
from .layout import Chunk, FileOptions, TextLayout
from .lines import line_blocks
from .lists import BLOCK_ENTRIES, lines_of_lists, list_chunks, list_options
from .manifest import ARRAYS, FORMAT, MANIFEST, VERSION, degrees_file, seal, slab_file
from .readers import MarketHeader, check_market_rows, file_columns, market_header, parquet_chunks, part_paths
from .slabs import InMemory, Orientation, slab_bounds
from .store import UNFINISHED, Store, StoreMatrix, file_checksum
from .text import (
    BLOCK_CHARS,
    MANY_LARGE,
    find_layout,
    large_integers,
    lines_of,
    record_chunks,
    refuse_ids_as_values,
    sorted_labels,
)

logger = logging.getLogger("hybridmf")

WORK = "work"
RAW = ("users", "items", "values")  # names of the files of raw ids and values

ENTRY = np.dtype([("row", "<i4"), ("column", "<i4"), ("value", "<f8")])
CHUNK_BYTES = 128  # memory per entry of a chunk while it is mapped and put into its bucket
SORT_BYTES = 112  # memory per entry of a bucket while it is sorted

_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY)}.*\.tmp")  # left by a killed `write_atomically`
_OURS = re.compile(
    r"(user|item)-(\d{6,}\.(indptr|indices|values)|degrees|degrees-nonzero)\.npy|(user|item)_ids\.npy"
    rf"|manifest\.json|unfinished\.json|{_TEMPORARY.pattern}"
)


def convert(
    source: Any,
    path: str | os.PathLike[str],
    *,
    slab_bytes: int | str = "64MiB",
    memory_limit: int | str = "1GiB",
    overwrite: bool = False,
    format: str = "auto",
    separator: str | None = None,
    header: bool | str = "auto",
    user: int | str = "auto",
    item: int | str = "auto",
    value: int | str | None = "auto",
    duplicates: str = "error",
    encoding: str | None = None,
    comment: str | None = "#",
    quote: str | None = "auto",
    escape: str | None = None,
    missing: str = "error",
) -> Store:
    """Write ratings as a store, which a fit can read without holding it in memory.

    Delimited text, MatrixMarket (general coordinates) and Parquet files, and other stores, may be larger than memory:
    labels are held, entries are not. Other files, and matrices, are in memory as a whole. A conversion needs up to 48
    bytes of disk per entry; the complete store takes 16. After a kill, the same call starts again.

    Parameters
    ----------
    source : path-like, list of these, Store, Ratings, or sparse or dense matrix of shape (n_users, n_items)
        The path of a file, or of the folder of a store. The files of a list, a pattern or a folder of Parquet files
        become one store; they are read into memory.
    path : path-like
        Folder of the store; created if it does not exist.
    slab_bytes : int or str
        Size of a slab, such as "64MiB"; a fit holds a few slabs in memory at a time. A single row with more
        entries is a slab of its own.
    memory_limit : int or str
        Memory for entries during the conversion, in addition to the labels; at least 1 MiB. Slabs are made smaller if
        sorting them would exceed it.
    overwrite : bool
        Replace an existing store, which is removed first; otherwise an existing store is an error.
    format, separator, header, user, item, value, duplicates, encoding, comment, quote, escape, missing
        Options for reading a file, as for `Ratings.from_file`; `duplicates` also applies to matrices.

    Raises
    ------
    RatingsError, DuplicateEntriesError, TypeError
        As for `Ratings.from_file`; no files remain.
    FileExistsError
        The folder is not empty, or holds a store and `overwrite` is False.
    BlockingIOError
        Another conversion into the folder is running; it continues undisturbed.
    OSError
        For example, the disk is full; no files remain.
    """
    options = FileOptions(
        format, separator, header, user, item, value, duplicates, encoding, comment, quote, escape, missing
    )
    limit = max(parse_bytes("memory_limit", memory_limit), 1 << 20)
    entries = max(1, min(parse_bytes("slab_bytes", slab_bytes) // 8, limit // SORT_BYTES))
    paths = source if isinstance(source, (list, tuple)) else [source]
    if all(isinstance(each, (str, os.PathLike)) for each in paths):
        if part_paths(source) is not None:
            source = Ratings.from_file(source, **vars(options))
        else:
            source = Store.open(source) if os.path.isdir(source) else os.fsdecode(source)
    folder = _Folder(Path(check_path("path", path)))
    if isinstance(source, Store) and folder.path.exists() and folder.path.samefile(source.path):  # not yet removed
        raise ValueError(
            f"path {str(folder.path)!r} is the store that is converted; give another folder, or convert "
            "source.to_ratings()"
        )
    with folder.alone():
        folder.check_target(check_bool("overwrite", overwrite))
        readers = _readers_of(source, options, limit)  # and faults of the source, before the old store is removed
        whole = _whole(source, options) if readers is None else None
        with folder.filling():
            if readers is not None:
                _Streamed(folder, readers, duplicates, entries, max(1, limit // CHUNK_BYTES)).run()
            else:
                assert whole is not None
                _cut(whole, folder, entries)
    return Store.open(path)


def _whole(source: Any, options: FileOptions) -> Ratings | Store:
    """A source that has both orientations, or can have them in memory."""
    if isinstance(source, Store):
        return source
    if isinstance(source, Ratings):
        if source.weights is not None:
            raise RatingsError(
                "source has weights of entries, which stores do not hold; source.with_weights(None) leaves them out"
            )
        return source
    if isinstance(source, str):
        return Ratings.from_file(source, **vars(options))
    return Ratings.from_matrix(source, duplicates=options.duplicates)


# ---------------------------------------------------------------------------------------------------- the folder

_write = functools.partial(write_atomically, clean=False)
"""`write_atomically` without cleaning: `_Folder.alone` has cleaned the folder once, since listing it per file is
slow."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error codes of a full disk, an exhausted quota, and a file that is too large."""


class _Folder:
    """A folder that becomes a store."""

    def __init__(self, path: Path) -> None:
        self.path, self.work = path, path / WORK
        self.files: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Create the folder and lock it against other conversions until this one ends; remove it if it stays empty."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise FileExistsError(errno.EEXIST, "a store is a folder, and there is a file of that name", str(path))
        made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
        try:
            try:
                locked = lock(handle)
            except BlockingIOError:
                text = "another conversion into this folder is running; wait for it, or give another folder"
                raise BlockingIOError(errno.EWOULDBLOCK, text, str(path)) from None
            # one conversion at a time uses this folder, so an unlocked file has no owner on any host
            remove_orphans(path, abandoned=0.0 if locked else ABANDONED)
            yield
        finally:
            os.close(handle)
            with contextlib.suppress(OSError):  # it is a store now
                for each in made:
                    each.rmdir()

    def check_target(self, overwrite: bool) -> None:
        """Reject folders with other files, and a store that is not to be replaced."""
        path = self.path
        finished = (path / MANIFEST).exists()
        if finished and not overwrite:
            raise FileExistsError(
                errno.EEXIST,
                "there is a store already; pass overwrite=True (--overwrite), or give another folder",
                str(path),
            )
        ours = finished or (path / UNFINISHED).exists()
        names = sorted(entry.name for entry in path.iterdir() if not _TEMPORARY.fullmatch(entry.name))
        others = [name for name in names if not ours or (name != WORK and not _OURS.fullmatch(name))]
        if others:
            text = f"the folder holds other files ({others[0]}); give an empty one"
            raise FileExistsError(errno.EEXIST, text, str(path))
        if ours and not finished:
            logger.info("%s: removed an unfinished conversion", path)

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Remove files of previous conversions; after an error or Ctrl-C, those of this one."""
        replaces = (self.path / MANIFEST).exists()
        try:
            _write(self.path / UNFINISHED, b"{}")
            (self.path / MANIFEST).unlink(missing_ok=True)  # first: without a manifest, the folder is no store
            self._remove(keep=(UNFINISHED,))
            self.work.mkdir()
            yield
        except BaseException as error:
            if replaces:
                said = "%s: the old store is gone: overwrite=True removed it before this conversion, which failed"
                logger.warning(said, self.path)
            self._remove()
            if isinstance(error, OSError) and error.errno in FULL:
                why = "" if error.errno == errno.ENOSPC else f" for you ({os.strerror(error.errno)})"
                text = f"the disk is full{why}; a conversion needs up to 48 bytes an entry while it works. "
                raise OSError(error.errno, f"{text}Nothing was left", str(self.path)) from error
            raise

    def _remove(self, keep: tuple[str, ...] = ()) -> None:
        if not self.path.exists():
            return
        shutil.rmtree(self.work, ignore_errors=True)
        for entry in list(self.path.iterdir()):
            if _OURS.fullmatch(entry.name) and entry.name not in keep:
                entry.unlink(missing_ok=True)

    def save(self, name: str, array: np.ndarray) -> None:
        """Write an array as a whole or not at all, and keep its checksum."""
        path = self.path / name
        _write(path, lambda file: np.save(file, array, allow_pickle=False))
        self.files[name] = {"bytes": path.stat().st_size, "crc32": file_checksum(path)}

    def save_slab(self, side: Side, slab: int, matrix: sp.csr_array) -> None:
        arrays = {"indptr": matrix.indptr, "indices": matrix.indices, "values": matrix.data}
        for name, dtype in ARRAYS.items():
            self.save(slab_file(side, slab, name), arrays[name].astype(dtype, copy=False))

    def slab(self, side: Side, slab: int, n_fixed: int) -> sp.csr_array:
        indptr, indices, values = (np.load(self.path / slab_file(side, slab, name)) for name in ARRAYS)
        return make_csr(indptr, indices, values, (len(indptr) - 1, n_fixed))

    def finish(self, manifest: dict[str, Any]) -> None:
        manifest = {"format": FORMAT, "version": VERSION, "dtype": "float32"} | manifest | {"files": self.files}
        manifest["checksum"] = seal(json.loads(json.dumps(manifest)))
        shutil.rmtree(self.work, ignore_errors=True)
        _write(self.path / MANIFEST, json.dumps(manifest, indent=1).encode())
        (self.path / UNFINISHED).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- cutting


def _cut(source: Ratings | Store, folder: _Folder, entries: int) -> None:
    """Write both orientations of ratings in memory, or of another store, in slabs of this many entries."""
    sides: dict[Side, Orientation]
    if isinstance(source, Store):
        sides = {side: StoreMatrix(source, side) for side in SIDES}
    else:
        matrix = as_csr(source)
        sides = {"user": InMemory(matrix), "item": InMemory(transposed(matrix))}
    _save_labels(folder, source.user_ids, source.item_ids)
    bounds = {side: slab_bounds(sides[side].degrees, entries) for side in SIDES}
    for side in SIDES:
        for k, (first, last) in enumerate(pairwise(bounds[side].tolist())):
            folder.save_slab(side, k, stacked(list(sides[side].rows(first, last))))
    _finish(folder, source.shape, bounds)


def _save_labels(folder: _Folder, user_ids: np.ndarray | None, item_ids: np.ndarray | None) -> None:
    for name, labels in (("user_ids", user_ids), ("item_ids", item_ids)):
        if labels is not None:
            folder.save(f"{name}.npy", encode_labels(name, labels))


def _finish(folder: _Folder, shape: tuple[int, int], bounds: dict[Side, np.ndarray]) -> None:
    """Write degrees and the manifest, from the slabs of users."""
    degrees = {side: np.zeros((2, count), np.int64) for side, count in zip(SIDES, shape, strict=True)}
    for k, (first, last) in enumerate(pairwise(bounds["user"].tolist())):
        slab = folder.slab("user", k, shape[1])
        for kind, part in enumerate((slab, without_zeros(slab))):
            degrees["user"][kind, first:last] = np.diff(part.indptr)
            degrees["item"][kind] += np.bincount(part.indices, minlength=shape[1])
    nnz, nonzero = map(int, degrees["user"].sum(axis=1))
    for side in SIDES:
        folder.save(degrees_file(side), degrees[side][0])
        if nonzero < nnz:
            folder.save(degrees_file(side, nonzero=True), degrees[side][1])
    files = [folder.path / slab_file("user", k, "values") for k in range(len(bounds["user"]) - 1)]
    values = {"all": ValueSummary.of(map(np.load, files))}
    values["nonzero"] = values["all"]
    if nonzero < nnz:
        values["nonzero"] = ValueSummary.of(part[part != 0] for part in map(np.load, files))
    folder.finish(
        {
            "shape": list(map(int, shape)),
            "nnz": nnz,
            "zeros": nnz - nonzero,
            "bounds": {side: bounds[side].tolist() for side in SIDES},
            "sums": {kind: each.total for kind, each in values.items()},
            "magnitudes": {kind: each.ends.tolist() for kind, each in values.items()},
            "range": values["all"].value_range,
        }
    )


# ---------------------------------------------------------------------------------------------------- readers

Resolved = tuple[np.ndarray | None, int, Callable[[np.ndarray], np.ndarray]]
"""Labels in order, if there are any, the number of positions, and the function from raw ids to positions."""


class _Codes:
    """Labels, whose raw ids are codes in the order of their first appearance."""

    dtype = np.dtype(np.int32)

    def __init__(self, sort: Callable[[np.ndarray, list[Any]], tuple[np.ndarray, np.ndarray]] = sorted_labels) -> None:
        self.table: dict[Any, int] = {}
        self.sort = sort

    def raw(self, ids: np.ndarray | list[Any]) -> np.ndarray:
        """Codes of labels; of a reader that fills the table itself, its codes."""
        table = self.table
        if isinstance(ids, np.ndarray):
            return ids
        return np.fromiter((table.setdefault(label, len(table)) for label in ids), np.int32, len(ids))

    def resolve(self, used: np.ndarray | None) -> Resolved:
        """Positions of the codes of a mask (None: all), among their labels; -1 of the others."""
        labels = list(self.table)
        kept = np.arange(len(labels)) if used is None else np.flatnonzero(used)
        places, unique = self.sort(np.arange(len(kept)), [labels[code] for code in kept.tolist()])
        lookup = np.full(len(labels), -1, dtype=np.int32)
        lookup[kept] = places
        return unique, len(unique), lookup.__getitem__


class _Integers:
    """Integers that are labels, or `count` positions without labels; raw ids as they are."""

    def __init__(self, dtype: Any = np.int64, count: int | None = None) -> None:
        self.dtype, self.count = np.dtype(dtype), count
        self.known = np.empty(0, dtype=self.dtype)

    def raw(self, ids: np.ndarray) -> np.ndarray:
        """The ids; labels become known."""
        if self.count is not None:
            return ids
        ids = ids.astype(self.dtype, copy=False)
        found = _distinct(ids)
        known = self.known if len(self.known) else found[:1]
        places = np.searchsorted(known, found)
        fresh = known.take(places, mode="clip") != found  # sorting all again would take longer for each chunk
        self.known = np.insert(known, places[fresh], found[fresh]) if fresh.any() else known
        return ids

    def resolve(self, used: None) -> Resolved:
        if self.count is not None:
            return None, self.count, lambda ids: ids
        known = self.known
        low, high = (int(known[0]), int(known[-1])) if len(known) else (0, 0)
        labels = known.astype(np.int64) if high <= np.iinfo(np.int64).max else known
        if high - low >= 4 * len(known) + 2**16:
            return labels, len(labels), lambda ids: np.searchsorted(known, ids).astype(np.int32)
        table = np.zeros(high - low + 1, dtype=np.int32)
        table[known - known[:1]] = np.arange(len(known), dtype=np.int32)
        return labels, len(labels), lambda ids: table[ids - known[0]]


def _distinct(ids: np.ndarray) -> np.ndarray:
    """Sorted distinct integers of a chunk; np.unique hashes them, which takes ten times as long."""
    low, high = int(ids.min()), int(ids.max())
    if high - low < 4 * len(ids) + 2**16:
        present = np.zeros(high - low + 1, dtype=bool)
        present[ids - ids.dtype.type(low)] = True
        return np.flatnonzero(present).astype(ids.dtype) + ids.dtype.type(low)
    ordered = np.sort(ids)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])]


@dataclass
class _Reader:
    """A source of chunks of ids and values, and the mapping of ids to positions."""

    chunks: Iterator[Any]  # of `Chunk`, ids of `_Codes` also as lists; None: this reader does not support the source
    sides: tuple[Any, Any]  # `_Codes` or `_Integers` of users and of items
    where: Callable[[int, int], str]  # where two entries are in the source
    source: str  # for messages
    valued: bool = False  # the source has values: rows that repeat whole are copies
    missing: str = "keep"  # what to do with labels that are `MISSING_WORDS`
    labelled: bool = True  # ids are labels, not positions


def _readers_of(source: Any, options: FileOptions, limit: int) -> Iterator[_Reader] | None:
    """Readers in chunks, to try one after the other; None for sources that are not read in chunks."""
    if not isinstance(source, str):
        return None
    path, (head, format) = source, options.detect(source)
    if format in ("npz", "jsonl"):
        return None
    if format == "mtx":
        header = market_header(path, head)
        return iter([_matrix_market(path, header, limit)]) if header is not None and _streamable(header) else None
    if format == "parquet":
        return iter([_parquet(path, options, max(1, limit // 256))])
    if format == "lists":
        options = list_options(path, head, options)
        users, items = _Codes(), _Codes()
        chunks = list_chunks(path, options, users.table, items.table, max(1, min(BLOCK_ENTRIES, limit // 256)))
        where = functools.partial(lines_of_lists, path, options)
        return iter([_Reader(chunks, (users, items), where, path, missing=options.missing)])
    found = find_layout(path, head, options)
    log_columns(path, found.columns)
    return _text_readers(found, limit)


def _text_readers(layout: TextLayout, limit: int) -> Iterator[_Reader]:
    """Readers to try one after the other; the last one reads any text, or raises the error."""
    where, valued = functools.partial(lines_of, layout), layout.value is not None
    blocks = min(BLOCK_CHARS, limit // 64)
    makers: list[Any] = [functools.partial(record_chunks, layout, size=blocks)]
    if limit >= arrow_text.MEMORY:
        size = min(arrow_text.BLOCK_BYTES, limit // 32)
        makers.insert(0, functools.partial(arrow_text.chunks, layout, size=size))
        if layout.integer_ids:
            chunks = _checked_values(arrow_text.chunks(layout, size=size), layout)
            yield _Reader(chunks, (_Integers(), _Integers()), where, layout.path, valued)
    for make in makers:
        users, items = _Codes(), _Codes()
        chunks = _checked_values(make(users.table, items.table), layout)
        yield _Reader(chunks, (users, items), where, layout.path, valued, layout.options.missing)


def _checked_values(chunks: Iterator[Any], layout: TextLayout) -> Iterator[Any]:
    """The same chunks, whose values must not be ids; see `refuse_ids_as_values`."""
    large = np.empty(0)
    for chunk in chunks:
        if chunk is not None:
            large = np.union1d(large, large_integers(chunk[2]))[: MANY_LARGE + 1]
            refuse_ids_as_values(layout, large)
        yield chunk


def _parquet(path: str, options: FileOptions, rows: int) -> _Reader:
    def sort(codes: np.ndarray, labels: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        positions, unique = factorize_objects(f"a column of {path}", labels, "row")
        return positions[codes], unique

    chunks = parquet_chunks(path, options, rows)
    first = next(chunks, None)
    if first is None:
        raise RatingsError(f"{path} holds no ratings")
    users, items = (
        _Codes(sort) if isinstance(ids, list) else _Integers(np.uint64 if ids.dtype == np.uint64 else np.int64)
        for ids in first[:2]
    )
    columns = file_columns(path, options)
    valued = columns is not None and columns.value is not None
    return _Reader(itertools.chain([first], chunks), (users, items), "rows {} and {}".format, path, valued)


def _streamable(header: MarketHeader) -> bool:
    """Whether a MatrixMarket file is a general matrix of real coordinates; SciPy has to read others."""
    return (
        (header.layout, header.symmetry) == ("coordinate", "general")
        and header.field in ("real", "integer", "pattern", "double", "unsigned-integer")
        and max(header.n_rows, header.n_columns) <= MAX_AXIS
    )


def _matrix_market(path: str, header: MarketHeader, limit: int) -> _Reader:
    kind, n_rows, n_columns, count = header.field, header.n_rows, header.n_columns, header.entries
    check_market_rows(path, header)
    fields = [("row", np.int64), ("column", np.int64)] + ([] if kind == "pattern" else [("value", np.float64)])

    def chunks() -> Iterator[Chunk]:
        done, sized = 0, False
        with reading(path), io.TextIOWrapper(open_bytes(path), encoding="latin-1") as stream:
            for _, block in line_blocks(stream, path, min(BLOCK_CHARS, limit // 32)):
                lines = [line for line in block.split("\n") if line.strip() and not line.lstrip().startswith("%")]
                if lines and not sized:
                    lines, sized = lines[1:], True
                if not lines:
                    continue
                try:
                    table = np.loadtxt(lines, dtype=fields, comments=None, ndmin=1)
                except ValueError as error:
                    text = f"{path} cannot be read as MatrixMarket: after entry {done}: {error}"
                    raise RatingsError(text) from error
                _check_coordinates(path, table, (n_rows, n_columns), done)
                done += len(table)
                values = np.ones(len(table)) if kind == "pattern" else table["value"]
                yield (table["row"] - 1).astype(np.int32), (table["column"] - 1).astype(np.int32), values
        if done != count:
            raise RatingsError(f"{path} is truncated or damaged: it has {done} entries and its header says {count}")

    sides = (_Integers(np.int32, n_rows), _Integers(np.int32, n_columns))
    return _Reader(chunks(), sides, "entries {} and {}".format, path, labelled=False)


def _check_coordinates(path: str, table: np.ndarray, shape: tuple[int, int], done: int) -> None:
    for name, count in zip(("row", "column"), shape, strict=True):
        bad = np.flatnonzero((table[name] < 1) | (table[name] > count))
        if bad.size:
            raise RatingsError(
                f"{path}: entry {done + int(bad[0])} has the {name} {table[name][bad[0]]}; expected 1 to {count}"
            )
    if "value" in (table.dtype.names or ()):
        bad = np.flatnonzero(~np.isfinite(table["value"]))
        if bad.size:
            raise RatingsError(
                f"{path}: entry {done + int(bad[0])} has the value {table['value'][bad[0]]}; values must be finite: "
                "remove or replace such entries"
            )


# ---------------------------------------------------------------------------------------------------- streaming


class _Streamed:
    """A conversion with up to `chunk` entries of the source, or `entries` of a slab, in memory."""

    def __init__(self, folder: _Folder, readers: Iterator[_Reader], duplicates: str, entries: int, chunk: int) -> None:
        self.folder, self.work, self.readers = folder, folder.work, readers
        self.duplicates, self.entries, self.chunk = duplicates, entries, chunk
        self.reader: _Reader
        self.count = 0  # entries of the source
        self.positions: list[Callable[[np.ndarray], np.ndarray]]  # of users and items, from raw ids
        self.labels: list[np.ndarray | None]
        self.shape: tuple[int, int]
        self.bounds: dict[Side, np.ndarray] = {}

    def run(self) -> None:
        self._read()
        used = (None, None) if self.reader.missing == "keep" else self._used()
        resolved = [side.resolve(mask) for side, mask in zip(self.reader.sides, used, strict=True)]
        self.labels, (n_users, n_items), self.positions = (list(each) for each in zip(*resolved, strict=True))
        self.shape = n_users, n_items
        _save_labels(self.folder, *self.labels)
        self._sort("user", self._source_entries)
        for name in RAW:
            (self.work / f"{name}.bin").unlink()
        self._sort("item", self._stored_entries)
        _finish(self.folder, self.shape, self.bounds)

    # ------------------------------------------------------------------------------------------------ raw ids

    def _read(self) -> None:
        """Write all chunks of the source as raw files, by the first reader that supports it."""
        while not self._write_raw(next(self.readers)):
            pass
        if not self.count and self.reader.labelled:
            raise RatingsError(f"{self.reader.source} holds no ratings, only a header")

    def _write_raw(self, reader: _Reader) -> bool:
        """Write the chunks of a reader; whether it supports the source."""
        self.reader, self.count = reader, 0
        with contextlib.ExitStack() as stack:
            *sides, values = (stack.enter_context(open(self.work / f"{name}.bin", "wb")) for name in RAW)
            for part in reader.chunks:
                if part is None:
                    return False
                for side, ids, file in zip(reader.sides, part, sides, strict=False):
                    file.write(np.ascontiguousarray(side.raw(ids), dtype=side.dtype).data)
                values.write(np.ascontiguousarray(part[2], dtype=np.float64).data)
                self.count += len(part[2])
        return True

    def _used(self) -> Sequence[np.ndarray | None]:
        """Codes with entries that have both ids, as masks; refuses the others under missing="error"."""
        tables = [list(side.table) for side in self.reader.sides]
        absent = [are_missing(np.array(table, dtype=object)) for table in tables]
        used, count = [np.zeros_like(each) for each in absent], 0
        for start, length in self._spans() if any(map(np.any, absent)) else ():
            codes = [self._raw(side, start, length) for side in (0, 1)]
            lost = [each[found] for each, found in zip(absent, codes, strict=True)]
            gone = lost[0] | lost[1]
            if not count and gone.any():
                at, side = first_lost(*lost)
                first = start + at, side, tables[side][codes[side][at]]
            count += int(np.count_nonzero(gone))
            for mask, found in zip(used, codes, strict=True):
                mask[found[~gone]] = True
        if not count:
            return None, None
        if self.reader.missing == "error":
            at, side, label = first
            raise missing_error(self.reader.source, self.reader.where(at, at), SIDES[side], label, count, self.count)
        note_dropped(self.reader.source, count, self.count)
        return used

    def _spans(self) -> Iterator[tuple[int, int]]:
        """(start, length) of consecutive entries of the source."""
        return ((start, min(self.chunk, self.count - start)) for start in range(0, self.count, self.chunk))

    def _raw(self, side: int, start: int, count: int) -> np.ndarray:
        dtype = self.reader.sides[side].dtype
        return np.fromfile(self.work / f"{RAW[side]}.bin", dtype, count, offset=start * dtype.itemsize)

    def _source_entries(self) -> Iterator[np.ndarray]:
        """Entries of the source by user, in chunks of `ENTRY`, without those left out."""
        for start, count in self._spans():
            part = np.empty(count, dtype=ENTRY)
            part["row"], part["column"] = (self.positions[side](self._raw(side, start, count)) for side in (0, 1))
            part["value"] = np.fromfile(self.work / "values.bin", np.float64, count, offset=8 * start)
            kept = (part["row"] >= 0) & (part["column"] >= 0)
            yield part if kept.all() else part[kept]

    def _stored_entries(self) -> Iterator[np.ndarray]:
        """Entries of the slabs of users by item, in `ENTRY`."""
        for k, first in enumerate(self.bounds["user"][:-1].tolist()):
            slab = self.folder.slab("user", k, self.shape[1])
            part = np.empty(slab.nnz, dtype=ENTRY)
            part["row"], part["column"], part["value"] = slab.indices, entry_rows(slab) + first, slab.data
            yield part

    # ------------------------------------------------------------------------------------------------ slabs

    def _sort(self, side: Side, entries: Callable[[], Iterator[np.ndarray]]) -> None:
        """Scatter entries to a bucket for each slab of a side, in input order, and sort each bucket into its slab."""
        count, n_fixed = self.shape if side == "user" else self.shape[::-1]
        degrees = np.zeros(count, dtype=np.int64)
        for part in entries():
            degrees += np.bincount(part["row"], minlength=count)
        bounds = self.bounds[side] = slab_bounds(degrees, self.entries)
        for part in entries():
            _scatter(self.work, side, bounds, part)
        for k, (first, last) in enumerate(pairwise(bounds.tolist())):
            bucket = _bucket(self.work, side, k)
            part = np.fromfile(bucket, ENTRY) if bucket.exists() else np.empty(0, ENTRY)
            rows, columns, values = (np.ascontiguousarray(part[name]) for name in ("row", "column", "value"))
            del part
            self.folder.save_slab(side, k, self._matrix(rows, columns, values, (last - first, n_fixed), first))
            bucket.unlink(missing_ok=True)

    def _matrix(
        self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int], first: int
    ) -> sp.csr_array:
        """The matrix of a bucket without rows that repeat others whole; see `Entries.without_copies`."""
        try:
            return from_triplets(rows - first, columns, values, shape, duplicates=self.duplicates)
        except DuplicateEntriesError:
            pass
        except RatingsError as error:
            raise RatingsError(f"of the users from position {first} on: {error}") from error
        if not self.reader.valued or not self._differ:
            raise self._duplicate_error(rows, columns, values)
        copies = whole_repeats(rows, columns, values)
        kept = [each[~copies] for each in (rows, columns, values)]
        try:
            matrix = from_triplets(kept[0] - first, kept[1], kept[2], shape)
        except DuplicateEntriesError:
            raise self._duplicate_error(*kept) from None
        note_copies(str(self.folder.path), int(np.count_nonzero(copies)))
        return matrix

    @property
    def _differ(self) -> bool:
        values = np.memmap(self.work / "values.bin", np.float64, "r")
        return bool(values.min() != values.max())

    def _duplicate_error(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> DuplicateEntriesError:
        """Error that names the first repeated pair of a bucket, and its locations in the source."""
        one, other = first_repeat(rows, columns)
        pair = int(rows[one]), int(columns[one])
        first, *others = self._places(*pair)
        again = others[0]
        if self.reader.valued:  # rather one with another value
            given = np.memmap(self.work / "values.bin", np.float64, "r")
            again = next((place for place in others if given[place] != given[first]), again)
        user, item = (label_of(labels, place) for labels, place in zip(self.labels, pair, strict=True))
        source, where = self.reader.source, self.reader.where(first, again)
        return duplicate_error(source, user, item, where, values[[one, other]], self._repeats(), not self._differ)

    def _places(self, row: int, column: int) -> list[int]:
        """Numbers of the entries of a pair in the source."""
        found: list[int] = []
        for start, count in self._spans():
            rows, columns = (self.positions[side](self._raw(side, start, count)) for side in (0, 1))
            found += (np.flatnonzero((rows == row) & (columns == column)) + start).tolist()
        return found

    def _repeats(self) -> np.ndarray:
        """`repeats` of the buckets of users that are left; those that have become slabs had none."""
        found = np.zeros(2, np.int64)
        for bucket in self.work.glob("user-*.bin"):
            part = np.fromfile(bucket, ENTRY)
            found += repeats(part["row"], part["column"], part["value"])
        return found


def _bucket(work: Path, side: Side, slab: int) -> Path:
    return work / f"{side}-{slab:06d}.bin"


def _scatter(work: Path, side: Side, bounds: np.ndarray, entries: np.ndarray) -> None:
    """Append entries to the buckets of their slabs, in input order."""
    slabs = np.searchsorted(bounds, entries["row"], side="right") - 1
    order = np.argsort(slabs, kind="stable")
    entries, slabs = entries[order], slabs[order]
    cuts = np.flatnonzero(np.diff(slabs)) + 1
    for start, stop in zip(np.append(0, cuts), np.append(cuts, len(slabs)), strict=True):
        if stop > start:
            with open(_bucket(work, side, int(slabs[start])), "ab") as file:
                file.write(entries[start:stop].data)
