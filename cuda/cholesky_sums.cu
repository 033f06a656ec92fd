// cholesky_sums.cu - A[u] x[u] = b[u] for rows u whose sums `assemble_segments` has left in global memory, rank 97 to
//                    128; A[u] = G + sums + scale_u ridge
// grid  : any number of blocks, which take systems in turn     block : 4 warps, one system at a time
// shapes: partials (n_slots, PARTIAL): 16 x 16 tiles of A's lower triangle as the lanes of a warp hold them, then b
//         slots (n_rows + 1,): system k is the sum of slots slots[k] ... slots[k + 1] - 1   rows (n_rows,)
//         gram (RANK16, RANK16) or null  ridge (RANK,)  scale (n_out,)  solutions (n_out, LD)  status (n_out,)
// shared: SYSTEM_FLOATS * 4 bytes: one panel of the factor in two tf32 parts, the inverses of the blocks on the diagonal
// traffic: PARTIAL floats a slot read, LD floats a row written     flops: n_rows (RANK^3 / 3 + 2 RANK^2)
// limits: 7 or 8 blocks in a row of A; sm_80 or later
//
// A system is a chain of dependent steps (the blocks on the diagonal take half of its time, of which the others wait), so
// throughput is the number of systems on a multiprocessor: the triangle stays in registers, 72 a thread, and shared
// memory holds no more of the factor than one panel. Right-looking: with panel p solved, A22 -= L21 L21^T. A warp owns
// rows w and BLOCKS - 1 - w of blocks, so that all have about as many. Which row and column a slot of registers holds
// depends on the warp at run time; one text serves all warps. 65,536 systems of rank 128 / 100 take 4.1 / 3.5 ms on an
// H200.
#include "system.cuh"

#ifndef LD
#define LD ((RANK + 3) / 4 * 4)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 4           // bounds the registers of a thread at 128
#endif

static_assert(WARPS == 4 && (BLOCKS == 7 || BLOCKS == 8), "the slots of a warp are two rows of 7 or 8 blocks");

constexpr int SLOTS = BLOCKS + 1;                   // tiles of a warp: w + 1 and BLOCKS - w
constexpr int TILE_FLOATS = BLOCK * BLOCK;
constexpr int TILE_COUNT = BLOCKS * (BLOCKS + 1) / 2;
constexpr int PARTIAL = TILE_COUNT * TILE_FLOATS + RANK16;
constexpr int INVERSE_STRIDE = 24;                  // pairs of columns of 8 rows meet 32 banks
constexpr int INVERSE_FLOATS = BLOCK * INVERSE_STRIDE;
constexpr int PANEL_FLOATS = BLOCKS * 2 * TILE_FLOATS;
constexpr int SYSTEM_FLOATS = PANEL_FLOATS + BLOCKS * INVERSE_FLOATS + 2 * RANK16 + 4;

struct SystemMemory {
    float* base;

    // Part 0 (high) or 1 (low) of columns 8 h ... 8 h + 7 of block i of the panel: four floats of each lane.
    __device__ __forceinline__ float4* fragment(int i, int h, int part, int lane) const {
        return reinterpret_cast<float4*>(base) + ((i * 2 + h) * 2 + part) * WARP + lane;
    }
    // Block p on the diagonal by columns, then the inverse W of its factor by rows.
    __device__ __forceinline__ float* inverse(int p) const { return base + PANEL_FLOATS + p * INVERSE_FLOATS; }
    __device__ __forceinline__ float* rhs() const { return base + PANEL_FLOATS + BLOCKS * INVERSE_FLOATS; }
    __device__ __forceinline__ float* diagonal() const { return rhs() + RANK16; }
    __device__ __forceinline__ int* failed() const { return reinterpret_cast<int*>(rhs() + 2 * RANK16); }
};

struct Place {
    int i, j;  // block row and column; i < 0: the slot is empty
};

__device__ __forceinline__ Place place_of(int warp, int slot) {
    const int other = BLOCKS - 1 - warp;
    if (slot <= warp) return {warp, slot};
    return {other == warp ? -1 : other, slot - warp - 1};
}

__device__ __forceinline__ int owner_of(int row) { return row < WARPS ? row : BLOCKS - 1 - row; }

