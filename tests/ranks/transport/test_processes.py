"""Ranks as processes: results, failures, interrupts."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hybridmf.errors import CommunicatorError, NotPositiveDefiniteError
from hybridmf.ranks.transport import processes
from hybridmf.ranks.transport.processes import RankTraceback, run_processes
from support.communicators import laws

# --------------------------------------------------------------------------------------------- processes


def stages(communicator, folder):
    """In one go, for a process takes a while to start: laws, then rank 1 is killed and the others say what they saw."""
    checks = laws(communicator)
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        communicator.allreduce(np.zeros(2))
    except CommunicatorError as error:
        Path(folder, str(communicator.rank)).write_text(f"{checks} {time.monotonic() - started} {error}")
        raise


def test_laws_of_processes_and_a_kill(tmp_path):
    with pytest.raises(CommunicatorError, match="rank 1 was killed by SIGKILL"):
        run_processes(3, stages, (str(tmp_path),), timeout=60)
    for rank in (0, 2):
        checks, seconds, error = (tmp_path / str(rank)).read_text().split(maxsplit=2)
        assert int(checks) > 80
        assert float(seconds) < 30
        assert error == "rank 1 ended without closing its communicator (was it killed?)"


def own_failure(communicator, counts):
    if communicator.rank == 1:
        raise NotPositiveDefiniteError("row 3", side="user", row=3, minor=2)
    return communicator.allgatherv(np.array([communicator.rank]), counts)


def test_processes_return_and_fail_as_they_do():
    assert run_processes(1, own_failure, ([1],), timeout=30)[0].tolist() == [0]
    with pytest.raises(NotPositiveDefiniteError, match="row 3") as caught:
        run_processes(2, own_failure, ([1, 1],), timeout=30)
    assert (caught.value.side, caught.value.row, caught.value.minor) == ("user", 3, 2)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "own_failure" in str(caught.value.__cause__)


def unusual(communicator, how):
    if how == "exit":
        os._exit(7)
    while True:  # hangs
        time.sleep(1)


def test_a_process_that_ends_without_an_answer():
    with pytest.raises(CommunicatorError, match="rank 0 ended with exit code 7 and no answer"):
        run_processes(1, unusual, ("exit",), timeout=30)


class Unreadable(Exception):
    """Cannot be made again from what pickle has of it; `distributed` mends those that have only another constructor."""

    def __init__(self):
        super().__init__("no memory left")

    def __reduce__(self):
        return Unreadable, (1, 2)


def test_answers_that_cannot_be_pickled():
    _, error, _ = pickle.loads(processes._packed(threading.Lock(), None, "", 2))
    assert isinstance(error, TypeError)
    assert "what rank 2 returned cannot be pickled" in str(error)
    _, error, text = pickle.loads(processes._packed(None, Unreadable(), "trace", 2))
    assert isinstance(error, CommunicatorError)
    assert (str(error), text) == ("rank 2 failed: Unreadable: no memory left", "trace")


def test_ctrl_c_ends_processes():
    timer = threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_processes(1, unusual, ("hang",), timeout=30)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("started", [False, True])
def test_ctrl_c_while_processes_start(started, monkeypatch):
    start = multiprocessing.context.SpawnProcess.start

    def interrupted(process):
        if started:
            start(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_processes(2, unusual, ("hang",), timeout=30)
    assert not multiprocessing.active_children()
