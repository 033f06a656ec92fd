// dual_rows.cu - solves rows u with at most SLOTS entries in the dual form: one unknown per entry instead of one per factor
//                K = S Z_u Z_u^T S + ridge I,  q = K^-1 r,  x[u] = Z_u^T S q   (docs/methods.md derives it)
//                explicit: Z_u = the factors of the entries, S = 1, r the residuals, ridge = scale_u lambda
//                implicit: Z_u = those factors in the basis in which w0 F^T F + lambda I is the identity, ridge = 1,
//                          S^2 = c - w0, r = c p / S; x[u] is in that basis, too (basis.cu)
// grid  : as many blocks as fit on the device   block : TEAMS warps; each solves PACK rows at a time, as the diagonal blocks
//         of one system of order RANK = PACK * SLOTS
// shapes: solutions (n_out, LD): row rows[k], or with IMPLICIT row k  status (n_out,)  factors (n_fixed, LD)
//         indptr (n_out + 1,)  rows (n_rows,)  scale (n_out,)
// shared: TEAMS * TEAM_FLOATS * 4 bytes: the Cholesky factor of K, and the weights of the entries
// traffic: a row's factors twice, the second time from a cache: nnz (4 LD + 8) bytes read, 4 LD n_rows written
// flops : n^2 LD + n^3 / 3 + 4 n LD for n entries; the tensor-core products always process RANK entries
// limits: RANK a multiple of 16 up to 64; ridge > 0; c >= w0; sm_80 or later
// Factors are loaded from global memory straight into registers, in the operand layout of tensor cores, so a row of factors
// is read once for both sides of the product.
// synchronization: warps are independent, and each has its own shared memory. __syncwarp separates writes of entries, weights and
//         vectors from reads by other lanes, and the last reads of some rows' entries from the writes of the next ones. The solver
//         has its own barriers (system.cuh).
#include "system.cuh"

#ifndef FACTORS
#define FACTORS 128               // columns of Z_u
#endif
#ifndef LD
#define LD ((FACTORS + 3) / 4 * 4) // floats from one row of factors to the next
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif
#ifndef BIASED
#define BIASED 0                  // 1: column FACTORS - 1 of the factors is the constant 1 of a bias
#endif
#ifndef PACK
#define PACK 1
#endif
#ifndef TEAMS
#define TEAMS 4
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2           // minimum resident blocks per multiprocessor; limits the registers of a thread
#endif

static_assert(WARPS == 1 && RANK % BLOCK == 0, "a warp solves a system");
static_assert(PACK == 1 || (RANK == BLOCK && BLOCK % PACK == 0), "only rows of a few entries share a system");
static_assert(LD % 4 == 0 && LD >= FACTORS && LD <= 128, "lanes read 16 bytes of a row");

constexpr int SLOTS = RANK / PACK;
constexpr int TEAM_FLOATS = FACTOR_FLOATS + TEAM_VECTORS + 2 * RANK16;
constexpr int PIECE = BLOCKS < 4 ? 4 : 2;                 // columns that a lane loads at a time; registers limit it
constexpr int CHUNK = 4 * PIECE;
constexpr int LANES = LD <= 32 ? 8 : LD <= 64 ? 16 : 32;  // lanes that read one row, 16 bytes each
constexpr float LEAST_ROOT = 1e-5f;                       // replaces the root of a zero weight: see `root_of`

struct Entries {
    const int* indices;
    const float* ratings;
    const float* offsets;
    float alpha, unobserved_weight;
};

// Weights and indices of the entries in shared memory; zeros beyond the last entry of a row.
struct EntryMemory {
    float* root;  // (RANK,) S
    int* index;   // (RANK,) row of the factors, -1 beyond the last entry
};

struct Root {
    float root, right;  // S and r
};

// A weight of 0 means c = w0, and r = c p / S is undefined. S = 1e-5 instead changes K by 1e-10 z z^T, relative to its identity
// term, where z^T z <= 1 / w0 and w0 = c >= 1.
__device__ __forceinline__ Root root_of(const Entries& in, int64 at, int index) {
    const float offset = HAS_OFFSETS ? __ldg(in.offsets + index) : 0.0f;
    const EntryWeight w = entry_weight(__ldg(in.ratings + at), offset, in.alpha, in.unobserved_weight);
    if (!IMPLICIT) return {1.0f, w.linear};
    const float root = fmaxf(sqrtf(w.outer), LEAST_ROOT);
    return {root, w.linear / root};
}

