// msgd.cu - MSGD: each row v of one side walks its entries in order while the other side is fixed
//           e = r - mean - b_v - b_u - v.u,  v <- (1 - rate lambda) v + rate e u,  b_v <- b_v + rate e
// source: Li, Li, An, Li 2017 (CUMSGD), eqs. 15 and 16, Algs. 2 and 3; `blocked` is ours
// kernels, all with the same sequence of updates of each row, so with the same result but for rounding:
//   centralized    Alg. 3: a group of lanes owns a row and walks its entries, which lie together (by rows of the moved
//                  side); RING rows of the fixed side are on their way meanwhile
//   blocked        the same for long rows, CHUNK entries a step: see below
//   decentralized  Alg. 2: entries lie by rows of the fixed side; a block owns a range of moved rows and walks all fixed
//                  rows in ascending order
// grid  : centralized: GROUP lanes a row; blocked: one block a row; decentralized: a block each range of moved rows
// block : WALK_THREADS; HELPERS + 1 warps; THREADS
// shapes: moved (n_moved, LD)  fixed (n_fixed, LD)  biases (n_moved,), (n_fixed,)  indices, ratings (nnz,)
//         tasks (n_tasks,): moved rows to walk; begins, ends: entries of each row of the walked layout
//         losses (n_tasks,) or (grid,): sums of e^2, each with the factors of its time
// shared: blocked: HELPERS * (3 CHUNK (LD + VECTOR) + 2 CHUNK (CHUNK + 1)) + 3 CHUNK + 1 reals, rounded up to 16 bytes
// traffic: LD * sizeof(real) * nnz read, mostly from L2     flops: 4 LD nnz
// limits: rows without entries are no tasks. A range of columns: begins and ends of the part of each row that lies in it,
//         tables that start at the first row of either range, `first` subtracted from each index
//
// Alg. 3 on its own takes as long as its longest row, whose updates depend on each other: a product, a sum over lanes
// (log2 GROUP shuffles) and an update, some 200 cycles, 250,000 times for the best-known film of Netflix. `blocked` solves
// the same recurrence CHUNK entries at a time. With u_0 ... u_(K-1) the fixed rows, k = 1 - rate lambda, v the row before:
//   e_j = s_j - sum_(l<j) M_jl e_l,  s_j = r_j - b_v - k^j v.u_j,  M_jl = rate (k^(j-1-l) u_j.u_l + 1 with biases)
//   v <- k^K v + rate sum_l k^(K-1-l) e_l u_l
// M does not depend on v: HELPERS warps compute it ahead, in shared memory. One warp is left with K independent products,
// a triangular system of order K and K independent updates, about 40 cycles an entry instead of 200.
//
// Costs of `decentralized`: a row of the moved side is read and written for each of its entries, and each block searches
// all rows of the fixed side for its range, grid * n_fixed * 2 log2(degree) reads, mostly from L2. It wants one layout
// of the ratings where `centralized` on both sides wants two.
#include "sgd.cuh"

#ifndef HAS_BIASES
#define HAS_BIASES 0
#endif
#ifndef CHUNK
#define CHUNK 16         // entries that `blocked` solves at a time
#endif
#ifndef HELPERS
#define HELPERS 3        // warps that compute M: they have about three times the work of the one that moves the row
#endif

constexpr int THREADS = 256;         // of a block of `decentralized`
constexpr int WALK_THREADS = 128;    // and of `centralized`
using Shared_row = Row<GROUP>;  // centralized: as few lanes as can hold a row
using Warp_row = Row<WARP>;     // others: a warp holds it

// Rows that are on their way at a time: enough bytes in flight, and registers left for 24 warps in the usual cases.
constexpr int RING = Shared_row::PIECES <= 4 ? 8 / Shared_row::PIECES : 2;
constexpr bool SIMPLE = Shared_row::PIECES == 1 && GROUP >= 8 && sizeof(real) == 4;
constexpr int BLOCKS_PER_SM = SIMPLE ? (Shared_row::ALL_LANES ? 6 : 5) : Shared_row::PIECES <= 4 ? 4 : 2;

// ---------------------------------------------------------------------------------------------- centralized

