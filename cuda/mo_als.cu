// mo_als.cu - MO-ALS: for each segment of entries, sums over its entries e with y = factors[indices[e]]
//             matrices[slot] = sum outer_e y y^T (lower triangle), rhs[slot] = sum linear_e y  (weights: entry_weight)
// source: Tan, Cao, Fong 2016 (cuMF), Algorithm 2, sections 3.3 and 3.4; switches: what figs. 7 and 8 compare
// grid  : (segment, part): one block per segment if the lower triangle fits in its registers, else one block per part of it
// block : a thread owns one TILE x TILE tile of the lower triangle, a team of threads PART_TILES tiles; GROUPS teams share
//         the entries of a bin; the last warp is padded with threads that only load
// shapes: matrices (n_slots, RANK, RANK)  rhs (n_slots, RANK)  factors (n_fixed, ld)  segments (n_segments, 3): slot,
//         begin, end; indices, ratings (nnz,)  offsets (n_fixed,)
// shared: 2 bins of BIN entries: PADDED factors and two weights each; at the end GROUPS / 2 teams' sums
// traffic: nnz * (PADDED factors + 8 bytes) per part      flops: 2 TILE^2 N (N + 1) / 2 per entry
// limits: ld factors are a multiple of 16 bytes; TILE a multiple of a 16-byte load; segments without entries give zeros
// READ_ONLY 1: factors through the read-only path (the paper's texture memory), cached in L1; 0: past it, from L2
// REGISTERS 1: tiles in registers for all bins; 0: the products of each bin are added to the matrix in global memory, the paper's
//         baseline of fig. 7 (GROUPS 1): RANK^2 / BIN factors more of traffic per entry, mostly in L2
//
// The paper's macros declare one scalar per element of A_u; unrolled arrays with constant bounds do the same for every
// RANK. While a bin is summed, the next bin is loaded into registers; one barrier per bin. A factor row in shared memory
// has the first 16 bytes of all tiles first, then the second 16 bytes, ...: neighbouring threads mostly share a tile row
// and have neighbouring tile columns, so they read contiguous memory with few bank conflicts.
// The teams' sums are added in a fixed order: the same bits on every run.
// synchronization: bin k is in buffer k % 2. A barrier precedes bin 0. The one at the end of bin k follows all writes of bin k + 1
//         and all reads of bin k, whose buffer bin k + 2 overwrites; the last one also precedes the exchange of the teams' sums. In
//         a round of it, one barrier follows the writes and another one the reads. With REGISTERS 0, one thread alone reads and
//         writes an element of the matrix.
#include "common.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef TILE
#define TILE 8              // rows and columns of a thread's tile
#endif
#ifndef BIN
#define BIN 20              // entries staged at a time
#endif
#ifndef GROUPS
#define GROUPS 4            // teams: team g sums the entries g, g + GROUPS, ... of a bin
#endif
#ifndef PART_TILES
#define PART_TILES 36       // tiles per block; equal to TILES: one part
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 3     // minimum resident blocks per multiprocessor; limits the registers of a thread
#endif
#ifndef READ_ONLY
#define READ_ONLY 1
#endif
#ifndef REGISTERS
#define REGISTERS 1
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif

constexpr int N = ceil_div(RANK, TILE);           // tiles along a row or column
constexpr int TILES = N * (N + 1) / 2;            // tiles of the lower triangle
constexpr int PADDED = N * TILE;
constexpr int TEAMS_THREADS = PART_TILES * GROUPS;
constexpr int THREADS = round_up(TEAMS_THREADS, WARP);
constexpr int CHUNK = 16 / int(sizeof(real));     // factors per load
constexpr int CHUNKS = PADDED / CHUNK;            // loads per entry
constexpr int PIECES = TILE / CHUNK;              // loads per tile
constexpr int LOADED = THREADS / CHUNKS;          // entries that all threads load at a time
constexpr int LOADS = ceil_div(BIN, LOADED);      // a thread's loads of a bin
constexpr int RHS = ceil_div(CHUNKS, PART_TILES); // a thread's chunks of the right-hand side

static_assert(TILE % CHUNK == 0, "rows of a tile are loaded in pieces of 16 bytes");
static_assert(BIN % GROUPS == 0, "teams divide a bin evenly");
static_assert(BIN <= THREADS, "a thread computes at most one weight of a bin");
static_assert(CHUNKS <= THREADS, "threads load whole entries");
static_assert(REGISTERS || GROUPS == 1, "in global memory, an element has one owner");

struct alignas(16) Chunk { real value[CHUNK]; };

