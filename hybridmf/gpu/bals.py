"""Launch of cuda/bals.cu: the BALS kernel (BALS, Algorithm 2) over matrix tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device, DeviceSpec
from ..formats import BalsMatrix
from ..plan.assemblies import MAX_GRID_Y, MAX_THREADS, BalsConfig, available_registers, lower_tiles, require_square_tile
from ..plan.tables import KernelConfig, require
from .assembly import check_factors
from .launch import DeviceEntries, check, check_all, get_kernel
from .systems import Sums

Variant = Literal["chip", "local"]


@dataclass(frozen=True)
class BalsTiles:
    """The arrays of a `hybridmf.formats.BalsMatrix` on a device."""

    values: Array  # float (nnz,)
    tile_colidx: Array  # int32 (nnz - redundancy,)
    tile_ptr: Array  # int64 (n_tiles + 1,)
    seg_colidx: Array  # int32 (nnz,)
    seg_ptr: Array  # int64 (n_rows * n_tile_cols + 1,)
    shape: tuple[int, int]
    tile_rows: int
    tile_cols: int

    @property
    def tiles_across(self) -> int:
        return ceil_div(self.shape[1], self.tile_cols)


def upload_tiles(device: Device, bals: BalsMatrix) -> BalsTiles:
    return BalsTiles(
        values=device.upload(bals.values),
        tile_colidx=device.upload(bals.tile_colidx),
        tile_ptr=device.upload(bals.tile_ptr.astype(np.int64, copy=False)),
        seg_colidx=device.upload(bals.seg_colidx),
        seg_ptr=device.upload(bals.seg_ptr.astype(np.int64, copy=False)),
        shape=bals.shape,
        tile_rows=bals.tile_rows,
        tile_cols=bals.tile_cols,
    )


LOCAL_REGISTERS = {4: 16, 8: 28}
"""Registers of a thread of the paper's mapping beside its sums, operands and two for each round of rows.

By the bytes of an item; counted for sm_90.
"""

LOCAL_BLOCKS = ((512, 2), (1024, 1), (256, 3), (256, 2), (512, 1), (256, 1))
"""Threads of a block and blocks of a multiprocessor in that mapping, in order of preference.

