// fused_als.cu - assembles A[u] x[u] = b[u] on chip for rows u of a side and, up to rank 80 or by CG, solves it there:
//                A[u] = G + sum_e w_e y_e y_e^T + scale_u ridge,  b[u] = sum_e c_e y_e  (weights: entry_weight)
// grid  : as many blocks as fit on the device; teams of WARPS warps take rows from a counter, longest rows first
// block : TEAMS teams (WARPS 1) or one team (WARPS 2 or 4); system.cuh distributes A over the warps
// shapes: factors (n_fixed, LD), or the output of split.cu: two 16-bit parts (n_fixed, 2 RANK16) for float32 and bf16x3, bf16
//         (n_fixed, RANK16) for bf16  gram (RANK16, RANK16) or null  ridge (RANK,)  scale (n_out,)  solutions (n_out, LD)
//         indptr (n_out + 1,)  rows (n_rows,): rows to solve  segments (n_segments, 3): slot, begin, end
//         with RESIDUAL: offsets (nnz,); with it or PULLED, `solve_rows` adds the values in solutions to b[u]
//         partials (n_slots, PARTIAL): tiles of A in the register layout of the threads, then b
// shared: TEAMS * TEAM_FLOATS * 4 bytes: STAGES chunks of CHUNK entries in flight, or the Cholesky factor
// traffic: nnz (4 RANK + 8) bytes read, 4 LD n_rows written   flops: nnz RANK (RANK + 1) + n_rows (RANK^3 / 3 + 2 RANK^2)
// limits: RANK <= 128; LD a multiple of 4; w_e >= 0 (ensured by the plan); sm_80 or later
// Rows longer than a segment go through `assemble_segments` and `solve_partials`, which add the segments in order: one long
// row never delays the sweep. Results do not depend on the assignment of rows to teams.
// synchronization: chunk c is in stage c % STAGES, unit u of weights and indices in slot u % UNITS. At the barrier of chunk c, each
//         thread has waited for its own copies of chunk c, and all have read chunk c - 1. After it, chunk c + STAGES - 1 is copied
//         to the stage of c - 1; its indices were written before this barrier. One warp writes each unit, AHEAD units after those
//         of chunk c, to a slot that no thread reads before the next barrier. `run` ends with a barrier after all reads of stages,
//         slots and scales; no copy of data is in flight then, and the solver or the next row overwrites them.
//         A team shares its row, so all its threads reach the same barriers; a team of several warps is a block.
//         The counter gives each position to one team and orders nothing else; `Cleared` in assembly.py says when it is cleared.
#include "system.cuh"

#ifndef LD
#define LD ((RANK + 3) / 4 * 4)   // floats from one row of factors to the next
#endif
#ifndef ARITHMETIC
#define ARITHMETIC 0              // see Precision in fragments.cuh
#endif
#ifndef SOLVER
#define SOLVER 0                  // 0 Cholesky, 1 conjugate gradients
#endif
#ifndef HAS_OFFSETS
#define HAS_OFFSETS 0
#endif
#ifndef TEAMS
#define TEAMS (WARPS == 1 ? 4 : 1)
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef SOLVED_APART
#define SOLVED_APART 0            // 1: rows of all lengths go through partial sums; `solve_rows` is not compiled
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 3           // minimum resident blocks per multiprocessor; limits the registers of a thread
#endif

#define SOLVED_BY_SUMS (SOLVED_APART && SOLVER == 0)  // cholesky_sums.cu or nonnegative.cu solves the systems

static_assert(LD % 4 == 0 && LD >= RANK && LD <= RANK16, "rows are copied in pieces of 16 bytes");
static_assert(WARPS == 1 || TEAMS == 1, "a team of several warps synchronizes its whole block");
static_assert(STAGES >= 2, "one chunk is computed while the next ones arrive");

