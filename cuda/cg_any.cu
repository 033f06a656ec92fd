// cg_any.cu - conjugate gradient steps on A[k] x[k] = b[k] for a batch of systems, any rank, float or double
// grid  : one block per system     block : WARPS warps, which share the rows of A
// shapes: solutions (n_out, ld): row rows[k] holds the start of system k and receives its solution
//         status (n_out,)  matrices (n_slots, RANK, RANK), lower triangles  rhs (n_slots, RANK)
//         slots (n_systems + 1,): system k is in slot slots[k], or has none and x = 0  rows (n_systems,)
// shared: A, packed row by row (RESIDENT), read once from global memory; else A is read from L2 in each step
// stops : after `steps` steps, or once the residual has fallen by 1e-10 or is about to underflow, like the CPU backend
//         (_conjugate_gradient in hybridmf/native/_als.pyx); inner products are summed in double
// status: 0; -1 if something is not finite; -2 for negative curvature (A is not positive definite). x = 0 where not 0
// order : all sums have a fixed order: a rerun gives the same bits
// traffic: n^2 / 2 elements once (RESIDENT), else steps + 1 times     flops: 2 n^2 per step and for the first residual
// synchronization: `apply`: barrier; each thread writes its elements of the vector; barrier; each warp writes the sums of its rows
//         and its column sums; barrier; each thread reads the sums of its elements. The first barrier of the next product ends
//         these reads. A row keeps its warp for all columns: lane 0 alone reads and writes its sum. `block_sum`: barriers before
//         and after the writes. All threads compute the same inner products, so they take the same branches around barriers.
#include "common.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1  // minimum resident blocks per multiprocessor
#endif

constexpr int NON_FINITE = -1;  // as on the CPU (hybridmf/native/_als.pyx)
constexpr int NEGATIVE_CURVATURE = -2;
constexpr real LARGEST = real(sizeof(real) == 4 ? 3.402823466e+38 : 1.7976931348623157e+308);
constexpr double REDUCED = 1e-20;                              // stops at this ratio of the squared residual to its first value
constexpr double TINY = sizeof(real) == 4 ? 1e-60 : 1e-290;    // squares of the next step would underflow
constexpr int THREADS = WARPS * WARP;
constexpr int COLUMNS = ceil_div(RANK, WARP);                  // columns of a row per lane
constexpr int ELEMENTS = ceil_div(RANK, THREADS);              // elements of a vector per thread
constexpr int PADDED = COLUMNS * WARP;
constexpr int PIECE = COLUMNS < 16 ? COLUMNS : 16;             // columns at a time, as many as registers hold
constexpr int ROWS_AT_ONCE = PIECE <= 4 ? 4 : 2;               // rows whose warp sums overlap their latencies
static_assert(WARP % WARPS == 0, "a row keeps its warp for all columns");
constexpr int PACKED = RESIDENT ? RANK * (RANK + 1) / 2 : 0;

// Shared memory: WARPS doubles, the vector A is applied to, row sums, WARPS vectors of column sums, A.
constexpr int SHARED_REALS = (WARPS + 2) * PADDED + PACKED;
#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == WARPS * 8 + SHARED_REALS * int(sizeof(real)), "cholesky_any.py counts otherwise");
#endif

using Vector = real[ELEMENTS];  // element threadIdx.x + THREADS e in each thread

struct Shared {
    double* sums = shared_memory<double>();
    real* vector = reinterpret_cast<real*>(sums + WARPS);
    real* row_sums = vector + PADDED;
    real* column_sums = row_sums + PADDED;
    real* packed = column_sums + WARPS * PADDED;
};

__device__ __forceinline__ bool is_finite(double value, double largest = 1.7976931348623157e+308) {
    return value <= largest && value >= -largest;
}

// Sum over the block, the same bits in every thread.
__device__ __forceinline__ double block_sum(double value, const Shared& shared) {
    value = warp_sum(value);
    __syncthreads();  // the previous sums have been read
    if (threadIdx.x % WARP == 0) shared.sums[threadIdx.x / WARP] = value;
    __syncthreads();
    value = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) value += shared.sums[warp];
    return value;
}

__device__ __forceinline__ double dot(const Vector& a, const Vector& b, const Shared& shared) {
    double sum = 0;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) sum += double(a[e]) * double(b[e]);
    return block_sum(sum, shared);
}

