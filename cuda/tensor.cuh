// tensor.cuh - a warp's products d += A B on tensor cores: A has 16 rows, B 8 columns, sums are in float32.
//
// With g = lane / 4 and t = lane % 4, d[q] is row g + 8 (q / 2), column 2 t + q % 2. In tf32 a lane holds rows g and g + 8 of
// A at column t, then at t + 4, and column g of B at rows t and t + 4. Tensor cores truncate their sums.
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

// ---------------------------------------------------------------------------------------------- float16 operands

// Two pairs of float16: a b, and a b + c.
__device__ __forceinline__ unsigned multiply_float16(unsigned a, unsigned b) {
#if defined(HYBRIDMF_EMULATE)
    return emulator::fma_float16(a, b, 0x80008000u);
#elif HAS_ASYNC_COPY
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#else
    return 0;
#endif
}

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

// Negates both values of a pair.
__device__ __forceinline__ unsigned negate_float16(unsigned a) {
#if defined(HYBRIDMF_EMULATE) || !HAS_ASYNC_COPY
    return a ^ 0x80008000u;
#else
    unsigned negative;
    asm("neg.f16x2 %0, %1;" : "=r"(negative) : "r"(a));  // the assembler folds it into the instruction that reads it
    return negative;
#endif
}

// Loads the operand of 16 rows k and 16 columns m of 16-bit values in shared memory, rows `stride` values apart, read down the
// columns. AS_COLUMNS: for B, (k, m = 8 half + g) in r[2 half] for k = 2 t, 2 t + 1 and in r[2 half + 1] for k + 8; otherwise
// for A, in r[half] and r[2 + half]. Rows start at multiples of 16 bytes.
template <bool AS_COLUMNS>
__device__ __forceinline__ void load_operand(unsigned (&r)[4], const unsigned short* corner, int stride, int lane) {
#if defined(HYBRIDMF_EMULATE)
    for (int q = 0; q < 4; q++) {
        const int half = AS_COLUMNS ? q / 2 : q % 2, k = lane % 4 * 2 + 8 * (AS_COLUMNS ? q % 2 : q / 2);
        const unsigned short* first = corner + k * stride + 8 * half + lane / 4;
        r[q] = first[0] | unsigned(first[stride]) << 16;
    }
#elif HAS_ASYNC_COPY
    const int q = lane / 8, half = AS_COLUMNS ? q / 2 : q % 2, k = lane % 8 + 8 * (AS_COLUMNS ? q % 2 : q / 2);
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(corner + k * stride + 8 * half));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
#endif
}
