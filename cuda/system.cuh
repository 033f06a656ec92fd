// system.cuh - one system A x = b on chip: a team of WARPS warps holds the lower blocks of A in registers.
//
// constants: RANK    order of the systems, 1 to 128; padded to RANK16 with rows and columns of the identity
//            WARPS   warps of a team: 1 (up to RANK 64) or 4 (one team a block of threads)
// Block (i, j) of 16 x 16 belongs to warp owner(i, j). The tables below give each warp the same number of blocks out
// of few rows and columns, since a warp loads and converts each row or column of blocks that it touches.
// shared (floats of a team): rows  ROWS16 x STRIDE: entries on their way, then the columns of the Cholesky factor,
//                            rhs, diagonal, pivots: RANK16 each
// Failure goes to `status`: 0, the leading minor that is not positive definite, NON_FINITE or NEGATIVE_CURVATURE.
#include "fragments.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef WARPS
#define WARPS (RANK <= 64 ? 1 : 4)
#endif

constexpr int BLOCKS = ceil_div(RANK, BLOCK);  // of a row or column of A
constexpr int RANK16 = BLOCKS * BLOCK;
constexpr int STRIDE = RANK16 + 8;             // 8 or 24 modulo 32: the loads of `load_raw` meet 32 banks
constexpr int TEAM = WARPS * WARP;             // threads

static_assert(RANK >= 1 && RANK <= 128, "larger systems do not fit in the registers of a team");
static_assert(WARPS == 1 || WARPS == 4, "the table of owners is for 1 or 4 warps");

constexpr int NON_FINITE = -1;
constexpr int NEGATIVE_CURVATURE = -2;

// ---------------------------------------------------------------------------------------------- who owns which block

// Rows of the lower triangle one after the other, a letter a block.
constexpr const char* OWNERS_OF[9] = {"", "", "", "", "",
    "a" "aa" "acb" "cccb" "dddbb",
    "a" "aa" "aaa" "cccb" "ccdbb" "ddddbb",
    "a" "aa" "aaa" "cccb" "cccbb" "cddbbb" "addbddd",
    "a" "aa" "aaa" "aaac" "ccccb" "ccccbb" "ddddbbb" "ddddbbbd"};

__host__ __device__ constexpr int owner(int i, int j) { return WARPS == 1 ? 0 : OWNERS_OF[BLOCKS][i * (i + 1) / 2 + j] - 'a'; }

// Place of block (i, j) among those of its owner.
__host__ __device__ constexpr int slot(int i, int j) {
    int count = 0;
    for (int row = 0; row <= i; row++)
        for (int column = 0; column < (row < i ? row + 1 : j); column++) count += owner(row, column) == owner(i, j);
    return count;
}

// Place of block (b, b) among those on the diagonal of its owner.
__host__ __device__ constexpr int diagonal_slot(int b) {
    int count = 0;
    for (int k = 0; k < b; k++) count += owner(k, k) == owner(b, b);
    return count;
}

__host__ __device__ constexpr int most_owned(bool on_diagonal) {
    int most = 0;
    for (int role = 0; role < WARPS; role++) {
        int count = 0;
        for (int i = 0; i < BLOCKS; i++)
            for (int j = on_diagonal ? i : 0; j <= i; j++) count += owner(i, j) == role;
        most = count > most ? count : most;
    }
    return most;
}

// Whether `role` owns a block in row or column `block` of blocks.
__host__ __device__ constexpr bool touches(int role, int block) {
    for (int i = 0; i < BLOCKS; i++)
        for (int j = 0; j <= i; j++)
            if (owner(i, j) == role && (i == block || j == block)) return true;
    return false;
}

// Calls body(Index<warp>{}): what differs between warps is compiled once for each of them.
template <class Body> __device__ __forceinline__ void with_role(int warp, Body&& body) {
    if constexpr (WARPS == 1) {
        body(Index<0>{});
    } else {
        switch (warp) {
        case 0: body(Index<0>{}); break;
        case 1: body(Index<1>{}); break;
        case 2: body(Index<2>{}); break;
        default: body(Index<3>{});
        }
    }
}

// Calls body(Index<i>{}, Index<j>{}, tile) for each block that `ROLE` owns.
template <int ROLE, class Tiles, class Body> __device__ __forceinline__ void for_owned(Tiles& tiles, Body&& body) {
    static_for<0, BLOCKS>([&](auto row) {
        static_for<0, decltype(row)::value + 1>([&](auto column) {
            constexpr int i = decltype(row)::value, j = decltype(column)::value;
            if constexpr (owner(i, j) == ROLE) {
                constexpr int place = slot(i, j);
                body(row, column, tiles[place]);
            }
        });
    });
}

