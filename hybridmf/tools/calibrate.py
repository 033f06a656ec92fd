"""Measures the constants of the cost model on this machine: fits of small synthetic problems by our own kernels.

Choices of the device depend on few of the constants (bench/dispatch.py, 384 choices of recorded fits): how fast the
cores and the GPU are as a whole, what a fit costs beside its iterations, and the rate of copies to the GPU. So one
speed scales all rates of the cores, and one all rates of the GPU. Each time is the fastest of some iterations or fits.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..als import ExplicitALS
from ..core.system import available_cores
from ..device.cuda import CudaDevice, DeviceSpec, device_count, open_device
from ..model.base import FactorModel
from ..model.stopwatch import BEFORE
from ..plan import dispatch
from ..plan import machine as _machine
from ..plan.cost import Warmth, cost_of
from ..plan.machine import CpuRates, GpuRates, Machine, built_in
from .links import measure_links
from .preview import plan

RANKS = (16, 32, 64, 128)
"""Ranks at which speeds are measured; their median counts."""

CPU_PROBLEMS = ((4000, 4000, 50), (6000, 6000, 4))
"""Rows, columns and entries a row: of problems where entries and where rows take most of the time."""

CPU_ALL = (16_000, 16_000, 50)
"""The same for all cores."""

GPU_PROBLEMS = ((40_000, 40_000, 400), (400_000, 400_000, 4))
"""The same for a GPU, which needs enough rows to be busy."""

TINY = (200, 200, 20)
"""A problem whose time is overhead."""

SPARSE = (100_000, 100_000, 4)
"""Many factors and few entries: copying and allocating factors dominates a fit."""

SPARSE_RANKS = (32, 100)
"""Two ranks that separate costs of rows from costs of factors."""

TINY_ITERATIONS = 50

REPEATS = 3
"""Iterations of each fit after the first, which is a warm-up; the fastest counts."""

Say = Callable[[str], Any]


def regular(rows: int, columns: int, degree: int, seed: int = 0) -> sp.csr_array:
    """Float32 ratings 1 to 5 with `degree` entries per row, one in each of `degree` equal ranges of columns."""
    rng, width = np.random.default_rng(seed), columns // degree
    indices = rng.integers(0, width, (rows, degree), dtype=np.int32) + np.arange(degree, dtype=np.int32) * width
    values = rng.integers(1, 6, rows * degree).astype(np.float32)
    return sp.csr_array((values, indices.ravel(), np.arange(rows + 1) * degree), shape=(rows, columns))


def iteration_seconds(model: FactorModel, matrix: sp.csr_array) -> float:
    """Seconds of the fastest iteration of two fits, each after a first one."""
    found = []
    for _ in range(2):
        model.fit(matrix)
        found += [record["seconds"] for record in model.history_[1:]]
    return min(found)


@dataclass(frozen=True)
class Fit:
    """Seconds of a fit, each part the fastest of some fits."""

    iteration: float  # of all but the first of each fit
    setup: float  # around the iterations, and the additional time of the first iteration
    before: float  # before the first iteration of the first fit


def time_fits(model: FactorModel, matrix: sp.csr_array, enough: Callable[[list[float]], bool]) -> Fit:
    """Fit repeatedly until `enough` of the seconds of each fit so far: threads of a shared machine may be delayed."""
    totals: list[float] = []
    firsts, others, around, before = [], [], [], 0.0
    while not totals or not enough(totals):
        started = time.perf_counter()
        model.fit(matrix)
        totals.append(time.perf_counter() - started)
        first, *rest = [record["seconds"] for record in model.history_]
        firsts.append(first)
        others += rest
        around.append(totals[-1] - first - sum(rest))
        before = before or sum(model.timings_[part] for part in BEFORE)
    return Fit(min(others), min(around) + max(0.0, min(firsts) - min(others)), before)


def _fit(model: FactorModel, matrix: sp.csr_array) -> Fit:
    return time_fits(model, matrix, lambda totals: len(totals) >= REPEATS)


def calibrate(*, gpu: bool = True, say: Say | None = None) -> tuple[Machine, dict[str, Any]]:
    """Measure this machine: its cores, its first GPU if there is one, and the links of all GPUs.

    Parameters
    ----------
    gpu : bool
        Look for a GPU.
    say : callable, optional
        Called with a description of each measurement.

    Returns
    -------
    Machine
    gpu_identity : dict
        Name and driver of the GPU; empty without one.
    """
    tell: Say = say or (lambda text: None)
    cpu = _measure_cpu(tell)
    machine = replace(built_in(), cpu=cpu, source=f"measured on {datetime.now(UTC):%Y-%m-%d}")
    found, reason = dispatch.find_gpu("auto") if gpu else (None, "not asked for")
    if found is None:
        tell(f"no GPU is measured: {reason}")
        return machine, {}
    rates = _measure_gpu(found, machine, tell)  # first, since it measures the start of the GPU
    links = measure_links([f"cuda:{index}" for index in range(device_count())], machine.links, tell)
    return replace(machine, gpu=rates, links=links, gpu_name=found.name), _gpu_identity(found)


def calibrate_and_save(say: Say | None = None, *, gpu: bool = True) -> tuple[Machine, os.PathLike[str]]:
    """Measure the constants and save them for later fits.

    Returns
    -------
    Machine
    path : path-like
        The file.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    _machine.prepare()  # fails before the measurements
    machine, gpu_identity = calibrate(gpu=gpu, say=say)
    return machine, _machine.save(machine, gpu_identity)


