// system.cuh - one system A x = b on chip: a team of WARPS warps holds the lower blocks of A in registers.
//
// constants: RANK    order of the systems, 1 to 128; padded to RANK16 with rows and columns of the identity
//            WARPS   warps per team: 1 (up to RANK 64), 2 or 4 (one team per thread block)
// The block rows are distributed over the warps so that each holds about equally many blocks: OWNERS below.
// The factorization is blocked and right-looking. One warp factors the diagonal block and, in its other lanes, inverts
// the factor. Then L21 = A21 L11^-T and A22 -= L21 L21^T are products on tensor cores, and the substitutions are products
// with the inverses. Only the 16 columns of a block are eliminated one after the other.
// shared (floats per team): staged: entries in flight, then the factor in packed panels of 16 columns;
//                           rhs, diagonal: RANK16 each; failed; sums, for conjugate gradients
// Failure goes to `status`: 0, the leading minor that is not positive definite, NON_FINITE or NEGATIVE_CURVATURE.
#include "fragments.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef WARPS
#define WARPS (RANK <= 64 ? 1 : 2)
#endif

constexpr int BLOCKS = ceil_div(RANK, BLOCK);  // per row or column of A
constexpr int RANK16 = BLOCKS * BLOCK;
constexpr int STRIDE = RANK16 + 8;             // 8 or 24 modulo 32: the loads of `load_raw` hit all 32 banks
constexpr int TEAM = WARPS * WARP;             // threads

static_assert(RANK >= 1 && RANK <= 128, "larger systems do not fit in the registers of a team");
static_assert(WARPS == 1 || ((WARPS == 2 || WARPS == 4) && BLOCKS >= 5), "teams have 1 warp, or 2 or 4 of at least 5 x 5 blocks");

constexpr int GROUP = 2;                       // tiles of a column whose rounded products are in flight together
constexpr int SPLIT_GROUP = 4;                 // tiles of a row in flight together, where both operands are float16 parts

constexpr int NON_FINITE = -1;
constexpr int NEGATIVE_CURVATURE = -2;

// ---------------------------------------------------------------------------------------------- distribution of the blocks

// Digit i, from the right: the warp that holds block row i; all warps hold about equally many blocks.
constexpr unsigned OWNERS_OF_2[] = {0x01100, 0x101000, 0x1100001, 0x10011001};  // 8 + 7 blocks, 11 + 10, 14 + 14, 18 + 18
constexpr unsigned OWNERS_OF_4[] = {0x01232, 0x012321, 0x0123321, 0x01233210};  // at most 5, 6, 7 and 9 blocks each
constexpr unsigned OWNERS = WARPS == 1 ? 0 : (WARPS == 2 ? OWNERS_OF_2 : OWNERS_OF_4)[BLOCKS > 5 ? BLOCKS - 5 : 0];

__host__ __device__ constexpr int owner(int row) { return OWNERS >> 4 * row & 15; }

// Position of block row i's right-hand side, and of block (i, j), among those of their owner.
__host__ __device__ constexpr int row_slot(int i) {
    int count = 0;
    for (int row = 0; row < i; row++) count += owner(row) == owner(i);
    return count;
}
__host__ __device__ constexpr int tile_slot(int i, int j) {
    int count = j;
    for (int row = 0; row < i; row++) count += owner(row) == owner(i) ? row + 1 : 0;
    return count;
}
__host__ __device__ constexpr int count_rows(int role) {
    int count = 0;
    for (int row = 0; row < BLOCKS; row++) count += owner(row) == role;
    return count;
}
__host__ __device__ constexpr int count_tiles(int role) {
    int count = 0;
    for (int row = 0; row < BLOCKS; row++) count += owner(row) == role ? row + 1 : 0;
    return count;
}
__host__ __device__ constexpr int most(int (*count)(int)) {
    int largest = 0;
    for (int role = 0; role < WARPS; role++) largest = count(role) > largest ? count(role) : largest;
    return largest;
}

// Number of block rows of `role` from row `first` on, and the k-th of them.
__host__ __device__ constexpr int rows_from(int role, int first) {
    int count = 0;
    for (int row = first; row < BLOCKS; row++) count += owner(row) == role;
    return count;
}
__host__ __device__ constexpr int row_after(int role, int first, int k) {
    for (int row = first; row < BLOCKS; row++)
        if (owner(row) == role && k-- == 0) return row;
    return 0;
}
__host__ __device__ constexpr int last_row(int role) {
    int last = 0;
    for (int row = 0; row < BLOCKS; row++) last = owner(row) == role ? row : last;
    return last;
}

// Calls body(Index<role>{}) with the warp's role: role-dependent code is compiled once per role.
template <class Body> __device__ __forceinline__ void with_role(int warp, Body&& body) {
    if constexpr (WARPS == 1) {
        body(Index<0>{});
    } else {
        static_for<0, WARPS>([&](auto role) {
            if (warp == decltype(role)::value) body(role);
        });
    }
}

// Calls body(Index<i>{}) for each block row of `ROLE` from FIRST on.
template <int ROLE, int FIRST = 0, class Body> __device__ __forceinline__ void for_rows(Body&& body) {
    static_for<FIRST, BLOCKS>([&](auto row) {
        if constexpr (owner(decltype(row)::value) == ROLE) body(row);
    });
}