// ---------------------------------------------------------------------------------------------- the team

struct TeamMemory {
    float* rows;      // (>= RANK16, STRIDE)
    float* rhs;       // (RANK16,) right-hand side, then the solution
    float* diagonal;  // (RANK16,) of A before elimination
    float* pivots;    // (RANK16,) 1 / sqrt(pivot)
};

constexpr int TEAM_VECTORS = 3 * RANK16;  // floats beside the rows

__device__ __forceinline__ void team_sync() {
    if constexpr (WARPS == 1) __syncwarp();
    else __syncthreads();
}

// What one warp holds of a system.
struct Holding {
    static constexpr int TILES = most_owned(false), DIAGONALS = most_owned(true);
    Tile tiles[TILES];
    float rhs[DIAGONALS][BLOCK_HALVES];  // this thread's sums for rows 16 b + 8 half + g, of blocks (b, b) of this warp
};

__device__ __forceinline__ void clear(Holding& mine) {
#pragma unroll
    for (int k = 0; k < Holding::TILES; k++)
#pragma unroll
        for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
            for (int q = 0; q < 4; q++) mine.tiles[k].value[half][q] = 0;
#pragma unroll
    for (int b = 0; b < Holding::DIAGONALS; b++) mine.rhs[b][0] = mine.rhs[b][1] = 0;
}

// Row and column, inside a block, of element q of a half of a tile.
__device__ __forceinline__ int tile_row(int lane, int q) { return lane / 4 + 8 * (q / 2); }
__device__ __forceinline__ int tile_column(int lane, int half, int q) { return 8 * half + lane % 4 * 2 + q % 2; }

// ---------------------------------------------------------------------------------------------- accumulation

// What the entries of one product weigh, for the k = t + 4 step of a thread: both factors of A get the root of the outer
// weight.
template <int ROWS> struct StepWeights {
    float root[ROWS / 4], linear[ROWS / 4];
};

// A += V^T W V and b += V^T c over the rows of one product, which lie in shared memory.
template <int PRECISION, bool WEIGHTED>
__device__ __forceinline__ void accumulate(Holding& mine, const float* rows, const StepWeights<product_rows(PRECISION)>& weights,
                                           int warp, int lane) {
    constexpr int ROWS = product_rows(PRECISION);
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        Fragment<PRECISION> fragment[BLOCKS];
        static_for<0, BLOCKS>([&](auto index) {
            constexpr int b = decltype(index)::value;
            if constexpr (touches(ROLE, b)) {
                Raw<ROWS> raw = load_raw<ROWS, STRIDE>(rows, b, lane);
                constexpr bool has_rhs = owner(b, b) == ROLE;
                constexpr int place = has_rhs ? diagonal_slot(b) : 0;
#pragma unroll
                for (int step = 0; step < ROWS / 4; step++)
#pragma unroll
                    for (int half = 0; half < BLOCK_HALVES; half++) {
                        if constexpr (has_rhs) mine.rhs[place][half] += weights.linear[step] * raw.value[step][half];
                        if constexpr (WEIGHTED) raw.value[step][half] *= weights.root[step];
                    }
                fragment[b].set(raw);
            }
        });
        for_owned<ROLE>(mine.tiles, [&](auto row, auto column, Tile& tile) {
            multiply<PRECISION>(tile, fragment[decltype(row)::value], fragment[decltype(column)::value]);
        });
    });
}

// Adds the Gram matrix (RANK16 x RANK16, or none) and ridge * scale to A, 1 to the padded diagonal; leaves b and the
// diagonal of A in shared memory.
__device__ __forceinline__ void complete(Holding& mine, const TeamMemory& memory, const float* __restrict__ gram,
                                         const float* __restrict__ ridge, float scale, int warp, int lane) {
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        for_owned<ROLE>(mine.tiles, [&](auto row, auto column, Tile& tile) {
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
                    if constexpr (i == j) {
#pragma unroll
                        for (int k = 0; k < 2; k++)
                            if (r == c + k) {
                                tile.value[half][q + k] += r < RANK ? ridge[r] * scale : 1.0f;
                                memory.diagonal[r] = tile.value[half][q + k];
                            }
                    }
                }
        });
        static_for<0, BLOCKS>([&](auto index) {
            constexpr int b = decltype(index)::value;
            if constexpr (owner(b, b) == ROLE) {
                constexpr int place = diagonal_slot(b);
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++) {
                    float sum = mine.rhs[place][half];
                    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
                    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
                    if (lane % 4 == 0) memory.rhs[b * BLOCK + 8 * half + lane / 4] = sum;
                }
            }
        });
    });
}

