"""Single launches of the kernels of cuda/msgd.cu, with the checks that the schedule makes once."""

from __future__ import annotations

import numpy as np

from hybridmf.core.objective import Terms
from hybridmf.device.cuda import Array, Device
from hybridmf.gpu.sgd import (
    Bins,
    BlockedConfig,
    FactorRows,
    Launches,
    MsgdKernels,
    Operands,
    Walk,
    _check_rows,
    _check_walk,
)


def _checked(device: Device, moved: FactorRows, fixed: FactorRows, walk: Walk, **tasks: Array) -> None:
    _check_rows(device, moved, fixed, moved.matrix.dtype, fixed.matrix.dtype)
    _check_walk(device, walk, moved.matrix.dtype, **tasks)


def _launch(launches: Launches) -> None:
    for launch in launches:
        launch()


def centralized(device: Device, moved: FactorRows, fixed: FactorRows, walk: Walk, tasks: Array, terms: Terms) -> Array:
    """Update each row of `tasks`; the sum of squared errors of each."""
    _checked(device, moved, fixed, walk, tasks=tasks)
    out = device.empty((walk.n_ranges, len(tasks)), np.float64)
    _launch(MsgdKernels(device).centralized(Operands(device, moved, fixed, terms), walk, tasks, out))
    return out.sum(axis=0)


def blocked(
    device: Device,
    moved: FactorRows,
    fixed: FactorRows,
    walk: Walk,
    tasks: Array | Bins,
    terms: Terms,
    config: BlockedConfig | None = None,
) -> Array:
    """Like `centralized`, with one block per row or bin and several entries at a time."""
    bins = tasks if isinstance(tasks, Bins) else Bins(tasks, device.upload(np.arange(len(tasks) + 1, dtype=np.int32)))
    _checked(device, moved, fixed, walk, tasks=bins.rows, first=bins.first)
    out = device.empty((walk.n_ranges, len(bins.rows)), np.float64)
    _launch(MsgdKernels(device, config).blocked(Operands(device, moved, fixed, terms), walk, bins, out))
    return out.sum(axis=0)


def decentralized(
    device: Device, moved: FactorRows, fixed: FactorRows, walk: Walk, bounds: Array, terms: Terms
) -> Array:
    """Blocks own the ranges of updated rows between `bounds`; the sum of squared errors of each."""
    _checked(device, moved, fixed, walk, bounds=bounds)
    out = device.empty(len(bounds) - 1, np.float64)
    _launch(MsgdKernels(device).decentralized(Operands(device, moved, fixed, terms), walk, bounds, out))
    return out
