"""Uniform random numbers addressed by (key, side, row, column): any part of a matrix is drawn alone, in any order.

The numbers are those of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
2011) with the key and the counter (column / 4, row, side), of which a column takes one word; kernels.h has the details.
Threads share the rows, and no number depends on another one. cuda/draw.cu draws the same bits.
"""

from cython.parallel cimport prange, threadid
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from hybridmf._openmp cimport hmf_usable_threads
from hybridmf.native.kernels cimport hmf_kernel_table, hmf_kernels, hmf_kernels_named, real


cdef void draw_row(const hmf_kernel_table* table, real* out, Py_ssize_t rank, uint64_t key, uint64_t row,
                   uint32_t side, bint signed, float scale, float* work) noexcept nogil:
    cdef Py_ssize_t column
    if scale == 0:
        for column in range(rank):
            out[column] = 0
    elif real is float:
        table.draw(rank, key, row, side, -1 if signed else 0, scale, out)
    else:
        table.draw(rank, key, row, side, -1 if signed else 0, scale, work)
        for column in range(rank):
            out[column] = work[column]


def draw_rows(
        real[:, :] out,              # OUT  (n, rank), rows contiguous
        const float[::1] scales,     # IN   (n,) the largest absolute value of a row, 0 for a row of zeros
        const int64_t[::1] rows,     # IN   (n,) which rows they are, or (0,): first, first + 1, ...
        int64_t first,
        uint64_t key,
        uint32_t side,
        bint signed,                 # between -scale and scale, else between 0 and scale
        int n_threads,
        isa=None) -> None:           # a table of kernels.h, for tests
    """out[k] = numbers of row `rows[k]`, drawn in float32 whatever `out` is."""
    cdef Py_ssize_t n = out.shape[0], rank = out.shape[1], k
    cdef const hmf_kernel_table* table = hmf_kernels() if isa is None else hmf_kernels_named(isa.encode())
    cdef float* work
    n_threads = hmf_usable_threads(n_threads)
    if table == NULL:
        raise ValueError(f"this processor has no kernels for {isa!r}")
    if not n or not rank:
        return
    if out.strides[1] != sizeof(real) or scales.shape[0] != n or rows.shape[0] not in (0, n):
        raise ValueError("out, scales and rows have shapes (n, rank), rows contiguous, (n,), and (n,) or (0,)")
    work = <float*> malloc(n_threads * rank * sizeof(float)) if real is double else NULL
    if real is double and work == NULL:
        raise MemoryError("no memory for a row of random numbers of each thread")
    for k in prange(n, nogil=True, schedule="static", num_threads=n_threads):  # every row takes as long
        draw_row(table, &out[k, 0], rank, key, rows[k] if rows.shape[0] else first + k, side, signed, scales[k],
                 work + rank * threadid() if real is double else NULL)
    free(work)
