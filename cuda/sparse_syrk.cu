// sparse_syrk.cu - batched sparse-syrk: for each segment of entries, sums over entries e with y = factors[indices[e]]
//                  matrices[slot] = sum outer_e y y^T (lower triangle), rhs[slot] = sum linear_e y  (entry_weight)
// source: Gates, Anzt, Kurzak, Dongarra 2015, section V, figs. 9 and 10; constraints on the constants: section VIII
// grid  : (segment, tile): lower NB x NB tiles of a matrix, row by row; diagonal tiles also sum the right-hand side
// block : DX x DY threads hold one tile in registers, NB / DX x NB / DY sums each; DZ such groups share the entries
// shapes: matrices (n_slots, rank, rank)  rhs (n_slots, rank)  factors (n_fixed, ld)  segments (n_segments, 3): slot,
//         begin, end; indices, ratings (nnz,)  offsets (n_fixed,), with RESIDUAL (nnz,)
// shared: STAGES times KB entries: PANELS x NB factors (2 panels where rank > NB) and two weights each; at the end the
//         groups' sums, DZ / 2 x (NB x NB + NB or a little more)
// traffic: nnz * 8 bytes and NB (diagonal) or 2 NB factors per entry and tile     flops: 2 NB^2 per entry and tile
// limits: NB factors and ld factors are multiples of 16 bytes; segments with end == begin give zeros
//
// Our additions to that scheme:
// - The threads of a warp own a compact patch of the tile, WX x WY threads. In diagonal tiles, warps whose patch is above
//   the diagonal (or beyond rank) skip the products. So NB can be 64 or 96 with the waste of 32, and each factor is staged once.
// - A thread's rows are vectors of 16 bytes, WY vectors apart, so that 8 neighbouring lanes always read within 128
//   contiguous bytes: no bank conflicts, no padding.
// - With DZ groups, a tile of 32 x 32 has 8 x 8 sums per thread in full warps: 16 products for each 16-byte shared load.
//   By count, loads from shared memory and multiply-adds then take equally long; with fewer sums, loads are the limit.
// - Stage s + STAGES - 1 is in flight (asynchronous copies of 16 bytes, past the registers) while stage s is summed;
//   its row indices were read one stage earlier. One barrier per stage.
// The groups' sums are added pairwise in a fixed order: the same bits on every run.
// synchronization: stage s is in buffer s % STAGES. At the barrier of stage s, each thread has waited for its own copies of s, the
//         weights of s are written, and all have read stage s - 1. After it, copies and weights of stage s + STAGES - 1 go to the
//         buffer of s - 1. Each stage commits one group of copies, even an empty one: their number tells which are complete. When
//         the groups exchange their sums, a barrier follows the reads of the stages or of the previous round, and another one the
//         writes; no copy of data is in flight then.
#include "common.cuh"

#ifndef NB
#define NB 32           // rows and columns of a tile
#endif
#ifndef KB
#define KB 32           // entries per stage
#endif
#ifndef DX
#define DX 4            // threads along the columns of a tile
#endif
#ifndef DY
#define DY 4            // threads along the rows of a tile
#endif
#ifndef DZ
#define DZ 2            // groups of DX x DY threads: group z sums the entries z, z + DZ, ... of a stage
#endif
#ifndef WX
#define WX 4            // threads of a warp along the columns
#endif
#ifndef WY
#define WY 4            // threads of a warp along the rows; the rest of a warp belongs to neighbouring groups
#endif
#ifndef STAGES
#define STAGES 2        // stages in flight or in use
#endif
#ifndef UNROLL
#define UNROLL 2        // entries of a group whose loads from shared memory may overlap
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 16 // minimum resident blocks per multiprocessor; limits the registers of a thread
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif

__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

