"""Rows of a model that are described by features: what they are pulled to, and their part of the objective."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Side
from ..core.regression import joined
from ..core.sparse import replace_rows, rows_or_empty, take_rows
from ..data.labels import check_label_types, places_among
from ..errors import RatingsError, UnknownLabelError
from .learned import Learned, LearnedFeatures

logger = logging.getLogger("hybridmf")


def ridge_of(learned: Learned, side: Side) -> np.ndarray:
    """lambda of each coordinate of a row, lambda_b of its bias; float64."""
    return learned.objective.ridge(side, learned.plan.factors, joined(learned.state.vectors[side]).shape[1])


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


# ---------------------------------------------------------------------------------------------------------- requests


def described_rows(
    learned: Learned, side: Side, given: Any, labels: np.ndarray | None, count: int, name: str = "features"
) -> sp.csr_array:
    """Features of `count` new rows, which may have `labels`, in the columns of the model: CSR (count, n_features)."""
    known = learned.features.get(side)
    if known is None:
        raise ValueError(f"{name}: the model has no features of {side}s; fit it with {side}_features=, or leave it out")
    found = known.features.encode(given, name=name)
    matrix, have = found.matrix, found.labels
    if count and not matrix.shape[0]:
        raise RatingsError(f"{name} has no rows; expected one for each of {count:,} {side}s")
    if labels is not None and have is not None:
        check_label_types(side, ("the rows", labels), (name, have))
        places = places_among(have, labels)
        missing = int(np.count_nonzero(places < 0))
        if missing == count > 0:
            raise UnknownLabelError(
                f"{name} has features of none of the {count:,} {side}s, such as {labels[:1].tolist()[0]!r}; its labels "
                f"are such as {have[:1].tolist()[0]!r}"
            )
        if missing:
            logger.warning("%s has no features of %d of %d %ss", name, missing, count, side)
        return rows_or_empty(matrix, places)
    if matrix.shape[0] != count:
        raise RatingsError(f"{name} has {matrix.shape[0]:,} rows; expected one for each of {count:,} {side}s")
    if count > 1 and (labels is None) != (have is None):
        labelled, other = (name, "the rows") if labels is None else ("the rows", name)
        raise RatingsError(
            f"{labelled} have {side} labels and {other} only positions, so {side}s cannot be matched; give both labels "
            "or none"
        )
    return matrix


def predicted_rows(learned: Learned, side: Side, rows: sp.csr_array) -> np.ndarray:
    """Factors, and biases as the last column, by features alone; float64."""
    return rows.astype(np.float64) @ joined(learned.state.vectors[side]).astype(np.float64)


def pull_of(learned: Learned, side: Side, predicted: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """What features add to the right-hand sides of rows: ``lambda s W^T f``, float64."""
    return predicted * learned.objective.row_scale(side, degrees)[:, None] * ridge_of(learned, side)


def replaced_rows(
    learned: Learned,
    side: Side,
    positions: np.ndarray,
    size: int,
    degrees: np.ndarray,
    new: sp.csr_array | None,
    labels: np.ndarray | None,
) -> Mapping[Side, LearnedFeatures]:
    """Features of the model after an update of some rows, of these `degrees`; `new` features, None keeps theirs."""
    known = learned.features.get(side)
    if known is None:
        return learned.features
    old = known.features.matrix
    if new is None:
        matrix = rows_or_empty(old, np.where(np.arange(size) < old.shape[0], np.arange(size), -1))
    else:
        matrix = replace_rows(old, positions, new, size)
    cold = np.zeros(size, dtype=bool)
    cold[known.cold] = True
    described = np.diff(matrix.indptr) > 0
    cold[positions] = described[positions] & (degrees == 0)
    features = known.features.with_rows(matrix, labels)
    return {**learned.features, side: replace(known, features=features, cold=np.flatnonzero(cold))}


def rows_described(learned: Learned, side: Side, rows: np.ndarray) -> sp.csr_array | None:
    """Features that the model has of some of its rows; None without features."""
    known = learned.features.get(side)
    return None if known is None else take_rows(known.features.matrix, rows)


def feature_parts(learned: Learned, side: Side, row: sp.csr_array, weights: np.ndarray, N: int) -> dict[str, float]:
    """Contributions ``f_k W_k . weights`` of the features of one row by name, the N largest first.

    `weights` are those of the factors, and of the bias if there is one more.
    """
    vectors = joined(learned.state.vectors[side]).astype(np.float64)[row.indices, : len(weights)]
    parts = row.data.astype(np.float64) * (vectors @ weights)
    names = learned.features[side].features.names
    order = np.argsort(-parts, kind="stable")[:N]
    return {names[row.indices[place]]: float(parts[place]) for place in order}
