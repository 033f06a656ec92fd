"""Launch of cuda/gram.cu: the Gram matrix of a table of factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.system import ceil_div, round_up
from ..device.cuda import Array, Device
from .launch import check, check_not_host, get_kernel

TILE = 64
THREADS = 256

BLOCKS = 1056
"""Blocks of threads among which a table is divided: eight on each multiprocessor of an H200."""

PIECE_ROWS = (256, 4096)
"""Least and most rows of a piece; their products are added in the table's type, and pieces in float64."""

SUMS_BYTES = 64 << 20
"""Most memory of the sums of all pieces, which plans do not count."""


def gram_sum(device: Device, table: Array) -> Array:
    """``F^T F`` of a table, shape (width, width), float64; pieces of a few thousand rows are summed in its own type.

    Parameters
    ----------
    device : Device
    table : float array, shape (n_rows, width)
    """
    n, width = table.shape
    side = round_up(width, TILE)
    tiles = side // TILE * (side // TILE + 1) // 2
    rows = int(np.clip(ceil_div(n * tiles, BLOCKS), *PIECE_ROWS))
    rows = max(rows, ceil_div(n, max(1, SUMS_BYTES // (side * side * table.dtype.itemsize))))
    check("table", table, table.dtype, (None, None))
    check_not_host(device, table=table)
    pieces = ceil_div(n, rows)
    if not pieces:
        return device.zeros((width, width), np.float64)
    sums = device.empty((pieces, side, side), table.dtype)
    kernel = get_kernel(device, "gram.cu", "gram", REAL=table.dtype)
    sizes = (np.int64(n), np.int32(width), np.int32(side), np.int64(rows))
    kernel((tiles, pieces), (THREADS,), (sums, table, *sizes), 0)
    return sums.sum(axis=0, dtype=np.float64)[:width, :width]


def default_builds() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(file, kernel, constants) of all builds."""
    for real in ("float", "double"):
        yield "gram.cu", "gram", {"REAL": real}
