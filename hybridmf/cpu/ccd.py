"""CCD++ on the CPU: two copies of the residual, by rows and by columns, and the order of the rank-one updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State, other_side, scoring_rows
from ..core.validate import csr_arrays
from ..native import _ccd
from ..native.arguments import Change, ResidualRows
from ..plan.ccd import RankOneSolver, non_finite
from ..plan.solver import SWEEP_ORDER
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
    """One side's rows: ratings, residual and schedule."""

    def __init__(self, side: Side, matrix: sp.csr_array, objective: Objective) -> None:
        indptr, indices, self.ratings = csr_arrays(matrix)
        residual = aligned_zeros(self.ratings.shape, matrix.dtype)
        self.rows = ResidualRows(indptr, indices, residual, *_ccd.schedule(indptr))
        self.degrees = np.diff(indptr)
        # for factors, and for biases if there are any
        self.ridges = objective.ridge(side, 1, 1 + objective.biases)[:, None] * objective.row_scale(side, self.degrees)


class CpuCCD(RankOneSolver):
    """CCD++ on the CPU: owns both copies of the residual."""

    def __init__(
        self, user_items: sp.csr_array, item_users: sp.csr_array, objective: Objective, plan: Plan, state: State
    ) -> None:
        super().__init__(objective, plan, state.on_host())
        self.halves: dict[Side, _Half] = {
            "user": _Half("user", user_items, objective),
            "item": _Half("item", item_users, objective),
        }
        self._workspace = workspaces(plan.num_threads, _ccd.LONG_ROW, user_items.dtype)

    def columns_of_state(self) -> dict[Side, np.ndarray]:
        self._compute_residuals()
        columns = {side: self._columns(side) for side in SIDES}
        # the values that a pass gathers from the other side, interleaved; see _ccd.pyx
        self._pairs = {side: aligned_zeros((columns[side].shape[1], 2), columns[side].dtype) for side in SIDES}
        self._pairs["user"][:, 1] = columns["user"][0]
        return columns

    def _columns(self, side: Side) -> np.ndarray:
        factors = self.state.side(side)
        return by_column(factors.matrix, *(factors.bias if biased == side else 1 for biased in self.biases))

    def factors(self, side: Side, columns: np.ndarray) -> Factors:
        """See `RankOneSolver`; `update` has checked the coordinates."""
        bias = columns[self.biases.index(side)].copy() if self.biases else None
        return Factors(by_row(columns[len(self.biases) :]), bias)

    def _compute_residuals(self) -> None:
        """Compute copies of the residual from the state, in kernel calls of about ``plan.batch_flops``.

        Python handles Ctrl-C between calls. With one inner iteration, both copies take a quarter of the flops of the
        updates, and a smaller share of the time.
        """
        tables = {side: scoring_rows(self.state.side(side), side, self.state.mean) for side in SIDES}
        for side in SWEEP_ORDER:
            half, rows, fixed = self.halves[side], tables[side], tables[other_side(side)]
            work = RESIDUAL_SLOWNESS * 2.0 * self.plan.nnz * rows.shape[1]
            calls = max(1, int(np.ceil(work / self.plan.batch_flops)))
            cuts = np.linspace(0, len(half.rows.groups) - 1, calls + 1).astype(np.int64)
            for call, segments in enumerate(np.array_split(half.rows.segments, calls)):
                groups = half.rows.groups[cuts[call] : cuts[call + 1] + 1]
                taken = half.rows._replace(groups=groups, segments=segments)
                _ccd.residual(rows, fixed, taken, half.ratings, self.plan.num_threads)

    def update(self, side: Side, columns: dict[Side, np.ndarray], column: int, inner: int) -> None:
        """See `RankOneSolver`.

        The first inner iteration adds the old product; the last one subtracts the new product from the rows, and the
        next factor's update subtracts it from the columns.
        """
        half, coordinates = self.halves[side], columns[side][column]
        is_factor, nothing = not self.is_bias(column), coordinates[:0]
        is_last = not is_factor or inner == self.method.inner_iterations - 1
        if side == "item":
            # a residual that was just computed has no pending product
            pending = columns[side][column - 1] if column else np.zeros_like(coordinates)
            change = Change(_ccd.KEEP if inner else _ccd.CATCH_UP, pending, nothing)
        else:
            following = columns[side][(column + 1) % len(columns[side])] if is_last else nothing
            change = Change(_ccd.KEEP if inner else _ccd.ADD_BACK, nothing, following)
        _ccd.update(
            coordinates,
            self._pairs[side],
            self._pairs[other_side(side)],
            half.rows,
            change,
            half.ridges[0 if is_factor else 1] if self.solves(side, column) else np.empty(0),
            self.method.nonnegative and is_factor,
            self._workspace,
        )
        finite = np.isfinite(coordinates)
        if not np.all(finite):
            factor = column - len(self.biases) if is_factor else None
            raise non_finite(self.objective, side, int(np.argmin(finite)), factor)

    def objective_value(self) -> float:
        """The objective at the current factors, in float64."""
        users, items = self.halves["user"], self.halves["item"]
        csr = (users.rows.indptr, users.rows.indices, users.ratings)
        return objective_value(self.objective, csr, self.state, users.degrees, items.degrees, self.plan.num_threads)
