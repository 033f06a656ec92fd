// cholesky.cu - Cholesky factorization and solution of a batch of systems in global memory, one warp per system, with the
//               tensor-core products of system.cuh; larger systems and other types: cholesky_any.cu
// grid  : ceil(n / TEAMS) blocks       block : TEAMS warps
// shapes: matrices (n_slots, RANK, RANK): lower triangles, not changed  rhs (n_slots, RANK)  slots (n + 1,)  rows (n,)
//         solutions (n_out, width): the solution of system k, slot slots[k], goes to row rows[k]; zeros if it fails or has no slot
// shared: TEAMS * TEAM_FLOATS * 4 bytes   traffic: RANK (RANK + 1) / 2 + 2 RANK floats per system   flops: RANK^3 / 3
// limits: RANK <= 64; sm_80 or later
// synchronization: warps are independent, and each has its own shared memory. __syncwarp separates the writes of the vectors from
//         the solver, which ends with a barrier of the warp (system.cuh). Warps without a system return: no block barrier follows.
#include "system.cuh"

#ifndef TEAMS
#define TEAMS 4
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif

static_assert(WARPS == 1, "a warp solves a system");

constexpr int TEAM_FLOATS = FACTOR_FLOATS + TEAM_VECTORS;

// Elements (r, c) and (r, c + 1) of a lower triangle, c even: of the identity beyond RANK, and 0 above the diagonal, where the
// matrix may be uninitialized.
__device__ __forceinline__ float2 pair_of(const float* __restrict__ matrix, int r, int c) {
    if (r >= RANK) return make_float2(r == c, r == c + 1);
    if (RANK % 2 == 0 && c < r) return __ldg(reinterpret_cast<const float2*>(matrix + r * RANK + c));
    return make_float2(c <= r ? matrix[r * RANK + c] : 0.0f, c < r ? matrix[r * RANK + c + 1] : 0.0f);
}

extern "C" __global__ void __launch_bounds__(TEAMS * WARP, BLOCKS_PER_SM)
cholesky_tiles(float* solutions, int* status, const float* __restrict__ matrices, const float* __restrict__ rhs,
               const int64* __restrict__ slots, const int* __restrict__ rows, int64 width, int64 n, float epsilon) {
    const int team = threadIdx.x / WARP, lane = lane_number();
    const int64 k = int64(blockIdx.x) * TEAMS + team;
    if (k >= n) return;
    float* base = shared_memory<float>() + team * TEAM_FLOATS;
    const TeamMemory memory{base, base + FACTOR_FLOATS};
    const int64 slot = slots[k], row = rows[k];
    const bool empty = slots[k + 1] == slot;
    const float* matrix = matrices + (empty ? 0 : slot * RANK * RANK);
    Holding mine;
    for_tiles<0>(mine.tiles, [&](Tile& tile, auto block_row, auto column) {
        constexpr int i = decltype(block_row)::value, j = decltype(column)::value;
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q += 2) {
                const int r = i * BLOCK + tile_row(lane, q), c = j * BLOCK + tile_column(lane, half, q);
                const float2 pair = empty ? make_float2(r == c, r == c + 1) : pair_of(matrix, r, c);
                tile.value[half][q] = pair.x;
                tile.value[half][q + 1] = pair.y;
            }
    });
    for (int r = lane; r < RANK16; r += WARP) memory.diagonal[r] = r < RANK && !empty ? matrix[r * (RANK + 1)] : 1.0f;
    for (int r = lane; r < RANK16; r += WARP) memory.rhs[r] = r < RANK && !empty ? rhs[slot * RANK + r] : 0.0f;
    __syncwarp();
    const int failed = cholesky_solve(mine, memory, epsilon, 0, lane);
    store_solution(solutions + row * width, status + row, RANK, memory, failed, 0, lane);
}
