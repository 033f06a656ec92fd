"""BM25 and TF-IDF weights as the library `implicit` computes them; its nearest-neighbour models have no counterpart."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp


def bm25_weight(X: Any, K1: float = 100, B: float = 0.8) -> sp.coo_matrix:
    """BM25 weights of the entries of a matrix of items x users (see `hybridmf.Ratings.bm25_weight`).

    Parameters
    ----------
    X : sparse matrix, shape (n_items, n_users)
    K1, B : float

    Returns
    -------
    coo_matrix, shape (n_items, n_users)
        Weights of users that have all items are negative, other than those of `hybridmf.Ratings.bm25_weight`.
    """
    X = sp.coo_matrix(X, dtype=np.float64, copy=True)
    lengths = np.ravel(X.sum(axis=1))
    lengths = (1 - B) + B * lengths / lengths.mean()
    X.data = X.data * (K1 + 1) / (K1 * lengths[X.row] + X.data) * _rarity(X)
    return X


def tfidf_weight(X: Any) -> sp.coo_matrix:
    """TF-IDF weights of the entries of a matrix of items x users (see `hybridmf.Ratings.tfidf_weight`).

    Parameters
    ----------
    X : sparse matrix, shape (n_items, n_users)

    Returns
    -------
    coo_matrix, shape (n_items, n_users)
    """
    X = sp.coo_matrix(X, dtype=np.float64, copy=True)
    X.data = np.sqrt(X.data) * _rarity(X)
    return X


def _rarity(X: sp.coo_matrix) -> np.ndarray:
    """Logarithm of the inverse share of items of the user of each entry."""
    rarity: np.ndarray = np.log(X.shape[0]) - np.log1p(np.bincount(X.col, minlength=X.shape[1]))
    return rarity[X.col]
