// ccd.cu - CCD++: rank-one updates x_t y_t^T of a factorization R ~ X Y^T over its residual, kept by user and by item
//          rank_one: e <- e - p P[fixed] + q Q[fixed]      P, Q: previous factor (new values), this factor (old values)
//                    z  = sum e C[fixed] / (penalty + sum C[fixed]^2) for every row (nonnegative: clamped at 0)
// source: Yu, Hsieh, Si, Dhillon 2012 (CCD++); Nisa et al. 2017 (loop fusion, long rows split); tiles: ours
// grid  : blocks of equal work; each processes its turns of `parts`: consecutive pieces of one tile. A piece is a row's entries
//         in a tile of the fixed side, at most a segment of them. 8, 16 or 32 lanes read and process it in one step
// shapes: rows of this side and columns of both sides (n,): padded with zeros to 16 bytes
//         indices, ratings, residuals (4 n_quads,)  pieces (n_pieces, 4): first quad, quads, row, slot (-1: whole row)
//         parts (n_parts, 8): see Part  first_part (blocks + 1,)  partials (n_slots, 2)
//         split (n_split, 4): row, first slot, slots, 0     tables (n, ld), ld a multiple of 16 bytes
// shared: STAGED: VECTORS * TILE * sizeof(real): this tile of P, Q and C
// traffic: a pass reads an index and reads and writes a residual: nnz (2 + 2 sizeof(real)) bytes STAGED, with 4 in place
//          of 2 otherwise. Both passes of a factor, float32, STAGED: 20 nnz bytes; Netflix shape (99.07M entries) at
//          4.24 TB/s: 0.467 ms, 18.7 ms for 40 factors; computing the residual at the start of an iteration reads and writes
//          as much once more and gathers 2 nnz ld sizeof(real) bytes, mostly from L2
// synchronization: rank_one: one lane reads and writes each quad of the residual; one lane writes each element of `solved` or
//         `partials`, which only later kernels of the stream read (the vectors read here are other rows of the tables). A tile
//         is copied between two barriers, which all threads of a block reach, since they process the same parts: before the
//         first, the previous tile has been read; before the second, each thread waits for its own copies.
//         transpose: a barrier separates writes and reads of the square; `status` is set by an atomic operation. In all
//         kernels, shuffles exchange registers only.
// limits: rows have ascending indices; TILE a multiple of 16 bytes, at most 65,536; fewer than 2^31 quads, at most 64 a piece
//
// Fused: one pass subtracts the product of the previous factor from the residual, adds back the old product of this factor and
// sums the ridge regressions. Both copies of the residual undergo the same operations on the same numbers, hence the same bits.
// The items' pass needs two vectors of the users (C = Q), the users' pass three of the items (C: the new values). Further
// inner iterations need one vector and do not change the residual (VECTORS). Gathers limit a plain version: each reads a
// sector of 32 bytes from L2. STAGED: entries are ordered by tiles of the fixed side, and the tile is in shared memory,
// with 16-bit indices into it; otherwise (short rows, many tiles) the vectors are read as one pack from L2.
// A row's entries are stored in quads, 4 per lane, padded with entries that point to a zero: every access has 16 (or 8)
// bytes. Of k quads that lanes read together, quad l holds entries l, l + k, l + 2k, l + 3k: neighbouring lanes gather from
// neighbouring entries. While a piece is summed, the next one is loaded into registers.
// Order of summation: pairs, quads, the two quads of a lane, a tree over the lanes, then the partial sums in the order of a row.
// More lanes than necessary add zeros, so the bits depend neither on them nor on the division into blocks. There are at most 9
// roundings of sum |e C| (and slots / lanes + 5 for the partial sums of a split row). A residual is rounded twice per factor and
// recomputed in every iteration.
#include "common.cuh"

#ifndef STAGED
#define STAGED 1           // fixed vectors in shared memory, tile by tile; 0: packs of them in global memory
#endif
#ifndef VECTORS
#define VECTORS 3          // 1: C, only sums; 2: P, Q = C; 3: P, Q, C
#endif
#ifndef TILE
#define TILE 4096          // elements of a staged vector; the last 16 bytes are zeros
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2    // minimum resident blocks per multiprocessor; limits the registers of a thread
#endif

