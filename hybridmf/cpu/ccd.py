"""CCD++ on the CPU: two copies of the residual, by rows and by columns, and the order of the rank-one updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State, other_side, scoring_rows
from ..core.sparse import transposed
from ..core.validate import csr_arrays, make_csr
from ..native import _ccd
from ..native.residual_rows import Change, ResidualRows
from ..plan.ccd import CcdMethod, non_finite
from ..plan.solver import SWEEP_ORDER, Unconnected
from ..plan.types import Plan
from .als import aligned_zeros, objective_value, workspaces

TRANSPOSE_ROWS = 256
"""Rows transposed at a time: 64 KB at rank 64 in float32, so that source and destination stay in L2."""

RESIDUAL_SLOWNESS = 8.0
"""Cost of a flop of the residual, which streams, relative to the normal equations, which reuse rows."""


def by_column(rows: np.ndarray, *first: Any) -> np.ndarray:
    """The columns `first`, then factors of shape (n, rank) by column: a factor's coordinates are contiguous."""
    columns = aligned_zeros((len(first) + rows.shape[1], len(rows)), rows.dtype)
    for column, values in zip(columns, first, strict=False):
        column[:] = values
    for start in range(0, len(rows), TRANSPOSE_ROWS):
        columns[len(first) :, start : start + TRANSPOSE_ROWS] = rows[start : start + TRANSPOSE_ROWS].T
    return columns


def by_row(columns: np.ndarray) -> np.ndarray:
    """Columns of shape (rank, n) as factors: a new array of shape (n, rank), C order."""
    rows = aligned_zeros(columns.shape[::-1], columns.dtype)
    for start in range(0, len(rows), TRANSPOSE_ROWS):
        rows[start : start + TRANSPOSE_ROWS] = columns[:, start : start + TRANSPOSE_ROWS].T
    return rows


class _Half:
    """One side's rows: ratings, residual and schedule.

    `matrix`: one row for each row of the side.
    """

    def __init__(self, side: Side, matrix: sp.csr_array, weights: sp.csr_array | None, objective: Objective) -> None:
        indptr, indices, self.ratings = csr_arrays(matrix)
        given: np.ndarray = np.empty(0, dtype=matrix.dtype) if weights is None else weights.data
        residual = aligned_zeros(self.ratings.shape, matrix.dtype)
        self.rows = ResidualRows(indptr, indices, residual, given, *_ccd.schedule(indptr))
        self.degrees = np.diff(indptr)
        # for factors, and for biases if there are any
        self.ridges = objective.ridge(side, 1, 1 + objective.biases)[:, None] * objective.row_scale(side, self.degrees)


