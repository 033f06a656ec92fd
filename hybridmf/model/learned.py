"""The result of a fit as one value, which models replace atomically: a failure leaves the previous result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Objective, Side, State, rating_scale
from ..core.regression import filled
from ..core.sparse import ValueSummary, as_ones, entries_in
from ..core.validate import as_csr, frozen_csr
from ..data.features import Features
from ..data.labels import label_table
from ..data.store import StoredSeen, StoreMatrix
from ..plan.types import Plan


class Labelled:
    """Methods of a state with labels of users and of items, and with values derived from it."""

    user_ids: np.ndarray | None
    item_ids: np.ndarray | None
    derived: dict[Any, Any]

    def count(self, side: Side) -> int:
        raise NotImplementedError

    def entries(self, given: Any, name: str, *, repeats: bool = False) -> sp.csr_array:
        """A matrix as the fit reads one; `repeats`: in histories of implicit feedback, repeated items add up."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        """(n_users, n_items)."""
        return self.count("user"), self.count("item")

    def cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, computed at first use."""
        if key not in self.derived:
            self.derived[key] = compute()
        return self.derived[key]

    def labels(self, side: Side) -> np.ndarray | None:
        return self.user_ids if side == "user" else self.item_ids

    def label_table(self, side: Side) -> dict[Any, int]:
        return self.cached(("labels", side), lambda: label_table(self.labels(side)))


@dataclass(frozen=True)
class LearnedFeatures:
    """Features of one side of a model; the state has their vectors."""

    features: Features  # a row for each row of the model
    weight: float
    cold: np.ndarray
    """Positions of the rows without entries whose factors are those of their features; int64, ascending."""


@dataclass(frozen=True)
class Learned(Labelled):
    """Complete state of a fitted model, including the hyperparameters of the fit."""

    objective: Objective
    plan: Plan
    state: State
    seen: sp.csr_array | StoredSeen | None
    """int8 ones for the training entries, or a reference to a store; None in a model saved without them."""
    total: float | None = None  # sum of the training values; with `seen`, it identifies the training data
    user_ids: np.ndarray | None = None
    item_ids: np.ndarray | None = None
    params: dict[str, Any] = field(default_factory=dict)
    """The constructor's parameters at the fit, as a model file stores them."""
    item_counts: np.ndarray | None = None
    """Training entries of each item, int64; None if the model file has neither these counts nor `seen`."""
    value_range: tuple[float, float] | None = None
    """Smallest and largest training value of explicit feedback, to which predictions are clipped; None if unknown
    (files of earlier versions) and for implicit feedback."""
    frame_kind: str | None = None  # library of the data frame that the ratings came from, in which tables are returned
    values: np.ndarray | None = None
    """Of the training entries, in the order of `seen`; None for a store, and for files of earlier versions."""
    item_likes: np.ndarray | None = None
    """Positive training entries of each item, int64; None if all are positive, so that `item_counts` has them."""
    n_iter: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)  # record of each iteration
    feature_names: np.ndarray | None = None  # names of the columns of the frame that the model was fitted on
    features: Mapping[Side, LearnedFeatures] = field(default_factory=dict)
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Values that serving derived from the others. A copy starts empty, so derived values never outlive their factors,
    even if another thread replaces the result of a fit during a call."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"derived": {}}

    @property
    def popularity(self) -> np.ndarray | None:
        """Positive training entries of each item, by which items rank for users without factors."""
        return self.item_counts if self.item_likes is None else self.item_likes

    def count(self, side: Side) -> int:
        return len(self.state.side(side))

    def entries(self, given: Any, name: str, *, repeats: bool = False) -> sp.csr_array:
        """See `Labelled`; an explicit zero is no entry of implicit feedback, and a rating otherwise."""
        dtype, implicit = self.state.user.matrix.dtype, self.objective.is_implicit
        rule = "sum" if repeats and implicit else "error"
        return as_csr(given, name=name, dtype=dtype, drop_zeros=implicit, duplicates=rule)

    def solved(self, side: Side) -> Factors:
        """Factors of a side as half sweeps read them: zeros for rows without entries that have features."""
        known, factors = self.features.get(side), self.state.side(side)
        if known is None or not len(known.cold):
            return factors

        def make() -> Factors:
            zeros = (np.zeros_like(array[known.cold]) for array in factors.on_host().arrays)
            return filled(factors, known.cold, Factors(*zeros))

        return self.cached(("solved", side), make)

    def seen_matrix(self) -> sp.csr_array | None:
        return self.seen.load() if isinstance(self.seen, StoredSeen) else self.seen

    def is_training_data(self, matrix: sp.csr_array) -> bool:
        if self.seen is None or self.total is None or matrix.shape != self.seen.shape or matrix.nnz != self.seen.nnz:
            return False
        seen = self.seen_matrix()
        assert seen is not None
        return (
            bool(np.array_equal(matrix.indptr, seen.indptr))
            and bool(np.array_equal(matrix.indices, seen.indices))
            and summary_of(matrix).total == self.total
        )

    def overlaps(self, matrix: sp.csr_array) -> bool:
        """Whether `matrix`, of the training shape, shares an entry with the training data."""
        seen = self.seen_matrix()
        return seen is not None and bool(np.any(entries_in(matrix, seen)))


def summary_of(matrix: sp.csr_array | StoreMatrix, num_threads: int | None = None) -> ValueSummary | StoreMatrix:
    """Sums and ranges of the values: a store has them, with the same bits as the same ratings in memory."""
    return matrix if isinstance(matrix, StoreMatrix) else ValueSummary.of([matrix.data], num_threads)


def count_items(matrix: sp.csr_array) -> np.ndarray:
    """Entries of each column, int64, shape (n_items,)."""
    return np.bincount(matrix.indices, minlength=matrix.shape[1]).astype(np.int64)


def likes_of(
    parts: Iterable[Any], counts: np.ndarray | None, total: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> np.ndarray | None:
    """Positive entries of each column, int64, of parts of some rows; None if these are all of `counts`, or unknown.

    `total` adds up those of all ranks.
    """
    if counts is None:
        return None
    likes = np.zeros(len(counts), dtype=np.int64)
    for part in parts:
        likes += np.bincount(part.indices[part.data > 0], minlength=len(likes))
    likes = total(likes)
    return None if np.array_equal(likes, counts) else likes


def scale_of(matrix: Any, objective: Objective, values: ValueSummary | StoreMatrix | None = None) -> float:
    """See `hybridmf.core.objective.rating_scale`; `values`: the summary of the matrix, if it is known."""
    if objective.is_implicit:
        return 1.0
    values = summary_of(matrix) if values is None else values
    return rating_scale(values.total, values.squares, matrix.nnz, objective.biases)


def pattern(matrix: Any) -> Any:
    """The entries of a matrix as int8 ones that share its index arrays; for a store, a reference to it."""
    return StoredSeen(matrix) if isinstance(matrix, StoreMatrix) else frozen_csr(as_ones(matrix, np.int8))
