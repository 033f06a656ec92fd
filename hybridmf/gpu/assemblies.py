"""Launches of the published assemblies of normal equations: Gates' sparse-syrk, cuMF's MO-ALS, BALS.

Each sums ``matrices[slot] = sum outer y y^T`` (lower triangle) and ``rhs[slot] = sum linear y`` over entries; Gram
matrix and ridge are added elsewhere. The configurations hold every compile-time choice and say what is wrong with one
that cannot work, so that a tuner can enumerate them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device, DeviceSpec
from ..formats import BalsMatrix
from ..plan.assemblies import (
    BUSY_WARPS,
    MAX_GRID_Y,
    MAX_THREADS,
    RESERVED,
    WARP,
    BalsConfig,
    _lower_tiles,
    _require,
    _require_positive,
    _require_registers,
    _require_threads,
    _resident_warps,
    _tile_size,
    _tuned,
)
from .launch import Entries, check, check_not_host, get_kernel

Variant = Literal["chip", "local"]


def require_fit(config: Any, spec: DeviceSpec) -> None:
    """A configuration's shared memory must fit in a block of the device.

    Raises
    ------
    ValueError
    """
    _require(
        config.shared_bytes <= spec.shared_bytes,
        f"{config} needs {config.shared_bytes} bytes of shared memory a block, {spec.name} has {spec.shared_bytes}",
    )


def _require_match(config: Any, rank: int, dtype: np.dtype[Any]) -> None:
    _require(
        config.rank == rank and config.itemsize == dtype.itemsize,
        f"config is for rank {config.rank} and items of {config.itemsize} bytes; these have rank {rank} and "
        f"{dtype.itemsize} bytes",
    )


# ---------------------------------------------------------------------------------------------------- sparse-syrk


def warp_shape(nb: int, dx: int, dy: int, dz: int) -> tuple[int, int]:
    """Threads of a warp along the columns and rows of a tile, where ``dx * dy * dz`` is a multiple of 32.

    The rest of a warp are neighbouring groups, two where possible. A warp loads the fewest factors where its patch of
    the tile is a square.
    """
    for groups in (2, 1, 4, 8, 16, 32):
        shapes = [(wx, WARP // groups // wx) for wx in (1, 2, 4, 8, 16, 32) if groups * wx <= WARP]
        fits = [(wx, wy) for wx, wy in shapes if dz % groups == 0 and dx % wx == 0 and dy % wy == 0]
        if fits:
            return min(fits, key=lambda shape: shape[0] * (nb // dx) + shape[1] * (nb // dy))
    raise AssertionError(f"{dx} x {dy} x {dz} threads are no multiple of {WARP}")


@dataclass(frozen=True)
class SyrkConfig:
    """Compile-time choices of cuda/sparse_syrk.cu (Gates et al., section V; constraints: section VIII).

    Attributes
    ----------
    rank : int
        Order of the matrices; decides only how much is staged.
    itemsize : int
        4 for float32, 8 for float64.
    nb : int
        Rows and columns of a tile of a matrix.
    kb : int
        Entries staged at a time.
    dx, dy : int
        Threads along the columns and rows of a tile.
    dz : int
        Groups of ``dx * dy`` threads that share the entries of a stage.
    stages : int
        Stages on their way or in use.
    unroll : int
        Entries of a group whose loads from shared memory may overlap.
    blocks_per_sm : int
        Blocks on a multiprocessor, which bounds the registers of a thread.

    Raises
    ------
    ValueError
        Says which constraint is broken.
    """

    rank: int
    itemsize: int
    nb: int
    kb: int
    dx: int
    dy: int
    dz: int = 1
    stages: int = 2
    unroll: int = 2
    blocks_per_sm: int = 1

    def __post_init__(self) -> None:
        _require_positive(self)
        nb, kb, dx, dy, dz = self.nb, self.kb, self.dx, self.dy, self.dz
        _require(nb % dx == 0 and nb % dy == 0, f"nb={nb} must be a multiple of dx={dx} and dy={dy}")
        _require(kb % dz == 0, f"kb={kb} must be a multiple of dz={dz}")
        _require(dz & (dz - 1) == 0, f"dz={dz} must be a power of two: groups are added pairwise")
        _require(nb * self.itemsize % 16 == 0, f"nb={nb} must be a multiple of 16 bytes, items have {self.itemsize}")
        _require_threads(self.threads, "dx * dy * dz")
        _require(self.threads % WARP == 0, f"dx * dy * dz = {self.threads} threads must be a multiple of {WARP}")
        chunks = nb * self.itemsize // 16
        _require(
            self.threads >= chunks, f"{self.threads} threads are too few to copy the {chunks} x 16 bytes of an entry"
        )
        _require(self.stages >= 2, f"stages={self.stages} must be at least 2: one is summed while others arrive")
        tx, ty = nb // dx, nb // dy
        _require_registers(tx * ty, tx + ty, self.threads, self.itemsize, self.blocks_per_sm)

    @classmethod
    def default(cls, rank: int, itemsize: int, spec: DeviceSpec) -> SyrkConfig:
        """The tuned choice for a device, or what the rule says."""
        return _tuned(cls, "sparse_syrk", rank, itemsize, spec) or cls.rule(rank, itemsize, spec)

    @classmethod
    def rule(cls, rank: int, itemsize: int, spec: DeviceSpec) -> SyrkConfig:
        """The choice where no table knows better: 8 x 8 sums a thread in float32, 8 x 4 in float64 where it can."""
        double = itemsize == 8
        if rank <= 8:
            nb, dx, dy, dz, blocks = 8, 2, 2, 8, 16
        elif rank <= 16:
            nb, dx, dy, dz, blocks = (16, 4, 4, 2, 16) if double else (16, 4, 2, 4, 24)
        elif rank <= 32:
            nb, dx, dy, dz, blocks = (32, 8, 4, 1, 12) if double else (32, 4, 4, 2, 16)
        elif 64 < rank <= 96 and not double:
            # one tile, a third of whose warps have nothing to sum, beats three tiles that stage factors twice
            nb, dx, dy, dz, blocks = 96, 24, 12, 1, 3
        else:
            nb, dx, dy, dz, blocks = (64, 16, 8, 1, 3) if double else (64, 8, 8, 2, 4)
        kb = 24 if nb == 96 else 32 // (itemsize // 4)
        unroll = {8: 4, 96: 1}.get(nb, 2)  # as far as registers go
        blocks = min(blocks, 16) if spec.capability < (8, 0) else blocks  # Turing holds no more
        config = cls(rank, itemsize, nb, kb, dx, dy, dz, 2, unroll, blocks)
        while config.blocks_per_sm * (config.shared_bytes + RESERVED) > spec.shared_bytes and config.kb > 8:
            config = replace(config, kb=config.kb // 2)
        return config

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.dx * self.dy * self.dz

    @property
    def tiles(self) -> int:
        """Tiles of the lower triangle of a matrix."""
        along = ceil_div(self.rank, self.nb)
        return along * (along + 1) // 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        panels = 2 if self.tiles > 1 else 1
        staged = self.stages * self.kb * (panels * self.nb + 2)
        group = self.dx * self.dy
        exchanged = self.dz // 2 * (self.nb**2 + group * ceil_div(self.nb, group))
        return self.itemsize * max(staged, exchanged)

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        wx, wy = warp_shape(self.nb, self.dx, self.dy, self.dz)
        return {
            "NB": self.nb,
            "KB": self.kb,
            "DX": self.dx,
            "DY": self.dy,
            "DZ": self.dz,
            "WX": wx,
            "WY": wy,
            "STAGES": self.stages,
            "UNROLL": self.unroll,
            "BLOCKS_PER_SM": self.blocks_per_sm,
        }


def sparse_syrk(
    device: Device,
    matrices: Array,
    rhs: Array,
    factors: Array,
    entries: Entries,
    segments: Array,
    rank: int,
    config: SyrkConfig | None = None,
) -> None:
    """Sums of each segment of entries by Gates' batched sparse-syrk (section V, fig. 9).

    Parameters
    ----------
    device : Device
    matrices : float array, shape (n_slots, rank, rank)
        Written: lower triangles; what is above the diagonal is undefined.
    rhs : float array, shape (n_slots, rank)
        Written.
    factors : float array, shape (n_fixed, ld)
        ``ld >= rank``, rows a multiple of 16 bytes; columns from `rank` on are not used.
    entries : Entries
    segments : int64 array, shape (n_segments, 3)
        Slot, begin and end of each; every slot once, longest first is fastest.
    rank : int
    config : SyrkConfig, optional

    Raises
    ------
    TypeError
        An array is not what the kernel reads.
    ValueError
        The configuration is for something else or does not fit on the device.
    """
    n_segments = _check_arrays(device, matrices, rhs, factors, entries, segments, rank)
    dtype = np.dtype(factors.dtype)
    config = config or SyrkConfig.default(rank, dtype.itemsize, device.spec)
    _require_match(config, rank, dtype)
    require_fit(config, device.spec)
    _require(config.tiles <= MAX_GRID_Y, f"nb={config.nb} gives {config.tiles} tiles, more than {MAX_GRID_Y}")
    if not n_segments:
        return
    kernel = get_kernel(device, "sparse_syrk.cu", "sparse_syrk", **config.constants, **entries.constants)
    arguments = (matrices, rhs, factors, *entries.arrays, segments)
    sizes = (np.int32(rank), np.int32(factors.shape[1]))
    kernel((n_segments, config.tiles), (config.threads,), (*arguments, *sizes, *entries.scalars), config.shared_bytes)


def _check_factors(factors: Array, dtype: Any, rank: int) -> None:
    check("factors", factors, dtype, (None, None))
    ld = factors.shape[1]
    if ld < rank or ld * np.dtype(dtype).itemsize % 16:
        raise TypeError(
            f"factors must have rows of at least rank={rank} columns and a multiple of 16 bytes; got {ld} columns of "
            f"{np.dtype(dtype).name}"
        )


def _check_arrays(
    device: Device, matrices: Array, rhs: Array, factors: Array, entries: Entries, segments: Array, rank: int
) -> int:
    """Judge what both kernels over segments read and write; the number of segments."""
    dtype = entries.ratings.dtype
    check("matrices", matrices, dtype, (None, rank, rank))
    check("rhs", rhs, dtype, (len(matrices), rank))
    _check_factors(factors, dtype, rank)
    check("indices", entries.indices, np.int32, (None,))
    check("ratings", entries.ratings, dtype, (len(entries.indices),))
    check("segments", segments, np.int64, (None, 3))
    arrays = {"matrices": matrices, "rhs": rhs, "factors": factors, "indices": entries.indices}
    arrays |= {"ratings": entries.ratings, "segments": segments}
    if entries.offsets is not None:
        check("offsets", entries.offsets, dtype, (len(factors),))
        arrays["offsets"] = entries.offsets
    check_not_host(device, **arrays)
    return len(segments)


# ---------------------------------------------------------------------------------------------------- MO-ALS


@dataclass(frozen=True)
class MoAlsConfig:
    """Compile-time choices of cuda/mo_als.cu (cuMF, Algorithm 2, sections 3.3 and 3.4).

    Attributes
    ----------
    rank : int
    itemsize : int
        4 for float32, 8 for float64.
    tile : int
        Rows and columns of a thread's tile of the lower triangle.
    bin : int
        Entries staged at a time.
    groups : int
        Teams of threads that share the entries of a bin.
    part_tiles : int
        Tiles of a block; fewer than the lower triangle has: several blocks share a segment.
    blocks_per_sm : int
        Blocks on a multiprocessor, which bounds the registers of a thread.

    Raises
    ------
    ValueError
        Says which constraint is broken.
    """

    rank: int
    itemsize: int
    tile: int
    bin: int
    groups: int
    part_tiles: int
    blocks_per_sm: int = 1

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(
            self.tile * self.itemsize % 16 == 0, f"tile={self.tile} must be a multiple of {16 // self.itemsize} items"
        )
        _require(self.part_tiles <= self.tiles, f"part_tiles={self.part_tiles} exceeds the {self.tiles} there are")
        _require(self.bin % self.groups == 0, f"bin={self.bin} must be a multiple of groups={self.groups}")
        _require_threads(self.threads, "groups * part_tiles in full warps")
        _require(self.bin <= self.threads, f"bin={self.bin} must not exceed the {self.threads} threads of a block")
        _require(
            self.chunks <= self.threads,
            f"{self.threads} threads are too few to load the {self.chunks} x 16 bytes of an entry",
        )
        _require_registers(self.tile**2, 2 * self.tile, self.threads, self.itemsize, self.blocks_per_sm)

    @classmethod
    def default(cls, rank: int, itemsize: int, spec: DeviceSpec, *, registers: bool = True) -> MoAlsConfig:
        """The fewest idle lanes with enough warps on a multiprocessor."""
        tile = _tile_size(rank, itemsize)
        tiles, chunks = _lower_tiles(rank, tile), ceil_div(rank, tile) * tile * itemsize // 16
        resident = _resident_warps(tile, itemsize)
        best: tuple[float, int, int, int] = (0.0, 1, 1, 1)
        fewest = ceil_div(tiles, resident * WARP)
        for parts in range(fewest, fewest + 4):
            for groups in range(1, 5 if registers and parts == 1 else 2):
                part_tiles = ceil_div(tiles, parts)
                warps = ceil_div(part_tiles * groups, WARP)
                if warps > resident or warps * WARP < chunks:
                    continue
                busy = min(1.0, resident // warps * warps / BUSY_WARPS)
                score = busy * tiles * groups / (ceil_div(tiles, part_tiles) * warps * WARP)
                if score > best[0] + 0.03:  # more groups or parts must pay for their sums or loads
                    best = (score, groups, part_tiles, warps)
        _, groups, part_tiles, warps = best
        loaded = warps * WARP // chunks
        # a few entries a barrier, but what is under way takes registers
        sizes = [k * loaded for k in (1, 2, 3, 4) if k * loaded % groups == 0 and k * loaded <= 32]
        sizes = sizes or [max(groups, min(loaded, 32) // groups * groups)]
        size = next((size for size in sizes if size >= 8), sizes[-1])
        return cls(rank, itemsize, tile, size, groups, part_tiles, max(1, min(16, resident // warps)))

    @property
    def tiles(self) -> int:
        """Tiles of the lower triangle."""
        return _lower_tiles(self.rank, self.tile)

    @property
    def parts(self) -> int:
        """Blocks that share a segment."""
        return ceil_div(self.tiles, self.part_tiles)

    @property
    def chunks(self) -> int:
        """Loads of 16 bytes of an entry."""
        return ceil_div(self.rank, self.tile) * self.tile * self.itemsize // 16

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return ceil_div(self.part_tiles * self.groups, WARP) * WARP

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        padded, chunk = ceil_div(self.rank, self.tile) * self.tile, 16 // self.itemsize
        staged = 2 * self.bin * (padded + 2)
        sums = self.tile**2 + ceil_div(self.chunks, self.part_tiles) * chunk
        return self.itemsize * max(staged, self.groups // 2 * self.part_tiles * sums)

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        return {
            "RANK": self.rank,
            "TILE": self.tile,
            "BIN": self.bin,
            "GROUPS": self.groups,
            "PART_TILES": self.part_tiles,
            "BLOCKS_PER_SM": self.blocks_per_sm,
        }


def mo_als(
    device: Device,
    matrices: Array,
    rhs: Array,
    factors: Array,
    entries: Entries,
    segments: Array,
    rank: int,
    config: MoAlsConfig | None = None,
    *,
    read_only: bool = True,
    registers: bool = True,
) -> None:
    """Sums of each segment of entries by cuMF's MO-ALS (Algorithm 2).

    Parameters
    ----------
    device, matrices, rhs, factors, entries, segments, rank
        As for `sparse_syrk`.
    config : MoAlsConfig, optional
    read_only : bool
        Read factors through the read-only path, cached in L1 (the paper's texture memory, fig. 8).
    registers : bool
        Sum in registers; False: in global memory, which the paper compares with (fig. 7).

    Raises
    ------
    TypeError
        An array is not what the kernel reads.
    ValueError
        The configuration is for something else or does not fit on the device.
    """
    n_segments = _check_arrays(device, matrices, rhs, factors, entries, segments, rank)
    dtype = np.dtype(factors.dtype)
    config = config or MoAlsConfig.default(rank, dtype.itemsize, device.spec, registers=registers)
    _require_match(config, rank, dtype)
    require_fit(config, device.spec)
    _require(
        registers or config.groups == 1,
        f"registers=False needs groups=1, an element of global memory has one owner; got groups={config.groups}",
    )
    if not n_segments:
        return
    switches = {"READ_ONLY": read_only, "REGISTERS": registers}
    kernel = get_kernel(device, "mo_als.cu", "mo_als", **config.constants, **entries.constants, **switches)
    arguments = (matrices, rhs, factors, *entries.arrays, segments, np.int32(factors.shape[1]), *entries.scalars)
    kernel((n_segments, config.parts), (config.threads,), arguments, config.shared_bytes)


# ---------------------------------------------------------------------------------------------------- BALS


@dataclass(frozen=True)
class BalsTiles:
    """The arrays of a `hybridmf.formats.BalsMatrix` on a device.

    Attributes
    ----------
    values : float array, shape (nnz,)
    tile_colidx : int32 array, shape (nnz - redundancy,)
    tile_ptr : int64 array, shape (n_tiles + 1,)
    seg_colidx : int32 array, shape (nnz,)
    seg_ptr : int64 array, shape (n_rows * n_tile_cols + 1,)
    shape : (n_rows, n_cols)
    tile_rows, tile_cols : int
    """

    values: Array
    tile_colidx: Array
    tile_ptr: Array
    seg_colidx: Array
    seg_ptr: Array
    shape: tuple[int, int]
    tile_rows: int
    tile_cols: int

    @property
    def tiles_across(self) -> int:
        """Tiles of a row block."""
        return ceil_div(self.shape[1], self.tile_cols)


def upload_tiles(device: Device, bals: BalsMatrix) -> BalsTiles:
    """Copy a BalsMatrix to a device; its pointers become int64."""
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


@dataclass(frozen=True)
class BalsLocalConfig:
    """Compile-time choices of cuda/bals.cu with ACCUMULATORS=local, the mapping of the paper (section 4.2).

    Attributes
    ----------
    rank : int
    itemsize : int
        4 for float32, 8 for float64.
    tile_rows, tile_cols : int
        The matrix tile, the paper's xb and yb.
    nb : int
        Rows and columns of a tile of a row's system.
    dx, dy : int
        Threads along the columns and rows of that tile.
    dz : int
        Rows of the matrix tile in work at a time.

    Raises
    ------
    ValueError
        Says which constraint is broken.
    """

    rank: int
    itemsize: int
    tile_rows: int
    tile_cols: int
    nb: int
    dx: int
    dy: int
    dz: int

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(
            self.nb % self.dx == 0 and self.nb % self.dy == 0,
            f"nb={self.nb} must be a multiple of dx={self.dx} and dy={self.dy}",
        )
        _require(self.nb * self.itemsize % 16 == 0, f"nb={self.nb} must be a multiple of {16 // self.itemsize} items")
        _require_threads(self.threads, "dx * dy * dz")
        _require(self.tiles <= MAX_GRID_Y, f"nb={self.nb} gives {self.tiles} tiles, more than {MAX_GRID_Y}")

    @classmethod
    def default(
        cls, rank: int, itemsize: int, spec: DeviceSpec, *, tile_rows: int = 256, tile_cols: int = 192
    ) -> BalsLocalConfig:
        """The paper's kind of choice: nb = 16, 4 x 4 threads a row, 64 rows at a time; nb smaller for wide tiles.

        Raises
        ------
        ValueError
            The tile is too wide for any nb.
        """
        for nb in (16, 8, 4):
            side = min(4, nb // 2)
            dz = min(MAX_THREADS // side**2, -(-tile_rows // 2) * 2)
            config = cls(rank, itemsize, tile_rows, tile_cols, nb, side, side, dz)
            if config.shared_bytes <= spec.shared_bytes and (nb == 4 or nb // 2 < rank):
                return config
        raise ValueError(
            f"tile_cols={tile_cols} columns of nb={nb} factors do not fit in {spec.shared_bytes} bytes of shared "
            f"memory; use tile_cols <= {spec.shared_bytes // (2 * nb * itemsize)}"
        )

    @property
    def tiles(self) -> int:
        """Tiles of the lower triangle of a row's system."""
        return _lower_tiles(self.rank, self.nb)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.dx * self.dy * self.dz

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the paper's sY1 and sY2."""
        return (2 if self.tiles > 1 else 1) * self.tile_cols * self.nb * self.itemsize

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        return {
            "ACCUMULATORS": "local",
            "RANK": self.rank,
            "TILE_ROWS": self.tile_rows,
            "TILE_COLS": self.tile_cols,
            "NB": self.nb,
            "DX": self.dx,
            "DY": self.dy,
            "DZ": self.dz,
        }


def bals(
    device: Device,
    matrices: Array,
    rhs: Array,
    factors: Array,
    entries_of_tiles: Entries,
    tiles: BalsTiles,
    first_block: int,
    n_blocks: int,
    rank: int,
    tile_rows: int,
    tile_cols: int,
    config: BalsConfig | BalsLocalConfig | None = None,
    variant: Variant = "chip",
    *,
    skip_vacant: bool = True,
) -> None:
    """Sums of each row of some row blocks by the BALS kernel (Algorithm 2).

    Parameters
    ----------
    device : Device
    matrices : float array, shape (n_batch, rank, rank)
        Written: lower triangles of the rows of the blocks, from row ``first_block * tile_rows`` on; the last row block
        of the matrix may be shorter.
    rhs : float array, shape (n_batch, rank)
        Written.
    factors : float array, shape (n_fixed, ld)
        As for `sparse_syrk`.
    entries_of_tiles : Entries
        What the entries weigh (offsets, implicit, alpha, unobserved_weight); indices and ratings are those of `tiles`.
    tiles : BalsTiles
    first_block, n_blocks : int
        The row blocks of the batch.
    rank : int
    tile_rows, tile_cols : int
        The size of the tiles.
    config : BalsConfig or BalsLocalConfig, optional
        Fitting `variant`.
    variant : {"chip", "local"}
        Sums in registers, or as the paper maps them to threads, which puts them into local memory.
    skip_vacant : bool
        Pass over a vacant tile after one test; False, with the variant "local" only, shows what that is worth (6.4).

    Raises
    ------
    TypeError
        An array is not what the kernel reads, or a configuration of the other variant.
    ValueError
        The configuration is for something else or does not fit on the device, or row blocks that do not exist.
    """
    rows = _check_tiles(device, matrices, rhs, factors, entries_of_tiles, tiles, first_block, n_blocks, rank)
    _require(
        (tile_rows, tile_cols) == (tiles.tile_rows, tiles.tile_cols),
        f"tile_rows={tile_rows} and tile_cols={tile_cols} are not those of tiles, {tiles.tile_rows} and "
        f"{tiles.tile_cols}",
    )
    dtype = np.dtype(factors.dtype)
    config = config or _bals_default(variant, rank, dtype.itemsize, device.spec, tile_rows, tile_cols)
    if not isinstance(config, _bals_class(variant)):
        raise TypeError(f"variant={variant!r} takes a {_bals_class(variant).__name__}, got {type(config).__name__}")
    _require_match(config, rank, dtype)
    require_fit(config, device.spec)
    if isinstance(config, BalsConfig):
        _require(
            config.capacity >= min(tile_cols, tiles.shape[1]),
            f"capacity={config.capacity} factor rows cannot hold those of a tile of tile_cols={tile_cols}",
        )
        grid = (n_blocks * ceil_div(tile_rows, config.rows), config.parts)
    else:
        _require(
            (config.tile_rows, config.tile_cols) == (tile_rows, tile_cols),
            f"config is for tiles of {config.tile_rows} x {config.tile_cols}, these are {tile_rows} x {tile_cols}",
        )
        grid = (n_blocks, config.tiles)
    _require(skip_vacant or variant == "local", f'skip_vacant=False needs variant="local", got {variant!r}')
    if not rows:
        return
    switches = {} if skip_vacant else {"SKIP_VACANT": False}
    kernel = get_kernel(device, "bals.cu", "bals", **config.constants, **entries_of_tiles.constants, **switches)
    offsets = tiles.values if entries_of_tiles.offsets is None else entries_of_tiles.offsets
    arrays = (tiles.values, tiles.tile_colidx, tiles.tile_ptr, tiles.seg_colidx, tiles.seg_ptr, offsets)
    sizes = (np.int64(first_block), np.int64(tiles.shape[0]), np.int32(tiles.tiles_across), np.int32(tile_rows))
    arguments = (matrices, rhs, factors, *arrays, *sizes, np.int32(factors.shape[1]), *entries_of_tiles.scalars)
    kernel(grid, (config.threads,), arguments, config.shared_bytes)


def _bals_class(variant: str) -> type[BalsConfig] | type[BalsLocalConfig]:
    if variant not in ("chip", "local"):
        raise ValueError(f'variant must be "chip" or "local", got {variant!r}')
    return BalsConfig if variant == "chip" else BalsLocalConfig


def _bals_default(
    variant: str, rank: int, itemsize: int, spec: DeviceSpec, tile_rows: int, tile_cols: int
) -> BalsConfig | BalsLocalConfig:
    if _bals_class(variant) is BalsLocalConfig:
        return BalsLocalConfig.default(rank, itemsize, spec, tile_rows=tile_rows, tile_cols=tile_cols)
    return BalsConfig.default(rank, itemsize, spec, tile_cols=tile_cols)


def _check_tiles(
    device: Device,
    matrices: Array,
    rhs: Array,
    factors: Array,
    entries: Entries,
    tiles: BalsTiles,
    first_block: int,
    n_blocks: int,
    rank: int,
) -> int:
    """Judge what `bals` reads and writes; the number of rows of the batch."""
    n_rows, n_cols = tiles.shape
    blocks = ceil_div(n_rows, tiles.tile_rows)
    _require(
        0 <= first_block <= first_block + n_blocks <= blocks,
        f"first_block={first_block} and n_blocks={n_blocks} are not within the {blocks} row blocks there are",
    )
    batch = min((first_block + n_blocks) * tiles.tile_rows, n_rows) - first_block * tiles.tile_rows
    rows = max(0, batch)
    dtype = tiles.values.dtype
    check("matrices", matrices, dtype, (rows, rank, rank))
    check("rhs", rhs, dtype, (rows, rank))
    _check_factors(factors, dtype, rank)
    check("ratings", entries.ratings, dtype, (None,))
    _require(len(factors) == n_cols, f"factors has {len(factors)} rows; tiles has {n_cols} columns")
    check("tiles.tile_ptr", tiles.tile_ptr, np.int64, (blocks * tiles.tiles_across + 1,))
    check("tiles.seg_ptr", tiles.seg_ptr, np.int64, (n_rows * tiles.tiles_across + 1,))
    check("tiles.tile_colidx", tiles.tile_colidx, np.int32, (None,))
    check("tiles.seg_colidx", tiles.seg_colidx, np.int32, (len(tiles.values),))
    arrays = {"matrices": matrices, "rhs": rhs, "factors": factors, "tiles.values": tiles.values}
    arrays |= {"tiles.tile_ptr": tiles.tile_ptr, "tiles.seg_ptr": tiles.seg_ptr}
    arrays |= {"tiles.tile_colidx": tiles.tile_colidx, "tiles.seg_colidx": tiles.seg_colidx}
    if entries.offsets is not None:
        check("offsets", entries.offsets, dtype, (n_cols,))
        arrays["offsets"] = entries.offsets
    check_not_host(device, **arrays)
    return rows


# ---------------------------------------------------------------------------------------------------- builds

COMPILED_RANKS = (8, 16, 32, 64, 96, 100, 128, 200, 256, 512)


def default_builds(
    spec: DeviceSpec, ranks: Sequence[int] = COMPILED_RANKS
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """``(file, kernel, constants)`` of every default configuration on a device, for a test that compiles them all.

    float32 explicit and implicit, float64 implicit with offsets, in all usual ranks. All compile without spilled
    registers or a stack frame for sm_90 but those with ``ACCUMULATORS=local``: the paper's mapping puts the sums there.
    """
    seen = set()
    for rank in ranks:
        for itemsize, implicit, offsets in ((4, False, False), (4, True, False), (4, False, True), (8, True, True)):
            entries = {"REAL": np.dtype(f"f{itemsize}"), "IMPLICIT": implicit, "HAS_OFFSETS": offsets}
            configs: list[tuple[str, Any]] = [
                ("sparse_syrk", SyrkConfig.default(rank, itemsize, spec)),
                ("mo_als", MoAlsConfig.default(rank, itemsize, spec)),
                ("bals", BalsConfig.default(rank, itemsize, spec)),
                ("bals", BalsLocalConfig.default(rank, itemsize, spec)),
            ]
            for name, config in configs:
                constants = config.constants | entries
                key = (name, *constants.values())
                if key not in seen:
                    seen.add(key)
                    yield f"{name}.cu", name, constants
