"""Serving on the CPU: top-N, fold-in, objective."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Objective, Side, State
from ..core.sparse import RowColumns
from ..core.validate import csr_arrays
from ..plan.als import for_fold_in
from ..plan.memory import threads_for
from ..plan.solver import Given
from ..plan.types import Plan
from . import als, topk


class CpuEngine:
    """Top-N, fold-in and the objective on the CPU for models fitted on any device; NumPy arrays in and out."""

    name = device = "cpu"

    def __init__(self, plan: Plan) -> None:
        self._fitted_by, self._threads = plan, plan.num_threads

    @cached_property
    def plan(self) -> Plan:
        """The plan for the CPU; not used by top-N, which takes microseconds."""
        if self._fitted_by.device == "cpu":
            return self._fitted_by
        without = {"gpu": None, "assembly": "simd", "variant": "", "reorder": "none", "tile_rows": 0, "tile_cols": 0}
        return self._fitted_by.changed(device="cpu", **without)

    def pack(self, items: np.ndarray, candidates: np.ndarray | None = None) -> topk.PackedItems:
        """Items, shape (n_items, rank), in the layout of `top_k`; computed once. Default `candidates`: all items."""
        return topk.PackedItems(items, candidates, self._threads)

    def top_k(
        self,
        users: np.ndarray,
        packed: topk.PackedItems,
        n: int,
        seen: RowColumns | None = None,
        candidates: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and scores, shape (n_users, n), of the `n` best items but those `seen`; -1 and -inf if fewer are left."""
        return topk.top_k(users, packed, n, seen=seen, candidates=candidates, num_threads=self._threads)

    def gram(self, side: Side, fixed: Factors, objective: Objective) -> als.WeightedGram:
        """Weighted Gram matrix, computed as in the fit, so that training rows get their training factors."""
        plan = for_fold_in(self.plan)
        threads = threads_for(fixed.matrix.size * plan.rank, len(fixed), self._threads)
        return als.WeightedGram(side, fixed.matrix, objective, threads, blas=plan.uses_blas)

    def fold_in(self, side: Side, matrix: sp.csr_array, objective: Objective, given: Given) -> Factors:
        """Exact factors of new rows of `side`; `given.gram` is what `gram` returns, for the fixed side alone."""
        n, rank = matrix.shape[0], self.plan.rank
        threads = threads_for(matrix.nnz * rank**2 + n * rank**3 / 6, n, self._threads)
        plan = for_fold_in(self.plan).changed(num_threads=threads)
        return als.HalfSweep(side, matrix, objective, plan).solve(*given)

    def objective_value(self, objective: Objective, matrix: sp.csr_array, state: State) -> float:
        csr = csr_arrays(matrix)
        item_degrees = np.bincount(csr[1], minlength=matrix.shape[1])
        return als.objective_value(objective, csr, state, np.diff(csr[0]), item_degrees, self.plan.num_threads)
