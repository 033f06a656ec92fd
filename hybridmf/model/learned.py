"""What a fit has learned, as one value: models replace it as a whole, so a failure half way leaves the old one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Objective, Side, State
from ..core.sparse import entry_rows, entry_sum
from ..core.validate import csr_arrays, from_triplets, make_csr
from ..data.store import StoredSeen, StoreMatrix
from ..errors import RatingsError
from ..plan.types import Plan


@dataclass(frozen=True)
class Learned:
    """Everything a fitted model knows, hyperparameters as they were at the fit included.

    Attributes
    ----------
    objective : Objective
    plan : Plan
    state : State
    seen : csr_array or StoredSeen, shape (n_users, n_items), or None
        int8 ones where a user has an entry, or where to read them; None in a model saved without them.
    total : float or None
        Sum of the training values: with `seen`, enough to tell the training data from other data.
    user_ids, item_ids : array or None
        Labels.
    params : dict
        The constructor's parameters at the fit, as a model file stores them.
    """

    objective: Objective
    plan: Plan
    state: State
    seen: sp.csr_array | StoredSeen | None
    total: float | None = None
    user_ids: np.ndarray | None = None
    item_ids: np.ndarray | None = None
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(n_users, n_items)."""
        return len(self.state.user), len(self.state.item)

    def with_side(self, side: Side, factors: Factors, seen: sp.csr_array | None, labels: np.ndarray | None) -> Learned:
        """A copy in which one side has other rows."""
        state = self.state.with_side(side, factors)
        if side == "user":
            return replace(self, state=state, seen=seen, total=None, user_ids=labels)
        return replace(self, state=state, seen=seen, total=None, item_ids=labels)

    def seen_matrix(self) -> sp.csr_array | None:
        """`seen` in memory."""
        return self.seen.load() if isinstance(self.seen, StoredSeen) else self.seen

    def is_training_data(self, matrix: sp.csr_array) -> bool:
        """Whether `matrix` is what the model was fitted on."""
        if self.seen is None or self.total is None or matrix.shape != self.seen.shape or matrix.nnz != self.seen.nnz:
            return False
        seen = self.seen_matrix()
        assert seen is not None
        return (
            bool(np.array_equal(matrix.indptr, seen.indptr))
            and bool(np.array_equal(matrix.indices, seen.indices))
            and total_of(matrix) == self.total
        )

    def overlaps(self, matrix: sp.csr_array) -> bool:
        """Whether `matrix`, of the training shape, has an entry that the training data have."""
        seen = self.seen_matrix()
        if seen is None:
            return False
        # keys ascend in canonical CSR, so a merge finds common ones
        mine, theirs = (entry_rows(part) * matrix.shape[1] + part.indices for part in (matrix, seen))
        place = np.minimum(np.searchsorted(theirs, mine), max(len(theirs) - 1, 0))
        return bool(len(theirs)) and bool(np.any(theirs[place] == mine))


def total_of(matrix: sp.csr_array | StoreMatrix) -> float:
    """Sum of the values; the same bits for a store and for the same ratings in memory."""
    return matrix.total if isinstance(matrix, StoreMatrix) else entry_sum([matrix.data])


def pattern(matrix: Any) -> Any:
    """A copy of the entries of a matrix as int8 ones; of a store, where to read them."""
    if isinstance(matrix, StoreMatrix):
        return StoredSeen(matrix)
    indptr, indices, _ = csr_arrays(matrix)
    return make_csr(indptr.copy(), indices.copy(), np.ones(len(indices), dtype=np.int8), matrix.shape)


def align(matrix: sp.csr_array, axis: int, have: Any, want: Any, what: str) -> sp.csr_array:
    """Rows (axis 0) or columns (axis 1) of labelled ratings, brought to the model's positions by label.

    Raises
    ------
    RatingsError
        A label with entries that the model does not know.
    """
    if have is None or want is None or (len(have) == len(want) and bool(np.all(have == want))):
        return matrix
    table = {label: position for position, label in enumerate(want.tolist())}
    positions = np.array([table.get(label, -1) for label in have.tolist()], dtype=np.int64)
    used = np.diff(matrix.indptr) > 0 if axis == 0 else np.bincount(matrix.indices, minlength=len(have)) > 0
    unknown = np.flatnonzero((positions < 0) & used)
    if unknown.size:
        raise RatingsError(
            f"the ratings have {what} {have.tolist()[unknown[0]]!r}, which the model was not fitted on "
            f"({unknown.size} such {what}s); leave them out, or add them by partial_fit_{what}s"
        )
    shape = (len(want), matrix.shape[1]) if axis == 0 else (matrix.shape[0], len(want))
    index = [entry_rows(matrix), matrix.indices]
    index[axis] = positions[index[axis]]
    return from_triplets(index[0], index[1], matrix.data, shape, dtype=matrix.dtype)
