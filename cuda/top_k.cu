// top_k.cu - the n items with the highest users @ items.T of each user, ties to the lower item, without seen items
//
// n <= KEPT <= 128, rank <= 512: no users x items matrix. Items are sorted by descending norm and cut into groups of 32:
//   mark_seen    marks in words[u][g] the items of group g that user u has seen
//   group_max    replaces words[u][g] by the largest score of an unseen item of g, on tensor cores: from int8 factors (BYTES),
//                whose sums are exact integers, or from float16 factors with float32 sums
//   prune        after the groups of largest norm: finds the first group that |x| |y| keeps below a user's n-th best
//   select_best  screens the groups that can hold one of the n best, by descending bounds: float16 items times x in float32;
//                scores items that can still be among the best exactly, and sorts them
// Rounding errors are bounded, not estimated. Both sides are scaled, the rounding error of each row in int8 or float16 is
// measured, and by Cauchy-Schwarz a score differs from its approximation by at most
//   slack = |x - x~| |y| + |x~| |y - y~| + (rounding of the sums and of the exact score) |x| |y|,
// some 5e-4 |x| |y| in float16 and 1.6e-2 |x| |y| in int8 at rank 128, where scores of random factors spread by 0.09 |x| |y|.
// If the maxima of n groups, less slack, reach t, then so does the n-th best score; a group whose maximum plus slack is below t
// holds none of the best. An item of such a group is screened by |x| |y - y16| + 2 rank eps |x| |y|, for plain float32 sums.
// With BYTES, results do not depend on the rounding of tensor cores: 8-bit products and their sums are below 2^24, and exact.
// NVIDIA does not specify the rounding of float16 sums; TENSOR_ERROR allows 2.7 times Turing's truncation. The returned score
// is one chain of fused multiply-adds in `real` over the factors in order: results do not depend on batch, group, pruning
// or tensor cores.
//
// Otherwise: score_rows writes the same chains for a batch of users, drop_seen removes the items they have seen, sort_rows
// finds the n-th best by radix selection and sorts the items that do not rank below it.
//
// shapes : users (n_users, rank)  panels (n_groups, vectors, 32, VECTOR)  user_operands (n_users, ROW)
//          item_operands (n_groups, ROW / 8, 32, 8), item_halves the same in float16  words (n_users, n_groups)
//          groups (n_groups, 2): largest norm, and residual of the operands
//          steps (n_groups, 2): the value of 1 in the operands, and residual of the halves
//          user_bounds (n_users, 4): norm, by_norm, by_residual of UserBound, 256 exponent + multiplier
//          item_ids, ascending_ids (n_items,)  positions (all items,): packed place or -1
//          seen_ptr (n_users + 1,), seen_ids ascending in each row
//          n_groups is a multiple of OCTET; n_items are packed, the items after them are zero and never chosen
// synchronization: what a kernel reads, earlier kernels of the stream wrote, except as follows.
//          group_max: one warp reads and writes each word; tile t is in buffer t % 2, copied after a barrier before which all
//          warps have read tile t - 2, and read after the next one, before which each thread waits for its copies. A warp's trays
//          alternate in the same way; its lanes overwrite words after __syncwarp, since four lanes read each.
//          select_best: the lanes of a warp share lists, with __syncwarp after writes and after reads; lengths and thresholds are
//          equal in all lanes, hence so are the branches. mark_seen: __syncwarp between clearing and atomicOr.
//          score_rows, sort_rows: block barriers after writes and after reads of shared memory and of the list; atomics assign
//          slots in any order, and the list is sorted afterwards.
// flops  : 64 PADDED n_groups per user; select_best screens some n groups per user (float16) or 2 n (int8)
// traffic: words are moved five times, 20 n_groups bytes per user; a screened group is 64 rank bytes
// floor  : H200, rank 128, n 10, estimated. 384,546 items: float16 246 ns per user (400 TFLOP/s by mma.sync), int8 123; words 60
//          (4 TB/s), groups screened again 25 and 45 ns
#include "common.cuh"

#ifndef PADDED
#define PADDED 64            // for group_max: the rank rounded up to a multiple of 16; of 32 with BYTES
#endif
#ifndef BYTES
#define BYTES 0              // for group_max: 1 for int8, 0 for float16
#endif
#ifndef KEPT
#define KEPT 32              // for prune and select_best: the largest n
#endif
// A warp keeps the factors of its users in ROW * USERS_PER_WARP / 64 registers; its scores take USERS_PER_WARP registers.
#ifndef USERS_PER_WARP
#define USERS_PER_WARP (PADDED <= 128 ? 64 : PADDED <= 256 ? 32 : 16)
#endif
#ifndef TILE_GROUPS
#define TILE_GROUPS (PADDED <= 128 ? 2 : 1)  // groups that are copied to shared memory together
#endif

using half_bits = unsigned short;  // a float16
using operand_bits = unsigned short;  // a float16, or two int8

constexpr int GROUP = WARP;        // items: one per lane where scores are exact
constexpr int OCTET = 8;           // groups whose words are moved together: 32 bytes of each user
constexpr int ROW_WARPS = 4;       // per block of kernels with a warp per user
constexpr int WARPS = 4;           // per block of group_max
constexpr int BLOCK_USERS = WARPS * USERS_PER_WARP;

constexpr int VECTOR = 16 / sizeof(real);
struct alignas(16) Vector {
    real value[VECTOR];
};

constexpr int ROW = BYTES ? PADDED / 2 : PADDED;  // operand_bits per row
static_assert(ROW % 16 == 0 && PADDED <= 512, "whole steps of tensor cores; more do not fit in registers");
static_assert(USERS_PER_WARP == 16 || USERS_PER_WARP == 32 || USERS_PER_WARP == 64, "see fold_quads");
static_assert(OCTET % TILE_GROUPS == 0, "octets end with a tile");
static_assert(KEPT >= 32 && KEPT <= 128 && (KEPT & (KEPT - 1)) == 0, "lists are sorted in powers of 2");

// ---------------------------------------------------------------------------------------------- numbers

template <class T> struct Arithmetic;
template <> struct Arithmetic<float> {  // LEAST is a normal number: CuPy compiles with -ftz=true
    static constexpr double EPSILON = 1.1920928955078125e-07, LEAST = 1.1754943508222875e-38;
    static constexpr float LARGEST = 3.402823466e+38f;
};
template <> struct Arithmetic<double> {
    static constexpr double EPSILON = 2.220446049250313e-16, LEAST = 4.9406564584124654e-324;
    static constexpr double LARGEST = 1.7976931348623157e+308;
};

constexpr double TENSOR_ERROR = 1.0 / (1 << 21);   // per product of a sum on tensor cores: 2.7 times Turing's truncation
constexpr double COMPARISON_ERROR = 1.0 / (1 << 20);  // of bounds and thresholds, which are float32
constexpr float SMALLEST = 7.9e-31f;               // 2^-100, above everything that underflows in scaled float32
constexpr int LARGEST_EXPONENT = 1000;             // scales stay in double's range
constexpr int NO_ITEM = 0x7fffffff;
constexpr int MOST_BYTE = 127;                     // largest int8 of an operand

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

