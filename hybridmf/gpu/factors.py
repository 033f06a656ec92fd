"""Factors of a GPU fit: tables on the device (`DeviceFactors`), or offloaded to the host or to files (`HostFactors`).

Both have the same methods, so that solvers and ranks do not distinguish them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..core.objective import Factors, LazyFactors, Objective, Side
from ..core.scratch import mapped
from ..core.system import ceil_div
from ..device.copier import Copier
from ..device.cuda import Array, Device
from ..native import _draw
from ..plan.start import DrawnFactors
from ..plan.types import Plan
from . import arrays, losses, topk
from .assembly import Cleared
from .gram import gram_sum, weighted
from .launch import get_kernel
from .rows import RowRange, read_range, widen_range

EXACT_ROWS = 65536  # rows converted to float64 at a time for the Gram matrix in float64
QUAD = 4  # columns drawn by a thread of cuda/draw.cu, from the four words of one counter
LOW = 0xFFFFFFFF


class TableFactors(LazyFactors):
    """Factors of one side in the layout of the kernels."""

    # float array, shape (n, width): Factors, a constant 1 if the model has biases, zeros up to the width. Read-only
    table: Any
    factors: int  # number of columns that are factors
    range: RowRange | None  # range of the table's rows; None while it is unknown
    # whether the kernels that compute the arrays are known to be complete: copies to the host wait for no others
    settled = False

    @property
    def form(self) -> tuple[np.dtype, int]:
        return np.dtype(self.table.dtype), self.factors

    @property
    def has_range(self) -> bool:
        """Whether the range is needed: only the fused kernels use it, in float32."""
        return bool(self.table.dtype == np.float32)

    def finish_check(self, found: Callable[[], np.ndarray]) -> bool:
        """Wait for the check that `begin_check` returned, but not for later launches.

        Returns whether any row has a status other than 0; also finds the range of the rows.
        """
        known, failed = read_range(found())
        self.keep(settled=True)
        if self.has_range:
            self.keep(range=known)
        return failed

    def __len__(self) -> int:
        return len(self.table)


class DeviceFactors(TableFactors):
    """Factors on a device, copied to the host on first access; `cleared` is that of the half sweep that solved them."""

    def __init__(
        self,
        device: Device,
        table: Array,
        factors: int,
        device_bias: Array | None,
        range: RowRange | None = None,
        cleared: Cleared | None = None,
    ) -> None:
        self.keep(device=device, table=table, factors=factors, device_bias=device_bias, range=range, cleared=cleared)

    device: Device
    device_bias: Array | None
    cleared: Cleared | None

    @property
    def arrays(self) -> list[Array]:
        return [self.table] if self.device_bias is None else [self.table, self.device_bias]

    def with_arrays(self, given: Sequence[Array]) -> DeviceFactors:
        return DeviceFactors(self.device, given[0], self.factors, given[1] if len(given) > 1 else None)

    def held_by(self, device: Device | None = None) -> Array | None:
        alone = self._host is None and self.device_bias is None and self.table.shape[1] == self.factors
        return self.table if alone and device in (None, self.device) else None

    def blank_rows(self, rows: np.ndarray | None = None) -> np.ndarray:
        table = self.held_by()
        if rows is not None or table is None or table.dtype != np.float32:
            return super().blank_rows(rows)
        return np.flatnonzero(topk.row_norms(self.device, table) == 0)  # squares in float64 do not underflow

    def beside(self, array: np.ndarray) -> Array:
        """Copy the array to the device."""
        return self.device.upload(array)

    def begin_check(self, status: Array) -> Callable[[], np.ndarray]:
        cleared = self.cleared
        found = self.device.zeros(3, np.uint32) if cleared is None else cleared.found
        self.keep(cleared=None)
        widen_range(self.device, found, self.table if self.has_range else None, status)
        return self.device.begin_download(found)

    def exact_gram(self, device: Device, weights: Array | None = None) -> np.ndarray:
        """``F^T diag(weights) F`` in float64, shape (width, width), on the host; weights are where the factors are."""
        return exact_gram(device, self.table, weights)

    def times(self, copiers: Copiers, basis: np.ndarray) -> DeviceFactors:
        table = self.table.copy()
        if len(table):
            on_device = self.device.upload(basis.astype(table.dtype))
            table[:, : self.factors] = self.device.matmul(self.table[:, : self.factors], on_device)
        return DeviceFactors(self.device, table, self.factors, self.device_bias)

    def penalty(self, device: Device, objective: Objective, side: Side, degrees: np.ndarray) -> float:
        if not len(self):
            return 0.0
        squares = losses.row_squares(device, self.table, self.factors)
        bias = None if self.device_bias is None else device.download(self.device_bias)
        return objective.penalty_of_squares(side, squares, degrees, bias)

    def reordered(self, rows: np.ndarray) -> DeviceFactors:
        with self.device.active():
            at = self.device.upload(rows)
            return self.with_arrays([array[at] for array in self.arrays])

    def take(self, rows: np.ndarray) -> Factors:
        at = self.device.upload(rows)
        table, *bias = [self.device.download(arrays.gather(self.device, array, at)) for array in self.arrays]
        return Factors(table[:, : self.factors], bias[0] if bias else None)

    def part(self, rows: slice) -> DeviceFactors:
        """Some rows, as views."""
        return self.with_arrays([array[rows] for array in self.arrays])

    @property
    def bias(self) -> np.ndarray | None:
        """Biases on the host; without them, nothing is copied."""
        return None if self.device_bias is None else self.on_host().bias

    def write(self, target: np.ndarray) -> None:
        """See `Factors.write`; without a copy in between if rows are not padded."""
        if self._host is None and self.table.shape[1] == self.factors:
            self.device.download(self.table, target, settled=self.settled)
        else:
            super().write(target)

    def _brought(self) -> Factors:
        bias = None if self.device_bias is None else self.device.download(self.device_bias, settled=self.settled)
        matrix = self.device.download(self.table, settled=self.settled)
        if matrix.shape[1] != self.factors:
            matrix = np.ascontiguousarray(matrix[:, : self.factors])
        return Factors(matrix, bias)


def to_device(device: Device, factors: Factors, width: int) -> DeviceFactors:
    """Factors as a table of `width` columns on a device; initial factors are drawn there."""
    if isinstance(factors, DeviceFactors) and factors.device is device and factors.table.shape[1] == width:
        return factors
    if isinstance(factors, DrawnFactors):  # factors, a constant 1 if there are biases, zeros
        n, how = len(factors), factors.drawing
        drawn = device.empty((n, width), how.dtype)
        if drawn.size:
            scales = device.upload(factors.scales.astype(np.float32, copy=False))
            rows = None if factors.rows is None else device.upload(factors.rows.astype(np.int64, copy=False))
            constants = {"REAL": how.dtype, "HAS_ROWS": rows is not None, "THREADS": arrays.THREADS}
            where = (np.int64(n), np.int64(factors.first), np.int32(width), np.int32(how.rank))
            key = (np.uint32(how.seed & LOW), np.uint32(how.seed >> 32 & LOW))
            what = (np.uint32(how.stream), *key, np.int32(how.signed), np.int32(how.biases))
            with device.active():
                kernel, grid = get_kernel(device, "draw.cu", "draw_rows", **constants), n * ceil_div(width, QUAD)
                # without row numbers an arbitrary pointer, which is not read
                given = (drawn, scales, scales if rows is None else rows, where, what)
                kernel(arrays.grid_of(device, grid), (arrays.THREADS,), given, 0)
        return DeviceFactors(device, drawn, how.rank, device.zeros(n, how.dtype) if how.biases else None)
    table = np.empty((len(factors), width), dtype=factors.matrix.dtype)
    fill_table(table, factors)
    bias = None if factors.bias is None else device.upload(factors.bias)
    return DeviceFactors(device, device.upload(table), factors.matrix.shape[1], bias)


def fill_table(table: np.ndarray, factors: Factors) -> None:
    """Write factors, a constant 1 if there are biases, and zeros up to the width of the table."""
    rank = factors.matrix.shape[1]
    table[:, :rank] = factors.matrix
    pad_table(table, rank, factors.bias is not None)


def pad_table(table: np.ndarray, rank: int, biases: bool) -> None:
    """Write the columns after the factors: a constant 1 if there are biases, and zeros."""
    table[:, rank:] = 0
    if biases:
        table[:, rank] = 1


def weighted_gram(device: Device, table: Array, rank: int, objective: Objective) -> Array | None:
    """``unobserved_weight F^T F``, shape (rank, rank) zero-padded to whole blocks; None for explicit feedback."""
    if not objective.is_implicit:
        return None
    return weighted(device, gram_sum(device, table), rank, table.dtype, objective.unobserved_weight)


def exact_gram(device: Device, table: Array, weights: Array | None = None) -> np.ndarray:
    """``F^T diag(weights) F`` of a table in float64, shape (width, width), on the host."""
    total = np.zeros((table.shape[1], table.shape[1]))
    for start in range(0, len(table), EXACT_ROWS):
        part = arrays.added(device, table[start : start + EXACT_ROWS], 0, np.float64)
        weighted = part if weights is None else part * weights[start : start + EXACT_ROWS, None]
        total += device.download(device.matmul(part.T, weighted))
    return total


class HostFactors(TableFactors):
    """Factors offloaded to the memory of the host or to files, as tables with the layout of the device.

    `tables` is the pool of the table and of those of later half sweeps, `checked` returns the result of `widen_range`
    for the rows and their status, computed while they were on the device.
    """

    def __init__(
        self, table: np.ndarray, factors: int, host_bias: np.ndarray | None, tables: HostTables | None = None
    ) -> None:
        tables = tables or HostTables(table.shape, table.dtype)
        self.keep(table=table, factors=factors, host_bias=host_bias, range=None, tables=tables, checked=None)

    table: np.ndarray
    host_bias: np.ndarray | None
    tables: HostTables
    checked: Callable[[], np.ndarray] | None

    def _brought(self) -> Factors:
        """Factors without padding; a copy only if rows are padded."""
        return Factors(self.tables.packed(self.table[:, : self.factors]), self.host_bias)

    @property
    def bias(self) -> np.ndarray | None:
        return self.host_bias

    @property
    def arrays(self) -> list[Array]:
        return [self.table] if self.host_bias is None else [self.table, self.host_bias]

    def with_arrays(self, arrays: Sequence[Array]) -> HostFactors:
        return HostFactors(arrays[0], self.factors, arrays[1] if len(arrays) > 1 else None)

    def beside(self, array: np.ndarray) -> Array:
        """Return the array unchanged."""
        return array

    def take(self, rows: np.ndarray | slice) -> Factors:
        return Factors(self.table[rows, : self.factors], None if self.host_bias is None else self.host_bias[rows])

    def wait_by(self, release: Callable[[], bool]) -> None:
        self.tables.wait_by(release)

    def let_go(self) -> None:
        """Drop the copy without padding, if it is in a file."""
        if self.tables.folder:
            self.keep(_host=None)

    def begin_check(self, status: Array) -> Callable[[], np.ndarray]:
        """The check of `finish_check`, which is under way."""
        begun = self.checked
        assert begun is not None
        self.keep(checked=None)
        return begun

    def _blocks(self) -> Iterator[slice]:
        """Ranges of rows that are copied to the device one at a time."""
        for start in range(0, len(self), EXACT_ROWS):
            yield slice(start, min(start + EXACT_ROWS, len(self)))

    def exact_gram(self, device: Device, weights: Array | None = None) -> np.ndarray:
        total = np.zeros((self.table.shape[1],) * 2)
        for rows in self._blocks():
            own = None if weights is None else device.upload(weights[rows].astype(self.table.dtype))
            total += exact_gram(device, device.upload(self.table[rows]), own)
        return total

    def times(self, copiers: Copiers, basis: np.ndarray) -> HostFactors:
        """The factors in another basis, in a table of `tables`."""
        device, copier = copiers.device, copiers.solutions
        table = self.tables.take()
        on_device = device.upload(basis.astype(table.dtype))
        for rows in self._blocks():
            part = device.upload(self.table[rows])
            part[:, : self.factors] = device.matmul(part[:, : self.factors], on_device)
            copier.after(device.record())
            copier.fetch(table[rows], part)
        return HostFactors(table, self.factors, self.host_bias, tables=self.tables)

    def penalty(self, device: Device, objective: Objective, side: Side, degrees: np.ndarray) -> float:
        if not len(self):
            return 0.0
        squares = [losses.row_squares(device, device.upload(self.table[rows]), self.factors) for rows in self._blocks()]
        return objective.penalty_of_squares(side, np.concatenate(squares), degrees, self.host_bias)

    def vectors(self, first: int, last: int) -> list[np.ndarray]:
        """Some rows as one-dimensional arrays to copy: the table, and biases if there are any."""
        return [array[first:last].reshape(-1) for array in self.arrays]

    def lent(self, device: Device, vectors: Sequence[Array]) -> DeviceFactors:
        """Factors from such arrays on a device."""
        table = vectors[0].reshape(-1, self.table.shape[1])
        return DeviceFactors(device, table, self.factors, vectors[1] if len(vectors) > 1 else None, self.range)

    def sent(self, copiers: Copiers, first: int, last: int) -> DeviceFactors:
        return self.lent(copiers.device, [copiers.send(vector) for vector in self.vectors(first, last)])


GpuFactors = DeviceFactors | HostFactors


def range_on_host(table: np.ndarray) -> RowRange:
    """Counterpart of `hybridmf.gpu.rows.widen_range` on the host."""
    peaks = np.concatenate(
        [np.abs(table[k : k + EXACT_ROWS]).max(axis=1, initial=0) for k in range(0, len(table), EXACT_ROWS)]
        or [np.zeros(0, table.dtype)]
    )
    filled = peaks[peaks != 0]
    return RowRange(float(filled.max()), float(filled.min())) if len(filled) else RowRange(0.0, 0.0)


class HostTables:
    """A pool of tables of one shape; a table is reused once no array refers to it.

    A half sweep writes new factors and keeps the old ones, which callers may still use. Tables are page-locked once
    where possible: locking the pages of new memory takes longer than filling it. With a `folder` they are files there.
    """

    def __init__(self, shape: tuple[int, int], dtype: Any, folder: str = "") -> None:
        self.shape, self.dtype, self.folder = shape, np.dtype(dtype), folder
        self._made: list[np.ndarray] = []
        self._free: list[np.ndarray] = []
        self._copier: Copier | None = None
        self._release: Callable[[], bool] | None = None

    @classmethod
    def of(cls, side: Side, plan: Plan, shape: tuple[int, int]) -> HostTables:
        """Tables of a side of a fit; creates the files of all tables that the fit needs."""
        tables = cls(shape, plan.dtype, plan.scratch[0] if plan.factors_on == "disk" else "")
        if tables.folder:
            tables._free = [tables._make() for _ in range(plan.tables_of(side))]
        return tables

    def lock(self, copier: Copier) -> None:
        """Lock the pages of all tables, and of tables made later, by a copier."""
        self._copier = copier
        for table in self._made:
            self._pin(table)

    def wait_by(self, release: Callable[[], bool]) -> None:
        """Set a function to call once if there is no room for one more table, before an error is raised.

        `release`: waits until temporary users of tables have released them; False if this thread cannot wait.
        """
        self._release = release

    def _pin(self, table: np.ndarray) -> None:
        if self._copier is not None and not self.folder:
            self._copier.pin(table)

    def take(self) -> np.ndarray:
        """Take a table with arbitrary content; it returns to the pool with the last array that refers to it."""
        try:
            table = self._spare()
        except OSError:  # a full disk
            if self._release is None or not self._release():
                raise
            table = self._spare()
        lent = _Lent(table)
        weakref.finalize(lent, _take_back, weakref.ref(self), table).atexit = False
        return np.asarray(lent)

    def _spare(self) -> np.ndarray:
        """An unused table, or a new one."""
        try:
            return self._free.pop()
        except IndexError:  # none, or the checkpoint writer took it first
            return self._make()

    def packed(self, rows: np.ndarray) -> np.ndarray:
        """Rows of tables as contiguous memory: unchanged if they are contiguous, otherwise copied to a table."""
        if rows.flags.c_contiguous or not self.folder:
            return np.ascontiguousarray(rows)
        copy = self.take().reshape(-1)[: rows.size].reshape(rows.shape)
        copy[...] = rows
        return copy

    def _make(self) -> np.ndarray:
        table = mapped(self.shape, self.dtype, self.folder) if self.folder else np.empty(self.shape, self.dtype)
        self._made.append(table)
        self._pin(table)
        return table


def _take_back(tables: weakref.ref[HostTables], table: np.ndarray) -> None:
    owner = tables()
    if owner is not None:
        owner._free.append(table)


class _Lent:
    """Base of the arrays that refer to a table: the table is released with the last of them."""

    def __init__(self, table: np.ndarray) -> None:
        self.__array_interface__ = table.__array_interface__


def to_host(factors: Factors, width: int, tables: HostTables | None = None) -> HostFactors:
    """Factors as a table of `width` columns, taken from `tables` or new."""
    if isinstance(factors, HostFactors) and factors.table.shape[1] == width:
        return factors
    if isinstance(factors, DrawnFactors):  # into the table: there may be no room for a copy
        how = factors.drawing
        tables = tables or HostTables((len(factors), width), how.dtype)
        table = tables.take()
        _draw.draw_rows(table[:, : how.rank], *factors.arguments)
        pad_table(table, how.rank, how.biases)
        return HostFactors(table, how.rank, factors.first_bias(), tables=tables)
    given = factors.on_host()
    tables = tables or HostTables((len(given), width), given.matrix.dtype)
    table = tables.take()
    fill_table(table, given)
    return HostFactors(table, given.matrix.shape[1], given.bias, tables=tables)


class Copiers:
    """Copiers of ratings, of parts of the fixed side, of solutions and of small arrays, which run concurrently."""

    def __init__(self, device: Device) -> None:
        self.device = device

    @functools.cached_property
    def entries(self) -> Copier:
        """Copies ratings; the others share its pinned memory."""
        return self.device.copier()

    @functools.cached_property
    def parts(self) -> Copier:
        return self.entries.twin()

    @functools.cached_property
    def solutions(self) -> Copier:
        return self.entries.twin()

    @functools.cached_property
    def small(self) -> Copier:
        return self.entries.twin()

    def send(self, array: np.ndarray) -> Array:
        """Copy an array to the device for later launches; the host does not wait."""
        target = self.device.empty(array.shape, array.dtype)
        self.small.after(self.device.record())  # the previous content of this memory may still be read
        self.small.copy(target.reshape(-1), array.reshape(-1))
        self.device.wait(self.small.mark())
        return target
