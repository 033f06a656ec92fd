"""ALS on the CPU: the half sweep of one side, and the solver that alternates both sides."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
from threadpoolctl import ThreadpoolController

from .. import _formats
from ..core.nonnegative import finished
from ..core.objective import Factors, Objective, Side, State
from ..core.row_systems import Row, row_system
from ..core.sparse import csr_of, take_rows
from ..core.validate import MAX_AXIS, csr_arrays
from ..data.slabs import Orientation
from ..formats import BalsMatrix, tiled
from ..native import _als
from ..native.arguments import Rows, Systems, Tiles, Weights
from ..native.status import SINGULAR_PIVOT, check_status
from ..plan.row_forms import changes_basis, dual_up_to
from ..plan.solver import Given, Half, Steps
from ..plan.types import NONNEGATIVE, Plan

ASSEMBLY_CODES = {"rank1": _als.RANK1, "blas3": _als.BLAS3, "blas3_published": _als.GEMM, "simd": _als.SIMD}

CG_FORMS_PER_STEP = 7
"""CG forms A for ranks up to this number times (CG steps + 1), in rows with more entries than factors.

Measured with AVX2, one thread, 2.4 million entries, implicit, 3 steps: forming A takes 0.86 of the time at f = 24, as
long at f = 16, 1.2 times as long at f = 32."""

CACHE_LINE = 64


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that start on a cache line. NumPy's arrays start 16 bytes after one: every vector would span two."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + size].view(dtype).reshape(shape)


def workspaces(threads: int, size: int, dtype: Any) -> np.ndarray:
    """Scratch of `size` elements for each thread, each on a cache line.

    Equal alignment also makes a row's bits independent of its thread: some BLAS kernels peel loops by alignment.
    """
    line = CACHE_LINE // np.dtype(dtype).itemsize
    return aligned_zeros((threads, -(-size // line) * line), dtype)


def _empty(dtype: np.dtype, ndim: int = 1) -> np.ndarray:
    return np.empty((0,) * ndim, dtype=dtype)


def _design(fixed: Factors, objective: Objective) -> np.ndarray:
    """Rows that the systems are built from: factors, and a constant 1 for the bias of the solved side."""
    if not objective.biases:
        return np.ascontiguousarray(fixed.matrix)
    return np.concatenate([fixed.matrix, np.ones((len(fixed), 1), dtype=fixed.matrix.dtype)], axis=1)


def _offsets(fixed: Factors, mean: float, objective: Objective) -> np.ndarray:
    """Mean rating plus the biases of the fixed side, to subtract from the ratings."""
    if not objective.biases or fixed.bias is None:
        return _empty(fixed.matrix.dtype)
    return np.ascontiguousarray(fixed.bias + fixed.matrix.dtype.type(mean))


_blas_lock = threading.RLock()
_blas_users = 0
_blas_limit: Any = None


@lru_cache(maxsize=1)
def _loaded_libraries(modules: int) -> ThreadpoolController:
    """The BLAS libraries of this process, found again after imports: reading its map takes 0.8 to 3 ms."""
    return ThreadpoolController()


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Limit BLAS to one thread: our threads already share the rows. Nested and concurrent uses share one limit."""
    global _blas_users, _blas_limit
    with _blas_lock:
        if _blas_users == 0:
            _blas_limit = _loaded_libraries(len(sys.modules)).limit(limits=1, user_api="blas")
        _blas_users += 1
    try:
        yield
    finally:
        with _blas_lock:
            _blas_users -= 1
            if _blas_users == 0:
                _blas_limit.restore_original_limits()


