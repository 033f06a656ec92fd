"""Order of users and items in a solver: that of the input, or by degree (BALS 4.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Side, other_side
from ..core.sparse import transposed
from ..core.validate import make_csr
from ..formats import reorder


@dataclass(frozen=True)
class Ordering:
    """Map from positions in a solver's matrices to rows of the input."""

    rows: dict[Side, np.ndarray] = field(default_factory=dict)  # empty if nothing is reordered

    def names(self, side: Side) -> np.ndarray | None:
        """Row of the input at each position; None if nothing is reordered."""
        return self.rows.get(side)

    def entries(self, side: Side, at: np.ndarray, rows: sp.csr_array) -> tuple[np.ndarray, sp.csr_array]:
        """Numbers of rows of the input, and their entries with its columns; `rows` are those of positions `at`."""
        names, columns = self.rows.get(side), self.rows.get(other_side(side))
        if columns is not None:
            rows = make_csr(rows.indptr, columns[rows.indices], rows.data, rows.shape)
        return at if names is None else names[at], rows

    def inward(self, side: Side, factors: Factors) -> Factors:
        rows = self.rows.get(side)
        return factors if rows is None else factors.reordered(rows)

    def outward(self, side: Side, factors: Factors) -> Factors:
        rows = self.rows.get(side)
        if rows is None:
            return factors
        inverse = np.empty_like(rows)
        inverse[rows] = np.arange(len(rows))
        return factors.reordered(inverse)


def reordered(user_items: Any, item_users: Any, axes: str, num_threads: int) -> tuple[Ordering, dict[Side, Any]]:
    """The ordering of a plan, and both orientations of the ratings in that order."""
    if axes == "none":
        return Ordering(), {"user": user_items, "item": item_users}
    rows, cols = axes in ("rows", "both"), axes in ("columns", "both")
    found = reorder(user_items, rows=rows, cols=cols, num_threads=num_threads)
    matrices: dict[Side, Any] = {"user": found.matrix, "item": transposed(found.matrix, num_threads)}
    return Ordering({"user": found.row_order, "item": found.col_order}), matrices
