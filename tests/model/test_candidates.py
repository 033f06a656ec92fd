"""Allow and deny lists for each user, neighbours among candidates, and explanations."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import safetensors.numpy
import scipy.sparse as sp
import threadpoolctl

import hybridmf as hmf
from hybridmf.errors import RatingsError, UnknownLabelError
from hybridmf.native import _topk
from support.messages import says
from support.ratings import planted
from support.served_models import EMPTY_ITEM, EMPTY_USER, KINDS, N_ITEMS, M, fitted, labelled, make


def lists(seed, low=0, high=12):
    """Some items for each user, with repeats; one list is empty."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, N_ITEMS, rng.integers(low, high)).tolist() for _ in range(M)]
    drawn[3] = []
    return drawn


def matrix_of(chosen):
    dense = np.zeros((M, N_ITEMS))
    for user, items in enumerate(chosen):
        dense[user, items] = 1
    return sp.csr_array(dense)


def one_by_one(model, allowed, denied, **options):
    answers = []
    for user in range(M):
        given = {} if allowed is None else {"items": np.array(allowed[user], dtype=int)}
        answers.append(model.recommend(user, filter_items=np.array(denied[user], dtype=int), **given, **options))
    return tuple(np.array(part) for part in zip(*answers, strict=True))


def assert_alike(found, expected):
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        *(
            (kind, options)
            for kind in ("biases", "implicit64")
            for options in ({"filter_already_liked_items": False}, {"cold_users": "mask"})
        ),
    ],
)
def test_lists_for_each_user_are_lists_for_one_user_after_another(kind, options):
    model, allowed, denied = fitted(kind), lists(1), lists(2)
    everybody = np.arange(M)
    deny_only = one_by_one(model, None, denied, N=8, **options)
    assert_alike(model.recommend(everybody, N=8, filter_items=denied, **options), deny_only)
    assert_alike(model.recommend(everybody, N=8, filter_items=matrix_of(denied), **options), deny_only)
    both = one_by_one(model, allowed, denied, N=8, **options)
    for given in (allowed, matrix_of(allowed)):
        assert_alike(model.recommend(everybody, N=8, items=given, filter_items=denied, **options), both)
    assert (both[0][3] == -1).all() and (both[0] >= 0).any()


def test_lists_for_all_and_for_each_user_together():
    model, allowed = fitted("implicit"), lists(1)
    shared = [k for k in range(N_ITEMS) if k % 2]
    expected = one_by_one(model, [[k for k in one if k % 2 == 0] for one in allowed], [[]] * M, N=5)
    assert_alike(model.recommend(np.arange(M), N=5, items=allowed, filter_items=shared), expected)
    denied = lists(2)
    expected = one_by_one(model, [shared] * M, denied, N=5)
    assert_alike(model.recommend(np.arange(M), N=5, items=shared, filter_items=denied), expected)


def test_lists_of_labels_in_every_method(monkeypatch):
    model, allowed, denied = make("implicit").fit(labelled()), lists(1), lists(2)
    names = [[[f"i{k}" for k in one] for one in chosen] for chosen in (allowed, denied)]
    expected, _ = model.recommend(np.arange(M), N=5, items=allowed, filter_items=denied)
    users = [f"u{k}" for k in range(M)]
    found, _ = model.recommend(users, N=5, items=names[0], filter_items=names[1], labels=True)
    np.testing.assert_array_equal(found, np.array([[None if k < 0 else f"i{k}" for k in row] for row in expected]))
    new, _ = model.recommend_new(labelled(), N=5, items=names[0], filter_items=names[1], labels=True)
    np.testing.assert_array_equal(new, found)
    allow = labelled(matrix_of(allowed))[np.random.default_rng(0).permutation(M)]
    np.testing.assert_array_equal(
        model.recommend(users, N=5, items=allow, filter_items=names[1], labels=True)[0], found
    )
    monkeypatch.setattr("hybridmf.model.tables.BLOCK_USERS", 7)
    table = model.recommend_all(N=5, items=names[0], filter_items=names[1])
    assert table["item"].tolist() == [item for row in found for item in row if item is not None]


