"""The choice of the backend that serves a model, by its plan."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..errors import DeviceError
from ..plan.types import Plan

if TYPE_CHECKING:
    from ..cpu.engine import CpuEngine
    from ..gpu.engine import GpuEngine

logger = logging.getLogger("hybridmf")

GPU_SCORES = 2e10
"""Multiply-adds of scores from which a GPU serves top-N; for less, the CPU is faster than the upload of the items."""

HELD_SCORES = 1e9
"""The same for items that are on the GPU, if a request for all users would be served there: its kernels are loaded."""


Engine: TypeAlias = "CpuEngine | GpuEngine"
"""Top-N, fold-in and the objective on one device; NumPy arrays in and out."""


def engine_for(plan: Plan, scores: float = np.inf, held: bool = False) -> Engine:
    """The backend for a model fitted by `plan`: its GPU if available and worthwhile for the work, else the CPU.

    The work is in multiply-adds of scores; `held`: the items are on the GPU alone. The CPU serves factors that did not
    fit on the GPU during the fit.
    """
    from ..cpu.engine import CpuEngine

    if plan.gpu is None or plan.offloaded:
        return CpuEngine(plan)
    held = held and float(plan.n_users) * plan.n_items * plan.rank >= GPU_SCORES
    if scores >= (HELD_SCORES if held else GPU_SCORES):
        from ..device.cuda import open_device
        from ..gpu.engine import GpuEngine

        try:
            return GpuEngine(open_device(plan.device), plan)
        except DeviceError as error:
            logger.warning("%s; the CPU serves the model instead", error)
    return CpuEngine(plan)