constexpr bool SCALED = ARITHMETIC == FLOAT32;         // the table holds float16 parts: see split.cu
constexpr bool SPLIT = SCALED || ARITHMETIC == BF16X3; // it holds two parts
constexpr bool NARROW = ARITHMETIC == BF16;            // it holds bf16
constexpr int CHUNK = NARROW && WARPS == 4 ? 64 : 32;
constexpr int UNROLLED = SPLIT && SOLVED_BY_SUMS ? 2 : 1;  // products per turn of a loop; with a solver, more code is slower
constexpr int ENTRIES_PER_WARP = CHUNK / WARPS;        // entries of a chunk that one warp fetches
constexpr int TABLE_LD = NARROW ? RANK16 / 2 : SPLIT ? RANK16 : LD;  // floats from one row of the table to the next
constexpr int PIECES = TABLE_LD / 4;                   // 16-byte pieces in a row of the table
constexpr int LANES = PIECES <= 2 ? 2 : PIECES <= 4 ? 4 : PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;  // lanes that copy one row
constexpr int ENTRIES_PER_COPY = WARP / LANES;
constexpr int COPIES = ENTRIES_PER_WARP / ENTRIES_PER_COPY;
constexpr int TILE_COUNT = BLOCKS * (BLOCKS + 1) / 2;
constexpr int PARTIAL = TILE_COUNT * BLOCK * BLOCK + RANK16;
constexpr bool PAIRED = NARROW || SPLIT;               // rows of a stage are in the layout of `load_operand`
constexpr int STAGE_STRIDE = PAIRED ? operand_stride(TABLE_LD * 4) / 4 : STRIDE;  // floats from one row of a stage to the next
constexpr int UNIT = WARP;                             // entries whose weights one warp computes at a time, one per lane
constexpr int AHEAD = ceil_div(STAGES * CHUNK, UNIT);  // units that are ready before the chunk being multiplied
constexpr int UNITS = power_of_two(AHEAD + CHUNK / UNIT);  // units in shared memory
static_assert(CHUNK / UNIT <= WARPS, "a warp prepares at most one unit per chunk");
static_assert(CHUNK % UNIT == 0 && UNITS >= AHEAD + CHUNK / UNIT, "units being read and units being written have different slots");
constexpr int ROWS = product_rows(ARITHMETIC);         // entries of one product
constexpr bool ROUNDED = ARITHMETIC == FLOAT32_WIDE;

struct UnitEntries {
    union {
        float2 weight[UNIT];  // (root of the outer weight, linear weight)
        struct {
            unsigned short outer[2][UNIT], linear[2][UNIT];  // SPLIT: parts, scaled
        };
        struct {
            float narrow_outer[UNIT];  // NARROW
            unsigned short narrow_linear[2][UNIT];  // bf16 parts
        };
    };
    int index[UNIT];  // row of the factors, -1 beyond the last entry
};

constexpr int STAGES_FLOATS = STAGES * CHUNK * STAGE_STRIDE;
// The Cholesky factor overwrites the entries; with conjugate gradients, the entries of the next row arrive during the solve.
constexpr int STAGED = SOLVER == 1 ? STAGES_FLOATS + PRODUCT_FLOATS : STAGES_FLOATS > FACTOR_FLOATS ? STAGES_FLOATS : FACTOR_FLOATS;
constexpr int TEAM_FLOATS = STAGED + TEAM_VECTORS + UNITS * UNIT * 3;

__device__ __forceinline__ TeamMemory team_memory(int team) {
    float* base = shared_memory<float>() + team * TEAM_FLOATS;
    return {base, base + STAGED, base + STAGES_FLOATS};
}

__device__ __forceinline__ UnitEntries* team_entries(int team) {
    return reinterpret_cast<UnitEntries*>(shared_memory<float>() + team * TEAM_FLOATS + STAGED + TEAM_VECTORS);
}

struct Inputs {
    const float* factors;
    const int* indices;
    const float* ratings;
    const float* offsets;
    float alpha, unobserved_weight;
    float table_scale;  // scale of a table of float16 parts, a power of two
};

// An entry in registers, on its way from global to shared memory.
struct Entry {
    int index;
    float rating, offset;
};

