"""Groups of ranks on threads for `hybridmf.testing`, and meetings of their threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hybridmf.ranks.transport.threads import ThreadCommunicator, run_ranks


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
            return wrap(groups[made - 1][outer.rank])

        check(connect)

    run_ranks(size, rank)


def meet(communicator, what="here", timeout=20.0):
    communicator.transport.meet(communicator.context, communicator.members, communicator.rank, what, timeout)
