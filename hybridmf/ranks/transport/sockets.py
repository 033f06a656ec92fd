"""Ranks that are processes, on one node or several, connected each with each over TCP.

Only arrays of numbers and short texts travel; nothing that is received is executed. A token that all ranks know lets
nobody else in (both ends prove by HMAC-SHA256 that they know it), but what is sent is not encrypted: a network that
others can listen to is not for this.

Frame: 4 bytes with the length of a JSON object, the object, and the bytes of the array if it announces one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from ...core.validate import check_int
from ...errors import CommunicatorError
from .messages import KINDS, TIMEOUT, MessageCommunicator, check_timeout

logger = logging.getLogger("hybridmf")

RANK, WORLD_SIZE, LOCAL_RANK = "HYBRIDMF_RANK", "HYBRIDMF_WORLD_SIZE", "HYBRIDMF_LOCAL_RANK"
MASTER_ADDR, MASTER_PORT, TOKEN = "HYBRIDMF_MASTER_ADDR", "HYBRIDMF_MASTER_PORT", "HYBRIDMF_TOKEN"

SLURM = {RANK: "SLURM_PROCID", WORLD_SIZE: "SLURM_NTASKS", LOCAL_RANK: "SLURM_LOCALID"}
"""What stands in for a variable that is not set."""

PORT = 29477
"""Where rank 0 listens if HYBRIDMF_MASTER_PORT does not say."""

MAGIC = b"hybridmf"

LONGEST_HEADER = 1 << 20

HANDSHAKE = 10.0
"""Seconds a stranger may take to say who he is."""

FAREWELL = 0.5
"""Seconds that a failing rank tries to tell another why."""


# ---------------------------------------------------------------------------------------------- frames


def _read(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    _read_into(connection, memoryview(buffer))
    return buffer


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def _write_header(connection: socket.socket, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    connection.sendall(struct.pack(">I", len(text)) + text)


def _read_header(connection: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack(">I", _read(connection, 4))
    if length > LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(bytes(_read(connection, length)))
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header


def _announced(header: dict[str, Any]) -> np.ndarray:
    """Room for the array that a header announces."""
    dtype, shape = np.dtype(str(header["dtype"])), tuple(int(size) for size in header["shape"])
    if dtype.kind not in KINDS or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} {shape}")
    return np.empty(shape, dtype=dtype)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


# ---------------------------------------------------------------------------------------------- who is there


def _prove(token: str, role: bytes, nonces: bytes, said: bytes) -> bytes:
    return hmac.new(token.encode(), role + nonces + said, hashlib.sha256).digest()


def _greet(connection: socket.socket, token: str, connects: bool, said: dict[str, Any]) -> dict[str, Any]:
    """Tell who this is and learn who the other is, each with a proof that it knows the token.

    Raises
    ------
    PermissionError
        The other does not know the token.
    OSError, EOFError, ValueError
        It is no rank, or gone.
    """
    mine, own = secrets.token_bytes(32), json.dumps(said).encode()
    connection.sendall(MAGIC + mine)
    hello = bytes(_read(connection, len(MAGIC) + 32))
    if not hello.startswith(MAGIC):
        raise ValueError("another protocol")
    theirs = hello[len(MAGIC) :]
    nonces = mine + theirs if connects else theirs + mine
    roles = (b"connects", b"accepts") if connects else (b"accepts", b"connects")
    connection.sendall(struct.pack(">I", len(own)) + own + _prove(token, roles[0], nonces, own))
    (length,) = struct.unpack(">I", _read(connection, 4))
    if length > LONGEST_HEADER:
        raise ValueError(f"a greeting of {length} bytes")
    other, proof = bytes(_read(connection, length)), bytes(_read(connection, 32))
    if not hmac.compare_digest(proof, _prove(token, roles[1], nonces, other)):
        raise PermissionError(f"the other end does not know the token ({TOKEN})")
    greeting: dict[str, Any] = json.loads(other)
    return greeting


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def _connect(address: tuple[str, int], deadline: float, who: str) -> socket.socket:
    """Try until somebody listens there."""
    pause = 0.02
    while True:
        try:
            return socket.create_connection(address, timeout=max(0.1, min(HANDSHAKE, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise CommunicatorError(
                    f"{who} does not answer at {address[0]}:{address[1]}: {error}; it must be started, and "
                    f"{MASTER_ADDR} and {MASTER_PORT} be the same for all ranks"
                ) from error
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def _accept(listener: socket.socket, token: str, said: dict[str, Any], deadline: float) -> Any:
    """(connection, greeting) of the next one who knows the token; None when the time is up."""
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, address = listener.accept()
        except TimeoutError:
            break
        connection.settimeout(min(HANDSHAKE, left))
        try:
            return connection, _greet(connection, token, False, said)
        except (OSError, EOFError, ValueError, struct.error) as error:
            logger.warning("a connection from %s was refused: %s", address[0], str(error) or type(error).__name__)
            connection.close()
    return None


class _Meeting:
    """How the ranks find each other: all come to rank 0, which tells each where the others listen."""

    def __init__(self, rank: int, size: int, address: tuple[str, int], token: str, timeout: float) -> None:
        self.rank, self.size, self.address, self.token = rank, size, address, token
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self.peers: dict[int, socket.socket] = {}

    def host(self, listener: socket.socket | None) -> dict[int, socket.socket]:
        """Rank 0."""
        with listener or _listen(*self.address) as open_listener:
            where: dict[int, Any] = {}
            while len(self.peers) < self.size - 1:
                came = _accept(open_listener, self.token, {"rank": 0, "size": self.size}, self.deadline)
                if came is None:
                    missing = sorted(set(range(1, self.size)) - set(self.peers))
                    raise CommunicatorError(
                        f"ranks {missing} did not come within {self.timeout:g} s; all {self.size} must be started, "
                        f"with the same {MASTER_ADDR}, {MASTER_PORT} and {TOKEN}; timeout= lets rank 0 wait longer"
                    )
                self._admit(came[0], came[1], where)
            for connection in self.peers.values():
                _write_header(connection, {"where": where})
        return self.peers

    def _admit(self, connection: socket.socket, greeting: dict[str, Any], where: dict[int, Any]) -> None:
        rank: Any = greeting.get("rank")
        problem = ""
        if greeting.get("size") != self.size:
            problem = f"rank {rank} was started as one of {greeting.get('size')} ranks, rank 0 as one of {self.size}"
        elif not isinstance(rank, int) or not 0 < rank < self.size:
            problem = f"there is no rank {rank} among {self.size}"
        elif rank in self.peers:
            problem = f"there are two ranks {rank}"
        if problem:
            _write_header(connection, {"error": problem})
            connection.close()
            raise CommunicatorError(problem)
        self.peers[rank] = connection
        where[rank] = greeting["listens"]

    def join(self) -> dict[int, socket.socket]:
        """Any other rank."""
        first = _connect(self.address, self.deadline, "rank 0")
        # the interface that reaches rank 0 also reaches the others; on one node it is the loopback
        with _listen(first.getsockname()[0], 0) as listener:
            self._call(first, 0, {"listens": listener.getsockname()[:2]})
            first.settimeout(max(0.1, self.deadline - time.monotonic()))
            try:
                answer = _read_header(first)
            except (OSError, EOFError, ValueError) as error:
                raise CommunicatorError("rank 0 ended, or waits for ranks that do not come") from error
            if "error" in answer:
                raise CommunicatorError(answer["error"])
            where = {int(rank): (str(place[0]), int(place[1])) for rank, place in answer["where"].items()}
            for rank in range(1, self.rank):
                connection = _connect(where[rank], self.deadline, f"rank {rank}")
                self._call(connection, rank, {})
            while len(self.peers) < self.size - 1:
                came = _accept(listener, self.token, {"rank": self.rank}, self.deadline)
                if came is None:
                    raise CommunicatorError(f"not all ranks came within {self.timeout:g} s")
                self.peers[int(came[1]["rank"])] = came[0]
        return self.peers

    def _call(self, connection: socket.socket, rank: int, said: dict[str, Any]) -> None:
        greeting = {"rank": self.rank, "size": self.size} | said
        try:
            other = _greet(connection, self.token, True, greeting)
        except (OSError, EOFError, ValueError, struct.error) as error:
            connection.close()
            raise CommunicatorError(
                f"rank {rank} refused rank {self.rank}: it has another token ({TOKEN} must be the same everywhere), or "
                f"something else listens there ({str(error) or type(error).__name__})"
            ) from error
        if other.get("rank") != rank:
            connection.close()
            raise CommunicatorError(f"rank {other.get('rank')} answers where rank {rank} should")
        self.peers[rank] = connection

    def leave(self) -> None:
        """Hang up on those who came: they must not wait for a meeting that has failed."""
        for connection in self.peers.values():
            connection.close()


# ---------------------------------------------------------------------------------------------- transport


class Mesh:
    """Connections to all other ranks, as `messages.Transport`; a thread for each reads what comes.

    Parameters
    ----------
    rank : int
    peers : dict of int to socket
    timeout : float
        Seconds.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout: float) -> None:
        self.rank, self.peers, self.timeout = rank, peers, timeout
        self.changed = threading.Condition()
        self.boxes: dict[tuple[str, int], deque[tuple[str, np.ndarray]]] = {}
        self.left: set[int] = set()
        self.silent: set[int] = set()
        self.locks = {peer: threading.Lock() for peer in peers}
        self._cause, self._closed = "", False
        for peer, connection in peers.items():
            connection.settimeout(timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            threading.Thread(
                target=self._listen_to, args=(peer, connection), name=f"hybridmf reads rank {peer}", daemon=True
            ).start()

    def snapshot(self, array: np.ndarray) -> np.ndarray:
        """The array itself: it has left when `send` returns."""
        return array

    def send(self, context: str, source: int, dest: int, what: str, array: np.ndarray) -> None:
        """Send; the other end reads whatever it is about, so this takes no longer than the network does."""
        self.check()
        if dest == self.rank:
            self._put(context, dest, what, array.copy())
            return
        header = {"context": context, "what": what, "dtype": array.dtype.str, "shape": array.shape}
        try:
            with self.locks[dest]:
                _write_header(self.peers[dest], header)
                self.peers[dest].sendall(_bytes_of(array))
        except OSError as error:
            with self.changed:  # who reads from it knows better why it left
                self.changed.wait_for(lambda: bool(self._cause) or dest in self.silent, FAREWELL)
            gone = "has closed its communicator" if dest in self.left else "cannot be reached"
            self.fail(f"rank {dest} {gone} while rank {self.rank} sends to it in {what} ({error})")
            self.check()

    def receive(self, context: str, source: int, dest: int, what: str) -> tuple[str, np.ndarray]:
        """Take the oldest array of a rank."""
        deadline = time.monotonic() + self.timeout
        with self.changed:
            while True:
                self.check()
                box = self.boxes.get((context, source))
                if box:
                    return box.popleft()
                cause, rest = "", deadline - time.monotonic()
                if source in self.left:
                    cause = f"rank {source} has closed its communicator while rank {dest} waits for it in {what}"
                elif rest <= 0:
                    cause = f"rank {source} did not answer rank {dest} within {self.timeout:g} s in {what}"
                if cause:
                    break
                self.changed.wait(rest)
        self.fail(cause)
        raise CommunicatorError(self._cause)

    def check(self) -> None:
        """Raise what made it fail."""
        if self._cause:
            raise CommunicatorError(self._cause)

    def fail(self, cause: str) -> None:
        """Fail, and tell the others."""
        if not self._take(cause or "aborted"):
            return
        for peer, connection in self.peers.items():
            if not self.locks[peer].acquire(timeout=FAREWELL):
                self._hang_up(connection)  # amid an array: the end of the connection has to do
                continue
            try:
                _, writable, _ = select.select([], [connection], [], FAREWELL)
                if writable:
                    with suppress(OSError):
                        _write_header(connection, {"abort": self._cause})
                else:
                    self._hang_up(connection)
            except (OSError, ValueError):  # closed already
                pass
            finally:
                self.locks[peer].release()

    def _take(self, cause: str) -> bool:
        """Whether this is the first cause."""
        with self.changed:
            first = not self._cause and not self._closed
            if first:
                self._cause = cause
            self.changed.notify_all()
        return first

    def _hang_up(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _put(self, context: str, source: int, what: str, array: np.ndarray) -> None:
        with self.changed:
            self.boxes.setdefault((context, source), deque()).append((what, array))
            self.changed.notify_all()

    def _listen_to(self, peer: int, connection: socket.socket) -> None:
        """A thread: what one rank sends, until it says goodbye or the connection ends."""
        try:
            while True:
                try:
                    header = self._next_header(connection)
                except (OSError, EOFError):
                    self.fail(f"rank {peer} ended without closing its communicator (was it killed?)")
                    return
                if "abort" in header:
                    self._take(str(header["abort"]))
                elif "bye" in header:
                    with self.changed:
                        self.left.add(peer)
                        self.changed.notify_all()
                    return
                else:
                    array = _announced(header)
                    _read_into(connection, _bytes_of(array))
                    self._put(str(header["context"]), peer, str(header["what"]), array)
        except (OSError, EOFError):
            self.fail(f"rank {peer} ended amid an array (was it killed?)")
        except Exception as error:
            self.fail(f"rank {peer} sends what is no message: {error}")
        finally:
            self._release(peer)

    def _next_header(self, connection: socket.socket) -> dict[str, Any]:
        begun = b""
        while not begun:
            try:
                begun = connection.recv(1, socket.MSG_PEEK)
            except TimeoutError:  # nothing has to come for as long as ranks compute
                continue
            if not begun:
                raise EOFError
        return _read_header(connection)  # what has begun must come on

    def _release(self, peer: int) -> None:
        """Nothing comes from the rank any more; once nothing goes to it either, the connection is closed."""
        with self.changed:
            self.silent.add(peer)
            self.changed.notify_all()
            if self._closed:
                self.peers[peer].close()

    def close(self, rank: int) -> None:
        """Say goodbye."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
        for peer, connection in self.peers.items():
            if not self._cause and self.locks[peer].acquire(timeout=FAREWELL):
                with suppress(OSError):
                    _write_header(connection, {"bye": True})
                    connection.shutdown(socket.SHUT_WR)
                self.locks[peer].release()
            elif self._cause:
                self._hang_up(connection)
            if peer in self.silent:
                connection.close()


class SocketCommunicator(MessageCommunicator):
    """A rank among processes; NumPy arrays, sums in the order of the ranks as between threads."""

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        address: tuple[str, int],
        *,
        token: str,
        timeout: float = TIMEOUT,
        listener: socket.socket | None = None,
    ) -> SocketCommunicator:
        """Meet the other ranks at rank 0 and connect with each.

        Parameters
        ----------
        rank, size : int
        address : (host, port)
            Where rank 0 listens; it binds to this address and no other.
        token : str
            The same secret for all ranks.
        timeout : float
            Seconds that ranks wait for each other, here and later.
        listener : socket, optional
            Of rank 0, where it listens already.

        Raises
        ------
        CommunicatorError
            A rank does not come, comes twice, or does not know the token.
        """
        size = check_int("size", size, 1)
        rank = check_int("rank", rank, 0, size - 1)
        if not isinstance(token, str) or not token:
            raise ValueError(
                f"token must be a secret text that all ranks share ({TOKEN}), for example of `openssl rand -hex 16`"
            )
        meeting = _Meeting(rank, size, address, token, check_timeout(timeout))
        try:
            peers = meeting.host(listener) if rank == 0 else meeting.join()
        except BaseException as error:
            meeting.leave()
            if isinstance(error, OSError):
                raise CommunicatorError(
                    f"rank {rank} cannot use {address[0]}:{address[1]}: {error}; {MASTER_ADDR} has to be an address of "
                    f"rank 0's machine and {MASTER_PORT} a free port there, the same for all ranks"
                ) from error
            raise
        return cls(Mesh(rank, peers, meeting.timeout), range(size), rank)

    @classmethod
    def from_environment(cls, *, timeout: float = TIMEOUT) -> SocketCommunicator:
        """Connect as the environment says, the same program being started once a rank.

        HYBRIDMF_RANK and HYBRIDMF_WORLD_SIZE (else SLURM_PROCID and SLURM_NTASKS); HYBRIDMF_MASTER_ADDR and
        HYBRIDMF_MASTER_PORT, where rank 0 listens (127.0.0.1 and 29477 if not set); HYBRIDMF_TOKEN.

        Raises
        ------
        CommunicatorError
            As `connect`.
        ValueError
            A variable is missing or no number.
        """
        rank, size = _number(RANK), _number(WORLD_SIZE)
        check_int(RANK, rank, 0, check_int(WORLD_SIZE, size, 1) - 1)
        host, port = os.environ.get(MASTER_ADDR) or "127.0.0.1", _number(MASTER_PORT, PORT)
        check_int(MASTER_PORT, port, 1, 65535)
        token = os.environ.get(TOKEN, "")
        if not token:
            raise ValueError(
                f"{TOKEN} is not set: it is the secret by which ranks know each other, the same for all of them; "
                f"export {TOKEN}=$(openssl rand -hex 16) before they are started"
            )
        return cls.connect(rank, size, (host, port), token=token, timeout=timeout)


def local_rank() -> int:
    """Number of this process among those of its node, by HYBRIDMF_LOCAL_RANK or SLURM_LOCALID; else its rank.

    Raises
    ------
    ValueError
        No variable tells.
    """
    return _number(LOCAL_RANK if _find(LOCAL_RANK) else RANK)


def _find(name: str) -> str:
    return os.environ.get(name, "").strip() or os.environ.get(SLURM.get(name, name), "").strip()


def _number(name: str, default: int | None = None) -> int:
    """A variable of the environment, or what stands in for it."""
    text = _find(name)
    if not text and default is not None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        other = f" (or {SLURM[name]})" if name in SLURM else ""
        raise ValueError(f"{name}{other} must be set to an integer >= 0 for each rank, got {text!r}")
    return number
