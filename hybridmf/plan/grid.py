"""Ownership of rows and distribution of sums over ranks: the partitions of SU-ALS (cuMF Algorithm 3, lines 2-4).

Each of R ranks owns one range of rows of either side. A half sweep uses a grid of p x q = R ranks: the fixed side is
split over p of them (data parallelism), the rows to solve over q groups (model parallelism). Rank ``r = j q + i`` holds
split j of the fixed side, owned by the ranks ``j q ... (j + 1) q - 1``, and sums the systems of the rows owned by the
ranks ``i, i + q, i + 2 q ...``; these p ranks then add up their sums, and each solves the rows it owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..core.objective import Side, other_side
from ..data.slabs import Orientation
from ..errors import RatingsError


@dataclass(frozen=True)
class Grid:
    """Distribution of one half sweep over ranks."""

    splits: int  # p: parts of the fixed side; 1 is pure model parallelism
    groups: int  # q: parts of the rows to solve; 1 is pure data parallelism

    def __post_init__(self) -> None:
        if self.splits < 1 or self.groups < 1:
            raise ValueError(f"a grid is of at least 1 x 1 ranks, got {self.splits} x {self.groups}")

    @property
    def size(self) -> int:
        """Ranks."""
        return self.splits * self.groups

    def split_of(self, rank: int) -> int:
        """j, the part of the fixed side held by a rank."""
        return rank // self.groups

    def group_of(self, rank: int) -> int:
        """i, the group of rows summed by a rank."""
        return rank % self.groups

    def members(self, group: int) -> range:
        """Ranks that sum the same rows, by the part of the fixed side they hold."""
        return range(group, self.size, self.groups)

    def holders(self, split: int) -> range:
        """Ranks that hold the same part of the fixed side."""
        return range(split * self.groups, (split + 1) * self.groups)


def even_bounds(degrees: np.ndarray, parts: int, row_cost: float = 0.0) -> np.ndarray:
    """Bounds of `parts` consecutive ranges of rows of about equal cost; some may be empty.

    `degrees`: shape (n,), entries of each row. `row_cost`: cost of a row beyond that of its entries, in entries: about
    f / 6 for the solve of exact ALS. Returns int64 array, shape (parts + 1,): nondecreasing, from 0 to n.
    """
    cost = np.cumsum(degrees + row_cost)
    total = cost[-1] if len(cost) else 0.0
    # the bound nearest to its share: searching the middles of rows rounds by half a row's cost either way
    middles = cost - (np.asarray(degrees) + row_cost) / 2
    inner = np.searchsorted(middles, total * np.arange(1, parts) / parts)
    return np.concatenate(([0], inner, [len(degrees)])).astype(np.int64)


@dataclass(frozen=True)
class RankLayout:
    """Ranges of rows of all ranks, and a grid for each half sweep."""

    bounds: Mapping[Side, np.ndarray]
    """shape (size + 1,): Rank r owns the rows ``bounds[side][r] ... bounds[side][r + 1] - 1``."""
    grids: Mapping[Side, Grid]  # how each side is solved

    def __post_init__(self) -> None:
        sizes = {len(bounds) - 1 for bounds in self.bounds.values()} | {grid.size for grid in self.grids.values()}
        if len(sizes) > 1:
            raise ValueError(
                f"the grids of both half sweeps are of the same number of ranks as there are ranges of rows; got "
                f"{', '.join(f'{g.splits} x {g.groups}' for g in self.grids.values())} and "
                f"{' and '.join(str(len(b) - 1) for b in self.bounds.values())} ranges"
            )

    @classmethod
    def even(cls, degrees: Mapping[Side, np.ndarray], grids: Mapping[Side, Grid], row_cost: float) -> RankLayout:
        """Ranges of about equal cost: the entries, plus `row_cost` entries for each row."""
        size = grids["user"].size
        bounds = {side: even_bounds(degrees[side], size, row_cost) for side in degrees}
        return cls(bounds, grids)

    @property
    def size(self) -> int:
        """Ranks."""
        return self.grids["user"].size

    def own(self, side: Side, rank: int) -> tuple[int, int]:
        """First row owned by a rank, and the row after its last one."""
        return int(self.bounds[side][rank]), int(self.bounds[side][rank + 1])

    def counts(self, side: Side, ranks: range) -> list[int]:
        """Number of rows owned by each of the given ranks."""
        return [int(self.bounds[side][rank + 1] - self.bounds[side][rank]) for rank in ranks]

    def columns(self, side: Side, rank: int) -> tuple[int, int]:
        """Range of the other side's rows that a rank holds while `side` is solved."""
        grid = self.grids[side]
        holders = grid.holders(grid.split_of(rank))
        bounds = self.bounds[other_side(side)]
        return int(bounds[holders.start]), int(bounds[holders.stop])

    def ranges(self, side: Side, rank: int) -> list[tuple[int, int]]:
        """Ranges of rows of `side` whose systems a rank sums, in the order of its group."""
        grid = self.grids[side]
        return [self.own(side, member) for member in grid.members(grid.group_of(rank))]

    def cut(self, side: Side, rank: int, ratings: Orientation) -> Orientation:
        """The entries of a rank for solving `side`: the rows of `ranges`; columns count from the first of `columns`."""
        shape = (int(self.bounds[side][-1]), int(self.bounds[other_side(side)][-1]))
        if ratings.shape != shape:
            raise RatingsError(
                f"ratings by {side} have shape {ratings.shape}, the layout is of {shape}; give all ranks the same"
            )
        return ratings.part(self.ranges(side, rank), self.columns(side, rank) if self.grids[side].splits > 1 else None)
