"""A fitted model at work: recommend, predict, transform, updates, score, objective, and fits cut short."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import threadpoolctl
from conftest import planted
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import hybridmf as hmf
from hybridmf.core import reference
from hybridmf.core import validate as _validate
from hybridmf.core.objective import Factors, State
from hybridmf.cpu.als import HalfSweep
from hybridmf.errors import MemoryBudgetError, NonFiniteError, NotPositiveDefiniteError, RatingsError
from hybridmf.model import serving as _serving
from hybridmf.model.base import FactorModel
from hybridmf.model.learned import count_items, pattern
from hybridmf.native import _als

M, N_ITEMS = 60, 40
EMPTY_USER, EMPTY_ITEM = M // 2, N_ITEMS // 3  # of `planted()`
KINDS = {
    "explicit": (hmf.ExplicitALS, {"biases": False}),
    "biases": (hmf.ExplicitALS, {"biases": True}),
    "implicit": (hmf.ImplicitALS, {"alpha": 3.0}),
    "explicit64": (hmf.ExplicitALS, {"biases": False, "dtype": "float64"}),
    "implicit64": (hmf.ImplicitALS, {"dtype": "float64"}),
    "biases64": (hmf.ExplicitALS, {"biases": True, "dtype": "float64"}),
}
INEXACT = ({"solver": "cg"}, {"solver": "subspace", "block_size": 2})


def says(*parts: str) -> str:
    """Regular expression: these parts, literally, in this order."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


def make(kind: str = "explicit", **options):
    cls, own = KINDS[kind]
    common = {"factors": 4, "iterations": 3, "random_state": 0, "device": "cpu", "num_threads": 1}
    return cls(**(common | own | options))


@functools.cache
def _fit_once(kind: str, options: tuple):
    return make(kind, **dict(options)).fit(planted())


def fitted(kind: str = "explicit", **options):
    """A model of `planted()`, fitted once for all tests; each gets a copy of its own."""
    return copy.deepcopy(_fit_once(kind, tuple(sorted(options.items()))))


def labelled(matrix=None, users=None, items=None) -> hmf.Ratings:
    matrix = planted() if matrix is None else matrix
    users = [f"u{k}" for k in range(matrix.shape[0])] if users is None else users
    items = [f"i{k}" for k in range(matrix.shape[1])] if items is None else items
    return hmf.Ratings.from_matrix(matrix, user_ids=users, item_ids=items)


def planted_with(model, users: np.ndarray, items: np.ndarray, seen, biases=None):
    """The model with factors put in place of those it learned: small integers make every score exact."""
    user_bias, item_bias, mean = biases or (None, None, 0.0)
    dtype = model.user_factors_.dtype
    cast = [None if a is None else np.asarray(a, dtype=dtype) for a in (users, user_bias, items, item_bias)]
    state, seen = State(Factors(*cast[:2]), Factors(*cast[2:]), mean), pattern(_validate.as_csr(seen))
    model._learn(replace(model._learned, state=state, seen=seen, total=None, item_counts=count_items(seen)))
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


def snapshot(model) -> dict:
    """Everything a user can see of a fitted model."""
    everything = [np.arange(model.n_users)]
    return {
        "factors": (model.user_factors_.copy(), model.item_factors_.copy()),
        "top": model.recommend(*everything, N=5),
        "labels": (model.user_ids_, model.item_ids_),
        "sizes": (model.n_features_in_, model.n_iter_, len(model.history_), model.plan_, model.device_),
        "fold-in": model.transform(planted(7, model.n_items, seed=5)),
    }


def user_rows(model) -> np.ndarray:
    """User factors, and biases as a last column: what `transform` has for them."""
    return model.user_factors_ if model.user_bias_ is None else np.column_stack((model.user_factors_, model.user_bias_))


def outcome(call):
    """What a call returns, or the error it raises."""
    try:
        return call()
    except Exception as error:
        return error


def assert_same(left: dict, right: dict) -> None:
    for key in left:
        np.testing.assert_equal(left[key], right[key], err_msg=key)


# ----------------------------------------------------------------------------------------------------------- unfitted


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.ImplicitALS])
def test_an_unfitted_model_says_so(cls, tmp_path):
    model = cls()
    calls = [
        lambda: model.recommend(0), lambda: model.similar_items(0), lambda: model.similar_users(0),
        lambda: model.predict(0, 0), lambda: model.predict(planted()), lambda: model.transform(planted()),
        lambda: model.objective(planted()), lambda: model.score(planted()),
        lambda: model.partial_fit_users([0], planted()[:1]), lambda: model.partial_fit_items([0], planted()[:, :1]),
        lambda: model.save(tmp_path / "model"), lambda: model.user_factors, lambda: model.item_factors_,
        lambda: model.user_bias_, lambda: model.item_bias_, lambda: model.mean_, lambda: model.n_users,
        lambda: model.n_items, lambda: model.get_feature_names_out(),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NotFittedError, match=cls.__name__):
            call()
    assert not list(tmp_path.iterdir())


def test_the_base_class_has_no_objective_settings_or_solver():
    base = FactorModel()
    for call in (base._objective, base._settings, lambda: base._solver(*[None] * 6)):
        with pytest.raises(NotImplementedError):
            call()


