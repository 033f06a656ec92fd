// fused_als.cu - A[u] x[u] = b[u] assembled and solved without leaving the chip, for all rows u of a side:
//                A[u] = G + sum_e w_e y_e y_e^T + scale_u ridge,  b[u] = sum_e c_e y_e  (weights: entry_weight)
// grid  : as many blocks as fit on the device; teams of WARPS warps take rows from a counter, longest rows first
// block : TEAMS teams (WARPS 1) or one team (WARPS 4); which warp holds which part of A: system.cuh
// shapes: factors (n_fixed, LD)  gram (RANK16, RANK16) or null  ridge (RANK,)  scale (n_out,)  solutions (n_out, LD)
//         indptr (n_out + 1,)  rows (n_rows,): what to solve  segments (n_segments, 3): slot, begin, end
//         partials (n_slots, PARTIAL): tiles of A as the threads hold them, then b
// shared: shared_floats(TEAMS) * 4 bytes: STAGES chunks of CHUNK entries on their way, or the Cholesky factor
// traffic: nnz (4 RANK + 8) bytes read, 4 LD n_rows written   flops: nnz RANK (RANK + 1) + n_rows (RANK^3 / 3 + 2 RANK^2)
// limits: RANK <= 128; LD a multiple of 4 with zeros beyond RANK; w_e >= 0 (the plan sees to it); sm_80 or later
// Rows longer than a segment go through `assemble_segments` and `solve_partials`, which add the segments in order, so
// that one row never holds up the sweep; results do not depend on who computes what.
#include "system.cuh"

#ifndef LD
#define LD ((RANK + 3) / 4 * 4)   // floats from one row of factors to the next
#endif
#ifndef ARITHMETIC
#define ARITHMETIC 0              // see Precision in fragments.cuh
#endif
#ifndef SOLVER
#define SOLVER 0                  // 0 Cholesky, 1 conjugate gradients
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif
#ifndef TEAMS
#define TEAMS (WARPS == 1 ? 4 : 1)
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 3           // bounds the registers of a thread
#endif

static_assert(LD % 4 == 0 && LD >= RANK && LD <= RANK16, "rows are copied in pieces of 16 bytes");
static_assert(WARPS == 1 || TEAMS == 1, "a team of several warps synchronizes its whole block");
static_assert(STAGES >= 2, "one chunk is computed while the next ones arrive");

constexpr int ENTRIES_PER_WARP = WARPS == 1 ? 16 : 8;  // of a chunk, fetched by one warp
constexpr int CHUNK = ENTRIES_PER_WARP * WARPS;
constexpr int PIECES = RANK16 / 4;                     // 16-byte pieces of a row, padding included
constexpr int TILE_COUNT = BLOCKS * (BLOCKS + 1) / 2;
constexpr int PARTIAL = TILE_COUNT * BLOCK * BLOCK + RANK16;
constexpr bool WEIGHTED = IMPLICIT;
constexpr int ROWS = product_rows(ARITHMETIC);         // entries of one product

struct ChunkWeights {
    float2 entry[CHUNK];  // (root of the outer weight, linear weight)
};

constexpr int STAGED = STAGES * CHUNK * STRIDE > RANK16 * STRIDE ? STAGES * CHUNK * STRIDE : RANK16 * STRIDE;
constexpr int TEAM_FLOATS = STAGED + TEAM_VECTORS + STAGES * CHUNK * 2;

__device__ __forceinline__ TeamMemory team_memory(int team) {
    float* base = shared_memory<float>() + team * TEAM_FLOATS;
    return {base, base + STAGED, base + STAGED + RANK16, base + STAGED + 2 * RANK16};
}

__device__ __forceinline__ ChunkWeights* team_weights(int team) {
    return reinterpret_cast<ChunkWeights*>(shared_memory<float>() + team * TEAM_FLOATS + STAGED + TEAM_VECTORS);
}

struct Inputs {
    const float* factors;
    const int* indices;
    const float* ratings;
    const float* offsets;
    float alpha, unobserved_weight;
};

// An entry between the loading of its index and the copying of its row.
struct Entry {
    int index;
    float rating, offset;
};

// Entries begin ... end of one row, one after the other through STAGES buffers.
struct Stream {
    const Inputs& in;
    const TeamMemory& memory;
    ChunkWeights* weights;
    int64 begin, end;
    int warp, lane;
    Entry arriving, next;  // of the chunk to be issued, and of the one after it: their loads are under way

    __device__ __forceinline__ int64 position(int chunk) const { return begin + int64(chunk) * CHUNK + warp * ENTRIES_PER_WARP + lane; }

    __device__ __forceinline__ Entry load(int chunk) const {
        const int64 at = position(chunk);
        if (lane >= ENTRIES_PER_WARP || at >= end) return {-1, 0, 0};
        return {__ldg(in.indices + at), __ldg(in.ratings + at), 0};
    }