constexpr bool UPDATES = VECTORS > 1;
constexpr int QUAD = 4;                                  // entries a lane reads at a time
constexpr int UNROLL = 2;                                // quads of a piece per lane
constexpr int WARPS = THREADS / WARP;
constexpr int CHUNK = 16 / int(sizeof(real));
constexpr int PACK = VECTORS == 3 ? 4 : VECTORS;         // elements of a pack; the fourth is not used

// Lanes that read a piece of at most UNROLL * WARP quads together.
__device__ __forceinline__ int lanes_of(int quads) { return quads <= UNROLL * 8 ? 8 : quads <= UNROLL * 16 ? 16 : WARP; }

static_assert(TILE % CHUNK == 0 && TILE <= 65536, "tiles are copied 16 bytes at a time and have 16-bit indices");

template <bool NARROW> struct IndexType { using type = int; };
template <> struct IndexType<true> { using type = unsigned short; };
using FixedIndex = IndexType<STAGED>::type;

struct alignas(2 * sizeof(real)) Sums { real product, square; };
struct alignas(PACK * sizeof(real)) Pack { real value[PACK]; };
struct alignas(16) Chunk { real value[CHUNK]; };

// ---------------------------------------------------------------------------------------------- quads of entries

// Indices and residuals of a lane's quad, as loaded. Hints to evict them early made a pass 4 (users) and 7 % (items) slower.
struct Quad {
#if STAGED
    int2 packed;
    __device__ __forceinline__ int index(int k) const {
        return (k < 2 ? unsigned(packed.x) : unsigned(packed.y)) >> 16 * (k % 2) & 0xffff;
    }
    __device__ __forceinline__ void blank(int zero) {
        const int both = int(unsigned(zero) * 0x10001u);
        packed = make_int2(both, both);
    }
    __device__ __forceinline__ void read_indices(const FixedIndex* indices, int64 quad) {
        packed = reinterpret_cast<const int2*>(indices)[quad];
    }
#else
    int packed[QUAD];
    __device__ __forceinline__ int index(int k) const { return packed[k]; }
    __device__ __forceinline__ void blank(int zero) {
#pragma unroll
        for (int k = 0; k < QUAD; k++) packed[k] = zero;
    }
    __device__ __forceinline__ void read_indices(const FixedIndex* indices, int64 quad) {
        const int4 raw = reinterpret_cast<const int4*>(indices)[quad];
        packed[0] = raw.x, packed[1] = raw.y, packed[2] = raw.z, packed[3] = raw.w;
    }
#endif
    real residual[QUAD];

    __device__ __forceinline__ void read(const FixedIndex* indices, const real* residuals, int64 quad) {
        read_indices(indices, quad);
        if constexpr (sizeof(real) == 4) {
            const float4 raw = reinterpret_cast<const float4*>(residuals)[quad];
            residual[0] = raw.x, residual[1] = raw.y, residual[2] = raw.z, residual[3] = raw.w;
        } else {
            const double2 low = reinterpret_cast<const double2*>(residuals)[2 * quad];
            const double2 high = reinterpret_cast<const double2*>(residuals)[2 * quad + 1];
            residual[0] = low.x, residual[1] = low.y, residual[2] = high.x, residual[3] = high.y;
        }
    }

    __device__ __forceinline__ void write(real* residuals, int64 quad) const {
        if constexpr (sizeof(real) == 4) {
            reinterpret_cast<float4*>(residuals)[quad] =
                make_float4(residual[0], residual[1], residual[2], residual[3]);
        } else {
            reinterpret_cast<double2*>(residuals)[2 * quad] = make_double2(residual[0], residual[1]);
            reinterpret_cast<double2*>(residuals)[2 * quad + 1] = make_double2(residual[2], residual[3]);
        }
    }
};

// ---------------------------------------------------------------------------------------------- one pass

