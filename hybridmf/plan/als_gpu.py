"""Plan of ALS on one GPU or several: kernels, batches, slabs, memory, and the location of ratings and factors."""

from __future__ import annotations

from dataclasses import replace

from ..core import system
from ..core.objective import SIDES, Objective
from ..core.scratch import find_room
from ..core.system import mib
from ..device.cuda import DeviceSpec
from . import assemblies, dispatch, fused
from . import machine as machines
from .half_sweep import (
    BATCH_BYTES,
    PUBLISHED,
    PUBLISHED_BATCH,
    SLAB_BUFFERS,
    HalfPlan,
    fewest_batches,
    slot_bytes,
    slots_of_both,
)
from .partitions import ScalePlan, plan_host_ranks, plan_ranks, plan_streamed_ranks
from .row_forms import check_row_form, dual_sides, dual_up_to
from .types import GPU_ASSEMBLIES, Place, Plan, Settings, memory_lacks

GPU_SEGMENT = 16384
"""Entries above which the published assemblies split a row (fused kernels: `hybridmf.plan.fused.SEGMENT`)."""

SUBSPACE_ASSEMBLIES = ("fused", "sparse_syrk")
"""Assemblies that sum the systems of iALS++: those that "auto" chooses from."""

WHOLE_ROW = 2**31 - 1  # segment that holds every row

STREAM_SLAB = 16 << 20
"""Entries of a slab of streamed in-memory ratings: its copy takes 2.4 ms on a PCIe 5 bus. At each slab boundary some
kernels end before others start, which costs 0.25 ms on an H200."""


def gpu_segment(assembly: str, variant: str = "") -> int:
    if variant == PUBLISHED:
        return WHOLE_ROW
    return fused.SEGMENT if assembly == "fused" else GPU_SEGMENT


def gpu_plan(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
    """Complete a plan for a GPU; a pure function of sizes and of the properties of the GPU.

    Ratings stay on the GPU or, if they do not fit, are streamed; factors that do not fit either are loaded in parts.
    """
    assert spec is not None
    plan = choices(plan, settings, objective, spec)
    dual = plan.changed(dual_sides=dual_sides(plan, objective))
    check_row_form(dual, objective)
    whole = _in_memory(dual)
    if dual.dual_sides and plan.row_form != "dual" and memory_lacks(whole):
        whole = _in_memory(plan)
    stays = plan.row_form == "dual" or plan.reorder != "none" or plan.tile_rows or plan.solver == "subspace"
    if stays or not memory_lacks(whole):
        return whole
    return _streamed(plan) or _offloaded(plan) or whole


def _in_memory(plan: Plan) -> Plan:
    assert plan.gpu is not None
    whole = plan.changed(streamed="", slab=0)
    scale = plan_ranks(whole, 1, plan.gpu.free_bytes, _machine(plan))
    return _with_memory(plan.changed(resident=bool(plan.streamed)), scale)


def _streamed(plan: Plan) -> Plan | None:
    """The plan that streams ratings in the slabs of a store, or from host memory; None if not even single rows fit."""
    assert plan.gpu is not None
    free, machine, scale = plan.gpu.free_bytes, _machine(plan), None
    place: Place = "disk" if plan.streamed and not host_has_room(plan) else "host"
    if plan.streamed:
        half, entries = HalfPlan("user", 1, 1, 1, place, split=False), SLAB_BUFFERS * plan.slab
        least = -(-plan.nnz // plan.slab)
        found = {s: fewest_batches(plan, replace(half, side=s), machine, free, least, entries) for s in SIDES}
        halves = {side: half for side, half in found.items() if half is not None}
        scale = ScalePlan(plan, machine, 1, free, halves) if len(halves) == len(SIDES) else None
    else:
        scale = plan_streamed_ranks(plan, 1, free, place, STREAM_SLAB, machine, model_parallel_only=True)
    if scale is None:
        return None
    if not plan.streamed:
        plan = plan.changed(slab=max(map(scale.slab, SIDES)), notes=(*plan.notes, streaming_note(plan, "GPU")))
    return _with_memory(plan.changed(streamed=place), scale)


def _machine(plan: Plan) -> machines.Machine:
    assert plan.gpu is not None
    return machines.machine().with_gpu(plan.gpu)


def _with_memory(plan: Plan, scale: ScalePlan) -> Plan:
    """The plan with the memory and the batches of a partition."""
    # each half sweep with offloaded factors has its own number
    memory = scale.memory if plan.scale is None else 0
    slots = slots_of_both(scale.plan, scale.halves.values(), memory)
    sizes = {name: size for name, size in scale.fullest.bytes.items() if size}
    sizes["systems"] = max(sizes.get("systems", 0), slots * slot_bytes(plan))
    return plan.changed(bytes=sizes, batch_slots=slots)


def _offloaded(plan: Plan) -> Plan | None:
    """The plan with offloaded factors, in host memory or in files; None if not even parts of them fit on the GPU."""
    free, needed = system.available_memory(), plan.offloaded_bytes
    # empty if the factors fit in host memory, or if no folder has room
    folder = "" if free is None or needed <= free else find_room(plan.scratch, needed)[0]
    factors: Place = "disk" if folder else "host"
    beside = 0 if folder else needed
    ratings: Place = "disk" if plan.streamed and not host_has_room(plan, beside) else "host"
    slab = host_slab(plan, ratings)
    assert plan.gpu is not None
    scale = plan_host_ranks(plan, 1, plan.gpu.free_bytes, ratings, slab, _machine(plan), factors=factors)
    if scale is None:
        return None
    note = "the factors do not fit on the GPU: they stay in the memory of the host"
    if folder:
        note = f"the factors do not fit on the GPU, nor in the memory of the host: they are in files in {folder!r}"
    plan = plan.changed(notes=(*plan.notes, note), scratch=(folder,) if folder else plan.scratch)
    plan = plan.changed(streamed=ratings, slab=max(map(scale.slab, scale.halves)), scale=scale)
    return _with_memory(plan, scale)


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


def host_has_room(plan: Plan, beside: int = 0) -> bool:
    """Whether all ratings of a store, in both orientations, fit in host memory together with `beside` bytes."""
    loaded = 2 * plan.nnz * (4 + plan.itemsize) + 8 * (plan.n_users + plan.n_items)
    free = system.available_memory()
    # leaves room for other programs, and for the system, which cannot page out locked memory
    return free is not None and 2 * loaded + beside < free


def streaming_note(plan: Plan, where: str) -> str:
    moved = 2 * plan.nnz * (4 + plan.itemsize)
    return f"the ratings do not fit on the {where}: {mib(moved)} come from the memory of the host in each iteration"


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
        return _with_memory(plan, scale)
    beside = max(half.total_bytes - half.bytes["systems"] for half in scale.halves.values())
    left = min(BATCH_BYTES, max(0, free - beside))
    most = PUBLISHED_BATCH if plan.variant == PUBLISHED else left
    slots = max(min(left // slot_bytes(plan), most), plan.tile_rows, 1)
    return plan.changed(bytes=scale.fullest.bytes, batch_slots=slots)


def _spread(plan: Plan, free: int) -> ScalePlan:
    """Partition ALS over GPUs with `free` bytes of memory each.

    Ratings stay on the GPUs or, if they do not fit, are streamed to GPUs that solve their own rows. If a complete fixed
    side does not fit, it is split over the GPUs or loaded from the host, whichever is predicted to be faster.
    """
    assert plan.gpu is not None
    machine, ranks, stored = _machine(plan), len(plan.devices), bool(plan.streamed)
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