// ---------------------------------------------------------------------------------------------- Cholesky

// Rows a thread holds of a panel of 16 columns: slot 0 is row `lane` of the panel in every warp (so that each warp has
// the block on the diagonal), the others are spread over the team.
constexpr int PANEL_SLOTS = 1 + (RANK16 > WARP ? ceil_div(RANK16 - WARP, TEAM) : 0);

__device__ __forceinline__ int panel_row(int panel_slot, int warp, int lane) {
    return panel_slot == 0 ? lane : WARP + ((panel_slot - 1) * WARPS + warp) * WARP + lane;
}

// Factors the panel of columns first ... first + 15, which lies in memory.rows[first + column][row], and does the same
// elimination on the right-hand side. Returns the failing leading minor or 0. Each thread computes whole rows of the
// panel in registers; what they need of the block on the diagonal comes by shuffles.
__device__ __forceinline__ int factor_panel(const TeamMemory& memory, int first, float epsilon, int warp, int lane) {
    const int height = RANK16 - first;
    float a[PANEL_SLOTS][BLOCK], b[PANEL_SLOTS];
#pragma unroll
    for (int s = 0; s < PANEL_SLOTS; s++) {
        const int row = panel_row(s, warp, lane);
        const bool valid = row < height;
        b[s] = valid ? memory.rhs[first + row] : 0.0f;
#pragma unroll
        for (int j = 0; j < BLOCK; j++) a[s][j] = valid ? memory.rows[(first + j) * STRIDE + first + row] : 0.0f;
    }
    if constexpr (WARPS > 1) __syncthreads();  // all warps have read what warp 0 writes below
    int failed = 0;
    float solved = 0, pivot = 0;
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
        const float d = __shfl_sync(FULL_WARP, a[0][j], j);
        // a pivot that is all cancellation means a singular matrix; NaN fails here, too
        const bool good = d > epsilon * memory.diagonal[first + j];
        if (!good && !failed) failed = first + j + 1;
        const float inverse = good ? rsqrtf(d) : 0.0f;
        const float y = __shfl_sync(FULL_WARP, b[0], j) * inverse;
        if (lane == j) solved = y, pivot = inverse;
#pragma unroll
        for (int s = 0; s < PANEL_SLOTS; s++) {
            a[s][j] *= inverse;
            b[s] -= a[s][j] * y;
        }
#pragma unroll
        for (int c = j + 1; c < BLOCK; c++) {
            const float l = __shfl_sync(FULL_WARP, a[0][j], c);
#pragma unroll
            for (int s = 0; s < PANEL_SLOTS; s++) a[s][c] -= a[s][j] * l;
        }
    }
#pragma unroll
    for (int s = 0; s < PANEL_SLOTS; s++) {
        const int row = panel_row(s, warp, lane);
        if (row < height && (s > 0 || warp == 0)) {
            memory.rhs[first + row] = s == 0 && lane < BLOCK ? solved : b[s];
#pragma unroll
            for (int j = 0; j < BLOCK; j++) memory.rows[(first + j) * STRIDE + first + row] = a[s][j];
        }
    }
    if (warp == 0 && lane < BLOCK) memory.pivots[first + lane] = pivot;
    return failed;
}

// x <- L^-T y in memory.rhs, by one warp.
__device__ __forceinline__ void substitute_back(const TeamMemory& memory, int lane) {
    const int column = lane % BLOCK, part = lane / BLOCK;
#pragma unroll 1
    for (int panel = BLOCKS - 1; panel >= 0; panel--) {
        const float* factor = memory.rows + (panel * BLOCK + column) * STRIDE;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int r = (panel + 1) * BLOCK + 4 * part; r < RANK16; r += 8) {
            const float4 l = *reinterpret_cast<const float4*>(factor + r);
            const float4 x = *reinterpret_cast<const float4*>(memory.rhs + r);
            sum.x += l.x * x.x;
            sum.y += l.y * x.y;
            sum.z += l.z * x.z;
            sum.w += l.w * x.w;
        }
        float known = (sum.x + sum.y) + (sum.z + sum.w);
        known += __shfl_xor_sync(FULL_WARP, known, BLOCK);
        const float inverse = memory.pivots[panel * BLOCK + column];
        float value = (memory.rhs[panel * BLOCK + column] - known) * inverse;
        float l[BLOCK];
#pragma unroll
        for (int j = 0; j < BLOCK; j++) l[j] = factor[panel * BLOCK + j] * inverse;
#pragma unroll
        for (int j = BLOCK - 1; j > 0; j--) {
            const float x = __shfl_sync(FULL_WARP, value, j);
            if (column < j) value -= l[j] * x;
        }
        if (part == 0) memory.rhs[panel * BLOCK + column] = value;
        __syncwarp();
    }
}

