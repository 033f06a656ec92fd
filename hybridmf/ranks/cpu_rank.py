"""A rank of SU-ALS on the CPU; see `hybridmf.ranks.su_als.Worker`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from ..core.objective import Factors, Objective, Side
from ..cpu import als
from ..data.slabs import RangeSlabs
from ..native import _als
from ..plan.types import Plan
from .su_als import Block, Then


class CpuWorker:
    """The CPU as a `Worker`, for grids of one split; arrays are NumPy's.

    Parameters
    ----------
    check : callable, optional
        Called between batches; an exception ends the half sweep.
    """

    gathers_ahead = False

    def __init__(self, check: Callable[[], None] | None = None) -> None:
        self.check = check

    def active(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def own(self, factors: Factors, plan: Plan) -> Factors:
        """Return the factors unchanged."""
        return factors.on_host()

    def exact_gram(self, factors: Factors, weights: np.ndarray | None, plan: Plan) -> np.ndarray:
        """Gram matrix in float64."""
        matrix = factors.matrix
        if weights is not None:
            matrix = matrix * np.sqrt(weights).astype(matrix.dtype)[:, None]
        gram: np.ndarray = _als.gram(np.ascontiguousarray(matrix), plan.num_threads)
        return gram

    def times(self, factors: Factors, basis: np.ndarray) -> Factors:
        """Factors in another basis."""
        matrix = als.aligned_zeros(factors.matrix.shape, factors.matrix.dtype)
        with als.single_threaded_blas():
            np.matmul(factors.matrix, basis.astype(matrix.dtype), out=matrix)
        return Factors(matrix, factors.bias)

    def penalty(self, objective: Objective, side: Side, factors: Factors, degrees: np.ndarray) -> float:
        """`Objective.penalty` of own rows."""
        return objective.penalty(side, factors.matrix, degrees, factors.bias)

    def whole(
        self, side: Side, block: Block, objective: Objective, plan: Plan, names: np.ndarray
    ) -> als.HalfSweep | als.StreamedHalf:
        """Half sweep of one device over its rows; slabs are read again in each half sweep."""
        half: als.HalfSweep | als.StreamedHalf
        if isinstance(block, RangeSlabs):
            half = als.StreamedHalf(side, block, objective, plan, names)
        else:
            half = als.HalfSweep(side, block, objective, plan, names)
        half.check = self.check
        return half

    def solve(
        self, half: als.HalfSweep | als.StreamedHalf, fixed: Factors, mean: float, start: Factors, then: Then | None
    ) -> Factors:
        """New factors of the rows of `whole`. Factors are not gathered ahead: nothing would overlap."""
        return half.solve(fixed, mean, start)

    def close(self) -> None:
        """Do nothing: the worker has no thread of its own."""
