// cholesky_sums.cu - solves A[u] x[u] = b[u], A[u] = G + sums + scale_u ridge, rank 65 to 128, for rows u whose sums are in global
//                    memory, from `assemble_segments` or `warpgroup_sums`; with MATRICES, solves systems stored as matrices
// grid  : any number of blocks; block k solves systems k, k + gridDim.x, ...     block : 4 warps, one system at a time
// shapes: partials (n_slots, PARTIAL): 16 x 16 tiles of A's lower triangle in the register layout of a warp, then b
//         slots (n_rows + 1,): system k is the sum of slots slots[k] ... slots[k + 1] - 1   rows (n_rows,)
//         gram (RANK16, RANK16) or null  ridge (RANK,)  scale (n_out,)  solutions (n_out, LD)  status (n_out,)
// shared: SYSTEM_FLOATS * 4 bytes: L in two float16 parts, the inverses of its blocks on the diagonal, vectors
// traffic: PARTIAL floats per slot read, LD floats per row written     flops: n_rows (RANK^3 / 3 + 2 RANK^2)
// limits: 5 to 8 blocks in a row of A; sm_80 or later
//
// A system is a chain of dependent steps, so several systems share a multiprocessor, and the chain is short. The factorization is
// left-looking: panel p starts as A's blocks of column p, less the products of L's earlier columns, which are in shared memory.
// Registers hold blocks of two panels only. While one warp factors the diagonal block of panel p, the others compute panel p + 1
// as far as the earlier columns allow. Warp w owns block rows w and w + 4, and their part of the right-hand side. L is in scaled
// float16 parts, as in system.cuh.
//
// synchronization: __syncthreads, or __syncwarp while one warp works alone. Panel p: warp p % 4 writes inverse(p) and y_p; barrier;
//         each warp writes its blocks of column p of L and its rows of b; barrier; all read them. A block of L is written once per
//         system. Back substitution: warp p % 4 writes x_p; barrier; each warp subtracts its products from its own rows of b, which
//         other warps read only as x. Warp 0 scales x after the barrier of x_0. The last barrier of a system ends all reads of its
//         memory. Descriptors: `current` is copied from `next` before the first barrier of a system; `next` is replaced after that
//         barrier and read after the last one.
#include "system.cuh"

#ifndef LD
#define LD ((RANK + 3) / 4 * 4)
#endif
#ifndef MATRICES
#define MATRICES 0                // 1: compile only the kernel `cholesky_matrices`
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 5           // minimum resident blocks per multiprocessor; limits the registers of a thread
#endif

static_assert(WARPS == 1 && BLOCKS >= 5 && BLOCKS <= 8, "each of the four warps owns one or two block rows");

constexpr int SYSTEM_WARPS = 4;                     // per system; for system.cuh, each of them works alone
constexpr int THREADS = SYSTEM_WARPS * WARP;
constexpr int OWN = 2;                              // block rows of a warp
constexpr int TILE_FLOATS = BLOCK * BLOCK;
constexpr int TILE_COUNT = BLOCKS * (BLOCKS + 1) / 2;
constexpr int PARTIAL = TILE_COUNT * TILE_FLOATS + RANK16;
constexpr int LOWER_FLOATS = BLOCKS * (BLOCKS - 1) / 2 * TILE_FLOATS;  // the blocks of L left of its diagonal
constexpr int SYSTEM_FLOATS = LOWER_FLOATS + FACTOR_FLOATS + 4 * RANK16 + 12;

struct System {
    const float* sums;  // of its first slot
    int more, row;      // further slots
    float scale;
};
static_assert(2 * sizeof(System) <= 12 * 4, "two descriptors take the place of `failed` and `extras`, which are not used here");
static_assert(OWN * SYSTEM_WARPS >= BLOCKS, "a block row has one owner: row i is that of warp i % SYSTEM_WARPS");

// Shared memory of a system: the factor, four vectors, and the descriptors of this system and the next one.
struct SystemMemory : TeamMemory {
    float* lower;
    System *current, *next;

    __device__ __forceinline__ explicit SystemMemory(float* base)
        : TeamMemory(base + LOWER_FLOATS, base + LOWER_FLOATS + FACTOR_FLOATS), lower(base),
          current(reinterpret_cast<System*>(base + SYSTEM_FLOATS - 12)), next(current + 1) {}

    // Part 0 (high) or 1 (low) of block (i, j) of L, j < i, as a row operand.
    __device__ __forceinline__ float4* block(int i, int j, int part, int lane) const {
        return reinterpret_cast<float4*>(lower + (i * (i - 1) / 2 + j) * TILE_FLOATS + part * OPERAND_FLOATS) + lane;
    }
    __device__ __forceinline__ Parts load(int i, int j, int lane) const {
        Parts parts;
        load_part(parts.low, *block(i, j, 1, lane));
        load_part(parts.high, *block(i, j, 0, lane));
        return parts;
    }
    __device__ __forceinline__ void store(int i, int j, const Parts& parts, int lane) const {
        store_part(block(i, j, 0, lane), parts.high);
        store_part(block(i, j, 1, lane), parts.low);
    }
};

