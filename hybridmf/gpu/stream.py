"""ALS on a GPU over ratings that do not fit on it: slabs come from the host or the disk while kernels run.

    thread:   slab k + 1 ──> pinned buffers ──> device buffer (k + 1) % 3     a stream of its own
    kernels:  wait for the copy of slab k; solve its rows; release its buffer

Factors, and what is known of each row (where it begins, which are long), stay on the device: about 30 bytes a row. Only
the entries come anew in each half sweep, 8 bytes each. The bits are those of a fit that holds all ratings: rows do not
depend on each other, and what depends on all of them, the scale of float16 parts, is found before they are cut.
`hybridmf.gpu.offloaded` is for factors that do not fit either.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, Side
from ..core.validate import csr_arrays, make_csr
from ..data.slabs import MemorySlabs, RangeSlabs, Slabs, slab_entries
from ..data.store import StoreMatrix
from ..device.copier import Copier
from ..device.cuda import Array, Device
from ..plan.half_sweep import SLAB_BUFFERS
from ..plan.types import Plan
from .assembly import RowKernels
from .factors import DeviceFactors, GpuFactors, weighted_gram
from .half import GpuHalf, HalfSweep, Launches, range_of_roots

Vector: TypeAlias = "np.ndarray | Sequence[np.ndarray]"
"""A vector of the host, or pieces that come one behind the other."""


class Loader:
    """Device buffers that are used in rotation, and the thread that fills them.

    Parameters
    ----------
    device : Device
    vectors : sequence of (int, dtype)
        Lengths and types of the vectors that are loaded together.
    buffers : int
        Sets of such vectors on the device at a time.
    copier : Copier, optional
        Default: one of its own.
    """

    def __init__(
        self, device: Device, vectors: Sequence[tuple[int, Any]], buffers: int, copier: Copier | None = None
    ) -> None:
        self.device, self.buffers = device, buffers
        self.copier = device.copier() if copier is None else copier
        self._early: _Loading | None = None
        self._allocate(vectors)

    def _allocate(self, vectors: Sequence[tuple[int, Any]]) -> None:
        self.close()
        self._buffers: list[list[Array]] = []  # before others take their place: there may be no room for both
        with self.device.active():
            for _ in range(self.buffers):
                self._buffers.append([self.device.empty(size, dtype) for size, dtype in vectors])

    def loads(self, transfers: Transfers, then: Transfers | None = None) -> Generator[tuple[Any, ...], None, None]:
        """(k, vectors on the device) for k = 0 ... count - 1; the vectors are valid for work launched until the next k.

        Parameters
        ----------
        transfers : Transfers
            What to load.
        then : Transfers, optional
            What is probably asked for next: as buffers become free it is begun.

        Raises
        ------
        StoreError, DeviceError, OSError
            Raised on the thread.
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
        finally:
            if done and then is not None:
                self._early = loading
                self._end_early = weakref.finalize(self, loading.end)
                self._end_early.atexit = False  # a process that ends does not wait
            else:
                loading.end()

    def close(self) -> None:
        """Load nothing more than is asked for; what was begun early ends."""
        self._taken()

    def _taken(self, transfers: Transfers | None = None) -> _Loading | None:
        """What was begun early, if it is this; else it ends."""
        early, self._early = self._early, None
        if early is None:
            return None
        self._end_early.detach()
        if transfers is not None and early.transfers.of is transfers.of:
            return early
        early.end()
        return None


@dataclass(frozen=True)
class Transfers:
    """Sets of vectors of the host, one after the other.

    Attributes
    ----------
    count : int
    fetch : callable
        Vectors for each k, in order; called on a thread of its own.
    of : object
        What they are made from: identifies transfers that were begun early.
    """

    count: int
    fetch: Callable[[int], Sequence[Vector]]
    of: object


