"""Serving on a GPU: top-N, fold-in, objective; the counterpart of `hybridmf.cpu.engine`."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State
from ..core.sparse import RowColumns
from ..device.cuda import Array, Device
from ..plan import fused
from ..plan.als import for_fold_in
from ..plan.solver import Given
from ..plan.types import Plan
from . import factors as tables
from . import topk
from .half import HalfSweep


class GpuEngine:
    """A GPU with the methods of `hybridmf.cpu.engine.CpuEngine`."""

    def __init__(self, device: Device, plan: Plan) -> None:
        self.device, self.plan = device, plan
        self.name = plan.device

    def pack(self, items: np.ndarray | Array, candidates: np.ndarray | None = None) -> topk.PackedItems:
        return topk.PackedItems(self.device, items, candidates)

    def top_k(
        self,
        users: np.ndarray,
        packed: topk.PackedItems,
        n: int,
        seen: RowColumns | None = None,
        candidates: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        matrix, copies = (None, None) if seen is None else (seen.matrix(), seen.copies)
        return topk.top_k(self.device, users, packed, n, seen=matrix, candidates=candidates, copies=copies)

    def _table(self, factors: Factors) -> tables.DeviceFactors:
        width = fused.table_width(self.plan.rank, factors.matrix.dtype)
        return tables.to_device(self.device, factors, width)

    def gram(self, side: Side, fixed: Factors, objective: Objective) -> tuple[tables.DeviceFactors, Array | None]:
        """Copy the fixed side to the device; return it with its weighted Gram matrix."""
        table = self._table(fixed)
        with self.device.active():
            gram = tables.weighted_gram(self.device, table.table, self.plan.rank, objective)
        self.device.synchronize()  # the result is kept, and other threads may use it from streams of their own
        return table, gram

    def fold_in(self, side: Side, matrix: sp.csr_array, objective: Objective, given: Given) -> Factors:
        plan, pull, (fixed, gram) = for_fold_in(self.plan), given.pull, given.gram
        if pull is None:
            half = HalfSweep(self.device, side, matrix, objective, plan)
            return half.solve(fixed, given.mean, gram=gram).on_host()
        half = HalfSweep(self.device, side, matrix, objective, plan.changed(dual_sides=()))
        table = np.zeros((len(pull), half.width), half.dtype)
        table[:, : pull.shape[1]] = pull
        table[half.degrees == 0] = 0  # solutions take its place
        return half.solve(fixed, given.mean, gram=gram, pull=self.device.upload(table)).on_host()

    def objective_value(self, objective: Objective, matrix: sp.csr_array, state: State) -> float:
        device, unobserved = self.device, 0.0
        half = HalfSweep(device, "user", matrix, objective, for_fold_in(self.plan))
        both = users, items = self._table(state.user), self._table(state.item)
        with device.active():
            total = float(half.losses(users, items, state.mean).sum())
            if objective.is_implicit:
                grams = [factors.exact_gram(device) for factors in both]
                unobserved = objective.unobserved_weight * float(np.sum(grams[0] * grams[1]))
            degrees = (half.degrees, np.bincount(matrix.indices, minlength=matrix.shape[1]))
            rows = zip(SIDES, both, degrees, strict=True)
            penalties = [factors.penalty(device, objective, side, each) for side, factors, each in rows]
            return total + (unobserved + sum(penalties))
