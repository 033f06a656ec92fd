"""ALS with factors of at least zero: fits, serving and requests that cannot be served, on both devices."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator

import hybridmf as hmf
from hybridmf.ranks.transport.threads import run_ranks
from support.ratings import planted

COMMON = {"factors": 6, "iterations": 4, "nonnegative": True, "device": "cpu", "dtype": "float64", "random_state": 0}
MODELS = {
    "implicit": hmf.ImplicitALS(alpha=4.0, **COMMON),
    "explicit": hmf.ExplicitALS(regularization=0.05, **COMMON),
    "no biases": hmf.ExplicitALS(biases=False, **COMMON),
}


@pytest.mark.parametrize("name", MODELS)
def test_fits_stay_nonnegative_and_the_loss_never_rises(name, backend):
    matrix = planted(24, 16, 0.4)
    model = clone(MODELS[name]).set_params(device=backend).fit(matrix, callback=lambda m, r: None)
    losses = [record["objective"] for record in model.history_]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]
    assert model.user_factors_.min() == 0 and model.item_factors_.min() >= 0
    assert 0.05 < (model.user_factors_ == 0).mean() < 0.95
    free = clone(model).set_params(nonnegative=False, device="cpu").fit(matrix)
    assert free.objective(matrix) < losses[-1]
    one = clone(model).set_params(num_threads=1).fit(matrix)
    np.testing.assert_array_equal(one.user_factors_, model.user_factors_)


def test_ccd_finds_no_better_factors_nearby():
    options = {"regularization": 0.1, "dtype": "float64", "device": "cpu", "nonnegative": True, "random_state": 0}
    als = hmf.ExplicitALS(2, biases=False, iterations=200, **options).fit(planted())
    ccd = hmf.CCD(2, biases=False, init=als, iterations=5, **options).fit(planted())
    assert als.objective(planted()) == pytest.approx(ccd.objective(planted()), rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_serving_applies_the_constraint(name, tmp_path, backend):
    model = clone(MODELS[name]).set_params(device=backend).fit(planted())
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


def test_the_plan_says_how():
    plan = hmf.plan(shape=(10**6, 10**5), nnz=10**8, model=hmf.ImplicitALS(nonnegative=True, device="cpu"))
    assert "non-negative, by coordinate descent, assembly simd" in str(plan)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"solver": "cg"}, ValueError, "nonnegative=True has a solver of its own.*in place of solver='cg'"),
        ({"assembly": "bals"}, ValueError, "one of simd, fused, sparse_syrk, mo_als, got assembly='bals'"),
        ({"balance": True}, ValueError, "balance=True leads to negative factors"),
        ({"row_form": "dual"}, ValueError, 'row_form="dual" does not apply'),
        ({"init": "signed"}, ValueError, 'init="signed" contradicts nonnegative=True'),
        ({"init": (-np.ones((60, 6)), None)}, ValueError, "user_factors has negative elements"),
        ({"nonnegative": 1}, TypeError, "nonnegative must be True or False"),
    ],
)
def test_bad_requests_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        clone(MODELS["implicit"]).set_params(**options).fit(planted())
