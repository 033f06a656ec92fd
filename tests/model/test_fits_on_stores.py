"""Fits on a store have the bits of fits in memory."""

from __future__ import annotations

import logging
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.validate import as_csr
from hybridmf.data.store import StoreMatrix
from hybridmf.errors import MemoryBudgetError, ModelFileError, RatingsError
from support.ratings import planted

SLAB = 1500
"""Bytes of a slab: a quarter of the ratings here."""

# ------------------------------------------------------------------------------------------------------- damage


@pytest.fixture
def store(tmp_path) -> hmf.Store:
    """`planted()` with labels, in slabs of a few rows."""
    ids = {"user_ids": [f"u{k}" for k in range(60)], "item_ids": np.arange(40) * 3}
    return hmf.convert(hmf.Ratings.from_matrix(planted(), **ids), tmp_path / "store", slab_bytes=SLAB)


# ------------------------------------------------------------------------------------------------------- fits

FITS = {
    "explicit": (hmf.ExplicitALS, {"biases": False}),
    "biases": (hmf.ExplicitALS, {"biases": True}),
    "biases, float64, balance": (hmf.ExplicitALS, {"biases": True, "dtype": "float64", "balance": True}),
    "explicit cg": (hmf.ExplicitALS, {"biases": False, "solver": "cg", "regularization_scaling": 0.5}),
    "rank1": (hmf.ExplicitALS, {"biases": False, "assembly": "rank1"}),
    "bals": (hmf.ExplicitALS, {"biases": False, "assembly": "bals"}),
    "implicit": (hmf.ImplicitALS, {"alpha": 3.0}),
    "implicit cg": (hmf.ImplicitALS, {"solver": "cg"}),
    "implicit blas3": (hmf.ImplicitALS, {"assembly": "blas3"}),
    "subspace": (hmf.ImplicitALS, {"solver": "subspace", "block_size": 2}),
    "implicit balance": (hmf.ImplicitALS, {"balance": True, "regularization_scaling": "count"}),
}


def fitted(kind: str, data: Any, fit: dict[str, Any] | None = None, **options: Any) -> Any:
    cls, own = FITS[kind]
    common = {"factors": 4, "iterations": 2, "random_state": 0, "device": "cpu"}
    return cls(**(common | own | options)).fit(data, **(fit or {}))


def assert_same_fit(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(one.user_factors_, other.user_factors_)
    np.testing.assert_array_equal(one.item_factors_, other.item_factors_)
    for name in ("user_bias_", "item_bias_"):
        if getattr(other, name) is not None:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.mean_ == other.mean_
    hidden = ("seconds",)
    for mine, theirs in zip(one.history_, other.history_, strict=True):
        assert {k: v for k, v in mine.items() if k not in hidden} == {
            k: v for k, v in theirs.items() if k not in hidden
        }


@pytest.mark.parametrize("kind", FITS)
def test_a_fit_on_a_store_has_the_bits_of_one_in_memory(kind, tmp_path):
    matrix = planted()
    matrix.data[::9] = 0  # entries for explicit feedback, none for implicit
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes=SLAB)
    look = {"callback": lambda model, record: None}
    model = fitted(kind, store, look)
    assert model.plan_.streamed == "disk"
    assert_same_fit(model, fitted(kind, matrix, look, reorder="none"))


def test_long_rows_too(tmp_path):
    from hybridmf.native import _als

    matrix = planted(6, _als.LONG_ROW + 500, 0.98)
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes="64KiB")
    assert_same_fit(fitted("implicit", store, iterations=1), fitted("implicit", matrix, iterations=1))


def test_observers_and_serving_see_no_difference(store, tmp_path):
    ratings = store.to_ratings()
    train, test = hmf.split(ratings, 0.2, random_state=0)
    stored = hmf.convert(train, tmp_path / "train", slab_bytes=SLAB)
    for kind in ("explicit", "implicit"):
        one, other = (fitted(kind, data, {"validation": test}) for data in (stored, train))
        assert_same_fit(one, other)
        users = np.array([59, 0, 7, 30, 7])
        for found, expected in zip(one.recommend(users, N=5), other.recommend(users, N=5), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert one.score(test) == other.score(test)
        assert one.score(stored) == other.score(train)
        assert one.objective(stored) == other.objective(train)
        np.testing.assert_array_equal(one.transform(stored), other.transform(train))
        np.testing.assert_array_equal(one.predict(stored), other.predict(train))
        assert one.user_ids_.tolist() == other.user_ids_.tolist()
        assert_same_fit(pickle.loads(pickle.dumps(one)), other)
        for model in (one, other):
            model.partial_fit_users(3, train.user_items[:1])
        np.testing.assert_array_equal(one.recommend(3)[0], other.recommend(3)[0])


def test_a_model_of_a_store_is_saved_with_seen_items_if_they_fit(store, tmp_path, monkeypatch):
    model = fitted("explicit", store)
    model.save(tmp_path / "model.safetensors")
    loaded = hmf.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.recommend(4)[0], model.recommend(4)[0])
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 100)
    with pytest.raises(MemoryBudgetError, match=r"a matrix of the seen items takes .* include_seen=False"):
        model.save(tmp_path / "other.safetensors")
    model.save(tmp_path / "other.safetensors", include_seen=False)
    with pytest.raises(ValueError, match="saved without seen items"):
        hmf.load(tmp_path / "other.safetensors").recommend(4)


