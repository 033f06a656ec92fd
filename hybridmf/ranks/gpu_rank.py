"""A rank of SU-ALS on a GPU, the twin of `hybridmf.ranks.cpu_rank`; see `hybridmf.ranks.su_als.SplitWorker`."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side
from ..core.sparse import csr_of, rows_of
from ..core.system import ceil_div, round_up
from ..data.slabs import ColumnSlabs, RangeSlabs
from ..device.cuda import Array, CudaDevice, Device, open_device
from ..gpu import als, fused, turns
from ..gpu.fused import Systems
from ..gpu.rows import add_pieces
from ..gpu.stream import Pipeline, StreamedHalf, Work, waves_of
from ..gpu.turns import HostFactors
from ..plan import fused as plan_fused
from ..plan.fused import BLOCK, FusedConfig
from ..plan.ranks import PIECES
from ..plan.types import Plan
from .batches import Ranges, batch_entries
from .su_als import Block, Owned, Then, degrees_of, ends_of
from .transport.communicator import Communicator
from .transport.nccl import NcclCommunicator

MOST_SEGMENTS = 32
"""Pieces that a row is cut into at most: its pieces are added one after the other."""

FEW_SEGMENTS = 4096
"""Pieces that a batch of few rows may have: enough for all multiprocessors of any GPU, 120 MB at f = 100."""


class GpuWorker:
    """A GPU as a `SplitWorker`; arrays are those of its device.

    Parameters
    ----------
    device : Device
    """

    gathers_ahead = True

    def __init__(self, device: Device) -> None:
        self.device = device
        self._streams: Streams | None = None
        self._pipeline: Pipeline | None = None  # one for both half sweeps
        self._streamed: StreamedHalf | StreamedPartialRows | None = None  # the half sweep made last
        self._copiers: turns.Copiers | None = None  # of both, where factors are on the host

    def active(self) -> AbstractContextManager[None]:
        """Run on the device."""
        return self.device.active()

    def own(self, factors: Factors, plan: Plan) -> als.DeviceFactors | HostFactors:
        """Factors as a table, where the plan has them between half sweeps."""
        width = plan_fused.table_width(plan.rank, factors.matrix.dtype)
        return turns.to_host(factors, width) if plan.offloaded else als.to_device(self.device, factors, width)

    def blank(self, like: Array, rows: int) -> Array:
        """Zeros of the dtype and width of an array."""
        return self.device.zeros((rows, *like.shape[1:]), like.dtype)

    def arrays(self, factors: als.DeviceFactors | HostFactors) -> list[Array]:
        """Table, and biases if there are any."""
        bias = factors.host_bias if isinstance(factors, HostFactors) else factors.device_bias
        return [factors.table] if bias is None else [factors.table, bias]

    def factors(self, arrays: list[Array], like: als.DeviceFactors | HostFactors) -> als.DeviceFactors | HostFactors:
        """Factors made of `arrays`."""
        bias = arrays[1] if len(arrays) > 1 else None
        if isinstance(like, HostFactors):
            return HostFactors(arrays[0], like.factors, bias)
        return als.DeviceFactors(self.device, arrays[0], like.factors, bias)

    def gram(self, factors: als.DeviceFactors, objective: Objective, plan: Plan) -> Array | None:
        """Weighted Gram matrix of the rows at hand."""
        if objective.is_implicit and not len(factors):
            side = round_up(plan.rank, BLOCK)
            return self.device.zeros((side, side), factors.table.dtype)
        return als.weighted_gram(self.device, factors.table, plan.rank, objective)

    def exact_gram(
        self, factors: als.DeviceFactors | HostFactors, weights: np.ndarray | None, plan: Plan
    ) -> np.ndarray:
        """Gram matrix in float64."""
        if isinstance(factors, HostFactors):
            return turns.host_gram(self.device, factors, weights)[: plan.factors, : plan.factors].copy()
        on_device = None if weights is None else self.device.upload(weights)
        return als.exact_gram(self.device, factors.table, on_device)[: plan.factors, : plan.factors].copy()

    def times(self, factors: als.DeviceFactors | HostFactors, basis: np.ndarray) -> als.DeviceFactors | HostFactors:
        """Factors in another basis."""
        if isinstance(factors, HostFactors):
            self._copiers = self._copiers or turns.Copiers(self.device)
            return turns.host_times(self.device, factors, basis, copier=self._copiers.solutions)
        table = factors.table.copy()
        if len(table):
            on_device = self.device.upload(basis.astype(table.dtype))
            table[:, : factors.factors] = self.device.matmul(factors.table[:, : factors.factors], on_device)
        return als.DeviceFactors(self.device, table, factors.factors, factors.device_bias)

    def penalty(self, objective: Objective, factors: als.DeviceFactors | HostFactors, degrees: np.ndarray) -> float:
        """`Objective.penalty` of own rows."""
        if not len(factors):
            return 0.0
        if isinstance(factors, HostFactors):
            return turns.host_penalty(self.device, objective, factors, degrees)
        return als.penalty(self.device, objective, factors, degrees)

    def whole(
        self, side: Side, block: Block, objective: Objective, plan: Plan, names: np.ndarray, ends: np.ndarray
    ) -> als.HalfSweep | StreamedHalf:
        """The half sweep of one device, over a slab of rows; in waves where the plan says that ratings are streamed."""
        if plan.offloaded:
            self._copiers = self._copiers or turns.Copiers(self.device)
            waves = waves_of(block, side, plan)
            return turns.HostHalf(self.device, side, waves, objective, plan, self._copiers, names, ends)
        if not isinstance(block, RangeSlabs) and not plan.streamed:
            roots = als.range_of_roots(objective, ends)
            return als.HalfSweep(self.device, side, block, objective, plan, names, roots)
        slabs = waves_of(block, side, plan)
        pipeline = None if plan.resident else self._entries(plan, slabs.dtype)
        half = StreamedHalf(self.device, side, slabs, objective, plan, pipeline, names, ends)
        self._follow(half)
        return half

    def _entries(self, plan: Plan, dtype: Any) -> Pipeline:
        """What brings the entries of both half sweeps."""
        if self._pipeline is None:
            longest = plan.slab
            if plan.scale is not None:
                longest = max(plan.scale.slab(side) // plan.grids[side].splits for side in SIDES)
            self._pipeline = Pipeline(self.device, longest, dtype)
        return self._pipeline

    def _follow(self, half: StreamedHalf | StreamedPartialRows) -> None:
        """Have the entries of each half sweep begin to come while the other one ends."""
        if self._streamed is not None and self._streamed.side != half.side:
            half.following, self._streamed.following = self._streamed.work, half.work
        self._streamed = half

    def solve(
        self,
        half: als.HalfSweep | StreamedHalf,
        fixed: Any,
        mean: float,
        start: Any,
        then: Then | None,
    ) -> als.DeviceFactors | HostFactors:
        """New factors of the rows of `whole`."""
        return half.solve(fixed, mean, start, then=then)

    def partial(
        self,
        side: Side,
        block: Block,
        objective: Objective,
        plan: Plan,
        names: np.ndarray,
        degrees: np.ndarray,
        batches: list[Ranges],
        solved: list[Ranges],
    ) -> PartialRows:
        """Over entries on the device, or that come batch by batch where the plan says that ratings are streamed."""
        assert not isinstance(block, RangeSlabs)
        if isinstance(block, ColumnSlabs) and plan.streamed == "host":
            block = block.load()
        arguments = (side, block, objective, plan, names, degrees, batches, solved)
        if plan.resident or not plan.streamed:
            return PartialRows(self.device, *arguments)
        half = StreamedPartialRows(self.device, *arguments, self._entries(plan, block.dtype))
        self._follow(half)
        return half

    def losses(
        self,
        objective: Objective,
        plan: Plan,
        half: Any,
        users: Iterator[Owned],
        items: als.DeviceFactors,
        mean: float,
    ) -> float:
        """Loss of all entries, range after range of rows."""
        if isinstance(half, PartialRows):
            return half.losses(users, items, mean)
        losses_of = half.losses if isinstance(half, StreamedHalf) else functools.partial(als.entry_losses, half)
        return sum(float(losses_of(own, items, mean).sum()) for _, own in users)

    def pipeline(self) -> AbstractContextManager[Any]:
        """Reductions on a stream of their own; an emulated device has none."""
        if not isinstance(self.device, CudaDevice):
            return nullcontext(InOrder())
        self._streams = self._streams or Streams(self.device)
        return nullcontext(self._streams)

    def close(self) -> None:
        """Load nothing more."""
        if self._pipeline is not None:
            self._pipeline.close()


class Streams:
    """A `Pipeline` in which reductions have a stream beside the one that computes.

    Memory that one stream frees may be given out again only to that same stream (CuPy's pool), and each reduction waits
    for what was launched before its batch was assembled: so a reduction never writes over what is still read.

    Parameters
    ----------
    device : CudaDevice
    """

    def __init__(self, device: CudaDevice) -> None:
        self._cuda = device._cupy.cuda
        self._aside = self._cuda.Stream(non_blocking=True)

    def assembled(self) -> Any:
        """A mark behind what has been launched so far."""
        return self._record(self._cuda.get_current_stream())

    def _record(self, stream: Any) -> Any:
        event = self._cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """What is launched in this context waits for the mark only; what is launched after it waits for both."""
        computing = self._cuda.get_current_stream()
        self._aside.wait_event(mark)
        with self._aside:
            yield
            done = self._record(self._aside)
        computing.wait_event(done)


@dataclass(frozen=True)
class Cut:
    """Pieces of rows of a batch on a device.

    Attributes
    ----------
    segments : int64 array, shape (n_segments, 3)
        (slot, begin, end), longest first. The first piece of a row has the slot of the row, the others come behind.
    n_rows, n_slots : int
    uneven : int64 array
        Rows that do not have one piece, but several or none.
    others : int64 array
        Slots of their second piece and those after it: ``others[k] ... others[k + 1] - 1``.
    """

    segments: Array
    n_rows: int
    n_slots: int
    uneven: Array
    others: Array

    @classmethod
    def make(
        cls, device: Device, indptr: np.ndarray, ranges: Ranges, longest: int, slots: int = 2 * FEW_SEGMENTS
    ) -> Cut:
        """Rows of some ranges, one range after the other, in pieces of at most `longest` entries.

        Longer ones where `slots`, of two batches and of what is added up, would not do.
        """
        rows = np.concatenate([np.arange(first, last) for first, last in ranges]).astype(np.int64)
        begins, ends = indptr[rows], indptr[rows + 1]
        few = min(FEW_SEGMENTS, slots // 2 - 2 * len(rows))
        entries, most = int((ends - begins).sum()), max((PIECES - 1) * len(rows), few)
        longest = max(longest, ceil_div(entries, most), ceil_div(int((ends - begins).max(initial=0)), MOST_SEGMENTS))
        pieces = -(-(ends - begins) // longest)
        others = np.maximum(pieces - 1, 0)
        starts = len(rows) + np.cumsum(others) - others
        owner = np.repeat(np.arange(len(rows)), pieces)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        slot = np.where(place == 0, owner, starts[owner] + place - 1)
        begin = begins[owner] + place * longest
        segments = np.column_stack((slot, begin, np.minimum(begin + longest, ends[owner])))
        segments = segments[np.argsort(segments[:, 1] - segments[:, 2], kind="stable")]
        uneven = np.flatnonzero(pieces != 1)
        n_slots = len(rows) + int(others.sum())
        return cls(
            device.upload(segments.astype(np.int64)),
            len(rows),
            n_slots,
            device.upload(uneven.astype(np.int64)),
            device.upload(np.append(starts[uneven], n_slots).astype(np.int64)),
        )

    def add_up(self, device: Device, sums: Array) -> Array:
        """Sums of rows from sums of pieces, which are added in order; zeros for rows without any."""
        add_pieces(device, sums, self.uneven, self.others)
        return sums[: self.n_rows]


class InOrder:
    """A `Pipeline` without overlap."""

    def assembled(self) -> None:
        """Nothing to wait for."""

    def after(self, mark: None) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return nullcontext()


class PartialRows(als.HalfSweep):
    """Sums of the entries at hand, and solutions of systems that all ranks' sums have been added up for.

    Parameters
    ----------
    device : Device
    side, block, objective, plan, names, degrees, batches, solved
        See `hybridmf.ranks.su_als.SplitWorker.partial`.

    Raises
    ------
    ValueError
        A plan whose assembly needs all entries of a row.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        block: sp.csr_array | ColumnSlabs,
        objective: Objective,
        plan: Plan,
        names: np.ndarray,
        degrees: np.ndarray,
        batches: list[Ranges],
        solved: list[Ranges],
    ) -> None:
        if plan.assembly == "bals":
            raise ValueError(
                "assembly='bals' needs all entries of a row on one rank; with a split fixed side use 'fused', "
                "'sparse_syrk' or 'mo_als'"
            )
        # the rows at hand are not those that are solved here; they are known by their batches
        nothing = csr_of(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, block.dtype), block.shape[1])
        super().__init__(device, side, nothing, objective, plan, names, als.range_of_roots(objective, ends_of(block)))
        self._take(block)
        self.scale = device.upload(objective.row_scale(degrees).astype(self.dtype))
        self.whole_degrees, self.batches, self.n_entries = degrees, batches, int(block.nnz)
        self.offsets = np.concatenate(([0], np.cumsum(degrees_of(block))))
        cut = functools.partial(Cut.make, device, longest=plan.segment, slots=plan.batch_slots)
        self._cuts = [cut(*self._places(batch)) for batch in range(len(batches))]
        self._to_solve = [self._filled(ranges) for ranges in solved]
        self._config = None
        if plan.assembly == "fused":
            self._config = FusedConfig.default(plan.rank, device.spec, plan.precision, plan.solver)
        # of the half sweep that is under way
        self._table: Any = None
        self._entries_at_hand: Any = None
        self._systems: Any = None

    def _take(self, block: sp.csr_array | ColumnSlabs) -> None:
        """Have the entries on the device."""
        assert isinstance(block, sp.csr_array)
        self.indices, self.ratings = self._hold(block.indices, block.data)

    def _places(self, batch: int) -> tuple[np.ndarray, Ranges]:
        """Where rows begin and end in the entries at hand, and which of them are those of a batch."""
        return self.offsets, self.batches[batch]

    def _at_hand(self) -> Generator[int, None, None]:
        """Batch after batch, its entries at hand until the next one."""
        yield from range(len(self.batches))

    def _filled(self, ranges: Ranges) -> tuple[Array, Array] | None:
        """(slots, rows) of a batch's rows that have entries.

        A row without any has sums of zeros, which the row before it takes along as if they were its own.
        """
        rows = np.concatenate([np.arange(first, last) for first, last in ranges] or [np.zeros(0, int)])
        filled = np.flatnonzero(self.whole_degrees[rows])
        if not len(filled):
            return None
        slots = np.append(filled, len(rows)).astype(np.int64)
        return self.device.upload(slots), self.device.upload(rows[filled].astype(np.int32))

    def start(self, fixed: als.DeviceFactors, mean: float, start: als.DeviceFactors, gram: Array | None) -> None:
        """Begin a half sweep."""
        plan, device, n_rows = self.plan, self.device, len(self.whole_degrees)
        solutions = device.zeros((n_rows, self.width), self.dtype)
        if plan.solver != "cholesky" and n_rows:
            solutions[...] = start.table
            if start.device_bias is not None:
                solutions[:, plan.factors] = start.device_bias
            if not self.whole_degrees.all():
                solutions[device.upload(np.flatnonzero(self.whole_degrees == 0))] = 0
        self._table, self._entries_at_hand = fixed.table, self._entries(fixed, mean)
        self._systems = Systems(solutions, device.zeros(n_rows, np.int32), gram, self.ridge, self.scale)
        self._how = fused.Method("float32", plan.solver, self.epsilon, plan.cg_steps)
        if self._config is not None and self.n_entries:
            self._how = self._method(fixed)

    def assemble(self, batch: int) -> tuple[Array, ...]:
        """Sums of a batch's entries at hand; zeros for rows without any."""
        device, cut, rank = self.device, self._cuts[batch], self.plan.rank
        arguments = (self._table, self._entries_at_hand, cut.segments)
        if self._config is not None:
            sums = device.empty((cut.n_slots, self._config.partial_floats), np.float32)
            fused.assemble_segments(device, sums, *arguments, self._config, self._how)
            return (cut.add_up(device, sums),)
        # lower triangles are written, whole matrices travel
        matrices = device.zeros((cut.n_slots, rank, rank), self.dtype)
        rhs = device.empty((cut.n_slots, rank), self.dtype)
        if len(cut.segments):
            als.published(self.plan)(device, matrices, rhs, *arguments, rank)
        return cut.add_up(device, matrices), cut.add_up(device, rhs)

    def finish(self, batch: int, sums: tuple[Array, ...]) -> None:
        """Complete and solve the systems of a batch."""
        to_solve = self._to_solve[batch]
        if to_solve is None:
            return
        if self._config is not None:
            fused.solve_partials(
                self.device, self._systems, sums[0], *to_solve, self._entries_at_hand, self._config, self._how
            )
        else:
            matrices, rhs = sums
            self._finish(self._systems, matrices, rhs, *to_solve)

    def close(self) -> None:
        """Nothing goes on beside the rank's thread; what was lent to this half sweep has room in no other."""
        self._table = self._entries_at_hand = None

    def result(self, then: Then | None = None) -> als.DeviceFactors:
        """Factors of the rows solved here."""
        systems, self._systems = self._systems, None
        solved = self._unpack(systems.solutions)
        self.judge(systems.status, solved if then is None else then(solved))
        return solved

    def losses(self, users: Iterator[Owned], items: als.DeviceFactors, mean: float) -> float:
        """Loss of all entries, where rows are users; they come in the order of the batches, but for empty ranges."""
        total = 0.0
        with closing(self._at_hand()) as batches:
            for batch in batches:
                indptr, ranges = self._places(batch)
                for (first, last), rows in zip(ranges, self.batches[batch], strict=True):
                    if first == last:
                        continue
                    come, own = next(users)
                    assert come == rows
                    segments = als.row_segments(self.device, indptr[first : last + 1])
                    total += float(als.segment_losses(self, own, items, mean, segments).sum())
        return total


