// tensor.cuh - products of tensor cores, d += A B of a warp: A 16 rows, B 8 columns, sums in float32.
//
// With g = lane / 4 and t = lane % 4, d[q] is row g + 8 (q / 2), column 2 t + q % 2. In tf32 a lane holds rows g and g + 8 of
// A at column t, then at t + 4, and column g of B at rows t and t + 4. Tensor cores truncate where they add.
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
