"""Status codes of rows: kernels write one for each row, and Python raises after they return."""

from __future__ import annotations

import numpy as np

from ..core.objective import Objective, Side
from ..errors import NonFiniteError, NotPositiveDefiniteError
from . import _als

SINGULAR_PIVOT = 4.0
"""Pivots up to this many units in the last place of their diagonal element count as rounding errors."""

LARGE_WEIGHT = 1e9
"""If factors overflow, penalties and confidences beyond this value are the cause rather than the ratings."""


def _overflow_advice(objective: Objective) -> str:
    name, value = max(objective.weights.items(), key=lambda item: item[1])
    if value > LARGE_WEIGHT:
        return f"scale the ratings down, lower {name} (now {value:g}), or use dtype='float64'"
    return f"scale the ratings down, {'lower alpha, ' if objective.is_implicit else ''}or use dtype='float64'"


def check_status(status: np.ndarray, side: Side, objective: Objective, names: np.ndarray | None = None) -> None:
    """Raise the failure of the first row whose status is not 0; `names`: numbers of the rows, by default positions."""
    bad = np.flatnonzero(status)
    if not bad.size:
        return
    row, code = int(bad[0]), int(status[bad[0]])
    if names is not None:
        row = int(names[row])
    more = f" ({bad.size - 1} more such rows)" if bad.size > 1 else ""
    if code == _als.NON_FINITE:
        raise NonFiniteError(f"factors of {side} {row} became infinite or NaN{more}; {_overflow_advice(objective)}")
    minor = code if code > 0 else 0
    what = f"leading minor {minor}" if code > 0 else "negative curvature in a conjugate gradient step"
    raise NotPositiveDefiniteError(
        f"normal equations of {side} {row} are not positive definite ({what}){more}; "
        f"increase regularization (now {objective.regularization.of(side):g})",
        side=side,
        row=row,
        minor=minor,
    )