__device__ __forceinline__ real coordinate(Sums sums, real penalty, bool nonnegative) {
    const real curvature = penalty + sums.square;
    const real value = curvature == 0 ? real(0) : sums.product / curvature;  // undetermined: zero; NaN stays NaN
    return nonnegative && value < 0 ? real(0) : value;
}

// A row's own coordinates, used by all of its pieces.
struct Own { real subtracted, added, penalty; };

// P, Q, C of the fixed side; without STAGED, each pointer refers to the packs of all three.
struct Vectors { const real *subtracted, *added, *regressor; };

struct OwnVectors { const real *subtracted, *added, *penalties; };

// Consecutive pieces of one tile. The blocks of a team take turns at them, so that what they read at the same time is close
// together: DRAM serves that faster than as many distant places as there are blocks. `lanes` are enough for each piece.
struct alignas(16) Part { int tile, begin, end, lanes, rank, team, unused[2]; };  // as packed by the launcher

struct Pass {
    real* solved;
    real* residuals;
    Sums* partials;
    const real* vectors;       // STAGED: the tile in shared memory, else packs
    OwnVectors given;
    const FixedIndex* indices;
    const int4* pieces;
    int zero;                  // index of a fixed row of zeros
    bool pending;              // the residual still contains the product of the previous factor
    bool nonnegative;

    __device__ __forceinline__ int4 piece(int k, int end) const {
        return k < end ? __ldg(pieces + k) : int4{0, 0, -1, -1};
    }

    __device__ __forceinline__ Own own(int4 piece) const {
        if (piece.z < 0) return {0, 0, 0};
        const real penalty = __ldg(given.penalties + piece.z);
        if (!UPDATES) return {0, 0, penalty};
        return {pending ? __ldg(given.subtracted + piece.z) : real(0), __ldg(given.added + piece.z), penalty};
    }

    __device__ __forceinline__ void read(Quad& quad, int4 piece, int at) const {
        if (at < piece.y) {
            quad.read(indices, residuals, int64(piece.x) + at);
        } else {
            quad.blank(zero);
#pragma unroll
            for (int k = 0; k < QUAD; k++) quad.residual[k] = 0;
        }
    }

    __device__ __forceinline__ Pack gather(int index) const {
        if constexpr (STAGED) {
            Pack pack;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) pack.value[v] = vectors[v * TILE + index];
            return pack;
        } else {
            return reinterpret_cast<const Pack*>(vectors)[index];
        }
    }

    // Updates the residuals of a quad and adds its products to the sums.
    __device__ __forceinline__ void sum(Sums& sums, Quad& quad, Own own) const {
        real product[QUAD], square[QUAD];
#pragma unroll
        for (int k = 0; k < QUAD; k++) {
            const Pack fixed = gather(quad.index(k));
            real& residual = quad.residual[k];
            if constexpr (UPDATES) {
                residual = fma(-own.subtracted, fixed.value[0], residual);
                residual = fma(own.added, fixed.value[1], residual);
            }
            const real regressor = fixed.value[VECTORS - 1];
            product[k] = k % 2 ? fma(residual, regressor, product[k - 1]) : residual * regressor;
            square[k] = k % 2 ? fma(regressor, regressor, square[k - 1]) : regressor * regressor;
        }
        sums.product += product[1] + product[3];
        sums.square += square[1] + square[3];
    }

    template <int GROUP> __device__ __forceinline__ void finish(Sums sums, int4 piece, Own own) const {
#pragma unroll
        for (int distance = GROUP / 2; distance > 0; distance /= 2) {
            sums.product += __shfl_xor_sync(FULL_WARP, sums.product, distance);
            sums.square += __shfl_xor_sync(FULL_WARP, sums.square, distance);
        }
        if (threadIdx.x % GROUP || piece.z < 0) return;
        if (piece.w < 0)
            solved[piece.z] = coordinate(sums, own.penalty, nonnegative);
        else
            partials[piece.w] = sums;
    }

    // Processes this warp's pieces of a part. All lanes take the same branches: a group's piece may be missing.
    template <int GROUP> __device__ __forceinline__ void run(const Part& part) const {
        constexpr int PER_WARP = WARP / GROUP;
        const int lane = threadIdx.x % GROUP, group = threadIdx.x % WARP / GROUP;
        const int end = part.end, stride = part.team * WARPS * PER_WARP;
        int first = part.begin + (part.rank * WARPS + int(threadIdx.x) / WARP) * PER_WARP;
        if (first >= end) return;
        int4 current = piece(first + group, end), following = piece(first + stride + group, end);
        Own mine = own(current);
        Quad quads[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) read(quads[u], current, lane + u * GROUP);
        while (true) {
            const Own next_own = own(following);
            Quad arriving[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) read(arriving[u], following, lane + u * GROUP);
            const int4 upcoming = piece(first + 2 * stride + group, end);
            Sums sums = {0, 0};
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                sum(sums, quads[u], mine);
                if (UPDATES && lane + u * GROUP < current.y) quads[u].write(residuals, int64(current.x) + lane + u * GROUP);
            }
            finish<GROUP>(sums, current, mine);
            first += stride;
            if (first >= end) return;
            current = following, mine = next_own, following = upcoming;
#pragma unroll
            for (int u = 0; u < UNROLL; u++) quads[u] = arriving[u];
        }
    }
};