class WeightedGram:
    """``unobserved_weight F^T F`` of implicit feedback, and the basis in which it and the ridge are the unit matrix.

    With ``unobserved_weight F^T F + lambda I = L L^T``, rows y of the fixed side become ``L^-1 y`` in that basis, and a
    solution w there is ``x = L^-T w``.

    `side` is the one to solve, whose ridge is part of the basis, `factors` are the other one. `matrix` is float64, of
    shape (0, 0) for explicit feedback.
    """

    def __init__(
        self, side: Side, factors: np.ndarray, objective: Objective, num_threads: int, *, blas: bool = False
    ) -> None:
        self.regularization, self.dtype = objective.regularization.of(side), factors.dtype
        self.matrix = _empty(np.dtype(np.float64), 2)
        if objective.is_implicit:
            with single_threaded_blas() if blas else nullcontext():
                self.matrix = objective.unobserved_weight * _als.gram(factors, num_threads, blas)

    @cached_property
    def basis(self) -> tuple[Panels, Panels] | None:
        """``L^-T``, which rows of the fixed side are multiplied by, and ``L^-1``, which solutions are multiplied by.

        None if the matrix and its ridge are not positive definite to working precision.
        """
        ridge = self.regularization * np.eye(len(self.matrix))
        inverse = _als.inverse_root(self.matrix + ridge, _epsilon(np.dtype(np.float64)))
        if inverse is None:
            return None
        lower = np.ascontiguousarray(inverse, dtype=self.dtype)
        return _als.panels(np.ascontiguousarray(lower.T)), _als.panels(lower)


Panels = tuple[np.ndarray, np.ndarray]  # a matrix packed by `hybridmf.native._als.panels`


def _epsilon(dtype: np.dtype) -> float:
    return SINGULAR_PIVOT * float(np.finfo(dtype).eps)


class FixedSide:
    """The fixed side of a half sweep that solves `side`, in the form of the kernels.

    `gram` is of all fixed factors; `fixed` may be some of them. `forward` and `back` change rows to another basis, and
    solutions back from it.
    """

    def __init__(
        self, side: Side, fixed: Factors, mean: float, objective: Objective, plan: Plan, gram: WeightedGram
    ) -> None:
        self.factors, self.mean, self.gram = fixed, mean, gram.matrix
        design, longest = _design(fixed, objective), dual_up_to(plan, side)
        self.forward: Panels | None = None
        self.back: Panels | None = None
        self.num_threads = plan.num_threads
        matrix, ridge = gram.matrix, objective.ridge(side, plan.factors, plan.rank)
        if changes_basis(plan, side):
            if gram.basis is None:
                longest = 0  # the primal form names the row that is not positive definite
            else:
                self.forward, self.back = gram.basis
                design = self.changed(design)  # overflow shows in the solutions
                matrix, ridge = np.eye(plan.rank), np.zeros(plan.rank)
        bias_square = 0.0  # lambda / lambda_b
        if objective.biases and longest:
            bias_square = objective.regularization.of(side) / objective.bias_regularization.of(side)
        matrix = np.ascontiguousarray(matrix, dtype=design.dtype)
        if plan.assembly in ("simd", "bals") and plan.solver != "subspace" and matrix.size:
            matrix = np.pad(matrix, (0, _als.padded_rank(plan.rank) - plan.rank))
        self.systems = Systems(
            fixed=design,
            offsets=_offsets(fixed, mean, objective),
            gram=matrix,
            ridge=ridge.astype(design.dtype),
            implicit=objective.is_implicit,
            alpha=objective.alpha,
            unobserved=objective.unobserved_weight,
            dual_up_to=longest,
            bias_square=bias_square,
            epsilon=_epsilon(design.dtype),
        )

    def changed(self, pull: np.ndarray) -> np.ndarray:
        """What is added to right-hand sides, in the basis of the systems."""
        if self.forward is None:
            return np.ascontiguousarray(pull)
        there = aligned_zeros(pull.shape, pull.dtype)
        _als.times_panels(there, pull, *self.forward, np.zeros(len(there), dtype=np.int32), self.num_threads)
        return there


