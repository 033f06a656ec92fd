"""Devices, launches and plans of GPUs where there is none: a stand-in for CuPy acts out what machines come with."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import planted
from emulated import EmulatedDevice

import hybridmf as hmf
from hybridmf.core.objective import Objective
from hybridmf.core.system import parse_bytes
from hybridmf.device import copier as copiers
from hybridmf.device import cuda as devices
from hybridmf.device.cuda import MEMORY_LIMIT, CudaDevice, DeviceSpec, open_device, parse_device
from hybridmf.errors import DeviceError, DeviceMemoryError, MemoryBudgetError, StoreError
from hybridmf.gpu import launch
from hybridmf.plan import dispatch
from hybridmf.plan import fused as plan_fused
from hybridmf.plan import types as plan_types
from hybridmf.plan.make import check_memory, make_plan
from hybridmf.plan.types import Plan, Settings

GIB = 1 << 30
INSTALL = 'pip install "hybridmf[cuda13]" (driver 580 or later) or "hybridmf[cuda12]"'


def says(*parts: str) -> str:
    """Regular expression: these parts, literally, in this order."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


# ----------------------------------------------------------------------------------------------- a stand-in for CuPy


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
    """A compiled kernel that notes how it is launched."""

    max_dynamic_shared_size_bytes = 48 * 1024

    def __init__(self, module: FakeCupy) -> None:
        self.module = module

    def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
        self.module.fail("launch")
        self.module.launches.append((grid, block, arguments, shared_mem, self.max_dynamic_shared_size_bytes))


class Event:
    """Knows the stream it was recorded on."""

    stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        pass


class Stream:
    """A stream; inside of it, it is the current one."""

    ptr = 7

    def __init__(self, module: FakeCupy, priority: int) -> None:
        self.module, self.priority = module, priority

    def synchronize(self) -> None:
        self.module.fail("synchronize")

    def wait_event(self, event: Event) -> None:
        self.module.waits.append((self, event.stream))

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
        self.waits: list[Any] = []
        self.ndarray = Array
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDeviceCount=self.count,
                getDeviceProperties=self.properties,
                memGetInfo=lambda: (10 * GIB, 16 * GIB),
                memcpyAsync=self.copy,
            ),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            compiler=SimpleNamespace(CompileException=CompileException),
            Device=lambda index: contextlib.nullcontext(),
            Stream=lambda non_blocking, priority=0: Stream(self, priority),
            Event=lambda disable_timing: Event(),
            alloc_pinned_memory=bytearray,
            get_current_stream=lambda: self.streams[-1],
        )
        self.streams = [Stream(self, 0)]

    def fail(self, name: str) -> None:
        if name in self.errors:
            raise self.errors[name]

    def count(self) -> int:
        self.fail("count")
        return len(self.capabilities)

    def properties(self, index: int) -> dict[str, Any]:
        self.fail("properties")
        major, minor = self.capabilities[index]
        sizes = {"multiProcessorCount": 132, "sharedMemPerBlockOptin": 227 * 1024, "l2CacheSize": 60 << 20}
        return {"name": b"Fake", "major": major, "minor": minor, "totalGlobalMem": 16 * GIB, **sizes}

    def copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.fail("copy")
        assert kind in (1, 2) and stream == 7
        ctypes.memmove(target, source, size)

    def get_default_memory_pool(self) -> Pool:
        return self.pool

    def empty(self, shape: Any, dtype: Any) -> Any:
        self.fail("empty")
        return np.full(shape, 77, dtype=dtype).view(Array)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        self.fail("zeros")
        return np.zeros(shape, dtype=dtype).view(Array)

    def ascontiguousarray(self, array: Any) -> Any:
        return np.ascontiguousarray(array).view(Array)

    def matmul(self, a: Any, b: Any) -> Any:
        self.fail("matmul")
        return np.matmul(a, b)

    def RawModule(self, code: str, options: tuple[str, ...], backend: str) -> Any:
        self.fail("compile")
        self.compiled.append((code, options, backend))
        return SimpleNamespace(get_function=lambda name: Function(self))


@pytest.fixture(autouse=True)
def _forget_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Devices are opened once; and no test sees the limit of whoever runs it."""
    monkeypatch.delenv(MEMORY_LIMIT, raising=False)
    devices._open.cache_clear()
    yield
    devices._open.cache_clear()


Machine = Callable[..., Any]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend that a module (None: nothing) is what ``import cupy`` finds; without arguments, one sm_90 GPU."""

    def pretend(*args: Any, **errors: Exception) -> Any:
        module = args[0] if args and not isinstance(args[0], list) else FakeCupy(*args, **errors)
        monkeypatch.setitem(sys.modules, "cupy", module)
        return module

    return pretend


