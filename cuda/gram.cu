// gram.cu - F^T F of a table of factors, as partial sums over pieces of its rows, their total, and the weighted matrix
// kernels: gram, and gram_tensor for float32 on tensor cores; add_grams and weigh_gram, which take an element per thread
// grid  : (tiles of 64 x 64 on or below the diagonal, pieces of `piece_rows` rows)
// block : gram: 16 x 16 threads, each with 4 x 4 elements of the tile; gram_tensor: 4 warps, each with a quarter of the tile
// shapes: sums (n_pieces, side, side), side a multiple of 64; zeros from width on  table (n_rows, width)
//         total (width, width), float64, pieces added in order  weighted (padded, padded), zeros from rank on
// shared: gram: 2 * STEP * TILE elements; gram_tensor: 2 * STAGES * STEP * PITCH floats
// traffic: n_rows width (side / 64 + 1) / 2 elements read, from L2 but for the first
// flops : n_rows side (side + 64); gram_tensor: three times that on tensor cores, in two tf32 parts
// limits: gram_tensor: width a multiple of 4; sm_80 or later
// Summation in REAL ends with a piece. A plain product of a long, narrow table would occupy only a few multiprocessors.
// synchronization: gram: a barrier follows the writes of STEP rows, another one their reads. gram_tensor: step s is in buffer
//         s % STAGES; at its barrier, each thread has waited for its own copies of s, and all have read step s - 1, in whose buffer
//         step s + STAGES - 1 arrives. Each step commits one group of copies, even an empty one. One thread writes an element of
//         `sums`.
#include "tensor.cuh"

constexpr int TILE = 64, STEP = 16, EDGE = 16, EACH = TILE / EDGE;

struct TilePlace { int row, column; };

// Block row and column of a tile; tiles are numbered row by row of the lower triangle.
__device__ __forceinline__ TilePlace place_of(int number) {
    int row = 0;
    while (number > row) number -= ++row;
    return {row, number};
}

extern "C" __global__ void __launch_bounds__(EDGE * EDGE)
gram(real* __restrict__ sums, const real* __restrict__ table, int64 n_rows, int width, int side, int64 piece_rows) {
    __shared__ __align__(16) real left[STEP][TILE], right[STEP][TILE];
    const TilePlace place = place_of(blockIdx.x);
    const int i = place.row, j = place.column;
    const int thread = threadIdx.x, row = thread / EDGE, column = thread % EDGE;
    const int64 begin = blockIdx.y * piece_rows, end = begin + piece_rows < n_rows ? begin + piece_rows : n_rows;
    real sum[EACH][EACH] = {};
    for (int64 first = begin; first < end; first += STEP) {
#pragma unroll
        for (int k = 0; k < EACH; k++) {  // a warp reads half a row of the tile: contiguous
            const int at = thread + k * EDGE * EDGE, r = at / TILE, c = at % TILE;
            const bool valid = first + r < end;
            const real* source = table + (first + r) * width;
            left[r][c] = valid && i * TILE + c < width ? source[i * TILE + c] : real(0);
            right[r][c] = valid && j * TILE + c < width ? source[j * TILE + c] : real(0);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < STEP; r++) {
            real a[EACH], b[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                a[k] = left[r][row * EACH + k];
                b[k] = right[r][column * EACH + k];
            }
#pragma unroll
            for (int p = 0; p < EACH; p++)
#pragma unroll
                for (int q = 0; q < EACH; q++) sum[p][q] += a[p] * b[q];
        }
        __syncthreads();
    }
    real* target = sums + int64(blockIdx.y) * side * side;
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int q = 0; q < EACH; q++) {
            const int r = i * TILE + row * EACH + p, c = j * TILE + column * EACH + q;
            target[int64(r) * side + c] = sum[p][q];
            if (i != j) target[int64(c) * side + r] = sum[p][q];
        }
}

// ---------------------------------------------------------------------------------------------- tensor cores

constexpr int STAGES = 3, PITCH = TILE + 8;      // PITCH: 8 modulo 32, so that operands are read without bank conflicts
constexpr int TENSOR_THREADS = 4 * WARP, QUARTER = TILE / 2;
constexpr int ROW_BLOCKS = QUARTER / 16, COLUMN_BLOCKS = QUARTER / 8, DEPTH = 8;
static_assert(STAGES >= 2, "one step is multiplied while the next ones arrive");

// Starts the copy of rows `first` ... of a tile's columns; zeros beyond the piece and the table.
__device__ __forceinline__ void copy_rows(float* target, const float* table, int64 first, int64 end, int width, int column) {
    constexpr int PIECES = TILE / 4;
#pragma unroll
    for (int at = threadIdx.x; at < STEP * PIECES; at += TENSOR_THREADS) {
        const int r = at / PIECES, c = at % PIECES * 4;
        const bool valid = first + r < end && column + c < width;
        copy_async_16(target + r * PITCH + c, table + (valid ? (first + r) * width + column + c : 0), valid);
    }
}

