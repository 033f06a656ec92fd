"""Validation of all input: hyperparameters, identifiers, rating matrices.

Every message names the argument, the value, the accepted values and the remedy. Kernels trust validated input, so the
arrays of a validated matrix belong to the library (`owned`): no caller, callback or thread can change them afterwards.
"""

from __future__ import annotations

import logging
import math
import numbers
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from .. import _formats
from ..errors import DuplicateEntriesError, MemoryBudgetError, RatingsError
from .system import available_cores, available_memory
from .triplets import refuse_triplets

logger = logging.getLogger("hybridmf")

MAX_FACTORS = 2048  # largest rank: a rank-2048 system is 32 MB in float64, one per thread
INT32_LIMIT = 2**31 - 1  # entries (nnz) from which index pointers become int64; defined here only. Tests lower it.
MAX_AXIS = 2**31 - 1  # most rows and most columns: indices are int32 for any nnz
MANY_POSITIONS = 10**7  # number of users and items from which the available memory is checked before they are counted
ROW_BYTES = 64  # memory of a row or column while entries are counted
MAX_N = MAX_AXIS  # largest number of results (``N``): one that exceeds the number of positions is a typing error
MAX_THREADS = 4096  # most threads; each has a workspace
MERGE_RULES = ("error", "sum", "mean", "first", "last", "max")  # values of ``duplicates=``

MERGE_HINT = 'Merge them with duplicates="sum", "mean", "first", "last" or "max"'


# ---------------------------------------------------------------------------------------------- scalars and names


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as int; TypeError unless integral, ValueError outside [low, high]."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    number = int(value)
    if number < low or (high is not None and number > high):
        wanted = f"{name} >= {low}" if high is None else f"{low} <= {name} <= {high}"
        # Python refuses to print integers of thousands of digits
        shown = number if number.bit_length() <= 128 else f"an integer of {number.bit_length()} bits"
        raise ValueError(f"{name} must satisfy {wanted}, got {shown}")
    return number


def check_real(name: str, value: Any, low: float = -math.inf, *, strict: bool = False) -> float:
    """Return `value` as float; TypeError unless a real number, ValueError if not finite or below `low`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got {type(value).__name__} beyond the largest float") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    if number < low or (strict and number == low):
        raise ValueError(f"{name} must be {'>' if strict else '>='} {low:g}, got {number:g}")
    return number


def check_range(name: str, value: Any, expected: str = "a pair (low, high)") -> tuple[float, float]:
    """Return `value` as a pair of floats, the first not above the second; messages say what is `expected`."""
    if not isinstance(value, (tuple, list, np.ndarray)) or len(value) != 2:
        raise TypeError(f"{name} must be {expected}, got {value!r} of type {type(value).__name__}")
    low, high = (check_real(name, end) for end in value)
    if low > high:
        raise ValueError(f"{name} must be {expected} with low <= high, got {low:g} and {high:g}")
    return low, high


def check_bool(name: str, value: Any) -> bool:
    """Return `value` as bool; TypeError for other truthy values."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
    return bool(value)


def check_choice(name: str, value: Any, known: Sequence[Any]) -> Any:
    """Return the one of `known` that `value` (NumPy scalars included) is; the ValueError lists them."""
    value = value.item() if isinstance(value, np.generic) else value
    for choice in known:
        if type(choice) is type(value) and choice == value:
            return choice
    raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")