constexpr int OVERLAPPED = UNROLL;                // a pragma takes constants, not macros
constexpr int GROUP = DX * DY;
constexpr int THREADS = GROUP * DZ;
constexpr int WZ = WARP / (WX * WY);              // groups per warp
constexpr int TX = NB / DX, TY = NB / DY;         // sums per thread
constexpr int CHUNK = 16 / int(sizeof(real));     // factors per copy
constexpr int CHUNKS = NB / CHUNK;                // copies per entry
constexpr int VX = gcd(TX, CHUNK), VY = gcd(TY, CHUNK);  // factors per load from shared memory
constexpr int COPIED = THREADS / CHUNKS;          // entries that all threads copy at a time
constexpr int COPY_ROUNDS = ceil_div(KB, COPIED); // a thread's copies of a stage and panel
constexpr int WEIGHTS = ceil_div(KB, THREADS);           // a thread's weights of a stage
constexpr int RHS = ceil_div(NB, GROUP);                 // a thread's elements of the right-hand side

static_assert(NB % DX == 0 && NB % DY == 0, "threads divide a tile evenly");
static_assert(KB % DZ == 0, "groups divide a stage evenly");
static_assert((DZ & (DZ - 1)) == 0, "groups are added pairwise");
static_assert(NB * sizeof(real) % 16 == 0, "rows of a tile are copied in pieces of 16 bytes");
static_assert(WX * WY * WZ == WARP && DX % WX == 0 && DY % WY == 0 && DZ % WZ == 0, "warps divide the threads evenly");
static_assert(THREADS >= CHUNKS, "threads copy whole entries");
static_assert(STAGES >= 2, "one stage is summed while the next ones arrive");

template <int N> struct alignas(N * sizeof(real)) Vector { real value[N]; };

// Stores N values, at once if they are 16 bytes, to be evicted first from the L2 cache: the systems of a batch would otherwise
// evict the factors.
template <int N, class T> __device__ __forceinline__ void store_vector(T* target, const T* values) {
    if constexpr (N * sizeof(T) < 16) {
#pragma unroll
        for (int k = 0; k < N; k++) __stcs(target + k, values[k]);
    } else if constexpr (sizeof(T) == 4) {
        __stcs(reinterpret_cast<float4*>(target), make_float4(values[0], values[1], values[2], values[3]));
    } else {
        __stcs(reinterpret_cast<double2*>(target), make_double2(values[0], values[1]));
    }
}

struct Segment {
    const int* indices;  // indices of all entries: kernel arguments take no registers, addresses of the segment would
    const real* ratings;
    int64 begin;
    int count;  // a row has at most one entry for each of less than 2^31 columns
};

// A thread's work: its group, its place in the group, and the first row and column of its vectors in the tile.
struct Place {
    int group, member, row, column;
};

__device__ __forceinline__ Place find_place() {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int x = lane % WX, y = lane / WX % WY;
    const int patch = warp % (GROUP / (WX * WY)), patch_x = patch % (DX / WX), patch_y = patch / (DX / WX);
    return {warp / (GROUP / (WX * WY)) * WZ + lane / (WX * WY), patch * (WX * WY) + y * WX + x,
            patch_y * WY * TY + y * VY, patch_x * WX * TX + x * VX};
}

// Offset in the tile of a thread's k-th row (or column) from its first: vectors of V, interleaved over W threads.
template <int W, int V> __device__ __forceinline__ constexpr int offset_of(int k) { return k / V * W * V + k % V; }

// ---------------------------------------------------------------------------------------------- staging

// Address of row `row` of `table`, whose rows have ld factors. One wide multiplication of unsigned numbers; signed numbers
// would take seven instructions. If row is negative, the address is not used.
__device__ __forceinline__ const real* row_of(const real* table, int row, int ld) {
    const unsigned long long bytes = static_cast<unsigned long long>(unsigned(row)) * unsigned(ld * int(sizeof(real)));
    return reinterpret_cast<const real*>(reinterpret_cast<const char*>(table) + bytes);
}

