"""Waits of the host for a GPU, and GPUs that have failed for good.

The host waits for a GPU in one place, `Health.wait`. It asks an event whether it is complete and sleeps between two
questions. CUDA's own waits would ignore Ctrl-C for as long as a kernel runs.

Cost. A wait that ends within SPIN (20 ms) is noticed at the next question, about 2 us later, like in CUDA's own wait,
which also spins. After that the host sleeps for a hundredth of the time waited so far, at most 1 ms, plus the 0.05 ms
by which Linux extends short sleeps. On average it notices the end half a sleep late: 0.13 ms after 20 ms (0.6 %), 0.5
ms from 100 ms on. A half sweep of ALS waits once and an epoch of SGD twice, for events that they
recorded before, too; an iteration of CCD++ waits once for each side.

After Ctrl-C the GPU has a limited time (`hurry`): an interrupted fit still copies factors and stops threads, and a
kernel that never ends must not block it. A GPU that does not complete any work in this time is lost, as it is after an
error from which CUDA has no way back (STICKY). Every later call for it is refused (`Health.check`). While a thread
loads a program, for which CUDA waits for all kernels, other calls wait as well, and Ctrl-C with them.

CuPy's objects release modules, events and memory when they are deleted. For a lost GPU each of these calls fails, and
Python prints an "Exception ignored" for each; with a kernel that never ends they may block. So these objects are kept
until the process ends (`keep_alive`). Events, which are many, are not deleted before either (`Mark`): a kernel may have
failed already, and the host not know it yet.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import math
import time
from typing import Any

from ..errors import DeviceError, DeviceLostError, DeviceMemoryError

SPIN = 20e-3  # seconds for which a wait asks without a pause, but without the interpreter's lock between two questions
LONGEST_PAUSE = 1e-3  # maximum seconds between two questions

PATIENCE = 5.0
"""Seconds in which a GPU must complete some work after an interruption; twice the longest wait so far, if longer."""

NOT_READY = 600  # cudaErrorNotReady: the work before the event is not complete

STICKY = frozenset(
    {
        "assert",
        "contained",
        "contextisdestroyed",
        "cudartunloading",
        "deinitialized",
        "eccuncorrectable",
        "externaldevice",
        "hardwarestackerror",
        "illegaladdress",
        "illegalinstruction",
        "invalidaddressspace",
        "invalidpc",
        "launchfailed",
        "launchfailure",
        "launchtimeout",
        "misalignedaddress",
        "mpsclientterminated",
        "nvlinkuncorrectable",
        "tensormemoryleak",
    }
)
"""Errors after which every call of CUDA fails until the process is restarted, as `_name_of` writes those of the runtime
(cudaErrorLaunchFailure) and of the driver (CUDA_ERROR_LAUNCH_FAILED)."""

FREELY_DELETED = ("ndarray", "MemoryPointer")
"""Classes of CuPy whose deletion only returns memory to a pool: kept, they would occupy other GPUs."""


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _name_of(error: BaseException) -> str:
    """Name of an error of CUDA, from the start of CuPy's message: "illegaladdress"."""
    name = str(error).partition(":")[0].strip()
    for prefix in ("cudaError", "CUDA_ERROR_"):
        name = name.removeprefix(prefix)
    return name.replace("_", "").lower()


_events: list[Any] = []
"""All events of marks. The garbage collector finalizes all objects of a cycle that nothing else refers to: it would
destroy the event of a mark in such a cycle, which the mark then hands on."""


class Mark:
    """An event of CuPy that is used again once nothing refers to the mark: deleting it would call CUDA.

    A stream that was told to wait for the event is not affected: it waits for the work before the call.
    """

    __slots__ = ("_spare", "event")

    def __init__(self, event: Any, spare: list[Any]) -> None:
        self.event, self._spare = event, spare

    @property
    def ptr(self) -> int:
        return self.event.ptr

    def record(self, stream: Any) -> None:
        """Move the mark behind the work launched so far on a stream."""
        self.event.record(stream)

    def __del__(self) -> None:
        self._spare.append(self.event)