// Stores 16 bytes at once, to be evicted first from the L2 cache: the systems of a batch would otherwise evict the factors.
template <class T> __device__ __forceinline__ void store_16(T* target, const T* values) {
    if constexpr (sizeof(T) == 4)
        __stcs(reinterpret_cast<float4*>(target), make_float4(values[0], values[1], values[2], values[3]));
    else
        __stcs(reinterpret_cast<double2*>(target), make_double2(values[0], values[1]));
}

struct Segment {
    const int* indices;  // indices of all entries: kernel arguments take no registers, addresses of the segment would
    const real* ratings;
    int64 begin;
    int count;  // a row has at most one entry for each of less than 2^31 columns
};

// Place of a row's chunk in shared memory, in chunks.
__device__ __forceinline__ constexpr int place_of(int chunk) { return chunk % PIECES * N + chunk / PIECES; }

// Chunk at a place.
__device__ __forceinline__ constexpr int chunk_at(int place) { return place % N * PIECES + place / N; }

// ---------------------------------------------------------------------------------------------- staging

// A thread's loads in flight: the data of the next bin, and the rows of the bin after it.
struct Arriving {
    float4 chunk[LOADS];
    real rating, offset;
    int rows[LOADS];
};

__device__ __forceinline__ float4 load_16(const real* source) {
    return READ_ONLY ? __ldg(reinterpret_cast<const float4*>(source)) : __ldcg(reinterpret_cast<const float4*>(source));
}

// Address of row `row` of `table`, whose rows have ld factors. One wide multiplication of unsigned numbers; signed numbers
// would take seven instructions. If row is negative, the address is not used.
__device__ __forceinline__ const real* row_of(const real* table, int row, int ld) {
    const unsigned long long bytes = static_cast<unsigned long long>(unsigned(row)) * unsigned(ld * int(sizeof(real)));
    return reinterpret_cast<const real*>(reinterpret_cast<const char*>(table) + bytes);
}

// Loads the indices of the factor rows that this thread loads for the bin at `first`; -1 beyond the last entry.
__device__ __forceinline__ void fetch_rows(Arriving& arriving, const Segment& segment, int first) {
    const int mine = first + fresh(threadIdx.x) / CHUNKS;  // fresh: keeps it out of registers between bins
    const int* source = segment.indices + (segment.begin + mine);
    if (first + LOADS * LOADED + (THREADS % CHUNKS != 0) <= segment.count) {  // most bins: loads without conditions
#pragma unroll
        for (int l = 0; l < LOADS; l++) arriving.rows[l] = __ldg(source + l * LOADED);
    } else {
#pragma unroll
        for (int l = 0; l < LOADS; l++)
            arriving.rows[l] = mine + l * LOADED < segment.count ? __ldg(source + l * LOADED) : -1;
    }
}

// Starts the loads of the bin at `first`; `fetch_rows` comes first.
__device__ __forceinline__ void load_bin(Arriving& arriving, const Segment& segment, const real* factors,
                                         const real* offsets, int ld, int first) {
    const int column = fresh(threadIdx.x) % CHUNKS * CHUNK;
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
        const bool valid = arriving.rows[l] >= 0 && column < ld;
        arriving.chunk[l] = valid ? load_16(row_of(factors + column, arriving.rows[l], ld)) : make_float4(0, 0, 0, 0);
    }
    const int entry = first + int(threadIdx.x);
    const bool valid = int(threadIdx.x) < BIN && entry < segment.count;
    arriving.rating = valid ? __ldg(segment.ratings + segment.begin + entry) : real(0);
    arriving.offset = HAS_OFFSETS && valid ? __ldg(offsets + __ldg(segment.indices + segment.begin + entry)) : real(0);
}

__device__ __forceinline__ void store_bin(real* bin, EntryWeight* weights, const Arriving& arriving, real alpha,
                                          real unobserved_weight) {
    const int thread = fresh(threadIdx.x), k = thread / CHUNKS;
    real* target = bin + k * PADDED + place_of(thread % CHUNKS) * CHUNK;
#pragma unroll
    for (int l = 0; l < LOADS; l++)
        if (k < LOADED && k + l * LOADED < BIN)
            *reinterpret_cast<float4*>(target + l * LOADED * PADDED) = arriving.chunk[l];
    if (threadIdx.x < BIN)
        weights[threadIdx.x] = entry_weight(arriving.rating, arriving.offset, alpha, unobserved_weight);
}

// ---------------------------------------------------------------------------------------------- sums

