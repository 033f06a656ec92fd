"""Ratings that several GPUs upload, check and transpose together: the arrays of a transposition on the host."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import SIDES
from hybridmf.core.validate import csr_arrays
from hybridmf.data.slabs import InMemory
from hybridmf.errors import RatingsError
from hybridmf.formats import transpose
from hybridmf.gpu.matrix import DeviceMatrix
from hybridmf.model import late, training
from hybridmf.model.training import LocalRatings
from hybridmf.plan.grid import even_bounds
from hybridmf.plan.make import make_plan
from hybridmf.plan.types import Plan
from hybridmf.ranks import group, mcumsgd
from hybridmf.ranks.dealt import deal
from hybridmf.ranks.transport import nccl
from hybridmf.ranks.transport.threads import ThreadCommunicator, run_ranks
from support import fake_nccl
from support.devices import Tracked
from support.emulated import EmulatedDevice
from support.ranks import MODELS, Machine
from support.ratings import planted

MATRIX = planted(60, 40, 0.3)


def with_gaps() -> sp.csr_array:
    """Users and items without entries, at the ends and in between."""
    matrix = MATRIX.copy().tolil()
    matrix[[0, 7, 59]], matrix[:, [0, 12, 39]] = 0, 0
    found = matrix.tocsr()
    found.eliminate_zeros()
    return found


MATRICES = {"even": MATRIX, "gaps": with_gaps(), "few": planted(3, 2, 0.9), "wide": planted(5, 70, 0.4)}


def ratings_on(names: list[str], matrix: Any, dtype: str = "float32") -> tuple[LocalRatings, Any]:
    """Ratings of a fit on GPUs, and its solver."""
    model = MODELS["explicit"](device=names, random_state=0, dtype=dtype)
    data = LocalRatings(model, matrix)
    plan = data.place(make_plan(model._objective(), model._settings(), data.shape, data.nnz))
    return data, model._solver(plan, model._objective(), data, model._initial_state(data, plan, model._objective()), 0)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), (3, "float64"), (4, "float32")])
def test_the_arrays_are_those_of_the_host(
    name: str, size: int, dtype: str, gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "transposed", None)  # nothing is transposed on the host
    matrix = MATRICES[name].astype(dtype)
    data, solver = ratings_on(gpus(size), matrix, dtype)
    whole = {"user": matrix, "item": transpose(matrix)}
    assert data.shape == matrix.shape and data.nnz == matrix.nnz
    for side in SIDES:
        np.testing.assert_array_equal(data.degrees[side], np.diff(whole[side].indptr))
        for number, rank in enumerate(solver.ranks):
            expected = solver.layout.cut(side, number, InMemory(whole[side])).csr
            with rank.worker.active():
                found = [rank.worker.device.download(getattr(rank.halves[side], each)) for each in ARRAYS]
            for array, of_host in zip(found, (expected.indptr, expected.indices, expected.data), strict=True):
                np.testing.assert_array_equal(array, of_host)
            assert found[2].dtype == np.dtype(dtype)
    solver.close()


ARRAYS = ("indptr", "indices", "ratings")


@pytest.mark.parametrize("name", ["biases", "implicit"])
@pytest.mark.parametrize("entries", [1, 1 << 40])
def test_factors_are_those_of_ratings_transposed_on_the_host(
    name: str, entries: int, gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the matrix is checked before or while it is uploaded."""
    names = gpus(3)
    options = {"random_state": 0, "iterations": 2, "device": names}
    with monkeypatch.context() as patched:
        patched.setattr(Plan, "ratings_on_device", False)
        host = MODELS[name](**options).fit(MATRIX)
    monkeypatch.setattr(late, "LATE_ENTRIES", entries)
    monkeypatch.setattr(training, "transposed", None)
    model = MODELS[name](**options).fit(MATRIX)
    for factors in ("user_factors", "item_factors"):
        np.testing.assert_array_equal(getattr(model, factors), getattr(host, factors))
    np.testing.assert_array_equal(model._learned.item_counts, host._learned.item_counts)


