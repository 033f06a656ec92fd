"""Ratings cut into slabs of consecutive rows: what solvers read that do not hold all ratings at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy.sparse as sp

from .._validate import csr_arrays, make_csr


class Slabs(Protocol):
    """One orientation of the ratings, slab by slab."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n_rows, n_fixed)."""

    @property
    def nnz(self) -> int:
        """Entries."""

    @property
    def dtype(self) -> np.dtype:
        """Of the values: float32 or float64."""

    @property
    def bounds(self) -> np.ndarray:
        """Rows ``bounds[k] ... bounds[k + 1] - 1`` are slab k; int64, shape (n_slabs + 1,)."""

    @property
    def degrees(self) -> np.ndarray:
        """Entries of each row, int64, shape (n_rows,)."""

    def matrix(self, slab: int) -> sp.csr_array:
        """Rows of a slab, canonical; its arrays may be mapped from a file and cannot be written to."""

    def prefetch(self, slab: int) -> None:
        """Have the system read a slab ahead, if it lies in a file."""

    @property
    def ends(self) -> np.ndarray:
        """Smallest and largest absolute value of the entries, shape (2,); (0,) if there are none."""


def slab_bounds(degrees: np.ndarray, entries: int) -> np.ndarray:
    """Cut rows into slabs of at most `entries` entries; a row counts as one more, and one beyond the limit is alone.

    Parameters
    ----------
    degrees : int array, shape (n_rows,)
    entries : int

    Returns
    -------
    int64 array, shape (n_slabs + 1,)
    """
    cost = np.concatenate(([0], np.cumsum(np.asarray(degrees, dtype=np.int64) + 1)))
    bounds = [0]
    while bounds[-1] < len(degrees):
        start = bounds[-1]
        stop = int(np.searchsorted(cost, cost[start] + entries, side="right")) - 1
        bounds.append(max(start + 1, stop))
    return np.array(bounds, dtype=np.int64)


def slab_entries(bounds: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Entries of each slab, int64."""
    before = np.concatenate(([0], np.cumsum(degrees)))
    return np.diff(before[bounds])


@dataclass(frozen=True)
class MemorySlabs:
    """Slabs of a matrix in memory: views.

    Parameters
    ----------
    csr : csr_array, shape (n_rows, n_fixed)
    bounds : int64 array
    """

    csr: sp.csr_array
    bounds: np.ndarray

    @classmethod
    def cut(cls, csr: sp.csr_array, entries: int) -> MemorySlabs:
        """Slabs of about `entries` entries."""
        return cls(csr, slab_bounds(np.diff(csr.indptr), entries))

    @property
    def shape(self) -> tuple[int, int]:
        """(n_rows, n_fixed)."""
        return self.csr.shape

    @property
    def nnz(self) -> int:
        """Entries."""
        return int(self.csr.nnz)

    @property
    def dtype(self) -> np.dtype:
        """Of the values."""
        return self.csr.dtype

    @property
    def degrees(self) -> np.ndarray:
        """Entries of each row."""
        return np.diff(csr_arrays(self.csr)[0])

    @property
    def ends(self) -> np.ndarray:
        """Smallest and largest absolute value."""
        return magnitudes(self.csr.data)

    def matrix(self, slab: int) -> sp.csr_array:
        """Rows of a slab; values and indices are views."""
        first, last = self.bounds[slab : slab + 2]
        indptr, indices, data = csr_arrays(self.csr)
        begin, end = indptr[first], indptr[last]
        shape = (int(last - first), self.shape[1])
        return make_csr(indptr[first : last + 1] - begin, indices[begin:end], data[begin:end], shape)

    def prefetch(self, slab: int) -> None:
        """Nothing to read ahead."""


def magnitudes(values: np.ndarray) -> np.ndarray:
    """Smallest and largest absolute value; empty for no values."""
    if not len(values):
        return values
    sizes = np.abs(values)
    return np.array([sizes.min(), sizes.max()])
