"""Ranks that are processes of this machine: started, watched and ended by the one that wants their results."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ...core.validate import check_int
from ...errors import CommunicatorError
from .communicator import TIMEOUT
from .messages import check_timeout
from .sockets import SocketCommunicator
from .threads import PATIENCE

logger = logging.getLogger("hybridmf")


class RankTraceback(Exception):
    """Where an exception was raised in another process: its traceback as text."""


def run_processes(
    size: int, function: Callable[..., Any], args: Sequence[Any] = (), *, timeout: float = TIMEOUT
) -> list[Any]:
    """Run ``function(communicator, *args)`` in a process for each rank.

    Processes are spawned, so the function must be one that they can import (not a lambda), and a program that calls
    this needs the usual ``if __name__ == "__main__":``.

    Parameters
    ----------
    size : int
    function : callable
    args : sequence
        Pickled, like the results.
    timeout : float
        Seconds that a rank waits for another before all fail.

    Returns
    -------
    list
        What each rank returned.

    Raises
    ------
    CommunicatorError
        A process was killed or ended without an answer.
    Exception
        The first that a rank raised; its traceback there is the cause.
    KeyboardInterrupt
        All processes have ended.
    """
    size, timeout = check_int("size", size, 1), check_timeout(timeout)
    context = multiprocessing.get_context("spawn")
    token = secrets.token_hex(32)
    crew = _Crew()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
        try:
            for rank in range(size):
                ours, theirs = context.Pipe(duplex=False)
                rank_listener = listener if rank == 0 else None
                parameters = (rank, size, address, rank_listener, token, timeout, theirs, function, tuple(args))
                process = context.Process(target=_rank, args=parameters, name=f"hybridmf rank {rank}", daemon=True)
                crew.add(process, ours)  # before it starts: an interrupt may come right after
                process.start()
                theirs.close()
            return crew.results()
        finally:
            crew.end()


class _Crew:
    """Processes and what they answer."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.answers: dict[int, tuple[Any, BaseException | None]] = {}
        self.lost: list[CommunicatorError] = []

    def add(self, process: Any, pipe: Connection) -> None:
        self.processes.append(process)
        self.pipes.append(pipe)

    def results(self) -> list[Any]:
        """What all have returned; after a failure the others get a while to notice it."""
        deadline = float("inf")
        while len(self.answers) < len(self.processes) and time.monotonic() < deadline:
            self._listen(min(1.0, max(0.0, deadline - time.monotonic())))
            if deadline == float("inf") and any(error is not None for _, error in self.answers.values()):
                deadline = time.monotonic() + PATIENCE
        errors = [error for _, error in self.answers.values() if error is not None]
        if errors:
            # that others could not go on without it is a consequence of what one of them met
            own = [error for error in errors if not isinstance(error, CommunicatorError)]
            raise (own or self.lost or errors)[0]
        return [self.answers[rank][0] for rank in range(len(self.processes))]

    def _listen(self, seconds: float) -> None:
        waiting = [rank for rank in range(len(self.processes)) if rank not in self.answers]
        places: dict[Any, int] = {}
        for rank in waiting:
            places[self.pipes[rank]] = places[self.processes[rank].sentinel] = rank
        for rank in dict.fromkeys(places[ready] for ready in wait(list(places), seconds)):
            self.answers[rank] = self._answer(rank)

    def _answer(self, rank: int) -> tuple[Any, BaseException | None]:
        process, pipe = self.processes[rank], self.pipes[rank]
        try:
            if pipe.poll(0):  # what it sent before it ended counts
                result, error, text = pickle.loads(pipe.recv_bytes())
                if error is not None:
                    error.__cause__ = RankTraceback(f"on rank {rank}:\n{text}")
                return result, error
        except (EOFError, OSError):
            pass
        process.join(PATIENCE)
        self.lost.append(CommunicatorError(f"rank {rank} {_end_of(process.exitcode)}"))
        return None, self.lost[-1]

    def end(self) -> None:
        """No process outlives the call."""
        for process in self.processes:
            if process.pid is None:  # the start failed
                continue
            process.join(0 if process.is_alive() and len(self.answers) < len(self.processes) else PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()


def _end_of(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {code} and no answer; its messages are on standard error"


def _rank(
    rank: int,
    size: int,
    address: tuple[str, int],
    listener: socket.socket | None,
    token: str,
    timeout: float,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """A process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the one who started this, who ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    communicator: SocketCommunicator | None = None
    result, failure, text = None, None, ""
    try:
        communicator = SocketCommunicator.connect(rank, size, address, token=token, timeout=timeout, listener=listener)
        result = function(communicator, *args)
        communicator.close()
    except BaseException as error:  # whatever it is, the others must not wait
        failure, text = error, traceback.format_exc()
        if communicator is not None:
            communicator.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
    pipe.send_bytes(_packed(result, failure, text, rank))


def _packed(result: Any, failure: BaseException | None, text: str, rank: int) -> bytes:
    """An answer in a form that can be read: not all exceptions can."""
    try:
        content = pickle.dumps((result, failure, text))
        pickle.loads(content)
        return content
    except Exception as problem:
        if failure is None:
            failure = TypeError(f"what rank {rank} returned cannot be pickled: {problem}")
        else:
            failure = CommunicatorError(f"rank {rank} failed: {type(failure).__name__}: {failure}")
        return pickle.dumps((None, failure, text))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