// A -= L L^T beyond a panel, over the columns k ... of one product.
__device__ __forceinline__ void subtract_product(Holding& mine, int panel, int k, const TeamMemory& memory, int warp, int lane) {
    const float* factor = memory.rows + (panel * BLOCK + k) * STRIDE;
    with_role(warp, [&](auto role) {
        constexpr int ROLE = decltype(role)::value;
        Fragment<FLOAT32> fragment[BLOCKS];
        static_for<1, BLOCKS>([&](auto block) {
            constexpr int b = decltype(block)::value;
            if constexpr (touches(ROLE, b))
                if (b > panel) fragment[b].set(load_raw<product_rows(FLOAT32), STRIDE>(factor, b, lane));
        });
        for_owned<ROLE>(mine.tiles, [&](auto row, auto column, Tile& tile) {
            constexpr int i = decltype(row)::value, j = decltype(column)::value;
            if (j > panel) multiply<FLOAT32, true>(tile, fragment[i], fragment[j]);
        });
    });
}

// Factors A, solves, leaves x in memory.rhs; returns the failing leading minor or 0 (in every thread). The loop over
// panels stays a loop: unrolled, the code would not fit in the instruction cache.
__device__ __forceinline__ int cholesky_solve(Holding& mine, const TeamMemory& memory, float epsilon, int warp, int lane) {
    int failed = 0;
#pragma unroll 1
    for (int panel = 0; panel < BLOCKS; panel++) {
        with_role(warp, [&](auto role) {
            for_owned<decltype(role)::value>(mine.tiles, [&](auto row, auto column, Tile& tile) {
                constexpr int i = decltype(row)::value, j = decltype(column)::value;
                if (j != panel) return;
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                    for (int q = 0; q < 4; q++)
                        memory.rows[(j * BLOCK + tile_column(lane, half, q)) * STRIDE + i * BLOCK + tile_row(lane, q)] =
                            tile.value[half][q];
            });
        });
        team_sync();
        lane = fresh(lane);
        const int minor = factor_panel(memory, panel * BLOCK, epsilon, warp, lane);
        if (minor && !failed) failed = minor;
        team_sync();
        lane = fresh(lane);
#pragma unroll 1
        for (int k = 0; k < BLOCK; k += product_rows(FLOAT32)) subtract_product(mine, panel, k, memory, warp, lane);
    }
    if (warp == 0) substitute_back(memory, lane);
    team_sync();
    return failed;
}

// ---------------------------------------------------------------------------------------------- conjugate gradients

// Sum over the team, the same bits in every thread; `scratch` holds WARPS values.
__device__ __forceinline__ double team_sum(double value, double* scratch, int warp, int lane) {
    value = warp_sum(value);
    if constexpr (WARPS > 1) {
        __syncthreads();  // the scratch of the sum before has been read
        if (lane == 0) scratch[warp] = value;
        __syncthreads();
        value = 0;
        for (int k = 0; k < WARPS; k++) value += scratch[k];
    }
    return value;
}

// `steps` conjugate gradient steps on A x = b from x = start, with the rows of A in registers; x is left in
// memory.rhs. Stops early where the residual has fallen by 1e-10 (squared 1e-20) or is about to underflow, as the CPU
// does. Returns 0, NON_FINITE or NEGATIVE_CURVATURE.
__device__ __forceinline__ int conjugate_gradient(Holding& mine, const TeamMemory& memory, const float* start, int steps,
                                                  int warp, int lane) {
    constexpr int ROWS = ceil_div(RANK16, TEAM);
    with_role(warp, [&](auto role) {
        for_owned<decltype(role)::value>(mine.tiles, [&](auto row, auto column, Tile& tile) {
            constexpr int i = decltype(row)::value, j = decltype(column)::value;
#pragma unroll
            for (int half = 0; half < BLOCK_HALVES; half++)
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    const int r = i * BLOCK + tile_row(lane, q), c = j * BLOCK + tile_column(lane, half, q);
                    memory.rows[c * STRIDE + r] = tile.value[half][q];
                    if constexpr (i != j) memory.rows[r * STRIDE + c] = tile.value[half][q];
                }
        });
    });
    team_sync();
    const int thread = warp * WARP + lane;
    float a[ROWS][RANK16], x[ROWS], r[ROWS], p[ROWS], ap[ROWS];