// Calls body(Index<s>{}, i, j) for each slot of a warp that holds a block.
template <class Body> __device__ __forceinline__ void for_slots(int warp, Body&& body) {
    static_for<0, SLOTS>([&](auto slot) {
        const Place at = place_of(warp, decltype(slot)::value);
        if (BLOCKS == 2 * WARPS || at.i >= 0) body(slot, at.i, at.j);
    });
}

// The sums of a system, with the Gram matrix and the ridge; leaves b and the diagonal of A in shared memory. Rows and
// columns from RANK on become those of the identity. No load waits for another: a system is 37 KB from far away.
__device__ __forceinline__ void load_system(Tile (&tiles)[SLOTS], const SystemMemory& memory, const float* __restrict__ partials,
                                            int64 begin, int64 end, const float* __restrict__ gram,
                                            const float* __restrict__ ridge, float scale, int warp, int lane) {
    const int thread = warp * WARP + lane;
    const float* first = partials + begin * PARTIAL + lane;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
        const int tile = BLOCKS < 2 * WARPS && at.i < 0 ? 0 : at.i * (at.i + 1) / 2 + at.j;
#pragma unroll
        for (int k = 0; k < 8; k++) tiles[s].value[k / 4][k % 4] = first[tile * TILE_FLOATS + k * WARP];
    }
    if (thread < RANK16) {
        float sum = 0;
        for (int64 k = begin; k < end; k++) sum += partials[k * PARTIAL + TILE_COUNT * TILE_FLOATS + thread];
        memory.rhs()[thread] = thread < RANK ? sum : 0.0f;
        memory.diagonal()[thread] = thread < RANK ? ridge[thread] * scale : 0.0f;
    }
    if (thread == 0) *memory.failed() = 0;
    for (int64 more = begin + 1; more < end; more++)
        for_slots(warp, [&](auto slot, int i, int j) {
            const float* source = partials + more * PARTIAL + (i * (i + 1) / 2 + j) * TILE_FLOATS + lane;
#pragma unroll
            for (int k = 0; k < 8; k++) tiles[decltype(slot)::value].value[k / 4][k % 4] += source[k * WARP];
        });
    if (gram != nullptr)
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const Place at = place_of(warp, s);
            const int i = BLOCKS < 2 * WARPS && at.i < 0 ? 0 : at.i;
            const float* corner = gram + (i * BLOCK + lane / 4) * RANK16 + at.j * BLOCK + lane % 4 * 2;
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                for (int q = 0; q < 4; q += 2) {
                    const float2 pair = __ldg(reinterpret_cast<const float2*>(corner + 4 * q * RANK16 + 8 * half));
                    tiles[s].value[half][q] += pair.x;
                    tiles[s].value[half][q + 1] += pair.y;
                }
        }
    __syncthreads();  // the ridge stands on the diagonal
    for_slots(warp, [&](auto slot, int i, int j) {
        Tile& tile = tiles[decltype(slot)::value];
        if (i != j && (RANK % BLOCK == 0 || i != BLOCKS - 1)) return;
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const int r = i * BLOCK + tile_row(lane, q), c = j * BLOCK + tile_column(lane, half, q);
                float& element = tile.value[half][q];
                if (r == c) element += memory.diagonal()[r];
                if (RANK % BLOCK != 0 && (r >= RANK || c >= RANK)) element = r == c;
                if (r == c) memory.diagonal()[r] = element;
            }
    });
}

// Factors block p on the diagonal and carries the right-hand side through it: y = W b.
__device__ __forceinline__ void factor_block(const Tile (&tiles)[SLOTS], const SystemMemory& memory, int p, float epsilon, int warp,
                                             int lane) {
    float* block = memory.inverse(p);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
        if (at.i == p && at.j == p)
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                for (int q = 0; q < 4; q++)
                    block[tile_column(lane, half, q) * INVERSE_STRIDE + tile_row(lane, q)] = tiles[s].value[half][q];
    }
    __syncwarp();
    factor_diagonal(block, INVERSE_STRIDE, memory.diagonal() + p * BLOCK, p * BLOCK, memory.failed(), epsilon, lane);
    __syncwarp();
    const int n = lane % BLOCK, part = lane / BLOCK;
    const float value = memory.rhs()[p * BLOCK + n];
    const float* row = block + n * INVERSE_STRIDE + part * (BLOCK / 2);
    float y = 0;
