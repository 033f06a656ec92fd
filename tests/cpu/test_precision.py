"""Systems beyond the precision of float32: a warning where the result is wrong, and none where it is right."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
from sklearn.base import clone

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective
from hybridmf.core.row_systems import Row, least_pivot, row_system
from hybridmf.core.validate import as_csr
from hybridmf.ranks.transport.threads import run_ranks
from support.devices import serve_cuda
from support.half_sweeps import OBJECTIVES, dense_system
from support.ranks import entries, fit_rank
from support.ratings import planted, rows_of


def two_users(items: int = 20_000) -> sp.csr_array:
    """Each item has two ratings: item factors span two dimensions, and lambda alone makes user systems definite."""
    return sp.csr_array(np.random.default_rng(0).integers(1, 6, (2, items)).astype(np.float32))


def fit(items: int, regularization: float, dtype: str = "float32"):
    model = hmf.ExplicitALS(
        64, regularization=regularization, regularization_scaling="none", biases=False, iterations=2, dtype=dtype,
        random_state=0, device="cpu",
    )  # fmt: skip
    return model.fit(two_users(items)).objective(two_users(items))


@pytest.mark.parametrize(
    ("items", "regularization"),
    [*((20_000, value) for value in (0.1, 1.0, 3.0, 10.0)), (10_000, 1.0), (10_000, 3.0), (2000, 0.3), (2000, 1.0)],
)
def test_a_warning_tells_wrong_results_from_right_ones(items, regularization, caplog):
    exact = fit(items, regularization, "float64")
    assert not caplog.records
    found = fit(items, regularization)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warned) == (abs(found / exact - 1) > 1e-2)
    assert len(warned) <= 1  # once a fit
    for text in warned:
        assert "the equations of user 0, and probably others, are beyond the precision of float32" in text
        assert f'increase regularization (now {regularization:g}), or use dtype="float64"' in text


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "beyond the precision" in record.getMessage()]


FEW = {"factors": 16, "regularization_scaling": "none", "biases": False, "iterations": 2, "random_state": 0}


def narrow(columns: int = 3000) -> sp.csr_array:
    return two_users()[:, :columns]


@pytest.mark.parametrize(
    ("where", "regularization", "wrong"),
    [("memory", 100.0, False), ("memory", 0.1, True), ("store to a gpu", 0.02, True), ("two ranks", 0.1, True)],
)
def test_fits_anywhere_warn_once(where, regularization, wrong, device, monkeypatch, tmp_path, caplog):
    serve_cuda(device, monkeypatch)
    place = "cuda" if "gpu" in where else "cpu"
    model = hmf.ExplicitALS(regularization=regularization, device=place, **FEW)
    # a store is narrower, with as much less of a penalty: emulated kernels take their time
    given = hmf.convert(narrow(600), tmp_path / "store", slab_bytes=800) if "store" in where else narrow()
    if where == "two ranks":
        run_ranks(2, lambda c: fit_rank(clone(model), entries(given, c.rank, 2), c), timeout=30)
    else:
        model.fit(given)
    assert len(warnings(caplog)) == wrong
    assert not wrong or "user 0" in warnings(caplog)[0]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_new_rows_warn_once_a_state(place, device, monkeypatch, caplog):
    serve_cuda(device, monkeypatch)
    items = np.random.default_rng(0).normal(size=(3000, 2)) @ np.random.default_rng(1).normal(size=(2, 16))
    model = hmf.ExplicitALS(regularization=0.05, device=place, init=(None, items.astype(np.float32)), **FEW)
    model.fit(sp.csr_array(np.eye(16, 3000, dtype=np.float32)), freeze="item")  # one rating each: the dual form
    assert not warnings(caplog)
    row = narrow()[[0]]
    for call in (model.recommend_new, model.transform):
        call(row)
    assert len(warnings(caplog)) == 1 and "in the rows given, the equations of user 0" in warnings(caplog)[0]
    model.partial_fit_users([3], row)
    model.transform(row)
    assert len(warnings(caplog)) == 2  # another state


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
    row = Row(matrix.indices[begin:end], matrix.data[begin:end], end - begin)
    assert least_pivot(row_system(objective, "user", row, fixed, 0.0, gram)[0]) == pytest.approx(expected, rel=1e-6)
    singular = Objective("explicit", 0.0)
    assert least_pivot(row_system(singular, "user", row, Factors(np.zeros((120, 7))))[0]) == 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_system_of_a_row_is_the_dense_one(name):
    objective: Objective = OBJECTIVES[name]
    matrix = as_csr(rows_of((0, 5, 90), 120), dtype=np.float64)
    rng = np.random.default_rng(1)
    fixed = Factors(rng.normal(size=(120, 7)), rng.normal(size=120) if objective.biases else None)
    begin, end = matrix.indptr[2:4]
    row = Row(matrix.indices[begin:end], matrix.data[begin:end], end - begin)
    gram = objective.unobserved_weight * fixed.matrix.T @ fixed.matrix
    mean = 1.5 if objective.biases else 0.0
    found = row_system(objective, "user", row, fixed, mean, gram)
    for ours, expected in zip(found[:2], dense_system(matrix, 2, fixed, mean, objective), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_a_check_reads_a_few_entries_for_each_factor():
    row = Row(np.arange(10**5), np.ones(10**5), 10**5)
    assert len(row.sample(64).columns) <= 256 and row.sample(64).n_entries == 10**5
    few = Row(np.arange(100), np.ones(100), 100)
    assert few.sample(64).columns is not None and len(few.sample(64).columns) == 100
