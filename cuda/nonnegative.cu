// nonnegative.cu - x[u] = argmin x.A x / 2 - b.x over x[0], ..., x[bounded - 1] >= 0, for rows u whose sums are in global
//                  memory: A = G + sums + scale_u ridge; any rank, float or double
// grid  : one block per system     block : WARPS warps
// shapes: sums, rhs: with TILES, both are partials (n_slots, PARTIAL) of `assemble_segments`; else matrices (n_slots,
//         RANK, RANK), lower triangles, and (n_slots, RANK)     slots (n_rows + 1,): system k is the sum of slots slots[k]
//         ... slots[k + 1] - 1, and has x = 0 without slots      rows (n_rows,)  gram (RANK16, RANK16) or null
//         ridge (RANK,)  scale (n_out,)  solutions (n_out, ld): start, >= 0 where bounded, and solution  status (n_out,)
// shared: RESIDENT: A (RANK, RANK | 1); always: six vectors, and the indices of the free coordinates
// traffic: sums once (RESIDENT), else rank / 32 times per sweep     flops: 2 RANK^2 per sweep, n^3 / 3 per solve for n free ones
// status: 0, or NON_FINITE; x = 0 where not 0     order: all sums have a fixed order: a rerun gives the same bits
//
// The method is that of the CPU backend (`_descend` in hybridmf/native/_als.pyx): sweeps of coordinate descent, and after
// every FREE_SWEEPS sweeps a step towards the minimum over the coordinates that are not 0. Each coordinate depends on the
// previous one, so a sweep processes 32 at a time: one warp moves them, with their part of the gradient in its registers,
// then all warps update the rest of the gradient, 32 columns at once. The factor of the free system (U^T U, rows of U) is
// stored above the diagonal of A, its diagonal in a separate vector.
//
// synchronization: __syncthreads separates phases, and conditions around it are the same in all threads: they depend on values
//         that all read after a barrier, or come from __syncthreads_or. A sweep: warp 0 writes 32 coordinates, their gradient and
//         `step`; barrier; each thread updates its other components of the gradient; barrier. Rows p ... p + 7 of U: warp 0 writes
//         the columns of the pivots and `root`; barrier; all write their other columns; barrier. Meanwhile all read A, which U does
//         not overlap, and the rows of U above p. Between two barriers, warp 0 alone lists the free coordinates, substitutes back
//         and moves them; __syncwarp separates its writes of `solved` from reads by other lanes.
#include "fragments.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef WARPS
#define WARPS 2
#endif
#ifndef TILES
#define TILES 0
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1  // minimum resident blocks per multiprocessor
#endif

constexpr int NON_FINITE = -1;
constexpr int MOST_SWEEPS = 1000;
constexpr int FREE_SWEEPS = 4;                                 // as on the CPU; on an H200, 1 and 2 are within 6 % of it
constexpr int PANEL = 8;                                       // rows of U that are computed together
constexpr int THREADS = WARPS * WARP;
constexpr int STRIDE = RESIDENT ? RANK | 1 : RANK;             // odd: rows and columns hit all 32 banks
constexpr int PADDED = round_up(RANK, WARP);
constexpr int RANK16 = round_up(RANK, BLOCK);
constexpr int TILE_ROWS = RANK16 / BLOCK;
constexpr int TILE_FLOATS = BLOCK * BLOCK;
constexpr int TILE_COUNT = TILE_ROWS * (TILE_ROWS + 1) / 2;
constexpr int PARTIAL = TILE_COUNT * TILE_FLOATS + RANK16;
constexpr int MATRIX = TILES ? PARTIAL : RANK * RANK;          // elements per slot
constexpr real LARGEST = real(sizeof(real) == 4 ? 3.402823466e+38 : 1.7976931348623157e+308);
static_assert(!TILES || sizeof(real) == 4, "assemble_segments leaves floats");
static_assert(!TILES || RESIDENT, "in place of tiles, A would overwrite sums that other threads still read");
static_assert(PANEL <= WARP, "warp 0 has the columns of all pivots of a panel");

