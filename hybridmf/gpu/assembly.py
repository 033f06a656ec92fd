"""Shared parts of the assemblies of normal equations: systems, the interface of kernels, checks of arguments.

A published assembly sums ``matrices[slot] = sum outer y y^T`` (lower triangle) and ``rhs[slot] = sum linear y`` over
entries; Gram matrix and ridge are added elsewhere. A configuration holds all compile-time choices and raises for
invalid ones, so that a tuner can enumerate them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..device.cuda import Array, Device
from ..plan.types import NONNEGATIVE
from . import arrays, cholesky_any
from .features import add_pull
from .launch import DeviceEntries, check_all, get_kernel
from .nonnegative import nonnegative_solve
from .systems import SideSystems, Sums


class Cleared:
    """Memory of a half sweep that starts as zeros, cleared by one operation at first use.

    One thread launches a half sweep on one stream. So the memory is cleared before the first kernel that uses it, and a
    kernel sees what earlier ones have written. Each launch has a separate counter, also if a batch is repeated because
    memory ran out: no counter is cleared while a kernel may use it.

    `n_rows`: rows that the half sweep solves.
    """

    FOUND, HEAD = 3, 64

    def __init__(self, device: Device, n_rows: int) -> None:
        self.device, self.n_rows, self._used = device, n_rows, self.FOUND

    @functools.cached_property
    def _memory(self) -> Array:
        return self.device.zeros(self.HEAD + self.n_rows, np.int32)

    @property
    def status(self) -> Array:
        return self._memory[self.HEAD :]

    @property
    def found(self) -> Array:
        """Result of `hybridmf.gpu.rows.widen_range`, uint32 of shape (3,)."""
        return self._memory[: self.FOUND].view(np.uint32)

    def counter(self) -> Array:
        """Work counter for one launch, int32 of shape (1,); a new one for each call."""
        if self._used == self.HEAD:
            return self.device.zeros(1, np.int32)
        self._used += 1
        return self._memory[self._used - 1 : self._used]


@dataclass(frozen=True)
class PublishedKernels:
    """A published assembly: sums are matrices and right-hand sides, solved by a kernel for any rank.

    It has the methods of `hybridmf.gpu.fused.FusedKernels` for batches of rows; methods launch and do not wait.
    """

    device: Device
    rank: int
    dtype: Any
    solver: str  # {"cholesky", "cg", "nonnegative"}
    epsilon: float  # pivots at or below this part of their diagonal element count as rounding errors
    cg_steps: int
    # `sparse_syrk`, `mo_als` or `bals`, as a function of (device, sums, factors, entries, segments, config); the last
    # takes row blocks in place of segments, each row of which has one slot
    sum_rows: Callable[..., None]
    # config, solver_config: configurations of the assembly and of the solver. Default: the tuned ones, or those of the
    # rules
    config: Any = field(default=None, kw_only=True)
    solver_config: Any = field(default=None, kw_only=True)

    launched_for = ("", 1.0)  # see `FusedKernels`

    def operand(self, table: Array) -> Array:
        return table

    def empty(self, n_slots: int, *, whole: bool = False) -> Sums:
        """Allocate sums, of whose matrices `assemble` writes lower triangles; `whole`: zero the other elements."""
        rank, device = self.rank, self.device
        matrices = (device.zeros if whole else device.empty)((n_slots, rank, rank), self.dtype)
        return matrices, device.empty((n_slots, rank), self.dtype)

    def assemble(self, sums: Sums, table: Array, entries: DeviceEntries, segments: Any) -> None:
        if len(segments):
            self.sum_rows(self.device, sums, table, entries, segments, self.config)

    def solve(self, systems: SideSystems, sums: Sums, slots: Array, rows: Array, entries: DeviceEntries) -> None:
        if not len(rows):
            return
        device, rank, (matrices, rhs) = self.device, self.rank, sums
        if entries.predicted is not None and systems.pull is not systems.solutions:
            rhs[slots[:-1]] += systems.solutions[rows, :rank]
        if systems.pull is not None:
            add_pull(device, rhs, systems.pull, slots, rows, rank)
        if self.solver == NONNEGATIVE:
            nonnegative_solve(device, systems, sums, slots, rows, self.epsilon, self.solver_config)
            return
        given = (systems.solutions, systems.status, sums, slots, rows)
        gram = None
        if systems.gram is not None:
            gram = device.empty((rank, rank), systems.gram.dtype)
            arrays.copy(device, gram, systems.gram[:rank, :rank])
        scale = arrays.gather(device, systems.scale, rows)
        cholesky_any.complete(device, matrices, rhs, slots, gram, systems.ridge, scale)
        if self.solver == "cg":
            cholesky_any.cg_solve(device, *given, self.cg_steps, self.solver_config)
        else:
            cholesky_any.cholesky_solve(device, *given, self.epsilon, self.solver_config)


def check_factors(device: Device, sums: Sums, n: int | None, factors: Array, dtype: Any) -> int:
    """Check sums of `n` systems (None: any number), and that a table of factors has the layout of kernels; the rank."""
    matrices, rhs = sums
    rank, ld = int(matrices.shape[-1]), factors.shape[-1]
    check_all(
        device,
        matrices=(matrices, dtype, (n, rank, rank)),
        rhs=(rhs, dtype, (len(matrices), rank)),
        factors=(factors, dtype, (None, None)),
    )
    if ld < rank or ld * np.dtype(dtype).itemsize % 16:
        raise TypeError(
            f"factors must have rows of at least rank={rank} columns and a multiple of 16 bytes; got {ld} columns of "
            f"{np.dtype(dtype).name}"
        )
    return rank


def sum_segments(
    default: Callable[..., Any],
    device: Device,
    sums: Sums,
    factors: Array,
    entries: DeviceEntries,
    segments: Array,
    config: Any = None,
    **constants: Any,
) -> None:
    """Sum each segment of entries by a kernel with a configuration, by default that of `default`.

    `sums`, tuple of float (matrices, rhs) (n_slots, rank, rank) and (n_slots, rank): written; only lower triangles of
        `matrices`, elements above the diagonal are undefined.
    `factors`, float (n_fixed, ld): ``ld >= rank``, rows a multiple of 16 bytes; columns from `rank` on are not used.
    `segments`, int64 (n_segments, 3): slot, begin and end of each segment; every slot once. Longest first is fastest.
    `constants`: further compile-time constants.
    """
    dtype = np.dtype(entries.ratings.dtype)
    rank = check_factors(device, sums, None, factors, dtype)
    entries.check(device, dtype, len(factors))
    check_all(device, segments=(segments, np.int64, (None, 3)))
    config = config or default(rank, dtype.itemsize, device.spec)
    config.require_match(rank, dtype)
    config.require_fit(device.spec)
    if len(segments):
        sizes = config.sizes(rank, factors.shape[1])
        arguments = (*sums, factors, *entries.arrays, segments, *map(np.int32, sizes), *entries.scalars)
        kernel = get_kernel(device, config.file, config.kernel, **config.constants, **entries.constants, **constants)
        kernel(config.grid(len(segments), device.spec), (config.threads,), arguments, config.shared_bytes)
