"""hybridmf.metrics against ir-measures, scikit-learn and plain loops."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score

import hybridmf as hmf
from hybridmf import metrics
from hybridmf.als import ImplicitALS
from hybridmf.core import sparse
from hybridmf.core.sparse import as_ones, entry_rows, keep_entries, take_rows
from hybridmf.core.validate import as_csr
from hybridmf.errors import NonFiniteError, RatingsError
from hybridmf.metrics import (
    auc,
    coverage_at_k,
    evaluate,
    hit_rate_at_k,
    mae,
    map_at_k,
    mean_over_users,
    mrr_at_k,
    ndcg_at_k,
    novelty_at_k,
    precision_at_k,
    recall_at_k,
    rmse,
    scorer,
)
from hybridmf.model.evaluation import as_evaluation
from hybridmf.model.popularity import PopularityRecommender, rank_by_count
from hybridmf.ratings import Ratings

ir_measures = pytest.importorskip("ir_measures")  # a machine that runs the GPU tests alone may lack it

RANKINGS = {
    "precision": precision_at_k,
    "recall": recall_at_k,
    "map": map_at_k,
    "ndcg": ndcg_at_k,
    "mrr": mrr_at_k,
    "hit_rate": hit_rate_at_k,
}


def random_case(rng, n_users=12, n_items=15, n_columns=8, largest_gain=4):
    """Rankings without repeats, some cut short by -1, and integer gains; every fourth user has no relevant item."""
    recommended = np.argsort(rng.random((n_users, n_items)), axis=1)[:, :n_columns]
    filled = rng.integers(0, n_columns + 1, n_users)
    recommended[np.arange(recommended.shape[1])[None, :] >= filled[:, None]] = -1
    gains = rng.integers(1, largest_gain + 1, (n_users, n_items)) * (rng.random((n_users, n_items)) < 0.4)
    gains[::4] = 0
    return recommended, sp.csr_array(gains.astype(np.float32))


def by_ir_measures(recommended, relevant, measure):
    """One value a user, NaN where the user has no relevant item."""
    dense = relevant.toarray().astype(int)
    qrels = {str(u): {str(i): int(row[i]) for i in np.flatnonzero(row)} for u, row in enumerate(dense) if row.any()}
    run = {str(u): {str(i): float(-rank) for rank, i in enumerate(row) if i >= 0} for u, row in enumerate(recommended)}
    values = np.full(len(dense), np.nan)
    for metric in ir_measures.iter_calc([measure], qrels, run):
        values[int(metric.query_id)] = metric.value
    return values


# ------------------------------------------------------------------------------------------------ predicted values


def test_rmse_and_mae_are_the_textbook_formulas():
    truth, predicted = [1.0, 2.0, 5.0, 3.0], [2.0, 2.0, 2.0, 5.0]
    assert rmse(truth, predicted) == pytest.approx(np.sqrt((1 + 0 + 9 + 4) / 4))
    assert mae(truth, predicted) == pytest.approx((1 + 0 + 3 + 2) / 4)
    assert type(rmse(truth, predicted)) is float and type(mae(truth, predicted)) is float


def test_errors_accumulate_in_float64():
    # One in float32 arithmetic: (2**24 + 1) - 2**24 is lost before it is squared.
    truth, predicted = np.array([2**24 + 1, 0], dtype=np.int64), np.array([2**24, 0], dtype=np.float32)
    assert mae(truth, predicted) == 0.5
    assert rmse(truth, predicted) == pytest.approx(np.sqrt(0.5))


@pytest.mark.parametrize("error", [rmse, mae])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_errors_of_values_that_are_not_finite_are_refused(error, value):
    with pytest.raises(ValueError, match=rf"predicted has the value {value} at position 1; .* leave such pairs out"):
        error([1.0, 2.0], [1.0, value])
    with pytest.raises(ValueError, match=rf"truth has the value {value} at position 0 \(and 1 more such values\)"):
        error([value, value, 1.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("error", [rmse, mae])
@pytest.mark.parametrize("value", [1j, "1", np.datetime64("2026-01-01")])
def test_errors_of_values_that_are_no_numbers_are_refused(error, value):
    with pytest.raises(TypeError, match="truth must be real numbers, got dtype"):
        error([value], [1.0])


@pytest.mark.parametrize("error", [rmse, mae])
def test_masked_values_are_refused(error):
    with pytest.raises(ValueError, match="predicted is masked at position 1"):
        error([1.0, 2.0], np.ma.array([1.0, 2.0], mask=[False, True]))
    with pytest.raises(ValueError, match="recommended is masked at position 2"):
        precision_at_k(np.ma.array([[0, 1], [1, 0]], mask=[[0, 0], [1, 0]]), np.eye(2), 1)


@pytest.mark.parametrize("error", [rmse, mae])
@pytest.mark.parametrize(
    ("truth", "predicted", "message"),
    [
        ([], [], "empty"),
        ([1.0, 2.0], [1.0], "truth has 2 values and predicted has 1"),
        ([[1.0]], [1.0], r"truth must be a vector, got an array of shape \(1, 1\)"),
        ([1.0], 1.0, r"predicted must be a vector, got an array of shape \(\)"),
    ],
)
def test_errors_refuse_values_that_cannot_be_compared(error, truth, predicted, message):
    with pytest.raises(ValueError, match=message):
        error(truth, predicted)


# -------------------------------------------------------------------------------------------------------- rankings


@pytest.mark.parametrize("k", [1, 3, 8, 11, 15, 40])  # 8 columns, 15 items
@pytest.mark.parametrize("seed", range(3))
def test_rankings_equal_ir_measures(seed, k):
    recommended, relevant = random_case(np.random.default_rng(seed))
    binary = relevant.copy()
    binary.data[:] = 1
    oracle = {
        "precision": ir_measures.P @ k,
        "recall": ir_measures.R @ k,
        "map": ir_measures.AP @ k,
        "ndcg": ir_measures.nDCG @ k,
        "mrr": ir_measures.RR @ k,
        "hit_rate": ir_measures.Success @ k,
    }
    for name, function in RANKINGS.items():
        expected = by_ir_measures(recommended, binary, oracle[name])
        values = function(recommended, relevant, k)
        assert values.dtype == np.float64
        np.testing.assert_allclose(values, expected, rtol=1e-12, err_msg=name)
        assert np.isnan(values[::4]).all() and not np.isnan(values).all()
    graded = ndcg_at_k(recommended, relevant, k, gains="value")
    np.testing.assert_allclose(graded, by_ir_measures(recommended, relevant, ir_measures.nDCG @ k), rtol=1e-12)
    np.testing.assert_allclose(ndcg_at_k(recommended, binary, k, gains="value"), ndcg_at_k(recommended, relevant, k))


def test_mean_over_users_equals_ir_measures_aggregate():
    recommended, relevant = random_case(np.random.default_rng(9), n_users=20)
    values = by_ir_measures(recommended, relevant, ir_measures.P @ 5)
    assert mean_over_users(precision_at_k(recommended, relevant, 5)) == pytest.approx(np.nanmean(values))


@pytest.mark.parametrize("values", [[], [np.nan, np.nan]])
def test_mean_over_no_users_is_an_error(values):
    with pytest.raises(ValueError, match="no user with a relevant item"):
        mean_over_users(values)


def test_map_divides_by_all_relevant_items():
    relevant = sp.csr_array(np.ones((1, 8), dtype=np.float32))
    assert map_at_k([[0, 1]], relevant, 2)[0] == pytest.approx(2 / 8)


def test_negative_and_zero_entries_are_not_relevant():
    relevant = sp.csr_array((np.float32([-2, 0, 3]), ([0, 0, 0], [0, 1, 2])), shape=(1, 4))
    assert precision_at_k([[0, 1]], relevant, 2)[0] == 0
    assert recall_at_k([[2, 1]], relevant, 2)[0] == 1
    assert ndcg_at_k([[2, 0]], relevant, 2, gains="value")[0] == 1


def test_no_recommendation_is_never_a_hit_but_keeps_its_rank():
    # Without its mask, -1 would find the last item of the user before.
    relevant = sp.csr_array(np.array([[0, 0, 1], [1, 0, 0]], dtype=np.float32))
    recommended = np.array([[-1, 2], [-1, 1]])
    np.testing.assert_array_equal(precision_at_k(recommended, relevant, 2), [0.5, 0])
    np.testing.assert_array_equal(map_at_k(recommended, relevant, 2), [0.5, 0])


@pytest.mark.parametrize("function", RANKINGS.values())
def test_shapes_without_users_columns_or_relevant_items(function):
    assert function(np.empty((0, 3), dtype=int), sp.csr_array((0, 5), dtype=np.float32), 3).shape == (0,)
    relevant = sp.csr_array(np.array([[1, 0], [0, 0]], dtype=np.float32))
    np.testing.assert_array_equal(function(np.empty((2, 0), dtype=int), relevant, 3), [0, np.nan])
    nothing = sp.csr_array((2, 2), dtype=np.float32)
    assert np.isnan(function([[0, 1], [1, 0]], nothing, 2)).all()


@pytest.mark.parametrize("function", RANKINGS.values())
@pytest.mark.parametrize(
    ("recommended", "k", "error", "message"),
    [
        ([[0, 1]], 0, ValueError, "k must satisfy k >= 1"),
        ([[0, 1]], 1.5, TypeError, "k must be an integer"),
        ([0, 1], 1, ValueError, r"recommended has shape \(2,\); expected \(n_users=1, k\)"),
        ([[0], [1]], 1, ValueError, r"recommended has shape \(2, 1\); expected \(n_users=1, k\)"),
        ([[0.0, 1.0]], 1, TypeError, "recommended must be integers"),
        ([[0, 3]], 2, ValueError, "recommended has 3 for user 0 at rank 2; expected 0 <= item < n_items=3"),
        ([[-2, 1]], 2, ValueError, "recommended has -2 for user 0 at rank 1"),
        ([[1, 0, 1]], 3, ValueError, "recommended has item 1 twice for user 0"),
    ],
)
def test_rankings_refuse_bad_input(function, recommended, k, error, message):
    with pytest.raises(error, match=message):
        function(recommended, sp.csr_array(np.array([[1, 0, 1]], dtype=np.float32)), k)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("n", [64, 65, 300])
def test_ids_repeat_in_short_and_long_lists(n, kind):
    relevant = sp.csr_array(np.ones((2, 400), dtype=np.float32))
    recommended = np.random.default_rng(n).permuted(np.tile(np.arange(400), (2, 1)), axis=1)[:, :n].astype(kind)
    assert recall_at_k(recommended, relevant, n).tolist() == [n / 400] * 2
    recommended[1, n - 1] = recommended[1, 3]
    with pytest.raises(ValueError, match=f"recommended has item {recommended[1, 3]} twice for user 1"):
        recall_at_k(recommended, relevant, n)


def test_many_users_in_parallel_equal_each_alone():
    recommended, relevant = random_case(np.random.default_rng(5), 3000, 30, 12)
    for function in RANKINGS.values():
        some = slice(2000, 2100)
        np.testing.assert_array_equal(
            function(recommended, relevant, 9)[some], function(recommended[some], relevant[some], 9)
        )


def test_only_the_first_k_columns_are_read():
    relevant = sp.csr_array(np.array([[1, 0, 1]], dtype=np.float32))
    assert precision_at_k([[0, 1, 1, 99]], relevant, 2)[0] == 0.5
    assert precision_at_k([[0, -1, -1]], relevant, 3)[0] == pytest.approx(1 / 3)


def test_unknown_gains():
    with pytest.raises(ValueError, match="gains must be one of 'binary', 'value'"):
        ndcg_at_k([[0]], sp.csr_array(np.ones((1, 1), dtype=np.float32)), 1, gains="exponential")


cases = st.builds(
    lambda seed, n_users, n_items, n_columns: random_case(
        np.random.default_rng(seed), n_users, n_items, min(n_columns, n_items)
    ),
    st.integers(0, 2**32 - 1),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(0, 12),
)


@settings(max_examples=20)
@given(cases, st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_laws_of_rankings(case, k, seed):
    recommended, relevant = case
    order = np.random.default_rng(seed).permutation(len(recommended))
    functions = [*RANKINGS.values(), lambda *args: ndcg_at_k(*args, gains="value")]
    for function in functions:
        values = function(recommended, relevant, k)
        judged = values[~np.isnan(values)]
        np.testing.assert_array_equal(np.isnan(values), np.diff(relevant.indptr) == 0)
        assert ((judged >= 0) & (judged <= 1)).all()
        np.testing.assert_array_equal(function(recommended[order], relevant[order], k), values[order])


@settings(max_examples=20)
@given(cases, st.integers(1, 20))
def test_perfect_rankings(case, k):
    _, relevant = case
    perfect = np.argsort(-relevant.toarray(), axis=1, kind="stable")
    counts = np.diff(relevant.indptr).astype(float)
    counts[counts == 0] = np.nan
    np.testing.assert_allclose(ndcg_at_k(perfect, relevant, k) / counts, 1 / counts)
    np.testing.assert_allclose(ndcg_at_k(perfect, relevant, k, gains="value") / counts, 1 / counts)
    np.testing.assert_allclose(recall_at_k(perfect, relevant, k), np.minimum(k, counts) / counts)
    np.testing.assert_allclose(map_at_k(perfect, relevant, k), np.minimum(k, counts) / counts)
    np.testing.assert_allclose(precision_at_k(perfect, relevant, k), np.minimum(k, counts) / k)
    np.testing.assert_allclose(mrr_at_k(perfect, relevant, k) / counts, 1 / counts)


def test_perfect_ndcg_is_not_above_one_by_rounding():
    relevant = sp.csr_array(np.ones((1, 16), dtype=np.float32))  # 16: here the two sums differ in the last bit
    assert ndcg_at_k(np.arange(16)[None, :], relevant, 16)[0] == 1.0


def test_ndcg_of_a_user_has_the_same_bits_anywhere_in_the_batch():
    recommended, relevant = random_case(np.random.default_rng(0), 101, 20, 13)
    values = ndcg_at_k(recommended, relevant, 13, gains="value")
    alone = [ndcg_at_k(recommended[[u]], relevant[[u]], 13, gains="value")[0] for u in range(101)]
    np.testing.assert_array_equal(values, alone)
    np.testing.assert_array_equal(ndcg_at_k(recommended[::-1], relevant[::-1], 13, gains="value"), values[::-1])


@pytest.mark.parametrize("k", [1, 3, 8, 40])
def test_novelty_and_coverage_by_plain_loops(k):
    rng = np.random.default_rng(k)
    recommended, train = random_case(rng, n_users=40, n_items=15)
    train.data[:] = -1  # entries count, whatever their values
    recommended[3] = -1
    counts = np.bincount(train.indices, minlength=15)
    assert counts.min() > 0
    expected = [[-np.log2(counts[item] / 40) for item in row[:k] if item >= 0] for row in recommended]
    values = novelty_at_k(recommended, train, k)
    np.testing.assert_allclose(values, [np.mean(each) if each else np.nan for each in expected])
    assert np.isnan(values[3])
    shown = {item for row in recommended[:, :k] for item in row.tolist() if item >= 0}
    assert coverage_at_k(recommended, 15, k) == pytest.approx(len(shown) / 15)


def test_an_item_without_users_is_as_novel_as_an_item_of_one_user():
    train = sp.csr_array(np.float32([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]]))
    np.testing.assert_array_equal(novelty_at_k(np.tile([0, 1, 2], (4, 1)), train, 1), [0] * 4)
    np.testing.assert_array_equal(novelty_at_k([[2], [1], [0], [-1]], train, 1), [2, 2, 0, np.nan])


def test_coverage_by_many_users_and_bad_input():
    recommended = np.random.default_rng(0).integers(0, 4000, (3000, 1))
    assert coverage_at_k(recommended, 5000, 10) == len(np.unique(recommended)) / 5000
    assert coverage_at_k(np.empty((0, 3), dtype=int), 5, 2) == 0
    with pytest.raises(ValueError, match="expected 0 <= item < n_items=2"):
        coverage_at_k([[0, 3]], 2, 2)
    with pytest.raises(ValueError, match="n_items must satisfy"):
        coverage_at_k([[0]], 0, 2)
    with pytest.raises(ValueError, match="recommended has shape"):
        novelty_at_k([[0]], np.eye(2), 1)


# ------------------------------------------------------------------------------------------------------------- AUC


def auc_case(seed=0, n_users=9, n_items=14, ties=True):
    rng = np.random.default_rng(seed)
    draw = (lambda *s: rng.integers(-2, 3, s).astype(np.float32)) if ties else (lambda *s: rng.normal(size=s))
    relevant = (rng.random((n_users, n_items)) < 0.3).astype(np.float32)
    relevant[0] = 0
    seen = (rng.random((n_users, n_items)) < 0.3).astype(np.float32)  # overlaps relevant: such items are left out
    return draw(n_users, 3), draw(n_items, 3), sp.csr_array(relevant), sp.csr_array(seen), draw(n_items)


def auc_by_scikit_learn(user_factors, item_factors, relevant, seen, bias):
    scores = (user_factors @ item_factors.T + bias).astype(np.float64)
    values = np.full(len(scores), np.nan)
    for user, score in enumerate(scores):
        unseen = np.ones(len(score), dtype=bool) if seen is None else seen.toarray()[user] == 0
        positive = relevant.toarray()[user][unseen] > 0
        if positive.any() and not positive.all():
            values[user] = roc_auc_score(positive, score[unseen])
    return values


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_auc_equals_scikit_learn(seed, ties):
    user_factors, item_factors, relevant, seen, bias = auc_case(seed, ties=ties)
    values = auc(user_factors, item_factors, relevant, seen, item_bias=bias)
    np.testing.assert_allclose(
        values, auc_by_scikit_learn(user_factors, item_factors, relevant, seen, bias), rtol=1e-12
    )
    assert np.isnan(values[0]) and not np.isnan(values[1:]).all()
    unbiased = auc(user_factors, item_factors, relevant)
    expected = auc_by_scikit_learn(user_factors, item_factors, relevant, None, np.zeros(len(item_factors)))
    np.testing.assert_allclose(unbiased, expected, rtol=1e-12)


def test_auc_does_not_depend_on_the_block(monkeypatch):
    user_factors, item_factors, relevant, seen, bias = auc_case(5)
    whole = auc(user_factors, item_factors, relevant, seen, item_bias=bias)
    sizes = []
    scores = metrics._scores
    monkeypatch.setattr(metrics, "_scores", lambda users, *rest: sizes.append(len(users)) or scores(users, *rest))
    for block_bytes, largest in [(1, 1), (3 * 4 * 14, 3), (4 * 4 * 14 - 1, 3)]:
        sizes.clear()
        blocked = auc(user_factors, item_factors, relevant, seen, item_bias=bias, block_bytes=block_bytes)
        np.testing.assert_array_equal(blocked, whole)
        assert max(sizes) == largest


def test_auc_extremes():
    items = np.float32([[4], [3], [2], [1]])
    relevant = sp.csr_array(np.float32([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, -1], [1, 0, 0, 0]]))
    users = np.float32([[1], [1], [1], [1], [0]])
    np.testing.assert_array_equal(auc(users, items, relevant), [1, 0, np.nan, np.nan, 0.5])


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 8))
def test_laws_of_auc(seed, n_users, n_items):
    user_factors, item_factors, relevant, seen, _ = auc_case(seed, n_users, n_items)
    values = auc(user_factors, item_factors, relevant, seen)
    judged = values[~np.isnan(values)]
    assert ((judged >= 0) & (judged <= 1)).all()
    np.testing.assert_allclose(auc(-user_factors, item_factors, relevant, seen), 1 - values)
    order = np.random.default_rng(seed).permutation(n_users)
    np.testing.assert_array_equal(auc(user_factors[order], item_factors, relevant[order], seen[order]), values[order])


def test_auc_refuses_bad_input():
    user_factors, item_factors, relevant, seen, bias = auc_case()
    with pytest.raises(ValueError, match=r"user_factors must have shape \(n, factors\), got \(3,\)"):
        auc(user_factors[0], item_factors, relevant)
    with pytest.raises(ValueError, match="user_factors has shape"):
        auc(user_factors[1:], item_factors, relevant)
    with pytest.raises(ValueError, match="item_factors has shape"):
        auc(user_factors, item_factors[:, :2], relevant)
    with pytest.raises(ValueError, match=r"item_bias has shape \(13,\); expected \(n_items=14,\)"):
        auc(user_factors, item_factors, relevant, item_bias=bias[1:])
    with pytest.raises(ValueError, match="seen has shape"):
        auc(user_factors, item_factors, relevant, seen[1:])
    with pytest.raises(ValueError, match="block_bytes must satisfy"):
        auc(user_factors, item_factors, relevant, block_bytes=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_auc_names_the_user_whose_scores_are_not_finite(value):
    relevant = sp.csr_array(np.float32([[0, 0], [1, 0], [1, 0]]))
    users = np.float32([[value, value], [1, 1], [value, value]])
    with pytest.raises(NonFiniteError, match="scores of user 2 are not finite"):
        auc(users, np.ones((2, 2)), relevant)


def test_auc_takes_finite_scores_whose_sum_overflows():
    relevant = sp.csr_array(np.float32([[1, 0, 0]]))
    assert auc(np.float32([[1]]), np.float32([[3e38], [2e38], [2.5e38]]), relevant)[0] == 1


# -------------------------------------------------------------------------------------------------------- evaluate


class FactorModel:
    """The part of an estimator that `evaluate` asks for, with given factors; remembers what it was asked."""

    def __init__(self, seed=0, n_users=10, n_items=12):
        rng = np.random.default_rng(seed)
        self.n_users, self.n_items = n_users, n_items
        self.user_factors = rng.integers(-4, 5, (n_users, 3)).astype(np.float32)
        self.item_factors = rng.normal(size=(n_items, 3)).astype(np.float32)
        self.item_bias_ = None
        self.fitted_on = sp.csr_array((rng.random((n_users, n_items)) < 0.25).astype(np.float32))
        self.calls = []

    def recommend(self, userid, user_items=None, N=10, filter_already_liked_items=True):
        self.calls.append((np.array(userid), user_items, N, filter_already_liked_items))
        seen = self.fitted_on[userid] if user_items is None else user_items
        scores = self.user_factors[userid] @ self.item_factors.T
        scores[seen.toarray() > 0] = -np.inf
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :N]
        found = np.take_along_axis(scores, ids, axis=1)
        return np.where(found == -np.inf, -1, ids).astype(np.int32), found

    def predict(self, users, items):
        assert len(users) == len(items)
        self.calls.append((np.array(users), np.array(items)))
        return np.einsum("ij,ij->i", self.user_factors[users], self.item_factors[items])


@pytest.fixture
def model():
    return FactorModel()


@pytest.fixture
def train():
    return sp.csr_array((np.random.default_rng(1).random((10, 12)) < 0.3).astype(np.float32))


@pytest.fixture
def held_out(train):
    """Values 0 to 5 outside `train`; stored zeros among them; users 2 and 7 have none."""
    rng = np.random.default_rng(2)
    rows, columns = np.nonzero((train.toarray() == 0) & (rng.random((10, 12)) < 0.5))
    rows, columns = rows[(rows != 2) & (rows != 7)], columns[(rows != 2) & (rows != 7)]
    return sp.csr_array((rng.integers(0, 6, len(rows)).astype(np.float32), (rows, columns)), shape=(10, 12))


@pytest.mark.parametrize("block_users", [1, 3, 1000])
def test_evaluate_rankings_by_hand(model, train, held_out, block_users):
    names = ["precision@5", "recall@20", "map@10", "ndcg@1", "ndcg@10"]
    values = evaluate(model, held_out, train=train, metrics=names, block_users=block_users)
    ids, _ = model.recommend(np.arange(10), train, N=12)
    expected = {
        "precision@5": mean_over_users(precision_at_k(ids, held_out, 5)),
        "recall@20": mean_over_users(recall_at_k(ids, held_out, 20)),
        "map@10": mean_over_users(map_at_k(ids, held_out, 10)),
        "ndcg@1": mean_over_users(ndcg_at_k(ids, held_out, 1)),
        "ndcg@10": mean_over_users(ndcg_at_k(ids, held_out, 10)),
    }
    assert list(values) == names and values == pytest.approx(expected, rel=1e-12)
    assert all(type(value) is float for value in values.values())


def test_evaluate_requests_blocks_of_users_with_relevant_items(model, train, held_out):
    evaluate(model, held_out, train=train, metrics=["ndcg@3", "map@7"], block_users=3)
    has_relevant = np.flatnonzero(np.diff((held_out > 0).tocsr().indptr))
    np.testing.assert_array_equal(np.concatenate([call[0] for call in model.calls]), has_relevant)
    assert max(len(call[0]) for call in model.calls) == 3
    for users, rows, N, filtered in model.calls:
        np.testing.assert_array_equal(rows.toarray(), train.toarray()[users])
        assert N == 7 and filtered is True


def test_evaluate_calls_once_if_recommending_needs_little_memory(model, train, held_out, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK_USERS", 3)
    several = evaluate(model, held_out, train=train, metrics="ndcg@3")
    assert [len(call[0]) for call in model.calls] == [3, 3, 2]
    model.calls.clear()
    model._recommends_in_blocks = True
    assert evaluate(model, held_out, train=train, metrics="ndcg@3") == several
    assert [len(call[0]) for call in model.calls] == [8]
    als = ImplicitALS(factors=2, iterations=1, device="cpu", random_state=0).fit(train)
    asked = []
    monkeypatch.setattr(als, "recommend", lambda users, **options: asked.append(len(users)) or model.recommend(users))
    evaluate(als, held_out, train=train, metrics="ndcg@10")
    assert asked == [len(np.flatnonzero(np.diff((held_out > 0).tocsr().indptr)))]


def test_evaluate_without_train_lets_the_model_filter(model, held_out):
    evaluate(model, held_out)
    assert all(call[1] is None for call in model.calls)
    assert model.calls[0][2] == 10


def test_evaluate_never_requests_more_items_than_exist(model, held_out):
    values = evaluate(model, held_out, metrics=["recall@50", "precision@50"])
    assert model.calls[0][2] == 12
    ids, _ = model.recommend(np.arange(10), N=12)
    assert values["precision@50"] == pytest.approx(mean_over_users(precision_at_k(ids, held_out, 50)))


def test_evaluate_takes_some_users_once_each(model, train, held_out):
    names = ("ndcg@4", "rmse", "auc")
    values = evaluate(model, held_out, train=train, metrics=names, users=[5, 3, 3, 2])
    rows = [3, 5]
    ids, _ = model.recommend(rows, train[rows], N=4)
    predicted = (model.user_factors @ model.item_factors.T)[rows]
    stored = held_out[rows].tocoo()
    areas = auc(model.user_factors, model.item_factors, held_out, train)[rows]
    assert values["ndcg@4"] == pytest.approx(mean_over_users(ndcg_at_k(ids, held_out[rows], 4)))
    assert values["rmse"] == pytest.approx(rmse(stored.data, predicted[stored.row, stored.col]))
    assert values["auc"] == pytest.approx(areas.mean())


@pytest.mark.parametrize("block_users", [2, 1000])
def test_evaluate_errors_on_every_test_entry(model, held_out, block_users):
    values = evaluate(model, held_out, metrics=("mae", "rmse"), block_users=block_users)
    stored = held_out.tocoo()
    assert (stored.data == 0).any()
    predicted = model.predict(stored.row, stored.col)
    assert values == pytest.approx({"mae": mae(stored.data, predicted), "rmse": rmse(stored.data, predicted)})
    assert max(len(np.unique(call[0])) for call in model.calls[:-1]) <= block_users


def test_predictions_are_requested_in_blocks_of_entries(model, held_out, monkeypatch):
    whole = evaluate(model, held_out, metrics="rmse")
    assert len(model.calls) == 1
    monkeypatch.setattr(metrics, "BLOCK_ENTRIES", 6)
    assert evaluate(model, held_out, metrics="rmse") == whole
    sizes = [len(call[0]) for call in model.calls[1:]]
    assert sum(sizes) == held_out.nnz and len(sizes) > 2 and max(sizes) < 6 + np.diff(held_out.indptr).max()


def test_evaluate_errors_need_no_relevant_entry(model):
    test = sp.csr_array((np.float32([-1, 0]), ([0, 1], [0, 1])), shape=(10, 12))
    assert evaluate(model, test, metrics="rmse")["rmse"] > 0


def test_evaluate_auc_uses_the_item_bias(model, train, held_out):
    model.item_bias_ = np.linspace(-5, 5, 12)
    expected = auc(model.user_factors, model.item_factors, held_out, train, item_bias=model.item_bias_)
    assert evaluate(model, held_out, train=train, metrics=("auc",))["auc"] == np.nanmean(expected)
    del model.item_bias_
    expected = auc(model.user_factors, model.item_factors, held_out, train)
    assert evaluate(model, held_out, train=train, metrics=("auc",))["auc"] == np.nanmean(expected)
    assert model.calls == []


def test_evaluate_relevance_threshold(model, train, held_out):
    liked = sp.csr_array((held_out.toarray() >= 3).astype(np.float32))
    names = ("ndcg@5", "auc")
    values = evaluate(model, held_out, train=train, metrics=names, relevance_threshold=3)
    assert values == pytest.approx(evaluate(model, liked, train=train, metrics=names))
    assert values != pytest.approx(evaluate(model, held_out, train=train, metrics=names))


def test_evaluate_threshold_compares_in_float32(model):
    test = sp.csr_array((np.array([0.7, 0.1]), ([0, 1], [0, 1])), shape=(10, 12))
    values = evaluate(model, test, metrics="recall@12", relevance_threshold=0.7)  # float32(0.7) < 0.7
    assert 0 <= values["recall@12"] <= 1
    np.testing.assert_array_equal(np.concatenate([call[0] for call in model.calls]), [0])


def test_evaluate_threshold_can_make_zero_and_negative_entries_relevant(model):
    test = sp.csr_array((np.float32([-1, 0, -2]), ([0, 1, 2], [0, 1, 2])), shape=(10, 12))
    model.fitted_on = sp.csr_array((10, 12), dtype=np.float32)
    assert evaluate(model, test, metrics="recall@12", relevance_threshold=-1) == {"recall@12": 1.0}
    np.testing.assert_array_equal(model.calls[0][0], [0, 1])


def test_evaluate_takes_objects_with_user_items(model, train, held_out):
    class Holder:
        def __init__(self, matrix):
            self.user_items = matrix

    names = ("ndcg@5", "auc")
    held = evaluate(model, Holder(held_out), train=Holder(train), metrics=names)
    assert held == evaluate(model, held_out, train=train, metrics=names)


@pytest.mark.parametrize("name", ["ndcg", "ndcg@0", "ndcg@-1", "ndcg@x", "hits@10", "rmse@10", "ndcg@10 ", "", 10])
def test_evaluate_lists_the_known_metrics(model, held_out, name):
    with pytest.raises(
        ValueError, match=r"known are rmse, mae, auc, ndcg@k, .*, hit_rate@k, novelty@k, coverage@k"
    ) as caught:
        evaluate(model, held_out, metrics=("rmse", name))
    assert repr(name) in str(caught.value)


def test_evaluate_refuses_bad_input(model, train, held_out):
    with pytest.raises(RatingsError, match=r"test has shape \(10, 11\); expected \(n_users=10, n_items=12\)"):
        evaluate(model, held_out[:, :11])
    with pytest.raises(RatingsError, match=r"train has shape \(12, 10\).*pass train\.T"):
        evaluate(model, held_out, train=train.T)
    with pytest.raises(ValueError, match="users has 10 at position 1"):
        evaluate(model, held_out, users=[0, 10])
    with pytest.raises(ValueError, match="block_users must satisfy"):
        evaluate(model, held_out, block_users=0)
    with pytest.raises(ValueError, match="relevance_threshold must be finite"):
        evaluate(model, held_out, relevance_threshold=np.nan)
    with pytest.raises(ValueError, match='"auc" needs train='):
        evaluate(model, held_out, metrics="auc")


def test_evaluate_without_relevant_entries(model, train, held_out):
    with pytest.raises(ValueError, match=r"no relevant entry \(value > 0\) for any of the 2 users"):
        evaluate(model, held_out, users=[2, 7])
    with pytest.raises(ValueError, match="value >= relevance_threshold=6"):
        evaluate(model, held_out, relevance_threshold=6)
    with pytest.raises(ValueError, match="no entry for any of the 2 users; rmse and mae"):
        evaluate(model, held_out, users=[2, 7], metrics="rmse")
    with pytest.raises(ValueError, match="auc is not defined"):
        evaluate(model, held_out, train=held_out, metrics="auc")


def test_overlap_of_test_and_training_entries_is_reported(model, train, held_out, caplog):
    evaluate(model, held_out, train=train)
    assert not caplog.messages
    seen = train + keep_entries(held_out, np.arange(held_out.nnz) == 5)
    evaluate(model, held_out, train=seen)
    assert f"test: 1 of {held_out.nnz} entries are training entries" in caplog.text
    held_out = as_ones(held_out, np.float32)
    fitted = ImplicitALS(2, iterations=1).fit(train)
    caplog.clear()
    evaluate(fitted, held_out + train, metrics="ndcg@5")
    assert f"test: {train.nnz} of {train.nnz + held_out.nnz} entries are training entries" in caplog.text
    caplog.clear()
    ImplicitALS(2, regularization=0.01, iterations=2).fit(train, validation=held_out)
    assert "training entries" not in caplog.text
    caplog.clear()
    ImplicitALS(2, regularization=0.01, iterations=2).fit(train, validation=held_out + train)
    assert [message.split(" are")[0] for message in caplog.messages if "training entries" in message] == [
        f"validation: {train.nnz} of {train.nnz + held_out.nnz} entries"
    ]


def test_evaluation_on_training_entries_is_refused():
    """They are not recommended, so all metrics of hits would be 0."""
    likes = Ratings(np.random.default_rng(0).random((30, 20)) < 0.3)
    options = {"factors": 3, "iterations": 2, "device": "cpu", "num_threads": 1, "random_state": 0}
    model = ImplicitALS(**options).fit(likes)
    for call in (
        lambda: evaluate(model, likes),
        lambda: evaluate(model, likes[:30], train=likes, metrics=("novelty@5", "recall@5", "mrr@5")),
        lambda: ImplicitALS(**options).fit(likes, validation=likes),
    ):
        with pytest.raises(ValueError, match=r"all \d+ relevant entries of test are training entries, .*@\d+ is 0"):
            call()
    lists = np.tile(np.arange(5), (30, 1))
    assert evaluate(lists, likes, train=likes)["recall@10"] > 0  # ready lists are taken as they are
    assert model.score(likes) > 0.5
    assert set(evaluate(model, likes, metrics=("coverage@5", "novelty@5"))) == {"coverage@5", "novelty@5"}


def test_evaluate_auc_without_factors(model, train, held_out):
    model.user_factors = None
    with pytest.raises(TypeError, match="FactorModel has none"):
        evaluate(model, held_out, train=train, metrics="auc")


def test_evaluate_novelty_and_coverage(model, train, held_out):
    users = np.flatnonzero(np.diff((held_out > 0).tocsr().indptr))
    ids, _ = model.recommend(users, train[users], N=7)
    names = ("coverage@7", "novelty@7", "coverage@1", "mrr@3", "hit_rate@2")
    values = evaluate(model, held_out, train=train, metrics=names, block_users=3)
    assert list(values) == list(names)
    everybody = np.full((10, 7), -1)
    everybody[users] = ids
    assert values["coverage@7"] == coverage_at_k(ids, 12, 7) > values["coverage@1"] == coverage_at_k(ids, 12, 1)
    assert values["novelty@7"] == pytest.approx(np.nanmean(novelty_at_k(everybody, train, 7)))
    assert values["mrr@3"] == pytest.approx(np.nanmean(mrr_at_k(everybody, held_out, 3)))
    assert evaluate(model, held_out, metrics="coverage@7").keys() == {"coverage@7"}
    with pytest.raises(ValueError, match='metric "novelty@k" needs train='):
        evaluate(model, held_out, metrics="novelty@7")
    fitted = ImplicitALS(factors=2, iterations=1, device="cpu", random_state=0).fit(train)
    by_model = evaluate(fitted, held_out, metrics="novelty@7")
    assert by_model == evaluate(fitted, held_out, train=train, metrics="novelty@7")


# -------------------------------------------------------------------------------------- values of users, intervals


def test_values_of_each_user_average_to_the_metrics(model, train, held_out):
    names = ("ndcg@5", "rmse", "mae", "auc", "coverage@5")
    values = evaluate(model, held_out, train=train, metrics=names, users=[9, 5, 3, 2], relevance_threshold=4)
    counts = np.diff(held_out.indptr)
    np.testing.assert_array_equal(values.users, [3, 5, 9])  # user 2 has no entry
    np.testing.assert_array_equal(values.n_entries, counts[[3, 5, 9]])
    assert list(values.per_user) == ["ndcg@5", "rmse", "mae", "auc"]
    for name in ("ndcg@5", "auc"):
        alone = [evaluate(model, held_out, train=train, metrics=name, users=[u], relevance_threshold=4) for u in (3, 5)]
        assert values.per_user[name][:2] == pytest.approx([each[name] for each in alone])
        assert np.nanmean(values.per_user[name]) == pytest.approx(values[name])
    for user, error, size in zip(values.users, values.per_user["rmse"], values.per_user["mae"], strict=True):
        one = evaluate(model, held_out, metrics=("rmse", "mae"), users=[user])
        assert (error, size) == pytest.approx((one["rmse"], one["mae"]))
    weights = values.n_entries / values.n_entries.sum()
    assert values["rmse"] == pytest.approx(np.sqrt(weights @ values.per_user["rmse"] ** 2))


def with_values(values, name="ndcg@10", entries=None):
    values = np.asarray(values, dtype=float)
    entries = np.ones(len(values), dtype=np.int64) if entries is None else entries
    return as_evaluation({}, users=np.arange(len(values)), n_entries=entries, per_user={name: values})


def test_intervals_have_the_width_of_the_normal_approximation(monkeypatch):
    draws = np.random.default_rng(0).normal(3, 2, 4000)
    found = with_values([*draws, np.nan]).interval("ndcg@10")
    assert found.value == pytest.approx(draws.mean())
    error = draws.std() / np.sqrt(4000)
    assert (found.high - found.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)
    assert abs(found.high + found.low - 2 * found.value) < error
    assert with_values(draws).interval("ndcg@10", 0.5).high < found.high
    # in groups, where there are many users
    monkeypatch.setattr("hybridmf.model.evaluation.GROUPS", 300)
    grouped = with_values(draws).interval("ndcg@10")
    assert grouped.value == pytest.approx(found.value)
    assert (grouped.high - grouped.low) / (found.high - found.low) == pytest.approx(1, abs=0.15)
    assert str(found) == f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"


def test_intervals_of_errors_weigh_users_by_their_entries():
    rng = np.random.default_rng(0)
    entries = rng.integers(1, 50, 500)
    values = rng.random(500)
    found = with_values(values, "rmse", entries).interval("rmse")
    assert found.value == pytest.approx(np.sqrt((entries * values**2).sum() / entries.sum()))
    assert found.low < found.value < found.high
    again = with_values(values, "rmse", entries).interval("rmse")
    assert found == again != with_values(values, "rmse", entries).interval("rmse", random_state=1)


def test_a_paired_difference_sees_what_two_intervals_do_not():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 1, 800)  # what makes users easy or hard for every model
    better, worse = (with_values(hard + shift + rng.normal(0, 0.05, 800)) for shift in (0.02, 0))
    assert better.interval("ndcg@10").low < worse.interval("ndcg@10").high
    difference = better.difference(worse, "ndcg@10")
    assert 0 < difference.low < difference.value < difference.high
    assert worse.difference(better, "ndcg@10").value == pytest.approx(-difference.value)


def test_intervals_refuse_bad_input(model, train, held_out):
    found = evaluate(model, held_out, train=train, metrics=("ndcg@5", "coverage@5"))
    with pytest.raises(ValueError, match="'coverage@5' has no values for each user here; those that have: ndcg@5"):
        found.interval("coverage@5")
    with pytest.raises(ValueError, match="0 < level < 1"):
        found.interval("ndcg@5", 1.0)
    with pytest.raises(ValueError, match="n_resamples must satisfy"):
        found.interval("ndcg@5", n_resamples=0)
    with pytest.raises(ValueError, match="ndcg@10 is defined for 1 users; an interval needs at least two"):
        with_values([1.0, np.nan]).interval("ndcg@10")
    with pytest.raises(TypeError, match="other must be an Evaluation"):
        found.difference({"ndcg@5": 0.1}, "ndcg@5")
    fewer = evaluate(model, held_out, train=train, metrics="ndcg@5", users=[3, 4])
    with pytest.raises(ValueError, match="other was evaluated on 2 users"):
        found.difference(fewer, "ndcg@5")


# ------------------------------------------------------------------------------------------------- models of others


class Bare:
    """Any object with `recommend`; its lists end with items that were to be left out, as implicit's do."""

    def __init__(self, model, scores=True):
        self.model, self.scores = model, scores

    def recommend(self, users, user_items, N=10, filter_already_liked_items=True):
        assert type(user_items) is sp.csr_matrix and filter_already_liked_items is True
        ids, scores = self.model.recommend(users, user_items, N)
        if not self.scores:
            return ids
        return np.where(ids < 0, 0, ids), np.where(ids < 0, np.finfo(np.float32).min, scores).astype(np.float32)


