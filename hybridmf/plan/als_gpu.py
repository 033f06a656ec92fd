"""Plan of ALS on one GPU: kernels, batches, slabs, memory, and the location of ratings and factors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core import system
from ..core.objective import SIDES, Objective
from ..core.scratch import find_room
from ..core.system import mib
from ..device.cuda import DeviceSpec
from . import assemblies, dispatch, fused, gram
from . import machine as machines
from .half_sweep import BATCH_BYTES, PIECE_BYTES, SLAB_BUFFERS, Place, Problem, slots_at_once
from .memory import tile_pointers
from .partitions import plan_host_ranks
from .ranks import ScalePlan
from .row_forms import changes_basis, check_row_form, dual_sides, side_sizes
from .types import GPU_ASSEMBLIES, NONNEGATIVE, Plan, Settings

GPU_SEGMENT = 16384
"""Entries above which the published assemblies split a row (fused kernels: `hybridmf.plan.fused.SEGMENT`)."""

SUBSPACE_ASSEMBLIES = ("fused", "sparse_syrk")
"""Assemblies that sum the systems of iALS++: those that "auto" chooses from."""

HOST_BATCH_BYTES = 256 << 20
"""`BATCH_BYTES` for offloaded factors, where memory is better used for more rows, which save loads of factors."""

ROWS_AT_ONCE = 1 << 18
"""Rows in the dual form whose solutions change back from another basis together."""

STREAM_SLAB = 16 << 20
"""Entries of a slab of streamed in-memory ratings: its copy takes 2.4 ms on a PCIe 5 bus. At each slab boundary some
kernels end before others start, which costs 0.25 ms on an H200."""


PREDICTED_ROWS = 2048
"""Entries of a row whose losses or predictions one warp sums."""


def gpu_segment(assembly: str) -> int:
    """Entries above which a row is split."""
    return fused.SEGMENT if assembly == "fused" else GPU_SEGMENT


def slot_bytes(plan: Plan) -> int:
    """Bytes of one system, or of the partial sums of one segment of a row."""
    rank = plan.system_rank
    return 4 * fused.partial_floats(rank) if plan.assembly == "fused" else (rank + 1) * rank * plan.itemsize


def _gpu_reordering(asked: str, assembly: str) -> str:
    """Degree order makes BALS 1.4 to 1.8 times as fast on a GPU (docs/performance.md)."""
    if asked != "auto":
        return asked
    return "both" if assembly == "bals" else "none"


def gpu_plan(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec) -> Plan:
    """Complete a plan for a GPU; a pure function of sizes and of the properties of the GPU.

    Raises
    ------
    ValueError
        GPUs do not support the combination.
    """
    plan = choices(plan, settings, objective, spec)
    assert plan.gpu is not None
    spec = plan.gpu
    whole = _with_batches(plan.changed(streamed="", slab=0), _gpu_fixed_bytes(plan), spec)
    if plan.streamed:
        check_row_form(plan, objective)
        return _gpu_stored(plan, whole, spec)
    if plan.solver == "subspace":
        check_row_form(plan, objective)
        return whole
    dual = plan.changed(dual_sides=dual_sides(plan, objective))
    dual = _with_batches(dual, _gpu_fixed_bytes(dual), spec)
    if plan.row_form == "dual" or not dispatch.memory_lacks(dual):
        check_row_form(dual, objective)
        return dual
    if not dispatch.memory_lacks(whole) or plan.reorder != "none" or plan.tile_rows:
        return whole
    streamed = _gpu_streamed(plan, spec)
    if not dispatch.memory_lacks(streamed):
        return streamed
    return _offloaded(plan, spec) or whole


def _offloaded(plan: Plan, spec: DeviceSpec) -> Plan | None:
    """The plan with offloaded factors, in host memory or in files; None if not even parts of them fit on the GPU."""
    folder = _folder_for_factors(plan)
    factors: Place = "disk" if folder else "host"
    beside = 0 if folder else plan.offloaded_bytes
    ratings: Place = "disk" if plan.streamed and not host_has_room(plan, beside) else "host"
    slab = host_slab(plan, ratings)
    machine = machines.machine().with_gpu(spec)
    scale = plan_host_ranks(host_problem(plan), 1, spec.free_bytes, ratings, slab, machine, factors=factors)
    if scale is None:
        return None
    note = "the factors do not fit on the GPU: they stay in the memory of the host"
    if folder:
        note = f"the factors do not fit on the GPU, nor in the memory of the host: they are in files in {folder!r}"
    plan = plan.changed(notes=(*plan.notes, note), scratch=(folder,) if folder else plan.scratch)
    return with_scale(plan.changed(streamed=ratings, slab=max(map(scale.slab, scale.halves))), scale)


def _folder_for_factors(plan: Plan) -> str:
    """Folder for files of factors that do not fit in host memory; empty if they do, or if no folder has room."""
    free, needed = system.available_memory(), plan.offloaded_bytes
    return "" if free is None or needed <= free else find_room(plan.scratch, needed)[0]


def choices(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec) -> Plan:
    """Choose kernels and record free memory; the location of the ratings is decided later."""
    if plan.solver == "subspace":
        _check_subspace(plan)
    limit = settings.gpu_memory_limit
    if limit is not None:
        spec = replace(spec, free_bytes=min(spec.free_bytes, limit))
    plan = plan.changed(device=f"cuda:{spec.index}", gpu=spec)
    unobserved = objective.unobserved_weight if objective.is_implicit else 0.0
    blocks = plan.system_rank < plan.rank
    why_not = fused.supports(
        plan.system_rank,
        plan.dtype,
        spec,
        unobserved,
        biases=objective.biases and not blocks,
        size="block_size" if blocks else "factors",
    )
    assembly, notes = plan.assembly, []
    if assembly == "auto":
        assembly = "sparse_syrk" if why_not else "fused"
        if why_not:
            notes.append(f"assembly sparse_syrk instead of fused: {why_not}")
    if assembly not in GPU_ASSEMBLIES:
        raise ValueError(
            f"assembly={assembly!r} runs on the CPU only; on a GPU use one of {', '.join(GPU_ASSEMBLIES)}, "
            'or assembly="auto"'
        )
    if assembly == "fused" and why_not:
        raise ValueError(f'assembly="fused" cannot serve this: {why_not}; use assembly="auto"')
    if plan.precision != "float32" and assembly != "fused":
        because = f": {why_not}" if why_not else f", not for assembly={assembly!r}"
        raise ValueError(f"precision={plan.precision!r} is for the fused kernels{because}; use precision='float32'")
    tile_rows, tile_cols = (0, 0)
    if assembly == "bals":
        tile_rows, tile_cols = assemblies.bals_tile_sizes(plan.rank, plan.itemsize, spec, local=plan.variant == "local")
    if tile_rows and plan.streamed:
        raise ValueError(
            'assembly="bals" cuts all ratings into tiles, and a store is read slab by slab; use assembly="auto", or '
            "fit store.to_ratings()"
        )
    return plan.changed(
        assembly=assembly,
        reorder=_gpu_reordering(plan.reorder, assembly),
        tile_rows=tile_rows,
        tile_cols=tile_cols,
        segment=gpu_segment(assembly),
        notes=tuple(notes),
    )


def _check_subspace(plan: Plan) -> None:
    """Raise if GPUs have no subspace solver for a plan."""
    elsewhere = 'use solver="cholesky" or "cg"'
    if len(plan.devices) > 1:
        raise ValueError(f"solver='subspace' runs on one GPU, and device names {len(plan.devices)}; {elsewhere}")
    if plan.streamed:
        raise ValueError(
            "solver='subspace' needs all ratings in the memory of the GPU, and a store is read slab by slab; fit "
            f'store.to_ratings(), or {elsewhere} or device="cpu"'
        )
    if plan.assembly not in ("auto", *SUBSPACE_ASSEMBLIES):
        raise ValueError(
            f"assembly={plan.assembly_name!r} cannot solve for blocks of coordinates; with solver='subspace' on a GPU "
            f'use assembly="auto", or one of {", ".join(SUBSPACE_ASSEMBLIES)}'
        )


def _gpu_stored(plan: Plan, whole: Plan, spec: DeviceSpec) -> Plan:
    """Place the slabs of a store on the GPU, in host memory, or on disk, whichever fits first."""
    if not dispatch.memory_lacks(whole):
        return whole.changed(streamed="disk", slab=plan.slab, resident=True)
    where: Place = "host" if host_has_room(plan) else "disk"
    streamed = _with_batches(plan.changed(streamed=where), _streamed_bytes(plan), spec)
    if not dispatch.memory_lacks(streamed):
        return streamed
    return _offloaded(plan, spec) or streamed


def host_has_room(plan: Plan, beside: int = 0) -> bool:
    """Whether all ratings of a store, in both orientations, fit in host memory together with `beside` bytes."""
    loaded = 2 * plan.nnz * (4 + plan.itemsize) + 8 * (plan.n_users + plan.n_items)
    free = system.available_memory()
    # leaves room for other programs, and for the system, which cannot page out locked memory
    return free is not None and 2 * loaded + beside < free


def streaming_note(plan: Plan, where: str) -> str:
    """Note of a plan that streams ratings in memory."""
    moved = 2 * plan.nnz * (4 + plan.itemsize)
    return f"the ratings do not fit on the {where}: {mib(moved)} come from the memory of the host in each iteration"


def _gpu_streamed(plan: Plan, spec: DeviceSpec) -> Plan:
    """The plan that streams ratings from host memory, in slabs that fit."""
    itemsize = plan.itemsize
    left = spec.free_bytes - sum(_streamed_bytes(plan).values())
    # half of it for the buffers, the other half for batches
    slab = int(np.clip(left / 2 / (SLAB_BUFFERS * (4 + itemsize)), 1, STREAM_SLAB))
    slab = min(max(slab, *plan.longest), plan.nnz)  # a row is never cut
    plan = plan.changed(streamed="host", slab=slab, notes=(*plan.notes, streaming_note(plan, "GPU")))
    return _with_batches(plan, _streamed_bytes(plan), spec)


def _streamed_bytes(plan: Plan) -> dict[str, int]:
    """`_gpu_fixed_bytes` with a few slabs in place of all ratings."""
    sizes, itemsize = _gpu_fixed_bytes(plan), plan.itemsize
    sizes["ratings"] += (SLAB_BUFFERS * plan.slab - 2 * plan.nnz) * (4 + itemsize)
    return sizes


def _with_batches(plan: Plan, sizes: dict[str, int], spec: DeviceSpec) -> Plan:
    """The plan with the largest batch of systems that memory allows."""
    each = slot_bytes(plan)
    most = _most_slots(plan, max(plan.n_users, plan.n_items))
    left = min(BATCH_BYTES, max(0, spec.free_bytes - sum(sizes.values())))
    # BALS assembles whole blocks of rows; the others sum all segments of a row together
    least = plan.tile_rows or max(1, -(-max(plan.longest) // plan.segment))
    slots = int(np.clip(left // each, least, max(least, most)))
    return plan.changed(batch_slots=slots, bytes=sizes | {"batch": max(slots * each, _gram_excess(plan))})


def _gram_excess(plan: Plan) -> int:
    """Bytes by which the sums of the Gram matrix exceed the new factors, which reuse their memory."""
    if plan.feedback == "explicit":
        return 0
    rows, itemsize = max(plan.n_users, plan.n_items), plan.itemsize
    width = fused.table_width(plan.rank, plan.dtype)
    return max(0, gram.gram_bytes(rows, width, itemsize) - rows * width * itemsize)


def _most_slots(plan: Plan, rows: int) -> int:
    """Upper bound on the systems and segments of a number of rows of a side."""
    # a row has one slot, and one more for each segment; rows solved in one kernel need slots only if they are long
    cuts = plan.nnz // plan.segment
    return cuts + (rows if plan.solved_apart else cuts) + 1


def _gpu_fixed_bytes(plan: Plan) -> dict[str, int]:
    """Memory by purpose, without batches."""
    m, n, nnz = plan.n_users, plan.n_items, plan.nnz
    itemsize = plan.itemsize
    width = fused.table_width(plan.rank, plan.dtype)
    if plan.rank > plan.factors:  # biases, and offsets of the ratings by the fixed side's biases
        width += 2
    sizes = {
        # both orientations; offsets, order, scale and status of each row
        "ratings": 2 * nnz * (4 + itemsize) + (m + n) * (8 + 4 + itemsize + 4),
        # old and new factors of the side being solved, so that an interrupted half sweep has no effect
        "factors": (m + n + max(m, n)) * width * itemsize,
    }
    if plan.assembly == "fused":
        sizes["operands"] = max(m, n) * fused.operand_bytes(plan.system_rank, plan.precision)
    basis = basis_bytes(plan)
    if basis:
        sizes["basis"] = basis
    if plan.solver == "subspace":
        sizes |= _subspace_bytes(plan)
    if not plan.tile_rows:
        sizes["ratings"] += sum(_most_slots(plan, rows) for rows in (m, n)) * PIECE_BYTES
    else:
        sizes["tiles"] = 2 * nnz * (8 + itemsize) + 8 * (tile_pointers(m, n, plan) + tile_pointers(n, m, plan))
    return sizes


def basis_bytes(plan: Plan) -> int:
    """Memory of a GPU for the fixed side, and some solutions, in the basis of implicit rows in the dual form."""
    changing = [side_sizes(plan, side) for side in SIDES if changes_basis(plan, side)]
    width, ranks = fused.table_width(plan.rank, plan.dtype), max(1, len(plan.devices))
    rows = (fixed + 2 * min(-(-solved // ranks), ROWS_AT_ONCE) for solved, fixed in changing)
    return max(rows, default=0) * width * plan.itemsize


def _subspace_bytes(plan: Plan) -> dict[str, int]:
    """Memory by purpose of iALS++ beside that of the exact solver of systems of the size of a block."""
    m, n, itemsize = plan.n_users, plan.n_items, plan.itemsize
    widths = [fused.table_width(last - first, plan.dtype) for first, last in plan.blocks]
    return {
        # of each entry; (row, begin, end) of pieces of rows
        "predictions": plan.nnz * itemsize + 24 * (m + n + plan.nnz // PREDICTED_ROWS),
        # the fixed side by blocks, changes of the solutions, and what they are computed from
        "blocks": max(m, n) * (sum(widths) + 3 * widths[0]) * itemsize,
    }


def with_scale(plan: Plan, scale: ScalePlan) -> Plan:
    """The plan with offloaded factors."""
    fullest = max(scale.halves.values(), key=lambda half: sum(half.bytes.values()))
    sizes = {name: size for name, size in fullest.bytes.items() if size}
    slots = min(slots_at_once(scale.problem, half) for half in scale.halves.values())
    return plan.changed(scale=scale, bytes=sizes, batch_slots=slots)


def host_slab(plan: Plan, place: Place) -> int:
    """Entries of a slab with offloaded factors: that of the store, or a size efficient for copies and launches."""
    return plan.slab if place == "disk" else STREAM_SLAB


def gpu_problem(plan: Plan) -> Problem:
    """Sizes and kernels that determine a partition with factors on GPUs."""
    assert plan.gpu is not None
    return Problem(
        (plan.n_users, plan.n_items),
        plan.nnz,
        plan.rank,
        plan.itemsize,
        longest=plan.longest,
        implicit=plan.feedback == "implicit",
        cg_steps=plan.cg_steps if plan.solver == "cg" else 0,
        nonnegative=plan.solver == NONNEGATIVE,
        assembly=plan.assembly,
        precision=plan.precision,
        l2_bytes=plan.gpu.l2_bytes,
    )


def host_problem(plan: Plan) -> Problem:
    """Sizes that determine the parts in which offloaded factors are loaded."""
    assert plan.gpu is not None
    return replace(
        gpu_problem(plan),
        sums=slot_bytes(plan),
        segment=plan.segment,
        biases=plan.rank > plan.factors,
        on_chip=not plan.solved_apart,
        batch=max(1, min(HOST_BATCH_BYTES, plan.gpu.free_bytes // 8)),
    )
