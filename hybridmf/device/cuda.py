"""Interface to a CUDA device: memory, copies, compiled kernels. No other module of the solvers uses CuPy.

Streams. Kernels are launched on the current stream, CuPy's null stream unless the caller changes it, and run in the
order of their launches. CuPy's pool reuses memory on the stream on which it was allocated, so a kernel that is launched
later than the release of an array comes after all kernels on the same stream that use the array. Other streams:

- copies (`hybridmf.device.copier`): each waits for an event behind the launches so far (`after`). `upload` and
  `download` wait on the host until the copy is complete, so nothing that is launched later overlaps with it.
  `download(settled=True)` reads an array that no kernel in flight writes, and therefore waits for none.
- `begin_download` copies on the current stream. Its buffer in pinned memory is in `_arriving` until the event behind
  the copy is complete, whether or not the result is fetched.
- `fetch`: a copy from another GPU waits for marks of both, and is itself behind the mark that it returns.
- beside the current stream (`prepare`): the stream waits for all launches so far in `fork`, so its kernels see their
  results. The caller makes the current stream wait for these kernels by `join` before it releases their arrays.

The host waits only in `Health.wait`.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..core.system import available_cores, parse_bytes
from ..errors import DeviceError, DeviceMemoryError
from . import ready
from .arguments import Struct, passed
from .compiler import Compiler, Program
from .copier import CudaCopier
from .health import Mark, check_all, health_of, one_line
from .recording import current_recording

OLDEST = (7, 5)  # oldest supported compute capability (Turing)
MEMORY_LIMIT = "HYBRIDMF_GPU_MEMORY_LIMIT"
INSTALL = 'pip install "hybridmf[cuda13]" (driver 580 or later) or "hybridmf[cuda12]"'
TOOLKIT = 'pip install "cupy-cuda13x[ctk]" (or "cupy-cuda12x[ctk]"), or install the CUDA toolkit'
HOPPER_ONLY = "__CUDA_ARCH_FEAT_SM90_ALL"  # macro in sources with instructions that only compute capability 9.0 has

SMALL_COPY = 64 << 10
"""Bytes up to which a download bypasses the pinned buffers, which another thread may be using: a fit that reads a
status must not wait for the download of all factors for a checkpoint."""

MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: CUDA finds the kinds of memory by their addresses
DLPACK_CUDA = (2, 13)  # kinds of devices in DLPack: kDLCUDA and kDLCUDAManaged

KERNEL = re.compile(r'extern "C" (?=__global__\s+void\s+(?:__launch_bounds__\([^{;]*?\)\s+)?(\w+)\()')
"""Where a kernel begins in a source text, up to ``__global__``; its name."""

Array = Any  # an array on a device; `ndarray` of CuPy, or of NumPy where the device is emulated


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel, per thread."""

    registers: int
    local_bytes: int  # local memory: spilled registers, and arrays with run-time indices


Kernel = Callable[[tuple[int, ...], tuple[int, ...], Sequence[Any], int], None]
"""``kernel(grid, block, arguments, shared_bytes)``; arguments are device arrays, NumPy scalars, and tuples of these,
which are C structs passed by value."""


PreparedLaunch = Callable[..., None]
"""``launch(beside=False)``, within `active()`: on the current stream, or beside it (`CudaDevice.fork`)."""


@dataclass(frozen=True)
class DeviceSpec:
    """Properties of a device that a plan depends on."""

    name: str
    index: int
    capability: tuple[int, int]  # compute capability
    multiprocessors: int
    shared_bytes: int  # largest dynamic shared memory of a block
    l2_bytes: int
    memory_bytes: int
    free_bytes: int  # at the time of the query, limited by HYBRIDMF_GPU_MEMORY_LIMIT

    def __str__(self) -> str:
        major, minor = self.capability
        return f"cuda:{self.index} ({self.name}, sm_{major}{minor}, {self.free_bytes / 2**30:.1f} GiB free)"


Device: TypeAlias = "CudaDevice"  # what solvers and launches use; the emulated device of the tests has the same methods


