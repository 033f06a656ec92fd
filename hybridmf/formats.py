"""Sparse layouts for users: the BALS tiled format, degree reordering, transposition.

The kernels are in ``_formats.pyx``, whose docstring has a picture of the BALS arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp

from . import _formats
from .core.validate import (
    MAX_AXIS,
    as_csr,
    check_bool,
    check_int,
    check_threads,
    checked_pointer,
    csr_arrays,
    frozen,
    index_pointer_dtype,
    make_csr,
    owned,
    refuse_masked,
)
from .errors import RatingsError

__all__ = ["BalsMatrix", "Reordered", "degree_order", "reorder", "transpose"]

MAX_SEGMENTS = 2**36
"""Most segments of one BalsMatrix, whose pointers take 256 GB; more of them indicate tiles that are too narrow."""


def _sorted_csr(csr: Any) -> sp.csr_array:
    """A float CSR matrix with sorted rows; unsorted CSR raises an error instead of being sorted silently."""
    if not (sp.issparse(csr) or hasattr(csr, "user_items") or isinstance(csr, np.ndarray)):
        raise TypeError(f"csr must be a SciPy sparse matrix, a dense array or Ratings, got {type(csr).__name__}")
    dtype = np.float64 if getattr(csr, "dtype", None) == np.float64 else np.float32
    return as_csr(csr, name="csr", dtype=dtype, sort=False)


def transpose(csr: Any, *, num_threads: int | None = None) -> sp.csr_array:
    """Transpose a CSR matrix to CSR in parallel; the result does not depend on the number of threads.

    Parameters
    ----------
    csr : sparse matrix, shape (n_rows, n_cols)
    num_threads : int, optional
        Default: all cores this process may use.

    Returns
    -------
    csr_array, shape (n_cols, n_rows)
        float64 if `csr` is float64, else float32.

    Raises
    ------
    RatingsError, TypeError
        The CSR matrix is unsorted or corrupt, or `csr` is not a matrix.
    """
    csr = _sorted_csr(csr)
    arrays = _formats.transpose(*csr_arrays(csr), csr.shape[1], check_threads(num_threads))
    return make_csr(*arrays, (csr.shape[1], csr.shape[0]))


def degree_order(csr: Any) -> np.ndarray:
    """Rows by descending number of entries, ties in row order (BALS Alg. 3, by counting sort).

    Parameters
    ----------
    csr : CSR matrix or Ratings, shape (n_rows, n_cols)
        Only its `indptr` is read.

    Returns
    -------
    int64 array, shape (n_rows,)

    Raises
    ------
    RatingsError
        `indptr` contradicts the shape or the number of entries.
    TypeError
        `csr` is not a CSR matrix.
    """
    csr = getattr(csr, "user_items", csr)
    if getattr(csr, "format", None) != "csr":
        raise TypeError(f"csr must be a CSR matrix or Ratings, got {type(csr).__name__}; call its tocsr() first")
    pointer = checked_pointer(csr.indptr, csr.shape[0], "csr")
    if pointer[-1] > len(csr.indices):
        raise RatingsError(f"csr is corrupt: indptr ends at {pointer[-1]}, but there are {len(csr.indices)} indices")
    return _formats.degree_order(pointer)


@dataclass(frozen=True)
class Reordered:
    """A matrix with rows and columns sorted by degree, and the inverse permutations.

    Attributes
    ----------
    matrix : csr_array, shape (n_rows, n_cols)
        ``matrix[k, l] == original[row_order[k], col_order[l]]``.
    row_order, col_order : int64 array, shape (n_rows,) and (n_cols,)
        The original position of each row and column.
    """

    matrix: sp.csr_array
    row_order: np.ndarray
    col_order: np.ndarray

    @property
    def row_inverse(self) -> np.ndarray:
        """New position of each original row, int64, shape (n_rows,)."""
        return np.argsort(self.row_order)

    @property
    def col_inverse(self) -> np.ndarray:
        """New position of each original column, int64, shape (n_cols,)."""
        return np.argsort(self.col_order)

    def inverse_rows(self, X: np.ndarray) -> np.ndarray:
        """Reorder rows of `X` (n_rows, ...), computed for `matrix`, to the original order."""
        return _restore("X", X, self.row_order)

    def inverse_cols(self, Y: np.ndarray) -> np.ndarray:
        """Reorder rows of `Y` (n_cols, ...), one for each column of `matrix`, to the original order."""
        return _restore("Y", Y, self.col_order)


def _restore(name: str, values: np.ndarray, order: np.ndarray) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim == 0 or len(values) != len(order):
        raise ValueError(
            f"{name} has shape {values.shape}; expected {len(order)} rows, one for each reordered position"
        )
    return values[np.argsort(order)]


def reorder(csr: Any, rows: bool = True, cols: bool = True, *, num_threads: int | None = None) -> Reordered:
    """Sort rows and columns by descending number of entries (BALS section 4.4, Alg. 3), in O(nnz).

    Parameters
    ----------
    csr : sparse matrix, shape (n_rows, n_cols)
    rows, cols : bool
        Which axes to sort; the other keeps its order.
    num_threads : int, optional

    Returns
    -------
    Reordered
        Ties keep their original order, so the result is unique.
    """
    csr = _sorted_csr(csr)
    n_rows, n_cols = csr.shape
    threads = check_threads(num_threads)
    row_order, col_order = np.arange(n_rows, dtype=np.int64), np.arange(n_cols, dtype=np.int64)
    arrays = csr_arrays(csr)
    if check_bool("rows", rows):
        row_order = _formats.degree_order(arrays[0])
        arrays = _formats.take_rows(*arrays, row_order, threads)
    if check_bool("cols", cols):
        # Sorting the transpose's rows and transposing back leaves every row sorted without comparing anything.
        columns = _formats.transpose(*arrays, n_cols, threads)
        col_order = _formats.degree_order(columns[0])
        arrays = _formats.transpose(*_formats.take_rows(*columns, col_order, threads), n_rows, threads)
    return Reordered(make_csr(*arrays, (n_rows, n_cols)), row_order, col_order)


@dataclass(frozen=True, eq=False, repr=False)
class BalsMatrix:
    """A sparse matrix in the BALS blocked format (Chen et al., IEEE TPDS 2021, section 4.1); see `from_csr`.

    The arrays are read-only copies of the arguments, validated for consistency.

    Tiles are ``tile_rows`` x ``tile_cols``, numbered along each row block; a segment is one row of one tile. Example
    (the first row block of the paper's Fig. 6, ``tile_rows=2``, ``tile_cols=3``)::

              c0 c1 c2 | c3 c4 c5    values       3 1 2 4 | 2 5    tile by tile, row by row
        r0     3  .  1 |  .  2  .    tile_colidx  0 2 1   | 4 3    by first appearance
        r1     2  4  . |  5  .  .    tile_ptr     0         3   5
                                     seg_colidx   0 1 0 2 | 0 1    position in the tile
                                     seg_ptr      0   2     4 5 6

    Attributes
    ----------
    values : float32 or float64 array, shape (nnz,)
        Entries, tile by tile, and row by row within a tile.
    tile_colidx : int32 array, shape (nnz - redundancy,)
        Distinct columns of each tile in order of first appearance.
    tile_ptr : int32 or int64 array, shape (n_tiles + 1,)
        Start of each tile in `tile_colidx`; equal neighbours mark a vacant tile.
    seg_colidx : int32 array, shape (nnz,)
        For each entry, the position of its column among the columns of its tile.
    seg_ptr : int32 or int64 array, shape (n_rows * n_tile_cols + 1,)
        Start of each segment in `values` and `seg_colidx`; equal neighbours mark a vacant segment.
    shape : (n_rows, n_cols)
    tile_rows, tile_cols : int
        Tile height and width (the paper's xb and yb).

    Raises
    ------
    TypeError, ValueError
        A shape, a tile size or an array has the wrong type.
    RatingsError
        The arrays contradict each other or the shape.
    """

    values: np.ndarray
    tile_colidx: np.ndarray
    tile_ptr: np.ndarray
    seg_colidx: np.ndarray
    seg_ptr: np.ndarray
    shape: tuple[int, int]
    tile_rows: int
    tile_cols: int

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)
        if not isinstance(self.shape, (tuple, list)) or len(self.shape) != 2:
            raise ValueError(f"shape must be (n_rows, n_cols), got {self.shape!r}")
        set_field("shape", tuple(check_int(f"shape[{axis}]", self.shape[axis], 0, MAX_AXIS) for axis in (0, 1)))
        set_field("tile_rows", check_int("tile_rows", self.tile_rows, 1, MAX_AXIS))
        set_field("tile_cols", check_int("tile_cols", self.tile_cols, 1, MAX_AXIS))
        for name, dtypes in _BALS_DTYPES.items():
            set_field(name, _bals_array(name, getattr(self, name), dtypes))
        problem = _bals_fault(self)
        if problem:
            raise RatingsError(f"{problem}; BalsMatrix.from_csr builds arrays that fit together")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def from_csr(
        cls, csr: Any, tile_rows: int = 256, tile_cols: int = 192, num_threads: int | None = None
    ) -> BalsMatrix:
        """Build the five arrays from a CSR matrix with sorted rows, in parallel over row blocks.

        Parameters
        ----------
        csr : sparse matrix, shape (n_rows, n_cols)
            CSR must have sorted column indices; other formats are converted.
        tile_rows, tile_cols : int
            Tile height and width.
        num_threads : int, optional

        Returns
        -------
        BalsMatrix
            The same arrays for any number of threads.

        Raises
        ------
        RatingsError
            The CSR matrix is unsorted or corrupt.
        ValueError
            A tile size is below 1, or tiles are so narrow that there are more than `MAX_SEGMENTS` segments.
        """
        sizes = check_int("tile_rows", tile_rows, 1, MAX_AXIS), check_int("tile_cols", tile_cols, 1, MAX_AXIS)
        return tiled(_sorted_csr(csr), *sizes, check_threads(num_threads))

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return len(self.values)

    @property
    def redundancy(self) -> int:
        """Column loads saved by tiles: nnz minus the length of `tile_colidx` (section 4.1.1)."""
        return self.nnz - len(self.tile_colidx)

    @property
    def nbytes(self) -> int:
        """Bytes of the five arrays."""
        return sum(a.nbytes for a in (self.values, self.tile_colidx, self.tile_ptr, self.seg_colidx, self.seg_ptr))

    def statistics(self) -> dict[str, float]:
        """Statistics that show whether tiles pay off: vacancies (the paper's table 3), reuse, and bytes versus CSR.

        Returns
        -------
        dict
            ``tiles``, ``vacant_tiles``, ``vacant_tile_share`` (of all tiles); ``segments``, ``vacant_segments``
            (outside vacant tiles), ``vacant_segment_share`` (of all segments); ``redundancy``; ``reuse_factor``
            (entries served by each loaded column, nnz / len(tile_colidx)); ``bals_bytes``, ``csr_bytes``.
        """
        n_tiles, n_segments = len(self.tile_ptr) - 1, len(self.seg_ptr) - 1
        vacant_tiles, vacant_segments = _formats.bals_vacancies(
            self.seg_ptr, self.tile_ptr, self.shape[0], self.tile_rows
        )
        return {
            "tiles": n_tiles,
            "vacant_tiles": vacant_tiles,
            "vacant_tile_share": vacant_tiles / max(n_tiles, 1),
            "segments": n_segments,
            "vacant_segments": vacant_segments,
            "vacant_segment_share": vacant_segments / max(n_segments, 1),
            "redundancy": self.redundancy,
            "reuse_factor": self.nnz / max(len(self.tile_colidx), 1),
            "bals_bytes": self.nbytes,
            "csr_bytes": self.values.nbytes + 4 * self.nnz + self.seg_ptr.itemsize * (self.shape[0] + 1),
        }

    def to_csr(self, *, num_threads: int | None = None) -> sp.csr_array:
        """Convert back to the original matrix, bit for bit.

        Returns
        -------
        csr_array, shape (n_rows, n_cols)
        """
        arrays = (self.values, self.seg_colidx, self.tile_colidx, self.seg_ptr, self.tile_ptr)
        sizes = (self.shape, (self.tile_rows, self.tile_cols))
        return make_csr(*_formats.bals_to_csr(*arrays, *sizes, check_threads(num_threads)), self.shape)

    def __repr__(self) -> str:
        return (
            f"BalsMatrix(shape={self.shape}, nnz={self.nnz}, tiles of {self.tile_rows} x {self.tile_cols}, "
            f"reuse factor {self.nnz / max(len(self.tile_colidx), 1):.2f})"
        )


def tiled(csr: sp.csr_array, tile_rows: int, tile_cols: int, num_threads: int) -> BalsMatrix:
    """`BalsMatrix.from_csr` for a validated matrix and validated sizes."""
    n_rows, n_cols = csr.shape
    n_tile_cols, n_blocks = -(-n_cols // tile_cols), -(-n_rows // tile_rows)
    if n_rows * n_tile_cols > MAX_SEGMENTS:
        raise ValueError(
            f"tile_cols={tile_cols} gives {n_rows} x {n_tile_cols} segments, more than {MAX_SEGMENTS}: their "
            "pointers alone would fill the memory; choose wider tiles"
        )
    offsets = index_pointer_dtype(csr.nnz)
    seg_ptr = np.empty(n_rows * n_tile_cols + 1, dtype=offsets)
    tile_ptr = np.empty(n_blocks * n_tile_cols + 1, dtype=offsets)
    values, seg_colidx, tile_colidx = _formats.build_bals(
        *csr_arrays(csr), n_cols, (tile_rows, tile_cols), seg_ptr, tile_ptr, num_threads
    )
    made = object.__new__(BalsMatrix)  # validation, which these arrays do not need, takes as long as building them
    for name, array in zip(_BALS_DTYPES, (values, tile_colidx, tile_ptr, seg_colidx, seg_ptr), strict=True):
        object.__setattr__(made, name, frozen(array))
    for name, value in (("shape", (n_rows, n_cols)), ("tile_rows", tile_rows), ("tile_cols", tile_cols)):
        object.__setattr__(made, name, value)
    return made


_BALS_DTYPES: dict[str, tuple[type, ...]] = {
    "values": (np.float32, np.float64),
    "tile_colidx": (np.int32,),
    "tile_ptr": (np.int32, np.int64),
    "seg_colidx": (np.int32,),
    "seg_ptr": (np.int32, np.int64),
}


def _bals_array(name: str, array: Any, dtypes: tuple[type, ...]) -> np.ndarray:
    refuse_masked(name, array)
    array = np.asarray(array)
    if array.dtype not in dtypes or array.ndim != 1:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be a vector of {wanted}, got {array.dtype} of shape {array.shape}")
    return owned(array)


def _bals_fault(bals: BalsMatrix) -> str | None:
    """Describe the first inconsistency of the arrays of a BalsMatrix; None if they describe a canonical matrix."""
    n_rows, n_cols = bals.shape
    across, down = -(-n_cols // bals.tile_cols), -(-n_rows // bals.tile_rows)
    lengths = {"tile_ptr": down * across + 1, "seg_ptr": n_rows * across + 1, "seg_colidx": len(bals.values)}
    for name, length in lengths.items():
        if len(getattr(bals, name)) != length:
            return f"{name} has {len(getattr(bals, name))} elements, expected {length}"
    for name, end in (("tile_ptr", len(bals.tile_colidx)), ("seg_ptr", len(bals.values))):
        pointer = getattr(bals, name)
        if pointer[0] != 0 or pointer[-1] != end or np.any(pointer[1:] < pointer[:-1]):
            return f"{name} must ascend from 0 to {end}"
    # segments lie row block by row block, in it tile by tile, in it row by row
    heights = np.minimum(bals.tile_rows, n_rows - np.arange(down, dtype=np.int64) * bals.tile_rows)
    tile_of_segment = np.repeat(np.arange(down * across), np.repeat(heights, across))
    tile = np.repeat(tile_of_segment, np.diff(bals.seg_ptr))  # of each entry
    place = bals.tile_ptr[tile].astype(np.int64) + bals.seg_colidx
    if np.any((bals.seg_colidx < 0) | (place >= bals.tile_ptr[tile + 1])):
        return "seg_colidx has a position beyond the columns of its tile"
    first = np.repeat(np.arange(len(bals.tile_ptr) - 1) % max(across, 1), np.diff(bals.tile_ptr)) * bals.tile_cols
    if np.any((bals.tile_colidx < first) | (bals.tile_colidx >= np.minimum(first + bals.tile_cols, n_cols))):
        return "tile_colidx has a column outside its tile"
    columns = bals.tile_colidx[place]
    same_segment = np.ones(len(columns), dtype=bool)
    same_segment[bals.seg_ptr[:-1][np.diff(bals.seg_ptr) > 0]] = False
    if np.any(same_segment[1:] & (columns[1:] <= columns[:-1])):
        return "the columns of a segment must ascend"
    return None
