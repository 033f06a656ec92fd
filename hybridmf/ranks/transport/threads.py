"""Ranks that are threads of one process, and their driver: the first failure stops all and is raised unchanged."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ...core.validate import check_int
from ...errors import CommunicatorError
from .communicator import TIMEOUT
from .messages import MessageCommunicator, Transport, check_counts, check_timeout

logger = logging.getLogger("hybridmf")

Result = TypeVar("Result")

SWITCH_INTERVAL = 1e-4
"""Switch interval of threads in Python, in seconds.

With the default of 5 ms, a rank waiting to launch a kernel may leave its GPU idle for about as long as the kernels of
a half sweep take on several GPUs."""

PATIENCE = 10.0
"""Seconds for ranks to notice that another has failed; ranks that still compute after that are abandoned."""


class Hub(Transport):
    """Mailboxes between threads: a `hybridmf.ranks.transport.messages.Transport` within one process."""

    one_process = True

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.boxes: dict[tuple[str, int, int], deque[tuple[str, np.ndarray]]] = {}
        self.left: dict[int, str] = {}
        # by group: name of the call, the first rank to arrive, the members that have arrived
        self.meetings: dict[str, tuple[str, int, set[int]]] = {}
        self._cause = ""

    def send(self, context: str, source: int, dest: int, what: str, array: np.ndarray) -> None:
        with self.changed:
            self.check()
            self.boxes.setdefault((context, source, dest), deque()).append((what, array))
            self.changed.notify_all()

    def receive(self, context: str, source: int, dest: int, what: str) -> tuple[str, np.ndarray]:
        key, deadline = (context, source, dest), time.monotonic() + self.timeout
        with self.changed:
            while True:
                self.check()
                box = self.boxes.get(key)
                if box:
                    return box.popleft()
                rest = deadline - time.monotonic()
                if source in self.left:
                    self.give_up(source, dest, what, self.left[source])
                elif rest <= 0:
                    self.give_up(source, dest, what)
                else:
                    self.changed.wait(rest)

    def meet(self, context: str, members: Sequence[int], rank: int, what: str, timeout: float) -> None:
        """Wait until all members, ranks of this transport, have made the same call; `rank` is which of them this is."""
        deadline = time.monotonic() + timeout
        with self.changed:
            self.check()
            key = f"{context} of {members[0]}"  # groups of other colors share the context and no member
            called, first, here = self.meetings.setdefault(key, (what, rank, set()))
            if called != what:
                self.fail(
                    f"rank {first} calls {called} while rank {rank} calls {what}; all ranks have to make "
                    "the same calls in the same order"
                )
                self.check()
            here.add(members[rank])
            if len(here) == len(members):
                del self.meetings[key]
                self.changed.notify_all()
            while len(here) < len(members):
                self.check()
                rest = deadline - time.monotonic()
                gone = [r for r, member in enumerate(members) if member in self.left and member not in here]
                if gone:
                    self.give_up(gone[0], rank, what, self.left[members[gone[0]]])
                elif rest <= 0:
                    self.fail(f"rank {rank} waited {timeout:g} s for the others in {what}")
                else:
                    self.changed.wait(rest)

    def fail(self, cause: str) -> None:
        """Fail with the first cause, and wake all waiting ranks."""
        with self.changed:
            self._cause = self._cause or cause or "aborted"
            self.changed.notify_all()

    def check(self) -> None:
        if self._cause:
            raise CommunicatorError(self._cause)

    def leave(self, rank: int, how: str) -> None:
        """Ranks that wait for this one from now on fail; its sent arrays can still be received."""
        with self.changed:
            self.left[rank] = how
            self.changed.notify_all()

    def close(self, rank: int) -> None:
        self.leave(rank, "has closed its communicator")

    def unread(self) -> str:
        """Description of an array that was sent and never received; empty without one."""
        with self.changed:
            waiting = [(key, box[0][0]) for key, box in self.boxes.items() if box]
        return "".join(f"rank {key[2]} never received what rank {key[1]} sent in {what}" for key, what in waiting[:1])


class ThreadCommunicator(MessageCommunicator):
    """A rank on a thread of this process; NumPy arrays, sums in the order of ranks.

    `group` makes the ranks; one thread uses each of them (and another one for `sendrecv`).
    """

    @classmethod
    def group(cls, size: int, *, timeout: float = TIMEOUT) -> list[ThreadCommunicator]:
        """The communicators of all ranks; all fail once a rank has waited `timeout` seconds for another."""
        hub = Hub(check_int("size", size, 1), check_timeout(timeout))
        return [cls(hub, range(size), rank) for rank in range(size)]

    @staticmethod
    def allgatherv_together(
        communicators: Sequence[ThreadCommunicator], arrays: Sequence[np.ndarray], counts: Sequence[int]
    ) -> list[np.ndarray]:
        """`allgatherv` of all ranks on one thread."""
        checked = check_counts(counts, len(arrays), sum(map(len, arrays)), "all ranks")
        if checked != [len(array) for array in arrays]:
            raise ValueError(f"arrays must have {checked} rows, got {[len(array) for array in arrays]}")
        for communicator in communicators:
            communicator._check()
        return [np.concatenate(arrays) for _ in communicators]


class _Outcome:
    """Results and errors of the ranks in one run."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.results: list[Any] = [None] * size
        self.pending = set(range(size))
        self.error: BaseException | None = None

    def finish(self, rank: int, result: Any, error: BaseException | None) -> None:
        with self.changed:
            self.results[rank] = result
            own = error is not None and not isinstance(error, CommunicatorError)
            # a failing rank may end after the ranks that it has stopped, whose errors are consequences
            if self.error is None or (own and isinstance(self.error, CommunicatorError)):
                self.error = error
            self.pending.discard(rank)
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Wait for a condition, in steps, so that Ctrl-C works on every system."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not until() and time.monotonic() < deadline:
                self.changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))


