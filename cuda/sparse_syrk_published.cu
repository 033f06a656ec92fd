// sparse_syrk_published.cu - batched sparse-syrk as printed: for each row of ratings, sums over its entries e with
//                            y = factors[indices[e]]:
//                            matrices[slot] = sum outer_e y y^T (lower triangle), rhs[slot] = sum linear_e y  (entry_weight)
// source: Gates, Anzt, Kurzak, Dongarra 2015, section V, figs. 9 and 10. Ours is sparse_syrk.cu; this one is to compare with
// grid  : (row, tile): lower NB x NB tiles of a matrix, row by row; diagonal tiles also sum the right-hand side
// block : DX x DY threads; thread (x, y) sums the elements (y + i DY, x + j DX) of the tile in registers (the paper's rA)
// shapes: matrices (n_slots, rank, rank)  rhs (n_slots, rank)  factors (n_fixed, ld)  segments (n_segments, 3): slot,
//         begin, end of each row; indices, ratings (nnz,)  offsets (n_fixed,)
// shared: one stage of KB entries: NB factors of each for the rows of the tile (sY), beside the diagonal as many for its
//         columns (sYT), and two weights (sR)
// traffic: nnz * 8 bytes and NB (diagonal) or 2 NB factors per entry and tile     flops: 2 NB^2 per entry and tile
// limits: DX and DY divide NB; rows without entries give zeros
// A row is never split, each thread reads single factors through the read-only path (the paper's texture memory, which also
// gives zeros beyond the table), and nothing is in flight while a stage is summed. The paper requires that DY divides KB
// (section VIII), and yet the configurations of its fig. 13 have KB = 8 and DY = 16: there, half of the threads load nothing.
// synchronization: all threads write a stage, the first barrier follows these writes, and the second one follows all reads,
//         before the next stage overwrites the same memory. All threads take the same steps, of one row. A thread alone has its
//         sums.
#include "common.cuh"

#ifndef NB
#define NB 32           // rows and columns of a tile
#endif
#ifndef KB
#define KB 8            // entries per stage
#endif
#ifndef DX
#define DX 16           // threads along the columns of a tile
#endif
#ifndef DY
#define DY 16           // threads along the rows of a tile
#endif
#ifndef WITH_RHS
#define WITH_RHS 1      // 0: matrices alone, to measure what the right-hand sides cost
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif

constexpr int THREADS = DX * DY;
constexpr int TX = NB / DX, TY = NB / DY;     // sums per thread
constexpr int RHS = ceil_div(NB, THREADS);    // a thread's elements of the right-hand side

static_assert(NB % DX == 0 && NB % DY == 0, "threads divide a tile evenly");
static_assert(KB % DY == 0 || DY % KB == 0, "threads divide a stage evenly, or some load nothing");
static_assert(!RESIDUAL, "the paper has no systems for changes of the solution");

struct Sums {
    real tile[TY][TX];
    real rhs[RHS];
};

struct Row {
    const int* indices;  // of its entries
    const real* ratings;
    int64 count;
};

struct Fixed { const real *factors, *offsets; int ld; };
struct Confidence { real alpha, unobserved_weight; };

// A stage in shared memory.
struct Stage {
    real *rows, *columns;
    EntryWeight* weights;
};

// Loads NB factors, from `column` on, of KB entries, and zeros beyond the last entry.
__device__ __forceinline__ void load_panel(real* panel, const Row& row, const Fixed& fixed, int64 first, int column) {
    const int x = int(threadIdx.x) % DX, y = int(threadIdx.x) / DX;
#pragma unroll
    for (int k = 0; k < KB; k += DY) {
        if (k + y >= KB) continue;
        const bool exists = first + k + y < row.count;
        const real* source = fixed.factors + int64(exists ? __ldg(row.indices + first + k + y) : 0) * fixed.ld;
#pragma unroll
        for (int j = x; j < NB; j += DX)
            panel[(k + y) * NB + j] = exists && column + j < fixed.ld ? __ldg(source + column + j) : real(0);
    }
}

__device__ __forceinline__ void load_weights(EntryWeight* weights, const Row& row, const Fixed& fixed, int64 first,
                                             const Confidence& how) {
    for (int k = threadIdx.x; k < KB; k += THREADS) {
        const bool exists = first + k < row.count;
        const real rating = exists ? __ldg(row.ratings + first + k) : real(0);
        const real offset = HAS_OFFSETS && exists ? __ldg(fixed.offsets + __ldg(row.indices + first + k)) : real(0);
        weights[k] = entry_weight(rating, offset, how.alpha, how.unobserved_weight);
    }
}

