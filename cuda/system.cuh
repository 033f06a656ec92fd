// system.cuh - one system A x = b on chip: a team of WARPS warps holds the lower blocks of A in registers.
//
// constants: RANK    order of the systems, 1 to 128; padded to RANK16 with rows and columns of the identity
//            WARPS   warps per team: 1 (up to RANK 64), 2 or 4 (one team per thread block)
// The block rows are distributed over the warps so that each holds about equally many blocks: OWNERS below.
// The factorization is blocked and right-looking. One warp factors the diagonal block and, in its other lanes, inverts
// the factor. Then L21 = A21 L11^-T and A22 -= L21 L21^T are products on tensor cores, and the substitutions are products
// with the inverses. Only the 16 columns of a block are eliminated one after the other. L stays in registers; warps of a team
// exchange one panel at a time through shared memory.
// Products use float16 parts, high and low: half the instructions of tf32 parts. Powers of two first scale the diagonal of A to
// 1 ... 4: D A D (D^-1 x) = D b. All elements of A and its factor are then below 4. There the two parts represent a value to
// within 2^-25, the error that a backward-stable Cholesky factorization in float32 has anyway.
// shared (floats per team): staged: entries in flight, then FACTOR_FLOATS; vectors: TEAM_VECTORS
// Failure goes to `status`: 0, the leading minor that is not positive definite, NON_FINITE or NEGATIVE_CURVATURE.
// synchronization: threads of a team exchange values through TeamMemory alone. `team_sync` separates writes from reads and writes
//         by other threads; while one warp works alone (`factor_block`, `multiply_by_inverse`), __syncwarp does. Shuffles order no
//         memory. Panel p: the owner of block row p writes inverse(p) and y_p; barrier; each warp writes its rows of the panel and
//         of b; barrier; all read the panel. These reads end before the first barrier of panel p + 1, and the panel is overwritten
//         after it. Back substitution: the owner reads the shares and writes x_p; barrier; each warp reads x_p and writes its share
//         for p - 1; barrier. Conjugate gradients: between the two barriers of a step, all read the direction and whether to go on,
//         and write sums; then until the next step, warp 0 alone reads the sums and writes the others.
#include "fragments.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef PULLED
#define PULLED 0           // 1: solutions hold what is added to right-hand sides
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

constexpr int EXTRAS = WARPS == 1 ? 8 : 24;    // floats for a few values of a team; they keep the next team aligned
constexpr int TEAM_VECTORS = 4 * RANK16 + EXTRAS;  // floats in addition to the staged ones
constexpr int OPERAND_FLOATS = 4 * WARP;       // a part of a row or column operand: four registers per lane
constexpr int INVERSE_STRIDE = 20;             // 16 bytes of 8 rows hit all 32 banks
constexpr int INVERSE_FLOATS = (BLOCK - 1) * INVERSE_STRIDE + BLOCK;
constexpr int PANEL_FLOATS = WARPS == 1 ? BLOCK : BLOCKS * 4 * OPERAND_FLOATS;
constexpr int FACTOR_FLOATS = PANEL_FLOATS + BLOCKS * INVERSE_FLOATS;
static_assert(EXTRAS >= 2 + 4 * WARPS, "`failed`, whether conjugate gradients go on, and `extras` are apart");
static_assert(WARPS * BLOCK <= PANEL_FLOATS, "the shares of the back substitution do not reach the inverses");
static_assert((BLOCK - 1) * BLOCK <= INVERSE_FLOATS, "the columns that `factor_block` exchanges take the place of one block");

struct TeamMemory {
    float* staged;
    float* rhs;       // (RANK16,) right-hand side, then the solution
    float* diagonal;  // (RANK16,) of A before elimination
    float* scales;    // (RANK16,) D
    float* pivots;    // (RANK16,)
    int* failed;      // with conjugate gradients, the status; then whether they go on
    float* extras;    // (4 WARPS,)
    float* sums;      // (WARPS + 1, RANK16) partial sums of a product, for conjugate gradients

    // With `vectors`, TEAM_VECTORS floats.
    __device__ __forceinline__ TeamMemory(float* staged, float* vectors, float* sums = nullptr)
        : TeamMemory(staged, vectors, reinterpret_cast<int*>(vectors + 4 * RANK16), sums) {}
    __device__ __forceinline__ TeamMemory(float* staged, float* vectors, int* failed, float* sums)
        : staged(staged), rhs(vectors), diagonal(vectors + RANK16), scales(vectors + 2 * RANK16), pivots(vectors + 3 * RANK16),
          failed(failed), extras(reinterpret_cast<float*>(failed) + 2), sums(sums) {}

