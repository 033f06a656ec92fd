"""Ratings prepared for several fits, and fits of ratings that are on a GPU: emulated on the CPU, and on a GPU."""

from __future__ import annotations

import gc
import logging
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.data.align import labels_of
from hybridmf.errors import DeviceMemoryError, DuplicateEntriesError, NonFiniteError, RatingsError
from hybridmf.model import prepared as prepared_module
from hybridmf.ranks.su_als import RankALS
from support.devices import Tracked
from support.gpu_arrays import GpuArray, broken, cupy_matrix, to_gpu
from support.ratings import planted

MODELS: dict[str, Any] = {
    "implicit": lambda **options: hmf.ImplicitALS(**options),
    "explicit": lambda **options: hmf.ExplicitALS(**options),
    "sgd": lambda **options: hmf.SGD(learning_rate=0.02, **options),
    "ccd": lambda **options: hmf.CCD(**options),
}


def make(kind: str = "implicit", **options: Any) -> Any:
    return MODELS[kind](**{"factors": 4, "iterations": 1, "random_state": 0, "num_threads": 1} | options)


def assert_same_fit(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a.user_factors_, b.user_factors_)
    np.testing.assert_array_equal(a.item_factors_, b.item_factors_)
    np.testing.assert_array_equal(a.recommend(3)[0], b.recommend(3)[0])
    np.testing.assert_array_equal(a._learned.values, b._learned.values)
    np.testing.assert_array_equal(a._learned.seen.indices, b._learned.seen.indices)


def same(kind: str, prepared: Any, matrix: Any, **options: Any) -> Any:
    """A fit of prepared ratings, after it was compared with one of the matrix."""
    model = make(kind, **options).fit(prepared)
    assert_same_fit(model, make(kind, **options).fit(matrix))
    return model


def with_zeros() -> sp.csr_array:
    matrix = planted().copy()
    matrix.data[::7] = 0
    return matrix


# ------------------------------------------------------------------------------------------------- fits as of ratings


@pytest.mark.parametrize("kind", list(MODELS))
def test_fits_are_those_of_the_ratings(kind: str, backend: str, ratings_matrix: sp.csr_array) -> None:
    prepared = hmf.PreparedRatings(ratings_matrix, device=backend)
    for regularization in (0.05, 0.5):
        same(kind, prepared, ratings_matrix, device=backend, regularization=regularization)


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_explicit_zeros_are_entries_of_explicit_feedback_only(kind: str, backend: str) -> None:
    prepared = hmf.PreparedRatings(with_zeros(), device=backend)
    for _ in range(2):
        model = same(kind, prepared, with_zeros(), device=backend)
    assert (model.plan_.nnz == prepared.nnz) == (kind == "explicit")
    assert prepared.without_zeros() is prepared.without_zeros()
    assert prepared.without_zeros().without_zeros() is prepared.without_zeros()


def test_ratings_go_to_the_gpu_once(gpu: Any, monkeypatch: pytest.MonkeyPatch, ratings_matrix: sp.csr_array) -> None:
    prepared = hmf.PreparedRatings(ratings_matrix, device="cuda")
    sizes, upload = [], gpu.upload
    monkeypatch.setattr(gpu, "upload", lambda array: sizes.append(array.size) or upload(array))
    make(device="cuda").fit(prepared)
    assert max(sizes) < ratings_matrix.nnz
    make(device="cuda").fit(ratings_matrix)
    assert max(sizes) == ratings_matrix.nnz


