"""The normal equations of single rows in float64, and an estimate of their condition: whether float32 is enough."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .objective import Factors, Objective, Side

LARGEST_ERROR = 0.005
"""Rounding relative to the least pivot from which a solution is worth a warning: the objective is then 0.4 to 3 % off
where few rows have thousands of entries (`cpu/test_precision.py`). Fits of MovieLens stay below 2e-4."""

SINGLE_THREADED = 1 << 18  # multiplications of a matrix product up to which OpenBLAS uses one thread

ENTRIES_PER_FACTOR = 4
"""Entries, and rows of the fixed side, that stand for all. More would take a time that users notice."""


class Row(NamedTuple):
    """Entries of a row, or a sample of them."""

    columns: np.ndarray
    values: np.ndarray
    n_entries: int  # of the whole row

    def sample(self, rank: int) -> Row:
        """At most `ENTRIES_PER_FACTOR` entries for each factor, evenly spaced."""
        step = sampling_step(len(self.columns), rank)
        return Row(self.columns[::step], self.values[::step], self.n_entries)


def sampling_step(count: int, rank: int) -> int:
    """Distance of the entries, or rows of the fixed side, that stand for all."""
    return max(1, -(-count // (ENTRIES_PER_FACTOR * rank)))


def row_system(
    objective: Objective, side: Side, row: Row, fixed: Factors, mean: float = 0.0, gram: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, float]:
    """A and b of a row's equations A x = b, float64, the bias last; estimates of them from a sample of its entries.

    The third value is c of the row's part of the objective, ``x.A x - 2 b.x + c``. `gram` is the weighted Gram matrix
    of implicit feedback; None: an estimate from a sample of the fixed rows.
    """
    design = fixed.matrix[row.columns].astype(np.float64)
    factors, target = design.shape[1], row.values.astype(np.float64)
    weights = np.full(len(target), row.n_entries / max(1, len(target)))
    if objective.is_implicit:
        confidence = 1 + objective.alpha * np.abs(target)
        gram = sampled_gram(objective, fixed) if gram is None else gram
        matrix = gram[:factors, :factors] + _weighted_gram(design, weights * (confidence - objective.unobserved_weight))
        liked = weights * np.where(target > 0, confidence, 0)
        right, constant = liked @ design, liked.sum()
    else:
        if fixed.bias is not None:
            target -= mean + fixed.bias[row.columns]
        if objective.biases:
            design = np.column_stack((design, np.ones(len(design))))
        matrix, right = _weighted_gram(design, weights), (weights * target) @ design
        constant = weights @ target**2
    scale = objective.row_scale(side, np.array([row.n_entries]))[0]
    matrix[np.diag_indices(len(matrix))] += scale * objective.ridge(side, factors, len(matrix))
    return matrix, right, float(constant)


def sampled_gram(objective: Objective, fixed: Factors, n_fixed: int | None = None) -> np.ndarray:
    """Estimate of the weighted Gram matrix of implicit feedback, float64; `n_fixed`: `fixed` is a sample of so many."""
    step = sampling_step(len(fixed), fixed.matrix.shape[1]) if n_fixed is None else 1
    rows, n_fixed = fixed.matrix[::step].astype(np.float64), len(fixed) if n_fixed is None else n_fixed
    return _weighted_gram(rows, np.full(len(rows), objective.unobserved_weight * n_fixed / max(1, len(rows))))


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


def least_pivot(matrix: np.ndarray) -> float:
    """Smallest pivot of a symmetric matrix relative to its diagonal element; 0 if it is singular."""
    try:
        root = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return 0.0
    return float(np.min(np.diag(root) ** 2 / np.diag(matrix)))


def rounding(n_entries: int) -> float:
    """Relative rounding of a sum of so many products in float32: about the root of their number."""
    return float(np.finfo(np.float32).eps) * math.sqrt(max(1, n_entries))


def beyond_float32(
    objective: Objective, side: Side, row: Row, fixed: Factors, name: int, gram: np.ndarray | None = None
) -> str | None:
    """Text of a warning if the equations of a row are beyond the precision of float32; `name` is its number."""
    matrix, _, _ = row_system(objective, side, row, fixed, gram=gram)
    pivot, error = least_pivot(matrix), rounding(row.n_entries)
    if error < LARGEST_ERROR * pivot:
        return None
    return (
        f"the equations of {side} {name}, and probably others, are beyond the precision of float32: their least pivot "
        f"is {pivot:.1g} of its diagonal element, and rounding is {error:.1g}. The factors may be far from the "
        f'minimum; increase regularization (now {objective.regularization.of(side):g}), or use dtype="float64"'
    )
