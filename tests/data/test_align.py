"""Labelled ratings go by their labels wherever a model takes them; what cannot be matched is refused or dropped."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError

import hybridmf as hmf
from hybridmf.errors import RatingsError, UnknownLabelError
from hybridmf.metrics import Evaluation, PopularityRecommender, evaluate
from support.ratings import planted

M, N_ITEMS = 60, 40
USERS, ITEMS = [f"u{k:02}" for k in range(M)], [f"i{k:02}" for k in range(N_ITEMS)]
SMALL = {"factors": 3, "iterations": 2, "random_state": 0, "device": "cpu", "num_threads": 1}
METRICS = ("ndcg@5", "recall@5", "auc")
MODELS = {
    "explicit": lambda: hmf.ExplicitALS(**SMALL, biases=True),
    "implicit": lambda: hmf.ImplicitALS(**SMALL),
    "popularity": PopularityRecommender,
}


def says(*parts: str) -> str:
    """Regular expression: these parts, literally, in this order."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


def labelled(matrix, users=USERS, items=ITEMS) -> hmf.Ratings:
    return hmf.Ratings.from_matrix(matrix, user_ids=users, item_ids=items)


def shuffled(ratings: hmf.Ratings, users, items) -> hmf.Ratings:
    """The same entries with rows and columns in another order."""
    matrix = ratings.user_items[np.asarray(users)][:, np.asarray(items)]
    return labelled(matrix, [ratings.user_ids[k] for k in users], [ratings.item_ids[k] for k in items])


def any_order(ratings: hmf.Ratings, seed: int = 1) -> hmf.Ratings:
    rng = np.random.default_rng(seed)
    return shuffled(ratings, rng.permutation(ratings.n_users), rng.permutation(ratings.n_items))


TRAIN, TEST = hmf.split(labelled(planted(density=0.4)), 0.3, random_state=0)
FITTED = {kind: make().fit(TRAIN) for kind, make in MODELS.items()}


def with_strangers(ratings: hmf.Ratings) -> hmf.Ratings:
    """Two more users, who share an item, and three more items, which u00 has: five entries more."""
    matrix = np.zeros((M + 2, N_ITEMS + 3), dtype=np.float32)
    matrix[:M, :N_ITEMS] = ratings.user_items.toarray()
    matrix[M:, 0] = 4
    matrix[0, N_ITEMS:] = 2
    return labelled(sp.csr_array(matrix), [*USERS, "zed", "yan"], [*ITEMS, "x1", "x2", "x3"])


# ------------------------------------------------------------------------------------------------------- evaluate


@settings(max_examples=25)
@given(
    st.sampled_from(list(MODELS)),
    st.permutations(range(M)),
    st.permutations(range(N_ITEMS)),
    st.permutations(range(N_ITEMS)),
)
def test_the_order_of_a_labelled_test_set_changes_no_metric(kind, users, items, train_items):
    model = FITTED[kind]
    expected = evaluate(model, TEST, train=TRAIN, metrics=METRICS)
    assert expected == evaluate(model, TEST.user_items, train=TRAIN.user_items, metrics=METRICS)  # positions
    train = shuffled(TRAIN, users[::-1], train_items)
    assert evaluate(model, shuffled(TEST, users, items), train=train, metrics=METRICS) == expected


@pytest.mark.parametrize("kind", MODELS)
def test_labels_without_entries_need_not_be_known(kind):
    matrix = sp.csr_array(sp.block_diag([TEST.user_items, sp.csr_array((1, 1))]))
    more = labelled(matrix, [*USERS, "nobody"], [*ITEMS, "nothing"])
    assert evaluate(FITTED[kind], more, metrics="ndcg@5") == evaluate(FITTED[kind], TEST, metrics="ndcg@5")


