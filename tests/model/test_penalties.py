"""Penalties that differ between users and items, and that count pairs without an entry."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import hybridmf as hmf
from hybridmf.core.objective import Factors, State
from hybridmf.core.validate import as_csr
from hybridmf.ranks.transport.threads import run_ranks
from support import reference
from support.ratings import planted

M, N = 30, 20
RATINGS = planted(M, N, 0.4)
MATRIX = as_csr(RATINGS, dtype=np.float64)
COMMON = {"factors": 4, "iterations": 2, "random_state": 0, "dtype": "float64"}
TWO_SIDED = {"regularization": (0.1, 0.7), "regularization_scaling": ("count", 0.5)}
MODELS = {
    "implicit": hmf.ImplicitALS(**COMMON, **TWO_SIDED, alpha=2.0, unobserved_weight=0.3, count_unobserved=True),
    "implicit, plain": hmf.ImplicitALS(**COMMON, regularization=(0.1, 0.7), alpha=2.0),
    "explicit": hmf.ExplicitALS(**COMMON, **TWO_SIDED, biases=False),
    "explicit, biases": hmf.ExplicitALS(**COMMON, **TWO_SIDED, bias_regularization=(0.2, 3.0)),
    "explicit, default biases": hmf.ExplicitALS(**COMMON, **TWO_SIDED),
    "ccd": hmf.CCD(**COMMON, **TWO_SIDED),
    "ccd, biases": hmf.CCD(**COMMON, **TWO_SIDED, biases=True, bias_regularization=(0.2, 3.0)),
}


def start_of(model) -> State:
    """The initial factors, given as arrays."""
    rng = np.random.default_rng(1)
    rank = model.factors
    rows = [Factors(rng.random((n, rank)), np.zeros(n) if getattr(model, "biases", False) else None) for n in (M, N)]
    rows[0].matrix[M // 2], rows[1].matrix[N // 3] = 0, 0  # without entries
    return State(*rows, RATINGS.data.mean(dtype=np.float64) if rows[0].bias is not None else 0.0)


def fitted(name: str, **options):
    """A model fitted from known factors, and what the reference makes of them."""
    model = clone(MODELS[name]).set_params(**options)
    start = start_of(model)
    model.set_params(init=(start.user.matrix, start.item.matrix)).fit(RATINGS, callback=lambda m, r: None)
    solve = reference.ccd if isinstance(model, hmf.CCD) else reference.fit
    return model, solve(MATRIX, start, model._learned.objective, 2)


@pytest.mark.parametrize("name", MODELS)
def test_fits_follow_the_reference_on_every_device(name, backend):
    model, expected = fitted(name, device=backend)
    np.testing.assert_allclose(model.user_factors_, expected.user.matrix, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(model.item_factors_, expected.item.matrix, rtol=1e-8, atol=1e-10)
    if expected.item.bias is not None:
        np.testing.assert_allclose(model.item_bias_, expected.item.bias, rtol=1e-8, atol=1e-10)
    value = reference.objective_value(MATRIX, expected, model._learned.objective)
    assert model.history_[-1]["objective"] == pytest.approx(value, rel=1e-9)
    assert model.objective(RATINGS) == pytest.approx(value, rel=1e-9)
    rows = model.transform(RATINGS)
    exact = reference.half_sweep(MATRIX, model._learned.state.item, model._learned.state.mean, model._learned.objective)
    np.testing.assert_allclose(rows[:, :4], exact.matrix, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["implicit", "explicit, biases"])
@pytest.mark.parametrize("options", [{"assembly": "bals"}, {"assembly": "rank1"}, {"row_form": "primal"}])
def test_other_kernels_of_the_cpu(name, options):
    model, expected = fitted(name, device="cpu", **options)
    np.testing.assert_allclose(model.user_factors_, expected.user.matrix, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["implicit, plain", "explicit", "explicit, biases"])
def test_dual_form(name):
    model, expected = fitted(name, device="cpu", row_form="dual", factors=16)
    np.testing.assert_allclose(model.user_factors_, expected.user.matrix, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(model.item_factors_, expected.item.matrix, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["implicit", "explicit, biases"])
def test_ranks_and_several_devices(name):
    one, _ = fitted(name, device="cpu", balance=True)
    two, _ = fitted(name, device=["cpu", "cpu"], balance=True)
    first, *_ = run_ranks(2, lambda communicator: hmf.scale.fit(clone(one), RATINGS, communicator))
    for other in (two, first):
        np.testing.assert_allclose(other.user_factors_, one.user_factors_, rtol=1e-8, atol=1e-10)
        assert other._learned.objective == one._learned.objective


def test_balance_weighs_the_sides_by_their_lambdas(backend):
    """A change of basis keeps predictions and has the least penalty; sides exchange length with their lambdas."""
    options = COMMON | {"iterations": 30, "biases": False, "device": backend, "balance": True}
    model = hmf.ExplicitALS(**options, regularization=(0.01, 1.0)).fit(RATINGS)
    users, items = (
        model._learned.objective.penalty(side, factors, counts)
        for side, factors, counts in (
            ("user", model.user_factors_, np.diff(MATRIX.indptr)),
            ("item", model.item_factors_, np.bincount(MATRIX.indices, minlength=N)),
        )
    )
    assert users == pytest.approx(items, rel=1e-2)


def test_predictions_depend_on_the_product_of_the_lambdas():
    start = start_of(MODELS["explicit"]).user.matrix
    options = COMMON | {"biases": False, "device": "cpu"}
    one = hmf.ExplicitALS(**options, regularization=0.2, init=(start, None)).fit(RATINGS)
    two = hmf.ExplicitALS(**options, regularization=(0.1, 0.4), init=(start * np.sqrt(2), None)).fit(RATINGS)
    np.testing.assert_allclose(two.user_factors_, one.user_factors_ * np.sqrt(2), rtol=1e-9)
    np.testing.assert_allclose(two.item_factors_, one.item_factors_ / np.sqrt(2), rtol=1e-9)


def test_frequency_scaling_of_rendle():
    """lambda (n_u + alpha_0 |I|)^nu of users, lambda (n_i + alpha_0 |U|)^nu of items."""
    scaled = hmf.ImplicitALS(
        regularization=0.5, regularization_scaling=0.7, unobserved_weight=0.2, count_unobserved=True
    )
    objective = scaled._objective().for_shape((60, 40))
    np.testing.assert_allclose(objective.row_scale("user", np.array([3, 0])), [11**0.7, 9**0.7])
    np.testing.assert_allclose(objective.row_scale("item", np.array([3])), [15**0.7])


@pytest.mark.parametrize("name", ["implicit", "explicit, default biases", "ccd, biases"])
def test_files_clones_and_checkpoints_keep_pairs(name, tmp_path):
    model, _ = fitted(name, device="cpu")
    model.partial_fit_items([N], np.ones((M, 1)))  # one more pair of each user, which the fit did not count
    model.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    assert loaded._learned.objective == model._learned.objective
    rows = np.pad(RATINGS.toarray(), ((0, 0), (0, 1)))
    np.testing.assert_array_equal(loaded.transform(rows), model.transform(rows))
    again = clone(model).fit(RATINGS, checkpoint=tmp_path / "run")
    resumed = clone(model).set_params(iterations=3).fit(RATINGS, resume_from=tmp_path / "run")
    longer = clone(model).set_params(iterations=3).fit(RATINGS)
    np.testing.assert_array_equal(resumed.user_factors_, longer.user_factors_)
    assert again.get_params()["regularization"] == (0.1, 0.7)
    with pytest.raises(hmf.errors.ModelFileError, match="regularization"):
        clone(model).set_params(regularization=0.1).fit(RATINGS, resume_from=tmp_path / "run")


def test_grids_mix_numbers_and_pairs():
    grid = {"regularization": [0.1, (0.1, 1.0)], "regularization_scaling": ["count", ("count", 0.5)]}
    search = GridSearchCV(hmf.ExplicitALS(4, iterations=2, device="cpu", random_state=0), grid, cv=2).fit(RATINGS)
    assert len(search.cv_results_["params"]) == 4 and np.isfinite(search.best_score_)


def test_a_strong_penalty_is_reported_as_given(caplog):
    hmf.ExplicitALS(4, regularization=(1e6, 1e3), device="cpu", biases=False, iterations=3).fit(RATINGS)
    assert "regularization=(1e+06, 1000) is too strong" in caplog.text


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (hmf.ExplicitALS(regularization=(0.1, 0.2, 0.3)), ValueError, r"a pair \(users, items\); got 3 values"),
        (hmf.ExplicitALS(regularization=(0.1, -1)), ValueError, "regularization of items must be >= 0, got -1"),
        (hmf.ExplicitALS(regularization=("0.1", 1)), TypeError, "regularization of users must be a real number"),
        (hmf.CCD(regularization_scaling=("count", "all")), ValueError, "regularization_scaling of items must be one"),
        (hmf.ImplicitALS(count_unobserved=True), ValueError, "count_unobserved=True has no effect with"),
        (hmf.ImplicitALS(count_unobserved=1), TypeError, "count_unobserved must be True or False"),
        (
            hmf.SGD(regularization=(0.1, 0.2), bias_regularization=0.1, schedule="blocks"),
            ValueError,
            r"regularization=\(0.1, 0.2\) needs schedule='msgd', .* got schedule='blocks'",
        ),
        (
            hmf.SGD(biases=True, bias_regularization=(0.1, 0.2), schedule="hogwild"),
            ValueError,
            r"bias_regularization=\(0.1, 0.2\) needs schedule='msgd'",
        ),
        (hmf.SGD(regularization=(0.1, 1e4), device="cpu"), ValueError, r"learning_rate \* regularization must be < 1"),
    ],
)
def test_bad_values_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        model.fit(RATINGS)


def test_alpha_is_redundant_beside_the_weight_of_unobserved_pairs():
    """The conversion of docs/tuning.md, on data without values."""
    clicks = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.03, seed=0).binarize()
    settings = {"factors": 3, "iterations": 3, "dtype": "float64", "random_state": 0}
    one = hmf.ImplicitALS(alpha=3.0, unobserved_weight=0.4, regularization=2.0, **settings).fit(clicks)
    other = hmf.ImplicitALS(alpha=0.0, unobserved_weight=0.1, regularization=0.5, **settings).fit(clicks)
    np.testing.assert_allclose(one.item_factors, other.item_factors, rtol=1e-6)


def test_sgd_takes_a_pair():
    """The side with the strong lambda gets short factors."""
    options = {"factors": 4, "iterations": 15, "biases": False, "device": "cpu", "random_state": 0}

    def lengths(regularization):
        model = hmf.SGD(regularization=regularization, **options).fit(RATINGS)
        return np.linalg.norm(model.user_factors), np.linalg.norm(model.item_factors), model

    users, items, model = lengths((1.0, 0.01))
    assert model.regularization_ == (1.0, 0.01)
    swapped = lengths((0.01, 1.0))
    assert users < items and swapped[0] > swapped[1]
    assert users < swapped[0] and items > swapped[1]
    assert lengths((0.3, 0.3))[:2] == lengths(0.3)[:2]
