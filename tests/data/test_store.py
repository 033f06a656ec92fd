"""Stores: damage is found before it reaches a kernel, manifests, slabs."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.sparse import SUMMED, ValueSummary
from hybridmf.core.validate import as_csr
from hybridmf.data import store as stores
from hybridmf.data.manifest import seal
from hybridmf.data.slabs import InMemory, slab_bounds, slab_entries
from hybridmf.data.store import StoreMatrix
from hybridmf.errors import StoreError
from support.ratings import planted
from support.stores import SLAB, assert_same_matrix

# ------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """`planted()` with labels, in slabs of a few rows."""
    ids = {"user_ids": [f"u{k}" for k in range(60)], "item_ids": np.arange(40) * 3}
    path = tmp_path_factory.mktemp("written") / "store"
    return hmf.convert(hmf.Ratings.from_matrix(planted(), **ids), path, slab_bytes=SLAB).path


@pytest.fixture
def store(written, tmp_path) -> hmf.Store:
    """A copy, to be damaged."""
    return hmf.Store.open(shutil.copytree(written, tmp_path / "store"))


def rewrite_manifest(store: hmf.Store, **changes: Any) -> None:
    manifest = json.loads((store.path / "manifest.json").read_text()) | changes
    manifest["checksum"] = seal(manifest)
    (store.path / "manifest.json").write_text(json.dumps(manifest))


def test_sizes_are_checked_when_a_store_is_opened(store):
    path = store.path / "item-000002.indices.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(
        StoreError, match=r"item-000002\.indices\.npy' is truncated: \d+ bytes, \d+ were written; convert"
    ):
        hmf.Store.open(store.path)
    path.write_bytes(content + b"x")
    with pytest.raises(StoreError, match=r"item-000002\.indices\.npy' is too long"):
        hmf.Store.open(store.path)
    path.unlink()
    with pytest.raises(StoreError, match=r"item-000002\.indices\.npy' is missing"):
        hmf.Store.open(store.path)


@pytest.mark.parametrize(
    "name", ["user-000001.indptr.npy", "item-000000.values.npy", "user_ids.npy", "item-degrees.npy"]
)
def test_an_altered_byte_is_found_where_it_is_read(name, store):
    path = store.path / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    opened = hmf.Store.open(store.path)
    with pytest.raises(StoreError, match=rf"{name}' was altered \(CRC-32 [0-9a-f]+, [0-9a-f]+ when it was written\)"):
        opened.verify()
    with pytest.raises(StoreError, match=rf"{name}' was altered"):
        hmf.ExplicitALS(biases=False, factors=2, device="cpu", iterations=1).fit(hmf.Store.open(store.path))


def alter(path: Path) -> None:
    """Other content of the same size, in place; indices beyond all rows."""
    array = np.load(path)
    array[:] = 10**6
    with open(path, "r+b") as file:
        np.save(file, array)


def cut(path: Path) -> None:
    os.truncate(path, 200)


@pytest.mark.parametrize("devices", ["cpu", ["cpu", "cpu"]])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (alter, r"was altered \(CRC-32 .*convert the ratings again"),
        (cut, r"is truncated: 200 bytes, \d+ were written"),
        (Path.unlink, r"cannot be read \(No such file"),
    ],
)
def test_files_damaged_between_iterations_do_not_reach_a_kernel(damage, problem, devices, store):
    def spoil(model: Any, record: dict[str, float]) -> None:
        if record["iteration"] == 2:
            damage(store.path / "item-000001.indices.npy")

    model = hmf.ExplicitALS(biases=False, factors=2, device=devices, iterations=5, random_state=0)
    with pytest.raises(StoreError, match=rf"item-000001\.indices\.npy' {problem}"):
        model.fit(store, callback=spoil)
    assert model.n_iter_ == 2


def test_a_store_that_is_replaced_while_it_is_used_is_to_be_opened_again(store):
    store.verify()
    hmf.convert(planted() * 2, store.path, overwrite=True)
    with pytest.raises(StoreError, match=r"another conversion has replaced the store since it was opened: open it a"):
        store.to_ratings()
    hmf.Store.open(store.path).verify()


def test_a_pickled_model_outlives_the_store_it_was_fitted_on(store):
    model = hmf.ImplicitALS(factors=2, device="cpu", iterations=2, random_state=0).fit(store)
    pickled, ids = pickle.dumps(model), model.recommend(3, N=4)[0]
    np.testing.assert_array_equal(pickle.loads(pickled).recommend(3, N=4)[0], ids)
    store.path.rename(store.path.parent / "elsewhere")
    alone = pickle.loads(pickle.dumps(copy.deepcopy(pickle.loads(pickled))))
    np.testing.assert_array_equal(alone.user_factors, model.user_factors)
    with pytest.raises(FileNotFoundError, match="there is no such store"):
        alone.recommend(3, N=4)
    alone.recommend(3, N=4, user_items=planted()[[3]])


def test_a_file_that_was_only_touched_is_read_again_and_serves(store):
    store.verify()
    os.utime(store.path / "user-000001.values.npy", (1, 1))
    assert store.to_ratings().nnz == store.nnz


def test_a_file_removed_after_opening_is_reported(store):
    (store.path / "user-000001.indices.npy").unlink()
    with pytest.raises(StoreError, match=r"user-000001\.indices\.npy' cannot be read"):
        store.verify()


def test_manifests_are_checked(store):
    path = store.path / "manifest.json"
    whole = json.loads(path.read_text())
    for text, problem in (
        ("{", "is no manifest of a store"),
        ("[]", "is no manifest of a store"),
        (json.dumps(whole | {"format": "zarr"}), "is a manifest of 'zarr'"),
        (json.dumps(whole | {"version": 2}), "has version 2; this hybridmf reads version 1: upgrade"),
        (json.dumps(whole | {"nnz": 3}), "was altered: its checksum does not fit"),
    ):
        path.write_text(text)
        with pytest.raises(StoreError, match=problem):
            hmf.Store.open(store.path)


def replace_array(store: hmf.Store, name: str, array: np.ndarray | bytes) -> hmf.Store:
    """A store one of whose files was replaced, checksum and all."""
    if isinstance(array, bytes):
        (store.path / name).write_bytes(array)
    else:
        np.save(store.path / name, array)
    found = stores.file_checksum(store.path / name)
    files = store._manifest["files"] | {name: {"bytes": (store.path / name).stat().st_size, "crc32": found}}
    rewrite_manifest(store, files=files)
    return hmf.Store.open(store.path)


def test_files_that_contradict_each_other_do_not_reach_a_kernel(store):
    slab = store.slabs()[0]
    matrix = slab.matrix()
    indices, indptr, values = np.array(matrix.indices), np.array(matrix.indptr, dtype=np.int64), np.array(matrix.data)
    moved = indptr.copy()
    moved[1] += 1
    degrees = store.degrees("item")
    cases = {
        "user-000000.indices.npy": [np.full_like(indices, 40), indices[::-1].copy(), -indices - 1],
        "user-000000.indptr.npy": [indptr + 1, indptr[::-1].copy(), moved],
        "user-000000.values.npy": [np.full_like(values, np.nan), np.zeros_like(values)],
    }
    for name, arrays in cases.items():
        original = np.load(store.path / name)
        for array in arrays:
            with pytest.raises(StoreError, match="contradicts the files beside it"):
                replace_array(store, name, array).slabs()[0].matrix()
        store = replace_array(store, name, original)
    for name, array, problem in (
        (
            "user-000000.indices.npy",
            indices.view(np.float32),
            "holds float32 of shape .*, expected a vector of .* int32",
        ),
        ("user-000000.indices.npy", indices[None], r"holds .* of shape \(1, .*, expected a vector of \d+ int32"),
        ("user-000000.indices.npy", b"\x93NUMPY\2\0", "is no array of numbers"),
        ("user-000000.indices.npy", b"PK\3\4", "is no array"),
        ("user-000000.indices.npy", b"\x93NUMPY\1\0v\0" + b"[" * 118, "is no array"),
        ("item-degrees.npy", degrees[::-1].copy(), "contradicts the sizes of slabs"),
        ("item-degrees.npy", -degrees, "contradicts the sizes of slabs"),
        ("item-degrees.npy", np.full_like(degrees, 2**62), "contradicts the sizes of slabs"),
        ("item_ids.npy", np.arange(2), "has 2 labels for 40 rows"),
        ("item_ids.npy", np.arange(40) // 2, "has a label more than once"),
        ("item_ids.npy", np.arange(40.0), "holds float64 of shape .*, expected a vector of int64 or uint64 or uint8"),
        ("item_ids.npy", np.zeros(3, np.uint8), "holds no labels"),
        ("item_ids.npy", np.full(10**5, ord("["), np.uint8), "holds no labels"),
    ):
        original = (store.path / name).read_bytes()
        size = len(original)
        content = array if isinstance(array, np.ndarray) else array + b"\n" * (size - len(array))
        with pytest.raises(StoreError, match=rf"{name}' {problem}"):
            replace_array(store, name, content).verify()
        store = replace_array(store, name, original)
    store.verify()


@pytest.mark.parametrize("zeros", [0, 5])
def test_values_that_contradict_the_manifest(zeros, tmp_path):
    """In one slab, or in the sum of all; explicit zeros in other rows; another transpose."""
    matrix = as_csr(planted()).copy()
    matrix.data[: 2 * zeros : 2] = 0
    ratings = hmf.Ratings.from_matrix(matrix)

    right = hmf.convert(ratings, tmp_path / "right", slab_bytes=SLAB).path

    def changed(change, name="user-000000.values.npy"):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        store = hmf.Store.open(shutil.copytree(right, tmp_path / "store"))
        return replace_array(store, name, change(np.load(store.path / name)))

    def swapped(values):
        first, second = np.flatnonzero(values != values[-1])[-1], len(values) - 1
        values[[first, second]] = values[[second, first]]
        return values

    for change in (lambda values: values * 2, lambda values: values / 2, lambda values: -values):
        with pytest.raises(
            StoreError, match=r"manifest\.json' has other sums or magnitudes than the values of slabs of u"
        ):
            changed(change).to_ratings()
        with pytest.raises(StoreError, match="has other sums or magnitudes"):
            hmf.ExplicitALS(factors=2, device="cpu", iterations=1).fit(changed(change))
    with pytest.raises(StoreError, match="slabs of items that are not the transpose of the slabs of users"):
        changed(swapped).verify()
    if zeros:
        with pytest.raises(StoreError, match="contradicts the files beside it"):
            changed(lambda values: np.roll(values, 1)).to_ratings()
        with pytest.raises(StoreError, match=r"user-degrees-nonzero\.npy' contradicts the sizes of slabs"):
            changed(lambda degrees: degrees + 1, "user-degrees-nonzero.npy").to_ratings()


# ------------------------------------------------------------------------------------------------ manifests

WRONG = [
    -1, 0, 1, 2**31, 2**63, 10**30, 1.5, 1e308, float("nan"), float("inf"), True, None, "", "0", "user", [], [0], [-1],
    [[]], [0, 1], [1, 0], [0.0, 1.0], {}, {"user": []}, {"../x": {"bytes": 1, "crc32": "0"}},
]  # fmt: skip
"""What a field may hold instead."""

PATHS = [
    ["shape"], ["shape", 0], ["shape", 1], ["nnz"], ["zeros"], ["dtype"], ["bounds"], ["bounds", "user"],
    ["bounds", "user", 0], ["bounds", "user", 1], ["bounds", "item", -1], ["bounds", "item"], ["sums"], ["sums", "all"],
    ["sums", "nonzero"], ["magnitudes"], ["magnitudes", "all"], ["magnitudes", "nonzero"], ["magnitudes", "all", 0],
    ["magnitudes", "nonzero", 1], ["files"], ["files", "user-degrees.npy"], ["files", "user-000001.values.npy"],
    ["files", "item-000000.indices.npy", "bytes"], ["files", "item-000000.indptr.npy", "crc32"], ["version"],
    ["format"], ["files", "user_ids.npy"], ["files", "user_ids.npy", "bytes"], ["files", "new.npy"], ["title"],
]  # fmt: skip


@functools.cache
def small_store(zeros: int) -> tuple[Path, str, hmf.Ratings]:
    """A store, its manifest, and its ratings."""
    matrix = as_csr(planted()).copy()
    matrix.data[: 2 * zeros : 2] = 0
    ratings = hmf.Ratings.from_matrix(matrix, user_ids=[f"u{k}" for k in range(60)])
    path = Path(tempfile.mkdtemp(prefix="hybridmf-tests-")) / "store"
    store = hmf.convert(ratings, path, slab_bytes=SLAB)
    return path, (store.path / "manifest.json").read_text(), ratings


def spoil(manifest: Any, where: list[Any], change: Callable[[Any], Any]) -> None:
    *outer, last = where
    for key in outer:
        manifest = manifest[key]
    if isinstance(manifest, dict):
        last = str(last)  # the first change put an object in place of a list
    found = manifest[last] if isinstance(manifest, list) or last in manifest else None
    new = change(found)
    if new is DELETED:
        del manifest[last]
    else:
        manifest[last] = new


DELETED = object()
CHANGES = st.one_of(
    st.sampled_from(WRONG).map(lambda value: lambda _: value),
    st.just(lambda found: DELETED if found is not None else 1),
    st.integers(-3, 3).map(
        lambda by: lambda found: found + by if isinstance(found, (int, float)) else [found] * abs(by)
    ),
    st.just(lambda found: found[::-1] if isinstance(found, (str, list)) else found),
    st.just(lambda found: found * 2 if isinstance(found, (list, int, float)) else found),
)


@given(st.integers(0, 1), st.lists(st.tuples(st.sampled_from(PATHS), CHANGES), min_size=1, max_size=2))
@settings(max_examples=60)
def test_a_manifest_that_contradicts_itself_is_refused_or_harmless(zeros, changes):
    """Any field, with a checksum to match: the same ratings or a StoreError, nothing else."""
    path, text, expected = small_store(5 * zeros)
    manifest = json.loads(text)
    for where, change in changes:
        with suppress(KeyError, IndexError, TypeError, AttributeError):  # the first change took its place away
            spoil(manifest, where, change)
    manifest["checksum"] = seal(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    try:
        store = hmf.Store.open(path)
        found = store.to_ratings()
        matrix = StoreMatrix(store, drop_zeros=True)
        labels, numbers = store.user_ids, (matrix.nnz, matrix.largest_slab, matrix.total)
        store.verify()
    except StoreError:
        return
    finally:
        (path / "manifest.json").write_text(text)
    assert_same_matrix(found.user_items, expected.user_items)
    assert (store.shape, store.nnz) == (expected.shape, expected.nnz)
    known = StoreMatrix(hmf.Store.open(path), drop_zeros=True)
    assert numbers == pytest.approx((known.nnz, known.largest_slab, known.total), rel=1e-6)
    assert labels is None or labels.tolist() == expected.user_ids.tolist()


@pytest.mark.parametrize(
    ("where", "value", "problem"),
    [
        (["bounds", "user"], [0, 60], "the manifest|files has the unknown user-00000"),
        (["bounds", "user", 1], 61, "bounds of users has 61, expected 0 to 60"),
        (["bounds", "item", 1], 0, "bounds of items do not ascend from 0 to 40"),
        (["nnz"], -1, "nnz has -1, expected 0 to 2400"),
        (["nnz"], 10**18, "nnz has 1000000000000000000, expected 0 to 2400"),
        (["nnz"], 490, "nnz is 490, slabs of users have 487 entries"),
        (["shape"], [60], r"shape is \[60\], expected a list of 2"),
        (["sums", "all"], 1e5, "sums has 100000.0, expected a number of magnitude"),
        (["sums", "all"], 1.0, "sums differ: 1.0 and"),
        (["magnitudes", "nonzero"], [-1, 5], "magnitudes of nonzero values are -1.0 to 5.0"),
        (["magnitudes", "all"], [], r"magnitudes of all values are \[\], expected"),
        (["files", "user-degrees.npy", "bytes"], 0, "bytes of user-degrees.npy has 0, expected 128 to"),
        (["files", "user-degrees.npy", "bytes"], 600, "user-degrees.npy has 472 bytes of numbers, expected 480"),
        (["files", "user-degrees.npy", "crc32"], "0", "crc32 of user-degrees.npy is '0'"),
        (["files", "user-degrees.npy"], [], "the entry of user-degrees.npy is a list, expected an object"),
        (["files", "user-000000.values.npy", "bytes"], 129, "user-000000.[a-z]+.npy has .* bytes of numbers"),
        (["files", "../../etc/passwd"], {}, "files has the unknown ../../etc/passwd"),
        (["dtype"], "float64", "dtype is 'float64', expected 'float32'"),
    ],
)
def test_a_manifest_names_the_field_that_is_wrong(where, value, problem, store):
    manifest = json.loads((store.path / "manifest.json").read_text())
    spoil(manifest, where, lambda _: value)
    rewrite_manifest(store, **manifest)
    with pytest.raises(StoreError, match=rf"manifest\.json' contradicts itself: .*{problem}"):
        hmf.Store.open(store.path)


def test_a_slab_has_no_more_entries_than_fit(store):
    manifest = json.loads((store.path / "manifest.json").read_text())
    fewest = int(np.argmin(np.diff(manifest["bounds"]["user"])))
    for slab in range(len(store.slabs())):
        for array in ("indices", "values"):
            manifest["files"][f"user-{slab:06d}.{array}.npy"]["bytes"] = 128 + 4 * 487 * (slab == fewest)
    rewrite_manifest(store, **manifest)
    with pytest.raises(StoreError, match=rf"itself: slab {fewest} of users has 487 entries, at most \d+ fit"):
        hmf.Store.open(store.path)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"format": ' + '{"a": ' * 10**5, "1" * 5000, "\ud800", "null", "[1]"])
def test_invalid_manifests_are_refused(text, store):
    (store.path / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(StoreError, match="is no manifest of a store"):
        hmf.Store.open(store.path)
    cut(store.path / "user-000000.values.npy")
    with pytest.raises(StoreError, match=r"is truncated: .*; convert the ratings again"):
        store.slabs()[0].matrix()


# ------------------------------------------------------------------------------------------------------- parts


@given(st.lists(st.integers(0, 30), max_size=50), st.integers(1, 100))
@settings(max_examples=100)
def test_slabs_cover_all_rows(degrees, entries):
    bounds = slab_bounds(np.array(degrees, dtype=np.int64), entries)
    assert bounds[0] == 0 and bounds[-1] == len(degrees)
    assert (np.diff(bounds) > 0).all()
    sizes = slab_entries(bounds, np.array(degrees, dtype=np.int64))
    assert sizes.sum() == sum(degrees)
    assert all(size <= entries or rows == 1 for size, rows in zip(sizes, np.diff(bounds), strict=True))


def test_slabs_of_a_matrix_in_memory_are_its_rows():
    matrix = as_csr(planted())
    slabs = InMemory(matrix).cut(50)
    assert len(slabs.bounds) > 4
    parts = [slabs.matrix(k) for k in range(len(slabs.bounds) - 1)]
    assert_same_matrix(as_csr(sp.vstack(parts, format="csr")), matrix)
    assert all(np.shares_memory(part.data, matrix.data) for part in parts if part.nnz)
    assert (slabs.nnz, slabs.dtype, slabs.shape) == (matrix.nnz, np.float32, matrix.shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_summary_does_not_depend_on_parts_or_threads(dtype):
    values = np.random.default_rng(0).normal(size=3 * SUMMED + 77).astype(np.float32).astype(dtype)
    whole, sizes = ValueSummary.of([values], 1), np.abs(values)
    assert whole.total == pytest.approx(float(values.astype(float).sum()), rel=1e-12)
    assert whole.squares == pytest.approx(float(np.square(values, dtype=float).sum()), rel=1e-12)
    assert whole.value_range == (values.min(), values.max())
    np.testing.assert_array_equal(whole.ends, [sizes.min(), sizes.max()])

    def found(parts, threads):
        each = ValueSummary.of(parts, threads)
        return each.total, each.squares, each.value_range, *each.ends

    for cuts in ([], [1, 5, SUMMED], [SUMMED, 2 * SUMMED], [SUMMED - 1, SUMMED - 1, 3 * SUMMED + 3]):
        assert found(np.split(values, cuts), 2) == found([values], 1)


@pytest.mark.parametrize("parts", [[], [np.empty(0, np.float32)]])
def test_summary_of_no_values(parts):
    summary = ValueSummary.of(parts)
    assert (summary.total, summary.squares, summary.value_range, len(summary.ends)) == (0, 0, None, 0)


def test_a_store_is_pickled_by_its_path(store):
    other = pickle.loads(pickle.dumps(store))
    assert other.path == store.path and other.nnz == store.nnz
    assert copy.deepcopy(store).shape == store.shape