@pytest.mark.parametrize("scores", [True, False])
def test_evaluate_takes_any_object_that_recommends(model, train, held_out, scores):
    names = ("ndcg@12", "coverage@12", "novelty@3")
    expected = evaluate(model, held_out, train=train, metrics=names)
    assert evaluate(Bare(model, scores), held_out, train=train, metrics=names) == expected
    with pytest.raises(ValueError, match="Bare does not store the items seen by its users: pass train="):
        evaluate(Bare(model), held_out)
    with pytest.raises(TypeError, match="Bare has no predict"):
        evaluate(Bare(model), held_out, train=train, metrics="rmse")


def test_evaluate_takes_lists_of_items(model, train, held_out):
    ids, _ = model.recommend(np.arange(10), train, N=6)
    names = ("ndcg@3", "recall@6", "map@20")
    expected = evaluate(model, held_out, train=train, metrics=names[:2])
    for lists in (ids, ids.tolist()):
        assert evaluate(lists, held_out, metrics=names[:2]) == expected
    assert evaluate(ids, held_out, metrics=names)["map@20"] == mean_over_users(map_at_k(ids, held_out, 20))
    with pytest.raises(
        ValueError, match=r"model is an array of shape \(9, 6\); expected positions of items, \(n_users=10"
    ):
        evaluate(ids[:9], held_out)
    with pytest.raises(TypeError, match="model is an array of dtype float64"):
        evaluate(ids / 1, held_out)
    with pytest.raises(ValueError, match='metric "novelty@k" needs train='):
        evaluate(ids, held_out, metrics="novelty@3")
    with pytest.raises(TypeError, match="an array has no predict"):
        evaluate(ids, held_out, metrics="rmse")
    with pytest.raises(TypeError, match="and item_factors; an array has none"):
        evaluate(ids, held_out, train=train, metrics="auc")