class StreamedPartialRows(PartialRows):
    """`PartialRows` whose block stays on the host or in a store: the entries of a batch come while others are summed.

    Parameters
    ----------
    device, side, block, objective, plan, names, degrees, batches, solved
        As for `PartialRows`.
    pipeline : Pipeline
        Brings the entries.

    Attributes
    ----------
    work, following
        As of `hybridmf.gpu.stream.StreamedHalf`.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        block: sp.csr_array | ColumnSlabs,
        objective: Objective,
        plan: Plan,
        names: np.ndarray,
        degrees: np.ndarray,
        batches: list[Ranges],
        solved: list[Ranges],
        pipeline: Pipeline,
    ) -> None:
        super().__init__(device, side, block, objective, plan, names, degrees, batches, solved)
        self.pipeline, self.work = pipeline, batch_work(block, batches)
        self.following: Work | None = None
        self._stream: Generator[int, None, None] | None = None
        pipeline.reserve(int(batch_entries(batches, np.diff(self.offsets)).max(initial=0)))
        if isinstance(block, sp.csr_array):
            pipeline.copier.pin(block.indices)
            pipeline.copier.pin(block.data)

    def _take(self, block: sp.csr_array | ColumnSlabs) -> None:
        """Nothing yet."""

    def _places(self, batch: int) -> tuple[np.ndarray, Ranges]:
        degrees = [np.diff(self.offsets[first : last + 1]) for first, last in self.batches[batch]]
        ends = np.cumsum([0, *map(len, degrees)]).tolist()
        return np.cumsum(np.concatenate(([0], *degrees))), list(pairwise(ends))

    def _at_hand(self) -> Generator[int, None, None]:
        nothing = self.indices, self.ratings
        with closing(self.pipeline.loads(self.work, self.following)) as loads:
            try:
                for batch, self.indices, self.ratings in loads:
                    yield batch
            finally:
                self.indices, self.ratings = nothing

    def start(self, fixed: als.DeviceFactors, mean: float, start: als.DeviceFactors, gram: Array | None) -> None:
        """Begin a half sweep; its entries begin to come with the first batch, if they have not before."""
        super().start(fixed, mean, start, gram)
        self._stream = self._at_hand()

    def assemble(self, batch: int) -> tuple[Array, ...]:
        """Sums of a batch's entries; batches are asked for in their order."""
        assert self._stream is not None
        come = next(self._stream)
        assert come == batch
        self._entries_at_hand = replace(self._entries_at_hand, indices=self.indices, ratings=self.ratings)
        sums = super().assemble(batch)
        if batch == len(self.batches) - 1:
            next(self._stream, None)  # its buffer is free again; what follows may come
        return sums

    def close(self) -> None:
        """Load nothing more for this half sweep."""
        super().close()
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def batch_work(block: sp.csr_array | ColumnSlabs, batches: list[Ranges]) -> Work:
    """(indices, ratings) of each batch: those of its ranges one behind the other, which lie apart in the block."""

    def fetch(batch: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        if isinstance(block, ColumnSlabs):
            pieces = [piece for rows in batches[batch] for piece in block.rows(*rows)]
        else:
            pieces = [rows_of(block, *rows) for rows in batches[batch]]
        return [piece.indices for piece in pieces], [piece.data for piece in pieces]

    return Work(len(batches), fetch, block)


def gpu_worker(names: Sequence[str], control: Communicator) -> tuple[Communicator, GpuWorker]:
    """A rank's communicator and worker on the GPU of its name; called by all ranks together.

    Raises
    ------
    DeviceError
    """
    device = open_device(names[control.rank])
    return NcclCommunicator(control, device.index), GpuWorker(device)


def sockets(names: Sequence[str]) -> list[int]:
    """Number of the socket of each GPU: those of one reach each other's memory directly, by the driver."""
    devices = [open_device(name) for name in names]
    reaches = devices[0]._cupy.cuda.runtime.deviceCanAccessPeer
    groups: list[int] = []
    for k, device in enumerate(devices):
        near = [groups[j] for j in range(k) if reaches(device.index, devices[j].index)]
        groups.append(near[0] if near else len(set(groups)))
    return groups
