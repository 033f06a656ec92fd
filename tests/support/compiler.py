"""NVRTC, which compiles kernels without a GPU, and its reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hybridmf.device.cuda import HOPPER_ONLY, program_text
from hybridmf.gpu.launch import source_text


def needs_nvrtc() -> Any:
    """Cuda's bindings of NVRTC; skips the test or the module without them."""
    return pytest.importorskip(
        "cuda.bindings.nvrtc", reason="no NVRTC to compile kernels with: pip install cuda-bindings nvidia-cuda-nvrtc"
    )


@dataclass(frozen=True)
class Program:
    """A file for one set of constants and one architecture: all of its kernels at once, or one as on a GPU."""

    file: str
    constants: tuple[str, ...]
    architecture: int
    kernel: str = ""

    def __str__(self) -> str:
        return f"sm_{self.architecture}-{self.file}-{','.join(self.constants)}"

    @property
    def text(self) -> str:
        """What NVRTC gets, beside the constants of a whole file."""
        source = source_text(self.file)
        return program_text(source, self.kernel, self.constants) if self.kernel else source


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one function, in bytes."""

    function: str
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def local_bytes(self) -> int:
        return self.stack + self.spill_stores + self.spill_loads


def compile_program(program: Program) -> str:
    """The log of a compilation; raises on errors."""
    suffix = "a" if HOPPER_ONLY in program.text and program.architecture == 90 else ""
    options = ["-std=c++17", f"--gpu-architecture=sm_{program.architecture}{suffix}", "--ptxas-options=-v"]
    options += [] if program.kernel else [f"-D{constant}" for constant in program.constants]
    return _compiled(program.text, program.file, options, str(program))[0]


def cubin_of(text: str, options: Sequence[str], architecture: int) -> bytes:
    """What CuPy 14 would load on a GPU of an architecture for a program and options; raises on errors."""
    added = ("-ftz=true", f"-arch=sm_{architecture}", "--device-as-default-execution-space")
    return _compiled(text, "kernel.cu", (*options, *added), f"a program for sm_{architecture}")[1]


def _compiled(text: str, file: str, options: Sequence[str], what: str) -> tuple[str, bytes]:
    """Log and cubin."""
    nvrtc = needs_nvrtc()
    status, handle = nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, [], [])
    assert not int(status), f"NVRTC: {status.name}"
    try:
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
        # not bytes: the bindings write into what they get, and Python has one b" " for all who use it
        log = bytearray(nvrtc.nvrtcGetProgramLogSize(handle)[1])
        nvrtc.nvrtcGetProgramLog(handle, log)
        found = log.decode().rstrip("\0 \n")
        if int(status):
            raise RuntimeError(f"{what} does not compile ({status.name}):\n{found}")
        cubin = bytearray(nvrtc.nvrtcGetCUBINSize(handle)[1])
        nvrtc.nvrtcGetCUBIN(handle, cubin)
        return found, bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def resources_of(log: str) -> list[Resources]:
    """What the log of ``--ptxas-options=-v`` says of each function."""
    pattern = (
        r"Function properties for (\S+)\s+(?:ptxas\s+\S+\s+)?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    )
    return [Resources(name, *map(int, numbers)) for name, *numbers in re.findall(pattern, log)]
