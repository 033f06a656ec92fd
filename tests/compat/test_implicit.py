"""`hybridmf.compat.implicit` beside `implicit`: one import line, the same factors, recommendations and files."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf.compat.implicit as ported
from hybridmf.compat.implicit import als as ours
from hybridmf.compat.implicit.nearest_neighbours import bm25_weight, tfidf_weight
from hybridmf.errors import RatingsError
from support.ratings import planted

implicit = pytest.importorskip("implicit")
pytestmark = pytest.mark.filterwarnings("ignore:OpenBLAS is configured")

PLAYS = sp.csr_matrix(planted(120, 80, 0.15))
PLAYS.data = np.ceil(PLAYS.data).astype(np.float32)
OPTIONS = {"factors": 8, "regularization": 0.05, "iterations": 5, "random_state": 3, "num_threads": 1}


def pair(plays=PLAYS, **options):
    """`implicit`'s model and ours, fitted with the same arguments on the CPU."""
    options = OPTIONS | options
    models = implicit.cpu.als.AlternatingLeastSquares(**options), ours.AlternatingLeastSquares(**options, use_gpu=False)
    for model in models:
        model.fit(plays, show_progress=False)
    return models


@pytest.fixture(scope="module")
def same_factors():
    """Both with the very same factors, so that what they serve can be compared to the last digit."""
    theirs, model = pair(alpha=2.0)
    model.user_factors, model.item_factors = theirs.user_factors, theirs.item_factors
    return theirs, model


@pytest.mark.parametrize("use_cg", [True, False])
@pytest.mark.parametrize("alpha", [1.0, 0.3, 40.0])
def test_factors_are_those_of_implicit(use_cg, alpha):
    theirs, model = pair(use_cg=use_cg, alpha=alpha)
    for name in ("user_factors", "item_factors"):
        a, b = getattr(theirs, name), getattr(model, name)
        assert b.dtype == a.dtype and b.shape == a.shape
        np.testing.assert_allclose(b, a, atol=5e-3 * np.abs(a).max())  # theirs are float32 throughout


def test_dislikes_empty_rows_and_double_precision():
    plays = PLAYS.copy()
    plays.data[::7] *= -1
    plays = sp.csr_matrix(sp.vstack([plays, sp.csr_matrix((2, 80), dtype=np.float32)]))
    theirs, model = pair(plays, use_cg=False, dtype=np.float64)
    assert model.user_factors.dtype == np.float64 and not model.user_factors[120:].any()
    np.testing.assert_allclose(model.item_factors, theirs.item_factors, atol=2e-3 * np.abs(theirs.item_factors).max())


def quickstart(library, plays):
    """The code of implicit's README, with its factors made smaller and a seed."""
    # initialize a model
    model = library.als.AlternatingLeastSquares(factors=20, random_state=1)
    # train the model on a sparse matrix of user/item/confidence weights
    model.fit(plays)
    # recommend items for a user
    recommendations = model.recommend(7, plays[7])
    # find related items
    related = model.similar_items(11)
    return recommendations, related


def test_the_quickstart_gives_the_same_with_both():
    for theirs, found in zip(quickstart(implicit, PLAYS), quickstart(ported, PLAYS), strict=True):
        np.testing.assert_array_equal(found[0], theirs[0])
        np.testing.assert_allclose(found[1], theirs[1], rtol=0.01, atol=0.005)


def same_lists(pairs):
    """Lists of both libraries; items whose scores differ by less than rounding may swap."""
    for theirs, found in pairs:
        np.testing.assert_allclose(found[1], theirs[1], atol=0.01)
        rows = zip(np.atleast_2d(theirs[0]), np.atleast_2d(found[0]), strict=True)
        assert np.mean([np.isin(ours, of_theirs).mean() for of_theirs, ours in rows]) > 0.95


def tutorial(library):
    """The calls of implicit's tutorial: BM25 weights, one user with what is known, similar items, a batch of users."""
    artist_user = library.nearest_neighbours.bm25_weight(PLAYS.T, K1=100, B=0.8)
    user_plays = artist_user.T.tocsr()
    model = library.als.AlternatingLeastSquares(factors=8, regularization=0.05, alpha=2.0, random_state=1)
    model.fit(user_plays)
    one = model.recommend(12, user_plays[12], N=10, filter_already_liked_items=False)
    return one, model.similar_items(25), model.recommend(np.arange(100), user_plays[np.arange(100)])


def test_the_tutorial_gives_the_same_with_both():
    same_lists(zip(tutorial(implicit), tutorial(ported), strict=True))


