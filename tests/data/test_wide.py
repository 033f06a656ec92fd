"""Wide frames (pivot tables): index and columns are labels in every method, whatever their order."""

from __future__ import annotations

import logging
import re
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.errors import RatingsError, UnknownLabelError
from support.ratings import planted

pd, pl, pa = pytest.importorskip("pandas"), pytest.importorskip("polars"), pytest.importorskip("pyarrow")

M, N_ITEMS = 30, 12
USERS, ITEMS = [f"u{k:02}" for k in range(M)], [f"i{k:02}" for k in range(N_ITEMS)]
SMALL = {"factors": 3, "iterations": 2, "random_state": 0, "device": "cpu", "num_threads": 1}
CELLS = np.ceil(planted(M, N_ITEMS, 0.5).toarray())
HIDDEN = np.random.default_rng(5).random(CELLS.shape) < 0.3
TRAIN, TEST = (
    pd.DataFrame(np.where(hidden, 0, CELLS), index=USERS, columns=ITEMS).replace(0, np.nan)
    for hidden in (HIDDEN, ~HIDDEN)
)
WEIGHTS = TRAIN * 0.5 + 1
MODELS = {"explicit": hmf.ExplicitALS(**SMALL), "implicit": hmf.ImplicitALS(**SMALL)}
FITTED = {kind: model.fit(TRAIN) for kind, model in MODELS.items()}
PLAIN = hmf.ImplicitALS(**SMALL).fit(TRAIN.reset_index(drop=True))


def ratings_of(frame) -> hmf.Ratings:
    """The entries of a frame by labels, without its reader."""
    return hmf.Ratings.from_matrix(
        sp.csr_array(frame.fillna(0).to_numpy()), user_ids=list(frame.index), item_ids=list(frame.columns)
    )


def updated(method, model, ids, frame):
    copy = model._holding()
    getattr(copy, method)(ids, frame)
    side = "user" if method.endswith("users") else "item"
    return copy._learned.state.side(side).matrix[ids]


USES = {
    "fit": lambda m, f: _by_label(type(m)(**SMALL).fit(f[0])),
    "validation": lambda m, f: type(m)(**SMALL).fit(TRAIN, validation=f[1]).history_[-1],
    "weights": lambda m, f: _by_label(hmf.ImplicitALS(**SMALL).fit(TRAIN, weights=f[2])),
    "recommend": lambda m, f: m.recommend([3, 0, 7], f[1], N=4),
    "recalculated": lambda m, f: m.recommend([3, 0], f[1], N=4, recalculate_user=True),
    "recommend_table": lambda m, f: m.recommend_table(USERS[:5], f[1], N=3).to_numpy().tolist(),
    "recommend_all": lambda m, f: m.recommend_all(user_items=f[1], N=3).to_numpy().tolist(),
    "filter_items": lambda m, f: m.recommend([3, 0, 7], N=4, filter_items=f[1]),
    "items": lambda m, f: m.recommend([3, 0, 7], N=4, items=f[1]),
    "popularity": lambda m, f: (
        hmf.metrics.PopularityRecommender().fit(TRAIN).recommend(USERS[:5], f[1], N=3, labels=True)[0].tolist()
    ),
    "explain": lambda m, f: m.explain(3, 4, f[1]).score,
    "evaluate": lambda m, f: hmf.evaluate(m, f[1], train=f[0], metrics=("ndcg@3", "auc")),
    "errors": lambda m, f: hmf.evaluate(FITTED["explicit"], f[1], train=f[0], metrics="rmse"),
    "objective": lambda m, f: m.objective(f[1]),
    "partial_fit_users": lambda m, f: updated("partial_fit_users", m, np.arange(M), f[1]),
    "partial_fit_items": lambda m, f: updated("partial_fit_items", m, np.arange(N_ITEMS), f[1]),
    "split": lambda m, f: hmf.split(f[0], 0.2, 0)[0].to_frame("pandas").sort_values(["user", "item"]).user.nunique(),
    "prepared": lambda m, f: _by_label(type(m)(**SMALL).fit(hmf.PreparedRatings(f[0]))),
}
"""Methods that take a frame; `f` is (training, test, weights)."""


def _by_label(model):
    """Labels, and values that do not depend on their order: squared distances between users would; sums do not."""
    return sorted(model.user_ids_), sorted(model.item_ids_), dict(zip(model.item_ids_, model.item_counts_, strict=True))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("use", USES)
def test_frames_go_by_their_labels_in_every_method(use, kind):
    model, call = FITTED[kind], USES[use]
    rng = np.random.default_rng(3)
    users, items = rng.permutation(USERS), rng.permutation(ITEMS)
    frames = [frame.loc[users, items] for frame in (TRAIN, TEST, WEIGHTS)]
    expected = call(model, list(map(ratings_of, (TRAIN, TEST, WEIGHTS))))
    for found in (call(model, frames), call(model, [TRAIN, TEST, WEIGHTS])):
        _assert_same(found, expected)


