"""Processes that compile with NVRTC, which needs no GPU, and the files that they leave."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridmf.device.cubins import Cubins
from support.compiler import needs_nvrtc

KERNEL = 'extern "C" __global__ void f(float* out) { out[0] = VALUE; }'

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the library is found in /proc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def found(folder: Path) -> Any:
    nvrtc = needs_nvrtc()
    loaded = SimpleNamespace(cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=nvrtc.nvrtcVersion)))
    made = Cubins(loaded, 90, 2)
    yield made
    made.end()
    assert not made._processes


def text(value: float) -> str:
    return f"#define VALUE {value}\n{KERNEL}"


def test_a_program_is_compiled_once(found: Cubins, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = found.file(text(1), ("-std=c++17",))
    assert first is not None and first.parent == folder and first.read_bytes()[:4] == b"\x7fELF"
    assert {path.name for path in folder.iterdir()} == {first.name}  # nothing temporary
    other = found.file(text(2), ("-std=c++17",))
    assert other not in (None, first) and found.file(text(1), ("-std=c++17", "-DX=1")) not in (None, first)
    monkeypatch.setattr(found, "_compile", None)
    assert found.file(text(1), ("-std=c++17",)) == first
    assert len(found._processes) == 1  # that of this thread


def test_a_damaged_file_is_compiled_again(found: Cubins) -> None:
    first = found.file(text(1), ())
    assert first is not None
    good = first.read_bytes()
    first.write_bytes(good[:-1] + b"?")
    assert found.file(text(1), ()) == first and first.read_bytes() == good


def test_what_a_process_cannot_do_is_left_to_cupy(found: Cubins, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found.file("no C++", ()) is None
    assert found.file(text(1), ("-arch=sm_1",)) is None
    (process,) = found._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    assert found.file(text(3), ()) is None and not found._processes
    assert found.file(text(3), ()) is not None  # by another process
    monkeypatch.setenv("CUPY_CACHE_DIR", str(next(folder.iterdir()) / "no folder"))
    assert found.file(text(4), ()) is None
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/usr/sbin/a server with Python in it")
        assert Cubins(found._cupy, 90, 1).file(text(3), ()) is None
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert Cubins(found._cupy, 90, 1).file(text(3), ()) is None


def test_threads_that_need_the_same_program_compile_it_once(found: Cubins, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_it = [], found._compile
    monkeypatch.setattr(found, "_compile", lambda *given: compiled.append(1) or compile_it(*given))
    files: list[Any] = []

    def ask() -> None:
        files.append(found.file(text(5), ()))
        found.end()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(compiled) == 1 and len(files) == 3 and len(set(files)) == 1 and files[0] is not None


def test_a_thread_that_waits_for_a_process_keeps_no_program_from_others(found: Cubins) -> None:
    """Two GPUs with as many threads as there are processes each."""
    programs, files = [text(10 + k) for k in range(4)], []

    def ask(order: list[str]) -> None:
        files.extend(found.file(each, ()) for each in order)
        found.end()

    threads = [threading.Thread(target=ask, args=(programs[k:] + programs[:k],), daemon=True) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(files) == 16 and len(set(files)) == 4 and None not in files


def test_closing_ends_what_is_under_way(found: Cubins) -> None:
    """And nothing is compiled in this process instead."""
    assert found.file(text(6), ()) is not None
    found.close()
    with pytest.raises(RuntimeError, match="the interpreter exits"):
        found.file(text(7), ())
