"""Copies between GPUs of one process, made by one thread for all ranks; without NCCL and its kernels.

Streams: a copy runs on a separate stream of the GPU that sends (`CudaDevice.send`), after an event behind the launches
of the sender, so that the arrays are complete, and one behind the launches of the receiver, so that kernels that used
the memory before it was allocated are complete. The receiver's current stream waits for the event behind the copy
before it reads; the sender's waits for it before the sent arrays are released, which is at its next call or the end of
`complete`. No kernel waits on a GPU for another one, so nothing can deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ...device.cuda import Device
from .communicator import Array


class PeerCopies:
    """Copies between the GPUs of ranks; `devices` by rank."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = list(devices)
        # by rank: arrays that it has offered and that are not being copied yet, and the mark behind them
        self._offered: dict[int, deque[tuple[Sequence[Array], Any]]] = {rank: deque() for rank in range(len(devices))}
        # by rank: arrays of both ends of its unfinished copies, and the mark behind these
        self._sent: dict[int, list[tuple[Any, Any]]] = {rank: [] for rank in range(len(self.devices))}
        # aside: the arrays that the last rank has updated, and the mark behind that; all copies of them: the rank that
        # sent, arrays of both ends, and the mark behind the copy
        self._handed: tuple[Sequence[Array], Any] | None = None
        self._read: list[tuple[int, Any, Any]] = []

    def start_sendrecv(
        self, rank: int, arrays: Sequence[Array], dest: int, source: int, likes: Sequence[Array]
    ) -> Callable[[], list[Array]]:
        """See `Communicator.start_sendrecv`, for `rank`; call the returned function after this one of all ranks."""
        self._release(rank)
        self._offered[rank].append((arrays, self.devices[rank].record()))
        forms = [(like.shape, like.dtype) for like in likes]
        return lambda: self._receive(source, rank, *self._offered[source].popleft(), forms)

    def copies(self, arrays: Sequence[Array], source: int, dest: int) -> list[Array]:
        """Copies of arrays of a rank on the GPU of another one, after all launches so far."""
        forms = [(array.shape, array.dtype) for array in arrays]
        return self._receive(source, dest, arrays, self.devices[source].record(), forms)

    def _receive(
        self, source: int, dest: int, arrays: Sequence[Array], complete: Any, forms: Sequence[tuple[Any, Any]]
    ) -> list[Array]:
        sender, receiver = self.devices[source], self.devices[dest]
        received = [receiver.empty(*form) for form in forms]
        after = (complete, receiver.record())
        arrived = [sender.send(*pair, after) for pair in zip(received, arrays, strict=True)][-1]
        self._sent[source].append(((arrays, received), arrived))
        receiver.wait(arrived)
        return received

    # ------------------------------------------------------------------------------------------------ aside

    def fork(self, rank: int) -> None:
        """Let later work aside come after all launches so far."""
        device = self.devices[rank]
        begun = device.record()
        with device.aside():
            device.wait(begun)

    def start_handing_on(self, rank: int, root: int, arrays: Sequence[Array]) -> Callable[[], None]:
        """Start to copy, aside, the arrays of `root` to those of `rank`; call the function after this one of `root`."""
        device = self.devices[rank]
        if rank == root:
            self._handed = (arrays, self._aside_of(device))
            return lambda: None

        def receive() -> None:
            assert self._handed is not None
            given, complete = self._handed
            with device.aside():
                device.wait(complete)
                for target, source in zip(arrays, given, strict=True):
                    device.receive(target, source)
                self._read.append((root, (given, arrays), device.record()))

        return receive

    def join(self, rank: int) -> None:
        """Let later launches come after all work aside so far."""
        self.devices[rank].wait(self._aside_of(self.devices[rank]))

    # ------------------------------------------------------------------------------------------------ ends

    def _release(self, rank: int) -> None:
        """Release the arrays that a rank has sent; later launches may reuse the memory, so they wait for the copies."""
        for _, arrived in self._sent[rank]:
            self.devices[rank].wait(arrived)
        self._sent[rank].clear()

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Context of calls, at whose end all sent and received arrays may be released."""
        try:
            yield
        except BaseException:
            self._wait_for_all()
            raise
        for rank in self._sent:
            self._release(rank)
        for rank, _, complete in self._read:
            self.devices[rank].wait(complete)
        self._forget()

    def _forget(self) -> None:
        """Release arrays that were handed on."""
        self._handed = None
        self._read.clear()

    @staticmethod
    def _aside_of(device: Device) -> Any:
        """A mark behind all work aside."""
        with device.aside():
            return device.record()

    def _wait_for_all(self) -> None:
        """Let all GPUs wait for all copies, some of which may not be in `_sent` yet, and for work aside.

        GPUs that are lost are passed.
        """
        for sender in self.devices:
            for last in (sender.sent, partial(self._aside_of, sender)):
                with suppress(Exception):
                    arrived = last()
                    for device in self.devices:
                        with suppress(Exception):
                            device.wait(arrived)
        self._forget()
        for rank, sent in self._sent.items():
            sent.clear()
            self._offered[rank].clear()
