"""Sparse layouts for users: the BALS tiled format, degree reordering, transposition.

The kernels are in ``_formats.pyx``, whose docstring has a picture of the BALS arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    checked_compressed,
    csr_arrays,
    index_pointer_dtype,
    make_csr,
)
from .errors import RatingsError

__all__ = ["BalsMatrix", "Reordered", "degree_order", "reorder", "transpose"]

MAX_SEGMENTS = 2**36
"""Segments of one BalsMatrix: 256 GB of pointers, beyond which narrow tiles are a mistake."""


def _sorted_csr(csr: Any) -> sp.csr_array:
    """A float CSR matrix with sorted rows; layouts are built from what is there, so nothing is sorted silently."""
    if not (sp.issparse(csr) or hasattr(csr, "user_items") or isinstance(csr, np.ndarray)):
        raise TypeError(f"csr must be a SciPy sparse matrix, a dense array or Ratings, got {type(csr).__name__}")
    dtype = np.float64 if getattr(csr, "dtype", None) == np.float64 else np.float32
    matrix = as_csr(csr, name="csr", dtype=dtype)
    if sp.issparse(csr) and csr.format == "csr" and matrix.indices is not csr.indices:
        indptr, indices, _ = checked_compressed(csr, "csr")
        if _formats.row_order_status(indptr, indices)[0] == _formats.UNSORTED:
            falls = np.flatnonzero(np.diff(indices) < 0) + 1
            first = falls[~np.isin(falls, indptr)][0]
            row = int(np.searchsorted(indptr, first, side="right") - 1)
            raise RatingsError(
                f"csr has unsorted column indices in row {row} ({indices[first - 1]} before {indices[first]}); "
                "call csr.sort_indices() first"
            )
    return matrix


def transpose(csr: Any, *, num_threads: int | None = None) -> sp.csr_array:
    """The transpose of a CSR matrix as CSR, in parallel; the same result for any number of threads.

    Parameters
    ----------
    csr : sparse matrix, shape (n_rows, n_cols)
    num_threads : int, optional
        Default: all cores this process may use.

    Returns
    -------
    csr_array, shape (n_cols, n_rows)
    """
    csr = _sorted_csr(csr)
    arrays = _formats.transpose(*csr_arrays(csr), csr.shape[1], check_threads(num_threads))
    return make_csr(*arrays, (csr.shape[1], csr.shape[0]))


def degree_order(csr: sp.csr_array) -> np.ndarray:
    """Rows by descending number of entries, ties in row order (BALS Alg. 3, by counting sort).

    Returns
    -------
    int64 array, shape (n_rows,)
    """
    return _formats.degree_order(csr.indptr.astype(np.int64, copy=False))


@dataclass(frozen=True)
class Reordered:
    """A matrix whose rows and columns were sorted by degree, and the way back.

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
        return _inverse(self.row_order)

    @property
    def col_inverse(self) -> np.ndarray:
        """New position of each original column, int64, shape (n_cols,)."""
        return _inverse(self.col_order)

    def inverse_rows(self, X: np.ndarray) -> np.ndarray:
        """Rows of `X` (n_rows, ...), computed for `matrix`, in the original order."""
        return _restore("X", X, self.row_order)

    def inverse_cols(self, Y: np.ndarray) -> np.ndarray:
        """Rows of `Y` (n_cols, ...), one for each column of `matrix`, in the original order."""
        return _restore("Y", Y, self.col_order)


def _inverse(order: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order), dtype=order.dtype)
    return inverse


def _restore(name: str, values: np.ndarray, order: np.ndarray) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim == 0 or len(values) != len(order):
        raise ValueError(
            f"{name} has shape {values.shape}; expected {len(order)} rows, one for each reordered position"
        )
    restored = np.empty_like(values)
    restored[order] = values
    return restored


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


