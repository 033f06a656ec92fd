"""score and objective of training users and new ones."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.errors import RatingsError
from support import reference
from support.messages import says
from support.ratings import planted
from support.served_models import KINDS, N_ITEMS, assert_same, fitted, make, snapshot

# --------------------------------------------------------------------------------------------------- score, objective


def test_score_of_training_users_explicit():
    matrix = planted(density=0.4)
    train, test = hmf.split(matrix, 0.2, 0)
    for kind in ("explicit", "biases"):
        model = make(kind).fit(train)
        rows, columns = test.nonzero()
        error = model.predict(rows, columns) - np.asarray(test[rows, columns]).ravel()
        assert model.score(test) == pytest.approx(-np.sqrt(np.mean(error**2)), rel=1e-6)
        assert model.score(test, users="training") == model.score(test)
        assert model.score(train) == pytest.approx(hmf.evaluate(model, train, metrics="rmse")["rmse"] * -1)


def test_score_of_training_users_implicit():
    train, test = hmf.split(planted(density=0.4), 0.2, 0)
    model = make("implicit").fit(train)
    assert 0 < model.score(test) == hmf.evaluate(model, test, metrics="ndcg@10")["ndcg@10"]


@pytest.mark.parametrize("kind", ["explicit", "biases"])
def test_score_of_new_users_hides_every_fifth_entry(kind):
    model, rows = fitted(kind), planted(7, N_ITEMS, density=0.4, seed=4)
    shown, truth, where = rows.toarray(), [], []
    for user in range(7):
        columns = np.flatnonzero(shown[user])
        columns = columns[np.argsort(np.random.default_rng(0).permutation(N_ITEMS)[columns])]
        hidden = columns[4::5] if len(columns) >= 5 else columns[-1:] if len(columns) >= 2 else columns[:0]
        truth.extend(shown[user, hidden])
        where.extend((user, item) for item in hidden)
        shown[user, hidden] = 0
    folded = reference.half_sweep(sp.csr_array(shown), model._learned.state.item, model.mean_, model._learned.objective)
    users, items = np.array(where).T
    predicted = np.einsum("ij,ij->i", folded.matrix[users], model.item_factors_[items])
    if kind == "biases":
        predicted += model.mean_ + folded.bias[users] + model.item_bias_[items]
    training = planted().data
    expected = -np.sqrt(np.mean((np.clip(predicted, training.min(), training.max()) - truth) ** 2))
    assert model.score(rows) == pytest.approx(expected, rel=1e-3)
    assert model.score(rows, users="new") == model.score(rows)


def test_score_distinguishes_training_users_from_new_ones():
    model = fitted()
    rows = planted(seed=1)  # as many rows as users, some entries among the training data, some not
    assert model.score(rows) == model.score(rows, users="new")
    assert model.score(planted()) == model.score(planted(), users="training") != model.score(planted(), users="new")


def test_new_users_of_dense_ratings_are_new():
    """What GridSearchCV(cv=2) does with a dense matrix: both halves have entries everywhere."""
    ratings = np.random.default_rng(0).integers(1, 6, (40, 12)).astype(float)
    model = make(factors=2).fit(ratings[:20])
    assert model.score(ratings[20:]) == model.score(ratings[20:], users="new")


def test_implicit_score_of_the_training_data_is_not_zero():
    assert fitted("implicit").score(planted()) > 0


@pytest.mark.parametrize(
    ("matrix", "users", "kind", "parts"),
    [
        (planted(), "old", ValueError, ("users must be one of 'auto', 'training', 'new'; got 'old'",)),
        (planted()[:5], "training", RatingsError, ("user_items has shape (5, 40); expected (n_users=60, n_items=40)",)),
        (sp.csr_array(([1.0], ([0], [0])), shape=(1, 40)), "new", RatingsError, ("no row with two or more entries",)),
        (sp.csr_array((60, 40)), "auto", ValueError, ("no entry",)),
        (sp.csr_array((3, 40)), "auto", RatingsError, ("user_items has no row with two or more entries",)),
    ],
)
def test_score_refuses(matrix, users, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        fitted().score(matrix, users=users)


def test_score_does_not_change_the_model():
    model = fitted("biases")
    before = snapshot(model)
    model.score(planted(7, N_ITEMS, seed=2))
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("kind", KINDS)
def test_objective_is_the_sum_over_all_cells(kind):
    model = fitted(kind)
    for matrix in (planted(), planted(seed=3)):
        expected = reference.objective_value(matrix, model._learned.state, model._learned.objective)
        assert model.objective(matrix) == pytest.approx(expected, rel=1e-6)
        assert model.objective(matrix.toarray()) == model.objective(matrix)
    assert isinstance(model.objective(planted()), float)


def test_history_records_requested_values():
    train, test = hmf.split(planted(density=0.4), 0.2, 0)
    plain = make().fit(train)
    assert [set(record) for record in plain.history_] == [{"iteration", "seconds"}] * 3
    watched = make().fit(train, validation=test)
    assert [record["iteration"] for record in watched.history_] == [1, 2, 3]
    assert watched.history_[-1]["objective"] == watched.objective(train)
    assert watched.history_[-1]["rmse"] == pytest.approx(-watched.score(test), rel=1e-9)
    implicit = make("implicit").fit(train, validation=test)
    assert implicit.history_[-1]["ndcg@10"] == implicit.score(test)
    np.testing.assert_array_equal(watched.user_factors_, plain.user_factors_)


def test_objective_refuses_other_shapes():
    with pytest.raises(
        RatingsError, match=says("user_items has shape (40, 60); expected (n_users=60, n_items=40)", ".T")
    ):
        fitted().objective(planted().T)
    with pytest.raises(RatingsError, match=says("user_items has shape (59, 40)")):
        fitted().objective(planted()[1:])