class Health:
    """Whether a GPU works, and waits for it.

    `loss`: why this process cannot use the GPU any more: `DeviceLostError.facts`.
    """

    def __init__(self, index: int, cupy: Any) -> None:
        self.index, self.name, self.cupy = index, f"cuda:{index}", cupy
        self.loss: dict[str, str] | None = None
        self._spare: list[Any] = []  # events
        self._longest = 0.0
        self._hurried: Mark | None = None  # behind the work at the interruption, until that is complete
        self._deadline = math.inf

    # ------------------------------------------------------------------------------------------------ failures

    def check(self) -> None:
        if self.loss is not None:
            raise DeviceLostError(self.loss)

    def failure(self, error: BaseException) -> DeviceError:
        """The exception of this library for an error of CUDA, after which the GPU may be lost."""
        if "MemoryAllocation" in str(error):
            return DeviceMemoryError(f"{self.name} is out of memory: {error}")
        if not self._is_sticky(error):
            return DeviceError(f"{self.name} failed: {one_line(error)}")
        return self.lose(one_line(error))

    def _is_sticky(self, error: BaseException) -> bool:
        """Whether the error is in STICKY, or a call that cannot fail by itself fails, too."""
        if _name_of(error) in STICKY:
            return True
        try:
            self.cupy.cuda.runtime.memGetInfo()
        except self.cupy.cuda.runtime.CUDARuntimeError as later:
            return _name_of(later) in STICKY | {_name_of(error)}
        return False

    def lose(self, reason: str) -> DeviceLostError:
        """Mark the GPU as lost, for the first reason; returns the error to raise."""
        if self.loss is None:
            self.loss = {"device": self.name, "reason": reason, "work": ""}
            keep_alive(self.cupy)
            atexit.register(keep_alive, self.cupy)  # objects made since then
        return DeviceLostError(self.loss)

    # ------------------------------------------------------------------------------------------------ waits

    def mark(self, stream: Any = None) -> Mark:
        """A mark behind the work launched so far on a stream of this GPU, which is current; default: current stream."""
        cuda = self.cupy.cuda
        try:
            event = self._spare.pop()
        except IndexError:
            with cuda.Device(self.index):
                event = cuda.Event(disable_timing=True)
            _events.append(event)
        mark = Mark(event, self._spare)
        mark.record(cuda.get_current_stream() if stream is None else stream)
        return mark

    def is_done(self, mark: Mark) -> bool:
        """Whether the work before a mark is complete."""
        status = self.cupy.cuda.runtime.eventQuery(mark.ptr)
        if status and status != NOT_READY:
            self._raise_failure_of(mark)
        return not status

    def wait(self, mark: Mark) -> None:
        """Wait until the work before a mark is complete; Ctrl-C interrupts the wait."""
        query, pointer, begun, waited = self.cupy.cuda.runtime.eventQuery, mark.ptr, time.perf_counter(), 0.0
        try:
            while status := query(pointer):
                if status != NOT_READY:
                    self._raise_failure_of(mark)
                waited = time.perf_counter() - begun
                self._check_deadline()
                # a sleep of 0 releases the interpreter's lock, too
                time.sleep(0.0 if waited < SPIN else min(LONGEST_PAUSE, waited / 100))
        except KeyboardInterrupt:
            hurry()
            raise
        self._longest = max(self._longest, waited)
        if self._hurried is not None:  # there is progress
            self._deadline = time.monotonic() + self.patience

    def _raise_failure_of(self, mark: Mark) -> None:
        self.check()
        try:
            mark.event.synchronize()  # raises it at once
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise self.failure(error) from error

    # ------------------------------------------------------------------------------------------------ interruptions

    @property
    def patience(self) -> float:
        return max(PATIENCE, 2 * self._longest)

    def hurry(self) -> None:
        """Limit later waits until the current work of the GPU is complete."""
        if self.loss is not None or self._hurried is not None:
            return
        try:
            mark = self._mark_all()
            if self.is_done(mark):
                return
        except Exception:  # the next use of the GPU raises it
            return
        self._hurried, self._deadline = mark, time.monotonic() + self.patience
        atexit.register(self._leave)

    def _mark_all(self) -> Mark:
        """A mark behind the work launched so far, where the GPU may not be the current one."""
        with self.cupy.cuda.Device(self.index):
            return self.mark()

    def forgive(self) -> None:
        """Let waits take any time again: a new call has begun."""
        self._hurried, self._deadline = None, math.inf

    def _check_deadline(self) -> None:
        """Raise an error if the GPU is lost, or does not complete any work after an interruption."""
        self.check()
        if time.monotonic() < self._deadline:
            return
        if self._hurried is None or self.is_done(self._hurried):
            self.forgive()
            return
        raise self.lose(f"it did not answer for {self.patience:.0f} s after an interruption")

    def _leave(self) -> None:
        """Keep CuPy's objects if a kernel still runs at the exit: releasing them would wait for it."""
        try:
            if self.loss is None and self.is_done(self._mark_all()):
                return
        except Exception:  # lost, or CUDA is shut down
            return
        keep_alive(self.cupy)


_known: dict[int, Health] = {}


def health_of(index: int, cupy: Any) -> Health:
    health = _known.get(index)
    if health is None or health.cupy is not cupy:
        health = _known[index] = Health(index, cupy)
    return health


def check_all(cupy: Any) -> None:
    """Raise an error if a GPU of this process is lost: calls for no particular GPU fail, too."""
    for health in tuple(_known.values()):
        if health.cupy is cupy:
            health.check()


def hurry() -> None:
    """Limit later waits for all GPUs: the caller was interrupted, or stops what it started."""
    for health in tuple(_known.values()):
        health.hurry()


def keep_alive(*objects: Any) -> None:
    """Keep objects until the process ends, without their destructors; of a module like CuPy, all its objects."""
    for each in objects:
        if hasattr(each, "get_default_memory_pool"):
            keep_alive(*_objects_of(each.__name__))
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _objects_of(package: str) -> list[Any]:
    """Objects of the classes of a package but those in FREELY_DELETED."""
    found = []
    for each in gc.get_objects():
        kind = type(each)
        module = getattr(kind, "__module__", "")
        if isinstance(module, str) and module.startswith(package) and kind.__name__ not in FREELY_DELETED:
            found.append(each)
    return found
