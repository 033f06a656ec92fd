"""Stores and npz files of ratings that earlier versions wrote, in tests/fixtures, hold what was written."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.data import manifest
from support.old_files import (
    cases,
    columns,
    folders,
    matrix_of,
    plain,
    store_facts,
)
from support.stores import assert_same_matrix

STORES, SAVED = list(cases("stores")), list(cases("ratings"))
METHODS = [hmf.ExplicitALS, hmf.SGD, hmf.ImplicitALS, hmf.CCD]
SMALL = {"factors": 3, "iterations": 2, "random_state": 0, "device": "cpu", "num_threads": 1}


@pytest.mark.parametrize(("folder", "name", "case"), STORES)
def test_a_store_of_an_earlier_version_holds_what_was_converted(folder, name, case, tmp_path):
    store = hmf.Store.open(folder / "stores" / name)
    store.verify()
    assert store_facts(store) == case["facts"]
    matrix = matrix_of(folder, case["values"])
    kept = [np.arange(count) for count in matrix.shape]
    if case.get("text"):  # which has no rows and columns without entries
        kept = [np.unique(each) for each in matrix.tocoo().coords]
    assert_same_matrix(store.user_items, hmf.Ratings(matrix[kept[0]][:, kept[1]]).user_items)
    again = hmf.convert(store, tmp_path / "again", slab_bytes="64MiB")
    assert_same_matrix(again.user_items, store.user_items)
    for name, rows in zip(("user_ids", "item_ids"), kept, strict=True):
        wanted = None if name not in case else [case[name][row] for row in rows]
        assert plain(getattr(store, name)) == plain(getattr(again, name)) == wanted


@pytest.mark.parametrize(
    ("folder", "name", "cls"),
    [  # each store by two of the four methods, and each method in the same number of stores
        pytest.param(*case.values[:2], cls, id=f"{case.id}-{cls.__name__}")
        for k, case in enumerate(STORES)
        for cls in METHODS[2 * (k % 2) :][:2]
    ],
)
def test_a_store_of_an_earlier_version_is_fitted(folder, name, cls):
    store = hmf.Store.open(folder / "stores" / name)
    found, wanted = (cls(**SMALL).fit(ratings) for ratings in (store, store.to_ratings()))
    np.testing.assert_array_equal(found.user_factors, wanted.user_factors)
    np.testing.assert_array_equal(found.recommend([0, 7])[0], wanted.recommend([0, 7])[0])
    np.testing.assert_equal(found.item_ids_, store.item_ids)


@pytest.mark.parametrize(("folder", "name", "case"), SAVED)
def test_saved_ratings_of_an_earlier_version_are_read(folder, name, case):
    path = folder / "ratings" / f"{name}.npz"
    ratings, wanted = hmf.Ratings.from_file(path), matrix_of(folder, case["values"])
    assert_same_matrix(ratings.user_items, hmf.Ratings(wanted).user_items)
    for side in ("user_ids", "item_ids"):
        assert plain(getattr(ratings, side)) == case.get(side)
    if "timestamps" in case:
        assert ratings.timestamps.dtype == case["timestamps"]
        np.testing.assert_array_equal(ratings.timestamps.astype(np.int64), columns(folder)["time"])
    else:
        assert ratings.timestamps is None
    np.testing.assert_array_equal(sp.load_npz(path).toarray(), wanted.toarray())


def test_each_kind_of_store_has_a_file():
    """If this fails, the format is new: write files of it with tests/fixtures/make.py."""
    found = [json.loads(path.read_text()) for folder in folders() for path in folder.glob("stores/*/manifest.json")]
    found = [each for each in found if each["version"] == manifest.VERSION]
    assert {"range", *manifest.FIELDS} == set().union(*found)
    labels = {tuple(sorted(manifest.LABELS & each["files"].keys())) for each in found}
    assert {(), tuple(sorted(manifest.LABELS))} <= labels
    assert {bool(each["zeros"]) for each in found} == {False, True}
    assert {len(each["bounds"]["user"]) > 2 for each in found} == {False, True}
    dtypes = {str(np.load(path).dtype) for folder in folders() for path in folder.glob("stores/*/*_ids.npy")}
    assert dtypes == {"int64", "uint64", "uint8"}
