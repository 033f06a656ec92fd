// samples.cu - small kernels, right and wrong (BROKEN), on which tests try the emulator's schedules and ThreadSanitizer
// Each writes to `out` what can be computed without it. support/known_races.py has the launches and says what finds each fault.
#include "common.cuh"

#ifndef BROKEN
#define BROKEN 0
#endif

constexpr int WARPS = 4, SIDES = WARP + WARPS * WARP;  // threads of a named barrier: one fetching warp, all reading warps

// Chunks pass from fetching to reading warps through buffers with a pair of named barriers each. With 6 buffers and 4 fetching
// warps, as in cuda/warpgroup_sums.cu until November 2026, different warps await successive generations of a barrier.
template <int BUFFERS, int FETCHERS> __device__ void pass_chunks(int64* out, int n_chunks) {
    __shared__ int buffers[6][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (warp >= WARPS) {
        if (warp - WARPS >= FETCHERS) return;
        for (int chunk = warp - WARPS; chunk < n_chunks; chunk += FETCHERS) {
            const int buffer = chunk % BUFFERS;
            if (chunk >= BUFFERS) emulator::arrive(1 + BUFFERS + buffer, SIDES, true);
            buffers[buffer][lane] = chunk;
            emulator::arrive(1 + buffer, SIDES, false);
        }
        return;
    }
    int64 sum = 0;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const int buffer = chunk % BUFFERS;
        emulator::arrive(1 + buffer, SIDES, true);
        sum += int64(chunk) * buffers[buffer][lane];
        emulator::arrive(1 + BUFFERS + buffer, SIDES, false);
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void named_barriers(int64* out, int n_chunks) { pass_chunks<6, BROKEN ? 4 : 3>(out, n_chunks); }

// The same by mbarriers, which know phases modulo two: with fewer buffers than fetching warps, a warp may be a phase early.
extern "C" __global__ void phases(int64* out, int n_chunks) {
    constexpr int BUFFERS = BROKEN ? 3 : 6;
    __shared__ emulator::MBarrier full[6], empty[6];
    __shared__ int buffers[6][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x < BUFFERS) {
        full[threadIdx.x].make(WARP);
        empty[threadIdx.x].make(WARPS);
    }
    __syncthreads();
    if (warp >= WARPS) {
        for (int chunk = warp - WARPS; chunk < n_chunks; chunk += WARPS) {
            const int buffer = chunk % BUFFERS;
            if (chunk >= BUFFERS) empty[buffer].wait((chunk / BUFFERS - 1) % 2);
            buffers[buffer][lane] = chunk;
            full[buffer].arrive();
        }
        return;
    }
    int64 sum = 0;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const int buffer = chunk % BUFFERS;
        full[buffer].wait(chunk / BUFFERS % 2);
        sum += int64(chunk) * buffers[buffer][lane];
        __syncwarp();
        if (lane == 0) empty[buffer].arrive();
    }
    out[threadIdx.x] = sum;
}

enum Order { WARP_BARRIER, SHUFFLE, NOTHING };

// Lanes of a warp exchange values in shared memory.
template <Order ORDER> __device__ void exchange_values(int64* out, int n) {
    __shared__ int values[8 * WARP];
    int value = threadIdx.x;
    for (int k = 0; k < n; k++) {
        values[threadIdx.x] = value;
        if (ORDER == WARP_BARRIER) __syncwarp();
        if (ORDER == SHUFFLE) __shfl_sync(FULL_WARP, value, 0);
        value = values[threadIdx.x ^ 1];
        __syncwarp();
    }
    out[threadIdx.x] = value;
}

extern "C" __global__ void warp_exchange(int64* out, int n) { exchange_values<BROKEN ? NOTHING : WARP_BARRIER>(out, n); }

// A shuffle orders no memory.
extern "C" __global__ void shuffled_exchange(int64* out, int n) { exchange_values<BROKEN ? SHUFFLE : WARP_BARRIER>(out, n); }

// All threads read what all have written, and write it again.
extern "C" __global__ void block_exchange(int64* out, int n) {
    __shared__ int values[8 * WARP];
    int value = threadIdx.x;
    for (int k = 0; k < n; k++) {
        values[threadIdx.x] = value;
        __syncthreads();
        value = values[blockDim.x - 1 - threadIdx.x];
        if (!BROKEN) __syncthreads();
    }
    out[threadIdx.x] = value;
}

// Copies of chunk k + 1 are in flight while chunk k is read.
extern "C" __global__ void copies(int64* out, const int4* rows, int n) {
    __shared__ int4 stages[2][8 * WARP];
    int64 sum = 0;
    copy_async_16(&stages[0][threadIdx.x], rows + threadIdx.x, true);
    copy_commit();
    for (int k = 0; k < n; k++) {
        copy_async_16(&stages[(k + 1) % 2][threadIdx.x], rows + (k + 1) * blockDim.x + threadIdx.x, k + 1 < n);
        copy_commit();
        copy_wait<BROKEN ? 2 : 1>();
        sum += int64(k + 1) * stages[k % 2][threadIdx.x].x;
    }
    copy_wait<0>();
    out[threadIdx.x] = sum;
}

// Copies of other threads are complete behind a barrier that follows their waits.
extern "C" __global__ void shared_copies(int64* out, const int4* rows, int n) {
    __shared__ int4 stage[8 * WARP];
    int64 sum = 0;
    for (int k = 0; k < n; k++) {
        copy_async_16(&stage[threadIdx.x], rows + k * blockDim.x + threadIdx.x, true);
        copy_commit();
        if (BROKEN) __syncthreads();
        copy_wait<0>();
        if (!BROKEN) __syncthreads();
        sum += int64(k + 1) * stage[blockDim.x - 1 - threadIdx.x].x;
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}

// Warpgroup products read shared memory until they are waited for.
extern "C" __global__ void products(int64* out, int n) {
    __shared__ Gate full, empty;
    __shared__ int buffer[WARP];
    const int lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        full.make();
        empty.make();
    }
    __syncthreads();
    int64 sum = 0;
    for (int k = 0; k < n; k++) {
        if (threadIdx.x < WARP) {
            if (k > 0) empty.wait(k);
            buffer[lane] = k;
            full.open(k + 1, lane);
        } else {
            full.wait(k + 1);
            emulator::product([&sum, &buffer, lane, k] { sum += int64(k + 1) * buffer[lane]; });
            emulator::products_commit();
            if (BROKEN) empty.open(k + 1, lane);
            emulator::products_wait(0);
            if (!BROKEN) empty.open(k + 1, lane);
        }
    }
    if (threadIdx.x >= WARP) out[lane] = sum;
}

// A block passes a value to another one.
extern "C" __global__ void flag(int64* out, int* value, int* ready) {
    if (threadIdx.x > 0) return;
    if (blockIdx.x == 0) {
        *value = 42;
        if (!BROKEN) __threadfence();
        atomicExch(ready, 1);
    } else {
        while (!atomicAdd(ready, 0)) {}
        __threadfence();
        out[0] = *value;
    }
}

// Blocks add to a total.
extern "C" __global__ void total(int64* out, int* sum) {
    if (BROKEN) *sum += 1;
    else atomicAdd(sum, 1);
}

__device__ RACES_BY_DESIGN void add(int* sum) { *sum += 1; }

// The same, by a function that is exempt.
extern "C" __global__ void exempt_total(int64* out, int* sum) {
    if (BROKEN) add(sum);
    else atomicAdd(sum, 1);
}