class _Loading:
    """A thread that fills buffers as they become free, with one `Transfers` after the other.

    Parameters
    ----------
    device : Device
    copier : Copier
    buffers : list of list of arrays
    transfers : Transfers
        The first one.
    """

    def __init__(self, device: Device, copier: Copier, buffers: list[list[Array]], transfers: Transfers) -> None:
        self.device, self.copier, self.buffers, self.transfers = device, copier, buffers, transfers
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queue: queue.SimpleQueue[Transfers | None] = queue.SimpleQueue()
        begun = device.record()  # the last user of the buffers may still be at work
        for slot in range(len(buffers)):
            self._free.put((slot, begun))
        self._queue.put(transfers)
        self._thread = threading.Thread(target=self._run, name="hybridmf-slabs", daemon=True)
        self._thread.start()

    def next(self) -> tuple[int, list[int], Any]:
        """(buffer, lengths of its vectors, mark behind their copies) of the next set; raises the thread's failure."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def release(self, slot: int) -> None:
        """The work launched so far is the last that reads a buffer."""
        self._free.put((slot, self.device.record()))

    def go_on(self, transfers: Transfers) -> None:
        """Load something else after what is under way."""
        self.transfers = transfers
        self._queue.put(transfers)

    def end(self) -> None:
        """Wait for what is being loaded, and load nothing more."""
        self._queue.put(None)
        self._free.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector runs on any
            self._thread.join()
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
        except BaseException as error:  # raised where the set is awaited
            self._ready.put(error)

    def _fill(self, slot: int, mark: Any, vectors: Sequence[Vector]) -> None:
        self.copier.after(mark)
        sizes = [self._copy(target, source) for target, source in zip(self.buffers[slot], vectors, strict=True)]
        self._ready.put((slot, sizes, self.copier.mark()))

    def _copy(self, target: Array, source: Vector) -> int:
        """Begin to copy a vector to the beginning of `target`; its length."""
        at = 0
        for piece in (source,) if isinstance(source, np.ndarray) else source:
            self.copier.copy(target[at:], piece)
            at += len(piece)
        return at


class Pipeline(Loader):
    """Entries on their way, (indices, ratings) at a time: slabs, or batches of rows whose sums are added up.

    Parameters
    ----------
    device : Device
    capacity : int
        Most entries at a time.
    dtype : dtype
        Of the ratings.
    buffers : int
    copier : Copier, optional
    """

    def __init__(
        self, device: Device, capacity: int, dtype: Any, buffers: int = SLAB_BUFFERS, copier: Copier | None = None
    ) -> None:
        self.capacity, self.dtype = max(1, capacity), dtype
        super().__init__(device, self._vectors(), buffers, copier)

    def _vectors(self) -> list[tuple[int, Any]]:
        return [(self.capacity, np.int32), (self.capacity, self.dtype)]

    def reserve(self, capacity: int) -> None:
        """Have room for so many entries at a time; not while a stream is under way."""
        if capacity > self.capacity:
            self.capacity = capacity
            self._allocate(self._vectors())


def slab_transfers(slabs: Slabs) -> Transfers:
    """(indices, ratings) of each slab."""

    def fetch(slab: int) -> tuple[np.ndarray, np.ndarray]:
        slabs.prefetch(slab + 1)
        _, indices, ratings = csr_arrays(slabs.matrix(slab))
        return indices, ratings

    return Transfers(len(slabs.bounds) - 1, fetch, slabs)


class SlabHalf(HalfSweep):
    """`HalfSweep` of a slab: holds what is known of its rows; entries are lent to it for each solve.

    Parameters
    ----------
    device, side, objective, plan
        As for `HalfSweep`.
    degrees : int64 array, shape (n_rows,)
    dtype : dtype
        Of the ratings.
    roots : (float, float)
        `range_of_roots` of all ratings.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        degrees: np.ndarray,
        dtype: Any,
        objective: Objective,
        plan: Plan,
        roots: tuple[float, float],
    ) -> None:
        indptr = np.concatenate(([0], np.cumsum(degrees)))
        rows = make_csr(indptr, np.empty(0, np.int32), np.empty(0, dtype), (len(degrees), 1))
        super().__init__(device, side, rows, objective, plan, roots=roots)
        self.shared_kernels: RowKernels | None = None
        self._lent: tuple[Array | None, Array] | None = None

    def _hold(self, indices: np.ndarray, ratings: np.ndarray) -> tuple[Array, Array]:
        return None, None

    def lend(self, indices: Array, ratings: Array) -> None:
        """Entries for the next solve."""
        self.indices, self.ratings = indices, ratings

    def lend_results(self, table: Array | None, status: Array) -> None:
        """Rows of what the half sweep returns, zeros, for the next solve to write to; no table: it makes its own."""
        self._lent = table, status

    def _results(self) -> tuple[Array, Array]:
        assert self._lent is not None
        table, status = self._lent
        if table is None:
            table = self.device.zeros((len(self), self.width), self.dtype)
        return table, status

    def launches(
        self,
        fixed: Any,
        mean: float,
        start: DeviceFactors | None = None,
        gram: Array | None = None,
    ) -> Launches:
        """See `HalfSweep.launches`."""
        try:
            yield from super().launches(fixed, mean, start, gram)
        finally:
            self._lent = None  # kept, they would keep alive what they are rows of

    def kernels_for(self, fixed: GpuFactors) -> RowKernels:
        """Those of the half sweep, the same for all slabs."""
        if self.shared_kernels is None:
            return super().kernels_for(fixed)
        return self.shared_kernels


