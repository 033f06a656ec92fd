"""Pieces of rows added up, and the range of a table's rows: emulated on the CPU, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from hybridmf.device.cuda import Device
from hybridmf.gpu.rows import PARTS, THREADS, RowRange, add_pieces, clip_segments, read_range, widen_range
from support.half_sweeps import row_range


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (5, 4), (3, 3), (PARTS * THREADS * 4 + 16,)])
def test_pieces_are_added_in_order(dtype: str, shape: tuple[int, ...], device: Device) -> None:
    sums = np.random.default_rng(0).standard_normal((12, *shape)).astype(dtype)
    rows, slots = np.array([0, 3, 2]), np.array([4, 4, 5, 12])  # row 0 has no piece, row 1 is whole
    expected = sums.copy()
    expected[0] = 0
    expected[3] += sums[4]
    for piece in sums[5:12]:
        expected[2] += piece
    on_device = device.upload(sums)
    add_pieces(device, on_device, device.upload(rows), device.upload(slots))
    np.testing.assert_array_equal(device.download(on_device), expected)


def test_nothing_to_add(device: Device) -> None:
    sums = device.upload(np.ones((2, 3), np.float32))
    add_pieces(device, sums, device.upload(np.zeros(0, np.int64)), device.upload(np.zeros(1, np.int64)))
    assert np.all(device.download(sums) == 1)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (40, 100), (300, 36), (0, 4)])
def test_range_of_rows(shape: tuple[int, int], device: Device) -> None:
    table = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    if len(table) > 1:
        table[1] = 0
    peaks = np.abs(table).max(axis=1, initial=0)
    peaks = peaks[peaks > 0]
    expected = RowRange(float(peaks.max()), float(peaks.min())) if len(peaks) else RowRange(0.0, 0.0)
    assert row_range(device, device.upload(table)) == (expected, False)


@pytest.mark.parametrize(("n_rows", "n_solved", "bad"), [(3, 900, 899), (500, 3, 0), (0, 1, 0), (9, 9, None)])
def test_a_failure_is_seen_beside_the_range(n_rows: int, n_solved: int, bad: int | None, device: Device) -> None:
    table = np.full((n_rows, 4), 2, np.float32)
    status = np.zeros(n_solved, np.int32)
    if bad is not None:
        status[bad] = -7
    found, failed = row_range(device, device.upload(table), device.upload(status))
    assert found == (RowRange(2.0, 2.0) if n_rows else RowRange(0.0, 0.0)) and failed == (bad is not None)


def test_range_of_extremes(device: Device) -> None:
    def found(table: np.ndarray) -> RowRange:
        return row_range(device, device.upload(table))[0]

    table = np.array([[1e-45, 0], [-3e38, 1]], np.float32)
    assert found(table) == RowRange(float(np.float32(3e38)), float(np.float32(1e-45)))
    table[0, 1] = np.inf
    assert found(table).largest == np.inf
    table[1, 0] = np.nan
    assert np.isnan(found(table).largest) and found(table).least == np.inf
    assert found(np.zeros((3, 4), np.float32)) == RowRange(0.0, 0.0)


def test_arguments_are_checked(device: Device) -> None:
    with pytest.raises(TypeError, match="table must be float32"):
        row_range(device, device.upload(np.zeros((2, 2))))
    with pytest.raises(TypeError, match="status must be int32"):
        row_range(device, device.zeros((2, 2), np.float32), device.zeros(2, np.int64))
    with pytest.raises(TypeError, match="slots must be int64"):
        add_pieces(device, device.zeros((2, 2), np.float32), device.zeros(1, np.int64), device.zeros(3, np.int64))


def test_a_range_grows_with_each_table(device: Device) -> None:
    tables = [np.full((3, 4), value, np.float32) for value in (2, 0.5, 8)]
    status = np.array([0, 0, 7], np.int32)
    found = device.zeros(3, np.uint32)
    for table in tables:
        widen_range(device, found, device.upload(table))
    assert read_range(device.download(found)) == (RowRange(8.0, 0.5), False)
    widen_range(device, found, device.upload(tables[0]), device.upload(status))
    assert read_range(device.download(found)) == (RowRange(8.0, 0.5), True)


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_parts_have_the_range_of_all(bad: float | None, device: Device) -> None:
    table = np.random.default_rng(3).standard_normal((60, 5)).astype(np.float32)
    table[20:40] = 0
    if bad is not None:
        table[41, 2] = bad
    parts = [row_range(device, device.upload(table[first : first + 20]))[0] for first in (0, 20, 40)]
    found, whole = RowRange.of_all(parts), row_range(device, device.upload(table))[0]
    np.testing.assert_equal([found.largest, found.least], [whole.largest, whole.least])
    assert RowRange.of_all([parts[1]]) == RowRange.of_all([]) == RowRange(0.0, 0.0)


def test_a_small_array_arrives_when_it_is_waited_for(device: Device) -> None:
    arrays = [np.arange(n, dtype=dtype) for n, dtype in ((3, np.uint32), (1, np.float64), (0, np.int8))]
    on_device = [device.upload(array) for array in arrays]
    arriving = [device.begin_download(array) for array in on_device]
    for array in on_device:
        array[...] = 7  # launched after the copies
    for wait, array in zip(arriving, arrays, strict=True):
        np.testing.assert_array_equal(wait(), array, strict=True)
        np.testing.assert_array_equal(wait(), array)


@pytest.mark.parametrize("n_segments", [1, 40, 3 * THREADS + 1])
def test_segments_are_clipped_to_columns(n_segments: int, device: Device) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 12, n_segments)
    ends = np.cumsum(lengths)
    indices = np.concatenate([np.sort(rng.choice(30, length, replace=False)) for length in lengths]) - 10
    segments = np.column_stack((np.arange(n_segments) + 5, ends - lengths, ends)).astype(np.int64)
    on_device = device.upload(indices.astype(np.int32))
    found = device.download(clip_segments(device, device.upload(segments), on_device, 9, first_slot=5))
    for k, (slot, begin, end) in enumerate(found.tolist()):
        first, last = segments[k, 1:]
        inside = [at for at in range(first, last) if 0 <= indices[at] < 9]
        assert slot == k and list(range(begin, end)) == inside
    assert clip_segments(device, device.upload(segments[:0]), on_device, 9).shape == (0, 3)
