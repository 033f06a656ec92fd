"""A half sweep of ALS on a GPU: rows in segments and batches, and the launches that assemble and solve them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp

from .._formats import degree_order
from ..core.objective import SIDES, Factors, Objective, PerSide, Side
from ..core.sparse import csr_of
from ..core.system import ceil_div
from ..device.compiler import Program
from ..device.cuda import Array, Device
from ..errors import DeviceMemoryError
from ..formats import tiled
from ..native import _als
from ..native.arguments import Weights
from ..native.status import SINGULAR_PIVOT, check_status
from ..plan.fused import FusedConfig, table_width
from ..plan.half_sweep import PREDICTED_ROWS, PUBLISHED
from ..plan.row_forms import dual_up_to
from ..plan.solver import Given, Half, Steps
from ..plan.types import Plan
from . import arrays, bals, cholesky_any, dual, fused, losses, matrix, predictions
from .assembly import Cleared, PublishedKernels
from .cholesky_any import CholeskyConfig
from .dual import DualRows
from .factors import DeviceFactors, GpuFactors, weighted_gram
from .gram import programs as gram_programs
from .launch import DeviceEntries, program
from .matrix import DeviceMatrix
from .mo_als import mo_als, mo_als_with
from .rows import RowRange, read_range, widen_range
from .sparse_syrk import SyrkConfig, sparse_syrk, sparse_syrk_published
from .systems import SideSystems

logger = logging.getLogger("hybridmf")

SEGMENT_SUMS: dict[str, Callable[..., None]] = {
    "sparse_syrk": sparse_syrk,
    "sparse_syrk_published": sparse_syrk_published,
    "mo_als": mo_als,
    "mo_als_global": mo_als_with(registers=False),
    "mo_als_uncached": mo_als_with(read_only=False),
    "mo_als_plain": mo_als_with(registers=False, read_only=False),
}
"""The published kernels that sum segments of rows, by the plan's name."""

PLACE_BITS = 16  # bits of a segment's place in its row


