"""SGD on a GPU: launches of cuda/msgd.cu and cuda/batch_hogwild.cu, and the schedules; see also `hybridmf.cpu.sgd`."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import scipy.sparse as sp

from .._formats import degree_order
from ..core.objective import SIDES, Factors, Objective, Side, Terms, other_side
from ..core.sparse import column_bounds, take_rows, transposed
from ..core.system import ceil_div, round_up
from ..core.validate import csr_arrays
from ..device.arguments import Struct
from ..device.cuda import Array, Device, DeviceSpec, PreparedLaunch
from ..plan.epochs import GridBlock, passes_of
from ..plan.sgd import LONG_ROW, MOST_CROWDED, MOST_RANGES, RUN, SgdMethod, range_count, stored_width
from ..plan.tables import KernelConfig
from ..plan.types import Plan
from . import arrays, losses
from .factors import DeviceFactors, to_device
from .half import SegmentedRows, row_segments
from .launch import DeviceEntries, check_all, get_kernel, program
from .matrix import DeviceMatrix
from .rows import read_range, widen_range

LAYOUTS: dict[str, dict[Side, Side]] = {
    "user": {"item": "user", "user": "user"},
    "item": {"item": "item", "user": "item"},
    "mixed": {"item": "item", "user": "user"},
    "crossed": {"item": "user", "user": "item"},
}
"""For each ordering, the side by whose rows entries are stored for the passes over items and over users; MSGD 6.4. A
pass is centralized (Alg. 3) if that is the side it updates, otherwise decentralized (Alg. 2). "user" and "item" have
one pass of each kind, and keep one orientation of the ratings on the device. "mixed" has two centralized passes, with
long rows solved in chunks (ours); "crossed" has two decentralized ones, which MSGD also measures."""

THREADS = 128
"""Threads of a block."""

NARROW_WARPS = 50
"""Warps of a pass per multiprocessor, with half the lanes per row, from which on `centralized_narrow` is faster. On an
H200, users of Netflix took 4.5 instead of 6.2 ms at f = 128 and 2.4 instead of 2.9 at f = 64, but short rows of its
items, which have 33 such warps per multiprocessor at f = 64, 4.6 instead of 3.9 ms."""

DECENTRALIZED_THREADS = 256
"""Threads of a block of the kernel `decentralized`."""

BATCH = 32
"""Default number of runs that a worker takes at a time: up to 512 entries (cuMF_SGD: 256). In a trial, an epoch took as
long with 8 and with 128."""

WORKER_ENTRIES = 16_000
"""Minimum entries of each worker in an epoch. Concurrent updates of a row from the same values count as one; fewer
workers on small problems limit that effect."""

SHORTEST_LONG_ROW = 1024
"""Rows up to this length never get a separate thread block: its setup takes as long as processing the row."""

CROWDED = 1 / 2400
"""Part of all entries from which on a row of the smaller side has runs of its own; see cuda/batch_hogwild.cu. In trials
on an H100 (Netflix's shape, f = 128, float16, runs of 8), an epoch took 22.7 ms without such runs, and 21.5, 16.9, 15.7
and 15.6 with 1 / 600, 1 / 1200, 1 / 2400 and 1 / 5000."""

RANGES_PER_SM = 2
"""Blocks per multiprocessor in a decentralized pass, each with one range of updated rows."""


# ---------------------------------------------------------------------------------------------- operands


@dataclass(frozen=True)
class FactorRows:
    """Working copy of the factors of one side."""

    matrix: Array  # float (n, ld): padded with zeros to a multiple of 16 bytes
    bias: Array | None = None  # float (n,), or None

    @property
    def struct(self) -> tuple[Array, Array]:
        """Kernel argument; without biases an arbitrary pointer, which is not read."""
        return self.matrix, self.matrix if self.bias is None else self.bias

    def packed(self, device: Device) -> Struct:
        """The kernel argument of all prepared launches for these rows; `Struct.set` gives them other rows."""
        if "_packed" not in self.__dict__:
            object.__setattr__(self, "_packed", Struct(self.struct, device.address))
        struct: Struct = self.__dict__["_packed"]
        return struct

    def share(self, struct: Struct) -> None:
        """Let launches that were prepared with the struct of other rows have these."""
        struct.set(self.struct)
        object.__setattr__(self, "_packed", struct)


@dataclass(frozen=True)
class Walk:
    """Entries on a device, by the rows of one side."""

    # int32 (n,): rows of the other side, ascending in each row; there may be more than those of the rows
    indices: Array
    ratings: Array  # float (n,)
    # begins, ends: int64 (n_ranges, n_rows): bounds of the entries of each row in each range of columns
    begins: Array
    ends: Array
    first: int = 0  # column of row 0 of the other side's `FactorRows`; 0 if `FactorRows` has all columns

    @property
    def struct(self) -> tuple[Any, ...]:
        """Kernel argument."""
        return self.indices, self.ratings, self.begins, self.ends, np.int32(self.first)

    @property
    def n_ranges(self) -> int:
        """Number of ranges of columns."""
        return len(self.begins)

    @functools.cached_property
    def parts(self) -> list[Walk]:
        """The entries of each range, for launches in every epoch."""
        pairs = [(self.begins[k : k + 1], self.ends[k : k + 1]) for k in range(self.n_ranges)]
        return [replace(self, begins=begins, ends=ends) for begins, ends in pairs]

    @functools.cached_property
    def whole(self) -> Walk:
        """The same entries in one range."""
        return replace(self, begins=self.begins[:1], ends=self.ends[-1:])

    @classmethod
    def upload(cls, device: Device, matrix: sp.csr_array | DeviceMatrix, n_ranges: int = 1) -> Walk:
        """All entries of a matrix, by its rows, with the bounds of ranges of about equal numbers of columns."""
        if isinstance(matrix, DeviceMatrix):
            if n_ranges == 1:
                return cls(matrix.indices, matrix.data, matrix.starts[None, :-1], matrix.starts[None, 1:])
            indices, ratings, host = matrix.indices, matrix.data, matrix.host
            assert host is not None
        else:
            indices, ratings = (device.upload(array) for array in csr_arrays(matrix)[1:])
            host = matrix
        columns = np.linspace(0, matrix.shape[1], n_ranges + 1).astype(np.int64)
        bounds = device.upload(column_bounds(host, columns[1:-1]))
        return cls(indices, ratings, bounds[:-1], bounds[1:])


@dataclass(frozen=True)
class Bins:
    """Rows that the blocks of a kernel process one after another."""

    rows: Array  # int32 (n_rows,): by block
    first: Array  # int32 (n_bins + 1,): bounds of the rows of each block

    @classmethod
    def balance(cls, device: Device, rows: np.ndarray, lengths: np.ndarray, most: int) -> Bins:
        """Divide rows among at most `most` bins of about equal total length: each goes to the shortest bin so far.

        `rows`, int32 (n_rows,): longest first. `lengths`, int (n_rows,).
        """
        n = min(len(rows), most)
        totals = [(0, k) for k in range(n)]
        owners = np.empty(len(rows), dtype=np.int64)
        for place, length in enumerate(lengths.tolist()):
            total, owners[place] = totals[0]
            heapq.heapreplace(totals, (total + length, int(owners[place])))
        first = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=n)))).astype(np.int32)
        return cls(device.upload(rows[np.argsort(owners, kind="stable")]), device.upload(first))


@functools.lru_cache(maxsize=64)
def scalars(terms: Terms, real: type) -> tuple[np.generic, ...]:
    """Kernel argument, the struct `Terms`; a step multiplies updated factors by ``1 - gamma lambda``."""
    keep = 1.0 - terms.rate * terms.regularization
    bias_keep = 1.0 - terms.bias_rate * terms.bias_regularization
    return tuple(map(real, (terms.rate, keep, terms.mean, terms.bias_rate, bias_keep)))


def packed_terms(device: Device, terms: Terms, real: type) -> Struct:
    """Kernel argument of prepared launches."""
    return Struct(scalars(terms, real), device.address)


def group_size(ld: int, itemsize: int) -> int:
    """Lanes that share a row: GROUP of cuda/sgd.cuh."""
    return min(32, 1 << (ld * itemsize // 16 - 1).bit_length())


def narrow_size(ld: int, itemsize: int) -> int:
    """Lanes that share a row in `centralized_narrow`: NARROW_TEAM of cuda/msgd.cu."""
    wide = group_size(ld, itemsize)
    return wide // 2 if wide >= 8 and ld * itemsize <= 16 * wide else wide


def _check_rows(device: Device, moved: FactorRows, fixed: FactorRows, real: Any, read: Any = None) -> None:
    ld, stored = moved.matrix.shape[1], moved.matrix.dtype
    for name, rows, dtype in (("moved", moved, stored), ("fixed", fixed, stored if read is None else read)):
        bias = (rows.bias, real, (len(rows.matrix),))
        check_all(device, **{name: (rows.matrix, dtype, (None, ld)), f"{name}.bias": bias})


def _check_walk(device: Device, walk: Walk, real: Any, **tasks: Array) -> None:
    """Check entries, and the rows or ranges to process."""
    check_all(
        device,
        indices=(walk.indices, np.int32, (None,)),
        ratings=(walk.ratings, real, walk.indices.shape),
        begins=(walk.begins, np.int64, (None, None)),
        ends=(walk.ends, np.int64, walk.begins.shape),
        **{name: (array, np.int32, (None,)) for name, array in tasks.items()},
    )


class Operands:
    """Factors and terms of a pass, packed once for all of its launches.

    `shared`: the packed terms, if other passes have the same ones.
    """

    def __init__(
        self, device: Device, moved: FactorRows, fixed: FactorRows, terms: Terms, shared: Struct | None = None
    ) -> None:
        self.real: Any = (moved.matrix if moved.bias is None else moved.bias).dtype.type
        # dtypes and shapes of the rows
        self.form = self._form_of(moved, fixed)
        self.stored, self.read, self.biases = moved.matrix.dtype, fixed.matrix.dtype, moved.bias is not None
        self.ld = int(moved.matrix.shape[1])
        self.moved, self.fixed = moved.packed(device), fixed.packed(device)
        self.terms = packed_terms(device, terms, self.real) if shared is None else shared

    def set(self, moved: FactorRows, fixed: FactorRows, terms: Terms) -> bool:
        """Replace them for the next launches; false, without a change, if they have another form."""
        if self._form_of(moved, fixed) != self.form:
            return False
        self.moved.set(moved.struct)
        self.fixed.set(fixed.struct)
        self.terms.set(scalars(terms, self.real))
        return True

    @staticmethod
    def _form_of(*sides: FactorRows) -> tuple[Any, ...]:
        return tuple((side.matrix.shape, side.matrix.dtype, side.bias is None) for side in sides)


Launches = list[PreparedLaunch]


# ---------------------------------------------------------------------------------------------- MSGD


@dataclass(frozen=True)
class BlockedConfig(KernelConfig):
    """Compile-time choices of the kernel `blocked`."""

    # ld, itemsize: row width and size of an element
    ld: int
    itemsize: int
    chunk: int  # {4, 8, 16}: entries that are solved at a time
    helpers: int  # warps that prepare chunks for the warp that updates the row
    slots: int  # chunks in shared memory at a time
    # size of an element of the fixed side; 2: float16 beside updated rows in float32. Default: `itemsize`
    read_size: int = 0

    may_be_zero: ClassVar[tuple[str, ...]] = ("read_size",)

    def check(self) -> None:
        if not self.read_size:
            object.__setattr__(self, "read_size", self.itemsize)
        if self.read_size != self.itemsize and (self.itemsize, self.read_size, self.chunk) != (4, 2, 16):
            raise ValueError(
                f"read_size must be itemsize, or 2 with itemsize 4 and chunk 16; got {self.read_size} with "
                f"{self.itemsize} and {self.chunk}"
            )
        if self.chunk not in (4, 8, 16) or not 1 <= self.helpers <= 24:
            raise ValueError(f"chunk must be 4, 8 or 16 and helpers 1 to 24, got {self.chunk} and {self.helpers}")
        if self.slots < self.helpers + 2:
            raise ValueError(
                f"slots must be at least helpers + 2: each warp waits for its next chunk before it frees one; got "
                f"{self.slots} for {self.helpers} helpers"
            )

    @classmethod
    def rule(cls, ld: int, itemsize: int, spec: DeviceSpec, read_size: int = 0) -> BlockedConfig:
        """Two blocks per multiprocessor if both have enough slots, otherwise the fastest configuration that fits."""
        pair = cls(ld, itemsize, 16, 5, 14, read_size)
        return pair if pair.per_sm(spec) == 2 else cls.fastest(ld, itemsize, spec, read_size)

    @classmethod
    def fastest(cls, ld: int, itemsize: int, spec: DeviceSpec, read_size: int = 0) -> BlockedConfig:
        """The configuration with the lowest latency for a row that has a multiprocessor to itself."""
        sizes = [(16, 6, 18), (16, 5, 10), (16, 3, 6), (8, 4, 8), (8, 3, 6), (8, 2, 5), (4, 3, 6), (4, 1, 4)]
        chunked = sizes if read_size in (0, itemsize) else [size for size in sizes if size[0] == 16]
        configs = [cls(ld, itemsize, *size, read_size) for size in chunked]
        return next((one for one in configs if one.shared_bytes <= spec.shared_bytes), configs[-1])

    def per_sm(self, spec: DeviceSpec) -> int:
        """Blocks that a multiprocessor processes at a time, besides those of `centralized`."""
        return 2 if 2 * self.shared_bytes <= spec.shared_bytes else 1

    @property
    def threads(self) -> int:
        """Of a block: BLOCK_WARPS of the kernel; every fourth warp does not help, and one of them walks."""
        return 32 * max(4, self.helpers + (self.helpers - 1) // 3)

    @property
    def stride(self) -> int:
        """Elements between two rows in shared memory: STRIDE of the kernel."""
        if self.read_size != self.itemsize:
            return self.ld + (96 - self.ld % 64) % 64
        tensor = self.chunk == 16 and self.itemsize == 4
        return self.ld + ((48 - self.ld % 32) % 32 if tensor else 16 // self.itemsize)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernel asserts the same number."""
        chunk, size = self.chunk, self.itemsize
        slot = chunk * (self.stride * self.read_size + (chunk + 16 // size + 1) * size) + 16
        rest = (chunk * (32 + 16 // size + 7) + 2) * size
        return self.slots * round_up(slot, 32) + round_up(rest, 32)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of msgd.cu, without dtypes and biases."""
        sizes = {"CHUNK": self.chunk, "HELPERS": self.helpers, "CHUNK_SLOTS": self.slots}
        fixed16 = self.read_size != self.itemsize
        return {"LD": self.ld, "FIXED16": fixed16, **sizes, "SHARED_BYTES": self.shared_bytes}


class MsgdKernels:
    """Launches of msgd.cu for rows of one kind, like the functions above, without checks of operands.

    `config`: default: the rule's for the device and the first rows.
    """

    def __init__(self, device: Device, config: BlockedConfig | None = None) -> None:
        self.device, self._config = device, config

    def _config_for(self, operands: Operands) -> BlockedConfig:
        if self._config is None:
            given = (operands.ld, operands.stored.itemsize, self.device.spec, operands.read.itemsize)
            self._config = BlockedConfig.rule(*given)
        return self._config

    def _prepare(
        self, name: str, operands: Operands, out: Array, walk: Walk, more: Sequence[Any], sizes: tuple[int, int, int]
    ) -> PreparedLaunch:
        """Launch of a kernel; `sizes`: blocks, threads and bytes of shared memory."""
        # equal constants for all kernels, so that a model compiles the file once
        constants = {"REAL": operands.stored, "HAS_BIASES": operands.biases} | self._config_for(operands).constants
        arguments = (operands.moved, out, operands.fixed, walk.struct, *more, operands.terms)
        found = program("msgd.cu", name, **constants)
        return self.device.prepare(found, sizes[:1], sizes[1:2], arguments, sizes[2])

    def centralized(self, operands: Operands, walk: Walk, tasks: Array, out: Array) -> Launches:
        """One for each range; sums of squared errors go to `out`, shape (n_ranges, n_tasks)."""
        if not len(tasks):
            return []
        shape = (operands.ld, operands.read.itemsize)
        name, team = "centralized", group_size(*shape)
        if len(tasks) * narrow_size(*shape) >= NARROW_WARPS * 32 * self.device.spec.multiprocessors:
            name, team = "centralized_narrow", narrow_size(*shape)
        more, sizes = (tasks, np.int32(len(tasks))), (ceil_div(len(tasks) * team, THREADS), THREADS, 0)
        ranges = zip(walk.parts, out, strict=True)
        return [self._prepare(name, operands, sums, part, more, sizes) for part, sums in ranges]

    def blocked(self, operands: Operands, walk: Walk, tasks: Bins, out: Array, alone: bool = False) -> Launches:
        """One; sums of squared errors go to `out`, shape (n_ranges, n_rows of `tasks`).

        `alone`: each block has all shared memory of a multiprocessor, so that no other block runs on it: even one that
        uses none takes 1 KB.
        """
        if not len(tasks.rows):
            return []
        config = self._config_for(operands)
        more = (tasks.rows, tasks.first, np.int32(walk.n_ranges), np.int32(walk.begins.shape[1]))
        shared_bytes = self.device.spec.shared_bytes if alone else config.shared_bytes
        sizes = (len(tasks.first) - 1, config.threads, shared_bytes)
        return [self._prepare("blocked", operands, out, walk, more, sizes)]

    def decentralized(self, operands: Operands, walk: Walk, bounds: Array, out: Array) -> Launches:
        """One; sums of squared errors go to `out`, shape (n_ranges,)."""
        more = (bounds, np.int32(walk.begins.shape[1]))
        return [self._prepare("decentralized", operands, out, walk, more, (len(out), DECENTRALIZED_THREADS, 0))]


PreparedPass: TypeAlias = tuple[Operands, Array, Launches, Launches]
"""Operands and losses of a pass, the launches of long rows, and the others, beside which those may run."""


def even_ranges(degrees: np.ndarray, n_ranges: int) -> np.ndarray:
    """Bounds of ranges of rows with about equal numbers of entries; int32, shape (at most n_ranges + 1,)."""
    entries = np.cumsum(degrees)
    inner = np.searchsorted(entries, entries[-1] * np.arange(1, n_ranges) / n_ranges) + 1
    return np.unique(np.concatenate([[0], inner, [len(degrees)]])).astype(np.int32)


class Msgd:
    """MSGD (Alg. 1): update the rows of a side from their entries, with the other side fixed.

    `ordering`: see `LAYOUTS`.
    `long_row`: entries from which a row of a centralized pass gets a separate block; None: no row does, as published.
    `beside`: process long rows concurrently with the others, on a separate stream, not before them: the others keep all
        multiprocessors busy while the last long rows end. The result is the same.
    `ranks`: GPUs that share an epoch. With several, each has a block of the ratings, and its longest row decides the
        time of a step, so long rows take the configuration with the lowest latency.
    `bins`: thread blocks for long rows, of the number that the device runs at a time. Default: all.
    `alone`: see `MsgdKernels.blocked`.
    `sides`: those that passes update; only what these need stays on the device.
    `read`: that of the ratings (default), or float16: each pass reads a copy of the fixed side in float16, and "mixed"
        is the only ordering.
    """

    def __init__(
        self, device: Device, matrices: GridBlock, ordering: str, factors: int, long_row: int | None,
        beside: bool = True, ranks: int = 1, read: np.dtype | None = None,
        bins: Callable[[int], int] = int, alone: bool = False, sides: Sequence[Side] = SIDES,
    ) -> None:  # fmt: skip
        self.device, self.beside, self.alone = device, beside, alone
        self.layouts = {side: LAYOUTS[ordering][side] for side in sides}
        self.stored = matrices["user"].dtype
        self.read = self.stored if read is None else read
        spec, sizes = device.spec, (stored_width(factors, self.read), self.stored.itemsize)
        choose = BlockedConfig.fastest if ranks > 1 else BlockedConfig.rule
        config = choose(*sizes, spec, self.read.itemsize)
        row_bytes, most = sizes[0] * self.read.itemsize, max(1, MOST_RANGES // ranks)
        self.walks: dict[Side, Walk] = {}
        for side in SIDES:
            if side in self.layouts.values():
                matrix = matrices[side]
                count = range_count(matrix.shape, matrix.nnz, row_bytes, spec.l2_bytes, most)
                self.walks[side] = Walk.upload(device, matrix, count)
        self.long: dict[Side, Bins] = {}
        self.short: dict[Side, Array] = {}
        self.bounds: dict[Side, Array] = {}
        for side, layout in self.layouts.items():
            walk, degrees = self.walks[layout], np.diff(matrices[side].indptr)
            if layout != side:
                ranges = RANGES_PER_SM * spec.multiprocessors
                self.bounds[side] = device.upload(even_ranges(degrees, ranges))
                _check_walk(device, walk, self.stored, bounds=self.bounds[side])
                continue
            indptr = np.asarray(matrices[side].indptr, dtype=np.int64)
            order = degree_order(indptr)[: np.count_nonzero(degrees)].astype(np.int32)
            n_long = 0 if long_row is None else int(np.count_nonzero(degrees >= long_row))
            long, short = np.split(order, [n_long])
            n_bins = max(1, bins(config.per_sm(spec) * spec.multiprocessors))
            self.long[side] = Bins.balance(device, long, degrees[long], n_bins)
            self.short[side] = device.upload(short)
            _check_walk(device, walk, self.stored, short=self.short[side])
        self.terms: dict[Side, Struct] = {}
        self._kernels = MsgdKernels(device, config)
        self._passes: dict[Side, PreparedPass] = {}

    def n_losses(self, side: Side | None) -> int:
        """Number of sums of squared errors of a pass."""
        assert side is not None
        if side in self.bounds:
            return len(self.bounds[side]) - 1
        return self.walks[side].n_ranges * (len(self.long[side].rows) + len(self.short[side]))

    def launch_pass(self, side: Side | None, work: dict[Side, FactorRows], terms: Terms, losses: Array) -> None:
        """Launch one pass, in place, without waiting; the training loss is the sum of `losses`, shape (n_losses,).

        A second stream may update the long rows between `fork` and `join`, while the current one updates the others.
        They write different rows and losses, and only read `fixed`. The current stream waits for the second one, so
        later launches, and the reuse of freed memory, come after both.
        """
        assert side is not None
        moved, fixed = work[side], work[other_side(side)]
        if self.read != self.stored:
            fixed = FactorRows(fixed.matrix.astype(self.read), fixed.bias)
        _, _, long, short = self._prepared(side, moved, fixed, terms, losses)
        beside = self.beside and bool(long and short)
        with self.device.active():
            if beside:
                self.device.fork()
            try:
                for launch in long:
                    launch(beside)
                for launch in short:
                    launch()
            finally:  # memory must not be released before these launches end
                if beside:
                    self.device.join()

    @property
    def is_repeatable(self) -> bool:
        """Whether recorded launches of a pass can be repeated: there is no copy of the fixed side."""
        return self.read == self.stored

    def _prepared(self, side: Side, moved: FactorRows, fixed: FactorRows, terms: Terms, losses: Array) -> PreparedPass:
        """The launches of a pass for these operands, of which only the first ones of a form are checked."""
        known = self._passes.get(side)
        if known is None or known[1] is not losses or not known[0].set(moved, fixed, terms):
            _check_rows(self.device, moved, fixed, self.stored, self.read)
            if side not in self.terms:
                self.terms[side] = packed_terms(self.device, terms, self.stored.type)
            operands = Operands(self.device, moved, fixed, terms, self.terms[side])
            operands.set(moved, fixed, terms)
            known = self._passes[side] = self._prepare(side, operands, losses)
        return known

    def _prepare(self, side: Side, operands: Operands, losses: Array) -> PreparedPass:
        if side in self.bounds:
            walk = self.walks[self.layouts[side]].whole
            return operands, losses, [], self._kernels.decentralized(operands, walk, self.bounds[side], losses)
        walk, long, short = self.walks[side], self.long[side], self.short[side]
        n_long = walk.n_ranges * len(long.rows)
        of_rows = losses[:n_long].reshape(walk.n_ranges, len(long.rows))
        of_long = self._kernels.blocked(operands, walk, long, of_rows, self.alone)
        sums = losses[n_long:].reshape(walk.n_ranges, len(short))
        return operands, losses, of_long, self._kernels.centralized(operands, walk, short, sums)


# ---------------------------------------------------------------------------------------------- batch-Hogwild


@dataclass(frozen=True)
class HogwildConfig(KernelConfig):
    """Workers of batch-Hogwild, and the entries that each takes at a time."""

    blocks_per_sm: int  # minimum resident blocks per multiprocessor, which bounds the registers of a thread
    n_workers: int  # groups of lanes that process runs
    run: int = RUN  # maximum entries of a run, all of one row
    batch: int = BATCH  # runs that a worker takes at a time

    def check(self) -> None:
        if self.run not in (8, 16, 32, 64):
            raise ValueError(f"run must be 8, 16, 32 or 64: it is read in parts of up to 8; got {self.run}")

    @classmethod
    def rule(cls, spec: DeviceSpec, ld: int, itemsize: int, biases: bool) -> HogwildConfig:
        """As many workers as fit on a device."""
        blocks_per_sm = cls.blocks_for(ld, itemsize, biases)
        return cls(blocks_per_sm, blocks_per_sm * spec.multiprocessors * THREADS // group_size(ld, itemsize))

    def limited(self, nnz: int) -> HogwildConfig:
        """Limit the workers if there are few entries."""
        return replace(self, n_workers=max(1, min(self.n_workers, nnz // WORKER_ENTRIES)))

    def constants_for(self, ld: int, float16: bool, biases: bool) -> dict[str, Any]:
        """Compile-time constants of the kernel."""
        widths = {"LD": ld, "RUN": self.run, "BLOCKS_PER_SM": self.blocks_per_sm}
        return {"REAL": np.dtype(np.float32), "FLOAT16": float16, "HAS_BIASES": biases} | widths

    def blocks(self, ld: int, itemsize: int) -> int:
        """Blocks of a launch."""
        return ceil_div(self.n_workers * group_size(ld, itemsize), THREADS)

    @staticmethod
    def blocks_for(ld: int, itemsize: int, biases: bool) -> int:
        """Blocks per multiprocessor that registers allow with the default length of runs, from ptxas's reports."""
        size, loads = group_size(ld, itemsize), ceil_div(ld * itemsize, 512)
        if size < 8:
            return 2 if size == 1 and biases else 3
        if size == 8:
            return 4
        return (5 if size == 16 else 4 if loads <= 2 else 3) - biases


def make_runs(indptr: np.ndarray, longest: int, owners: np.ndarray | None = None) -> np.ndarray:
    """Cut rows into runs, in the order of the entries.

    `owners`, int64 (n_rows,): what runs have in place of the row.
    Returns int64 (n_runs, 2): first entry; row times 2^32 plus number of entries, at most `longest`.
    `indptr`, int (n_rows + 1,).
    """
    cut = SegmentedRows.cut(np.asarray(indptr, dtype=np.int64), np.flatnonzero(np.diff(indptr)), longest)
    rows = np.repeat(cut.rows, np.diff(cut.slots)).astype(np.int64)
    begin, end = cut.segments[:, 1], cut.segments[:, 2]
    return np.column_stack((begin, ((rows if owners is None else owners[rows]) << 32) | (end - begin)))


@dataclass(frozen=True)
class HogwildEntries:
    """Entries of batch-Hogwild on a device: those of each held row, then again those of each crowded walked row."""

    indices: Array  # int32 (n,)
    ratings: Array  # float32 (n,)
    crowded: Array  # uint8 (n_walked,): 1: the entries of this row belong to its own runs, not to those of held rows
    runs: Array  # int64 (n_runs, 2): see `make_runs`; the row is ``~row`` in runs of walked rows

    @classmethod
    def upload(
        cls,
        device: Device,
        held: sp.csr_array,
        walked: sp.csr_array,
        longest: int,
        rng: np.random.Generator | None = None,
    ) -> HogwildEntries:
        """Upload the ratings by the rows of both sides, with runs in random order (without `rng` in sequence).

        `longest`: maximum entries of a run.
        """
        rows = crowded_rows(np.diff(walked.indptr))
        again = take_rows(walked, rows)
        runs = np.concatenate(
            (make_runs(held.indptr, longest), make_runs(held.nnz + again.indptr.astype(np.int64), longest, ~rows))
        )
        crowded = np.zeros(walked.shape[0], dtype=np.uint8)
        crowded[rows] = 1
        if rng is not None:
            # one element per run, with which nothing computes: NumPy gathers it several times as fast as a row of two
            elements = np.ascontiguousarray(runs).view(np.complex128).reshape(-1)
            runs = elements[rng.permutation(len(runs))].view(np.int64).reshape(-1, 2)
        indices = _joined(device, (held.indices, again.indices), np.int32)
        ratings = _joined(device, (held.data, again.data), np.float32)
        return cls(indices, ratings, device.upload(crowded), device.upload(runs))


def crowded_rows(degrees: np.ndarray) -> np.ndarray:
    """Rows with at least `CROWDED` of all entries and `RUN` entries, fullest first, up to `MOST_CROWDED` together.

    Returns int64 (n_crowded,): ascending. `degrees`, int (n_rows,).
    """
    total = int(degrees.sum())
    order = np.argsort(-degrees, kind="stable")
    order = order[degrees[order] >= max(RUN, CROWDED * total)]
    order = order[degrees[order] <= MOST_CROWDED * total]  # a row with most entries would leave no room for others
    return np.sort(order[np.cumsum(degrees[order]) <= MOST_CROWDED * total])


def _joined(device: Device, arrays: Sequence[np.ndarray], dtype: Any) -> Array:
    """Upload arrays one after the other to one array."""
    out, at = device.empty(sum(map(len, arrays)), dtype), 0
    for array in arrays:
        device.upload(np.asarray(array, dtype=dtype), out[at : at + len(array)])
        at += len(array)
    return out


class BatchHogwild:
    """Batch-Hogwild (cuMF_SGD): runs of entries, shuffled once; the row that owns a run stays in registers."""

    def __init__(self, device: Device, matrices: GridBlock, plan: Plan, method: SgdMethod) -> None:
        self.device = device
        self.stored = self.read = np.dtype(plan.precision)
        self.held: Side = "user" if plan.n_users >= plan.n_items else "item"
        held, walked = matrices[self.held], matrices[other_side(self.held)]
        self._shape = (stored_width(plan.factors, self.stored), self.stored.itemsize)
        config = HogwildConfig.rule(device.spec, *self._shape, plan.rank > plan.factors)
        self.entries = HogwildEntries.upload(device, held, walked, config.run, method.rng())
        bounds = device.upload(np.asarray(held.indptr, dtype=np.int64))
        self.walks = {self.held: Walk(self.entries.indices, self.entries.ratings, bounds[None, :-1], bounds[None, 1:])}
        self.config = config.limited(held.nnz)

    def n_losses(self, side: Side | None) -> int:
        return self.config.blocks(*self._shape)

    def launch_pass(self, side: Side | None, work: dict[Side, FactorRows], terms: Terms, losses: Array) -> None:
        """Launch one epoch over all runs, lock-free, in place: factors in float16 or float32, biases in float32.

        `losses`, float64, one element for each of ``config.blocks``: sums of squared errors.
        """
        held, walked = work[self.held], work[other_side(self.held)]
        device, entries, config = self.device, self.entries, self.config
        ld, stored = held.matrix.shape[1], held.matrix.dtype
        _check_rows(device, held, walked, np.float32)
        blocks = config.blocks(ld, stored.itemsize)
        check_all(
            device,
            indices=(entries.indices, np.int32, (None,)),
            ratings=(entries.ratings, np.float32, entries.indices.shape),
            crowded=(entries.crowded, np.uint8, (len(walked.matrix),)),
            runs=(entries.runs, np.int64, (None, 2)),
            losses=(losses, np.float64, (blocks,)),
        )
        constants = config.constants_for(ld, stored == np.float16, held.bias is not None)
        kernel = get_kernel(device, "batch_hogwild.cu", "batch_hogwild", **constants)
        sizes = (np.int64(len(entries.runs)), np.int32(config.n_workers), np.int32(config.batch))
        (held_matrix, held_bias), (walked_matrix, walked_bias) = held.struct, walked.struct
        factors = (held_matrix, walked_matrix, held_bias, walked_bias)
        arrays = (entries.indices, entries.ratings, entries.crowded, entries.runs)
        kernel((blocks,), (THREADS,), (*factors, losses, *arrays, *sizes, *scalars(terms, np.float32)), 0)


# ---------------------------------------------------------------------------------------------- epochs


Schedule: TypeAlias = Msgd | BatchHogwild
"""The order of updates in an epoch, as launches of passes.

`stored`, `read`: dtypes of the updated rows, and in which a kernel reads those of the fixed side, as multiples of 16
bytes. `walks`: entries by side.
"""


def long_row_of(ranks: int) -> int:
    """Default number of entries, in a block of ratings, from which a row gets a separate thread block.

    On several, a step has 1 / ranks of a row's entries and 1 / ranks^2 of all, and takes as long as its longest short
    row. On H200s (Netflix's shape, f = 128) an epoch of two takes 7.8 ms with long rows from 12,288 entries, 8.0 with
    8,192 and 8.2 with 16,384; on four, 3,072 and 4,096 differ by less than two runs.
    """
    return max(min(SHORTEST_LONG_ROW, LONG_ROW), LONG_ROW if ranks == 1 else LONG_ROW * 3 // 2 // ranks**2)


class GpuEpochs:
    """SGD on a GPU, as `hybridmf.plan.epochs.EpochKernels`; working copies are `FactorRows`.

    `blocks`: one; a rank has one for each range of items. Those of popular items may follow: of all of them, for the
        users, then of those of each range, whose items it updates aside (`hybridmf.device.cuda.CudaDevice.aside`), in
        thread blocks that the other passes leave free. A block without the users' side is transposed.
    `long_row`: entries of a row, in a block of ratings, from which a centralized pass gives it a thread block. Default:
    `long_row_of` with the ordering "mixed", otherwise none.
    `beside`: see `Msgd`.
    `ranks`: ranges of items. Default: the number of blocks.
    """

    def __init__(
        self, device: Device, blocks: list[GridBlock], objective: Objective, plan: Plan,
        long_row: int | None = None, beside: bool = True, ranks: int | None = None,
    ) -> None:  # fmt: skip
        assert isinstance(plan.method, SgdMethod)
        self.device, self.objective, self.plan, self.method = device, objective, plan, plan.method
        self.dtype, self.ranks, self.beside = blocks[0]["item"].dtype, ranks or len(blocks), beside
        mixed = self.method.ordering == "mixed"
        self.long_row = long_row_of(self.ranks) if long_row is None and mixed else long_row
        self.passes = passes_of(self.method)
        blocks = [block if "user" in block else self._with_users(block["item"]) for block in blocks]
        walks = max((np.count_nonzero(np.diff(block["item"].indptr)) for block in blocks[self.ranks + 1 :]), default=0)
        sides: list[Sequence[Side]] = [SIDES for _ in range(self.ranks)]
        sides += [("user",), *(("item",) for _ in range(self.ranks))]
        self.schedules = [
            self._schedule(block, int(walks), moved) if block["user"].nnz else None
            for block, moved in zip(blocks, sides, strict=False)
        ]
        working = next((schedule for schedule in self.schedules if schedule is not None), None)
        self._form = (self.dtype, self.dtype) if working is None else (working.stored, working.read)
        # for all passes of an epoch, added up once
        sizes = {
            (block, side): schedule.n_losses(side)
            for block, schedule in enumerate(self.schedules)
            if schedule is not None
            for side in self.passes
            if not isinstance(schedule, Msgd) or side in schedule.layouts
        }
        ends = np.cumsum(list(sizes.values()), dtype=np.int64).tolist()
        self._sums = device.zeros(ends[-1] if ends else 0, np.float64)
        self._sums_of = {key: self._sums[end - sizes[key] : end] for key, end in zip(sizes, ends, strict=True)}
        self._terms: dict[Side, Struct] = {}  # of all blocks
        for schedule in self.schedules:
            if isinstance(schedule, Msgd):
                schedule.terms = self._terms
        self._indptr = [{side: block[side].indptr for side in SIDES} for block in blocks]
        self._segments: dict[int, Array] = {}

    def _with_users(self, items: sp.csr_array) -> GridBlock:
        """A block of both sides: the device transposes it, unless the host needs it to find ranges of columns."""
        row_bytes, most = (
            stored_width(self.plan.factors, self.dtype) * self.dtype.itemsize,
            max(1, MOST_RANGES // self.ranks),
        )
        ranges = range_count(items.shape[::-1], items.nnz, row_bytes, self.device.spec.l2_bytes, most)
        if ranges > 1 or not items.nnz or self.method.ordering not in ("mixed", "crossed"):
            return {"user": transposed(items, self.plan.num_threads), "item": items}
        held = DeviceMatrix.of(self.device, items)
        return {"user": held.transposed(self.device), "item": held}

    def _schedule(self, block: GridBlock, walks: int, sides: Sequence[Side]) -> Schedule:
        """`walks`: popular items of a range; each has a thread block, up to half of all: the longest decides the time.

        A walk beside the blocks of other rows takes longer, so each has a multiprocessor to itself. `sides`: those that
        passes over the block update; where these are the items alone, they are popular ones.
        """
        if self.method.schedule != "msgd":
            return BatchHogwild(self.device, block, self.plan, self.method)
        is_popular = "user" not in sides

        def bins(most: int) -> int:
            kept = min(walks, most // 2)
            return kept if is_popular else most - kept

        read = np.dtype(np.float16) if self.plan.precision == "float16" else None
        sizes = (self.method.ordering, self.plan.factors, self.long_row)
        beside = self.beside and not is_popular
        return Msgd(self.device, block, *sizes, beside, self.ranks, read, bins, is_popular, sides)

    def active(self) -> AbstractContextManager[None]:
        return self.device.active()

    def hold(self, factors: Factors) -> DeviceFactors:
        """Copy the factors to a table on the device."""
        # with biases, serving and fold-in expect a constant 1 beside the factors
        return to_device(self.device, factors, stored_width(self.plan.rank, self.dtype))

    def copies(self, factors: Factors, target: FactorRows | None = None) -> FactorRows:
        """Rows that are multiples of 16 bytes, also in the dtype in which kernels read the fixed side.

        `target`: rows from `room`, to be overwritten; default: others.
        """
        assert isinstance(factors, DeviceFactors)
        device, columns, (stored, read) = self.device, self.plan.factors, self._form
        width = stored_width(columns, read)
        if target is not None:
            if factors.table.shape == target.matrix.shape and factors.device_bias is None:
                device.receive(target.matrix, factors.table)
                return target
            arrays.copy(device, target.matrix[:, :columns], factors.table[:, :columns])
            if factors.device_bias is not None:
                device.receive(target.bias, factors.device_bias)
            return target
        if self.is_plain(factors):
            return self.copied(FactorRows(factors.table))
        if factors.device_bias is None and factors.table.shape[1] == width:
            return FactorRows(factors.table.astype(stored))
        matrix = device.zeros((len(factors), width), stored)
        if matrix.dtype == factors.table.dtype:
            arrays.copy(device, matrix[:, :columns], factors.table[:, :columns])
        else:
            matrix[:, :columns] = factors.table[:, :columns]
        return FactorRows(matrix, None if factors.device_bias is None else factors.device_bias.copy())

    def room(self, n: int) -> FactorRows:
        """Zeros as a working copy of any `n` rows, which stays where it is."""
        stored, read = self._form
        matrix = self.device.zeros((n, stored_width(self.plan.factors, read)), stored)
        return FactorRows(matrix, self.device.zeros(n, stored) if self.plan.rank > self.plan.factors else None)

    def copied(self, work: FactorRows) -> FactorRows:
        """A working copy with equal rows."""
        made = self.like(work)
        for target, source in zip(self.arrays(made), self.arrays(work), strict=True):
            self.device.receive(target, source)
        return made

    def like(self, work: FactorRows) -> FactorRows:
        """Uninitialized rows in the form of others."""
        return FactorRows(*(self.device.empty(array.shape, array.dtype) for array in self.arrays(work)))

    def fixed(self, factors: Factors) -> FactorRows:
        assert isinstance(factors, DeviceFactors)
        return FactorRows(factors.table) if self.is_plain(factors) else self.copies(factors)

    def is_plain(self, factors: Factors) -> bool:
        """Whether the factors are in the form of working copies."""
        assert isinstance(factors, DeviceFactors)
        stored, read = self._form
        width = stored_width(self.plan.factors, read)
        return factors.device_bias is None and factors.table.dtype == stored and factors.table.shape[1] == width

    def move(
        self,
        block: int,
        side: Side | None,
        work: dict[Side, FactorRows],
        terms: Terms,
        epoch: int,
        between: Callable[[], None],
    ) -> None:
        """See `EpochKernels`; launches without waiting."""
        schedule = self.schedules[block]
        if schedule is not None:
            with self.device.aside() if block > self.ranks else nullcontext():
                schedule.launch_pass(side, work, terms, self._sums_of[block, side])
            between()

    @property
    def is_repeatable(self) -> bool:
        """Whether recorded passes (`hybridmf.device.recording`) can be repeated after `renew`."""
        known = [schedule for schedule in self.schedules if schedule is not None]
        return all(isinstance(schedule, Msgd) and schedule.is_repeatable for schedule in known)

    def renew(self, terms: dict[Side | None, Terms]) -> None:
        """Let recorded launches have other terms."""
        for side, struct in self._terms.items():
            real: Any = self._form[0].type
            struct.set(scalars(terms[side], real))

    def factors(self, work: FactorRows) -> DeviceFactors:
        """In float32 or float64."""
        device, factors, width = self.device, self.plan.factors, stored_width(self.plan.rank, self.dtype)
        if work.bias is None and work.matrix.shape[1] == width:
            return DeviceFactors(device, work.matrix.astype(self.dtype, copy=False), factors, None)
        table = device.zeros((len(work.matrix), width), self.dtype)
        if table.dtype == work.matrix.dtype:
            arrays.copy(device, table[:, :factors], work.matrix[:, :factors])
        else:
            table[:, :factors] = work.matrix[:, :factors]
        if work.bias is not None:
            arrays.fill(device, table[:, factors : factors + 1], 1)
        return DeviceFactors(device, table, factors, work.bias)

    def begin_result(self, *sides: Factors) -> Callable[[], tuple[float, bool]]:
        """See `EpochKernels`; the host waits once. MSGD processes every entry twice."""
        device, tables = self.device, [factors for factors in sides if isinstance(factors, DeviceFactors)]
        checked = [array for side in tables for array in side.arrays]
        in_float32 = all(array.dtype == np.float32 for array in checked)
        # the sum of the losses, then a range (three words) or a sum of the factors
        known = device.zeros(3, np.float64)
        device.receive(known[:1], self._sums.sum(keepdims=True))
        found = known[1:].view(np.uint32)[:3] if in_float32 else known[1:2]
        for array in checked:
            if in_float32:
                widen_range(device, found, array if len(array.shape) == 2 else array[:, None])
            else:
                found += array.sum(dtype=np.float64)
        downloaded = device.begin_download(known)

        def result() -> tuple[float, bool]:
            values = downloaded()
            loss, rest = float(values[0]) / len(self.passes), values[1:]
            is_finite = math.isfinite(read_range(rest.view(np.uint32)[:3])[0].largest if in_float32 else rest[0])
            for side in tables:
                side.keep(settled=True)
            return loss, is_finite

        return result

    def loss(self, block: int, users: Factors, items: Factors, mean: float) -> float:
        schedule, tables = self.schedules[block], {"user": users, "item": items}
        if schedule is None:
            return 0.0
        side: Side = "user" if "user" in schedule.walks else "item"
        walk, own, fixed = schedule.walks[side], tables[side], tables[other_side(side)]
        assert isinstance(own, DeviceFactors) and isinstance(fixed, DeviceFactors)
        offsets = None if own.device_bias is None else own.device_bias + own.table.dtype.type(mean)
        entries = DeviceEntries(walk.indices, walk.ratings, fixed.device_bias)
        if block not in self._segments:
            self._segments[block] = row_segments(self.device, np.asarray(self._indptr[block][side], dtype=np.int64))
        given = (own.table, fixed.table, entries, offsets, self._segments[block], self.plan.factors)
        return float(losses.segment_losses(self.device, *given).sum())

    def penalty(self, side: Side, factors: Factors, degrees: np.ndarray) -> float:
        assert isinstance(factors, DeviceFactors)
        return factors.penalty(self.device, self.objective, side, degrees)

    # ------------------------------------------------------------------------------------------------ exchange

    def arrays(self, work: FactorRows) -> list[Array]:
        """Arrays of working copies that ranks exchange: factors and biases."""
        return [work.matrix] if work.bias is None else [work.matrix, work.bias]

    def arrived(self, work: FactorRows, arrays: Sequence[Array]) -> FactorRows:
        return FactorRows(*arrays)

    def places(self, rows: np.ndarray) -> Array:
        return self.device.upload(rows.astype(np.int32))

    def merged(self, work: FactorRows, other: FactorRows, places: Array) -> FactorRows:
        merged = []
        for above, below in zip(self.arrays(work), self.arrays(other), strict=True):
            stacked = self.device.empty((len(above) + len(below), *above.shape[1:]), above.dtype)
            self.device.receive(stacked[: len(above)], above)
            self.device.receive(stacked[len(above) :], below)
            merged.append(arrays.gather(self.device, stacked, places))
        return FactorRows(*merged)
