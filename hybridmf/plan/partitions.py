"""Partitions of ALS over GPUs: the search for the fastest one that fits in their memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..core.objective import SIDES, Side, other_side
from ..core.system import mib
from ..core.validate import check_int
from ..errors import DeviceMemoryError, MemoryBudgetError
from . import machine as machines
from .grid import Grid, RankLayout
from .half_sweep import MOST_PARTS, SLAB_BUFFERS, HalfPlan, batch_entries, fewest_batches, half_bytes, priced, size_text
from .machine import Machine

if TYPE_CHECKING:
    from .types import Place, Plan

MAX_GPUS = 4096  # upper bound on the number of GPUs of a plan
HEADROOM = 0.04  # share of a GPU's memory reserved for allocations outside the plan (cuMF: 500 MB of 12 GB)
HOST_BYTES = 2 * 10**12  # typical memory of a host with several GPUs
NEAR = 1.05  # smallest predicted gain that justifies moving data off the GPUs
MOST_TURNS = 64  # turns to try as long as some number of them fits


@dataclass(frozen=True)
class ScalePlan:
    """A partition of ALS over GPUs, or of one GPU whose factors are elsewhere; ``print(partition)`` shows it.

    Attributes
    ----------
    plan : Plan
        Sizes and kernels.
    machine : Machine
    gpus : int
    memory : int
        Bytes of each GPU that the plan may use.
    halves : dict of side to HalfPlan
    """

    plan: Plan = field(repr=False)
    machine: Machine = field(repr=False)
    gpus: int
    memory: int
    halves: dict[Side, HalfPlan]

    @property
    def ratings(self) -> Place:
        """Location of ratings between half sweeps: "device", "host" or "disk"."""
        return self.halves["user"].ratings

    @property
    def factors(self) -> Place:
        """Location of factors between half sweeps: "device", "host" or "disk"."""
        return self.halves["user"].factors

    @property
    def seconds(self) -> float:
        """Predicted time of an iteration."""
        return sum(half.total for half in self.halves.values())

    @property
    def fullest(self) -> HalfPlan:
        """The half sweep that needs the most memory."""
        return max(self.halves.values(), key=lambda half: half.total_bytes)

    @property
    def bytes_per_gpu(self) -> int:
        """Peak memory of a GPU."""
        return self.fullest.total_bytes

    @property
    def grids(self) -> dict[Side, Grid]:
        """Of each half sweep."""
        return {side: half.grid for side, half in self.halves.items()}

    def slab(self, side: Side) -> int:
        """Entries of a batch of a half sweep, which a rank loads and solves at a time in each wave."""
        return batch_entries(self.plan, side, self.halves[side].batches)

    def slab_rows(self, side: Side) -> int | None:
        """Most rows of a batch, if memory depends on them, that is, if factors do not stay on the GPUs."""
        return None if self.factors == "device" else -(-self.plan.rows(side) // self.halves[side].batches)

    def on(self, gpus: int) -> ScalePlan:
        """The same partition on another number of GPUs: in more waves on fewer, side by side on more (cuMF 4.4).

        Raises
        ------
        TypeError, ValueError
            `gpus` is not an integer or out of range.
        MemoryBudgetError
            Data that stay on the GPUs do not fit on this number of GPUs.
        """
        gpus = check_int("gpus", gpus, 1, MAX_GPUS)
        halves = {}
        for side, half in self.halves.items():
            moved = replace(half, gpus=gpus)
            found = fewest_batches(self.plan, moved, self.machine, self.memory, least=half.batches)
            if found is None:
                needed = sum(half_bytes(self.plan, replace(moved, buffers=1)).values())
                raise MemoryBudgetError(
                    f"{side}s cannot be solved with p = {half.parts} on {gpus} GPUs: each has "
                    f"{size_text(self.memory)} and needs {size_text(needed)}; plan for {gpus} GPUs anew"
                )
            halves[side] = found
        return replace(self, gpus=gpus, halves=halves)

    def check_served(self, gpus: int) -> None:
        """Reject partitions that can be planned, but that fits do not support.

        Raises
        ------
        ValueError
            The number of GPUs differs, or fits do not support the locations or parts.
        """
        if gpus != self.gpus:
            raise ValueError(f"the partition is for {self.gpus} GPUs and the fit has {gpus}; use partition.on({gpus})")
        why = self._not_served()
        if why:
            raise ValueError(f"{why}: let the fit plan for itself, or use plan_scale(..., model_parallel_only=True)")

    def _not_served(self) -> str:
        """Feature of the partition that fits do not support; empty if there is none."""
        if self.factors == "disk" and self.gpus > 1:
            return "a fit on several GPUs keeps factors on them or on the host; the partition has them on disk"
        if self.factors == "host" and self.ratings == "device":
            return "a fit streams ratings where factors are on the host; the partition has them on the GPUs"
        split = [side for side, half in self.halves.items() if half.grid.splits > 1]
        if self.factors != "device" and split:
            return (
                f"a fit keeps factors on the host where each GPU solves its own rows; the partition splits the fixed "
                f"side of {split[0]}s over GPUs, with p = {self.halves[split[0]].parts}"
            )
        return ""

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"machine   {self.gpus} x {self.machine.gpu_name or 'H200'}, {size_text(self.memory)} each to plan with",
            f"problem   {plan.n_users:,} users x {plan.n_items:,} items, {plan.nnz:,} entries, "
            f"{plan.rank} factors of {plan.itemsize} bytes",
            f"places    ratings on {self.ratings}, factors on {self.factors}",
            *(str(half) for half in self.halves.values()),
            f"predicted {self.seconds:.3g} s per iteration",
        ]
        return "\n".join(lines)


def check_rank(scale: ScalePlan, layout: RankLayout, rank: int, entries: Mapping[Side, int]) -> None:
    """Raise DeviceMemoryError before the transfer if the ratings of a rank do not fit on its GPU.

    A plan is made from sizes. Ranges of rows have equal cost, so one rank may have more entries than another; `entries`
    are those on the rank's GPU at a time in each half sweep.
    """
    counts = {side: layout.counts(side, range(rank, rank + 1))[0] for side in SIDES}
    for side, planned in scale.halves.items():
        grid, (first, last) = layout.grids[side], layout.columns(side, rank)
        half = replace(planned, batches=max(planned.batches, grid.groups))
        if planned.turns == 1:
            half = replace(half, parts=grid.splits, split=True)
        share = {"solved": counts[side], "own": sum(counts.values()), "entries": entries[side]}
        sizes = half_bytes(scale.plan, half, fixed=-(-(last - first) // half.turns), **share)
        if sum(sizes.values()) <= scale.memory:
            continue
        way_out = "use fewer factors, or more GPUs"
        if scale.ratings == "device":
            way_out = f"a gpu_memory_limit below {scale.bytes_per_gpu} bytes has ratings streamed; else {way_out}"
        raise DeviceMemoryError(
            f"rank {rank} needs about {mib(sum(sizes.values()))} of its GPU's memory to solve {side}s and "
            f"{mib(scale.memory)} are free ({', '.join(f'{name} {mib(size)}' for name, size in sizes.items())}); the "
            f"plan's {mib(scale.bytes_per_gpu)} are for ranks that all have as many entries: {way_out}"
        )


# -------------------------------------------------------------------------------------------------------- the search


def _turns(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12 ..."""
    turns = 1
    while turns <= most:
        yield turns
        turns = turns // 3 * 4 if turns % 3 == 0 else max(turns + 1, turns * 3 // 2)


