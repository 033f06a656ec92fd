"""Arrays that are mapped from files, read and written as files.

That takes no page fault every few pages, and gives an error that can be caught where a file has become shorter or its
disk fails: to touch its mapped pages would end the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ..core.scratch import scratch_file
from ..errors import StoreError


def file_behind(array: np.ndarray) -> tuple[str, int] | None:
    """Path of the file that an array is mapped from, and where in it the array begins; None for other arrays.

    Parameters
    ----------
    array : ndarray
        A `numpy.memmap` whose memory is what its file holds, or a view of one; C order.
    """
    base = array
    while not isinstance(base, np.memmap):
        if not isinstance(base, np.ndarray) or base.base is None:
            return None
        base = base.base
    while isinstance(base.base, np.memmap):  # views of a memmap carry an offset that may not be theirs
        base = base.base
    if base.filename is None or base.mode == "c" or not array.flags.c_contiguous:
        return None  # what is written to a mapping of mode "c" is not in its file
    return os.fspath(base.filename), int(base.offset + array.ctypes.data - base.ctypes.data)


def read_into(buffer: np.ndarray, handle: int, begin: int) -> None:
    """Fill a buffer from a file.

    Parameters
    ----------
    buffer : uint8 array, C order
    handle : int
        Descriptor of the file; threads may share it.
    begin : int
        Where in the file the bytes are.

    Raises
    ------
    StoreError
        The file ends before.
    """
    rest = buffer.data
    while len(rest):
        found = os.preadv(handle, [rest], begin)
        if not found:
            raise StoreError(f"a file of the store ends {len(rest)} bytes early: it was truncated while it was read")
        rest, begin = rest[found:], begin + found


def write_from(buffer: np.ndarray, handle: int, begin: int) -> None:
    """Write a buffer to a file.

    Parameters
    ----------
    buffer : uint8 array, C order
    handle : int
        Descriptor of the file; threads may share it.
    begin : int
        Where in the file the bytes go.
    """
    rest = buffer.data
    while len(rest):
        written = os.pwrite(handle, rest, begin)
        rest, begin = rest[written:], begin + written


def _opened(path: str) -> int | None:
    """Descriptor of a file that can be read at any place by several threads; None where there is none."""
    if not path or not hasattr(os, "preadv"):  # as on Windows
        return None
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # a file that was removed lives on where it is mapped
        return None


@contextmanager
def reader_of(source: np.ndarray) -> Iterator[Callable[[np.ndarray, int], None]]:
    """``read(buffer, start)``, which fills a buffer with the bytes of an array from `start` on.

    Parameters
    ----------
    source : uint8 array, C order
        Where it is mapped from a file that still has its name, or from one of `core.scratch`, the file is read.
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
    """``write(buffer, start)``, which puts the bytes of a buffer into an array from `start` on.

    Parameters
    ----------
    target : uint8 array, C order
        Where it is mapped from a file of `hybridmf.core.scratch`, the file is written to.
    """
    scratch = scratch_file(target)
    if scratch is None or not hasattr(os, "pwrite"):  # as on Windows
        return lambda buffer, start: np.copyto(target[start : start + len(buffer)], buffer)
    handle, begin = scratch
    return lambda buffer, start: write_from(buffer, handle, begin + start)
