"""Rows of nonnegative factors on a GPU, against the conditions of the minimum and the CPU; also emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
from scipy.optimize import lsq_linear

import hybridmf as hmf
from hybridmf.core.objective import Factors
from hybridmf.cpu import als as cpu
from hybridmf.errors import NonFiniteError
from hybridmf.gpu.nonnegative import NonnegativeConfig, nonnegative_solve
from hybridmf.gpu.systems import SideSystems
from support.devices import SPECS, serve_cuda
from support.half_sweeps import OBJECTIVES, Problem, dense_system, joined, plan_for
from support.marks import exhaustive, mostly_exhaustive
from support.ratings import rows_of

LENGTHS = (0, 1, 5, 17, 18, 40, 90, 2)
SEGMENT = 17

CASES = [
    ("fused", 7, "float32", "implicit"),
    ("fused", 6, "float32", "explicit-damped"),
    ("fused", 40, "float32", "implicit-count"),
    ("fused", 128, "float32", "explicit"),
    ("sparse_syrk", 1, "float64", "explicit-ridge"),
    ("sparse_syrk", 7, "float32", "implicit-heavy"),
    ("sparse_syrk", 33, "float64", "explicit-biases"),
    ("mo_als", 40, "float64", "implicit-unweighted"),
]


def fixed_side(rows: int, rank: int, dtype, biases: bool) -> Factors:
    """Correlated rows, as those of nonnegative models are, some of them zero in places."""
    rng = np.random.default_rng(5)
    matrix = np.maximum(rng.normal(0.4, 0.5, (rows, rank)), 0).astype(dtype)
    return Factors(matrix, rng.normal(size=rows).astype(dtype) if biases else None)


def problem_of(name: str, rank: int, dtype) -> Problem:
    fixed = fixed_side(120, rank, dtype, OBJECTIVES[name].biases)
    return Problem(rows_of(LENGTHS, 120), OBJECTIVES[name], rank, dtype, fixed)


def check_minimum(problem: Problem, solved: Factors, tolerance: float) -> None:
    """Karush, Kuhn and Tucker: x >= 0, the gradient is >= 0, and 0 where x > 0."""
    rows, rank = joined(solved), problem.rank
    assert not rows[problem.matrix.indptr[1:] == problem.matrix.indptr[:-1]].any()
    assert solved.matrix.min() >= 0
    for row in np.flatnonzero(np.diff(problem.matrix.indptr)):
        A, b = dense_system(problem.matrix, row, problem.fixed, problem.mean, problem.objective)
        x = rows[row]
        gradient, size = A @ x - b, max(np.abs(b).max(), np.max(A @ x))
        assert (gradient[:rank] >= -tolerance * size).all()
        assert np.abs(gradient[(x > 0) | (np.arange(len(x)) >= rank)]).max(initial=0) <= tolerance * size


@pytest.mark.parametrize(
    ("assembly", "rank", "dtype", "name"),
    mostly_exhaustive(CASES, [case for case in CASES if case[1] in (6, 7, 33, 40)]),
)
def test_rows_meet_the_conditions_of_the_minimum(device, assembly, rank, dtype, name):
    problem = problem_of(name, rank, dtype)
    solved = problem.solve(device, nonnegative=True, assembly=assembly, segment=SEGMENT, batch_slots=5)
    check_minimum(problem, solved, 1e-9 if dtype == "float64" else 2e-5)


def test_the_cpu_gives_the_same_factors(device):
    problem = problem_of("implicit", 7, "float32")
    start = Factors(np.abs(np.random.default_rng(0).normal(size=(8, 7))).astype(np.float32))
    plan = plan_for(problem.objective, problem.matrix.shape, problem.matrix.nnz, rank=7, nonnegative=True)
    expected = cpu.HalfSweep("user", problem.matrix, problem.objective, plan).solve(problem.fixed, 0.0, start)
    solved = problem.solve(device, start, nonnegative=True)
    np.testing.assert_allclose(solved.matrix, expected.matrix, rtol=1e-4, atol=1e-5)
    assert ((solved.matrix == 0) == (expected.matrix == 0)).mean() > 0.9


@pytest.mark.parametrize("assembly", ["fused", "sparse_syrk"])
def test_reruns_and_batches_of_any_size_give_the_same_bits(device, assembly):
    problem = problem_of("implicit", 7, "float32")
    sizes = {"segment": SEGMENT, "assembly": assembly, "nonnegative": True}
    first = problem.solve(device, batch_slots=1000, **sizes).matrix
    for slots in (1000, 1, 3):
        np.testing.assert_array_equal(problem.solve(device, batch_slots=slots, **sizes).matrix, first)


def systems_of(rank: int, count: int, dtype) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    design = np.maximum(rng.normal(0.4, 0.5, (count, rank + 3, rank)), 0)
    matrices = (design.transpose(0, 2, 1) @ design).astype(dtype)
    rhs = np.einsum("krf,kr->kf", design, rng.uniform(1, 5, (count, rank + 3))).astype(dtype)
    return matrices, rhs


@pytest.mark.parametrize(
    ("rank", "dtype", "warps"), [(5, "float64", 1), (33, "float64", 2), exhaustive(70, "float64", 1)]
)
def test_matrices_that_do_not_fit_in_shared_memory(device, rank, dtype, warps):
    """The kernel works in the sums then; by the same steps, so that the bits are the same."""
    matrices, rhs = systems_of(rank, 3, dtype)
    found = []
    for resident in (True, False):
        solutions, status = device.zeros((3, rank + 3), dtype), device.zeros(3, np.int32)
        terms = (None, device.upload(np.full(rank, 0.1, dtype)), device.upload(np.ones(3, dtype)), rank - 1)
        systems = SideSystems(solutions, status, *terms)
        slots, rows = device.upload(np.arange(4)), device.upload(np.arange(3, dtype=np.int32))
        config = NonnegativeConfig(rank, matrices.dtype.itemsize, False, resident, warps)
        sums = (device.upload(matrices.copy()), device.upload(rhs))
        nonnegative_solve(device, systems, sums, slots, rows, 1e-15, config)
        found.append(device.download(solutions))
        assert not device.download(status).any()
    np.testing.assert_array_equal(*found)
    for matrix, b, x in zip(matrices, rhs, found[0], strict=True):
        least = np.where(np.arange(rank) < rank - 1, 0, -np.inf)
        root = scipy.linalg.cholesky(matrix + 0.1 * np.eye(rank), lower=True)
        target = scipy.linalg.solve_triangular(root, b, lower=True)
        exact = lsq_linear(root.T, target, (least, np.inf), "bvls", 1e-14).x
        np.testing.assert_allclose(x[:rank], exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("place", ["memory", exhaustive("store")])
def test_users_left_above_their_minima_are_finished(place, device, monkeypatch, tmp_path, caplog):
    """The kernel ends after its last sweep at twice the minimum of these nearly singular systems."""
    serve_cuda(device, monkeypatch)
    rng = np.random.default_rng(3)
    rank, n_items, lambda_, alpha = int(rng.choice([8, 20, 40, 64])), 20, 1.5e-5, 1600.0
    rng.choice([20, 60, 200]), rng.uniform(size=2)
    items = np.abs(rng.normal(size=(n_items, rank))) * (rng.random((n_items, rank)) < 0.6)
    if rng.random() < 0.5:
        items = np.abs(rng.normal(size=(n_items, 3))) @ np.abs(rng.normal(size=(3, rank)))
        items += 0.05 * np.abs(rng.normal(size=items.shape))
    matrix = sp.csr_array((rng.random((4, n_items)) < 0.5) * rng.integers(1, 6, (4, n_items)).astype(float))

    def fit(where: str):
        model = hmf.ImplicitALS(
            rank, regularization=lambda_, regularization_scaling="none", alpha=alpha, nonnegative=True, iterations=1,
            init=(None, items), dtype="float64", random_state=0, device=where,
        )  # fmt: skip
        return model.fit(matrix if place == "memory" else store, freeze="item")

    store = hmf.convert(matrix, tmp_path / "store", slab_bytes=200)
    exact = fit("cpu").objective(matrix)
    with caplog.at_level("INFO"):
        model = fit("cuda")
    assert model.objective(matrix) <= exact * (1 + 1e-6)
    assert model.user_factors_.min() >= 0
    folded = model.transform(matrix) @ model.item_factors_.T
    np.testing.assert_allclose(folded, model.user_factors_ @ model.item_factors_.T, rtol=1e-3, atol=1e-3)
    assert "nonnegative users that the GPU left above their minima" in caplog.text
    caplog.clear()
    monkeypatch.setattr("hybridmf.model.exactness.MOST_ROWS", 2)
    assert fit("cuda").objective(matrix) > exact * 1.1
    assert "are not at their minima" in caplog.text and "use device='cpu'" in caplog.text


def test_factors_that_overflow_are_refused(device):
    fixed = Factors(np.full((120, 7), 1e30, np.float32))
    problem = Problem(rows_of((5, 3), 120), OBJECTIVES["explicit"], 7, "float32", fixed)
    with pytest.raises(NonFiniteError, match="factors of user 0 became infinite or NaN"):
        problem.solve(device, nonnegative=True)


def test_shared_memory_bounds_the_rank():
    small = replace(SPECS[75], shared_bytes=20_000)
    assert not NonnegativeConfig.of_matrices(200, 4, small).resident
    with pytest.raises(ValueError, match=r"rank 900 need .* bytes of shared memory.*use fewer factors or device='cpu'"):
        NonnegativeConfig.of_matrices(900, 4, small)
