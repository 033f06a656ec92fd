"""ALS on a GPU whose factors stay in the memory of the host, or in files: for factors that are larger than the GPU.

    ratings    slab k + 1 ──> device ┐                              a thread and a stream each, beside the kernels
    fixed side part t + 1 ──> device ┼─> kernels: rows of slab k ──> solutions of slab k - 1 ──> host
    last factors of slab k ──────────┘

Where the fixed side fits on the GPU as a whole it is brought there once in each half sweep, and the bits are those of
`hybridmf.gpu.als.GpuALS`. Where it does not, its parts take turns for each slab (cuMF Algorithm 3 and section 4.4): the
sums of the slab's rows stay on the device and grow in the order of the parts, then the systems are completed and
solved. Columns ascend within a row, so that a segment's entries of one part lie side by side: `clip_segments` finds
where they begin and end, and no entry is copied.

Files of `core.scratch` take the place of memory that the host does not have: `HostTables` are then made of them,
before the fit begins. Nothing here works on more of a table at a time than some rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice, pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.balance import balancing
from ..core.objective import SIDES, AwayFactors, Factors, Objective, Side, State, drawn_rows, first_bias, first_mean
from ..core.scratch import mapped
from ..data.slabs import MemorySlabs, Slabs, slab_entries
from ..data.store import StoreMatrix
from ..device.copier import Copier
from ..device.cuda import Array, Device
from ..native.status import check_status
from ..plan.fused import table_width
from ..plan.ranks import slots_at_once
from ..plan.types import Plan
from . import fused, losses
from .als import (
    EXACT_ROWS,
    Batch,
    DeviceFactors,
    exact_gram,
    fill_table,
    gram_sum,
    loss_segments,
    padded_gram,
    published,
    segment_losses,
    unobserved_loss,
    weighted_gram,
)
from .fused import Systems
from .rows import RowRange, clip_segments, read_range, widen_range
from .stream import Loader, Pipeline, SlabHalf, StreamedGpuALS, StreamedHalf, Work, waves_of

# ------------------------------------------------------------------------------------------------ on the host


class HostFactors(AwayFactors):
    """Factors in the memory of the host, as tables that a device takes as they are.

    Parameters
    ----------
    table : float array, shape (n, width)
        As `DeviceFactors.table`, in NumPy; not to be written to.
    factors : int
        Columns that are factors.
    host_bias : float array, shape (n,), or None
    range : RowRange, optional
        Of the table's rows, where it is known.
    tables : HostTables, optional
        Where the table is from, and the next one will be.
    """

    def __init__(
        self,
        table: np.ndarray,
        factors: int,
        host_bias: np.ndarray | None,
        range: RowRange | None = None,
        tables: HostTables | None = None,
    ) -> None:
        self.keep(table=table, factors=factors, host_bias=host_bias, range=range, tables=tables)

    table: np.ndarray
    factors: int
    host_bias: np.ndarray | None
    range: RowRange | None
    tables: HostTables | None

    def _brought(self) -> Factors:
        """Without what only devices need; a copy only where rows are padded."""
        rows = self.table[:, : self.factors]
        matrix = np.ascontiguousarray(rows) if self.tables is None else self.tables.packed(rows)
        return Factors(matrix, self.host_bias)

    @property
    def bias(self) -> np.ndarray | None:
        """Biases."""
        return self.host_bias

    def wait_by(self, release: Callable[[], bool]) -> None:
        """As `HostTables.wait_by`."""
        if self.tables is not None:
            self.tables.wait_by(release)

    def let_go(self) -> None:
        """Forget a copy without padding, if it is in a file."""
        if self.tables is not None and self.tables.folder:
            self.keep(_host=None)

    def look(self) -> None:
        """Find the range of the rows."""
        if self.range is None and self.table.dtype == np.float32:
            self.keep(range=range_on_host(self.table))

    def vectors(self, first: int, last: int) -> list[np.ndarray]:
        """Some rows as vectors to be copied: the table, and biases if there are any."""
        table = self.table[first:last].reshape(-1)
        return [table] if self.host_bias is None else [table, self.host_bias[first:last]]

    def lent(self, device: Device, vectors: Sequence[Array]) -> DeviceFactors:
        """Such vectors, on a device, as factors."""
        table = vectors[0].reshape(-1, self.table.shape[1])
        return DeviceFactors(device, table, self.factors, vectors[1] if len(vectors) > 1 else None, self.range)

    def sent(self, copiers: Copiers, first: int, last: int) -> DeviceFactors:
        """Some rows on a device."""
        return self.lent(copiers.device, [copiers.send(vector) for vector in self.vectors(first, last)])

    def __len__(self) -> int:
        return len(self.table)


def range_on_host(table: np.ndarray) -> RowRange:
    """What `hybridmf.gpu.rows.row_range` finds of a table on a device."""
    peaks = np.concatenate(
        [np.abs(table[k : k + EXACT_ROWS]).max(axis=1, initial=0) for k in range(0, len(table), EXACT_ROWS)]
        or [np.zeros(0, table.dtype)]
    )
    filled = peaks[peaks != 0]
    return RowRange(float(filled.max()), float(filled.min())) if len(filled) else RowRange(0.0, 0.0)


class HostTables:
    """Tables of one shape that are used again when nobody holds them any more.

    A half sweep writes new factors and leaves the old ones alone: whoever has looked at them may keep them. They are
    page-locked once where possible: to lock the pages of new memory each time would take longer than to fill it.

    Parameters
    ----------
    shape : (n, width)
    dtype : dtype
    folder : str
        Where their files are; empty: they are in memory.
    """

    def __init__(self, shape: tuple[int, int], dtype: Any, folder: str = "") -> None:
        self.shape, self.dtype, self.folder = shape, np.dtype(dtype), folder
        self._made: list[np.ndarray] = []
        self._free: list[np.ndarray] = []
        self._copier: Copier | None = None
        self._release: Callable[[], bool] | None = None

    @classmethod
    def of(cls, side: Side, plan: Plan, dtype: Any) -> HostTables:
        """Tables of a side of a fit; files of all that it needs are made at once."""
        shape = (plan.n_users if side == "user" else plan.n_items, table_width(plan.rank, dtype))
        tables = cls(shape, dtype, plan.scratch[0] if plan.factors_on == "disk" else "")
        if tables.folder:
            tables._free = [tables._make() for _ in range(plan.tables_of(side))]
        return tables

    def lock(self, copier: Copier) -> None:
        """Have a copier lock the pages of all tables, those that are made later, too."""
        self._copier = copier
        for table in self._made:
            self._pin(table)

    def wait_by(self, release: Callable[[], bool]) -> None:
        """Where there is no room for one more table, call this once before that is an error.

        Parameters
        ----------
        release : callable
            Waits until others, who hold tables for a while, have let go of them; False if this thread cannot wait.
        """
        self._release = release

    def _pin(self, table: np.ndarray) -> None:
        if self._copier is not None and not self.folder:
            self._copier.pin(table)

    def take(self) -> np.ndarray:
        """A table of anything, until the last array that is made of it goes."""
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
        """A table that nobody holds, or a new one."""
        try:
            return self._free.pop()
        except IndexError:  # none, or the thread that writes checkpoints was quicker
            return self._make()

    def packed(self, rows: np.ndarray) -> np.ndarray:
        """Rows of tables as one piece of memory: as they are if they are one, else a copy in the place of a table."""
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
    """Have a table used again if there is still a fit; else it goes."""
    owner = tables()
    if owner is not None:
        owner._free.append(table)


class _Lent:
    """What arrays made of a table have as their base, so that it outlives the last of them and no longer."""

    def __init__(self, table: np.ndarray) -> None:
        self.__array_interface__ = table.__array_interface__


def to_host(factors: Factors, width: int, tables: HostTables | None = None) -> HostFactors:
    """Factors as a table of `width` columns: of `tables`, or a new one."""
    if isinstance(factors, HostFactors) and factors.table.shape[1] == width:
        return factors
    given = factors.on_host()
    table = np.empty((len(given), width), given.matrix.dtype) if tables is None else tables.take()
    fill_table(table, given)
    return HostFactors(table, given.matrix.shape[1], given.bias, tables=tables)


def first_state(
    degrees: dict[Side, np.ndarray],
    plan: Plan,
    dtype: Any,
    objective: Objective,
    mean: float,
    rng: np.random.Generator,
    square: float = 1.0,
) -> State:
    """What `hybridmf.core.objective.initial_state` has, in the tables of a fit: there is no room for more."""
    tables = {side: HostTables.of(side, plan, dtype) for side in SIDES}
    users, items = (_first_factors(tables[side], degrees[side], plan.factors, objective, rng, square) for side in SIDES)
    return State(users, items, first_mean(mean, objective))


def _first_factors(
    tables: HostTables, degrees: np.ndarray, rank: int, objective: Objective, rng: np.random.Generator, square: float
) -> HostFactors:
    table, bias = tables.take(), first_bias(degrees, tables.dtype, objective)
    for rows, drawn in drawn_rows(degrees, rank, rng, square):
        fill_table(table[rows], Factors(drawn, None if bias is None else bias[rows]))
    return HostFactors(table, rank, bias, tables=tables)


class Copiers:
    """Copies of ratings, of parts of the fixed side, of solutions and of what is small, beside each other.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        self.device, self.entries = device, device.copier()
        self.parts, self.solutions, self.rest = (self.entries.twin() for _ in range(3))

    def send(self, array: np.ndarray) -> Array:
        """An array on the device, for work launched from here on; nobody waits until it is there."""
        target = self.device.empty(array.shape, array.dtype)
        self.rest.after(self.device.record())  # what had this memory before may still be read
        self.rest.copy(target.reshape(-1), array.reshape(-1))
        self.device.wait(self.rest.mark())
        return target


