"""Ratings on a device: CSR arrays, and their transposition by cuda/transpose.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp

from ..core.system import ceil_div
from ..core.validate import csr_arrays
from ..device.cuda import Array, Device, Kernel
from ..errors import DeviceMemoryError
from .arrays import THREADS, grid_of
from .launch import check_all, get_kernel

KERNELS = ("count_faults", "count_columns", "column_places", "scatter_entries")
WARPS_PER_SM = 32  # parts of a transposition per multiprocessor, if there is memory for their counts
LEAST_PART = 1024  # minimum entries of a part of a transposition
COUNT_BYTES = 8  # maximum bytes of counts per entry of a transposition: the size of an entry of its result


@dataclass(frozen=True)
class DeviceMatrix:
    """A canonical CSR matrix on a device."""

    shape: tuple[int, int]
    indptr: np.ndarray  # int64 array, shape (n_rows + 1,): On the host
    starts: Array  # int64 array, shape (n_rows + 1,): `indptr` on the device
    indices: Array  # int32 array, shape (nnz,): Columns
    data: Array  # float array, shape (nnz,)
    dtype: np.dtype  # of `data`
    host: sp.csr_array | None = field(default=None, repr=False)  # the same matrix on the host, if it is there

    @classmethod
    def of(cls, device: Device, matrix: sp.csr_array | DeviceMatrix) -> DeviceMatrix:
        if isinstance(matrix, DeviceMatrix):
            return matrix
        indptr, indices, data = csr_arrays(matrix)
        starts, columns, values = (device.upload(array) for array in (indptr, indices, data))
        return cls(matrix.shape, indptr, starts, columns, values, data.dtype, matrix)

    @property
    def degrees(self) -> np.ndarray:
        return np.diff(self.indptr)

    @property
    def nnz(self) -> int:
        return int(self.indptr[-1])

    def is_canonical(self, device: Device) -> bool:
        """Whether columns are in range and ascend strictly in each row, and values are finite; `indptr` is valid."""
        n_rows, nnz = self.shape[0], self.nnz
        if not nnz:
            return True
        faults = device.zeros(1, np.uint64)
        kernel = self._kernel(device, "count_faults")
        sizes = (np.int64(n_rows), np.int64(nnz), np.int32(self.shape[1]))
        kernel(grid_of(device, max(nnz, n_rows)), (THREADS,), (faults, self.starts, self.indices, self.data, *sizes), 0)
        return not device.download(faults)[0]

    def _kernel(self, device: Device, name: str) -> Kernel:
        """A kernel of cuda/transpose.cu; the arrays are checked for all of them."""
        check_all(
            device,
            starts=(self.starts, np.int64, (self.shape[0] + 1,)),
            indices=(self.indices, np.int32, (self.nnz,)),
            data=(self.data, self.dtype, (self.nnz,)),
        )
        return get_kernel(device, "transpose.cu", name, REAL=self.dtype, THREADS=THREADS)

    def transposed(self, device: Device) -> DeviceMatrix:
        """The transpose, with the arrays of `hybridmf.formats.transpose`."""
        (n_rows, n_columns), nnz, real = self.shape, self.nnz, self.dtype
        kernel = functools.partial(self._kernel, device)
        totals = device.zeros(n_columns, np.int64)
        rows, values = device.empty(nnz, np.int32), device.empty(nnz, real)
        bounds, counts = _counts(device, nnz, n_columns)
        n_parts = len(bounds) - 1
        sizes = (np.int32(n_parts), np.int32(n_columns))

        warps = (ceil_div(n_parts, THREADS // 32),)
        if nnz:
            kernel("count_columns")(warps, (THREADS,), (counts, bounds, self.indices, *sizes), 0)
            kernel("column_places")(grid_of(device, n_columns), (THREADS,), (totals, counts, *sizes), 0)
        indptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(device.download(totals))))
        starts = device.upload(indptr)
        if nnz:
            given = (self.starts, self.indices, self.data)
            arguments = (rows, values, counts, bounds, starts, *given, np.int64(n_rows), *sizes)
            kernel("scatter_entries")(warps, (THREADS,), arguments, 0)
        return DeviceMatrix((n_columns, n_rows), indptr, starts, rows, values, real)


def _counts(device: Device, nnz: int, n_columns: int) -> tuple[Array, Array]:
    """First entry of each part, and its counts, zeros; fewer parts if memory is short."""
    parts = min(
        ceil_div(nnz, LEAST_PART),
        WARPS_PER_SM * device.spec.multiprocessors,
        COUNT_BYTES * nnz // (4 * max(1, n_columns)),
    )
    parts = max(1, parts)
    while True:
        try:
            counts = device.zeros((parts, n_columns), np.int32)
        except DeviceMemoryError:
            if parts == 1:
                raise
            parts //= 2
        else:
            return device.upload(np.arange(parts + 1, dtype=np.int64) * nnz // parts), counts