// Executed by one warp: loads the descriptor of system k, the block's next one, and prefetches its sums into the L2 cache.
__device__ __forceinline__ void look_ahead(const SystemMemory& memory, const float* partials, const int64* slots, const int* rows,
                                           const float* scale, int64 k, int n_rows, int lane) {
    if (k >= n_rows) return;
    const System next{partials + slots[k] * PARTIAL, int(slots[k + 1] - slots[k]) - 1, rows[k], scale[rows[k]]};
    constexpr int LINE = 32;
    for (int n = lane; n < ceil_div(PARTIAL, LINE); n += WARP) prefetch(next.sums + n * LINE);
    if (lane == 0) *memory.next = next;
}

// Executed by one thread per row: adds up the sums, the Gram matrix and the ridge, then calls `keep_row`.
__device__ __forceinline__ void load_row(const SystemMemory& memory, const System& system, const float* __restrict__ gram,
                                         const float* __restrict__ ridge, int row) {
    if (row >= RANK) {  // a row of the identity; the sums may have no such rows
        keep_row(memory, row, 1.0f, 0.0f);
        return;
    }
    const int n = row % BLOCK, i = row / BLOCK;
    const float* element = system.sums + i * (i + 3) / 2 * TILE_FLOATS + (n / 8 * 6 + n % 2) * WARP + n % 8 * 4 + n % 8 / 2;
    const float* target = system.sums + TILE_COUNT * TILE_FLOATS + row;
    float diagonal = *element, b = *target;
    for (int slot = 1; slot <= system.more; slot++) {
        diagonal += element[int64(slot) * PARTIAL];
        b += target[int64(slot) * PARTIAL];
    }
    if (gram != nullptr) diagonal += __ldg(gram + row * (RANK16 + 1));
    keep_row(memory, row, diagonal + ridge[row] * system.scale, b);
}

// Loads blocks of A from the sums of a system and adds the Gram matrix.
struct SumsLoader {
    const float* gram;
    const System* system;  // in shared memory because registers are scarce

    __device__ __forceinline__ const float* source(int i, int j, int lane) const {
        return system->sums + (i * (i + 1) / 2 + j) * TILE_FLOATS + lane;
    }
    // The elements of a block that are stored, at `first` and on; zeros for the others, on which nothing depends.
    __device__ __forceinline__ static void load(Tile& tile, const float* first, int i, int j, int lane) {
        tile = {};
#pragma unroll
        for (int k = 0; k < 8; k++) load_if(is_stored(RANK, i, j, k, lane), tile.value[k / 4][k % 4], first + k * WARP);
    }
    __device__ __forceinline__ void start(Tile& tile, int i, int j, int lane) const {
        load(tile, source(i, j, lane), i, j, lane);
    }
    __device__ __forceinline__ void finish(Tile& tile, int i, int j, int lane) const {
#pragma unroll 1
        for (int slot = 1; slot <= system->more; slot++) {
            Tile more;
            load(more, source(i, j, lane) + int64(slot) * PARTIAL, i, j, lane);
#pragma unroll
            for (int k = 0; k < 8; k++) tile.value[k / 4][k % 4] += more.value[k / 4][k % 4];
        }
        if (gram == nullptr) return;
        const float* corner = gram + (i * BLOCK + lane / 4) * RANK16 + j * BLOCK + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q += 2) {
                const float2 pair = __ldg(reinterpret_cast<const float2*>(corner + 4 * q * RANK16 + 8 * half));
                tile.value[half][q] += pair.x;
                tile.value[half][q + 1] += pair.y;
            }
    }
};

// Loads blocks of a row-major matrix, of which it reads only the lower triangle; zeros if it is `empty`.
struct MatrixLoader {
    const float* matrix;
    bool empty;

    __device__ __forceinline__ void start(Tile& tile, int i, int j, int lane) const {
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q += 2) {
                const int r = i * BLOCK + tile_row(lane, q), c = j * BLOCK + tile_column(lane, half, q);
                const bool inside = r < RANK && !empty;
                float2 pair = make_float2(0, 0);
                if (RANK % 2 == 0 && inside && c < r) {
                    pair = *reinterpret_cast<const float2*>(matrix + r * RANK + c);
                } else if (inside) {
                    if (c <= r) pair.x = matrix[r * RANK + c];
                    if (c < r) pair.y = matrix[r * RANK + c + 1];
                }
                tile.value[half][q] = pair.x;
                tile.value[half][q + 1] = pair.y;
            }
    }
    __device__ __forceinline__ void finish(Tile&, int, int, int) const {}
};