struct Sums {
    real tile[TILE][TILE];
    real rhs[RHS][CHUNK];
};

// A thread's work.
struct Place {
    int group, member, row, column;  // row, column: position of its tile, in tiles
    bool has_tile;
};

__device__ __forceinline__ Place find_place() {
    const int group = int(threadIdx.x) / PART_TILES, member = int(threadIdx.x) % PART_TILES;
    const int tile = int(blockIdx.y) * PART_TILES + member;
    int row = 0, column = min(tile, TILES - 1);
    while (column > row) column -= ++row;
    return {group, member, row, column, group < GROUPS && tile < TILES};
}

// Loads a tile's factors of one entry; `first` points to its first chunk.
__device__ __forceinline__ void load_tile(real (&values)[TILE], const real* first) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const Chunk chunk = *reinterpret_cast<const Chunk*>(first + p * N * CHUNK);
#pragma unroll
        for (int k = 0; k < CHUNK; k++) values[p * CHUNK + k] = chunk.value[k];
    }
}

__device__ __forceinline__ void add_product(Sums& sums, const real (&a)[TILE], const real (&b)[TILE]) {
#pragma unroll
    for (int i = 0; i < TILE; i++)
#pragma unroll
        for (int j = 0; j < TILE; j++) sums.tile[i][j] += a[i] * b[j];
}

__device__ __forceinline__ void zero_tile(Sums& sums) {
#pragma unroll
    for (int k = 0; k < TILE * TILE; k++) sums.tile[k / TILE][k % TILE] = 0;
}

// Adds `count` entries of a bin. Entries from the last one to a multiple of GROUPS are zeros.
__device__ __forceinline__ void add_bin(Sums& sums, const real* bin, const EntryWeight* weights, const Place& place,
                                        int count) {
    const real* rows = bin + place.group * PADDED + place.row * CHUNK;
    const real* columns = bin + place.group * PADDED + place.column * CHUNK;
    const real* others = bin + place.group * PADDED;  // factors for the right-hand side
#pragma unroll 1
    for (int k = place.group; k < count; k += GROUPS) {
        const EntryWeight weight = weights[k];
        real a[TILE], b[TILE];
        load_tile(a, rows);
        load_tile(b, columns);
        if (IMPLICIT) {
#pragma unroll
            for (int i = 0; i < TILE; i++) a[i] *= weight.outer;
        }
        add_product(sums, a, b);
        if (blockIdx.y == 0) {  // the first part sums the right-hand side
#pragma unroll
            for (int m = 0; m < RHS; m++) {
                const int mine = place.member + m * PART_TILES;
                const Chunk chunk = *reinterpret_cast<const Chunk*>(others + (mine < CHUNKS ? mine : 0) * CHUNK);
#pragma unroll
                for (int c = 0; c < CHUNK; c++) sums.rhs[m][c] += weight.linear * chunk.value[c];
            }
        }
        rows += GROUPS * PADDED;
        columns += GROUPS * PADDED;
        others += GROUPS * PADDED;
    }
}

// Adds the sums of all teams to those of team 0: each round adds the upper half of the teams to the lower half.
__device__ __forceinline__ void add_teams(Sums& sums, real* exchange, const Place& place) {
    constexpr int TILE_SUMS = TILE * TILE, ALL = TILE_SUMS + RHS * CHUNK;
#pragma unroll
    for (int teams = GROUPS; teams > 1; teams = (teams + 1) / 2) {
        const int half = (teams + 1) / 2;
        const bool gives = place.group >= half && place.group < teams, takes = place.group + half < teams;
        real* mine = exchange + (gives ? place.group - half : place.group) * ALL * PART_TILES + place.member;
        if (gives) {
#pragma unroll
            for (int k = 0; k < TILE_SUMS; k++) mine[k * PART_TILES] = sums.tile[k / TILE][k % TILE];
#pragma unroll
            for (int k = 0; k < RHS * CHUNK; k++) mine[(TILE_SUMS + k) * PART_TILES] = sums.rhs[k / CHUNK][k % CHUNK];
        }
        __syncthreads();
        if (takes) {
#pragma unroll
            for (int k = 0; k < TILE_SUMS; k++) sums.tile[k / TILE][k % TILE] += mine[k * PART_TILES];
#pragma unroll
            for (int k = 0; k < RHS * CHUNK; k++) sums.rhs[k / CHUNK][k % CHUNK] += mine[(TILE_SUMS + k) * PART_TILES];
        }
        __syncthreads();  // before the next round or the next write to shared memory
    }
}

