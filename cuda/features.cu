// features.cu - what features of rows add to a half sweep (hybridmf/core/regression.py): vectors W of the features by a ridge
//               regression of the factors, and the pull lambda s_i W^T f_i of each row
// feature_pieces : partials[p] = sum over the entries e of piece p of weight_e * row_e of the factors, float64
// feature_totals : sums[a] = partials of feature a, added in order
// feature_vectors: vectors = inverse sums
// feature_pull   : pull[i, j] = scale_i ridge_j sum over the entries e of row i of value_e vectors[feature_e, j]; 0 from RANK on
// add_pull       : b[slots[k], j] += pull[rows[k], j]
// grid  : feature_pieces: one block per piece; feature_vectors: one per ROWS features; others: any number
// block : THREADS; threads own columns (feature_pieces, feature_vectors) or elements
// shapes: table (n_rows, LD), whose column RANK - 1 is replaced by bias (n_rows,) if there is one; bounds (n_pieces + 1,): entries of
//         the pieces; partials (n_pieces, RANK)  firsts (n_features + 1,): pieces of the features  sums (n_features, RANK)
//         inverse (n_features, n_features)  vectors (n_features, LD)  indptr (n_rows + 1,)  scale (n_rows,)  ridge (RANK,)
//         pull (n_rows, LD)  rhs: rows `rhs_ld` apart
// traffic: 4 RANK bytes for each feature of a row, twice; n_features^2 (8 RANK / ROWS + 8) bytes, mostly from L2
// synchronization: none; one thread writes an element, and no kernel reads what it writes, except elements of add_pull
#include "common.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef LD
#define LD ((RANK + 3) / 4 * 4)
#endif
#ifndef THREADS
#define THREADS 64
#endif

static_assert(LD >= RANK, "tables have a column for each unknown");

constexpr int ROWS = 4;  // features of a block of feature_vectors, for which it reads `sums` once

__device__ __forceinline__ int64 first_element() { return int64(blockIdx.x) * THREADS + threadIdx.x; }
__device__ __forceinline__ int64 all_threads() { return int64(gridDim.x) * THREADS; }

extern "C" __global__ void __launch_bounds__(THREADS)
feature_pieces(double* __restrict__ partials, const real* __restrict__ table, const real* __restrict__ bias,
               const int* __restrict__ rows, const real* __restrict__ weights, const int64* __restrict__ bounds) {
    const int64 begin = bounds[blockIdx.x], end = bounds[blockIdx.x + 1];
    for (int column = threadIdx.x; column < RANK; column += THREADS) {
        const bool biased = bias != nullptr && column == RANK - 1;
        double sum = 0;
#pragma unroll 8
        for (int64 e = begin; e < end; e++)
            sum += double(weights[e]) * double(biased ? bias[rows[e]] : table[int64(rows[e]) * LD + column]);
        partials[int64(blockIdx.x) * RANK + column] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
feature_totals(double* __restrict__ sums, const double* __restrict__ partials, const int64* __restrict__ firsts,
               int64 n_features) {
    for (int64 at = first_element(); at < n_features * RANK; at += all_threads()) {
        const int64 feature = at / RANK, column = at % RANK, end = firsts[feature + 1];
        double sum = 0;
#pragma unroll 8
        for (int64 piece = firsts[feature]; piece < end; piece++) sum += partials[piece * RANK + column];
        sums[at] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
feature_vectors(real* __restrict__ vectors, const double* __restrict__ inverse, const double* __restrict__ sums,
                int64 n_features) {
    const int64 first = int64(blockIdx.x) * ROWS;
    for (int column = threadIdx.x; column < LD; column += THREADS) {
        double total[ROWS] = {};
        if (column < RANK)
#pragma unroll 4
            for (int64 k = 0; k < n_features; k++) {
                const double sum = sums[k * RANK + column];
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    if (first + r < n_features) total[r] += inverse[(first + r) * n_features + k] * sum;
            }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (first + r < n_features) vectors[(first + r) * LD + column] = real(total[r]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
feature_pull(real* __restrict__ pull, const real* __restrict__ vectors, const int64* __restrict__ indptr,
             const int* __restrict__ features, const real* __restrict__ values, const real* __restrict__ scale,
             const real* __restrict__ ridge, int64 n_rows) {
    for (int64 at = first_element(); at < n_rows * LD; at += all_threads()) {
        const int64 row = at / LD, end = indptr[row + 1];
        const int column = int(at % LD);
        real sum = 0;
        if (column < RANK) {
            for (int64 e = indptr[row]; e < end; e++) sum += values[e] * vectors[int64(features[e]) * LD + column];
            sum *= scale[row] * ridge[column];
        }
        pull[at] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_pull(real* __restrict__ rhs, const real* __restrict__ pull, const int64* __restrict__ slots, const int* __restrict__ rows,
         int64 n_rows, int64 rhs_ld) {
    for (int64 at = first_element(); at < n_rows * RANK; at += all_threads()) {
        const int64 k = at / RANK, column = at % RANK;
        rhs[slots[k] * rhs_ld + column] += pull[int64(rows[k]) * LD + column];
    }
}
