"""NCCL: the laws of the collectives on several GPUs, and on stand-ins of CuPy and NCCL where there are none."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hybridmf.device import cuda as device
from hybridmf.errors import CommunicatorError, DeviceError
from hybridmf.ranks.transport import nccl
from hybridmf.ranks.transport.communicator import Single
from hybridmf.ranks.transport.nccl import NcclCommunicator
from hybridmf.ranks.transport.threads import RankThreads, ThreadCommunicator, run_ranks
from hybridmf.testing import CommunicatorContract
from hybridmf.testing.communicators import check_arguments, check_collectives
from support import fake_nccl
from support.communicators import run_in_threads
from support.fake_nccl import as_fake, wait_until
from support.ranks import need_gpus


@pytest.fixture
def fake(monkeypatch):
    module = fake_nccl.Nccl()
    monkeypatch.setattr(nccl, "_modules", lambda: (fake_nccl.fake_cupy(), module))
    monkeypatch.setattr(nccl, "POLL", 0.01)
    monkeypatch.setattr(nccl, "_idle", nccl._Idle())
    monkeypatch.delenv(nccl.MULTICAST, raising=False)
    return module


def on_fakes(function, **options):
    """A rank's function that is given a NcclCommunicator; closed if it ends well."""

    def rank(control: ThreadCommunicator):
        communicator = NcclCommunicator(control, control.rank, **options)
        with fake_nccl.Device(control.rank):
            result = function(communicator)
        communicator.close()
        communicator.close()
        return result

    return rank


class TestStandIns(CommunicatorContract):
    @pytest.fixture(autouse=True, params=[False, True])
    def _fake(self, fake, request):
        self.fake, self.ordered = fake, request.param

    def run(self, size, check):
        def connected(control):
            return NcclCommunicator(control, control.rank, ordered=self.ordered)

        law = functools.partial(check, device=as_fake, in_order=self.ordered, matched=False)
        run_in_threads(size, law, connected)
        kinds = {"send", "recv", "broadcast"} if self.ordered else {"allReduce", "reduce", "reduceScatter"}
        assert size == 1 or kinds <= set(self.fake.calls)
        assert os.environ[nccl.MULTICAST] == os.environ[nccl.CONNECT] == "0"
        assert "destroy" not in self.fake.calls  # it waits for other threads with the interpreter locked


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "allgatherv", "broadcast", "sendrecv"])
def test_nothing_is_launched_before_all_have_their_memory(fake, monkeypatch, name):
    """A kernel of NCCL that waits for a rank may keep this rank from allocating what it is to launch with."""
    happened: list[str] = []
    empty = NcclCommunicator._empty

    def late(communicator, *arguments):
        time.sleep(0.05 * communicator.rank)
        happened.append("memory")
        return empty(communicator, *arguments)

    monkeypatch.setattr(NcclCommunicator, "_empty", late)
    later = fake.NcclCommunicator._later

    def launch(comm, *call):
        happened.append("launch")
        later(comm, *call)

    monkeypatch.setattr(fake.NcclCommunicator, "_later", launch)

    def rank(communicator):
        mine, after, before = as_fake(np.ones(6)), (communicator.rank + 1) % 3, (communicator.rank - 1) % 3
        more = {"reduce_scatter": ([1, 2, 3],), "allgatherv": ([6, 6, 6],), "sendrecv": (after, before, mine)}
        getattr(communicator, name)(mine, *more.get(name, ()))

        happened.append("went on")

    run_ranks(3, on_fakes(rank), timeout=20)
    assert happened[:3] == ["memory"] * 3
    assert set(happened[3:-3]) == {"launch"}
    assert happened[-3:] == ["went on"] * 3  # what a rank does next may keep the others from launching


@pytest.mark.parametrize("counts", [[2, 2, 2], [0, 3, 1]])
def test_one_thread_gathers_for_all_ranks(fake, monkeypatch, counts):
    communicators = run_ranks(3, lambda control: NcclCommunicator(control, control.rank), timeout=20)
    monkeypatch.setattr(NcclCommunicator, "_meet", lambda *_: pytest.fail("nobody else is there to meet"))
    arrays = [as_fake(10.0 * rank + np.arange(count * 2.0).reshape(count, 2)) for rank, count in enumerate(counts)]
    gathered = NcclCommunicator.allgatherv_together(communicators, arrays, counts)
    for found in gathered:
        np.testing.assert_array_equal(np.asarray(found), np.concatenate(list(map(np.asarray, arrays))))
    with pytest.raises(ValueError, match=r"array must have counts\[1\]=4 rows, got"):
        NcclCommunicator.allgatherv_together(communicators, arrays, [counts[0], 4, counts[2]])
    communicators[2].abort("enough")
    with pytest.raises(CommunicatorError, match="enough"):
        NcclCommunicator.allgatherv_together(communicators, arrays, counts)