extern "C" __global__ void __launch_bounds__(WALK_THREADS, BLOCKS_PER_SM)
centralized(real* moved, real* moved_bias, double* losses, const real* fixed, const real* fixed_bias, const int* indices,
            const real* ratings, const int* tasks, const int64* begins, const int64* ends, int n_tasks, int first, real rate,
            real keep, real mean) {
    const int lane = threadIdx.x % GROUP;
    const int64 task = (int64(blockIdx.x) * WALK_THREADS + threadIdx.x) / GROUP;
    const bool mine = task < n_tasks;
    const int64 row = tasks[mine ? task : 0];
    const int64 begin = begins[row];
    const int count = mine ? int(ends[row] - begin) : 0;
    const int rounds = most_of_groups<GROUP>(ceil_div(count, RING));

    real v[Shared_row::OWNED], u[Shared_row::OWNED];
    Shared_row::values_of(v, Shared_row::load<THIS_WARP>(moved + row * LD, lane));
    real bias = HAS_BIASES ? moved_bias[row] : real(0);
    double loss = 0;

    // Places past the end stand for row `first`, whose updates do not count.
    Spread<int, RING, GROUP> index, next_index;
    Spread<real, RING, GROUP> rating, next_rating;
    index.load(indices + begin, count, lane, first);
    next_index.load(indices + begin + RING, count - RING, lane, first);
    rating.load(ratings + begin, count, lane, real(0));
    typename Shared_row::Raw ring[RING];
#pragma unroll
    for (int j = 0; j < RING; j++) ring[j] = Shared_row::load(fixed + int64(index.get(j) - first) * LD, lane);

    for (int round = 0; round < rounds; round++) {
        const int done = round * RING;
        Spread<real, RING, GROUP> target;
#pragma unroll
        for (int s = 0; s < target.SLOTS; s++)
            target.slot[s] = rating.slot[s] - mean - (HAS_BIASES ? fixed_bias[index.slot[s] - first] : real(0));
        index = next_index;
        next_index.load(indices + begin + done + 2 * RING, count - done - 2 * RING, lane, first);
        next_rating.load(ratings + begin + done + RING, count - done - RING, lane, real(0));
        real squares = 0;
#pragma unroll
        for (int j = 0; j < RING; j++) {
            const bool counts = done + j < count;
            Shared_row::values_of(u, ring[j]);
            ring[j] = Shared_row::load(fixed + int64(index.get(j) - first) * LD, lane);
            const real product = Shared_row::dot(v, u), wanted = target.get(j);  // all lanes: groups differ in `counts`
            const real error = counts ? wanted - bias - product : real(0);
            const real step = rate * error, rest = counts ? keep : real(1);
#pragma unroll
            for (int k = 0; k < Shared_row::OWNED; k++) v[k] = rest * v[k] + step * u[k];
            if (HAS_BIASES) bias += step;
            squares += error * error;
        }
        loss += squares;
        rating = next_rating;
    }
    if (!mine) return;
    Shared_row::store(moved + row * LD, Shared_row::raw_of(v), lane);
    if (lane == 0) {
        if (HAS_BIASES) moved_bias[row] = bias;
        losses[task] = loss;
    }
}

// ---------------------------------------------------------------------------------------------- blocked

constexpr int STRIDE = LD + VECTOR;  // of staged rows: neighbouring ones lie in different banks
constexpr int STAGES = 3;            // a chunk is copied, multiplied and walked in turn
constexpr int SIDE = 4;                          // a lane computes SIDE x SIDE products
constexpr int TILES = CHUNK / SIDE;              // along a side of M
constexpr int SPLIT = WARP / (TILES * TILES);    // lanes that share a tile, by columns
static_assert(CHUNK == power_of_two(CHUNK) && CHUNK >= SIDE && CHUNK <= 16, "a warp computes M");

struct Chunk {              // what a helper hands over, in shared memory
    real rows[STAGES][CHUNK][STRIDE];
    real matrix[2][CHUNK][CHUNK];  // [l][j] = M_jl for j > l
    real targets[2][CHUNK];        // rating - mean - bias of the fixed row
};

struct Work {  // of a block, in shared memory
    Chunk chunks[HELPERS];
    real sums[CHUNK];
    real powers[CHUNK + 1];   // of keep
    real weights[CHUNK];      // rate keep^(CHUNK - 1 - l)
};
#ifdef SHARED_BYTES
static_assert(sizeof(Work) <= SHARED_BYTES, "the launcher counts as the kernel does");
#endif