class StreamedHalf(GpuHalf):
    """One half of a sweep on a device over slabs: the waves in which its rows are solved (cuMF 4.4).

    Parameters
    ----------
    device : Device
    side : {"user", "item"}
        The side that is solved.
    slabs : Slabs
        One row for each row that is solved.
    objective : Objective
    plan : Plan
    pipeline : Pipeline or None
        Brings the slabs in each half sweep; None: they stay on the device from the first time on.
    names : int64 array, shape (n_rows,), optional
        What errors call each row, if not by its position.
    ends : float array, optional
        Smallest and largest absolute value of all ratings, where `slabs` are a rank's share of them.

    Attributes
    ----------
    transfers : Transfers
        The slabs as they are loaded.
    following : Transfers or None
        What the half sweep that comes after this one loads: it is on its way before that asks for it.
    """

    def __init__(
        self,
        device: Device,
        side: Side,
        slabs: Slabs,
        objective: Objective,
        plan: Plan,
        pipeline: Pipeline | None,
        names: np.ndarray | None = None,
        ends: np.ndarray | None = None,
    ) -> None:
        self.device, self.side, self.slabs, self.objective, self.plan = device, side, slabs, objective, plan
        self.pipeline, self.names = pipeline, names
        self.transfers = slab_transfers(slabs)
        self.following: Transfers | None = None
        self.degrees = slabs.degrees
        if pipeline is not None:
            pipeline.reserve(int(slab_entries(slabs.bounds, self.degrees).max(initial=0)))
            if isinstance(slabs, MemorySlabs):
                pipeline.copier.pin(slabs.csr.indices)
                pipeline.copier.pin(slabs.csr.data)
        roots = range_of_roots(objective, slabs.ends if ends is None else ends)
        self.rows = [slice(int(a), int(b)) for a, b in pairwise(slabs.bounds)]
        self.parts = [
            self._slab_half(device, side, self.degrees[rows], slabs.dtype, objective, plan, roots) for rows in self.rows
        ]
        for part in self.parts[1:]:
            part.ridge = self.parts[0].ridge
        self._kept: list[tuple[Array, Array]] = []

    def _slab_half(self, *arguments: Any) -> SlabHalf:
        """The half sweep of one slab."""
        return SlabHalf(*arguments)

    @functools.cached_property
    def scale(self) -> Array:
        """s of each row, on the device."""
        return self.device.upload(self.objective.row_scale(self.degrees).astype(self.slabs.dtype))

    def entries(self) -> Generator[tuple[slice, SlabHalf], None, None]:
        """Rows and half sweep of each slab, entries lent to it until the next one."""
        if self.pipeline is None:
            for slab in range(len(self._kept), len(self.parts)):
                _, indices, ratings = csr_arrays(self.slabs.matrix(slab))
                self._kept.append((self.device.upload(indices), self.device.upload(ratings)))
            lent: Any = ((slab, *arrays) for slab, arrays in enumerate(self._kept))
        else:
            lent = self.pipeline.loads(self.transfers, self.following)
        try:
            for slab, indices, ratings in lent:
                self.parts[slab].lend(indices, ratings)
                yield self.rows[slab], self.parts[slab]
                self.parts[slab].lend(None, None)
        finally:
            lent.close()

    def launches(
        self,
        fixed: DeviceFactors,
        mean: float,
        start: DeviceFactors | None = None,
        gram: Array | None = None,
    ) -> Launches:
        """Launch slab after slab as they come; see `HalfSweep.launches`."""
        device, plan, n = self.device, self.plan, len(self.degrees)
        gram = weighted_gram(device, fixed.table, plan.rank, self.objective)
        table = device.zeros((n, fixed.table.shape[1]), fixed.table.dtype)
        bias = device.zeros(n, table.dtype) if self.objective.biases else None
        status = device.zeros(n, np.int32)
        with self._kernels(fixed), closing(self.entries()) as slabs:  # else a failure would leave the thread at work
            for rows, part in slabs:
                part.lend_results(table[rows], status[rows])
                *_, launched = part.launches(fixed, mean, None if start is None else start.part(rows), gram)
                assert launched is not None
                solved = launched[0]
                if bias is not None:
                    bias[rows] = solved.device_bias
                yield None
        yield DeviceFactors(device, table, plan.factors, bias), status

    @contextmanager
    def _kernels(self, fixed: Any) -> Iterator[None]:
        """All slabs use the kernels of the first."""
        shared = self.parts[0].kernels_for(fixed) if self.parts else None
        for part in self.parts:
            part.shared_kernels = shared
        try:
            yield
        finally:
            for part in self.parts:
                part.shared_kernels = None

    def losses(self, users: DeviceFactors, items: DeviceFactors, mean: float) -> np.ndarray:
        """Losses of pieces of the rows of all slabs, where they are users; see `HalfSweep.losses`."""
        with closing(self.entries()) as slabs:
            losses = [part.losses(users.part(rows), items, mean) for rows, part in slabs]
        return np.concatenate([np.zeros(0), *losses])


def slabs_of(block: sp.csr_array | RangeSlabs | StoreMatrix, side: Side, plan: Plan) -> Slabs:
    """Rows as a half sweep has them at a time, from where the plan has ratings.

    Without a partition (`Plan.scale`) the slabs of a store are worked with as they are; else in the waves of the
    partition. What is resident comes once, as it is stored.
    """
    if plan.resident and not plan.offloaded:
        assert not isinstance(block, sp.csr_array)
        return block
    sizes = (plan.slab, None) if plan.scale is None else (plan.scale.slab(side), plan.scale.slab_rows(side))
    if isinstance(block, sp.csr_array):
        return MemorySlabs.cut(block, *sizes)
    if isinstance(block, StoreMatrix):
        if plan.scale is None:
            return MemorySlabs(block.load(), block.bounds) if plan.streamed == "host" else block
        block = RangeSlabs(block, 0, block.shape[0])
    return MemorySlabs.cut(block.load(), *sizes) if plan.streamed == "host" else block.cut(*sizes)