class CpuCCD(Unconnected):
    """Cyclic coordinate descent over rank-one factors on the CPU: owns both copies of the residual.

    `user_items`, `item_users`: the ratings in both orientations.
    `objective`: explicit.
    `plan`: its `method` is a `CcdMethod`.
    `state`: initial factors; not negative for a non-negative model.
    `weights`, (nnz,): weight of each entry's squared error, >= 0, in the order of `user_items`. Weights do not change
        the penalty.
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
        assert isinstance(plan.method, CcdMethod) and not objective.is_implicit
        self.objective, self.plan, self.method, self.state = objective, plan, plan.method, state
        self.biases = plan.method.bias_columns(plan)
        of_users = None if weights is None else _weight_matrix(user_items, weights)
        of_items = None if of_users is None else transposed(of_users, plan.num_threads)
        self.halves: dict[Side, _Half] = {
            "user": _Half("user", user_items, of_users, objective),
            "item": _Half("item", item_users, of_items, objective),
        }
        self._workspace = workspaces(plan.num_threads, _ccd.LONG_ROW, user_items.dtype)

    def sweep(self) -> Iterator[None]:
        """Run one outer iteration on copies of the factors; yield once the copies are the state."""
        self._compute_residuals(*SWEEP_ORDER)
        columns = {side: self._columns(side) for side in SIDES}
        # the values that a pass gathers from the other side, interleaved; see _ccd.pyx
        pairs = {side: aligned_zeros((columns[side].shape[1], 2), columns[side].dtype) for side in SIDES}
        pairs["user"][:, 1] = columns["user"][0]
        for column in range(len(columns["user"])):
            self._update_rank_one(columns, pairs, column)
        users, items = (self._factors(side, columns[side]) for side in SIDES)
        self.state = State(users, items, self.state.mean)
        yield

    def _columns(self, side: Side) -> np.ndarray:
        """Coordinates of a side by column: its biases, ones that multiply the other side's biases, then factors."""
        factors = self.state.side(side)
        return by_column(factors.matrix, *(factors.bias if biased == side else 1 for biased in self.biases))

    def _factors(self, side: Side, columns: np.ndarray) -> Factors:
        """Inverse of `_columns`."""
        bias = columns[self.biases.index(side)].copy() if self.biases else None
        return Factors(by_row(columns[len(self.biases) :]), bias)

    def _compute_residuals(self, *sides: Side) -> None:
        """Compute copies of the residual from the state.

        Every iteration recomputes them, so that a resumed fit equals an uninterrupted one bit for bit, and rounding
        errors do not accumulate. With one inner iteration, both copies take a quarter of the flops of the updates,
        and a smaller share of the time. A kernel call takes about ``plan.batch_flops``; Python handles Ctrl-C between
        calls.
        """
        tables = {side: scoring_rows(self.state.side(side), side, self.state.mean) for side in SIDES}
        for side in sides:
            self._compute_residual(side, tables[side], tables[other_side(side)])

    def _compute_residual(self, side: Side, rows: np.ndarray, fixed: np.ndarray) -> None:
        half, plan = self.halves[side], self.plan
        work = RESIDUAL_SLOWNESS * 2.0 * plan.nnz * rows.shape[1]
        pieces = max(1, int(np.ceil(work / plan.batch_flops)))
        cuts = np.linspace(0, len(half.rows.groups) - 1, pieces + 1).astype(np.int64)
        segments = np.array_split(half.rows.segments, pieces)
        for piece in range(pieces):
            groups = half.rows.groups[cuts[piece] : cuts[piece + 1] + 1]
            part = half.rows._replace(groups=groups, segments=segments[piece])
            _ccd.residual(rows, fixed, part, half.ratings, plan.num_threads)

    def _update_rank_one(self, columns: dict[Side, np.ndarray], pairs: dict[Side, np.ndarray], column: int) -> None:
        """Solve the coordinates of one column, items first: a factor in every inner iteration, biases once."""
        last = 0 if column < len(self.biases) else self.method.inner_iterations - 1
        items, users = columns["item"], columns["user"]
        nothing = items[0, :0]
        # a residual that was just computed has no pending product
        pending = items[column - 1] if column else np.zeros_like(items[0])
        for inner in range(last + 1):
            # the first inner iteration adds the old product; the last one subtracts the new product from the rows, and
            # the next factor's update subtracts it from the columns
            first = inner == 0
            change = Change(_ccd.CATCH_UP if first else _ccd.KEEP, pending, nothing)
            self._update("item", column, columns, pairs, change)
            following = users[(column + 1) % len(users)] if inner == last else nothing
            change = Change(_ccd.ADD_BACK if first else _ccd.KEEP, nothing, following)
            self._update("user", column, columns, pairs, change)

    def _update(
        self,
        side: Side,
        column: int,
        columns: dict[Side, np.ndarray],
        pairs: dict[Side, np.ndarray],
        change: Change,
    ) -> None:
        half, coordinates = self.halves[side], columns[side][column]
        is_factor = column >= len(self.biases)
        # otherwise the column consists of ones that multiply biases, or the side is frozen
        solves = (is_factor or self.biases[column] == side) and side != self.plan.frozen
        _ccd.update(
            coordinates,
            pairs[side],
            pairs[other_side(side)],
            half.rows,
            change,
            half.ridges[0 if is_factor else 1] if solves else np.empty(0),
            self.method.nonnegative and is_factor,
            self._workspace,
        )
        finite = np.isfinite(coordinates)
        if not np.all(finite):
            factor = column - len(self.biases) if is_factor else None
            raise non_finite(self.objective, side, int(np.argmin(finite)), factor)

    def objective_value(self) -> float:
        """The objective at the current factors, in float64; with weights, from errors in the type of the factors."""
        users, items = self.halves["user"], self.halves["item"]
        if len(users.rows.weights):
            self._compute_residuals("user")
            error = users.rows.residual.astype(np.float64)
            penalty = self.objective.penalty
            return (
                float(np.dot(users.rows.weights * error, error))
                + penalty("user", self.state.user.matrix, users.degrees, self.state.user.bias)
                + penalty("item", self.state.item.matrix, items.degrees, self.state.item.bias)
            )
        csr = (users.rows.indptr, users.rows.indices, users.ratings)
        return objective_value(self.objective, csr, self.state, users.degrees, items.degrees, self.plan.num_threads)


def _weight_matrix(matrix: sp.csr_array, weights: Any) -> sp.csr_array:
    """Weights as a matrix with the pattern and dtype of the ratings."""
    checked = np.ascontiguousarray(weights, dtype=matrix.dtype)
    if checked.shape != matrix.data.shape:
        raise ValueError(
            f"weights has shape {checked.shape}, expected ({matrix.nnz},): one for each entry of user_items, by rows"
        )
    bad = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if bad.size:
        raise ValueError(f"weights has the value {checked[bad[0]]} at entry {bad[0]}; expected finite numbers >= 0")
    return make_csr(matrix.indptr, matrix.indices, checked, matrix.shape)
