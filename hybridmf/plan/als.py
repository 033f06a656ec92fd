"""ALS as a `Method`: devices, plans on the CPU, and cost; `hybridmf.plan.als_gpu` plans it on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..core.objective import SIDES, Objective
from ..device.cuda import DeviceSpec
from ..errors import DeviceError
from . import dispatch, fused
from .als_gpu import GPU_SEGMENT, gpu_plan, gpu_segment, ranks_plan
from .cost import TRANSPOSE_ENTRY, gather_seconds, memory_floor
from .half_sweep import BATCH_BYTES, HalfPlan, priced, slot_bytes
from .machine import H200, CpuRates, Machine, rate_at, seconds_at, solve_flops, system_flops
from .memory import cpu_bytes, system_bytes
from .row_forms import check_row_form, dual_sides, dual_up_to, side_seconds, side_sizes
from .solver import frozen_text
from .types import (
    CPU_ASSEMBLIES,
    GPU_ASSEMBLIES,
    NONNEGATIVE,
    PRECISIONS,
    SOLVERS,
    CpuWork,
    Place,
    Plan,
    Settings,
    instruction_set_notes,
)

TILE_ENTRY = 1.2e-8  # seconds of one core to put an entry into a BALS tile (bench/layouts.py)
NONNEGATIVE_ASSEMBLIES = ("simd", "fused", "sparse_syrk", "mo_als")

NONNEGATIVE_ROW = 3.0
"""Time of a non-negative row after its sums, in Cholesky solutions: 10 to 17 microseconds more than one solution at
f = 64 in float32 (3000 x 1500 synthetic ratings, one core, AVX2)."""

REGIONS = 4.0  # parallel regions of an iteration on the CPU


L2_ACCUMULATORS = 512 * 1024
"""Bytes of a thread's BALS accumulators: half of a 1 MB L2, so that the tile and the gathered rows fit beside them."""

L2_TILE = 128 * 1024  # bytes of factor rows staged by one BALS tile

REORDER_BYTES = 4 << 20
"""Size of the factors of both sides from which degree order helps BALS tiles on the CPU: smaller ones fit in cache."""

REORDER_DEGREE = 16
"""Mean entries of a row of either side from which degree order helps: in sparser tiles, rows do not share columns.

Measured by bench/layouts.py (bench/FIGURES.md): BALS gains 3 to 15 % by degree order beyond both bounds (ML-10M's
shape; ML-1M's at f = 128) and loses up to 25 % elsewhere (ML-1M's shape below f = 128, Epinions')."""


