from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.errors import CommunicatorError
from hybridmf.plan.grid import even_bounds
from hybridmf.ranks.transport.communicator import Single


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9), st.sampled_from([0.0, 3.5]))
@settings(max_examples=80)
def test_ranges_cover_all_rows_and_are_even(degrees: list[int], parts: int, row_cost: float) -> None:
    bounds = even_bounds(np.array(degrees, dtype=np.int64), parts, row_cost)
    assert len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == len(degrees)
    assert (np.diff(bounds) >= 0).all()
    cost = np.array(degrees, dtype=float) + row_cost
    shares = [cost[a:b].sum() for a, b in itertools.pairwise(bounds)]
    assert max(shares) <= cost.sum() / parts + cost.max(initial=0) + 1e-9


def test_row_cost_moves_bounds() -> None:
    degrees = np.array([100, 1, 1, 1, 1, 1, 1, 1])
    assert even_bounds(degrees, 2)[1] == 1
    assert even_bounds(degrees, 2, row_cost=100)[1] == 4


def test_single_rank() -> None:
    comm = Single()
    ones = np.ones((3, 2))
    for result in (
        comm.allreduce(ones),
        comm.reduce_scatter(ones, [3]),
        comm.allgatherv(ones, [3]),
        comm.broadcast(ones),
        comm.sendrecv(ones, 0, 0, ones),
    ):
        assert result is not ones and np.array_equal(result, ones)
    assert comm.split(3).size == 1
    comm.barrier()
    comm.close()


def test_single_rank_stays_failed() -> None:
    comm = Single()
    comm.abort("first")
    comm.abort("second")
    with pytest.raises(CommunicatorError, match="first"):
        comm.barrier()
    with pytest.raises(CommunicatorError, match="first"):
        comm.allreduce(np.ones(1))