def test_other_models_have_the_labels_of_train(model, train, held_out):
    """Positions of a model without labels are those of `train`; `test` may come in any order."""
    users, items = np.array([f"u{k}" for k in range(10)]), np.array([f"i{k}" for k in range(12)])
    turned = np.arange(10)[::-1]
    test = Ratings(held_out[turned][:, ::-1], users[turned], items[::-1])
    found = evaluate(Bare(model), test, train=Ratings(train, users, items))
    expected = evaluate(model, held_out, train=train)
    assert found == pytest.approx(expected)
    ids, _ = model.recommend(np.arange(10), train, N=10)
    assert evaluate(ids, test, train=Ratings(train, users, items)) == pytest.approx(expected)


@pytest.mark.parametrize("ids", [[f"u{k}" for k in range(10)], {"u0": 0}, 3])
def test_user_ids_of_other_models_may_be_anything(model, train, held_out, ids):
    expected = evaluate(model, held_out, train=train)
    model.user_ids_ = ids
    found = evaluate(model, held_out, train=train)
    assert found == expected and found.user_ids is None


def test_evaluate_takes_models_of_implicit(train, held_out):
    als = pytest.importorskip("implicit.cpu.als")
    names = ("ndcg@10", "auc", "novelty@5")
    peer = als.AlternatingLeastSquares(factors=3, iterations=2, random_state=0, num_threads=1)
    with pytest.raises(ValueError, match="this AlternatingLeastSquares has no user_factors; fit it first"):
        evaluate(peer, held_out, train=train)
    peer.fit(sp.csr_matrix(train), show_progress=False)
    ids, scores = peer.recommend(np.arange(10), sp.csr_matrix(train), N=10)
    ids = np.where(scores > -1e38, ids, -1)
    found = evaluate(peer, held_out, train=train, metrics=names)
    assert found["ndcg@10"] == pytest.approx(np.nanmean(by_ir_measures(ids, held_out > 0, ir_measures.nDCG @ 10)))
    assert found["auc"] == pytest.approx(np.nanmean(auc(peer.user_factors, peer.item_factors, held_out, train)))
    with pytest.raises(ValueError, match="user_factors of AlternatingLeastSquares have 10 rows"):
        evaluate(peer, held_out[:9], train=train[:9])


