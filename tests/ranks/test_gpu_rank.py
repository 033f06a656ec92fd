"""SU-ALS on GPUs: the same bodies on emulated devices, whose ranks are threads, and on GPUs over NCCL."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Factors, State
from hybridmf.device.cuda import Device, open_device
from hybridmf.errors import CommunicatorError, DeviceError, DeviceMemoryError, NotPositiveDefiniteError
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.gpu.rows import RowRange
from hybridmf.model import ranked
from hybridmf.model.training import LocalRatings
from hybridmf.plan.grid import Grid
from hybridmf.plan.make import check_memory, make_plan
from hybridmf.plan.solver import SWEEP_ORDER, Given
from hybridmf.plan.types import Plan
from hybridmf.ranks import gpu_rank, group, su_als
from hybridmf.ranks.gpu_rank import BatchSegments, sockets
from hybridmf.ranks.multi_als import MultiALS
from hybridmf.ranks.su_als import RankALS
from hybridmf.ranks.transport.threads import ThreadCommunicator, run_ranks
from support import reference
from support.half_sweeps import row_range
from support.ranks import (
    MODELS,
    RANK,
    Machine,
    assert_close,
    both,
    changed,
    entries,
    fit_rank,
    one_device,
    parts,
    sweeps,
    workers_on,
)
from support.ratings import planted
from support.solvers import iterate

SMALL = planted(24, 16, 0.4)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_factors_of_one(name: str, grid: tuple[int, int], gpus: Machine) -> None:
    names = gpus(grid[0] * grid[1])
    solver = MultiALS(*changed(parts(name, names, SMALL), segment=17, batch_slots=40), grids=both(grid))
    alone = one_device(*parts(name, "cpu", SMALL))
    assert_close(sweeps(solver, 1), sweeps(alone, 1), 1e-2 if "cg" in name else 1e-3)
    np.testing.assert_allclose(solver.objective_value(), alone.objective_value(), rtol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_model_parallel_equals_one_gpu(name: str, gpus: Machine) -> None:
    names = gpus(2)
    solver = MultiALS(*parts(name, names, SMALL), grids=both((1, 2)))
    alone = one_device(*parts(name, "cuda:0", SMALL), device=group.open_device("cuda:0"))
    assert_close(sweeps(solver, 1), sweeps(alone, 1), 1e-6)


@pytest.mark.parametrize("name", ["implicit", "explicit"])
def test_short_rows_are_solved_in_the_dual_form(name: str, gpus: Machine) -> None:
    """Bit for bit as on one GPU: each rank has the whole fixed side."""
    kinds = {"implicit": hmf.ImplicitALS, "explicit": functools.partial(hmf.ExplicitALS, biases=False)}
    data, names, found = planted(40, 50, 0.1), gpus(2), {}
    for where, form in ((names, "dual"), ("cuda:0", "dual"), (names, "primal")):
        model = kinds[name](16, regularization=0.1, iterations=2, random_state=0, device=where, row_form=form)
        plan = make_plan(model._objective(), model._settings(), data.shape, data.nnz)
        ratings = LocalRatings(model, data).on_host(plan)
        state = model._initial_state(ratings, plan, model._objective())
        solver = model._solver(plan, model._objective(), ratings, state, 0)
        found[isinstance(solver, MultiALS), form] = sweeps(solver)
        assert plan.dual_sides == (("user", "item") if form == "dual" else ())
        solver.close()
    for side in SIDES:
        several, one, primal = (
            found[key].side(side).matrix for key in ((True, "dual"), (False, "dual"), (True, "primal"))
        )
        np.testing.assert_array_equal(several, one)
        assert (several != primal).any()


@pytest.mark.parametrize("name", MODELS)
def test_one_thread_launches_for_all_gpus(name: str, gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are solved model parallel; a half sweep in which sums are added up has a thread for each rank."""
    names, solved = gpus(2), []
    alone = RankALS.solve

    def solve(rank: RankALS, side: Any) -> Any:
        solved.extend([] if rank.alone else [side])
        return alone(rank, side)

    monkeypatch.setattr(RankALS, "solve", solve)
    arguments = changed(parts(name, names, SMALL), segment=17, batch_slots=9)  # several batches
    grids = {"user": Grid(1, 2), "item": Grid(2, 1)}
    mixed = MultiALS(*arguments, grids=grids)
    one = one_device(
        *changed(parts(name, "cuda:0", SMALL), segment=17, batch_slots=9), device=group.open_device("cuda:0")
    )
    assert_close(sweeps(mixed, 2), sweeps(one, 2), 1e-2 if "cg" in name else 1e-3)
    assert solved == ["item", "item"] * 2
    solved.clear()
    both_ways = MultiALS(*arguments, grids=both((1, 2)))
    assert_close(sweeps(both_ways, 2), sweeps(one, 0), 1e-2 if "cg" in name else 1e-5)
    assert solved == []
    both_ways.close()
    with pytest.raises(CommunicatorError, match="the ranks were closed"):
        both_ways.update("user")


