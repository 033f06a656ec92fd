// cholesky_any.cu - solves A[k] x[k] = b[k] for a batch of systems by Cholesky, any rank, float or double
//
// cholesky_warp (SYSTEMS > 0, RANK <= 32): SYSTEMS systems per block, one warp each; lane i holds row i.
// cholesky_block (SYSTEMS = 0): one block per system.
//
//             PANEL
//        +---------+                    Left-looking over panels of PANEL columns. HEIGHT rows of the current panel at a
//        | .       |                    time (all of them while they fit) are accumulators in registers:
//        | . .     |                        A - (rows of L so far) (panel's rows of L so far)^T
//        |---------+---------+          Then the panel is factored, STEP columns at a time: its columns are exchanged in
//        |  rows   | . acc   |          shared memory, every warp redundantly eliminates the STEP x STEP diagonal block
//        |  of L   | . .     |          (cheaper than waiting for another warp's result) and, with it, one row per
//        | so far  |---------|          thread; the remaining columns of the panel are updated in registers.
//        |         |   acc   |
//        +---------+---------+          A second block of the same multiprocessor computes while this one waits.
//
//   The rows of L so far come from shared memory (RESIDENT: L[panel:, :panel] is at most a quarter of the square; new tiles
//   overwrite tiles that are no longer needed) or, staged by asynchronous copies, from the matrix, which holds L.
//   b is eliminated along with the rows: each step gives STEP elements of z = L^-1 b. The back substitution L^T x = z reads
//   L from the matrix (L2); STEP x STEP diagonal blocks hold their inverse transposed, a by-product of the elimination.
//
// shapes: solutions (n_out, ld)  status (n_out,)  matrices (n_slots, RANK, RANK)  rhs (n_slots, RANK)
//         slots (n_systems + 1,): system k is in slot slots[k], or has no slot, is zero and has x = 0
//         rows (n_systems,): the solution of system k goes to row rows[k]
// status: 0; j + 1 if pivot j <= epsilon A_jj (not positive definite to working precision); -1 if a pivot or the
//         solution is infinite. x = 0 where the status is not 0.
// matrices: lower triangles in. cholesky_block overwrites them, and the upper triangles within the diagonal blocks of STEP
// traffic: n^2 / 2 elements in; cholesky_block writes them once and reads them once more, mostly in L2
// flops  : n^3 / 3 per system
// order  : all sums have a fixed order: a rerun gives the same bits
// limits : HEIGHT >= RANK if RESIDENT; 16-byte accesses where RANK allows them, else elementwise
// synchronization: cholesky_warp: warps are independent; __syncwarp separates writes from reads by other lanes.
//         cholesky_block: step s: each thread writes its elements of strip s % 2 and of the diagonal block; barrier; elimination
//         reads them and writes L, one thread per row; warp 0 writes z and `failure`; barrier; updates read strip s, which step
//         s + 2 overwrites after the barriers of step s + 1. Meanwhile, elements of A that this part does not write are loaded for
//         the next part. Resident tiles: panel p reads old tiles before its first barrier, and writes new ones in their places
//         after it. Stages: at the barrier of iteration k, each thread has waited for its copies of stage k - 1, and all have read
//         stage k - 2, in whose buffer stage k arrives. Back substitution: between two barriers, warp 0 alone reads and writes x.
#include "common.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef SYSTEMS
#define SYSTEMS 0  // systems per block of cholesky_warp; 0: cholesky_block
#endif
#ifndef ROW_THREADS
#define ROW_THREADS 16  // threads down a column of accumulators; 4 per warp
#endif
#ifndef TILE_ROWS
#define TILE_ROWS 4  // accumulators per thread: TILE_ROWS x TILE_COLUMNS
#endif
#ifndef TILE_COLUMNS
#define TILE_COLUMNS 4
#endif
#ifndef RESIDENT
#define RESIDENT 1  // 1: the part of L that later panels need stays in shared memory
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1  // minimum resident blocks per multiprocessor
#endif

constexpr int NON_FINITE = -1;  // as on the CPU (hybridmf/native/_als.pyx)
constexpr real LARGEST = real(sizeof(real) == 4 ? 3.402823466e+38 : 1.7976931348623157e+308);
constexpr int VECTOR = 16 / int(sizeof(real));
constexpr bool ALIGNED = RANK % VECTOR == 0;  // every row of every slot is aligned to 16 bytes

struct alignas(16) Chunk {
    real element[VECTOR];
};

__device__ __forceinline__ real inverse_root(real value) {
    if constexpr (sizeof(real) == 4) return rsqrtf(value);
    else return rsqrt(value);
}

__device__ __forceinline__ bool is_finite(real value) { return value <= LARGEST && value >= -LARGEST; }

// The status of a pivot, 0 if it is valid. The comparisons are false for NaN.
__device__ __forceinline__ int pivot_status(real pivot, real floor, int index) {
    if (pivot > floor && pivot <= LARGEST) return 0;
    return is_finite(pivot) ? index + 1 : NON_FINITE;
}

#if SYSTEMS
static_assert(RANK <= WARP, "one row a lane");

constexpr int PITCH = RANK | 1;  // odd: rows and columns of the matrix in shared memory are free of bank conflicts

