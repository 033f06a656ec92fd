"""Fixed sides that are split over GPUs while ratings come from the host, batch by batch (cuMF Alg. 3 and 4.4)."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core import system
from hybridmf.core.objective import SIDES, Factors, Side
from hybridmf.data.slabs import InMemory, Part, slab_bounds, slab_entries
from hybridmf.data.store import StoreMatrix
from hybridmf.errors import (
    CommunicatorError,
    DeviceError,
    DeviceMemoryError,
    NonFiniteError,
    NotPositiveDefiniteError,
    StoreError,
)
from hybridmf.gpu.stream import StreamedHalf
from hybridmf.model import ranked
from hybridmf.plan import als_gpu
from hybridmf.plan import machine as machines
from hybridmf.plan.grid import Grid, RankLayout
from hybridmf.plan.half_sweep import SYSTEMS_PER_ROW, HalfPlan, half_bytes, priced, slot_bytes
from hybridmf.plan.machine import H200
from hybridmf.plan.make import check_memory
from hybridmf.plan.partitions import ScalePlan, check_rank, plan_scale, plan_streamed_ranks
from hybridmf.plan.types import Plan
from hybridmf.ranks import gpu_rank, group, multi_als
from hybridmf.ranks.batches import BatchedRows, batch_entries, bounded_batches, even_batches
from hybridmf.ranks.gpu_rank import BatchSegments, PartialRows
from hybridmf.ranks.multi_als import MultiALS
from hybridmf.ranks.reduction import Reduction, TwoPhaseReduction
from hybridmf.ranks.shares import StoredRatings
from hybridmf.ranks.transport.threads import run_ranks
from support import reference
from support.cost_model import kernels_of
from support.marks import exhaustive, mostly_exhaustive
from support.ranks import (
    MODELS,
    Machine,
    assert_close,
    both,
    changed,
    entries,
    fit_rank,
    no_loaders,
    one_device,
    parts,
    sweeps,
    workers_on,
)
from support.ratings import planted

pytestmark = pytest.mark.usefixtures("tiny_gpu")

MATRIX = planted(24, 16, 0.4)

MANY_USERS = planted(600, 8, 0.3)
"""Users that a GPU of LIMIT has no room for where all of them are the fixed side, half of them it has."""

LIMIT = 57_000


@pytest.fixture(autouse=True)
def bytes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny problems are cut into many batches, whose fixed time would decide what is fastest."""
    machine = replace(machines.built_in(), links=replace(H200.links, slab=0.0, collective=0.0, pinned_bytes=1e7))
    monkeypatch.setattr(machines, "machine", lambda: machine)


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> hmf.Store:
    """MATRIX in slabs of at most 20 entries; no test changes it."""
    return hmf.convert(MATRIX, tmp_path_factory.mktemp("store") / "store", slab_bytes=160)


def complete(plan: Plan, half: HalfPlan) -> HalfPlan:
    """The half sweep with its memory and time."""
    return priced(plan, replace(half, bytes=half_bytes(plan, half)), H200)


def partition(
    matrix: sp.csr_array, grids: dict[Side, Grid], batches: int, memory: int = 10**9, place: Any = "host"
) -> ScalePlan:
    """Ratings on the host or in a store in so many row parts, factors on the GPUs."""
    longest = (int(np.diff(matrix.indptr).max()), int(np.diff(matrix.tocsc().indptr).max()))
    problem, size = kernels_of(matrix.shape, matrix.nnz, 7, longest=longest), grids["user"].size
    halves = {side: complete(problem, HalfPlan(side, grids[side].splits, batches, size, place)) for side in SIDES}
    return ScalePlan(problem, H200, size, memory, halves)


def streamed(arguments: tuple[Any, ...], grids: dict[Side, Grid], batches: int = 3, **more: Any) -> tuple[Any, ...]:
    """Arguments of a solver whose ratings come from the host."""
    scale = partition(arguments[0], grids, batches, **more)
    return changed(arguments, scale=scale, streamed=scale.ratings, slab=max(map(scale.slab, SIDES)), resident=False)


def pairs(*grids: tuple[int, int]) -> dict[Side, Grid]:
    return {side: Grid(*grid) for side, grid in zip(SIDES, grids, strict=True)}


def assert_same(ours: Any, theirs: Any) -> None:
    for side in SIDES:
        np.testing.assert_array_equal(ours.side(side).matrix, theirs.side(side).matrix)
        assert (ours.side(side).bias is None) == (theirs.side(side).bias is None)
        if ours.side(side).bias is not None:
            np.testing.assert_array_equal(ours.side(side).bias, theirs.side(side).bias)


def sizes_of_batches(half: PartialRows) -> np.ndarray:
    """Entries of each batch that lie on this rank."""
    return batch_entries(half.row_batches, np.diff(half.offsets))