class Drain:
    """Brings solutions to the host on a stream and a thread of their own, while the next ones are made.

    Parameters
    ----------
    device : Device
    copier : Copier
    """

    def __init__(self, device: Device, copier: Copier) -> None:
        self.device, self.copier = device, copier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hybridmf-solutions")
        self._under_way: Future[None] | None = None

    def put(self, pairs: list[tuple[np.ndarray, Array]]) -> None:
        """Begin to copy to each array of the host its array of the device; waits until those before have left."""
        mark = self.device.record()
        self.finish()
        self._under_way = self._thread.submit(self._fetch, pairs, mark)

    def _fetch(self, pairs: list[tuple[np.ndarray, Array]], mark: Any) -> None:
        self.copier.after(mark)
        while pairs:  # what has left must not wait for the rest, nor for whoever else holds this list
            self.copier.fetch(*pairs.pop())

    def finish(self) -> None:
        """Wait for what is under way; raises what went wrong in it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """End the thread, when it has done with what it works on."""
        self._thread.shutdown()


# ------------------------------------------------------------------------------------------------ half sweeps


class InTurns:
    """A fixed side whose parts are on the device one after the other; stands where `DeviceFactors` would.

    Parameters
    ----------
    range : RowRange or None
        Of all rows.
    stream : iterator of (int, DeviceFactors)
        First row and factors of each part, from the first to the last for each slab.
    parts : int
    """

    def __init__(self, range: RowRange | None, stream: Iterator[tuple[int, DeviceFactors]], parts: int) -> None:
        self.range, self._stream, self._parts = range, stream, parts

    def turns(self) -> Iterator[tuple[int, DeviceFactors]]:
        """First row and factors of each part; valid until the next one."""
        return islice(self._stream, self._parts)


class HostSlab(SlabHalf):
    """`SlabHalf` of rows that are so many that their pieces have no room on the device.

    Attributes
    ----------
    send : callable
        Brings an array to the device.
    """

    keeps_batches = False
    send: Callable[[np.ndarray], Array]

    def _upload(self, array: np.ndarray) -> Array:
        return self.send(array)


class SlabInTurns(HostSlab):
    """`HostSlab` for a fixed side whose parts take turns."""

    def _sums_apart(self) -> bool:
        return True

    def launches(
        self, fixed: Any, mean: float, start: DeviceFactors | None = None, gram: Array | None = None
    ) -> Generator[None, None, tuple[DeviceFactors, Array]]:
        """As those of `HalfSweep`, part by part."""
        systems, (batch,) = self._begun(start, gram), Batch.upload(self._upload, [self.long])
        method = self._method(fixed) if self.plan.assembly == "fused" else None
        sums = self._empty_sums(len(batch.segments))
        for turn, part in enumerate(self.parts_of(fixed)):
            for slots in self._chunks(len(batch.segments)):
                segments = self._clipped(batch.segments[slots], part, slots.start)
                self._add([each[slots] for each in sums], part, mean, segments, method, anew=turn == 0)
            yield
        self._solve_sums(systems, sums, batch, method)
        return self._unpack(systems.solutions), systems.status

    def parts_of(self, fixed: InTurns) -> Iterator[DeviceFactors]:
        """Each part of the fixed side, while the slab's indices count from its first row."""
        at = 0
        for first, part in fixed.turns():
            if first > at:
                self.indices -= np.int32(first - at)
            at = first
            yield part

    def _clipped(self, segments: Array, part: DeviceFactors, first_slot: int) -> Array:
        return clip_segments(self.device, segments, self.indices, len(part), first_slot)

    def _chunks(self, n_slots: int) -> Iterator[slice]:
        """Slots whose sums are made at a time, before they join those of the parts before."""
        for start in range(0, n_slots, self.batch_slots):
            yield slice(start, min(start + self.batch_slots, n_slots))

    def _empty_sums(self, n_slots: int) -> list[Array]:
        if self.plan.assembly == "fused":
            return [self.device.empty((n_slots, self._fused_config().partial_floats), np.float32)]
        return list(self._matrices(n_slots))

    def _add(
        self, sums: list[Array], part: DeviceFactors, mean: float, segments: Array, method: Any, *, anew: bool
    ) -> None:
        """Add what a part brings to some slots; `anew`: there is nothing yet to add to."""
        fresh = sums if anew else self._empty_sums(len(segments))
        arguments = (part.table, self._entries(part, mean), segments)
        if method is None:
            published(self.plan)(self.device, *fresh, *arguments, self.plan.rank)
        else:
            fused.assemble_segments(self.device, fresh[0], *arguments, self._fused_config(), method)
        if not anew:
            for target, more in zip(sums, fresh, strict=True):
                target += more

    def _solve_sums(self, systems: Systems, sums: list[Array], batch: Batch, method: Any) -> None:
        if not len(batch.rows):
            return
        if method is None:
            self._finish(systems, sums[0], sums[1], batch.slots, batch.rows)
        else:
            config, entries = self._fused_config(), self._entries_without_part()
            fused.solve_partials(self.device, systems, sums[0], batch.slots, batch.rows, entries, config, method)

    def _entries_without_part(self) -> Any:
        """What says how kernels are compiled: whether there are offsets, not which."""
        offsets = self.device.zeros(1, self.dtype) if self.objective.biases else None
        return self._entries(DeviceFactors(self.device, None, self.plan.factors, offsets), 0.0)

    def losses(self, users: DeviceFactors, items: InTurns, mean: float) -> np.ndarray:
        """`segment_losses` where items take turns."""
        segments = loss_segments(self)
        total = np.zeros(len(segments))
        for part in self.parts_of(items):
            total += segment_losses(self, users, part, mean, self._clipped(segments, part, 0))
        return total