// Calls body(tile, Index<i>{}, Index<j>{}) for each block of `ROLE`.
template <int ROLE, class Tiles, class Body> __device__ __forceinline__ void for_tiles(Tiles& tiles, Body&& body) {
    for_rows<ROLE>([&](auto row) {
        static_for<0, decltype(row)::value + 1>([&](auto column) {
            constexpr int place = tile_slot(decltype(row)::value, decltype(column)::value);
            body(tiles[place], row, column);
        });
    });
}

// ---------------------------------------------------------------------------------------------- the team

struct TeamMemory {
    float* staged;
    float* rhs;       // (RANK16,) right-hand side, then the solution
    float* diagonal;  // (RANK16,) of A before elimination
    int* failed;      // leading minor that is not positive definite, or 0
    float* sums;      // (WARPS + 1, RANK16) partial sums of a product, for conjugate gradients
};

constexpr int TEAM_VECTORS = 2 * RANK16 + 16;  // floats in addition to the staged ones; 16 keep the next team aligned

// Panel p of the factor stores element (16 p + r, c) of its 16 columns at panel_base(p) + c panel_stride(p) + r. The inverse W
// of the diagonal block's factor replaces that block: W[n][c] is at panel_base(p) + n panel_stride(p) + c.
__host__ __device__ constexpr int panel_stride(int p) { return STRIDE - p * BLOCK; }
__host__ __device__ constexpr int panel_base(int p) { return BLOCK * (p * STRIDE - BLOCK * (p * (p - 1) / 2)); }
constexpr int PACKED = panel_base(BLOCKS);  // floats in the factor

__device__ __forceinline__ void team_sync() {
    if constexpr (WARPS == 1) __syncwarp();
    else __syncthreads();
}

// One warp's part of a system.
struct Holding {
    static constexpr int TILES = most(count_tiles), ROWS = most(count_rows);
    Tile tiles[TILES];
    float rhs[ROWS][BLOCK_HALVES];  // this thread's sums for rows 16 b + 8 half + g of its block rows b
};

__device__ __forceinline__ void clear(Tile (&tiles)[Holding::TILES]) {
#pragma unroll
    for (int k = 0; k < Holding::TILES; k++)
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) tiles[k].value[half][q] = 0;
}

__device__ __forceinline__ void clear(Holding& mine) {
    clear(mine.tiles);
#pragma unroll
    for (int b = 0; b < Holding::ROWS; b++) mine.rhs[b][0] = mine.rhs[b][1] = 0;
}

__device__ __forceinline__ void add(Tile (&tiles)[Holding::TILES], const Tile (&more)[Holding::TILES]) {
#pragma unroll
    for (int k = 0; k < Holding::TILES; k++)
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) tiles[k].value[half][q] += more[k].value[half][q];
}

// Sum over the four threads that hold partial sums of one element.
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(FULL_WARP, value, 1);
    return value + __shfl_xor_sync(FULL_WARP, value, 2);
}

// ---------------------------------------------------------------------------------------------- accumulation

// Weights of the entries of one product, for a thread's entries k = t + 4 step. Both factors of A are multiplied by the root of
// the outer weight.
template <int ROWS> struct StepWeights {
    float root[ROWS / 4], linear[ROWS / 4];
};

// Tiles of block column J += (SUBTRACT: -=) A B^T in float32. Each product starts from zero and is added with rounding.
template <int ROLE, int J, bool SUBTRACT, int PRECISION>
__device__ __forceinline__ void multiply_column_rounded(Tile (&tiles)[Holding::TILES], const Fragment<PRECISION> (&fragment)[BLOCKS]) {
    constexpr int COUNT = rows_from(ROLE, J);
    static_for<0, ceil_div(COUNT, GROUP)>([&](auto group) {
        constexpr int BEGIN = decltype(group)::value * GROUP, SIZE = COUNT - BEGIN < GROUP ? COUNT - BEGIN : GROUP;
        float sum[SIZE][BLOCK_HALVES][4] = {};
        static_for<0, PASSES>([&](auto pass) {
            static_for<0, SIZE>([&](auto index) {
                constexpr int k = decltype(index)::value, i = row_after(ROLE, J, BEGIN + k);
                multiply_pass<decltype(pass)::value>(sum[k], fragment[i], fragment[J]);
            });
        });
        static_for<0, SIZE>([&](auto index) {
            constexpr int k = decltype(index)::value, place = tile_slot(row_after(ROLE, J, BEGIN + k), J);
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                for (int q = 0; q < 4; q++) tiles[place].value[half][q] += SUBTRACT ? -sum[k][half][q] : sum[k][half][q];
        });
    });
}