def films(library):
    """The calls of examples/movielens.py: likes with weights, all similar items of a batch, most popular first."""
    ratings = PLAYS.T.tocsr()
    ratings.data[ratings.data < 2] = 0
    ratings.eliminate_zeros()
    ratings.data = np.ones(len(ratings.data))
    model = library.als.AlternatingLeastSquares(random_state=1, factors=16)
    ratings = (library.nearest_neighbours.bm25_weight(ratings, B=0.9) * 5).tocsr()
    user_ratings = ratings.T.tocsr()
    model.fit(user_ratings)
    most_popular = sorted(np.arange(ratings.shape[0]), key=lambda film: -np.ediff1d(ratings.indptr)[film])
    return [model.similar_items(most_popular[start : start + 30], 11) for start in range(0, len(most_popular), 30)]


def artists(library):
    """The calls of examples/lastfm.py: float32 by name, an attribute of approximate models, users in batches."""
    model = library.als.AlternatingLeastSquares(factors=12, dtype=np.float32, random_state=1)
    plays = library.nearest_neighbours.bm25_weight(PLAYS.T.tocsr(), K1=100, B=0.8)
    model.approximate_similar_items = False
    user_plays = plays.tocsr().T.tocsr()
    model.fit(user_plays)
    batches = (np.arange(start, start + 40) for start in range(0, 120, 40))
    return [model.recommend(batch, user_plays[batch], filter_already_liked_items=True) for batch in batches]


@pytest.mark.parametrize("example", [films, artists])
def test_the_examples_give_the_same_with_both(example):
    same_lists(zip(example(implicit), example(ported), strict=True))


def test_weights_are_those_of_implicit():
    for weight, theirs in (
        (bm25_weight, implicit.nearest_neighbours.bm25_weight),
        (tfidf_weight, implicit.nearest_neighbours.tfidf_weight),
    ):
        np.testing.assert_allclose(weight(PLAYS).toarray(), theirs(PLAYS).toarray(), rtol=1e-5, atol=1e-6)
    assert PLAYS.data.min() == 1  # as before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"N": 3, "filter_already_liked_items": False},
        {"filter_items": [3, 5, 8]},
        {"items": [40, 7, 12, 33, 2]},
        {"recalculate_user": True},
        {"N": 80},
    ],
    ids=lambda options: "".join(options) or "usual",
)
@pytest.mark.parametrize("users", [5, np.array([0, 7, 33])])
def test_recommendations_are_those_of_implicit(same_factors, options, users):
    theirs, model = same_factors
    rows = PLAYS[users]
    ids, scores = model.recommend(users, rows, **options)
    their_ids, their_scores = theirs.recommend(users, rows, **options)
    assert ids.shape == their_ids.shape
    left = their_scores > -1e38
    np.testing.assert_array_equal(ids[left], their_ids[left])
    np.testing.assert_allclose(scores[left], their_scores[left], rtol=2e-3, atol=1e-5)
    # the rest are the items that were to be left out, in any order
    np.testing.assert_array_equal(scores[~left], their_scores[~left])
    np.testing.assert_array_equal(np.sort(ids, axis=-1), np.sort(their_ids, axis=-1))


def test_no_list_is_longer_than_the_items(same_factors):
    theirs, model = same_factors
    assert theirs.recommend(5, PLAYS[5], N=200)[0][80:].tolist() == [0] * 120  # item 0, again and again
    assert model.recommend(5, PLAYS[5], N=200)[0].shape == (80,)


@pytest.mark.parametrize("ids", [4, np.array([0, 9])])
def test_neighbours_are_those_of_implicit(same_factors, ids):
    theirs, model = same_factors
    for found, expected in (
        (model.similar_items(ids, N=6), theirs.similar_items(ids, N=6)),
        (model.similar_users(ids, N=6), theirs.similar_users(ids, N=6)),
        (model.similar_items(ids, N=4, filter_items=[3, 1]), theirs.similar_items(ids, N=4, filter_items=[3, 1])),
        (model.similar_users(ids, users=[1, 5, 9]), theirs.similar_users(ids, N=3, users=[1, 5, 9])),
    ):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-4)
    rows = PLAYS.T.tocsr()[ids]
    ids_of, cosines = model.similar_items(ids, 5, recalculate_item=True, item_users=rows)
    expected = theirs.similar_items(ids, 5, recalculate_item=True, item_users=rows)
    np.testing.assert_array_equal(ids_of, expected[0])
    np.testing.assert_allclose(cosines, expected[1], rtol=1e-3)


