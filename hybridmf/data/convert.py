"""Convert ratings of any size to a `Store` in bounded memory: an external bucket sort, first by user, then by item.

    source ──chunks──> work/*.bin ──positions──> work/user-K.bin ──sort, merge──> user slabs
       labels in memory   (raw ids)                (16 bytes an entry)                │
                                                   work/item-K.bin <──────────────────┘
                                                        └──sort──> item slabs ──> manifest.json

Each arrow is a stage; unfinished.json records the complete ones, so a killed conversion continues with the next stage
(and, within the sorting, with the next slab). The manifest is written last: a folder without it is no store. Slabs,
labels and values equal those of `Ratings.from_file`; repeated pairs are merged in input order.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy.sparse as sp

from ..core.files import (
    ABANDONED,
    FORMATS,
    TEMPORARY,
    lock,
    open_bytes,
    read_head,
    reading,
    remove_orphans,
    sniff_format,
    write_atomically,
)
from ..core.objective import SIDES, Side
from ..core.sparse import ValueSummary, entry_rows, transposed
from ..core.system import parse_bytes
from ..core.validate import (
    MERGE_RULES,
    Repeats,
    as_csr,
    check_bool,
    check_choice,
    check_path,
    csr_arrays,
    from_triplets,
    repeats,
)
from ..errors import DuplicateEntriesError, RatingsError
from ..ratings import Ratings
from . import arrow_text
from .columns import log_columns
from .labels import (
    MAX_POSITION,
    MISSING,
    decode_labels,
    duplicate_error,
    encode_labels,
    factorize_objects,
    first_repeat,
    label_of,
    note_copies,
    whole_repeats,
)
from .layout import TextLayout
from .lines import line_blocks
from .lists import ListLayout, lines_of_lists, list_chunks, list_layout
from .manifest import ARRAYS, FORMAT, MANIFEST, VERSION, degrees_file, seal, slab_file
from .readers import MarketHeader, check_market_rows, market_header, parquet_chunks, parquet_layout, part_paths
from .slabs import MemorySlabs, slab_bounds
from .store import UNFINISHED, Store, file_checksum
from .text import (
    BLOCK_CHARS,
    BLOCK_RECORDS,
    MANY_LARGE,
    TextOptions,
    find_layout,
    integer_chunks,
    large_integers,
    lines_of,
    record_chunks,
    refuse_ids_as_values,
    sorted_labels,
    text_separator,
    without_missing,
)

logger = logging.getLogger("hybridmf")

STAGES = ("begun", "read", "users in buckets", "users sorted", "items in buckets", "items sorted")
WORK = "work"
USER_ENTRY = np.dtype([("row", "<i4"), ("column", "<i4"), ("value", "<f8")])
ITEM_ENTRY = np.dtype([("row", "<i4"), ("column", "<i4"), ("value", "<f4")])
CHUNK_BYTES = 128
"""Memory per entry of a chunk while it is mapped and put into its bucket."""

SORT_BYTES = 112
"""Memory per entry of a bucket while it is sorted."""

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
    labels are held, entries are not. Other files, and matrices, are in memory as a whole. A killed conversion continues
    when it is called again with the same arguments. It needs up to 48 bytes of disk per entry; the complete store takes
    16.

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

    Returns
    -------
    Store

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
    check_choice("format", format, FORMATS)
    check_choice("duplicates", duplicates, MERGE_RULES)
    check_choice("header", header, ("auto", True, False))
    check_choice("missing", missing, MISSING)
    limit = max(parse_bytes("memory_limit", memory_limit), 1 << 20)
    entries = max(1, min(parse_bytes("slab_bytes", slab_bytes) // 8, limit // SORT_BYTES))
    options: dict[str, Any] = {
        "format": format, "separator": separator, "header": header, "user": user, "item": item, "value": value,
        "duplicates": duplicates, "encoding": encoding, "comment": comment, "quote": quote, "escape": escape,
        "missing": missing,
    }  # fmt: skip
    if isinstance(source, (str, os.PathLike)) or _is_list_of_paths(source):
        if part_paths(source) is not None:
            source = Ratings.from_file(source, **options)
        else:
            source = Store.open(source) if os.path.isdir(source) else os.fsdecode(source)
    folder = _Folder(Path(check_path("path", path)))
    _refuse_itself(source, folder.path)
    reader = _reader_of(source, options, limit)
    identity = None
    if reader is not None:
        identity = json.loads(json.dumps({"source": _identity(source), "slab_entries": entries, "options": options}))
    with folder.alone():
        resumes = folder.check_target(check_bool("overwrite", overwrite), identity)
        ratings = _in_memory(source, options) if reader is None else None  # before the old store is removed
        with folder.cleaning_up():
            if not resumes:
                folder.begin(identity)
            if reader is None:
                assert ratings is not None
                _convert_matrix(ratings, folder, entries)
            else:
                _Streamed(folder, reader, duplicates, entries, max(1, limit // CHUNK_BYTES)).run()
    return Store.open(path)


def _is_list_of_paths(source: Any) -> bool:
    return isinstance(source, (list, tuple)) and all(isinstance(each, (str, os.PathLike)) for each in source)


def _refuse_itself(source: Any, path: Path) -> None:
    """Raise if the store would replace its source: `overwrite` removes the old store before the source is read."""
    if isinstance(source, Store) and path.exists() and path.samefile(source.path):
        raise ValueError(
            f"path {str(path)!r} is the store that is converted; give another folder, or convert source.to_ratings()"
        )


def _identity(source: str | Store) -> list[Any]:
    """Identifies a file or store, and distinguishes it from an earlier state."""
    if isinstance(source, Store):
        return [os.path.abspath(source.path), source.checksum]
    found = os.stat(source)
    return [os.path.abspath(source), found.st_size, found.st_mtime_ns]


def _in_memory(source: Any, options: dict[str, Any]) -> Ratings:
    if isinstance(source, Ratings):
        return source
    if isinstance(source, str):
        return Ratings.from_file(source, **options)
    return Ratings.from_matrix(source, duplicates=options["duplicates"])


# ---------------------------------------------------------------------------------------------------- the folder

_write = functools.partial(write_atomically, clean=False)
"""`write_atomically` without cleaning: `_Folder.alone` has cleaned the folder once, since listing it per file is
slow."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error codes of a full disk, an exhausted quota, and a file that is too large."""


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the end of the context or process; yields whether the system supports that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            locked = lock(handle)
        except BlockingIOError:
            text = "another conversion into this folder is running; wait for it, or give another folder"
            raise BlockingIOError(errno.EWOULDBLOCK, text, str(folder)) from None
        yield locked
    finally:
        os.close(handle)