// u_j.u_l of the rows of a chunk, for all j and l, and from them M.
__device__ __forceinline__ void multiply(real (&matrix)[CHUNK][CHUNK], const real (&rows)[CHUNK][STRIDE], const real* powers,
                                         int count, real rate, int lane) {
    const int tile = lane % (TILES * TILES), part = lane / (TILES * TILES), i = tile / TILES, j = tile % TILES;
    real sums[SIDE][SIDE] = {};
#pragma unroll 2
    for (int piece = part; piece < VECTORS; piece += SPLIT) {
        real a[SIDE][VECTOR], b[SIDE][VECTOR];
#pragma unroll
        for (int k = 0; k < SIDE; k++) {  // rows i, i + TILES, ...: lanes read neighbouring ones, in different banks
            unpack(a[k], *reinterpret_cast<const int4*>(&rows[i + k * TILES][piece * VECTOR]));
            unpack(b[k], *reinterpret_cast<const int4*>(&rows[j + k * TILES][piece * VECTOR]));
        }
#pragma unroll
        for (int q = 0; q < VECTOR; q++)
#pragma unroll
            for (int k = 0; k < SIDE; k++)
#pragma unroll
                for (int l = 0; l < SIDE; l++) sums[k][l] += a[k][q] * b[l][q];
    }
#pragma unroll
    for (int k = 0; k < SIDE; k++)
#pragma unroll
        for (int l = 0; l < SIDE; l++) {
            real sum = sums[k][l];
#pragma unroll
            for (int distance = TILES * TILES; distance < WARP; distance *= 2)
                sum += __shfl_xor_sync(FULL_WARP, sum, distance);
            const int from = j + l * TILES, to = i + k * TILES;
            if (part == 0 && to > from)
                matrix[from][to] = to < count ? rate * (powers[to - 1 - from] * sum + real(HAS_BIASES)) : real(0);
        }
}

// Sums over a warp of CHUNK values of each lane: lane k gets that of value k / (WARP / CHUNK).
__device__ __forceinline__ real reduce_chunk(real (&values)[CHUNK], int lane) {
    static_for<0, 5>([&](auto step) {
        constexpr int distance = WARP / 2 >> step.value, kept = CHUNK / 2 >> step.value;
        if constexpr (kept > 0) {
            const bool upper = lane & distance;
#pragma unroll
            for (int k = 0; k < kept; k++) {
                const real sent = upper ? values[k] : values[k + kept];
                const real mine = upper ? values[k + kept] : values[k];
                values[k] = mine + __shfl_xor_sync(FULL_WARP, sent, distance);
            }
        } else {
            values[0] += __shfl_xor_sync(FULL_WARP, values[0], distance);
        }
    });
    return values[0];
}

// The values of 16-byte pieces in shared memory.
template <int COUNT> __device__ __forceinline__ void read_all(real (&values)[COUNT], const real* source) {
#pragma unroll
    for (int k = 0; k < COUNT; k += VECTOR) unpack(values + k, *reinterpret_cast<const int4*>(source + k));
}

// The helper's loop: copy the chunk of stage t + 1, multiply that of stage t.
struct Helper {
    Chunk& chunk;
    const Work& work;
    const real* fixed;
    const real* fixed_bias;
    const int* indices;    // of the row's entries
    const real* ratings;
    int count, helper, lane, first;
    real rate, mean;

    // Entries of this helper's chunk in a stage; none or less in the stages past the end.
    __device__ __forceinline__ int left(int stage) const { return count - (stage * HELPERS + helper) * CHUNK; }

    __device__ __forceinline__ int index_at(int stage) const {
        return lane < CHUNK && lane < left(stage) ? indices[(stage * HELPERS + helper) * CHUNK + lane] - first : 0;
    }

    __device__ __forceinline__ void copy(int stage, int index) const {
        real* target = &chunk.rows[stage % STAGES][0][0];
        const int valid = left(stage);
#pragma unroll 4
        for (int j = 0; j < CHUNK; j++) {
            const real* source = fixed + int64(__shfl_sync(FULL_WARP, index, j)) * LD;
            for (int piece = lane; piece < VECTORS; piece += WARP)
                copy_async_16(target + j * STRIDE + piece * VECTOR, source + piece * VECTOR, j < valid);
        }
        copy_commit();
    }

