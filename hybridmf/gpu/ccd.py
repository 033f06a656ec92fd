"""CCD++ on a GPU: launches of cuda/ccd.cu, their data layout, and the solver; the counterpart of `hybridmf.cpu.ccd`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Objective, Side, State, other_side
from ..core.system import ceil_div
from ..core.validate import csr_arrays
from ..device.cuda import Array, Device, Kernel
from ..errors import DeviceMemoryError
from ..plan import ccd
from ..plan.assemblies import WARP
from ..plan.ccd import QUAD, VECTORS, CcdConfig, RankOneSolver, non_finite
from ..plan.fused import table_width
from ..plan.types import Plan
from . import arrays
from .factors import DeviceFactors, to_device
from .launch import check_all, get_kernel

LANES = ((16, 8), (32, 16))
"""Maximum quads of a short piece, and the number of lanes that read it; a warp reads longer pieces."""

MAX_QUADS = (1 << 31) - 1
PIECE_WORK = 4  # overhead of a piece, in quads, when work is divided into blocks
LEAST_ROUNDS = 16  # turns of each warp from which on the blocks of a tile take turns
LEAST_SHARE = 0.05  # smallest part of a block's work for which it joins the team of a tile
WARPS_PER_BLOCK = 8  # warps of a block of the kernels besides `rank_one`; each processes one piece, or one or more rows

# ---------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class PieceLayout:
    """Pieces of rows in memory order: by tile, longest first within a tile."""

    # int32 (n_pieces, 4): first quad, quads, row, slot of the partial sums (-1: the piece is the whole row)
    pieces: np.ndarray
    tiles: np.ndarray  # int32 (n_pieces,)
    sources: np.ndarray  # int64 (n_pieces, 2): first entry in the order of the matrix, number of entries
    split: np.ndarray  # int32 (n_split, 4): row, first slot, number of slots and 0, for each row of several pieces
    n_slots: int
    n_quads: int

    @classmethod
    def cut(cls, begins: np.ndarray, counts: np.ndarray, segment: int) -> PieceLayout:
        """Cut rows at the bounds of tiles, and longer parts into segments of at most `segment` entries.

        A row has ``counts[row, tile]`` entries, sorted by tile, from ``begins[row]`` on.
        """
        rows, tiles = np.nonzero(counts)
        lengths = counts[rows, tiles]
        first = (begins[:, None] + np.cumsum(counts, axis=1) - counts)[rows, tiles]
        parts = -(-lengths // segment)
        place = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        first = np.repeat(first, parts) + place * segment
        lengths = np.minimum(np.repeat(lengths, parts) - place * segment, segment)
        rows, tiles = np.repeat(rows, parts), np.repeat(tiles, parts)
        quads = -(-lengths // QUAD)
        if int(quads.sum()) > MAX_QUADS:
            raise DeviceMemoryError(
                f"{int(lengths.sum())} entries are more than one GPU takes here ({QUAD * MAX_QUADS}); "
                'use device="cpu", or fewer entries'
            )
        slots, split, n_slots = _slots(rows, len(counts))
        order = np.lexsort((-quads, tiles))
        ends = np.cumsum(quads[order])
        pieces = np.column_stack((ends - quads[order], quads[order], rows[order], slots[order])).astype(np.int32)
        sources = np.column_stack((first, lengths))[order].astype(np.int64)
        return cls(pieces, tiles[order].astype(np.int32), sources, split, n_slots, int(quads.sum()))

    def divide(self, blocks: int, warps: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide the pieces among at most `blocks` blocks of `warps` warps, of about equal work.

        The blocks of a tile are a team that takes turns at consecutive pieces, so that what it reads at a time is close
        together in memory. A block at the border of two tiles is in the team of either for a part of the pieces. In
        tiles of few pieces each block has its own: there the last turns would leave many blocks without work.

        Returns `parts`, int32 (n_parts, 8): tile, first piece, end, lanes that share a piece, rank of the block in its
        team, blocks of the team, 0, 0. Returns `first_part`, int32 (n_blocks + 1,).
        """
        n = len(self.pieces)
        blocks = max(1, min(blocks, n))
        work = np.concatenate(([0], np.cumsum(self.pieces[:, 1] + PIECE_WORK)))
        work = work * (blocks / max(work[-1], 1))  # in blocks
        lanes = lanes_of(self.pieces[:, 1])
        shares: list[list[tuple[int, ...]]] = [[] for _ in range(blocks)]
        edges = np.concatenate(([0], 1 + np.flatnonzero(np.diff(self.tiles)), [n])) if n else np.zeros(1, dtype=int)
        for start, stop in itertools.pairwise(edges.tolist()):
            rounds = lanes[start:stop].sum() / (WARP * warps * max(1.0, work[stop] - work[start]))
            if rounds < LEAST_ROUNDS:
                divided = _in_sequence(work, lanes, start, stop, blocks)
            else:
                divided = _in_turns(work, lanes, start, stop, blocks, warps)
            for block, *share in divided:
                shares[block].append((int(self.tiles[start]), *share, 0, 0))
        first_part = np.cumsum([0, *map(len, shares)], dtype=np.int32)
        return np.array(list(itertools.chain(*shares)), dtype=np.int32).reshape(-1, 8), first_part