_Tasks: TypeAlias = "queue.SimpleQueue[tuple[_Outcome, Callable[..., Any]] | None]"
"""Tasks of a rank in order; None ends its thread."""


_running: set[object] = set()
_usual_interval: list[float] = []
"""Running ranks, and the switch interval to restore after the last of them; empty if it is not changed.

There is no lock: the garbage collector may close ranks, on any thread and between any two lines of this code.
"""


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shorten Python's switch interval meanwhile. Only the threads of ranks call this: Ctrl-C does not end these."""
    rank = object()
    _running.add(rank)
    now = sys.getswitchinterval()
    if now > 2 * SWITCH_INTERVAL:  # otherwise it is set already, or shorter
        _usual_interval[:] = [now]
        sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        _running.discard(rank)
        if not _running:
            usual, _usual_interval[:] = list(_usual_interval), []
            for interval in usual:
                sys.setswitchinterval(interval)


class RankThreads:
    """Persistent threads, one per rank: functions run on all of them, one function after the other.

    Thread state (the OpenMP team, the current device and handles of CUDA) persists, too. Use it as a
    context manager, or `close` it.
    """

    def __init__(self, size: int, *, timeout: float = TIMEOUT) -> None:
        self._work: list[_Tasks] = []
        self.communicators = ThreadCommunicator.group(size, timeout=timeout)
        hub = self.communicators[0].transport
        assert isinstance(hub, Hub)
        self._hub = hub
        for communicator in self.communicators:
            work: _Tasks = queue.SimpleQueue()
            self._work.append(work)
            # daemon threads: a hanging rank must not keep the interpreter alive
            name = f"hybridmf rank {communicator.rank}"
            threading.Thread(target=_serve, args=(self._hub, communicator, work), name=name, daemon=True).start()

    def run(self, function: Callable[[ThreadCommunicator], Result]) -> list[Result]:
        """``function(communicator)`` on every rank; the results in the order of the ranks.

        The first failure, or Ctrl-C on the calling thread, makes the communicators of all ranks fail and is raised
        unchanged. Afterwards the ranks cannot be used again.
        """
        self._hub.check()
        results = self._do(function, self._work)
        unread = self._hub.unread()
        if unread:
            self._hub.fail(unread)
            self._hub.check()
        return results

    def _do(
        self, function: Callable[[ThreadCommunicator], Result], ranks: Sequence[_Tasks], *, wait: bool = True
    ) -> list[Result]:
        """Run a function on the ranks; if `wait`, return all results, or raise the first failure."""
        run = _Outcome(len(ranks))
        self._hub.left.clear()
        try:
            for work in ranks:
                work.put((run, function))
            if wait:
                run.wait(lambda: not run.pending or run.error is not None)
        except BaseException as error:
            self._hub.fail(f"stopped by {type(error).__name__}")
            _let_go(run)
            raise
        if wait and run.error is not None:
            _let_go(run)
            raise run.error
        return run.results

    @contextmanager
    def in_their_place(self) -> Iterator[None]:
        """Run this context in place of the ranks: an exception stops them all, as in `run`."""
        hub = self._hub
        hub.check()
        try:
            yield
        except BaseException as error:
            hub.fail(f"stopped by {type(error).__name__}")
            raise

    def close(self, last: Callable[[ThreadCommunicator], object] | None = None, *, wait: bool = False) -> None:
        """End the threads, which must be idle, after a `last` function. A second call does nothing.

        `wait`: wait for that, and raise the first failure. Not for calls from the garbage collector, which may
        run on one of the threads.
        """
        ranks, self._work = self._work, []
        try:
            if last is not None:
                self._do(last, ranks, wait=wait)
        finally:
            for work in ranks:
                work.put(None)

    def __enter__(self) -> RankThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _serve(hub: Hub, communicator: ThreadCommunicator, work: _Tasks) -> None:
    while (task := work.get()) is not None:
        run, function = task
        result, failure = None, None
        with _short_switch_interval():
            try:
                result = function(communicator)
            except BaseException as error:  # every error must stop the others
                failure = error
        if failure is not None:
            with run.changed:
                if run.error is None:  # later errors are consequences
                    run.error = failure
                    hub.fail(f"rank {communicator.rank} failed: {type(failure).__name__}: {failure}")
        else:
            hub.leave(communicator.rank, "has ended")
        run.finish(communicator.rank, result, failure)
        del task, run, function, result, failure  # releases all objects of the run


def _let_go(run: _Outcome) -> None:
    """Wait up to `PATIENCE` seconds for ranks that are about to fail."""
    run.wait(lambda: not run.pending, PATIENCE)
    if run.pending:
        logger.warning("ranks %s are still running %g s after the others have stopped", sorted(run.pending), PATIENCE)


def run_ranks(size: int, function: Callable[[ThreadCommunicator], Result], *, timeout: float = TIMEOUT) -> list[Result]:
    """Run ``function(communicator)`` in a thread for each rank.

    Parameters
    ----------
    size : int
    function : callable
    timeout : float
        Seconds that a rank waits for another before all fail.

    Returns
    -------
    list
        What each rank returned.

    Raises
    ------
    Exception
        The first error of a rank, unchanged; the other ranks are stopped.
    KeyboardInterrupt
        All ranks are stopped.
    """
    with RankThreads(size, timeout=timeout) as ranks:
        return ranks.run(function)