#pragma unroll
    for (int c = 0; c < BLOCK / 2; c++) y += row[c] * __shfl_sync(FULL_WARP, value, c + part * (BLOCK / 2));
    y += __shfl_xor_sync(FULL_WARP, y, BLOCK);
    __syncwarp();  // all have read b
    if (part == 0) memory.rhs()[p * BLOCK + n] = y;
}

// Block i of panel p: tile <- L21 = tile W^T, in registers and, split, in shared memory; b_i -= L21 y_p.
__device__ __forceinline__ void solve_block(Tile& tile, const Fragment<FLOAT32_WIDE> (&inverse)[BLOCK_HALVES],
                                            const SystemMemory& memory, int p, int i, int lane) {
    multiply_by_inverse(tile, inverse, lane);
    float low = 0, high = 0;  // of rows g and g + 8
#pragma unroll
    for (int h = 0; h < BLOCK_HALVES; h++) {
        const float (&v)[4] = tile.value[h];
        float part[2][4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            part[0][q] = __uint_as_float((__float_as_uint(v[q]) + 0x1000u) & 0xffffe000u);
            part[1][q] = v[q] - part[0][q];
        }
        // column 8 h + 2 t is step t of a product, the next column step t + 4
#pragma unroll
        for (int k = 0; k < 2; k++) *memory.fragment(i, h, k, lane) = make_float4(part[k][0], part[k][2], part[k][1], part[k][3]);
        const float2 y = *reinterpret_cast<const float2*>(memory.rhs() + p * BLOCK + 8 * h + lane % 4 * 2);
        low += v[0] * y.x;
        low += v[1] * y.y;
        high += v[2] * y.x;
        high += v[3] * y.y;
    }
    low = quad_sum(low);
    high = quad_sum(high);
    float* b = memory.rhs() + i * BLOCK + lane / 4;
    if (lane % 4 == 0) {
        b[0] -= low;
        b[8] -= high;
    }
}

__device__ __forceinline__ void solve_panel(Tile (&tiles)[SLOTS], const SystemMemory& memory, int p, int warp, int lane) {
    Fragment<FLOAT32_WIDE> inverse[BLOCK_HALVES];  // k = columns 8 h + 2 t, 8 h + 2 t + 1 of W; half m: rows 8 m + g
#pragma unroll
    for (int h = 0; h < BLOCK_HALVES; h++) {
        Raw<8> raw;
#pragma unroll
        for (int m = 0; m < BLOCK_HALVES; m++) {
            const float* row = memory.inverse(p) + (8 * m + lane / 4) * INVERSE_STRIDE;
            const float2 pair = *reinterpret_cast<const float2*>(row + 8 * h + lane % 4 * 2);
            raw.value[0][m] = pair.x;
            raw.value[1][m] = pair.y;
        }
        inverse[h].set(raw, lane);
    }
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
        if (at.j == p && at.i > p) solve_block(tiles[s], inverse, memory, p, at.i, lane);
    }
}

__device__ __forceinline__ void as_rows(unsigned (&operand)[4], const float4& v) {
    operand[0] = __float_as_uint(v.x);
    operand[1] = __float_as_uint(v.y);
    operand[2] = __float_as_uint(v.z);
    operand[3] = __float_as_uint(v.w);
}

__device__ __forceinline__ void as_columns(unsigned (&operand)[BLOCK_HALVES][2], const float4& v) {
    operand[0][0] = __float_as_uint(v.x);
    operand[0][1] = __float_as_uint(v.z);
    operand[1][0] = __float_as_uint(v.y);
    operand[1][1] = __float_as_uint(v.w);
}

// A22 -= L21 L21^T for the tiles of a warp; each product is summed from zero and subtracted with rounding.
__device__ __forceinline__ void update(Tile (&tiles)[SLOTS], const SystemMemory& memory, int p, int warp, int lane) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
        if (at.j <= p || at.i < 0) continue;
        float sum[BLOCK_HALVES][4] = {};
#pragma unroll
        for (int h = 0; h < BLOCK_HALVES; h++) {
            unsigned row[2][4], column[2][BLOCK_HALVES][2];
#pragma unroll
            for (int part = 0; part < 2; part++) {
                as_rows(row[part], *memory.fragment(at.i, h, part, lane));
                as_columns(column[part], *memory.fragment(at.j, h, part, lane));
            }
            multiply_part<FLOAT32_WIDE>(sum, row[1], column[0]);
            multiply_part<FLOAT32_WIDE>(sum, row[0], column[1]);
            multiply_part<FLOAT32_WIDE>(sum, row[0], column[0]);
        }
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) tiles[s].value[half][q] -= sum[half][q];
    }
}