    __device__ __forceinline__ void load_offset(Entry& entry) const {
        if (HAS_OFFSETS && entry.index >= 0) entry.offset = __ldg(in.offsets + entry.index);
    }

    // Starts the copies of a chunk (an empty group beyond the last one) and the loads of the next entries.
    __device__ __forceinline__ void issue(int chunk, int chunks) {
        if (chunk < chunks) {
            float* stage = memory.rows + (chunk % STAGES * CHUNK + warp * ENTRIES_PER_WARP) * STRIDE;
#pragma unroll
            for (int k = lane; k < ENTRIES_PER_WARP * PIECES; k += WARP) {
                const int entry = k / PIECES, piece = k % PIECES;
                const int index = __shfl_sync(FULL_WARP, arriving.index, entry);
                const bool valid = index >= 0 && piece < LD / 4;
                const float* source = in.factors + (valid ? int64(index) * LD + 4 * piece : 0);
                copy_async_16(stage + entry * STRIDE + 4 * piece, source, valid);
            }
            if (lane < ENTRIES_PER_WARP) {
                float2 weight = make_float2(0, 0);
                if (arriving.index >= 0) {
                    const EntryWeight w = entry_weight(arriving.rating, arriving.offset, in.alpha, in.unobserved_weight);
                    weight = make_float2(WEIGHTED ? sqrtf(w.outer) : 1.0f, w.linear);
                }
                weights[chunk % STAGES].entry[warp * ENTRIES_PER_WARP + lane] = weight;
            }
            arriving = next;
            load_offset(arriving);
            next = load(chunk + 2);
        }
        copy_commit();
    }

    __device__ __forceinline__ void run(Holding& mine) {
        const int chunks = int((end - begin + CHUNK - 1) / CHUNK);
        arriving = load(0);
        load_offset(arriving);
        next = load(1);
#pragma unroll 1
        for (int chunk = 0; chunk < STAGES - 1; chunk++) issue(chunk, chunks);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            copy_wait<STAGES - 2>();
            team_sync();  // the chunk has arrived for all, and all have done with the one before, whose buffer is next
            issue(chunk + STAGES - 1, chunks);
            const float* stage = memory.rows + chunk % STAGES * CHUNK * STRIDE;
            const float2* entry = weights[chunk % STAGES].entry;
#pragma unroll 1
            for (int k = 0; k < CHUNK; k += ROWS) {
                StepWeights<ROWS> steps;
#pragma unroll
                for (int step = 0; step < ROWS / 4; step++) {
                    const float2 weight = entry[k + 4 * step + lane % 4];
                    steps.root[step] = weight.x;
                    steps.linear[step] = weight.y;
                }
                accumulate<ARITHMETIC, WEIGHTED>(mine, stage + k * STRIDE, steps, warp, lane);
            }
        }
        team_sync();  // the buffers become the Cholesky factor
    }
};

// Position of this team's next piece of work, the same in all its threads.
__device__ __forceinline__ int64 take(int64* counter, int* shared, int warp, int lane) {
    int64 position = 0;
    if constexpr (WARPS == 1) {
        if (lane == 0) position = atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull);
        position = __shfl_sync(FULL_WARP, position, 0);
    } else {
        int64* slot = reinterpret_cast<int64*>(shared);
        __syncthreads();  // all have read the position before
        if (warp == 0 && lane == 0) *slot = atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull);
        __syncthreads();
        position = *slot;
    }
    return position;
}

__device__ __forceinline__ void finish(Holding& mine, float* solutions, int* status, int64 row, const TeamMemory& memory,
                                       const float* gram, const float* ridge, float scale, float epsilon, int cg_steps, int warp,
                                       int lane) {
    lane = fresh(lane);
    complete(mine, memory, gram, ridge, scale, warp, lane);
    team_sync();
    lane = fresh(lane);
    int failed;
    if constexpr (SOLVER == 0) failed = cholesky_solve(mine, memory, epsilon, warp, lane);
    else failed = conjugate_gradient(mine, memory, solutions + row * LD, cg_steps, warp, lane);
    store_solution(solutions, status, row, LD, memory, failed, warp, lane);
}

// Rows of at most one segment. solutions holds the warm start of conjugate gradients.
extern "C" __global__ void __launch_bounds__(TEAMS * TEAM, BLOCKS_PER_SM)
solve_rows(float* solutions, int* status, const float* factors, const int* indices, const float* ratings, const float* offsets,
           const int64* indptr, const int* rows, const float* gram, const float* ridge, const float* scale, int64* counter,
           int64 n_rows, float alpha, float unobserved_weight, float epsilon, int cg_steps) {
    __shared__ int64 position_shared;
    const int team = threadIdx.x / TEAM, warp = threadIdx.x % TEAM / WARP, lane = threadIdx.x % WARP;
    const TeamMemory memory = team_memory(team);
    const Inputs in{factors, indices, ratings, offsets, alpha, unobserved_weight};
    while (true) {
        const int64 position = take(counter, reinterpret_cast<int*>(&position_shared), warp, lane);
        if (position >= n_rows) break;
        const int row = rows[position];
        Holding mine;
        clear(mine);
        Stream stream{in, memory, team_weights(team), indptr[row], indptr[row + 1], warp, lane, {}, {}};
        stream.run(mine);
        finish(mine, solutions, status, row, memory, gram, ridge, scale[row], epsilon, cg_steps, warp, lane);
        team_sync();  // the solution has been read
    }
}