@pytest.mark.parametrize("kind", MODELS)
def test_unknown_users_and_items_are_refused_or_dropped(kind, caplog):
    model, strange = FITTED[kind], any_order(with_strangers(TEST))
    with pytest.raises(UnknownLabelError) as caught:
        evaluate(model, strange, train=TRAIN, metrics=METRICS)
    text = f"test has 5 of {TEST.nnz + 5} entries of 2 users ("
    assert str(caught.value).startswith(text)
    for part in ("'zed'", "'yan'", "3 items (", "'x2'", "unknown to the model", 'unknown="drop"'):
        assert part in str(caught.value)
    for known in (RatingsError, ValueError, KeyError):  # what callers caught before there was this error
        assert isinstance(caught.value, known)
    with caplog.at_level(logging.INFO, logger="hybridmf"):
        found = evaluate(model, strange, train=with_strangers(TRAIN), metrics=METRICS, unknown="drop")
    assert found == evaluate(model, TEST, train=TRAIN, metrics=METRICS)
    assert isinstance(found, Evaluation)
    assert found.n_dropped == 5
    assert f"test: 5 of {TEST.nnz + 5} entries left out" in caplog.text
    assert f"train: 5 of {TRAIN.nnz + 5} entries left out" in caplog.text


def test_many_unknown_labels_are_counted_and_a_few_are_shown():
    strangers = labelled(TEST.user_items, [*USERS[:10], *(f"new{k}" for k in range(10, M))])
    with_entries = np.flatnonzero(np.diff(TEST.user_items.indptr))
    used = with_entries[with_entries >= 10]
    shown = ", ".join(f"'new{k}'" for k in used[:3])
    with pytest.raises(UnknownLabelError, match=says(f"of {len(used)} users ({shown}, ...) unknown to the model")):
        evaluate(FITTED["explicit"], strangers)


@pytest.mark.parametrize("unknown", ["error", "drop"])
def test_labels_of_another_type_are_named(unknown):
    numbers = hmf.ExplicitALS(**SMALL).fit(labelled(planted(), users=range(100, 100 + M)))
    text = labelled(planted(), users=[str(k) for k in range(100, 100 + M)])
    message = says("users are of type int64 in the model and of type str in test", "100 and '100'", "astype(int)")
    with pytest.raises(RatingsError, match=message):
        evaluate(numbers, text, unknown=unknown)


def test_unknown_lists_its_values():
    for call in (
        lambda: evaluate(FITTED["explicit"], TEST, unknown="ignore"),
        lambda: FITTED["explicit"].score(TEST, unknown="ignore"),
        lambda: FITTED["explicit"].objective(TEST, unknown="ignore"),
        lambda: MODELS["explicit"]().fit(TRAIN, unknown="ignore"),
    ):
        with pytest.raises(ValueError, match="unknown must be one of 'error', 'drop'; got 'ignore'"):
            call()


# ------------------------------------------------------------------------------------------- one of two has labels


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["user", "item"])
def test_labels_on_one_side_only_are_refused(kind, side):
    """Positions of another matrix mean the same only if the caller passes a plain matrix."""
    labels = {"user_ids": USERS, "item_ids": ITEMS}
    del labels[f"{side}_ids"]
    half = hmf.Ratings.from_matrix(TEST.user_items, **labels)
    with pytest.raises(RatingsError, match=says(f"the model has {side} labels and test only positions", "test.user_")):
        evaluate(FITTED[kind], half)
    model = MODELS[kind]().fit(hmf.Ratings.from_matrix(TRAIN.user_items, **labels))
    with pytest.raises(RatingsError, match=says(f"test has {side} labels and the model only positions", "fit on lab")):
        evaluate(model, TEST)
    assert evaluate(model, TEST.user_items) == evaluate(FITTED[kind], TEST)
    assert evaluate(model, half) == evaluate(FITTED[kind], TEST)


def test_labels_that_are_the_positions_need_none_on_the_other_side():
    plain = hmf.Ratings.from_matrix(TEST.user_items)
    numbered = labelled(TEST.user_items, np.arange(M), np.arange(N_ITEMS))
    by_position = MODELS["explicit"]().fit(TRAIN.user_items)
    by_number = MODELS["explicit"]().fit(labelled(TRAIN.user_items, np.arange(M), np.arange(N_ITEMS)))
    expected = evaluate(by_position, TEST.user_items)
    assert expected == evaluate(by_position, numbered) == evaluate(by_number, plain)
    with pytest.raises(RatingsError, match="test has user labels and the model only positions"):
        evaluate(by_position, labelled(TEST.user_items, np.arange(M)[::-1], np.arange(N_ITEMS)))


