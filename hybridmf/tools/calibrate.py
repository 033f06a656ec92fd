"""Measures the constants of the cost model on this machine: fits of small synthetic problems by our own kernels.

Two kinds of problem separate the cost of entries from that of rows: one with long rows, one with 4 entries per row. The
seconds of an entry and of a row are the solution of two linear equations. Each time is the fastest of a few iterations.
The fastest of a few whole fits gives the overhead of a fit outside of its iterations.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..als import ExplicitALS, ImplicitALS
from ..ccd import CCD
from ..core.system import available_cores
from ..device.cuda import CudaDevice, DeviceSpec, device_count, open_device
from ..model.base import FactorModel
from ..model.stopwatch import BEFORE
from ..plan import dispatch
from ..plan import machine as _machine
from ..plan.cost import Warmth, cost_of
from ..plan.machine import CpuRates, Curve, GpuRates, Machine, built_in
from ..sgd import SGD
from .links import measure_links
from .preview import plan

CPU_RANKS = (8, 16, 32, 64, 128)
GPU_RANKS = (32, 64, 100, 128)
SGD_RANKS = (32, 128)
PUBLISHED_RANKS = (64, 256)
"""Ranks of the published assemblies on a GPU; the fused kernels do not support the second."""

CPU_LONG, CPU_SHORT = (4000, 4000, 50), (6000, 6000, 4)
CPU_ALL = (16_000, 16_000, 50)
"""Rows, columns and entries a row of the problems; the last for all cores."""

GPU_LONG, GPU_SHORT = (40_000, 40_000, 400), (400_000, 400_000, 4)
"""The same for a GPU, which needs enough rows to be busy."""

GPU_SETUP = (20_000, 20_000, 200)
"""The same for host work proportional to the entries."""

GPU_LONG_WIDE, GPU_SHORT_WIDE = (2000, 2000, 400), (20_000, 20_000, 4)
"""The same at the second of PUBLISHED_RANKS."""

TINY, SMALL = (40, 40, 4), (1000, 1000, 4)
"""Problems whose time is overhead."""

SPARSE = (100_000, 100_000, 4)
"""Many factors and few entries: drawing, copying and allocating factors dominates."""

SPARSE_RANKS = (32, 100)
"""Two ranks of `GPU_RANKS`, which separate costs of rows from costs of factors."""

TINY_ITERATIONS = 50

REPEATS = 3
"""Iterations of each fit after the first, which is a warm-up; the fastest counts."""

Say = Callable[[str], Any]


def regular(rows: int, columns: int, degree: int, seed: int = 0) -> sp.csr_array:
    """Ratings 1 to 5 with `degree` entries per row, one in each of `degree` equal ranges of columns.

    `rows`, `columns`, `degree`: `degree` divides `columns`. Returns csr_array, float32, shape (rows, columns).
    """
    rng, width = np.random.default_rng(seed), columns // degree
    indices = rng.integers(0, width, (rows, degree), dtype=np.int32) + np.arange(degree, dtype=np.int32) * width
    values = rng.integers(1, 6, rows * degree).astype(np.float32)
    matrix = sp.csr_array((values, indices.ravel(), np.arange(rows + 1) * degree), shape=(rows, columns))
    return matrix


def iteration_seconds(model: FactorModel, matrix: sp.csr_array) -> float:
    """Seconds of the fastest iteration after the first."""
    model.fit(matrix)
    return min(record["seconds"] for record in model.history_[1:])


@dataclass(frozen=True)
class Fit:
    """Seconds of a fit, each part the fastest of some fits.

    `iteration`: of all but the first of each fit. `setup`: around the iterations, and the additional time of the first
    iteration. `before`: before the first iteration of the first fit.
    """

    iteration: float
    setup: float
    before: float


def time_fits(model: FactorModel, matrix: sp.csr_array, enough: Callable[[list[float]], bool]) -> Fit:
    """Fit repeatedly until `enough` returns True, since threads may be delayed on a shared machine.

    `model`: with two iterations or more. `enough`: called with the seconds of each fit so far.
    """
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


def entry_and_row(times: tuple[float, float], problems: tuple[sp.csr_array, sp.csr_array]) -> tuple[float, float]:
    """Seconds of an entry (of either half sweep) and of a row from the times of two problems.

    If noise makes the cost of a row or an entry negative, a tenth of its largest possible value is used.
    """
    entries = [2.0 * problem.nnz for problem in problems]
    rows = [float(sum(problem.shape)) for problem in problems]
    determinant = entries[0] * rows[1] - entries[1] * rows[0]
    entry = (times[0] * rows[1] - times[1] * rows[0]) / determinant
    row = (entries[0] * times[1] - entries[1] * times[0]) / determinant
    return max(entry, 0.1 * times[0] / entries[0]), max(row, 0.1 * times[1] / rows[1])


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
    machine = replace(built_in(), cpu=cpu, source=f"measured on {datetime.now(timezone.utc):%Y-%m-%d}")
    found, reason = dispatch.find_gpu("auto") if gpu else (None, "not asked for")
    if found is None:
        tell(f"no GPU is measured: {reason}")
        return machine, {}
    rates = _measure_gpu(found, machine.cpu, tell)  # first, since it measures the start of the GPU
    links = measure_links([f"cuda:{index}" for index in range(device_count())], machine.links, tell)
    return replace(machine, gpu=rates, links=links, gpu_name=found.name), _gpu_identity(found)


def calibrate_and_save(say: Say | None = None, *, gpu: bool = True) -> tuple[Machine, os.PathLike[str]]:
    """Measure the constants and save them for later fits.

    Returns
    -------
    Machine
    path : path-like
        The file.
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


