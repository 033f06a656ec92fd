"""Fixtures of tests in several folders: the folder of real ratings, a small planted problem, devices, empty caches."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# read when libgomp and OpenBLAS are loaded: threads that spin while they wait take the cores from other processes
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, settings

# tests are of the sources of kernels
os.environ.setdefault("HYBRIDMF_READY_KERNELS", "0")
pytest.register_assert_rewrite("support")

# the same examples in every run, however slow the machine; `--hypothesis-profile explore` draws others
ANY_SPEED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("explore", **ANY_SPEED)
settings.register_profile("repeatable", derandomize=True, database=None, **ANY_SPEED)
settings.load_profile("repeatable")

from hybridmf.core import system
from hybridmf.core.cache import CACHE_DIR
from hybridmf.device import cuda as devices
from hybridmf.device.cuda import MEMORY_LIMIT, device_count
from hybridmf.errors import DeviceError
from hybridmf.plan import dispatch, fused, tables
from hybridmf.plan import machine as _machine
from hybridmf.ranks import gpu_rank, group, mcumsgd
from hybridmf.ranks.gpu_rank import GpuWorker
from support import emulated
from support.devices import open_or_skip, serve_cuda
from support.fake_cupy import FakeCupy
from support.ranks import Machine
from support.ratings import planted


def check_handle(handle: int) -> None:
    """Stand in for os.fsync: no test cuts the power, and thousands of waits for the disk are a tenth of a run."""
    os.fstat(handle)


def pytest_configure(config: pytest.Config) -> None:
    """Take Ctrl-C as usual: shells start background jobs with SIGINT ignored, and child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = check_handle
    # the files of control groups, which every plan reads anew, take a tenth of the time of a small fit
    system._cgroup_memory = functools.cache(system._cgroup_memory)
    system._cpu_quota = functools.cache(system._cpu_quota)
    # measured constants of whoever runs the tests would decide what runs where, and tests leave none behind
    folder = tempfile.mkdtemp(prefix="hybridmf-tests-")
    os.environ["HYBRIDMF_CACHE_DIR"] = folder
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist share what they compile
        os.environ.setdefault("HYBRIDMF_EMULATOR_DIR", folder)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def left_out(config: pytest.Config) -> str:
    """Why tests that need a GPU are left out, unless they are asked for: over a thousand, each to be set up in vain."""
    if "gpu" in config.getoption("markexpr"):
        return ""
    try:
        device_count()
    except DeviceError as error:
        return str(error)
    return ""


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is left out."""
    why = left_out(config)
    return f"tests that need a GPU are left out (-m gpu selects them): {why}" if why else ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Every other worker collects from the end: in a fresh clone, each rewrites the assertions of half of the files."""
    report = yield
    if isinstance(collector, pytest.Dir) and os.environ.get("PYTEST_XDIST_WORKER", "")[-1:] in {*"13579"}:
        report.result.reverse()
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Restore the order of files; leave out tests that need a GPU where there is none."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # which must be the same in all workers
        items.sort(key=lambda item: item.path.parts)
    if left_out(config):
        chosen = [item for item in items if item.get_closest_marker("gpu") is None]
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu") is not None])
        items[:] = chosen


def pytest_collection() -> None:
    """Collect no garbage while thousands of tests are collected, which all stay: it took a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave the thousands of collected tests out of later collections of garbage: each took 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the real rating files; the test is skipped where there is none."""
    folder = Path(os.environ.get("HYBRIDMF_TEST_DATA") or Path(__file__).parents[1].parent / "shared" / "data")
    if not (folder / "ml-1m").is_dir():
        pytest.skip(f"no real rating data in {folder} (set HYBRIDMF_TEST_DATA)")
    return folder


@pytest.fixture
def ratings_matrix() -> sp.csr_array:
    """60 x 40 ratings, a fifth observed."""
    return planted()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    """A device to run kernels on: the emulated one everywhere, a GPU where there is one."""
    return open_or_skip(request.param)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees what another one has measured, compiled or started."""
    monkeypatch.setenv("HYBRIDMF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "_started", set())
    monkeypatch.setattr(dispatch, "_loaded", set())
    _machine.machine_at.cache_clear()
    yield
    _machine.machine_at.cache_clear()


@pytest.fixture
def gpu(device, monkeypatch):
    """The device that estimators with ``device="cuda"`` run on."""
    return serve_cuda(device, monkeypatch)


@pytest.fixture
def tiny_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for GPUs of a few kilobytes: without the sums of a Gram matrix, which take 16 KiB at least."""
    monkeypatch.setattr(fused, "gram_bytes", lambda *sizes: 0)


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request, monkeypatch):
    """What to pass as ``device=``: laws that every backend keeps are written once."""
    if request.param == "cpu":
        return "cpu"
    serve_cuda(open_or_skip(request.param), monkeypatch)
    return "cuda"


@pytest.fixture
def small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine multiplies matrices does not matter in comparisons; emulated devices do it on the CPU."""
    for name in ("CPU_PRODUCT", "GPU_PRODUCT"):
        monkeypatch.setattr(importlib.import_module("hybridmf.compare"), name, 128)


@pytest.fixture
def without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn where their axes lie at first: to measure all texts for a layout takes half of the time."""
    layout_engine = pytest.importorskip("matplotlib.layout_engine")
    monkeypatch.setattr(layout_engine.ConstrainedLayoutEngine, "execute", lambda self, figure: None)


@pytest.fixture
def forget_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget devices opened by other tests, and the memory limit of the caller's environment."""
    monkeypatch.delenv(MEMORY_LIMIT, raising=False)
    devices._open.cache_clear()
    yield
    devices._open.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Pretend that a module (None: nothing) is what ``import cupy`` finds; without arguments, one sm_90 GPU."""

    def pretend(*args: Any, **errors: Exception) -> Any:
        module = args[0] if args and not isinstance(args[0], list) else FakeCupy(*args, **errors)
        monkeypatch.setitem(sys.modules, "cupy", module)
        return module

    return pretend


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Names of so many GPUs; emulated ones know no NCCL."""
    if request.param == "cuda":

        def real(size: int) -> list[str]:
            try:
                count = device_count()
            except DeviceError as error:
                pytest.skip(f"no GPU: {error}")
            if count < size:
                pytest.skip(f"needs {size} GPUs, there are {count}")
            return [f"cuda:{k}" for k in range(size)]

        yield real
        return
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler to run kernels on the CPU with")
    devices = [emulated.EmulatedDevice() for _ in range(8)]

    def open_emulated(name: str = "cuda") -> Any:
        return devices[int(name.partition(":")[2] or 0)]

    monkeypatch.setattr("hybridmf.device.cuda.open_device", open_emulated)
    monkeypatch.setattr(group, "open_device", open_emulated)
    monkeypatch.setattr(mcumsgd, "open_device", open_emulated)
    monkeypatch.setattr(
        gpu_rank,
        "gpu_worker",
        lambda names, control: (control, GpuWorker(open_emulated(names[control.rank]))),
    )
    yield lambda size: [f"cuda:{k}" for k in range(size)]


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No table of this user, and none that ships."""
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tables._warn_once.cache_clear()
    return tmp_path
