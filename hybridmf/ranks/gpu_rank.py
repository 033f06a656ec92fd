"""A rank of SU-ALS on a GPU, the counterpart of `hybridmf.ranks.cpu_rank`; see `hybridmf.ranks.su_als.Worker`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.objective import SIDES, Factors, Objective, Side
from ..core.regression import Regression
from ..core.system import ceil_div, round_up
from ..data.slabs import InMemory, Orientation
from ..device.cuda import Array, CudaDevice, Device, open_device
from ..gpu.assembly import Cleared
from ..gpu.factors import Copiers, DeviceFactors, GpuFactors, HostTables, to_device, to_host, weighted_gram
from ..gpu.features import DeviceRegression
from ..gpu.half import DeviceRows, GpuHalf, HalfSweep, row_segments
from ..gpu.matrix import DeviceMatrix
from ..gpu.offloaded import HostHalf, HostRegression
from ..gpu.rows import add_pieces
from ..gpu.stream import Loader, StreamedHalf, Transfers, entry_loader, slabs_of
from ..gpu.subspace import SubspaceHalf
from ..plan.fused import BLOCK, table_width
from ..plan.half_sweep import SYSTEMS_PER_ROW
from ..plan.solver import Given
from ..plan.types import Plan
from .batches import BatchedRows, Ranges, batch_entries
from .group import open_rank
from .su_als import WholeRows
from .transport.communicator import Communicator

MOST_SEGMENTS = 32  # maximum number of segments of a row: they are added one after the other

FEW_SEGMENTS = 4096
"""Segments allowed in a batch of few rows: enough for all multiprocessors of any GPU, 120 MB at f = 100."""


class GpuWorker:
    """A GPU as a `Worker`; owns what the half sweeps of both sides share. Arrays are those of its device."""

    gathers_ahead = True

    def __init__(self, device: Device) -> None:
        self.device, self.copiers = device, Copiers(device)
        self.pipeline: Loader | None = None
        self._tables: dict[Side, HostTables] = {}
        self._last: Any = None  # the last streamed half sweep made

    def active(self) -> AbstractContextManager[None]:
        return self.device.active()

    def own(self, side: Side, factors: Factors, plan: Plan) -> GpuFactors:
        width = table_width(plan.rank, plan.dtype)
        if not plan.offloaded:
            return to_device(self.device, factors, width)
        self._tables[side] = HostTables.of(side, plan, (len(factors), width))
        return to_host(factors, width, self._tables[side])

    def blank(self, like: Array, rows: int) -> Array:
        """Zeros of the dtype and width of an array."""
        return self.device.zeros((rows, *like.shape[1:]), like.dtype)

    def gram(self, factors: DeviceFactors, objective: Objective, plan: Plan) -> Array | None:
        if objective.is_implicit and not len(factors):
            side = round_up(plan.rank, BLOCK)
            return self.device.zeros((side, side), factors.table.dtype)
        return weighted_gram(self.device, factors.table, plan.rank, objective)

    def exact_gram(self, factors: GpuFactors, weights: Any = None) -> np.ndarray:
        return factors.exact_gram(self.device, weights)

    def times(self, factors: GpuFactors, basis: np.ndarray) -> GpuFactors:
        return factors.times(self.copiers, basis)

    def penalty(self, objective: Objective, side: Side, factors: GpuFactors, degrees: np.ndarray) -> float:
        return factors.penalty(self.device, objective, side, degrees)

    def total(self, loss: float, unobserved: float, penalties: tuple[float, float]) -> float:
        return loss + (unobserved + sum(penalties))

    def regression(self, plan: Plan) -> Callable[..., Regression]:
        if plan.offloaded:
            return HostRegression
        width = table_width(plan.rank, plan.dtype)
        return functools.partial(DeviceRegression, self.device, rank=plan.rank, width=width, dtype=plan.dtype)

    def whole(self, rows: WholeRows) -> GpuHalf:
        """The half sweep over complete rows, for the placement of ratings and factors in the plan."""
        device, (side, block, objective, plan, names, described, weights) = self.device, rows
        # the start of conjugate gradients has the place in which `solve_rows` reads a pull
        apart = True if described and plan.solver == "cg" else None
        if plan.offloaded:
            slabs, tables = slabs_of(block, side, plan), self._tables[side]
            return HostHalf(device, side, slabs, objective, plan, self.copiers, names, tables, apart)
        if isinstance(block, InMemory | DeviceMatrix) and not plan.streamed:
            matrix = block.csr if isinstance(block, InMemory) else block
            if plan.solver == "subspace":
                return SubspaceHalf(device, side, matrix, objective, plan, names)
            return HalfSweep(device, side, matrix, objective, plan, names, apart, weights)
        slabs = slabs_of(block, side, plan)
        pipeline = None if plan.resident else self._entries(plan, slabs.dtype)
        return self._linked(StreamedHalf(device, side, slabs, objective, plan, pipeline, names, apart=apart))

    def partial(self, side: Side, block: Any, objective: Objective, plan: Plan, rows: BatchedRows) -> PartialRows:
        """Half sweep over entries on the device, or streamed batch by batch, according to the plan."""
        if plan.streamed != "disk":
            block = block.load()
        if plan.resident or not plan.streamed:
            return PartialRows(self.device, side, block, objective, plan, rows)
        pipeline = self._entries(plan, block.dtype)
        return self._linked(PartialRows(self.device, side, block, objective, plan, rows, pipeline))

    def _entries(self, plan: Plan, dtype: Any) -> Loader:
        """The pipeline that loads the entries of both half sweeps."""
        if self.pipeline is None:
            longest = plan.slab
            if plan.scale is not None:
                longest = max(plan.scale.slab(side) // plan.grids[side].splits for side in SIDES)
            self.pipeline = entry_loader(self.device, longest, dtype)
        return self.pipeline

    def _linked(self, half: Any) -> Any:
        """The half sweep, whose entries start to load while the other one ends, and the other way round."""
        if self._last is not None and self._last.side != half.side and half.plan.frozen is None:
            half.following, self._last.following = self._last.transfers, half.transfers
        self._last = half
        return half

    @functools.cached_property
    def overlap(self) -> Overlap:
        return Overlap(self.device)

    def close(self) -> None:
        if self.pipeline is not None:
            self.pipeline.close()


class Overlap:
    """Order between assembly and reduction of batches, which run on separate streams, on an emulated device in turn.

    CuPy's pool reuses memory only on the stream that freed it, and each reduction waits for all launches up to the
    assembly of its batch. So a reduction never overwrites memory that is still read.
    """

    def __init__(self, device: Device) -> None:
        self._aside: Any = None
        if isinstance(device, CudaDevice):
            self._cuda, self._mark = device._cupy.cuda, device.health.mark
            self._aside = self._cuda.Stream(non_blocking=True)

    def assembled(self) -> Any:
        """A mark after all launches so far."""
        return None if self._aside is None else self._mark()

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Launches in this context wait for the mark only; launches after it wait for both."""
        if self._aside is None:
            yield
            return
        computing = self._cuda.get_current_stream()
        self._aside.wait_event(mark)
        with self._aside:
            yield
            done = self._mark()
        computing.wait_event(done)


