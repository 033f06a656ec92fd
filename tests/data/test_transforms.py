"""Methods of Ratings that make other ratings: rows, values, weights, k-core, concat, frames."""

from __future__ import annotations

import narwhals.stable.v2 as nw
import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.model_selection import KFold, cross_val_score

import hybridmf as hmf
from hybridmf.core.frames import KINDS, kind_of
from hybridmf.errors import DuplicateEntriesError, RatingsError
from support.messages import says
from support.ratings import planted
from support.reading import assert_canonical, triplets

pl = pytest.importorskip("polars")

USERS, ITEMS, VALUES, TIMES = list("abacb"), list("xxyzz"), [5, 3, 4, 1, 2], [10, 20, 30, 40, 50]


def small():
    return hmf.Ratings.from_coo(USERS, ITEMS, VALUES, timestamps=TIMES)


def test_len_and_rows():
    ratings = small()
    assert len(ratings) == 3
    for rows in ([2, 0], np.array([2, 0]), (np.array([2, 0]), ...)):
        part = ratings[rows]
        assert part.user_ids.tolist() == ["c", "a"] and part.shape == (2, 3)
        assert triplets(part) == {("c", "z"): 1, ("a", "x"): 5, ("a", "y"): 4}
        assert part.timestamps.tolist() == [40, 10, 30]
        assert_canonical(part.user_items)
    assert ratings[1:].user_ids.tolist() == ["b", "c"]
    assert triplets(ratings[::-2]) == triplets(ratings[[2, 0]])
    assert ratings[-1].user_ids.tolist() == ["c"] and ratings[range(2)].n_users == 2
    assert ratings[[True, False, True]].user_ids.tolist() == ["a", "c"]
    assert hmf.Ratings(planted())[[3, 3]].nnz == 2 * planted()[[3]].nnz
    with pytest.raises(IndexError):
        ratings[3]
    with pytest.raises(TypeError, match="by users alone"):
        ratings[0, 1]


def test_scikit_learn_splits_rows():
    ratings = hmf.Ratings(planted(30, 20, density=0.5))
    model = hmf.ExplicitALS(factors=2, iterations=2, random_state=0, device="cpu")
    scores = cross_val_score(model, ratings, cv=KFold(3))
    np.testing.assert_array_equal(scores, cross_val_score(model, ratings.user_items, cv=KFold(3)))


def test_values():
    ratings = small()
    logs = ratings.with_values(np.log1p)
    np.testing.assert_allclose(logs.user_items.data, np.log1p(ratings.user_items.data), rtol=1e-6)
    assert logs.timestamps is ratings.timestamps and logs.user_ids is ratings.user_ids
    np.testing.assert_array_equal(ratings.with_values(range(5)).user_items.data, np.arange(5))
    assert triplets(ratings.binarize(4)) == {("a", "x"): 1, ("a", "y"): 1}
    assert ratings.binarize(4).timestamps.tolist() == [10, 30] and ratings.binarize(4).shape == (3, 3)
    assert ratings.with_values([0, 1, -1, 2, 0]).binarize().nnz == 2
    tenths = ratings.with_values([0.7, 0.1, 0.2, 0.8, 0.6])
    assert tenths.binarize(0.7).nnz == 2
    for values, parts in (
        ([1, 2], ("values has shape (2,); expected one value for each of 5 entries",)),
        (lambda data: data * np.nan, ("values has the value nan",)),
        (lambda data: 1.0, ("values has shape ()",)),
    ):
        with pytest.raises(RatingsError, match=says(*parts)):
            ratings.with_values(values)


def test_weights_are_those_of_implicit():
    nearest = pytest.importorskip("implicit.nearest_neighbours")
    ratings = hmf.Ratings(planted(60, 40))
    for mine, theirs in (
        (ratings.bm25_weight(), nearest.bm25_weight(ratings.user_items)),
        (ratings.bm25_weight(K1=2, B=0.3), nearest.bm25_weight(ratings.user_items, K1=2, B=0.3)),
        (ratings.tfidf_weight(), nearest.tfidf_weight(ratings.user_items)),
    ):
        np.testing.assert_allclose(mine.user_items.toarray(), theirs.toarray(), rtol=1e-5)
    np.testing.assert_allclose(
        ratings.log_weight(0.5).user_items.data, np.log1p(ratings.user_items.data / 0.5), rtol=1e-6
    )


def test_weights_of_items_of_all_users_are_zero_and_not_dislikes():
    everybody = hmf.Ratings(np.ones((3, 2)))
    for weighted in (everybody.bm25_weight(), everybody.tfidf_weight()):
        assert weighted.user_items.data.tolist() == [0.0] * 6
    zeros = hmf.Ratings.from_coo([0, 1], [0, 1], [0.0, 2.0], shape=(9, 2))
    assert np.all(np.isfinite(zeros.bm25_weight(B=1.0).user_items.data))
    for call, kind, parts in (
        (lambda: small().with_values([1, 1, 1, 1, -2]).bm25_weight(), RatingsError, ("smallest value is -2",)),
        (lambda: small().bm25_weight(B=2), ValueError, ("B must be <= 1",)),
        (lambda: small().log_weight(0), ValueError, ("scale must be > 0",)),
    ):
        with pytest.raises(kind, match=says(*parts)):
            call()


