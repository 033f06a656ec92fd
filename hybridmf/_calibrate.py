"""Measures the constants of the cost model on this machine: fits of small synthetic problems by our own kernels.

Two kinds of problem tell entries from rows: one whose rows are long, one whose rows have 4 entries. Their two times
give the seconds of an entry and of a row, by elimination. Each is the fastest of a few iterations.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import scipy.sparse as sp

from . import _machine, dispatch
from ._base import FactorModel
from ._machine import CpuRates, Curve, GpuRates, Machine, built_in
from ._plan import plan
from ._validate import available_cores
from .als import ExplicitALS
from .ccd import CCD
from .gpu.device import CudaDevice, DeviceSpec, open_device
from .sgd import SGD

CPU_RANKS = (16, 32, 64, 128)
GPU_RANKS = (32, 64, 100, 128)
SGD_RANKS = (32, 128)
PUBLISHED_RANKS = (64, 256)
"""Ranks of the published assemblies on a GPU, the second beyond what the fused kernels serve."""

CPU_LONG, CPU_SHORT = (4000, 4000, 50), (6000, 6000, 4)
CPU_ALL = (16_000, 16_000, 50)
"""Rows, columns and entries a row of the problems; the last for all cores."""

GPU_LONG, GPU_SHORT = (40_000, 40_000, 400), (400_000, 400_000, 4)
GPU_LONG_WIDE, GPU_SHORT_WIDE = (2000, 2000, 400), (20_000, 20_000, 4)
"""The same for a GPU, which wants all its rows in flight; the second line for the second of PUBLISHED_RANKS."""

REPEATS = 3
"""Iterations of each fit after the first, which warms up; the fastest counts."""

Say = Callable[[str], Any]


def regular(rows: int, columns: int, degree: int, seed: int = 0) -> sp.csr_array:
    """Ratings 1 to 5 with `degree` entries in each row, one in each of as many equal ranges of columns.

    Parameters
    ----------
    rows, columns, degree : int
        `degree` divides `columns`.
    seed : int

    Returns
    -------
    csr_array, float32, shape (rows, columns)
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


def entry_and_row(times: tuple[float, float], problems: tuple[sp.csr_array, sp.csr_array]) -> tuple[float, float]:
    """Seconds of an entry (of either half sweep) and of a row from the times of two problems.

    A time that noise made too short for a row or an entry to cost anything counts as a tenth of what it could be.
    """
    entries = [2.0 * problem.nnz for problem in problems]
    rows = [float(sum(problem.shape)) for problem in problems]
    determinant = entries[0] * rows[1] - entries[1] * rows[0]
    entry = (times[0] * rows[1] - times[1] * rows[0]) / determinant
    row = (entries[0] * times[1] - entries[1] * times[0]) / determinant
    return max(entry, 0.1 * times[0] / entries[0]), max(row, 0.1 * times[1] / rows[1])


def calibrate(*, gpu: bool = True, say: Say | None = None) -> tuple[Machine, dict[str, Any]]:
    """Measure this machine: its cores, and its first GPU if there is one.

    Parameters
    ----------
    gpu : bool
        Look for a GPU.
    say : callable, optional
        Told what is measured.

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
    return replace(machine, gpu=_measure_gpu(found, tell), gpu_name=found.name), _gpu_identity(found)


def calibrate_and_save(say: Say | None = None, *, gpu: bool = True) -> tuple[Machine, os.PathLike[str]]:
    """Measure, and keep the constants for every fit to come.

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
    _machine.prepare()  # before the work, not after it
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
        times = [iteration_seconds(ExplicitALS(f, **options), problem) for problem in (long, short)]
        entry, row = entry_and_row((times[0], times[1]), (long, short))
        entries.append(entry)
        rows.append(row)
    rates = replace(
        built_in().cpu, assembly=_curve(CPU_RANKS, _assembly, entries), solve=_curve(CPU_RANKS, _solve, rows)
    )
    say("cores: conjugate gradients, SGD, CCD++")
    steps = [iteration_seconds(ExplicitALS(f, solver="cg", **options), long) / (2 * long.nnz) for f in CPU_RANKS]
    blocks = iteration_seconds(ExplicitALS(64, solver="subspace", block_size=32, **options), long)
    rates = replace(
        rates,
        cg=_curve(CPU_RANKS, lambda f: 16 * f, steps),  # 3 steps pass 4 times
        subspace=(2.0 * long.nnz * 64 * 39 + sum(long.shape) * 64 * (32**2 / 3 + 256)) / blocks,
        sgd={name: _sgd_curve(name, long, options) for name in ("msgd", "hogwild", "blocks")},
        slower={"simd": 1.0} | {name: _slower(name, long, options, rates) for name in ("bals", "blas3", "rank1")},
    )
    ccd = [iteration_seconds(CCD(16, **options), problem) / 16 / 2 for problem in (long, short)]
    entry, row = entry_and_row((ccd[0], ccd[1]), (long, short))
    say("cores: together")
    return replace(rates, ccd_entry=4 * entry, ccd_row=2 * row, serial=_serial(options), region=_region(options))


