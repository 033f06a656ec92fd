"""The ranks of one process, for SU-ALS and MCUMSGD: their threads, communicators and devices.

Each rank has a thread, with its communicator and its device. A function runs on all threads (`RankGroup.run`), or one
thread launches for all ranks. Threads contend for the interpreter's lock, which every call of CUDA releases and
acquires: on four GPUs that takes about as long as some kernels. So if a half sweep never waits for the host, one thread
launches one step of each rank in turn, and all GPUs start together; NCCL's calls of all ranks form one group. An epoch
of SGD does the same in `hybridmf.ranks.mcumsgd`.

Half sweeps ahead. The kernels of a half sweep depend on the range of the fixed factors (`FusedKernels.launched_for`),
and the host reads it when these are complete: until it has launched the next half sweep of all ranks, GPUs would wait,
on four GPUs for a tenth of an iteration. So if another half sweep follows in any case, it is launched before that, for
the range of one iteration before. If the range that is read needs other launches, as in the first iterations, these
are launched again. Hence no bit depends on the guess.

- Order: everything of a rank is on its current stream: a half sweep, the copy of its check to the host, the gather of
  its factors, the next half sweep. That reads factors that are gathered, and memory that was released before is reused
  behind its last use.
- State: a half sweep writes to new arrays only, and its factors become the state in `keep`, after the check. If a check
  fails, its half sweep raises the error, and the one ahead, which computes with these factors, is never looked at.
  What was launched ahead is used only if the fixed factors and the rank's own ones are still those that it was
  launched for: `keep` of other factors, `balance` or a resumed fit make others.
- Failures while launching ahead, such as lack of memory, are raised by the half sweep before, which is not complete
  then. A failed gather is noticed after the check of either half sweep, as without one ahead.
- Which one follows: users after items within a sweep (`Alternating.solving`), items after users if the fit says that it
  continues (`Solver.continues`): not after the last iteration, and not where early stopping or a callback may end the
  fit. Checkpoints, objectives and metrics between two iterations read the state only. After Ctrl-C or another error
  between half sweeps, closing waits for the streams, at most one half sweep longer.
- Not ahead: half sweeps over streamed ratings, offloaded factors, split sides or rows with features, and iALS++. Nor
  after a half sweep whose precision is checked (`hybridmf.plan.precision`), which reads its fixed factors again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ..core.objective import Factors, LazyFactors, Side, other_side
from ..device.cuda import Device, open_device
from ..errors import CommunicatorError
from ..gpu.rows import RowRange
from ..plan.solver import Given
from .su_als import RankALS
from .transport.communicator import Communicator
from .transport.nccl import NcclCommunicator
from .transport.threads import RankThreads

logger = logging.getLogger("hybridmf")

Result = TypeVar("Result")

Begun: TypeAlias = "tuple[Side, list[Any], list[Any], list[Any]]"
"""A half sweep of all ranks that is launched: its side, the gathered fixed factors of each rank, its own factors of the
side before, and its new ones with their status."""


class RankGroup:
    """Threads of ranks, their communicators, and the ranks.

    A rank has `close`, called on all ranks together, and `stop`, which ends its background work after a failure of
    another one. Neither closes its communicator.
    """

    def __init__(self, size: int) -> None:
        self.threads = RankThreads(size)
        self.communicators: dict[int, Communicator] = {}
        self.ranks: dict[int, Any] = {}
        self._ahead: Begun | None = None
        self._ranges: dict[Side, RowRange] = {}  # of the factors of one iteration before
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

    def solve(self, side: Side, follows: bool = False) -> list[Any]:
        """New factors of `side` of all ranks of SU-ALS; the state does not change."""
        ranks = [self.ranks[number] for number in range(len(self.ranks))]
        together = len(ranks) > 1 and all(rank.halves[side].one_thread for rank in ranks)
        if not together or ranks[0].regressions:  # which add up their sums
            return self.run(lambda control: self.ranks[control.rank].solve(side))
        with self.in_one_thread():
            return self._solve_in_one_thread(ranks, side, follows)

    def _solve_in_one_thread(self, ranks: Sequence[RankALS], side: Side, follows: bool) -> list[Any]:
        """`RankALS.solve` of all ranks on the calling thread; no rows are split over ranks."""
        following, found_ahead, self._ahead = other_side(side), _launched_for(self._ahead, ranks, side), None
        fixed, launched = found_ahead or _begin(ranks, side)
        del found_ahead
        solved = [factors for factors, _ in launched]
        checks = []
        for rank, (factors, status) in zip(ranks, launched, strict=True):
            with rank.worker.active():
                checks.append(factors.begin_check(status))
        # the exchange overlaps the checks and the launches of the next half sweep
        gathered, assumed = _gather_ahead(ranks, side, solved), self._ranges.get(side)
        travels, ahead = gathered is not solved, None
        # the first rank has its share of the longest rows
        precision = ranks[0].check_precision
        begins = follows and travels and ranks[0].halves[following].one_thread and not precision.is_due(side)
        if begins and (assumed or not solved[0].has_range):
            fixed = [None]
            for rank, factors in zip(ranks, gathered, strict=True):
                rank.forget_ahead()  # read by launches up to here: what follows may have that memory
                factors.keep(range=assumed)
            starts = [rank.own[following] for rank in ranks]
            ahead = following, gathered, starts, _launch(ranks, following, gathered)
        for rank, found, (factors, status) in zip(ranks, checks, launched, strict=True):
            with rank.worker.active():
                if factors.finish_check(found):
                    rank.halves[side].raise_failure(status)
        with ranks[0].worker.active():
            precision(side, fixed[0])
        for rank in ranks:  # a failed gather ends here: factors solved from a partial table never become the state
            if rank.communicator.cause:
                raise CommunicatorError(rank.communicator.cause)
        if travels:
            known = RowRange.of_all(own.range for own in solved) if solved[0].has_range else None
            for rank, own, factors in zip(ranks, solved, gathered, strict=True):
                factors.keep(range=known)
                rank.keep_ahead(following, own, factors)
            if known is not None:
                self._ranges[side] = known
            if ahead and (assumed == known or ranks[0].halves[following].same_kernels(assumed, known)):
                self._ahead = ahead
        return solved

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


def _launched_for(ahead: Begun | None, ranks: Sequence[RankALS], side: Side) -> tuple[list[Any], list[Any]] | None:
    """What was launched ahead, as `_begin` returns it, if it is the half sweep of `side` for the present factors."""
    if ahead is None or ahead[0] != side:
        return None
    _, fixed, starts, launched = ahead
    same = (
        rank.ahead(side) is one and rank.own[side] is own for rank, one, own in zip(ranks, fixed, starts, strict=True)
    )
    return (fixed, launched) if all(same) else None


def _begin(ranks: Sequence[RankALS], side: Side) -> tuple[list[Any], list[Any]]:
    """The whole fixed side on each rank, gathered ahead or now, and what `_launch` returns for it."""
    fixed = [rank.ahead(side) for rank in ranks]
    if any(factors is None for factors in fixed):
        fixed = _gather(ranks, side, [rank.own[other_side(side)] for rank in ranks])
    return fixed, _launch(ranks, side, fixed)


def _launch(ranks: Sequence[RankALS], side: Side, fixed: Sequence[Any]) -> list[Any]:
    """Launch one step of each rank in turn; return new factors and status, possibly not complete yet."""
    launches = {}
    for number, (rank, table) in enumerate(zip(ranks, fixed, strict=True)):
        with rank.worker.active():
            launches[number] = rank.halves[side].steps(Given(table, rank.mean, rank.own[side]))
    launched: list[Any] = [None] * len(ranks)
    while launches:
        for number in list(launches):
            with ranks[number].worker.active():
                launched[number] = next(launches[number])
            if launched[number] is not None:
                del launches[number]
    return launched


def _gather_ahead(ranks: Sequence[RankALS], side: Side, solved: list[Any]) -> list[Any]:
    """Gather the new factors of `side` for the next half sweep, if both sides fit in memory."""
    following = other_side(side)
    if not ranks[0].gathers_ahead or ranks[0].layout.grids[following].splits > 1:
        return solved
    return _gather(ranks, following, solved)


def _gather(ranks: Sequence[RankALS], side: Side, fixed: Sequence[Any]) -> list[Any]:
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