// L^T x = b from the last block on, x in place of b. Block p of L^T x has parts from the blocks below it, each in the
// registers of its warp: these become, once x of their row is known, a lane's part of their column's sums, and the sums
// over lanes and warps are formed when their turn comes.
__device__ __forceinline__ void substitute_back(Tile (&tiles)[SLOTS], const SystemMemory& memory, int warp, int lane) {
    float* sums = memory.base;  // (WARPS, BLOCK), where the panels were
    const int c = lane % BLOCK, part = lane / BLOCK;
    const bool second_half = lane & 16, odd = lane & 8;
#pragma unroll 1
    for (int p = BLOCKS - 1;; p--) {
        if (warp == owner_of(p)) {
            float value = memory.rhs()[p * BLOCK + c];
            if (p < BLOCKS - 1)
#pragma unroll
                for (int w = 0; w < WARPS; w++) value -= sums[w * BLOCK + c];
            const float* column = memory.inverse(p) + part * (BLOCK / 2) * INVERSE_STRIDE + c;
            float x = 0;
#pragma unroll
            for (int n = 0; n < BLOCK / 2; n++)
                x += column[n * INVERSE_STRIDE] * __shfl_sync(FULL_WARP, value, n + part * (BLOCK / 2));
            x += __shfl_xor_sync(FULL_WARP, x, BLOCK);
            __syncwarp();  // all have read b
            if (part == 0) memory.rhs()[p * BLOCK + c] = x;
        }
        __syncthreads();
        if (p == 0) break;
        const float low = memory.rhs()[p * BLOCK + lane / 4], high = memory.rhs()[p * BLOCK + lane / 4 + 8];
        float sum[BLOCK_HALVES][2] = {};  // of columns 8 half + 2 t and the next, over rows g and g + 8
        for_slots(warp, [&](auto slot, int i, int j) {
            float(&value)[BLOCK_HALVES][4] = tiles[decltype(slot)::value].value;
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    if (i == p && j < p) value[half][k] = value[half][k] * low + value[half][2 + k] * high;
                    if (i >= p && j == p - 1) sum[half][k] += value[half][k];
                }
        });
        // over the eight g: each step halves the columns that a lane keeps
        float kept[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float given = __shfl_xor_sync(FULL_WARP, second_half ? sum[0][k] : sum[1][k], 16);
            kept[k] = (second_half ? sum[1][k] : sum[0][k]) + given;
        }
        const float given = __shfl_xor_sync(FULL_WARP, odd ? kept[0] : kept[1], 8);
        float total = (odd ? kept[1] : kept[0]) + given;
        total += __shfl_xor_sync(FULL_WARP, total, 4);
        if (!(lane & 4)) sums[warp * BLOCK + (second_half ? 8 : 0) + lane % 4 * 2 + (odd ? 1 : 0)] = total;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, BLOCKS_PER_SM)
cholesky_sums(float* solutions, int* status, const float* partials, const int64* slots, const int* rows, const float* gram,
              const float* ridge, const float* scale, int n_rows, float epsilon) {
    const int warp = threadIdx.x / WARP;
    int lane = lane_number();
    const SystemMemory memory{shared_memory<float>()};
    for (int k = blockIdx.x; k < n_rows; k += gridDim.x) {
        const int row = rows[k];
        Tile tiles[SLOTS];
        load_system(tiles, memory, partials, slots[k], slots[k + 1], gram, ridge, scale[row], warp, lane);
        __syncthreads();
#pragma unroll 1
        for (int p = 0; p < BLOCKS; p++) {
            lane = fresh(lane);
            if (warp == owner_of(p)) factor_block(tiles, memory, p, epsilon, warp, lane);
            __syncthreads();
            if (p == BLOCKS - 1) break;
            solve_panel(tiles, memory, p, warp, lane);
            __syncthreads();
            update(tiles, memory, p, warp, lane);
        }
        substitute_back(tiles, memory, warp, lane);
        const TeamMemory solved{memory.base, memory.rhs(), memory.diagonal(), memory.failed()};
        store_solution(solutions + int64(row) * LD, status + row, LD, solved, *memory.failed(), warp, lane);
        __syncthreads();  // the solution has been read
    }
}
