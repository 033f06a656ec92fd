"""Weights that a user gives, one for each entry; confidences in the terms of the kernels: ``1 + alpha |r|``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, PerSide
from ..core.validate import as_csr, check_shape, make_csr, refuse_masked
from ..data.align import Labels, align, labels_of
from ..data.labels import refuse_series
from ..errors import RatingsError
from ..ratings import as_ratings


def weights_of_entries(matrix: sp.csr_array, labels: Labels | None, weights: Any, given: Any) -> np.ndarray:
    """Weight of each entry of a matrix in the order of its entries, float64, > 0.

    `weights`: a vector in the order of the entries of `given`, the ratings as the caller gave them; or a matrix or
    Ratings with an entry for each. `labels` are those of the ratings.
    """
    if not isinstance(matrix, sp.csr_array):
        raise TypeError("weights need ratings in memory, and a store is read slab by slab; fit store.to_ratings()")
    if isinstance(weights, (list, tuple)) and np.ndim(weights) == 1:
        weights = np.asarray(weights)
    if getattr(weights, "ndim", 2) == 1:
        refuse_series(weights)
        refuse_masked("weights", weights)
        found = _in_order(matrix, _numbers(weights), given)
    else:
        found = _aligned(matrix, labels, as_ratings(weights, "weights"))
    with np.errstate(over="ignore"):
        kept = found.astype(matrix.dtype)
    bad = np.flatnonzero(~((kept > 0) & np.isfinite(kept)))
    if len(bad):
        raise RatingsError(
            f"weights must be > 0 and finite in {matrix.dtype}, got {found[bad[0]]:g} for entry {bad[0]:,}, and "
            f"{len(bad):,} such values of {len(found):,}; leave entries without weight out of user_items, too"
        )
    return found


def _numbers(weights: Any) -> np.ndarray:
    plain = np.asarray(weights)
    try:
        if plain.dtype.kind in "fiubO":
            return plain.astype(np.float64)
    except (TypeError, ValueError):  # of objects, such as None
        pass
    raise TypeError(f"weights must be real numbers, got dtype {plain.dtype}")


def _in_order(matrix: sp.csr_array, weights: np.ndarray, given: Any) -> np.ndarray:
    """A vector of weights without those of entries that the model drops."""
    base = getattr(getattr(given, "ratings", given), "user_items", given)
    if not (sp.issparse(base) and base.format == "csr" and base.has_canonical_format):
        raise TypeError(
            "weights is a vector, whose order is that of the entries of Ratings or of a canonical CSR matrix; give a "
            "matrix (or Ratings) of weights with an entry for each entry of user_items"
        )
    if len(weights) != base.nnz:
        raise RatingsError(f"weights has {len(weights)} elements for {base.nnz} entries of user_items")
    return weights if base.nnz == matrix.nnz else weights[base.data != 0]


def _aligned(matrix: sp.csr_array, labels: Labels | None, weights: Any) -> np.ndarray:
    """The weights of a matrix that has exactly the entries of the ratings."""
    given = as_csr(weights, name="weights", dtype=np.dtype(np.float64))
    given, _ = align(
        given, labels_of(weights), labels or (None, None), name="weights", unknown=None, owner="user_items"
    )
    check_shape("weights", given, matrix.shape, ("n_users", "n_items"))
    if not (np.array_equal(given.indptr, matrix.indptr) and np.array_equal(given.indices, matrix.indices)):
        raise RatingsError(
            f"weights has {given.nnz} entries, and not those of user_items ({matrix.nnz} without zeros); give each "
            "entry one weight, and no other pair"
        )
    return given.data


def weighted_entries(matrix: sp.csr_array, weights: np.ndarray, objective: Objective) -> tuple[sp.csr_array, float]:
    """Entries whose confidences by `in_units` are the given ones, divided by a unit.

    With values ``v = w / unit - 1`` (negative for dislikes), the confidence ``1 + |v|`` is ``w / unit``; and the
    objective divided by `unit` has the same minimum. The unit is less than all weights, so that no value is 0, and at
    least the unobserved weight where that is possible, as the fastest kernels need. The entries have the pattern of
    `matrix`.
    """
    unobserved, least = objective.unobserved_weight, float(weights.min())
    if unobserved > 1:
        raise ValueError(
            f"weights need unobserved_weight <= 1, got {unobserved:g}: divide weights, unobserved_weight and "
            "regularization by it, for the same model"
        )
    unit = max(unobserved, least / 2) if unobserved < least else least / 2
    values = np.copysign(weights / unit - 1, matrix.data).astype(matrix.dtype)
    if not np.all(values):
        raise RatingsError(f"weights: the smallest, {least:g}, is too close to unobserved_weight={unobserved:g}")
    return make_csr(matrix.indptr, matrix.indices, values, matrix.shape), unit


def in_units(objective: Objective, unit: float | None) -> Objective:
    """The objective of `weighted_entries`, divided by the unit; without one, the objective."""
    if unit is None:
        return objective
    lambdas = PerSide(*(lambda_ / unit for lambda_ in objective.regularization))
    return replace(objective, alpha=1.0, unobserved_weight=objective.unobserved_weight / unit, regularization=lambdas)
