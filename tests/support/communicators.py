"""Groups of ranks on threads for `hybridmf.testing`, and meetings of their threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from hybridmf.ranks.transport.threads import ThreadCommunicator, run_ranks
from hybridmf.testing import communicators


class Impatient:
    """The module `time` of the laws, in which a rank that is late for the others sleeps until they have given up."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._here = threading.local()

    def watch(self, communicator):
        """The communicator, which this thread has made last."""
        self._here.communicator = communicator
        return communicator

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._here.communicator.cause:
            time.sleep(0.01)


def impatient() -> Any:
    """Context in which the laws do not sleep for longer than they have to; as their `Impatient`."""
    return mock.patch.object(communicators, "time", Impatient())


def run_in_threads(size: int, check: Callable, wrap: Callable = lambda communicator: communicator) -> None:
    """``check(connect)`` on threads; each connection is a new group of all, and `wrap` what a rank makes of its own."""
    groups: list[list[ThreadCommunicator]] = []
    lock = threading.Lock()

    def rank(outer: ThreadCommunicator) -> None:
        made = 0

        def connect(timeout: float):
            nonlocal made
            with lock:
                if made == len(groups):
                    groups.append(ThreadCommunicator.group(size, timeout=timeout))
            made += 1
            return clock.watch(wrap(groups[made - 1][outer.rank]))

        check(connect)

    with impatient() as clock:
        run_ranks(size, rank)


def meet(communicator, what="here", timeout=20.0):
    communicator.transport.meet(communicator.context, communicator.members, communicator.rank, what, timeout)
