"""Scores as sums over the entries of a user's history."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse as sp

from ..core.nonnegative import minimum
from ..core.row_systems import Row, row_system
from ..core.validate import make_csr
from ..native import _als
from ..plan.types import NONNEGATIVE
from .described import feature_parts, predicted_rows, pull_of, rows_described
from .learned import Learned
from .requests import labelled


class _Explanation(NamedTuple):
    score: float
    baseline: float
    ids: np.ndarray
    contributions: np.ndarray


class Explanation(_Explanation):
    """Score of an item for a user, and the contribution of each item of the user's history: a tuple of four.

    Attributes
    ----------
    score : float
    baseline : float
        Part of the score that depends on no entry: the mean and the item's bias; 0 without biases.
    ids : int32 array, or object array of labels, shape (n,)
        Items of the history, by descending contribution.
    contributions : float64 array, shape (n,)
    item_features : dict of str to float
        Parts of the score by the features of the item, the largest first: the user's factors times their vectors. What
        is left is the item's own part, of which an item without entries has none. Empty without features.
    user_features : dict of str to float
        Contributions of the features of the user; with `baseline` and all `contributions`, they add up to the score.
    """

    item_features: dict[str, float]
    user_features: dict[str, float]

    @classmethod
    def of(cls, parts: Any, item_features: dict[str, float], user_features: dict[str, float]) -> Explanation:
        """An explanation with features; `parts` are its four."""
        found = cls(*parts)
        found.item_features, found.user_features = item_features, user_features
        return found


def training_row(learned: Learned, user: int) -> sp.csr_array:
    """Training entries of a user with their values; an error if the model does not have the values."""
    if learned.values is None or not isinstance(learned.seen, sp.csr_array):
        raise ValueError(
            "the model does not hold the training entries of its users (it was fitted on a store or with weights, or "
            "saved without them): pass user_items, the ratings of the user"
        )
    begin, end = learned.seen.indptr[user : user + 2]
    data = learned.values[begin:end]
    return make_csr(np.array([0, end - begin]), learned.seen.indices[begin:end], data, (1, learned.shape[1]))


def contributions(
    learned: Learned, row: sp.csr_array, item: int, N: int, by_label: bool, features: sp.csr_array | None
) -> Explanation:
    """Solve the user's normal equations A x = sum_j w_j z_j for the item z: its score z.x is sum_j w_j z_j.(A^-1 z).

    Where factors are nonnegative, A and z are those of the coordinates of x that are not 0. The first N entries are
    returned. `features` of the user, a row, add terms to the right-hand side.
    """
    objective, items, mean = learned.objective, learned.solved("item"), learned.state.mean
    values, columns = row.data.astype(np.float64), row.indices
    baseline, gram = 0.0, None
    bias = learned.state.item.bias
    if objective.is_implicit:
        kept = values != 0
        values, columns = values[kept], columns[kept]
        weights = np.where(values > 0, 1.0 + objective.alpha * np.abs(values), 0.0)
        factors = np.ascontiguousarray(items.matrix)
        gram = learned.cached("gram in float64", lambda: _als.gram(factors, learned.plan.num_threads))
        gram = objective.unobserved_weight * gram
    else:
        baseline = mean if bias is None else mean + float(bias[item])
        weights = values - mean - (0.0 if bias is None else bias[columns])
    target = _features(learned, np.array([item]))[0]
    described = features is not None and features.nnz > 0
    if not len(columns):  # the user's factors are those of the features, if any
        nothing = (np.empty(0, object if by_label else np.int32), np.empty(0))
        if not described:
            return Explanation.of((baseline, baseline, *nothing), {}, {})
        assert features is not None
        x = predicted_rows(learned, "user", features)[0]
        own = feature_parts(learned, "user", features, target, N)
        return Explanation.of((baseline + float(x @ target), baseline, *nothing), _of_item(learned, item, x, N), own)
    matrix, right, _ = row_system(objective, "user", Row(columns, values, len(columns)), items, mean, gram)
    z = _features(learned, columns)
    moved = np.ones(len(matrix), bool)
    if learned.plan.solver == NONNEGATIVE:
        bounded = items.matrix.shape[1]
        moved[:bounded] = minimum(matrix, right, bounded)[:bounded] > 0
    inner = matrix[np.ix_(moved, moved)]
    solved = scipy.linalg.solve(inner, target[moved], assume_a="pos")
    parts = weights * (z[:, moved] @ solved)
    score, own, pull = baseline + float(parts.sum()), {}, np.zeros(len(matrix))
    if described:
        assert features is not None
        pull = pull_of(learned, "user", predicted_rows(learned, "user", features), np.array([len(columns)]))[0]
        score += float(pull @ solved)
        scale = pull_of(learned, "user", np.ones((1, len(matrix))), np.array([len(columns)]))[0]
        own = feature_parts(learned, "user", features, scale * solved, N)
    order = np.argsort(-parts, kind="stable")[:N]
    x = np.zeros(len(matrix))
    if "item" in learned.features:
        x[moved] = scipy.linalg.solve(inner, right[moved] + pull[moved], assume_a="pos")
    ids = labelled(learned, "item", columns[order]) if by_label else columns[order].astype(np.int32)
    return Explanation.of((score, baseline, ids, parts[order]), _of_item(learned, item, x, N), own)


def _of_item(learned: Learned, item: int, user: np.ndarray, N: int) -> dict[str, float]:
    """Parts of a score by the features of the item, for the factors of a user."""
    row = rows_described(learned, "item", np.array([item]))
    if row is None:
        return {}
    biased = learned.state.vectors["item"].bias is not None
    weights = np.append(user[: learned.plan.factors], [1.0] * biased)  # the bias of the item is part of its score
    return feature_parts(learned, "item", row, weights, N)


def _features(learned: Learned, items: np.ndarray) -> np.ndarray:
    """Coefficients of a user's unknowns: factors of items, and 1 for the user's bias."""
    rows: np.ndarray = learned.state.item.matrix[items].astype(np.float64)
    return rows if learned.state.item.bias is None else np.column_stack((rows, np.ones(len(rows))))
