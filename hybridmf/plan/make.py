"""Makes the plan of a fit: every size and choice, decided by pure functions before any work."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..core import system
from ..core.scratch import SCRATCH_DIR, find_room, scratch_folders
from ..core.system import mib
from ..errors import DeviceError, DeviceMemoryError, MemoryBudgetError
from ..native import _als
from . import dispatch
from .extras import equation_bytes, unserved, with_extras
from .half_sweep import SLAB_BUFFERS
from .types import BATCH_FLOPS, VARIANTS, DegreeFacts, Plan, Settings, instruction_set_notes, memory_lacks, seconds_text

if TYPE_CHECKING:
    import scipy.sparse as sp

    from ..core.objective import Objective
    from ..data.store import StoreMatrix

logger = logging.getLogger("hybridmf")


@dataclass(frozen=True)
class Held:
    """Ratings that are on a GPU before the fit, in both orientations."""

    device: str = ""  # "cuda:N"; empty for none
    size: int = 0  # bytes of GPU memory

    def serves(self, plan: Plan) -> bool:
        """Whether a fit by this plan reads them from the memory of that GPU."""
        return plan.ratings_on_device and not plan.devices and plan.device == self.device


NOTHING = Held()


def make_plan(
    objective: Objective,
    settings: Settings,
    shape: tuple[int, int],
    nnz: int,
    facts: DegreeFacts | None = None,
    slab: int | None = None,
    beside: str | os.PathLike[str] | None = None,
    held: Held = NOTHING,
) -> Plan:
    """Plan a fit from its sizes and the known properties of the degrees.

    `slab`: entries of the largest slab of a store, None for ratings in memory. `beside`: folder of the store, the first
    choice for files of factors that do not fit in memory. `held`: memory of a GPU that counts as free.
    """
    objective.check_finite_in(np.dtype(settings.dtype))
    settings = with_extras(settings)
    start = dispatch.gpu_start_seconds(settings.device)
    if slab is None and start:
        plan = _short_on_cpu(objective, settings, shape, nnz, facts, start)
        if plan is not None:
            return plan
    devices: tuple[str, ...] = ()
    if isinstance(settings.device, tuple):
        spec, reason = None, "asked for"  # the method validates each device
        devices = settings.device if len(settings.device) > 1 else ()
    else:
        spec, reason = dispatch.find_gpu(settings.device)
        if spec is not None and f"cuda:{spec.index}" == held.device:
            spec = replace(spec, free_bytes=spec.free_bytes + held.size)
    plan = undecided(objective, settings, shape, nnz).changed(
        reason=reason, devices=devices, facts=facts, scratch=scratch_folders(beside)
    )
    if slab is not None and settings.method.streams:
        plan = plan.changed(streamed="disk", slab=slab)
    decided = settings.method.plan(plan, settings, objective, spec)
    why = unserved(decided)
    if why and settings.device == "auto" and decided.gpu is not None:
        logger.info("%s; device='auto' chose the CPU", why)
        decided = settings.method.plan(plan.changed(reason=why), replace(settings, device="cpu"), objective, None)
        why = unserved(decided)
    if why:
        raise ValueError(why)
    for note in instruction_set_notes():
        if note in decided.notes:
            logger.warning(note)
    return decided if settings.reduction == "auto" else _with_reduction(decided, settings.reduction)


def _short_on_cpu(
    objective: Objective, settings: Settings, shape: tuple[int, int], nnz: int, facts: DegreeFacts | None, start: float
) -> Plan | None:
    """The CPU's plan if the fit takes at most `start` seconds; None if a GPU may win, or has to serve."""
    try:
        plan = make_plan(objective, replace(settings, device="cpu"), shape, nnz, facts)
    except (DeviceError, ValueError):
        return None
    seconds = plan.decisive[0].total_seconds
    if seconds > start:
        return None
    reason = f"in about {seconds_text(seconds)} done on the CPU, before a GPU is started ({seconds_text(start)})"
    logger.info("device='auto' chose the CPU: %s", reason)
    return plan.changed(reason=reason)


def _with_reduction(plan: Plan, reduction: str) -> Plan:
    if all(grid.splits == 1 for grid in plan.grids.values()):
        raise ValueError(
            f"reduction={reduction!r} is a way for several GPUs to add up sums over a fixed side that is split over "
            f'them, and the plan splits none on {plan.device_name}; use reduction="auto"'
        )
    return plan.changed(reduction=reduction)


