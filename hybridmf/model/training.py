"""The ratings of one fit: both orientations, where the solver reads them, and facts about their values."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, Side
from ..core.sparse import ValueSummary, transposed
from ..core.validate import csr_arrays
from ..data.store import StoreMatrix
from ..device.cuda import Device
from ..plan.types import Plan
from .late import LateMatrix
from .learned import scale_of_values, summary_of
from .prepared import PreparedRatings

logger = logging.getLogger("hybridmf")


@dataclass(frozen=True)
class TrainingData:
    """Validated ratings as a solver takes them.

    Attributes
    ----------
    user_items, item_users : csr_array, StoreMatrix or DeviceMatrix, or DealtRows and DealtColumns on several GPUs
        The ratings in both orientations.
    values : ValueSummary or StoreMatrix
        Sums and ranges of the values.
    seen : csr_array, shape (n_users, n_items), or None
        The `pattern` of the entries, if they are prepared.
    """

    user_items: Any
    item_users: Any
    values: ValueSummary | StoreMatrix
    seen: Any = None

    @classmethod
    def for_als(
        cls, matrix: sp.csr_array | StoreMatrix | LateMatrix, plan: Plan, source: PreparedRatings | None
    ) -> TrainingData:
        """Both orientations for ALS, on the GPU if the plan has them there; its kernels are compiled meanwhile.

        Raises
        ------
        RatingsError, DuplicateEntriesError
            Of a matrix whose check is late.
        """
        if plan.gpu is None:
            return cls.on_host(matrix, plan, source)
        from ..device.cuda import open_device
        from ..gpu.half import programs_of

        devices = [open_device(name) for name in plan.devices or (plan.device,)]
        for device in devices:
            device.compile_ahead(programs_of(device, plan))
        values = _values_of(matrix, plan, source)
        if plan.ratings_on_device:
            return cls._on_devices(devices, matrix, plan, source, values)
        return cls.on_host(matrix, plan, source, values)

    @classmethod
    def on_host(
        cls,
        matrix: sp.csr_array | StoreMatrix,
        plan: Plan,
        source: PreparedRatings | None = None,
        values: ValueSummary | StoreMatrix | None = None,
    ) -> TrainingData:
        """Both orientations in memory or in a store; `values` if they are known."""
        values = _values_of(matrix, plan, source) if values is None else values
        if source is not None:
            log_detour(source, plan)
            return cls(matrix, source.item_users, values, source.seen)
        item_users = matrix.transposed() if isinstance(matrix, StoreMatrix) else transposed(matrix, plan.num_threads)
        return cls(matrix, item_users, values)

    @classmethod
    def _on_devices(
        cls,
        devices: Sequence[Device],
        matrix: Any,
        plan: Plan,
        source: PreparedRatings | None,
        values: ValueSummary | StoreMatrix,
    ) -> TrainingData:
        """Both orientations on the GPUs of the plan; unless they are there, one is uploaded and transposed there."""
        held: tuple[Any, Any] | None = None
        if source is not None:
            held = None if plan.devices else source.on_device(plan.device)
            if held is None:
                log_detour(source, plan)
        if isinstance(matrix, LateMatrix):
            held = _uploaded(devices, plan, matrix.shape, matrix.indptr, *matrix.unchecked)
            matrix.begin()
            if held is None:
                matrix = matrix.checked  # raises, or has them sorted
                values = summary_of(matrix, plan.num_threads)
        if held is None:
            held = _uploaded(devices, plan, matrix.shape, *csr_arrays(matrix))
            assert held is not None  # checked on the host
        return cls(*held, values, None if source is None else source.seen)

    @functools.cached_property
    def degrees(self) -> dict[Side, np.ndarray]:
        """Entries of each row of either side, int64."""
        return {
            "user": np.diff(self.user_items.indptr).astype(np.int64, copy=False),
            "item": np.diff(self.item_users.indptr).astype(np.int64, copy=False),
        }

    @property
    def shape(self) -> tuple[int, int]:
        """(n_users, n_items)."""
        users, items = self.user_items.shape
        return users, items

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return int(self.user_items.nnz)

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.values.total / self.nnz

    def scale(self, objective: Objective) -> float:
        """Scale that standardizes explicit ratings; see `hybridmf.core.objective.rating_scale`."""
        return scale_of_values(self.values, self.nnz, objective)

    def spread(self, objective: Objective) -> float:
        """Standard deviation of explicit ratings; their root mean square if all are equal."""
        return self.scale(replace(objective, biases=True))


def _uploaded(
    devices: Sequence[Device],
    plan: Plan,
    shape: tuple[int, int],
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
) -> tuple[Any, Any] | None:
    """Both orientations of a matrix on the GPUs of a plan, from its CSR arrays; None unless these are canonical."""
    if plan.devices:
        from ..ranks.dealt import deal

        return deal(devices, shape, indptr, indices, data, plan.row_cost)
    from ..gpu.intake import uploaded

    with devices[0].active():
        found = uploaded(devices[0], shape, indptr, indices, data)
        return None if found is None else (found, found.transposed(devices[0]))


def _values_of(matrix: Any, plan: Plan, source: PreparedRatings | None) -> ValueSummary | StoreMatrix:
    if isinstance(matrix, LateMatrix):
        return matrix.values
    return summary_of(matrix, plan.num_threads) if source is None else source.values


def log_detour(source: PreparedRatings, plan: Plan) -> None:
    """Log that a fit reads prepared ratings from the host, unless it runs there and they were prepared there."""
    if source.device != "cpu" or plan.gpu is not None:
        logger.info(
            "the ratings are prepared on %s, and this fit on %s starts from the copy in the memory of the host",
            source.device,
            plan.device_name,
        )
