// bals.cu - BALS: for each row r of some row blocks, sums over its entries e with y = the factors of e's column
//           matrices[r - first] = sum outer_e y y^T (lower triangle), rhs[r - first] = sum linear_e y  (entry_weight)
// source: Chen, Fang, Liu, Yang 2021, Algorithm 2 and sections 4.1, 4.2; arrays: docs/bals-format.md
// shapes: matrices (n_batch, RANK, RANK)  rhs (n_batch, RANK)  factors (n_fixed, ld)  values, seg_colidx (nnz,)
//         tile_colidx (nnz - redundancy,)  tile_ptr (n_tiles + 1,)  seg_ptr (n_rows * tiles_across + 1,)
//         offsets (n_fixed,)
// limits: ld factors are a multiple of 16 bytes; rows without entries give zeros
// Both variants iterate over the tiles of a row block, stage each factor row that a tile needs once, and index the staged
// rows from the tile's segments. They skip vacant tiles and segments. They differ in the location of the sums:
//
// ACCUMULATORS=local, the paper's mapping: every thread keeps sums of its own of all rows of a tile
// grid  : (row block, lower NB x NB tile of the systems)     block: DX x DY threads per row, DZ rows at a time
// shared: sY1 and sY2, TILE_COLS x NB factors each (one of them on the diagonal); TILE_ROWS + 1 starts of segments
//   A thread has NB / DX x NB / DY sums, and a few of the right-hand side, for each of its ceil(TILE_ROWS / DZ) rounds of rows.
//   A block has TILE_ROWS x NB^2 of them, whatever DX, DY and DZ are: with the paper's NB = 16 and TILE_ROWS = 256, these are
//   65,536, all registers of a multiprocessor, so nothing is left for addresses and operands. With NB = 8 they are a quarter.
//   UNROLLED=1, sums that fit: the loop over rounds is unrolled, so that they have constant indices and are in registers.
//   UNROLLED=0: they are in local memory, of which a segment reads and writes those of its row once.
//   Segments are short, two or three entries, so loads of their starts and entries would dominate. Hence the starts of a tile
//   are staged with its factors, and the first entry of the next round is read before the sums of this one.
//
// ACCUMULATORS=chip, ours
// grid  : (row block x group of ROWS rows, part of the tiles)   block: one thread a TILE x TILE tile and row
// shared: BUFFERS x CAPACITY factor rows; 2 lists of WINDOW entries for each row: factor positions and weights
//   A block processes as many rows of a row block as its registers hold lower triangles: a thread keeps one tile of one
//   row in registers throughout. The threads of a row are consecutive and may span warps.
//   The cost: a block stages all columns of its tiles, though its ROWS rows need only some of the columns of the whole
//   row block. So row blocks are best ROWS high (4.3, `bals_tile_sizes`): 25 rows at rank 32, 7 at 64, 3 at 128 in
//   float32. So few rows share few columns.
//   Segments are too short for a loop each. LANES lanes merge all segments of a row in neighbouring tiles, as many tiles
//   as CAPACITY holds, into one list (scan of the lengths, then one entry per lane). Then the threads of all rows iterate
//   over their lists together. A warp has threads of a few rows and takes as long as their longest list.
//   Lists and factors of the next step are prepared in second buffers before the sums of this step: one barrier per step.
// traffic: a group of ROWS rows reads the rows of tile_colidx of its row block, RANK factors each, and 8 bytes per entry
// flops: 2 TILE^2 N (N + 1) / 2 per entry, times longest / mean list of a warp's rows
// Every element has one owner and a fixed order of summation: the same bits on every run.
// synchronization: chip: at the barrier of a step, each thread has waited for its own copies, the step's lists are written, and all
//         have read those of the previous step. After it, the next lists and factors go to the other buffers; with one buffer of
//         factors, a second barrier follows their reads. All threads take the same steps: `again` comes from the barrier, and each
//         warp computes the same next stage. One lane writes an element of a list; shuffles exchange registers only.
//         local: one barrier follows the copies of a tile and the writes of its starts, each thread having waited for its own
//         copies; another one follows their reads, before the next tile overwrites them. A thread alone has its sums.
#include "common.cuh"

enum Accumulators { local, chip };

#ifndef ACCUMULATORS
#define ACCUMULATORS chip
#endif
#ifndef RANK
#define RANK 32
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif

// chip
#ifndef TILE
#define TILE 8              // rows and columns of a thread's tile
#endif
#ifndef ROWS
#define ROWS 25             // rows per thread block
#endif
#ifndef PART_TILES
#define PART_TILES 10       // tiles of each row in a block; equal to TILES: one part
#endif
#ifndef CAPACITY
#define CAPACITY 384        // factor rows per buffer
#endif
#ifndef BUFFERS
#define BUFFERS 2
#endif
#ifndef LANES
#define LANES 8             // lanes that list a row's entries; also the maximum number of tiles in a buffer
#endif
#ifndef WINDOW
#define WINDOW 16           // entries per list
#endif

// both
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2     // minimum resident blocks per multiprocessor; limits the registers of a thread
#endif

// local
#ifndef TILE_ROWS
#define TILE_ROWS 256
#endif
#ifndef TILE_COLS
#define TILE_COLS 192
#endif
#ifndef NB
#define NB 16
#endif
#ifndef DX
#define DX 4
#endif
#ifndef DY
#define DY 4
#endif
#ifndef DZ
#define DZ 64
#endif
#ifndef UNROLLED
#define UNROLLED 0          // 1: the loop over rounds of rows is unrolled, which keeps the sums in registers if they fit
#endif
#ifndef SKIP_VACANT
#define SKIP_VACANT 1       // 0: visit the segments of vacant tiles, too, to measure the gain of the test (6.4)
#endif

constexpr bool ON_CHIP = ACCUMULATORS == chip;
constexpr int CHUNK = 16 / int(sizeof(real));  // factors of one copy

__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

struct alignas(16) Chunk { real value[CHUNK]; };

// Stores 16 bytes at once, to be evicted first from the L2 cache: the systems of a batch would otherwise evict the factors.
template <class T> __device__ __forceinline__ void store_16(T* target, const T* values) {
    if constexpr (sizeof(T) == 4)
        __stcs(reinterpret_cast<float4*>(target), make_float4(values[0], values[1], values[2], values[3]));
    else
        __stcs(reinterpret_cast<double2*>(target), make_double2(values[0], values[1]));
}

struct Matrix {           // one row block in the BALS arrays, and the parameters of its weights
    const real* factors;
    int ld;
    const real* values;
    const int* tile_colidx;
    const int64* tile_ptr;  // of the row block
    const int* seg_colidx;
    const int64* seg_ptr;   // of the first row: element [tile][row]
    const real* offsets;
    int tiles_across, height;
    real alpha, unobserved_weight;
};

// Weight of the entry at `position`, whose column is tile_colidx[column_position].
__device__ __forceinline__ EntryWeight weight_of(const Matrix& matrix, int64 position, int64 column_position) {
    const real offset = HAS_OFFSETS ? __ldg(matrix.offsets + __ldg(matrix.tile_colidx + column_position)) : real(0);
    return entry_weight(__ldg(matrix.values + position), offset, matrix.alpha, matrix.unobserved_weight);
}

// Address of row `row` of `table`, whose rows have ld factors. One wide multiplication of unsigned numbers; signed numbers
// would take seven instructions.
__device__ __forceinline__ const real* row_of(const real* table, int row, int ld) {
    const unsigned long long bytes = static_cast<unsigned long long>(unsigned(row)) * unsigned(ld * int(sizeof(real)));
    return reinterpret_cast<const real*>(reinterpret_cast<const char*>(table) + bytes);
}

// Waits for all copies of this thread.
__device__ __forceinline__ void copy_wait_all() {
    copy_commit();
    copy_wait<0>();
}

// ---------------------------------------------------------------------------------------------- chip

