"""Communicators: the laws of the collectives over every transport, and that no rank waits for another for ever."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fake_nccl import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.errors import CommunicatorError, NotPositiveDefiniteError
from hybridmf.ranks.transport import processes, sockets, threads
from hybridmf.ranks.transport.communicator import Single
from hybridmf.ranks.transport.messages import SMALL, even_counts
from hybridmf.ranks.transport.processes import RankTraceback, run_processes
from hybridmf.ranks.transport.sockets import SocketCommunicator
from hybridmf.ranks.transport.threads import RankThreads, ThreadCommunicator, run_ranks

COST = dict(sockets.SCRYPT)

DTYPES = [np.float32, np.float64, np.int32, np.int64, np.uint8]


def drawn(rank: int, shape=(7, 3), dtype=np.float32, whole=False) -> np.ndarray:
    """What a rank contributes, whole numbers if asked for; any rank can draw any other's."""
    values = np.asarray(np.random.default_rng(100 + rank).normal(scale=10, size=shape))
    if whole or np.dtype(dtype).kind != "f":
        values = np.abs(values).round()
    return np.asarray(values).astype(dtype)


def in_rank_order(arrays) -> np.ndarray:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = np.asarray(total + array).astype(total.dtype)
    return total


# --------------------------------------------------------------------------------------------- the laws, one body


