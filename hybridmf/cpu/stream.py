"""ALS on the CPU over ratings read slab by slab; results have the bits of `hybridmf.cpu.als.CpuALS`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ..core.objective import SIDES, Factors, Objective, Side, State
from ..core.validate import csr_arrays
from ..data.slabs import Slabs
from ..plan.ordering import Ordering
from ..plan.types import Plan
from .als import CpuALS, HalfSweep, aligned_zeros, losses_of_rows, weighted_gram


class StreamedHalf:
    """One half of a sweep over slabs: one `hybridmf.cpu.als.HalfSweep` after the other.

    Rows are independent, and in no kernel do a row's bits depend on neighbouring rows. So results do not depend on
    the bounds of slabs.

    Parameters
    ----------
    side : {"user", "item"}
        The side to solve.
    slabs : Slabs
        One row for each row of the side.
    objective : Objective
    plan : Plan
    names : int64 array, shape (n_rows,), optional
        Number of each row in error messages. Default: its position.
    check : callable, optional
        See `hybridmf.cpu.als.HalfSweep`.
    """

    one_thread = False

    def __init__(
        self,
        side: Side,
        slabs: Slabs,
        objective: Objective,
        plan: Plan,
        names: np.ndarray | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.side, self.slabs, self.objective, self.plan, self.check = side, slabs, objective, plan, check
        self.names = np.arange(len(slabs.degrees)) if names is None else names
        self.degrees = slabs.degrees
        self.scale = objective.row_scale(self.degrees)

    def solve(self, fixed: Factors, mean: float, start: Factors | None = None) -> Factors:
        """New factors of the side; see `HalfSweep.solve`."""
        plan, bounds = self.plan, self.slabs.bounds
        gram = weighted_gram(np.ascontiguousarray(fixed.matrix), self.objective, plan.num_threads, blas=plan.uses_blas)
        out = aligned_zeros((len(self.degrees), plan.factors), fixed.matrix.dtype)
        bias = np.zeros(len(out), dtype=out.dtype) if self.objective.biases else None
        for k, (first, last) in enumerate(pairwise(bounds.tolist())):
            self.slabs.prefetch(k + 1)
            rows = slice(first, last)
            half = HalfSweep(self.side, self.slabs.matrix(k), self.objective, plan, self.names[rows])
            half.check = self.check
            before = None if start is None else start.part(rows)
            solved = half.solve(fixed, mean, before, gram)
            out[rows] = solved.matrix
            if bias is not None and solved.bias is not None:
                bias[rows] = solved.bias
        return Factors(out, bias)

    def losses(self, users: Factors, items: Factors, mean: float) -> np.ndarray:
        """See `HalfSweep`."""
        losses = np.zeros(len(self.degrees))
        for k, (first, last) in enumerate(pairwise(self.slabs.bounds.tolist())):
            self.slabs.prefetch(k + 1)
            part = State(users.part(slice(first, last)), items, mean)
            csr = csr_arrays(self.slabs.matrix(k))
            losses[first:last] = losses_of_rows(self.objective, csr, part, self.plan.num_threads)
        return losses


class StreamedCpuALS(CpuALS):
    """`CpuALS` that reads its ratings slab by slab in each half sweep.

    Parameters
    ----------
    user_slabs, item_slabs : Slabs
        The ratings in both orientations.
    objective : Objective
    plan : Plan
    state : State
    """

    def __init__(self, user_slabs: Slabs, item_slabs: Slabs, objective: Objective, plan: Plan, state: State) -> None:
        self.objective, self.plan, self.state = objective, plan, state
        self.order = Ordering()
        slabs = {"user": user_slabs, "item": item_slabs}
        self.halves = {side: StreamedHalf(side, slabs[side], objective, plan) for side in SIDES}
