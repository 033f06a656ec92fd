"""Limits of the published assemblies on a GPU, and the tiles of BALS, which a plan needs before any launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.system import ceil_div
from ..device.cuda import DeviceSpec
from .tables import KernelConfig, require

if TYPE_CHECKING:
    from .types import Plan

WARP = 32
MAX_THREADS = 1024
MAX_GRID_Y = 65535
REGISTERS = 65536  # registers of 32 bits per multiprocessor; each quarter of its warps shares a quarter of them
MAX_REGISTERS = 255  # registers that a thread can address
MAX_SUMS = 128  # maximum registers for a thread's sums; operands need the rest of `MAX_REGISTERS`
OTHER_REGISTERS = 28  # minimum registers for addresses and counters
BUSY_WARPS = 12  # warps that keep a multiprocessor busy if each has 64 independent multiply-adds
RESERVED = 1024  # bytes of shared memory that CUDA takes from each block


def require_threads(threads: int, what: str) -> None:
    require(threads <= MAX_THREADS, f"{what} = {threads} threads are more than the {MAX_THREADS} of a block")


def available_registers(threads: int, blocks_per_sm: int) -> int:
    """Registers of a thread if so many blocks are resident on a multiprocessor."""
    resident = blocks_per_sm * ceil_div(threads, WARP)
    return min(MAX_REGISTERS, REGISTERS // 4 // (ceil_div(resident, 4) * WARP) // 8 * 8)


def require_registers(sums: int, operands: int, threads: int, itemsize: int, blocks_per_sm: int) -> None:
    """A thread's sums must fit in its registers, and all threads' registers in a multiprocessor."""
    words = itemsize // 4
    require(
        sums * words <= MAX_SUMS,
        f"{sums} sums of {itemsize} bytes a thread need {sums * words} registers, more than {MAX_SUMS}; "
        "use smaller tiles or more threads",
    )
    needed = (sums + operands) * words + OTHER_REGISTERS
    available = available_registers(threads, blocks_per_sm)
    require(
        needed <= available,
        f"blocks_per_sm={blocks_per_sm} blocks of {threads} threads leave {available} registers a thread, at least "
        f"{needed} are needed; use fewer blocks or threads",
    )


def require_aligned(name: str, items: int, itemsize: int) -> None:
    """Rows of `items` elements must consist of whole copies of 16 bytes."""
    require(items * itemsize % 16 == 0, f"{name}={items} must be a multiple of {16 // itemsize} items")


def require_square_tile(config: Any) -> None:
    """``dx * dy * dz`` threads must divide a tile of ``nb * nb`` sums evenly."""
    nb, dx, dy = config.nb, config.dx, config.dy
    require(nb % dx == 0 and nb % dy == 0, f"nb={nb} must be a multiple of dx={dx} and dy={dy}")
    require_aligned("nb", nb, config.itemsize)
    require_threads(config.threads, "dx * dy * dz")


def require_triangle(config: Any, threads: str) -> None:
    """Each thread sums one tile of the lower triangle: tiles, threads and registers must not exceed their limits."""
    require_aligned("tile", config.tile, config.itemsize)
    require(config.part_tiles <= config.tiles, f"part_tiles={config.part_tiles} exceeds the {config.tiles} there are")
    require_threads(config.threads, threads)
    require_registers(config.tile**2, 2 * config.tile, config.threads, config.itemsize, config.blocks_per_sm)


def tile_size(rank: int, itemsize: int) -> int:
    """Rows and columns of a thread's tile in registers: 8 x 8 in float32, 4 x 4 in float64 and for tiny systems."""
    return 8 if itemsize == 4 and rank > 16 else 4


def lower_tiles(rank: int, tile: int) -> int:
    along = ceil_div(rank, tile)
    return along * (along + 1) // 2


def resident_warps(tile: int, itemsize: int) -> int:
    """Warps whose registers fit on a multiprocessor (at 128 and 80 registers a thread)."""
    return 16 if tile * itemsize >= 32 else 24


def _list_bytes(rows: int, window: int, itemsize: int) -> int:
    """Bytes of the kernel's `Lists`: two weights and an index for each entry and one more, and a count per row."""
    return ceil_div(rows * ((window + 1) * (2 * itemsize + 4) + 4), itemsize) * itemsize


