"""The only place that launches kernels: source texts, argument checks, one function per kernel.

CuPy checks nothing about arguments (a Python int travels as 64 bits, strides are ignored), so each function checks
dtype, shape and layout, and passes NumPy scalars of the exact width.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..device.cuda import Array, Device, Kernel

HEADERS = ("common.cuh",)
"""Inserted into every source: CuPy's cache keys on the text, so it would miss changes of an #include."""


DELAYS = "HYBRIDMF_KERNEL_DELAYS"
"""Environment variable with a seed: kernels are compiled with random delays around every synchronization, for tests."""


def kernel_folder() -> Path:
    """Folder of the .cu files: ``hybridmf/cuda`` of a wheel, else ``cuda`` beside the package of a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / HEADERS[0]).is_file():
            return folder
    raise FileNotFoundError(
        f"no kernel sources beside {package}: the installation is incomplete; install hybridmf again"
    )


@functools.cache
def source_text(file: str) -> str:
    """A .cu file in which each header replaces its first #include line, recursively."""
    return "\n".join(_spliced(file, set())) + "\n"


def _spliced(file: str, seen: set[str]) -> Iterator[str]:
    if file in seen:
        return
    seen.add(file)
    for line in (kernel_folder() / file).read_text().splitlines():
        if line.startswith('#include "'):
            yield from _spliced(line.split('"')[1], seen)
        elif line != "#pragma once":
            yield line


def get_kernel(device: Device, file: str, name: str, **constants: Any) -> Kernel:
    """The kernel `name` of ``cuda/<file>``, compiled once per constants and device."""
    return device.kernel(*program(file, name, **constants))


@functools.lru_cache(maxsize=None, typed=True)
def program(file: str, name: str, **constants: Any) -> tuple[str, str, tuple[str, ...]]:
    """The arguments of `Device.kernel` for the kernel `name` of ``cuda/<file>``."""
    seed = os.environ.get(DELAYS, "")
    delays = {"HYBRIDMF_DELAYS": int(seed)} if seed else {}
    return source_text(file), name, constant_texts(constants | delays)


def constant_texts(constants: dict[str, Any]) -> tuple[str, ...]:
    """``NAME=value`` of each compile-time constant, in a fixed order, for -D options."""
    return tuple(f"{key}={_constant(value)}" for key, value in sorted(constants.items()))


def _constant(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    if isinstance(value, np.dtype):
        return {"float32": "float", "float64": "double"}[value.name]
    return str(value)


def check(name: str, array: Array, dtype: Any, shape: tuple[int | None, ...]) -> None:
    """Check dtype, shape (None: any) and C order of an argument. A failure is a bug of this package."""
    found = array.shape
    if array.dtype == dtype and len(found) == len(shape) and array.flags.c_contiguous:
        for have, want in zip(found, shape, strict=True):
            if want is not None and have != want:
                break
        else:
            return
    raise TypeError(
        f"{name} must be {np.dtype(dtype).name}, C order, shape {shape}; got {array.dtype}, shape {tuple(array.shape)}"
    )


def check_not_host(device: Device, **arrays: Array) -> None:
    """Check that arrays are on the device: a host pointer in a kernel would corrupt the CUDA context."""
    for name, array in arrays.items():
        if not device.owns(array):
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__name__}, not an array on {device.spec.name}"
            )


def check_all(device: Device, **arguments: tuple[Array, Any, tuple[int | None, ...]]) -> None:
    """`check` and `check_not_host` of (array, dtype, shape) by name; arrays that are None are left out."""
    for name, (array, dtype, shape) in arguments.items():
        if array is not None:
            if not device.owns(array):
                check_not_host(device, **{name: array})
            check(name, array, dtype, shape)


@dataclass(frozen=True)
class DeviceEntries:
    """Entries of the rows of one side on a device, and their weights."""

    indices: Array  # int32 (nnz,): row of the fixed side of each entry
    ratings: Array  # float (nnz,)
    # float (n_fixed,), or None: mean rating plus the biases of the fixed side, to subtract from the ratings
    offsets: Array | None = None
    implicit: bool = False
    # alpha, unobserved_weight: for implicit feedback
    alpha: float = 1.0
    unobserved_weight: float = 1.0
    # float (nnz,), or None: predictions, including `offsets`. Systems then solve for changes of the solutions;
    # `SideSystems.solutions` holds the part of the right-hand sides that does not come from entries
    predicted: Array | None = None

    def check(self, device: Device, dtype: Any, n_fixed: int) -> None:
        n = len(self.indices)
        check_all(
            device,
            indices=(self.indices, np.int32, (None,)),
            ratings=(self.ratings, dtype, (n,)),
            offsets=(self.offsets, dtype, (n_fixed,)),
            predicted=(self.predicted, dtype, (n,)),
        )

    @property
    def constants(self) -> dict[str, Any]:
        kind = {"REAL": self.ratings.dtype, "IMPLICIT": self.implicit, "HAS_OFFSETS": self.offsets is not None}
        return kind if self.predicted is None else kind | {"RESIDUAL": True}

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Kernel arguments ``indices, ratings, offsets``; the last one is per column or per entry, or unused."""
        offsets = self.offsets if self.predicted is None else self.predicted
        return self.indices, self.ratings, self.ratings if offsets is None else offsets

    @property
    def scalars(self) -> tuple[np.generic, np.generic]:
        """Kernel arguments ``alpha, unobserved_weight``."""
        real = self.ratings.dtype.type
        return real(self.alpha), real(self.unobserved_weight)
