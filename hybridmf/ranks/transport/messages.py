"""Collectives over messages between pairs of ranks; threads, MPI and Dask implement the messages.

Sums are added in the order of ranks on every rank, so that they have the same bits on all ranks, in every rerun, and
over every transport.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...errors import CommunicatorError
from .communicator import Communicator

SMALL = 1 << 16  # bytes up to which every rank adds the whole array: one round of messages instead of two
KINDS = "biufc"  # kinds of dtypes that can be sent: numbers


class Transport(Protocol):
    """Sends arrays between ranks; arrays between two ranks under one context keep their order.

    Derive from it for the defaults, which are for ranks in separate processes.
    """

    timeout: float
    one_process: bool = False

    def meet(self, context: str, members: Sequence[int], rank: int, what: str, timeout: float) -> None:
        """See `communicator.Communicator.meet`."""
        return None

    def snapshot(self, array: np.ndarray) -> np.ndarray:
        """An array to send that does not change if the caller modifies `array` after the call."""
        return array.copy()

    def send(self, context: str, source: int, dest: int, what: str, array: np.ndarray) -> None:
        """Send an array; does not wait for `dest` to receive it."""

    def receive(self, context: str, source: int, dest: int, what: str) -> tuple[str, np.ndarray]:
        """Return (the call of the source, array); waits up to `timeout` seconds, then fails."""

    def fail(self, cause: str) -> None:
        """Make every later call on every rank raise a CommunicatorError with the first cause."""

    def give_up(self, source: int, dest: int, what: str, gone: str = "") -> None:
        """Fail: `dest` waits for `source`, which is gone, or has not answered in time."""
        if gone:
            self.fail(f"rank {source} {gone} while rank {dest} waits for it in {what}")
        else:
            self.fail(f"rank {source} did not answer rank {dest} within {self.timeout:g} s in {what}")

    def check(self) -> None:
        """Raise the CommunicatorError of a transport that has failed."""

    def close(self, rank: int) -> None:
        """End the messages of a rank."""


def even_counts(rows: int, size: int) -> list[int]:
    return [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]


def check_counts(counts: Sequence[int], size: int, rows: int, name: str) -> list[int]:
    checked = [int(count) for count in counts]
    if len(checked) != size or min(checked, default=0) < 0:
        raise ValueError(f"counts must hold a number of rows >= 0 for each of {size} ranks, got {checked}")
    if sum(checked) != rows:
        raise ValueError(f"counts must add up to the {rows} rows of {name}, got {checked}")
    return checked


def check_array(array: Any) -> np.ndarray:
    """Check for a NumPy array of numbers; return it in C order."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"array must be a NumPy array for this communicator, got {type(array).__name__}")
    if array.dtype.kind not in KINDS:
        raise TypeError(f"array must hold numbers to travel between ranks, got dtype {array.dtype}")
    return np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray turns shape () into (1,)


def check_peer(name: str, rank: int, size: int) -> int:
    if not 0 <= rank < size:
        raise ValueError(f"{name} must be a rank, 0 <= {name} < {size}, got {rank}")
    return int(rank)