// Processes the entries begin ... end of one row. A warp loads the indices and ratings of a unit of entries and writes their
// weights to shared memory (`prepare`); warps take turns. All warps copy the factors of a chunk to a stage (`issue`) and multiply.
struct Stream {
    const Inputs& in;
    const TeamMemory& memory;
    UnitEntries* units;
    int64 begin;
    int count;
    int warp, lane;
    Entry arriving;  // of this warp's next unit: its loads are in flight

    __device__ __forceinline__ void load(Entry& entry, int unit) const {
        const int at = unit * UNIT + lane;
        entry = {-1, 0, 0};
        load_if(at < count, entry.index, in.indices + begin + at);
        load_if(at < count, entry.rating, in.ratings + begin + at);
        if (RESIDUAL) load_if(at < count, entry.offset, in.offsets + begin + at);
    }

    // The largest outer and linear weights that each warp found, then powers of two that scale the weights of all entries to at
    // most 1, one pair per warp. They are in shared memory because registers are scarce.
    __device__ __forceinline__ float* largest(int of) const { return memory.extras + 2 * of; }
    __device__ __forceinline__ float* scales() const { return memory.extras + 2 * (WARPS + warp); }

    // The power of two that scales a value to 1/2 ... 1, or to less where the exponent would exceed 60.
    __device__ __forceinline__ static float scale_of(float most) {
        const float fitting = fminf(fmaxf(1.0f / most, 0x1p-60f), 0x1p60f);
        return __uint_as_float(__float_as_uint(fitting) & 0x7f800000u);
    }