def test_ratings_are_checked_and_transposed_once(monkeypatch: pytest.MonkeyPatch, ratings_matrix: sp.csr_array) -> None:
    prepared = hmf.PreparedRatings(ratings_matrix)
    for module, name in ((prepared_module, "transposed"), (sys.modules["hybridmf.model.training"], "transposed")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr("hybridmf.core.validate._formats.is_canonical", None)
    make(device="cpu").fit(prepared)
    with pytest.raises(TypeError):
        make(device="cpu").fit(ratings_matrix)


@pytest.mark.parametrize(
    "options",
    [{"assembly": "bals"}, {"reorder": "both"}, {"gpu_memory_limit": 12_000}, {"device": "cpu"}],
    ids=str,
)
def test_fits_that_read_ratings_elsewhere_start_from_the_host(
    options: dict[str, Any], gpu: Any, tiny_gpu: None, ratings_matrix: sp.csr_array, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = hmf.PreparedRatings(ratings_matrix, device="cuda")
    options = {"device": "cuda"} | options
    with caplog.at_level(logging.INFO, "hybridmf"):
        model = same("implicit", prepared, ratings_matrix, **options)
    assert "starts from the copy in the memory of the host" in caplog.text and not model.plan_.ratings_on_device
    if "gpu_memory_limit" in options:
        assert model.plan_.streamed


def test_ratings_prepared_on_the_host_go_to_a_gpu(gpu: Any, ratings_matrix: sp.csr_array) -> None:
    same("implicit", hmf.PreparedRatings(ratings_matrix), ratings_matrix, device="cuda")


def test_several_gpus(gpus: Any, ratings_matrix: sp.csr_array) -> None:
    names = gpus(2)
    same("implicit", hmf.PreparedRatings(ratings_matrix, device=names[0]), ratings_matrix, device=names)


def test_labels_and_frames(ratings_matrix: sp.csr_array) -> None:
    labels = {"user_ids": [f"u{k}" for k in range(60)], "item_ids": np.arange(40) * 10}
    ratings = hmf.Ratings.from_matrix(ratings_matrix, **labels)
    others = hmf.Ratings.from_matrix(ratings_matrix[::-1], **labels)
    for prepared in (hmf.PreparedRatings(ratings), hmf.PreparedRatings(ratings_matrix, **labels)):
        model = make(device="cpu").fit(prepared, validation=others)
        assert model.user_ids_[3] == "u3" and model.item_ids_[3] == 30
        assert model.objective(prepared) == model.objective(ratings)
        assert hmf.plan(prepared, model).nnz == ratings.nnz
        assert labels_of(prepared)[0] is prepared.ratings.user_ids
    assert prepared.ratings.item_index(30) == 3
    with pytest.raises(ValueError, match="Ratings have their own"):
        hmf.PreparedRatings(ratings, labels["user_ids"])
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"user": ["a", "b", "a"], "item": [1, 1, 2], "rating": [3.0, 4.0, 5.0]})
    assert hmf.PreparedRatings(frame).ratings.user_ids.tolist() == ["a", "b"]
    assert make(device="cpu").fit(hmf.PreparedRatings(frame)).recommend_table(N=1).columns[0] == "user"


def test_float64_values_are_kept(backend: str) -> None:
    matrix = sp.csr_array(planted().astype(np.float64))
    matrix.data[0] = 1 + 1e-12
    prepared = hmf.PreparedRatings(matrix, device=backend, dtype="float64")
    assert prepared.user_items.data[0] == 1 + 1e-12 and prepared.ratings.user_items.dtype == np.float32
    same("implicit", prepared, matrix, dtype="float64", device=backend)
    with pytest.raises(ValueError, match="prepared with dtype='float64', and the model has dtype='float32'"):
        make(device=backend).fit(prepared)


def test_pickled_and_prepared_again(backend: str, ratings_matrix: sp.csr_array) -> None:
    ratings = hmf.Ratings.from_matrix(ratings_matrix, item_ids=list(range(100, 140)))
    prepared = hmf.PreparedRatings(ratings, device=backend)
    again = pickle.loads(pickle.dumps(prepared))
    assert again.device == prepared.device and again.nbytes == prepared.nbytes
    assert make(device=backend).fit(again).item_ids_[0] == 100
    assert repr(again) == repr(prepared) and again.shape == (60, 40)


@pytest.mark.parametrize("device", ["auto", ["cuda:0", "cuda:1"], "cpus", 1])
def test_one_device_keeps_them(device: Any, ratings_matrix: sp.csr_array) -> None:
    with pytest.raises((TypeError, ValueError), match="device must be"):
        hmf.PreparedRatings(ratings_matrix, device=device)


