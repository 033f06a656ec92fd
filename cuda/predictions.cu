// predictions.cu - predicted[e] += y_e . x_u for the entries e of segments of rows, with y_e = fixed[indices[e]]
// grid  : one warp per segment, WARPS_PER_BLOCK warps per block; LANES lanes share an entry and read its row, 16 bytes each
// shapes: predicted, indices (nnz,)  fixed (n_fixed, width)  solved (n_rows, width)  segments (n_segments, 3): row, begin,
//         end; rows are whole pieces of 16 bytes
// synchronization: none; one lane reads and writes each prediction, and shuffles exchange registers only
// traffic: nnz (width + 2) * sizeof(real) bytes read   flops: 2 width nnz
// Indices of later entries are loaded while the factors of the current ones are read. The order of a sum depends only on
// LANES, so the bits do not depend on how rows are cut into segments.
#include "common.cuh"

#ifndef LANES
#define LANES 8  // a power of two, close to the number of pieces in a row
#endif

constexpr int WARPS_PER_BLOCK = 8;
constexpr int VECTOR = 16 / int(sizeof(real));
constexpr int GROUPS = WARP / LANES;  // entries processed in parallel
// Entries of a lane in flight together, limited by registers: 8 take 0.39 ms, 4 take 0.54 (ML-20M's shape, 32 columns).
constexpr int DEEP = sizeof(real) == 4 && LANES >= 4 && LANES <= 16 ? 8 : 4;

struct alignas(16) Piece {
    real element[VECTOR];
};

extern "C" __global__ void __launch_bounds__(WARPS_PER_BLOCK * WARP)
add_products(real* __restrict__ predicted, const real* __restrict__ fixed, const real* __restrict__ solved,
             const int* __restrict__ indices, const int64* __restrict__ segments, int64 n_segments, int width) {
    const int lane = threadIdx.x % WARP, group = lane / LANES, place = lane % LANES, pieces = width / VECTOR;
    const int64 k = int64(blockIdx.x) * WARPS_PER_BLOCK + threadIdx.x / WARP;
    if (k >= n_segments) return;
    const int64 row = segments[3 * k], begin = segments[3 * k + 1];
    const int count = int(segments[3 * k + 2] - begin);
    const Piece* x = reinterpret_cast<const Piece*>(solved + row * width);
    const int* own = indices + begin;
    real* target = predicted + begin;
    int next[DEEP];
#pragma unroll
    for (int d = 0; d < DEEP; d++) next[d] = group + d * GROUPS < count ? own[group + d * GROUPS] : -1;
    for (int first = group; first - group < count; first += GROUPS * DEEP) {
        int index[DEEP];
        real sum[DEEP] = {}, before[DEEP] = {};
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            index[d] = next[d];
            const int entry = first + d * GROUPS, later = entry + GROUPS * DEEP;
            if (place == 0 && index[d] >= 0) before[d] = target[entry];
            next[d] = later < count ? own[later] : -1;
        }
        for (int piece = place; piece < pieces; piece += LANES) {
            const Piece right = x[piece];
            Piece left[DEEP] = {};
#pragma unroll
            for (int d = 0; d < DEEP; d++)
                if (index[d] >= 0) left[d] = reinterpret_cast<const Piece*>(fixed + index[d] * int64(width))[piece];
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
            if (place == 0 && index[d] >= 0) target[first + d * GROUPS] = before[d] + sum[d];
        }
    }
}
