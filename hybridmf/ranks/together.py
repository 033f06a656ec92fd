"""Model parallel half sweeps of the GPUs of one process, launched by one thread.

A thread for each GPU would have to take turns under the interpreter's lock, which changes hands at every call of CUDA:
on four GPUs that takes about as long as some kernels. Here one thread launches for all GPUs what none of them waits
for, a step of each in turn, so that all begin at once; NCCL's calls of all ranks are one group; then it waits for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.objective import Side, other_side
from ..errors import CommunicatorError
from ..gpu.als import DeviceFactors, HalfSweep
from ..gpu.rows import RowRange
from .gpu_rank import GpuWorker
from .su_als import RankALS


def is_served(ranks: Sequence[RankALS], side: Side) -> bool:
    """Whether `solve` can do a half sweep: rows solved by GPUs whose ratings stay there, fixed sides whole."""
    return len(ranks) > 1 and all(
        isinstance(rank.worker, GpuWorker)
        and type(rank.halves[side]) is HalfSweep
        and hasattr(type(rank.communicator), "allgatherv_together")
        for rank in ranks
    )


def solve(ranks: Sequence[RankALS], side: Side) -> list[DeviceFactors]:
    """`RankALS.solve` of all ranks, by the thread that calls.

    Parameters
    ----------
    ranks : sequence of RankALS
        All of a communicator, in their order.
    side : {"user", "item"}

    Raises
    ------
    NotPositiveDefiniteError, NonFiniteError, DeviceMemoryError, CommunicatorError
        As `HalfSweep.solve` of the first rank that fails. Nothing has changed then, and nothing is waited for.
    """
    launched = _launch(ranks, side, _fixed(ranks, side))
    solved = [factors for factors, _ in launched]
    looks = []
    for rank, (factors, status) in zip(ranks, launched, strict=True):
        with rank.worker.active():
            looks.append(factors.begin_look(status))
    # exchanged while the ranks' looks are waited for, and while the next half sweep is launched
    following = _gather_ahead(ranks, side, solved)
    for rank, found, (factors, status) in zip(ranks, looks, launched, strict=True):
        with rank.worker.active():
            if factors.seen(found):
                rank.halves[side].check(status)
    for rank in ranks:  # a gather that has failed ends; what was solved with its half-filled table is no state
        if rank.communicator.cause:
            raise CommunicatorError(rank.communicator.cause)
    for rank, own, factors in zip(ranks, solved, following, strict=True):
        if factors is not own:
            if own.has_range:
                factors.keep(range=RowRange.of_all(part.range for part in solved if part.range is not None))
            rank.keep_ahead(other_side(side), own, factors)
    return solved


def _launch(ranks: Sequence[RankALS], side: Side, fixed: Sequence[DeviceFactors]) -> list[Any]:
    """New factors and status of each rank, not waited for."""
    under_way = [
        (number, rank, rank.halves[side].launches(table, rank.mean, rank.own[side]))
        for number, (rank, table) in enumerate(zip(ranks, fixed, strict=True))
    ]
    launched: list[Any] = [None] * len(ranks)
    while under_way:
        left = []
        for number, rank, launches in under_way:
            with rank.worker.active():
                try:
                    next(launches)
                    left.append((number, rank, launches))
                except StopIteration as end:
                    launched[number] = end.value
        under_way = left
    return launched


def _fixed(ranks: Sequence[RankALS], side: Side) -> list[DeviceFactors]:
    """The whole fixed side on each rank: as it was gathered ahead, or now."""
    known = [rank.ahead(side) for rank in ranks]
    if all(factors is not None for factors in known):
        return known
    return _gather(ranks, side, [rank.own[other_side(side)] for rank in ranks])


def _gather_ahead(ranks: Sequence[RankALS], side: Side, solved: list[DeviceFactors]) -> list[DeviceFactors]:
    """New factors of `side` as the next half sweep takes them, where there is room for both sides."""
    following = other_side(side)
    if not ranks[0].gathers_ahead or ranks[0].layout.grids[following].splits > 1:
        return solved
    return _gather(ranks, following, solved)


def _gather(ranks: Sequence[RankALS], side: Side, fixed: Sequence[DeviceFactors]) -> list[DeviceFactors]:
    """The whole fixed side of a half sweep on each rank, from what each owns."""
    first = ranks[0]
    counts = first.layout.counts(other_side(side), range(first.layout.size))
    arrays = [rank.worker.arrays(own) for rank, own in zip(ranks, fixed, strict=True)]
    communicators: list[Any] = [rank.communicator for rank in ranks]
    gather = type(communicators[0]).allgatherv_together
    whole = [gather(communicators, piece, counts) for piece in zip(*arrays, strict=True)]
    return [
        rank.worker.factors(list(own), like)
        for rank, like, own in zip(ranks, fixed, zip(*whole, strict=True), strict=True)
    ]
