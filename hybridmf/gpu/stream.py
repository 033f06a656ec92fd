"""ALS on a GPU over ratings that do not fit on it: slabs load from the host or the disk while kernels run.

    thread:   slab k + 1 ──> pinned buffers ──> device buffer (k + 1) % 3     on a separate stream
    kernels:  wait for the copy of slab k; solve its rows; release its buffer

Factors and row metadata (offsets, which rows are long) stay on the device: about 30 bytes per row. A half sweep loads
only the entries, 8 bytes each. Results equal those with all ratings on the device, bit for bit: rows are independent,
and the scale of float16 parts, which depends on all rows, is computed before slabs are cut.
`hybridmf.gpu.offloaded` is for factors that do not fit either.

Order. A buffer is written after its readers: `release` records an event behind the launches that read it, and the
thread makes the copier's stream wait for this event before it copies. A buffer is read after its copies: the thread
passes on a mark behind them, and the stream of the kernels waits for it before the next launches. The first copies wait
for all launches before, which may have used the memory. `end` waits for the thread and for its copies, so no copy is in
flight when buffers are freed; a GPU that is lost cannot use them any more.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, Side
from ..core.validate import csr_arrays
from ..data.slabs import InMemory, Orientation, slab_entries
from ..device.copier import Copier
from ..device.cuda import Array, Device
from ..device.health import hurry
from ..errors import DeviceLostError
from ..plan.half_sweep import SLAB_BUFFERS
from ..plan.solver import Given, Steps
from ..plan.types import Plan
from .assembly import Cleared
from .factors import DeviceFactors, weighted_gram
from .half import DeviceRows, GpuHalf

Vector: TypeAlias = "np.ndarray | Sequence[np.ndarray]"  # a vector on the host, or several to concatenate


class Loader:
    """Device buffers that are used in rotation, and the thread that fills them.

    There are `buffers` sets of `vectors`, given as lengths and dtypes, that are loaded together.
    """

    def __init__(
        self, device: Device, vectors: Sequence[tuple[int, Any]], buffers: int, copier: Copier | None = None
    ) -> None:
        self.device, self.buffers = device, buffers
        self.copier = device.copier() if copier is None else copier
        self._early: _Loading | None = None
        self._allocate(vectors)

    def reserve(self, capacity: int) -> None:
        """Make room for vectors of `capacity` elements; not during a stream."""
        if capacity > self.vectors[0][0]:
            self._allocate([(capacity, dtype) for _, dtype in self.vectors])

    def _allocate(self, vectors: Sequence[tuple[int, Any]]) -> None:
        self.close()
        self.vectors = vectors
        self._buffers: list[list[Array]] = []  # freed before new ones are allocated: there may be no room for both
        with self.device.active():
            for _ in range(self.buffers):
                self._buffers.append([self.device.empty(size, dtype) for size, dtype in vectors])

    def loads(self, transfers: Transfers, then: Transfers | None = None) -> Generator[tuple[Any, ...], None, None]:
        """(k, vectors on the device) for k = 0 ... count - 1; the vectors are valid for work launched until the next k.

        `transfers`: vectors to load.
        `then`: probably the next transfers: they start as buffers become free.
        """
        loading = self._taken(transfers) or _Loading(self.device, self.copier, self._buffers, transfers)
        done = False
        try:
            for k in range(transfers.count):
                slot, sizes, mark = loading.next()
                if k == transfers.count - 1 and then is not None:
                    loading.go_on(then)
                self.device.wait(mark)
                yield k, *(buffer[:size] for buffer, size in zip(self._buffers[slot], sizes, strict=True))
                loading.release(slot)
            done = transfers.count > 0
        except BaseException:  # a failure or Ctrl-C, here or in the caller: the end of the load must not block forever
            hurry()
            raise
        finally:
            if done and then is not None:
                self._early = loading
                self._end_early = weakref.finalize(self, loading.end)
                self._end_early.atexit = False  # not at exit: a process must not wait for it
            else:
                loading.end()

    def close(self) -> None:
        """Stop transfers that were started early."""
        self._taken()

    def _taken(self, transfers: Transfers | None = None) -> _Loading | None:
        """Return the transfers that were started early if they are the given ones; otherwise stop them."""
        early, self._early = self._early, None
        if early is None:
            return None
        self._end_early.detach()
        if transfers is not None and early.transfers.of is transfers.of:
            return early
        early.end()
        return None


INTERRUPTIBLE = 0.2
"""Seconds for which the main thread waits for another thread at a time: Ctrl-C does not end a longer wait if a library,
such as asyncio, has system calls restarted after signals."""


@dataclass(frozen=True)
class Transfers:
    """Sets of vectors of the host, one after the other."""

    count: int
    fetch: Callable[[int], Sequence[Vector]]  # vectors for each k, in order; called on a separate thread
    of: object  # source of the vectors; identifies transfers that were started early


class _Loading:
    """A thread that fills buffers as they become free, with one `Transfers` after the other."""

    def __init__(self, device: Device, copier: Copier, buffers: list[list[Array]], transfers: Transfers) -> None:
        self.device, self.copier, self.buffers, self.transfers = device, copier, buffers, transfers
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queue: queue.SimpleQueue[Transfers | None] = queue.SimpleQueue()
        begun = device.record()  # previous work on the buffers may still be running
        for slot in range(len(buffers)):
            self._free.put((slot, begun))
        self._queue.put(transfers)
        self._thread = threading.Thread(target=self._run, name="hybridmf-slabs", daemon=True)
        self._thread.start()

    def next(self) -> tuple[int, list[int], Any]:
        """Return (buffer, lengths of its vectors, mark after their copies) of the next set, or raise a failure."""
        while True:
            with suppress(queue.Empty):
                found = self._ready.get(timeout=INTERRUPTIBLE)
                break
        if isinstance(found, BaseException):
            raise found
        return found

    def release(self, slot: int) -> None:
        """Release a buffer once all launches so far are complete."""
        self._free.put((slot, self.device.record()))

    def go_on(self, transfers: Transfers) -> None:
        """Load other vectors after the current ones."""
        self.transfers = transfers
        self._queue.put(transfers)

    def end(self) -> None:
        """Wait for the current load, and stop."""
        self._queue.put(None)
        self._free.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector runs on any thread
            self._thread.join()
        with suppress(DeviceLostError):  # raised where it is found; here it would hide Ctrl-C
            self.copier.synchronize()

    def _run(self) -> None:
        try:
            while (transfers := self._queue.get()) is not None:
                for k in range(transfers.count):
                    free = self._free.get()
                    if free is None:
                        return
                    slot, mark = free
                    self._fill(slot, mark, transfers.fetch(k))
        except BaseException as error:  # raised by `next`
            self._ready.put(error)

    def _fill(self, slot: int, mark: Any, vectors: Sequence[Vector]) -> None:
        self.copier.after(mark)
        sizes = [self._copy(target, source) for target, source in zip(self.buffers[slot], vectors, strict=True)]
        self._ready.put((slot, sizes, self.copier.mark()))

    def _copy(self, target: Array, source: Vector) -> int:
        """Start to copy a vector to the start of `target`; return its length."""
        at = 0
        for vector in (source,) if isinstance(source, np.ndarray) else source:
            self.copier.copy(target[at:], vector)
            at += len(vector)
        return at


def entry_loader(
    device: Device, capacity: int, dtype: Any, buffers: int = SLAB_BUFFERS, copier: Copier | None = None
) -> Loader:
    """Loader of up to `capacity` entries as (indices, ratings): slabs, or batches of rows whose sums are reduced."""
    size = max(1, capacity)
    return Loader(device, [(size, np.int32), (size, dtype)], buffers, copier)


def slab_transfers(slabs: Orientation) -> Transfers:
    """(indices, ratings) of each slab."""

    def fetch(slab: int) -> tuple[np.ndarray, np.ndarray]:
        slabs.prefetch(slab + 1)
        _, indices, ratings = csr_arrays(slabs.matrix(slab))
        return indices, ratings

    return Transfers(len(slabs.bounds) - 1, fetch, slabs)


class StreamedHalf(GpuHalf):
    """One half of a sweep on a device over slabs, the waves in which rows are solved (cuMF 4.4).

    The `pipeline` loads the slabs in each half sweep; without it they stay on the device after the first. `following`
    are the transfers of the next half sweep, which start early.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        slabs: Orientation,
        objective: Objective,
        plan: Plan,
        pipeline: Loader | None,
        names: np.ndarray | None = None,
        **of_rows: Any,
    ) -> None:
        self.device, self.side, self.slabs, self.objective, self.plan = device, side, slabs, objective, plan
        self.pipeline, self.names = pipeline, names
        self.transfers = slab_transfers(slabs)
        self.following: Transfers | None = None
        self.degrees = slabs.degrees
        if pipeline is not None:
            pipeline.reserve(int(slab_entries(slabs.bounds, self.degrees).max(initial=0)))
            if isinstance(slabs, InMemory):
                pipeline.copier.pin(slabs.csr.indices)
                pipeline.copier.pin(slabs.csr.data)
        self.rows = [slice(int(a), int(b)) for a, b in pairwise(slabs.bounds)]
        self.solvers = [
            DeviceRows(device, side, objective, plan, self.degrees[rows], slabs.dtype, **of_rows) for rows in self.rows
        ]
        for each in self.solvers[1:]:
            each.ridge = self.solvers[0].ridge
        self._kept: list[tuple[Array, Array]] = []

    @functools.cached_property
    def scale(self) -> Array:
        """s of each row, on the device."""
        return self.device.upload(self.objective.row_scale(self.side, self.degrees).astype(self.slabs.dtype))

    def entries(self) -> Generator[tuple[slice, DeviceRows, Array, Array], None, None]:
        """Yield rows of each slab, their `DeviceRows`, and indices and ratings, which are valid until the next slab."""
        if self.pipeline is None:
            for slab in range(len(self._kept), len(self.solvers)):
                _, indices, ratings = csr_arrays(self.slabs.matrix(slab))
                self._kept.append((self.device.upload(indices), self.device.upload(ratings)))
            lent: Any = ((slab, *arrays) for slab, arrays in enumerate(self._kept))
        else:
            lent = self.pipeline.loads(self.transfers, self.following)
        try:
            for slab, indices, ratings in lent:
                yield self.rows[slab], self.solvers[slab], indices, ratings
        finally:
            lent.close()

    def steps(self, given: Given) -> Steps:
        """Launch slab after slab as they arrive."""
        fixed, mean, start, _, pull = given
        device, plan, n = self.device, self.plan, len(self.degrees)
        gram = weighted_gram(device, fixed.table, plan.rank, self.objective)
        in_place = pull is not None and plan.solver == "cholesky"
        table: Any = pull if in_place else device.zeros((n, fixed.table.shape[1]), fixed.table.dtype)
        bias = device.zeros(n, table.dtype) if self.objective.biases else None
        cleared = Cleared(device, n)
        kernels: Any = self.solvers[0].kernels_for(fixed, cleared) if self.solvers else None  # the same for all slabs
        operand = kernels and kernels.operand(fixed.table)
        with closing(self.entries()) as slabs:  # stops the thread after a failure
            for rows, part, indices, ratings in slabs:
                first = None if start is None else start.part(rows)
                tables = (None if in_place else table[rows], None if pull is None else pull[rows])
                systems = functools.cache(functools.partial(part.systems, cleared, first, gram, *tables, rows))
                entries = part.entries(indices, ratings, fixed, mean)
                for _ in part.solve_all(kernels, operand, fixed.table, entries, systems):
                    pass
                solved = part.unpack(systems().solutions)
                if bias is not None:
                    bias[rows] = solved.device_bias
                yield None
        yield DeviceFactors(device, table, plan.factors, bias, cleared=cleared), cleared.status

    def row_entries(self, at: np.ndarray) -> sp.csr_array:
        """Entries of some rows; not while slabs are loaded."""
        return self.slabs.take(at)

    def losses(self, users: DeviceFactors, items: DeviceFactors, mean: float) -> np.ndarray:
        """Losses of segments of the rows of all slabs, where rows are users; see `HalfSweep.losses`."""
        with closing(self.entries()) as slabs:
            losses = [
                part.segment_losses(indices, ratings, users.part(rows), items, mean, part.loss_segments())
                for rows, part, indices, ratings in slabs
            ]
        return np.concatenate([np.zeros(0), *losses])


def slabs_of(block: Orientation, side: Side, plan: Plan) -> Orientation:
    """The rows that a half sweep processes at a time, as slabs of the ratings.

    Without a partition (`Plan.scale`) they are the slabs of the store; otherwise the waves of the partition. Resident
    ratings are loaded once, in the slabs of the store.
    """
    if plan.resident and not plan.offloaded:
        return block
    stored = not isinstance(block, InMemory)
    if plan.streamed == "host":
        block = block.load()
    if plan.scale is None:
        return block if stored else block.cut(plan.slab)
    return block.cut(plan.scale.slab(side), plan.scale.slab_rows(side))