// Adds a tile of an earlier store to the sums: the part in the lower triangle.
__device__ __forceinline__ void add_stored(Sums& sums, const real* matrix, const Place& place) {
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        const int r = place.row * TILE + i;
        if (r >= RANK) continue;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int c = place.column * TILE + p * CHUNK;
            const real* source = matrix + int64(r) * RANK + c;
            if constexpr (RANK % CHUNK == 0) {
                if (c > r) continue;
                const Chunk chunk = *reinterpret_cast<const Chunk*>(source);
#pragma unroll
                for (int k = 0; k < CHUNK; k++) sums.tile[i][p * CHUNK + k] += chunk.value[k];
            } else {
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    if (c + k <= r) sums.tile[i][p * CHUNK + k] += source[k];
            }
        }
    }
}

// Stores the part of a tile in the lower triangle.
__device__ __forceinline__ void store_tile(real* matrix, const Sums& sums, const Place& place) {
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        const int r = place.row * TILE + i;
        if (r >= RANK) continue;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int c = place.column * TILE + p * CHUNK;
            real* target = matrix + int64(r) * RANK + c;
            if constexpr (RANK % CHUNK == 0) {
                if (c <= r) store_16(target, &sums.tile[i][p * CHUNK]);
            } else {
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    if (c + k <= r) __stcs(target + k, sums.tile[i][p * CHUNK + k]);
            }
        }
    }
}

__device__ __forceinline__ void store_rhs(real* vector, const Sums& sums, const Place& place) {
#pragma unroll
    for (int m = 0; m < RHS; m++) {
        const int mine = place.member + m * PART_TILES;
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            const int column = chunk_at(mine) * CHUNK + k;
            if (mine < CHUNKS && column < RANK) vector[column] = sums.rhs[m][k];
        }
    }
}

// ---------------------------------------------------------------------------------------------- kernel

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) mo_als(
        real* __restrict__ matrices,          // OUT (n_slots, RANK, RANK), lower triangles
        real* __restrict__ rhs,               // OUT (n_slots, RANK)
        const real* __restrict__ factors,     // IN  (n_fixed, ld)
        const int* __restrict__ indices,      // IN  (nnz,)
        const real* __restrict__ ratings,     // IN  (nnz,)
        const real* __restrict__ offsets,     // IN  (n_fixed,), not read without HAS_OFFSETS
        const int64* __restrict__ segments,   // IN  (n_segments, 3)
        int ld, real alpha, real unobserved_weight) {
    const int64 slot = segments[int64(blockIdx.x) * 3], begin = segments[int64(blockIdx.x) * 3 + 1];
    const Segment segment = {indices, ratings, begin, int(segments[int64(blockIdx.x) * 3 + 2] - begin)};
    real* matrix = matrices + slot * RANK * RANK;
    real* bins = shared_memory<real>();
    EntryWeight* weights = reinterpret_cast<EntryWeight*>(bins + 2 * BIN * PADDED);
    const Place place = find_place();
    Sums sums = {};

    const int n_bins = ceil_div(segment.count, BIN);
    Arriving arriving;
    fetch_rows(arriving, segment, 0);
    load_bin(arriving, segment, factors, offsets, ld, 0);
    fetch_rows(arriving, segment, BIN);
    store_bin(bins, weights, arriving, alpha, unobserved_weight);
    __syncthreads();
    for (int bin = 0; bin < n_bins; bin++) {
        const bool more = bin + 1 < n_bins;
        if (more) {
            load_bin(arriving, segment, factors, offsets, ld, (bin + 1) * BIN);
            fetch_rows(arriving, segment, (bin + 2) * BIN);
        }
        const int count = min(segment.count - bin * BIN, BIN), now = bin % 2, next = 1 - now;
        if (place.has_tile) {
            if (!REGISTERS) zero_tile(sums);
            add_bin(sums, bins + now * BIN * PADDED, weights + now * BIN, place, round_up(count, GROUPS));
            if (!REGISTERS && bin > 0) add_stored(sums, matrix, place);
            if (!REGISTERS) store_tile(matrix, sums, place);
        }
        if (more) store_bin(bins + next * BIN * PADDED, weights + next * BIN, arriving, alpha, unobserved_weight);
        __syncthreads();  // the next bin is complete, and the memory of this bin is free
    }
    if (GROUPS > 1) add_teams(sums, bins, place);
    if (place.group != 0) return;
    if ((REGISTERS || n_bins == 0) && place.has_tile) store_tile(matrix, sums, place);
    if (blockIdx.y == 0) store_rhs(rhs + slot * RANK, sums, place);
}
