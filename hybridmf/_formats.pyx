"""Sparse layouts: parallel transposition, degree order, row permutation, and the BALS tiles.

The BALS format (Chen et al., "BALS", IEEE TPDS 2021, section 4.1, Alg. 1, Fig. 6) cuts a matrix into tiles of
``tile_rows`` x ``tile_cols``. Tile after tile along each row block, it lists the columns of a tile, so that a kernel
loads each of their factor rows once and reuses it for all rows of the tile. The paper's example with ``tile_rows=2``,
``tile_cols=3`` (first row block only)::

              c0 c1 c2 | c3 c4 c5
        r0     3  .  1 |  .  2  .        tile 0 (r0-r1, c0-c2)      tile 1 (r0-r1, c3-c5)
        r1     2  4  . |  5  .  .

        values       3 1 | 2 4      | 2 | 5          nonzeros: tile by tile, row by row
        tile_colidx  0 2 1          | 4 3            columns to load for a tile, each once, by first appearance
        tile_ptr     0                3      5       where a tile's columns start; equal neighbours: vacant tile
        seg_colidx   0 1 | 0 2      | 0 | 1          for each nonzero: position of its column among its tile's
        seg_ptr      0     2          4   5      6   where a segment (one row of one tile) starts in seg_colidx

Segments are numbered by row block, then tile, then row; ``seg_ptr`` has ``n_rows * n_tile_columns + 1`` elements
(section 4.1.2), so the last row block has only the rows that exist. Since a row block owns one contiguous range of CSR
entries, row blocks are built independently, in parallel and in O(nnz + segments); only the offsets of ``tile_colidx``
need a prefix sum over tiles afterwards.
"""

import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

from hybridmf._openmp cimport hmf_max_threads, hmf_thread_id, hmf_usable_threads

SORTED_UNIQUE = 0       # columns strictly ascending within every row
SORTED_DUPLICATES = 1   # ascending, with repeats
UNSORTED = 2

ctypedef fused value_t:
    float
    double

ctypedef fused any_t:
    int8_t
    float
    double

ctypedef fused offset_t:   # positions within nnz: int32 halves the index traffic where it suffices
    int32_t
    int64_t

# Below this many entries a second thread costs more than it saves.
cdef Py_ssize_t PARALLEL_ENTRIES = 1 << 15

cdef int32_t FLOAT_EXPONENT = 0x7F800000
cdef int64_t DOUBLE_EXPONENT = 0x7FF0000000000000

cdef int64_t LOCAL_INDEX = 0xFFFFFFFF   # low half of a slot: the local index; the high half stamps its row block


cdef int _threads(object num_threads, Py_ssize_t work) except -1:
    cdef int n = hmf_max_threads() if num_threads is None else int(num_threads)
    if n < 1:
        raise ValueError(f"num_threads must be >= 1, got {n}")
    return 1 if work < PARALLEL_ENTRIES else hmf_usable_threads(n)


def max_threads():
    """Threads an OpenMP region of this process gets by default (1 in a build without OpenMP)."""
    return hmf_max_threads()


# ---------------------------------------------------------------------------------------------------------- copies

cdef Py_ssize_t ZEROS_BLOCK = 1 << 16  # values per task
cdef Py_ssize_t COPY_BYTES = 1 << 20   # of one memcpy, a few hundred pages


