"""Launches of Gates' batched sparse-syrk (Gates et al., sections V, VIII): cuda/sparse_syrk.cu, and as printed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from ..core.system import ceil_div, round_up
from ..device.cuda import DeviceSpec
from ..plan.assemblies import (
    MAX_GRID_Y,
    RESERVED,
    WARP,
    lower_tiles,
    require_registers,
    require_square_tile,
    require_threads,
)
from ..plan.tables import KernelConfig, require
from .assembly import sum_segments


def warp_shape(nb: int, dx: int, dy: int, dz: int) -> tuple[int, int]:
    """Threads of a warp along the columns and rows of a tile, where ``dx * dy * dz`` is a multiple of 32.

    A warp may span neighbouring groups, two if possible. It loads the fewest factors if its patch of the tile is a
    square.
    """
    for groups in (2, 1, 4, 8, 16, 32):
        shapes = [(wx, WARP // groups // wx) for wx in (1, 2, 4, 8, 16, 32) if groups * wx <= WARP]
        fits = [(wx, wy) for wx, wy in shapes if dz % groups == 0 and dx % wx == 0 and dy % wy == 0]
        if fits:
            return min(fits, key=lambda shape: shape[0] * (nb // dx) + shape[1] * (nb // dy))
    raise AssertionError(f"{dx} x {dy} x {dz} threads are no multiple of {WARP}")


@dataclass(frozen=True)
class PublishedSyrkConfig(KernelConfig):
    """Compile-time choices of cuda/sparse_syrk_published.cu: the tuple (nb, kb, dx, dy) of the paper."""

    rank: int  # order of the matrices; affects only the size of a stage
    itemsize: int  # 4 for float32, 8 for float64
    nb: int  # rows and columns of a tile of a matrix
    kb: int  # entries staged at a time
    # dx, dy: threads along the columns and rows of a tile
    dx: int
    dy: int

    file: ClassVar[str] = "sparse_syrk_published.cu"
    kernel: ClassVar[str] = "sparse_syrk_published"
    names: ClassVar[dict[str, str]] = {"rank": "", "itemsize": ""}

    def check(self) -> None:
        nb, kb, dx, dy = self.nb, self.kb, self.dx, self.dy
        require(nb % dx == 0 and nb % dy == 0, f"nb={nb} must be a multiple of dx={dx} and dy={dy}")
        require(kb % dy == 0 or dy % kb == 0, f"kb={kb} must be a multiple of dy={dy}, or a part of it")
        require_threads(self.threads, "dx * dy")
        tx, ty = nb // dx, nb // dy
        require_registers(tx * ty, tx + ty, self.threads, self.itemsize, 1)

    @classmethod
    def rule(cls, rank: int, itemsize: int, spec: DeviceSpec) -> PublishedSyrkConfig:
        """The tuple, as the paper tunes it: one tile up to rank 128, where dy divides kb (section VIII).

        On an H100, (32, 8, 8, 8) took 35.1 ms for Netflix's shape and (64, 16, 16, 16) 61.4; the paper's choices for a
        K40c, (32, 8, 16, 16) and such, 44.4 and 77.1.
        """
        widest = 128 if itemsize == 4 else 96
        nb = round_up(ceil_div(rank, ceil_div(rank, widest)), 8 if rank <= 8 else 16)
        side = 8 if nb <= 32 else 16
        return cls(rank, itemsize, nb, side, side, side)

    @property
    def threads(self) -> int:
        return self.dx * self.dy

    @property
    def tiles(self) -> int:
        return lower_tiles(self.rank, self.nb)

    def grid(self, n: int, spec: DeviceSpec) -> tuple[int, ...]:
        require(self.tiles <= MAX_GRID_Y, f"nb={self.nb} gives {self.tiles} tiles, more than {MAX_GRID_Y}")
        return n, self.tiles

    @staticmethod
    def sizes(rank: int, ld: int) -> tuple[int, ...]:
        return rank, ld

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the paper's sY, sYT and sR, which has two weights."""
        return self.kb * ((2 if self.tiles > 1 else 1) * self.nb + 2) * self.itemsize


