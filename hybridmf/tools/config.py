"""Properties of this installation: versions, threads, instruction set, BLAS, GPU."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

import numpy as np
import scipy
import sklearn
from threadpoolctl import threadpool_info

from .. import _formats
from .._version import __version__
from ..core.system import available_cores, available_memory
from ..core.validate import check_threads
from ..native import _als
from ..plan import dispatch


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def config() -> dict[str, Any]:
    """Versions, threads, vector instructions, BLAS libraries and GPU of this process, as plain data.

    Returns
    -------
    dict
        Keys ``hybridmf``, ``python``, ``platform``, ``numpy``, ``scipy``, ``scikit-learn``, ``cores``, ``threads``,
        ``instruction_set``, ``memory_available`` (bytes or None), ``blas`` (list of str), ``cupy`` (version or None),
        ``gpu`` (names or None), ``gpu_reason`` (why no GPU is used).
    """
    usable, reason = dispatch.gpu_status()
    blas = [
        f"{pool.get('internal_api')} {pool.get('version')} ({pool.get('num_threads')} threads)"
        for pool in threadpool_info()
        if pool.get("user_api") == "blas"
    ]
    return {
        "hybridmf": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "scikit-learn": sklearn.__version__,
        "cores": available_cores(),
        "threads": min(check_threads(None), _formats.max_threads()),
        "instruction_set": _als.instruction_set(),
        "memory_available": available_memory(),
        "blas": blas,
        "cupy": _version("cupy-cuda13x") or _version("cupy-cuda12x") or _version("cupy"),
        "gpu": reason if usable else None,
        "gpu_reason": "" if usable else reason,
    }


def show_config(file: Any = None) -> None:
    """Print `config`: versions, threads, and why no GPU is used.

    Parameters
    ----------
    file : file object, optional
        Default: standard output.
    """
    stream = sys.stdout if file is None else file
    for key, value in config().items():
        if isinstance(value, list):
            value = "; ".join(value)
        if key == "memory_available" and value is not None:
            value = f"{value / 2**30:.1f} GiB"
        stream.write(f"{key:17s} {value}\n")
