"""Fits on a GPU whose factors are in files: the bits of those that have them in memory, and little memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core import scratch as _scratch
from hybridmf.core import system
from hybridmf.core.objective import other_side
from hybridmf.core.scratch import SCRATCH_DIR, file_system, find_room, mapped, scratch_file, scratch_folders
from hybridmf.device.mapped import reader_of, writer_of
from hybridmf.errors import MemoryBudgetError
from hybridmf.gpu.factors import HostTables
from hybridmf.model import files as _io
from hybridmf.model.checkpoint import UNFINISHED, Writer
from hybridmf.model.engine import engine_for
from hybridmf.plan import types
from hybridmf.plan.cost import cost_of
from hybridmf.plan.machine import H200, Machine
from hybridmf.plan.make import check_memory
from hybridmf.plan.partitions import plan_host_ranks, plan_scale
from support.cost_model import kernels_of
from support.devices import NETFLIX, on_a_gpu, plan_of
from support.half_sweeps import FITS
from support.host_factors import HOST_LIMIT, MATRIX, TURNS_LIMIT, assert_same_fit, fitted, no_threads, solver
from support.marks import exhaustive

pytestmark = pytest.mark.usefixtures("tiny_gpu")

FREE = 4_000
"""Bytes of memory that the host is said to have: the factors of MATRIX, twice, are 5,120."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of factors go; it may be in memory, where tests run."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setenv(SCRATCH_DIR, str(place))
    monkeypatch.setattr(_scratch, "IN_MEMORY", ())
    return place