// Solves A x = r in place. Lane i holds row i of the lower triangle of A, in `a` and in shared memory, and element i of r.
__device__ __forceinline__ int solve_in_warp(real (&a)[RANK], real* matrix, real& r, real epsilon, int lane) {
    real own = lane < RANK ? matrix[lane * PITCH + lane] : real(1);  // the remainder of the diagonal element
    const real floor = epsilon * own;
    real inverse = 0;
    int failure = 0;
#pragma unroll
    for (int k = 0; k < RANK; k++) {
        const int status = pivot_status(own, floor, k);
        const real pivot = __shfl_sync(FULL_WARP, status ? real(1) : own, k), root = inverse_root(pivot);
        const int failed = __shfl_sync(FULL_WARP, status, k);
        failure = failure ? failure : failed;
        if (lane == k) {
            inverse = root;
            r *= root;
        }
        a[k] *= root;
        own -= a[k] * a[k];
        const real z = __shfl_sync(FULL_WARP, r, k);
        if (lane > k) r -= a[k] * z;
#pragma unroll
        for (int j = k + 1; j < RANK; j++) a[j] -= a[k] * __shfl_sync(FULL_WARP, a[k], j);
    }
#pragma unroll
    for (int k = 0; k < RANK; k++)
        if (k < lane && lane < RANK) matrix[lane * PITCH + k] = a[k];
    __syncwarp();
#pragma unroll
    for (int k = RANK - 1; k >= 0; k--) {
        const real x = __shfl_sync(FULL_WARP, r * inverse, k);
        if (lane < k) r -= matrix[k * PITCH + lane] * x;
        if (lane == k) r = x;
    }
    return failure;
}

extern "C" __global__ void __launch_bounds__(WARP * SYSTEMS, MIN_BLOCKS)
cholesky_warp(real* __restrict__ solutions, int* __restrict__ status, const real* __restrict__ matrices,
              const real* __restrict__ rhs, const int64* __restrict__ slots, const int* __restrict__ rows, int64 ld,
              int64 n_systems, real epsilon) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64 system = int64(blockIdx.x) * SYSTEMS + warp;
    if (system >= n_systems) return;  // whole warps return, and no block barrier follows
    const int64 slot = slots[system], row = rows[system];
    const bool exists = slot < slots[system + 1];
    real* const matrix = shared_memory<real>() + warp * RANK * PITCH;
#pragma unroll
    for (int i = 0; i < RANK; i++)
        if (lane <= i)
            matrix[i * PITCH + lane] = exists ? matrices[(slot * RANK + i) * RANK + lane] : real(lane == i);
    real r = exists && lane < RANK ? rhs[slot * RANK + lane] : real(0);
    __syncwarp();
    real a[RANK];
#pragma unroll
    for (int k = 0; k < RANK; k++) a[k] = k <= lane && lane < RANK ? matrix[lane * PITCH + k] : real(0);
    __syncwarp();
    int failure = solve_in_warp(a, matrix, r, epsilon, lane);
    if (!failure && !__all_sync(FULL_WARP, is_finite(r))) failure = NON_FINITE;
    if (lane < RANK) solutions[row * ld + lane] = failure ? real(0) : r;
    if (lane == 0) status[row] = failure;
}

#else  // one block per system

constexpr int STEP = 8;                     // columns eliminated at a time
constexpr int COLUMN_THREADS = STEP;        // so that a thread has one column in each step
constexpr int THREADS = ROW_THREADS * COLUMN_THREADS;
constexpr int PANEL = COLUMN_THREADS * TILE_COLUMNS;
constexpr int HEIGHT = ROW_THREADS * TILE_ROWS;
constexpr int PANELS = ceil_div(RANK, PANEL);
constexpr int GROUP = PANEL / ROW_THREADS;  // a thread's accumulator rows in one PANEL x PANEL tile
constexpr int GROUPS = ceil_div(TILE_ROWS, GROUP);
constexpr int ROWS_A_THREAD = ceil_div(HEIGHT, THREADS);  // rows per thread in an elimination
constexpr int TILE_CHUNKS = PANEL / VECTOR;               // chunks in a row of a tile,
constexpr int STEP_CHUNKS = STEP / VECTOR;                // of a strip,
constexpr int STAGE_CHUNKS = 4;                           // of a stage of rows read from the matrix
constexpr int STAGE = STAGE_CHUNKS * VECTOR;
constexpr int LAST_COLUMNS = ceil_div(RANK - (PANELS - 1) * PANEL, COLUMN_THREADS);  // steps of the last panel
static_assert(ROW_THREADS % 8 == 0 && PANEL % ROW_THREADS == 0 && PANEL % WARP == 0 && THREADS % WARP == 0, "");
static_assert(RESIDENT ? HEIGHT >= RANK && GROUPS == PANELS : TILE_ROWS % GROUP == 0,
              "a panel is one part, or parts are whole tiles: only the first one writes rows of `diagonal`");

// ---------------------------------------------------------------------------------------------- shared memory