def test_a_plain_matrix_of_another_shape_is_refused():
    with pytest.raises(RatingsError, match=says("test has shape (60, 39)", "n_items=40")):
        evaluate(FITTED["explicit"], TEST.user_items[:, :-1])


# --------------------------------------------------------------------------------------------------- other callers


def test_score_and_objective_match_by_label():
    model = FITTED["explicit"]
    for method in (model.score, model.objective):
        assert method(any_order(TEST)) == pytest.approx(method(TEST.user_items), rel=1e-12)
        with pytest.raises(UnknownLabelError, match="unknown to the model"):
            method(with_strangers(TEST))
        assert method(any_order(with_strangers(TEST)), unknown="drop") == method(TEST.user_items)
    assert model.score(any_order(TEST), users="training") == model.score(TEST.user_items, users="training")


def test_validation_matches_by_label():
    def history(validation, **options):
        return [record["rmse"] for record in MODELS["explicit"]().fit(TRAIN, validation=validation, **options).history_]

    expected = history(TEST.user_items)
    assert history(any_order(TEST)) == expected
    assert history(with_strangers(TEST), unknown="drop") == expected
    with pytest.raises(UnknownLabelError, match=says("validation has 5 of", "unknown to the training data", "drop")):
        history(with_strangers(TEST))
    with pytest.raises(RatingsError, match=says("validation has user labels and the training data only positions")):
        MODELS["explicit"]().fit(TRAIN.user_items, validation=TEST)