// Copies P, Q, C of a tile to shared memory; elements beyond n_fixed and the tile's last chunk are zeros.
__device__ __forceinline__ void stage(real* target, Vectors fixed, int64 begin, int64 n_fixed) {
    const real* sources[3] = {VECTORS == 1 ? fixed.regressor : fixed.subtracted, fixed.added, fixed.regressor};
    const int64 left = n_fixed - begin;
    const int count = int(left < TILE - CHUNK ? left : TILE - CHUNK);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        for (int k = threadIdx.x * CHUNK; k < count; k += THREADS * CHUNK)
            copy_async_16(target + v * TILE + k, sources[v] + begin + k, true);
        if (threadIdx.x < CHUNK) target[v * TILE + TILE - CHUNK + threadIdx.x] = 0;
    }
    copy_commit();
    copy_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
rank_one(real* solved, real* residuals, Sums* partials, const real* subtracted, const real* added, const real* regressor,
         const real* own_subtracted, const real* own_added, const real* penalties, const FixedIndex* indices, const int4* pieces,
         const Part* parts, const int* first_part, int64 n_fixed, int pending, int nonnegative) {
    const Vectors fixed = {subtracted, added, regressor};
    real* const staged = STAGED ? shared_memory<real>() : nullptr;
    const Pass pass = {solved, residuals, partials, STAGED ? staged : subtracted, {own_subtracted, own_added, penalties},
                       indices, pieces, STAGED ? TILE - CHUNK : int(n_fixed), pending != 0, nonnegative != 0};
    int tile = -1;
    for (int p = first_part[blockIdx.x]; p < first_part[blockIdx.x + 1]; p++) {
        const Part part = parts[p];
        if (STAGED && part.tile != tile) {
            tile = part.tile;
            __syncthreads();  // no thread still reads the previous tile
            stage(staged, fixed, int64(tile) * (TILE - CHUNK), n_fixed);
            __syncthreads();
        }
        if (part.lanes == 8)
            pass.run<8>(part);
        else if (part.lanes == 16)
            pass.run<16>(part);
        else
            pass.run<WARP>(part);
    }
}

// Computes the coordinates of split rows from the sums of their pieces; `lanes` per row, a power of two up to a warp.
extern "C" __global__ void __launch_bounds__(8 * WARP)
combine(real* solved, const Sums* partials, const real* penalties, const int4* split, int64 n_split, int lanes, int nonnegative) {
    const int lane = threadIdx.x % lanes;
    const int64 k = (int64(blockIdx.x) * (8 * WARP) + threadIdx.x) / lanes;
    const int4 row = k < n_split ? split[k] : int4{0, 0, 0, 0};
    Sums sums = {0, 0};
    for (int slot = lane; slot < row.z; slot += lanes) {
        const Sums more = partials[row.y + slot];
        sums.product += more.product;
        sums.square += more.square;
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        sums.product += __shfl_xor_sync(FULL_WARP, sums.product, distance);
        sums.square += __shfl_xor_sync(FULL_WARP, sums.square, distance);
    }
    if (lane == 0 && k < n_split) solved[row.x] = coordinate(sums, penalties[row.x], nonnegative);
}

