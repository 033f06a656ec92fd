// transpose.cu - CSR of the transpose of a CSR matrix, stable: the same arrays as `hybridmf._formats.transpose`
// The entries are cut into consecutive parts, one warp each. Every part counts its entries of each column, the counts are
// converted to places, and every part writes its entries there, 32 consecutive ones at a time.
// count_columns
//   grid  : parts / (THREADS / WARP)     block : THREADS, one warp per part
// column_places
//   grid  : any number of blocks         block : THREADS, one thread per column
// scatter_entries
//   grid  : as count_columns             block : THREADS, one warp per part
// count_faults
//   grid  : any number of blocks         block : THREADS, one thread per entry, and per row
//   result: adds to faults, which is 0 at first, the number of entries whose column is not in 0 ... n_columns - 1 or whose
//           value is not finite, and of entries whose column does not exceed that of the previous entry in their row
// synchronization: each kernel reads what earlier kernels of the stream wrote. The counts of a part belong to one warp:
//         count_columns adds by atomics; in scatter_entries all lanes of a column read its place, then its last lane advances it,
//         with __syncwarp after the reads and after the writes. Places are distinct. count_faults adds by atomics.
// shapes: indptr (n_rows + 1,)  indices, values (nnz,)  bounds (n_parts + 1,): first entry of each part
//         counts (n_parts, n_columns), zeros at first: entries of each column in a part, then its next free place in the
//         column  totals (n_columns,)  faults (1,)  starts (n_columns + 1,)  rows, out_values (nnz,)
// traffic: indices twice and values once in, rows and values once out; counts four times
// limits: a column has at most 2^31 - 1 entries
#include "common.cuh"

#ifndef THREADS
#define THREADS 256
#endif

struct Part {
    int64 begin, end;
    int* counts;
};

// The part of this warp, or an empty part if there are fewer parts.
__device__ __forceinline__ Part part_of_warp(const int64* __restrict__ bounds, int* counts, int n_parts, int n_columns) {
    const int64 part = int64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (part >= n_parts) return {0, 0, counts};
    return {bounds[part], bounds[part + 1], counts + part * n_columns};
}

extern "C" __global__ void __launch_bounds__(THREADS)
count_columns(int* __restrict__ counts, const int64* __restrict__ bounds, const int* __restrict__ indices, int n_parts,
              int n_columns) {
    const Part part = part_of_warp(bounds, counts, n_parts, n_columns);
#pragma unroll 4
    for (int64 k = part.begin + threadIdx.x % WARP; k < part.end; k += WARP) atomicAdd(&part.counts[indices[k]], 1);
}

extern "C" __global__ void __launch_bounds__(THREADS)
column_places(int64* __restrict__ totals, int* __restrict__ counts, int n_parts, int n_columns) {
    for (int column = blockIdx.x * THREADS + threadIdx.x; column < n_columns; column += gridDim.x * THREADS) {
        int before = 0;
#pragma unroll 8
        for (int64 part = 0; part < n_parts; part++) {
            int& count = counts[part * n_columns + column];
            const int here = count;
            count = before;
            before += here;
        }
        totals[column] = before;
    }
}

// The row that contains entry k: the last one that begins at or before it.
__device__ __forceinline__ int64 row_of(const int64* __restrict__ indptr, int64 n_rows, int64 k) {
    int64 first = 0, last = n_rows;  // indptr[first] <= k < indptr[last]
    while (last - first > 1) {
        const int64 middle = first + (last - first) / 2;
        if (indptr[middle] <= k) first = middle;
        else last = middle;
    }
    return first;
}

extern "C" __global__ void __launch_bounds__(THREADS)
scatter_entries(int* __restrict__ rows, real* __restrict__ out_values, int* counts, const int64* __restrict__ bounds,
                const int64* __restrict__ starts, const int64* __restrict__ indptr, const int* __restrict__ indices,
                const real* __restrict__ values, int64 n_rows, int n_parts, int n_columns) {
    const Part part = part_of_warp(bounds, counts, n_parts, n_columns);
    const unsigned lane = threadIdx.x % WARP, before = (1u << lane) - 1;
    int64 row = part.begin + lane < part.end ? row_of(indptr, n_rows, part.begin + lane) : 0;
    for (int64 first = part.begin; first < part.end; first += WARP) {
        const int64 k = first + lane;
        const bool exists = k < part.end;
        // lanes beyond the end use column -1, which no entry has
        const int column = exists ? indices[k] : -1;
        const unsigned alike = __match_any_sync(FULL_WARP, column);
        if (exists) {
            while (indptr[row + 1] <= k) row++;
            const int place = part.counts[column] + __popc(alike & before);
            const int64 at = starts[column] + place;
            rows[at] = int(row);
            out_values[at] = values[k];
        }
        __syncwarp();  // all lanes have read the places that the last lane of each column advances
        if (exists && (alike & ~before) == 1u << lane) part.counts[column] += __popc(alike);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
count_faults(unsigned long long* __restrict__ faults, const int64* __restrict__ indptr, const int* __restrict__ indices,
             const real* __restrict__ values, int64 n_rows, int64 nnz, int n_columns) {
    const int64 first = int64(blockIdx.x) * THREADS + threadIdx.x, step = int64(gridDim.x) * THREADS;
    int64 found = 0;
#pragma unroll 4
    for (int64 k = first; k < nnz; k += step) {
        const int column = indices[k];
        found += column < 0 || column >= n_columns;
        found += !isfinite(values[k]);
        found += k > 0 && column <= indices[k - 1];
    }
    // columns may descend from the end of a row to the next row with entries
    for (int64 row = first; row < n_rows; row += step) {
        const int64 begin = indptr[row];
        if (begin > 0 && begin < indptr[row + 1]) found -= indices[begin] <= indices[begin - 1];
    }
    found = warp_sum(found);
    if (threadIdx.x % WARP == 0 && found) atomicAdd(faults, static_cast<unsigned long long>(found));  // modulo 2^64
}
