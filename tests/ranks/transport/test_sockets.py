"""Ranks over sockets: the laws of the collectives, failures, strangers."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from hybridmf.errors import CommunicatorError
from hybridmf.ranks.transport import sockets
from hybridmf.ranks.transport.messages import SMALL
from hybridmf.ranks.transport.sockets import SocketCommunicator
from hybridmf.ranks.transport.threads import run_ranks
from support.communicators import drawn, free_address, laws, over_sockets
from support.fake_nccl import wait_until

COST = dict(sockets.SCRYPT)


def texts(answers) -> list[str]:
    return [str(answer) if isinstance(answer, CommunicatorError) else repr(answer) for answer in answers]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_laws_of_sockets(size):
    checks = over_sockets(size, laws)
    assert all(isinstance(count, int) and count > 80 for count in checks), checks


def test_sockets_add_the_bits_that_threads_add():
    def rank(communicator):
        large = drawn(communicator.rank, (SMALL + 3,), np.float32)
        return communicator.allreduce(large), communicator.reduce_scatter(large, [SMALL, 0, 3])

    for ours, theirs in zip(over_sockets(3, rank), run_ranks(3, rank), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_large_arrays_in_both_directions():
    """More than the buffers of a connection hold: neither side waits for the other to read first."""

    def rank(communicator):
        array = np.full(1 << 21, float(communicator.rank))
        other = 1 - communicator.rank
        return communicator.sendrecv(array, other, other, array).sum()

    assert over_sockets(2, rank) == [float(1 << 21), 0.0]


def test_sockets_abort_with_the_first_cause():
    def rank(communicator):
        part = communicator.split(communicator.rank % 2)
        if communicator.rank == 2:
            part.abort("NaN on rank 2")
            part.abort("later")
        communicator.barrier()

    assert texts(over_sockets(3, rank)) == ["NaN on rank 2"] * 3


def test_sockets_report_different_calls():
    for answer in texts(over_sockets(2, lambda c: c.allreduce(np.zeros(3 - c.rank)))):
        assert "calls allreduce of float64 (2,) while rank" in answer or "float64 (3,) while rank" in answer


def test_ranks_do_not_wait_for_a_rank_that_hangs():
    def rank(communicator):
        while communicator.rank == 1 and not communicator.cause:
            time.sleep(0.005)
        communicator.barrier()

    answers = texts(over_sockets(3, rank, timeout=0.3))
    for answer in answers:
        assert "rank 1 did not answer rank" in answer and "within 0.3 s in barrier" in answer


def test_ranks_do_not_wait_for_a_rank_that_does_not_read(monkeypatch):
    """Its buffers fill, and the sender's time is up."""

    def rank(communicator):
        if communicator.rank == 0:
            communicator.barrier()
            return communicator.sendrecv(np.zeros(1 << 22), 1, 1, np.zeros(1))
        lock = communicator.transport.changed
        with lock:  # the thread that reads cannot hand over the first array
            communicator.transport.send("", 1, 0, "barrier", np.empty(0, np.uint8))
            time.sleep(1.0)

    answers = texts(over_sockets(2, rank, timeout=0.3))
    assert "cannot be reached while rank 0 sends to it in sendrecv" in answers[0] or "did not answer" in answers[0]


def test_a_connection_that_ends_stops_all():
    def rank(communicator):
        communicator.barrier()
        if communicator.rank == 1:  # as the system does for a process that was killed
            communicator.transport._closed = True
            for connection in communicator.transport.peers.values():
                connection.shutdown(socket.SHUT_RDWR)
            return "gone"
        communicator.allreduce(np.zeros(2))

    answers = texts(over_sockets(3, rank))
    assert answers[0] == answers[2] == "rank 1 ended without closing its communicator (was it killed?)"