def test_bad_ratings_are_refused_as_by_fit(tmp_path: Any, ratings_matrix: sp.csr_array) -> None:
    ratings_matrix.data[3] = np.nan
    with pytest.raises(RatingsError, match="user_items has the value nan at row 0"):
        hmf.PreparedRatings(ratings_matrix)
    np.savetxt(tmp_path / "r.csv", [[1, 2, 3.0], [2, 2, 4.0]], delimiter=",", fmt="%g")
    store = hmf.convert(tmp_path / "r.csv", tmp_path / "store")
    with pytest.raises(TypeError, match=r"prepare store.to_ratings\(\)"):
        hmf.PreparedRatings(store)
    with pytest.raises(ValueError, match="dtype must be one of"):
        hmf.PreparedRatings(ratings_matrix, dtype="float16")


# ------------------------------------------------------------------------------------------------------------- memory


def test_memory_is_freed_with_the_object(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, ratings_matrix: sp.csr_array
) -> None:
    if gpu.spec.name != "emulated":
        pytest.skip("the pool of a GPU has arrays of other tests")
    gc.collect()
    tracked = Tracked(gpu, monkeypatch)
    prepared = hmf.PreparedRatings(ratings_matrix, device="cuda")
    assert tracked.alive == prepared.nbytes > 0
    model = make(device="cuda").fit(prepared)
    gc.collect()
    assert tracked.alive == prepared.nbytes
    with monkeypatch.context() as patch:
        patch.setattr(RankALS, "solve", lambda self, side: (_ for _ in ()).throw(NonFiniteError("x")))
        with pytest.raises(NonFiniteError):
            model.fit(prepared)
    gc.collect()
    assert tracked.alive == prepared.nbytes
    with pytest.raises(DuplicateEntriesError):
        hmf.PreparedRatings.from_coo(*(to_gpu(each, gpu) for each in ([0, 0], [1, 1], [1.0, 2.0])))
    del prepared
    gc.collect()
    assert tracked.alive == 0


def test_a_plan_counts_the_memory_of_its_ratings_as_free(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, ratings_matrix: sp.csr_array
) -> None:
    if gpu.spec.name != "emulated":
        pytest.skip("needs a GPU of this size")
    prepared = hmf.PreparedRatings(ratings_matrix, device="cuda")
    model = make(device="cuda", row_form="primal")
    needed = hmf.plan(ratings_matrix, model).total_bytes
    spec = type(gpu.spec)(**vars(gpu.spec) | {"free_bytes": needed - prepared.nbytes})
    monkeypatch.setattr(gpu, "spec", spec)
    assert hmf.plan(ratings_matrix, model).streamed
    assert not hmf.plan(prepared, model).streamed
    monkeypatch.setattr(gpu, "spec", type(spec)(**vars(spec) | {"free_bytes": needed - prepared.nbytes - 64}))
    assert hmf.plan(prepared, model).gpu.free_bytes == gpu.spec.free_bytes  # streamed: it keeps its own memory
    gpu.limit = 100
    with pytest.raises(DeviceMemoryError):
        hmf.PreparedRatings(ratings_matrix, device="cuda")


# ------------------------------------------------------------------------------------------- ratings that are on a GPU


@pytest.mark.parametrize(
    ("model", "kind"),
    [("implicit", "csr"), ("implicit", "csc"), ("implicit", "coo"), ("explicit", "csc"), ("ccd", "coo")],
)
def test_sparse_matrices_of_a_gpu(model: str, kind: str, gpu: Any) -> None:
    matrix = cupy_matrix(with_zeros().asformat(kind), gpu)
    found = make(model, device="cuda").fit(matrix)
    assert_same_fit(found, make(model, device="cuda").fit(with_zeros()))


def test_a_gpus_matrix_does_not_pass_through_the_host(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, ratings_matrix: sp.csr_array
) -> None:
    matrix = cupy_matrix(ratings_matrix, gpu)
    sizes, upload = [], gpu.upload
    if gpu.spec.name == "emulated":
        monkeypatch.setattr(gpu, "adopt", lambda array: array.memory.copy())
    monkeypatch.setattr(gpu, "upload", lambda array: sizes.append(array.size) or upload(array))
    make(device="cuda").fit(matrix)
    assert max(sizes) < ratings_matrix.nnz


def canonical(prepared: hmf.PreparedRatings, device: Any) -> None:
    """Check that the arrays on the device are those of the host in both orientations."""
    for held, matrix in zip(prepared.on_device("cuda:0"), (prepared.user_items, prepared.item_users), strict=True):
        assert held.shape == matrix.shape
        for ours, theirs in ((held.starts, matrix.indptr), (held.indices, matrix.indices), (held.data, matrix.data)):
            np.testing.assert_array_equal(device.download(ours), theirs)


