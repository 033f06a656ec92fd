"""A rank of SU-ALS on the CPU; see `hybridmf.ranks.su_als.Worker`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Objective, Side
from ..cpu import als
from ..cpu.stream import StreamedHalf
from ..data.slabs import RangeSlabs
from ..native import _als, status
from ..plan.types import Plan
from .batches import Ranges
from .su_als import Block, Owned, Then


class CpuWorker:
    """The CPU as a `Worker`; arrays are NumPy's.

    Parameters
    ----------
    check : callable, optional
        Called between pieces of work; what it raises ends them.
    """

    gathers_ahead = False

    def __init__(self, check: Callable[[], None] | None = None) -> None:
        self.check = check

    def active(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def own(self, factors: Factors, plan: Plan) -> Factors:
        """Factors as they are."""
        return factors.on_host()

    def blank(self, like: np.ndarray, rows: int) -> np.ndarray:
        """Zeros of the dtype and width of an array."""
        return np.zeros((rows, *like.shape[1:]), dtype=like.dtype)

    def arrays(self, factors: Factors) -> list[np.ndarray]:
        """Matrix, and biases if there are any."""
        return [factors.matrix] if factors.bias is None else [factors.matrix, factors.bias]

    def factors(self, arrays: list[np.ndarray], like: Factors) -> Factors:
        """Factors made of `arrays`."""
        return Factors(arrays[0], arrays[1] if len(arrays) > 1 else None)

    def gram(self, factors: Factors, objective: Objective, plan: Plan) -> np.ndarray | None:
        """Weighted Gram matrix of the rows at hand."""
        gram = als.weighted_gram(factors.matrix, objective, plan.num_threads, blas=plan.uses_blas)
        return gram if gram.size else None

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

    def squares(self, factors: Factors) -> np.ndarray:
        """Squared lengths in float64."""
        squares: np.ndarray = np.einsum("ij,ij->i", factors.matrix, factors.matrix, dtype=np.float64)
        return squares

    def whole(
        self, side: Side, block: Block, objective: Objective, plan: Plan, names: np.ndarray, ends: np.ndarray
    ) -> als.HalfSweep | StreamedHalf:
        """The half sweep of one device, over a slab of rows; slabs are read in each half sweep."""
        if isinstance(block, RangeSlabs):
            return StreamedHalf(side, block, objective, plan, names, self.check)
        half = als.HalfSweep(side, block, objective, plan, names)
        half.check = self.check
        return half

    def solve(
        self, half: als.HalfSweep | StreamedHalf, fixed: Factors, mean: float, start: Factors, then: Then | None
    ) -> Factors:
        """New factors of the rows of `whole`; nothing is gathered ahead, since nothing would overlap."""
        return half.solve(fixed, mean, start)

    def partial(
        self,
        side: Side,
        block: Block,
        objective: Objective,
        plan: Plan,
        names: np.ndarray,
        degrees: np.ndarray,
        batches: list[Ranges],
        solved: list[Ranges],
    ) -> PartialRows:
        """See `PartialRows`; ratings in memory."""
        assert isinstance(block, sp.csr_array)
        return PartialRows(side, block, objective, plan, names, degrees, batches, solved)

    def losses(
        self,
        objective: Objective,
        plan: Plan,
        half: Any,
        users: Iterator[Owned],
        items: Factors,
        mean: float,
    ) -> float:
        """Loss of all entries, range after range of rows."""
        if isinstance(half, StreamedHalf):
            return sum(float(half.losses(own, items, mean).sum()) for _, own in users)
        return sum(self._losses(objective, plan, half, *owned, items, mean) for owned in users)

    def _losses(
        self,
        objective: Objective,
        plan: Plan,
        half: als.HalfSweep,
        rows: tuple[int, int],
        users: Factors,
        items: Factors,
        mean: float,
    ) -> float:
        """Loss of the entries of some rows."""
        offsets = (np.empty(0), np.empty(0))
        if users.bias is not None and items.bias is not None:
            offsets = (users.bias.astype(np.float64) + mean, items.bias.astype(np.float64))
        indptr = half.indptr[rows[0] : rows[1] + 1]
        if not len(half.indices) or rows[0] == rows[1]:
            return 0.0
        losses = _als.row_losses(
            users.matrix,
            items.matrix,
            indptr,
            half.indices,
            half.ratings,
            *offsets,
            objective.is_implicit,
            objective.alpha,
            objective.unobserved_weight,
            plan.num_threads,
        )
        return float(losses.sum())

    def pipeline(self) -> AbstractContextManager[InOrder]:
        """Things happen in the order they are asked for."""
        return nullcontext(InOrder())

    def close(self) -> None:
        """Nothing goes on beside the rank's thread."""


class InOrder:
    """A `Pipeline` without overlap."""

    def assembled(self) -> None:
        """Nothing to wait for."""

    def after(self, mark: None) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return nullcontext()


