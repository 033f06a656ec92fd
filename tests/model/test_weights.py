"""Weights of entries: confidences that a user gives beside the feedback, and weights of explicit errors."""

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


def one_at_3(value):
    found = np.ones(WEIGHTS.nnz)
    found[3] = value
    return found


POSITIVE = "weights must be > 0 and finite in float.."


@pytest.mark.parametrize(
    ("model", "weights", "error", "message"),
    [
        (hmf.SGD(4), WEIGHTS, ValueError, "SGD has no weights of entries"),
        (hmf.ImplicitALS(4, unobserved_weight=2.0), WEIGHTS, ValueError, "weights need unobserved_weight <= 1, got 2"),
        (MODEL, WEIGHTS.data[:5], hmf.errors.RatingsError, "weights has 5 elements for"),
        (MODEL, WEIGHTS[:50], ValueError, "weights"),
        (
            MODEL,
            sp.csr_array(WEIGHTS.toarray() + 1),
            hmf.errors.RatingsError,
            "weights has 2400 entries, and not those of",
        ),
        (MODEL, changed(WEIGHTS, data=-WEIGHTS.data), hmf.errors.RatingsError, f"{POSITIVE}, got -"),
        (MODEL, changed(WEIGHTS, data=WEIGHTS.data * np.nan), hmf.errors.RatingsError, "weights has the value nan"),
        *(
            (
                kind,
                one_at_3(value),
                hmf.errors.RatingsError,
                f"{POSITIVE}, got {value:g} for entry 3, and 1 such".replace("+", "."),
            )
            for kind in (hmf.ImplicitALS(4), hmf.ExplicitALS(4))
            for value in (0.0, np.inf, 1e300, 1e-300)
        ),
        (MODEL, WEIGHTS.data.astype(complex), TypeError, "weights must be real numbers, got dtype complex128"),
        (MODEL, WEIGHTS.data.astype(str), TypeError, "weights must be real numbers, got dtype <U"),
        (MODEL, np.full(WEIGHTS.nnz, None), hmf.errors.RatingsError, f"{POSITIVE}, got nan"),
        (MODEL, np.full(WEIGHTS.nnz, "much", object), TypeError, "weights must be real numbers, got dtype object"),
    ],
)
def test_bad_weights_are_refused(model, weights, error, message):
    with pytest.raises(error, match=message):
        clone(model).fit(PLAYS, weights=weights)


def test_a_vector_of_weights_is_a_list_or_has_objects():
    expected = clone(MODEL).fit(PLAYS, weights=WEIGHTS.data).item_factors
    for given in (WEIGHTS.data.tolist(), WEIGHTS.data.astype(object)):
        np.testing.assert_array_equal(clone(MODEL).fit(PLAYS, weights=given).item_factors, expected)


def test_a_store_has_no_weights(tmp_path):
    store = hmf.convert(hmf.Ratings.from_matrix(PLAYS), tmp_path / "store")
    with pytest.raises(TypeError, match="weights need ratings in memory"):
        clone(MODEL).fit(store, weights=WEIGHTS)


# ------------------------------------------------------------------------------------------------ explicit ratings

STARS = as_csr(planted(), dtype=np.float64)
OF_STARS = RNG.uniform(0.2, 5, STARS.nnz).astype(np.float32)
EXPLICIT = {
    "plain": {"biases": False, "regularization": 0.4},
    "biases": {"regularization": (0.4, 0.7), "regularization_scaling": 0.5, "bias_regularization": 0.3},
    "dual": {"row_form": "dual", "factors": 24, "regularization": 0.4},
    "rank1": {"assembly": "rank1", "regularization": 0.4},
    "blas3": {"assembly": "blas3", "regularization": 0.4},
    "cg": {"solver": "cg", "cg_steps": 20, "regularization": 0.4},
}
ON_GPUS = ("plain", "biases", "sparse_syrk", "rank-90")
ALL_EXPLICIT = EXPLICIT | {
    "sparse_syrk": {"assembly": "sparse_syrk", "regularization": 0.4},
    "rank-90": {"factors": 90, "biases": False, "regularization": 0.4, "iterations": 1},
}


def explicit(case, device="cpu", **options):
    given = {"factors": 4, "iterations": 2, "device": device, "random_state": 0} | ALL_EXPLICIT[case] | options
    return hmf.ExplicitALS(**given)


def user_by_hand(model, user: int, weights=OF_STARS) -> np.ndarray:
    """The minimum of a user's weighted errors for the items of a model, the bias last."""
    span = slice(*STARS.indptr[user : user + 2])
    columns, w = STARS.indices[span], weights[span].astype(np.float64)
    design, target = model.item_factors_[columns].astype(np.float64), STARS.data[span].astype(np.float64)
    objective = model._fitted().objective
    scale = objective.row_scale("user", np.array([len(columns)]))[0]
    if objective.biases:
        target = target - model.mean_ - model.item_bias_[columns]
        design = np.column_stack((design, np.ones(len(columns))))
    ridge = scale * objective.ridge("user", model.item_factors_.shape[1], design.shape[1])
    return np.linalg.solve((design.T * w) @ design + np.diag(ridge), design.T @ (w * target))


