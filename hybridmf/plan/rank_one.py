"""CCD++ as a solver: the order of the rank-one updates on any device; their kernels are in `cpu.ccd` and `gpu.ccd`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from ..core.objective import SIDES, Factors, Objective, Side, State
from .solver import SWEEP_ORDER, Unconnected
from .types import Plan

if TYPE_CHECKING:
    from .ccd import CcdMethod


class RankOneSolver(Unconnected):
    """Cyclic coordinate descent over rank-one factors: owns the current factors; a subclass owns the residual.

    The coordinates of a side by column are its biases, ones that multiply the other side's biases, then factors. The
    method of `plan` is a `CcdMethod`, the objective explicit.
    """

    def __init__(self, objective: Objective, plan: Plan, state: State) -> None:
        assert not objective.is_implicit
        self.objective, self.plan, self.state, self.method = objective, plan, state, cast("CcdMethod", plan.method)
        self.biases = self.method.bias_columns(plan)

    def active(self) -> AbstractContextManager[None]:
        """Context of all computation."""
        return nullcontext()

    def solve(self, step: None = None) -> State:
        """Run one outer iteration on copies of the factors.

        Every iteration recomputes the residual, so that a resumed fit equals an uninterrupted one bit for bit, and
        rounding errors do not accumulate. A factor is solved in every inner iteration, biases once.
        """
        with self.active():
            columns = self.columns_of_state()
            for column in range(len(self.biases) + self.plan.factors):
                for inner in range(1 if self.is_bias(column) else self.method.inner_iterations):
                    for side in SWEEP_ORDER:
                        self.update(side, columns, column, inner)
            users, items = (self.factors(side, columns[side]) for side in SIDES)
            return State(users, items, self.state.mean)

    def keep(self, step: None, solved: State) -> None:
        """Make the result of an iteration the state."""
        self.state = solved

    def is_bias(self, column: int) -> bool:
        """Whether a column has biases of one side and ones of the other."""
        return column < len(self.biases)

    def solves(self, side: Side, column: int) -> bool:
        """Whether a side's coordinates change: not if they are ones that multiply biases, or the side is frozen."""
        return side != self.plan.frozen and not (self.is_bias(column) and self.biases[column] != side)

    def columns_of_state(self) -> dict[Side, Any]:
        """Compute the residual of the state; return both sides' coordinates by column."""
        raise NotImplementedError

    def update(self, side: Side, columns: dict[Side, Any], column: int, inner: int) -> None:
        """Solve the coordinates of a side in one column, in inner iteration 0, 1, ...; and update the residual."""
        raise NotImplementedError

    def factors(self, side: Side, columns: Any) -> Factors:
        """Convert coordinates by column to factors; raises NonFiniteError if one is infinite or NaN."""
        raise NotImplementedError