def test_a_failed_gather_of_nccl_stops_all_ranks(fake, monkeypatch):
    fake.timeout = 0.2  # rank 0 has launched its part, and rank 1 never does
    communicators = run_ranks(2, lambda control: NcclCommunicator(control, control.rank), timeout=20)

    def fails(*_):
        raise fake.NcclError("unhandled system error")

    monkeypatch.setattr(communicators[1]._held, "allGather", fails)
    with pytest.raises(CommunicatorError, match="NCCL failed in allgatherv: unhandled system error"):
        NcclCommunicator.allgatherv_together(communicators, [as_fake(np.ones(3))] * 2, [3, 3])
    assert all("unhandled system error" in communicator.cause for communicator in communicators)


def test_a_gather_that_is_interrupted_halfway_leaves_no_rank_waiting(fake, monkeypatch):
    """What was launched of the group would wait for the rest on its GPU, and whoever closes it for that."""
    fake.timeout = 0.2  # rank 0 has launched its part, and rank 1 never does
    communicators = run_ranks(2, lambda control: NcclCommunicator(control, control.rank), timeout=20)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(communicators[1]._held, "allGather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        NcclCommunicator.allgatherv_together(communicators, [as_fake(np.ones(3))] * 2, [3, 3])
    assert fake.calls.count("abort") == 2
    assert all("stopped by KeyboardInterrupt" in communicator.cause for communicator in communicators)


def test_two_ranks_on_one_gpu_are_refused_before_nccl_is_asked(fake):
    with pytest.raises(DeviceError, match=r"ranks 0, 2 have one GPU together .*CUDA_VISIBLE_DEVICES"):
        run_ranks(3, lambda control: NcclCommunicator(control, [4, 1, 4][control.rank]), timeout=20)
    assert fake.calls == []


def test_nccl_is_aborted_without_the_interpreters_lock(fake, monkeypatch):
    aborted: list[int] = []
    library = SimpleNamespace(ncclCommAbort=lambda handle: aborted.append(handle.value))
    monkeypatch.setattr(nccl, "_library", lambda: library)
    comm = SimpleNamespace(comm=1234, abort=lambda: pytest.fail("with the lock"))
    references = sys.getrefcount(comm)
    nccl._abort(comm)
    assert aborted == [1234]
    assert sys.getrefcount(comm) == references + 1  # else CuPy would free memory that is gone


def test_numpy_arrays_go_by_the_control(fake):
    def rank(communicator):
        checks = check_collectives(communicator)
        communicator.start_sendrecv([np.zeros(1)], 0, 0, [np.zeros(1)]) if communicator.size == 1 else None
        return checks

    assert min(run_ranks(2, on_fakes(rank), timeout=20)) > 80
    assert fake.calls == []


def test_a_connection_stays_open_for_the_next_fit_on_the_same_gpus(fake):
    def rank(communicator):
        communicator.allreduce(as_fake(np.ones(2)))
        return communicator._held

    first = run_ranks(2, on_fakes(rank), timeout=20)
    assert "abort" not in fake.calls
    assert run_ranks(2, on_fakes(rank), timeout=20) == first
    assert len(fake.worlds) == 1
    others = run_ranks(3, on_fakes(rank), timeout=20)  # other GPUs
    assert len(fake.worlds) == 2
    assert not set(others) & set(first)
    assert run_ranks(2, on_fakes(rank), timeout=20) == first


def test_concurrent_fits_have_connections_of_their_own(fake):
    def rank(control):
        both = [NcclCommunicator(each, control.rank) for each in (control.split(0), control.split(0))]
        for communicator in both:
            communicator.close()

    run_ranks(2, rank, timeout=20)
    assert len(fake.worlds) == 2
    claimed = [nccl._idle.claim((0, 1)) for _ in range(3)]
    assert set(claimed) == {*fake.worlds, None}
    assert claimed[2] is None


def test_a_failed_connection_is_not_used_again(fake):
    def rank(communicator):
        if communicator.rank == 1:
            raise ArithmeticError("NaN on rank 1")
        wait_until(lambda: communicator.cause)

    for _ in range(2):
        with pytest.raises(ArithmeticError, match="NaN on rank 1"):
            run_ranks(2, on_fakes(rank), timeout=20)
    assert len(fake.worlds) == 2


def test_users_may_turn_multicast_on(fake, monkeypatch):
    monkeypatch.setenv(nccl.MULTICAST, "1")
    run_ranks(1, on_fakes(lambda c: None))
    assert os.environ[nccl.MULTICAST] == "1"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.allreduce([1.0]), TypeError, r"on cuda:0 or a NumPy array, got list"),
        (lambda c: c.allreduce(as_fake(np.array([1j]))), TypeError, r"float64 to travel between GPUs, got complex128"),
        (lambda c: c.reduce_scatter(as_fake(np.zeros(3)), [2]), ValueError, r"add up to the 3 rows"),
        (lambda c: c.allgatherv(as_fake(np.zeros(3)), [2]), ValueError, r"counts\[0\]=2 rows, got 3"),
        (lambda c: c.broadcast(as_fake(np.zeros(3)), 1), ValueError, r"0 <= root < 1, got 1"),
        (lambda c: c.sendrecv(as_fake(np.zeros(3)), 1, 0, as_fake(np.zeros(3))), ValueError, r"0 <= dest < 1, got 1"),
    ],
)
def test_arguments_are_validated(fake, call, error, message):
    with pytest.raises(error, match=message):
        call(NcclCommunicator(Single(), 0))
    with pytest.raises(ValueError, match="timeout must be"):
        NcclCommunicator(Single(), 0, timeout=0)


