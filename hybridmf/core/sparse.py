"""Parts of canonical CSR matrices, canonical again, with int32 indices for any dtype of indptr."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from .. import _formats
from .validate import csr_arrays, frozen_csr, make_csr, rows_of_entries
from .validate import csr_of as csr_of


def entry_rows(matrix: sp.csr_array) -> np.ndarray:
    """Row of each entry, int64 of shape (nnz,)."""
    return rows_of_entries(matrix.indptr)


def keep_entries(matrix: sp.csr_array, mask: np.ndarray) -> sp.csr_array:
    """Keep the entries where `mask`, shape (nnz,), is true; the shape stays. `matrix` itself where all are kept."""
    if np.all(mask):
        return matrix
    before = np.zeros(len(mask) + 1, dtype=np.int64)
    np.cumsum(mask, out=before[1:])
    return make_csr(before[matrix.indptr], matrix.indices[mask], matrix.data[mask], matrix.shape)


def entries_in(matrix: sp.csr_array, other: sp.csr_array) -> np.ndarray:
    """Which entries of a canonical matrix are entries of another one of the same shape, bool of shape (nnz,)."""
    mine, theirs = csr_arrays(matrix), csr_arrays(other)
    return _formats.common_entries(mine[0], mine[1], theirs[0], theirs[1])


def without_zeros(matrix: sp.csr_array) -> sp.csr_array:
    return keep_entries(matrix, matrix.data != 0)


FEW_ROWS = 16
"""Share of the rows, one in so many, from which compiled code takes them out of a matrix, whatever their entries."""


def take_rows(matrix: sp.csr_array, rows: np.ndarray) -> sp.csr_array:
    """matrix[rows] for integer positions >= 0, repeats included; `matrix` itself where these are all, in order."""
    if len(rows) == matrix.shape[0] and np.array_equal(rows, np.arange(len(rows))):
        return matrix
    starts = matrix.indptr[rows]
    pointer = np.concatenate(([0], np.cumsum(matrix.indptr[rows + 1] - starts)))
    if len(rows) >= matrix.shape[0] // FEW_ROWS or pointer[-1] >= matrix.shape[0]:
        taken = _formats.take_rows(*csr_arrays(matrix), np.asarray(rows, dtype=np.int64))
        return make_csr(*taken, (len(rows), matrix.shape[1]))
    # Few rows with few entries: nothing that takes as long as the matrix has rows.
    entries = np.arange(pointer[-1]) + np.repeat(starts - pointer[:-1], np.diff(pointer))
    return make_csr(pointer, matrix.indices[entries], matrix.data[entries], (len(rows), matrix.shape[1]))


def rows_or_empty(matrix: sp.csr_array, rows: np.ndarray) -> sp.csr_array:
    """`take_rows`, in which a position of -1 gives a row without entries."""
    absent = rows < 0
    if not absent.any():
        return take_rows(matrix, rows)
    taken = take_rows(matrix, np.maximum(rows, 0))
    return keep_entries(taken, ~absent[entry_rows(taken)])


@dataclass(frozen=True)
class RowColumns:
    """Columns of the entries of some rows of a canonical matrix, as views: no entry is copied."""

    first: np.ndarray  # int64, shape (n,): where the columns of each row begin
    last: np.ndarray  # and end
    columns: np.ndarray  # int32, ascending within a row
    n_columns: int

    @classmethod
    def of(cls, matrix: sp.csr_array, rows: np.ndarray | None = None) -> RowColumns:
        """Those of the rows at integer positions >= 0, repeats included; default: of all rows."""
        indptr, indices = matrix.indptr, matrix.indices
        first, last = (indptr[:-1], indptr[1:]) if rows is None else (indptr[rows], indptr[rows + 1])
        return cls(first.astype(np.int64, copy=False), last.astype(np.int64, copy=False), indices, matrix.shape[1])

    @classmethod
    def none(cls, n_rows: int, n_columns: int) -> RowColumns:
        return cls(np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64), np.empty(0, np.int32), n_columns)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def n_entries(self) -> int:
        return int(np.sum(self.last - self.first))

    def take(self, rows: np.ndarray) -> RowColumns:
        return RowColumns(self.first[rows], self.last[rows], self.columns, self.n_columns)

    def without_rows(self, emptied: np.ndarray) -> RowColumns:
        """The same rows, of which those of a mask have no entries."""
        return RowColumns(self.first, np.where(emptied, self.first, self.last), self.columns, self.n_columns)

    def with_columns(self, added: np.ndarray) -> RowColumns:
        """All rows with more columns, the same for each; `added` ascends."""
        pointer, columns = self._gathered
        starts = np.arange(len(self) + 1, dtype=np.int64) * self.n_columns
        both = (np.repeat(starts[:-1], np.diff(pointer)) + columns, np.add.outer(starts[:-1], added).ravel())
        cells = np.unique(np.concatenate(both))
        bounds = np.searchsorted(cells, starts)
        return RowColumns(bounds[:-1], bounds[1:], (cells % self.n_columns).astype(np.int32), self.n_columns)

    def matrix(self) -> sp.csr_array:
        """A matrix of int8 ones, shape (n, n_columns); columns of rows that lie one after the other are not copied."""
        pointer, columns = self._gathered
        return make_csr(pointer, columns, np.ones(len(columns), dtype=np.int8), (len(self), self.n_columns))

    @functools.cached_property
    def copies(self) -> dict[Any, Any]:
        """Pointer and indices of `matrix` on each device."""
        return {}

    @functools.cached_property
    def _gathered(self) -> tuple[np.ndarray, np.ndarray]:
        """indptr and indices of `matrix`."""
        pointer = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.last - self.first, out=pointer[1:])
        if np.array_equal(self.first[1:], self.last[:-1]):
            return pointer, self.columns[self.first[0] : self.last[-1]] if len(self) else self.columns[:0]
        return pointer, self.columns[np.arange(pointer[-1]) + np.repeat(self.first - pointer[:-1], np.diff(pointer))]


def transposed(matrix: sp.csr_array, num_threads: int | None = None) -> sp.csr_array:
    """The transpose of a canonical matrix that was checked already; `hybridmf.formats.transpose` checks."""
    arrays = _formats.transpose(*csr_arrays(matrix), matrix.shape[1], num_threads)
    return frozen_csr(make_csr(*arrays, matrix.shape[::-1]))


def as_ones(matrix: sp.csr_array, dtype: Any) -> sp.csr_array:
    """Copy `matrix` with every value 1; the index arrays are shared."""
    return make_csr(matrix.indptr, matrix.indices, np.ones(len(matrix.indices), dtype=dtype), matrix.shape)


SUMMED = 1 << 16
"""Values of one partial sum of `ValueSummary`."""


@dataclass(frozen=True)
class ValueSummary:
    """Sums and ranges of the values of a matrix."""

    total: float  # of the values and of their squares, in float64
    squares: float
    value_range: tuple[float, float] | None  # smallest and largest value; None if there are none
    ends: np.ndarray  # float64, shape (2,) or (0,): smallest and largest absolute value

    @classmethod
    def of(cls, parts: Iterable[np.ndarray], num_threads: int | None = None) -> ValueSummary:
        """Summary of float32 or float64 values that come in parts.

        Sums depend on the order of the values, not on the bounds of the parts: a store that is read slab by slab gives
        the bits of the same ratings in memory.
        """
        summaries = [np.empty((0, 6))]
        rest: np.ndarray | None = None  # the begun partial sum
        for part in parts:
            if rest is not None and len(rest):
                fill = SUMMED - len(rest)
                rest, part = np.concatenate((rest, part[:fill])), part[fill:]
                if len(rest) < SUMMED:
                    continue
                summaries.append(_formats.summarize(rest, SUMMED, num_threads))
            whole = len(part) // SUMMED * SUMMED
            summaries.append(_formats.summarize(part[:whole], SUMMED, num_threads))
            rest = part[whole:].copy()
        if rest is not None and len(rest):
            summaries.append(_formats.summarize(rest, SUMMED, num_threads))
        sums, squares, low, high, least, largest = np.concatenate(summaries).T
        total = (math.fsum(sums), math.fsum(squares))
        if not len(sums):
            return cls(*total, None, np.empty(0))
        return cls(*total, (float(low.min()), float(high.max())), np.array([least.min(), largest.max()]))


def rows_of(matrix: sp.csr_array, first: int, last: int) -> sp.csr_array:
    """The rows from `first` to before `last`; entries are not copied."""
    indptr, indices, data = csr_arrays(matrix)
    begin, end = int(indptr[first]), int(indptr[last])
    return csr_of(indptr[first : last + 1] - begin, indices[begin:end], data[begin:end], matrix.shape[1])


def column_bounds(matrix: sp.csr_array, columns: np.ndarray) -> np.ndarray:
    """Bounds in each row: its begin, the first entry at or after each of some columns, its end.

    `matrix`: indices ascend in each row.
    `columns`, int (n,): ascending.
    Returns int64 (n + 2, n_rows).
    """
    indptr, indices, _ = csr_arrays(matrix)
    begins, ends = indptr[:-1].astype(np.int64), indptr[1:].astype(np.int64)
    bounds = [begins]
    for column in columns:
        low, high = bounds[-1].copy(), ends.copy()  # bisection in all rows together
        while (open_ := np.flatnonzero(low < high)).size:
            middle = (low[open_] + high[open_]) // 2
            before = indices[middle] < column
            low[open_[before]] = middle[before] + 1
            high[open_[~before]] = middle[~before]
        bounds.append(low)
    return np.stack([*bounds, ends])


def columns_of(matrix: sp.csr_array, first: int, last: int) -> sp.csr_array:
    """The columns from `first` to before `last`, counted from `first`; `matrix`: indices ascend in each row."""
    _, indices, data = csr_arrays(matrix)
    bounds = column_bounds(matrix, np.array([first, last]))[:-1]
    # each row in three ranges: before the columns, they, behind them
    limits = np.append(bounds.T.reshape(-1), len(indices))
    taken = _formats.take_rows(limits, indices, data, np.arange(1, len(limits) - 1, 3))
    if first:
        np.subtract(taken[1], np.int32(first), out=taken[1])
    return csr_of(*taken, last - first)


def stacked(matrices: list[sp.csr_array]) -> sp.csr_array:
    """One matrix under the other."""
    ends = np.concatenate(([0], np.cumsum([matrix.indptr[-1] for matrix in matrices]))).astype(np.int64)
    indptr = [np.zeros(1, np.int64)] + [m.indptr[1:] + end for m, end in zip(matrices, ends[:-1], strict=True)]
    return csr_of(
        np.concatenate(indptr),
        np.concatenate([matrix.indices for matrix in matrices]),
        np.concatenate([matrix.data for matrix in matrices]),
        matrices[0].shape[1],
    )


def replace_rows(history: sp.csr_array, positions: np.ndarray, rows: sp.csr_array, size: int) -> sp.csr_array:
    """`history` with `size` rows, those at `positions` replaced by the entries of `rows`; gaps are empty."""
    new = as_ones(rows, np.int8) if history.dtype == np.int8 else rows.astype(history.dtype)
    source = np.full(size, -1, dtype=np.int64)
    source[: history.shape[0]] = np.arange(history.shape[0])
    source[positions] = history.shape[0] + np.arange(len(positions))
    return rows_or_empty(stacked([history, new]), source)