# ------------------------------------------------------------------------------------------- recommend: right answers


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("scale", [1e-22, 1.0, 1e15])
@pytest.mark.parametrize("kind", ["explicit", "explicit64", "biases"])
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


def test_user_items_may_be_ratings():
    model = hmf.ExplicitALS(biases=False, factors=2, iterations=1, random_state=0, device="cpu").fit(labelled())
    np.testing.assert_array_equal(model.recommend([1, 2], labelled())[0], model.recommend([1, 2])[0])


def test_the_model_remembers_what_was_seen_when_it_was_fitted():
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
        ({"userid": 0, "items": [[1]]}, ValueError, ("items must be one position or a vector", "(1, 1)")),
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


def test_similar_of_nothing_and_of_too_many():
    model = fitted()
    assert model.similar_items([], N=4)[0].shape == (0, 4)
    ids, scores = model.similar_items(0, N=N_ITEMS + 2)
    np.testing.assert_array_equal(ids[-3:], [-1, -1, -1])  # and one item has no factors
    assert np.all(np.isneginf(scores[-3:]))


@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit64"])
@pytest.mark.parametrize(("side", "empty"), [("item", EMPTY_ITEM), ("user", EMPTY_USER)])
def test_a_row_without_factors_is_like_no_other(kind, side, empty):
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


# ------------------------------------------------------------------------------------------------------------- predict


@pytest.mark.parametrize("kind", KINDS)
def test_predict_is_the_formula(kind):
    model = fitted(kind)
    dense = model.user_factors_.astype(float) @ model.item_factors_.astype(float).T
    if "biases" in kind:
        dense += model.mean_ + model.user_bias_[:, None].astype(float) + model.item_bias_.astype(float)
        assert model.mean_ == pytest.approx(planted().data.mean(dtype=float))
    else:
        assert model.mean_ == 0
        assert model.user_bias_ is None
        assert model.item_bias_ is None
    rows, columns = np.nonzero(planted().toarray())
    np.testing.assert_allclose(model.predict(rows, columns, clip=False), dense[rows, columns], rtol=1e-6, atol=1e-6)
    assert model.predict(3, 4, clip=False) == pytest.approx(dense[3, 4], abs=1e-6)
    assert np.ndim(model.predict(3, 4)) == 0
    np.testing.assert_allclose(model.predict(3, np.arange(N_ITEMS), clip=False), dense[3], atol=1e-6)
    np.testing.assert_allclose(model.predict(np.arange(M), [4], clip=False), dense[:, 4], atol=1e-6)
    assert model.predict([3], 4).shape == (1,)
    assert model.predict([], []).shape == model.predict(3, []).shape == (0,)