    __device__ __forceinline__ void run(int stages) const {
        int index = index_at(0), next = index_at(1);
        copy(0, index);
        for (int stage = 0; stage <= stages; stage++) {
            if (stage < stages) {
                real target = 0;
                if (lane < CHUNK && lane < left(stage))
                    target = ratings[(stage * HELPERS + helper) * CHUNK + lane] - mean -
                             (HAS_BIASES ? fixed_bias[index] : real(0));
                copy(stage + 1, next);
                index = next;
                next = index_at(stage + 2);
                copy_wait<1>();
                __syncwarp();  // the other lanes' copies have arrived, too
                multiply(chunk.matrix[stage % 2], chunk.rows[stage % STAGES], work.powers, left(stage), rate, lane);
                if (lane < CHUNK) chunk.targets[stage % 2][lane] = target;
            }
            __syncthreads();  // this stage is ready to be walked, the one before has been walked
        }
        copy_wait<0>();
    }
};

extern "C" __global__ void __launch_bounds__((HELPERS + 1) * WARP, 1)
blocked(real* moved, real* moved_bias, double* losses, const real* fixed, const real* fixed_bias, const int* indices,
        const real* ratings, const int* tasks, const int64* begins, const int64* ends, int n_tasks, int first, real rate,
        real keep, real mean) {
    Work& work = *shared_memory<Work>();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // Blocks of a multiprocessor have their walking warps in different quarters of it.
    const int walker = blockIdx.x % (HELPERS + 1);
    const int64 row = tasks[blockIdx.x], begin = begins[row];
    const int count = int(ends[row] - begin), stages = ceil_div(count, HELPERS * CHUNK);
    if (threadIdx.x == 0) {
        real power = 1;
        for (int k = 0; k <= CHUNK; k++) {
            work.powers[k] = power;
            if (k < CHUNK) work.weights[CHUNK - 1 - k] = rate * power;
            power *= keep;
        }
    }
    __syncthreads();
    if (warp != walker) {
        const int helper = warp < walker ? warp : warp - 1;
        Helper{work.chunks[helper], work, fixed, fixed_bias, indices + begin, ratings + begin, count, helper, lane, first,
               rate, mean}.run(stages);
        return;
    }

    real v[Warp_row::OWNED], u[Warp_row::OWNED];
    Warp_row::values_of(v, Warp_row::load<THIS_WARP>(moved + row * LD, lane));
    real bias = HAS_BIASES ? moved_bias[row] : real(0);
    double loss = 0;
    const auto staged = [&](const real* place) {
#pragma unroll
        for (int p = 0; p < Warp_row::PIECES; p++) {
            int4 piece = {0, 0, 0, 0};
            if (Warp_row::has(p, lane)) piece = *reinterpret_cast<const int4*>(place + (p * WARP + lane) * VECTOR);
            unpack(u + p * VECTOR, piece);
        }
    };
    __syncthreads();  // stage 0 is ready
    for (int stage = 0; stage < stages; stage++) {
        for (int helper = 0; helper < HELPERS; helper++) {
            const Chunk& chunk = work.chunks[helper];
            const int valid = min(CHUNK, count - (stage * HELPERS + helper) * CHUNK);
            if (valid <= 0) break;
            const auto& rows = chunk.rows[stage % STAGES];
            real errors[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                staged(rows[j]);
                errors[j] = Warp_row::partial_dot(v, u);
            }
            const real product = reduce_chunk(errors, lane);
            const int mine = lane / (WARP / CHUNK);
            if (lane % (WARP / CHUNK) == 0)
                work.sums[mine] =
                    mine < valid ? chunk.targets[stage % 2][mine] - bias - work.powers[mine] * product : real(0);
            __syncwarp();
            read_all(errors, work.sums);
            const auto& matrix = chunk.matrix[stage % 2];
            static_for<0, CHUNK - 1>([&](auto l) {  // forward substitution, in every lane
                static_for<(l.value + 1) / VECTOR, CHUNK / VECTOR>([&](auto piece) {
                    real column[VECTOR];
                    unpack(column, *reinterpret_cast<const int4*>(&matrix[l.value][piece.value * VECTOR]));
#pragma unroll
                    for (int q = 0; q < VECTOR; q++)
                        if (piece.value * VECTOR + q > l.value)
                            errors[piece.value * VECTOR + q] -= column[q] * errors[l.value];
                });
            });
            const real shrink = work.powers[valid];
            real squares = 0;
#pragma unroll
            for (int k = 0; k < Warp_row::OWNED; k++) v[k] *= shrink;
#pragma unroll
            for (int l = 0; l < CHUNK; l++) {
                // past the end errors are zero; their weights only have to be read from within the array
                const real step = work.weights[min(l + CHUNK - valid, CHUNK - 1)] * errors[l];
                staged(rows[l]);
#pragma unroll
                for (int k = 0; k < Warp_row::OWNED; k++) v[k] += step * u[k];
                if (HAS_BIASES) bias += rate * errors[l];
                squares += errors[l] * errors[l];
            }
            loss += squares;
            __syncwarp();  // all have read the sums
        }
        __syncthreads();  // the next stage is ready
    }
    Warp_row::store(moved + row * LD, Warp_row::raw_of(v), lane);
    if (lane == 0) {
        if (HAS_BIASES) moved_bias[row] = bias;
        losses[blockIdx.x] = loss;
    }
}

