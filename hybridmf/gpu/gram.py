"""Launch of cuda/gram.cu: the Gram matrix of a table of factors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.system import ceil_div, round_up
from ..device.cuda import Array, Device, DeviceSpec
from ..plan.fused import BLOCK, gram_rows, gram_sides
from .launch import check_all, get_kernel, program

THREADS = {"gram": 256, "gram_tensor": 128, "add_grams": 256, "weigh_gram": 256}  # threads of a block of each kernel


def kernel_for(spec: DeviceSpec, dtype: Any) -> str:
    return "gram_tensor" if np.dtype(dtype) == np.float32 and spec.capability >= (8, 0) else "gram"


def programs(spec: DeviceSpec, dtype: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    names = (kernel_for(spec, dtype), "add_grams", "weigh_gram")
    return [program("gram.cu", name, REAL=np.dtype(dtype)) for name in names]


def gram_sum(device: Device, table: Array) -> Array:
    """``F^T F`` of a table (n, width), in float64; segments of a few thousand rows are summed in its own type."""
    n, width = table.shape
    side, tiles = gram_sides(width)
    rows = gram_rows(n, width, table.dtype.itemsize)
    check_all(device, table=(table, table.dtype, (None, None)))
    segments = ceil_div(n, rows)
    if not segments:
        return device.zeros((width, width), np.float64)
    sums = device.empty((segments, side, side), table.dtype)
    name = kernel_for(device.spec, table.dtype)
    kernel = get_kernel(device, "gram.cu", name, REAL=table.dtype)
    sizes = (np.int64(n), np.int32(width), np.int32(side), np.int64(rows))
    kernel((tiles, segments), (THREADS[name],), (sums, table, *sizes), 0)
    total = device.empty((width, width), np.float64)
    arguments = (total, sums, np.int32(segments), np.int32(side), np.int32(width))
    kernel = get_kernel(device, "gram.cu", "add_grams", REAL=table.dtype)
    kernel((ceil_div(width * width, THREADS["add_grams"]),), (THREADS["add_grams"],), arguments, 0)
    return total


def weighted(device: Device, total: Array, rank: int, dtype: Any, weight: float) -> Array:
    """The first `rank` rows and columns of ``weight * total``, as dtype, with zeros up to whole blocks."""
    check_all(device, total=(total, np.float64, (None, None)))
    padded = round_up(rank, BLOCK)
    gram = device.empty((padded, padded), dtype)
    sizes = (np.int32(total.shape[1]), np.int32(rank), np.int32(padded))
    kernel = get_kernel(device, "gram.cu", "weigh_gram", REAL=np.dtype(dtype))
    arguments = (gram, total, *sizes, np.float64(weight))
    kernel((ceil_div(padded * padded, THREADS["weigh_gram"]),), (THREADS["weigh_gram"],), arguments, 0)
    return gram
