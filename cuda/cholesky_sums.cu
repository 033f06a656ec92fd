// cholesky_sums.cu - solves A[u] x[u] = b[u], A[u] = G + sums + scale_u ridge, rank 97 to 128, for rows u whose sums are in global
//                    memory, from `assemble_segments` or `warpgroup_sums`; with MATRICES, solves systems stored as matrices
// grid  : any number of blocks; block k solves systems k, k + gridDim.x, ...     block : 4 warps, one system at a time
// shapes: partials (n_slots, PARTIAL): 16 x 16 tiles of A's lower triangle in the register layout of a warp, then b
//         slots (n_rows + 1,): system k is the sum of slots slots[k] ... slots[k + 1] - 1   rows (n_rows,)
//         gram (RANK16, RANK16) or null  ridge (RANK,)  scale (n_out,)  solutions (n_out, LD)  status (n_out,)
// shared: SYSTEM_FLOATS * 4 bytes: one panel of the factor in two float16 parts, the inverses of the blocks on the diagonal
// traffic: PARTIAL floats per slot read, LD floats per row written     flops: n_rows (RANK^3 / 3 + 2 RANK^2)
// limits: 7 or 8 blocks in a row of A; sm_80 or later
//
// A system is a chain of dependent steps, and a multiprocessor holds four systems. Both the length of the chain and the number
// of instructions matter, because four systems keep the schedulers busy for half of the time. The triangle stays in registers,
// 72 per thread; shared memory holds only one panel of the factor. The factorization is right-looking: after panel p is solved,
// A22 -= L21 L21^T. Warp w owns block rows w and BLOCKS - 1 - w, so all warps hold about equally many blocks. The block row and
// column of a register slot depend on the warp at run time; the same code serves all warps.
//
// Products use float16 parts, high and low: half the instructions of tf32 parts. Powers of two first scale the diagonal of A to
// 1 ... 4: D A D (D^-1 x) = D b. All elements of A and its factor are then below 4. There the two parts represent a value to
// within 2^-25, the error that a backward-stable Cholesky factorization in float32 has anyway.
#include "system.cuh"

#ifndef LD
#define LD ((RANK + 3) / 4 * 4)
#endif
#ifndef MATRICES
#define MATRICES 0                // 1: compile only the kernel `cholesky_matrices`
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 4           // limits a thread to 128 registers
#endif

static_assert(WARPS == 4 && (BLOCKS == 7 || BLOCKS == 8), "the slots of a warp are two rows of 7 or 8 blocks");

constexpr int SLOTS = BLOCKS + 1;                   // tiles per warp: w + 1 and BLOCKS - w
constexpr int TILE_FLOATS = BLOCK * BLOCK;
constexpr int TILE_COUNT = BLOCKS * (BLOCKS + 1) / 2;
constexpr int PARTIAL = TILE_COUNT * TILE_FLOATS + RANK16;
constexpr int INVERSE_STRIDE = 24;                  // pairs of columns of 8 rows hit all 32 banks
constexpr int INVERSE_FLOATS = BLOCK * INVERSE_STRIDE;
constexpr int PANEL_FLOATS = BLOCKS * 2 * TILE_FLOATS;
constexpr int SYSTEM_FLOATS = PANEL_FLOATS + BLOCKS * INVERSE_FLOATS + 3 * RANK16 + 8;

struct System {
    int64 begin, end;  // slots
    int row;
    float scale;
};

struct SystemMemory {
    float* base;

    // Block i of the panel as a row or column operand, part 0 (high) or 1 (low): four pairs of float16 per lane.
    __device__ __forceinline__ float4* rows(int i, int part, int lane) const {
        return reinterpret_cast<float4*>(base) + (i * 4 + part) * WARP + lane;
    }
    __device__ __forceinline__ float4* columns(int i, int part, int lane) const { return rows(i, 2 + part, lane); }
    // Diagonal block p, column-major; later the inverse W of its factor, row-major.
    __device__ __forceinline__ float* inverse(int p) const { return base + PANEL_FLOATS + p * INVERSE_FLOATS; }
    __device__ __forceinline__ float* rhs() const { return base + PANEL_FLOATS + BLOCKS * INVERSE_FLOATS; }
    __device__ __forceinline__ float* diagonal() const { return rhs() + RANK16; }  // of D A D
    __device__ __forceinline__ float* scales() const { return rhs() + 2 * RANK16; }  // D
    __device__ __forceinline__ System* next() const { return reinterpret_cast<System*>(rhs() + 3 * RANK16); }
    __device__ __forceinline__ int* failed() const { return reinterpret_cast<int*>(rhs() + 3 * RANK16 + 6); }
};

