// basis.cu - the basis in which gram + ridge is the identity: inverse = L^-1, where gram + ridge = L L^T
//            In it, rows y of the fixed side become L^-1 y, and a solution w corresponds to x = L^-T w (docs/methods.md).
// kernels: inverse_root computes L^-1; to_basis and from_basis multiply rows by L^-1 and by L^-T
// grid  : inverse_root: one block of EDGE x EDGE threads, each with every EDGE-th row and column in registers
//         the others: any number of blocks of THREADS; a warp multiplies 16 rows at a time
// shapes: inverse (LD, LD), zeros beyond RANK and above the diagonal  failed (1,)  gram (RANK16, RANK16)  ridge (RANK,)
//         results (n_out, LD)  rows (n_rows, LD)  places (n_rows,): result row of each row, or null: its own
// shared: to_basis, from_basis: RANK16 * STRIDE floats
// flops : inverse_root: 2/3 RANK^3, in float64; the elimination that computes L replaces it by L^-1 in place
//         the others: n_rows RANK^2, three times that on tensor cores, in two tf32 parts; traffic: 8 LD n_rows bytes
// limits: RANK <= 128, because of registers; sm_80 or later
// failed: the leading minor that is not positive definite, NON_FINITE, or 0.
// synchronization: inverse_root: step j writes column[j % 2] and row[j % 2], which all read after its barrier. Step j + 2 writes
//         there after the barrier of step j + 1, before which all reads of step j end. `roots` is read after a barrier of its own.
//         the others: a barrier follows the writes of the matrix in shared memory; then it is only read, and warps are independent.
#include "tensor.cuh"

#ifndef RANK
#define RANK 64
#endif
#ifndef LD
#define LD ((RANK + 3) / 4 * 4)
#endif

constexpr int EDGE = 32, EACH = ceil_div(RANK, EDGE);
constexpr int RANK16 = round_up(RANK, 16);
constexpr int NON_FINITE = -1;

static_assert(RANK <= 128, "the matrix must fit in the registers of a block");

extern "C" __global__ void __launch_bounds__(EDGE * EDGE)
inverse_root(float* inverse, int* failed, const float* gram, const float* ridge, double epsilon) {
    __shared__ double column[2][EDGE * EACH], row[2][EDGE * EACH];  // for this step and the next
    __shared__ double roots[EDGE * EACH];
    const int y = threadIdx.x / EDGE, x = threadIdx.x % EDGE;
    double a[EACH][EACH];  // [p][q]: row y + EDGE p, column x + EDGE q
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int q = 0; q < EACH; q++) {
            const int r = y + EDGE * p, c = x + EDGE * q;
            a[p][q] = r < RANK && c < RANK ? double(gram[r * RANK16 + c]) + (r == c ? double(ridge[r]) : 0.0) : 0.0;
        }
    int failing = 0;
    for (int j = 0; j < RANK; j++) {  // columns before j already belong to the inverse
        double(&l)[EDGE * EACH] = column[j % 2], (&u)[EDGE * EACH] = row[j % 2];
#pragma unroll
        for (int p = 0; p < EACH; p++)
#pragma unroll
            for (int q = 0; q < EACH; q++) {
                const int r = y + EDGE * p, c = x + EDGE * q;
                if (c == j) l[r] = a[p][q];
                if (r == j) u[c] = a[p][q];
            }
        __syncthreads();
        const double diagonal = double(gram[j * RANK16 + j]) + double(ridge[j]), pivot = l[j];
        const bool finite = isfinite(pivot), good = finite && pivot > epsilon * diagonal;
        if (!good && !failing) failing = finite ? j + 1 : NON_FINITE;
        const double reciprocal = good ? 1.0 / pivot : 0.0;
        if (threadIdx.x == 0) roots[j] = good ? rsqrt(pivot) : 0.0;
#pragma unroll
        for (int p = 0; p < EACH; p++) {
            const int r = y + EDGE * p;
            const double multiple = l[r] * reciprocal;
#pragma unroll
            for (int q = 0; q < EACH; q++) {
                const int c = x + EDGE * q;
                if (r == j && c == j) a[p][q] = 1.0;
                if (r > j) a[p][q] = c == j ? -multiple : a[p][q] - multiple * (c > j ? l[c] : u[c]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int q = 0; q < EACH; q++) {
            const int r = y + EDGE * p, c = x + EDGE * q;
            if (r < LD && c < LD) inverse[r * LD + c] = r < RANK && c <= r ? float(a[p][q] * roots[r]) : 0.0f;
        }
    if (threadIdx.x == 0) *failed = failing;
}

// ---------------------------------------------------------------------------------------------- products

constexpr int THREADS = 256, WARPS = THREADS / WARP, TILE_ROWS = 16;
constexpr int DEPTH = 16;                                    // columns of a row that are multiplied at a time
constexpr int WIDTH = 8, AT_ONCE = 2;                        // columns of a product; products in flight
constexpr int STRIDE = RANK16 + (48 - RANK16 % 32) % 32;     // 16 modulo 32: two neighbouring rows are in different banks

// Rows of a tile in parts: register q of step s holds columns 4 t + 2 s + q / 2 of row g + 8 (q % 2) of a piece of DEPTH columns.
// Any order of the columns is right if the matrix has the same.
struct Operand {
    unsigned high[2][4], low[2][4];

    __device__ __forceinline__ void set(const float4 (&half)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float values[4] = {half[h].x, half[h].y, half[h].z, half[h].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const Tf32Parts parts = split_tf32<true>(values[k]);
                high[k / 2][k % 2 * 2 + h] = parts.high;
                low[k / 2][k % 2 * 2 + h] = parts.low;
            }
        }
    }
};

// Adds the products of a piece with AT_ONCE blocks of columns, from block N on. Tensor cores truncate their sums, so each product
// starts from zero and is added with rounding.
template <int N>
__device__ __forceinline__ void multiply_piece(float (&sums)[RANK16 / WIDTH][4], const Operand& operand, const float* corner) {
    Tf32Parts parts[AT_ONCE][4];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        const float4 v = *reinterpret_cast<const float4*>(corner + (N + k) * WIDTH * STRIDE);
        parts[k][0] = split_tf32<true>(v.x), parts[k][1] = split_tf32<true>(v.y);
        parts[k][2] = split_tf32<true>(v.z), parts[k][3] = split_tf32<true>(v.w);
    }
    float product[AT_ONCE][4] = {};
#pragma unroll
    for (int pass = 0; pass < 3; pass++)  // low x high, high x low, high x high
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const Tf32Parts &a = parts[k][2 * step], &b = parts[k][2 * step + 1];
                mma_tf32(product[k], pass == 0 ? operand.low[step] : operand.high[step], pass == 1 ? a.low : a.high,
                         pass == 1 ? b.low : b.high);
            }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
        for (int q = 0; q < 4; q++) sums[N + k][q] += product[k][q];
}

