"""Initial factors: drawn on the device that uses them, with the same bits on every device, only if they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.objective import SIDES, Factors, LazyFactors, Objective, Side, State
from ..core.validate import check_choice
from ..native import _draw


@dataclass(frozen=True)
class Start:
    """Distribution of initial factors."""

    length: float = 1.0  # root mean square of the lengths of rows
    signed: bool = False  # whether elements are uniform between ``-a`` and ``a``, or between 0 and ``a``
    sides: tuple[Side, ...] = SIDES  # the sides that are drawn; the other one is zero
    num_threads: int = 1  # threads that draw on the host

    def scale(self, rank: int) -> float:
        """The largest absolute value ``a`` of an element: ``rank a^2 / 3`` is the mean square of a row's length."""
        return self.length * math.sqrt(3 / rank)


@dataclass(frozen=True)
class Drawing:
    """Generator and layout of the drawn factors of a side."""

    rank: int
    dtype: np.dtype  # numbers are drawn in float32 and converted
    side: Side  # {"user", "item"}
    seed: int  # 64 bits
    signed: bool
    biases: bool  # whether there are biases, which are zeros
    num_threads: int  # threads that draw on the host

    @property
    def stream(self) -> int:
        """Number of the side in the counter of the generator."""
        return SIDES.index(self.side)


