"""Fits on a stand-in for CuPy, whose kernels compute nothing and fail on request."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Side, State
from hybridmf.device.cuda import open_device
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.model.training import LocalRatings
from hybridmf.plan.solver import Alternating
from hybridmf.plan.types import Plan
from support.fake_cupy import FakeCupy


class Half:
    """What `FailingSolver` does at some half sweep of the next fits, from 1: launch the kernel "crash" or "hang"."""

    number, kernel = 0, "fine"


class FailingSolver(Alternating):
    """Half sweeps whose new factors are all equal to their number."""

    def __init__(self, plan: Plan, state: State, how: type[Half]) -> None:
        self.device, self.plan, self.mean, self.how = open_device("cuda"), plan, state.mean, how
        self.count = 0
        self.inward: dict[Side, Any] = {side: state.side(side) for side in SIDES}

    @property
    def state(self) -> State:
        return State(self.inward["user"], self.inward["item"], self.mean)

    def solve(self, side: Side) -> DeviceFactors:
        self.count += 1
        device, failing = self.device, self.count == self.how.number
        with device.active():
            device.kernel("text", self.how.kernel if failing else "fine", ())((1,), (32,), (), 0)
            table = device.zeros((len(self.inward[side]), self.plan.factors), np.float32)
            table[...] = self.count
            solved = DeviceFactors(device, table, self.plan.factors, None)
            solved.finish_check(device.begin_download(device.zeros(3, np.uint32)))
        return solved

    def keep(self, side: Side, solved: DeviceFactors) -> None:
        self.inward[side] = solved

    def objective_value(self) -> float:
        self.device.synchronize()
        return 0.0


def serve(patch: pytest.MonkeyPatch) -> tuple[FakeCupy, type[Half]]:
    """Let ALS on a GPU use `FailingSolver` on a stand-in for CuPy; returns this and what fails."""

    class Ours(Half):
        pass

    module = FakeCupy()
    patch.setitem(sys.modules, "cupy", module)
    original = hmf.ExplicitALS._solver

    def solver(model: Any, plan: Plan, objective: Any, ratings: Any, state: State, completed: int) -> Any:
        if plan.gpu is None:
            return original(model, plan, objective, ratings, state, completed)
        return FailingSolver(plan, state, Ours)

    patch.setattr(LocalRatings, "_upload", lambda ratings, plan, devices: ratings.on_host(plan))
    patch.setattr(hmf.ExplicitALS, "_solver", solver)
    return module, Ours


def model_on(device: str, **options: Any) -> Any:
    """An estimator of few factors."""
    return hmf.ExplicitALS(
        **({"biases": False, "factors": 4, "iterations": 3, "random_state": 0, "device": device} | options)
    )


@contextlib.contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    """Send Ctrl-C to this process unless the context ends before."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