class HalfSweep(Half):
    """One half of a sweep on the CPU.

    `names` has the number of each row in error messages, by default its position; `weights` are of explicit entries.
    """

    def __init__(
        self,
        side: Side,
        matrix: sp.csr_array,
        objective: Objective,
        plan: Plan,
        names: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        self.names, self.weights = names, weights
        self.side, self.objective, self.plan = side, objective, plan
        self.indptr, self.indices, self.ratings = csr_arrays(matrix)
        self.n_fixed = matrix.shape[1]
        self.degrees = np.diff(self.indptr)
        self.scale = objective.row_scale(side, self.degrees)
        self.order = _formats.degree_order(self.indptr)
        self.bals: BalsMatrix | None = None
        if plan.assembly == "bals":
            self.bals = tiled(matrix, plan.tile_rows, plan.tile_cols, plan.num_threads)
            self.tile_ptr = self.bals.tile_ptr.astype(np.int64, copy=False)
            self.seg_ptr = self.bals.seg_ptr.astype(np.int64, copy=False)

    def __len__(self) -> int:
        return len(self.degrees)

    def losses(self, users: Factors, items: Factors, mean: float) -> np.ndarray:
        """Losses of the entries of each row, where rows are users; float64, shape (n_rows,)."""
        csr = (self.indptr, self.indices, self.ratings)
        return losses_of_rows(self.objective, csr, State(users, items, mean), self.plan.num_threads, self.weights)

    def steps(self, given: Given) -> Steps:
        """Solve batch after batch; the input is not modified."""
        plan, indices, (fixed, mean, start, gram, pull) = self.plan, self.indices, given
        fixed = fixed.on_host()
        if gram is None:
            gram = WeightedGram(self.side, fixed.matrix, self.objective, plan.num_threads, blas=plan.uses_blas)
        if changes_basis(plan, self.side) and len(indices) < len(fixed):
            # few rows need not change the basis of all fixed rows
            columns, indices = np.unique(indices, return_inverse=True)
            fixed, indices = fixed.take(columns), indices.astype(np.int32)
        yield from self.steps_for(FixedSide(self.side, fixed, mean, self.objective, plan, gram), start, indices, pull)

    def check(self, solved: Factors, status: np.ndarray) -> None:
        check_status(status, self.side, self.objective, self.names)

    def steps_for(
        self,
        fixed: FixedSide,
        start: Factors | None = None,
        indices: np.ndarray | None = None,
        pull: np.ndarray | None = None,
    ) -> Steps:
        """`steps` for a fixed side that is prepared; `indices` refer to its rows. Default: those of the ratings."""
        plan, systems, bals = self.plan, fixed.systems, self.bals
        pull = None if pull is None else fixed.changed(pull)
        rows = Rows(
            self.indptr, self.indices if indices is None else indices, self.ratings, self.scale, pull, self.weights
        )
        # Only the published assemblies, and systems beyond the rank of our Cholesky, use BLAS and LAPACK. Limiting BLAS
        # takes milliseconds after an import, because threadpoolctl has to find the loaded libraries.
        blas = plan.solver in ("cholesky", NONNEGATIVE) and (plan.uses_blas or plan.rank > _als.OWN_CHOLESKY_RANK)
        with single_threaded_blas() if blas else nullcontext():
            out, status = self._first_rows(start, self.ratings.dtype), np.zeros(len(self), dtype=np.int32)
            workspace = self._workspace(out.dtype)
            order, entries = self._order()
            tiles = None if bals is None else self._tiles(bals)._replace(pull=pull)
            if plan.solver == "cholesky" and plan.assembly == "simd":
                n_long = int(np.count_nonzero(self.degrees > _als.LONG_ROW))  # they come first in `order`
                long_rows, order = order[:n_long], order[n_long:]
                if n_long:
                    ld = _als.padded_rank(plan.rank)
                    sums = aligned_zeros((_als.SEGMENTS, (ld + 1) * ld), out.dtype)
                    for segments in _als.long_row_waves(self.indptr, long_rows):
                        _als.cholesky_long_rows(out, systems, rows, long_rows, segments, status, sums, workspace)
                        yield None
            for batch in self._batches(order, entries):
                common = (out, systems, rows, batch, status, workspace)
                if tiles is not None:
                    _als.cholesky_bals(out, systems, tiles, batch, status, workspace)
                elif plan.solver == "cg":
                    _als.cg_rows(*common, plan.cg_steps, _cg_forms_from(plan))
                elif plan.solver == NONNEGATIVE:
                    _als.nonnegative_rows(*common, plan.factors)
                elif plan.solver == "subspace":
                    _als.subspace_rows(*common, plan.block_size)
                else:
                    _als.cholesky_rows(*common, ASSEMBLY_CODES[plan.assembly_name])
                yield None
        unfinished = np.flatnonzero(status == _als.UNFINISHED)
        if len(unfinished):
            self._finish(out, fixed, rows, unfinished)
            status[unfinished] = 0
        if fixed.back is not None:
            _als.times_panels(out, out, *fixed.back, status, plan.num_threads)
        if self.objective.biases:
            yield Factors(np.ascontiguousarray(out[:, :-1]), np.ascontiguousarray(out[:, -1])), status
        else:
            yield Factors(out), status

    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows with entries, or row blocks of BALS, with the most entries first; and entries by row or row block."""
        if not len(self.indices):
            return self.order[:0], self.degrees
        if self.bals is None:
            in_order = self.plan.assembly_name == "blas3_published"
            return np.sort(self.order) if in_order else self.order, self.degrees
        entries = np.add.reduceat(self.degrees, np.arange(0, len(self), self.plan.tile_rows))
        return np.argsort(-entries, kind="stable"), entries

    def _workspace(self, dtype: np.dtype) -> np.ndarray:
        plan, itemsize = self.plan, dtype.itemsize
        if self.bals is not None:
            size = _als.bals_workspace_size(plan.rank, itemsize, plan.tile_rows, plan.tile_cols)
        elif plan.solver == "subspace":
            longest = int(self.degrees.max(initial=0))
            size = _als.subspace_workspace_size(plan.rank, plan.block_size, itemsize, longest)
        else:
            size = _als.workspace_size(plan.rank, itemsize)
        return workspaces(plan.num_threads, size, dtype)

    def _tiles(self, bals: BalsMatrix) -> Tiles:
        pointers = (bals.values, bals.tile_colidx, self.tile_ptr, bals.seg_colidx, self.seg_ptr)
        return Tiles(*pointers, self.plan.tile_rows, self.plan.tile_cols, self.scale)

    def _finish(self, out: np.ndarray, fixed: FixedSide, rows: Rows, unfinished: np.ndarray) -> None:
        """Replace nonnegative rows that descent left above their minima."""
        gram = fixed.gram if self.objective.is_implicit else None
        for at in unfinished:
            span = slice(rows.indptr[at], rows.indptr[at + 1])
            row = Row(rows.indices[span], rows.ratings[span], int(self.degrees[at]))
            matrix, right, _ = row_system(self.objective, self.side, row, fixed.factors, fixed.mean, gram)
            out[at], _, _ = finished(matrix, right, out[at], self.plan.factors)

    def row_entries(self, at: np.ndarray) -> sp.csr_array:
        return take_rows(csr_of(self.indptr, self.indices, self.ratings, self.n_fixed), at)

    def _first_rows(self, start: Factors | None, dtype: np.dtype) -> np.ndarray:
        """Allocate the solutions, filled with the start of the iterative solvers; zeros if there are no entries."""
        out = aligned_zeros((len(self), self.plan.rank), dtype)
        if self.plan.solver != "cholesky" and start is not None and len(self.indices):
            out[:, : self.plan.factors] = start.matrix
            if start.bias is not None:
                out[:, self.plan.factors] = start.bias
        return out

    def _batches(self, order: np.ndarray, entries: np.ndarray) -> Iterator[np.ndarray]:
        """Split `order` into batches of about ``plan.batch_flops`` each: Python handles Ctrl-C between two of them."""
        rank = float(self.plan.rank)
        work = entries[order] * rank * (rank + 1) + rank**3 / 3
        batches = max(1, int(np.ceil(work.sum() / self.plan.batch_flops)))
        cuts = np.searchsorted(np.cumsum(work), work.sum() * np.arange(1, batches) / batches)
        for batch in np.split(order, cuts):
            if len(batch):
                yield batch


def _cg_forms_from(plan: Plan) -> int:
    """Row length from which CG forms A: n f^2 once and f^2 per step, instead of 4 n f per step."""
    pays = plan.rank <= CG_FORMS_PER_STEP * (plan.cg_steps + 1)
    return plan.rank + 1 if pays else MAX_AXIS


class StreamedHalf(Half):
    """One half of a sweep over slabs: one `HalfSweep` after the other.

    Kernels compute a row without its neighbours, so results do not depend on the bounds of slabs, bit for bit.
    """

    def __init__(
        self, side: Side, slabs: Orientation, objective: Objective, plan: Plan, names: np.ndarray | None = None
    ) -> None:
        self.side, self.slabs, self.objective, self.plan = side, slabs, objective, plan
        self.names = np.arange(len(slabs.degrees)) if names is None else names
        self.degrees = slabs.degrees
        self.scale = objective.row_scale(side, self.degrees)

    def steps(self, given: Given) -> Steps:
        """Slab after slab, each of which raises the failure of a row itself: nothing is left to `check`."""
        plan, bounds, (fixed, mean, start, _, pull) = self.plan, self.slabs.bounds, given
        fixed_rows = np.ascontiguousarray(fixed.matrix)
        gram = WeightedGram(self.side, fixed_rows, self.objective, plan.num_threads, blas=plan.uses_blas)
        prepared = FixedSide(self.side, fixed, mean, self.objective, plan, gram)
        out = aligned_zeros((len(self.degrees), plan.factors), fixed.matrix.dtype)
        bias = np.zeros(len(out), dtype=out.dtype) if self.objective.biases else None
        for k, (first, last) in enumerate(pairwise(bounds.tolist())):
            self.slabs.prefetch(k + 1)
            rows = slice(first, last)
            half = HalfSweep(self.side, self.slabs.matrix(k), self.objective, plan, self.names[rows])
            launched: Any = None
            part = None if pull is None else pull[rows]
            for step in half.steps_for(prepared, None if start is None else start.part(rows), pull=part):
                launched = step
                yield None
            half.check(*launched)
            solved = launched[0]
            out[rows] = solved.matrix
            if bias is not None and solved.bias is not None:
                bias[rows] = solved.bias
        yield Factors(out, bias), np.zeros(0, dtype=np.int32)

    def row_entries(self, at: np.ndarray) -> sp.csr_array:
        return self.slabs.take(at)

    def losses(self, users: Factors, items: Factors, mean: float) -> np.ndarray:
        losses = np.zeros(len(self.degrees))
        for k, (first, last) in enumerate(pairwise(self.slabs.bounds.tolist())):
            self.slabs.prefetch(k + 1)
            part = State(users.part(slice(first, last)), items, mean)
            csr = csr_arrays(self.slabs.matrix(k))
            losses[first:last] = losses_of_rows(self.objective, csr, part, self.plan.num_threads)
        return losses


def objective_value(
    objective: Objective,
    csr: tuple[np.ndarray, np.ndarray, np.ndarray],
    state: State,
    user_degrees: np.ndarray,
    item_degrees: np.ndarray,
    num_threads: int,
) -> float:
    """The objective in float64, in O(nnz f + (m + n) f^2): the two Gram matrices account for unobserved entries."""
    users, items = state.user.matrix, state.item.matrix
    total = float(losses_of_rows(objective, csr, state, num_threads).sum())
    if objective.is_implicit:
        grams = [_als.gram(factors, num_threads) for factors in (users, items)]
        total += objective.unobserved_weight * float(np.sum(grams[0] * grams[1]))
    user_penalty = objective.penalty("user", users, user_degrees, state.user.bias)
    return total + user_penalty + objective.penalty("item", items, item_degrees, state.item.bias)


def losses_of_rows(
    objective: Objective,
    csr: tuple[np.ndarray, np.ndarray, np.ndarray],
    state: State,
    num_threads: int,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Losses of the entries of each user, float64, shape (n_users,)."""
    users, items = state.user.matrix, state.item.matrix
    offsets = (np.empty(0), np.empty(0))
    if state.user.bias is not None and state.item.bias is not None:
        offsets = (state.user.bias.astype(np.float64) + state.mean, state.item.bias.astype(np.float64))
    how = Weights(objective.is_implicit, objective.alpha, objective.unobserved_weight)
    return _als.row_losses(users, items, *csr, offsets, how, num_threads, weights)
