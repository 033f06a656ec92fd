"""Copies between the host and a device, concurrent with kernels.

Order. A copier has one stream, on which its copies run one after the other. `after(mark)` puts later ones behind
kernels; `mark()` is an event behind the copies so far, for kernels to wait for.

- A pinned buffer (`_stages`) that goes to the device is filled by the host only after the event of its last use. One
  that comes from the device is read after the event behind its copy; a later copy into it is on the same stream, hence
  behind the first one.
- Memory that a caller has pinned is the source or target of copies itself: the caller leaves it alone until a mark
  behind the copy, and `fetch` waits for it. It stays alive and pinned until `_unpin`, which waits for the device.
- An interrupted wait leaves copies in flight whose arrays on the device are released next. `_wait` therefore puts later
  launches of the current stream, which may reuse this memory, behind the copies.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeAlias

import numpy as np

from ..errors import DeviceError
from .health import keep_alive
from .mapped import reader_of, writer_of

logger = logging.getLogger("hybridmf")

Array = Any  # as `hybridmf.device.cuda.Array`

COPY_CHUNK = 16 << 20  # bytes of one pinned buffer; several of them take turns


Copier: TypeAlias = "CudaCopier"  # what solvers use; the emulated device of the tests has one with the same methods

STAGES = 4  # pinned buffers of a copier, of COPY_CHUNK bytes each

STAGING_THREADS = 8
"""Threads that fill a pinned buffer: one reads a file in the page cache at 4 to 8 GB/s, a PCIe 5 bus moves 50."""

STAGING_PART = 1 << 20  # minimum bytes per thread


class CudaCopier:
    """Copies on a separate stream: directly for pinned memory, through pinned buffers for other memory.

    For use by one thread at a time. It shares the pinned memory of the copier `first`, and keeps that alive.
    """

    def __init__(self, device: Any, cupy: Any, first: CudaCopier | None = None) -> None:
        self._device, self._cupy, self._first = device, cupy, first
        self._pinned: list[tuple[int, int]] = [] if first is None else first._pinned
        self._stages: list[tuple[np.ndarray, Any]] = []
        self._turn = 0
        self._pool: ThreadPoolExecutor | None = None
        with device.active():
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def pin(self, array: np.ndarray) -> bool:
        """Page-lock an array for direct access by the device; returns whether it succeeded.

        The copier keeps the array alive, and locked until the copier is deleted.
        """
        if self._first is not None:
            return self._first.pin(array)
        if not array.nbytes:
            return True
        start, stop, page = array.ctypes.data, array.ctypes.data + array.nbytes, mmap.PAGESIZE
        # the pages at its ends may be locked already, since ranks hold parts of one array
        inside = (-(-start // page) * page, stop // page * page)
        for first, last in ((start, stop), inside):
            try:
                if last <= first:
                    break
                with self._device.active():
                    self._cupy.cuda.runtime.hostRegister(first, last - first, 0)
            except DeviceError as error:  # a limit on locked memory, memory that is locked already, a file
                # as text: a kept log record would keep this copier alive through the traceback
                logger.info("memory of the host cannot be page-locked, copies take a detour: %s", str(error))
                continue
            self._pinned.append((first, last))
            released = weakref.finalize(self, _unpin, self._device, self._cupy, array, first)
            released.atexit = False  # CUDA may be shut down by then, and the process frees its memory anyway
            return True
        return False

    def after(self, mark: Any) -> None:
        """Make later copies wait for a mark of `CudaDevice.record`."""
        with self._device.active():
            self._stream.wait_event(mark)

    def copy(self, target: Array, source: np.ndarray) -> None:
        """Start copying `source` to the start of `target`, a vector of the same dtype; `source` must not change."""
        source = np.ascontiguousarray(source)
        if source.dtype != target.dtype or source.size > target.size:
            raise ValueError(f"cannot copy {source.size} {source.dtype} to {target.size} {target.dtype}")
        if not source.size:
            return
        with self._device.active():
            if self._is_pinned(source):
                self._send(target, 0, source.ctypes.data, source.nbytes)
            else:
                self._copy_staged(target, source.reshape(-1).view(np.uint8))

    def _is_pinned(self, array: np.ndarray) -> bool:
        first, last = array.ctypes.data, array.ctypes.data + array.nbytes
        return any(start <= first and last <= stop for start, stop in tuple(self._pinned))

    def _send(self, target: Array, at: int, source: int, size: int) -> None:
        self._cupy.cuda.runtime.memcpyAsync(target.data.ptr + at, source, size, 1, self._stream.ptr)

    def _copy_staged(self, target: Array, raw: np.ndarray) -> None:
        with reader_of(raw) as read:
            for start in range(0, raw.nbytes, COPY_CHUNK):
                buffer, event = self._stage()
                self._wait(event)  # its previous copy is complete
                size = min(COPY_CHUNK, raw.nbytes - start)
                self._fill(buffer[:size], read, start)
                self._send(target, start, buffer.ctypes.data, size)
                event.record(self._stream)

    def _stage(self) -> tuple[np.ndarray, Any]:
        """The next pinned buffer, and the event of its last use."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(STAGING_THREADS, thread_name_prefix="hybridmf-staging")
        place = self._turn % STAGES
        self._turn += 1
        if place == len(self._stages):  # buffers are made when needed: small copies need one
            self._stages.append((self._buffer(), self._device.health.mark(self._stream)))
        return self._stages[place]

    def _buffer(self) -> np.ndarray:
        """A pinned buffer, or one in pageable memory, which CUDA copies by another detour."""
        try:
            with self._device.active():
                memory = self._cupy.cuda.alloc_pinned_memory(COPY_CHUNK)
        except DeviceError as error:
            logger.info("no more memory of the host can be page-locked, copies take longer: %s", str(error))
            memory = bytearray(COPY_CHUNK)
        return np.frombuffer(memory, dtype=np.uint8, count=COPY_CHUNK)

    def _fill(self, buffer: np.ndarray, read: Callable[[np.ndarray, int], None], start: int) -> None:
        self._share(len(buffer), lambda k, end: read(buffer[k:end], start + k))

    def _share(self, size: int, work: Callable[[int, int], None]) -> None:
        """Run ``work(first, last)`` on parts of `size` bytes in several threads; a single part runs in this thread."""
        part = max(STAGING_PART, -(-size // STAGING_THREADS))
        if size <= part:
            work(0, size)
            return
        assert self._pool is not None
        jobs = [self._pool.submit(work, k, min(k + part, size)) for k in range(0, size, part)]
        wait(jobs)  # wait for all: an error of one must not close the file or free the buffer of the others
        for job in jobs:
            job.result()

    def fetch(self, target: np.ndarray, source: Array) -> None:
        """Copy an array of the device to `target`, C order and of the same size and dtype; complete on return."""
        if source.dtype != target.dtype or source.size != target.size or not target.flags.c_contiguous:
            raise ValueError(f"cannot fetch {source.size} {source.dtype} to {target.size} {target.dtype}")
        if not target.size:
            return
        with self._device.active():
            if self._is_pinned(target):
                self._receive(target.ctypes.data, source, 0, target.nbytes)
                self._wait_for_all()
            else:
                self._fetch_staged(target.reshape(-1).view(np.uint8), source)

    def _receive(self, target: int, source: Array, at: int, size: int) -> None:
        self._cupy.cuda.runtime.memcpyAsync(target, source.data.ptr + at, size, 2, self._stream.ptr)

    def _fetch_staged(self, raw: np.ndarray, source: Array) -> None:
        arriving: list[tuple[int, int, np.ndarray, Any]] = []
        write = writer_of(raw)
        for start in range(0, raw.nbytes, COPY_CHUNK):
            buffer, event = self._stage()
            size = min(COPY_CHUNK, raw.nbytes - start)
            self._receive(buffer.ctypes.data, source, start, size)
            event.record(self._stream)
            arriving.append((start, size, buffer, event))
            if len(arriving) == STAGES:
                self._take(write, *arriving.pop(0))
        for piece in arriving:
            self._take(write, *piece)

    def _take(
        self, write: Callable[[np.ndarray, int], None], start: int, size: int, buffer: np.ndarray, event: Any
    ) -> None:
        self._wait(event)
        self._share(size, lambda k, end: write(buffer[k:end], start + k))

    def mark(self) -> Any:
        """A mark after the copies started so far."""
        with self._device.active():
            return self._device.health.mark(self._stream)

    def synchronize(self) -> None:
        with self._device.active():
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        self._wait(self._device.health.mark(self._stream))

    def _wait(self, event: Any) -> None:
        """Wait for an event; if interrupted, later launches come after all copies, whose memory they may reuse."""
        try:
            self._device.health.wait(event)
        except KeyboardInterrupt:
            self._cupy.cuda.get_current_stream().wait_event(self.mark())
            raise

    def twin(self) -> CudaCopier:
        """A copier for another thread, on another stream, that shares the pinned memory of this one."""
        return CudaCopier(self._device, self._cupy, self._first or self)


def _unpin(device: Any, cupy: Any, array: np.ndarray, first: int) -> None:
    """Unlock the memory from address `first` on; the argument keeps `array` alive until then."""
    try:
        with device.active():
            device.synchronize()
            cupy.cuda.runtime.hostUnregister(first)
    except DeviceError as error:  # the device has failed before, and may still write to the memory
        keep_alive(array)
        logger.info("memory of the host stays page-locked: %s", error)
