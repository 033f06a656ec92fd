// msgd_blocks.cu - MSGD as the paper maps it (Li et al. 2017): a block of RANK threads updates a row, a thread each coordinate;
//                  for paper_msgd.py only, what fits run is cuda/msgd.cu
// kernels: msgd_blocks   Alg. 3, centralized: block T updates rows T, T + C, ... of the moved side, each by all of its entries
//          msgd_columns  Alg. 2, decentralized: of each row i of the fixed side, block T takes the columns T, T + C, ... and updates
//                        the rows of the moved side that these name; all blocks end row i before any begins row i + 1
// grid  : C blocks: any number, in msgd_columns as many as are resident at a time     block : RANK threads
// shapes: moved (n_moved, RANK)  fixed (n_fixed, RANK)  indices, ratings (nnz,)  begins (n_rows + 1,): by the rows of the moved
//         side, of the fixed side in msgd_columns.  arrived (1,): 0 before each launch
// synchronization: msgd_blocks: a row has one block. msgd_columns: a column occurs once in a row, so within a row no two blocks
//         update the same row. Between rows, `meet` counts arrivals: a block's writes are before its fence and its arrival; the
//         others read after they have seen (row + 1) C arrivals, from L2 (volatile), since L1 may have an older copy. Rows without
//         entries are passed by all blocks alike. The blocks must be resident, or those that wait would keep the rest out.
// shared: RANK reals
// WARP_SYNC 0: a barrier after each of the log2(RANK) steps of the product v.u
//           1: the last 5 steps within a warp, which needs none (section 6.2.1, fig. 10)
// The paper keeps v and u in shared memory; one element a thread is as well in a register.
#include "common.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef WARP_SYNC
#define WARP_SYNC 1
#endif
static_assert(RANK >= WARP && (RANK & (RANK - 1)) == 0, "the tree halves the threads");

// The sum of all threads' values, in every thread.
__device__ __forceinline__ real block_sum(real value, real* shared) {
    constexpr int last = WARP_SYNC ? WARP : 1;
    shared[threadIdx.x] = value;
    __syncthreads();
    for (int half = RANK / 2; half >= last; half /= 2) {
        if (int(threadIdx.x) < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    if (WARP_SYNC) {
        if (threadIdx.x < WARP) {
            real part = shared[threadIdx.x];
            for (int distance = WARP / 2; distance > 0; distance /= 2) part += __shfl_xor_sync(FULL_WARP, part, distance);
            if (threadIdx.x == 0) shared[0] = part;
        }
        __syncthreads();
    }
    const real sum = shared[0];
    __syncthreads();  // before the next entry writes
    return sum;
}

extern "C" __global__ void __launch_bounds__(RANK) msgd_blocks(
        real* moved,           // IN OUT (n_rows, RANK)
        const real* fixed,     // IN (n_fixed, RANK)
        const int* indices,    // IN (nnz,)
        const real* ratings,   // IN (nnz,)
        const int64* begins,   // IN (n_rows + 1,)
        int n_rows, real rate, real keep) {
    real* shared = shared_memory<real>();
    for (int row = blockIdx.x; row < n_rows; row += gridDim.x) {
        const int64 begin = begins[row], end = begins[row + 1];
        real v = moved[int64(row) * RANK + threadIdx.x];
        for (int64 entry = begin; entry < end; entry++) {
            const real u = fixed[int64(indices[entry]) * RANK + threadIdx.x];
            const real error = ratings[entry] - block_sum(v * u, shared);
            v = keep * v + rate * error * u;
        }
        moved[int64(row) * RANK + threadIdx.x] = v;
    }
}

// Waits until all blocks have come here for the `turn`-th time.
__device__ __forceinline__ void meet(unsigned long long* arrived, unsigned long long turn) {
    if (gridDim.x == 1) return;  // the block barriers of block_sum are enough
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrived, 1ull);
        while (*static_cast<volatile unsigned long long*>(arrived) < turn * gridDim.x) {}
        __threadfence();
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(RANK) msgd_columns(
        real* moved,           // IN OUT (n_moved, RANK)
        const real* fixed,     // IN (n_fixed, RANK)
        const int* indices,    // IN (nnz,)
        const real* ratings,   // IN (nnz,)
        const int64* begins,   // IN (n_fixed + 1,)
        int n_fixed, real rate, real keep,
        unsigned long long* arrived) {  // IN OUT (1,)
    real* shared = shared_memory<real>();
    unsigned long long turn = 0;
    for (int row = 0; row < n_fixed; row++) {
        const int64 begin = begins[row], end = begins[row + 1];
        if (begin == end) continue;
        const real u = fixed[int64(row) * RANK + threadIdx.x];
        for (int64 entry = begin + blockIdx.x; entry < end; entry += gridDim.x) {
            volatile real* const place = moved + int64(indices[entry]) * RANK + threadIdx.x;
            const real v = *place;
            const real error = ratings[entry] - block_sum(v * u, shared);
            *place = keep * v + rate * error * u;
        }
        meet(arrived, ++turn);
    }
}