def laws(communicator, device=np.asarray, host=np.asarray, whole=False) -> int:
    """Everything a communicator promises, checked by each rank; the number of checks.

    `device` and `host` bring arrays to where the communicator wants them and back. With `whole` numbers sums are the
    same in any order.
    """
    checks = 0
    rank, size = communicator.rank, communicator.size
    after, before = (rank + 1) % size, (rank - 1) % size

    def same(ours, expected):
        nonlocal checks
        assert type(ours) is type(device(expected))
        assert ours.dtype == expected.dtype
        np.testing.assert_array_equal(host(ours), expected)
        ours[...] = 0  # what comes back is ours to write to
        checks += 1

    for dtype in DTYPES:
        for shape in [(7, 3), (0, 3), (), (4, 0), (SMALL // 4 + 5,)]:
            everyone = [drawn(r, shape, dtype, whole) for r in range(size)]
            mine = device(everyone[rank])
            same(communicator.allreduce(mine), in_rank_order(everyone))
            same(communicator.broadcast(mine, size - 1), everyone[-1])
            same(communicator.sendrecv(mine, after, before, mine), everyone[before])
            np.testing.assert_array_equal(host(mine), everyone[rank])
    for counts in ([3] * size, list(range(size)), [0] * size, [5] + [0] * (size - 1)):
        bounds = np.cumsum([0, *counts])
        parts = [drawn(r, (counts[r], 2)) for r in range(size)]
        same(communicator.allgatherv(device(parts[rank]), counts), np.concatenate(parts))
        sums = [drawn(r, (bounds[-1], 2), np.float32, whole) for r in range(size)]
        scattered = communicator.reduce_scatter(device(sums[rank]), counts)
        gathered, reduced = communicator.allgatherv(scattered, counts), communicator.allreduce(device(sums[rank]))
        np.testing.assert_array_equal(host(gathered), host(reduced))
        same(scattered, in_rank_order(sums)[bounds[rank] : bounds[rank + 1]])
    strided = [drawn(r, (6, 8), np.float64, whole) for r in range(size)]
    same(communicator.allreduce(device(strided[rank])[::2, ::2]), in_rank_order([a[::2, ::2] for a in strided]))
    communicator.barrier()

    half = communicator.split(rank % 2)
    members = list(range(rank % 2, size, 2))
    assert (half.rank, half.size) == (members.index(rank), len(members))
    same(half.allreduce(device(np.array([1 << rank]))), np.array([sum(1 << r for r in members)]))
    alone = half.split(half.rank)
    same(alone.allreduce(device(drawn(rank))), drawn(rank))
    alone.close()
    half.close()
    sent = [device(drawn(rank)), device(np.array(rank))]
    answer = communicator.start_sendrecv(sent, before, after, [device(drawn(0)), device(np.array(0))])
    same(communicator.allreduce(device(np.array([rank]))), np.array([size * (size - 1) // 2]))  # meanwhile
    received = answer()
    same(received[0], drawn(after))
    same(received[1], np.array(after))
    communicator.barrier()
    assert not communicator.cause
    return checks


def test_laws_of_one_rank():
    assert laws(Single()) > 80


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_laws_of_threads(size):
    assert min(run_ranks(size, laws)) > 80


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from(DTYPES))
def test_any_counts(counts, width, dtype):
    size, rows = len(counts), sum(counts)

    def rank(communicator):
        whole = drawn(communicator.rank, (rows, width), dtype)
        part = communicator.reduce_scatter(whole, counts)
        return communicator.allgatherv(part, counts), communicator.allreduce(whole)

    expected = in_rank_order([drawn(r, (rows, width), dtype) for r in range(size)])
    for pair in run_ranks(size, rank):
        for ours in pair:
            np.testing.assert_array_equal(ours, expected)


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_counts(rows, size):
    counts = even_counts(rows, size)
    assert sum(counts) == rows
    assert max(counts) - min(counts) <= 1


def test_what_was_sent_may_change():
    """Nobody sees what the sender writes afterwards, however late he receives."""

    def rank(communicator):
        mine = np.full(3, communicator.rank + 1.0)
        if communicator.rank:
            time.sleep(0.02)
        other = communicator.sendrecv(mine, 1 - communicator.rank, 1 - communicator.rank, mine)
        mine[:] = -1
        total = communicator.allgatherv(np.full(1, float(communicator.rank)), [1, 1])
        return other[0], total.sum()

    assert run_ranks(2, rank) == [(2.0, 1.0), (1.0, 1.0)]


# --------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.reduce_scatter(np.zeros(3), [1, 1]), ValueError, r"counts must add up to the 3 rows"),
        (lambda c: c.reduce_scatter(np.zeros(3), [3]), ValueError, r"each of 2 ranks, got \[3\]"),
        (lambda c: c.reduce_scatter(np.zeros(3), [4, -1]), ValueError, r">= 0"),
        (lambda c: c.allgatherv(np.zeros(3), [2, 2]), ValueError, r"counts\[\d\]=2 rows, got 3"),
        (lambda c: c.broadcast(np.zeros(3), 2), ValueError, r"0 <= root < 2, got 2"),
        (lambda c: c.sendrecv(np.zeros(3), -1, 0, np.zeros(3)), ValueError, r"0 <= dest < 2, got -1"),
        (lambda c: c.allreduce([1.0]), TypeError, r"NumPy array .* got list"),
        (lambda c: c.allreduce(np.array(["a"])), TypeError, r"numbers .* <U1"),
    ],
)
def test_arguments_are_judged(call, error, message):
    with pytest.raises(error, match=message):
        run_ranks(2, call)


@pytest.mark.parametrize(
    "calls",
    [
        (lambda c: c.allreduce(np.zeros(2)), lambda c: c.barrier()),
        (lambda c: c.allreduce(np.zeros(2)), lambda c: c.allreduce(np.zeros(3))),
        (lambda c: c.allreduce(np.zeros(2)), lambda c: c.allreduce(np.zeros(2, np.float32))),
        (lambda c: c.allgatherv(np.zeros(1), [1, 1]), lambda c: c.allgatherv(np.zeros(2), [1, 2])),
        (lambda c: c.sendrecv(np.zeros(2), 1, 1, np.zeros(2)), lambda c: c.sendrecv(np.zeros(2), 0, 0, np.zeros(3))),
    ],
)
def test_ranks_that_call_different_things_are_told_both(calls):
    with pytest.raises(CommunicatorError, match=r"rank \d calls .* while rank \d calls .*same calls in the same order"):
        run_ranks(2, lambda c: calls[c.rank](c), timeout=5)


def test_what_nobody_receives_is_found():
    def rank(communicator):
        if communicator.rank:
            communicator._send(0, "allreduce", np.zeros(2))

    with pytest.raises(CommunicatorError, match="rank 0 never received what rank 1 sent in allreduce"):
        run_ranks(2, rank)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_timeouts_are_judged(timeout):
    with pytest.raises(ValueError, match="timeout must be a finite number of seconds > 0"):
        run_ranks(1, laws, timeout=timeout)
    with pytest.raises(ValueError, match="size must satisfy size >= 1, got 0"):
        ThreadCommunicator.group(0)


# --------------------------------------------------------------------------------------------- failures


class OwnError(Exception):
    pass


@pytest.mark.parametrize("error", [OwnError("no memory left"), KeyboardInterrupt(), SystemExit(3)])
def test_the_first_failure_comes_out_as_it_was(error):
    others = []

    def rank(communicator):
        if communicator.rank == 1:
            try:
                raise ZeroDivisionError
            except ZeroDivisionError as cause:
                raise error from cause
        try:
            communicator.barrier()
        except CommunicatorError as noticed:
            others.append(str(noticed))
            raise

    started = time.monotonic()
    with pytest.raises(type(error)) as caught:
        run_ranks(3, rank, timeout=60)
    assert caught.value is error
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert others == [f"rank 1 failed: {type(error).__name__}: {error}"] * 2
    assert time.monotonic() - started < 30  # far from the timeout: they were woken


def test_abort_wakes_everyone_with_the_first_cause():
    seen = []

    def rank(communicator):
        if communicator.rank == 0:
            time.sleep(0.02)
            communicator.abort("first")
            communicator.abort("second")
        for _ in range(2):  # it stays failed
            with pytest.raises(CommunicatorError, match=r"^first$"):
                communicator.split(0)
        seen.append(communicator.cause)

    with pytest.raises(CommunicatorError, match=r"^first$"):
        run_ranks(3, lambda c: (rank(c), c.barrier()), timeout=60)
    assert seen == ["first"] * 3


def test_a_failure_reaches_groups_that_were_split_off():
    def rank(communicator):
        part = communicator.split(communicator.rank // 2)
        if communicator.rank == 3:
            part.abort("NaN on rank 3")
        part.barrier()
        communicator.barrier()

    with pytest.raises(CommunicatorError, match="NaN on rank 3"):
        run_ranks(4, rank, timeout=60)


def test_consequences_do_not_take_the_place_of_the_first_failure():
    def rank(communicator):
        if communicator.rank == 0:
            raise CommunicatorError("other data")
        communicator.barrier()

    with pytest.raises(CommunicatorError, match=r"^other data$"):
        run_ranks(3, rank, timeout=60)


def test_a_rank_that_tells_the_others_before_it_fails_is_heard():
    def rank(communicator):
        if communicator.rank == 0:
            communicator.abort("NaN on rank 0")
            time.sleep(0.05)  # until theirs are here
            raise OwnError
        communicator.barrier()

    with pytest.raises(OwnError):
        run_ranks(3, rank, timeout=60)


def test_a_single_rank_can_abort():
    single = Single()
    single.close()
    single.abort("first")
    single.abort("second")
    for call in (single.barrier, lambda: single.split(0), lambda: single.allreduce(np.zeros(1))):
        with pytest.raises(CommunicatorError, match="first"):
            call()


def test_a_rank_that_hangs_stops_the_others(monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE", 0.05)
    wake = threading.Event()

    def rank(communicator):
        if communicator.rank == 2:
            wake.wait(30)
        communicator.barrier()

    with pytest.raises(CommunicatorError, match=r"rank 2 did not answer rank [01] within 0\.05 s in barrier"):
        run_ranks(3, rank, timeout=0.05)
    wake.set()


@pytest.mark.parametrize("how", ["has ended", "has closed its communicator"])
def test_a_rank_that_leaves_stops_those_who_wait_for_it(how):
    stay = threading.Event()

    def rank(communicator):
        communicator.barrier()
        if communicator.rank == 1:
            if "closed" in how:
                communicator.close()
                stay.wait(30)
            return
        try:
            communicator.allreduce(np.zeros(2))
        finally:
            stay.set()

    with pytest.raises(CommunicatorError, match=rf"rank 1 {how} while rank 0 waits for it in allreduce"):
        run_ranks(2, rank, timeout=60)


def test_who_ends_after_the_last_call_is_not_missed():
    """Rank 0 has sent all that is asked of it before it ends."""

    def rank(communicator):
        if communicator.rank:
            time.sleep(0.02)
        return communicator.allgatherv(np.array([communicator.rank]), [1, 1]).sum()

    for _ in range(5):
        assert run_ranks(2, rank) == [1, 1]


def test_threads_stay_from_run_to_run():
    with RankThreads(3) as ranks:
        names = [ranks.run(lambda c: threading.current_thread()) for _ in range(3)]
        assert all(now == then for now, then in pairwise(names))
        assert len(set(names[0])) == 3
        assert ranks.run(lambda c: c.rank) == [0, 1, 2]
        with pytest.raises(OwnError):
            ranks.run(lambda c: (_ for _ in ()).throw(OwnError()))
        assert ranks.stopping.is_set()
        with pytest.raises(CommunicatorError, match=r"rank \d failed: OwnError"):
            ranks.run(lambda c: c.rank)
    names[0][0].join(10)
    assert not names[0][0].is_alive()


def test_ctrl_c_stops_all_ranks():
    noticed = []

    def rank(communicator):
        try:
            communicator.barrier()
            if communicator.rank == 0:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while communicator.rank == 2 and not communicator.cause:  # computes, and looks now and then
                time.sleep(0.005)
            communicator.barrier()
        except CommunicatorError as error:
            noticed.append(str(error))
            raise

    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, rank, timeout=60)
    assert noticed == ["stopped by KeyboardInterrupt"] * 3


# --------------------------------------------------------------------------------------------- sockets


def free_address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


@pytest.fixture(autouse=True)
def cheap_tokens(monkeypatch):
    """The many meetings of these tests do not wait for scrypt."""
    monkeypatch.setitem(sockets.SCRYPT, "n", 2)


def over_sockets(size, function, timeout=20.0, tokens=None, address=None, sizes=None, ranks=None):
    """As run_ranks, with connections on the loopback; what each rank returned or raised."""
    address, answers = address or free_address(), [None] * size
    tokens, sizes, ranks = tokens or ["secret"] * size, sizes or [size] * size, ranks or range(size)
    timeouts = timeout if isinstance(timeout, list) else [timeout] * size

    def run(k):
        try:
            communicator = SocketCommunicator.connect(ranks[k], sizes[k], address, token=tokens[k], timeout=timeouts[k])
            answers[k] = function(communicator)
            communicator.close()
        except BaseException as error:
            answers[k] = error

    workers = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    return answers


def texts(answers) -> list[str]:
    return [str(answer) if isinstance(answer, CommunicatorError) else repr(answer) for answer in answers]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_laws_of_sockets(size):
    checks = over_sockets(size, laws)
    assert all(isinstance(count, int) and count > 80 for count in checks), checks


def test_sockets_add_the_bits_that_threads_add():
    def rank(communicator):
        large = drawn(communicator.rank, (SMALL + 3,), np.float32)
        return communicator.allreduce(large), communicator.reduce_scatter(large, [SMALL, 0, 3])

    for ours, theirs in zip(over_sockets(3, rank), run_ranks(3, rank), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_large_arrays_in_both_directions():
    """More than the buffers of a connection hold: nobody waits for the other to read first."""

    def rank(communicator):
        array = np.full(1 << 21, float(communicator.rank))
        other = 1 - communicator.rank
        return communicator.sendrecv(array, other, other, array).sum()

    assert over_sockets(2, rank) == [float(1 << 21), 0.0]


def test_sockets_abort_with_the_first_cause():
    def rank(communicator):
        part = communicator.split(communicator.rank % 2)
        if communicator.rank == 2:
            part.abort("NaN on rank 2")
            part.abort("later")
        communicator.barrier()

    assert texts(over_sockets(3, rank)) == ["NaN on rank 2"] * 3


def test_sockets_tell_different_calls():
    for answer in texts(over_sockets(2, lambda c: c.allreduce(np.zeros(3 - c.rank)))):
        assert "calls allreduce of float64 (2,) while rank" in answer or "float64 (3,) while rank" in answer


def test_a_rank_that_hangs_is_not_waited_for():
    def rank(communicator):
        while communicator.rank == 1 and not communicator.cause:
            time.sleep(0.005)
        communicator.barrier()

    answers = texts(over_sockets(3, rank, timeout=0.3))
    for answer in answers:
        assert "rank 1 did not answer rank" in answer and "within 0.3 s in barrier" in answer


def test_a_rank_that_does_not_read_is_not_waited_for(monkeypatch):
    """Its buffers fill, and the sender's time is up."""

    def rank(communicator):
        if communicator.rank == 0:
            communicator.barrier()
            return communicator.sendrecv(np.zeros(1 << 22), 1, 1, np.zeros(1))
        lock = communicator.transport.changed
        with lock:  # the thread that reads cannot hand over the first array
            communicator.transport.send("", 1, 0, "barrier", np.empty(0, np.uint8))
            time.sleep(1.0)

    answers = texts(over_sockets(2, rank, timeout=0.3))
    assert "cannot be reached while rank 0 sends to it in sendrecv" in answers[0] or "did not answer" in answers[0]


def test_a_connection_that_ends_stops_all():
    def rank(communicator):
        communicator.barrier()
        if communicator.rank == 1:  # as the system does for a process that was killed, which says nothing itself
            communicator.transport._closed = True
            for connection in communicator.transport.peers.values():
                connection.shutdown(socket.SHUT_RDWR)
            return "gone"
        communicator.allreduce(np.zeros(2))

    answers = texts(over_sockets(3, rank))
    assert answers[0] == answers[2] == "rank 1 ended without closing its communicator (was it killed?)"


def test_who_says_goodbye_is_missed_only_by_those_who_wait():
    def rank(communicator):
        if communicator.rank == 1:
            communicator.allgatherv(np.array([1]), [1, 1])
            communicator.close()
            communicator.close()
            with pytest.raises(CommunicatorError, match="rank 1 has closed this communicator"):
                communicator.barrier()
            return "left"
        time.sleep(0.05)
        assert communicator.allgatherv(np.array([1]), [1, 1]).sum() == 2
        communicator.barrier()

    answers = texts(over_sockets(2, rank))
    assert answers == ["rank 1 has closed its communicator while rank 0 waits for it in barrier", "'left'"]


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x01{",
        b'\x00\x00\x00\x27{"dtype":"O","shape":[1],"context":"" } ',
        b'\x00\x00\x00\x28{"dtype":"f4","shape":[-1],"context":""}',
    ],
)
def test_what_is_no_message_stops_all(frame):
    def rank(communicator):
        if communicator.rank == 1:
            communicator.transport.peers[0].sendall(frame)
        communicator.barrier()

    assert texts(over_sockets(2, rank))[0].startswith("rank 1 sends what is no message")


def test_who_does_not_know_the_token_stays_out(caplog):
    answers = texts(over_sockets(2, laws, timeout=[0.5, 20], tokens=["secret", "guess"]))
    assert answers[0].startswith("ranks [1] did not come within 0.5 s; all 2 must be started, with the same HYBRIDMF_")
    assert answers[1] == "rank 0 refused rank 1: it has another token (HYBRIDMF_TOKEN must be the same everywhere)"
    assert "a connection from 127.0.0.1 was refused: the other end does not know the token" in caplog.text


def test_who_came_to_a_meeting_that_failed_is_let_go(monkeypatch):
    meetings = []
    meet = sockets._Meeting.host
    monkeypatch.setattr(sockets._Meeting, "host", lambda self, listener: meetings.append(self) or meet(self, listener))
    answers = texts(over_sockets(2, laws, timeout=[0.5, 20], sizes=[3, 3]))
    assert answers[0].startswith("ranks [2] did not come within 0.5 s; all 3 must be started")
    assert answers[1] == answers[0]
    assert [connection.fileno() for connection in meetings[0].peers.values()] == [-1]
    answers = texts(over_sockets(2, laws, timeout=[2, 0.5], sizes=[3, 3]))
    assert answers[1] == "rank 0 ended, or waits for ranks that do not come"


def test_a_message_that_stops_in_its_header_stops_all():
    ours, theirs = _loopback()
    with ours, theirs:
        mesh = sockets.Mesh(0, {1: ours}, 0.1)
        theirs.sendall(b"\0\0")
        with mesh.changed:
            assert mesh.changed.wait_for(lambda: bool(mesh._cause), 20)
        with pytest.raises(CommunicatorError, match="rank 1 ended without closing"):
            mesh.check()


def _loopback() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname()[:2])
        return listener.accept()[0], theirs


def test_strangers_are_turned_away(caplog):
    """They come before the ranks do, say something else or nothing, and the ranks still meet."""
    address = free_address()

    def disturb():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(OSError):
                with socket.create_connection(address, timeout=1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scan\r\n")
                return
            time.sleep(0.01)

    nuisance = threading.Thread(target=disturb)
    nuisance.start()
    answers = [None, None]

    def run(rank):
        if rank:
            nuisance.join()
        communicator = SocketCommunicator.connect(rank, 2, address, token="secret", timeout=20)
        answers[rank] = communicator.allreduce(np.array([rank + 1]))[0]

    workers = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert answers == [3, 3]
    assert "was refused" in caplog.text


class Meeting:
    """Rank 0's door on the loopback, and strangers before it; `admitted` is what came through."""

    def __init__(self, seconds: float = 20.0) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        self.keys = sockets._Keys("secret")
        deadline = time.monotonic() + seconds
        self.door = sockets._Door(self.listener, self.keys, {"rank": 0, "size": 2}, deadline, 1)
        self.strangers: list[socket.socket] = []

    def __enter__(self) -> Meeting:
        self.door.__enter__()
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()
        return self

    def _wait(self) -> None:
        self.admitted = self.door.next()

    def __exit__(self, *_) -> None:
        self.waiter.join(30)
        self.door.__exit__()
        for connection in [self.listener, *self.strangers, *(self.admitted or ())[:1]]:
            connection.close()

    def stranger(self) -> socket.socket:
        """One that has read the challenge."""
        self.strangers.append(socket.create_connection(self.address, timeout=10))
        self.challenge = bytes(sockets._read(self.strangers[-1], 8 + sockets.SALT + sockets.NONCE))
        return self.strangers[-1]

    def rank(self, token: str = "secret", said: object = None) -> dict:
        """The other end of a rank that comes."""
        connection = socket.create_connection(self.address, timeout=10)
        self.strangers.append(connection)
        return sockets._introduce(connection, sockets._Keys(token), said or {"rank": 1}, time.monotonic() + 10)


def everything(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    found = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def test_strangers_who_say_nothing_stop_no_meeting():
    """Each has the time of a whole handshake, longer than the ranks wait, and they are there first."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    idle = [socket.create_connection(address) for _ in range(5)]
    assert sockets.HANDSHAKE > 5
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(SocketCommunicator.connect, 0, 2, address, token="secret", timeout=5, listener=listener)
        second = pool.submit(SocketCommunicator.connect, 1, 2, address, token="secret", timeout=5)
        ranks = [first.result(20), second.result(20)]
        assert [each.result(20)[0] for each in [pool.submit(rank.allreduce, np.ones(1)) for rank in ranks]] == [2, 2]
    for each in [*ranks, *idle]:
        each.close()


def test_a_stranger_who_drips_bytes_has_one_deadline(monkeypatch, caplog):
    monkeypatch.setattr(sockets, "HANDSHAKE", 0.3)
    with Meeting() as meeting:
        stranger = meeting.stranger()
        stranger.settimeout(0.02)
        came = b"?"
        for _ in range(200):  # a byte each 20 ms, for ten deadlines
            with suppress(OSError):
                stranger.send(b"\0")
            with suppress(TimeoutError):
                came = stranger.recv(1)
                break
        assert came == b""
        assert meeting.rank() == {"rank": 0, "size": 2}
    assert "127.0.0.1 was refused: no proof that it knows the token in time" in caplog.text


def test_no_door_is_open_for_ever(caplog):
    with Meeting(seconds=0.2) as meeting:
        meeting.stranger()
        meeting.stranger().close()  # as a rank that comes too early does
    assert meeting.admitted is None
    assert not meeting.door.proved
    assert "it left" not in caplog.text


def test_a_stranger_learns_nothing_by_which_a_guess_can_be_checked(caplog):
    """The end that accepts proves nothing before the other has, and parses nothing."""
    with Meeting() as meeting:
        stranger = meeting.stranger()
        text = b"[" * 4000
        stranger.sendall(bytes(sockets.NONCE) + len(text).to_bytes(2, "big") + text + bytes(sockets.PROOF))
        assert everything(stranger) == sockets.REFUSED
        with pytest.raises(PermissionError, match="another token"):
            meeting.rank("guess")
        assert meeting.rank() == {"rank": 0, "size": 2}
    assert caplog.text.count("was refused: the other end does not know the token") == 2
    assert meeting.challenge.startswith(sockets.MAGIC + meeting.keys.salt)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (lambda sealed: bytes(sockets.NONCE) + b"\xff\xff", "a greeting of 65535 bytes"),
        (lambda sealed: sealed + b"x", "more than a greeting"),
        (lambda sealed: sealed[:-1], "it left"),
    ],
)
def test_greetings_are_bounded(sent, problem, caplog):
    with Meeting() as meeting:
        stranger, nonce = meeting.stranger(), bytes(sockets.NONCE)
        salted = meeting.challenge[len(sockets.MAGIC) :] + nonce
        key = meeting.keys.of(meeting.keys.salt)
        stranger.sendall(sent(nonce + sockets._greeting(key, b"connects", salted, {"rank": 1})))
        stranger.shutdown(socket.SHUT_WR)
        assert everything(stranger) == b""
        meeting.rank()
    assert f"127.0.0.1 was refused: {problem}" in caplog.text


@pytest.mark.parametrize("said", [["rank"], [[]], "rank"])
def test_a_greeting_is_an_object(said, caplog):
    with Meeting() as meeting:
        with pytest.raises((EOFError, ConnectionError)):
            meeting.rank(said=said)
        meeting.rank()
    assert "127.0.0.1 was refused: a greeting that is no object" in caplog.text


def test_the_number_of_strangers_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(sockets, "STRANGERS", 3)
    monkeypatch.setattr(sockets, "REPORTED", 2)
    caplog.set_level("DEBUG", "hybridmf")
    with Meeting() as meeting:
        crowd = [meeting.stranger() for _ in range(12)]
        assert all(everything(stranger) == b"" for stranger in crowd[:8])
        wait_until(lambda: len(meeting.door.guests) == 4)
        meeting.rank()  # the oldest goes for it, too
    refusals = [record for record in caplog.records if "too many connections" in record.getMessage()]
    assert [record.levelname for record in refusals] == ["WARNING"] * 2 + ["DEBUG"] * 7
    assert "further connections that are refused are logged at level DEBUG" in caplog.text


def test_a_door_goes_on_where_no_file_can_be_opened(caplog):
    class Full:
        def accept(self):
            raise OSError(24, "Too many open files")

    meeting = Meeting(seconds=0.2)
    with meeting:
        meeting.stranger()
        meeting.waiter.join(10)
        meeting.door.deadline += 10
        other = socket.create_connection(meeting.address)
        meeting.door._open()
        meeting.door.listener = Full()
        meeting.door._open()
        meeting.door._open()
    assert "too many connections without a proof" in caplog.text
    other.close()


def test_who_does_not_read_is_no_guest():
    class Deaf:
        def setblocking(self, blocks):
            pass

        def send(self, content):
            return 1

    with pytest.raises(ValueError, match="it does not read"):
        sockets._Guest(Deaf(), "there", b"salt", 0)


def test_join_tries_again_where_it_is_dropped():
    """By what listens there before rank 0 does, and by a rank 0 that was killed after they had met."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(SocketCommunicator.connect, 1, 2, address, token="secret", timeout=30)
        for said in (b"", b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close, and so on and on\r\n\r\n"):
            with listener.accept()[0] as dropped:
                dropped.sendall(said)
        keys = sockets._Keys("secret")
        with sockets._Door(listener, keys, {"rank": 0, "size": 2}, time.monotonic() + 20, 1) as door:
            door.next()[0].close()
        first = pool.submit(SocketCommunicator.connect, 0, 2, address, token="secret", timeout=30, listener=listener)
        ranks = [first.result(40), second.result(40)]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda key, nonces: sockets.ACCEPTED + sockets._greeting(bytes(32), b"accepts", nonces, {}), "know the token"),
        (lambda key, nonces: sockets.ACCEPTED + sockets._greeting(key, b"connects", nonces, {}), "know the token"),
        (lambda key, nonces: b"?", "another protocol"),
        (lambda key, nonces: sockets.ACCEPTED, "connection was closed"),
        (
            lambda key, nonces: sockets.ACCEPTED + sockets._greeting(key, b"accepts", nonces, {"rank": 3}),
            "rank 3 answers",
        ),
    ],
)
def test_an_impostor_is_not_taken_for_rank_0(answer, problem):
    """Of another key, in the wrong role, of another protocol, one that ends early, another rank."""
    stop = threading.Event()

    def pretend():
        keys, challenge = sockets._Keys("secret"), bytes(sockets.SALT + sockets.NONCE)
        while not stop.is_set():
            with suppress(OSError, EOFError), listener.accept()[0] as caller:
                caller.settimeout(10)
                caller.sendall(sockets.MAGIC + challenge)
                nonces = challenge + bytes(sockets._read(caller, sockets.NONCE))
                sockets._read(caller, sockets._length(sockets._read(caller, 2)) + sockets.PROOF)
                caller.sendall(answer(keys.of(bytes(sockets.SALT)), nonces))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        impostor = threading.Thread(target=pretend, daemon=True)
        impostor.start()
        with pytest.raises(CommunicatorError, match=problem):
            SocketCommunicator.connect(1, 2, listener.getsockname()[:2], token="secret", timeout=0.4)
        stop.set()
        impostor.join(20)


def test_a_rank_that_comes_again_takes_the_place_of_its_lost_connection():
    meeting = sockets._Meeting(0, 3, ("127.0.0.1", 1), "secret", 5)
    pairs = [_loopback() for _ in range(3)]
    for ours, _ in pairs[:2]:
        meeting._admit(ours, {"rank": 1, "size": 3, "process": "a"}, range(1, 3))
    assert (pairs[0][0].fileno(), meeting.peers[1]) == (-1, pairs[1][0])
    with pytest.raises(CommunicatorError, match="there are two ranks 1"):
        meeting._admit(pairs[2][0], {"rank": 1, "size": 3, "process": "b"}, range(1, 3))
    with pytest.raises(CommunicatorError, match="there is no rank 3 among 3"):
        meeting._admit(_loopback()[0], {"rank": 3, "size": 3, "process": "c"}, range(1, 3))
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_a_rank_that_is_gone_when_all_have_come(monkeypatch):
    def gone(connection, header):
        if "where" in header:
            raise BrokenPipeError(32, "Broken pipe")
        write(connection, header)

    write = sockets._write_header
    monkeypatch.setattr(sockets, "_write_header", gone)
    answers = texts(over_sockets(2, laws))
    assert answers[0] == "rank 1 left before all ranks had come ([Errno 32] Broken pipe)"
    assert answers[1] == answers[0]


def test_guesses_at_a_token_are_expensive(caplog):
    """What travels is keyed by scrypt of the token, at its usual cost, with the salt of the meeting."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in COST.items():
            patched.setitem(sockets.SCRYPT, name, value)
        key = hashlib.scrypt(b"secret", salt=b"s" * 16, n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32)
        assert sockets._Keys("secret").of(b"s" * 16) == key
    assert sockets._Keys("secret").salt != sockets._Keys("secret").salt
    SocketCommunicator.connect(0, 1, ("127.0.0.1", 0), token="0123456789abcdef").close()
    assert not caplog.text
    SocketCommunicator.connect(0, 1, ("127.0.0.1", 0), token="secret").close()
    assert "has 6 characters and may be guessed; make one of at least 16 by `openssl rand -hex 16`" in caplog.text


def test_ranks_that_do_not_fit_together():
    answers = texts(over_sockets(2, laws, timeout=1, sizes=[2, 3]))
    assert answers == ["rank 1 was started as one of 3 ranks, rank 0 as one of 2"] * 2
    answers = texts(over_sockets(3, laws, timeout=1, ranks=[0, 1, 1]))
    assert "there are two ranks 1" in answers
    with pytest.raises(CommunicatorError, match=r"not answer at 127.0.0.1:\d+: .* it must be started"):
        SocketCommunicator.connect(1, 2, free_address(), token="secret", timeout=0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CommunicatorError, match=r"rank 0 cannot use .* HYBRIDMF_MASTER_PORT a free port"),
    ):
        SocketCommunicator.connect(0, 2, taken.getsockname(), token="secret", timeout=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, "t", 1), "size must satisfy size >= 1"),
        ((2, 2, "t", 1), "0 <= rank <= 1, got 2"),
        ((0, 1, "", 1), "token must be a secret text .*HYBRIDMF_TOKEN.*openssl"),
        ((0, 1, "t", -1), "timeout must be"),
    ],
)
def test_connect_judges_its_arguments(arguments, message):
    rank, size, token, timeout = arguments
    with pytest.raises(ValueError, match=message):
        SocketCommunicator.connect(rank, size, ("127.0.0.1", 1), token=token, timeout=timeout)


def test_environment(monkeypatch):
    for name in (sockets.RANK, sockets.WORLD_SIZE, sockets.LOCAL_RANK, sockets.MASTER_ADDR, *sockets.SLURM.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(sockets.TOKEN, raising=False)
    with pytest.raises(ValueError, match=r"HYBRIDMF_RANK \(or SLURM_PROCID\) must be set to an integer >= 0"):
        SocketCommunicator.from_environment()
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("HYBRIDMF_WORLD_SIZE", "one")
    with pytest.raises(ValueError, match=r"HYBRIDMF_WORLD_SIZE .*got 'one'"):
        SocketCommunicator.from_environment()
    monkeypatch.setenv("HYBRIDMF_WORLD_SIZE", "1")
    monkeypatch.setenv("HYBRIDMF_MASTER_PORT", "99999")
    with pytest.raises(ValueError, match="HYBRIDMF_MASTER_PORT"):
        SocketCommunicator.from_environment()
    monkeypatch.setenv("HYBRIDMF_MASTER_PORT", str(free_address()[1]))
    with pytest.raises(ValueError, match="HYBRIDMF_TOKEN is not set"):
        SocketCommunicator.from_environment()
    monkeypatch.setenv("HYBRIDMF_TOKEN", "secret")
    communicator = SocketCommunicator.from_environment(timeout=5)
    assert (communicator.rank, communicator.size, communicator.timeout) == (0, 1, 5)
    assert sockets.local_rank() == 0
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert sockets.local_rank() == 3
    monkeypatch.setenv("HYBRIDMF_LOCAL_RANK", "2")
    assert sockets.local_rank() == 2


# --------------------------------------------------------------------------------------------- processes


def stages(communicator, folder):
    """In one go, for a process takes a while to start: laws, then rank 1 is killed and the others say what they saw."""
    checks = laws(communicator)
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        communicator.allreduce(np.zeros(2))
    except CommunicatorError as error:
        Path(folder, str(communicator.rank)).write_text(f"{checks} {time.monotonic() - started} {error}")
        raise


def test_laws_of_processes_and_a_kill(tmp_path):
    with pytest.raises(CommunicatorError, match="rank 1 was killed by SIGKILL"):
        run_processes(3, stages, (str(tmp_path),), timeout=60)
    for rank in (0, 2):
        checks, seconds, error = (tmp_path / str(rank)).read_text().split(maxsplit=2)
        assert int(checks) > 80
        assert float(seconds) < 30
        assert error == "rank 1 ended without closing its communicator (was it killed?)"


def own_failure(communicator, counts):
    if communicator.rank == 1:
        raise NotPositiveDefiniteError("row 3", side="user", row=3, minor=2)
    return communicator.allgatherv(np.array([communicator.rank]), counts)


def test_processes_return_and_fail_as_they_do():
    assert run_processes(1, own_failure, ([1],), timeout=30)[0].tolist() == [0]
    with pytest.raises(NotPositiveDefiniteError, match="row 3") as caught:
        run_processes(2, own_failure, ([1, 1],), timeout=30)
    assert (caught.value.side, caught.value.row, caught.value.minor) == ("user", 3, 2)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "own_failure" in str(caught.value.__cause__)


def unusual(communicator, how):
    if how == "exit":
        os._exit(7)
    while True:  # hangs
        time.sleep(1)


def test_a_process_that_ends_without_an_answer():
    with pytest.raises(CommunicatorError, match="rank 0 ended with exit code 7 and no answer"):
        run_processes(1, unusual, ("exit",), timeout=30)


class Unreadable(Exception):
    """Cannot be made again from what pickle has of it; `distributed` mends those that have only another constructor."""

    def __init__(self):
        super().__init__("no memory left")

    def __reduce__(self):
        return Unreadable, (1, 2)


def test_answers_that_cannot_be_pickled():
    _, error, _ = pickle.loads(processes._packed(threading.Lock(), None, "", 2))
    assert isinstance(error, TypeError)
    assert "what rank 2 returned cannot be pickled" in str(error)
    _, error, text = pickle.loads(processes._packed(None, Unreadable(), "trace", 2))
    assert isinstance(error, CommunicatorError)
    assert (str(error), text) == ("rank 2 failed: Unreadable: no memory left", "trace")


def test_ctrl_c_ends_processes():
    timer = threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_processes(1, unusual, ("hang",), timeout=30)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("started", [False, True])
def test_ctrl_c_while_processes_start(started, monkeypatch):
    start = multiprocessing.context.SpawnProcess.start

    def interrupted(process):
        if started:
            start(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_processes(2, unusual, ("hang",), timeout=30)
    assert not multiprocessing.active_children()


def test_ranks_take_quick_turns_while_they_work() -> None:
    """All of them, and again as before once the last is done, however it ends."""
    gc.collect()  # what other tests left ends now
    wait_until(lambda: not threads._Turns.at_work)

    def turns(communicator):
        within = []
        for _ in range(2):
            communicator.barrier()
            within.append(sys.getswitchinterval())
            communicator.barrier()
        return within

    usual = sys.getswitchinterval()
    try:
        for own in (0.003, 0.01):
            sys.setswitchinterval(own)
            assert np.ptp(run_ranks(3, turns)) == 0
            assert run_ranks(1, turns)[0] == pytest.approx([threads.TURN] * 2)
            assert sys.getswitchinterval() == own
            with pytest.raises(ArithmeticError):
                run_ranks(1, lambda communicator: (_ for _ in ()).throw(ArithmeticError))
            assert sys.getswitchinterval() == own
        sys.setswitchinterval(threads.TURN / 4)  # shorter already
        assert run_ranks(1, turns)[0] == pytest.approx([threads.TURN / 4] * 2)
        assert sys.getswitchinterval() == pytest.approx(threads.TURN / 4)
    finally:
        sys.setswitchinterval(usual)


def test_ranks_that_are_closed_do_something_last():
    ended = []
    ranks = RankThreads(3)
    ranks.run(lambda communicator: None)
    ranks.close(lambda communicator: (communicator.barrier(), ended.append(communicator.rank)), wait=True)
    assert sorted(ended) == [0, 1, 2]
    ranks.close(lambda communicator: ended.append(None), wait=True)
    assert len(ended) == 3


def test_what_ranks_raise_last():
    def last(communicator):
        if communicator.rank == 1:
            raise OwnError
        communicator.barrier()

    before = set(threading.enumerate())
    with pytest.raises(OwnError):
        RankThreads(3).close(last, wait=True)
    wait_until(lambda: set(threading.enumerate()) <= before)
    ranks = RankThreads(2)
    ranks.close(last)
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert ranks.stopping.is_set()


# ------------------------------------------------------------------------------------------------ meetings of threads


def meet(communicator, what="here", timeout=20.0):
    communicator.transport.meet(communicator.context, communicator.members, communicator.rank, what, timeout)


def test_a_meeting_ends_when_all_have_come():
    came: list[int] = []

    def rank(communicator):
        for turn in range(50):
            time.sleep(0.001 * ((communicator.rank + turn) % 3))
            came.append(turn)
            meet(communicator)
            assert came.count(turn) == 3
        half = communicator.split(communicator.rank % 2)
        meet(half)  # groups of one and of two, at the same time
        meet(communicator)

    run_ranks(3, rank)


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        (lambda c: meet(c, "there"), r"rank \d calls (t?here) while rank \d calls (t?here); all ranks have to make"),
        (lambda c: None, r"rank 1 has ended while rank 0 waits for it in here"),
        (lambda c: wait_until(lambda: c.cause), r"rank 0 waited 0\.2 s for the others in here"),
    ],
)
def test_a_meeting_that_fails(absent, message):
    def rank(communicator):
        meet(communicator, timeout=0.2) if communicator.rank == 0 else absent(communicator)

    with pytest.raises(CommunicatorError, match=message):
        run_ranks(2, rank)