# ---------------------------------------------------------------------------------------------- popularity baseline


def popular_by_hand(counts, seen, N, allowed):
    ids = [i for i in sorted(range(len(counts)), key=lambda i: (-counts[i], i)) if i in allowed and i not in seen][:N]
    padding = N - len(ids)
    return ids + [-1] * padding, [float(counts[i]) for i in ids] + [-np.inf] * padding


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 7),
    st.integers(1, 10),
    st.integers(1, 14),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_popularity_recommends_as_a_plain_loop_does(seed, n_users, n_items, N, filtered, with_items, with_filter):
    rng = np.random.default_rng(seed)
    dense = (rng.random((n_users, n_items)) < rng.random()).astype(np.float32)
    dense[0, 0] = 1.0  # a model cannot be fitted on nothing
    model = PopularityRecommender().fit(sp.csr_array(dense))
    users = rng.integers(0, n_users, 5)
    items = rng.integers(0, n_items, 4) if with_items else None
    hidden = rng.integers(0, n_items, 2) if with_filter else None
    ids, scores = model.recommend(users, N=N, filter_already_liked_items=filtered, items=items, filter_items=hidden)
    assert ids.dtype == np.int32 and scores.dtype == np.float32 and ids.shape == scores.shape == (5, N)
    allowed = set(range(n_items) if items is None else items.tolist()) - set([] if hidden is None else hidden.tolist())
    counts = np.count_nonzero(dense, axis=0)
    for user, row, score in zip(users, ids, scores, strict=True):
        seen = set(np.flatnonzero(dense[user])) if filtered else set()
        expected_ids, expected_scores = popular_by_hand(counts, seen, N, allowed)
        assert row.tolist() == expected_ids and score.tolist() == expected_scores