def test_recalculated_factors_and_updates_are_those_of_implicit(same_factors):
    theirs, model = same_factors
    rows = sp.csr_matrix(PLAYS[:4]) * 0.1  # confidences below the smallest of the fit
    for user, given in ((0, rows[0]), ([0, 1, 2, 3], rows)):
        np.testing.assert_allclose(
            model.recalculate_user(user, given), theirs.recalculate_user(user, given), rtol=5e-3, atol=2e-4
        )
    theirs, model = pair(use_cg=False)
    for each in (theirs, model):
        each.partial_fit_users([1, 122], PLAYS[[5, 6]])
        each.partial_fit_items([80], sp.csr_matrix(PLAYS.T.tocsr()[[3]].toarray() @ np.eye(120, 123, dtype=np.float32)))
    assert model.user_factors.shape == (123, 8) and not model.user_factors[121].any()
    np.testing.assert_allclose(model.user_factors, theirs.user_factors, rtol=0.02, atol=5e-3)
    np.testing.assert_allclose(model.item_factors, theirs.item_factors, rtol=0.02, atol=5e-3)
    np.testing.assert_array_equal(model.similar_items(80, 3)[0], theirs.similar_items(80, 3)[0])


def test_explanations_are_those_of_implicit(same_factors):
    theirs, model = same_factors
    expected, pairs, _ = theirs.explain(7, PLAYS, 11)
    score, found, weights = model.explain(7, PLAYS, 11)
    assert score == pytest.approx(expected, rel=1e-3)
    assert [item for item, _ in found] == [item for item, _ in pairs]
    assert [value for _, value in found] == pytest.approx([value for _, value in pairs], rel=2e-3, abs=1e-5)
    assert model.explain(7, PLAYS, 11, weights, N=2)[1] == found[:2]


def test_files_are_those_of_implicit(same_factors, tmp_path):
    theirs, model = same_factors
    model.save(tmp_path / "ours.npz")
    theirs.save(str(tmp_path / "theirs"))
    there = implicit.cpu.als.AlternatingLeastSquares.load(str(tmp_path / "ours.npz"))
    for name in (tmp_path / "ours.npz", str(tmp_path / "theirs")):
        here = ours.AlternatingLeastSquares.load(name)
        assert (here.alpha, here.factors, here.dtype, here.regularization) == (2.0, 8, np.float32, 0.05)
        np.testing.assert_array_equal(here.recommend(3, PLAYS[3])[0], model.recommend(3, PLAYS[3])[0])
        np.testing.assert_allclose(here.recalculate_user(3, PLAYS[3]), model.recalculate_user(3, PLAYS[3]), rtol=1e-4)
    np.testing.assert_array_equal(there.item_factors, model.item_factors)


def test_callbacks_losses_and_continued_fits():
    losses = {}
    for library in (implicit.cpu.als, ours):
        model = library.AlternatingLeastSquares(**OPTIONS, calculate_training_loss=True)
        losses[library] = []
        model.fit(PLAYS, show_progress=False, callback=lambda *given, to=losses[library]: to.append(given))
        model.fit(PLAYS, show_progress=False, callback=lambda *given, to=losses[library]: to.append(given))
    theirs, found = losses.values()
    assert [each[0] for each in found] == [each[0] for each in theirs] == [0, 1, 2, 3, 4] * 2
    assert [each[2] for each in found] == pytest.approx([each[2] for each in theirs], rel=1e-3)
    assert found[5][2] < found[4][2]  # continues from its factors
    silent = []
    ours.AlternatingLeastSquares(**OPTIONS).fit(
        PLAYS, show_progress=False, callback=lambda *given: silent.append(given)
    )
    assert silent[0][2] is None


def test_every_backend_gives_the_same(backend):
    options = OPTIONS | {"use_cg": False, "iterations": 2}
    model = ours.AlternatingLeastSquares(**options, use_gpu=backend == "cuda")
    model.fit(PLAYS, show_progress=False)
    expected = ours.AlternatingLeastSquares(**options, use_gpu=False)
    expected.fit(PLAYS, show_progress=False)
    largest = np.abs(expected.user_factors).max()
    np.testing.assert_allclose(model.user_factors, expected.user_factors, atol=1e-3 * largest)
    users = np.arange(6)
    scores, their_scores = (each.recommend(users, PLAYS[users], 4)[1] for each in (model, expected))
    np.testing.assert_allclose(scores, their_scores, atol=2e-3)
    folded, theirs = (each.recalculate_user(users, PLAYS[users]) for each in (model, expected))
    np.testing.assert_allclose(folded, theirs, atol=2e-3 * largest)


def test_mistakes():
    model = ours.AlternatingLeastSquares(**OPTIONS)
    with pytest.raises(ValueError, match="has no factors; call fit"):
        model.recommend(0, PLAYS[0])
    zero = PLAYS.copy()
    zero.data[3] = 0
    with pytest.raises(RatingsError, match=r"user_items has 1 entries with a confidence of 0.*eliminate_zeros"):
        model.fit(zero)
    model.fit(PLAYS, show_progress=False)
    with pytest.raises(ValueError, match="user_items needs to be a CSR sparse matrix"):
        model.recommend(0, None)
    with pytest.raises(ValueError, match="user_items must contain 1 row for each of the 1 ids, got 120 rows"):
        model.recommend(0, PLAYS)
    with pytest.raises(ValueError, match="item_users must contain 1 row for each of the 1 ids, got None"):
        model.similar_items(0, recalculate_item=True)
    with pytest.raises(IndexError, match="ids must be between 0 and 119, got 120"):
        model.recommend(120, PLAYS[0])
    with pytest.raises(IndexError, match="ids must be between 0 and 79, got -1"):
        model.recommend(0, PLAYS[0], items=[-1])
    with pytest.raises(ValueError, match="Can't set both items and filter_items"):
        model.recommend(0, PLAYS[0], items=[1], filter_items=[2])