def _curve(ranks: tuple[int, ...], work: Callable[[float], float], seconds: list[float]) -> Curve:
    return tuple((float(f), work(f) / second) for f, second in zip(ranks, seconds, strict=True))


def _assembly(f: float) -> float:
    return f * (f + 1)


def _solve(f: float) -> float:
    return f**3 / 3 + 2 * f * f


# ------------------------------------------------------------------------------------------------------------- CPU


def _measure_cpu(say: Say) -> CpuRates:
    say("cores: normal equations and their solution")
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "iterations": REPEATS + 1, "random_state": 0}
    long, short = regular(*CPU_LONG), regular(*CPU_SHORT)
    entries, rows = [], []
    for f in CPU_RANKS:
        model = ExplicitALS(f, biases=False, row_form="primal", **options)
        times = [_twice(model, problem) for problem in (long, short)]
        entry, row = entry_and_row((times[0], times[1]), (long, short))
        entries.append(entry)
        rows.append(row)
    rates = replace(
        built_in().cpu, assembly=_curve(CPU_RANKS, _assembly, entries), solve=_curve(CPU_RANKS, _solve, rows)
    )
    say("cores: conjugate gradients, SGD, CCD++")

    def without_rows(model: FactorModel) -> float:
        seconds = _twice(model, long)
        return max(seconds - sum(long.shape) * rates.row, 0.1 * seconds)

    steps = [without_rows(ExplicitALS(f, biases=False, solver="cg", **options)) / (2 * long.nnz) for f in CPU_RANKS]
    blocks = without_rows(ExplicitALS(64, biases=False, solver="subspace", block_size=32, **options))
    rates = replace(
        rates,
        cg=_curve(CPU_RANKS, lambda f: 16 * f, steps),  # 3 steps pass 4 times
        subspace=(2.0 * long.nnz * 64 * 39 + sum(long.shape) * 64 * (32**2 / 3 + 256)) / blocks,
        sgd={name: _sgd_curve(name, long, options) for name in ("msgd", "hogwild", "blocks")},
        slower={"simd": 1.0} | {name: _slower(name, long, options, rates) for name in ("bals", "blas3", "rank1")},
    )
    sparse = regular(*SPARSE)  # too large for the caches
    waiting = _idle(Machine(cpu=replace(rates, sgd_row=0.0)), SGD(32, biases=False, **options), sparse)
    rates = replace(rates, sgd_row=waiting / sum(sparse.shape))
    ccd = [_twice(CCD(16, biases=False, **options), problem) / 16 / 2 for problem in (long, sparse)]
    entry, row = entry_and_row((ccd[0], ccd[1]), (long, sparse))
    say("cores: together")
    rates = replace(rates, ccd_entry=4 * entry, ccd_row=2 * row, serial=_serial(options))
    return _measure_memory(_measure_overheads(rates))


def _twice(model: FactorModel, matrix: sp.csr_array) -> float:
    """Seconds of the fastest iteration of two fits."""
    return min(iteration_seconds(model, matrix) for _ in range(2))