__device__ __forceinline__ half_bits to_half(float value) {
#if defined(HYBRIDMF_EMULATE)
    return half_bits(emulator::to_float16(value));
#else
    half_bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

__device__ __forceinline__ float from_half(half_bits bits) {
#if defined(HYBRIDMF_EMULATE)
    return emulator::from_16bit(bits, false);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

__device__ __forceinline__ float2 from_half_pair(unsigned pair) {
    return {from_half(half_bits(pair & 0xffffu)), from_half(half_bits(pair >> 16))};
}

// ---------------------------------------------------------------------------------------------- rows as operands

// Exponent e such that a row with this largest factor, divided by 2^e, lies in [-1, 1].
__device__ __forceinline__ int exponent_of(double largest) {
    int exponent = 0;
    frexp(largest, &exponent);
    return max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, exponent));
}

// Largest absolute value of a row, in every lane.
__device__ __forceinline__ double largest_of(const real* row, int rank, int lane) {
    double largest = 0;
    for (int k = lane; k < rank; k += WARP) largest = max(largest, double(row[k] < 0 ? -row[k] : row[k]));
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
    return largest;
}

struct RowSize {
    float norm, residual;  // upper bounds of the norms of the scaled row and of its rounding error
};

// Rounds row * scale: round(k, value) stores factor k and returns the stored value. Works in float64, since squares of small
// factors underflow in float32.
template <class Round>
__device__ __forceinline__ RowSize round_row(const real* row, int rank, int padded, double scale, int lane, Round round) {
    double norm = 0, residual = 0;
    for (int k = lane; k < padded; k += WARP) {
        const double value = k < rank ? double(row[k]) * scale : 0.0, lost = value - round(k, value);
        norm += value * value;
        residual += lost * lost;
    }
    constexpr double UP = 1.0 + COMPARISON_ERROR;
    return {float(sqrt(warp_sum(norm)) * UP), float(sqrt(warp_sum(residual)) * UP)};
}

__device__ __forceinline__ double round_to_half(half_bits* target, double value) {
    *target = to_half(float(value));
    return double(from_half(*target));
}

__device__ __forceinline__ double round_to_byte(signed char* target, double value) {
    const double nearest = max(-double(MOST_BYTE), min(double(MOST_BYTE), rint(value)));
    *target = (signed char)(nearest);
    return nearest;
}

// Place of factor k of an item in operands or halves: pieces of 16 bytes; the same piece of a group's items is contiguous.
template <int PER_PIECE> __device__ __forceinline__ int64 packed_place(int place, int padded, int k) {
    return ((int64(place / GROUP) * (padded / PER_PIECE) + k / PER_PIECE) * GROUP + place % GROUP) * PER_PIECE + k % PER_PIECE;
}

// norms[r] = |rows[r]|
extern "C" __global__ void __launch_bounds__(ROW_WARPS * WARP)
row_norms(double* __restrict__ norms, const real* __restrict__ rows, int n_rows, int rank) {
    const int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    if (row >= n_rows) return;
    const real* factors = rows + int64(row) * rank;
    const int exponent = exponent_of(largest_of(factors, rank, lane));
    const double scale = ldexp(1.0, -exponent);
    double sum = 0;
    for (int k = lane; k < rank; k += WARP) sum += (factors[k] * scale) * (factors[k] * scale);
    sum = warp_sum(sum);
    if (lane == 0) norms[row] = ldexp(sqrt(sum), exponent);
}

// panels[g][v][i] = factors VECTOR v to VECTOR v + VECTOR - 1 of item order[GROUP g + i]: a warp reads them contiguously
extern "C" __global__ void pack_panels(real* __restrict__ panels, const real* __restrict__ items,
                                       const int* __restrict__ order, int n_items, int n_groups, int rank) {
    const int vectors = ceil_div(rank, VECTOR);
    const int64 piece = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (piece >= int64(n_groups) * vectors * GROUP) return;
    const int64 place = piece / GROUP / vectors * GROUP + piece % GROUP;
    const int first = int(piece / GROUP % vectors) * VECTOR;
    Vector packed;
#pragma unroll
    for (int k = 0; k < VECTOR; k++)
        packed.value[k] = place < n_items && first + k < rank ? items[int64(order[place]) * rank + first + k] : real(0);
    reinterpret_cast<Vector*>(panels)[piece] = packed;
}

// item_halves <- items[order] * scale; bytes <- the same in steps of each group, if `byte_row`, the padded rank, is not 0. The
// file header describes groups and steps. One warp per group.
extern "C" __global__ void __launch_bounds__(ROW_WARPS * WARP)
prepare_items(half_bits* __restrict__ item_halves, signed char* __restrict__ bytes, float2* __restrict__ groups,
              float2* __restrict__ steps, const real* __restrict__ items, const int* __restrict__ order, int n_items,
              int n_groups, int rank, int padded, int byte_row, double scale) {
    const int lane = threadIdx.x % WARP, group = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    if (group >= n_groups) return;
    const int begin = group * GROUP, end = min(begin + GROUP, n_items);
    double factor = 0;  // the largest one
    for (int place = begin; byte_row && place < end; place++)
        factor = max(factor, largest_of(items + int64(order[place]) * rank, rank, lane));
    const float step = fmaxf(float(factor * scale / MOST_BYTE), SMALLEST);
    const double inverse = 1.0 / step;
    float norm = 0, lost_by_halves = 0, lost_by_bytes = 0;
    for (int place = begin; place < begin + GROUP; place++) {
        const real* row = place < n_items ? items + int64(order[place]) * rank : items;
        const int length = place < n_items ? rank : 0;
        const RowSize size = round_row(row, length, padded, scale, lane, [&](int k, double value) {
            return round_to_half(item_halves + packed_place<8>(place, padded, k), value);
        });
        norm = fmaxf(norm, size.norm);
        lost_by_halves = fmaxf(lost_by_halves, size.residual);
        if (!byte_row) continue;
        const RowSize coarse = round_row(row, length, byte_row, scale, lane, [&](int k, double value) {
            return double(step) * round_to_byte(bytes + packed_place<16>(place, byte_row, k), value * inverse);
        });
        lost_by_bytes = fmaxf(lost_by_bytes, coarse.residual);
    }
    if (lane != 0) return;
    groups[group] = {norm, byte_row ? lost_by_bytes : lost_by_halves};
    steps[group] = {byte_row ? step : 1.0f, lost_by_halves};
}