Share = tuple[int, int, int, int, int, int]  # block, first piece, end, lanes, rank in the team, blocks of the team


def _in_sequence(work: np.ndarray, lanes: np.ndarray, start: int, stop: int, blocks: int) -> Iterator[Share]:
    """Give each block consecutive pieces of its own: for tiles of few rounds, which do not divide into whole ones."""
    first, last = min(int(work[start]), blocks - 1), min(math.ceil(work[stop]), blocks)
    cuts = start + np.searchsorted(work[start : stop + 1], np.arange(first + 1, last))
    changes = start + 1 + np.flatnonzero(np.diff(lanes[start:stop]))
    breaks = np.unique(np.concatenate(([start], cuts, changes, [stop])))
    owners = first + np.searchsorted(cuts, breaks[:-1], side="right")
    for block, begin, end in zip(owners.tolist(), breaks[:-1].tolist(), breaks[1:].tolist(), strict=True):
        yield block, begin, end, int(lanes[begin]), 0, 1


def _in_turns(work: np.ndarray, lanes: np.ndarray, start: int, stop: int, blocks: int, warps: int) -> Iterator[Share]:
    """Have the blocks of a tile take turns at its pieces."""
    at = start
    for team, until in _teams(work[start], work[stop], blocks):
        end = stop if until is None else max(at, int(np.searchsorted(work[: stop + 1], until)))
        while at < end:
            # whole rounds, so that only the last of a tile leaves warps without a piece: wide groups may read some of
            # the shorter pieces
            wide, pieces = int(lanes[at]), len(team) * warps * (WARP // int(lanes[at]))
            narrower = at + int(np.searchsorted(-lanes[at:stop], -wide, side="right"))
            cut = min(at + ceil_div(min(narrower, end) - at, pieces) * pieces, stop)
            busy = ceil_div((cut - at) * len(team), pieces)  # blocks with a turn
            for rank, block in enumerate(team[:busy]):
                yield block, at, cut, wide, rank, len(team)
            at = cut


def _teams(start: float, stop: float, blocks: int) -> Iterator[tuple[list[int], float | None]]:
    """Teams of blocks for the work of a tile, each with the work at which the next takes over (None: the end).

    Block k has the work k to k + 1. First come all blocks that have work in start ... stop, then those that are left
    when the ones with the least of it have done their share.
    """
    first = min(int(start), blocks - 1)
    members = np.arange(first, max(min(math.ceil(stop), blocks), first + 1))
    capacity = np.minimum(members + 1, stop) - np.maximum(members, start)
    # a small share is not worth a copy of the tile to shared memory
    capacity[capacity < min(LEAST_SHARE, capacity.max())] = 0
    unit = (stop - start) / capacity.sum()
    until, before = start, 0.0
    levels = np.unique(capacity[capacity > 0])
    for level in levels:
        team = members[capacity >= level]
        until += (level - before) * len(team) * unit
        before = level
        yield team.tolist(), None if level == levels[-1] else until


def lanes_of(quads: np.ndarray) -> np.ndarray:
    """Lanes that share a piece of this many quads; `lanes_of` in cuda/ccd.cu."""
    return np.select([quads <= most for most, _ in LANES], [lanes for _, lanes in LANES], WARP)


def _slots(rows: np.ndarray, n_rows: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Slot of each piece, ascending within a row; the rows with slots; the number of slots. `rows` ascend."""
    pieces = np.bincount(rows, minlength=n_rows)
    split = np.flatnonzero(pieces > 1)
    several = pieces[rows] > 1
    slots = np.where(several, np.cumsum(several) - 1, -1)
    counts = pieces[split]
    table = np.column_stack((split, np.cumsum(counts) - counts, counts, np.zeros_like(split)))
    return slots, np.ascontiguousarray(table, dtype=np.int32), int(several.sum())


class CcdEntries:
    """Entries of one side on a device: ratings, residual, and their division into blocks."""

    def __init__(
        self, device: Device, side: Side, matrix: sp.csr_array, objective: Objective, config: CcdConfig
    ) -> None:
        self.device, self.config = device, config
        self._kernels: dict[tuple[str, int | None], Kernel] = {}
        self.dtype = matrix.dtype
        self.n_rows, self.n_fixed = matrix.shape
        indptr, indices, ratings = csr_arrays(matrix)
        self.degrees = np.diff(indptr)
        # for factors, and for biases if there are any
        ridges = objective.ridge(side, 1, 1 + objective.biases)[:, None] * objective.row_scale(side, self.degrees)
        self.penalties = device.upload(ridges.astype(self.dtype))
        layout = PieceLayout.cut(indptr[:-1], self._counts(indptr, indices), config.segment)
        self.pieces, self.split = device.upload(layout.pieces), device.upload(layout.split)
        self.bases = device.upload((layout.tiles * self.usable).astype(np.int32))
        parts, first_part = layout.divide(config.blocks, config.threads // WARP)
        self.parts, self.first_part = device.upload(parts), device.upload(first_part)
        self.partials = device.empty((layout.n_slots, 2), self.dtype)
        mean_slots = layout.n_slots / max(1, len(layout.split))
        self.combining_lanes = 8 if mean_slots <= 8 else 16 if mean_slots <= 16 else WARP
        self.indices = device.empty(QUAD * layout.n_quads, np.uint16 if config.staged else np.int32)
        self.ratings = device.empty(QUAD * layout.n_quads, self.dtype)
        self._place(layout, indptr, indices, ratings)
        # the padding of quads stays zero
        self.residuals = device.zeros(QUAD * layout.n_quads, self.dtype)

    @property
    def usable(self) -> int:
        """Rows of the other side in a tile."""
        return self.config.usable(self.dtype) if self.config.staged else 0

    @property
    def zero(self) -> int:
        """Index of the padding of quads: a row of zeros."""
        return self.usable if self.config.staged else self.n_fixed

    def kernel(self, name: str, vectors: int | None = None) -> Kernel:
        """A kernel of cuda/ccd.cu; both sides share kernels that do not depend on the gathered vectors."""
        if (name, vectors) not in self._kernels:
            constants: dict[str, Any] = {"REAL": self.dtype, "STAGED": self.config.staged}
            if vectors is not None:
                constants = self.config.constants_for(vectors, self.dtype)
            self._kernels[name, vectors] = get_kernel(self.device, "ccd.cu", name, **constants)
        return self._kernels[name, vectors]

    def _counts(self, indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Entries of each row in each tile; int64, shape (n_rows, n_tiles)."""
        n_tiles = self.config.n_tiles
        if n_tiles == 1:
            return self.degrees[:, None]
        offsets = np.zeros((self.n_rows, n_tiles + 1), dtype=np.int64)
        offsets[:, -1] = self.degrees
        kernel = self.kernel("cut_rows")
        for start, stop in _chunks(indptr):
            begin, end = indptr[start], indptr[stop]
            out = self.device.empty((stop - start, n_tiles - 1), np.int32)
            raw = self.device.upload(indices[begin:end])
            pointers = self.device.upload(indptr[start : stop + 1] - begin)
            sizes = (np.int64(stop - start), np.int64(n_tiles), np.int64(self.usable))
            kernel((ceil_div(out.size, 256),), (256,), (out, raw, pointers, *sizes), 0)
            offsets[start:stop, 1:-1] = self.device.download(out)
        return np.diff(offsets, axis=1)

    def _place(self, layout: PieceLayout, indptr: np.ndarray, indices: np.ndarray, ratings: np.ndarray) -> None:
        kernel = self.kernel("place")
        by_row = np.argsort(layout.pieces[:, 2], kind="stable")
        borders = np.searchsorted(layout.pieces[by_row, 2], np.arange(self.n_rows + 1))
        for start, stop in _chunks(indptr):
            begin, end = indptr[start], indptr[stop]
            chosen = by_row[borders[start] : borders[stop]]
            sources = np.column_stack((layout.sources[chosen], layout.tiles[chosen].astype(np.int64) * self.usable))
            sources[:, 0] -= begin
            raw = [self.device.upload(array[begin:end]) for array in (indices, ratings)]
            pieces, sources = self.device.upload(layout.pieces[chosen]), self.device.upload(sources)
            out = (self.indices, self.ratings)
            arguments = (*out, *raw, pieces, sources, np.int64(len(chosen)), np.int32(self.zero))
            kernel(_warps(len(chosen)), (WARP * WARPS_PER_BLOCK,), arguments, 0)


def _warps(n: int) -> tuple[int, ...]:
    return (ceil_div(n, WARPS_PER_BLOCK),)


def _chunks(indptr: np.ndarray) -> Iterator[tuple[int, int]]:
    """Consecutive rows (start, stop) with at most CHUNK_ENTRIES entries, or one longer row; no chunk is empty."""
    start, n = 0, len(indptr) - 1
    while indptr[start] < indptr[n]:
        stop = int(np.searchsorted(indptr, indptr[start] + ccd.CHUNK_ENTRIES, side="right")) - 1
        # a chunk may have empty rows before a longer one
        stop = stop if indptr[stop] > indptr[start] else int(np.searchsorted(indptr, indptr[start], side="right"))
        yield start, stop
        start = stop


# ---------------------------------------------------------------------------------------------- launches


Vectors = tuple[Array, Array, Array]
"""Coordinates of one side: new ones of the previous factor, which are subtracted; old ones of this factor, which are
added; and the regressor. Each (n + padding,), padded with zeros to 16 bytes."""


def rank_one(
    solved: Array, entries: CcdEntries, fixed: Vectors, own: Vectors, vectors: int, *,
    pending: bool, nonnegative: bool, bias: bool = False,
) -> None:  # fmt: skip
    """Compute the coordinates of all rows with entries from the residual, and update the residual.

    `solved`: written; rows without entries are not. No part of `fixed` or `own`, which the kernel reads as constants.
    `fixed`, `own`: the other side and this one, whose regressor is not read.
    `vectors`, {1, 2, 3}: vectors gathered from `fixed`. 1 (the regressor alone) does not change the residual, 2 uses
        the added one as the regressor.
    `pending`: whether the product of the previous factor is still in the residual.
    `bias`: whether the coordinates are biases, which have their own penalty.
    """
    if not len(entries.pieces):
        return
    device, real, (subtracted, added, regressor) = entries.device, entries.dtype, fixed
    lengths = {"solved": (solved, entries.n_rows), "fixed": (regressor, entries.n_fixed)}
    check_all(device, **{name: (array, real, (table_width(n, real),)) for name, (array, n) in lengths.items()})
    config = entries.config
    gathered, shared = (subtracted, added, regressor), vectors * config.tile * real.itemsize
    if not config.staged:
        packs = interleave(entries, fixed, vectors)
        gathered, shared = (packs, packs, packs), 0
    clipped, penalties = np.int32(nonnegative), entries.penalties[int(bias)]
    vectors_of = (solved, entries.residuals, entries.partials, *gathered, *own[:2], penalties)
    tables = (entries.indices, entries.pieces, entries.parts, entries.first_part)
    scalars = (np.int64(entries.n_fixed), np.int32(pending), clipped)
    grid = (len(entries.first_part) - 1,)
    entries.kernel("rank_one", vectors)(grid, (config.threads,), (*vectors_of, *tables, *scalars), shared)
    n_split = len(entries.split)
    if n_split:
        given = (solved, entries.partials, penalties, entries.split)
        lanes, threads = entries.combining_lanes, WARP * WARPS_PER_BLOCK
        sizes = (np.int64(n_split), np.int32(lanes))
        entries.kernel("combine")((ceil_div(n_split * lanes, threads),), (threads,), (*given, *sizes, clipped), 0)


def interleave(entries: CcdEntries, fixed: Vectors, vectors: int) -> Array:
    """Interleave the vectors that entries gather; shape (n_fixed + 1, 1, 2 or 4), the last row zeros."""
    n, real = entries.n_fixed, entries.dtype
    packs = entries.device.empty((n + 1, 4 if vectors == 3 else vectors), real)
    grid = (ceil_div(n + 1, 256),)
    entries.kernel("interleave", vectors)(grid, (256,), (packs, fixed, np.int64(n)), 0)
    return packs


def subtract_products(entries: CcdEntries, own: Array, fixed: Array) -> None:
    """residuals <- ratings - x.y for the rows x, y of two tables, in the dtype of the factors."""
    _for_each_piece("subtract_products", entries.residuals, entries, own, fixed)


def squared_errors(entries: CcdEntries, own: Array, fixed: Array) -> float:
    """Sum of ``(r - x.y)^2`` over all entries, in float64."""
    out = entries.device.empty(len(entries.pieces), np.float64)
    _for_each_piece("squared_errors", out, entries, own, fixed)
    return float(entries.device.download(out).sum())


def _for_each_piece(name: str, out: Array, entries: CcdEntries, own: Array, fixed: Array) -> None:
    n, width = len(entries.pieces), own.shape[1]
    if not n:
        return
    rows = {"own": (own, entries.n_rows), "fixed": (fixed, entries.n_fixed)}
    check_all(entries.device, **{name: (array, entries.dtype, (n, width)) for name, (array, n) in rows.items()})
    chunks = np.int32(width * entries.dtype.itemsize // 16)
    given = (out, entries.ratings, entries.indices, own, fixed, entries.pieces, entries.bases)
    arguments = (*given, np.int64(n), chunks, np.int32(entries.zero))
    entries.kernel(name)(_warps(n), (WARP * WARPS_PER_BLOCK,), arguments, 0)


def transpose(entries: CcdEntries, out: Array, array: Array, status: Array, n_rows: int, n_columns: int) -> None:
    """``out[r, c] = array[c, r]`` for ``r < n_rows, c < n_columns``; ``status[0] = 1`` if one of them is not finite."""
    shape = (None, None)
    check_all(
        entries.device,
        out=(out, entries.dtype, shape),
        array=(array, entries.dtype, shape),
        status=(status, np.int32, (1,)),
    )
    sizes = (np.int64(n_rows), np.int64(n_columns), np.int64(out.shape[1]), np.int64(array.shape[1]))
    grid = (ceil_div(n_columns, 32), ceil_div(n_rows, 32))
    entries.kernel("transpose")(grid, (256,), (out, array, status, *sizes), 0)


# ---------------------------------------------------------------------------------------------- solver


class GpuCCD(RankOneSolver):
    """CCD++ on one GPU: owns both copies of the residual. `configs`: default: those of `CcdConfig.choose`."""

    def __init__(
        self,
        device: Device,
        user_items: sp.csr_array,
        item_users: sp.csr_array,
        objective: Objective,
        plan: Plan,
        state: State,
        configs: dict[Side, CcdConfig] | None = None,
    ) -> None:
        super().__init__(objective, plan, state)
        self.device = device
        matrices: dict[Side, sp.csr_array] = {"user": user_items, "item": item_users}
        self.entries: dict[Side, CcdEntries] = {}
        for side in SIDES:
            matrix = matrices[side]
            if configs is not None:
                config = configs[side]
            else:
                (n_rows, n_fixed), vectors = matrix.shape, VECTORS[side]
                config = CcdConfig.choose(n_rows, n_fixed, matrix.nnz, vectors, matrix.dtype, device.spec)
            with device.active():
                self.entries[side] = CcdEntries(device, side, matrix, objective, config)
        self.width = table_width(plan.rank, user_items.dtype)
        users, items = (to_device(device, state.side(side), self.width) for side in SIDES)
        self.state = State(users, items, state.mean)

    def active(self) -> AbstractContextManager[None]:
        return self.device.active()

    def columns_of_state(self) -> dict[Side, list[Array]]:
        """See `RankOneSolver`: column t is at t + 1, and its new values go to t, so that both can be read."""
        tables = {side: self._scoring_table(side) for side in SIDES}
        for side in SIDES:
            subtract_products(self.entries[side], tables[side], tables[other_side(side)])
        self._coordinates = {side: self._columns(side) for side in SIDES}
        return {side: list(coordinates) for side, coordinates in self._coordinates.items()}

    def _held(self, side: Side) -> DeviceFactors:
        return to_device(self.device, self.state.side(side), self.width)

    def _scoring_table(self, side: Side) -> Array:
        """Rows whose inner products are the predictions; see `scoring_rows`."""
        held, factors = self._held(side), self.plan.factors
        table, bias = held.table, held.device_bias
        if bias is None:
            return table
        out = self.device.zeros((len(table), table_width(factors + 2, table.dtype)), table.dtype)
        arrays.copy(self.device, out[:, :factors], table[:, :factors])
        own, other = (factors, factors + 1) if side == "user" else (factors + 1, factors)
        offsets = arrays.added(self.device, bias, self.state.mean if side == "user" else 0)
        arrays.copy(self.device, out[:, own : own + 1], offsets.reshape(-1, 1))
        arrays.fill(self.device, out[:, other : other + 1], 1)
        return out

    def _columns(self, side: Side) -> Array:
        """Coordinates by column; rows without entries are zero in all of them."""
        entries, factors, held = self.entries[side], self.plan.factors, self._held(side)
        first, n = len(self.biases), entries.n_rows
        out = self.device.zeros((first + factors + 1, table_width(n, entries.dtype)), entries.dtype)
        for column, biased in enumerate(self.biases):
            if biased == side:
                arrays.copy(self.device, out[1 + column, :n], held.device_bias)
            else:
                arrays.fill(self.device, out[1 + column, :n], 1)
        status = self.device.zeros(1, np.int32)
        transpose(entries, out[1 + first :], held.table, status, factors, n)
        if not entries.degrees.all():
            out[:, self.device.upload(np.flatnonzero(entries.degrees == 0))] = 0
        return out

    def factors(self, side: Side, columns: list[Array]) -> DeviceFactors:
        solved_columns = self._coordinates.pop(side)
        entries, factors, first = self.entries[side], self.plan.factors, len(self.biases)
        table = self.device.zeros((entries.n_rows, self.width), entries.dtype)
        status = self.device.zeros(1, np.int32)
        transpose(entries, table, solved_columns[first:], status, entries.n_rows, factors)
        bias = None
        if self.biases:
            arrays.fill(self.device, table[:, factors : factors + 1], 1)
            bias = self.device.zeros((entries.n_rows, 1), entries.dtype)
            transpose(entries, bias, solved_columns[self.biases.index(side) :], status, entries.n_rows, 1)
            bias = bias.reshape(-1)
        solved = DeviceFactors(self.device, table, factors, bias)
        failed = self.device.download(status)[0]
        solved.keep(settled=True)
        if failed:
            if solved.bias is not None and not np.isfinite(solved.bias).all():
                raise non_finite(self.objective, side, int(np.argmin(np.isfinite(solved.bias))), None)
            raise non_finite(self.objective, side, *np.argwhere(~np.isfinite(solved.matrix))[0])
        return solved

    def update(self, side: Side, columns: dict[Side, list[Array]], column: int, inner: int) -> None:
        other, bias = other_side(side), self.is_bias(column)
        old, new = columns[side][column + 1], columns[side][column]
        other_old, other_new = columns[other][column + 1], columns[other][column]
        pending = column > 0  # a residual that was just computed has no pending product
        before, other_before = (columns[side][column - 1], columns[other][column - 1]) if pending else (old, other_old)
        met = other_new if inner or side == "user" else other_old
        fixed, vectors = ((met, met, met), 1) if inner else ((other_before, other_old, met), VECTORS[side])
        how = {"pending": pending, "nonnegative": self.method.nonnegative and not bias, "bias": bias}
        rank_one(new, self.entries[side], fixed, (before, old, old), vectors, **how)
        if not self.solves(side, column):
            arrays.copy(self.device, new, old)  # also the ones that multiply biases

    def objective_value(self) -> float:
        with self.device.active():
            users, items = (self._scoring_table(side) for side in SIDES)
            total = squared_errors(self.entries["user"], users, items)
            for side in SIDES:
                total += self._held(side).penalty(self.device, self.objective, side, self.entries[side].degrees)
            return total
