"""Launch of cuda/predictions.cu: updates the predictions of entries after a change of the solved side."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.system import ceil_div
from ..device.cuda import Array, Device
from ..plan.fused import table_width
from ..plan.types import Plan
from .launch import check_all, get_kernel, program

WARPS_PER_BLOCK = 8


def product_constants(width: int, dtype: Any) -> dict[str, Any]:
    vectors = ceil_div(width * np.dtype(dtype).itemsize, 16)
    return {"REAL": np.dtype(dtype), "LANES": min(32, 1 << (vectors - 1).bit_length())}


def add_products(
    device: Device, predicted: Array, fixed: Array, solved: Array, indices: Array, segments: Array
) -> None:
    """``predicted[e] += fixed[indices[e]] . solved[row]`` for all entries e of segments (row, begin, end)."""
    if not len(segments):
        return
    dtype, width = fixed.dtype, fixed.shape[1]
    check_all(
        device,
        predicted=(predicted, dtype, (len(indices),)),
        fixed=(fixed, dtype, (None, table_width(width, dtype))),
        solved=(solved, dtype, (None, width)),
        indices=(indices, np.int32, (None,)),
        segments=(segments, np.int64, (None, 3)),
    )
    kernel = get_kernel(device, "predictions.cu", "add_products", **product_constants(width, dtype))
    sizes = (np.int64(len(segments)), np.int32(width))
    grid = (ceil_div(len(segments), WARPS_PER_BLOCK),)
    kernel(grid, (32 * WARPS_PER_BLOCK,), (predicted, fixed, solved, indices, segments, *sizes), 0)


def programs(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    """Source, kernel and constants of the programs of cuda/predictions.cu for a plan."""
    widths = [plan.rank, *(last - first for first, last in plan.blocks)]
    constants = [product_constants(table_width(width, plan.dtype), plan.dtype) for width in widths]
    return list(dict.fromkeys(program("predictions.cu", "add_products", **one) for one in constants))
