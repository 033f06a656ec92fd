"""Ranks that have a GPU each, over NCCL; threads of one process or processes, on one node or several.

NCCL only moves arrays of GPUs. A second communicator, the control, sends the data for the start, NumPy arrays, and
failures: NCCL itself would wait forever for a lost rank.

Ranks that are threads of one process meet on the host before each call to NCCL, and after it. A kernel of NCCL waits
on its GPU for those of the other ranks. Meanwhile CUDA may block another thread of the process that allocates or frees
memory on any GPU with shared access, and that thread would never launch the kernel that the first one waits for. After
the first meeting all memory is allocated, and ranks only launch. Before the second one no rank starts an operation that
waits for its GPU while it holds the interpreter's lock, such as loading a kernel in CuPy: others need the lock to
launch. One thread that calls for all ranks (`allgatherv_together`) needs no meeting: its calls are one group of NCCL.

Streams: a call runs on the current stream of its thread. The event behind it is in `_pending` until it is complete;
`close` waits for all of them. `start_sendrecv` runs on a second stream, which first waits for all launches on the
current one, so the arrays to send are complete. `answer` makes the current stream wait for the received arrays. Until
then the sent arrays are referenced, and the memory of received ones belongs to the second stream, whose next call comes
after an event behind their readers.

NCCL takes 0.2 s to connect two GPUs and 0.6 s to release the connection, more than the iterations of many fits. So the
connection between threads of a process stays open after a fit, and the next fit on the same GPUs uses it (`_Idle`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import logging
import os
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...device.health import health_of, one_line
from ...errors import CommunicatorError, DeviceError
from .communicator import Array, Communicator
from .messages import add_in_order, check_counts, check_peer, check_timeout, even_counts

logger = logging.getLogger("hybridmf")

INSTALL = "pip install nvidia-nccl-cu13 (CUDA 13) or nvidia-nccl-cu12 beside CuPy, or name one device"
POLL = 0.1  # seconds between two checks for a failure of NCCL or another rank

CONNECT = "NCCL_RUNTIME_CONNECT"
"""Whether NCCL connects GPUs at the first call that needs it. Off unless set by the user: connecting allocates memory,
which must not happen while another rank's kernel waits."""

MULTICAST = "NCCL_NVLS_ENABLE"
"""NVLink multicast. Off unless set by the user: it needs a fabric manager that allows it."""

NAME_BYTES = 128  # bytes of the name under which NCCL connects ranks
TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")


def _modules() -> tuple[Any, Any]:
    from ...device.cuda import _cupy

    cupy = _cupy()
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
        nccl.get_version()
    except Exception as error:  # if NCCL does not load, CuPy has a placeholder that raises on use
        raise DeviceError(f"several GPUs need NCCL, and CuPy cannot load it ({one_line(error)}): {INSTALL}") from error
    return cupy, nccl


class _Idle:
    """Open connections between GPUs of this process that no communicator uses.

    A connection can be claimed once all its ranks have put theirs. Connections stay open until the process ends, which
    releases them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[bytes, tuple[tuple[int, ...], dict[int, Any]]] = {}  # name: GPUs, connections by rank
        self._claimed: dict[bytes, dict[int, Any]] = {}

    def put(self, name: bytes, devices: tuple[int, ...], rank: int, connection: Any) -> None:
        """Keep the connection of a rank; no rank has work left."""
        # CuPy's object would wait for the other ranks when it is deleted at the exit of the interpreter
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        with self._lock:
            self._idle.setdefault(name, (devices, {}))[1][rank] = connection

    def claim(self, devices: tuple[int, ...]) -> bytes | None:
        """Name of a connection between these GPUs (by rank), for the caller's ranks alone; None if none is idle."""
        with self._lock:
            for name, (known, connections) in self._idle.items():
                if known == devices and len(connections) == len(devices):
                    del self._idle[name]
                    self._claimed[name] = connections
                    return name
        return None

    def take(self, name: bytes, rank: int) -> Any:
        """The connection of a rank by its claimed name; None for the name of a new connection."""
        with self._lock:
            connections = self._claimed.get(name, {})
            connection = connections.pop(rank, None)
            if not connections:
                self._claimed.pop(name, None)
            return connection