constexpr int SHARED_BYTES_OF_VECTORS = int(sizeof(real)) * (6 * PADDED + WARP) + 4 * (PADDED + 4);
#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == SHARED_BYTES_OF_VECTORS + RESIDENT * RANK * STRIDE * int(sizeof(real)),
              "nonnegative.py counts otherwise");
#endif

struct System {
    real* matrix;    // A on and below the diagonal, U above it
    real* x;
    real* gradient;  // A x - b
    real* b;
    real* inverse;   // reciprocal diagonal of A; 0 where the diagonal is 0
    real* root;      // reciprocal diagonal of U
    real* solved;    // solution for the free coordinates
    real* step;      // steps of 32 coordinates
    int* free;       // the free coordinates
    int* n_free;

    __device__ __forceinline__ explicit System(real* in_place) {
        x = shared_memory<real>();
        gradient = x + PADDED;
        b = gradient + PADDED;
        inverse = b + PADDED;
        root = inverse + PADDED;
        solved = root + PADDED;
        step = solved + PADDED;
        real* const after = step + WARP;
        matrix = RESIDENT ? after : in_place;
        free = reinterpret_cast<int*>(after + RESIDENT * RANK * STRIDE);
        n_free = free + PADDED;
    }

    __device__ __forceinline__ real& at(int row, int column) const { return matrix[row * STRIDE + column]; }
    // Element of the symmetric matrix.
    __device__ __forceinline__ real element(int i, int j) const { return i >= j ? at(i, j) : at(j, i); }
};

__device__ __forceinline__ bool is_finite(real value) { return value <= LARGEST && value >= -LARGEST; }

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

__device__ __forceinline__ real magnitude(real value) { return value < 0 ? -value : value; }

template <class Better> __device__ __forceinline__ real warp_best(real value, Better&& better) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const real other = __shfl_xor_sync(FULL_WARP, value, distance);
        if (better(other, value)) value = other;
    }
    return value;
}

__device__ __forceinline__ real warp_most(real value) {
    return warp_best(value, [](real a, real b) { return a > b; });
}

// ---------------------------------------------------------------------------------------------- the system

// Stores element (row, column) of A, given its sum over the slots.
__device__ __forceinline__ void store_element(const System& system, real sum, int row, int column, const real* gram,
                                              const real* ridge, real scale) {
    if (gram != nullptr) sum += gram[row * RANK16 + column];
    if (row == column) sum += scale * ridge[row];
    system.at(row, column) = sum;
}

__device__ __forceinline__ real sum_slots(const real* first, int n_slots, int64 stride) {
    real sum = first[0];
#pragma unroll 4
    for (int slot = 1; slot < n_slots; slot++) sum += first[slot * stride];
    return sum;
}

__device__ __forceinline__ void load(const System& system, const real* sums, const real* rhs, int n_slots, const real* gram,
                                     const real* ridge, real scale) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#if TILES
#pragma unroll 1
    for (int t = warp; t < TILE_COUNT; t += WARPS) {
        int i = 0;  // the tile's row and column
#pragma unroll
        for (int row = 1; row < TILE_ROWS; row++) i += t >= row * (row + 1) / 2;
        const int j = t - i * (i + 1) / 2;
#pragma unroll
        for (int k = 0; k < TILE_FLOATS / WARP; k++) {
            const int row = i * BLOCK + tile_row(lane, k % 4), column = j * BLOCK + tile_column(lane, k / 4, k % 4);
            const bool inside = row < RANK && column <= row;  // other elements may not be stored; without a branch, loads overlap
            const real sum = sum_slots(sums + t * TILE_FLOATS + (inside ? k * WARP + lane : 0), n_slots, MATRIX);
            if (inside) store_element(system, sum, row, column, gram, ridge, scale);
        }
    }
    rhs = sums + TILE_COUNT * TILE_FLOATS;
#else
    for (int row = warp; row < RANK; row += WARPS)
        for (int column = lane; column <= row; column += WARP) {
            const real sum = sum_slots(sums + int64(row) * RANK + column, n_slots, MATRIX);
            store_element(system, sum, row, column, gram, ridge, scale);
        }
#endif
    for (int k = threadIdx.x; k < RANK; k += THREADS) system.b[k] = sum_slots(rhs + k, n_slots, TILES ? MATRIX : RANK);
}

