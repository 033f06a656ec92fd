"""Ratings cut into slabs of consecutive rows, for solvers that do not hold all ratings at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import scipy.sparse as sp

from ..core.sparse import columns_of, csr_of, rows_of, stacked
from ..core.validate import csr_arrays, make_csr


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
        """Ask the system to read a slab ahead, if it is in a file."""


def take_slab_rows(slabs: Slabs, rows: np.ndarray) -> sp.csr_array:
    """Entries of some rows."""
    if not len(rows):
        return csr_of(np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, slabs.dtype), slabs.shape[1])
    places = np.searchsorted(slabs.bounds, rows, side="right") - 1
    parts = {int(k): slabs.matrix(int(k)) for k in np.unique(places)}
    starts = slabs.bounds[places].tolist()
    found = [
        rows_of(parts[k], row - first, row - first + 1)
        for k, row, first in zip(places.tolist(), rows.tolist(), starts, strict=True)
    ]
    return stacked(found)


def slab_bounds(degrees: np.ndarray, entries: int, rows: int | None = None) -> np.ndarray:
    """Cut rows into slabs of at most `entries` entries; a row counts as one more, and a longer row is a slab alone.

    Parameters
    ----------
    degrees : int array, shape (n_rows,)
    entries : int
    rows : int, optional
        Maximum rows of a slab.

    Returns
    -------
    int64 array, shape (n_slabs + 1,)
    """
    cost = np.concatenate(([0], np.cumsum(np.asarray(degrees, dtype=np.int64) + 1)))
    bounds = [0]
    while bounds[-1] < len(degrees):
        start = bounds[-1]
        stop = int(np.searchsorted(cost, cost[start] + entries, side="right")) - 1
        bounds.append(max(start + 1, stop if rows is None else min(stop, start + rows)))
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
    def cut(cls, csr: sp.csr_array, entries: int, rows: int | None = None) -> MemorySlabs:
        """Slabs of about `entries` entries; see `slab_bounds`."""
        return cls(csr, slab_bounds(np.diff(csr.indptr), entries, rows))

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

    def matrix(self, slab: int) -> sp.csr_array:
        """Rows of a slab; values and indices are views."""
        return rows_of(self.csr, *self.bounds[slab : slab + 2].tolist())

    def prefetch(self, slab: int) -> None:
        """Nothing to read ahead."""


class RangeSlabs:
    """Slabs of some consecutive rows of other slabs, such as the rows of a rank.

    Parameters
    ----------
    source : Slabs
    first, last : int
        The rows from `first` to before `last`.
    entries, rows : int, optional
        Maximum entries and rows of a slab, which cut those of the source further; see `slab_bounds`.
    """

    def __init__(
        self, source: Slabs, first: int, last: int, entries: int | None = None, rows: int | None = None
    ) -> None:
        self.source, self.first, self.last = source, first, last
        self.shape = (last - first, source.shape[1])
        self.dtype = source.dtype
        self.degrees = source.degrees[first:last]
        self.nnz = int(self.degrees.sum())
        inside = (source.bounds > first) & (source.bounds < last)
        bounds = np.unique(np.concatenate(([first], source.bounds[inside], [last]))).astype(np.int64) - first
        if entries is not None:
            finer = [slab_bounds(self.degrees[a:b], entries, rows) + a for a, b in pairwise(bounds)]
            bounds = np.unique(np.concatenate([bounds, *finer]))
        self.bounds = bounds
        self._slab_of = np.searchsorted(source.bounds, first + bounds[:-1], side="right") - 1
        self._at_hand: tuple[int, sp.csr_array] | None = None

    def cut(self, entries: int, rows: int | None = None) -> RangeSlabs:
        """The same rows in slabs of at most this many entries and rows."""
        return RangeSlabs(self.source, self.first, self.last, entries, rows)

    def matrix(self, slab: int) -> sp.csr_array:
        """Rows of a slab; keeps entries that the source converts while reading, for the next slab."""
        number = int(self._slab_of[slab])
        if self._at_hand is None or self._at_hand[0] != number:
            self._at_hand = None  # frees it before the next one is read
            self._at_hand = number, self.source.matrix(number)
        start = self.first - int(self.source.bounds[number])
        return rows_of(self._at_hand[1], *(self.bounds[slab : slab + 2] + start).tolist())

    def release(self) -> None:
        """Keep no slab of the source."""
        self._at_hand = None

    def prefetch(self, slab: int) -> None:
        """Ask the source to read ahead, unless it has already."""
        if slab < len(self._slab_of) and (not slab or self._slab_of[slab] != self._slab_of[slab - 1]):
            self.source.prefetch(int(self._slab_of[slab]))

    def load(self) -> sp.csr_array:
        """All rows in memory."""
        return loaded(self)


class ColumnSlabs:
    """Some columns of ranges of rows of other slabs, one range after the other, for shared rows (`RankLayout.cut`).

    The constructor reads all of them once, to count entries.

    Parameters
    ----------
    source : Slabs
    ranges : sequence of (first, last)
        Rows.
    columns : (first, last)
        The first one becomes column 0.

    Attributes
    ----------
    shape, dtype, nnz, degrees
        Of these rows and columns, as of `Slabs`.
    """

    def __init__(self, source: Slabs, ranges: Sequence[tuple[int, int]], columns: tuple[int, int]) -> None:
        self.dtype, self._columns = source.dtype, columns
        self._parts = [RangeSlabs(source, *rows) for rows in ranges]
        self._starts = np.cumsum([0, *(part.shape[0] for part in self._parts)]).tolist()
        self.shape = (self._starts[-1], columns[1] - columns[0])
        pieces = self.rows(0, self.shape[0])
        self.degrees = np.concatenate([np.zeros(0, np.int64), *(np.diff(piece.indptr) for piece in pieces)])
        self._release()
        self.nnz = int(self.degrees.sum())

    def rows(self, first: int, last: int) -> Iterator[sp.csr_array]:
        """The rows from `first` to before `last`, one piece per slab; the next one is read ahead."""
        for part, start in zip(self._parts, self._starts, strict=False):
            at, stop = max(first - start, 0), min(last - start, part.shape[0])
            while at < stop:
                slab = int(np.searchsorted(part.bounds, at, side="right")) - 1
                begin, end = part.bounds[slab : slab + 2].tolist()
                part.prefetch(slab + 1)
                yield columns_of(rows_of(part.matrix(slab), at - begin, min(stop, end) - begin), *self._columns)
                at = end

    def load(self) -> sp.csr_array:
        """All rows in memory."""
        found = _filled(self, self.rows(0, self.shape[0]))
        self._release()
        return found

    def _release(self) -> None:
        """Drop the slabs kept for each range."""
        for part in self._parts:
            part.release()


def loaded(slabs: Slabs) -> sp.csr_array:
    """All rows of slabs as one matrix in memory."""
    return _filled(slabs, (slabs.matrix(slab) for slab in range(len(slabs.bounds) - 1)))


def _filled(slabs: Slabs | ColumnSlabs, pieces: Iterable[sp.csr_array]) -> sp.csr_array:
    """All rows of slabs, from consecutive pieces."""
    indices, data = np.empty(slabs.nnz, dtype=np.int32), np.empty(slabs.nnz, dtype=slabs.dtype)
    at = 0
    for piece in pieces:
        _, columns, values = csr_arrays(piece)
        indices[at : at + len(columns)], data[at : at + len(columns)] = columns, values
        at += len(columns)
    indptr = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(slabs.degrees)))
    return make_csr(indptr, indices, data, slabs.shape)


def magnitudes(values: np.ndarray) -> np.ndarray:
    """Smallest and largest absolute value; empty for no values."""
    if not len(values):
        return values
    sizes = np.abs(values)
    return np.array([sizes.min(), sizes.max()])
