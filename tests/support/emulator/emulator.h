// emulator.h - just enough CUDA to run the kernels of cuda/ on a CPU, for tests of their logic where there is no GPU.
// emulator.cpp runs the threads and is compiled once, with optimization; kernels are linked with it. They are compiled
// without, which takes longer than to run them: what they call often is declared here and defined there.
//
// Each thread of a block is a fiber with a stack of its own; a fiber runs until it waits for others (barriers, warp
// intrinsics), then the next one goes on, by a few instructions on x86-64 and by _setjmp and _longjmp elsewhere: switches
// took most of the time of a kernel with many barriers. Shared memory starts as NaN.
//
// Schedules: in order (seed 0), blocks run one after another, and threads by turns. With another seed, two blocks run at a
// time, any thread that can may go on wherever it meets others (barriers, warp intrinsics, atomics, asynchronous copies,
// fences), lanes of a warp are apart until something synchronizes them, warps stall, and copies and warpgroup products are
// late and copies out of order, as far as the hardware promises nothing else.
// Races: compiled with -fsanitize=thread (and EMULATOR_RACES), ThreadSanitizer reports conflicting accesses to shared and
// global memory that CUDA does not order. Barriers and __syncwarp order memory, mbarriers do from arrival to wait, and so do
// atomics between fences. Shuffles, votes and atomics alone do not.
// Not emulated: bank conflicts, the rounding of tensor cores, the proxies of memory.
#pragma once
#define HYBRIDMF_EMULATE 1

// Every program reads this header, and a precompiled one by its size: without <algorithm> and <functional>, and without the
// special functions of <cmath> (libstdc++'s, which are large), it is read in a third of the time.
#include <type_traits>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <array>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __host__
#ifdef EMULATOR_RACES  // ThreadSanitizer does not see stores of structs that a function returns, unless it is inlined
#define __forceinline__ inline __attribute__((always_inline))
#else
#define __forceinline__ inline
#endif
#define __noinline__
#define __restrict__ __restrict
// __shared__: support/emulated.py writes shared_variable in its place
#define __constant__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) double2 { double x, y; };
__forceinline__ float2 make_float2(float x, float y) { return {x, y}; }
__forceinline__ float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
__forceinline__ int2 make_int2(int x, int y) { return {x, y}; }
__forceinline__ double2 make_double2(double x, double y) { return {x, y}; }

using std::max;
using std::min;

namespace emulator {

extern int linear;  // of the thread that runs, in its block
extern dim3 thread_index, block_index, block_size, grid_size;
extern void* dynamic;

void yield();         // other threads may go on
void maybe_switch();  // the same at places where the schedule in order goes on

// A barrier of `expected` threads, or of all that have not ended (0).
void barrier(int id, int expected);

// A named barrier, for whole warps: bar.sync if it waits, otherwise bar.arrive. A generation ends with the arrival of the
// last of `expected` threads, whichever warps they are in, and the barrier starts anew.
void arrive(int id, int expected, bool waits);

// An mbarrier in shared memory, with one bit of its phase: a wait for a parity ends when the phase before has that parity.
struct alignas(8) MBarrier {
    short expected, pending;
    unsigned phase;

    void make(int arrivals);
    void arrive();
    bool test(int parity);
    void wait(int parity);
    void* edge(unsigned of) { return reinterpret_cast<char*>(this) + of % 2; }
};

// Every lane of `mask` gives `size` bytes. Returns the values of all 32 lanes, zeros for those not in `mask`, which stay
// until the lane's next exchange. The lane that comes last may combine the values. Memory is `ordered` by __syncwarp alone.
const void* exchange(unsigned mask, const void* value, size_t size, void (*combine)(void* values) = nullptr,
                     bool ordered = false);

template <class T> const T* exchange(unsigned mask, const T& value) {
    static_assert(sizeof(T) <= 64);
    return static_cast<const T*>(exchange(mask, &value, sizeof(T)));
}

// Calls `body(values)` in every thread. Returns what went wrong, or null.
const char* run(const unsigned* grid, const unsigned* block, size_t shared_bytes, void (*body)(void**), void** values);

template <auto kernel, class... Arguments, size_t... I>
void call(void (*)(Arguments...), void** values, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<Arguments>*>(values[I])...);
}

template <class... Arguments> constexpr auto places(void (*)(Arguments...)) { return std::index_sequence_for<Arguments...>{}; }
template <auto kernel> void thread(void** values) { call<kernel>(kernel, values, places(kernel)); }

// How many arguments a kernel has, then the bytes of each.
template <class... Arguments> constexpr std::array<int, sizeof...(Arguments) + 1> sizes_of(void (*)(Arguments...)) {
    return {int(sizeof...(Arguments)), int(sizeof(Arguments))...};
}

void copy_16(void* target, const void* source, bool valid);
void copy_commit();
void copy_wait(int pending);

// What is done later.
struct Deferred {
    virtual void run() = 0;
    virtual ~Deferred() = default;
};

template <class Body> struct DeferredBody : Deferred {
    Body body;
    explicit DeferredBody(Body&& given) : body(std::move(given)) {}
    void run() override { body(); }
};