// A += V^T W V and b += V^T c over the rows of one product, which are in shared memory. ROUNDED: adds with rounding
// (float32); otherwise the tensor cores accumulate into `tiles`.
template <int PRECISION, bool WEIGHTED, bool ROUNDED>
__device__ __forceinline__ void accumulate(Tile (&tiles)[Holding::TILES], Holding& mine, const float* rows,
                                           const StepWeights<product_rows(PRECISION)>& weights, int warp, int lane) {
    constexpr int ROWS = product_rows(PRECISION);
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        Fragment<PRECISION> fragment[BLOCKS];
        auto load = [&](auto index) {
            constexpr int b = decltype(index)::value;
            Raw<ROWS> raw = load_raw<ROWS, STRIDE>(rows, b, lane);
#pragma unroll
            for (int step = 0; step < ROWS / 4; step++)
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++) {
                    if constexpr (owner(b) == ROLE) {
                        constexpr int place = row_slot(b);
                        mine.rhs[place][half] += weights.linear[step] * raw.value[step][half];
                    }
                    if constexpr (WEIGHTED) raw.value[step][half] *= weights.root[step];
                }
            fragment[b].set(raw, lane);
        };
        for_rows<ROLE>(load);
        if constexpr (ROUNDED) {
            static_for<0, last_row(ROLE) + 1>([&](auto column) {
                constexpr int j = decltype(column)::value;
                if constexpr (owner(j) != ROLE) load(column);
                multiply_column_rounded<ROLE, j, false>(tiles, fragment);
            });
        } else {
            static_for<0, last_row(ROLE) + 1>([&](auto column) {
                if constexpr (owner(decltype(column)::value) != ROLE) load(column);
            });
            static_for<0, PASSES>([&](auto pass) {
                for_tiles<ROLE>(tiles, [&](Tile& tile, auto row, auto column) {
                    multiply_pass<decltype(pass)::value>(tile.value, fragment[decltype(row)::value],
                                                         fragment[decltype(column)::value]);
                });
            });
        }
    });
}

// Weights of 16 entries as float16 parts (high, low); one register holds entries k and k + 1.
struct SplitWeights {
    const unsigned short *outer[2], *linear[2];  // weights of entry 0

    __device__ __forceinline__ static unsigned pair(const unsigned short* values, int k) {
        return *reinterpret_cast<const unsigned*>(values + k);
    }
};

// high + low <- weight * (high + low), to 22 bits. The rounding error of the product of the high parts goes into the low part.
__device__ __forceinline__ void weigh(unsigned& high, unsigned& low, unsigned weight_high, unsigned weight_low) {
    const unsigned product = multiply_float16(weight_high, high);
    const unsigned lost = multiply_add_float16(weight_high, high, negate_float16(product));
    low = multiply_add_float16(weight_low, high, multiply_add_float16(weight_high, low, lost));
    high = product;
}

// A += V^T W V and b += V^T c over 16 rows of V in shared memory, each with RANK16 high parts and then RANK16 low parts,
// `stride` values apart. With WEIGHTED, a block is loaded once, as the column operand; the row operand is derived from it
// in registers and is the only one weighted. The right-hand sides are computed as products, too.
template <bool WEIGHTED>
__device__ __forceinline__ void accumulate_split(Holding& mine, const unsigned short* rows, int stride,
                                                 const SplitWeights& weights, int warp, int lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    unsigned linear[2], outer[2][2];  // weights of entries k and k + 8; columns 0 and 1 of `linear` are the parts of c
#pragma unroll
    for (int k = 0; k < 2; k++) {
        linear[k] = group < 2 ? SplitWeights::pair(group ? weights.linear[1] : weights.linear[0], pair + 8 * k) : 0u;
#pragma unroll
        for (int part = 0; part < 2; part++) outer[part][k] = WEIGHTED ? SplitWeights::pair(weights.outer[part], pair + 8 * k) : 0u;
    }
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        unsigned columns[BLOCKS][2][4];
        static_for<0, last_row(ROLE) + 1>([&](auto row) {
            constexpr int i = decltype(row)::value;
#pragma unroll
            for (int part = 0; part < 2; part++)
                load_operand<true>(columns[i][part], rows + part * RANK16 + i * BLOCK, stride, lane);
            if constexpr (owner(i) == ROLE) {
                unsigned own[2][4];
#pragma unroll
                for (int part = 0; part < 2; part++)
                    if constexpr (WEIGHTED) {
#pragma unroll
                        for (int q = 0; q < 4; q++) own[part][q] = columns[i][part][q % 2 * 2 + q / 2];
                    } else {  // one load instead of four moves: mma needs its operands in adjacent registers
                        load_operand<false>(own[part], rows + part * RANK16 + i * BLOCK, stride, lane);
                    }
                float sum[4] = {};
                mma_float16(sum, own[1], group == 0 ? linear[0] : 0u, group == 0 ? linear[1] : 0u);
                mma_float16(sum, own[0], linear[0], linear[1]);
                mine.rhs[row_slot(i)][0] += sum[0] + sum[1];
                mine.rhs[row_slot(i)][1] += sum[2] + sum[3];
                if constexpr (WEIGHTED)
#pragma unroll
                    for (int q = 0; q < 4; q++) weigh(own[0][q], own[1][q], outer[0][q / 2], outer[1][q / 2]);
                static_for<0, ceil_div(i + 1, SPLIT_GROUP)>([&](auto group_index) {
                    constexpr int BEGIN = decltype(group_index)::value * SPLIT_GROUP;
                    constexpr int SIZE = i + 1 - BEGIN < SPLIT_GROUP ? i + 1 - BEGIN : SPLIT_GROUP;
                    float sum[SIZE][BLOCK_HALVES][4] = {};
                    static_for<0, PASSES>([&](auto pass) {  // low x high, high x low, high x high
                        constexpr int A = decltype(pass)::value == 0, B = decltype(pass)::value == 1;
                        static_for<0, SIZE>([&](auto index) {
                            constexpr int k = decltype(index)::value;
                            const unsigned(&column)[4] = columns[BEGIN + k][B];
#pragma unroll
                            for (int half = 0; half < BLOCK_HALVES; half++)
                                mma_float16(sum[k][half], own[A], column[2 * half], column[2 * half + 1]);
                        });
                    });
                    static_for<0, SIZE>([&](auto index) {
                        constexpr int k = decltype(index)::value;
                        Tile& tile = mine.tiles[tile_slot(i, BEGIN + k)];
#pragma unroll
                        for (int q = 0; q < 8; q++) tile.value[q / 4][q % 4] += sum[k][q / 4][q % 4];
                    });
                });
            }
        });
    });
}