def fake_imports(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make ``import cupy`` fail with an error."""

    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(devices, "importlib", SimpleNamespace(import_module=fail))


# ---------------------------------------------------------------------------------------------------- names and sizes


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:12", 12)])
def test_names_of_devices(name: str, index: int) -> None:
    assert parse_device(name) == index
    assert plan_types.check_device(name) == name


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        (["cpu", "cpu"], ("cpu", "cpu")),
        (("cuda", "cuda:3"), ("cuda:0", "cuda:3")),
        (["cuda:1"], ("cuda:1",)),
    ],
)
def test_devices_of_several_ranks(devices: Any, names: tuple[str, ...]) -> None:
    assert plan_types.check_device(devices) == names


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu", "cuda:-1", "cuda:0 "])
def test_no_names_of_devices(name: str) -> None:
    with pytest.raises(ValueError, match=says('device must be "cuda" or "cuda:N", got', repr(name))):
        parse_device(name)


@pytest.mark.parametrize(
    ("device", "kind", "part"),
    [
        (
            "gpu",
            ValueError,
            'or a list such as ["cuda:0", "cuda:1"]; got \'gpu\'',
        ),
        ("cuda:1000", ValueError, "got 'cuda:1000'"),
        ([], ValueError, 'device, a list of devices, holds "cpu", "cuda" or "cuda:N", once a rank; got []'),
        (["cpu"] * 3000, ValueError, "device names the CPU 3000 times; at most 64 ranks share it, and one is as fast"),
        (["cuda:0", "auto"], ValueError, "got ['cuda:0', 'auto']"),
        (["cuda:0", 1], ValueError, "got ['cuda:0', 1]"),
        (["cuda", "cuda:0"], ValueError, "names a GPU twice"),
        (["cuda:1", "cpu"], ValueError, "mixes CPU and GPUs"),
        (None, TypeError, 'or a list such as ["cuda:0", "cuda:1"], got NoneType None'),
        (0, TypeError, "got int 0"),
    ],
)
def test_devices_that_users_may_not_ask_for(device: Any, kind: type[Exception], part: str) -> None:
    with pytest.raises(kind, match=says(part)):
        plan_types.check_device(device)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("6GB", 6 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        (" 500mib ", 500 << 20),
        ("17", 17),
        ("17B", 17),
        (4096, 4096),
        (2.5e9, 2_500_000_000),
        ("2e9", 2 * 10**9),
        (1e16, 10**16),
        ("1TB", 10**12),
    ],
)
def test_sizes(value: Any, size: int) -> None:
    assert parse_bytes("x", value) == size


@pytest.mark.parametrize("value", ["", "GB", "-1", "6 bananas", "1.2.3", ".", 0, "0.5", "1e999", None, True, "nan"])
def test_no_sizes(value: Any) -> None:
    with pytest.raises(ValueError, match=says("some_limit must be a size such as", f"got {value!r}")):
        parse_bytes("some_limit", value)


# ------------------------------------------------------------------------------------------------ what machines lack


LACKS = [
    ({"args": (None,)}, f"CuPy is not installed; {INSTALL}"),
    ({"args": ([],)}, "CuPy found no CUDA device: look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
    (
        {"count": CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version\n is insufficient")},
        "CuPy cannot use a GPU here: CUDARuntimeError: cudaErrorInsufficientDriver: CUDA driver version is "
        f"insufficient; there is no NVIDIA driver, or CuPy's CUDA is too new for it: update it, or {INSTALL}",
    ),
    (
        {"count": CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")},
        "no CUDA-capable device is detected; no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    ),
    ({"count": OSError("libcuda.so")}, "CuPy cannot use a GPU here: OSError: libcuda.so; look at nvidia-smi"),
    ({"args": (types.ModuleType("cupy"),)}, "CuPy cannot use a GPU here: AttributeError"),
    (
        {"args": ([(7, 0)],)},
        "cuda:0 (Fake) has compute capability 7.0; hybridmf's kernels need 7.5 (Turing) or later",
    ),
    ({"properties": CUDARuntimeError("cudaErrorUnknown")}, "cuda:0 failed: CUDARuntimeError: cudaErrorUnknown"),
]
LACKING = pytest.mark.parametrize(
    ("lack", "cause"),
    LACKS,
    ids=["no cupy", "no device", "no driver", "none visible", "no library", "empty cupy", "too old", "no properties"],
)


@LACKING
def test_cuda_that_cannot_be_served_is_refused_with_the_cause(machine: Machine, lack: dict, cause: str) -> None:
    machine(*lack.get("args", ()), **{name: error for name, error in lack.items() if name != "args"})
    model = hmf.ExplicitALS(factors=2, device="cuda")
    expected = says('device="cuda" cannot be served: ', cause, 'Use device="auto" or "cpu"')
    for call in (
        lambda: dispatch.find_gpu("cuda"), lambda: model.fit(planted()), lambda: hmf.plan(planted(), model),
        lambda: hmf.ImplicitALS(device="cuda", precision="tf32").fit(planted()),
    ):  # fmt: skip
        with pytest.raises(DeviceError, match=expected) as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value.__cause__, DeviceError)
        assert str(caught.value.__cause__) in str(caught.value)
    assert not hasattr(model, "plan_")
    usable, reason = dispatch.gpu_status()
    assert not usable
    assert cause in reason


@LACKING
def test_auto_takes_the_cpu_and_logs_why(
    machine: Machine, lack: dict, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine(*lack.get("args", ()), **{name: error for name, error in lack.items() if name != "args"})
    with caplog.at_level(logging.INFO, "hybridmf"):
        model = hmf.ExplicitALS(factors=2, iterations=1, device="auto").fit(planted())
    assert model.device_ == model.plan_.device == "cpu"
    assert model.plan_.gpu is None
    assert model.plan_.reason.startswith("no GPU: ") and cause in model.plan_.reason
    assert "device='auto' chose the CPU: " in caplog.text and cause in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), f"CuPy is not installed; {INSTALL}"),
        (
            ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"),
            f"CuPy cannot be imported: ModuleNotFoundError: No module named 'fastrlock'; {INSTALL}",
        ),
        (ImportError("libcublas.so.13:\nno such file"), "CuPy cannot be imported: ImportError: libcublas.so.13: no"),
        (ValueError("numpy.dtype size changed"), "CuPy cannot be imported: ValueError: numpy.dtype size changed"),
    ],
)
def test_a_cupy_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    fake_imports(monkeypatch, error)
    with pytest.raises(DeviceError, match=says(message)) as caught:
        open_device()
    assert caught.value.__cause__ is error


def test_the_original_cause_is_at_the_end_of_the_chain(machine: Machine) -> None:
    error = CUDARuntimeError("cudaErrorNoDevice")
    machine(count=error)
    with pytest.raises(DeviceError) as caught:
        dispatch.find_gpu("cuda")
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__cause__ is error


def test_a_device_that_does_not_exist(machine: Machine) -> None:
    machine([(9, 0), (8, 0)])
    with pytest.raises(DeviceError, match=says("cuda:2 does not exist; this machine has cuda:0, cuda:1")):
        open_device("cuda:2")
    with pytest.raises(DeviceError, match=says('device="cuda:2" cannot be served: cuda:2 does not exist')):
        hmf.ExplicitALS(device="cuda:2").fit(planted())


def test_cpu_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "open_device", lambda name: pytest.fail("looked for a GPU"))
    assert dispatch.find_gpu("cpu") == (None, "asked for")
    hmf.ExplicitALS(factors=2, iterations=1, device="cpu").fit(planted())


# ------------------------------------------------------------------------------------------------------ what is there


def test_a_device_is_described_and_opened_once(machine: Machine) -> None:
    module = machine([(8, 6), (9, 0)])
    device = open_device("cuda:1")
    assert device.spec == DeviceSpec("Fake", 1, (9, 0), 132, 227 * 1024, 60 << 20, 16 * GIB, 10 * GIB)
    assert str(device.spec) == "cuda:1 (Fake, sm_90, 10.0 GiB free)"
    module.pool.free = GIB  # what CuPy keeps for later
    assert open_device("cuda:1") is device
    assert device.spec.free_bytes == 11 * GIB
    assert open_device() is open_device("cuda:0") is not device
    assert dispatch.find_gpu("cuda:1") == (device.spec, "asked for")
    assert dispatch.find_gpu("auto") == (open_device().spec, "there is a GPU")


def test_a_device_that_could_not_be_opened_is_tried_again(machine: Machine) -> None:
    machine([])
    with pytest.raises(DeviceError):
        open_device()
    machine()
    assert open_device().index == 0


def test_status_tells_of_each_gpu(machine: Machine) -> None:
    machine([(9, 0), (7, 0)])
    usable, reason = dispatch.gpu_status()
    assert usable
    assert reason.startswith("cuda:0 (Fake, sm_90, 10.0 GiB free); cuda:1 (Fake) has compute capability 7.0;")


def test_memory_limit_of_the_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    module = machine()
    monkeypatch.setenv(MEMORY_LIMIT, "2 GiB")
    device = open_device()
    assert device.spec.free_bytes == 2 * GIB
    module.pool.used = GIB
    assert device.free_bytes() == GIB
    module.pool.used = 3 * GIB
    assert device.free_bytes() == 0
    module.pool.used = 2 * GIB - 400
    assert device.empty((10, 10), np.float32).shape == (10, 10)
    for make in (device.empty, device.zeros):
        with pytest.raises(DeviceMemoryError, match=says(f"would pass {MEMORY_LIMIT} (2,048.0 MiB")):
            make(101, np.float32)
    monkeypatch.setenv(MEMORY_LIMIT, "")
    assert device.free_bytes() == 10 * GIB


def test_a_memory_limit_that_is_no_size_names_the_variable(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setenv(MEMORY_LIMIT, "much")
    message = says(f"{MEMORY_LIMIT} must be a size such as", "got 'much'")
    for device in ("auto", "cuda"):
        with pytest.raises(ValueError, match=message):
            hmf.ExplicitALS(device=device).fit(planted())
    usable, reason = dispatch.gpu_status()  # which never raises
    assert not usable
    assert re.search(message, reason)


def test_memory_limit_of_a_model() -> None:
    with pytest.raises(ValueError, match=says("gpu_memory_limit must be a size such as", "got 'much'")):
        hmf.ExplicitALS(gpu_memory_limit="much", device="cpu").fit(planted())


# ------------------------------------------------------------------------------------------------ memory and copies


def test_arrays_go_to_the_device_and_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "COPY_CHUNK", 64)
    monkeypatch.setattr(devices, "SMALL_COPY", 0)
    module = machine()
    device = open_device()
    for array in (
        np.arange(100, dtype=np.float32).reshape(20, 5), np.arange(16.0), np.arange(16, dtype=np.int8),
        np.arange(17)[::2], np.arange(12).reshape(3, 4).T, np.zeros((0, 3), dtype=np.float32),
    ):  # fmt: skip
        uploaded = device.upload(array)
        assert device.owns(uploaded)
        assert uploaded.flags.c_contiguous
        assert uploaded.dtype == array.dtype
        back = device.download(uploaded)
        assert type(back) is np.ndarray
        np.testing.assert_array_equal(back, array)
    assert len(module.waits) >= 5  # copies come after the work before them, whose memory they may reuse
    np.testing.assert_array_equal(device.zeros(3, np.int32), [0, 0, 0])
    device.synchronize()
    np.testing.assert_array_equal(device.matmul(np.eye(2), np.ones((2, 2))), np.ones((2, 2)))


def test_a_look_at_a_few_bytes_waits_for_no_large_copy(machine: Machine) -> None:
    machine()
    device = open_device()
    few, many = device.upload(np.arange(5)), device.upload(np.arange(devices.SMALL_COPY))
    results: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda a=a: results.append(device.download(a)), daemon=True) for a in (few, many)
    ]
    with device._lock:  # as in the midst of a large copy
        for thread in threads:
            thread.start()
        threads[0].join(10)
        assert len(results) == 1
        np.testing.assert_array_equal(results[0], np.arange(5))
    threads[1].join(10)
    assert len(results[1]) == devices.SMALL_COPY


def test_work_beside_other_work(machine: Machine) -> None:
    """It begins behind what was launched before; who waits for its mark waits for all of it."""
    module = machine()
    device, first = open_device(), module.streams[0]
    for _ in range(2):
        with device.beside(device.record()):
            second = module.streams[-1]
            mark = device.record()
        assert module.streams == [first]
        device.wait(mark)
    assert second is not first
    assert second.priority < 0
    assert module.waits == [(second, first), (first, second)] * 2


def test_arrays_of_others_are_not_the_devices(machine: Machine) -> None:
    machine()
    device = open_device()
    assert not device.owns(np.zeros(3))
    elsewhere = device.zeros(3, np.float32)
    elsewhere.index = 1
    assert not device.owns(elsewhere)


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("empty", lambda device: device.empty(3, np.float32)),
        ("zeros", lambda device: device.zeros(3, np.float32)),
        ("empty", lambda device: device.upload(np.ones(3))),
        ("copy", lambda device: device.upload(np.ones(3))),
        ("copy", lambda device: device.download(device.zeros(devices.SMALL_COPY, np.float32))),
        ("synchronize", lambda device: device.download(device.zeros(devices.SMALL_COPY, np.float32))),
        ("synchronize", lambda device: device.synchronize()),
        ("matmul", lambda device: device.matmul(np.eye(2), np.eye(2))),
        ("launch", lambda device: device.kernel("text", "f", ())((1,), (32,), (), 0)),
    ],
)
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OutOfMemoryError("Out of memory allocating\n 12 bytes"), DeviceMemoryError, "cuda:0 is out of memory: Out of"),
        (CUDARuntimeError("cudaErrorMemoryAllocation"), DeviceMemoryError, "cuda:0 is out of memory: cudaErrorMem"),
        (CUDARuntimeError("cudaErrorIllegalAddress"), DeviceError, "cuda:0 failed: CUDARuntimeError: cudaErrorIll"),
        (CUDADriverError("CUDA_ERROR_UNKNOWN"), DeviceError, "cuda:0 failed: CUDADriverError: CUDA_ERROR_UNKNOWN"),
        (
            ImportError("libcublas.so.13: cannot open"),
            DeviceError,
            'CuPy cannot load a library of CUDA: ImportError: libcublas.so.13: cannot open; pip install "cupy-cuda13x',
        ),
    ],
    ids=["pool", "allocation", "runtime", "driver", "library"],
)
def test_errors_of_cuda_become_ours(
    machine: Machine, where: str, call: Any, error: Exception, kind: type[Exception], message: str
) -> None:
    module = machine()
    device = open_device()
    module.errors[where] = error
    with pytest.raises(DeviceError, match=says(message)) as caught:
        call(device)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, MemoryBudgetError) == (kind is DeviceMemoryError)


# --------------------------------------------------------------------------------------------------------- kernels


def test_kernels_are_compiled_once_and_launched(machine: Machine) -> None:
    module = machine()
    device = open_device()
    kernel = device.kernel("text", "f", ("RANK=3", "IMPLICIT=1"))
    assert device.kernel("text", "f", ("RANK=3", "IMPLICIT=1")) is kernel
    assert module.compiled == [("text", ("-std=c++17", "-DRANK=3", "-DIMPLICIT=1"), "nvrtc")]
    assert device.kernel("text", "f", ("RANK=4",)) is not kernel
    kernel((5,), (32,), [np.int64(1)], 1000)
    kernel((5,), (32,), [np.int64(1)], 100_000)
    kernel((5,), (32,), [np.int64(1)], 70_000)
    assert [shared for *_, shared, _ in module.launches] == [1000, 100_000, 70_000]
    assert [limit for *_, limit in module.launches] == [48 * 1024, 100_000, 100_000]
    assert module.launches[0][:3] == ((5,), (32,), (np.int64(1),))


def test_a_kernel_that_does_not_compile(machine: Machine) -> None:
    error = CompileException("x.cu(3): error: identifier is undefined")
    machine(compile=error)
    message = says("the kernel f does not compile for cuda:0 with RANK=3", "a fault of hybridmf", "x.cu(3): error")
    with pytest.raises(DeviceError, match=message) as caught:
        open_device().kernel("text", "f", ("RANK=3",))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, OSError])
def test_without_nvrtc(machine: Machine, kind: type[Exception]) -> None:
    error = kind("CuPy failed to load libnvrtc.so.13")
    machine(compile=error)
    message = says("CuPy cannot load NVRTC", "libnvrtc.so.13; ", 'pip install "cupy-cuda13x[ctk]"')
    with pytest.raises(DeviceError, match=message) as caught:
        open_device().kernel("text", "f", ())
    assert caught.value.__cause__ is error


def test_other_errors_of_the_compiler_are_not_hidden(machine: Machine) -> None:
    machine(compile=OSError("no space left on device"))
    with pytest.raises(OSError, match="no space left"):
        open_device().kernel("text", "f", ())


# ---------------------------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("file", ["fused_als.cu", "msgd.cu"])
def test_sources_are_found_and_spliced(file: str) -> None:
    """Headers of headers, and those that several name, too."""
    text = launch.source_text(file)
    assert not re.search(r"^#(include|pragma once)", text, flags=re.MULTILINE)
    assert text.count("constexpr int WARP = 32;") == text.count("void mma_tf32(") == 1
    assert launch.kernel_folder().is_dir()


def test_an_installation_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "site" / "hybridmf" / "gpu" / "launch.py"))
    with pytest.raises(FileNotFoundError, match=says("no kernel sources beside", "install hybridmf again")):
        launch.kernel_folder()


def test_constants_become_options() -> None:
    constants = {"REAL": np.dtype(np.float64), "RANK": 7, "IMPLICIT": True, "FLAG": np.False_, "NAME": "local"}
    assert launch.constant_texts(constants) == ("FLAG=0", "IMPLICIT=1", "NAME=local", "RANK=7", "REAL=double")
    assert launch.constant_texts({"REAL": np.dtype(np.float32)}) == ("REAL=float",)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 4)), np.zeros((3, 5), dtype=np.float32), np.zeros(12, dtype=np.float32),
        np.zeros((4, 3), dtype=np.float32).T, np.zeros((3, 8), dtype=np.float32)[:, ::2],
    ],
    ids=["dtype", "shape", "axes", "Fortran order", "strides"],
)  # fmt: skip
def test_arguments_are_checked(array: np.ndarray) -> None:
    launch.check("factors", np.zeros((3, 4), dtype=np.float32), np.float32, (3, 4))
    launch.check("factors", np.zeros((3, 4), dtype=np.float32), np.float32, (None, 4))
    wanted = says("factors must be float32, C order, shape (3, 4); got", str(array.dtype), str(array.shape))
    with pytest.raises(TypeError, match=wanted):
        launch.check("factors", array, np.float32, (3, 4))


def test_host_arrays_are_refused(machine: Machine) -> None:
    machine()
    device = open_device()
    launch.check_not_host(device, factors=device.zeros(3, np.float32))
    with pytest.raises(TypeError, match=says("ratings is a numpy.ndarray, not an array on Fake")):
        launch.check_not_host(device, factors=device.zeros(3, np.float32), ratings=np.zeros(3, dtype=np.float32))


def test_entries_say_what_kernels_are_compiled_for() -> None:
    indices, ratings, offsets = np.zeros(3, dtype=np.int32), np.ones(3), np.ones(5)
    plain = launch.Entries(indices, ratings)
    assert plain.constants == {"REAL": np.float64, "IMPLICIT": False, "HAS_OFFSETS": False}
    assert plain.arrays[2] is ratings
    biased = launch.Entries(indices, ratings.astype(np.float32), offsets, True, 2.0, 0.5)
    assert biased.constants == {"REAL": np.float32, "IMPLICIT": True, "HAS_OFFSETS": True}
    assert biased.arrays[2] is offsets
    assert biased.scalars == (2.0, 0.5) and all(type(scalar) is np.float32 for scalar in biased.scalars)


# ------------------------------------------------------------------------------------------------------------- plans

H200 = DeviceSpec("H200", 0, (9, 0), 132, 227 * 1024, 60 << 20, 141 * GIB, 140 * GIB)
T4 = DeviceSpec("T4", 1, (7, 5), 40, 64 * 1024, 4 << 20, 16 * GIB, 15 * GIB)
NETFLIX = ((480_189, 17_770), 99_072_112)
EXPLICIT = Objective("explicit", 0.05)
IMPLICIT = Objective("implicit", 0.05)


@pytest.fixture
def plan_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Plan of a fit on a given GPU."""

    def make(
        spec: DeviceSpec = H200,
        objective: Objective = EXPLICIT,
        size: tuple[tuple[int, int], int] = NETFLIX,
        **options: Any,
    ) -> Plan:
        monkeypatch.setattr(devices, "open_device", lambda name: SimpleNamespace(spec=spec))
        defaults = hmf.ExplicitALS(num_threads=1).get_params() | {"device": "cuda"}
        names = Settings.__dataclass_fields__
        settings = Settings.check(**{name: value for name, value in (defaults | options).items() if name in names})
        return make_plan(objective, settings, *size)

    return make


def test_plan_of_our_kernels(plan_on: Callable[..., Plan]) -> None:
    plan = plan_on(factors=100)
    assert (plan.device, plan.gpu, plan.reason) == ("cuda:0", H200, "asked for")
    assert (plan.assembly, plan.solver, plan.reorder, plan.precision) == ("fused", "cholesky", "none", "float32")
    assert plan.segment == plan_fused.SEGMENT
    assert plan.batch_slots >= 1
    assert plan_on(factors=8).batch_slots == 2 * (plan.nnz // plan.segment) + 1  # only long rows need any
    assert plan.bytes["batch"] == plan.batch_slots * 4 * plan_fused.partial_floats(100)
    assert plan.bytes["factors"] == (480_189 * 2 + 17_770) * 100 * 4
    assert plan.bytes["ratings"] > 2 * 8 * plan.nnz
    assert plan.total_bytes == sum(plan.bytes.values()) < H200.free_bytes
    assert not plan.notes
    assert plan_on(factors=99).bytes["factors"] == plan.bytes["factors"]  # rows are whole pieces of 16 bytes
    check_memory(plan)


@pytest.mark.parametrize(
    ("options", "objective", "spec", "why"),
    [
        ({"factors": 129}, EXPLICIT, H200, "rank 129 is beyond 128"),
        ({"factors": 128}, Objective("explicit", 0.1, biases=True), H200, "rank 129 is beyond 128"),
        ({"dtype": "float64"}, EXPLICIT, H200, "dtype float64 has no tensor-core products"),
        ({}, EXPLICIT, T4, "compute capability 7.5 is below 8.0"),
        ({}, Objective("implicit", 0.1, unobserved_weight=1.5), H200, "unobserved_weight 1.5 above 1"),
        ({}, EXPLICIT, DeviceSpec("Small", 0, (8, 0), 1, 8192, 0, GIB, 200 * GIB), "rank 64 needs"),
    ],
    ids=["rank", "rank with bias", "float64", "Turing", "negative weights", "little shared memory"],
)
def test_plan_where_our_kernels_do_not_serve(
    plan_on: Callable[..., Plan], options: dict, objective: Objective, spec: DeviceSpec, why: str
) -> None:
    small = ((1000, 500), 20_000)
    plan = plan_on(spec, objective, small, **options)
    assert plan.assembly == "sparse_syrk"
    assert plan.segment == plan_types.GPU_SEGMENT
    assert any(note.startswith("assembly sparse_syrk instead of fused: ") and why in note for note in plan.notes)
    assert f"note      {plan.notes[0]}" in str(plan)
    with pytest.raises(ValueError, match=says('assembly="fused" cannot serve this: ', why, 'use assembly="auto"')):
        plan_on(spec, objective, small, assembly="fused", **options)
    with pytest.raises(ValueError, match=says("precision='tf32' is for the fused kernels: ", why, "use precision=")):
        plan_on(spec, objective, small, precision="tf32", **options)


@pytest.mark.parametrize("assembly", ["sparse_syrk", "mo_als", "bals"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_plan_of_published_assemblies(plan_on: Callable[..., Plan], assembly: str, dtype: str) -> None:
    plan = plan_on(assembly=assembly, dtype=dtype)
    assert (plan.assembly, plan.dtype, plan.segment) == (assembly, dtype, plan_types.GPU_SEGMENT)
    assert plan.reorder == ("both" if assembly == "bals" else "none")
    assert (plan.tile_rows > 0) == (plan.tile_cols > 0) == ("tiles" in plan.bytes) == (assembly == "bals")
    assert plan.bytes["batch"] == plan.batch_slots * 65 * 64 * np.dtype(dtype).itemsize <= plan_types.GPU_BATCH_BYTES
    folded = plan.for_fold_in()
    # without tiles: what serves every weight, rank and type
    assert folded.assembly == ("mo_als" if assembly == "mo_als" else "sparse_syrk")
    assert folded.segment == plan_types.GPU_SEGMENT
    assert (folded.solver, folded.reorder, folded.tile_rows) == ("cholesky", "none", 0)
    with pytest.raises(ValueError, match=says("precision='bf16' is for the fused kernels", "use precision='float32'")):
        plan_on(assembly=assembly, dtype=dtype, precision="bf16")


@pytest.mark.parametrize("precision", ["bf16x3", "tf32", "bf16", "float16"])
def test_plan_of_other_precisions(plan_on: Callable[..., Plan], precision: str) -> None:
    plan = plan_on(precision=precision, objective=IMPLICIT)
    assert (plan.assembly, plan.precision) == ("fused", precision)
    assert f"{precision} products" in str(plan)


def test_plan_refuses_what_only_cpus_do(plan_on: Callable[..., Plan]) -> None:
    with pytest.raises(
        ValueError, match=says("solver='subspace' runs on the CPU only; on a GPU use one of cholesky, cg")
    ):
        plan_on(solver="subspace")
    for assembly in ("simd", "rank1", "blas3"):
        message = says(f"assembly={assembly!r} runs on the CPU only; on a GPU use one of fused, sparse_syrk, mo_als")
        with pytest.raises(ValueError, match=message):
            plan_on(assembly=assembly)
    assert plan_on(solver="cg", assembly="mo_als").solver == "cg"


def test_plan_text_of_a_gpu(plan_on: Callable[..., Plan]) -> None:
    text = str(plan_on(factors=64, objective=IMPLICIT))
    for part in (
        "device    cuda:0: asked for",
        "problem   480,189 users x 17,770 items, 99,072,112 entries, implicit feedback",
        "solver    cholesky, assembly fused; reorder none",
        "kernels   cuda:0 (H200, sm_90, 140.0 GiB free), float32 products, rows cut after 4,096 entries, ",
        "systems at a time", "work      ", "memory    ", "ratings ", "factors ", "batch ",
    ):  # fmt: skip
        assert part in text, part
    assert "with tiles of " in str(plan_on(assembly="bals"))


# ---------------------------------------------------------------------------------------------------- plans of memory


def test_batches_follow_the_memory(plan_on: Callable[..., Plan]) -> None:
    fixed = sum(size for name, size in plan_on(assembly="mo_als").bytes.items() if name != "batch")
    slot = 65 * 64 * 4

    def free(size: int) -> DeviceSpec:
        return DeviceSpec("H200", 0, (9, 0), 132, 227 * 1024, 60 << 20, 141 * GIB, size)

    for slots in (1, 2, 1000):
        plan = plan_on(free(fixed + slots * slot + slot // 2), assembly="mo_als")
        assert plan.batch_slots == slots
        check_memory(plan)
    assert plan_on(assembly="mo_als").batch_slots == plan_types.GPU_BATCH_BYTES // slot
    assert plan_on(size=((100, 50), 3000), assembly="mo_als").batch_slots == 101  # there are no more rows
    bals = plan_on(free(0), assembly="bals")
    assert bals.batch_slots == bals.tile_rows  # whole blocks of rows


def test_a_fit_that_does_not_fit_is_refused(plan_on: Callable[..., Plan]) -> None:
    plan = plan_on(T4, factors=512, gpu_memory_limit="10MB")
    assert plan.gpu is not None and plan.gpu.free_bytes == 10**7
    needs = (
        "the fit needs about 4,2", "MiB on T4 and 9.5 MiB are free (ratings 1,5", "factors 1,9", "batch ",
        'use fewer factors, a GPU with more memory, free what other programs hold, or device="cpu"',
    )  # fmt: skip
    with pytest.raises(DeviceMemoryError, match=says("the fit needs about ", *needs[1:])) as caught:
        check_memory(plan)
    assert isinstance(caught.value, MemoryError)


def test_memory_limits_take_the_smaller(plan_on: Callable[..., Plan]) -> None:
    assert plan_on(gpu_memory_limit="6GB").gpu.free_bytes == 6 * 10**9
    assert plan_on(gpu_memory_limit=500 * GIB).gpu.free_bytes == 140 * GIB


# ------------------------------------------------------------------------------------------------------------- "auto"


def test_auto_takes_a_gpu_for_large_work(plan_on: Callable[..., Plan]) -> None:
    plan = plan_on(device="auto")
    assert (plan.device, plan.assembly) == ("cuda:0", "fused")
    assert re.fullmatch(r"there is a GPU: 15 iterations in about .* on the GPU, .* on the CPU", plan.reason)
    assert plan_on(device="auto", size=((100, 50), 1000), precision="tf32").device == "cuda:0"
    assert plan_on(device="auto", size=((100, 50), 1000), assembly="mo_als").device == "cuda:0"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": ((100, 50), 1000)}, "of them set-up (H200 was found)"),
        ({"solver": "subspace"}, "solver='subspace' is the CPU's (H200 was found)"),
        ({"assembly": "blas3"}, "assembly='blas3' is the CPU's (H200 was found)"),
        ({"gpu_memory_limit": "5MB"}, "4.8 MiB are free (ratings"),
        ({"gpu_memory_limit": "1GB", "assembly": "bals"}, "953.7 MiB are free (ratings"),
    ],
    ids=["small", "solver", "assembly", "memory", "memory for tiles"],
)
def test_auto_takes_the_cpu_where_it_serves_better(
    plan_on: Callable[..., Plan], options: dict, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hybridmf"):
        plan = plan_on(device="auto", **options)
    assert (plan.device, plan.gpu) == ("cpu", None)
    assert reason in plan.reason
    assert plan.reason.endswith("(H200 was found)")
    assert "device='auto' chose the CPU: " in caplog.text


def test_auto_refuses_a_gpu_assembly_that_does_not_fit(plan_on: Callable[..., Plan]) -> None:
    plan = plan_on(device="auto", assembly="mo_als", gpu_memory_limit="5MB")
    assert plan.device == "cuda:0"
    with pytest.raises(DeviceMemoryError):
        check_memory(plan)


def test_auto_refuses_a_gpu_assembly_where_there_is_no_gpu(machine: Machine) -> None:
    machine(None)
    message = says(
        "assembly='mo_als' is a GPU's, and there is none (no GPU: CuPy is not installed", 'use assembly="auto"'
    )
    with pytest.raises(DeviceError, match=message):
        hmf.ExplicitALS(assembly="mo_als").fit(planted())


# ------------------------------------------------------------------------------------------------------ a fit on a GPU


def test_a_fit_goes_to_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def opened(name: str = "cuda") -> EmulatedDevice:
        asked.append(name)
        return EmulatedDevice()

    monkeypatch.setattr(devices, "open_device", opened)
    monkeypatch.setattr("hybridmf.gpu.als.GpuALS", _reached)
    with pytest.raises(InterruptedError):
        hmf.ExplicitALS(factors=4, device="cuda").fit(planted())
    assert asked == ["cuda", "cuda:0"]


def _reached(*_: Any) -> Any:
    raise InterruptedError


def test_cuda_device_is_a_device(machine: Machine) -> None:
    """The emulated device has every method of the real one, so that tests of one speak for the other."""
    machine()
    real = {name for name in dir(CudaDevice) if not name.startswith("_")}
    assert real - {"look"} <= set(dir(EmulatedDevice()))


def test_a_part_that_cannot_be_read_waits_for_the_others(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the same file, which is closed next, into a buffer that is filled again."""
    machine()
    copier, seen = open_device().copier(), []

    @contextlib.contextmanager
    def reader(raw: np.ndarray) -> Iterator[Any]:
        def read(buffer: np.ndarray, start: int) -> None:
            if not start:
                raise StoreError("the disk is gone")
            time.sleep(0.05)
            seen.append("read")

        try:
            yield read
        finally:
            seen.append("closed")

    monkeypatch.setattr(copiers, "reader_of", reader)
    monkeypatch.setattr(copiers, "STAGING_PART", 100)
    with pytest.raises(StoreError, match="the disk is gone"):
        copier.copy(open_device().zeros(400, np.uint8), np.zeros(400, np.uint8))
    assert seen == ["read"] * 3 + ["closed"]


def test_parts_of_one_array_are_page_locked_beside_each_other(machine: Machine, caplog: Any) -> None:
    """The page at which two parts meet can be locked for one of them only."""
    module, page, locked = machine(), mmap.PAGESIZE, {}

    def register(first: int, size: int, flags: int) -> None:
        pages = set(range(first // page, (first + size - 1) // page + 1))
        if any(pages & others for others in locked.values()):
            raise CUDARuntimeError("already registered")
        locked[first] = pages

    module.cuda.runtime.hostRegister, module.cuda.runtime.hostUnregister = register, locked.pop
    device = open_device()
    whole = np.arange(5 * page, dtype=np.int32)
    parts = np.split(whole, [page + 100, 3 * page + 7])
    copiers = [device.copier() for _ in parts]
    with caplog.at_level(logging.INFO, "hybridmf"):
        assert [copiers[k].pin(part) for k, part in enumerate(parts)] == [True] * 3
        assert not device.copier().pin(parts[1])
    assert len(locked) == 3 and "cannot be page-locked" in caplog.text
    for k, part in enumerate(parts):
        target = device.zeros(len(part), np.int32)
        copiers[k].copy(target, part)  # what is not in whole pages goes through buffers
        np.testing.assert_array_equal(target, part)
    del copiers
    gc.collect()
    assert not locked
    few = np.zeros(3, dtype=np.int32)
    locked[0] = {few.ctypes.data // page}
    assert not device.copier().pin(few)  # no whole page inside