def test_popularity_takes_other_rows_and_single_users():
    model = PopularityRecommender().fit(np.float32([[5, 1, 0, 0], [3, 4, 1, 0], [2, 0, 0, 0]]))
    np.testing.assert_array_equal(model.item_counts_, [3, 2, 1, 0])
    ids, scores = model.recommend(2, N=3)
    assert ids.tolist() == [1, 2, 3] and scores.tolist() == [2, 1, 0]
    ids, _ = model.recommend([2, 0], user_items=np.float32([[1, 0, 0, 0], [0, 0, 0, 0]]), N=2)
    assert ids.tolist() == [[1, 2], [0, 1]]
    ids, _ = model.recommend(np.empty(0, dtype=int), N=2)
    assert ids.shape == (0, 2)


def test_popularity_predicts_damped_means():
    matrix = sp.csr_array((np.float32([5, 3, 4, 0]), ([0, 1, 1, 0], [0, 0, 1, 1])), shape=(2, 3))  # a stored zero
    model = PopularityRecommender(damping=2).fit(matrix)
    mean = 12 / 4
    assert model.global_mean_ == mean
    expected = [(8 + 2 * mean) / 4, (4 + 2 * mean) / 4, mean]
    predicted = model.predict([0, 1, 0], [0, 1, 2])
    assert predicted.dtype == np.float32
    np.testing.assert_allclose(predicted, expected, rtol=1e-6)
    undamped = PopularityRecommender(damping=0).fit(matrix)
    np.testing.assert_allclose(undamped.item_means_, [4, 2, mean])
    assert PopularityRecommender().fit(np.float32([[2**24, 1, 1, 1]])).global_mean_ == (2**24 + 3) / 4


