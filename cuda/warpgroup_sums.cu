// warpgroup_sums.cu - partial sums of row segments, in the output format of `assemble_segments` (fused_als.cu), rank 97 to 128,
//                     by Hopper's warpgroup products (wgmma): A = sum_e w_e y_e y_e^T, b = sum_e c_e y_e (entry_weight)
// grid  : as many blocks as fit on the device; block k sums segments k, k + gridDim.x, ...
// block : 8 warps: four multiply, three fetch the next chunks, one is there since registers move between groups of four warps
// shapes: table (n_fixed, 2 RANK16) of 16-bit parts: the high parts of a row, then its low parts (split.cu)
//         indices, ratings (nnz,)  offsets: of the fixed rows (HAS_OFFSETS) or of the entries (RESIDUAL)
//         segments (n_segments, 3): slot, begin, end; longest first, to balance the entries per block
//         partials (n_slots, PARTIAL): 16 x 16 tiles of A's lower triangle in the register layout of a warp, then b
// shared: SHARED_BYTES: BUFFERS chunks of 32 entries and their weights
// traffic: nnz (4 RANK16 + 8) bytes read, 4 PARTIAL n_slots written     flops: nnz RANK (RANK + 1)
// limits: compute capability 9.0 (sm_90a)
// synchronization: chunk c of a block's stream is in buffer c % BUFFERS, and fetching warp c % FETCHERS alone fills this buffer, as
//     BUFFERS % FETCHERS == 0. A buffer b has two named barriers of its fetching warp and all multiplying warps. full(b): the
//     fetching warp arrives when it has written the chunk, its copies are complete and shown to the products; multiplying warps
//     wait for it before they read. empty(b): multiplying warps arrive when their products of the chunk are complete; the fetching
//     warp waits for it before it writes the next chunk. Generations cannot mix: the fetching warp arrives at full(b) again only
//     after a generation of empty(b), for which every multiplying warp has passed full(b); and these arrive at empty(b) again only
//     after the next generation of full(b), for which the fetching warp has passed empty(b).
// A product computes 64 rows by up to 64 columns of A over 16 entries. The row operand is in registers, where the weights are
// applied. The column operand comes from shared memory, in the layout of the copies. With columns in two halves of 64 and REST,
// the sums take three products: (0, 0), (0, 1), which is transposed when it is stored, and (1, 1). A pair of parts costs half a
// cycle of a multiprocessor per column. The chunks of all segments of a block form one stream: the first entries of a segment
// arrive while the previous segment is multiplied.
// Tensor cores truncate their sums. For float32, the sums of each chunk start from zero and are added to the totals with rounding.
#include "fragments.cuh"

#ifndef RANK
#define RANK 128
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif
#ifndef ARITHMETIC
#define ARITHMETIC 0              // FLOAT32: float16 parts, or BF16X3: bf16 parts
#endif

constexpr bool ROUNDED = ARITHMETIC == FLOAT32;
constexpr int BLOCKS = ceil_div(RANK, BLOCK);
constexpr int RANK16 = BLOCKS * BLOCK;
constexpr int WARPS = 4;                               // per warpgroup
constexpr int THREADS = WARPS * WARP;
constexpr int HALF = 64;                               // rows of a product; 64 columns take 128 bytes
constexpr int HALVES = 2;
// Columns of the second half. Beyond 48, rounded sums of a product take the registers of those of another one of equal size.
constexpr int REST = ROUNDED && RANK16 == HALVES * HALF ? HALF : ceil_div(RANK - HALF, 8) * 8;
constexpr int UNITS = RANK16 / 8;                      // 16-byte units of a part of a row
constexpr int TILE_COUNT = BLOCKS * (BLOCKS + 1) / 2;
constexpr int PARTIAL = TILE_COUNT * BLOCK * BLOCK + RANK16;
constexpr int CHUNK = 32;
constexpr int STEPS = CHUNK / 16;
constexpr int ROWS_BYTES = 8 * 2 * HALF;               // 8 rows; the 16-byte units of a row are permuted by its number
constexpr int STEP_BYTES = 2 * ROWS_BYTES;
constexpr int HALF_BYTES = STEPS * STEP_BYTES;         // one part of 64 columns of a chunk
constexpr int CHUNK_BYTES = 2 * HALVES * HALF_BYTES;
constexpr int BUFFERS = 6, FETCHERS = 3;               // with four fetching warps, or four buffers, no faster
constexpr int SUMS = HALF * HALF / THREADS;            // sums of a product per thread
constexpr int REST_SUMS = HALF * REST / THREADS;       // of a product with the second half's columns
// Registers per thread: a block starts with 128; the fetching warps release most of theirs to the multiplying warps.
constexpr int FETCHING = 40, MULTIPLYING = 216;

