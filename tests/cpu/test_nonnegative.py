"""ALS with factors of at least zero: each row is the exact minimum under the constraint."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
from scipy.optimize import lsq_linear, nnls

import hybridmf as hmf
from hybridmf.core.nonnegative import minimum
from hybridmf.core.objective import Factors, Objective
from hybridmf.core.validate import as_csr
from hybridmf.cpu.als import HalfSweep
from support.half_sweeps import OBJECTIVES, dense_system, plan_for
from support.ratings import rows_of


def half_sweep(matrix, fixed, objective: Objective, mean: float, dtype: str, rank: int) -> Factors:
    plan = plan_for(objective, matrix.shape, matrix.nnz, rank=rank, dtype=dtype, nonnegative=True)
    given = Factors(fixed.matrix.astype(dtype), None if fixed.bias is None else fixed.bias.astype(dtype))
    return HalfSweep("user", matrix.astype(dtype), objective, plan).solve(given, mean)


def fixed_side(rows: int, rank: int, biases: bool) -> Factors:
    """Correlated rows, as those of nonnegative models are, some of them zero in places."""
    rng = np.random.default_rng(5)
    matrix = np.maximum(rng.normal(0.4, 0.5, (rows, rank)), 0)
    return Factors(matrix, rng.normal(size=rows) if biases else None)


@pytest.mark.parametrize("rank", [1, 7, 33])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_meet_the_conditions_of_the_minimum(name, rank):
    """Karush, Kuhn and Tucker: x >= 0, the gradient is >= 0, and 0 where x > 0; and the solution is SciPy's."""
    objective = OBJECTIVES[name]
    matrix = as_csr(rows_of((0, 1, 5, 40, 90, 2), 120), dtype=np.float64)
    fixed, mean = fixed_side(120, rank, objective.biases), 1.5 if objective.biases else 0.0
    found = half_sweep(matrix, fixed, objective, mean, "float64", rank)
    near = half_sweep(matrix, fixed, objective, mean, "float32", rank)
    assert not found.matrix[0].any()
    for row in range(1, 6):
        A, b = dense_system(matrix, row, fixed, mean, objective)
        x = found.matrix[row] if found.bias is None else np.append(found.matrix[row], found.bias[row])
        gradient, size = A @ x - b, np.abs(b).max() + 1e-300
        assert (x[:rank] >= 0).all()
        assert (gradient[:rank] >= -1e-9 * size).all()
        assert np.abs(gradient[(x > 0) | (np.arange(len(x)) >= rank)]).max(initial=0) <= 1e-9 * size
        if objective.unobserved_weight == 0 or (objective.biases and not objective.bias_regularization.user):
            continue  # nearly singular systems: the conditions above are all that is certain
        root = scipy.linalg.cholesky(A, lower=True)
        target = scipy.linalg.solve_triangular(root, b, lower=True)
        least = np.where(np.arange(len(x)) < rank, 0, -np.inf)
        exact = (
            nnls(root.T, target)[0]
            if found.bias is None
            else lsq_linear(root.T, target, (least, np.inf), "bvls", 1e-14).x
        )
        np.testing.assert_allclose(x, exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())
        single = near.matrix[row] if near.bias is None else np.append(near.matrix[row], near.bias[row])
        loss, best = (y @ A @ y / 2 - b @ y for y in (single.astype(float), exact))
        assert loss <= best + 1e-5 * abs(best)


def nearly_singular(seed: int) -> tuple[sp.csr_array, np.ndarray]:
    """Rows with fewer entries than factors, and a fixed side of rank three and some noise."""
    rng = np.random.default_rng(seed)
    fixed = np.abs(rng.normal(size=(20, 3))) @ np.abs(rng.normal(size=(3, 40)))
    fixed += 0.05 * np.abs(rng.normal(size=fixed.shape))
    return sp.csr_array((rng.random((12, 20)) < 0.5) * rng.integers(1, 6, (12, 20)).astype(float)), fixed


@pytest.mark.parametrize("name", ["explicit", "biases", "implicit", "dislikes"])
@pytest.mark.parametrize("lambda_", [1e-6, 1e-4])
@pytest.mark.parametrize("seed", [3, 4])
def test_nearly_singular_rows_reach_the_minimum(name, lambda_, seed):
    """Descent alone ends far above it after its last sweep."""
    matrix, factors = nearly_singular(seed)
    if name == "dislikes":
        matrix.data[::3] *= -1
    biased = name == "biases"
    objective = (
        Objective("explicit", lambda_, biases=biased, bias_regularization=lambda_)
        if name in ("explicit", "biases")
        else Objective("implicit", lambda_, alpha=1000.0)
    )
    fixed = Factors(factors, np.linspace(-1, 1, 20) if biased else None)
    found = half_sweep(as_csr(matrix, dtype=np.float64), fixed, objective, 1.5 if biased else 0.0, "float64", 40)
    assert (found.matrix >= 0).all()
    for row in range(12):
        A, b = dense_system(matrix, row, fixed, 1.5 if biased else 0.0, objective)
        x = found.matrix[row] if found.bias is None else np.append(found.matrix[row], found.bias[row])
        root = scipy.linalg.cholesky(A, lower=True)
        least = np.where(np.arange(len(x)) < 40, 0, -np.inf)
        exact = lsq_linear(root.T, scipy.linalg.solve_triangular(root, b, lower=True), (least, np.inf), "bvls", 1e-14).x
        loss, best = (y @ A @ y / 2 - b @ y for y in (x, exact))
        assert loss <= best + 1e-7 * abs(best)


def test_rows_that_scipy_does_not_finish_keep_the_solution_of_descent(monkeypatch, caplog):
    def stop(*arguments, **options):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr("scipy.optimize.nnls", stop)
    matrix, factors = nearly_singular(4)
    objective = Objective("explicit", 1e-6)
    found = half_sweep(as_csr(matrix, dtype=np.float64), Factors(factors), objective, 0.0, "float64", 40)
    assert (found.matrix >= 0).all() and found.matrix.any(axis=1).all()
    assert "a nonnegative row is not at its minimum" in caplog.text


@pytest.mark.parametrize("bounded", [5, 6])
def test_the_finish_meets_the_conditions_of_the_minimum(bounded):
    """Also of a singular system, and of one whose free coordinate nothing determines."""
    rng = np.random.default_rng(0)
    for rank, last in ((6, 1.0), (2, 1.0), (6, 0.0)):
        design = rng.normal(size=(rank, 6))
        design[:, -1] *= last
        A, b = design.T @ design, design.T @ rng.normal(size=rank)
        x = minimum(A, b, bounded)
        gradient, free = A @ x - b, np.arange(6) >= bounded
        assert (x[:bounded] >= 0).all() and (gradient[:bounded] >= -1e-9).all()
        assert np.abs(gradient[(x > 0) | free]).max(initial=0) <= 1e-9
    np.testing.assert_array_equal(minimum(np.zeros((6, 6)), np.zeros(6), bounded), np.zeros(6))


def test_factors_that_overflow_are_refused():
    fixed = Factors(np.full((120, 2), 1e30))
    matrix = as_csr(rows_of((5, 3), 120), dtype=np.float64)
    with pytest.raises(hmf.errors.NonFiniteError, match="factors of user 0 became infinite or NaN"):
        half_sweep(matrix, fixed, OBJECTIVES["explicit"], 0.0, "float32", 2)
