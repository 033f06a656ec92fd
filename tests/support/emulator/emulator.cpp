// emulator.cpp - runs the threads of blocks by turns on one thread of the CPU; emulator.h describes what is emulated.
#undef _FORTIFY_SOURCE  // its longjmp mistakes another stack for a broken one

#include "emulator.h"

#include <setjmp.h>
#include <stdarg.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#ifdef EMULATOR_RACES
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long size);
void __tsan_write_range(void* address, unsigned long size);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace emulator {

int linear = 0;
bool in_order = true;
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

// ---------------------------------------------------------------------------------------------- happens-before

// With EMULATOR_RACES, ThreadSanitizer sees each thread of a block as a thread. This file is compiled without its instrumentation:
// the edges between threads are those given here, and no others. A switch is not an edge.
#ifdef EMULATOR_RACES
constexpr bool RACES = true;
void* create_fiber() { return __tsan_create_fiber(0); }
void enter_fiber(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }
void* this_fiber() { return __tsan_get_current_fiber(); }
void release(void* place) { __tsan_release(place); }
void acquire(void* place) { __tsan_acquire(place); }
void note_copy(void* target, const void* source, bool valid, unsigned long size) {
    if (valid) __tsan_read_range(const_cast<void*>(source), size);
    __tsan_write_range(target, size);
}
// ThreadSanitizer's memmove and free would take the emulator's own lists for data of the threads.
struct Unseen {
    Unseen() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Unseen() {
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    }
};
#else
constexpr bool RACES = false;
void* create_fiber() { return nullptr; }
void enter_fiber(void*) {}
void* this_fiber() { return nullptr; }
void release(void*) {}
void acquire(void*) {}
void note_copy(void*, const void*, bool, unsigned long) {}
struct Unseen {
    Unseen() {}
};
#endif

// ThreadSanitizer would see memcpy as an access of the thread.
void copy_bytes(unsigned char* target, const unsigned char* source, size_t size) {
    if (!RACES) {
        std::memcpy(target, source, size);
        return;
    }
    for (size_t k = 0; k < size; k++) {
        target[k] = source[k];
        asm volatile("" ::: "memory");
    }
}

// ---------------------------------------------------------------------------------------------- blocks

struct Fiber;

struct Waiting {  // threads, in the order of their arrival
    std::vector<Fiber*> threads;
};

struct Edges {  // addresses by which ThreadSanitizer knows the even and the odd generations of a barrier
    char even, odd;
    void* of(unsigned generation) { return generation % 2 ? &odd : &even; }
};

struct Group {  // lanes of a warp that exchange values
    unsigned arrived = 0;
    unsigned generation = 0;
    Waiting waiting;
    Edges edges;
};

using Slots = unsigned char[2][32 * 64];  // the values of the lanes, one after another

struct Barrier {
    int arrived = 0, expected = 0;
    unsigned generation = 0;
    Waiting waiting;
    Edges edges;
};

struct Variable {  // of static shared memory
    int id;
    size_t offset;
};

constexpr size_t STATIC_BYTES = 48 * 1024;

struct Block {
    dim3 index;
    std::vector<std::unique_ptr<Fiber>> fibers;  // at least as many as threads
    int threads = 0, alive = 0;                  // threads that have not ended
    Barrier barriers[16];
    std::vector<Group> groups;
    std::unique_ptr<Slots[]> slots{new Slots[1024]};  // one for each group
    Waiting at_phases;                                // threads that wait for an MBarrier
    std::vector<std::unique_ptr<char[]>> memories;    // static and dynamic shared memory; the last one is the block's
    char *fixed = nullptr, *dynamic = nullptr;
    std::vector<Variable> variables;
    size_t used = 0;  // bytes of static shared memory
    int result = 0;   // of __syncthreads_or
    char started;     // an address
};

struct Fiber {
    Place place;
    std::unique_ptr<char[]> stack;
    dim3 thread;
    int linear = 0;
    bool done = false;
    Block* block = nullptr;
    unsigned groups = 0;          // of copies, that are complete
    unsigned products = 0;        // groups of products
    bool fenced = false;          // since the launch
    std::vector<void*> observed;  // places of atomics since the last fence
    std::vector<std::pair<unsigned, std::function<void()>>> pending;  // products, by group
    void *known = nullptr, *copier = nullptr;                         // to ThreadSanitizer; `copier` makes the copies
    char issued, arrived;                                             // addresses
    long stalled = 0;                                                 // until this switch
};

struct Copy {
    void* target;
    const void* source;
    bool valid;
    unsigned group;
    Fiber* owner;
};

Place caller;  // of `run`
void* caller_known = nullptr;
std::vector<std::unique_ptr<Block>> blocks;
Fiber* current = nullptr;
Block* running = nullptr;  // the block of `current`
void (*body)(void**) = nullptr;
void** values = nullptr;
char failure[256];
char launch_end;              // an address
std::vector<Copy> in_flight;  // asynchronous copies

// ---------------------------------------------------------------------------------------------- schedule

// In order: the thread that has waited longest goes on, and copies are made at once. With a seed: any thread that can, after a
// stay of random length; now and then a warp stalls; copies arrive in any order, at the latest when they are waited for.
constexpr int RESIDENT = 2;         // blocks at a time, with a seed
constexpr long PATIENCE = 20000000; // switches without progress

unsigned long long state = 0;  // of the random numbers
long switches = 0, progress = 0, stalled_until = 0;
unsigned stay = 1, stall = 64;  // one in so many switches is taken, and stalls a warp
std::vector<Fiber*> ready;      // a queue in order, a set otherwise
size_t first_ready = 0;

unsigned draw(unsigned n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return unsigned((state >> 11) % n);
}

[[noreturn]] void fail(const char* text, ...) {
    va_list arguments;
    va_start(arguments, text);
    std::vsnprintf(failure, sizeof(failure), text, arguments);
    va_end(arguments);
    if (caller_known) enter_fiber(caller_known);
    Place abandoned;
    switch_to(abandoned, caller);
    __builtin_unreachable();
}

void make_ready(Fiber* fiber) {
    Unseen lists;
    ready.push_back(fiber);
}

void wake(Waiting& waiting) {
    Unseen lists;
    for (Fiber* fiber : waiting.threads) make_ready(fiber);
    waiting.threads.clear();
    progress = switches;
}

Fiber* take_ready() {
    Unseen lists;
    if (in_order) {
        Fiber* fiber = ready[first_ready++];
        if (first_ready == ready.size()) {
            ready.clear();
            first_ready = 0;
        } else if (first_ready > 4096) {
            ready.erase(ready.begin(), ready.begin() + first_ready);
            first_ready = 0;
        }
        return fiber;
    }
    size_t chosen = draw(ready.size());
    for (int attempt = 0; attempt < 64 && ready[chosen]->stalled > switches; attempt++) chosen = draw(ready.size());
    Fiber* fiber = ready[chosen];
    ready[chosen] = ready.back();
    ready.pop_back();
    return fiber;
}

bool none_ready() { return first_ready == ready.size(); }

void go_on(Place& left, Fiber& fiber) {
    current = &fiber;
    linear = fiber.linear;
    thread_index = fiber.thread;
    if (fiber.block != running) {
        running = fiber.block;
        block_index = running->index;
        dynamic = running->dynamic;
    }
    enter_fiber(fiber.known);
    switch_to(left, fiber.place);
}

void arrive_copy(size_t k);

// Leaves the thread that runs, which is in `ready` or waits, for another one.
void leave() {
    if (none_ready()) fail("deadlock: all threads of block %u wait", current->block->index.x);
    if (++switches - progress > PATIENCE) fail("deadlock: thread %d of block %u waits", current->linear, current->block->index.x);
    if (!in_order) {
        if (!in_flight.empty() && draw(8) == 0) arrive_copy(draw(in_flight.size()));
        if (switches > stalled_until && draw(stall) == 0) {  // any warp of this block, for up to a million switches
            stalled_until = switches + (1L << (6 + draw(15)));
            Block& block = *current->block;
            const int begin = draw((block.threads + 31) / 32) * 32;
            for (int k = begin; k < std::min(begin + 32, block.threads); k++) block.fibers[k]->stalled = stalled_until;
        }
    }
    Fiber* left = current;
    Fiber* next = take_ready();
    if (next != left) go_on(left->place, *next);
}

void wait_in(Waiting& waiting) {
    {
        Unseen lists;
        waiting.threads.push_back(current);
    }
    leave();
}

// ---------------------------------------------------------------------------------------------- asynchronous copies

void arrive_copy(size_t k) {
    const Copy copy = in_flight[k];
    in_flight[k] = in_flight.back();
    in_flight.pop_back();
    progress = switches;
    Fiber& owner = *copy.owner;
    if (RACES) {
        void* left = this_fiber();
        if (!owner.copier) owner.copier = create_fiber();
        enter_fiber(owner.copier);
        acquire(&owner.issued);
        note_copy(copy.target, copy.source, copy.valid, 16);
        release(&owner.arrived);
        enter_fiber(left);
    }
    static const unsigned char zeros[16] = {};
    const void* source = copy.valid ? copy.source : zeros;
    copy_bytes(static_cast<unsigned char*>(copy.target), static_cast<const unsigned char*>(source), 16);
}

void wait_for_copies(unsigned groups) {  // of the thread that runs, from the first one on
    const auto waited_for = [&](const Copy& copy) { return copy.owner == current && copy.group < groups; };
    for (;;) {
        const size_t count = std::count_if(in_flight.begin(), in_flight.end(), waited_for);
        if (!count) break;
        size_t k = 0;
        for (size_t others = in_order ? 0 : draw(count);; k++)
            if (waited_for(in_flight[k]) && others-- == 0) break;
        arrive_copy(k);
    }
    acquire(&current->arrived);
}

void run_products(unsigned groups) {
    auto& pending = current->pending;
    size_t k = 0;
    for (; k < pending.size() && pending[k].first < groups; k++) {
        const auto product = pending[k].second;  // which may switch
        product();
    }
    Unseen lists;
    pending.erase(pending.begin(), pending.begin() + k);
}

// ---------------------------------------------------------------------------------------------- barriers

void complete(Barrier& b) {
    b.arrived = 0;
    b.generation++;
    wake(b.waiting);
}

void end_thread() {
    Block& block = *current->block;
    run_products(~0u);
    wait_for_copies(~0u);
    release(&launch_end);
    current->done = true;
    progress = switches;
    block.alive--;
    Barrier& all = block.barriers[0];
    if (block.alive > 0 && all.arrived >= block.alive) complete(all);  // ended threads count as arrived
    if (block.alive > 0) leave();
    else {
        Fiber* left = current;
        enter_fiber(caller_known);
        switch_to(left->place, caller);
    }
}

void enter() {
    for (;;) {  // a round for each block
        acquire(&current->block->started);
        body(values);
        end_thread();
    }
}

// ---------------------------------------------------------------------------------------------- launches

void make_memory(Block& block, size_t shared_bytes) {
    const size_t bytes = STATIC_BYTES + shared_bytes + 1024;
    // ThreadSanitizer would take the threads of different blocks for users of the same memory
    if (!RACES) block.memories.clear();
    block.memories.emplace_back(new char[bytes]);
    char* memory = block.memories.back().get();
    block.fixed = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + 127) / 128 * 128);
    block.dynamic = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block.fixed + STATIC_BYTES) + 1023) / 1024 * 1024);
    block.used = 0;
    block.variables.clear();
    for (size_t k = 0; k < shared_bytes; k++) block.dynamic[k] = char(0xff);
}