class DrawnFactors(LazyFactors):
    """Uniform random factors, drawn at first access on the host, or by a solver on its device.

    Row `r`, column `c` depends on the seed, the side, `r` and `c` only, so that each rank draws its own rows.

    `scales`: shape (n,), the largest absolute value in each row; 0 for a row of zeros. `first`: number of the first
    row. `rows`: shape (n,), optional, number of each row. Default: consecutive ones.
    """

    def __init__(self, scales: np.ndarray, drawing: Drawing, first: int = 0, rows: np.ndarray | None = None) -> None:
        self.keep(scales=scales, drawing=drawing, first=first, rows=rows)

    scales: np.ndarray
    drawing: Drawing
    first: int
    rows: np.ndarray | None

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of `hybridmf.native._draw.draw_rows`, after a matrix of shape (n, rank), whose rows may be longer."""
        rows, how = self.first if self.rows is None else self.rows, self.drawing
        return self.scales, rows, how.seed, how.stream, how.signed, how.num_threads

    def first_bias(self) -> np.ndarray | None:
        return np.zeros(len(self), self.drawing.dtype) if self.drawing.biases else None

    def part(self, rows: slice) -> DrawnFactors:
        first, last, _ = rows.indices(len(self))
        names = None if self.rows is None else self.rows[first:last]
        return DrawnFactors(self.scales[first:last], self.drawing, self.first + first, names)

    def reordered(self, rows: np.ndarray) -> DrawnFactors:
        """All rows in the given order, not drawn yet."""
        numbers = rows + self.first if self.rows is None else self.rows[rows]
        return DrawnFactors(self.scales[rows], self.drawing, 0, numbers.astype(np.int64))

    def _brought(self) -> Factors:
        shape, dtype = (len(self), self.drawing.rank), self.drawing.dtype
        if not self.scales.any():
            return Factors(np.zeros(shape, dtype), self.first_bias())
        matrix = np.empty(shape, dtype)
        _draw.draw_rows(matrix, *self.arguments)
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
) -> State:
    """Random factors that every backend starts from; rows without entries are zero.

    `user_degrees`, `item_degrees`: shape (n_users,) and (n_items,), entries of each row of either side. `mean`: mean
    rating; kept only where the objective has biases. `seed`: 64 bits.
    """
    start = start or Start()
    scale = np.float32(start.scale(rank))

    def drawn(side: Side, degrees: Sequence[int] | np.ndarray) -> DrawnFactors:
        scales = np.where(np.asarray(degrees) != 0, scale if side in start.sides else np.float32(0), np.float32(0))
        how = Drawing(rank, np.dtype(dtype), side, seed, start.signed, objective.biases, start.num_threads)
        return DrawnFactors(scales, how)

    return State(drawn("user", user_degrees), drawn("item", item_degrees), mean if objective.biases else 0.0)


STARTS = ("nonnegative", "signed")  # named values of `init`


@dataclass(frozen=True)
class Init:
    """A checked `init`."""

    signed: bool = False  # whether drawn factors are signed
    given: Mapping[Side, Factors] = field(default_factory=dict)  # factors that are not drawn; copies
    new: Mapping[Side, np.ndarray] = field(default_factory=dict)  # rows of a given side that are drawn nevertheless

    def placed(
        self,
        state: State,
        degrees: Mapping[Side, np.ndarray],
        sides: Sequence[Side] = SIDES,
        kept: Sequence[Side | None] = (),
    ) -> State:
        """The state with the given factors of `sides`; rows without entries are zero, except those of sides `kept`."""
        for side in sides:
            factors = self.given.get(side)
            if factors is None:
                continue
            rows = self.new.get(side, np.empty(0, np.int64))
            if len(rows):
                factors.matrix[rows] = state.side(side).reordered(rows).matrix
            if side not in kept:
                empty = np.asarray(degrees[side]) == 0
                for array in factors.arrays:
                    array[empty] = 0
            state = state.with_side(side, factors)
        return state


def check_init(
    init: Any, shape: tuple[int, int], factors: int, dtype: Any, *, biases: bool = False, nonnegative: bool = False
) -> Init:
    """Initial factors requested by the user.

    `init`: name in `STARTS`, or factors of users and items, of which one may be None; then, optionally, their biases.
    `biases`: whether the model has biases. `nonnegative`: whether factors have to be nonnegative.
    """
    if init is None or isinstance(init, str):
        name = check_choice("init", init or STARTS[0], STARTS)
        if nonnegative and name == "signed":
            raise ValueError('init="signed" contradicts nonnegative=True; use init="nonnegative"')
        return Init(name == "signed")
    if not isinstance(init, (tuple, list)) or len(init) not in (2, 4):
        what = f"{len(init)} values" if isinstance(init, (tuple, list)) else f"a value of type {type(init).__name__}"
        raise TypeError(
            f"init must be None, {', '.join(map(repr, STARTS))} or a tuple (user_factors, item_factors), of models "
            f"with biases also (user_factors, item_factors, user_bias, item_bias); got {what}"
        )
    if len(init) == 4 and not biases:
        raise ValueError("init has biases, and the model has none; give (user_factors, item_factors), or fit biases")
    if init[0] is None and init[1] is None:
        raise ValueError("init has neither user_factors nor item_factors; give one of them, or init=None")
    given: dict[Side, Factors] = {}
    wanted = "for these ratings and `factors`"
    for place, (side, n) in enumerate(zip(SIDES, shape, strict=True)):
        matrix = init[place]
        bias = init[place + 2] if len(init) == 4 else None
        if matrix is None:
            if bias is not None:
                raise ValueError(f"init has {side}_bias without {side}_factors; give both, or None for both")
            continue
        rows = check_given(f"init: {side}_factors", matrix, (n, factors), dtype, wanted)
        if nonnegative and rows.min(initial=0) < 0:
            raise ValueError(f"init: {side}_factors has negative elements, and nonnegative=True; clip them at 0")
        known = None
        if biases:
            known = np.zeros(n, dtype) if bias is None else check_given(f"init: {side}_bias", bias, (n,), dtype, wanted)
        given[side] = Factors(rows, known)
    return Init(given=given)


def check_given(name: str, array: Any, shape: tuple[int, ...], dtype: Any, wanted: str) -> np.ndarray:
    """A copy in the type of the computation; messages say `wanted` behind the expected shape."""
    found = np.asarray(array)
    if found.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be an array of real numbers, got {type(array).__name__} of {found.dtype}")
    if found.shape != shape:
        raise ValueError(f"{name} has shape {found.shape}, expected {shape} {wanted}")
    with np.errstate(over="ignore"):
        copy = np.array(found, dtype=dtype, order="C")
    finite = np.isfinite(copy)
    if not finite.all():
        at = tuple(int(k) for k in np.argwhere(~finite)[0])
        raise ValueError(
            f"{name} has the value {found[at]} at {list(at)}; expected numbers that are finite in {copy.dtype}"
        )
    return copy