def program_text(source: str, name: str, constants: Sequence[str]) -> str:
    """The text that NVRTC compiles: the kernel `name` of a source text and what it uses.

    The other kernels become templates without instances: NVRTC parses them, but compiles no code for them. Constants
    are lines of the text rather than options, because for each new list of options CuPy compiles an empty program
    before it looks for a kernel on disk.
    """
    defined = "".join(f"#define {constant.replace('=', ' ', 1)}\n" for constant in constants)
    kept = KERNEL.sub(lambda found: found[0] if found[1] == name else "template <int = 0> ", source)
    return f"{defined}#line 1\n{kept}"


def options_for(source: str) -> tuple[str, ...]:
    """Options of NVRTC for a source text, beside those that CuPy adds; of two architectures NVRTC takes the richer."""
    return ("-std=c++17", "-arch=sm_90a") if HOPPER_ONLY in source else ("-std=c++17",)


def _address(array: Array) -> int:
    return int(array.data.ptr)


def _packed(argument: Any) -> np.ndarray:
    """An argument of a kernel in memory of the host."""
    if isinstance(argument, Struct):
        return argument.packed
    if isinstance(argument, np.generic):
        return np.asarray(argument)
    if isinstance(argument, tuple):
        return passed(argument, _address)
    return np.array(_address(argument), dtype=np.uintp)


def parse_device(device: str) -> int:
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ValueError(f'device must be "cuda" or "cuda:N", got {device!r}')
    return int(match[1] or 0)


def memory_limit() -> int | None:
    """HYBRIDMF_GPU_MEMORY_LIMIT ("6GB", "500MiB" or a number) in bytes; None if it is not set."""
    text = os.environ.get(MEMORY_LIMIT, "").strip()
    return parse_bytes(MEMORY_LIMIT, text) if text else None


def _cupy() -> Any:
    """Import CuPy; raises a DeviceError that says what to install."""
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # also a library of CUDA that does not load, a CuPy built for another NumPy
        missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        what = "is not installed" if missing else f"cannot be imported: {one_line(error)}"
        raise DeviceError(f"CuPy {what}; {INSTALL}") from error


def gpu_of(array: Any) -> str | None:
    """Name of the GPU that holds an array of any library with DLPack or the CUDA array interface; None for the host."""
    if hasattr(array, "__dlpack_device__"):
        kind, index = array.__dlpack_device__()
        return f"cuda:{index}" if kind in DLPACK_CUDA else None
    if hasattr(array, "__cuda_array_interface__"):
        return f"cuda:{_cupy().asarray(array).device.id}"
    return None


