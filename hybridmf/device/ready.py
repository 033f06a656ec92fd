"""Kernels that come with the package, compiled when its wheel was built: `.ci/ready_kernels.py` makes the archives."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("hybridmf")

FOLDER = Path(__file__).parent / "ready"
READY_KERNELS = "HYBRIDMF_READY_KERNELS"  # environment variable; "0": NVRTC compiles all kernels

_lock = threading.Lock()
_archives: dict[Path, dict[str, bytes]] = {}


def archive_of(capability: tuple[int, int]) -> Path:
    """Path of the archive for GPUs of a compute capability; it may not exist."""
    return FOLDER / "sm_{}{}.tar.xz".format(*capability)


def plans_of(capability: tuple[int, int]) -> Path:
    """Path of the signatures, by `plan.dispatch`, of plans for which the archive has all kernels."""
    return FOLDER / "sm_{}{}.plans".format(*capability)


def serves(capability: tuple[int, int], signature: str) -> bool:
    """Whether all kernels of a plan come with the package, as far as is known: its archive may not load."""
    if not wanted() or not _archives.get(archive_of(capability), True):
        return False
    path = plans_of(capability)
    return path.is_file() and signature in path.read_text().split()


def wanted() -> bool:
    return os.environ.get(READY_KERNELS, "") != "0"


def key_of(text: str, name: str, options: Sequence[str]) -> str:
    """Name in the archive of the kernel `name` of a program."""
    return hashlib.sha256("\0".join((name, *options, text)).encode()).hexdigest()[:32]


def read(path: Path) -> dict[str, bytes]:
    """The cubins of an archive, by `key_of`; raises exceptions of lzma and tarfile."""
    import lzma  # which a Python may lack
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(path.read_bytes()))) as archive:  # verifies the checksum
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def load(cupy: Any, capability: tuple[int, int], text: str, name: str, options: Sequence[str]) -> Any:
    """The kernel as CuPy's RawKernel on the current device; None if NVRTC has to compile it."""
    path, unusable = archive_of(capability), "%s cannot be used (%s: %s): NVRTC compiles the kernels"
    with _lock:
        if path not in _archives:
            _archives[path] = {}
            if wanted() and path.is_file():
                try:
                    _archives[path] = read(path)
                except Exception as error:  # of tarfile, lzma, or a Python without lzma
                    logger.warning(unusable, path, type(error).__name__, error)
    key = key_of(text, name, options)
    cubin = _archives[path].get(key)
    if cubin is None:
        return None
    try:
        # CuPy's kernels come from source texts or files, which Windows does not remove while they are mapped
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            file = Path(folder, key)  # CuPy keeps modules by path, so no two kernels may share one
            file.write_bytes(cubin)
            return cupy.RawModule(path=str(file)).get_function(name)
    except (OSError, cupy.cuda.driver.CUDADriverError) as error:  # a driver older than the compiler
        _archives[path] = {}
        logger.info(unusable, path, type(error).__name__, error)
        return None
