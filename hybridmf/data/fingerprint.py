"""Fingerprint by which a checkpoint recognizes its training data; joined from those of slabs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.sparse as sp

from ..core.files import combine_crc32
from .store import StoreMatrix


def fingerprint(matrix: sp.csr_array | StoreMatrix) -> str:
    """Short identifier of the training data: shape, number of entries and a CRC-32 of the arrays."""
    slabs = matrix.matrices() if isinstance(matrix, StoreMatrix) else [matrix]
    return join_fingerprints(matrix.indptr, [checksum_of(slab) for slab in slabs], matrix.shape)


Checksum = tuple[int, int, int, int]  # entries of consecutive rows, bytes of a value, CRC-32 of columns and of values


def checksum_of(rows: sp.csr_array) -> Checksum:
    """Contribution of consecutive rows to the fingerprint of their matrix; columns are those of the whole matrix."""
    columns, values = rows.indices.astype(np.int32, copy=False), rows.data
    return len(columns), values.itemsize, _crc32(columns), _crc32(values)


def join_checksums(checksums: Iterable[Checksum], itemsize: int = 0) -> Checksum:
    """That of consecutive slabs together; `itemsize`: bytes of a value, if there are none."""
    columns = values = nnz = 0
    for entries, itemsize, of_columns, of_values in checksums:
        columns = combine_crc32(columns, of_columns, 4 * entries)
        values = combine_crc32(values, of_values, itemsize * entries)
        nnz += entries
    return nnz, itemsize, columns, values


def join_fingerprints(indptr: np.ndarray, checksums: Sequence[Checksum], shape: tuple[int, int]) -> str:
    """Fingerprint of a matrix from its shape, its row pointers and the checksums of its slabs."""
    nnz, size, columns, values = join_checksums(checksums)
    crc = combine_crc32(_crc32(np.asarray(indptr, dtype=np.int64)), columns, 4 * nnz)
    return f"{shape[0]}x{shape[1]}-{nnz}-{combine_crc32(crc, values, size * nnz):08x}"


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