// user_operands <- users, each row scaled by its own power of 2 and, for int8, by an integer. Computes their bounds. limits <- all
// groups, or none where x = 0.
extern "C" __global__ void __launch_bounds__(ROW_WARPS * WARP)
prepare_users(operand_bits* __restrict__ user_operands, float4* __restrict__ user_bounds, int* __restrict__ limits,
              const real* __restrict__ users, int n_users, int n_groups, int rank, int padded, int bytes) {
    const int lane = threadIdx.x % WARP, user = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    if (user >= n_users) return;
    const real* factors = users + int64(user) * rank;
    const double largest = largest_of(factors, rank, lane);
    const int exponent = exponent_of(largest);
    const double scale = ldexp(1.0, -exponent), least = double(MOST_BYTE) / 254;
    const int multiplier = bytes ? max(1, int(MOST_BYTE / max(largest * scale, least))) : 1;  // largest * scale is 1/2 to 1
    RowSize size;
    if (bytes) {
        signed char* row = reinterpret_cast<signed char*>(user_operands) + int64(user) * padded;
        size = round_row(factors, rank, padded, scale * multiplier, lane,
                         [&](int k, double value) { return round_to_byte(row + k, value); });
    } else {
        half_bits* row = user_operands + int64(user) * padded;
        size = round_row(factors, rank, padded, scale, lane,
                         [&](int k, double value) { return round_to_half(row + k, value); });
    }
    if (lane != 0) return;
    const float norm = size.norm + size.residual;  // bounds |x| and |x~|
    const double sums = bytes ? 0.0 : padded * TENSOR_ERROR;
    const float relative = float(sums + rank * Arithmetic<real>::EPSILON + 2 * COMPARISON_ERROR);
    user_bounds[user] = {norm, size.residual + norm * relative, norm + norm * relative, float(256 * exponent + multiplier)};
    limits[user] = norm > 0 ? n_groups : 0;
}

// ---------------------------------------------------------------------------------------------- bounds

struct UserBound {
    float norm;      // |x| and |x~| are at most this; 0: a user without factors
    float by_norm;   // slack of a group: by_norm * largest norm + by_residual * largest residual + least
    float by_residual;
    float least;     // bound of underflows
    double user_scale, item_scale;

    // A score in the scale of the groups' bounds. An overflowed score becomes the largest number, which does not exceed it.
    __device__ __forceinline__ float scaled(real score) const {
        const double finite = score > Arithmetic<real>::LARGEST ? Arithmetic<real>::LARGEST : score;
        return float(finite * user_scale * item_scale);
    }
    __device__ __forceinline__ float slack(float norm_of_group, float residual_of_group) const {
        return by_norm * norm_of_group + by_residual * residual_of_group + least;
    }
    // Error bound of a screened score (item of the group in float16 times x in float32) against the exact score.
    __device__ __forceinline__ float doubt(float norm_of_group, float half_residual, int rank) const {
        const float relative = float(rank * (Arithmetic<float>::EPSILON + Arithmetic<real>::EPSILON) + 2 * COMPARISON_ERROR);
        return norm * (1 + relative) * half_residual + norm * relative * norm_of_group + least;
    }
    // Whether |x| |y| keeps all items of a group below a threshold.
    __device__ __forceinline__ bool excludes(float norm_of_group, float threshold) const {
        return (norm + by_norm) * norm_of_group + least < threshold;
    }
};

__device__ __forceinline__ UserBound user_bound(float4 stored, int rank, double item_scale) {
    const int scaling = int(stored.w);  // 256 exponent + multiplier
    const double user_scale = ldexp(double(scaling & 255), -(scaling >> 8));
    const float least = float(rank * Arithmetic<real>::LEAST * user_scale * item_scale) + SMALLEST;
    return {stored.x, stored.y, stored.z, least, user_scale, item_scale};
}

// Lower (side -1) or upper (side 1) bounds of four groups.
__device__ __forceinline__ float4 bounds_of(const float* best, const float2* groups, int first, const UserBound& user,
                                            float side) {
    const float4 value = *reinterpret_cast<const float4*>(best + first);
    const float4 low = reinterpret_cast<const float4*>(groups + first)[0];
    const float4 high = reinterpret_cast<const float4*>(groups + first)[1];
    return {value.x + side * user.slack(low.x, low.y), value.y + side * user.slack(low.z, low.w),
            value.z + side * user.slack(high.x, high.y), value.w + side * user.slack(high.z, high.w)};
}

constexpr int STREAMS = KEPT / 8;  // shares of the groups per lane; the lane keeps the largest bound of each

// The n-th largest of all lanes' values, found bit by bit on order-preserving integers.
__device__ __forceinline__ float nth_largest(const float (&values)[STREAMS], int n) {
    unsigned keys[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        const unsigned bits = __float_as_uint(values[s]);
        keys[s] = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    }
    unsigned found = 0;
    for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
        const unsigned trial = found | bit;
        int count = 0;
#pragma unroll
        for (int s = 0; s < STREAMS; s++) count += __popc(__ballot_sync(FULL_WARP, keys[s] >= trial));
        if (count >= n) found = trial;
    }
    return __uint_as_float(found ^ (found >> 31 ? 0x80000000u : 0xffffffffu));
}

// A score that at least n unseen items of the first groups reach, or -inf if there is no such bound. n_groups is a multiple of 4.
__device__ __forceinline__ float reached_by(int n, const float* best, const float2* groups, int n_groups,
                                            const UserBound& user, int lane) {
    float largest[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; s++) largest[s] = negative_infinity();
    for (int base = 4 * lane; base < n_groups; base += STREAMS * WARP) {
#pragma unroll
        for (int step = 0; step < STREAMS / 4; step++) {
            const int first = base + step * 4 * WARP;
            if (first >= n_groups) break;
            const float4 below = bounds_of(best, groups, first, user, -1.0f);
            largest[4 * step] = fmaxf(largest[4 * step], below.x);
            largest[4 * step + 1] = fmaxf(largest[4 * step + 1], below.y);
            largest[4 * step + 2] = fmaxf(largest[4 * step + 2], below.z);
            largest[4 * step + 3] = fmaxf(largest[4 * step + 3], below.w);
        }
    }
    return nth_largest(largest, n);
}

// ---------------------------------------------------------------------------------------------- seen items

// Whether a sorted list contains an item.
__device__ __forceinline__ bool contains(const int* items, int n, int item) {
    int low = 0, high = n;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (items[middle] < item) low = middle + 1;
        else high = middle;
    }
    return low < n && items[low] == item;
}

// Sets bit i of words[u][g] if u has seen item i of group g. One warp per user, which first clears the user's words.
extern "C" __global__ void __launch_bounds__(ROW_WARPS * WARP)
mark_seen(unsigned* __restrict__ words, const int64* __restrict__ seen_ptr, const int* __restrict__ seen_ids,
          const int* __restrict__ positions, int n_users, int n_groups) {
    const int lane = threadIdx.x % WARP, user = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    if (user >= n_users) return;
    unsigned* row = words + int64(user) * n_groups;
    for (int piece = lane; piece < n_groups / 4; piece += WARP) reinterpret_cast<int4*>(row)[piece] = {0, 0, 0, 0};
    __syncwarp();
    for (int64 entry = seen_ptr[user] + lane; entry < seen_ptr[user + 1]; entry += WARP) {
        const int place = positions[seen_ids[entry]];
        if (place >= 0) atomicOr(row + place / GROUP, 1u << place % GROUP);
    }
}

// ---------------------------------------------------------------------------------------------- tensor cores

// Loads four 8 x 8 matrices of float16 from shared memory; lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&matrices)[4], const operand_bits* row) {
#if defined(HYBRIDMF_EMULATE)
    const auto rows = emulator::exchange(FULL_WARP, row);
    const int lane = threadIdx.x % WARP;
    for (int m = 0; m < 4; m++) memcpy(&matrices[m], rows[8 * m + lane / 4] + 2 * (lane % 4), 4);
#else
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
#endif
}