// Adds the KB entries of a stage; those beyond the last one of the row have factors of zero.
template <bool DIAGONAL> __device__ __forceinline__ void add_stage(Sums& sums, const Stage& stage) {
    const int x = int(threadIdx.x) % DX, y = int(threadIdx.x) / DX;
#pragma unroll
    for (int k = 0; k < KB; k++) {
        const EntryWeight weight = stage.weights[k];
        real a[TY], b[TX];
#pragma unroll
        for (int i = 0; i < TY; i++) a[i] = stage.rows[k * NB + y + i * DY];
#pragma unroll
        for (int j = 0; j < TX; j++) b[j] = stage.columns[k * NB + x + j * DX];
#pragma unroll
        for (int i = 0; i < TY; i++) {
            if (IMPLICIT) a[i] *= weight.outer;
#pragma unroll
            for (int j = 0; j < TX; j++) sums.tile[i][j] += a[i] * b[j];
        }
        if (!DIAGONAL || !WITH_RHS) continue;
#pragma unroll
        for (int m = 0; m < RHS; m++) {
            const int element = int(threadIdx.x) + m * THREADS;
            if (element < NB) sums.rhs[m] += weight.linear * stage.rows[k * NB + element];
        }
    }
}

// Sums the tile whose first element is (row_begin, column_begin) over all entries of a row.
template <bool DIAGONAL>
__device__ __forceinline__ void sum_row(Sums& sums, const Row& row, const Fixed& fixed, const Confidence& how,
                                        int row_begin, int column_begin) {
    real* panels = shared_memory<real>();
    const Stage stage = {panels, DIAGONAL ? panels : panels + KB * NB,
                         reinterpret_cast<EntryWeight*>(panels + (gridDim.y > 1 ? 2 : 1) * KB * NB)};
    for (int64 first = 0; first < row.count; first += KB) {
        load_weights(stage.weights, row, fixed, first, how);
        load_panel(stage.rows, row, fixed, first, row_begin);
        if (!DIAGONAL) load_panel(stage.columns, row, fixed, first, column_begin);
        __syncthreads();
        add_stage<DIAGONAL>(sums, stage);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sparse_syrk_published(
        real* __restrict__ matrices,          // OUT (n_slots, rank, rank), lower triangles
        real* __restrict__ rhs,               // OUT (n_slots, rank)
        const real* __restrict__ factors,     // IN  (n_fixed, ld)
        const int* __restrict__ indices,      // IN  (nnz,)
        const real* __restrict__ ratings,     // IN  (nnz,)
        const real* __restrict__ offsets,     // IN  (n_fixed,) with HAS_OFFSETS, else not read
        const int64* __restrict__ segments,   // IN  (n_segments, 3)
        int rank, int ld, real alpha, real unobserved_weight) {
    const int64 slot = segments[int64(blockIdx.x) * 3], begin = segments[int64(blockIdx.x) * 3 + 1];
    const Row row = {indices + begin, ratings + begin, segments[int64(blockIdx.x) * 3 + 2] - begin};
    int tile_row = 0, tile_column = blockIdx.y;
    while (tile_column > tile_row) tile_column -= ++tile_row;
    const int row_begin = tile_row * NB, column_begin = tile_column * NB;
    const Fixed fixed = {factors, offsets, ld};
    const Confidence how = {alpha, unobserved_weight};
    Sums sums = {};
    if (tile_row == tile_column)
        sum_row<true>(sums, row, fixed, how, row_begin, column_begin);
    else
        sum_row<false>(sums, row, fixed, how, row_begin, column_begin);
    real* matrix = matrices + slot * rank * rank;
#pragma unroll
    for (int i = 0; i < TY; i++) {
        const int r = row_begin + int(threadIdx.x) / DX + i * DY;
#pragma unroll
        for (int j = 0; j < TX; j++) {
            const int c = column_begin + int(threadIdx.x) % DX + j * DX;
            if (r < rank && c <= r) matrix[int64(r) * rank + c] = sums.tile[i][j];
        }
    }
    if (tile_row != tile_column || !WITH_RHS) return;
#pragma unroll
    for (int m = 0; m < RHS; m++) {
        const int element = int(threadIdx.x) + m * THREADS;
        if (element < NB && row_begin + element < rank) rhs[slot * rank + row_begin + element] = sums.rhs[m];
    }
}
