// msgd.cu - MSGD: each row v of one side walks its entries in order while the other side is fixed
//           e = r - mean - b_v - b_u - v.u,  v <- keep v + rate e u,  b_v <- bias_keep b_v + bias_rate e
//           with keep = 1 - rate lambda, bias_keep = 1 - bias_rate bias_lambda
// source: Li, Li, An, Li 2017 (CUMSGD), eqs. 15 and 16, Algs. 2 and 3; `blocked` is ours
// kernels: all apply the same sequence of updates to each row, so their results differ only by rounding
//   centralized    Alg. 3: a team of lanes owns a row and walks its entries, which are contiguous (ordered by rows of the
//                  moved side), while it loads RING rows of the fixed side ahead; `centralized_narrow`: half the lanes
//   blocked        the same for long rows, CHUNK entries per step: see below
//   decentralized  Alg. 2: entries are ordered by rows of the fixed side; a block owns a range of moved rows and walks all
//                  fixed rows in ascending order
// grid  : centralized: a team per row; blocked: one block per bin of rows; decentralized: one block per range of moved rows
// block : WALK_THREADS; BLOCK_WARPS warps; THREADS
// shapes: moved (n_moved, LD)  fixed (n_fixed, LD)  biases (n_moved,), (n_fixed,)  walk: by moved rows, or fixed (Alg. 2)
//         tasks (n_tasks,): moved rows to walk
//         losses (n_tasks,) or (grid,): sums of e^2, each e computed with the factors before its update
// shared: blocked: sizeof(Work), CHUNK_SLOTS * CHUNK * (STRIDE + CHUNK + VECTOR + 1) reals and a little
// traffic: LD * sizeof(real) * nnz read, mostly from L2     flops: 4 LD nnz
// synchronization: one team or warp updates a row, and each lane its own pieces; all lanes read a bias, lane 0 writes it, with
//         __syncwarp between. The fixed side is not written. Block barriers enclose each list of `decentralized`.
//         blocked: chunk c of a block is in slot c % CHUNK_SLOTS. Helper c % HELPERS writes it after gate `walked` of chunk
//         c - CHUNK_SLOTS, the walking warp reads it after gate `prepared` of chunk c. The two gates of a slot open in turn, so
//         openings do not mix. Parity suffices, since a waiting warp is at most one opening behind: the walking warp waits for
//         every chunk in order; a helper at chunk c has waited for chunk c - HELPERS - CHUNK_SLOTS to be walked, hence chunk
//         c - 2 CHUNK_SLOTS is walked, too. Lanes of a warp exchange values in shared memory with __syncwarp after the writes
//         (for copies after copy_wait in each lane) and after the reads.
// limits: rows without entries are no tasks. For a range of columns: the walk has the begin and end of each row's part in the
//         range, the tables start at the first row of either range, and `first` is subtracted from each index
//
// Alg. 3 on its own takes as long as its longest row, whose updates depend on each other: a product, a sum over lanes
// (log2 GROUP shuffles) and an update, some 200 cycles, 250,000 times for the film with the most ratings in Netflix. `blocked`
// solves the same recurrence CHUNK entries at a time. Let u_0 ... u_(K-1) be the fixed rows, r_j the ratings less the mean and
// the biases of the fixed rows, v and b the row and its bias before the chunk, k = keep, h = bias_keep (without biases, all
// terms in b and h vanish):
//   before entry j:  v_j = k^j v + rate sum_(l<j) k^(j-1-l) e_l u_l,  b_j = h^j b + bias_rate sum_(l<j) h^(j-1-l) e_l
//   e_j = r_j - b_j - v_j.u_j = s_j - sum_(l<j) M_jl e_l
//   s_j = r_j - h^j b - k^j v.u_j,  M_jl = rate k^(j-1-l) u_j.u_l + bias_rate h^(j-1-l)
//   v <- v_K,  b <- b_K
// M does not depend on v: HELPERS warps compute it ahead, on tensor cores where possible, and from it T = (1 + M)^-1, one lane
// per column. The walking warp is left with K independent products, e = T s and K independent updates. T_jl is the contribution
// of error l to the later error j, -rate u_j^T (product of (k - rate u_i u_i^T), l < i < j) u_l. As long as no step overshoots
// by as much as it corrects (rate |u|^2 <= 2), it is no larger than rate |u_j| |u_l|. Any rounding error beyond that also
// occurs in v.
//
// A ring of slots in shared memory holds the chunks. A slot is copied to (some 1,000 cycles), prepared, walked, and freed. Each
// slot has its own gates for these handovers; the first barrier is the only one of the block. Warps that neither walk nor help end
// after it.
//
// Cost per entry of the longest row, on an H100 in float32: LD 128 43 cycles (6 helpers, 18 slots), LD 64 42, LD 32 47, LD 256 91
// (5 and 10). Before, 56, 58, 56 and 125, with a helper on the walking warp's scheduler and 1,080 instead of 690 instructions per
// chunk in a helper. The walking warp alone takes 39; more helpers do not help, since its reads of shared memory wait for theirs.
// Chunks of 32 took 1.5 to 3 times as long and were removed.
//   walking warp   285 instructions per chunk; in cycles, 140 for update and products, during which the next rows arrive (they
//                  stay in registers from the products to the update if they fit; else they are read twice); 120 for sums over
//                  lanes, through shared memory, which takes 25 instructions instead of 62 by shuffles; 80 each for T s
//                  and for broadcasting s and e to all lanes, which by shuffles takes longer. Their latencies alone would be 450
//                  cycles, 28 per entry.
//   helper         690 instructions per chunk: copies 60, products 310 (64 on tensor cores), T 200
//
// Costs of `decentralized`: a row of the moved side is read and written for each of its entries, and each block searches
// all rows of the fixed side for its range, grid * n_fixed * 2 log2(degree) reads, mostly from L2. It needs one layout
// of the ratings; `centralized` on both sides needs two.
#include "sgd.cuh"
#include "tensor.cuh"

