// predictions.cu - predicted[e] += y_e . x_u for the entries e of segments of rows, with y_e = fixed[indices[e]]
// grid  : one warp a segment, WARPS_PER_BLOCK warps a block; LANES lanes share an entry, whose row they read 16 bytes each
// shapes: predicted, indices (nnz,)  fixed (n_fixed, width)  solved (n_rows, width)  segments (n_segments, 3): row, begin,
//         end; rows are whole pieces of 16 bytes
// traffic: nnz (width + 2) * sizeof(real) bytes read   flops: 2 width nnz
// The order of the sums depends on LANES alone: the same bits however rows are cut.
#include "common.cuh"

#ifndef LANES
#define LANES 8  // a power of two, about the pieces of a row
#endif

constexpr int WARPS_PER_BLOCK = 8;
constexpr int VECTOR = 16 / int(sizeof(real));
constexpr int GROUPS = WARP / LANES;  // entries side by side
constexpr int DEEP = 4;               // entries of a lane under way together

struct alignas(16) Piece {
    real element[VECTOR];
};

extern "C" __global__ void __launch_bounds__(WARPS_PER_BLOCK * WARP)
add_products(real* __restrict__ predicted, const real* __restrict__ fixed, const real* __restrict__ solved,
             const int* __restrict__ indices, const int64* __restrict__ segments, int64 n_segments, int width) {
    const int lane = threadIdx.x % WARP, group = lane / LANES, place = lane % LANES, pieces = width / VECTOR;
    const int64 k = int64(blockIdx.x) * WARPS_PER_BLOCK + threadIdx.x / WARP;
    if (k >= n_segments) return;
    const int64 row = segments[3 * k], begin = segments[3 * k + 1], end = segments[3 * k + 2];
    const Piece* x = reinterpret_cast<const Piece*>(solved + row * width);
    for (int64 first = begin + group; first - group < end; first += GROUPS * DEEP) {
        const Piece* y[DEEP];
        real sum[DEEP] = {}, before[DEEP] = {};
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            const int64 entry = first + d * GROUPS;
            y[d] = entry < end ? reinterpret_cast<const Piece*>(fixed + indices[entry] * int64(width)) : nullptr;
            if (entry < end) before[d] = predicted[entry];
        }
        for (int piece = place; piece < pieces; piece += LANES) {
            const Piece right = x[piece];
            Piece left[DEEP] = {};
#pragma unroll
            for (int d = 0; d < DEEP; d++)
                if (y[d]) left[d] = y[d][piece];
#pragma unroll
            for (int d = 0; d < DEEP; d++)
#pragma unroll
                for (int e = 0; e < VECTOR; e++) sum[d] += left[d].element[e] * right.element[e];
        }
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance /= 2)
                sum[d] += __shfl_xor_sync(FULL_WARP, sum[d], distance);
            if (place == 0 && y[d]) predicted[first + d * GROUPS] = before[d] + sum[d];
        }
    }
}