With Netflix's shape, f = 32, tiles of 256 x 192 and nb = 8, the first took 34.9 ms on an H100, the others 41 to 57,
and nb = 16 with sums in local memory 57.5.
"""


@dataclass(frozen=True)
class BalsLocalConfig(KernelConfig):
    """Compile-time choices of cuda/bals.cu with ACCUMULATORS=local, the mapping of the paper (section 4.2)."""

    rank: int
    itemsize: int  # 4 for float32, 8 for float64
    # tile_rows, tile_cols: the matrix tile, the paper's xb and yb
    tile_rows: int
    tile_cols: int
    nb: int  # rows and columns of a tile of a row's system
    # dx, dy: threads along the columns and rows of that tile
    dx: int
    dy: int
    dz: int  # rows of the matrix tile processed at a time
    blocks_per_sm: int = 1  # minimum resident blocks per multiprocessor, which bounds the registers of a thread

    names: ClassVar[dict[str, str]] = {"itemsize": ""}

    def check(self) -> None:
        require_square_tile(self)
        require(self.tiles <= MAX_GRID_Y, f"nb={self.nb} gives {self.tiles} tiles, more than {MAX_GRID_Y}")

    @classmethod
    def rule(
        cls, rank: int, itemsize: int, spec: DeviceSpec, *, tile_rows: int = 256, tile_cols: int = 192
    ) -> BalsLocalConfig:
        """The choice with nb = 8 and 2 x 2 threads per row if its sums fit in registers; else that of the paper.

        With nb = 4, sums of taller tiles fit, too, but 768 x 384 then took 72 ms, and 54 with nb = 16 in local memory.
        """
        nb = 8 if rank > 4 else 4
        for threads, blocks in LOCAL_BLOCKS:
            dz = min(threads // 4, ceil_div(tile_rows, 2) * 2)
            config = cls(rank, itemsize, tile_rows, tile_cols, nb, 2, 2, dz, blocks)
            if config.in_registers and config.shared_bytes * blocks <= spec.shared_bytes:
                return config
        return cls.published(rank, itemsize, spec, tile_rows=tile_rows, tile_cols=tile_cols)

    @classmethod
    def published(
        cls, rank: int, itemsize: int, spec: DeviceSpec, *, tile_rows: int = 256, tile_cols: int = 192
    ) -> BalsLocalConfig:
        """The choice of the paper: nb = 16, 4 x 4 threads per row, 64 rows at a time; smaller nb for wide tiles."""
        for nb in (16, 8, 4):
            side = min(4, nb // 2)
            dz = min(MAX_THREADS // side**2, ceil_div(tile_rows, 2) * 2)
            config = cls(rank, itemsize, tile_rows, tile_cols, nb, side, side, dz)
            if config.shared_bytes <= spec.shared_bytes and (nb == 4 or nb // 2 < rank):
                return config
        raise ValueError(
            f"tile_cols={tile_cols} columns of nb={nb} factors do not fit in {spec.shared_bytes} bytes of shared "
            f"memory; use tile_cols <= {(spec.shared_bytes - config.starts_bytes) // (2 * nb * itemsize)}"
        )

    @property
    def tiles(self) -> int:
        return lower_tiles(self.rank, self.nb)

    @property
    def threads(self) -> int:
        return self.dx * self.dy * self.dz

    @property
    def sums(self) -> int:
        """Sums of a thread: its part of a tile and of a right-hand side, for each of its rows."""
        nb, dx, dy = self.nb, self.dx, self.dy
        return self.rounds * (nb // dx * (nb // dy) + ceil_div(nb, dx * dy))

    @property
    def rounds(self) -> int:
        return ceil_div(self.tile_rows, self.dz)

    @property
    def in_registers(self) -> bool:
        """Whether a thread's sums fit in its registers; otherwise they are in local memory."""
        operands = self.nb // self.dx + self.nb // self.dy
        needed = (self.sums + operands) * self.itemsize // 4 + LOCAL_REGISTERS[self.itemsize] + 2 * self.rounds
        return needed <= available_registers(self.threads, self.blocks_per_sm)

    @property
    def starts_bytes(self) -> int:
        """Shared memory for the starts of the segments of a matrix tile."""
        return (self.tile_rows + 1) * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the paper's sY1 and sY2, and the starts of segments."""
        panels = 2 if self.tiles > 1 else 1
        return panels * self.tile_cols * self.nb * self.itemsize + self.starts_bytes

    @property
    def constants(self) -> dict[str, Any]:
        return {"ACCUMULATORS": "local", "UNROLLED": self.in_registers} | super().constants


