"""Primal or dual form of the systems of ALS: where the dual form applies, and where it is faster.

A row with fewer entries n than factors f costs ``n^2 f + n^3 / 3`` in the dual form in place of ``n f^2 + f^3 / 3``
(docs/methods.md). Implicit feedback adds a change of basis for the fixed side and the solutions, ``f^2`` per row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..core.objective import SIDES, Objective, Side
from .machine import CpuRates, seconds_at, solve_flops, system_flops

if TYPE_CHECKING:
    from .types import Plan

DUAL_SHARE = 0.5
"""Largest number of entries per factor for which "auto" uses the dual form, on the CPU and, for small ranks, on a GPU.

Time of the primal over the dual form of a row with 0.25 / 0.5 / 0.75 f entries, explicit, AVX2, one thread: 2.6 / 1.6 /
0.6 at f = 32, 2.8 / 1.5 / 0.8 at 64, 3.5 / 1.3 / 0.9 at 128, 4.4 / 2.0 / 1.2 at 256."""

GPU_SIZES = (2, 4, 8, 16, 32, 48, 64)
"""Maximum entries of a row in each program of cuda/dual_rows.cu; a row uses the smallest program that fits."""

GPU_DUAL_RANK = 32
"""Rank from which "auto" uses the dual form on a GPU: smaller systems are one or two blocks in either form.

Where another kernel solves the primal systems, rows of up to 64 entries take the dual form, whatever the rank. On an
H200, Netflix's shape took 40.6 instead of 41.3 ms at f = 100 (explicit, bf16x3), and 39.6 instead of 40.2 at f = 96
(implicit). At f = 64, the Million Song Dataset's took 19.0 instead of 18.8 ms with rows of up to 48."""


def obstacle(objective: Objective, side: Side) -> str:
    """Why the dual form does not apply to a side; "" if it does."""
    if objective.regularization.of(side) == 0:
        return "regularization=0 leaves no ridge to divide by"
    if objective.biases and objective.bias_regularization.of(side) == 0:
        return "bias_regularization=0 leaves biases without a ridge to divide by"
    if objective.is_implicit and objective.scaling.of(side):
        return 'regularization_scaling other than "none" gives each row of an implicit model another ridge'
    if objective.is_implicit and objective.unobserved_weight > 1:
        return "unobserved_weight > 1 exceeds confidences of entries, and the roots of their differences are not real"
    return ""


def check_row_form(plan: Plan, objective: Objective) -> None:
    if plan.row_form != "dual":
        return
    reason = next(filter(None, (obstacle(objective, side) for side in SIDES)), "") or _kernel_obstacle(plan)
    if not reason and plan.gpu is not None and any(grid.splits > 1 for grid in plan.grids.values()):
        reason = "it needs all entries of a row on one GPU, and the plan splits rows over GPUs"
    if reason:
        raise ValueError(f'row_form="dual" does not apply: {reason}; use row_form="auto" or "primal"')


def _kernel_obstacle(plan: Plan) -> str:
    """Why the dual form does not apply to the kernels of a plan; "" if it does."""
    if plan.solver != "cholesky":
        return f'it is a form of solver="cholesky", and this is solver={plan.solver!r}'
    if plan.gpu is None:
        if plan.assembly not in ("auto", "simd"):
            return f'it needs assembly="simd", and this is assembly={plan.assembly_name!r}'
    elif plan.assembly != "fused":
        return f'on a GPU it needs assembly="fused", and this is assembly={plan.assembly_name!r}'
    elif plan.streamed or plan.offloaded:
        return "it needs all ratings and factors in the memory of the GPUs"
    return ""


def dual_sides(plan: Plan, objective: Objective) -> tuple[Side, ...]:
    """Sides whose short rows take the dual form; depends on sizes alone, so that fits, ranks and fold-in agree."""
    if plan.row_form == "primal" or _kernel_obstacle(plan):
        return ()
    primal = {side for side, _, _ in plan.features if plan.gpu is not None}  # kernels have features in that form
    able = (side for side in SIDES if side not in primal and not obstacle(objective, side))
    return tuple(side for side in able if plan.row_form == "dual" or _pays(plan, side))


def dual_up_to(plan: Plan, side: Side) -> int:
    """Entries of the longest row of a side that takes the dual form; 0 for none."""
    if side not in plan.dual_sides or plan.assembly not in ("simd", "fused") or plan.solver != "cholesky":
        return 0
    longest = plan.rank if plan.row_form == "dual" else _share(plan)
    if plan.gpu is None:
        return longest
    whole_rows_there = not plan.streamed and not plan.offloaded and plan.grids[side].splits == 1
    return min(longest, GPU_SIZES[-1]) if whole_rows_there else 0


def changes_basis(plan: Plan, side: Side) -> bool:
    """Whether rows of a side are solved in the basis where Gram matrix plus ridge are the unit matrix."""
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


def side_seconds(plan: Plan, side: Side, limit: int, rates: CpuRates, filled: float = 1.0) -> float:
    """Core seconds of the exact solution of a side, in which rows of up to `limit` entries take the dual form.

    `filled`: share of the rows that have entries, if known.
    """
    f = plan.rank
    most, fixed = side_sizes(plan, side)
    rows = filled * most
    entry = seconds_at(rates.assembly, system_flops, f) * rates.slower[plan.assembly]
    row = seconds_at(rates.solve, solve_flops, f)
    if not limit:
        return plan.nnz * entry + rows * row
    share, entries, squares, cubes = short_rows(limit, plan.nnz / rows)
    dual = share * rates.dual_row + (squares * (f + 2) + cubes / 3 + 4 * entries * f) / rates.dual
    seconds = plan.nnz * entry + rows * ((1 - share) * row + dual - entries * entry)
    return seconds + ((rows + fixed) * f * f / rates.product if plan.feedback == "implicit" else 0.0)


def _pays(plan: Plan, side: Side) -> bool:
    """Whether short rows save more than the change of basis costs; built-in constants make all ranks agree."""
    if plan.gpu is not None:
        return plan.rank >= GPU_DUAL_RANK
    if plan.feedback == "explicit":
        return True
    exact, rates = plan.changed(assembly="simd"), CpuRates()
    return side_seconds(exact, side, _share(plan), rates) < side_seconds(exact, side, 0, rates)


def _share(plan: Plan) -> int:
    """Entries of the longest row that "auto" solves in the dual form."""
    apart = plan.gpu is not None and plan.solved_apart
    return GPU_SIZES[-1] if apart else int(DUAL_SHARE * plan.rank)
