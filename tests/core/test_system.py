"""Cores, quotas and control groups of the system; imports of optional packages."""

from __future__ import annotations

import signal
import sys
import threading

import pytest

from hybridmf.core import frames, system
from hybridmf.data import arrow_text
from hybridmf.device import cuda
from hybridmf.errors import DeviceError
from hybridmf.plan import dispatch


def test_available_cores_without_an_affinity_mask(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr(system, "cgroup_folders", lambda _: [])
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert system.available_cores() == 6
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert system.available_cores() == 1


def test_cgroup_folders(monkeypatch):
    groups = {"/proc/self/cgroup": ["9:name=systemd:/x", "4:memory:/a/b", "1:cpu,cpuacct:/", "0::/c"]}
    monkeypatch.setattr(system, "system_words", lambda path: groups.get(path, []))
    memory = [f"/sys/fs/cgroup/{path}" for path in ("memory", "memory/a", "memory/a/b")]
    assert system.cgroup_folders("memory") == [*memory, "/sys/fs/cgroup", "/sys/fs/cgroup/c"]
    assert system.cgroup_folders("cpu") == ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup", "/sys/fs/cgroup/c"]
    groups.clear()  # not Linux
    assert system.cgroup_folders("cpu") == []


def test_system_words(tmp_path):
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert system.system_words(tmp_path / "cpu.max") == ["max", "100000"]
    assert system.system_words(tmp_path / "none") == []
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\xd8")
    assert isinstance(system.system_words(tmp_path / "bytes"), list)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000"}, 6),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu.max": "900000 100000"}, 6),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 6),
        ({"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}, 2),
        ({"cpu.cfs_quota_us": "200000"}, 6),
    ],
)
def test_available_cores_honour_cpu_quotas(monkeypatch, tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6), raising=False)
    monkeypatch.setattr(system, "cgroup_folders", lambda controller: [str(tmp_path / "none"), str(tmp_path)])
    assert system.available_cores() == cores


INTERRUPTED = """import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError("as a compiled module does") from None
"""


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Path of modules; pandas and another one get a Ctrl-C while they are imported, and say that they are missing."""
    for name in ("pandas", "of_nobody"):
        (tmp_path / f"{name}.py").write_text(INTERRUPTED)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_import_loses_no_ctrl_c(interrupted, monkeypatch):
    """Nor is it taken for a package or a GPU that is not there."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        frames.import_before_arrow()
    monkeypatch.delitem(sys.modules, "pandas")
    with pytest.raises(KeyboardInterrupt):
        arrow_text.coded_strings(None)  # otherwise read in another way
    with pytest.raises(KeyboardInterrupt):
        system.needed("of_nobody", "this", "it")

    def opened(name):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise DeviceError("CuPy cannot be imported") from None
        raise DeviceError("no GPU")

    monkeypatch.setattr(cuda, "open_device", opened)
    with pytest.raises(KeyboardInterrupt):
        dispatch.find_gpu("auto")
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_are_those_of_the_main_thread(monkeypatch):
    """Others may not set any, and one that no Python code has set stays."""
    found = []

    def held():
        with system.ctrl_c_later():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=held)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *given: found.append(given))
    held()
    assert found[1:] == [None]
