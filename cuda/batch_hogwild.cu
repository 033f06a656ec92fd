// batch_hogwild.cu - one epoch of stochastic gradient descent, lock-free: for each entry (u, i, r) of a shuffled order
//           e = r - mean - b_u - b_i - x.y,  x <- keep x + rate e y,  y <- keep y + rate e x,
//           b <- bias_keep b + bias_rate e, all from the old values; keep = 1 - rate lambda, bias_keep likewise
// source: cuMF_SGD (Xie et al. 2017), batch-Hogwild, as BALS 6.2 uses it; the runs below are ours
// grid  : THREADS per block; a worker is a group of lanes that can hold a row; the launcher chooses their number
// shapes: held (n_held, LD)  walked (n_walked, LD)  biases (n_held,), (n_walked,)  crowded (n_walked,): 0 or 1
//         indices, ratings (n,): the entries by held rows, then those of crowded rows again, by walked rows
//         runs (n_runs, 2): first entry; owner * 2^32 + number of entries, 1 ... RUN. The owner is a held row, or ~row of a
//         crowded walked row
//         losses (grid,): sums of e^2, each e computed with the factors before its update
// traffic: up to 2 LD nnz (1 + 1 / RUN) * sizeof(stored), most of it between the L2 cache and the multiprocessors
// flops : 8 LD nnz
// synchronization: none between workers, by design (batch-Hogwild!): loads and stores of rows and biases of both sides race with
//         those of other workers, so an update may be lost, and a row may mix the 4-byte words of two updates. Loads read L2,
//         where other multiprocessors write. All other arrays are read only, or written by one thread each. Within a worker: a
//         lane reads and writes the same pieces of each row, in program order. All lanes read the owner's bias, lane 0 writes it,
//         with __syncwarp before and after; a met bias is read and written by one lane in a run, and __syncwarp separates runs.
//         The next run's row is read before the current run ends: if the current run changes it, it is replaced. A barrier
//         separates writes and reads of the block's sums.
// limits: concurrent updates of a row race, so results are not reproducible between runs
//
// Why runs. In shuffled order, each entry reads and writes one row of either side. The smaller side usually stays in L2, the
// larger side does not: 2 LD * sizeof(stored) bytes of memory traffic per entry. Therefore runs are shuffled instead: up to RUN
// entries of one row of the larger side ("held", usually users). That row stays in registers during the run, so memory
// traffic is divided by RUN. A run is a piece of a CSR row, so the entries themselves are not moved. The order remains random
// where it has to be: in the sequence of rows, and in the workers that update a popular item concurrently. SGD updates one
// row in sequence anyway. A worker takes `batch` consecutive runs at a time (cuMF_SGD takes 256 entries), so run descriptions
// are read sequentially.
//
// Crowded rows. Writes to a line of L2 that all multiprocessors read take turns: some 80 ns for each update of a row, which
// for the most popular film of Netflix's shape was the time of an epoch (in trials on an H100 without what follows, 22.4 ms;
// 11.4 with the same number of entries for each item, 6.0 without the writes). Therefore entries of popular rows of the walked
// side are in runs of these rows, which walk the other side: a crowded row is read and written once per run, and updates by
// other workers are lost less often. Runs of held rows pass over these entries.
//
// A worker reads DEPTH rows of the walked side at a time, then updates and writes them one by one. A larger DEPTH hides more
// latency, but loses more updates by other workers: DEPTH updates lie between reading and writing a row.
#include "sgd.cuh"

#ifndef RUN
#define RUN 16
#endif
#ifndef HAS_BIASES
#define HAS_BIASES 0
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 3  // minimum resident blocks per multiprocessor; limits the registers of a thread
#endif

constexpr int THREADS = 128;
using Piece_row = Row<GROUP>;
constexpr int DEPTH = RUN < 8 / Piece_row::PIECES ? RUN : 8 / Piece_row::PIECES;
static_assert(RUN % DEPTH == 0, "a run is read in whole parts");

struct Run {  // memory layout
    int64 begin;
    int64 owner_and_count;