@dataclass(frozen=True)
class SyrkConfig(PublishedSyrkConfig):
    """Compile-time choices of cuda/sparse_syrk.cu (Gates et al., section V; constraints: section VIII)."""

    dz: int = 1  # groups of ``dx * dy`` threads that share the entries of a stage
    stages: int = 2  # stages being loaded or in use
    unroll: int = 2  # entries of a group whose loads from shared memory may overlap
    blocks_per_sm: int = 1  # minimum resident blocks per multiprocessor, which bounds the registers of a thread

    file: ClassVar[str] = "sparse_syrk.cu"
    kernel: ClassVar[str] = "sparse_syrk"
    tuned_as: ClassVar[str] = "sparse_syrk"

    def check(self) -> None:
        nb, kb, dx, dy, dz = self.nb, self.kb, self.dx, self.dy, self.dz
        require_square_tile(self)
        require(kb % dz == 0, f"kb={kb} must be a multiple of dz={dz}")
        require(dz & (dz - 1) == 0, f"dz={dz} must be a power of two: groups are added pairwise")
        require(self.threads % WARP == 0, f"dx * dy * dz = {self.threads} threads must be a multiple of {WARP}")
        chunks = nb * self.itemsize // 16
        require(
            self.threads >= chunks, f"{self.threads} threads are too few to copy the {chunks} x 16 bytes of an entry"
        )
        require(self.stages >= 2, f"stages={self.stages} must be at least 2: one is summed while others arrive")
        tx, ty = nb // dx, nb // dy
        require_registers(tx * ty, tx + ty, self.threads, self.itemsize, self.blocks_per_sm)

    @classmethod
    def rule(cls, rank: int, itemsize: int, spec: DeviceSpec) -> SyrkConfig:
        """The choice without a tuned table entry: 8 x 8 sums per thread in float32, 8 x 4 in float64 if possible."""
        double = itemsize == 8
        if rank <= 8:
            nb, dx, dy, dz, blocks = 8, 2, 2, 8, 16
        elif rank <= 16:
            nb, dx, dy, dz, blocks = (16, 4, 4, 2, 16) if double else (16, 4, 2, 4, 24)
        elif rank <= 32:
            nb, dx, dy, dz, blocks = (32, 8, 4, 1, 12) if double else (32, 4, 4, 2, 16)
        elif 64 < rank <= 96 and not double:
            # one tile with a third of its warps idle beats three tiles that stage factors twice
            nb, dx, dy, dz, blocks = 96, 24, 12, 1, 3
        else:
            nb, dx, dy, dz, blocks = (64, 16, 8, 1, 3) if double else (64, 8, 8, 2, 4)
        kb = 24 if nb == 96 else 32 // (itemsize // 4)
        unroll = {8: 4, 96: 1}.get(nb, 2)  # limited by registers
        blocks = min(blocks, 16) if spec.capability < (8, 0) else blocks  # Turing holds no more
        config = cls(rank, itemsize, nb, kb, dx, dy, dz, 2, unroll, blocks)
        while config.blocks_per_sm * (config.shared_bytes + RESERVED) > spec.shared_bytes and config.kb > 8:
            config = replace(config, kb=config.kb // 2)
        return config

    @property
    def threads(self) -> int:
        return self.dx * self.dy * self.dz

    @property
    def shared_bytes(self) -> int:
        panels = 2 if self.tiles > 1 else 1
        staged = self.stages * self.kb * (panels * self.nb + 2)
        group = self.dx * self.dy
        exchanged = self.dz // 2 * (self.nb**2 + group * ceil_div(self.nb, group))
        return self.itemsize * max(staged, exchanged)

    @property
    def constants(self) -> dict[str, Any]:
        wx, wy = warp_shape(self.nb, self.dx, self.dy, self.dz)
        return super().constants | {"WX": wx, "WY": wy}


sparse_syrk = partial(sum_segments, SyrkConfig.default)  # Gates' batched sparse-syrk (section V, fig. 9)

sparse_syrk_published = partial(sum_segments, PublishedSyrkConfig.default)
"""The same as printed, for whole rows; ``WITH_RHS=False`` leaves right-hand sides out, to measure what they cost."""