def _region(options: dict[str, Any]) -> float:
    """Seconds of a parallel region of all threads that has next to nothing to do; an iteration has four."""
    model = ExplicitALS(8, **(options | {"num_threads": available_cores(), "iterations": 50}))
    return iteration_seconds(model, regular(40, 40, 4)) / 4


def _sgd_curve(schedule: str, problem: sp.csr_array, options: dict[str, Any]) -> Curve:
    flops = 10 if schedule == "msgd" else 8
    seconds = [iteration_seconds(SGD(f, schedule=schedule, **options), problem) / problem.nnz for f in CPU_RANKS]
    return _curve(CPU_RANKS, lambda f: flops * f, seconds)


def _slower(assembly: str, problem: sp.csr_array, options: dict[str, Any], rates: CpuRates) -> float:
    """Time of another assembly as a multiple of ours, at rank 64, without the solution of the systems."""
    seconds = iteration_seconds(ExplicitALS(64, assembly=assembly, **options), problem)
    solution = sum(problem.shape) * _machine.seconds_at(rates.solve, _solve, 64)
    ours = 2 * problem.nnz * _machine.seconds_at(rates.assembly, _assembly, 64)
    return max(0.5, (seconds - solution) / ours)


def _serial(options: dict[str, Any]) -> float:
    """Serial share that one thread and all threads on the same problem tell."""
    threads = available_cores()
    if threads == 1:
        return CpuRates.serial
    problem = regular(*CPU_ALL)

    def fastest(count: int) -> float:
        model = ExplicitALS(64, **(options | {"num_threads": count}))
        return min(iteration_seconds(model, problem) for _ in range(2))

    # other programs may hold cores for a moment: not even two threads of one core are slower than one
    speedup = min(max(fastest(1) / fastest(threads), 0.5 * threads), 0.999 * threads)
    return (threads / speedup - 1) / (threads - 1)


# ------------------------------------------------------------------------------------------------------------- GPU


@dataclass(frozen=True)
class _Fit:
    """Seconds of a fit: all of it, its first iteration, the fastest of the others, and before the first."""

    total: float
    first: float
    iteration: float
    setup: float


def _fit(model: FactorModel, matrix: sp.csr_array) -> _Fit:
    started = time.perf_counter()
    model.fit(matrix)
    total = time.perf_counter() - started
    seconds = [record["seconds"] for record in model.history_]
    return _Fit(total, seconds[0], min(seconds[1:]), model.timings_["set up"])


def _compile_seconds(opened: CudaDevice, model: FactorModel, matrix: sp.csr_array) -> float | None:
    """Seconds to compile the kernels of a fit, whatever CuPy has kept of them; None if this process has them already.

    CuPy keeps kernels by the text of their source, so a comment is enough to have them compiled again.
    """
    before = set(opened._kernels)
    model.fit(matrix)
    programs = {(source, constants): name for source, name, constants in set(opened._kernels) - before}
    if not programs:
        return None
    mark = f"\n// {uuid.uuid4()}\n"
    started = time.perf_counter()
    for (source, constants), name in programs.items():
        opened._compile(source + mark, name, constants)
    return time.perf_counter() - started