#ifndef HAS_BIASES
#define HAS_BIASES 0
#endif
#ifndef FIXED16
#define FIXED16 0        // 1: the fixed side's rows are float16, for `centralized` and `blocked` with CHUNK 16
#endif
#ifndef CHUNK
#define CHUNK 16         // entries that `blocked` solves at a time
#endif
#ifndef HELPERS
#define HELPERS 5        // warps that prepare chunks for the walking warp, which updates the row
#endif
#ifndef CHUNK_SLOTS
#define CHUNK_SLOTS 10   // chunks in shared memory: being copied, being prepared, ready, or being walked
#endif

constexpr int THREADS = 256;         // per block of `decentralized`
constexpr int WALK_THREADS = 128;    // per block of `centralized`
using Warp_row = Row<WARP>;     // the other kernels: a warp holds a row

#if FIXED16
using fixed_value = unsigned short;
static_assert(sizeof(real) == 4 && LD % 8 == 0 && CHUNK == 16, "rows of whole pieces in float16, too; one kind of product");

// A lane's part of a row of either side: pieces of 8 columns.
template <int SIZE> struct Shared_row {
    static constexpr int PIECES = ceil_div(LD / 8, SIZE), OWNED = 8 * PIECES;
    static constexpr bool ALL_LANES = LD / 8 % SIZE == 0;
    struct Raw { int4 piece[PIECES]; };

    __device__ static __forceinline__ bool has(int piece, int lane) { return ALL_LANES || piece * SIZE + lane < LD / 8; }

    __device__ static __forceinline__ Raw load(const fixed_value* row, int lane) {
        Raw raw;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            raw.piece[p] = int4{0, 0, 0, 0};
            if (has(p, lane)) raw.piece[p] = __ldg(reinterpret_cast<const int4*>(row) + p * SIZE + lane);
        }
        return raw;
    }

    __device__ static __forceinline__ void values_of(real (&values)[OWNED], const Raw& raw) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const unsigned pairs[4] = {unsigned(raw.piece[p].x), unsigned(raw.piece[p].y), unsigned(raw.piece[p].z),
                                       unsigned(raw.piece[p].w)};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 pair = from_halves(pairs[k]);
                values[8 * p + 2 * k] = pair.x;
                values[8 * p + 2 * k + 1] = pair.y;
            }
        }
    }

    // Reads a row of the moved side.
    __device__ static __forceinline__ void read(real (&values)[OWNED], const real* row, int lane) {
#pragma unroll
        for (int k = 0; k < OWNED; k += 4) {
            int4 piece = {0, 0, 0, 0};
            if (has(k / 8, lane)) piece = reinterpret_cast<const int4*>(row)[(k / 8 * SIZE + lane) * 2 + k % 8 / 4];
            memcpy(values + k, &piece, sizeof(piece));
        }
    }

    __device__ static __forceinline__ void write(real* row, const real (&values)[OWNED], int lane) {
#pragma unroll
        for (int k = 0; k < OWNED; k += 4)
            if (has(k / 8, lane)) memcpy(row + (k / 8 * SIZE + lane) * 8 + k % 8, values + k, 16);
    }

    __device__ static __forceinline__ real dot(const real (&a)[OWNED], const real (&b)[OWNED]) {
        real sums[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < OWNED; k++) sums[k % 2] += a[k] * b[k];
        real sum = sums[0] + sums[1];
#pragma unroll
        for (int distance = SIZE / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        return sum;
    }
};
#else
using fixed_value = stored;
template <int SIZE> struct Shared_row : Row<SIZE> {
    using Base = Row<SIZE>;
    using Base::OWNED;

    __device__ static __forceinline__ void read(real (&values)[OWNED], const stored* row, int lane) {
        Base::values_of(values, Base::template load<THIS_WARP>(row, lane));
    }
    __device__ static __forceinline__ void write(stored* row, const real (&values)[OWNED], int lane) {
        Base::store(row, Base::raw_of(values), lane);
    }
};
#endif

struct FixedFactors { const fixed_value* rows; const real* bias; };

// Lanes that hold a row: as few as can hold it in one piece each, or half of them. That takes two thirds of the instructions, but
// leaves half the warps to hide latency, so it is for many rows.
constexpr int FIXED_PIECES = LD * int(sizeof(fixed_value)) / 16;
constexpr int WIDE_TEAM = FIXED_PIECES < WARP ? power_of_two(FIXED_PIECES) : WARP;
constexpr int NARROW_TEAM = WIDE_TEAM >= 8 && FIXED_PIECES <= WIDE_TEAM ? WIDE_TEAM / 2 : WIDE_TEAM;

