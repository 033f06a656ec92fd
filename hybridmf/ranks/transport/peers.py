"""Copies between GPUs of one process, made by one thread for all ranks; without NCCL and its kernels.

Streams: a copy runs on a separate stream of the GPU that receives (`CudaDevice.fetch`), after an event behind the
launches of the sender before its offer, so that the arrays are complete, and one behind those of the receiver before
its own, which may use the memory. It waits for no later launch of either: the sender may go on with its next work. The
receiver's current stream waits for the event behind the copy. The sender's does not: the caller makes sure that a rank
writes to arrays that it has sent, or releases them, only after all copies of them. No kernel waits on a GPU for another
one, so nothing can deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ...device.cuda import Device
from .communicator import Array


class PeerCopies:
    """Copies between the GPUs of ranks; `devices` by rank."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = list(devices)
        # by rank: arrays that it has offered and that are not being copied yet, and the mark behind them
        self._offered: dict[int, deque[tuple[Sequence[Array], Any]]] = {rank: deque() for rank in range(len(devices))}
        # aside, by rank: all arrays that it has offered, and the mark behind each
        self._handed: dict[int, list[tuple[Sequence[Array], Any]]] = {rank: [] for rank in range(len(devices))}
        self._reached: set[tuple[int, int]] = set()

    def start_sendrecv(
        self, rank: int, arrays: Sequence[Array], source: int, targets: Sequence[Array]
    ) -> Callable[[], Sequence[Array]]:
        """Offer arrays of a rank, and copy those that `source` offers to `targets`, which the function returns.

        Call the returned function after this one of all ranks.
        """
        before = self.devices[rank].record()
        self._offered[rank].append((arrays, before))

        def receive() -> Sequence[Array]:
            given, complete = self._offered[source].popleft()
            return self._fetched(targets, given, source, rank, (before, complete))

        return receive

    def copies(self, arrays: Sequence[Array], source: int, dest: int) -> Sequence[Array]:
        """Copies of arrays of a rank on the GPU of another one, after all launches so far."""
        targets = [self.devices[dest].empty(array.shape, array.dtype) for array in arrays]
        after = self.devices[source].record(), self.devices[dest].record()
        return self._fetched(targets, arrays, source, dest, after)

    def _fetched(
        self, targets: Sequence[Array], given: Sequence[Array], source: int, dest: int, after: Sequence[Any]
    ) -> Sequence[Array]:
        self._reach(dest, source)
        for target, array in zip(targets, given, strict=True):
            arrived = self.devices[dest].fetch(target, array, after)
            after = ()
        self.devices[dest].wait(arrived)
        return targets

    def _reach(self, dest: int, source: int) -> None:
        if (dest, source) not in self._reached:
            self.devices[dest].reach(self.devices[source])
            self._reached.add((dest, source))

    # ------------------------------------------------------------------------------------------------ aside

    def fork(self, rank: int) -> None:
        """Let later work aside come after all launches so far."""
        device = self.devices[rank]
        begun = device.record()
        with device.aside():
            device.wait(begun)

    def hand(self, rank: int, arrays: Sequence[Array]) -> None:
        """Offer arrays that all work aside so far has updated."""
        self._handed[rank].append((arrays, self._aside_of(self.devices[rank])))

    def take(self, rank: int, source: int, number: int, targets: Sequence[Array]) -> None:
        """Copy, aside, what a rank has offered as 0, 1, ... to arrays of `rank`."""
        given, complete = self._handed[source][number]
        device = self.devices[rank]
        self._reach(rank, source)
        with device.aside():
            device.wait(complete)
            for target, array in zip(targets, given, strict=True):
                device.receive(target, array)

    def join(self, rank: int) -> None:
        """Let later launches come after all work aside so far."""
        self.devices[rank].wait(self._aside_of(self.devices[rank]))

    # ------------------------------------------------------------------------------------------------ ends

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Context of calls; after a failure of these, later launches come after all work of all GPUs so far."""
        try:
            yield
        except BaseException:
            self._wait_for_all()
            raise
        finally:
            for offered in (*self._offered.values(), *self._handed.values()):
                offered.clear()

    @staticmethod
    def _aside_of(device: Device) -> Any:
        """A mark behind all work aside."""
        with device.aside():
            return device.record()

    def _wait_for_all(self) -> None:
        """Let all GPUs wait for all work of all; GPUs that are lost are passed."""
        for device in self.devices:
            with suppress(Exception):
                device.join()
        for other in self.devices:
            for last in (other.record, other.fetched, lambda other=other: self._aside_of(other)):
                with suppress(Exception):
                    complete = last()
                    for device in self.devices:
                        with suppress(Exception):
                            device.wait(complete)