void start(Block& block, dim3 index, size_t shared_bytes) {
    const int threads = block_size.x * block_size.y * block_size.z;
    make_memory(block, shared_bytes);
    block.index = index;
    for (int t = block.fibers.size(); t < threads; t++) {
        auto fiber = std::make_unique<Fiber>();
        // stacks of the same alignment would take the same lines of the cache from each other
        fiber->stack.reset(new char[STACK + t % 16 * 256]);
        fiber->known = create_fiber();
        prepare(fiber->place, reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(fiber->stack.get() + t % 16 * 256) / 16 * 16));
        block.fibers.push_back(std::move(fiber));
    }
    block.groups.resize((threads + 31) / 32 * 32);
    for (Group& group : block.groups) group.arrived = 0;
    for (Barrier& b : block.barriers) b.arrived = b.expected = 0;
    block.threads = block.alive = threads;
    running = nullptr;
    release(&block.started);
    for (int t = 0; t < threads; t++) {
        Fiber& fiber = *block.fibers[t];
        fiber.linear = t;
        fiber.done = fiber.fenced = false;
        fiber.block = &block;
        fiber.groups = fiber.products = 0;
        fiber.stalled = 0;
        fiber.observed.clear();
        fiber.thread = {t % block_size.x, t / block_size.x % block_size.y, t / (block_size.x * block_size.y)};
        make_ready(&fiber);
    }
}

}  // namespace