def _gpu_identity(spec: DeviceSpec) -> dict[str, Any]:
    import cupy

    return {
        "name": spec.name,
        "capability": list(spec.capability),
        "multiprocessors": spec.multiprocessors,
        "driver": int(cupy.cuda.runtime.driverGetVersion()),
    }


def _model(factors: int, device: str = "cpu", **options: Any) -> ExplicitALS:
    given: dict[str, Any] = {"biases": False, "row_form": "primal", "iterations": REPEATS + 1, "random_state": 0}
    return ExplicitALS(factors, device=device, **given | options)


def _speed(
    machine: Machine, idle: float, sizes: tuple[tuple[int, int, int], ...], device: str, **options: Any
) -> float:
    """Rates of a device, as multiples of those of `machine`; `idle`: seconds of an iteration with no work, measured."""
    found = []
    known = replace(machine, cpu=replace(machine.cpu, sweep=0.0, region=0.0, fresh=0.0))
    known = replace(known, gpu=replace(machine.gpu, sweep=dict.fromkeys(machine.gpu.sweep, 0.0)))
    for problem in (regular(*size) for size in sizes):
        for factors in RANKS:
            model = _model(factors, device, **options)
            seconds = iteration_seconds(model, problem)
            busy = max(seconds - idle, 0.1 * seconds)
            found.append(cost_of(plan(problem, model), known).iteration / busy)
    return float(np.median(found))


# ------------------------------------------------------------------------------------------------------------- CPU


def _measure_cpu(say: Say) -> CpuRates:
    say("cores: one, and all together")
    tiny = regular(*TINY)
    idle = iteration_seconds(_model(RANKS[0], iterations=TINY_ITERATIONS, num_threads=1), tiny)
    rates = built_in().cpu
    rates = rates.scaled(_speed(built_in(), idle, CPU_PROBLEMS, "cpu", num_threads=1))
    rates = replace(rates, serial=_serial())
    quick = replace(rates, sweep=0.0, region=0.0)
    model = _model(RANKS[0], iterations=TINY_ITERATIONS, num_threads=available_cores())
    fit, known = _fit(model, tiny), cost_of(plan(tiny, model), Machine(cpu=replace(quick, fit=0.0)))
    setup = fit.setup - sum(known.setup.values())
    # parallel regions are a part of the half sweeps of a tiny problem
    sweep = max(1e-6, (fit.iteration - known.iteration) / 2 - 2 * rates.region)
    return replace(rates, sweep=sweep, fit=max(1e-4, setup))


def _serial() -> float:
    """Serial share, from the times of one thread and of all threads on the same problem."""
    threads = available_cores()
    if threads == 1:
        return CpuRates.serial
    problem = regular(*CPU_ALL)
    alone, together = (iteration_seconds(_model(64, num_threads=count), problem) for count in (1, threads))
    # bounded, since other programs may occupy cores: even two threads of one core are not slower than one
    speedup = min(max(alone / together, 0.5 * threads), 0.999 * threads)
    return (threads / speedup - 1) / (threads - 1)