constexpr int STRIP_ROWS = HEIGHT > PANEL ? HEIGHT : PANEL;
constexpr int RESIDENT_TILES = PANELS * PANELS / 4;  // maximum number of tiles of L[panel:, :panel]
constexpr int LEFT_SIZE = RESIDENT ? RESIDENT_TILES * PANEL * PANEL : 2 * (HEIGHT + PANEL) * STAGE;
constexpr int DIAGONAL_PITCH = PANEL + VECTOR;  // for the diagonal tile in the back substitution: rows in different banks
constexpr int TILES_SIZE = LEFT_SIZE > PANEL * DIAGONAL_PITCH ? LEFT_SIZE : PANEL * DIAGONAL_PITCH;
constexpr int STRIPS_SIZE = 2 * STRIP_ROWS * STEP;
constexpr int KEPT_STEPS = RESIDENT ? 1 : TILE_COLUMNS;  // steps whose diagonal rows are kept for later rows of the panel
constexpr int DIAGONAL_SIZE = RESIDENT ? 0 : KEPT_STEPS * PANEL * STEP;
constexpr int BLOCKS_SIZE = KEPT_STEPS * STEP * STEP;
constexpr int PADDED = PANELS * PANEL;
constexpr int SHARED_REALS = TILES_SIZE + STRIPS_SIZE + DIAGONAL_SIZE + BLOCKS_SIZE + PANEL + 2 * PADDED;
constexpr int SHARED_INTS = round_up(1 + (RESIDENT ? PANELS * PANELS : 0), 4);
#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == SHARED_REALS * int(sizeof(real)) + SHARED_INTS * 4, "cholesky_any.py counts otherwise");
#endif

struct Shared {
    real* memory = shared_memory<real>();

    // RESIDENT: tiles of L; else two stages of rows, then of the panel's own rows. In the back substitution: the diagonal tile.
    __device__ Chunk* tiles() const { return reinterpret_cast<Chunk*>(memory); }
    // columns of a step; two steps alternate
    __device__ Chunk* strip(int step) const {
        return reinterpret_cast<Chunk*>(memory + TILES_SIZE) + step % 2 * (STRIP_ROWS * STEP_CHUNKS);
    }
    // rows of L of the diagonal tile, by step
    __device__ Chunk* diagonal(int step) const {
        return reinterpret_cast<Chunk*>(memory + TILES_SIZE + STRIPS_SIZE) + step * PANEL * STEP_CHUNKS;
    }
    // STEP x STEP diagonal blocks before their elimination
    __device__ real* block(int step) const {
        return memory + TILES_SIZE + STRIPS_SIZE + DIAGONAL_SIZE + step % KEPT_STEPS * STEP * STEP;
    }
    // epsilon A_jj of the panel
    __device__ real* floors() const { return memory + TILES_SIZE + STRIPS_SIZE + DIAGONAL_SIZE + BLOCKS_SIZE; }
    // b less the contributions of the columns of L so far
    __device__ real* residual() const { return memory + SHARED_REALS - 2 * PADDED; }
    // z; in the back substitution the remainder of z, then x
    __device__ real* forward() const { return memory + SHARED_REALS - PADDED; }
    __device__ int* failure() const { return reinterpret_cast<int*>(memory + SHARED_REALS); }
    // place of tile (row, column) of L
    __device__ int* places() const { return failure() + 1; }
};

// In a row of CHUNKS chunks, chunk c of row r is at c ^ swizzle(r): the same chunk of eight consecutive rows from a multiple of
// 8 on is in eight different places of 128 bytes, so reading them has no bank conflicts.
template <int CHUNKS> __device__ __forceinline__ constexpr int swizzle(int row) {
    constexpr int ROWS = CHUNKS < 8 ? 8 / CHUNKS : 1;
    return row / ROWS % (CHUNKS < 8 ? CHUNKS : 8);
}

// The place of tile (row, column), column < row, of L. Panel p uses the tiles (p, 0..p-1) for the last time and creates the
// tiles (p+1.., p): the first p of the new tiles take the places of the old ones, the others take new places.
__device__ __forceinline__ int tile_place(int row, int column) {
    while (row - column - 1 < column) {
        const int below = row - column - 1;
        row = column;
        column = below;
    }
    return column * (PANELS - column) + row - 2 * column - 1;
}

// ---------------------------------------------------------------------------------------------- accumulators

using Sums = real[TILE_ROWS][TILE_COLUMNS];

// A thread owns rows row + ROW_THREADS a and columns column + COLUMN_THREADS b: the rows below the diagonal stay spread
// over all threads. A warp covers 4 rows x 8 columns; its lanes alternate so that neighbours share a row or a column, which
// the hardware reads once. Constructed at each use: keeping the values derived from it would take too many registers.
struct Owner {
    int row, column;

    __device__ Owner() {
        const unsigned thread = fresh(threadIdx.x), lane = thread % WARP, warp = thread / WARP;
        column = (lane & 1) | (lane >> 1 & 6);
        row = warp * 4 + ((lane >> 1 & 1) | (lane >> 3 & 2));
    }
};

// The rows in work: at most HEIGHT rows of a panel.
struct Part {
    int panel, first;  // `first`: first row, in the matrix; first == column() is the part with the diagonal

    __device__ int column() const { return panel * PANEL; }
    __device__ bool has_diagonal() const { return RESIDENT || first == column(); }
    __device__ int n_rows() const { return min(HEIGHT, RANK - first); }
    __device__ int n_groups() const { return ceil_div(n_rows(), PANEL); }
    __device__ int n_steps() const { return ceil_div(min(PANEL, RANK - column()), STEP); }
    __device__ Part next() const {
        if (!RESIDENT && first + HEIGHT < RANK) return {panel, first + HEIGHT};
        return {panel + 1, (panel + 1) * PANEL};
    }
};

