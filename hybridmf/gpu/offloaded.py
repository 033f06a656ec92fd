"""Half sweeps of ALS on a GPU whose factors are offloaded: for factors that are larger than the GPU's memory.

    ratings    slab k + 1 ──> device ┐                              a thread and a stream each, beside kernels
    fixed side part t + 1 ──> device ┼─> kernels: rows of slab k ──> solutions of slab k - 1 ──> host
    last factors of slab k ──────────┘

If the fixed side fits on the GPU as a whole, each half sweep loads it once, and results equal those of a fit with all
factors on the GPU bit for bit. Otherwise it is loaded in parts, one after the other for each slab (cuMF Algorithm 3 and
section 4.4): the sums of the slab's rows stay on the device, parts are added in order, then the systems are completed
and solved. Columns ascend within a row, so the entries of a segment in one part are contiguous: `clip_segments` finds
their bounds, and no entry is copied.

If the host does not have enough memory, `HostTables` are files of `core.scratch`, created before the fit starts. This
module processes only some rows of a table at a time.

Order. Ratings and parts of the fixed side arrive in buffers of `hybridmf.gpu.stream.Loader`. `Copiers.send` copies to
new memory after all launches so far, which may have read it, and later launches wait for the copy. `Drain` copies
solutions behind a mark recorded after the kernels that compute them; its thread refers to the arrays until the host has
waited for the copies, so their memory is not reused before. The table on the host is read after `Drain.finish`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import islice, pairwise
from typing import Any, TypeAlias

import numpy as np

from ..core.objective import Objective, Side
from ..core.regression import Regression, joined
from ..data.slabs import InMemory, Orientation, slab_entries
from ..device.copier import Copier
from ..device.cuda import Array, Device
from ..plan.fused import table_width
from ..plan.half_sweep import slots_at_once
from ..plan.solver import Given, Steps
from ..plan.types import Plan
from .assembly import Cleared
from .factors import EXACT_ROWS, Copiers, DeviceFactors, HostFactors, HostTables, range_on_host, weighted_gram
from .fused import RowKernels
from .gram import gram_sum, weighted
from .half import Batch, DeviceRows
from .launch import DeviceEntries
from .rows import clip_segments, widen_range
from .stream import INTERRUPTIBLE, Loader, StreamedHalf, Transfers, entry_loader
from .systems import SideSystems, Sums

Parts: TypeAlias = Iterator[tuple[int, DeviceFactors]]
"""First row and factors of parts of a fixed side, which are on the device one after the other."""


class Drain:
    """Copies solutions to the host on a separate stream and thread, while the next ones are computed."""

    def __init__(self, device: Device, copier: Copier) -> None:
        self.device, self.copier = device, copier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hybridmf-solutions")
        self._under_way: Future[None] | None = None

    def put(self, pairs: list[tuple[np.ndarray, Array]]) -> None:
        """Start to copy each array of the device to its array of the host; waits until previous copies are complete."""
        mark = self.device.record()
        self.finish()
        self._under_way = self._thread.submit(self._fetch, pairs, mark)

    def _fetch(self, pairs: list[tuple[np.ndarray, Array]], mark: Any) -> None:
        self.copier.after(mark)
        while pairs:  # releases each array after its copy, also if the list is referenced elsewhere
            self.copier.fetch(*pairs.pop())

    def finish(self) -> None:
        """Wait for the current copies; raises their failure."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            while wait([under_way], timeout=INTERRUPTIBLE).not_done:
                pass
            under_way.result()

    def close(self) -> None:
        """End the thread after its current copies."""
        self._thread.shutdown()


# ------------------------------------------------------------------------------------------------ half sweeps


