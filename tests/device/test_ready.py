"""Kernels that come with the package: found by their program, and left to NVRTC if anything is wrong with them."""

from __future__ import annotations

import contextlib
import io
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridmf.device import ready
from hybridmf.device.cuda import open_device, program_text
from support.fake_cupy import CUDADriverError, Machine

pytestmark = pytest.mark.usefixtures("forget_devices")

PROGRAM = ("text", "f", ("RANK=64",))


def archive(key: str, cubin: bytes = b"code", *more: Any) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as made:
        for name, code in ((key, cubin), *zip(more[::2], more[1::2], strict=True)):
            member = tarfile.TarInfo(name)
            member.size = len(code)
            made.addfile(member, io.BytesIO(code))
    return content.getvalue()


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, str], None]:
    monkeypatch.setattr(ready, "FOLDER", tmp_path)
    monkeypatch.setattr(ready, "_archives", {})
    monkeypatch.delenv(ready.READY_KERNELS, raising=False)
    return lambda content, architecture="90": (tmp_path / f"sm_{architecture}.tar.xz").write_bytes(content)


def key(source: str, name: str, constants: tuple[str, ...]) -> str:
    return ready.key_of(program_text(source, name, constants), name, ("-std=c++17",))


def test_a_kernel_of_the_package_is_loaded_and_not_compiled(machine: Machine, shipped: Any) -> None:
    shipped(archive(key(*PROGRAM)))
    module = machine()
    device = open_device()
    device.kernel(*PROGRAM)((1,), (32,), (), 100_000)
    assert module.loaded == [b"code"] and not module.compiled
    assert module.launches[0][3:] == (100_000, 100_000)
    for other in (("other", *PROGRAM[1:]), ("text", "g", PROGRAM[2]), (*PROGRAM[:2], ("RANK=65",))):
        device.kernel(*other)
    assert len(module.compiled) == 3 and len(module.loaded) == 1


def test_no_two_kernels_share_a_path(machine: Machine, shipped: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """By which CuPy keeps what it has loaded, also if the folder of a file that is gone gets the same name."""
    other = ("text", "f", ("RANK=16",))
    shipped(archive(key(*PROGRAM), b"code", key(*other), b"other"))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **options: contextlib.nullcontext(str(tmp_path)))
    module = machine()
    for program in (PROGRAM, other):
        open_device().kernel(*program)
    assert module.loaded == [b"code", b"other"] and len(set(module.paths)) == 2


def test_a_kernel_of_another_architecture_is_compiled(machine: Machine, shipped: Any) -> None:
    shipped(archive(key(*PROGRAM)))
    module = machine([(8, 0)])
    open_device().kernel(*PROGRAM)
    assert module.compiled and not module.loaded


def test_the_variable_leaves_all_to_nvrtc(machine: Machine, shipped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped(archive(key(*PROGRAM)))
    monkeypatch.setenv(ready.READY_KERNELS, "0")
    module = machine()
    open_device().kernel(*PROGRAM)
    assert module.compiled and not module.loaded


@pytest.mark.parametrize("part", [slice(0), slice(40), slice(5, None), slice(-30)], ids=["empty", "cut", "torn", "end"])
def test_a_damaged_archive_is_reported_and_not_used(
    machine: Machine, shipped: Any, caplog: pytest.LogCaptureFixture, part: slice
) -> None:
    shipped(archive(key(*PROGRAM), bytes(range(256)) * 40)[part])
    module = machine()
    for program in (PROGRAM, ("text", "g", ())):
        open_device().kernel(*program)
    assert len(module.compiled) == 2 and not module.loaded
    assert caplog.text.count("sm_90.tar.xz cannot be used") == 1


def test_a_changed_byte_is_noticed(machine: Machine, shipped: Any, caplog: pytest.LogCaptureFixture) -> None:
    content = bytearray(archive(key(*PROGRAM), bytes(range(256)) * 40))
    content[len(content) // 2] ^= 1
    shipped(bytes(content))
    module = machine()
    open_device().kernel(*PROGRAM)
    assert module.compiled and not module.loaded and "cannot be used" in caplog.text


def test_kernels_that_do_not_load_are_compiled(
    machine: Machine, shipped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shipped(archive(key(*PROGRAM)))
    module = machine(load=CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU"))
    ready.plans_of((9, 0)).write_text("signature")
    assert ready.serves((9, 0), "signature")
    with caplog.at_level("INFO", "hybridmf"):
        open_device().kernel(*PROGRAM)
        open_device().kernel("text", "g", ())
    assert len(module.compiled) == 2 and len(module.loaded) == 1
    assert not ready.serves((9, 0), "signature")  # later plans expect a compilation
    assert "sm_90.tar.xz cannot be used (CUDADriverError: CUDA_ERROR_NO_BINARY_FOR_GPU)" in caplog.text