// Whether accumulator (a, b) of the part with the diagonal is above the diagonal in every thread; the next function: below.
__device__ __forceinline__ constexpr bool above_diagonal(int a, int b) {
    return a * ROW_THREADS + ROW_THREADS - 1 < b * COLUMN_THREADS;
}
__device__ __forceinline__ constexpr bool below_diagonal(int a, int b) {
    return a * ROW_THREADS > b * COLUMN_THREADS + COLUMN_THREADS - 1;
}

// sums <- A, the identity beyond RANK, 0 above the diagonal.
__device__ __forceinline__ void load(Sums& sums, const real* matrix, const Part& part) {
    const Owner own;
    const int first = part.first + own.row, column = part.column() + own.column;
    const real* const source = matrix + int64(first) * RANK + column;
    const bool has_diagonal = part.has_diagonal();
#pragma unroll
    for (int a = 0; a < TILE_ROWS; a++) {
        const int row = first + a * ROW_THREADS;
#pragma unroll
        for (int b = 0; b < TILE_COLUMNS; b++) {
            const int j = column + b * COLUMN_THREADS;
            const bool stored = row < RANK && (!has_diagonal || below_diagonal(a, b) || j <= row);
            sums[a][b] = row == j ? real(1) : real(0);
            if (stored) sums[a][b] = source[a * ROW_THREADS * RANK + b * COLUMN_THREADS];
        }
    }
}

// Stores the lower bounds of the pivots, from the diagonal as loaded. Separate from `load`, where threads would stall on it.
__device__ __forceinline__ void note_floors(const Sums& sums, const Part& part, real epsilon, const Shared& shared) {
    if (!part.has_diagonal()) return;
    const Owner own;
#pragma unroll
    for (int a = 0; a < min(GROUP, TILE_ROWS); a++)
#pragma unroll
        for (int b = 0; b < TILE_COLUMNS; b++) {
            const int row = own.row + a * ROW_THREADS;
            if (above_diagonal(a, b) || below_diagonal(a, b)) continue;
            if (row == own.column + b * COLUMN_THREADS) shared.floors()[row] = epsilon * sums[a][b];
        }
}