template <int TEAM> struct Centralized {
    using Held = Shared_row<TEAM>;
    // Rows in flight at a time: enough bytes in flight, with registers left for 24 warps in the usual cases.
    static constexpr int RING = Held::PIECES <= 4 ? 8 / Held::PIECES : 2;
    static constexpr bool SIMPLE = Held::OWNED <= (FIXED16 ? 8 : 4) && TEAM >= 8 && sizeof(real) == 4;
    static constexpr int BLOCKS_PER_SM = SIMPLE ? (Held::ALL_LANES ? 6 : 5) : Held::PIECES <= 4 ? 4 : 2;

    __device__ static __forceinline__ void run(const Factors& moved, double* losses, const FixedFactors& fixed, const Walk& walk,
                                               const int* tasks, int n_tasks, const Terms& terms) {
        const int lane = threadIdx.x % TEAM;
        const int64 task = (int64(blockIdx.x) * WALK_THREADS + threadIdx.x) / TEAM;
        const bool mine = task < n_tasks;
        const int64 row = tasks[mine ? task : 0];
        const int64 begin = walk.begins[row];
        const int count = mine ? int(walk.ends[row] - begin) : 0;
        const int rounds = most_of_groups<TEAM>(ceil_div(count, RING));

        real v[Held::OWNED] = {}, u[Held::OWNED];
        if (mine) Held::read(v, moved.rows + row * LD, lane);  // otherwise another team is writing the row
        real bias = HAS_BIASES && mine ? moved.bias[row] : real(0);
        double loss = 0;

        // Places past the end refer to row `first`; their updates are discarded.
        Spread<int, RING, TEAM> index, next_index;
        Spread<real, RING, TEAM> rating, next_rating;
        index.load(walk.indices + begin, count, lane, walk.first);
        next_index.load(walk.indices + begin + RING, count - RING, lane, walk.first);
        rating.load(walk.ratings + begin, count, lane, real(0));
        typename Held::Raw ring[RING];
#pragma unroll
        for (int j = 0; j < RING; j++) ring[j] = Held::load(fixed.rows + int64(index.get(j) - walk.first) * LD, lane);

        for (int round = 0; round < rounds; round++) {
            const int done = round * RING;
            Spread<real, RING, TEAM> target;
#pragma unroll
            for (int s = 0; s < target.SLOTS; s++)
                target.slot[s] = rating.slot[s] - terms.mean - (HAS_BIASES ? fixed.bias[index.slot[s] - walk.first] : real(0));
            index = next_index;
            next_index.load(walk.indices + begin + done + 2 * RING, count - done - 2 * RING, lane, walk.first);
            next_rating.load(walk.ratings + begin + done + RING, count - done - RING, lane, real(0));
            real squares = 0;
#pragma unroll
            for (int j = 0; j < RING; j++) {
                const bool counts = done + j < count;
                Held::values_of(u, ring[j]);
                ring[j] = Held::load(fixed.rows + int64(index.get(j) - walk.first) * LD, lane);
                const real product = Held::dot(v, u), wanted = target.get(j);  // executed by all lanes: groups differ in `counts`
                const real error = counts ? wanted - bias - product : real(0);
                const real step = terms.rate * error, rest = counts ? terms.keep : real(1);
#pragma unroll
                for (int k = 0; k < Held::OWNED; k++) v[k] = rest * v[k] + step * u[k];
                if (HAS_BIASES) bias = (counts ? terms.bias_keep : real(1)) * bias + terms.bias_rate * error;
                squares += error * error;
            }
            loss += squares;
            rating = next_rating;
        }
        if (HAS_BIASES) __syncwarp();  // all lanes have read the bias
        if (!mine) return;
        Held::write(moved.rows + row * LD, v, lane);
        if (lane == 0) {
            if (HAS_BIASES) moved.bias[row] = bias;
            losses[task] = loss;
        }
    }
};

extern "C" __global__ void __launch_bounds__(WALK_THREADS, Centralized<WIDE_TEAM>::BLOCKS_PER_SM)
centralized(Factors moved, double* losses, FixedFactors fixed, Walk walk, const int* tasks, int n_tasks, Terms terms) {
    Centralized<WIDE_TEAM>::run(moved, losses, fixed, walk, tasks, n_tasks, terms);
}

extern "C" __global__ void __launch_bounds__(WALK_THREADS, Centralized<NARROW_TEAM>::BLOCKS_PER_SM)
centralized_narrow(Factors moved, double* losses, FixedFactors fixed, Walk walk, const int* tasks, int n_tasks, Terms terms) {
    Centralized<NARROW_TEAM>::run(moved, losses, fixed, walk, tasks, n_tasks, terms);
}

// ---------------------------------------------------------------------------------------------- blocked

constexpr bool TENSOR = CHUNK == 16 && sizeof(real) == 4 && HAS_ASYNC_COPY;
// Stride of staged rows. A quarter of a warp reads two neighbouring rows for tensor cores: they are in different banks.
constexpr int STRIDE = LD + (FIXED16 ? (96 - LD % 64) % 64 : CHUNK == 16 && sizeof(real) == 4 ? (48 - LD % 32) % 32 : VECTOR);
constexpr int FIXED_VECTOR = 16 / int(sizeof(fixed_value)), FIXED_VECTORS = LD / FIXED_VECTOR;  // pieces of a fixed row
static_assert(CHUNK == power_of_two(CHUNK) && CHUNK >= 4 && CHUNK <= 16, "a lane computes an error");
// A helper waits for the slot of its next chunk before it prepares the current chunk; the walking warp waits for the next chunk
// before it frees a slot. With fewer slots they would deadlock; with fewer than HELPERS, parity would be ambiguous (see above).
static_assert(CHUNK_SLOTS >= HELPERS + 2, "or walker and helpers would wait for each other");

struct alignas(32) Slot {  // a chunk in shared memory; copies of rows keep the sectors of memory together
    fixed_value rows[CHUNK][STRIDE];
    real inverse[CHUNK][CHUNK + VECTOR];  // first M, then (1 + M)^-1; lanes read rows, which are in different banks
    real targets[CHUNK];                  // rating - mean - bias of the fixed row
    Gate prepared, walked;                // opened once for each chunk in this slot
};

// The warps of a block. The multiprocessor has four schedulers, and each has every fourth warp. No helper is on that of the walking
// warp, whose instructions would wait for its own: the other warps of the block there end at once. Warps of other blocks, if the
// multiprocessor has any, may be there.
constexpr int SCHEDULERS = 4, WALKING = SCHEDULERS - 1;
constexpr int BLOCK_WARPS = HELPERS < SCHEDULERS ? SCHEDULERS : HELPERS + (HELPERS - 1) / WALKING;

