"""Ranks that are processes on one or several nodes, with a TCP connection between each pair.

Ranks exchange only arrays of numbers and short texts; received data are never executed. A token shared by all ranks
excludes other programs. Traffic is neither encrypted nor signed, so the network must be private.

Handshake, with key = scrypt(token, salt), all of it within one deadline:

    acceptor     MAGIC, salt, nonce
    connector    nonce, greeting, HMAC-SHA256(key, "connects", salt, both nonces, greeting)
    acceptor     ACCEPTED, greeting, HMAC-SHA256(key, "accepts", salt, both nonces, greeting); or REFUSED

A greeting is 2 bytes with the length of a JSON object and the object; it is parsed once its proof is verified. With
scrypt, each guess at the token of a recorded handshake costs a tenth of a second.

Frames after that: 4 bytes with the length of a JSON object, the object, and the bytes of the array if it announces one.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import numpy as np

from ...core.validate import check_int
from ...errors import CommunicatorError
from .communicator import TIMEOUT
from .messages import KINDS, MessageCommunicator, Transport, check_timeout

logger = logging.getLogger("hybridmf")

RANK, WORLD_SIZE, LOCAL_RANK = "HYBRIDMF_RANK", "HYBRIDMF_WORLD_SIZE", "HYBRIDMF_LOCAL_RANK"
MASTER_ADDR, MASTER_PORT, TOKEN = "HYBRIDMF_MASTER_ADDR", "HYBRIDMF_MASTER_PORT", "HYBRIDMF_TOKEN"

SLURM = {RANK: "SLURM_PROCID", WORLD_SIZE: "SLURM_NTASKS", LOCAL_RANK: "SLURM_LOCALID"}
"""Fallbacks of unset environment variables."""

PORT = 29477
"""Port of rank 0 if HYBRIDMF_MASTER_PORT is not set."""

MAGIC = b"hybridm2"
SALT, NONCE, PROOF = 16, 32, 32
"""Bytes of each."""

ACCEPTED, REFUSED = b"\1", b"\0"

SCRYPT = {"n": 1 << 15, "r": 8, "p": 1}
"""Cost of one guess at the token: 0.13 s on a Zen 4 core, and 32 MiB."""

SHORT_TOKEN = 16
"""Minimum characters of a token; a shorter one causes a warning."""

LONGEST_HEADER = 1 << 20

LONGEST_GREETING = 1 << 12

HANDSHAKE = 10.0
"""Timeout of a handshake in seconds, up to the proof that the other end knows the token."""

STRANGERS = 64
"""Open connections without a proof, beside one per expected rank; beyond that the oldest is dropped."""

REPORTED = 20
"""Number of refused connections that are logged individually."""

FAREWELL = 0.5
"""Seconds that a failing rank tries to send the cause to another."""


# ---------------------------------------------------------------------------------------------- frames


def _read(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    buffer = bytearray(size)
    _read_into(connection, memoryview(buffer), deadline)
    return buffer


def _read_into(connection: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fill a buffer by a deadline; without one, the connection's timeout applies to each part."""
    while len(view):
        if deadline is not None:
            _hurry(connection, deadline)
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]