// Weights of 16 entries for a bf16 table: outer weights in float32, c as bf16 parts (high, low).
struct NarrowWeights {
    const float* outer;
    const unsigned short* linear[2];
};

// high + low <- weight * value for two bf16 values.
__device__ __forceinline__ void weigh(unsigned& high, unsigned& low, unsigned value, float2 weight) {
    const float first = weight.x * __uint_as_float(value << 16), second = weight.y * __uint_as_float(value & 0xffff0000u);
    high = pack_bf16(first, second);
    low = pack_bf16(first - __uint_as_float(high << 16), second - __uint_as_float(high & 0xffff0000u));
}

// A += V^T W V and b += V^T c over 16 rows of V, bf16 in shared memory, `stride` values apart. Both sides and b use the same
// rounded V; W V is in two parts, so that A stays positive definite.
template <bool WEIGHTED>
__device__ __forceinline__ void accumulate_narrow(Holding& mine, const unsigned short* rows, int stride,
                                                  const NarrowWeights& weights, int warp, int lane) {
    constexpr int PARTS = WEIGHTED ? 2 : 1;
    const int group = lane / 4, pair = lane % 4 * 2;
    unsigned linear[2];  // columns 0 and 1 are the parts of c
    float2 outer[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        linear[k] = group < 2 ? SplitWeights::pair(group ? weights.linear[1] : weights.linear[0], pair + 8 * k) : 0u;
        if constexpr (WEIGHTED) outer[k] = *reinterpret_cast<const float2*>(weights.outer + pair + 8 * k);
    }
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        unsigned own[Holding::ROWS][PARTS][4], plain[Holding::ROWS][4];
        for_rows<ROLE>([&](auto row) {
            constexpr int i = decltype(row)::value, place = row_slot(i);
            load_operand<false>(plain[place], rows + i * BLOCK, stride, lane);
            float sum[4] = {};
            mma_bf16(sum, plain[place], linear[0], linear[1]);
            mine.rhs[place][0] += sum[0] + sum[1];
            mine.rhs[place][1] += sum[2] + sum[3];
#pragma unroll
            for (int q = 0; q < 4; q++) {
                if constexpr (WEIGHTED) weigh(own[place][0][q], own[place][PARTS - 1][q], plain[place][q], outer[q / 2]);
                else own[place][0][q] = plain[place][q];
            }
        });
        static_for<0, last_row(ROLE) + 1>([&](auto column) {
            constexpr int j = decltype(column)::value;
            unsigned operand[4];
            if constexpr (owner(j) == ROLE) {  // a lane's row operand has the same values as its column operand
#pragma unroll
                for (int q = 0; q < 4; q++) operand[q] = copy_of(plain[row_slot(j)][q % 2 * 2 + q / 2], lane);
            } else {
                load_operand<true>(operand, rows + j * BLOCK, stride, lane);
            }
            for_rows<ROLE, j>([&](auto row) {
                constexpr int i = decltype(row)::value;
                Tile& tile = mine.tiles[tile_slot(i, j)];
#pragma unroll
                for (int part = PARTS - 1; part >= 0; part--)
#pragma unroll
                    for (int half = 0; half < BLOCK_HALVES; half++)
                        mma_bf16(tile.value[half], own[row_slot(i)][part], operand[2 * half], operand[2 * half + 1]);
            });
        });
    });
}