def _assert_same(found, expected):
    if isinstance(expected, dict):
        assert {k: v for k, v in found.items() if k != "seconds"} == pytest.approx(
            {k: v for k, v in expected.items() if k != "seconds"}, rel=1e-5
        )
    elif isinstance(expected, list) or (isinstance(expected, tuple) and isinstance(expected[0], list)):
        assert found == expected
    else:
        for one, other in zip(np.atleast_1d(found), np.atleast_1d(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@settings(max_examples=20)
@given(st.permutations(range(N_ITEMS)), st.lists(st.integers(0, M - 1), min_size=1, max_size=6, unique=True))
def test_rows_of_new_users_are_aligned_by_columns(order, rows):
    """The index does not matter there, so it may repeat."""
    frame = TEST.iloc[[*rows, rows[0]]]
    for kind, model in FITTED.items():
        expected = model.recommend_new(ratings_of(frame.iloc[:-1]), N=4)[0] if kind == "implicit" else None
        found = model.recommend_new(frame[[ITEMS[k] for k in order]], N=4)[0]
        if expected is not None:
            np.testing.assert_array_equal(found[:-1], expected)
        np.testing.assert_array_equal(found[-1], found[0])


@pytest.mark.parametrize("method", ["transform", "predict", "score"])
def test_methods_of_scikit_learn_refuse_another_order(method):
    model = FITTED["implicit"]
    getattr(model, method)(TEST)
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        getattr(model, method)(TEST[ITEMS[::-1]])
    numbers = TEST.set_axis(range(100, 100 + N_ITEMS), axis=1)  # scikit-learn compares names of text only
    model = hmf.ImplicitALS(**SMALL).fit(TRAIN.set_axis(numbers.columns, axis=1))
    np.testing.assert_allclose(
        getattr(model, method)(numbers.loc[:, ::-1]), getattr(model, method)(numbers), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "make",
    [pl.from_pandas, lambda f: pl.from_pandas(f).lazy(), lambda f: pa.Table.from_pandas(f, preserve_index=False)],
)
def test_frames_of_other_libraries_name_the_items(make):
    plain = TRAIN.reset_index(drop=True)
    model = hmf.ImplicitALS(**SMALL).fit(make(plain))
    assert model.user_ids_ is None
    assert model.item_ids_.tolist() == model.feature_names_in_.tolist() == ITEMS
    np.testing.assert_array_equal(model.item_factors_, PLAIN.item_factors_)
    test = make(TEST.reset_index(drop=True)[ITEMS[::-1]])
    np.testing.assert_array_equal(model.recommend(range(M), test, N=4)[0], PLAIN.recommend(range(M), TEST.to_numpy(
        na_value=0), N=4)[0])  # fmt: skip


def test_a_default_index_stands_for_positions():
    plain = TEST.reset_index(drop=True)
    assert PLAIN.user_ids_ is None
    assert hmf.Ratings.from_matrix(pd.DataFrame(CELLS)).item_ids is None
    expected = PLAIN.recommend([7, 2], plain, N=4)[0]
    np.testing.assert_array_equal(PLAIN.recommend([7, 2], plain.loc[[7, 2]], N=4)[0], expected)
    np.testing.assert_array_equal(
        updated("partial_fit_users", PLAIN, [7, 2], plain.loc[[7, 2]]),
        updated("partial_fit_users", PLAIN, [7, 2], plain.fillna(0).to_numpy()[[7, 2]]),
    )
    with pytest.raises(RatingsError, match=r"user_items has user labels and the model only positions.*to_numpy\(\)"):
        PLAIN.recommend([7, 2], plain.loc[[2, 7]], N=4)
    part = hmf.Ratings.from_matrix(plain.iloc[5:9])
    assert part.user_ids.tolist() == [5, 6, 7, 8]


def test_unknown_columns_are_refused_or_dropped():
    strange = TEST.rename(columns={"i03": "new"})
    model = FITTED["implicit"]
    with pytest.raises(UnknownLabelError, match=r"test has .* of 1 item \('new'\) unknown to the model"):
        hmf.evaluate(model, strange)
    assert hmf.evaluate(model, strange, unknown="drop") == hmf.evaluate(model, TEST.drop(columns="i03"))
    with pytest.raises(UnknownLabelError, match="'new'"):
        model.recommend([1], strange)
    with pytest.raises(RatingsError, match="has item labels and the model only positions"):
        hmf.ImplicitALS(**SMALL).fit(sp.csr_array(CELLS)).recommend([1], TEST.iloc[:1].reset_index(drop=True))


@pytest.mark.parametrize("kind", ["float64", "Int64", "int64[pyarrow]", "object"])
def test_missing_cells_are_no_entries(kind, caplog):
    frame = TRAIN if kind == "float64" else TRAIN.astype(kind)
    with caplog.at_level(logging.INFO, logger="hybridmf"):
        ratings = hmf.Ratings.from_matrix(frame)
    assert "cells are missing (NaN or null), and no entries" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    np.testing.assert_array_equal(ratings.user_items.toarray(), TRAIN.fillna(0).to_numpy())
    assert (ratings.user_ids.tolist(), ratings.item_ids.tolist()) == (USERS, ITEMS)
    assert ratings.frame_kind == "pandas"


def test_zeros_beside_missing_cells_are_said_aloud(caplog):
    hmf.Ratings.from_matrix(pd.DataFrame([[0.0, 3, np.nan], [1, 0, 2]], columns=list("abc")))
    assert "has 2 cells of 0 beside 1 missing ones" in caplog.text


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (
            TRAIN.rename_axis("userId").reset_index(),
            RatingsError,
            r"column 'userId', by its name.*set_index\('userId'\)",
        ),
        (TRAIN.reset_index(drop=True).reset_index(), RatingsError, "column 'index', by its name"),
        (TRAIN.reset_index(names="who"), TypeError, "column 'who' of something else than numbers"),
        (TRAIN.assign(when=pd.Timestamp(0)), TypeError, "column 'when' of something else than numbers"),
        (pd.concat([TRAIN, TRAIN]), ValueError, "index has repeated labels.*reset_index"),
        (pd.concat([TRAIN, TRAIN], axis=1), ValueError, "columns has repeated labels"),
        (TRAIN.replace(3.0, np.inf), RatingsError, "finite"),
        (pd.concat({"n": TRAIN}, axis=1), TypeError, "labels of type tuple"),
    ],
)
def test_what_is_no_wide_frame_is_refused(frame, error, message):
    with pytest.raises(error, match="(?s)" + message):
        hmf.ImplicitALS(**SMALL).fit(frame)


