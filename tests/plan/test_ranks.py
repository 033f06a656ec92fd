"""The partition planner: pure functions, so laws can be asked of any problem."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.objective import SIDES, other_side
from hybridmf.errors import MemoryBudgetError
from hybridmf.plan import machine as machines
from hybridmf.plan.cost import cost_of
from hybridmf.plan.grid import Grid
from hybridmf.plan.half_sweep import (
    SLAB_BUFFERS,
    HalfPlan,
    fewest_batches,
    half_bytes,
    half_seconds,
    priced,
    slot_bytes,
)  # fmt: skip
from hybridmf.plan.machine import H200, Machine
from hybridmf.plan.partitions import (
    HEADROOM,
    NEAR,
    ScalePlan,
    plan_host_ranks,
    plan_ranks,
    plan_scale,
    plan_streamed_ranks,
)  # fmt: skip
from hybridmf.plan.types import Plan
from support.cost_model import H200 as GPU
from support.cost_model import kernels_of, plan_of

NETFLIX = kernels_of((480_189, 17_770), 99_072_112, 100)
HUGEWIKI = kernels_of((50_082_603, 39_780), 3_100_000_000, 100)
FACEBOOK = kernels_of((1_056_000_000, 48_000_000), 112_000_000_000, 100)

SIZES: dict[str, Any] = {"shape": (480_189, 17_770), "nnz": 99_072_112}

problems = st.builds(
    kernels_of,
    st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)),
    st.integers(1, 10**11),
    st.sampled_from([1, 5, 16, 32, 100, 128, 200, 512]),
    st.sampled_from(["float32", "float64"]),
)
gpu_counts = st.sampled_from([1, 2, 3, 4, 6, 8])
memories = st.integers(10**9, 200 * 10**9)


def feasible(problem: Plan, gpus: int, memory: int) -> ScalePlan:
    try:
        return plan_scale(problem, gpus, memory)
    except MemoryBudgetError:
        assume(False)
        raise


@settings(max_examples=15)
@given(problems, gpu_counts, memories)
def test_plans_fit_and_cover_everything(problem: Plan, gpus: int, memory: int) -> None:
    plan = feasible(problem, gpus, memory)
    assert plan.bytes_per_gpu <= memory * (1 - HEADROOM)
    for side, half in plan.halves.items():
        assert half.grid.size == gpus and half.gpus == gpus
        assert half.parts * -(-(problem.rows(other_side(side))) // half.parts) >= 1
        # every part of the fixed side has its turn, every part of the rows its wave
        assert half.turns * half.grid.splits >= half.parts
        assert half.waves * half.grid.groups >= half.batches
        assert half.total > 0 and all(seconds >= 0 for seconds in half.seconds.values())
    assert plan.seconds == sum(half.total for half in plan.halves.values())


@settings(max_examples=15)
@given(problems, gpu_counts, memories, st.floats(1, 50))
def test_more_memory_is_never_slower(problem: Plan, gpus: int, memory: int, times: float) -> None:
    plan = feasible(problem, gpus, memory)
    more = plan_scale(problem, gpus, int(memory * times))
    assert more.seconds <= plan.seconds * NEAR * 1.0001


@settings(max_examples=15)
@given(
    problems, gpu_counts, memories, st.floats(1, 50), st.sampled_from(["device", "host"]),
    st.sampled_from(["device", "host"]), st.sampled_from(["user", "item"]), st.integers(0, 3),
)  # fmt: skip
def test_more_memory_never_more_batches(
    problem: Plan, gpus: int, memory: int, times: float, ratings: Any, factors: Any, side: Any, turns: int
) -> None:
    half = HalfPlan(side, gpus * 2**turns, 1, gpus, ratings, factors)
    few = fewest_batches(problem, half, H200, memory)
    assume(few is not None)
    assert few is not None
    many = fewest_batches(problem, half, H200, memory * times)
    assert many is not None
    assert (many.buffers, -many.batches) >= (few.buffers, -few.batches)


@pytest.mark.parametrize("longest", [0, 20_000_000])
@pytest.mark.parametrize("memory", [2 * 10**9, 10**10, 4 * 10**10])
def test_both_half_sweeps_have_the_same_buffers(memory: int, longest: int) -> None:
    """As many entries as either of them loads; the ranks of a fit ask for as much."""
    found = 0
    for shape, gpus in itertools.product([(10**7, 5 * 10**7), (10**6, 10**4), (10**5, 5 * 10**7)], [2, 4]):
        problem = kernels_of(shape, 10**9, 64, longest=(longest, longest))
        plan = plan_streamed_ranks(problem, gpus, memory, "host", 16 << 20)
        if plan is None:
            continue
        found += 1
        loaded = [plan.slab(side) / half.grid.splits for side, half in plan.halves.items()]
        for half in plan.halves.values():
            assert half.bytes["ratings"] >= SLAB_BUFFERS * max(loaded) * 8
            assert half.total_bytes <= memory
    assert found


@settings(max_examples=15)
@given(problems, gpu_counts, gpu_counts, memories)
def test_the_same_plan_on_other_gpus(problem: Plan, gpus: int, others: int, memory: int) -> None:
    """Elasticity (cuMF 4.4): the parts stay, the waves change."""
    plan = feasible(problem, gpus, memory)
    try:
        moved = plan.on(others)
    except MemoryBudgetError:
        return
    assert moved.gpus == others and moved.bytes_per_gpu <= plan.memory
    for side, half in moved.halves.items():
        assert half.parts == plan.halves[side].parts and half.grid.size == others
        assert half.batches >= plan.halves[side].batches
        assert half.turns == 1 if plan.factors == "device" else half.turns * half.grid.splits >= half.parts
    if plan.factors == "device":
        moved.check_served(others)
    same = plan.on(gpus)
    assert same.halves == plan.halves


@settings(max_examples=15)
@given(problems, gpu_counts, gpu_counts, memories)
def test_model_parallel_plans_are_supported(problem: Plan, gpus: int, others: int, memory: int) -> None:
    try:
        plan = plan_scale(problem, gpus, memory, model_parallel_only=True)
    except MemoryBudgetError:
        assume(False)
        raise
    assert plan.bytes_per_gpu <= memory * (1 - HEADROOM)
    plan.check_served(gpus)
    for side, half in plan.halves.items():
        assert half.grid == Grid(1, gpus) and half.turns == half.parts
        assert (plan.slab_rows(side) is None) == (plan.factors == "device")
    with contextlib.suppress(MemoryBudgetError):
        moved = plan.on(others)
        if plan.factors != "disk" or others == 1:
            moved.check_served(others)
            return
        with pytest.raises(ValueError, match="keeps factors on them or on the host; the partition has them on disk"):
            moved.check_served(others)


def test_more_turns_where_they_leave_room_for_more_rows() -> None:
    """A wave loads the whole fixed side: few turns with few rows at a time would load it far more often."""
    plan = plan_scale(FACEBOOK, 4, host_bytes=10**13, model_parallel_only=True)
    half = plan.halves["item"]
    assert (plan.ratings, plan.factors) == ("host", "host") and half.turns > 8
    few = fewest_batches(plan.plan, HalfPlan("item", 8, 1, 4, "host", "host", split=False), H200, plan.memory)
    assert few is not None and few.waves > 2 * half.waves and few.total > 2 * half.total


def test_ranks_with_factors_on_the_host() -> None:
    """Row parts are as large as copies want, or where the fixed side takes turns as large as there is room for."""
    plan = plan_host_ranks(HUGEWIKI, 1, 10 * 10**9, "host", 4 << 20)
    assert plan is not None and plan.bytes_per_gpu <= plan.memory
    users, items = plan.halves["user"], plan.halves["item"]
    assert users.turns == 1 and plan.slab("user") <= 4 << 20
    assert items.turns > 1 and plan.slab("item") > 4 << 20
    stored = plan_host_ranks(HUGEWIKI, 1, 10 * 10**9, "disk", 8 << 20)
    assert stored is not None and stored.slab("item") <= 8 << 20
    assert plan_host_ranks(HUGEWIKI, 1, 10**6, "host", 4 << 20) is None


def small(**more: Any) -> Plan:
    """A problem whose systems take 440 bytes, ten of which are computed at a time with factors on the host."""
    plan = kernels_of((1000, 600), 40_000, 10, assembly="sparse_syrk", segment=64, **more)
    assert plan.gpu is not None and slot_bytes(plan) == 440
    return plan.changed(gpu=replace(plan.gpu, free_bytes=8 * 4400))


def test_memory_of_turns_by_hand() -> None:
    problem = small(solver="cg").changed(factors=9)  # and a bias
    turns = half_bytes(problem, HalfPlan("user", 3, 4, 1, "host", "host", split=False))
    rows, slots = 1000 // 4, 1000 // 4 + 10_000 // 64
    assert turns["fixed side"] == 2 * 200 * (12 + 2) * 4
    assert turns["solutions"] == 3 * rows * (12 + 2) * 4
    assert turns["ratings"] == 3 * 10_000 * 8
    assert turns["systems"] == (slots + 10) * 440
    assert turns["rows"] == 1600 * 20 + (slots + 10) * 36
    half = HalfPlan("user", 1, 4, 1, "host", "host")
    whole = half_bytes(problem, half)
    assert whole["fixed side"] == 600 * (12 + 2) * 4 and whole["systems"] == 10 * 440
    on_chip = problem.changed(assembly="fused", solver="cg", gpu=replace(problem.gpu, free_bytes=10**9))  # type: ignore[type-var]
    assert half_bytes(on_chip, half)["systems"] == 313 * slot_bytes(on_chip)


def test_fewer_gpus_take_more_waves() -> None:
    plan = plan_scale(FACEBOOK, 4, host_bytes=10**13)
    fewer = plan.on(2)
    for side in ("user", "item"):
        old, new = plan.halves[side], fewer.halves[side]  # type: ignore[index]
        assert new.waves * new.turns > old.waves * old.turns
    assert fewer.seconds > plan.seconds
    assert plan.on(8).seconds < plan.seconds


@pytest.mark.parametrize("gpus", [0, -1, 10**9, 1.5, "2", None, True])
def test_other_numbers_of_gpus_are_validated(gpus: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"gpus must (satisfy 1 <= gpus <= 4096|be an integer), got"):
        plan_scale(NETFLIX, 4).on(gpus)


def test_data_that_stay_on_the_gpus_may_not_fit_on_fewer() -> None:
    plan = plan_scale(HUGEWIKI, 4, 40 * 10**9)
    assert plan.ratings == "device"
    with pytest.raises(MemoryBudgetError, match=r"cannot be solved with p = .* on 1 GPUs"):
        plan.on(1)


def test_both_half_sweeps_are_charged_the_buffers_that_they_share() -> None:
    """Streamed ratings need buffers for the longer slab of either side, here that of a long item."""
    problem = kernels_of((50_000_000, 100_000), 20_000_000_000, 64, longest=(0, 2_000_000_000))
    plan = plan_scale(problem, 4, 40 * 10**9)
    assert (plan.ratings, plan.factors) == ("host", "device")
    user, item = (plan.halves[side] for side in SIDES)
    assert user.bytes["ratings"] == item.bytes["ratings"] and plan.bytes_per_gpu <= plan.memory


def test_published_sizes() -> None:
    """What anybody would do: replicate items, split users where they are many, stream what does not fit."""
    netflix, hugewiki = plan_scale(NETFLIX, 4), plan_scale(HUGEWIKI, 4)
    for plan in (netflix, hugewiki):
        assert plan.ratings == plan.factors == "device"
        assert plan.halves["user"].fixed == "replicated" and plan.grids["user"] == Grid(1, 4)
    assert hugewiki.halves["item"].fixed == "split" and hugewiki.grids["item"] == Grid(4, 1)
    facebook = plan_scale(FACEBOOK, 4)
    assert facebook.ratings == "disk" and facebook.factors == "host"
    assert plan_scale(FACEBOOK, 4, host_bytes=10**13).ratings == "host"
    assert plan_scale(kernels_of((10**9, 10**9), 10**10, 100), 1).halves["user"].fixed == "streamed"
    # a measured iteration on one GPU: 44.3 ms (bench/results/gpu.jsonl), within 15 %
    assert 0.85 * 0.0443 < plan_scale(NETFLIX, 1).seconds < 1.15 * 0.0443
    assert netflix.seconds < plan_scale(NETFLIX, 1).seconds / 2.5


def test_memory_of_a_half_sweep_by_hand() -> None:
    """cuMF eq. 8 with our rows and systems, p = 2, q = 4 on 2 GPUs that take turns with nothing on them."""
    problem = kernels_of((1000, 600), 40_000, 10, solver="nonnegative")
    sizes = half_bytes(problem, HalfPlan("user", 2, 4, 2, "host", "host"))
    assert sizes["fixed side"] == 300 * 12 * 4
    assert sizes["solutions"] == 3 * 250 * 12 * 4
    assert sizes["ratings"] == 3 * 40_000 // 8 * 8
    assert sizes["systems"] == (250 + 10_000 // problem.segment) * 4 * (256 + 16)
    on_gpus = half_bytes(problem, HalfPlan("user", 2, 1, 2))
    assert on_gpus["fixed side"] == 0 and on_gpus["factors"] == 800 * 12 * 4
    assert on_gpus["ratings"] == 2 * 20_000 * 8
    in_turns = half_bytes(problem, HalfPlan("user", 4, 4, 2, "host", "host"))
    assert in_turns["fixed side"] == 2 * 150 * 12 * 4


def test_time_of_a_half_sweep_by_hand() -> None:
    problem = kernels_of((4_000_000, 1_000_000), 10**9, 64)
    seconds = half_seconds(problem, HalfPlan("user", 4, 1, 4), H200)
    table, sums = 250_000 * 256, 4_000_000 * slot_bytes(problem)
    assert seconds["assembly"] == pytest.approx(10**9 / 4 * 64 * 65 / 7.6e13)
    assert seconds["solve"] == pytest.approx(4_000_000 / 4 * (64**3 / 3 + 2 * 64**2) / 9.5e12)
    assert seconds["reduce-scatter"] == pytest.approx(0.75 * sums / 135e9 + sums / 2**31 * 60e-6)
    assert "all-gather" not in seconds and table > problem.gpu.l2_bytes  # type: ignore[union-attr]
    seconds = half_seconds(problem, HalfPlan("user", 1, 4, 4), H200)
    assert seconds["all-gather"] == pytest.approx(256e6 / 254e9 + 60e-6)
    assert "reduce-scatter" not in seconds


def test_gpus_take_turns_and_sums_wait_for_room() -> None:
    """Threads that launch one after the other; a reduction beside kernels that fill the GPU."""
    problem = kernels_of((1000, 500), 10_000, 64)
    totals = [priced(problem, HalfPlan("user", 1, gpus, gpus), H200).total for gpus in (1, 2, 4)]
    assert totals[0] == pytest.approx(H200.gpu.sweep["als"], rel=0.1)
    assert totals[2] - totals[1] == pytest.approx(2 * H200.links.rank, rel=0.1)
    # launched while the half sweep before runs: that costs nothing where a half sweep takes longer
    whole = priced(NETFLIX, HalfPlan("user", 1, 4, 4), H200)
    assert whole.total == pytest.approx(sum(whole.seconds.values()) + H200.gpu.sweep["als"])
    streamed = priced(NETFLIX, HalfPlan("user", 1, 4, 4, ratings="host"), H200)
    assert streamed.total > max(whole.total, streamed.seconds["from host"]) + 4 * H200.links.rank
    half = priced(NETFLIX, HalfPlan("user", 4, 1, 4), H200)
    assert half.total > half.seconds["assembly"] + half.seconds["solve"] + half.seconds["reduce-scatter"]


def test_one_price_of_one_gpu_and_of_several() -> None:
    """Half of the kernels each, in the dual form, too, beside what ranks add."""
    for model, shape, nnz in (
        (hmf.ExplicitALS(100, biases=False), (480_189, 17_770), 99_072_112),
        (hmf.ImplicitALS(128), (1_019_318, 384_546), 48_400_000),
        (hmf.ImplicitALS(64, solver="cg"), (480_189, 17_770), 99_072_112),
        (hmf.ExplicitALS(100, biases=False, precision="bf16"), (480_189, 17_770), 99_072_112),
    ):
        one, two = (
            plan_of(model.set_params(device=device), GPU, shape=shape, nnz=nnz)
            for device in ("cuda", ["cuda:0", "cuda:1"])
        )
        assert one.dual_sides == two.dual_sides
        for half in two.scale.halves.values():
            alone = priced(one, HalfPlan(half.side, 1, 1, 1), H200)
            assert half.seconds.keys() == alone.seconds.keys() | {"all-gather"}
            for name in ("assembly", "solve", "dual"):
                assert 2 * half.seconds.get(name, 0) == pytest.approx(alone.seconds.get(name, 0))
        assert cost_of(one, H200).iteration < 2 * two.scale.seconds


@pytest.mark.usefixtures("own_cache")
def test_measured_constants_reach_every_partition() -> None:
    """`hybridmf tune-kernels --calibrate` keeps them; all plans read them, also of machines that are not there."""

    def partitions() -> list[ScalePlan]:
        fit = plan_of(hmf.ExplicitALS(100, biases=False, device=["cuda:0", "cuda:1"]), GPU, **SIZES)
        return [plan_scale(HUGEWIKI, 4), fit.scale]

    before = partitions()
    links = replace(H200.links, reduce_scatter=((2, 1e8),))
    slow = Machine(gpu=replace(H200.gpu, solve=((32, 1e9),)), links=links, gpu_name=GPU.name)
    machines.save(slow, {"name": GPU.name})
    after = partitions()
    assert after[0].grids["item"] == Grid(1, 4) != before[0].grids["item"]
    assert str(after[0]).startswith(f"machine   4 x {GPU.name}, ")
    assert after[1].machine == replace(slow, source=after[1].machine.source)
    assert after[1].seconds > 10 * before[1].seconds


@pytest.mark.usefixtures("own_cache")
def test_ranks_cut_rows_by_constants_that_all_machines_have() -> None:
    """Ranks on machines of their own have constants of their own, and must agree on who owns which rows."""
    model = hmf.ExplicitALS(100, biases=False, device=["cuda:0", "cuda:1"])
    before = plan_of(model, GPU, **SIZES).row_cost
    assert before == pytest.approx((100**3 / 3 + 2 * 100**2) / 9.8e12 / (100 * 101 / 7.4e13))
    machines.save(Machine(gpu=replace(H200.gpu, solve=((32, 1e9),)), gpu_name=GPU.name), {"name": GPU.name})
    assert plan_of(model, GPU, **SIZES).row_cost == before


def test_ranks_keep_everything_on_the_gpus() -> None:
    plan = plan_ranks(HUGEWIKI, 4, 140 * 10**9)
    assert plan.grids == {"user": Grid(1, 4), "item": Grid(4, 1)}
    assert plan_ranks(HUGEWIKI, 4, 140 * 10**9, model_parallel_only=True).grids["item"] == Grid(1, 4)
    # nothing fits: what needs least memory, for the check of the memory to refuse by name
    tight = plan_ranks(FACEBOOK, 4, 10**9)
    assert tight.bytes_per_gpu > 10**9 and tight.grids["item"] == Grid(4, 1)


# ------------------------------------------------------------------------------------------------------------ hmf.plan


def test_plan_of_a_machine_that_is_not_there() -> None:
    model = hmf.ExplicitALS(factors=100, biases=False)
    plan = hmf.plan(shape=(1_056_000_000, 48_000_000), nnz=112e9, model=model, gpus=4, gpu_memory="141GB")
    assert (plan.plan.n_users, plan.plan.nnz, plan.gpus) == (1_056_000_000, 112 * 10**9, 4)
    text = str(plan)
    for words in ("4 x H200", "112,000,000,000 entries", "p = ", "q = ", "replicated", "turns", "waves", "predicted"):
        assert words in text
    assert plan.on(2).gpus == 2
    biased = hmf.plan(shape=(100, 50), nnz=500, gpus=2, model=hmf.ExplicitALS(factors=7, biases=True, dtype="float64"))
    assert (biased.plan.rank, biased.plan.itemsize, biased.plan.assembly) == (8, 8, "sparse_syrk")
    more = hmf.plan(shape=(1_056_000_000, 48_000_000), nnz=112e9, factors=100, gpus=4, host_memory="10TB")
    assert more.ratings == "host"


def test_plan_takes_the_models_limit_of_memory() -> None:
    model = hmf.ExplicitALS(biases=False, gpu_memory_limit="20GB")
    sizes: dict[str, Any] = {"shape": (10**6, 10**5), "nnz": 10**8, "gpus": 2}
    assert hmf.plan(model=model, **sizes).memory == hmf.plan(gpu_memory="20GB", **sizes).memory
    assert hmf.plan(model=model, gpu_memory="30GB", **sizes).memory == hmf.plan(gpu_memory="30GB", **sizes).memory


def test_plan_takes_factors() -> None:
    plan = hmf.plan(shape=(100, 50), nnz=500.0, factors=9, model=hmf.ExplicitALS(biases=False, device="cpu"))
    assert plan.factors == 9 and plan.nnz == 500


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"gpus": 0}, "gpus must satisfy"),
        ({"gpus": 2, "gpu_memory": "many"}, "gpu_memory must be a size"),
        ({"gpus": 2, "host_memory": -1}, "host_memory must be a size"),
        ({"gpu_memory": "80GB"}, "give gpus"),
        ({"gpus": 2, "model": hmf.CCD()}, "CCD has no planner"),
        ({"gpus": 2, "nnz": 10.5}, "nnz must be"),
        ({"gpus": 2, "factors": 0}, "factors must satisfy"),
    ],
)
def test_plans_that_make_no_sense(more: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"shape": (100, 50), "nnz": 500} | more
    with pytest.raises((TypeError, ValueError), match=message):
        hmf.plan(**arguments)


def test_a_problem_that_fits_nowhere_names_the_required_memory() -> None:
    with pytest.raises(MemoryBudgetError, match=r"does not fit on 2 GPUs of 1 GB .* GPUs of .* GB would do"):
        hmf.plan(shape=(10**9, 10**9), nnz=10**11, factors=100, gpus=2, gpu_memory="1GB")