// d += A B of 16 users, 8 items and 16 factors; Turing takes 8 factors at a time.
__device__ __forceinline__ void multiply_operands(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(HYBRIDMF_EMULATE)
    emulator::mma_16bit<false>(d, a, b0, b1);
#elif HAS_ASYNC_COPY
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// The same for int8 and 32 factors; exact.
__device__ __forceinline__ void multiply_operands(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(HYBRIDMF_EMULATE)
    emulator::mma_8bit(d, a, b0, b1);
#elif HAS_ASYNC_COPY
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// ---------------------------------------------------------------------------------------------- group_max

constexpr int M_TILES = USERS_PER_WARP / 16;
constexpr int N_PAIRS = GROUP / 16;               // pairs of m16n8 tiles side by side
constexpr int K_STEPS = ROW / 16;
constexpr int LANE_ROWS = 2 * M_TILES;            // user rows whose scores a lane holds: 16 m + 8 h + lane / 4
constexpr int PIECE = 8;                          // operand_bits of a row that are consecutive: 16 bytes
constexpr int GROUP_BITS = GROUP * ROW;           // operand_bits of a group, in memory and in a tile: for each piece, all rows
constexpr int TILE = TILE_GROUPS * GROUP_BITS;
constexpr int TRAY_PITCH = 12;                    // words of a user's octet; rows start in banks 0, 12, 24, 4, ...
constexpr int TRAY = USERS_PER_WARP * TRAY_PITCH;

using UserFragments = unsigned[M_TILES][K_STEPS][4];
template <bool IN_BYTES> struct SumType { using type = float; };
template <> struct SumType<true> { using type = int; };
using Sum = SumType<BYTES>::type;
using Scores = Sum[M_TILES][2 * N_PAIRS][4];

// Loads the A operands of a warp's users from global memory to registers, once per block.
__device__ __forceinline__ void load_users(UserFragments& fragments, const operand_bits* user_operands, int first_user,
                                           int n_users, int lane) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int k = 0; k < K_STEPS; k++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int user = first_user + 16 * m + 8 * (r % 2) + lane / 4;
                const int column = 16 * k + 8 * (r / 2) + 2 * (lane % 4);
                fragments[m][k][r] = user < n_users ? *reinterpret_cast<const unsigned*>(
                                                          user_operands + int64(user) * ROW + column)
                                                    : 0u;
            }
}

// Neighbours stay neighbours: a copy that separates the halves of 32 aligned bytes moves them from the L2 cache twice. `ldmatrix`
// reads a piece of 8 rows, 128 consecutive bytes.
__device__ __forceinline__ void load_tile(operand_bits* tile, const operand_bits* item_operands, int first_group) {
    const operand_bits* source = item_operands + int64(first_group) * GROUP_BITS;
#pragma unroll 4
    for (int piece = threadIdx.x; piece < TILE / PIECE; piece += WARPS * WARP)
        copy_async_16(tile + piece * PIECE, source + piece * PIECE, true);
}

// Copies a warp's words of an octet to its tray, or back.
__device__ __forceinline__ void load_words(unsigned* tray, const unsigned* words, int first_user, int n_users,
                                           int n_groups, int group, int lane) {
#pragma unroll
    for (int piece = lane; piece < 2 * USERS_PER_WARP; piece += WARP) {
        const int user = first_user + piece / 2;
        const unsigned* source = words + int64(min(user, n_users - 1)) * n_groups + group + piece % 2 * 4;
        copy_async_16(tray + piece / 2 * TRAY_PITCH + piece % 2 * 4, source, user < n_users);
    }
}

__device__ __forceinline__ void store_words(unsigned* words, const unsigned* tray, int first_user, int n_users,
                                            int n_groups, int group, int lane) {
#pragma unroll
    for (int piece = lane; piece < 2 * USERS_PER_WARP; piece += WARP) {
        const int user = first_user + piece / 2;
        if (user < n_users)
            *reinterpret_cast<int4*>(words + int64(user) * n_groups + group + piece % 2 * 4) =
                *reinterpret_cast<const int4*>(tray + piece / 2 * TRAY_PITCH + piece % 2 * 4);
    }
}

// Loads the B operands of a group for one step of factors; `corner` is this lane's piece of the first step and items.
__device__ __forceinline__ void load_items(unsigned (&fragments)[N_PAIRS][4], const operand_bits* corner, int k) {
#pragma unroll
    for (int pair = 0; pair < N_PAIRS; pair++)
        load_matrices(fragments[pair], corner + (k * 2 * GROUP + pair * 16) * PIECE);
}

__device__ __forceinline__ void score_group(Scores& scores, const UserFragments& users, const operand_bits* group,
                                            int lane) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < 2 * N_PAIRS; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) scores[m][n][r] = 0;
    // matrices 0, 1: factors 0-7 and 8-15 of items 0-7; matrices 2, 3: of items 8-15
    const operand_bits* corner = group + (lane / 8 % 2 * GROUP + lane % 8 + lane / 16 * 8) * PIECE;
    unsigned items[2][N_PAIRS][4];
    load_items(items[0], corner, 0);
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        if (k + 1 < K_STEPS) load_items(items[(k + 1) % 2], corner, k + 1);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int n = 0; n < 2 * N_PAIRS; n++)
                multiply_operands(scores[m][n], users[m][k], items[k % 2][n / 2][n % 2 * 2],
                                items[k % 2][n / 2][n % 2 * 2 + 1]);
    }
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ int larger(int a, int b) { return max(a, b); }