def add_in_order(arrays: Sequence[Any]) -> Any:
    """``(arrays[0] + arrays[1]) + ...`` in their dtype, on the host or a GPU."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


class MessageCommunicator(Communicator):
    """One rank of a group whose members send each other messages; see `communicator.Communicator`.

    Ranks whose calls differ, or whose dtypes, shapes or counts differ, fail with an error that names both calls. A
    communicator fails together with all that were split from it or that it was split from. `sendrecv` may run on
    another thread, concurrently with other calls.

    `members` are ranks of the transport; `context` distinguishes the messages of this group from others on it.
    """

    def __init__(self, transport: Transport, members: Sequence[int], rank: int, context: str = "") -> None:
        self.transport, self.members, self.rank, self.context = transport, list(members), rank, context
        self.size = len(self.members)
        self.one_process = transport.one_process
        self._splits, self._closed = 0, False

    def _check(self) -> None:
        if self._closed:
            raise CommunicatorError(f"rank {self.rank} has closed this communicator")
        self.transport.check()

    # ------------------------------------------------------------------------------------------------ messages

    def _send(self, dest: int, what: str, array: np.ndarray, channel: str = "") -> None:
        ours, theirs = self.members[self.rank], self.members[dest]
        self.transport.send(self.context + channel, ours, theirs, what, array)

    def _receive(self, source: int, what: str, channel: str = "") -> np.ndarray:
        ours, theirs = self.members[self.rank], self.members[source]
        called, array = self.transport.receive(self.context + channel, theirs, ours, what)
        if called != what:
            self._fail(
                f"rank {source} calls {called} while rank {self.rank} calls {what}; all ranks have to make the same "
                "calls in the same order, with equal dtypes and shapes"
            )
        return array

    def _fail(self, cause: str) -> None:
        self.transport.fail(cause)
        raise CommunicatorError(cause)

    def _exchange(self, what: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send array r to rank r; return those sent to this rank, which are read-only."""
        self._check()
        for step in range(1, self.size):  # each rank starts with its neighbour, so that not all wait for rank 0
            dest = (self.rank + step) % self.size
            self._send(dest, what, arrays[dest])
        return [arrays[r] if r == self.rank else self._receive(r, what) for r in range(self.size)]

    # ------------------------------------------------------------------------------------------------ collectives

    def allreduce(self, array: np.ndarray) -> np.ndarray:
        array = check_array(array)
        what = f"allreduce of {array.dtype} {array.shape}"
        if array.nbytes <= SMALL or self.size == 1:
            own = self.transport.snapshot(array)
            return add_in_order(self._exchange(what, [own] * self.size))
        flat = array.reshape(-1)
        counts = even_counts(len(flat), self.size)
        return self._gather(what, self._scatter(what, flat, counts), counts).reshape(array.shape)

    def reduce_scatter(self, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        array = check_array(array)
        checked = check_counts(counts, self.size, len(array), "array")
        return self._scatter(f"reduce_scatter of {array.dtype} {array.shape} by {checked}", array, checked)

    def _scatter(self, what: str, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        bounds = np.cumsum([0, *counts])
        own = self.transport.snapshot(array)
        return add_in_order(self._exchange(what, [own[bounds[r] : bounds[r + 1]] for r in range(self.size)]))

    def allgatherv(self, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        array = check_array(array)
        counts = list(counts)
        checked = check_counts(counts, self.size, sum(map(int, counts)), "all ranks")
        if len(array) != checked[self.rank]:
            raise ValueError(f"array must have counts[{self.rank}]={checked[self.rank]} rows, got {len(array)}")
        return self._gather(f"allgatherv of {array.dtype} {array.shape[1:]} by {checked}", array, checked)

    def _gather(self, what: str, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        bounds = np.cumsum([0, *counts])
        out = np.empty((int(bounds[-1]), *array.shape[1:]), dtype=array.dtype)
        own = self.transport.snapshot(array)
        for r, rows in enumerate(self._exchange(what, [own] * self.size)):
            out[bounds[r] : bounds[r + 1]] = rows
        return out

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        array = check_array(array)
        root = check_peer("root", root, self.size)
        what = f"broadcast of {array.dtype} {array.shape} from rank {root}"
        self._check()
        if self.rank != root:
            return self._receive(root, what).copy()
        own = self.transport.snapshot(array)
        for dest in range(self.size):
            if dest != root:
                self._send(dest, what, own)
        return array.copy()

    def sendrecv(self, array: np.ndarray, dest: int, source: int, like: np.ndarray) -> np.ndarray:
        array, like = check_array(array), check_array(like)
        dest, source = check_peer("dest", dest, self.size), check_peer("source", source, self.size)
        self._check()
        # a separate channel: it may run concurrently with a collective
        self._send(dest, f"sendrecv of {array.dtype} {array.shape}", self.transport.snapshot(array), "~")
        return self._receive(source, f"sendrecv of {like.dtype} {like.shape}", "~")

    def barrier(self) -> None:
        self._exchange("barrier", [np.empty(0, dtype=np.uint8)] * self.size)

    def meet(self, what: str, timeout: float) -> None:
        self.transport.meet(self.context, self.members, self.rank, what, timeout)

    def split(self, color: int) -> MessageCommunicator:
        own = np.array([color], dtype=np.int64)
        colors = [int(each[0]) for each in self._exchange("split", [own] * self.size)]
        chosen = [r for r in range(self.size) if colors[r] == color]
        self._splits += 1
        # groups of other colors share the name, but no member
        context = f"{self.context}/{self._splits}"
        return MessageCommunicator(self.transport, [self.members[r] for r in chosen], chosen.index(self.rank), context)

    @property
    def cause(self) -> str:
        try:
            self.transport.check()
        except CommunicatorError as error:
            return str(error)
        return ""

    @property
    def timeout(self) -> float:
        return self.transport.timeout

    def abort(self, cause: str) -> None:
        self.transport.fail(cause)

    def close(self) -> None:
        """Leave: ranks that wait for this one from now on fail. Does nothing if this was split from another."""
        self._closed = True
        if not self.context:
            self.transport.close(self.members[self.rank])


def check_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r} of type {type(timeout).__name__}")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be a finite number of seconds > 0, got {timeout!r}")
    return float(timeout)
