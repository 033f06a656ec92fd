"""Ranks on threads: the laws of the collectives, and that no rank waits for another for ever."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.errors import CommunicatorError
from hybridmf.ranks.transport import threads
from hybridmf.ranks.transport.communicator import Single
from hybridmf.ranks.transport.messages import add_in_order, even_counts
from hybridmf.ranks.transport.threads import RankThreads, ThreadCommunicator, run_ranks
from hybridmf.testing import CommunicatorContract
from hybridmf.testing.communicators import DTYPES, drawn
from support.communicators import meet, run_in_threads
from support.fake_nccl import wait_until


class TestThreads(CommunicatorContract):
    sizes = (1, 2, 3, 5)

    def run(self, size, check):
        run_in_threads(size, check)


class TestSingle(CommunicatorContract):
    sizes = (1,)

    def run(self, size, check):
        check(lambda timeout: Single())


@settings(max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from(DTYPES))
def test_any_counts(counts, width, dtype):
    size, rows = len(counts), sum(counts)

    def rank(communicator):
        whole = drawn(communicator.rank, (rows, width), dtype)
        part = communicator.reduce_scatter(whole, counts)
        return communicator.allgatherv(part, counts), communicator.allreduce(whole)

    expected = add_in_order([drawn(r, (rows, width), dtype) for r in range(size)])
    for pair in run_ranks(size, rank):
        for ours in pair:
            np.testing.assert_array_equal(ours, expected)


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_counts(rows, size):
    counts = even_counts(rows, size)
    assert sum(counts) == rows
    assert max(counts) - min(counts) <= 1


def test_sent_arrays_may_change():
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


def test_text_does_not_travel():
    with pytest.raises(TypeError, match=r"numbers .* <U1"):
        run_ranks(2, lambda c: c.allreduce(np.array(["a"])))


@pytest.mark.parametrize(
    "calls",
    [
        (lambda c: c.allreduce(np.zeros(2)), lambda c: c.barrier()),
        (lambda c: c.allreduce(np.zeros(2)), lambda c: c.allreduce(np.zeros(2, np.float32))),
        (lambda c: c.allgatherv(np.zeros(1), [1, 1]), lambda c: c.allgatherv(np.zeros(2), [1, 2])),
        (lambda c: c.sendrecv(np.zeros(2), 1, 1, np.zeros(2)), lambda c: c.sendrecv(np.zeros(2), 0, 0, np.zeros(3))),
    ],
)
def test_different_calls_of_ranks_are_both_named(calls):
    with pytest.raises(CommunicatorError, match=r"rank \d calls .* while rank \d calls .*same calls in the same order"):
        run_ranks(2, lambda c: calls[c.rank](c), timeout=5)


def test_unreceived_messages_are_found():
    def rank(communicator):
        if communicator.rank:
            communicator._send(0, "allreduce", np.zeros(2))

    with pytest.raises(CommunicatorError, match="rank 0 never received what rank 1 sent in allreduce"):
        run_ranks(2, rank)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_timeouts_are_validated(timeout):
    with pytest.raises(ValueError, match="timeout must be a finite number of seconds > 0"):
        run_ranks(1, lambda communicator: None, timeout=timeout)
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


def test_a_failure_reaches_groups_that_were_split_off():
    def rank(communicator):
        part = communicator.split(communicator.rank // 2)
        if communicator.rank == 3:
            part.abort("NaN on rank 3")
        part.barrier()
        communicator.barrier()

    with pytest.raises(CommunicatorError, match="NaN on rank 3"):
        run_ranks(4, rank, timeout=60)


def test_consequences_do_not_replace_the_first_failure():
    def rank(communicator):
        if communicator.rank == 0:
            raise CommunicatorError("other data")
        communicator.barrier()

    with pytest.raises(CommunicatorError, match=r"^other data$"):
        run_ranks(3, rank, timeout=60)


def test_a_failing_rank_sends_its_cause_to_the_others():
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


def test_a_rank_that_ends_stops_ranks_that_wait_for_it():
    def rank(communicator):
        communicator.barrier()
        if communicator.rank == 0:
            communicator.allreduce(np.zeros(2))

    with pytest.raises(CommunicatorError, match="rank 1 has ended while rank 0 waits for it in allreduce"):
        run_ranks(2, rank, timeout=60)


def test_a_rank_that_ends_after_the_last_call_is_no_failure():
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
        assert ranks.communicators[0].cause
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


def test_ranks_take_quick_turns_while_they_work() -> None:
    """All of them, and again as before once the last is done, however it ends."""
    gc.collect()  # what other tests left ends now
    wait_until(lambda: not threads._running)

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
            assert run_ranks(1, turns)[0] == pytest.approx([threads.SWITCH_INTERVAL] * 2)
            assert sys.getswitchinterval() == own
            with pytest.raises(ArithmeticError):
                run_ranks(1, lambda communicator: (_ for _ in ()).throw(ArithmeticError))
            assert sys.getswitchinterval() == own
        sys.setswitchinterval(threads.SWITCH_INTERVAL / 4)  # shorter already
        assert run_ranks(1, turns)[0] == pytest.approx([threads.SWITCH_INTERVAL / 4] * 2)
        assert sys.getswitchinterval() == pytest.approx(threads.SWITCH_INTERVAL / 4)
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


def test_errors_raised_by_ranks_at_the_end():
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
    assert ranks.communicators[0].cause


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