// Largest of this lane's scores in each of its rows, times `step`; MASKED: skips scores whose bit is set in the row's word.
template <bool MASKED>
__device__ __forceinline__ void largest_of_rows(float (&largest)[LANE_ROWS], const Scores& scores,
                                                const unsigned (&left_out)[LANE_ROWS], float step) {
    const Sum none = BYTES ? Sum(int(0x80000000)) : Sum(negative_infinity());
#pragma unroll
    for (int row = 0; row < LANE_ROWS; row++) {
        Sum most = none;
#pragma unroll
        for (int n = 0; n < 2 * N_PAIRS; n++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (!MASKED || !(left_out[row] >> (8 * n + c) & 1))
                    most = larger(most, scores[row / 2][n][row % 2 * 2 + c]);
        largest[row] = !BYTES ? float(most) : MASKED && most == none ? negative_infinity() : float(most) * step;
    }
}

// Two lanes that differ in bit `distance` share COUNT rows: each ends with the maximum over both lanes for half of the rows.
template <int COUNT>
__device__ __forceinline__ void share_rows(float (&largest)[LANE_ROWS], int lane, int distance) {
    const bool upper = lane & distance;
#pragma unroll
    for (int row = 0; row < COUNT / 2; row++) {
        const float mine = upper ? largest[row + COUNT / 2] : largest[row];
        const float other = upper ? largest[row] : largest[row + COUNT / 2];
        largest[row] = fmaxf(mine, __shfl_xor_sync(FULL_WARP, other, distance));
    }
}

// The four lanes of a row combine their maxima; each writes a quarter of the rows.
__device__ __forceinline__ void store_largest(unsigned* slot, float (&largest)[LANE_ROWS], int lane) {
    share_rows<LANE_ROWS>(largest, lane, 1);
    int first = lane % 2 * (LANE_ROWS / 2);
    bool writes = true;
    if constexpr (LANE_ROWS >= 4) {
        share_rows<LANE_ROWS / 2>(largest, lane, 2);
        first += lane / 2 % 2 * (LANE_ROWS / 4);
    } else {
        largest[0] = fmaxf(largest[0], __shfl_xor_sync(FULL_WARP, largest[0], 2));
        writes = lane / 2 % 2 == 0;
    }
    __syncwarp();  // every lane has read the words before they are overwritten
#pragma unroll
    for (int k = 0; k < (LANE_ROWS >= 4 ? LANE_ROWS / 4 : 1); k++) {
        const int row = first + k;
        if (writes) slot[(row / 2 * 16 + row % 2 * 8 + lane / 4) * TRAY_PITCH] = __float_as_uint(largest[k]);
    }
}

// Computes a group's scores and overwrites the words in the tray by their maxima. `beyond` has the bits of nonexistent items.
__device__ __forceinline__ void score_into_tray(unsigned* slot, const UserFragments& users, const operand_bits* group,
                                                float step, bool filtered, unsigned beyond, int lane) {
    Scores scores;
    score_group(scores, users, group, lane);
    unsigned left_out[LANE_ROWS], any = 0;
#pragma unroll
    for (int row = 0; row < LANE_ROWS; row++) {
        const unsigned seen = filtered ? slot[(row / 2 * 16 + row % 2 * 8 + lane / 4) * TRAY_PITCH] : 0u;
        any |= seen | beyond;
        left_out[row] = (seen | beyond) >> 2 * (lane % 4);
    }
    float largest[LANE_ROWS];
    if (__any_sync(FULL_WARP, any)) largest_of_rows<true>(largest, scores, left_out, step);
    else largest_of_rows<false>(largest, scores, left_out, step);
    store_largest(slot, largest, lane);
}

// End of the groups that a warp's users need, rounded up to an octet.
__device__ __forceinline__ int needed_groups(const int* limits, int first_user, int n_users, int lane) {
    int needed = 0;
    for (int user = first_user + lane; user < min(first_user + USERS_PER_WARP, n_users); user += WARP)
        needed = max(needed, limits[user]);
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        needed = max(needed, __shfl_xor_sync(FULL_WARP, needed, distance));
    return round_up(needed, OCTET);
}

#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (BYTES && (ROW / 64.0 + 1) * USERS_PER_WARP <= 128 ? 3 : 2)  // limited by the registers of users and scores
#endif

// words[u][g], first_group <= g < last_group (multiples of OCTET): replaces the bits of seen items by the largest score of the
// other items. grid (ceil(n_users / BLOCK_USERS), ceil(groups / chunk)), chunk a multiple of OCTET. Groups beyond the limit of a
// warp's users are left unchanged. shared: 2 tiles of items, 2 trays of words per warp.
extern "C" __global__ void __launch_bounds__(WARPS * WARP, BLOCKS_PER_SM)
group_max(unsigned* words, const operand_bits* __restrict__ user_operands, const operand_bits* __restrict__ item_operands,
          const float2* __restrict__ steps, const int* __restrict__ limits, int n_users, int n_items, int n_groups, int first_group, int last_group,
          int chunk, int filtered) {
    __shared__ int ends[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_user = blockIdx.x * BLOCK_USERS + warp * USERS_PER_WARP;
    const int begin = first_group + blockIdx.y * chunk;
    const int end = min(min(begin + chunk, last_group), needed_groups(limits, first_user, n_users, lane));
    if (lane == 0) ends[warp] = end;
    __syncthreads();
    int block_end = begin;
#pragma unroll
    for (int w = 0; w < WARPS; w++) block_end = max(block_end, ends[w]);
    if (block_end == begin) return;

    operand_bits* tiles = shared_memory<operand_bits>();
    unsigned* trays = reinterpret_cast<unsigned*>(tiles + 2 * TILE) + warp * 2 * TRAY;
    UserFragments users;
    load_tile(tiles, item_operands, begin);
    if (filtered && begin < end) load_words(trays, words, first_user, n_users, n_groups, begin, lane);
    copy_commit();
    load_users(users, user_operands, first_user, n_users, lane);

    for (int first = begin, turn = 0; first < block_end; first += TILE_GROUPS, turn ^= 1) {
        copy_wait<0>();
        __syncthreads();  // this tile has arrived, and no thread still reads the other one
        if (first + TILE_GROUPS < block_end) load_tile(tiles + (turn ^ 1) * TILE, item_operands, first + TILE_GROUPS);
        const int octet = (first - begin) / OCTET % 2;
        if (filtered && first % OCTET == 0 && first + OCTET < end)
            load_words(trays + (octet ^ 1) * TRAY, words, first_user, n_users, n_groups, first + OCTET, lane);
        copy_commit();
        if (first >= end) continue;
        unsigned* tray = trays + octet * TRAY;
#pragma unroll 1
        for (int g = 0; g < TILE_GROUPS; g++) {
            const int real_items = n_items - (first + g) * GROUP;
            const unsigned beyond = real_items >= GROUP ? 0u : real_items <= 0 ? ~0u : ~0u << real_items;
            const float step = BYTES ? steps[first + g].x : 1.0f;
            score_into_tray(tray + (first + g) % OCTET, users, tiles + turn * TILE + g * GROUP_BITS, step, filtered,
                            beyond, lane);
        }
        if ((first + TILE_GROUPS) % OCTET == 0) {
            __syncwarp();
            store_words(words, tray, first_user, n_users, n_groups, first + TILE_GROUPS - OCTET, lane);
            __syncwarp();  // before the next words overwrite this tray
        }
    }
}

// limits[u] <- the first group that cannot hold one of the n best of user u, judged from the first `head` groups.
extern "C" __global__ void __launch_bounds__(ROW_WARPS * WARP)
prune(int* __restrict__ limits, const float* __restrict__ best, const float4* __restrict__ user_bounds,
      const float2* __restrict__ groups, int n_users, int n_groups, int head, int n, int rank, double item_scale) {
    const int lane = threadIdx.x % WARP, user = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    if (user >= n_users) return;
    const UserBound bound = user_bound(user_bounds[user], rank, item_scale);
    if (bound.norm == 0) return;
    const float threshold = reached_by(n, best + int64(user) * n_groups, groups, head, bound, lane);
    int low = 0, high = n_groups;
    while (low < high) {  // norms descend: all groups after an excluded one are excluded
        const int middle = (low + high) / 2;
        if (bound.excludes(groups[middle].x, threshold)) high = middle;
        else low = middle + 1;
    }
    if (lane == 0) limits[user] = low;
}

// ---------------------------------------------------------------------------------------------- lists

template <class Score>
__device__ __forceinline__ bool ranks_before(Score score_a, int id_a, Score score_b, int id_b) {
    return score_a > score_b || (score_a == score_b && id_a < id_b);
}

// Sorts pairs, best first: a bitonic sort of a power-of-2 number of pairs by the lanes of a warp or the threads of a block.
template <bool BY_BLOCK, class Score> __device__ __forceinline__ void sort_pairs(Score* scores, int* ids, int size) {
    const int thread = BY_BLOCK ? threadIdx.x : threadIdx.x % WARP, threads = BY_BLOCK ? blockDim.x : WARP;
    for (int run = 2; run <= size; run *= 2)
        for (int stride = run / 2; stride > 0; stride /= 2) {
            for (int k = thread; k < size / 2; k += threads) {
                const int a = 2 * k - (k & (stride - 1)), b = a + stride;
                const Score score_a = scores[a], score_b = scores[b];
                const int id_a = ids[a], id_b = ids[b];
                if (ranks_before(score_b, id_b, score_a, id_a) == ((a & run) == 0)) {
                    scores[a] = score_b, scores[b] = score_a;
                    ids[a] = id_b, ids[b] = id_a;
                }
            }
            if (BY_BLOCK) __syncthreads();
            else __syncwarp();
        }
}

constexpr int CAPACITY = 4 * KEPT;  // always room for n and 32 more
constexpr int QUEUE = 256;          // groups; one step of the search adds up to 128

// Pads a list to a power of 2 and sorts it.
template <class Score> __device__ __forceinline__ void sort_list(Score* scores, int* ids, int count, int lane) {
    int size = WARP;
    while (size < count) size *= 2;
    __syncwarp();
    for (int k = count + lane; k < size; k += WARP) scores[k] = negative_infinity(), ids[k] = NO_ITEM;
    __syncwarp();
    sort_pairs<false>(scores, ids, size);
}

// Product of a lane's item of a panel and x: one chain of multiply-adds over the factors, which are zero beyond the rank.
__device__ __forceinline__ real exact_score(const Vector* panel, const Vector* x, int vectors, int lane) {
    real sum = 0;
#pragma unroll 4
    for (int v = 0; v < vectors; v++) {
        const Vector item = panel[v * GROUP + lane], user = x[v];
#pragma unroll
        for (int k = 0; k < VECTOR; k++) sum = multiply_add(user.value[k], item.value[k], sum);
    }
    return sum + real(0);  // no -0
}

// For a user without factors, whose scores are all 0: lists the lowest unseen items.
__device__ __forceinline__ int lowest_items(int* ids, real* scores, const int* ascending_ids, int n_items, int n,
                                            const int* seen, int n_seen, int lane) {
    int count = 0;
    for (int base = 0; base < n_items && count < n; base += WARP) {
        const bool valid = base + lane < n_items;
        const int id = valid ? ascending_ids[base + lane] : NO_ITEM;
        const bool chosen = valid && !contains(seen, n_seen, id);
        const unsigned lanes = __ballot_sync(FULL_WARP, chosen);
        const int slot = count + __popc(lanes & ((1u << lane) - 1));
        if (chosen && slot < n) ids[slot] = id, scores[slot] = 0;
        count = min(n, count + __popc(lanes));
    }
    return count;
}

__device__ __forceinline__ void fill_gap(int* ids, real* scores, int count, int n, int thread, int threads) {
    for (int k = count + thread; k < n; k += threads) ids[k] = -1, scores[k] = negative_infinity();
}

// Workspace of a warp in shared memory.
struct Desk {
    Vector* x;          // [vectors], zero beyond the rank
    float* scaled;      // [padded] x in the scale of the bounds, in float32
    real* scores;       // [CAPACITY] scores of the candidates for the n best
    int* ids;
    float* bounds;      // [QUEUE] bounds of groups that can hold one of the best
    int* groups;
    int* pending;       // [2 * WARP] places of items still to be scored exactly
};

__device__ __forceinline__ Desk desk_of(int warp, int vectors, int padded) {
    const int bytes = vectors * int(sizeof(Vector)) + padded * 4 + CAPACITY * (int(sizeof(real)) + 4) + QUEUE * 8 + 2 * WARP * 4;
    Desk desk;
    desk.x = reinterpret_cast<Vector*>(shared_memory<char>() + warp * bytes);
    desk.scaled = reinterpret_cast<float*>(desk.x + vectors);
    desk.scores = reinterpret_cast<real*>(desk.scaled + padded);
    desk.ids = reinterpret_cast<int*>(desk.scores + CAPACITY);
    desk.bounds = reinterpret_cast<float*>(desk.ids + CAPACITY);
    desk.groups = reinterpret_cast<int*>(desk.bounds + QUEUE);
    desk.pending = desk.groups + QUEUE;
    return desk;
}

struct Packed {  // the items
    const Vector* panels;
    const int4* halves;
    const int* ids;
    const float2 *groups, *steps;
    int n_items, vectors, pieces;  // pieces: 16-byte pieces of a float16 item
};

struct Selection {  // the best items of a warp's user so far
    Desk desk;
    Packed items;
    UserBound bound;
    const int* seen;
    int n_seen, wanted, rank, lane;
    float threshold;            // a lower bound of the n best scores
    int listed = 0, queued = 0, pending = 0;
    bool ranked = false;        // whether the list was sorted before

    // Product of a lane's item of a group, in float16, and x.
    __device__ __forceinline__ float approximate(int group) const {
        const int4* item = items.halves + int64(group) * items.pieces * GROUP + lane;
        float sums[2] = {0, 0};
#pragma unroll 8
        for (int p = 0; p < items.pieces; p++) {
            const int4 piece = __ldg(item + p * GROUP);
            const float4 low = reinterpret_cast<const float4*>(desk.scaled)[2 * p];
            const float4 high = reinterpret_cast<const float4*>(desk.scaled)[2 * p + 1];
            const float2 a = from_half_pair(piece.x), b = from_half_pair(piece.y);
            const float2 c = from_half_pair(piece.z), d = from_half_pair(piece.w);
            sums[0] = multiply_add(a.x, low.x, multiply_add(a.y, low.y, multiply_add(b.x, low.z, multiply_add(b.y, low.w, sums[0]))));
            sums[1] = multiply_add(c.x, high.x, multiply_add(c.y, high.y, multiply_add(d.x, high.z, multiply_add(d.y, high.w, sums[1]))));
        }
        return sums[0] + sums[1];
    }

    // Sorts the list and keeps the n best.
    __device__ __forceinline__ void rank_list() {
        sort_list(desk.scores, desk.ids, listed, lane);
        listed = min(listed, wanted);
        ranked = true;
        if (listed == wanted) threshold = fmaxf(threshold, bound.scaled(desk.scores[wanted - 1]));
        __syncwarp();
    }

    // Scores up to WARP pending items exactly and lists those that can be among the best.
    __device__ __forceinline__ void settle() {
        __syncwarp();
        const int count = min(pending, WARP);
        pending -= count;
        const bool mine = lane < count;
        const int place = desk.pending[pending + (mine ? lane : 0)], id = items.ids[place];
        const Vector* panel = items.panels + int64(place / GROUP) * items.vectors * GROUP;
        const real score = exact_score(panel, desk.x, items.vectors, place % GROUP);
        const bool survives = mine && bound.scaled(score) >= threshold && !contains(seen, n_seen, id);
        const unsigned survivors = __ballot_sync(FULL_WARP, survives);
        if (survives) {
            const int slot = listed + __popc(survivors & ((1u << lane) - 1));
            desk.scores[slot] = score;
            desk.ids[slot] = id;
        }
        listed += __popc(survivors);
        __syncwarp();
    }

    // Adds the items of a group that can be among the best to the pending ones.
    __device__ __forceinline__ void screen(int group) {
        const float doubt = bound.doubt(items.groups[group].x, items.steps[group].y, rank);
        const int place = group * GROUP + lane;
        const bool hopeful = place < items.n_items && approximate(group) + doubt >= fmaxf(threshold, -Arithmetic<float>::LARGEST);
        const unsigned lanes = __ballot_sync(FULL_WARP, hopeful);
        if (hopeful) desk.pending[pending + __popc(lanes & ((1u << lane) - 1))] = place;
        pending += __popc(lanes);
    }

    // Screens the queued groups by descending bounds, until one cannot hold any of the best. Items of the first n groups are
    // scored exactly at once, for a better threshold; with `last`, so are the remaining ones. The code of each step occurs only
    // once, to save registers.
    __device__ __forceinline__ void empty_queue(bool last) {
        sort_list(desk.bounds, desk.groups, queued, lane);
        for (int k = 0;; k++) {
            const bool more = k < queued && desk.bounds[k] >= threshold, ends = last && !more;
            if (more) screen(desk.groups[k]);
            const int awaited = ends || (!ranked && k + 1 >= wanted) ? 0 : WARP;
            for (bool settles = true; settles;) {
                settles = pending > awaited;
                if (settles) settle();
                if (listed > CAPACITY - WARP || (!ranked && listed >= wanted) || (ends && !settles)) rank_list();
            }
            if (!more) break;
        }
        queued = 0;
        __syncwarp();
    }

    // Of the four groups of each lane, queues those that can reach the threshold. The maximum of a group without unseen items is
    // -inf.
    __device__ __forceinline__ void enqueue(const float* best, int first, bool valid) {
        float above[4] = {negative_infinity(), negative_infinity(), negative_infinity(), negative_infinity()};
        if (valid) {
            const float4 bounds = bounds_of(best, items.groups, first, bound, 1.0f);
            above[0] = bounds.x, above[1] = bounds.y, above[2] = bounds.z, above[3] = bounds.w;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const bool hopeful = above[k] >= fmaxf(threshold, -Arithmetic<float>::LARGEST);
            const unsigned lanes = __ballot_sync(FULL_WARP, hopeful);
            if (hopeful) {
                const int slot = queued + __popc(lanes & ((1u << lane) - 1));
                desk.bounds[slot] = above[k];
                desk.groups[slot] = first + k;
            }
            queued += __popc(lanes);
        }
    }
};

#ifndef SELECT_BLOCKS
#define SELECT_BLOCKS (KEPT > 32 || sizeof(real) > 4 ? 5 : 6)  // per multiprocessor; limited by registers
#endif
// Writes ids and scores (n_users, n), filled up with -1 and -inf if fewer items are left. One warp per user; shared: a Desk per
// warp.
extern "C" __global__ void __launch_bounds__(ROW_WARPS * WARP, SELECT_BLOCKS)
select_best(int* __restrict__ ids, real* __restrict__ scores, const real* __restrict__ users,
            const float4* __restrict__ user_bounds, const float* __restrict__ best, const int* __restrict__ limits,
            const real* __restrict__ panels, const half_bits* __restrict__ item_halves, const int* __restrict__ item_ids,
            const int* __restrict__ ascending_ids, const float2* __restrict__ groups, const float2* __restrict__ steps,
            const int64* __restrict__ seen_ptr, const int* __restrict__ seen_ids, int n_users, int n_items, int n_groups, int n,
            int rank, int padded, int filtered, double item_scale) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, user = blockIdx.x * ROW_WARPS + warp;
    if (user >= n_users) return;
    const int vectors = ceil_div(rank, VECTOR), wanted = min(n, n_items);
    const int* seen = filtered ? seen_ids + seen_ptr[user] : nullptr;
    const int n_seen = filtered ? int(seen_ptr[user + 1] - seen_ptr[user]) : 0;
    int* row_ids = ids + int64(user) * n;
    real* row_scores = scores + int64(user) * n;
    const UserBound bound = user_bound(user_bounds[user], rank, item_scale);
    if (bound.norm == 0) {
        const int count = lowest_items(row_ids, row_scores, ascending_ids, n_items, n, seen, n_seen, lane);
        fill_gap(row_ids, row_scores, count, n, lane, WARP);
        return;
    }
    const Desk desk = desk_of(warp, vectors, padded);
    for (int k = lane; k < vectors * VECTOR; k += WARP)
        reinterpret_cast<real*>(desk.x)[k] = k < rank ? users[int64(user) * rank + k] : real(0);
    for (int k = lane; k < padded; k += WARP)
        desk.scaled[k] = k < rank ? float(users[int64(user) * rank + k] * bound.user_scale) : 0.0f;
    __syncwarp();

    const float* row = best + int64(user) * n_groups;
    const int n_scored = round_up(limits[user], OCTET);  // groups that group_max has computed
    const Packed items = {reinterpret_cast<const Vector*>(panels), reinterpret_cast<const int4*>(item_halves), item_ids, groups,
                          steps, n_items, vectors, padded / 8};
    // an overflowed score is not below the threshold
    const float reached = fminf(reached_by(wanted, row, groups, n_scored, bound, lane), bound.scaled(Arithmetic<real>::LARGEST));
    Selection chosen = {desk, items, bound, seen, n_seen, wanted, rank, lane, reached};
    for (int base = 0; base < n_scored; base += 4 * WARP) {
        const bool last = base + 4 * WARP >= n_scored;
        chosen.enqueue(row, base + 4 * lane, base + 4 * lane < n_scored);
        if (last || chosen.queued > QUEUE - 4 * WARP) chosen.empty_queue(last);
    }
    for (int k = lane; k < chosen.listed; k += WARP) row_ids[k] = desk.ids[k], row_scores[k] = desk.scores[k];
    fill_gap(row_ids, row_scores, chosen.listed, n, lane, WARP);
}

// ---------------------------------------------------------------------------------------------- whole rows of scores

constexpr int ROW_TILE_USERS = 16;
constexpr int ROW_TILE_WARPS = 8;
constexpr int ROW_TILE_GROUPS = 2;    // per warp: two items per lane, so that each load of x serves two items
constexpr int ROW_TILE_VECTORS = 32;  // of each user in shared memory at a time

// scores[u][place] (n_users, GROUP n_groups) <- the same sum as exact_score; -inf where there is no item.
// grid (ceil(n_users / ROW_TILE_USERS), ceil(n_groups / (ROW_TILE_WARPS ROW_TILE_GROUPS)))
extern "C" __global__ void __launch_bounds__(ROW_TILE_WARPS * WARP)
score_rows(real* __restrict__ scores, const real* __restrict__ users, const real* __restrict__ panels, int n_users,
           int n_items, int n_groups, int rank) {
    __shared__ Vector x[ROW_TILE_USERS][ROW_TILE_VECTORS];
    const int vectors = ceil_div(rank, VECTOR), lane = threadIdx.x % WARP;
    const int first_user = blockIdx.x * ROW_TILE_USERS;
    const int group = (blockIdx.y * ROW_TILE_WARPS + threadIdx.x / WARP) * ROW_TILE_GROUPS;
    real sums[ROW_TILE_GROUPS][ROW_TILE_USERS] = {};
    for (int begin = 0; begin < vectors; begin += ROW_TILE_VECTORS) {
        const int count = min(ROW_TILE_VECTORS, vectors - begin);
        __syncthreads();
        for (int k = threadIdx.x; k < ROW_TILE_USERS * ROW_TILE_VECTORS * VECTOR; k += ROW_TILE_WARPS * WARP) {
            const int user = first_user + k / (ROW_TILE_VECTORS * VECTOR);
            const int factor = begin * VECTOR + k % (ROW_TILE_VECTORS * VECTOR);
            (&x[0][0].value[0])[k] = user < n_users && factor < rank ? users[int64(user) * rank + factor] : real(0);
        }
        __syncthreads();
        if (group >= n_groups) continue;
        const Vector* panel = reinterpret_cast<const Vector*>(panels) + (int64(group) * vectors + begin) * GROUP + lane;
#pragma unroll 2
        for (int v = 0; v < count; v++) {
            Vector item[ROW_TILE_GROUPS];
#pragma unroll
            for (int g = 0; g < ROW_TILE_GROUPS; g++) item[g] = panel[(int64(g) * vectors + v) * GROUP];
#pragma unroll
            for (int u = 0; u < ROW_TILE_USERS; u++) {
                const Vector user = x[u][v];
#pragma unroll
                for (int k = 0; k < VECTOR; k++)
#pragma unroll
                    for (int g = 0; g < ROW_TILE_GROUPS; g++)
                        sums[g][u] = multiply_add(user.value[k], item[g].value[k], sums[g][u]);
            }
        }
    }
    if (group >= n_groups) return;
#pragma unroll
    for (int u = 0; u < ROW_TILE_USERS; u++)
#pragma unroll
        for (int g = 0; g < ROW_TILE_GROUPS; g++) {
            const int place = (group + g) * GROUP + lane;
            if (first_user + u < n_users)
                scores[int64(first_user + u) * n_groups * GROUP + place] =
                    place < n_items ? sums[g][u] + real(0) : real(negative_infinity());
        }
}

// scores[u][place of each item that u has seen] <- -inf
extern "C" __global__ void __launch_bounds__(ROW_WARPS * WARP)
drop_seen(real* __restrict__ scores, const int64* __restrict__ seen_ptr, const int* __restrict__ seen_ids,
          const int* __restrict__ positions, int n_users, int64 pitch) {
    const int lane = threadIdx.x % WARP, user = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    if (user >= n_users) return;
    for (int64 entry = seen_ptr[user] + lane; entry < seen_ptr[user + 1]; entry += WARP) {
        const int place = positions[seen_ids[entry]];
        if (place >= 0) scores[user * pitch + place] = negative_infinity();
    }
}

// ---------------------------------------------------------------------------------------------- selection from a row

__device__ __forceinline__ unsigned ordered_bits(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ unsigned long long ordered_bits(double value) {
    const unsigned long long bits = static_cast<unsigned long long>(__double_as_longlong(value));
    return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}

constexpr int DIGITS = 256;

template <class Key> struct Cut {
    Key floor;  // keys above it are chosen; if ties is 0, also all keys equal to it
    int ties;   // otherwise, this many of the keys equal to it are chosen
};

// Finds the cut that selects the `wanted` largest keys. key_of(k, key) returns whether element k takes part, and sets its key. A
// block counts digits from the highest on. There must be at least `wanted` keys, and wanted >= 1.
template <class Key, class KeyOf>
__device__ __forceinline__ Cut<Key> find_cut(int* counts, int n, int wanted, KeyOf key_of) {
    Key floor = 0;
    for (int shift = 8 * sizeof(Key) - 8; shift >= 0; shift -= 8) {
        for (int digit = threadIdx.x; digit < DIGITS; digit += blockDim.x) counts[digit] = 0;
        __syncthreads();
        for (int k = threadIdx.x; k < n; k += blockDim.x) {
            Key key;
            if (key_of(k, key) && (key ^ floor) >> shift < DIGITS) atomicAdd(&counts[key >> shift & (DIGITS - 1)], 1);
        }
        __syncthreads();
        int digit = DIGITS - 1;
        while (wanted > counts[digit]) wanted -= counts[digit--];
        floor |= Key(digit) << shift;
        const bool whole = wanted == counts[digit];
        __syncthreads();  // before the counters are cleared
        if (whole) return {floor, 0};
    }
    return {floor, wanted};
}

// ids, scores (n_users, n) <- the n best of each row of row_scores (n_users, pitch); scores of -inf are skipped. One block per
// user. The list to sort has `size` pairs, a power of 2 of at least min(n, n_items). It is in work_scores and work_ids
// (n_users, size), or in shared memory if in_shared: real[size], int[size].
extern "C" __global__ void __launch_bounds__(512)
sort_rows(int* __restrict__ ids, real* __restrict__ scores, real* work_scores, int* work_ids,
          const real* __restrict__ row_scores, const int* __restrict__ item_ids, int n_items, int64 pitch, int n,
          int size, int in_shared) {
    __shared__ int counts[DIGITS];
    __shared__ int present, chosen;
    using Key = decltype(ordered_bits(real(0)));
    const int64 user = blockIdx.x;
    const real* row = row_scores + user * pitch;
    real* list_scores = in_shared ? shared_memory<real>() : work_scores + user * size;
    int* list_ids = in_shared ? reinterpret_cast<int*>(list_scores + size) : work_ids + user * size;
    if (threadIdx.x == 0) present = chosen = 0;
    __syncthreads();
    int mine = 0;
    for (int k = threadIdx.x; k < n_items; k += blockDim.x) mine += row[k] > negative_infinity();
    atomicAdd(&present, mine);
    __syncthreads();
    const int wanted = min(n, present);

    Cut<Key> cut = {0, 0};
    Cut<unsigned> id_cut = {0, 0};
    if (wanted > 0) {
        cut = find_cut<Key>(counts, n_items, wanted, [&](int k, Key& key) {
            key = ordered_bits(row[k]);
            return row[k] > negative_infinity();
        });
        if (cut.ties > 0)  // among equal scores, the lowest items
            id_cut = find_cut<unsigned>(counts, n_items, cut.ties, [&](int k, unsigned& key) {
                key = ~unsigned(item_ids[k]);
                return row[k] > negative_infinity() && ordered_bits(row[k]) == cut.floor;
            });
        for (int k = threadIdx.x; k < n_items; k += blockDim.x) {
            const Key key = ordered_bits(row[k]);
            const bool tie_lost = cut.ties > 0 && key == cut.floor && ~unsigned(item_ids[k]) < id_cut.floor;
            if (!(row[k] > negative_infinity()) || key < cut.floor || tie_lost) continue;
            const int slot = atomicAdd(&chosen, 1);  // in any order: the list is sorted later
            list_scores[slot] = row[k];
            list_ids[slot] = item_ids[k];
        }
    }
    for (int k = wanted + threadIdx.x; k < size; k += blockDim.x)
        list_scores[k] = negative_infinity(), list_ids[k] = NO_ITEM;
    __syncthreads();
    sort_pairs<true>(list_scores, list_ids, size);
    for (int k = threadIdx.x; k < wanted; k += blockDim.x) {
        ids[user * n + k] = list_ids[k];
        scores[user * n + k] = list_scores[k];
    }
    fill_gap(ids + user * n, scores + user * n, wanted, n, threadIdx.x, blockDim.x);
}