// ---------------------------------------------------------------------------------------------- decentralized

constexpr int WARPS = THREADS / WARP;
constexpr int LIST = 1024;  // entries a block finds at a time

// First place in begin ... end - 1 whose index is at least `wanted`; indices ascend.
__device__ __forceinline__ int64 lower_bound(const int* indices, int64 begin, int64 end, int wanted) {
    while (begin < end) {
        const int64 middle = begin + (end - begin) / 2;
        if (indices[middle] < wanted) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// Sums of the values of the threads before this one, and of all.
__device__ __forceinline__ int scan_block(int value, int* totals, int& all) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int before = __shfl_up_sync(FULL_WARP, sum, distance);
        if (lane >= distance) sum += before;
    }
    if (lane == WARP - 1) totals[warp] = sum;
    __syncthreads();
    int earlier = 0;
    all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) earlier += totals[w];
        all += totals[w];
    }
    return earlier + sum - value;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
decentralized(real* moved, real* moved_bias, double* losses, const real* fixed, const real* fixed_bias, const int* indices,
              const real* ratings, const int* bounds, const int64* begins, const int64* ends, int n_fixed, int first,
              real rate, real keep, real mean) {
    __shared__ int64 places[LIST];
    __shared__ int owners[LIST], columns[LIST], totals[WARPS];
    __shared__ double sums[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int low = first + bounds[blockIdx.x], high = first + bounds[blockIdx.x + 1];
    double loss = 0;
    for (int base = 0; base < n_fixed; base += THREADS) {
        // each thread looks for this block's entries in one row; the list holds them row by row
        const int mine = base + int(threadIdx.x);
        int64 from = 0, to = 0;
        if (mine < n_fixed) {
            from = lower_bound(indices, begins[mine], ends[mine], low);
            to = lower_bound(indices, from, ends[mine], high);
        }
        int found;
        const int before = scan_block(int(to - from), totals, found);
        for (int start = 0; start < found; start += LIST) {
            for (int k = max(before, start); k < min(before + int(to - from), start + LIST); k++) {
                places[k - start] = from + (k - before);
                owners[k - start] = mine;
                columns[k - start] = indices[from + (k - before)] - first;
            }
            __syncthreads();
            const int listed = min(LIST, found - start);
            for (int k = 0; k < listed; k += WARP) {
                // a warp owns every WARPS-th moved row, so only it touches them, in the order of the list
                const int column = k + lane < listed ? columns[k + lane] : -1;
                unsigned bits = __ballot_sync(FULL_WARP, column >= 0 && column % WARPS == warp);
                while (bits) {
                    const int at = k + __ffs(bits) - 1;
                    bits &= bits - 1;
                    const int64 row = columns[at], owner = owners[at];
                    real v[Warp_row::OWNED], u[Warp_row::OWNED];
                    Warp_row::values_of(v, Warp_row::load<THIS_WARP>(moved + row * LD, lane));
                    Warp_row::values_of(u, Warp_row::load(fixed + owner * LD, lane));
                    real error = ratings[places[at]] - mean - Warp_row::dot(v, u);
                    if (HAS_BIASES) error -= moved_bias[row] + fixed_bias[owner];
                    const real step = rate * error;
#pragma unroll
                    for (int q = 0; q < Warp_row::OWNED; q++) v[q] = keep * v[q] + step * u[q];
                    Warp_row::store(moved + row * LD, Warp_row::raw_of(v), lane);
                    if (HAS_BIASES) {
                        __syncwarp();  // all lanes have read the bias
                        if (lane == 0) moved_bias[row] += step;
                        __syncwarp();
                    }
                    loss += double(error) * double(error);
                }
            }
            __syncthreads();  // the list and the totals may be written again
        }
        if (!found) __syncthreads();
    }
    if (lane == 0) sums[warp] = loss;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; w++) loss += sums[w];
        losses[blockIdx.x] = loss;
    }
}
