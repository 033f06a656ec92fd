"""What every communicator does, whatever moves its arrays (docs/transports.md)."""

from __future__ import annotations

import contextlib
import functools
import time
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import CommunicatorError
from ..ranks.transport.communicator import Communicator
from ..ranks.transport.messages import SMALL, add_in_order

Connect = Callable[..., Communicator]  # ``connect(timeout=seconds)``, called by all ranks: a new communicator of them

ON_HOST = np.asarray

_raises = unittest.TestCase().assertRaisesRegex

DTYPES = (np.float32, np.float64, np.int32, np.int64, np.uint8)

PATIENCE = 20.0  # seconds within which all ranks learn of a failure, far below the timeout of the communicators


def drawn(rank: int, shape: tuple[int, ...] = (7, 3), dtype: Any = np.float32, *, whole: bool = False) -> np.ndarray:
    """Contribution of a rank, whole numbers if requested; any rank can draw that of any other."""
    values = np.asarray(np.random.default_rng(100 + rank).normal(scale=10, size=shape))
    if whole or np.dtype(dtype).kind != "f":
        values = np.abs(values).round()
    return np.asarray(values).astype(dtype)


def check_communicator(
    connect: Connect,
    *,
    device: Callable[[np.ndarray], Any] = ON_HOST,
    host: Callable[[Any], np.ndarray] = ON_HOST,
    in_order: bool = True,
    matched: bool = True,
) -> None:
    """Check a transport. Each rank calls this function, in a thread or a process of its own.

    Parameters
    ----------
    connect : callable
        ``connect(timeout=seconds)`` is called by all ranks in the same order and returns a new communicator of them:
        a communicator that has failed stays failed.
    device, host : callable
        Bring a NumPy array to where the communicator takes it, and an array of the communicator to the host.
    in_order : bool
        Whether sums are added in the order of the ranks. Otherwise they are checked for whole numbers.
    matched : bool
        Whether a rank that passes another shape, or has closed its communicator, fails the call of the others at once;
        with NCCL they wait until the timeout.

    Raises
    ------
    AssertionError
        On the ranks that see a violation.
    """
    with contextlib.closing(connect(timeout=60.0)) as communicator:
        check_collectives(communicator, device, host, in_order=in_order)
        several = communicator.size > 1
        if several:
            check_arguments(communicator, device)
    check_failures(connect, device, several=several, matched=matched)


