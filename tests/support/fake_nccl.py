"""CuPy and NCCL acted out on NumPy, for the logic above them: what is called with which pointers and counts.

Calls take effect when they are made, except within a group, where they wait for its end. Nothing is shown about
streams, or about what NCCL does where ranks disagree.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from types import SimpleNamespace

import numpy as np

from hybridmf.device.health import NOT_READY
from hybridmf.errors import CommunicatorError
from hybridmf.ranks.transport.threads import ThreadCommunicator

TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
_here = threading.local()


class FakeArray(np.ndarray):
    """Has the address and the device where CuPy's arrays have them."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self):
        return SimpleNamespace(id=getattr(_here, "device", 0))


class Device:
    def __init__(self, index):
        self.index = index

    def __enter__(self):
        self.before, _here.device = getattr(_here, "device", 0), self.index
        return self

    def __exit__(self, *_):
        _here.device = self.before

    def synchronize(self):
        pass


class Stream:
    ptr = 0

    def __init__(self, non_blocking=False, priority=0):
        assert non_blocking
        assert priority < 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_event(self, event):
        assert event.ptr.recorded

    def synchronize(self):
        pass


class Event:
    done = True

    def __init__(self, disable_timing):
        assert disable_timing
        self.recorded = False

    @property
    def ptr(self):
        return self

    def record(self, stream):
        assert isinstance(stream, Stream)
        self.recorded = True


def empty(shape, dtype):
    array = np.empty(shape, dtype).view(FakeArray)
    array[...] = np.nan if array.dtype.kind == "f" else 99
    return array


def as_fake(array) -> FakeArray:
    return np.array(array).view(FakeArray)


class NcclError(RuntimeError):
    pass


class Nccl:
    """The module; one for each test."""

    NcclError = NcclError
    NCCL_SUM = "sum"

    def __init__(self):
        for name in TYPES:
            setattr(self, f"NCCL_{name.upper()}", np.dtype(name))
        self.worlds, self.lock, self.calls, self.hang, self.broken = {}, threading.Lock(), [], threading.Event(), None
        self.timeout = 20.0
        module = self

        class NcclCommunicator:
            def __init__(self, size, name, rank):
                assert type(name) is bytes
                if module.broken == rank:
                    raise NcclError("no route")
                with module.lock:
                    world = module.worlds.setdefault(name, ThreadCommunicator.group(size, timeout=module.timeout))
                self.inner, self.rank, self.aborted, self.async_error = world[rank], rank, False, None

            def _later(self, name, call):
                assert not self.aborted
                module.calls.append(name)
                waiting = getattr(_here, "group", None)
                call() if waiting is None else waiting.append((name != "send", call))

            def _view(self, pointer, count, dtype):
                memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
                return np.frombuffer(memory, dtype=dtype, count=count)

            def allReduce(self, source, target, count, kind, op, stream):
                assert op == "sum"

                def call():
                    self._view(target, count, kind)[:] = self.inner.allreduce(self._view(source, count, kind))

                self._later("allReduce", call)

            def reduce(self, source, target, count, kind, op, root, stream):
                def call():
                    total = self.inner.allreduce(self._view(source, count, kind))
                    if root == self.rank:
                        self._view(target, count, kind)[:] = total

                self._later("reduce", call)

            def reduceScatter(self, source, target, count, kind, op, stream):
                def call():
                    size = self.inner.size
                    total = self.inner.reduce_scatter(self._view(source, count * size, kind), [count] * size)
                    self._view(target, count, kind)[:] = total

                self._later("reduceScatter", call)

            def allGather(self, source, target, count, kind, stream):
                module.calls.append("allGather")
                places = self._view(target, count * self.inner.size, kind).reshape(self.inner.size, -1)
                places[self.rank] = self._view(source, count, kind)
                module.groupStart()
                for other in range(self.inner.size):
                    if other != self.rank:
                        self.send(source, count, kind, other, stream)
                        self.recv(places[other].ctypes.data, count, kind, other, stream)
                module.groupEnd()

            def broadcast(self, source, target, count, kind, root, stream):
                def call():
                    given = self.inner.broadcast(self._view(source, count, kind), root)
                    self._view(target, count, kind)[:] = given

                self._later("broadcast", call)

            def send(self, source, count, kind, peer, stream):
                def call():
                    self.inner._send(peer, f"{count} of {kind}", self._view(source, count, kind).copy())

                self._later("send", call)

            def recv(self, target, count, kind, peer, stream):
                def call():
                    self._view(target, count, kind)[:] = self.inner._receive(peer, f"{count} of {kind}")

                self._later("recv", call)

            def check_async_error(self):
                if self.async_error:
                    raise NcclError(self.async_error)

            def abort(self):
                self.aborted = True
                module.calls.append("abort")
                self.inner.abort("NCCL is aborted")

            def destroy(self):
                module.calls.append("destroy")

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self):
        return np.random.default_rng().bytes(128)

    def groupStart(self):
        _here.depth = getattr(_here, "depth", 0) + 1
        if _here.depth == 1:
            _here.group = []

    def groupEnd(self):
        _here.depth -= 1
        if _here.depth:
            return
        waiting, _here.group = _here.group, None
        for _, call in sorted(waiting, key=lambda pair: pair[0]):
            with contextlib.suppress(CommunicatorError):
                call()


def fake_cupy():
    stream = Stream(True, -1)
    runtime = SimpleNamespace(
        deviceGetPCIBusId=lambda index: f"0000:{index:02X}:00.0",
        eventQuery=lambda event: 0 if event.done else NOT_READY,
    )
    cuda = SimpleNamespace(
        Device=Device, Stream=Stream, Event=Event, get_current_stream=lambda: stream, runtime=runtime
    )
    return SimpleNamespace(
        cuda=cuda,
        ndarray=FakeArray,
        empty=empty,
        ascontiguousarray=lambda array: np.ascontiguousarray(array).view(FakeArray),
    )


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()
