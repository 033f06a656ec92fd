"""Emulated GPUs whose streams run in random order, as far as the marks between them allow.

A launch or a copy is queued, and runs when the host waits for it or for something behind it, or when all work is: as
late or as early as streams allow. So without a wait that it needs, it gives wrong numbers for some seeds.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from support.emulated import EmulatedDevice

Stream: TypeAlias = tuple[int, str]
"""Number of a GPU, and name of the stream."""


class Mark:
    """A stream, and the work launched on it when the mark was last recorded."""

    def __init__(self, stream: Stream, streams: Streams) -> None:
        self.stream, self.streams = stream, streams
        self.record()

    def record(self) -> None:
        self.place = self.stream, self.streams.launched[self.stream]


class Streams:
    """The work of all GPUs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        """Ranks are made on a thread each."""
        self.waiting: dict[Stream, deque[tuple[tuple[Stream, int] | None, Callable[[], Any]]]] = {}
        self.launched: Counter[Stream] = Counter()
        self.complete: Counter[Stream] = Counter()
        self.kernels: dict[tuple[Stream, int], str] = {}
        """Names of launched kernels, by stream and place."""
        self.kept: list[Any] = []
        """Arrays that queued work uses by address."""

    def put(self, stream: Stream, run: Callable[[], Any], after: Mark | None = None) -> None:
        """Launch work that starts after a mark."""
        with self.lock:
            self.waiting.setdefault(stream, deque()).append((None if after is None else after.place, run))
            self.launched[stream] += 1

    def behind(self, stream: Stream, place: int) -> set[tuple[Stream, int]]:
        """All queued work that must be complete before that at a place of a stream, and this itself."""
        found: set[tuple[Stream, int]] = set()
        wanted = [(stream, place)]
        while wanted:
            stream, place = one = wanted.pop()
            if one in found or place < self.complete[stream]:
                continue
            found.add(one)
            wanted.append((stream, place - 1))
            if after := self.waiting[stream][place - self.complete[stream]][0]:
                wanted.append((after[0], after[1] - 1))
        return found

    def drain(self) -> None:
        """Run all work: at any time the next piece of a random stream that has one to run, often of the same stream."""
        with self.lock:
            self._drain()

    def wait_for(self, stream: Stream) -> None:
        """What the host does: run only the work of a stream so far and what that waits for; other work stays queued."""
        with self.lock:
            wanted = self.behind(stream, self.launched[stream] - 1)
            self._run({one: 1 + max(place for own, place in wanted if own == one) for one, _ in wanted})

    def _drain(self) -> None:
        self._run(dict(self.launched))
        assert not any(self.waiting.values())

    def _run(self, ends: dict[Stream, int]) -> None:
        """Run the pieces of each stream up to an end."""
        last = None
        while ready := [stream for stream in ends if self._can_run(stream, ends[stream])]:
            last = last if last in ready and self.random.random() < 0.8 else self.random.choice(ready)
            self.waiting[last].popleft()[1]()
            self.complete[last] += 1
        assert all(self.complete[stream] >= end for stream, end in ends.items()), "streams wait for each other"

    def _can_run(self, stream: Stream, end: int) -> bool:
        if self.complete[stream] >= end:
            return False
        after = self.waiting[stream][0][0]
        return after is None or self.complete[after[0]] >= after[1]


class LateGpu(EmulatedDevice):
    """A GPU of `streams`."""

    def __init__(self, number: int, streams: Streams) -> None:
        super().__init__()
        self.number, self.streams, self.stream = number, streams, "main"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Context in which another stream is the current one."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @property
    def current(self) -> Stream:
        return self.number, self.stream

    def aside(self) -> Any:
        return self.on("aside")

    def record(self) -> Mark:
        mark = Mark(self.current, self.streams)
        self.note(mark.record)
        return mark

    def wait(self, mark: Mark) -> None:
        self._put(lambda: None, mark)

    def fork(self) -> None:
        mark = self.record()
        with self.on("beside"):
            self.wait(mark)

    def join(self) -> None:
        with self.on("beside"):
            mark = self.record()
        self.wait(mark)

    def fetch(self, target: np.ndarray, source: np.ndarray, after: Sequence[Mark]) -> Mark:
        with self.on("fetch"):
            for mark in after:
                self.wait(mark)
            self.receive(target, source)
            return self.record()

    def fetched(self) -> Mark:
        with self.on("fetch"):
            return self.record()

    def receive(self, target: np.ndarray, source: np.ndarray) -> None:
        self._put(lambda: np.copyto(target, source))

    def _put(self, run: Callable[[], Any], after: Mark | None = None) -> None:
        """Launch work on the current stream."""
        self.streams.put(self.current, run, after)
        self.note(self._put, run, after)

    def note(self, function: Callable[..., Any], *arguments: Any) -> None:
        stream = self.stream

        def again() -> None:
            with self.on(stream):
                function(*arguments)

        super().note(again)

    def address(self, array: np.ndarray) -> int:
        self.streams.kept.append(array)
        return super().address(array)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        array = super().empty(shape, dtype)
        self.streams.kept.append(array)
        return array

    def kernel(self, *program: Any) -> Any:
        now, (_, name, _) = super().kernel(*program), program

        def launch(*given: Any) -> None:
            self.streams.kernels[self.current, self.streams.launched[self.current]] = name
            self.streams.put(self.current, lambda: now(*given))

        return launch

    def prepare(self, *program: Any) -> Any:
        now = super().prepare(*program)

        def launch(beside: bool = False) -> None:
            with self.on("beside" if beside else self.stream):
                now()

        return launch

    def upload(self, array: np.ndarray, target: np.ndarray | None = None) -> np.ndarray:
        self.streams.wait_for(self.current)
        return super().upload(array, target)

    def download(self, *given: Any, **options: Any) -> np.ndarray:
        self.streams.wait_for(self.current)
        return super().download(*given, **options)

    def begin_download(self, array: np.ndarray) -> Any:
        self.streams.wait_for(self.current)
        return super().begin_download(array)
