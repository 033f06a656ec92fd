"""Ratings on a device and their transposition: emulated on the CPU, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from hybridmf.core.sparse import transposed
from hybridmf.core.validate import as_csr
from hybridmf.device.cuda import Device
from hybridmf.errors import DeviceMemoryError
from hybridmf.gpu import matrix as device_matrix
from hybridmf.gpu.matrix import LEAST_PART, DeviceMatrix


def random_csr(shape: tuple[int, int], nnz: int, dtype: str = "float32") -> sp.csr_array:
    rng = np.random.default_rng(nnz)
    # columns in a power law: neighbouring entries of a warp share columns
    rows, columns = rng.integers(shape[0], size=nnz), (shape[1] * rng.random(nnz) ** 4).astype(int)
    keys = np.unique(rows * shape[1] + columns)
    values = rng.standard_normal(len(keys))
    return as_csr(sp.csr_array((values, (keys // shape[1], keys % shape[1])), shape=shape), dtype=dtype)


def assert_transposed(device: Device, matrix: sp.csr_array) -> None:
    found, expected = DeviceMatrix.of(device, matrix).transposed(device), transposed(matrix)
    assert found.shape == expected.shape and found.nnz == expected.nnz
    np.testing.assert_array_equal(found.indptr, expected.indptr)
    np.testing.assert_array_equal(device.download(found.starts), expected.indptr)
    np.testing.assert_array_equal(device.download(found.indices), expected.indices)
    np.testing.assert_array_equal(device.download(found.data), expected.data)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "nnz"),
    [((1, 1), 1), ((5, 3), 0), ((40, 30), 31), ((400, 7), 900), ((3, 5000), 4000), ((900, 60), 9 * LEAST_PART)],
)
def test_transpose_is_that_of_the_host(shape: tuple[int, int], nnz: int, dtype: str, device: Device) -> None:
    assert_transposed(device, random_csr(shape, nnz, dtype))


def test_rows_without_entries_between_others(device: Device) -> None:
    dense = np.zeros((300, 4))
    dense[[5, 6, 200, 299]] = np.arange(1, 17).reshape(4, 4)
    assert_transposed(device, as_csr(sp.csr_array(dense)))


def test_one_row_with_all_entries(device: Device) -> None:
    assert_transposed(device, as_csr(sp.csr_array(np.arange(1, 5001, dtype=float)[None])))


def test_without_memory_for_counts_there_are_fewer_parts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, zeros = [], device.zeros

    def short(shape: int | tuple[int, ...], dtype: object) -> object:
        if isinstance(shape, tuple) and shape[0] > 2:
            refused.append(shape[0])
            raise DeviceMemoryError("none left")
        return zeros(shape, dtype)

    monkeypatch.setattr(device_matrix, "LEAST_PART", 100)
    # of the object: where other tests patched it, it has its own, before that of the class
    monkeypatch.setattr(device, "zeros", short)
    assert_transposed(device, random_csr((900, 60), 900))
    assert refused


def test_arguments_are_checked(device: Device) -> None:
    matrix = DeviceMatrix.of(device, random_csr((1, 3), 2))
    broken = DeviceMatrix((1, 3), matrix.indptr, matrix.starts, device.zeros(2, np.int64), matrix.data, matrix.dtype)
    with pytest.raises(TypeError, match="indices must be int32"):
        broken.transposed(device)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_faults_are_found_wherever_they_are(dtype: str, device: Device) -> None:
    matrix = random_csr((900, 60), 9 * LEAST_PART, dtype)
    indptr, last = matrix.indptr, matrix.nnz - 1

    def canonical(part: str | None = None, at: int = 0, value: float = 0) -> bool:
        held = DeviceMatrix.of(device, matrix)
        if part is not None:
            getattr(held, part)[at] = value
        return held.is_canonical(device)

    assert canonical()
    for at in (0, 1, 4000, last):
        for value in (np.nan, np.inf, -np.inf):
            assert not canonical("data", at, value)
        for value in (-1, 60, np.iinfo(np.int32).min, np.iinfo(np.int32).max):
            assert not canonical("indices", at, value)
    for row in (0, 450, 899):  # its second entry repeats the first, then falls
        first = int(matrix.indices[indptr[row]])
        assert not canonical("indices", indptr[row] + 1, first)
        assert not canonical("indices", indptr[row] + 1, max(first - 1, 0))
    empty = random_csr((5, 3), 0, dtype)
    assert DeviceMatrix.of(device, empty).is_canonical(device)