class _Folder:
    """A folder that becomes a store."""

    def __init__(self, path: Path) -> None:
        self.path, self.work = path, path / WORK
        self.files: dict[str, dict[str, Any]] = {}
        self.state: dict[str, Any] = {}
        self.replaces = False  # whether `begin` has removed a store

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Create the folder and lock it against other conversions until this one ends; remove it if it stays empty."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise FileExistsError(errno.EEXIST, "a store is a folder, and there is a file of that name", str(path))
        made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        try:
            with _locked(path) as locked:
                # one conversion at a time uses this folder, so an unlocked file has no owner on any host
                remove_orphans(path, abandoned=0.0 if locked else ABANDONED)
                yield
        finally:
            with contextlib.suppress(OSError):  # it is a store now, or will be after the next call
                for each in made:
                    each.rmdir()

    def check_target(self, overwrite: bool, identity: dict[str, Any] | None) -> bool:
        """Reject folders with other files; return whether there is an unfinished conversion of the same source."""
        path = self.path
        finished = (path / MANIFEST).exists()
        if finished and not overwrite:
            raise FileExistsError(
                errno.EEXIST,
                "there is a store already; pass overwrite=True (--overwrite), or give another folder",
                str(path),
            )
        unfinished = (path / UNFINISHED).exists()
        names = sorted(entry.name for entry in path.iterdir() if not _TEMPORARY.fullmatch(entry.name))
        ours = finished or unfinished
        others = [name for name in names if not ours or (name != WORK and not _OURS.fullmatch(name))]
        if others:
            text = f"the folder holds other files ({others[0]}); give an empty one"
            raise FileExistsError(errno.EEXIST, text, str(path))
        if not unfinished or finished:
            return False
        if identity is not None and self._read_state() == identity:
            logger.info("%s: continuing a conversion that stopped after stage %r", path, self.state["stage"])
            return True
        logger.info("%s: removed an unfinished conversion of another source", path)
        return False

    def begin(self, identity: dict[str, Any] | None) -> None:
        """Remove files of previous conversions, and record the start of this one."""
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        self.replaces = (path / MANIFEST).exists()
        _write(path / UNFINISHED, b"{}")
        (path / MANIFEST).unlink(missing_ok=True)  # first: without a manifest, the folder is no store
        self._remove(keep=(UNFINISHED,))
        self.work.mkdir()
        self.state = {"format": FORMAT, "version": VERSION, "identity": identity}
        self.enter("begun")

    def _read_state(self) -> Any:
        """Identity of the unfinished conversion; None if its record cannot be read or is of another version."""
        try:
            state = json.loads((self.path / UNFINISHED).read_text(encoding="utf-8"))
            if state["version"] != VERSION or state["stage"] not in STAGES:
                return None
            self.state = state
            return state["identity"]
        except (ValueError, KeyError, TypeError):
            return None

    def enter(self, stage: str, **found: Any) -> None:
        """Record that a stage is complete, with its results."""
        self.state |= {"stage": stage} | found
        _write(self.path / UNFINISHED, json.dumps(self.state).encode())

    def done(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return STAGES.index(self.state["stage"]) >= STAGES.index(stage)

    @contextlib.contextmanager
    def cleaning_up(self) -> Iterator[None]:
        """Remove all files after an error; after Ctrl-C or a kill, keep them so that the conversion can resume."""
        try:
            yield
        except BaseException as error:
            if self.replaces:
                said = "%s: the old store is gone: overwrite=True removed it before this conversion, which failed"
                logger.warning(said, self.path)
            if not isinstance(error, Exception):
                raise
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
        seen = _Checksum()
        _write(self.path / name, lambda file: np.save(seen.on(file), array, allow_pickle=False))
        self.files[name] = {"bytes": seen.size, "crc32": f"{seen.crc:08x}"}

    def load(self, name: str) -> np.ndarray:
        """Array of a file, mapped unless it is empty."""
        try:
            array: np.ndarray = np.load(self.path / name, mmap_mode="r", allow_pickle=False)
        except ValueError:
            array = np.load(self.path / name, allow_pickle=False)
        return array.view(np.ndarray)

    def save_slab(self, side: Side, slab: int, matrix: sp.csr_array) -> None:
        """Write the three files of a slab; the values last, because they mark it as complete."""
        arrays = {"indptr": matrix.indptr, "indices": matrix.indices, "values": matrix.data}
        for name, dtype in ARRAYS.items():
            self.save(slab_file(side, slab, name), arrays[name].astype(dtype, copy=False))

    def has_slab(self, side: Side, slab: int) -> bool:
        """Whether a slab is complete."""
        return all((self.path / slab_file(side, slab, name)).exists() for name in ARRAYS)

    def slab(self, side: Side, slab: int, n_fixed: int) -> sp.csr_array:
        """A complete slab, from its files."""
        indptr, indices, values = (self.load(slab_file(side, slab, name)) for name in ARRAYS)
        return sp.csr_array((values, indices, indptr), shape=(len(indptr) - 1, n_fixed))

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, and remove the work files."""
        for entry in sorted(self.path.iterdir()):  # files written before an interruption
            if _OURS.fullmatch(entry.name) and entry.suffix == ".npy" and entry.name not in self.files:
                self.files[entry.name] = {"bytes": entry.stat().st_size, "crc32": file_checksum(entry)}
        manifest = {"format": FORMAT, "version": VERSION, "dtype": "float32"} | manifest | {"files": self.files}
        manifest["checksum"] = seal(json.loads(json.dumps(manifest)))
        shutil.rmtree(self.work, ignore_errors=True)
        _write(self.path / MANIFEST, json.dumps(manifest, indent=1).encode())
        (self.path / UNFINISHED).unlink(missing_ok=True)


class _Checksum:
    """A file with the size and the checksum of the bytes written to it."""

    def __init__(self) -> None:
        self.size, self.crc = 0, 0
        self._file: BinaryIO

    def on(self, file: BinaryIO) -> Any:
        self._file = file
        return self

    def write(self, data: Any) -> int:
        self.size += memoryview(data).nbytes
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)


# ---------------------------------------------------------------------------------------------------- from memory


def _convert_matrix(ratings: Ratings, folder: _Folder, entries: int) -> None:
    matrix = as_csr(ratings)
    _save_labels(folder, ratings.user_ids, ratings.item_ids)
    counts, bounds = _Counts(*matrix.shape), {}
    for side, csr in zip(SIDES, (matrix, transposed(matrix)), strict=True):
        slabs = MemorySlabs.cut(csr, entries)
        bounds[side] = slabs.bounds
        for k in range(len(slabs.bounds) - 1):
            part = slabs.matrix(k)
            folder.save_slab(side, k, part)
            if side == "user":
                counts.add(int(slabs.bounds[k]), part)
    _finish(folder, matrix.shape, bounds, counts)


def _save_labels(folder: _Folder, user_ids: np.ndarray | None, item_ids: np.ndarray | None) -> None:
    for name, labels in (("user_ids", user_ids), ("item_ids", item_ids)):
        if labels is not None:
            folder.save(f"{name}.npy", encode_labels(name, labels))


@dataclass
class _Counts:
    """Statistics of all entries for the manifest, collected over the slabs of users."""

    n_users: int
    n_items: int
    nnz: int = 0
    zeros: int = 0

    def __post_init__(self) -> None:
        self.degrees = {
            side: np.zeros(n, np.int64) for side, n in zip(SIDES, (self.n_users, self.n_items), strict=True)
        }
        self.nonzero = {side: each.copy() for side, each in self.degrees.items()}

    def add(self, first: int, part: sp.csr_array) -> None:
        """Count a slab of users that begins with row `first`."""
        rows, filled = slice(first, first + part.shape[0]), part.data != 0
        self.degrees["user"][rows] = np.diff(part.indptr)
        self.nonzero["user"][rows] = np.bincount(entry_rows(part)[filled], minlength=part.shape[0])
        self.degrees["item"] += np.bincount(part.indices, minlength=self.n_items)
        self.nonzero["item"] += np.bincount(part.indices[filled], minlength=self.n_items)
        self.nnz += part.nnz
        self.zeros += int(len(filled) - np.count_nonzero(filled))


def _finish(folder: _Folder, shape: tuple[int, int], bounds: dict[Side, np.ndarray], counts: _Counts) -> None:
    """Write degrees and the manifest."""
    for side in SIDES:
        folder.save(degrees_file(side), counts.degrees[side])
        if counts.zeros:
            folder.save(degrees_file(side, nonzero=True), counts.nonzero[side])
    files = [slab_file("user", k, "values") for k in range(len(bounds["user"]) - 1)]
    values = {"all": ValueSummary.of(map(folder.load, files))}
    values["nonzero"] = values["all"]
    if counts.zeros:
        values["nonzero"] = ValueSummary.of(part[part != 0] for part in map(folder.load, files))
    folder.finish(
        {
            "shape": list(map(int, shape)),
            "nnz": counts.nnz,
            "zeros": counts.zeros,
            "bounds": {side: bounds[side].tolist() for side in SIDES},
            "sums": {kind: each.total for kind, each in values.items()},
            "magnitudes": {kind: each.ends.tolist() for kind, each in values.items()},
            "range": values["all"].value_range,
        }
    )


# ---------------------------------------------------------------------------------------------------- readers

Ids = np.ndarray
Chunk = tuple[Ids, Ids, np.ndarray]


@dataclass
class _Reader:
    """A source of chunks of raw ids and values, and the mapping of ids to positions.

    Attributes
    ----------
    chunks : iterator of (users, items, values)
        Ids are integers: labels themselves, codes of labels, or positions.
    sides : (_Ids, _Ids)
        Ids of users and items found so far.
    where : callable
        Function that describes the locations of two entries in the source.
    source : str
        Name of the source in messages.
    others : iterator of _Reader
        Readers to try in turn if this one does not support the source.
    valued : bool
        Whether the source has values: rows that repeat whole are copies.
    """

    chunks: Iterator[Chunk | None]
    sides: tuple[_Ids, _Ids]
    where: Callable[[int, int], str]
    source: str
    others: Iterator[_Reader] = field(default_factory=lambda: iter(()))
    valued: bool = False


class _Ids:
    """Ids of one side: `table[id]` (or a sorted search in it) is the position."""

    dtype: Any = np.int32

    def see(self, ids: np.ndarray) -> None:
        """Record the ids of a chunk."""

    def labels(self) -> np.ndarray | None:
        """Label of each position."""
        raise NotImplementedError

    def lookup(self) -> np.ndarray:
        """Arrays that `positions` needs."""
        raise NotImplementedError

    kind = "codes"


class _Codes(_Ids):
    """Codes of labels in the order of their first appearance."""

    def __init__(self, sort: Callable[[np.ndarray, list[Any]], tuple[np.ndarray, np.ndarray]]) -> None:
        self.table: dict[Any, int] = {}
        self._sort = sort
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def _both(self) -> tuple[np.ndarray, np.ndarray]:
        if self._sorted is None:
            self._sorted = self._sort(np.arange(len(self.table)), list(self.table))
        return self._sorted

    def encode(self, ids: list[Any]) -> np.ndarray:
        """Codes of labels."""
        table = self.table
        return np.fromiter((table.setdefault(label, len(table)) for label in ids), np.int32, len(ids))

    def labels(self) -> np.ndarray:
        return self._both()[1]

    def lookup(self) -> np.ndarray:
        return self._both()[0].astype(np.int32)


class _Integers(_Ids):
    """Integers that are labels."""

    kind = "integers"

    def __init__(self, dtype: Any = np.int64) -> None:
        self.dtype = np.dtype(dtype)
        self._known = np.empty(0, dtype=self.dtype)

    def see(self, ids: np.ndarray) -> None:
        found = _distinct(ids)
        place = np.minimum(np.searchsorted(self._known, found), max(len(self._known) - 1, 0))
        fresh = found if not len(self._known) else found[self._known[place] != found]
        if len(fresh):
            self._known = np.sort(np.concatenate((self._known, fresh)), kind="stable")

    def labels(self) -> np.ndarray:
        fits = not len(self._known) or int(self._known[-1]) <= np.iinfo(np.int64).max
        return self._known.astype(np.int64) if fits else self._known

    def lookup(self) -> np.ndarray:
        return self._known


def _distinct(ids: np.ndarray) -> np.ndarray:
    """Sorted distinct integers of a chunk; np.unique hashes them, which takes ten times as long."""
    low, high = int(ids.min()), int(ids.max())
    if high - low < 4 * len(ids) + 2**16:
        present = np.zeros(high - low + 1, dtype=bool)
        present[ids - ids.dtype.type(low)] = True
        return np.flatnonzero(present).astype(ids.dtype) + ids.dtype.type(low)
    ordered = np.sort(ids)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])]


class _Positions(_Ids):
    """Positions, of a matrix without labels or in a store."""

    kind = "positions"

    def __init__(self, count: int, labels: np.ndarray | None = None) -> None:
        self.count, self._labels = count, labels

    def labels(self) -> np.ndarray | None:
        return self._labels

    def lookup(self) -> np.ndarray:
        return np.empty(0, dtype=np.int32)


def _reader_of(source: Any, options: dict[str, Any], limit: int) -> Callable[[], _Reader] | None:
    """Function that makes a reader in chunks for a file or a store; None for sources held in memory as a whole."""
    if isinstance(source, Store):
        return lambda: _stored(source, limit)
    return _reader_of_file(source, options, limit) if isinstance(source, str) else None


def _stored(store: Store, limit: int) -> _Reader:
    length = max(1, limit // 64)

    def chunks() -> Iterator[Chunk]:
        for slab in store.slabs("user"):
            indptr, indices, values = csr_arrays(slab.matrix())
            for start in range(0, len(values), length):
                part = slice(start, min(start + length, len(values)))
                users = np.searchsorted(indptr, np.arange(part.start, part.stop), side="right") - 1 + slab.start
                yield users.astype(np.int32), indices[part], values[part].astype(np.float64)

    sides = (_Positions(store.n_users, store.user_ids), _Positions(store.n_items, store.item_ids))
    return _Reader(chunks(), sides, lambda first, second: f"entries {first} and {second}", str(store.path))


def _reader_of_file(path: str, options: dict[str, Any], limit: int) -> Callable[[], _Reader] | None:
    """Function that makes a reader in chunks for a file; None if it has to be read as a whole."""
    head = read_head(path)
    format = options["format"] if options["format"] != "auto" else sniff_format(path, head)
    columns = (options["user"], options["item"], options["value"])
    if format in ("npz", "jsonl"):
        return None
    if format == "mtx":
        header = market_header(path, head)
        if header is None or not _streamable(header):
            return None
        return lambda: _matrix_market(path, header, limit)
    if format == "parquet":
        return lambda: _parquet(path, columns, max(1, limit // 256), options["missing"])
    as_text = (options["header"], columns, options["encoding"], options["comment"])
    if format == "lists":
        return lambda: _lists(list_layout(path, head, options["separator"], *as_text), limit, options["missing"])
    separator = text_separator(format, options["separator"])

    def text() -> _Reader:
        quoting = {"quote": options["quote"], "escape": options["escape"]}
        layout = find_layout(path, head, TextOptions(separator, *as_text, **quoting))
        log_columns(path, layout.columns)
        readers = _text_readers(layout, limit, options["missing"])
        return replace(next(readers), others=readers)

    return text


def _text_readers(layout: TextLayout, limit: int, missing: str) -> Iterator[_Reader]:
    """Readers to try one after the other; the last one reads any text, or raises the error."""
    where = functools.partial(lines_of, layout, dropped=missing == "drop")
    size = min(BLOCK_CHARS, limit // 32)
    readers: list[Any] = [(integer_chunks, record_chunks, max(1, min(BLOCK_RECORDS, limit // 256)))]
    if limit >= arrow_text.MEMORY:
        readers.insert(0, (arrow_text.integer_chunks, arrow_text.label_chunks, size))
    for integers, labels, length in readers:
        if layout.integer_ids:
            numbers = _checked_values(integers(layout, size), layout)
            valued = layout.value is not None
            yield _Reader(numbers, (_Integers(), _Integers()), where, layout.path, valued=valued)
        place = functools.partial(lines_of, layout)
        make = functools.partial(labels, layout, size=length)
        found = _labelled(make, missing, layout.path, place, where)
        yield replace(found, chunks=_checked_values(found.chunks, layout), valued=layout.value is not None)


def _checked_values(chunks: Iterator[Any], layout: TextLayout) -> Iterator[Any]:
    """The same chunks, whose values must not be ids; see `refuse_ids_as_values`."""
    large = np.empty(0)
    for chunk in chunks:
        if chunk is not None:
            large = np.union1d(large, large_integers(chunk[2]))[: MANY_LARGE + 1]
            refuse_ids_as_values(layout, large)
        yield chunk


def _labelled(
    make: Callable[[dict[str, int], dict[str, int]], Iterator[Any]],
    missing: str,
    path: str,
    place: Callable[[int, int], str],
    where: Callable[[int, int], str],
) -> _Reader:
    """Reader of chunks of codes, which `make` yields; `place` describes entries before `missing` drops some."""
    users, items = _Codes(sorted_labels), _Codes(sorted_labels)
    kept = (users.table, items.table)
    tables: tuple[dict[str, int], dict[str, int]] = ({}, {}) if missing == "drop" else kept
    return _Reader(without_missing(make(*tables), tables, missing, path, place, kept), (users, items), where, path)


def _lists(layout: ListLayout, limit: int, missing: str) -> _Reader:
    make = functools.partial(list_chunks, layout, size=max(1, min(BLOCK_RECORDS, limit // 256)))
    where = functools.partial(lines_of_lists, layout)
    return _labelled(make, missing, layout.path, where, where)


def _parquet(path: str, columns: tuple[Any, Any, Any], rows: int, missing: str) -> _Reader:
    def sort(codes: np.ndarray, labels: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        positions, unique = factorize_objects(f"a column of {path}", labels, "row")
        return positions[codes], unique

    parts = parquet_chunks(path, columns, rows, missing)
    first = next(parts, None)
    if first is None:
        raise RatingsError(f"{path} holds no ratings")
    sides: list[Any] = [
        _Codes(sort) if isinstance(ids, list) else _Integers(np.uint64 if ids.dtype == np.uint64 else np.int64)
        for ids in first[:2]
    ]

    def chunks() -> Iterator[Chunk]:
        part: Any = first
        while part is not None:
            ids = (
                side.encode(each) if isinstance(side, _Codes) else each.astype(side.dtype)
                for side, each in zip(sides, part[:2], strict=True)
            )
            yield *ids, part[2]
            part = next(parts, None)

    where = "rows {} and {}".format
    valued = parquet_layout(path, columns).value is not None
    return _Reader(chunks(), (sides[0], sides[1]), where, path, valued=valued)


def _streamable(header: MarketHeader) -> bool:
    """Whether a MatrixMarket file is a general matrix of real coordinates; SciPy has to read others."""
    return (
        (header.layout, header.symmetry) == ("coordinate", "general")
        and header.field in ("real", "integer", "pattern", "double", "unsigned-integer")
        and max(header.n_rows, header.n_columns) <= MAX_POSITION
    )


def _matrix_market(path: str, header: MarketHeader, limit: int) -> _Reader:
    kind, n_rows, n_columns, count = header.field, header.n_rows, header.n_columns, header.entries
    check_market_rows(path, header)
    fields = [("row", np.int64), ("column", np.int64)] + ([] if kind == "pattern" else [("value", np.float64)])

    def chunks() -> Iterator[Chunk]:
        done, sized = 0, False
        with reading(path), io.TextIOWrapper(open_bytes(path), encoding="latin-1") as stream:
            for block in line_blocks(stream, path, min(BLOCK_CHARS, limit // 32)):
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

    sides = (_Positions(n_rows), _Positions(n_columns))
    return _Reader(chunks(), sides, lambda first, second: f"entries {first} and {second}", path)


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
    """A conversion in stages, with up to `chunk` entries of the source, or `entries` of a slab, in memory."""

    def __init__(
        self, folder: _Folder, reader: Callable[[], _Reader], duplicates: str, entries: int, chunk: int
    ) -> None:
        self.folder, self.reader, self.duplicates = folder, reader, duplicates
        self.entries, self.chunk = entries, chunk
        self._tables: dict[int, tuple[Any, np.ndarray | None]] = {}

    def run(self) -> None:
        """Run the remaining stages."""
        folder = self.folder
        for stage, work in zip(
            STAGES[1:], (self._read, self._user_buckets, self._user_slabs, self._item_buckets, self._item_slabs),
            strict=True,
        ):  # fmt: skip
            if not folder.done(stage):
                found = work()
                folder.enter(stage, **found)
                logger.info("%s: %s", folder.path, stage)
        shape, bounds = self._shape, {side: np.array(folder.state[f"{side} bounds"]) for side in SIDES}
        counts = _Counts(*shape)
        for k, part in self._user_parts():
            counts.add(int(bounds["user"][k]), part)
        _finish(folder, shape, bounds, counts)

    @property
    def valued(self) -> bool:
        """Whether the source has values: rows that repeat whole are copies."""
        return bool(self.folder.state.get("valued", False))

    @property
    def _differ(self) -> bool:
        """Whether the source has different values."""
        values = np.memmap(self.folder.work / "values.bin", np.float64, "r")
        return bool(values.min() != values.max())

    @property
    def _shape(self) -> tuple[int, int]:
        n_users, n_items = self.folder.state["shape"]
        return n_users, n_items

    # ------------------------------------------------------------------------------------------------ raw ids

    def _read(self) -> dict[str, Any]:
        """Write all chunks of the source as raw files, and the labels in order."""
        reader = self.reader()
        others = reader.others
        while (count := self._write_raw(reader)) is None:
            reader = next(others)
        if not count and reader.sides[0].kind != "positions":
            raise RatingsError(f"{reader.source} holds no ratings, only a header")
        labels = [side.labels() for side in reader.sides]
        _save_labels(self.folder, labels[0], labels[1])
        for name, side in zip(SIDES, reader.sides, strict=True):
            np.save(self.folder.work / f"{name}-lookup.npy", side.lookup())
        shape = [
            side.count if isinstance(side, _Positions) else len(found)  # type: ignore[arg-type]
            for side, found in zip(reader.sides, labels, strict=True)
        ]
        return {
            "shape": shape,
            "entries": count,
            "valued": reader.valued,
            "kinds": [side.kind for side in reader.sides],
            "dtypes": [np.dtype(side.dtype).str for side in reader.sides],
        }

    def _write_raw(self, reader: _Reader) -> int | None:
        """Write the chunks of a reader; returns the number of entries, None if it does not support the source."""
        count, work = 0, self.folder.work
        with contextlib.ExitStack() as stack:
            users, items, values = (
                stack.enter_context(open(work / f"{name}.bin", "wb")) for name in ("users", "items", "values")
            )
            for part in reader.chunks:
                if part is None:
                    return None
                for side, ids, file in zip(reader.sides, part, (users, items), strict=False):
                    side.see(ids)
                    file.write(np.ascontiguousarray(ids, dtype=side.dtype).data)
                values.write(np.ascontiguousarray(part[2], dtype=np.float64).data)
                count += len(part[2])
            for file in (users, items, values):
                _sync(file)
        return count

    def _mapped(self, side: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """Positions of some raw ids, int32."""
        state, name = self.folder.state, ("users", "items")[side]
        dtype = np.dtype(state["dtypes"][side])
        count = state["entries"] - start if count is None else count
        ids = np.fromfile(self.folder.work / f"{name}.bin", dtype, count, offset=start * dtype.itemsize)
        kind = state["kinds"][side]
        if kind == "positions":
            return ids
        if side not in self._tables:
            self._tables[side] = _table(self.folder.load(f"{WORK}/{SIDES[side]}-lookup.npy"), kind)
        low, table = self._tables[side]
        if table is None:
            return np.searchsorted(low, ids).astype(np.int32)
        return table[ids - low]

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """(start, length) of consecutive ranges of entries."""
        total = self.folder.state["entries"]
        return ((start, min(self.chunk, total - start)) for start in range(0, total, self.chunk))

    # ------------------------------------------------------------------------------------------------ users

    def _user_buckets(self) -> dict[str, Any]:
        n_users, _ = self._shape
        degrees = np.zeros(n_users, dtype=np.int64)
        for start, count in self._chunks():
            degrees += np.bincount(self._mapped(0, start, count), minlength=n_users)
        bounds = slab_bounds(degrees, self.entries)
        with _Buckets(self.folder.work, "user", bounds) as buckets:
            for start, count in self._chunks():
                part = np.empty(count, dtype=USER_ENTRY)
                part["row"], part["column"] = (self._mapped(side, start, count) for side in (0, 1))
                part["value"] = np.fromfile(self.folder.work / "values.bin", np.float64, count, offset=8 * start)
                buckets.add(part)
        return {"user bounds": bounds.tolist()}

    def _user_slabs(self) -> dict[str, Any]:
        def sort(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int], first: int) -> Any:
            try:
                return from_triplets(rows - first, columns, values, shape, duplicates=self.duplicates)
            except DuplicateEntriesError:
                return self._without_copies(rows, columns, values, shape, first)
            except RatingsError as error:
                raise RatingsError(f"of the users from position {first} on: {error}") from error

        self._sort("user", USER_ENTRY, sort)
        for name in ("users", "items", "values"):
            (self.folder.work / f"{name}.bin").unlink(missing_ok=True)
        return {}

    def _without_copies(
        self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int], first: int
    ) -> sp.csr_array:
        """The matrix of a bucket without rows that repeat others whole; see `Entries.without_copies`."""
        if not self.valued or not self._differ:
            raise self._duplicate_error(rows, columns, values)
        copies = whole_repeats(rows, columns, values)
        kept = [each[~copies] for each in (rows, columns, values)]
        try:
            matrix = from_triplets(kept[0] - first, kept[1], kept[2], shape)
        except DuplicateEntriesError:
            raise self._duplicate_error(*kept) from None
        note_copies(str(self.folder.path), int(np.count_nonzero(copies)))
        return matrix

    def _duplicate_error(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> DuplicateEntriesError:
        """Error that names the first repeated pair of a bucket, and its locations in the source."""
        one, other = first_repeat(rows.astype(np.int64) * self._shape[1] + columns)
        places = self._places(int(rows[one]), int(columns[one]))
        reader = self.reader()
        user, item = (self._label(name, place) for name, place in zip(SIDES, (rows[one], columns[one]), strict=True))
        where = reader.where(places[0], self._conflicting(places) if self.valued else places[1])
        return duplicate_error(
            reader.source, user, item, where, values[[one, other]], self._repeats(), not self._differ
        )

    def _conflicting(self, places: list[int]) -> int:
        """The first of some entries whose value differs from that of the first; without one, the second."""
        values = np.memmap(self.folder.work / "values.bin", np.float64, "r")
        return next((place for place in places if values[place] != values[places[0]]), places[1])

    def _repeats(self) -> Repeats:
        """Count repeated pairs over all buckets of users; buckets that have become slabs had none."""
        found = Repeats(0, 0)
        for k in range(len(self.folder.state["user bounds"]) - 1):
            bucket = _bucket(self.folder.work, "user", k)
            if bucket.exists() and not self.folder.has_slab("user", k):
                part = np.fromfile(bucket, USER_ENTRY)
                more = repeats(part["row"].astype(np.int64) * self._shape[1] + part["column"], part["value"])
                found = Repeats(found.pairs + more.pairs, found.conflicting + more.conflicting)
        return found

    def _places(self, row: int, column: int) -> list[int]:
        """Numbers of the entries of a pair, in input order."""
        found: list[int] = []
        for start, count in self._chunks():
            same = (self._mapped(0, start, count) == row) & (self._mapped(1, start, count) == column)
            found += (np.flatnonzero(same) + start).tolist()
        return found

    def _label(self, name: str, position: int) -> str:
        path = self.folder.path / f"{name}_ids.npy"
        return label_of(None if not path.exists() else decode_labels(name, np.load(path)), int(position))

    # ------------------------------------------------------------------------------------------------ items

    def _user_parts(self) -> Iterator[tuple[int, sp.csr_array]]:
        for k in range(len(self.folder.state["user bounds"]) - 1):
            yield k, self.folder.slab("user", k, self._shape[1])

    def _item_buckets(self) -> dict[str, Any]:
        degrees = np.zeros(self._shape[1], dtype=np.int64)
        for _, part in self._user_parts():
            degrees += np.bincount(part.indices, minlength=self._shape[1])
        bounds = slab_bounds(degrees, self.entries)
        with _Buckets(self.folder.work, "item", bounds) as buckets:
            for k, part in self._user_parts():
                first = self.folder.state["user bounds"][k]
                entries = np.empty(part.nnz, dtype=ITEM_ENTRY)
                entries["row"], entries["value"] = part.indices, part.data
                entries["column"] = entry_rows(part) + first
                buckets.add(entries)
        return {"item bounds": bounds.tolist()}

    def _item_slabs(self) -> dict[str, Any]:
        def sort(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int], first: int) -> Any:
            return from_triplets(rows - first, columns, values, shape)

        self._sort("item", ITEM_ENTRY, sort)
        return {}

    # ------------------------------------------------------------------------------------------------ both

    def _sort(self, side: Side, entry: np.dtype, sort: Callable[..., sp.csr_array]) -> None:
        """Sort each bucket into a slab."""
        bounds = self.folder.state[f"{side} bounds"]
        n_fixed = self._shape[1 if side == "user" else 0]
        for k, (first, last) in enumerate(pairwise(bounds)):
            bucket = _bucket(self.folder.work, side, k)
            if not self.folder.has_slab(side, k):
                part = np.fromfile(bucket, entry) if bucket.exists() else np.empty(0, entry)
                columns = [np.ascontiguousarray(part[name]) for name in ("row", "column", "value")]
                del part
                self.folder.save_slab(side, k, sort(*columns, (last - first, n_fixed), first))
        for k in range(len(bounds) - 1):
            _bucket(self.folder.work, side, k).unlink(missing_ok=True)


def _table(lookup: np.ndarray, kind: str) -> tuple[Any, np.ndarray | None]:
    """(lowest id, position of each id from it on); or (all ids, None) if their range is too wide for that."""
    if kind == "codes":
        return np.int32(0), lookup
    low, high = int(lookup[0]), int(lookup[-1])
    if high - low >= 4 * len(lookup) + 2**16:
        return lookup, None
    table = np.zeros(high - low + 1, dtype=np.int32)
    table[lookup - lookup[0]] = np.arange(len(lookup), dtype=np.int32)
    return lookup[0], table


def _bucket(work: Path, side: Side, slab: int) -> Path:
    return work / f"{side}-{slab:06d}.bin"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class _Buckets:
    """Files, one per slab, for its entries in input order."""

    def __init__(self, work: Path, side: Side, bounds: np.ndarray) -> None:
        self.work, self.side, self.bounds = work, side, bounds

    def __enter__(self) -> _Buckets:
        for old in self.work.glob(f"{self.side}-??????*.bin"):  # left by an interrupted attempt
            old.unlink()
        return self

    def __exit__(self, *failed: Any) -> None:
        if failed[0] is None:
            for path in self.work.glob(f"{self.side}-??????*.bin"):
                with open(path, "rb+") as file:
                    _sync(file)

    def add(self, entries: np.ndarray) -> None:
        """Put entries into their buckets."""
        slabs = np.searchsorted(self.bounds, entries["row"], side="right") - 1
        order = np.argsort(slabs, kind="stable")
        entries, slabs = entries[order], slabs[order]
        cuts = np.flatnonzero(np.diff(slabs)) + 1
        for start, stop in zip(np.append(0, cuts), np.append(cuts, len(slabs)), strict=True):
            if stop > start:
                with open(_bucket(self.work, self.side, int(slabs[start])), "ab") as file:
                    file.write(entries[start:stop].data)
