"""Confidences that a user gives, one for each entry, in the terms of the kernels, which know ``1 + alpha |r|``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, PerSide
from ..core.validate import as_csr, check_shape, make_csr
from ..data.align import Labels, align, labels_of
from ..errors import RatingsError


def weighted_entries(
    matrix: sp.csr_array, labels: Labels | None, weights: Any, objective: Objective
) -> tuple[sp.csr_array, float]:
    """Entries whose confidences by `in_units` are the given ones, divided by a unit.

    With values ``v = w / unit - 1`` (negative for dislikes), the confidence ``1 + |v|`` is ``w / unit``; and the
    objective divided by `unit` has the same minimum. The unit is less than all weights, so that no value is 0, and at
    least the unobserved weight where that is possible, as the fastest kernels need. `labels` are those of the ratings,
    `matrix`, whose pattern the entries have.
    """
    if not objective.is_implicit:
        raise ValueError("weights are the confidences of implicit feedback, which only ImplicitALS has; leave them out")
    if objective.unobserved_weight > 1:
        raise ValueError(
            f"weights need unobserved_weight <= 1, got {objective.unobserved_weight:g}: divide weights, "
            "unobserved_weight and regularization by it, for the same model"
        )
    if not isinstance(matrix, sp.csr_array):
        raise TypeError("weights need ratings in memory, and a store is read slab by slab; fit store.to_ratings()")
    if getattr(weights, "ndim", 2) == 1:
        raise TypeError(
            "weights must be a matrix (or Ratings) with an entry for each entry of user_items, got one dimension; give "
            "sp.csr_array((weights, user_items.indices, user_items.indptr), user_items.shape) for a CSR matrix"
        )
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
    least = float(given.data.min())
    if least <= 0:
        raise RatingsError(f"weights must be > 0, got {least:g}; leave entries without weight out of user_items, too")
    unobserved = objective.unobserved_weight
    unit = max(unobserved, least / 2) if unobserved < least else least / 2
    values = np.copysign(given.data / unit - 1, matrix.data).astype(matrix.dtype)
    if not np.all(values):
        raise RatingsError(f"weights: the smallest, {least:g}, is too close to unobserved_weight={unobserved:g}")
    return make_csr(matrix.indptr, matrix.indices, values, matrix.shape), unit


def in_units(objective: Objective, unit: float | None) -> Objective:
    """The objective of `weighted_entries`, divided by the unit; without one, the objective."""
    if unit is None:
        return objective
    lambdas = PerSide(*(lambda_ / unit for lambda_ in objective.regularization))
    return replace(objective, alpha=1.0, unobserved_weight=objective.unobserved_weight / unit, regularization=lambdas)