    __device__ __forceinline__ int owner() const { return int(owner_and_count >> 32); }
    __device__ __forceinline__ int count() const { return int(owner_and_count & 0xffffffff); }
};

// Both sides. "met" are the rows that a run of an owner walks.
struct Sides {
    stored *held_rows, *walked_rows;
    real *held_bias, *walked_bias;

    __device__ __forceinline__ stored* row_of(int owner) const {
        return owner < 0 ? walked_rows + int64(~owner) * LD : held_rows + int64(owner) * LD;
    }
    __device__ __forceinline__ real* bias_of(int owner) const {
        return owner < 0 ? walked_bias + ~owner : held_bias + owner;
    }
    __device__ __forceinline__ stored* rows_met_by(int owner) const { return owner < 0 ? held_rows : walked_rows; }
    __device__ __forceinline__ real* biases_met_by(int owner) const { return owner < 0 ? held_bias : walked_bias; }
};

// Data of a run, loaded before the run starts.
struct Prepared {
    Run run;
    Spread<int, RUN, GROUP> index;
    Spread<real, RUN, GROUP> rating;
    Piece_row::Raw x;
};

struct Runs {
    const Run* runs;  // (count,)
    int64 count;
    int n_workers, batch;
};

// Iterates over the runs of a worker: `batch` consecutive runs, then a skip over the runs of the other workers.
struct Cursor {
    const Run* runs;
    int64 n_runs, place, skipped;
    int batch, left;

    __device__ __forceinline__ Cursor(Runs all, int worker)
        : runs(all.runs), n_runs(all.count), place(worker < all.n_workers ? int64(worker) * all.batch : all.count),
          skipped(int64(all.n_workers - 1) * all.batch), batch(all.batch), left(all.batch) {}

    // Returns the next run; past the end, a run without entries.
    __device__ __forceinline__ Run take() {
        const Run run = place < n_runs ? runs[place] : Run{0, 0};
        place++;
        if (--left == 0) {
            left = batch;
            place += skipped;
        }
        return run;
    }
};

struct Sources {
    Sides sides;
    const int* indices;
    const real* ratings;
    int lane;

    __device__ __forceinline__ Prepared prepare(Run run) const {
        Prepared next;
        next.run = run;
        next.index.load(indices + run.begin, run.count(), lane, 0);
        next.rating.load(ratings + run.begin, run.count(), lane, real(0));
        next.x = Piece_row::load<ALL_MULTIPROCESSORS>(sides.row_of(run.owner()), lane);
        return next;
    }
};

