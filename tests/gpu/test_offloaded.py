"""Fits on a GPU whose factors stay on the host: bits of fits that hold all where the fixed side fits, else rounding."""

from __future__ import annotations

import gc
import importlib
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core import system
from hybridmf.core.objective import SIDES, Factors, State
from hybridmf.core.validate import as_csr
from hybridmf.data.slabs import InMemory, slab_bounds
from hybridmf.errors import DeviceMemoryError, MemoryBudgetError, NotPositiveDefiniteError, StoreError
from hybridmf.formats import transpose
from hybridmf.gpu.factors import Copiers, HostFactors, HostTables, range_on_host, to_device, to_host
from hybridmf.gpu.offloaded import Drain, HostHalf, part_bounds
from hybridmf.model.engine import engine_for
from hybridmf.plan import fused as plan_fused
from hybridmf.plan.cost import cost_of
from hybridmf.plan.fused import gram_bytes
from hybridmf.plan.machine import Machine
from hybridmf.plan.make import check_memory
from hybridmf.ranks.su_als import RankALS
from support.devices import NETFLIX, Tracked, on_a_gpu, plan_of
from support.half_sweeps import FITS, OBJECTIVES, Problem, check_solution, plan_on, row_errors, row_range
from support.host_factors import (
    HOST_LIMIT,
    MATRIX,
    TURNS_LIMIT,
    assert_same_fit,
    fitted,
    no_threads,
    partitioned,
    solver,
)
from support.marks import exhaustive
from support.ranks import one_device
from support.ratings import planted
from support.solvers import iterate

pytestmark = pytest.mark.usefixtures("tiny_gpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> hmf.Store:
    """MATRIX in slabs of at most 120 entries; no test changes it."""
    return hmf.convert(MATRIX, tmp_path_factory.mktemp("store") / "store", slab_bytes=960)


def in_memory(host: RankALS, data: Any = MATRIX) -> RankALS:
    """The same fit by a device that holds all."""
    plan = host.plan.changed(scale=None, streamed="")
    state = State(*(host.own[side].on_host() for side in SIDES), host.mean)
    matrix = as_csr(data, dtype=plan.dtype, drop_zeros=host.objective.is_implicit)
    return one_device(matrix, transpose(matrix, num_threads=1), host.objective, plan, state, device=host.worker.device)


def test_missing_memory_for_new_rows_is_reported(gpu, monkeypatch):
    """Smaller batches are tried, which need as much; the last of them says so."""
    device, host = gpu, solver("explicit", gpu, 1, 2, segment=3)
    slab = host.halves["user"].solvers[0]
    zeros = device.zeros

    def full(shape: Any, dtype: Any) -> Any:
        if shape == (len(slab), slab.width):
            raise DeviceMemoryError("emulated: no room for new rows")
        return zeros(shape, dtype)

    monkeypatch.setattr(device, "zeros", full)
    assert len(slab.long.rows) > 1
    with pytest.raises(DeviceMemoryError, match="no room for new rows"):
        host.update("user")


def factors_after(solver: Any, sweeps: int = 1) -> list[np.ndarray]:
    iterate(solver, sweeps)
    sides = [solver.state.side(side).on_host() for side in SIDES]
    return [array for side in sides for array in (side.matrix, side.bias) if array is not None]


# ------------------------------------------------------------------------------------------------ the fixed side whole


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("implicit", {}),
        ("explicit", {"segment": 17}),
        ("biases", {}),
        ("implicit", {"solver": "cg"}),
        ("explicit", {"assembly": "sparse_syrk"}),
        ("biases", {"assembly": "mo_als", "solver": "cg", "regularization_scaling": "none"}),
        ("biases", {"nonnegative": True, "segment": 17}),
    ],
)
def test_the_bits_are_those_of_a_fit_that_holds_all(kind, options, gpu):
    host = solver(kind, gpu, 1, 4, **options)
    whole = in_memory(host)
    for one, other in zip(factors_after(host), factors_after(whole), strict=True):
        np.testing.assert_array_equal(one, other)
    assert host.objective_value() == whole.objective_value()
    assert no_threads()


