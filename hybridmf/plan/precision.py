"""Whether float32 is enough for the systems of an exact fit: a look at the longest row after some half sweeps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.logs import is_quiet
from ..core.objective import Factors, Objective, Side
from ..core.row_systems import Row, beyond_float32, sampled_gram, sampling_step
from .row_forms import dual_up_to
from .types import NONNEGATIVE, Plan

logger = logging.getLogger("hybridmf")

SPARSE = frozenset(4**k for k in range(16))  # half sweeps of a side that a check follows on a GPU


def can_be_imprecise(plan: Plan, side: Side, objective: Objective, n_entries: int) -> bool:
    """Whether a row of this length has systems in float32 that are solved exactly in the primal form."""
    if plan.dtype != "float32" or plan.solver not in ("cholesky", NONNEGATIVE) or not n_entries:
        return False
    return objective.is_implicit or n_entries > max(plan.rank, dual_up_to(plan, side))  # the dual form has fewer


class PrecisionCheck:
    """Warns once in a fit if the longest row of a side is beyond float32.

    Its penalty is smallest beside the sums of its entries. On a GPU a check waits for the device, and takes as long as
    an iteration of a small fit, so it follows the half sweeps 1, 4, 16, ... of each side, if its warning is read.

    `halves`: with `degrees`, `names` and `row_entries`.
    """

    def __init__(self, objective: Objective, plan: Plan, halves: Mapping[Side, Any]) -> None:
        self.objective, self.plan, self.halves = objective, plan, halves
        self.warned = False
        self._done: Counter[Side] = Counter()
        self._rows: dict[Side, tuple[int, Row] | None] = {}
        if plan.streamed:  # before a thread reads the same slabs
            for side in halves:
                self._longest(side)

    def _longest(self, side: Side) -> tuple[int, Row] | None:
        """Number and sampled entries of the longest row of a side; None if it is precise enough for certain."""
        if side not in self._rows:
            half = self.halves[side]
            at = int(np.argmax(half.degrees)) if len(half.degrees) else 0
            count = int(half.degrees[at]) if len(half.degrees) else 0
            self._rows[side] = None
            if can_be_imprecise(self.plan, side, self.objective, count):
                entries = half.row_entries(np.array([at]))
                row = Row(entries.indices, entries.data, count).sample(self.plan.rank)
                self._rows[side] = (at if half.names is None else int(half.names[at]), row)
        return self._rows[side]

    def is_due(self, side: Side) -> bool:
        """Whether the check after the next half sweep of `side` reads the factors."""
        if self.warned or (self.plan.gpu is not None and self._done[side] + 1 not in SPARSE):
            return False
        return not is_quiet() and self._longest(side) is not None

    def __call__(self, side: Side, fixed: Factors) -> None:
        """Check a half sweep of `side`, which was solved for the factors `fixed`."""
        is_due = self.is_due(side)
        self._done[side] += 1
        if not is_due:
            return
        found = self._longest(side)
        assert found is not None
        name, row = found
        gram = None
        if self.objective.is_implicit:
            some = fixed.take(np.arange(0, len(fixed), sampling_step(len(fixed), self.plan.rank)))
            gram = sampled_gram(self.objective, some, len(fixed))
        near = Row(np.arange(len(row.columns)), row.values, row.n_entries)
        text = beyond_float32(self.objective, side, near, fixed.take(row.columns), name, gram)
        if text is not None:
            logger.warning("%s", text)
            self.warned = True
