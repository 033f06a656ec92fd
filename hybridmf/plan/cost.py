"""The cost model: seconds and set-up of a plan on a machine, by counts of flops and bytes over measured rates.

Each method prices its iteration (`hybridmf.plan.als`, `.sgd`, `.ccd`) with the functions of this module; one of ALS on
GPUs is two half sweeps (`hybridmf.plan.half_sweep`, which has the formula). On the CPU, rates are those of a core times
``speedup(threads)``. Set-up is the work of a backend before the first iteration: copies to a GPU, compiling or loading
kernels, starting libraries. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .machine import CpuRates, GpuRates, Machine

if TYPE_CHECKING:
    from .types import Plan

CHECK_ENTRY = 6e-9  # seconds of one core to validate an entry of the input, on any device (as_csr, 18 million entries)
TRANSPOSE_ENTRY = 9e-9  # seconds of one core to transpose an entry (bench/layouts.py)


@dataclass(frozen=True)
class Warmth:
    """Set-up that is already done for a GPU."""

    started: bool = False  # the GPU has been used in this process
    compiled: bool = False  # the compiled kernels of this plan are cached on disk
    loaded: bool = False  # the kernels have run in this process


@dataclass(frozen=True)
class Cost:
    """Predicted seconds."""

    iteration: float
    setup: dict[str, float]  # before and after the iterations, by purpose

    def total(self, iterations: int) -> float:
        return sum(self.setup.values()) + iterations * self.iteration


def cost_of(plan: Plan, machine: Machine, warmth: Warmth | None = None) -> Cost:
    """Predict a plan's seconds on its device.

    `plan`: complete plan; its `facts` may be None. `warmth`: default: a fresh process whose kernels have been compiled
    before.
    """
    method = plan.method
    # a GPU that has all ratings transposes them, and draws the initial factors, itself
    transposed = 0.0 if plan.ratings_on_device else TRANSPOSE_ENTRY
    entry = (CHECK_ENTRY + transposed) / machine.cpu.speedup(plan.num_threads) + method.entry_seconds
    host = {"input and start": plan.nnz * entry + machine.cpu.fit}
    if plan.gpu is None:
        host["input and start"] += (plan.n_users + plan.n_items) * plan.factors * machine.cpu.draw
        return Cost(_cpu_iteration(plan, machine.cpu), host | method.cpu_setup(plan, machine.cpu))
    machine = machine.with_gpu(plan.gpu)
    setup = _gpu_setup(plan, machine.gpu, warmth or Warmth(compiled=True))
    return Cost(method.gpu_iteration(plan, machine), host | setup)


# ------------------------------------------------------------------------------------------------------------- CPU


def _cpu_iteration(plan: Plan, rates: CpuRates) -> float:
    work = plan.method.cpu_work(plan, rates)
    # vector registers hold half as many float64, and memory moves twice the bytes
    wider = plan.itemsize / 4
    shared = work.seconds * wider / rates.speedup(plan.num_threads)
    new = 0.0
    if max(plan.table_bytes) > rates.cache:  # smaller ones get memory that has been used before
        new = work.new_tables * (plan.n_users + plan.n_items) * plan.rank * rates.fresh * wider
    gram = 2.0 * rates.gram if plan.feedback == "implicit" else 0.0
    return max(shared, work.longest * wider) + new + work.regions * rates.region + 2 * rates.sweep + gram


def gather_seconds(plan: Plan, rates: CpuRates) -> float:
    """Seconds of one core to gather the row of factors of each entry, both half sweeps."""
    return sum(
        plan.nnz * plan.rank * 4 / (rates.cached_bytes if size <= rates.cache else rates.gather_bytes)
        for size in plan.table_bytes
    )


def memory_floor(moved: float, plan: Plan, rates: CpuRates) -> float:
    """Core seconds to move `moved` bytes at the memory bandwidth shared by all cores, a lower bound."""
    if max(plan.table_bytes) <= rates.cache:
        return 0.0
    return moved / rates.memory_bytes * rates.speedup(plan.num_threads)


# ------------------------------------------------------------------------------------------------------------- GPU


def _gpu_setup(plan: Plan, rates: GpuRates, warmth: Warmth) -> dict[str, float]:
    method = plan.method
    assembly, what = method.names(plan)
    name = plan.assembly if assembly else what
    ratings, tables, rows = plan.bytes.get("ratings", 0), sum(plan.table_bytes), plan.n_users + plan.n_items
    if plan.ratings_on_device:
        ratings //= 2  # one orientation is uploaded
    kernels = rates.load if warmth.compiled else rates.compile[name]
    setup = {
        "transfer": (ratings + tables) / rates.upload_bytes + rows * plan.rank * rates.factor_setup,
        "layouts": rows * rates.row_setup + plan.nnz * rates.entry_setup.get(name, 0.0),
        "fit": rates.fit[method.kind],
        "kernels": 0.0 if warmth.loaded else kernels,
    }
    setup |= method.gpu_setup(plan)
    if not warmth.started:
        setup["start"] = rates.start
    return setup


def gpu_idle(plan: Plan, rates: GpuRates) -> float:
    """Seconds of both half sweeps on a GPU with no work."""
    gram = rates.gram if plan.feedback == "implicit" else 0.0
    return 2 * (rates.sweep[plan.method.kind] + gram)
