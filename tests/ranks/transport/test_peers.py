"""Copies between GPUs of one process: what waits for what."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hybridmf.ranks.transport.peers import PeerCopies


class Gpu:
    """Notes its calls; a mark names its place among those of the GPU."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls, self.broken = name, calls, False

    def empty(self, shape: Any, dtype: Any) -> Any:
        return np.full(shape, np.nan, dtype)

    def _note(self, what: str, *more: Any) -> str:
        if self.broken:
            raise RuntimeError(f"{self.name} is lost")
        self.calls.append((self.name, what, *more))
        return f"{self.name}{len(self.calls) - 1}"

    def record(self) -> str:
        return self._note("record")

    def wait(self, mark: str) -> None:
        self._note("wait", mark)

    def join(self) -> None:
        self._note("join")

    def reach(self, other: Gpu) -> None:
        self._note("reach", other.name)

    def fetch(self, target: Any, source: Any, after: Any) -> str:
        mark = self._note("fetch", *after)
        target[...] = source
        return mark

    def fetched(self) -> str:
        return self._note("fetched")

    def receive(self, target: Any, source: Any) -> None:
        assert self.name.isupper(), "on the null stream, the copy would wait for later passes of the sender"
        self._note("receive")
        target[...] = source

    @contextmanager
    def aside(self) -> Any:
        """Notes calls on a second stream under another name."""
        self.name = self.name.upper()
        try:
            yield
        finally:
            self.name = self.name.lower()


def rows(value: float) -> Any:
    return np.full((2, 3), value, np.float32)


@pytest.fixture
def peers():
    calls: list[Any] = []
    return PeerCopies([Gpu(name, calls) for name in "ab"]), calls  # type: ignore[list-item]


def start(copies: PeerCopies, rank: int, array: Any, target: Any = None) -> Any:
    return copies.start_sendrecv(rank, [array], 1 - rank, [rows(np.nan) if target is None else target])


def test_a_copy_waits_for_both_gpus(peers):
    """And for the receiver: for launches before their offers, not for later ones. The receiver waits for the copy."""
    copies, calls = peers
    with copies.complete():
        targets = [rows(np.nan), rows(np.nan)]
        answers = [start(copies, rank, rows(rank), target) for rank, target in enumerate(targets)]
        assert calls == [("a", "record"), ("b", "record")]
        (received,) = answers[0]()
        assert calls[2:] == [("a", "reach", "b"), ("a", "fetch", "a0", "b1"), ("a", "wait", "a3")]
        assert received is targets[0]
        np.testing.assert_array_equal(received, 1)
        (other,) = answers[1]()
        np.testing.assert_array_equal(other, 0)
    assert calls[-3:] == [("b", "reach", "a"), ("b", "fetch", "b1", "a0"), ("b", "wait", "b6")]
    calls.clear()
    with copies.complete():
        answers = [start(copies, rank, rows(rank)) for rank in range(2)]
        answers[0]()
    assert calls[2:] == [("a", "fetch", "a0", "b1"), ("a", "wait", "a2")]


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


def test_after_a_failure_all_gpus_wait_for_all_work(peers):
    """On all streams: the host does not know how far a GPU has come."""
    copies, calls = peers

    def interrupted() -> None:
        with copies.complete():
            start(copies, 0, rows(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert calls[1:3] == [("a", "join"), ("b", "join")]
    marks = {f"{call[0]}{place}" for place, call in enumerate(calls[3:], 3) if call[1] in ("record", "fetched")}
    assert {mark[0] for mark in marks} == set("aAbB") and len(marks) == 6
    assert {call for call in calls if call[1] == "wait"} == {(name, "wait", mark) for name in "ab" for mark in marks}
    with copies.complete():  # nothing is left of the failed calls
        answers = [start(copies, rank, rows(rank)) for rank in range(2)]
        np.testing.assert_array_equal(answers[1]()[0], 0)
        answers[0]()


def test_a_lost_gpu_does_not_hide_the_first_failure(peers):
    """The GPU that works waits for its work."""
    copies, calls = peers
    copies.devices[1].broken = True

    def failing() -> None:
        with copies.complete():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert calls[::2] == [("a", "join"), ("a", "wait", "a1"), ("a", "wait", "a3"), ("a", "wait", "A5")]
    assert calls[1::2] == [("a", "record"), ("a", "fetched"), ("A", "record")]


def test_copies_of_a_table(peers):
    copies, calls = peers
    with copies.complete():
        (copy,) = copies.copies([rows(4)], 1, 0)
    np.testing.assert_array_equal(copy, 4)
    assert calls == [
        ("b", "record"),
        ("a", "record"),
        ("a", "reach", "b"),
        ("a", "fetch", "b0", "a1"),
        ("a", "wait", "a3"),
    ]


# --------------------------------------------------------------------------------------------- aside


@pytest.fixture
def three():
    calls: list[Any] = []
    return PeerCopies([Gpu(name, calls) for name in "abc"]), calls  # type: ignore[list-item]


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
        for value in (5, 6):  # in two legs, of which the first is taken later than the second is offered
            copies.hand(0, [rows(value)])
        copies.take(1, 0, 0, [owned[1]])
        copies.take(2, 0, 1, [owned[2]])
        assert owned[1].max() == owned[1].min() == 5 and owned[2].max() == owned[2].min() == 6
        assert calls[:2] == [("A", "record"), ("A", "record")]
        assert calls[2:5] == [("b", "reach", "a"), ("B", "wait", "A0"), ("B", "receive")]
        assert calls[5:] == [("c", "reach", "a"), ("C", "wait", "A1"), ("C", "receive")]
        copies.join(1)
        assert calls[8:] == [("B", "record"), ("b", "wait", "B8")]
    with copies.complete():  # nothing is left of earlier calls
        copies.hand(0, [rows(7)])
        copies.take(1, 0, 0, [owned[1]])
    assert owned[1].max() == 7
