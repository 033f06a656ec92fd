"""Rows of a model that are described by features: what they are pulled to, and their part of the objective."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from ..core.objective import Side
from ..core.regression import joined
from .learned import Learned


def ridge_of(learned: Learned, side: Side) -> np.ndarray:
    """lambda of each coordinate of a row, lambda_b of its bias; float64."""
    rank = joined(learned.state.vectors[side]).shape[1]
    return learned.objective.ridge(side, learned.plan.factors, rank)


def explained(learned: Learned, side: Side, matrix: sp.csr_array) -> float:
    """Penalty of a side with its features, less that without them; `matrix` has the ratings."""
    known = learned.features[side]
    degrees = np.diff(matrix.indptr) if side == "user" else np.bincount(matrix.indices, minlength=matrix.shape[1])
    rows = np.flatnonzero(degrees > 0)
    vectors = joined(learned.state.vectors[side]).astype(np.float64)
    factors = joined(learned.state.side(side))[rows].astype(np.float64)
    predicted = known.features.matrix[rows].astype(np.float64) @ vectors
    scale, ridge = learned.objective.row_scale(side, degrees[rows]), ridge_of(learned, side)
    moved = scale @ ((factors - predicted) ** 2 - factors**2)
    return float((moved + (vectors**2).sum(axis=0) / known.weight) @ ridge)
