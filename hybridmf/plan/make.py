"""Plan: every size and choice of one run, decided before any work, by pure functions; printable."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..core import system
from ..core.scratch import SCRATCH_DIR, find_room, scratch_folders
from ..core.system import available_memory, mib
from ..device.cuda import DeviceSpec
from ..errors import DeviceError, DeviceMemoryError, MemoryBudgetError
from ..native import _als
from . import assemblies, dispatch, fused
from .memory import cpu_bytes, system_bytes, tile_pointers
from .ranks import (
    PIECE_BYTES,
    SLAB_BUFFERS,
    Place,
    Problem,
    ScalePlan,
    plan_host_ranks,
    plan_ranks,
    plan_streamed_ranks,
    slots_at_once,
)
from .types import (
    BATCH_FLOPS,
    CPU_ASSEMBLIES,
    GPU_ASSEMBLIES,
    GPU_BATCH_BYTES,
    GPU_SOLVERS,
    PRECISIONS,
    SOLVERS,
    VARIANTS,
    Facts,
    Kernels,
    Placement,
    Plan,
    Settings,
    Sizes,
    _instruction_set_notes,
    _slot_bytes,
    gpu_segment,
)

if TYPE_CHECKING:
    import scipy.sparse as sp

    from ..core.objective import Objective
    from ..data.store import StoreMatrix

logger = logging.getLogger("hybridmf")

L2_ACCUMULATORS = 512 * 1024
"""Bytes of a thread's BALS accumulators: half of a 1 MB L2, so that the tile and the gathered rows fit beside them."""

L2_TILE = 128 * 1024
"""Bytes of factor rows one BALS tile stages."""

REORDER_BYTES = 4 << 20
"""Factors of both sides from which degree order helps BALS tiles on the CPU: smaller ones lie in its cache anyway."""

REORDER_DEGREE = 16
"""Mean entries of a row of either side from which it does: in sparser tiles no two rows share a column, in any order.

Both bounds divide what bench/layouts.py measures (docs/performance.md): BALS gains 3 to 15 % by degree order beyond
both (ML-10M's shape; ML-1M's at f = 128) and loses up to 25 % elsewhere (ML-1M's shape below f = 128, Epinions')."""

HOST_BATCH_BYTES = 256 << 20
"""The same where factors come from the host: rows that are there together save loads, these only launches."""

STREAM_BUFFERS = SLAB_BUFFERS
"""Slabs on a GPU at a time."""

STREAM_SLAB = 16 << 20
"""Entries of a slab that ratings in memory are cut to: its copy takes 2.4 ms on a PCIe 5 bus. With each slab some
kernels end before others begin: on an H200 that costs 0.25 ms."""

CPU_PARTIAL_BYTES = 256 << 20
"""Systems that a rank on the CPU sums at a time where several ranks share them."""


def make_plan(
    objective: Objective,
    settings: Settings,
    shape: tuple[int, int],
    nnz: int,
    facts: Facts | None = None,
    slab: int | None = None,
    beside: str | os.PathLike[str] | None = None,
) -> Plan:
    """Decide everything about a fit from its sizes, and from what is known of the degrees, before any work.

    `slab`: entries of the largest slab of a store, None for ratings in memory. `beside`: folder that the store is in,
    the first choice for files of factors that have no room in memory.

    Raises
    ------
    DeviceError
        The device cannot be served.
    ValueError
        A combination that makes no sense on this device, or a weight too large for the type of the computation.
    """
    objective.check_finite_in(np.dtype(settings.dtype))
    devices: tuple[str, ...] = ()
    if isinstance(settings.device, tuple):
        devices = settings.device if len(settings.device) > 1 else ()
        if settings.method is not None:
            spec, reason = None, "asked for"  # the method looks at each
        else:
            spec, reason = _find_ranks(settings.device)
            if not devices:
                settings = replace(settings, device=settings.device[0])
    else:
        spec, reason = dispatch.find_gpu(settings.device)
    plan = _undecided(objective, settings, shape, nnz)
    scratch = scratch_folders(beside)
    plan = plan.changed(reason=reason, devices=devices, facts=facts, scratch=scratch)
    if slab is not None and settings.method is None:
        plan = _stored(plan, slab)
    if settings.method is not None:
        decided = settings.method.plan(plan, settings, spec)
    elif devices:
        decided = _plan_ranks(plan, replace(settings, device=devices[0]), objective, spec)
    else:
        decided = dispatch.choose(_als_request(plan, settings, objective, spec))
    for note in _instruction_set_notes():
        if note in decided.notes:
            logger.warning(note)
    return decided