// Adds the Gram matrix (RANK16 x RANK16, or null) and ridge * scale to A; writes b and the diagonal of A to shared memory.
// Rows and columns from RANK on become those of the identity. With RESIDUAL, `beside` is added to b.
__device__ __forceinline__ void complete(Holding& mine, const TeamMemory& memory, const float* __restrict__ gram,
                                         const float* __restrict__ ridge, float scale, const float* beside, int warp,
                                         int lane) {
    if (warp == 0 && lane == 0) *memory.failed = 0;
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        for_tiles<ROLE>(mine.tiles, [&](Tile& tile, auto row, auto column) {
            constexpr int i = decltype(row)::value, j = decltype(column)::value;
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                for (int q = 0; q < 4; q += 2) {
                    const int r = i * BLOCK + tile_row(lane, q), c = j * BLOCK + tile_column(lane, half, q);
                    if (gram != nullptr) {
                        const float2 pair = *reinterpret_cast<const float2*>(gram + r * RANK16 + c);
                        tile.value[half][q] += pair.x;
                        tile.value[half][q + 1] += pair.y;
                    }
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        float& element = tile.value[half][q + k];
                        if constexpr (i == j)
                            if (r == c + k && r < RANK) element += ridge[r] * scale;
                        if constexpr (i == BLOCKS - 1 && RANK % BLOCK != 0)
                            if (r >= RANK || c + k >= RANK) element = r == c + k;  // discards values beyond the factors
                        if constexpr (i == j)
                            if (r == c + k) memory.diagonal[r] = element;
                    }
                }
        });
        for_rows<ROLE>([&](auto row) {
            constexpr int i = decltype(row)::value, place = row_slot(i);
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++) {
                const float sum = quad_sum(mine.rhs[place][half]);
                const int r = i * BLOCK + 8 * half + lane / 4;
                if (lane % 4 == 0) memory.rhs[r] = r >= RANK ? 0.0f : RESIDUAL ? sum + beside[r] : sum;
            }
        });
    });
}

// ---------------------------------------------------------------------------------------------- Cholesky

__device__ __forceinline__ float reciprocal_root(float x) {
#ifdef HYBRIDMF_EMULATE
    return rsqrtf(x);
#else
    float y;  // one instruction; error 2^-22, as accurate as rsqrtf, but without its handling of denormal pivots
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Factors a diagonal block in place: the input is the block by columns, the output the inverse W of its factor by rows.
// `diagonal` is the diagonal of A before elimination, `first` the block's first row. Lane r < 16 holds row r of the block.
// Lane 16 + c holds column c of W, which starts as the identity and undergoes the same elimination.
__device__ __forceinline__ void factor_diagonal(float* block, int stride, const float* diagonal, int first, int* any_failed,
                                                float epsilon, int lane) {
    float a[BLOCK];
#pragma unroll
    for (int c = 0; c < BLOCK; c++) a[c] = lane < BLOCK ? block[c * stride + lane] : (lane == BLOCK + c ? 1.0f : 0.0f);
    float pivot = 0;  // pivot of column `lane`
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
        if (lane == j) pivot = a[j];
        a[j] *= reciprocal_root(__shfl_sync(FULL_WARP, a[j], j));
#pragma unroll
        for (int c = j + 1; c < BLOCK; c++) a[c] -= a[j] * __shfl_sync(FULL_WARP, a[j], c);
    }
    // Pivots are checked after the chain of steps: values computed after a bad pivot are discarded. A pivot that is pure
    // cancellation indicates a singular matrix; a pivot that is not finite indicates an earlier overflow.
    const bool finite = isfinite(pivot);
    const unsigned bad = __ballot_sync(FULL_WARP, lane < BLOCK && !(finite && pivot > epsilon * diagonal[lane]));
    const int column = __ffs(bad) - 1;
    int failed = 0;
    if (bad) failed = __shfl_sync(FULL_WARP, finite, column) ? first + column + 1 : NON_FINITE;
    __syncwarp();
    if (lane >= BLOCK)
#pragma unroll
        for (int n = 0; n < BLOCK; n++) block[n * stride + lane - BLOCK] = a[n];
    if (failed && lane == 0 && !*any_failed) *any_failed = failed;
}

// Computes y[16 q ...] = W (b - L y) for the rows of panel q, in memory.rhs. Executed by one warp.
__device__ __forceinline__ void substitute_forward(const TeamMemory& memory, int q, int lane) {
    const int n = lane % BLOCK, part = lane / BLOCK;
    float sum[2] = {0, 0};
#pragma unroll 1
    for (int p = 0; p < q; p++) {
        const int stride = panel_stride(p);
        const float* row = memory.staged + panel_base(p) + (q - p) * BLOCK + n + 2 * part * stride;
        const float* y = memory.rhs + p * BLOCK + 2 * part;
#pragma unroll
        for (int c = 0; c < BLOCK; c += 4) {  // each half of the warp takes two columns: no bank conflicts
            sum[0] += row[c * stride] * y[c];
            sum[1] += row[(c + 1) * stride] * y[c + 1];
        }
    }
    float known = sum[0] + sum[1];
    known += __shfl_xor_sync(FULL_WARP, known, BLOCK);
    const float value = memory.rhs[q * BLOCK + n] - known;
    const float* inverse = memory.staged + panel_base(q) + n * panel_stride(q) + part * (BLOCK / 2);
    float y = 0;
#pragma unroll
    for (int c = 0; c < BLOCK / 2; c++) y += inverse[c] * __shfl_sync(FULL_WARP, value, c + part * (BLOCK / 2));
    y += __shfl_xor_sync(FULL_WARP, y, BLOCK);
    __syncwarp();
    if (part == 0) memory.rhs[q * BLOCK + n] = y;
    __syncwarp();
}