@pytest.mark.parametrize(("first", "second"), [("store", "memory"), ("memory", "store")])
def test_a_fit_resumes_on_a_store_and_off_it(first, second, store, tmp_path):
    data = {"store": store, "memory": store.to_ratings()}
    for kind in ("biases, float64, balance", "implicit"):
        folder = tmp_path / f"{kind[:3]}"
        fitted(kind, data[first], {"checkpoint": folder}, iterations=2)
        model = fitted(kind, data[second], {"resume_from": folder}, iterations=4)
        assert model.n_iter_ == 4
        assert_same_fit(model, fitted(kind, data[first], iterations=4))
    other = hmf.convert(planted(seed=3), tmp_path / "other")
    with pytest.raises(ModelFileError, match="was written for other data"):
        fitted("implicit", other, {"resume_from": tmp_path / "imp"})


def test_reordering_needs_all_ratings(store):
    for how in ("both", "rows", True):
        with pytest.raises(ValueError, match=r"reorder='\w+' needs all ratings in memory.*store\.to_ratings\(\)"):
            fitted("explicit", store, reorder=how)
    assert fitted("bals", store).plan_.reorder == "none"


def test_sgd_and_ccd_load_a_store_if_there_is_memory(store, monkeypatch, caplog):
    ratings = store.to_ratings()
    for model in (
        hmf.SGD(factors=3, iterations=2, device="cpu", random_state=0),
        hmf.CCD(factors=3, iterations=2, device="cpu", random_state=0),
    ):
        with caplog.at_level(logging.INFO, "hybridmf"):
            found = model.fit(store).user_factors.copy()
        assert "loading the store" in caplog.text
        assert model.user_ids_.tolist() == ratings.user_ids.tolist()
        np.testing.assert_array_equal(found, model.fit(ratings).user_factors)
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 100)
    with pytest.raises(MemoryBudgetError, match="ExplicitALS and ImplicitALS fit a store without loading it"):
        model.fit(store)


@pytest.mark.usefixtures("small_product")
def test_plan_and_compare_take_a_store(store):
    plan = hmf.plan(store, hmf.ExplicitALS(biases=False, factors=4, device="cpu"))
    largest = max(slab.matrix().nnz for side in ("user", "item") for slab in store.slabs(side))
    assert (plan.streamed, plan.slab) == ("disk", largest)
    assert f"streamed  from disk in slabs of up to {largest:,} entries" in str(plan)
    whole = hmf.plan(store.to_ratings(), hmf.ExplicitALS(biases=False, factors=4, device="cpu"))
    assert (whole.streamed, whole.slab) == ("", 0)
    assert plan.bytes["ratings"] < whole.bytes["ratings"]
    result = hmf.compare(store, hmf.ExplicitALS(biases=False, factors=2, iterations=1), devices=["cpu"])
    assert result.name == "store"


def test_a_fit_on_a_store_holds_no_more_than_a_few_slabs(tmp_path):
    matrix = as_csr(planted(700, 420, 0.7))
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes="32KiB")
    options = {"num_threads": 1, "iterations": 1}
    fitted("explicit", store, **options)
    tracemalloc.start()  # which makes a fit ten times as slow
    try:
        fitted("explicit", store, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * matrix.nnz  # a quarter of both orientations


def test_a_store_without_entries_is_refused(tmp_path):
    store = hmf.convert(sp.csr_array((3, 4)), tmp_path / "store")
    with pytest.raises(RatingsError, match="has no entries"):
        fitted("explicit", store)


def test_threads_read_slabs_at_the_same_time(tmp_path):
    matrix = StoreMatrix(hmf.convert(planted(60, 40, 0.3), tmp_path / "store", slab_bytes="4KiB"))
    with ThreadPoolExecutor(4) as pool:
        slabs = list(pool.map(lambda _: [matrix.matrix(slab) for slab in range(len(matrix.bounds) - 1)], range(4)))
    for several in zip(*slabs, strict=True):
        for other in several[1:]:
            np.testing.assert_array_equal(other.toarray(), several[0].toarray())