def _measure_gpu(spec: DeviceSpec, say: Say) -> GpuRates:
    device = f"cuda:{spec.index}"
    options: dict[str, Any] = {"device": device, "iterations": REPEATS + 1, "random_state": 0}
    rates = GpuRates().scaled(spec.multiprocessors, spec.capability)
    say(f"{spec.name}: start, compilation, launches")
    tiny = regular(200, 200, 20)
    first = _fit(ExplicitALS(40, assembly="sparse_syrk", **options), tiny)
    again = _fit(ExplicitALS(40, assembly="sparse_syrk", **options), tiny)
    compile_seconds = dict(rates.compile)
    fused = _has_fused(device)
    # a rank nobody asks for: its kernels are not in this process yet
    for name, model in (
        ("fused", ExplicitALS(61, **options)),
        ("sparse_syrk", ExplicitALS(61, assembly="sparse_syrk", **options)),
        ("msgd", SGD(61, **options)),
        ("batch_hogwild", SGD(61, schedule="batch_hogwild", **options)),
        ("ccd++", CCD(61, **options)),
    ):
        if name != "fused" or fused:
            compile_seconds[name] = _compile_seconds(open_device(device), model, tiny) or rates.compile[name]
    # all three compile one kernel for the sums and the same ones for the solution
    compile_seconds |= dict.fromkeys(("mo_als", "bals"), compile_seconds["sparse_syrk"])
    rates = replace(
        rates,
        multiprocessors=spec.multiprocessors,
        start=max(1e-3, first.setup - again.setup),
        compile=compile_seconds,
        sweep=again.iteration / 2,
    )
    long, short = regular(*GPU_LONG), regular(*GPU_SHORT)
    rates = _measure_transfer(rates, long, short, device)
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
    return _gpu_others(replace(rates, published=curves), long, options)


def _has_fused(device: str) -> bool:
    return plan(shape=(10, 10), nnz=10, model=ExplicitALS(64, device=device)).assembly == "fused"


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
    """Seconds of an entry and of a row at each rank, launches taken off."""
    entries, rows = [], []
    for f in ranks:
        times = []
        for problem in (long, short):
            seconds = iteration_seconds(ExplicitALS(f, assembly=assembly, reorder="none", **options), problem)
            times.append(max(seconds - 2 * rates.sweep, 0.1 * seconds))
        entry, row = entry_and_row((times[0], times[1]), (long, short))
        entries.append(entry)
        rows.append(row)
    return entries, rows


def _measure_transfer(rates: GpuRates, long: sp.csr_array, short: sp.csr_array, device: str) -> GpuRates:
    """Bytes/s of an upload, and what an ALS takes on the host for each row before its first iteration."""
    opened = open_device(device)
    data = np.ones(1 << 26, dtype=np.float32)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        array = opened.upload(data)
        opened.synchronize()
        seconds.append(time.perf_counter() - started)
        del array
    upload = data.nbytes / min(seconds)
    options: dict[str, Any] = {"device": device, "iterations": 2, "random_state": 0}
    fit = min(
        (_fit(ExplicitALS(40, assembly="sparse_syrk", **options), short) for _ in range(2)), key=lambda f: f.setup
    )
    row = max(1e-9, (fit.setup - 2.0 * short.nnz * 8 / upload) / sum(short.shape))
    setup = {
        name: max(1e-10, (_fit(model, long).setup - 2.0 * long.nnz * 8 / upload) / long.nnz)
        for name, model in (
            ("msgd", SGD(40, **options)),
            ("batch_hogwild", SGD(40, schedule="batch_hogwild", **options)),
            ("ccd++", CCD(8, **options)),
        )
    }
    return replace(rates, upload_bytes=upload, row_setup=row, entry_setup=setup)


def _gpu_others(rates: GpuRates, problem: sp.csr_array, options: dict[str, Any]) -> GpuRates:
    def entry(f: int, schedule: str) -> float:
        seconds = iteration_seconds(SGD(f, schedule=schedule, **options), problem)
        return max(seconds - 2 * rates.sweep, 0.1 * seconds) / problem.nnz

    sgd = {
        schedule: _curve(SGD_RANKS, lambda f: 16 * f, [entry(f, schedule) for f in SGD_RANKS])
        for schedule in ("msgd", "batch_hogwild")
    }
    model = CCD(16, **options)
    seconds = iteration_seconds(model, problem)
    busy = max(seconds - 2 * rates.sweep - 16 * 6 * rates.launch, 0.1 * seconds)  # launches are counted apart
    return replace(rates, sgd=sgd, ccd=plan(problem, model).bytes_per_iteration / busy)
