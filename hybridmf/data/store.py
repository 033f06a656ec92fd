"""Ratings on disk, larger than memory if need be: a folder that a fit reads slab by slab (cuMF section 4.4).

    store/
      manifest.json                    sizes, bounds of slabs, bytes and CRC-32 of each file; written last
      user-000000.indptr.npy           int64    rows of a slab of users, from 0
      user-000000.indices.npy          int32    items, ascending within a row
      user-000000.values.npy           float32
      user-000001. ...
      item-000000. ...                 the transpose, cut into slabs of items
      user-degrees.npy, item-degrees.npy                      int64    entries of each row
      user-degrees-nonzero.npy, item-degrees-nonzero.npy      the same without explicit zeros, where there are any
      user_ids.npy, item_ids.npy       labels, as model files have them: int64, uint64, or a JSON list as bytes

Everything is plain .npy. `hybridmf.data.convert` writes it.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from .. import _formats
from ..core.objective import SIDES, Side, other_side
from ..core.sparse import take_rows
from ..core.system import available_memory
from ..core.validate import check_choice, check_path, csr_arrays, make_csr
from ..errors import MemoryBudgetError, StoreError
from ..ratings import Ratings
from .labels import decode_labels
from .slabs import loaded, slab_entries

logger = logging.getLogger("hybridmf")

FORMAT, VERSION = "hybridmf-store", 1
MANIFEST, UNFINISHED = "manifest.json", "unfinished.json"
ARRAYS = {"indptr": np.int64, "indices": np.int32, "values": np.float32}
CHUNK = 1 << 22
"""Bytes read at a time to check a file."""

PARSING = threading.Lock()
"""Held while NumPy reads what is written before an array."""

AGAIN = "convert the ratings again (hybridmf convert RATINGS STORE --overwrite)"


def slab_file(side: Side, slab: int, array: str) -> str:
    """Name of a file of a slab."""
    return f"{side}-{slab:06d}.{array}.npy"


def seal(manifest: dict[str, Any]) -> str:
    """CRC-32 of a manifest without its checksum."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def file_checksum(path: str | os.PathLike[str]) -> str:
    """CRC-32 of a file, eight hexadecimal digits."""
    crc = 0
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


@dataclass(frozen=True)
class Slab:
    """Consecutive rows of one side of a store.

    Attributes
    ----------
    store : Store
    side : {"user", "item"}
    number : int
    start, stop : int
        Its rows.
    """

    store: Store = field(repr=False)
    side: Side
    number: int
    start: int
    stop: int

    def matrix(self) -> sp.csr_array:
        """Its rows, canonical CSR float32, shape (stop - start, n_fixed), mapped from the files.

        Raises
        ------
        StoreError
            A file is not what was written; looked at when it is read for the first time.
        """
        return self.store._slab_matrix(self)