def test_popularity_through_evaluate(train, held_out):
    model = PopularityRecommender().fit(train)
    names = ("rmse", "mae", "ndcg@5", "precision@5", "recall@5", "map@5", "auc")
    values = evaluate(model, held_out, train=train, metrics=names)
    assert list(values) == list(names)
    assert values == pytest.approx(evaluate(model, held_out, train=train, metrics=names, block_users=2))
    counts = train.toarray().sum(axis=0)
    scores = np.ones((10, 1)) @ counts[None, :]
    expected = auc_by_scikit_learn(scores, np.eye(12), held_out, train, 0)
    assert values["auc"] == pytest.approx(np.nanmean(expected))
    ids, _ = model.recommend(np.arange(10), N=5)
    assert values["recall@5"] == pytest.approx(np.nanmean(by_ir_measures(ids, held_out, ir_measures.R @ 5)))
    without = evaluate(model, held_out, metrics="recall@5")  # the model filters by what it was fitted on
    assert without["recall@5"] == pytest.approx(values["recall@5"])


def test_popularity_refuses_bad_input():
    matrix = np.float32([[1, 0, 1], [0, 1, 0]])
    for call in (lambda m: m.recommend(0), lambda m: m.predict([0], [0])):
        with pytest.raises(NotFittedError, match="call fit"):
            call(PopularityRecommender())
    with pytest.raises(ValueError, match="damping must be >= 0"):
        PopularityRecommender(damping=-1).fit(matrix)
    with pytest.raises(RatingsError, match="no entries"):
        PopularityRecommender().fit(np.zeros((2, 3)))
    model = PopularityRecommender().fit(matrix)
    with pytest.raises(ValueError, match="userid has 2"):
        model.recommend(2)
    with pytest.raises(ValueError, match="N must satisfy 1 <= N"):
        model.recommend(0, N=0)
    with pytest.raises(TypeError, match="filter_already_liked_items must be True or False"):
        model.recommend(0, filter_already_liked_items=1)
    with pytest.raises(ValueError, match="user_items has shape"):
        model.recommend([0, 1, 1], user_items=matrix[:1])
    with pytest.raises(ValueError, match="filter_items has 3"):
        model.recommend(0, filter_items=[3])
    with pytest.raises(ValueError, match="items has -1"):
        model.recommend(0, items=[-1])
    with pytest.raises(ValueError, match="users has 3 ids and items has 2; expected as many of each"):
        model.predict([0, 1, 0], [0, 1])
    with pytest.raises(ValueError, match="predict takes users and items, or a table of pairs"):
        model.predict([0, 1])
    with pytest.raises(ValueError, match="items has 3"):
        model.predict([0], [3])