// Whether a run of a crowded row walks held row `row`; the same in all lanes of a group.
__device__ __forceinline__ bool walks(const Prepared& run, int row) {
    bool found = false;
#pragma unroll
    for (int s = 0; s < run.index.SLOTS; s++) found |= run.index.slot[s] == row;
    const unsigned groups = __ballot_sync(FULL_WARP, found && run.run.owner() < 0);
    return groups >> threadIdx.x % WARP / GROUP * GROUP & (~0u >> (WARP - GROUP));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
batch_hogwild(stored* held_rows, stored* walked_rows, real* held_bias, real* walked_bias, double* losses,
              const int* indices, const real* ratings, const unsigned char* crowded, const Run* shuffled, int64 n_runs,
              int n_workers, int batch, real rate, real keep, real mean, real bias_rate, real bias_keep) {
    // kernel arguments are not structs by value: these make the fastest configuration spill registers
    const Sides sides{held_rows, walked_rows, held_bias, walked_bias};
    const Runs runs{shuffled, n_runs, n_workers, batch};
    const int lane = threadIdx.x % GROUP;
    const int worker = (blockIdx.x * THREADS + threadIdx.x) / GROUP;
    const Sources sources{sides, indices, ratings, lane};
    Cursor cursor{runs, worker};
    const int64 turns = ceil_div(ceil_div(runs.count, int64(runs.batch)), int64(runs.n_workers)) * runs.batch;
    Prepared next = sources.prepare(cursor.take());
    Run later = cursor.take();
    double loss = 0;
    for (int64 turn = 0; turn < turns; turn++) {
        const Prepared now = next;
        const int owner = now.run.owner();
        const int count = now.run.count();
        stored* const met = sides.rows_met_by(owner);
        next = sources.prepare(later);
        later = cursor.take();
        real x[Piece_row::OWNED], y[Piece_row::OWNED];
        Piece_row::values_of(x, now.x);
        real bias = HAS_BIASES ? load_shared_with_others(sides.bias_of(owner)) : real(0), squares = 0;
        Spread<real, RUN, GROUP> met_biases, target;
#pragma unroll
        for (int s = 0; s < target.SLOTS; s++) {
            met_biases.slot[s] =
                HAS_BIASES ? load_shared_with_others(sides.biases_met_by(owner) + now.index.slot[s]) : real(0);
            target.slot[s] = now.rating.slot[s] - mean - met_biases.slot[s];
        }
        // bit j of slot s: entry s GROUP + j exists, and no crowded row has it
        unsigned present[target.SLOTS];
#pragma unroll
        for (int s = 0; s < target.SLOTS; s++) {
            const bool belongs = owner < 0 || !crowded[now.index.slot[s]];
            present[s] = __ballot_sync(FULL_WARP, s * GROUP + lane < count && belongs) >> threadIdx.x % WARP / GROUP * GROUP;
        }
#pragma unroll
        for (int part = 0; part < RUN; part += DEPTH) {
            Piece_row::Raw rows[DEPTH];
            int places[DEPTH];
#pragma unroll
            for (int j = 0; j < DEPTH; j++) {
                places[j] = now.index.get(part + j);
                rows[j] = Piece_row::load<ALL_MULTIPROCESSORS>(met + int64(places[j]) * LD, lane);
            }
#pragma unroll
            for (int j = 0; j < DEPTH; j++) {
                const bool counts = present[(part + j) / GROUP] >> (part + j) % GROUP & 1;
                Piece_row::values_of(y, rows[j]);
                const real product = Piece_row::dot(x, y), wanted = target.get(part + j);
                const real error = counts ? wanted - bias - product : real(0);
                const real step = rate * error, rest = counts ? keep : real(1);
#pragma unroll
                for (int k = 0; k < Piece_row::OWNED; k++) {
                    const real before = x[k];
                    x[k] = rest * before + step * y[k];
                    y[k] = rest * y[k] + step * before;
                }
                if (counts) Piece_row::store<ALL_MULTIPROCESSORS>(met + int64(places[j]) * LD, Piece_row::raw_of(y), lane);
                if (HAS_BIASES) {
                    const real bias_step = bias_rate * error;
                    bias = (counts ? bias_keep : real(1)) * bias + bias_step;
                    if (counts && lane == (part + j) % GROUP)
                        store_shared_with_others(sides.biases_met_by(owner) + places[j],
                                                 bias_keep * met_biases.slot[(part + j) / GROUP] + bias_step);
                }
                squares += error * error;
            }
        }
        loss += squares;
        const auto moved = Piece_row::raw_of(x);
        if (HAS_BIASES) __syncwarp();  // all lanes have read the owner's bias
        if (count > 0) {
            Piece_row::store<ALL_MULTIPROCESSORS>(sides.row_of(owner), moved, lane);
            if (HAS_BIASES && lane == 0) store_shared_with_others(sides.bias_of(owner), bias);
        }
        // the next run was prepared before this one ended
        const bool again = count > 0 && next.run.owner() == owner;
#pragma unroll
        for (int p = 0; p < Piece_row::PIECES; p++)
            if (again) next.x.piece[p] = moved.piece[p];
        if (walks(now, next.run.owner())) next.x = Piece_row::load<ALL_MULTIPROCESSORS>(sides.row_of(next.run.owner()), lane);
        if (HAS_BIASES) __syncwarp();  // the next run's lanes read the biases that other lanes have written
    }
    // one sum per block, in a fixed order
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = lane == 0 ? loss : 0.0;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int k = GROUP; k < THREADS; k += GROUP) loss += sums[k];
        losses[blockIdx.x] = loss;
    }
}