def _candidates(
    plan: Plan, side: Side, gpus: int, ratings: Place, factors: Place, model_parallel_only: bool
) -> Iterator[HalfPlan]:
    """Half sweeps with one batch: each number of parts that GPUs hold side by side, and parts that take turns.

    More turns leave room for more rows, so that a fixed side is loaded for fewer batches.
    """
    half = HalfPlan(side, 1, 1, gpus, ratings, factors, split=False)
    most = 1 if factors == "device" else min(plan.rows(other_side(side)), MOST_PARTS)
    for turns in _turns(most):
        yield replace(half, parts=turns)
        if not model_parallel_only and turns > 1:
            yield replace(half, parts=turns * gpus, split=True)
        if not model_parallel_only and turns == 1:
            yield from (replace(half, parts=d, split=True) for d in range(2, gpus + 1) if gpus % d == 0)


def _fastest_half(
    candidates: Iterator[HalfPlan],
    plan: Plan,
    machine: Machine,
    memory: float,
    slab: int | None = None,
    entries: int | None = None,
) -> HalfPlan | None:
    """The half sweep predicted to be fastest of those that fit; `entries` as for `fewest_batches`.

    A batch has at most `slab` entries on each GPU, unless parts take turns and ratings are in memory.
    """
    best: HalfPlan | None = None
    for half in candidates:
        if half.turns > MOST_TURNS and best is not None:
            break
        least = 1
        if slab is not None and (half.turns == 1 or half.ratings != "host"):
            least = -(-plan.nnz // (slab * half.grid.splits))
        found = fewest_batches(plan, half, machine, memory, least, entries)
        if found is not None and (best is None or found.total < best.total):
            best = found
    return best


def plan_scale(
    plan: Plan,
    gpus: int,
    memory: int | None = None,
    machine: Machine | None = None,
    host_bytes: int | None = None,
    *,
    model_parallel_only: bool = False,
) -> ScalePlan:
    """Find the fastest partition that fits in memory; among similar ones, the one that moves the least data.

    Parameters
    ----------
    plan : Plan
        Sizes and kernels: that of a fit on a GPU, or ``hmf.plan(..., gpus=n).plan`` where there is none.
    gpus : int
    memory : int, optional
        Memory of each GPU in bytes. Default: that of the GPU of `plan`.
    machine : Machine, optional
        Default: the constants of this machine, measured or built in.
    host_bytes : int, optional
        Host memory. Default: 2 TB.
    model_parallel_only : bool
        Each GPU solves its own rows, with all parts of the fixed side, as fits with offloaded factors do.

    Raises
    ------
    ValueError
        The plan is for the CPU.
    MemoryBudgetError
        No partition fits; the message gives the memory that would suffice.
    """
    if plan.gpu is None:
        raise ValueError("the plan is for the CPU; take that of a fit on a GPU, or hmf.plan(..., gpus=1).plan")
    machine = machine or machines.machine()
    memory = plan.gpu.memory_bytes if memory is None else memory
    host = HOST_BYTES if host_bytes is None else host_bytes
    found = _fastest(plan, gpus, memory, machine, host, model_parallel_only)
    if found is not None:
        return found
    needed = memory
    while found is None:
        needed *= 2
        found = _fastest(plan, gpus, needed, machine, host, model_parallel_only)
    raise MemoryBudgetError(
        f"{plan.n_users:,} x {plan.n_items:,} with {plan.nnz:,} entries and {plan.rank} factors does "
        f"not fit on {gpus} GPUs of {size_text(memory)} in any partition; it needs "
        f"{size_text(found.bytes_per_gpu)} on each: GPUs of {size_text(needed)} would do, or fewer factors"
    )


def _fastest(
    plan: Plan, gpus: int, memory: int, machine: Machine, host: int, model_parallel_only: bool
) -> ScalePlan | None:
    assert plan.gpu is not None
    usable = int(memory * (1 - HEADROOM))
    plan = plan.changed(gpu=replace(plan.gpu, free_bytes=usable), scale=None, streamed="", slab=0, resident=False)
    loaded, tables = 2 * plan.nnz * (4 + plan.itemsize), 2 * sum(plan.table_bytes)
    plans = []
    factors_on: tuple[Place, Place] = ("device", "host" if tables <= host else "disk")
    beside = tables if tables <= host else 0
    ratings_on: tuple[Place, Place] = ("device", "host" if loaded + beside <= host else "disk")
    for ratings, factors in itertools.product(ratings_on, factors_on):
        if factors == "device" and ratings != "device":
            most, only = max(1, plan.nnz), model_parallel_only
            streamed = plan_streamed_ranks(plan, gpus, usable, ratings, most, machine, model_parallel_only=only)
            plans += [streamed] if streamed is not None else []
            continue
        if model_parallel_only and factors != "device" and (ratings == "device" or (factors == "disk" and gpus > 1)):
            continue  # no fit serves these
        found = {}
        for side in SIDES:
            candidates = _candidates(plan, side, gpus, ratings, factors, model_parallel_only)
            half = _fastest_half(candidates, plan, machine, usable)
            if half is not None:
                found[side] = half
        if len(found) == len(SIDES):
            plans.append(ScalePlan(plan, machine, gpus, usable, found))
    fastest = min((plan.seconds for plan in plans), default=0.0)
    return next((plan for plan in plans if plan.seconds <= NEAR * fastest), None)


def plan_ranks(
    plan: Plan, gpus: int, memory: int, machine: Machine | None = None, *, model_parallel_only: bool = False
) -> ScalePlan:
    """The fastest grids with all data on the GPUs; if none fits, those that need the least memory."""
    machine = machine or machines.machine()
    halves: dict[Side, HalfPlan] = {}
    for side in SIDES:
        candidates = list(_candidates(plan, side, gpus, "device", "device", model_parallel_only))
        found = _fastest_half(iter(candidates), plan, machine, memory)
        if found is None:
            smallest = [replace(half, batches=max(gpus, plan.rows(side))) for half in candidates]
            smallest = [priced(plan, replace(half, bytes=half_bytes(plan, half)), machine) for half in smallest]
            found = min(smallest, key=lambda half: half.total_bytes)
        halves[side] = found
    return ScalePlan(plan, machine, gpus, memory, halves)


def plan_streamed_ranks(
    plan: Plan,
    gpus: int,
    memory: int,
    ratings: Place,
    slab: int,
    machine: Machine | None = None,
    *,
    model_parallel_only: bool = False,
) -> ScalePlan | None:
    """The fastest grids with factors on the GPUs and ratings streamed in at most `slab` entries per GPU at a time.

    Both half sweeps share buffers, sized for the larger slab. None if not even single rows fit.
    """
    machine = machine or machines.machine()
    slab = min(max(slab, *plan.longest), max(1, plan.nnz))  # a row is never cut
    best: ScalePlan | None = None
    while slab:
        halves: dict[Side, HalfPlan] = {}
        for side in SIDES:
            candidates = _candidates(plan, side, gpus, ratings, "device", model_parallel_only)
            half = _fastest_half(candidates, plan, machine, memory, slab, SLAB_BUFFERS * slab)
            if half is not None and _entries_at_a_time(plan, half) <= slab:
                halves[side] = half
        if len(halves) == len(SIDES):
            entries = SLAB_BUFFERS * max(_entries_at_a_time(plan, half) for half in halves.values())
            for side, half in halves.items():
                halves[side] = replace(half, bytes=half_bytes(plan, half, entries=entries))
            found = ScalePlan(plan, machine, gpus, memory, halves)
            if best is not None and best.seconds <= found.seconds:
                break
            best = found
        elif best is not None:
            break
        slab //= 2  # smaller buffers leave room for more systems
    return best


def _entries_at_a_time(plan: Plan, half: HalfPlan) -> int:
    return -(-batch_entries(plan, half.side, half.batches) // half.grid.splits)


def plan_host_ranks(
    plan: Plan,
    gpus: int,
    memory: int,
    ratings: Place,
    slab: int,
    machine: Machine | None = None,
    factors: Place = "host",
) -> ScalePlan | None:
    """Model-parallel plan with factors in host memory or on disk, and ratings in batches of at most `slab` entries.

    If parts of the fixed side take turns for each batch, batches may be larger, except for those of a store. None if
    not even the smallest parts fit.
    """
    machine = machine or machines.machine()
    usable = memory if gpus == 1 else int(memory * (1 - HEADROOM))  # a rank may own more rows than average
    halves: dict[Side, HalfPlan] = {}
    for side in SIDES:
        candidates = _candidates(plan, side, gpus, ratings, factors, model_parallel_only=True)
        half = _fastest_half(candidates, plan, machine, usable, slab)
        if half is None:
            return None
        halves[side] = half
    return ScalePlan(plan, machine, gpus, memory, halves)