// packs (n_fixed + 1,) <- P, Q, C of each row of the fixed side; the last pack is zeros.
extern "C" __global__ void __launch_bounds__(256)
interleave(Pack* packs, Vectors fixed, int64 n_fixed) {
    const real* sources[4] = {VECTORS == 1 ? fixed.regressor : fixed.subtracted, fixed.added, fixed.regressor,
                              fixed.regressor};
    const int64 row = int64(blockIdx.x) * 256 + threadIdx.x;
    if (row > n_fixed) return;
    Pack pack;
#pragma unroll
    for (int v = 0; v < PACK; v++) pack.value[v] = row < n_fixed ? sources[v][row] : real(0);
    packs[row] = pack;
}

// ---------------------------------------------------------------------------------------------- layout

// offsets (n_rows, n_tiles - 1) <- number of each row's entries before the tiles 1, 2, ...; one thread per element.
extern "C" __global__ void __launch_bounds__(256)
cut_rows(int* offsets, const int* indices, const int64* indptr, int64 n_rows, int64 n_tiles, int64 tile_rows) {
    const int64 k = int64(blockIdx.x) * 256 + threadIdx.x;
    if (k >= n_rows * (n_tiles - 1)) return;
    const int64 row = k / (n_tiles - 1), border = (k % (n_tiles - 1) + 1) * tile_rows;
    int64 low = indptr[row], high = indptr[row + 1];
    while (low < high) {
        const int64 middle = (low + high) / 2;
        if (indices[middle] < border)
            low = middle + 1;
        else
            high = middle;
    }
    offsets[k] = int(low - indptr[row]);
}

// Copies entries to their places; one warp per piece. sources (n_pieces, 3): first entry, entries, first fixed row of the tile.
extern "C" __global__ void __launch_bounds__(8 * WARP)
place(FixedIndex* indices, real* ratings, const int* raw_indices, const real* raw_ratings, const int4* pieces,
      const int64* sources, int64 n_pieces, int zero) {
    const int64 piece = int64(blockIdx.x) * 8 + threadIdx.x / WARP;
    if (piece >= n_pieces) return;
    const int64 target = int64(pieces[piece].x) * QUAD, begin = sources[3 * piece], base = sources[3 * piece + 2];
    const int quads = pieces[piece].y, length = int(sources[3 * piece + 1]);
    const int group = lanes_of(quads);  // quads that lanes read together
    for (int at = threadIdx.x % WARP; at < quads * QUAD; at += WARP) {
        const int before = at / QUAD / group * group;
        const int together = quads - before < group ? quads - before : group;
        const int entry = before * QUAD + at % QUAD * together + at / QUAD - before;
        const bool exists = entry < length;
        indices[target + at] = FixedIndex(exists ? raw_indices[begin + entry] - int(base) : zero);
        ratings[target + at] = exists ? raw_ratings[begin + entry] : real(0);
    }
}

// ---------------------------------------------------------------------------------------------- residual, objective

constexpr int LANES = 4;                // per product of two rows, one for each entry
constexpr int AT_ONCE = WARP / LANES;   // entries per warp

struct Entries {
    const real* ratings;
    const FixedIndex* indices;
    int zero;                  // index of a fixed row of zeros
};

struct Tables {
    const real *own, *fixed;
    int chunks;                // 16-byte chunks per row
};