def test_a_failure_elsewhere_aborts_nccl(fake):
    """A rank that fails without a call to NCCL: the watch of the others ends what they wait for."""

    def rank(communicator):
        if communicator.rank == 1:
            raise ArithmeticError("NaN on rank 1")
        wait_until(lambda: "abort" in fake.calls)
        with pytest.raises(CommunicatorError, match="rank 1 failed: ArithmeticError: NaN on rank 1"):
            communicator.allreduce(as_fake(np.zeros(1)))

    with pytest.raises(ArithmeticError, match="NaN on rank 1"):
        run_ranks(2, on_fakes(rank), timeout=20)


def test_an_asynchronous_error_of_nccl_stops_all_ranks(fake):
    def rank(communicator):
        if communicator.rank == 1:
            communicator._comm.async_error = "a link is down"
        wait_until(lambda: communicator.cause)
        communicator.barrier()

    with pytest.raises(CommunicatorError, match="NCCL failed on rank 1: a link is down"):
        run_ranks(2, on_fakes(rank), timeout=20)
    wait_until(lambda: fake.calls.count("abort") == 2)


def test_a_refused_call_of_nccl_stops_all_ranks(fake, monkeypatch):
    def refuse(*_):
        raise fake.NcclError("invalid usage")

    def rank(communicator):
        monkeypatch.setattr(communicator._comm.__class__, "allReduce", refuse)
        communicator.allreduce(as_fake(np.zeros(1)))

    with pytest.raises(CommunicatorError, match=r"NCCL failed on rank \d in allreduce: invalid usage"):
        run_ranks(2, on_fakes(rank), timeout=20)


def test_a_call_that_does_not_end_is_aborted(fake, monkeypatch):
    monkeypatch.setattr(fake_nccl.Event, "done", False)

    def rank(communicator):
        communicator.allreduce(as_fake(np.zeros(1)))
        wait_until(lambda: communicator.cause)
        communicator.allreduce(as_fake(np.zeros(1)))

    with pytest.raises(CommunicatorError, match=r"rank \d waited 0\.05 s for the others in allreduce"):
        run_ranks(2, on_fakes(rank, timeout=0.05), timeout=20)


def test_a_lost_gpu_stops_all_ranks(fake):
    def rank(communicator):
        if communicator.rank == 1:
            communicator._comm.check_async_error = lambda: 1 / 0
        wait_until(lambda: communicator.cause)
        communicator.barrier()

    with pytest.raises(CommunicatorError, match="rank 1 lost its GPU: division by zero"):
        run_ranks(2, on_fakes(rank), timeout=20)


def test_abort_and_close(fake):
    communicator = NcclCommunicator(Single(), 0)
    communicator.abort("first")
    communicator.abort("second")
    with pytest.raises(CommunicatorError, match="first"):
        communicator.split(0)
    communicator.close()
    assert "destroy" not in fake.calls
    aborts = fake.calls.count("abort")
    forgotten = NcclCommunicator(Single(), 0)
    del forgotten  # it waits for no rank, and its watch ends by itself
    assert fake.calls.count("abort") == aborts + 1


