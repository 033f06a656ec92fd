"""The cost model: seconds and set-up of a plan on a machine, by counts of flops and bytes over measured rates.

One iteration of ALS on either kind of device is, for each side of ``rows`` rows,

    nnz * max(f (f + 1) / assembly rate(f), f bytes / gather rate)  +  rows * (f^3 / 3 + 2 f^2) / solve rate(f)

where a core's assembly and solve rates are shared by ``speedup(threads)`` cores (`hybridmf.plan.machine`): the roofline
(Williams, Waterman and Patterson 2009) for the sums over entries, and a rate that depends on the rank for the systems.
CG, subspaces, SGD and CCD++ have their own counts. Set-up is what a backend does before the first iteration: copies to
a GPU, kernels compiled or loaded, libraries started. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .machine import CpuRates, GpuRates, Machine, rate_at, seconds_at

if TYPE_CHECKING:
    from .types import Plan

CHECK_ENTRY = 6e-9
"""Seconds of one core to check an entry of the input, on any device (as_csr, 18 million entries)."""

TRANSPOSE_ENTRY = 9e-9
"""Seconds of one core to transpose one (bench/layouts.py)."""

METHOD_ENTRY = {"als": 0.0, "sgd": 3e-9, "ccd": 4e-9}
"""Seconds on any device to prepare one for a method, beyond that (bench/dispatch.py, 16 cores)."""

TILE_ENTRY = 1.2e-8
"""Seconds of one core to put one into a BALS tile (bench/layouts.py)."""

TRIPLET_ENTRY = 3e-8
"""Seconds of one core to bring one into the order of a schedule of SGD on the CPU."""

CHAIN = 32_768
"""Entries of a row that MSGD on a GPU works through one by one; longer rows have a block of their own, which solves
several at a time, beside the others (gpu/sgd.py, LONG_ROW)."""

FRESH_TABLES = {"als": 1.0, "sgd": 0.2, "ccd": 2.0}
"""Factors that an iteration writes to new memory, as a share of all: CCD++ lays them out by column and by row again."""

PINNED_BYTES = 5.5e10
"""Bytes a second from page-locked memory to a GPU on PCIe 5 (an H200); a guess for others."""


@dataclass(frozen=True)
class Warmth:
    """What a process has behind it on its GPU.

    Attributes
    ----------
    started : bool
        The GPU has worked in this process.
    compiled : bool
        The kernels of this plan lie compiled on disk.
    loaded : bool
        They have run in this process.
    """

    started: bool = False
    compiled: bool = False
    loaded: bool = False


@dataclass(frozen=True)
class Cost:
    """Predicted seconds.

    Attributes
    ----------
    iteration : float
    setup : dict of str to float
        Before and after the iterations, by purpose.
    """

    iteration: float
    setup: dict[str, float]

    def total(self, iterations: int) -> float:
        """Of a fit."""
        return sum(self.setup.values()) + iterations * self.iteration


def cost_of(plan: Plan, machine: Machine, warmth: Warmth | None = None) -> Cost:
    """Predict a plan's seconds on its device.

    Parameters
    ----------
    plan : Plan
        With everything decided; its `facts` may be None.
    machine : Machine
    warmth : Warmth, optional
        Default: a fresh process whose kernels have been compiled before.
    """
    entry = CHECK_ENTRY + TRANSPOSE_ENTRY / machine.cpu.speedup(plan.num_threads) + METHOD_ENTRY[_kind(plan)]
    drawn = (plan.n_users + plan.n_items) * plan.factors * machine.cpu.draw
    host = {"input and start": plan.nnz * entry + drawn + machine.cpu.fit}
    if plan.gpu is None:
        return Cost(_cpu_iteration(plan, machine.cpu), host | _cpu_setup(plan, machine.cpu))
    rates = machine.gpu_rates(plan.gpu.name, plan.gpu.multiprocessors, plan.gpu.capability)
    setup = _gpu_setup(plan, rates, warmth or Warmth(compiled=True))
    return Cost(_gpu_iteration(plan, rates), host | setup)


def _assembly_flops(f: float) -> float:
    return f * (f + 1)


def _solve_flops(f: float) -> float:
    return f**3 / 3 + 2 * f * f


def _itemsize(plan: Plan) -> int:
    return np.dtype(plan.dtype).itemsize


def _kind(plan: Plan) -> str:
    return "als" if plan.method is None else plan.method.kind


def _rows(plan: Plan) -> int:
    """Rows of both sides that have entries: a bound, or what the data say."""
    rows = plan.n_users + plan.n_items - (0 if plan.facts is None else plan.facts.empty)
    return min(rows, min(plan.n_users, plan.nnz) + min(plan.n_items, plan.nnz))


def _tables(plan: Plan) -> tuple[int, int]:
    """Bytes of the factors of either side."""
    return plan.n_users * plan.rank * _itemsize(plan), plan.n_items * plan.rank * _itemsize(plan)


# ------------------------------------------------------------------------------------------------------------- CPU


def _cpu_setup(plan: Plan, rates: CpuRates) -> dict[str, float]:
    share = rates.speedup(plan.num_threads)
    setup = {}
    if plan.tile_rows:
        setup["tiles"] = 2 * plan.nnz * TILE_ENTRY / share
    if plan.reorder != "none":
        setup["reorder"] = 2 * plan.nnz * TRANSPOSE_ENTRY / share
    if getattr(plan.method, "schedule", "msgd") != "msgd":
        setup["schedule"] = plan.nnz * TRIPLET_ENTRY
    return setup


def _cpu_iteration(plan: Plan, rates: CpuRates) -> float:
    work, passes = {"als": _cpu_als, "sgd": _cpu_sgd, "ccd": _cpu_ccd}[_kind(plan)](plan, rates)
    # vector registers hold half as many float64, and memory moves twice the bytes
    wider = _itemsize(plan) / 4
    shared = work * wider / rates.speedup(plan.num_threads)
    fresh = 0.0
    if max(_tables(plan)) > rates.cache:  # smaller ones get memory that has been used before
        fresh = FRESH_TABLES[_kind(plan)] * (plan.n_users + plan.n_items) * plan.rank * rates.fresh * wider
    gram = 2.0 * rates.gram if plan.feedback == "implicit" else 0.0
    return max(shared, _cpu_serial(plan, rates) * wider) + fresh + passes * rates.region + 2 * rates.sweep + gram


def _gather(plan: Plan, rates: CpuRates) -> float:
    """Seconds of one core to gather the row of factors of each entry, both half sweeps."""
    return sum(
        plan.nnz * plan.rank * 4 / (rates.cached_bytes if size <= rates.cache else rates.gather_bytes)
        for size in _tables(plan)
    )


def _memory_floor(moved: float, plan: Plan, rates: CpuRates) -> float:
    """Core seconds below which the memory, which all cores share, does not let `moved` bytes pass."""
    return moved / rates.memory_bytes * rates.speedup(plan.num_threads) if max(_tables(plan)) > rates.cache else 0.0


def _cpu_als(plan: Plan, rates: CpuRates) -> tuple[float, float]:
    """Core seconds and parallel regions of an iteration."""
    f, rows, entries = plan.rank, _rows(plan), 2 * plan.nnz
    implicit = plan.feedback == "implicit"
    gram = rows * f * f / rate_at(rates.assembly, f) if implicit else 0.0
    floor = max(_gather(plan, rates), _memory_floor(entries * f * 4.0, plan, rates))
    if plan.solver == "cg":
        passes = plan.cg_steps + 1
        entry = seconds_at(rates.cg, lambda f: passes * 4 * f, f)
        row = rates.row + (passes * 2 * f * f / rates.dense if implicit else 0.0)
        return max(entries * entry, floor) + rows * row + gram, 4.0
    if plan.solver == "subspace":
        block = plan.block_size
        flops = entries * f * (block + 7.0) + rows * f * (block**2 / 3 + 4.0 * f)
        return max(flops / rates.subspace, floor) + rows * rates.row + gram, 4.0
    entry = seconds_at(rates.assembly, _assembly_flops, f)
    row = seconds_at(rates.solve, _solve_flops, f)
    return max(entries * entry * rates.slower[plan.assembly], floor) + rows * row + gram, 4.0


def _cpu_sgd(plan: Plan, rates: CpuRates) -> tuple[float, float]:
    method: Any = plan.method
    flops = 10 if method.schedule == "msgd" else 8
    entry = seconds_at(rates.sgd[method.schedule], lambda f: flops * f, plan.rank)
    if method.rate_schedule in ("rpcs", "adagrad"):
        entry *= 3.0  # a square root and a division for each row or coordinate that moves
    moved = method.bytes_per_iteration(plan) * 4 / _itemsize(plan)
    # blocks keep the rows they move in a core's cache
    near = method.schedule == "blocks"
    floor = 0.0 if near else max(_gather(plan, rates), _memory_floor(moved, plan, rates))
    return max(plan.nnz * entry, floor) + _rows(plan) * rates.sgd_row, 4.0


def _cpu_serial(plan: Plan, rates: CpuRates) -> float:
    """Seconds of the longest chain no two threads can share: a row of MSGD, whose updates wait for each other."""
    if plan.facts is None or getattr(plan.method, "schedule", "") != "msgd":
        return 0.0
    longest = max(plan.facts.longest_user, plan.facts.longest_item)
    return longest * seconds_at(rates.sgd["msgd"], lambda f: 5 * f, plan.rank)


def _cpu_ccd(plan: Plan, rates: CpuRates) -> tuple[float, float]:
    method: Any = plan.method
    inner = method.inner_iterations
    once = plan.nnz * rates.ccd_entry + _rows(plan) * rates.ccd_row
    floor = _memory_floor(method.bytes_per_iteration(plan) * 4 / _itemsize(plan), plan, rates)
    biases = len(method.bias_columns(plan))
    return max(method.columns_of_work(plan) * once, floor), plan.factors * (2.0 * inner + 2.0) + biases * 4.0


# ------------------------------------------------------------------------------------------------------------- GPU


def _kernel_seconds(name: str, rates: GpuRates, warmth: Warmth) -> float:
    if warmth.loaded:
        return 0.0
    return rates.load if warmth.compiled else rates.compile[name]


def _gpu_setup(plan: Plan, rates: GpuRates, warmth: Warmth) -> dict[str, float]:
    name = plan.assembly if plan.method is None else plan.method.label
    ratings, tables, rows = plan.bytes.get("ratings", 0), sum(_tables(plan)), plan.n_users + plan.n_items
    setup = {
        "transfer": (ratings + 2 * tables) / rates.upload_bytes + rows * plan.rank * rates.factor_setup,
        "layouts": rows * rates.row_setup + plan.nnz * rates.entry_setup.get(name, 0.0),
        "fit": rates.fit[_kind(plan)],
        "kernels": _kernel_seconds(name, rates, warmth),
    }
    if plan.tile_rows:
        setup["tiles"] = 2 * plan.nnz * TILE_ENTRY
    if not warmth.started:
        setup["start"] = rates.start
    return setup


def _gpu_iteration(plan: Plan, rates: GpuRates) -> float:
    seconds: float = {"als": _gpu_als, "sgd": _gpu_sgd, "ccd": _gpu_ccd}[_kind(plan)](plan, rates)
    seconds += 2 * (rates.sweep[_kind(plan)] + (rates.gram if plan.feedback == "implicit" else 0.0))
    if not plan.streamed or plan.resident:
        return seconds
    # copies go on beside the kernels: the slower of both decides
    moved = 2 * plan.nnz * (4 + _itemsize(plan)) / (PINNED_BYTES if plan.streamed == "host" else rates.upload_bytes)
    if plan.scale is not None and plan.offloaded:
        halves = plan.scale.halves.values()
        files = "from disk" if plan.factors_on == "disk" else "from host"
        moved = max(moved, sum(max(half.seconds["from host"], half.seconds[files]) for half in halves))
        seconds += sum(half.seconds.get(name, 0.0) for half in halves for name in ("turns", "waves"))
    return max(seconds, moved)


def _gpu_als(plan: Plan, rates: GpuRates) -> float:
    assert plan.gpu is not None
    f, rows = plan.rank, _rows(plan)
    wider = rates.float64 if plan.dtype == "float64" else 1.0
    curve = rates.assembly if plan.assembly == "fused" else rates.published[plan.assembly]
    entry = seconds_at(curve, _assembly_flops, f) * rates.precision[plan.precision] * wider
    sides = sum(
        max(
            plan.nnz * entry,
            plan.nnz * f * _itemsize(plan) / (rates.cached_bytes if size <= plan.gpu.l2_bytes else rates.gather_bytes),
        )
        for size in _tables(plan)
    )
    row = seconds_at(rates.solve, _solve_flops, f) * wider
    if plan.solver == "cg":  # exact where its steps cost more than the factorization
        row = min(row, (plan.cg_steps + 1) * (2 * f * f / rates.cg + rates.cg_step) * wider)
    if plan.assembly != "fused":  # systems go through memory
        row += 2 * f * (f + 1) * _itemsize(plan) / rates.gather_bytes
    gram = 0.0
    if plan.feedback == "implicit":  # summed over all rows, then read again for each
        gram = rows * (2.0 * f * f / rate_at(rates.assembly, f) * wider + f * f * _itemsize(plan) / rates.cached_bytes)
    return sides + rows * row + gram


def _gpu_sgd(plan: Plan, rates: GpuRates) -> float:
    method: Any = plan.method
    itemsize = 2 if plan.precision == "float16" else _itemsize(plan)
    seconds = plan.nnz * seconds_at(rates.sgd[method.schedule], lambda f: 4 * f * itemsize, plan.rank)
    if plan.facts is not None and method.schedule == "msgd":
        seconds = max(seconds, sum(_chain(one, rates) for one in (plan.facts.longest_user, plan.facts.longest_item)))
    return seconds


def _chain(longest: int, rates: GpuRates) -> float:
    """Seconds of the longest row of a pass of MSGD, whose updates wait for each other."""
    return max(min(longest, CHAIN) * rates.serial_update, longest * rates.solved_update)


def _gpu_ccd(plan: Plan, rates: GpuRates) -> float:
    method: Any = plan.method
    biases = len(method.bias_columns(plan))
    launches = plan.factors * (2.0 * method.inner_iterations + 4.0) + biases * 6.0
    once = method.bytes_per_iteration(plan) / rates.ccd + _rows(plan) * (plan.factors + biases) * rates.ccd_row
    return once + launches * rates.launch