// sums[:, FIRST:END] -= rows columns^T over CHUNKS chunks of both. rows[q] points to this thread's first row in the q-th PANEL
// rows, columns to this thread's first column.
template <int ROWS, int FIRST, int END, int CHUNKS, bool DIAGONAL>
__device__ __forceinline__ void subtract_product(Sums& sums, const Chunk* const (&rows)[GROUPS], const Chunk* columns,
                                                 int n_groups, const Owner& own) {
    constexpr int UNROLL = ROWS * (END - FIRST) * VECTOR > 128 ? 1 : 2;
#pragma unroll UNROLL
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const int row_chunk = chunk ^ swizzle<CHUNKS>(own.row), column_chunk = chunk ^ swizzle<CHUNKS>(own.column);
        Chunk column[TILE_COLUMNS];
#pragma unroll
        for (int b = FIRST; b < END; b++) column[b] = columns[b * COLUMN_THREADS * CHUNKS + column_chunk];
#pragma unroll
        for (int q = 0; q < GROUPS; q++) {
            if (q >= n_groups) break;
#pragma unroll
            for (int a = q * GROUP; a < min(ROWS, (q + 1) * GROUP); a++) {
                const Chunk row = rows[q][(a - q * GROUP) * ROW_THREADS * CHUNKS + row_chunk];
#pragma unroll
                for (int e = 0; e < VECTOR; e++)
#pragma unroll
                    for (int b = FIRST; b < END; b++)
                        if (!DIAGONAL || !above_diagonal(a, b)) sums[a][b] -= row.element[e] * column[b].element[e];
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------- columns so far

// Accumulator rows of a resident part with Q groups, the remainder of the full height.
template <int Q> constexpr int ROWS_OF = TILE_ROWS - (GROUPS - Q) * GROUP;

// Accumulator columns; the last panel, the only part with one group, can have fewer columns.
template <int Q> constexpr int COLUMNS_OF = Q == 1 ? LAST_COLUMNS : TILE_COLUMNS;

template <int Q>
__device__ __forceinline__ void subtract_resident(Sums& sums, const Part& part, const Shared& shared) {
    const Owner own;
    for (int k = 0; k < part.panel; k++) {
        const int* const places = shared.places() + k;
        const Chunk* rows[GROUPS] = {};
#pragma unroll
        for (int q = 0; q < Q; q++)
            rows[q] = shared.tiles() + (places[(part.panel + q) * PANELS] * PANEL + own.row) * TILE_CHUNKS;
        const Chunk* const columns = shared.tiles() + (places[part.panel * PANELS] * PANEL + own.column) * TILE_CHUNKS;
        subtract_product<ROWS_OF<Q>, 0, COLUMNS_OF<Q>, TILE_CHUNKS, true>(sums, rows, columns, Q, own);
    }
}

// Copies the first `valid` elements (all or none if ALIGNED) of a chunk of the matrix to shared memory; the others are zeros.
__device__ __forceinline__ void copy_chunk(Chunk* target, const real* source, int valid) {
    if constexpr (ALIGNED) {
        copy_async_16(target, source, valid > 0);
    } else {
        Chunk value;
#pragma unroll
        for (int e = 0; e < VECTOR; e++) value.element[e] = e < valid ? source[e] : real(0);
        *target = value;
    }
}

// Copies columns column .. column + STAGE of `n_rows` rows of the matrix from `first` on; zeros beyond its end.
__device__ __forceinline__ void stage_rows(Chunk* target, const real* matrix, int first, int n_rows, int column) {
#pragma unroll 4
    for (unsigned item = fresh(threadIdx.x); item < n_rows * STAGE_CHUNKS; item += THREADS) {
        const int row = item / STAGE_CHUNKS, chunk = item % STAGE_CHUNKS;
        const bool valid = first + row < RANK;
        copy_chunk(target + row * STAGE_CHUNKS + (chunk ^ swizzle<STAGE_CHUNKS>(row)),
                   valid ? matrix + int64(first + row) * RANK + column + chunk * VECTOR : matrix, valid ? VECTOR : 0);
    }
}

// Loads a stage: rows of the part, then, if they differ, rows of the panel's own tile.
__device__ __forceinline__ void load_stage(Chunk* target, const real* matrix, const Part& part, int column) {
    stage_rows(target, matrix, part.first, part.n_groups() * PANEL, column);
    if (!part.has_diagonal()) stage_rows(target + HEIGHT * STAGE_CHUNKS, matrix, part.column(), PANEL, column);
    copy_commit();
}

template <bool DIAGONAL>
__device__ __forceinline__ void subtract_stage(Sums& sums, const Chunk* stage, int n_groups) {
    const Owner own;
    const Chunk* rows[GROUPS];
#pragma unroll
    for (int q = 0; q < GROUPS; q++) rows[q] = stage + (q * PANEL + own.row) * STAGE_CHUNKS;
    const Chunk* const columns = stage + ((DIAGONAL ? 0 : HEIGHT) + own.column) * STAGE_CHUNKS;
    subtract_product<TILE_ROWS, 0, TILE_COLUMNS, STAGE_CHUNKS, DIAGONAL>(sums, rows, columns, n_groups, own);
}

// In iteration k, stage k is in flight while stage k - 1 is multiplied.
__device__ __forceinline__ void subtract_staged(Sums& sums, const real* matrix, const Part& part,
                                                const Shared& shared) {
    constexpr int STAGE_SIZE = (HEIGHT + PANEL) * STAGE_CHUNKS;
    const int n_stages = part.column() / STAGE, n_groups = part.n_groups();
    for (int k = 0; k <= n_stages; k++) {
        copy_wait<0>();
        __syncthreads();  // stage k - 1 has arrived, and all threads have read the one before, which stage k overwrites
        if (k < n_stages) load_stage(shared.tiles() + k % 2 * STAGE_SIZE, matrix, part, k * STAGE);
        if (k == 0) continue;
        const Chunk* const stage = shared.tiles() + (k - 1) % 2 * STAGE_SIZE;
        if (part.has_diagonal()) subtract_stage<true>(sums, stage, n_groups);
        else subtract_stage<false>(sums, stage, n_groups);
    }
}

// sums -= (rows of L so far) (panel's rows of L so far)^T.
__device__ __forceinline__ void subtract_left(Sums& sums, const real* matrix, const Part& part, const Shared& shared) {
    if (part.panel == 0) return;
    if constexpr (RESIDENT) {
        // Compiled once per number of groups: these loops are long enough to be worth it. Only the first panel has all groups.
        static_for<1, GROUPS>([&](auto n_groups) {
            if (part.n_groups() == n_groups.value)
                subtract_resident<decltype(n_groups)::value>(sums, part, shared);
        });
    } else {
        subtract_staged(sums, matrix, part, shared);
    }
}

// ---------------------------------------------------------------------------------------------- elimination

// Writes column B of each thread's accumulators, together the columns of step B, to shared memory.
template <int B>
__device__ __forceinline__ void write_step(const Sums& sums, const Part& part, const Shared& shared) {
    const Owner own;
    const int chunk = own.column / VECTOR ^ swizzle<STEP_CHUNKS>(own.row);
    real* const strip = reinterpret_cast<real*>(shared.strip(B) + own.row * STEP_CHUNKS + chunk) + own.column % VECTOR;
    const int n_groups = part.n_groups();
#pragma unroll
    for (int a = 0; a < TILE_ROWS; a++)
        if (a / GROUP < n_groups) strip[a * ROW_THREADS * STEP] = sums[a][B];
    constexpr int DIAGONAL_ROW = B * STEP / ROW_THREADS;
    const int row = own.row - B * STEP % ROW_THREADS;
    if constexpr (DIAGONAL_ROW < TILE_ROWS)
        if (part.has_diagonal() && row >= 0 && row < STEP)
            shared.block(B)[row * STEP + own.column] = sums[DIAGONAL_ROW][B];
}

__device__ __forceinline__ void read_strip(real (&values)[STEP], const Chunk* strip, int row) {
#pragma unroll
    for (int c = 0; c < STEP_CHUNKS; c++) {
        const Chunk chunk = strip[row * STEP_CHUNKS + (c ^ swizzle<STEP_CHUNKS>(row))];
#pragma unroll
        for (int e = 0; e < VECTOR; e++) values[c * VECTOR + e] = chunk.element[e];
    }
}

// Writes `values` as chunks of a row of CHUNKS chunks, from chunk `first` on.
template <int CHUNKS>
__device__ __forceinline__ void write_chunks(Chunk* target, const real (&values)[STEP], int row, int first) {
#pragma unroll
    for (int c = 0; c < STEP_CHUNKS; c++) {
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < VECTOR; e++) chunk.element[e] = values[c * VECTOR + e];
        target[row * CHUNKS + ((first + c) ^ swizzle<CHUNKS>(row))] = chunk;
    }
}

// Writes columns column .. column + STEP of a row of the matrix, up to the end of the row.
__device__ __forceinline__ void write_matrix(real* matrix, const real (&values)[STEP], int row, int column) {
    real* const target = matrix + int64(row) * RANK + column;
    if (ALIGNED && column + STEP <= RANK) {
#pragma unroll
        for (int c = 0; c < STEP_CHUNKS; c++) {
            Chunk chunk;
#pragma unroll
            for (int e = 0; e < VECTOR; e++) chunk.element[e] = values[c * VECTOR + e];
            reinterpret_cast<Chunk*>(target)[c] = chunk;
        }
    } else {
#pragma unroll
        for (int k = 0; k < STEP; k++)
            if (column + k < RANK) target[k] = values[k];
    }
}

// Rows that every warp eliminates, by lane: the diagonal block, then b, then the identity, which becomes the transposed inverse
// of the block. The other lanes are idle.
constexpr int RHS_LANE = STEP;
constexpr int IDENTITY_LANE = 2 * STEP;

struct Common {
    real row[STEP];
    real own = 1;     // the remainder of the diagonal element, in lanes of the diagonal block
    real floor = -1;  // a pivot at or below it is invalid
    int failure = 0;

    __device__ Common(const Part& part, int step, int lane, const Shared& shared) {
        const real* const source =
            lane < STEP ? shared.block(step) + lane * STEP : shared.residual() + part.column() + step * STEP;
#pragma unroll
        for (int c = 0; c < STEP_CHUNKS; c++) {
            const Chunk chunk = reinterpret_cast<const Chunk*>(source)[c];
#pragma unroll
            for (int e = 0; e < VECTOR; e++) row[c * VECTOR + e] = chunk.element[e];
        }
        if (lane > RHS_LANE)
#pragma unroll
            for (int k = 0; k < STEP; k++) row[k] = lane == IDENTITY_LANE + k ? real(1) : real(0);
        if (lane < STEP) {
            own = source[lane];
            floor = shared.floors()[step * STEP + lane];
        }
    }
};

// Writes the results of a step other than rows of L: z, the inverse of the diagonal block, and its failure. Executed by one warp.
__device__ __forceinline__ void write_common(const Common& common, real* matrix, int column, int lane,
                                             const Shared& shared) {
    if (lane == RHS_LANE)
#pragma unroll
        for (int k = 0; k < STEP; k++) shared.forward()[column + k] = common.row[k];
    const int row = column + lane - IDENTITY_LANE;
    if (lane >= IDENTITY_LANE && lane < IDENTITY_LANE + STEP && row < RANK)
        write_matrix(matrix, common.row, row, column);
    const unsigned failed = __ballot_sync(FULL_WARP, common.failure != 0);
    if (failed && lane == __ffs(failed) - 1 && *shared.failure() == 0) *shared.failure() = common.failure;
}

// Eliminates the columns of a step: in the diagonal block, b and the rows of the part below, one row per thread and round.
__device__ __forceinline__ void eliminate(real* matrix, const Part& part, int step, const Shared& shared) {
    const int thread = fresh(threadIdx.x), lane = thread & (WARP - 1), column = part.column() + step * STEP;
    const bool is_first_warp = thread < WARP && part.has_diagonal();
    const int n_rows = round_up(part.n_rows(), ROW_THREADS);
    bool active[ROWS_A_THREAD], any = false;
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const int row = thread + i * THREADS;
        active[i] = row < n_rows && part.first + row >= column + STEP;
        any |= active[i];
    }
    if (!__any_sync(FULL_WARP, any) && !is_first_warp) return;

    Common common(part, step, lane, shared);
    real rows[ROWS_A_THREAD][STEP], product[ROWS_A_THREAD];
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        product[i] = 0;
        // other threads' rows are being written; the results of a thread without a row are not used
        if (active[i]) read_strip(rows[i], shared.strip(step), thread + i * THREADS);
        else
#pragma unroll
            for (int k = 0; k < STEP; k++) rows[i][k] = 0;
    }
#pragma unroll
    for (int k = 0; k < STEP; k++) {
        const int status = pivot_status(common.own, common.floor, column + k);
        if (lane == k) common.failure = status;
        const real root = inverse_root(__shfl_sync(FULL_WARP, status ? real(1) : common.own, k));
        common.row[k] *= root;
        common.own -= common.row[k] * common.row[k];
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++) rows[i][k] *= root;
#pragma unroll
        for (int j = k + 1; j < STEP; j++) {
            const real factor = __shfl_sync(FULL_WARP, common.row[k], j);
            common.row[j] -= common.row[k] * factor;
#pragma unroll
            for (int i = 0; i < ROWS_A_THREAD; i++) rows[i][j] -= rows[i][k] * factor;
        }
        const real z = __shfl_sync(FULL_WARP, common.row[k], RHS_LANE);
#pragma unroll
        for (int i = 0; i < ROWS_A_THREAD; i++) product[i] += rows[i][k] * z;
    }

    if (is_first_warp) write_common(common, matrix, column, lane, shared);