static_assert(RANK16 > 96 && RANK16 <= HALVES * HALF, "two halves of 64 rows and columns");
static_assert(FETCHERS <= WARPS && BUFFERS % FETCHERS == 0, "a buffer has one fetching warp");
static_assert(2 * BUFFERS < 16, "named barriers of a block, of which __syncthreads takes one");
static_assert(ARITHMETIC == FLOAT32 || ARITHMETIC == BF16X3, "the table holds two parts");

constexpr int NOT_LAST = -1, END = -2;

struct alignas(8) Parts {
    unsigned high, low;  // parts of two values
};

struct Chunk {
    Parts outer[CHUNK / 2];           // scaled outer weights of entries 2 k and 2 k + 1
    unsigned short linear[3][CHUNK];  // high parts, low parts, zeros
    float of_tiles, of_rhs;           // factors that undo the scaling of the sums
    int slot;                         // slot of the segment that ends with this chunk, NOT_LAST or END
    int unused;
};

// A reusable named barrier between one fetching warp and all multiplying warps (bar.sync 0 is __syncthreads). `arrive` does not
// block; `wait` blocks until all have arrived.
struct Barrier {
    static constexpr int ALL = WARP + THREADS;
    int number;

    __device__ __forceinline__ void arrive() const {
        delay();
#ifdef HYBRIDMF_EMULATE
        emulator::arrive(number, ALL, false);
#else
        asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(ALL) : "memory");
#endif
        delay();
    }

    __device__ __forceinline__ void wait() const {
        delay();
#ifdef HYBRIDMF_EMULATE
        emulator::arrive(number, ALL, true);
#else
        asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(ALL) : "memory");
#endif
        delay();
    }
};

constexpr int SHARED_BYTES = ROWS_BYTES + BUFFERS * (CHUNK_BYTES + int(sizeof(Chunk)));

struct Memory {
    char* base;  // aligned to ROWS_BYTES

    __device__ __forceinline__ char* buffer(int k) const { return base + k * CHUNK_BYTES; }
    __device__ __forceinline__ Chunk& chunk(int k) const { return reinterpret_cast<Chunk*>(base + BUFFERS * CHUNK_BYTES)[k]; }
    __device__ __forceinline__ Barrier full(int k) const { return {1 + k}; }
    __device__ __forceinline__ Barrier empty(int k) const { return {1 + BUFFERS + k}; }
};

struct Inputs {
    const unsigned short* table;
    const int* indices;
    const float* ratings;
    const float* offsets;
    float alpha, unobserved_weight;
    float unscale;  // inverse of the table's scale
};

// ---------------------------------------------------------------------------------------------- warpgroup products

// The column operand in shared memory.
struct Columns {
#ifdef HYBRIDMF_EMULATE
    const char* first;
    explicit Columns(const char* buffer) : first(buffer) {}
#else
    unsigned low;  // low word of the matrix descriptor; the high word is a constant
    __device__ __forceinline__ explicit Columns(const char* buffer)
        : low((static_cast<unsigned>(__cvta_generic_to_shared(buffer)) >> 4 & 0x3fffu) | (ROWS_BYTES >> 4) << 16) {}
#endif
};

