"""Users and items without training entries: their recommendations, which never depend on positions."""

from __future__ import annotations

import copy
import json
import logging
import pickle

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.errors import ModelFileError
from hybridmf.metrics import PopularityRecommender, evaluate
from hybridmf.ranks.shares import WholeRatings
from hybridmf.ranks.transport.threads import run_ranks
from support import reference
from support.ranks import fit_rank
from support.ratings import planted

M, N_ITEMS = 60, 40
EMPTY_ITEM = N_ITEMS // 3  # of `planted`
SMALL = {"factors": 3, "iterations": 3, "random_state": 0, "device": "cpu", "num_threads": 1}
MODELS = {
    "explicit": lambda **o: hmf.ExplicitALS(**SMALL | {"biases": False} | o),
    "biases": lambda **o: hmf.ExplicitALS(**SMALL | {"biases": True} | o),
    "implicit": lambda **o: hmf.ImplicitALS(**SMALL | o),
    "sgd": lambda **o: hmf.SGD(**SMALL | {"learning_rate": 0.01, "biases": False} | o),
    "ccd": lambda **o: hmf.CCD(**SMALL | {"biases": False} | o),
}
UNBIASED = [kind for kind in MODELS if kind != "biases"]
COLD = np.array([0, 17, M // 2, M - 1])  # one of them is the empty user of `planted`
WARM = np.setdiff1d(np.arange(M), COLD)


def ratings() -> sp.csr_array:
    """Ratings of 60 users, four of whom have none."""
    matrix = planted(density=0.3).tolil()
    matrix[COLD] = 0
    return sp.csr_array(matrix)


MATRIX = ratings()
COUNTS = np.count_nonzero(MATRIX.toarray(), axis=0)


def popular(n: int, left_out=()) -> tuple[np.ndarray, np.ndarray]:
    """The items most users have, of those that anybody has, without some."""
    hidden = COUNTS == 0
    hidden[list(left_out)] = True
    ids, scores = reference.top_k(COUNTS[None].astype(float), n, hidden[None])
    return ids[0], scores[0]


# ----------------------------------------------------------------------------------------------------- cold users


@pytest.mark.parametrize("kind", UNBIASED)
def test_cold_users_get_what_most_users_have(kind):
    model = MODELS[kind]().fit(MATRIX)
    np.testing.assert_array_equal(model.cold_users_.nonzero()[0], COLD)
    everybody = np.random.default_rng(0).permutation(M)
    for n in (1, 10, N_ITEMS + 3):
        ids, scores = model.recommend(everybody, N=n)
        expected_ids, expected_scores = popular(n)
        for row in np.flatnonzero(np.isin(everybody, COLD)):
            np.testing.assert_array_equal(ids[row], expected_ids)
            np.testing.assert_array_equal(scores[row], expected_scores)
    assert ids.dtype == np.int32 and scores.dtype == model.user_factors_.dtype
    one_ids, one_scores = model.recommend(17, N=10)
    np.testing.assert_array_equal(one_ids, popular(10)[0])
    np.testing.assert_array_equal(one_scores, popular(10)[1])


@pytest.mark.parametrize("kind", MODELS)
def test_warm_users_get_the_same_beside_cold_ones(kind):
    model = MODELS[kind]().fit(MATRIX)
    together, alone = model.recommend(np.arange(M)), model.recommend(WARM)
    for all_rows, warm_rows in zip(together, alone, strict=True):
        np.testing.assert_array_equal(all_rows[WARM], warm_rows)


def test_cold_users_of_a_model_with_biases_get_the_items_of_largest_bias():
    model = MODELS["biases"]().fit(MATRIX)
    np.testing.assert_array_equal(model.cold_users_.nonzero()[0], COLD)
    ids, scores = model.recommend(COLD, N=10)
    by_bias = np.argsort(-model.item_bias_[COUNTS > 0], kind="stable")
    np.testing.assert_array_equal(ids, np.tile(np.flatnonzero(COUNTS > 0)[by_bias][:10], (len(COLD), 1)))
    np.testing.assert_allclose(scores[0], model.mean_ + model.item_bias_[ids[0]], rtol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_cold_users_are_masked_on_request(kind):
    model = MODELS[kind]().fit(MATRIX)
    ids, scores = model.recommend(np.arange(M), cold_users="mask")
    assert np.all(ids[COLD] == -1) and np.all(np.isneginf(scores[COLD]))
    np.testing.assert_array_equal(ids[WARM], model.recommend(WARM)[0])
    assert model.recommend(17, cold_users="mask")[0].tolist() == [-1] * 10
    with pytest.raises(ValueError, match="cold_users must be one of 'popular', 'mask'; got 'random'"):
        model.recommend(3, cold_users="random")


@pytest.mark.parametrize("kind", UNBIASED)
def test_filters_hold_for_cold_users(kind):
    model, best = MODELS[kind]().fit(MATRIX), popular(8)[0]
    history = sp.csr_array((np.ones(3), ([0, 0, 1], [best[0], best[2], best[1]])), shape=(2, N_ITEMS))
    ids, _ = model.recommend([17, 0], history, N=6)
    np.testing.assert_array_equal(ids, [popular(6, best[[0, 2]])[0], popular(6, best[[1]])[0]])
    ids, _ = model.recommend([17, 0], history, N=6, filter_already_liked_items=False)
    np.testing.assert_array_equal(ids, np.tile(popular(6)[0], (2, 1)))
    ids, _ = model.recommend(17, N=6, filter_items=best[:2])
    np.testing.assert_array_equal(ids, popular(6, best[:2])[0])
    ids, scores = model.recommend(17, N=4, items=[best[3], EMPTY_ITEM, best[1]])
    np.testing.assert_array_equal(ids, [best[1], best[3], -1, -1])
    np.testing.assert_array_equal(scores, [COUNTS[best[1]], COUNTS[best[3]], -np.inf, -np.inf])


def test_rows_without_entries_are_cold_wherever_users_come_from():
    """Gaps and empty rows of updates; new rows; users whose feedback says nothing good."""
    model = MODELS["implicit"]().fit(MATRIX).partial_fit_users([M + 1, 5], sp.csr_array((2, N_ITEMS)))
    counts = COUNTS - np.count_nonzero(MATRIX[[5]].toarray(), axis=0)
    best = reference.top_k(counts[None].astype(float), 10, (counts == 0)[None])[0]
    np.testing.assert_array_equal(model.recommend([M, M + 1, 5, 17])[0], np.repeat(best, 4, axis=0))
    new = MODELS["explicit"]().fit(MATRIX).predict(sp.csr_array((2, N_ITEMS)))
    np.testing.assert_array_equal(new, np.repeat(popular(1)[0], 2))
    dislikes = MATRIX.tolil()
    dislikes[17, :6] = -1
    model = MODELS["implicit"]().fit(sp.csr_array(dislikes))
    assert not model.user_factors_[17].any()
    assert model.recommend(17, N=3, filter_already_liked_items=False)[1].min() > 1  # numbers of entries


@pytest.mark.parametrize("include_seen", [True, False])
def test_popularity_follows_updates(include_seen, tmp_path):
    MODELS["explicit"]().fit(MATRIX).save(tmp_path / "model", include_seen=include_seen)
    model = hmf.load(tmp_path / "model")
    liked = np.zeros((1, N_ITEMS))
    liked[0, [2, 4]] = 5
    model.partial_fit_users([M], liked).partial_fit_users([M + 1], liked)
    counts = COUNTS + 2 * (liked[0] > 0)
    model.partial_fit_items([N_ITEMS + 1, 3], np.ones((M + 2, 2)))
    counts = np.append(counts, [0, M + 2])
    counts[3] = M + 2
    ids, scores = model.recommend(17, N=N_ITEMS, filter_already_liked_items=False)
    expected_ids, expected_scores = reference.top_k(counts[None].astype(float), N_ITEMS, (counts == 0)[None])
    np.testing.assert_array_equal(ids, expected_ids[0])
    np.testing.assert_array_equal(scores, expected_scores[0])


# ----------------------------------------------------------------------------------------------------- cold items


@pytest.mark.parametrize("kind", MODELS)
def test_items_without_entries_are_not_recommended(kind):
    """Their score of 0 would come before every negative one, or before items of negative bias."""
    model = MODELS[kind]().fit(MATRIX)
    np.testing.assert_array_equal(model.cold_items_.nonzero()[0], [EMPTY_ITEM])
    for options in ({}, {"items": np.arange(N_ITEMS)}, {"filter_already_liked_items": False}):
        ids, _ = model.recommend(np.arange(M), N=N_ITEMS, **options)
        assert EMPTY_ITEM not in ids
    assert set(model.recommend(3, items=[EMPTY_ITEM])[0]) == {-1}


def test_items_of_negative_score_precede_cold_items():
    matrix = np.ones((4, 3), dtype=np.float32)
    matrix[:, 1] = -2
    matrix[:, 2] = 0  # no entries
    model = MODELS["explicit"](factors=1).fit(matrix)
    ids, scores = model.recommend(0, N=3, filter_already_liked_items=False)
    assert ids.tolist() == [0, 1, -1]
    assert scores[1] < 0


# ---------------------------------------------------------------------------------------- files, stores, ranks, devices


def without(path, *names: str) -> None:
    """Remove tensors from a model file, as earlier versions wrote it."""
    with safetensors.safe_open(path, "numpy") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys() if name not in names}  # noqa: SIM118
    header.pop("checksums", None)
    safetensors.numpy.save_file(tensors, path, header)


@pytest.mark.parametrize("include_seen", [True, False])
def test_a_saved_model_keeps_popularity(include_seen, tmp_path):
    MODELS["implicit"]().fit(MATRIX).save(tmp_path / "model", include_seen=include_seen)
    model = hmf.load(tmp_path / "model")
    for one in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(one.recommend(17, filter_already_liked_items=False)[0], popular(10)[0])


def test_files_of_earlier_versions_count_seen_items_or_mask(tmp_path, caplog):
    MODELS["implicit"]().fit(MATRIX).save(tmp_path / "model")
    without(tmp_path / "model", "item_counts")
    np.testing.assert_array_equal(hmf.load(tmp_path / "model").recommend(17)[0], popular(10)[0])
    without(tmp_path / "model", "item_counts", "seen_indptr", "seen_indices")
    model = hmf.load(tmp_path / "model")
    ids, scores = model.recommend([17, 3], filter_already_liked_items=False)
    assert set(ids[0]) == {-1} and np.all(np.isneginf(scores[0])) and np.all(ids[1] >= 0)
    assert "saved without the number of entries of its items, so users without factors get no" in caplog.text
    model.partial_fit_users([3], np.ones((1, N_ITEMS)))
    assert set(model.recommend(17, filter_already_liked_items=False)[0]) == {-1}


@pytest.mark.parametrize(
    "counts",
    [COUNTS[:-1], COUNTS[:, None], COUNTS.astype(np.float32), -COUNTS, COUNTS[::-1].copy()],
    ids=["too few", "a matrix", "no integers", "negative", "of other items"],
)
def test_counts_that_contradict_a_file_are_refused(counts, tmp_path):
    MODELS["implicit"]().fit(MATRIX).save(tmp_path / "model")
    with safetensors.safe_open(tmp_path / "model", "numpy") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del header["checksums"]
    safetensors.numpy.save_file(tensors | {"item_counts": counts}, tmp_path / "model", header)
    with pytest.raises(ModelFileError, match="item_counts contradicts the seen items"):
        hmf.load(tmp_path / "model")


def test_a_store_and_its_checkpoints_have_the_popularity_of_the_same_ratings(tmp_path):
    """Of implicit feedback without explicit zeros, which are no entries of it."""
    with_zeros = MATRIX.copy()
    with_zeros.data[::7] = 0
    hmf.Ratings.from_matrix(with_zeros).save(tmp_path / "ratings.npz")
    hmf.convert(tmp_path / "ratings.npz", tmp_path / "store")
    store = hmf.Store.open(tmp_path / "store")
    model = MODELS["implicit"]().fit(store, checkpoint=tmp_path / "checkpoints")
    expected = MODELS["implicit"]().fit(with_zeros)
    newest = hmf.load(tmp_path / "checkpoints" / "checkpoint-000003.safetensors")
    for one in (model, newest):
        for found, wanted in zip(
            one.recommend(COLD, filter_already_liked_items=False), expected.recommend(COLD), strict=True
        ):
            np.testing.assert_array_equal(found, wanted)


def test_ranks_have_the_popularity_of_all_ratings(caplog):
    with caplog.at_level(logging.INFO, logger="hybridmf"):
        models = run_ranks(
            2, lambda c: fit_rank(MODELS["implicit"](), WholeRatings(MATRIX.astype(np.float32)), c), timeout=30
        )
    np.testing.assert_array_equal(
        models[0].recommend(COLD, filter_already_liked_items=False)[0], np.tile(popular(10)[0], (len(COLD), 1))
    )
    assert "4 of 60 users and 1 of 40 items have no entries" in caplog.text


# ------------------------------------------------------------------------------------------------------- evaluation


def held_out() -> sp.csr_array:
    """Two entries of each user, cold ones too, the last user excepted."""
    rng = np.random.default_rng(1)
    dense = np.zeros((M, N_ITEMS), dtype=np.float32)
    for user in range(M - 1):
        free = np.flatnonzero((MATRIX[[user]].toarray()[0] == 0) & (COUNTS > 0))
        dense[user, rng.choice(free, 2, replace=False)] = 4
    return sp.csr_array(dense)


@pytest.mark.parametrize("kind", [*MODELS, "popularity"])
def test_evaluate_counts_cold_users_and_leaves_them_out_on_request(kind, caplog):
    model = (PopularityRecommender() if kind == "popularity" else MODELS[kind]()).fit(MATRIX)
    metrics = ("ndcg@10", "map@10" if kind == "implicit" else "rmse")
    with caplog.at_level(logging.INFO, logger="hybridmf"):
        found = evaluate(model, held_out(), metrics=metrics)
    assert (found.n_users, found.n_cold_users, found.n_dropped) == (M - 1, 3, 0)
    assert f"3 of {M - 1} evaluated users have no training entries" in caplog.text
    warm = evaluate(model, held_out(), metrics=metrics, users="warm")
    assert warm == evaluate(model, held_out(), metrics=metrics, users=WARM)
    assert (warm.n_users, warm.n_cold_users) == (len(WARM), 0)
    assert json.dumps(found).startswith('{"ndcg@10": ')
    assert evaluate(model, held_out(), metrics=metrics[1:], users=[3, M - 1]).n_users == 1


class Foreign:
    """A model without `cold_users_`."""

    n_users, n_items = M, N_ITEMS

    def recommend(self, users, **options):
        return PopularityRecommender().fit(MATRIX).recommend(users, **options)


@pytest.mark.parametrize("form", [list, np.int64], ids=["list", "numbers"])
def test_cold_users_of_another_library_may_be_a_list_or_numbers(form):
    model, cold = Foreign(), np.diff(MATRIX.indptr) == 0
    model.cold_users_ = cold.tolist() if form is list else cold.astype(form)
    assert (evaluate(model, held_out()).n_cold_users, evaluate(model, held_out(), users="warm").n_users) == (
        3,
        len(WARM),
    )


def test_train_defines_cold_users_if_the_model_does_not():
    found = evaluate(Foreign(), held_out())
    assert (found.n_users, found.n_cold_users) == (M - 1, None)
    with pytest.raises(ValueError, match='users="warm" needs a model with cold_users_, or train='):
        evaluate(Foreign(), held_out(), users="warm")
    found = evaluate(Foreign(), held_out(), train=MATRIX)
    assert (found.n_users, found.n_cold_users) == (M - 1, 3)
    assert evaluate(Foreign(), held_out(), train=MATRIX, users="warm").n_users == len(WARM)
    with pytest.raises(ValueError, match="users must be \"warm\", positions of users, or None, got 'cold'"):
        evaluate(Foreign(), held_out(), users="cold")


@pytest.mark.parametrize("kind", MODELS)
def test_fit_logs_rows_without_entries(kind, caplog):
    with caplog.at_level(logging.INFO, logger="hybridmf"):
        MODELS[kind](iterations=1).fit(MATRIX)
    assert "4 of 60 users and 1 of 40 items have no entries" in caplog.text


def test_popularity_for_cold_users_beats_positions_on_real_plays(data_dir):
    """Last.fm users whose plays are all held out: before, everybody got the first artists by position."""
    plays = hmf.Ratings.from_file(data_dir / "lastfm-2k" / "user_artists.dat.gz")
    train, test = hmf.split(plays, 0.2, random_state=0)
    hidden = np.random.default_rng(0).choice(plays.n_users, 300, replace=False)
    matrix = train.user_items.tolil()
    matrix[hidden] = 0
    train = hmf.Ratings.from_matrix(sp.csr_array(matrix), user_ids=plays.user_ids, item_ids=plays.item_ids)
    model = hmf.ImplicitALS(factors=16, iterations=4, alpha=0.01, random_state=0, device="cpu").fit(train)
    found = evaluate(model, test, train=train, metrics="ndcg@10", users=hidden)
    assert found.n_users == found.n_cold_users > 250
    baseline = evaluate(PopularityRecommender().fit(train), test, train=train, metrics="ndcg@10", users=hidden)
    assert found == baseline
    first = np.tile(np.arange(10), (plays.n_users, 1))
    by_position = hmf.metrics.ndcg_at_k(first, test.user_items, 10, gains="binary")[hidden]
    assert found["ndcg@10"] > 2 * np.nanmean(by_position)
    warm = evaluate(model, test, train=train, metrics="ndcg@10", users="warm")
    assert warm.n_cold_users == 0 and warm["ndcg@10"] > 0


# ------------------------------------------------------------------------------------------- dislikes, zero solutions

DISLIKED = 5


def signed() -> sp.csr_array:
    """`MATRIX` with an item that everybody dislikes, and other dislikes."""
    matrix = MATRIX.tolil()
    matrix[WARM, DISLIKED] = -3
    matrix[WARM[:9], 7] = -1
    return sp.csr_array(matrix)


def likes_of(matrix: sp.csr_array) -> np.ndarray:
    return np.count_nonzero(matrix.toarray() > 0, axis=0)


def assert_ranks_by_likes(model, likes: np.ndarray) -> None:
    order, _ = reference.top_k(likes[None].astype(float), len(likes), (likes == 0)[None])
    answers = [
        model.recommend(17, N=len(likes), filter_already_liked_items=False),
        model.recommend_new(sp.csr_array((1, len(likes))), N=len(likes)),
    ]
    for ids, scores in answers:
        np.testing.assert_array_equal(np.ravel(ids), order[0])
        found = np.ravel(ids) >= 0
        np.testing.assert_array_equal(np.ravel(scores)[found], likes[np.ravel(ids)[found]])
    listed = sp.csr_array(np.ones((1, len(likes))))
    ids, _ = model.recommend([17], N=len(likes), filter_already_liked_items=False, items=listed)
    np.testing.assert_array_equal(ids, order)


@pytest.mark.parametrize("kind", UNBIASED)
def test_popularity_is_the_number_of_likes(kind):
    assert_ranks_by_likes(MODELS[kind]().fit(signed()), likes_of(signed()))
    everything = np.zeros(M, dtype=np.int64)
    model = PopularityRecommender().fit(signed())
    np.testing.assert_array_equal(model.item_likes_, likes_of(signed()))
    ids, scores = model.recommend(everything, N=N_ITEMS, filter_already_liked_items=False)
    np.testing.assert_array_equal(ids[0], np.argsort(-likes_of(signed()), kind="stable"))
    np.testing.assert_array_equal(scores[0], likes_of(signed())[ids[0]])


def test_likes_survive_files_stores_ranks_weights_and_updates(tmp_path):
    matrix, likes = signed(), likes_of(signed())
    hmf.Ratings.from_matrix(matrix).save(tmp_path / "ratings.npz")
    hmf.convert(tmp_path / "ratings.npz", tmp_path / "store")
    weights = sp.csr_array((np.full(matrix.nnz, 2.0), matrix.indices, matrix.indptr), shape=matrix.shape)
    models = {
        "memory": MODELS["implicit"]().fit(matrix),
        "store": MODELS["implicit"]().fit(hmf.Store.open(tmp_path / "store")),
        "weights": MODELS["implicit"]().fit(matrix, weights=weights),
        "ranks": run_ranks(
            2, lambda c: fit_rank(MODELS["implicit"](), WholeRatings(matrix.astype(np.float32)), c), timeout=30
        )[0],
    }
    rows = np.zeros((2, N_ITEMS), dtype=np.float32)
    rows[:, 0], rows[:, 1] = 1, -1
    for name, model in models.items():
        for include_seen in (True, False):
            model.save(tmp_path / f"{name}.safetensors", include_seen=include_seen)
            loaded = hmf.load(tmp_path / f"{name}.safetensors")
            assert_ranks_by_likes(loaded, likes)
            loaded.partial_fit_users([M, M + 1], rows)
            assert_ranks_by_likes(loaded, likes + 2 * (np.arange(N_ITEMS) == 0))
            column = np.zeros((M + 2, 1), dtype=np.float32)
            column[:6], column[6:30] = 1, -1
            loaded.partial_fit_items([N_ITEMS], column)
            assert_ranks_by_likes(loaded, np.append(likes + 2 * (np.arange(N_ITEMS) == 0), 6))


@pytest.mark.parametrize("damage", [lambda likes: likes[:-1], lambda likes: -likes - 1, lambda likes: likes + 10**6])
def test_likes_that_contradict_a_file_are_refused(damage, tmp_path):
    MODELS["implicit"]().fit(signed()).save(tmp_path / "model")
    with safetensors.safe_open(tmp_path / "model", "numpy") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del header["checksums"]
    tensors["item_likes"] = damage(tensors["item_likes"])
    safetensors.numpy.save_file(tensors, tmp_path / "model", header)
    with pytest.raises(ModelFileError, match="item_likes contradicts item_counts"):
        hmf.load(tmp_path / "model")


@pytest.mark.parametrize("options", [{}, {"nonnegative": True}], ids=["rated 0", "at the bound"])
def test_an_item_whose_solution_is_zero_is_not_cold(options, tmp_path):
    """Its prediction of 0 is the answer; items without ratings, or rated in an update of users only, have none."""
    matrix = MATRIX.tolil()
    matrix[WARM, DISLIKED] = -1 if options else 0  # lil drops zeros: they are entries of the matrix below
    dense = matrix.toarray().astype(np.float32)
    rated = dense != 0
    rated[WARM, DISLIKED] = True
    rows, columns = np.nonzero(rated)
    matrix = sp.csr_array((dense[rows, columns], (rows, columns)), shape=dense.shape)
    model = MODELS["explicit"](**options).fit(matrix)
    assert not model.item_factors_[DISLIKED].any()
    model.save(tmp_path / "model")
    for one in (model, hmf.load(tmp_path / "model")):
        np.testing.assert_array_equal(one.cold_items_.nonzero()[0], [EMPTY_ITEM])
        ids, scores = one.recommend(WARM, N=N_ITEMS, filter_already_liked_items=False)
        assert np.all(scores[ids == DISLIKED] == 0) and np.count_nonzero(ids == DISLIKED) == len(WARM)
        assert DISLIKED in one.export_items()[1]
    users = np.zeros((1, N_ITEMS), dtype=np.float32)
    users[0, [EMPTY_ITEM, 0]] = 5
    model.partial_fit_users([M], users)
    assert model.cold_items_[EMPTY_ITEM] and not model.cold_items_[DISLIKED]
