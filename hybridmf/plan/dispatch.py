"""Choice of the device for a fit: available devices, their predicted times, and the reason for the choice."""

from __future__ import annotations

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
from ..core.system import mib
from ..errors import DeviceError
from . import cost as _cost
from . import machine as _machine
from .types import Estimate, seconds_text

if TYPE_CHECKING:
    from ..device.cuda import DeviceSpec
    from .types import Plan, Settings

logger = logging.getLogger("hybridmf")


def gpu_status() -> tuple[bool, str]:
    """Whether a CUDA GPU can be used, and the reason.

    Imports CuPy if it is installed. Never raises.

    Returns
    -------
    usable : bool
    reason : str
        The GPUs with their compute capability and free memory, or the missing component and how to install it.
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


def gpu_is_untouched(device: str | tuple[str, ...]) -> bool:
    """Whether "auto" is asked for, CuPy is installed, and this process has not imported it yet, nor started CUDA."""
    return device == "auto" and "cupy" not in sys.modules and find_spec("cupy") is not None


def gpu_start_seconds() -> float:
    """Seconds until a GPU that this process has not used can do anything: CUDA's start, and loading kernels."""
    rates = _machine.machine().gpu
    return rates.start + rates.load


def find_gpu(device: str) -> tuple[DeviceSpec | None, str]:
    """The GPU a request may run on, None for the CPU, and the reason.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda", "cuda:N"}

    Raises
    ------
    DeviceError
        The requested GPU cannot be used; the message says what to install or change.
    """
    if device == "cpu":
        return None, "asked for"
    from ..device.cuda import open_device

    try:
        spec = open_device("cuda" if device == "auto" else device).spec
    except DeviceError as error:
        if device != "auto":
            raise DeviceError(f'device="{device}" cannot be served: {error}. Use device="auto" or "cpu"') from error
        logger.info("device='auto' chose the CPU: %s", error)
        return None, f"no GPU: {error}"
    return spec, "asked for" if device != "auto" else "there is a GPU"


# ------------------------------------------------------------------------------------------------------- estimates


def estimate(plan: Plan, iterations: int, machine: _machine.Machine) -> Estimate:
    """Predict the cost of a plan in the current state of this process.

    Parameters
    ----------
    plan : Plan
        With everything decided.
    iterations : int
    machine : Machine
        The constants.
    """
    cost = _cost.cost_of(plan, machine, _warmth(plan))
    setup = sum(cost.setup.values())
    assembly, solver = plan.kernels.method.names(plan)
    total = setup + iterations * cost.iteration
    return Estimate(plan.device, assembly, solver, plan.precision, cost.iteration, setup, total, plan.total_bytes)


# ------------------------------------------------------------------------------------------------------ the choice

Build = Callable[["Plan"], "Plan"]
"""Completes a plan for one device; raises ValueError or DeviceError if the device does not support it."""


@dataclass(frozen=True)
class Request:
    """A fit to plan, and functions that plan it for either device.

    Attributes
    ----------
    base : Plan
        Sizes and requested settings.
    settings : Settings
    spec : DeviceSpec or None
        The GPU that was found or requested.
    on_cpu, on_gpu : callable
    cpu_only : str
        Why only the CPU supports it; "" if a GPU may.
    gpu_only : bool
        Whether it requests a feature of GPUs only.
    others : tuple of Plan
        Alternatives to estimate for comparison; incomplete like `base`.
    machine : Machine
        The constants for estimates.
    """

    base: Plan
    settings: Settings
    spec: DeviceSpec | None
    on_cpu: Build
    on_gpu: Build
    cpu_only: str = ""
    gpu_only: bool = False
    others: tuple[Plan, ...] = ()
    machine: _machine.Machine = field(default_factory=_machine.machine)

    def estimate(self, plan: Plan) -> Estimate:
        """Estimate for the requested iterations."""
        return estimate(plan, self.settings.iterations, self.machine)


