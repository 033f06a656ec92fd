"""Cores, quotas and control groups of the system."""

from __future__ import annotations

import pytest

from hybridmf.core import system


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
