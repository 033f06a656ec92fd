"""Assembly and solution of a side's systems: cuda/fused_als.cu, cuda/warpgroup_sums.cu and cuda/cholesky_sums.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device, DeviceSpec
from ..plan.fused import OPERAND_BYTES, FusedConfig, operand_bytes, solved_apart, summed_by_warpgroups
from ..plan.types import NONNEGATIVE
from .assembly import Cleared, PublishedKernels
from .cholesky_any import WideTilesConfig
from .features import add_pull
from .launch import DeviceEntries, check_all, get_kernel, program
from .nonnegative import NonnegativeConfig, nonnegative_solve
from .systems import SideSystems, Sums

PRECISION_CODES = {"float32": 0, "bf16x3": 1, "tf32": 2, "bf16": 3, "float16": 4, "float32_wide": 5}
SOLVER_CODES = {"cholesky": 0, "cg": 1}

Build: TypeAlias = "tuple[str, str, dict[str, Any]]"  # (file, kernel, constants)

WIDEST = 2.0**16
"""Maximum ratio of the largest factor to a row's largest for which float16 parts keep 22 bits of the latter."""

LARGEST_PART = 2.0**14
"""Bound of scaled factors: a power of two below float16's maximum of 65,504, with room for rounding."""

SPLIT_THREADS = 256


def split_constants(config: FusedConfig, precision: str) -> dict[str, Any]:
    return {"RANK16": config.rank16, "LD": config.width, "ARITHMETIC": PRECISION_CODES[precision]}


@functools.lru_cache(maxsize=64)  # each half sweep of each rank asks, as for `choices_of`
def scale_of(largest: float) -> float:
    """Power of two by which float16 parts of factors up to this size are scaled."""
    if not np.isfinite(largest) or largest <= 0:
        return 1.0
    return float(2.0 ** np.clip(np.floor(np.log2(LARGEST_PART / largest)), -60, 60))


@functools.lru_cache(maxsize=64)
def choices_of(config: FusedConfig, precision: str, solver: str, spec: DeviceSpec) -> dict[str, Any]:
    """Arguments of `builds` that depend on the device."""
    tiles = WideTilesConfig.rule(config.rank, spec, sums=True) if config.solved_by_sums(solver) else None
    return {"by_warpgroups": summed_by_warpgroups(config.rank, precision, solver, spec), "tiles": tiles}


WARPGROUP_THREADS = 256
WARPGROUP_BLOCKS_PER_SM = 2
WARPGROUP_BUFFERS = 6

WARPGROUP_SHARED_BYTES = 1024 + WARPGROUP_BUFFERS * (32 * 2 * 128 * 2 + 336)
"""Shared memory of a block of cuda/warpgroup_sums.cu: chunks of 32 rows in parts, and their weights."""


def _grid(device: Device, config: FusedConfig, work: int) -> tuple[int]:
    return (max(1, min(ceil_div(work, config.teams), device.spec.multiprocessors * config.blocks_per_sm)),)


class Kind(NamedTuple):
    """What the programs of a configuration depend on."""

    precision: str  # a key of `PRECISION_CODES`
    solver: str  # {"cholesky", "cg", "nonnegative"}
    implicit: bool = False
    offsets: bool = False  # whether entries have offsets by column
    residual: bool = False  # whether entries have predictions


def build_constants(config: FusedConfig, kind: Kind) -> dict[str, Any]:
    # a solver in a separate file needs no code here
    codes = {"ARITHMETIC": PRECISION_CODES[kind.precision], "SOLVER": SOLVER_CODES.get(kind.solver, 0)}
    codes["SOLVED_APART"] = solved_apart(config.rank, kind.solver)
    codes |= {"RESIDUAL": True} if kind.residual else {}
    return config.constants | {"IMPLICIT": kind.implicit, "HAS_OFFSETS": kind.offsets} | codes


def builds(config: FusedConfig, kind: Kind, *, by_warpgroups: bool, tiles: WideTilesConfig | None) -> list[Build]:
    """All programs for a kind of entries, the slowest to compile first."""
    precision, solver, *_ = kind
    if solver == NONNEGATIVE:
        names, sums = ["assemble_segments"], [NonnegativeConfig.of_tiles(config.rank).build]
    elif tiles is not None:
        constants = tiles.sums_constants(config.width)
        names, sums = ["assemble_segments"], [("cholesky_sums.cu", "cholesky_sums", constants)]
    else:
        names, sums = ["solve_partials", "assemble_segments"], []
        names = names if solved_apart(config.rank, solver) else ["solve_rows", *names]
    splitting = [("split.cu", "split_table", split_constants(config, precision))] if precision in OPERAND_BYTES else []
    if by_warpgroups:
        names.remove("assemble_segments")
        entries = {"IMPLICIT": kind.implicit, "HAS_OFFSETS": kind.offsets, "RESIDUAL": kind.residual}
        constants = {"RANK": config.rank, "ARITHMETIC": PRECISION_CODES[precision]} | entries
        sums = [("warpgroup_sums.cu", "warpgroup_sums", constants), *sums]
    return [_build(name, config, kind) for name in names] + sums + splitting