def test_a_closed_rank_fails_only_ranks_that_wait_for_it():
    def rank(communicator):
        if communicator.rank == 1:
            communicator.allgatherv(np.array([1]), [1, 1])
            communicator.close()
            communicator.close()
            with pytest.raises(CommunicatorError, match="rank 1 has closed this communicator"):
                communicator.barrier()
            return "left"
        time.sleep(0.05)
        assert communicator.allgatherv(np.array([1]), [1, 1]).sum() == 2
        communicator.barrier()

    answers = texts(over_sockets(2, rank))
    assert answers == ["rank 1 has closed its communicator while rank 0 waits for it in barrier", "'left'"]


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x01{",
        b'\x00\x00\x00\x27{"dtype":"O","shape":[1],"context":"" } ',
        b'\x00\x00\x00\x28{"dtype":"f4","shape":[-1],"context":""}',
    ],
)
def test_an_invalid_message_stops_all(frame):
    def rank(communicator):
        if communicator.rank == 1:
            communicator.transport.peers[0].sendall(frame)
        communicator.barrier()

    assert texts(over_sockets(2, rank))[0].startswith("rank 1 sends what is no message")


def test_peers_without_the_token_are_refused(caplog):
    answers = texts(over_sockets(2, laws, timeout=[0.5, 20], tokens=["secret", "guess"]))
    assert answers[0].startswith(
        "ranks [1] did not connect within 0.5 s; all 2 must be started, with the same HYBRIDMF_"
    )
    assert answers[1] == "rank 0 refused rank 1: it has another token (HYBRIDMF_TOKEN must be the same everywhere)"
    assert "a connection from 127.0.0.1 was refused: the other end does not know the token" in caplog.text


def test_ranks_of_a_failed_meeting_are_released(monkeypatch):
    meetings = []
    meet = sockets._Rendezvous.host
    monkeypatch.setattr(
        sockets._Rendezvous, "host", lambda self, listener: meetings.append(self) or meet(self, listener)
    )
    answers = texts(over_sockets(2, laws, timeout=[0.5, 20], sizes=[3, 3]))
    assert answers[0].startswith("ranks [2] did not connect within 0.5 s; all 3 must be started")
    assert answers[1] == answers[0]
    assert [connection.fileno() for connection in meetings[0].peers.values()] == [-1]
    answers = texts(over_sockets(2, laws, timeout=[1, 0.5], sizes=[3, 3]))
    assert answers[1] == "rank 0 ended, or waits for ranks that do not connect"


def test_a_message_that_stops_in_its_header_stops_all():
    ours, theirs = _loopback()
    with ours, theirs:
        mesh = sockets.Mesh(0, {1: ours}, 0.1)
        theirs.sendall(b"\0\0")
        with mesh.changed:
            assert mesh.changed.wait_for(lambda: bool(mesh._cause), 20)
        with pytest.raises(CommunicatorError, match="rank 1 ended without closing"):
            mesh.check()


def _loopback() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname()[:2])
        return listener.accept()[0], theirs


