"""Fingerprint by which a checkpoint recognizes its training data; joined from pieces of rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.sparse as sp

from ..core.files import combine_crc32
from .store import StoreMatrix


def fingerprint(matrix: sp.csr_array | StoreMatrix) -> str:
    """Short identifier of the training data: shape, number of entries and a CRC-32 of the arrays."""
    parts = matrix.matrices() if isinstance(matrix, StoreMatrix) else [matrix]
    return join_fingerprints(matrix.indptr, [piece_of_fingerprint(part) for part in parts], matrix.shape)


Piece = tuple[int, int, int, int]
"""Entries of consecutive rows, bytes of a value, CRC-32 of columns and of values."""


def piece_of_fingerprint(rows: sp.csr_array) -> Piece:
    """Part of consecutive rows in the fingerprint of their matrix; columns are those of the whole matrix."""
    columns, values = rows.indices.astype(np.int32, copy=False), rows.data
    return len(columns), values.itemsize, _crc32(columns), _crc32(values)


def join_pieces(pieces: Iterable[Piece], itemsize: int = 0) -> Piece:
    """The pieces of consecutive rows as one; `itemsize`: bytes of a value, if there are no pieces."""
    columns = values = nnz = 0
    for entries, itemsize, of_columns, of_values in pieces:
        columns = combine_crc32(columns, of_columns, 4 * entries)
        values = combine_crc32(values, of_values, itemsize * entries)
        nnz += entries
    return nnz, itemsize, columns, values


def join_fingerprints(indptr: np.ndarray, pieces: Sequence[Piece], shape: tuple[int, int]) -> str:
    """Fingerprint of a matrix from its shape, its row pointers and the pieces of its rows."""
    nnz, size, columns, values = join_pieces(pieces)
    crc = combine_crc32(_crc32(np.asarray(indptr, dtype=np.int64)), columns, 4 * nnz)
    return f"{shape[0]}x{shape[1]}-{nnz}-{combine_crc32(crc, values, size * nnz):08x}"


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