def choose(request: Request) -> Plan:
    """The plan for the requested device or, with "auto", for the one with the shortest predicted time; with estimates.

    Raises
    ------
    DeviceError, ValueError
        No device, or not the requested one, supports the fit.
    """
    base, settings, spec = request.base, request.settings, request.spec
    if spec is None:
        return _with_estimates(request.on_cpu(base), request)
    if settings.device != "auto":
        return _with_estimates(request.on_gpu(base), request)
    if request.cpu_only:
        return _on_cpu(request, request.cpu_only, None)
    on_gpu = request.on_gpu(base)
    if request.gpu_only:
        return _with_estimates(on_gpu, request)
    lack = memory_lacks(on_gpu)
    if lack:
        return _on_cpu(request, lack, on_gpu)
    try:
        on_cpu = request.on_cpu(base)
    except (DeviceError, ValueError) as error:
        return _with_estimates(
            on_gpu.changed(reason=f"there is a GPU, and the CPU does not serve this: {error}"), request
        )
    return _faster(request, on_cpu, on_gpu)


def _on_cpu(request: Request, why: str, on_gpu: Plan | None) -> Plan:
    """The CPU's plan, if a GPU was found but is not used."""
    assert request.spec is not None
    logger.info("device='auto' chose the CPU: %s", why)
    plan = request.on_cpu(request.base.changed(reason=f"{why} ({request.spec.name} was found)"))
    return _with_estimates(plan, request, on_gpu)


def _faster(request: Request, on_cpu: Plan, on_gpu: Plan) -> Plan:
    """The plan with the shorter predicted time."""
    iterations = request.settings.iterations
    cpu, gpu = request.estimate(on_cpu), request.estimate(on_gpu)
    here = f"{seconds_text(cpu.total_seconds)} on the CPU"
    there = f"{seconds_text(gpu.total_seconds)} on the GPU, {seconds_text(gpu.setup_seconds)} of them set-up"
    count = f"{iterations} iteration{'s' if iterations > 1 else ''}"
    if gpu.total_seconds < cpu.total_seconds:
        on_gpu = on_gpu.changed(reason=f"there is a GPU: {count} in about {there}; {here}")
        return _with_estimates(on_gpu, request, on_cpu)
    return _on_cpu(request, f"{count} in about {here}; {there}", on_gpu)


def memory_lacks(plan: Plan) -> str:
    """Message if the plan needs more memory than its GPU has free; empty if it fits."""
    if plan.gpu is None or plan.total_bytes <= plan.gpu.free_bytes:
        return ""
    parts = ", ".join(f"{name} {mib(size)}" for name, size in plan.bytes.items())
    return (
        f"the fit needs about {mib(plan.total_bytes)} on {plan.gpu.name} and {mib(plan.gpu.free_bytes)} are free "
        f"({parts})"
    )


def _with_estimates(plan: Plan, request: Request, rejected: Plan | None = None) -> Plan:
    """`plan` with its own estimate and those of the other device and of the alternatives."""
    found = [replace(request.estimate(plan), chosen=True)]
    if rejected is not None:
        found.append(replace(request.estimate(rejected), why_not=memory_lacks(rejected)))
    for other in request.others:
        found.extend(_estimates_of(other, request))
    unique: dict[tuple[str, ...], Estimate] = {}
    for one in found:
        unique.setdefault((one.device, one.assembly, one.solver, one.precision), one)
    return plan.changed(estimates=tuple(sorted(unique.values(), key=_rank)))


def _rank(one: Estimate) -> tuple[bool, bool, bool, float]:
    return not one.chosen, not one.asked, not one.feasible, one.total_seconds


def _estimates_of(other: Plan, request: Request) -> Iterable[Estimate]:
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


# ------------------------------------------------------------------------------------------- what has been done before

_started: set[str] = set()
_loaded: set[str] = set()


def _signature(plan: Plan) -> str:
    """Key of the kernels that a plan compiles, so that a later process knows whether they are cached on disk."""
    assert plan.gpu is not None
    method = " ".join(plan.kernels.method.names(plan)).strip()
    parts = (__version__, plan.gpu.capability, plan.rank, plan.feedback, plan.dtype, plan.precision, method)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _warmth(plan: Plan) -> _cost.Warmth:
    if plan.gpu is None:
        return _cost.Warmth()
    signature = _signature(plan)
    loaded = signature in _loaded
    compiled = loaded or (cache_dir() / "compiled" / signature).exists()
    return _cost.Warmth(plan.device in _started, compiled, loaded)


def remember(plan: Plan) -> None:
    """Record that a plan has run on its GPU, so its compiled kernels are in CuPy's cache. Never raises."""
    if plan.gpu is None:
        return
    _started.add(plan.device)
    signature = _signature(plan)
    _loaded.add(signature)
    mark = cache_dir() / "compiled" / signature
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        logger.debug("cannot note in %s that kernels are compiled: %s", mark, error)