class Store:
    """Ratings in a folder; `Store.open` reads what `convert` wrote. Estimators take it in place of `Ratings`.

    Nothing of the size of the ratings is held in memory: slabs are mapped when somebody asks for them.

    Attributes
    ----------
    path : Path
    shape : (n_users, n_items)
    nnz : int
        Entries, explicit zeros among them.
    user_ids, item_ids : ndarray or None
        Labels.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self._manifest = path, manifest
        self.shape: tuple[int, int] = (int(manifest["shape"][0]), int(manifest["shape"][1]))
        self.nnz = int(manifest["nnz"])
        self._bounds = {side: np.array(manifest["bounds"][side], dtype=np.int64) for side in SIDES}
        self._checked: dict[str, tuple[int, int]] = {}  # files whose checksum was right: their size and time then
        self._sound: set[tuple[str, int]] = set()  # slabs whose arrays fit together
        self._layouts: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}  # of arrays that were mapped before

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Open a store; sizes of all files are checked, contents when they are read.

        Raises
        ------
        FileNotFoundError, NotADirectoryError
        StoreError
            An interrupted conversion, a file that is missing or has another size, or another folder.
        """
        folder = Path(check_path("path", path))
        if not folder.exists():
            raise FileNotFoundError(errno.ENOENT, "there is no such store; hybridmf convert makes one", str(path))
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a store is a folder, this is a file", str(path))
        if not (folder / MANIFEST).exists():
            if (folder / UNFINISHED).exists():
                raise StoreError(
                    f"{str(path)!r} is an unfinished conversion; run the same hybridmf convert again, which goes on "
                    "where it stopped, or delete the folder"
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
        try:
            labels = decode_labels(name, np.array(self._array(f"{name}.npy")))
        except (TypeError, ValueError) as error:
            raise self._error(f"{name}.npy", f"holds no labels ({error})") from error
        count = self.shape[name != "user_ids"]
        if len(labels) != count:
            raise self._error(f"{name}.npy", f"has {len(labels)} labels for {count} rows")
        return labels

    def slabs(self, side: Side = "user") -> list[Slab]:
        """Slabs of one side, in the order of their rows."""
        check_choice("side", side, SIDES)
        bounds = self._bounds[side].tolist()
        return [Slab(self, side, k, *ends) for k, ends in enumerate(pairwise(bounds))]

    def verify(self) -> None:
        """Read every file and compare it with the manifest.

        Raises
        ------
        StoreError
            Names the first file that is not as it was written.
        """
        self._checked.clear()
        self._layouts.clear()
        self._sound.clear()
        for name in self._manifest["files"]:
            self._check_content(name)
        for side in SIDES:
            for slab in self.slabs(side):
                slab.matrix()

    # ------------------------------------------------------------------------------------------------ in memory

    @property
    def user_items(self) -> sp.csr_array:
        """All ratings as one matrix in memory, shape (n_users, n_items), made anew: for what cannot read slabs.

        Raises
        ------
        MemoryBudgetError
            They do not fit.
        """
        needed, free = 8 * self.nnz + 16 * self.n_users, available_memory()
        if free is not None and needed > free:
            raise MemoryBudgetError(
                f"the store {str(self.path)!r} needs {needed / 2**20:,.0f} MiB of memory as a matrix and "
                f"{free / 2**20:,.0f} MiB are free; ExplicitALS and ImplicitALS fit a store without loading it"
            )
        logger.info("loading the store %s into memory: %s entries", self.path, f"{self.nnz:,}")
        return StoreMatrix(self).load()

    def to_ratings(self) -> Ratings:
        """All ratings in memory, with their labels; the same as `Ratings.from_file` of what was converted."""
        return Ratings(self.user_items, self.user_ids, self.item_ids)

    # ------------------------------------------------------------------------------------------------ files

    def _error(self, name: str, problem: str) -> StoreError:
        way_out = AGAIN
        if self._was_replaced():
            way_out = "another conversion has replaced the store since it was opened: open it again (Store.open)"
        return StoreError(f"{str(self.path / name)!r} {problem}; {way_out}")

    def _was_replaced(self) -> bool:
        try:
            manifest = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            return bool(manifest["checksum"] != self.checksum)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _check_content(self, name: str) -> None:
        """Compare a file with its checksum: once, and again if it was written to since. Kernels trust what it holds."""
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

    def _array(self, name: str) -> np.ndarray:
        """Array of a file, mapped; checked at first need."""
        self._check_content(name)
        try:
            known = self._layouts.get(name)
            if known is not None:
                dtype, shape, offset = known
                return np.memmap(self.path / name, dtype, "r", offset, shape)
            # NumPy has Python parse what is written before an array, which not every Python can do in two threads
            with PARSING:
                try:
                    array = np.load(self.path / name, mmap_mode="r", allow_pickle=False)
                except ValueError:  # there is nothing to map in an array of length 0
                    return np.load(self.path / name, allow_pickle=False)
            if array.ndim == 1:
                self._layouts[name] = array.dtype, array.shape, array.offset
            return array
        except (OSError, ValueError) as error:
            raise self._error(name, f"is no array ({error})") from error

    def _slab_matrix(self, slab: Slab) -> sp.csr_array:
        indptr, indices, values = (self._slab_array(slab, array, np.dtype(dtype)) for array, dtype in ARRAYS.items())
        shape = (slab.stop - slab.start, self.shape[1 if slab.side == "user" else 0])
        if (slab.side, slab.number) not in self._sound:
            # kernels trust what they are given
            sound = indptr.shape == (shape[0] + 1,) and indptr[0] == 0 and bool(np.all(indptr[1:] >= indptr[:-1]))
            sound = sound and indptr[-1] == len(indices) == len(values)
            if not sound or not _formats.is_canonical(indptr, indices, values, shape[1]):
                raise self._error(slab_file(slab.side, slab.number, "indices"), "contradicts the files beside it")
            self._sound.add((slab.side, slab.number))
        return make_csr(indptr, indices, values, shape)

    def _slab_array(self, slab: Slab, array: str, dtype: np.dtype) -> np.ndarray:
        name = slab_file(slab.side, slab.number, array)
        found = self._array(name)
        if found.dtype != dtype or found.ndim != 1:
            raise self._error(name, f"holds {found.dtype} of {found.ndim} dimensions, expected a vector of {dtype}")
        return found.view(np.ndarray)

    def degrees(self, side: Side = "user", *, nonzero: bool = False) -> np.ndarray:
        """Entries of each row of a side, int64; with `nonzero` without explicit zeros."""
        check_choice("side", side, SIDES)
        name = f"{side}-degrees-nonzero.npy" if nonzero and self._manifest["zeros"] else f"{side}-degrees.npy"
        degrees = np.array(self._array(name), dtype=np.int64)
        if degrees.shape != (self.shape[side != "user"],):
            raise self._error(name, f"has shape {degrees.shape}")
        return degrees

    def __repr__(self) -> str:
        slabs = ", ".join(f"{len(self._bounds[side]) - 1} of {side}s" for side in SIDES)
        return (
            f"Store({str(self.path)!r}: {self.n_users:,} users x {self.n_items:,} items, {self.nnz:,} entries, "
            f"{self.nbytes / 1e6:,.1f} MB; slabs: {slabs})"
        )

    def __reduce__(self) -> Any:
        return Store.open, (str(self.path),)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        kind, version = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{str(path)!r} is no manifest of a store ({type(error).__name__}: {error}); {AGAIN}"
        ) from error
    if kind != FORMAT:
        raise StoreError(f"{str(path)!r} is a manifest of {kind!r}, not of a {FORMAT}")
    if version != VERSION:
        raise StoreError(
            f"{str(path)!r} has version {version!r}; this hybridmf reads version {VERSION}: upgrade hybridmf or {AGAIN}"
        )
    if manifest.get("checksum") != seal(manifest):
        raise StoreError(f"{str(path)!r} was altered: its checksum does not fit; {AGAIN}")
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