// Whether some warp holds a diagonal block in this slot.
__host__ __device__ constexpr bool may_be_diagonal(int slot) { return slot < WARPS || slot == SLOTS - 1; }

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

// Executed by one warp: loads the descriptor of system k, the block's next one, and prefetches its sums into the L2 cache.
__device__ __forceinline__ void look_ahead(const SystemMemory& memory, const float* partials, const int64* slots, const int* rows,
                                           const float* scale, int64 k, int n_rows, int lane) {
    if (k >= n_rows) return;
    const System next{slots[k], slots[k + 1], rows[k], scale[rows[k]]};
    constexpr int LINE = 32;
    for (int n = lane; n < ceil_div(PARTIAL, LINE); n += WARP) prefetch(partials + next.begin * PARTIAL + n * LINE);
    if (lane == 0) *memory.next() = next;
}

// A power of two whose square scales a positive value to 1 ... 4.
__device__ __forceinline__ float scale_of(float value) {
    const int exponent = int(__float_as_uint(value) >> 23) - 127;
    return __uint_as_float(unsigned(127 - (exponent >> 1)) << 23);
}

// Stores a row's scaled diagonal element of A, its scale and its element of D b in shared memory. A row whose diagonal element is
// not positive gets the scale 0, so its pivot is that element. Rows from RANK on become rows of the identity.
__device__ __forceinline__ void keep_row(const SystemMemory& memory, int row, float diagonal, float b) {
    float d = 0;
    if (row >= RANK) {
        diagonal = 1;
    } else if (diagonal > 0 && isfinite(diagonal)) {
        d = scale_of(diagonal);
        diagonal = diagonal * d * d;
    }
    memory.diagonal()[row] = diagonal;
    memory.scales()[row] = d;
    memory.rhs()[row] = row < RANK ? b * d : 0.0f;
}

// Executed by one thread per row: adds up the sums, the Gram matrix and the ridge, then calls `keep_row`.
__device__ __forceinline__ void load_row(const SystemMemory& memory, const float* __restrict__ partials, const System& system,
                                         const float* __restrict__ gram, const float* __restrict__ ridge, int row) {
    const int n = row % BLOCK, i = row / BLOCK;
    const float* slot = partials + system.begin * PARTIAL;
    const float* element = slot + i * (i + 3) / 2 * TILE_FLOATS + (n / 8 * 6 + n % 2) * WARP + n % 8 * 4 + n % 8 / 2;
    const float* target = slot + TILE_COUNT * TILE_FLOATS + row;
    float diagonal = *element, b = *target;
    for (int64 more = PARTIAL; more < (system.end - system.begin) * PARTIAL; more += PARTIAL) {
        diagonal += element[more];
        b += target[more];
    }
    if (row < RANK) {
        if (gram != nullptr) diagonal += __ldg(gram + row * (RANK16 + 1));
        diagonal += ridge[row] * system.scale;
    }
    keep_row(memory, row, diagonal, b);
}

// Loads A except its diagonal, including the Gram matrix, and calls `keep_row` for all rows. No load depends on another.
__device__ __forceinline__ void load_system(Tile (&tiles)[SLOTS], const SystemMemory& memory, const float* __restrict__ partials,
                                            const System& system, const float* __restrict__ gram,
                                            const float* __restrict__ ridge, int warp, int lane) {
    // slots up to `warp` belong to block row `warp`, the others to block row `other`
    const int other = BLOCKS - 1 - warp, thread = warp * WARP + lane;
    const float* one = partials + system.begin * PARTIAL + warp * (warp + 1) / 2 * TILE_FLOATS + lane;
    const float* two = partials + system.begin * PARTIAL + (other * (other + 1) / 2 - warp - 1) * TILE_FLOATS + lane;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const float* source = (s <= warp ? one : two) + s * TILE_FLOATS;
#pragma unroll
        for (int k = 0; k < 8; k++) tiles[s].value[k / 4][k % 4] = source[k * WARP];
    }
    if (thread < RANK16) load_row(memory, partials, system, gram, ridge, thread);
    if (thread == 0) *memory.failed() = 0;
    for (int64 more = PARTIAL; more < (system.end - system.begin) * PARTIAL; more += PARTIAL)
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const float* source = (s <= warp ? one : two) + more + s * TILE_FLOATS;
#pragma unroll
            for (int k = 0; k < 8; k++) tiles[s].value[k / 4][k % 4] += source[k * WARP];
        }
    if (gram != nullptr) {
        const float* corner = gram + lane / 4 * RANK16 + lane % 4 * 2;
        one = corner + warp * BLOCK * RANK16;
        two = corner + other * BLOCK * RANK16 - (warp + 1) * BLOCK;
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const float* source = (s <= warp ? one : two) + s * BLOCK;
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                for (int q = 0; q < 4; q += 2) {
                    const float2 pair = __ldg(reinterpret_cast<const float2*>(source + 4 * q * RANK16 + 8 * half));
                    tiles[s].value[half][q] += pair.x;
                    tiles[s].value[half][q + 1] += pair.y;
                }
        }
    }
}

