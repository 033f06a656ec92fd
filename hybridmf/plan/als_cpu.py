"""Plan of ALS on the CPU: assembly, tiles, order and memory."""

from __future__ import annotations

import numpy as np

from ..core.objective import Objective
from ..errors import DeviceError
from .memory import cpu_bytes, system_bytes
from .row_forms import check_row_form, dual_sides
from .types import CPU_ASSEMBLIES, Plan, Settings, instruction_set_notes

L2_ACCUMULATORS = 512 * 1024
"""Bytes of a thread's BALS accumulators: half of a 1 MB L2, so that the tile and the gathered rows fit beside them."""

L2_TILE = 128 * 1024
"""Bytes of factor rows staged by one BALS tile."""

REORDER_BYTES = 4 << 20
"""Size of the factors of both sides from which degree order helps BALS tiles on the CPU: smaller ones fit in cache."""

REORDER_DEGREE = 16
"""Mean entries of a row of either side from which degree order helps: in sparser tiles, rows do not share columns.

Measured by bench/layouts.py (docs/performance.md): BALS gains 3 to 15 % by degree order beyond both bounds (ML-10M's
shape; ML-1M's at f = 128) and loses up to 25 % elsewhere (ML-1M's shape below f = 128, Epinions')."""


def cpu_plan(plan: Plan, settings: Settings, objective: Objective) -> Plan:
    """Complete a plan for the CPU."""
    notes = instruction_set_notes()
    if plan.precision != "float32":
        if settings.device == "cpu":
            raise ValueError(
                f'precision={plan.precision!r} needs a GPU; on device="cpu" use precision="float32" '
                '(dtype="float64" for more)'
            )
        notes.append(f"precision {plan.precision!r} is the GPU's; the CPU computes in {plan.dtype}")
    assembly = "simd" if plan.assembly == "auto" else plan.assembly_name
    if assembly not in CPU_ASSEMBLIES:
        what = f"assembly={assembly!r} is a GPU's"
        if settings.device != "cpu":
            raise DeviceError(f'{what}, and there is none ({plan.reason}); use assembly="auto"')
        raise ValueError(f'{what}; on device="cpu" use one of {", ".join(CPU_ASSEMBLIES)}, or assembly="auto"')
    if plan.solver != "cholesky" and assembly != "simd":
        raise ValueError(
            f"assembly={plan.assembly!r} is for solver='cholesky'; solver={plan.solver!r} has its own kernels: "
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


def _cpu_reordering(plan: Plan, assembly: str) -> str:
    """Degree order lets a row block share popular columns; other assemblies read rows one by one in any order."""
    if plan.reorder != "auto":
        return plan.reorder
    rows = plan.n_users + plan.n_items
    pays = (
        assembly == "bals" and plan.nnz >= REORDER_DEGREE * rows and rows * plan.rank * plan.itemsize >= REORDER_BYTES
    )
    return "both" if pays else "none"
