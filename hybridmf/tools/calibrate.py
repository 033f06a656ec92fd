"""Measures the constants of the cost model on this machine: fits of small synthetic problems, copies and collectives.

Choices of the device depend on few of the constants (bench/dispatch.py, 820 choices of recorded fits): how fast the
cores and the GPU are as a whole, how they scale, and what an iteration costs beside its work. So one speed scales all
rates of the cores, and one all rates of the GPU. Each time is that of the fastest of some iterations.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..als import ExplicitALS
from ..core.system import available_cores
from ..device.cuda import Device, DeviceSpec, device_count, open_device
from ..errors import CommunicatorError, DeviceError
from ..model.base import FactorModel
from ..plan import dispatch
from ..plan import machine as _machine
from ..plan.cost import cost_of
from ..plan.machine import CpuRates, GpuRates, LinkRates, Machine, built_in
from ..ranks.group import open_rank
from ..ranks.transport.threads import ThreadCommunicator, run_ranks
from .preview import plan

RANKS = (16, 32, 64, 128)  # ranks at which speeds are measured; their median counts

CPU_PROBLEMS = ((4000, 4000, 50), (6000, 6000, 4))
"""Rows, columns and entries a row: of problems where entries and where rows take most of the time."""

CPU_ALL = (16_000, 16_000, 50)  # the same for all cores
GPU_PROBLEMS = ((40_000, 40_000, 400), (400_000, 400_000, 4))  # the same for a GPU, which needs enough rows to be busy
TINY = (200, 200, 20)  # a problem whose time is overhead
TINY_ITERATIONS = 50
REPEATS = 3  # iterations of each fit after the first, which is a warm-up; the fastest counts

COPY_BYTES, COLLECTIVE_BYTES = 256 << 20, 1 << 30
"""Bytes of arrays, at most an eighth of the free memory: a copy over a PCIe 5 bus, or a collective over NVLink, takes
5 ms."""

WIDTH = 1024  # columns of the arrays of collectives
COUNTS = (2, 4, 8, 16)  # numbers of GPUs for which collectives are measured, if available
RUNS = 4  # runs of a copy or collective; the fastest counts

clock = time.perf_counter

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


def calibrate(*, gpu: bool = True, say: Say | None = None) -> tuple[Machine, dict[str, Any]]:
    """Rates of cores, the first GPU and the links of all GPUs, described to `say`; name and driver of the GPU."""
    tell: Say = say or (lambda text: None)
    tell("cores: one, and all together")
    cpu = _measure_cpu()
    machine = replace(built_in(), cpu=cpu, source=f"measured on {datetime.now(UTC):%Y-%m-%d}")
    found, reason = dispatch.find_gpu("auto") if gpu else (None, "not asked for")
    if found is None:
        tell(f"no GPU is measured: {reason}")
        return machine, {}
    tell(f"{found.name}: launches, sums and solutions")
    rates = _measure_gpu(found, machine)
    links = measure_links([f"cuda:{index}" for index in range(device_count())], machine.links, tell)
    return replace(machine, gpu=rates, links=links, gpu_name=found.name), _gpu_identity(found)


def calibrate_and_save(say: Say | None = None) -> tuple[Machine, os.PathLike[str]]:
    """Measure the constants and save them for later fits: also gives the file."""
    _machine.prepare()  # fails before the measurements
    machine, gpu_identity = calibrate(say=say)
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


def _measure_cpu() -> CpuRates:
    tiny = regular(*TINY)
    idle = iteration_seconds(_model(RANKS[0], num_threads=1, iterations=TINY_ITERATIONS), tiny)
    speed = _speed(built_in(), idle, CPU_PROBLEMS, "cpu", num_threads=1)
    rates = replace(built_in().cpu.scaled(speed), serial=_serial())
    model = _model(RANKS[0], num_threads=available_cores(), iterations=TINY_ITERATIONS)
    work = cost_of(plan(tiny, model), Machine(cpu=replace(rates, sweep=0.0, region=0.0))).iteration
    # parallel regions are a part of the half sweeps of a tiny problem
    sweep = (iteration_seconds(model, tiny) - work) / 2 - 2 * rates.region
    return replace(rates, sweep=max(1e-6, sweep))


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


def _measure_gpu(spec: DeviceSpec, machine: Machine) -> GpuRates:
    device, known = f"cuda:{spec.index}", GpuRates().scaled(spec.multiprocessors, spec.capability)
    idle = iteration_seconds(_model(40, device, iterations=TINY_ITERATIONS), regular(*TINY))
    slower = idle / 2 / known.sweep["als"]
    rates = replace(known, sweep={kind: seconds * slower for kind, seconds in known.sweep.items()})
    speed = _speed(replace(machine, gpu=rates, gpu_name=spec.name), idle, GPU_PROBLEMS, device)
    return replace(rates.sped_up(speed), multiprocessors=spec.multiprocessors)


# ------------------------------------------------------------------------------------------------------------- links


def measure_links(names: Sequence[str], links: LinkRates, say: Say) -> LinkRates:
    """Measure the links of some GPUs with all of them active, as in a fit; the slowest GPU counts.

    `names`: devices. `links`: constants that are not measured: files, launches, and NCCL with one GPU or if
    it does not work. `say`: called with a description of each measurement.
    """
    say("links: copies between host and GPU")
    copies = run_ranks(len(names), lambda control: _copy_rates(control, open_device(names[control.rank])))
    pinned, fetched, copied = np.min(copies, axis=0).tolist()
    links = replace(links, pinned_bytes=pinned, fetch_bytes=fetched, copy_bytes=copied)
    counts = [count for count in COUNTS if count <= len(names)]
    if counts:
        say(f"links: collectives of {', '.join(map(str, counts))} GPUs")
    reduced = []
    for count in counts:
        try:
            rates = run_ranks(count, lambda control: _collective_rates(control, names[control.rank]))
        except (DeviceError, CommunicatorError) as error:
            say(f"links between GPUs are not measured: {error}")
            return links
        scattered, gathered = np.min(rates, axis=0).tolist()
        reduced.append((float(count), scattered))
        links = replace(links, reduce_scatter=tuple(reduced), all_gather=gathered)
    return links


def _fastest(control: ThreadCommunicator, run: Callable[[], Any], settle: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few runs that all ranks start together."""
    best = math.inf
    for _ in range(RUNS):
        control.barrier()
        started = clock()
        run()
        settle()
        best = min(best, clock() - started)
    return best