// Block (i, j) of D A D; the scales and the diagonal must be visible to all threads.
__device__ __forceinline__ void scale(Tile& tile, const SystemMemory& memory, int i, int j, int lane) {
    scale_tile(tile, memory, i, j, lane);
    if (RANK % BLOCK != 0 && i == BLOCKS - 1)  // sums beyond RANK can be NaN
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const bool beyond = i * BLOCK + tile_row(lane, q) >= RANK || j * BLOCK + tile_column(lane, half, q) >= RANK;
                if (beyond) tile.value[half][q] = 0;
            }
    if (i == j) set_diagonal(tile, memory, i, lane);
}

// Calls body(Index<s>{}, i) for this warp's block rows i from `first` on.
template <class Body> __device__ __forceinline__ void for_own(int first, int warp, Body&& body) {
    static_for<0, OWN>([&](auto slot) {
        const int i = warp + decltype(slot)::value * SYSTEM_WARPS;
        if (i >= first && i < BLOCKS) body(slot, i);
    });
}

// Panel p as far as columns before `columns` of L determine it: panel[s] -= L_is L_p^T for this warp's block rows i >= p.
__device__ __forceinline__ void subtract_columns(Tile (&panel)[OWN], const SystemMemory& memory, int p, int columns, int warp,
                                                 int lane) {
#pragma unroll 1
    for (int k = 0; k < columns; k++) {
        const Parts other = memory.load(p, k, lane).as_columns();
        for_own(p, warp, [&](auto slot, int i) { subtract_product(panel[decltype(slot)::value], memory.load(i, k, lane), other); });
    }
}

// Solves L^T x = b from the last block on; x overwrites b. Each warp subtracts the products of x from its own rows of b; the one
// with the next row solves it at once.
__device__ __forceinline__ void substitute_back(const SystemMemory& memory, int warp, int lane) {
#pragma unroll 1
    for (int p = BLOCKS - 1;; p--) {
        if (warp == p % SYSTEM_WARPS) multiply_by_inverse(memory, p, memory.rhs[p * BLOCK + lane % BLOCK], lane);
        __syncthreads();
        if (p == 0) break;
        const float low = memory.rhs[p * BLOCK + lane / 4], high = memory.rhs[p * BLOCK + lane / 4 + 8];
#pragma unroll 1
        for (int j = p - 1 - (p - 1 - warp + SYSTEM_WARPS) % SYSTEM_WARPS; j >= 0; j -= SYSTEM_WARPS) {
            const Parts parts = memory.load(p, j, lane);
            float sum[BLOCK_HALVES][2];  // columns 8 half + 2 t + k over rows g and g + 8
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++) {
                const float2 a = unpack_float16(parts.high[2 * half]), b = unpack_float16(parts.high[2 * half + 1]);
                const float2 c = unpack_float16(parts.low[2 * half]), d = unpack_float16(parts.low[2 * half + 1]);
                sum[half][0] = (c.x * low + d.x * high) + (a.x * low + b.x * high);
                sum[half][1] = (c.y * low + d.y * high) + (a.y * low + b.y * high);
            }
            const float total = sum_shares(sum, lane);
            if (!(lane & 4)) memory.rhs[j * BLOCK + 8 * (lane / 16) + lane % 4 * 2 + lane / 8 % 2] -= total;
            __syncwarp();
        }
    }
}