# ------------------------------------------------------------------------------------------------------ sparse rows


@pytest.mark.parametrize("wide", [False, True])
def test_parts_of_a_matrix_equal_numpy_and_keep_narrow_indices(monkeypatch, wide):
    dense = np.random.default_rng(0).random((6, 5), dtype=np.float32)
    dense[dense < 0.5] = 0
    if wide:
        monkeypatch.setattr("hybridmf.core.validate.INT32_LIMIT", 0)
    matrix = as_csr(dense)
    rows, mask = np.array([4, 0, 4, 5]), matrix.data > 0.75
    assert mask.any() and not mask.all()
    np.testing.assert_array_equal(entry_rows(matrix), np.nonzero(dense)[0])
    ones = as_ones(matrix, np.int8)
    parts = [
        (take_rows(matrix, rows), dense[rows]),
        (keep_entries(matrix, mask), np.where(dense > 0.75, dense, 0)),
        (ones, dense > 0),
        (take_rows(ones, rows), dense[rows] > 0),
    ]
    monkeypatch.setattr("hybridmf.core.sparse.FEW_ROWS", 1)
    parts += [(take_rows(matrix, some), dense[some]) for some in (rows, rows[:1])]
    for part, expected in parts:
        assert part.indices.dtype == np.int32 and part.indptr.dtype == (np.int64 if wide else np.int32)
        fresh = sp.csr_array((part.data, part.indices, part.indptr), shape=part.shape)  # forgets cached flags
        assert fresh.has_canonical_format and part.has_canonical_format
        np.testing.assert_array_equal(fresh.toarray(), expected)
    assert ones.dtype == np.int8 and np.shares_memory(ones.indices, matrix.indices)
    assert take_rows(matrix, rows[:0]).shape == (0, 5) and take_rows(matrix, np.arange(6)) is matrix
    assert keep_entries(matrix, np.ones(matrix.nnz, dtype=bool)) is matrix


@pytest.mark.parametrize(("row", "compiled"), [(0, 1), (1, 0)])
def test_compiled_code_takes_few_rows_with_many_entries(monkeypatch, row, compiled):
    dense = np.zeros((100, 200), dtype=np.float32)
    dense[0, ::2] = 3  # as many entries as the matrix has rows
    dense[1, 5:104] = 2
    calls, original = [], sparse._formats.take_rows
    monkeypatch.setattr(sparse._formats, "take_rows", lambda *args: calls.append(1) or original(*args))
    np.testing.assert_array_equal(take_rows(as_csr(dense), np.array([row])).toarray(), dense[[row]])
    assert len(calls) == compiled


def test_explicit_zeros_of_train_are_no_entries_for_implicit_models():
    """As they are none for `fit`: they are not seen, not counted as popular, and not left out of the AUC."""
    rng = np.random.default_rng(0)
    dense = ((rng.random((60, 30)) < 0.4) * rng.integers(1, 6, (60, 30))).astype(np.float32)
    test = np.where(rng.random(dense.shape) < 0.2, dense, 0)
    known, zeros = dense - test, (dense == 0) & (rng.random(dense.shape) < 0.2)
    rows, columns = np.nonzero((known > 0) | zeros)
    with_zeros = sp.csr_array((known[rows, columns], (rows, columns)), shape=dense.shape)
    model = ImplicitALS(4, device="cpu", random_state=0).fit(with_zeros)
    names = ("ndcg@10", "novelty@5", "auc")
    found, expected = (
        evaluate(model, sp.csr_array(test), train=train, metrics=names) for train in (with_zeros, sp.csr_array(known))
    )
    assert dict(found) == dict(expected)


# ------------------------------------------------------------------------- several models, samples, own metrics


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, ...]:
    """Training and test entries, and two models of the former."""
    plays = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.05, seed=0)
    train, test = hmf.split(plays, 0.2, 0)
    models = {rank: hmf.ImplicitALS(rank, regularization=1.0, random_state=0).fit(train) for rank in (2, 16)}
    return train, test, models[2], models[16]