    __device__ __forceinline__ void set_scales() const {
        EntryWeight most = {};
        for (int at = warp * WARP + lane; at < count; at += TEAM) {
            const float rating = __ldg(in.ratings + begin + at);
            float offset = 0;
            if (HAS_OFFSETS || RESIDUAL) offset = __ldg(in.offsets + (RESIDUAL ? begin + at : __ldg(in.indices + begin + at)));
            const EntryWeight w = entry_weight(rating, offset, in.alpha, in.unobserved_weight);
            most = {fmaxf(most.outer, w.outer), fmaxf(most.linear, fabsf(w.linear))};
        }
        float outer = IMPLICIT ? warp_largest(most.outer) : 1.0f, linear = warp_largest(most.linear);
        if constexpr (WARPS > 1) {
            if (lane == 0) largest(warp)[0] = outer, largest(warp)[1] = linear;
            team_sync();
#pragma unroll
            for (int w = 0; w < WARPS; w++) outer = fmaxf(outer, largest(w)[0]), linear = fmaxf(linear, largest(w)[1]);
        }
        if (lane == 0) {
            scales()[0] = IMPLICIT ? scale_of(outer) : 1.0f;
            scales()[1] = scale_of(linear);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void load_offset(Entry& entry) const {
        if (HAS_OFFSETS && entry.index >= 0) entry.offset = __ldg(in.offsets + entry.index);
    }

    // Writes the indices and weights of a unit to shared memory and starts loading those of a later unit of this warp.
    __device__ __forceinline__ void prepare(unsigned unit) {
        UnitEntries& slot = units[unit % UNITS];
        const EntryWeight w = entry_weight(arriving.rating, arriving.offset, in.alpha, in.unobserved_weight);
        const bool valid = arriving.index >= 0;
        if constexpr (SPLIT) {
            const float outer = SCALED ? w.outer * scales()[0] : w.outer, linear = SCALED ? w.linear * scales()[1] : w.linear;
            unsigned high, low;
            split<ARITHMETIC>(high, low, outer, valid ? linear : 0.0f);
            if (IMPLICIT) {
                slot.outer[0][lane] = high & 0xffffu;
                slot.outer[1][lane] = low & 0xffffu;
            }
            slot.linear[0][lane] = high >> 16;
            slot.linear[1][lane] = low >> 16;
        } else if constexpr (NARROW) {
            const float linear = valid ? w.linear : 0.0f;
            unsigned high, low;
            split<BF16X3>(high, low, linear, 0);
            slot.narrow_outer[lane] = w.outer;
            slot.narrow_linear[0][lane] = high;
            slot.narrow_linear[1][lane] = low;
        } else {
            slot.weight[lane] = make_float2(IMPLICIT ? sqrtf(w.outer) : 1.0f, valid ? w.linear : 0.0f);
        }
        slot.index[lane] = arriving.index;
        __syncwarp();  // otherwise the assembler moves the loads up, into other registers, and waits for them here to copy them
        load(arriving, unit + WARPS);
    }

    // Whether it is this warp's turn to prepare a unit.
    __device__ __forceinline__ bool prepares(unsigned unit) const { return WARPS == 1 || unit % WARPS == unsigned(warp); }

    // Starts the copies of a chunk's factors, zeros beyond the last entry. Each chunk is one copy group, even an empty chunk.
    __device__ __forceinline__ void issue(int chunk, int stage, int chunks) {
        if (chunk < chunks) {
            // a lane copies a piece of COPIES consecutive entries
            const int first = warp * ENTRIES_PER_WARP + lane / LANES * COPIES, piece = lane % LANES, entry = chunk * CHUNK + first;
            const int* index = units[unsigned(entry) / UNIT % UNITS].index + unsigned(entry) % UNIT;
            float* target = memory.staged + (stage * CHUNK + first) * STAGE_STRIDE;
            const float* source = in.factors + 4 * piece;
            int row[COPIES];  // read before the first copy: the compiler moves no loads across a copy
            if constexpr (COPIES % 4 == 0) {
#pragma unroll
                for (int k = 0; k < COPIES; k += 4) {
                    const int4 four = *reinterpret_cast<const int4*>(index + k);
                    row[k] = four.x, row[k + 1] = four.y, row[k + 2] = four.z, row[k + 3] = four.w;
                }
            } else {
#pragma unroll
                for (int k = 0; k < COPIES; k++) row[k] = index[k];
            }
            if (piece < PIECES)
#pragma unroll
                for (int k = 0; k < COPIES; k++) {
                    const int place = PAIRED ? swapped_half(COPIES % 8 == 0 ? k : first + k, piece) : piece;
                    copy_row_async_16<TABLE_LD * 4>(target + k * STAGE_STRIDE + 4 * place, source, row[k]);
                }
        }
        copy_commit();
    }

    // Adds the products of ROWS entries, the unit's from k on.
    template <int ROLE>
    __device__ __forceinline__ void multiply(Holding& mine, const float* rows, const UnitEntries& slot, int k) const {
        const unsigned short* const values = reinterpret_cast<const unsigned short*>(rows);
        if constexpr (SPLIT) {
            const SplitWeights weights{slot.outer[0] + k, slot.linear[0] + k};
            accumulate_parts<ROLE, ARITHMETIC, IMPLICIT, SCALED>(mine, values, 2 * STAGE_STRIDE, weights, lane);
        } else if constexpr (NARROW) {
            const NarrowWeights weights{slot.narrow_outer + k, slot.narrow_linear[0] + k};
            accumulate_narrow<ROLE, IMPLICIT>(mine, values, 2 * STAGE_STRIDE, weights, lane);
        } else {
            StepWeights<ROWS> steps;
#pragma unroll
            for (int step = 0; step < ROWS / 4; step++) {
                const float2 pair = slot.weight[k + 4 * step + lane % 4];
                steps.root[step] = pair.x;
                steps.linear[step] = pair.y;
            }
            accumulate<ROLE, ARITHMETIC, IMPLICIT, ROUNDED>(mine, rows, steps, lane);
        }
    }

    // Starts loading the first entries.
    __device__ __forceinline__ void open() {
        load(arriving, warp);
    }

    // Starts copying the factors of the first entries. It overwrites everything of the previous row except its sums.
    __device__ __forceinline__ void fill() {
        const int chunks = (count + CHUNK - 1) / CHUNK;
        if constexpr (SCALED) set_scales();
        load_offset(arriving);
#pragma unroll
        for (int unit = 0; unit < AHEAD; unit++) {
            if (!prepares(unit)) continue;
            prepare(unit);
            load_offset(arriving);
        }
        team_sync();
#pragma unroll 1
        for (int chunk = 0; chunk < STAGES - 1; chunk++) issue(chunk, chunk, chunks);
    }

    // Sums the entries; call `fill` first.
    __device__ __forceinline__ void run(Holding& mine) {
        const int chunks = (count + CHUNK - 1) / CHUNK;
        int stage = 0;  // chunk % STAGES
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            copy_wait<STAGES - 2>();
            team_sync();  // this chunk has arrived; no warp still reads the previous chunk, whose buffer is next
            // of the units that become necessary with this chunk, the warp prepares at most one
            const unsigned unit_ahead = AHEAD + chunk * (CHUNK / UNIT), turn = (warp - unit_ahead) % WARPS;
            const bool preparing = turn < CHUNK / UNIT;
            if (preparing) prepare(unit_ahead + turn);
            issue(chunk + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1, chunks);
            const float* rows = memory.staged + stage * CHUNK * STAGE_STRIDE;
            const UnitEntries* unit = units + unsigned(chunk * CHUNK) / UNIT % UNITS;
            const int end = min(CHUNK, count - chunk * CHUNK);
            with_role(warp, [&](auto role) {
#pragma unroll UNROLLED
                for (int k = 0; k < CHUNK; k += ROWS)
                    if (k < end) multiply<decltype(role)::value>(mine, rows + k * STAGE_STRIDE, unit[k / UNIT], k % UNIT);
            });
            if (preparing) load_offset(arriving);  // not earlier, because it waits for the index
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        if constexpr (SCALED) {
            const float unscale = 1.0f / in.table_scale, of_tiles = unscale * unscale / scales()[0];
#pragma unroll
            for (int k = 0; k < Holding::TILES; k++)
#pragma unroll
                for (int q = 0; q < 8; q++) mine.tiles[k].value[q / 4][q % 4] *= of_tiles;
#pragma unroll
            for (int b = 0; b < Holding::ROWS; b++)
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++) mine.rhs[b][half] *= unscale / scales()[1];
        }
        team_sync();  // the Cholesky factor or the entries of the next row overwrite the buffers
    }
};

// Distributes work by an atomic counter. A team requests its next position while it processes the current one, to hide the
// counter's latency.
struct Queue {
    int* counter;
    int* shared;  // for teams of several warps
    int asked;