// Loads a system from a row-major matrix, of which it reads only the lower triangle, and a right-hand side. An `empty` system
// gets a zero right-hand side and the diagonal of the identity.
__device__ __forceinline__ void load_matrix(Tile (&tiles)[SLOTS], const SystemMemory& memory, const float* __restrict__ matrix,
                                            const float* __restrict__ rhs, bool empty, int warp, int lane) {
    const int thread = warp * WARP + lane;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q += 2) {
                const int r = at.i * BLOCK + tile_row(lane, q), c = at.j * BLOCK + tile_column(lane, half, q);
                const bool inside = at.i >= 0 && r < RANK && !empty;
                float2 pair = make_float2(0, 0);
                if (RANK % 2 == 0 && inside && c < r) {
                    pair = *reinterpret_cast<const float2*>(matrix + r * RANK + c);
                } else if (inside) {
                    if (c <= r) pair.x = matrix[r * RANK + c];
                    if (c < r) pair.y = matrix[r * RANK + c + 1];
                }
                tiles[s].value[half][q] = pair.x;
                tiles[s].value[half][q + 1] = pair.y;
            }
    }
    if (thread < RANK16) {
        const bool inside = thread < RANK && !empty;
        keep_row(memory, thread, inside ? matrix[thread * (RANK + 1)] : 1.0f, inside ? rhs[thread] : 0.0f);
    }
    if (thread == 0) *memory.failed() = 0;
}

// Computes D A D; the scales and the diagonal must be visible to all threads.
__device__ __forceinline__ void scale_system(Tile (&tiles)[SLOTS], const SystemMemory& memory, int warp, int lane) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
        if (BLOCKS < 2 * WARPS && at.i < 0) continue;
        const float* d = memory.scales();
        const float low = d[at.i * BLOCK + lane / 4], high = d[at.i * BLOCK + lane / 4 + 8];
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++) {
            const float2 column = *reinterpret_cast<const float2*>(d + at.j * BLOCK + 8 * half + lane % 4 * 2);
            float(&v)[4] = tiles[s].value[half];
            v[0] *= low * column.x;
            v[1] *= low * column.y;
            v[2] *= high * column.x;
            v[3] *= high * column.y;
        }
        if (RANK % BLOCK != 0 && at.i == BLOCKS - 1)  // sums beyond RANK can be NaN; a scale of 0 does not clear them
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    const bool beyond = at.i * BLOCK + tile_row(lane, q) >= RANK ||
                                        at.j * BLOCK + tile_column(lane, half, q) >= RANK;
                    if (beyond) tiles[s].value[half][q] = 0;
                }
        if (!may_be_diagonal(s) || at.i != at.j) continue;
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const int r = tile_row(lane, q);
                if (r == tile_column(lane, half, q)) tiles[s].value[half][q] = memory.diagonal()[at.i * BLOCK + r];
            }
    }
}

// Factors diagonal block p and applies it to the right-hand side: y = W b.
__device__ __forceinline__ void factor_block(const Tile (&tiles)[SLOTS], const SystemMemory& memory, int p, float epsilon, int warp,
                                             int lane) {
    float* block = memory.inverse(p);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
        if (may_be_diagonal(s) && at.i == p && at.j == p)
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

struct Parts {
    unsigned high[4], low[4];  // a row or column operand: pairs of float16
};

__device__ __forceinline__ void split(unsigned& high, unsigned& low, float first, float second) {
    high = pack_float16(first, second);
    const float2 rounded = unpack_float16(high);
    low = pack_float16(first - rounded.x, second - rounded.y);
}

// Splits a tile into the parts of a row operand.
__device__ __forceinline__ Parts split(const Tile& tile) {
    Parts parts;
#pragma unroll
    for (int k = 0; k < 4; k++)
        split(parts.high[k], parts.low[k], tile.value[k / 2][k % 2 * 2], tile.value[k / 2][k % 2 * 2 + 1]);
    return parts;
}

__device__ __forceinline__ float4 as_floats(unsigned a, unsigned b, unsigned c, unsigned d) {
    return make_float4(__uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d));
}

