"""A rank that fails at any point of a fit by several GPUs: its error is raised, no rank waits for it, nothing stays."""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.errors import CommunicatorError, DeviceMemoryError
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.gpu.half import HalfSweep
from hybridmf.gpu.matrix import DeviceMatrix
from hybridmf.gpu.sgd import GpuEpochs
from hybridmf.model import ranked
from hybridmf.ranks import group, mcumsgd
from hybridmf.ranks.gpu_rank import GpuWorker, PartialRows
from hybridmf.ranks.multi_als import MultiALS
from hybridmf.ranks.transport.threads import ThreadCommunicator, run_ranks
from support.devices import Tracked
from support.emulated import EmulatedDevice
from support.ranks import MODELS, Machine, assert_close, both, changed, entries, fit_rank, parts, sweeps, workers_on
from support.ratings import planted

MATRIX = planted(24, 16, 0.4)
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
    (HalfSweep, "steps", 1),
    (HalfSweep, "steps", 2),
    (DeviceFactors, "begin_check", 1),
    (DeviceFactors, "finish_check", 1),
    (DeviceFactors, "finish_check", 2),
]
OWN_THREADS = [(ThreadCommunicator, "allgatherv", 1), (ThreadCommunicator, "barrier", 1)]
ONE_THREAD = [(ThreadCommunicator, "allgatherv_together", 1), (ThreadCommunicator, "allgatherv_together", 2)]


SPLIT_SIDE = [
    (PartialRows, "assemble", 1),
    (PartialRows, "assemble", 2),
    (PartialRows, "finish", 1),
    (PartialRows, "result", 1),
    (ThreadCommunicator, "allreduce", 1),  # of the Gram matrix
    (ThreadCommunicator, "reduce_scatter", 1),
    (ThreadCommunicator, "reduce_scatter", 2),
]
SGD_SET_UP = [
    (GpuEpochs, "hold", 1),
    (GpuEpochs, "hold", 2),
    (GpuEpochs, "move", 1),  # in the first epoch, which is recorded
    (GpuEpochs, "move", 4),
    (EmulatedDevice, "fetch", 1),
    (EmulatedDevice, "fetch", 3),
]
SGD_EPOCH = [  # whose recorded launches and copies are repeated
    (GpuEpochs, "copies", 1),
    (GpuEpochs, "renew", 1),
    (EmulatedDevice, "receive", 1),
    (EmulatedDevice, "receive", 3),
    (GpuEpochs, "begin_result", 1),
]


