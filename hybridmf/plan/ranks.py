"""How to partition a problem over GPUs, and what an iteration will take: cuMF eq. 8 extended to our memory.

Pure functions of sizes and of a machine's constants: they plan for machines that are not there. A half sweep cuts the
fixed side into p parts and the rows to solve into q (cuMF Algorithm 3). p parts lie on as many GPUs of a group as there
are, else they are loaded one after the other (elasticity, cuMF 4.4); groups take row parts side by side, and each group
its own one after the other, in waves.

A GPU holds, in bytes a cell i and with the rows padded to w cells (cuMF eq. 8 counts ``f`` and ``f^2`` cells instead)

    n/p w i            the part of the fixed side; twice where the next part is loaded meanwhile
    m/q w i            solutions of the row part, twice where they leave for the host meanwhile, and once more where
                       approximate solvers begin with the last ones; or all new rows, where they stay on the GPUs
    nnz/(p q) (4 + i)  entries, as often as they are loaded ahead (a fit: SLAB_BUFFERS); or all of its share, both
                       orientations
    systems            a batch (ours are solved batch by batch), or, where parts take turns, those of the whole row part
                       and as many as are summed before they join those; where they are added up over GPUs, of all rows
    (m + n)/GPUs w i   its share of both sides, where factors stay on the GPUs

Ratings and factors that do not stay on GPUs are in the memory of the host, or on its disks where they have no room
there: factors of both sides, old and new, and then ratings in both orientations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ..core import system
from ..core.objective import SIDES, Side
from ..core.system import mib
from ..core.validate import check_int
from ..errors import DeviceMemoryError, MemoryBudgetError
from . import fused
from .grid import Grid, Layout

HEADROOM = 0.04
"""Share of a GPU's memory left to what nobody counts (cuMF: 500 MB of 12 GB)."""

BATCH_BYTES = 2 << 30
"""Systems in a GPU's memory at a time (`hybridmf.plan.types.GPU_BATCH_BYTES`)."""

SLABS = 8
"""Pieces that data are loaded in, of which nothing runs beside the first one."""

SLAB_BUFFERS = 3
"""Row parts of ratings that a fit has on a GPU at a time: one is worked on, one is there, one is on its way."""

ROW_BYTES = 16
"""Offset, order and status of a row; its scale comes to that."""

PIECE_BYTES = 36
"""A piece of a row that is summed apart: row, first slot, and (slot, begin, end)."""

CHUNK_BYTES = 64 << 20
"""Sums that are made at a time where they join those of other parts of the fixed side."""

NEAR = 1.05
"""What stays on the GPUs is not moved for a prediction that is better by less."""

PIECES = 3
"""Systems in memory for each row of a batch whose sums are added up over GPUs: rows are cut so that no thread is left
with a long one."""

MAX_GPUS = 4096
"""More than any machine has; a bound for plans."""

MOST_PARTS = 1 << 20

MOST_TURNS = 64
"""Turns that are tried where fewer would do: more of them leave room for more rows, but sums are read again in each."""

