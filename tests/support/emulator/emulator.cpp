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

// ---------------------------------------------------------------------------------------------- stacks

#if defined(__x86_64__) && defined(__ELF__)
#define OWN_SWITCH 1

// Saves the caller's registers on its stack and the stack pointer in `left`, and returns on the stack `entered`.
extern "C" void emulator_switch(void*** left, void** entered);
asm(R"(
    .text
    .type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size emulator_switch, . - emulator_switch
)");

#endif

namespace {

constexpr size_t STACK = 256 * 1024;

void enter();  // where a fiber starts

#if OWN_SWITCH

// Where a suspended fiber goes on.
struct Place {
    void** top = nullptr;  // of the stack, on which the registers are
};

void switch_to(Place& left, Place& entered) { emulator_switch(&left.top, entered.top); }

// As if `enter` had been called there: the stack pointer is 8 below a multiple of 16.
void prepare(Place& place, char* stack) {
    place.top = reinterpret_cast<void**>(stack + STACK) - 8;
    std::fill(place.top, place.top + 8, nullptr);
    place.top[6] = reinterpret_cast<void*>(enter);
}

#else

struct Place {
    jmp_buf registers;
    char* stack = nullptr;  // until it is entered
};

// What swapcontext does, which calls the system for the signal mask each time.
void switch_to(Place& left, Place& entered) {
    if (_setjmp(left.registers)) return;
    if (!entered.stack) _longjmp(entered.registers, 1);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = entered.stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    entered.stack = nullptr;
    makecontext(&context, enter, 0);
    setcontext(&context);
}

void prepare(Place& place, char* stack) { place.stack = stack; }

#endif

// ---------------------------------------------------------------------------------------------- fibers

struct Group {  // lanes of a warp that exchange values
    unsigned arrived = 0;
    unsigned generation = 0;
};

using Slots = unsigned char[2][32 * 64];  // the values of the lanes, one after another

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
};

struct Fiber {
    Place place;
    std::unique_ptr<char[]> stack;
    dim3 thread;
    int linear = 0;
    bool done = false;
};

Place caller;  // of `run`
std::vector<Fiber> fibers;
Fiber* current = nullptr;
Fiber* last = nullptr;  // of this block
int alive = 0;
std::vector<Group> groups;
std::unique_ptr<Slots[]> slots(new Slots[1024]);  // one for each group
Barrier barriers[16];
void (*body)(void**) = nullptr;
void** values = nullptr;

void go_on(Place& left, Fiber& fiber) {
    current = &fiber;
    linear = fiber.linear;
    thread_index = fiber.thread;
    switch_to(left, fiber.place);
}

void enter() {
    for (;;) {  // a round for each block
        body(values);
        current->done = true;
        alive--;
        if (alive > 0) yield();
        else switch_to(current->place, caller);
    }
}

void run_block(size_t shared_bytes, void* shared) {
    const int threads = block_size.x * block_size.y * block_size.z;
    std::memset(shared, 0xff, shared_bytes);
    dynamic = shared;
    for (int t = fibers.size(); t < threads; t++) {
        Fiber fiber;
        // stacks of the same alignment would take the same lines of the cache from each other
        fiber.stack.reset(new char[STACK + t % 16 * 256]);
        prepare(fiber.place, reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(fiber.stack.get() + t % 16 * 256) / 16 * 16));
        fibers.push_back(std::move(fiber));
    }
    last = &fibers[threads - 1];
    groups.assign((threads + 31) / 32 * 32, Group{});
    for (Barrier& b : barriers) b = Barrier{};
    alive = threads;
    for (int t = 0; t < threads; t++) {
        Fiber& fiber = fibers[t];
        fiber.linear = t;
        fiber.done = false;
        fiber.thread = {t % block_size.x, t / block_size.x % block_size.y, t / (block_size.x * block_size.y)};
    }
    go_on(caller, fibers[0]);
}

}  // namespace