// CHUNK columns of the factors of all entries: a lane holds, for rows 16 b + 8 half + g of K, PIECE columns from k + PIECE t on.
struct Columns {
    float value[BLOCKS][BLOCK_HALVES][PIECE];

    __device__ __forceinline__ void load(const float* factors, const int (&index)[BLOCKS][BLOCK_HALVES], int k, int lane) {
        const bool inside = LD % CHUNK == 0 || k + lane % 4 * PIECE < LD;
        const float* first = factors + k + lane % 4 * PIECE;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++) {
                const bool valid = inside && index[b][half] >= 0;
                const float* source = first + int64(valid ? index[b][half] : 0) * LD;
                float(&target)[PIECE] = value[b][half];
                if constexpr (PIECE == 4) {
                    const float4 v = valid ? __ldg(reinterpret_cast<const float4*>(source)) : make_float4(0, 0, 0, 0);
                    target[0] = v.x, target[1] = v.y, target[2] = v.z, target[3] = v.w;
                } else {
                    const float2 v = valid ? __ldg(reinterpret_cast<const float2*>(source)) : make_float2(0, 0);
                    target[0] = v.x, target[1] = v.y;
                }
            }
    }
};

// Tiles += products of 8 of the columns; a thread contributes its columns FIRST and FIRST + 1.
template <int FIRST> __device__ __forceinline__ void multiply_columns(Holding& mine, const Columns& columns, int lane) {
    Fragment<FLOAT32_WIDE> fragment[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        Raw<8> raw;
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++) raw.value[step][half] = columns.value[b][half][FIRST + step];
        fragment[b].set(raw, lane);
    }
    static_for<0, BLOCKS>([&](auto column) {
        multiply_column_rounded<0, decltype(column)::value>(mine.tiles, fragment);
    });
}

// Computes the lower blocks of Z_u Z_u^T.
__device__ __forceinline__ void assemble(Holding& mine, const EntryMemory& entries, const float* factors, int lane) {
    int index[BLOCKS][BLOCK_HALVES];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++) index[b][half] = entries.index[b * BLOCK + 8 * half + lane / 4];
    Columns columns;
    columns.load(factors, index, 0, lane);
#pragma unroll 1
    for (int k = 0; k < LD; k += CHUNK) {
        const Columns now = columns;
        if (k + CHUNK < LD) columns.load(factors, index, k + CHUNK, lane);  // in flight during the products
        multiply_columns<0>(mine, now, lane);
        if constexpr (PIECE == 4) multiply_columns<2>(mine, now, lane);
    }
}

// Computes K from Z_u Z_u^T. `memory.diagonal` holds the ridge on entry and the diagonal of K on return. `constant` is the
// contribution of the bias column to each product.
__device__ __forceinline__ void complete(Holding& mine, const TeamMemory& memory, const float* root, float constant, int lane) {
    for_tiles<0>(mine.tiles, [&](Tile& tile, auto block_row, auto block_column) {
        constexpr int i = decltype(block_row)::value, j = decltype(block_column)::value;
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const int r = i * BLOCK + tile_row(lane, q), c = j * BLOCK + tile_column(lane, half, q);
                float& element = tile.value[half][q];
                if (BIASED) element += constant;
                element *= root[r] * root[c];
                if (PACK > 1 && r / SLOTS != c / SLOTS) element = 0;  // entries of different rows
            }
        if constexpr (i == j)
            for_diagonal(tile, lane, [&](float& element, int row) {
                float& diagonal = memory.diagonal[i * BLOCK + row];
                element += diagonal;
                diagonal = element;
            });
    });
}

// Computes x = Z_u^T S q; sums the products of all lanes that read the same columns.
__device__ __forceinline__ float4 solution(const EntryMemory& entries, const float* q, const float* factors, int begin, int end,
                                           int lane) {
    const int column = lane % LANES * 4;
    float4 sum = make_float4(0, 0, 0, 0);
    if (column < LD)
#pragma unroll 4
        for (int e = begin + lane / LANES; e < end; e += WARP / LANES) {
            const float4 z = __ldg(reinterpret_cast<const float4*>(factors + int64(entries.index[e]) * LD + column));
            const float v = q[e] * entries.root[e];
            sum.x += v * z.x;
            sum.y += v * z.y;
            sum.z += v * z.z;
            sum.w += v * z.w;
        }
#pragma unroll
    for (int distance = LANES; distance < WARP; distance *= 2) {
        sum.x += __shfl_xor_sync(FULL_WARP, sum.x, distance);
        sum.y += __shfl_xor_sync(FULL_WARP, sum.y, distance);
        sum.z += __shfl_xor_sync(FULL_WARP, sum.z, distance);
        sum.w += __shfl_xor_sync(FULL_WARP, sum.w, distance);
    }
    return sum;
}

