"""Uniform random numbers addressed by (key, side, row, column): any part of a matrix can be drawn alone, in any order.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) with the key and the
counter (column / 4, row, side) gives four words, one for each column; kernels.h has the details. Threads share the
rows, and no number depends on another one. cuda/draw.cu draws the same bits.
"""

import numpy as np

from cython.parallel cimport prange, threadid
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from hybridmf._openmp cimport hmf_usable_threads
from hybridmf.native._kernels cimport hmf_kernels, hmf_kernels_named
from hybridmf.native.kernels cimport hmf_kernel_table, real


cdef struct Numbers:
    # address of a matrix of random numbers
    uint64_t key
    uint32_t side
    int low                     # -1: between -scale and scale; 0: between 0 and scale


cdef void draw_row(const hmf_kernel_table* table, Numbers numbers, uint64_t row, Py_ssize_t rank, float scale,
                   real* out, float* work) noexcept nogil:
    cdef Py_ssize_t column
    if scale == 0:
        for column in range(rank):
            out[column] = 0
    elif real is float:
        table.draw(rank, numbers.key, row, numbers.side, numbers.low, scale, out)
    else:
        table.draw(rank, numbers.key, row, numbers.side, numbers.low, scale, work)
        for column in range(rank):
            out[column] = work[column]


def draw_rows(
        real[:, :] out,              # OUT  (n, rank), rows contiguous
        const float[::1] scales,     # IN   (n,) the largest absolute value of a row, 0 for a row of zeros
        rows,                        # IN   int64 (n,) row numbers, or an int: the first of consecutive rows
        uint64_t key,
        uint32_t side,
        bint signed,                 # between -scale and scale, else between 0 and scale
        int n_threads,
        isa=None) -> None:           # a table of kernels.h, for tests
    """out[k] = numbers of row `rows[k]`, drawn in float32 for any type of `out`."""
    cdef bint consecutive = not isinstance(rows, np.ndarray)
    cdef int64_t first = rows if consecutive else 0
    cdef const int64_t[::1] named = None if consecutive else rows
    cdef Numbers numbers = Numbers(key, side, -1 if signed else 0)
    cdef Py_ssize_t n = out.shape[0], rank = out.shape[1], k
    cdef const hmf_kernel_table* table = hmf_kernels() if isa is None else hmf_kernels_named(isa.encode())
    cdef float* work
    n_threads = hmf_usable_threads(n_threads)
    if table == NULL:
        raise ValueError(f"this processor has no kernels for {isa!r}")
    if not n or not rank:
        return
    if out.strides[1] != sizeof(real) or scales.shape[0] != n or not (consecutive or named.shape[0] == n):
        raise ValueError("out, scales and rows have shapes (n, rank), rows contiguous, (n,), and (n,)")
    work = <float*> malloc(n_threads * rank * sizeof(float)) if real is double else NULL
    if real is double and work == NULL:
        raise MemoryError("no memory for a row of random numbers of each thread")
    for k in prange(n, nogil=True, schedule="static", num_threads=n_threads):  # static: rows take equally long
        draw_row(table, numbers, first + k if consecutive else named[k], rank, scales[k], &out[k, 0],
                 work + rank * threadid() if real is double else NULL)
    free(work)
