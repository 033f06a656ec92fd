"""Ranks that are the processes of an MPI job, started by ``mpirun`` or ``srun``; messages through mpi4py.

A message is a header, a JSON object, and the bytes of its array in pieces. All are sent by nonblocking calls, headers
and pieces under one tag each. MPI keeps the order of messages between two ranks under one tag, so the pieces after a
header are those that it announces. Received data are never executed.

No thread receives in the background. Each call of a rank takes what has arrived into boxes, of which `receive` takes
the oldest. Waits ask and sleep in turn, because MPI's own waits have no timeout and ignore Ctrl-C. One thread at a time
calls MPI.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from typing import Any, TypeAlias

import numpy as np

from ...errors import CommunicatorError
from .communicator import TIMEOUT
from .messages import MessageCommunicator, Transport, check_timeout

HEADER, PIECE = 1, 2  # tags
PIECE_BYTES = 1 << 30  # maximum bytes of one call of MPI, which counts with 32 bits
SPIN = 1e-3  # seconds for which a wait asks without a pause
LONGEST_PAUSE = 1e-3  # maximum seconds between two questions
FAREWELL = 0.5  # seconds that a rank gives its last messages

LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "HYBRIDMF_WORLD_SIZE")
"""Environment variables in which launchers set the number of processes; the last one was hybridmf's own."""


def _mpi() -> Any:
    """The module ``mpi4py.MPI``, which initializes MPI when it is imported."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, no library
        raise ImportError(
            f"ranks that are processes need mpi4py and a library of MPI ({error}): "
            'pip install "hybridmf[mpi]", then start the program with mpirun or srun'
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise CommunicatorError("this library of MPI supports one thread; hybridmf needs MPI_THREAD_SERIALIZED")
    return MPI


def _check_launcher(size: int) -> None:
    """Refuse a job whose processes do not find each other: each would fit alone."""
    for name in LAUNCHERS if size == 1 else ():
        told = os.environ.get(name, "").strip()
        # a shell within an allocation of SLURM has the number of tasks, too, but is none of them
        if told.isdigit() and int(told) > 1 and (name != "SLURM_NTASKS" or "SLURM_STEP_ID" in os.environ):
            raise CommunicatorError(
                f"{name}={told}, but MPI sees one process: start the ranks with the mpirun of the MPI of "
                "mpi4py, or with srun --mpi=pmix"
            )


_Arriving: TypeAlias = tuple[str, np.ndarray, list[Any]]
"""A message whose header has arrived: the call of the source, the array, and requests for its pieces."""


def _pause(waited: float) -> None:
    time.sleep(0.0 if waited < SPIN else min(LONGEST_PAUSE, waited / 100))


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """The bytes of a contiguous array in parts that MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES)]