def test_the_first_step_ends_with_sums_under_way(gpus: Machine, request: pytest.FixtureRequest) -> None:
    """Until then the GPUs that come after this one have nothing to do."""
    if "cuda" in request.node.name:
        pytest.skip("only an emulated device tells what was launched")
    device: Any = group.open_device(gpus(1)[0])
    for assembly in ("fused", "sparse_syrk", "mo_als"):
        arguments = changed(parts("explicit", "cuda:0", SMALL), segment=3, batch_slots=9, assembly=assembly)
        alone = one_device(*arguments, device=device)
        device.launches.clear()
        launches = alone.halves["user"].steps(Given(alone.own["item"], alone.mean))
        next(launches)
        assert [name for name in device.launches if name != "row_range"] == {
            "fused": ["split_table", "assemble_segments"]
        }.get(assembly, [assembly])


def operations(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches, copies and waits of an emulated device from here on, in order."""
    found: list[str] = []
    device.launches = found

    def noted(method: str, *names: str) -> None:
        original = getattr(device, method)

        def call(*arguments: Any, **options: Any) -> Any:
            found.extend(names)
            return original(*arguments, **options)

        monkeypatch.setattr(device, method, call)

    for method in ("upload", "download"):
        noted(method, method, "wait")
    noted("zeros", "clear")
    noted("matmul", "matmul")
    noted("synchronize", "wait")
    original = device.begin_download

    def begin_download(array: Any) -> Any:
        found.append("copy")
        arrive = original(array)
        return lambda: (found.append("wait"), arrive())[1]

    monkeypatch.setattr(device, "begin_download", begin_download)
    return found


def test_ranks_of_one_matrix_do_not_compare_their_blocks(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over all entries, in one thread for each rank, take longer than a few iterations."""
    monkeypatch.setattr(RankALS, "_checksum", None)
    MultiALS(*parts("explicit", gpus(2), SMALL), grids=both((1, 2))).close()


SOLVING = ["split_table", "clear", "assemble_segments", "clear", "solve_partials", "solve_rows", "row_range", "copy"]
SUMMING = ["split_table", "clear", "clear", "assemble_segments", "add_pieces", "solve_partials", "row_range", "copy"]

COLUMNS = {"add_value", "copy_block", "fill_block"}
"""Of biases, and the start of conjugate gradients."""


@pytest.mark.parametrize("name", [name for name in MODELS if name != "nonnegative"])
@pytest.mark.parametrize(("grid", "expected"), [((1, 2), SOLVING), ((2, 1), SUMMING)])
def test_operations_of_a_half_sweep(
    name: str, grid: tuple[int, int], expected: list[str], gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait, at the end; one operation clears status, counters and the range. Collectives are not counted."""
    names = gpus(2)
    device: Any = group.open_device(names[0])
    if device.spec.name != "emulated":
        pytest.skip("only an emulated device tells what was launched")
    solver = MultiALS(*changed(parts(name, names, SMALL), segment=7), grids=both(grid))
    sweeps(solver, 2)
    found = operations(device, monkeypatch)
    for side in SWEEP_ORDER:
        found.clear()
        solver.update(side)
        gram = ["gram_tensor", "add_grams", "weigh_gram"] if "implicit" in name else []
        assert [each for each in found if each not in COLUMNS] == [*gram, *expected, "wait"]
    solver.close()


def test_waits_of_ranks_in_processes(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a half sweep one for the GPU, and one for the other ranks."""
    names = gpus(2)
    device: Any = group.open_device(names[0])
    if device.spec.name != "emulated":
        pytest.skip("only an emulated device tells what was launched")
    monkeypatch.setattr(ranked, "_worker", workers_on(names))
    found, barrier = operations(device, monkeypatch), ThreadCommunicator.barrier

    def noted(communicator: ThreadCommunicator) -> None:
        if communicator.rank == 0:
            found.append("barrier")
        barrier(communicator)

    monkeypatch.setattr(ThreadCommunicator, "barrier", noted)

    def run(iterations: int) -> Counter[str]:
        found.clear()
        make, device = MODELS["explicit"], "cuda:0"
        run_ranks(2, lambda c: fit_rank(make(iterations=iterations), entries(SMALL, c.rank, 2), c, device))
        return Counter(found)

    more = run(7)  # the check of float32's precision follows sweeps 1, 2, 4 and 8
    more.subtract(run(4))
    assert {name: more[name] / 6 for name in ("wait", "barrier", "upload")} == {"wait": 1, "barrier": 1, "upload": 0}


def test_factors_gathered_ahead_have_the_range_of_all_rows(gpus: Machine) -> None:
    """Each GPU looks at the rows it has solved, before they travel: the scale of float16 parts is that of all rows."""
    solver = MultiALS(*parts("explicit", gpus(2), SMALL), grids=both((1, 2)))
    solver.update("item")
    for rank in solver.ranks:
        gathered = rank.ahead("user")
        assert len(gathered) == SMALL.shape[1] > len(rank.own["item"])
        with rank.worker.active():
            assert gathered.range == row_range(rank.worker.device, gathered.table)[0]
            assert rank.own["item"].range == row_range(rank.worker.device, rank.own["item"].table)[0]
    assert len({rank.own["item"].range for rank in solver.ranks}) == 2


def test_a_failed_gather_never_becomes_the_state(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched behind it has run through by then, on a table that was half filled."""
    solver = MultiALS(*parts("explicit", gpus(2), SMALL), grids=both((1, 2)))
    solver.update("user")
    before = solver.state.on_host()
    finish = DeviceFactors.finish_check

    def aborted(factors: DeviceFactors, found: Any) -> bool:
        solver.ranks[1].communicator.abort("the gather did not end")
        return finish(factors, found)

    monkeypatch.setattr(DeviceFactors, "finish_check", aborted)
    with pytest.raises(CommunicatorError, match="the gather did not end"):
        solver.update("item")
    np.testing.assert_array_equal(solver.state.on_host().item.matrix, before.item.matrix)
    solver.close()


def test_nothing_of_a_half_sweep_over_a_split_side_stays(gpus: Machine) -> None:
    """The other half sweep needs the room of the gathered fixed side."""
    solver = MultiALS(*changed(parts("explicit", gpus(4), SMALL), segment=17, batch_slots=40), grids=both((2, 2)))
    sweeps(solver, 1)
    for half in (rank.halves[side] for rank in solver.ranks for side in SIDES):
        assert half._operand is half._entries_at_hand is half._under_way is None
    solver.close()


def test_an_exception_of_the_one_thread_stops_the_ranks(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what ends a rank's thread does: else closing would ask GPUs that have failed for an orderly end."""
    solver = MultiALS(*parts("explicit", gpus(2), SMALL), grids=both((1, 2)))
    before = solver.state.on_host()

    def lost(*_: Any) -> Any:
        raise DeviceError("cuda:1 has fallen off the bus")

    monkeypatch.setattr(solver.ranks[1].halves["item"], "steps", lost)
    with pytest.raises(DeviceError, match="fallen off the bus"):
        solver.update("item")
    assert solver.group.threads.communicators[0].cause
    with pytest.raises(CommunicatorError, match="stopped by DeviceError"):
        solver.update("user")
    solver.close()
    np.testing.assert_array_equal(solver.state.on_host().item.matrix, before.item.matrix)


@pytest.mark.parametrize(
    ("name", "assembly", "dtype"), [("biases", "mo_als", "float32"), ("implicit cg", "sparse_syrk", "float64")]
)
def test_published_assemblies_over_a_split_side(name: str, assembly: str, dtype: str, gpus: Machine) -> None:
    more = {"assembly": assembly, "dtype": dtype}
    solver = MultiALS(*changed(parts(name, gpus(2), SMALL, **more), segment=5, batch_slots=40), grids=both((2, 1)))
    alone = one_device(*parts(name, "cpu", SMALL, dtype=dtype))
    assert_close(sweeps(solver, 1), sweeps(alone, 1), 1e-2 if "cg" in name else 1e-3)


@pytest.mark.parametrize("grid", [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["explicit", "biases", "implicit"])
def test_split_half_sweep_against_float64(name: str, grid: tuple[int, int], gpus: Machine) -> None:
    names = gpus(grid[0] * grid[1])
    solver = MultiALS(*changed(parts(name, names, SMALL), segment=17, batch_slots=40), grids=both(grid))
    start = solver.state.on_host()
    solver.update("user")
    solved = solver.state.on_host().user
    bias = start.item.bias
    wide = Factors(start.item.matrix.astype(np.float64), None if bias is None else bias.astype(np.float64))
    exact = reference.half_sweep(SMALL, wide, start.mean, solver.objective)
    np.testing.assert_allclose(solved.matrix, exact.matrix, atol=1e-4 * np.abs(exact.matrix).max())
    if solved.bias is not None:
        np.testing.assert_allclose(solved.bias, exact.bias, atol=1e-4 * np.abs(exact.bias).max())


@pytest.mark.parametrize(
    ("grid", "name", "reduction"),
    [
        *itertools.product([(4, 1)], ["biases", "implicit cg"], ["root", "two_phase"]),
        ((2, 2), "biases", "root"),
        ((2, 2), "implicit cg", "two_phase"),
    ],
)
def test_reductions_give_the_same(name: str, reduction: Any, grid: tuple[int, int], gpus: Machine) -> None:
    # steps of CG enlarge the rounding of another order of sums, in float32 by four orders of magnitude
    dtype, tolerance = ("float64", 1e-9) if "cg" in name else ("float32", 1e-4)
    arguments = changed(parts(name, gpus(4), SMALL, dtype=dtype), batch_slots=40)
    chosen = changed(arguments, reduction=reduction)
    ours = MultiALS(*chosen, grids=both(grid), topology=[0, 1, 0, 1])
    theirs = MultiALS(*arguments, grids=both(grid))
    assert_close(sweeps(ours, 1), sweeps(theirs, 1), tolerance)


def test_more_ranks_than_rows(gpus: Machine) -> None:
    matrix = planted(3, 2, density=0.9)
    for grid in ((1, 4), (4, 1)):
        solver = MultiALS(*parts("implicit", gpus(4), matrix), grids=both(grid))
        assert_close(sweeps(solver, 1), sweeps(one_device(*parts("implicit", "cpu", matrix)), 1), 1e-3)


def test_estimator(gpus: Machine) -> None:
    names = gpus(2)
    model = MODELS["explicit"](device=names, random_state=0, iterations=2, balance=True).fit(SMALL)
    alone = MODELS["explicit"](device="cpu", random_state=0, iterations=2, balance=True).fit(SMALL)
    np.testing.assert_allclose(model.user_factors_, alone.user_factors_, atol=5e-3)
    assert model.device_ == "cuda:0+cuda:1" and model.plan_.scale is not None
    text = str(model.plan_)
    assert "cuda:0+cuda:1" in text and "predicted" in text and "a GPU" in text
    assert type(model._learned.state.user) is Factors  # nothing of a device is kept
    assert model.recommend(0, N=3)[0].shape == (3,)
    np.testing.assert_allclose(model.objective(SMALL), alone.objective(SMALL), rtol=1e-3)


def test_row_that_fails(gpus: Machine) -> None:
    matrix = planted(24, 16, 0.2)  # some items have fewer entries than factors
    arguments = parts("explicit", gpus(2), matrix)
    objective = replace(arguments[2], regularization=0.0)
    for grid in ((1, 2), (2, 1)):
        solver = MultiALS(*arguments[:2], objective, *arguments[3:], grids=both(grid))
        before = solver.state.on_host()
        with pytest.raises(NotPositiveDefiniteError) as raised:
            solver.update("item")
        assert raised.value.row in np.flatnonzero(np.bincount(matrix.indices, minlength=16) < RANK)
        assert_close(solver.state.on_host(), before, 0)


def test_one_gpu_out_of_memory(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    solver = MultiALS(*parts("explicit", gpus(2), SMALL), grids=both((2, 1)))
    device = solver.ranks[1].worker.device  # type: ignore[attr-defined]

    def full(shape: Any, dtype: Any) -> Any:
        raise DeviceMemoryError("cuda:1 is out of memory")

    before = solver.state.on_host()
    monkeypatch.setattr(device, "zeros", full)
    with pytest.raises(DeviceMemoryError, match="cuda:1"):
        solver.update("item")
    assert_close(solver.state.on_host(), before, 0)


def test_bals_needs_whole_rows(gpus: Machine) -> None:
    arguments = parts("explicit", gpus(2), SMALL, assembly="bals")
    assert arguments[3].grids == both((1, 2))
    with pytest.raises(ValueError, match="assembly='bals' needs all entries of a row"):
        MultiALS(*arguments, grids=both((2, 1)))


def test_plan_of_several_gpus(gpus: Machine) -> None:
    """The plan takes the memory of the GPU that has least, and says which grids and why not."""
    plan: Plan = parts("explicit", gpus(2), SMALL)[3]
    assert plan.devices == ("cuda:0", "cuda:1") and plan.device == "cuda:0"
    assert plan.total_bytes == sum(plan.bytes.values()) > 0
    check_memory(plan)
    assert plan.gpu is not None
    with pytest.raises(DeviceMemoryError, match="needs about"):
        check_memory(plan.changed(gpu=replace(plan.gpu, free_bytes=1000)))


@pytest.mark.parametrize("grids", [((1, 2), (1, 2)), ((1, 2), (2, 1)), ((2, 1), (1, 2))])
def test_factors_gathered_ahead_are_those_of_the_next_half_sweep(grids: Any, gpus: Machine, monkeypatch: Any) -> None:
    """The same bits with and without, also after factors have changed between two half sweeps."""
    factors = []
    for room in (True, False):
        monkeypatch.setattr(su_als, "has_room_for_both", lambda plan, room=room: room)
        arguments = parts("biases", gpus(2), SMALL)
        solver = MultiALS(*arguments, grids={side: Grid(*grid) for side, grid in zip(SIDES, grids, strict=True)})
        solver.update("user")
        solver.update("item")
        assert (solver.ranks[0]._ahead is not None) == room
        solver.balance()
        solver.update("user")
        solver.update("item")
        factors.append((solver.state.user.matrix, solver.state.item.matrix, solver.objective_value()))
    for ahead, not_ahead in zip(*factors, strict=True):
        np.testing.assert_array_equal(ahead, not_ahead)


def sums_of(device: Any, solver: Any, side: Any) -> list[str]:
    """Sums and checks of an emulated device in a half sweep of a fit; empty for GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        found = operations(device, patch) if device.spec.name == "emulated" else []
        solver.solving = side
        solver.keep(side, solver.solve(side))
        solver.solving = None
        return [each for each in found if each in ("assemble_segments", "row_range", "wait")]


@pytest.mark.parametrize("changes", ["", "range", "wide", "balance", "user"])
def test_half_sweeps_are_launched_before_their_factors_are_checked(changes: str, gpus: Machine) -> None:
    """Launched again if the range of the factors, or the factors themselves, turn out to be others; the same bits."""
    names = gpus(2)
    device: Any = group.open_device(names[0])
    arguments = changed(parts("explicit", names, SMALL), segment=3)
    solver = MultiALS(*arguments, grids=both((1, 2)))
    alone = one_device(*changed(parts("explicit", "cuda:0", SMALL), segment=3), device=device)
    both_ways: list[Any] = [solver, alone]
    for one in both_ways:
        iterate(one, 4)  # the range hardly changes then
    if changes == "range":
        solver.group._ranges["item"] = RowRange(1e9, 1e9)
    if changes == "wide":  # other kernels, and not another scale
        known = solver.group._ranges["item"]
        solver.group._ranges["item"] = RowRange(known.largest, known.largest * 1e-9)
    first = sums_of(device, solver, "item")
    alone.update("item")
    for one in both_ways:
        if changes == "balance":
            one.balance()
        if changes == "user":  # cold start of the users
            one.keep("user", one.own["user"].part(slice(None)) if one is alone else
                     [rank.own["user"].part(slice(None)) for rank in solver.ranks])  # fmt: skip
    second = sums_of(device, solver, "user")
    alone.update("user")
    if device.spec.name == "emulated":
        assert first == ["assemble_segments", "row_range", "assemble_segments", "wait"]  # it waits for the items
        assert second.count("assemble_segments") == bool(changes)
        assert second[-2:] == ["row_range", "wait"]
    assert_close(solver.state.on_host(), alone.state.on_host(), 1e-6 if changes == "balance" else 0)
    solver.close()


def test_half_sweeps_of_float64_need_no_range(gpus: Machine) -> None:
    """The first iteration launches ahead, too."""
    names = gpus(2)
    device: Any = group.open_device(names[0])
    solver = MultiALS(*parts("explicit", names, SMALL, dtype="float64"), grids=both((1, 2)))
    alone = one_device(*parts("explicit", "cuda:0", SMALL, dtype="float64"), device=device)
    sums_of(device, solver, "item")
    assert solver.group._ahead[0] == "user" and not solver.group._ranges
    sums_of(device, solver, "user")
    iterate(alone)
    assert_close(solver.state.on_host(), alone.state.on_host(), 0)
    solver.close()


def test_an_iteration_begins_early_if_the_fit_goes_on(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the last one, nor where something may end the fit or change the basis, nor outside of a sweep."""
    names, told = gpus(2), []
    solve = group.RankGroup.solve

    def noted(ranks: Any, side: Any, follows: bool = False) -> Any:
        told.append((side, follows))
        return solve(ranks, side, follows)

    monkeypatch.setattr(group.RankGroup, "solve", noted)

    def fit(**more: Any) -> list[Any]:
        told.clear()
        model = MODELS["explicit"](device=names, random_state=0, iterations=2, balance=more.pop("balance", False))
        model.fit(SMALL, **more)
        return list(told)

    goes_on, ends = [("item", True), ("user", True)], [("item", True), ("user", False)]
    assert fit() == [*goes_on, *ends]
    assert fit(balance=True) == fit(callback=lambda model, record: None) == [*ends, *ends]
    solver = MultiALS(*parts("explicit", names, SMALL), grids=both((1, 2)))
    told.clear()
    solver.update("item")
    assert told == [("item", False)]
    solver.close()


@pytest.mark.parametrize("iterations", [1, 3])
def test_fits_beyond_float32_warn_once(iterations: int, gpus: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """As on one GPU. A half sweep that is checked reads its fixed factors again: no other one is launched ahead."""
    ratings = sp.csr_array(np.random.default_rng(0).integers(1, 6, (2, 300)).astype(np.float32))
    options: dict[str, Any] = {"regularization_scaling": "none", "biases": False, "random_state": 0}
    names, found = gpus(2), []
    for device in (names, "cuda:0"):
        caplog.clear()
        model = hmf.ExplicitALS(16, regularization=0.02, device=device, iterations=iterations, **options)
        model.fit(ratings)
        found.append([each.getMessage() for each in caplog.records if "beyond the precision" in each.getMessage()])
    assert len(found[0]) == 1 and found[0] == found[1]


def test_a_half_sweep_ahead_takes_the_memory_of_the_gathered_side_before(gpus: Machine) -> None:
    solver = MultiALS(*parts("explicit", gpus(2), SMALL), grids=both((1, 2)))
    sweeps(solver, 2)
    before = [weakref.ref(rank.ahead("item")) for rank in solver.ranks]
    solver.solving, alive = "item", []
    launch = group._launch

    def noted(ranks: Any, side: Any, fixed: Any) -> list[Any]:
        alive.append((side, any(each() is not None for each in before)))
        return launch(ranks, side, fixed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_launch", noted)
        solver.solve("item")
    assert alive == [("item", True), ("user", False)]
    solver.close()


def test_a_failed_check_drops_the_half_sweep_ahead(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half sweep that failed raises the error; what was computed with its factors is not kept."""
    solver = MultiALS(*parts("explicit", gpus(2), SMALL), grids=both((1, 2)))
    before, launch, launched = sweeps(solver, 4), group._launch, []

    def noted(ranks: Any, side: Any, fixed: Any) -> list[Any]:
        launched.append(side)
        found = launch(ranks, side, fixed)
        if side == "item":
            found[1][1][0] = 3  # the leading minor that fails
        return found

    monkeypatch.setattr(group, "_launch", noted)
    with pytest.raises(NotPositiveDefiniteError, match="item"):
        iterate(solver)
    assert launched == ["item", "user"] and solver.group._ahead is None
    assert_close(solver.state.on_host(), before, 0)
    solver.close()


def test_nothing_is_gathered_ahead_without_room_for_it(gpus: Machine) -> None:
    plan = parts("explicit", gpus(2), SMALL)[3]
    assert plan.gpu is not None and su_als.has_room_for_both(plan)
    assert not su_als.has_room_for_both(plan.changed(gpu=replace(plan.gpu, free_bytes=plan.scale.bytes_per_gpu)))


def test_long_rows_are_cut_and_added_in_order(device: Device) -> None:
    indptr = np.array([0, 3, 3, 40, 47])
    cut = BatchSegments.make(device, indptr, [(0, 2), (2, 4)], 10)
    segments = device.download(cut.segments)
    covered = sorted((int(b), int(e)) for _, b, e in segments)
    assert covered == [(0, 3), (3, 13), (13, 23), (23, 33), (33, 40), (40, 47)]
    assert cut.n_rows == 4 and cut.n_slots == 7
    assert sorted(segments[:, 2] - segments[:, 1], reverse=True) == (segments[:, 2] - segments[:, 1]).tolist()
    sums = np.full((cut.n_slots, 5), np.nan, np.float32)
    for slot, begin, end in segments:
        sums[slot] = end - begin
    added = device.download(cut.add_up(device, device.upload(sums)))
    np.testing.assert_array_equal(added[:, 4], [3, 0, 37, 7])


def test_sockets_by_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(deviceCanAccessPeer=lambda a, b: a // 2 == b // 2)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(gpu_rank, "open_device", lambda name: SimpleNamespace(index=int(name[5:]), _cupy=cupy))
    assert sockets(["cuda:0", "cuda:1", "cuda:2", "cuda:3"]) == [0, 0, 1, 1]
    assert sockets(["cuda:0", "cuda:2", "cuda:1", "cuda:3"]) == [0, 1, 0, 1]


# --------------------------------------------------------------------------------------------------------- larger


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)])
def test_large_on_gpus(name: str, grid: tuple[int, int], gpus: Machine, request: pytest.FixtureRequest) -> None:
    """Enough rows for several batches, and for reductions beside assembly."""
    if "emulated" in request.node.name:
        pytest.skip("for GPUs")
    names = gpus(grid[0] * grid[1])
    matrix = planted(6000, 900, 0.03, seed=3)
    solver = MultiALS(*changed(parts(name, names, matrix), batch_slots=3000), grids=both(grid))
    alone = one_device(*parts(name, "cuda:0", matrix), device=open_device("cuda:0"))
    ours, theirs = sweeps(solver, 3), sweeps(alone, 3)
    assert_close(ours, theirs, 2e-2 if "cg" in name else 5e-3)
    np.testing.assert_allclose(solver.objective_value(), alone.objective_value(), rtol=1e-4)
    again = sweeps(MultiALS(*changed(parts(name, names, matrix), batch_slots=3000), grids=both(grid)), 3)
    for side in SIDES:  # nothing depends on a race
        np.testing.assert_allclose(again.side(side).matrix, ours.side(side).matrix, rtol=1e-5, atol=1e-6)
    state: State = again
    assert np.isfinite(state.user.matrix).all() and np.isfinite(state.item.matrix).all()
    assert isinstance(Grid(*grid), Grid)