#pragma unroll
    for (int i = 0; i < ROWS_A_THREAD; i++) {
        const int local = thread + i * THREADS, row = part.first + local, in_panel = row - part.column();
        if (!active[i]) continue;
        shared.residual()[row] -= product[i];
        write_chunks<STEP_CHUNKS>(shared.strip(step), rows[i], local, 0);
        if (!RESIDENT && in_panel < PANEL) write_chunks<STEP_CHUNKS>(shared.diagonal(step), rows[i], in_panel, 0);
        if (RESIDENT && in_panel >= PANEL) {
            const int place = shared.places()[row / PANEL * PANELS + part.panel];
            write_chunks<TILE_CHUNKS>(shared.tiles() + place * PANEL * TILE_CHUNKS, rows[i], row % PANEL,
                                      step * STEP_CHUNKS);
        } else if (row < RANK) {
            write_matrix(matrix, rows[i], row, column);
        }
    }
}

// Updates the columns of the panel after a step by the step's columns of L. Two steps share the same code; after the second, one
// column more than needed is computed.
template <int PAIR>
__device__ __forceinline__ void update_panel(Sums& sums, const Part& part, int step, const Shared& shared) {
    const Owner own;
    const Chunk* rows[GROUPS];
#pragma unroll
    for (int q = 0; q < GROUPS; q++) rows[q] = shared.strip(step) + (q * PANEL + own.row) * STEP_CHUNKS;
    const Chunk* const columns = (RESIDENT ? shared.strip(step) : shared.diagonal(step)) + own.column * STEP_CHUNKS;
    subtract_product<TILE_ROWS, 2 * PAIR + 1, TILE_COLUMNS, STEP_CHUNKS, RESIDENT != 0>(sums, rows, columns,
                                                                                     part.n_groups(), own);
}