@dataclass(frozen=True)
class AlsMethod:
    """Alternating least squares; its hyperparameters are the plan's `Kernels`."""

    kind: ClassVar[str] = "als"
    entry_seconds: ClassVar[float] = 0.0
    streams: ClassVar[bool] = True

    def names(self, plan: Plan) -> tuple[str, str]:
        return plan.assembly_name, plan.solver

    def describe(self, plan: Plan) -> str:
        solver = {
            "cg": f"cg, {plan.cg_steps} steps",
            "subspace": f"subspace, {plan.block_size} coordinates at a time",
            NONNEGATIVE: f"non-negative, by coordinate descent, assembly {plan.assembly_name}",
        }.get(plan.solver, f"{plan.solver}, assembly {plan.assembly_name}")
        if plan.tile_rows:
            solver += f" with tiles of {plan.tile_rows} x {plan.tile_cols}"
        return solver + f"; reorder {plan.reorder}" + ("; balanced" if plan.balance else "") + frozen_text(plan)

    # ----------------------------------------------------------------------------------------------- the plan

    def plan(self, base: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
        if base.frozen and base.balance:
            raise ValueError(
                f"balance=True changes the factors of both sides, and freeze={base.frozen!r} keeps those of one; use "
                "balance=False"
            )
        if base.solver == NONNEGATIVE:
            _check_nonnegative(base)
        if base.streamed:
            if base.reorder not in ("auto", "none"):
                raise ValueError(
                    f"reorder={base.reorder!r} needs all ratings in memory, and a store is read slab by slab; "
                    'use reorder="none", or fit store.to_ratings()'
                )
            base = base.changed(reorder="none")
        if isinstance(settings.device, tuple):
            spec, reason = dispatch.find_gpus(settings.device)
            base, settings = base.changed(reason=reason), replace(settings, device=settings.device[0])
            if base.devices and spec is None:
                return _cpu_ranks(base, settings, objective)
            if base.devices and spec is not None:
                return ranks_plan(base, settings, objective, spec)
        return dispatch.choose(self._request(base, settings, objective, spec))

    def _request(
        self, plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None
    ) -> dispatch.PlanRequest:
        """The fit as the dispatcher plans it."""
        cpu_only = ""
        if plan.solver == "subspace" and plan.streamed:
            cpu_only = "a store with solver='subspace' is the CPU's"
        elif plan.assembly not in ("auto", *GPU_ASSEMBLIES):
            cpu_only = f"assembly={plan.assembly!r} is the CPU's"
        return dispatch.PlanRequest(
            plan,
            settings,
            spec,
            on_cpu=functools.partial(cpu_plan, settings=settings, objective=objective),
            on_gpu=functools.partial(gpu_plan, settings=settings, objective=objective, spec=spec),
            cpu_only=cpu_only,
            gpu_only=_is_gpus(plan) or plan.precision != "float32",
            others=None if plan.solver == NONNEGATIVE else functools.partial(_other_ways, plan, spec),
        )

    # ----------------------------------------------------------------------------------------------- counts

    def flops_per_iteration(self, plan: Plan) -> float:
        """Useful work: nnz f (f + 1) per half sweep and f^3/3 + 2 f^2 per solve.

        CG takes 4 nnz f per step; for subspaces, the block size takes the place of f.
        """
        f, rows = plan.rank, plan.n_users + plan.n_items
        if plan.solver == "cg":
            gram = 2.0 * rows * f * f if plan.feedback == "implicit" else 0.0
            return (plan.cg_steps + 1) * (8.0 * plan.nnz * f + gram)
        if plan.solver == "subspace":
            block = plan.block_size
            return 2.0 * plan.nnz * f * (block + 7) + rows * f * (block**2 / 3 + 4.0 * f)
        return 2.0 * plan.nnz * f * (f + 1) + rows * (f**3 / 3 + 2.0 * f * f)

    def bytes_per_iteration(self, plan: Plan) -> float:
        """Each entry gathers a row of factors in both half sweeps."""
        return 2.0 * plan.nnz * plan.rank * plan.itemsize

    # ----------------------------------------------------------------------------------------------- costs

    def cpu_setup(self, plan: Plan, rates: CpuRates) -> dict[str, float]:
        """Tiles and reordered copies of both orientations."""
        share, setup = rates.speedup(plan.num_threads), {}
        if plan.tile_rows:
            setup["tiles"] = 2 * plan.nnz * TILE_ENTRY / share
        if plan.reorder != "none":
            setup["reorder"] = 2 * plan.nnz * TRANSPOSE_ENTRY / share
        return setup

    def cpu_work(self, plan: Plan, rates: CpuRates) -> CpuWork:
        """Sums over entries at the roofline, and systems at a separate rate; see `hybridmf.plan.cost`."""
        f, rows, entries = plan.rank, plan.filled_rows, 2 * plan.nnz
        implicit = plan.feedback == "implicit"
        gram = rows * f * f / rate_at(rates.assembly, f) if implicit else 0.0
        floor = max(gather_seconds(plan, rates), memory_floor(entries * f * 4.0, plan, rates))
        if plan.solver == "cg":
            passes = plan.cg_steps + 1
            entry = seconds_at(rates.cg, lambda f: passes * 4 * f, f)
            row = rates.row + (passes * 2 * f * f / rates.dense if implicit else 0.0)
        elif plan.solver == "subspace":
            block = plan.block_size
            flops = entries * f * (block + 7.0) + rows * f * (block**2 / 3 + 4.0 * f)
            return CpuWork(max(flops / rates.subspace, floor) + rows * rates.row + gram, REGIONS)
        else:
            entry = seconds_at(rates.assembly, system_flops, f) * rates.slower[plan.assembly]
            row = seconds_at(rates.solve, solve_flops, f)
            if plan.solver == NONNEGATIVE:
                row *= NONNEGATIVE_ROW
            if plan.dual_sides:
                filled = rows / sum(side_sizes(plan, side)[0] for side in SIDES)
                seconds = sum(side_seconds(plan, side, dual_up_to(plan, side), rates, filled) for side in SIDES)
                return CpuWork(max(seconds, floor) + gram, REGIONS)
        return CpuWork(max(entries * entry, floor) + rows * row + gram, REGIONS)

    def gpu_setup(self, plan: Plan) -> dict[str, float]:
        """Tiles of both orientations, built on the host."""
        return {"tiles": 2 * plan.nnz * TILE_ENTRY} if plan.tile_rows else {}

    def gpu_iteration(self, plan: Plan, machine: Machine) -> float:
        if plan.scale is not None:
            return float(plan.scale.seconds)
        halves = [HalfPlan(side, parts=1, batches=1, gpus=1) for side in SIDES]
        if plan.streamed and not plan.resident:
            source: Place = "disk" if plan.streamed == "disk" else "host"
            halves = [replace(half, batches=-(-plan.nnz // plan.slab), ratings=source) for half in halves]
        return sum(priced(plan, half, machine).total for half in halves)

    def row_cost(self, plan: Plan) -> float:
        """From built-in constants, so that all ranks agree; 0 for approximate solvers, whose rows cost little."""
        if plan.solver not in ("cholesky", NONNEGATIVE):
            return 0.0
        if plan.gpu is None:
            return plan.rank / 3
        f, itemsize = plan.rank, plan.itemsize
        assembly = "fused" if f <= fused.MAX_RANK and itemsize == 4 else "sparse_syrk"
        row = H200.gpu.row_seconds(f, itemsize, assembly, nonnegative=plan.solver == NONNEGATIVE)
        return row / H200.gpu.entry_seconds(f, itemsize, 0, 0, assembly)


ALS = AlsMethod()


def cpu_plan(plan: Plan, settings: Settings, objective: Objective) -> Plan:
    notes = instruction_set_notes()
    if plan.precision != "float32":
        if settings.device == "cpu":
            raise ValueError(
                f'precision={plan.precision!r} needs a GPU; on device="cpu" use precision="float32" '
                '(dtype="float64" for more)'
            )
        notes.append(f"precision {plan.precision!r} is the GPU's; the CPU computes in {plan.dtype}")
    assembly = "simd" if plan.assembly == "auto" else plan.assembly
    if _is_gpus(plan):
        what = f"assembly={plan.assembly_name!r} is a GPU's"
        if settings.device != "cpu":
            raise DeviceError(f'{what}, and there is none ({plan.reason}); use assembly="auto"')
        raise ValueError(f'{what}; on device="cpu" use one of {", ".join(CPU_ASSEMBLIES)}, or assembly="auto"')
    if plan.solver != "cholesky" and assembly != "simd":
        raise ValueError(
            f"assembly={plan.assembly_name!r} is for solver='cholesky'; solver={plan.solver!r} has its own kernels: "
            'use assembly="auto"'
        )
    check_row_form(plan, objective)
    itemsize = plan.itemsize
    tile_rows = tile_cols = 0
    if assembly == "bals":
        tile_rows = int(np.clip(L2_ACCUMULATORS // system_bytes(plan), 4, 256))
        tile_cols = int(np.clip(L2_TILE // (plan.rank * itemsize), 32, 4096))
    plan = plan.changed(
        assembly=assembly,
        reorder=_cpu_reordering(plan, assembly),
        precision="float32",
        tile_rows=tile_rows,
        tile_cols=tile_cols,
        notes=tuple(notes),
        dual_sides=dual_sides(plan, objective) if assembly == "simd" else (),
    )
    return plan.changed(bytes=cpu_bytes(plan))


def _is_gpus(plan: Plan) -> bool:
    """Whether the assembly asked for is one of GPUs alone; "bals" is one of both, but its variant is not."""
    if plan.variant:
        return plan.assembly in GPU_ASSEMBLIES
    return plan.assembly not in ("auto", *CPU_ASSEMBLIES)


def _cpu_reordering(plan: Plan, assembly: str) -> str:
    """Degree order lets a row block share popular columns; other assemblies read rows one by one in any order."""
    if plan.reorder != "auto":
        return plan.reorder
    rows = plan.n_users + plan.n_items
    pays = (
        assembly == "bals" and plan.nnz >= REORDER_DEGREE * rows and rows * plan.rank * plan.itemsize >= REORDER_BYTES
    )
    return "both" if pays else "none"


def _cpu_ranks(plan: Plan, settings: Settings, objective: Objective) -> Plan:
    """Complete a plan for several ranks on the CPU that share memory."""
    plan = cpu_plan(plan, settings, objective)
    # all of them together need the gathered side, and each the slab it reads
    sizes, ranks, itemsize = dict(plan.bytes), len(plan.devices), plan.itemsize
    sizes["gathered"] = ranks * max(plan.n_users, plan.n_items) * plan.rank * itemsize
    if plan.streamed:
        sizes["ratings"] += 2 * (ranks - 1) * plan.slab * (itemsize + 4)
    return plan.changed(bytes=sizes)


def _check_nonnegative(plan: Plan) -> None:
    """Raise if a fit of non-negative factors does not support a setting."""
    if plan.balance:
        raise ValueError("balance=True leads to negative factors; with nonnegative=True use balance=False")
    if plan.assembly not in ("auto", *NONNEGATIVE_ASSEMBLIES):
        raise ValueError(
            f"nonnegative=True forms its systems by one of {', '.join(NONNEGATIVE_ASSEMBLIES)}, got "
            f'assembly={plan.assembly_name!r}; use assembly="auto"'
        )


def _other_ways(plan: Plan, spec: DeviceSpec | None) -> Iterator[Plan]:
    """Plans with all other assemblies, solvers and precisions for the same sizes."""
    ways = [("simd", solver, "float32") for solver in SOLVERS]
    ways += [(assembly, "cholesky", "float32") for assembly in CPU_ASSEMBLIES[1:]]
    if spec is not None:
        ways += [("fused", solver, precision) for solver in SOLVERS for precision in PRECISIONS]
        ways += [(assembly, solver, "float32") for assembly in GPU_ASSEMBLIES[1:] for solver in ("cholesky", "cg")]
    for assembly, solver, precision in dict.fromkeys(ways):
        yield plan.changed(assembly=assembly, variant="", solver=solver, precision=precision)


def for_fold_in(plan: Plan) -> Plan:
    """The plan for solving new rows exactly, in the given order; nonnegative if the fit was."""
    # few rows cannot share tiles; sparse_syrk supports any rank, dtype and weight
    without_tiles = "simd" if plan.gpu is None else "sparse_syrk"
    solver = NONNEGATIVE if plan.solver == NONNEGATIVE else "cholesky"
    if plan.method != ALS or (plan.gpu is not None and plan.solver == "subspace"):
        exact = plan.changed(method=ALS, solver="cholesky", assembly=without_tiles, precision="float32", reorder="none")
        slots = 0 if plan.gpu is None else max(1, BATCH_BYTES // slot_bytes(exact))
        return exact.changed(segment=GPU_SEGMENT, batch_slots=slots)
    assembly = without_tiles if plan.assembly == "bals" else plan.assembly
    segment = plan.segment if assembly == plan.assembly else gpu_segment(assembly)
    return plan.changed(
        solver=solver,
        assembly=assembly,
        variant=plan.variant if assembly == plan.assembly else "",
        reorder="none",
        tile_rows=0,
        tile_cols=0,
        segment=segment,
    )
