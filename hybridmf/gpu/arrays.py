"""Launches of cuda/arrays.cu and simple sums: instead of CuPy's array arithmetic, whose first uses wait for NVRTC."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device
from .launch import check_all, check_not_host, get_kernel, program

SOURCE = "arrays.cu"
THREADS = 256
BLOCKS_PER_SM = 8
WORD = 4  # bytes of what `copy` and `gather` move; arrays of any type are sequences of words


def programs(dtype: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    """Arguments of `Device.kernel` for all kernels, and numbers of a dtype."""
    real = {"REAL": np.dtype(dtype)}
    kernels: list[tuple[str, dict[str, Any]]] = [("copy_block", {}), ("gather_rows", {"ROW": "int"})]
    kernels += [("gather_rows", {"ROW": "int64"}), ("fill_block", real), ("add_value", real | {"SOURCE": real["REAL"]})]
    return [program(SOURCE, name, **constants, THREADS=THREADS) for name, constants in kernels]


def copy(device: Device, target: Array, source: Array) -> None:
    """``target[...] = source`` for arrays of one dtype and shape, vectors or matrices, whose rows are contiguous."""
    if target.shape != source.shape or target.dtype != source.dtype:
        raise TypeError(f"target {target.dtype} {target.shape} and source {source.dtype} {source.shape} differ")
    (n, width, target_ld), (_, _, source_ld) = _rows_of(device, target), _rows_of(device, source)
    words = source.dtype.itemsize // WORD
    if n and width:
        sizes = (np.int64(size) for size in (n, width * words, target_ld * words, source_ld * words))
        kernel = get_kernel(device, SOURCE, "copy_block", THREADS=THREADS)
        kernel(grid_of(device, n * width * words), (THREADS,), (target, source, *sizes), 0)


def gather(device: Device, source: Array, rows: Array) -> Array:
    """``source[rows]`` of a contiguous array; `rows` are int32 or int64."""
    of_rows = (rows, np.int32 if rows.dtype == np.int32 else np.int64, (None,))
    check_all(device, source=(source, source.dtype, (None,) * len(source.shape)), rows=of_rows)
    target = device.empty((len(rows), *source.shape[1:]), source.dtype)
    width = int(np.prod(source.shape[1:], dtype=np.int64)) * source.dtype.itemsize // WORD
    if target.size:
        row = "int" if rows.dtype == np.int32 else "int64"
        kernel = get_kernel(device, SOURCE, "gather_rows", ROW=row, THREADS=THREADS)
        arguments = (target, source, rows, np.int64(len(rows)), np.int64(width))
        kernel(grid_of(device, len(rows) * width), (THREADS,), arguments, 0)
    return target


def fill(device: Device, target: Array, value: float) -> None:
    """``target[...] = value`` for a vector or a matrix, whose rows are contiguous."""
    n, width, ld = _rows_of(device, target)
    if n and width:
        real = target.dtype
        kernel = get_kernel(device, SOURCE, "fill_block", REAL=real, THREADS=THREADS)
        arguments = (target, np.int64(n), np.int64(width), np.int64(ld), real.type(value))
        kernel(grid_of(device, n * width), (THREADS,), arguments, 0)


def added(device: Device, source: Array, value: float, dtype: Any = None) -> Array:
    """``source + value`` of a contiguous array, in a dtype, by default its own."""
    real = np.dtype(source.dtype if dtype is None else dtype)
    check_all(device, source=(source, source.dtype, (None,) * len(source.shape)))
    target = device.empty(source.shape, real)
    if source.size:
        types = {"REAL": real, "SOURCE": np.dtype(source.dtype)}
        kernel = get_kernel(device, SOURCE, "add_value", **types, THREADS=THREADS)
        arguments = (target, source, np.int64(source.size), real.type(value))
        kernel(grid_of(device, source.size), (THREADS,), arguments, 0)
    return target


def _rows_of(device: Device, array: Array) -> tuple[int, int, int]:
    """Rows, their width, and elements from one to the next; a vector is one row."""
    check_not_host(device, array=array)
    item, (n, width) = array.dtype.itemsize, (1, *array.shape)[-2:]
    if item % WORD or (n and width > 1 and array.strides[-1] != item):  # CuPy's strides are 0 without elements
        raise TypeError(f"rows must be contiguous words; got {array.dtype}, strides {array.strides}")
    return n, width, array.strides[0] // item if n > 1 else width


def grid_of(device: Device, elements: int) -> tuple[int]:
    """Blocks of `THREADS` threads, one for each element, or as many as the device runs at a time."""
    return (min(ceil_div(elements, THREADS), BLOCKS_PER_SM * device.spec.multiprocessors),)
