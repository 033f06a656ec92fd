"""Choice of the device for a fit: available devices, their predicted times, and the reason for the choice."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .._version import __version__
from ..core.cache import cache_dir
from ..core.system import ctrl_c_later
from ..device import ready
from ..errors import DeviceError
from . import cost as _cost
from . import machine as _machine
from .types import Estimate, memory_lacks, seconds_text

if TYPE_CHECKING:
    from ..device.cuda import DeviceSpec
    from .types import Plan, Settings

logger = logging.getLogger("hybridmf")


def gpu_status() -> tuple[bool, str]:
    """Whether a CUDA GPU can be used, and the reason.

    Imports CuPy if it is installed. Never raises.

    `reason`: the GPUs with their compute capability and free memory, or the missing component and how to install it.
    """
    from ..device.cuda import device_count, open_device

    try:
        count = device_count()
    except DeviceError as error:
        return False, str(error)
    usable, reasons = False, []
    for index in range(count):
        try:
            reasons.append(str(open_device(f"cuda:{index}").spec))
            usable = True
        except (DeviceError, ValueError) as error:  # the GPU is too old, or the memory limit is invalid
            reasons.append(str(error))
    return usable, "; ".join(dict.fromkeys(reasons))


def gpu_start_seconds(device: str | tuple[str, ...]) -> float:
    """Seconds to start CUDA and load kernels, for "auto" with CuPy that this process has not imported; else 0."""
    if device != "auto" or "cupy" in sys.modules or find_spec("cupy") is None:
        return 0.0
    rates = _machine.machine().gpu
    return rates.start + rates.load


def find_gpu(device: str) -> tuple[DeviceSpec | None, str]:
    """The GPU a request may run on, None for the CPU, and the reason."""
    if device == "cpu":
        return None, "asked for"
    from ..device.cuda import open_device

    try:
        with ctrl_c_later():
            spec = open_device("cuda" if device == "auto" else device).spec
    except DeviceError as error:
        if device != "auto":
            raise DeviceError(f'device="{device}" cannot be served: {error}. Use device="auto" or "cpu"') from error
        logger.info("device='auto' chose the CPU: %s", error)
        return None, f"no GPU: {error}"
    return spec, "asked for" if device != "auto" else "there is a GPU"


def find_gpus(names: tuple[str, ...]) -> tuple[DeviceSpec | None, str]:
    """The first GPU of several devices, with the smallest free memory of all of them; and the reason."""
    specs = []
    for name in names:
        spec, reason = find_gpu(name)
        specs.append(spec)
    found = [spec for spec in specs if spec is not None]
    if not found:
        return None, reason
    return replace(found[0], free_bytes=min(spec.free_bytes for spec in found)), reason


def on_gpu(plan: Plan, settings: Settings, spec: DeviceSpec | None) -> Plan:
    """A plan for a GPU, of whose memory the fit may use `gpu_memory_limit`."""
    assert spec is not None
    limit = settings.gpu_memory_limit
    if limit is not None:
        spec = replace(spec, free_bytes=min(spec.free_bytes, limit))
    return plan.changed(device=f"cuda:{spec.index}", gpu=spec)


def _warmth(plan: Plan, started: frozenset[str], loaded: frozenset[str]) -> _cost.Warmth:
    """Set-up that is already done for a plan, by GPUs started and kernels loaded in this process."""
    if plan.gpu is None:
        return _cost.Warmth()
    signature = signature_of(plan)
    is_loaded = signature in loaded
    compiled = is_loaded or (cache_dir() / "compiled" / signature).exists()
    compiled = compiled or ready.serves(plan.gpu.capability, signature)
    return _cost.Warmth(plan.device in started, compiled, is_loaded)


# ------------------------------------------------------------------------------------------------------ the choice

Build = Callable[["Plan"], "Plan"]
"""Completes a plan for one device; raises ValueError or DeviceError if the device does not support it."""


@dataclass(frozen=True)
class PlanRequest:
    """A fit to plan, and functions that plan it for either device; it can be pickled."""

    base: Plan  # sizes and requested settings
    settings: Settings
    spec: DeviceSpec | None  # the GPU that was found or requested
    on_cpu: Build
    on_gpu: Build
    cpu_only: str = ""  # why only the CPU supports it; "" if a GPU may
    gpu_only: bool = False  # whether it requests a feature of GPUs only
    others: Callable[[], Iterable[Plan]] | None = None
    """Alternatives to estimate for comparison; incomplete like `base`."""
    machine: _machine.Machine = field(default_factory=_machine.machine)  # the constants for estimates
    started: frozenset[str] = field(default_factory=lambda: frozenset(_started))
    loaded: frozenset[str] = field(default_factory=lambda: frozenset(_loaded))
    """GPUs that this process had started, and signatures of the plans whose kernels it had loaded, when it was made."""

    def estimate(self, plan: Plan) -> Estimate:
        """Predicted cost of a complete plan for the requested iterations."""
        cost = _cost.cost_of(plan, self.machine, _warmth(plan, self.started, self.loaded))
        assembly, solver = plan.method.names(plan)
        setup, total = sum(cost.setup.values()), cost.total(self.settings.iterations)
        return Estimate(plan.device, assembly, solver, plan.precision, cost.iteration, setup, total, plan.total_bytes)


def choose(request: PlanRequest) -> Plan:
    """The plan for the requested device or, with "auto", for the one with the shortest predicted time.

    Only plans that it may return are priced; the alternatives are when `Plan.estimates` is read.
    """
    base, settings, spec = request.base, request.settings, request.spec
    if spec is None:
        return _with_estimates(request.on_cpu(base), request)
    if settings.device != "auto":
        return _with_estimates(request.on_gpu(base), request)
    why, found = request.cpu_only, []
    if not why:
        on_gpu = request.on_gpu(base)
        if request.gpu_only:
            return _with_estimates(on_gpu, request)
        why = memory_lacks(on_gpu)
        found = [replace(request.estimate(on_gpu), why_not=why)] if why else []
    if why:
        return _cpu_instead(request, request.on_cpu(base.changed(reason=why)), why, *found)
    try:
        on_cpu = request.on_cpu(base)
    except (DeviceError, ValueError) as error:
        return _with_estimates(
            on_gpu.changed(reason=f"there is a GPU, and the CPU does not serve this: {error}"), request
        )
    return _faster(request, on_cpu, on_gpu)


def _cpu_instead(request: PlanRequest, plan: Plan, why: str, *found: Estimate, own: Estimate | None = None) -> Plan:
    """The CPU's plan with the reason why the GPU that was found is not used; estimates as for `_with_estimates`."""
    assert request.spec is not None
    logger.info("device='auto' chose the CPU: %s", why)
    return _with_estimates(plan.changed(reason=f"{why} ({request.spec.name} was found)"), request, *found, own=own)


