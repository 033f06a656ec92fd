"""A stand-in for CuPy, for the logic above it: devices, streams, memory, errors."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridmf.device.health import NOT_READY

GIB = 1 << 30


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class CompileException(Exception):
    pass


class Array(np.ndarray):
    """An array on the first device, which is the host."""

    def get(self) -> np.ndarray:
        return np.array(self)

    @property
    def device(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(id=getattr(self, "index", 0))

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class Pool:
    def __init__(self) -> None:
        self.used, self.free = 0, 0

    def used_bytes(self) -> int:
        return self.used

    def free_bytes(self) -> int:
        return self.free


class Function:
    """A compiled kernel that notes how it is launched; "hang" never ends, and "crash" breaks the device."""

    max_dynamic_shared_size_bytes = 48 * 1024

    def __init__(self, module: FakeCupy, name: str) -> None:
        self.module, self.name = module, name
        self.kernel = SimpleNamespace(ptr=self)

    def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
        self.module.fail("launch")
        self.module.launches.append((grid, block, arguments, shared_mem, self.max_dynamic_shared_size_bytes))
        if self.name == "hang":
            self.module.streams[-1].stuck = True
        elif self.name == "crash":
            self.module.broken = CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


class Handle:
    """An object whose deletion calls CUDA, which fails on a broken device: CuPy then prints an ignored exception."""

    destroyed = False

    def __init_subclass__(cls) -> None:
        cls.__module__ = "cupy.cuda"  # by which the package finds the objects to keep

    def __init__(self, module: FakeCupy) -> None:
        self.module = module

    def __del__(self) -> None:
        self.destroyed = True
        self.module.fail("destroy")


class Event(Handle):
    """Knows the stream it was recorded on, and whether a kernel before it never ends."""

    stream: Any = None
    stuck = False

    @property
    def ptr(self) -> Event:
        return self

    def record(self, stream: Any) -> None:
        assert not self.destroyed, "CUDA would crash"
        self.module.fail("record")
        self.stream, self.stuck = stream, stream.stuck

    def synchronize(self) -> None:
        self.module.fail("synchronize")
        assert not self.stuck, "Ctrl-C does not end this wait"


class Stream(Handle):
    """A stream; inside of it, it is the current one."""

    ptr = 7
    stuck = False

    def __init__(self, module: FakeCupy, priority: int) -> None:
        super().__init__(module)
        self.priority = priority

    def synchronize(self) -> None:
        pytest.fail("Ctrl-C does not end this wait")

    def wait_event(self, event: Any) -> None:
        self.module.fail("wait")
        self.module.waits.append((self, event.ptr.stream))
        self.stuck |= event.ptr.stuck

    def __enter__(self) -> Stream:
        self.module.streams.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self.module.streams.pop()


class FakeCupy(types.ModuleType):
    """As much of CuPy as `CudaDevice` uses; `errors` says what raises what."""

    def __init__(self, capabilities: list[tuple[int, int]] | None = None, **errors: Exception) -> None:
        super().__init__("cupy")
        self.capabilities = [(9, 0)] if capabilities is None else capabilities
        self.errors, self.pool = errors, Pool()
        self.launches: list[Any] = []
        self.compiled: list[Any] = []
        self.loaded: list[bytes] = []
        self.paths: list[Path] = []
        self.waits: list[Any] = []
        self.repeated: list[Any] = []
        self.peers: list[int] = []
        self.ndarray = Array
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDeviceCount=self.count,
                getDeviceProperties=self.properties,
                memGetInfo=self.memory,
                memcpyAsync=self.copy,
                eventQuery=self.query,
                getDevice=lambda: -1,
                eventRecord=lambda event, stream: self.repeated.append(("record", event, stream)),
                streamWaitEvent=lambda stream, event: self.repeated.append(("wait", stream, event)),
                deviceCanAccessPeer=lambda index, other: other != 2,
                deviceEnablePeerAccess=self.enable_peer_access,
            ),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError, launchKernel=self.launch_prepared),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            compiler=SimpleNamespace(CompileException=CompileException),
            Device=lambda index: contextlib.nullcontext(),
            Stream=lambda non_blocking, priority=0: Stream(self, priority),
            Event=lambda disable_timing: Event(self),
            alloc_pinned_memory=bytearray,
            get_current_stream=lambda: self.streams[-1],
        )
        self.streams = [Stream(self, 0)]

    broken: Exception | None = None
    """What every call raises from now on."""

    def fail(self, name: str) -> None:
        if self.broken is not None:
            raise type(self.broken)(*self.broken.args)
        if name in self.errors:
            raise self.errors[name]

    def launch_prepared(self, function: Function, *sizes: int) -> None:
        """Notes the memory of up to two arguments of 8 bytes, which CUDA reads now."""
        *sizes, stream, pointers, extra = sizes
        assert not extra and stream == Stream.ptr
        addresses = (ctypes.c_void_p * 2).from_address(pointers)
        given = tuple(ctypes.c_int64.from_address(address).value for address in addresses)
        function(tuple(sizes[:3]), tuple(sizes[3:6]), given, sizes[6])

    def count(self) -> int:
        self.fail("count")
        return len(self.capabilities)

    def properties(self, index: int) -> dict[str, Any]:
        self.fail("properties")
        major, minor = self.capabilities[index]
        sizes = {"multiProcessorCount": 132, "sharedMemPerBlockOptin": 227 * 1024, "l2CacheSize": 60 << 20}
        return {"name": b"Fake", "major": major, "minor": minor, "totalGlobalMem": 16 * GIB, **sizes}

    def memory(self) -> tuple[int, int]:
        self.fail("memory")
        return 10 * GIB, 16 * GIB

    def query(self, event: Event) -> int:
        if self.broken is not None or "synchronize" in self.errors:
            return 700
        return NOT_READY if event.stuck else 0

    def enable_peer_access(self, other: int) -> None:
        self.fail("peer")
        self.peers.append(other)

    def copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.fail("copy")
        assert kind in (1, 2, 4) and stream == 7
        ctypes.memmove(target, source, size)

    def get_default_memory_pool(self) -> Pool:
        return self.pool

    def empty(self, shape: Any, dtype: Any) -> Any:
        self.fail("empty")
        return np.full(shape, 77, dtype=dtype).view(Array)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        self.fail("zeros")
        return np.zeros(shape, dtype=dtype).view(Array)

    def from_dlpack(self, array: Any) -> Any:
        self.fail("from_dlpack")
        return np.asarray(array).view(Array)

    def asarray(self, array: Any) -> Any:
        interface = SimpleNamespace(__array_interface__=array.__cuda_array_interface__)
        return np.asarray(interface).view(Array)

    def ascontiguousarray(self, array: Any) -> Any:
        return np.ascontiguousarray(array).view(Array)

    def matmul(self, a: Any, b: Any) -> Any:
        self.fail("matmul")
        return np.matmul(a, b)

    def RawModule(
        self, code: str = "", options: tuple[str, ...] = (), backend: str = "nvrtc", path: str | None = None
    ) -> Any:
        if path is not None:
            self.loaded.append(Path(path).read_bytes())
            self.paths.append(Path(path))
            self.fail("load")
        else:
            self.fail("compile")
            self.compiled.append((code, options, backend))
        return SimpleNamespace(get_function=lambda name: Function(self, name))


Machine = Callable[..., Any]
