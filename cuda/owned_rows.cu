// owned_rows.cu - one epoch of stochastic gradient descent, lock-free, as batch_hogwild.cu without biases: for each entry
//           e = r - mean - x.y,  x <- keep x + rate e y,  y <- keep y + rate e x,  from the old values; keep = 1 - rate lambda
// source: ours; blocks own columns as in DSGD (Gemulla et al. 2011), but all of the other side at a time
// grid  : a block a multiprocessor; a walker is a group of lanes that can hold a row
// shapes: held (n_held, LD)  owned (n_owned, LD)  held_index, ratings, owned_index (nnz,), by block; begins (grid + 1,)
//         rows (n_owned,): owned rows by block; first_row (grid + 1,)  losses (grid,): sums of e^2, with factors of its time
// shared: PITCH * 16 bytes for each row of a block, in float32
// traffic: 2 LD sizeof(stored) a run of entries of one held row, 10 an entry    flops: 8 LD nnz
// limits: which update wins where two meet is up to chance. A block owns at most 65,536 rows
//
// Rows of the smaller side, items as a rule, are divided among the multiprocessors, with about equal numbers of entries, and
// stay in shared memory for the epoch: a popular item is written by one multiprocessor instead of all, so it is neither a
// bottleneck of L2 nor subject to as many lost updates. Rows of the larger side come from memory and go back, once for each
// run of entries that a block has of it. A block walks the held rows in a shuffled order from a start of its own; each
// walker has an equal share of its entries.
#include "sgd.cuh"

#ifndef THREADS
#define THREADS 512
#endif
#ifndef AHEAD
#define AHEAD 4                                 // held rows on their way
#endif

using Held = Row<GROUP>;
constexpr int CHUNK = GROUP < 16 ? 16 : GROUP;  // entries that lanes read together
constexpr int QUARTERS = Held::OWNED / 4;       // float4 of a lane
constexpr int PITCH = QUARTERS * GROUP;         // float4 of a row in shared memory
constexpr int WALKERS = THREADS / GROUP;
static_assert(CHUNK % AHEAD == 0, "places in the ring are constants");
static_assert(sizeof(real) == 4, "shared memory holds float32");

// Entries a chunk ahead of their turn.
struct Entries {
    Spread<int, CHUNK, GROUP> held;
    Spread<unsigned short, CHUNK, GROUP> owned;
    Spread<real, CHUNK, GROUP> rating;
};

__device__ __forceinline__ void read_shared(real (&y)[Held::OWNED], const float4* place) {
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) {
        const float4 part = place[q * GROUP];
        y[4 * q] = part.x, y[4 * q + 1] = part.y, y[4 * q + 2] = part.z, y[4 * q + 3] = part.w;
    }
}

__device__ __forceinline__ void write_shared(float4* place, const real (&y)[Held::OWNED]) {
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) place[q * GROUP] = make_float4(y[4 * q], y[4 * q + 1], y[4 * q + 2], y[4 * q + 3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
owned_rows(stored* held_rows, stored* owned_table, double* losses, const int* held_index, const unsigned short* owned_index,
           const real* ratings, const int64* begins, const int* rows, const int* first_row, real rate, real keep, real mean) {
    float4* const shared = shared_memory<float4>();
    const int lane = threadIdx.x % GROUP, walker = threadIdx.x / GROUP;
    const int first = first_row[blockIdx.x], n_rows = first_row[blockIdx.x + 1] - first;
    real x[Held::OWNED] = {}, y[Held::OWNED];
    for (int row = walker; row < n_rows; row += WALKERS) {
        Held::values_of(y, Held::load<EVERYBODY>(owned_table + int64(rows[first + row]) * LD, lane));
        write_shared(shared + row * PITCH + lane, y);
    }
    __syncthreads();

    const int64 total = begins[blockIdx.x + 1] - begins[blockIdx.x], mine = begins[blockIdx.x] + total * walker / WALKERS;
    const int count = int(begins[blockIdx.x] + total * (walker + 1) / WALKERS - mine);
    const int chunks = most_of_groups<GROUP>(ceil_div(count, CHUNK));
    const auto read = [&](Entries& into, int from) {
        into.held.load(held_index + mine + from, count - from, lane, -1);  // past the end: no row
        into.owned.load(owned_index + mine + from, count - from, lane, (unsigned short)(0));
        into.rating.load(ratings + mine + from, count - from, lane, real(0));
    };
    Entries now, next;
    read(now, 0);
    Held::Raw ring[AHEAD];
    int ids[AHEAD + 1], current = -1;  // held rows of this entry and of those after it
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        ids[j] = now.held.get(j);
        ring[j] = {};
        if (ids[j] >= 0 && (j == 0 || ids[j] != ids[j > 0 ? j - 1 : 0]))
            ring[j] = Held::load<EVERYBODY>(held_rows + int64(ids[j]) * LD, lane);
    }
    double loss = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        read(next, (chunk + 1) * CHUNK);
        real squares = 0;
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            if (ids[0] != current) Held::values_of(x, ring[j % AHEAD]);
            current = ids[0];
            const bool counts = current >= 0;
            ids[AHEAD] = (j + AHEAD < CHUNK ? now : next).held.get((j + AHEAD) % CHUNK);
            if (ids[AHEAD] >= 0 && ids[AHEAD] != ids[AHEAD - 1])
                ring[j % AHEAD] = Held::load<EVERYBODY>(held_rows + int64(ids[AHEAD]) * LD, lane);
            float4* const place = shared + int(now.owned.get(j)) * PITCH + lane;
            const real rating = now.rating.get(j);
            read_shared(y, place);
            const real product = Held::dot(x, y);
            const real error = counts ? rating - mean - product : real(0), step = rate * error;
#pragma unroll
            for (int k = 0; k < Held::OWNED; k++) {
                const real before = x[k];
                x[k] = keep * before + step * y[k];
                y[k] = keep * y[k] + step * before;
            }
            if (counts) {
                write_shared(place, y);
                if (ids[1] != current) Held::store(held_rows + int64(current) * LD, Held::raw_of(x), lane);
            }
            squares += error * error;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) ids[k] = ids[k + 1];
        }
        loss += squares;
        now = next;
    }
    __syncthreads();
    for (int row = walker; row < n_rows; row += WALKERS) {
        read_shared(y, shared + row * PITCH + lane);
        Held::store(owned_table + int64(rows[first + row]) * LD, Held::raw_of(y), lane);
    }
    // one sum a block, in a fixed order
    __shared__ double sums[WALKERS];
    if (lane == 0) sums[walker] = loss;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WALKERS; w++) loss += sums[w];
        losses[blockIdx.x] = loss;
    }
}
