"""After exact solves: nonnegative users that a GPU left above their minima, and new rows beyond float32."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.nonnegative import finished
from ..core.objective import Objective, Side, other_side
from ..core.regression import filled, parted
from ..core.row_systems import Row, beyond_float32, row_system
from ..native import _als
from ..plan.als import for_fold_in
from ..plan.precision import can_be_imprecise
from ..plan.types import NONNEGATIVE
from .learned import Learned

logger = logging.getLogger("hybridmf")

SAMPLE = 64  # nonnegative rows that are compared with their minima after a fit on a GPU

TOLERANCE, ROUNDING = 1e-3, 1e-7
"""Gain relative to a user's minimum, and to the loss of zeros, from which the user counts as unfinished."""

MOST_ROWS = 10_000  # rows that SciPy finishes; it takes about a millisecond for each


def warn_of_fold_in(learned: Learned, side: Side, rows: sp.csr_array) -> None:
    """Warn if float32 is too short for new rows; a row is examined if none half as long was, at the same state."""
    if learned.plan.dtype != "float32":
        return
    degrees = np.diff(rows.indptr)
    longest, judged = int(degrees.max(initial=0)), learned.cached(("longest row examined", side), lambda: [0])
    if longest <= 2 * judged[0]:
        return
    judged[0] = longest
    at, plan, objective = int(np.argmax(degrees)), for_fold_in(learned.plan), learned.objective
    if not can_be_imprecise(plan, side, objective, longest):
        return
    span = slice(rows.indptr[at], rows.indptr[at + 1])
    row = Row(rows.indices[span], rows.data[span], longest).sample(plan.rank)
    text = beyond_float32(objective, side, row, learned.solved(other_side(side)), at)
    if text is not None:
        logger.warning("in the rows given, %s", text)


# ------------------------------------------------------------------------------------------------ nonnegative rows


def finished_users(learned: Learned, solver: Any) -> Learned | None:
    """The state of a fit on a GPU with nonnegative users at their minima; None if a sample has no user who is not."""
    plan = learned.plan
    if plan.solver != NONNEGATIVE or plan.gpu is None or plan.frozen == "user":
        return None
    gram = None
    if learned.objective.is_implicit:
        items = np.ascontiguousarray(learned.state.item.matrix)
        gram = solver.objective.unobserved_weight * _als.gram(items, plan.num_threads)
    found = solver.rows("user", _spread)
    if found is None or not any(above for _, _, above in _minima(learned, solver.objective, found, gram)):
        return None
    users = solver.rows("user", np.flatnonzero)
    if len(users[0]) > MOST_ROWS or solver.incomplete:
        logger.warning(
            "nonnegative users, of %d examined, are not at their minima after the last sweep of the GPU; "
            "%s users are too many to finish. Increase regularization (now %g), or use device='cpu', which does",
            len(found[0]), f"{len(users[0]):,}", solver.objective.regularization.user,
        )  # fmt: skip
        return None
    names, minima, above = zip(*_minima(learned, solver.objective, users, gram), strict=True)
    logger.info("finished %d nonnegative users that the GPU left above their minima", sum(above))
    ended = filled(learned.state.user, np.array(names), parted(np.stack(minima), plan.factors))
    return replace(learned, state=learned.state.with_side("user", ended))


def _spread(degrees: np.ndarray) -> np.ndarray:
    """Rows with entries, evenly over their degrees."""
    order = np.argsort(degrees, kind="stable")
    order = order[np.searchsorted(degrees[order], 1) :]
    return order[:: max(1, len(order) // SAMPLE)]


def _minima(
    learned: Learned, objective: Objective, users: tuple[np.ndarray, sp.csr_array], gram: np.ndarray | None
) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Each user with the minimum, and whether the factors were above it by more than rounding."""
    (names, rows), user, item = users, learned.state.user, learned.state.item
    for k, name in enumerate(names.tolist()):
        span = slice(rows.indptr[k], rows.indptr[k + 1])
        row = Row(rows.indices[span], rows.data[span], span.stop - span.start)
        matrix, right, constant = row_system(objective, "user", row, item, learned.state.mean, gram)
        x = user.matrix[name] if user.bias is None else np.append(user.matrix[name], user.bias[name])
        found, least, gain = finished(matrix, right, x, learned.plan.factors)
        yield name, found, gain > TOLERANCE * (constant / 2 + least) + ROUNDING * constant