# ------------------------------------------------------------------------------------------------------------ batches


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=30), min_size=1, max_size=4), st.integers(1, 60), st.integers(1, 9)
)
def test_batches_are_bounded_and_cover_all_rows(degrees: list[list[int]], most: int, rows: int) -> None:
    every = [np.array(own, dtype=np.int64) for own in degrees]
    bounds = [slab_bounds(own, max(1, most // len(every)), rows) for own in every]
    batches = bounded_batches(bounds, [slab_entries(*pair) for pair in zip(bounds, every, strict=True)], most)
    for k, own in enumerate(every):
        ranges = [batch[k] for batch in batches]
        assert [at for first, last in ranges for at in range(first, last)] == list(range(len(own)))
        assert all(0 <= first <= last <= first + rows for first, last in ranges)
    for batch in batches:
        held = [int(own[first:last].sum()) for own, (first, last) in zip(every, batch, strict=True)]
        assert any(first < last for first, last in batch)
        assert sum(held) <= most or held.count(0) == len(held) - 1


def test_batches_of_rows_that_are_long_on_their_own() -> None:
    """Each of two members begins with a long row: they are not summed together, and neither member waits forever."""
    bounds, sizes = [np.array([0, 1, 4, 7])] * 2, [np.array([10, 5, 5])] * 2
    assert bounded_batches(bounds, sizes, 10) == [
        [(0, 1), (0, 0)],
        [(1, 1), (0, 1)],
        [(1, 4), (1, 4)],
        [(4, 7), (4, 7)],
    ]
    assert bounded_batches([np.array([0])] * 2, [np.array([], int)] * 2, 10) == []
    assert even_batches([3, 1], 2) == [[(0, 2), (0, 1)], [(2, 3), (1, 1)]]
    assert even_batches([0, 0], 2) == []


def test_pieces_of_few_rows_keep_to_the_room_for_sums(gpus: Machine) -> None:
    """Two batches are in memory at a time; what a batch of one long row may be cut into depends on what is left."""
    gpus(1)
    device, indptr = group.open_device("cuda:0"), np.array([0, 300])
    many = BatchSegments.make(device, indptr, [(0, 1)], 10)
    assert many.n_slots == 30
    few = BatchSegments.make(device, indptr, [(0, 1)], 10, slots=20)
    assert few.n_slots == 8 and 2 * few.n_slots + 1 <= 20
    assert BatchSegments.make(device, indptr, [(0, 1)], 10, slots=1).n_slots == SYSTEMS_PER_ROW - 1


@pytest.mark.parametrize("grid", [exhaustive((2, 1)), (2, 2), (4, 1)])
def test_popular_rows_first_make_batches_of_even_size(grid: tuple[int, int], gpus: Machine) -> None:
    rng = np.random.default_rng(0)
    chances = np.clip(8 / np.arange(1, 81), 0.05, 1.0)
    dense = np.where(rng.random((80, 40)) < chances[:, None], rng.random((80, 40)) + 1, 0)
    matrix = sp.csr_array(dense[:, np.argsort(-np.count_nonzero(dense, axis=0))].astype(np.float32))
    names, grids = gpus(grid[0] * grid[1]), both(grid)
    solver = MultiALS(*streamed(parts("explicit", names, matrix), grids, batches=20))
    scale = solver.plan.scale
    assert scale is not None
    for side in SIDES:
        whole = [rank.halves[side] for rank in solver.ranks]
        most = scale.slab(side)
        longest = scale.plan.longest_row(side)
        assert most >= longest > most // grid[0]
        for number in range(grid[1]):
            held = sum(sizes_of_batches(whole[member]) for member in grids[side].members(number))
            assert held.max() <= most and held.sum() > 2 * most and len(held) > 3
        for half in whole:
            assert half.pipeline.vectors[0][0] >= sizes_of_batches(half).max()
            assert isinstance(half, PartialRows) and not len(half.indices) and not len(half.ratings)
    alone = one_device(*parts("explicit", "cuda:0", matrix), device=group.open_device("cuda:0"))
    assert_close(sweeps(solver, 1), sweeps(alone, 1), 1e-3)
    solver.close()
    assert no_loaders()


# ------------------------------------------------------------------------------------------------------------ factors


@pytest.mark.parametrize(
    ("name", "grid"),
    mostly_exhaustive(
        [(name, grid) for name in MODELS for grid in ((2, 1), (2, 2), (4, 1))],
        [
            *(("implicit", grid) for grid in ((2, 1), (2, 2), (4, 1))),
            *((name, (2, 2) if name == "biases" else (2, 1)) for name in MODELS if name != "implicit"),
        ],
    ),
)
def test_the_bits_are_those_of_ratings_on_the_gpus(name: str, grid: tuple[int, int], gpus: Machine) -> None:
    names, grids = gpus(grid[0] * grid[1]), both(grid)
    arguments = changed(parts(name, names, MATRIX), segment=17, batch_slots=60)
    there, here = MultiALS(*arguments, grids=grids), MultiALS(*streamed(arguments, grids))
    assert here.layout.grids == there.layout.grids == grids
    for side in SIDES:
        for rank in here.ranks:
            half = rank.halves[side]
            assert isinstance(half, PartialRows) and len(half.row_batches) > 1
            assert half.following is rank.halves["item" if side == "user" else "user"].transfers
        assert type(there.ranks[0].halves[side]) is PartialRows
    assert_same(sweeps(here, 2), sweeps(there, 2))
    assert here.objective_value() == pytest.approx(there.objective_value(), rel=1e-10)
    assert_same(sweeps(here, 1), sweeps(there, 1))  # what was loaded ahead is not what the objective asked for
    here.close()
    assert no_loaders()


@pytest.mark.parametrize(
    "grids",
    [exhaustive(pairs((1, 2), (2, 1))), pairs((2, 1), (1, 2)), pairs((1, 4), (2, 2)), pairs((4, 1), (2, 2))],
)
def test_each_side_has_its_grid(grids: dict[Side, Grid], gpus: Machine) -> None:
    """A side in waves of whole rows and one in batches of sums follow each other through the same buffers."""
    names = gpus(grids["user"].size)
    arguments = changed(parts("biases", names, MATRIX), segment=17, batch_slots=60)
    there, here = MultiALS(*arguments, grids=grids), MultiALS(*streamed(arguments, grids, batches=4))
    for rank in here.ranks:
        for side in SIDES:
            assert isinstance(rank.halves[side], (StreamedHalf, PartialRows)[grids[side].splits > 1])
        assert rank.halves["user"].pipeline is rank.halves["item"].pipeline
        assert rank.halves["user"].following is rank.halves["item"].transfers
    here.update("item")
    for rank in here.ranks:
        early = rank.halves["item"].pipeline._early
        assert early is not None and early.transfers.of is rank.halves["user"].transfers.of
    there.update("item")
    assert_same(sweeps(here, 1), sweeps(there, 1))
    assert here.objective_value() == pytest.approx(there.objective_value(), rel=1e-10)
    here.balance()
    there.balance()
    assert_same(sweeps(here, 1), sweeps(there, 1))
    here.close()
    assert no_loaders()


@pytest.mark.parametrize(("reduction", "grid"), [("root", (4, 1)), ("two_phase", (4, 1)), ("root", (2, 2))])
def test_reductions_give_the_same(reduction: Any, grid: tuple[int, int], gpus: Machine) -> None:
    grids = both(grid)
    arguments = changed(parts("biases", gpus(4), MATRIX), batch_slots=80)
    arguments = changed(arguments, reduction=reduction)
    here = MultiALS(*streamed(arguments, grids), topology=[0, 0, 1, 1])
    there = MultiALS(*arguments, grids=grids, topology=[0, 0, 1, 1])
    assert len(here.ranks[0].batches["user"]) > 1
    assert_same(sweeps(here, 1), sweeps(there, 1))
    assert here.objective_value() == pytest.approx(there.objective_value(), rel=1e-10)
    here.close()


@pytest.mark.parametrize(
    ("name", "assembly", "dtype"), [("biases", "mo_als", "float32"), ("implicit cg", "sparse_syrk", "float64")]
)
def test_published_assemblies(name: str, assembly: str, dtype: str, gpus: Machine) -> None:
    arguments = parts(name, gpus(2), MATRIX, assembly=assembly, dtype=dtype)
    arguments = changed(arguments, segment=5, batch_slots=40)
    here, there = MultiALS(*streamed(arguments, both((2, 1)))), MultiALS(*arguments, grids=both((2, 1)))
    assert here.ranks[0].halves["user"].pipeline.vectors[1][1] == np.dtype(dtype)
    assert_same(sweeps(here, 1), sweeps(there, 1))
    assert here.objective_value() == pytest.approx(there.objective_value(), rel=1e-10)
    here.close()


@pytest.mark.parametrize("name", ["explicit", "biases", "implicit"])
def test_a_half_sweep_against_float64(name: str, gpus: Machine) -> None:
    arguments = streamed(parts(name, gpus(2), MATRIX), both((2, 1)), batches=5)
    with closing(MultiALS(*arguments)) as solver:
        start = solver.state.on_host()
        solver.update("user")
        solved = solver.state.on_host().user
    bias = None if start.item.bias is None else start.item.bias.astype(np.float64)
    wide = Factors(start.item.matrix.astype(np.float64), bias)
    exact = reference.half_sweep(arguments[0], wide, start.mean, arguments[2])
    np.testing.assert_allclose(solved.matrix, exact.matrix, atol=1e-4 * np.abs(exact.matrix).max())
    if solved.bias is not None and exact.bias is not None:
        np.testing.assert_allclose(solved.bias, exact.bias, atol=1e-4 * np.abs(exact.bias).max())


@pytest.mark.parametrize(
    ("name", "grids", "place"),
    [
        *(("implicit", both((2, 1)), place) for place in ("host", "disk")),
        *(("biases", pairs((2, 1), (1, 2)), place) for place in ("host", "disk")),
        exhaustive("implicit cg", both((2, 2)), "host"),
        ("implicit cg", both((2, 2)), "disk"),
    ],
)
def test_the_bits_of_a_store_are_those_of_its_ratings(
    name: str, grids: dict[Side, Grid], place: Any, gpus: Machine, store: hmf.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreMatrix, "load", None)  # no code may request all of it
    arguments = changed(parts(name, gpus(grids["user"].size), MATRIX), segment=17, batch_slots=60)
    there = MultiALS(*arguments, grids=grids)
    users, (*_, objective, plan, state) = StoreMatrix(store), streamed(arguments, grids, place=place)
    here = MultiALS(users, users.transposed(), objective, plan, state)
    for rank in here.ranks:
        assert len(rank.batches["user"]) > 1
        block = rank.halves["user"].transfers.of
        assert isinstance(block, InMemory if place == "host" else Part)
    assert_same(sweeps(here, 2), sweeps(there, 2))
    assert here.objective_value() == pytest.approx(there.objective_value(), rel=1e-10)
    here.close()
    assert no_loaders()


def test_an_altered_store_is_reported(gpus: Machine, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = hmf.convert(MATRIX, tmp_path / "store", slab_bytes=160)
    path = store.path / "item-000003.values.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    *_, objective, plan, state = streamed(parts("explicit", gpus(2), MATRIX), both((2, 1)), place="disk")
    users = StoreMatrix(store)
    with pytest.raises(StoreError, match=r"item-000003\.values\.npy' was altered .*convert the ratings again"):
        MultiALS(users, users.transposed(), objective, plan, state)
    assert no_loaders()


def test_a_store_that_stays_on_the_gpus_can_be_split(gpus: Machine, store: hmf.Store) -> None:
    arguments = changed(parts("explicit", gpus(2), MATRIX), segment=17, batch_slots=60)
    there = MultiALS(*arguments, grids=both((2, 1)))
    *_, objective, plan, state = streamed(arguments, both((2, 1)), place="disk")
    users = StoreMatrix(store)
    here = MultiALS(users, users.transposed(), objective, plan.changed(resident=True), state)
    assert_close(sweeps(here, 2), sweeps(there, 2))


def test_more_ranks_than_rows_and_rows_without_entries(gpus: Machine) -> None:
    matrix = sp.csr_array(np.array([[0, 2, 0, 3], [0, 0, 0, 0], [4, 0, 1, 2]], dtype=np.float32))
    for grid in ((4, 1), (2, 2)):
        solver = MultiALS(*streamed(parts("implicit", gpus(4), matrix), both(grid), batches=2))
        alone = one_device(*parts("implicit", "cuda:0", matrix), device=group.open_device("cuda:0"))
        assert_close(sweeps(solver, 2), sweeps(alone, 2), 1e-3)
        assert solver.objective_value() == pytest.approx(alone.objective_value(), rel=1e-4)
        solver.close()
        assert no_loaders()


def test_nothing_of_the_block_is_on_the_device(gpus: Machine) -> None:
    """Pieces of a batch lie one behind the other in a buffer, wherever its rows are in the block."""
    matrix, _, objective, plan, _ = parts("explicit", gpus(1), MATRIX)
    device = group.open_device("cuda:0")
    batches = [[(0, 3), (12, 14)], [(3, 3), (14, 24)], [(3, 12), (24, 24)]]
    pipeline = gpu_rank.entry_loader(device, 1, np.float32)
    degrees = np.diff(MATRIX.indptr)
    rows = BatchedRows(np.arange(24), degrees, batches, [[]] * 3)
    half = PartialRows(device, "user", InMemory(matrix), objective, plan, rows, pipeline)
    assert pipeline.vectors[0][0] == sizes_of_batches(half).max() < MATRIX.nnz
    with closing(half._at_hand()) as stream:
        for batch in stream:
            rows = np.concatenate([np.arange(first, last) for first, last in batches[batch]])
            np.testing.assert_array_equal(device.download(half.indices), MATRIX[rows].indices)
            np.testing.assert_array_equal(device.download(half.ratings), MATRIX[rows].data)
            indptr, ranges = half._places(batch)
            np.testing.assert_array_equal(indptr, MATRIX[rows].indptr)
            assert [last - first for first, last in ranges] == [last - first for first, last in batches[batch]]
    assert not len(half.indices) and no_loaders()


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("where", ["assemble", "finish", "copy"])
def test_a_failure_of_one_rank_stops_all(where: str, gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    solver = MultiALS(*streamed(changed(parts("explicit", gpus(2), MATRIX), batch_slots=60), both((2, 1))))
    solver.update("item")
    before, half = solver.state.on_host(), solver.ranks[1].halves["user"]
    calls: list[int] = []

    def lost(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise DeviceError("cuda:1 has fallen off the bus")
        return working(*arguments)

    owner = half.pipeline.copier if where == "copy" else half
    working = getattr(owner, where)
    monkeypatch.setattr(owner, where, lost)
    half.pipeline.close()  # what has come early was copied before
    with pytest.raises(DeviceError, match="fallen off the bus"):
        solver.update("user")
    assert_same(solver.state.on_host(), before)
    with pytest.raises(CommunicatorError):
        solver.update("user")
    solver.close()
    assert no_loaders()


def test_a_half_sweep_that_fails_leaves_no_thread_behind(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only once the solver is closed: nothing of it is loaded any more when the failure comes out."""
    solver = MultiALS(*streamed(changed(parts("explicit", gpus(2), MATRIX), batch_slots=60), both((2, 1))))
    for rank in solver.ranks:
        monkeypatch.setattr(rank.halves["item"], "finish", None)
    with pytest.raises(TypeError):
        solver.update("item")
    assert no_loaders()
    solver.close()


def test_losses_that_fail_leave_no_thread_behind(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    solver = MultiALS(*streamed(changed(parts("explicit", gpus(2), MATRIX), batch_slots=60), both((2, 1))))
    for rank in solver.ranks:
        monkeypatch.setattr(rank, "_from_member", None)
    with pytest.raises(TypeError):
        solver.objective_value()
    assert no_loaders()
    solver.close()


def test_rows_that_fail_are_named(gpus: Machine) -> None:
    """Items are solved first: the factors of users are drawn."""
    one_entry = sp.csr_array(([1.0], ([0], [3])), shape=(1, 16))  # for seven unknowns
    matrix = sp.vstack([planted(24, 16, 0.9)[:21], one_entry, planted(24, 16, 0.9)[22:]], format="csr").T.tocsr()
    arguments = streamed(parts("explicit", gpus(2), matrix), both((2, 1)))
    solver = MultiALS(*arguments[:2], replace(arguments[2], regularization=0.0), *arguments[3:])
    with pytest.raises(NotPositiveDefiniteError, match="of item 21 are"):
        solver.update("item")
    solver.close()
    assert no_loaders()


def test_factors_that_are_not_finite_are_reported(gpus: Machine) -> None:
    solver = MultiALS(*streamed(changed(parts("explicit", gpus(2), MATRIX), batch_slots=60), both((2, 1))))
    with solver.ranks[1].worker.active():
        solver.ranks[1].own["item"].table[0] = np.nan  # what rank 1 adds up spoils the rows of both
    before = solver.state.on_host()
    with pytest.raises(NonFiniteError, match="of user"):
        solver.update("user")
    np.testing.assert_array_equal(solver.state.on_host().user.matrix, before.user.matrix)
    with pytest.raises(CommunicatorError):
        solver.update("user")
    solver.close()
    assert no_loaders()


def test_bals_needs_whole_rows(gpus: Machine) -> None:
    arguments = parts("explicit", gpus(2), MATRIX, assembly="bals")
    with pytest.raises(ValueError, match="assembly='bals' needs all entries of a row"):
        MultiALS(*streamed(arguments, both((2, 1))))
    assert no_loaders()


def test_a_rank_without_memory_is_refused_before_the_fit(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All entries of some rows lie in the columns of one rank, whose buffers are then larger than the mean."""
    dense = np.zeros((30, 40), np.float32)
    dense[:10, :20], dense[10:, 20:], dense[10:, :10] = 1.5, 1.5, 1.5
    matrix, grids = sp.csr_array(dense), both((2, 1))
    arguments = parts("explicit", gpus(2), matrix)
    sizes = partition(matrix, grids, 3).bytes_per_gpu
    arguments = streamed(arguments, grids, memory=sizes)
    taken: list[Any] = []
    monkeypatch.setattr(gpu_rank.GpuWorker, "own", lambda *_: taken.append(1))
    with pytest.raises(DeviceMemoryError, match=r"rank . needs about .* to solve .*: use fewer factors, or more GPUs"):
        MultiALS(*arguments)
    assert not taken and no_loaders()


def test_ranks_with_different_batches_are_reported(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    names, grids = gpus(2), both((2, 1))

    def uneven(plan: Plan) -> Plan:
        other = threading.current_thread().name == "hybridmf rank 1"
        return plan.changed(scale=partition(MATRIX, grids, 2)) if other else plan

    monkeypatch.setattr(multi_als, "rank_plan", uneven)
    with pytest.raises(CommunicatorError, match="rank 1 has another layout, objective or plan than rank 0"):
        MultiALS(*streamed(parts("explicit", names, MATRIX), grids))
    whole = both((1, 2))  # where nothing is added up, each rank may load as much as it has room for
    MultiALS(*streamed(parts("explicit", names, MATRIX), whole), grids=whole).close()


# ------------------------------------------------------------------------------------------------------------ fits


def test_a_fit_splits_a_side_that_exceeds_one_gpu(gpus: Machine, tmp_path: Any) -> None:
    names = gpus(2)
    options: dict[str, Any] = {"factors": 7, "iterations": 1, "random_state": 0}
    model = hmf.ExplicitALS(biases=False, device=names, gpu_memory_limit=LIMIT, **options)
    model.fit(MANY_USERS, callback=lambda model, record: None, checkpoint=tmp_path)
    plan = model.plan_
    check_memory(plan)
    assert plan.scale is not None and plan.streamed == "host" and not plan.offloaded
    assert plan.grids == {"user": Grid(1, 2), "item": Grid(2, 1)}
    assert plan.total_bytes == plan.scale.bytes_per_gpu <= LIMIT
    sums = plan.batch_slots * slot_bytes(plan)
    for half in plan.scale.halves.values():  # of either side, beside all else that it needs
        assert sum(half.bytes.values()) - half.bytes["systems"] + sums <= LIMIT
    text = str(plan)
    assert "streamed  from host in slabs" in text and "fixed side split, 2 x 1 GPUs" in text
    assert "note      the ratings do not fit on the 2 GPUs" in text
    assert "note      the fixed side of items is split over the GPUs, which add up sums" in text
    assert no_loaders()
    alone = hmf.ExplicitALS(biases=False, device="cuda", **options).fit(MANY_USERS, callback=lambda model, record: None)
    np.testing.assert_allclose(model.user_factors_, alone.user_factors_, atol=2e-3)
    np.testing.assert_allclose(model.item_factors_, alone.item_factors_, atol=2e-3)
    objectives = [[record["objective"] for record in each.history_] for each in (model, alone)]
    np.testing.assert_allclose(*objectives, rtol=1e-4)
    options["iterations"] = 2
    resumed = hmf.ExplicitALS(biases=False, device=gpus(4), **options).fit(MANY_USERS, resume_from=tmp_path)
    straight = hmf.ExplicitALS(biases=False, device=names, gpu_memory_limit=LIMIT, **options)
    straight.fit(MANY_USERS, checkpoint=tmp_path / "other")
    np.testing.assert_allclose(resumed.user_factors_, straight.user_factors_, atol=2e-3)
    back = hmf.ExplicitALS(biases=False, device=names, gpu_memory_limit=LIMIT, **options | {"iterations": 3})
    back.fit(MANY_USERS, resume_from=tmp_path / "other")
    assert back.n_iter_ == 3 and back.plan_.grids["item"] == Grid(2, 1)


@pytest.mark.parametrize("reduction", ["auto", "parallel", "two_phase", "root"])
def test_a_fit_takes_the_reduction_by_name(reduction: str, gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are those of the float64 reference; their sums were added up as asked for."""
    used: set[tuple[type, bool]] = set()
    for kind in (Reduction, TwoPhaseReduction):

        def reduce(self: Any, *arguments: Any, original: Any = kind.reduce) -> Any:
            used.add((type(self), self.everything_here is None))
            return original(self, *arguments)

        monkeypatch.setattr(kind, "reduce", reduce)
    monkeypatch.setattr(gpu_rank, "sockets", lambda names: [0, 0, 1, 1])
    *_, objective, _, start = parts("explicit", "cpu", MANY_USERS)
    # sockets matter from four GPUs on, for which the planner finds better than to split so few users
    monkeypatch.setattr(als_gpu, "_spread", lambda plan, free: partition(MANY_USERS, both((4, 1)), 3))
    options = {"factors": 7, "iterations": 1, "random_state": 0, "reduction": reduction}
    model = hmf.ExplicitALS(biases=False, regularization=objective.regularization.user, device=gpus(4), **options).fit(
        MANY_USERS
    )
    assert model.plan_.grids == both((4, 1))
    assert used == {(TwoPhaseReduction if reduction == "two_phase" else Reduction, reduction != "root")}
    assert model.plan_.reduction == ("parallel" if reduction == "auto" else reduction)
    assert ("reduction root" in str(model.plan_)) == (reduction == "root")
    users = Factors(start.user.matrix.astype(np.float64))
    exact = reference.half_sweep(MANY_USERS.T.tocsr(), users, 0.0, objective)
    np.testing.assert_allclose(model.item_factors, exact.matrix, atol=1e-3 * np.abs(exact.matrix).max())


def test_a_reduction_needs_a_split_side(gpus: Machine) -> None:
    """Nothing is added up on one device, on CPU ranks, or on GPUs that hold whole sides."""
    for devices in ("cpu", ["cpu", "cpu"], "cuda:0", gpus(2)):
        with pytest.raises(ValueError, match=r"reduction='root' is a way for several GPUs .* plan splits none on c"):
            hmf.ExplicitALS(biases=False, factors=7, device=devices, reduction="root").fit(MATRIX)


def test_more_memory_and_less_of_it_are_other_plans(gpus: Machine) -> None:
    """Around the limits at which sides are split: whole fixed sides if they fit, factors on the host if not."""
    model = MODELS["explicit"](device=gpus(2))
    found = []
    for limit in (10**6, 80_000, 20_000):
        plan = hmf.plan(MANY_USERS, model.set_params(gpu_memory_limit=limit))
        check_memory(plan)
        found.append((plan.streamed, plan.factors_on, plan.grids["item"].splits))
    assert found == [("", "device", found[0][2]), ("", "device", 2), ("host", "host", 1)]


@pytest.mark.parametrize(("free", "factors_on"), [(MANY_USERS.nnz * 8, "host"), (MANY_USERS.nnz * 8 + 1, "device")])
def test_ranks_that_share_rows_need_room_for_copies(
    free: int, factors_on: str, gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each loads of ratings in memory is cut out of them: of one orientation here."""
    monkeypatch.setattr(system, "available_memory", lambda: free)
    plan = hmf.plan(MANY_USERS, MODELS["explicit"](device=gpus(2), gpu_memory_limit=LIMIT))
    assert plan.factors_on == factors_on


def test_the_same_partition_on_fewer_and_more_gpus(gpus: Machine) -> None:
    """cuMF 4.4: what four GPUs hold of a fixed side, two hold two parts each of, side by side, and one all."""
    names = gpus(4)
    four, factors = partition(MATRIX, both((4, 1)), 4), []
    for count in (4, 2, 1):
        moved = four.on(count)
        moved.check_served(count)
        assert all(half.parts == 4 and half.grid == Grid(count, 1) for half in moved.halves.values())
        *data, plan, state = parts("explicit", names[:count], MATRIX)
        sizes = {"streamed": "host", "slab": max(map(moved.slab, SIDES))}
        solver = MultiALS(*data, plan.changed(scale=moved, devices=tuple(names[:count]), **sizes), state)
        for rank in solver.ranks:
            for side in SIDES:
                half = rank.halves[side]
                assert isinstance(half, PartialRows if count > 1 else StreamedHalf)
        factors.append(sweeps(solver, 1))
        solver.close()
    for other in factors[1:]:
        assert_close(other, factors[0], 1e-3)
    assert four.on(8).halves["user"].grid == Grid(4, 2)


def test_planned_partitions_are_fitted(gpus: Machine) -> None:
    """`plan_scale` without a restriction: ratings on the host, factors on the GPUs, a fixed side split over them."""
    machine = replace(H200, links=replace(H200.links, slab=0.0, fetch_bytes=1e4))  # solutions had better stay
    plan = plan_scale(kernels_of(MANY_USERS.shape, MANY_USERS.nnz, 7), 2, LIMIT, machine)
    assert (plan.ratings, plan.factors) == ("host", "device") and plan.grids["item"].splits == 2
    plan.check_served(2)
    *data, fit, state = parts("explicit", gpus(2), MANY_USERS)
    sizes = {"streamed": "host", "slab": max(map(plan.slab, SIDES))}
    solver = MultiALS(*data, fit.changed(scale=plan, **sizes), state)
    alone = one_device(*parts("explicit", "cuda:0", MANY_USERS), device=group.open_device("cuda:0"))
    assert_close(sweeps(solver, 1), sweeps(alone, 1), 1e-3)
    solver.close()
    with pytest.raises(ValueError, match=r"keeps factors on the host where each GPU solves its own rows; .* p = 2"):
        replace(plan, halves={side: replace(plan.halves[side], factors="host") for side in SIDES}).check_served(2)


@pytest.mark.parametrize("free", [10**9, 40_000])
def test_a_fit_splits_a_store(free: int, gpus: Machine, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Onto the host if it has room, else batch by batch from the disk."""
    store = hmf.convert(MANY_USERS, tmp_path / "store", slab_bytes=2000)
    options: dict[str, Any] = {"factors": 7, "iterations": 1, "random_state": 0, "device": gpus(2)}
    options["gpu_memory_limit"] = LIMIT
    expected = hmf.ExplicitALS(biases=False, **options).fit(MANY_USERS, callback=lambda model, record: None)
    monkeypatch.setattr(system, "available_memory", lambda: free)
    monkeypatch.setattr(StoreMatrix, "load", None)
    model = hmf.ExplicitALS(biases=False, **options).fit(
        store, callback=lambda model, record: None, checkpoint=tmp_path / "c"
    )
    assert model.plan_.streamed == ("host" if free == 10**9 else "disk")
    assert model.plan_.grids == expected.plan_.grids and model.plan_.grids["item"] == Grid(2, 1)
    np.testing.assert_array_equal(model.user_factors_, expected.user_factors_)
    np.testing.assert_array_equal(model.item_factors_, expected.item_factors_)
    assert model.history_[-1]["objective"] == pytest.approx(expected.history_[-1]["objective"], rel=1e-10)
    assert no_loaders()


def test_different_batches_of_ranks_are_explained(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs with different memory free may."""
    gpus(2)
    make_plan = ranked.make_plan

    def differently(*arguments: Any) -> Plan:
        plan = make_plan(*arguments)
        count = 3 if threading.current_thread().name.endswith("1") else 2
        return plan.changed(scale=partition(MANY_USERS, pairs((1, 2), (2, 1)), count), streamed="host")

    monkeypatch.setattr(ranked, "make_plan", differently)

    def run(communicator: Any) -> Any:
        model = hmf.ExplicitALS(biases=False, factors=7, device="cpu")
        share = entries(MANY_USERS, communicator.rank, 2)
        return fit_rank(model, share, communicator, "cuda:0")

    with pytest.raises(CommunicatorError, match=r"rank 1 plans batches of \[0, \d+\] entries and rank 0 .*_limit"):
        run_ranks(2, run, timeout=30)


@pytest.mark.parametrize("share", ["entries", "store", "store of many items"])
def test_ranks_of_processes_stream_their_entries(
    share: str, tmp_path: Any, gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = gpus(2)
    monkeypatch.setattr(ranked, "_worker", workers_on(names))
    matrix, wide = MANY_USERS, "item"
    if share == "store of many items":  # then ranks share users, of whom the checkpoint's fingerprint is made
        matrix, wide = sp.csr_array(MANY_USERS.T), "user"
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes=2000)
    if share != "entries":
        monkeypatch.setattr(system, "available_memory", lambda: 40_000)

    def run(communicator: Any) -> Any:
        model = hmf.ExplicitALS(
            biases=False, factors=7, iterations=1, random_state=0, device="cpu", gpu_memory_limit=LIMIT
        )
        shares: Any = entries(matrix, communicator.rank, 2)
        if share != "entries":
            shares = StoredRatings(store, np.float32, drop_zeros=False)
            monkeypatch.setattr(Part, "load", None)  # no code may bring a whole share into memory
        options = {"checkpoint": tmp_path / "c", "track_objective": True}
        return fit_rank(model, shares, communicator, "cuda:0", **options)

    model = run_ranks(2, run, timeout=60)[0]
    assert model.plan_.streamed == ("host" if share == "entries" else "disk")
    assert model.plan_.grids[wide] == Grid(2, 1) and no_loaders()
    monkeypatch.setattr(system, "available_memory", lambda: 10**9)
    alone = hmf.ExplicitALS(biases=False, factors=7, iterations=1, random_state=0, device="cuda")
    alone.fit(matrix, callback=lambda model, record: None)
    np.testing.assert_allclose(model.user_factors_, alone.user_factors_, atol=2e-3)
    assert model.history_[-1]["objective"] == pytest.approx(alone.history_[-1]["objective"], rel=1e-4)
    more = hmf.ExplicitALS(biases=False, factors=7, iterations=2, random_state=0)
    assert more.fit(matrix, resume_from=tmp_path / "c").n_iter_ == 2  # the same data


def test_loading_ends_with_ranks_of_processes_that_fail(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two half sweeps, when the entries of the next one are loading; although somebody keeps the error."""
    monkeypatch.setattr(ranked, "_worker", workers_on(gpus(2)))

    def fail(model: Any, record: Any) -> None:
        raise ValueError("as told")

    def run(communicator: Any) -> None:
        model = hmf.ExplicitALS(biases=False, factors=7, device="cpu", gpu_memory_limit=LIMIT)
        share = entries(MANY_USERS, communicator.rank, 2)
        fit_rank(model, share, communicator, "cuda:0", callback=fail)

    with pytest.raises(ValueError, match="as told") as kept:
        run_ranks(2, run, timeout=60)
    assert kept.value is not None and no_loaders()


# ------------------------------------------------------------------------------------------------------------ planner


def test_memory_of_a_split_half_sweep_by_hand() -> None:
    problem = kernels_of((1000, 600), 40_000, 10, assembly="sparse_syrk", segment=10**6)
    half = HalfPlan("user", 4, 8, 8, "host")
    sizes = half_bytes(problem, half)
    row = 12 * 4
    assert half.grid == Grid(4, 2) and half.fixed == "split"
    assert sizes["fixed side"] == 150 * row and sizes["solutions"] == 125 * row and sizes["factors"] == 200 * row
    assert sizes["ratings"] == 3 * 40_000 // 8 // 4 * 8
    assert sizes["systems"] == 125 * 440
    assert sizes["rows"] == 200 * 20 + 500 * 36
    # sums of all rows, wherever they could be solved on chip if the fixed side were there as a whole
    on_chip = problem.changed(assembly="fused")
    assert half_bytes(on_chip, half)["systems"] == 125 * slot_bytes(on_chip)
    away = half_bytes(on_chip, HalfPlan("user", 1, 8, 8, "host", "host", split=False))
    assert away["systems"] == slot_bytes(on_chip)
    # a batch of one row of each GPU, twice in pieces, and as they are added up
    assert half_bytes(problem, replace(half, batches=1000))["systems"] == 2 * (3 * 4 + 1) * 440
    # two parts of four on one GPU are one, with the entries of both
    two = replace(half, gpus=2)
    assert two.grid == Grid(2, 1) and half_bytes(problem, two)["ratings"] == 3 * 40_000 // 8 // 2 * 8


def test_a_split_is_planned_if_a_whole_side_does_not_fit() -> None:
    hugewiki = kernels_of((50_082_603, 39_780), 3_100_000_000, 100)
    slab = 16 << 20
    whole = plan_streamed_ranks(hugewiki, 4, 50 * 10**9, "host", slab, model_parallel_only=True)
    assert whole is not None and whole.grids == both((1, 4))
    memory = 44 * 10**9
    assert plan_streamed_ranks(hugewiki, 4, memory, "host", slab, model_parallel_only=True) is None
    plan = plan_streamed_ranks(hugewiki, 4, memory, "host", slab)
    assert plan is not None and plan.bytes_per_gpu <= memory
    assert plan.grids["user"] == Grid(1, 4) and plan.grids["item"].splits > 1
    for side, half in plan.halves.items():  # each GPU loads at most a slab at a time
        assert slab / 2 < plan.slab(side) / half.grid.splits <= slab
    plan.check_served(4)
    assert plan_streamed_ranks(hugewiki, 4, 10**9, "host", slab) is None
    facebook = plan_scale(kernels_of((1_056_000_000, 48_000_000), 112_000_000_000, 16), 4)  # as cuMF fits it
    assert (facebook.ratings, facebook.factors) == ("host", "device")
    assert facebook.halves["item"].fixed == "split"
    facebook.check_served(4)
    for count in (2, 8):
        moved = replace(plan, memory=10**12).on(count)
        moved.check_served(count)
        assert moved.halves["item"].parts == plan.halves["item"].parts


def test_a_rank_is_checked_by_its_own_grid() -> None:
    """Whatever the partition says of its own: one of whole sides does not count the sums of a split one."""
    shape, grids = (400_000, 300_000), both((2, 1))
    layout = RankLayout({side: np.array([0, n // 2, n]) for side, n in zip(SIDES, shape, strict=True)}, grids)
    messages = []
    problem = kernels_of(shape, 10**7, 64)
    for parts_of, split in ((2, True), (1, False), (1, True)):
        halves = {side: complete(problem, HalfPlan(side, parts_of, 2, 2, "host", split=split)) for side in SIDES}
        plan = ScalePlan(problem, H200, 2, 10**8, halves)
        with pytest.raises(DeviceMemoryError, match=r"rank 1 needs about .*fixed side 0.0 MiB") as raised:
            check_rank(plan, layout, 1, dict.fromkeys(SIDES, 10**6))
        messages.append(str(raised.value).partition("the plan's")[0])
        check_rank(replace(plan, memory=10**11), layout, 1, dict.fromkeys(SIDES, 10**6))
    assert len(set(messages)) == 1