// Copies the tiles of a panel below its diagonal tile from shared memory to the matrix, for the back substitution.
__device__ __forceinline__ void write_panel(real* matrix, const Part& part, const Shared& shared) {
    const int below = part.column() + PANEL, n_items = max(0, RANK - below) * TILE_CHUNKS;
    for (unsigned item = fresh(threadIdx.x); item < n_items; item += THREADS) {
        const int row = below + item / TILE_CHUNKS, chunk = item % TILE_CHUNKS, in_tile = row % PANEL;
        const int place = shared.places()[row / PANEL * PANELS + part.panel];
        const Chunk value =
            shared.tiles()[(place * PANEL + in_tile) * TILE_CHUNKS + (chunk ^ swizzle<TILE_CHUNKS>(in_tile))];
        real* const target = matrix + int64(row) * RANK + part.column() + chunk * VECTOR;
        if constexpr (ALIGNED) {
            *reinterpret_cast<Chunk*>(target) = value;
        } else {
#pragma unroll
            for (int e = 0; e < VECTOR; e++) target[e] = value.element[e];
        }
    }
}

// A -> L and b -> z. One loop over the steps of all parts, so that the code of each operation occurs once: the code has to fit
// in the instruction cache.
__device__ __forceinline__ void factor(real* matrix, real epsilon, const Shared& shared) {
    Sums sums;
    Part part{}, next{0, 0};
    int step = 0, n_steps = 0;  // before the first part there is nothing to eliminate
#pragma unroll 1
    while (true) {
        const bool is_last = step + 1 >= n_steps;
        if (n_steps) {
            static_for<0, TILE_COLUMNS>([&](auto b) {
                if (step == b.value) write_step<decltype(b)::value>(sums, part, shared);
            });
            __syncthreads();  // the strip is complete
        }
        // The accumulators are free: the next part is loaded into them while this step is computed.
        if (is_last && next.panel < PANELS) load(sums, matrix, next);
        if (n_steps) {
            eliminate(matrix, part, step, shared);
            __syncthreads();  // rows of L are complete; no thread still reads the block of this step or the previous strip
        }
        if (!is_last) {
            static_for<0, ceil_div(TILE_COLUMNS - 1, 2)>([&](auto pair) {
                if (step / 2 == pair.value) update_panel<decltype(pair)::value>(sums, part, step, shared);
            });
            step++;
            continue;
        }
        if (RESIDENT && n_steps) write_panel(matrix, part, shared);
        if (next.panel == PANELS) break;
        part = next;
        next = part.next();
        n_steps = part.n_steps();
        step = 0;
        note_floors(sums, part, epsilon, shared);
        subtract_left(sums, matrix, part, shared);
    }
}

// ---------------------------------------------------------------------------------------------- back substitution

// Loads the lower triangle of a diagonal tile, whose STEP x STEP blocks hold their transposed inverses; zeros beyond RANK.
__device__ __forceinline__ void load_diagonal_tile(Chunk* tile, const real* matrix, int first) {
#pragma unroll 4
    for (unsigned item = threadIdx.x; item < PANEL * TILE_CHUNKS; item += THREADS) {
        const int row = item / TILE_CHUNKS, chunk = item % TILE_CHUNKS, column = chunk * VECTOR;
        const bool is_stored = column / STEP <= row / STEP && first + row < RANK;
        const int valid = is_stored ? min(VECTOR, RANK - first - column) : 0;
        copy_chunk(tile + (row * DIAGONAL_PITCH + column) / VECTOR,
                   valid > 0 ? matrix + int64(first + row) * RANK + first + column : matrix, valid);
    }
    copy_commit();
}