// gradient <- A x - b.
__device__ __forceinline__ void compute_gradient(const System& system) {
    for (int i = threadIdx.x; i < RANK; i += THREADS) {
        real sum = 0;
#pragma unroll 8
        for (int j = 0; j < i / WARP * WARP; j++) sum += system.at(i, j) * system.x[j];
#pragma unroll 4
        for (int j = i / WARP * WARP; j < min(RANK, (i / WARP + 1) * WARP); j++) sum += system.element(i, j) * system.x[j];
#pragma unroll 8
        for (int j = (i / WARP + 1) * WARP; j < RANK; j++) sum += system.at(j, i) * system.x[j];
        system.gradient[i] = sum - system.b[i];
    }
    __syncthreads();
}

// ---------------------------------------------------------------------------------------------- a sweep

struct Moves {
    real moved = 0, largest = 0;  // largest gradient component that a step removed; largest term of a component
    bool finite = true;
};

// Moves the coordinates first ... first + 31 to their minima, one after the other. Executed by one warp.
__device__ __forceinline__ void move_coordinates(const System& system, int first, int bounded, int lane, Moves& moves) {
    const int j = first + lane;
    const bool exists = j < RANK;
    real x = exists ? system.x[j] : real(0), gradient = exists ? system.gradient[j] : real(0);
    const real inverse = exists ? system.inverse[j] : real(0), curvature = exists ? system.at(j, j) : real(0);
    const real least = j < bounded ? real(0) : -LARGEST, begun = x;
    real between[WARP];  // elements of A between coordinate j and the others
#pragma unroll
    for (int k = 0; k < WARP; k++)
        between[k] = exists && (RANK % WARP == 0 || first + k < RANK) ? system.element(j, first + k) : real(0);
    const real term = exists ? max(magnitude(system.b[j]), curvature * magnitude(x)) : real(0);
    moves.largest = max(moves.largest, term);
#pragma unroll
    for (int k = 0; k < WARP; k++) {
        if (RANK % WARP != 0 && k % 8 == 0 && first + k >= RANK) break;  // coordinates beyond RANK take no step
        const real next = larger(x - gradient * inverse, least);
        gradient += __shfl_sync(FULL_WARP, next - x, k) * between[k];
        if (lane == k) x = next;
    }
    moves.finite = moves.finite && is_finite(x) && is_finite(gradient);  // a non-finite gradient stays non-finite
    moves.moved = max(moves.moved, magnitude(x - begun) * curvature);
    system.step[lane] = x - begun;
    if (exists) {
        system.x[j] = x;
        system.gradient[j] = gradient;
    }
}

