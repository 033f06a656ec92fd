"""Fits on a GPU whose ratings come slab by slab: the bits of fits that hold them all, on each device."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core import system
from hybridmf.core.validate import as_csr
from hybridmf.data.slabs import InMemory
from hybridmf.device import copier as copiers
from hybridmf.errors import NotPositiveDefiniteError, StoreError
from hybridmf.gpu.stream import entry_loader, slab_transfers
from hybridmf.plan.als_gpu import STREAM_SLAB
from hybridmf.plan.cost import cost_of
from hybridmf.plan.machine import LinkRates, Machine
from hybridmf.plan.make import check_memory
from hybridmf.ranks.su_als import RankALS
from support.devices import NETFLIX, limit_memory, on_a_gpu, plan_of
from support.half_sweeps import FITS
from support.host_factors import assert_same_fit
from support.marks import exhaustive
from support.ratings import planted

pytestmark = pytest.mark.usefixtures("tiny_gpu")

MATRIX = planted(50, 30, 0.8)
"""Entries take more memory than all else, so that there is a limit only streaming keeps."""

LIMIT = 14_000
"""Too little for the entries of MATRIX, enough for a few small slabs of them."""


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> hmf.Store:
    """MATRIX in slabs of at most 120 entries; no test changes it."""
    return hmf.convert(MATRIX, tmp_path_factory.mktemp("store") / "store", slab_bytes=960)


def fitted(kind: str, data: Any, **options: Any) -> Any:
    cls, given = FITS[kind]
    model = cls(**(given | {"iterations": 2, "random_state": 0, "device": "cuda"} | options))
    return model.fit(data, callback=lambda model, record: None)


@pytest.fixture
def streamed(request, gpu, store, monkeypatch):
    """(data, options, what the plan has to say) of each way slabs can come."""
    if request.param == "disk":
        monkeypatch.setattr(system, "available_memory", lambda: 1000)
    data = MATRIX if request.param == "ratings" else store
    options = {} if request.param == "resident" else {"gpu_memory_limit": LIMIT}
    source = {"resident": "disk", "ratings": "host"}.get(request.param, request.param)
    return data, options, (source, request.param == "resident")


METHODS = [
    ("implicit", {}),
    ("explicit", {}),
    ("biases", {"balance": True}),
    ("implicit", {"solver": "cg"}),
    ("explicit", {"assembly": "sparse_syrk"}),
    ("implicit", {"nonnegative": True}),
]


@pytest.mark.parametrize(
    ("streamed", "kind", "method"),
    [
        *(("host", *method) for method in (METHODS[0], *METHODS[3:])),
        *((source, *METHODS[0]) for source in ("resident", "ratings")),
        ("disk", *METHODS[2]),
        *(exhaustive("host", *method) for method in METHODS[1:3]),
        *(exhaustive(source, *method) for source in ("resident", "ratings", "disk") for method in METHODS[3:]),
    ],
    indirect=["streamed"],
)
def test_the_bits_are_those_of_a_fit_that_holds_all_ratings(streamed, kind, method):
    data, options, expected = streamed
    iterations = 1 if method else 2  # the next one begins with slabs that are loaded ahead
    model = fitted(kind, data, iterations=iterations, **method, **options)
    assert (model.plan_.streamed, model.plan_.resident) == expected
    assert_same_fit(model, fitted(kind, MATRIX, iterations=iterations, **method))
    assert not [thread for thread in threading.enumerate() if thread.name == "hybridmf-slabs"]


def test_float64_and_zeros_are_converted_on_the_way(gpu, tmp_path):
    matrix = MATRIX.copy()
    matrix.data[::7] = 0
    store = hmf.convert(matrix, tmp_path / "zeros", slab_bytes=960)
    cases = [("implicit", "float32", LIMIT), ("explicit", "float32", LIMIT)]
    if gpu.spec.name != "emulated":  # where kernels of another type take long to compile
        cases.append(("explicit", "float64", 2 * LIMIT))
    for kind, dtype, limit in cases:
        model = fitted(kind, store, iterations=1, dtype=dtype, gpu_memory_limit=limit)
        assert model.plan_.streamed == "host"
        assert_same_fit(model, fitted(kind, matrix, iterations=1, dtype=dtype))


def test_slabs_without_entries(gpu, tmp_path):
    matrix = sp.block_diag([MATRIX, sp.csr_array((40, 20))], format="csr")
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes=160)
    assert any(slab.matrix().nnz == 0 for slab in store.slabs())
    model = fitted("implicit", store, iterations=1, gpu_memory_limit=2 * LIMIT)
    assert model.plan_.streamed == "host"
    assert_same_fit(model, fitted("implicit", matrix, iterations=1))


def test_an_altered_slab_ends_the_fit_and_leaves_no_thread(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(system, "available_memory", lambda: 1000)
    store = hmf.convert(MATRIX, tmp_path / "store", slab_bytes=960)
    path = store.path / "user-000003.values.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    model = hmf.ImplicitALS(factors=7, device="cuda", gpu_memory_limit=LIMIT, random_state=0)
    with pytest.raises(StoreError, match=r"user-000003\.values\.npy' was altered .*convert the ratings again"):
        model.fit(store)
    assert np.any(model.item_factors != 0)  # the half sweep before it is kept
    assert not [thread for thread in threading.enumerate() if thread.name == "hybridmf-slabs"]


def test_a_system_that_cannot_be_solved_is_named_by_its_row(gpu):
    one_entry = sp.csr_array(([1.0], ([0], [3])), shape=(1, 30))  # for seven unknowns
    matrix = sp.vstack([MATRIX[:41], one_entry, MATRIX[42:]], format="csr")
    with pytest.raises(NotPositiveDefiniteError) as expected:
        fitted("explicit", matrix, regularization=0.0)
    with pytest.raises(NotPositiveDefiniteError) as found:
        fitted("explicit", matrix, regularization=0.0, gpu_memory_limit=LIMIT)
    assert "of user 41 are" in str(found.value)
    assert str(found.value) == str(expected.value)
    assert (found.value.side, found.value.row) == (expected.value.side, expected.value.row)


def test_the_thread_ends_when_no_more_slabs_are_requested(device):
    slabs = InMemory(as_csr(MATRIX)).cut(50)
    pipeline = entry_loader(device, 120, np.float32, buffers=2)
    for _ in range(2):
        stream = pipeline.loads(slab_transfers(slabs))
        number, indices, ratings = next(stream)
        assert number == 0
        part = slabs.matrix(0)
        np.testing.assert_array_equal(device.download(indices), part.indices)
        np.testing.assert_array_equal(device.download(ratings), part.data)
        stream.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "hybridmf-slabs"]


class Watched(InMemory):
    """Slabs that tell when each is asked for."""

    def matrix(self, slab):
        self.asked.append(slab)
        if slab == getattr(self, "broken", None):
            raise StoreError("this slab is gone")
        return super().matrix(slab)


def watched(entries: int) -> Watched:
    slabs = Watched(as_csr(MATRIX)).cut(entries)
    object.__setattr__(slabs, "asked", [])
    return slabs


def collected(device, stream) -> np.ndarray:
    return np.concatenate([device.download(ratings).copy() for _, _, ratings in stream])


def loading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hybridmf-slabs"]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def test_the_first_slabs_of_the_next_half_sweep_are_loaded_ahead(device):
    first, second = watched(50), watched(70)
    pipeline, every = entry_loader(device, 120, np.float32), as_csr(MATRIX).data
    np.testing.assert_array_equal(
        collected(device, pipeline.loads(slab_transfers(first), slab_transfers(second))), every
    )
    wait_for(lambda: second.asked == [0, 1, 2])  # as many as there are buffers
    for slabs, following in ((second, first), (first, second)) * 2:
        np.testing.assert_array_equal(
            collected(device, pipeline.loads(slab_transfers(slabs), slab_transfers(following))), every
        )
    assert second.asked[: 2 * len(second.bounds) - 2] == 2 * [*range(len(second.bounds) - 1)]  # each once
    assert len(loading_threads()) == 1
    del pipeline
    gc.collect()
    wait_for(lambda: not loading_threads())


def test_other_slabs_than_were_expected(device):
    first, second, third = watched(50), watched(70), watched(60)
    pipeline, every = entry_loader(device, 120, np.float32), as_csr(MATRIX).data
    collected(device, pipeline.loads(slab_transfers(first), slab_transfers(second)))
    np.testing.assert_array_equal(
        collected(device, pipeline.loads(slab_transfers(third), slab_transfers(second))), every
    )
    np.testing.assert_array_equal(collected(device, pipeline.loads(slab_transfers(second))), every)
    assert not loading_threads()
    collected(device, pipeline.loads(slab_transfers(first), slab_transfers(second)))
    pipeline.reserve(500)  # nothing may still be on its way to the buffers that go
    np.testing.assert_array_equal(collected(device, pipeline.loads(slab_transfers(second))), every)


def test_a_slab_that_fails_early_raises_where_it_is_requested(device):
    first, second = watched(50), watched(70)
    object.__setattr__(second, "broken", 1)
    pipeline = entry_loader(device, 120, np.float32)
    collected(device, pipeline.loads(slab_transfers(first), slab_transfers(second)))
    with pytest.raises(StoreError, match="this slab is gone"):
        collected(device, pipeline.loads(slab_transfers(second), slab_transfers(first)))
    assert not loading_threads()
    np.testing.assert_array_equal(collected(device, pipeline.loads(slab_transfers(first))), as_csr(MATRIX).data)


def test_a_loader_that_ends_on_its_own_thread(device, monkeypatch):
    """The garbage collector runs on any thread, so on this one, too."""
    unraisable, held = [], []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    collect = threading.Event()

    class Last(Watched):
        def matrix(self, slab):
            if self.asked:
                assert collect.wait(10)
                held.clear()
            return super().matrix(slab)

    last = Last(as_csr(MATRIX)).cut(50)
    object.__setattr__(last, "asked", [])
    held.append(entry_loader(device, 120, np.float32))
    collected(device, held[0].loads(slab_transfers(watched(50)), slab_transfers(last)))
    thread = loading_threads()[0]
    collect.set()
    thread.join(10)
    assert not thread.is_alive()
    assert held == unraisable == []


def test_an_objective_whose_ratings_do_not_fit_on_the_gpu_is_computed_on_the_cpu(gpu, monkeypatch, caplog):
    model = fitted("biases", MATRIX, gpu_memory_limit=LIMIT)
    expected = model.objective(MATRIX)
    limit_memory(gpu, monkeypatch, 2000)
    with caplog.at_level(logging.INFO, "hybridmf"):
        assert model.objective(MATRIX) == pytest.approx(expected, rel=1e-6)
    assert "the CPU computes the objective" in caplog.text


def test_ratings_stream_only_where_they_do_not_fit():
    roomy = plan_of(100 << 30)
    assert (roomy.streamed, roomy.slab) == ("", 0)
    tight = plan_of(1400 << 20)
    check_memory(tight)
    assert tight.streamed == "host" and 0.9 * STREAM_SLAB < tight.slab <= STREAM_SLAB
    assert "1,511.7 MiB come from the memory of the host in each iteration" in str(tight)
    assert f"streamed  from host in slabs of up to {tight.slab:,} entries" in str(tight)
    assert 0 < plan_of(300_000_000).slab < STREAM_SLAB
    assert plan_of(200_000_000).factors_on_host  # see test_offloaded.py
    for options in ({"assembly": "bals"}, {"reorder": "both"}):
        assert plan_of(1 << 30, **options).streamed == ""


def test_a_streamed_iteration_takes_at_least_as_long_as_its_copies():
    machine, moved = Machine(), 16 * NETFLIX[1]
    whole = cost_of(plan_of(100 << 30).changed(dual_sides=()), machine).iteration  # streamed rows are all primal
    longer = cost_of(plan_of(1 << 30), machine).iteration / max(whole, moved / LinkRates().pinned_bytes)
    assert 1 < longer < 1.3  # the first slab loads alone, and kernels end before the next slab's start
    assert cost_of(plan_of(100 << 30, slab=1 << 20), machine).iteration == whole
    disk = plan_of(1 << 30).changed(streamed="disk")
    assert cost_of(disk, machine).iteration > moved / LinkRates().pinned_bytes


def test_a_store_stays_where_it_fits(monkeypatch):
    assert plan_of(100 << 30, slab=1 << 20).resident
    assert "once: they stay on the GPU" in str(plan_of(100 << 30, slab=1 << 20))
    monkeypatch.setattr(system, "available_memory", lambda: 100 << 30)
    assert (plan_of(1 << 30, slab=1 << 20).streamed, plan_of(1 << 30, slab=1 << 20).resident) == ("host", False)
    monkeypatch.setattr(system, "available_memory", lambda: 1 << 30)
    assert plan_of(1 << 30, slab=1 << 20).streamed == "disk"
    with pytest.raises(ValueError, match=r'assembly="bals" cuts all ratings into tiles.*to_ratings'):
        plan_of(1 << 30, slab=1 << 20, assembly="bals")


# ----------------------------------------------------------------------------------------------------------- copies


@on_a_gpu
def test_copies_arrive_complete_on_every_path(device, monkeypatch, caplog):
    monkeypatch.setattr(copiers, "COPY_CHUNK", 1 << 16)
    source = np.random.default_rng(0).integers(0, 1 << 30, 123_457, dtype=np.int32)
    for pinned in (False, True):
        copier = device.copier()
        if pinned:
            assert copier.pin(source)
            with caplog.at_level(logging.INFO, "hybridmf"):
                assert not device.copier().pin(source)  # once is enough
            assert "cannot be page-locked" in caplog.text
        target = device.zeros(len(source) + 5, np.int32)
        copier.after(device.record())
        copier.copy(target, source)
        device.wait(copier.mark())
        found = device.download(target)
        np.testing.assert_array_equal(found[: len(source)], source)
        assert not found[len(source) :].any()
        part = device.zeros(100, np.int32)
        copier.after(device.record())
        copier.copy(part, source[1000:1100])
        copier.copy(part, source[:0])
        copier.synchronize()
        np.testing.assert_array_equal(device.download(part), source[1000:1100])
        with pytest.raises(ValueError, match="cannot copy"):
            copier.copy(part, source)
        del copier
    assert device.copier().pin(source)  # it was released
    assert device.copier().pin(source[:0])


@on_a_gpu
def test_a_larger_fit_streams_to_the_same_bits(device):
    matrix = planted(3000, 900, 0.3)  # 800,000 entries: slabs of several sizes, long rows
    model = hmf.ImplicitALS(factors=64, iterations=3, device="cuda", random_state=0, gpu_memory_limit="6MB").fit(matrix)
    assert model.plan_.streamed == "host"
    whole = hmf.ImplicitALS(factors=64, iterations=3, device="cuda", random_state=0).fit(matrix)
    assert whole.plan_.streamed == ""
    np.testing.assert_array_equal(model.user_factors, whole.user_factors)
    np.testing.assert_array_equal(model.item_factors, whole.item_factors)


def test_the_streamed_solver_is_the_plans(gpu, store):
    model = hmf.ImplicitALS(factors=7, device="cuda", random_state=0)
    seen = []
    original = RankALS.solve

    def solve(self: RankALS, side: Any) -> Any:
        seen.append(self.worker.pipeline)
        return original(self, side)

    RankALS.solve = solve  # type: ignore[method-assign]
    try:
        model.set_params(iterations=1).fit(store)
    finally:
        RankALS.solve = original  # type: ignore[method-assign]
    assert seen == [None, None]  # resident: no pipeline