    // Block i of a panel as a row or column operand, part 0 (high) or 1 (low), if a team has several warps.
    __device__ __forceinline__ float4* rows(int i, int part, int lane) const {
        return reinterpret_cast<float4*>(staged + (i * 4 + part) * OPERAND_FLOATS) + lane;
    }
    __device__ __forceinline__ float4* columns(int i, int part, int lane) const { return rows(i, 2 + part, lane); }
    // Diagonal block p, by rows; later the inverse W of its factor, by columns.
    __device__ __forceinline__ float* inverse(int p) const { return staged + PANEL_FLOATS + p * INVERSE_FLOATS; }
    // (BLOCK,) sums of a warp during the back substitution, in place of the panel.
    __device__ __forceinline__ float* shares(int warp) const { return staged + warp * BLOCK; }
};

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

// Sum over the four threads that hold partial sums of one element.
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(FULL_WARP, value, 1);
    return value + __shfl_xor_sync(FULL_WARP, value, 2);
}

// Adds two values over lanes that differ in bit DISTANCE: lanes with the bit clear get the sum of `first`, the others the sum
// of `second`. Summing n values this way costs n - 1 shuffles instead of n log n.
template <int DISTANCE> __device__ __forceinline__ float halve(float first, float second, int lane) {
    const bool upper = lane & DISTANCE;
    return (upper ? second : first) + __shfl_xor_sync(FULL_WARP, upper ? first : second, DISTANCE);
}

// Calls body(element, row) for the elements of the diagonal that this thread holds of a block on the diagonal; `row` is inside it.
template <class Body> __device__ __forceinline__ void for_diagonal(Tile& tile, int lane, Body&& body) {
    const bool holds = lane / 8 == lane % 4, odd = lane & 4;
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++) {
        float &first = tile.value[half][2 * half], &second = tile.value[half][2 * half + 1];
        float element = odd ? second : first;
        if (holds) body(element, 8 * half + lane / 4);
        if (holds && odd) second = element;
        if (holds && !odd) first = element;
    }
}

// ---------------------------------------------------------------------------------------------- accumulation

// Weights of the entries of one product, for a thread's entries k = t + 4 step. Both factors of A are multiplied by the root of
// the outer weight.
template <int ROWS> struct StepWeights {
    float root[ROWS / 4], linear[ROWS / 4];
};

// Tiles of block column J += A B^T in float32. Each product starts from zero and is added with rounding.
template <int ROLE, int J, int PRECISION>
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
                for (int q = 0; q < 4; q++) tiles[place].value[half][q] += sum[k][half][q];
        });
    });
}

// The functions below add the entries of one product to the blocks and right-hand sides of a role: A += V^T W V, b += V^T c.

// Rows of V in shared memory. ROUNDED: adds with rounding (float32); otherwise the tensor cores accumulate into the tiles.
template <int ROLE, int PRECISION, bool WEIGHTED, bool ROUNDED>
__device__ __forceinline__ void accumulate(Holding& mine, const float* rows, const StepWeights<product_rows(PRECISION)>& weights,
                                           int lane) {
    constexpr int ROWS = product_rows(PRECISION);
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
            multiply_column_rounded<ROLE, j>(mine.tiles, fragment);
        });
    } else {
        static_for<0, last_row(ROLE) + 1>([&](auto column) {
            if constexpr (owner(decltype(column)::value) != ROLE) load(column);
        });
        static_for<0, PASSES>([&](auto pass) {
            for_tiles<ROLE>(mine.tiles, [&](Tile& tile, auto row, auto column) {
                multiply_pass<decltype(pass)::value>(tile.value, fragment[decltype(row)::value],
                                                     fragment[decltype(column)::value]);
            });
        });
    }
}

// Weights of up to WARP entries as 16-bit parts, WARP high parts and then WARP low parts; one register holds entries k and k + 1.
struct SplitWeights {
    const unsigned short *outer, *linear;  // weights of entry 0

    __device__ __forceinline__ static unsigned pair(const unsigned short* values, int k, int part) {
        return *reinterpret_cast<const unsigned*>(values + k + part * WARP);
    }
};

// Order in which a warp computes its blocks: by columns, in groups of two, the last of two or three. A tensor core starts a product
// every 6 cycles, but the next one with the same sum only 24 cycles later, so the products of a group alternate.
struct Place {
    int row, column;
};
__host__ __device__ constexpr Place place_of(int role, int k) {
    for (int column = 0; column < BLOCKS; column++)
        for (int row = column; row < BLOCKS; row++)
            if (owner(row) == role && k-- == 0) return {row, column};
    return {0, 0};
}
__host__ __device__ constexpr int count_groups(int role) { return count_tiles(role) < 2 * GROUP ? 1 : count_tiles(role) / GROUP; }
__host__ __device__ constexpr int group_end(int role, int group) {
    return group + 1 == count_groups(role) ? count_tiles(role) : (group + 1) * GROUP;
}
// Whether the blocks of a group are the first ones that need a column.
__host__ __device__ constexpr bool opens(int role, int group, int column) {
    for (int k = 0; k < group_end(role, group); k++)
        if (place_of(role, k).column == column) return k >= group * GROUP;
    return false;
}