// Updates the gradient components outside of these coordinates by their steps.
__device__ __forceinline__ void follow(const System& system, int first) {
    for (int i = threadIdx.x; i < RANK; i += THREADS) {
        if (i >= first && i < first + WARP) continue;
        real sum[4] = {};  // shorter chains
        if (i > first) {  // then all 32 coordinates exist
#pragma unroll
            for (int k = 0; k < WARP; k++) sum[k % 4] += system.at(i, first + k) * system.step[k];
        } else {
#pragma unroll
            for (int k = 0; k < WARP; k++)
                if (RANK % WARP == 0 || first + k < RANK) sum[k % 4] += system.at(first + k, i) * system.step[k];
        }
        system.gradient[i] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
}

// ---------------------------------------------------------------------------------------------- the free coordinates

// Lists the coordinates that are not 0 or not bounded. Executed by one warp.
__device__ __forceinline__ void list_free(const System& system, int bounded, int lane) {
    int count = 0;
    for (int first = 0; first < RANK; first += WARP) {
        const int j = first + lane;
        const bool is_free = j < RANK && (j >= bounded || system.x[j] > 0);
        const unsigned all = __ballot_sync(FULL_WARP, is_free);
        if (is_free) system.free[count + __popc(all & ((1u << lane) - 1))] = j;
        count += __popc(all);
    }
    if (lane == 0) *system.n_free = count;
}

// Column i of U, rows of a panel from p on: A's column, or b for i = n, less the contributions of the panels above.
__device__ __forceinline__ void reduce_column(const System& system, real (&column)[PANEL], int n, int p, int i) {
    const int own = i < n ? system.free[i] : 0;
#pragma unroll
    for (int r = 0; r < PANEL; r++) {
        column[r] = 0;
        if (p + r >= n || i > n) continue;
        const int other = system.free[p + r];
        if (i == n) column[r] = system.b[other];
        else if (i >= p + r) column[r] = system.at(own, other);
    }
    if (i > n) return;
    const real* const above = i == n ? system.solved : system.matrix + i;
    const int stride = i == n ? 1 : STRIDE;
#pragma unroll 4
    for (int k = 0; k < p; k++) {
        const real value = above[k * stride];
#pragma unroll
        for (int r = 0; r < PANEL; r++)  // rows beyond n are not used
            if (RESIDENT || p + r < n) column[r] -= system.at(k, p + r) * value;
    }
}

__device__ __forceinline__ void store_column(const System& system, const real (&column)[PANEL], int n, int p, int i) {
#pragma unroll
    for (int r = 0; r < PANEL; r++) {
        if (p + r >= n) break;
        if (i == n) system.solved[p + r] = column[r];
        else if (i < n && i > p + r) system.at(p + r, i) = column[r];
    }
}

// Factors columns p ... p + 31 of a panel, which include the pivots; one lane per column. False if a pivot is not positive.
__device__ __forceinline__ bool factor_columns(const System& system, real (&column)[PANEL], int n, int p, real epsilon, int lane) {
    bool positive = true;
#pragma unroll
    for (int r = 0; r < PANEL; r++) {
        if (p + r >= n) break;
        const int own = system.free[p + r];
        const real pivot = __shfl_sync(FULL_WARP, column[r], r);
        const bool good = is_finite(pivot) && pivot > epsilon * system.at(own, own);
        const real root = good ? real(rsqrt(pivot)) : real(0);
        positive = positive && good;
        if (lane == 0) system.root[p + r] = root;
        column[r] *= root;
#pragma unroll
        for (int q = r + 1; q < PANEL; q++) column[q] -= __shfl_sync(FULL_WARP, column[r], q) * column[r];
    }
    return positive;
}

// The same for the other columns, after the pivots' columns are stored.
__device__ __forceinline__ void substitute_column(const System& system, real (&column)[PANEL], int n, int p) {
#pragma unroll
    for (int r = 0; r < PANEL; r++) {
        if (p + r >= n) break;
#pragma unroll
        for (int q = 0; q < r; q++) column[r] -= system.at(p + q, p + r) * column[q];
        column[r] *= system.root[p + r];
    }
}

// Computes U^T U = A and U^T y = b for the free coordinates; writes y to `solved`. False if A is not positive definite.
__device__ __forceinline__ bool factor_free(const System& system, int n, real epsilon) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int p = 0; p < n; p += PANEL) {
        bool positive = true;
        for (int first = p; first <= n; first += THREADS) {
            const int i = first + threadIdx.x;
            real column[PANEL];
            reduce_column(system, column, n, p, i);
            if (first == p) {
                if (warp == 0) {
                    positive = factor_columns(system, column, n, p, epsilon, lane);
                    store_column(system, column, n, p, i);
                }
                __syncthreads();
                if (warp == 0) continue;
            }
            substitute_column(system, column, n, p);
            store_column(system, column, n, p, i);
        }
        if (__syncthreads_or(!positive)) return false;
    }
    return true;
}

// solved <- U^-1 solved. Executed by one warp.
__device__ __forceinline__ void substitute_back(const System& system, int n, int lane) {
    for (int first = (n - 1) / WARP * WARP; first >= 0; first -= WARP) {
        const int j = first + lane, count = min(WARP, n - first);
        real y = j < n ? system.solved[j] : real(0);
        const real root = j < n ? system.root[j] : real(0);
#pragma unroll 4
        for (int k = count - 1; k > 0; k--) {
            const real value = __shfl_sync(FULL_WARP, y * root, k);
            if (lane < k) y -= system.at(j, first + k) * value;
        }
        if (j < n) system.solved[j] = y * root;
        __syncwarp();
        for (int i = lane; i < first; i += WARP) {
            real sum = 0;
#pragma unroll 4
            for (int k = 0; k < count; k++) sum += system.at(i, first + k) * system.solved[first + k];
            system.solved[i] -= sum;
        }
        __syncwarp();
    }
}

