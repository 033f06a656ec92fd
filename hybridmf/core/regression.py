"""The regression of one side's factors on features of its rows, which rows are pulled to.

With features f_i and their vectors W, the penalty of a side is

    lambda (sum_i s_i |y_i - W^T f_i|^2 + |W|^2 / w)    in place of    lambda sum_i s_i |y_i|^2

over the rows with entries. For given factors, the vectors are a ridge regression; for given vectors, each row has
``lambda s_i W^T f_i`` more on its right-hand side: its pull. docs/methods.md derives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from .objective import Factors
from .sparse import take_rows


class SideFeatures(NamedTuple):
    """Features of the rows of one side, and the weight w of their vectors."""

    matrix: sp.csr_array  # (n_rows, n_features)
    weight: float


class Regression:
    """The regression of the factors of some rows; each rank has its own rows, and all have the vectors.

    `features`: of all rows, of which `names` are those here (default: all).
    `scale`, float64 array, shape (n_rows,): s of each row here.
    `degrees`, shape (n_rows,): rows without entries take no part.
    `total`: adds up an array over all ranks.
    """

    def __init__(
        self,
        features: SideFeatures,
        names: np.ndarray | None,
        scale: np.ndarray,
        degrees: np.ndarray,
        total: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        matrix = features.matrix if names is None else take_rows(features.matrix, names)
        self.rows, self.scale = sp.csr_array(matrix, dtype=np.float64), scale
        self.empty = degrees == 0
        self.cold = np.flatnonzero(self.empty & (np.diff(matrix.indptr) > 0))
        weights = np.where(degrees > 0, scale, 0.0)
        self.back = sp.csr_array((self.rows * weights[:, None]).T)  # (n_features, n_rows)
        normal = total((self.back @ self.rows).toarray())
        normal[np.diag_indices(len(normal))] += 1 / features.weight
        self.root = np.linalg.cholesky(normal)

    def sums(self, factors: Factors) -> Any:
        """``F^T S Y`` of the rows here, float64, biases last; ranks add them up."""
        return np.ascontiguousarray(self.back @ joined(factors).astype(np.float64))

    def on_host(self, sums: Any) -> np.ndarray:
        found: np.ndarray = sums
        return found

    def pull(self, sums: Any, ridge: np.ndarray) -> Any:
        """What features add to the right-hand sides of the rows here, for the sums of all ranks; `ridge` is lambda."""
        return self.predicted(self.vectors(sums)) * self.scale[:, None] * ridge

    def vectors(self, sums: np.ndarray) -> np.ndarray:
        """W, float64, shape (n_features, columns of `sums`)."""
        from scipy.linalg import cho_solve

        solved: np.ndarray = cho_solve((self.root, True), sums, check_finite=False)
        return solved

    def predicted(self, vectors: np.ndarray) -> np.ndarray:
        """``F W``, float64."""
        found: np.ndarray = self.rows @ vectors
        return found


def joined(factors: Factors) -> np.ndarray:
    """Factors with their biases, if any, as the last column."""
    if factors.bias is None:
        return factors.matrix
    return np.concatenate((factors.matrix, factors.bias[:, None]), axis=1)


def parted(rows: np.ndarray, rank: int) -> Factors:
    """Factors of `rank` columns, and biases if there is one more."""
    matrix = np.ascontiguousarray(rows[:, :rank])
    return Factors(matrix, np.ascontiguousarray(rows[:, rank]) if rows.shape[1] > rank else None)


def filled(factors: Factors, rows: np.ndarray, new: Factors) -> Factors:
    """A copy on the host in which some rows are replaced."""
    return factors.on_host().put(rows, new, len(factors)) if len(rows) else factors
