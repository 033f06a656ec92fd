"""ALS with factors of at least zero: each row is the exact minimum under the constraint."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
from scipy.optimize import lsq_linear, nnls
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective
from hybridmf.core.validate import as_csr
from hybridmf.cpu.als import HalfSweep
from hybridmf.plan import dispatch
from hybridmf.ranks.transport.threads import run_ranks
from support.devices import SPECS
from support.half_sweeps import OBJECTIVES, dense_system, plan_for
from support.ratings import planted, rows_of

MODELS = {
    "implicit": hmf.ImplicitALS(6, alpha=4.0, nonnegative=True, device="cpu", dtype="float64", random_state=0),
    "explicit": hmf.ExplicitALS(6, nonnegative=True, device="cpu", dtype="float64", random_state=0),
    "no biases": hmf.ExplicitALS(6, biases=False, nonnegative=True, device="cpu", dtype="float64", random_state=0),
}


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


@pytest.mark.parametrize("name", MODELS)
def test_fits_stay_nonnegative_and_the_loss_never_rises(name):
    model = clone(MODELS[name]).fit(planted(), callback=lambda m, r: None)
    losses = [record["objective"] for record in model.history_]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]
    assert model.user_factors_.min() == 0 and model.item_factors_.min() >= 0
    assert 0.05 < (model.user_factors_ == 0).mean() < 0.95
    free = clone(model).set_params(nonnegative=False).fit(planted())
    assert free.objective(planted()) < losses[-1]
    one = clone(model).set_params(num_threads=1).fit(planted())
    np.testing.assert_array_equal(one.user_factors_, model.user_factors_)


def test_ccd_finds_no_better_factors_nearby():
    options = {"regularization": 0.1, "dtype": "float64", "device": "cpu", "nonnegative": True, "random_state": 0}
    als = hmf.ExplicitALS(2, biases=False, iterations=400, **options).fit(planted())
    ccd = hmf.CCD(2, init=als, iterations=5, **options).fit(planted())
    assert als.objective(planted()) == pytest.approx(ccd.objective(planted()), rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_serving_applies_the_constraint(name, tmp_path):
    model = clone(MODELS[name]).fit(planted())
    model.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    for served in (model, loaded):
        folded = served.transform(planted())
        np.testing.assert_allclose(folded[:, :6], model.user_factors_, rtol=1e-6, atol=1e-8)
        assert folded[:, :6].min() >= 0
        told = served.explain(3, 7, N=40)
        assert told.score == pytest.approx(float(served.predict(3, 7, clip=False)), rel=1e-6)
    loaded.partial_fit_users([60], planted()[:1])
    np.testing.assert_allclose(loaded.user_factors_[60], folded[0, :6], rtol=1e-6, atol=1e-8)


def test_ranks_stores_and_frozen_sides(tmp_path):
    model = clone(MODELS["explicit"]).fit(planted())
    store = hmf.convert(hmf.Ratings.from_matrix(planted()), tmp_path / "store", slab_bytes=900)
    others = [clone(model).fit(store), clone(model).set_params(device=["cpu", "cpu"]).fit(planted())]
    others += run_ranks(2, lambda communicator: hmf.scale.fit(clone(model), planted(), communicator))[:1]
    for other in others:
        np.testing.assert_allclose(other.user_factors_, model.user_factors_, rtol=1e-7, atol=1e-9)
    users = clone(model).set_params(init=FrozenEstimator(model)).fit(planted(), freeze="item")
    np.testing.assert_allclose(users.user_factors_, model.user_factors_, rtol=1e-6, atol=1e-8)


def test_auto_chooses_the_cpu(monkeypatch):
    monkeypatch.setattr(dispatch, "find_gpu", lambda device: (SPECS[90], "there is a GPU"))
    plan = hmf.plan(shape=(10**6, 10**5), nnz=10**8, model=hmf.ImplicitALS(nonnegative=True))
    assert plan.device == "cpu" and "nonnegative=True is the CPU's" in plan.reason
    assert "non-negative, by coordinate descent" in str(plan)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "cuda"}, ValueError, r"nonnegative=True runs on the CPU only, got device='cuda'.*CCD\("),
        ({"device": ["cuda:0", "cuda:1"]}, ValueError, "nonnegative=True runs on the CPU only"),
        ({"solver": "cg"}, ValueError, "nonnegative=True has a solver of its own.*in place of solver='cg'"),
        ({"assembly": "bals"}, ValueError, "nonnegative=True needs assembly"),
        ({"precision": "bf16"}, ValueError, "nonnegative=True needs assembly"),
        ({"balance": True}, ValueError, "balance=True leads to negative factors"),
        ({"row_form": "dual"}, ValueError, 'row_form="dual" does not apply'),
        ({"init": "signed"}, ValueError, 'init="signed" contradicts nonnegative=True'),
        ({"init": (-np.ones((60, 6)), None)}, ValueError, "user_factors has negative elements"),
        ({"nonnegative": 1}, TypeError, "nonnegative must be True or False"),
    ],
)
def test_bad_requests_are_refused(options, error, message, monkeypatch):
    if "device" in options:
        monkeypatch.setattr(dispatch, "find_gpu", lambda device: (SPECS[90], "asked for"))
    with pytest.raises(error, match=message):
        clone(MODELS["implicit"]).set_params(**options).fit(planted())


def test_factors_that_overflow_are_refused():
    fixed = Factors(np.full((120, 2), 1e30))
    matrix = as_csr(rows_of((5, 3), 120), dtype=np.float64)
    with pytest.raises(hmf.errors.NonFiniteError, match="factors of user 0 became infinite or NaN"):
        half_sweep(matrix, fixed, OBJECTIVES["explicit"], 0.0, "float32", 2)