class PartialRows(als.HalfSweep):
    """Sums of the entries at hand, and solutions of systems that all ranks' sums have been added up for.

    Parameters
    ----------
    side, block, objective, plan, names, degrees, batches, solved
        See `hybridmf.ranks.su_als.Worker.partial`.

    Raises
    ------
    ValueError
        A plan whose assembly or solver needs all entries of a row.
    """

    def __init__(
        self,
        side: Side,
        block: sp.csr_array,
        objective: Objective,
        plan: Plan,
        names: np.ndarray,
        degrees: np.ndarray,
        batches: list[Ranges],
        solved: list[Ranges],
    ) -> None:
        if plan.assembly != "simd" or plan.solver not in ("cholesky", "cg"):
            raise ValueError(
                f"assembly={plan.assembly!r} with solver={plan.solver!r} needs all entries of a row on one rank; with "
                "a split fixed side use assembly='simd' and solver 'cholesky' or 'cg'"
            )
        super().__init__(side, block, objective, plan, names)
        self.whole_degrees, self.batches, self.solved = degrees, batches, solved
        self.scale = objective.row_scale(degrees)
        width = _als.padded_rank(plan.rank)
        most = max((sum(last - first for first, last in batch) for batch in batches), default=0)
        # one batch is added up while the next one is assembled
        self._buffers = [als.aligned_zeros((most, (width + 1) * width), block.dtype) for _ in batches[:2]]
        self._workspace = als.workspaces(
            plan.num_threads, _als.workspace_size(plan.rank, block.dtype.itemsize), block.dtype
        )

    def start(self, fixed: Factors, mean: float, start: Factors, gram: np.ndarray | None) -> None:
        """Begin a half sweep."""
        plan = self.plan
        self._design = als._design(fixed, self.objective)
        self._offsets = als._offsets(fixed, mean, self.objective)
        self._gram = np.empty((0, 0), self._design.dtype) if gram is None else gram
        if self._gram.size:
            self._gram = np.pad(self._gram, (0, _als.padded_rank(plan.rank) - plan.rank))
        self._out = als.aligned_zeros((len(self.whole_degrees), plan.rank), self._design.dtype)
        if plan.solver == "cg":
            self._out[:, : plan.factors] = start.matrix
            if start.bias is not None:
                self._out[:, plan.factors] = start.bias
        self._status = np.zeros(len(self.whole_degrees), dtype=np.int32)

    def assemble(self, batch: int) -> tuple[np.ndarray, ...]:
        """Sums of a batch's entries at hand."""
        slots, filled = sum(last - first for first, last in self.batches[batch]), 0
        partial = self._buffers[batch % 2][:slots]
        for first, last in self.batches[batch]:
            self._assemble_rows(partial[filled : filled + last - first], first, last)
            filled += last - first
        return (partial,)

    def _assemble_rows(self, partial: np.ndarray, first: int, last: int) -> None:
        if first == last:
            return
        objective, threads = self.objective, self.plan.num_threads
        weights = (objective.is_implicit, objective.alpha, objective.unobserved_weight)
        entries = (self.indices, self.ratings, self._offsets)
        degrees = self.degrees[first:last]
        order = np.argsort(-degrees, kind="stable").astype(np.int64)
        n_long = int(np.count_nonzero(degrees > _als.LONG_ROW))
        long, short = order[:n_long], order[n_long:]
        if n_long:
            sums = als.aligned_zeros((_als.SEGMENTS, partial.shape[1]), partial.dtype)
            for wave in _als.long_row_waves(self.indptr, long + first):
                _als.partial_long_rows(
                    partial, self._design, *entries, long, wave, sums, self._workspace, *weights, threads
                )
        _als.partial_rows(
            partial, self._design, self.indptr, *entries, first, short, self._workspace, *weights, threads
        )

    def finish(self, batch: int, sums: tuple[np.ndarray, ...]) -> None:
        """Complete and solve the systems of a batch."""
        plan, at = self.plan, 0
        for first, last in self.solved[batch]:
            rows, n = slice(first, last), last - first
            if n:
                _als.solve_partials(
                    self._out[rows],
                    sums[0][at : at + n],
                    self._gram,
                    self.ridge,
                    self.scale[rows],
                    self.whole_degrees[rows],
                    self._status[rows],
                    self._workspace,
                    plan.cg_steps if plan.solver == "cg" else 0,
                    self._epsilon(self._out.dtype),
                    plan.num_threads,
                )
            at += n

    def close(self) -> None:
        """Nothing goes on beside the rank's thread."""

    def result(self, then: Then | None = None) -> Factors:
        """Factors of the rows solved here."""
        status.check_status(self._status, self.side, self.objective, self.names)
        out = self._out
        if not self.objective.biases:
            return Factors(out)
        return Factors(np.ascontiguousarray(out[:, :-1]), np.ascontiguousarray(out[:, -1]))
