"""The systems of a half sweep on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..device.cuda import Array

Sums: TypeAlias = "tuple[Array, ...]"
"""Sums of segments of rows; first axis: slots."""


@dataclass(frozen=True)
class SideSystems:
    """The systems of one side without their sums: solutions, status, Gram matrix and regularization."""

    # float (n_rows, width): written; read as warm start by all solvers but Cholesky, and as part of the right-hand
    # sides if entries have predictions
    solutions: Array
    status: Array  # int32 (n_rows,): written for the rows that are solved
    gram: Array | None  # float (rank16, rank16), or None
    ridge: Array  # float (rank,)
    scale: Array  # float (n_rows,)
    bounded: int = 0  # number of first coordinates that must not be negative; only the nonnegative solver reads it