def _build(name: str, config: FusedConfig, kind: Kind) -> Build:
    if name == "assemble_segments":
        config = config.assembling(kind.precision, kind.solver)
    if name == "solve_partials":  # does not depend on the kind of entries: one program for all
        config, kind = config.solving, Kind("float32", kind.solver)
    return "fused_als.cu", name, build_constants(config, kind)


@functools.cache  # threads of ranks wait for each other while one formats it
def _programs(
    config: FusedConfig, kind: Kind, by_warpgroups: bool, tiles: WideTilesConfig | None
) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    found = builds(config, kind, by_warpgroups=by_warpgroups, tiles=tiles)
    return {name: program(file, name, **constants) for file, name, constants in found}


@dataclass(frozen=True)
class FusedKernels:
    """The fused kernels, as called by a half sweep; methods launch and do not wait."""

    device: Device
    config: FusedConfig
    precision: str = "float32"  # a key of `PRECISION_CODES`
    solver: str = "cholesky"  # {"cholesky", "cg", "nonnegative"}
    epsilon: float = 0.0  # pivots up to this share of their diagonal element count as rounding errors
    cg_steps: int = 1
    largest: float = 1.0  # largest absolute value of the factors; read only if the precision is float32
    cleared: Cleared | None = field(default=None, compare=False)  # counters of the half sweep

    def _counter(self) -> Array:
        """Work counter of one launch; the stream clears it before that launch, and no other launch uses it."""
        return self.device.zeros(1, np.int32) if self.cleared is None else self.cleared.counter()

    @functools.cached_property
    def _choices(self) -> dict[str, Any]:
        return choices_of(self.config, self.precision, self.solver, self.device.spec)

    @property
    def by_warpgroups(self) -> bool:
        """Whether cuda/warpgroup_sums.cu sums segments."""
        return bool(self._choices["by_warpgroups"])

    @property
    def _operand_form(self) -> tuple[Any, int]:
        """dtype and columns of what `operand` returns."""
        if self.precision in OPERAND_BYTES:
            return np.uint32, operand_bytes(self.config.rank, self.precision) // 4
        return np.float32, self.config.width

    @functools.cached_property
    def table_scale(self) -> float:
        """Power of two by which float16 parts of the factors are scaled."""
        return scale_of(self.largest) if self.precision == "float32" else 1.0

    @property
    def launched_for(self) -> tuple[str, float]:
        """What launches have of the range of the factors."""
        return self.precision, self.table_scale

    def operand(self, table: Array) -> Array:
        """The factors converted by cuda/split.cu: two 16-bit parts, or bf16; uint32, shape (n, bytes / 4)."""
        if self.precision not in OPERAND_BYTES:
            return table
        device, config = self.device, self.config
        check_all(device, table=(table, np.float32, (None, config.width)))
        parts = device.empty((len(table), self._operand_form[1]), np.uint32)
        if len(table):
            kernel = get_kernel(device, "split.cu", "split_table", **split_constants(config, self.precision))
            blocks = min(ceil_div(len(table) * config.rank16 // 2, SPLIT_THREADS), 16 * device.spec.multiprocessors)
            kernel((blocks,), (SPLIT_THREADS,), (parts, table, np.int64(len(table)), np.float32(self.table_scale)), 0)
        return parts

    def empty(self, n_slots: int, *, whole: bool = False) -> Sums:
        """Allocate sums: one vector for each segment, of which `assemble` writes all elements."""
        return (self.device.empty((n_slots, self.config.partial_floats), np.float32),)

    def assemble(self, sums: Sums, table: Array, entries: DeviceEntries, segments: Array) -> None:
        """Launch assemble_segments or warpgroup_sums: sums of segments (slot, begin, end); `table` is of `operand`."""
        if not len(segments):
            return
        device, config, (partials,) = self.device, self.config, sums
        self._check_operand(table, entries)
        check_all(
            device,
            partials=(partials, np.float32, (None, config.partial_floats)),
            segments=(segments, np.int64, (None, 3)),
        )
        arrays = (partials, table, *entries.arrays, segments)
        scalars = (np.int32(len(segments)), *entries.scalars, np.float32(self.table_scale))
        if self.by_warpgroups:
            grid = (min(len(segments), int(device.spec.multiprocessors * WARPGROUP_BLOCKS_PER_SM)),)
            kernel = self._kernel("warpgroup_sums", entries)
            kernel(grid, (WARPGROUP_THREADS,), (*arrays, *scalars), WARPGROUP_SHARED_BYTES)
            return
        config = config.assembling(self.precision, self.solver)
        kernel, shared = self._kernel("assemble_segments", entries), config.shared_bytes(self.solver, self.precision)
        grid, arguments = _grid(device, config, len(segments)), (*arrays, self._counter(), *scalars)
        kernel(grid, (config.threads,), arguments, shared)

    def solve(self, systems: SideSystems, sums: Sums, slots: Array, rows: Array, entries: DeviceEntries) -> None:
        """Launch solve_partials: solve rows, row k from ``partials[slots[k] : slots[k + 1]]``."""
        if not len(rows):
            return
        device, config, (partials,) = self.device, self.config, sums
        systems.check(device, np.float32, config.width, config.rank)
        check_all(
            device,
            partials=(partials, np.float32, (None, config.partial_floats)),
            slots=(slots, np.int64, (len(rows) + 1,)),
            rows=(rows, np.int32, (None,)),
        )
        rhs = partials[:, config.partial_floats - config.rank16 :]
        if entries.predicted is not None and systems.pull is not systems.solutions:
            rhs[slots[:-1], : config.rank] += systems.solutions[rows, : config.rank]
        if systems.pull is not None:
            add_pull(device, rhs, systems.pull, slots, rows, config.rank)
        if self.solver == NONNEGATIVE:
            nonnegative_solve(device, systems, sums, slots, rows, self.epsilon)
            return
        arrays = (systems.solutions, systems.status, partials, slots, rows)
        terms = (systems.gram_pointer, systems.ridge, systems.scale)
        n, epsilon = np.int32(len(rows)), np.float32(self.epsilon)
        if config.solved_by_sums(self.solver):
            tiles = self._choices["tiles"]
            kernel = get_kernel(device, "cholesky_sums.cu", "cholesky_sums", **tiles.sums_constants(config.width))
            grid, shared = tiles.grid(len(rows), device.spec), tiles.shared_bytes
            kernel(grid, (tiles.threads,), (*arrays, *terms, n, epsilon), shared)
            return
        kernel, shared = self._kernel("solve_partials", entries), config.solving.shared_bytes(self.solver)
        arguments = (*arrays, *terms, self._counter(), n, epsilon, np.int32(self.cg_steps))
        kernel(_grid(device, config, len(rows)), (config.threads,), arguments, shared)

    def solve_rows(
        self, systems: SideSystems, table: Array, entries: DeviceEntries, indptr: Array, rows: Array
    ) -> None:
        """Launch solve_rows: solve the systems of `rows`, longest first, each assembled by one team."""
        if not len(rows):
            return
        device, config = self.device, self.config
        systems.check(device, np.float32, config.width, config.rank)
        self._check_operand(table, entries)
        check_all(device, indptr=(indptr, np.int64, (len(systems.scale) + 1,)), rows=(rows, np.int32, (None,)))
        arrays = (systems.solutions, systems.status, table, *entries.arrays, indptr, rows)
        terms = (systems.gram_pointer, systems.ridge, systems.scale)
        scalars = (np.float32(self.table_scale), np.float32(self.epsilon), np.int32(self.cg_steps))
        arguments = (*arrays, *terms, self._counter(), np.int32(len(rows)), *entries.scalars, *scalars)
        if systems.pull is not None and systems.pull is not systems.solutions:
            raise TypeError("solve_rows reads a pull in the place of the solutions")
        kernel = self._kernel("solve_rows", entries, pulled=systems.pull is not None)
        shared = config.shared_bytes(self.solver, self.precision)
        kernel(_grid(device, config, len(rows)), (config.threads,), arguments, shared)

    def _check_operand(self, table: Array, entries: DeviceEntries) -> None:
        dtype, columns = self._operand_form
        check_all(self.device, table=(table, dtype, (None, columns)))
        entries.check(self.device, np.float32, len(table))

    def _kernel(self, name: str, entries: DeviceEntries, *, pulled: bool = False) -> Any:
        of_entries = (entries.implicit, entries.offsets is not None, entries.predicted is not None)
        kind = Kind(self.precision, self.solver, *of_entries)
        if pulled:
            file, name, constants = _build(name, self.config, kind)
            return get_kernel(self.device, file, name, **constants, PULLED=True)
        return self.device.kernel(*_programs(self.config, kind, **self._choices)[name])

    def programs(self, implicit: bool, offsets: bool, residual: bool = False) -> list[tuple[str, str, tuple[str, ...]]]:
        """Source, kernel and constants of all programs for such entries, the slowest to compile first."""
        kind = Kind(self.precision, self.solver, implicit, offsets, residual)
        return list(_programs(self.config, kind, **self._choices).values())


RowKernels = FusedKernels | PublishedKernels  # the kernels that sum and solve the rows of a half sweep
