"""Partition of ALS over GPUs: predicted time, the partition on another number of GPUs, and its use by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..core.objective import SIDES, Side
from ..core.system import mib
from ..core.validate import check_int
from ..errors import DeviceMemoryError, MemoryBudgetError
from .grid import Grid, RankLayout
from .half_sweep import HalfPlan, Place, Problem, Share, fewest_batches, half_bytes, size_text
from .machine import Machine

MAX_GPUS = 4096
"""Upper bound on the number of GPUs of a plan."""


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
        Their location between half sweeps.
    halves : dict of side to HalfPlan
    """

    problem: Problem
    machine: Machine = field(repr=False)
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
        """Entries of a row part of a half sweep, which a rank loads and solves at a time in each wave."""
        return self.problem.part_entries(side, self.halves[side].batches)

    def slab_rows(self, side: Side) -> int | None:
        """Most rows of a row part, if memory depends on them, that is, if factors do not stay on the GPUs."""
        if self.factors == "device":
            return None
        return -(-self.problem.rows(side) // self.halves[side].batches)

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
            found = fewest_batches(
                self.problem, self.machine, moved, self.ratings, self.factors, self.memory, least=half.batches
            )
            if found is None:
                sizes = half_bytes(self.problem, replace(moved, buffers=1), self.ratings, self.factors)
                raise MemoryBudgetError(
                    f"{side}s cannot be solved with p = {half.parts} on {gpus} GPUs: each has "
                    f"{size_text(self.memory)} and needs {size_text(sum(sizes.values()))}; plan for {gpus} GPUs anew"
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
        turning = [side for side, half in self.halves.items() if half.fixed_parts > 1]
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
            f"machine   {self.gpus} x {self.machine.gpu_name or 'H200'}, {size_text(self.memory)} each to plan with",
            f"problem   {problem.shape[0]:,} users x {problem.shape[1]:,} items, {problem.nnz:,} entries, "
            f"{problem.factors} factors of {problem.itemsize} bytes",
            f"places    ratings on {self.ratings}, factors on {self.factors}",
            *(str(half) for half in self.halves.values()),
            f"predicted {self.seconds:.3g} s per iteration",
        ]
        return "\n".join(lines)


def check_rank(plan: ScalePlan, layout: RankLayout, rank: int, entries: Mapping[Side, int]) -> None:
    """Raise before the transfer if the ratings of a rank do not fit on its GPU.

    A plan is made from sizes. Ranges of rows have equal cost, so one rank may have more entries than another.

    Parameters
    ----------
    plan : ScalePlan
    layout : RankLayout
    rank : int
    entries : dict of side to int
        Entries on the rank's GPU at a time in each half sweep.

    Raises
    ------
    DeviceMemoryError
    """
    counts = {side: layout.counts(side, range(rank, rank + 1))[0] for side in SIDES}
    for side, planned in plan.halves.items():
        grid, (first, last) = layout.grids[side], layout.columns(side, rank)
        half = replace(planned, batches=max(planned.batches, grid.groups))
        if planned.fixed_parts == 1:
            half = replace(half, parts=grid.splits, splits=grid.splits)
        share = Share(-(-(last - first) // half.fixed_parts), counts[side], sum(counts.values()), entries[side])
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
