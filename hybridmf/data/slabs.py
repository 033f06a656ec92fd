"""One orientation of the ratings in a fit, in slabs of consecutive rows for solvers that do not hold all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.sparse import columns_of, csr_of, rows_of, stacked, take_rows
from ..core.validate import csr_arrays, make_csr


class Orientation:
    """The ratings in one orientation, with a row for each user or for each item.

    `InMemory`, `hybridmf.data.store.StoreMatrix`, and a `Part` of these. On a GPU, `hybridmf.gpu.matrix.DeviceMatrix`
    takes its place.
    """

    shape: tuple[int, int]
    nnz: int
    dtype: Any  # of the values: float32 or float64
    bounds: np.ndarray  # rows ``bounds[k] ... bounds[k + 1] - 1`` are slab k; int64, shape (n_slabs + 1,)
    degrees: Any  # entries of each row, int64, shape (n_rows,)

    def matrix(self, slab: int) -> sp.csr_array:
        """Rows of a slab, canonical; its arrays may be mapped from a file and cannot be written to."""
        raise NotImplementedError

    def matrices(self) -> Iterator[sp.csr_array]:
        for slab in range(len(self.bounds) - 1):
            yield self.matrix(slab)

    def prefetch(self, slab: int) -> None:
        """Ask the system to read a slab ahead, if it is in a file."""

    def release(self) -> None:
        """Keep no slab that was read."""

    def part(self, ranges: Sequence[tuple[int, int]], columns: tuple[int, int] | None = None) -> Orientation:
        """Some ranges of rows, one after the other, and some columns, the first of which becomes column 0.

        Nothing is copied if these are consecutive rows; columns of a store are counted by reading the rows once.
        """
        if columns is None and list(ranges) == [(0, self.shape[0])]:
            return self
        return Part(self, ranges, columns)

    def cut(self, entries: int, rows: int | None = None) -> Orientation:
        """The same rows in slabs of at most this many entries and rows; see `slab_bounds`."""
        return Part(self, [(0, self.shape[0])], entries=entries, rows=rows)

    def rows(self, first: int, last: int) -> Iterator[sp.csr_array]:
        """The rows from `first` to before `last`, one matrix per slab; the next slab is read ahead."""
        while first < last:
            slab = int(np.searchsorted(self.bounds, first, side="right")) - 1
            begin, end = self.bounds[slab : slab + 2].tolist()
            self.prefetch(slab + 1)
            yield self._rows_of_slab(slab, first - begin, min(last, end) - begin)
            first = end

    def _rows_of_slab(self, slab: int, first: int, last: int) -> sp.csr_array:
        return rows_of(self.matrix(slab), first, last)

    def take(self, rows: np.ndarray) -> sp.csr_array:
        if not len(rows):
            return csr_of(np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, self.dtype), self.shape[1])
        slabs = np.searchsorted(self.bounds, rows, side="right") - 1
        order = np.argsort(slabs, kind="stable")
        parts = [take_rows(self.matrix(int(k)), rows[slabs == k] - self.bounds[k]) for k in np.unique(slabs)]
        places = np.empty_like(order)  # of the rows in these parts
        places[order] = np.arange(len(order))
        return take_rows(stacked(parts), places)

    def load(self) -> InMemory:
        """All rows in memory, in the same slabs."""
        indices, data = np.empty(self.nnz, dtype=np.int32), np.empty(self.nnz, dtype=self.dtype)
        at = 0
        for slab in self.rows(0, self.shape[0]):
            _, columns, values = csr_arrays(slab)
            indices[at : at + len(columns)], data[at : at + len(columns)] = columns, values
            at += len(columns)
        self.release()
        indptr = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(self.degrees)))
        return InMemory(make_csr(indptr, indices, data, self.shape), self.bounds)


class InMemory(Orientation):
    """A matrix in memory; its slabs are views. By default it is one slab."""

    def __init__(self, csr: sp.csr_array, bounds: np.ndarray | None = None) -> None:
        self.csr, self.shape, self.nnz, self.dtype = csr, csr.shape, int(csr.nnz), csr.dtype
        self.bounds = np.array([0, self.shape[0]], dtype=np.int64) if bounds is None else bounds

    @property
    def degrees(self) -> np.ndarray:
        return np.diff(csr_arrays(self.csr)[0])

    def matrix(self, slab: int) -> sp.csr_array:
        """Rows of a slab; values and indices are views."""
        return rows_of(self.csr, *self.bounds[slab : slab + 2].tolist())

    def part(self, ranges: Sequence[tuple[int, int]], columns: tuple[int, int] | None = None) -> InMemory:
        """See `Orientation.part`: several ranges, or some columns, are copied."""
        taken = [rows_of(self.csr, *each) for each in ranges]
        if columns is not None:
            taken = [columns_of(rows, *columns) for rows in taken]
        return InMemory(taken[0] if len(taken) == 1 else stacked(taken))

    def cut(self, entries: int, rows: int | None = None) -> InMemory:
        return type(self)(self.csr, slab_bounds(self.degrees, entries, rows))

    def rows(self, first: int, last: int) -> Iterator[sp.csr_array]:
        """The rows from `first` to before `last`, views, in one matrix."""
        yield rows_of(self.csr, first, last)

    def take(self, rows: np.ndarray) -> sp.csr_array:
        return take_rows(self.csr, rows)

    def load(self) -> InMemory:
        return self


class Part(Orientation):
    """Ranges of rows of a stored orientation, and some of its columns, read from there; see `Orientation.part`.

    Its slabs are those of the source within each range, or cut to at most so many `entries` and `rows`.
    """

    def __init__(
        self,
        source: Orientation,
        ranges: Sequence[tuple[int, int]],
        columns: tuple[int, int] | None = None,
        *,
        entries: int | None = None,
        rows: int | None = None,
    ) -> None:
        self.source, self.ranges, self.columns, self.dtype = source, list(ranges), columns, source.dtype
        firsts: list[np.ndarray] = []  # row of the source with which each slab begins, by range
        sizes: list[np.ndarray] = []
        for first, last in self.ranges:
            inside = (source.bounds > first) & (source.bounds < last)
            ends = np.unique(np.concatenate(([first], source.bounds[inside], [last]))).astype(np.int64)
            if entries is not None:
                finer = [slab_bounds(source.degrees[a:b], entries, rows) + a for a, b in pairwise(ends.tolist())]
                ends = np.unique(np.concatenate([ends, *finer]))
            firsts.append(ends[:-1])
            sizes.append(np.diff(ends))
        self.bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
        self._firsts = np.concatenate(firsts)
        self._range_of = np.repeat(np.arange(len(firsts)), [len(each) for each in firsts])
        self._slab_of = np.searchsorted(source.bounds, self._firsts, side="right") - 1
        self._at_hand: dict[int, tuple[int, sp.csr_array]] = {}  # slab of the source by range: readers alternate ranges
        width = source.shape[1] if columns is None else columns[1] - columns[0]
        self.shape = (int(self.bounds[-1]), width)
        nothing = np.zeros(0, np.int64)
        if columns is None:
            self.degrees = np.concatenate([nothing, *(source.degrees[first:last] for first, last in self.ranges)])
        else:
            slabs = self.rows(0, self.shape[0])
            self.degrees = np.concatenate([nothing, *(np.diff(slab.indptr) for slab in slabs)])
            self.release()
        self.nnz = int(self.degrees.sum())

    def cut(self, entries: int, rows: int | None = None) -> Part:
        return Part(self.source, self.ranges, self.columns, entries=entries, rows=rows)

    def matrix(self, slab: int) -> sp.csr_array:
        """Rows of a slab; keeps what the source converts while reading, for the next slab."""
        begin, end = self.bounds[slab : slab + 2].tolist()
        return self._rows_of_slab(slab, 0, end - begin)

    def _rows_of_slab(self, slab: int, first: int, last: int) -> sp.csr_array:
        number, range_of = int(self._slab_of[slab]), int(self._range_of[slab])
        if range_of not in self._at_hand or self._at_hand[range_of][0] != number:
            self._at_hand.pop(range_of, None)  # frees it before the next one is read
            self._at_hand[range_of] = number, self.source.matrix(number)
        start = int(self._firsts[slab] - self.source.bounds[number])
        found = rows_of(self._at_hand[range_of][1], start + first, start + last)
        return found if self.columns is None else columns_of(found, *self.columns)

    def release(self) -> None:
        self._at_hand.clear()

    def prefetch(self, slab: int) -> None:
        """Ask the source to read ahead, unless it has already."""
        if slab < len(self._slab_of) and (not slab or self._slab_of[slab] != self._slab_of[slab - 1]):
            self.source.prefetch(int(self._slab_of[slab]))


def as_orientation(ratings: Any) -> Any:
    """A csr_array as `InMemory`; everything else as it is."""
    return InMemory(ratings) if isinstance(ratings, sp.csr_array) else ratings


def slab_bounds(degrees: np.ndarray, entries: int, rows: int | None = None) -> np.ndarray:
    """Bounds of slabs of at most `entries` entries and `rows` rows; int64, shape (n_slabs + 1,).

    A row counts as one entry more than it has, and a longer row is a slab alone.
    """
    cost = np.concatenate(([0], np.cumsum(np.asarray(degrees, dtype=np.int64) + 1)))
    bounds = [0]
    while bounds[-1] < len(degrees):
        start = bounds[-1]
        stop = int(np.searchsorted(cost, cost[start] + entries, side="right")) - 1
        bounds.append(max(start + 1, stop if rows is None else min(stop, start + rows)))
    return np.array(bounds, dtype=np.int64)


def slab_entries(bounds: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    before = np.concatenate(([0], np.cumsum(degrees)))
    return np.diff(before[bounds])
