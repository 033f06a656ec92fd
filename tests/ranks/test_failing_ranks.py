"""A rank that fails at any point of a fit by several GPUs: its error is raised, no rank waits for it, nothing stays."""

from __future__ import annotations

import gc
import inspect
import threading
import time
from typing import Any

import numpy as np
import pytest

from hybridmf.errors import CommunicatorError, DeviceMemoryError
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.gpu.half import HalfSweep
from hybridmf.gpu.matrix import DeviceMatrix
from hybridmf.model.loop import Observers
from hybridmf.ranks import group
from hybridmf.ranks.gpu_rank import GpuWorker
from hybridmf.ranks.transport.threads import ThreadCommunicator, run_ranks
from hybridmf.tools import spmd
from support.devices import Tracked
from support.ranks import MODELS, Machine, entries, workers_on
from support.ratings import planted

MATRIX = planted(60, 40, 0.3)
MESSAGE = "cuda:1 is out of memory"

SET_UP = [
    (GpuWorker, "own", 1),  # draws the users' factors
    (GpuWorker, "own", 2),
    (GpuWorker, "whole", 1),  # makes a half sweep
    (GpuWorker, "whole", 2),
]
SHARED_SET_UP = [
    (DeviceMatrix, "is_canonical", 1),
    (DeviceMatrix, "transposed", 1),  # of the users' rows
    (ThreadCommunicator, "sendrecv", 2),
    (DeviceMatrix, "transposed", 2),  # of the entries that it has received
    (DeviceMatrix, "transposed", 3),
]
HALF_SWEEP = [
    (HalfSweep, "launches", 1),
    (HalfSweep, "launches", 2),
    (DeviceFactors, "begin_check", 1),
    (DeviceFactors, "finish_check", 1),
    (DeviceFactors, "finish_check", 2),
]
OWN_THREADS = [(ThreadCommunicator, "allgatherv", 1), (ThreadCommunicator, "barrier", 1)]
ONE_THREAD = [(ThreadCommunicator, "allgatherv_together", 1), (ThreadCommunicator, "allgatherv_together", 2)]


class Fault:
    """Once armed, the n-th call of a method on rank 1, or on its GPU, raises an error."""

    def __init__(self, where: tuple[Any, str, int], device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        (self.owner, self.name, self.left), self.device = where, device
        self.armed, self.original = False, getattr(self.owner, self.name)
        static = isinstance(inspect.getattr_static(self.owner, self.name), staticmethod)
        call = staticmethod(self.call) if static else lambda *given: self.call(*given)
        monkeypatch.setattr(self.owner, self.name, call)

    def call(self, first: Any, *arguments: Any) -> Any:
        here = getattr(first, "device", None) is self.device or getattr(first, "rank", None) == 1
        here = here or isinstance(first, list) or any(each is self.device for each in arguments)
        if self.armed and here:
            self.left -= 1
            if not self.left:
                raise DeviceMemoryError(MESSAGE)
        return self.original(first, *arguments)

    def arm(self, model: Any = None, record: Any = None) -> None:
        """Arm it; also as a callback of a fit, after the first iteration."""
        self.armed = True


@pytest.fixture
def watched(gpus: Machine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Three emulated GPUs, whose memory and threads are gone when the test has ended."""
    if "cuda" in request.node.name:
        pytest.skip("faults of emulated GPUs")
    names, before = gpus(3), set(threading.enumerate())
    memory = [Tracked(group.open_device(name), monkeypatch) for name in names]
    yield names
    deadline = time.monotonic() + 10
    while [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("hybridmf")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gc.collect()
    assert [each.alive for each in memory] == [0, 0, 0]


@pytest.mark.parametrize("where", SET_UP + SHARED_SET_UP)
def test_in_set_up(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(where, group.open_device(watched[1]), monkeypatch)
    fault.arm()
    with pytest.raises(DeviceMemoryError, match=MESSAGE):
        MODELS["explicit"](device=watched).fit(MATRIX)
    assert not fault.left


@pytest.mark.parametrize("where", HALF_SWEEP + ONE_THREAD)
def test_in_a_half_sweep(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps the last half sweep that all ranks have completed."""
    options: dict[str, Any] = {"device": watched, "random_state": 0}
    states: list[Any] = []
    MODELS["biases"](iterations=2, **options).fit(
        MATRIX, callback=lambda model, record: states.append(model.item_factors)
    )
    fault = Fault(where, group.open_device(watched[1]), monkeypatch)
    model = MODELS["biases"](iterations=3, **options)
    with pytest.raises(DeviceMemoryError, match=MESSAGE):
        model.fit(MATRIX, callback=fault.arm)
    assert not fault.left and model.n_iter_ == 1
    completed = 1 if where in HALF_SWEEP and where[2] == 2 else 0  # half sweeps of the second iteration
    np.testing.assert_array_equal(model.item_factors, states[completed])


@pytest.mark.parametrize("where", SET_UP)
def test_in_set_up_of_processes(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(where, group.open_device(watched[1]), monkeypatch)
    fault.arm()
    fail_in_processes(fault, watched, monkeypatch)


@pytest.mark.parametrize("where", HALF_SWEEP + OWN_THREADS)
def test_in_a_half_sweep_of_processes(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_processes(Fault(where, group.open_device(watched[1]), monkeypatch), watched, monkeypatch)


def fail_in_processes(fault: Fault, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ranks as processes do; all others end with the cause."""
    monkeypatch.setattr(spmd, "_worker", workers_on(names))
    causes: dict[int, str] = {}
    options = spmd.RankOptions("cuda:0")

    def run(communicator: Any) -> None:
        model = MODELS["explicit"](device="cpu", random_state=0, iterations=3)
        observers = Observers(callback=fault.arm)
        try:
            spmd.fit_rank(model, entries(MATRIX, communicator.rank, 3), communicator, options, observers)
        except CommunicatorError as error:
            causes[communicator.rank] = str(error)
            raise

    with pytest.raises(DeviceMemoryError, match=MESSAGE):
        run_ranks(3, run, timeout=30)
    assert not fault.left and causes.keys() == {0, 2}
    assert all("rank 1 failed" in cause and MESSAGE in cause for cause in causes.values())