def weighted_objective(model) -> float:
    objective, X, Y = model._fitted().objective, model.user_factors_.astype(float), model.item_factors_.astype(float)
    rows, columns = STARS.nonzero()
    errors = STARS.data - (X[rows] * Y[columns]).sum(axis=1)
    if objective.biases:
        errors -= model.mean_ + model.user_bias_[rows] + model.item_bias_[columns]
    degrees = {"user": np.diff(STARS.indptr), "item": np.bincount(STARS.indices, minlength=STARS.shape[1])}
    biases = {"user": model.user_bias_, "item": model.item_bias_}
    penalty = sum(
        objective.penalty(side, factors, degrees[side], biases[side]) for side, factors in (("user", X), ("item", Y))
    )
    return float((OF_STARS * errors**2).sum() + penalty)


def check_explicit(model, tolerance):
    for user in (0, 7, 59):
        own = model.user_factors_[user]
        own = own if model.user_bias_ is None else np.append(own, model.user_bias_[user])
        np.testing.assert_allclose(own, user_by_hand(model, user), rtol=tolerance, atol=tolerance)
    assert model.history_[-1]["objective"] == pytest.approx(weighted_objective(model), rel=tolerance)


@pytest.mark.parametrize("case", sorted(EXPLICIT))
def test_errors_of_explicit_ratings_are_weighted(case):
    model = explicit(case, dtype="float64").fit(STARS, weights=OF_STARS, callback=lambda m, r: None)
    check_explicit(model, 1e-6)
    if model.biases:
        assert model.mean_ == pytest.approx(np.average(STARS.data, weights=OF_STARS), rel=1e-6)


@pytest.mark.parametrize("case", ON_GPUS)
def test_errors_of_explicit_ratings_are_weighted_on_a_gpu(case, gpu):
    model = explicit(case, "cuda").fit(STARS, weights=OF_STARS, callback=lambda m, r: None)
    check_explicit(model, 5e-3)


def test_long_rows_are_weighted(gpu):
    ratings = as_csr(planted(900, 6, 0.9), dtype=np.float32)
    weights = RNG.uniform(0.2, 5, ratings.nnz).astype(np.float32)
    one, two = (explicit("biases", device, iterations=1).fit(ratings, weights=weights) for device in ("cuda", "cpu"))
    np.testing.assert_allclose(one.item_factors, two.item_factors, rtol=5e-3, atol=5e-3)


def test_equal_weights_are_a_scale_of_the_penalty():
    twice = explicit("plain", dtype="float64", regularization=0.8).fit(STARS, weights=np.full(STARS.nnz, 2.0))
    once = explicit("plain", dtype="float64").fit(STARS)
    np.testing.assert_allclose(twice.user_factors_, once.user_factors_, rtol=1e-6, atol=1e-8)


def test_weights_join_features(backend):
    features = RNG.random((40, 3)).astype(np.float32)
    model = explicit("biases", backend, iterations=4).fit(STARS, weights=OF_STARS, item_features=features)
    other = explicit("biases", iterations=4, dtype="float64", row_form="primal").fit(
        STARS, weights=OF_STARS, item_features=features
    )
    got, want = (m.user_factors_ @ m.item_factors_.T for m in (model, other))
    assert np.abs(got - want).max() < 5e-3 * np.abs(want).max()


def test_weights_of_ratings_are_those_of_the_fit():
    ratings = hmf.Ratings.from_matrix(STARS.astype(np.float32)).with_weights(OF_STARS)
    given = explicit("biases").fit(STARS, weights=OF_STARS)
    assert np.array_equal(explicit("biases").fit(ratings).user_factors, given.user_factors)
    implicit = clone(MODEL).fit(ratings)
    confidences = OF_STARS * (1 + 2.0 * np.abs(STARS.data))
    np.testing.assert_allclose(
        implicit.user_factors_, clone(MODEL).fit(STARS, weights=confidences).user_factors_, rtol=1e-6, atol=1e-8
    )
    with pytest.raises(ValueError, match="give one of them"):
        explicit("plain").fit(ratings, weights=OF_STARS)
    for other in (hmf.SGD(4, device="cpu"), hmf.CCD(4, device="cpu")):
        with pytest.raises(ValueError, match="has no weights of entries; use ImplicitALS or ExplicitALS"):
            other.fit(ratings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": ["cpu", "cpu"]}, "several devices have none"),
        ({"assembly": "bals"}, 'assembly="bals" has none'),
        ({"nonnegative": True}, "nonnegative=True has no weights"),
    ],
)
def test_weights_of_explicit_ratings_are_refused_where_kernels_have_none(options, message):
    with pytest.raises(ValueError, match=message):
        explicit("plain", **options).fit(STARS, weights=OF_STARS)


def test_vectors_of_weights_have_the_order_of_the_entries():
    with pytest.raises(hmf.errors.RatingsError, match="weights has 3 elements for"):
        explicit("plain").fit(STARS, weights=np.ones(3))
    with pytest.raises(TypeError, match="canonical CSR"):
        explicit("plain").fit(STARS.toarray(), weights=OF_STARS)