// Other threads may go on.
void yield() {
    make_ready(current);
    leave();
}

void maybe_switch() {
    if (!in_order && draw(stay) == 0) yield();
}

void barrier(int id, int expected) {
    maybe_switch();
    Barrier& b = current->block->barriers[id];
    const unsigned generation = b.generation;
    release(b.edges.of(generation));
    b.arrived++;
    if (b.arrived >= (expected ? expected : current->block->alive)) complete(b);
    else
        while (b.generation == generation) wait_in(b.waiting);
    acquire(b.edges.of(generation));
    maybe_switch();
}

namespace {

struct Arrival {
    int id, expected;
    unsigned generation;
};

// A warp's arrival, by the lane that comes last.
void arrive_warp(void* values) {
    Arrival* lanes = static_cast<Arrival*>(values);
    Barrier& b = current->block->barriers[lanes[0].id];
    if (b.arrived && b.expected != lanes[0].expected)
        fail("barrier %d expects %d threads and %d", lanes[0].id, b.expected, lanes[0].expected);
    b.expected = lanes[0].expected;
    const unsigned generation = b.generation;
    for (int lane = 0; lane < 32; lane++) {
        if (lanes[lane].id != lanes[0].id) fail("lanes of a warp arrive at barriers %d and %d", lanes[0].id, lanes[lane].id);
        lanes[lane].generation = generation;
    }
    Group& group = current->block->groups[current->linear / 32 * 32];
    acquire(group.edges.of(group.generation));
    release(b.edges.of(generation));
    b.arrived += 32;
    if (b.arrived > b.expected) fail("barrier %d: %d threads arrive, %d are expected", lanes[0].id, b.arrived, b.expected);
    if (b.arrived == b.expected) complete(b);
}

}  // namespace