// Sums of a warp's quarter of the tile: rows of the tile are columns `left` of the table, columns are columns `right`. Tensor cores
// truncate their sums, so the product of STEP rows starts from zero and is added with rounding.
__device__ __forceinline__ void add_products(float (&sums)[ROW_BLOCKS][COLUMN_BLOCKS][4], const float* left, const float* right,
                                             int lane) {
    const int g = lane / 4, t = lane % 4;
    float product[ROW_BLOCKS][COLUMN_BLOCKS][4] = {};
#pragma unroll
    for (int k = 0; k < STEP; k += DEPTH) {
        unsigned a[2][ROW_BLOCKS][4], b[2][COLUMN_BLOCKS][2];  // high, low
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; m++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const Tf32Parts parts = split_tf32<true>(left[(k + t + q / 2 * 4) * PITCH + 16 * m + g + q % 2 * 8]);
                a[0][m][q] = parts.high, a[1][m][q] = parts.low;
            }
#pragma unroll
        for (int n = 0; n < COLUMN_BLOCKS; n++)
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const Tf32Parts parts = split_tf32<true>(right[(k + t + 4 * q) * PITCH + 8 * n + g]);
                b[0][n][q] = parts.high, b[1][n][q] = parts.low;
            }
#pragma unroll
        for (int pass = 0; pass < 3; pass++)  // low x high, high x low, high x high
#pragma unroll
            for (int m = 0; m < ROW_BLOCKS; m++)
#pragma unroll
                for (int n = 0; n < COLUMN_BLOCKS; n++)
                    mma_tf32(product[m][n], a[pass == 0][m], b[pass == 1][n][0], b[pass == 1][n][1]);
    }
#pragma unroll
    for (int m = 0; m < ROW_BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < COLUMN_BLOCKS; n++)
#pragma unroll
            for (int q = 0; q < 4; q++) sums[m][n][q] += product[m][n][q];
}

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS, 4)
gram_tensor(float* __restrict__ sums, const float* __restrict__ table, int64 n_rows, int width, int side, int64 piece_rows) {
    __shared__ __align__(16) float staged[STAGES][2][STEP * PITCH];
    const TilePlace place = place_of(blockIdx.x);
    const bool diagonal = place.row == place.column;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64 begin = blockIdx.y * piece_rows, end = begin + piece_rows < n_rows ? begin + piece_rows : n_rows;
    const int steps = int(ceil_div(end - begin, int64(STEP)));
    auto copy = [&](int step) {
        if (step < steps) {
            const int64 first = begin + int64(step) * STEP;
            copy_rows(staged[step % STAGES][0], table, first, end, width, place.row * TILE);
            if (!diagonal) copy_rows(staged[step % STAGES][1], table, first, end, width, place.column * TILE);
        }
        copy_commit();
    };
    float sum[ROW_BLOCKS][COLUMN_BLOCKS][4] = {};
    for (int step = 0; step < STAGES - 1; step++) copy(step);
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // these rows have arrived, and no warp still reads those before, whose buffer is next
        copy(step + STAGES - 1);
        const auto& rows = staged[step % STAGES];
        add_products(sum, rows[0] + warp / 2 * QUARTER, rows[diagonal ? 0 : 1] + warp % 2 * QUARTER, lane);
    }
    float* target = sums + int64(blockIdx.y) * side * side;
#pragma unroll
    for (int m = 0; m < ROW_BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < COLUMN_BLOCKS; n++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const int r = place.row * TILE + warp / 2 * QUARTER + 16 * m + lane / 4 + q / 2 * 8;
                const int c = place.column * TILE + warp % 2 * QUARTER + 8 * n + lane % 4 * 2 + q % 2;
                if (c > r) continue;  // on the diagonal, equal elements would differ by rounding
                target[int64(r) * side + c] = sum[m][n][q];
                target[int64(c) * side + r] = sum[m][n][q];
            }
}

// ---------------------------------------------------------------------------------------------- totals

extern "C" __global__ void __launch_bounds__(EDGE * EDGE)
add_grams(double* __restrict__ total, const real* __restrict__ sums, int n_pieces, int side, int width) {
    const int at = blockIdx.x * (EDGE * EDGE) + threadIdx.x;
    if (at >= width * width) return;
    const real* element = sums + at / width * side + at % width;
    double sum = 0;
    for (int piece = 0; piece < n_pieces; piece++) sum += double(element[int64(piece) * side * side]);
    total[at] = sum;
}

extern "C" __global__ void __launch_bounds__(EDGE * EDGE)
weigh_gram(real* __restrict__ weighted, const double* __restrict__ total, int width, int rank, int padded, double weight) {
    const int at = blockIdx.x * (EDGE * EDGE) + threadIdx.x, row = at / padded, column = at % padded;
    if (row < padded) weighted[at] = row < rank && column < rank ? real(weight * total[row * width + column]) : real(0);
}
