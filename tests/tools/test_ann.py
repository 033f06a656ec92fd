"""Vectors for other libraries: DLPack, `export_items`, and indexes of faiss and usearch."""

from __future__ import annotations

import sys
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.exceptions import NotFittedError

import hybridmf as hmf
from hybridmf import ann
from support.ratings import planted

PLAYS = planted(300, 200, 0.1)


@pytest.fixture(scope="module", params=["implicit", "explicit"])
def model(request):
    """With labels; item 3 has no entries, user 5 none either."""
    plays = PLAYS.tolil()
    plays[:, 3] = 0
    plays[5] = 0
    plays = sp.csr_array(plays)
    ratings = hmf.Ratings(plays, np.array([f"u{k}" for k in range(300)]), np.array([f"i{k}" for k in range(200)]))
    cls = hmf.ImplicitALS if request.param == "implicit" else hmf.ExplicitALS
    return cls(factors=8, iterations=4, random_state=0, device="cpu").fit(ratings)


def test_factors_leave_through_dlpack_without_a_copy(model):
    for factors in (model.user_factors, model.item_factors, model.item_factors_):
        shared = np.from_dlpack(factors)
        assert np.shares_memory(shared, factors) and shared.dtype == np.float32
        np.testing.assert_array_equal(shared, factors)
    assert np.shares_memory(model.item_factors, model.item_factors_)  # float32 models hold no other copy


def test_factors_of_a_file_leave_through_dlpack(model, tmp_path):
    model.save(tmp_path / "m.safetensors")
    loaded = hmf.load(tmp_path / "m.safetensors")
    shared = np.from_dlpack(loaded.item_factors)
    assert np.shares_memory(shared, loaded.item_factors_)
    np.testing.assert_array_equal(shared, model.item_factors)


class Tensor:
    """What another library's array offers."""

    def __init__(self, array):
        self._array, self.ndim = np.asarray(array), np.ndim(array)

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_histories_and_lists_come_in_through_dlpack(model):
    ids, _ = model.recommend(np.arange(300), N=4)
    test = hmf.Ratings(PLAYS, model.user_ids, model.item_ids)
    found, expected = (hmf.evaluate(each, test, metrics=("recall@4", "ndcg@2")) for each in (Tensor(ids), ids))
    assert found == expected
    if model._learned.objective.is_implicit:
        expected = model.recommend_new([8, 2, 40], N=3)
        for history in (Tensor([8, 2, 40]), np.array([8, 2, 40]), {8, 2, 40}):
            np.testing.assert_array_equal(model.recommend_new(history, N=3)[0], expected[0])
        some = model.recommend_new(range(2, 8, 3), N=3)
        np.testing.assert_array_equal(some[0], model.recommend_new([2, 5], N=3)[0])


def test_factors_come_in_through_dlpack(model):
    users, items = (np.from_dlpack(Tensor(each)) for each in (model.user_factors, model.item_factors))
    again = hmf.ImplicitALS(factors=8, iterations=1, init=(users, items), device="cpu").fit(PLAYS)
    same = hmf.ImplicitALS(factors=8, iterations=1, init=(model.user_factors, None), device="cpu").fit(PLAYS)
    np.testing.assert_array_equal(again.item_factors, same.item_factors)


def test_products_of_exported_vectors_are_the_scores(model):
    vectors, ids = model.export_items()
    assert vectors.dtype == np.float32 and vectors.flags.c_contiguous
    warm = np.flatnonzero(~model.cold_items_)
    assert 3 not in warm and ids.tolist() == [f"i{k}" for k in warm]
    np.testing.assert_array_equal(model.export_items(labels=False)[1], warm)
    queries = model.export_users()
    assert queries.shape == (300, vectors.shape[1])
    np.testing.assert_array_equal(model.export_users([7, 9]), queries[[7, 9]])
    np.testing.assert_array_equal(model.export_users(7), queries[7])
    np.testing.assert_array_equal(model.export_users("u7", labels=True), queries[7])
    np.testing.assert_array_equal(model.export_users(["u9", "u7"], labels=True), queries[[9, 7]])
    found, scores = model.recommend("u7", N=5, labels=True)
    by_label = dict(zip(ids.tolist(), (vectors @ queries[7]).tolist(), strict=True))
    assert [by_label[label] for label in found] == pytest.approx(scores.tolist(), rel=1e-5)
    with pytest.raises(ValueError, match="userid has 300"):
        model.export_users(300)