namespace on_chip {

constexpr int N = ceil_div(RANK, TILE);            // tiles along a row or column
constexpr int TILES = N * (N + 1) / 2;             // tiles of the lower triangle
constexpr int PADDED = N * TILE;
constexpr int THREADS = round_up(ROWS * PART_TILES, WARP);
constexpr int CHUNKS = PADDED / CHUNK;             // copies per factor row
constexpr int PIECES = TILE / CHUNK;               // copies per tile
constexpr int RHS = ceil_div(CHUNKS, PART_TILES);  // a thread's chunks of the right-hand side
constexpr int LISTED = WINDOW + 1;                 // odd: the lists of neighbouring rows begin in different banks

static_assert(!ON_CHIP || TILE % CHUNK == 0, "rows of a tile are loaded in pieces of 16 bytes");
static_assert(!ON_CHIP || (WINDOW % LANES == 0 && WARP % LANES == 0), "lanes divide lists and warps evenly");
static_assert(BUFFERS == 1 || BUFFERS == 2, "one or two buffers");

struct Sums {
    real tile[TILE][TILE];
    real rhs[RHS][CHUNK];
};

// The entries to add to each row: positions in the buffer, and weights.
struct Lists {
    EntryWeight weights[ROWS][LISTED];
    int places[ROWS][LISTED];
    int counts[ROWS];
};

// Consecutive tiles of the row block, [first, last), and the factor rows they need, tile_colidx[begin ... end).
struct Stage {
    int first, last;
    int64 begin;
    int columns;
};

// The next tiles from `first` on that together fit in a buffer, skipping vacant ones; first == tiles_across: none are left.
// Every warp computes this redundantly.
__device__ __forceinline__ Stage next_stage(const Matrix& matrix, int first) {
    const int lane = int(threadIdx.x) % WARP;
    while (first < matrix.tiles_across) {
        const int64 begin = __ldg(matrix.tile_ptr + first);
        const bool exists = lane < LANES && first + lane < matrix.tiles_across;
        const int64 end = exists ? __ldg(matrix.tile_ptr + first + lane + 1) : begin;
        const int taken = __popc(__ballot_sync(FULL_WARP, exists && end - begin <= CAPACITY));
        const int columns = __shfl_sync(FULL_WARP, int(end - begin), taken - 1);
        if (columns > 0) return {first, first + taken, begin, columns};
        first += taken;
    }
    return {first, first, 0, 0};
}

// Starts the copies of a stage. A buffered factor row has the first 16 bytes of all tiles first, then the second 16 bytes, ...:
// neighbouring threads mostly own neighbouring tiles and so read contiguous memory.
__device__ __forceinline__ void copy_stage(real* buffer, const Matrix& matrix, const Stage& stage) {
    const int* columns = matrix.tile_colidx + stage.begin;
#pragma unroll 4
    for (int position = fresh(threadIdx.x); position < stage.columns * CHUNKS; position += THREADS) {
        const int column = position / CHUNKS, chunk = position % CHUNKS;
        const bool valid = chunk * CHUNK < matrix.ld;
        const real* source = matrix.factors + (valid ? chunk * CHUNK : 0);
        copy_async_16(buffer + column * PADDED + (chunk % PIECES * N + chunk / PIECES) * CHUNK,
                      row_of(source, __ldg(columns + column), matrix.ld), valid);
    }
}

// Lists up to WINDOW entries of each row in a stage, from WINDOW * window on, in the order of its tiles. Returns whether a row
// of this thread has more. LANES neighbouring lanes list one row; lane l starts with the row's segment in tile l.
__device__ __forceinline__ bool list_entries(Lists& lists, const Matrix& matrix, const Stage& stage, int window,
                                             int n_rows) {
    // fresh: keeps the compiler from holding these values in registers during the summation
    const int thread = fresh(threadIdx.x), lane = thread % LANES, tile = stage.first + lane;
    bool more = false;
#pragma unroll 1
    for (int base = 0; base < ROWS; base += THREADS / LANES) {
        const int row = base + thread / LANES;
        if (base + thread / WARP * (WARP / LANES) >= ROWS) break;  // holds for a whole warp
        int64 begin = 0;
        int count = 0, shift = 0;
        if (row < n_rows && tile < stage.last) {
            const int64* segment = matrix.seg_ptr + int64(tile) * matrix.height + row;
            begin = __ldg(segment);
            count = int(__ldg(segment + 1) - begin);
            shift = int(__ldg(matrix.tile_ptr + tile) - stage.begin);
        }
        int upto = count;  // entries in this segment and all before it
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2) {
            const int before = __shfl_up_sync(FULL_WARP, upto, distance, LANES);
            if (lane >= distance) upto += before;
        }
        const int left = __shfl_sync(FULL_WARP, upto, LANES - 1, LANES) - window * WINDOW;
        more = more || left > WINDOW;
        if (row < ROWS && lane == 0) lists.counts[row] = max(0, min(left, WINDOW));
#pragma unroll
        for (int k = lane; k < WINDOW; k += LANES) {
            if (!__any_sync(FULL_WARP, k - lane < left)) break;
            const int entry = window * WINDOW + k;
            int source = 0;  // the lane whose segment contains the entry: the first one with entry < upto
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2)
                if (__shfl_sync(FULL_WARP, upto, source + step - 1, LANES) <= entry) source += step;
            const int before = __shfl_sync(FULL_WARP, upto - count, source, LANES);
            const int64 position = __shfl_sync(FULL_WARP, begin, source, LANES) + entry - before;
            const int columns_before = __shfl_sync(FULL_WARP, shift, source, LANES);
            if (k < left) {
                const int column = columns_before + __ldg(matrix.seg_colidx + position);
                lists.places[row][k] = column * PADDED;
                lists.weights[row][k] = weight_of(matrix, position, stage.begin + column);
            }
        }
    }
    return more;
}

