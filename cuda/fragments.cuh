// fragments.cuh - symmetric products A += V^T V on tensor cores, with the operands of both sides from the same loads.
//
// A system of rank f is cut into 16 x 16 blocks (i, j), j <= i. Of 8 rows k of V (tf32; 16 for 16-bit types) in shared
// memory, a thread loads of each block b the values V[k][16 b + 8 half + g], k = t + 4 step, where g = lane / 4,
// t = lane % 4. In mma.sync's layouts these are at once the fragment of V^T (rows of A) and, half by half, that of V
// (columns of A): nothing is loaded or converted twice. The order of k inside a product is ours to choose, so one
// pattern without bank conflicts (row stride 8 or 24 modulo 32) serves tf32 and 16-bit products.
//
// Tensor cores truncate where they add (error 2^-24 a step, always towards zero). For float32 the products of 8 rows
// are therefore summed from zero and added to the accumulators by ordinary, rounded additions.
#include "common.cuh"

// How V is represented: float32 as two tf32 parts (3 products) or two bf16 parts (3 products, error near 1e-5), or one
// part in a lower precision.
enum Precision { FLOAT32 = 0, BF16X3 = 1, TF32 = 2, BF16 = 3, FLOAT16 = 4 };

constexpr int BLOCK = 16;       // rows and columns of a block
constexpr int BLOCK_HALVES = 2; // a block is two m16n8 tiles side by side

struct Tile {
    float value[BLOCK_HALVES][4]; // [half][q]: row g + 8 (q / 2), column 8 half + 2 t + q % 2
};

// ---------------------------------------------------------------------------------------------- instructions

// d += A B, A (16 x 8) and B (8 x 8) in tf32: the low 13 bits of the operands are ignored.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(HYBRIDMF_EMULATE)
    emulator::mma_tf32(d, a, b0, b1);
#elif HAS_ASYNC_COPY
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// d += A B, A (16 x 16) and B (16 x 8) in bf16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(HYBRIDMF_EMULATE)
    emulator::mma_16bit<true>(d, a, b0, b1);
#elif HAS_ASYNC_COPY
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// d += A B, A (16 x 16) and B (16 x 8) in float16.
__device__ __forceinline__ void mma_float16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(HYBRIDMF_EMULATE)
    emulator::mma_16bit<false>(d, a, b0, b1);
#elif HAS_ASYNC_COPY
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Two floats rounded to bf16, `first` in the low half.
__device__ __forceinline__ unsigned pack_bf16(float first, float second) {
#if defined(HYBRIDMF_EMULATE)
    return emulator::to_bf16(first) | emulator::to_bf16(second) << 16;
#elif HAS_ASYNC_COPY
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
#else
    return 0;
#endif
}

// Two floats rounded to float16, `first` in the low half.
__device__ __forceinline__ unsigned pack_float16(float first, float second) {
#if defined(HYBRIDMF_EMULATE)
    return emulator::to_float16(first) | emulator::to_float16(second) << 16;
#elif HAS_ASYNC_COPY
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
#else
    return 0;
#endif
}

// ---------------------------------------------------------------------------------------------- fragments

// Rows of V that one product takes.
__host__ __device__ constexpr int product_rows(int precision) { return precision == FLOAT32 || precision == TF32 ? 8 : 16; }

// ROWS rows of one block of V, as a thread holds them: value[step][half] = V[t + 4 step][16 b + 8 half + g].
template <int ROWS> struct Raw {
    float value[ROWS / 4][BLOCK_HALVES];
};

template <int ROWS, int STRIDE> __device__ __forceinline__ Raw<ROWS> load_raw(const float* rows, int block, int lane) {
    const float* corner = rows + lane % 4 * STRIDE + block * BLOCK + lane / 4;
    Raw<ROWS> raw;
#pragma unroll
    for (int step = 0; step < ROWS / 4; step++)
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++) raw.value[step][half] = corner[4 * step * STRIDE + 8 * half];
    return raw;
}

template <int PRECISION> struct Fragment {
    static constexpr int ROWS = product_rows(PRECISION);
    static constexpr int PARTS = PRECISION == FLOAT32 || PRECISION == BF16X3 ? 2 : 1;  // high, low
    unsigned part[PARTS][4];

    __device__ __forceinline__ void set(const Raw<ROWS>& raw) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if constexpr (ROWS == 8) {  // register k: step k / 2, half k % 2
                const float value = raw.value[k / 2][k % 2];
                // rounded to nearest, so that what is lost has no sign of its own; tf32 operands end at bit 13
                const unsigned rounded = __float_as_uint(value) + 0x1000u;
                if constexpr (PARTS == 2) {
                    part[0][k] = rounded & 0xffffe000u;
                    part[PARTS - 1][k] = __float_as_uint(value - __uint_as_float(rounded & 0xffffe000u));
                } else {
                    part[0][k] = rounded;
                }
            } else {  // register k: steps 2 (k / 2) and the next, half k % 2
                const float first = raw.value[k / 2 * 2][k % 2], second = raw.value[k / 2 * 2 + 1][k % 2];
                if constexpr (PRECISION == FLOAT16) {
                    part[0][k] = pack_float16(first, second);
                } else {
                    const unsigned high = pack_bf16(first, second);
                    part[0][k] = high;
                    if constexpr (PARTS == 2)
                        part[PARTS - 1][k] = pack_bf16(first - __uint_as_float(high << 16),
                                                       second - __uint_as_float(high & 0xffff0000u));
                }
            }
        }
    }
};

template <int PRECISION>
__device__ __forceinline__ void multiply_part(float (&d)[BLOCK_HALVES][4], const unsigned (&a)[4], const unsigned (&b)[4]) {
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++) {
        if constexpr (PRECISION == FLOAT32 || PRECISION == TF32) mma_tf32(d[half], a, b[half], b[2 + half]);
        else if constexpr (PRECISION == FLOAT16) mma_float16(d[half], a, b[half], b[2 + half]);
        else mma_bf16(d[half], a, b[half], b[2 + half]);
    }
}

// tile += A B (SUBTRACT: -=) over the rows of one product, small products first.
template <int PRECISION, bool SUBTRACT = false>
__device__ __forceinline__ void multiply(Tile& tile, const Fragment<PRECISION>& a, const Fragment<PRECISION>& b) {
    if constexpr (PRECISION == FLOAT32) {
        float sum[BLOCK_HALVES][4] = {};
        multiply_part<PRECISION>(sum, a.part[1], b.part[0]);
        multiply_part<PRECISION>(sum, a.part[0], b.part[1]);
        multiply_part<PRECISION>(sum, a.part[0], b.part[0]);
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) tile.value[half][q] += SUBTRACT ? -sum[half][q] : sum[half][q];
    } else {
        static_assert(!SUBTRACT, "factorizations are in float32");
        if constexpr (Fragment<PRECISION>::PARTS == 2) {
            multiply_part<PRECISION>(tile.value, a.part[1], b.part[0]);
            multiply_part<PRECISION>(tile.value, a.part[0], b.part[1]);
        }
        multiply_part<PRECISION>(tile.value, a.part[0], b.part[0]);
    }
}