def test_released_arrays_are_not_read(fake):
    """Looking at freed memory ends the process, so the watch looks before or after, not meanwhile."""

    def rank(communicator):
        comm, looks = communicator._comm, []
        looking, may_end = threading.Event(), threading.Event()

        def look():
            looking.set()
            assert may_end.wait(10)
            looks.append(communicator._held is None)

        comm.check_async_error = look
        assert looking.wait(10)
        closing = threading.Thread(target=communicator.close)
        closing.start()
        time.sleep(0.05)
        assert communicator._held is comm
        may_end.set()
        closing.join(10)
        assert communicator._held is None
        assert looks == [False]
        assert communicator._find_failure() == ""
        with pytest.raises(CommunicatorError, match="rank 0 has closed this communicator"):
            _ = communicator._comm

    run_ranks(1, on_fakes(rank), timeout=20)


def test_gpus_that_cannot_be_connected(fake):
    fake.broken = 0
    with pytest.raises(DeviceError, match="NCCL cannot connect rank 0 on cuda:0: no route; NCCL_DEBUG=INFO"):
        run_ranks(1, on_fakes(lambda c: None))


def test_without_nccl(monkeypatch):
    def missing(name):
        raise ImportError("libnccl.so.2")

    monkeypatch.setattr(device, "_cupy", lambda: None)
    monkeypatch.setattr(nccl.importlib, "import_module", missing)
    with pytest.raises(DeviceError, match=r"several GPUs need NCCL.*libnccl.so.2.*pip install nvidia-nccl-cu13"):
        nccl._modules()


def on_gpus(function, **options):
    from hybridmf.device.cuda import open_device

    def rank(control):
        gpu = open_device(f"cuda:{control.rank}")
        with gpu.active():
            communicator = NcclCommunicator(control, control.rank, **options)
            result = function(communicator, gpu)
            communicator.close()
            return result

    return rank


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_laws_on_gpus(size, ordered):
    need_gpus(size)
    run_ranks(size, on_gpus(lambda c, d: obeys_laws(c, d, in_order=ordered), ordered=ordered), timeout=120)


def obeys_laws(communicator, gpu, in_order=False):
    assert check_collectives(communicator, gpu.upload, gpu.download, in_order=in_order) > 80
    check_arguments(communicator, gpu.upload) if communicator.size > 1 else None


@pytest.mark.gpu
def test_large_arrays_on_gpus():
    """Longer than a launch, uneven, and sent while the device computes."""
    size = min(need_gpus(2), 4)

    def rank(communicator, _):
        import cupy

        total = sum(range(1, size + 1))
        counts = [(1 << 22) + 1000 * r for r in range(size)]
        whole = cupy.full(sum(counts), communicator.rank + 1, dtype=cupy.float32)
        for _ in range(5):
            part = communicator.reduce_scatter(whole, counts)
            assert part.shape == (counts[communicator.rank],)
            gathered = communicator.allgatherv(part, counts)
            assert bool((gathered == total).all())
            after, before = (communicator.rank + 1) % size, (communicator.rank - 1) % size
            answer = communicator.start_sendrecv([whole, part], after, before, [whole, cupy.empty(counts[before], "f")])
            busy = whole * 2
            received, piece = answer()
            assert bool((received == before + 1).all())
            assert bool((piece == total).all())
            assert bool((busy == 2 * communicator.rank + 2).all())
            communicator.barrier()

    run_ranks(size, on_gpus(rank), timeout=120)


@pytest.mark.gpu
def test_a_rank_that_fails_ends_the_waits_of_others():
    """Rank 0 waits in a kernel of NCCL for a rank that never comes."""
    need_gpus(2)

    def rank(communicator, _):
        import cupy

        communicator.allreduce(cupy.ones(4))
        communicator.barrier()
        if communicator.rank == 1:
            raise ArithmeticError("NaN on rank 1")
        communicator.allreduce(cupy.ones(1 << 20))
        communicator.barrier()

    started = time.monotonic()
    with RankThreads(2, timeout=120) as ranks, pytest.raises(ArithmeticError, match="NaN on rank 1"):
        ranks.run(on_gpus(rank))
    assert time.monotonic() - started < 60  # half the timeout
    run_ranks(2, on_gpus(obeys_laws), timeout=120)


@pytest.mark.gpu
def test_a_rank_that_hangs_ends_the_waits_of_others():
    need_gpus(2)

    def rank(communicator, _):
        import cupy

        if communicator.rank == 0:
            communicator.allreduce(cupy.ones(1 << 20))
        else:
            wait_until(lambda: communicator.cause, 60)
        communicator.barrier()

    with pytest.raises(CommunicatorError, match=r"rank 0 waited 2 s for the others in allreduce"):
        run_ranks(2, on_gpus(rank, timeout=2.0), timeout=120)