@pytest.fixture
def small_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without room for the factors of MATRIX."""
    monkeypatch.setattr(system, "available_memory", lambda: FREE)
    return folder


# ---------------------------------------------------------------------------------------------------------- whole fits


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("implicit", {}),
        ("explicit", {"dtype": "float64", "assembly": "sparse_syrk", "gpu_memory_limit": 9_000, "iterations": 1}),
        ("biases", {"balance": True}),
        exhaustive("implicit", {"solver": "cg"}),
        exhaustive("biases", {"gpu_memory_limit": TURNS_LIMIT, "solver": "cg"}),
    ],
)
def test_the_bits_are_those_of_factors_on_the_host(kind, options, gpu, folder, monkeypatch):
    limits = {"gpu_memory_limit": HOST_LIMIT} | options
    on_host = fitted(kind, MATRIX, **limits)
    assert on_host.plan_.factors_on == "host"
    monkeypatch.setattr(system, "available_memory", lambda: on_host.plan_.host_bytes - 1)
    model = fitted(kind, MATRIX, **limits)
    plan = model.plan_
    assert plan.factors_on == "disk" and plan.disk_bytes == on_host.plan_.host_bytes and plan.host_bytes == 0
    assert plan.scratch == (str(folder),) and f"in {str(folder)!r}: factors, old and new" in str(plan)
    assert "nor in the memory of the host: they are in files" in str(plan)
    assert_same_fit(model, on_host)
    assert model.user_factors.flags.c_contiguous and model.recommend(0, N=3)[0].shape == (3,)
    assert engine_for(plan).name == "cpu"
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).user_factors, on_host.user_factors)
    assert no_threads() and not list(folder.iterdir())


@pytest.mark.parametrize("free", [FREE, 100_000])
def test_a_store_and_its_factors_on_disk(free, gpu, folder, tmp_path, monkeypatch):
    """Files are beside the store where nobody says otherwise; ratings are in memory if they have room alone."""
    store = hmf.convert(MATRIX, tmp_path / "store", slab_bytes=960)
    on_host = fitted("explicit", store, gpu_memory_limit=HOST_LIMIT)
    monkeypatch.delenv(SCRATCH_DIR)
    monkeypatch.setattr(system, "available_memory", lambda: free)
    monkeypatch.setattr(types.Plan, "offloaded_bytes", property(lambda plan: 100_001))
    model = fitted("explicit", store, gpu_memory_limit=HOST_LIMIT)
    assert model.plan_.factors_on == "disk" and model.plan_.scratch == (str(tmp_path),)
    assert model.plan_.streamed == ("disk" if free == FREE else "host")
    assert_same_fit(model, on_host)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch", "store"]


def test_states_seen_by_a_callback_do_not_change(gpu, small_host):
    for kind, factors in (("implicit", 8), ("biases", 6)):  # tables as they are, and copies without padding
        seen: list[tuple[np.ndarray, np.ndarray]] = []

        def look(model: Any, record: Any, seen: Any = seen) -> None:
            seen.append((model.user_factors_, model.user_factors_.copy()))

        cls, given = FITS[kind]
        options = {"iterations": 3, "random_state": 0, "device": "cuda", "gpu_memory_limit": HOST_LIMIT}
        model = cls(**(given | {"factors": factors} | options)).fit(MATRIX, callback=look)
        assert model.plan_.factors_on == "disk"
        for view, copy in seen:
            assert scratch_file(view) is not None and view.flags.c_contiguous
            np.testing.assert_array_equal(view, copy)


def test_files_live_as_long_as_the_model(gpu, small_host):
    before = len(_scratch._mapped)
    model = fitted("implicit", MATRIX, gpu_memory_limit=HOST_LIMIT)
    gc.collect()
    assert len(_scratch._mapped) == before + 2  # those of the last factors
    view = model.user_factors_[3:5]
    del model
    gc.collect()
    assert len(_scratch._mapped) == before + 1 and view.shape == (2, 7)
    del view
    gc.collect()
    assert len(_scratch._mapped) == before


def test_checkpoints_resume_wherever_factors_are(gpu, folder, tmp_path, monkeypatch):
    straight = fitted("biases", MATRIX, iterations=4)
    cls, given = FITS["biases"]
    options = given | {"random_state": 0, "device": "cuda"}
    cls(**options, iterations=1).fit(MATRIX, checkpoint=tmp_path / "saved")
    with monkeypatch.context() as patched:
        patched.setattr(system, "available_memory", lambda: FREE)
        patched.setattr("safetensors.safe_open", _without_factors(_io.safetensors.safe_open))
        resumed = cls(**options, iterations=2, gpu_memory_limit=HOST_LIMIT)
        resumed.fit(MATRIX, checkpoint=tmp_path / "saved", resume_from=tmp_path / "saved")
    assert resumed.plan_.factors_on == "disk" and resumed.n_iter_ == 2
    assert not list((tmp_path / "saved").glob(f"{UNFINISHED}*"))
    again = cls(**options, iterations=4).fit(MATRIX, resume_from=tmp_path / "saved")
    assert again.plan_.factors_on == "device"
    np.testing.assert_array_equal(again.user_factors, straight.user_factors)
    on_cpu = cls(**(options | {"device": "cpu"}), iterations=4).fit(MATRIX, resume_from=tmp_path / "saved")
    np.testing.assert_allclose(on_cpu.user_factors, straight.user_factors, rtol=1e-2, atol=1e-3)


def _without_factors(original: Any) -> Any:
    """`safetensors.safe_open` that refuses to read factors into memory."""

    @contextlib.contextmanager
    def opened(*arguments: Any, **options: Any) -> Any:
        with original(*arguments, **options) as file:
            yield _Guarded(file)

    return opened


class _Guarded:
    def __init__(self, file: Any) -> None:
        self.metadata, self.keys, self._file = file.metadata, file.keys, file

    def get_tensor(self, name: str) -> Any:
        assert name not in _io.LARGE
        return self._file.get_tensor(name)


def test_a_damaged_checkpoint_is_found_where_it_is_mapped(gpu, small_host, tmp_path):
    cls, given = FITS["explicit"]
    options = given | {"random_state": 0, "device": "cuda", "gpu_memory_limit": HOST_LIMIT}
    cls(**options, iterations=1).fit(MATRIX, checkpoint=tmp_path / "saved")
    path = next((tmp_path / "saved").iterdir())
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(hmf.errors.ModelFileError, match="was altered or damaged after it was written"):
        cls(**options, iterations=2).fit(MATRIX, resume_from=path)


# ------------------------------------------------------------------------------------------------------------- memory


def large_fit(monkeypatch: pytest.MonkeyPatch, device: Any) -> sp.csr_array:
    """Ratings whose factors, 128 wide, are 51 MB; slow checks stand aside."""
    rng = np.random.default_rng(0)
    entries = np.ones(400, np.float32), (rng.integers(0, 60_000, 400), rng.integers(0, 40_000, 400))
    original = device.empty

    def empty(shape: Any, dtype: Any) -> np.ndarray:
        """What is large and on the device is not of the host."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size < 1 << 16:
            return original(shape, dtype)
        return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)

    monkeypatch.setattr(device, "empty", empty)
    monkeypatch.setattr("hybridmf.gpu.offloaded.widen_range", lambda *arguments: None)
    monkeypatch.setattr("hybridmf.gpu.losses.row_squares", lambda device, table, factors: np.ones(len(table)))
    for name in ("gpu.factors.EXACT_ROWS", "model.files.CHECKED_ROWS"):
        monkeypatch.setattr(f"hybridmf.{name}", 2048)
    matrix = sp.csr_array(entries, shape=(60_000, 40_000))
    matrix.sum_duplicates()
    return matrix