@pytest.mark.parametrize("kind", MODELS)
def test_user_items_match_labels_of_users_and_items(kind):
    """Labelled rows need no order: neither that of `userid` nor that of the model."""
    model, users = FITTED[kind], np.array([7, 0, 7, 59])
    expected = model.recommend(users, TEST.user_items[users])
    for given_rows in (TEST, any_order(TEST)):
        for found, wanted in zip(model.recommend(users, given_rows), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    everybody = np.random.default_rng(0).permutation(M)
    np.testing.assert_array_equal(
        model.recommend(everybody, any_order(TEST))[0], model.recommend(everybody, TEST.user_items[everybody])[0]
    )
    few = shuffled(TEST, [59, 7, 0], np.arange(N_ITEMS))
    np.testing.assert_array_equal(model.recommend(users, few)[0], expected[0])
    with pytest.raises(UnknownLabelError, match=says("user_items has 5 of", 'drop them with unknown="drop"')):
        model.recommend(users, with_strangers(TEST))
    dropped = model.recommend(users, with_strangers(TEST), unknown="drop")
    np.testing.assert_array_equal(dropped[0], expected[0])
    in_order = hmf.Ratings.from_matrix(TEST.user_items[users], item_ids=ITEMS)  # rows have no labels: those of userid
    np.testing.assert_array_equal(model.recommend(users, in_order)[0], expected[0])


def test_new_rows_match_labels_of_items():
    model, rows = FITTED["implicit"], shuffled(TEST, np.arange(9), np.arange(N_ITEMS)[::-1])
    plain = TEST.user_items[:9]
    np.testing.assert_array_equal(model.transform(rows), model.transform(plain))
    np.testing.assert_array_equal(model.predict(rows), model.predict(plain))
    with pytest.raises(UnknownLabelError, match=says("user_items has 3 of", "3 items", "leave them out")):
        model.transform(with_strangers(TEST))


def test_updates_of_users_match_by_label():
    rows = labelled(planted(4, N_ITEMS, 0.5, seed=3)[:, ::-1], ["new b", "u09", "u00", "new a"], ITEMS[::-1])
    ids, labels = [M, 0, M + 1, 9], ["new a", "u00", "new b", "u09"]
    model, expected = (MODELS["implicit"]().fit(TRAIN) for _ in range(2))
    model.partial_fit_users(ids, rows, labels=labels)
    expected.partial_fit_users(ids, planted(4, N_ITEMS, 0.5, seed=3)[[3, 2, 0, 1]], labels=labels)
    np.testing.assert_array_equal(model.user_factors_, expected.user_factors_)
    np.testing.assert_array_equal(model.recommend(np.arange(M + 2))[0], expected.recommend(np.arange(M + 2))[0])
    assert model.user_ids_.tolist() == [*USERS, "new a", "new b"]


def test_updates_of_items_match_by_label():
    """Users too, in the order of any other ratings."""
    columns = planted(M, 3, 0.5, seed=4)
    mixed = labelled(columns[::-1][:, [2, 0, 1]], USERS[::-1], ["i05", "new", "i00"])
    model, expected = (MODELS["implicit"]().fit(TRAIN) for _ in range(2))
    model.partial_fit_items([N_ITEMS, 0, 5], mixed, labels=["new", "i00", "i05"])
    expected.partial_fit_items([N_ITEMS, 0, 5], columns, labels=["new", "i00", "i05"])
    np.testing.assert_array_equal(model.item_factors_, expected.item_factors_)
    np.testing.assert_array_equal(model.recommend(np.arange(M))[0], expected.recommend(np.arange(M))[0])


@pytest.mark.parametrize("method", ["partial_fit_users", "partial_fit_items"])
def test_updates_refuse_other_labels(method):
    model, side = MODELS["implicit"]().fit(TRAIN), method.removeprefix("partial_fit_").removesuffix("s")
    matrix = TEST.user_items if side == "user" else TEST.user_items.T
    own, other = (USERS, ITEMS) if side == "user" else (ITEMS, USERS)

    def update(ids, rows, mine, theirs=other):
        block = sp.csr_array(matrix[rows])
        ratings = labelled(block, mine, theirs) if side == "user" else labelled(block.T, theirs, mine)
        getattr(model, method)(ids, ratings)

    before = model.user_factors_.copy(), model.item_factors_.copy()
    with pytest.raises(UnknownLabelError, match=says(f"does not have 1 of 2 {side}s that ids names", own[3])):
        update([2, 3], [2], own[2:3])
    with pytest.raises(UnknownLabelError, match=says(f"of 1 {side} ({own[3]!r}) unknown to the model or to ids")):
        update([2], [2, 3], own[2:4])
    with pytest.raises(UnknownLabelError, match=says("unknown to the model or to ids")):
        update([2], [2], own[2:3], [f"{label}?" for label in other])
    np.testing.assert_array_equal(model.user_factors_, before[0])
    np.testing.assert_array_equal(model.item_factors_, before[1])
    model = MODELS["implicit"]().fit(TRAIN.user_items)
    with pytest.raises(RatingsError, match="labels and the model"):
        update([2], [2], own[2:3])


def test_a_store_is_matched_by_label(tmp_path):
    file = tmp_path / "ratings.npz"
    any_order(TEST).save(file)
    hmf.convert(file, tmp_path / "store")
    store = hmf.Store.open(tmp_path / "store")
    assert store.user_ids.tolist() != USERS
    assert evaluate(FITTED["explicit"], store, metrics=METRICS, train=TRAIN) == evaluate(
        FITTED["explicit"], TEST, metrics=METRICS, train=TRAIN
    )


# -------------------------------------------------------------------------------------------- objects that are no model


class Half:
    """Something with sizes, which predicts and recommends nothing."""

    n_users, n_items = M, N_ITEMS


@pytest.mark.parametrize(
    ("model", "metrics", "parts"),
    [
        (None, "rmse", ("n_users, n_items, predict", "NoneType has no n_users, n_items, predict")),
        ("model.safetensors", "ndcg@5", ("n_users, n_items, recommend", "str has no n_users")),
        (Half(), ("rmse", "ndcg@5"), ("Half has no predict, recommend",)),
        (hmf.ExplicitALS, "rmse", ("model is the class ExplicitALS; make one and fit it",)),
    ],
)
def test_evaluate_names_missing_methods_of_a_model(model, metrics, parts):
    with pytest.raises(TypeError, match=says(*parts)):
        evaluate(model, TEST, metrics=metrics)


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, PopularityRecommender])
def test_evaluate_of_an_unfitted_estimator_raises(cls):
    with pytest.raises(NotFittedError):
        evaluate(cls(), TEST)