// The status of row m of a failed system. A non-finite value corrupts the solutions of all rows, but appears on the diagonal of
// its own row only.
__device__ __forceinline__ int failure_of(const TeamMemory& memory, int failed, int m, int lane) {
    if (failed > 0) return (failed - 1) / SLOTS == m ? failed - m * SLOTS : 0;
    if (PACK == 1) return NON_FINITE;
    const bool own = lane < SLOTS && !isfinite(memory.diagonal[m * SLOTS + lane]);
    return __any_sync(FULL_WARP, own) ? NON_FINITE : 0;
}

// Solves all rows. basis_failed: with IMPLICIT, the failing leading minor of basis.cu, or 0. bias_square: lambda / lambda_b.
extern "C" __global__ void __launch_bounds__(TEAMS * WARP, BLOCKS_PER_SM)
dual_rows(float* solutions, int* status, const float* __restrict__ factors, const int* __restrict__ indices,
          const float* __restrict__ ratings, const float* __restrict__ offsets, const int64* __restrict__ indptr,
          const int* __restrict__ rows, const float* __restrict__ scale, const int* __restrict__ basis_failed, int n_rows,
          float alpha, float unobserved_weight, float regularization, float bias_square, float epsilon) {
    const int team = threadIdx.x / WARP, lane = lane_number();
    float* base = shared_memory<float>() + team * TEAM_FLOATS;
    float* vectors = base + FACTOR_FLOATS;
    const TeamMemory memory{base, vectors};
    const EntryMemory entries{vectors + TEAM_VECTORS, reinterpret_cast<int*>(vectors + TEAM_VECTORS + RANK16)};
    const Entries in{indices, ratings, offsets, alpha, unobserved_weight};
    const int no_basis = IMPLICIT ? *basis_failed : 0;
    const int column = lane % LANES * 4;
    for (int first = (blockIdx.x * TEAMS + team) * PACK; first < n_rows; first += gridDim.x * TEAMS * PACK) {
        const int mine_at = first + lane / SLOTS % PACK;  // this lane's row
        const int row = mine_at < n_rows ? rows[mine_at] : -1;
        const int64 begin = row < 0 ? 0 : indptr[row];
        const int n = row < 0 ? 0 : int(indptr[row + 1] - begin);
        const float ridge = IMPLICIT || row < 0 ? 1.0f : scale[row] * regularization;
#pragma unroll
        for (int slot = lane; slot < RANK; slot += WARP) {
            const int e = slot % SLOTS;
            const int index = e < n ? __ldg(in.indices + begin + e) : -1;
            const Root entry = e < n ? root_of(in, begin + e, index) : Root{0, 0};
            entries.index[slot] = index;
            entries.root[slot] = entry.root;
            memory.rhs[slot] = entry.right;
            memory.diagonal[slot] = ridge + 0.0f * entry.right;  // NaN where the right-hand side is not finite
        }
        __syncwarp();
        Holding mine;
        clear(mine.tiles);
        assemble(mine, entries, factors, lane);
        complete(mine, memory, entries.root, bias_square - 1, lane);
        __syncwarp();
        const int failed = cholesky_solve(mine, memory, epsilon, 0, lane);
#pragma unroll
        for (int m = 0; m < PACK; m++) {
            const int count = __shfl_sync(FULL_WARP, n, m * SLOTS), target = __shfl_sync(FULL_WARP, row, m * SLOTS);
            float4 x = solution(entries, memory.rhs, factors, m * SLOTS, m * SLOTS + count, lane);
            if (BIASED && column == (FACTORS - 1) / 4 * 4) (&x.x)[(FACTORS - 1) % 4] *= bias_square;
            const bool finite = isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
            int wrong = no_basis;
            if (!wrong && (failed || !__all_sync(FULL_WARP, finite))) wrong = failure_of(memory, failed, m, lane);
            if (wrong || failed) x = make_float4(0, 0, 0, 0);
            if (target >= 0 && lane < LANES && column < LD)
                *reinterpret_cast<float4*>(solutions + int64(IMPLICIT ? first + m : target) * LD + column) = x;
            if (target >= 0 && lane == 0) status[target] = wrong;
        }
        __syncwarp();  // the entries have been read
    }
}