def check_collectives(
    communicator: Communicator,
    device: Callable[[np.ndarray], Any] = ON_HOST,
    host: Callable[[Any], np.ndarray] = ON_HOST,
    *,
    in_order: bool = True,
) -> int:
    """Check the results of all collectives on one rank; return the number of checked arrays."""
    checks = 0
    rank, size, whole = communicator.rank, communicator.size, not in_order
    after, before = (rank + 1) % size, (rank - 1) % size

    def same(ours: Any, expected: np.ndarray) -> None:
        nonlocal checks
        assert type(ours) is type(device(expected)), type(ours)
        assert ours.dtype == expected.dtype, (ours.dtype, expected.dtype)
        np.testing.assert_array_equal(host(ours), expected)
        ours[...] = 0  # results belong to the caller
        checks += 1

    for dtype in DTYPES:
        for shape in ((7, 3), (0, 3), (), (4, 0), (SMALL // 4 + 5,)):
            everyone = [drawn(r, shape, dtype, whole=whole) for r in range(size)]
            mine = device(everyone[rank])
            same(communicator.allreduce(mine), add_in_order(everyone))
            same(communicator.broadcast(mine, size - 1), everyone[-1])
            same(communicator.sendrecv(mine, after, before, mine), everyone[before])
            np.testing.assert_array_equal(host(mine), everyone[rank])  # arguments are not written to
    for counts in ([3] * size, list(range(size)), [0] * size, [5] + [0] * (size - 1)):
        ends = np.cumsum([0, *counts])
        rows = [drawn(r, (counts[r], 2)) for r in range(size)]
        same(communicator.allgatherv(device(rows[rank]), counts), np.concatenate(rows))
        sums = [drawn(r, (int(ends[-1]), 2), whole=whole) for r in range(size)]
        scattered = communicator.reduce_scatter(device(sums[rank]), counts)
        gathered, reduced = communicator.allgatherv(scattered, counts), communicator.allreduce(device(sums[rank]))
        np.testing.assert_array_equal(host(gathered), host(reduced))
        same(scattered, add_in_order(sums)[ends[rank] : ends[rank + 1]])
    strided = [drawn(r, (6, 8), np.float64, whole=whole) for r in range(size)]
    same(communicator.allreduce(device(strided[rank])[::2, ::2]), add_in_order([a[::2, ::2] for a in strided]))

    half = communicator.split(rank % 2)
    members = list(range(rank % 2, size, 2))
    assert (half.rank, half.size) == (members.index(rank), len(members))
    same(half.allreduce(device(np.array([1 << rank]))), np.array([sum(1 << r for r in members)]))
    alone = half.split(half.rank)
    same(alone.allreduce(device(drawn(rank))), drawn(rank))
    alone.close()
    half.close()

    # two arrays of the neighbours' while a sum of all is computed
    sent = [device(drawn(rank)), device(np.array(rank))]
    answer = communicator.start_sendrecv(sent, before, after, [device(drawn(0)), device(np.array(0))])
    same(communicator.allreduce(device(np.array([rank]))), np.array([size * (size - 1) // 2]))
    received = answer()
    same(received[0], drawn(after))
    same(received[1], np.array(after))

    # a large array from one rank to the next, which the sender changes at once
    large, nothing = device(np.full(1 << 21, rank, np.float32)), device(np.empty(0, np.float32))
    received = communicator.sendrecv(nothing if rank else large, after, before, nothing if before else large)
    large[...] = -1
    assert (host(received) == before).all() and received.size == (0 if before else 1 << 21)
    communicator.barrier()
    assert not communicator.cause
    return checks


def check_arguments(communicator: Communicator, device: Callable[[np.ndarray], Any] = ON_HOST) -> None:
    """Check that wrong arguments are refused on every rank, before any message, and harm no later call."""
    size, three = communicator.size, device(np.zeros(3))
    for error, pattern, call in (
        (ValueError, "add up to the 3 rows", lambda: communicator.reduce_scatter(three, [2] * size)),
        (ValueError, f"each of {size} ranks", lambda: communicator.reduce_scatter(three, [3, *[0] * size])),
        (ValueError, ">= 0", lambda: communicator.reduce_scatter(three, [-1] * size)),
        (ValueError, r"counts\[\d\]=2 rows, got 3", lambda: communicator.allgatherv(three, [2] * size)),
        (ValueError, f"0 <= root < {size}, got {size}", lambda: communicator.broadcast(three, size)),
        (ValueError, f"0 <= dest < {size}, got -1", lambda: communicator.sendrecv(three, -1, 0, three)),
        (TypeError, "got list", lambda: communicator.allreduce([1.0])),
    ):
        with _raises(error, pattern):
            call()
    communicator.barrier()


def check_failures(
    connect: Connect, device: Callable[[np.ndarray], Any] = ON_HOST, *, several: bool = True, matched: bool = True
) -> None:
    """Check that a failure of the last rank ends the calls of all ranks soon and for good, with its cause."""

    def fails(
        last: Callable[[Communicator], Any], then: Callable[[Communicator], Any], cause: str, timeout: float = 60.0
    ) -> None:
        """What the last rank does alone before all ranks go on with `then` fails on all of them."""
        begun, made = time.monotonic(), []

        def run() -> None:
            made.append(connect(timeout=timeout))  # may fail, too: the last rank does not wait for the others
            if made[0].rank == made[0].size - 1:
                last(made[0])
            then(made[0])

        with _raises(CommunicatorError, cause):
            run()
        assert time.monotonic() - begun < PATIENCE, cause
        for communicator in made:
            for call in (communicator.barrier, functools.partial(communicator.split, 0)):
                with _raises(CommunicatorError, cause):  # it stays failed
                    call()
            communicator.close()

    def sums(communicator: Communicator) -> None:
        communicator.allreduce(device(np.zeros(2)))
        communicator.barrier()

    def computes(communicator: Communicator) -> None:
        while not communicator.cause:
            time.sleep(0.01)
        raise CommunicatorError(communicator.cause)

    def aborts(communicator: Communicator) -> None:
        communicator.abort("its disk is full")
        communicator.abort("a consequence")

    fails(aborts, sums, "^its disk is full$")
    fails(aborts, computes, "^its disk is full$")
    if several:
        fails(lambda _: time.sleep(1.5), lambda each: each.barrier(), r"within 0\.3 s in barrier|waited 0\.3 s", 0.3)
    if several and matched:
        fails(lambda each: each.allreduce(device(np.zeros(3))), sums, r"(?s)\(2,\).*\(3,\)|\(3,\).*\(2,\)")
        fails(lambda each: each.close(), sums, "has closed")


class CommunicatorContract:
    """Tests of a transport, to be inherited by a test class that defines `run`.

    ::

        class TestMyTransport(CommunicatorContract):
            def run(self, size, check):
                run_processes(size, lambda: check(MyCommunicator))

    Attributes
    ----------
    sizes : tuple of int
        Numbers of ranks.
    """

    sizes: tuple[int, ...] = (1, 2, 3)

    def run(self, size: int, check: Callable[..., None]) -> None:
        """Call ``check(connect)`` on each of `size` ranks and raise what one of them raises.

        `check` is `check_communicator`, whose other arguments are given here if arrays are on a device.
        """
        raise NotImplementedError

    def test_laws(self) -> None:
        """For each number of ranks."""
        for size in self.sizes:
            self.run(size, check_communicator)