// Where a chunk of the block is: its slot, and how often it and the chunks before it open the gates of that slot.
struct Place {
    int slot, round;

    __device__ __forceinline__ explicit Place(int chunk) : slot(chunk % CHUNK_SLOTS), round(chunk / CHUNK_SLOTS + 1) {}

    // `chunks`: fewer than there are slots.
    __device__ __forceinline__ void advance(int chunks) {
        slot += chunks;
        if (slot < CHUNK_SLOTS) return;
        slot -= CHUNK_SLOTS;
        round++;
    }
};

struct alignas(32) Work {  // a block's workspace in shared memory
    Slot slots[CHUNK_SLOTS];     // chunk c of the block is in slot c % CHUNK_SLOTS
    real partials[CHUNK][WARP + VECTOR];  // each lane's share of the products
    real sums[CHUNK];         // s
    real steps[CHUNK];        // rate keep^(CHUNK - 1 - l) e_l
    real bias_steps[CHUNK];   // bias_rate bias_keep^(CHUNK - 1 - l) e_l, with biases
    real powers[CHUNK + 1];   // keep^k
    real weights[CHUNK];      // rate keep^k
    real bias_powers[CHUNK + 1];  // the same for biases
    real bias_weights[CHUNK];

    __device__ __forceinline__ Slot& at(const Place& place) { return slots[place.slot]; }
};
#ifdef SHARED_BYTES
static_assert(sizeof(Work) == SHARED_BYTES, "the launcher counts as the kernel does");
#endif

// The same pointer to shared memory, in a register: the compiler, which only knows that it is one to shared memory, cannot compute
// it anew. Hopper's would do so after each __syncwarp.
template <class T> __device__ __forceinline__ T* in_register(T* shared) {
#ifndef HYBRIDMF_EMULATE
    asm volatile("" : "+l"(shared));
    __builtin_assume(__isShared(shared));
#endif
    return shared;
}

// Reads the values of 16-byte pieces from shared memory.
template <int COUNT> __device__ __forceinline__ void read_all(real (&values)[COUNT], const real* source) {
#pragma unroll
    for (int k = 0; k < COUNT; k += VECTOR) unpack(values + k, *reinterpret_cast<const int4*>(source + k));
}

// Sums in four chains: a quarter of the latency.
template <int COUNT> __device__ __forceinline__ real dot_product(const real (&a)[COUNT], const real (&b)[COUNT]) {
    real sums[4] = {};
#pragma unroll
    for (int k = 0; k < COUNT; k++) sums[k % 4] += a[k] * b[k];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// ------------------------------------------------------------------ helpers: M and its inverse

// Computes M_jl, given u_j.u_l. Elements above the diagonal are not read, so they may hold anything. Elements past the end are
// zero, like the errors: products with rows past the end are.
struct Coupling {
    // What an element has besides the product.
    struct Weight {
        real factor, bias;

        __device__ __forceinline__ Weight(const Work& work, int j, int l)
            : factor(work.weights[max(j - 1 - l, 0)]), bias(HAS_BIASES ? work.bias_weights[max(j - 1 - l, 0)] : real(0)) {}
    };

    const Work& work;
    int count;

    __device__ __forceinline__ real of(int j, int l, real product) const { return of(j, Weight(work, j, l), product); }

    __device__ __forceinline__ real of(int j, const Weight& weight, real product) const {
        const real coupling = weight.factor * product + weight.bias;
        return !HAS_BIASES || j < count ? coupling : real(0);
    }
};

// Products on tensor cores, each value in two tf32 parts: high, its first 11 bits, and low, the others, of which tensor cores
// ignore the last ones. Two products, high high^T and X = low high^T, give u_j.u_l but for low low^T, as high high^T + X + X^T. M
// has an error of some 2^-20 |u_j| |u_l| rate. Its effect on the errors ends with the chunk: the next starts from products with v.
struct Tensor_product {  // for chunks of 16
    using Sums = float[2][4];  // of 8 columns each

    // Of the elements of a lane: in blocks of 8 x 8 on the diagonal, and in the block below.
    Coupling::Weight on_diagonal[2], below[2];

    __device__ __forceinline__ Tensor_product(const Work& work, int lane)
        : on_diagonal{{work, lane / 4, lane % 4 * 2}, {work, lane / 4, lane % 4 * 2 + 1}},
          below{{work, lane / 4 + 8, lane % 4 * 2}, {work, lane / 4 + 8, lane % 4 * 2 + 1}} {}

    __device__ __forceinline__ void run(Slot& slot, const Coupling& coupling, int lane) const {
        const int g = lane / 4, t = lane % 4;  // the numbering of mma.sync
        Sums high = {}, low = {};
#pragma unroll 4
        for (int first = 0; first < VECTORS; first += 4) {  // 16 columns, in the order of the reads
            float values[2][4];
#pragma unroll
            for (int b = 0; b < 2; b++) {  // row g of 8
                int4 piece = {0, 0, 0, 0};
                if (VECTORS % 4 == 0 || first + t < VECTORS)
                    piece = *reinterpret_cast<const int4*>(&slot.rows[8 * b + g][(first + t) * VECTOR]);
                memcpy(values[b], &piece, sizeof(piece));
            }
            static_for<0, 2>([&](auto half) { multiply<2 * half.value>(high, low, values); });
        }
        float crosswise[3][2];  // X^T
        transpose(crosswise[0], low[0][0], low[0][1], lane);
        transpose(crosswise[1], low[1][0], low[1][1], lane);
        transpose(crosswise[2], low[1][2], low[1][3], lane);
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const int j = g, l = 2 * t + q;
            slot.inverse[j][l] = coupling.of(j, on_diagonal[q], high[0][q] + (low[0][q] + crosswise[0][q]));
            slot.inverse[j + 8][l] = coupling.of(j + 8, below[q], high[0][2 + q] + (low[0][2 + q] + crosswise[1][q]));
            slot.inverse[j + 8][l + 8] = coupling.of(j + 8, on_diagonal[q], high[1][2 + q] + (low[1][2 + q] + crosswise[2][q]));
        }
    }

    // Multiplies columns Q and Q + 1 of each lane's four. The second operand is not split: tensor cores ignore its low part.
    template <int Q>
    __device__ static __forceinline__ void multiply(Sums& high, Sums& low, const float (&values)[2][4]) {
        const float own[4] = {values[0][Q], values[1][Q], values[0][Q + 1], values[1][Q + 1]};
        unsigned upper[4], rest[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float below = own[k] - __uint_as_float(__float_as_uint(own[k]) & 0xffffe000u);
            rest[k] = __float_as_uint(below);
            upper[k] = __float_as_uint(own[k] - below);  // not by a mask, which the compiler leaves out and then copies the value
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const unsigned b0 = __float_as_uint(values[n][Q]), b1 = __float_as_uint(values[n][Q + 1]);
            mma_tf32(high[n], upper, b0, b1);
            mma_tf32(low[n], rest, b0, b1);
        }
    }

    // Transposes 8 x 8 elements, of which a lane has columns 2 t and 2 t + 1 of row g.
    __device__ static __forceinline__ void transpose(float (&own)[2], float first, float second, int lane) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const int source = (lane % 4 * 2 + q) * 4 + lane / 8;
            const float even = __shfl_sync(FULL_WARP, first, source), odd = __shfl_sync(FULL_WARP, second, source);
            own[q] = lane / 4 % 2 ? odd : even;
        }
    }
};