void arrive(int id, int expected, bool waits) {
    maybe_switch();
    Arrival mine{id, expected, 0};
    Group& group = current->block->groups[current->linear / 32 * 32];
    release(group.edges.of(group.generation));
    const void* all = exchange(0xffffffffu, &mine, sizeof(mine), arrive_warp);
    if (!waits) return;
    Barrier& b = current->block->barriers[id];
    const unsigned generation = static_cast<const Arrival*>(all)[linear % 32].generation;
    while (b.generation == generation) wait_in(b.waiting);
    acquire(b.edges.of(generation));
}

void MBarrier::make(int arrivals) {
    expected = pending = arrivals;
    phase = 0;
}

void MBarrier::arrive() {
    maybe_switch();
    release(edge(phase));
    if (--pending == 0) {
        pending = expected;
        phase++;
        wake(current->block->at_phases);
    }
    maybe_switch();
}

// As in hardware, which keeps one bit of the phase.
bool MBarrier::test(int parity) {
    maybe_switch();
    const bool complete = int(phase & 1) != parity;
    if (complete) acquire(edge(phase - 1));
    return complete;
}

void MBarrier::wait(int parity) {
    while (!test(parity)) wait_in(current->block->at_phases);
}

const void* exchange(unsigned mask, const void* value, size_t size, void (*combine)(void*), bool ordered) {
    maybe_switch();
    const int lane = linear % 32;
    if (!(mask >> lane & 1)) fail("lane %d is not in mask %08x", lane, mask);
    const int number = linear / 32 * 32 + __builtin_ctz(mask);
    Group& g = current->block->groups[number];
    const unsigned generation = g.generation;
    unsigned char* values = current->block->slots[number][generation & 1];
    copy_bytes(values + lane * size, static_cast<const unsigned char*>(value), size);
    if (g.arrived >> lane & 1) fail("lane %d comes twice", lane);
    g.arrived |= 1u << lane;
    if (ordered) release(g.edges.of(generation));
    if (g.arrived == mask) {
        for (unsigned others = ~mask; others; others &= others - 1)
            for (size_t k = 0; k < size; k++) values[__builtin_ctz(others) * size + k] = 0;
        if (combine) combine(values);
        g.arrived = 0;
        g.generation++;
        wake(g.waiting);
    } else {
        while (g.generation == generation) wait_in(g.waiting);
    }
    if (ordered) acquire(g.edges.of(generation));
    maybe_switch();
    return values;
}

void copy_16(void* target, const void* source, bool valid) {
    if (reinterpret_cast<uintptr_t>(target) % 16 || (valid && reinterpret_cast<uintptr_t>(source) % 16))
        fail("misaligned 16-byte copy");
    if (!in_order || RACES) {
        maybe_switch();
        release(&current->issued);
        {
            Unseen lists;
            in_flight.push_back({target, source, valid, current->groups, current});
        }
        if (!in_order && draw(4) == 0) arrive_copy(in_flight.size() - 1);
        return;
    }
    if (valid) std::memcpy(target, source, 16);
    else std::memset(target, 0, 16);
}

