"""Devices by name, what happens where CUDA is missing, memory, copies and errors; on a stand-in for CuPy."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import re
import threading
import time
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.system import parse_bytes
from hybridmf.device import compiler
from hybridmf.device import copier as copiers
from hybridmf.device import cuda as devices
from hybridmf.device.arguments import Struct
from hybridmf.device.cuda import MEMORY_LIMIT, CudaDevice, DeviceSpec, open_device, parse_device
from hybridmf.device.recording import Recording, current_recording
from hybridmf.errors import DeviceError, DeviceLostError, DeviceMemoryError, MemoryBudgetError, StoreError
from hybridmf.plan import dispatch
from hybridmf.plan import types as plan_types
from support.emulated import EmulatedDevice
from support.fake_cupy import (
    Array,
    CompileException,
    CUDADriverError,
    CUDARuntimeError,
    Function,
    Machine,
    OutOfMemoryError,
)
from support.messages import says
from support.ratings import planted

pytestmark = pytest.mark.usefixtures("forget_devices")

GIB = 1 << 30
INSTALL = 'pip install "hybridmf[cuda13]" (driver 580 or later) or "hybridmf[cuda12]"'


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
def test_devices_that_users_cannot_request(device: Any, kind: type[Exception], part: str) -> None:
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
    model = hmf.ExplicitALS(biases=False, factors=2, device="cuda")
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
        model = hmf.ExplicitALS(biases=False, factors=2, iterations=1, device="auto").fit(planted())
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
        hmf.ExplicitALS(biases=False, device="cuda:2").fit(planted())


def test_device_cpu_queries_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "open_device", lambda name: pytest.fail("looked for a GPU"))
    assert dispatch.find_gpu("cpu") == (None, "asked for")
    hmf.ExplicitALS(biases=False, factors=2, iterations=1, device="cpu").fit(planted())


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


def test_status_describes_each_gpu(machine: Machine) -> None:
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
            hmf.ExplicitALS(biases=False, device=device).fit(planted())
    usable, reason = dispatch.gpu_status()  # which never raises
    assert not usable
    assert re.search(message, reason)


def test_memory_limit_of_a_model() -> None:
    with pytest.raises(ValueError, match=says("gpu_memory_limit must be a size such as", "got 'much'")):
        hmf.ExplicitALS(biases=False, gpu_memory_limit="much", device="cpu").fit(planted())


# ------------------------------------------------------------------------------------------------ memory and copies


def test_arrays_of_other_libraries_are_copied(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    module = machine()
    device, given = open_device(), np.arange(6.0)

    class Older:
        __cuda_array_interface__ = given.__array_interface__

    for array in (given, Older()):  # NumPy's arrays have DLPack
        copied = device.adopt(array)
        assert copied.tolist() == given.tolist() and not np.shares_memory(copied, given)
    module.errors["from_dlpack"] = CUDARuntimeError("cudaErrorInvalidDevice")
    with pytest.raises(DeviceError, match="failed"):
        device.adopt(given)
    monkeypatch.setenv(MEMORY_LIMIT, "40")
    with pytest.raises(DeviceMemoryError, match="would pass"):
        device.adopt(Older())


def test_arrays_go_to_the_device_and_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copiers, "COPY_CHUNK", 64)
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


def test_without_pinned_memory_copies_take_a_detour(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copiers, "COPY_CHUNK", 64)
    monkeypatch.setattr(devices, "SMALL_COPY", 0)
    module = machine()

    def refuse(size: int) -> bytearray:
        raise CUDARuntimeError("cudaErrorMemoryAllocation")

    module.cuda.alloc_pinned_memory = refuse
    array = np.arange(500.0)
    with caplog.at_level("INFO", "hybridmf"):
        device = open_device()
        np.testing.assert_array_equal(device.download(device.upload(array)), array)
    assert "no more memory of the host can be page-locked" in caplog.text


def test_a_small_download_waits_for_no_large_copy(machine: Machine) -> None:
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


def test_work_is_forked_and_joined(machine: Machine) -> None:
    """It starts after earlier launches, and later ones come after all of it."""
    module = machine()
    device, first = open_device(), module.streams[0]
    device.fork()
    device.join()
    ((second, begun), (current, ended)) = module.waits
    assert second is not first and second.priority < 0
    assert (begun, current, ended) == (first, first, second)


def data_on(device_id: int, copied: list[Any]) -> Any:
    """An array of 24 bytes that notes the copies to it."""
    note = lambda source, size, stream: copied.append((source, size, stream))  # noqa: E731
    data = SimpleNamespace(device_id=device_id, copy_from_device_async=note)
    return SimpleNamespace(flags=SimpleNamespace(c_contiguous=True), nbytes=24, data=data)


def test_copies_from_other_gpus_have_their_own_stream(machine: Machine) -> None:
    """A copy waits for the marks; the mark behind it is on the stream of the copy, as is one behind all copies."""
    module = machine()
    device, first, copied = open_device(), module.streams[0], []
    target, source = data_on(0, copied), data_on(1, [])
    arrived = device.fetch(target, source, [device.record(), device.record()])
    ((given, size, stream),) = copied
    assert (given, size) == (source.data, 24) and stream is not first
    assert module.waits == [(stream, first)] * 2
    assert arrived.event.stream is stream and device.fetched().event.stream is stream


def test_no_copy_between_gpus_runs_on_the_null_stream(machine: Machine) -> None:
    """It would wait for all that was launched before it on both, and all launches after it would wait for it."""
    module, copied = machine(), []
    device, module.streams[0].ptr = open_device(), 0
    device.receive(data_on(0, copied), data_on(0, []))
    with pytest.raises(AssertionError, match="would wait for both GPUs"):
        device.receive(data_on(0, copied), data_on(1, []))
    with device.aside():
        device.receive(data_on(0, copied), data_on(1, []))
    assert len(copied) == 2


def test_work_aside_has_a_third_stream(machine: Machine) -> None:
    """So have copies from other GPUs that are made in it."""
    module = machine()
    device, first, copied = open_device(), module.streams[0], []
    one = data_on(1, copied)
    with device.aside():
        third = module.streams[-1]
        device.receive(one, one)
        mark = device.record()
    device.fork()
    second = module.waits[-1][0]
    assert module.streams == [first] and len({id(stream) for stream in (first, second, third)}) == 3
    assert third.priority < 0
    assert copied == [(one.data, 24, third)] and mark.event.stream is third


def test_a_device_that_is_current_is_not_entered(machine: Machine) -> None:
    module, entered = machine(), []
    device = open_device()
    module.cuda.Device = lambda index: contextlib.nullcontext(entered.append(index))
    with device.active():
        assert entered == [0]
        device._current = lambda: 0
        with device.active():
            assert entered == [0]


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
        (CUDARuntimeError("cudaErrorIllegalAddress"), DeviceLostError, "cuda:0 failed: CUDARuntimeError: cudaErrorI"),
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


def test_kernels_are_compiled_ahead(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = machine()
    device, programs = open_device(), [("text", "f", ("A=1",)), ("text", "g", ()), ("text", "f", ("A=1",))]
    compile_it, may_go = module.RawModule, threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        assert may_go.wait(20)
        return compile_it(*arguments, **options)

    monkeypatch.setattr(module, "RawModule", slow)
    monkeypatch.setattr(compiler, "LONG_COMPILATION", 0)
    device.compile_ahead(programs)
    assert not module.compiled  # the call has not waited
    threading.Timer(0.05, may_go.set).start()
    with caplog.at_level("INFO", "hybridmf"):
        kernels = [device.kernel(*each) for each in programs]
    assert kernels[0] is kernels[2] and len(module.compiled) == 2
    assert "compiling kernels for Fake, once per machine" in caplog.text
    device.compile_ahead(programs)
    assert device.kernel(*programs[0]) is kernels[0] and len(module.compiled) == 2


def test_errors_of_kernels_compiled_ahead_come_with_their_use(machine: Machine) -> None:
    module = machine()
    device = open_device()
    module.errors["compile"] = CompileException("error: no such thing")
    device.compile_ahead([("text", "f", ())])
    with pytest.raises(DeviceError, match="the kernel f does not compile"):
        device.kernel("text", "f", ())
    del module.errors["compile"]
    device.kernel("text", "f", ())


def test_kernels_are_compiled_once_and_launched(machine: Machine) -> None:
    module = machine()
    device = open_device()
    kernel = device.kernel("text", "f", ("RANK=3", "IMPLICIT=1"))
    assert device.kernel("text", "f", ("RANK=3", "IMPLICIT=1")) is kernel
    text = "#define RANK 3\n#define IMPLICIT 1\n#line 1\ntext"  # the options are those of all kernels
    assert module.compiled == [(text, ("-std=c++17",), "nvrtc")]
    assert device.kernel("text", "f", ("RANK=4",)) is not kernel
    kernel((5,), (32,), [np.int64(1)], 1000)
    kernel((5,), (32,), [np.int64(1)], 100_000)
    kernel((5,), (32,), [np.int64(1)], 70_000)
    assert [shared for *_, shared, _ in module.launches] == [1000, 100_000, 70_000]
    assert [limit for *_, limit in module.launches] == [48 * 1024, 100_000, 100_000]
    assert module.launches[0][:3] == ((5,), (32,), (np.int64(1),))


def test_threads_do_not_lower_the_shared_memory_of_each_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, more_is_allowed = machine(), threading.Event()
    kernel = open_device().kernel("text", "f", ())

    def read(self: Any) -> int:
        limit = vars(self).get("limit", 48 * 1024)
        if threading.current_thread() is smaller:  # which stands still here while the other one raises the limit
            more_is_allowed.wait(0.2)
        return limit

    def write(self: Any, limit: int) -> None:
        self.limit = limit
        if limit == 100_000:
            more_is_allowed.set()
            smaller.join(0.2)

    monkeypatch.setattr(Function, "max_dynamic_shared_size_bytes", property(read, write))
    smaller = threading.Thread(target=kernel, args=((5,), (32,), [], 70_000))
    smaller.start()
    kernel((5,), (32,), [], 100_000)
    smaller.join()
    assert len(module.launches) == 2 and all(limit >= shared for *_, shared, limit in module.launches)


def test_a_prepared_launch_reads_its_structs_when_it_is_made(machine: Machine) -> None:
    """Sizes are those of the kernel, arrays are passed by address, fields may change between launches."""
    module = machine()
    device = open_device()
    array, other = (np.zeros(3).view(Array) for _ in range(2))
    struct = Struct((array, np.int64(7)), device.address)
    launch = device.prepare(("text", "f", ()), (5,), (32,), [struct, other], 100_000)
    launch()
    struct.set((other, np.int64(8)))
    launch()
    first, second = (address.ctypes.data for address in (array, other))
    assert [given for _, _, given, *_ in module.launches] == [(first, second), (second, second)]
    assert struct.packed.tolist() == (second, 8)
    assert module.launches[0][:2] == ((5, 1, 1), (32, 1, 1)) and module.launches[0][3:] == (100_000, 100_000)


def test_recorded_calls_are_made_again(machine: Machine) -> None:
    """In their order, with the same streams, events and addresses; structs have their fields of that time."""
    module = machine()
    device, other = open_device(), np.zeros(3).view(Array)
    struct = Struct((other, np.int64(7)), device.address)
    launch = device.prepare(("text", "f", ()), (5,), (32,), [struct, other])
    target, source = np.zeros(3).view(Array), np.arange(3.0).view(Array)
    copies = SimpleNamespace(ptr=target.ctypes.data, device_id=0, copy_from_device_async=lambda *given: None)
    proxy = SimpleNamespace(flags=target.flags, nbytes=target.nbytes, data=copies)
    recording = Recording([device])
    with recording.made():
        launch()
        mark = device.record()
        recording.pause()
        device.wait(mark)
        device.receive(proxy, source)
        device.fork()
        device.join()
    assert current_recording() is None and recording.is_current()
    launch()  # is not recorded
    made, waits, stream = len(module.launches), len(module.waits), module.streams[-1].ptr
    struct.set((target, np.int64(8)))
    repeat = recording.repeat()
    next(repeat)
    ((*_, given, _, _),) = module.launches[made:]
    assert given == (target.ctypes.data, other.ctypes.data)
    assert module.repeated == [("record", mark.ptr, stream)] and not target.any()
    assert next(repeat, "end") == "end"
    np.testing.assert_array_equal(target, source)
    assert module.repeated[1] == ("wait", stream, mark.ptr)
    assert [call[0] for call in module.repeated[2:]] == ["record", "wait"] * 2
    assert len(module.waits) == waits
    module.streams[-1].ptr = 8
    assert not recording.is_current()


def test_only_this_thread_records(machine: Machine) -> None:
    machine()
    device, recording = open_device(), Recording([])
    with recording.made():
        other = threading.Thread(target=device.record)
        other.start()
        other.join()
    assert list(recording.repeat()) == []
    assert not recording._kept


def test_a_recording_has_neither_memory_nor_other_launches(machine: Machine) -> None:
    machine()
    device = open_device()
    kernel = device.kernel("text", "f", ())
    with Recording([device]).made():
        with pytest.raises(AssertionError, match="allocates no memory"):
            device.empty(3, np.float32)
        with pytest.raises(AssertionError, match="only prepared launches"):
            kernel((5,), (32,), [], 0)
    assert current_recording() is None


def test_a_gpu_reads_memory_of_others(machine: Machine) -> None:
    """Where the machine allows it; others may have enabled it before."""
    module = machine([(9, 0)] * 3)
    first, second, third = (open_device(f"cuda:{index}") for index in range(3))
    for other in (first, second, third):
        first.reach(other)
    assert module.peers == [1]
    module.errors["peer"] = CUDARuntimeError("cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled")
    first.reach(second)
    module.errors["peer"] = CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    with pytest.raises(DeviceError, match="InvalidDevice"):
        first.reach(second)


def test_a_program_has_one_kernel() -> None:
    source = """extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS(2))
first(int* x) {}
extern "C" __global__ void second(int* x) {}
"""
    text = devices.program_text(source, "second", ("WARPS=2",))
    assert text == "#define WARPS 2\n#line 1\n" + source.replace('extern "C"', "template <int = 0>", 1)


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
        copiers[k].copy(target, part)  # partial pages go through buffers
        np.testing.assert_array_equal(target, part)
    del copiers
    gc.collect()
    assert not locked
    few = np.zeros(3, dtype=np.int32)
    locked[0] = {few.ctypes.data // page}
    assert not device.copier().pin(few)  # no whole page inside
