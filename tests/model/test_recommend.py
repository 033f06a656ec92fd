"""recommend and similar_*: the stable sort of all scores, filters, refusals."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core import validate as _validate
from hybridmf.core.objective import Factors, State
from hybridmf.errors import MemoryBudgetError, RatingsError
from hybridmf.model.learned import count_items, pattern
from support import reference
from support.messages import says
from support.ratings import planted
from support.served_models import EMPTY_ITEM, EMPTY_USER, KINDS, N_ITEMS, M, assert_same, fitted, labelled, make


def planted_with(model, users: np.ndarray, items: np.ndarray, seen, biases=None):
    """The model with factors put in place of those it learned: small integers make every score exact."""
    user_bias, item_bias, mean = biases or (None, None, 0.0)
    dtype = model.user_factors_.dtype
    cast = [None if a is None else np.asarray(a, dtype=dtype) for a in (users, user_bias, items, item_bias)]
    state, seen = State(Factors(*cast[:2]), Factors(*cast[2:]), mean), pattern(_validate.as_csr(seen))
    model._learn(
        replace(model._learned, state=state, seen=seen, total=None, item_counts=count_items(seen), values=None)
    )
    model.n_features_in_ = len(items)
    return model


def expected_top(users, items, count, left_out, counts, biases=None):
    """Dense scores sorted; items of zero factors are left out, users of zero factors get what most users have."""
    users, items, left_out = np.asarray(users), np.asarray(items), np.array(left_out, dtype=bool)
    blank_items, blank_users = ~items.any(axis=1), ~users.any(axis=1)
    scores = (users @ items.T).astype(float)
    if biases is not None:
        user_bias, item_bias, mean = biases
        scores += mean + user_bias[:, None] + item_bias
        blank_items &= item_bias == 0
        blank_users[:] = False  # the biases of items rank for them
    unknown = np.where(blank_users[:, None], counts == 0, blank_items)
    scores[blank_users] = counts
    return reference.top_k(scores, count, left_out | unknown)


# ------------------------------------------------------------------------------------------- recommend: right answers


@settings(max_examples=40)
@given(st.data())
def test_recommend_is_the_stable_sort_of_the_dense_scores(data):
    """Ties to the lower item, duplicated items, every filter, biases, scalar and vector ids."""
    seed, kind = data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from(["explicit", "biases", "implicit64"]))
    m, n, rank = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 25)), data.draw(st.integers(1, 3))
    rng = np.random.default_rng(seed)
    users, items = rng.integers(-2, 3, (m, rank)), rng.integers(-2, 3, (n, rank))
    items[rng.integers(0, n, n // 2)] = items[0]
    seen = sp.csr_array((rng.random((m, n)) < 0.3).astype(np.float32))
    model = fitted(kind)
    biases = (rng.integers(-2, 3, m), rng.integers(-2, 3, n), 2.0) if kind == "biases" else None
    planted_with(model, users, items, seen, biases)

    count = data.draw(st.integers(1, n + 3))
    ids = data.draw(st.one_of(st.integers(0, m - 1), st.lists(st.integers(0, m - 1), max_size=2 * m)))
    wanted = data.draw(st.one_of(st.none(), st.lists(st.integers(0, n - 1))))
    unwanted = data.draw(st.one_of(st.none(), st.lists(st.integers(0, n - 1))))
    liked = data.draw(st.booleans())
    found, found_scores = model.recommend(
        ids, N=count, filter_already_liked_items=liked, filter_items=unwanted, items=wanted
    )

    vector = np.atleast_1d(np.asarray(ids, dtype=int))
    left_out = seen.toarray()[vector] != 0 if liked else np.zeros((len(vector), n), dtype=bool)
    left_out[:, sorted(set(range(n)) - set(range(n) if wanted is None else wanted) | set(unwanted or []))] = True
    counts = np.count_nonzero(seen.toarray(), axis=0)
    of_users = None if biases is None else (biases[0][vector], *biases[1:])
    expected, expected_scores = expected_top(users[vector], items, count, left_out, counts, of_users)
    if np.ndim(ids) == 0:
        expected, expected_scores = expected[0], expected_scores[0]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found_scores, expected_scores)
    assert found.dtype == np.int32
    assert found_scores.dtype == model.user_factors_.dtype


@pytest.mark.parametrize("n_items", [255, 256, 257, 700])
def test_recommend_at_the_edges_of_blocks(n_items):
    rng = np.random.default_rng(n_items)
    users, items = rng.integers(-2, 3, (130, 3)), rng.integers(-2, 3, (n_items, 3))
    seen = sp.csr_array((rng.random((130, n_items)) < 0.5).astype(np.float32))
    model = planted_with(fitted(num_threads=2), users, items, seen)
    for count in (1, 10, n_items, n_items + 5):
        ids, scores = model.recommend(np.arange(130), N=count)
        left_out = seen.toarray() != 0
        expected_ids, expected_scores = expected_top(users, items, count, left_out, left_out.sum(axis=0))
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_array_equal(scores, expected_scores)


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        *(("biases", scale) for scale in (1e-22, 1.0, 1e15)),
        ("explicit", 1e-22),
        ("explicit", 1e15),
        ("explicit64", 1.0),
    ],
)
def test_a_short_list_is_the_start_of_the_long_one(kind, scale):
    """Whatever is skipped to be quick: popular items with long factors, users of all lengths, any magnitude."""
    rng, (m, n, rank) = np.random.default_rng(1), (100, 900, 5)
    users = rng.normal(size=(m, rank)) * rng.lognormal(0, 2, (m, 1)) * scale
    items = rng.normal(size=(n, rank)) * rng.lognormal(0, 2, (n, 1))
    users[7], items[rng.integers(0, n, 90)] = 0, 0
    seen = sp.csr_array((rng.random((m, n)) < 0.1).astype(np.float32))
    biases = (rng.normal(size=m) * scale, rng.normal(size=n) * scale, 3.0 * scale) if kind == "biases" else None
    model = planted_with(fitted(kind), users, items, seen, biases)
    every = np.arange(m)
    for options in ({}, {"filter_already_liked_items": False}, {"filter_items": [0, 5]}, {"items": np.arange(0, n, 3)}):
        long_ids, long_scores = model.recommend(every, N=n, **options)
        for count in (1, 10, 300):
            ids, scores = model.recommend(every, N=count, **options)
            np.testing.assert_array_equal(ids, long_ids[:, :count])
            np.testing.assert_array_equal(scores, long_scores[:, :count])
        one_ids, one_scores = model.recommend(3, N=10, **options)
        np.testing.assert_array_equal(one_ids, long_ids[3, :10])
        np.testing.assert_array_equal(one_scores, long_scores[3, :10])


@pytest.mark.parametrize("kind", KINDS)
def test_recommend_scores_are_predictions_and_seen_items_are_left_out(kind):
    model, seen = fitted(kind), planted().toarray() != 0
    shown = ~seen & seen.any(axis=0)
    ids, scores = model.recommend(np.arange(M), N=N_ITEMS)
    for user in range(M):
        found = ids[user][ids[user] >= 0]
        np.testing.assert_array_equal(np.sort(found), np.flatnonzero(shown[user]))
        if user == EMPTY_USER and "biases" not in kind:
            continue  # popularity
        np.testing.assert_allclose(
            scores[user, : len(found)], model.predict(user, found, clip=False), rtol=1e-4, atol=1e-5
        )
    assert np.all((scores[:, 1:] <= scores[:, :-1])[ids[:, 1:] >= 0])
    np.testing.assert_array_equal(np.isneginf(scores), ids == -1)


def test_everything_filtered_is_minus_one():
    model = fitted()
    for given_filters in ({"items": []}, {"filter_items": np.arange(N_ITEMS)}, {"items": [3], "filter_items": [3]}):
        ids, scores = model.recommend([0, 1], N=3, **given_filters)
        np.testing.assert_array_equal(ids, np.full((2, 3), -1))
        np.testing.assert_array_equal(scores, np.full((2, 3), -np.inf))
    full = sp.csr_array(np.ones((1, N_ITEMS)))
    assert set(model.recommend(5, user_items=full)[0]) == {-1}


def test_no_users_and_many_n():
    model = fitted()
    for nobody in ([], np.empty(0, dtype=int)):
        ids, scores = model.recommend(nobody, N=7)
        assert ids.shape == scores.shape == (0, 7)
    ids, _ = model.recommend(3, N=1000, filter_already_liked_items=False)
    assert ids.shape == (1000,)
    np.testing.assert_array_equal(np.sort(ids[: N_ITEMS - 1]), np.delete(np.arange(N_ITEMS), EMPTY_ITEM))
    assert np.all(ids[N_ITEMS - 1 :] == -1)


def test_user_items_aligned_or_whole():
    model, rng = fitted(), np.random.default_rng(0)
    other = sp.csr_array((rng.random((M, N_ITEMS)) < 0.5).astype(np.float32))
    users = np.array([7, 7, 0, 59])
    expected = planted_with(copy.deepcopy(model), model.user_factors_, model.item_factors_, other).recommend(users)
    for given_rows in (other, other[users], other.toarray(), other[users].tocoo(), sp.csc_array(other)):
        for found, wanted in zip(model.recommend(users, given_rows), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    single = model.recommend(7, other[[7]])
    np.testing.assert_array_equal(single[0], expected[0][0])
    np.testing.assert_array_equal(model.recommend(7, other)[0], expected[0][0])
    # as many ids as users: rows follow the ids, not the positions
    order = rng.permutation(M)
    np.testing.assert_array_equal(
        model.recommend(order, other[order])[0], model.recommend(np.arange(M), other)[0][order]
    )


def test_explicit_zeros_of_user_items_count_as_seen():
    model = fitted()
    zeros = sp.csr_array((np.zeros(N_ITEMS - 1), np.arange(1, N_ITEMS), [0, N_ITEMS - 1]), shape=(1, N_ITEMS))
    np.testing.assert_array_equal(model.recommend(0, zeros, N=2)[0], [0, -1])


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_an_explicit_zero_means_the_same_in_every_call(kind):
    """No entry of implicit feedback, a rating otherwise."""
    dense = planted().toarray()
    user = 3
    item = int(np.flatnonzero((dense[user] == 0) & (np.arange(N_ITEMS) != EMPTY_ITEM))[0])
    rated = dense != 0
    rated[user, item] = True
    rows, columns = np.nonzero(rated)
    matrix = sp.csr_array((dense[rows, columns], (rows, columns)), shape=dense.shape)
    model = make(kind).fit(matrix)
    lists = [
        model.recommend(user, N=N_ITEMS)[0],
        model.recommend(user, matrix, N=N_ITEMS)[0],
        model.recommend(user, matrix[[user]], N=N_ITEMS, recalculate_user=True)[0],
        model.recommend_new(matrix[[user]], N=N_ITEMS)[0],
        model.recommend_table([user], N=N_ITEMS, labels=False, backend="pandas")["item"].to_numpy(),
        model.recommend_table([user], matrix, N=N_ITEMS, labels=False, backend="pandas")["item"].to_numpy(),
    ]
    assert [item in found for found in lists] == [kind == "implicit"] * len(lists)


@pytest.mark.parametrize("kind", ["implicit", "biases"])
def test_a_one_dimensional_sparse_row_is_a_row(kind):
    """SciPy's sparse arrays give one for ``A[u]``."""
    matrix = sp.csr_array(planted())
    user, twice = 3, (copy.deepcopy(fitted(kind)), copy.deepcopy(fitted(kind)))
    row, one = matrix[user], matrix[[user]]
    assert row.ndim == 1
    model = fitted(kind)
    for call in (
        lambda rows: model.recommend(user, rows, N=4)[0],
        lambda rows: model.recommend(user, rows, N=4, recalculate_user=True)[0],
        lambda rows: model.recommend(user, N=4, items=rows)[0],
        lambda rows: model.recommend(user, N=4, filter_items=rows)[0],
        lambda rows: np.ravel(model.recommend_new(rows, N=4)[0]),
        lambda rows: model.recommend_table([user], rows, N=4, labels=False, backend="pandas").to_numpy(),
        lambda rows: model.explain(user, 2, rows, N=4).contributions,
        lambda rows: model.predict(rows),
        lambda rows: model.transform(rows),
    ):
        for given_row in (row, row.tocoo()):
            np.testing.assert_array_equal(call(given_row), call(one))
    assert model.recommend_new(row, N=4)[0].shape == (4,)
    for fresh, rows, columns in zip(twice, (row, one), (matrix[:, 5], matrix[:, [5]]), strict=True):
        fresh.partial_fit_users([user], rows).partial_fit_items([5], columns)
    np.testing.assert_array_equal(twice[0].user_factors_, twice[1].user_factors_)
    np.testing.assert_array_equal(twice[0].item_factors_, twice[1].item_factors_)
    with pytest.raises(RatingsError, match=says("user_items must have 2 dimensions", "user_items.reshape(1, -1)")):
        make(kind).fit(row)