// Products of float16 rows on tensor cores: exact products, sums in float32.
struct Half_product {
    __device__ __forceinline__ Half_product(const Work&, int) {}

    __device__ __forceinline__ void run(Slot& slot, const Coupling& coupling, int lane) const {
        const int g = lane / 4, t = lane % 4;  // the numbering of mma.sync
        float sums[2][4] = {};
#pragma unroll 4
        for (int first = 0; first < FIXED_VECTORS; first += 4) {  // 32 columns, in an order that suits the reads
            int4 upper = {0, 0, 0, 0}, lower = {0, 0, 0, 0};     // rows g and g + 8
            if (FIXED_VECTORS % 4 == 0 || first + t < FIXED_VECTORS) {
                upper = *reinterpret_cast<const int4*>(&slot.rows[g][(first + t) * FIXED_VECTOR]);
                lower = *reinterpret_cast<const int4*>(&slot.rows[8 + g][(first + t) * FIXED_VECTOR]);
            }
            multiply(sums, {unsigned(upper.x), unsigned(lower.x), unsigned(upper.y), unsigned(lower.y)});
            multiply(sums, {unsigned(upper.z), unsigned(lower.z), unsigned(upper.w), unsigned(lower.w)});
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const int j = g + 8 * (q / 2), l = 8 * n + 2 * t + q % 2;
                slot.inverse[j][l] = coupling.of(j, l, sums[n][q]);
            }
    }

    // Both operands hold the same values of a row, so the second operand needs no loads.
    __device__ static __forceinline__ void multiply(float (&sums)[2][4], const unsigned (&rows)[4]) {
        mma_float16(sums[0], rows, rows[0], rows[2]);
        mma_float16(sums[1], rows, rows[1], rows[3]);
    }
};

// For float64, short chunks and GPUs without tf32: computes all of M, of which only the part below the diagonal is read.
struct Plain_product {
    static constexpr int SIDE = 4;                          // a lane computes SIDE x SIDE products
    static constexpr int TILES = CHUNK / SIDE;              // tiles along a side of M
    static constexpr int SPLIT = WARP / (TILES * TILES);    // lanes that share a tile, by columns

    __device__ __forceinline__ Plain_product(const Work&, int) {}

