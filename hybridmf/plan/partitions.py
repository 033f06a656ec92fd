"""The search for the fastest partition of ALS over GPUs that fits in their memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from ..core.objective import SIDES, Side
from ..errors import MemoryBudgetError
from . import machine as machines
from .grid import Grid
from .half_sweep import (
    MOST_PARTS,
    SLAB_BUFFERS,
    HalfPlan,
    Place,
    Problem,
    Share,
    fewest_batches,
    half_bytes,
    priced,
    size_text,
)
from .machine import Machine
from .ranks import ScalePlan

HEADROOM = 0.04
"""Share of a GPU's memory reserved for allocations outside the plan (cuMF: 500 MB of 12 GB)."""

GPU_BYTES, HOST_BYTES = 141 * 10**9, 2 * 10**12
"""Memory of an H200, and typical memory of a host with several of them."""

NEAR = 1.05
"""Smallest predicted gain that justifies moving data off the GPUs."""

MOST_TURNS = 64
"""Additional numbers of turns to try: more turns leave room for more rows, but each turn reads the sums again."""


def _turns(gpus: int, fixed: int) -> Iterator[list[int]]:
    """Candidates for p by number of turns: divisors of the number of GPUs (no turns), then multiples of it."""
    yield [d for d in range(1, gpus + 1) if gpus % d == 0]
    parts = 2 * gpus
    while parts <= min(fixed, MOST_PARTS):
        yield [parts]
        parts *= 2


def _best_half(
    problem: Problem, machine: Machine, gpus: int, side: Side, ratings: Place, factors: Place, memory: float
) -> HalfPlan | None:
    """The fastest half sweep with the fewest turns, since parts that stay on a GPU are not loaded again (cuMF 4.3)."""
    resident = factors == "device"
    for candidates in _turns(gpus, 0 if resident else sum(problem.shape) - problem.rows(side)):
        halves = [
            fewest_batches(
                problem,
                machine,
                HalfPlan(side, parts, 1, gpus, resident=resident),
                ratings,
                factors,
                memory,
            )
            for parts in candidates
        ]
        if any(half is not None for half in halves):
            return min((half for half in halves if half is not None), key=lambda half: half.total)
    return None


def _best_served(
    problem: Problem, machine: Machine, gpus: int, side: Side, ratings: Place, factors: Place, memory: float
) -> HalfPlan | None:
    """The fastest half sweep supported by fits in which each GPU solves its own rows."""
    if factors == "device":
        return fewest_batches(
            problem, machine, HalfPlan(side, 1, 1, gpus, splits=1, resident=True), ratings, factors, memory
        )
    if ratings == "device" or (factors == "disk" and gpus > 1):
        return None
    return _fastest_turns(problem, machine, gpus, side, ratings, factors, memory, 1)


