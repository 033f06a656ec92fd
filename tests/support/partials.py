"""Sums of a segment in the layout of cuda/system.cuh: the lower blocks of a matrix as the lanes of a warp hold them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridmf.plan.fused import BLOCK


def _lanes(rank16: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For 32 elements at a time: where they start in the vector of sums, their rows and their columns."""
    lane, at = np.arange(32), 0
    for i in range(0, rank16, BLOCK):
        for j in range(0, i + 1, BLOCK):
            for k in range(8):
                half, q = divmod(k, 4)
                yield at, i + lane // 4 + q // 2 * 8, j + 8 * half + lane % 4 * 2 + q % 2
                at += 32


def lower_of(partial: np.ndarray, rank: int) -> np.ndarray:
    """Lower triangle of the matrix of a vector of sums, shape (rank, rank); kernels need not write other elements."""
    rank16 = -(-rank // BLOCK) * BLOCK
    matrix = np.zeros((rank16, rank16))
    with np.errstate(invalid="ignore"):  # what is not written may be any bits
        for at, rows, columns in _lanes(rank16):
            matrix[rows, columns] = partial[at : at + 32]
    return np.tril(matrix)[:rank, :rank]


def partial_of(matrix: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Vector of sums, float32: the lower blocks of a matrix, then the right-hand side."""
    blocks = [matrix[rows, columns] for _, rows, columns in _lanes(len(matrix))]
    return np.concatenate([*blocks, rhs]).astype(np.float32)
