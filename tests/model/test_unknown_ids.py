"""Ids that a model does not have: `unknown=` of every request, and what its answers look like."""

from __future__ import annotations

import io
import logging

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.errors import RatingsError, UnknownLabelError
from hybridmf.metrics import PopularityRecommender
from support.messages import says
from support.ratings import planted
from support.served_models import EMPTY_USER, N_ITEMS, M, fitted, labelled, make

pl = pytest.importorskip("polars")

KINDS = ("explicit", "biases", "implicit")
MODELS = {kind: make(kind).fit(labelled()) for kind in KINDS} | {"popularity": PopularityRecommender().fit(labelled())}
SHOP = ["i3", "withdrawn", "i6", "brand-new"]


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, logger="hybridmf")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def assert_rows(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# ---------------------------------------------------------------------------------------------------- recommendations


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_with_an_unknown_user(kind, warned):
    model = MODELS[kind]
    known, cold = model.recommend(["u5", "u2"], N=6, labels=True), model.recommend([f"u{EMPTY_USER}"], N=6, labels=True)
    with pytest.raises(UnknownLabelError, match=says("userid: unknown user label 'zoe'", 'unknown="drop"')):
        model.recommend(["u5", "zoe", "u2"], N=6, labels=True)
    for rule, expected in (("drop", ([None] * 6, [-np.inf] * 6)), ("popular", (cold[0][0], cold[1][0]))):
        ids, scores = model.recommend(["u5", "zoe", "u2"], N=6, labels=True, unknown=rule)
        assert_rows((ids[[0, 2]], scores[[0, 2]]), known)
        assert_rows((ids[1], scores[1]), expected)
        assert_rows(model.recommend("zoe", N=6, labels=True, unknown=rule), expected)
        positions = model.recommend([5, M + 7, 2], N=6, unknown=rule)
        np.testing.assert_array_equal(positions[1], scores)
        allowed = model.recommend(["zoe"], N=6, items=[["i1", "i2"]], labels=True, unknown=rule)[0]
        assert set(allowed[0]) - {None} == ({"i1", "i2"} if rule == "popular" else set())
    assert warned()[0] == "ids unknown to the model (unknown='drop'): userid has 1 of 3 users, such as 'zoe'"
    assert warned()[2].endswith(f"userid has 1 of 3 users, such as {M + 7}")
    assert len(warned()) == 8
    with pytest.raises(ValueError, match="userid has -1"):
        model.recommend([-1], unknown="drop")


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_user_with_a_row_is_recommended_what_follows_from_it(kind):
    row = planted()[[5]]
    asked = {"user_items": row, "N": 6, "labels": True, "unknown": "popular"}
    found = MODELS[kind].recommend(["zoe"], recalculate_user=True, **asked)
    assert_rows(found, MODELS[kind].recommend(["u2"], recalculate_user=True, **asked))
    assert not np.array_equal(found[0], MODELS[kind].recommend(["zoe"], **asked)[0])  # the most popular items


def test_unknown_users_are_not_masked_with_cold_ones():
    model = MODELS["implicit"]
    users = ["zoe", f"u{EMPTY_USER}", "u5"]
    found, _ = model.recommend(users, N=3, labels=True, cold_users="mask", unknown="popular")
    assert None not in found[0] and None not in found[2] and set(found[1]) == {None}


def test_unknown_users_have_seen_nothing_and_their_rows_count(warned):
    """The items that other users have seen are not theirs; rows of `user_items` are."""
    model, popular = MODELS["implicit"], MODELS["implicit"].recommend(EMPTY_USER, N=N_ITEMS)[0]
    np.testing.assert_array_equal(model.recommend([0, M], N=N_ITEMS, unknown="popular")[0][1], popular)
    rows = planted(2, N_ITEMS, density=0.3, seed=4)
    seen = rows.indices[rows.indptr[1] :]
    found = model.recommend(["u0", "zoe"], rows, N=5, labels=True, unknown="popular")[0][1]
    assert found.tolist() == [f"i{k}" for k in popular if k not in seen][:5]
    folded = model.recommend(["u0", "zoe"], rows, N=5, labels=True, unknown="popular", recalculate_user=True)
    assert_rows(folded, model.recommend_new(rows, N=5, labels=True))
    everybody = model.recommend(["u0", "zoe", "u9"], labelled(), N=N_ITEMS, labels=True, unknown="popular")
    np.testing.assert_array_equal(everybody[0][[0, 2]], model.recommend(["u0", "u9"], N=N_ITEMS, labels=True)[0])
    np.testing.assert_array_equal(model.recommend([0, M, 9], planted(), N=N_ITEMS, unknown="popular")[0][1], popular)


@pytest.mark.parametrize("kind", MODELS)
def test_lists_of_the_shop(kind, warned):
    model = MODELS[kind]
    for name in ("filter_items", "items"):
        expected = model.recommend("u5", N=6, labels=True, **{name: ["i3", "i6"]})
        assert_rows(model.recommend("u5", N=6, labels=True, unknown="drop", **{name: SHOP}), expected)
        each = model.recommend(["u5", "u2"], N=6, labels=True, unknown="popular", **{name: [SHOP, ["gone"]]})
        assert_rows(each, model.recommend(["u5", "u2"], N=6, labels=True, **{name: [["i3", "i6"], []]}))
        with pytest.raises(UnknownLabelError, match=says(f"{name}: unknown item label 'withdrawn' (and 1 more)")):
            model.recommend("u5", labels=True, **{name: SHOP})
    nothing = model.recommend("u5", N=3, items=["brand-new"], labels=True, unknown="drop")
    assert_rows(nothing, ([None] * 3, [-np.inf] * 3))
    assert "filter_items has 2 of 4 items, such as 'withdrawn'" in warned()[0]
    assert len(warned()) == 5
    model.recommend(["u5", "zoe"], items=SHOP, filter_items=["gone"], labels=True, unknown="drop")
    assert len(warned()) == 6 and all(part in warned()[-1] for part in ("userid", "items has 2", "filter_items has 1"))


def test_histories_and_neighbours(warned):
    model = MODELS["implicit"]
    expected = model.recommend_new([["i3", "i8"], []], N=5, filter_items=["i6"], labels=True)
    for rule in ("drop", "popular"):
        found = model.recommend_new(
            [["i3", "new", "i8"], ["x"]], N=5, filter_items=SHOP[1:3], labels=True, unknown=rule
        )
        assert_rows(found, expected)
    assert len(warned()) == 2 and "rows has 2 of 4 items, such as 'new'; filter_items has 1 of 2" in warned()[0]
    strangers = hmf.Ratings.from_coo(["zoe", "zoe"], ["i3", "new"])
    assert_rows(
        model.recommend_new(["i8"], N=N_ITEMS, items=["i3", "new"], labels=True, unknown="drop"),
        model.recommend_new(["i8"], N=N_ITEMS, items=["i3"], labels=True),
    )
    assert model.recommend_new([["i8"]], items=strangers, labels=True, unknown="drop")[0][0, 0] == "i3"
    near = model.similar_items(["i3", "new"], N=3, filter_items=["gone"], labels=True, unknown="drop")
    assert_rows((near[0][0], near[1][0]), model.similar_items("i3", N=3, labels=True))
    assert_rows((near[0][1], near[1][1]), ([None] * 3, [-np.inf] * 3))
    assert model.similar_users("zoe", N=2, labels=True, unknown="drop")[0].tolist() == [None, None]
    with pytest.raises(ValueError, match="unknown must be one of 'error', 'drop'"):
        model.similar_items("i3", unknown="popular", labels=True)


@pytest.mark.parametrize("backend", ["pandas", "polars", "pyarrow"])
def test_tables_name_unknown_users(backend, monkeypatch, tmp_path):
    monkeypatch.setattr("hybridmf.model.tables.BLOCK_USERS", 2)
    model = MODELS["implicit"]
    users = ["u5", "zoe", "u2", "yan"]
    for asked in (users, iter(users)):
        table = model.recommend_table(asked, N=2, unknown="popular", backend=backend)
        assert pa.table({"user": table["user"]})["user"].to_pylist() == [user for user in users for _ in range(2)]
    popular = model.recommend(f"u{EMPTY_USER}", N=2, labels=True)[0].tolist()
    assert pa.table({"item": table["item"]})["item"].to_pylist()[2:4] == popular
    dropped = model.recommend_table(users, N=2, unknown="drop", backend=backend)
    assert pa.table({"user": dropped["user"]})["user"].to_pylist() == ["u5", "u5", "u2", "u2"]
    positions = model.recommend_table([5, M + 3], N=1, labels=False, unknown="popular", backend=backend)
    assert pa.table({"user": positions["user"]})["user"].to_pylist() == [5, M + 3]
    everybody = model.recommend_all(N=2, filter_items=SHOP, unknown="drop", backend="pandas")
    assert everybody.equals(model.recommend_all(N=2, filter_items=["i3", "i6"], backend="pandas"))
    model.recommend_all(tmp_path / "top.parquet", N=2, filter_items=SHOP, unknown="drop")
    assert pa.parquet.read_table(tmp_path / "top.parquet").to_pandas()["item"].tolist() == everybody["item"].tolist()


def test_labels_of_another_type_are_no_strangers():
    model = make("implicit", iterations=1).fit(labelled(users=list(range(100, 100 + M)), items=list(range(N_ITEMS))))
    for call in (
        lambda: model.recommend("101", labels=True, unknown="drop"),
        lambda: model.recommend([101, 5.5], labels=True, unknown="popular"),
        lambda: model.recommend(101, filter_items=["3"], labels=True, unknown="drop"),
        lambda: model.predict(["101"], [3], labels=True, unknown="drop"),
        lambda: model.predict(pd.DataFrame({"user": ["101"], "item": [3]}), unknown="popular"),
        lambda: model.similar_items(["3"], labels=True, unknown="drop"),
    ):
        with pytest.raises(RatingsError, match=says("in the model", "one type")):
            call()
    found = model.recommend([101, None, float("nan")], N=2, labels=True, unknown="drop")[0]
    assert set(found[1:].ravel()) == {None} and None not in found[0]


# ------------------------------------------------------------------------------------------------- pairs with ids

PAIRS = (["u5", "u9", "u5", "u0", "u5"], ["i7", "i3", "i3", "i39", "i7"])
FRAMES = {
    "pandas": pd.DataFrame, "polars": pl.DataFrame, "lazy": lambda data: pl.DataFrame(data).lazy(), "pyarrow": pa.table,
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("library", FRAMES)
def test_pairs_by_label_and_as_a_table(kind, library):
    model = MODELS[kind]
    expected = model.predict([int(name[1:]) for name in PAIRS[0]], [int(name[1:]) for name in PAIRS[1]])
    np.testing.assert_array_equal(model.predict(*PAIRS, labels=True), expected)
    for columns in (("user_id", "item_id"), ("item_id", "user_id"), ("rating", "movieId", "timestamp", "userId")):
        data = {
            name: {"u": PAIRS[0], "i": PAIRS[1], "m": PAIRS[1], "r": [None] * 5, "t": [1, 2, 3, 4, 5]}[name[0]]
            for name in columns
        }
        np.testing.assert_array_equal(model.predict(FRAMES[library](data)), expected)
    one = model.predict("u5", "i7", labels=True)
    assert np.asarray(one).ravel()[0] == expected[0]
    np.testing.assert_array_equal(model.predict("u5", ["i7", "i3"], labels=True), expected[[0, 2]])


@pytest.mark.parametrize("kind", MODELS)
def test_entries_of_ratings_are_pairs(kind):
    model, other = MODELS[kind], planted(M, N_ITEMS, density=0.3, seed=9)
    users, items = other.tocoo().coords
    expected = model.predict(users, items)
    np.testing.assert_array_equal(model.predict(labelled(other).entries), expected)
    plain = make(kind).fit(planted()) if kind in KINDS else PopularityRecommender().fit(planted())
    np.testing.assert_array_equal(plain.predict(hmf.Ratings(other).entries), expected)
    with pytest.raises(RatingsError, match="the model has user labels and the table only positions"):
        model.predict(hmf.Ratings(other).entries)
    with pytest.raises(RatingsError, match=says("the table has user labels and the model only positions", "predict(")):
        plain.predict(pd.DataFrame({"user": [1], "item": [2]}))


def test_pairs_of_which_ids_are_unknown(warned):
    users, items = ["u5", "zoe", "u5", "zoe"], ["i7", "i7", "new", "new"]
    table = pd.DataFrame({"user": users, "item": items})
    likes = np.bincount(planted().indices, minlength=N_ITEMS)
    mean = planted().data.mean(dtype=np.float64)
    biased = MODELS["biases"]
    bias, mu = biased.item_bias_[7], biased.mean_
    fallbacks = {
        "biases": [mu + bias, mu + biased.user_bias_[5], mu],
        "explicit": [mean] * 3,
        "implicit": [likes[7] / M, 0, 0],
        "popularity": [MODELS["popularity"].item_means_[7], mean, mean],
    }
    for kind, model in MODELS.items():
        options = {} if kind == "popularity" else {"clip": False}
        first = model.predict(["u5"], ["i7"], labels=True, **options)[0]
        for call in (
            lambda model=model, options=options, **more: model.predict(table, **options, **more),
            lambda model=model, options=options, **more: model.predict(users, items, labels=True, **options, **more),
        ):
            np.testing.assert_array_equal(call(unknown="drop"), [first, np.nan, np.nan, np.nan])
            np.testing.assert_allclose(call(unknown="popular"), [first, *fallbacks[kind]], rtol=1e-6)
            with pytest.raises(UnknownLabelError, match=says("users: unknown user label 'zoe'", 'unknown="drop"')):
                call()
    assert warned()[0].endswith("users has 2 of 4 pairs, such as 'zoe'; items has 2 of 4 pairs, such as 'new'")
    assert np.isnan(biased.predict("zoe", "i7", labels=True, unknown="drop"))
    clipped = biased.predict("zoe", "i7", labels=True, unknown="popular", clip=(100.0, 101.0))
    assert clipped == 100
    np.testing.assert_array_equal(biased.predict([5, M], [7, 7], unknown="drop")[1:], [np.nan])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, M + 9), st.integers(0, N_ITEMS + 9)), min_size=1, max_size=40))