// For the columns of A from WARP first on: adds their part to the row sums, and the sums over this warp's rows to the column
// sums, the products with the transposed elements. Each element of the lower triangle is read once for both.
__device__ __forceinline__ void apply_columns(const real* __restrict__ matrix, int first, const Shared& shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    real mine[PIECE], sums[PIECE];
#pragma unroll
    for (int c = 0; c < PIECE; c++) {
        mine[c] = first + c < COLUMNS ? shared.vector[(first + c) * WARP + lane] : real(0);
        sums[c] = 0;
    }
#pragma unroll ROWS_AT_ONCE
    for (int row = first * WARP + warp; row < RANK; row += WARPS) {
        const real* const source = RESIDENT ? shared.packed + row * (row + 1) / 2 : matrix + int64(row) * RANK;
        const real at_row = shared.vector[row];
        real sum = 0;
#pragma unroll
        for (int c = 0; c < PIECE; c++) {
            const int column = (first + c) * WARP + lane;
            if ((first + c) * WARP > row) break;
            const real value = column <= row ? source[column] : real(0);
            sum += value * mine[c];
            if (column < row) sums[c] += value * at_row;
        }
        sum = warp_sum(sum);
        if (lane == 0) shared.row_sums[row] = first ? shared.row_sums[row] + sum : sum;
    }
#pragma unroll
    for (int c = 0; c < PIECE; c++)
        if (first + c < COLUMNS) shared.column_sums[warp * PADDED + (first + c) * WARP + lane] = sums[c];
}

// product <- A vector.
__device__ __forceinline__ void apply(Vector& product, const Vector& vector, const real* __restrict__ matrix,
                                      const Shared& shared) {
    __syncthreads();  // the previous product has been read from shared memory
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++)
        if (threadIdx.x + e * THREADS < PADDED) shared.vector[threadIdx.x + e * THREADS] = vector[e];
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < COLUMNS; first += PIECE) apply_columns(matrix, first, shared);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
        const int k = threadIdx.x + e * THREADS;
        product[e] = 0;
        if (k >= RANK) continue;
        product[e] = shared.row_sums[k];
#pragma unroll
        for (int w = 0; w < WARPS; w++) product[e] += shared.column_sums[w * PADDED + k];
    }
}

// Runs `steps` steps from x; returns the status.
__device__ __forceinline__ int iterate(Vector& x, Vector& residual, const real* __restrict__ matrix, int steps,
                                       const Shared& shared) {
    Vector direction, product;
    apply(product, x, matrix, shared);
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) direction[e] = residual[e] -= product[e];
    double square = dot(residual, residual, shared);
    const double first = square;
    if (!is_finite(square)) return NON_FINITE;
    for (int step = 0; step < steps; step++) {
        if (square <= REDUCED * first || square <= TINY) break;
        apply(product, direction, matrix, shared);
        const double curvature = dot(direction, product, shared);
        if (curvature <= 0) return NEGATIVE_CURVATURE;
        const real length = real(square / curvature);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            x[e] += length * direction[e];
            residual[e] -= length * product[e];
        }
        const double next = dot(residual, residual, shared);
        if (!is_finite(next)) return NON_FINITE;
        const real ratio = real(next / square);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) direction[e] = residual[e] + ratio * direction[e];
        square = next;
    }
    return 0;
}

// Copies the lower triangle to shared memory, row by row without gaps.
__device__ __forceinline__ void pack(const real* __restrict__ matrix, const Shared& shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll 4
    for (int row = warp; row < RANK; row += WARPS)
        for (int column = lane; column <= row; column += WARP)
            shared.packed[row * (row + 1) / 2 + column] = matrix[int64(row) * RANK + column];
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
cg(real* solutions, int* __restrict__ status, const real* __restrict__ matrices, const real* __restrict__ rhs,
   const int64* __restrict__ slots, const int* __restrict__ rows, int64 ld, int steps) {
    const int64 system = blockIdx.x, slot = slots[system], out = rows[system];
    const bool exists = slot < slots[system + 1];
    real* const solution = solutions + out * ld;
    const real* const matrix = matrices + slot * RANK * RANK;
    const Shared shared;
    Vector x, residual;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
        const int k = threadIdx.x + e * THREADS;
        x[e] = exists && k < RANK ? solution[k] : real(0);
        residual[e] = exists && k < RANK ? rhs[slot * RANK + k] : real(0);
    }
    int failure = 0;
    if (exists) {
        if (RESIDENT) pack(matrix, shared);  // read after the first barrier of `apply`
        failure = iterate(x, residual, matrix, steps, shared);
    }
    bool bad = false;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) bad |= !is_finite(x[e], LARGEST);
    if (__syncthreads_or(bad) && !failure) failure = NON_FINITE;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++)
        if (threadIdx.x + e * THREADS < RANK) solution[threadIdx.x + e * THREADS] = failure ? real(0) : x[e];
    if (threadIdx.x == 0) status[out] = failure;
}