def _idle(machine: Machine, model: FactorModel, matrix: sp.csr_array) -> float:
    """Seconds of an iteration beyond the prediction with a machine's constants."""
    return max(0.0, _twice(model, matrix) - cost_of(plan(matrix, model), machine).iteration)


def _measure_overheads(rates: CpuRates) -> CpuRates:
    """Overhead of all threads: parallel regions, half sweeps and fits."""
    options: dict[str, Any] = {"device": "cpu", "num_threads": available_cores(), "random_state": 0}
    options["iterations"] = TINY_ITERATIONS
    rates = replace(rates, region=0.0, sweep=0.0, gram=0.0, fresh=0.0)
    tiny, small = regular(*TINY), regular(*SMALL)
    idle = partial(_idle, Machine(cpu=rates))
    als, ccd = idle(ExplicitALS(8, biases=False, **options), tiny), idle(CCD(16, biases=False, **options), tiny)
    region = max(0.0, ccd - als) / (16 * 4 - 4)  # 4 regions per factor of CCD++, and 4 for ALS
    explicit, implicit = (idle(cls(64, **options), small) for cls in (ExplicitALS, ImplicitALS))
    fit = _fit(ExplicitALS(8, biases=False, **(options | {"iterations": 2})), tiny)
    return replace(
        rates,
        region=region,
        sweep=max(0.0, als / 2 - 2 * region),
        gram=max(0.0, implicit - explicit) / 2,
        fit=max(1e-4, fit.setup),
    )


def _measure_memory(rates: CpuRates) -> CpuRates:
    """Seconds to draw a factor, and to write it to new memory."""
    options: dict[str, Any] = {"device": "cpu", "num_threads": available_cores(), "random_state": 0, "iterations": 3}
    sparse, (low, high) = regular(*SPARSE), SPARSE_RANKS
    rows = sum(sparse.shape)
    models = [ExplicitALS(f, biases=False, solver="cg", **options) for f in (low, high)]
    less, more = (_fit(model, sparse) for model in models)
    rates = replace(rates, draw=max(1e-10, (more.setup - less.setup) / (rows * (high - low))), fresh=0.0)
    known = cost_of(plan(sparse, models[1]), Machine(cpu=rates)).iteration
    return replace(rates, fresh=max(0.0, more.iteration - known) / (rows * high))


def _sgd_curve(schedule: str, problem: sp.csr_array, options: dict[str, Any]) -> Curve:
    flops = 10 if schedule == "msgd" else 8
    seconds = [_twice(SGD(f, schedule=schedule, biases=False, **options), problem) / problem.nnz for f in CPU_RANKS]
    return _curve(CPU_RANKS, lambda f: flops * f, seconds)


def _slower(assembly: str, problem: sp.csr_array, options: dict[str, Any], rates: CpuRates) -> float:
    """Time of another assembly as a multiple of ours, at rank 64, without the solution of the systems."""
    seconds = _twice(ExplicitALS(64, biases=False, assembly=assembly, **options), problem)
    solution = sum(problem.shape) * _machine.seconds_at(rates.solve, _solve, 64)
    ours = 2 * problem.nnz * _machine.seconds_at(rates.assembly, _assembly, 64)
    return max(0.5, (seconds - solution) / ours)


def _serial(options: dict[str, Any]) -> float:
    """Serial share, from the times of one thread and of all threads on the same problem."""
    threads = available_cores()
    if threads == 1:
        return CpuRates.serial
    problem = regular(*CPU_ALL)

    def fastest(count: int) -> float:
        model = ExplicitALS(64, biases=False, **(options | {"num_threads": count}))
        return _twice(model, problem)

    # bounded, since other programs may occupy cores: even two threads of one core are not slower than one
    speedup = min(max(fastest(1) / fastest(threads), 0.5 * threads), 0.999 * threads)
    return (threads / speedup - 1) / (threads - 1)


# ------------------------------------------------------------------------------------------------------------- GPU


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


