"""Copies between GPUs of one process: what waits for what, and what is kept until when."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hybridmf.ranks.transport.peers import PeerCopies


class Rows(np.ndarray):
    """An array that weak references can follow."""


class Gpu:
    """Notes its calls; a mark names its place among those of the GPU."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls, self.broken = name, calls, False

    def empty(self, shape: Any, dtype: Any) -> Any:
        return np.full(shape, np.nan, dtype).view(Rows)

    def _note(self, what: str, *more: Any) -> str:
        if self.broken:
            raise RuntimeError(f"{self.name} is lost")
        self.calls.append((self.name, what, *more))
        return f"{self.name}{len(self.calls) - 1}"

    def record(self) -> str:
        return self._note("record")

    def wait(self, mark: str) -> None:
        self._note("wait", mark)

    def send(self, target: Any, source: Any, after: Any) -> str:
        mark = self._note("send", *after)
        target[...] = source
        return mark

    def sent(self) -> str:
        return self._note("sent")


def rows(value: float) -> Any:
    return np.full((2, 3), value, np.float32).view(Rows)


@pytest.fixture
def peers():
    calls: list[Any] = []
    return PeerCopies([Gpu(name, calls) for name in "ab"]), calls  # type: ignore[list-item]


def start(copies: PeerCopies, rank: int, array: Any) -> Any:
    return copies.start_sendrecv(rank, [array], 1 - rank, 1 - rank, [np.empty((2, 3), np.float32)])


def test_a_copy_waits_for_both_gpus_and_both_wait_for_it(peers):
    """The sender's launches made the array, the receiver's may still read the memory that it gives."""
    copies, calls = peers
    with copies.complete():
        answers = [start(copies, rank, rows(rank)) for rank in range(2)]
        assert calls == [("a", "record"), ("b", "record")]
        (received,) = answers[0]()
        assert calls[2:] == [("a", "record"), ("b", "send", "b1", "a2"), ("a", "wait", "b3")]
        np.testing.assert_array_equal(received, 1)
        (other,) = answers[1]()
        np.testing.assert_array_equal(other, 0)
    assert calls[-2:] == [("a", "wait", "a6"), ("b", "wait", "b3")]  # before what they have sent is released


def test_a_rank_may_offer_again_before_the_others_have_received(peers):
    """Offers are received in their order."""
    copies, _ = peers
    with copies.complete():
        answers = [start(copies, rank, rows(rank)) for rank in range(2)]
        answers[0]()
        again = start(copies, 0, rows(2))
        np.testing.assert_array_equal(answers[1]()[0], 0)
        last = start(copies, 1, rows(3))
        np.testing.assert_array_equal(again()[0], 3)
        np.testing.assert_array_equal(last()[0], 2)


def test_sent_arrays_are_kept_until_the_sender_waits_for_their_copies(peers):
    copies, calls = peers
    with copies.complete():
        array = rows(1)
        kept = weakref.ref(array)
        answers = [start(copies, 0, array), start(copies, 1, rows(2))]
        del array
        for answer in answers:
            answer()
        gc.collect()
        assert kept() is not None
        start(copies, 0, rows(3))
        gc.collect()
        assert kept() is None
        assert ("a", "wait") in [call[:2] for call in calls[-2:]]


def test_after_a_failure_all_gpus_wait_for_all_copies(peers):
    """Also for those whose mark the interrupted call has not returned."""
    copies, calls = peers

    def interrupted() -> None:
        with copies.complete():
            start(copies, 0, rows(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    marks = {f"{name}{place}" for place, (name, what, *_) in enumerate(calls) if what == "sent"}
    assert len(marks) == 2
    assert {call for call in calls if call[1] == "wait"} == {(name, "wait", mark) for name in "ab" for mark in marks}
    with copies.complete():  # nothing is left of the failed calls
        answers = [start(copies, rank, rows(rank)) for rank in range(2)]
        np.testing.assert_array_equal(answers[1]()[0], 0)
        answers[0]()


def test_a_lost_gpu_does_not_hide_the_first_failure(peers):
    """The GPU that works waits for its copies."""
    copies, calls = peers
    copies.devices[1].broken = True

    def failing() -> None:
        with copies.complete():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert calls == [("a", "sent"), ("a", "wait", "a0")]


def test_copies_of_a_table(peers):
    copies, calls = peers
    with copies.complete():
        (copy,) = copies.copies([rows(4)], 1, 0)
    np.testing.assert_array_equal(copy, 4)
    assert calls[:3] == [("b", "record"), ("a", "record"), ("b", "send", "b0", "a1")]


# --------------------------------------------------------------------------------------------- aside


class TwoStreams(Gpu):
    """Notes calls on a second stream under another name."""

    @contextmanager
    def aside(self) -> Any:
        self.name = self.name.upper()
        try:
            yield
        finally:
            self.name = self.name.lower()

    def receive(self, target: Any, source: Any) -> None:
        self._note("receive")
        target[...] = source


@pytest.fixture
def three():
    calls: list[Any] = []
    return PeerCopies([TwoStreams(name, calls) for name in "abc"]), calls  # type: ignore[list-item]


def test_arrays_are_handed_on_aside(three):
    """The next GPU copies them after a mark behind their update; its current stream waits for nothing before `join`."""
    copies, calls = three
    owned = [rows(rank) for rank in range(3)]
    with copies.complete():
        for rank in range(3):
            copies.fork(rank)
        for place, name in enumerate("abc"):
            assert calls[2 * place :][:2] == [(name, "record"), (name.upper(), "wait", f"{name}{2 * place}")]
        calls.clear()
        copies.start_handing_on(0, 0, [owned[0]])()
        copies.start_handing_on(1, 0, [owned[1]])()
        np.testing.assert_array_equal(owned[1], 0)
        assert calls == [("A", "record"), ("B", "wait", "A0"), ("B", "receive"), ("B", "record")]
        copies.join(1)
        assert calls[4:] == [("B", "record"), ("b", "wait", "B4")]
    assert calls[6:] == [("a", "wait", "B3")]  # before its array is released


def test_arrays_handed_on_are_kept_to_the_end(three):
    copies, _ = three
    with copies.complete():
        array = rows(1)
        kept = weakref.ref(array)
        copies.start_handing_on(0, 0, [array])
        copies.start_handing_on(1, 0, [rows(2)])()
        del array
        for rank in range(2):
            start(copies, rank, rows(rank))
        gc.collect()
        assert kept() is not None
    gc.collect()
    assert kept() is None


def test_after_a_failure_all_gpus_wait_for_work_aside(three):
    copies, calls = three

    def interrupted() -> None:
        with copies.complete():
            copies.start_handing_on(0, 0, [rows(1)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    marks = [f"{name}{place}" for place, (name, what) in enumerate(call[:2] for call in calls) if name == "A"]
    assert {call for call in calls if call[1:] == ("wait", marks[-1])} == {(name, "wait", marks[-1]) for name in "abc"}
    assert not copies._read and copies._handed is None
