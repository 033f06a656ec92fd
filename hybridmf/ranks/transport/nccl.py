"""Ranks that have a GPU each, over NCCL; threads of one process or processes, on one node or several.

NCCL only moves arrays of GPUs. A second communicator, the control, carries what it takes to start, NumPy arrays, and
the news of a failure: NCCL itself would wait for a lost rank for ever.

Ranks that are threads of one process meet on the host before each call to NCCL, and after it. A kernel of NCCL waits
on its GPU for those of the other ranks; meanwhile CUDA may keep another thread of the process from allocating or
freeing memory on any GPU whose memory they share, and that thread would never come to launch what is waited for. After
the first meeting all memory is there, and nothing lies between the ranks and their launches. Before the second one no
rank goes on to what may wait for its GPU with the interpreter locked, as loading a kernel of CuPy's does: others want
the lock to launch. One thread that calls for all ranks (`allgatherv_together`) has nobody to meet: its calls are one
group of NCCL's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import logging
import math
import os
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CommunicatorError, DeviceError
from .communicator import Array, Communicator
from .messages import check_counts, check_peer, check_timeout, even_counts

logger = logging.getLogger("hybridmf")

INSTALL = "pip install nvidia-nccl-cu13 (CUDA 13) or nvidia-nccl-cu12 beside CuPy, or name one device"

POLL = 0.1
"""Seconds between two looks at whether NCCL, or another rank, has failed."""

CONNECT = "NCCL_RUNTIME_CONNECT"
"""Whether NCCL connects GPUs at the first call that wants it. Off, unless the user has set this: it allocates memory,
which must not happen while another rank's kernel waits."""

MULTICAST = "NCCL_NVLS_ENABLE"
"""NVLink multicast, which is left off unless the user has set this: it needs a fabric manager that allows it."""

TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")


def _modules() -> tuple[Any, Any]:
    """CuPy and its NCCL.

    Raises
    ------
    DeviceError
        One is missing; says what to install.
    """
    from ...device.cuda import _cupy

    cupy = _cupy()
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
        nccl.get_version()
    except Exception as error:  # CuPy has a stand-in for a NCCL that does not load, which raises on use
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise DeviceError(f"several GPUs need NCCL, and CuPy cannot load it ({text}): {INSTALL}") from error
    return cupy, nccl