// Sums of segments of long rows.
extern "C" __global__ void __launch_bounds__(TEAMS * TEAM, BLOCKS_PER_SM)
assemble_segments(float* partials, const float* factors, const int* indices, const float* ratings, const float* offsets,
                  const int64* segments, int64* counter, int64 n_segments, float alpha, float unobserved_weight) {
    __shared__ int64 position_shared;
    const int team = threadIdx.x / TEAM, warp = threadIdx.x % TEAM / WARP, lane = threadIdx.x % WARP;
    const TeamMemory memory = team_memory(team);
    const Inputs in{factors, indices, ratings, offsets, alpha, unobserved_weight};
    while (true) {
        const int64 position = take(counter, reinterpret_cast<int*>(&position_shared), warp, lane);
        if (position >= n_segments) break;
        const int64* segment = segments + 3 * position;
        Holding mine;
        clear(mine);
        Stream stream{in, memory, team_weights(team), segment[1], segment[2], warp, lane, {}, {}};
        stream.run(mine);
        float* partial = partials + segment[0] * PARTIAL;
        with_role(warp, [&](auto role) {
            constexpr int ROLE = decltype(role)::value;
            for_owned<ROLE>(mine.tiles, [&](auto row, auto column, Tile& tile) {
                constexpr int i = decltype(row)::value, j = decltype(column)::value;
                float* target = partial + (i * (i + 1) / 2 + j) * BLOCK * BLOCK + lane;
#pragma unroll
                for (int k = 0; k < 8; k++) target[k * WARP] = tile.value[k / 4][k % 4];
            });
            static_for<0, BLOCKS>([&](auto index) {
                constexpr int b = decltype(index)::value;
                if constexpr (owner(b, b) == ROLE) {
                    constexpr int place = diagonal_slot(b);
#pragma unroll
                    for (int half = 0; half < BLOCK_HALVES; half++) {
                        float sum = mine.rhs[place][half];
                        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
                        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
                        if (lane % 4 == 0) partial[TILE_COUNT * BLOCK * BLOCK + b * BLOCK + 8 * half + lane / 4] = sum;
                    }
                }
            });
        });
    }
}

// Rows of several segments: system k is the sum of partials slots[k] ... slots[k + 1] - 1.
extern "C" __global__ void __launch_bounds__(TEAMS * TEAM, BLOCKS_PER_SM)
solve_partials(float* solutions, int* status, const float* partials, const int64* slots, const int* rows, const float* gram,
               const float* ridge, const float* scale, int64* counter, int64 n_rows, float epsilon, int cg_steps) {
    __shared__ int64 position_shared;
    const int team = threadIdx.x / TEAM, warp = threadIdx.x % TEAM / WARP, lane = threadIdx.x % WARP;
    const TeamMemory memory = team_memory(team);
    while (true) {
        const int64 position = take(counter, reinterpret_cast<int*>(&position_shared), warp, lane);
        if (position >= n_rows) break;
        const int row = rows[position];
        Holding mine;
        clear(mine);
#pragma unroll 1
        for (int64 k = slots[position]; k < slots[position + 1]; k++) {
            const float* partial = partials + k * PARTIAL;
            with_role(warp, [&](auto role) {
                constexpr int ROLE = decltype(role)::value;
                for_owned<ROLE>(mine.tiles, [&](auto block_row, auto column, Tile& tile) {
                    constexpr int i = decltype(block_row)::value, j = decltype(column)::value;
                    const float* source = partial + (i * (i + 1) / 2 + j) * BLOCK * BLOCK + lane;
#pragma unroll
                    for (int q = 0; q < 8; q++) tile.value[q / 4][q % 4] += source[q * WARP];
                });
                static_for<0, BLOCKS>([&](auto index) {
                    constexpr int b = decltype(index)::value;
                    if constexpr (owner(b, b) == ROLE) {
                        constexpr int place = diagonal_slot(b);
#pragma unroll
                        for (int half = 0; half < BLOCK_HALVES; half++)  // one of the four threads that are summed later
                            if (lane % 4 == 0)
                                mine.rhs[place][half] += partial[TILE_COUNT * BLOCK * BLOCK + b * BLOCK + 8 * half + lane / 4];
                    }
                });
            });
        }
        finish(mine, solutions, status, row, memory, gram, ridge, scale[row], epsilon, cg_steps, warp, lane);
        team_sync();
    }
}