// 16 rows of V in the layout of `load_operand`, each with RANK16 high parts and then RANK16 low parts, `stride` values apart. Of
// the two operands of a product, only the row operand is weighted. The right-hand sides are computed as products, too. ROUNDED:
// the products of each call start from zero and are added with rounding.
template <int ROLE, int PRECISION, bool WEIGHTED, bool ROUNDED>
__device__ __forceinline__ void accumulate_parts(Holding& mine, const unsigned short* rows, int stride, const SplitWeights& weights,
                                                 int lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
    unsigned linear[2], outer[2][2];  // weights of entries k and k + 8; columns 0 and 1 of `linear` are the parts of c
#pragma unroll
    for (int k = 0; k < 2; k++) {
        linear[k] = group < 2 ? SplitWeights::pair(weights.linear, pair + 8 * k, group) : 0u;
#pragma unroll
        for (int part = 0; part < 2; part++) outer[part][k] = WEIGHTED ? SplitWeights::pair(weights.outer, pair + 8 * k, part) : 0u;
    }
    constexpr int GROUPS = count_groups(ROLE);
    unsigned own[Holding::ROWS][2][4], columns[BLOCKS][2][4];
    auto load = [&](auto index) {  // the columns that a group opens
        constexpr int g = decltype(index)::value;
        static_for<0, BLOCKS>([&](auto column) {
            constexpr int j = decltype(column)::value;
            if constexpr (opens(ROLE, g, j))
#pragma unroll
                for (int part = 0; part < 2; part++)
                    load_operand<true>(columns[j][part], rows + part * RANK16 + j * BLOCK, stride, lane);
        });
    };
    Tile sums[GROUPS][2 * GROUP - 1];
    auto promote = [&](auto index) {
        constexpr int g = decltype(index)::value;
        static_for<g * GROUP, group_end(ROLE, g)>([&](auto number) {
            constexpr Place place = place_of(ROLE, decltype(number)::value);
            Tile &tile = mine.tiles[tile_slot(place.row, place.column)], &sum = sums[g][decltype(number)::value - g * GROUP];
#pragma unroll
            for (int q = 0; q < 8; q++) tile.value[q / 4][q % 4] += sum.value[q / 4][q % 4];
        });
    };
    for_rows<ROLE>([&](auto row) {
        constexpr int i = decltype(row)::value;
#pragma unroll
        for (int part = 0; part < 2; part++)
            load_operand<false>(own[row_slot(i)][part], rows + part * RANK16 + i * BLOCK, stride, lane);
    });
    load(Index<0>{});
    for_rows<ROLE>([&](auto row) {
        constexpr int place = row_slot(decltype(row)::value);
        unsigned(&operand)[2][4] = own[place];
        float sum[4] = {};
        multiply_parts<PRECISION>(sum, operand[1], group == 0 ? linear[0] : 0u, group == 0 ? linear[1] : 0u);
        multiply_parts<PRECISION>(sum, operand[0], linear[0], linear[1]);
        mine.rhs[place][0] += sum[0] + sum[1];
        mine.rhs[place][1] += sum[2] + sum[3];
        if constexpr (WEIGHTED) {
#pragma unroll
            for (int q = 0; q < 4; q++) weigh<PRECISION>(operand[0][q], operand[1][q], outer[0][q / 2], outer[1][q / 2]);
        }
    });
    static_for<0, GROUPS>([&](auto index) {
        constexpr int g = decltype(index)::value;
        if constexpr (g + 1 < GROUPS) load(Index<g + 1>{});
        if constexpr (ROUNDED)
            for (Tile& sum : sums[g]) sum = {};
        static_for<0, PASSES>([&](auto pass) {  // low x high, high x low, high x high
            constexpr int A = decltype(pass)::value == 0, B = decltype(pass)::value == 1;
            static_for<g * GROUP, group_end(ROLE, g)>([&](auto number) {
                constexpr Place place = place_of(ROLE, decltype(number)::value);
                Tile& tile = ROUNDED ? sums[g][decltype(number)::value - g * GROUP] : mine.tiles[tile_slot(place.row, place.column)];
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++)
                    multiply_parts<PRECISION>(tile.value[half], own[row_slot(place.row)][A], columns[place.column][B][2 * half],
                                              columns[place.column][B][2 * half + 1]);
            });
        });
        if constexpr (ROUNDED && g > 0) promote(Index<g - 1>{});
    });
    if constexpr (ROUNDED) promote(Index<GROUPS - 1>{});
}

