"""Launch of cuda/mo_als.cu: cuMF's MO-ALS (cuMF, Algorithm 2, sections 3.3 and 3.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..core.system import ceil_div
from ..device.cuda import DeviceSpec
from ..plan.assemblies import BUSY_WARPS, WARP, lower_tiles, require_triangle, resident_warps, tile_size
from ..plan.tables import KernelConfig, require
from .assembly import sum_segments


@dataclass(frozen=True)
class MoAlsConfig(KernelConfig):
    """Compile-time choices of cuda/mo_als.cu (cuMF, Algorithm 2, sections 3.3 and 3.4)."""

    rank: int
    itemsize: int  # 4 for float32, 8 for float64
    tile: int  # rows and columns of a thread's tile of the lower triangle
    bin: int  # entries staged at a time
    groups: int  # teams of threads that share the entries of a bin
    part_tiles: int  # tiles of a block. If fewer than the lower triangle has, several blocks share a segment
    blocks_per_sm: int = 1  # minimum resident blocks per multiprocessor, which bounds the registers of a thread
    read_only: bool = True  # read factors through the read-only path, cached in L1 (the paper's texture memory, fig. 8)
    # sum all bins in registers. False: add each bin to global memory, the baseline of the paper (fig. 7)
    registers: bool = True

    file: ClassVar[str] = "mo_als.cu"
    kernel: ClassVar[str] = "mo_als"
    names: ClassVar[dict[str, str]] = {"itemsize": ""}

    def check(self) -> None:
        require_triangle(self, "groups * part_tiles in full warps")
        require(self.bin % self.groups == 0, f"bin={self.bin} must be a multiple of groups={self.groups}")
        require(self.bin <= self.threads, f"bin={self.bin} must not exceed the {self.threads} threads of a block")
        require(
            self.registers or self.groups == 1,
            f"registers=False needs groups=1, an element of global memory has one owner; got groups={self.groups}",
        )
        require(
            self.chunks <= self.threads,
            f"{self.threads} threads are too few to load the {self.chunks} x 16 bytes of an entry",
        )

    @classmethod
    def rule(
        cls, rank: int, itemsize: int, spec: DeviceSpec, *, read_only: bool = True, registers: bool = True
    ) -> MoAlsConfig:
        """The choice with the fewest idle lanes and enough warps per multiprocessor."""
        tile = tile_size(rank, itemsize)
        tiles, chunks = lower_tiles(rank, tile), ceil_div(rank, tile) * tile * itemsize // 16
        resident = resident_warps(tile, itemsize)
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
                if score > best[0] + 0.03:  # more groups or parts cost additional sums or loads
                    best = (score, groups, part_tiles, warps)
        _, groups, part_tiles, warps = best
        loaded = warps * WARP // chunks
        # several entries per barrier; entries in flight take registers
        sizes = [k * loaded for k in (1, 2, 3, 4) if k * loaded % groups == 0 and k * loaded <= 32]
        sizes = sizes or [max(groups, min(loaded, 32) // groups * groups)]
        size = next((size for size in sizes if size >= 8), sizes[-1])
        blocks = max(1, min(16, resident // warps))
        return cls(rank, itemsize, tile, size, groups, part_tiles, blocks, read_only, registers)

    @property
    def tiles(self) -> int:
        return lower_tiles(self.rank, self.tile)

    @property
    def parts(self) -> int:
        return ceil_div(self.tiles, self.part_tiles)

    def grid(self, n: int, spec: DeviceSpec) -> tuple[int, ...]:
        return n, self.parts

    @staticmethod
    def sizes(rank: int, ld: int) -> tuple[int, ...]:
        return (ld,)

    @property
    def chunks(self) -> int:
        return ceil_div(self.rank, self.tile) * self.tile * self.itemsize // 16

    @property
    def threads(self) -> int:
        return ceil_div(self.part_tiles * self.groups, WARP) * WARP

    @property
    def shared_bytes(self) -> int:
        padded, chunk = ceil_div(self.rank, self.tile) * self.tile, 16 // self.itemsize
        staged = 2 * self.bin * (padded + 2)
        sums = self.tile**2 + ceil_div(self.chunks, self.part_tiles) * chunk
        return self.itemsize * max(staged, self.groups // 2 * self.part_tiles * sums)


def mo_als_with(*, read_only: bool = True, registers: bool = True) -> Callable[..., None]:
    """Sums of segments by cuMF's MO-ALS (Algorithm 2): `sum_segments` with `read_only` and `registers` as given."""
    return partial(sum_segments, partial(MoAlsConfig.default, read_only=read_only, registers=registers))


mo_als = mo_als_with()