// Calls body(place of an entry, rating - x.y) in every lane; a team of LANES lanes handles ROUNDS entries at a time.
template <int ROUNDS, class Sum, class Body>
__device__ __forceinline__ void for_each_miss(Entries entries, Tables tables, int4 piece, int base, Body&& body) {
    const int chunks = tables.chunks, zero = entries.zero;
    const int lane = threadIdx.x % LANES, team = threadIdx.x % WARP / LANES;
    const Chunk* const row = reinterpret_cast<const Chunk*>(tables.own) + int64(piece.z) * chunks;
    for (int start = 0; start < piece.y * QUAD; start += ROUNDS * AT_ONCE) {
        const Chunk* rows[ROUNDS];
        int64 place[ROUNDS];
        Sum sums[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int at = start + r * AT_ONCE + team;
            place[r] = at < piece.y * QUAD ? int64(piece.x) * QUAD + at : -1;
            const int index = place[r] < 0 ? zero : int(entries.indices[place[r]]);
            if (index == zero) place[r] = -1;
            rows[r] = reinterpret_cast<const Chunk*>(tables.fixed) + (index == zero ? 0 : (int64(base) + index) * chunks);
            sums[r] = 0;
        }
        for (int c = lane; c < chunks; c += LANES) {
            const Chunk mine = row[c];
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const Chunk other = rows[r][c];
#pragma unroll
                for (int k = 0; k < CHUNK; k++) sums[r] = fma(Sum(mine.value[k]), Sum(other.value[k]), sums[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance /= 2)
                sums[r] += __shfl_xor_sync(FULL_WARP, sums[r], distance);
            if (place[r] >= 0) body(place[r], Sum(entries.ratings[place[r]]) - sums[r]);
        }
    }
}

// residuals <- ratings - x.y of all entries, in `real`; one warp per piece.
extern "C" __global__ void __launch_bounds__(8 * WARP)
subtract_products(real* residuals, const real* ratings, const FixedIndex* indices, const real* own, const real* fixed,
                  const int4* pieces, const int* bases, int64 n_pieces, int chunks, int zero) {
    const int64 piece = int64(blockIdx.x) * 8 + threadIdx.x / WARP;
    if (piece >= n_pieces) return;
    const Tables tables = {own, fixed, chunks};
    const bool writes = threadIdx.x % LANES == 0;
    for_each_miss<4, real>({ratings, indices, zero}, tables, pieces[piece], bases[piece], [&](int64 place, real miss) {
        if (writes) residuals[place] = miss;
    });
}

// losses (n_pieces,) <- sums of (rating - x.y)^2 in float64; one warp per piece.
extern "C" __global__ void __launch_bounds__(8 * WARP)
squared_errors(double* losses, const real* ratings, const FixedIndex* indices, const real* own, const real* fixed,
               const int4* pieces, const int* bases, int64 n_pieces, int chunks, int zero) {
    const int64 piece = int64(blockIdx.x) * 8 + threadIdx.x / WARP;
    if (piece >= n_pieces) return;
    const Tables tables = {own, fixed, chunks};
    double sum = 0;
    for_each_miss<2, double>({ratings, indices, zero}, tables, pieces[piece], bases[piece], [&](int64, double miss) { sum += miss * miss; });
#pragma unroll
    for (int distance = WARP / 2; distance >= LANES; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    if (threadIdx.x % WARP == 0) losses[piece] = sum;
}

// out[r][c] <- in[c][r], r < n_rows, c < n_columns, through a square in shared memory; status[0] <- 1 if not all are finite.
extern "C" __global__ void __launch_bounds__(8 * WARP)
transpose(real* out, const real* in, int* status, int64 n_rows, int64 n_columns, int64 ld_out, int64 ld_in) {
    __shared__ real square[WARP][WARP + 1];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64 column = int64(blockIdx.x) * WARP, row = int64(blockIdx.y) * WARP;
    for (int k = warp; k < WARP; k += 8)
        if (column + k < n_columns && row + lane < n_rows) square[k][lane] = in[(column + k) * ld_in + row + lane];
    __syncthreads();
    for (int k = warp; k < WARP; k += 8) {
        if (row + k >= n_rows || column + lane >= n_columns) continue;
        const real value = square[lane][k];
        if (!(value - value == 0)) atomicMax(status, 1);
        out[(row + k) * ld_out + column + lane] = value;
    }
}
