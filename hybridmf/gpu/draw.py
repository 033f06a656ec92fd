"""Launch of cuda/draw.cu: initial factors drawn into a table on the device."""

from __future__ import annotations

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device
from ..plan.start import DrawnFactors
from .arrays import THREADS, grid_of
from .launch import get_kernel

QUAD = 4
"""Columns drawn by a thread, from the four words of one counter."""

LOW = 0xFFFFFFFF


def drawn_table(device: Device, factors: DrawnFactors, width: int) -> Array:
    """Draw factors as a table of `width` columns on a device: factors, a constant 1 if there are biases, zeros.

    Returns float (n, width).
    """
    n, how = len(factors), factors.drawing
    table = device.empty((n, width), how.dtype)
    if not table.size:
        return table
    scales = device.upload(factors.scales.astype(np.float32, copy=False))
    rows = None if factors.rows is None else device.upload(factors.rows.astype(np.int64, copy=False))
    grid = grid_of(device, n * ceil_div(width, QUAD))
    constants = {"REAL": how.dtype, "HAS_ROWS": rows is not None, "THREADS": THREADS}
    where = (np.int64(n), np.int64(factors.first), np.int32(width), np.int32(how.rank))
    key = (np.uint32(how.seed & LOW), np.uint32(how.seed >> 32 & LOW))
    what = (np.uint32(how.stream), *key, np.int32(how.signed), np.int32(how.biases))
    # without row numbers an arbitrary pointer, which is not read
    with device.active():
        kernel = get_kernel(device, "draw.cu", "draw_rows", **constants)
        kernel(grid, (THREADS,), (table, scales, scales if rows is None else rows, where, what), 0)
    return table
