"""Systems beyond the precision of float32: a warning where the result is wrong, and none where it is right."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective
from hybridmf.core.validate import as_csr
from hybridmf.cpu.precision import least_pivot, sampled
from support.half_sweeps import OBJECTIVES, dense_system
from support.ratings import planted, rows_of


def two_users() -> sp.csr_array:
    """Each item has two ratings: item factors span two dimensions, and lambda alone makes user systems definite."""
    return sp.csr_array(np.random.default_rng(0).integers(1, 6, (2, 40_000)).astype(np.float32))


def fit(regularization: float, dtype: str = "float32", **options):
    model = hmf.ExplicitALS(
        64, regularization=regularization, regularization_scaling="none", biases=False, iterations=2, dtype=dtype,
        random_state=0, device="cpu", **options,
    )  # fmt: skip
    return model.fit(two_users()).objective(two_users())


@pytest.mark.parametrize("regularization", [0.1, 1.0, 10.0, 100.0])
def test_a_warning_tells_wrong_results_from_right_ones(regularization, caplog):
    exact = fit(regularization, "float64")
    assert not caplog.records
    found = fit(regularization)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warned) == (abs(found / exact - 1) > 1e-2)
    assert len(warned) <= 1  # once a fit
    for text in warned:
        assert "the equations of user 0, and probably others, are beyond the precision of float32" in text
        assert f'increase regularization (now {regularization:g}), or use dtype="float64"' in text


@pytest.mark.parametrize(
    "model",
    [hmf.ExplicitALS(8), hmf.ExplicitALS(8, biases=False), hmf.ImplicitALS(8), hmf.ImplicitALS(32, alpha=40.0)],
    ids=["biases", "explicit", "implicit", "implicit, more factors"],
)
def test_usual_fits_are_within_the_precision(model, caplog):
    model.set_params(random_state=0, device="cpu", iterations=5).fit(planted(150, 100, 0.2))
    assert "precision" not in caplog.text


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_least_pivot_is_that_of_the_dense_system(name):
    objective: Objective = OBJECTIVES[name]
    matrix = as_csr(rows_of((0, 5, 90), 120), dtype=np.float64)
    rng = np.random.default_rng(1)
    fixed = Factors(rng.normal(size=(120, 7)), rng.normal(size=120) if objective.biases else None)
    A, _ = dense_system(matrix, 2, fixed, 0.0, objective)
    expected = np.min(np.diag(scipy.linalg.cholesky(A, lower=True)) ** 2 / np.diag(A))
    gram = objective.unobserved_weight * fixed.matrix.T @ fixed.matrix
    begin, end = matrix.indptr[2:4]
    row = matrix.indices[begin:end], matrix.data[begin:end]
    assert least_pivot(objective, "user", fixed, row, end - begin, gram) == pytest.approx(expected, rel=1e-6)
    singular = Objective("explicit", 0.0)
    assert least_pivot(singular, "user", Factors(np.zeros((120, 7))), row, end - begin, gram) == 0


def test_the_check_reads_a_few_entries_for_each_factor():
    assert sampled(100, 64) == 100
    assert sampled(10**5, 64) == 256
