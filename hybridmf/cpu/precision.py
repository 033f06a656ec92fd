"""Whether float32 is precise enough for the systems of a half sweep: an estimate of their condition by pivots."""

from __future__ import annotations

import math

import numpy as np

from ..core.objective import Factors, Objective, Side

LARGEST_ERROR = 0.05
"""Rounding relative to the least pivot, about the relative error of a solution, from which it is worth a warning."""

SINGLE_THREADED = 1 << 18
"""Multiplications of a matrix product up to which OpenBLAS uses one thread."""

ENTRIES_PER_FACTOR = 4
"""Entries that stand for all of a row. More would take a part of a half sweep that users notice."""


def rounding(n_entries: int) -> float:
    """Relative rounding of a sum of so many products in float32: about the root of their number."""
    return float(np.finfo(np.float32).eps) * math.sqrt(max(1, n_entries))


def sampled(n_entries: int, rank: int) -> int:
    """Number of entries of a row that stand for all of them."""
    return min(n_entries, ENTRIES_PER_FACTOR * rank)


def _weighted_gram(design: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum of the outer products of rows, by products so small that OpenBLAS starts no threads for them.

    Its threads spin for a while after a product and take the cores from the kernels that follow.
    """
    rank = design.shape[1]
    system, step = np.zeros((rank, rank)), max(1, SINGLE_THREADED // rank**2)
    for k in range(0, len(design), step):
        part = design[k : k + step]
        system += (part.T * weights[k : k + step]) @ part
    return system


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
    system = _weighted_gram(design, weights)
    if objective.is_implicit:
        system += gram
    scale = objective.row_scale(side, np.array([n_entries]))[0]
    system[np.diag_indices(len(system))] += scale * objective.ridge(side, factors, len(system))
    try:
        root = np.linalg.cholesky(system)
    except np.linalg.LinAlgError:
        return 0.0
    return float(np.min(np.diag(root) ** 2 / np.diag(system)))
