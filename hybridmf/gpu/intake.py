"""Checks ratings that are already on a GPU, and brings them into canonical order there.

The functions return None for arrays that fail a check. The caller then copies the arrays to the host, whose checks name
the entry and the remedy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.validate import MAX_AXIS, check_axes, checked_pointer
from ..device.cuda import Array, Device, gpu_of
from ..errors import RatingsError
from .matrix import DeviceMatrix

FORMATS = {"csr": sp.csr_array, "csc": sp.csc_array, "coo": sp.coo_array}


def is_sparse(given: Any) -> bool:
    """Whether an object has the attributes of a sparse matrix of CuPy, in one of `FORMATS`, and its values on a GPU."""
    return getattr(given, "format", None) in FORMATS and gpu_of(getattr(given, "data", None)) is not None


def _parts(matrix: Any) -> tuple[Any, Any, Any]:
    if matrix.format == "coo":
        return matrix.row, matrix.col, matrix.data
    return matrix.indptr, matrix.indices, matrix.data


def read_matrix(device: Device, matrix: Any, dtype: Any) -> DeviceMatrix | None:
    """Canonical copy of a sparse matrix on this device, as `is_sparse` accepts it; None if it is invalid.

    Its index arrays may be int64, unlike those of CuPy's classes.
    """
    if max(matrix.shape) > MAX_AXIS:
        return None
    first, second, data = map(device.adopt, _parts(matrix))
    with device.active():
        if matrix.format == "coo":
            return _from_triplets(device, first, second, data, matrix.shape, np.dtype(dtype))
        by_rows = matrix.format == "csr"
        shape = matrix.shape if by_rows else matrix.shape[::-1]
        found = _compressed(device, first, second, data, shape, np.dtype(dtype))
        if found is None:
            return None
        return _in_order(device, found if by_rows else found.transposed(device))


def host_matrix(device: Device, matrix: Any) -> Any:
    """Copy of a sparse matrix on this device as a SciPy matrix, without repairs."""
    found = FORMATS[matrix.format](matrix.shape, dtype=np.float32)
    names = ("row", "col", "data") if matrix.format == "coo" else ("indptr", "indices", "data")
    for name, part in zip(names, _parts(matrix), strict=True):
        setattr(found, name, host_array(device, part))
    return found


def host_array(device: Device, array: Any) -> np.ndarray:
    return device.download(device.adopt(array))


def uploaded(
    device: Device, shape: tuple[int, int], indptr: np.ndarray, indices: np.ndarray, data: np.ndarray
) -> DeviceMatrix | None:
    """Copy of the CSR arrays of a matrix on the host, whose `indptr` is checked; None unless they are canonical."""
    starts, columns, values = (device.upload(array) for array in (indptr, indices, data))
    found = DeviceMatrix(shape, indptr, starts, columns, values, data.dtype)
    return found if found.is_canonical(device) else None


def read_triplets(
    device: Device, rows: Any, columns: Any, values: Any, shape: tuple[int | None, int | None], dtype: Any
) -> DeviceMatrix | None:
    """Canonical matrix of coordinate triplets on this device; None if they are invalid.

    Without `values` every entry is 1; where the shape is None, it is the largest position + 1.
    """
    users, items = device.adopt(rows), device.adopt(columns)
    with device.active():
        if users.dtype.kind not in "iu" or items.dtype.kind not in "iu":
            return None
        if values is None:
            numbers = device.empty(users.shape, dtype)
            numbers[...] = 1
        else:
            numbers = device.adopt(values)
        n_users, n_items = (
            (int(index.max()) + 1 if index.size else 0) if size is None else size
            for index, size in zip((users, items), shape, strict=True)
        )
        if max(n_users, n_items) > MAX_AXIS:
            return None
        check_axes("ratings", (n_users, n_items))
        return _from_triplets(device, users, items, numbers, (n_users, n_items), np.dtype(dtype))


def without_zeros(device: Device, matrix: DeviceMatrix) -> DeviceMatrix:
    with device.active():
        keep = matrix.data != 0
        before = device.zeros(matrix.nnz + 1, np.int64)
        before[1:] = keep.cumsum()
        starts = before[matrix.starts]
        indptr = device.download(starts)
        return DeviceMatrix(matrix.shape, indptr, starts, matrix.indices[keep], matrix.data[keep], matrix.dtype)


def _compressed(
    device: Device, indptr: Array, indices: Array, data: Array, shape: tuple[int, int], dtype: np.dtype
) -> DeviceMatrix | None:
    """A compressed matrix with valid indices and values, in any order; None if they are invalid."""
    try:
        pointer = checked_pointer(device.download(indptr), shape[0], "indptr")
    except RatingsError:
        return None
    nnz = int(pointer[-1])
    if indices.ndim != 1 or data.ndim != 1 or nnz > min(len(indices), len(data)):
        return None
    columns, numbers = _positions(indices[:nnz], shape[1]), _numbers(data[:nnz], dtype)
    if columns is None or numbers is None:
        return None
    return DeviceMatrix(shape, pointer, device.upload(pointer), columns, numbers, dtype)


def _from_triplets(
    device: Device, rows: Array, columns: Array, values: Array, shape: tuple[int, int], dtype: np.dtype
) -> DeviceMatrix | None:
    if not rows.shape == columns.shape == values.shape or rows.ndim != 1:
        return None
    users, items, numbers = _positions(rows, shape[0]), _positions(columns, shape[1]), _numbers(values, dtype)
    if users is None or items is None or numbers is None:
        return None
    # As on the host, two stable sorts: by column, then by row. The transposition kernels sort by column; the first call
    # treats all entries as one row, and the second one moves the rows' bits in place of values.
    by_column = _as_one_row(device, items, numbers, shape[1]).transposed(device)
    users = _as_one_row(device, items, users.view(np.float32), shape[1]).transposed(device).data.view(np.int32)
    shape = (shape[1], shape[0])
    columns_first = DeviceMatrix(shape, by_column.indptr, by_column.starts, users, by_column.data, dtype)
    return _in_order(device, columns_first.transposed(device))


def _as_one_row(device: Device, columns: Array, data: Array, n_columns: int) -> DeviceMatrix:
    bounds = np.array([0, len(columns)], dtype=np.int64)
    return DeviceMatrix((1, n_columns), bounds, device.upload(bounds), columns, data, data.dtype)


def _positions(index: Array, count: int) -> Array | None:
    """Indices as int32; None unless they are integers with 0 <= index < count."""
    if index.dtype.kind not in "iu" or (index.size and not 0 <= int(index.min()) <= int(index.max()) < count):
        return None
    return index.astype(np.int32, copy=False)


def _numbers(values: Array, dtype: np.dtype) -> Array | None:
    """Values in `dtype`; None unless they are real numbers, and finite in `dtype`."""
    if values.dtype.kind not in "fiub":
        return None
    with np.errstate(over="ignore"):
        numbers = values.astype(dtype, copy=False)
    return numbers if bool((abs(numbers) <= np.finfo(dtype).max).all()) else None


def _in_order(device: Device, matrix: DeviceMatrix) -> DeviceMatrix | None:
    """The matrix with ascending columns in each row; None if a pair repeats."""
    if not _ascends(matrix):
        matrix = matrix.transposed(device).transposed(device)
    return matrix if _ascends(matrix) else None


def _ascends(matrix: DeviceMatrix) -> bool:
    """Whether columns ascend strictly in each row."""
    ascending = matrix.indices[1:] > matrix.indices[:-1]
    firsts = matrix.starts[1:-1]
    firsts = firsts[(firsts > 0) & (firsts < matrix.nnz)]
    ascending[firsts - 1] = True  # columns may descend from one row to the next
    return bool(ascending.all())