class NcclCommunicator(Communicator):
    """One rank of a group of GPUs; see `hybridmf.ranks.transport.communicator.Communicator`.

    Made by all ranks of `control` at a time, each in its own thread or process. Arrays are CuPy's on the rank's device;
    calls are put on the current stream and return before they are done. NumPy arrays go by the control. A failure shows
    in the next call; `barrier` waits for the current stream and for all ranks, so that what was computed before it is
    sound where it returns.

    Parameters
    ----------
    control : Communicator
        Of the same ranks, for NumPy arrays; it is closed and fails together with this one.
    device : int
        Index of this rank's GPU; ranks of one process and node have different ones.
    timeout : float, optional
        Seconds from the launch to the end of a call; by default that of the control.
    ordered : bool
        Add in the order of the ranks, so that sums have the bits that they have on CPU ranks. Otherwise NCCL adds as it
        is fastest: the same bits on all ranks and on the same machine in each run.

    Raises
    ------
    DeviceError
        NCCL is missing, or cannot connect the GPUs.
    """

    def __init__(
        self, control: Communicator, device: int, *, timeout: float | None = None, ordered: bool = False
    ) -> None:
        self._cupy, self._nccl = _modules()
        self.control, self.device, self.ordered = control, device, ordered
        self.rank, self.size = control.rank, control.size
        self._timeout = check_timeout(control.timeout if timeout is None else timeout)
        self._types = {np.dtype(name): getattr(self._nccl, f"NCCL_{name.upper()}") for name in TYPES}
        # what the garbage collector ends may abort it once more on the thread that is about to
        self._lock, self._cause, self._closed = threading.RLock(), "", threading.Event()
        self._in_use = threading.Lock()  # by the watch, or by what gives it back: not both at a time
        self._held: Any = None
        self._pending: deque[tuple[str, Any, float]] = deque()
        with self._on_device():
            self._side = self._cupy.cuda.Stream(non_blocking=True, priority=-1)  # ahead of kernels that fill the GPU
            self._held = self._connect()
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closed), name="hybridmf NCCL watch", daemon=True
        ).start()

    def _check_own_gpu(self) -> None:
        """Two ranks on one GPU would wait for each other; NCCL only says that its usage is invalid."""
        bus = self._cupy.cuda.runtime.deviceGetPCIBusId(self.device)
        own = hashlib.sha256(f"{_machine()} {bus}".encode()).digest()
        known = self.control.allgatherv(np.frombuffer(own, dtype=np.uint8)[None], [1] * self.size)
        for first in range(self.size):
            same = [rank for rank in range(self.size) if np.array_equal(known[rank], known[first])]
            if len(same) > 1:  # all ranks raise it
                raise DeviceError(
                    f"ranks {', '.join(map(str, same))} have one GPU together (here cuda:{self.device}) and "
                    "each needs its own: give every process another CUDA_VISIBLE_DEVICES, as "
                    "dask_cuda.LocalCUDACluster and SLURM's --gpus-per-task do, or name other devices"
                )

    def _connect(self) -> Any:
        self._check_own_gpu()
        os.environ.setdefault(MULTICAST, "0")
        os.environ.setdefault(CONNECT, "0")
        name = np.zeros(128, dtype=np.uint8)
        if self.rank == 0:
            name[:] = np.frombuffer(self._nccl.get_unique_id(), dtype=np.uint8)
        name = self.control.broadcast(name, 0)
        self.control.barrier()  # from here on NCCL waits for all, and nothing can wake it
        try:
            return self._nccl.NcclCommunicator(self.size, name.tobytes(), self.rank)
        except self._nccl.NcclError as error:
            cause = f"NCCL cannot connect rank {self.rank} on cuda:{self.device}: {error}"
            self.control.abort(cause)
            raise DeviceError(f"{cause}; NCCL_DEBUG=INFO tells more") from error

    @property
    def _comm(self) -> Any:
        """CuPy's communicator.

        Raises
        ------
        CommunicatorError
            It was given back.
        """
        held = self._held
        if held is None:
            raise CommunicatorError(self.cause or f"rank {self.rank} has closed this communicator")
        return held

    def _give_back(self) -> None:
        """Abort NCCL's communicator, once."""
        with self._in_use:
            held, self._held = self._held, None
            if held is not None:
                with self._on_device():
                    _abort(held)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self.device):
            yield

    # ------------------------------------------------------------------------------------------------ failures

    def _check(self) -> None:
        if self.cause:
            raise CommunicatorError(self.cause)

    @property
    def cause(self) -> str:
        """Why the communicator has failed; empty while it has not."""
        return self._cause or self.control.cause

    @property
    def timeout(self) -> float:
        """Seconds from the launch to the end of a call."""
        return self._timeout

    def _stop(self, cause: str) -> None:
        """Fail, here and on all ranks; kernels of NCCL that wait for others end."""
        self.control.abort(cause)
        with self._lock:
            if self._cause or self._closed.is_set():
                return
            self._cause = self.cause or cause
        logger.info("NCCL is aborted on rank %d: %s", self.rank, self._cause)
        self._give_back()

    def _find_failure(self) -> str:
        """What has gone wrong by now; empty if nothing has."""
        if self.cause:
            return self.cause
        try:
            with self._in_use, self._on_device():
                if self._held is not None:
                    self._held.check_async_error()
        except self._nccl.NcclError as error:
            return f"NCCL failed on rank {self.rank}: {error}"
        while self._pending and self._pending[0][1].done:
            self._pending.popleft()
        if self._pending:
            what, _, deadline = self._pending[0]
            if time.monotonic() > deadline:
                return f"rank {self.rank} waited {self.timeout:g} s for the others in {what}"
        return ""

    def _meet(self, what: str) -> None:
        """Wait for the ranks of this process, if they are threads: see the top of the module."""
        self._check()
        if self.size > 1:
            self.control.meet(what, self.timeout)

    @contextmanager
    def _call(self, what: str) -> Iterator[int]:
        """The current stream, for NCCL's calls of one operation; all memory for it must be there."""
        self._meet(what)
        with self._on_device():
            stream = self._cupy.cuda.get_current_stream()
            try:
                yield stream.ptr
            except self._nccl.NcclError as error:
                self._stop(f"NCCL failed on rank {self.rank} in {what}: {error}")
                raise CommunicatorError(self.cause) from error
            self._await(what)
        self._meet(f"{what} after its launch")

    def _await(self, what: str) -> None:
        """Have the watch see that what was launched on the current stream comes to its end."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._cupy.cuda.get_current_stream())
        self._pending.append((what, event, time.monotonic() + self.timeout))

    @contextmanager
    def _group(self) -> Iterator[None]:
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    # ------------------------------------------------------------------------------------------------ arrays

    def _is_host(self, *arrays: Array) -> bool:
        return all(isinstance(array, np.ndarray) and not isinstance(array, self._cupy.ndarray) for array in arrays)

    def _ready(self, array: Array) -> tuple[Array, int]:
        """(the array in C order, NCCL's name of its dtype)."""
        if not isinstance(array, self._cupy.ndarray) or int(array.device.id) != self.device:
            raise TypeError(f"array must be on cuda:{self.device} or a NumPy array, got {type(array).__name__}")
        if array.dtype not in self._types:
            raise TypeError(f"array must be of one of {', '.join(TYPES)} to travel between GPUs, got {array.dtype}")
        return self._cupy.ascontiguousarray(array).reshape(array.shape), self._types[array.dtype]

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.empty(shape, dtype=dtype)

    # ------------------------------------------------------------------------------------------------ collectives

    def allreduce(self, array: Array) -> Array:
        """Sum over the ranks, on each rank."""
        if self._is_host(array):
            return self.control.allreduce(array)
        with self._on_device():
            array, kind = self._ready(array)
            if self.ordered:
                flat, counts = array.reshape(-1), even_counts(array.size, self.size)
                return self.allgatherv(self.reduce_scatter(flat, counts), counts).reshape(array.shape)
            out = self._empty(array.shape, array.dtype)
            with self._call("allreduce") as stream:
                if array.size:
                    self._comm.allReduce(array.data.ptr, out.data.ptr, array.size, kind, self._nccl.NCCL_SUM, stream)
            return out

    def reduce_scatter(self, array: Array, counts: Sequence[int]) -> Array:
        """Of the sum over the ranks, the rows of this one."""
        if self._is_host(array):
            return self.control.reduce_scatter(array, counts)
        with self._on_device():
            array, kind = self._ready(array)
            checked = check_counts(counts, self.size, len(array), "array")
            parts = self._cut(array, checked)
            if self.ordered:
                return self._add(self._exchange("reduce_scatter", parts, checked, array))
            out = self._empty((checked[self.rank], *array.shape[1:]), array.dtype)
            with self._call("reduce_scatter") as stream:
                if not array.size:
                    return out
                add = self._nccl.NCCL_SUM
                if len(set(checked)) == 1:
                    self._comm.reduceScatter(array.data.ptr, out.data.ptr, out.size, kind, add, stream)
                else:
                    with self._group():
                        for root, part in enumerate(parts):
                            if part.size:
                                # NCCL reads the result's address on the root only
                                self._comm.reduce(part.data.ptr, out.data.ptr, part.size, kind, add, root, stream)
            return out

    def allgatherv(self, array: Array, counts: Sequence[int]) -> Array:
        """All ranks' rows one after the other."""
        if self._is_host(array):
            return self.control.allgatherv(array, counts)
        with self._on_device():
            gather = self._gather_of(array, counts)
            with self._call("allgatherv") as stream:
                gather.launch(stream)
            return gather.out

    @staticmethod
    def allgatherv_together(
        communicators: Sequence[NcclCommunicator], arrays: Sequence[Array], counts: Sequence[int]
    ) -> list[Array]:
        """`allgatherv` of all ranks, by one thread that has them all: one group of calls, for which nobody meets."""
        gathers = []
        for communicator, array in zip(communicators, arrays, strict=True):
            communicator._check()
            with communicator._on_device():
                gathers.append(communicator._gather_of(array, counts))
        try:
            with communicators[0]._group():
                for communicator, gather in zip(communicators, gathers, strict=True):
                    with communicator._on_device():
                        gather.launch(communicator._cupy.cuda.get_current_stream().ptr)
        except BaseException as error:  # what is launched by now would wait for the rest for ever
            failed = isinstance(error, communicators[0]._nccl.NcclError)
            for communicator in communicators:
                communicator._stop(f"NCCL failed in allgatherv: {error}" if failed else f"stopped by {error!r}")
            if failed:
                raise CommunicatorError(communicators[0].cause) from error
            raise
        for communicator in communicators:
            with communicator._on_device():
                communicator._await("allgatherv")
        return [gather.out for gather in gathers]

    def _gather_of(self, array: Array, counts: Sequence[int]) -> _Gather:
        array, kind = self._ready(array)
        checked = check_counts(counts, self.size, sum(map(int, counts)), "all ranks")
        if len(array) != checked[self.rank]:
            raise ValueError(f"array must have counts[{self.rank}]={checked[self.rank]} rows, got {len(array)}")
        out = self._empty((sum(checked), *array.shape[1:]), array.dtype)
        parts = self._cut(out, checked)
        even = len(set(checked)) == 1
        if not even:
            parts[self.rank][...] = array
        return _Gather(self, array, kind, out, parts, even)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """The root's array."""
        if self._is_host(array):
            return self.control.broadcast(array, root)
        with self._on_device():
            array, kind = self._ready(array)
            root = check_peer("root", root, self.size)
            out = self._empty(array.shape, array.dtype)
            with self._call("broadcast") as stream:
                if array.size:
                    self._comm.broadcast(array.data.ptr, out.data.ptr, array.size, kind, root, stream)
            return out

    def sendrecv(self, array: Array, dest: int, source: int, like: Array) -> Array:
        """Send to one rank, receive from another (or the same); arrays of GPUs by all ranks at a time."""
        if self._is_host(array, like):
            return self.control.sendrecv(array, dest, source, like)
        return self._sendrecv([array], dest, source, [like])[0]

    def _sendrecv(self, arrays: Sequence[Array], dest: int, source: int, likes: Sequence[Array]) -> list[Array]:
        dest, source = check_peer("dest", dest, self.size), check_peer("source", source, self.size)
        with self._on_device():
            ready = [self._ready(array) for array in arrays]
            if dest == self.rank == source:
                self._check()
                return [array.copy() for array, _ in ready]
            outs = [self._empty(like.shape, like.dtype) for like in likes]
            with self._call("sendrecv") as stream, self._group():
                for array, kind in ready:
                    if array.size:
                        self._comm.send(array.data.ptr, array.size, kind, dest, stream)
                for out in outs:
                    if out.size:
                        self._comm.recv(out.data.ptr, out.size, self._types[out.dtype], source, stream)
            return outs

    def start_sendrecv(
        self, arrays: Sequence[Array], dest: int, source: int, likes: Sequence[Array]
    ) -> Callable[[], list[Array]]:
        """See `communicator.Communicator`; on a stream of its own, after what was launched so far."""
        if self._is_host(*arrays, *likes):
            return self.control.start_sendrecv(arrays, dest, source, likes)
        with self._on_device():
            launched, arrived = (self._cupy.cuda.Event(disable_timing=True) for _ in range(2))
            launched.record(self._cupy.cuda.get_current_stream())
            self._side.wait_event(launched)
            with self._side:
                # memory of the side stream: given anew only to a later call, which waits for what has read this
                received = self._sendrecv(arrays, dest, source, likes)
            arrived.record(self._side)

        def answer() -> list[Array]:
            self._check()
            with self._on_device():
                self._cupy.cuda.get_current_stream().wait_event(arrived)
            sent.clear()  # until now: the side stream may still have read them
            return received

        sent = list(arrays)
        return answer

    def barrier(self) -> None:
        """Wait for what this rank has launched on the current stream, and for all ranks."""
        self._check()
        with self._on_device():
            self._cupy.cuda.get_current_stream().synchronize()
        self._check()
        if self.control.one_process:
            self._meet("barrier")
        else:
            self.control.barrier()

    def split(self, color: int) -> NcclCommunicator:
        """The ranks that give the same color; they connect anew, which takes some tenths of a second."""
        self._check()
        return NcclCommunicator(self.control.split(color), self.device, timeout=self.timeout, ordered=self.ordered)

    def abort(self, cause: str) -> None:
        """Make this and every later call fail on all ranks; the first cause given stays."""
        self._stop(cause or "aborted")

    def close(self) -> None:
        """Give the connection back; all ranks do. Work on this rank's device is waited for."""
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._cause:
            with self._on_device():
                self._cupy.cuda.Device(self.device).synchronize()
                with suppress(CommunicatorError):  # others have failed: nothing of theirs is waited for
                    self.control.barrier()
            # not destroy, which waits for the other ranks: nothing is under way any more on any of them
            self._give_back()
        self.control.close()

    def __del__(self) -> None:
        """Not closed, so perhaps amid a failure that the watch has not seen yet: do not wait for the others."""
        if hasattr(self, "_held") and not self._closed.is_set():
            self._closed.set()
            if not self._cause:
                with suppress(Exception):
                    self._give_back()

    # ------------------------------------------------------------------------------------------------ in rank order

    def _cut(self, array: Array, counts: Sequence[int]) -> list[Array]:
        bounds = np.cumsum([0, *counts]).tolist()
        return [array[bounds[r] : bounds[r + 1]] for r in range(self.size)]

    def _exchange(self, what: str, parts: Sequence[Array], counts: Sequence[int], array: Array) -> list[Array]:
        """Give part r to rank r; what each rank gave to this one."""
        shape, kind = (counts[self.rank], *array.shape[1:]), self._types[array.dtype]
        received = [parts[r] if r == self.rank else self._empty(shape, array.dtype) for r in range(self.size)]
        size = math.prod(shape)
        with self._call(what) as stream, self._group():
            for other in range(self.size):
                if other == self.rank:
                    continue
                if parts[other].size:
                    self._comm.send(parts[other].data.ptr, parts[other].size, kind, other, stream)
                if size:
                    self._comm.recv(received[other].data.ptr, size, kind, other, stream)
        return received

    def _add(self, pieces: Sequence[Array]) -> Array:
        total = pieces[0].copy()
        for piece in pieces[1:]:
            total += piece
        return total


@dataclass(frozen=True)
class _Gather:
    """An allgatherv whose memory is there: what is left is to launch it."""

    communicator: NcclCommunicator
    array: Array
    kind: int
    out: Array
    parts: list[Array]
    even: bool

    def launch(self, stream: int) -> None:
        comm, array, out = self.communicator._comm, self.array, self.out
        if self.even:
            if out.size:
                comm.allGather(array.data.ptr, out.data.ptr, array.size, self.kind, stream)
            return
        with self.communicator._group():
            for other, part in enumerate(self.parts):
                if other == self.communicator.rank:
                    continue
                if array.size:
                    comm.send(array.data.ptr, array.size, self.kind, other, stream)
                if part.size:
                    comm.recv(part.data.ptr, part.size, self.kind, other, stream)


def _abort(comm: Any) -> None:
    """Abort a communicator of CuPy's, without the interpreter's lock, which CuPy keeps.

    Memory is freed, which may have to wait for kernels of other ranks, and these for threads that want the lock. CuPy's
    object then holds what is gone, and would give it back once more when it ends: so it must not end.
    """
    handle = getattr(comm, "comm", None)
    library = _library()
    if handle is None or library is None:
        comm.abort()
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
    library.ncclCommAbort(ctypes.c_void_p(handle))


@functools.cache
def _machine() -> str:
    """What tells machines apart, for ranks of which one sees as cuda:0 what another one sees as cuda:1."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return platform.node()


@functools.cache
def _library() -> Any:
    """NCCL as CuPy has loaded it; None where it cannot be found by its name."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        logger.info("NCCL is aborted with the interpreter locked: %s", error)
        return None


def _watch(reference: Any, closed: threading.Event) -> None:
    """Abort a communicator that has failed or waits too long; the thread ends with it."""
    while not closed.wait(POLL):
        communicator = reference()
        if communicator is None:
            return
        try:
            cause = communicator._find_failure()
        except Exception as error:  # the device itself has failed
            cause = f"rank {communicator.rank} lost its GPU: {error}"
        if cause:
            communicator._stop(cause)
            return
        del communicator