def _measure_gpu(spec: DeviceSpec, cpu: CpuRates, say: Say) -> GpuRates:
    device = f"cuda:{spec.index}"
    options: dict[str, Any] = {"device": device, "iterations": REPEATS + 1, "random_state": 0}
    rates = GpuRates().scaled(spec.multiprocessors, spec.capability)
    say(f"{spec.name}: start, compilation, launches")
    tiny = regular(200, 200, 20)
    again = [_fit(ExplicitALS(40, biases=False, assembly="sparse_syrk", **options), tiny) for _ in range(2)]
    compile_seconds, loads = dict(rates.compile), []
    fused = _has_fused(device)
    # an unusual rank, whose kernels are not loaded in this process yet
    for name, model in (
        ("fused", ExplicitALS(61, biases=False, **options)),
        ("sparse_syrk", ExplicitALS(61, biases=False, assembly="sparse_syrk", **options)),
        ("msgd", SGD(61, biases=False, **options)),
        ("batch_hogwild", SGD(61, schedule="batch_hogwild", biases=False, **options)),
        ("ccd++", CCD(61, biases=False, **options)),
    ):
        if name != "fused" or fused:
            compiled, loaded = _compile_seconds(open_device(device), model, tiny)
            compile_seconds[name] = compiled or rates.compile[name]
            loads.append(loaded or rates.load)
    # each compiles its own kernel for the sums, and all three the same ones for the solution
    compile_seconds |= dict.fromkeys(("mo_als", "bals"), compile_seconds["sparse_syrk"])
    rates = replace(
        rates,
        multiprocessors=spec.multiprocessors,
        start=max(1e-3, again[0].before - again[1].before),
        compile=compile_seconds,
        load=float(np.median(loads)),
    )
    rates = _measure_launches(rates, tiny, options)
    long, short = regular(*GPU_LONG), regular(*GPU_SHORT)
    rates = _measure_setup(rates, cpu, device)
    say(f"{spec.name}: normal equations and their solution")
    if fused:
        entries, rows = _gpu_als(GPU_RANKS, "fused", long, short, options, rates)
        rates = replace(
            rates,
            assembly=_curve(GPU_RANKS, _assembly, entries),
            solve=_join(_curve(GPU_RANKS, _solve, rows), rates.solve),
        )
    wide = regular(*GPU_LONG_WIDE), regular(*GPU_SHORT_WIDE)
    curves = {}
    for assembly in ("sparse_syrk", "mo_als", "bals"):
        entries, rows = [], []
        for f, problems in zip(PUBLISHED_RANKS, ((long, short), wide), strict=True):
            entry, row = _gpu_als((f,), assembly, *problems, options, rates)
            entries += entry
            rows += row
        curves[assembly] = _curve(PUBLISHED_RANKS, _assembly, entries)
        if assembly == "sparse_syrk":
            solve = _curve(PUBLISHED_RANKS, _solve, rows)
            rates = replace(rates, solve=_join(rates.solve, solve[1:]) if fused else solve)
    say(f"{spec.name}: SGD and CCD++")
    return _gpu_others(replace(rates, published=curves), long, short, options)


def _measure_launches(rates: GpuRates, tiny: sp.csr_array, options: dict[str, Any]) -> GpuRates:
    """Overhead of half sweeps and launches."""
    options = options | {"iterations": TINY_ITERATIONS}
    none = {"als": 0.0, "sgd": 0.0, "ccd": 0.0}
    idle = partial(_idle, Machine(gpu=replace(rates, sweep=none, gram=0.0, launch=0.0, serial_update=0.0)))
    explicit = idle(ExplicitALS(40, biases=False, assembly="sparse_syrk", **options), tiny)
    implicit = idle(ImplicitALS(40, assembly="sparse_syrk", **options), tiny)
    sgd = idle(SGD(61, biases=False, **options), tiny)
    few, many = (idle(CCD(f, biases=False, **options), tiny) for f in (16, 61))
    launch = max(1e-7, (many - few) / (45 * 6))
    sweep = {"als": explicit / 2, "sgd": sgd / 2, "ccd": max(1e-5, few / 2 - 16 * 3 * launch)}
    return replace(rates, sweep=sweep, gram=max(0.0, implicit - explicit) / 2, launch=launch)


def _has_fused(device: str) -> bool:
    return plan(shape=(10, 10), nnz=10, model=ExplicitALS(64, biases=False, device=device)).assembly == "fused"


def _join(first: Curve, second: Curve) -> Curve:
    """Anchors of the first curve, and of the second beyond them."""
    return first + tuple(anchor for anchor in second if anchor[0] > first[-1][0])


