"""Launches of cuda/dual_rows.cu and cuda/basis.cu: rows with few entries, solved in the dual form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.objective import Objective, Side
from ..core.system import ceil_div, round_up
from ..device.cuda import Array, Device
from ..plan.fused import BLOCK, solver_floats, table_width, vector_floats
from ..plan.half_sweep import ROWS_AT_ONCE
from ..plan.row_forms import GPU_SIZES
from .launch import DeviceEntries, check_all, get_kernel, program
from .systems import SideSystems

TEAMS = 4  # warps of a block, each with a separate row

BLOCKS_PER_SM = {16: 5, 32: 3, 48: 2, 64: 2}
"""Blocks per multiprocessor by the order of the systems, limited by registers."""

BASIS_THREADS = 1024
PRODUCT_THREADS = 256  # threads of a block of `to_basis` and `from_basis`
PRODUCT_BLOCKS = 2  # their blocks per multiprocessor
BASIS_TILE = 128  # rows that a block multiplies at a time


def dual_constants(size: int, rank: int, implicit: bool, offsets: bool, biased: bool) -> dict[str, Any]:
    """Compile-time constants of cuda/dual_rows.cu for rows with at most `size` entries."""
    order = max(size, BLOCK)
    return {
        "RANK": order, "PACK": order // size, "FACTORS": rank, "LD": table_width(rank, np.float32),
        "WARPS": 1, "TEAMS": TEAMS, "BLOCKS_PER_SM": BLOCKS_PER_SM[order],
        "IMPLICIT": implicit, "HAS_OFFSETS": offsets, "BIASED": biased,
    }  # fmt: skip


def basis_constants(rank: int) -> dict[str, Any]:
    return {"RANK": rank, "LD": table_width(rank, np.float32)}


def inverse_root(device: Device, gram: Array, ridge: Array, epsilon: float) -> tuple[Array, Array]:
    """Launch inverse_root: ``L^-1`` with ``gram + diag(ridge) = L L^T``, and the failing leading minor or 0.

    Pivots at or below `epsilon` times their diagonal element count as rounding errors. Beyond the rank ``L^-1`` is 0.
    """
    rank = len(ridge)
    width = table_width(rank, np.float32)
    check_all(device, gram=(gram, np.float32, (round_up(rank, BLOCK),) * 2), ridge=(ridge, np.float32, (rank,)))
    inverse, failed = device.empty((width, width), np.float32), device.empty(1, np.int32)
    kernel = get_kernel(device, "basis.cu", "inverse_root", **basis_constants(rank))
    kernel((1,), (BASIS_THREADS,), (inverse, failed, gram, ridge, np.float64(epsilon)), 0)
    return inverse, failed


def multiply_rows(
    device: Device, name: str, results: Array, rows: Array, inverse: Array, rank: int, places: Array | None = None
) -> None:
    """Launch `to_basis`, ``results[k] = inverse rows[k]``, or `from_basis`, ``results[places[k]] = inverse^T rows[k]``.

    `inverse` is lower triangular; columns from `rank` on are padding. Default `places`: each row's own.
    """
    n, width = rows.shape
    check_all(
        device,
        rows=(rows, np.float32, (None, width)),
        results=(results, np.float32, (n if places is None else None, width)),
        inverse=(inverse, np.float32, (width, width)),
        places=(places, np.int32, (n,)),
    )
    if not n:
        return
    rank16 = round_up(rank, BLOCK)
    kernel = get_kernel(device, "basis.cu", name, **basis_constants(rank))
    blocks = min(ceil_div(n, BASIS_TILE), PRODUCT_BLOCKS * device.spec.multiprocessors)
    shared = 4 * rank16 * (rank16 + (48 - rank16 % 32) % 32)
    arguments = (results, rows, inverse, np.uint64(0) if places is None else places, np.int64(n))
    kernel((blocks,), (PRODUCT_THREADS,), arguments, shared)


class DualRows:
    """Rows of a side that are solved in the dual form: `rows`, longest first, with `degrees` entries.

    `parts`: sizes of systems, and the rows with at most as many entries, longest first.
    """

    def __init__(
        self, device: Device, objective: Objective, side: Side, rank: int, rows: np.ndarray, degrees: np.ndarray
    ) -> None:
        self.device, self.objective, self.side, self.rank = device, objective, side, rank
        self.parts: list[tuple[int, Array]] = []
        ends = [int(np.count_nonzero(degrees > size)) for size in (0, *GPU_SIZES)]
        for size, first, last in reversed(list(zip(GPU_SIZES, ends[1:], ends, strict=False))):
            if first < last:
                self.parts.append((size, device.upload(rows[first:last].astype(np.int32))))

    def solve(self, systems: SideSystems, table: Array, entries: DeviceEntries, indptr: Array, epsilon: float) -> None:
        """Solve all rows; stream order completes the basis before it is used, and frees memory before it is reused."""
        if not self.parts:
            return
        n, width = len(systems.scale), table_width(self.rank, np.float32)
        entries.check(self.device, np.float32, len(table))
        check_all(
            self.device,
            table=(table, np.float32, (None, width)),
            solutions=(systems.solutions, np.float32, (n, width)),
            status=(systems.status, np.int32, (n,)),
            scale=(systems.scale, np.float32, (n,)),
            indptr=(indptr, np.int64, (n + 1,)),
        )
        if not entries.implicit:
            failed = self.device.zeros(1, np.int32)  # explicit feedback needs no basis, so none can fail
            for size, rows in self.parts:
                self._launch(size, rows, systems, table, entries, indptr, failed, epsilon)
            return
        assert systems.gram is not None
        inverse, failed = inverse_root(self.device, systems.gram, systems.ridge, epsilon)
        there = self.device.empty(table.shape, np.float32)
        multiply_rows(self.device, "to_basis", there, table, inverse, self.rank)
        for size, rows in self.parts:
            for start in range(0, len(rows), ROWS_AT_ONCE):
                some = rows[start : start + ROWS_AT_ONCE]
                solutions = self.device.empty((len(some), table.shape[1]), np.float32)
                apart = replace(systems, solutions=solutions)
                self._launch(size, some, apart, there, entries, indptr, failed, epsilon)
                multiply_rows(self.device, "from_basis", systems.solutions, solutions, inverse, self.rank, some)

    def _launch(
        self,
        size: int,
        rows: Array,
        systems: SideSystems,
        table: Array,
        entries: DeviceEntries,
        indptr: Array,
        failed: Array,
        epsilon: float,
    ) -> None:
        """Launch dual_rows for rows with at most `size` entries; `solutions` are those of all rows, or of `rows`."""
        device, objective, solutions = self.device, self.objective, systems.solutions
        offsets, biased = entries.offsets is not None, objective.biases
        constants = dual_constants(size, self.rank, entries.implicit, offsets, biased)
        order, pack = max(size, BLOCK), max(BLOCK // size, 1)
        regularization = objective.regularization.of(self.side)
        ratio = regularization / objective.bias_regularization.of(self.side) if biased else 1.0
        arrays = (solutions, systems.status, table, *entries.arrays, indptr, rows, systems.scale, failed)
        scalars = (np.int32(len(rows)), *entries.scalars, *map(np.float32, (regularization, ratio, epsilon)))
        grid = min(ceil_div(len(rows), TEAMS * pack), device.spec.multiprocessors * BLOCKS_PER_SM[order])
        shared = 4 * TEAMS * (solver_floats(order, 1) + vector_floats(order, 1) + 2 * order)  # a system and its entries
        kernel = get_kernel(device, "dual_rows.cu", "dual_rows", **constants)
        kernel((grid,), (32 * TEAMS,), (*arrays, *scalars), shared)


def programs(rank: int, longest: int, implicit: bool, offsets: bool) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Source, kernel and constants of the programs for rows with up to `longest` entries, the slowest first."""
    for size in reversed(GPU_SIZES):
        if size < max(longest, 1) * 2 and longest:
            yield program("dual_rows.cu", "dual_rows", **dual_constants(size, rank, implicit, offsets, offsets))
    if implicit and longest:
        for name in ("inverse_root", "to_basis", "from_basis"):
            yield program("basis.cu", name, **basis_constants(rank))
