"""The systems of a half sweep on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..core.system import round_up
from ..device.cuda import Array, Device
from ..plan.fused import BLOCK
from .launch import check_all

Sums: TypeAlias = "tuple[Array, ...]"  # sums of segments of rows; first axis: slots


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
    # float (n_rows, width), or None: added to the right-hand sides. It is `solutions` where these have no start
    pull: Array | None = None

    def check(self, device: Device, dtype: Any, width: int | None, rank: int) -> None:
        """Check the arrays for systems of order `rank` and solutions of `width` columns (None: at least `rank`)."""
        n, side = len(self.scale), round_up(rank, BLOCK)
        check_all(
            device,
            solutions=(self.solutions, dtype, (n, width)),
            pull=(self.pull, dtype, (n, self.solutions.shape[1])),
            status=(self.status, np.int32, (n,)),
            gram=(self.gram, dtype, (side, side)),
            ridge=(self.ridge, dtype, (rank,)),
            scale=(self.scale, dtype, (n,)),
        )
        check_columns(self.solutions, rank)

    @property
    def gram_pointer(self) -> Any:
        """Kernel argument: the Gram matrix, or a null pointer."""
        return np.uint64(0) if self.gram is None else self.gram


def check_columns(solutions: Array, rank: int) -> None:
    """Check that solutions of systems of order `rank` have room."""
    if solutions.shape[1] < rank:
        raise TypeError(f"solutions must have at least {rank} columns, got {solutions.shape[1]}")