// Loads the indices of the factor rows that this thread copies for the stage at `first`; -1 beyond the last entry.
__device__ __forceinline__ void fetch_rows(int (&rows)[COPY_ROUNDS], const Segment& segment, int first) {
    const int mine = first + fresh(threadIdx.x) / CHUNKS;  // fresh: keeps it out of registers between stages
    const int* source = segment.indices + (segment.begin + mine);
    // most stages: loads without conditions
    if (first + COPY_ROUNDS * COPIED + (THREADS % CHUNKS != 0) <= segment.count) {
#pragma unroll
        for (int c = 0; c < COPY_ROUNDS; c++) rows[c] = __ldg(source + c * COPIED);
    } else {
#pragma unroll
        for (int c = 0; c < COPY_ROUNDS; c++)
            rows[c] = mine + c * COPIED < segment.count ? __ldg(source + c * COPIED) : -1;
    }
}

// Starts the copies of one panel of a stage: columns `column` ... column + NB - 1 of the entries' factors.
__device__ __forceinline__ void copy_panel(real* panel, const int (&rows)[COPY_ROUNDS], const real* factors, int ld,
                                           int column) {
    const int thread = fresh(threadIdx.x);
    if (THREADS % CHUNKS && thread >= COPIED * CHUNKS) return;
    const int from = column + thread % CHUNKS * CHUNK;
    const bool in_row = from < ld;
    const real* source = factors + (in_row ? from : 0);
    real* target = panel + thread * CHUNK;
#pragma unroll
    for (int c = 0; c < COPY_ROUNDS; c++) {
        if (KB % COPIED && thread / CHUNKS + c * COPIED >= KB) continue;
        copy_async_16(target + c * COPIED * NB, row_of(source, rows[c], ld), in_row && rows[c] >= 0);
    }
}

// The inputs of a stage's weights; zeros beyond the last entry.
struct RawWeights {
    real rating[WEIGHTS], offset[WEIGHTS];
};

__device__ __forceinline__ void fetch_weights(RawWeights& raw, const Segment& segment, const real* offsets,
                                              int first) {
#pragma unroll
    for (int w = 0; w < WEIGHTS; w++) {
        const int entry = first + int(threadIdx.x) + w * THREADS;
        const bool valid = entry < segment.count;
        raw.rating[w] = valid ? __ldg(segment.ratings + segment.begin + entry) : real(0);
        raw.offset[w] = 0;
        if ((HAS_OFFSETS || RESIDUAL) && valid) {
            const int64 at = segment.begin + entry;
            raw.offset[w] = __ldg(offsets + (RESIDUAL ? at : __ldg(segment.indices + at)));
        }
    }
}

__device__ __forceinline__ void store_weights(EntryWeight* weights, const RawWeights& raw, real alpha,
                                              real unobserved_weight) {
#pragma unroll
    for (int w = 0; w < WEIGHTS; w++) {
        const int k = int(threadIdx.x) + w * THREADS;
        if (KB % THREADS == 0 || k < KB)
            weights[k] = entry_weight(raw.rating[w], raw.offset[w], alpha, unobserved_weight);
    }
}

// ---------------------------------------------------------------------------------------------- sums

struct Sums {
    real tile[TY][TX];
    real rhs[RHS];
};

// Loads a thread's N factors of one entry: vectors of V, W vectors apart.
template <int W, int V, int N> __device__ __forceinline__ void load(real (&values)[N], const real* source) {
#pragma unroll
    for (int v = 0; v < N / V; v++) {
        const Vector<V> vector = *reinterpret_cast<const Vector<V>*>(source + v * W * V);
#pragma unroll
        for (int k = 0; k < V; k++) values[v * V + k] = vector.value[k];
    }
}

