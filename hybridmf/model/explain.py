"""Scores as sums over the entries of a user's history."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse as sp

from ..core.row_systems import Row, row_system
from ..core.validate import make_csr
from ..plan.types import NONNEGATIVE
from .learned import Learned


class Explanation(NamedTuple):
    """Score of an item for a user, and the contribution of each item of the user's history.

    Attributes
    ----------
    score : float
    baseline : float
        Part of the score that depends on no entry: the mean and the item's bias; 0 without biases.
    ids : int32 array, or object array of labels, shape (n,)
        Items of the history, by descending contribution.
    contributions : float64 array, shape (n,)
    """

    score: float
    baseline: float
    ids: np.ndarray
    contributions: np.ndarray


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


def contributions(learned: Learned, row: sp.csr_array, item: int, N: int) -> Explanation:
    """Solve the user's normal equations A x = sum_j w_j z_j for the item z: its score z.x is sum_j w_j z_j.(A^-1 z).

    Where factors are nonnegative, A and z are those of the coordinates of x that are not 0. The first N entries are
    returned.
    """
    objective, items, mean = learned.objective, learned.state.item, learned.state.mean
    values, columns = row.data.astype(np.float64), row.indices
    baseline, gram = 0.0, None
    if objective.is_implicit:
        kept = values != 0
        values, columns = values[kept], columns[kept]
        weights = np.where(values > 0, 1.0 + objective.alpha * np.abs(values), 0.0)
        gram = objective.unobserved_weight * learned.cached("gram in float64", lambda: _gram(items.matrix))
    else:
        baseline = mean if items.bias is None else mean + float(items.bias[item])
        weights = values - mean - (0.0 if items.bias is None else items.bias[columns])
    if not len(columns):
        return Explanation(baseline, baseline, np.empty(0, np.int32), np.empty(0))
    matrix, right, _ = row_system(objective, "user", Row(columns, values, len(columns)), items, mean, gram)
    z, target = _features(learned, columns), _features(learned, np.array([item]))[0]
    moved = np.ones(len(matrix), bool)
    if learned.plan.solver == NONNEGATIVE:
        moved = _off_bounds(matrix, right, items.matrix.shape[1])
    parts = weights * (z[:, moved] @ scipy.linalg.solve(matrix[np.ix_(moved, moved)], target[moved], assume_a="pos"))
    order = np.argsort(-parts, kind="stable")[:N]
    return Explanation(baseline + float(parts.sum()), baseline, columns[order].astype(np.int32), parts[order])


def _off_bounds(matrix: np.ndarray, right: np.ndarray, bounded: int) -> np.ndarray:
    """Coordinates of the solution that are not 0, where the first `bounded` are nonnegative."""
    from scipy.optimize import lsq_linear  # here: few models are non-negative, and it takes longer than most fits

    root = scipy.linalg.cholesky(matrix, lower=True)
    least = np.where(np.arange(len(matrix)) < bounded, 0.0, -np.inf)
    target = scipy.linalg.solve_triangular(root, right, lower=True)
    solved = lsq_linear(root.T, target, (least, np.inf), method="bvls", tol=1e-12)
    moved: np.ndarray = (solved.active_mask == 0) | (np.arange(len(matrix)) >= bounded)
    return moved


def _features(learned: Learned, items: np.ndarray) -> np.ndarray:
    """Coefficients of a user's unknowns: factors of items, and 1 for the user's bias."""
    rows: np.ndarray = learned.state.item.matrix[items].astype(np.float64)
    return rows if learned.state.item.bias is None else np.column_stack((rows, np.ones(len(rows))))


def _gram(factors: np.ndarray) -> np.ndarray:
    wide = factors.astype(np.float64)
    return wide.T @ wide