@dataclass(frozen=True)
class SegmentedRows:
    """Rows cut into segments: row k has the slots ``slots[k] ... slots[k + 1] - 1``."""

    rows: np.ndarray  # int32 array, shape (n,)
    slots: np.ndarray  # int64 array, shape (n + 1,)
    segments: np.ndarray  # int64 array, shape (n_slots, 3): (slot, begin, end)
    in_order: bool = False  # process the segments of a batch in the order of its rows, not longest first

    @classmethod
    def cut(cls, indptr: np.ndarray, rows: np.ndarray, longest: int, *, in_order: bool = False) -> SegmentedRows:
        """Segments of at most `longest` entries."""
        begins, ends = indptr[rows], indptr[rows + 1]
        counts = np.maximum(1, -(-(ends - begins) // longest))
        slots = np.concatenate(([0], np.cumsum(counts)))
        place = np.arange(slots[-1]) - np.repeat(slots[:-1], counts)
        begin = np.repeat(begins, counts) + place * longest
        end = np.minimum(begin + longest, np.repeat(ends, counts))
        segments = np.column_stack((np.arange(slots[-1]), begin, end)).astype(np.int64)
        return cls(rows.astype(np.int32), slots.astype(np.int64), segments, in_order)

    unit: ClassVar[int] = 1  # see `TileRows`

    def __len__(self) -> int:
        return len(self.rows)

    def systems(self, start: int) -> int:
        """Most systems of a batch of all rows from `start` on."""
        return int(self.slots[-1] - self.slots[start])

    def upload(self, upload: Callable[[np.ndarray], Array], slots: int, start: int) -> list[Batch]:
        """Batches of at most `slots` systems, of the rows from `start` on, on a device."""
        return Batch.upload(upload, self.batches(slots, start))

    @property
    def packed(self) -> np.ndarray:
        """Segments, slots and rows as one int64 array; rows are packed two per element."""
        rows = np.zeros(ceil_div(len(self.rows), 2), np.int64)
        rows.view(np.int32)[: len(self.rows)] = self.rows
        return np.concatenate((self.segments.reshape(-1), self.slots, rows))

    def batches(self, slots: int, start: int = 0) -> Iterator[SegmentedRows]:
        """Consecutive rows from `start` on with at most `slots` slots together (a single row may have more)."""
        while start < len(self.rows):
            stop = int(np.searchsorted(self.slots, self.slots[start] + slots, side="right")) - 1
            stop = min(max(stop, start + 1), len(self.rows))
            first, last = self.slots[start], self.slots[stop]
            segments = self.segments[first:last].copy()
            segments[:, 0] -= first
            if not self.in_order:
                segments = segments[np.argsort(self._turns(start, stop), kind="stable")]
            yield SegmentedRows(self.rows[start:stop], self.slots[start : stop + 1] - first, segments)
            start = stop

    def _turns(self, start: int, stop: int) -> np.ndarray:
        """Key by which the segments of rows start ... stop - 1 are processed.

        Longest first, so that all thread blocks finish at about the same time. Equally long ones by their place in the
        row: columns are sorted, so segments that are processed together read neighbouring factors, from a cache.
        """
        counts = np.diff(self.slots[start : stop + 1])
        first, last = self.slots[start], self.slots[stop]
        place = np.arange(first, last) - np.repeat(self.slots[start:stop], counts)
        length = self.segments[first:last, 2] - self.segments[first:last, 1]
        return (place << PLACE_BITS) // np.repeat(counts, counts) - (length << PLACE_BITS)


@dataclass(frozen=True)
class Batch:
    """Rows whose sums are on the device together; see `SegmentedRows`. BALS has row blocks instead of segments."""

    rows: Array
    slots: Array
    segments: Any
    size: int  # rows or row blocks; see `Batches`

    @classmethod
    def upload(cls, upload: Callable[[np.ndarray], Array], batches: Iterable[SegmentedRows]) -> list[Batch]:
        """Copy batches to a device in one copy: hundreds of small copies would take as long as the kernels."""
        batches = list(batches)
        packed = [batch.packed for batch in batches]
        whole = upload(np.concatenate([np.zeros(0, np.int64), *packed]))
        bounds = np.cumsum([0, *map(len, packed)])
        found = []
        for (first, last), batch in zip(pairwise(bounds), batches, strict=True):
            part, n, after = whole[first:last], len(batch.rows), batch.segments.size
            rows = part[after + n + 1 :].view(np.int32)[:n]
            found.append(cls(rows, part[after : after + n + 1], part[:after].reshape(-1, 3), n))
        return found


@dataclass(frozen=True)
class TileRows:
    """Rows in row blocks of BALS, which are summed as a whole, as a source of `Batches`."""

    degrees: np.ndarray
    unit: int  # rows of a row block

    def __len__(self) -> int:
        return ceil_div(len(self.degrees), self.unit)

    def systems(self, start: int) -> int:
        return (len(self) - start) * self.unit

    def upload(self, upload: Callable[[np.ndarray], Array], slots: int, start: int) -> list[Batch]:
        count = min(max(1, slots // self.unit), len(self) - start)
        rows = np.arange(start * self.unit, min((start + count) * self.unit, len(self.degrees)))
        filled = np.flatnonzero(self.degrees[rows])
        # an empty row has sums of zeros, which are added to the row before it
        cuts = np.append(filled, len(rows)) if len(filled) else np.zeros(1)
        blocks = bals.RowBlocks(start, count, len(rows))
        return [Batch(upload(rows[filled].astype(np.int32)), upload(cuts.astype(np.int64)), blocks, count)]


class Batches:
    """Batches of at most `slots` systems of a source, unless a single row needs more; fewer when memory runs out.

    `keep` leaves those of segments on the device, 36 bytes per segment.
    """

    def __init__(
        self,
        device: Device,
        slots: int,
        source: SegmentedRows | TileRows,
        upload: Callable[[np.ndarray], Array],
        keep: bool = False,
    ) -> None:
        self.device, self.slots, self.source, self.upload, self.keep = device, slots, source, upload, keep
        self._done, self._halved = 0, False
        self._kept: list[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches; process each of them within `fitting`."""
        self._done = 0
        while self._done < len(self.source):
            self._halved = False
            with self._halving():
                following = self._following()
            for batch in () if self._halved else following:
                yield batch
                if self._halved:
                    break

    def _following(self) -> list[Batch]:
        """Batches from the first unprocessed row or row block."""
        if self._done or self._kept is None:
            batches = self.source.upload(self.upload, self.slots, self._done)
            if self._done or not self.keep:
                return batches
            self._kept = batches
        return self._kept

    @contextmanager
    def fitting(self, batch: Batch) -> Iterator[None]:
        """Process a batch in this context; without memory for it, its rows follow in smaller batches."""
        with self._halving():
            yield
            self._done += batch.size

    @contextmanager
    def _halving(self) -> Iterator[None]:
        try:
            yield
        except DeviceMemoryError:
            self._kept, unit = None, self.source.unit
            fewer = min(self.slots, self.source.systems(self._done)) // 2 // unit * unit
            if not fewer:
                raise
            self.slots, self._halved = fewer, True
            logger.warning("%s is out of memory: batches of %d systems from here on", self.device.spec.name, fewer)


class GpuHalf(Half):
    """One half of a sweep on a device."""

    device: Device
    side: Side
    objective: Objective
    names: np.ndarray | None  # number of each row in error messages; None: its position

    def active(self) -> AbstractContextManager[None]:
        return self.device.active()

    def check(self, solved: GpuFactors, status: Array) -> None:
        """Wait until factors are complete; raise the failure of a row. Also finds the range of the rows."""
        if solved.finish_check(solved.begin_check(status)):
            self.raise_failure(status)

    def raise_failure(self, status: Array) -> None:
        check_status(self.device.download(status), self.side, self.objective, self.names)


class DeviceRows:
    """Rows that a device solves: their segments, batches and regularization. Entries and results come with each solve.

    `starts`, int64 array, shape (n_rows + 1,): offsets of the rows in their entries, on the device.
    `tiled_from`: the ratings, for BALS.
    `send`: copies the segments of a batch to the device in each solve. Default: they are copied once and stay
    there.
    `apart`: whether the sums of all rows, not only of long ones, go through global memory before they are solved.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        objective: Objective,
        plan: Plan,
        degrees: np.ndarray,
        dtype: Any,
        *,
        starts: Array | None = None,
        tiled_from: sp.csr_array | None = None,
        send: Callable[[np.ndarray], Array] | None = None,
        apart: bool | None = None,
    ) -> None:
        self.device, self.side, self.objective, self.plan = device, side, objective, plan
        self.degrees, self.dtype = degrees, np.dtype(dtype)
        indptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(degrees, dtype=np.int64)))
        self.width = table_width(plan.rank, self.dtype)
        self.indptr = device.upload(indptr) if starts is None else starts
        self.scale = device.upload(objective.row_scale(side, self.degrees).astype(self.dtype))
        self.ridge = device.upload(objective.ridge(side, plan.factors, plan.rank).astype(self.dtype))
        published = plan.variant == PUBLISHED
        order = degree_order(indptr)[: int(np.count_nonzero(self.degrees))]
        if published:
            order = np.sort(order)
        n_dual = int(np.count_nonzero((self.degrees > 0) & (self.degrees <= dual_up_to(plan, side))))
        order, short = order[: len(order) - n_dual], order[len(order) - n_dual :]
        self.dual = DualRows(device, objective, side, plan.rank, short, self.degrees[short])
        apart = plan.solved_apart if apart is None else apart
        n_long = len(order) if apart else int(np.count_nonzero(self.degrees > plan.segment))
        self.long = SegmentedRows.cut(indptr, order[:n_long], plan.segment, in_order=published)
        self.short = device.upload(order[n_long:].astype(np.int32))
        self.tiles = None
        self.send = device.upload if send is None else send
        self._configs: dict[int, FusedConfig] = {}
        if plan.assembly == "bals":
            assert tiled_from is not None
            self.tiles = bals.upload_tiles(device, tiled(tiled_from, plan.tile_rows, plan.tile_cols, plan.num_threads))
            rows = TileRows(self.degrees, plan.tile_rows)
            self.batches = Batches(device, plan.batch_slots, rows, device.upload)
        else:
            self.batches = Batches(device, plan.batch_slots, self.long, self.send, send is None)

    def __len__(self) -> int:
        return len(self.degrees)

    def solve_all(
        self,
        kernels: Any,
        operand: Array,
        table: Array,
        entries: DeviceEntries,
        systems: Callable[[], SideSystems],
        cleared: Cleared | None = None,
    ) -> Steps:
        """Launch the solution of all rows; yields None after sums and after solutions of each batch.

        `operand` are the fixed factors in `table` in the form of the kernels; `systems` is called after the first sums.
        With `cleared`, the last item is the result.
        Stream order suffices: the sums of all segments of a row are complete before they are solved, and systems are
        solved before the next batch reuses their memory.
        """
        for batch in self.batches:
            with self.batches.fitting(batch):
                sums = kernels.empty(len(batch.segments))
                kernels.assemble(sums, operand, entries, batch.segments)
                yield None
                kernels.solve(systems(), sums, batch.slots, batch.rows, entries)
            sums = ()
            yield None
        if len(self.short):
            kernels.solve_rows(systems(), operand, entries, self.indptr, self.short)
        self.dual.solve(systems(), table, entries, self.indptr, self.epsilon)
        if cleared is not None:
            yield self.unpack(systems().solutions, cleared), systems().status

    def kernels_for(self, fixed: GpuFactors, cleared: Cleared | None = None) -> fused.RowKernels:
        """The kernels of the plan's assembly; float16 parts are scaled for these factors and weights."""
        if self.plan.assembly == "fused" and self.plan.precision == "float32" and fixed.range is None:
            found = self.device.zeros(3, np.uint32)
            widen_range(self.device, found, fixed.table)
            fixed.keep(range=read_range(self.device.download(found))[0], settled=True)
        return self.row_kernels(self.plan.rank, fixed.range, cleared)

    def same_kernels(self, one: RowRange, other: RowRange) -> bool:
        """Whether two ranges of the fixed factors lead to the same launches."""
        first, second = (self.row_kernels(self.plan.rank, known).launched_for for known in (one, other))
        return first == second

    def row_kernels(self, rank: int, known: RowRange | None, cleared: Cleared | None = None) -> fused.RowKernels:
        """The kernels for systems of an order, and for factors with a range that is known if needed."""
        plan, device = self.plan, self.device
        if plan.assembly != "fused":
            method = (device, rank, self.dtype, linear_solver(plan), self.epsilon, plan.cg_steps)
            if self.tiles is not None:
                on_tiles = functools.partial(bals.bals, tiles=self.tiles, local=plan.variant == "local")
                return PublishedKernels(*method, on_tiles)
            plain = None
            if plan.variant == PUBLISHED and plan.solver == "cholesky":
                plain = CholeskyConfig.rule(rank, self.dtype.itemsize, device.spec)
            return PublishedKernels(*method, SEGMENT_SUMS[plan.assembly_name], solver_config=plain)
        precision, largest = plan.precision, 1.0
        if precision == "float32":
            assert known is not None
            largest = known.largest
            if largest > fused.WIDEST * known.least:
                precision = "float32_wide"
        options = (precision, linear_solver(plan), self.epsilon, plan.cg_steps, largest, cleared)
        kernels = fused.FusedKernels(device, self._config(rank), *options)
        if precision != plan.precision:  # depends on the range of the factors
            device.compile_ahead(kernels.programs(*kind_of_entries(plan)))
        return kernels

    def _config(self, rank: int) -> FusedConfig:
        if rank not in self._configs:
            self._configs[rank] = fused_config(self.device, self.plan, rank)
        return self._configs[rank]

    def systems(
        self,
        cleared: Cleared,
        start: DeviceFactors | None,
        gram: Array | None,
        solutions: Array | None = None,
        pull: Array | None = None,
        rows: slice = slice(None),
    ) -> SideSystems:
        """The systems; solutions, new ones by default, are zeros, or the start of the iterative solvers.

        Solutions of Cholesky take the place of the pull. `rows`: those of `cleared` that are solved.
        """
        plan, device = self.plan, self.device
        solutions = pull if plan.solver == "cholesky" and solutions is None else solutions
        if solutions is None:
            solutions = device.zeros((len(self), self.width), self.dtype)
        if plan.solver != "cholesky" and start is not None:
            arrays.copy(device, solutions, start.table)
            if start.device_bias is not None:
                own = solutions[:, plan.factors : plan.factors + 1]
                arrays.copy(device, own, start.device_bias.reshape(-1, 1))
            if self._empty_rows is not None:
                solutions[self._empty_rows] = 0
        return SideSystems(solutions, cleared.status[rows], gram, self.ridge, self.scale, plan.factors, pull)

    @functools.cached_property
    def _empty_rows(self) -> Array | None:
        empty = np.flatnonzero(self.degrees == 0)
        return self.device.upload(empty) if len(empty) else None

    def entries(self, indices: Array, ratings: Array, fixed: DeviceFactors, mean: float) -> DeviceEntries:
        objective, offsets = self.objective, None
        if objective.biases and fixed.device_bias is not None:
            offsets = arrays.added(self.device, fixed.device_bias, mean)
        weights = (objective.is_implicit, objective.alpha, objective.unobserved_weight)
        return DeviceEntries(indices, ratings, offsets, *weights)

    def unpack(self, solutions: Array, cleared: Cleared | None = None) -> DeviceFactors:
        """Convert solutions to factors; the last coordinate of a biased model becomes its bias."""
        factors = self.plan.factors
        if not self.objective.biases:
            return DeviceFactors(self.device, solutions, factors, None, cleared=cleared)
        bias, last = self.device.empty((len(solutions), 1), self.dtype), solutions[:, factors : factors + 1]
        arrays.copy(self.device, bias, last)
        arrays.fill(self.device, last, 1)
        return DeviceFactors(self.device, solutions, factors, bias.reshape(-1), cleared=cleared)

    @property
    def epsilon(self) -> float:
        """Pivots at or below this part of their diagonal element count as rounding errors."""
        return SINGULAR_PIVOT * float(np.finfo(self.dtype).eps)

    def loss_segments(self) -> Array:
        """Segments of rows whose losses are summed: (user, begin, end)."""
        return row_segments(self.device, self.device.download(self.indptr))

    def segment_losses(
        self, indices: Array, ratings: Array, users: DeviceFactors, items: DeviceFactors, mean: float, segments: Array
    ) -> np.ndarray:
        """Losses of segments of entries, where rows are users; float64 on the host."""
        objective, device = self.objective, self.device
        weights = (objective.is_implicit, objective.alpha, objective.unobserved_weight)
        entries = DeviceEntries(indices, ratings, items.device_bias, *weights)
        offsets = None if users.device_bias is None else arrays.added(device, users.device_bias, mean)
        return losses.segment_losses(device, users.table, items.table, entries, offsets, segments, self.plan.factors)


class HalfSweep(GpuHalf, DeviceRows):
    """One half of a sweep on a device that has all ratings of its rows.

    `weights`: of explicit entries. Kernels have weights for implicit feedback only: with values -v and a
    preference of 0, an entry has the weight 1 + v, and the prediction that they subtract is offset - rating. The
    objective is then divided by the least weight. Default: 1.
    """

    one_thread = True

    def __init__(
        self,
        device: Device,
        side: Side,
        matrix: sp.csr_array | DeviceMatrix,
        objective: Objective,
        plan: Plan,
        names: np.ndarray | None = None,
        apart: bool | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        held = DeviceMatrix.of(device, matrix)
        self.weights, unit = weights, 1.0
        if weights is not None:
            unit = float(weights.min())
            lambdas = ("regularization", "bias_regularization")
            terms: dict[str, Any] = {
                name: PerSide(*(each / unit for each in getattr(objective, name))) for name in lambdas
            }
            self.as_confidences = device.upload(1 - weights / weights.dtype.type(unit))
            objective = replace(objective, **terms)
        self.unit = unit
        # the plan keeps the ratings on the host, too, for BALS
        kept: dict[str, Any] = {"starts": held.starts, "tiled_from": held.host, "apart": apart}
        DeviceRows.__init__(self, device, side, objective, plan, held.degrees, held.dtype, **kept)
        self.names, self.n_fixed = names, held.shape[1]
        self.indices, self.ratings = held.indices, held.data

    def row_entries(self, at: np.ndarray) -> sp.csr_array:
        ends = np.cumsum(self.degrees, dtype=np.int64)[at]
        begins = ends - self.degrees[at]
        together = np.split(np.arange(len(at)), np.flatnonzero(begins[1:] != ends[:-1]) + 1)  # rows in sequence
        spans = [slice(begins[rows[0]], ends[rows[-1]]) for rows in together if len(rows)]
        indices, ratings = (
            np.concatenate([np.empty(0, each.dtype), *(self.device.download(each[span]) for span in spans)])
            for each in (self.indices, self.ratings)
        )
        return csr_of(np.append(0, np.cumsum(ends - begins)), indices, ratings, self.n_fixed)

    def steps(self, given: Given) -> Steps:
        fixed, mean, start, gram, pull = given
        if gram is None:
            gram = weighted_gram(self.device, fixed.table, self.plan.rank, self.objective)
        # made on first use: the device is idle until the first sums are launched
        cleared = Cleared(self.device, len(self))
        systems = functools.cache(functools.partial(self.systems, cleared, start, gram, pull=pull))
        entries = self.entries(self.indices, self.ratings, fixed, mean)
        if self.weights is not None:
            entries = self._weighted(entries)
            if pull is not None:
                pull /= self.dtype.type(self.unit)
        kernels = self.kernels_for(fixed, cleared)
        return self.solve_all(kernels, kernels.operand(fixed.table), fixed.table, entries, systems, cleared)

    def _weighted(self, entries: DeviceEntries) -> DeviceEntries:
        residual = -entries.ratings
        if entries.offsets is not None:
            residual += entries.offsets[entries.indices]
        return DeviceEntries(entries.indices, self.as_confidences, None, True, 1.0, 0.0, residual)

    def losses(self, users: DeviceFactors, items: Any, mean: float) -> np.ndarray:
        """Losses of segments of rows in order, where rows are users; float64 on the host."""
        if self.weights is not None:
            return self._weighted_losses(users.on_host(), items.on_host(), mean)
        return self.segment_losses(self.indices, self.ratings, users, items, mean, self.loss_segments())

    def _weighted_losses(self, users: Factors, items: Factors, mean: float) -> np.ndarray:
        indptr, indices, ratings = (self.device.download(each) for each in (self.indptr, self.indices, self.ratings))
        offsets: tuple[np.ndarray, np.ndarray] = (np.empty(0), np.empty(0))
        if users.bias is not None and items.bias is not None:
            offsets = (users.bias.astype(np.float64) + mean, items.bias.astype(np.float64))
        how, threads = Weights(False, 1.0, 0.0), self.plan.num_threads
        return _als.row_losses(
            users.matrix, items.matrix, indptr, indices, ratings, offsets, how, threads, self.weights
        )


def linear_solver(plan: Plan) -> str:
    return "cholesky" if plan.solver == "subspace" else plan.solver


def kind_of_entries(plan: Plan) -> tuple[bool, bool, bool]:
    """Whether entries are implicit feedback, and whether they have offsets by column, or predictions."""
    residual = plan.solver == "subspace"
    return plan.feedback == "implicit", plan.rank > plan.factors and not residual, residual


def fused_config(device: Device, plan: Plan, rank: int) -> FusedConfig:
    return FusedConfig.default(rank, device.spec, plan.precision, linear_solver(plan))


def programs_of(device: Device, plan: Plan) -> list[Program]:
    """Arguments of `Device.kernel` for the kernels of this library that a fit of a plan needs first."""
    common = {"REAL": np.dtype(plan.dtype)}
    implicit, biased = plan.feedback == "implicit", plan.rank > plan.factors
    longest = max(dual_up_to(plan, side) for side in SIDES)
    # as many at a time as there are cores: those that take longest, then in the order of use
    return [
        *dict.fromkeys(_programs_of_systems(device, plan)),
        *(program("transpose.cu", name, **common, THREADS=arrays.THREADS) for name in matrix.KERNELS),
        program("draw.cu", "draw_rows", **common, HAS_ROWS=False, THREADS=arrays.THREADS),
        *(gram_programs(device.spec, plan.dtype) if implicit else []),
        program("rows.cu", "row_range", REAL=np.dtype(np.float32), THREADS=arrays.THREADS),
        *(predictions.programs(plan) if plan.solver == "subspace" else ()),
        *dual.programs(plan.rank, longest, implicit, biased),
        *arrays.programs(plan.dtype),
    ]


def wide_programs_of(device: Device, plan: Plan) -> list[Program]:
    """Those for factors of a wide range, which is known only during a fit: often after its first iteration."""
    if plan.assembly != "fused" or plan.precision != "float32":
        return []
    return list(dict.fromkeys(_programs_of_systems(device, plan, "float32_wide")))


def _programs_of_systems(device: Device, plan: Plan, precision: str | None = None) -> Iterator[Program]:
    """Those that sum and solve rows; of the published assemblies, those of sparse syrk alone."""
    orders = sorted({last - first for first, last in plan.blocks}, reverse=True)
    implicit, offsets, residual = kind_of_entries(plan)
    if plan.assembly == "fused":
        for order in orders:
            config = fused_config(device, plan, order)
            kernels = fused.FusedKernels(device, config, precision or plan.precision, linear_solver(plan))
            yield from kernels.programs(implicit, offsets, residual)
    elif plan.assembly_name == "sparse_syrk":
        kind = {"REAL": np.dtype(plan.dtype), "IMPLICIT": implicit, "HAS_OFFSETS": offsets}
        kind |= {"RESIDUAL": True} if residual else {}
        for order in orders:
            syrk = SyrkConfig.default(order, np.dtype(plan.dtype).itemsize, device.spec)
            yield program("sparse_syrk.cu", "sparse_syrk", **syrk.constants, **kind)
            yield from cholesky_any.programs(device.spec, order, plan.dtype, linear_solver(plan), implicit)


def row_segments(device: Device, indptr: np.ndarray) -> Array:
    """Segments of the rows of `indptr`: (row, begin, end)."""
    segmented = SegmentedRows.cut(indptr, np.flatnonzero(np.diff(indptr)), PREDICTED_ROWS)
    owners = np.repeat(segmented.rows, np.diff(segmented.slots))
    return device.upload(np.column_stack((owners, segmented.segments[:, 1:])).astype(np.int64))
