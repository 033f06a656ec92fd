"""Serving interface of backends, and the choice of a backend for a plan."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Objective, Side, State
from ..core.sparse import RowColumns
from ..errors import DeviceError
from ..plan.types import Plan

logger = logging.getLogger("hybridmf")

GPU_SCORES = 2e10
"""Multiply-adds of scores from which a GPU serves top-N; for less, the CPU is faster than the upload of the items."""


class Engine(Protocol):
    """Top-N, fold-in and the objective on one device; NumPy arrays in and out."""

    name: str

    def pack(self, items: np.ndarray, candidates: np.ndarray | None = None) -> Any:
        """Items, shape (n_items, rank), in the layout of `top_k`; computed once. Default `candidates`: all items."""

    def top_k(
        self, users: np.ndarray, packed: Any, n: int, seen: RowColumns | None, candidates: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and scores, shape (n_users, n), of the `n` best items but those `seen`; -1 and -inf if fewer are left."""

    def gram(self, side: Side, fixed: Factors, objective: Objective) -> Any:
        """The part of `fold_in` of rows of `side` that depends on the fixed side only."""

    def fold_in(
        self,
        side: Side,
        matrix: sp.csr_array,
        objective: Objective,
        fixed: Factors,
        mean: float,
        gram: Any,
        pull: np.ndarray | None = None,
    ) -> Factors:
        """Exact factors of new rows of `side`; `pull`, shape (n_rows, rank), is added to their right-hand sides."""

    def objective_value(self, objective: Objective, matrix: sp.csr_array, state: State) -> float:
        """The objective at a state on given data, in float64."""


def engine_for(plan: Plan, scores: float = np.inf) -> Engine:
    """The backend for a model fitted by `plan`: its GPU if available and worthwhile for the work, else the CPU.

    The work is in multiply-adds of scores. The CPU serves factors that did not fit on the GPU during the fit.
    """
    from ..cpu.engine import CpuEngine

    if plan.gpu is None or plan.offloaded:
        return CpuEngine(plan)
    if scores >= GPU_SCORES:
        from ..device.cuda import open_device
        from ..gpu.engine import GpuEngine

        try:
            return GpuEngine(open_device(plan.device), plan)
        except DeviceError as error:
            logger.warning("%s; the CPU serves the model instead", error)
    return CpuEngine(plan)
