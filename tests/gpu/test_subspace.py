"""iALS++ on a GPU beside the CPU's and float64 NumPy; the same bodies on the emulated device."""

from __future__ import annotations

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.objective import Factors
from hybridmf.errors import NotPositiveDefiniteError
from hybridmf.gpu.factors import to_device
from hybridmf.gpu.predictions import add_products
from support.devices import Tracked, on_a_gpu, serve_cuda
from support.half_sweeps import FITS, OBJECTIVES, SMALL, Problem, dense_system, joined, random_factors
from support.marks import exhaustive, mostly_exhaustive
from support.ratings import planted, rows_of

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


@pytest.mark.parametrize(("name", "rank", "block", "dtype"), mostly_exhaustive(CASES, [CASES[0], CASES[1], CASES[4]]))
def test_blocks_are_minimized_one_after_another(device, name, rank, block, dtype):
    """By the fused kernels and by sparse-syrk; sizes of batches change no bit."""
    few = check(device, rank, name, dtype, block, segment=17, batch_slots=3)
    np.testing.assert_array_equal(check(device, rank, name, dtype, block, segment=17), few)


@on_a_gpu
@pytest.mark.parametrize(
    ("name", "rank", "block", "dtype"),
    [
        ("implicit", 100, 32, "float32"), ("explicit-biases", 256, 64, "float32"),
        ("implicit-count", 256, 96, "float32"), ("implicit", 256, 128, "float32"),
        ("explicit", 300, 100, "float32"), ("implicit-heavy", 256, 64, "float32"),
        ("implicit", 256, 200, "float32"), ("explicit-damped", 256, 64, "float64"),
    ],
)  # fmt: skip
def test_large_blocks(device, name, rank, block, dtype):
    """Up to 96 coordinates solved where they are summed, up to 128 through partial sums, beyond by sparse-syrk."""
    matrix = rows_of((*LENGTHS, 127, 128, 129, 700, 5000), 6000)
    check(device, rank, name, dtype, block, matrix)


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("bf16x3", 1e-4), exhaustive("tf32", 1e-4), exhaustive("bf16", 5e-3), exhaustive("float16", 1e-4)],
)
def test_other_precisions_are_of_changes_alone(device, precision, tolerance):
    """Predictions are in float32: a few passes over the same rows end where exact products do.

    Or, in bf16, where those of the rounded factors do, which its kernels read.
    """
    problem = Problem(rows_of(LENGTHS, 60), OBJECTIVES["implicit"], 8)
    solved = random_factors(len(LENGTHS), 8, "float32", seed=5)
    for _ in range(12):
        solved = problem.solve(device, start=solved, solver="subspace", block_size=8, precision=precision)
    expected = joined(problem.exact())
    assert np.abs(joined(solved) - expected).max() < tolerance * np.abs(expected).max()


def test_a_block_whose_factors_have_a_wide_range(device):
    """Rows of one block differ by more than float16 parts can hold, beside a block like any other."""
    problem = Problem(rows_of(LENGTHS, 60), OBJECTIVES["explicit"], 8)
    factors = problem.fixed.matrix
    factors[::2, 4:] *= 1e-8
    start = random_factors(len(LENGTHS), 8, "float32", seed=5)
    solved = joined(problem.solve(device, start=start, solver="subspace", block_size=4))
    np.testing.assert_allclose(solved, minimized(problem, start, 4), rtol=1e-3, atol=1e-4)


def fit_on(device, monkeypatch, where: str, cls, **options):
    serve_cuda(device, monkeypatch)
    common = {"solver": "subspace", "block_size": 4, "iterations": 3, "random_state": 0, "device": where}
    return cls(**(common | options)).fit(SMALL, callback=lambda model, record: None)


@pytest.mark.parametrize("kind", FITS)
def test_fits_are_the_cpus(device, monkeypatch, kind):
    cls, options = FITS[kind]
    gpu, again, cpu = (fit_on(device, monkeypatch, where, cls, **options) for where in ("cuda", "cuda", "cpu"))
    assert gpu.plan_.gpu is not None and gpu.plan_.solver == "subspace"
    for name in ("user_factors_", "item_factors_"):
        np.testing.assert_allclose(getattr(gpu, name), getattr(cpu, name), rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(getattr(gpu, name), getattr(again, name))
    values = [[record["objective"] for record in model.history_] for model in (gpu, cpu)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    rows = SMALL[:5]
    np.testing.assert_allclose(gpu.transform(rows), cpu.transform(rows), rtol=1e-3, atol=1e-3)


def test_a_row_that_fails_is_named(device, monkeypatch):
    """With the order of its leading minor among all coordinates, not those of the block."""
    options = {"factors": 5, "biases": False, "regularization": 0.0, "iterations": 1}
    messages = []
    for where in ("cuda", "cpu"):
        with pytest.raises(NotPositiveDefiniteError) as failure:
            fit_on(device, monkeypatch, where, hmf.ExplicitALS, **options)
        messages.append(str(failure.value))
    assert messages[0] == messages[1]


def test_bytes_of_a_half_sweep_are_planned(device, monkeypatch):
    matrix = planted(120, 100, 0.2)
    problem = Problem(matrix, OBJECTIVES["implicit"], 24)
    half = problem.half(device, solver="subspace", block_size=8)
    tracked = Tracked(device, monkeypatch)
    half.solve(to_device(device, problem.fixed, half.width), 0.0)
    planned = half.plan.bytes
    assert tracked.peak < planned["predictions"] + planned["blocks"] + planned["operands"] + planned["factors"]


def test_products_are_added_in_an_order_that_no_cut_changes(device):
    rng = np.random.default_rng(0)
    matrix = rows_of((0, 1, 70, 33), 90)
    fixed, solved = (rng.normal(size=(n, 20)).astype(np.float32) for n in (90, 4))
    indices = device.upload(matrix.indices.astype(np.int32))
    found = []
    for longest in (5, 2048):
        pieces = [
            (row, begin, min(begin + longest, matrix.indptr[row + 1]))
            for row in range(4)
            for begin in range(matrix.indptr[row], matrix.indptr[row + 1], longest)
        ]
        predicted = device.upload(np.ones(matrix.nnz, dtype=np.float32))
        segments = device.upload(np.array(pieces, dtype=np.int64))
        add_products(device, predicted, device.upload(fixed), device.upload(solved), indices, segments)
        found.append(device.download(predicted))
    owners = np.repeat(np.arange(4), np.diff(matrix.indptr))
    expected = 1 + np.einsum("ek,ek->e", fixed[matrix.indices].astype(float), solved[owners].astype(float))
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[0], found[1])
