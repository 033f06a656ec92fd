// rows.cu - sums of rows that were assembled in pieces, the range of magnitudes in a table's rows, and the entries of a row
//           that belong to a part of the columns
// add_pieces
//   grid  : (listed rows, parts of a row)     block : THREADS, 16 bytes per thread if rows are multiples of 16 bytes
//   shapes: sums (n_slots, length)  rows (n_listed,): slot of a row and of its first piece  slots (n_listed + 1,): range of
//           its other pieces. A listed row without other pieces has no pieces at all and becomes zeros.
//   order : pieces in their order, so a rerun gives the same bits
// row_range
//   grid  : any number of blocks     block : THREADS; a warp reads ROWS rows at a time
//   shapes: table (n_rows, width)  status (n_solved,)  found (3,), zeros
//   result: found[0] = bits of the largest |element|; found[1] = LARGEST_BITS minus the bits of the smallest row maximum of
//           |element|, without rows of zeros; found[2] = 1 if any status is not 0. The bits of nonnegative numbers have the
//           order of the numbers, and a NaN is above all numbers.
// clip_segments
//   grid  : any number of blocks     block : THREADS, one thread per segment
//   shapes: clipped, segments (n_segments, 3): slot, begin, end; indices (nnz,), ascending within each segment
//   result: slot - first_slot, and the entries of each segment whose index is in 0 ... columns - 1; begin == end if none
// synchronization: add_pieces: one thread reads and writes the same elements of a row and its pieces. row_range: atomicMax, in any
//           order with the same result; `found` is cleared and read by other operations of the stream. clip_segments: none
// traffic: each piece once in, each row once out; the table once in; a few indices per segment
#include "common.cuh"

#ifndef VECTOR
#define VECTOR (16 / int(sizeof(real)))
#endif
#ifndef THREADS
#define THREADS 256
#endif

constexpr unsigned LARGEST_BITS = 0x7fffffffu;
constexpr int ROWS = 4;  // rows per warp of row_range: one row of 400 bytes would leave too few bytes in flight

struct alignas(VECTOR * sizeof(real)) Chunk {
    real element[VECTOR];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
add_pieces(real* __restrict__ sums, const int64* __restrict__ rows, const int64* __restrict__ slots, int64 length) {
    const int64 chunks = length / VECTOR, row = rows[blockIdx.x];
    const int64 begin = slots[blockIdx.x], end = slots[blockIdx.x + 1];
    Chunk* const all = reinterpret_cast<Chunk*>(sums);
    for (int64 at = int64(blockIdx.y) * THREADS + threadIdx.x; at < chunks; at += int64(gridDim.y) * THREADS) {
        Chunk sum = {};
        if (begin < end) sum = all[row * chunks + at];
#pragma unroll 8
        for (int64 slot = begin; slot < end; slot++) {
            const Chunk next = all[slot * chunks + at];
#pragma unroll
            for (int e = 0; e < VECTOR; e++) sum.element[e] += next.element[e];
        }
        all[row * chunks + at] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
row_range(unsigned* __restrict__ found, const float* __restrict__ table, int64 n_rows, int width,
          const int* __restrict__ status, int64 n_solved) {
    const int lane = threadIdx.x % WARP;
    const int64 stride = int64(gridDim.x) * (THREADS / WARP) * ROWS;
    unsigned largest = 0, room = 0;
    for (int64 first = (int64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP) * ROWS; first < n_rows; first += stride) {
        unsigned peaks[ROWS] = {};
        for (int column = lane; column < width; column += WARP)
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const int64 row = first + k < n_rows ? first + k : first;
                peaks[k] = max(peaks[k], __float_as_uint(table[row * width + column]) & LARGEST_BITS);
            }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
#pragma unroll
            for (int distance = WARP / 2; distance > 0; distance /= 2)
                peaks[k] = max(peaks[k], __shfl_xor_sync(FULL_WARP, peaks[k], distance));
            largest = max(largest, peaks[k]);
            if (peaks[k]) room = max(room, LARGEST_BITS - peaks[k]);
        }
    }
    if (lane == 0 && largest) {
        atomicMax(&found[0], largest);
        atomicMax(&found[1], room);
    }
    for (int64 row = int64(blockIdx.x) * THREADS + threadIdx.x; row < n_solved; row += int64(gridDim.x) * THREADS)
        if (status[row]) atomicMax(&found[2], 1u);
}

// The first of the entries begin ... end whose index is at least `bound`, or end if there is none.
__device__ __forceinline__ int64 first_at_least(const int* __restrict__ indices, int64 begin, int64 end, int bound) {
    while (begin < end) {
        const int64 middle = begin + (end - begin) / 2;
        if (indices[middle] < bound) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

extern "C" __global__ void __launch_bounds__(THREADS)
clip_segments(int64* __restrict__ clipped, const int64* __restrict__ segments, const int* __restrict__ indices,
              int64 n_segments, int64 first_slot, int columns) {
    for (int64 k = int64(blockIdx.x) * THREADS + threadIdx.x; k < n_segments; k += int64(gridDim.x) * THREADS) {
        const int64 end = segments[3 * k + 2], begin = first_at_least(indices, segments[3 * k + 1], end, 0);
        clipped[3 * k] = segments[3 * k] - first_slot;
        clipped[3 * k + 1] = begin;
        clipped[3 * k + 2] = first_at_least(indices, begin, end, columns);
    }
}