def check_path(name: str, value: Any) -> str:
    """Return a path as text; "" is refused, which pathlib takes for the current folder."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a path (str or os.PathLike), got {value!r} of type {type(value).__name__}")
    if not path or "\0" in path:
        raise ValueError(f'{name} must be a path without zero bytes, got {path!r}; "." is the current folder')
    return path


def check_rng(random_state: Any) -> np.random.Generator:
    """A Generator from None, an int seed, a Generator, a SeedSequence or a legacy RandomState."""
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(0, 2**31 - 1))
    if random_state is None or isinstance(random_state, (np.random.Generator, np.random.SeedSequence)):
        return np.random.default_rng(random_state)
    if isinstance(random_state, numbers.Integral) and not isinstance(random_state, bool):
        if random_state < 0:
            raise ValueError(f"random_state must be >= 0, got {random_state}")
        return np.random.default_rng(int(random_state))
    raise TypeError(
        "random_state must be None, an integer, a numpy Generator or RandomState, "
        f"got {random_state!r} of type {type(random_state).__name__}"
    )


def seed_of(random_state: Any) -> int:
    """63 bits by `random_state`: of an integer the same ones every time, of a generator the next ones."""
    return int(check_rng(random_state).integers(np.iinfo(np.int64).max))


def check_threads(num_threads: int | None) -> int:
    """Number of threads: None means every core this process may run on; 0 and negative counts are refused."""
    if num_threads is not None:
        return check_int("num_threads", num_threads, 1, MAX_THREADS)
    try:
        limit = int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0])  # of the outermost level
    except ValueError:  # unset or invalid
        limit = 0
    return min(limit if limit > 0 else available_cores(), MAX_THREADS)


def check_ids(name: str, ids: Any, count: int, counted: str) -> np.ndarray:
    """Positions as an int64 vector, each 0 <= id < count; `counted` is e.g. ``"n_items"``."""
    if type(ids) is int and 0 <= ids < count:  # requests for one user, a tenth of whose time the checks below take
        return np.array([ids], dtype=np.int64)
    refuse_masked(name, ids)
    array = np.asarray(ids)
    if array.ndim > 1:
        raise ValueError(f"{name} must be one position or a vector of them, got an array of shape {array.shape}")
    array = np.atleast_1d(array)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype == bool or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"{name} must be integers (positions, 0 <= id < {counted}={count}), got dtype {array.dtype}; "
            "labels are turned into positions by Ratings.user_index and Ratings.item_index"
        )
    bad = np.flatnonzero((array < 0) | (array >= count))
    if bad.size:
        raise ValueError(f"{name} has {array[bad[0]]} at position {bad[0]}; expected 0 <= id < {counted}={count}")
    return array.astype(np.int64, copy=False)


# ---------------------------------------------------------------------------------------------------------- ownership


class _Owned(np.ndarray):
    """Memory that only the library refers to: the mark by which `owned` recognizes it."""


def frozen(array: np.ndarray) -> np.ndarray:
    """A read-only view of an array that only the library holds; NumPy never makes it writable again."""
    if _is_frozen(array):
        return array
    return np.asarray(memoryview(np.ascontiguousarray(array).view(_Owned).data).toreadonly())


FEW_BYTES = 1 << 22  # copied by one thread


def owned(array: np.ndarray, dtype: Any = None) -> np.ndarray:
    """The values of an array where no caller can change them: `array` itself if it is `frozen` already, else a copy."""
    if _is_frozen(array) and array.flags.c_contiguous and dtype in (None, array.dtype):
        return array
    if array.ndim != 1 or not array.flags.c_contiguous or dtype not in (None, array.dtype) or array.dtype.hasobject:
        return frozen(np.array(array, dtype=dtype, order="C"))
    copy = np.empty(array.shape, array.dtype)
    threads = None if array.nbytes > FEW_BYTES else 1  # others may be late on busy cores
    _formats.copied(array.view(np.uint8), copy.view(np.uint8), threads)
    return frozen(copy)


def _is_frozen(array: np.ndarray) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray) and not base.flags.writeable:
        base = base.base
    return isinstance(base, memoryview) and base.readonly and isinstance(base.obj, _Owned)


def refuse_masked(name: str, values: Any) -> None:
    """Refuse masked elements of a vector, which NumPy's functions would take for values."""
    masked = np.flatnonzero(np.ma.getmaskarray(values)) if isinstance(values, np.ma.MaskedArray) else np.empty(0)
    if masked.size:
        more = f" (and {masked.size - 1} more)" if masked.size > 1 else ""
        raise RatingsError(
            f"{name} is masked at position {masked[0]}{more}; every element needs a value: leave masked ones out, "
            f"as in {name}[~numpy.ma.getmaskarray({name})]"
        )


def refuse_gpu(matrix: Any, name: str) -> None:
    """Refuse an array or matrix on a GPU where ratings on the host are expected."""
    values = matrix.data if isinstance(getattr(matrix, "format", None), str) else matrix
    if hasattr(values, "__cuda_array_interface__"):
        raise TypeError(
            f"{name} is on a GPU; fit and PreparedRatings take sparse matrices from there "
            f"(cupyx.scipy.sparse.csr_matrix), otherwise copy it to the host: {name}.get()"
        )