// d (+)= A B: A (64 x 16) in registers, 16 rows per warp; B at `offset` bytes, with as many columns as d holds sums of.
// Without `adds`, d is overwritten. The product is asynchronous: call `products_begin` before the first product of a group,
// `products_commit` after the last one, and `products_wait` before reading d.
template <int COUNT>
__device__ __forceinline__ void multiply_warpgroup(float (&d)[COUNT], const unsigned (&a)[4], Columns columns, int offset,
                                                   bool adds = true) {
#if defined(HYBRIDMF_EMULATE)
    emulator::product([&d, &a, columns, offset, adds] {
        const int lane = threadIdx.x % WARP, k = lane % 4 * 2, g = lane / 4;
        auto value = [&](int entry, int column) -> unsigned {
            const int place = entry / 8 * ROWS_BYTES + entry % 8 * 128 + ((column / 8) ^ (entry % 8)) * 16 + column % 8 * 2;
            return *reinterpret_cast<const unsigned short*>(columns.first + offset + place);
        };
        for (int j = 0; j < COUNT / 4; j++) {
            float sum[4];
            for (int q = 0; q < 4; q++) sum[q] = adds ? d[4 * j + q] : 0.0f;
            const unsigned first = value(k, 8 * j + g) | value(k + 1, 8 * j + g) << 16;
            const unsigned second = value(k + 8, 8 * j + g) | value(k + 9, 8 * j + g) << 16;
            emulator::mma_16bit<ARITHMETIC == BF16X3>(sum, a, first, second);
            for (int q = 0; q < 4; q++) d[4 * j + q] = sum[q];
        }
    });
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    // High word of the descriptor: groups of 8 rows are ROWS_BYTES apart; 16-byte units are swizzled within 128 bytes.
#define PRODUCT_OF_TYPE(TYPE, N, D, A, COLUMNS, ADDS, ...)                                        \
    asm volatile("{ .reg .pred adds; .reg .b64 columns;\n setp.ne.b32 adds, " ADDS ", 0;\n"       \
                 " mov.b64 columns, {" COLUMNS ", 0x40000040};\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE                    \
                 " {" D "}, {" A "}, columns, adds, 1, 1, 1; }"                                    \
                 : __VA_ARGS__                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(columns.low + (offset >> 4)), "r"(int(adds)))
#define PRODUCT(...)                                                              \
    do {                                                                          \
        if constexpr (ARITHMETIC == BF16X3) PRODUCT_OF_TYPE("bf16", __VA_ARGS__); \
        else PRODUCT_OF_TYPE("f16", __VA_ARGS__);                                 \
    } while (false)
#define D4(k) "+f"(d[k]), "+f"(d[k + 1]), "+f"(d[k + 2]), "+f"(d[k + 3])
#define D20 D4(0), D4(4), D4(8), D4(12), D4(16)
#define NAMES_20 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19"
#define NAMES_24 NAMES_20 ",%20,%21,%22,%23"
#define NAMES_28 NAMES_24 ",%24,%25,%26,%27"
#define NAMES_32 NAMES_28 ",%28,%29,%30,%31"
    if constexpr (COUNT == 20) PRODUCT("40", NAMES_20, "%20,%21,%22,%23", "%24", "%25", D20);
    else if constexpr (COUNT == 24) PRODUCT("48", NAMES_24, "%24,%25,%26,%27", "%28", "%29", D20, D4(20));
    else if constexpr (COUNT == 28) PRODUCT("56", NAMES_28, "%28,%29,%30,%31", "%32", "%33", D20, D4(20), D4(24));
    else PRODUCT("64", NAMES_32, "%32,%33,%34,%35", "%36", "%37", D20, D4(20), D4(24), D4(28));
#undef NAMES_32
#undef NAMES_28
#undef NAMES_24
#undef NAMES_20
#undef D20
#undef D4
#undef PRODUCT
#undef PRODUCT_OF_TYPE
#endif
}

__device__ __forceinline__ void products_begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void products_commit() {
#if defined(HYBRIDMF_EMULATE)
    emulator::products_commit();
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// The compiler does not move reads of d, the sums of completed products, before this.
template <int COUNT> __device__ __forceinline__ void keep_order(float (&d)[COUNT]) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) asm volatile("" : "+f"(d[k])::"memory");
}

