"""The program of a process that compiles with NVRTC (`hybridmf.device.cubins`); it imports little, to start quickly."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import IO, Any

SIZE = 8
"""Bytes of the length in front of each message."""


def send(stream: IO[bytes], *parts: bytes) -> None:
    """Write messages."""
    for part in parts:
        stream.write(len(part).to_bytes(SIZE, "little") + part)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """The next message; raises EOFError at the end of the stream."""
    found = stream.read(SIZE)
    size = int.from_bytes(found, "little")
    part = stream.read(size) if len(found) == SIZE else b""
    if len(found) < SIZE or len(part) < size:
        raise EOFError("the stream has ended")
    return part


def serve(path: str) -> None:
    """Compile texts with options from the standard input until it ends; answer cubins, b"" for failures."""
    nvrtc = ctypes.CDLL(path)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    try:
        while True:
            text = receive(source)
            send(target, compiled(nvrtc, text, receive(source).split(b"\0")))
    except EOFError:
        pass


def compiled(nvrtc: Any, text: bytes, options: Sequence[bytes]) -> bytes:
    """The cubin of a text; b"" if it does not compile."""
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None):
        return b""
    try:
        size = ctypes.c_size_t()
        given = (ctypes.c_char_p * len(options))(*options)
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            return b""
        if nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)):
            return b""
        cubin = ctypes.create_string_buffer(size.value)
        return b"" if nvrtc.nvrtcGetCUBIN(program, cubin) else cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


if __name__ == "__main__":
    serve(sys.argv[1])
