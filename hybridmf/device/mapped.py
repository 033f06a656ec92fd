"""Reads and writes arrays mapped from files through the files.

This avoids page faults, and raises an exception if a file was truncated or its disk fails, where access to the mapped
pages would terminate the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ..core.scratch import scratch_file
from ..errors import StoreError


def file_behind(array: np.ndarray) -> tuple[str, int] | None:
    """Path of the file behind a `numpy.memmap` or a view of one, and the array's offset in it; None for others."""
    base = array
    while not isinstance(base, np.memmap):
        if not isinstance(base, np.ndarray) or base.base is None:
            return None
        base = base.base
    while isinstance(base.base, np.memmap):  # views of a memmap carry an offset that may not be theirs
        base = base.base
    if base.filename is None or base.mode == "c" or not array.flags.c_contiguous:
        return None  # a mapping of mode "c" may differ from its file
    return os.fspath(base.filename), int(base.offset + array.ctypes.data - base.ctypes.data)


def read_into(buffer: np.ndarray, handle: int, begin: int) -> None:
    """Fill a buffer of bytes from an offset of a file; threads may share its descriptor."""
    rest = buffer.data
    while len(rest):
        found = os.preadv(handle, [rest], begin)
        if not found:
            raise StoreError(f"a file of the store ends {len(rest)} bytes early: it was truncated while it was read")
        rest, begin = rest[found:], begin + found


def write_from(buffer: np.ndarray, handle: int, begin: int) -> None:
    """Write a buffer of bytes at an offset of a file; threads may share its descriptor."""
    rest = buffer.data
    while len(rest):
        written = os.pwrite(handle, rest, begin)
        rest, begin = rest[written:], begin + written


def _opened(path: str) -> int | None:
    """Descriptor for positioned reads by several threads; None if the file or the system call does not exist."""
    if not path or not hasattr(os, "preadv"):  # as on Windows
        return None
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # a removed file stays accessible through its mapping
        return None


@contextmanager
def reader_of(source: np.ndarray) -> Iterator[Callable[[np.ndarray, int], None]]:
    """A function ``read(buffer, start)`` that fills a buffer with the bytes of an array from `start` on.

    If it is mapped from a file that still exists by name, or from a file of `core.scratch`, the file is read.
    """
    scratch = scratch_file(source)
    if scratch is not None and hasattr(os, "preadv"):
        yield lambda buffer, start: read_into(buffer, scratch[0], scratch[1] + start)
        return
    path, begin = file_behind(source) or ("", 0)
    handle = _opened(path)
    if handle is None:
        yield lambda buffer, start: np.copyto(buffer, source[start : start + len(buffer)])
        return
    try:
        yield lambda buffer, start: read_into(buffer, handle, begin + start)
    finally:
        os.close(handle)


def writer_of(target: np.ndarray) -> Callable[[np.ndarray, int], None]:
    """A function ``write(buffer, start)`` that writes bytes to an array from `start` on.

    If it is mapped from a file of `hybridmf.core.scratch`, the file is written.
    """
    scratch = scratch_file(target)
    if scratch is None or not hasattr(os, "pwrite"):  # as on Windows
        return lambda buffer, start: np.copyto(target[start : start + len(buffer)], buffer)
    handle, begin = scratch
    return lambda buffer, start: write_from(buffer, handle, begin + start)