def test_a_table_is_predicted_row_by_row(pairs):
    model = MODELS["biases"]
    table = pd.DataFrame({"user": [f"u{u}" for u, _ in pairs], "item": [f"i{i}" for _, i in pairs]})
    found = model.predict(table, unknown="drop")
    expected = [model.predict(u, i) if u < M and i < N_ITEMS else np.nan for u, i in pairs]
    np.testing.assert_allclose(found, np.float32(expected), rtol=1e-6)


def test_positions_that_are_labels_are_named():
    model = make("implicit", iterations=1).fit(labelled(users=list(range(100, 100 + M))))
    for call in (lambda: model.recommend([101]), lambda: model.predict([101], [3]), lambda: model.predict([1], ["i3"])):
        with pytest.raises((TypeError, ValueError), match=says("The model has", "labels: labels=True takes these")):
            call()
    assert model.predict(pd.DataFrame({"user": [], "item": []})).shape == (0,)


def test_a_mean_that_is_not_stored_is_nan():
    model = fitted("explicit")
    file = io.BytesIO()
    model.save(file, include_seen=False)
    file.seek(0)
    assert np.isnan(hmf.load(file).predict(M, 3, unknown="popular"))
    assert model.predict(M, 3, unknown="popular") == pytest.approx(planted().data.mean(dtype=np.float64))