class HostHalf(StreamedHalf):
    """One half of a sweep whose fixed and solved factors are offloaded to the host.

    The `scale` of the plan has the number of parts of the fixed side; `tables` are those of the solved side, by default
    new ones in memory.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        slabs: Orientation,
        objective: Objective,
        plan: Plan,
        copiers: Copiers,
        names: np.ndarray | None = None,
        tables: HostTables | None = None,
        apart: bool | None = None,
    ) -> None:
        assert plan.scale is not None
        half = plan.scale.halves[side]
        self.fixed_parts, self.copiers = half.turns, copiers
        self.buffers = half.buffers if half.turns > 1 else 1
        plan = plan.changed(batch_slots=slots_at_once(plan, half))
        # a slab has so many rows that their pieces do not stay on the device
        apart = True if self.fixed_parts > 1 else apart
        super().__init__(device, side, slabs, objective, plan, None, names, send=copiers.send, apart=apart)
        if isinstance(slabs, InMemory):
            copiers.entries.pin(slabs.csr.indices)
            copiers.entries.pin(slabs.csr.data)
        self.longest = int(slab_entries(slabs.bounds, self.degrees).max(initial=0))
        width = table_width(plan.rank, slabs.dtype)
        self.tables = tables or HostTables((len(self.degrees), width), slabs.dtype)
        self.tables.lock(copiers.entries)

    @functools.cached_property
    def scale(self) -> np.ndarray:
        """s of each row, on the host."""
        return self.objective.row_scale(self.side, self.degrees)

    def steps(self, given: Given) -> Steps:
        """Launch slab after slab; solutions are copied to the host."""
        fixed, mean, start, _, pull = given
        device, n = self.device, len(self.degrees)
        cleared = Cleared(device, n)
        status, found = cleared.status, cleared.found
        table = self.tables.take()
        bias = np.zeros(n, table.dtype) if self.objective.biases else None
        solved = HostFactors(table, self.plan.factors, bias, tables=self.tables)
        drain = Drain(device, self.copiers.solutions)
        gram = self._gram(fixed)
        if self.fixed_parts > 1 and self.plan.assembly == "fused" and fixed.range is None and fixed.has_range:
            fixed.keep(range=range_on_host(fixed.table))  # faster on the device if the fixed side is there as a whole
        with closing(drain), self._lent(fixed) as side, self._streaming() as slabs:
            known = side if self.fixed_parts == 1 else fixed
            kernels: Any = self.solvers[0].kernels_for(known, cleared) if self.solvers else None  # for all slabs
            if self.fixed_parts == 1:
                operand = kernels and kernels.operand(side.table)
                gram = weighted_gram(device, side.table, self.plan.rank, self.objective)
            for rows, slab, indices, ratings in slabs:
                added = None
                if pull is not None:
                    added = self.copiers.send(pull(rows, slab.width, slab.dtype))
                first = None  # exact solvers need no start
                if start is not None and self.plan.solver != "cholesky":
                    first = start.sent(self.copiers, rows.start, rows.stop)
                systems = functools.cache(functools.partial(slab.systems, cleared, first, gram, None, added, rows))
                if self.fixed_parts == 1:
                    entries = slab.entries(indices, ratings, side, mean)
                    for _ in slab.solve_all(kernels, operand, side.table, entries, systems):
                        pass
                else:
                    solve_in_parts(slab, kernels, systems(), islice(side, self.fixed_parts), indices, ratings, mean)
                new = slab.unpack(systems().solutions)
                del systems, added
                widen_range(device, found, new.table if solved.has_range else None, status[rows])
                vectors = [array.reshape(-1) for array in new.arrays]
                drain.put(list(zip(solved.vectors(rows.start, rows.stop), vectors, strict=True)))
                yield None
            drain.finish()
        solved.keep(checked=device.begin_download(found))
        yield solved, status

    @contextmanager
    def _streaming(self) -> Iterator[Iterator[tuple[slice, DeviceRows, Array, Array]]]:
        """Stream slabs through buffers that exist only in this context: the other half sweep needs their memory."""
        capacity, dtype = self.longest, self.slabs.dtype
        self.pipeline = entry_loader(self.device, capacity, dtype, copier=self.copiers.entries)
        try:
            with closing(self.entries()) as slabs:  # stops the thread after a failure
                yield slabs
        finally:
            self.pipeline = None

    @contextmanager
    def _lent(self, fixed: HostFactors) -> Iterator[Any]:
        """Load the fixed side to the device: factors of the whole, or first row and factors of each part, in turn.

        A part is valid until the next one; they come from the first to the last for each slab.
        """
        times = 1 if self.fixed_parts == 1 else len(self.solvers)
        with closing(self._stream(fixed, times)) as stream:
            yield next(stream)[1] if self.fixed_parts == 1 else stream

    def _stream(self, fixed: HostFactors, times: int) -> Generator[tuple[int, DeviceFactors], None, None]:
        """Yield first row and factors of each part in order, `times` times."""
        bounds = part_bounds(len(fixed), self.fixed_parts)
        vectors = [(vector.size, vector.dtype) for vector in fixed.vectors(0, int(np.diff(bounds).max(initial=0)))]
        loader, parts = Loader(self.device, vectors, self.buffers, self.copiers.parts), list(pairwise(bounds.tolist()))
        transfers = Transfers(times * len(parts), lambda k: fixed.vectors(*parts[k % len(parts)]), fixed)
        with closing(loader.loads(transfers)) as loads:
            for k, *vectors in loads:
                yield parts[k % len(parts)][0], fixed.lent(self.device, vectors)

    def _gram(self, fixed: HostFactors) -> Array | None:
        """The weighted Gram matrix of a fixed side in parts, added over them; None for a whole one."""
        if self.fixed_parts == 1 or not self.objective.is_implicit:
            return None
        total: Any = 0.0
        with closing(self._stream(fixed, 1)) as stream:
            for _, part in stream:
                total = total + gram_sum(self.device, part.table)
        return weighted(self.device, total, self.plan.rank, fixed.table.dtype, self.objective.unobserved_weight)

    def losses(self, users: Any, items: Any, mean: float) -> np.ndarray:
        """Losses of segments of rows, where rows are users; see `StreamedHalf.losses`."""
        found = [np.zeros(0)]
        with self._lent(items) as side, self._streaming() as slabs:
            for rows, slab, indices, ratings in slabs:
                own, segments = users.sent(self.copiers, rows.start, rows.stop), slab.loss_segments()
                if self.fixed_parts == 1:
                    found.append(slab.segment_losses(indices, ratings, own, side, mean, segments))
                    continue
                total = np.zeros(len(segments))
                for part in parts_of(islice(side, self.fixed_parts), indices):
                    clipped = clip_segments(self.device, segments, indices, len(part), 0)
                    total += slab.segment_losses(indices, ratings, own, part, mean, clipped)
                found.append(total)
        return np.concatenate(found)


class HostRegression(Regression):
    """A `Regression` for factors that are offloaded to the host, block of rows after block."""

    def sums(self, factors: Any) -> np.ndarray:
        total = np.zeros((len(self.root), factors.factors + (factors.host_bias is not None)))
        for start in range(0, len(self.scale), EXACT_ROWS):
            rows = slice(start, start + EXACT_ROWS)
            own = joined(factors.take(rows)).astype(np.float64)
            total += self.rows[rows].T @ (own * self.weights_of(rows)[:, None])
        return total

    def pull(self, sums: np.ndarray, ridge: np.ndarray) -> Callable[[slice, int, Any], np.ndarray]:
        """See `Regression`; a function of some rows, width and dtype: a table, zeros for rows without entries."""
        vectors = self.vectors(sums)

        def of_rows(rows: slice, width: int, dtype: Any) -> np.ndarray:
            table = np.zeros((rows.stop - rows.start, width), dtype)
            found = (self.rows[rows] @ vectors) * self.weights_of(rows)[:, None]
            table[:, : vectors.shape[1]] = found * ridge
            return table

        return of_rows

    def weights_of(self, rows: slice) -> np.ndarray:
        return np.where(self.empty[rows], 0.0, self.scale[rows])


def solve_in_parts(
    slab: DeviceRows,
    kernels: RowKernels,
    systems: SideSystems,
    fixed: Parts,
    indices: Array,
    ratings: Array,
    mean: float,
) -> None:
    """Launch the solution of a slab for a fixed side in parts, whose sums are added in order; modifies the indices."""
    (batch,) = Batch.upload(slab.send, [slab.long])
    slots = len(batch.segments)
    sums, at_once = kernels.empty(slots), slab.batches.slots
    for number, part in enumerate(parts_of(fixed, indices)):
        operand, entries = kernels.operand(part.table), slab.entries(indices, ratings, part, mean)
        for start in range(0, slots, at_once):
            some = slice(start, min(start + at_once, slots))
            segments = clip_segments(slab.device, batch.segments[some], indices, len(part), start)
            add_sums(kernels, tuple(each[some] for each in sums), operand, entries, segments, anew=number == 0)
    if len(batch.rows):
        # compile-time constants depend on the presence of offsets, not on their values
        offsets = slab.device.zeros(1, slab.dtype) if slab.objective.biases else None
        without_part = DeviceFactors(slab.device, None, slab.plan.factors, offsets)
        kernels.solve(systems, sums, batch.slots, batch.rows, slab.entries(indices, ratings, without_part, 0.0))


def add_sums(
    kernels: RowKernels, sums: Sums, operand: Array, entries: DeviceEntries, segments: Array, *, anew: bool
) -> None:
    """Add the sums of a part to those of some slots; `anew`: overwrite them."""
    fresh = sums if anew else kernels.empty(len(segments))
    kernels.assemble(fresh, operand, entries, segments)
    if not anew:
        for target, more in zip(sums, fresh, strict=True):
            target += more


def parts_of(fixed: Parts, indices: Array) -> Iterator[DeviceFactors]:
    """Yield each part of the fixed side; meanwhile the indices of a slab count from its first row."""
    at = 0
    for first, part in fixed:
        if first > at:
            indices -= np.int32(first - at)
        at = first
        yield part


def part_bounds(rows: int, parts: int) -> np.ndarray:
    """Rows ``bounds[k] ... bounds[k + 1] - 1`` are part k of a fixed side; all but the last have the same size."""
    longest = -(-rows // parts)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * longest, rows)