@pytest.mark.parametrize(
    ("users", "items", "kind", "parts"),
    [
        ([0, 1], [0, 1, 2], ValueError, ("users has 2 ids and items has 3", "as many of each")),
        ([0, 1], [], ValueError, ("users has 2 ids and items has 0",)),
        (60, 0, ValueError, ("users has 60 at position 0; expected 0 <= id < n_users=60",)),
        (0, 40, ValueError, ("items has 40 at position 0; expected 0 <= id < n_items=40",)),
        ([[0]], 0, ValueError, ("users must be one position or a vector",)),
        (0, True, TypeError, ("items must be integers", "bool")),
        (planted(), 0, TypeError, ("users must be integers",)),
        (np.ones((2, 7)), None, RatingsError, ("users has shape (2, 7), expected (n_rows, n_items=40)",)),
    ],
)
def test_predict_refuses(users, items, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        fitted().predict(users, items)


def test_predict_of_positions_without_items_names_items():
    with pytest.raises((TypeError, ValueError), match="items"):
        fitted().predict([0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_predict_of_rows_is_the_first_recommendation(kind):
    model, rows = fitted(kind), planted()
    top = model.predict(rows)
    assert top.dtype == np.int32
    np.testing.assert_array_equal(top, model.recommend(np.arange(M), N=1)[0][:, 0])  # training rows are the users
    np.testing.assert_array_equal(model.predict(rows.toarray()), top)
    np.testing.assert_array_equal(model.predict(np.ones((2, N_ITEMS))), [-1, -1])
    assert model.predict(rows[:0]).shape == (0,)


# ----------------------------------------------------------------------------------------------------------- transform


EXACT = [{}, {"assembly": "rank1"}, {"assembly": "blas3"}, {"num_threads": 1}]
NEARLY = [{"assembly": "bals"}, {"reorder": "both"}, {"reorder": True}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", EXACT)
def test_training_rows_fold_to_their_training_factors(kind, options):
    model = fitted(kind, **options)
    rows = user_rows(model)
    np.testing.assert_array_equal(model.transform(planted()), rows)
    np.testing.assert_array_equal(model.transform(planted()[[5, 5, 2]]), rows[[5, 5, 2]])
    np.testing.assert_array_equal(model.transform(planted().toarray()), rows)
    assert model.transform(planted()).dtype == model.user_factors_.dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", NEARLY)
def test_training_rows_fold_to_their_training_factors_up_to_rounding(kind, options):
    model = fitted(kind, **options)
    np.testing.assert_allclose(model.transform(planted()), user_rows(model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fold_in_is_the_reference(kind):
    model, rows = fitted(kind), planted(9, N_ITEMS, seed=3)
    state, objective = model._learned.state, model._learned.objective
    expected = reference.half_sweep(rows, state.item, state.mean, objective)
    found = model.transform(rows)
    np.testing.assert_allclose(found[:, :4], expected.matrix, rtol=2e-3, atol=2e-3)
    if expected.bias is not None:
        np.testing.assert_allclose(found[:, 4], expected.bias, rtol=2e-3, atol=2e-3)
        model.partial_fit_users(np.arange(9), rows)
        np.testing.assert_allclose(model.user_bias_[:9], expected.bias, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", INEXACT)
def test_models_of_inexact_solvers_fold_in_exactly(options):
    model = fitted("implicit64", **options)
    expected = reference.half_sweep(planted(), model._learned.state.item, 0.0, model._learned.objective)
    np.testing.assert_allclose(model.transform(planted()), expected.matrix, rtol=1e-8, atol=1e-10)


def test_rows_without_entries_fold_to_zero():
    for kind in KINDS:
        model = fitted(kind)
        width = 4 + (model.user_bias_ is not None)
        np.testing.assert_array_equal(model.transform(sp.csr_array((2, N_ITEMS))), np.zeros((2, width)))
        assert model.transform(sp.csr_array((0, N_ITEMS))).shape == (0, width)


def test_explicit_zeros_of_sparse_rows_are_ratings_for_explicit_feedback_only():
    rows = planted()[[3]]
    with_zero = sp.csr_array(rows + sp.csr_array(([1.0], ([0], [0])), shape=rows.shape))
    with_zero.data[0] = 0
    explicit, implicit = fitted("explicit"), fitted("implicit")
    assert not np.array_equal(explicit.transform(with_zero), explicit.transform(rows))
    np.testing.assert_array_equal(implicit.transform(with_zero), implicit.transform(with_zero.toarray()))


@pytest.mark.parametrize("method", ["transform", "predict", "score"])
def test_wrong_orientation_names_both_axes_and_the_transpose(method):
    name = "users" if method == "predict" else "user_items"
    expected = says(f"{name} has shape (40, 60), expected (n_rows, n_items=40)", "rows are users and columns are items",
                    f"pass {name}.T")  # fmt: skip
    for matrix in (planted().T, planted().T.toarray()):
        with pytest.raises(RatingsError, match=expected):
            getattr(fitted(), method)(matrix)
    with pytest.raises(RatingsError, match=r"expected \(n_rows, n_items=40\)$"):
        getattr(fitted(), method)(np.ones((3, 7)))


def test_a_row_that_cannot_be_folded_in_is_named():
    model = fitted("explicit64")
    model.set_params(regularization=0.0).fit(sp.csr_array(np.random.default_rng(0).random((20, 20)) + 0.5))
    rows = np.zeros((3, 20))
    rows[:2], rows[2, :2] = 1.0, 1.0
    with pytest.raises(NotPositiveDefiniteError, match=says("user 2 are not positive definite", "(now 0)")) as caught:
        model.transform(rows)
    assert (caught.value.side, caught.value.row) == ("user", 2)


def test_feature_names_of_a_data_frame():
    frame = pd.DataFrame(planted().toarray(), columns=[f"i{k}" for k in range(N_ITEMS)])
    model = make().fit(frame)
    np.testing.assert_array_equal(model.transform(frame), make().fit(planted()).user_factors_)
    assert list(model.feature_names_in_) == list(frame.columns)
    assert model.get_feature_names_out().tolist() == [f"explicitals{k}" for k in range(4)]


def test_a_frame_with_other_columns_is_refused():
    frame = pd.DataFrame(planted().toarray(), columns=[f"i{k}" for k in range(N_ITEMS)])
    with pytest.raises(ValueError, match="feature names"):
        make().fit(frame).transform(frame[frame.columns[::-1]])


def test_a_frame_may_have_a_column_called_user_items():
    make(iterations=1).fit(pd.DataFrame(planted().toarray(), columns=["user_items", *map(str, range(1, N_ITEMS))]))


@pytest.mark.parametrize("method", ["transform", "score", "objective", "validation"])
def test_ratings_with_other_labels_are_refused_or_aligned(method):
    order = np.random.default_rng(0).permutation(N_ITEMS)
    same, other = labelled(), labelled(planted()[:, order], items=[f"i{k}" for k in order])
    model = make("explicit64").fit(same)

    def result(ratings):
        if method == "validation":
            return make("explicit64").fit(same, validation=ratings).history_[-1]["rmse"]
        return getattr(model, method)(ratings)

    found = outcome(lambda: result(other))
    if isinstance(found, ValueError):
        assert "item" in str(found)
    else:
        np.testing.assert_allclose(found, result(same), rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("kind", KINDS)
def test_training_rows_put_back_change_nothing(kind):
    model = fitted(kind)
    before = snapshot(model) | {"bias": model.user_bias_}
    assert model.partial_fit_users(np.arange(M), planted()) is model
    assert_same(before, snapshot(model) | {"bias": model.user_bias_})


@pytest.mark.parametrize("kind", KINDS)
def test_partial_fit_users_replaces_and_extends(kind):
    model = fitted(kind)
    before = model.user_factors_.copy()
    rows = planted(3, N_ITEMS, density=0.5, seed=8)
    model.partial_fit_users([M + 1, 5, M], rows)
    assert model.n_users == len(model.user_factors_) == M + 2
    np.testing.assert_array_equal(user_rows(model)[[M + 1, 5, M]], model.transform(rows))
    untouched = np.delete(np.arange(M), 5)
    np.testing.assert_array_equal(model.user_factors_[untouched], before[untouched])
    ids, _ = model.recommend([M + 1, 5, M], N=N_ITEMS)
    for found, row in zip(ids, rows.toarray(), strict=True):
        shown = np.delete(np.arange(N_ITEMS), EMPTY_ITEM)
        np.testing.assert_array_equal(np.sort(found[found >= 0]), shown[row[shown] == 0])
    if model.user_bias_ is not None:
        assert model.user_bias_.shape == (M + 2,)
    assert np.isfinite(model.predict(M + 1, np.arange(N_ITEMS))).all()


def test_partial_fit_users_leaves_zeros_in_gaps():
    model = fitted("biases").partial_fit_users(M + 2, np.ones((1, N_ITEMS)))
    assert model.n_users == M + 3
    assert not model.user_factors_[M : M + 2].any()
    np.testing.assert_array_equal(model.user_bias_[M : M + 2], 0)
    assert set(model.recommend(M + 2)[0]) == {-1}
    assert set(model.recommend(M, N=N_ITEMS)[0]) == set(range(N_ITEMS)) - {EMPTY_ITEM} | {-1}


@pytest.mark.parametrize("kind", KINDS)
def test_partial_fit_items_replaces_and_extends(kind):
    model = fitted(kind)
    before = model.item_factors_.copy()
    columns = planted(M, 2, density=0.5, seed=9)
    assert model.partial_fit_items([N_ITEMS, 3], columns) is model
    assert model.n_items == model.n_features_in_ == N_ITEMS + 1
    expected = reference.half_sweep(columns.T, model._learned.state.user, model.mean_, model._learned.objective)
    np.testing.assert_allclose(model.item_factors_[[N_ITEMS, 3]], expected.matrix, rtol=2e-3, atol=2e-3)
    untouched = np.delete(np.arange(N_ITEMS), 3)
    np.testing.assert_array_equal(model.item_factors_[untouched], before[untouched])
    seen = planted().toarray() != 0
    seen = np.column_stack((seen, columns.toarray()[:, 0] != 0))
    seen[:, 3] = columns.toarray()[:, 1] != 0
    assert model.cold_items_.nonzero()[0].tolist() == [EMPTY_ITEM, N_ITEMS]  # the first of the columns is empty, too
    seen[:, [EMPTY_ITEM, N_ITEMS]] = True
    ids, _ = model.recommend(np.arange(M), N=N_ITEMS + 1)
    for user in range(M):
        np.testing.assert_array_equal(np.sort(ids[user][ids[user] >= 0]), np.flatnonzero(~seen[user]))
    assert model.transform(sp.csr_array((1, N_ITEMS + 1))).shape == (1, user_rows(model).shape[1])
    with pytest.raises(RatingsError, match=says("(1, 40), expected (n_rows, n_items=41)")):
        model.transform(sp.csr_array((1, N_ITEMS)))


def test_item_factors_of_the_last_half_sweep_fold_back_from_their_columns():
    """Items are solved first, so their columns fold to them for the users they were solved with."""
    states = []
    model = make("explicit64", iterations=2).fit(planted(), callback=lambda m, _: states.append(m._learned.state))
    model._learn(replace(model._learned, state=State(states[0].user, states[1].item)))
    model.partial_fit_items(np.arange(N_ITEMS), planted())
    np.testing.assert_array_equal(model.item_factors_, states[1].item.matrix)


def test_derived_arrays_follow_an_update():
    """Caches of recommend, similar_items and fold-in must not outlive the factors they were made of."""
    model = fitted("implicit")
    for call in (lambda m: m.recommend(0), lambda m: m.similar_items(0), lambda m: m.similar_users(0)):
        call(model)
    model.transform(planted())
    model.partial_fit_items([0, N_ITEMS], planted(M, 2, density=0.6, seed=2))
    model.partial_fit_users([0], planted(1, N_ITEMS + 1, density=0.6, seed=2)[:, :])
    fresh = copy.deepcopy(model)
    fresh._cache = {}
    assert_same(snapshot(fresh), snapshot(model))
    for method in ("similar_items", "similar_users"):
        np.testing.assert_array_equal(getattr(fresh, method)(0)[0], getattr(model, method)(0)[0])


@pytest.mark.parametrize(
    ("method", "ids", "matrix", "kind", "parts"),
    [
        ("users", [], planted()[:0], ValueError, ("ids is empty; give at least one position",)),
        ("users", [1, 2, 1], planted()[:3], ValueError, ("ids has 1 more than once", "each position once")),
        ("users", [-1], planted()[:1], ValueError, ("ids has -1 at position 0",)),
        ("users", [2**31], planted()[:1], ValueError, ("ids has 2147483648 at position 0",)),
        ("users", [1.0], planted()[:1], TypeError, ("ids must be integers", "float64")),
        ("users", True, planted()[:1], TypeError, ("ids must be integers", "bool")),
        ("users", [[1]], planted()[:1], ValueError, ("ids must be one position or a vector",)),
        ("users", [1, 2], planted()[:3], RatingsError, ("rows has shape (3, 40); expected (n_ids=2, n_items=40)",)),
        ("users", [1], planted().T[:1], RatingsError, ("rows has shape (1, 60), expected (n_rows, n_items=40)",)),
        ("users", [1], np.full((1, 40), np.inf), ValueError, ("rows", "infinity")),
        ("users", [1], sp.csr_array(np.full((1, 40), np.nan)), RatingsError, ("rows has the value nan",)),
        ("items", [], planted()[:, :0], ValueError, ("ids is empty",)),
        ("items", [2, 2], planted()[:, :2], ValueError, ("ids has 2 more than once",)),
        ("items", [1, 2], planted()[:, :3], RatingsError, ("cols has shape (60, 3); expected (n_users=60, n_ids=2)",)),
        ("items", [1, 2], planted()[:, :2].T, RatingsError,
         ("cols has shape (2, 60); expected (n_users=60, n_ids=2)", "pass cols.T")),
    ],
)  # fmt: skip
def test_updates_refuse(method, ids, matrix, kind, parts):
    model = fitted()
    before = snapshot(model)
    with pytest.raises(kind, match=says(*parts)):
        getattr(model, f"partial_fit_{method}")(ids, matrix)
    assert_same(before, snapshot(model))


def test_a_failed_fold_in_leaves_the_model_alone():
    dense = np.random.default_rng(0).random((20, 20)) + 0.5
    model = make("explicit64", regularization=0.0).fit(dense)
    before = model.user_factors_.copy()
    with pytest.raises(NotPositiveDefiniteError, match="user 0"):
        model.partial_fit_users([25], sp.csr_array(([1.0], ([0], [0])), shape=(1, 20)))
    with pytest.raises(NotPositiveDefiniteError, match="item 1"):
        model.partial_fit_items([0, 3], sp.csr_array(np.column_stack((dense[:, 0], dense[:, 1] * (dense[:, 1] > 1.4)))))
    np.testing.assert_array_equal(model.user_factors_, before)
    assert (model.n_users, model.n_items, model._learned.seen.shape) == (20, 20, (20, 20))


@pytest.mark.parametrize("method", ["users", "items"])
def test_an_update_is_all_or_nothing(method, monkeypatch):
    model = fitted()
    before = snapshot(model)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(_serving, "_replace_rows", fail)
    rows = np.ones((1, N_ITEMS)) if method == "users" else np.ones((M, 1))
    with pytest.raises(MemoryError):
        getattr(model, f"partial_fit_{method}")([M if method == "users" else N_ITEMS], rows)
    monkeypatch.undo()
    assert_same(before, snapshot(model))


def test_an_id_that_does_not_fit_in_memory_is_refused(monkeypatch):
    model = fitted()
    monkeypatch.setattr(_serving, "available_memory", lambda: 10_000)
    with pytest.raises(MemoryBudgetError, match="ids"):
        model.partial_fit_users([100_000], np.ones((1, N_ITEMS)))


def test_updates_keep_labels():
    model = make().fit(labelled())
    model.partial_fit_users([3], planted()[:1])
    assert model.user_ids_.tolist() == [f"u{k}" for k in range(M)]
    model.partial_fit_users([M + 1, 2, M], planted()[:3], labels=["new b", "u2", "new a"])
    assert model.user_ids_.tolist() == [*(f"u{k}" for k in range(M)), "new a", "new b"]
    model.partial_fit_items([N_ITEMS], np.ones((M + 2, 1)), labels=["a much longer label than all the others"])
    assert model.item_ids_[-1] == "a much longer label than all the others"


@pytest.mark.parametrize(
    ("ids", "labels", "parts"),
    [
        ([M], None, ("ids adds users up to position 60", "users have labels; pass labels=")),
        ([M], ["a", "b"], ("labels has 2 elements; expected one for each of 1 ids",)),
        ([M + 1], ["a"], ("ids skips position 60, which would have no label",)),
        ([M], ["u7"], ("labels repeats a label",)),
        ([M, M + 1], ["a", "a"], ("labels repeats a label",)),
    ],
)
def test_label_rules(ids, labels, parts):
    model = make().fit(labelled())
    before = snapshot(model)
    with pytest.raises(ValueError, match=says(*parts)):
        model.partial_fit_users(ids, planted()[: len(ids)], labels=labels)
    assert_same(before, snapshot(model))
    with pytest.raises(ValueError, match=says("labels were given, but this model's items have none")):
        make().fit(planted()).partial_fit_items([N_ITEMS], np.ones((M, 1)), labels=["a"])


@pytest.mark.parametrize(
    ("known", "label"),
    [
        (list(range(100, 100 + M)), 3.7),
        (list(range(100, 100 + M)), "12"),
        ([f"u{k}" for k in range(M)], 5),
        ([7, *(f"u{k}" for k in range(1, M))], 5),
    ],
    ids=["float to int", "text to int", "int to text", "int to mixed"],
)
def test_new_labels_stay_what_they_are(known, label):
    model = make(iterations=1).fit(labelled(users=known))
    found = outcome(lambda: model.partial_fit_users([M], planted()[:1], labels=[label]))
    if isinstance(found, Exception):
        assert "label" in str(found)  # refused by name is fine
        assert "literal" not in str(found)
    else:
        assert model.user_ids_.tolist() == [*known, label]
        assert type(model.user_ids_.tolist()[-1]) is type(label)


def test_labels_that_contradict_known_ones_are_refused():
    with pytest.raises(ValueError, match="label"):
        make(iterations=1).fit(labelled()).partial_fit_users([3], planted()[:1], labels=["somebody else"])


def test_feature_names_follow_added_items():
    frame = pd.DataFrame(planted().toarray(), columns=[f"i{k}" for k in range(N_ITEMS)])
    model = make(iterations=1).fit(frame).partial_fit_items([N_ITEMS], np.ones((M, 1)))
    assert len(getattr(model, "feature_names_in_", range(N_ITEMS + 1))) == model.n_features_in_


# ----------------------------------------------------------------------------------------------------- large matrices


def test_everything_works_with_64_bit_pointers(monkeypatch, tmp_path):
    """Beyond 2^31 entries indptr is int64 and indices stay int32; a low limit shows it on a small matrix."""
    plain = {kind: fitted(kind) for kind in ("explicit", "implicit")}
    monkeypatch.setattr(_validate, "INT32_LIMIT", 100)
    for kind, expected in plain.items():
        model = make(kind).fit(planted())
        assert model._learned.seen.indptr.dtype == np.int64
        model._learn(replace(model._learned, plan=expected.plan_))  # its bytes count the wider pointers
        assert_same(snapshot(expected), snapshot(model))
        assert model.score(planted()[:50]) == expected.score(planted()[:50])
        assert model.objective(planted()) == expected.objective(planted())
        model.save(tmp_path / "model")
        loaded = hmf.load(tmp_path / "model")
        np.testing.assert_array_equal(loaded.recommend([1, 2])[0], expected.recommend([1, 2])[0])
        loaded.partial_fit_items([0], planted()[:, :1]).recommend([1, 2])


@pytest.mark.parametrize(
    "use",
    [lambda m: m.recommend([1, 2], planted()), lambda m: m.partial_fit_users([0], planted()[:1]).recommend([1, 2])],
    ids=["user_items", "partial_fit_users"],
)
def test_64_bit_pointers_in_user_items_and_updates(monkeypatch, use):
    expected = use(fitted())
    monkeypatch.setattr(_validate, "INT32_LIMIT", 100)
    np.testing.assert_array_equal(use(make().fit(planted()))[0], expected[0])


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


def test_score_tells_training_users_from_new_ones():
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


def test_history_records_what_was_asked_for():
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


# --------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit", "implicit64"])
def test_thread_count_changes_no_bit_of_an_answer(kind):
    results = []
    for threads in (1, 2, 5):
        model = fitted(kind, num_threads=threads)
        assert model.plan_.num_threads == threads
        more = {
            "score": model.score(planted(9, N_ITEMS, seed=1)),
            "objective": model.objective(planted()),
            "similar": model.similar_items(np.arange(N_ITEMS)),
            "predict": model.predict(np.arange(N_ITEMS), np.arange(N_ITEMS)),
        }
        results.append(snapshot(model) | more)
        del results[-1]["sizes"]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_pickle_copy_and_clone():
    for kind in KINDS:
        model = fitted(kind)
        model.recommend(0)
        for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert_same(snapshot(model), snapshot(twin))
            twin.partial_fit_users([0], np.ones((1, N_ITEMS)))
            assert not np.array_equal(twin.user_factors_, model.user_factors_)
        fresh = clone(model)
        assert fresh.get_params() == model.get_params()
        with pytest.raises(NotFittedError):
            fresh.recommend(0)
        np.testing.assert_array_equal(fresh.fit(planted()).user_factors_, model.user_factors_)


def test_a_pickle_does_not_grow_with_use():
    model = fitted("implicit")
    size = len(pickle.dumps(model))
    model.recommend(0)
    model.similar_items(0)
    model.transform(planted())
    assert len(pickle.dumps(model)) == size


def test_factors_are_float32_in_c_order_whatever_computed_them():
    for kind in KINDS:
        model = fitted(kind)
        for factors, own in ((model.user_factors, model.user_factors_), (model.item_factors, model.item_factors_)):
            assert factors.dtype == np.float32
            assert factors.flags.c_contiguous
            assert own.dtype == (np.float64 if kind.endswith("64") else np.float32)
            np.testing.assert_array_equal(factors, own.astype(np.float32))


@pytest.mark.parametrize("change", [{"regularization": 5.0}, {"regularization_scaling": "none"}, {"dtype": "float64"}])
def test_parameters_set_after_the_fit_wait_for_the_next_one(change):
    model = fitted()
    model.set_params(**change)
    np.testing.assert_array_equal(model.transform(planted()), model.user_factors_)


def test_kernels_get_arrays_that_fit_together(monkeypatch):
    model, widths = fitted(), []
    monkeypatch.setattr(_als, "cholesky_rows", lambda out, design, *_: widths.append((out.shape[1], design.shape[1])))
    model.set_params(biases=True).transform(planted())
    assert widths == [(4, 4)]


# ---------------------------------------------------------------------------------------------------- cut-short fits


def half_states(kind: str, monkeypatch, **options) -> list[State]:
    """The state after each completed half sweep of an uninterrupted fit; the first is the initial one."""
    states, update = [], hmf.als.CpuALS.update

    def recorded(self, side):
        if not states:
            states.append(self.state)
        update(self, side)
        states.append(self.state)

    with monkeypatch.context() as patch:
        patch.setattr(hmf.als.CpuALS, "update", recorded)
        make(kind, **options).fit(planted())
    return states


def interrupt_at(monkeypatch, k: int, error: BaseException) -> None:
    """Let the k-th half sweep (from 1) fail in its middle: after the kernels ran, before anything is stored."""
    solve, count = HalfSweep.solve, [0]

    def failing(self, *args, **kwargs):
        count[0] += 1
        result = solve(self, *args, **kwargs)
        if count[0] == k:
            result.matrix[:] = np.nan
            raise error
        return result

    monkeypatch.setattr(HalfSweep, "solve", failing)


@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit"])
@pytest.mark.parametrize("k", [2, 3, 4, 5, 6])
def test_ctrl_c_keeps_the_last_completed_half_sweep(kind, k, monkeypatch, tmp_path):
    options = {"reorder": "both"} if kind == "biases" else {"solver": "cg"} if kind == "implicit" else {}
    states = half_states(kind, monkeypatch, **options)
    model = make(kind, **options)
    with monkeypatch.context() as patch:
        interrupt_at(patch, k, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            model.fit(planted())
    expected = states[k - 1]
    for side in ("user", "item"):
        np.testing.assert_array_equal(model._learned.state.side(side).matrix, expected.side(side).matrix)
    assert model.n_iter_ == (k - 1) // 2
    assert [record["iteration"] for record in model.history_] == list(range(1, (k - 1) // 2 + 1))
    model.save(tmp_path / "model")
    assert_same(snapshot(model), snapshot(hmf.load(tmp_path / "model")) | {"sizes": snapshot(model)["sizes"]})
    assert model.fit(planted()).n_iter_ == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), NonFiniteError("x")])
def test_a_first_fit_that_fails_at_once_leaves_an_unfitted_model(error, monkeypatch):
    model = make()
    interrupt_at(monkeypatch, 1, error)
    with pytest.raises(type(error)):
        model.fit(planted())
    with pytest.raises(NotFittedError):
        model.recommend(0)


@pytest.mark.parametrize("stop", ["callback", "signal"])
def test_ctrl_c_in_a_callback_keeps_the_iteration(stop):
    def callback(model, record):
        assert model.recommend([0, 1])[0].shape == (2, 10)  # usable as it is
        assert record is model.history_[-1]
        if record["iteration"] == 2:
            if stop == "signal":
                signal.raise_signal(signal.SIGINT)
            raise KeyboardInterrupt

    model = make(iterations=5)
    with pytest.raises(KeyboardInterrupt):
        model.fit(planted(), callback=callback)
    assert model.n_iter_ == len(model.history_) == 2
    np.testing.assert_array_equal(model.user_factors_, fitted(iterations=2).user_factors_)


def test_a_callback_stops_the_fit_by_returning_true():
    seen = []
    model = make(iterations=9).fit(planted(), callback=lambda m, r: seen.append((m, r)) or len(seen) == 3)
    assert model.n_iter_ == len(seen) == 3
    assert seen[0][0] is model
    assert make(iterations=3).fit(planted(), callback=lambda m, r: "yes").n_iter_ == 3  # only True counts


def test_a_callback_may_return_a_numpy_boolean():
    assert make(iterations=9).fit(planted(), callback=lambda m, r: np.float64(1) > 0).n_iter_ == 1


def not_positive_definite_users() -> sp.csr_array:
    """User 13 has one entry, items have many: without a penalty the item half sweep succeeds and the user one fails."""
    dense = np.random.default_rng(0).random((40, 20)) + 0.5
    dense[13, 1:] = 0
    return sp.csr_array(dense)


@pytest.mark.parametrize("options", [{}, {"assembly": "bals"}, {"reorder": "rows"}, {"assembly": "rank1"}])
def test_a_singular_row_is_named_and_earlier_factors_are_kept(options):
    model = make("explicit64", regularization=0.0, **options)
    with pytest.raises(NotPositiveDefiniteError, match=says("user 13 are not positive definite (leading minor",
                                                            "increase regularization (now 0)")) as caught:  # fmt: skip
        model.fit(not_positive_definite_users())
    assert (caught.value.side, caught.value.row) == ("user", 13)
    assert 1 <= caught.value.minor <= 4
    assert model.n_iter_ == 0
    assert model.history_ == []
    assert model.recommend(13)[0].shape == (10,)
    assert np.isfinite(model.item_factors_).all()


def test_overflow_in_a_later_sweep_keeps_the_earlier_one():
    calls = []
    model = make(iterations=4)
    with pytest.raises(ZeroDivisionError):
        model.fit(planted(), callback=lambda m, r: calls.append(1) or (1 / 0 if len(calls) == 2 else None))
    np.testing.assert_array_equal(model.user_factors_, fitted(iterations=2).user_factors_)


@pytest.mark.parametrize(
    ("change", "ratings", "kind"),
    [
        ({"factors": 0}, planted(), ValueError),
        ({"device": "cuda"}, planted(), RuntimeError),
        ({"random_state": -1}, planted(), ValueError),
        ({}, planted() * np.nan, RatingsError),
        ({}, sp.csr_array((5, 5)), RatingsError),
    ],
)
def test_a_refused_refit_leaves_the_old_model_intact(change, ratings, kind):
    model = make().fit(labelled())
    before = snapshot(model)
    with pytest.raises(kind):
        model.set_params(**change).fit(ratings)
    model.set_params(factors=4, device="cpu", random_state=0)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("shape", [(60, 40), (25, 70)])
def test_a_refit_that_fails_in_its_first_half_sweep_leaves_the_old_model_intact(shape, monkeypatch):
    model = make().fit(labelled())
    before = snapshot(model)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            model.fit(labelled(planted(*shape, seed=6), users=[f"other {k}" for k in range(shape[0])]))
    assert_same(before, snapshot(model))


def test_a_refit_replaces_everything():
    model = make().fit(labelled())
    model.recommend(0)
    model.similar_items(0)
    other = planted(25, 30, seed=6)
    assert_same(snapshot(make().fit(other)), snapshot(model.fit(other)))
    assert model.user_ids_ is None


def test_memory_is_checked_before_the_work(monkeypatch):
    model = fitted()
    before = snapshot(model)
    monkeypatch.setattr(importlib.import_module("hybridmf.plan.make"), "available_memory", lambda: 1000)
    with pytest.raises(MemoryBudgetError, match=says("the fit needs about", "are free", "use fewer factors")) as caught:
        model.fit(planted())
    assert isinstance(caught.value, MemoryError)
    assert_same(before, snapshot(model))
    monkeypatch.setattr(
        importlib.import_module("hybridmf.plan.make"), "available_memory", lambda: None
    )  # a system that does not say
    assert model.fit(planted()).n_iter_ == 3


def test_validation_without_relevant_entries_is_refused_by_name_before_the_work():
    model = make("implicit")
    with pytest.raises(ValueError, match="validation"):
        model.fit(planted(), validation=-planted())
    assert not hasattr(model, "n_iter_")


# -------------------------------------------------------------------------------------------- the rest of the process


def test_answers_do_not_scan_the_libraries_of_the_process(monkeypatch):
    model = fitted("implicit")
    model.transform(planted())
    scans = []
    monkeypatch.setattr(threadpoolctl.ThreadpoolController, "_load_libraries", lambda self: scans.append(1))
    model.transform(planted()[:1])
    model.objective(planted())
    assert not scans


def test_concurrent_answers_leave_blas_as_it_was(monkeypatch):
    pools = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    before = [pool.num_threads for pool in pools]
    if 1 in before:
        pytest.skip("BLAS has one thread anyway")
    model, entered, leave = fitted(), defaultdict(threading.Event), defaultdict(threading.Event)

    def solve(*_):
        name = threading.current_thread().name
        entered[name].set()
        assert leave[name].wait(30)

    monkeypatch.setattr(_als, "cholesky_rows", solve)
    threads = {name: threading.Thread(target=model.transform, args=(planted(),), name=name) for name in "ab"}
    for name in "ab":  # both enter before the first leaves
        threads[name].start()
        assert entered[name].wait(30)
    for name in "ab":
        leave[name].set()
        threads[name].join()
    after = [pool.num_threads for pool in pools]
    for pool, count in zip(pools, before, strict=True):
        pool.set_num_threads(count)
    assert after == before


FORK = """
import os, signal, sys
sys.path[:0] = {path!r}
import numpy as np
import scipy.sparse as sp
import hybridmf as hmf

rng = np.random.default_rng(0)
ratings = sp.csr_array((rng.random((800, 120)) < 0.5).astype(np.float32))  # enough entries for several threads
model = hmf.ImplicitALS(factors=4, iterations=1, num_threads=2, random_state=0)
uses = {{
    "fit": lambda: model.fit(ratings),
    "layouts": lambda: hmf.formats.reorder(ratings, num_threads=2),
    "top-K": lambda: model.recommend(np.arange(800), N=3),
}}
model.fit(ratings)
uses[{parent!r}]()
child = os.fork()
if child == 0:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)  # its default action ends the process
    uses[{child!r}]()
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1] != 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer's own locks stay held in a fork"
)
@pytest.mark.parametrize(
    ("parent", "child"), [("fit", "fit"), ("fit", "top-K"), ("layouts", "fit"), ("top-K", "layouts")]
)
def test_a_forked_child_can_use_what_its_parent_used(parent, child):
    """The parent's threads are gone in the child, whichever compiled module had started them."""
    script = FORK.format(path=[str(Path(__file__).parents[1])], parent=parent, child=child)
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)