@pytest.mark.exhaustive  # a minute: small sizes do not tell a side from a step's own memory
def test_no_step_has_a_side_in_memory(gpu, folder, monkeypatch, tmp_path):
    """Initial factors, balancing, objective, checkpoints, resuming from one, and what padded rows are copied to."""
    if gpu.spec.name != "emulated":
        pytest.skip("kernels do not stand aside on a GPU")
    matrix = large_fit(monkeypatch, gpu)
    monkeypatch.setattr(system, "available_memory", lambda: 50_000_000)
    options = {"biases": True, "balance": True, "random_state": 0, "assembly": "sparse_syrk"}
    options |= {"device": "cuda", "gpu_memory_limit": 62_000_000}
    saved, resume = tmp_path / "saved", None
    for iterations in (1, 2):
        gc.collect()
        tracemalloc.start(1)
        model = hmf.ExplicitALS(126, iterations=iterations, **options)
        model.fit(matrix, checkpoint=saved, resume_from=resume, callback=lambda model, record: None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert model.plan_.factors_on == "disk" and model.user_factors_.nbytes > 30_000_000
        assert peak < 14_000_000  # two thirds of the smaller side, most of it vectors with a number a row
        resume = saved


# -------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_falls_from_the_host_to_the_disk(folder, monkeypatch):
    needed = plan_of(200_000_000).host_bytes
    assert needed == 2 * sum(NETFLIX[0]) * 64 * 4
    costs = []
    for free, place in ((None, "host"), (needed, "host"), (needed - 1, "disk")):
        monkeypatch.setattr(system, "available_memory", lambda free=free: free)
        for limit in (200_000_000, 60_000_000):
            plan = plan_of(limit)
            check_memory(plan)
            assert (plan.factors_on, plan.streamed) == (place, "host") and plan.total_bytes <= limit
            assert plan.host_bytes + plan.disk_bytes == needed and bool(plan.disk_bytes) == (place == "disk")
            costs.append(cost_of(plan, Machine()).iteration)
    assert costs[:2] == costs[2:4] and costs[4] >= costs[0] and costs[5] > costs[1]
    assert plan_of(8 << 30).factors_on == "device"
    assert plan.changed(balance=True).disk_bytes == needed + NETFLIX[0][1] * 64 * 4


def test_files_too_large_for_the_disk_are_named(folder, monkeypatch):
    monkeypatch.setattr(system, "available_memory", lambda: 1 << 20)
    for change, reason in (
        ({"value": "/nowhere/at/all"}, "'/nowhere/at/all' is no folder"),
        ({"free": 5 << 20}, f"{str(folder)!r} has 5.0 MiB free"),
        ({"kind": "tmpfs"}, f"{str(folder)!r} is memory (tmpfs)"),
        ({"access": False}, f"{str(folder)!r} cannot be written to"),
    ):
        with monkeypatch.context() as patched:
            if "value" in change:
                patched.setenv(SCRATCH_DIR, str(change["value"]))
            if "free" in change:
                patched.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 5 << 20}))
            if "kind" in change:
                patched.setattr(_scratch, "IN_MEMORY", ("tmpfs",))
                patched.setattr(_scratch, "file_system", lambda folder: "tmpfs")
            if "access" in change:
                patched.setattr("os.access", lambda *arguments: False)
            plan = plan_of(200_000_000)
            assert plan.factors_on == "host"
            with pytest.raises(MemoryBudgetError, match=re.escape(reason)) as caught:
                check_memory(plan)
            assert "or set HYBRIDMF_SCRATCH_DIR to a folder on a disk with room" in str(caught.value)
            with pytest.raises(MemoryBudgetError, match="or one GPU alone, which may have factors in files"):
                check_memory(plan.changed(devices=("cuda:0", "cuda:1")))


