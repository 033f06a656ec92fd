"""iALS++ on a GPU beside the CPU's and float64 NumPy; the same bodies on the emulated device."""

from __future__ import annotations

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.objective import Factors
from hybridmf.gpu.predictions import add_products
from support.devices import on_a_gpu, serve_cuda
from support.half_sweeps import FITS, OBJECTIVES, SMALL, Problem, dense_system, joined, random_factors
from support.marks import mostly_exhaustive
from support.ratings import rows_of

LENGTHS = (0, 1, 15, 16, 17, 18, 33, 35, 0, 2, 52)
"""Rows around chunks (16) and segments (17)."""


def minimized(problem: Problem, start: Factors, block: int) -> np.ndarray:
    """One pass over the blocks of each row, in float64."""
    solved = joined(start)
    for row, x in enumerate(solved):
        if problem.matrix.indptr[row] == problem.matrix.indptr[row + 1]:
            x[...] = 0
            continue
        A, b = dense_system(problem.matrix, row, problem.fixed, problem.mean, problem.objective)
        for first in range(0, len(x), block):
            part = slice(first, first + block)
            x[part] += np.linalg.solve(A[part, part], (b - A @ x)[part])
    return solved


def check(device, rank: int, name: str, dtype: str, block: int, matrix=None, **changes) -> np.ndarray:
    objective = OBJECTIVES[name]
    problem = Problem(rows_of(LENGTHS, 60) if matrix is None else matrix, objective, rank, dtype)
    start = random_factors(problem.matrix.shape[0], rank, dtype, objective.biases, seed=5)
    solved = joined(problem.solve(device, start=start, solver="subspace", block_size=block, **changes))
    expected = minimized(problem, start, block)
    # a pass starts from predictions, whose rounding errors are those of the start
    scale = np.linalg.norm(expected, axis=1).max()
    assert np.abs(solved - expected).max() < (1e-10 if dtype == "float64" else 1e-4) * scale
    return solved


CASES = [
    ("explicit-biases", 7, 4, "float32"),
    ("implicit", 20, 8, "float32"),
    ("implicit-count", 7, 20, "float32"),
    ("explicit-ridge", 9, 1, "float32"),
    ("implicit-light", 9, 3, "float64"),
    ("explicit-damped-half-count", 9, 4, "float64"),
    ("implicit-heavy", 9, 4, "float32"),
]


@pytest.mark.parametrize(
    ("name", "rank", "block", "dtype"), mostly_exhaustive(CASES, [CASES[0], CASES[1], CASES[4]])
)
def test_blocks_are_minimized_one_after_another(device, name, rank, block, dtype):
    """By the fused kernels and by sparse-syrk; sizes of batches change no bit."""
    few = check(device, rank, name, dtype, block, segment=17, batch_slots=3)
    np.testing.assert_array_equal(check(device, rank, name, dtype, block, segment=17), few)