#pragma unroll
    for (int s = 0; s < ROWS; s++) {
        const int row = s * TEAM + thread;
        const bool valid = row < RANK16;
#pragma unroll
        for (int k = 0; k < RANK16; k++) a[s][k] = valid ? memory.rows[k * STRIDE + row] : 0.0f;
        r[s] = valid ? memory.rhs[row] : 0.0f;
        x[s] = row < RANK ? start[row] : 0.0f;
    }
    float* direction = memory.diagonal;  // (RANK16,); b and the diagonal have been read
    double* scratch = reinterpret_cast<double*>(memory.pivots);
    auto apply = [&](const float (&vector)[ROWS]) {  // ap = A vector
        team_sync();
#pragma unroll
        for (int s = 0; s < ROWS; s++)
            if (s * TEAM + thread < RANK16) direction[s * TEAM + thread] = vector[s];
        team_sync();
#pragma unroll
        for (int s = 0; s < ROWS; s++) ap[s] = 0;
#pragma unroll
        for (int k = 0; k < RANK16; k += 4) {
            const float4 v = *reinterpret_cast<const float4*>(direction + k);
#pragma unroll
            for (int s = 0; s < ROWS; s++) {
                ap[s] += a[s][k] * v.x;
                ap[s] += a[s][k + 1] * v.y;
                ap[s] += a[s][k + 2] * v.z;
                ap[s] += a[s][k + 3] * v.w;
            }
        }
    };
    auto dot = [&](const float (&u)[ROWS], const float (&v)[ROWS]) {
        double sum = 0;
#pragma unroll
        for (int s = 0; s < ROWS; s++) sum += double(u[s]) * double(v[s]);
        return team_sum(sum, scratch, warp, lane);
    };
    apply(x);
#pragma unroll
    for (int s = 0; s < ROWS; s++) p[s] = r[s] -= ap[s];
    double rr = dot(r, r);
    const double first = rr;
    int status = isfinite(rr) ? 0 : NON_FINITE;
#pragma unroll 1
    for (int step = 0; step < steps && status == 0; step++) {
        if (rr <= 1e-20 * first || rr <= 1e-60) break;  // 1e-60: squares of float32 about to underflow
        apply(p);
        const double curvature = dot(p, ap);
        if (curvature <= 0) {
            status = NEGATIVE_CURVATURE;
            break;
        }
        const float length = float(rr / curvature);
#pragma unroll
        for (int s = 0; s < ROWS; s++) {
            x[s] += length * p[s];
            r[s] -= length * ap[s];
        }
        const double next = dot(r, r);
        if (!isfinite(next)) status = NON_FINITE;
        const float ratio = float(next / rr);
#pragma unroll
        for (int s = 0; s < ROWS; s++) p[s] = r[s] + ratio * p[s];
        rr = next;
    }
    team_sync();
#pragma unroll
    for (int s = 0; s < ROWS; s++)
        if (s * TEAM + thread < RANK16) memory.rhs[s * TEAM + thread] = x[s];
    team_sync();
    return status;
}

// ---------------------------------------------------------------------------------------------- storing

// solutions[row] = x, or zeros where it failed; columns RANK ... width - 1 are zero. Sets status[row].
__device__ __forceinline__ void store_solution(float* solutions, int* status, int64 row, int width, const TeamMemory& memory,
                                               int failed, int warp, int lane) {
    if (warp != 0) return;
    bool finite = true;
    for (int k = lane; k < RANK; k += WARP) finite = finite && isfinite(memory.rhs[k]);
    if (!failed && !__all_sync(FULL_WARP, finite)) failed = NON_FINITE;
    for (int k = lane; k < width; k += WARP) solutions[row * width + k] = k < RANK && !failed ? memory.rhs[k] : 0.0f;
    if (lane == 0) status[row] = failed;
}