// results[places[k]] = M rows[k], M = inverse or, if TRANSPOSED, its transpose; both have zeros on one side of the diagonal.
template <bool TRANSPOSED>
__device__ __forceinline__ void multiply_rows(float* results, const float* rows, const float* inverse, const int* places,
                                              int64 n_rows) {
    float* const matrix = shared_memory<float>();  // row n has the factors of column n of the results
    for (int at = threadIdx.x; at < RANK16 * RANK16; at += THREADS) {
        const int r = at / RANK16, c = at % RANK16;
        matrix[TRANSPOSED ? c * STRIDE + r : r * STRIDE + c] = r < LD && c < LD ? inverse[r * LD + c] : 0.0f;
    }
    __syncthreads();
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    for (int64 first = (int64(blockIdx.x) * WARPS + threadIdx.x / WARP) * TILE_ROWS; first < n_rows;
         first += int64(gridDim.x) * WARPS * TILE_ROWS) {
        float sums[RANK16 / WIDTH][4] = {};
        float4 next[2];
        auto load = [&](int begin) {  // this lane's columns of a piece, which begins at column `begin`
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int64 row = first + g + 8 * h;
                next[h] = make_float4(0, 0, 0, 0);
                if (row < n_rows && begin + 4 * t < LD) next[h] = *reinterpret_cast<const float4*>(rows + row * LD + begin + 4 * t);
            }
        };
        load(0);
#pragma unroll 1
        for (int begin = 0; begin < RANK16; begin += DEPTH) {
            Operand operand;
            operand.set(next);
            load(begin + DEPTH);
            const float* corner = matrix + g * STRIDE + begin + 4 * t;
            static_for<0, RANK16 / WIDTH / AT_ONCE>([&](auto number) {
                constexpr int N = decltype(number)::value * AT_ONCE;
                if (TRANSPOSED ? N * WIDTH >= begin + DEPTH : (N + AT_ONCE) * WIDTH <= begin) return;  // zeros
                multiply_piece<N>(sums, operand, corner);
            });
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64 row = first + g + 8 * h;
            if (row >= n_rows) continue;
            float* target = results + (places == nullptr ? row : int64(places[row])) * LD + 2 * t;
#pragma unroll
            for (int n = 0; n < RANK16 / WIDTH; n++)
                if (n * WIDTH + 2 * t < LD)
                    *reinterpret_cast<float2*>(target + n * WIDTH) = make_float2(sums[n][2 * h], sums[n][2 * h + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
to_basis(float* results, const float* rows, const float* inverse, const int* places, int64 n_rows) {
    multiply_rows<false>(results, rows, inverse, places, n_rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
from_basis(float* results, const float* rows, const float* inverse, const int* places, int64 n_rows) {
    multiply_rows<true>(results, rows, inverse, places, n_rows);
}
