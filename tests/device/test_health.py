"""Waits for a GPU: short and long ones, failures, interruptions."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hybridmf.device import copier as copiers
from hybridmf.device import cuda as devices
from hybridmf.device import health
from hybridmf.device.cuda import CudaDevice, open_device
from hybridmf.device.health import STICKY, hurry
from hybridmf.errors import DeviceError, DeviceLostError
from hybridmf.gpu.stream import Loader, Transfers
from support.failing_gpu import ctrl_c_after
from support.fake_cupy import CUDADriverError, CUDARuntimeError, Machine
from support.messages import says

pytestmark = pytest.mark.usefixtures("forget_devices")


@pytest.fixture
def device(machine: Machine) -> Iterator[CudaDevice]:
    machine()
    return open_device()


def launch(device: CudaDevice, name: str) -> None:
    device.kernel("text", name, ())((1,), (32,), (), 0)


def release_after(device: CudaDevice, mark: Any, seconds: float) -> None:
    """Let a kernel that hangs, and the event behind it, end."""

    def end() -> None:
        device._cupy.streams[0].stuck = mark.event.stuck = False

    threading.Timer(seconds, end).start()


WAITS = [
    lambda device: device.synchronize(),
    lambda device: device.download(device.zeros(3, np.float32)),
    lambda device: device.download(device.zeros(devices.SMALL_COPY, np.float32)),
    lambda device: device.upload(np.ones(3, np.float32)),
    lambda device: device.upload(np.ones(5 * copiers.STAGES, np.float32)),
    lambda device: device.begin_download(device.zeros(3, np.float32))(),
]
NAMES = ["synchronize", "small download", "download", "upload", "staged upload", "begin_download"]


@pytest.mark.parametrize("wait", WAITS, ids=NAMES)
def test_ctrl_c_interrupts_every_wait(device: CudaDevice, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copiers, "COPY_CHUNK", 16)
    launch(device, "hang")
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.2):
        wait(device)
    assert time.monotonic() - begun < 0.2 + 1


@pytest.mark.parametrize("wait", WAITS, ids=NAMES)
def test_every_wait_after_an_interruption_ends(device: CudaDevice, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE", 0.2)
    launch(device, "hang")
    hurry()
    with pytest.raises(DeviceLostError, match=says("cuda:0 failed: it did not answer for", "after an interruption")):
        wait(device)
    begun = time.monotonic()
    with pytest.raises(DeviceLostError, match="did not answer"):
        wait(device)
    assert time.monotonic() - begun < 0.1


def test_all_threads_stop_waiting_for_a_lost_device(device: CudaDevice) -> None:
    launch(device, "hang")
    errors: list[DeviceError] = []

    def wait() -> None:
        try:
            device.synchronize()
        except DeviceError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not errors
    lost = device.health.lose("for a test")
    for thread in threads:
        thread.join(5)
    assert [str(error) for error in errors] == [str(lost)] * 3


def test_work_that_ends_in_time_is_waited_for(device: CudaDevice) -> None:
    """Also if the time was over before the wait, as for a program that goes on later."""
    launch(device, "hang")
    hurry()
    release_after(device, device.health._hurried, 0.2)
    mark = device.record()
    release_after(device, mark, 0.3)
    device.health.wait(mark)
    device.health._deadline = 0.0
    again = device.record()
    again.event.stuck = True
    release_after(device, again, 0.1)
    device.health.wait(again)
    assert device.health.loss is None


def test_a_later_call_waits_without_limit_again(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE", 0.05)
    launch(device, "hang")
    hurry()
    time.sleep(0.1)
    mark = open_device().record()
    release_after(device, mark, 0.2)
    device.health.wait(mark)


def test_an_idle_device_is_not_hurried(device: CudaDevice) -> None:
    hurry()
    assert device.health._hurried is None


def test_a_settled_array_is_copied_while_a_kernel_hangs(device: CudaDevice) -> None:
    few, many = device.zeros(3, np.float32), device.zeros(devices.SMALL_COPY, np.float32)
    launch(device, "hang")
    for array in (few, many):
        np.testing.assert_array_equal(device.download(array, settled=True), array)


def test_an_interrupted_upload_is_before_later_launches(device: CudaDevice) -> None:
    """They may reuse its memory, which is released."""
    launch(device, "hang")
    with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.2):
        device.upload(np.ones(3))
    waiting, waited_for = device._cupy.waits[-1]
    assert (waiting, waited_for) == (device._cupy.streams[0], device._copies._stream)


@pytest.mark.parametrize("restarted", [False, True])
def test_ctrl_c_during_a_stream_ends_its_thread(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """The thread waits for buffers that a kernel reads, and the interrupted call for the thread.

    `restarted`: as asyncio leaves it, signals do not end system calls.
    """
    signal.siginterrupt(signal.SIGINT, not restarted)
    monkeypatch.setattr(health, "PATIENCE", 0.3)
    monkeypatch.setattr(copiers, "COPY_CHUNK", 16)
    source, threads = np.ones(40, np.float32), set(threading.enumerate())
    loads = Loader(device, [(len(source), np.float32)], 2).loads(Transfers(9, lambda k: [source], source))

    def stream() -> None:
        with ctrl_c_after(0.2), contextlib.closing(loads):
            for _ in loads:
                launch(device, "hang")

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stream()
    signal.siginterrupt(signal.SIGINT, True)
    assert time.monotonic() - begun < 3
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "hybridmf-slabs"]


# --------------------------------------------------------------------------------------------------------- failures


def test_errors_without_a_way_back() -> None:
    names = [
        CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered"),
        CUDADriverError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"),
        CUDARuntimeError("cudaErrorLaunchFailure: unspecified launch failure"),
        CUDADriverError("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
        CUDARuntimeError("cudaErrorECCUncorrectable: uncorrectable ECC error encountered"),
        CUDARuntimeError("cudaErrorAssert: device-side assert triggered"),
    ]
    assert all(health._name_of(error) in STICKY for error in names)
    assert health._name_of(CUDARuntimeError("cudaErrorInvalidValue: invalid argument")) not in STICKY


def test_an_error_with_a_way_back_does_not_lose_the_device(device: CudaDevice) -> None:
    device._cupy.errors["launch"] = CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    with pytest.raises(DeviceError, match="cuda:0 failed: CUDADriverError: CUDA_ERROR_INVALID_VALUE"):
        launch(device, "f")
    del device._cupy.errors["launch"]
    launch(device, "f")


def test_an_error_that_comes_again_loses_the_device(device: CudaDevice) -> None:
    """CUDA's error of errors is not in the list: later calls show whether it stays."""
    device._cupy.broken = CUDARuntimeError("cudaErrorUnknown: unknown error")
    with pytest.raises(DeviceLostError, match="cudaErrorUnknown"):
        device.synchronize()