// Loads a tile's factors; `first` points to its first chunk.
__device__ __forceinline__ void load_tile(real (&values)[TILE], const real* first) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const Chunk chunk = *reinterpret_cast<const Chunk*>(first + p * N * CHUNK);
#pragma unroll
        for (int k = 0; k < CHUNK; k++) values[p * CHUNK + k] = chunk.value[k];
    }
}

// A thread's work: its row in the block, its tile in the part, and the tile's place in the triangle.
struct Place {
    int row, member, tile_row, tile_column;
    bool has_tile;
};

__device__ __forceinline__ Place find_place(int thread) {
    const int row = thread / PART_TILES, member = thread % PART_TILES;
    const int tile = int(blockIdx.y) * PART_TILES + member;
    int tile_row = 0, tile_column = min(tile, TILES - 1);
    while (tile_column > tile_row) tile_column -= ++tile_row;
    return {row, member, tile_row, tile_column, row < ROWS && tile < TILES};
}

__device__ __forceinline__ void add_list(Sums& sums, const real* buffer, const Lists& lists, const Place& place) {
    const int count = lists.counts[place.row];
    const int* places = lists.places[place.row];
    const EntryWeight* weights = lists.weights[place.row];
    const real *rows = buffer + place.tile_row * CHUNK, *columns = buffer + place.tile_column * CHUNK;
#pragma unroll 1
    for (int k = 0; k < count; k++) {
        const int y = *places++;
        const EntryWeight weight = *weights++;
        real a[TILE], b[TILE];
        load_tile(a, rows + y);
        load_tile(b, columns + y);
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            if (IMPLICIT) a[i] *= weight.outer;
#pragma unroll
            for (int j = 0; j < TILE; j++) sums.tile[i][j] += a[i] * b[j];
        }
        if (blockIdx.y != 0) continue;  // the first part sums the right-hand side
#pragma unroll
        for (int m = 0; m < RHS; m++) {
            const int mine = place.member + m * PART_TILES;
            const Chunk chunk = *reinterpret_cast<const Chunk*>(buffer + y + (mine < CHUNKS ? mine : 0) * CHUNK);
#pragma unroll
            for (int c = 0; c < CHUNK; c++) sums.rhs[m][c] += weight.linear * chunk.value[c];
        }
    }
}

// Stores the part of a tile in the lower triangle.
__device__ __forceinline__ void store_tile(real* system, const Sums& sums, const Place& place) {
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        const int r = place.tile_row * TILE + i;
        if (r >= RANK) continue;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int c = place.tile_column * TILE + p * CHUNK;
            real* target = system + int64(r) * RANK + c;
            if constexpr (RANK % CHUNK == 0) {
                if (c <= r) store_16(target, &sums.tile[i][p * CHUNK]);
            } else {
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    if (c + k <= r) __stcs(target + k, sums.tile[i][p * CHUNK + k]);
            }
        }
    }
}

__device__ __forceinline__ void store_rhs(real* vector, const Sums& sums, const Place& place) {
#pragma unroll
    for (int m = 0; m < RHS; m++) {
        const int mine = place.member + m * PART_TILES;
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            const int column = (mine % N * PIECES + mine / N) * CHUNK + k;
            if (mine < CHUNKS && column < RANK) vector[column] = sums.rhs[m][k];
        }
    }
}

