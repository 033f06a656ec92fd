"""Initial factors: drawn where they are used, the same bits on every device, and no more than a method needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.objective import SIDES, Factors, LazyFactors, Objective, Side, State
from ..native import _draw


@dataclass(frozen=True)
class Start:
    """How initial factors are distributed.

    Attributes
    ----------
    length : float
        Root mean square of the lengths of rows.
    signed : bool
        Whether elements are uniform between ``-a`` and ``a``, or between 0 and ``a``.
    sides : tuple of {"user", "item"}
        The sides that are drawn. The other one is zero: its first update does not read it.
    """

    length: float = 1.0
    signed: bool = False
    sides: tuple[Side, ...] = SIDES

    def scale(self, rank: int) -> float:
        """The largest absolute value ``a`` of an element: ``rank a^2 / 3`` is the mean square of a row's length."""
        return self.length * math.sqrt(3 / rank)


class DrawnFactors(LazyFactors):
    """Uniform random factors, drawn at first access on the host, or by a solver on its device.

    Row `r`, column `c` depends on the seed, the side, `r` and `c` only, so that each rank draws its own rows.

    Parameters
    ----------
    scales : float32 array, shape (n,)
        The largest absolute value in each row; 0 for a row of zeros.
    rank : int
    dtype : float32 or float64
        Numbers are drawn in float32 and converted.
    side : {"user", "item"}
    seed : int
        64 bits.
    signed : bool
    biases : bool
        Whether there are biases, which are zeros.
    num_threads : int
    first : int
        Number of the first row.
    rows : int64 array, shape (n,), optional
        Number of each row. Default: consecutive ones.
    """

    def __init__(
        self,
        scales: np.ndarray,
        rank: int,
        dtype: Any,
        side: Side,
        seed: int,
        signed: bool,
        biases: bool,
        num_threads: int,
        first: int = 0,
        rows: np.ndarray | None = None,
    ) -> None:
        self.keep(scales=scales, rank=rank, dtype=np.dtype(dtype), side=side, seed=seed, signed=signed, biases=biases)
        self.keep(num_threads=num_threads, first=first, rows=rows)

    scales: np.ndarray
    rank: int
    dtype: np.dtype
    side: Side
    seed: int
    signed: bool
    biases: bool
    num_threads: int
    first: int
    rows: np.ndarray | None

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def stream(self) -> int:
        """Number of the side in the counter of the generator."""
        return SIDES.index(self.side)

    @property
    def is_zero(self) -> bool:
        """Whether all rows are zeros, so that nothing needs to be drawn."""
        return not self.scales.any()

    def draw(self, out: np.ndarray) -> None:
        """Fill a matrix of shape (n, rank), whose rows may be longer, on the host."""
        rows = np.empty(0, np.int64) if self.rows is None else self.rows
        arguments = (self.first, self.seed, self.stream, self.signed, self.num_threads)
        _draw.draw_rows(out, self.scales, rows, *arguments)

    def first_bias(self) -> np.ndarray | None:
        """Zeros of shape (n,) where there are biases."""
        return np.zeros(len(self), self.dtype) if self.biases else None

    def part(self, rows: slice) -> DrawnFactors:
        """Some consecutive rows, not drawn yet."""
        first, last, _ = rows.indices(len(self))
        names = None if self.rows is None else self.rows[first:last]
        return self._with(self.scales[first:last], self.first + first, names)

    def reordered(self, rows: np.ndarray) -> DrawnFactors:
        """All rows in the given order, not drawn yet."""
        numbers = rows + self.first if self.rows is None else self.rows[rows]
        return self._with(self.scales[rows], 0, numbers.astype(np.int64))

    def _with(self, scales: np.ndarray, first: int, rows: np.ndarray | None) -> DrawnFactors:
        what = (self.rank, self.dtype, self.side, self.seed, self.signed, self.biases, self.num_threads)
        return DrawnFactors(scales, *what, first, rows)

    def _brought(self) -> Factors:
        if self.is_zero:
            return Factors(np.zeros((len(self), self.rank), self.dtype), self.first_bias())
        matrix = np.empty((len(self), self.rank), self.dtype)
        self.draw(matrix)
        return Factors(matrix, self.first_bias())


def initial_state(
    user_degrees: np.ndarray,
    item_degrees: np.ndarray,
    rank: int,
    dtype: Any,
    objective: Objective,
    mean: float,
    seed: int,
    start: Start | None = None,
    num_threads: int = 1,
) -> State:
    """Random factors that every backend starts from; rows without entries are zero.

    Parameters
    ----------
    user_degrees, item_degrees : int array, shape (n_users,) and (n_items,)
        Entries of each row of either side.
    rank : int
    dtype : float32 or float64
    objective : Objective
    mean : float
        Mean rating; kept only where the objective has biases.
    seed : int
        64 bits.
    start : Start, optional
    num_threads : int
        Threads that draw on the host.
    """
    start = start or Start()
    scale = np.float32(start.scale(rank))

    def drawn(side: Side, degrees: Sequence[int] | np.ndarray) -> DrawnFactors:
        scales = np.where(np.asarray(degrees) != 0, scale if side in start.sides else np.float32(0), np.float32(0))
        return DrawnFactors(scales, rank, dtype, side, seed, start.signed, objective.biases, num_threads)

    return State(drawn("user", user_degrees), drawn("item", item_degrees), mean if objective.biases else 0.0)