def bals(
    device: Device,
    sums: Sums,
    factors: Array,
    entries_of_tiles: DeviceEntries,
    blocks: RowBlocks,
    config: BalsConfig | BalsLocalConfig | Variant | None = None,
    *,
    tiles: BalsTiles,
    local: bool = False,
    skip_vacant: bool = True,
) -> None:
    """Sums of each row of some row blocks by the BALS kernel (Algorithm 2).

    `sums`, `factors`: as for `sum_segments`; a slot for each row of the blocks.
    `entries_of_tiles`: offsets, implicit, alpha and unobserved_weight of the entries; indices and ratings are those of
        `tiles`.
    `config`: sums in registers ("chip"), or mapped to threads as in the paper and kept in local memory ("local"). A
        name selects the default configuration; None that of `local`.
    `skip_vacant`: skip a vacant tile after one test. False, with sums in local memory only, measures the benefit (6.4).
    """
    rank = _check_tiles(device, sums, factors, entries_of_tiles, tiles, blocks)
    dtype, tile_rows, tile_cols = np.dtype(factors.dtype), tiles.tile_rows, tiles.tile_cols
    config = config or ("local" if local else "chip")
    kinds: dict[str, Callable[..., BalsConfig | BalsLocalConfig]] = {
        "local": partial(BalsLocalConfig.default, tile_rows=tile_rows),
        "chip": BalsConfig.default,
    }
    if isinstance(config, str):
        require(config in kinds, f'config must be a configuration, "chip" or "local", got {config!r}')
        config = kinds[config](rank, dtype.itemsize, device.spec, tile_cols=tile_cols)
    config.require_match(rank, dtype)
    config.require_fit(device.spec)
    if isinstance(config, BalsConfig):
        require(
            config.capacity >= min(tile_cols, tiles.shape[1]),
            f"capacity={config.capacity} factor rows cannot hold those of a tile of tile_cols={tile_cols}",
        )
        grid = (blocks.count * ceil_div(tile_rows, config.rows), config.parts)
    else:
        require(
            (config.tile_rows, config.tile_cols) == (tile_rows, tile_cols),
            f"config is for tiles of {config.tile_rows} x {config.tile_cols}, these are {tile_rows} x {tile_cols}",
        )
        grid = (blocks.count, config.tiles)
    require(skip_vacant or isinstance(config, BalsLocalConfig), 'skip_vacant=False needs config="local"')
    if not len(blocks):
        return
    switches = {} if skip_vacant else {"SKIP_VACANT": False}
    kernel = get_kernel(device, "bals.cu", "bals", **config.constants, **entries_of_tiles.constants, **switches)
    offsets = tiles.values if entries_of_tiles.offsets is None else entries_of_tiles.offsets
    arrays = (tiles.values, tiles.tile_colidx, tiles.tile_ptr, tiles.seg_colidx, tiles.seg_ptr, offsets)
    sizes = (np.int64(blocks.first), np.int64(tiles.shape[0]), np.int32(tiles.tiles_across), np.int32(tile_rows))
    arguments = (*sums, factors, *arrays, *sizes, np.int32(factors.shape[1]), *entries_of_tiles.scalars)
    kernel(grid, (config.threads,), arguments, config.shared_bytes)


def _check_tiles(
    device: Device, sums: Sums, factors: Array, entries: DeviceEntries, tiles: BalsTiles, those: RowBlocks
) -> int:
    """Check the arguments of `bals`; return the rank."""
    n_rows, n_cols = tiles.shape
    blocks = ceil_div(n_rows, tiles.tile_rows)
    require(
        0 <= those.first <= those.first + those.count <= blocks,
        f"blocks.first={those.first} and blocks.count={those.count} are not within the {blocks} row blocks there are",
    )
    rows = RowBlocks.of(tiles, those.first, those.count).rows
    require(those.rows == rows, f"blocks.rows={those.rows} is not the number of rows of these blocks, {rows}")
    dtype = tiles.values.dtype
    rank = check_factors(device, sums, rows, factors, dtype)
    check("ratings", entries.ratings, dtype, (None,))
    require(len(factors) == n_cols, f"factors has {len(factors)} rows; tiles has {n_cols} columns")
    arrays = {
        "values": (tiles.values, dtype, (None,)),
        "tile_ptr": (tiles.tile_ptr, np.int64, (blocks * tiles.tiles_across + 1,)),
        "seg_ptr": (tiles.seg_ptr, np.int64, (n_rows * tiles.tiles_across + 1,)),
        "tile_colidx": (tiles.tile_colidx, np.int32, (None,)),
        "seg_colidx": (tiles.seg_colidx, np.int32, (len(tiles.values),)),
    }
    check_all(device, **{f"tiles.{name}": expected for name, expected in arrays.items()})
    check_all(device, offsets=(entries.offsets, dtype, (n_cols,)))
    return rank


@dataclass(frozen=True)
class RowBlocks:
    """Row blocks whose rows are summed together; takes the place of segments."""

    # first, count: row blocks
    first: int
    count: int
    rows: int  # rows in them

    @classmethod
    def of(cls, tiles: BalsTiles, first: int, count: int) -> RowBlocks:
        """Some row blocks of tiles; the last row block of the matrix may be shorter."""
        n_rows, size = tiles.shape[0], tiles.tile_rows
        return cls(first, count, max(0, min((first + count) * size, n_rows) - first * size))

    def __len__(self) -> int:
        return self.rows