_idle = _Idle()


class NcclCommunicator(Communicator):
    """One rank of a group of GPUs; see `hybridmf.ranks.transport.communicator.Communicator`.

    All ranks of `control` make theirs together, each in its own thread or process. Arrays are CuPy's on the rank's
    device; calls are launched on the current stream and return before they complete. The control sends NumPy arrays.
    The next call raises a failure; `barrier` waits for the current stream and for all ranks, so that results computed
    before it are valid once it returns.

    Parameters
    ----------
    control : Communicator
        Communicator of the same ranks for NumPy arrays; it is closed and fails together with this one.
    device : int
        Index of this rank's GPU; ranks of one process have different ones.
    timeout : float, optional
        Seconds from the launch to the end of a call. Default: that of the control.
    ordered : bool
        Add in the order of ranks, so that sums have the bits of CPU ranks. Otherwise NCCL chooses the fastest order,
        with the same bits on all ranks and in each run on the same machine.

    Raises
    ------
    DeviceError
        NCCL is missing, or cannot connect the GPUs.
    """

    def __init__(
        self, control: Communicator, device: int, *, timeout: float | None = None, ordered: bool = False
    ) -> None:
        self._cupy, self._nccl = _modules()
        self._health = health_of(device, self._cupy)
        self.control, self.device, self.ordered = control, device, ordered
        self.rank, self.size = control.rank, control.size
        self._timeout = check_timeout(control.timeout if timeout is None else timeout)
        self._types = {np.dtype(name): getattr(self._nccl, f"NCCL_{name.upper()}") for name in TYPES}
        # reentrant: the garbage collector may abort it again on a thread that already does
        self._lock, self._cause, self._closed = threading.RLock(), "", threading.Event()
        self._in_use = threading.Lock()  # held by the watch or by `_give_back`, never by both
        self._held: Any = None
        self._name, self._devices = b"", (device,)
        self._pending: deque[tuple[str, Any, float]] = deque()
        with self._on_device():
            self._side = self._cupy.cuda.Stream(non_blocking=True, priority=-1)  # ahead of kernels that fill the GPU
            self._held = self._connect()
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closed), name="hybridmf NCCL watch", daemon=True
        ).start()

    def _check_own_gpu(self) -> None:
        """Check that no two ranks share a GPU: they would deadlock, and NCCL only reports invalid usage."""
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
        devices = self.control.allgatherv(np.array([self.device], dtype=np.int64), [1] * self.size)
        self._devices = tuple(devices.tolist())
        name = np.zeros(NAME_BYTES, dtype=np.uint8)
        if self.rank == 0:
            idle = _idle.claim(self._devices) if self.control.one_process else None
            name[:] = np.frombuffer(idle or self._nccl.get_unique_id(), dtype=np.uint8)
        self._name = self.control.broadcast(name, 0).tobytes()
        held = _idle.take(self._name, self.rank)
        if held is not None:  # on all ranks
            return held
        self.control.barrier()  # from here on NCCL waits for all ranks and cannot be interrupted
        try:
            return self._nccl.NcclCommunicator(self.size, self._name, self.rank)
        except self._nccl.NcclError as error:
            cause = f"NCCL cannot connect rank {self.rank} on cuda:{self.device}: {error}"
            self.control.abort(cause)
            raise DeviceError(f"{cause}; NCCL_DEBUG=INFO tells more") from error

    @property
    def _comm(self) -> Any:
        held = self._held
        if held is None:
            raise CommunicatorError(self.cause or f"rank {self.rank} has closed this communicator")
        return held

    def _give_back(self) -> None:
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
        return self._cause or self.control.cause

    @property
    def timeout(self) -> float:
        return self._timeout

    def _stop(self, cause: str) -> None:
        """Fail, here and on all ranks; waiting kernels of NCCL end."""
        self.control.abort(cause)
        with self._lock:
            if self._cause or self._closed.is_set():
                return
            self._cause = self.cause or cause
        logger.info("NCCL is aborted on rank %d: %s", self.rank, self._cause)
        self._give_back()

    def _find_failure(self) -> str:
        """Cause of a failure so far; empty without one."""
        if self.cause:
            return self.cause
        try:
            with self._in_use, self._on_device():
                if self._held is not None:
                    self._held.check_async_error()
        except self._nccl.NcclError as error:
            return f"NCCL failed on rank {self.rank}: {error}"
        while self._pending and self._health.is_done(self._pending[0][1]):
            self._pending.popleft()
        if self._pending:
            what, _, deadline = self._pending[0]
            if time.monotonic() > deadline:
                return f"rank {self.rank} waited {self.timeout:g} s for the others in {what}"
        return ""

    def _meet(self, what: str) -> None:
        """Wait for the other ranks if they are threads of this process; see the top of the module."""
        self._check()
        if self.size > 1:
            self.control.meet(what, self.timeout)

    @contextmanager
    def _call(self, what: str) -> Iterator[int]:
        """Yield the current stream for NCCL's calls of one operation; all its memory must be allocated."""
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
        """Let the watch check that all launches on the current stream complete."""
        self._pending.append((what, self._health.mark(), time.monotonic() + self.timeout))

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
        """Return the array in C order, and NCCL's constant for its dtype."""
        if not isinstance(array, self._cupy.ndarray) or int(array.device.id) != self.device:
            raise TypeError(f"array must be on cuda:{self.device} or a NumPy array, got {type(array).__name__}")
        if array.dtype not in self._types:
            raise TypeError(f"array must be of one of {', '.join(TYPES)} to travel between GPUs, got {array.dtype}")
        return self._cupy.ascontiguousarray(array).reshape(array.shape), self._types[array.dtype]

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.empty(shape, dtype=dtype)

    # ------------------------------------------------------------------------------------------------ collectives

    def allreduce(self, array: Array) -> Array:
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
        if self._is_host(array):
            return self.control.reduce_scatter(array, counts)
        with self._on_device():
            array, kind = self._ready(array)
            checked = check_counts(counts, self.size, len(array), "array")
            parts = self._cut(array, checked)
            if self.ordered:
                return add_in_order(self._exchange("reduce_scatter", parts, checked, array))
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
        if self._is_host(array):
            return self.control.allgatherv(array, counts)
        with self._on_device():
            out, launch = self._gather_of(array, counts)
            with self._call("allgatherv") as stream:
                launch(stream)
            return out

    @staticmethod
    def allgatherv_together(
        communicators: Sequence[NcclCommunicator], arrays: Sequence[Array], counts: Sequence[int]
    ) -> list[Array]:
        """`allgatherv` of all ranks on one thread: one group of calls, without meetings."""
        gathers = []
        for communicator, array in zip(communicators, arrays, strict=True):
            communicator._check()
            with communicator._on_device():
                gathers.append(communicator._gather_of(array, counts))
        try:
            with communicators[0]._group():
                for communicator, (_, launch) in zip(communicators, gathers, strict=True):
                    with communicator._on_device():
                        launch(communicator._cupy.cuda.get_current_stream().ptr)
        except BaseException as error:  # calls launched so far would wait forever for the rest
            failed = isinstance(error, communicators[0]._nccl.NcclError)
            for communicator in communicators:
                communicator._stop(f"NCCL failed in allgatherv: {error}" if failed else f"stopped by {error!r}")
            if failed:
                raise CommunicatorError(communicators[0].cause) from error
            raise
        for communicator in communicators:
            with communicator._on_device():
                communicator._await("allgatherv")
        return [out for out, _ in gathers]

    def _gather_of(self, array: Array, counts: Sequence[int]) -> tuple[Array, Callable[[int], None]]:
        """Memory of an allgatherv, and its launch on a stream."""
        array, kind = self._ready(array)
        checked = check_counts(counts, self.size, sum(map(int, counts)), "all ranks")
        if len(array) != checked[self.rank]:
            raise ValueError(f"array must have counts[{self.rank}]={checked[self.rank]} rows, got {len(array)}")
        out = self._empty((sum(checked), *array.shape[1:]), array.dtype)
        if len(set(checked)) > 1:
            parts = self._cut(out, checked)
            parts[self.rank][...] = array
            return out, lambda stream: self._exchange_grouped([array] * self.size, parts, stream)

        def launch(stream: int) -> None:
            if out.size:
                self._comm.allGather(array.data.ptr, out.data.ptr, array.size, kind, stream)

        return out, launch

    def broadcast(self, array: Array, root: int = 0) -> Array:
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
        """Send to one rank, receive from another (or the same); with arrays on GPUs, all ranks call it together."""
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
        """See `communicator.Communicator`; on a separate stream, after all launches so far."""
        if self._is_host(*arrays, *likes):
            return self.control.start_sendrecv(arrays, dest, source, likes)
        with self._on_device():
            self._side.wait_event(self._health.mark())
            with self._side:
                # memory of the side stream: reused only by a later call, which waits for readers of this one
                received = self._sendrecv(arrays, dest, source, likes)
                arrived = self._health.mark()

        def answer() -> list[Array]:
            self._check()
            with self._on_device():
                self._cupy.cuda.get_current_stream().wait_event(arrived)
            sent.clear()  # not earlier: the side stream may have read them until now
            return received

        sent = list(arrays)
        return answer

    def barrier(self) -> None:
        """Wait for this rank's launches on the current stream, and for all ranks."""
        self._check()
        with self._on_device():
            self._health.wait(self._health.mark())
        self._check()
        if self.control.one_process:
            self._meet("barrier")
        else:
            self.control.barrier()

    def split(self, color: int) -> NcclCommunicator:
        """Communicator of the ranks with the same color; connecting takes some tenths of a second."""
        self._check()
        return NcclCommunicator(self.control.split(color), self.device, timeout=self.timeout, ordered=self.ordered)

    def abort(self, cause: str) -> None:
        self._stop(cause or "aborted")

    def close(self) -> None:
        """Release the connection, or leave it for the next fit, on all ranks together; waits for this rank's device."""
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._cause:
            together = False
            with self._on_device():
                for _, event, _ in (*self._pending, ("", self._health.mark(), 0.0)):  # and the current stream
                    self._health.wait(event)
                with suppress(CommunicatorError):  # after a failure of others, do not wait for them
                    self.control.barrier()
                    together = not self.control.cause
            if together and self.control.one_process:
                self._leave()
            else:  # abort, since destroy would wait for the other ranks: none of them has work left
                self._give_back()
        self.control.close()

    def _leave(self) -> None:
        """Leave the connection open; no rank has work left."""
        with self._in_use:
            held, self._held = self._held, None
        if held is not None:
            _idle.put(self._name, self._devices, self.rank, held)

    def __del__(self) -> None:
        """Release an unclosed communicator; do not wait for others, which may have failed."""
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
        """Send part r to rank r; return the parts sent to this rank."""
        shape = (counts[self.rank], *array.shape[1:])
        received = [parts[r] if r == self.rank else self._empty(shape, array.dtype) for r in range(self.size)]
        with self._call(what) as stream:
            self._exchange_grouped(parts, received, stream)
        return received

    def _exchange_grouped(self, sent: Sequence[Array], received: Sequence[Array], stream: int) -> None:
        """Launch the exchange of arrays with all other ranks as one group."""
        comm = self._comm
        with self._group():
            for other, (to, source) in enumerate(zip(sent, received, strict=True)):
                if other == self.rank:
                    continue
                if to.size:
                    comm.send(to.data.ptr, to.size, self._types[to.dtype], other, stream)
                if source.size:
                    comm.recv(source.data.ptr, source.size, self._types[source.dtype], other, stream)


def _abort(comm: Any) -> None:
    """Abort a communicator of CuPy without holding the interpreter's lock, which CuPy does not release.

    Abort frees memory, which may wait for kernels of other ranks, and these for threads that need the lock. CuPy's
    object would release the communicator a second time when it is deleted, so it is kept alive.
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
    """Identity of the machine: one rank may see as cuda:0 the GPU that another sees as cuda:1."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return platform.node()


@functools.cache
def _library() -> Any:
    """The NCCL library that CuPy has loaded; None if it is not found by name."""
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
        except Exception as error:  # the device has failed
            cause = f"rank {communicator.rank} lost its GPU: {error}"
        if cause:
            communicator._stop(cause)
            return
        del communicator
