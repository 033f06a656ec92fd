"""What a fit would do, without doing it: `hybridmf.plan`."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from sklearn.base import clone

from ..als import ExplicitALS
from ..core.system import parse_bytes
from ..core.validate import MAX_AXIS, check_int, check_nonempty
from ..model.base import FactorModel
from ..plan.half_sweep import Problem
from ..plan.make import make_plan, plan_for
from ..plan.partitions import plan_scale
from ..plan.ranks import MAX_GPUS, ScalePlan
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
    """What fitting `model` would do: device, kernel, threads, memory, and why, without doing it.

    With `gpus` it plans for a machine of so many GPUs, whether it is there or not: how ALS would be partitioned over
    them, what would be replicated, split or streamed, and how long an iteration would take.

    Parameters
    ----------
    user_items : Ratings, Store or sparse matrix, shape (n_users, n_items), optional
        The data; or give `shape` and `nnz` for data you do not have.
    model : estimator
        Default: ``ExplicitALS()``.
    shape : (n_users, n_items), optional
    nnz : int, optional
        Number of entries; a float such as 112e9 if it is whole.
    factors : int, optional
        Rank, in place of the model's.
    gpus : int, optional
        GPUs of a machine to plan for; they are taken for H200s in all but their memory.
    gpu_memory : int or str, optional
        Of each of them, such as "80GB". Default: the model's `gpu_memory_limit`, else 141 GB.
    host_memory : int or str, optional
        Of the machine, which decides between streaming from there and from disk. Default: 2 TB.

    Returns
    -------
    Plan
        Or with `gpus` a `hybridmf.plan.ranks.ScalePlan`; both print themselves.

    Raises
    ------
    MemoryBudgetError
        No partition fits on the GPUs; says what would.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> plan = hmf.plan(shape=(480_189, 17_770), nnz=99_072_112, model=hmf.ExplicitALS(factors=100, device="cpu"))
    >>> plan.n_users
    480189
    """
    matrix = None
    model = ExplicitALS() if model is None else model
    if not isinstance(model, FactorModel):
        hint = f"; make one: {model.__name__}()" if isinstance(model, type) else ""
        raise TypeError(f"model must be an estimator such as ExplicitALS(factors=64), got {model!r}{hint}")
    if user_items is not None:
        if shape is not None or nnz is not None:
            raise ValueError("give either user_items or shape and nnz, not both")
        matrix = model._check_matrix(user_items)
        check_nonempty(matrix, "user_items")
        shape, nnz = matrix.shape, matrix.nnz
    if shape is None or nnz is None:
        raise ValueError("plan needs user_items, or shape and nnz")
    if factors is not None:
        model = clone(model).set_params(factors=factors)
    sizes = _check_sizes(shape, nnz)
    if gpus is None:
        if gpu_memory is not None or host_memory is not None:
            raise ValueError("gpu_memory and host_memory describe a machine to plan for; give gpus, their number, too")
        objective, settings = model._objective(), model._settings()
        return make_plan(objective, settings, *sizes) if matrix is None else plan_for(matrix, objective, settings)
    return _plan_machine(model, sizes, check_int("gpus", gpus, 1, MAX_GPUS), gpu_memory, host_memory)


def _plan_machine(model: Any, sizes: tuple[tuple[int, int], int], gpus: int, memory: Any, host: Any) -> ScalePlan:
    """ALS on GPUs that need not be there."""
    objective, settings = model._objective(), model._settings()
    if settings.method is not None:
        raise ValueError(f"gpus={gpus} plans ALS; {type(model).__name__} has no planner: name devices that are there")
    rank = settings.factors + (1 if objective.biases else 0)
    problem = Problem(*sizes, rank, np.dtype(settings.dtype).itemsize, implicit=objective.is_implicit)
    return plan_scale(
        problem,
        gpus,
        settings.gpu_memory_limit if memory is None else parse_bytes("gpu_memory", memory),
        host_bytes=None if host is None else parse_bytes("host_memory", host),
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