__device__ __forceinline__ void load_part(unsigned (&part)[4], const float4& v) {
    part[0] = __float_as_uint(v.x);
    part[1] = __float_as_uint(v.y);
    part[2] = __float_as_uint(v.z);
    part[3] = __float_as_uint(v.w);
}

// Product of two blocks; adds the small products first.
__device__ __forceinline__ void multiply(float (&product)[BLOCK_HALVES][4], const Parts& rows, const Parts& columns) {
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
        mma_float16(product[half], rows.low, columns.high[2 * half], columns.high[2 * half + 1]);
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
        mma_float16(product[half], rows.high, columns.low[2 * half], columns.low[2 * half + 1]);
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
        mma_float16(product[half], rows.high, columns.high[2 * half], columns.high[2 * half + 1]);
}

// Block i of panel p: tile <- L21 = tile W^T, in registers and, split, in shared memory; b_i -= L21 y_p.
__device__ __forceinline__ void solve_block(Tile& tile, const Parts& inverse, const SystemMemory& memory, int p, int i, int lane) {
    const Parts rows = split(tile);
    float product[BLOCK_HALVES][4] = {};
    multiply(product, rows, inverse);
    float low = 0, high = 0;  // sums of rows g and g + 8
#pragma unroll
    for (int h = 0; h < BLOCK_HALVES; h++) {
        const float(&v)[4] = product[h];
        const float2 y = *reinterpret_cast<const float2*>(memory.rhs() + p * BLOCK + 8 * h + lane % 4 * 2);
        low += v[0] * y.x;
        low += v[1] * y.y;
        high += v[2] * y.x;
        high += v[3] * y.y;
#pragma unroll
        for (int q = 0; q < 4; q++) tile.value[h][q] = v[q];
    }
    const Parts solved = split(tile);
    const unsigned(&a)[4] = solved.high, (&c)[4] = solved.low;
    *memory.rows(i, 0, lane) = as_floats(a[0], a[1], a[2], a[3]);
    *memory.rows(i, 1, lane) = as_floats(c[0], c[1], c[2], c[3]);
    *memory.columns(i, 0, lane) = as_floats(a[0], a[2], a[1], a[3]);
    *memory.columns(i, 1, lane) = as_floats(c[0], c[2], c[1], c[3]);
    low = quad_sum(low);
    high = quad_sum(high);
    float* b = memory.rhs() + i * BLOCK + lane / 4;
    if (lane % 4 == 0) {
        b[0] -= low;
        b[8] -= high;
    }
}

__device__ __forceinline__ void solve_panel(Tile (&tiles)[SLOTS], const SystemMemory& memory, int p, int warp, int lane) {
    Parts inverse;  // W^T as a column operand: pair 2 half + k holds W[8 half + g][8 k + 2 t] and the next element
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float* row = memory.inverse(p) + (n / 2 * 8 + lane / 4) * INVERSE_STRIDE;
        const float2 pair = *reinterpret_cast<const float2*>(row + n % 2 * 8 + lane % 4 * 2);
        split(inverse.high[n], inverse.low[n], pair.x, pair.y);
    }
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
        if (at.j == p && at.i > p) solve_block(tiles[s], inverse, memory, p, at.i, lane);
    }
}

// A22 -= L21 L21^T for the tiles of a warp. Each product starts from zero and is subtracted with rounding.
__device__ __forceinline__ void update(Tile (&tiles)[SLOTS], const SystemMemory& memory, int p, int warp, int lane) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        const Place at = place_of(warp, s);
        if (at.j <= p || at.i < 0) continue;
        Parts rows, columns;
        load_part(rows.low, *memory.rows(at.i, 1, lane));
        load_part(columns.high, *memory.columns(at.j, 0, lane));
        load_part(rows.high, *memory.rows(at.i, 0, lane));
        load_part(columns.low, *memory.columns(at.j, 1, lane));
        float product[BLOCK_HALVES][4] = {};
        multiply(product, rows, columns);
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) tiles[s].value[half][q] -= product[half][q];
    }
}

