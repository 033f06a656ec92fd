"""Launches, copies and marks that a thread makes once and then repeats, without the Python code that chose them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

Device: TypeAlias = Any  # a `hybridmf.device.cuda.CudaDevice`

_thread = threading.local()


class Recording:
    """Calls of CUDA for several GPUs, in their order, to be repeated with the same streams, events and addresses.

    Between two repeats only the fields of `Struct`s may change. Memory is not part of a recording: no array is
    allocated while it is made, and all arrays that it uses stay where they are; the caller keeps them.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        # calls by GPU: a part for each change of the GPU; None: a pause
        self._parts: list[tuple[Device, list[tuple[Callable[..., Any], tuple[Any, ...]]]] | None] = []
        self._kept: list[Any] = []
        self._streams = [(device, device.current_stream()) for device in devices]

    @contextmanager
    def made(self) -> Iterator[None]:
        """Context in which the calls of this thread are recorded, besides being made."""
        assert current_recording() is None
        _thread.recording = self
        try:
            yield
        finally:
            _thread.recording = None

    def add(self, device: Device, function: Callable[..., Any], arguments: tuple[Any, ...], kept: Any = None) -> None:
        """Append a call; `kept` is what its arguments refer to by address."""
        last = self._parts[-1] if self._parts else None
        if last is None or last[0] is not device:
            self._parts.append(last := (device, []))
        last[1].append((function, arguments))
        self._kept.append(kept)

    def is_current(self) -> bool:
        return all(device.current_stream() == stream for device, stream in self._streams)

    def pause(self) -> None:
        """Let `repeat` yield here."""
        self._parts.append(None)

    def repeat(self) -> Iterator[None]:
        """Make all calls again; yields where the recording has paused."""
        for part in self._parts:
            if part is None:
                yield
                continue
            device, calls = part
            with device.active():
                for function, arguments in calls:
                    function(*arguments)


def current_recording() -> Recording | None:
    """The recording that this thread makes, if any."""
    return getattr(_thread, "recording", None)