    __device__ __forceinline__ void run(Slot& slot, const Coupling& coupling, int lane) const {
        const int tile = lane % (TILES * TILES), part = lane / (TILES * TILES), i = tile / TILES, j = tile % TILES;
        real sums[SIDE][SIDE] = {};
#pragma unroll 2
        for (int piece = part; piece < VECTORS; piece += SPLIT) {
            real a[SIDE][VECTOR], b[SIDE][VECTOR];
#pragma unroll
            for (int k = 0; k < SIDE; k++) {  // rows i, i + TILES, ...: lanes read neighbouring rows, in different banks
                unpack(a[k], *reinterpret_cast<const int4*>(&slot.rows[i + k * TILES][piece * VECTOR]));
                unpack(b[k], *reinterpret_cast<const int4*>(&slot.rows[j + k * TILES][piece * VECTOR]));
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
#pragma unroll
                for (int distance = TILES * TILES; distance < WARP; distance *= 2)
                    sums[k][l] += __shfl_xor_sync(FULL_WARP, sums[k][l], distance);
                sums[k][l] = coupling.of(i + k * TILES, j + l * TILES, sums[k][l]);
            }
        if (part > 0) return;
#pragma unroll
        for (int k = 0; k < SIDE; k++)
#pragma unroll
            for (int l = 0; l < SIDE; l++) slot.inverse[i + k * TILES][j + l * TILES] = sums[k][l];
    }
};

template <bool IN_FLOAT16, bool IN_TF32> struct Products { using type = Plain_product; };
template <> struct Products<false, true> { using type = Tensor_product; };
template <bool IN_TF32> struct Products<true, IN_TF32> { using type = Half_product; };
using Product = Products<FIXED16, TENSOR>::type;

// Computes (1 + M)^-1 in place of M. Reads only the part of M below the diagonal; each lane computes one column.
__device__ __forceinline__ void invert(real (&matrix)[CHUNK][CHUNK + VECTOR], int lane) {
    real column[CHUNK];
    static_for<0, CHUNK>([&](auto j) {
        real value = lane == j.value ? real(1) : real(0);
        static_for<0, ceil_div(j.value, VECTOR)>([&](auto piece) {
            real row[VECTOR];
            unpack(row, *reinterpret_cast<const int4*>(&matrix[j.value][piece.value * VECTOR]));
#pragma unroll
            for (int q = 0; q < VECTOR; q++)
                if (piece.value * VECTOR + q < j.value) value -= row[q] * column[piece.value * VECTOR + q];
        });
        column[j.value] = value;
    });
    __syncwarp();  // all lanes have read M
    if (lane < CHUNK) {
#pragma unroll
        for (int j = 0; j < CHUNK; j++) matrix[j][lane] = column[j];
    }
}

// A helper's loop over its chunks of a row, every HELPERS-th of the block: it copies the next chunk, then prepares the current one.
struct Helper {
    Work& work;
    FixedFactors fixed;
    const int* indices;    // indices of the row's entries
    const real* ratings;
    int count, helper, lane, first;
    int earlier;           // the block's chunks before this row
    real mean;

    // Number of entries from the begin of a chunk on; zero or negative past the end.
    __device__ __forceinline__ int left(int chunk) const { return count - chunk * CHUNK; }

    __device__ __forceinline__ int index_at(int chunk) const {
        return lane < CHUNK && lane < left(chunk) ? indices[chunk * CHUNK + lane] - first : 0;
    }

    // Target of entry `lane` of a chunk; zero past the end.
    __device__ __forceinline__ real target_at(int chunk, int index) const {
        if (lane >= CHUNK || lane >= left(chunk)) return 0;
        return ratings[chunk * CHUNK + lane] - mean - (HAS_BIASES ? fixed.bias[index] : real(0));
    }

    __device__ __forceinline__ void copy(const Place& place, int chunk, int index) const {
        Slot& slot = work.at(place);
        const int valid = left(chunk);
        if (place.round > 1) slot.walked.wait(place.round - 1);
        __syncwarp();
        fixed_value* target = &slot.rows[0][0];
        constexpr int TOGETHER = 8;  // lanes that copy 128 bytes of a row: each computes few addresses
        if constexpr (FIXED_VECTORS % TOGETHER == 0) {
            const int piece = lane % TOGETHER * FIXED_VECTOR;
#pragma unroll
            for (int first = 0; first < CHUNK; first += WARP / TOGETHER) {
                const int j = first + lane / TOGETHER;
                const fixed_value* row = fixed.rows + piece + int64(__shfl_sync(FULL_WARP, index, j)) * LD;
#pragma unroll 8
                for (int k = 0; k < LD; k += TOGETHER * FIXED_VECTOR)
                    copy_async_16(target + j * STRIDE + piece + k, row + k, j < valid);
            }
        } else {
#pragma unroll 8
            for (int base = 0; base < CHUNK * FIXED_VECTORS; base += WARP) {
                const int at = base + lane, j = at / FIXED_VECTORS, piece = at % FIXED_VECTORS * FIXED_VECTOR;
                const int64 row = __shfl_sync(FULL_WARP, index, j % WARP);
                if (CHUNK * FIXED_VECTORS % WARP == 0 || j < CHUNK)
                    copy_async_16(target + j * STRIDE + piece, fixed.rows + row * LD + piece, j < valid);
            }
        }
    }

    __device__ __forceinline__ void run(int chunks) const {
        const Product product(work, lane);
        const int begin = (helper + HELPERS - earlier % HELPERS) % HELPERS;
        int index = index_at(begin), next = index_at(begin + HELPERS);
        Place place(earlier + begin), later = place;
        later.advance(HELPERS);
        if (begin < chunks) copy(place, begin, index);
        copy_commit();
        for (int chunk = begin; chunk < chunks; chunk += HELPERS) {
            const int ahead = chunk + HELPERS;
            const real target = target_at(chunk, index);
            if (ahead < chunks) copy(later, ahead, next);
            copy_commit();
            index = next;
            next = index_at(ahead + HELPERS);
            copy_wait<1>();
            __syncwarp();  // the other lanes' copies have arrived, too
            Slot& slot = work.at(place);
            product.run(slot, {work, left(chunk)}, lane);
            __syncwarp();
            invert(slot.inverse, lane);
            if (lane < CHUNK) slot.targets[lane] = target;
            slot.prepared.open(place.round, lane);
            place = later;
            later.advance(HELPERS);
        }
        copy_wait<0>();
    }
};

// ------------------------------------------------------------------ the walking warp

struct Walker {
    static constexpr int OWNED = Warp_row::OWNED;
    // Rows stay in registers between products and update if they take at most 64 registers.
    static constexpr bool KEEPS = CHUNK * OWNED * int(sizeof(real)) <= 64 * 4;

    Work& work;
    int lane, count, earlier;  // entries of the row; the block's chunks before it
    real power, bias_power, bias;
    real v[OWNED], kept[KEEPS ? CHUNK : 1][OWNED];
    double loss, last_error;  // of this lane's entries: squared errors before the last chunk; error in the last chunk

