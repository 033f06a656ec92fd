// fragments.cuh - symmetric products A += V^T V on tensor cores, with the operands of both sides from the same loads.
//
// A system of rank f is cut into 16 x 16 blocks (i, j), j <= i. For 8 rows k of V (tf32; 16 for 16-bit types) in shared
// memory, a thread loads the values V[k][16 b + 8 half + g], k = t + 4 step, of each block b, where g = lane / 4,
// t = lane % 4. In mma.sync's layouts these values are both the fragment of V^T (rows of A) and, half by half, that of V
// (columns of A): nothing is loaded or converted twice. The order of k inside a product is arbitrary, so one pattern
// without bank conflicts (row stride 8 or 24 modulo 32) serves tf32 and 16-bit products.
//
// Tensor cores truncate their sums (error 2^-24 per step, always towards zero). For float32, they therefore sum only a few
// rows at a time; ordinary, rounded additions add these sums to the accumulators.
//
// synchronization: products and shuffles order no memory. A barrier that the caller's warp reaches separates `load_raw` from the
//         writes of these rows by other threads, and from later ones.
#include "common.cuh"
#include "tensor.cuh"

// Representation of V. FLOAT32: a table of two float16 parts (22 bits, 3 products; split.cu, `accumulate_parts` in system.cuh),
// which needs no conversion here; BF16X3: the same with bf16 parts (error near 1e-5). FLOAT32_WIDE, for rows of factors whose
// magnitudes exceed the range of float16 parts: two tf32 parts (22 bits and float32's range at half the speed). BF16: a table in
// bf16. Others: one part of each factor, converted when it is multiplied.
enum Precision { FLOAT32 = 0, BF16X3 = 1, TF32 = 2, BF16 = 3, FLOAT16 = 4, FLOAT32_WIDE = 5 };

__host__ __device__ constexpr bool in_tf32(int precision) { return precision == TF32 || precision == FLOAT32_WIDE; }

constexpr int BLOCK = 16;       // rows and columns of a block
constexpr int BLOCK_HALVES = 2; // a block is two m16n8 tiles side by side

struct Tile {
    float value[BLOCK_HALVES][4]; // [half][q]: row g + 8 (q / 2), column 8 half + 2 t + q % 2
};

// Row and column, inside a block, of element q of a half of a tile.
__device__ __forceinline__ int tile_row(int lane, int q) { return lane / 4 + 8 * (q / 2); }
__device__ __forceinline__ int tile_column(int lane, int half, int q) { return 8 * half + lane % 4 * 2 + q % 2; }

// Whether element k = 4 half + q of block (i, j) of a symmetric matrix belongs to its lower triangle, as far as a warp stores it:
// to the rows of the matrix and, on the diagonal, not to the quarter above.
__device__ __forceinline__ bool is_stored(int rank, int i, int j, int k, int lane) {
    return i * BLOCK + tile_row(lane, k % 4) < rank && !(i == j && k / 2 == 2);
}

// ---------------------------------------------------------------------------------------------- conversions

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

