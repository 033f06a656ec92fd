"""Fits by several ranks: models, solvers, shares of ratings, comparisons."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import SIDES, State
from hybridmf.device.cuda import device_count
from hybridmf.errors import DeviceError
from hybridmf.model.fit import Fit, Options
from hybridmf.model.ranked import RankedRatings, aborting
from hybridmf.model.training import LocalRatings
from hybridmf.plan.grid import Grid
from hybridmf.plan.make import make_plan
from hybridmf.ranks import gpu_rank, su_als
from hybridmf.ranks.cpu_rank import CpuWorker
from hybridmf.ranks.shares import SharedEntries
from hybridmf.ranks.su_als import RankALS
from support.solvers import iterate


def both(grid: tuple[int, int]) -> dict[str, Grid]:
    return {"user": Grid(*grid), "item": Grid(*grid)}


def sweeps(solver: Any, n: int = 2) -> State:
    iterate(solver, n)
    return solver.state.on_host()


def assert_close(ours: State, theirs: State, tolerance: float = 2e-4) -> None:
    for side in SIDES:
        a, b = ours.side(side), theirs.side(side)
        np.testing.assert_allclose(a.matrix, b.matrix, atol=tolerance * np.abs(b.matrix).max())
        assert (a.bias is None) == (b.bias is None)
        if a.bias is not None and b.bias is not None:
            np.testing.assert_allclose(a.bias, b.bias, atol=tolerance * max(1.0, np.abs(b.bias).max()))


RANK = 7
"""As in half_sweeps.py, so that few kernels are compiled for the emulator."""

MODELS: dict[str, Callable[..., Any]] = {
    "explicit": lambda **more: hmf.ExplicitALS(**{"biases": False, "regularization": 0.05, "factors": RANK} | more),
    "biases": lambda **more: hmf.ExplicitALS(**{"factors": RANK - 1, "regularization": 0.05} | more),
    "implicit": lambda **more: hmf.ImplicitALS(factors=RANK, alpha=3.0, regularization=0.1, **more),
    "implicit cg": lambda **more: hmf.ImplicitALS(factors=RANK, alpha=3.0, regularization=0.1, solver="cg", **more),
    "nonnegative": lambda **more: hmf.ExplicitALS(
        **{"factors": RANK - 1, "regularization": 0.05, "nonnegative": True} | more
    ),
}

Machine = Callable[[int], list[str]]


def parts(name: str, devices: Any, matrix: sp.csr_array, **more: Any) -> tuple[Any, ...]:
    """Arguments of a solver."""
    model = MODELS[name](device=devices, random_state=0, **more)
    checked = model._check_matrix(matrix)
    plan = make_plan(model._objective(), model._settings(), checked.shape, checked.nnz)
    ratings = LocalRatings(model, checked).on_host(plan)
    state = model._initial_state(ratings, plan, model._objective())
    return checked, ratings.item_users, model._objective(), plan, state


def one_device(users: Any, items: Any, objective: Any, plan: Any, state: Any, device: Any = None) -> RankALS:
    """The solver of one device: the CPU by default."""
    worker = CpuWorker(plan.num_threads) if device is None else gpu_rank.GpuWorker(device)
    return RankALS(worker=worker, objective=objective, **su_als.one_device(users, items, plan, state))


def changed(arguments: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    return (*arguments[:3], arguments[3].changed(**changes), arguments[4])


# --------------------------------------------------------------------------------------------- on GPUs


def need_gpus(at_least: int) -> int:

    try:
        count = device_count()
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    if count < at_least:
        pytest.skip(f"needs {at_least} GPUs, there are {count}")
    return count


def entries(matrix: sp.csr_array, rank: int, size: int, **options) -> SharedEntries:
    """Every `size`-th entry, in an order of its own."""
    triplets = matrix.tocoo()
    mine = np.random.default_rng(rank).permutation(np.arange(rank, matrix.nnz, size))
    users, items = triplets.coords[0][mine], triplets.coords[1][mine]
    return SharedEntries(users, items, triplets.data[mine], matrix.shape, **options)


def fit_rank(model: Any, ratings: Any, communicator: Any, device: str = "cpu", **options: Any) -> Any:
    """One rank of a fit to its share of the ratings."""
    with aborting(communicator):
        source = RankedRatings(model, ratings, communicator, device)
        return Fit(model, source, Options(**options), communicator).run()


def no_loaders() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "hybridmf-slabs"]


def workers_on(names: list[str]) -> Any:
    """`ranked._worker` on emulated GPUs, or the real ones."""

    def worker(plan: Any, device: str, communicator: Any) -> Any:
        return gpu_rank.gpu_worker(names, communicator)

    return worker