// Weights of 16 entries for a bf16 table: outer weights in float32, c as bf16 parts (high, low).
struct NarrowWeights {
    const float* outer;
    const unsigned short* linear;
};

// high + low <- weight * value for two bf16 values.
__device__ __forceinline__ void weigh(unsigned& high, unsigned& low, unsigned value, float2 weight) {
    split<BF16X3>(high, low, weight.x * __uint_as_float(value << 16), weight.y * __uint_as_float(value & 0xffff0000u));
}

// 16 rows of V in bf16, in the layout of `load_operand`, `stride` values apart. Both sides and b use the same rounded V; W V is in
// two parts, so that A stays positive definite.
template <int ROLE, bool WEIGHTED>
__device__ __forceinline__ void accumulate_narrow(Holding& mine, const unsigned short* rows, int stride,
                                                  const NarrowWeights& weights, int lane) {
    constexpr int PARTS = WEIGHTED ? 2 : 1;
    const int group = lane / 4, pair = lane % 4 * 2;
    unsigned linear[2];  // columns 0 and 1 are the parts of c
    float2 outer[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        linear[k] = group < 2 ? SplitWeights::pair(weights.linear, pair + 8 * k, group) : 0u;
        if constexpr (WEIGHTED) outer[k] = *reinterpret_cast<const float2*>(weights.outer + pair + 8 * k);
    }
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
}

// Adds the Gram matrix (RANK16 x RANK16, or null) and ridge * scale to A; writes b and the diagonal of A to shared memory.
// Rows and columns from RANK on become those of the identity. With RESIDUAL or PULLED, `beside` is added to b.
__device__ __forceinline__ void complete(Holding& mine, const TeamMemory& memory, const float* __restrict__ gram,
                                         const float* __restrict__ ridge, float scale, const float* beside, int warp,
                                         int lane) {
    if (warp == 0 && lane == 0) *memory.failed = 0;
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        if (gram != nullptr)  // all loads in flight at once
            for_tiles<ROLE>(mine.tiles, [&](Tile& tile, auto row, auto column) {
                constexpr int i = decltype(row)::value, j = decltype(column)::value;
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                    for (int q = 0; q < 4; q += 2) {
                        const int r = i * BLOCK + tile_row(lane, q), c = j * BLOCK + tile_column(lane, half, q);
                        const float2 pair = *reinterpret_cast<const float2*>(gram + r * RANK16 + c);
                        tile.value[half][q] += pair.x;
                        tile.value[half][q + 1] += pair.y;
                    }
            });
        for_tiles<ROLE>(mine.tiles, [&](Tile& tile, auto row, auto column) {
            constexpr int i = decltype(row)::value, j = decltype(column)::value;
            if constexpr (i == BLOCKS - 1 && RANK % BLOCK != 0) {  // discards values beyond the factors
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                    for (int q = 0; q < 4; q++) {
                        const int r = i * BLOCK + tile_row(lane, q), c = j * BLOCK + tile_column(lane, half, q);
                        if (r >= RANK || c >= RANK) tile.value[half][q] = 0;
                    }
            }
            if constexpr (i == j) {
                for_diagonal(tile, lane, [&](float& element, int inside) {
                    const int r = i * BLOCK + inside;
                    element = r < RANK ? element + ridge[r] * scale : 1.0f;
                    memory.diagonal[r] = element;
                });
            }
        });
        for_rows<ROLE>([&](auto row) {
            constexpr int i = decltype(row)::value, place = row_slot(i);
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++) {
                const float sum = quad_sum(mine.rhs[place][half]);
                const int r = i * BLOCK + 8 * half + lane / 4;
                if (lane % 4 == 0) memory.rhs[r] = r >= RANK ? 0.0f : RESIDUAL || PULLED ? sum + beside[r] : sum;
            }
        });
    });
}

// ---------------------------------------------------------------------------------------------- Cholesky

// A power of two whose square scales a positive value to 1 ... 4.
__device__ __forceinline__ float scale_of(float value) {
    const int exponent = int(__float_as_uint(value) >> 23) - 127;
    return __uint_as_float(unsigned(127 - (exponent >> 1)) << 23);
}

// Stores a row's scaled diagonal element of A, its scale and its element of D b in shared memory. A row whose diagonal element is
// not positive gets the scale 0, so its pivot is that element.
__device__ __forceinline__ void keep_row(const TeamMemory& memory, int row, float diagonal, float b) {
    float d = 0;
    if (diagonal > 0 && isfinite(diagonal)) {
        d = scale_of(diagonal);
        diagonal = diagonal * d * d;
    }
    memory.diagonal[row] = diagonal;
    memory.scales[row] = d;
    memory.rhs[row] = b * d;
}