class BalsMatrix:
    """A sparse matrix in the BALS blocked format (Chen et al., IEEE TPDS 2021, section 4.1); see `from_csr`.

    Tiles are ``tile_rows`` x ``tile_cols``, numbered along each row block; a segment is one row of one tile. Example
    (the first row block of the paper's Fig. 6, ``tile_rows=2``, ``tile_cols=3``)::

              c0 c1 c2 | c3 c4 c5        values       3 1 2 4 | 2 5    tile by tile, row by row
        r0     3  .  1 |  .  2  .        tile_colidx  0 2 1   | 4 3    distinct columns by first appearance
        r1     2  4  . |  5  .  .        tile_ptr     0         3   5
                                         seg_colidx   0 1 0 2 | 0 1    position within the tile's columns
                                         seg_ptr      0   2     4 5 6

    Attributes
    ----------
    values : float32 or float64 array, shape (nnz,)
        Entries, tile by tile, in a tile row by row.
    tile_colidx : int32 array, shape (nnz - redundancy,)
        Columns each tile needs, once each, in order of first appearance.
    tile_ptr : int32 or int64 array, shape (n_tiles + 1,)
        Where each tile starts in `tile_colidx`; equal neighbours mark a vacant tile.
    seg_colidx : int32 array, shape (nnz,)
        For each entry the position of its column among its tile's columns.
    seg_ptr : int32 or int64 array, shape (n_rows * n_tile_cols + 1,)
        Where each segment starts in `values` and `seg_colidx`; equal neighbours mark a vacant segment.
    shape : (n_rows, n_cols)
    tile_rows, tile_cols : int
        Tile height and width (the paper's xb and yb).
    """

    def __init__(
        self,
        values: np.ndarray,
        tile_colidx: np.ndarray,
        tile_ptr: np.ndarray,
        seg_colidx: np.ndarray,
        seg_ptr: np.ndarray,
        shape: tuple[int, int],
        tile_rows: int,
        tile_cols: int,
    ) -> None:
        self.values = values
        self.tile_colidx = tile_colidx
        self.tile_ptr = tile_ptr
        self.seg_colidx = seg_colidx
        self.seg_ptr = seg_ptr
        self.shape = shape
        self.tile_rows = tile_rows
        self.tile_cols = tile_cols

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
            Unsorted or corrupt CSR.
        ValueError
            A tile size below 1, or tiles so narrow that there are more than `MAX_SEGMENTS` segments.
        """
        csr = _sorted_csr(csr)
        n_rows, n_cols = csr.shape
        tile_rows = check_int("tile_rows", tile_rows, 1, MAX_AXIS)
        tile_cols = check_int("tile_cols", tile_cols, 1, MAX_AXIS)
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
            *csr_arrays(csr), n_cols, tile_rows, tile_cols, seg_ptr, tile_ptr, check_threads(num_threads)
        )
        return cls(values, tile_colidx, tile_ptr, seg_colidx, seg_ptr, (n_rows, n_cols), tile_rows, tile_cols)

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return len(self.values)

    @property
    def redundancy(self) -> int:
        """Column loads that tiles save: nnz minus the length of `tile_colidx` (section 4.1.1)."""
        return self.nnz - len(self.tile_colidx)

    @property
    def nbytes(self) -> int:
        """Bytes of the five arrays."""
        return sum(a.nbytes for a in (self.values, self.tile_colidx, self.tile_ptr, self.seg_colidx, self.seg_ptr))

    def statistics(self) -> dict[str, float]:
        """Counts that tell whether tiles pay: vacancies (the paper's table 3), reuse, and bytes against CSR.

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
        """The matrix it was built from, bit for bit.

        Returns
        -------
        csr_array, shape (n_rows, n_cols)
        """
        arrays = _formats.bals_to_csr(
            self.values,
            self.seg_colidx,
            self.tile_colidx,
            self.seg_ptr,
            self.tile_ptr,
            *self.shape,
            self.tile_rows,
            self.tile_cols,
            check_threads(num_threads),
        )
        return make_csr(*arrays, self.shape)

    def __repr__(self) -> str:
        return (
            f"BalsMatrix(shape={self.shape}, nnz={self.nnz}, tiles of {self.tile_rows} x {self.tile_cols}, "
            f"reuse factor {self.nnz / max(len(self.tile_colidx), 1):.2f})"
        )