// Waits until at most PENDING groups are incomplete; the others have left their sums in `completed`.
template <int PENDING, class... Sums> __device__ __forceinline__ void products_wait(Sums&... completed) {
    delay();
#if defined(HYBRIDMF_EMULATE)
    emulator::products_wait(PENDING);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (keep_order(completed), ...);
#endif
}

// Makes this thread's copies to shared memory visible to the products that start after a barrier.
__device__ __forceinline__ void show_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

template <int COUNT> __device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT> __device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// Loads the row operand: 16 entries from 16 step on, and the warp's 16 of the 64 columns at `half`.
__device__ __forceinline__ void load_rows(unsigned (&r)[4], const char* half, int step, int warp, int lane) {
#if defined(HYBRIDMF_EMULATE)
    for (int q = 0; q < 4; q++) {
        const int k = lane % 4 * 2;
        auto value = [&](int entry) -> unsigned {
            const int at = step * STEP_BYTES + q / 2 * ROWS_BYTES + entry * 128 + ((2 * warp + q % 2) ^ entry) * 16 + lane / 4 * 2;
            return *reinterpret_cast<const unsigned short*>(half + at);
        };
        r[q] = value(k) | value(k + 1) << 16;
    }
#elif HAS_ASYNC_COPY
    const int unit = (2 * warp + lane / 8 % 2) ^ (lane % 8);
    const char* row = half + step * STEP_BYTES + lane / 16 * ROWS_BYTES + lane % 8 * 128 + unit * 16;
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
#endif
}

// ---------------------------------------------------------------------------------------------- fetching warps

// Position of a warp's next chunk in the stream.
struct Walk {
    const int64* segments;
    int n_segments;
    int position, chunk;  // index of the segment, index of the chunk in it
    int64 begin, next_begin, next_end;
    int slot, count, next_slot;

    // Loads the next segment's bounds ahead of `enter`.
    __device__ __forceinline__ void load_next(int at) {
        if (at >= n_segments) return;
        next_slot = int(__ldg(segments + int64(3) * at));
        next_begin = __ldg(segments + int64(3) * at + 1);
        next_end = __ldg(segments + int64(3) * at + 2);
    }

    __device__ __forceinline__ void enter(int at) {
        position = at;
        slot = next_slot;
        begin = next_begin;
        count = int(next_end - next_begin);
        load_next(at + gridDim.x);
    }

    __device__ __forceinline__ bool ended() const { return position >= n_segments; }
    __device__ __forceinline__ int chunks() const { return count <= CHUNK ? 1 : (count + CHUNK - 1) / CHUNK; }

    __device__ __forceinline__ void advance(int steps) {
        chunk += steps;
        while (!ended() && chunk >= chunks()) {
            chunk -= chunks();
            enter(position + gridDim.x);
        }
    }
};

struct Entry {
    int index;  // row of the table, -1 beyond the last entry
    float rating, offset;
};

__device__ __forceinline__ Entry load_entry(const Walk& walk, const Inputs& in, int lane) {
    const int at = walk.chunk * CHUNK + lane;
    if (walk.ended() || at >= walk.count) return {-1, 0, 0};
    const int64 entry = walk.begin + at;
    return {__ldg(in.indices + entry), __ldg(in.ratings + entry), RESIDUAL ? __ldg(in.offsets + entry) : 0.0f};
}

// A power of two 2^e, |e| <= 60, and its inverse.
struct Scale {
    float factor, inverse;
};

// The scale that brings the largest value of a warp to the range 1/2 ... 1; bf16 needs none.
__device__ __forceinline__ Scale scale_for(float value) {
    if constexpr (!ROUNDED) return {1, 1};
    const int exponent = min(max(int(__float_as_uint(warp_largest(value)) >> 23 & 255u) - 126, -60), 60);
    return {__uint_as_float(unsigned(127 - exponent) << 23), __uint_as_float(unsigned(127 + exponent) << 23)};
}

