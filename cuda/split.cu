// split.cu - converts a table of factors to two float16 parts, scale * value = high + low to 22 bits, to two bf16 parts
//            (16 bits), or to bf16
// grid  : blocks of THREADS threads    shapes: parts (n_rows, RANK16 + RANK16): high parts of a row, then its low parts, or
//         (n_rows, RANK16) bf16; zeros from LD on  table (n_rows, LD)  scale: of float16 parts only, a power of two that
//         brings the largest value near 2^14
// traffic: 8 bytes per element, or 6
// Runs once per half sweep, so that rows are not converted each time they are gathered. A part of a value 2^18 times smaller
// than the largest is still a normal number.
// synchronization: none; one thread reads and writes an element.
#include "fragments.cuh"

#ifndef RANK16
#define RANK16 64
#endif
#ifndef LD
#define LD RANK16
#endif
#ifndef ARITHMETIC
#define ARITHMETIC 0              // FLOAT32: float16 parts, BF16X3: bf16 parts, BF16: bf16
#endif

constexpr int PAIRS = RANK16 / 2;

extern "C" __global__ void split_table(unsigned* __restrict__ parts, const float* __restrict__ table, int64 n_rows, float scale) {
    for (int64 k = blockIdx.x * int64(blockDim.x) + threadIdx.x; k < n_rows * PAIRS; k += int64(gridDim.x) * blockDim.x) {
        const int64 row = k / PAIRS;
        const int pair = int(k % PAIRS);
        float2 value = make_float2(0, 0);
        if (2 * pair < LD) value = *reinterpret_cast<const float2*>(table + row * LD + 2 * pair);
        unsigned* const target = parts + row * (ARITHMETIC == BF16 ? PAIRS : 2 * PAIRS) + pair;
        if constexpr (ARITHMETIC == BF16) target[0] = pack_bf16(value.x, value.y);
        else split<ARITHMETIC>(target[0], target[PAIRS], value.x * scale, value.y * scale);
    }
}
