"""The ranks of one process, for SU-ALS and MCUMSGD: their threads, communicators and devices.

Each rank has a thread, with its communicator and its device. A function runs on all threads (`RankGroup.run`), or one
thread launches for all ranks. Threads contend for the interpreter's lock, which every call of CUDA releases and
acquires: on four GPUs that takes about as long as some kernels. So if a half sweep never waits for the host, one thread
launches one step of each rank in turn, and all GPUs start together; NCCL's calls of all ranks form one group. An epoch
of SGD does the same in `hybridmf.ranks.mcumsgd`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from ..core.objective import Factors, LazyFactors, Side, other_side
from ..device.cuda import Device, open_device
from ..errors import CommunicatorError
from ..gpu.rows import RowRange
from .su_als import RankALS
from .transport.communicator import Communicator
from .transport.nccl import NcclCommunicator
from .transport.threads import RankThreads

logger = logging.getLogger("hybridmf")

Result = TypeVar("Result")


class RankGroup:
    """Threads of ranks, their communicators, and the ranks.

    A rank has `close`, called on all ranks together, and `stop`, which ends its background work after a failure of
    another one. Neither closes its communicator.
    """

    def __init__(self, size: int) -> None:
        self.threads = RankThreads(size)
        self.communicators: dict[int, Communicator] = {}
        self.ranks: dict[int, Any] = {}
        # an unclosed solver ends when it is collected: on any thread, without waiting
        self._finish = weakref.finalize(self, _close, self.threads, self.communicators, self.ranks)
        self._finish.atexit = False

    def open(self, make: Callable[[Communicator, Callable[[Communicator], None]], Any]) -> list[Any]:
        """Make all ranks, each on its thread; after a failure the group is closed.

        The second argument of `make` registers a communicator that the rank opens itself, for the group to close.
        """

        def made(control: Communicator) -> None:
            def opened(communicator: Any) -> None:
                self.communicators[control.rank] = communicator

            self.ranks[control.rank] = make(control, opened)

        try:
            self.run(made)
        except BaseException:
            self.close()
            raise
        return [self.ranks[number] for number in range(len(self.ranks))]

    def run(self, function: Callable[[Any], Result]) -> list[Result]:
        """Run a function on all threads; the first failure stops all ranks and is raised unchanged."""
        self._check_open()
        return self.threads.run(function)

    def solve(self, side: Side) -> list[Any]:
        """New factors of `side` of all ranks of SU-ALS; the state does not change."""
        ranks = [self.ranks[number] for number in range(len(self.ranks))]
        together = len(ranks) > 1 and all(rank.halves[side].one_thread for rank in ranks)
        if not together or ranks[0].regressions:  # which add up their sums
            return self.run(lambda control: self.ranks[control.rank].solve(side))
        with self.in_one_thread():
            return solve_in_one_thread(ranks, side)

    @contextmanager
    def in_one_thread(self) -> Iterator[None]:
        """Context that drives all ranks from the calling thread; an exception stops them, as in `run`."""
        self._check_open()
        with self.threads.in_their_place():
            yield

    def _check_open(self) -> None:
        if not self._finish.alive:
            raise CommunicatorError("the ranks were closed; make another solver")

    def close(self) -> None:
        """End the ranks, their connections and threads. A second call does nothing."""
        if self._finish.detach():
            _close(self.threads, self.communicators, self.ranks, wait=True)


def _close(
    threads: RankThreads, communicators: dict[int, Communicator], ranks: dict[int, Any], *, wait: bool = False
) -> None:
    """Close what each rank has opened, on its thread; after a failure, abort waits for ranks that have ended."""
    if threads.communicators[0].cause:
        for communicator in communicators.values():
            communicator.abort("the fit has ended")
        for rank in ranks.values():
            rank.stop()
        threads.close()
    else:
        threads.close(partial(_close_rank, communicators, ranks), wait=wait)


def _close_rank(communicators: dict[int, Communicator], ranks: dict[int, Any], control: Communicator) -> None:
    try:
        ranks[control.rank].close()
        communicators[control.rank].close()
    except Exception as error:
        logger.warning("rank %d did not close cleanly: %s", control.rank, error)
        if not isinstance(error, CommunicatorError):  # otherwise another rank reports the cause
            raise


def open_rank(name: str, control: Communicator) -> tuple[Communicator, Device | None]:
    """Communicator and device of a rank, by the name of its device; None for the CPU."""
    if name == "cpu":
        return control, None
    device = open_device(name)
    if control.size == 1:  # no array of a device is sent
        return control, device
    with device.active():
        return NcclCommunicator(control, device.spec.index), device


def solve_in_one_thread(ranks: Sequence[RankALS], side: Side) -> list[Any]:
    """Run `RankALS.solve` of all ranks of a communicator on the calling thread; no rows are split over ranks."""
    launched = _launch(ranks, side, _fixed(ranks, side))
    solved = [factors for factors, _ in launched]
    checks = []
    for rank, (factors, status) in zip(ranks, launched, strict=True):
        with rank.worker.active():
            checks.append(factors.begin_check(status))
    # the exchange overlaps the checks and the launches of the next half sweep
    following = _gather_ahead(ranks, side, solved)
    for rank, found, (factors, status) in zip(ranks, checks, launched, strict=True):
        with rank.worker.active():
            if factors.finish_check(found):
                rank.halves[side].raise_failure(status)
    for rank in ranks:  # a failed gather ends here: factors solved from a partial table never become the state
        if rank.communicator.cause:
            raise CommunicatorError(rank.communicator.cause)
    if following is not solved:
        known = RowRange.of_all(own.range for own in solved) if solved[0].has_range else None
        for rank, own, factors in zip(ranks, solved, following, strict=True):
            factors.keep(range=known)
            rank.keep_ahead(other_side(side), own, factors)
    return solved


def _launch(ranks: Sequence[RankALS], side: Side, fixed: Sequence[Any]) -> list[Any]:
    """Launch one step of each rank in turn; return new factors and status, possibly not complete yet."""
    launches = {}
    for number, (rank, table) in enumerate(zip(ranks, fixed, strict=True)):
        with rank.worker.active():
            launches[number] = rank.halves[side].steps(table, rank.mean, rank.own[side])
    launched: list[Any] = [None] * len(ranks)
    while launches:
        for number in list(launches):
            with ranks[number].worker.active():
                launched[number] = next(launches[number])
            if launched[number] is not None:
                del launches[number]
    return launched


def _fixed(ranks: Sequence[RankALS], side: Side) -> list[Any]:
    """The whole fixed side on each rank, gathered ahead or now."""
    known = [rank.ahead(side) for rank in ranks]
    if all(factors is not None for factors in known):
        return known
    return _gather(ranks, side, [rank.own[other_side(side)] for rank in ranks])


def _gather_ahead(ranks: Sequence[RankALS], side: Side, solved: list[Any]) -> list[Any]:
    """Gather the new factors of `side` for the next half sweep, if both sides fit in memory."""
    following = other_side(side)
    if not ranks[0].gathers_ahead or ranks[0].layout.grids[following].splits > 1:
        return solved
    return _gather(ranks, following, solved)


def _gather(ranks: Sequence[RankALS], side: Side, fixed: Sequence[Any]) -> list[Any]:
    """Gather the whole fixed side of a half sweep on each rank."""
    first = ranks[0]
    counts = first.layout.counts(other_side(side), range(first.layout.size))
    communicators: list[Any] = [rank.communicator for rank in ranks]
    gather = communicators[0].allgatherv_together
    whole = [gather(communicators, arrays, counts) for arrays in zip(*(own.arrays for own in fixed), strict=True)]
    return [own.with_arrays(list(arrays)) for own, arrays in zip(fixed, zip(*whole, strict=True), strict=True)]


# ------------------------------------------------------------------------------------------------ factors of all ranks


class JoinedFactors(LazyFactors):
    """The rows of all ranks, concatenated on the host on first access; `order` has the row of the input for each."""

    def __init__(self, parts: Sequence[Factors], order: np.ndarray | None = None) -> None:
        self.keep(parts=tuple(parts), order=order)

    parts: tuple[Factors, ...]
    order: np.ndarray | None

    def _brought(self) -> Factors:
        host = _joined(self.parts)
        if self.order is None:
            return host
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(len(self.order))
        return host.take(inverse)

    @property
    def squares(self) -> Factors | None:
        """Sums of squared steps, on the host."""
        return self.on_host().squares

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def _joined(parts: Sequence[Factors]) -> Factors:
    dtype, columns = parts[0].form
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    matrix = np.empty((ends[-1], columns), dtype=dtype)
    with ThreadPoolExecutor(len(parts), thread_name_prefix="hybridmf-download") as threads:  # each GPU has its own bus
        places = [matrix[first:last] for first, last in pairwise(ends)]
        list(threads.map(lambda part, place: part.write(place), parts, places))
    biases = [part.bias for part in parts if part.bias is not None]
    squares = [part.squares for part in parts if part.squares is not None]
    return Factors(matrix, np.concatenate(biases) if biases else None, _joined(squares) if squares else None)