// Computes the weights of a chunk's entries and writes them to shared memory.
__device__ __forceinline__ void prepare(Chunk& chunk, const Walk& walk, Entry entry, const Inputs& in, int lane) {
    EntryWeight w = {};
    if (entry.index >= 0) {
        if (HAS_OFFSETS) entry.offset = __ldg(in.offsets + entry.index);
        w = entry_weight(entry.rating, entry.offset, in.alpha, in.unobserved_weight);
    }
    const Scale outer = IMPLICIT ? scale_for(w.outer) : Scale{1, 1}, linear = scale_for(fabsf(w.linear));
    Parts parts;
    split<ARITHMETIC>(parts.high, parts.low, w.outer * outer.factor, w.linear * linear.factor);
    unsigned short* const outer_parts = reinterpret_cast<unsigned short*>(chunk.outer) + lane / 2 * 4 + lane % 2;
    outer_parts[0] = parts.high & 0xffffu;
    outer_parts[2] = parts.low & 0xffffu;
    chunk.linear[0][lane] = parts.high >> 16;
    chunk.linear[1][lane] = parts.low >> 16;
    if (lane == 0) {
        chunk.of_tiles = in.unscale * in.unscale * outer.inverse;
        chunk.of_rhs = in.unscale * linear.inverse;
        chunk.slot = walk.ended() ? END : walk.chunk + 1 < walk.chunks() ? NOT_LAST : walk.slot;
    }
}

// Starts the copies of a chunk's rows, eight lanes to a row. Lane e holds the index of row e, -1 beyond the last entry.
__device__ __forceinline__ void copy_rows(char* buffer, int index, const Inputs& in, int lane) {
    lane = fresh(lane);
    const int unit = lane % 8, first = lane / 8;  // 16-byte unit of each half, and row
    const char* const table = reinterpret_cast<const char*>(in.table) + 16 * unit;
    char* const targets[2] = {buffer + first * 128 + (unit ^ first) * 16, buffer + first * 128 + (unit ^ (first + 4)) * 16};
#pragma unroll
    for (int group = 0; group < CHUNK / 4; group++) {
        const int row = __shfl_sync(FULL_WARP, index, 4 * group + first);
        const char* const source = table + unsigned(row) * static_cast<unsigned long long>(4 * RANK16);
        char* const target = targets[group % 2] + 4 * group * 128;
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                if (half == 0 || 8 + unit < UNITS)
                    copy_async_16(target + (part * HALVES + half) * HALF_BYTES, source + 2 * (part * RANK16 + half * HALF),
                                  row >= 0);
    }
    copy_commit();
}

// Fetches chunks warp, warp + FETCHERS, ... of the stream; the last one has no entries and marks the end.
__device__ __forceinline__ void fetch(const Memory& memory, const Inputs& in, const int64* segments, int n_segments, int warp,
                                      int lane) {
    Walk walk{segments, n_segments, int(blockIdx.x), 0, 0, 0, 0, 0, 0, 0};
    walk.load_next(walk.position);
    walk.enter(walk.position);
    walk.advance(warp);
    Entry arriving = load_entry(walk, in, lane);
    int number = warp;  // of the buffer
    bool first = true, ended = false;
    while (!ended) {
        if (!first) memory.empty(number).wait();  // its chunk before has been multiplied
        prepare(memory.chunk(number), walk, arriving, in, lane);
        ended = walk.ended();
        if (!ended) {
            const int index = arriving.index;
            walk.advance(FETCHERS);
            arriving = load_entry(walk, in, lane);  // arrives with the rows
            copy_rows(memory.buffer(number), index, in, lane);
            copy_wait<0>();
            show_products();
        }
        memory.full(number).arrive();
        number += FETCHERS;
        if (number >= BUFFERS) {
            number -= BUFFERS;
            first = false;
        }
    }
}

// ---------------------------------------------------------------------------------------------- multiplying warps

using Rows = unsigned[STEPS][2][4];  // the warp's rows of a half in a chunk, in two parts
struct Operands {
    Rows half[HALVES];
};

