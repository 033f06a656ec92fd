"""Compiled kernels as files, and the processes that compile them.

NVRTC 13.2 compiles two programs in threads of one process hardly faster than one after the other, and in two processes
as fast as one. So each thread of the compiler has a process of its own, which loads NVRTC and nothing else
(`hybridmf.device.nvrtc`). Whatever fails here, from the start of a process to the file, leaves the work to CuPy, which
compiles in this process and reports errors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import nvrtc

logger = logging.getLogger("hybridmf")


class Cubins:
    """Files of compiled kernels in CuPy's folder, compiled by processes, one for each thread.

    `architecture`: compute capability, as 90.
    `most`: processes at a time.
    """

    def __init__(self, cupy: Any, architecture: int, most: int) -> None:
        self._cupy, self._architecture, self._slots = cupy, architecture, threading.BoundedSemaphore(most)
        self._under_way: dict[str, threading.Lock] = {}
        self._lock, self._pid, self._closed = threading.Lock(), os.getpid(), False
        self._library: str | None = None  # "": there is none
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by thread

    def file(self, text: str, options: Sequence[str]) -> Path | None:
        """The file with the cubin of a text, compiled now unless it is there; None if that is not possible."""
        library = self._nvrtc()
        if not library:
            return None
        try:
            if not any(option.startswith("-arch") for option in options):
                options = (*options, f"-arch=sm_{self._architecture}")
            options = (*options, "-ftz=true", "--device-as-default-execution-space")  # as CuPy
            status = os.stat(library)
            identity = repr((library, status.st_size, status.st_mtime_ns, options, text))
            key = hashlib.sha256(identity.encode()).hexdigest()[:40]
            return _found(key) or self._compiled(library, key, text, options)
        except (OSError, EOFError) as error:
            logger.debug("kernels are compiled in this process: %s: %s", type(error).__name__, error)
            return None

    def _compiled(self, library: str, key: str, text: str, options: Sequence[str]) -> Path | None:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise OSError(f"{folder} cannot be written")
        process = self._process(library)  # a thread that waits for one must not keep others from compiling
        with self._lock:
            alone = self._under_way.setdefault(key, threading.Lock())
        with alone:  # other GPUs need the same program
            known = _found(key)
            if known is not None:
                return known
            cubin = self._compile(process, text, options)
            return _written(folder, f"hybridmf-{key}-{_digest(cubin)}.cubin", cubin) if cubin else None

    def _nvrtc(self) -> str:
        """Path of the library that CuPy has loaded; empty if processes cannot be used."""
        with self._lock:
            if self._library is None:
                self._library = ""
                with contextlib.suppress(Exception):  # CuPy says what is wrong when it compiles
                    self._cupy.cuda.nvrtc.getVersion()  # loads it
                    lines = Path("/proc/self/maps").read_text().splitlines()
                    found = next((line.split(maxsplit=5)[5] for line in lines if "/libnvrtc.so" in line), "")
                    # CuPy's variable says that nothing is to be written
                    in_memory = os.environ.get("CUPY_CACHE_IN_MEMORY", "0") not in ("", "0")
                    if Path(sys.executable or "").name.startswith("python") and not in_memory:
                        self._library = os.path.realpath(found) if found else ""
            return self._library

    def _compile(self, process: subprocess.Popen[bytes], text: str, options: Sequence[str]) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        try:
            nvrtc.send(process.stdin, text.encode(), "\0".join(options).encode())
            return nvrtc.receive(process.stdout)
        except BaseException:
            process.kill()
            self.end()
            if self._closed:
                raise RuntimeError("the interpreter exits") from None  # NVRTC is not started in this process either
            raise

    def _process(self, library: str) -> subprocess.Popen[bytes]:
        """The process of this thread, started at first use."""
        folder, own = os.path.dirname(library), threading.get_ident()
        environment = os.environ | {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
        if own not in self._processes:
            self._slots.acquire()
        with self._lock:
            if self._closed:
                raise RuntimeError("the interpreter exits")
            if own not in self._processes:
                try:
                    self._processes[own] = subprocess.Popen(
                        [sys.executable, "-I", "-S", nvrtc.__file__, library],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for the fit
                    )
                except BaseException:
                    self._slots.release()
                    raise
            return self._processes[own]

    def end(self) -> None:
        """End the process of this thread."""
        with self._lock:
            process = self._processes.pop(threading.get_ident(), None)
        if process is not None:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # a broken pipe
                        stream.close()
            process.wait()
            self._slots.release()

    def close(self) -> None:
        """End all processes, also those that compile; nothing is compiled from now on."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()


@functools.cache
def cubins_of(cupy: Any, architecture: int, most: int) -> Cubins:
    """Those of all GPUs of an architecture."""
    return Cubins(cupy, architecture, most)


def _folder() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))  # as CuPy


def _found(key: str) -> Path | None:
    """The file of a program; damaged ones are deleted."""
    for known in _folder().glob(f"hybridmf-{key}-*.cubin"):
        if known.stem.endswith(_digest(known.read_bytes())):
            return known
        known.unlink()
    return None


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()[:40]


def _written(folder: Path, name: str, cubin: bytes) -> Path:
    number, temporary = tempfile.mkstemp(dir=folder)
    with os.fdopen(number, "wb") as out:
        out.write(cubin)
    os.replace(temporary, folder / name)
    return folder / name