def test_a_matrix_is_predicted_by_label_on_request():
    model = MODELS["implicit"]
    best = model.predict(labelled()[:3])
    assert model.predict(labelled()[:3], labels=True).tolist() == [f"i{k}" for k in best]


def test_columns_that_are_unclear_are_named():
    table = pd.DataFrame({"user_id": ["u1"], "customer_id": ["u2"], "item_id": ["i1"]})
    with pytest.raises(RatingsError, match=r"labels=True"):
        MODELS["implicit"].predict(table)


def test_a_table_of_pairs_is_no_matrix_in_any_method():
    """It is read as ratings: its columns are never items."""
    table = pd.DataFrame({"user": ["u1", "u1", "u2"], "item": ["i4", "i5", "i4"], "rating": [1.0, 2.0, 3.0]})
    model, ratings = MODELS["biases"], hmf.Ratings.from_frame(table)
    np.testing.assert_array_equal(model.transform(table), model.transform(ratings))
    assert_rows(model.recommend_new(table), model.recommend_new(ratings))
    assert_rows(model.recommend([1, 2], table), model.recommend([1, 2], ratings))
    assert_rows(model.recommend([1], filter_items=table), model.recommend([1], filter_items=ratings))
    denied = pd.DataFrame([[1, 1]], index=["u1"], columns=["i4", "i5"])  # a wide one has labels, too
    assert_rows(model.recommend([1], filter_items=denied), model.recommend([1], filter_items=[[4, 5]]))
    assert model.objective(table) == model.objective(ratings)
    assert model.score(table) == model.score(ratings)
    assert model.explain(1, 7, table).score == model.explain(1, 7, ratings).score
    assert hmf.evaluate(model, table, metrics="rmse") == hmf.evaluate(model, ratings, metrics="rmse")
    updated = make("biases").fit(labelled()).partial_fit_users([1, 2], table)
    np.testing.assert_array_equal(updated.user_factors[1:3], model.transform(ratings)[:, :-1].astype(np.float32))


