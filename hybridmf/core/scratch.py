"""Files for arrays that exceed the memory. They are unlinked at once, so the system deletes them with the process.

Their space is reserved on creation, so that a full disk raises an error and does not end the process later, when a page
is written. The system caches as much of them as fits in memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from .system import mib

SCRATCH_DIR = "HYBRIDMF_SCRATCH_DIR"

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")  # file systems that keep files in memory, and are therefore unsuitable
_ZEROS = 8 << 20  # bytes written at a time where the system cannot reserve space

_mapped: dict[int, tuple[int, int]] = {}
"""Start and length of the memory, and file descriptor, of each living array of `mapped`."""


def scratch_folders(beside: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Folders that such files may go to, the first one first.

    Only HYBRIDMF_SCRATCH_DIR ("~" is the home folder) if it is set; else `beside`, where the data are, and the system's
    folder for temporary files.
    """
    named = os.environ.get(SCRATCH_DIR)
    if named:
        return (os.path.abspath(os.path.expanduser(named)),)
    folders = [] if beside is None else [os.path.abspath(beside)]
    with suppress(FileNotFoundError):  # there is none that can be written to
        folders.append(os.path.abspath(tempfile.gettempdir()))
    return tuple(dict.fromkeys(folders))


def find_room(folders: Sequence[str], size: int) -> tuple[str, str]:
    """The first of several folders that has room for so many bytes, and ""; or "", and why none has."""
    problems = []
    for folder in folders:
        problem = _problem_of(folder, size)
        if not problem:
            return folder, ""
        problems.append(f"{folder!r} {problem}")
    return "", ", ".join(problems) or "there is no folder for temporary files"


def _problem_of(folder: str, size: int) -> str:
    """Why files of so many bytes cannot be in a folder; empty if they can."""
    if not os.path.isdir(folder):
        return "is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written to"
    kind = file_system(folder)
    if kind in IN_MEMORY:
        return f"is memory ({kind})"
    free = shutil.disk_usage(folder).free
    return "" if size <= free else f"has {mib(free)} free"


def file_system(folder: str) -> str:
    """Kind of the file system of a folder, such as "ext4"; empty where the system does not say."""
    try:
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo") as lines:
            for line in lines:
                mount, _, kind = line.partition(" - ")
                if mount.split()[2] == wanted:
                    return kind.split()[0]
    except (OSError, AttributeError, IndexError):  # another system than Linux
        pass
    return ""


def mapped(shape: tuple[int, ...], dtype: Any, folder: str) -> np.ndarray:
    """A new array of zeros whose memory is a file without a name, gone with the last view of it or with the process."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        return np.zeros(shape, dtype)
    try:
        with tempfile.TemporaryFile(prefix="hybridmf-", dir=folder, buffering=0) as file:  # unlinked at once
            _reserve(file.fileno(), size)
            memory = mmap.mmap(file.fileno(), size)
            handle = os.dup(file.fileno())
    except (OSError, ValueError) as error:
        raise _refusal(error, folder, size) from error
    array = np.frombuffer(memory, dtype).reshape(shape)
    start = array.ctypes.data
    _mapped[start] = size, handle
    weakref.finalize(memory, _forget, start, handle).atexit = False
    return array


def _reserve(handle: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system without this feature
                raise
    for start in range(0, size, _ZEROS):
        rest = memoryview(bytes(min(_ZEROS, size - start)))
        while rest:
            rest = rest[os.write(handle, rest) :]


def _refusal(error: Exception, folder: str, size: int) -> OSError:
    code = getattr(error, "errno", None) or errno.EIO
    try:
        free = f"{mib(shutil.disk_usage(folder).free)} are free"
    except OSError:
        free = "it cannot be inspected"
    way_out = f"set {SCRATCH_DIR} to a folder on a disk with more room, use fewer factors, or a host with more memory"
    if code in (errno.EMFILE, errno.ENFILE):
        way_out = "raise the limit of open files (ulimit -n), or delete models and factors that callbacks keep"
    return OSError(
        code, f"a file of {mib(size)} for factors cannot be made ({os.strerror(code)}; {free}): {way_out}", folder
    )


def _forget(start: int, handle: int) -> None:
    del _mapped[start]
    os.close(handle)


def scratch_file(array: np.ndarray) -> tuple[int, int] | None:
    """Descriptor of the file that is the memory of an array (C order), and its offset there; None for other arrays."""
    first = array.ctypes.data
    # copied at once: iteration creates objects, and the garbage collector may then remove an array of a cycle from it
    for start, (size, handle) in _mapped.copy().items():
        if start <= first and first + array.nbytes <= start + size:
            return handle, first - start
    return None
