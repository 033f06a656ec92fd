"""Whether float32 is precise enough for the systems of a half sweep: an estimate of their condition by pivots."""

from __future__ import annotations

import math

import numpy as np
import scipy.linalg

from ..core.objective import Factors, Objective, Side

LARGEST_ERROR = 0.05
"""Rounding relative to the least pivot, about the relative error of a solution, from which it is worth a warning."""

LARGEST_SHARE = 1 / 20
"""Share of the entries of a half sweep that the check may take; it takes at least `ENTRIES_PER_FACTOR`."""

MOST_ENTRIES, ENTRIES_PER_FACTOR = 2048, 4


def rounding(n_entries: int) -> float:
    """Relative rounding of a sum of so many products in float32: about the root of their number."""
    return float(np.finfo(np.float32).eps) * math.sqrt(max(1, n_entries))


def sampled(n_entries: int, nnz: int, rank: int) -> int:
    """Number of entries of a row that stand for all of them."""
    return min(n_entries, MOST_ENTRIES, max(ENTRIES_PER_FACTOR * rank, int(nnz * LARGEST_SHARE)))


def least_pivot(
    objective: Objective,
    side: Side,
    fixed: Factors,
    row: tuple[np.ndarray, np.ndarray],
    n_entries: int,
    gram: np.ndarray,
) -> float:
    """Smallest pivot of the system of a row relative to its diagonal element, in float64; 0 if it is singular.

    Parameters
    ----------
    objective : Objective
    side : {"user", "item"}
        The side of the row.
    fixed : Factors
        The other side.
    row : (int array, float array), shape (n,)
        Columns and values of the entries, or of a sample of them.
    n_entries : int
        Number of all entries.
    gram : float64 array, shape (rank, rank) or (0, 0)
        Weighted Gram matrix of implicit feedback.
    """
    columns, values = row
    design = fixed.matrix[columns].astype(np.float64)
    factors = design.shape[1]
    if objective.biases:
        design = np.column_stack((design, np.ones(len(design))))
    weights = np.full(len(columns), n_entries / len(columns))
    if objective.is_implicit:
        weights *= 1 + objective.alpha * np.abs(values) - objective.unobserved_weight
    system = (design.T * weights) @ design
    if objective.is_implicit:
        system += gram
    scale = objective.row_scale(side, np.array([n_entries]))[0]
    system[np.diag_indices(len(system))] += scale * objective.ridge(side, factors, len(system))
    try:
        root = scipy.linalg.cholesky(system, lower=True)
    except (np.linalg.LinAlgError, ValueError):
        return 0.0
    return float(np.min(np.diag(root) ** 2 / np.diag(system)))
