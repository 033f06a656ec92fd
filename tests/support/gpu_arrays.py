"""Arrays and sparse matrices on a GPU, as other libraries hand them over; of an emulated one, on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp


class GpuArray:
    """An array of another library on the emulated GPU: no more than the two protocols, and its memory."""

    def __init__(self, memory: Any, index: int = 0) -> None:
        self.memory, self.index = np.asarray(memory), index

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.memory.__array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")  # as CuPy says


def to_gpu(array: Any, device: Any) -> Any:
    """A copy of an array as CuPy has it, on a GPU or on the emulated one."""
    if device.spec.name == "emulated":
        return GpuArray(np.array(array))
    import cupy

    return cupy.asarray(array)


def cupy_matrix(matrix: Any, device: Any) -> Any:
    """A copy of a csr, csc or coo matrix with the attributes that CuPy's have; as broken as it is."""
    names = ("row", "col", "data") if matrix.format == "coo" else ("indptr", "indices", "data")
    parts = {name: to_gpu(getattr(matrix, name), device) for name in names}
    return SimpleNamespace(format=matrix.format, shape=matrix.shape, **parts)


def broken(kind: str, shape: tuple[int, int], **parts: Any) -> Any:
    """A SciPy matrix with these arrays, unchecked."""
    matrix = {"csr": sp.csr_array, "csc": sp.csc_array, "coo": sp.coo_array}[kind](shape)
    for name, part in parts.items():
        setattr(matrix, name, np.asarray(part))
    return matrix