def without_mask(matrix: Any, name: str) -> Any:
    """A dense matrix whose masked cells are 0, that is, absent entries; anything else as it is."""
    if not isinstance(matrix, np.ma.MaskedArray):
        return matrix
    _check_value_dtype(name, matrix.dtype)
    return matrix.filled(0)


# ------------------------------------------------------------------------------------------------------- matrices


def index_pointer_dtype(nnz: int) -> type:
    """int32 while positions up to nnz fit, int64 beyond."""
    return np.int64 if nnz > INT32_LIMIT else np.int32


def as_csr(
    matrix: Any,
    *,
    name: str = "user_items",
    dtype: Any = np.float32,
    drop_zeros: bool = False,
    duplicates: str = "error",
    sort: bool = True,
) -> sp.csr_array:
    """Validated canonical CSR: sorted int32 column indices, no duplicates, finite real values of `dtype`.

    Takes any SciPy sparse format, Ratings, or a 2-D array. Zeros and masked cells of a dense array, and zeros in BSR
    blocks and DIA diagonals, which are padding, are absent entries; explicit zeros of the other formats are entries,
    unless `drop_zeros`. `sort=False` refuses CSR whose columns do not ascend within rows. The arrays of the result are
    `owned`: read-only, and copies unless `matrix` has such arrays itself, as that of Ratings has.
    """
    check_choice("duplicates", duplicates, MERGE_RULES)
    matrix = getattr(matrix, "user_items", matrix)  # a Ratings object
    if not sp.issparse(matrix):
        refuse_gpu(matrix, name)
        refuse_triplets(matrix, name)
        return _from_dense(matrix, name, dtype)
    if matrix.ndim != 2:
        raise RatingsError(
            f"{name} must have 2 dimensions (n_users, n_items), got shape {matrix.shape}; reshape one row to "
            f"{name}.reshape(1, -1)"
        )
    _check_value_dtype(name, matrix.dtype)
    if max(matrix.shape) > MAX_AXIS:
        raise RatingsError(f"{name} has shape {matrix.shape}; at most {MAX_AXIS} rows and columns are supported")
    if matrix.format not in ("csr", "csc", "coo"):
        if matrix.format == "lil":
            _check_lists(matrix, name)
        padded, matrix = matrix.format in ("bsr", "dia"), matrix.tocoo(copy=True)
        if padded:
            matrix.eliminate_zeros()
    if matrix.format != "csr":
        rows, columns, values = (
            _expand_csc(matrix, name) if matrix.format == "csc" else (matrix.row, matrix.col, matrix.data)
        )
        return from_triplets(
            rows, columns, values, matrix.shape, name=name, dtype=dtype, drop_zeros=drop_zeros, duplicates=duplicates
        )
    indptr, indices, data = _own_compressed(matrix, name, dtype)
    if data.dtype == dtype and _formats.is_canonical(indptr, indices, data, matrix.shape[1]):
        return _assemble(indptr, indices, data, matrix.shape, drop_zeros)
    _check_compressed(matrix, indices, name)
    indptr, indices, data = _sorted_unique(indptr, indices, data, matrix.shape, name, duplicates, sort)
    data = _finite_values(data, indices, indptr, name, dtype)
    return _assemble(indptr, indices, data, matrix.shape, drop_zeros)


def one_row(matrix: Any) -> Any:
    """A one-dimensional sparse array, such as row ``A[u]`` of one, as a matrix with one row; anything else as it is."""
    return matrix.reshape(1, -1) if sp.issparse(matrix) and matrix.ndim == 1 else matrix


def one_column(matrix: Any) -> Any:
    """A one-dimensional sparse array, such as column ``A[:, i]`` of one, as a matrix with one column."""
    return matrix.reshape(-1, 1) if sp.issparse(matrix) and matrix.ndim == 1 else matrix


