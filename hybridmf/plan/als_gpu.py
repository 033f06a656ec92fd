"""Plan of ALS on one GPU or several: kernels, batches, slabs, memory, and the location of ratings and factors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core import system
from ..core.objective import SIDES, Objective
from ..core.scratch import find_room
from ..core.system import mib
from ..device.cuda import DeviceSpec
from . import assemblies, dispatch, fused
from . import machine as machines
from .half_sweep import BATCH_BYTES, SEGMENT_BYTES, SLAB_BUFFERS, basis_bytes, slot_bytes, slots_at_once
from .memory import tile_pointers
from .partitions import ScalePlan, plan_host_ranks, plan_ranks, plan_streamed_ranks
from .row_forms import changes_basis, check_row_form, dual_sides, dual_up_to, side_sizes
from .types import GPU_ASSEMBLIES, PUBLISHED_BATCH, Place, Plan, Settings, memory_lacks

GPU_SEGMENT = 16384
"""Entries above which the published assemblies split a row (fused kernels: `hybridmf.plan.fused.SEGMENT`)."""

SUBSPACE_ASSEMBLIES = ("fused", "sparse_syrk")

PUBLISHED = "published"
"""Variant of a kernel as printed."""

WHOLE_ROW = 2**31 - 1
"""Segment that holds every row."""
"""Assemblies that sum the systems of iALS++: those that "auto" chooses from."""

STREAM_SLAB = 16 << 20
"""Entries of a slab of streamed in-memory ratings: its copy takes 2.4 ms on a PCIe 5 bus. At each slab boundary some
kernels end before others start, which costs 0.25 ms on an H200."""


PREDICTED_ROWS = 2048
"""Entries of a row whose losses or predictions one warp sums."""


def gpu_segment(assembly: str, variant: str = "") -> int:
    """Entries above which a row is split."""
    if variant == PUBLISHED:
        return WHOLE_ROW
    return fused.SEGMENT if assembly == "fused" else GPU_SEGMENT


def most_at_once(plan: Plan) -> int:
    """Bound of the systems of a batch by the method."""
    return PUBLISHED_BATCH if plan.variant == PUBLISHED else WHOLE_ROW


def gpu_plan(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec) -> Plan:
    """Complete a plan for a GPU; a pure function of sizes and of the properties of the GPU."""
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
    if plan.row_form == "dual" or not memory_lacks(dual):
        check_row_form(dual, objective)
        return dual
    if not memory_lacks(whole) or plan.reorder != "none" or plan.tile_rows:
        return whole
    streamed = _gpu_streamed(plan, spec)
    if not memory_lacks(streamed):
        return streamed
    return _offloaded(plan, spec) or whole


def _offloaded(plan: Plan, spec: DeviceSpec) -> Plan | None:
    """The plan with offloaded factors, in host memory or in files; None if not even parts of them fit on the GPU."""
    free, needed = system.available_memory(), plan.offloaded_bytes
    # empty if the factors fit in host memory, or if no folder has room
    folder = "" if free is None or needed <= free else find_room(plan.scratch, needed)[0]
    factors: Place = "disk" if folder else "host"
    beside = 0 if folder else needed
    ratings: Place = "disk" if plan.streamed and not host_has_room(plan, beside) else "host"
    slab = host_slab(plan, ratings)
    machine = machines.machine().with_gpu(spec)
    scale = plan_host_ranks(plan, 1, spec.free_bytes, ratings, slab, machine, factors=factors)
    if scale is None:
        return None
    note = "the factors do not fit on the GPU: they stay in the memory of the host"
    if folder:
        note = f"the factors do not fit on the GPU, nor in the memory of the host: they are in files in {folder!r}"
    plan = plan.changed(notes=(*plan.notes, note), scratch=(folder,) if folder else plan.scratch)
    return with_scale(plan.changed(streamed=ratings, slab=max(map(scale.slab, scale.halves))), scale)


def choices(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec) -> Plan:
    """Choose kernels and record free memory; the location of the ratings is decided later."""
    if plan.solver == "subspace":
        _check_subspace(plan)
    plan = dispatch.on_gpu(plan, settings, spec)
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
    # degree order makes BALS 1.4 to 1.8 times as fast on a GPU (bench/FIGURES.md)
    best_order = "both" if assembly == "bals" else "none"
    return plan.changed(
        assembly=assembly,
        reorder=best_order if plan.reorder == "auto" else plan.reorder,
        tile_rows=tile_rows,
        tile_cols=tile_cols,
        segment=gpu_segment(assembly, plan.variant),
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
    if plan.assembly_name not in ("auto", *SUBSPACE_ASSEMBLIES):
        raise ValueError(
            f"assembly={plan.assembly_name!r} cannot solve for blocks of coordinates; with solver='subspace' on a GPU "
            f'use assembly="auto", or one of {", ".join(SUBSPACE_ASSEMBLIES)}'
        )


def _gpu_stored(plan: Plan, whole: Plan, spec: DeviceSpec) -> Plan:
    """Place the slabs of a store on the GPU, in host memory, or on disk, whichever fits first."""
    if not memory_lacks(whole):
        return whole.changed(streamed="disk", slab=plan.slab, resident=True)
    where: Place = "host" if host_has_room(plan) else "disk"
    streamed = _with_batches(plan.changed(streamed=where), _streamed_bytes(plan), spec)
    if not memory_lacks(streamed):
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
    slots = int(np.clip(left // each, least, max(least, min(most, most_at_once(plan)))))
    return plan.changed(batch_slots=slots, bytes=sizes | {"batch": max(slots * each, _gram_excess(plan))})


def _gram_excess(plan: Plan) -> int:
    """Bytes by which the sums of the Gram matrix exceed the new factors, which reuse their memory."""
    if plan.feedback == "explicit":
        return 0
    rows, itemsize = max(plan.n_users, plan.n_items), plan.itemsize
    width = fused.table_width(plan.rank, plan.dtype)
    return max(0, fused.gram_bytes(rows, width, itemsize) - rows * width * itemsize)


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
    changing = [side_sizes(plan, side) for side in SIDES if changes_basis(plan, side)]
    if changing:
        sizes["basis"] = max(basis_bytes(plan, fixed, solved) for solved, fixed in changing)
    if plan.solver == "subspace":
        sizes |= _subspace_bytes(plan)
    if not plan.tile_rows:
        sizes["ratings"] += sum(_most_slots(plan, rows) for rows in (m, n)) * SEGMENT_BYTES
    else:
        sizes["tiles"] = 2 * nnz * (8 + itemsize) + 8 * (tile_pointers(m, n, plan) + tile_pointers(n, m, plan))
    return sizes


def _subspace_bytes(plan: Plan) -> dict[str, int]:
    """Memory by purpose of iALS++ beside that of the exact solver of systems of the size of a block."""
    m, n, itemsize = plan.n_users, plan.n_items, plan.itemsize
    widths = [fused.table_width(last - first, plan.dtype) for first, last in plan.blocks]
    return {
        # of each entry; (row, begin, end) of segments of rows
        "predictions": plan.nnz * itemsize + 24 * (m + n + plan.nnz // PREDICTED_ROWS),
        # the fixed side by blocks, changes of the solutions, and what they are computed from
        "blocks": max(m, n) * (sum(widths) + 3 * widths[0]) * itemsize,
    }


def with_scale(plan: Plan, scale: ScalePlan) -> Plan:
    """The plan with offloaded factors."""
    sizes = {name: size for name, size in scale.fullest.bytes.items() if size}
    slots = min(slots_at_once(plan, half) for half in scale.halves.values())
    return plan.changed(scale=scale, bytes=sizes, batch_slots=slots)


def host_slab(plan: Plan, place: Place) -> int:
    """Entries of a slab with offloaded factors: that of the store, or a size efficient for copies and launches."""
    return plan.slab if place == "disk" else STREAM_SLAB


# ------------------------------------------------------------------------------------------------------- several GPUs


def ranks_plan(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec) -> Plan:
    """Complete a plan for several GPUs, each of which solves its rows; `spec` has the smallest free memory of all."""
    plan = choices(plan, settings, objective, spec)
    assert plan.gpu is not None
    free = plan.gpu.free_bytes
    dual = plan.changed(dual_sides=dual_sides(plan, objective))
    scale = _spread(dual, free)
    if plan.row_form != "dual" and dual.dual_sides and (scale.ratings != "device" or scale.bytes_per_gpu > free):
        dual, scale = plan, _spread(plan, free)
    plan = _placed(dual, scale).changed(scale=scale)
    check_row_form(plan, objective)
    plan = plan.changed(dual_sides=tuple(side for side in plan.dual_sides if dual_up_to(plan, side)))
    if scale.factors != "device":
        return with_scale(plan, scale)
    beside = max(half.total_bytes - half.bytes["systems"] for half in scale.halves.values())
    left = min(BATCH_BYTES, max(0, free - beside))
    slots = max(min(left // slot_bytes(plan), most_at_once(plan)), plan.tile_rows, 1)
    return plan.changed(bytes=scale.fullest.bytes, batch_slots=slots)


def _spread(plan: Plan, free: int) -> ScalePlan:
    """Partition ALS over GPUs with `free` bytes of memory each.

    Ratings stay on the GPUs or, if they do not fit, are streamed to GPUs that solve their own rows. If a complete fixed
    side does not fit, it is split over the GPUs or loaded from the host, whichever is predicted to be faster.
    """
    assert plan.gpu is not None
    machine, ranks, stored = machines.machine().with_gpu(plan.gpu), len(plan.devices), bool(plan.streamed)
    # tiles need whole rows, and so do the dual form and slabs of a store that stay on a GPU
    whole_rows = plan.tile_rows > 0 or stored or plan.row_form == "dual"
    scale = plan_ranks(plan, ranks, free, machine, model_parallel_only=whole_rows)
    if scale.bytes_per_gpu <= free or plan.tile_rows or plan.reorder != "none":
        return scale
    place: Place = "disk" if stored and not host_has_room(plan) else "host"
    streamed = plan_streamed_ranks(plan, ranks, free, place, STREAM_SLAB, machine, model_parallel_only=True)
    if streamed is not None:
        return streamed
    split = plan_streamed_ranks(plan, ranks, free, place, STREAM_SLAB, machine)
    if split is not None and not stored and not _room_for_copies(split):
        split = None
    if stored and not host_has_room(plan, plan.offloaded_bytes):
        place = "disk"
    offloaded = plan_host_ranks(plan, ranks, free, place, host_slab(plan, place), machine)
    found = [other for other in (split, offloaded) if other is not None]
    return min(found, key=lambda other: other.seconds, default=scale)


def _room_for_copies(scale: ScalePlan) -> bool:
    """Whether the host has memory for the copies of in-memory ratings that ranks make if they share rows."""
    copied = sum(half.fixed == "split" for half in scale.halves.values()) * scale.plan.nnz
    free = system.available_memory()
    return free is None or copied * (4 + scale.plan.itemsize) < free


def _placed(plan: Plan, scale: ScalePlan) -> Plan:
    """The plan with ratings located as in `scale`."""
    if scale.ratings == "device":
        return plan.changed(resident=bool(plan.streamed))
    notes = list(plan.notes)
    if scale.factors != "device":
        notes.append("the factors do not fit on the GPUs: they stay in the memory of the host")
    else:
        if not plan.streamed:
            notes.append(streaming_note(plan, f"{scale.gpus} GPUs"))
        split = [f"{side}s" for side, half in scale.halves.items() if half.fixed == "split"]
        if split:
            notes.append(f"the fixed side of {' and '.join(split)} is split over the GPUs, which add up sums")
    return plan.changed(streamed=scale.ratings, slab=max(map(scale.slab, scale.halves)), notes=tuple(notes))


H200 = DeviceSpec("NVIDIA H200", 0, (9, 0), 132, 227 << 10, 60 << 20, 141 * 10**9, 141 * 10**9)
"""GPUs of a machine that is not there."""


def plan_on_h200s(plan: Plan, settings: Settings, objective: Objective, gpus: int) -> Plan:
    """The plan with the kernels for H200s, of which `plan_scale` makes partitions."""
    devices = tuple(f"cuda:{index}" for index in range(gpus)) if gpus > 1 else ()
    plan = choices(plan.changed(devices=devices), replace(settings, gpu_memory_limit=None), objective, H200)
    return plan.changed(dual_sides=dual_sides(plan, objective))