// Computes x[16 p ...] = W^T (y - L^T x) for all panels from the last one on, in memory.rhs. Executed by one warp.
__device__ __forceinline__ void substitute_back(const TeamMemory& memory, int lane) {
    const int column = lane % BLOCK, part = lane / BLOCK;
#pragma unroll 1
    for (int p = BLOCKS - 1; p >= 0; p--) {
        const int stride = panel_stride(p);
        const float* panel = memory.staged + panel_base(p);
        const float* below = panel + column * stride + BLOCK;
        const float* x = memory.rhs + (p + 1) * BLOCK;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 2
        for (int r = 4 * part; r < (BLOCKS - 1 - p) * BLOCK; r += 8) {
            const float4 l = *reinterpret_cast<const float4*>(below + r);
            const float4 v = *reinterpret_cast<const float4*>(x + r);
            sum.x += l.x * v.x;
            sum.y += l.y * v.y;
            sum.z += l.z * v.z;
            sum.w += l.w * v.w;
        }
        float known = (sum.x + sum.y) + (sum.z + sum.w);
        known += __shfl_xor_sync(FULL_WARP, known, BLOCK);
        const float value = memory.rhs[p * BLOCK + column] - known;
        const float* inverse = panel + part * (BLOCK / 2) * stride + column;
        float solved = 0;
#pragma unroll
        for (int n = 0; n < BLOCK / 2; n++) solved += inverse[n * stride] * __shfl_sync(FULL_WARP, value, n + part * (BLOCK / 2));
        solved += __shfl_xor_sync(FULL_WARP, solved, BLOCK);
        __syncwarp();
        if (part == 0) memory.rhs[p * BLOCK + column] = solved;
        __syncwarp();
    }
}

// tile (a block of A21) <- L21 = tile W^T. The tile's columns 8 h + 2 t and 8 h + 2 t + 1 serve as the k of a product, so
// the accumulators serve as the operand without a shuffle.
__device__ __forceinline__ void multiply_by_inverse(Tile& tile, const Fragment<FLOAT32_WIDE> (&inverse)[BLOCK_HALVES], int lane) {
    float product[BLOCK_HALVES][4] = {};
    Fragment<FLOAT32_WIDE> a[BLOCK_HALVES];
#pragma unroll
    for (int h = 0; h < BLOCK_HALVES; h++) {
        const Raw<8> raw{{{tile.value[h][0], tile.value[h][2]}, {tile.value[h][1], tile.value[h][3]}}};
        a[h].set(raw, lane);
    }
#pragma unroll
    for (int h = 0; h < BLOCK_HALVES; h++) {
        multiply_part<FLOAT32_WIDE>(product, a[h].part[1], inverse[h].pair[0]);
        multiply_part<FLOAT32_WIDE>(product, a[h].part[0], inverse[h].pair[1]);
    }
#pragma unroll
    for (int h = 0; h < BLOCK_HALVES; h++) multiply_part<FLOAT32_WIDE>(product, a[h].part[0], inverse[h].pair[0]);
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
        for (int q = 0; q < 4; q++) tile.value[half][q] = product[half][q];
}

// Computes L21 of panel p from the accumulators of its blocks and writes it to shared memory.
__device__ __forceinline__ void solve_panel(Holding& mine, const TeamMemory& memory, int p, int warp, int lane) {
    float* panel = memory.staged + panel_base(p);
    const int stride = panel_stride(p);
    Fragment<FLOAT32_WIDE> inverse[BLOCK_HALVES];  // k = columns 8 h + 2 t, 8 h + 2 t + 1 of W; half m: rows 8 m + g
#pragma unroll
    for (int h = 0; h < BLOCK_HALVES; h++) {
        Raw<8> raw;
#pragma unroll
        for (int m = 0; m < BLOCK_HALVES; m++) {
            const float2 pair = *reinterpret_cast<const float2*>(panel + (8 * m + lane / 4) * stride + 8 * h + lane % 4 * 2);
            raw.value[0][m] = pair.x;
            raw.value[1][m] = pair.y;
        }
        inverse[h].set(raw, lane);
    }
    with_role(warp, [&](auto role) {
        for_tiles<decltype(role)::value>(mine.tiles, [&](Tile& tile, auto row, auto column) {
            constexpr int i = decltype(row)::value, j = decltype(column)::value;
            if constexpr (i > j)
                if (j == p) {
                    multiply_by_inverse(tile, inverse, lane);
#pragma unroll
                    for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                        for (int q = 0; q < 4; q++)
                            panel[tile_column(lane, half, q) * stride + (i - j) * BLOCK + tile_row(lane, q)] = tile.value[half][q];
                }
        });
    });
}

// A22 -= L21 L21^T beyond panel p, over the columns of one product, from column k on.
__device__ __forceinline__ void subtract_product(Holding& mine, const TeamMemory& memory, int p, int k, int warp, int lane) {
    const int stride = panel_stride(p);
    const float* corner = memory.staged + panel_base(p) + (k + lane % 4) * stride + lane / 4 - p * BLOCK;
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        Fragment<FLOAT32_WIDE> fragment[BLOCKS];
        auto load = [&](auto block) {
            constexpr int b = decltype(block)::value;
            Raw<8> raw;
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++)
                    raw.value[step][half] = corner[4 * step * stride + b * BLOCK + 8 * half];
            fragment[b].set(raw, lane);
        };
        for_rows<ROLE, 1>([&](auto row) {
            if (decltype(row)::value > p) load(row);
        });
        static_for<1, last_row(ROLE) + 1>([&](auto column) {
            constexpr int j = decltype(column)::value;
            if (j > p) {
                if constexpr (owner(j) != ROLE) load(column);
                multiply_column_rounded<ROLE, j, true>(mine.tiles, fragment);
            }
        });
    });
}