class StoreMatrix:
    """One orientation of a store as a fit reads it: `hybridmf.data.slabs.Slabs`, and what a matrix is asked for.

    Parameters
    ----------
    store : Store
    side : {"user", "item"}
        What rows are.
    dtype : dtype
        float32 or float64; values are converted as they are read.
    drop_zeros : bool
        Leave out explicit zeros.
    """

    def __init__(self, store: Store, side: Side = "user", dtype: Any = np.float32, drop_zeros: bool = False) -> None:
        self.store, self.side, self.dtype = store, side, np.dtype(dtype)
        manifest = store._manifest
        self.drop_zeros = drop_zeros and manifest["zeros"] > 0
        self.shape: tuple[int, int] = store.shape if side == "user" else (store.shape[1], store.shape[0])
        self.nnz = store.nnz - manifest["zeros"] if self.drop_zeros else store.nnz
        self.bounds = store._bounds[side]
        self._slabs = store.slabs(side)
        self._kind = "nonzero" if self.drop_zeros else "all"

    @cached_property
    def degrees(self) -> np.ndarray:
        """Entries of each row, int64, shape (n_rows,)."""
        return self.store.degrees(self.side, nonzero=self.drop_zeros)

    @property
    def indptr(self) -> np.ndarray:
        """Where each row would start in one matrix, int64, shape (n_rows + 1,)."""
        return np.concatenate(([0], np.cumsum(self.degrees)))

    @property
    def total(self) -> float:
        """Sum of the values as `_sparse.entry_sum` of all of them in user order has it."""
        return float(self.store._manifest["sums"][self._kind])

    @property
    def ends(self) -> np.ndarray:
        """Smallest and largest absolute value; empty if there are no entries."""
        return np.array(self.store._manifest["magnitudes"][self._kind], dtype=np.float64)

    @property
    def largest_slab(self) -> int:
        """Entries of the largest slab of either side."""
        sides = [self, self.transposed()]
        return max(int(slab_entries(each.bounds, each.degrees).max(initial=0)) for each in sides)

    def transposed(self) -> StoreMatrix:
        """The other orientation."""
        return StoreMatrix(self.store, other_side(self.side), self.dtype, self.drop_zeros)

    def matrix(self, slab: int) -> sp.csr_array:
        """Rows of a slab."""
        matrix = self._slabs[slab].matrix()
        if not self.drop_zeros and matrix.dtype == self.dtype:
            return matrix
        indptr, indices, data = csr_arrays(matrix)
        if self.drop_zeros:
            keep = data != 0
            indptr = np.concatenate(([0], np.cumsum(keep)))[indptr]
            indices, data = indices[keep], data[keep]
        return make_csr(indptr, indices, data.astype(self.dtype, copy=False), matrix.shape)

    def prefetch(self, slab: int) -> None:
        """Ask the system to read a slab's files ahead."""
        if slab >= len(self._slabs):
            return
        for array in ("indices", "values"):
            name = slab_file(self.side, slab, array)
            if name in self.store._checked:  # else the check reads it
                mapped = getattr(self.store._array(name), "_mmap", None)
                if mapped is not None and hasattr(mmap, "MADV_WILLNEED"):
                    mapped.madvise(mmap.MADV_WILLNEED)

    def matrices(self) -> Iterator[sp.csr_array]:
        """Slab after slab."""
        for slab in range(len(self._slabs)):
            yield self.matrix(slab)

    def load(self) -> sp.csr_array:
        """All rows in memory."""
        return loaded(self)


