// sgd.cuh - distribution of rows of factors over lanes in stochastic gradient descent; for msgd.cu and batch_hogwild.cu.
// constants: LD       stored values of a row: the factors, then zeros up to a multiple of 16 bytes
//            FLOAT16  1: rows are stored in float16; arithmetic is in `real` nevertheless
//
// A row is loaded and stored in pieces of 16 bytes. SIZE neighbouring lanes hold it: lane k holds the pieces k, k + SIZE, ...,
// so each load of the lanes is contiguous. Updates preserve the zeros at the end of a row, so no mask is needed.
// synchronization: lanes exchange registers by shuffles, which do not order accesses to memory. A lane loads and stores the same
// pieces of a row, so its own updates need no barrier; `Writers` says whether others write the row while the kernel runs.
#pragma once
#include "common.cuh"

#ifndef LD
#define LD 64
#endif
#ifndef FLOAT16
#define FLOAT16 0
#endif

#if FLOAT16
using stored = unsigned short;
#else
using stored = real;
#endif

constexpr int VECTOR = 16 / int(sizeof(stored));  // values per piece
constexpr int VECTORS = LD / VECTOR;              // pieces per row
static_assert(LD % VECTOR == 0, "the launcher pads rows to whole pieces");
static_assert(!FLOAT16 || sizeof(real) == 4, "float16 is computed with in float32");

// Arguments of the kernels of msgd.cu.
struct Factors { stored* rows; real* bias; };  // (n, LD), (n,): rows to update; without biases, `bias` is not read
struct Walk {
    const int* indices;                // (nnz,) rows of the other side, ascending in each row
    const real* ratings;               // (nnz,)
    const int64 *begins, *ends;        // (n_rows,) entries of each row
    int first;                         // subtracted from indices: the row where the other side's factors start
};
struct Terms { real rate, keep, mean, bias_rate, bias_keep; };  // keep = 1 - rate lambda; bias_keep likewise

constexpr int GROUP = VECTORS < WARP ? power_of_two(VECTORS) : WARP;  // fewest lanes, a power of two, that can share a row

// ---------------------------------------------------------------------------------------------- float16

__device__ __forceinline__ float2 from_halves(unsigned packed) {
#ifdef HYBRIDMF_EMULATE
    return make_float2(emulator::from_16bit(packed & 0xffffu, false), emulator::from_16bit(packed >> 16, false));
#else
    float2 pair;
    asm("{ .reg .f16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high; }"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(packed));
    return pair;
#endif
}

// Two floats rounded to nearest float16, `first` in the low half.
__device__ __forceinline__ unsigned to_halves(float first, float second) {
#ifdef HYBRIDMF_EMULATE
    return emulator::to_float16(first) | emulator::to_float16(second) << 16;
#else
    unsigned packed;
#if HAS_ASYNC_COPY
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
#else  // Turing converts one value at a time
    asm("{ .reg .f16 low, high;\n cvt.rn.f16.f32 low, %1;\n cvt.rn.f16.f32 high, %2;\n mov.b32 %0, {low, high}; }"
        : "=r"(packed)
        : "f"(first), "f"(second));
#endif
    return packed;
#endif
}

// ---------------------------------------------------------------------------------------------- pieces

// Unpacks the values of one piece.
__device__ __forceinline__ void unpack(real* values, int4 piece) {
#if FLOAT16
    const unsigned pairs[4] = {unsigned(piece.x), unsigned(piece.y), unsigned(piece.z), unsigned(piece.w)};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float2 pair = from_halves(pairs[k]);
        values[2 * k] = pair.x;
        values[2 * k + 1] = pair.y;
    }
#else
    memcpy(values, &piece, sizeof(piece));
#endif
}

__device__ __forceinline__ int4 pack(const real* values) {
    int4 piece;
#if FLOAT16
    piece.x = to_halves(values[0], values[1]);
    piece.y = to_halves(values[2], values[3]);
    piece.z = to_halves(values[4], values[5]);
    piece.w = to_halves(values[6], values[7]);
#else
    memcpy(&piece, values, sizeof(piece));
#endif
    return piece;
}

// Writers of a row while the kernel runs: none (the row can stay in L1), this warp, or other multiprocessors as well (the copy in
// L1 can be stale).
enum Writers { NO_WRITER, THIS_WARP, ALL_MULTIPROCESSORS };

