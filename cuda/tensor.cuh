// tensor.cuh - a warp's products d += A B on tensor cores: A has 16 rows, B 8 columns, sums are in float32.
//
// With g = lane / 4 and t = lane % 4, d[q] is row g + 8 (q / 2), column 2 t + q % 2. In tf32 a lane holds rows g and g + 8 of
// A at column t, then at t + 4, and column g of B at rows t and t + 4. Tensor cores truncate their sums.
//
// synchronization: products exchange registers only and order no memory. All lanes of a warp execute each product and each
//         `load_operand`: conditions around them are the same in all lanes. `load_operand` reads rows that other threads may have
//         written: a barrier that the warp reaches separates it from these writes, and from later ones.
#pragma once
#include "common.cuh"

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

// A value as two tf32 parts: high is rounded to nearest, low truncated to within 2^-22 of the value or, if ROUNDED, to nearest.
struct Tf32Parts { unsigned high, low; };

template <bool ROUNDED = false> __device__ __forceinline__ Tf32Parts split_tf32(float value) {
    constexpr unsigned HALF = 0x1000;  // of the last place of tf32
    const unsigned high = (__float_as_uint(value) + HALF) & 0xffffe000u;
    return {high, __float_as_uint(value - __uint_as_float(high)) + (ROUNDED ? HALF : 0)};
}

// ---------------------------------------------------------------------------------------------- float16 operands

// Two pairs of float16: a b + c.
__device__ __forceinline__ unsigned multiply_add_float16(unsigned a, unsigned b, unsigned c) {
#if defined(HYBRIDMF_EMULATE)
    return emulator::fma_float16(a, b, c);
#elif HAS_ASYNC_COPY
    unsigned sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#else
    return 0;
#endif
}

// Two pairs of bf16: a b + c.
__device__ __forceinline__ unsigned multiply_add_bf16(unsigned a, unsigned b, unsigned c) {
#if defined(HYBRIDMF_EMULATE)
    auto one = [](unsigned x, unsigned y, unsigned z) {
        return emulator::to_bf16(emulator::from_16bit(x & 0xffffu, true) * emulator::from_16bit(y & 0xffffu, true) +
                                 emulator::from_16bit(z & 0xffffu, true));
    };
    return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
#elif HAS_ASYNC_COPY
    unsigned sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#else
    return 0;
#endif
}

constexpr unsigned NEGATIVE_ZEROS = 0x80008000u;  // a pair; x + -0 is x for all x

// Negates both values of a pair of float16 or bf16. The assembler folds it into the instruction that reads it.
template <bool AS_BF16> __device__ __forceinline__ unsigned negate_pair(unsigned a) {
#if defined(HYBRIDMF_EMULATE) || !HAS_ASYNC_COPY
    return a ^ NEGATIVE_ZEROS;
#else
    unsigned negative;
    if constexpr (AS_BF16) asm("neg.bf16x2 %0, %1;" : "=r"(negative) : "r"(a));
    else asm("neg.f16x2 %0, %1;" : "=r"(negative) : "r"(a));
    return negative;
#endif
}

// Layout of rows of 16-bit values in shared memory, of which `load_operand` reads 8 at a time without bank conflicts: the 16-byte
// halves of 32 bytes are swapped in every second four rows, and rows start 32 or 96 bytes modulo 128 after the previous one.
// Padding by 16 bytes would do, too, but then each asynchronous copy of a row that is not aligned to 32 bytes moves all its
// sectors from the L2 cache twice.
__host__ __device__ constexpr int operand_stride(int bytes) { return bytes % 64 == 0 ? bytes + 32 : bytes; }
__host__ __device__ constexpr int swapped_half(int row, int half) { return half ^ (row >> 2 & 1); }

// Loads the operand of 16 rows k and 16 columns m of 16-bit values in this layout, rows `stride` values apart, read down the
// columns. AS_COLUMNS: for B, (k, m = 8 half + g) in r[2 half] for k = 2 t, 2 t + 1 and in r[2 half + 1] for k + 8; otherwise
// for A, in r[half] and r[2 + half]. `corner` is aligned to 32 bytes.
template <bool AS_COLUMNS>
__device__ __forceinline__ void load_operand(unsigned (&r)[4], const unsigned short* corner, int stride, int lane) {
#if defined(HYBRIDMF_EMULATE)
    for (int q = 0; q < 4; q++) {
        const int half = AS_COLUMNS ? q / 2 : q % 2, k = lane % 4 * 2 + 8 * (AS_COLUMNS ? q % 2 : q / 2);
        const unsigned short* first = corner + k * stride + 8 * swapped_half(k, half) + lane / 4;
        r[q] = first[0] | unsigned(first[stride]) << 16;
    }
#elif HAS_ASYNC_COPY
    const int q = lane / 8, half = AS_COLUMNS ? q / 2 : q % 2, k = lane % 8 + 8 * (AS_COLUMNS ? q % 2 : q / 2);
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(corner + k * stride + 8 * swapped_half(k, half)));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
#endif
}
