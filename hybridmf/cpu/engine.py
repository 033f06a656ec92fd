"""Serving on the CPU: top-N, fold-in, objective."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Objective, Side, State
from ..core.validate import csr_arrays
from ..plan.als import for_fold_in
from ..plan.types import Plan
from . import als, topk


class CpuEngine:
    """The CPU as `hybridmf.model.engine.Engine`."""

    name = "cpu"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def pack(self, items: np.ndarray, candidates: np.ndarray | None = None) -> topk.PackedItems:
        """Pack items for the score kernel."""
        return topk.PackedItems(items, candidates, self.plan.num_threads)

    def top_k(
        self,
        users: np.ndarray,
        packed: topk.PackedItems,
        n: int,
        seen: sp.csr_array | None = None,
        candidates: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `hybridmf.cpu.topk.top_k`."""
        return topk.top_k(users, packed, n, seen=seen, candidates=candidates, num_threads=self.plan.num_threads)

    def gram(self, side: Side, fixed: Factors, objective: Objective) -> als.WeightedGram:
        """Weighted Gram matrix, computed as in the fit, so that training rows get their training factors."""
        plan = for_fold_in(self.plan)
        return als.WeightedGram(side, fixed.matrix, objective, plan.num_threads, blas=plan.uses_blas)

    def fold_in(
        self,
        side: Side,
        matrix: sp.csr_array,
        objective: Objective,
        fixed: Factors,
        mean: float,
        gram: als.WeightedGram,
    ) -> Factors:
        """Exact factors of new rows."""
        return als.HalfSweep(side, matrix, objective, for_fold_in(self.plan)).solve(fixed, mean, gram=gram)

    def objective_value(self, objective: Objective, matrix: sp.csr_array, state: State) -> float:
        """The objective in float64."""
        csr = csr_arrays(matrix)
        item_degrees = np.bincount(csr[1], minlength=matrix.shape[1])
        return als.objective_value(objective, csr, state, np.diff(csr[0]), item_degrees, self.plan.num_threads)
