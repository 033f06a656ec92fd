"""Launches that complete and solve batches of explicit systems of any rank: complete.cu, cholesky_any.cu, cg_any.cu.

A batch lies in ``matrices`` (n_slots, rank, rank) and ``rhs`` (n_slots, rank); system k owns the slots
``slots[k] ... slots[k + 1] - 1``: partial sums that `complete` adds up into the first of them, which the solvers
read. Only lower triangles are used. Row ``rows[k]`` of ``solutions`` and ``status`` gets the result of system k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..core.system import ceil_div, round_up
from ..core.validate import MAX_FACTORS
from ..device.cuda import Array, Device, DeviceSpec
from ..plan.assemblies import REGISTERS, RESERVED, WARP
from ..plan.fused import solver_floats, vector_floats
from ..plan.tables import KernelConfig, require
from .launch import check_all, get_kernel, program
from .systems import check_columns

MAX_RANK = MAX_FACTORS + 1  # largest rank of the solvers: biases take one coordinate
STEP = 8  # columns that cholesky_any.cu eliminates at a time, and threads along a row of accumulators
OF_SYSTEMS = ("RANK", "REAL", "SYSTEMS", "MIN_BLOCKS")  # constants of the kernel with a warp for each system
STAGE_BYTES = 64  # bytes of each row of L in a stage


@dataclass(frozen=True)
class CholeskyConfig(KernelConfig):
    """Compile-time choices of cuda/cholesky_any.cu."""

    rank: int  # order of the systems
    itemsize: int  # 4 (float32) or 8 (float64)
    # systems of a block, a warp each (rank 1 to 32); 0: one block per system, with the parameters below
    systems: int = 0
    row_threads: int = 16  # threads down a column of accumulators, a multiple of 8; a block has 8 times as many
    # tile_rows, tile_columns: accumulators of a thread. Panels have ``8 tile_columns`` columns, a multiple of 32
    tile_rows: int = 4
    tile_columns: int = 4
    # keep the part of L that later panels need in shared memory; otherwise read it from the matrix again
    resident: bool = True
    blocks_per_sm: int = 1  # minimum resident blocks per multiprocessor, which bounds the registers of a thread

    tuned_as: ClassVar[str] = "cholesky_any"
    names: ClassVar[dict[str, str]] = {"itemsize": "REAL", "blocks_per_sm": "MIN_BLOCKS"}
    may_be_zero: ClassVar[tuple[str, ...]] = ("systems",)

    def check(self) -> None:
        require(self.rank <= MAX_RANK, f"rank must be in 1 ... {MAX_RANK}, got {self.rank}")
        if self.systems:
            require(self.rank <= WARP, f"systems={self.systems} a block need rank <= {WARP}, got {self.rank}")
            require(self.systems * WARP <= 1024, f"systems={self.systems} warps are more than the 32 of a block")
            return
        require(self.row_threads in (8, 16, 32), f"row_threads must be 8, 16 or 32, got {self.row_threads}")
        require(
            self.tile_columns >= 4 and self.panel % WARP == 0,
            f"tile_columns must be a multiple of 4, got {self.tile_columns}",
        )
        if self.resident:
            require(
                self.tile_rows == ceil_div(self.rank, self.row_threads),
                f"tile_rows={self.tile_rows} must be {ceil_div(self.rank, self.row_threads)}: a resident factor needs "
                f"accumulators for all {self.rank} rows on {self.row_threads} row_threads; or use resident=False",
            )
        else:
            require(
                self.height >= self.panel and self.height % self.panel == 0,
                f"row_threads x tile_rows = {self.height} must be a multiple of the {self.panel} columns of a panel",
            )

    @classmethod
    def rule(cls, rank: int, itemsize: int, spec: DeviceSpec) -> CholeskyConfig:
        if rank <= WARP:
            return cls(rank, itemsize, systems=4, blocks_per_sm=4)
        candidates = list(cls._candidates(rank, itemsize, spec))
        config = next((one for one in candidates if one.shared_bytes <= spec.shared_bytes), candidates[-1])
        config.require_fit(spec)
        return replace(config, blocks_per_sm=config._blocks_per_sm(spec))

    @classmethod
    def _candidates(cls, rank: int, itemsize: int, spec: DeviceSpec) -> Iterator[CholeskyConfig]:
        """Candidates, best first: resident if the accumulators of all rows fit in registers."""
        narrow, single = rank <= 128, itemsize == 4
        resident = ((8, 8, 4), (16, 8, 4)) if narrow else ((16, 16, 8),) if single else ((16, 16, 4), (32, 8, 4))
        for row_threads, most_rows, columns in resident:
            rows = ceil_div(rank, row_threads)
            if rows > most_rows:
                continue
            config = cls(rank, itemsize, 0, row_threads, rows, columns, True)
            # in float64, small blocks only if two fit on a multiprocessor; otherwise larger blocks are better
            if narrow or single or row_threads == 32 or config._blocks_in_memory(spec) > 1:
                yield config
        for row_threads, rows, columns in ((16, 16, 8), (16, 8, 8), (16, 8, 4), (16, 4, 4), (8, 4, 4)):
            if rows * columns * itemsize <= 512:
                yield cls(rank, itemsize, 0, row_threads, rows, columns, False)

    def _blocks_in_memory(self, spec: DeviceSpec) -> int:
        return (spec.shared_bytes + RESERVED) // (self.shared_bytes + RESERVED)

    def _blocks_per_sm(self, spec: DeviceSpec) -> int:
        """Blocks that shared memory holds and registers allow without spilling (from ptxas's reports)."""
        words = self.tile_rows * self.tile_columns * self.itemsize // 4
        if self.itemsize == 4:
            registers = 128 if words <= 64 else 168 if words <= 88 else 255
        else:
            registers = 168 if words <= 64 else 255
        return max(1, min(REGISTERS // (registers * self.threads), self._blocks_in_memory(spec)))

    @property
    def threads(self) -> int:
        return self.systems * WARP if self.systems else self.row_threads * STEP

    @property
    def panel(self) -> int:
        return STEP * self.tile_columns

    @property
    def height(self) -> int:
        """Rows that are accumulated at a time."""
        return self.row_threads * self.tile_rows

    @property
    def shared_bytes(self) -> int:
        if self.systems:
            return self.systems * self.rank * (self.rank | 1) * self.itemsize
        panel, panels = self.panel, ceil_div(self.rank, self.panel)
        vector = 16 // self.itemsize
        if self.resident:
            left, kept, diagonal, places = panels * panels // 4 * panel * panel, 1, 0, panels * panels
        else:
            left = 2 * (self.height + panel) * (STAGE_BYTES // self.itemsize)
            kept, diagonal, places = self.tile_columns, panel * panel, 0
        reals = max(left, panel * (panel + vector)) + 2 * max(self.height, panel) * STEP
        reals += diagonal + kept * STEP * STEP + panel + 2 * panels * panel
        return reals * self.itemsize + ceil_div(1 + places, 4) * 16

    file: ClassVar[str] = "cholesky_any.cu"

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return "cholesky_warp" if self.systems else "cholesky_block"

    def grid(self, n: int, spec: DeviceSpec) -> tuple[int, ...]:
        return (ceil_div(n, self.systems or 1),)

    @property
    def constants(self) -> dict[str, Any]:
        if not self.systems:
            return super().constants | {"SHARED_BYTES": self.shared_bytes}
        return {name: value for name, value in super().constants.items() if name in OF_SYSTEMS}


@dataclass(frozen=True)
class CgConfig(KernelConfig):
    """Compile-time choices of cuda/cg_any.cu."""

    rank: int
    itemsize: int  # 4 (float32) or 8 (float64)
    warps: int  # warps of a block, which solves one system
    resident: bool  # keep the matrix in shared memory; otherwise read it again in each step
    blocks_per_sm: int  # minimum resident blocks per multiprocessor, which bounds the registers of a thread

    file: ClassVar[str] = "cg_any.cu"
    kernel: ClassVar[str] = "cg"
    tuned_as: ClassVar[str] = "cg_any"
    derived: ClassVar[tuple[str, ...]] = ("shared_bytes",)
    names: ClassVar[dict[str, str]] = {"itemsize": "REAL", "blocks_per_sm": "MIN_BLOCKS"}

    def check(self) -> None:
        require(self.warps in (1, 2, 4, 8, 16, 32), f"warps must be a power of two of at most 32, got {self.warps}")

    @classmethod
    def rule(cls, rank: int, itemsize: int, spec: DeviceSpec) -> CgConfig:
        """The choice without a tuned table entry: resident if two blocks fit; one loads while the other computes."""
        warps = 1 if rank <= 32 else 2 if rank <= 64 else 4 if rank <= 128 else 8
        registers = 64 if rank <= 128 else 128 if itemsize == 4 else 255
        config = cls(rank, itemsize, warps, True, max(1, min(16, REGISTERS // (warps * WARP * registers))))
        if 2 * (config.shared_bytes + RESERVED) <= spec.shared_bytes + RESERVED:
            return config
        config = replace(config, resident=False)
        while config.shared_bytes > spec.shared_bytes and config.warps > 1:  # each warp has its own sums
            config = replace(config, warps=config.warps // 2)
        config.require_fit(spec)
        return config

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def shared_bytes(self) -> int:
        packed = self.rank * (self.rank + 1) // 2 if self.resident else 0
        return self.warps * 8 + ((self.warps + 2) * ceil_div(self.rank, WARP) * WARP + packed) * self.itemsize


def _complete_constants(rank: int, itemsize: int, has_gram: bool) -> dict[str, Any]:
    # Several blocks per system: otherwise a row with very many slots keeps one block busy after all others end.
    return {"RANK": rank, "REAL": np.dtype(f"f{itemsize}"), "HAS_GRAM": has_gram, "PARTS": min(8, ceil_div(rank, 32))}


COMPLETE_THREADS = 128


# ---------------------------------------------------------------------------------------------------- launches


def _check_batch(device: Device, matrices: Array, rhs: Array, slots: Array) -> tuple[int, int]:
    """(number of systems, rank) of a batch."""
    n_slots, rank, dtype = matrices.shape[0], matrices.shape[-1], matrices.dtype
    check_all(
        device,
        matrices=(matrices, dtype, (n_slots, rank, rank)),
        rhs=(rhs, dtype, (n_slots, rank)),
        slots=(slots, np.int64, (None,)),
    )
    if not len(slots):
        raise TypeError("slots must have one element more than there are systems, got none")
    return len(slots) - 1, rank


def _check_solve(
    device: Device, solutions: Array, status: Array, sums: tuple[Array, ...], slots: Array, rows: Array
) -> int:
    """Check a batch and its results; returns the number of unknowns."""
    n, rank = _check_batch(device, sums[0], sums[1], slots)
    check_all(
        device,
        solutions=(solutions, sums[0].dtype, (None, None)),
        status=(status, np.int32, (len(solutions),)),
        rows=(rows, np.int32, (n,)),
    )
    check_columns(solutions, rank)
    return n * rank


def complete(
    device: Device, matrices: Array, rhs: Array, slots: Array, gram: Array | None, ridge: Array, scale: Array
) -> None:
    """Turn partial sums into systems, in place: ``A = sum of slots + gram + scale diag(ridge)``, ``b = sum of slots``.

    Slots are added in order: a rerun gives the same bits. System k is written to ``matrices[slots[k]]``; a system
    without slots is skipped.
    """
    n, rank = _check_batch(device, matrices, rhs, slots)
    dtype = matrices.dtype
    check_all(device, ridge=(ridge, dtype, (rank,)), scale=(scale, dtype, (n,)), gram=(gram, dtype, (rank, rank)))
    if not n:
        return
    constants = _complete_constants(rank, dtype.itemsize, gram is not None)
    kernel = get_kernel(device, "complete.cu", "complete", **constants)
    arguments = (matrices, rhs, slots, ridge if gram is None else gram, ridge, scale)
    kernel((n, constants["PARTS"]), (COMPLETE_THREADS,), arguments, 0)


@dataclass(frozen=True)
class TilesConfig(KernelConfig):
    """Compile-time choices of cuda/cholesky.cu: one warp per system, products on tensor cores."""

    rank: int  # 1 to 64
    teams: int  # warps of a block
    blocks_per_sm: int  # bounds the registers of a thread

    file: ClassVar[str] = "cholesky.cu"
    kernel: ClassVar[str] = "cholesky_tiles"

    def check(self) -> None:
        require(self.rank <= 64, f"rank must be in 1 ... 64, got {self.rank}")
        require(self.teams <= WARP, f"teams must be in 1 ... {WARP}, got {self.teams}")

    @classmethod
    def rule(cls, rank: int) -> TilesConfig:
        return cls(rank, 4, {1: 8, 2: 6, 3: 4, 4: 3}[ceil_div(rank, 16)])

    @property
    def threads(self) -> int:
        return WARP * self.teams

    def grid(self, n: int, spec: DeviceSpec) -> tuple[int, ...]:
        return (ceil_div(n, self.teams),)

    @property
    def shared_bytes(self) -> int:
        return 4 * self.teams * (solver_floats(self.rank, 1) + vector_floats(self.rank, 1))

    @property
    def constants(self) -> dict[str, Any]:
        return super().constants | {"WARPS": 1}


@dataclass(frozen=True)
class WideTilesConfig(KernelConfig):
    """Compile-time choices of cuda/cholesky_sums.cu: four warps per system, products on tensor cores."""

    rank: int  # 65 to 128
    blocks_per_sm: int = 5  # minimum resident blocks per multiprocessor, which bounds the registers of a thread

    @property
    def threads(self) -> int:
        return 4 * WARP

    file: ClassVar[str] = "cholesky_sums.cu"
    kernel: ClassVar[str] = "cholesky_matrices"

    def check(self) -> None:
        require(65 <= self.rank <= 128, f"rank must be in 65 ... 128, got {self.rank}")
        require(self.blocks_per_sm <= 7, f"blocks_per_sm must be in 1 ... 7, got {self.blocks_per_sm}")

    @classmethod
    def rule(cls, rank: int, spec: DeviceSpec, *, sums: bool = False) -> WideTilesConfig:
        """The choice for a rank: as many blocks as shared memory holds, if enough registers remain.

        65,536 systems in matrices on an H100 took 2.68, 2.42 and 2.28 ms with 4, 5 and 6 blocks (rank 100), on an H200
        2.22 and 2.39 with 6 and 7; and 3.24 and 2.96 ms with 4 and 5 (rank 128). With `sums` instead of
        matrices, a half sweep of Netflix's shape at rank 100 took 30.9 ms with 6 and 30.2 with 7 on an H200.
        """
        held = (spec.shared_bytes + RESERVED) // (cls(rank).shared_bytes + RESERVED)
        most = 5 if rank > 112 else 6 if rank > 96 and not sums else 7
        return cls(rank, max(1, min(most, held)))

    @property
    def shared_bytes(self) -> int:
        blocks = ceil_div(self.rank, 16)
        return 4 * (blocks * (blocks - 1) // 2 * 256 + solver_floats(self.rank, 1) + 4 * round_up(self.rank, 16) + 12)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of the kernel that solves systems in matrices.

        WARPS is that of cuda/system.cuh, for which each of the four warps works alone.
        """
        return super().constants | {"WARPS": 1, "MATRICES": True}

    def sums_constants(self, width: int) -> dict[str, Any]:
        """Compile-time constants of the kernel that solves sums, with solutions of `width` columns."""
        return super().constants | {"LD": width, "WARPS": 1}

    def grid(self, n: int, spec: DeviceSpec) -> tuple[int, ...]:
        return (min(n, spec.multiprocessors * self.blocks_per_sm),)


def config_for(rank: int, dtype: Any, spec: DeviceSpec) -> CholeskyConfig | TilesConfig | WideTilesConfig:
    if rank <= 128 and np.dtype(dtype) == np.float32 and spec.capability >= (8, 0):
        return TilesConfig.rule(rank) if rank <= 64 else WideTilesConfig.rule(rank, spec)
    return CholeskyConfig.default(rank, np.dtype(dtype).itemsize, spec)


def programs(
    spec: DeviceSpec, rank: int, dtype: Any, solver: str, has_gram: bool
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Arguments of `Device.kernel` for the kernels that complete and solve systems in matrices."""
    itemsize = np.dtype(dtype).itemsize
    if solver in ("cholesky", "cg"):
        config = config_for(rank, dtype, spec) if solver == "cholesky" else CgConfig.default(rank, itemsize, spec)
        yield program(config.file, config.kernel, **config.constants)
    yield program("complete.cu", "complete", **_complete_constants(rank, itemsize, has_gram))


def cholesky_solve(
    device: Device,
    solutions: Array,
    status: Array,
    sums: tuple[Array, ...],
    slots: Array,
    rows: Array,
    pivot_epsilon: float,
    config: CholeskyConfig | TilesConfig | WideTilesConfig | None = None,
) -> None:
    """Solve the first slot of each system by Cholesky; the matrices are destroyed.

    `solutions`: ``solutions[rows[k], :rank]`` is written: zeros where the status is not 0, or where a system has no
        slots.
    `status`: ``status[rows[k]]`` is 0; j + 1 if pivot j is at or below `pivot_epsilon` times its diagonal element; -1
        if a pivot or the solution is infinite or NaN.
    `sums`: (matrices, rhs).
    `rows`: distinct.
    """
    if not _check_solve(device, solutions, status, sums, slots, rows):
        return
    n, dtype = len(rows), sums[0].dtype
    config = config or config_for(sums[0].shape[-1], dtype, device.spec)
    sizes = [np.int64(solutions.shape[1])] + [np.int64(n)] * (config.kernel != "cholesky_block")
    arguments = (solutions, status, *sums, slots, rows, *sizes, dtype.type(pivot_epsilon))
    kernel = get_kernel(device, config.file, config.kernel, **config.constants)
    kernel(config.grid(n, device.spec), (config.threads,), arguments, config.shared_bytes)


def cg_solve(
    device: Device,
    solutions: Array,
    status: Array,
    sums: tuple[Array, ...],
    slots: Array,
    rows: Array,
    steps: int,
    config: CgConfig | None = None,
) -> None:
    """Run at most `steps` conjugate gradient steps on the first slot of each system, with `solutions` as warm start.

    The stopping rule is that of the CPU: the residual has fallen by 1e-10 or is close to underflow. Arguments are those
    of `cholesky_solve`. Status -1: residual or solution became infinite or NaN; -2: negative curvature.
    """
    if _check_solve(device, solutions, status, sums, slots, rows):
        config = config or CgConfig.default(sums[0].shape[-1], sums[0].dtype.itemsize, device.spec)
        arguments = (solutions, status, *sums, slots, rows, np.int64(solutions.shape[1]), np.int32(steps))
        kernel = get_kernel(device, config.file, config.kernel, **config.constants)
        kernel((len(rows),), (config.threads,), arguments, config.shared_bytes)