def copied(const uint8_t[::1] source, uint8_t[::1] target, num_threads=None):
    """target <- source by several threads; page faults of new memory take most of the time.

    Parameters
    ----------
    source, target : uint8 array, shape (n,)
    num_threads : int, optional
    """
    cdef Py_ssize_t n = source.shape[0], k
    cdef int threads = _threads(num_threads, n // 8)
    if target.shape[0] != n:
        raise ValueError(f"target has {target.shape[0]} bytes, source {n}")
    for k in prange((n + COPY_BYTES - 1) // COPY_BYTES, nogil=True, schedule="static", num_threads=threads):
        memcpy(&target[k * COPY_BYTES], &source[k * COPY_BYTES], <size_t> _min(COPY_BYTES, n - k * COPY_BYTES))


# ------------------------------------------------------------------------------------------------ structure checks


cdef inline int32_t _row_faults(const int32_t* indices, const value_t* data, Py_ssize_t n,
                                int32_t n_cols) noexcept nogil:
    """Not zero if an index is out of range or does not ascend, or a value is not finite; vectorizable loops."""
    cdef int32_t faults = 0
    cdef int64_t wide = 0
    cdef Py_ssize_t k
    for k in range(n):
        faults |= (indices[k] < 0) | (indices[k] >= n_cols)
    for k in range(1, n):
        faults |= indices[k] <= indices[k - 1]
    # all exponent bits set: infinite or NaN
    if value_t is float:
        for k in range(n):
            faults |= ((<const int32_t*> data)[k] & FLOAT_EXPONENT) == FLOAT_EXPONENT
        return faults
    else:
        for k in range(n):
            wide |= ((<const int64_t*> data)[k] & DOUBLE_EXPONENT) == DOUBLE_EXPONENT
        return faults | (wide != 0)


def is_canonical(const int64_t[::1] indptr, const int32_t[::1] indices, const value_t[::1] data, Py_ssize_t n_cols,
                 num_threads=None):
    """Whether CSR arrays with a valid indptr are canonical, in one parallel pass.

    Parameters
    ----------
    indptr : int64 array, shape (n_rows + 1,)
    indices : int32 array, shape (nnz,)
    data : float32 or float64 array, shape (nnz,)
    n_cols : int

    Returns
    -------
    bool
        Indices are in range and ascend strictly within rows, and values are finite.
    """
    cdef Py_ssize_t n_rows = indptr.shape[0] - 1, row
    cdef int32_t faults = 0
    cdef int n = _threads(num_threads, indices.shape[0])
    if indices.shape[0] == 0:
        return True
    for row in prange(n_rows, nogil=True, schedule="static", num_threads=n):
        faults |= _row_faults(&indices[0] + indptr[row], &data[0] + indptr[row], indptr[row + 1] - indptr[row],
                              <int32_t> n_cols)
    return faults == 0


def has_zeros(const value_t[::1] data, num_threads=None):
    """Whether a float32 or float64 array, shape (n,), has a zero, in one parallel pass."""
    cdef Py_ssize_t n = data.shape[0], block
    cdef int32_t zeros = 0
    cdef int threads = _threads(num_threads, n)
    for block in prange((n + ZEROS_BLOCK - 1) // ZEROS_BLOCK, nogil=True, schedule="static", num_threads=threads):
        zeros |= _zeros(&data[block * ZEROS_BLOCK], _min(ZEROS_BLOCK, n - block * ZEROS_BLOCK))
    return zeros != 0


cdef inline int32_t _zeros(const value_t* data, Py_ssize_t n) noexcept nogil:
    cdef int32_t zeros = 0
    cdef Py_ssize_t k
    for k in range(n):
        zeros |= data[k] == 0
    return zeros


def row_order_status(const int64_t[::1] indptr, const int32_t[::1] indices, num_threads=None):
    """Whether every row's columns ascend strictly.

    Parameters
    ----------
    indptr : int64 array, shape (n_rows + 1,)
    indices : int32 array, shape (nnz,)

    Returns
    -------
    code : int
        SORTED_UNIQUE, SORTED_DUPLICATES or UNSORTED.
    position : int
        First entry that repeats its predecessor's column (SORTED_DUPLICATES), else -1.
    """
    cdef Py_ssize_t n_rows = indptr.shape[0] - 1, row, k
    cdef Py_ssize_t repeats = 0, falls = 0
    cdef int n = _threads(num_threads, indices.shape[0])
    for row in prange(n_rows, nogil=True, schedule="static", num_threads=n):
        for k in range(indptr[row] + 1, indptr[row + 1]):
            repeats += indices[k] == indices[k - 1]
            falls += indices[k] < indices[k - 1]
    if falls:
        return UNSORTED, -1
    if not repeats:
        return SORTED_UNIQUE, -1
    for row in range(n_rows):
        for k in range(indptr[row] + 1, indptr[row + 1]):
            if indices[k] == indices[k - 1]:
                return SORTED_DUPLICATES, k


# ---------------------------------------------------------------------------------------------------------- values


cdef void _summarize(const value_t* values, Py_ssize_t n, double* out) noexcept nogil:
    """out[0 ... 5] <- sum, sum of squares, smallest, largest value, smallest, largest magnitude; n >= 1."""
    cdef double[4] sums
    cdef double[4] squares
    cdef value_t low = values[0], high = values[0], least, largest, value, size
    cdef double wide
    cdef Py_ssize_t k
    cdef int lane
    least = largest = values[0] if values[0] > 0 else -values[0]
    for lane in range(4):
        sums[lane] = squares[lane] = 0
    # four sums: a single one would be limited by the latency of additions
    for k in range(n):
        value = values[k]
        wide = value
        lane = k & 3
        sums[lane] += wide
        squares[lane] += wide * wide
        low = value if value < low else low
        high = value if value > high else high
        size = value if value > 0 else -value
        least = size if size < least else least
        largest = size if size > largest else largest
    out[0] = (sums[0] + sums[1]) + (sums[2] + sums[3])
    out[1] = (squares[0] + squares[1]) + (squares[2] + squares[3])
    out[2], out[3], out[4], out[5] = low, high, least, largest


def summarize(const value_t[::1] values, Py_ssize_t piece, num_threads=None):
    """Sums and ranges of consecutive pieces of values, independent of the number of threads.

    Parameters
    ----------
    values : float32 or float64 array, shape (n,)
    piece : int
        Values of each piece; the last one may be shorter.
    num_threads : int, optional

    Returns
    -------
    float64 array, shape (n_pieces, 6)
        For each piece the sum and the sum of squares in float64, the smallest and the largest value, the smallest and
        the largest absolute value.
    """
    cdef Py_ssize_t n = values.shape[0], k
    found = np.empty(((n + piece - 1) // piece, 6))
    cdef double[:, ::1] out = found
    cdef int threads = _threads(num_threads, n)
    for k in prange(out.shape[0], nogil=True, schedule="static", num_threads=threads):
        _summarize(&values[k * piece], min(piece, n - k * piece), &out[k, 0])
    return found


# --------------------------------------------------------------------------------------------------- transposition


cdef void _count_columns(
        const int32_t[::1] indices,     # IN   (nnz,)
        const int64_t[::1] first,       # IN   (n_parts + 1,) range of entries of each part
        offset_t[:, ::1] cursor,        # OUT  (n_parts, n_cols) entries of each column in each part
        int n_threads) noexcept nogil:
    cdef Py_ssize_t k
    cdef int part
    cdef offset_t* count
    for part in prange(first.shape[0] - 1, schedule="static", chunksize=1, num_threads=n_threads):
        count = &cursor[part, 0]
        for k in range(first[part], first[part + 1]):
            count[indices[k]] += 1


cdef void _column_offsets(
        offset_t[:, ::1] cursor,        # IN OUT counts -> slot of each part's first entry of each column
        int64_t[::1] out_indptr) noexcept nogil:   # OUT (n_cols + 1,)
    cdef Py_ssize_t column, part
    cdef offset_t start = 0, count
    for column in range(cursor.shape[1]):
        out_indptr[column] = start
        for part in range(cursor.shape[0]):
            count = cursor[part, column]
            cursor[part, column] = start
            start += count
    out_indptr[cursor.shape[1]] = start


cdef void _scatter_columns(
        const int64_t[::1] indptr, const int32_t[::1] indices, const value_t[::1] data,   # IN
        const int64_t[::1] first_row,   # IN   (n_parts + 1,)
        offset_t[:, ::1] cursor,        # IN OUT (n_parts, n_cols) next free slot
        int32_t[::1] out_indices, value_t[::1] out_data,   # OUT (nnz,)
        int n_threads) noexcept nogil:
    """Parts are row ranges in order, so rows stay sorted within a column for any thread count."""
    cdef Py_ssize_t row, k
    cdef int part
    cdef offset_t slot
    cdef offset_t* free
    for part in prange(first_row.shape[0] - 1, schedule="static", chunksize=1, num_threads=n_threads):
        free = &cursor[part, 0]
        for row in range(first_row[part], first_row[part + 1]):
            for k in range(indptr[row], indptr[row + 1]):
                slot = free[indices[k]]
                free[indices[k]] = slot + 1
                out_indices[slot] = <int32_t> row
                out_data[slot] = data[k]


cdef void _scatter_coordinates(
        const int32_t[::1] rows, const int32_t[::1] columns, const value_t[::1] data,   # IN   (nnz,)
        const int64_t[::1] first,       # IN   (n_parts + 1,) range of entries of each part
        offset_t[:, ::1] cursor,        # IN OUT (n_parts, n_cols) next free slot
        int32_t[::1] out_indices, value_t[::1] out_data,   # OUT (nnz,)
        int n_threads) noexcept nogil:
    """Parts are ranges of entries in order, so within a column entries keep their order."""
    cdef Py_ssize_t k
    cdef int part
    cdef offset_t slot
    cdef offset_t* free
    for part in prange(first.shape[0] - 1, schedule="static", chunksize=1, num_threads=n_threads):
        free = &cursor[part, 0]
        for k in range(first[part], first[part + 1]):
            slot = free[columns[k]]
            free[columns[k]] = slot + 1
            out_indices[slot] = rows[k]
            out_data[slot] = data[k]


cdef int _parts(int n_threads, Py_ssize_t nnz, Py_ssize_t n_cols) noexcept:
    """Number of parts; more cursors, one per part and column, would take more memory than the entries."""
    return <int> max(1, min(n_threads, 4 * nnz // max(n_cols, 1)))


def by_column(const int32_t[::1] rows, const int32_t[::1] columns, const value_t[::1] data, Py_ssize_t n_cols,
              num_threads=None, bint wide=False):
    """CSC of coordinates in any order, by a stable counting sort: entries of a column keep their order.

    `transpose` of the result is CSR sorted by row and column, with equal pairs in their original order.

    Parameters
    ----------
    rows, columns : int32 array, shape (nnz,), every 0 <= column < n_cols
    data : float32 or float64 array, shape (nnz,)
    n_cols : int
    num_threads, wide
        As for `transpose`.

    Returns
    -------
    indptr : int64 array, shape (n_cols + 1,)
    indices : int32 array, shape (nnz,)
        Rows.
    data : array, shape (nnz,), dtype of `data`
    """
    cdef Py_ssize_t nnz = columns.shape[0]
    cdef int n = _threads(num_threads, nnz)
    first = np.linspace(0, nnz, _parts(n, nnz, n_cols) + 1).astype(np.int64)
    out_indptr = np.zeros(n_cols + 1, dtype=np.int64)
    out_indices = np.empty(nnz, dtype=np.int32)
    out_data = np.empty(nnz, dtype=np.asarray(data).dtype)
    cdef const int64_t[::1] first_view = first
    cdef int64_t[::1] out_indptr_view = out_indptr
    cdef int32_t[::1] out_indices_view = out_indices
    cdef value_t[::1] out_data_view = out_data
    cdef int32_t[:, ::1] cursor32
    cdef int64_t[:, ::1] cursor64
    if n_cols == 0 or nnz == 0:
        return out_indptr, out_indices, out_data
    if nnz <= 0x7FFFFFFF and not wide:
        cursor32 = np.zeros((len(first) - 1, n_cols), dtype=np.int32)
        with nogil:
            _count_columns(columns, first_view, cursor32, n)
            _column_offsets(cursor32, out_indptr_view)
            _scatter_coordinates(rows, columns, data, first_view, cursor32, out_indices_view, out_data_view, n)
    else:
        cursor64 = np.zeros((len(first) - 1, n_cols), dtype=np.int64)
        with nogil:
            _count_columns(columns, first_view, cursor64, n)
            _column_offsets(cursor64, out_indptr_view)
            _scatter_coordinates(rows, columns, data, first_view, cursor64, out_indices_view, out_data_view, n)
    return out_indptr, out_indices, out_data


def transpose(const int64_t[::1] indptr, const int32_t[::1] indices, const value_t[::1] data, Py_ssize_t n_cols,
              num_threads=None, bint wide=False):
    """CSR of the transpose, with rows sorted by column; stable, so equal pairs keep their order.

    Parameters
    ----------
    indptr : int64 array, shape (n_rows + 1,)
    indices : int32 array, shape (nnz,), every 0 <= index < n_cols
    data : float32 or float64 array, shape (nnz,)
    n_cols : int
    num_threads : int, optional
    wide : bool
        Use 64-bit cursors, which more than 2^31 - 1 entries need, regardless of nnz.

    Returns
    -------
    indptr : int64 array, shape (n_cols + 1,)
    indices : int32 array, shape (nnz,)
    data : array, shape (nnz,), dtype of `data`
    """
    cdef Py_ssize_t nnz = indices.shape[0]
    cdef int n = _threads(num_threads, nnz)
    cdef int n_parts = _parts(n, nnz, n_cols)
    bounds = np.searchsorted(indptr, np.linspace(0, nnz, n_parts + 1)[1:n_parts].astype(np.int64))
    first_row = np.concatenate(([0], bounds, [indptr.shape[0] - 1])).astype(np.int64)
    out_indptr = np.empty(n_cols + 1, dtype=np.int64)
    out_indices = np.empty(nnz, dtype=np.int32)
    out_data = np.empty(nnz, dtype=np.asarray(data).dtype)
    cdef const int64_t[::1] first_row_view = first_row
    cdef const int64_t[::1] first_entry = np.asarray(indptr)[first_row]
    cdef int64_t[::1] out_indptr_view = out_indptr
    cdef int32_t[::1] out_indices_view = out_indices
    cdef value_t[::1] out_data_view = out_data
    cdef int32_t[:, ::1] cursor32
    cdef int64_t[:, ::1] cursor64
    if n_cols == 0 or nnz == 0:
        out_indptr[:] = 0
    elif nnz <= 0x7FFFFFFF and not wide:
        cursor32 = np.zeros((n_parts, n_cols), dtype=np.int32)
        with nogil:
            _count_columns(indices, first_entry, cursor32, n)
            _column_offsets(cursor32, out_indptr_view)
            _scatter_columns(indptr, indices, data, first_row_view, cursor32, out_indices_view, out_data_view, n)
    else:
        cursor64 = np.zeros((n_parts, n_cols), dtype=np.int64)
        with nogil:
            _count_columns(indices, first_entry, cursor64, n)
            _column_offsets(cursor64, out_indptr_view)
            _scatter_columns(indptr, indices, data, first_row_view, cursor64, out_indices_view, out_data_view, n)
    return out_indptr, out_indices, out_data


# ------------------------------------------------------------------------------------- degree order and permutation


def degree_order(const int64_t[::1] indptr):
    """Rows by descending degree, ties in row order: BALS Alg. 3's result by counting sort, O(n_rows + longest row).

    Returns
    -------
    int64 array, shape (n_rows,)
        ``order[k]`` is the k-th row.
    """
    cdef Py_ssize_t n_rows = indptr.shape[0] - 1, row
    cdef int64_t longest = 0, degree, start = 0, count
    order = np.empty(n_rows, dtype=np.int64)
    cdef int64_t[::1] order_view = order
    for row in range(n_rows):
        longest = max(longest, indptr[row + 1] - indptr[row])
    cdef int64_t[::1] cursor = np.zeros(longest + 1, dtype=np.int64)
    with nogil:
        for row in range(n_rows):
            cursor[indptr[row + 1] - indptr[row]] += 1
        for degree in range(longest, -1, -1):
            count = cursor[degree]
            cursor[degree] = start
            start += count
        for row in range(n_rows):
            degree = indptr[row + 1] - indptr[row]
            order_view[cursor[degree]] = row
            cursor[degree] += 1
    return order


def take_rows(const int64_t[::1] indptr, const int32_t[::1] indices, const any_t[::1] data,
              const int64_t[::1] order, num_threads=None):
    """CSR whose k-th row is row ``order[k]`` of the input; `order` may repeat or omit rows.

    Returns
    -------
    indptr, indices, data : as in `transpose`, with ``len(order)`` rows
    """
    cdef Py_ssize_t n_out = order.shape[0], k, length
    counts = np.diff(indptr)[order]
    out_indptr = np.zeros(n_out + 1, dtype=np.int64)
    np.cumsum(counts, out=out_indptr[1:])
    cdef const int64_t[::1] start = out_indptr
    out_indices = np.empty(out_indptr[n_out], dtype=np.int32)
    out_data = np.empty(out_indptr[n_out], dtype=np.asarray(data).dtype)
    cdef int32_t[::1] out_indices_view = out_indices
    cdef any_t[::1] out_data_view = out_data
    cdef int n = _threads(num_threads, out_indices.shape[0])
    for k in prange(n_out, nogil=True, schedule="dynamic", chunksize=64, num_threads=n):
        length = start[k + 1] - start[k]
        if length > 0:
            memcpy(&out_indices_view[start[k]], &indices[indptr[order[k]]], length * sizeof(int32_t))
            memcpy(&out_data_view[start[k]], &data[indptr[order[k]]], length * sizeof(any_t))
    return out_indptr, out_indices, out_data


def common_entries(const int64_t[::1] indptr, const int32_t[::1] indices, const int64_t[::1] other_indptr,
                   const int32_t[::1] other_indices, num_threads=None):
    """Which entries of a canonical CSR matrix are entries of another one of as many rows; bool, shape (nnz,)."""
    cdef Py_ssize_t n_rows = indptr.shape[0] - 1, k
    cdef int n = _threads(num_threads, indices.shape[0])
    common = np.empty(indices.shape[0], dtype=np.uint8)
    cdef uint8_t[::1] view = common
    for k in prange(n_rows, nogil=True, schedule="dynamic", chunksize=64, num_threads=n):
        _mark_common(indices, indptr[k], indptr[k + 1], other_indices, other_indptr[k], other_indptr[k + 1], view)
    return common.view(bool)


cdef void _mark_common(
        const int32_t[::1] mine,        # IN   (nnz,) ascending from `first` to `last`
        Py_ssize_t first,
        Py_ssize_t last,
        const int32_t[::1] theirs,      # IN   ascending from `low` to `end`
        Py_ssize_t low,
        Py_ssize_t end,
        uint8_t[::1] common) noexcept nogil:    # OUT  (nnz,)
    cdef Py_ssize_t k, high, middle
    for k in range(first, last):
        high = end
        while low < high:       # bisection for the first element that is not smaller
            middle = (low + high) // 2
            if theirs[middle] < mine[k]:
                low = middle + 1
            else:
                high = middle
        common[k] = low < end and theirs[low] == mine[k]


# ------------------------------------------------------------------------------------------------------- BALS tiles


cdef inline Py_ssize_t _min(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    return a if a < b else b


cdef struct Division:
    # x // divisor as (x * multiplier) >> shift, exact for 0 <= x < 2^31 (Granlund and Montgomery 1994)
    uint64_t multiplier
    int shift


cdef Division _division(uint64_t divisor) noexcept nogil:
    cdef Division by
    by.shift = 31
    while (<uint64_t> 1 << (by.shift - 31)) < divisor:
        by.shift += 1
    by.multiplier = ((<uint64_t> 1 << by.shift) + divisor - 1) // divisor
    return by


cdef inline Py_ssize_t _tile_of(int32_t column, Division by) noexcept nogil:
    return <Py_ssize_t> ((<uint64_t> column * by.multiplier) >> by.shift)


cdef struct RowBlock:
    # consecutive rows of a CSR matrix with tiled columns
    const int64_t* indptr       # (n_rows + 1,) of the block's rows
    const int32_t* indices      # (nnz,) of the matrix
    Py_ssize_t n_rows
    Py_ssize_t n_tile_cols
    Division tile_cols


cdef struct Loaded:
    # columns loaded by a row block
    int64_t stamp               # differs between the row blocks of a thread
    int64_t* slot               # IN OUT (n_cols,) stamp << 32 | local index


cdef struct TileColumns:
    int32_t* seg_colidx         # OUT (nnz,)
    int32_t* first_seen         # OUT (nnz,) distinct columns of each tile, from its first entry's position on


cdef void _segment_starts(
        RowBlock block,
        offset_t* starts) noexcept nogil:                # OUT  (n_tile_cols * n_rows,)
    """Alg. 1, step 1 for one row block: counts, then starts by a running sum.

    Branch-free, since a branch on the tile would be mispredicted at every other entry if runs of a row are short.
    """
    cdef Py_ssize_t n_segments = block.n_tile_cols * block.n_rows, local, k, s
    cdef offset_t start, count
    memset(starts, 0, n_segments * sizeof(offset_t))
    for local in range(block.n_rows):
        for k in range(block.indptr[local], block.indptr[local + 1]):
            starts[_tile_of(block.indices[k], block.tile_cols) * block.n_rows + local] += 1
    start = <offset_t> block.indptr[0]
    for s in range(n_segments):
        count = starts[s]
        starts[s] = start
        start += count


cdef void _fill_row_block(
        RowBlock block, const value_t* data,             # IN
        offset_t* next_slot,                             # IN OUT (n_tile_cols * n_rows,) start of a segment -> its end
        offset_t* tile_start,                            # scratch (n_tile_cols,)
        Loaded loaded,
        value_t* values, TileColumns columns,            # OUT (nnz,)
        offset_t* n_distinct) noexcept nogil:            # OUT (n_tile_cols,)
    """Alg. 1, steps 2 and 3 for one row block: a column's first appearance in its tile gives it its local index."""
    cdef Py_ssize_t n_rows = block.n_rows, local, k, t
    cdef int64_t seen, index
    cdef int32_t column
    cdef bint is_new
    cdef offset_t out
    for t in range(block.n_tile_cols):
        tile_start[t] = next_slot[t * n_rows]
    memset(n_distinct, 0, block.n_tile_cols * sizeof(offset_t))
    for local in range(n_rows):
        for k in range(block.indptr[local], block.indptr[local + 1]):
            column = block.indices[k]
            t = _tile_of(column, block.tile_cols)
            out = next_slot[t * n_rows + local]
            next_slot[t * n_rows + local] = out + 1
            seen = loaded.slot[column]
            # Branch-free: always writes the column after those loaded so far. If it is not new, the tile has more
            # entries than loaded columns, so the slot is within the tile, and the next new column overwrites it.
            is_new = (seen >> 32) != loaded.stamp
            index = n_distinct[t] if is_new else seen & LOCAL_INDEX
            loaded.slot[column] = (loaded.stamp << 32) | index
            columns.first_seen[tile_start[t] + n_distinct[t]] = column
            n_distinct[t] += is_new
            columns.seg_colidx[out] = <int32_t> index
            values[out] = data[k]


cdef void _running_sum(offset_t[::1] counts) noexcept nogil:
    cdef Py_ssize_t t
    for t in range(1, counts.shape[0]):
        counts[t] += counts[t - 1]


cdef void _compact_columns(
        const int32_t[::1] first_seen, const offset_t[::1] seg_ptr, const offset_t[::1] tile_ptr,   # IN
        Py_ssize_t n_rows, Py_ssize_t tile_rows, Py_ssize_t n_tile_cols,
        int32_t[::1] tile_colidx,     # OUT (tile_ptr[-1],)
        int n_threads) noexcept nogil:
    cdef Py_ssize_t n_blocks = (n_rows + tile_rows - 1) // tile_rows
    cdef Py_ssize_t block, t, rows_here, start
    for block in prange(n_blocks, schedule="dynamic", num_threads=n_threads):
        rows_here = _min(tile_rows, n_rows - block * tile_rows)
        for t in range(n_tile_cols):
            start = tile_ptr[block * n_tile_cols + t]
            if tile_ptr[block * n_tile_cols + t + 1] > start:
                memcpy(&tile_colidx[start],
                       &first_seen[seg_ptr[block * tile_rows * n_tile_cols + t * rows_here]],
                       (tile_ptr[block * n_tile_cols + t + 1] - start) * sizeof(int32_t))


def build_bals(const int64_t[::1] indptr, const int32_t[::1] indices, const value_t[::1] data, Py_ssize_t n_cols,
               tile, offset_t[::1] seg_ptr, offset_t[::1] tile_ptr, num_threads=None):
    """BALS arrays of a CSR matrix whose rows are sorted and without duplicates (BALS Alg. 1), in O(nnz + segments).

    Parameters
    ----------
    indptr, indices, data : CSR arrays
    n_cols : int
    tile : (tile_rows, tile_cols)
    seg_ptr : int32 or int64 array, shape (n_rows * n_tile_cols + 1,), written
    tile_ptr : the same dtype, shape (n_row_blocks * n_tile_cols + 1,), written
    num_threads : int, optional

    Returns
    -------
    values : array, shape (nnz,)
    seg_colidx : int32 array, shape (nnz,)
    tile_colidx : int32 array, shape (tile_ptr[-1],)
    """
    cdef Py_ssize_t tile_rows = tile[0], tile_cols = tile[1]
    cdef Py_ssize_t nnz = indices.shape[0], n_rows = indptr.shape[0] - 1
    cdef Py_ssize_t n_tile_cols = (n_cols + tile_cols - 1) // tile_cols
    cdef Py_ssize_t n_blocks = (n_rows + tile_rows - 1) // tile_rows, block, first, thread
    cdef int n = _threads(num_threads, nnz)
    cdef Division by = _division(<uint64_t> tile_cols)
    cdef RowBlock rows
    cdef offset_t* segments
    values = np.empty(nnz, dtype=np.asarray(data).dtype)
    seg_colidx = np.empty(nnz, dtype=np.int32)
    if nnz == 0:
        np.asarray(seg_ptr)[:] = 0
        np.asarray(tile_ptr)[:] = 0
        return values, seg_colidx, np.empty(0, dtype=np.int32)
    first_seen = np.empty(nnz, dtype=np.int32)   # tile_colidx with gaps
    cdef value_t[::1] values_view = values
    cdef int32_t[::1] seg_colidx_view = seg_colidx
    cdef int32_t[::1] first_seen_view = first_seen
    cdef int64_t[:, ::1] slot = np.zeros((n, n_cols), dtype=np.int64)
    cdef offset_t[:, ::1] tile_start = np.empty((n, n_tile_cols), dtype=np.asarray(seg_ptr).dtype)
    seg_ptr[0] = 0
    tile_ptr[0] = 0
    with nogil:
        # dynamic: after reordering the first row blocks hold most of the entries
        for block in prange(n_blocks, schedule="dynamic", num_threads=n):
            first = block * tile_rows
            thread = hmf_thread_id()
            rows = RowBlock(&indptr[first], &indices[0], _min(tile_rows, n_rows - first), n_tile_cols, by)
            # element s + 1 first holds the start of segment s, and its end once its entries are placed
            segments = &seg_ptr[first * n_tile_cols + 1]
            _segment_starts(rows, segments)
            _fill_row_block(rows, &data[0], segments, &tile_start[thread, 0], Loaded(block + 1, &slot[thread, 0]),
                            &values_view[0], TileColumns(&seg_colidx_view[0], &first_seen_view[0]),
                            &tile_ptr[block * n_tile_cols + 1])
        _running_sum(tile_ptr)
    tile_colidx = np.empty(tile_ptr[tile_ptr.shape[0] - 1], dtype=np.int32)
    cdef int32_t[::1] tile_colidx_view = tile_colidx
    with nogil:
        _compact_columns(first_seen_view, seg_ptr, tile_ptr, n_rows, tile_rows, n_tile_cols, tile_colidx_view, n)
    return values, seg_colidx, tile_colidx


def bals_to_csr(const value_t[::1] values, const int32_t[::1] seg_colidx, const int32_t[::1] tile_colidx,
                const offset_t[::1] seg_ptr, const offset_t[::1] tile_ptr, shape, tile, num_threads=None):
    """CSR arrays (indptr int64, indices int32, data) of BALS arrays; the inverse of `build_bals`.

    `shape`: (n_rows, n_cols); `tile`: (tile_rows, tile_cols).
    """
    cdef Py_ssize_t n_rows = shape[0], n_cols = shape[1], tile_rows = tile[0], tile_cols = tile[1]
    cdef Py_ssize_t n_tile_cols = (n_cols + tile_cols - 1) // tile_cols
    cdef Py_ssize_t n_blocks = (n_rows + tile_rows - 1) // tile_rows
    cdef Py_ssize_t block, local, t, k, row_start, rows_here, s, out
    cdef int n = _threads(num_threads, values.shape[0])
    indptr = np.zeros(n_rows + 1, dtype=np.int64)
    indices = np.empty(values.shape[0], dtype=np.int32)
    data = np.empty(values.shape[0], dtype=np.asarray(values).dtype)
    cdef int64_t[::1] indptr_view = indptr
    cdef int32_t[::1] indices_view = indices
    cdef value_t[::1] data_view = data
    for block in prange(n_blocks, nogil=True, schedule="dynamic", num_threads=n):
        row_start = block * tile_rows
        rows_here = _min(tile_rows, n_rows - row_start)
        out = seg_ptr[row_start * n_tile_cols]   # a row block's entries are contiguous in both layouts
        for local in range(rows_here):
            for t in range(n_tile_cols):
                s = row_start * n_tile_cols + t * rows_here + local
                for k in range(seg_ptr[s], seg_ptr[s + 1]):
                    indices_view[out] = tile_colidx[tile_ptr[block * n_tile_cols + t] + seg_colidx[k]]
                    data_view[out] = values[k]
                    out = out + 1
            indptr_view[row_start + local + 1] = out
    return indptr, indices, data


def bals_vacancies(const offset_t[::1] seg_ptr, const offset_t[::1] tile_ptr, Py_ssize_t n_rows, Py_ssize_t tile_rows):
    """(vacant tiles, vacant segments outside vacant tiles): the counts of BALS table 3."""
    cdef Py_ssize_t n_tiles = tile_ptr.shape[0] - 1
    cdef Py_ssize_t n_blocks = (n_rows + tile_rows - 1) // tile_rows
    cdef Py_ssize_t n_tile_cols = n_tiles // n_blocks if n_blocks else 0
    cdef Py_ssize_t block, t, s, start, rows_here, vacant_tiles = 0, vacant_segments = 0
    with nogil:
        for block in range(n_blocks):
            rows_here = _min(tile_rows, n_rows - block * tile_rows)
            for t in range(n_tile_cols):
                if tile_ptr[block * n_tile_cols + t] == tile_ptr[block * n_tile_cols + t + 1]:
                    vacant_tiles += 1
                    continue
                start = block * tile_rows * n_tile_cols + t * rows_here
                for s in range(start, start + rows_here):
                    vacant_segments += seg_ptr[s] == seg_ptr[s + 1]
    return vacant_tiles, vacant_segments
