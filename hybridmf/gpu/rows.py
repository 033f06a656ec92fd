"""Launches of cuda/rows.cu: sums of rows in pieces, the range of a table's rows, entries of some columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device
from .arrays import BLOCKS_PER_SM, THREADS, grid_of
from .launch import check_all, get_kernel

ROWS = 4  # rows that a warp of the kernel row_range processes at a time
PARTS = 32  # maximum number of blocks per row: few rows with many pieces must not delay the others
LARGEST_BITS = 0x7FFFFFFF


def add_pieces(device: Device, sums: Array, rows: Array, slots: Array) -> None:
    """Sum the pieces of rows in place and in order.

    Row k and its first piece are ``sums[rows[k]]``, the others ``sums[slots[k] : slots[k + 1]]``; a row without any
    becomes zeros.
    """
    if not len(rows) or not sums.size:
        return
    of_sums = (sums, sums.dtype, (None,) * len(sums.shape))
    check_all(device, sums=of_sums, rows=(rows, np.int64, (None,)), slots=(slots, np.int64, (len(rows) + 1,)))
    length = sums.size // len(sums)
    # elements that a thread copies at a time: 16 bytes if rows are a multiple of that
    vector = 16 // sums.dtype.itemsize if length * sums.dtype.itemsize % 16 == 0 else 1
    parts = min(PARTS, ceil_div(length // vector, THREADS))
    kernel = get_kernel(device, "rows.cu", "add_pieces", REAL=sums.dtype, VECTOR=vector, THREADS=THREADS)
    kernel((len(rows), parts), (THREADS,), (sums, rows, slots, np.int64(length)), 0)


@dataclass(frozen=True)
class RowRange:
    """Range of the magnitudes of a table's rows.

    `largest`, `least`: the largest absolute value, and the smallest of the rows' maxima; rows of zeros do not
    count. Both are 0 for a table of zeros; `largest` is NaN if any element is.
    """

    largest: float
    least: float

    @classmethod
    def of_all(cls, parts: Iterable[RowRange]) -> RowRange:
        known = list(parts)
        largest = np.max([0.0, *(part.largest for part in known)])  # NaN stays
        return cls(float(largest), min((part.least for part in known if part.least > 0), default=0.0))


def widen_range(device: Device, found: Array, table: Array | None, status: Array | None = None) -> None:
    """Extend a range, to be read by `read_range`, by more rows, and by whether any status is not 0; does not wait.

    `found` are zeros at first.
    """
    check_all(
        device,
        found=(found, np.uint32, (3,)),
        table=(table, np.float32, (None, None)),
        status=(status, np.int32, (None,)),
    )
    (n, width), n_solved = (0, 1) if table is None else table.shape, 0 if status is None else len(status)
    if not n * width and not n_solved:
        return
    wanted = max(ceil_div(n, ROWS * THREADS // 32), ceil_div(n_solved, THREADS))
    blocks = min(wanted, BLOCKS_PER_SM * device.spec.multiprocessors)
    kernel = get_kernel(device, "rows.cu", "row_range", REAL=np.dtype(np.float32), THREADS=THREADS)
    # in place of what is None an arbitrary pointer, which is not read
    given = (found, found if table is None else table, np.int64(n), np.int32(width))
    kernel((blocks,), (THREADS,), (*given, found if status is None else status, np.int64(n_solved)), 0)


def read_range(found: np.ndarray) -> tuple[RowRange, bool]:
    largest, room, failed = found.tolist()
    if not largest:
        return RowRange(0.0, 0.0), bool(failed)
    ends = np.array([largest, LARGEST_BITS - room], dtype=np.uint32).view(np.float32)
    return RowRange(float(ends[0]), float(ends[1])), bool(failed)


def clip_segments(device: Device, segments: Array, indices: Array, columns: int, first_slot: int = 0) -> Array:
    """The entries of each segment whose index is in ``0 ... columns - 1``; a segment without any is empty.

    Indices ascend within a segment, and are negative for columns before the range. `first_slot` is subtracted from
    each slot.
    """
    clipped = device.empty(segments.shape, np.int64)
    check_all(device, segments=(segments, np.int64, (None, 3)), indices=(indices, np.int32, (None,)))
    if len(segments):
        kernel = get_kernel(device, "rows.cu", "clip_segments", THREADS=THREADS)
        sizes = (np.int64(len(segments)), np.int64(first_slot), np.int32(columns))
        kernel(grid_of(device, len(segments)), (THREADS,), (clipped, segments, indices, *sizes), 0)
    return clipped