// Block (i, j) of D A D; the scales and the diagonal must be visible to all threads.
__device__ __forceinline__ void scale_tile(Tile& tile, const TeamMemory& memory, int i, int j, int lane) {
    const float low = memory.scales[i * BLOCK + lane / 4], high = memory.scales[i * BLOCK + lane / 4 + 8];
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++) {
        const float2 column = *reinterpret_cast<const float2*>(memory.scales + j * BLOCK + 8 * half + lane % 4 * 2);
        float(&v)[4] = tile.value[half];
        v[0] *= low * column.x;
        v[1] *= low * column.y;
        v[2] *= high * column.x;
        v[3] *= high * column.y;
    }
}

// Replaces the diagonal of block (i, i) by the scaled one.
__device__ __forceinline__ void set_diagonal(Tile& tile, const TeamMemory& memory, int i, int lane) {
    for_diagonal(tile, lane, [&](float& element, int row) { element = memory.diagonal[i * BLOCK + row]; });
}

// One instruction each, with an error of 2^-22; denormal numbers count as 0.
__device__ __forceinline__ float reciprocal_root(float x) {
#ifdef HYBRIDMF_EMULATE
    return rsqrtf(x);
#else
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

__device__ __forceinline__ float reciprocal(float x) {
#ifdef HYBRIDMF_EMULATE
    return 1 / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Writes diagonal block p to shared memory, by rows.
__device__ __forceinline__ void store_diagonal(const Tile& tile, float* block, int lane) {
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
        for (int q = 0; q < 4; q += 2)
            *reinterpret_cast<float2*>(block + tile_row(lane, q) * INVERSE_STRIDE + tile_column(lane, half, q)) =
                make_float2(tile.value[half][q], tile.value[half][q + 1]);
}

// Factors diagonal block p, which `store_diagonal` wrote, replaces it by the inverse W of its factor, by columns, and b by y = W b.
// Executed by one warp. Lane r < 16 holds row r of the block and of b. Lane 16 + c holds column c of W, which starts as the
// identity and undergoes the same elimination.
//
// The 16 steps are a chain: pivot, reciprocal, next pivot. Therefore each lane computes the next pivot and the next column itself,
// from values that other lanes send. The other columns need an element of each row, which comes from shared memory, four at a
// time: registers limit how many shuffles can be in flight. Columns beyond RANK are those of the identity, which it leaves alone.
__device__ __forceinline__ void factor_block(const TeamMemory& memory, int p, int lane) {
    float* block = memory.inverse(p);
    __syncwarp();
    float a[BLOCK];
#pragma unroll
    for (int k = 0; k < BLOCK; k += 4) {
        const float4 v = *reinterpret_cast<const float4*>(block + lane % BLOCK * INVERSE_STRIDE + k);
        a[k] = v.x, a[k + 1] = v.y, a[k + 2] = v.z, a[k + 3] = v.w;
    }
    float b = memory.rhs[p * BLOCK + lane % BLOCK];
    if (lane >= BLOCK)
#pragma unroll
        for (int k = 0; k < BLOCK; k++) a[k] = lane == BLOCK + k;
    __syncwarp();  // the columns overwrite the block
    const int columns = RANK % BLOCK && p == BLOCKS - 1 ? RANK % BLOCK : BLOCK;
    float pivot = 1, next = __shfl_sync(FULL_WARP, a[0], 0);  // `pivot`: that of column `lane`
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
        if (RANK % BLOCK && j == columns) break;
        const float current = next, inverse = reciprocal(current), own = a[j], multiple = own * inverse;
        if (lane == j) pivot = current;
        if (j + 1 < BLOCK) {
            float* column = block + j * BLOCK;
            if (lane < BLOCK) column[lane] = own;
            const float other = __shfl_sync(FULL_WARP, own, j + 1), known = __shfl_sync(FULL_WARP, b, j);
            next = __shfl_sync(FULL_WARP, a[j + 1], j + 1) - other * inverse * other;
            a[j + 1] -= multiple * other;
            if (lane > j) b -= multiple * known;
            __syncwarp();
#pragma unroll
            for (int first = (j + 2) / 4 * 4; first < BLOCK; first += 4) {
                const float4 v = *reinterpret_cast<const float4*>(column + first);
                const float others[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (first + k > j + 1) a[first + k] -= multiple * others[k];
            }
        }
        a[j] = own * reciprocal_root(current);
    }
    if (lane < BLOCK) {
        memory.rhs[p * BLOCK + lane] = b * reciprocal_root(pivot);
        memory.pivots[p * BLOCK + lane] = pivot;
    }
    __syncwarp();  // the columns have been read
    if (lane >= BLOCK)
#pragma unroll
        for (int k = 0; k < BLOCK; k += 4)
            *reinterpret_cast<float4*>(block + (lane - BLOCK) * INVERSE_STRIDE + k) = make_float4(a[k], a[k + 1], a[k + 2], a[k + 3]);
}

// The failing leading minor or 0. Pivots are checked after the factorization, outside its chain of steps: values computed after a
// bad pivot are discarded. A pivot that is pure cancellation indicates a singular matrix; a pivot that is not finite indicates an
// earlier overflow. Executed by one warp.
__device__ __forceinline__ int failing_minor(const TeamMemory& memory, float epsilon, int lane) {
#pragma unroll
    for (int first = 0; first < RANK16; first += WARP) {
        const int row = first + lane;
        const float pivot = row < RANK16 ? memory.pivots[row] : 1.0f;
        const bool finite = isfinite(pivot);
        const unsigned bad = __ballot_sync(FULL_WARP, row < RANK16 && !(finite && pivot > epsilon * memory.diagonal[row]));
        if (bad) {
            const int place = __ffs(bad) - 1;
            return __shfl_sync(FULL_WARP, finite, place) ? first + place + 1 : NON_FINITE;
        }
    }
    return 0;
}

// A block in float16 parts. As a row operand, registers 2 half + k hold rows g + 8 k; as a column operand, registers
// 2 half + k hold columns 8 k ... of rows 8 half + g.
struct Parts {
    unsigned high[4], low[4];  // pairs of float16

    __device__ __forceinline__ Parts as_columns() const {
        return {{high[0], high[2], high[1], high[3]}, {low[0], low[2], low[1], low[3]}};
    }
};

// Splits a tile into the parts of a row operand.
__device__ __forceinline__ Parts split(const Tile& tile) {
    Parts parts;
#pragma unroll
    for (int k = 0; k < 4; k++)
        split<FLOAT32>(parts.high[k], parts.low[k], tile.value[k / 2][k % 2 * 2], tile.value[k / 2][k % 2 * 2 + 1]);
    return parts;
}

__device__ __forceinline__ void store_part(float4* target, const unsigned (&part)[4]) {
    *target = make_float4(__uint_as_float(part[0]), __uint_as_float(part[1]), __uint_as_float(part[2]), __uint_as_float(part[3]));
}

__device__ __forceinline__ void load_part(unsigned (&part)[4], const float4& v) {
    part[0] = __float_as_uint(v.x);
    part[1] = __float_as_uint(v.y);
    part[2] = __float_as_uint(v.z);
    part[3] = __float_as_uint(v.w);
}

// Writes the operands of block row i of the panel to shared memory.
__device__ __forceinline__ void store_operands(const TeamMemory& memory, int i, const Parts& rows, int lane) {
    const Parts columns = rows.as_columns();
    store_part(memory.rows(i, 0, lane), rows.high);
    store_part(memory.rows(i, 1, lane), rows.low);
    store_part(memory.columns(i, 0, lane), columns.high);
    store_part(memory.columns(i, 1, lane), columns.low);
}

// Product of two blocks; adds the small products first.
__device__ __forceinline__ void multiply(float (&product)[BLOCK_HALVES][4], const Parts& rows, const Parts& columns) {
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
        mma_float16(product[half], rows.low, columns.high[2 * half], columns.high[2 * half + 1]);
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
        mma_float16(product[half], rows.high, columns.low[2 * half], columns.low[2 * half + 1]);
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
        mma_float16(product[half], rows.high, columns.high[2 * half], columns.high[2 * half + 1]);
}

// The inverse W of diagonal block p as the column operand of tile W^T.
__device__ __forceinline__ Parts load_inverse(const TeamMemory& memory, int p, int lane) {
    Parts inverse;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float* first = memory.inverse(p) + (n % 2 * 8 + lane % 4 * 2) * INVERSE_STRIDE + n / 2 * 8 + lane / 4;
        split<FLOAT32>(inverse.high[n], inverse.low[n], first[0], first[INVERSE_STRIDE]);
    }
    return inverse;
}

// Block i of panel p: tile <- L21 = tile W^T, and b_i -= L21 y_p. Returns L21 as a row operand.
__device__ __forceinline__ Parts solve_block(Tile& tile, const Parts& inverse, const TeamMemory& memory, int p, int i, int lane) {
    const Parts rows = split(tile);
    float product[BLOCK_HALVES][4] = {};
    multiply(product, rows, inverse);
    float low = 0, high = 0;  // sums of rows g and g + 8
#pragma unroll
    for (int h = 0; h < BLOCK_HALVES; h++) {
        const float(&v)[4] = product[h];
        const float2 y = *reinterpret_cast<const float2*>(memory.rhs + p * BLOCK + 8 * h + lane % 4 * 2);
        low += v[0] * y.x;
        low += v[1] * y.y;
        high += v[2] * y.x;
        high += v[3] * y.y;
#pragma unroll
        for (int q = 0; q < 4; q++) tile.value[h][q] = v[q];
    }
    const Parts solved = split(tile);
    low = quad_sum(low);
    high = quad_sum(high);
    float* b = memory.rhs + i * BLOCK + lane / 4;
    if (lane % 4 == 0) {
        b[0] -= low;
        b[8] -= high;
    }
    return solved;
}

// tile -= L_i L_j^T. The product starts from zero and is subtracted with rounding.
__device__ __forceinline__ void subtract_product(Tile& tile, const Parts& rows, const Parts& columns) {
    float product[BLOCK_HALVES][4] = {};
    multiply(product, rows, columns);
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
        for (int q = 0; q < 4; q++) tile.value[half][q] -= product[half][q];
}

// Block p of the solution: x = W^T b, in memory.rhs. Lanes n and 16 + n have b[n]. Executed by one warp.
__device__ __forceinline__ void multiply_by_inverse(const TeamMemory& memory, int p, float b, int lane) {
    const int c = lane % BLOCK, part = lane / BLOCK;
    const float4* column = reinterpret_cast<const float4*>(memory.inverse(p) + c * INVERSE_STRIDE + part * (BLOCK / 2));
    const float4 low = column[0], high = column[1];
    const float w[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float x = 0;
#pragma unroll
    for (int n = 0; n < BLOCK / 2; n++) x += w[n] * __shfl_sync(FULL_WARP, b, n + part * (BLOCK / 2));
    x += __shfl_xor_sync(FULL_WARP, x, BLOCK);
    __syncwarp();  // all have read b
    if (part == 0) memory.rhs[p * BLOCK + c] = x;
}

// Solves block p of L^T x = b, to which the blocks below contribute the shares of each warp. Executed by one warp.
__device__ __forceinline__ void solve_last(const TeamMemory& memory, int p, int lane) {
    float b = memory.rhs[p * BLOCK + lane % BLOCK];
    if (p < BLOCKS - 1)
#pragma unroll
        for (int w = 0; w < WARPS; w++) b -= memory.shares(w)[lane % BLOCK];
    multiply_by_inverse(memory, p, b, lane);
}

// Replaces a block of L by each lane's share of L^T x: sums over rows g and g + 8, for columns 8 half + 2 t + k.
__device__ __forceinline__ void keep_share(Tile& tile, float low, float high) {
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            tile.value[half][k] = tile.value[half][k] * low + tile.value[half][2 + k] * high;
}

__device__ __forceinline__ void add_share(float (&sum)[BLOCK_HALVES][2], const Tile& tile) {
#pragma unroll
    for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
        for (int k = 0; k < 2; k++) sum[half][k] += tile.value[half][k];
}

// Sums the shares of all lanes; each step halves the columns that a lane keeps.
__device__ __forceinline__ float sum_shares(const float (&sum)[BLOCK_HALVES][2], int lane) {
    const float first = halve<16>(sum[0][0], sum[1][0], lane), second = halve<16>(sum[0][1], sum[1][1], lane);
    float total = halve<8>(first, second, lane);
    return total + __shfl_xor_sync(FULL_WARP, total, 4);
}

// Solves L^T x = b from the last block on; x overwrites b. Block p of L^T x has contributions from the blocks below it, each in
// the registers of its warp.
__device__ __forceinline__ void substitute_back(Holding& mine, const TeamMemory& memory, int warp, int lane) {
#pragma unroll 1
    for (int p = BLOCKS - 1;; p--) {
        if (warp == (OWNERS >> 4 * p & 15)) solve_last(memory, p, lane);
        team_sync();
        if (p == 0) break;
        const float low = memory.rhs[p * BLOCK + lane / 4], high = memory.rhs[p * BLOCK + lane / 4 + 8];
        float sum[BLOCK_HALVES][2] = {};
        with_role(warp, [&](auto role) {
            constexpr int ROLE = decltype(role)::value;
            for_rows<ROLE, 1>([&](auto row) {
                constexpr int i = decltype(row)::value;
                if (i == p)
                    static_for<0, i>([&](auto column) { keep_share(mine.tiles[tile_slot(i, decltype(column)::value)], low, high); });
            });
            static_for<0, BLOCKS - 1>([&](auto column) {
                constexpr int j = decltype(column)::value;
                if (j == p - 1)
                    for_rows<ROLE, j + 1>([&](auto row) {
                        if (decltype(row)::value >= p) add_share(sum, mine.tiles[tile_slot(decltype(row)::value, j)]);
                    });
            });
        });
        const float total = sum_shares(sum, lane);
        if (!(lane & 4)) memory.shares(warp)[8 * (lane / 16) + lane % 4 * 2 + lane / 8 % 2] = total;
        team_sync();
    }
}

// Block rows of one panel in float16 parts: in registers if a warp holds all of A, else in shared memory.
struct Panel {
    Parts held[WARPS == 1 ? BLOCKS : 1];

    __device__ __forceinline__ void store(const TeamMemory& memory, int i, const Parts& rows, int lane) {
        if constexpr (WARPS == 1) held[i] = rows;
        else store_operands(memory, i, rows, lane);
    }
    __device__ __forceinline__ Parts rows(const TeamMemory& memory, int i, int lane) const {
        if constexpr (WARPS == 1) return held[i];
        Parts parts;
        load_part(parts.high, *memory.rows(i, 0, lane));
        load_part(parts.low, *memory.rows(i, 1, lane));
        return parts;
    }
    __device__ __forceinline__ Parts columns(const TeamMemory& memory, int j, int lane) const {
        if constexpr (WARPS == 1) return held[j].as_columns();
        Parts parts;
        load_part(parts.high, *memory.columns(j, 0, lane));
        load_part(parts.low, *memory.columns(j, 1, lane));
        return parts;
    }
};

// Computes L21 of panel p.
__device__ __forceinline__ void solve_panel(Holding& mine, Panel& panel, const TeamMemory& memory, int p, int warp, int lane) {
    const Parts inverse = load_inverse(memory, p, lane);
    with_role(warp, [&](auto role) {
        static_for<0, BLOCKS - 1>([&](auto column) {
            constexpr int j = decltype(column)::value;
            if (j == p)
                for_rows<decltype(role)::value, j + 1>([&](auto row) {
                    constexpr int i = decltype(row)::value;
                    panel.store(memory, i, solve_block(mine.tiles[tile_slot(i, j)], inverse, memory, p, i, lane), lane);
                });
        });
    });
}

// A22 -= L21 L21^T beyond panel p.
__device__ __forceinline__ void update(Holding& mine, const Panel& panel, const TeamMemory& memory, int p, int warp, int lane) {
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        static_for<1, last_row(ROLE) + 1>([&](auto column) {
            constexpr int j = decltype(column)::value;
            if (j > p) {
                const Parts columns = panel.columns(memory, j, lane);
                for_rows<ROLE, j>([&](auto row) {
                    constexpr int i = decltype(row)::value;
                    subtract_product(mine.tiles[tile_slot(i, j)], panel.rows(memory, i, lane), columns);
                });
            }
        });
    });
}