// Loads the warp's rows of a half as weighted operands and adds their contribution to b.
__device__ __forceinline__ void load_operands(Rows& rows, float (&rhs)[2], const char* buffer, int half, const Chunk& chunk,
                                              int warp, int lane) {
    const int g = lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int part = 0; part < 2; part++)
            load_rows(rows[step][part], buffer + (part * HALVES + half) * HALF_BYTES, step, warp, lane);
        // weights of entries k and k + 8; columns 0 and 1 of `linear` are the parts of c
        unsigned linear[2];
        Parts outer[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            linear[k] = *reinterpret_cast<const unsigned*>(chunk.linear[g < 2 ? g : 2] + 16 * step + pair + 8 * k);
            outer[k] = IMPLICIT ? chunk.outer[(16 * step + pair + 8 * k) / 2] : Parts{0, 0};
        }
        float sum[4] = {};
#pragma unroll
        for (int part = 1; part >= 0; part--)
            multiply_parts<ARITHMETIC>(sum, rows[step][part], linear[0], linear[1]);
        rhs[0] += chunk.of_rhs * (sum[0] + sum[1]);
        rhs[1] += chunk.of_rhs * (sum[2] + sum[3]);
        if constexpr (IMPLICIT) {
#pragma unroll
            for (int q = 0; q < 4; q++)
                weigh<ARITHMETIC>(rows[step][0][q], rows[step][1][q], outer[q / 2].high, outer[q / 2].low);
        }
    }
}

// sums (+)= products of a half's rows with a half's columns over a chunk, in the order low x high, high x low, high x high.
template <int COUNT>
__device__ __forceinline__ void multiply(float (&sums)[COUNT], const Rows& rows, Columns columns, int half, bool adds) {
    static_for<0, STEPS>([&](auto index) {
        constexpr int step = decltype(index)::value;
        const int high = half * HALF_BYTES + step * STEP_BYTES, low = high + HALVES * HALF_BYTES;
        multiply_warpgroup(sums, rows[step][1], columns, high, adds || step > 0);
        multiply_warpgroup(sums, rows[step][0], columns, low);
        multiply_warpgroup(sums, rows[step][0], columns, high);
    });
}

template <int COUNT>
__device__ __forceinline__ void add_scaled(float (&sums)[COUNT], const float (&more)[COUNT], float scale) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) sums[k] += scale * more[k];
}

// Transposes 8 x 8 values: lane 4 g + t holds row g, columns 2 t and 2 t + 1, before and after.
__device__ __forceinline__ void transpose(float& first, float& second, int lane) {
#if defined(HYBRIDMF_EMULATE)
    float result[2];
    for (int k = 0; k < 2; k++) {
        const int source = (lane % 4 * 2 + k) * 4 + lane / 8;
        const float even = __shfl_sync(FULL_WARP, first, source), odd = __shfl_sync(FULL_WARP, second, source);
        result[k] = lane / 4 % 2 ? odd : even;
    }
    first = result[0];
    second = result[1];
#elif HAS_ASYNC_COPY
    unsigned low = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x5410);
    unsigned high = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(low));
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(high));
    first = __uint_as_float(__byte_perm(low, high, 0x5410));
    second = __uint_as_float(__byte_perm(low, high, 0x7632));
#endif
}

// Stores the lower triangle's elements of block (row, column), of which `get` returns element k = 4 half + q.
template <class Get> __device__ __forceinline__ void store_block(float* partial, int row, int column, int lane, Get&& get) {
    float* target = partial + (row * (row + 1) / 2 + column) * BLOCK * BLOCK + lane;
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (is_stored(RANK, row, column, k, lane)) target[k * WARP] = get(k);
}

// Stores the blocks (row, first_column), (row, first_column + 1), ... that are not above the diagonal.
template <int COUNT>
__device__ __forceinline__ void store(float* partial, const float (&sums)[COUNT], int row, int first_column, int lane) {
#pragma unroll
    for (int block = 0; block < (COUNT + 7) / 8; block++)
        if (first_column + block <= row)
            store_block(partial, row, first_column + block, lane, [&](int k) {
                const int at = 8 * block + k;
                return at < COUNT ? sums[at] : 0;
            });
}