// Loads from L2 and, unlike __ldcg, in order with this thread's stores.
__device__ RACES_BY_DESIGN int4 load_shared_with_others(const int4* place) {
#ifdef HYBRIDMF_EMULATE
    return *place;
#else
    int4 piece;
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "l"(place)
                 : "memory");
    return piece;
#endif
}

__device__ RACES_BY_DESIGN float load_shared_with_others(const float* place) {
#ifdef HYBRIDMF_EMULATE
    return *place;
#else
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(place) : "memory");
    return value;
#endif
}

template <class T> __device__ RACES_BY_DESIGN void store_shared_with_others(T* place, T value) { *place = value; }

// The part of a row that one of SIZE lanes holds.
template <int SIZE> struct Row {
    static constexpr int PIECES = ceil_div(VECTORS, SIZE);
    static constexpr int OWNED = PIECES * VECTOR;
    static constexpr bool ALL_LANES = VECTORS % SIZE == 0;

    struct Raw { int4 piece[PIECES]; };  // as stored

    __device__ static __forceinline__ bool has(int piece, int lane) { return ALL_LANES || piece * SIZE + lane < VECTORS; }

    template <Writers WRITERS = NO_WRITER> __device__ static __forceinline__ Raw load(const stored* row, int lane) {
        Raw raw;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int4* place = reinterpret_cast<const int4*>(row) + p * SIZE + lane;
            raw.piece[p] = int4{0, 0, 0, 0};
            if (!has(p, lane)) continue;
            if (WRITERS == NO_WRITER) raw.piece[p] = __ldg(place);
            else if (WRITERS == THIS_WARP) raw.piece[p] = *place;
            else raw.piece[p] = load_shared_with_others(place);
        }
        return raw;
    }

    template <Writers WRITERS = THIS_WARP> __device__ static __forceinline__ void store(stored* row, const Raw& raw, int lane) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            int4* place = reinterpret_cast<int4*>(row) + p * SIZE + lane;
            if (!has(p, lane)) continue;
            if (WRITERS == ALL_MULTIPROCESSORS) store_shared_with_others(place, raw.piece[p]);
            else *place = raw.piece[p];
        }
    }

    __device__ static __forceinline__ void values_of(real (&values)[OWNED], const Raw& raw) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) unpack(values + p * VECTOR, raw.piece[p]);
    }

    __device__ static __forceinline__ Raw raw_of(const real (&values)[OWNED]) {
        Raw raw;
#pragma unroll
        for (int p = 0; p < PIECES; p++) raw.piece[p] = pack(values + p * VECTOR);
        return raw;
    }

    // This lane's share of the product.
    __device__ static __forceinline__ real partial_dot(const real (&a)[OWNED], const real (&b)[OWNED]) {
        real sums[2] = {0, 0};  // two chains: half the latency
#pragma unroll
        for (int k = 0; k < OWNED; k++) sums[k % 2] += a[k] * b[k];
        return sums[0] + sums[1];
    }

    // The product of two rows, the same bits in each lane.
    __device__ static __forceinline__ real dot(const real (&a)[OWNED], const real (&b)[OWNED]) {
        real sum = partial_dot(a, b);
#pragma unroll
        for (int distance = SIZE / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        return sum;
    }
};

// Largest value over the groups of a warp, which must execute the same number of steps because of their shuffles.
template <int SIZE> __device__ __forceinline__ int most_of_groups(int value) {
#pragma unroll
    for (int distance = WARP / 2; distance >= SIZE; distance /= 2)
        value = max(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
}

// COUNT values of consecutive entries, spread over the SIZE lanes of a group: lane j % SIZE holds entry j.
template <class T, int COUNT, int SIZE> struct Spread {
    static constexpr int SLOTS = ceil_div(COUNT, SIZE);
    T slot[SLOTS];

    // Entries at and after `count` get `otherwise`.
    __device__ __forceinline__ void load(const T* first, int64 count, int lane, T otherwise) {
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const int j = s * SIZE + lane;
            slot[s] = j < COUNT && j < count ? first[j] : otherwise;
        }
    }

    // Entry j, in all lanes; j is a constant after unrolling.
    __device__ __forceinline__ T get(int j) const { return __shfl_sync(FULL_WARP, slot[j / SIZE], j % SIZE, SIZE); }
};