// Factors A and solves for x, which it leaves in memory.rhs; returns the failing leading minor or 0 in every thread. On entry,
// memory.rhs is b and memory.diagonal the diagonal of A. The loop over panels is not unrolled: the code of a diagonal block
// would be there BLOCKS times.
__device__ __forceinline__ int cholesky_solve(Holding& mine, const TeamMemory& memory, float epsilon, int warp, int lane) {
#pragma unroll
    for (int first = 0; first < RANK16; first += TEAM) {
        const int row = first + warp * WARP + lane;
        if (row < RANK16) keep_row(memory, row, memory.diagonal[row], memory.rhs[row]);
    }
    team_sync();
    with_role(warp, [&](auto role) {
        for_tiles<decltype(role)::value>(mine.tiles, [&](Tile& tile, auto row, auto column) {
            constexpr int i = decltype(row)::value, j = decltype(column)::value;
            scale_tile(tile, memory, i, j, lane);
            if constexpr (i == j) set_diagonal(tile, memory, i, lane);
        });
    });
    Panel panel;
#pragma unroll 1
    for (int p = 0; p < BLOCKS; p++) {
        lane = fresh(lane);
        if (warp == (OWNERS >> 4 * p & 15)) {
            with_role(warp, [&](auto role) {
                for_rows<decltype(role)::value>([&](auto row) {
                    constexpr int i = decltype(row)::value;
                    if (i == p) store_diagonal(mine.tiles[tile_slot(i, i)], memory.inverse(p), lane);
                });
            });
            factor_block(memory, p, lane);
        }
        team_sync();
        if (p == BLOCKS - 1) break;
        solve_panel(mine, panel, memory, p, warp, lane);
        team_sync();
        update(mine, panel, memory, p, warp, lane);
    }
    substitute_back(mine, memory, warp, lane);
#pragma unroll
    for (int first = 0; first < RANK16; first += TEAM) {
        const int row = first + warp * WARP + lane;
        if (row < RANK16) memory.rhs[row] *= memory.scales[row];
    }
    team_sync();
    return failing_minor(memory, epsilon, lane);
}

// ---------------------------------------------------------------------------------------------- conjugate gradients

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