def exact_search(model):
    """A search that misses nothing, and returns fewer results than requested."""
    vectors, _ = model.export_items(labels=False)

    def search(queries, k):
        products = queries @ vectors.T
        places = np.argsort(-products, axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(products, places, axis=1)
        return np.where(np.arange(k) < 150, places, -1), found

    return search


def test_an_index_excludes_seen_items(model):
    index = ann.AnnIndex(model, exact_search(model))
    users = np.array([0, 5, 7, 299])
    ids, scores = index.recommend(users, N=6)
    expected, their_scores = model.recommend(users, N=6, cold_users="mask")
    warm = users != 5
    np.testing.assert_array_equal(ids[warm], expected[warm])
    np.testing.assert_allclose(scores[warm], their_scores[warm], rtol=1e-5)
    if model.user_bias_ is None:
        assert (ids[~warm] == -1).all() and np.isneginf(scores[~warm]).all()
    np.testing.assert_array_equal(index.recommend(7, N=6)[0], expected[2])
    everything, _ = index.recommend(users, N=6, filter_already_liked_items=False)
    np.testing.assert_array_equal(
        everything[warm], model.recommend(users, N=6, filter_already_liked_items=False)[0][warm]
    )
    rows = sp.csr_array(np.tile(np.arange(200) < 100, (4, 1)).astype(np.float32))
    assert index.recommend(users, rows, N=6)[0].max() >= 100 > 0
    assert index.recommend([7], rows[:1], N=6)[0].min() >= 100
    assert (index.recommend(7, N=180)[0] >= 0).sum() <= 150
    assert index.recall(np.arange(300)) == 1.0


def test_an_index_of_other_items_than_those_of_the_model_is_refused(model):
    changed = deepcopy(model)
    index = ann.AnnIndex(changed, exact_search(changed))
    changed.partial_fit_users([3], np.eye(1, 200, dtype=np.float32))
    index.recommend(3)  # items are the same
    changed.partial_fit_items([4], np.eye(300, 1, dtype=np.float32))
    with pytest.raises(ValueError, match="the items of the model have changed since this index was made"):
        index.recommend(3)


def test_recall_counts_missed_items(model):
    search = exact_search(model)
    half = ann.AnnIndex(model, lambda queries, k: tuple(part[:, ::2] for part in search(queries, 2 * k)))
    assert 0.3 < half.recall(np.arange(300)) < 0.8


@pytest.mark.parametrize(("library", "make"), [("faiss", ann.faiss_index), ("usearch", ann.usearch_index)])
def test_indexes_of_other_libraries_find_nearly_all(model, library, make, monkeypatch):
    pytest.importorskip(library)
    index = make(model, num_threads=1)
    assert index.recall(np.arange(300)) > 0.95
    ids, scores = index.recommend(7, N=5)
    expected, their_scores = model.recommend(7, N=5)
    assert len(np.intersect1d(ids, expected)) >= 4
    np.testing.assert_allclose(scores[0], their_scores[0], rtol=1e-4)
    assert index.index is not None
    with pytest.raises(ValueError, match="neighbors must satisfy"):
        make(model, neighbors=1)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.index", None)
    with pytest.raises(ImportError, match=r'pip install "hybridmf\[ann\]"'):
        make(model)


def test_factors_for_pytorch_are_copies(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_dlpack=np.from_dlpack))
    users, items = model.to_torch()
    for copy, factors in ((users, model.user_factors_), (items, model.item_factors_)):
        np.testing.assert_array_equal(copy, factors)
        assert copy.flags.writeable and not np.shares_memory(copy, factors)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        model.to_torch()
    with pytest.raises(NotFittedError):
        hmf.ImplicitALS().to_torch()