def device_count() -> int:
    cupy = _cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CuPy's CUDARuntimeError
        check_all(cupy)
        text = one_line(error)
        if "InsufficientDriver" in text:
            hint = f"there is no NVIDIA driver, or CuPy's CUDA is too new for it: update it, or {INSTALL}"
        elif "NoDevice" in text:
            hint = "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        else:
            hint = "look at nvidia-smi"
        raise DeviceError(f"CuPy cannot use a GPU here: {text}; {hint}") from error
    if not count:
        raise DeviceError("CuPy found no CUDA device: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    return count


@functools.cache
def _open(index: int) -> CudaDevice:
    count = device_count()
    if index >= count:
        have = ", ".join(f"cuda:{k}" for k in range(count))
        raise DeviceError(f"cuda:{index} does not exist; this machine has {have}")
    return CudaDevice(index)


def open_device(device: str = "cuda") -> CudaDevice:
    """The device of that name, opened once per process."""
    opened = _open(parse_device(device))
    opened.refresh()
    return opened


class _Active:
    """`CudaDevice.active`: a class, since SGD enters it hundreds of times in an epoch on several GPUs.

    Does nothing to a device that is current already. Its exit does not hide the exception of its body: leaving a lost
    device fails.
    """

    __slots__ = ("_device", "_entered")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        device = self._device
        device.health.check()
        self._entered: Any = None
        try:
            if device._current() != device.index:
                self._entered = device._cupy.cuda.Device(device.index)
                self._entered.__enter__()
        except Exception as error:
            device._raise_ours(error)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._entered is not None:
            try:
                self._entered.__exit__(None, None, None)
            except Exception as failure:
                if error is None:
                    self._device._raise_ours(failure)
        if error is not None:
            self._device._raise_ours(error)


class CudaDevice:
    """One CUDA device through CuPy."""

    spec: DeviceSpec

    def __init__(self, index: int) -> None:
        self._cupy = _cupy()
        self.index = index
        self.health = health_of(index, self._cupy)
        self._current = self._cupy.cuda.runtime.getDevice
        self._kernels: dict[Program, Kernel] = {}
        self._functions: dict[Program, Any] = {}
        self._lock = threading.Lock()
        self._limits_lock = threading.Lock()
        self._arriving: deque[tuple[np.ndarray, Any]] = deque()
        self._arriving_lock = threading.Lock()
        with self.active():
            properties = self._cupy.cuda.runtime.getDeviceProperties(index)
            self._beside = self._cupy.cuda.Stream(non_blocking=True, priority=-1)  # one for all threads
        capability = (int(properties["major"]), int(properties["minor"]))
        name = properties["name"].decode()
        if capability < OLDEST:
            raise DeviceError(
                f"cuda:{index} ({name}) has compute capability {capability[0]}.{capability[1]}; hybridmf's kernels "
                f'need {OLDEST[0]}.{OLDEST[1]} (Turing) or later: use device="cpu"'
            )
        self._properties = {
            "name": name,
            "index": index,
            "capability": capability,
            "multiprocessors": int(properties["multiProcessorCount"]),
            "shared_bytes": int(properties["sharedMemPerBlockOptin"]),
            "l2_bytes": int(properties["l2CacheSize"]),
            "memory_bytes": int(properties["totalGlobalMem"]),
        }
        self._compiler = Compiler(self._compile, available_cores(), name)
        self.refresh()

    def refresh(self) -> None:
        self.health.forgive()
        self.spec = DeviceSpec(**self._properties, free_bytes=self.free_bytes())

    def active(self) -> AbstractContextManager[None]:
        """Run array arithmetic on this device; CuPy's exceptions are raised as hybridmf exceptions."""
        return _Active(self)

    def _raise_ours(self, error: BaseException) -> None:
        """Raise the exception of hybridmf for one of CuPy; returns for others, which the caller lets pass."""
        cuda = self._cupy.cuda
        if isinstance(error, cuda.memory.OutOfMemoryError):
            raise DeviceMemoryError(
                f"cuda:{self.index} is out of memory: {' '.join(str(error).split())}; "
                f"use fewer factors, another GPU, or free memory of other programs"
            ) from error
        if isinstance(error, (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)):
            raise self.health.failure(error) from error
        if isinstance(error, ImportError):  # CuPy loads cuBLAS and others at first need
            raise DeviceError(f"CuPy cannot load a library of CUDA: {one_line(error)}; {TOOLKIT}") from error
        if isinstance(error, RuntimeError) and type(error).__module__.startswith("cupy"):  # of cuBLAS and others
            raise self.health.failure(error) from error

    # ------------------------------------------------------------------------------------------------ memory

    def free_bytes(self) -> int:
        """Bytes that can still be allocated within the device memory and HYBRIDMF_GPU_MEMORY_LIMIT."""
        with self.active():
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            pool = self._cupy.get_default_memory_pool()
            available = int(free) + int(pool.free_bytes())
            limit = memory_limit()
            if limit is not None:
                available = min(available, max(0, limit - int(pool.used_bytes())))
            return available

    def owns(self, array: Any) -> bool:
        return isinstance(array, self._cupy.ndarray) and int(array.device.id) == self.index

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Uninitialized array; raises DeviceMemoryError if it does not fit."""
        with self.active():
            self._check_limit(shape, dtype)
            return self._cupy.empty(shape, dtype=dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        with self.active():
            self._check_limit(shape, dtype)
            return self._cupy.zeros(shape, dtype=dtype)

    def _check_limit(self, shape: int | tuple[int, ...], dtype: Any) -> None:
        assert current_recording() is None, "a recording allocates no memory"
        limit = memory_limit()
        if limit is None:
            return
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        used = int(self._cupy.get_default_memory_pool().used_bytes())
        if used + size > limit:
            raise DeviceMemoryError(
                f"cuda:{self.index}: {size / 2**20:,.1f} MiB more would pass {MEMORY_LIMIT} "
                f"({limit / 2**20:,.1f} MiB, {used / 2**20:,.1f} in use)"
            )

    def upload(self, array: np.ndarray, target: Array | None = None) -> Array:
        """Copy to the device, C order, through pinned buffers; to `target` if given, of the same shape and dtype."""
        array = np.ascontiguousarray(array)
        if target is None:
            target = self.empty(array.shape, array.dtype)
        elif target.shape != array.shape or not target.flags.c_contiguous:
            raise ValueError(f"target must be contiguous, of shape {array.shape}; got {target.shape}")
        if array.size:
            with self._lock:
                # work launched so far may still read memory that the pool reuses for the target
                self._copies.after(self.record())
                self._copies.copy(target.reshape(-1), array.reshape(-1))
                self._copies.synchronize()
        return target

    def adopt(self, array: Any) -> Array:
        """Copy, in C order, of an array of CuPy, PyTorch, ... that is on this device (see `gpu_of`).

        DLPack, where there is it, orders the copy by streams.
        """
        cupy = self._cupy
        with self.active():
            given = cupy.from_dlpack(array) if hasattr(array, "__dlpack__") else cupy.asarray(array)
            target = self.empty(given.shape, given.dtype)
            target[...] = given
            self.health.wait(self.record())  # the caller reads single numbers of it, by waits that ignore Ctrl-C
            return target

    def download(self, array: Array, target: np.ndarray | None = None, *, settled: bool = False) -> np.ndarray:
        """Copy to the host, to `target` if given, through pinned buffers if large; waits for the kernels before.

        `settled`: these kernels are complete, and no other one writes to the array; later work is not waited for.
        """
        settled = settled and array.flags.c_contiguous  # otherwise a kernel makes a copy
        with self.active():
            source = self._cupy.ascontiguousarray(array)
            if target is None:
                target = np.empty(source.shape, dtype=source.dtype)
            if source.nbytes <= SMALL_COPY and not settled:
                self.health.wait(self.record())
                target[...] = source.get()  # nothing is left to wait for
                return target
            with self._lock:
                if not settled:
                    self._copies.after(self.record())
                self._copies.fetch(target, source)
            return target

    @functools.cached_property
    def _copies(self) -> CudaCopier:
        """Copier of `upload` and `download`, whose pinned buffers last as long as the process."""
        return self.copier()

    def begin_download(self, array: Array) -> Callable[[], np.ndarray]:
        """Start copying a small array; the returned function waits for the copy, but not for later work."""
        with self.active():
            cuda = self._cupy.cuda
            source, stream = self._cupy.ascontiguousarray(array), cuda.get_current_stream()
            target = np.frombuffer(cuda.alloc_pinned_memory(max(1, source.nbytes)), source.dtype, source.size)
            cuda.runtime.memcpyAsync(target.ctypes.data, source.data.ptr, source.nbytes, 2, stream.ptr)
            arrived = self.record()
            # keep the buffer until the copy is complete, waited for or not: CuPy would reuse its memory
            with self._arriving_lock:
                while self._arriving and self.health.is_done(self._arriving[0][1]):
                    self._arriving.popleft()
                self._arriving.append((target, arrived))

        def wait() -> np.ndarray:
            with self.active():
                self.health.wait(arrived)
            return target.reshape(source.shape).copy()

        return wait

    def synchronize(self) -> None:
        """Wait for all work of the current stream; raises its failures."""
        with self.active():
            self.health.wait(self.record())

    def record(self) -> Any:
        """A mark (an event) behind the work launched so far on the current stream."""
        with self.active():
            return self._mark(self._stream())

    def wait(self, mark: Any) -> None:
        with self.active():
            self._wait(self._stream(), mark)

    def _stream(self) -> Any:
        return self._cupy.cuda.get_current_stream()

    def current_stream(self) -> int:
        """The current stream, for comparisons."""
        with self.active():
            return int(self._stream().ptr)

    def _mark(self, stream: Any) -> Mark:
        mark = self.health.mark(stream)
        if (recording := current_recording()) is not None:
            recording.add(self, self._cupy.cuda.runtime.eventRecord, (mark.ptr, stream.ptr), mark)
        return mark

    def _wait(self, stream: Any, mark: Any) -> None:
        """Make later work of a stream wait for a mark."""
        stream.wait_event(mark)
        if (recording := current_recording()) is not None:
            recording.add(self, self._cupy.cuda.runtime.streamWaitEvent, (stream.ptr, mark.ptr), mark)

    def fork(self) -> None:
        """Let later launches beside the current stream come after all launches so far.

        They are on a high-priority stream, whose blocks are scheduled before those of the current one: long work.
        """
        with self.active():
            self._wait(self._beside, self._mark(self._stream()))

    def join(self) -> None:
        """Let later launches on the current stream come after all launches beside it."""
        with self.active():
            self._wait(self._stream(), self._mark(self._beside))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Launch work concurrently with work outside of the context, on a third stream."""
        with self.active(), self._aside:
            yield

    def reach(self, other: CudaDevice) -> None:
        """Let this GPU read the memory of another one without the host, if the machine allows that."""
        runtime = self._cupy.cuda.runtime
        with self.active():
            if other.index != self.index and runtime.deviceCanAccessPeer(self.index, other.index):
                try:
                    runtime.deviceEnablePeerAccess(other.index)
                except runtime.CUDARuntimeError as error:
                    if "PeerAccessAlreadyEnabled" not in str(error):
                        raise

    def receive(self, target: Array, source: Array) -> None:
        """Copy an array of this GPU, or, on another stream than the null stream, of another GPU to one of this GPU.

        On the null stream, a copy between two GPUs comes after all work launched before it on either, on all streams,
        and before all work launched after it; `fetch` does not.
        """
        with self.active():
            stream = self._stream()
            assert stream.ptr or source.data.device_id == target.data.device_id, "the copy would wait for both GPUs"
            self._copy(stream, target, source)

    def fetch(self, target: Array, source: Array, after: Sequence[Any]) -> Any:
        """Copy an array, often from another GPU, after marks, on a stream of its own; returns the mark behind it.

        Neither array may be freed before it is complete.
        """
        with self.active():
            for mark in after:
                self._wait(self._fetching, mark)
            self._copy(self._fetching, target, source)
            return self._mark(self._fetching)

    def _copy(self, stream: Any, target: Array, source: Array) -> None:
        assert source.flags.c_contiguous and target.flags.c_contiguous and source.nbytes == target.nbytes
        if not source.nbytes:
            return
        target.data.copy_from_device_async(source.data, source.nbytes, stream)
        if (recording := current_recording()) is not None:
            given = (_address(target), _address(source), source.nbytes, MEMCPY_DEFAULT, stream.ptr)
            recording.add(self, self._cupy.cuda.runtime.memcpyAsync, given, (target, source))

    def fetched(self) -> Any:
        """A mark behind all calls of `fetch` so far."""
        with self.active():
            return self._mark(self._fetching)

    @functools.cached_property
    def _fetching(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    @functools.cached_property
    def _aside(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True, priority=-1)

    def copier(self) -> CudaCopier:
        """Copies to and from the device, on a stream of their own."""
        return CudaCopier(self, self._cupy)

    # ------------------------------------------------------------------------------------------------ kernels

    def kernel(self, source: str, name: str, constants: tuple[str, ...]) -> Kernel:
        """The kernel `name` of a source text: one of `ready`, or compiled by NVRTC and cached on disk by CuPy."""
        key = (source, name, constants)
        if key not in self._kernels:
            self._kernels[key] = self._compiler.result(key)
        return self._kernels[key]

    def compile_ahead(self, programs: Iterable[Program], later: bool = False) -> None:
        """Start to compile kernels, given as the arguments of `kernel`, side by side; `kernel` waits for them.

        `later`: after all that a fit waits for.
        """
        self._compiler.ahead((key for key in programs if key not in self._kernels), later)

    def resources(self, source: str, name: str, constants: tuple[str, ...]) -> Resources:
        self.kernel(source, name, constants)
        function = self._functions[source, name, constants]
        with self.active():
            return Resources(int(function.num_regs), int(function.local_size_bytes))

    def _compile(self, source: str, name: str, constants: tuple[str, ...]) -> Kernel:
        cupy = self._cupy
        with self.active():
            try:
                text, options = program_text(source, name, constants), options_for(source)
                function = ready.load(cupy, self.spec.capability, text, name, options)
                if function is None:
                    function = cupy.RawModule(code=text, options=options, backend="nvrtc").get_function(name)
            except cupy.cuda.compiler.CompileException as error:
                raise DeviceError(
                    f"the kernel {name} does not compile for cuda:{self.index} with {' '.join(constants)}; "
                    f"this is a fault of hybridmf or of the CUDA toolkit. The compiler says: {error}"
                ) from error
            except (RuntimeError, ImportError, OSError) as error:
                if "nvrtc" not in str(error).lower():
                    raise
                raise DeviceError(
                    f"CuPy cannot load NVRTC, the run-time compiler of CUDA: {one_line(error)}; {TOOLKIT}"
                ) from error

        self._functions[source, name, constants] = function
        allowed = 32 * 1024

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], shared_bytes: int) -> None:
            nonlocal allowed
            assert current_recording() is None, "only prepared launches can be recorded"
            with self.active():
                if shared_bytes > allowed:
                    self._allow(function, shared_bytes)
                    allowed = shared_bytes
                given = tuple(passed(argument, _address) for argument in arguments)
                function(grid, block, given, shared_mem=shared_bytes)

        return launch

    def _allow(self, function: Any, shared_bytes: int) -> None:
        """Let a kernel have so much dynamic shared memory; a thread that needs less lowers no other one's limit."""
        with self._limits_lock:
            if function.max_dynamic_shared_size_bytes < shared_bytes:
                function.max_dynamic_shared_size_bytes = shared_bytes

    def prepare(
        self,
        program: tuple[str, str, tuple[str, ...]],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Any],
        shared_bytes: int = 0,
    ) -> PreparedLaunch:
        """Launch of a kernel, whose arguments are packed once: it takes a fifth of the host's time of a `Kernel`.

        `program`: the arguments of `kernel`. `arguments`: those of a `Kernel`, or `Struct`s; the caller keeps the
        arrays.
        """
        self.kernel(*program)
        function, cuda = self._functions[program], self._cupy.cuda
        packed = [_packed(argument) for argument in arguments]
        pointers = np.array([one.ctypes.data for one in packed], dtype=np.uintp)
        with self.active():
            self._allow(function, shared_bytes)
            sizes = ((*grid, 1, 1)[:3], (*block, 1, 1)[:3])
            launched = (function.kernel.ptr, *sizes[0], *sizes[1], shared_bytes)
        start, current, first = cuda.driver.launchKernel, cuda.get_current_stream, pointers.ctypes.data
        other, kept = self._beside.ptr, (function, packed, pointers)

        def launch(beside: bool = False) -> None:
            given = (*launched, other if beside else current().ptr, first, 0)
            start(*given)
            if (recording := current_recording()) is not None:
                recording.add(self, start, given, kept)

        return launch

    def address(self, array: Array) -> int:
        return _address(array)

    def matmul(self, a: Array, b: Array) -> Array:
        """Product of two matrices of one dtype by cuBLAS, without TF32."""
        with self.active():
            return self._cupy.matmul(a, b)
