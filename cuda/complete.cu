// complete.cu - turns the partial sums of each system into the system:
//     A[k] = sum of its slots + gram + scale[k] diag(ridge)     b[k] = sum of its slots
// grid  : (systems, PARTS)     block : THREADS; the warps of a system's PARTS blocks share its rows
// shapes: matrices (n_slots, RANK, RANK)  rhs (n_slots, RANK)  slots (n_systems + 1,)  gram (RANK, RANK)  ridge (RANK,)
//         scale (n_systems,); only lower triangles are read and written
// result: system k is written to slot slots[k]. Systems without slots are skipped.
// order : slots are added in their order, then gram, then ridge: a rerun gives the same bits
// traffic: the lower triangles of all slots once in, of the first slots once out; for a system of one slot without gram,
//         only the diagonal
// synchronization: none; one thread reads an element in all slots of a system and writes it to the first of them. Blocks that share
//         a system have different rows.
#include "common.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef HAS_GRAM
#define HAS_GRAM 0  // 1: gram is added
#endif
#ifndef PARTS
#define PARTS 1  // blocks that share a system, so that one row with very many slots does not delay the others
#endif
#ifndef THREADS
#define THREADS 128
#endif

constexpr int VECTOR = 16 / int(sizeof(real));
constexpr bool ALIGNED = RANK % VECTOR == 0;  // every row of every slot is aligned to 16 bytes
constexpr int WARPS = THREADS / WARP;

struct alignas(16) Chunk {
    real element[VECTOR];
};

// Sums one element over the slots, which are `stride` apart.
__device__ __forceinline__ real sum_slots(const real* first, int n_slots, int64 stride) {
    real sum = first[0];
#pragma unroll 8
    for (int slot = 1; slot < n_slots; slot++) sum += first[slot * stride];
    return sum;
}

// The same for 16 bytes.
__device__ __forceinline__ Chunk sum_slots_of_chunk(const real* first, int n_slots, int64 stride) {
    Chunk sum = *reinterpret_cast<const Chunk*>(first);
#pragma unroll 8
    for (int slot = 1; slot < n_slots; slot++) {
        const Chunk next = *reinterpret_cast<const Chunk*>(first + slot * stride);
#pragma unroll
        for (int e = 0; e < VECTOR; e++) sum.element[e] += next.element[e];
    }
    return sum;
}

// Computes one row of one system. Executed by one warp.
__device__ __forceinline__ void add_row(real* matrix, const real* gram, const real* ridge, real scale, int row,
                                        int n_slots, int lane) {
    constexpr int64 STRIDE = int64(RANK) * RANK;
    const int64 start = int64(row) * RANK;
    // Whole chunks, then the rest up to the diagonal: elements above it may be uninitialized.
    const int whole = ALIGNED ? row / VECTOR * VECTOR : 0;
#pragma unroll 1
    for (int column = lane * VECTOR; column < whole; column += WARP * VECTOR) {
        Chunk sum = sum_slots_of_chunk(matrix + start + column, n_slots, STRIDE);
        if constexpr (HAS_GRAM) {
            const Chunk more = *reinterpret_cast<const Chunk*>(gram + start + column);
#pragma unroll
            for (int e = 0; e < VECTOR; e++) sum.element[e] += more.element[e];
        }
        *reinterpret_cast<Chunk*>(matrix + start + column) = sum;
    }
#pragma unroll 1
    for (int column = whole + lane; column <= row; column += WARP) {
        real sum = sum_slots(matrix + start + column, n_slots, STRIDE);
        if constexpr (HAS_GRAM) sum += gram[start + column];
        if (column == row) sum += scale * ridge[row];
        matrix[start + column] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
complete(real* __restrict__ matrices, real* __restrict__ rhs, const int64* __restrict__ slots,
         const real* __restrict__ gram, const real* __restrict__ ridge, const real* __restrict__ scale) {
    const int64 system = blockIdx.x, first = slots[system];
    const int n_slots = int(slots[system + 1] - first);
    if (n_slots == 0) return;
    real* const matrix = matrices + first * RANK * RANK;
    const int part = blockIdx.y, thread = part * THREADS + threadIdx.x;
    const int lane = threadIdx.x % WARP, warp = thread / WARP;
    if (n_slots > 1 || HAS_GRAM) {
#pragma unroll 1
        for (int row = warp; row < RANK; row += PARTS * WARPS)
            add_row(matrix, gram, ridge, scale[system], row, n_slots, lane);
    } else {
        for (int row = thread; row < RANK; row += PARTS * THREADS)
            matrix[int64(row) * RANK + row] += scale[system] * ridge[row];
    }
    if (n_slots > 1)
        for (int row = thread; row < RANK; row += PARTS * THREADS)
            rhs[first * RANK + row] = sum_slots(rhs + first * RANK + row, n_slots, RANK);
}
