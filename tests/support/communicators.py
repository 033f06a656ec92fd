"""The laws of the collectives."""

from __future__ import annotations

import numpy as np

from hybridmf.ranks.transport.messages import SMALL

DTYPES = [np.float32, np.float64, np.int32, np.int64, np.uint8]


def drawn(rank: int, shape=(7, 3), dtype=np.float32, whole=False) -> np.ndarray:
    """Contribution of a rank, whole numbers if requested; any rank can draw that of any other."""
    values = np.asarray(np.random.default_rng(100 + rank).normal(scale=10, size=shape))
    if whole or np.dtype(dtype).kind != "f":
        values = np.abs(values).round()
    return np.asarray(values).astype(dtype)


def in_rank_order(arrays) -> np.ndarray:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = np.asarray(total + array).astype(total.dtype)
    return total


# --------------------------------------------------------------------------------------------- the laws, one body


def laws(communicator, device=np.asarray, host=np.asarray, whole=False) -> int:
    """Everything a communicator promises, checked by each rank; the number of checks.

    `device` and `host` bring arrays to where the communicator wants them and back. With `whole` numbers sums are the
    same in any order.
    """
    checks = 0
    rank, size = communicator.rank, communicator.size
    after, before = (rank + 1) % size, (rank - 1) % size

    def same(ours, expected):
        nonlocal checks
        assert type(ours) is type(device(expected))
        assert ours.dtype == expected.dtype
        np.testing.assert_array_equal(host(ours), expected)
        ours[...] = 0  # what comes back is ours to write to
        checks += 1

    for dtype in DTYPES:
        for shape in [(7, 3), (0, 3), (), (4, 0), (SMALL // 4 + 5,)]:
            everyone = [drawn(r, shape, dtype, whole) for r in range(size)]
            mine = device(everyone[rank])
            same(communicator.allreduce(mine), in_rank_order(everyone))
            same(communicator.broadcast(mine, size - 1), everyone[-1])
            same(communicator.sendrecv(mine, after, before, mine), everyone[before])
            np.testing.assert_array_equal(host(mine), everyone[rank])
    for counts in ([3] * size, list(range(size)), [0] * size, [5] + [0] * (size - 1)):
        bounds = np.cumsum([0, *counts])
        parts = [drawn(r, (counts[r], 2)) for r in range(size)]
        same(communicator.allgatherv(device(parts[rank]), counts), np.concatenate(parts))
        sums = [drawn(r, (bounds[-1], 2), np.float32, whole) for r in range(size)]
        scattered = communicator.reduce_scatter(device(sums[rank]), counts)
        gathered, reduced = communicator.allgatherv(scattered, counts), communicator.allreduce(device(sums[rank]))
        np.testing.assert_array_equal(host(gathered), host(reduced))
        same(scattered, in_rank_order(sums)[bounds[rank] : bounds[rank + 1]])
    strided = [drawn(r, (6, 8), np.float64, whole) for r in range(size)]
    same(communicator.allreduce(device(strided[rank])[::2, ::2]), in_rank_order([a[::2, ::2] for a in strided]))
    communicator.barrier()

    half = communicator.split(rank % 2)
    members = list(range(rank % 2, size, 2))
    assert (half.rank, half.size) == (members.index(rank), len(members))
    same(half.allreduce(device(np.array([1 << rank]))), np.array([sum(1 << r for r in members)]))
    alone = half.split(half.rank)
    same(alone.allreduce(device(drawn(rank))), drawn(rank))
    alone.close()
    half.close()
    sent = [device(drawn(rank)), device(np.array(rank))]
    answer = communicator.start_sendrecv(sent, before, after, [device(drawn(0)), device(np.array(0))])
    same(communicator.allreduce(device(np.array([rank]))), np.array([size * (size - 1) // 2]))  # meanwhile
    received = answer()
    same(received[0], drawn(after))
    same(received[1], np.array(after))
    communicator.barrier()
    assert not communicator.cause
    return checks


# ------------------------------------------------------------------------------------------------ meetings of threads


def meet(communicator, what="here", timeout=20.0):
    communicator.transport.meet(communicator.context, communicator.members, communicator.rank, what, timeout)