@dataclass(frozen=True)
class BatchSegments:
    """Segments of rows of a batch on a device."""

    # int64 array, shape (n_segments, 3): (slot, begin, end), longest first. The first segment of a row has the slot of
    # the row; the slots of further segments come after all rows
    segments: Array
    n_rows: int
    n_slots: int
    uneven: Array  # rows with several segments or none
    others: Array  # slots of the second and further segments of these rows: ``others[k] ... others[k + 1] - 1``

    @classmethod
    def make(
        cls, device: Device, indptr: np.ndarray, ranges: Ranges, longest: int, slots: int = 2 * FEW_SEGMENTS
    ) -> BatchSegments:
        """Cut the rows of some ranges, one range after the other, into segments of at most `longest` entries.

        Segments are longer if `slots` do not suffice for two batches and the reduced sums.
        """
        rows = np.concatenate([np.arange(first, last) for first, last in ranges]).astype(np.int64)
        begins, ends = indptr[rows], indptr[rows + 1]
        few = min(FEW_SEGMENTS, slots // 2 - 2 * len(rows))
        entries, most = int((ends - begins).sum()), max((SYSTEMS_PER_ROW - 1) * len(rows), few)
        longest = max(longest, ceil_div(entries, most), ceil_div(int((ends - begins).max(initial=0)), MOST_SEGMENTS))
        counts = -(-(ends - begins) // longest)
        others = np.maximum(counts - 1, 0)
        starts = len(rows) + np.cumsum(others) - others
        owner = np.repeat(np.arange(len(rows)), counts)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        slot = np.where(place == 0, owner, starts[owner] + place - 1)
        begin = begins[owner] + place * longest
        segments = np.column_stack((slot, begin, np.minimum(begin + longest, ends[owner])))
        segments = segments[np.argsort(segments[:, 1] - segments[:, 2], kind="stable")]
        uneven = np.flatnonzero(counts != 1)
        n_slots = len(rows) + int(others.sum())
        return cls(
            device.upload(segments.astype(np.int64)),
            len(rows),
            n_slots,
            device.upload(uneven.astype(np.int64)),
            device.upload(np.append(starts[uneven], n_slots).astype(np.int64)),
        )

    def add_up(self, device: Device, sums: Array) -> Array:
        """Sums of rows: the sums of their segments, added in order; zeros for rows without any."""
        add_pieces(device, sums, self.uneven, self.others)
        return sums[: self.n_rows]


class PartialRows(GpuHalf, DeviceRows):
    """A half sweep over rows whose entries are distributed over ranks: `block` has those of this rank.

    Between `start` and `result`, each batch is summed over the entries of this rank (`assemble`) and, once the sums of
    all ranks are reduced, solved (`finish`). The rows summed here are not those solved here: `rows` identifies both.

    With a `pipeline`, the block stays on the host or in a store: entries of a batch load while another one is summed.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        block: Orientation,
        objective: Objective,
        plan: Plan,
        rows: BatchedRows,
        pipeline: Loader | None = None,
    ) -> None:
        if plan.assembly == "bals":
            raise ValueError(
                "assembly='bals' needs all entries of a row on one rank; with a split fixed side use 'fused', "
                "'sparse_syrk' or 'mo_als'"
            )
        DeviceRows.__init__(self, device, side, objective, plan, np.zeros(0, np.int64), block.dtype)
        self.names, self.pipeline = rows.names, pipeline
        self.scale = device.upload(objective.row_scale(side, rows.degrees).astype(self.dtype))
        self.degrees, self.row_batches, self.n_entries = rows.degrees, rows.batches, int(block.nnz)
        self.offsets = np.concatenate(([0], np.cumsum(block.degrees)))
        cut = functools.partial(BatchSegments.make, device, longest=plan.segment, slots=plan.batch_slots)
        self._cuts = [cut(*self._places(batch)) for batch in range(len(rows.batches))]
        self._to_solve = [self._filled(ranges) for ranges in rows.solved]
        if pipeline is None:
            csr = block.load().csr
            self.indices, self.ratings = device.upload(csr.indices), device.upload(csr.data)
        else:
            nothing = np.zeros(0, np.int32)
            self.indices, self.ratings = device.upload(nothing), device.upload(nothing.astype(block.dtype))
            self.transfers, self.following = batch_transfers(block, rows.batches), None
            pipeline.reserve(int(batch_entries(rows.batches, np.diff(self.offsets)).max(initial=0)))
            if isinstance(block, InMemory):
                pipeline.copier.pin(block.csr.indices)
                pipeline.copier.pin(block.csr.data)
        # of the current half sweep
        self._operand: Any = None
        self._entries_at_hand: Any = None
        self._under_way: Any = None  # systems, kernels, memory of zeros
        self._stream: Generator[int, None, None] | None = None

    def _places(self, batch: int) -> tuple[np.ndarray, Ranges]:
        """Return the `indptr` of the entries on the device, and the ranges of rows of a batch in it."""
        if self.pipeline is None:
            return self.offsets, self.row_batches[batch]
        degrees = [np.diff(self.offsets[first : last + 1]) for first, last in self.row_batches[batch]]
        ends = np.cumsum([0, *map(len, degrees)]).tolist()
        return np.cumsum(np.concatenate(([0], *degrees))), list(pairwise(ends))

    def _at_hand(self) -> Generator[int, None, None]:
        """Yield each batch; its entries are on the device until the next one."""
        if self.pipeline is None:
            yield from range(len(self.row_batches))
            return
        nothing = self.indices, self.ratings
        with closing(self.pipeline.loads(self.transfers, self.following)) as loads:
            try:
                for batch, self.indices, self.ratings in loads:
                    yield batch
            finally:
                self.indices, self.ratings = nothing

    def _filled(self, ranges: Ranges) -> tuple[Array, Array] | None:
        """Return (slots, rows) of the rows of a batch that have entries.

        An empty row has sums of zeros, which are added to the row before it.
        """
        rows = np.concatenate([np.arange(first, last) for first, last in ranges] or [np.zeros(0, int)])
        filled = np.flatnonzero(self.degrees[rows])
        if not len(filled):
            return None
        slots = np.append(filled, len(rows)).astype(np.int64)
        return self.device.upload(slots), self.device.upload(rows[filled].astype(np.int32))

    def start(self, given: Given) -> None:
        """Start from the part of the fixed side on this rank, and the Gram matrix of the whole.

        Entries start to load with the first batch, if not earlier.
        """
        fixed, mean, start, gram, _ = given
        self._entries_at_hand = self.entries(self.indices, self.ratings, fixed, mean)
        cleared = Cleared(self.device, len(self.degrees))
        kernels = self.kernels_for(fixed, cleared)
        self._operand = kernels.operand(fixed.table)
        self._under_way = self.systems(cleared, start, gram), kernels, cleared
        self._stream = self._at_hand()

    def assemble(self, batch: int) -> tuple[Array, ...]:
        """Sums over this rank's entries of a batch; zeros for rows without any. Called for all batches in order."""
        assert self._stream is not None
        come = next(self._stream)
        assert come == batch
        cut, (_, kernels, _) = self._cuts[batch], self._under_way
        self._entries_at_hand = replace(self._entries_at_hand, indices=self.indices, ratings=self.ratings)
        sums = kernels.empty(cut.n_slots, whole=True)
        kernels.assemble(sums, self._operand, self._entries_at_hand, cut.segments)
        found = tuple(cut.add_up(self.device, each) for each in sums)
        if batch == len(self.row_batches) - 1:
            next(self._stream, None)  # releases its buffer, so that loading continues
        return found

    def finish(self, batch: int, sums: tuple[Array, ...]) -> None:
        to_solve = self._to_solve[batch]
        if to_solve is not None:
            systems, kernels, _ = self._under_way
            kernels.solve(systems, sums, *to_solve, self._entries_at_hand)

    def close(self) -> None:
        self._operand = self._entries_at_hand = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def result(self, then: Callable[[Any], Any] = lambda solved: solved) -> DeviceFactors:
        (systems, _, cleared), self._under_way = self._under_way, None
        solved = self.unpack(systems.solutions, cleared)
        self.check(then(solved), systems.status)
        return solved

    def loss(self, users: Iterator[tuple[tuple[int, int], DeviceFactors]], items: DeviceFactors, mean: float) -> float:
        """Loss of all entries, where rows are users. `users` follow the order of the batches, without empty ranges."""
        total = 0.0
        with closing(self._at_hand()) as batches:
            for batch in batches:
                indptr, ranges = self._places(batch)
                for (first, last), rows in zip(ranges, self.row_batches[batch], strict=True):
                    if first == last:
                        continue
                    come, own = next(users)
                    assert come == rows
                    segments = row_segments(self.device, indptr[first : last + 1])
                    losses = self.segment_losses(self.indices, self.ratings, own, items, mean, segments)
                    total += float(losses.sum())
        return total


def batch_transfers(block: Orientation, batches: list[Ranges]) -> Transfers:
    """(indices, ratings) of each batch: those of its ranges, concatenated."""

    def fetch(batch: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        slabs = [slab for rows in batches[batch] for slab in block.rows(*rows)]
        return [slab.indices for slab in slabs], [slab.data for slab in slabs]

    return Transfers(len(batches), fetch, block)


def gpu_worker(names: Sequence[str], control: Any) -> tuple[Communicator, GpuWorker]:
    """Communicator and worker of a rank on the GPU with its name; called by all ranks together."""
    communicator, device = open_rank(names[control.rank], control)
    assert device is not None
    return communicator, GpuWorker(device)


def sockets(names: Sequence[str]) -> list[int]:
    """Socket of each GPU: the driver reports which GPUs access each other's memory directly."""
    devices = [open_device(name) for name in names]
    reaches = devices[0]._cupy.cuda.runtime.deviceCanAccessPeer
    groups: list[int] = []
    for k, device in enumerate(devices):
        near = [groups[j] for j in range(k) if reaches(device.index, devices[j].index)]
        groups.append(near[0] if near else len(set(groups)))
    return groups