// Solves L^T x = b from the last block on; x overwrites b. Block p of L^T x has contributions from the blocks below it, each in
// the registers of its warp. As soon as x of a block row is computed, its blocks are replaced by each lane's share of their
// column sums. The sums over lanes and warps are formed when the column is reached.
__device__ __forceinline__ void substitute_back(Tile (&tiles)[SLOTS], const SystemMemory& memory, int warp, int lane) {
    float* sums = memory.base;  // (WARPS, BLOCK), in place of the panels
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
        if (warp == owner_of(p))
            for_slots(warp, [&](auto slot, int i, int j) {
                float(&value)[BLOCK_HALVES][4] = tiles[decltype(slot)::value].value;
                if (i == p && j < p)
#pragma unroll
                    for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                        for (int k = 0; k < 2; k++) value[half][k] = value[half][k] * low + value[half][2 + k] * high;
            });
        float sum[BLOCK_HALVES][2] = {};  // columns 8 half + 2 t and the next, over rows g and g + 8
        for_slots(warp, [&](auto slot, int i, int j) {
            const float(&value)[BLOCK_HALVES][4] = tiles[decltype(slot)::value].value;
            if (i >= p && j == p - 1)
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                    for (int k = 0; k < 2; k++) sum[half][k] += value[half][k];
        });
        // sum over the eight g: each step halves the columns that a lane keeps
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

// Solves a loaded system and calls store(solution). `lane` is refreshed to keep the compiler from holding addresses in registers
// for the next system.
template <class Store>
__device__ __forceinline__ void solve_system(Tile (&tiles)[SLOTS], const SystemMemory& memory, float epsilon, int warp, int& lane,
                                             Store&& store) {
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
    if (warp == 0) {  // x = D (D^-1 x)
        for (int n = lane; n < RANK16; n += WARP) memory.rhs()[n] *= memory.scales()[n];
        __syncwarp();
    }
    const TeamMemory solved{memory.base, memory.rhs(), memory.diagonal(), memory.failed()};
    store(solved);
    __syncthreads();  // the solution has been read
}

#if MATRICES
// Solves systems in matrices (n_slots, RANK, RANK) and rhs (n_slots, RANK): system k is in slot slots[k]; the solution is 0 if it
// has no slot. Writes columns up to RANK of solutions (n_out, width).
extern "C" __global__ void __launch_bounds__(WARPS * WARP, BLOCKS_PER_SM)
cholesky_matrices(float* solutions, int* status, const float* matrices, const float* rhs, const int64* slots, const int* rows,
                  int64 width, int64 n_rows, float epsilon) {
    const int warp = threadIdx.x / WARP;
    int lane = lane_number();
    const SystemMemory memory{shared_memory<float>()};
    for (int64 k = blockIdx.x; k < n_rows; k += gridDim.x) {
        const int64 slot = slots[k], row = rows[k];
        Tile tiles[SLOTS];
        load_matrix(tiles, memory, matrices + slot * RANK * RANK, rhs + slot * RANK, slots[k + 1] == slot, warp, lane);
        __syncthreads();
        scale_system(tiles, memory, warp, lane);
        solve_system(tiles, memory, epsilon, warp, lane, [&](const TeamMemory& solved) {
            store_solution(solutions + row * width, status + row, RANK, solved, *memory.failed(), warp, lane);
        });
    }
}
#else
extern "C" __global__ void __launch_bounds__(WARPS * WARP, BLOCKS_PER_SM)
cholesky_sums(float* solutions, int* status, const float* partials, const int64* slots, const int* rows, const float* gram,
              const float* ridge, const float* scale, int n_rows, float epsilon) {
    const int warp = threadIdx.x / WARP;
    int lane = lane_number();
    const SystemMemory memory{shared_memory<float>()};
    const bool looks_ahead = warp == WARPS - 1;  // while the first block on the diagonal is factored
    if (looks_ahead) look_ahead(memory, partials, slots, rows, scale, blockIdx.x, n_rows, lane);
    __syncthreads();
    for (int k = blockIdx.x; k < n_rows; k += gridDim.x) {
        const System system = *memory.next();
        Tile tiles[SLOTS];
        load_system(tiles, memory, partials, system, gram, ridge, warp, lane);
        __syncthreads();
        scale_system(tiles, memory, warp, lane);
        if (looks_ahead) look_ahead(memory, partials, slots, rows, scale, int64(k) + gridDim.x, n_rows, lane);
        solve_system(tiles, memory, epsilon, warp, lane, [&](const TeamMemory& solved) {
            store_solution(solutions + int64(system.row) * LD, status + system.row, LD, solved, *memory.failed(), warp, lane);
        });
    }
}
#endif
