// losses.cu - losses of observed entries at given factors, and squared lengths of rows; sums in float64
// grid  : one warp per segment (losses) or row (squares), WARPS_PER_BLOCK warps per block
// shapes: users (n_users, LD)  items (n_items, LD)  segments (n_segments, 3): user, begin, end  losses (n_segments,)
//         user_offsets (n_users,): mean + bias, with HAS_OFFSETS; offsets (n_items,): bias
// synchronization: none; a warp owns a segment or row and exchanges registers only
// traffic: nnz (FACTORS + 2) * sizeof(real) bytes read   flops: 2 FACTORS nnz
#include "common.cuh"

#ifndef FACTORS
#define FACTORS 64
#endif
#ifndef LD
#define LD FACTORS
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif

constexpr int WARPS_PER_BLOCK = 8;
constexpr int PER_LANE = ceil_div(FACTORS, WARP);

struct Entries { const int* indices; const real* ratings; const real* offsets; };
struct Weights { real alpha, unobserved; };

// Explicit: (r - mean - b_u - b_i - x.y)^2. Implicit: c (p - x.y)^2 - w0 (x.y)^2, since the Gram matrices count the
// entry as unobserved.
extern "C" __global__ void __launch_bounds__(WARPS_PER_BLOCK * WARP, 2)
segment_losses(double* losses, const real* users, const real* items, Entries entries, const real* user_offsets,
               const int64* segments, int64 n_segments, Weights weights) {
    const int lane = threadIdx.x % WARP;
    const int64 k = int64(blockIdx.x) * WARPS_PER_BLOCK + threadIdx.x / WARP;
    if (k >= n_segments) return;
    const int64 user = segments[3 * k], begin = segments[3 * k + 1], end = segments[3 * k + 2];
    double sum = 0;
    double x[PER_LANE];
#pragma unroll
    for (int s = 0; s < PER_LANE; s++) x[s] = lane + s * WARP < FACTORS ? double(users[user * LD + lane + s * WARP]) : 0.0;
    for (int64 e = begin; e < end; e++) {
        const int item = entries.indices[e];
        double product = 0;
#pragma unroll
        for (int s = 0; s < PER_LANE; s++)
            if (lane + s * WARP < FACTORS) product += x[s] * double(items[int64(item) * LD + lane + s * WARP]);
        product = warp_sum(product);
        const double rating = entries.ratings[e];
        if (IMPLICIT) {
            const double confidence = 1.0 + double(weights.alpha) * fabs(rating), miss = (rating > 0 ? 1.0 : 0.0) - product;
            sum += confidence * miss * miss - double(weights.unobserved) * product * product;
        } else {
            const double known = HAS_OFFSETS ? double(entries.offsets[item]) + double(user_offsets[user]) : 0.0;
            const double miss = rating - known - product;
            sum += miss * miss;
        }
    }
    if (lane == 0) losses[k] = sum;
}

extern "C" __global__ void __launch_bounds__(WARPS_PER_BLOCK * WARP)
row_squares(double* squares, const real* table, int64 n_rows) {
    const int lane = threadIdx.x % WARP;
    const int64 row = int64(blockIdx.x) * WARPS_PER_BLOCK + threadIdx.x / WARP;
    if (row >= n_rows) return;
    double sum = 0;
    for (int k = lane; k < FACTORS; k += WARP) sum += double(table[row * LD + k]) * double(table[row * LD + k]);
    sum = warp_sum(sum);
    if (lane == 0) squares[row] = sum;
}
