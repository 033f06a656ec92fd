"""The systems of a half sweep on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..device.cuda import Array

Sums: TypeAlias = "tuple[Array, ...]"
"""Sums of segments of rows; first axis: slots."""


@dataclass(frozen=True)
class SideSystems:
    """The systems of one side without their sums: solutions, status, Gram matrix and regularization.

    Attributes
    ----------
    solutions : float array, shape (n_rows, width)
        Written; read as warm start by all solvers but Cholesky, and as part of the right-hand sides if entries have
        predictions.
    status : int32 array, shape (n_rows,)
        Written for the rows that are solved.
    gram : float array, shape (rank16, rank16), or None
    ridge : float array, shape (rank,)
    scale : float array, shape (n_rows,)
    bounded : int
        Number of first coordinates that must not be negative; only the nonnegative solver reads it.
    """

    solutions: Array
    status: Array
    gram: Array | None
    ridge: Array
    scale: Array
    bounded: int = 0