// Adds the entries z, z + DZ, ... < count of a stage. Entries from the last one to a multiple of DZ are zeros.
template <bool DIAGONAL>
__device__ __forceinline__ void add_stage(Sums& sums, const real* row_panel, const real* column_panel,
                                          const EntryWeight* weights, const Place& place, bool has_tile, int count) {
    const real *rows = row_panel + place.row, *columns = column_panel + place.column;
    const real* mine = row_panel + place.member * RHS;
#pragma unroll OVERLAPPED
    for (int k = place.group; k < count; k += DZ) {
        const EntryWeight weight = weights[k];
        if (!DIAGONAL || has_tile) {
            real a[TY], b[TX];
            load<WY, VY>(a, rows + k * NB);
            load<WX, VX>(b, columns + k * NB);
#pragma unroll
            for (int i = 0; i < TY; i++) {
                if (IMPLICIT) a[i] *= weight.outer;
#pragma unroll
                for (int j = 0; j < TX; j++) sums.tile[i][j] += a[i] * b[j];
            }
        }
        if (DIAGONAL && place.member * RHS < NB) {
            real y[RHS];
            load<1, gcd(RHS, gcd(NB, CHUNK))>(y, mine + k * NB);
#pragma unroll
            for (int i = 0; i < RHS; i++) sums.rhs[i] += weight.linear * y[i];
        }
    }
}

// Adds the sums of all groups to those of group 0, pairwise.
__device__ __forceinline__ void add_groups(Sums& sums, real* exchange, const Place& place) {
#pragma unroll
    for (int half = DZ / 2; half > 0; half /= 2) {
        real* mine = exchange + place.group % half * (TX * TY + RHS) * GROUP + place.member;
        __syncthreads();  // the stages, or the previously exchanged sums, have been read
        if (place.group >= half && place.group < 2 * half) {
#pragma unroll
            for (int k = 0; k < TX * TY; k++) mine[k * GROUP] = sums.tile[k / TX][k % TX];
#pragma unroll
            for (int k = 0; k < RHS; k++) mine[(TX * TY + k) * GROUP] = sums.rhs[k];
        }
        __syncthreads();
        if (place.group < half) {
#pragma unroll
            for (int k = 0; k < TX * TY; k++) sums.tile[k / TX][k % TX] += mine[k * GROUP];
#pragma unroll
            for (int k = 0; k < RHS; k++) sums.rhs[k] += mine[(TX * TY + k) * GROUP];
        }
    }
}