// Sums the first n_rows rows of a row block.
__device__ __forceinline__ void sum_rows(Sums& sums, const Matrix& matrix, int n_rows) {
    real* buffers = shared_memory<real>();
    Lists* lists = reinterpret_cast<Lists*>(buffers + BUFFERS * CAPACITY * PADDED);
    const Place place = find_place(threadIdx.x);
    Stage stage = next_stage(matrix, 0);
    int window = 0, buffer = 0, list = 0;
    bool more = false;
    if (stage.columns) {
        copy_stage(buffers, matrix, stage);
        more = list_entries(lists[0], matrix, stage, 0, n_rows);
    }
    while (stage.columns) {
        copy_wait_all();
        // Factors and lists of this step have arrived, and no thread still reads those of the previous step. If a row has
        // more entries than its list holds, the next step uses the same factors again.
        const bool again = __syncthreads_or(more);
        const Stage next = again ? stage : next_stage(matrix, stage.last);
        const int next_window = again ? window + 1 : 0, next_buffer = again || BUFFERS == 1 ? buffer : 1 - buffer;
        if (BUFFERS == 2 && !again && next.columns)
            copy_stage(buffers + next_buffer * CAPACITY * PADDED, matrix, next);
        more = next.columns && list_entries(lists[1 - list], matrix, next, next_window, n_rows);
        if (place.has_tile) add_list(sums, buffers + buffer * CAPACITY * PADDED, lists[list], place);
        if (BUFFERS == 1 && !again && next.columns) {
            __syncthreads();  // all threads have read the factors
            copy_stage(buffers, matrix, next);
        }
        stage = next;
        window = next_window;
        buffer = next_buffer;
        list = 1 - list;
    }
}

// Stores the sums of n_rows rows; `matrices` and `rhs` point to those of the first row.
__device__ __forceinline__ void store_rows(real* matrices, real* rhs, const Sums& sums, int n_rows) {
    const Place place = find_place(fresh(threadIdx.x));
    if (place.row >= n_rows) return;
    if (place.has_tile) store_tile(matrices + place.row * RANK * RANK, sums, place);
    if (blockIdx.y == 0) store_rhs(rhs + place.row * RANK, sums, place);
}

}  // namespace on_chip

// ---------------------------------------------------------------------------------------------- local

