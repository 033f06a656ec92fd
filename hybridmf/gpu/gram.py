"""Launch of cuda/gram.cu: the Gram matrix of a table of factors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device, DeviceSpec
from ..plan.fused import gram_rows, gram_sides
from .launch import check, check_not_host, get_kernel, program

THREADS = {"gram": 256, "gram_tensor": 128}
"""Threads of a block of each kernel."""


def kernel_for(spec: DeviceSpec, dtype: Any) -> str:
    """The kernel for tables of a dtype."""
    return "gram_tensor" if np.dtype(dtype) == np.float32 and spec.capability >= (8, 0) else "gram"


def gram_program(spec: DeviceSpec, dtype: Any) -> tuple[str, str, tuple[str, ...]]:
    """Arguments of `Device.kernel` for it."""
    return program("gram.cu", kernel_for(spec, dtype), REAL=np.dtype(dtype))


def gram_sum(device: Device, table: Array) -> Array:
    """``F^T F`` of a table, shape (width, width), float64; pieces of a few thousand rows are summed in its own type.

    `table`, float (n_rows, width).
    """
    n, width = table.shape
    side, tiles = gram_sides(width)
    rows = gram_rows(n, width, table.dtype.itemsize)
    check("table", table, table.dtype, (None, None))
    check_not_host(device, table=table)
    pieces = ceil_div(n, rows)
    if not pieces:
        return device.zeros((width, width), np.float64)
    sums = device.empty((pieces, side, side), table.dtype)
    name = kernel_for(device.spec, table.dtype)
    kernel = get_kernel(device, "gram.cu", name, REAL=table.dtype)
    sizes = (np.int64(n), np.int32(width), np.int32(side), np.int64(rows))
    kernel((tiles, pieces), (THREADS[name],), (sums, table, *sizes), 0)
    return sums.sum(axis=0, dtype=np.float64)[:width, :width]