// Stores the lower part of a thread's tile whose first element is (row, column).
__device__ __forceinline__ void store_tile(real* matrix, const Sums& sums, int row, int column, int rank) {
    const bool aligned = rank % VX == 0;
#pragma unroll
    for (int i = 0; i < TY; i++) {
        const int r = row + offset_of<WY, VY>(i);
        if (r >= rank) continue;
#pragma unroll
        for (int v = 0; v < TX / VX; v++) {
            const int c = column + v * WX * VX;
            real* target = matrix + int64(r) * rank + c;
            if (aligned && c <= r) {
                store_vector<VX>(target, &sums.tile[i][v * VX]);
            } else {
#pragma unroll
                for (int k = 0; k < VX; k++)
                    if (c + k <= r) __stcs(target + k, sums.tile[i][v * VX + k]);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------- kernel

// A block's tile of the matrix.
struct Target {
    int row, column, panels;  // first row and column; panels of NB factors in a stage
    bool has_tile;            // whether this warp's patch has elements at or below the diagonal, within the matrix
};

struct Fixed { const real *factors, *offsets; int ld; };
struct Confidence { real alpha, unobserved_weight; };

template <bool DIAGONAL>
__device__ __forceinline__ void sum_segment(Sums& sums, const Segment& segment, const Target& target,
                                            const Place& place, const Fixed& fixed, const Confidence& how) {
    const int panels = target.panels;
    real* staged = shared_memory<real>();
    EntryWeight* weights = reinterpret_cast<EntryWeight*>(staged + STAGES * panels * KB * NB);
    int rows[COPY_ROUNDS];
    RawWeights raw;
    auto start = [&](int stage) {  // starts the copies of a stage; `fetch_rows` comes first
        real* panel = staged + stage % STAGES * panels * KB * NB;
        copy_panel(panel, rows, fixed.factors, fixed.ld, target.row);
        if (!DIAGONAL) copy_panel(panel + KB * NB, rows, fixed.factors, fixed.ld, target.column);
        fetch_weights(raw, segment, fixed.offsets, stage * KB);
    };
    const int n_stages = ceil_div(segment.count, KB);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        fetch_rows(rows, segment, stage * KB);
        if (stage < n_stages) {
            start(stage);
            store_weights(weights + stage * KB, raw, how.alpha, how.unobserved_weight);
        }
        copy_commit();
    }
    fetch_rows(rows, segment, (STAGES - 1) * KB);
    for (int stage = 0; stage < n_stages; stage++) {
        const int ahead = stage + STAGES - 1;
        copy_wait<STAGES - 2>();
        __syncthreads();  // all threads' copies of this stage are complete, and the buffer of the previous stage is free
        if (ahead < n_stages) start(ahead);
        copy_commit();  // an empty group at the end keeps the count of groups
        fetch_rows(rows, segment, (ahead + 1) * KB);
        const real* panel = staged + stage % STAGES * panels * KB * NB;
        const int count = min(segment.count - stage * KB, KB);
        add_stage<DIAGONAL>(sums, panel, DIAGONAL ? panel : panel + KB * NB, weights + stage % STAGES * KB, place,
                            target.has_tile, round_up(count, DZ));
        // as late as possible, so that the ratings have arrived
        if (ahead < n_stages) store_weights(weights + ahead % STAGES * KB, raw, how.alpha, how.unobserved_weight);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sparse_syrk(
        real* __restrict__ matrices,          // OUT (n_slots, rank, rank), lower triangles
        real* __restrict__ rhs,               // OUT (n_slots, rank)
        const real* __restrict__ factors,     // IN  (n_fixed, ld)
        const int* __restrict__ indices,      // IN  (nnz,)
        const real* __restrict__ ratings,     // IN  (nnz,)
        const real* __restrict__ offsets,     // IN  (n_fixed,) with HAS_OFFSETS, (nnz,) with RESIDUAL, else not read
        const int64* __restrict__ segments,   // IN  (n_segments, 3)
        int rank, int ld, real alpha, real unobserved_weight) {
    const int64 slot = segments[int64(blockIdx.x) * 3], begin = segments[int64(blockIdx.x) * 3 + 1];
    const Segment segment = {indices, ratings, begin, int(segments[int64(blockIdx.x) * 3 + 2] - begin)};
    int tile_row = 0, tile_column = blockIdx.y;
    while (tile_column > tile_row) tile_column -= ++tile_row;
    const int row = tile_row * NB, column = tile_column * NB;
    const Place place = find_place();
    const int patch_row = row + place.row / (WY * TY) * (WY * TY);
    const int patch_column = column + place.column / (WX * TX) * (WX * TX);
    const bool has_tile = patch_row < rank && patch_column < patch_row + WY * TY;
    const Target target = {row, column, gridDim.y > 1 ? 2 : 1, has_tile};
    const Fixed fixed = {factors, offsets, ld};
    const Confidence how = {alpha, unobserved_weight};
    Sums sums = {};
    if (row == column)
        sum_segment<true>(sums, segment, target, place, fixed, how);
    else
        sum_segment<false>(sums, segment, target, place, fixed, how);
    if (DZ > 1) add_groups(sums, shared_memory<real>(), place);
    if (place.group != 0) return;
    store_tile(matrices + slot * rank * rank, sums, row + place.row, column + place.column, rank);
    if (row == column) {
#pragma unroll
        for (int k = 0; k < RHS; k++) {
            const int r = place.member * RHS + k;
            if (r < NB && row + r < rank) rhs[slot * rank + row + r] = sums.rhs[k];
        }
    }
}