// The floats in the low and the high half of a pair of float16.
__device__ __forceinline__ float2 unpack_float16(unsigned packed) {
#if defined(HYBRIDMF_EMULATE)
    return make_float2(emulator::from_16bit(packed & 0xffffu, false), emulator::from_16bit(packed >> 16, false));
#elif HAS_ASYNC_COPY
    float2 pair;
    asm("{ .reg .f16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high; }"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(packed));
    return pair;
#else
    return make_float2(0, 0);
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

// ---------------------------------------------------------------------------------------------- two 16-bit parts

// Parts of two values in one register each: value = high + low, in float16 (FLOAT32) or bf16 (BF16X3).
template <int PRECISION> __device__ __forceinline__ void split(unsigned& high, unsigned& low, float first, float second) {
    if constexpr (PRECISION == FLOAT32) {
        high = pack_float16(first, second);
        const float2 rounded = unpack_float16(high);
        low = pack_float16(first - rounded.x, second - rounded.y);
    } else {
        high = pack_bf16(first, second);
        low = pack_bf16(first - __uint_as_float(high << 16), second - __uint_as_float(high & 0xffff0000u));
    }
}

// a b + c of two pairs of parts.
template <int PRECISION> __device__ __forceinline__ unsigned multiply_add_parts(unsigned a, unsigned b, unsigned c) {
    return PRECISION == FLOAT32 ? multiply_add_float16(a, b, c) : multiply_add_bf16(a, b, c);
}

// high + low <- weight * (high + low). The rounding error of the product of the high parts goes into the low part.
template <int PRECISION>
__device__ __forceinline__ void weigh(unsigned& high, unsigned& low, unsigned weight_high, unsigned weight_low) {
    const unsigned product = multiply_add_parts<PRECISION>(weight_high, high, NEGATIVE_ZEROS);
    const unsigned lost = multiply_add_parts<PRECISION>(weight_high, high, negate_pair<PRECISION != FLOAT32>(product));
    low = multiply_add_parts<PRECISION>(weight_low, high, multiply_add_parts<PRECISION>(weight_high, low, lost));
    high = product;
}

// d += A B of parts.
template <int PRECISION>
__device__ __forceinline__ void multiply_parts(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (PRECISION == FLOAT32) mma_float16(d, a, b0, b1);
    else mma_bf16(d, a, b0, b1);
}

// ---------------------------------------------------------------------------------------------- fragments

// Rows of V per product.
__host__ __device__ constexpr int product_rows(int precision) { return in_tf32(precision) ? 8 : 16; }

// A thread's values of ROWS rows of one block of V: value[step][half] = V[t + 4 step][16 b + 8 half + g].
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
    static constexpr int PARTS = PRECISION == FLOAT32_WIDE ? 2 : 1;  // high, low
    unsigned part[PARTS][4];                   // row operand
    unsigned pair[PARTS][BLOCK_HALVES][2];     // the same values as the column operand, in adjacent registers for mma

    __device__ __forceinline__ void set(const Raw<ROWS>& raw, int lane) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if constexpr (in_tf32(PRECISION)) {  // register k: step k / 2, half k % 2
                const float value = raw.value[k / 2][k % 2];
                // rounded to nearest, so that the rounding error is unbiased; tf32 operands end at bit 13
                const unsigned rounded = __float_as_uint(value) + 0x1000u;
                part[0][k] = rounded & 0xffffe000u;
                if constexpr (PARTS == 2) part[PARTS - 1][k] = __float_as_uint(value - __uint_as_float(part[0][k]));
                pair[0][k % 2][k / 2] = rounded;
            } else {  // register k: steps 2 (k / 2) and the next, half k % 2
                part[0][k] = pack_float16(raw.value[k / 2 * 2][k % 2], raw.value[k / 2 * 2 + 1][k % 2]);
                pair[0][k % 2][k / 2] = copy_of(part[0][k], lane);
            }
            if constexpr (PARTS == 2) pair[PARTS - 1][k % 2][k / 2] = copy_of(part[PARTS - 1][k], lane);
        }
    }
};

// d += A B for one part of either operand.
template <int PRECISION>
__device__ __forceinline__ void multiply_part(float (&d)[BLOCK_HALVES][4], const unsigned (&a)[4],
                                              const unsigned (&b)[BLOCK_HALVES][2]) {
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++) {
        if constexpr (in_tf32(PRECISION)) mma_tf32(d[half], a, b[half][0], b[half][1]);
        else mma_float16(d[half], a, b[half][0], b[half][1]);
    }
}

// One pass of a product: 0 low x high, 1 high x low, 2 high x high; small products first. Callers interleave passes over
// several tiles: a tensor core starts a product every few cycles, but its sum is ready only after some 30.
constexpr int PASSES = 3;

template <int PASS, int PRECISION>
__device__ __forceinline__ void multiply_pass(float (&d)[BLOCK_HALVES][4], const Fragment<PRECISION>& a, const Fragment<PRECISION>& b) {
    constexpr int PARTS = Fragment<PRECISION>::PARTS;
    if constexpr (PARTS == 2 || PASS == PASSES - 1)
        multiply_part<PRECISION>(d, a.part[PASS == 0 ? PARTS - 1 : 0], b.pair[PASS == 1 ? PARTS - 1 : 0]);
}
