"""Initial factors drawn on the device: the bits of the host; emulated on the CPU, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from hybridmf.core.objective import Factors, Objective
from hybridmf.device.cuda import Device
from hybridmf.gpu.factors import to_device, to_host
from hybridmf.plan.start import DrawnFactors, Start, initial_state

DEGREES = np.arange(40) % 6


def factors(rank: int, biases: bool = False, dtype: type = np.float32, signed: bool = False) -> DrawnFactors:
    objective = Objective.explicit(0.1, "count", biases)
    state = initial_state(DEGREES, DEGREES, rank, dtype, objective, 0.0, 2**61 + 12345, Start(0.5, signed))
    assert isinstance(state.item, DrawnFactors)
    return state.item


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("rank", "width"), [(1, 4), (4, 8), (7, 8), (33, 36), (100, 104)])
def test_bits_of_the_host(rank: int, width: int, biases: bool, dtype: type, device: Device) -> None:
    drawn = factors(rank, biases, dtype, signed=biases)
    on_host = Factors(drawn.matrix, drawn.bias)
    expected, found = (to_device(device, given, width) for given in (on_host, drawn))
    np.testing.assert_array_equal(device.download(found.table), device.download(expected.table))
    assert found.factors == rank and (found.device_bias is not None) == biases
    if found.device_bias is not None:
        assert not device.download(found.device_bias).any()
    table = to_host(drawn, width).table
    np.testing.assert_array_equal(table, device.download(expected.table))


def test_parts_and_other_orders(device: Device) -> None:
    drawn, order = factors(9), np.random.default_rng(0).permutation(40)
    whole = device.download(to_device(device, drawn, 12).table)
    for rows in (slice(3, 17), slice(0, 0)):
        np.testing.assert_array_equal(device.download(to_device(device, drawn.part(rows), 12).table), whole[rows])
    shuffled = to_device(device, drawn.reordered(order).part(slice(5, 30)), 12)
    np.testing.assert_array_equal(device.download(shuffled.table), whole[order[5:30]])
