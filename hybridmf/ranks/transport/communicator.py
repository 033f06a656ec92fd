"""The interface of transports, through which distributed algorithms reach other ranks.

Arrays are NumPy's, or those of the rank's device if the transport sends them directly (NCCL). All ranks of a
communicator call collectives in the same order, with arrays of the same shape and dtype unless stated otherwise.
Collectives return new arrays and do not modify their arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from ...errors import CommunicatorError

Array = Any  # a NumPy array, or an array on the device of the rank


TIMEOUT = 600.0  # default timeout in seconds: the time by which the work of ranks may differ


class Communicator(Protocol):
    """One rank of a group; derive from it for the defaults.

    Every method raises CommunicatorError if another rank has aborted, has ended or does not answer within the
    communicator's timeout; the message has the first cause. A communicator that has failed stays failed.

    Attributes
    ----------
    rank : int
        0 <= rank < size.
    size : int
    one_process : bool
        Whether all ranks are threads of one process.
    """

    rank: int
    size: int
    one_process: bool = False

    @property
    def timeout(self) -> float:
        """Seconds a rank waits for another."""
        return TIMEOUT

    @property
    def local_rank(self) -> int:
        """Number among the ranks of its machine, which selects its GPU: by default, all are on one."""
        return self.rank

    @property
    def cause(self) -> str:
        """Cause of a failure; empty without one. Long computations between two calls may check it."""

    def allreduce(self, array: Array) -> Array:
        """Sum over the ranks, on each rank: the same bits everywhere."""

    def reduce_scatter(self, array: Array, counts: Sequence[int]) -> Array:
        """Sum over the ranks of `array`, shape (sum(counts), ...), of which rank r gets ``counts[r]`` rows."""

    def allgatherv(self, array: Array, counts: Sequence[int]) -> Array:
        """All ranks' rows one after the other, shape (sum(counts), ...); rank r gives ``counts[r]`` of them."""

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """The root's array; the others pass an array of its shape and dtype with arbitrary content."""

    def sendrecv(self, array: Array, dest: int, source: int, like: Array) -> Array:
        """Send `array` to rank `dest`; return the array from rank `source`, of the shape and dtype of `like`."""

    def start_sendrecv(
        self, arrays: Sequence[Array], dest: int, source: int, likes: Sequence[Array]
    ) -> Callable[[], list[Array]]:
        """Start to send arrays to `dest` and to receive others from `source`, while the caller computes.

        By default a thread sends and receives; meanwhile the caller may make any call except another `sendrecv`.

        Parameters
        ----------
        arrays : sequence of array
            Must not change until the returned function was called; may be read.
        dest, source : int
        likes : sequence of array
            Arrays with the shapes and dtypes that `source` sends.

        Returns
        -------
        callable
            Waits for both and returns the received arrays; on a GPU the current stream waits.
        """
        courier = ThreadPoolExecutor(1, "hybridmf courier")
        pairs = list(zip(arrays, likes, strict=True))
        moved = courier.submit(lambda: [self.sendrecv(array, dest, source, like) for array, like in pairs])
        courier.shutdown(wait=False)  # the thread ends with its task
        return moved.result

    def barrier(self) -> None:
        """Wait for all ranks."""

    def meet(self, what: str, timeout: float) -> None:
        """Wait for all ranks if they are threads of one process, else return immediately; `what` names the call."""
        return None

    def split(self, color: int) -> Communicator:
        """Communicator of the ranks with the same color, in the order of ranks; called by all ranks."""

    def abort(self, cause: str) -> None:
        """Make this and every later call fail on all ranks, with this cause."""

    def close(self) -> None:
        """Release the resources of the transport; the communicator cannot be used afterwards."""


def gather(communicator: Communicator, array: np.ndarray, counts: Sequence[int]) -> np.ndarray | None:
    """All ranks' rows one after the other, ``counts[r]`` of rank r, on the first rank; None on the others."""
    nothing = np.empty(0, dtype=array.dtype)
    if communicator.rank:
        communicator.sendrecv(array, 0, 0, nothing)
        return None
    parts = [array]
    for rank in range(1, communicator.size):
        like = np.empty((counts[rank], *array.shape[1:]), dtype=array.dtype)
        parts.append(communicator.sendrecv(nothing, rank, rank, like))
    return np.concatenate(parts)


def agreed(communicator: Communicator, number: int) -> int:
    """The number (or truth) of the first rank, on all ranks."""
    return number if communicator.size == 1 else int(communicator.broadcast(np.array([number], dtype=np.int64))[0])


def first_differing(communicator: Communicator, fact: object) -> int | None:
    """A rank whose `fact`, compared by its repr, is not that of rank 0; None without one. Called by all ranks."""
    own = np.array([zlib.crc32(repr(fact).encode())], dtype=np.int64)
    everyone = communicator.allgatherv(own, [1] * communicator.size)
    others = np.flatnonzero(everyone != everyone[0])
    return int(others[0]) if len(others) else None


def check_agreement(communicator: Communicator, facts: dict[str, object]) -> None:
    """Raise on all ranks if they have different `facts`, values by name; called by all ranks."""
    for name, fact in facts.items():
        rank = first_differing(communicator, fact)
        if rank is not None:
            here = f"rank {communicator.rank} has {fact!r}"
            raise CommunicatorError(f"rank {rank} was given another {name} than rank 0 ({here})")


class Single(Communicator):
    """The communicator of a single rank."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._cause = ""

    @property
    def cause(self) -> str:
        return self._cause

    def _check(self) -> None:
        if self._cause:
            raise CommunicatorError(self._cause)

    def _same(self, array: Array, *_others: Any, **_named: Any) -> Array:
        self._check()
        return array.copy()

    allreduce = reduce_scatter = allgatherv = broadcast = sendrecv = _same

    def barrier(self) -> None:
        """Only check for an abort."""
        self._check()

    def split(self, color: int) -> Communicator:
        """Another communicator of the single rank."""
        self._check()
        return Single()

    def abort(self, cause: str) -> None:
        self._cause = self._cause or cause

    def close(self) -> None:
        """Do nothing."""