def naive_core(matrix, k, item_k):
    users, items = np.arange(matrix.shape[0]), np.arange(matrix.shape[1])
    while True:
        keep, dense = np.count_nonzero(matrix, axis=1) >= k, matrix
        matrix, users = matrix[keep], users[keep]
        stay = np.count_nonzero(matrix, axis=0) >= item_k
        matrix, items = matrix[:, stay], items[stay]
        if dense.shape == matrix.shape:
            return matrix, users, items


@pytest.mark.parametrize(("k", "item_k"), [(4, None), (5, 3), (2, 8)])
def test_k_core(k, item_k):
    dense = (np.random.default_rng(0).random((60, 40)) < 0.12).astype(float)
    core = hmf.Ratings(dense).k_core(k, item_k)
    expected, users, items = naive_core(dense, k, item_k or k)
    assert 0 < core.nnz < np.count_nonzero(dense)
    np.testing.assert_array_equal(core.user_items.toarray(), expected)
    assert core.user_ids.tolist() == users.tolist() and core.item_ids.tolist() == items.tolist()
    assert_canonical(core.user_items)


def test_k_core_of_nothing():
    with pytest.raises(RatingsError, match="no user and item have k=9 and item_k=9 entries"):
        small().k_core(9)
    labelled = small().k_core(1, 2)
    assert labelled.item_ids.tolist() == ["x", "z"] and labelled.timestamps.tolist() == [10, 20, 50, 40]


def test_concat():
    first, second = small(), hmf.Ratings.from_coo(["d", "a"], ["x", "w"], [2, 1], timestamps=[1, 2])
    both = hmf.Ratings.concat([first, second])
    assert triplets(both) == triplets(first) | triplets(second)
    assert both.user_ids.tolist() == ["a", "b", "c", "d"] and both.item_ids.tolist() == ["x", "y", "z", "w"]
    assert both.timestamps.tolist() == [10, 30, 2, 20, 50, 40, 1]
    with pytest.raises(DuplicateEntriesError, match=r"user 'a', item 'x'"):
        hmf.Ratings.concat([first, first])
    doubled = hmf.Ratings.concat(iter([first, first]), duplicates="sum")
    assert triplets(doubled) == {pair: 2 * value for pair, value in triplets(first).items()}
    plain = hmf.Ratings.concat([hmf.Ratings([[1, 0]]), hmf.Ratings([[0, 0, 2], [1, 0, 0]])])
    assert plain.user_items.toarray().tolist() == [[1, 0, 2], [1, 0, 0]] and plain.timestamps is None
    with pytest.raises(RatingsError, match="users have labels in part 0 and only positions in part 1"):
        hmf.Ratings.concat([first, plain])
    for parts in ([], [planted()]):
        with pytest.raises(TypeError, match="concat takes one or more Ratings"):
            hmf.Ratings.concat(parts)


@pytest.mark.parametrize("backend", KINDS)
def test_to_frame(backend):
    frame = small().to_frame(backend)
    assert kind_of(frame) == backend
    columns = nw.from_native(frame).to_dict(as_series=False)
    assert list(columns) == ["user", "item", "value", "timestamp"]
    assert set(zip(*columns.values(), strict=True)) == set(zip(USERS, ITEMS, VALUES, TIMES, strict=True))
    again = hmf.Ratings.from_frame(frame)
    assert triplets(again) == triplets(small()) and again.timestamps.tolist() == small().timestamps.tolist()
    assert kind_of(again[[0]].binarize().to_frame()) == backend
    positions = nw.from_native(hmf.Ratings(planted()).to_frame(backend)).to_dict(as_series=False)
    assert list(positions) == ["user", "item", "value"] and positions["user"][-1] == planted().tocoo().row[-1]


def test_a_frame_goes_into_every_method():
    frame = pl.DataFrame({"user": USERS, "item": ITEMS, "rating": VALUES})
    ratings = hmf.Ratings.from_frame(frame)
    others = pl.DataFrame({"user": list("abcc"), "item": list("zyxy"), "rating": [1, 2, 3, 4]})
    model = hmf.ImplicitALS(factors=2, iterations=2, random_state=0, device="cpu").fit(frame, validation=others)
    same = hmf.ImplicitALS(factors=2, iterations=2, random_state=0, device="cpu").fit(ratings)
    np.testing.assert_array_equal(model.user_factors, same.user_factors)
    assert model.objective(frame) == same.objective(ratings)
    np.testing.assert_array_equal(model.recommend_new(frame)[0], same.recommend_new(ratings)[0])
    for name in ("recommend", "partial_fit_users"):
        mine, theirs = (getattr(each, name)([0, 1, 2], given) for each, given in ((model, frame), (same, ratings)))
        if name == "recommend":
            np.testing.assert_array_equal(mine[0], theirs[0])
    np.testing.assert_array_equal(model.user_factors, same.user_factors)
    metrics = ("ndcg@1", "recall@1")
    held_out = hmf.Ratings.from_frame(others)
    assert hmf.evaluate(model, others, metrics=metrics) == hmf.evaluate(same, held_out, metrics=metrics)
    popular = hmf.metrics.PopularityRecommender().fit(frame)
    assert popular.item_ids_.tolist() == ["x", "y", "z"]
    assert sp.issparse(hmf.split(ratings.user_items, 1)[0])