def test_a_dict_of_models_is_a_table_with_paired_differences(fitted):
    train, test, low, high = fitted
    names = ("ndcg@10", "coverage@10")
    found = hmf.evaluate({"rank 2": low, "rank 16": high}, test, train=train, metrics=names)
    alone = [hmf.evaluate(each, test, train=train, metrics=names) for each in (low, high)]
    assert list(found) == ["rank 2", "rank 16"] and list(found.values()) == alone
    over = alone[1].difference(alone[0], "ndcg@10")
    assert str(over) in str(found) and str(alone[0].interval("ndcg@10")) in str(found)
    assert str(over) in found._repr_html_()
    frame = found.to_frame()
    row = frame[(frame["model"] == "rank 16") & (frame["metric"] == "ndcg@10")].iloc[0]
    assert (row["difference"], row["difference_low"], row["difference_high"]) == tuple(over)
    assert frame["low"].isna().sum() == 2  # coverage has no values for each user
    sampled = hmf.evaluate({"a": low, "b": high}, test, train=train, metrics="ndcg@10", sample=50)
    np.testing.assert_array_equal(sampled["a"].users, sampled["b"].users)
    with pytest.raises(TypeError, match="model must have a model for each name"):
        hmf.evaluate({}, test)


def test_users_of_two_models_are_paired_by_label():
    rng = np.random.default_rng(0)
    users = np.array([f"u{k:02d}" for k in range(60)])
    matrix = sp.csr_array(rng.random((60, 20)) < 0.4).astype(np.float32)
    test = hmf.Ratings.from_coo(users, [f"i{k:02d}" for k in rng.integers(0, 20, 60)], np.ones(60))
    items = np.array([f"i{k:02d}" for k in range(20)])
    train = hmf.Ratings.from_matrix(matrix, user_ids=users, item_ids=items)
    turned = hmf.Ratings.from_matrix(matrix[::-1], user_ids=users[::-1], item_ids=items)
    first, same, other = (PopularityRecommender().fit(each) for each in (train, train, turned))
    found = hmf.evaluate({"first": first, "other": other}, test, train=train, metrics="ndcg@10")
    assert found["other"].user_ids[0] == "u59" and found["first"].user_ids[0] == "u00"
    over = found["other"].difference(found["first"], "ndcg@10")
    assert (over.low, over.high) == (0, 0) and str(over) in str(found)
    for options in ({"sample": 5}, {"users": [0, 1]}):
        assert hmf.evaluate({"first": first, "same": same}, test, train=train, **options)["same"].n_users <= 5
        with pytest.raises(ValueError, match="by position, and models 'first' and 'other' have different users"):
            hmf.evaluate({"first": first, "other": other}, test, train=train, **options)
    fewer = hmf.evaluate(first, test, train=train, users=[0, 1])
    assert "over a" in str(hmf.metrics.Evaluations(a=fewer, b=found["first"]))  # users differ: no difference


@pytest.mark.parametrize("metric", ["rmse", "mae"])
def test_implicit_models_have_no_errors_of_ratings(fitted, metric):
    train, test, low, _ = fitted
    message = f'etric "{metric}" compares predicted ratings, .* implicit feedback rank: .*"ndcg@10".*ExplicitALS'
    for call in (
        lambda: hmf.evaluate(low, test, metrics=("ndcg@10", metric)),
        lambda: hmf.evaluate({"popular": PopularityRecommender().fit(train), "low": low}, test, metrics=metric),
        lambda: low.score(test, metric=metric),
        lambda: hmf.search(train, model="implicit", metric=metric, trials=1),
        lambda: hmf.ImplicitALS(2).fit(train, validation=test, early_stopping={"metric": metric}),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_sample_of_users(fitted):
    train, test, low, _ = fitted
    whole = hmf.evaluate(low, test, train=train, metrics="recall@5")
    counted = whole.users[~np.isnan(whole.per_user["recall@5"])]
    found = hmf.evaluate(low, test, train=train, metrics="recall@5", sample=40)
    assert found.n_users == 40 and set(found.users) <= set(counted)
    assert found == hmf.evaluate(low, test, train=train, metrics="recall@5", sample=40)
    other = hmf.evaluate(low, test, train=train, metrics="recall@5", sample=40, random_state=1)
    assert set(other.users) != set(found.users)
    assert hmf.evaluate(low, test, train=train, metrics="recall@5", sample=10**6) == whole
    few = hmf.evaluate(low, test, train=train, metrics="recall@5", sample=30, users=counted[:35])
    assert few.n_users == 30 and set(few.users) <= set(counted[:35])
    stars = hmf.ExplicitALS(2, iterations=1).fit(train)
    errors = hmf.evaluate(stars, test, train=train, metrics="rmse", sample=10)
    assert len(errors.users) == 10
    with pytest.raises(ValueError, match="sample must"):
        hmf.evaluate(low, test, train=train, sample=0)


def test_metrics_of_the_caller(fitted):
    train, test, low, high = fitted

    def first_hit(rankings, relevant):
        dense = relevant.toarray() > 0
        assert rankings.shape[1] == 10 and set(np.unique(relevant.data)) == {1.0}
        return dense[np.arange(len(dense)), rankings[:, 0]].astype(float)

    def recall_of_mine(rankings, relevant):
        return recall_at_k(rankings, relevant, 20)

    recall_of_mine.k = 20
    names = [first_hit, "recall@20", recall_of_mine]
    found = hmf.evaluate(low, test, train=train, metrics=names)
    assert list(found) == ["first_hit", "recall@20", "recall_of_mine"]
    assert found["recall_of_mine"] == pytest.approx(found["recall@20"], rel=1e-12)
    assert found["first_hit"] == hmf.evaluate(low, test, train=train, metrics="precision@1")["precision@1"]
    assert hmf.evaluate(low, test, train=train, metrics=first_hit, block_users=7) == {"first_hit": found["first_hit"]}
    assert found.difference(hmf.evaluate(high, test, train=train, metrics=names), "first_hit").low <= 1
    with pytest.raises(ValueError, match=r"metric 'one' must return one value for each of the \d+ users"):
        hmf.evaluate(low, test, train=train, metrics=type("one", (), {"__call__": lambda *_: 1.0, "__name__": "one"})())
    with pytest.raises(ValueError, match="'first_hit' more than once"):
        hmf.evaluate(low, test, train=train, metrics=[first_hit, first_hit])
    first_hit.__name__ = "auc"
    for call in (hmf.evaluate, lambda *_, metrics, **options: hmf.search(test, metric=metrics, trials=1)):
        with pytest.raises(ValueError, match="'auc' is a function with the name of a metric of evaluate"):
            call(low, test, train=train, metrics=first_hit)


def test_scorer_for_scikit_learn(fitted):
    from sklearn.model_selection import GridSearchCV, KFold

    train, test, low, _ = fitted
    assert scorer("recall@20")(low, test) == hmf.evaluate(low, test, metrics="recall@20")["recall@20"]
    stars = hmf.ExplicitALS(2, iterations=1).fit(train)
    assert scorer("rmse")(stars, test) == -hmf.evaluate(stars, test, metrics="rmse")["rmse"]
    assert pickle.loads(pickle.dumps(scorer("recall@20")))(low, test) == scorer("recall@20")(low, test)
    grid = {"regularization": [1.0, 1e6]}
    model = hmf.ImplicitALS(4, iterations=3, random_state=0)
    cv = KFold(3, shuffle=True, random_state=0)
    found = GridSearchCV(model, grid, cv=cv, scoring=scorer("recall@20"), error_score="raise").fit(train.entries)
    assert found.best_params_ == {"regularization": 1.0} and 0 < found.best_score_ <= 1
    with pytest.raises(ValueError, match="metrics has 'recall'"):
        scorer("recall")


@pytest.mark.parametrize("seen", [True, False])
def test_popular_items_are_those_of_a_sort_of_all(seen):
    rng = np.random.default_rng(0)
    for n_items, N in ((5, 10), (400, 3), (400, 20)):
        counts, allowed = rng.integers(0, 9, n_items), rng.random(n_items) < 0.8
        rows = sp.csr_array((rng.random((6, n_items)) < 0.1 if seen else np.zeros((6, n_items))).astype(np.int8))
        ids, scores = rank_by_count(counts, allowed, rows if seen else None, 6, N)
        order = np.argsort(-counts, kind="stable")
        for row, found, score in zip(rows.toarray(), ids, scores, strict=True):
            left = [item for item in order if allowed[item] and not row[item]][:N]
            assert found.tolist() == left + [-1] * (N - len(left))
            assert score[: len(left)].tolist() == counts[left].tolist()
