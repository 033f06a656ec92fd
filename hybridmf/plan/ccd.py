"""CCD++ as a `Method`: validated hyperparameters, device, memory and cost."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..core.objective import Objective, Side
from ..core.validate import check_bool, check_int, index_pointer_dtype
from ..device.cuda import DeviceSpec
from ..errors import NonFiniteError
from ..native import _ccd
from . import dispatch
from .cost import gpu_idle, memory_floor
from .machine import CpuRates, Machine
from .solver import SWEEP_ORDER, frozen_text
from .types import CpuWork, Plan, Settings, instruction_set_notes

logger = logging.getLogger("hybridmf")

MAX_INNER_ITERATIONS = 1000
"""Upper bound; a rank-one problem converges long before."""


@dataclass(frozen=True)
class CcdMethod:
    """Hyperparameters of CCD++ beyond the objective (Yu, Hsieh, Si and Dhillon 2012)."""

    kind: ClassVar[str] = "ccd"
    entry_seconds: ClassVar[float] = 4e-9  # bench/dispatch.py, 16 cores
    streams: ClassVar[bool] = False

    inner_iterations: int = 1
    """Alternations between the item and the user vector before the residual is updated for the next factor."""
    nonnegative: bool = False  # project coordinates to max(0, .), which gives the exact minimizer under that constraint

    def names(self, plan: Plan) -> tuple[str, str]:
        """No assembly, and the name of the method."""
        return "", "ccd++"

    @classmethod
    def check(cls, *, inner_iterations: Any, nonnegative: Any) -> CcdMethod:
        """Validate each hyperparameter."""
        return cls(
            check_int("inner_iterations", inner_iterations, 1, MAX_INNER_ITERATIONS),
            check_bool("nonnegative", nonnegative),
        )

    def plan(self, base: Plan, settings: Settings, objective: Objective, spec: DeviceSpec | None) -> Plan:
        """Decide device and memory. With device="auto", use the GPU found if the work outweighs its start-up time."""
        if isinstance(settings.device, tuple):
            raise ValueError(
                f"device={list(settings.device)!r}: CCD runs on one device; name one, or use ALS or SGD on several"
            )
        base = base.changed(precision="float32", reorder="none")
        return dispatch.choose(
            dispatch.PlanRequest(
                base,
                settings,
                spec,
                on_cpu=_on_cpu,
                on_gpu=lambda undecided: _on_gpu(undecided, settings, spec),
            )
        )

    @staticmethod
    def bias_columns(plan: Plan) -> tuple[Side, ...]:
        """Sides whose biases are stored in the first columns of coordinates, with ones on the other side."""
        return SWEEP_ORDER if plan.rank > plan.factors else ()

    def columns_of_work(self, plan: Plan) -> float:
        """Equivalent number of factors with one inner iteration each; each column of biases counts as one."""
        return plan.factors * (4.0 * self.inner_iterations + 6.0) / 10.0 + len(self.bias_columns(plan))

    def flops_per_iteration(self, plan: Plan) -> float:
        """Useful work: per entry, side and factor 4 flops for each inner iteration, and 4 for two residual updates.

        Recomputing the residual at the start of an iteration takes another 2 per factor.
        """
        return 20.0 * plan.nnz * self.columns_of_work(plan)

    def bytes_per_iteration(self, plan: Plan) -> float:
        """Both copies of the residual, read and written once per factor, with their indices.

        Further inner iterations only read.
        """
        itemsize = np.dtype(plan.dtype).itemsize
        once, again = 2.0 * (4 + 2 * itemsize), 2.0 * (4 + itemsize)
        biases = len(self.bias_columns(plan))
        return plan.nnz * ((plan.factors + biases) * once + plan.factors * (self.inner_iterations - 1) * again)

    def cpu_setup(self, plan: Plan, rates: CpuRates) -> dict[str, float]:
        return {}

    def cpu_work(self, plan: Plan, rates: CpuRates) -> CpuWork:
        """Passes over all entries, one factor at a time; factors are converted to columns and back to rows."""
        once = plan.nnz * rates.ccd_entry + plan.filled_rows * rates.ccd_row
        floor = memory_floor(self.bytes_per_iteration(plan) * 4 / plan.itemsize, plan, rates)
        regions = plan.factors * (2.0 * self.inner_iterations + 2.0) + len(self.bias_columns(plan)) * 4.0
        return CpuWork(max(self.columns_of_work(plan) * once, floor), regions, new_tables=2.0)

    def gpu_setup(self, plan: Plan) -> dict[str, float]:
        return {}

    def gpu_iteration(self, plan: Plan, machine: Machine) -> float:
        """Bytes divided by their rate, and several launches for each factor."""
        rates, biases = machine.gpu, len(self.bias_columns(plan))
        launches = plan.factors * (2.0 * self.inner_iterations + 4.0) + biases * 6.0
        rows = plan.filled_rows * (plan.factors + biases) * rates.ccd_row
        return self.bytes_per_iteration(plan) / rates.ccd + rows + launches * rates.launch + gpu_idle(plan, rates)

    def row_cost(self, plan: Plan) -> float:
        """None: it runs on one device."""
        return 0.0

    def describe(self, plan: Plan) -> str:
        """Name and hyperparameters."""
        inner = f"{self.inner_iterations} inner iteration{'s' if self.inner_iterations > 1 else ''}"
        sign = ", non-negative" if self.nonnegative else ""
        return f"ccd++, {inner} of each rank-one update{sign}{frozen_text(plan)}"


def non_finite(objective: Objective, side: Side, row: int, factor: int | None) -> NonFiniteError:
    """The error for a coordinate that overflowed; a bias if `factor` is None."""
    what, penalty = f"factor {factor}", f"regularization (now {objective.regularization.of(side):g})"
    if factor is None:
        what, penalty = "bias", f"bias_regularization (now {objective.bias_regularization.of(side):g})"
    return NonFiniteError(
        f"{what} of {side} {row} became infinite or NaN; "
        f"scale the ratings down, increase {penalty}, or use dtype='float64'"
    )


def _on_cpu(plan: Plan) -> Plan:
    """`plan` on the CPU: ratings and residual in both orientations, factors by row and by column."""
    m, n, nnz = plan.n_users, plan.n_items, plan.nnz
    itemsize = np.dtype(plan.dtype).itemsize
    pointer = np.dtype(index_pointer_dtype(nnz)).itemsize
    sizes = {
        # the kernels' int64 pointers are copies if those of the matrices are int32
        "ratings": 2 * nnz * (itemsize + 4) + (m + n) * (pointer + 8),
        "residual": 2 * nnz * itemsize,
        # by column; and by row, old and new, so that an interrupted iteration has no effect
        "factors": 3 * (m + n) * (plan.factors + len(CcdMethod.bias_columns(plan))) * itemsize,
        "vectors": (m + n) * (2 * itemsize + 8 * (1 + plan.rank - plan.factors)),
        "workspace": plan.num_threads * _ccd.LONG_ROW * itemsize,
    }
    return plan.changed(bytes=sizes, notes=tuple(instruction_set_notes()))


def _on_gpu(plan: Plan, settings: Settings, spec: DeviceSpec | None) -> Plan:
    """`plan` on the GPU."""
    assert spec is not None
    from .ccd_gpu import memory_bytes  # which imports this module

    if settings.gpu_memory_limit is not None:
        spec = replace(spec, free_bytes=min(spec.free_bytes, settings.gpu_memory_limit))
    biases = plan.rank > plan.factors
    sizes = memory_bytes(plan.n_users, plan.n_items, plan.nnz, plan.factors, plan.dtype, spec, biases)
    return plan.changed(device=f"cuda:{spec.index}", gpu=spec, bytes=sizes)