// Factors A and solves for x, which it leaves in memory.rhs; returns the failing leading minor or 0 in every thread. The loop
// over panels is not unrolled: unrolled code would not fit in the instruction cache.
__device__ __forceinline__ int cholesky_solve(Holding& mine, const TeamMemory& memory, float epsilon, int warp, int lane) {
#pragma unroll 1
    for (int p = 0; p < BLOCKS; p++) {
        lane = fresh(lane);
        const int factoring = OWNERS >> 4 * p & 15;
        if (warp == factoring) {
            float* panel = memory.staged + panel_base(p);
            const int stride = panel_stride(p);
            with_role(warp, [&](auto role) {
                for_rows<decltype(role)::value>([&](auto row) {
                    constexpr int i = decltype(row)::value, place = tile_slot(i, i);
                    if (i == p) {
                        const Tile& tile = mine.tiles[place];
#pragma unroll
                        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                            for (int q = 0; q < 4; q++)
                                panel[tile_column(lane, half, q) * stride + tile_row(lane, q)] = tile.value[half][q];
                    }
                });
            });
            __syncwarp();
            factor_diagonal(panel, stride, memory.diagonal + p * BLOCK, p * BLOCK, memory.failed, epsilon, lane);
        }
        // meanwhile another warp, if there is one, does the forward substitution with the previous panel
        if (p > 0 && warp == (factoring + 1) % WARPS) substitute_forward(memory, p - 1, lane);
        if (p == BLOCKS - 1) break;
        team_sync();
        lane = fresh(lane);
        solve_panel(mine, memory, p, warp, lane);
        team_sync();
#pragma unroll 1
        for (int k = 0; k < BLOCK; k += product_rows(FLOAT32_WIDE)) subtract_product(mine, memory, p, k, warp, lane);
    }
    team_sync();
    if (warp == 0) {
        substitute_forward(memory, BLOCKS - 1, lane);
        substitute_back(memory, lane);
    }
    team_sync();
    return *memory.failed;
}

// ---------------------------------------------------------------------------------------------- conjugate gradients

// Adds two values over lanes that differ in bit DISTANCE: lanes with the bit clear get the sum of `first`, the others the sum
// of `second`. Summing n values this way costs n - 1 shuffles instead of n log n.
template <int DISTANCE> __device__ __forceinline__ float halve(float first, float second, int lane) {
    const bool upper = lane & DISTANCE;
    return (upper ? second : first) + __shfl_xor_sync(FULL_WARP, upper ? first : second, DISTANCE);
}

constexpr int PRODUCT_FLOATS = (WARPS + 1) * RANK16;  // row sums, then the column sums of each warp

// Partial sums of A vector: each block left of the diagonal also stands for its transpose. PRODUCT_FLOATS describes `sums`.
__device__ __forceinline__ void multiply_vector(const Holding& mine, const float* vector, float* sums, int warp, int lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        float along[Holding::ROWS][2] = {}, at_row[Holding::ROWS][2];
        for_rows<ROLE>([&](auto row) {
            constexpr int i = decltype(row)::value, place = row_slot(i);
            at_row[place][0] = vector[i * BLOCK + group];
            at_row[place][1] = vector[i * BLOCK + 8 + group];
        });
        static_for<0, last_row(ROLE) + 1>([&](auto column) {
            constexpr int j = decltype(column)::value;
            float down[BLOCK_HALVES][2] = {}, at_column[BLOCK_HALVES][2];
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++) {
                const float2 both = *reinterpret_cast<const float2*>(vector + j * BLOCK + 8 * half + pair);
                at_column[half][0] = both.x;
                at_column[half][1] = both.y;
            }
            for_rows<ROLE, j>([&](auto row) {
                constexpr int i = decltype(row)::value, place = row_slot(i);
                const Tile& tile = mine.tiles[tile_slot(i, j)];
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        along[place][q / 2] += tile.value[half][q] * at_column[half][q % 2];
                        if constexpr (i != j) down[half][q % 2] += tile.value[half][q] * at_row[place][q / 2];
                    }
            });
            if constexpr (j < last_row(ROLE)) {
                const float first = halve<16>(down[0][0], down[1][0], lane), second = halve<16>(down[0][1], down[1][1], lane);
                float sum = halve<8>(first, second, lane);
                sum += __shfl_xor_sync(FULL_WARP, sum, 4);
                const int place = 8 * (lane / 16) + pair + lane / 8 % 2;
                if (lane % 8 < 4) sums[(1 + ROLE) * RANK16 + j * BLOCK + place] = sum;
            }
        });
        for_rows<ROLE>([&](auto row) {
            constexpr int i = decltype(row)::value, place = row_slot(i);
            float sum = halve<1>(along[place][0], along[place][1], lane);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            if (lane % 4 < 2) sums[i * BLOCK + 8 * (lane % 2) + group] = sum;
        });
    });
}