def _faster(request: PlanRequest, on_cpu: Plan, on_gpu: Plan) -> Plan:
    iterations = request.settings.iterations
    cpu, gpu = request.estimate(on_cpu), request.estimate(on_gpu)
    here = f"{seconds_text(cpu.total_seconds)} on the CPU"
    there = f"{seconds_text(gpu.total_seconds)} on the GPU, {seconds_text(gpu.setup_seconds)} of them set-up"
    count = f"{iterations} iteration{'s' if iterations > 1 else ''}"
    if gpu.total_seconds < cpu.total_seconds:
        on_gpu = on_gpu.changed(reason=f"there is a GPU: {count} in about {there}; {here}")
        return _with_estimates(on_gpu, request, cpu, own=gpu)
    return _cpu_instead(request, on_cpu, f"{count} in about {here}; {there}", gpu, own=cpu)


def _with_estimates(plan: Plan, request: PlanRequest, *rejected: Estimate, own: Estimate | None = None) -> Plan:
    """`plan` with its `own` estimate and that of the other device, and the alternatives to estimate on request."""
    found = (replace(own or request.estimate(plan), chosen=True), *rejected)
    alternatives = None if request.others is None else functools.partial(with_alternatives, found, request)
    return plan.changed(decisive=found, alternatives=alternatives)


def with_alternatives(found: tuple[Estimate, ...], request: PlanRequest) -> tuple[Estimate, ...]:
    """Estimates of a plan and of its alternatives, the plan's first."""
    assert request.others is not None
    others = (one for other in request.others() for one in _estimates_of(other, request))
    unique: dict[tuple[str, ...], Estimate] = {}
    for one in (*found, *others):
        unique.setdefault((one.device, one.assembly, one.solver, one.precision), one)
    return tuple(
        sorted(unique.values(), key=lambda one: (not one.chosen, not one.asked, not one.feasible, one.total_seconds))
    )


def _estimates_of(other: Plan, request: PlanRequest) -> Iterable[Estimate]:
    """Estimates of one alternative on each device that supports it."""
    base, wanted = request.base, request.settings.device
    asked = (other.solver, other.precision) == (base.solver, base.precision)
    asked = asked and base.assembly_name in ("auto", other.assembly_name)
    for build, serves in (
        (request.on_cpu, wanted in ("auto", "cpu") and other.precision == "float32"),
        (request.on_gpu, request.spec is not None),
    ):
        if not serves:
            continue
        with suppress(DeviceError, ValueError):  # not supported on this device
            plan = build(other)
            yield replace(request.estimate(plan), asked=asked, why_not=memory_lacks(plan))


# ---------------------------------------------------------------------------------------------- state of earlier fits

_started: set[str] = set()
_loaded: set[str] = set()


def signature_of(plan: Plan) -> str:
    """Key of the kernels that a plan compiles, so that a later process knows whether they are cached on disk."""
    assert plan.gpu is not None
    method = " ".join(plan.method.names(plan)).strip()
    parts = (__version__, plan.gpu.capability, plan.rank, plan.feedback, plan.dtype, plan.precision, method)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def remember(plan: Plan) -> None:
    """Record that a plan has run on its GPU, so its compiled kernels are in CuPy's cache. Never raises."""
    if plan.gpu is None:
        return
    _started.add(plan.device)
    signature = signature_of(plan)
    _loaded.add(signature)
    mark = cache_dir() / "compiled" / signature
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        logger.debug("cannot note in %s that kernels are compiled: %s", mark, error)