    // Replaces what this lane has of a row; lanes past its end keep their zeros.
    __device__ __forceinline__ void load(real (&u)[OWNED], const fixed_value* place) const {
#pragma unroll
        for (int p = 0; p < Warp_row::PIECES; p++) {
            if (!Warp_row::has(p, lane)) continue;
            const fixed_value* piece = place + (p * WARP + lane) * VECTOR;
#if FIXED16
            const int2 pairs = *reinterpret_cast<const int2*>(piece);
            const float2 low = from_halves(pairs.x), high = from_halves(pairs.y);
            u[4 * p] = low.x, u[4 * p + 1] = low.y, u[4 * p + 2] = high.x, u[4 * p + 3] = high.y;
#else
            unpack(u + p * VECTOR, *reinterpret_cast<const int4*>(piece));
#endif
        }
    }

    __device__ __forceinline__ void run() {
        if (!count) return;  // no helper prepares a chunk
        Place next(earlier);
        Slot& slot = work.at(next);
        power = work.powers[lane % CHUNK];
        bias_power = work.bias_powers[lane % CHUNK];
        slot.prepared.wait(next.round);
        __syncwarp();
        if (KEEPS) {
#pragma unroll
            for (int l = 0; l < CHUNK; l++) load(kept[KEEPS ? l : 0], slot.rows[l]);
        }
        multiply(slot);
        for (int left = count; left > 0; left -= CHUNK) {
            const Place place = next;
            if (left > CHUNK) next.advance(1);  // products of the last chunk are computed twice and not used
            walk(left, work.at(place), work.at(next), next.round);
            work.at(place).walked.open(place.round, lane);
        }
        loss += last_error * last_error;
    }

    // Advances from the products of a chunk, of which `left` entries remain, to those of the next chunk, which is prepared once
    // its gate is open for `round`.
    __device__ __forceinline__ void walk(int left, const Slot& slot, Slot& next, int round) {
        const int valid = min(CHUNK, left), entry = lane % CHUNK;
        __syncwarp();
        // the longest wait first: the compiler keeps the order of reads
        const real product = sum_of_partials(entry);
        const real target = slot.targets[entry], shrink = work.powers[valid];
        const real weight = work.weights[max(valid - 1 - entry, 0)];
        real inverse[CHUNK], values[CHUNK];
        read_all(inverse, slot.inverse[entry]);
        const bool seen = next.prepared.is_open(round);  // read early: the result is available when it is used
        const real offset = HAS_BIASES ? bias_power * bias : real(0);
        const real sum = entry < valid ? target - offset - power * product : real(0);
        if (lane < CHUNK) work.sums[entry] = sum;
        __syncwarp();
        read_all(values, work.sums);
        const real error = dot_product(inverse, values);
        if (lane < CHUNK) {
            work.steps[entry] = weight * error;
            if (HAS_BIASES) work.bias_steps[entry] = work.bias_weights[max(valid - 1 - entry, 0)] * error;
        }
        if (!seen) next.prepared.wait(round);
        __syncwarp();
        read_all(values, work.steps);
        loss += last_error * last_error;  // one chunk late, so that no step waits for the conversion to double
        last_error = error;
        if (HAS_BIASES) move_bias(work.bias_powers[valid]);
        update(slot, next, values, shrink);
        multiply(next);
    }

    __device__ __forceinline__ void multiply(const Slot& slot) {
        real shares[CHUNK] = {};
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            real(&u)[OWNED] = kept[KEEPS ? j : 0];
            if (!KEEPS) load(u, slot.rows[j]);
#pragma unroll
            for (int k = 0; k < OWNED; k++) shares[j] += v[k] * u[k];
        }
        // after all loads: the compiler moves no load ahead of a write that may alias it
#pragma unroll
        for (int j = 0; j < CHUNK; j++) work.partials[j][lane] = shares[j];
    }

