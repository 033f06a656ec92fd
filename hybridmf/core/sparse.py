"""Parts of canonical CSR matrices, canonical again, with int32 indices whatever the dtype of indptr."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.sparse as sp

from .validate import make_csr


def entry_rows(matrix: sp.csr_array) -> np.ndarray:
    """Row of each entry, int64 of shape (nnz,)."""
    return np.repeat(np.arange(matrix.shape[0], dtype=np.int64), np.diff(matrix.indptr))


def keep_entries(matrix: sp.csr_array, mask: np.ndarray) -> sp.csr_array:
    """Keep the entries where `mask`, shape (nnz,), is true; the shape stays. `matrix` itself where all are kept."""
    if np.all(mask):
        return matrix
    before = np.zeros(len(mask) + 1, dtype=np.int64)
    np.cumsum(mask, out=before[1:])
    return make_csr(before[matrix.indptr], matrix.indices[mask], matrix.data[mask], matrix.shape)


def take_rows(matrix: sp.csr_array, rows: np.ndarray) -> sp.csr_array:
    """matrix[rows] for integer positions >= 0, repeats included."""
    if matrix.indptr.dtype == matrix.indices.dtype:
        return matrix[rows]
    # SciPy would first widen all indices of the matrix to the int64 of its indptr.
    starts = matrix.indptr[rows]
    pointer = np.concatenate(([0], np.cumsum(matrix.indptr[rows + 1] - starts)))
    entries = np.arange(pointer[-1]) + np.repeat(starts - pointer[:-1], np.diff(pointer))
    return make_csr(pointer, matrix.indices[entries], matrix.data[entries], (len(rows), matrix.shape[1]))


def as_ones(matrix: sp.csr_array, dtype: Any) -> sp.csr_array:
    """Copy `matrix` with every value 1; the index arrays are shared."""
    return make_csr(matrix.indptr, matrix.indices, np.ones(len(matrix.indices), dtype=dtype), matrix.shape)


SUMMED = 1 << 16
"""Values of one partial sum of `entry_sum`."""


def entry_sum(parts: Iterable[np.ndarray]) -> float:
    """Sum in float64 of values that come in parts; their order counts, not where one part ends and the next begins.

    So a store that is read slab by slab has the bits of the sum, and of the mean, of the same ratings in memory.
    """
    sums, rest = [], np.empty(0)
    for part in parts:
        at = 0
        while at < len(part):
            piece = part[at : at + SUMMED - len(rest)]
            at += len(piece)
            rest = np.concatenate((rest, piece.astype(np.float64)))
            if len(rest) == SUMMED:
                sums.append(float(rest.sum()))
                rest = np.empty(0)
    return math.fsum([*sums, float(rest.sum())])