Place = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Machine:
    """What predictions need to know of GPUs and of what connects them; rates in bytes a second.

    Attributes
    ----------
    name : str
    memory_bytes : int
        Of one GPU.
    copy : float
        Within the memory of a GPU: read and written.
    reduce_scatter : tuple of (GPUs, float)
        Rate at which what other GPUs add up leaves each of so many; between and beyond, that of fewer.
    all_gather : float
        Size of the whole array over the time of the collective, on 4 GPUs.
    host : float
        Pinned host memory to one GPU; all GPUs at once.
    disk : float
        All disks together.
    host_bytes : int
        Host memory.
    latency : float
        Seconds of a collective of no size, with its launch.
    launch : float
        Seconds of a half sweep of no size.
    turn : float
        Seconds that each of several GPUs adds to it: work is launched for one after the other.
    cached_bytes : int
        Factors up to which gathers come from the cache, whose time is in `entry`.
    gather, gather_far : float
        Rate of gathered rows of factors beyond that, and beyond `far_bytes`.
    far_bytes : float
    entry, solve : tuple of (factors, seconds)
        Of summing one entry into a system, and of solving one; float32, Cholesky. Between and beyond the points:
        powers of the rank.
    """

    name: str
    memory_bytes: int
    copy: float
    reduce_scatter: tuple[tuple[int, float], ...]
    all_gather: float
    host: float
    disk: float
    host_bytes: int
    latency: float
    launch: float
    turn: float
    cached_bytes: float
    gather: float
    gather_far: float
    far_bytes: float
    entry: tuple[tuple[int, float], ...]
    solve: tuple[tuple[int, float], ...]

    def entry_seconds(self, rank: int) -> float:
        """Of one entry, factors in the cache."""
        return _on_powers(self.entry, rank)

    def solve_seconds(self, rank: int) -> float:
        """Of one system."""
        return _on_powers(self.solve, rank)

    def reduce_rate(self, gpus: int) -> float:
        """Of `reduce_scatter` for a number of GPUs."""
        return max((count, rate) for count, rate in self.reduce_scatter if count <= max(gpus, 2))[1]

    def row_cost(self, rank: int) -> float:
        """What a row costs beside its entries, in entries."""
        return self.solve_seconds(rank) / self.entry_seconds(rank)

    def gather_seconds(self, table_bytes: float, row_bytes: float) -> float:
        """Of one row of a table of factors, beyond what `entry_seconds` holds."""
        if table_bytes <= self.cached_bytes:
            return 0.0
        return row_bytes / (self.gather if table_bytes <= self.far_bytes else self.gather_far)


def _on_powers(points: tuple[tuple[int, float], ...], rank: int) -> float:
    """Linear between the logarithms of the points, and on from the last two; constant before the first."""
    ranks, seconds = (np.log(np.array(column, dtype=float)) for column in zip(*points, strict=True))
    x = math.log(rank)
    if x <= ranks[-1]:
        return float(np.exp(np.interp(x, ranks, seconds)))
    slope = (seconds[-1] - seconds[-2]) / (ranks[-1] - ranks[-2])
    return float(np.exp(seconds[-1] + slope * (x - ranks[-1])))


H200 = Machine(
    name="H200",
    memory_bytes=141 * 10**9,
    copy=4.24e12,
    # bench/results/scale.jsonl, task reduction: half sweeps less their sums and solves, on 2 and on 4 GPUs
    reduce_scatter=((2, 370e9), (4, 135e9)),
    # NCCL on 4 GPUs linked all to all, arrays of 1 GB; pinned memory
    all_gather=254e9,
    host=55e9,
    # not measured: a few NVMe disks together, and what such machines have
    disk=20e9,
    host_bytes=2 * 10**12,
    latency=60e-6,
    launch=300e-6,
    # bench/results/scale.jsonl: half sweeps on 2 GPUs less half of those on one, divided by two
    turn=0.1e-3,
    cached_bytes=50e6,
    gather=6e12,
    gather_far=3e12,  # not measured: rows of 400 bytes at random from tens of gigabytes
    far_bytes=4e9,
    # bench/results/gpu.jsonl, task als on Netflix's shape: iterations less the solves below and the users' gathers.
    # Rank 16 and below are not measured: half of rank 32, whose products take three times as many blocks.
    entry=((16, 17e-12), (32, 33e-12), (64, 77e-12), (96, 175e-12), (100, 193e-12), (128, 413e-12), (256, 1.5e-9)),
    # bench/results/gpu.jsonl, task cholesky; rank 16 is not measured
    solve=((16, 1.5e-9), (32, 3.65e-9), (64, 13.7e-9), (100, 63e-9), (128, 78e-9), (256, 391e-9), (512, 2.55e-6)),
)