def test_strangers_are_turned_away(caplog):
    """They come before the ranks do, say something else or nothing, and the ranks still meet."""
    address = free_address()

    def disturb():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(OSError):
                with socket.create_connection(address, timeout=1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scan\r\n")
                return
            time.sleep(0.01)

    nuisance = threading.Thread(target=disturb)
    nuisance.start()
    answers = [None, None]

    def run(rank):
        if rank:
            nuisance.join()
        communicator = SocketCommunicator.connect(rank, 2, address, token="secret", timeout=20)
        answers[rank] = communicator.allreduce(np.array([rank + 1]))[0]

    workers = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert answers == [3, 3]
    assert "was refused" in caplog.text


class Meeting:
    """Rank 0's acceptor on the loopback, and strangers that connect; `admitted` is the accepted one."""

    def __init__(self, seconds: float = 20.0) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        self.keys = sockets._Keys("secret")
        deadline = time.monotonic() + seconds
        self.acceptor = sockets._Acceptor(self.listener, self.keys, {"rank": 0, "size": 2}, deadline, 1)
        self.strangers: list[socket.socket] = []

    def __enter__(self) -> Meeting:
        self.acceptor.__enter__()
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()
        return self

    def _wait(self) -> None:
        self.admitted = self.acceptor.next()

    def __exit__(self, *_) -> None:
        self.waiter.join(30)
        self.acceptor.__exit__()
        for connection in [self.listener, *self.strangers, *(self.admitted or ())[:1]]:
            connection.close()

    def stranger(self) -> socket.socket:
        """One that has read the challenge."""
        self.strangers.append(socket.create_connection(self.address, timeout=10))
        self.challenge = bytes(sockets._read(self.strangers[-1], 8 + sockets.SALT + sockets.NONCE))
        return self.strangers[-1]

    def rank(self, token: str = "secret", said: object = None) -> dict:
        """The other end of a rank that comes."""
        connection = socket.create_connection(self.address, timeout=10)
        self.strangers.append(connection)
        return sockets._introduce(connection, sockets._Keys(token), said or {"rank": 1}, time.monotonic() + 10)


def everything(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    found = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def test_strangers_who_say_nothing_stop_no_meeting():
    """Each has the time of a whole handshake, longer than the ranks wait, and they are there first."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    idle = [socket.create_connection(address) for _ in range(5)]
    assert sockets.HANDSHAKE > 5
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(SocketCommunicator.connect, 0, 2, address, token="secret", timeout=5, listener=listener)
        second = pool.submit(SocketCommunicator.connect, 1, 2, address, token="secret", timeout=5)
        ranks = [first.result(20), second.result(20)]
        assert [each.result(20)[0] for each in [pool.submit(rank.allreduce, np.ones(1)) for rank in ranks]] == [2, 2]
    for each in [*ranks, *idle]:
        each.close()


def test_a_slow_stranger_has_one_deadline(monkeypatch, caplog):
    monkeypatch.setattr(sockets, "HANDSHAKE", 0.3)
    with Meeting() as meeting:
        stranger = meeting.stranger()
        stranger.settimeout(0.02)
        came = b"?"
        for _ in range(200):  # a byte each 20 ms, for ten deadlines
            with suppress(OSError):
                stranger.send(b"\0")
            with suppress(TimeoutError):
                came = stranger.recv(1)
                break
        assert came == b""
        assert meeting.rank() == {"rank": 0, "size": 2}
    assert "127.0.0.1 was refused: no proof that it knows the token in time" in caplog.text


def test_no_acceptor_is_open_for_ever(caplog):
    with Meeting(seconds=0.2) as meeting:
        meeting.stranger()
        meeting.stranger().close()  # as a rank that comes too early does
    assert meeting.admitted is None
    assert not meeting.acceptor.proved
    assert "it left" not in caplog.text


def test_a_stranger_receives_nothing_to_verify_a_guess_with(caplog):
    """The end that accepts proves nothing before the other has, and parses nothing."""
    with Meeting() as meeting:
        stranger = meeting.stranger()
        text = b"[" * 4000
        stranger.sendall(bytes(sockets.NONCE) + len(text).to_bytes(2, "big") + text + bytes(sockets.PROOF))
        assert everything(stranger) == sockets.REFUSED
        with pytest.raises(PermissionError, match="another token"):
            meeting.rank("guess")
        assert meeting.rank() == {"rank": 0, "size": 2}
    assert caplog.text.count("was refused: the other end does not know the token") == 2
    assert meeting.challenge.startswith(sockets.MAGIC + meeting.keys.salt)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (lambda sealed: bytes(sockets.NONCE) + b"\xff\xff", "a greeting of 65535 bytes"),
        (lambda sealed: sealed + b"x", "more than a greeting"),
        (lambda sealed: sealed[:-1], "it left"),
    ],
)
def test_greetings_are_bounded(sent, problem, caplog):
    with Meeting() as meeting:
        stranger, nonce = meeting.stranger(), bytes(sockets.NONCE)
        salted = meeting.challenge[len(sockets.MAGIC) :] + nonce
        key = meeting.keys.of(meeting.keys.salt)
        stranger.sendall(sent(nonce + sockets._greeting(key, b"connects", salted, {"rank": 1})))
        stranger.shutdown(socket.SHUT_WR)
        assert everything(stranger) == b""
        meeting.rank()
    assert f"127.0.0.1 was refused: {problem}" in caplog.text


@pytest.mark.parametrize("said", [["rank"], [[]], "rank"])
def test_a_greeting_is_an_object(said, caplog):
    with Meeting() as meeting:
        with pytest.raises((EOFError, ConnectionError)):
            meeting.rank(said=said)
        meeting.rank()
    assert "127.0.0.1 was refused: a greeting that is no object" in caplog.text


def test_the_number_of_strangers_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(sockets, "STRANGERS", 3)
    monkeypatch.setattr(sockets, "REPORTED", 2)
    caplog.set_level("DEBUG", "hybridmf")
    with Meeting() as meeting:
        crowd = [meeting.stranger() for _ in range(12)]
        assert all(everything(stranger) == b"" for stranger in crowd[:8])
        wait_until(lambda: len(meeting.acceptor.pending) == 4)
        meeting.rank()  # the oldest is dropped for it, too
    refusals = [record for record in caplog.records if "too many connections" in record.getMessage()]
    assert [record.levelname for record in refusals] == ["WARNING"] * 2 + ["DEBUG"] * 7
    assert "further connections that are refused are logged at level DEBUG" in caplog.text


def test_an_acceptor_continues_where_no_file_can_be_opened(caplog):
    class Full:
        def accept(self):
            raise OSError(24, "Too many open files")

    meeting = Meeting(seconds=0.2)
    with meeting:
        meeting.stranger()
        meeting.waiter.join(10)
        meeting.acceptor.deadline += 10
        other = socket.create_connection(meeting.address)
        meeting.acceptor._open()
        meeting.acceptor.listener = Full()
        meeting.acceptor._open()
        meeting.acceptor._open()
    assert "too many connections without a proof" in caplog.text
    other.close()


def test_peers_that_do_not_read_are_not_accepted():
    class Deaf:
        def setblocking(self, blocks):
            pass

        def send(self, content):
            return 1

    with pytest.raises(ValueError, match="it does not read"):
        sockets._PendingPeer(Deaf(), "there", b"salt", 0)


def test_join_tries_again_where_it_is_dropped():
    """By what listens there before rank 0 does, and by a rank 0 that was killed after they had met."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(SocketCommunicator.connect, 1, 2, address, token="secret", timeout=30)
        for said in (b"", b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close, and so on and on\r\n\r\n"):
            with listener.accept()[0] as dropped:
                dropped.sendall(said)
        keys = sockets._Keys("secret")
        with sockets._Acceptor(listener, keys, {"rank": 0, "size": 2}, time.monotonic() + 20, 1) as acceptor:
            acceptor.next()[0].close()
        first = pool.submit(SocketCommunicator.connect, 0, 2, address, token="secret", timeout=30, listener=listener)
        ranks = [first.result(40), second.result(40)]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda key, nonces: sockets.ACCEPTED + sockets._greeting(bytes(32), b"accepts", nonces, {}), "know the token"),
        (lambda key, nonces: sockets.ACCEPTED + sockets._greeting(key, b"connects", nonces, {}), "know the token"),
        (lambda key, nonces: b"?", "another protocol"),
        (lambda key, nonces: sockets.ACCEPTED, "connection was closed"),
        (
            lambda key, nonces: sockets.ACCEPTED + sockets._greeting(key, b"accepts", nonces, {"rank": 3}),
            "rank 3 answers",
        ),
    ],
)
def test_an_impostor_is_not_taken_for_rank_0(answer, problem):
    """Of another key, in the wrong role, of another protocol, one that ends early, another rank; then it is silent."""

    def pretend():
        keys, challenge = sockets._Keys("secret"), bytes(sockets.SALT + sockets.NONCE)
        with listener.accept()[0] as caller:
            caller.settimeout(10)
            caller.sendall(sockets.MAGIC + challenge)
            nonces = challenge + bytes(sockets._read(caller, sockets.NONCE))
            sockets._read(caller, sockets._length(sockets._read(caller, 2)) + sockets.PROOF)
            caller.sendall(answer(keys.of(bytes(sockets.SALT)), nonces))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        impostor = pool.submit(pretend)
        with pytest.raises(CommunicatorError, match=problem):
            SocketCommunicator.connect(1, 2, listener.getsockname()[:2], token="secret", timeout=0.4)
        impostor.result(20)