def plan_for(matrix: sp.csr_array | StoreMatrix, objective: Objective, settings: Settings) -> Plan:
    """`make_plan` for ratings that are there, whose degrees are counted as far as the plan depends on them."""
    slab, store = getattr(matrix, "largest_slab", None), getattr(matrix, "store", None)
    beside = None if store is None else store.path.parent

    def plan(items: bool) -> Plan:
        facts = Facts.of(matrix, items=items)
        return make_plan(objective, settings, matrix.shape, matrix.nnz, facts, slab, beside)

    found = plan(items=settings.method is not None or slab is not None)
    return plan(items=True) if found.asks_for_degrees else found


def _undecided(objective: Objective, settings: Settings, shape: tuple[int, int], nnz: int) -> Plan:
    """What was asked for, "auto" included."""
    rank = settings.factors + (1 if objective.biases else 0)
    assembly, variant = VARIANTS.get(settings.assembly, (settings.assembly, ""))
    problem = Sizes(
        n_users=shape[0],
        n_items=shape[1],
        nnz=nnz,
        factors=settings.factors,
        rank=rank,
        feedback=objective.feedback,
        dtype=settings.dtype,
    )
    kernels = Kernels(
        method=settings.method,
        solver=settings.solver,
        cg_steps=settings.cg_steps,
        block_size=min(settings.block_size, rank),
        assembly=assembly,
        variant=variant,
        reorder=settings.reorder,
        precision=settings.precision,
        instruction_set=_als.instruction_set(),
        balance=settings.balance,
        batch_flops=BATCH_FLOPS * settings.num_threads,
    )
    return Plan(problem, Placement("cpu", "", settings.num_threads), kernels)


def _find_ranks(names: tuple[str, ...]) -> tuple[DeviceSpec | None, str]:
    """The first of several devices, with the memory of the one that has least free; and the reason."""
    specs = []
    for name in names:
        spec, reason = dispatch.find_gpu(name)
        specs.append(spec)
    found = [spec for spec in specs if spec is not None]
    if not found:
        return None, reason
    return replace(found[0], free_bytes=min(spec.free_bytes for spec in found)), reason