def from_triplets(
    rows: Any,
    columns: Any,
    values: Any,
    shape: tuple[int, int],
    *,
    name: str = "ratings",
    dtype: Any = np.float32,
    drop_zeros: bool = False,
    duplicates: str = "error",
) -> sp.csr_array:
    """Canonical CSR from coordinate triplets; the same checks and errors as `as_csr`, in O(nnz)."""
    check_choice("duplicates", duplicates, MERGE_RULES)
    check_axes(name, shape)
    rows = _checked_positions(rows, shape[0], f"{name} row index", "n_users")
    columns = _checked_positions(columns, shape[1], f"{name} column index", "n_items")
    refuse_masked(f"{name} values", values)
    values = np.asarray(values)
    if not len(rows) == len(columns) == len(values):
        raise RatingsError(
            f"{name} has {len(rows)} row indices, {len(columns)} column indices and {len(values)} values"
        )
    values = _real_values(name, values)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        k = bad[0]
        raise RatingsError(
            f"{name} has the value {values[k]} at entry {k} (row {rows[k]}, column {columns[k]}); "
            "values must be finite: remove or replace such entries"
        )
    work = _carried(values, dtype, duplicates)
    if np.any(rows[1:] < rows[:-1]):
        columns_first = _formats.by_column(rows, columns, work, shape[1])
        pointer, columns, work = _formats.transpose(*columns_first, shape[0])
    else:
        pointer = row_pointer(rows, shape[0])
    pointer, indices, data = _sorted_unique(pointer, columns, work, shape, name, duplicates)
    data = _finite_values(data, indices, pointer, name, dtype)
    return _assemble(pointer, indices, data, shape, drop_zeros)