@dataclass(frozen=True)
class Problem:
    """Sizes that a partition depends on.

    Attributes
    ----------
    shape : (n_users, n_items)
    nnz : int
    factors : int
        Rank of the systems.
    itemsize : int
        4 for float32, 8 for float64.
    sums : int
        Bytes of the sums of a row that wait to be added up or solved; 0: those of our kernels.
    segment : int
        Entries above which a row has more than one of them; 0: never.
    biases : bool
        Whether rows of factors have a bias beside them.
    warm_start : bool
        Whether solvers start from the last factors: conjugate gradients and blocks of coordinates.
    on_chip : bool
        Whether rows of one segment are solved where they are summed, if the fixed side is there as a whole.
    batch : int
        Bytes of sums that are made at a time.
    longest : (int, int)
        Entries of the longest user and of the longest item, which no row part can be shorter than; 0: not known.
    """

    shape: tuple[int, int]
    nnz: int
    factors: int
    itemsize: int = 4
    sums: int = 0
    segment: int = 0
    biases: bool = False
    warm_start: bool = False
    on_chip: bool = False
    batch: int = BATCH_BYTES
    longest: tuple[int, int] = (0, 0)

    def rows(self, side: Side) -> int:
        """Rows of a side."""
        return self.shape[0] if side == "user" else self.shape[1]

    def longest_row(self, side: Side) -> int:
        """Entries of the longest row of a side; 0: not known."""
        return self.longest[0] if side == "user" else self.longest[1]

    def part_entries(self, side: Side, batches: int) -> int:
        """Most entries of a row part where there are so many: of whole rows."""
        return max(-(-self.nnz // batches), self.longest_row(side))

    @property
    def row_bytes(self) -> int:
        """Of a row of factors."""
        return system.round_up(self.factors, 16 // self.itemsize) * self.itemsize

    @property
    def entry_bytes(self) -> int:
        """Of an entry in one orientation."""
        return 4 + self.itemsize

    @property
    def system_bytes(self) -> int:
        """Of the sums of a row that wait to be added up or solved."""
        if self.sums:
            return self.sums
        if self.factors <= fused.MAX_RANK and self.itemsize == 4:
            return 4 * fused.FusedConfig.rule(self.factors).partial_floats
        return (self.factors + 1) * self.factors * self.itemsize


@dataclass(frozen=True)
class HalfPlan:
    """One half sweep.

    Attributes
    ----------
    side : {"user", "item"}
        Solved.
    parts : int
        p: parts of the fixed side.
    batches : int
        q: parts of the rows to solve.
    gpus : int
    buffers : int
        Parts of the fixed side in memory where they take turns: 2, or 1 if there is no room to load one meanwhile.
    loads : int
        Row parts of ratings in memory at a time where they are streamed.
    splits : int
        GPUs that hold different parts at a time; 0: as many as there are parts and GPUs for.
    resident : bool
        Factors stay on the GPUs: one that has several parts has them side by side, as one.
    bytes : dict of str to int
        Memory of one GPU by purpose.
    seconds : dict of str to float
        By purpose; they do not add up: loading overlaps with work, and each half sweep has time of its own.
    total : float
        Seconds of the half sweep.
    """

    side: Side
    parts: int
    batches: int
    gpus: int
    buffers: int = 2
    loads: int = 2
    splits: int = 0
    resident: bool = False
    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    total: float = 0.0

    @property
    def grid(self) -> Grid:
        """GPUs that hold different parts at a time, and groups of them."""
        splits = self.splits or next(d for d in range(min(self.gpus, self.parts), 0, -1) if self.gpus % d == 0)
        return Grid(splits, self.gpus // splits)

    @property
    def turns(self) -> int:
        """Parts of the fixed side that a GPU loads one after the other; 1: it stays."""
        return 1 if self.resident else -(-self.parts // self.grid.splits)

    @property
    def waves(self) -> int:
        """Row parts that a group of GPUs solves one after the other."""
        return -(-self.batches // self.grid.groups)

    @property
    def fixed(self) -> str:
        """Where the fixed side is: "replicated", "split" or "streamed"."""
        return "streamed" if self.turns > 1 else "split" if self.grid.splits > 1 else "replicated"

    def __str__(self) -> str:
        grid = self.grid
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.seconds.items() if seconds)
        turns = f" in {self.turns} turns" if self.turns > 1 else ""
        return (
            f"{self.side + 's':<9} p = {self.parts}, q = {self.batches}: fixed side {self.fixed}{turns}, "
            f"{grid.splits} x {grid.groups} GPUs, {self.waves} wave{'s' if self.waves > 1 else ''}; "
            f"{_size(sum(self.bytes.values()))} a GPU "
            f"({', '.join(f'{name} {_size(size)}' for name, size in self.bytes.items() if size)}); "
            f"{self.total:.3g} s ({parts})"
        )


@dataclass(frozen=True)
class ScalePlan:
    """A partition of a problem over GPUs, and its predicted time; ``print(plan)`` shows it.

    Attributes
    ----------
    problem : Problem
    machine : Machine
    gpus : int
    memory : int
        Bytes of each GPU that the plan may use.
    ratings, factors : {"device", "host", "disk"}
        Where they are between half sweeps.
    halves : dict of side to HalfPlan
    """

    problem: Problem
    machine: Machine
    gpus: int
    memory: int
    ratings: Place
    factors: Place
    halves: dict[Side, HalfPlan]

    @property
    def seconds(self) -> float:
        """Predicted time of an iteration."""
        return sum(half.total for half in self.halves.values())

    @property
    def bytes_per_gpu(self) -> int:
        """Peak memory of a GPU."""
        return max(sum(half.bytes.values()) for half in self.halves.values())

    @property
    def grids(self) -> dict[Side, Grid]:
        """Of each half sweep."""
        return {side: half.grid for side, half in self.halves.items()}

    def slab(self, side: Side) -> int:
        """Entries of a row part of a half sweep: what a rank of a fit loads and solves at a time, in each wave."""
        return self.problem.part_entries(side, self.halves[side].batches)

    def slab_rows(self, side: Side) -> int | None:
        """Most rows of such a row part, where memory depends on them: where factors do not stay on the GPUs."""
        if self.factors == "device":
            return None
        return -(-self.problem.rows(side) // self.halves[side].batches)

    def on(self, gpus: int) -> ScalePlan:
        """The same partition on another number of GPUs: in more waves on fewer, side by side on more (cuMF 4.4).

        Raises
        ------
        TypeError, ValueError
            No number of GPUs, none at all, or more than any machine has.
        MemoryBudgetError
            What stays on the GPUs does not fit on so few.
        """
        gpus = check_int("gpus", gpus, 1, MAX_GPUS)
        halves = {}
        for side, half in self.halves.items():
            moved = replace(half, gpus=gpus)
            found = fewest_batches(
                self.problem, self.machine, moved, self.ratings, self.factors, self.memory, least=half.batches
            )
            if found is None:
                sizes = half_bytes(self.problem, replace(moved, buffers=1), self.ratings, self.factors)
                raise MemoryBudgetError(
                    f"{side}s cannot be solved with p = {half.parts} on {gpus} GPUs: each has "
                    f"{_size(self.memory)} and needs {_size(sum(sizes.values()))}; plan for {gpus} GPUs anew"
                )
            halves[side] = found
        return replace(self, gpus=gpus, halves=halves)

    def check_served(self, gpus: int) -> None:
        """Refuse what can be planned, but not fitted.

        Raises
        ------
        ValueError
            Another number of GPUs; places or parts that fits do not work with.
        """
        if gpus != self.gpus:
            raise ValueError(f"the partition is for {self.gpus} GPUs and the fit has {gpus}; use partition.on({gpus})")
        why = self._not_served()
        if why:
            raise ValueError(f"{why}: let the fit plan for itself, or use plan_scale(..., model_parallel_only=True)")

    def _not_served(self) -> str:
        """What of the partition fits do not work with; empty if nothing."""
        turning = [side for side, half in self.halves.items() if half.turns > 1]
        split = [side for side, half in self.halves.items() if half.grid.splits > 1]
        if self.factors == "disk" and self.gpus > 1:
            return "a fit on several GPUs keeps factors on them or on the host; the partition has them on disk"
        if self.factors == "host" and self.ratings == "device":
            return "a fit streams ratings where factors are on the host; the partition has them on the GPUs"
        if self.factors == "device" and turning:
            return (
                "parts of a fixed side take turns where factors are on the host; the partition has the fixed side of "
                f"{turning[0]}s in turns, and factors on the GPUs"
            )
        if self.factors != "device" and split:
            return (
                f"a fit keeps factors on the host where each GPU solves its own rows; the partition splits the fixed "
                f"side of {split[0]}s over GPUs, with p = {self.halves[split[0]].parts}"
            )
        return ""

    def __str__(self) -> str:
        problem = self.problem
        lines = [
            f"machine   {self.gpus} x {self.machine.name}, {_size(self.memory)} each to plan with",
            f"problem   {problem.shape[0]:,} users x {problem.shape[1]:,} items, {problem.nnz:,} entries, "
            f"{problem.factors} factors of {problem.itemsize} bytes",
            f"places    ratings on {self.ratings}, factors on {self.factors}",
            *(str(half) for half in self.halves.values()),
            f"predicted {self.seconds:.3g} s per iteration",
        ]
        return "\n".join(lines)


def _size(size: float) -> str:
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if size >= 10**power:
            return f"{size / 10**power:,.3g} {unit}"
    return f"{size / 1000:,.3g} kB"


def judged(
    problem: Problem,
    half: HalfPlan,
    ratings: Place = "device",
    factors: Place = "device",
    machine: Machine = H200,
) -> HalfPlan:
    """A half sweep with its memory and time."""
    half = replace(half, bytes=half_bytes(problem, half, ratings, factors))
    seconds = half_seconds(problem, machine, half, ratings, factors)
    return replace(half, seconds=seconds, total=_total(half, seconds, machine))


@dataclass(frozen=True)
class Share:
    """What one GPU has of a half sweep, in rows and entries.

    Attributes
    ----------
    fixed : int
        Rows of its part of the fixed side.
    solved : int
        Rows that it solves.
    own : int
        Rows of both sides that it owns.
    entries : int
        On it at a time: of both orientations where ratings stay there.
    """

    fixed: int
    solved: int
    own: int
    entries: int

    @classmethod
    def mean(cls, problem: Problem, half: HalfPlan, ratings: Place) -> Share:
        """Of GPUs that all have the same."""
        rows, fixed = problem.rows(half.side), sum(problem.shape) - problem.rows(half.side)
        # a fit that takes turns has the entries of all parts meanwhile, and one of parts side by side those of its own
        at_a_time = half.grid.splits if half.resident else half.splits or half.parts
        entries = half.loads * -(-problem.part_entries(half.side, half.batches) // at_a_time)
        if ratings == "device":
            entries = 2 * -(-problem.nnz // half.gpus)
        parts = half.grid.splits if half.resident else half.parts
        return cls(-(-fixed // parts), -(-rows // half.gpus), -(-(rows + fixed) // half.gpus), entries)


def slots(problem: Problem, half: HalfPlan) -> int:
    """Sums of a row part that go through memory: one for each row, and more for rows longer than a segment."""
    rows, entries = -(-problem.rows(half.side) // half.batches), problem.part_entries(half.side, half.batches)
    cuts = entries // problem.segment if problem.segment else 0
    return 2 * cuts + 1 if problem.on_chip and half.fixed == "replicated" else rows + cuts


def slots_at_once(problem: Problem, half: HalfPlan) -> int:
    """Of these, as many as are made at a time."""
    most = min(CHUNK_BYTES, problem.batch) if half.turns > 1 else problem.batch
    least = 1
    if half.fixed == "split":  # of a row of each GPU twice, and as they are added up
        least = 2 * (PIECES * half.grid.splits + 1)
    elif problem.segment and half.turns == 1:
        # a row's pieces are solved together, where parts do not take turns they are summed together, too
        least = max(1, -(-problem.longest_row(half.side) // problem.segment))
    return max(least, min(slots(problem, half), most // problem.system_bytes))


def half_bytes(
    problem: Problem, half: HalfPlan, ratings: Place, factors: Place, share: Share | None = None
) -> dict[str, int]:
    """Memory of one GPU in a half sweep, by purpose; see the module. `share`: what it has, if not the mean."""
    share = share or Share.mean(problem, half, ratings)
    grid, width, on_device = half.grid, problem.row_bytes, factors == "device"
    if problem.biases and not on_device:  # and what ratings owe to the fixed side's
        width += 2 * problem.itemsize
    batch = -(-problem.rows(half.side) // half.batches)
    solved = batch * width
    if on_device:  # the new rows of a GPU beside the old ones, until the half sweep is complete
        solved = share.solved * width
    at_once = slots_at_once(problem, half)
    systems = at_once * problem.system_bytes
    pieces = 0 if on_device else slots(problem, half) * PIECE_BYTES
    if on_device and half.fixed == "split":  # all rows of a group are cut once
        pieces = -(-problem.rows(half.side) // grid.groups) * PIECE_BYTES
    if half.turns > 1:
        systems += slots(problem, half) * problem.system_bytes
        pieces += at_once * PIECE_BYTES
    own_is_part = on_device and grid.groups == 1 and half.turns == 1
    return {
        "fixed side": 0 if own_is_part else share.fixed * width * (half.buffers if half.turns > 1 else 1),
        "solutions": solved * (1 if on_device else 3 if problem.warm_start else 2),
        "factors": share.own * width if on_device else 0,
        "ratings": share.entries * problem.entry_bytes,
        "rows": share.own * (ROW_BYTES + problem.itemsize) + pieces,
        "systems": systems,
    }


def check_rank(plan: ScalePlan, layout: Layout, rank: int, entries: int) -> None:
    """Refuse what a rank has of the ratings where its GPU has no room for it, before anything is brought there.

    A plan is made from sizes; ranges of rows are even in cost, so that one rank may have more entries than another.

    Parameters
    ----------
    plan : ScalePlan
    layout : Layout
    rank : int
    entries : int
        On the rank's GPU at a time.

    Raises
    ------
    DeviceMemoryError
    """
    counts = {side: layout.counts(side, range(rank, rank + 1))[0] for side in SIDES}
    for side, planned in plan.halves.items():
        grid, (first, last) = layout.grids[side], layout.columns(side, rank)
        half = replace(planned, batches=max(planned.batches, grid.groups))
        if planned.turns == 1:
            half = replace(half, parts=grid.splits, splits=grid.splits)
        share = Share(-(-(last - first) // half.turns), counts[side], sum(counts.values()), entries)
        sizes = half_bytes(plan.problem, half, plan.ratings, plan.factors, share)
        if sum(sizes.values()) <= plan.memory:
            continue
        way_out = "use fewer factors, or more GPUs"
        if plan.ratings == "device":
            way_out = f"a gpu_memory_limit below {plan.bytes_per_gpu} bytes has ratings streamed; else {way_out}"
        raise DeviceMemoryError(
            f"rank {rank} needs about {mib(sum(sizes.values()))} of its GPU's memory to solve {side}s and "
            f"{mib(plan.memory)} are free ({', '.join(f'{name} {mib(size)}' for name, size in sizes.items())}); the "
            f"plan's {mib(plan.bytes_per_gpu)} are for ranks that all have as many entries: {way_out}"
        )


def half_seconds(
    problem: Problem, machine: Machine, half: HalfPlan, ratings: Place, factors: Place
) -> dict[str, float]:
    """Seconds of a half sweep by purpose."""
    rows, fixed = problem.rows(half.side), sum(problem.shape) - problem.rows(half.side)
    gpus, grid, width = half.gpus, half.grid, problem.row_bytes
    table = fixed / (grid.splits if half.resident else half.parts) * width
    entry = machine.entry_seconds(problem.factors) + machine.gather_seconds(table, width)
    if problem.itemsize == 8:
        entry *= 4  # not measured: no tensor cores, twice the bytes
    seconds = {
        "assembly": problem.nnz / gpus * entry,
        "solve": rows / gpus * machine.solve_seconds(problem.factors) * (2 if problem.itemsize == 8 else 1),
    }
    if factors == "device" and grid.groups > 1:
        crossing = table * (grid.groups - 1) / grid.groups
        seconds["all-gather"] = half.turns * (crossing / (0.75 * machine.all_gather) + machine.latency)
    if grid.splits > 1:
        sums = rows / grid.groups * problem.system_bytes * half.turns
        crossing = sums * (grid.splits - 1) / grid.splits
        batches = max(4.0, sums / BATCH_BYTES, half.waves)
        seconds["reduce-scatter"] = crossing / machine.reduce_rate(grid.splits) + batches * machine.latency
    if half.turns > 1:  # sums of a row part are read and written again in each turn
        again = 2 * half.turns * rows / grid.groups * problem.system_bytes
        seconds["turns"] = again / machine.copy + half.turns * half.waves * machine.launch
    elif factors != "device":
        seconds["waves"] = half.waves * machine.launch
    load, loads = 0.0, half.waves if half.turns > 1 else 1  # parts in turns come again for each wave of rows
    if factors != "device":
        load += loads * half.turns * table + rows / gpus * width
    if ratings != "device":
        load += problem.nnz / gpus * problem.entry_bytes
    if load:
        seconds["from host"] = load / machine.host
    read = problem.nnz * problem.entry_bytes if ratings == "disk" else 0.0
    if factors == "disk":  # which all GPUs share
        read += gpus * loads * half.turns * table + rows * width
    if read:
        seconds["from disk"] = read / machine.disk
    return seconds


def _total(half: HalfPlan, seconds: dict[str, float], machine: Machine) -> float:
    """What overlaps counts once: data are loaded while the last ones are used.

    Sums are sent on a stream beside the one that makes the next ones, but the kernels that make them fill the GPU until
    they end: on H200s both took as long as one after the other.
    """
    work = sum(seconds.get(name, 0.0) for name in ("assembly", "solve", "turns", "waves", "reduce-scatter"))
    loading = max(seconds.get("from host", 0.0), seconds.get("from disk", 0.0))
    if half.turns > 1 and half.buffers == 1:
        work += loading
    else:
        work = max(work, loading) + min(work, loading) / SLABS
    return work + seconds.get("all-gather", 0.0) + machine.launch + (half.gpus * machine.turn if half.gpus > 1 else 0.0)


# ------------------------------------------------------------------------------------------------------------ choosing


def fewest_batches(
    problem: Problem,
    machine: Machine,
    half: HalfPlan,
    ratings: Place,
    factors: Place,
    memory: float,
    least: int = 1,
) -> HalfPlan | None:
    """The half sweep with the smallest q that fits, as cuMF 4.3 wants it; None if none does.

    q grows by doubling from the number of groups, or from `least` in whole multiples of it. Parts that take turns are
    loaded while the one before is used, if both fit.
    """
    rows, groups = problem.rows(half.side), half.grid.groups
    for buffers in (2, 1) if half.turns > 1 else (2,):
        batches = -(-least // groups) * groups
        while True:
            candidate = replace(half, batches=batches, buffers=buffers)
            if sum(half_bytes(problem, candidate, ratings, factors).values()) <= memory:
                return judged(problem, candidate, ratings, factors, machine)
            if batches >= rows or batches > MOST_PARTS:
                break
            batches *= 2
    return None


def _turns(gpus: int, fixed: int) -> Iterator[list[int]]:
    """Candidates for p by the number of turns: divisors of the number of GPUs stay there; beyond, turns of all GPUs."""
    yield [d for d in range(1, gpus + 1) if gpus % d == 0]
    parts = 2 * gpus
    while parts <= min(fixed, MOST_PARTS):
        yield [parts]
        parts *= 2


def _best_half(
    problem: Problem, machine: Machine, gpus: int, side: Side, ratings: Place, factors: Place, memory: float
) -> HalfPlan | None:
    """The fastest of those with the fewest turns: what stays on a GPU need not come again (cuMF 4.3)."""
    resident = factors == "device"
    loads = SLAB_BUFFERS if resident else 2
    for candidates in _turns(gpus, 0 if resident else sum(problem.shape) - problem.rows(side)):
        halves = [
            fewest_batches(
                problem,
                machine,
                HalfPlan(side, parts, 1, gpus, loads=loads, resident=resident),
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
    """The fastest of those that fits serve in which each GPU solves its own rows."""
    if factors == "device":
        half = HalfPlan(side, 1, 1, gpus, loads=SLAB_BUFFERS, splits=1, resident=True)
        return fewest_batches(problem, machine, half, ratings, factors, memory)
    if ratings == "device" or (factors == "disk" and gpus > 1):
        return None
    return _fastest_turns(problem, machine, gpus, side, ratings, factors, memory, 1)


def plan_scale(
    problem: Problem,
    gpus: int,
    memory: int | None = None,
    machine: Machine = H200,
    host_bytes: int | None = None,
    *,
    model_parallel_only: bool = False,
) -> ScalePlan:
    """The fastest partition that fits; of those that are near, the one that moves least.

    Parameters
    ----------
    problem : Problem
    gpus : int
    memory : int, optional
        Bytes of each GPU. Default: the machine's.
    machine : Machine
    host_bytes : int, optional
        Host memory. Default: the machine's.
    model_parallel_only : bool
        Each GPU solves its own rows, with all parts of the fixed side: what fits do where factors are not on the GPUs.

    Raises
    ------
    MemoryBudgetError
        No partition fits; says what would.
    """
    memory = machine.memory_bytes if memory is None else memory
    host = machine.host_bytes if host_bytes is None else host_bytes
    best = _best_served if model_parallel_only else _best_half
    plan = _fastest(problem, gpus, memory, machine, host, best)
    if plan is not None:
        return plan
    needed = memory
    while (found := _fastest(problem, gpus, needed, machine, host, best)) is None:
        needed *= 2
    raise MemoryBudgetError(
        f"{problem.shape[0]:,} x {problem.shape[1]:,} with {problem.nnz:,} entries and {problem.factors} factors does "
        f"not fit on {gpus} GPUs of {_size(memory)} in any partition; it needs {_size(found.bytes_per_gpu)} on each: "
        f"GPUs of {_size(needed)} would do, or fewer factors"
    )


def _fastest(
    problem: Problem, gpus: int, memory: int, machine: Machine, host: int, best: Callable[..., HalfPlan | None]
) -> ScalePlan | None:
    usable = int(memory * (1 - HEADROOM))
    loaded, tables = 2 * problem.nnz * problem.entry_bytes, 2 * sum(problem.shape) * problem.row_bytes
    plans = []
    factors_on: tuple[Place, Place] = ("device", "host" if tables <= host else "disk")
    beside = tables if tables <= host else 0
    ratings_on: tuple[Place, Place] = ("device", "host" if loaded + beside <= host else "disk")
    for ratings, factors in itertools.product(ratings_on, factors_on):
        found = {side: best(problem, machine, gpus, side, ratings, factors, usable) for side in SIDES}
        halves = {side: half for side, half in found.items() if half is not None}
        if len(halves) == len(SIDES):
            plans.append(ScalePlan(problem, machine, gpus, usable, ratings, factors, halves))
    fastest = min((plan.seconds for plan in plans), default=0.0)
    return next((plan for plan in plans if plan.seconds <= NEAR * fastest), None)


def plan_ranks(
    problem: Problem, gpus: int, memory: int, machine: Machine = H200, *, model_parallel_only: bool = False
) -> ScalePlan:
    """The fastest grids with everything on the GPUs; if none fits, those that need least memory."""
    halves: dict[Side, HalfPlan] = {}
    for side in SIDES:
        grids = [Grid(1, gpus)] if model_parallel_only else Grid.all_of(gpus)
        halves_of = [HalfPlan(side, grid.splits, grid.groups, gpus, resident=True) for grid in grids]
        found = [judged(problem, half, machine=machine) for half in halves_of]
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
    machine: Machine = H200,
    *,
    model_parallel_only: bool = False,
) -> ScalePlan | None:
    """The fastest grids with factors on the GPUs and ratings of which each GPU loads at most `slab` entries at a time.

    Both half sweeps have the same buffers, for as many entries as either of them loads.

    None if not even row parts of a row fit.
    """
    before = math.inf
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
    """The fastest grid of each half sweep, with buffers of its own."""
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
    machine: Machine = H200,
    factors: Place = "host",
) -> ScalePlan | None:
    """Model parallel with factors on the host or its disk, and ratings in row parts of at most `slab` entries.

    Where parts of the fixed side take turns for each row part, row parts may be larger, unless they are a store's.

    None if not even the smallest parts fit.
    """
    least = -(-problem.nnz // slab)
    usable = memory if gpus == 1 else int(memory * (1 - HEADROOM))  # a rank may own more rows than the mean
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
    """The half sweep whose number of turns is predicted to be fastest: more of them leave room for more rows.

    `least`: row parts that there have to be, if not parts take turns and ratings are in memory.
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


def as_record(plan: ScalePlan) -> dict[str, Any]:
    """What a plan says, as JSON values."""
    return {
        "shape": list(plan.problem.shape),
        "nnz": plan.problem.nnz,
        "factors": plan.problem.factors,
        "gpus": plan.gpus,
        "machine": plan.machine.name,
        "ratings": plan.ratings,
        "factors_on": plan.factors,
        "seconds": plan.seconds,
        "bytes_per_gpu": plan.bytes_per_gpu,
        "halves": {
            side: {
                "p": half.parts,
                "q": half.batches,
                "fixed": half.fixed,
                "grid": [half.grid.splits, half.grid.groups],
                "waves": half.waves,
                "turns": half.turns,
                "seconds": half.seconds,
                "total": half.total,
            }
            for side, half in plan.halves.items()
        },
    }