// The threads go on in the order of their numbers.
void yield() {
    Fiber* next = current;
    do next = next == last ? fibers.data() : next + 1;
    while (next->done);
    if (next != current) go_on(current->place, *next);
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

const void* exchange(unsigned mask, const void* value, size_t size, void (*combine)(void*)) {
    const int lane = linear % 32;
    if (!(mask >> lane & 1)) { std::fprintf(stderr, "emulator: lane %d is not in mask %08x\n", lane, mask); std::abort(); }
    const int number = linear / 32 * 32 + __builtin_ctz(mask);
    Group& g = groups[number];
    const unsigned generation = g.generation;
    unsigned char* values = slots[number][generation & 1];
    std::memcpy(values + lane * size, value, size);
    g.arrived |= 1u << lane;
    if (g.arrived == mask) {
        for (unsigned others = ~mask; others; others &= others - 1)
            std::memset(values + __builtin_ctz(others) * size, 0, size);
        if (combine) combine(values);
        g.arrived = 0;
        g.generation++;
    }
    for (long spins = 0; g.generation == generation; spins++) {
        yield();
        if (spins == 50000000L) { std::fprintf(stderr, "emulator: deadlock in a warp\n"); std::abort(); }
    }
    return values;
}

void copy_16(void* target, const void* source, bool valid) {
    if (reinterpret_cast<uintptr_t>(target) % 16 || (valid && reinterpret_cast<uintptr_t>(source) % 16)) {
        std::fprintf(stderr, "emulator: misaligned 16-byte copy\n");
        std::abort();
    }
    if (valid) std::memcpy(target, source, 16);
    else std::memset(target, 0, 16);
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

// ---------------------------------------------------------------------------------------------- tensor cores

unsigned to_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

float from_16bit(unsigned bits, bool bf16) { return bf16 ? __uint_as_float(bits << 16) : from_float16(bits); }

float from_float16(unsigned bits) {
    const unsigned magnitude = bits & 0x7fffu;
    const float finite = __uint_as_float(magnitude << 13) * 0x1p112f;
    const float value = magnitude < 0x7c00u ? finite : __uint_as_float(0x7f800000u | magnitude << 13);
    return __uint_as_float(__float_as_uint(value) | (bits & 0x8000u) << 16);
}

unsigned to_float16(float value) {
    const _Float16 half = _Float16(value);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

unsigned fma_float16(unsigned a, unsigned b, unsigned c) {
    const auto one = [](unsigned x, unsigned y, unsigned z) {
        return to_float16(from_float16(x & 0xffffu) * from_float16(y & 0xffffu) + from_float16(z & 0xffffu));
    };
    return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}

namespace {

struct Product {  // a lane's part of one
    unsigned a[4], b[2];
    double sums[4];
};

enum Type { TF32, BF16, FLOAT16, INT8 };

// Of the value number `k` in a register.
template <Type TYPE> double operand(unsigned bits, int k) {
    if (TYPE == TF32) return __uint_as_float(bits & 0xffffe000u);
    if (TYPE == INT8) return static_cast<signed char>(bits >> 8 * (k % 4));
    bits = bits >> 16 * (k % 2) & 0xffffu;
    return TYPE == BF16 ? __uint_as_float(bits << 16) : from_float16(bits);
}

// All of a warp's product A (16 x DEPTH) B (DEPTH x 8), by the lane that comes last.
template <Type TYPE> void multiply(void* slots) {
    constexpr int WIDTH = TYPE == TF32 ? 1 : TYPE == INT8 ? 4 : 2, DEPTH = 8 * WIDTH;  // values in a register
    Product* lanes = static_cast<Product*>(slots);
    double B[DEPTH][8];
    for (int k = 0; k < DEPTH; k++)
        for (int column = 0; column < 8; column++)
            B[k][column] = operand<TYPE>(lanes[column * 4 + k / WIDTH % 4].b[k / (DEPTH / 2)], k);
    for (int row = 0; row < 16; row++) {
        double sums[8] = {};
        for (int k = 0; k < DEPTH; k++) {
            const double a = operand<TYPE>(lanes[row % 8 * 4 + k / WIDTH % 4].a[row / 8 + 2 * (k / (DEPTH / 2))], k);
            for (int column = 0; column < 8; column++) sums[column] += a * B[k][column];
        }
        for (int column = 0; column < 8; column++)
            lanes[row % 8 * 4 + column / 2].sums[row / 8 * 2 + column % 2] = sums[column];
    }
}

template <Type TYPE, class Sum> void mma(Sum (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const Product mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {}};
    const void* all = exchange(0xffffffffu, &mine, sizeof(mine), multiply<TYPE>);
    const double* sums = static_cast<const Product*>(all)[linear % 32].sums;
    for (int q = 0; q < 4; q++) d[q] = Sum(d[q] + sums[q]);
}

}  // namespace

void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma<TF32>(d, a, b0, b1); }

template <bool BF16> void mma_16bit(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma<BF16 ? Type::BF16 : FLOAT16>(d, a, b0, b1);
}

template void mma_16bit<true>(float (&)[4], const unsigned (&)[4], unsigned, unsigned);
template void mma_16bit<false>(float (&)[4], const unsigned (&)[4], unsigned, unsigned);

void mma_8bit(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma<INT8>(d, a, b0, b1); }

}  // namespace emulator

// ---------------------------------------------------------------------------------------------- warp intrinsics

EMULATOR_INSTANCES()

void __syncthreads() { emulator::barrier(0, 0); }
void __syncwarp(unsigned mask) { emulator::exchange<int>(mask, 0); }

int __syncthreads_or(int value) {
    static int result;
    emulator::barrier(0, 0);
    result = 0;
    emulator::barrier(0, 0);
    result |= value;
    emulator::barrier(0, 0);
    return result;
}

unsigned __ballot_sync(unsigned mask, int predicate) {
    const auto all = emulator::exchange(mask, predicate);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++)
        if ((mask >> lane & 1) && all[lane]) bits |= 1u << lane;
    return bits;
}
