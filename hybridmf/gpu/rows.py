"""Launches of cuda/rows.cu: rows assembled in pieces, and how large the elements of a table's rows are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .device import Array, Device
from .launch import ceil_div, check, check_not_host, get_kernel

THREADS = 256
BLOCKS_PER_SM = 8
PARTS = 32
"""Blocks that share a row at most: few rows with many pieces must not keep the others waiting."""

LARGEST_BITS = 0x7FFFFFFF


def add_pieces(device: Device, sums: Array, rows: Array, slots: Array) -> None:
    """Add up, in place and in order, the rows that lie in several pieces.

    Parameters
    ----------
    sums : float array, shape (n_slots, ...)
    rows : int64 array, shape (n,)
        Slot of each row and of its first piece.
    slots : int64 array, shape (n + 1,)
        The other pieces of row k are ``sums[slots[k] : slots[k + 1]]``; a row without any becomes zeros.
    """
    if not len(rows) or not sums.size:
        return
    check("sums", sums, sums.dtype, (None,) * len(sums.shape))
    check("rows", rows, np.int64, (None,))
    check("slots", slots, np.int64, (len(rows) + 1,))
    check_not_host(device, sums=sums, rows=rows, slots=slots)
    length = sums.size // len(sums)
    vector = vector_of(length, sums.dtype.itemsize)
    parts = min(PARTS, ceil_div(length // vector, THREADS))
    kernel = get_kernel(device, "rows.cu", "add_pieces", REAL=sums.dtype, VECTOR=vector, THREADS=THREADS)
    kernel((len(rows), parts), (THREADS,), (sums, rows, slots, np.int64(length)), 0)


def vector_of(length: int, itemsize: int) -> int:
    """Elements that a thread moves at a time, for rows of so many elements: 16 bytes if rows are whole pieces of it."""
    return 16 // itemsize if length * itemsize % 16 == 0 else 1


def row_range(device: Device, table: Array) -> tuple[float, float]:
    """The largest absolute value of a table, and the least of its rows' largest; rows of zeros do not count.

    Parameters
    ----------
    table : float32 array, shape (n, width)

    Returns
    -------
    tuple of float
        Twice the same for a table of zeros. Both NaN if an element of each row is; the first one if any is.
    """
    check("table", table, np.float32, (None, None))
    check_not_host(device, table=table)
    found = device.zeros(2, np.uint32)
    if table.size:
        blocks = min(ceil_div(len(table), THREADS // 32), BLOCKS_PER_SM * device.spec.multiprocessors)
        kernel = get_kernel(device, "rows.cu", "row_range", REAL=table.dtype, THREADS=THREADS)
        kernel((blocks,), (THREADS,), (found, table, np.int64(len(table)), np.int32(table.shape[1])), 0)
    largest, room = device.download(found).tolist()
    if not largest:
        return 0.0, 0.0
    ends = np.array([largest, LARGEST_BITS - room], dtype=np.uint32).view(np.float32)
    return float(ends[0]), float(ends[1])


def default_builds() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(file, kernel, constants) of all that is compiled."""
    for real, itemsize in (("float", 4), ("double", 8)):
        for vector in (1, 16 // itemsize):
            yield "rows.cu", "add_pieces", {"REAL": real, "VECTOR": vector, "THREADS": THREADS}
    yield "rows.cu", "row_range", {"REAL": "float", "THREADS": THREADS}