@pytest.mark.parametrize("use_cg", [True, False])
def test_empty_users_and_items_change_nothing_else(use_cg):
    """Their drawn factors are in the first Gram matrix of `implicit`, too."""
    empty = sp.vstack([PLAYS, sp.csr_matrix((30, PLAYS.shape[1]), dtype=np.float32)])
    plays = sp.csr_matrix(sp.hstack([empty, sp.csr_matrix((empty.shape[0], 60), dtype=np.float32)]), dtype=np.float64)
    theirs, model = pair(plays, use_cg=use_cg, dtype=np.float64)
    expected, found = (each.user_factors @ each.item_factors.T for each in (theirs, model))
    np.testing.assert_allclose(found, expected, atol=1e-9 * np.abs(expected).max())
    assert not model.user_factors[-30:].any() and not model.item_factors[-60:].any()


@pytest.mark.parametrize("candidates", [{}, {"items": np.arange(10, 40)}, {"filter_items": [1, 2]}])
def test_an_item_comes_first_among_items_with_the_same_factors(candidates):
    _, model = pair()
    model.item_factors = model.item_factors.copy()
    model.item_factors[10:40] = model.item_factors[10]
    for n in (1, 3, 30):
        ids, scores = model.similar_items(np.arange(10, 40), N=n, **candidates)
        np.testing.assert_array_equal(ids[:, 0], np.arange(10, 40))
        np.testing.assert_allclose(scores, 1, atol=1e-6)
        assert all(len(set(row)) == n for row in ids.tolist())
    assert model.similar_items(38, N=2)[0][0] == 38


def test_one_dimensional_rows_of_sparse_arrays(same_factors):
    _, model = same_factors
    row = sp.csr_array(PLAYS)[3]
    assert row.ndim == 1
    for method in (
        lambda rows: model.recommend(3, rows, N=5)[0],
        lambda rows: model.recommend(3, rows, N=5, recalculate_user=True)[0],
        lambda rows: model.recalculate_user(3, rows),
    ):
        np.testing.assert_array_equal(method(row), method(PLAYS[3]))


@pytest.mark.parametrize("seed", [np.random.default_rng(0), np.random.RandomState(0), np.int64(3), None])
def test_files_hold_seeds_that_are_integers(seed, tmp_path):
    model = ours.AlternatingLeastSquares(**OPTIONS | {"random_state": seed})
    model.fit(PLAYS, show_progress=False)
    model.save(tmp_path / "model.npz")
    loaded = ours.AlternatingLeastSquares.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(loaded.item_factors, model.item_factors)
    assert loaded.random_state == (3 if isinstance(seed, np.int64) else None)


@pytest.mark.parametrize("call", [lambda model: model.similar_users(3), lambda model: model.recommend(3, PLAYS[3])])
def test_factors_that_a_thread_replaces_during_a_call_do_not_serve_later_with_the_old_ones(call, monkeypatch):
    model = pair()[1]
    users, items, make = model.user_factors[::-1].copy(), model.item_factors[::-1].copy(), model._engine

    def engine(*given):  # the factors of the call have been read by now
        model.user_factors, model.item_factors = users, items
        return make(*given)

    monkeypatch.setattr(model, "_engine", engine)
    call(model)
    monkeypatch.undo()
    fresh = copy.copy(model)
    assert not fresh._derived
    for found, wanted in zip(call(model), call(fresh), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_pickles_have_the_factors_and_nothing_computed_from_them():
    model = pair()[1]
    before = len(pickle.dumps(model))
    wanted = model.similar_items(3)
    content = pickle.dumps(model)
    assert len(content) == before
    np.testing.assert_array_equal(pickle.loads(content).similar_items(3), wanted)


def test_pickles_of_earlier_versions_load():
    model = pair()[1]
    earlier = vars(model) | {"_sides": {"item": ours._Served(factors=model.item_factors, derived={})}}
    del earlier["_derived"]
    loaded = ours.AlternatingLeastSquares.__new__(ours.AlternatingLeastSquares)
    loaded.__setstate__(pickle.loads(pickle.dumps(earlier)))
    np.testing.assert_array_equal(loaded.similar_items(3), model.similar_items(3))
