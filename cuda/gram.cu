// gram.cu - F^T F of a table of factors, as partial sums over pieces of its rows; the launcher adds the partial sums
// grid  : (tiles of 64 x 64 on or below the diagonal, pieces of `piece_rows` rows)
// block : 16 x 16 threads, each with 4 x 4 elements of the tile
// shapes: sums (n_pieces, side, side), side a multiple of 64; zeros from width on  table (n_rows, width)
// shared: 2 * STEP * TILE elements     traffic: n_rows width (side / 64 + 1) / 2 elements read, from L2 but for the first
// flops : n_rows side (side + 64)
// Summation in REAL ends with a piece. A plain product of a long, narrow table would occupy only a few multiprocessors.
#include "common.cuh"

constexpr int TILE = 64, STEP = 16, EDGE = 16, EACH = TILE / EDGE;

extern "C" __global__ void __launch_bounds__(EDGE * EDGE)
gram(real* __restrict__ sums, const real* __restrict__ table, int64 n_rows, int width, int side, int64 piece_rows) {
    __shared__ __align__(16) real left[STEP][TILE], right[STEP][TILE];
    int i = 0, rest = blockIdx.x;  // the tile's block row and column
    while (rest > i) rest -= ++i;
    const int j = rest;
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