@pytest.mark.parametrize("index", ["int16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("values", ["float64", "int8", None])
def test_triplets_of_a_gpu_in_any_order_and_type(index: str, values: str | None, gpu: Any) -> None:
    matrix = planted().tocoo()
    order = np.random.default_rng(0).permutation(matrix.nnz)
    rows, columns, data = matrix.row[order].astype(index), matrix.col[order].astype(index), matrix.data[order]
    data = None if values is None else data.astype(values)
    on_gpu = [None if part is None else to_gpu(part, gpu) for part in (rows, columns, data)]
    prepared = hmf.PreparedRatings.from_coo(*on_gpu, item_ids=list(range(5, 45)))
    expected = hmf.Ratings.from_coo(rows, columns, data)
    assert (prepared.user_items != expected.user_items).nnz == 0 and prepared.user_items.has_canonical_format
    assert prepared.device == "cuda:0" and prepared.ratings.item_ids[0] == 5
    canonical(prepared, gpu)
    wider = hmf.PreparedRatings.from_coo(*on_gpu, shape=(70, None), device="cuda")
    assert wider.shape == (70, 40)


def test_offsets_of_64_bits_and_unsorted_columns(gpu: Any) -> None:
    wide = sp.csr_array(planted())
    wide.indptr, wide.indices = wide.indptr.astype(np.int64), wide.indices.astype(np.int64)
    for first, last in zip(wide.indptr[:-1], wide.indptr[1:], strict=True):
        for part in (wide.indices, wide.data):
            part[first:last] = part[first:last][::-1].copy()
    prepared = hmf.PreparedRatings(cupy_matrix(wide, gpu))
    assert (prepared.user_items != planted()).nnz == 0
    canonical(prepared, gpu)


def test_host_triplets_are_prepared_too() -> None:
    prepared = hmf.PreparedRatings.from_coo(["a", "b"], ["x", "x"], [1, 2])
    assert prepared.ratings.user_ids.tolist() == ["a", "b"] and prepared.device == "cpu"


def test_empty_matrices(gpu: Any) -> None:
    empty = sp.csr_array((3, 4))
    assert hmf.PreparedRatings(cupy_matrix(empty, gpu)).nnz == 0
    with pytest.raises(RatingsError, match="has no entries"):
        make(device="cuda").fit(cupy_matrix(empty, gpu))


def test_later_changes_have_no_effect(gpu: Any, ratings_matrix: sp.csr_array) -> None:
    matrix = cupy_matrix(ratings_matrix, gpu)
    prepared = hmf.PreparedRatings(matrix)
    (matrix.indices.memory if gpu.spec.name == "emulated" else matrix.indices)[...] = -1
    canonical(prepared, gpu)


BAD: dict[str, dict[str, Any]] = {
    "negative column": {"kind": "csr", "indptr": [0, 2], "indices": [0, -3], "data": [1.0, 2]},
    "column out of range": {"kind": "csr", "indptr": [0, 2], "indices": [0, 3], "data": [1.0, 2]},
    "wide column": {"kind": "csr", "indptr": [0, 2], "indices": [0, 2**40], "data": [1.0, 2]},
    "row out of range": {"kind": "csc", "indptr": [0, 1, 1, 2], "indices": [0, 1], "data": [1.0, 2]},
    "falling offsets": {"kind": "csr", "indptr": [0, 2, 1], "indices": [0, 1], "data": [1.0, 2], "shape": (2, 3)},
    "offsets of another shape": {"kind": "csr", "indptr": [0, 1, 2], "indices": [0, 1], "data": [1.0, 2]},
    "too few values": {"kind": "csr", "indptr": [0, 2], "indices": [0, 1], "data": [1.0]},
    "columns that are no integers": {"kind": "csr", "indptr": [0, 1], "indices": [0.5], "data": [1.0]},
    "two dimensions": {"kind": "csr", "indptr": [0, 1], "indices": [[0]], "data": [1.0]},
    "a pair twice": {"kind": "csr", "indptr": [0, 3], "indices": [1, 0, 1], "data": [1.0, 2, 3]},
    "nan": {"kind": "csr", "indptr": [0, 2], "indices": [0, 1], "data": [1.0, np.nan]},
    "overflow": {"kind": "csr", "indptr": [0, 2], "indices": [0, 1], "data": [1.0, 1e300]},
    "complex values": {"kind": "csr", "indptr": [0, 1], "indices": [0], "data": [1j]},
    "coo row": {"kind": "coo", "coords": (np.array([0, 1]), np.array([0, 1])), "data": [1.0, 2]},
    "coo column": {"kind": "coo", "coords": (np.array([0, 0]), np.array([0, -1])), "data": [1.0, 2]},
    "coo pair twice": {"kind": "coo", "coords": (np.array([0, 0]), np.array([1, 1])), "data": [1.0, 2]},
    "coo inf": {"kind": "coo", "coords": (np.array([0]), np.array([1])), "data": [np.inf]},
    "coo lengths": {"kind": "coo", "coords": (np.array([0]), np.array([1])), "data": [1.0, 2]},
    "too many rows": {"kind": "csr", "indptr": [0], "indices": [0], "data": [1.0], "shape": (2**31, 3)},
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_gpus_matrix_is_refused_with_the_errors_of_the_host(what: str, gpu: Any) -> None:
    parts = dict(BAD[what])
    matrix = broken(parts.pop("kind"), parts.pop("shape", (1, 3)), **parts)
    with pytest.raises((RatingsError, TypeError)) as on_host:
        make(device="cuda").fit(matrix)
    with pytest.raises(type(on_host.value)) as on_gpu:
        make(device="cuda").fit(cupy_matrix(matrix, gpu))
    assert str(on_gpu.value) == str(on_host.value)


@pytest.mark.parametrize(
    "triplets",
    [
        ([0, -1], [0, 1], [1.0, 2.0]),
        ([0, 1], [0, 1], [1.0, np.nan]),
        ([0, 0], [1, 1], None),
        ([0, 1], [0, 1, 1], [1.0, 2.0]),
        ([0.5, 1], [0, 1], [1.0, 2.0]),
        ([0, 2**40], [0, 1], [1.0, 2.0]),
    ],
)
def test_triplets_of_a_gpu_are_refused_with_the_errors_of_the_host(triplets: Any, gpu: Any) -> None:
    with pytest.raises((RatingsError, TypeError)) as on_host:
        hmf.Ratings.from_coo(*(None if part is None else np.array(part) for part in triplets))
    with pytest.raises(type(on_host.value)) as on_gpu:
        hmf.PreparedRatings.from_coo(*(None if part is None else to_gpu(part, gpu) for part in triplets))
    assert str(on_gpu.value) == str(on_host.value)


def test_everything_on_one_device(gpu: Any, ratings_matrix: sp.csr_array) -> None:
    matrix = cupy_matrix(ratings_matrix, gpu)
    with pytest.raises(ValueError, match="user_items is on cuda:0, and device='cpu'; leave device out"):
        hmf.PreparedRatings(matrix, device="cpu")
    with pytest.raises(ValueError, match="one device, got users on cuda:0, items on the host"):
        hmf.PreparedRatings.from_coo(to_gpu([0, 1], gpu), np.array([0, 1]))


def test_other_arrays_of_a_gpu_are_refused(gpu: Any, ratings_matrix: sp.csr_array) -> None:
    model = make(device="cuda").fit(ratings_matrix)
    for given in (to_gpu(ratings_matrix.toarray(), gpu), cupy_matrix(ratings_matrix, gpu)):
        with pytest.raises(TypeError, match="on a GPU; fit and PreparedRatings take sparse matrices"):
            model.objective(given)
    with pytest.raises(TypeError, match="on a GPU; fit and PreparedRatings take sparse matrices"):
        model.fit(to_gpu(ratings_matrix.toarray(), gpu))


def test_where_an_array_is(machine: Any) -> None:
    from hybridmf.device.cuda import gpu_of

    machine()
    assert gpu_of(GpuArray([1], index=3)) == "cuda:3"
    assert gpu_of(np.ones(1)) is None and gpu_of([1]) is None and gpu_of(None) is None

    class Older:
        __cuda_array_interface__ = np.ones(2).__array_interface__

    assert gpu_of(Older()) == "cuda:0"