def test_a_rank_that_reconnects_replaces_its_lost_connection():
    meeting = sockets._Rendezvous(0, 3, ("127.0.0.1", 1), "secret", 5)
    pairs = [_loopback() for _ in range(3)]
    for ours, _ in pairs[:2]:
        meeting._admit(ours, {"rank": 1, "size": 3, "process": "a"}, range(1, 3))
    assert (pairs[0][0].fileno(), meeting.peers[1]) == (-1, pairs[1][0])
    with pytest.raises(CommunicatorError, match="there are two ranks 1"):
        meeting._admit(pairs[2][0], {"rank": 1, "size": 3, "process": "b"}, range(1, 3))
    with pytest.raises(CommunicatorError, match="there is no rank 3 among 3"):
        meeting._admit(_loopback()[0], {"rank": 3, "size": 3, "process": "c"}, range(1, 3))
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_a_rank_that_leaves_after_the_meeting(monkeypatch):
    def gone(connection, header):
        if "where" in header:
            raise BrokenPipeError(32, "Broken pipe")
        write(connection, header)

    write = sockets._write_header
    monkeypatch.setattr(sockets, "_write_header", gone)
    answers = texts(over_sockets(2, laws))
    assert answers[0] == "rank 1 left before all ranks had connected ([Errno 32] Broken pipe)"
    assert answers[1] == answers[0]