def plan_for(
    matrix: sp.csr_array | StoreMatrix, objective: Objective, settings: Settings, held: Held = NOTHING
) -> Plan:
    """`make_plan` for given ratings; degrees are counted only if the plan depends on them.

    `held`: where the ratings are on a GPU already. That memory is the fit's if it reads them there.
    """
    slab, store = getattr(matrix, "largest_slab", None), getattr(matrix, "store", None)
    beside = None if store is None else store.path.parent

    def plan(items: bool) -> Plan:
        facts = DegreeFacts.of(matrix, items=items)
        return make_plan(objective, settings, matrix.shape, matrix.nnz, facts, slab, beside, held)

    streams = settings.method.streams
    # counting items needs a pass over the entries, so it is done only if the memory of the plan depends on it
    found = plan(items=slab is not None or not streams or settings.reduction != "auto")
    found = plan(items=True) if found.asks_for_degrees else found
    return found if not held.size or held.serves(found) else plan_for(matrix, objective, settings)


AS_ASKED: tuple[str, ...] = ("factors", "dtype", "method", "cg_steps", "reorder", "precision", "num_threads")
AS_ASKED += ("balance", "frozen", "weighted", "features", "row_form")
"""Settings that a plan starts with."""


def undecided(objective: Objective, settings: Settings, shape: tuple[int, int], nnz: int) -> Plan:
    """The requested settings, including "auto"."""
    rank = settings.factors + (1 if objective.biases else 0)
    assembly, variant = VARIANTS.get(settings.assembly, (settings.assembly, ""))
    return Plan(
        n_users=shape[0],
        n_items=shape[1],
        nnz=nnz,
        rank=rank,
        feedback=objective.feedback,
        solver=settings.planned_solver,
        block_size=min(settings.block_size, rank),
        assembly=assembly,
        variant=variant,
        instruction_set=_als.instruction_set(),
        batch_flops=BATCH_FLOPS * settings.num_threads,
        **{name: getattr(settings, name) for name in AS_ASKED},
    )


def check_memory(plan: Plan) -> None:
    """Raise if a plan does not fit in memory, before anything is allocated."""
    on_host = plan.gpu is None or plan.features or plan.host_bytes  # else dozens of small files are not read
    free = system.available_memory() if on_host else None
    for side, count, _ in plan.features:
        if free is not None and equation_bytes(count) > free:
            raise MemoryBudgetError(
                f"{side}_features has {count:,} features, whose {count:,} x {count:,} equations need "
                f"{equation_bytes(count) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; leave out rare features"
            )
    if plan.gpu is not None:
        lack = memory_lacks(plan)
        if lack:
            raise DeviceMemoryError(
                f"{lack}; {_long_row(plan)}{_needs_all(plan)}use fewer factors, a GPU with more memory, free memory "
                'of other programs, or device="cpu"'
            )
        _check_host(plan, free)
        return
    if free is not None and plan.total_bytes > free:
        raise MemoryBudgetError(
            f"the fit needs about {mib(plan.total_bytes)} and {mib(free)} are free "
            f"({', '.join(f'{name} {mib(size)}' for name, size in plan.bytes.items())}); "
            "use fewer factors, dtype='float32', fewer threads, or a larger machine"
        )


def _needs_all(plan: Plan) -> str:
    """Setting that keeps ratings and factors on the GPU, and its alternative; empty if there is none."""
    if not plan.method.streams:
        return ""
    if plan.tile_rows:
        return 'assembly="bals" needs ratings and factors on the GPU, assembly="auto" streams them; or '
    there = plan.reorder != "none"
    return 'reorder= needs ratings and factors on the GPU, reorder="none" streams them; or ' if there else ""


def _long_row(plan: Plan) -> str:
    """Remedy if the longest row is the reason why a plan does not fit; empty if it is not."""
    entries = max(plan.longest)
    size = SLAB_BUFFERS * entries * (4 + np.dtype(plan.dtype).itemsize)
    if plan.gpu is None or plan.facts is None or not plan.method.streams or _needs_all(plan):
        return ""
    if 4 * size <= plan.gpu.free_bytes:
        return ""
    user = plan.longest[0] == entries
    row = f"{'user' if user else 'item'} {plan.facts.positions[0 if user else 1]}"
    return (
        f"a row is never cut, so that slabs which hold {row} with its {entries:,} entries take {mib(size)}: leave some "
        "of them out; or "
    )


def _check_host(plan: Plan, free: int | None) -> None:
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
