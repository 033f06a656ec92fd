"""`hybridmf.plan`: the plan of a fit without running it."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from ..als import ExplicitALS
from ..core.system import parse_bytes
from ..core.validate import MAX_AXIS, check_int, check_nonempty
from ..model.base import check_model
from ..model.estimator import unfitted
from ..model.prepared import prepared_for
from ..plan.als_gpu import plan_on_h200s
from ..plan.make import NOTHING, make_plan, plan_for, undecided
from ..plan.partitions import MAX_GPUS, ScalePlan, plan_scale
from ..plan.types import Plan


@overload
def plan(
    user_items: Any = None,
    model: Any = None,
    *,
    shape: tuple[int, int] | None = None,
    nnz: float | None = None,
    factors: int | None = None,
) -> Plan: ...


@overload
def plan(
    user_items: Any = None,
    model: Any = None,
    *,
    shape: tuple[int, int] | None = None,
    nnz: float | None = None,
    factors: int | None = None,
    gpus: int,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
) -> ScalePlan: ...


def plan(
    user_items: Any = None,
    model: Any = None,
    *,
    shape: tuple[int, int] | None = None,
    nnz: float | None = None,
    factors: int | None = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
) -> Plan | ScalePlan:
    """Plan a fit without running it: device, kernels, threads, memory, and the reasons for the choices.

    With `gpus`, it plans ALS for a hypothetical machine with that number of GPUs: the partition over the GPUs, which
    data are replicated, split or streamed, and the predicted time of an iteration.

    Parameters
    ----------
    user_items : Ratings, Store or sparse matrix, shape (n_users, n_items), optional
        The data. Alternatively, give `shape` and `nnz`.
    model : estimator
        Default: ``ExplicitALS()``.
    shape : (n_users, n_items), optional
    nnz : int, optional
        Number of entries; a float with an integer value, such as 112e9, is accepted.
    factors : int, optional
        Rank. Default: that of the model.
    gpus : int, optional
        Number of GPUs of the machine; except for their memory they are assumed to be H200s.
    gpu_memory : int or str, optional
        Memory of each GPU, such as "80GB". Default: `gpu_memory_limit` of the model, else 141 GB.
    host_memory : int or str, optional
        Memory of the host, which decides between streaming from memory and from disk. Default: 2 TB.

    Returns
    -------
    Plan
        With `gpus`, a `hybridmf.scale.ScalePlan`. ``print`` shows either.

    Raises
    ------
    MemoryBudgetError
        No partition fits on the GPUs; the message gives the memory that would suffice.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> model = hmf.ExplicitALS(factors=100, device="cpu")
    >>> plan = hmf.plan(shape=(480_189, 17_770), nnz=99_072_112, model=model)
    >>> plan.n_users
    480189
    """
    matrix, source = None, None
    model = ExplicitALS() if model is None else model
    check_model(model, "ExplicitALS")
    if user_items is not None:
        if shape is not None or nnz is not None:
            raise ValueError("give either user_items or shape and nnz, not both")
        source = prepared_for(user_items, model._settings().dtype, model._objective().is_implicit)
        matrix = model._check_matrix(user_items) if source is None else source.user_items
        check_nonempty(matrix, "user_items")
        shape, nnz = matrix.shape, matrix.nnz
    if shape is None or nnz is None:
        raise ValueError("plan needs user_items, or shape and nnz")
    if factors is not None:
        model = unfitted(model, factors=factors)
    sizes = _check_sizes(shape, nnz)
    objective, settings = model._objective(), model._settings()
    if gpus is None:
        if gpu_memory is not None or host_memory is not None:
            raise ValueError("gpu_memory and host_memory describe a machine to plan for; give gpus, their number, too")
        if matrix is None:
            return make_plan(objective, settings, *sizes)
        return plan_for(matrix, objective, settings, NOTHING if source is None else source.held)
    gpus = check_int("gpus", gpus, 1, MAX_GPUS)
    if settings.method.kind != "als":
        raise ValueError(f"gpus={gpus} plans ALS; {type(model).__name__} has no planner: name devices that are there")
    return plan_scale(
        plan_on_h200s(undecided(objective, settings, *sizes), settings, objective, gpus),
        gpus,
        settings.gpu_memory_limit if gpu_memory is None else parse_bytes("gpu_memory", gpu_memory),
        host_bytes=None if host_memory is None else parse_bytes("host_memory", host_memory),
    )


def _check_sizes(shape: Any, nnz: Any) -> tuple[tuple[int, int], int]:
    try:
        rows, columns = shape
    except (TypeError, ValueError):
        raise ValueError(f"shape must be two integers (n_users, n_items), got {shape!r}") from None
    rows, columns = check_int("shape[0]", rows, 1, MAX_AXIS), check_int("shape[1]", columns, 1, MAX_AXIS)
    if isinstance(nnz, (float, np.floating)) and float(nnz).is_integer():
        nnz = int(nnz)
    nnz = check_int("nnz", nnz, 0)
    if nnz > rows * columns:
        raise ValueError(f"nnz={nnz} entries do not fit in the {rows * columns} places of shape ({rows}, {columns})")
    return (rows, columns), nnz
