"""Plan of ALS on several devices: the partition, and the location of ratings and factors."""

from __future__ import annotations

from dataclasses import replace

from ..core import system
from ..core.objective import Objective
from ..device.cuda import DeviceSpec
from . import dispatch
from . import machine as machines
from .als_cpu import cpu_plan
from .als_gpu import (
    STREAM_SLAB,
    basis_bytes,
    choices,
    gpu_problem,
    host_has_room,
    host_problem,
    host_slab,
    slot_bytes,
    streaming_note,
    with_scale,
)
from .half_sweep import BATCH_BYTES, Place
from .partitions import plan_host_ranks, plan_ranks, plan_streamed_ranks
from .ranks import ScalePlan
from .row_forms import check_row_form, dual_sides
from .types import Plan, Settings


def find_ranks(names: tuple[str, ...]) -> tuple[DeviceSpec | None, str]:
    """The first of several devices, with the smallest free memory of all of them; and the reason."""
    specs = []
    for name in names:
        spec, reason = dispatch.find_gpu(name)
        specs.append(spec)
    found = [spec for spec in specs if spec is not None]
    if not found:
        return None, reason
    return replace(found[0], free_bytes=min(spec.free_bytes for spec in found)), reason


def ranks_plan(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
    """Complete a plan of ALS for several devices, each of which solves its part."""
    if spec is None:
        plan = cpu_plan(plan, settings, objective)
        # the ranks share memory: all of them together need the gathered side, and each the slab it reads
        sizes, ranks = dict(plan.bytes), len(plan.devices)
        itemsize = plan.itemsize
        sizes["gathered"] = ranks * max(plan.n_users, plan.n_items) * plan.rank * itemsize
        if plan.streamed:
            sizes["ratings"] += 2 * (ranks - 1) * plan.slab * (itemsize + 4)
        return plan.changed(bytes=sizes)
    plan = choices(plan, settings, objective, spec)
    assert plan.gpu is not None
    free = plan.gpu.free_bytes
    scale = _spread(plan, free)
    plan = _placed(plan, scale)
    check_row_form(plan.changed(scale=scale), objective)
    if scale.factors != "device":
        return with_scale(plan, scale)
    plan = plan.changed(scale=scale)
    dual = plan.changed(dual_sides=dual_sides(plan, objective))
    basis = basis_bytes(dual)
    if plan.row_form == "dual" or scale.bytes_per_gpu + basis <= free:
        plan = dual
    else:
        basis = 0
    fullest = max(scale.halves.values(), key=lambda half: sum(half.bytes.values()))
    beside = max(sum(half.bytes.values()) - half.bytes["systems"] for half in scale.halves.values())
    left = min(BATCH_BYTES, max(0, free - beside - basis))
    slots = max(left // slot_bytes(plan), plan.tile_rows, 1)
    return plan.changed(bytes=fullest.bytes | ({"basis": basis} if basis else {}), batch_slots=slots)


def _spread(plan: Plan, free: int) -> ScalePlan:
    """Partition ALS over GPUs with `free` bytes of memory each.

    Ratings stay on the GPUs or, if they do not fit, are streamed to GPUs that solve their own rows. If a complete fixed
    side does not fit, it is split over the GPUs or loaded from the host, whichever is predicted to be faster.
    """
    assert plan.gpu is not None
    problem, machine = gpu_problem(plan), machines.machine().with_gpu(plan.gpu)
    ranks, stored = len(plan.devices), bool(plan.streamed)
    # tiles need whole rows, and so do slabs of a store that stay on a GPU
    scale = plan_ranks(problem, ranks, free, machine, model_parallel_only=plan.tile_rows > 0 or stored)
    if scale.bytes_per_gpu <= free or plan.tile_rows or plan.reorder != "none":
        return scale
    place: Place = "disk" if stored and not host_has_room(plan) else "host"
    streamed = plan_streamed_ranks(problem, ranks, free, place, STREAM_SLAB, machine, model_parallel_only=True)
    if streamed is not None:
        return streamed
    split = plan_streamed_ranks(problem, ranks, free, place, STREAM_SLAB, machine)
    if split is not None and not stored and not _room_for_copies(split):
        split = None
    if stored and not host_has_room(plan, plan.offloaded_bytes):
        place = "disk"
    offloaded = plan_host_ranks(host_problem(plan), ranks, free, place, host_slab(plan, place), machine)
    found = [other for other in (split, offloaded) if other is not None]
    return min(found, key=lambda other: other.seconds, default=scale)


def _room_for_copies(scale: ScalePlan) -> bool:
    """Whether the host has memory for the copies of in-memory ratings that ranks make if they share rows."""
    copied = sum(half.fixed == "split" for half in scale.halves.values()) * scale.problem.nnz
    free = system.available_memory()
    return free is None or copied * scale.problem.entry_bytes < free


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
