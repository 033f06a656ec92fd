"""A rank of ALS on the CPU; see `hybridmf.ranks.su_als.Worker`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.objective import Factors, Objective, Side
from ..core.regression import Regression
from ..cpu import als
from ..data.slabs import InMemory
from ..native import _als
from ..plan.types import Plan
from .su_als import WholeRows, Worker


class CpuWorker(Worker):
    """The CPU as a `Worker`, for grids of one split; arrays are NumPy's."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def own(self, side: Side, factors: Factors, plan: Plan) -> Factors:
        """Return the factors unchanged: drawn ones may never be read."""
        return factors

    def exact_gram(self, factors: Factors, weights: np.ndarray | None = None) -> np.ndarray:
        matrix = factors.matrix
        if weights is not None:
            matrix = matrix * np.sqrt(weights).astype(matrix.dtype)[:, None]
        return _als.gram(np.ascontiguousarray(matrix), self.num_threads)

    def times(self, factors: Factors, basis: np.ndarray) -> Factors:
        matrix = als.aligned_zeros(factors.matrix.shape, factors.matrix.dtype)
        with als.single_threaded_blas():
            np.matmul(factors.matrix, basis.astype(matrix.dtype), out=matrix)
        return Factors(matrix, factors.bias)

    def penalty(self, objective: Objective, side: Side, factors: Factors, degrees: np.ndarray) -> float:
        return objective.penalty(side, factors.matrix, degrees, factors.bias)

    def total(self, loss: float, unobserved: float, penalties: tuple[float, float]) -> float:
        return loss + unobserved + penalties[0] + penalties[1]

    def regression(self, plan: Plan) -> Callable[..., Regression]:
        return Regression

    def whole(self, rows: WholeRows) -> Any:
        """Half sweep over complete rows; slabs are read again in each half sweep."""
        side, block, objective, plan, names, _, weights = rows
        if isinstance(block, InMemory):
            return als.HalfSweep(side, block.csr, objective, plan, names, weights)
        return als.StreamedHalf(side, block, objective, plan, names)