// Factors and solves a system, of whose blocks `loader` starts and finishes loads. On entry, `keep_row` has been called for all
// rows, and the loads of the first panel have been started. The solution remains in memory.rhs of the first warp.
template <class Loader, class Meanwhile>
__device__ __forceinline__ void solve_system(Tile (&panel)[OWN], const Loader& loader, const SystemMemory& memory, int warp,
                                             int lane, Meanwhile&& meanwhile) {
    for_own(0, warp, [&](auto slot, int i) {
        Tile& tile = panel[decltype(slot)::value];
        loader.finish(tile, i, 0, lane);
        scale(tile, memory, i, 0, lane);
    });
#pragma unroll 1
    for (int p = 0; p < BLOCKS; p++) {
        lane = fresh(lane);
        warp = fresh(warp);
        Tile next[OWN];
        if (p + 1 < BLOCKS)
            for_own(p + 1, warp, [&](auto slot, int i) { loader.start(next[decltype(slot)::value], i, p + 1, lane); });
        if (warp == p % SYSTEM_WARPS) {
            Tile diagonal;
#pragma unroll
            for (int k = 0; k < 8; k++)
                diagonal.value[k / 4][k % 4] = p < SYSTEM_WARPS ? panel[0].value[k / 4][k % 4] : panel[1].value[k / 4][k % 4];
            store_diagonal(diagonal, memory.inverse(p), lane);
            factor_block(memory, p, lane);
        }
        if (p == 0) meanwhile();
        lane = fresh(lane);
        warp = fresh(warp);
        if (p + 1 < BLOCKS) {
            for_own(p + 1, warp, [&](auto slot, int i) {
                Tile& tile = next[decltype(slot)::value];
                loader.finish(tile, i, p + 1, lane);
                scale(tile, memory, i, p + 1, lane);
            });
            subtract_columns(next, memory, p + 1, p, warp, lane);
        }
        __syncthreads();  // the inverse of the diagonal block is there
        if (p == BLOCKS - 1) break;
        lane = fresh(lane);
        const Parts inverse = load_inverse(memory, p, lane);
        for_own(p + 1, warp, [&](auto slot, int i) {
            memory.store(i, p, solve_block(panel[decltype(slot)::value], inverse, memory, p, i, lane), lane);
        });
        __syncthreads();  // column p of L is there
        const Parts other = memory.load(p + 1, p, lane).as_columns();
        for_own(p + 1, warp, [&](auto slot, int i) {
            constexpr int s = decltype(slot)::value;
            subtract_product(next[s], memory.load(i, p, lane), other);
            panel[s] = next[s];
        });
    }
    substitute_back(memory, warp, lane);
    if (warp == 0) {  // x = D (D^-1 x)
#pragma unroll
        for (int first = 0; first < RANK16; first += WARP)
            if (first + lane < RANK16) memory.rhs[first + lane] *= memory.scales[first + lane];
        __syncwarp();
    }
}

#if MATRICES
// Solves systems in matrices (n_slots, RANK, RANK) and rhs (n_slots, RANK): system k is in slot slots[k]; the solution is 0 if it
// has no slot. Writes columns up to RANK of solutions (n_out, width).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
cholesky_matrices(float* solutions, int* status, const float* matrices, const float* rhs, const int64* slots, const int* rows,
                  int64 width, int64 n_rows, float epsilon) {
    int warp = threadIdx.x / WARP, lane = lane_number();
    const int thread = threadIdx.x;
    const SystemMemory memory{shared_memory<float>()};
    for (int64 k = blockIdx.x; k < n_rows; k += gridDim.x) {
        const int64 slot = slots[k], row = rows[k];
        const MatrixLoader loader{matrices + slot * RANK * RANK, slots[k + 1] == slot};
        Tile panel[OWN];
        for_own(0, warp, [&](auto slot, int i) { loader.start(panel[decltype(slot)::value], i, 0, lane); });
        if (thread < RANK16) {
            const bool inside = thread < RANK && !loader.empty;
            keep_row(memory, thread, inside ? loader.matrix[thread * (RANK + 1)] : 1.0f, inside ? rhs[slot * RANK + thread] : 0.0f);
        }
        __syncthreads();
        solve_system(panel, loader, memory, warp, lane, [] {});
        if (warp == 0) {
            const int failed = failing_minor(memory, epsilon, lane);
            store_solution(solutions + row * width, status + row, RANK, memory, failed, warp, lane);
        }
        __syncthreads();  // the solution has been read
    }
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
cholesky_sums(float* solutions, int* status, const float* partials, const int64* slots, const int* rows, const float* gram,
              const float* ridge, const float* scale, int n_rows, float epsilon) {
    int warp = threadIdx.x / WARP, lane = lane_number();
    const int thread = threadIdx.x;
    const SystemMemory memory{shared_memory<float>()};
    const bool looks_ahead = warp == SYSTEM_WARPS - 1;  // while the first block on the diagonal is factored
    if (looks_ahead) look_ahead(memory, partials, slots, rows, scale, blockIdx.x, n_rows, lane);
    __syncthreads();
    for (int k = blockIdx.x; k < n_rows; k += gridDim.x) {
        warp = fresh(warp);
        lane = fresh(lane);
        Tile panel[OWN];
        const SumsLoader first{gram, memory.next};
        for_own(0, warp, [&](auto slot, int i) { first.start(panel[decltype(slot)::value], i, 0, lane); });
        if (thread < RANK16) load_row(memory, *memory.next, gram, ridge, thread);
        if (thread == 0) *memory.current = *memory.next;
        __syncthreads();
        const SumsLoader loader{gram, memory.current};
        solve_system(panel, loader, memory, warp, lane, [&] {
            if (looks_ahead) look_ahead(memory, partials, slots, rows, scale, int64(k) + gridDim.x, n_rows, lane);
        });
        if (warp == 0) {
            const int row = memory.current->row, failed = failing_minor(memory, epsilon, lane);
            store_solution(solutions + int64(row) * LD, status + row, LD, memory, failed, warp, lane);
        }
        __syncthreads();  // the solution has been read
    }
}
#endif
