// msgd_blocks.cu - MSGD as the paper maps it (Li et al. 2017, Alg. 3): a block of RANK threads moves a row, a thread each
//                  coordinate; for paper_msgd.py only, what fits run is cuda/msgd.cu
// grid  : any number of blocks; each takes rows blockIdx.x, blockIdx.x + gridDim.x, ...     block : RANK threads
// shapes: moved (n_rows, RANK)  fixed (n_fixed, RANK)  indices, ratings (nnz,)  begins (n_rows + 1,)
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