class StoredSeen:
    """What users have seen, read from a store when it is asked for; serves as `Learned.seen`.

    Parameters
    ----------
    matrix : StoreMatrix
        Rows are users.
    """

    def __init__(self, matrix: StoreMatrix) -> None:
        self._matrix = matrix
        self._which = str(matrix.store.path), matrix.side, matrix.dtype, matrix.drop_zeros
        self.shape, self.nnz = matrix.shape, matrix.nnz

    @cached_property
    def _matrix(self) -> StoreMatrix:
        path, side, dtype, drop_zeros = self._which
        return StoreMatrix(Store.open(path), side, dtype, drop_zeros)

    def __getstate__(self) -> dict[str, Any]:
        """Without the store, which is opened again at first need: a model is of use where it is not."""
        return {name: value for name, value in self.__dict__.items() if name != "_matrix"}

    def take_rows(self, rows: np.ndarray) -> sp.csr_array:
        """Entries of some users as int8 ones, shape (len(rows), n_items)."""
        bounds = self._matrix.bounds
        slab_of = np.searchsorted(bounds, rows, side="right") - 1
        order = np.argsort(slab_of, kind="stable")
        parts = []
        for slab in np.unique(slab_of):
            wanted = rows[order[slab_of[order] == slab]]
            parts.append(take_rows(self._matrix.matrix(int(slab)), wanted - bounds[slab]))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return take_rows(_stacked_pattern(parts, self.shape[1]), back)

    def load(self) -> sp.csr_array:
        """All of them in memory, 5 bytes an entry.

        Raises
        ------
        MemoryBudgetError
            They do not fit.
        """
        needed, free = 10 * self.nnz, available_memory()
        if free is not None and needed > free:
            raise MemoryBudgetError(
                f"what users have seen takes {needed / 2**20:,.0f} MiB of memory and {free / 2**20:,.0f} MiB are free; "
                "save the model with include_seen=False, and give score users="
            )
        return _stacked_pattern(list(self._matrix.matrices()), self.shape[1])


def _stacked_pattern(parts: list[sp.csr_array], n_items: int) -> sp.csr_array:
    """Rows of all parts, one after the other, as int8 ones."""
    indices = np.concatenate([part.indices for part in parts]) if parts else np.empty(0, np.int32)
    degrees = np.concatenate([np.diff(part.indptr) for part in parts]) if parts else np.empty(0, np.int64)
    indptr = np.concatenate(([0], np.cumsum(degrees, dtype=np.int64)))
    return make_csr(indptr, indices, np.ones(len(indices), dtype=np.int8), (len(degrees), n_items))