def test_the_planner_has_factors_on_disk_where_the_host_is_too_small():
    """Of a machine that is not there: predicted by what is read and written, which all GPUs share."""
    problem = kernels_of((500_000_000, 100_000_000), 10**10, 64)
    tables = 2 * 600_000_000 * 256
    for host, places in (
        (10**12, ("host", "host")),
        (tables, ("disk", "host")),
        (tables - 1, ("host", "disk")),
        (10**9, ("disk", "disk")),
    ):
        for gpus in (1, 2):
            plan = plan_scale(problem, gpus, 40 * 10**9, host_bytes=host)
            assert (plan.ratings, plan.factors) == places
            for side, half in plan.halves.items():
                table = problem.rows(other_side(side)) / half.parts * 256
                loads = half.waves if half.turns > 1 else 1
                moved = gpus * loads * half.turns * table + problem.rows(side) * 256
                expected = (places[1] == "disk") * moved + (places[0] == "disk") * problem.nnz * 8
                assert half.seconds.get("from disk", 0) == pytest.approx(expected / H200.links.disk_bytes)
    assert f"factors on {places[1]}" in str(plan)
    with pytest.raises(MemoryBudgetError, match="does not fit on 2 GPUs"):  # which no fit serves
        plan_scale(problem, 2, 40 * 10**9, host_bytes=10**9, model_parallel_only=True)
    one = plan_scale(problem, 1, 40 * 10**9, host_bytes=10**9, model_parallel_only=True)
    one.check_served(1)
    assert one.factors == "disk"
    ranks = plan_host_ranks(problem, 1, 40 * 10**9, "disk", 1 << 24, factors="disk")
    assert ranks is not None and ranks.factors == "disk" and ranks.seconds > one.seconds / 2


# -------------------------------------------------------------------------------------------------------------- files


