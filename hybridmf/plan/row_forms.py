"""Primal or dual form of the systems of ALS on the CPU: where the dual applies, and where it pays.

A row with fewer entries n than factors f costs ``n^2 f + n^3 / 3`` in the dual form in place of ``n f^2 + f^3 / 3``
(docs/methods.md). For implicit feedback both sides change basis first, ``f^2`` a row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..core.objective import SIDES, Objective, Side

if TYPE_CHECKING:
    from .types import Plan

DUAL_SHARE = 0.75
"""Entries per factor up to which the dual form of a row is faster; see bench/cpu.py, task "short"."""

BASIS_SHARE = 0.5
"""Share of the saved work up to which the change of basis of implicit feedback pays."""


def obstacle(objective: Objective) -> str:
    """Why the dual form does not apply to an objective; "" if it does."""
    if objective.regularization == 0:
        return "regularization=0 leaves no ridge to divide by"
    if objective.biases and objective.bias_regularization == 0:
        return "bias_regularization=0 leaves biases without a ridge to divide by"
    if objective.is_implicit and objective.scaling:
        return 'regularization_scaling other than "none" gives each row of an implicit model another ridge'
    if objective.is_implicit and objective.unobserved_weight > 1:
        return "unobserved_weight > 1 exceeds confidences of entries, and the roots of their differences are not real"
    return ""


def check_row_form(plan: Plan, objective: Objective) -> None:
    """Raise if a plan for the CPU cannot use the requested ``row_form="dual"``."""
    if plan.row_form != "dual":
        return
    reason = obstacle(objective)
    if plan.solver != "cholesky":
        reason = f'it is a form of solver="cholesky", and this is solver={plan.solver!r}'
    elif plan.assembly not in ("auto", "simd"):
        reason = f'it needs assembly="simd", and this is assembly={plan.assembly_name!r}'
    if reason:
        raise ValueError(f'row_form="dual" does not apply: {reason}; use row_form="auto" or "primal"')


def dual_sides(plan: Plan, objective: Objective) -> tuple[Side, ...]:
    """Sides whose short rows take the dual form; decided from sizes alone, so that fits, ranks and fold-in agree."""
    if plan.row_form == "primal" or obstacle(objective):
        return ()
    return tuple(side for side in SIDES if plan.row_form == "dual" or _pays(plan, side))


def dual_up_to(plan: Plan, side: Side) -> int:
    """Entries of the longest row of a side that takes the dual form; 0 for none."""
    if side not in plan.dual_sides or plan.assembly != "simd" or plan.solver != "cholesky":
        return 0
    return plan.rank if plan.row_form == "dual" else int(DUAL_SHARE * plan.rank)


def changes_basis(plan: Plan, side: Side) -> bool:
    """Whether rows of a side are solved in the basis in which Gram matrix and ridge are the unit matrix."""
    return plan.feedback == "implicit" and dual_up_to(plan, side) > 0


def short_rows(longest: float, mean: float) -> tuple[float, float, float, float]:
    """Moments 0 to 3 of the degrees of rows with at most `longest` entries, for geometric degrees of a given mean.

    Real degrees have longer tails: at the same mean, more rows are short.
    """
    t = longest / mean
    rest = math.exp(-t)
    return (
        1 - rest,
        mean * (1 - (1 + t) * rest),
        mean**2 * (2 - (2 + 2 * t + t * t) * rest),
        mean**3 * (6 - (6 + 6 * t + 3 * t * t + t**3) * rest),
    )


def side_sizes(plan: Plan, side: Side) -> tuple[int, int]:
    """Rows of a side that can have entries, and rows of the other side."""
    rows, fixed = (plan.n_users, plan.n_items) if side == "user" else (plan.n_items, plan.n_users)
    return max(1, min(rows, plan.nnz)), fixed


def _pays(plan: Plan, side: Side) -> bool:
    """Whether short rows save more than the change of basis costs."""
    if plan.feedback == "explicit":
        return True
    f = float(plan.rank)
    rows, fixed = side_sizes(plan, side)
    share, entries, squares, cubes = short_rows(DUAL_SHARE * f, plan.nnz / rows)
    primal = share * f**3 / 3 + entries * f * f
    dual = squares * f + cubes / 3
    return (rows + fixed) * f * f < BASIS_SHARE * rows * (primal - dual)