class HostHalf(StreamedHalf):
    """One half of a sweep whose factors, fixed and solved, are in the memory of the host.

    Parameters
    ----------
    device, side, slabs, objective, plan, names, ends
        As for `StreamedHalf`; the plan's `scale` says in how many turns the fixed side comes.
    copiers : Copiers
    tables : HostTables, optional
        Of the rows that are solved. Default: its own, in memory.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        slabs: Slabs,
        objective: Objective,
        plan: Plan,
        copiers: Copiers,
        names: np.ndarray | None = None,
        ends: np.ndarray | None = None,
        tables: HostTables | None = None,
    ) -> None:
        assert plan.scale is not None
        half = plan.scale.halves[side]
        self.turns, self.buffers, self.copiers = half.turns, half.buffers if half.turns > 1 else 1, copiers
        plan = plan.changed(batch_slots=slots_at_once(plan.scale.problem, half))
        super().__init__(device, side, slabs, objective, plan, None, names, ends)
        if isinstance(slabs, MemorySlabs):
            copiers.entries.pin(slabs.csr.indices)
            copiers.entries.pin(slabs.csr.data)
        self.longest = int(slab_entries(slabs.bounds, self.degrees).max(initial=0))
        width = table_width(plan.rank, slabs.dtype)
        self.tables = tables or HostTables((len(self.degrees), width), slabs.dtype)
        self.tables.lock(copiers.entries)

    def _slab_half(self, *arguments: Any) -> SlabHalf:
        slab = SlabInTurns(*arguments) if self.turns > 1 else HostSlab(*arguments)
        slab.send = self.copiers.send
        return slab

    def _solve(
        self,
        fixed: Any,
        mean: float,
        start: Any,
        then: Callable[[DeviceFactors], DeviceFactors] | None,
    ) -> Any:
        assert then is None
        device, n = self.device, len(self.degrees)
        status, found = device.zeros(n, np.int32), device.zeros(3, np.uint32)
        table = self.tables.take()
        bias = np.zeros(n, table.dtype) if self.objective.biases else None
        solved = HostFactors(table, self.plan.factors, bias, tables=self.tables)
        drain = Drain(device, self.copiers.solutions)
        gram = self._gram(fixed)
        if self.turns > 1 and self.plan.assembly == "fused":
            fixed.look()  # here, where it takes longer: a device that has all rows looks for itself
        with closing(drain), self._lent(fixed) as side, self._streaming() as slabs:
            if self.turns == 1:
                gram = weighted_gram(device, side.table, self.plan.rank, self.objective)
            method = self.parts[0].method_for(side) if self.parts and self.plan.assembly == "fused" else None
            for rows, slab in slabs:
                slab.shared_method = method
                slab.lend_results(None, status[rows])
                new = slab.solve(side, mean, self._first_guess(start, rows), gram)
                if table.dtype == np.float32:
                    widen_range(device, found, new.table, status[rows])
                arrays = [new.table.reshape(-1)] + ([] if bias is None else [new.device_bias])
                drain.put(list(zip(solved.vectors(rows.start, rows.stop), arrays, strict=True)))
            drain.finish()
        self._judge(status, found, solved)
        return solved

    def _first_guess(self, start: HostFactors | None, rows: slice) -> DeviceFactors | None:
        """Where approximate solvers begin; an exact one does not ask."""
        if start is None or self.plan.solver == "cholesky":
            return None
        return start.sent(self.copiers, rows.start, rows.stop)

    def _judge(self, status: Array, found: Array, solved: HostFactors) -> None:
        """Raise what went wrong in a row; keep what the next half sweep wants to know of the new factors."""
        if solved.table.dtype == np.float32:
            known, failed = read_range(self.device.download(found))
            solved.keep(range=known)
        else:
            failed = bool(status.any())
        if failed:
            check_status(self.device.download(status), self.side, self.objective, self.names)

    @contextmanager
    def _streaming(self) -> Iterator[Iterator[tuple[slice, Any]]]:
        """Slabs whose buffers are on the device only meanwhile: the other half sweep needs its room."""
        capacity, dtype = self.longest, self.slabs.dtype
        self.pipeline = Pipeline(self.device, capacity, dtype, copier=self.copiers.entries)
        try:
            with closing(self.entries()) as slabs:  # else a failure would leave the thread at work
                yield slabs
        finally:
            self.pipeline = None

    def _loader(self, fixed: HostFactors) -> Loader:
        """Buffers for parts of a fixed side."""
        longest = int(np.diff(part_bounds(len(fixed), self.turns)).max(initial=0))
        vectors = [(vector.size, vector.dtype) for vector in fixed.vectors(0, longest)]
        return Loader(self.device, vectors, self.buffers, self.copiers.parts)

    @contextmanager
    def _lent(self, fixed: HostFactors) -> Iterator[Any]:
        """The fixed side on the device: as a whole, or in turns for each slab."""
        times = 1 if self.turns == 1 else len(self.parts)
        with closing(self._stream(self._loader(fixed), fixed, times)) as stream:
            yield next(stream)[1] if self.turns == 1 else InTurns(fixed.range, stream, self.turns)

    def _stream(
        self, loader: Loader, fixed: HostFactors, times: int
    ) -> Generator[tuple[int, DeviceFactors], None, None]:
        """First row and factors of each part in order, so many times over."""
        parts = list(pairwise(part_bounds(len(fixed), self.turns).tolist()))
        work = Work(times * len(parts), lambda k: fixed.vectors(*parts[k % len(parts)]), fixed)
        with closing(loader.loads(work)) as loads:
            for k, *vectors in loads:
                yield parts[k % len(parts)][0], fixed.lent(self.device, vectors)

    def _gram(self, fixed: HostFactors) -> Array | None:
        """The weighted Gram matrix of a fixed side whose parts take turns, added up over them; else None."""
        if self.turns == 1 or not self.objective.is_implicit:
            return None
        total: Any = 0.0
        with closing(self._stream(self._loader(fixed), fixed, 1)) as stream:
            for _, part in stream:
                total = total + gram_sum(self.device, part.table)
        return padded_gram(self.device, total, self.plan.rank, fixed.table.dtype, self.objective)

    def losses(self, users: Any, items: Any, mean: float) -> np.ndarray:
        """Losses of pieces of rows, where rows are users; see `StreamedHalf.losses`."""
        found = [np.zeros(0)]
        with self._lent(items) as side, self._streaming() as slabs:
            for rows, slab in slabs:
                own = users.sent(self.copiers, rows.start, rows.stop)
                if isinstance(slab, SlabInTurns):
                    found.append(slab.losses(own, side, mean))
                else:
                    found.append(segment_losses(slab, own, side, mean, loss_segments(slab)))
        return np.concatenate(found)


def part_bounds(rows: int, parts: int) -> np.ndarray:
    """Rows ``bounds[k] ... bounds[k + 1] - 1`` are part k of a fixed side; all but the last have as many."""
    longest = -(-rows // parts)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * longest, rows)


class HostGpuALS(StreamedGpuALS):
    """`GpuALS` over factors that stay in the memory of the host or in files, and ratings that come slab by slab.

    Parameters
    ----------
    device, user_items, item_users, objective, plan, state
        As for `StreamedGpuALS`; the plan's `scale` has factors on the host or on disk. A state of `first_state` brings
        its tables with it.
    """

    inward: dict[Side, Any]

    def _make_halves(self, matrices: Mapping[Side, sp.csr_array | StoreMatrix], state: State) -> dict[Side, Any]:
        device, plan, copiers, dtype = self.device, self.plan, Copiers(self.device), matrices["user"].dtype
        tables = {side: _tables_of(state.side(side)) or HostTables.of(side, plan, dtype) for side in SIDES}
        return {
            side: HostHalf(
                device, side, waves_of(matrices[side], side, plan), self.objective, plan, copiers, tables=tables[side]
            )
            for side in SIDES
        }

    def _begin(self, side: Side, factors: Factors, width: int) -> HostFactors:
        return to_host(factors, width, self.halves[side].tables)

    def balance(self) -> None:
        """Change both sides to the basis of least penalty; the same predictions."""
        with self.device.active():
            scales = {side: self.objective.row_scale(self.halves[side].degrees) for side in SIDES}
            count = self.plan.factors
            users, items = (host_gram(self.device, self.inward[side], scales[side])[:count, :count] for side in SIDES)
            bases = zip(SIDES, balancing(users, items), strict=True)
            self.inward = {side: self._times(side, basis) for side, basis in bases}  # both at once, or neither

    def _times(self, side: Side, basis: np.ndarray) -> HostFactors:
        half = self.halves[side]
        return host_times(self.device, self.inward[side], basis, half.tables.take(), half.copiers.solutions)

    def objective_value(self) -> float:
        """The objective at the current factors, sums in float64."""
        with self.device.active():
            users, items = (self.inward[side] for side in SIDES)
            total = float(self.halves["user"].losses(users, items, self.mean).sum())
            grams = [host_gram(self.device, side) for side in (users, items)] if self.objective.is_implicit else []
            penalties = [
                host_penalty(self.device, self.objective, self.inward[side], self.halves[side].degrees)
                for side in SIDES
            ]
            return total + (unobserved_loss(self.objective, grams) + sum(penalties))


def _tables_of(factors: Factors) -> HostTables | None:
    return factors.tables if isinstance(factors, HostFactors) else None


# ------------------------------------------------------------------------------------------------ over all rows


def _pieces(factors: HostFactors) -> Iterator[slice]:
    for start in range(0, len(factors), EXACT_ROWS):
        yield slice(start, min(start + EXACT_ROWS, len(factors)))


def host_gram(device: Device, factors: HostFactors, weights: np.ndarray | None = None) -> np.ndarray:
    """`exact_gram` of a side on the host."""
    total = np.zeros((factors.table.shape[1],) * 2)
    for rows in _pieces(factors):
        own = None if weights is None else device.upload(weights[rows].astype(factors.table.dtype))
        total += exact_gram(device, device.upload(factors.table[rows]), own)
    return total


def host_penalty(device: Device, objective: Objective, factors: HostFactors, degrees: np.ndarray) -> float:
    """`Objective.penalty` of a side on the host."""
    found = [
        losses.row_squares(device, device.upload(factors.table[rows]), factors.factors) for rows in _pieces(factors)
    ]
    return objective.penalty_of_squares(np.concatenate([np.zeros(0), *found]), degrees, factors.host_bias)


def host_times(
    device: Device,
    factors: HostFactors,
    basis: np.ndarray,
    table: np.ndarray | None = None,
    copier: Copier | None = None,
) -> HostFactors:
    """A side in another basis, written to `table` or a new one."""
    table = np.empty_like(factors.table) if table is None else table
    copier = device.copier() if copier is None else copier
    on_device = device.upload(basis.astype(table.dtype))
    for rows in _pieces(factors):
        part = device.upload(factors.table[rows])
        part[:, : factors.factors] = device.matmul(part[:, : factors.factors], on_device)
        copier.after(device.record())
        copier.fetch(table[rows], part)
    return HostFactors(table, factors.factors, factors.host_bias, tables=factors.tables)
