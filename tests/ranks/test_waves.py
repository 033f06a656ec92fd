"""Several ranks whose ratings come in waves, from the host or from a store: the bits of ranks that hold them all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core import system
from hybridmf.core.objective import SIDES
from hybridmf.data.slabs import InMemory, Part, slab_entries
from hybridmf.data.store import StoreMatrix
from hybridmf.errors import (
    CommunicatorError,
    DeviceMemoryError,
    MemoryBudgetError,
    NotPositiveDefiniteError,
    StoreError,
)
from hybridmf.gpu.offloaded import HostHalf
from hybridmf.gpu.stream import StreamedHalf
from hybridmf.model import ranked
from hybridmf.model.learned import scale_of
from hybridmf.model.training import LocalRatings
from hybridmf.plan.grid import Grid
from hybridmf.plan.half_sweep import SLAB_BUFFERS, HalfPlan, half_bytes, priced
from hybridmf.plan.machine import H200
from hybridmf.plan.make import check_memory, make_plan
from hybridmf.plan.memory import rank_bytes
from hybridmf.plan.partitions import ScalePlan, plan_scale
from hybridmf.ranks import group
from hybridmf.ranks.multi_als import MultiALS
from hybridmf.ranks.shares import StoredRatings
from hybridmf.ranks.transport.threads import run_ranks
from support.cost_model import kernels_of
from support.host_factors import partitioned
from support.marks import exhaustive
from support.ranks import MODELS, Machine, entries, fit_rank, no_loaders, one_device, workers_on
from support.ranks import parts as solver_parts
from support.ratings import planted
from support.solvers import iterate

pytestmark = pytest.mark.usefixtures("tiny_gpu")

MATRIX = planted(50, 30, 0.8)
"""As in gpu/test_stream.py: entries take more memory than all else."""

LIMIT = 11_500
"""Too little for the share of MATRIX of one of two or four GPUs, enough for an eighth of it at a time."""

HOST_LIMIT = 8_900
"""Too little for the share of the factors of MATRIX of one of two GPUs."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> hmf.Store:
    """MATRIX in slabs of at most 80 entries; no test changes it."""
    return hmf.convert(MATRIX, tmp_path_factory.mktemp("store") / "store", slab_bytes=640)


def fitted(name: str, data: Any, devices: Any, **options: Any) -> Any:
    model = MODELS[name](**({"device": devices, "random_state": 0, "iterations": 1} | options))
    return model.fit(data, callback=lambda model, record: None)


# ------------------------------------------------------------------------------------------------------------ slabs