namespace in_threads {

constexpr int THREADS = DX * DY * DZ;
constexpr int ROUNDS = ceil_div(TILE_ROWS, DZ);
constexpr int ROUNDS_AT_ONCE = UNROLLED ? ROUNDS : 1;  // a pragma takes constants, not macros
constexpr int TX = NB / DX, TY = NB / DY;
constexpr int VX = gcd(TX, CHUNK), VY = gcd(TY, CHUNK);  // factors per load from shared memory
constexpr int CHUNKS = NB / CHUNK;
constexpr int RHS = ceil_div(NB, DX * DY);  // a thread's elements of the right-hand side

static_assert(ON_CHIP || (NB % DX == 0 && NB % DY == 0 && NB % CHUNK == 0), "threads and copies divide a tile evenly");

// A thread's sums of one row.
struct Sums {
    real tile[TY][TX];
    real rhs[RHS];
};

struct Place { int x, y, z; };

__device__ __forceinline__ Place find_place() {
    const int thread = threadIdx.x;
    return {thread % DX, thread / DX % DY, thread / (DX * DY)};
}

// The NB x NB tile of the systems that a block of threads sums.
struct Target { int row, column; };

// Columns of a tile in shared memory, and where its segments begin, counted from its first entry.
struct Staged {
    real *rows, *columns;
    int* starts;
};

template <int N> struct alignas(N * sizeof(real)) Vector { real value[N]; };

template <int V, int N> __device__ __forceinline__ void load(real (&values)[N], const real* source) {
#pragma unroll
    for (int v = 0; v < N / V; v++) {
        const Vector<V> vector = reinterpret_cast<const Vector<V>*>(source)[v];
#pragma unroll
        for (int k = 0; k < V; k++) values[v * V + k] = vector.value[k];
    }
}

// Copies columns `column` ... column + NB - 1 of the factor rows of a tile.
__device__ __forceinline__ void copy_panel(real* panel, const Matrix& matrix, const int* columns, int count,
                                           int column) {
#pragma unroll 1  // all sums are in registers meanwhile
    for (int position = threadIdx.x; position < count * CHUNKS; position += THREADS) {
        const int from = column + position % CHUNKS * CHUNK;
        const bool valid = from < matrix.ld;
        const real* source = matrix.factors + (valid ? from : 0);
        copy_async_16(panel + position * CHUNK, row_of(source, __ldg(columns + position / CHUNKS), matrix.ld), valid);
    }
}

// The entries of a segment, counted from the tile's first one, and the place of the first one's column in the panels.
struct Segment { int begin, end, column; };

// The segment of a round's row; without entries where there is none.
__device__ __forceinline__ Segment find_segment(const Staged& staged, const int* places, int row, int height) {
    const int begin = row < height ? staged.starts[row] : 0, end = row < height ? staged.starts[row + 1] : 0;
    return {begin, end, begin < end ? __ldg(places + begin) : 0};
}

// Adds the entries of a segment. The place of the next entry's column is read before the sums of this one.
template <bool DIAGONAL>
__device__ __forceinline__ void add_segment(Sums& sums, const Staged& staged, const Matrix& matrix, const Place& place,
                                            int64 first_column, const int* places, const Segment& segment) {
    int next = segment.column;
#pragma unroll 1
    for (int entry = segment.begin; entry < segment.end; entry++) {
        const int column = next;
        if (entry + 1 < segment.end) next = __ldg(places + entry + 1);
        EntryWeight weight = {};
        if (DIAGONAL || IMPLICIT) weight = weight_of(matrix, places - matrix.seg_colidx + entry, first_column + column);
        real a[TY], b[TX];
        load<VY>(a, staged.rows + column * NB + place.y * TY);
        load<VX>(b, staged.columns + column * NB + place.x * TX);
#pragma unroll
        for (int i = 0; i < TY; i++) {
            if (IMPLICIT) a[i] *= weight.outer;
#pragma unroll
            for (int j = 0; j < TX; j++) sums.tile[i][j] += a[i] * b[j];
        }
        if (!DIAGONAL) continue;
#pragma unroll
        for (int k = 0; k < RHS; k++) {
            const int element = place.y * DX + place.x + k * DX * DY;
            if (element < NB) sums.rhs[k] += weight.linear * staged.rows[column * NB + element];
        }
    }
}

// Sums the target of the systems of a row block.
template <bool DIAGONAL>
__device__ __forceinline__ void sum_tiles(Sums (&sums)[ROUNDS], const Matrix& matrix, const Target& target) {
    const Place place = find_place();
    real* panels = shared_memory<real>();
    const Staged staged = {panels, DIAGONAL ? panels : panels + TILE_COLS * NB,
                           reinterpret_cast<int*>(panels + (gridDim.y > 1 ? 2 : 1) * TILE_COLS * NB)};
    for (int tile = 0; tile < matrix.tiles_across; tile++) {
        const int64 first_column = matrix.tile_ptr[tile];
        const int columns = int(matrix.tile_ptr[tile + 1] - first_column);
        if (SKIP_VACANT && columns == 0) continue;  // a vacant tile: one test skips all its segments
        copy_panel(staged.rows, matrix, matrix.tile_colidx + first_column, columns, target.row);
        if (!DIAGONAL) copy_panel(staged.columns, matrix, matrix.tile_colidx + first_column, columns, target.column);
        const int64* segments = matrix.seg_ptr + int64(tile) * matrix.height;
        const int64 first = segments[0];
#pragma unroll 1
        for (int row = threadIdx.x; row <= matrix.height; row += THREADS) staged.starts[row] = int(segments[row] - first);
        copy_wait_all();
        __syncthreads();
        const int* places = matrix.seg_colidx + first;
        Segment next = find_segment(staged, places, place.z, matrix.height);
#pragma unroll ROUNDS_AT_ONCE
        for (int round = 0; round < ROUNDS; round++) {
            const Segment segment = next;
            next = find_segment(staged, places, (round + 1) * DZ + place.z, matrix.height);
            if (segment.begin == segment.end) continue;
            if constexpr (UNROLLED) {
                add_segment<DIAGONAL>(sums[round], staged, matrix, place, first_column, places, segment);
            } else {
                Sums here = sums[round];  // local memory is read and written once per segment
                add_segment<DIAGONAL>(here, staged, matrix, place, first_column, places, segment);
                sums[round] = here;
            }
        }
        __syncthreads();  // before the next tile overwrites these factors and starts
    }
}

// Stores the lower part of the target of the systems of a row block; `matrices` and `rhs` point to those of its first row.
__device__ __forceinline__ void store(real* matrices, real* rhs, const Sums (&sums)[ROUNDS], int height,
                                      const Target& target) {
    const Place place = find_place();
#pragma unroll ROUNDS_AT_ONCE
    for (int round = 0; round < ROUNDS; round++) {
        const int64 row = round * DZ + place.z;
        if (row >= height) continue;
#pragma unroll
        for (int i = 0; i < TY; i++)
#pragma unroll
            for (int j = 0; j < TX; j++) {
                const int r = target.row + place.y * TY + i, c = target.column + place.x * TX + j;
                if (r < RANK && c <= r) matrices[(row * RANK + r) * RANK + c] = sums[round].tile[i][j];
            }
        if (target.row != target.column) continue;
#pragma unroll
        for (int k = 0; k < RHS; k++) {
            const int element = place.y * DX + place.x + k * DX * DY;
            if (element < NB && target.row + element < RANK) rhs[row * RANK + target.row + element] = sums[round].rhs[k];
        }
    }
}

__device__ __forceinline__ void sum_rows(real* matrices, real* rhs, const Matrix& matrix) {
    int tile_row = 0, tile_column = blockIdx.y;
    while (tile_column > tile_row) tile_column -= ++tile_row;
    const Target target = {tile_row * NB, tile_column * NB};
    Sums sums[ROUNDS] = {};
    if (tile_row == tile_column)
        sum_tiles<true>(sums, matrix, target);
    else
        sum_tiles<false>(sums, matrix, target);
    store(matrices, rhs, sums, matrix.height, target);
}

}  // namespace in_threads