// Computes x of one panel from the remainder of its z. Executed by one warp; lane i holds elements i + WARP m.
__device__ __forceinline__ void solve_diagonal_tile(real* x, const real* tile, int n_steps, int lane) {
    constexpr int PER_LANE = PANEL / WARP, STEPS_A_WARP = WARP / STEP;
    real value[PER_LANE];
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) value[m] = x[lane + m * WARP];
#pragma unroll
    for (int m = PER_LANE - 1; m >= 0; m--) {
#pragma unroll 1
        for (int step = min(n_steps, (m + 1) * STEPS_A_WARP) - 1; step >= m * STEPS_A_WARP; step--) {
            const real* const rows = tile + step * STEP * DIAGONAL_PITCH;  // rows of L, with the inverse of the block
            const real* const inverse = rows + lane % STEP * DIAGONAL_PITCH + step * STEP;
            const int first_lane = step % STEPS_A_WARP * STEP;
            real solved = 0;  // element lane % STEP of the step
#pragma unroll
            for (int k = 0; k < STEP; k++) solved += inverse[k] * __shfl_sync(FULL_WARP, value[m], first_lane + k);
            if (lane / STEP == first_lane / STEP) value[m] = solved;
#pragma unroll
            for (int k = 0; k < STEP; k++) {
                const real factor = __shfl_sync(FULL_WARP, solved, k);
#pragma unroll
                for (int n = 0; n <= m; n++)
                    if (n < m || lane < first_lane) value[n] -= rows[k * DIAGONAL_PITCH + n * WARP + lane] * factor;
            }
        }
    }
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) x[lane + m * WARP] = value[m];
}

// Replaces z by x in place.
__device__ __forceinline__ void substitute_back(const real* matrix, const Shared& shared) {
    real* const x = shared.forward();
    for (int panel = PANELS - 1; panel >= 0; panel--) {
        const int first = panel * PANEL, n_rows = min(PANEL, RANK - first);
        const real* const left = matrix + int64(first) * RANK;  // rows of L of this panel
        load_diagonal_tile(shared.tiles(), matrix, first);
        // Most of the elements that are multiplied by the panel's x; they arrive while the diagonal tile is solved.
        real ahead[PANEL];
#pragma unroll
        for (int k = 0; k < PANEL; k++)
            ahead[k] = threadIdx.x < first && k < n_rows ? left[k * RANK + threadIdx.x] : real(0);
        copy_wait<0>();
        __syncthreads();
        if (threadIdx.x < WARP) solve_diagonal_tile(x + first, shared.memory, ceil_div(n_rows, STEP), threadIdx.x);
        __syncthreads();
        real sum[2] = {};  // a shorter chain than one sum
#pragma unroll
        for (int k = 0; k < PANEL; k++) sum[k % 2] += ahead[k] * x[first + k];
        if (threadIdx.x < first) x[threadIdx.x] -= sum[0] + sum[1];
        for (int column = threadIdx.x + THREADS; column < first; column += THREADS) {
            real more = 0;
#pragma unroll 8
            for (int k = 0; k < n_rows; k++) more += left[k * RANK + column] * x[first + k];
            x[column] -= more;
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
cholesky_block(real* __restrict__ solutions, int* __restrict__ status, real* matrices, const real* __restrict__ rhs,
               const int64* __restrict__ slots, const int* __restrict__ rows, int64 ld, real epsilon) {
    const int64 system = blockIdx.x, slot = slots[system], out = rows[system];
    if (slot == slots[system + 1]) {
        for (int k = threadIdx.x; k < RANK; k += THREADS) solutions[out * ld + k] = 0;
        if (threadIdx.x == 0) status[out] = 0;
        return;
    }
    const Shared shared;
    real* const matrix = matrices + slot * RANK * RANK;
    for (int k = threadIdx.x; k < PADDED; k += THREADS) {
        shared.residual()[k] = k < RANK ? rhs[slot * RANK + k] : real(0);
        shared.forward()[k] = 0;
    }
    if (RESIDENT)
        for (int k = threadIdx.x; k < PANELS * PANELS; k += THREADS)
            if (k % PANELS < k / PANELS) shared.places()[k] = tile_place(k / PANELS, k % PANELS);
    if (threadIdx.x == 0) *shared.failure() = 0;
    // No barrier: these writes are read after the first barrier of `factor`.
    factor(matrix, epsilon, shared);
    __syncthreads();  // all of L is in the matrix, and the tiles are free
    substitute_back(matrix, shared);

    bool bad = false;
    for (int k = threadIdx.x; k < RANK; k += THREADS) bad |= !is_finite(shared.forward()[k]);
    const bool any_bad = __syncthreads_or(bad);
    const int failure = *shared.failure() ? *shared.failure() : any_bad ? NON_FINITE : 0;
    for (int k = threadIdx.x; k < RANK; k += THREADS) solutions[out * ld + k] = failure ? real(0) : shared.forward()[k];
    if (threadIdx.x == 0) status[out] = failure;
}
#endif