@pytest.mark.parametrize("ranges", [[(0, 50)], [(3, 20), (31, 50)], [(5, 5), (12, 13), (50, 50)], [(0, 0)]])
@pytest.mark.parametrize("columns", [(0, 30), (4, 17), (9, 9)])
def test_some_columns_of_ranges_of_slabs(
    ranges: list[tuple[int, int]], columns: tuple[int, int], store: hmf.Store
) -> None:
    for dtype in (np.float32, np.float64):
        part = StoreMatrix(store, dtype=dtype).part(ranges, columns)
        rows = np.concatenate([np.arange(first, last) for first, last in ranges])
        expected = MATRIX[rows][:, slice(*columns)]
        assert part.shape == expected.shape and part.nnz == expected.nnz and part.dtype == dtype
        np.testing.assert_array_equal(part.degrees, np.diff(expected.indptr))
        found = part.load().csr
        assert found.shape == expected.shape and found.dtype == dtype and (found != expected).nnz == 0
        for first, last in ((0, len(rows)), (1, 1), (len(rows) // 3, len(rows) // 2)):
            pieces = list(part.rows(first, last))
            assert sum(piece.shape[0] for piece in pieces) == last - first
            data = np.concatenate([np.zeros(0, dtype), *(piece.data for piece in pieces)])
            np.testing.assert_array_equal(data, expected[first:last].data)


@pytest.mark.parametrize(("first", "last"), [(0, 50), (7, 31), (12, 13), (20, 20), (0, 0), (50, 50)])
@pytest.mark.parametrize("entries", [None, 30, 10_000])
def test_a_range_of_slabs_is_the_rows(first: int, last: int, entries: int | None, store: hmf.Store) -> None:
    whole = StoreMatrix(store).part([(first, last)])
    part = whole if entries is None else whole.cut(entries)
    rows = MATRIX[first:last]
    assert part.shape == rows.shape and part.nnz == rows.nnz and part.dtype == np.float32
    np.testing.assert_array_equal(part.degrees, np.diff(rows.indptr))
    assert part.bounds[0] == 0 and part.bounds[-1] == last - first
    if entries is not None:
        longest = int(part.degrees.max(initial=0))
        assert slab_entries(part.bounds, part.degrees).max(initial=0) <= max(entries, longest)
    for slab, (start, stop) in enumerate(zip(part.bounds[:-1], part.bounds[1:], strict=True)):
        part.prefetch(slab + 1)
        assert (part.matrix(slab) != rows[start:stop]).nnz == 0
    found = part.load()
    assert found.shape == rows.shape and (found.csr != rows).nnz == 0
    np.testing.assert_array_equal(found.bounds, part.bounds)
    at = np.arange(last - first)[::-3]
    assert (part.take(at) != rows[at]).nnz == 0


def test_a_slab_is_converted_once_for_all_its_parts(store: hmf.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    matrix = StoreMatrix.matrix
    monkeypatch.setattr(StoreMatrix, "matrix", lambda self, slab: reads.append(slab) or matrix(self, slab))
    part = Part(StoreMatrix(store, dtype=np.float64), [(3, 40)], entries=25)
    assert (part.load().csr != MATRIX[3:40].astype(np.float64)).nnz == 0
    assert len(part.bounds) - 1 > len(reads) == len(set(reads))


# ------------------------------------------------------------------------------------------------------------ CPU ranks

CPU_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "explicit": (hmf.ExplicitALS, {"biases": True}),
    "implicit": (hmf.ImplicitALS, {"alpha": 3.0}),
    "cg float64": (hmf.ImplicitALS, {"alpha": 3.0, "solver": "cg", "dtype": "float64"}),
}


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *(("explicit", 2), ("implicit", 3), ("cg float64", 2)),
        *(exhaustive(*each) for each in (("explicit", 3), ("implicit", 2), ("cg float64", 3))),
    ],
)
def test_cpu_ranks_map_a_store(
    kind: str, ranks: int, store: hmf.Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    cls, given = CPU_KINDS[kind]
    options = {"factors": 5, "iterations": 2, "random_state": 0} | given
    monkeypatch.setattr(StoreMatrix, "load", None)  # no code may request all of it
    seen: list[Any] = []
    model = cls(device=["cpu"] * ranks, **options)
    model.fit(store, callback=lambda model, record: seen.append(record["objective"]), checkpoint=tmp_path / "c")
    alone = cls(device="cpu", **options).fit(MATRIX, callback=lambda model, record: None)
    np.testing.assert_array_equal(model.user_factors_, alone.user_factors_)
    np.testing.assert_array_equal(model.item_factors_, alone.item_factors_)
    np.testing.assert_allclose(seen, [record["objective"] for record in alone.history_], rtol=1e-6)
    assert model.plan_.streamed == "disk" and "streamed  from disk in slabs" in str(model.plan_)
    resumed = cls(device="cpu", **options | {"iterations": 3}).fit(MATRIX, resume_from=tmp_path / "c")
    straight = cls(device=["cpu"] * ranks, **options | {"iterations": 3}).fit(store)
    np.testing.assert_array_equal(resumed.user_factors_, straight.user_factors_)


def test_cpu_ranks_over_a_store_name_the_row_that_fails(tmp_path: Any) -> None:
    one_entry = sp.csr_array(([1.0], ([0], [3])), shape=(1, 30))
    matrix = sp.vstack([MATRIX[:41], one_entry, MATRIX[42:]], format="csr")
    store = hmf.convert(matrix, tmp_path / "store", slab_bytes=640)
    model = hmf.ExplicitALS(biases=False, factors=5, regularization=0.0, device=["cpu", "cpu"], random_state=0)
    with pytest.raises(NotPositiveDefiniteError, match="of user 41 are"):
        model.fit(store)


# ------------------------------------------------------------------------------------------------------------ GPUs


def ways(
    store: hmf.Store, limit: int, monkeypatch: pytest.MonkeyPatch, few: bool = False
) -> Iterator[tuple[Any, dict[str, Any], tuple[str, bool]]]:
    """(data, options, what the plan has to say) of each way slabs can come; `few`: from ratings and from the disk."""
    limited = {"gpu_memory_limit": limit}
    yield MATRIX, limited, ("host", False)
    with monkeypatch.context() as patched:
        patched.setattr(StoreMatrix, "load", None)  # no code may request all of it
        if not few:
            yield store, {}, ("disk", True)
            yield store, limited, ("host", False)
        patched.setattr(system, "available_memory", lambda: 1000)
        yield store, limited, ("disk", False)


@pytest.mark.parametrize(
    ("name", "limit", "method"),
    [
        ("implicit", LIMIT, {"balance": True}), ("biases", LIMIT, {}),
        ("implicit cg", 12_000, {"assembly": "sparse_syrk"}),
    ],
)  # fmt: skip
def test_the_bits_are_those_of_gpus_that_hold_their_ratings(
    name: str,
    limit: int,
    method: dict[str, Any],
    gpus: Machine,
    store: hmf.Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = gpus(2)
    alone, whole = fitted(name, MATRIX, "cuda", **method), fitted(name, MATRIX, names, **method)
    assert whole.plan_.streamed == ""
    if not method.get("balance"):  # whose Gram matrices are added up over ranks
        np.testing.assert_array_equal(whole.user_factors, alone.user_factors)
    for data, options, expected in ways(store, limit, monkeypatch, few=name != "biases"):
        model = fitted(name, data, names, **method, **options)
        assert (model.plan_.streamed, model.plan_.resident) == expected
        np.testing.assert_array_equal(model.user_factors, whole.user_factors)
        np.testing.assert_array_equal(model.item_factors, whole.item_factors)
        objectives = [[record["objective"] for record in each.history_] for each in (model, alone)]
        np.testing.assert_allclose(*objectives, rtol=1e-5)
        assert no_loaders()


def multi(data: Any, devices: list[str], scale: Any = None, name: str = "explicit", **options: Any) -> MultiALS:
    """A solver over the memory of a small GPU each; `scale`: a partition in place of the plan's own."""
    given = {"gpu_memory_limit": LIMIT} | options
    model = MODELS[name](device=devices, random_state=0, **given)
    matrix = model._check_matrix(data)
    slab = matrix.largest_slab if isinstance(matrix, StoreMatrix) else None
    plan = make_plan(model._objective(), model._settings(), matrix.shape, matrix.nnz, slab=slab)
    check_memory(plan)
    if scale is not None:
        plan = plan.changed(scale=scale, devices=tuple(devices))
    objective = model._objective(scale_of(matrix, model._objective()))
    ratings = LocalRatings(model, data).on_host(plan)
    state = model._initial_state(ratings, plan, objective)
    return MultiALS(matrix, ratings.item_users, objective, plan, state)


def test_fewer_gpus_take_the_same_partition_in_more_waves(gpus: Machine, store: hmf.Store) -> None:
    """cuMF 4.4: one object says what four GPUs do side by side, and two or one of them one after the other."""
    names = gpus(4)
    four = multi(MATRIX, names)
    assert four.plan.scale is not None and four.plan.scale.ratings == "host"
    partition = replace(four.plan.scale, memory=20_000)
    factors = []
    for count in (4, 2, 1):
        moved = partition.on(count)
        solver = multi(MATRIX, names[:count], moved)
        for side in SIDES:
            half = moved.halves[side]
            assert half.batches == partition.halves[side].batches and half.waves == half.batches // count
            for rank in solver.ranks:
                streamed = rank.halves[side]
                assert isinstance(streamed, StreamedHalf) and streamed.pipeline is not None
                entries = slab_entries(streamed.slabs.bounds, streamed.degrees)
                assert entries.max() <= moved.slab(side)
                assert len(entries) >= half.waves // 2  # about as many: ranks own rows that are even in cost
                assert streamed.pipeline.vectors[0][0] <= max(map(moved.slab, SIDES))
        solver.update("item")
        solver.update("user")
        state = solver.state.on_host()
        factors.append((state.user.matrix, state.item.matrix))
        solver.close()
    for users, items in factors[1:]:
        np.testing.assert_array_equal(users, factors[0][0])
        np.testing.assert_array_equal(items, factors[0][1])
    four.close()


def test_fewer_gpus_take_several_parts_of_a_fixed_side(gpus: Machine) -> None:
    """cuMF 4.4 with everything on the GPUs: p = 4 parts on four of them, two each on two, all on one."""
    names, problem = gpus(4), kernels_of(MATRIX.shape, MATRIX.nnz, 7)
    whole = {side: HalfPlan(side, 4, 1, 4) for side in SIDES}
    halves = {
        side: priced(problem, replace(half, bytes=half_bytes(problem, half)), H200) for side, half in whole.items()
    }
    partition = ScalePlan(problem, H200, 4, 10**9, halves)
    factors = []
    for count in (4, 3, 2, 1):
        moved = partition.on(count)
        assert all(half.parts == 4 and half.grid == Grid(count, 1) for half in moved.halves.values())
        assert str(moved).count("p = 4") == 2 and "turns" not in str(moved)
        solver = multi(MATRIX, names[:count], moved, gpu_memory_limit=10**9)
        assert solver.layout.grids == moved.grids
        solver.update("item")
        solver.update("user")
        state = solver.state.on_host()
        factors.append((state.user.matrix, state.item.matrix))
        solver.close()
    assert partition.on(8).halves["user"].grid == Grid(4, 2)
    for users, items in factors[:-1]:
        np.testing.assert_allclose(users, factors[-1][0], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(items, factors[-1][1], rtol=1e-3, atol=1e-3)


def test_partitions_that_no_fit_serves(gpus: Machine) -> None:
    partition = multi(MATRIX, gpus(2)).plan.scale
    assert partition is not None

    def elsewhere(**changes: Any) -> ScalePlan:
        return replace(partition, halves={side: replace(half, **changes) for side, half in partition.halves.items()})

    for changed, message in (
        (partition.on(4), r"the partition is for 4 GPUs and the fit has 2; use partition.on\(2\)"),
        (
            elsewhere(ratings="disk", factors="disk"),
            "a fit on several GPUs keeps factors on them or on the host; .* has them on disk",
        ),
        (elsewhere(ratings="device", factors="host"), "streams ratings where factors are on the host"),
        (
            elsewhere(ratings="host", factors="host", parts=2, split=True),
            "splits the fixed side of users over GPUs, with p = 2: let the fit plan for itself, or use plan_",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            multi(MATRIX, gpus(2), changed)


@pytest.mark.parametrize("name", ["implicit", "biases", exhaustive("implicit cg")])
def test_factors_stay_on_the_host(name: str, gpus: Machine, store: hmf.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    names = gpus(2)
    alone = fitted(name, MATRIX, "cuda")
    for data, free in ((MATRIX, None), (store, None), (store, 20_000)):
        with monkeypatch.context() as patched:
            if free is not None:
                patched.setattr(system, "available_memory", lambda: 20_000)
            model = fitted(name, data, names, gpu_memory_limit=HOST_LIMIT)
        plan = model.plan_
        assert plan.factors_on_host and plan.scale is not None and "they stay in the memory of the host" in str(plan)
        assert plan.streamed == ("host" if free is None else "disk")
        assert all(half.turns == 1 for half in plan.scale.halves.values())
        np.testing.assert_array_equal(model.user_factors, alone.user_factors)
        np.testing.assert_array_equal(model.item_factors, alone.item_factors)
        assert model.history_[-1]["objective"] == pytest.approx(alone.history_[-1]["objective"], rel=1e-6)
        assert no_loaders()


def test_parts_of_a_fixed_side_take_turns(gpus: Machine) -> None:
    """cuMF 4.4: one partition with p parts in turns, on four GPUs and on one; and sums over two of them."""
    names, problem = gpus(4), kernels_of(MATRIX.shape, MATRIX.nnz, 7)
    partition = plan_scale(problem, 4, 6_000, model_parallel_only=True)
    assert partition.factors == partition.ratings == "host"
    assert partition.halves["item"].turns > 1 and partition.halves["item"].grid == Grid(1, 4)
    factors = []
    for count in (4, 1):
        moved = replace(partition, memory=10_000).on(count)
        assert {side: half.parts for side, half in moved.halves.items()} == {
            side: half.parts for side, half in partition.halves.items()
        }
        solver = multi(MATRIX, names[:count], moved, gpu_memory_limit=LIMIT)
        assert isinstance(solver.ranks[0].halves["item"], HostHalf)
        solver.update("item")
        solver.update("user")
        state = solver.state.on_host()
        factors.append((state.user.matrix, state.item.matrix))
        solver.close()
    for users, items in factors[1:]:  # rows are summed by part, whoever does it
        np.testing.assert_array_equal(users, factors[0][0])
        np.testing.assert_array_equal(items, factors[0][1])
    alone = fitted("explicit", MATRIX, "cuda")
    np.testing.assert_allclose(factors[0][0], alone.user_factors, rtol=1e-3, atol=1e-3)
    solver = multi(MATRIX, names[:2], replace(partition, memory=10_000).on(2), "biases", balance=True)
    iterate(solver)
    balanced = fitted("biases", MATRIX, "cuda", balance=True)
    np.testing.assert_allclose(solver.state.on_host().user.matrix, balanced.user_factors, rtol=5e-3, atol=5e-3)
    solver.close()


def test_the_plan_says_what_is_streamed(gpus: Machine, store: hmf.Store) -> None:
    model = MODELS["explicit"](device=gpus(2), gpu_memory_limit=LIMIT)
    for data in (MATRIX, store):
        plan = hmf.plan(data, model)
        check_memory(plan)
        text = str(plan)
        assert plan.scale is not None and plan.scale.bytes_per_gpu == plan.total_bytes <= LIMIT
        assert f"streamed  from host in slabs of up to {plan.slab:,} entries" in text
        assert "fixed side replicated, 1 x 2 GPUs, " in text and "from host" in text
        assert ("the ratings do not fit on the 2 GPUs" in text) == (data is MATRIX)
        assert plan.bytes["ratings"] == SLAB_BUFFERS * plan.slab * 8
    roomy = hmf.plan(store, model.set_params(gpu_memory_limit=None))
    assert roomy.resident and "once: they stay on the GPU" in str(roomy)
    hopeless = hmf.plan(MATRIX, model.set_params(gpu_memory_limit=1000))
    with pytest.raises(DeviceMemoryError, match="needs about"):
        check_memory(hopeless)
    tiles = {"assembly": "bals", "gpu_memory_limit": LIMIT}
    assert hmf.plan(MATRIX, model.set_params(**tiles)).streamed == ""
    with pytest.raises(ValueError, match=r'assembly="bals" cuts all ratings into tiles'):
        hmf.plan(store, model)


def test_a_rank_with_more_than_its_share_is_refused_before_the_fit(gpus: Machine) -> None:
    """Rows are shared by cost: half of the users have next to no entries, and one rank has nearly all entries."""
    rows = sp.vstack([planted(50, 30, 0.9), sp.eye_array(80, 30)], format="csr")
    names = gpus(2)
    sizes = multi(rows, names, gpu_memory_limit=None).plan.scale
    assert sizes is not None
    limit = sizes.bytes_per_gpu
    message = rf"rank 0 needs about .* to solve (users|items) .*below {limit} bytes has ratings streamed"
    with pytest.raises(DeviceMemoryError, match=message):
        multi(rows, names, gpu_memory_limit=limit)
    assert multi(rows, names, gpu_memory_limit=limit - 1).plan.streamed == "host"


def test_offloaded_half_sweeps_are_charged_their_own_buffers(gpus: Machine) -> None:
    """Waves of the long item rows are longer than those of users, which have buffers of their own."""
    rows, names, limit = planted(3000, 6, 0.5), gpus(2), 91_000
    plan = hmf.plan(rows, MODELS["explicit"](device=names, gpu_memory_limit=limit))
    assert plan.scale is not None and plan.scale.factors == "host"
    assert plan.scale.slab("item") > 1.5 * plan.scale.slab("user")
    multi(rows, names, plan.scale, gpu_memory_limit=limit).close()


def test_a_row_longer_than_a_wave_is_refused_before_the_fit(gpus: Machine) -> None:
    one_has_all = sp.vstack([sp.csr_array(np.ones((1, 2000), np.float32)), sp.eye_array(50, 2000)], format="csr")
    with pytest.raises(
        DeviceMemoryError, match=r"rank . needs about .*ratings 0.0 .*: use fewer factors, or more GPUs"
    ):
        multi(one_has_all, gpus(2), gpu_memory_limit=100_000)


def test_a_failure_of_a_rank_ends_all_loaders(
    gpus: Machine,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system, "available_memory", lambda: 1000)
    store = hmf.convert(MATRIX, tmp_path / "store", slab_bytes=640)
    path = store.path / "user-000003.values.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    # implicit: explicit models read all values before the first half sweep, for their scale
    model = MODELS["implicit"](device=gpus(2), gpu_memory_limit=LIMIT, random_state=0)
    with pytest.raises(StoreError, match=r"user-000003\.values\.npy' was altered .*convert the ratings again"):
        model.fit(store)
    assert np.any(model.item_factors != 0)  # the half sweep before it is kept
    assert no_loaders()


def test_a_row_that_fails_is_named_as_the_input_has_it(gpus: Machine) -> None:
    one_entry = sp.csr_array(([1.0], ([0], [3])), shape=(1, 30))  # for seven unknowns
    matrix = sp.vstack([MATRIX[:41], one_entry, MATRIX[42:]], format="csr")
    with pytest.raises(NotPositiveDefiniteError, match="of user 41 are"):
        fitted("explicit", matrix, gpus(2), regularization=0.0, gpu_memory_limit=LIMIT)


def test_more_ranks_than_rows(gpus: Machine, tmp_path: Any) -> None:
    matrix = planted(3, 2, density=0.9)
    store = hmf.convert(matrix, tmp_path / "store")
    model, alone = (fitted("implicit", data, devices) for data, devices in ((store, gpus(4)), (matrix, "cuda")))
    np.testing.assert_array_equal(model.user_factors, alone.user_factors)


@pytest.mark.parametrize("parts", [1, 3])
def test_more_ranks_than_rows_and_factors_on_the_host(parts: int, gpus: Machine) -> None:
    """Some ranks have no row, one row has no entry, and the last part of a fixed side is empty."""
    matrix = sp.csr_array(np.array([[0, 2, 0, 3], [0, 0, 0, 0], [4, 0, 1, 2]], dtype=np.float32))
    *data, plan, state = solver_parts("biases", gpus(4), matrix)
    counts = [dict.fromkeys(SIDES, count) for count in (parts, 4)]
    several = MultiALS(*data, partitioned(plan, *counts), state)
    one = one_device(
        *data, plan.changed(devices=(), scale=None, streamed=""), state, device=group.open_device("cuda:0")
    )
    for solver in (several, one):
        iterate(solver)
    found, expected = several.state.on_host(), one.state.on_host()
    for side in SIDES:
        np.testing.assert_allclose(found.side(side).matrix, expected.side(side).matrix, rtol=2e-3, atol=2e-3)
    assert several.objective_value() == pytest.approx(one.objective_value(), rel=1e-3)
    several.close()


# ------------------------------------------------------------------------------------------------- ranks by themselves


@pytest.mark.parametrize(("device", "limit"), [("cpu", None), ("cuda:0", LIMIT), ("cuda:0", HOST_LIMIT)])
def test_ranks_of_processes_stream_their_part_of_a_store(
    device: str,
    limit: int | None,
    store: hmf.Store,
    gpus: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    names = gpus(2)
    monkeypatch.setattr(ranked, "_worker", workers_on(names) if device != "cpu" else ranked._worker)
    free = 10**6 if device == "cpu" else 10_000  # too little to hold the store for the GPUs
    monkeypatch.setattr(system, "available_memory", lambda: free)
    monkeypatch.setattr(StoreMatrix, "load", None)
    options = {"iterations": 2, "random_state": 0, "device": "cpu", "num_threads": 2}  # more take more memory
    limited = {"gpu_memory_limit": limit} if limit else {}

    def run(communicator: Any) -> Any:
        ratings = StoredRatings(store, np.float32, drop_zeros=False)
        monkeypatch.setattr(Part, "load", None)  # no code may bring a whole share into memory
        model = MODELS["explicit"](**options, **limited)
        return fit_rank(model, ratings, communicator, device, checkpoint=tmp_path, track_objective=True)

    model = run_ranks(2, run, timeout=60)[0]
    assert model.plan_.streamed == "disk" and no_loaders()
    assert model.plan_.factors_on_host == (limit == HOST_LIMIT)
    monkeypatch.setattr(system, "available_memory", lambda: 10**9)
    kind = {"device": device.partition(":")[0]}
    alone = MODELS["explicit"](**options | kind).fit(MATRIX, callback=lambda model, record: None)
    np.testing.assert_array_equal(model.user_factors_, alone.user_factors_)
    assert model.history_[-1]["objective"] == pytest.approx(alone.history_[-1]["objective"], rel=1e-5)
    resumed = MODELS["explicit"](**options | {"iterations": 3}).fit(MATRIX, resume_from=tmp_path)  # the same data
    assert resumed.n_iter_ == 3


def test_ranks_on_large_gpus_keep_their_part_of_a_store(
    store: hmf.Store, gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any grid: only what is streamed has to be model parallel."""
    names = gpus(2)
    monkeypatch.setattr(ranked, "_worker", workers_on(names))
    kinds: list[type] = []
    cut = ranked.RankedRatings.cut

    def seen(source: Any, *arguments: Any) -> None:
        cut(source, *arguments)
        kinds.extend(type(block) for block in source.blocks.values())

    monkeypatch.setattr(ranked.RankedRatings, "cut", seen)

    def run(communicator: Any) -> Any:
        ratings = StoredRatings(store, np.float32, drop_zeros=False)
        model = MODELS["explicit"](device="cpu", random_state=0, iterations=1)
        return fit_rank(model, ratings, communicator, "cuda:0")

    assert run_ranks(2, run, timeout=60)[0].plan_.streamed == ""
    assert kinds == [InMemory] * 4


@pytest.mark.parametrize("share", ["entries", "store"])
def test_ranks_of_processes_check_their_memory_first(
    share: str, store: hmf.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without memory raises the error of a single fit; the others receive its cause."""
    free = {"hybridmf rank 1": 1000}
    monkeypatch.setattr(system, "available_memory", lambda: free.get(threading.current_thread().name, 10**9))
    causes: dict[int, Exception] = {}

    def run(communicator: Any) -> None:
        stored = StoredRatings(store, np.float32, drop_zeros=False)
        ratings = stored if share == "store" else entries(MATRIX, communicator.rank, 2)
        try:
            fit_rank(hmf.ExplicitALS(biases=False, factors=5, device="cpu"), ratings, communicator)
        except Exception as error:
            causes[communicator.rank] = error
            raise

    with pytest.raises(MemoryBudgetError, match=r"the fit needs about .* are free \(ratings .*use fewer factors"):
        run_ranks(2, run, timeout=30)
    assert isinstance(causes[0], CommunicatorError) and "the fit needs about" in str(causes[0])


def test_ranks_on_gpus_check_their_memory_first(gpus: Machine) -> None:
    gpus(2)

    def run(communicator: Any) -> None:
        model = MODELS["explicit"](device="cpu", gpu_memory_limit=2000)
        fit_rank(model, entries(MATRIX, communicator.rank, 2), communicator, "cuda:0")

    with pytest.raises(DeviceMemoryError, match=r"the fit needs about .* are free"):
        run_ranks(2, run, timeout=30)


def test_memory_of_a_rank_shrinks_with_their_number() -> None:
    model = hmf.ImplicitALS(factors=64, device="cpu")
    plan = hmf.plan(shape=(10**6, 10**5), nnz=10**8, model=model)
    sizes = {ranks: rank_bytes(plan, ranks) for ranks in (1, 2, 8)}
    assert sizes[1]["ratings"] == plan.bytes["ratings"]
    for purpose in ("ratings", "factors"):
        assert sizes[1][purpose] > sizes[2][purpose] > sizes[8][purpose]
    row = 64 * 4
    assert sizes[8]["factors"] + sizes[8]["gathered"] >= (1_100_000 + 10**6) * row
    streamed = rank_bytes(plan.changed(streamed="disk", slab=1000), 2)
    assert streamed["ratings"] < sizes[8]["ratings"]