// A thread's share of a segment's sums.
struct Totals {
    float first[SUMS], across[REST_SUMS], second[REST_SUMS];  // products (0, 0), (0, 1), (1, 1)
    float rhs[HALVES][2];                                     // the warp's rows g and g + 8, in lanes that are multiples of four

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < SUMS; k++) first[k] = 0;
#pragma unroll
        for (int k = 0; k < REST_SUMS; k++) across[k] = second[k] = 0;
        clear_rhs();
    }
    __device__ __forceinline__ void clear_rhs() {
#pragma unroll
        for (int k = 0; k < HALVES * 2; k++) rhs[k / 2][k % 2] = 0;
    }

    // Adds and clears a chunk's share of b, for the rows of a half.
    __device__ __forceinline__ void take(float (&share)[2], int half) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            rhs[half][k] += share[k];
            share[k] = 0;
        }
    }

    __device__ __forceinline__ void store_in(float* partial, int warp, int lane) const {
        store(partial, first, warp, 0, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS - WARPS; block++) {
            float transposed[8];  // element 4 half + q is in half q / 2 of the block before
#pragma unroll
            for (int k = 0; k < 8; k += 2) {
                const int at = 8 * block + k % 4 / 2 * 4 + k / 4 * 2;
                transposed[k] = at < REST_SUMS ? across[at] : 0;
                transposed[k + 1] = at < REST_SUMS ? across[at + 1] : 0;
                if (at < REST_SUMS) transpose(transposed[k], transposed[k + 1], lane);
            }
            store_block(partial, WARPS + block, warp, lane, [&](int k) { return transposed[k]; });
        }
        if (warp < BLOCKS - WARPS) store(partial, second, WARPS + warp, WARPS, lane);
        float* target = partial + TILE_COUNT * BLOCK * BLOCK + warp * BLOCK + lane / 4;
        if (lane % 4 == 0)
#pragma unroll
            for (int k = 0; k < HALVES * 2; k++)
                if (k / 2 == 0 || warp < BLOCKS - WARPS) target[k / 2 * HALF + k % 2 * 8] = rhs[k / 2][k % 2];
    }
};

// The chunks of the stream in order, for the multiplying warps.
struct Chunks {
    const Memory& memory;
    int number = 0;  // of the current chunk's buffer
    bool end;        // the current chunk is the end

    __device__ __forceinline__ explicit Chunks(const Memory& memory) : memory(memory) { wait(); }

    __device__ __forceinline__ void wait() {
        memory.full(number).wait();
        end = memory.chunk(number).slot == END;
    }
    __device__ __forceinline__ void advance() {
        if (++number == BUFFERS) number = 0;
        wait();
    }
    __device__ __forceinline__ const Chunk& chunk() const { return memory.chunk(number); }
    __device__ __forceinline__ const char* buffer() const { return memory.buffer(number); }
};

// Multiplies all chunks of the stream and stores the sums of each segment. The operands of the next chunk are loaded while the
// products of a chunk are computed, and its products follow without a gap.
__device__ __forceinline__ void multiply_chunks(const Memory& memory, float* partials, int warp, int lane) {
    Totals totals;
    totals.clear();
    Operands operands, next;
    float rhs[HALVES][2] = {};  // the loaded chunk's share of b
    Chunks chunks(memory);
    int slot = END, number = 0;  // of the chunk that is multiplied
    auto load = [&](Operands& loaded) {
        if (chunks.end) return;
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            load_operands(loaded.half[half], rhs[half], chunks.buffer(), half, chunks.chunk(), warp, lane);
    };
    // Starts the products of the current chunk, waits for those of the segment's chunk before, and goes on to the next chunk.
    auto multiply_chunk = [&](const Operands& loaded, auto adds) {
        constexpr bool ADDS = decltype(adds)::value == 1;  // to those of the chunk before
        const Columns columns(chunks.buffer());
#pragma unroll
        for (int half = 0; half < HALVES; half++) totals.take(rhs[half], half);
        products_begin();
        multiply(totals.first, loaded.half[0], columns, 0, ADDS);
        multiply(totals.across, loaded.half[0], columns, 1, ADDS);
        multiply(totals.second, loaded.half[1], columns, 1, ADDS);
        products_commit();
        if constexpr (ADDS) {
            products_wait<1>();
            memory.empty(number).arrive();
        }
        slot = chunks.chunk().slot;
        number = chunks.number;
        chunks.advance();
    };
    load(operands);
#pragma unroll 1
    while (!chunks.end) {
        lane = fresh(lane);
        multiply_chunk(operands, Index<0>{});
#pragma unroll 1
        while (true) {  // two chunks, so that the operands of either have registers of their own
            load(next);
            if (slot != NOT_LAST) {
                products_wait<0>(totals.first, totals.across, totals.second);
                operands = next;
                break;
            }
            multiply_chunk(next, Index<1>{});
            load(operands);
            if (slot != NOT_LAST) {
                products_wait<0>(totals.first, totals.across, totals.second);
                break;
            }
            multiply_chunk(operands, Index<1>{});
        }
        memory.empty(number).arrive();
        totals.store_in(partials + int64(slot) * PARTIAL, warp, lane);
        totals.clear_rhs();
    }
}