def test_a_gpu_takes_lists_for_each_user_as_the_cpu_does(gpu, monkeypatch):
    models = [make("implicit", device=device).fit(planted()) for device in ("cpu", "cuda")]
    monkeypatch.setattr("hybridmf.model.engine.GPU_SCORES", 0)
    for options in ({"filter_items": lists(2)}, {"items": lists(1)}):
        on_cpu, on_gpu = (model.recommend(np.arange(M), N=5, **options) for model in models)
        np.testing.assert_array_equal(on_gpu[0], on_cpu[0])
        np.testing.assert_allclose(on_gpu[1], on_cpu[1], rtol=1e-3, atol=1e-4)
    close = [model.similar_items(np.arange(N_ITEMS), N=4, items=np.arange(0, N_ITEMS, 2)) for model in models]
    np.testing.assert_array_equal(close[0][0], close[1][0])
    whys = [model.explain(5, 3) for model in models]
    assert whys[0].score == pytest.approx(whys[1].score, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "kind", "parts"),
    [
        ({"items": [[1], [2]]}, ValueError, ("items has 2 lists of items; expected one for each of 3 users",)),
        ({"filter_items": [[1], [N_ITEMS], []]}, ValueError, (f"filter_items has {N_ITEMS} at position 1",)),
        ({"items": sp.csr_array((2, N_ITEMS))}, RatingsError, ("items has shape (2, 40)", "n_userids=3")),
        ({"items": [[1], [2], [1.5]]}, TypeError, ("items must be integers",)),
    ],
)
def test_lists_that_cannot_be_used(options, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        fitted("implicit").recommend([0, 1, 2], **options)


# --------------------------------------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize("kind", ["implicit", "biases"])
def test_neighbours_among_candidates(kind):
    model = fitted(kind)
    whole, cosines = model.similar_items(np.arange(N_ITEMS), N=N_ITEMS)
    allowed = [k for k in range(0, N_ITEMS, 2) if k not in (4, 6)]
    found, scores = model.similar_items(np.arange(N_ITEMS), N=7, items=range(0, N_ITEMS, 2), filter_items=[4, 6])
    for item in range(N_ITEMS):
        if item == EMPTY_ITEM:
            assert (found[item] == -1).all()
            continue
        kept = np.isin(whole[item], allowed)
        np.testing.assert_array_equal(found[item], whole[item][kept][:7])
        np.testing.assert_allclose(scores[item], cosines[item][kept][:7], rtol=1e-5, atol=1e-6)
    users, _ = model.similar_users(5, N=3, users=[1, 2, EMPTY_USER], filter_users=[1])
    assert users.tolist() == [2, -1, -1]
    with pytest.raises(ValueError, match="filter_users has 60 at position 0"):
        model.similar_users(5, filter_users=[M])


def test_neighbours_by_label_among_candidates():
    model = make("implicit").fit(labelled())
    found, _ = model.similar_items("i3", N=2, items=["i3", "i5", "i6"], filter_items=["i6"], labels=True)
    assert found.tolist() == ["i3", "i5"]
    with pytest.raises(UnknownLabelError, match="items: unknown item label"):
        model.similar_items("i3", items=["i99"], labels=True)


# -------------------------------------------------------------------------------------------------------------- explain

EXACT = [*KINDS, "count", "unobserved"]


def explained(kind):
    options = {"count": {"regularization_scaling": 0.5}, "unobserved": {"unobserved_weight": 0.2}}.get(kind, {})
    return fitted({"count": "biases", "unobserved": "implicit"}.get(kind, kind), **options)


@pytest.mark.parametrize("kind", EXACT)
def test_contributions_add_up_to_the_score(kind):
    model = explained(kind)
    for user, item in ((5, 3), (0, 20), (7, 7)):
        why = model.explain(user, item, N=N_ITEMS)
        assert why.score == pytest.approx(model.predict(user, item, clip=False), rel=2e-3, abs=2e-3)
        assert why.baseline + why.contributions.sum() == pytest.approx(why.score)
        assert sorted(why.ids) == sorted(planted()[[user]].indices)
        assert np.all(np.diff(why.contributions) <= 0) and why.ids.dtype == np.int32
        short = model.explain(user, item, N=2)
        np.testing.assert_array_equal(short.ids, why.ids[:2])
        assert short.score == why.score
    assert model.explain(EMPTY_USER, 3).ids.shape == (0,)


def test_a_contribution_is_what_the_score_loses_without_the_weight_of_the_entry():
    """Explicit feedback is linear in the ratings: raising one by 1 raises the score by its share."""
    model, rows = fitted("explicit64"), planted()
    row = rows[[5]].toarray()
    why = model.explain(5, 3, N=N_ITEMS)
    for item, part in zip(why.ids[:3], why.contributions[:3], strict=True):
        raised = row.copy()
        raised[0, item] += 1
        gain = model.explain(5, 3, raised).score - why.score
        assert gain == pytest.approx(part / row[0, item], rel=1e-8)


def test_explanations_are_those_of_implicit():
    pytest.importorskip("implicit")
    from implicit.cpu.als import AlternatingLeastSquares

    counts = sp.csr_matrix(planted())
    with threadpoolctl.threadpool_limits(1, "blas"):  # implicit warns of more
        theirs = AlternatingLeastSquares(factors=4, regularization=0.01, iterations=1, use_cg=False, random_state=0)
    theirs.item_factors = fitted("implicit", alpha=1.0).item_factors
    theirs.user_factors = fitted("implicit", alpha=1.0).user_factors
    theirs._YtY = None
    confidence = counts.copy()
    confidence.data = 1 + np.abs(confidence.data)
    total, best, _ = theirs.explain(5, confidence, 3, N=4)
    why = fitted("implicit", alpha=1.0).explain(5, 3, N=4)
    assert why.score == pytest.approx(total, rel=1e-3)
    assert why.ids.tolist() == [item for item, _ in best]
    np.testing.assert_allclose(why.contributions, [part for _, part in best], rtol=1e-3)


def test_explanations_by_label_and_of_loaded_models(tmp_path):
    model = make("implicit").fit(labelled())
    why = model.explain("u5", "i3", N=3, labels=True)
    assert why.ids.tolist() == [f"i{k}" for k in model.explain(5, 3, N=3).ids]
    model.save(tmp_path / "model")
    model.save(tmp_path / "bare", include_seen=False)
    for copy in (hmf.load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
        assert copy.explain("u5", "i3", labels=True).score == why.score
    bare = hmf.load(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"does not hold the training entries of its users.*pass user_items"):
        bare.explain(5, 3)
    for given in (labelled(), planted()[[5]]):
        assert bare.explain("u5", "i3", given, labels=True).score == pytest.approx(why.score)
    with pytest.raises(ValueError, match="explain takes one user and one item"):
        model.explain([1, 2], 3, planted())
    with pytest.raises(UnknownLabelError, match="itemid: unknown item label 'i99'"):
        model.explain("u5", "i99", labels=True)


@pytest.mark.parametrize("kind", ["explicit", "implicit64"])
def test_updates_keep_the_values_of_histories(kind):
    rows, model = planted(5, N_ITEMS, density=0.3, seed=6)[[0, 4]], fitted(kind)
    model.partial_fit_users([5, M], rows)
    assert model.explain(M, 3).score == pytest.approx(model.explain(M, 3, rows[[1]]).score)
    columns = planted(M + 1, 1, density=0.5, seed=7)
    model.partial_fit_items([3], columns)
    whole = planted().toarray()
    whole[5] = rows.toarray()[0]
    whole = np.vstack([whole, rows.toarray()[1:]])
    whole[:, 3] = columns.toarray()[:, 0]
    for user in (0, 5, M):
        why, expected = (
            model.explain(user, 7, N=N_ITEMS),
            model.explain(user, 7, sp.csr_array(whole)[[user]], N=N_ITEMS),
        )
        assert why.score == pytest.approx(expected.score)
        np.testing.assert_array_equal(why.ids, expected.ids)


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        (np.ones(900), {"seen_values": 1}),
        (np.arange(900) % 5, {"seen_values": 5, "seen_codes": 900}),
        (np.arange(900), {"seen_values": 900}),
    ],
)
def test_values_are_stored_in_little_room(tmp_path, values, sizes):
    ratings = hmf.Ratings.from_coo(np.arange(900) // 30, np.arange(900) % 30, values)
    model = hmf.ExplicitALS(factors=2, iterations=1, random_state=0, device="cpu").fit(ratings)
    model.save(tmp_path / "model")
    tensors = safetensors.numpy.load_file(tmp_path / "model")
    found = {name: len(tensors[name]) for name in ("seen_values", "seen_codes") if name in tensors}
    assert found == sizes
    np.testing.assert_array_equal(hmf.load(tmp_path / "model")._learned.values, values)


def test_the_mean_of_items_as_a_baseline():
    rows = planted()
    baseline = hmf.metrics.PopularityRecommender(rank_by="mean").fit(rows)
    ids, scores = baseline.recommend(0, N=5, filter_already_liked_items=False)
    np.testing.assert_array_equal(ids, np.argsort(-baseline.item_means_, kind="stable")[:5])
    np.testing.assert_allclose(scores, baseline.item_means_[ids], rtol=1e-6)
    np.testing.assert_array_equal(baseline.item_factors[:, 0], baseline.item_means_.astype(np.float32))
    train, test = hmf.split(rows, 0.2, random_state=0)
    assert hmf.evaluate(baseline.fit(train), test, train=train, metrics=("ndcg@5", "auc", "rmse"))["auc"] > 0
    with pytest.raises(ValueError, match="rank_by must be one of 'count', 'mean'"):
        hmf.metrics.PopularityRecommender(rank_by="stars").fit(rows)


def test_a_short_deny_list_packs_no_items_anew(monkeypatch):
    """Packing takes longer than all else of a request; a long list is worth it."""
    model, packed = fitted("implicit"), []
    model.recommend(0)
    make = _topk.pack
    monkeypatch.setattr(_topk, "pack", lambda *given: (packed.append(1), make(*given))[1])
    ids, _ = model.recommend(0, N=N_ITEMS, filter_items=[3, 5])
    assert not packed and not {3, 5} & set(ids.tolist())
    model.recommend(0, filter_items=np.arange(N_ITEMS - 3))
    assert packed
    np.testing.assert_array_equal(model.recommend(np.arange(M), N=N_ITEMS, filter_items=[3, 5])[0][0], ids)