# ------------------------------------------------------------------------------------------------------------- GPU


def _measure_gpu(spec: DeviceSpec, machine: Machine, say: Say) -> GpuRates:
    device, known = f"cuda:{spec.index}", GpuRates().scaled(spec.multiprocessors, spec.capability)
    say(f"{spec.name}: start, compilation, launches")
    tiny = regular(*TINY)
    # an unusual rank, whose kernels are not loaded in this process yet
    starts = [_fit(_model(40, device), tiny).before for _ in range(2)]
    compiled, loaded = _compile_seconds(open_device(device), _model(61, device), tiny)
    usual = known.compile[plan(tiny, _model(61, device)).assembly]
    idle = iteration_seconds(_model(40, device, iterations=TINY_ITERATIONS), tiny)
    slower = idle / 2 / known.sweep["als"]
    rates = replace(
        known,
        start=max(1e-3, starts[0] - starts[1]),
        compile={name: seconds * (compiled or usual) / usual for name, seconds in known.compile.items()},
        load=loaded or known.load,
        sweep={kind: seconds * slower for kind, seconds in known.sweep.items()},
    )
    say(f"{spec.name}: sums and solutions")
    speed = _speed(replace(machine, gpu=rates, gpu_name=spec.name), idle, GPU_PROBLEMS, device)
    rates = replace(rates.sped_up(speed), multiprocessors=spec.multiprocessors)
    say(f"{spec.name}: set-up")
    return _measure_setup(rates, machine, spec)


def _compile_seconds(
    opened: CudaDevice, model: FactorModel, matrix: sp.csr_array
) -> tuple[float, float] | tuple[None, None]:
    """Seconds to compile the kernels of a fit, regardless of CuPy's cache, and to load them afterwards.

    CuPy caches kernels by their source text, so an added comment forces compilation. None if this process has loaded
    them already.
    """
    before = set(opened._kernels)
    model.fit(matrix)
    programs = {(source, constants): name for source, name, constants in set(opened._kernels) - before}
    if not programs:
        return None, None
    mark = f"\n// {uuid.uuid4()}\n"
    ends = [time.perf_counter()]
    for _ in range(2):
        for (source, constants), name in programs.items():
            opened._compile(source + mark, name, constants)
        ends.append(time.perf_counter())
    return ends[1] - ends[0], ends[2] - ends[1]


def _measure_setup(rates: GpuRates, machine: Machine, spec: DeviceSpec) -> GpuRates:
    """Bytes/s of an upload, and the set-up time of a fit in addition to that on the host."""
    opened = open_device(f"cuda:{spec.index}")
    data = np.ones(1 << 26, dtype=np.float32)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        array = opened.upload(data)
        opened.synchronize()
        seconds.append(time.perf_counter() - started)
        del array
    usual, rates = rates.fit, replace(rates, upload_bytes=data.nbytes / min(seconds))
    bare = replace(rates, fit=dict.fromkeys(usual, 0.0), row_setup=0.0, factor_setup=0.0)
    known = replace(machine, gpu=bare, gpu_name=spec.name)

    def beyond(factors: int, matrix: sp.csr_array) -> float:
        """Seconds of set-up beyond those that are known, kernels loaded."""
        model = _model(factors, f"cuda:{spec.index}", iterations=2)
        setup = cost_of(plan(matrix, model), known, Warmth(True, True, True)).setup
        return _fit(model, matrix).setup - sum(setup.values())

    fit = max(1e-4, beyond(SPARSE_RANKS[0], regular(*TINY)))
    sparse, (low, high) = regular(*SPARSE), SPARSE_RANKS
    less, more = (max(0.0, beyond(factors, sparse) - fit) for factors in (low, high))
    rows = sum(sparse.shape)
    factor = max(0.0, (more - less) / (rows * (high - low)))
    return replace(
        rates,
        fit={kind: seconds * fit / usual["als"] for kind, seconds in usual.items()},
        factor_setup=factor,
        row_setup=max(0.0, less / rows - low * factor),
    )