    // v.u of an entry.
    __device__ __forceinline__ real sum_of_partials(int entry) const {
        real values[CHUNK];
        read_all(values, &work.partials[entry][lane / CHUNK * CHUNK]);
        real sums[4] = {values[0], values[1], values[2], values[3]};
#pragma unroll
        for (int k = 4; k < CHUNK; k++) sums[k % 4] += values[k];
        real sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
        for (int distance = CHUNK; distance < WARP; distance *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        return sum;
    }

    __device__ __forceinline__ void move_bias(real shrink) {
        real steps[CHUNK];
        read_all(steps, work.bias_steps);
        bias *= shrink;
#pragma unroll
        for (int l = 0; l < CHUNK; l++) bias += steps[l];
    }

    // Updates the row. Rows of the next chunk replace the rows that are no longer needed.
    __device__ __forceinline__ void update(const Slot& slot, const Slot& next, const real (&steps)[CHUNK], real shrink) {
#pragma unroll
        for (int k = 0; k < OWNED; k++) v[k] *= shrink;
#pragma unroll
        for (int l = 0; l < CHUNK; l++) {
            real(&u)[OWNED] = kept[KEEPS ? l : 0];
            if (!KEEPS) load(u, slot.rows[l]);
#pragma unroll
            for (int k = 0; k < OWNED; k++) v[k] += steps[l] * u[k];
            if (KEEPS) load(u, next.rows[l]);
        }
    }
};

// Whether a thread has at most 128 registers, so that blocks of short rows fit beside this kernel's. With biases
// or in float64, it needs more.
constexpr bool FEW_REGISTERS = BLOCK_WARPS <= 16 && !HAS_BIASES && sizeof(real) == 4;

// Block b walks rows tasks[first_task[b]] ... tasks[first_task[b + 1] - 1], range by range of the fixed rows; entries of row v in
// range k have the bounds (k, v) of the walk. losses (n_ranges, n_tasks).
extern "C" __global__ void __launch_bounds__((FEW_REGISTERS ? 16 : BLOCK_WARPS) * WARP)
blocked(Factors moved, double* losses, FixedFactors fixed, Walk walk, const int* tasks, const int* first_task, int n_ranges,
        int n_rows, Terms terms) {
    Work& work = *in_register(shared_memory<Work>());
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) {
        real power = 1, bias_power = 1;
        for (int k = 0; k <= CHUNK; k++, power *= terms.keep, bias_power *= terms.bias_keep) {
            work.powers[k] = power;
            work.bias_powers[k] = bias_power;
            if (k == CHUNK) break;
            work.weights[k] = terms.rate * power;
            work.bias_weights[k] = terms.bias_rate * bias_power;
        }
        for (Slot& slot : work.slots) slot.prepared.make(), slot.walked.make();
    }
    __syncthreads();  // the only barrier: from here on, gates hand over each chunk
    const int helper = warp - (warp + 1) / SCHEDULERS;
    if (warp != WALKING && (warp % SCHEDULERS == WALKING || helper >= HELPERS)) return;
    int earlier = 0;
    // the walking warp needs all registers for a walk, so what a row has is read again after it
    for (int range = 0; range < n_ranges; range++)
        for (int task = first_task[blockIdx.x]; task < first_task[blockIdx.x + 1]; task++) {
            const auto row = [&] { return int64(tasks[task]); };
            const int64 at = int64(range) * n_rows + row(), begin = walk.begins[at];
            const int count = int(walk.ends[at] - begin), chunks = ceil_div(count, CHUNK);
            if (warp != WALKING) {
                const Helper prepares{work, fixed, walk.indices + begin, walk.ratings + begin, count,
                                      helper, lane, walk.first, earlier, terms.mean};
                prepares.run(chunks);
            } else {
                Walker walker{work, lane, count, earlier, real(0), real(0), HAS_BIASES ? moved.bias[row()] : real(0)};
                Warp_row::values_of(walker.v, Warp_row::load<THIS_WARP>(moved.rows + row() * LD, lane));
                walker.run();
                Warp_row::store(moved.rows + row() * LD, Warp_row::raw_of(walker.v), lane);
                const double loss = warp_sum(lane < CHUNK ? walker.loss : 0.0);
                if (HAS_BIASES) __syncwarp();  // all lanes have read the bias
                if (lane == 0) {
                    if (HAS_BIASES) moved.bias[row()] = walker.bias;
                    losses[int64(range) * first_task[gridDim.x] + task] = loss;
                }
                __syncwarp();  // the row's next range reads its bias in all lanes
            }
            earlier += chunks;
        }
}

// ---------------------------------------------------------------------------------------------- decentralized

#if !FIXED16
constexpr int WARPS = THREADS / WARP;
constexpr int LIST = 1024;  // entries that a block lists at a time

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
decentralized(Factors moved, double* losses, FixedFactors fixed, Walk walk, const int* bounds, int n_fixed, Terms terms) {
    __shared__ int64 places[LIST];
    __shared__ int owners[LIST], columns[LIST], totals[WARPS];
    __shared__ double sums[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int low = walk.first + bounds[blockIdx.x], high = walk.first + bounds[blockIdx.x + 1];
    double loss = 0;
    for (int base = 0; base < n_fixed; base += THREADS) {
        // each thread searches one row for this block's entries; the list holds them row by row
        const int mine = base + int(threadIdx.x);
        int64 from = 0, to = 0;
        if (mine < n_fixed) {
            from = lower_bound(walk.indices, walk.begins[mine], walk.ends[mine], low);
            to = lower_bound(walk.indices, from, walk.ends[mine], high);
        }
        int found;
        const int before = scan_block(int(to - from), totals, found);
        for (int start = 0; start < found; start += LIST) {
            for (int k = max(before, start); k < min(before + int(to - from), start + LIST); k++) {
                places[k - start] = from + (k - before);
                owners[k - start] = mine;
                columns[k - start] = walk.indices[from + (k - before)] - walk.first;
            }
            __syncthreads();
            const int listed = min(LIST, found - start);
            for (int k = 0; k < listed; k += WARP) {
                // a warp owns every WARPS-th moved row; it alone updates them, in the order of the list
                const int column = k + lane < listed ? columns[k + lane] : -1;
                unsigned bits = __ballot_sync(FULL_WARP, column >= 0 && column % WARPS == warp);
                while (bits) {
                    const int at = k + __ffs(bits) - 1;
                    bits &= bits - 1;
                    const int64 row = columns[at], owner = owners[at];
                    real v[Warp_row::OWNED], u[Warp_row::OWNED];
                    Warp_row::values_of(v, Warp_row::load<THIS_WARP>(moved.rows + row * LD, lane));
                    Warp_row::values_of(u, Warp_row::load(fixed.rows + owner * LD, lane));
                    real error = walk.ratings[places[at]] - terms.mean - Warp_row::dot(v, u);
                    if (HAS_BIASES) error -= moved.bias[row] + fixed.bias[owner];
                    const real step = terms.rate * error;
#pragma unroll
                    for (int q = 0; q < Warp_row::OWNED; q++) v[q] = terms.keep * v[q] + step * u[q];
                    Warp_row::store(moved.rows + row * LD, Warp_row::raw_of(v), lane);
                    if (HAS_BIASES) {
                        __syncwarp();  // all lanes have read the bias
                        if (lane == 0) moved.bias[row] = terms.bias_keep * moved.bias[row] + terms.bias_rate * error;
                        __syncwarp();
                    }
                    loss += double(error) * double(error);
                }
            }
            __syncthreads();  // the list and the totals can be overwritten
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
#endif
