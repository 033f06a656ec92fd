"""CCD++ on the CPU: both copies of the residual, and the order of the rank-one updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State, other_side
from ..core.validate import csr_arrays, make_csr
from ..errors import NonFiniteError
from ..formats import transpose
from ..native import _ccd
from ..plan.ccd import CcdMethod
from ..plan.solver import SWEEP_ORDER, Unconnected
from ..plan.types import Plan
from .als import aligned_zeros, objective_value, workspaces

TRANSPOSE_ROWS = 256
"""Rows transposed at a time: at rank 64 in float32 they take 64 KB, and both directions stay in L2."""

RESIDUAL_SLOWNESS = 8.0
"""Times a flop of the residual takes as long as one of the normal equations, whose rows are reused: it only streams."""


def by_column(rows: np.ndarray) -> np.ndarray:
    """Factors of shape (n, rank) as (rank, n): each factor's coordinates lie together."""
    columns = aligned_zeros(rows.shape[::-1], rows.dtype)
    for start in range(0, len(rows), TRANSPOSE_ROWS):
        columns[:, start : start + TRANSPOSE_ROWS] = rows[start : start + TRANSPOSE_ROWS].T
    return columns


def by_row(columns: np.ndarray) -> np.ndarray:
    """`by_column` undone: a new array of shape (n, rank), C order."""
    rows = aligned_zeros(columns.shape[::-1], columns.dtype)
    for start in range(0, len(rows), TRANSPOSE_ROWS):
        rows[start : start + TRANSPOSE_ROWS] = columns[:, start : start + TRANSPOSE_ROWS].T
    return rows


class _Half:
    """One side's rows: ratings, residual and schedule.

    Parameters
    ----------
    matrix : csr_array, shape (n_rows, n_fixed)
        One row for each row of the side.
    weights : csr_array of the same pattern, or None
    objective : Objective
    """

    def __init__(self, matrix: sp.csr_array, weights: sp.csr_array | None, objective: Objective) -> None:
        self.indptr, self.indices, self.ratings = csr_arrays(matrix)
        self.weights: np.ndarray = np.empty(0, dtype=matrix.dtype) if weights is None else weights.data
        self.residual = aligned_zeros(self.ratings.shape, matrix.dtype)
        self.degrees = np.diff(self.indptr)
        self.ridge = objective.regularization * objective.row_scale(self.degrees)
        self.groups, self.segments = _ccd.schedule(self.indptr)