def _gpu_als(
    ranks: tuple[int, ...],
    assembly: str,
    long: sp.csr_array,
    short: sp.csr_array,
    options: dict[str, Any],
    rates: GpuRates,
) -> tuple[list[float], list[float]]:
    """Seconds of an entry and of a row at each rank, without launches."""
    entries, rows = [], []
    for f in ranks:
        times = []
        for problem in (long, short):
            model = ExplicitALS(f, biases=False, assembly=assembly, reorder="none", row_form="primal", **options)
            seconds = iteration_seconds(model, problem)
            times.append(max(seconds - 2 * rates.sweep["als"], 0.1 * seconds))
        entry, row = entry_and_row((times[0], times[1]), (long, short))
        entries.append(entry)
        rows.append(row)
    return entries, rows


def _measure_setup(rates: GpuRates, cpu: CpuRates, device: str) -> GpuRates:
    """Bytes/s of an upload, and the set-up time of a fit in addition to that on the host."""
    opened = open_device(device)
    data = np.ones(1 << 26, dtype=np.float32)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        array = opened.upload(data)
        opened.synchronize()
        seconds.append(time.perf_counter() - started)
        del array

    def beyond(model: Any, matrix: sp.csr_array) -> float:
        return _beyond_host(model, matrix, device, Machine(cpu=cpu, gpu=rates))

    none = dict.fromkeys(("als", "sgd", "ccd"), 0.0)
    rates = replace(rates, upload_bytes=data.nbytes / min(seconds), row_setup=0.0, factor_setup=0.0)
    rates = replace(rates, fit=none, entry_setup=dict.fromkeys(rates.entry_setup, 0.0))
    tiny, models = (
        regular(*TINY),
        {"als": ExplicitALS(SPARSE_RANKS[0], biases=False), "sgd": SGD(61, biases=False), "ccd": CCD(16, biases=False)},
    )
    rates = replace(
        rates,
        fit={kind: max(1e-4, beyond(model, tiny)) for kind, model in models.items()},
    )
    sparse, (low, high) = regular(*SPARSE), SPARSE_RANKS
    rows = sum(sparse.shape)
    less, more = (beyond(ExplicitALS(f, biases=False), sparse) for f in (low, high))
    factor = max(0.0, (more - less) / (rows * (high - low)))
    rates = replace(rates, factor_setup=factor, row_setup=max(0.0, less / rows - low * factor))
    entries = {
        "msgd": SGD(61, biases=False),
        "batch_hogwild": SGD(61, schedule="batch_hogwild", biases=False),
        "ccd++": CCD(16, biases=False),
    }
    dense = regular(*GPU_SETUP)
    setup = {name: max(0.0, beyond(model, dense)) / dense.nnz for name, model in entries.items()}
    return replace(rates, entry_setup=setup)


def _beyond_host(model: Any, matrix: sp.csr_array, device: str, machine: Machine) -> float:
    """Seconds of a fit on a GPU without its iterations, beyond those that `machine` predicts."""
    model.set_params(iterations=2, random_state=0, device=device)
    known = cost_of(plan(matrix, model), machine, Warmth(True, True, loaded=True)).setup
    return _fit(model, matrix).setup - sum(known[name] for name in ("input and start", "transfer", "layouts", "fit"))


def _gpu_others(rates: GpuRates, long: sp.csr_array, short: sp.csr_array, options: dict[str, Any]) -> GpuRates:
    def entry(f: int, schedule: str) -> float:
        seconds = iteration_seconds(SGD(f, schedule=schedule, biases=False, **options), long)
        return max(seconds - 2 * rates.sweep["sgd"], 0.1 * seconds) / long.nnz

    sgd = {
        schedule: _curve(SGD_RANKS, lambda f: 16 * f, [entry(f, schedule) for f in SGD_RANKS])
        for schedule in ("msgd", "batch_hogwild")
    }
    model = CCD(16, biases=False, **options)
    idle = 2 * rates.sweep["ccd"] + 16 * 6 * rates.launch
    times = [iteration_seconds(model, problem) for problem in (long, short)]
    busy = [max(seconds - idle, 0.1 * seconds) for seconds in times]
    entry_seconds, row = entry_and_row((busy[0], busy[1]), (long, short))
    moved = plan(long, model).bytes_per_iteration / (2 * long.nnz)
    return replace(rates, sgd=sgd, ccd=moved / entry_seconds, ccd_row=row / 16)
