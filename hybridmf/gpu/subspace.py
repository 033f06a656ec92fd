"""iALS++ on a GPU (Rendle, Krichene, Zhang and Koren 2021, Alg. 2): blocks of coordinates solved one after another.

The systems of a block of d coordinates are those of a model with d factors whose ratings are residuals; the kernels of
the exact solver sum and solve them for the change of the solution. In addition, the right-hand sides have a part that
does not come from entries, ``-(G x + lambda s x)`` at the coordinates of the block, and `add_products`
(cuda/predictions.cu) updates the predictions of all entries after each block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..core.system import round_up
from ..device.cuda import Array
from ..plan.fused import BLOCK, table_width
from ..plan.solver import Given, Steps
from . import arrays
from .assembly import Cleared
from .factors import DeviceFactors, weighted_gram
from .half import HalfSweep, row_segments
from .launch import DeviceEntries
from .predictions import add_products
from .rows import RowRange, read_range, widen_range
from .systems import SideSystems


class SubspaceHalf(HalfSweep):
    """One half of a sweep by iALS++: each row is minimized over one block of coordinates after the other."""

    one_thread = False

    @functools.cached_property
    def segments(self) -> Array:
        """Segments of all rows: (row, begin, end)."""
        return row_segments(self.device, np.append(0, np.cumsum(self.degrees)))

    @functools.cached_property
    def blocks(self) -> list[slice]:
        return [slice(first, last) for first, last in self.plan.blocks]

    def steps(self, given: Given) -> Steps:
        """See `Half`; reads the ranges of the blocks of the fixed side back to the host."""
        fixed, mean, start, gram, pull = given
        if gram is None:
            gram = weighted_gram(self.device, fixed.table, self.plan.rank, self.objective)
        whole = self.systems(Cleared(self.device, len(self)), start, gram, pull=pull)
        entries = self._predicted(fixed, mean, whole.solutions)
        for columns, (table, known) in zip(self.blocks, self._fixed_blocks(fixed.table), strict=True):
            rank, gram_of_block = columns.stop - columns.start, None
            if gram is not None:
                gram_of_block = self.device.zeros((round_up(rank, BLOCK),) * 2, self.dtype)
                arrays.copy(self.device, gram_of_block[:rank, :rank], gram[columns, columns])
            systems = functools.cache(functools.partial(self._systems_of, columns, table, whole, gram_of_block))
            kernels = self.row_kernels(rank, known)
            yield from self.solve_all(kernels, kernels.operand(table), table, entries, systems)
            changes, status = systems().solutions, systems().status
            whole.solutions[:, columns] += changes[:, :rank]
            whole.status[...] += (whole.status == 0) * (status + (status > 0) * np.int32(columns.start))
            if columns.stop < self.plan.rank:
                add_products(self.device, entries.predicted, table, changes, self.indices, self.segments)
        yield self.unpack(whole.solutions), whole.status

    def _predicted(self, fixed: DeviceFactors, mean: float, solutions: Array) -> DeviceEntries:
        """The entries with predictions by the current solutions."""
        entries = self.entries(self.indices, self.ratings, fixed, mean)
        predicted = self.device.zeros(len(self.indices), self.dtype)
        if entries.offsets is not None:
            predicted += entries.offsets[self.indices]
        add_products(self.device, predicted, fixed.table, solutions, self.indices, self.segments)
        return replace(entries, offsets=None, predicted=predicted)

    def _fixed_blocks(self, table: Array) -> list[tuple[Array, RowRange | None]]:
        """Copies of the columns of each block, and their ranges if kernels need them, read back together."""
        device, tables = self.device, []
        for columns in self.blocks:
            rank = columns.stop - columns.start
            part = device.zeros((len(table), table_width(rank, self.dtype)), self.dtype)
            arrays.copy(device, part[:, :rank], table[:, columns])
            tables.append(part)
        ranges: Sequence[RowRange | None] = [None] * len(tables)
        if self.plan.assembly == "fused" and self.plan.precision == "float32":
            found = device.zeros((len(tables), 3), np.uint32)
            for k, part in enumerate(tables):
                widen_range(device, found[k], part)
            ranges = [read_range(one)[0] for one in device.download(found)]
        return list(zip(tables, ranges, strict=True))

    def _systems_of(self, columns: slice, table: Array, whole: SideSystems, gram: Array | None) -> SideSystems:
        """The systems of a block; solutions hold the part of right-hand sides that does not come from entries."""
        device, solutions, ridge, rank = self.device, whole.solutions, self.ridge[columns], columns.stop - columns.start
        beside = device.zeros((len(self), table.shape[1]), self.dtype)
        beside[:, :rank] = self.scale[:, None] * solutions[:, columns] * -ridge
        if whole.pull is not None:
            beside[:, :rank] += whole.pull[:, columns]
        if whole.gram is not None:
            beside[:, :rank] -= device.matmul(solutions, whole.gram[: self.width, columns])
        return SideSystems(beside, device.zeros(len(self), np.int32), gram, ridge, self.scale)