def _plan_ranks(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
    """ALS on several devices: each computes as it would alone, on its part."""
    if spec is None:
        plan = _cpu_plan(plan, settings)
        # the ranks share memory: all of them together need the gathered side, and each the slab it reads
        sizes, ranks = dict(plan.bytes), len(plan.devices)
        itemsize = np.dtype(plan.dtype).itemsize
        sizes["gathered"] = ranks * max(plan.n_users, plan.n_items) * plan.rank * itemsize
        if plan.streamed:
            sizes["ratings"] += 2 * (ranks - 1) * plan.slab * (itemsize + 4)
        slots = max(1, CPU_PARTIAL_BYTES // system_bytes(plan))
        return plan.changed(bytes=sizes, batch_slots=slots)
    plan = _gpu_choices(plan, settings, objective, spec)
    assert plan.gpu is not None
    free = plan.gpu.free_bytes
    scale = _spread(plan, free)
    plan = _placed(plan, scale)
    if scale.factors != "device":
        return _with_scale(plan, scale)
    fullest = max(scale.halves.values(), key=lambda half: sum(half.bytes.values()))
    beside = max(sum(half.bytes.values()) - half.bytes["systems"] for half in scale.halves.values())
    left = min(GPU_BATCH_BYTES, max(0, free - beside))
    slots = max(left // _slot_bytes(plan), plan.tile_rows, 1)
    return plan.changed(scale=scale, bytes=fullest.bytes, batch_slots=slots)


def _with_scale(plan: Plan, scale: ScalePlan) -> Plan:
    """The plan with factors that do not stay on GPUs."""
    fullest = max(scale.halves.values(), key=lambda half: sum(half.bytes.values()))
    sizes = {name: size for name, size in fullest.bytes.items() if size}
    slots = min(slots_at_once(scale.problem, half) for half in scale.halves.values())
    return plan.changed(scale=scale, bytes=sizes, batch_slots=slots)


def _spread(plan: Plan, free: int) -> ScalePlan:
    """How ALS spreads over GPUs of so much memory.

    With its ratings on them or, if those do not fit, streamed to GPUs that solve their own rows; if these have no room
    for a whole fixed side, it is split over them or comes from the host, whichever is predicted to be faster.
    """
    itemsize = np.dtype(plan.dtype).itemsize
    problem = Problem((plan.n_users, plan.n_items), plan.nnz, plan.rank, itemsize, longest=plan.problem.longest)
    ranks, stored = len(plan.devices), bool(plan.streamed)
    # tiles need whole rows, and so do slabs of a store that stay on a GPU
    scale = plan_ranks(problem, ranks, free, model_parallel_only=plan.tile_rows > 0 or stored)
    if scale.bytes_per_gpu <= free or plan.tile_rows or plan.reorder != "none":
        return scale
    place: Place = "disk" if stored and not _host_has_room(plan) else "host"
    streamed = plan_streamed_ranks(problem, ranks, free, place, STREAM_SLAB, model_parallel_only=True)
    if streamed is not None:
        return streamed
    split = plan_streamed_ranks(problem, ranks, free, place, STREAM_SLAB)
    if split is not None and not stored and not _room_for_copies(split):
        split = None
    if stored and not _host_has_room(plan, plan.offloaded_bytes):
        place = "disk"
    offloaded = plan_host_ranks(host_problem(plan), ranks, free, place, _host_slab(plan, place))
    found = [other for other in (split, offloaded) if other is not None]
    return min(found, key=lambda other: other.seconds, default=scale)


def _room_for_copies(scale: ScalePlan) -> bool:
    """Whether the host has room for what ranks cut out of ratings in memory, where they share rows."""
    copied = sum(half.fixed == "split" for half in scale.halves.values()) * scale.problem.nnz
    free = available_memory()
    return free is None or copied * scale.problem.entry_bytes < free


def _host_slab(plan: Plan, place: Place) -> int:
    """Entries of a slab where factors are on the host: of the store that is read, or what copies and launches want."""
    return plan.slab if place == "disk" else STREAM_SLAB


def host_problem(plan: Plan) -> Problem:
    """Sizes that decide in which parts factors come from the host."""
    assert plan.gpu is not None
    return Problem(
        (plan.n_users, plan.n_items),
        plan.nnz,
        plan.rank,
        np.dtype(plan.dtype).itemsize,
        sums=_slot_bytes(plan),
        segment=plan.segment,
        biases=plan.rank > plan.factors,
        warm_start=plan.solver != "cholesky",
        on_chip=plan.assembly == "fused" and plan.rank < fused.SOLVED_APART,
        batch=max(1, min(HOST_BATCH_BYTES, plan.gpu.free_bytes // 8)),
        longest=plan.problem.longest,
    )


def _placed(plan: Plan, scale: ScalePlan) -> Plan:
    """The plan with its ratings where `scale` has them between half sweeps."""
    if scale.ratings == "device":
        return plan.changed(resident=bool(plan.streamed))
    notes = list(plan.notes)
    if scale.factors != "device":
        notes.append("the factors do not fit on the GPUs: they stay in the memory of the host")
    else:
        if not plan.streamed:
            notes.append(_streaming_note(plan, f"{scale.gpus} GPUs"))
        split = [f"{side}s" for side, half in scale.halves.items() if half.fixed == "split"]
        if split:
            notes.append(f"the fixed side of {' and '.join(split)} is split over the GPUs, which add up sums")
    return plan.changed(streamed=scale.ratings, slab=max(map(scale.slab, scale.halves)), notes=tuple(notes))


def _als_request(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> dispatch.Request:
    """What a fit by ALS asks of the dispatcher."""

    def on_gpu(undecided: Plan) -> Plan:
        assert spec is not None
        return gpu_plan(undecided, settings, objective, spec)

    cpu_only = ""
    if plan.solver not in GPU_SOLVERS:
        cpu_only = f"solver={plan.solver!r} is the CPU's"
    elif plan.assembly not in ("auto", *GPU_ASSEMBLIES):
        cpu_only = f"assembly={plan.assembly!r} is the CPU's"
    return dispatch.Request(
        plan,
        settings,
        spec,
        on_cpu=lambda undecided: _cpu_plan(undecided, settings),
        on_gpu=on_gpu,
        cpu_only=cpu_only,
        gpu_only=plan.assembly_name not in ("auto", *CPU_ASSEMBLIES) or plan.precision != "float32",
        others=tuple(_other_ways(plan, spec)),
    )


def _other_ways(plan: Plan, spec: DeviceSpec | None) -> Iterator[Plan]:
    """Every assembly, solver and precision there is for the sizes of a plan."""
    ways = [("simd", solver, "float32") for solver in SOLVERS]
    ways += [(assembly, "cholesky", "float32") for assembly in CPU_ASSEMBLIES[1:]]
    if spec is not None:
        ways += [("fused", solver, precision) for solver in GPU_SOLVERS for precision in PRECISIONS]
        ways += [(assembly, solver, "float32") for assembly in GPU_ASSEMBLIES[1:] for solver in GPU_SOLVERS]
    for assembly, solver, precision in dict.fromkeys(ways):
        yield plan.changed(assembly=assembly, variant="", solver=solver, precision=precision)


def _cpu_plan(plan: Plan, settings: Settings) -> Plan:
    """What runs how on the CPU."""
    notes = _instruction_set_notes()
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
    itemsize = np.dtype(plan.dtype).itemsize
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
    )
    return plan.changed(bytes=cpu_bytes(plan))


def _cpu_reordering(plan: Plan, assembly: str) -> str:
    """Degree order lets a row block share its popular columns; the other assemblies read rows one by one anyway."""
    if plan.reorder != "auto":
        return plan.reorder
    rows = plan.n_users + plan.n_items
    pays = (
        assembly == "bals"
        and plan.nnz >= REORDER_DEGREE * rows
        and rows * plan.rank * np.dtype(plan.dtype).itemsize >= REORDER_BYTES
    )
    return "both" if pays else "none"


def _stored(plan: Plan, slab: int) -> Plan:
    """The plan for ratings that are read from a store."""
    if plan.reorder not in ("auto", "none"):
        raise ValueError(
            f"reorder={plan.reorder!r} needs all ratings in memory, and a store is read slab by slab; "
            'use reorder="none", or fit store.to_ratings()'
        )
    return plan.changed(reorder="none", streamed="disk", slab=slab)


# ---------------------------------------------------------------------------------------------------- GPU


def _gpu_reordering(asked: str, assembly: str) -> str:
    """Degree order makes a GPU's BALS tiles 1.4 to 1.8 times as fast (docs/performance.md)."""
    if asked != "auto":
        return asked
    return "both" if assembly == "bals" else "none"


def gpu_plan(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec) -> Plan:
    """What runs how on a GPU; a pure function of sizes and of what the GPU is.

    Raises
    ------
    ValueError
        A combination that GPUs do not serve.
    """
    plan = _gpu_choices(plan, settings, objective, spec)
    assert plan.gpu is not None
    spec = plan.gpu
    whole = _with_batches(plan.changed(streamed="", slab=0), _gpu_fixed_bytes(plan), spec)
    if plan.streamed:
        return _gpu_stored(plan, whole, spec)
    if not dispatch.memory_lacks(whole) or plan.reorder != "none" or plan.tile_rows:
        return whole
    streamed = _gpu_streamed(plan, spec)
    if not dispatch.memory_lacks(streamed):
        return streamed
    return _offloaded(plan, spec) or whole


def _offloaded(plan: Plan, spec: DeviceSpec) -> Plan | None:
    """The plan with factors in the memory of the host or in files; None if not even their parts fit on the GPU."""
    folder = _folder_for_factors(plan)
    factors: Place = "disk" if folder else "host"
    beside = 0 if folder else plan.offloaded_bytes
    ratings: Place = "disk" if plan.streamed and not _host_has_room(plan, beside) else "host"
    slab = _host_slab(plan, ratings)
    scale = plan_host_ranks(host_problem(plan), 1, spec.free_bytes, ratings, slab, factors=factors)
    if scale is None:
        return None
    note = "the factors do not fit on the GPU: they stay in the memory of the host"
    if folder:
        note = f"the factors do not fit on the GPU, nor in the memory of the host: they are in files in {folder!r}"
    plan = plan.changed(notes=(*plan.notes, note), scratch=(folder,) if folder else plan.scratch)
    return _with_scale(plan.changed(streamed=ratings, slab=max(map(scale.slab, scale.halves))), scale)


def _folder_for_factors(plan: Plan) -> str:
    """Where files of factors go that the memory of the host has no room for; empty if it has, or if nothing has."""
    free, needed = available_memory(), plan.offloaded_bytes
    return "" if free is None or needed <= free else find_room(plan.scratch, needed)[0]


def _gpu_choices(plan: Plan, settings: Settings, objective: Objective, spec: DeviceSpec) -> Plan:
    """Kernels and the memory there is; not yet where the ratings are."""
    if plan.solver not in GPU_SOLVERS:
        raise ValueError(f"solver={plan.solver!r} runs on the CPU only; on a GPU use one of {', '.join(GPU_SOLVERS)}")
    limit = settings.gpu_memory_limit
    if limit is not None:
        spec = replace(spec, free_bytes=min(spec.free_bytes, limit))
    plan = plan.changed(device=f"cuda:{spec.index}", gpu=spec)
    why_not = fused.supports(plan.rank, plan.dtype, spec, objective.unobserved_weight if objective.is_implicit else 0.0)
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
        tile_rows, tile_cols = assemblies.bals_tile_sizes(
            plan.rank, np.dtype(plan.dtype).itemsize, spec, local=plan.variant == "local"
        )
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


def _gpu_stored(plan: Plan, whole: Plan, spec: DeviceSpec) -> Plan:
    """Where the slabs of a store stay: on the GPU, in the memory of the host, or on the disk; the first that fits."""
    if not dispatch.memory_lacks(whole):
        return whole.changed(streamed="disk", slab=plan.slab, resident=True)
    where: Place = "host" if _host_has_room(plan) else "disk"
    streamed = _with_batches(plan.changed(streamed=where), _streamed_bytes(plan), spec)
    if not dispatch.memory_lacks(streamed):
        return streamed
    return _offloaded(plan, spec) or streamed


def _host_has_room(plan: Plan, beside: int = 0) -> bool:
    """Whether all ratings of a store may be in the memory of the host, both orientations, beside so many bytes."""
    loaded = 2 * plan.nnz * (4 + np.dtype(plan.dtype).itemsize) + 8 * (plan.n_users + plan.n_items)
    free = available_memory()
    # room for the user's other things, and for what page-locking takes away from the system
    return free is not None and 2 * loaded + beside < free


def _streaming_note(plan: Plan, where: str) -> str:
    """What a plan says of ratings in memory that it streams."""
    moved = 2 * plan.nnz * (4 + np.dtype(plan.dtype).itemsize)
    return f"the ratings do not fit on the {where}: {mib(moved)} come from the memory of the host in each iteration"


def _gpu_streamed(plan: Plan, spec: DeviceSpec) -> Plan:
    """The plan of streaming ratings that are in the memory of the host, in slabs that fit."""
    itemsize = np.dtype(plan.dtype).itemsize
    left = spec.free_bytes - sum(_streamed_bytes(plan).values())
    # half of it for the buffers, the other half for batches
    slab = int(np.clip(left / 2 / (STREAM_BUFFERS * (4 + itemsize)), 1, STREAM_SLAB))
    slab = min(max(slab, *plan.problem.longest), plan.nnz)  # a row is never cut
    plan = plan.changed(streamed="host", slab=slab, notes=(*plan.notes, _streaming_note(plan, "GPU")))
    return _with_batches(plan, _streamed_bytes(plan), spec)


def _streamed_bytes(plan: Plan) -> dict[str, int]:
    """`_gpu_fixed_bytes` with a few slabs in place of all ratings."""
    sizes, itemsize = _gpu_fixed_bytes(plan), np.dtype(plan.dtype).itemsize
    sizes["ratings"] += (STREAM_BUFFERS * plan.slab - 2 * plan.nnz) * (4 + itemsize)
    return sizes


def _with_batches(plan: Plan, sizes: dict[str, int], spec: DeviceSpec) -> Plan:
    """The plan with as many systems at a time as memory allows."""
    slot_bytes = _slot_bytes(plan)
    most = _most_slots(plan, max(plan.n_users, plan.n_items))
    left = min(GPU_BATCH_BYTES, max(0, spec.free_bytes - sum(sizes.values())))
    # BALS assembles whole blocks of rows; the others sum all segments of a row together
    least = plan.tile_rows or max(1, -(-max(plan.problem.longest) // plan.segment))
    slots = int(np.clip(left // slot_bytes, least, max(least, most)))
    return plan.changed(batch_slots=slots, bytes=sizes | {"batch": slots * slot_bytes})


def _most_slots(plan: Plan, rows: int) -> int:
    """Systems and segments of them that so many rows of a side may have."""
    # a row has one slot, and one more for each segment it is cut into; solved at once, only long rows need any
    cuts = plan.nnz // plan.segment
    at_once = plan.assembly == "fused" and plan.rank < fused.SOLVED_APART
    return cuts + (cuts if at_once else rows) + 1


def _gpu_fixed_bytes(plan: Plan) -> dict[str, int]:
    """Memory by purpose that does not depend on the size of batches."""
    m, n, nnz = plan.n_users, plan.n_items, plan.nnz
    itemsize = np.dtype(plan.dtype).itemsize
    width = system.round_up(plan.rank, 16 // itemsize)
    if plan.rank > plan.factors:  # biases beside them, and what ratings owe to the fixed side's
        width += 2
    sizes = {
        # both orientations; offsets, order, scale and status of each row
        "ratings": 2 * nnz * (4 + itemsize) + (m + n) * (8 + 4 + itemsize + 4),
        # old and new factors of the side being solved, so that an interrupted half sweep leaves no trace
        "factors": (m + n + max(m, n)) * width * itemsize,
    }
    if not plan.tile_rows:
        sizes["ratings"] += sum(_most_slots(plan, rows) for rows in (m, n)) * PIECE_BYTES
    else:
        sizes["tiles"] = 2 * nnz * (8 + itemsize) + 8 * (tile_pointers(m, n, plan) + tile_pointers(n, m, plan))
    return sizes


# ---------------------------------------------------------------------------------------------------- both


def check_memory(plan: Plan) -> None:
    """Refuse a plan that cannot fit before it allocates anything."""
    if plan.gpu is not None:
        lack = dispatch.memory_lacks(plan)
        if lack:
            raise DeviceMemoryError(
                f"{lack}; {_long_row(plan)}{_needs_all(plan)}use fewer factors, a GPU with more memory, free what "
                'other programs hold, or device="cpu"'
            )
        _check_host(plan)
        return
    free = available_memory()
    if free is not None and plan.total_bytes > free:
        raise MemoryBudgetError(
            f"the fit needs about {mib(plan.total_bytes)} and {mib(free)} are free "
            f"({', '.join(f'{name} {mib(size)}' for name, size in plan.bytes.items())}); "
            "use fewer factors, dtype='float32', fewer threads, or a larger machine"
        )


def _needs_all(plan: Plan) -> str:
    """What of a plan keeps ratings and factors on the GPU, and what to do about it; empty if nothing."""
    if plan.method is not None:
        return ""
    if plan.tile_rows:
        return 'assembly="bals" needs ratings and factors on the GPU, assembly="auto" streams them; or '
    return (
        'reorder= needs ratings and factors on the GPU, reorder="none" streams them; or '
        if (plan.reorder != "none")
        else ""
    )


def _long_row(plan: Plan) -> str:
    """What the longest row keeps a plan from, and what to do about it; empty if it is not in the way."""
    entries = max(plan.problem.longest)
    size = STREAM_BUFFERS * entries * (4 + np.dtype(plan.dtype).itemsize)
    if plan.gpu is None or plan.facts is None or plan.method is not None or _needs_all(plan):
        return ""
    if 4 * size <= plan.gpu.free_bytes:
        return ""
    user = plan.problem.longest[0] == entries
    row = f"{'user' if user else 'item'} {plan.facts.positions[0 if user else 1]}"
    return (
        f"a row is never cut, so that slabs which hold {row} with its {entries:,} entries take {mib(size)}: leave some "
        "of them out; or "
    )


def _check_host(plan: Plan) -> None:
    """Refuse factors that are to stay on the host and do not fit there."""
    free = available_memory()
    if free is None or plan.host_bytes <= free:
        return
    files = ", or one GPU alone, which may have factors in files"
    if not plan.devices:
        problem = find_room(plan.scratch, plan.host_bytes)[1]
        files = f", or set {SCRATCH_DIR} to a folder on a disk with room for files of that size"
        files += f" ({problem})" if problem else ""
    raise MemoryBudgetError(
        f"the factors do not fit on {plan.gpu.name if plan.gpu else 'the GPU'}, and in the memory of the host they "
        f"need about {mib(plan.host_bytes)}, of which {mib(free)} are free; use fewer factors, or a GPU or a host "
        f"with more memory{files}"
    )
