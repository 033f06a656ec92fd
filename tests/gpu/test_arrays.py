"""Copies and sums of parts of arrays against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybridmf.gpu import arrays
from hybridmf.gpu.gram import gram_sum, weighted
from support.messages import says

KINDS = (np.float32, np.float64, np.int32)


def table(n: int, width: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 100, (n, width)).astype(dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("n", [0, 1, 300])
def test_blocks_are_copied_and_filled(device: Any, dtype: Any, n: int) -> None:
    source, target = table(n, 9, dtype), table(n, 11, dtype) + dtype(1)
    on_device = device.upload(target)
    arrays.copy(device, on_device[:, 2:7], device.upload(source)[:, 4:])
    target[:, 2:7] = source[:, 4:]
    np.testing.assert_array_equal(device.download(on_device), target)
    if dtype != np.int32:
        arrays.fill(device, on_device[:, 10:], 1)
        target[:, 10:] = 1
        np.testing.assert_array_equal(device.download(on_device), target)


def test_vectors_are_rows(device: Any) -> None:
    source = device.upload(table(2, 40))
    arrays.copy(device, source[1, :30], source[0, 10:])
    arrays.fill(device, source[1, 35:], 2)
    found = device.download(source)
    np.testing.assert_array_equal(found[1, :30], table(2, 40)[0, 10:])
    np.testing.assert_array_equal(found[1, 35:], np.full(5, 2))
    np.testing.assert_array_equal(found[1, 30:35], table(2, 40)[1, 30:35])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_rows_are_gathered(device: Any, dtype: Any, index: Any) -> None:
    rows = np.array([4, 0, 4, 299], index)
    for source in (table(300, 7, dtype), table(300, 1, dtype)[:, 0].copy()):
        found = arrays.gather(device, device.upload(source), device.upload(rows))
        np.testing.assert_array_equal(device.download(found), source[rows])
    assert arrays.gather(device, device.upload(source), device.upload(rows[:0])).shape == (0,)


def test_sums_have_the_rounding_of_their_dtype(device: Any) -> None:
    source = table(300, 1)[:, 0].copy()
    for dtype in (np.float32, np.float64):
        found = device.download(arrays.added(device, device.upload(source), 1 / 3, dtype))
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, source.astype(dtype) + dtype(1 / 3))


def test_gram_matrices_are_totalled_weighted_and_padded(device: Any) -> None:
    factors = table(5000, 20)
    total = gram_sum(device, device.upload(factors))
    exact = factors.astype(np.float64).T @ factors
    np.testing.assert_allclose(device.download(total), exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    for dtype in (np.float32, np.float64):
        gram = device.download(weighted(device, total, 18, dtype, 0.1))
        assert gram.dtype == dtype and not gram[18:].any() and not gram[:, 18:].any()
        np.testing.assert_array_equal(gram[:18, :18], (0.1 * device.download(total))[:18, :18].astype(dtype))


def test_arguments_are_checked(device: Any) -> None:
    wide, tall = device.upload(table(3, 4)), device.upload(table(4, 3))
    with pytest.raises(TypeError, match=says("target float32 (3, 4) and source float32 (4, 3) differ")):
        arrays.copy(device, wide, tall)
    with pytest.raises(TypeError, match=says("rows must be contiguous words; got float32, strides (4, 16)")):
        arrays.copy(device, tall, wide.T)
    with pytest.raises(TypeError, match=says("rows must be contiguous words; got float16")):
        arrays.fill(device, device.zeros((3, 4), np.float16), 1)
    with pytest.raises(TypeError, match="rows must be int64"):
        arrays.gather(device, wide, device.zeros(2, np.int16))