def test_a_wide_frame_of_polars_with_a_column_of_users_is_refused():
    frame = pl.from_pandas(TRAIN.rename_axis("user").reset_index())
    with pytest.raises(RatingsError, match="column 'user', by its name"):
        hmf.ImplicitALS(**SMALL).fit(frame)


def test_items_may_have_names_of_people():
    frame = pd.DataFrame(CELLS, columns=["player", *ITEMS[1:]])
    assert hmf.Ratings.from_matrix(frame).item_ids[0] == "player"


def test_given_labels_take_the_place_of_those_of_a_frame():
    plain = TRAIN.reset_index(drop=True)
    for read in (hmf.Ratings, hmf.Ratings.from_matrix, lambda f, **ids: hmf.PreparedRatings(f, **ids).ratings):
        assert read(plain, user_ids=USERS).user_ids.tolist() == USERS
        assert read(plain, user_ids=USERS).item_ids.tolist() == ITEMS
        assert read(TRAIN, item_ids=range(N_ITEMS)).item_ids.tolist() == list(range(N_ITEMS))


def test_values_keep_their_precision():
    frame = pd.DataFrame(CELLS + (CELLS > 0) * 0.1, columns=ITEMS)
    models = [hmf.ExplicitALS(**SMALL, dtype="float64").fit(each) for each in (frame, sp.csr_array(frame.to_numpy()))]
    np.testing.assert_array_equal(models[0].item_factors_, models[1].item_factors_)
    with pytest.raises(RatingsError, match=re.escape("X has 3 features, but ImplicitALS is expecting 12 features")):
        FITTED["implicit"].transform(np.ones((2, 3)))


@pytest.mark.parametrize(
    "names", [("user", "item", "rating", "timestamp", "age"), ("customer", "product", "qty", "price", "a", "b")]
)
def test_a_log_of_many_columns_is_no_matrix(names):
    frame = pd.DataFrame({name: [1, 1, 2, 3] for name in names})
    user, item = names[:2]
    for use in (hmf.Ratings.from_matrix, hmf.ImplicitALS(**SMALL).fit, hmf.split):
        with pytest.raises(RatingsError, match=rf"Ratings.from_frame\(.*user='{user}', item='{item}'"):
            use(frame)


def test_titles_that_are_names_of_columns_are_items():
    titles = ["Player", "Song", *(f"title {k}" for k in range(30))]
    assert hmf.Ratings.from_matrix(pd.DataFrame(np.ones((3, 32)), columns=titles)).n_items == 32


def test_totals_of_a_pivot_table_are_refused():
    log = pd.DataFrame({"u": [1, 1, 2], "i": ["a", "b", "a"], "r": [1.0, 2.0, 3.0]})
    table = log.pivot_table(index="u", columns="i", values="r", margins=True)
    with pytest.raises(RatingsError, match=r"margins.*iloc\[:-1, :-1\]"):
        hmf.Ratings.from_matrix(table)
    assert hmf.Ratings.from_matrix(table.iloc[:-1, :-1]).shape == (2, 2)


def test_half_precision_cells_raise_no_warning():
    cells = np.array([[5, 0, 3], [0, 4, 0]], np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hmf.Ratings.from_matrix(cells).nnz == 3