class CpuCCD(Unconnected):
    """Cyclic coordinate descent over rank-one factors on the CPU: owns both copies of the residual.

    Parameters
    ----------
    user_items, item_users : csr_array
        The ratings in both orientations.
    objective : Objective
        Explicit, without biases.
    plan : Plan
        Its `method` is a `CcdMethod`.
    state : State
        Where to start; the factors of a non-negative model are not negative.
    weights : array, shape (nnz,), optional
        Weight of each entry's squared error, >= 0, in the order of `user_items`. The penalty counts entries as ever.

    Raises
    ------
    ValueError
        Weights that are not one finite number >= 0 for each entry.
    """

    def __init__(
        self,
        user_items: sp.csr_array,
        item_users: sp.csr_array,
        objective: Objective,
        plan: Plan,
        state: State,
        weights: Any = None,
    ) -> None:
        assert isinstance(plan.method, CcdMethod) and not objective.is_implicit and not objective.biases
        self.objective, self.plan, self.method, self.state = objective, plan, plan.method, state
        of_users = None if weights is None else _weight_matrix(user_items, weights)
        of_items = None if of_users is None else transpose(of_users, num_threads=plan.num_threads)
        self.halves: dict[Side, _Half] = {
            "user": _Half(user_items, of_users, objective),
            "item": _Half(item_users, of_items, objective),
        }
        self._workspace = workspaces(plan.num_threads, _ccd.LONG_ROW, user_items.dtype)

    def sweep(self) -> Iterator[None]:
        """One outer iteration, on copies of the factors; yields once they are the state."""
        for side in SWEEP_ORDER:
            self._compute_residual(side)
        columns: dict[Side, np.ndarray] = {side: by_column(self.state.side(side).matrix) for side in SIDES}
        # what each pass gathers of the other side, side by side; see _ccd.pyx
        pairs = {side: aligned_zeros((columns[side].shape[1], 2), columns[side].dtype) for side in SIDES}
        pairs["user"][:, 1] = columns["user"][0]
        for factor in range(self.plan.factors):
            self._update_rank_one(columns, pairs, factor)
        self.state = State(Factors(by_row(columns["user"])), Factors(by_row(columns["item"])))
        yield

    def _compute_residual(self, side: Side) -> None:
        """Compute one copy of the residual from the state.

        Anew in every iteration, so that a resumed fit computes what an uninterrupted one does, and no rounding piles
        up. With one inner iteration, both copies take a quarter of the flops of the updates, and less of the time.
        Cut into calls of about ``plan.batch_flops``: between them Python answers Ctrl-C.
        """
        half, plan = self.halves[side], self.plan
        rows, fixed = (self.state.side(one).matrix for one in (side, other_side(side)))
        work = RESIDUAL_SLOWNESS * 2.0 * plan.nnz * plan.factors
        pieces = max(1, int(np.ceil(work / plan.batch_flops)))
        cuts = np.linspace(0, len(half.groups) - 1, pieces + 1).astype(np.int64)
        segments = np.array_split(half.segments, pieces)
        for piece in range(pieces):
            groups = half.groups[cuts[piece] : cuts[piece + 1] + 1]
            csr = (half.indptr, half.indices, half.ratings)
            _ccd.residual(rows, fixed, *csr, half.residual, groups, segments[piece], plan.num_threads)

    def _update_rank_one(self, columns: dict[Side, np.ndarray], pairs: dict[Side, np.ndarray], factor: int) -> None:
        """Solve one factor's coordinates, items first, as often as the method says."""
        last = self.method.inner_iterations - 1
        items, users = columns["item"], columns["user"]
        nothing = items[0, :0]
        # no product is pending in a residual that was just computed
        pending = items[factor - 1] if factor else np.zeros_like(items[0])
        for inner in range(last + 1):
            # the first time the product comes back; the last time the new one goes: from the rows at once, from the
            # columns when the next factor's turn comes
            first = inner == 0
            self._update("item", factor, columns, pairs, _ccd.CATCH_UP if first else _ccd.KEEP, pending, nothing)
            following = users[(factor + 1) % len(users)] if inner == last else nothing
            self._update("user", factor, columns, pairs, _ccd.ADD_BACK if first else _ccd.KEEP, nothing, following)

    def _update(
        self,
        side: Side,
        factor: int,
        columns: dict[Side, np.ndarray],
        pairs: dict[Side, np.ndarray],
        terms: int,
        pending: np.ndarray,
        following: np.ndarray,
    ) -> None:
        half, coordinates = self.halves[side], columns[side][factor]
        _ccd.update(
            coordinates,
            pairs[side],
            pairs[other_side(side)],
            half.indptr,
            half.indices,
            half.residual,
            half.weights,
            half.ridge,
            pending,
            following,
            half.groups,
            half.segments,
            self._workspace,
            terms,
            self.method.nonnegative,
            self.plan.num_threads,
        )
        finite = np.isfinite(coordinates)
        if not np.all(finite):
            raise NonFiniteError(
                f"factor {factor} of {side} {int(np.argmin(finite))} became infinite or NaN; "
                "scale the ratings down, increase regularization "
                f"(now {self.objective.regularization:g}), or use dtype='float64'"
            )

    def objective_value(self) -> float:
        """The objective at the current factors, in float64; weighted, of errors in the type of the factors."""
        users, items = self.halves["user"], self.halves["item"]
        if len(users.weights):
            self._compute_residual("user")
            error = users.residual.astype(np.float64)
            penalty = self.objective.penalty
            return (
                float(np.dot(users.weights * error, error))
                + penalty(self.state.user.matrix, users.degrees)
                + penalty(self.state.item.matrix, items.degrees)
            )
        csr = (users.indptr, users.indices, users.ratings)
        return objective_value(self.objective, csr, self.state, users.degrees, items.degrees, self.plan.num_threads)


def _weight_matrix(matrix: sp.csr_array, weights: Any) -> sp.csr_array:
    """Weights of entries as a matrix of their pattern and dtype."""
    checked = np.ascontiguousarray(weights, dtype=matrix.dtype)
    if checked.shape != matrix.data.shape:
        raise ValueError(
            f"weights has shape {checked.shape}, expected ({matrix.nnz},): one for each entry of user_items, by rows"
        )
    bad = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if bad.size:
        raise ValueError(f"weights has the value {checked[bad[0]]} at entry {bad[0]}; expected finite numbers >= 0")
    return make_csr(matrix.indptr, matrix.indices, checked, matrix.shape)