// ---------------------------------------------------------------------------------------------- kernel

constexpr int THREADS = ON_CHIP ? on_chip::THREADS : in_threads::THREADS;

// The rows of a thread block.
struct Rows {
    int64 block, first;      // row block, and its first row
    int height, begin, count; // rows in the row block; the thread block's first row in it and its number of rows, or none
    int64 system;            // index in the batch of the first row's system
};

__device__ __forceinline__ Rows find_rows(int index, int64 first_block, int64 n_rows, int tile_rows) {
    const int groups = ON_CHIP ? ceil_div(tile_rows, ROWS) : 1;
    const int64 block = first_block + index / groups, first = block * tile_rows;
    const int height = int(min(int64(tile_rows), n_rows - first));
    const int begin = ON_CHIP ? index % groups * ROWS : 0, count = ON_CHIP ? min(ROWS, height - begin) : height;
    return {block, first, height, begin, count, int64(index / groups) * tile_rows + begin};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) bals(
        real* __restrict__ matrices,          // OUT (n_batch, RANK, RANK), lower triangles
        real* __restrict__ rhs,               // OUT (n_batch, RANK)
        const real* __restrict__ factors,     // IN  (n_fixed, ld)
        const real* __restrict__ values,      // IN  (nnz,)
        const int* __restrict__ tile_colidx,  // IN  (nnz - redundancy,)
        const int64* __restrict__ tile_ptr,   // IN  (n_tiles + 1,)
        const int* __restrict__ seg_colidx,   // IN  (nnz,)
        const int64* __restrict__ seg_ptr,    // IN  (n_rows * tiles_across + 1,)
        const real* __restrict__ offsets,     // IN  (n_fixed,), not read without HAS_OFFSETS
        int64 first_block, int64 n_rows, int tiles_across, int tile_rows, int ld, real alpha, real unobserved_weight) {
    const Rows rows = find_rows(blockIdx.x, first_block, n_rows, tile_rows);
    if (rows.count <= 0) return;
    const Matrix matrix = {factors, ld, values, tile_colidx, tile_ptr + rows.block * tiles_across, seg_colidx,
                           seg_ptr + rows.first * tiles_across + rows.begin, offsets, tiles_across, rows.height, alpha,
                           unobserved_weight};
    if constexpr (ON_CHIP) {
        on_chip::Sums sums = {};
        on_chip::sum_rows(sums, matrix, rows.count);
        // computed again: keeping it during the summation would take registers
        const Rows same = find_rows(fresh(blockIdx.x), first_block, n_rows, tile_rows);
        on_chip::store_rows(matrices + same.system * RANK * RANK, rhs + same.system * RANK, sums, same.count);
    } else {
        in_threads::sum_rows(matrices + rows.system * RANK * RANK, rhs + rows.system * RANK, matrix);
    }
}
