"""Ratings on disk, larger than memory if need be: a folder that a fit reads slab by slab (cuMF section 4.4).

    store/
      manifest.json                    sizes, bounds of slabs, bytes and CRC-32 of each file; written last
      user-000000.indptr.npy           int64    rows of a slab of users, from 0
      user-000000.indices.npy          int32    items, ascending within a row
      user-000000.values.npy           float32
      user-000001. ...
      item-000000. ...                 the transpose, cut into slabs of items
      user-degrees.npy, item-degrees.npy                      int64    entries of each row
      user-degrees-nonzero.npy, item-degrees-nonzero.npy      the same without explicit zeros, if there are any
      user_ids.npy, item_ids.npy       labels as in model files: int64, uint64, or a JSON list as bytes

All arrays are plain .npy files, written by `hybridmf.data.convert`. `hybridmf.data.manifest` defines the manifest. The
first read of a file compares its content with the manifest and with other files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import mmap
import os
import re
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from .. import _formats
from ..core.objective import SIDES, Side, other_side
from ..core.sparse import ValueSummary, as_ones, entry_rows, without_zeros
from ..core.validate import check_choice, check_memory, check_path, frozen_csr, make_csr
from ..errors import StoreError
from ..ratings import Ratings
from .labels import LABEL_DTYPES, decode_labels
from .manifest import (
    ARRAYS,
    FORMAT,
    HEADER,
    LABELS,
    MANIFEST,
    ROUNDING,
    VERSION,
    check_manifest,
    degrees_file,
    entries_of_slabs,
    seal,
    slab_file,
)
from .slabs import Orientation, slab_entries

logger = logging.getLogger("hybridmf")

UNFINISHED = "unfinished.json"
CHUNK = 1 << 18  # bytes read at a time to check a file

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00v\x00\{'descr': '([<>|][iuf][1248])', 'fortran_order': False, 'shape': \(([\d, ]*)\), \} *\n"
)
"""The first `HEADER` bytes of a vector; NumPy has Python parse them, which is not thread-safe in each version."""

AGAIN = "convert the ratings again (hybridmf convert RATINGS STORE --overwrite)"


def file_checksum(path: str | os.PathLike[str]) -> str:
    """CRC-32 of a file, eight hexadecimal digits."""
    crc = 0
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


@dataclass(frozen=True)
class Slab:
    """Consecutive rows, from `start` to before `stop`, of one side of a store."""

    store: Store = field(repr=False)
    side: Side
    number: int
    start: int
    stop: int

    def matrix(self) -> sp.csr_array:
        """Its rows, canonical CSR float32, shape (stop - start, n_fixed), mapped from the files; checked once."""
        return self.store._slab_matrix(self)


class Store:
    """Ratings in a folder; `Store.open` opens a result of `convert`. Estimators accept it in place of `Ratings`.

    No array of the size of the ratings is held in memory: slabs are memory-mapped on demand.

    Attributes
    ----------
    path : Path
    shape : (n_users, n_items)
    nnz : int
        Entries, including explicit zeros.
    user_ids, item_ids : ndarray or None
        Labels.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self._manifest = path, manifest
        self.shape: tuple[int, int] = (int(manifest["shape"][0]), int(manifest["shape"][1]))
        self.nnz = int(manifest["nnz"])
        self._bounds = {side: np.array(manifest["bounds"][side], dtype=np.int64) for side in SIDES}
        self._entries = {side: entries_of_slabs(manifest, side) for side in SIDES}
        self._checked: dict[str, tuple[int, int]] = {}  # size and time of files at the time of their validation
        self._sound: dict[Side, dict[int, ValueSummary]] = {side: {} for side in SIDES}  # consistent slabs
        self._counted: set[str] = set()  # files of degrees that are consistent with the sizes of slabs
        self._kinds: dict[str, tuple[np.dtype, str]] = {}  # dtypes and shapes of arrays that were mapped before

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Open a store; sizes of all files are checked, contents when they are read.

        Raises
        ------
        FileNotFoundError, NotADirectoryError
        StoreError
            An interrupted conversion, a file that is missing or has another size, or a folder that is not a store.
        """
        folder = Path(check_path("path", path))
        if not folder.exists():
            raise FileNotFoundError(errno.ENOENT, "there is no such store; hybridmf convert creates one", str(path))
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a store is a folder, this is a file", str(path))
        if not (folder / MANIFEST).exists():
            if (folder / UNFINISHED).exists():
                raise StoreError(
                    f"{str(path)!r} is an unfinished conversion; run hybridmf convert again, or delete the folder"
                )
            raise StoreError(
                f"{str(path)!r} is a directory, but no store (no {MANIFEST}): hybridmf convert makes stores"
            )
        return cls(folder, _read_manifest(folder))

    # ------------------------------------------------------------------------------------------------ looking in

    @property
    def n_users(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def n_items(self) -> int:
        """Number of columns."""
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(int(entry["bytes"]) for entry in self._manifest["files"].values())

    @property
    def checksum(self) -> str:
        """CRC-32 of the manifest, which has the checksums of all other files."""
        return str(self._manifest["checksum"])

    @cached_property
    def user_ids(self) -> np.ndarray | None:
        """Label of each user."""
        return self._labels("user_ids")

    @cached_property
    def item_ids(self) -> np.ndarray | None:
        """Label of each item."""
        return self._labels("item_ids")

    def _labels(self, name: str) -> np.ndarray | None:
        if f"{name}.npy" not in self._manifest["files"]:
            return None
        encoded = np.array(self._vector(f"{name}.npy", *LABEL_DTYPES))
        try:
            labels = decode_labels(name, encoded)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._error(f"{name}.npy", f"holds no labels ({error})") from error
        count = self.shape[name != "user_ids"]
        if len(labels) != count:
            raise self._error(f"{name}.npy", f"has {len(labels)} labels for {count} rows")
        if len(set(labels.tolist())) != count:
            raise self._error(f"{name}.npy", "has a label more than once")
        return labels

    def slabs(self, side: Side = "user") -> list[Slab]:
        """Slabs of one side, in the order of their rows."""
        check_choice("side", side, SIDES)
        bounds = self._bounds[side].tolist()
        return [Slab(self, side, k, *ends) for k, ends in enumerate(pairwise(bounds))]

    def verify(self) -> None:
        """Read every file and compare it with the manifest, and both orientations with each other.

        Raises
        ------
        StoreError
            Names the first file that has changed since it was written.
        """
        self._checked.clear()
        self._kinds.clear()
        self._counted.clear()
        for name in self._manifest["files"]:
            self._check_content(name)
        found = []
        for side in SIDES:
            self._sound[side].clear()
            found.append(sum(_hash(slab, slab.matrix()) for slab in self.slabs(side)) % 2**64)
        if found[0] != found[1]:
            raise self._error(MANIFEST, "has slabs of items that are not the transpose of the slabs of users")
        for name in LABELS:
            self._labels(name.removesuffix(".npy"))

    # ------------------------------------------------------------------------------------------------ in memory

    @property
    def user_items(self) -> sp.csr_array:
        """All ratings as a new matrix in memory, shape (n_users, n_items), for code that cannot read slabs.

        Raises
        ------
        MemoryBudgetError
            They do not fit.
        """
        way_out = "ExplicitALS and ImplicitALS fit a store without loading it"
        check_memory(f"the store {str(self.path)!r} as a matrix", 8 * self.nnz + 16 * self.n_users, way_out)
        logger.info("loading the store %s into memory: %s entries", self.path, f"{self.nnz:,}")
        return frozen_csr(StoreMatrix(self).load().csr)

    def to_ratings(self) -> Ratings:
        """All ratings in memory with their labels, equal to those of `Ratings.from_file` for the source."""
        return Ratings(self.user_items, self.user_ids, self.item_ids)

    # ------------------------------------------------------------------------------------------------ files

    def _error(self, name: str, problem: str) -> StoreError:
        """The error about a file, which may be that of another conversion by now."""
        way_out = AGAIN
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))["checksum"] != self.checksum:
                way_out = "another conversion has replaced the store since it was opened: open it again (Store.open)"
        return StoreError(f"{str(self.path / name)!r} {problem}; {way_out}")

    def _check_content(self, name: str) -> None:
        """Compare a file with its checksum, again after each change, since kernels do not check values."""
        path, entry = self.path / name, self._manifest["files"][name]
        try:
            status = os.stat(path)
            seen = status.st_size, status.st_mtime_ns
            if self._checked.get(name) == seen:
                return
            problem = _size_problem(status.st_size, entry["bytes"])
            found = "" if problem else file_checksum(path)
        except OSError as error:
            raise self._error(name, f"cannot be read ({error.strerror})") from error
        if not problem and found != entry["crc32"]:
            problem = f"was altered (CRC-32 {found}, {entry['crc32']} when it was written)"
        if problem:
            raise self._error(name, problem)
        self._checked[name] = seen

    def _vector(self, name: str, *dtypes: Any, length: int | None = None) -> np.ndarray:
        """Vector of a file, mapped; checked at first need."""
        self._check_content(name)
        path = os.fspath(self.path / name)  # NumPy resolves links of a Path
        try:
            if name not in self._kinds:
                with open(path, "rb") as file:
                    header = _HEADER.fullmatch(file.read(HEADER))
                if header is None:
                    raise self._error(name, "is no array of numbers in NumPy's format")
                self._kinds[name] = np.dtype(header[1].decode()), header[2].decode()
            dtype, shape = self._kinds[name]
            count = (self._manifest["files"][name]["bytes"] - HEADER) // dtype.itemsize
            if dtype not in dtypes or shape != f"{count}," or length not in (None, count):
                wanted = " or ".join(np.dtype(each).name for each in dtypes)
                size = "" if length is None else f"{length} "
                raise self._error(name, f"holds {dtype} of shape ({shape}), expected a vector of {size}{wanted}")
            if not count:  # an empty file cannot be mapped
                return np.empty(0, dtype)
            return np.memmap(path, dtype, "r", HEADER, (count,))
        except OSError as error:
            raise self._error(name, f"cannot be read ({error.strerror})") from error

    def _slab_matrix(self, slab: Slab) -> sp.csr_array:
        shape = (slab.stop - slab.start, self.shape[1 if slab.side == "user" else 0])
        entries = int(self._entries[slab.side][slab.number])
        lengths = {"indptr": shape[0] + 1, "indices": entries, "values": entries}
        indptr, indices, values = (
            self._vector(slab_file(slab.side, slab.number, array), dtype, length=lengths[array]).view(np.ndarray)
            for array, dtype in ARRAYS.items()
        )
        if slab.number not in self._sound[slab.side]:
            # kernels do not check their input
            if not self._fits_degrees(slab, indptr, values) or not _formats.is_canonical(
                indptr, indices, values, shape[1]
            ):
                raise self._error(slab_file(slab.side, slab.number, "indices"), "contradicts the files beside it")
            self._sum_up(slab, values)
        return make_csr(indptr, indices, values, shape)

    def _fits_degrees(self, slab: Slab, indptr: np.ndarray, values: np.ndarray) -> bool:
        rows = slice(slab.start, slab.stop)
        if indptr[0] != 0 or not np.array_equal(np.diff(indptr), self._degrees(slab.side)[rows]):
            return False
        if not self._manifest["zeros"]:
            return bool(np.all(values))
        filled = np.concatenate(([0], np.cumsum(values != 0)))[indptr]
        return np.array_equal(np.diff(filled), self._degrees(slab.side, nonzero=True)[rows])

    def _sum_up(self, slab: Slab, values: np.ndarray) -> None:
        """Compare the values of a slab with the manifest, and the sums over all slabs once all have been read."""
        known = self._sound[slab.side]
        summary = ValueSummary.of([values[values != 0]])
        ends = self._manifest["magnitudes"]["nonzero"]
        sound = not len(summary.ends) or (ends[0] <= summary.ends[0] and summary.ends[1] <= ends[1])
        known[slab.number] = summary
        if sound and len(known) == len(self._entries[slab.side]):
            total = math.fsum(each.total for each in known.values())
            found = np.concatenate([each.ends for each in known.values()])
            slack = ROUNDING * self.nnz * (ends[1] if ends else 0.0)
            sound = ([float(found.min()), float(found.max())] if len(found) else []) == ends
            sound = sound and abs(total - self._manifest["sums"]["all"]) <= slack
        if not sound:
            del known[slab.number]
            raise self._error(MANIFEST, f"has other sums or magnitudes than the values of slabs of {slab.side}s")

    def degrees(self, side: Side = "user", *, nonzero: bool = False) -> np.ndarray:
        """Entries of each row of a side, int64; with `nonzero` without explicit zeros."""
        return np.array(self._degrees(check_choice("side", side, SIDES), nonzero=nonzero))

    def _degrees(self, side: Side, *, nonzero: bool = False) -> np.ndarray:
        """The same, mapped."""
        zeros = self._manifest["zeros"] if nonzero else 0
        name = degrees_file(side, nonzero=bool(zeros))
        degrees = self._vector(name, np.int64, length=self.shape[side != "user"]).view(np.ndarray)
        if name not in self._counted:
            sound = not len(degrees) or 0 <= degrees.min() <= degrees.max() <= self.shape[side == "user"]
            entries = slab_entries(self._bounds[side], degrees)
            most = self._entries[side]
            sound = sound and bool(np.all(entries <= most)) and int(most.sum() - entries.sum()) == zeros
            if not sound:
                raise self._error(name, "contradicts the sizes of slabs")
            self._counted.add(name)
        return degrees

    def __repr__(self) -> str:
        slabs = ", ".join(f"{len(self._bounds[side]) - 1} of {side}s" for side in SIDES)
        return (
            f"Store({str(self.path)!r}: {self.n_users:,} users x {self.n_items:,} items, {self.nnz:,} entries, "
            f"{self.nbytes / 1e6:,.1f} MB; slabs: {slabs})"
        )

    def __reduce__(self) -> Any:
        return Store.open, (str(self.path),)


def _hash(slab: Slab, matrix: sp.csr_array) -> int:
    """Sum of a hash of each entry, the same for a matrix and its transpose in any slabs."""
    rows, columns = (entry_rows(matrix) + slab.start).astype(np.uint64), matrix.indices.astype(np.uint64)
    users, items = (rows, columns) if slab.side == "user" else (columns, rows)
    mixed = (users << np.uint64(32) | items) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed += matrix.data.view(np.uint32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(29)
    return int(mixed.sum())


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        kind, version, sealed = manifest["format"], manifest["version"], seal(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{str(path)!r} is no manifest of a store ({type(error).__name__}: {error}); {AGAIN}"
        ) from error
    if kind != FORMAT:
        raise StoreError(f"{str(path)!r} is a manifest of {kind!r}, not of a {FORMAT}")
    if version != VERSION:
        raise StoreError(
            f"{str(path)!r} has version {version!r}; this hybridmf reads version {VERSION}: upgrade hybridmf or {AGAIN}"
        )
    if manifest.get("checksum") != sealed:
        raise StoreError(f"{str(path)!r} was altered: its checksum does not fit; {AGAIN}")
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise StoreError(f"{str(path)!r} contradicts itself: {error}; {AGAIN}") from error
    for name, entry in manifest["files"].items():
        try:
            size = os.stat(folder / name).st_size
        except FileNotFoundError:
            raise StoreError(f"{str(folder / name)!r} is missing; {AGAIN}") from None
        problem = _size_problem(size, entry["bytes"])
        if problem:
            raise StoreError(f"{str(folder / name)!r} {problem}; {AGAIN}")
    return manifest


def _size_problem(size: int, written: int) -> str:
    if size == written:
        return ""
    return f"{'is truncated' if size < written else 'is too long'}: {size} bytes, {written} were written"


class StoreMatrix(Orientation):
    """One orientation of a store for a fit, with `indptr` as a matrix has.

    Values are converted to `dtype` (float32 or float64) as they are read; `drop_zeros` drops explicit zeros. `more`:
    numbers of users and of items without entries behind those of the store; such rows belong to the last slab.
    """

    def __init__(
        self,
        store: Store,
        side: Side = "user",
        dtype: Any = np.float32,
        drop_zeros: bool = False,
        more: tuple[int, int] = (0, 0),
    ) -> None:
        self.store, self.side, self.dtype, self.more = store, side, np.dtype(dtype), more
        manifest = store._manifest
        self.drop_zeros = drop_zeros and manifest["zeros"] > 0
        shape = store.shape[0] + more[0], store.shape[1] + more[1]
        self.shape: tuple[int, int] = shape if side == "user" else (shape[1], shape[0])
        self.nnz = store.nnz - manifest["zeros"] if self.drop_zeros else store.nnz
        self.bounds = store._bounds[side].copy()
        self.bounds[-1] = self.shape[0]
        self._slabs = store.slabs(side)
        self._kind = "nonzero" if self.drop_zeros else "all"

    @cached_property
    def degrees(self) -> np.ndarray:
        """Entries of each row, int64, shape (n_rows,)."""
        known = self.store.degrees(self.side, nonzero=self.drop_zeros)
        return np.pad(known, (0, self.shape[0] - len(known)))

    @property
    def indptr(self) -> np.ndarray:
        """Offsets of the rows in a matrix of all slabs, int64, shape (n_rows + 1,)."""
        return np.concatenate(([0], np.cumsum(self.degrees)))

    @property
    def total(self) -> float:
        """Sum of all values in user order; see `hybridmf.core.sparse.ValueSummary`."""
        return float(self.store._manifest["sums"][self._kind])

    @cached_property
    def value_range(self) -> tuple[float, float] | None:
        """Smallest and largest value, including explicit zeros; None if there are no entries."""
        known = self.store._manifest.get("range")
        if known:
            return float(known[0]), float(known[1])
        return self._summary.value_range  # older manifests lack it

    @property
    def squares(self) -> float:
        """Sum of the squares of all values in user order; reads the slabs once."""
        return self._summary.squares

    @cached_property
    def _summary(self) -> ValueSummary:
        users = self if self.side == "user" else self.transposed()
        return ValueSummary.of(matrix.data for matrix in users.matrices())

    @property
    def largest_slab(self) -> int:
        sides = [self, self.transposed()]
        return max(int(slab_entries(each.bounds, each.degrees).max(initial=0)) for each in sides)

    def transposed(self) -> StoreMatrix:
        return StoreMatrix(self.store, other_side(self.side), self.dtype, self.drop_zeros, self.more)

    def matrix(self, slab: int) -> sp.csr_array:
        matrix = self._slabs[slab].matrix()
        matrix = without_zeros(matrix) if self.drop_zeros else matrix
        shape = int(self.bounds[slab + 1] - self.bounds[slab]), self.shape[1]
        if matrix.dtype == self.dtype and matrix.shape == shape:
            return matrix
        indptr = np.pad(matrix.indptr, (0, shape[0] - matrix.shape[0]), mode="edge")
        return make_csr(indptr, matrix.indices, matrix.data.astype(self.dtype, copy=False), shape)

    def prefetch(self, slab: int) -> None:
        if slab >= len(self._slabs):
            return
        for array in ("indices", "values"):
            name = slab_file(self.side, slab, array)
            if name in self.store._checked:  # otherwise the check will read it
                mapped = getattr(self.store._vector(name, ARRAYS[array]), "_mmap", None)
                if mapped is not None and hasattr(mmap, "MADV_WILLNEED"):
                    mapped.madvise(mmap.MADV_WILLNEED)


class StoredSeen:
    """Items that users (rows of the matrix) have seen, read from a store on demand; serves as `Learned.seen`."""

    def __init__(self, matrix: StoreMatrix) -> None:
        self._matrix = matrix
        self._which = str(matrix.store.path), matrix.side, matrix.dtype, matrix.drop_zeros, matrix.more
        self.shape, self.nnz = matrix.shape, matrix.nnz

    @cached_property
    def _matrix(self) -> StoreMatrix:
        path, *which = self._which  # older pickles lack `more`
        return StoreMatrix(Store.open(path), *which)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the store, which is opened again at first use: a model works without it."""
        return {name: value for name, value in self.__dict__.items() if name != "_matrix"}

    def take_rows(self, rows: np.ndarray) -> sp.csr_array:
        """Entries of some users as int8 ones, shape (len(rows), n_items)."""
        return as_ones(self._matrix.take(rows), np.int8)

    def load(self) -> sp.csr_array:
        """All of them in memory, 5 bytes per entry."""
        way_out = "save the model with include_seen=False, and give score users="
        check_memory("a matrix of the seen items", 10 * self.nnz, way_out)
        return as_ones(self._matrix.load().csr, np.int8)