def plan_scale(
    problem: Problem,
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
    problem : Problem
    gpus : int
    memory : int, optional
        Memory of each GPU in bytes. Default: 141 GB.
    machine : Machine, optional
        Default: the constants of this machine, measured or built in.
    host_bytes : int, optional
        Host memory. Default: 2 TB.
    model_parallel_only : bool
        Each GPU solves its own rows, with all parts of the fixed side, as fits with offloaded factors do.

    Raises
    ------
    MemoryBudgetError
        No partition fits; the message gives the memory that would suffice.
    """
    machine = machine or machines.machine()
    memory = GPU_BYTES if memory is None else memory
    host = HOST_BYTES if host_bytes is None else host_bytes
    plan = _fastest(problem, gpus, memory, machine, host, model_parallel_only)
    if plan is not None:
        return plan
    needed = memory
    while (found := _fastest(problem, gpus, needed, machine, host, model_parallel_only)) is None:
        needed *= 2
    raise MemoryBudgetError(
        f"{problem.shape[0]:,} x {problem.shape[1]:,} with {problem.nnz:,} entries and {problem.factors} factors does "
        f"not fit on {gpus} GPUs of {size_text(memory)} in any partition; it needs "
        f"{size_text(found.bytes_per_gpu)} on each: GPUs of {size_text(needed)} would do, or fewer factors"
    )


def _fastest(
    problem: Problem, gpus: int, memory: int, machine: Machine, host: int, model_parallel_only: bool
) -> ScalePlan | None:
    usable = int(memory * (1 - HEADROOM))
    loaded, tables = 2 * problem.nnz * problem.entry_bytes, 2 * sum(problem.shape) * problem.row_bytes
    plans = []
    factors_on: tuple[Place, Place] = ("device", "host" if tables <= host else "disk")
    beside = tables if tables <= host else 0
    ratings_on: tuple[Place, Place] = ("device", "host" if loaded + beside <= host else "disk")
    best = _best_served if model_parallel_only else _best_half
    for ratings, factors in itertools.product(ratings_on, factors_on):
        if factors == "device" and ratings != "device":
            most, one = max(1, problem.nnz), model_parallel_only
            streamed = plan_streamed_ranks(problem, gpus, usable, ratings, most, machine, model_parallel_only=one)
            plans += [streamed] if streamed is not None else []
            continue
        found = {side: best(problem, machine, gpus, side, ratings, factors, usable) for side in SIDES}
        halves = {side: half for side, half in found.items() if half is not None}
        if len(halves) == len(SIDES):
            plans.append(ScalePlan(problem, machine, gpus, usable, ratings, factors, halves))
    fastest = min((plan.seconds for plan in plans), default=0.0)
    return next((plan for plan in plans if plan.seconds <= NEAR * fastest), None)


def plan_ranks(
    problem: Problem, gpus: int, memory: int, machine: Machine | None = None, *, model_parallel_only: bool = False
) -> ScalePlan:
    """The fastest grids with all data on the GPUs; if none fits, those that need the least memory."""
    machine = machine or machines.machine()
    halves: dict[Side, HalfPlan] = {}
    for side in SIDES:
        grids = [Grid(1, gpus)] if model_parallel_only else Grid.all_of(gpus)
        halves_of = [HalfPlan(side, grid.splits, grid.groups, gpus, resident=True) for grid in grids]
        found = [priced(problem, half, machine=machine) for half in halves_of]
        fits = [half for half in found if sum(half.bytes.values()) <= memory]
        halves[side] = (
            min(fits, key=lambda half: half.total) if fits else min(found, key=lambda half: sum(half.bytes.values()))
        )
    return ScalePlan(problem, machine, gpus, memory, "device", "device", halves)


def plan_streamed_ranks(
    problem: Problem,
    gpus: int,
    memory: int,
    ratings: Place,
    slab: int,
    machine: Machine | None = None,
    *,
    model_parallel_only: bool = False,
) -> ScalePlan | None:
    """The fastest grids with factors on the GPUs and ratings streamed in at most `slab` entries per GPU at a time.

    Both half sweeps share buffers, sized for the larger slab.

    None if not even single rows fit.
    """
    machine, before = machine or machines.machine(), math.inf
    while True:
        halves = _streamed_halves(problem, gpus, memory, ratings, slab, machine, model_parallel_only)
        if halves is None:
            return None
        longest = max(-(-problem.part_entries(side, half.batches) // half.grid.splits) for side, half in halves.items())
        for side, half in halves.items():
            share = replace(Share.mean(problem, half, ratings), entries=half.loads * longest)
            halves[side] = replace(half, bytes=half_bytes(problem, half, ratings, "device", share))
        plan = ScalePlan(problem, machine, gpus, memory, ratings, "device", halves)
        if plan.bytes_per_gpu <= memory:
            return plan
        if longest >= before:  # a row is as long
            return None
        before, slab = longest, max(1, longest // 2)


def _streamed_halves(
    problem: Problem, gpus: int, memory: int, ratings: Place, slab: int, machine: Machine, model_parallel_only: bool
) -> dict[Side, HalfPlan] | None:
    """The fastest grid of each half sweep, with separate buffers."""
    halves: dict[Side, HalfPlan] = {}
    for side in SIDES:
        found = []
        for grid in [Grid(1, gpus)] if model_parallel_only else Grid.all_of(gpus):
            half = HalfPlan(side, grid.splits, 1, gpus, loads=SLAB_BUFFERS, resident=True)
            least = -(-problem.nnz // (slab * grid.splits))
            found.append(fewest_batches(problem, machine, half, ratings, "device", memory, least))
        fits = [half for half in found if half is not None]
        if not fits:
            return None
        halves[side] = min(fits, key=lambda half: half.total)
    return halves


def plan_host_ranks(
    problem: Problem,
    gpus: int,
    memory: int,
    ratings: Place,
    slab: int,
    machine: Machine | None = None,
    factors: Place = "host",
) -> ScalePlan | None:
    """Model-parallel plan with factors in host memory or on disk, and ratings in row parts of at most `slab` entries.

    If parts of the fixed side take turns for each row part, row parts may be larger, except for those of a store.

    None if not even the smallest parts fit.
    """
    machine, least = machine or machines.machine(), -(-problem.nnz // slab)
    usable = memory if gpus == 1 else int(memory * (1 - HEADROOM))  # a rank may own more rows than average
    halves: dict[Side, HalfPlan] = {}
    for side in SIDES:
        found = _fastest_turns(problem, machine, gpus, side, ratings, factors, usable, least)
        if found is None:
            return None
        halves[side] = found
    return ScalePlan(problem, machine, gpus, memory, ratings, factors, halves)


def _fastest_turns(
    problem: Problem,
    machine: Machine,
    gpus: int,
    side: Side,
    ratings: Place,
    factors: Place,
    memory: float,
    least: int,
) -> HalfPlan | None:
    """The half sweep with the number of turns predicted to be fastest: more turns leave room for more rows.

    `least`: minimum number of row parts, unless parts take turns and ratings are in memory.
    """
    best: HalfPlan | None = None
    parts, fixed = 1, sum(problem.shape) - problem.rows(side)
    while parts <= min(fixed, MOST_TURNS) or (best is None and parts <= min(fixed, MOST_PARTS)):
        half = HalfPlan(side, parts, 1, gpus, loads=SLAB_BUFFERS, splits=1)
        fewest = 1 if parts > 1 and ratings == "host" else least
        found = fewest_batches(problem, machine, half, ratings, factors, memory, fewest)
        if found is not None and (best is None or found.total < best.total):
            best = found
        parts = parts // 3 * 4 if parts % 3 == 0 else max(parts + 1, parts * 3 // 2)  # 1, 2, 3, 4, 6, 8, 12 ...
    return best