def test_guesses_at_a_token_are_expensive(caplog):
    """What travels is keyed by scrypt of the token, at its usual cost, with the salt of the meeting."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in COST.items():
            patched.setitem(sockets.SCRYPT, name, value)
        key = hashlib.scrypt(b"secret", salt=b"s" * 16, n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32)
        assert sockets._Keys("secret").of(b"s" * 16) == key
    assert sockets._Keys("secret").salt != sockets._Keys("secret").salt
    SocketCommunicator.connect(0, 1, ("127.0.0.1", 0), token="0123456789abcdef").close()
    assert not caplog.text
    SocketCommunicator.connect(0, 1, ("127.0.0.1", 0), token="secret").close()
    assert "has 6 characters and may be guessed; make one of at least 16 by `openssl rand -hex 16`" in caplog.text


def test_ranks_that_do_not_fit_together():
    answers = texts(over_sockets(2, laws, timeout=1, sizes=[2, 3]))
    assert answers == ["rank 1 was started as one of 3 ranks, rank 0 as one of 2"] * 2
    answers = texts(over_sockets(3, laws, timeout=1, ranks=[0, 1, 1]))
    assert "there are two ranks 1" in answers
    with pytest.raises(CommunicatorError, match=r"not answer at 127.0.0.1:\d+: .* it must be started"):
        SocketCommunicator.connect(1, 2, free_address(), token="secret", timeout=0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CommunicatorError, match=r"rank 0 cannot use .* HYBRIDMF_MASTER_PORT a free port"),
    ):
        SocketCommunicator.connect(0, 2, taken.getsockname(), token="secret", timeout=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, "t", 1), "size must satisfy size >= 1"),
        ((2, 2, "t", 1), "0 <= rank <= 1, got 2"),
        ((0, 1, "", 1), "token must be a secret text .*HYBRIDMF_TOKEN.*openssl"),
        ((0, 1, "t", -1), "timeout must be"),
    ],
)
def test_connect_validates_its_arguments(arguments, message):
    rank, size, token, timeout = arguments
    with pytest.raises(ValueError, match=message):
        SocketCommunicator.connect(rank, size, ("127.0.0.1", 1), token=token, timeout=timeout)


def test_environment(monkeypatch):
    for name in (sockets.RANK, sockets.WORLD_SIZE, sockets.LOCAL_RANK, sockets.MASTER_ADDR, *sockets.SLURM.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(sockets.TOKEN, raising=False)
    with pytest.raises(ValueError, match=r"HYBRIDMF_RANK \(or SLURM_PROCID\) must be set to an integer >= 0"):
        SocketCommunicator.from_environment()
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("HYBRIDMF_WORLD_SIZE", "one")
    with pytest.raises(ValueError, match=r"HYBRIDMF_WORLD_SIZE .*got 'one'"):
        SocketCommunicator.from_environment()
    monkeypatch.setenv("HYBRIDMF_WORLD_SIZE", "1")
    monkeypatch.setenv("HYBRIDMF_MASTER_PORT", "99999")
    with pytest.raises(ValueError, match="HYBRIDMF_MASTER_PORT"):
        SocketCommunicator.from_environment()
    monkeypatch.setenv("HYBRIDMF_MASTER_PORT", str(free_address()[1]))
    with pytest.raises(ValueError, match="HYBRIDMF_TOKEN is not set"):
        SocketCommunicator.from_environment()
    monkeypatch.setenv("HYBRIDMF_TOKEN", "secret")
    communicator = SocketCommunicator.from_environment(timeout=5)
    assert (communicator.rank, communicator.size, communicator.timeout) == (0, 1, 5)
    assert sockets.local_rank() == 0
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert sockets.local_rank() == 3
    monkeypatch.setenv("HYBRIDMF_LOCAL_RANK", "2")
    assert sockets.local_rank() == 2
