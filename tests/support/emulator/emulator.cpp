// emulator.cpp - the threads of a block, run by turns on one thread of the CPU; emulator.h says what is emulated.
#undef _FORTIFY_SOURCE  // its longjmp takes another stack for a broken one

#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <vector>

namespace emulator {

int linear = 0;
dim3 thread_index, block_index, block_size, grid_size;
void* dynamic = nullptr;

namespace {

constexpr size_t STACK = 256 * 1024;

struct Group {  // lanes of a warp that exchange values
    int arrived = 0;
    unsigned generation = 0;
};

using Slots = unsigned char[2][32 * 64];  // the values of the lanes, one after another

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
};

struct Fiber {
    jmp_buf place;                  // where it goes on
    std::unique_ptr<char[]> stack;  // once it has begun
    dim3 thread;
    int linear = 0;
    bool done = false;
};

jmp_buf scheduler;
std::vector<Fiber> fibers;
Fiber* current = nullptr;
int alive = 0;
std::vector<Group> groups;
std::unique_ptr<Slots[]> slots(new Slots[1024]);  // one for each group
Barrier barriers[16];
void (*body)(void**) = nullptr;
void** values = nullptr;

void entry() {
    for (;;) {  // a round for each block
        body(values);
        current->done = true;
        alive--;
        yield();
    }
}

// Runs a fiber until it yields.
void resume(Fiber& fiber) {
    current = &fiber;
    linear = fiber.linear;
    thread_index = fiber.thread;
    if (_setjmp(scheduler)) return;
    if (fiber.stack) _longjmp(fiber.place, 1);
    fiber.stack.reset(new char[STACK]);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
    setcontext(&context);
}

void run_block(size_t shared_bytes, void* shared) {
    const int threads = block_size.x * block_size.y * block_size.z;
    std::memset(shared, 0xff, shared_bytes);
    dynamic = shared;
    if (fibers.size() < size_t(threads)) fibers.resize(threads);
    groups.assign(ceil(threads / 32.0) * 32, Group{});
    for (Barrier& b : barriers) b = Barrier{};
    alive = threads;
    for (int t = 0; t < threads; t++) {
        Fiber& fiber = fibers[t];
        fiber.linear = t;
        fiber.done = false;
        fiber.thread = {t % block_size.x, t / block_size.x % block_size.y, t / (block_size.x * block_size.y)};
    }
    while (alive > 0)
        for (int t = 0; t < threads; t++)
            if (!fibers[t].done) resume(fibers[t]);
}

}  // namespace

void yield() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

void barrier(int id, int expected) {
    Barrier& b = barriers[id];
    const unsigned generation = b.generation;
    b.arrived++;
    long spins = 0;
    while (b.generation == generation) {
        if (b.arrived >= (expected ? expected : alive)) {
            b.arrived = 0;
            b.generation++;
            break;
        }
        yield();
        if (++spins > 50000000L) { std::fprintf(stderr, "emulator: deadlock at barrier %d\n", id); std::abort(); }
    }
}

void exchange(unsigned mask, const void* value, size_t size, void* all) {
    const int lane = linear % 32;
    if (!(mask >> lane & 1)) { std::fprintf(stderr, "emulator: lane %d is not in mask %08x\n", lane, mask); std::abort(); }
    const int number = linear / 32 * 32 + __builtin_ctz(mask);
    Group& g = groups[number];
    const unsigned generation = g.generation;
    unsigned char* values = slots[number][generation & 1];
    std::memcpy(values + lane * size, value, size);
    g.arrived++;
    long spins = 0;
    while (g.generation == generation) {
        if (g.arrived == __builtin_popcount(mask)) {
            g.arrived = 0;
            g.generation++;
            break;
        }
        yield();
        if (++spins > 50000000L) { std::fprintf(stderr, "emulator: deadlock in a warp\n"); std::abort(); }
    }
    std::memcpy(all, values, 32 * size);
    for (unsigned others = ~mask; others; others &= others - 1)
        std::memset(static_cast<char*>(all) + __builtin_ctz(others) * size, 0, size);
}

void run(const unsigned* grid, const unsigned* block, size_t shared_bytes, void (*body_)(void**), void** values_) {
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    body = body_;
    values = values_;
    std::vector<char> memory(shared_bytes + 256);
    void* shared = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 127) / 128 * 128);
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                block_index = {x, y, z};
                run_block(shared_bytes, shared);
            }
}

struct Operands { unsigned a[4], b[2]; };

void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const auto all = exchange(0xffffffffu, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = linear % 32;
    auto cut = [](unsigned bits) { return double(__uint_as_float(bits & 0xffffe000u)); };
    for (int q = 0; q < 4; q++) {
        const int row = lane / 4 + 8 * (q / 2), column = 2 * (lane % 4) + q % 2;
        double sum = 0;
        for (int k = 0; k < 8; k++)
            sum += cut(all[row % 8 * 4 + k % 4].a[row / 8 + 2 * (k / 4)]) * cut(all[column * 4 + k % 4].b[k / 4]);
        d[q] = float(d[q] + sum);
    }
}

// The value of each float16: a conversion is a call where the compiler may not assume that the processor has it.
const struct Halves {
    float values[1 << 16];
    Halves() {
        for (unsigned bits = 0; bits < 1 << 16; bits++) values[bits] = from_16bit(bits, false);
    }
} halves;

template <bool BF16> void mma_16bit(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const auto all = exchange(0xffffffffu, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = linear % 32;
    auto half = [](unsigned bits, int k) {
        bits = bits >> 16 * (k % 2) & 0xffffu;
        return double(BF16 ? __uint_as_float(bits << 16) : halves.values[bits]);
    };
    for (int q = 0; q < 4; q++) {
        const int row = lane / 4 + 8 * (q / 2), column = 2 * (lane % 4) + q % 2;
        double sum = 0;
        for (int k = 0; k < 16; k++)
            sum += half(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)], k) *
                   half(all[column * 4 + k % 8 / 2].b[k / 8], k);
        d[q] = float(d[q] + sum);
    }
}

template void mma_16bit<true>(float (&)[4], const unsigned (&)[4], unsigned, unsigned);
template void mma_16bit<false>(float (&)[4], const unsigned (&)[4], unsigned, unsigned);

void mma_8bit(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const auto all = exchange(0xffffffffu, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = linear % 32;
    const auto byte = [](unsigned bits, int k) { return int(static_cast<signed char>(bits >> 8 * (k % 4))); };
    for (int q = 0; q < 4; q++) {
        const int row = lane / 4 + 8 * (q / 2), column = 2 * (lane % 4) + q % 2;
        for (int k = 0; k < 32; k++)
            d[q] += byte(all[row % 8 * 4 + k % 16 / 4].a[row / 8 + 2 * (k / 16)], k) *
                    byte(all[column * 4 + k % 16 / 4].b[k / 16], k);
    }
}

}  // namespace emulator