void copy_commit() { current->groups++; }

void copy_wait(int pending) {
    maybe_switch();
    if (!in_flight.empty() || RACES) wait_for_copies(std::max(0, int(current->groups) - pending));
}

void begin_product(Deferred* given) {
    const std::shared_ptr<Deferred> owned(given);
    std::function<void()> multiply = [owned] { owned->run(); };
    // all lanes of a warp decide alike; in the schedule in order, products are made at once
    const bool late = !in_order && (current->products * 2654435761u >> 7 & 3);
    if (late) {
        Unseen lists;
        current->pending.emplace_back(current->products, std::move(multiply));
    } else {
        run_products(~0u);  // products are made in their order
        multiply();
    }
}

void products_commit() { current->products++; }

void products_wait(int pending) { run_products(std::max(0, int(current->products) - pending)); }

// CUDA's atomics order nothing. A fence before one orders what the thread did before the fence before what other threads do
// after a fence that follows their atomic on the same place.
void before_atomic(void* place) {
    maybe_switch();
    if (current->fenced) release(place);
}

void after_atomic(void* place) {
    Unseen lists;
    if (RACES) current->observed.push_back(place);
}

void fence() {
    current->fenced = true;
    for (void* place : current->observed) acquire(place);
    current->observed.clear();
    maybe_switch();
}

void* shared_variable(int id, size_t bytes) {
    Block& block = *current->block;
    for (const Variable& variable : block.variables)
        if (variable.id == id) return block.fixed + variable.offset;
    const size_t offset = block.used;
    block.used += (bytes + 127) / 128 * 128;
    if (block.used > STATIC_BYTES) fail("%zu bytes of static shared memory", block.used);
    block.variables.push_back({id, offset});
    for (size_t k = 0; k < bytes; k++) block.fixed[offset + k] = char(0xff);
    return block.fixed + offset;
}

int any_thread(int value) {
    Block& block = *current->block;
    barrier(0, 0);
    block.result = 0;
    barrier(0, 0);
    block.result |= value;
    barrier(0, 0);
    return block.result;
}

void seed(unsigned long long number) {
    in_order = number == 0;
    state = number * 0x9e3779b97f4a7c15ull | 1;
    for (int k = 0; k < 8; k++) draw(2);
    stay = 1 + draw(4) * draw(8);
    stall = 16 << draw(8);
}

const char* run(const unsigned* grid, const unsigned* block, size_t shared_bytes, void (*body_)(void**), void** values_) {
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    body = body_;
    values = values_;
    ready.clear();
    in_flight.clear();
    first_ready = 0;
    switches = progress = stalled_until = 0;
    failure[0] = 0;
    caller_known = this_fiber();
    // with several, ThreadSanitizer does not take a thread for the one of the same number in the block before
    const size_t resident = in_order ? 1 : RESIDENT, places = RACES ? 3 : resident;
    while (blocks.size() < places) blocks.push_back(std::make_unique<Block>());
    const unsigned count = grid[0] * grid[1] * grid[2];
    unsigned next = 0, ended = 0;
    while (ended < count && !failure[0]) {
        while (next < count && next < ended + resident) {
            Block* chosen = nullptr;
            for (size_t k = 0; !chosen; k++)
                if (blocks[(next + k) % places]->alive == 0) chosen = blocks[(next + k) % places].get();
            start(*chosen, {next % grid[0], next / grid[0] % grid[1], next / (grid[0] * grid[1])}, shared_bytes);
            next++;
        }
        go_on(caller, *take_ready());
        ended++;
    }
    acquire(&launch_end);
    if (failure[0]) blocks.clear();  // their threads are amid the kernel
    for (auto& one : blocks)
        if (one->memories.size() > 1) one->memories.clear();
    return failure[0] ? failure : nullptr;
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

extern "C" void emulator_seed(unsigned long long number) { emulator::seed(number); }

void __syncthreads() { emulator::barrier(0, 0); }

void __syncwarp(unsigned mask) {
    const int nothing = 0;
    emulator::exchange(mask, &nothing, sizeof(nothing), nullptr, true);
}

int __syncthreads_or(int value) { return emulator::any_thread(value); }

unsigned __ballot_sync(unsigned mask, int predicate) {
    const auto all = emulator::exchange(mask, predicate);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++)
        if ((mask >> lane & 1) && all[lane]) bits |= 1u << lane;
    return bits;
}
