"""Layout and memory of CCD++ on a GPU, which a plan needs before any upload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.objective import SIDES, Side, other_side
from ..core.system import ceil_div
from ..device.cuda import DeviceSpec
from .fused import table_width
from .tables import KernelConfig

QUAD = 4
"""Entries a lane reads at a time; rows are padded to whole quads."""

SEGMENT = 256
"""Entries above which a piece is split: what a warp reads together. Longer segments, which a warp would read in several
steps, spread what all warps read at a time over more memory: 2 to 5 % slower with 2,048 on an H100."""

STAGED_THREADS = {4: 1024, 8: 512}
"""Threads of a block that has a multiprocessor to itself, by bytes of a number: the most that do not spill registers.
In float32, 1,024 were 7 % faster than 768 in a trial on an H200."""

MEAN_PIECE = 32
"""Minimum average entries of a row in a tile for tiles to be faster: each piece takes 16 bytes, and 8 for its sums."""

MAX_TILE = 1 << 16
"""Maximum elements of a tile, which 16-bit indices address."""

CHUNK_ENTRIES = 1 << 24
"""Entries on the device in their original order at a time, while they are copied to the layout."""

VECTORS: dict[Side, int] = {"item": 2, "user": 3}
"""Vectors of the other side that the pass of each side gathers; see cuda/ccd.cu."""


@dataclass(frozen=True)
class CcdConfig(KernelConfig):
    """Layout of one side's entries, and launch configuration of its passes."""

    staged: bool  # stage vectors of the other side in shared memory, tile by tile; else gather them from global memory
    tile: int  # elements of a staged vector; the last 16 bytes are zeros
    n_tiles: int  # 1 if vectors are not staged
    segment: int  # entries above which a piece is split; at most `SEGMENT`
    blocks: int  # maximum blocks of a pass
    threads: int  # threads of each

    def check(self) -> None:
        if self.segment > SEGMENT:
            raise ValueError(f"segment must be 1 to {SEGMENT} entries, which a warp reads together; got {self.segment}")

    @classmethod
    def choose(cls, n_rows: int, n_fixed: int, nnz: int, vectors: int, dtype: Any, spec: DeviceSpec) -> CcdConfig:
        """The layout for sizes and a device.

        Tiles are as large as shared memory allows; there are none if rows would have only a few entries in each.
        """
        config = cls._staged(n_fixed, vectors, dtype, spec)
        if config.n_tiles == 1 or nnz >= MEAN_PIECE * n_rows * config.n_tiles:
            return config
        return cls(False, 16, 1, SEGMENT, _gathering_blocks(vectors, dtype) * spec.multiprocessors, 256)

    @classmethod
    def _staged(cls, n_fixed: int, vectors: int, dtype: Any, spec: DeviceSpec) -> CcdConfig:
        """The layout with vectors in shared memory, in tiles as large as fit."""
        itemsize = np.dtype(dtype).itemsize
        tile = min(spec.shared_bytes // (16 * vectors) * (16 // itemsize), MAX_TILE)
        n_tiles = ceil_div(n_fixed, tile - 16 // itemsize)
        return cls(True, tile, n_tiles, SEGMENT, spec.multiprocessors, STAGED_THREADS[itemsize])

    def constants_for(self, vectors: int, dtype: Any) -> dict[str, Any]:
        """Compile-time constants of a pass that gathers `vectors` vectors."""
        return {
            "REAL": np.dtype(dtype),
            "STAGED": self.staged,
            "VECTORS": vectors,
            "TILE": self.tile,
            "THREADS": self.threads,
            "BLOCKS_PER_SM": 1 if self.staged else _gathering_blocks(vectors, dtype),
        }

    def usable(self, dtype: Any) -> int:
        """Rows of the other side in a tile."""
        return self.tile - 16 // np.dtype(dtype).itemsize


def _gathering_blocks(vectors: int, dtype: Any) -> int:
    """Resident blocks per multiprocessor of a pass that does not stage its vectors: as many as registers allow."""
    return 3 if np.dtype(dtype).itemsize == 4 and vectors < 3 else 2


def padded(n: int, dtype: Any) -> int:
    """Elements of a vector of `n` coordinates, padded to a multiple of 16 bytes."""
    return table_width(n, dtype)


def memory_bytes(
    n_users: int, n_items: int, nnz: int, factors: int, dtype: Any, spec: DeviceSpec, biases: bool = False
) -> dict[str, int]:
    """Upper bound on the memory of a fit on a device, by purpose; actual use depends on the entries."""
    itemsize = np.dtype(dtype).itemsize
    sizes = {"ratings": 0, "residual": 0, "pieces": 0}
    counts: dict[Side, int] = {"user": n_users, "item": n_items}
    for side in SIDES:
        n_rows, n_fixed = counts[side], counts[other_side(side)]
        config = CcdConfig.choose(n_rows, n_fixed, nnz, VECTORS[side], dtype, spec)
        pieces = min(nnz, n_rows * config.n_tiles) + nnz // config.segment
        places = nnz + (QUAD - 1) * min(nnz, n_rows * config.n_tiles) + (QUAD - 1)
        sizes["ratings"] += places * ((2 if config.staged else 4) + itemsize)
        sizes["residual"] += places * itemsize
        # pieces and their tiles, partial sums; parts (a team's blocks, in up to three layers of up to three kinds of
        # pieces); split rows; penalties; packs
        sizes["pieces"] += pieces * (16 + 4 + 2 * itemsize)
        sizes["pieces"] += min(pieces, 9 * (2 * config.n_tiles + config.blocks)) * 32
        sizes["pieces"] += (min(pieces, config.blocks) + 1) * 4
        sizes["pieces"] += min(n_rows, pieces) * 16 + (1 + biases) * n_rows * itemsize
        sizes["pieces"] += 0 if config.staged else (n_fixed + 1) * 4 * itemsize
    # old and new tables and biases; columns, of which biases take two, and a spare one
    rows = padded(n_users, dtype) + padded(n_items, dtype)
    width = table_width(factors + biases, dtype)
    sizes["factors"] = rows * (2 * (width + biases) + factors + 2 * biases + 1) * itemsize
    # some entries in their original order, and their destinations, while the second side is laid out
    chunk = min(nnz, CHUNK_ENTRIES + max(n_users, n_items))
    sizes["chunk"] = chunk * (4 + itemsize)
    return sizes