def _copy_rates(control: ThreadCommunicator, device: Device) -> tuple[float, float, float]:
    """Bytes/s from page-locked memory to the device, back, and within it (read and written)."""
    host = np.ones(min(COPY_BYTES, device.free_bytes() // 8) // 4, np.float32)
    with device.active():
        copier = device.copier()
        copier.pin(host)
        array, other = device.empty(len(host), np.float32), device.zeros(len(host), np.float32)
        device.synchronize()

        def copy() -> None:
            other[...] = array

        to_device = _fastest(control, lambda: copier.copy(array, host), copier.synchronize)
        to_host = _fastest(control, lambda: copier.fetch(host, array), copier.synchronize)
        within = _fastest(control, copy, device.synchronize)
    return host.nbytes / to_device, host.nbytes / to_host, 2 * host.nbytes / within


def _collective_rates(control: ThreadCommunicator, name: str) -> tuple[float, float]:
    """Bytes/s that a GPU sends in a reduce-scatter, and receives in an all-gather."""
    communicator, device = open_rank(name, control)
    assert device is not None
    with closing(communicator), device.active():
        count = control.size
        rows = max(1, min(COLLECTIVE_BYTES, device.free_bytes() // 8) // (4 * WIDTH * count))
        counts, moved = [rows] * count, 4 * WIDTH * rows * (count - 1)
        whole, part = (device.zeros((n, WIDTH), np.float32) for n in (rows * count, rows))
        scattered = _fastest(control, lambda: communicator.reduce_scatter(whole, counts), device.synchronize)
        gathered = _fastest(control, lambda: communicator.allgatherv(part, counts), device.synchronize)
        return moved / scattered, moved / gathered
