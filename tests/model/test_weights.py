"""Confidences that a user gives beside the feedback."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone

import hybridmf as hmf
from hybridmf.core.validate import as_csr
from support.ratings import planted

PLAYS = as_csr(planted(), dtype=np.float64).copy()
PLAYS.data = np.where(np.arange(PLAYS.nnz) % 7, PLAYS.data, -PLAYS.data)  # a seventh are dislikes
RNG = np.random.default_rng(0)
WEIGHTS = sp.csr_array((RNG.uniform(0.05, 4, PLAYS.nnz).astype(np.float32), PLAYS.indices, PLAYS.indptr), PLAYS.shape)
MODEL = hmf.ImplicitALS(4, regularization=0.3, alpha=2.0, iterations=3, dtype="float64", device="cpu", random_state=0)


def value_of(model, weights, unobserved: float) -> float:
    """The objective, cell by cell."""
    confidence = np.where(weights.toarray() > 0, weights.toarray(), unobserved)
    X, Y = model.user_factors_, model.item_factors_
    loss = (confidence * ((PLAYS.toarray() > 0) - X @ Y.T) ** 2).sum()
    lambdas = model._objective().regularization
    return loss + lambdas.user * (X**2).sum() + lambdas.item * (Y**2).sum()


@pytest.mark.parametrize("options", [{}, {"unobserved_weight": 0.0}, {"unobserved_weight": 0.02}])
def test_confidences_are_those_given(options, backend):
    """Each user's factors are the minimum for the items, under the weights."""
    model = clone(MODEL).set_params(device=backend, regularization=(0.3, 0.5), **options)
    model.fit(PLAYS, weights=WEIGHTS, callback=lambda m, r: None)
    Y, unobserved = model.item_factors_, model.unobserved_weight_
    for user in (0, 7, 59):
        c = np.where(WEIGHTS[[user]].toarray()[0] > 0, WEIGHTS[[user]].toarray()[0], unobserved)
        liked = PLAYS[[user]].toarray()[0] > 0
        expected = np.linalg.solve((Y.T * c) @ Y + 0.3 * np.eye(4), Y.T @ (c * liked))
        np.testing.assert_allclose(model.user_factors_[user], expected, rtol=1e-5, atol=1e-7)
    assert model.history_[-1]["objective"] == pytest.approx(value_of(model, WEIGHTS, unobserved), rel=1e-7)


def test_the_default_confidence_as_weights_is_the_default_fit():
    given = sp.csr_array((1 + 2.0 * np.abs(PLAYS.data), PLAYS.indices, PLAYS.indptr), PLAYS.shape)
    one, two = clone(MODEL).fit(PLAYS), clone(MODEL).set_params(alpha=50.0).fit(PLAYS, weights=given)
    np.testing.assert_allclose(two.user_factors_, one.user_factors_, rtol=1e-7, atol=1e-9)


def test_labels_decide():
    users, items = [f"u{k}" for k in range(60)], [f"i{k}" for k in range(40)]
    plays = hmf.Ratings.from_matrix(PLAYS, user_ids=users, item_ids=items)
    order, columns = RNG.permutation(60), RNG.permutation(40)
    shuffled = hmf.Ratings.from_matrix(
        WEIGHTS[order][:, columns], user_ids=[users[k] for k in order], item_ids=[items[k] for k in columns]
    )
    expected = clone(MODEL).fit(PLAYS, weights=WEIGHTS)
    found = clone(MODEL).fit(plays, weights=shuffled)
    np.testing.assert_allclose(found.user_factors_, expected.user_factors_, rtol=1e-6, atol=1e-8)
    plain = clone(MODEL).fit(plays, weights=WEIGHTS)  # in positions
    np.testing.assert_allclose(plain.user_factors_, expected.user_factors_, rtol=1e-6, atol=1e-8)
    with pytest.raises(hmf.errors.RatingsError, match="weights has user labels and user_items only positions"):
        clone(MODEL).fit(PLAYS, weights=shuffled)


def test_serving_after_the_fit(tmp_path):
    model = clone(MODEL).fit(PLAYS, weights=WEIGHTS)
    plain = clone(MODEL).fit(PLAYS)
    assert model._learned.objective == plain._learned.objective
    assert model.transform(PLAYS).shape == (60, 4) and np.isfinite(model.objective(PLAYS))
    assert model._learned.is_training_data(PLAYS)
    with pytest.raises(ValueError, match=r"fitted on a store or with weights.*pass user_items"):
        model.explain(3, 7)
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(hmf.load(tmp_path / "model").recommend(3)[0], model.recommend(3)[0])


def test_checkpoints_belong_to_the_weights(tmp_path):
    clone(MODEL).fit(PLAYS, weights=WEIGHTS, checkpoint=tmp_path)
    more = clone(MODEL).set_params(iterations=5)
    straight = clone(more).fit(PLAYS, weights=WEIGHTS)
    resumed = clone(more).fit(PLAYS, weights=WEIGHTS, resume_from=tmp_path)
    np.testing.assert_array_equal(resumed.user_factors_, straight.user_factors_)
    with pytest.raises(hmf.errors.ModelFileError, match="other data"):
        more.fit(PLAYS, weights=2 * WEIGHTS, resume_from=tmp_path)


def changed(weights, **arrays):
    copy = weights.copy()
    for name, array in arrays.items():
        setattr(copy, name, array)
    return copy


@pytest.mark.parametrize(
    ("model", "weights", "error", "message"),
    [
        (hmf.ExplicitALS(4), WEIGHTS, ValueError, "which only ImplicitALS has"),
        (hmf.SGD(4), WEIGHTS, ValueError, "which only ImplicitALS has"),
        (hmf.ImplicitALS(4, unobserved_weight=2.0), WEIGHTS, ValueError, "weights need unobserved_weight <= 1, got 2"),
        (MODEL, WEIGHTS.data, TypeError, "got one dimension; give"),
        (MODEL, WEIGHTS[:50], ValueError, "weights"),
        (
            MODEL,
            sp.csr_array(WEIGHTS.toarray() + 1),
            hmf.errors.RatingsError,
            "weights has 2400 entries, and not those of",
        ),
        (MODEL, changed(WEIGHTS, data=-WEIGHTS.data), hmf.errors.RatingsError, "weights must be > 0, got -"),
        (MODEL, changed(WEIGHTS, data=WEIGHTS.data * np.nan), hmf.errors.RatingsError, "weights"),
    ],
)
def test_bad_weights_are_refused(model, weights, error, message):
    with pytest.raises(error, match=message):
        clone(model).fit(PLAYS, weights=weights)


def test_a_store_has_no_weights(tmp_path):
    store = hmf.convert(hmf.Ratings.from_matrix(PLAYS), tmp_path / "store")
    with pytest.raises(TypeError, match="weights need ratings in memory"):
        clone(MODEL).fit(store, weights=WEIGHTS)