@pytest.mark.parametrize("entries", [1, 1 << 40])
def test_sgd_on_several_gpus(entries: int, gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors of two CPU ranks, whether the matrix is checked before or while it is uploaded."""
    options = {"factors": 5, "random_state": 0, "iterations": 2, "dtype": "float64"}
    expected = hmf.SGD(device=["cpu"] * 2, **options).fit(MATRIX)
    monkeypatch.setattr(late, "LATE_ENTRIES", entries)
    for module in (training, mcumsgd):
        monkeypatch.setattr(module, "transposed", None)
    given = MATRIX.astype(np.float64)
    model = hmf.SGD(device=gpus(2), **options).fit(given)
    given.data[:] = 77
    for side in ("user", "item"):
        ours, theirs = (getattr(each._learned.state, side) for each in (model, expected))
        np.testing.assert_allclose(ours.matrix, theirs.matrix, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(model._learned.item_counts, np.bincount(MATRIX.indices, minlength=40))
    np.testing.assert_array_equal(model._learned.seen.toarray(), MATRIX.toarray() != 0)
    np.testing.assert_array_equal(model._learned.values, MATRIX.data)


@pytest.mark.parametrize("kind", ["prepared", "store", "resumed"])
def test_sgd_on_several_gpus_of_any_source(kind: str, gpus: Machine, tmp_path: Path) -> None:
    options = {"factors": 5, "random_state": 0, "iterations": 2, "dtype": "float64", "device": gpus(2)}
    expected = hmf.SGD(**options).fit(MATRIX, validation=MATRIX)
    ratings, more = hmf.Ratings.from_matrix(MATRIX), {}
    if kind == "prepared":
        ratings = hmf.PreparedRatings(ratings, dtype="float64")
    elif kind == "store":
        ratings = hmf.convert(ratings, tmp_path / "store")
    else:
        hmf.SGD(**options | {"iterations": 1}).fit(MATRIX, checkpoint=tmp_path / "run")
        more = {"resume_from": tmp_path / "run"}
    model = hmf.SGD(**options).fit(ratings, validation=MATRIX, **more)
    np.testing.assert_array_equal(model.user_factors, expected.user_factors)
    np.testing.assert_array_equal(model.item_factors, expected.item_factors)
    assert model.history_[-1]["rmse"] == expected.history_[-1]["rmse"]


@pytest.mark.parametrize("kind", [MODELS["explicit"], hmf.SGD])
@pytest.mark.parametrize(
    ("part", "where", "value"), [("indices", -2, 99), ("indices", 3, -2), ("data", -1, np.nan), ("data", 4, np.inf)]
)
def test_entries_of_any_gpu_are_checked(
    part: str, where: int, value: float, kind: Any, gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = MATRIX.copy()
    getattr(matrix, part)[where] = value
    messages = []
    for entries in (1, 1 << 40):
        monkeypatch.setattr(late, "LATE_ENTRIES", entries)
        with pytest.raises(RatingsError) as raised:
            kind(device=gpus(2)).fit(matrix)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_unsorted_entries_are_sorted_on_the_host(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "LATE_ENTRIES", 1)
    matrix, options = MATRIX.copy(), {"random_state": 0, "iterations": 1, "device": gpus(2)}
    for array in (matrix.indices, matrix.data):
        array[:2] = array[[1, 0]]
    found, expected = (MODELS["explicit"](**options).fit(each) for each in (matrix, MATRIX))
    np.testing.assert_array_equal(found.user_factors, expected.user_factors)


def test_prepared_ratings_start_from_the_host(gpus: Machine) -> None:
    options = {"random_state": 0, "iterations": 1, "device": gpus(2)}
    prepared = hmf.PreparedRatings(MATRIX, device="cuda:0")
    found, expected = (MODELS["explicit"](**options).fit(each) for each in (prepared, MATRIX))
    np.testing.assert_array_equal(found.user_factors, expected.user_factors)


def test_plans_for_which_the_host_transposes(gpus: Machine) -> None:
    def plan(**options: Any) -> Any:
        model = MODELS["explicit"](device=gpus(2), **options)
        return make_plan(model._objective(), model._settings(), MATRIX.shape, MATRIX.nnz)

    assert plan().ratings_on_device
    assert not plan(assembly="bals").ratings_on_device
    assert not plan(reorder="both").ratings_on_device
    split = plan().changed(scale=None, devices=("cuda:0", "cuda:1"), n_items=1 << 30)
    assert not split.ratings_on_device
    little = plan()
    spec = little.gpu
    assert not little.changed(gpu=replace(spec, free_bytes=3 * little.bytes["ratings"] - 1)).ratings_on_device


class NcclDevice(EmulatedDevice):
    """An emulated device whose arrays the stand-in of NCCL sends."""

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return super().empty(shape, dtype).view(fake_nccl.FakeArray)

    def download(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)


def test_exchange_through_nccl(gpus: Machine, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """A call of NCCL for each of two arrays and each other GPU."""
    if "cuda" in request.node.name:
        pytest.skip("stand-ins of GPUs")
    module, size = fake_nccl.Nccl(), 3
    monkeypatch.setattr(nccl, "_modules", lambda: (fake_nccl.fake_cupy(), module))
    monkeypatch.setattr(nccl, "_idle", nccl._Idle())
    devices, matrix = [NcclDevice() for _ in range(size)], MATRICES["gaps"].astype(np.float32)
    dealt = deal(devices, matrix.shape, *csr_arrays(matrix), 2.0)
    assert dealt is not None
    by_item = transpose(matrix)
    bounds = even_bounds(np.diff(by_item.indptr), size)

    def rank(control: ThreadCommunicator) -> DeviceMatrix:
        communicator = nccl.NcclCommunicator(control, control.rank)
        with fake_nccl.Device(control.rank):
            found = dealt[1].block(devices[control.rank], communicator, bounds)
        communicator.close()
        return found

    for found, first, last in zip(run_ranks(size, rank, timeout=20), bounds[:-1], bounds[1:], strict=True):
        expected = by_item[first:last]
        np.testing.assert_array_equal(found.indptr, expected.indptr)
        np.testing.assert_array_equal(np.asarray(found.indices), expected.indices)
        np.testing.assert_array_equal(np.asarray(found.data), expected.data)
    assert sorted(module.calls) == ["recv"] * 12 + ["send"] * 12


def test_memory_of_the_exchange(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice both orientations, as the plan says, and only both orientations afterwards."""
    names, matrix = gpus(2), planted(600, 400, 0.3)
    device: Any = group.open_device(names[0])
    if device.spec.name != "emulated":
        pytest.skip("only an emulated device counts its memory")
    memory = Tracked(device, monkeypatch)
    data, solver = ratings_on(names, matrix)
    rank = solver.ranks[0]
    both = sum(int(rank.halves[side].indices.nbytes + rank.halves[side].ratings.nbytes) for side in SIDES)
    assert memory.peak < 2.1 * both
    assert memory.alive < 1.3 * both  # and degrees, scales, factors
    solver.close()
    del data, solver, rank
    gc.collect()
    assert memory.alive == 0