def test_errors_of_cublas_are_errors_of_the_device(device: CudaDevice) -> None:
    class CUBLASError(RuntimeError):
        __module__ = "cupy_backends.cuda.libs.cublas"

    device._cupy.errors["matmul"] = CUBLASError("CUBLAS_STATUS_EXECUTION_FAILED")
    with pytest.raises(DeviceError, match="cuda:0 failed: CUBLASError: CUBLAS_STATUS_EXECUTION_FAILED"):
        device.matmul(np.eye(2), np.eye(2))
    device._cupy.broken = CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")
    with pytest.raises(DeviceLostError, match="cuda:0 failed: "):
        device.matmul(np.eye(2), np.eye(2))


def test_other_errors_pass(device: CudaDevice) -> None:
    for error in (RuntimeError("no error of CUDA"), KeyboardInterrupt(), ValueError("x")):
        with pytest.raises(type(error)) as caught, device.active():
            raise error
        assert caught.value is error


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), ValueError("x")])
def test_leaving_a_lost_device_hides_no_error(device: CudaDevice, raised: BaseException) -> None:
    class Leaving:
        def __init__(self, index: int) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            raise CUDARuntimeError("cudaErrorIllegalAddress")

    device._cupy.cuda.Device = Leaving
    with pytest.raises(type(raised)), device.active():
        raise raised
    with pytest.raises(DeviceLostError), device.active():
        pass


def test_a_process_without_a_lost_device_ends_as_before(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(health, "keep_alive", lambda *objects: kept.extend(objects))
    device.health._leave()
    assert not kept
    launch(device, "hang")
    device.health._leave()
    assert kept == [device._cupy]


def test_short_waits_do_not_sleep(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []
    mark = device.record()

    def slept(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 5:
            mark.event.stuck = False

    monkeypatch.setattr(health.time, "sleep", slept)
    monkeypatch.setattr(health, "SPIN", 10.0)
    device.health.wait(mark)
    assert not sleeps
    mark.event.stuck = True
    device.health.wait(mark)
    assert sleeps == [0.0] * 5


def test_events_survive_the_collection_of_a_cycle_with_their_mark(device: CudaDevice) -> None:
    cycle: list[Any] = [device.record()]
    cycle.append(cycle)
    event = id(cycle[0].event)
    del cycle
    gc.collect()
    again = device.record()  # with a destroyed event it would crash
    assert id(again.event) == event