def _hurry(connection: socket.socket, deadline: float) -> None:
    """Make the next operation of a connection time out at the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left)


def _write_header(connection: socket.socket, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    connection.sendall(struct.pack(">I", len(text)) + text)


def _read_header(connection: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    (length,) = struct.unpack(">I", _read(connection, 4, deadline))
    if length > LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return _object(_read(connection, length, deadline), "a header")


def _object(text: bytes | bytearray, what: str) -> dict[str, Any]:
    found = json.loads(bytes(text))
    if not isinstance(found, dict):
        raise ValueError(f"{what} that is no object")
    return found


def _announced(header: dict[str, Any]) -> np.ndarray:
    """Allocate the array that a header announces."""
    dtype, shape = np.dtype(str(header["dtype"])), tuple(int(size) for size in header["shape"])
    if dtype.kind not in KINDS or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} {shape}")
    return np.empty(shape, dtype=dtype)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


# ---------------------------------------------------------------------------------------------- handshakes


class _UnprovenError(ValueError):
    """The other end does not know the token."""


def _prove(key: bytes, role: bytes, nonces: bytes, said: bytes) -> bytes:
    """Proof that the end in this role knows the key; the parts before the greeting have fixed lengths."""
    return hmac.new(key, role + nonces + said, hashlib.sha256).digest()


def _greeting(key: bytes, role: bytes, nonces: bytes, said: dict[str, Any]) -> bytes:
    text = json.dumps(said).encode()
    return struct.pack(">H", len(text)) + text + _prove(key, role, nonces, text)


def _length(packed: bytes | bytearray) -> int:
    """Length of a greeting, from the two bytes before it."""
    (length,) = struct.unpack(">H", packed)
    if length > LONGEST_GREETING:
        raise ValueError(f"a greeting of {length} bytes")
    return int(length)


def _checked_greeting(key: bytes, role: bytes, nonces: bytes, text: bytes, proof: bytes) -> dict[str, Any]:
    """Verify the proof of a greeting, then parse it."""
    if not hmac.compare_digest(proof, _prove(key, role, nonces, text)):
        raise _UnprovenError(f"the other end does not know the token ({TOKEN})")
    return _object(text, "a greeting")


class _Keys:
    """Keys derived from the token, one per salt; expensive to guess."""

    def __init__(self, token: str) -> None:
        self.token, self.salt = token, secrets.token_bytes(SALT)
        self._known: dict[bytes, bytes] = {}

    def of(self, salt: bytes) -> bytes:
        """Key of a salt, which this end then uses as its own."""
        self.salt = salt
        if salt not in self._known:
            token = self.token.encode(errors="surrogatepass")
            self._known[salt] = hashlib.scrypt(token, salt=salt, maxmem=1 << 26, dklen=32, **SCRYPT)
        return self._known[salt]


def _introduce(connection: socket.socket, keys: _Keys, said: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Handshake of the connecting end; returns the greeting of the other.

    Raises
    ------
    PermissionError
        The other end refuses the token.
    OSError, EOFError, ValueError
        The other end is not a rank, has closed the connection, or is too slow.
    """
    hello = bytes(_read(connection, len(MAGIC) + SALT + NONCE, deadline))
    if not hello.startswith(MAGIC):
        raise ValueError("another protocol")
    nonce = secrets.token_bytes(NONCE)
    key, nonces = keys.of(hello[len(MAGIC) : -NONCE]), hello[len(MAGIC) :] + nonce
    _hurry(connection, deadline)
    connection.sendall(nonce + _greeting(key, b"connects", nonces, said))
    verdict = bytes(_read(connection, 1, deadline))
    if verdict == REFUSED:
        raise PermissionError(f"it has another token ({TOKEN} must be the same everywhere)")
    if verdict != ACCEPTED:
        raise ValueError("another protocol")
    text = bytes(_read(connection, _length(_read(connection, 2, deadline)), deadline))
    return _checked_greeting(key, b"accepts", nonces, text, bytes(_read(connection, PROOF, deadline)))


class _PendingPeer:
    """A connection whose other end has not yet proved that it knows the token."""

    def __init__(self, connection: socket.socket, source: str, salt: bytes, deadline: float) -> None:
        self.connection, self.source, self.deadline = connection, source, deadline
        self.challenge, self.received = salt + secrets.token_bytes(NONCE), bytearray()
        connection.setblocking(False)
        self.say(MAGIC + self.challenge)

    def say(self, content: bytes) -> None:
        """Send without blocking; a message fits in the buffers of a new connection."""
        if self.connection.send(content) < len(content):
            raise ValueError("it does not read")

    def hear(self, key: bytes) -> dict[str, Any] | None:
        """Read available bytes; return the greeting once it is complete with its proof."""
        part = self.connection.recv(NONCE + 2 + LONGEST_GREETING + PROOF)
        if not part:
            raise EOFError
        self.received += part
        begin = NONCE + 2
        if len(self.received) < begin:
            return None
        end = begin + _length(self.received[NONCE:begin])
        if len(self.received) < end + PROOF:
            return None
        if len(self.received) > end + PROOF:
            raise ValueError("more than a greeting")
        text, proof = bytes(self.received[begin:end]), bytes(self.received[end:])
        return _checked_greeting(key, b"connects", self.nonces, text, proof)

    @property
    def nonces(self) -> bytes:
        """Salt and both nonces."""
        return self.challenge + bytes(self.received[:NONCE])