def in_matrix_order(rows: Any, columns: Any, numbers: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Numbers or times of 8 bytes of triplets without repeated pairs, in the order of entries of `from_triplets`."""
    users, items = (np.ascontiguousarray(index, dtype=np.int32) for index in (rows, columns))
    carried = np.ascontiguousarray(numbers).view(np.float64)  # which is moved and never read
    by_column = _formats.by_column(users, items, carried, shape[1])
    return np.asarray(_formats.transpose(*by_column, shape[0])[2].view(numbers.dtype))


def _carried(values: np.ndarray, dtype: Any, duplicates: str) -> np.ndarray:
    """A copy of values to sort: in `dtype` if nothing is to be merged and none overflows, else in float64."""
    if duplicates == "error":
        with np.errstate(over="ignore"):
            narrow = np.array(values, dtype=dtype, order="C")
        if np.all(np.isfinite(narrow)):
            return narrow
    return np.array(values, dtype=np.float64, order="C")


def check_axes(name: str, shape: tuple[int, int]) -> None:
    """Refuse more rows and columns, though empty, than can be counted in memory: mostly ids taken for positions."""
    if sum(shape) < MANY_POSITIONS:
        return
    check_memory(
        f"{name} has positions for {shape[0]:,} users and {shape[1]:,} items: to count their entries",
        ROW_BYTES * sum(shape),
        "ids that are no positions from 0 on go in as labels: Ratings.from_frame, or an object array to "
        "Ratings.from_coo",
    )


def check_memory(work: str, needed: int, way_out: str) -> None:
    free = available_memory()
    if free is not None and needed > free:
        raise MemoryBudgetError(
            f"{work} takes {needed / 2**20:,.0f} MiB of memory and {free / 2**20:,.0f} MiB are free; {way_out}"
        )


def check_shape(name: str, matrix: Any, expected: tuple[int | None, int | None], axes: tuple[str, str]) -> None:
    """Raise unless `matrix.shape` agrees with `expected` (None: any); the message names both axes and the transpose."""
    shape = matrix.shape
    if all(want is None or have == want for have, want in zip(shape, expected, strict=True)):
        return
    wanted = ", ".join(axis if want is None else f"{axis}={want}" for axis, want in zip(axes, expected, strict=True))
    message = f"{name} has shape {tuple(shape)}; expected ({wanted})"
    swapped = shape[::-1]
    if all(want is None or have == want for have, want in zip(swapped, expected, strict=True)):
        rows, columns = (axis.removeprefix("n_").removeprefix("number of ") for axis in axes)
        message += f": rows are {rows} and columns are {columns}, pass {name}.T"
    raise RatingsError(message)


def check_nonempty(matrix: sp.csr_array, name: str) -> None:
    """Raise unless there is a row, a column and an entry to learn from."""
    if 0 in matrix.shape:
        raise RatingsError(f"{name} has shape {matrix.shape}: it needs at least one user (row) and one item (column)")
    if matrix.nnz == 0:
        raise RatingsError(f"{name} of shape {matrix.shape} has no entries; at least one rating is needed to fit")


def _check_value_dtype(name: str, dtype: np.dtype) -> None:
    if dtype.kind == "c":
        raise TypeError(f"{name} has complex values (dtype {dtype}). Complex data not supported: pass real ratings")
    if dtype.kind not in "fiubO":
        raise TypeError(f"{name} has dtype {dtype}; ratings must be real numbers (float or integer)")


def _real_values(name: str, values: np.ndarray) -> np.ndarray:
    """The values, which are refused unless real; objects as float64."""
    _check_value_dtype(name, values.dtype)
    try:
        return values.astype(np.float64) if values.dtype == object else values
    except (TypeError, ValueError) as error:
        message = f"{name} has dtype object with a value that is no number ({error}); pass real ratings"
        raise TypeError(message) from error


def _from_dense(matrix: Any, name: str, dtype: Any) -> sp.csr_array:
    array = np.asarray(without_mask(matrix, name))
    if array.ndim != 2:
        raise RatingsError(
            f"{name} must be a sparse or dense matrix of shape (n_users, n_items), "
            f"got {type(matrix).__name__} of {array.ndim} dimension(s)"
        )
    array = _real_values(name, array)
    rows, columns = np.nonzero(array)
    return from_triplets(rows, columns, array[rows, columns], array.shape, name=name, dtype=dtype)


def _checked_positions(index: Any, count: int, what: str, counted: str) -> np.ndarray:
    refuse_masked(what, index)
    index = np.asarray(index)
    if index.ndim != 1:
        raise RatingsError(f"{what} must be one-dimensional, got shape {index.shape}")
    if index.size == 0:
        return np.empty(0, dtype=np.int32)
    if not np.issubdtype(index.dtype, np.integer):
        raise TypeError(f"{what} must be integers, got dtype {index.dtype}")
    narrow = owned(index, np.int32)  # what is checked is a copy, which no caller can change before a kernel reads it
    outside = (narrow < 0) | (narrow >= count)
    if index.dtype != np.int32:
        outside |= narrow != index  # wider integers that wrapped around
    bad = np.flatnonzero(outside)
    if bad.size:
        k = bad[0]
        raise RatingsError(f"{what} {index[k]} at entry {k} is out of range; expected 0 <= index < {counted}={count}")
    return narrow


def _check_lists(matrix: Any, name: str) -> None:
    """Refuse a LIL matrix whose lists contradict each other: SciPy's conversion would write beyond its arrays."""
    lists = [[row if isinstance(row, list) else None for row in side] for side in (matrix.rows, matrix.data)]
    lengths = [[-1 if row is None else len(row) for row in side] for side in lists]
    if lengths[0] != lengths[1] or len(lengths[0]) != matrix.shape[0] or -1 in lengths[0]:
        raise RatingsError(f"{name} is corrupt: rows and data of a LIL matrix need a list of equal length for each row")


def _own_compressed(matrix: Any, name: str, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give indptr (int64), indices (int32) and data of a CSR or CSC matrix; `_check_compressed` checks the indices.

    The index arrays are `owned`, and so are values of `dtype`; others are shared, and converted by the caller.
    """
    major = matrix.shape[0 if matrix.format == "csr" else 1]
    for part in ("indptr", "indices", "data"):
        refuse_masked(f"{name}.{part}", getattr(matrix, part))
    indices, data = np.asarray(matrix.indices), np.asarray(matrix.data)
    indptr = checked_pointer(matrix.indptr, major, name)
    if indices.ndim != 1 or data.ndim != 1:
        raise RatingsError(f"{name} is corrupt: indptr, indices and data must be vectors")
    if not np.issubdtype(indices.dtype, np.integer):
        raise RatingsError(f"{name} is corrupt: indices have dtype {indices.dtype}, expected integers")
    nnz = int(indptr[-1])
    if nnz > len(indices) or nnz > len(data):
        raise RatingsError(
            f"{name} is corrupt: indptr ends at {nnz}, but there are {len(indices)} indices and {len(data)} values"
        )
    if indices.dtype != np.int32:
        _check_compressed(matrix, indices[:nnz], name)
    data = _real_values(name, data)
    values = owned(data[:nnz]) if data.dtype == dtype else np.ascontiguousarray(data[:nnz])
    return indptr, owned(indices[:nnz], np.int32), values


def _check_compressed(matrix: Any, indices: np.ndarray, name: str) -> None:
    """Refuse indices of a CSR or CSC matrix that are out of range."""
    axis, counted, minor = ("column", "n_items", matrix.shape[1])
    if matrix.format == "csc":
        axis, counted, minor = ("row", "n_users", matrix.shape[0])
    bad = np.flatnonzero((indices < 0) | (indices >= minor))
    if bad.size:
        index = indices[bad[0]]
        problem = f"a negative {axis} index ({index}" if index < 0 else f"the {axis} index {index} (out of range"
        raise RatingsError(f"{name} has {problem} at entry {bad[0]}); expected 0 <= index < {counted}={minor}")


def checked_pointer(indptr: Any, n_rows: int, name: str) -> np.ndarray:
    """`indptr` of a compressed matrix as int64 of our own: n_rows + 1 integers from 0 on that never fall."""
    given = np.asarray(indptr)
    if given.ndim != 1:
        raise RatingsError(f"{name} is corrupt: indptr, indices and data must be vectors")
    if not np.issubdtype(given.dtype, np.integer):
        raise RatingsError(f"{name} is corrupt: indptr has dtype {given.dtype}, expected integers")
    pointer = owned(given, np.int64)
    if len(pointer) != n_rows + 1 or pointer[0] != 0:
        raise RatingsError(
            f"{name} is corrupt: indptr has {len(pointer)} elements starting at "
            f"{pointer[0] if len(pointer) else 'none'}; expected {n_rows + 1} starting at 0"
        )
    steps = np.flatnonzero(pointer[1:] < pointer[:-1])
    if steps.size:
        k = steps[0]
        raise RatingsError(f"{name} is corrupt: indptr falls from {given[k]} to {given[k + 1]} at position {k}")
    return pointer


def _expand_csc(matrix: Any, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    indptr, indices, data = _own_compressed(matrix, name, None)
    _check_compressed(matrix, indices, name)
    return indices, frozen(np.repeat(np.arange(matrix.shape[1], dtype=np.int32), np.diff(indptr))), data


def _sorted_unique(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    shape: tuple[int, int],
    name: str,
    duplicates: str,
    sort: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort each row's columns (stable) and settle duplicates; copies only when something has to change."""
    order, first = _formats.row_order_status(indptr, indices)
    if order == _formats.SORTED_UNIQUE:
        return indptr, indices, data
    if order == _formats.UNSORTED and not sort:
        falls = np.flatnonzero(np.diff(indices) < 0) + 1
        first = falls[~np.isin(falls, indptr)][0]
        raise RatingsError(
            f"{name} has unsorted column indices in row {_row_of(indptr, first)} ({indices[first - 1]} before "
            f"{indices[first]}); call {name}.sort_indices() first"
        )
    if order == _formats.UNSORTED:
        logger.debug("%s: column indices are not sorted within rows; sorting a copy", name)
        # Two stable transpositions sort in O(nnz) and keep the input order of equal pairs.
        work = np.ascontiguousarray(data, dtype=np.float64)
        indptr, indices, data = _formats.transpose(*_formats.transpose(indptr, indices, work, shape[1]), shape[0])
        order, first = _formats.row_order_status(indptr, indices)
        if order == _formats.SORTED_UNIQUE:
            return indptr, indices, data
    if duplicates == "error":
        raise DuplicateEntriesError(
            f"{name} has more than one entry for the pair (row {_row_of(indptr, first)}, column {indices[first]}): "
            f"values {data[first - 1]:g} and {data[first]:g}. "
            f"{repeats_text(repeats(rows_of_entries(indptr), indices, data))}. {MERGE_HINT}; "
            "fit, which has no such argument, takes Ratings.from_matrix(..., duplicates=...)"
        )
    return _merge_duplicates(indptr, indices, data, shape, duplicates)


def _row_of(indptr: np.ndarray, entry: int) -> int:
    return int(np.searchsorted(indptr, entry, side="right") - 1)


def rows_of_entries(indptr: np.ndarray) -> np.ndarray:
    """Row of each entry, int64, shape (nnz,)."""
    return np.repeat(np.arange(len(indptr) - 1, dtype=np.int64), np.diff(indptr))


def pair_numbers(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """A number for each pair of positions, int64, in the order of the pairs."""
    return rows.astype(np.int64) << 32 | columns


def repeats(rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Number of pairs that occur more than once, and of those whose entries have different values; shape (2,)."""
    pairs = pair_numbers(rows, columns)
    order = np.argsort(pairs, kind="stable")
    pairs, values = pairs[order], values[order]
    same = pairs[1:] == pairs[:-1]
    return np.array([len(np.unique(pairs[1:][mask])) for mask in (same, same & (values[1:] != values[:-1]))])


def repeats_text(found: np.ndarray) -> str:
    some, differ = found
    return f"{some:,} {'pair repeats' if some == 1 else 'pairs repeat'}, {differ:,} of them with different values"


def row_pointer(rows: np.ndarray, count: int) -> np.ndarray:
    """Where each of `count` rows starts among entries sorted by row; int64, shape (count + 1,)."""
    pointer = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=pointer[1:])
    return pointer


def _merge_duplicates(
    indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, shape: tuple[int, int], rule: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One entry for each run of equal columns in rows that are already sorted."""
    rows = rows_of_entries(indptr)
    new = np.ones(len(indices), dtype=bool)
    new[1:] = (indices[1:] != indices[:-1]) | (rows[1:] != rows[:-1])
    starts = np.flatnonzero(new)
    work = data.astype(np.float64, copy=False)
    if rule == "max":
        merged = np.maximum.reduceat(work, starts)
    elif rule == "first":
        merged = work[starts]
    elif rule == "last":
        merged = work[np.append(starts[1:], len(work)) - 1]
    else:
        merged = np.add.reduceat(work, starts)
        if rule == "mean":
            merged = merged / np.diff(np.append(starts, len(work)))
    return row_pointer(rows[starts], shape[0]), np.ascontiguousarray(indices[starts]), merged


def _finite_values(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, name: str, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.ascontiguousarray(data, dtype=dtype)
    bad = np.flatnonzero(~np.isfinite(converted))
    if bad.size:
        k = int(bad[0])
        what = data[k] if not np.isfinite(data[k]) else f"{data[k]:g}, which overflows {np.dtype(dtype).name}"
        raise RatingsError(
            f"{name} has the value {what} at row {_row_of(indptr, k)}, column {indices[k]} "
            "(NaN and inf are not allowed); values must be finite: remove or replace such entries"
        )
    return converted


def _assemble(
    indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, shape: tuple[int, int], drop_zeros: bool
) -> sp.csr_array:
    if drop_zeros and _formats.has_zeros(data):
        keep = data != 0
        counts = np.concatenate(([0], np.cumsum(keep)))[indptr]
        indptr, indices, data = counts.astype(np.int64), indices[keep], data[keep]
    return frozen_csr(make_csr(indptr, indices, data, shape))


def make_csr(indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, shape: tuple[int, int]) -> sp.csr_array:
    """A csr_array around arrays known to be canonical, with indptr of `index_pointer_dtype`; no re-checks."""
    return csr_of(indptr.astype(index_pointer_dtype(len(indices)), copy=False), indices, data, shape[1])


def csr_of(indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, n_columns: int) -> sp.csr_array:
    """A csr_array around canonical arrays as they are; SciPy's constructor would give both index arrays one dtype."""
    matrix = sp.csr_array((len(indptr) - 1, n_columns), dtype=data.dtype)
    matrix.indptr, matrix.indices, matrix.data = indptr, indices, data
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    return matrix


def frozen_csr(matrix: sp.csr_array) -> sp.csr_array:
    """A matrix over read-only arrays that only the library holds, so that checks of it need no copy."""
    matrix.indptr, matrix.indices, matrix.data = map(frozen, (matrix.indptr, matrix.indices, matrix.data))
    return matrix


def csr_arrays(matrix: sp.csr_array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indptr int64, indices int32, data) of a validated matrix, as the kernels take them."""
    return matrix.indptr.astype(np.int64, copy=False), matrix.indices, matrix.data
