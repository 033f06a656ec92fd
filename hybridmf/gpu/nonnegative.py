"""Launches of cuda/nonnegative.cu: rows of nonnegative factors from the sums of any assembly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..core.system import ceil_div, round_up
from ..device.cuda import Array, Device, DeviceSpec
from ..plan.assemblies import REGISTERS, RESERVED, WARP
from ..plan.fused import MAX_RANK as MAX_TILED_RANK
from ..plan.fused import partial_floats
from ..plan.tables import KernelConfig, require
from .launch import check_all, get_kernel
from .systems import SideSystems, Sums

MAX_WARPS = 8

THREAD_REGISTERS = {4: 96, 8: 192}
"""Minimum registers of a thread, by the bytes of a number: the kernel needs them to avoid spilling."""

SHARED_BYTES_PER_SM = 228 << 10  # shared memory of a multiprocessor of an H200; other GPUs hold fewer blocks


@dataclass(frozen=True)
class NonnegativeConfig(KernelConfig):
    """Compile-time choices of cuda/nonnegative.cu."""

    rank: int
    itemsize: int  # 4 (float32) or 8 (float64)
    tiles: bool  # sums are tiles of the fused kernels; otherwise matrices and right-hand sides
    resident: bool  # keep the matrix in shared memory; otherwise work in the sums
    warps: int  # warps of a block, which solves one system
    blocks_per_sm: int = 1  # minimum resident blocks per multiprocessor, which bounds the registers of a thread

    file: ClassVar[str] = "nonnegative.cu"
    kernel: ClassVar[str] = "nonnegative"
    derived: ClassVar[tuple[str, ...]] = ("shared_bytes",)
    names: ClassVar[dict[str, str]] = {"itemsize": "REAL", "blocks_per_sm": "MIN_BLOCKS"}

    def check(self) -> None:
        require(self.warps <= WARP, f"warps must be in 1 ... {WARP}, got {self.warps}")
        require(
            not self.tiles or (self.resident and self.itemsize == 4 and self.rank <= MAX_TILED_RANK),
            f"tiles need resident=True, itemsize=4 and a rank of at most {MAX_TILED_RANK}, got {self}",
        )

    @classmethod
    def of_tiles(cls, rank: int) -> NonnegativeConfig:
        """The choice for sums of the fused kernels; all GPUs that support these have enough shared memory."""
        return cls(rank, 4, True, True, ceil_div(rank, WARP))._crowded()

    @classmethod
    def of_matrices(cls, rank: int, itemsize: int, spec: DeviceSpec) -> NonnegativeConfig:
        """The choice for other sums, resident if shared memory suffices."""
        warps = min(MAX_WARPS, ceil_div(rank, WARP))
        for resident in (True, False):
            config = cls(rank, itemsize, False, resident, warps)
            if config.shared_bytes <= spec.shared_bytes:
                break
        config.require_fit(spec)
        return config._crowded()

    def _crowded(self) -> NonnegativeConfig:
        """The choice with as many blocks per multiprocessor as shared memory and registers allow."""
        in_memory = SHARED_BYTES_PER_SM // (self.shared_bytes + RESERVED)
        in_registers = REGISTERS // (self.threads * THREAD_REGISTERS[self.itemsize])
        return replace(self, blocks_per_sm=max(1, min(in_memory, in_registers)))

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def shared_bytes(self) -> int:
        padded = round_up(self.rank, WARP)
        matrix = self.rank * (self.rank | 1) if self.resident else 0
        return (6 * padded + WARP + matrix) * self.itemsize + 4 * (padded + 4)


def nonnegative_solve(
    device: Device,
    systems: SideSystems,
    sums: Sums,
    slots: Array,
    rows: Array,
    epsilon: float,
    config: NonnegativeConfig | None = None,
) -> None:
    """Minimize each row with its first `bounded` coordinates >= 0; the sums are destroyed.

    `systems`: ``solutions[rows[k], :rank]`` is the start, which meets the bounds, and is overwritten; zeros where the
        status is not 0, or where a system has no slots. ``status[rows[k]]`` is 0, or -1 if a value is infinite or NaN.
        The Gram matrix and ``scale[row] ridge`` on the diagonal are added to the sums.
    `sums`: lower triangles of matrices, and right-hand sides; or one array, partial sums of the fused kernels.
    `slots`: system k is the sum of ``slots[k] ... slots[k + 1] - 1``, in this order.
    `rows`: distinct.
    `epsilon`: as for `cholesky_any.cholesky_solve`. Descent ends after a sweep that moves no component of the gradient
        by more than 4 times this share of the largest term.
    """
    rank, dtype, n_slots = len(systems.ridge), sums[0].dtype, len(sums[0])
    tiled = len(sums) == 1
    systems.check(device, dtype, None, rank)
    check_all(
        device,
        sums=(sums[0], dtype, (None, partial_floats(rank)) if tiled else (None, rank, rank)),
        rhs=(None if tiled else sums[1], dtype, (n_slots, rank)),
        slots=(slots, np.int64, (len(rows) + 1,)),
        rows=(rows, np.int32, (None,)),
    )
    if not len(rows):
        return
    if config is None:
        of_matrices = NonnegativeConfig.of_matrices
        config = NonnegativeConfig.of_tiles(rank) if tiled else of_matrices(rank, dtype.itemsize, device.spec)
    arrays = (systems.solutions, systems.status, sums[0], sums[-1], slots, rows, systems.gram_pointer)
    scalars = (np.int64(systems.solutions.shape[1]), np.int32(systems.bounded), dtype.type(epsilon))
    kernel = get_kernel(device, config.file, config.kernel, **config.constants)
    kernel((len(rows),), (config.threads,), (*arrays, systems.ridge, systems.scale, *scalars), config.shared_bytes)
