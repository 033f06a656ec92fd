// draw.cu - initial factors on the device: uniform numbers addressed by (key, side, row, column), bit-identical to
//           hybridmf/native/_draw.pyx
// grid  : any number of blocks     block : THREADS; a thread draws four columns of a row
// shapes: table (n_rows, width)  scales (n_rows,)  rows (n_rows,) with HAS_ROWS
// result: row k has the first `rank` columns of row rows[k], or first + k without `rows`; then a one if `ones`, then zeros
// traffic: the table once out
// source: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011
// synchronization: none; one thread writes an element.
#include "common.cuh"

#ifndef HAS_ROWS
#define HAS_ROWS 0
#endif
#ifndef THREADS
#define THREADS 256
#endif

constexpr int ROUNDS = 10, BITS = 24;  // BITS of a float's mantissa

struct Words {
    unsigned word[4];
};

__device__ __forceinline__ Words philox(Words counter, unsigned key0, unsigned key1) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const unsigned long long a = 0xD2511F53ull * counter.word[0], b = 0xCD9E8D57ull * counter.word[2];
        counter = {{unsigned(b >> 32) ^ counter.word[1] ^ key0, unsigned(b), unsigned(a >> 32) ^ counter.word[3] ^ key1,
                    unsigned(a)}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

struct Shape {
    int64 n_rows, first;  // `first`: index of the first row, without `rows`
    int width, rank;
};

struct Numbers {
    unsigned side, key0, key1;
    int is_signed, ones;
};

extern "C" __global__ void __launch_bounds__(THREADS)
draw_rows(real* __restrict__ table, const float* __restrict__ scales, const int64* __restrict__ rows, Shape shape,
          Numbers numbers) {
    const auto [n_rows, first, width, rank] = shape;
    const auto [side, key0, key1, is_signed, ones] = numbers;
    const int quads = ceil_div(width, 4), shift = is_signed ? 1 << (BITS - 1) : 0;
    const int64 stride = int64(gridDim.x) * THREADS;
    for (int64 at = int64(blockIdx.x) * THREADS + threadIdx.x; at < n_rows * quads; at += stride) {
        const int64 k = at / quads, row = HAS_ROWS ? rows[k] : first + k;
        const int column = int(at - k * quads) * 4;
        const float unit = scales[k] * (is_signed ? 2.0f : 1.0f) / (1 << BITS);  // powers of two: exact
        Words drawn = {};
        if (unit != 0 && column < rank)
            drawn = philox({{unsigned(column / 4), unsigned(row), unsigned(row >> 32), side}}, key0, key1);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            if (column + w >= width) break;
            // the upper bits as an odd number below 2^24: exact in float32, and never zero
            const float value = unit != 0 ? float(int(drawn.word[w] >> 8 | 1) - shift) * unit : 0.0f;
            table[k * width + column + w] = column + w < rank ? real(value) : real(ones && column + w == rank);
        }
    }
}