template <bool FIRST, class A, class B> __device__ __forceinline__ auto& one_of(A& first, B& second) {
    if constexpr (FIRST) return first;
    else return second;
}

// The same with rounded sums. They take the registers of the next chunk's operands, of which only the first half is loaded early.
__device__ __forceinline__ void multiply_rounded(const Memory& memory, float* partials, int warp, int lane) {
    Totals totals;
    totals.clear();
    Operands operands;
    float rhs[2] = {};  // the loaded half's share of b
    Chunks chunks(memory);
    auto load_half = [&](int half, float (&sums)[2]) {
        if (!chunks.end) load_operands(operands.half[half], sums, chunks.buffer(), half, chunks.chunk(), warp, lane);
    };
    load_half(0, rhs);
#pragma unroll 1
    while (!chunks.end) {
        lane = fresh(lane);
        const int slot = chunks.chunk().slot;
        const float scale = chunks.chunk().of_tiles;
        const Columns columns(chunks.buffer());
        const Barrier used = memory.empty(chunks.number);
        totals.take(rhs, 0);
        float wide[SUMS], across[REST_SUMS], apart[REST_SUMS];
        auto& second = one_of<REST == HALF>(wide, apart);  // registers suffice for the sums of three products up to rank 112
        products_begin();
        multiply(wide, operands.half[0], columns, 0, false);
        products_commit();
        load_half(1, totals.rhs[1]);
        products_begin();
        multiply(across, operands.half[0], columns, 1, false);
        products_commit();
        products_wait<1>(wide);
        add_scaled(totals.first, wide, scale);
        products_begin();
        multiply(second, operands.half[1], columns, 1, false);
        products_commit();
        products_wait<1>(across);
        add_scaled(totals.across, across, scale);
        chunks.advance();
        load_half(0, rhs);
        products_wait<0>(second);
        used.arrive();
        add_scaled(totals.second, second, scale);
        if (slot == NOT_LAST) continue;
        totals.store_in(partials + int64(slot) * PARTIAL, warp, lane);
        totals.clear();
    }
}

extern "C" __global__ void __launch_bounds__(2 * THREADS, 2)
warpgroup_sums(float* partials, const unsigned short* table, const int* indices, const float* ratings, const float* offsets,
               const int64* segments, int n_segments, float alpha, float unobserved_weight, float table_scale) {
    const int warp = threadIdx.x / WARP, lane = lane_number();
    char* base = shared_memory<char>();
#ifndef HYBRIDMF_EMULATE
    base += -static_cast<unsigned>(__cvta_generic_to_shared(base)) & (ROWS_BYTES - 1);
#endif
    const Memory memory{base};
    if (threadIdx.x < BUFFERS)
        for (int k = 0; k < CHUNK; k++) memory.chunk(threadIdx.x).linear[2][k] = 0;
    __syncthreads();
    if (warp >= WARPS) {
        give_registers<FETCHING>();
        const Inputs in{table, indices, ratings, offsets, alpha, unobserved_weight, 1.0f / table_scale};
        if (warp - WARPS < FETCHERS) fetch(memory, in, segments, n_segments, warp - WARPS, lane);
    } else {
        take_registers<MULTIPLYING>();
        if constexpr (ROUNDED) multiply_rounded(memory, partials, warp, lane);
        else multiply_chunks(memory, partials, warp, lane);
    }
}
