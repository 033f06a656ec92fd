"""The change of basis that keeps all predictions and minimizes the penalty."""

from __future__ import annotations

import numpy as np

LEAST = 1e-10  # eigenvalues below this fraction of the largest are rounding errors and are raised to it


def balancing(user_gram: np.ndarray, item_gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrices G and H with ``G H^T = I`` such that ``X G`` and ``Y H`` have the smallest penalty of all such pairs.

    The data determine only ``X Y^T``, so the basis is free; ALS changes it slowly, since each half sweep keeps that of
    the other side. The penalty ``tr(A S) + tr(B S^-1)``, ``S = G G^T``, is convex in S, and least at the geometric mean
    ``S = A^-1/2 (A^1/2 B A^1/2)^1/2 A^-1/2``.

    The Gram matrices are ``A = sum_u s_u x_u x_u^T`` and ``B = sum_i s_i y_i y_i^T``, float64, each times lambda of its
    side where these differ. G is symmetric and ``H = G^-1``; identities where a side is all zero or not finite.
    """
    identity = np.eye(len(user_gram))
    for gram in (user_gram, item_gram):
        if not np.all(np.isfinite(gram)) or not np.any(gram):
            return identity, identity
    root, inverse_root = _powers(user_gram, 0.5, -0.5)
    (middle,) = _powers(root @ item_gram @ root, 0.5)
    basis, inverse = _powers(inverse_root @ middle @ inverse_root, 0.5, -0.5)
    return basis, inverse


def _powers(matrix: np.ndarray, *exponents: float) -> list[np.ndarray]:
    """Powers of a positive semidefinite matrix."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    values = np.maximum(values, LEAST * values[-1])
    return [(vectors * values**exponent) @ vectors.T for exponent in exponents]