    __device__ __forceinline__ void ask(int warp, int lane) {
        if (warp == 0 && lane == 0) asked = atomicAdd(counter, 1);
    }

    // Returns the requested position, the same in all threads of the team.
    __device__ __forceinline__ int take(int warp, int lane) {
        if constexpr (WARPS == 1) return __shfl_sync(FULL_WARP, asked, 0);
        __syncthreads();  // all threads have read the previous position
        if (warp == 0 && lane == 0) *shared = asked;
        __syncthreads();
        return *shared;
    }
};

// Solves the system in `mine`. Conjugate gradients call `meanwhile` once, when the entry buffers are free; Cholesky does not.
template <class Body>
__device__ __forceinline__ void finish(Holding& mine, float* solutions, int* status, int64 row, const TeamMemory& memory,
                                       const float* gram, const float* ridge, float scale, float epsilon, int cg_steps, int warp,
                                       int lane, Body&& meanwhile) {
    lane = fresh(lane);
    const float* given = RESIDUAL || PULLED ? solutions + row * LD : nullptr;
    if constexpr (SOLVER == 0) {
        complete(mine, memory, gram, ridge, scale, given, warp, lane);
        team_sync();
        lane = fresh(lane);
        const int failed = cholesky_solve(mine, memory, epsilon, warp, lane);
        store_solution(solutions + row * LD, status + row, LD, memory, failed, warp, lane);
    } else {
        Elements x;
        if (warp == 0) load_elements(x, solutions + row * LD, lane);
        complete(mine, memory, gram, ridge, scale, given, warp, lane);
        team_sync();
        conjugate_gradient(mine, memory, x, cg_steps, warp, lane, meanwhile);
        store_solution(solutions + row * LD, status + row, LD, memory, *memory.failed, warp, lane);
    }
}

#if !SOLVED_APART
// Solves rows of at most one segment. On entry, solutions holds the warm start of conjugate gradients.
extern "C" __global__ void __launch_bounds__(TEAMS * TEAM, BLOCKS_PER_SM)
solve_rows(float* solutions, int* status, const float* factors, const int* indices, const float* ratings, const float* offsets,
           const int64* indptr, const int* rows, const float* gram, const float* ridge, const float* scale, int* counter,
           int n_rows, float alpha, float unobserved_weight, float table_scale, float epsilon, int cg_steps) {
    __shared__ int position_shared;
    const int team = threadIdx.x / TEAM;
    const int warp = threadIdx.x % TEAM / WARP;
    int lane = lane_number();
    const TeamMemory memory = team_memory(team);
    const Inputs in{factors, indices, ratings, offsets, alpha, unobserved_weight, table_scale};
    Queue queue{counter, &position_shared, 0};
    queue.ask(warp, lane);
    auto take = [&] {  // returns a row, or -1 after the last one
        const int position = queue.take(warp, lane);
        if (position >= n_rows) return -1;
        queue.ask(warp, lane);
        return rows[position];
    };
    if constexpr (SOLVER == 0) {
        for (int row = take(); row >= 0; row = take()) {
            lane = fresh(lane);
            Holding mine;
            clear(mine);
            Stream stream{in, memory, team_entries(team), indptr[row], int(indptr[row + 1] - indptr[row]), warp, lane, {}};
            stream.open();
            stream.fill();
            stream.run(mine);
            finish(mine, solutions, status, row, memory, gram, ridge, scale[row], epsilon, cg_steps, warp, lane, [] {});
            team_sync();  // the solution has been read
        }
        return;
    }
    // A row's first dependent loads are issued two rows and one row ahead, and its entries are loaded while the previous row is
    // solved: each load depends on the one before, and a short row takes hardly longer than one load.
    int row = take(), next = take();
    if (row < 0) return;
    Stream stream{in, memory, team_entries(team), indptr[row], int(indptr[row + 1] - indptr[row]), warp, lane, {}};
    stream.open();
    stream.fill();
    while (true) {
        const int64 begin = next < 0 ? 0 : indptr[next], end = next < 0 ? 0 : indptr[next + 1];
        const float penalty = scale[row];
        const int later = take();
        Holding mine;
        clear(mine);
        stream.run(mine);
        stream.begin = begin;
        stream.count = int(end - begin);
        stream.open();
        finish(mine, solutions, status, row, memory, gram, ridge, penalty, epsilon, cg_steps, warp, lane, [&] {
            if (next >= 0) stream.fill();
        });
        if (next < 0) break;
        team_sync();  // the solution has been read
        row = next;
        next = later;
    }
}
#endif

// Computes the sums of segments of long rows.
extern "C" __global__ void __launch_bounds__(TEAMS * TEAM, BLOCKS_PER_SM)
assemble_segments(float* partials, const float* factors, const int* indices, const float* ratings, const float* offsets,
                  const int64* segments, int* counter, int n_segments, float alpha, float unobserved_weight,
                  float table_scale) {
    __shared__ int position_shared;
    const int team = threadIdx.x / TEAM;
    const int warp = threadIdx.x % TEAM / WARP;
    int lane = lane_number();
    const TeamMemory memory = team_memory(team);
    const Inputs in{factors, indices, ratings, offsets, alpha, unobserved_weight, table_scale};
    Queue queue{counter, &position_shared, 0};
    queue.ask(warp, lane);
    auto take = [&] {  // returns a segment, or null after the last one
        const int position = queue.take(warp, lane);
        if (position >= n_segments) return static_cast<const int64*>(nullptr);
        queue.ask(warp, lane);
        return segments + int64(3) * position;
    };
    // The bounds of the next segment are loaded while this one is summed, and its first entries while the sums are written.
    const int64* segment = take();
    if (segment == nullptr) return;
    int64 slot = segment[0];
    Stream stream{in, memory, team_entries(team), segment[1], int(segment[2] - segment[1]), warp, lane, {}};
    stream.open();
    while (true) {
        stream.fill();
        segment = take();
        const int64 begin = segment == nullptr ? 0 : segment[1];
        const int count = segment == nullptr ? 0 : int(segment[2] - begin);
        Holding mine;
        clear(mine);
        stream.run(mine);
        lane = fresh(lane);
        float* partial = partials + slot * PARTIAL;
        if (segment != nullptr) slot = segment[0];
        stream.begin = begin;
        stream.count = count;
        stream.open();
        with_role(warp, [&](auto role) {
            constexpr int ROLE = decltype(role)::value;
            for_tiles<ROLE>(mine.tiles, [&](Tile& tile, auto row, auto column) {
                constexpr int i = decltype(row)::value, j = decltype(column)::value;
                float* target = partial + (i * (i + 1) / 2 + j) * BLOCK * BLOCK + lane;
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (!SOLVED_BY_SUMS || is_stored(RANK, i, j, k, lane)) target[k * WARP] = tile.value[k / 4][k % 4];
            });
            for_rows<ROLE>([&](auto row) {
                constexpr int i = decltype(row)::value, place = row_slot(i);
#pragma unroll
                for (int half = 0; half < BLOCK_HALVES; half++) {
                    const float sum = quad_sum(mine.rhs[place][half]);
                    if (lane % 4 == 0) partial[TILE_COUNT * BLOCK * BLOCK + i * BLOCK + 8 * half + lane / 4] = sum;
                }
            });
        });
        if (segment == nullptr) break;
    }
}

#if !SOLVED_BY_SUMS
// Solves rows of several segments: system k is the sum of partials slots[k] ... slots[k + 1] - 1.
extern "C" __global__ void __launch_bounds__(TEAMS * TEAM, BLOCKS_PER_SM)
solve_partials(float* solutions, int* status, const float* partials, const int64* slots, const int* rows, const float* gram,
               const float* ridge, const float* scale, int* counter, int n_rows, float epsilon, int cg_steps) {
    __shared__ int position_shared;
    const int team = threadIdx.x / TEAM;
    const int warp = threadIdx.x % TEAM / WARP;
    int lane = lane_number();
    const TeamMemory memory = team_memory(team);
    Queue queue{counter, &position_shared, 0};
    queue.ask(warp, lane);
    while (true) {
        const int position = queue.take(warp, lane);
        if (position >= n_rows) break;
        queue.ask(warp, lane);
        lane = fresh(lane);
        const int row = rows[position];
        Holding mine;
        clear(mine);
#pragma unroll 1
        for (int64 k = slots[position]; k < slots[position + 1]; k++) {
            const float* partial = partials + k * PARTIAL;
            with_role(warp, [&](auto role) {
                constexpr int ROLE = decltype(role)::value;
                for_tiles<ROLE>(mine.tiles, [&](Tile& tile, auto block_row, auto column) {
                    constexpr int i = decltype(block_row)::value, j = decltype(column)::value;
                    const float* source = partial + (i * (i + 1) / 2 + j) * BLOCK * BLOCK + lane;
#pragma unroll
                    for (int q = 0; q < 8; q++) tile.value[q / 4][q % 4] += source[q * WARP];
                });
                for_rows<ROLE>([&](auto block_row) {
                    constexpr int i = decltype(block_row)::value, place = row_slot(i);
#pragma unroll
                    for (int half = 0; half < BLOCK_HALVES; half++)  // only one of the four threads whose values are summed later
                        if (lane % 4 == 0)
                            mine.rhs[place][half] += partial[TILE_COUNT * BLOCK * BLOCK + i * BLOCK + 8 * half + lane / 4];
                });
            });
        }
        finish(mine, solutions, status, row, memory, gram, ridge, scale[row], epsilon, cg_steps, warp, lane, [] {});
        team_sync();
    }
}
#endif