class MpiTransport(Transport):
    """A `messages.Transport` over a duplicate of an MPI communicator, whose processes create it together."""

    def __init__(self, comm: Any, timeout: float) -> None:
        self.mpi, self.timeout = _mpi(), check_timeout(timeout)
        self.comm = comm.Dup()  # its messages are not those of the caller
        self.lock = threading.RLock()
        self.boxes: dict[tuple[str, int], deque[_Arriving]] = {}
        self.sending: deque[tuple[Any, Any]] = deque()  # requests, and the bytes that they still read
        self.left: set[int] = set()
        self._cause, self._closed = "", False

    def send(self, context: str, source: int, dest: int, what: str, array: np.ndarray) -> None:
        self.check()
        header = {"context": context, "what": what, "dtype": array.dtype.str, "shape": array.shape}
        if dest == source:
            with self.lock:
                self._box(context, source).append((what, array.copy(), []))
            return
        with self.lock:  # no other message gets between
            self._start(dest, header, _pieces(array))

    def _start(self, dest: int, header: dict[str, Any], pieces: list[np.ndarray]) -> None:
        for tag, part in [(HEADER, json.dumps(header).encode()), *((PIECE, piece) for piece in pieces)]:
            self.sending.append((self.comm.Isend([part, self.mpi.BYTE], dest, tag), part))

    def receive(self, context: str, source: int, dest: int, what: str) -> tuple[str, np.ndarray]:
        begun = time.monotonic()
        while True:
            self.check()
            with self.lock:
                box = self._box(context, source)
                if box and self.mpi.Request.Testall(box[0][2]):
                    return box.popleft()[:2]
            waited = time.monotonic() - begun
            if not box and source in self.left:
                self.give_up(source, dest, what, "has closed its communicator")
            elif waited > self.timeout:
                self.give_up(source, dest, what)
            _pause(waited)

    def _box(self, context: str, source: int) -> deque[_Arriving]:
        return self.boxes.setdefault((context, source), deque())

    def check(self) -> None:
        """Take what has arrived, and raise the cause of a failure."""
        if not self._cause and not self._closed:
            with self.lock:
                self._take_all()
        if self._cause:
            raise CommunicatorError(self._cause)

    def _take_all(self) -> None:
        """Receive all headers that have arrived, start to receive their arrays, and release what was sent."""
        while self.sending and self.sending[0][0].Test():
            self.sending.popleft()
        status = self.mpi.Status()
        while message := self.comm.Improbe(tag=HEADER, status=status):
            text = bytearray(status.Get_count(self.mpi.BYTE))
            message.Recv([text, self.mpi.BYTE])
            self._take(status.Get_source(), json.loads(text))

    def _take(self, source: int, header: dict[str, Any]) -> None:
        if "abort" in header:
            self._cause = self._cause or header["abort"]
        elif "bye" in header:
            self.left.add(source)
        else:
            array = np.empty(header["shape"], dtype=header["dtype"])
            requests = [self.comm.Irecv([piece, self.mpi.BYTE], source, PIECE) for piece in _pieces(array)]
            self._box(header["context"], source).append((header["what"], array, requests))

    def fail(self, cause: str) -> None:
        with self.lock:
            if self._cause or self._closed:
                return
            self._cause = cause or "aborted"
            self._tell_all({"abort": self._cause})

    def close(self, rank: int) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
            if not self._cause:
                self._tell_all({"bye": True})

    def _tell_all(self, header: dict[str, Any]) -> None:
        """Send to all others; waits until messages have left, but not long: a rank may be gone."""
        for peer in range(self.comm.size):
            if peer != self.comm.rank:
                self._start(peer, header, [])
        # arrays that were sent before are on their way as long as their receivers work
        begun, limit = time.monotonic(), self.timeout if self._closed else FAREWELL
        while self.sending and (waited := time.monotonic() - begun) < limit:
            self._take_all()
            if self._closed and self._cause:
                return
            _pause(waited)


class MpiCommunicator(MessageCommunicator):
    """A rank that is a process of an MPI job; NumPy arrays, sums in the order of the ranks as between threads.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        Its processes are the ranks, and all create the communicator together. Default: ``COMM_WORLD``.
    timeout : float
        Seconds that ranks wait for each other.

    Raises
    ------
    ImportError
        mpi4py or a library of MPI is not installed.
    CommunicatorError
        A launcher started several processes that MPI does not connect.
    TypeError, ValueError
        The timeout is not a positive number.
    """

    def __init__(self, comm: Any = None, *, timeout: float = TIMEOUT) -> None:
        mpi = _mpi()
        if comm is None:
            comm = mpi.COMM_WORLD
            _check_launcher(comm.size)
        transport = MpiTransport(comm, timeout)
        super().__init__(transport, range(comm.size), comm.rank)
        machine = transport.comm.Split_type(mpi.COMM_TYPE_SHARED)
        self._local_rank: int = machine.rank
        machine.Free()

    @property
    def local_rank(self) -> int:
        """Number among the ranks that share memory."""
        return self._local_rank