@pytest.mark.parametrize("method", ["score", "objective", "evaluate"])
def test_test_tables_with_unknown_ids_are_reported_once(method, warned):
    table = pd.DataFrame({"user": ["u1", "u2", "zoe"], "item": ["i4", "new", "i4"], "rating": [1.0, 2.0, 3.0]})
    call = getattr(MODELS["biases"], method, lambda table, **options: hmf.evaluate(MODELS["biases"], table, **options))
    options = {"metrics": "rmse"} if method == "evaluate" else {}
    with pytest.raises(UnknownLabelError, match='unknown="drop"'):
        call(table, **options)
    kept = hmf.Ratings.from_frame(table.iloc[:1])
    assert call(table, unknown="drop", **options) == call(kept, **options)
    (message,) = [text for text in warned() if "entries left out" in text]
    assert "2 of 3 entries" in message and "'zoe'" in message and "'new'" in message


# ------------------------------------------------------------------------------------- one state of the popular items


def test_popularity_answers_from_one_fit():
    """Another fit between any two reads of the state does not mix with the first one."""
    one, other = PopularityRecommender().fit(labelled()), PopularityRecommender().fit(labelled()[:7])
    other_state = PopularityRecommender(rank_by="mean").fit(planted(20, 31, seed=1))._state

    class Swapping(PopularityRecommender):
        @property
        def _state(self):
            return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    for call in (
        lambda m: m.recommend([0, 5], N=4),
        lambda m: m.recommend("u5", N=4, filter_items=["i3"], labels=True),
        lambda m: m.predict([0, 5], [3, 30]),
        lambda m: m.cold_users_,
    ):
        for state in (one._state, other._state):
            swapping = Swapping()
            swapping.states = [state, other_state]
            still = Swapping()
            still.states = [state]
            np.testing.assert_equal(call(swapping), call(still))
    evaluated = hmf.evaluate(one, planted(seed=3), metrics=("ndcg@5", "rmse"), block_users=7)
    assert evaluated == hmf.evaluate(one, planted(seed=3), metrics=("ndcg@5", "rmse"))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_an_order_and_members_that_are_no_ids_are_refused(kind):
    model = MODELS[kind]
    for call, name in (
        (lambda ids: model.recommend(ids, labels=True), "userid"),
        (lambda ids: model.similar_items(ids, labels=True), "itemid"),
        (lambda ids: model.predict(ids, ["i3"], labels=True), "users"),
    ):
        with pytest.raises(TypeError, match=f"{name} is a set.*pass a list"):
            call({"u1", "u2"})
        with pytest.raises(TypeError, match=f"{name}: labels must be one label or a vector"):
            call([["u1"]])
    assert_rows(model.recommend("u0", N=3, filter_items={"i3"}, labels=True, unknown="drop"),
                model.recommend("u0", N=3, filter_items=["i3"], labels=True, unknown="drop"))  # fmt: skip