def test_a_full_disk_is_an_error_before_the_fit(gpu, small_host, monkeypatch):
    calls: list[int] = []
    reserve = os.posix_fallocate

    def full(handle: int, first: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(handle, first, size)

    monkeypatch.setattr("os.posix_fallocate", full)
    gc.collect()
    before = len(_scratch._mapped)
    seen: list[Any] = []
    model = hmf.ImplicitALS(factors=7, device="cuda", gpu_memory_limit=HOST_LIMIT)
    with pytest.raises(OSError, match=r"a file of 0\.0 MiB for factors cannot be made") as caught:
        model.fit(MATRIX, callback=lambda *arguments: seen.append(1))
    error = caught.value
    assert error.errno == errno.ENOSPC and error.filename == str(small_host) and not seen
    assert "MiB are free): set HYBRIDMF_SCRATCH_DIR to a folder on a disk with more room" in str(error)
    assert calls == [50 * 8 * 4] * 2 + [30 * 8 * 4]  # both of the users, then the first of the items
    del caught, error
    gc.collect()
    assert len(_scratch._mapped) == before


@pytest.mark.parametrize("factors", [7, exhaustive(8)])  # rows with padding, which a checkpoint copies, and without
def test_a_full_disk_postpones_checkpoints(factors, gpu, small_host, monkeypatch, tmp_path):
    """The disk has room for the files that a fit begins with, and a slow checkpoint holds on to what is in them."""
    options = {"factors": factors, "iterations": 5, "random_state": 0, "device": "cuda", "gpu_memory_limit": HOST_LIMIT}
    whole = hmf.ImplicitALS(**options).fit(MATRIX)
    made: list[int] = []
    reserve, write = os.posix_fallocate, Writer._write

    def four(handle: int, first: int, size: int) -> None:
        if len(made) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(size)
        reserve(handle, first, size)

    def slowly(self: Writer, snapshot: Any) -> None:
        time.sleep(0.3)
        write(self, snapshot)

    monkeypatch.setattr("os.posix_fallocate", four)
    monkeypatch.setattr(Writer, "_write", slowly)
    model = hmf.ImplicitALS(**options).fit(MATRIX, checkpoint=tmp_path / "saved")
    assert model.plan_.factors_on == "disk" and len(made) == 4
    np.testing.assert_array_equal(model.user_factors, whole.user_factors)
    assert (tmp_path / "saved" / "checkpoint-000005.safetensors").exists()


def test_tables_are_taken_by_two_threads(folder):
    class Emptied(list[np.ndarray]):
        """Seems to hold a table, which another thread has taken."""

        def __bool__(self) -> bool:
            return True

    tables = HostTables((3, 4), np.float32, str(folder))
    tables._free = Emptied()
    assert tables.take().shape == (3, 4)


def test_files_are_found_while_the_collector_removes_some(folder):
    kept = [mapped((4,), np.float32, str(folder)) for _ in range(100)]
    thresholds = gc.get_threshold()
    try:
        for allocations in range(5, 105, 10):
            gc.collect(0)  # the count of allocations starts anew
            cycle: list[Any] = [mapped((4,), np.float32, str(folder))]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(allocations)
            assert scratch_file(kept[-1]) is not None
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)


def test_too_many_open_files_are_distinguished_from_a_full_disk(folder, monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OSError, match=r"cannot be made \(Too many open files.*raise the limit of open files"):
        mapped((3,), np.float32, str(folder))