@dataclass(frozen=True)
class BalsConfig(KernelConfig):
    """Compile-time choices of cuda/bals.cu with ACCUMULATORS=chip."""

    rank: int
    itemsize: int
    tile: int  # rows and columns of a thread's tile of a row's lower triangle
    rows: int  # rows of a row block whose sums a block of threads holds
    part_tiles: int  # tiles of each row in a block of threads; if not all, several blocks share the rows
    capacity: int  # factor rows staged at a time, of one or several matrix tiles; at least the width of one
    buffers: int = 2  # 1, or 2 to load the next factor rows while the current ones are summed
    lanes: int = 8  # lanes that list one row's entries, and matrix tiles staged at a time
    window: int = 16  # entries of each row listed at a time
    blocks_per_sm: int = 1  # bounds the registers of a thread
    height: int = 1  # height of a matrix tile, in multiples of `rows`; only `bals_tile_sizes` uses it

    tuned_as: ClassVar[str] = "bals"
    names: ClassVar[dict[str, str]] = {"itemsize": "", "height": ""}

    def check(self) -> None:
        require_triangle(self, "rows * part_tiles in full warps")
        require(self.buffers <= 2, f"buffers must be 1 or 2, got {self.buffers}")
        require(
            self.lanes in (1, 2, 4, 8, 16, 32), f"lanes={self.lanes} must be a power of two of at most {WARP} lanes"
        )
        require(self.window % self.lanes == 0, f"window={self.window} must be a multiple of lanes={self.lanes}")
        require(self.parts <= MAX_GRID_Y, f"part_tiles={self.part_tiles} gives {self.parts} parts, over {MAX_GRID_Y}")

    def holds(self, **sizes: Any) -> bool:
        """Whether a stage holds the factor rows of tiles of `tile_cols` columns."""
        return self.capacity >= sizes.get("tile_cols", 1)

    @classmethod
    def rule(cls, rank: int, itemsize: int, spec: DeviceSpec, *, tile_cols: int = 1) -> BalsConfig:
        """Two blocks per multiprocessor and two buffers if factor rows of `tile_cols` columns fit."""
        # wide enough for several entries of a row in a stage, unless narrower tiles are requested
        for least in (max(tile_cols, 64), tile_cols):
            for blocks, buffers in ((2, 2), (1, 2), (2, 1), (1, 1)):
                config = cls._with_blocks(rank, itemsize, spec, blocks, buffers)
                if config.capacity >= least and (blocks == 1 or config.rows >= 4):  # fewer rows share few columns
                    return config
        config = cls._with_blocks(rank, itemsize, spec, 1, 1)
        raise ValueError(
            f"tile_cols={tile_cols} factor rows of rank {rank} do not fit in {spec.shared_bytes} bytes of shared "
            f"memory; use tile_cols <= {config.capacity}"
        )

    @classmethod
    def _with_blocks(cls, rank: int, itemsize: int, spec: DeviceSpec, blocks: int, buffers: int) -> BalsConfig:
        tile = tile_size(rank, itemsize)
        tiles = lower_tiles(rank, tile)
        warps = resident_warps(tile, itemsize) // blocks
        part_tiles = ceil_div(tiles, ceil_div(tiles, warps * WARP))
        each = (spec.shared_bytes + RESERVED) // blocks - RESERVED
        # tiny systems: lists take at most a quarter of the memory
        rows = max(1, min(warps * WARP // part_tiles, each // 4 // (2 * _list_bytes(1, 16, itemsize))))
        lanes = 8 if rows >= 16 else WARP
        config = cls(rank, itemsize, tile, rows, part_tiles, 1, buffers, lanes, max(16, lanes), blocks)
        more = max(0, each - config.shared_bytes) // (buffers * config.row_bytes)
        return cls(rank, itemsize, tile, rows, part_tiles, min(1024, 1 + more), buffers, lanes, config.window, blocks)

    @property
    def tiles(self) -> int:
        return lower_tiles(self.rank, self.tile)

    @property
    def parts(self) -> int:
        """Blocks that share the same rows."""
        return ceil_div(self.tiles, self.part_tiles)

    @property
    def threads(self) -> int:
        return ceil_div(self.rows * self.part_tiles, WARP) * WARP

    @property
    def row_bytes(self) -> int:
        return ceil_div(self.rank, self.tile) * self.tile * self.itemsize

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: staged factors, and two lists of entries to add to each row."""
        lists = 2 * _list_bytes(self.rows, self.window, self.itemsize)
        return self.buffers * self.capacity * self.row_bytes + lists

    @property
    def constants(self) -> dict[str, Any]:
        return {"ACCUMULATORS": "chip"} | super().constants

    @property
    def matrix_tile(self) -> tuple[int, int]:
        """Height and width of the largest matrix tiles processed in one stage."""
        width = self.capacity
        return self.height * self.rows, width // WARP * WARP if width >= WARP else width


LOCAL_TILE = (256, 192)
"""Rows and columns of the matrix tiles that the paper on BALS measures most, with sums in local memory."""


def bals_tile_sizes(rank: int, itemsize: int, spec: DeviceSpec, *, local: bool = False) -> tuple[int, int]:
    """Height and width of matrix tiles for `bals` (section 4.3): the capacity of one block of threads.

    The paper makes tiles as wide as the factor rows that fit in shared memory, and finds the height by trial. Here a
    block sums as many rows as its registers hold. Taller tiles make it load columns that it does not need, so only a
    tuned table selects them. Local memory does not limit the sums, so they use the tile of the paper.
    """
    if local:
        return LOCAL_TILE
    return BalsConfig.default(rank, itemsize, spec).matrix_tile


def tile_pointers(rows: int, columns: int, plan: Plan) -> int:
    """Elements of seg_ptr and tile_ptr of one orientation."""
    return (rows + -(-rows // plan.tile_rows)) * -(-columns // plan.tile_cols)
