"""Sizes of the fused kernels and of Gram matrices: configurations, shared memory, limits, and memory of sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..core.system import ceil_div, round_up
from ..device.cuda import DeviceSpec
from . import tables

MAX_RANK = 128  # a system must fit in the registers of a block of threads
BLOCK = 16
INVERSE_STRIDE = 20  # floats from one column of the inverse of a diagonal block to the next, as in cuda/system.cuh

SEGMENT = 4096
"""Entries above which a row is split: its sums are 9 KB (f = 64) for the 1 MB of factors that 4,096 entries gather."""

SOLVED_APART = 81
"""Rank from which one kernel assembles all rows and another one factors them: together, few systems fit on a
multiprocessor, and the code does not fit in the instruction cache (with conjugate gradients it does). The sums go
through global memory, 21 to 37 KB per row. Netflix's shape, implicit, on an H200: an iteration at rank 96 takes 40.5
instead of 57.2 ms, at rank 80 it would take 32.1 instead of 31.3. To measure it again, change this and run
``bench/gpu.py --task als --profile full``."""

OPERAND_BYTES = {"float32": 4, "bf16x3": 4, "bf16": 2}
"""Bytes of an element in the converted factors that products read, by precision; others read the factors themselves."""

WARPGROUP_RANK = 97
"""Rank from which cuda/warpgroup_sums.cu sums on Hopper. On an H200, an iteration on Netflix's shape in bf16x3 takes
36.3 instead of 39.8 ms at rank 100 (explicit), 43.0 instead of 44.1 ms with implicit feedback. At rank 96 it would take
31.4 instead of 32.6 ms (explicit), but 37.8 instead of 36.6 ms (implicit)."""

WARPGROUP_PRECISIONS = ("float32", "bf16x3")


def solved_apart(rank: int, solver: str) -> bool:
    """Whether one kernel assembles rows of any length and another one solves them."""
    return rank >= SOLVED_APART and solver != "cg"


def summed_by_warpgroups(rank: int, precision: str, solver: str, spec: DeviceSpec) -> bool:
    """Whether cuda/warpgroup_sums.cu sums; its instructions exist only in compute capability 9.0."""
    return (
        rank >= WARPGROUP_RANK
        and precision in WARPGROUP_PRECISIONS
        and solved_apart(rank, solver)
        and spec.capability == (9, 0)
    )


def partial_floats(rank: int) -> int:
    """Floats of the partial sums of a segment in any configuration."""
    blocks = ceil_div(rank, BLOCK)
    return blocks * (blocks + 1) // 2 * BLOCK * BLOCK + blocks * BLOCK


def solver_floats(rank: int, warps: int) -> int:
    """Floats of shared memory in which a team of warps solves a system, without its vectors.

    FACTOR_FLOATS in cuda/system.cuh: a panel, and the inverses of the blocks on the diagonal.
    """
    blocks = ceil_div(rank, BLOCK)
    panel = BLOCK if warps == 1 else blocks * 2 * BLOCK * BLOCK
    return panel + blocks * ((BLOCK - 1) * INVERSE_STRIDE + BLOCK)


def vector_floats(rank: int, warps: int) -> int:
    """Floats of shared memory for the vectors of a system: TEAM_VECTORS in cuda/system.cuh."""
    return 4 * round_up(rank, BLOCK) + (8 if warps == 1 else 24)


@dataclass(frozen=True)
class FusedConfig(tables.KernelConfig):
    """Compile-time choices of cuda/fused_als.cu."""

    rank: int  # order of the systems, 1 to 128
    warps: int  # warps of a team: 1, 2 or 4
    teams: int  # teams of a block of threads
    stages: int  # chunks of entries being loaded or in use
    blocks_per_sm: int  # bounds the registers of a thread

    names: ClassVar[dict[str, str]] = {"width": "LD"}
    derived: ClassVar[tuple[str, ...]] = ("width",)

    def check(self) -> None:
        if self.rank > MAX_RANK:
            raise ValueError(f"rank must be in 1 ... {MAX_RANK}, got {self.rank}")
        if self.warps not in (1, 2, 4) or (self.warps > 1 and self.rank16 < 5 * BLOCK):
            raise ValueError(
                f"warps must be 1, or 2 or 4 from rank {4 * BLOCK + 1} on; got {self.warps} at rank {self.rank}"
            )
        if (self.warps > 1 and self.teams > 1) or self.threads > 1024:
            raise ValueError(f"teams must be 1, or with warps=1 up to 32; got {self.teams} with warps={self.warps}")
        tables.require(self.stages >= 2, f"stages must be at least 2, got {self.stages}")

    @classmethod
    def default(  # type: ignore[override]
        cls, rank: int, spec: DeviceSpec, precision: str = "float32", solver: str = "cholesky"
    ) -> FusedConfig:
        facts = {"rank": rank, "precision": precision, "solver": "cg" if solver == "cg" else "cholesky"}
        found = tables.best(cls, "fused", spec, facts, given={"rank": rank}, block=BLOCK)
        if found is not None and found.shared_bytes(solver, precision) <= spec.shared_bytes:
            return found
        return cls.rule(rank, precision, solver)

    @classmethod
    def rule(cls, rank: int, precision: str = "float32", solver: str = "cholesky") -> FusedConfig:
        blocks = ceil_div(rank, BLOCK)
        if blocks >= 7 and solver == "cg" and precision in OPERAND_BYTES:
            # 26.0 ms instead of 27.4 with four warps: six steps at rank 100, Netflix's shape on an H200
            return cls(rank, 2, 1, 3, 4) if precision == "bf16" and blocks == 7 else cls(rank, 4, 1, 3, 3)
        warps, teams, stages, blocks_per_sm = {
            1: (1, 4, 2, 6),
            2: (1, 4, 2, 4),
            3: (1, 4, 2, 3),
            4: (1, 4, 2, 2),
            5: (2, 1, 3, 4),
            6: (4, 1, 3, 2),
            7: (2, 1, 3, 4),
            8: (4, 1, 3, 2),
        }[blocks]
        if precision == "bf16":  # rows of half the bytes
            stages = max(stages, 4 if blocks == 1 or warps == 2 else 3)
        return cls(rank, warps, teams, stages, blocks_per_sm)

    @property
    def rank16(self) -> int:
        return round_up(self.rank, BLOCK)

    @property
    def width(self) -> int:
        """Floats from one row of a table of factors to the next."""
        return round_up(self.rank, 4)

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.teams

    def shared_bytes(self, solver: str = "cholesky", precision: str = "float32") -> int:
        chunk = 64 if precision == "bf16" and self.warps == 4 else 32
        half = self.rank16 // 2  # floats of a row in bf16, which are padded as by operand_stride in cuda/tensor.cuh
        staged = self.stages * chunk * (half + 8 * (half % 16 == 0) if precision == "bf16" else self.rank16 + 8)
        if solver == "cg":
            staged += (self.warps + 1) * self.rank16
        else:
            staged = max(staged, solver_floats(self.rank, self.warps))
        units = ceil_div(self.stages * chunk, 32) + chunk // 32
        entries = 32 * 2 ** (units - 1).bit_length()
        return 4 * self.teams * (staged + vector_floats(self.rank, self.warps) + 3 * entries)

    def assembling(self, precision: str, solver: str) -> FusedConfig:
        """The configuration of the kernel that stores sums; another one solves them, with its own warps."""
        if not solved_apart(self.rank, solver) or precision not in OPERAND_BYTES:
            return self
        # both sides of Netflix's shape on an H200: with four warps 38.6 ms instead of 46.8 with two (rank 100); with
        # three blocks 48.6 instead of 52.1 with two (rank 128), with four 40.5 instead of 41.2 with three (rank 96)
        blocks = 4 if self.rank <= (96 if precision == "float32" else 112) else 3
        return replace(self, warps=4, teams=1, stages=3, blocks_per_sm=blocks)

    @property
    def solving(self) -> FusedConfig:
        """The configuration of the kernel that solves sums; it needs no memory for entries."""
        return replace(self, stages=2)

    def solved_by_sums(self, solver: str) -> bool:
        """Whether cuda/cholesky_sums.cu solves, with four warps per system."""
        return solver == "cholesky" and solved_apart(self.rank, solver)

    @property
    def partial_floats(self) -> int:
        """Floats of the partial sums of a segment."""
        return partial_floats(self.rank)


def supports(
    rank: int,
    dtype: Any,
    spec: DeviceSpec,
    unobserved_weight: float = 0.0,
    *,
    biases: bool = False,
    size: str = "factors",
) -> str:
    """Reason why the fused kernels do not support a problem, in the words of the caller; empty if they do.

    `rank`: order of the systems, with the coordinate of the biases. `biases`: whether the rank includes a coordinate of
    biases. `size`: parameter that sets the rank.
    """
    given = f"{size}={rank - biases}" + (", and one coordinate for the biases," if biases else "")
    if rank > MAX_RANK:
        remedy = f" (use {size}={MAX_RANK - 1}, or biases=False)" if biases and rank == MAX_RANK + 1 else ""
        return f"{given} {'are' if biases else 'is'} beyond {MAX_RANK}{remedy}"
    if np.dtype(dtype) != np.float32:
        return f"dtype {np.dtype(dtype).name} has no tensor-core products"
    if spec.capability < (8, 0):
        return f"compute capability {spec.capability[0]}.{spec.capability[1]} is below 8.0"
    if unobserved_weight > 1:
        return f"unobserved_weight {unobserved_weight:g} above 1 makes weights negative, whose root does not exist"
    shared = FusedConfig.rule(rank).shared_bytes("cg")
    if shared > spec.shared_bytes:
        return f"{given} {'need' if biases else 'needs'} {shared} bytes of shared memory"
    return ""


def operand_bytes(rank: int, precision: str) -> int:
    """Bytes of a row of converted factors, in addition to the factors; 0 if products read the factors."""
    return OPERAND_BYTES.get(precision, 0) * round_up(rank, BLOCK)


def table_width(rank: int, dtype: Any) -> int:
    """Columns of a table of factors, whose rows are multiples of 16 bytes."""
    return round_up(rank, 16 // np.dtype(dtype).itemsize)


# ------------------------------------------------------------------------------------------------------- Gram matrices

GRAM_TILE = 64
GRAM_BLOCKS = 1056  # blocks of threads that share a table: eight on each multiprocessor of an H200

GRAM_ROWS = (256, 4096)
"""Minimum and maximum rows of a segment, which is summed in the table's type; segments are added in float64."""

GRAM_SUMS_BYTES = 64 << 20  # maximum memory of the sums of all segments


def gram_sides(width: int) -> tuple[int, int]:
    """Rows and columns of the sums of a segment, and its number of tiles."""
    side = round_up(width, GRAM_TILE)
    return side, side // GRAM_TILE * (side // GRAM_TILE + 1) // 2


def gram_rows(n: int, width: int, itemsize: int) -> int:
    side, tiles = gram_sides(width)
    rows = int(np.clip(ceil_div(n * tiles, GRAM_BLOCKS), *GRAM_ROWS))
    return max(rows, ceil_div(n, max(1, GRAM_SUMS_BYTES // (side * side * itemsize))))


def gram_bytes(n: int, width: int, itemsize: int) -> int:
    """Bytes of the sums of all segments of a table; plans omit small arrays such as their total."""
    side, _ = gram_sides(width)
    return ceil_div(n, gram_rows(n, width, itemsize)) * side * side * itemsize