def test_a_killed_process_leaves_nothing(folder):
    code = (
        "import sys; from hybridmf.core.scratch import mapped; table = mapped((1000, 1000), 'float32', sys.argv[1]);"
        "table[...] = 1; print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert not list(folder.iterdir())  # not even while it runs
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not list(folder.iterdir())


def test_files_are_read_and_written_as_files(folder, monkeypatch):
    table = mapped((100, 10), np.float32, str(folder))
    assert not table.any() and table.flags.writeable
    table[...] = np.arange(1000, dtype=np.float32).reshape(100, 10)
    raw = table[10:20].reshape(-1).view(np.uint8)
    found = scratch_file(raw)
    assert found is not None and found[1] == 400
    for name in ("preadv", "pwrite", None):
        if name is not None:
            monkeypatch.delattr(f"os.{name}")
        buffer = np.zeros(40, np.uint8)
        with reader_of(raw) as read:
            read(buffer, 40)
        np.testing.assert_array_equal(buffer.view(np.float32), table[11])
        writer_of(raw)((-buffer.view(np.float32)).view(np.uint8), 80)
        np.testing.assert_array_equal(table[12], -table[11])
        table[12] = 0
    assert scratch_file(np.zeros(4)) is None and mapped((0, 3), np.float32, str(folder)).shape == (0, 3)


def test_unreadable_files_raise(folder, monkeypatch):
    """A disk that fails is an error, not the end of the process."""

    def broken(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    raw = mapped((100,), np.uint8, str(folder))
    monkeypatch.setattr("os.preadv", broken)
    monkeypatch.setattr("os.pwrite", broken)
    with reader_of(raw) as read, pytest.raises(OSError, match="Input/output error"):
        read(np.zeros(4, np.uint8), 0)
    with pytest.raises(OSError, match="Input/output error"):
        writer_of(raw)(np.zeros(4, np.uint8), 0)


def test_folders_are_tried_in_turn(tmp_path, monkeypatch):
    monkeypatch.delenv(SCRATCH_DIR, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    assert scratch_folders() == (str(tmp_path / "temporary"),)
    assert scratch_folders(tmp_path) == (str(tmp_path), str(tmp_path / "temporary"))
    monkeypatch.setenv(SCRATCH_DIR, "~/scratch")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert scratch_folders(tmp_path) == (str(tmp_path / "scratch"),)
    monkeypatch.setattr(_scratch, "IN_MEMORY", ())
    assert find_room((str(tmp_path / "scratch"), str(tmp_path)), 10) == (str(tmp_path), "")
    assert find_room((), 10) == ("", "there is no folder for temporary files")


@pytest.mark.skipif(sys.platform != "linux", reason="another system")
def test_file_systems_in_memory_are_known():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is none")
    assert file_system("/dev/shm") == "tmpfs" and file_system("/nowhere") == ""
    assert find_room(("/dev/shm",), 10) == ("", "'/dev/shm' is memory (tmpfs)")


@pytest.mark.parametrize("knows", [False, True])
def test_a_system_that_reserves_nothing_writes_zeros(knows, folder, monkeypatch):
    def refused(*arguments: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("os.posix_fallocate", refused)
    if not knows:
        monkeypatch.delattr("os.posix_fallocate")
    monkeypatch.setattr(_scratch, "_ZEROS", 100)
    table = mapped((123, 3), np.uint8, str(folder))
    assert table.shape == (123, 3) and not table.any()


def test_ranks_refuse_factors_in_files(gpu):
    from hybridmf.ranks.multi_als import MultiALS

    host = solver("implicit", gpu, 1, 2)
    halves = {side: replace(half, factors="disk", gpus=2) for side, half in host.plan.scale.halves.items()}
    scale = replace(host.plan.scale, halves=halves, gpus=2)
    plan = host.plan.changed(scale=scale, devices=("cuda:0", "cuda:1"))
    with pytest.raises(ValueError, match="keeps factors on them or on the host; the partition has them on disk"):
        MultiALS(MATRIX, MATRIX.T.tocsr(), host.objective, plan, host.state, make_worker=lambda one: (one, None))


# -------------------------------------------------------------------------------------------------------------- copies


@on_a_gpu
def test_copies_between_files_and_a_gpu_arrive_whole(device, folder, monkeypatch):
    monkeypatch.setattr("hybridmf.device.copier.COPY_CHUNK", 1 << 16)
    tables = HostTables((1234, 104), np.float32, str(folder))
    tables.lock(device.copier())
    table = tables.take()
    table[...] = np.random.default_rng(0).standard_normal(table.shape).astype(np.float32)
    copier = device.copier()
    on_device = device.zeros(table.size, np.float32)
    copier.after(device.record())  # not before the zeros
    copier.copy(on_device, table.reshape(-1))
    copier.synchronize()
    np.testing.assert_array_equal(device.download(on_device), table.reshape(-1))
    other = tables.take()
    copier.after(device.record())
    copier.fetch(other[7:1000], on_device.reshape(table.shape)[7:1000])
    np.testing.assert_array_equal(other[7:1000], table[7:1000])
    assert not other[:7].any()