// The vectors of conjugate gradients are distributed over one warp: a lane holds elements 32 e + lane.
constexpr int ELEMENTS = ceil_div(RANK16, WARP);
using Elements = float[ELEMENTS];

__device__ __forceinline__ double dot(const Elements& u, const Elements& v) {
    double sum = 0;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) sum += double(u[e]) * double(v[e]);
    return warp_sum(sum);
}

// a / b for b > 0, accurate to the last bits of a float. The quotient is in float32's range; a and b need not be. A division of
// doubles takes hundreds of cycles, during which the other warps are idle.
__device__ __forceinline__ float quotient(double a, double b) {
#ifdef HYBRIDMF_EMULATE
    return float(a / b);
#else
    const double scale = __hiloint2double((2046 - (__double2hiint(b) >> 20)) << 20, 0);  // brings b to 1 ... 2
    return __fdividef(float(a * scale), float(b * scale));
#endif
}

// Adds up the partial sums of `multiply_vector`.
__device__ __forceinline__ void collect(Elements& product, const float* sums, int lane) {
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
        const int k = e * WARP + lane;
        product[e] = 0;
        if (k < RANK16) {
            product[e] = sums[k];
            static_for<0, WARPS>([&](auto role) {
                constexpr int ROLE = decltype(role)::value;
                if (k < last_row(ROLE) * BLOCK) product[e] += sums[(1 + ROLE) * RANK16 + k];
            });
        }
    }
}

// Loads the starting point of conjugate gradients.
__device__ __forceinline__ void load_elements(Elements& x, const float* start, int lane) {
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) x[e] = e * WARP + lane < RANK ? start[e * WARP + lane] : 0.0f;
}

// Runs `steps` conjugate gradient steps on A x = b from x, which the first warp holds; the blocks of A stay in registers. Leaves
// x in memory.rhs. Stops early once the residual has fallen by 1e-10 (squared 1e-20) or is about to underflow, like the CPU
// backend. All warps multiply; the first warp holds the vectors, so a step needs only two barriers. All warps call `meanwhile`
// once. Failure, NON_FINITE or NEGATIVE_CURVATURE, is written to memory.failed.
template <class Body>
__device__ __forceinline__ void conjugate_gradient(Holding& mine, const TeamMemory& memory, const Elements& x, int steps,
                                                   int warp, int lane, Body&& meanwhile) {
    float* const direction = memory.diagonal;  // (RANK16,)
    float* const sums = memory.sums;
    int* const going_on = memory.failed + 1;
    Elements r, p;
    double square = 0, first = 0;
    int status = 0;
    if (warp == 0) {
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const int k = e * WARP + lane;
            r[e] = k < RANK ? memory.rhs[k] : 0.0f;
            if (k < RANK16) direction[k] = memory.rhs[k] = x[e];
        }
        if (lane == 0) *going_on = 1;
    }
#pragma unroll 1
    for (int step = -1; true; step++) {  // step -1 computes the first residual
        team_sync();
        if (!*going_on) break;
        multiply_vector(mine, direction, sums, warp, lane);
        if (step < 0) meanwhile();
        team_sync();
        if (warp != 0) continue;
        Elements product;
        collect(product, sums, lane);
        float ratio = 0;
        if (step < 0) {
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) r[e] -= product[e];
            first = square = dot(r, r);
            if (!isfinite(square)) status = NON_FINITE;
        } else {
            const double curvature = dot(p, product);
            if (curvature <= 0) {
                status = NEGATIVE_CURVATURE;
            } else {
                const float length = quotient(square, curvature);
#pragma unroll
                for (int e = 0; e < ELEMENTS; e++) {
                    if (e * WARP + lane < RANK16) memory.rhs[e * WARP + lane] += length * p[e];
                    r[e] -= length * product[e];
                }
                const double next = dot(r, r);
                if (!isfinite(next)) status = NON_FINITE;
                ratio = quotient(next, square);
                square = next;
            }
        }
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            p[e] = step < 0 ? r[e] : r[e] + ratio * p[e];
            if (e * WARP + lane < RANK16) direction[e * WARP + lane] = p[e];
        }
        // 1e-60: squares of float32 about to underflow
        const bool ends = status != 0 || step + 1 == steps || square <= 1e-20 * first || square <= 1e-60;
        if (lane == 0 && ends) *going_on = 0;
    }
    if (warp == 0 && lane == 0) *memory.failed = status;
    team_sync();
}

// ---------------------------------------------------------------------------------------------- storing

// solution <- x, or zeros after a failure; columns RANK ... width - 1 are zero. Sets the status.
__device__ __forceinline__ void store_solution(float* solution, int* status, int width, const TeamMemory& memory, int failed,
                                               int warp, int lane) {
    if (warp != 0) return;
    bool finite = true;
    for (int k = lane; k < RANK; k += WARP) finite = finite && isfinite(memory.rhs[k]);
    if (!failed && !__all_sync(FULL_WARP, finite)) failed = NON_FINITE;
    for (int k = lane; k < width; k += WARP) solution[k] = k < RANK && !failed ? memory.rhs[k] : 0.0f;
    if (lane == 0) *status = failed;
}
