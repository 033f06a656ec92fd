"""Launches of cuda/losses.cu: the loss of observed entries, and squared lengths of rows."""

from __future__ import annotations

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device
from .launch import DeviceEntries, check_all, get_kernel

WARPS_PER_BLOCK = 8


def segment_losses(
    device: Device,
    users: Array,
    items: Array,
    entries: DeviceEntries,
    user_offsets: Array | None,
    segments: Array,
    factors: int,
) -> np.ndarray:
    """Loss of each segment (user, begin, end), float64 on the host; the first `factors` columns are factors.

    Offsets of `entries` are the biases of items, if there are any, `user_offsets` the mean and the biases of users.
    """
    if not len(segments):
        return np.zeros(0)
    width, real = users.shape[1], users.dtype
    check_all(
        device,
        users=(users, real, (None, width)),
        items=(items, real, (None, width)),
        segments=(segments, np.int64, (None, 3)),
    )
    out = device.empty(len(segments), np.float64)
    kernel = get_kernel(device, "losses.cu", "segment_losses", FACTORS=factors, LD=width, **entries.constants)
    offsets = users if user_offsets is None else user_offsets
    arguments = (out, users, items, entries.arrays, offsets, segments, np.int64(len(segments)), entries.scalars)
    kernel((ceil_div(len(segments), WARPS_PER_BLOCK),), (32 * WARPS_PER_BLOCK,), arguments, 0)
    return device.download(out)


def row_squares(device: Device, table: Array, factors: int) -> np.ndarray:
    """Squared length of each row over its first `factors` columns; float64, shape (n,), on the host."""
    out = device.empty(len(table), np.float64)
    kernel = get_kernel(device, "losses.cu", "row_squares", REAL=table.dtype, FACTORS=factors, LD=table.shape[1])
    grid = (ceil_div(len(table), WARPS_PER_BLOCK),)
    kernel(grid, (32 * WARPS_PER_BLOCK,), (out, table, np.int64(len(table))), 0)
    return device.download(out)