def test_user_items_may_be_ratings():
    model = hmf.ExplicitALS(biases=False, factors=2, iterations=1, random_state=0, device="cpu").fit(labelled())
    np.testing.assert_array_equal(model.recommend([1, 2], labelled())[0], model.recommend([1, 2])[0])


def test_the_model_keeps_the_items_seen_at_the_fit():
    matrix = planted()
    model = make().fit(matrix)
    before = model.recommend(np.arange(M))
    matrix.data[:] = 9
    assert_same({"top": before}, {"top": model.recommend(np.arange(M))})


def test_changing_the_callers_matrix_does_not_change_what_was_seen():
    matrix = sp.csr_array(planted().toarray())
    matrix.data[::3] = 0
    model = make().fit(matrix)
    before = model.recommend(np.arange(M))
    matrix.eliminate_zeros()  # compacts indices in place
    assert_same({"top": before}, {"top": model.recommend(np.arange(M))})


# --------------------------------------------------------------------------------------------- recommend: bad requests


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"userid": M}, ValueError, ("userid has 60 at position 0; expected 0 <= id < n_users=60",)),
        ({"userid": [0, -1]}, ValueError, ("userid has -1 at position 1",)),
        ({"userid": 1.0}, TypeError, ("userid must be integers", "float64")),
        ({"userid": True}, TypeError, ("userid must be integers", "bool")),
        ({"userid": "u1"}, TypeError, ("userid must be integers", "labels are turned into positions by Ratings")),
        ({"userid": [[0]]}, ValueError, ("userid must be one position or a vector", "(1, 1)")),
        ({"userid": 0, "N": 0}, ValueError, ("N must satisfy 1 <= N", "got 0",)),
        ({"userid": 0, "N": -3}, ValueError, ("N must satisfy 1 <= N", "got -3",)),
        ({"userid": 0, "N": 2.0}, TypeError, ("N must be an integer", "2.0")),
        ({"userid": 0, "N": True}, TypeError, ("N must be an integer", "True")),
        ({"userid": 0, "items": [40]}, ValueError, ("items has 40 at position 0", "n_items=40")),
        ({"userid": 0, "items": [True] * 40}, TypeError, ("items must be integers", "bool")),
        ({"userid": 0, "items": [[[1]]]}, ValueError, ("items must be one position or a vector", "(1, 1)")),
        ({"userid": 0, "filter_items": [-1]}, ValueError, ("filter_items has -1 at position 0", "n_items=40")),
        ({"userid": 0, "filter_items": [0.5]}, TypeError, ("filter_items must be integers", "float64")),
        ({"userid": 0, "filter_already_liked_items": 1}, TypeError,
         ("filter_already_liked_items must be True or False",)),
        ({"userid": [0, 1], "user_items": planted()[:3]}, RatingsError,
         ("user_items has shape (3, 40); expected (n_userids=2, n_items=40)",)),
        ({"userid": 0, "user_items": planted().T}, RatingsError,
         ("user_items has shape (40, 60); expected (n_userids=1, n_items=40)",)),
        ({"userid": 0, "user_items": sp.csr_array((1, 60))}, RatingsError,
         ("user_items has shape (1, 60)", "n_items=40")),
        ({"userid": 0, "user_items": np.full((1, 40), np.nan)}, RatingsError, ("user_items has the value nan",)),
        ({"userid": 0, "user_items": planted()[:3], "filter_already_liked_items": False}, RatingsError,
         ("user_items has shape (3, 40); expected (n_userids=1, n_items=40)",)),
    ],
)  # fmt: skip
def test_recommend_refuses(arguments, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        fitted().recommend(**arguments)


def test_an_absurd_n_is_refused_by_name():
    with pytest.raises((ValueError, MemoryBudgetError), match="N"):
        fitted().recommend(0, N=2**63)


# ------------------------------------------------------------------------------------------------------------- similar


@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit64"])
@pytest.mark.parametrize("side", ["item", "user"])
def test_similar_is_the_cosine(kind, side):
    model = fitted(kind)
    factors = getattr(model, f"{side}_factors_").astype(np.float64)
    lengths = np.linalg.norm(factors, axis=1)
    cosines = factors @ factors.T / np.where(lengths == 0, 1, lengths)[:, None] / np.where(lengths == 0, 1, lengths)
    similar = getattr(model, f"similar_{side}s")
    ids, scores = similar(np.arange(len(factors)), N=7)
    assert ids.dtype == np.int32
    full = lengths > 0
    assert np.count_nonzero(~full) == 1
    np.testing.assert_allclose(scores[full], -np.sort(-cosines[full][:, full], axis=1)[:, :7], atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(cosines, ids.astype(int), axis=1)[full], scores[full], atol=1e-6)
    np.testing.assert_array_equal(ids[full, 0], np.flatnonzero(full))
    one_ids, one_scores = similar(3, N=7)
    np.testing.assert_array_equal(one_ids, ids[3])
    np.testing.assert_array_equal(one_scores, scores[3])


@pytest.mark.parametrize("side", ["item", "user"])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_row_comes_first_among_rows_with_the_same_factors(side, allowed):
    model, rng = fitted(), np.random.default_rng(0)
    users, items = rng.normal(size=(M, 4)), rng.normal(size=(N_ITEMS, 4))
    twins = np.arange(5, 30)
    (users if side == "user" else items)[twins] = rng.normal(size=4)
    planted_with(model, users, items, planted())
    similar = getattr(model, f"similar_{side}s")
    options = {f"{side}s": twins} if allowed else {}
    for n in (1, 2, 10, len(twins) + 3):
        ids, scores = similar(twins, N=n, **options)
        np.testing.assert_array_equal(ids[:, 0], twins)
        np.testing.assert_allclose(scores[:, : len(twins)], 1, atol=1e-6)
        with np.errstate(invalid="ignore"):
            assert not np.any(np.diff(scores, axis=1) > 0)
        assert all(len(set(row[row >= 0])) == np.count_nonzero(row >= 0) for row in ids)


def test_similar_of_nothing_and_of_too_many():
    model = fitted()
    assert model.similar_items([], N=4)[0].shape == (0, 4)
    ids, scores = model.similar_items(0, N=N_ITEMS + 2)
    np.testing.assert_array_equal(ids[-3:], [-1, -1, -1])  # and one item has no factors
    assert np.all(np.isneginf(scores[-3:]))


@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit64"])
@pytest.mark.parametrize(("side", "empty"), [("item", EMPTY_ITEM), ("user", EMPTY_USER)])
def test_a_row_without_factors_has_no_neighbours(kind, side, empty):
    model = fitted(kind)
    assert not getattr(model, f"{side}_factors_")[empty].any()
    similar = getattr(model, f"similar_{side}s")
    ids, scores = similar(empty, N=3)
    np.testing.assert_array_equal(ids, [-1, -1, -1])
    assert np.all(np.isneginf(scores))
    everything = getattr(model, f"n_{side}s")
    ids, scores = similar([0, empty, 1], N=everything)
    np.testing.assert_array_equal(ids[1], np.full(everything, -1))
    for row, own in ((0, 0), (2, 1)):
        assert ids[row, 0] == own
        np.testing.assert_array_equal(np.sort(ids[row, :-1]), np.delete(np.arange(everything), empty))
        assert ids[row, -1] == -1


def test_similar_items_of_tiny_factors():
    model = fitted()
    planted_with(model, model.user_factors_, model.item_factors_ * np.float32(1e-25), planted())
    assert model.similar_items(0, N=1)[1][0] == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("method", "ids", "n", "kind", "parts"),
    [
        ("similar_items", 40, 5, ValueError, ("itemid has 40 at position 0; expected 0 <= id < n_items=40",)),
        ("similar_users", [60], 5, ValueError, ("userid has 60 at position 0; expected 0 <= id < n_users=60",)),
        ("similar_items", 0.0, 5, TypeError, ("itemid must be integers", "float64")),
        ("similar_users", [[0]], 5, ValueError, ("userid must be one position or a vector", "(1, 1)")),
        (
            "similar_items",
            0,
            0,
            ValueError,
            (
                "N must satisfy 1 <= N",
                "got 0",
            ),
        ),
        ("similar_users", 0, "5", TypeError, ("N must be an integer", "'5'")),
    ],
)
def test_similar_refuses(method, ids, n, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        getattr(fitted(), method)(ids, N=n)
