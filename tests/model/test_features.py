"""Features of items and users: fits against the float64 reference, rows without entries, symmetries, refusals."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.objective import State
from support import reference
from support.ratings import planted

RATINGS = planted(30, 24, 0.35)
RNG = np.random.default_rng(5)
FEATURES = {
    "item": np.column_stack([RNG.random((24, 4)) < 0.4, RNG.normal(size=24)]).astype(np.float32),
    "user": (RNG.random((30, 3)) < 0.5).astype(np.float32),
}
CASES = {
    "implicit": (hmf.ImplicitALS, {"regularization": 0.5, "alpha": 2.0, "unobserved_weight": 0.3}),
    "implicit-count": (hmf.ImplicitALS, {"regularization": 0.1, "regularization_scaling": "count"}),
    "explicit": (hmf.ExplicitALS, {"biases": False, "regularization": 0.3}),
    "biases": (hmf.ExplicitALS, {"regularization": (0.3, 0.5), "regularization_scaling": 0.5}),
    "dual": (hmf.ExplicitALS, {"regularization": 0.3, "row_form": "dual", "factors": 24}),
    "implicit-dual": (hmf.ImplicitALS, {"regularization": 0.3, "row_form": "dual", "factors": 24}),
    "cg": (hmf.ImplicitALS, {"regularization": 0.5, "solver": "cg", "cg_steps": 20}),
    "cg-biases": (hmf.ExplicitALS, {"regularization": 0.5, "solver": "cg", "cg_steps": 20}),
    "subspace": (hmf.ExplicitALS, {"regularization": 0.5, "solver": "subspace", "block_size": 8}),
    "rank1": (hmf.ImplicitALS, {"regularization": 0.5, "assembly": "rank1"}),
    "blas3": (hmf.ExplicitALS, {"regularization": 0.5, "assembly": "blas3"}),
    "bals": (hmf.ExplicitALS, {"regularization": 0.5, "assembly": "bals"}),
}


def features_of(model, *sides):
    """What the reference takes: dense features and the weight of their vectors."""
    return {side: (FEATURES[side], getattr(model, f"{side}_feature_weight")) for side in sides}


def fitted(case, sides=("item", "user"), ratings=RATINGS, **options):
    kind, given = CASES[case]
    model = kind(**({"factors": 6, "device": "cpu", "random_state": 3, "iterations": 3} | given | options))
    features = {f"{side}_features": sp.csr_array(FEATURES[side]) for side in sides}
    return model.fit(ratings, **features)


def first_state(case, **options):
    """The state that a fit starts from, in float64."""
    model = CASES[case][0](**({"factors": 6, "device": "cpu", "random_state": 3} | CASES[case][1] | options))
    from hybridmf.model.training import LocalRatings

    source = LocalRatings(model, RATINGS)
    objective = model._objective()
    source.place(source.plan(objective, model._settings()))
    objective = model._objective(source.spread(objective), source.degrees).for_shape(source.shape)
    return model._initial_state(source, source.plan(objective, model._settings()), objective), objective


@pytest.mark.parametrize("case", sorted(CASES))
def test_fit_is_that_of_the_float64_reference(case):
    model = fitted(case, dtype="float64", item_feature_weight=0.5, user_feature_weight=2.0)
    start, objective = first_state(case, dtype="float64")
    features = features_of(model, "item", "user")
    exact = reference.fit(RATINGS, start, objective, 3, features)
    warm = np.asarray(RATINGS.sum(axis=0)).ravel() != 0

    got = model.item_factors_[warm] @ model.user_factors_.T
    want = exact.item.matrix[warm] @ exact.user.matrix.T
    assert np.abs(got - want)[:, np.diff(RATINGS.indptr) > 0].max() < 1e-6 * np.abs(want).max()
    value = reference.objective_value(RATINGS, state_of(model), objective, features)
    assert model.objective(RATINGS) == pytest.approx(value, rel=1e-9)


def state_of(model):
    """The state without the factors of rows that have features only."""
    learned = model._fitted()
    return State(learned.solved("user"), learned.solved("item"), learned.state.mean)


@pytest.mark.parametrize("case", ["implicit", "biases", "cg"])
def test_history_has_the_objective_with_features_and_it_does_not_rise(case):
    seen = []
    model = CASES[case][0](**({"factors": 6, "device": "cpu", "random_state": 3, "iterations": 6} | CASES[case][1]))
    model.fit(
        RATINGS,
        item_features=FEATURES["item"],
        callback=lambda model, record: seen.append((record["objective"], model.objective(RATINGS))) and False,
    )
    recorded, computed = np.array(seen).T
    assert recorded == pytest.approx(computed, rel=1e-5)
    assert np.all(np.diff(recorded) < 1e-6 * recorded[0])


@pytest.mark.parametrize("case", ["implicit", "biases"])
def test_balanced_fit_approaches_the_same_minimum(case):
    slow, fast = (
        fitted(case, factors=3, iterations=100, balance=balance).objective(RATINGS) for balance in (False, True)
    )
    assert slow * (1 - 3e-3) < fast < slow * (1 + 1e-6)


def test_rows_without_entries_have_the_factors_of_their_features():
    model = fitted("biases")
    empty = np.flatnonzero(np.bincount(RATINGS.indices, minlength=24) == 0)
    assert len(empty)
    learned = model._fitted()
    vectors = learned.state.vectors["item"]
    assert model.item_factors_[empty] == pytest.approx(FEATURES["item"][empty] @ vectors.matrix, abs=1e-6)
    assert model.item_bias_[empty] == pytest.approx(FEATURES["item"][empty] @ vectors.bias, abs=1e-6)
    assert model.item_factors_[empty].any()


def test_a_small_weight_is_a_fit_without_features():
    plain = CASES["implicit"][0](factors=6, device="cpu", random_state=3, iterations=3, **CASES["implicit"][1])
    plain.fit(RATINGS)
    model = fitted("implicit", item_feature_weight=1e-12, user_feature_weight=1e-12)
    warm = np.diff(RATINGS.indptr) > 0
    assert model.user_factors_[warm] == pytest.approx(plain.user_factors_[warm], abs=1e-5)


def test_order_of_features_and_rows_does_not_matter():
    model = fitted("implicit", ("item",), balance=True, iterations=40, dtype="float64")
    columns, features = RNG.permutation(24), RNG.permutation(5)
    kind, given = CASES["implicit"]
    other = kind(factors=6, device="cpu", random_state=3, balance=True, iterations=40, dtype="float64", **given)
    other.fit(RATINGS[:, columns], item_features=FEATURES["item"][columns][:, features])
    want = model.user_factors_ @ model.item_factors_[columns].T
    assert other.user_factors_ @ other.item_factors_.T == pytest.approx(want, abs=1e-5)


def test_labels_of_features_join_the_model():
    ratings = hmf.Ratings.from_matrix(RATINGS, item_ids=[f"film {k}" for k in range(24)])
    names = [f"film {k}" for k in (*range(23, -1, -1), 24, 25)]
    rows = np.vstack([FEATURES["item"][::-1], FEATURES["item"][:2]])
    model = hmf.ImplicitALS(factors=6, device="cpu", random_state=3, iterations=3).fit(
        ratings, item_features=hmf.Features(rows, labels=names)
    )
    plain = hmf.ImplicitALS(factors=6, device="cpu", random_state=3, iterations=3).fit(
        ratings, item_features=hmf.Features(FEATURES["item"], labels=[f"film {k}" for k in range(24)])
    )
    assert model.item_ids_.tolist()[-2:] == ["film 24", "film 25"]
    assert np.array_equal(model.item_factors_[:24], plain.item_factors_)
    assert model.item_factors_[24:].any(axis=1).all()


@pytest.mark.parametrize("case", ["implicit", "biases", "dual", "cg-biases", "bals"])
def test_a_store_gives_the_bits_of_its_ratings(case, tmp_path):
    """Also with features of users and items that the store lacks."""
    names = [f"u{k}" for k in range(30)], [f"i{k}" for k in range(24)]
    ratings = hmf.Ratings.from_matrix(RATINGS, user_ids=names[0], item_ids=names[1])
    more = np.random.default_rng(0).random((3, 5)).astype(np.float32)
    given = {
        "item_features": hmf.Features(np.vstack([more[:2], FEATURES["item"]]), labels=["x", "y", *names[1]]),
        "user_features": hmf.Features(np.vstack([FEATURES["user"], more[:, :3]]), labels=[*names[0], "a", "b", "c"]),
    }
    kind, options = CASES[case]
    options = {"factors": 6, "device": "cpu", "random_state": 3, "iterations": 3} | options
    store = hmf.convert(ratings, tmp_path / "store", slab_bytes=800)
    one, other = (kind(**options).fit(each, **given) for each in (ratings, store))
    assert store.degrees("user").sum() == ratings.nnz and len(store.slabs("item")) > 1
    for name in ("user_factors", "item_factors"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    other.save(tmp_path / "model.safetensors")
    for model in (other, hmf.load(tmp_path / "model.safetensors"), pickle.loads(pickle.dumps(other))):
        for user in ("u3", "c"):
            found, expected = (m.recommend(user, N=26, labels=True, include_cold=True) for m in (model, one))
            assert found[0].tolist() == expected[0].tolist() and "x" in found[0]
    checkpoints = hmf.Checkpoint(tmp_path / "checkpoints")
    kind(**options | {"iterations": 2}).fit(store, checkpoint=checkpoints, **given)
    resumed = kind(**options).fit(store, resume_from=tmp_path / "checkpoints", **given)
    np.testing.assert_array_equal(resumed.item_factors, one.item_factors)


def test_resumed_fit_has_the_same_bits(tmp_path):
    whole = fitted("implicit", iterations=4)
    kind, given = CASES["implicit"]
    features = {f"{side}_features": FEATURES[side] for side in ("item", "user")}
    options = {"factors": 6, "device": "cpu", "random_state": 3} | given
    kind(iterations=2, **options).fit(RATINGS, checkpoint=tmp_path, **features)
    resumed = kind(iterations=4, **options).fit(RATINGS, resume_from=tmp_path, **features)
    assert np.array_equal(resumed.item_factors_, whole.item_factors_)
    assert np.array_equal(resumed.user_factors_, whole.user_factors_)
    with pytest.raises(ValueError, match="item_feature_weight=1"):
        kind(iterations=4, item_feature_weight=3.0, **options).fit(RATINGS, resume_from=tmp_path, **features)


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu", "cpu", "cpu"]])
def test_several_ranks_agree_with_one(devices):
    one, several = fitted("biases"), fitted("biases", device=devices)
    assert several.item_factors_ == pytest.approx(one.item_factors_, abs=1e-4)
    assert several.objective(RATINGS) == pytest.approx(one.objective(RATINGS), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (hmf.SGD(factors=4, device="cpu"), "item_features: SGD has no features; use ImplicitALS or ExplicitALS"),
        (hmf.CCD(factors=4, device="cpu"), "item_features: CCD has no features"),
        (hmf.ImplicitALS(factors=4, device="cpu", nonnegative=True), "item_features: nonnegative=True"),
        (hmf.ImplicitALS(factors=4, device="cpu", item_feature_weight=0), "item_feature_weight must be > 0"),
    ],
)
def test_features_are_refused_where_they_have_no_effect(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(RATINGS, item_features=FEATURES["item"])
    assert not model.__sklearn_is_fitted__()


def test_genres_rank_films_that_nobody_has_rated(data_dir):
    """MovieLens 100K, a fifth of the films without ratings: far better than chance and than popularity by genre."""
    ratings = hmf.Ratings.from_file(data_dir / "ml-100k" / "u.data.gz")
    lines = (data_dir / "ml-100k" / "u.item").read_text(encoding="latin-1").splitlines()
    films = {int(line.split("|")[0]): np.array(line.split("|")[5:], dtype=np.float32) for line in lines}
    genres = np.array([films[int(label)] for label in ratings.item_ids.tolist()])
    matrix = ratings.user_items
    cold = np.random.default_rng(0).permutation(matrix.shape[1])[: matrix.shape[1] // 5]
    hidden = np.isin(matrix.indices, cold)
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    train, test = (
        sp.csr_array((np.ones(kept.sum(), np.float32), (rows[kept], matrix.indices[kept])), shape=matrix.shape)
        for kept in (~hidden, hidden)
    )
    model = hmf.ImplicitALS(factors=16, device="cpu", random_state=0, iterations=6).fit(train, item_features=genres)
    warm = np.setdiff1d(np.arange(matrix.shape[1]), cold)
    counts = np.log1p(np.bincount(train.indices, minlength=matrix.shape[1]))
    W = np.linalg.solve(genres[warm].T @ genres[warm] + np.eye(19), genres[warm].T @ counts[warm])
    ours = ndcg(model.user_factors @ model.item_factors[cold].T, test[:, cold].toarray())
    popular = ndcg(np.tile(genres[cold] @ W, (matrix.shape[0], 1)), test[:, cold].toarray())
    chance = ndcg(np.random.default_rng(1).random((matrix.shape[0], len(cold))), test[:, cold].toarray())
    assert ours > 1.15 * popular and ours > 2 * chance


def ndcg(scores, hits, n=10):
    order = np.argsort(-scores, axis=1, kind="stable")[:, :n]
    gains = np.take_along_axis(hits, order, axis=1) / np.log2(np.arange(2, n + 2))
    best = np.cumsum(1 / np.log2(np.arange(2, n + 2)))[np.minimum(hits.sum(axis=1), n).astype(int) - 1]
    known = hits.any(axis=1)
    return float((gains.sum(axis=1)[known] / best[known]).mean())


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    count=st.integers(1, 6),
    weight=st.sampled_from([1e-3, 0.3, 1.0, 50.0]),
    implicit=st.booleans(),
)
def test_any_fit_is_that_of_the_reference(seed, shape, count, weight, implicit):
    """Any shape, more features than rows or constant ones included; the history is the objective and never rises."""
    rng = np.random.default_rng(seed)
    dense = np.where(rng.random(shape) < 0.5, rng.integers(1, 6, shape), 0).astype(np.float64)
    dense[rng.integers(shape[0]), rng.integers(shape[1])] = 3.0
    features = np.column_stack([rng.normal(size=(shape[1], count)), np.ones(shape[1])]).round(2)
    kind = hmf.ImplicitALS if implicit else hmf.ExplicitALS
    model = kind(
        factors=3, device="cpu", random_state=0, iterations=4, regularization=0.5, dtype="float64",
        item_feature_weight=weight,
    )  # fmt: skip
    model.fit(sp.csr_array(dense), item_features=features, callback=lambda model, record: None)
    values = [record["objective"] for record in model.history_]
    known = {"item": (features.astype(np.float32), weight)}
    value = reference.objective_value(sp.csr_array(dense), state_of(model), model._fitted().objective, known)
    assert values[-1] == pytest.approx(value, rel=1e-6)
    assert model.objective(dense) == pytest.approx(value, rel=1e-5)
    assert np.all(np.diff(values) <= 1e-9 * values[0])