def test_balance_is_that_of_a_fit_that_holds_all(gpu):
    host = solver("biases", gpu, 1, 3, balance=True)
    whole = in_memory(host)
    for one, other in zip(factors_after(host, 2), factors_after(whole, 2), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_an_interrupted_balance_changes_neither_side(gpu, monkeypatch):
    host = solver("explicit", gpu, 1, 3)
    before = dict(host.own)
    calls = iter(range(9))

    def interrupted(*arguments: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return times(*arguments)

    times = HostFactors.times
    monkeypatch.setattr(HostFactors, "times", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.balance()
    assert all(host.own[side] is before[side] for side in SIDES)


@pytest.mark.parametrize("source", ["ratings", "host", "disk"])
def test_a_fit_under_a_limit_has_the_same_bits(source, gpu, store, monkeypatch):
    if source == "disk":
        monkeypatch.setattr(system, "available_memory", lambda: 10_000)
    model = fitted("implicit", MATRIX if source == "ratings" else store, gpu_memory_limit=HOST_LIMIT)
    plan = model.plan_
    assert plan.factors_on_host and (plan.streamed, plan.resident) == ("disk" if source == "disk" else "host", False)
    assert all(half.turns == 1 for half in plan.scale.halves.values())
    assert_same_fit(model, fitted("implicit", MATRIX, row_form="primal"))
    assert model.user_factors.flags.c_contiguous and model.recommend(0, N=3)[0].shape == (3,)
    assert engine_for(plan).name == "cpu"  # there is no room on the GPU
    np.testing.assert_allclose(model.transform(MATRIX[:3]), model.user_factors[:3], rtol=1e-3, atol=1e-4)
    assert no_threads()


# ------------------------------------------------------------------------------------------------ in turns

LENGTHS = (0, 1, 15, 16, 17, 18, 33, 34, 0, 2, 52)
"""Rows around chunks (16) and segments (17) beside a long one and empty ones, as in test_als.py."""


def solved_in_turns(problem: Problem, device: Any, parts: int, batches: int, start: Any = None, **changes: Any) -> Any:
    """A half sweep whose fixed side comes in parts."""
    plan = plan_on(device, problem.objective, problem.matrix, problem.rank, problem.dtype, **changes)
    plan = partitioned(plan, dict.fromkeys(SIDES, parts), dict.fromkeys(SIDES, batches))
    assert plan.scale is not None
    rows = slab_bounds(np.diff(problem.matrix.indptr), plan.scale.slab("user"), plan.scale.slab_rows("user"))
    slabs = InMemory(problem.matrix, rows)
    half = HostHalf(device, "user", slabs, problem.objective, plan, Copiers(device))
    width = half.tables.shape[1]
    begin = None if start is None else to_host(start, width)
    return half.solve(to_host(problem.fixed, width), problem.mean, begin).on_host()


@pytest.mark.parametrize(
    ("assembly", "name"),
    [
        ("fused", "implicit"),
        ("fused", "explicit-biases"),
        ("sparse_syrk", "explicit-biases"),
        ("mo_als", "implicit"),
        exhaustive("sparse_syrk", "implicit"),
        exhaustive("mo_als", "explicit-biases"),
    ],
)
def test_parts_give_the_references_rows(name, assembly, device):
    from support.ratings import rows_of

    rank = 6 if "biases" in name else 7
    problem = Problem(rows_of(LENGTHS, 60), OBJECTIVES[name], rank)
    found = [
        solved_in_turns(problem, device, parts, batches, assembly=assembly, segment=17)
        for parts, batches in ((2, 1), (7, 1), (7, 5), (60, 2))
    ]
    for each in found:
        check_solution(problem, each)
    np.testing.assert_array_equal(found[1].matrix, found[2].matrix)  # other waves, the same sums


def test_more_parts_than_the_kernels_add_at_a_time(device, monkeypatch):
    from support.ratings import rows_of

    problem = Problem(rows_of(LENGTHS, 60), OBJECTIVES["implicit"])
    one = solved_in_turns(problem, device, 5, 1)
    monkeypatch.setattr(importlib.import_module("hybridmf.plan.half_sweep"), "CHUNK_BYTES", 3000)  # two systems
    other = solved_in_turns(problem, device, 5, 1)
    np.testing.assert_array_equal(one.matrix, other.matrix)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("implicit", {}),
        ("explicit", {"segment": 17, "buffers": 1}),
        ("biases", {"balance": True}),
        ("implicit", {"solver": "cg"}),
        ("implicit", {"nonnegative": True}),
    ],
)
def test_parts_change_rounding_only_and_reruns_nothing(kind, options, gpu):
    runs = [solver(kind, gpu, 3, batches, **options) for batches in (4, 4, 2)]
    whole = in_memory(runs[0])
    assert runs[0].objective_value() == pytest.approx(whole.objective_value(), rel=1e-6)
    found = [factors_after(run) for run in runs]
    tolerance = 1e-2 if options.get("solver") == "cg" else 2e-3
    for one, rerun, fewer, other in zip(*found, factors_after(whole), strict=True):
        np.testing.assert_array_equal(one, rerun)
        if not options.get("balance"):
            np.testing.assert_array_equal(one, fewer)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert runs[0].objective_value() == pytest.approx(whole.objective_value(), rel=1e-4)
    assert no_threads()


@pytest.mark.parametrize("parts", [1, 3])
def test_float64_by_a_published_assembly(parts, gpu):
    host = solver("explicit", gpu, parts, 3, dtype="float64", assembly="sparse_syrk")
    whole = in_memory(host)
    for one, other in zip(factors_after(host), factors_after(whole), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)
    assert host.objective_value() == pytest.approx(whole.objective_value(), rel=1e-9)


def test_approximate_solvers_start_from_the_last_factors(device):
    from support.ratings import rows_of

    problem = Problem(rows_of(LENGTHS, 60), OBJECTIVES["implicit"])
    exact = problem.exact()
    start = Factors(exact.matrix.astype(np.float32))
    for parts in (1, 4):
        found = solved_in_turns(problem, device, parts, 3, start, solver="cg", cg_steps=1)
        assert row_errors(found, exact).max() < 1e-4  # which one step from zero does not reach
        assert row_errors(solved_in_turns(problem, device, parts, 3, solver="cg", cg_steps=1), exact).max() > 1e-2


def test_a_fit_in_turns_under_a_limit(gpu, store):
    for data, iterations in ((MATRIX, 2), (store, 1)):
        whole = fitted("explicit", MATRIX, iterations=iterations)
        model = fitted("explicit", data, iterations=iterations, gpu_memory_limit=TURNS_LIMIT)
        assert model.plan_.scale.halves["item"].turns > 1
        np.testing.assert_allclose(model.user_factors, whole.user_factors, rtol=1e-3, atol=1e-3)
        objectives = [[record["objective"] for record in each.history_] for each in (model, whole)]
        np.testing.assert_allclose(*objectives, rtol=1e-5)


def test_slabs_and_rows_without_entries(gpu):
    matrix = sp.block_diag([MATRIX, sp.csr_array((40, 20))], format="csr")
    for parts in (1, 4):
        host = solver("implicit", gpu, parts, 20, matrix)
        whole = in_memory(host, matrix)
        for one, other in zip(factors_after(host), factors_after(whole), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


@on_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_larger_fit_from_the_host(device, dtype):
    matrix = planted(3000, 900, 0.3)
    for kind, one_turn in (("implicit", 2_000_000), ("biases", 2_200_000)):
        options = {"factors": 64, "dtype": dtype, "iterations": 3}
        whole = fitted(kind, matrix, **options)
        limits = (one_turn, 600_000) if dtype == "float32" else (3_600_000, 1_200_000)
        for limit, turns in zip(limits, (False, True), strict=True):
            model = fitted(kind, matrix, gpu_memory_limit=limit, **options)
            assert any(half.turns > 1 for half in model.plan_.scale.halves.values()) == turns
            if turns:
                np.testing.assert_allclose(model.user_factors, whole.user_factors, rtol=1e-2, atol=1e-3)
            else:
                assert_same_fit(model, whole)


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_system_that_cannot_be_solved_is_named_by_its_row(gpu):
    one_entry = sp.csr_array(([1.0], ([0], [3])), shape=(1, 30))  # for seven unknowns
    matrix = sp.vstack([MATRIX[:41], one_entry, MATRIX[42:]], format="csr")
    for parts in (1, 3):
        host = solver("explicit", gpu, parts, 4, matrix.T.tocsr(), regularization=0.0)  # users' factors are drawn
        before = host.own["item"]
        with pytest.raises(NotPositiveDefiniteError, match="of item 41 are"):
            host.update("item")
        assert host.own["item"] is before and no_threads()


def test_an_altered_slab_leaves_the_half_sweep_before_it(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(system, "available_memory", lambda: 10_000)
    store = hmf.convert(MATRIX, tmp_path / "store", slab_bytes=960)
    path = store.path / "user-000003.values.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    model = hmf.ImplicitALS(factors=7, device="cuda", gpu_memory_limit=HOST_LIMIT, random_state=0)
    with pytest.raises(StoreError, match=r"user-000003\.values\.npy' was altered .*convert the ratings again"):
        model.fit(store)
    assert model.plan_.factors_on_host and np.any(model.item_factors != 0)
    assert no_threads()


@pytest.mark.parametrize("parts", [1, 3])
def test_ctrl_c_leaves_the_last_complete_half_sweep(parts, gpu, monkeypatch):
    host = solver("implicit", gpu, parts, 4)
    factors_after(host)
    before = [host.own[side].matrix.copy() for side in SIDES]
    calls = iter(range(100))
    put = Drain.put

    def interrupted(self: Drain, pairs: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        put(self, pairs)

    monkeypatch.setattr(Drain, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.update("item")
    for side, expected in zip(SIDES, before, strict=True):
        np.testing.assert_array_equal(host.state.side(side).matrix, expected)
    assert no_threads()


def test_a_failed_download_ends_the_half_sweep(gpu, monkeypatch):
    host = solver("implicit", gpu, 1, 4)

    def broken(target: Any, source: Any) -> None:
        raise OSError("the link is down")

    monkeypatch.setattr(host.halves["item"].copiers.solutions, "fetch", broken, raising=False)
    with pytest.raises(OSError, match="the link is down"):
        host.update("item")
    assert no_threads()


def test_checkpoints_resume_wherever_factors_are(gpu, tmp_path):
    cls, given = FITS["biases"]
    options = given | {"random_state": 0, "device": "cuda", "row_form": "primal"}
    straight = cls(**options, iterations=3).fit(MATRIX)
    first = cls(**options, iterations=2, gpu_memory_limit=HOST_LIMIT).fit(MATRIX, checkpoint=tmp_path)
    assert first.plan_.factors_on_host
    resumed = cls(**options, iterations=3).fit(MATRIX, resume_from=tmp_path)
    assert not resumed.plan_.factors_on_host
    np.testing.assert_array_equal(resumed.user_factors, straight.user_factors)
    again = cls(**options, iterations=3, gpu_memory_limit=HOST_LIMIT).fit(MATRIX, resume_from=tmp_path)
    np.testing.assert_array_equal(again.user_factors, straight.user_factors)
    assert again.user_bias_ is not None and pickle.loads(pickle.dumps(again)).n_iter_ == 3


def test_states_seen_by_a_callback_do_not_change(gpu):
    cls, given = FITS["implicit"]
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def look(model: Any, record: Any) -> None:
        seen.append((model.user_factors_, model.user_factors_.copy()))

    # eight factors: rows are whole pieces of 16 bytes, and models have the tables themselves
    model = cls(**(given | {"factors": 8}), iterations=3, random_state=0, device="cuda", gpu_memory_limit=HOST_LIMIT)
    model.fit(MATRIX, callback=look)
    assert model.plan_.factors_on_host
    for view, copy in seen:
        np.testing.assert_array_equal(view, copy)


# ------------------------------------------------------------------------------------------------ parts


def test_tables_are_reused_when_unreferenced(device):
    tables = HostTables((3, 4), np.float32)
    tables.lock(device.copier())
    one, two = tables.take(), tables.take()
    first = one.ctypes.data
    assert one.shape == (3, 4) and first != two.ctypes.data
    part = one[1:][:, :2]
    del one
    gc.collect()
    assert tables.take().ctypes.data not in (first, two.ctypes.data)  # a view of a view still holds it
    del part
    gc.collect()
    assert tables.take().ctypes.data in (first, two.ctypes.data) or tables.take().ctypes.data == first


def test_factors_on_the_host_are_factors(device):
    given = Factors(np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4, dtype=np.float32))
    host = to_host(given, 4)
    assert len(host) == 4 and host.table.tolist()[1] == [3, 4, 5, 1]
    np.testing.assert_array_equal(host.matrix, given.matrix)
    np.testing.assert_array_equal(host.bias, given.bias)
    assert to_host(host, 4) is host and host.matrix is host.matrix and host.matrix.flags.c_contiguous
    on_device = host.sent(Copiers(device), 1, 3)
    np.testing.assert_array_equal(device.download(on_device.table), host.table[1:3])
    np.testing.assert_array_equal(device.download(on_device.device_bias), given.bias[1:3])
    again = pickle.loads(pickle.dumps(host))
    np.testing.assert_array_equal(again.matrix, given.matrix)
    plain = to_host(Factors(np.ones((2, 4), np.float32)), 4)
    assert plain.matrix is plain.matrix and np.shares_memory(plain.matrix, plain.table) and plain.bias is None


@pytest.mark.parametrize("shape", [(1, 1), (40, 100), (300, 36), (0, 4)])
def test_the_range_of_a_table_is_that_of_the_device(shape, device, monkeypatch):
    monkeypatch.setattr("hybridmf.gpu.factors.EXACT_ROWS", 7)
    table = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    if len(table) > 1:
        table[1] = 0
    assert range_on_host(table) == row_range(device, device.upload(table))[0]


def test_a_half_sweep_finds_the_range_of_its_factors(gpu):
    for parts in (1, 3):
        host = solver("explicit", gpu, parts, 4)
        host.update("item")
        found = host.own["item"]
        assert found.range == range_on_host(found.table)


def test_the_host_computes_a_range_only_if_no_device_has_all_rows(gpu, monkeypatch):
    """A look at a table of many gigabytes takes longer than to copy it."""
    looked: list[int] = []
    monkeypatch.setattr("hybridmf.gpu.offloaded.range_on_host", lambda table: looked.append(len(table)) or find(table))
    find = range_on_host
    for parts, assembly, times in ((1, "fused", 0), (3, "sparse_syrk", 0), (3, "fused", 1)):
        host = solver("explicit", gpu, parts, 4, assembly=assembly)
        host.objective_value()
        assert not looked
        host.update("item")  # the first users are not of a half sweep, which would have seen their range
        assert len(looked) == times


@pytest.mark.parametrize(("rows", "parts"), [(10, 1), (10, 3), (10, 10), (3, 5), (0, 2)])
def test_parts_cover_the_fixed_side(rows, parts):
    bounds = part_bounds(rows, parts)
    assert bounds[0] == 0 and bounds[-1] == rows and len(bounds) == parts + 1
    assert np.all(np.diff(bounds) >= 0) and np.diff(bounds).max() == -(-rows // parts)


# ------------------------------------------------------------------------------------------------ plans


def test_a_plan_falls_from_the_gpu_to_the_host_to_turns():
    limits = {8 << 30: "", 400_000_000: "ratings", 250_000_000: "turns", 60_000_000: "turns"}
    for limit, away in limits.items():
        plan = plan_of(limit)
        check_memory(plan)
        assert plan.total_bytes <= limit
        assert plan.streamed == ("host" if away else "") and plan.factors_on_host == (away == "turns")
        text = str(plan)
        assert ("factors do not fit on the GPU: they stay in the memory of the host" in text) == plan.factors_on_host
        if plan.factors_on_host:
            assert any(half.turns > 1 for half in plan.scale.halves.values()) == (away == "turns")
            assert plan.scale.halves["user"].turns == 1  # items are few
            assert "host      " in text and "factors, old and new" in text and "waves" in text
            assert plan.host_bytes == 2 * sum(NETFLIX[0]) * 64 * 4
    assert "fixed side streamed in" in text and "on each" not in text


def test_moving_factors_takes_time():
    costs = [cost_of(plan_of(limit), Machine()).iteration for limit in (8 << 30, 1 << 30, 300_000_000, 60_000_000)]
    assert costs == sorted(costs) and costs[-1] > 1.1 * costs[1]


def test_settings_that_keep_all_on_the_gpu_are_named():
    for options, message in (
        ({"assembly": "bals"}, 'assembly="bals" needs ratings and factors on the GPU, assembly="auto" streams them'),
        ({"reorder": "both"}, 'reorder= needs ratings and factors on the GPU, reorder="none" streams them'),
    ):
        with pytest.raises(DeviceMemoryError, match=message):
            check_memory(plan_of(200_000_000, **options))
    with pytest.raises(DeviceMemoryError, match=r"the fit needs about .*use fewer factors"):
        check_memory(plan_of(1_000_000))


def test_a_host_without_room_is_named(monkeypatch):
    plan = plan_of(200_000_000)
    monkeypatch.setattr(system, "available_memory", lambda: plan.host_bytes - 1)
    with pytest.raises(MemoryBudgetError, match=r"in the memory of the host they need about 243\.1 MiB"):
        check_memory(plan)


@pytest.mark.parametrize(
    ("kind", "options", "parts"),
    [
        ("explicit", {}, 1),
        ("explicit", {}, 3),
        ("biases", {"solver": "cg"}, 3),
        ("implicit", {"assembly": "sparse_syrk"}, 3),
        ("biases", {"nonnegative": True}, 3),
        exhaustive("biases", {"solver": "cg"}, 1),
        exhaustive("implicit", {"assembly": "sparse_syrk"}, 1),
    ],
)
def test_memory_stays_within_the_plan(kind, options, parts, gpu, monkeypatch):
    if gpu.spec.name != "emulated":
        pytest.skip("the pool of a GPU keeps what was given back")
    monkeypatch.setattr(plan_fused, "gram_bytes", gram_bytes)
    tracked = Tracked(gpu, monkeypatch)
    host = solver(kind, gpu, parts, 8, planted(160, 120, 0.05, seed=3), **options)
    factors_after(host)
    planned = host.plan.scale.bytes_per_gpu
    # of each slab a ridge and one more offset; a Gram matrix, counters of kernels
    slabs = sum(len(host.halves[side].solvers) for side in SIDES)
    assert 0.7 * planned < tracked.peak <= planned + slabs * (4 * 7 + 8) + 1500


@on_a_gpu
def test_copies_from_the_device_arrive_whole(device, monkeypatch, caplog):
    monkeypatch.setattr("hybridmf.device.copier.COPY_CHUNK", 1 << 16)
    source = np.random.default_rng(0).standard_normal((1234, 101)).astype(np.float32)
    for pinned in (False, True):
        first = device.copier()
        target = np.zeros_like(source)
        if pinned:
            with caplog.at_level(logging.INFO, "hybridmf"):
                assert first.pin(target)
        copier = first.twin()
        on_device = device.upload(source)
        copier.after(device.record())
        copier.fetch(target, on_device)
        np.testing.assert_array_equal(target, source)
        copier.fetch(target[3:5], on_device[7:9])
        np.testing.assert_array_equal(target[3:5], source[7:9])
        copier.fetch(target[:0], on_device[:0])
        with pytest.raises(ValueError, match="cannot fetch"):
            copier.fetch(target[:2], on_device)
        again = device.zeros(source.size, np.float32)
        copier.copy(again, target.reshape(-1))
        copier.synchronize()
        del copier, first
    tables = to_device(device, Factors(source), 104)
    assert tables.table.shape == (1234, 104)