// Moves x towards the minimum over its free coordinates, as far as no bounded one becomes negative. Executed by one warp.
__device__ __forceinline__ void move_free(const System& system, int n, int bounded, int lane) {
    real share = 1;
    bool finite = true;
    for (int k = lane; k < n; k += WARP) {
        const int j = system.free[k];
        const real x = system.x[j], solved = system.solved[k];
        finite = finite && is_finite(solved);
        if (j < bounded && solved < 0) share = min(share, x / (x - solved));
    }
    share = warp_best(share, [](real a, real b) { return a < b; });
    if (!__all_sync(FULL_WARP, finite)) return;
    for (int k = lane; k < n; k += WARP) {
        const int j = system.free[k];
        const real x = system.x[j], solved = system.solved[k], moved = x + share * (solved - x);
        system.x[j] = j < bounded && solved < 0 && moved < 0 ? real(0) : moved;
    }
}

// Solves for the free coordinates and moves x. x is unchanged if their system is not positive definite.
__device__ __forceinline__ void solve_free(const System& system, int bounded, real epsilon) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (warp == 0) list_free(system, bounded, lane);
    __syncthreads();
    const int n = *system.n_free;
    if (n == 0 || !factor_free(system, n, epsilon)) return;
    if (warp == 0) {
        substitute_back(system, n, lane);
        move_free(system, n, bounded, lane);
    }
    __syncthreads();
}

// ---------------------------------------------------------------------------------------------- the minimization

// Minimizes. Stops when a sweep moves no component of a newly computed gradient by more than 4 epsilon of the largest term.
__device__ __forceinline__ bool descend(const System& system, int bounded, real epsilon) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Moves moves;
    for (int sweep = 0; sweep < MOST_SWEEPS; sweep++) {
        const bool anew = sweep % FREE_SWEEPS == 0;
        if (anew) {
            if (sweep) solve_free(system, bounded, epsilon);
            compute_gradient(system);
        }
        moves.moved = moves.largest = 0;
        for (int first = 0; first < RANK; first += WARP) {
            if (warp == 0) move_coordinates(system, first, bounded, lane, moves);
            __syncthreads();
            follow(system, first);
            __syncthreads();
        }
        if (anew) {
            const bool moving = warp_most(moves.moved) > 4 * epsilon * warp_most(moves.largest);  // in warp 0: the others have 0
            if (!__syncthreads_or(moving && moves.finite)) break;
        }
    }
    return !__syncthreads_or(!moves.finite);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
nonnegative(real* solutions, int* __restrict__ status, real* sums, const real* rhs, const int64* __restrict__ slots,
            const int* __restrict__ rows, const real* __restrict__ gram, const real* __restrict__ ridge,
            const real* __restrict__ scale, int64 ld, int bounded, real epsilon) {
    const int64 out = rows[blockIdx.x], slot = slots[blockIdx.x];
    const int n_slots = int(slots[blockIdx.x + 1] - slot);
    real* const solution = solutions + out * ld;
    const System system(sums + slot * MATRIX);
    bool good = true;
    if (n_slots > 0) {
        load(system, sums + slot * MATRIX, rhs + slot * RANK, n_slots, gram, ridge, scale[out]);
        __syncthreads();
        for (int k = threadIdx.x; k < RANK; k += THREADS) {
            const real curvature = system.at(k, k);
            good = good && is_finite(curvature) && is_finite(system.b[k]);
            system.inverse[k] = curvature == 0 ? real(0) : 1 / curvature;
            system.x[k] = curvature == 0 ? real(0) : solution[k];  // 0 if neither an entry nor a penalty determines it
        }
        good = !__syncthreads_or(!good);
        if (good) good = descend(system, bounded, epsilon);
    }
    for (int k = threadIdx.x; k < RANK; k += THREADS) solution[k] = good && n_slots > 0 ? system.x[k] : real(0);
    if (threadIdx.x == 0) status[out] = good ? 0 : NON_FINITE;
}