class _Acceptor:
    """Accepts connections from peers that know the token: all handshakes run concurrently, in one thread.

    A peer without a proof costs a connection and a few KB for at most `HANDSHAKE` seconds. Beyond the limit of
    unproven connections the oldest one is dropped; a rank whose connection is dropped tries again.

    Parameters
    ----------
    listener : socket
    keys : _Keys
    said : dict
        This end's greeting.
    deadline : float
        Time to stop.
    expected : int
        Number of ranks that may connect at the same time.
    """

    def __init__(
        self, listener: socket.socket, keys: _Keys, said: dict[str, Any], deadline: float, expected: int
    ) -> None:
        self.listener, self.said, self.deadline = listener, said, deadline
        self.salt, self.key = keys.salt, keys.of(keys.salt)
        self.places = STRANGERS + expected
        self.pending: dict[socket.socket, _PendingPeer] = {}  # oldest first
        self.proved: deque[tuple[socket.socket, dict[str, Any]]] = deque()
        self.refused = 0

    def __enter__(self) -> _Acceptor:
        self.selector = selectors.DefaultSelector()
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: Any) -> None:
        self.selector.close()
        for connection in [*self.pending, *(connection for connection, _ in self.proved)]:
            connection.close()

    def next(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """Return (connection, greeting) of the next peer that knows the token; None after the deadline."""
        while not self.proved:
            now = time.monotonic()
            for peer in [peer for peer in self.pending.values() if peer.deadline <= now]:
                self._refuse(peer, "no proof that it knows the token in time")
            left = min([self.deadline, *(peer.deadline for peer in self.pending.values())]) - now
            if self.deadline <= now:
                return None
            for ready, _ in self.selector.select(max(left, 0)):
                if ready.fileobj is self.listener:
                    self._open()
                elif peer := self.pending.get(ready.fileobj):  # type: ignore[call-overload]
                    self._hear(peer)
        return self.proved.popleft()

    def _open(self) -> None:
        try:
            connection, address = self.listener.accept()
        except OSError as error:
            if not isinstance(error, (BlockingIOError, ConnectionError)):  # too many open files
                self._make_room()
                time.sleep(0.01)
            return
        if len(self.pending) >= self.places:
            self._make_room()
        try:
            deadline = min(self.deadline, time.monotonic() + HANDSHAKE)
            peer = _PendingPeer(connection, str(address[0]), self.salt, deadline)
        except (OSError, ValueError):  # closed already
            connection.close()
            return
        self.pending[connection] = peer
        self.selector.register(connection, selectors.EVENT_READ)

    def _make_room(self) -> None:
        for oldest in list(self.pending.values())[:1]:
            self._refuse(oldest, "too many connections without a proof that they know the token")

    def _hear(self, peer: _PendingPeer) -> None:
        try:
            greeting = peer.hear(self.key)
            if greeting is None:
                return
            peer.say(ACCEPTED + _greeting(self.key, b"accepts", peer.nonces, self.said))
        except _UnprovenError as error:
            with suppress(OSError, ValueError):
                peer.say(REFUSED)
            self._refuse(peer, str(error))
        except EOFError:  # for example a rank that connected too early and tries again
            self._refuse(peer, "it left", expected=not peer.received)
        except (OSError, ValueError, RecursionError) as error:
            self._refuse(peer, str(error))
        else:
            self._forget(peer)
            self.proved.append((peer.connection, greeting))

    def _forget(self, peer: _PendingPeer) -> None:
        self.selector.unregister(peer.connection)
        del self.pending[peer.connection]

    def _refuse(self, peer: _PendingPeer, why: str, *, expected: bool = False) -> None:
        self._forget(peer)
        peer.connection.close()
        if expected:
            return
        self.refused += 1
        level = logging.WARNING if self.refused <= REPORTED else logging.DEBUG
        logger.log(level, "a connection from %s was refused: %s", peer.source, why)
        if self.refused == REPORTED:
            logger.warning("further connections that are refused are logged at level DEBUG")


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


# ---------------------------------------------------------------------------------------------- meeting

Address = tuple[str, int]
Found = TypeVar("Found")


class _Rendezvous:
    """Rendezvous of ranks: all connect to rank 0, which sends each the addresses of the others."""

    def __init__(self, rank: int, size: int, address: Address, token: str, timeout: float) -> None:
        self.rank, self.size, self.address, self.keys = rank, size, address, _Keys(token)
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self.said: dict[str, Any] = {"rank": rank, "size": size, "process": secrets.token_hex(8)}
        self.peers: dict[int, socket.socket] = {}
        self.greetings: dict[int, dict[str, Any]] = {}
        self.waits = False

    def host(self, listener: socket.socket | None) -> dict[int, socket.socket]:
        """Connect all ranks, as rank 0."""
        with listener or _listen(*self.address) as open_listener:
            self._let_in(open_listener, range(1, self.size))
        where = {rank: greeting["listens"] for rank, greeting in self.greetings.items()}
        for rank, connection in self.peers.items():
            try:
                _hurry(connection, self.deadline)
                _write_header(connection, {"where": where})
            except OSError as error:
                raise CommunicatorError(f"rank {rank} left before all ranks had connected ({error})") from error
        return self.peers

    def join(self) -> dict[int, socket.socket]:
        """Connect with all ranks, as any rank but 0."""
        listener, where = self._try(0, self.address, self._come)
        with listener:
            for rank in range(1, self.rank):
                self.peers[rank] = self._try(rank, where[rank], functools.partial(self._call, rank))
            self._let_in(listener, range(self.rank + 1, self.size))
        return self.peers

    def _let_in(self, listener: socket.socket, expected: Collection[int]) -> None:
        """Wait for the ranks that connect to this one."""
        with _Acceptor(listener, self.keys, self.said, self.deadline, len(expected)) as acceptor:
            while missing := [rank for rank in expected if rank not in self.peers]:
                came = acceptor.next()
                if came is None:
                    raise CommunicatorError(
                        f"ranks {missing} did not connect within {self.timeout:g} s; all {self.size} must be started, "
                        f"with the same {MASTER_ADDR}, {MASTER_PORT} and {TOKEN}; timeout= lets rank {self.rank} wait "
                        "longer"
                    )
                self._admit(*came, expected)

    def _admit(self, connection: socket.socket, greeting: dict[str, Any], expected: Collection[int]) -> None:
        rank: Any = greeting.get("rank")
        problem = ""
        if greeting.get("size") != self.size:
            theirs, ours = greeting.get("size"), f"rank {self.rank} as one of {self.size}"
            problem = f"rank {rank} was started as one of {theirs} ranks, {ours}"
        elif rank not in expected:
            problem = f"there is no rank {rank} among {self.size}"
        elif self.greetings.get(rank, greeting).get("process") != greeting.get("process"):
            problem = f"there are two ranks {rank}"
        if problem:
            _say_goodbye(connection, problem)
            raise CommunicatorError(problem)
        if rank in self.peers:  # its first connection was lost before the answer
            self.peers[rank].close()
        self.peers[rank], self.greetings[rank] = connection, greeting

    def _try(self, rank: int, address: Address, call: Callable[[socket.socket], Found]) -> Found:
        """Connect to a rank and `call` it; retry until that succeeds or the deadline has passed."""
        pause = 0.02
        told: tuple[bool, BaseException] | None = None
        while True:
            reached = False
            connection: socket.socket | None = None
            try:
                left = self.deadline - time.monotonic()
                connection = socket.create_connection(address, timeout=max(0.1, min(HANDSHAKE, left)))
                reached = True
                return call(connection)
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if reached and isinstance(error, PermissionError):
                    raise CommunicatorError(f"rank {rank} refused rank {self.rank}: {error}") from error
                if not isinstance(error, (OSError, EOFError, ValueError)):
                    raise
                # the deadline may have cut this attempt short
                if told is None or reached != told[0] or not isinstance(error, TimeoutError):
                    told = reached, error
                if time.monotonic() + pause > self.deadline:
                    raise CommunicatorError(self._why(rank, address, *told)) from told[1]
                logger.debug("rank %d tries again to reach rank %d: %s", self.rank, rank, error)
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def _why(self, rank: int, address: Address, reached: bool, error: BaseException) -> str:
        """Reason why a rank was not reached."""
        if self.waits:
            return "rank 0 ended, or waits for ranks that do not connect"
        what = "completes no handshake" if reached else "does not answer"
        other = ", and nothing else listen there" if reached else ""
        return (
            f"rank {rank} {what} at {address[0]}:{address[1]}: {str(error) or type(error).__name__}; it must be "
            f"started, and {MASTER_ADDR} and {MASTER_PORT} be the same for all ranks{other}"
        )

    def _come(self, connection: socket.socket) -> tuple[socket.socket, dict[int, Address]]:
        """Send this rank's address to rank 0, and receive those of the others."""
        with ExitStack() as opened:
            # listen on the interface that reaches rank 0, on one node the loopback; it reaches the others, too
            listener = opened.enter_context(_listen(connection.getsockname()[0], 0))
            self._call(0, connection, {"listens": listener.getsockname()[:2]})
            self.waits = True
            answer = _read_header(connection, self.deadline)
            if "abort" in answer:
                raise CommunicatorError(str(answer["abort"]))
            where = {int(rank): (str(place[0]), int(place[1])) for rank, place in answer["where"].items()}
            self.waits = False
            opened.pop_all()
        self.peers[0] = connection
        return listener, where

    def _call(self, rank: int, connection: socket.socket, said: dict[str, Any] | None = None) -> socket.socket:
        """Return the connection once both ends have proved that they know the token."""
        deadline = min(self.deadline, time.monotonic() + HANDSHAKE)
        other = _introduce(connection, self.keys, self.said | (said or {}), deadline)
        if other.get("rank") != rank:
            raise CommunicatorError(f"rank {other.get('rank')} answers where rank {rank} should")
        return connection

    def leave(self, cause: str) -> None:
        """Close all connections, so that ranks do not wait for a failed rendezvous."""
        for connection in self.peers.values():
            _say_goodbye(connection, cause)


def _say_goodbye(connection: socket.socket, cause: str) -> None:
    with suppress(OSError):
        connection.settimeout(FAREWELL)
        _write_header(connection, {"abort": cause})
    connection.close()


# ---------------------------------------------------------------------------------------------- transport


class Mesh(Transport):
    """A `messages.Transport` over connections to all other ranks; one thread per connection receives.

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
        """Return the array itself: `send` returns after it is sent."""
        return array

    def send(self, context: str, source: int, dest: int, what: str, array: np.ndarray) -> None:
        """Send an array; the other end always receives, so this waits only for the network."""
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
            with self.changed:  # its reader raises the cause
                self.changed.wait_for(lambda: bool(self._cause) or dest in self.silent, FAREWELL)
            gone = "has closed its communicator" if dest in self.left else "cannot be reached"
            self.fail(f"rank {dest} {gone} while rank {self.rank} sends to it in {what} ({error})")
            self.check()

    def receive(self, context: str, source: int, dest: int, what: str) -> tuple[str, np.ndarray]:
        """Take the oldest array from a rank."""
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
        """Raise the cause of a failure."""
        if self._cause:
            raise CommunicatorError(self._cause)

    def fail(self, cause: str) -> None:
        """Fail, and send the cause to the others."""
        if not self._take(cause or "aborted"):
            return
        for peer, connection in self.peers.items():
            if not self.locks[peer].acquire(timeout=FAREWELL):
                self._hang_up(connection)  # within an array: only closing the connection can tell the other end
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
        """Record the cause; return whether it is the first."""
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
        """Thread that receives from one rank until its goodbye or the end of the connection."""
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
            self.fail(f"rank {peer} ended in the middle of an array (was it killed?)")
        except Exception as error:
            self.fail(f"rank {peer} sends what is no message: {error}")
        finally:
            self._release(peer)

    def _next_header(self, connection: socket.socket) -> dict[str, Any]:
        begun = b""
        while not begun:
            try:
                begun = connection.recv(1, socket.MSG_PEEK)
            except TimeoutError:  # no message is due while ranks compute
                continue
            if not begun:
                raise EOFError
        return _read_header(connection)  # the rest of a started message must arrive in time

    def _release(self, peer: int) -> None:
        """Mark the end of a rank's messages; close the connection once both directions have ended."""
        with self.changed:
            self.silent.add(peer)
            self.changed.notify_all()
            if self._closed:
                self.peers[peer].close()

    def close(self, rank: int) -> None:
        """Send goodbye to all ranks."""
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
    """A rank in its own process; NumPy arrays, sums in the order of ranks as between threads."""

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
        """Find the other ranks through rank 0 and connect with each.

        Parameters
        ----------
        rank, size : int
        address : (host, port)
            Address on which rank 0 listens; it binds to no other.
        token : str
            Shared secret of all ranks; fewer than 16 characters cause a warning, because it may be guessed.
        timeout : float
            Seconds that ranks wait for each other, here and later.
        listener : socket, optional
            The socket of rank 0, if it already listens.

        Raises
        ------
        CommunicatorError
            A rank does not connect in time, connects twice, or does not know the token.
        """
        size = check_int("size", size, 1)
        rank = check_int("rank", rank, 0, size - 1)
        meeting = _Rendezvous(rank, size, address, _check_token(token), check_timeout(timeout))
        try:
            peers = meeting.host(listener) if rank == 0 else meeting.join()
        except BaseException as error:
            meeting.leave(str(error) or type(error).__name__)
            if isinstance(error, OSError):
                raise CommunicatorError(
                    f"rank {rank} cannot use {address[0]}:{address[1]}: {error}; {MASTER_ADDR} has to be an address of "
                    f"rank 0's machine and {MASTER_PORT} a free port there, the same for all ranks"
                ) from error
            raise
        return cls(Mesh(rank, peers, meeting.timeout), range(size), rank)

    @classmethod
    def from_environment(cls, *, timeout: float = TIMEOUT) -> SocketCommunicator:
        """Connect by environment variables; the same program is started once per rank.

        HYBRIDMF_RANK and HYBRIDMF_WORLD_SIZE (else SLURM_PROCID and SLURM_NTASKS); HYBRIDMF_MASTER_ADDR and
        HYBRIDMF_MASTER_PORT, where rank 0 listens (127.0.0.1 and 29477 if not set); HYBRIDMF_TOKEN.

        Raises
        ------
        CommunicatorError
            See `connect`.
        ValueError
            A variable is missing or not a number.
        """
        rank, size = _number(RANK), _number(WORLD_SIZE)
        check_int(RANK, rank, 0, check_int(WORLD_SIZE, size, 1) - 1)
        host, port = os.environ.get(MASTER_ADDR) or "127.0.0.1", _number(MASTER_PORT, PORT)
        check_int(MASTER_PORT, port, 1, 65535)
        token = os.environ.get(TOKEN, "")
        if not token:
            raise ValueError(
                f"{TOKEN} is not set: it is the secret that authenticates ranks, the same for all of them; "
                f"export {TOKEN}=$(openssl rand -hex 16) before they are started"
            )
        return cls.connect(rank, size, (host, port), token=token, timeout=timeout)


def _check_token(token: Any) -> str:
    """Check for a nonempty secret text."""
    if not isinstance(token, str) or not token:
        raise ValueError(
            f"token must be a secret text that all ranks share ({TOKEN}), for example of `openssl rand -hex 16`"
        )
    if len(token) < SHORT_TOKEN:
        logger.warning(
            "the token (%s) has %d characters and may be guessed; make one of at least %d by `openssl rand -hex 16`",
            TOKEN,
            len(token),
            SHORT_TOKEN,
        )
    return token


def local_rank() -> int:
    """Number of this process among those of its node, by HYBRIDMF_LOCAL_RANK or SLURM_LOCALID; else its rank.

    Raises
    ------
    ValueError
        No variable is set.
    """
    return _number(LOCAL_RANK if _find(LOCAL_RANK) else RANK)


def _find(name: str) -> str:
    return os.environ.get(name, "").strip() or os.environ.get(SLURM.get(name, name), "").strip()


def _number(name: str, default: int | None = None) -> int:
    """An integer from an environment variable or its fallback."""
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