// A warpgroup product, which reads its operands between its start and the wait for its group. All lanes of the warp call it.
void begin_product(Deferred* multiply);
template <class Body> void product(Body multiply) { begin_product(new DeferredBody<Body>(std::move(multiply))); }
void products_commit();
void products_wait(int pending);

void before_atomic(void* place);
void after_atomic(void* place);
void fence();

// A variable of static shared memory, of the block that runs.
void* shared_variable(int id, size_t bytes);
template <class T> T& shared_variable(int id) { return *static_cast<T*>(shared_variable(id, sizeof(T))); }

int any_thread(int value);

template <class T, class Change> T atomically(T* place, Change&& change) {
    before_atomic(place);
    T old, changed;
    __atomic_load(place, &old, __ATOMIC_RELAXED);
    do changed = change(old);
    while (!__atomic_compare_exchange(place, &old, &changed, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    after_atomic(place);
    return old;
}

}  // namespace emulator

#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

template <class T> T* shared_memory() { return static_cast<T*>(emulator::dynamic); }

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
inline void __threadfence() { emulator::fence(); }
inline void __threadfence_block() { emulator::fence(); }
int __syncthreads_or(int value);

template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const int base = emulator::linear % 32 / width * width;
    return emulator::exchange(mask, value)[base + lane % width];
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int distance, int = 32) {
    return emulator::exchange(mask, value)[emulator::linear % 32 ^ distance];
}
template <class T> T __shfl_down_sync(unsigned mask, T value, int distance, int width = 32) {
    const int lane = emulator::linear % 32;
    const auto all = emulator::exchange(mask, value);
    return lane % width + distance < width ? all[lane + distance] : value;
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32) {
    const int lane = emulator::linear % 32;
    const auto all = emulator::exchange(mask, value);
    return lane % width >= distance ? all[lane - distance] : value;
}
template <class T> unsigned __match_any_sync(unsigned mask, T value) {
    const auto all = emulator::exchange(mask, value);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++)
        if ((mask >> lane & 1) && all[lane] == value) bits |= 1u << lane;
    return bits;
}
unsigned __ballot_sync(unsigned mask, int predicate);
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value ? __builtin_clz(value) : 32; }
inline unsigned __brev(unsigned v) { unsigned r = 0; for (int k = 0; k < 32; k++) r |= (v >> k & 1) << (31 - k); return r; }

// What emulator.cpp has of the templates above.
#define EMULATOR_SHUFFLES(EXTERN, T)                           \
    EXTERN template T __shfl_sync(unsigned, T, int, int);      \
    EXTERN template T __shfl_xor_sync(unsigned, T, int, int);  \
    EXTERN template T __shfl_down_sync(unsigned, T, int, int); \
    EXTERN template T __shfl_up_sync(unsigned, T, int, int);
#define EMULATOR_INSTANCES(EXTERN)        \
    EMULATOR_SHUFFLES(EXTERN, bool)       \
    EMULATOR_SHUFFLES(EXTERN, int)        \
    EMULATOR_SHUFFLES(EXTERN, unsigned)   \
    EMULATOR_SHUFFLES(EXTERN, long long)  \
    EMULATOR_SHUFFLES(EXTERN, float)      \
    EMULATOR_SHUFFLES(EXTERN, double)
EMULATOR_INSTANCES(extern)

template <class T> T __ldg(const T* pointer) { return *pointer; }
template <class T> T __ldcs(const T* pointer) { return *pointer; }
template <class T> T __ldcg(const T* pointer) { return *pointer; }
template <class T> void __stcs(T* pointer, T value) { *pointer = value; }
template <class T, class U> T atomicAdd(T* p, U value) { return emulator::atomically(p, [&](T old) { return T(old + T(value)); }); }
template <class T, class U> T atomicMax(T* p, U value) { return emulator::atomically(p, [&](T old) { return std::max(old, T(value)); }); }
template <class T, class U> T atomicMin(T* p, U value) { return emulator::atomically(p, [&](T old) { return std::min(old, T(value)); }); }
template <class T, class U> T atomicOr(T* p, U value) { return emulator::atomically(p, [&](T old) { return T(old | T(value)); }); }
template <class T, class U> T atomicExch(T* p, U value) { return emulator::atomically(p, [&](T) { return T(value); }); }
template <class T, class U, class V> T atomicCAS(T* p, U expected, V value) {
    return emulator::atomically(p, [&](T old) { return old == T(expected) ? T(value) : old; });
}

inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline long long __double_as_longlong(double value) { long long bits; std::memcpy(&bits, &value, 8); return bits; }
inline int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline void __nanosleep(unsigned) {}
using std::isfinite;
using std::isnan;

// ---------------------------------------------------------------------------------------------- tensor cores
namespace emulator {

unsigned to_bf16(float value);
unsigned to_float16(float value);
float from_float16(unsigned bits);
float from_16bit(unsigned bits, bool bf16);

// Of two pairs; the sum is rounded to float before it is rounded to float16.
unsigned fma_float16(unsigned a, unsigned b, unsigned c);

void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <bool BF16> void mma_16bit(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void mma_8bit(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

}  // namespace emulator