class Fault:
    """Once armed, the n-th call of a method on rank 1, or on its GPU, raises an error."""

    def __init__(self, where: tuple[Any, str, int], device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        (self.owner, self.name, self.left), self.device = where, device
        self.armed, self.original = False, getattr(self.owner, self.name)
        self.threads = set(threading.enumerate())
        static = isinstance(inspect.getattr_static(self.owner, self.name), staticmethod)
        call = staticmethod(self.call) if static else lambda *given: self.call(*given)
        monkeypatch.setattr(self.owner, self.name, call)

    def call(self, first: Any, *arguments: Any) -> Any:
        here = getattr(first, "device", None) is self.device or getattr(first, "rank", None) == 1
        here = here or first is self.device or isinstance(first, list) or any(each is self.device for each in arguments)
        if self.armed and here:
            self.left -= 1
            if not self.left:
                raise DeviceMemoryError(MESSAGE)
        return self.original(first, *arguments)

    def arm(self, model: Any = None, record: Any = None) -> None:
        """Arm it; also as a callback of a fit, after the first iteration."""
        self.armed = True

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Its error ends the context, and all threads of the fit, although somebody keeps what was raised."""
        with pytest.raises(DeviceMemoryError, match=MESSAGE) as kept:
            yield
        assert not self.left and kept.value is not None
        deadline = time.monotonic() + 10
        while [each for each in set(threading.enumerate()) - self.threads if each.name.startswith("hybridmf")]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def watched(gpus: Machine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Three emulated GPUs, whose memory is free when the test has ended."""
    if "cuda" in request.node.name:
        pytest.skip("faults of emulated GPUs")
    names = gpus(3)
    memory = [Tracked(group.open_device(name), monkeypatch) for name in names]
    yield names
    gc.collect()
    assert [each.alive for each in memory] == [0, 0, 0]


@pytest.mark.parametrize("where", SET_UP + SHARED_SET_UP)
def test_in_set_up(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(where, group.open_device(watched[1]), monkeypatch)
    fault.arm()
    with fault.raised():
        MODELS["explicit"](device=watched).fit(MATRIX)


@functools.cache
def items_of_iterations(*names: str) -> list[np.ndarray]:
    """Factors of the items after each of two iterations that nothing interrupts."""
    states: list[np.ndarray] = []
    model = MODELS["biases"](iterations=2, device=list(names), random_state=0)
    model.fit(MATRIX, callback=lambda model, record: states.append(model.item_factors.copy()))
    return states


@pytest.mark.parametrize("where", HALF_SWEEP + ONE_THREAD)
def test_in_a_half_sweep(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps the last half sweep that all ranks have completed."""
    states = items_of_iterations(*watched)
    fault = Fault(where, group.open_device(watched[1]), monkeypatch)
    model = MODELS["biases"](iterations=3, device=watched, random_state=0)
    with fault.raised():
        model.fit(MATRIX, callback=fault.arm)
    assert model.n_iter_ == 1
    # half sweeps of the second iteration; that of the users is launched before that of the items is complete
    completed = 1 if where == (DeviceFactors, "finish_check", 2) else 0
    np.testing.assert_array_equal(model.item_factors, states[completed])


@pytest.mark.parametrize("where", SPLIT_SIDE)
def test_over_a_split_side(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    solver = MultiALS(*changed(parts("implicit", watched, MATRIX), batch_slots=40), grids=both((3, 1)))
    sweeps(solver, 1)
    before = solver.state.on_host()
    fault = Fault(where, group.open_device(watched[1]), monkeypatch)
    fault.arm()
    with fault.raised():
        solver.update("item")
    assert_close(solver.state.on_host(), before, 0)
    solver.close()


@pytest.mark.parametrize("where", SGD_SET_UP + SGD_EPOCH)
def test_in_sgd(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps the last epoch that all ranks have completed, if there is one."""
    options: dict[str, Any] = {"factors": 8, "device": watched, "random_state": 0}
    monkeypatch.setattr(mcumsgd, "open_device", group.open_device)
    fault = Fault(where, group.open_device(watched[1]), monkeypatch)
    model, expected = hmf.SGD(iterations=3, **options), hmf.SGD(iterations=1, **options)
    if where in SGD_SET_UP:
        fault.arm()
    else:
        expected.fit(MATRIX)
    with fault.raised():
        model.fit(MATRIX, callback=fault.arm)
    if where in SGD_EPOCH:
        assert model.n_iter_ == 1
        np.testing.assert_array_equal(model.user_factors, expected.user_factors)
        np.testing.assert_array_equal(model.item_factors, expected.item_factors)


@pytest.mark.parametrize("where", SET_UP[:1])
def test_in_set_up_of_processes(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(where, group.open_device(watched[1]), monkeypatch)
    fault.arm()
    fail_in_processes(fault, watched, monkeypatch)


@pytest.mark.parametrize("where", HALF_SWEEP[:1] + OWN_THREADS)
def test_in_a_half_sweep_of_processes(where: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_processes(Fault(where, group.open_device(watched[1]), monkeypatch), watched, monkeypatch)


def fail_in_processes(fault: Fault, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ranks as processes do; all others end with the cause."""
    monkeypatch.setattr(ranked, "_worker", workers_on(names))
    causes: dict[int, str] = {}

    def run(communicator: Any) -> None:
        model = MODELS["explicit"](device="cpu", random_state=0, iterations=3)
        try:
            fit_rank(model, entries(MATRIX, communicator.rank, 3), communicator, "cuda:0", callback=fault.arm)
        except CommunicatorError as error:
            causes[communicator.rank] = str(error)
            raise

    with fault.raised():
        run_ranks(3, run, timeout=30)
    assert causes.keys() == {0, 2}
    assert all("rank 1 failed" in cause and MESSAGE in cause for cause in causes.values())
