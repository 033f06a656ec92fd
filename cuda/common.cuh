// common.cuh - helpers shared by all kernels; hybridmf/gpu/launch.py splices this file in front of each .cu file.
// constants: REAL          float or double, the type of factors and arithmetic
//            IMPLICIT      1: confidences of implicit feedback, 0: explicit ratings
//            RESIDUAL      1: systems for changes of the solution; the offset of each entry is its prediction
//            HYBRIDMF_DELAYS  a seed: random delays around every synchronization, for tests
// Helpers: weights of entries, warp reductions, asynchronous copies, gates.
// HYBRIDMF_EMULATE is set where tests run this code on the CPU, in schedules of their own (tests/support/emulator).
#pragma once

#ifndef REAL
#define REAL float
#endif
#ifndef IMPLICIT
#define IMPLICIT 0
#endif
#ifndef RESIDUAL
#define RESIDUAL 0
#endif

// Functions with accesses that race by design. ThreadSanitizer, under which tests run the kernels on a CPU, leaves them out.
#ifdef HYBRIDMF_EMULATE
#define RACES_BY_DESIGN inline __attribute__((no_sanitize_thread))
#else
#define RACES_BY_DESIGN __forceinline__
#endif

using real = REAL;
using int64 = long long;

#ifdef __CUDA_ARCH__
#define HAS_ASYNC_COPY (__CUDA_ARCH__ >= 800)
#else
#define HAS_ASYNC_COPY 1
#endif

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

template <class T> __host__ __device__ constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T> __host__ __device__ constexpr T round_up(T a, T b) { return ceil_div(a, b) * b; }

// The least power of two that is at least n.
__host__ __device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// Calls body(Index<BEGIN>{}), ..., body(Index<END - 1>{}): the loop indices are constants, as register arrays require.
template <int VALUE> struct Index { static constexpr int value = VALUE; };

template <int BEGIN, int END, class Body> __device__ __forceinline__ void static_for(Body&& body) {
    if constexpr (BEGIN < END) {
        body(Index<BEGIN>{});
        static_for<BEGIN + 1, END>(body);
    }
}

// ---------------------------------------------------------------------------------------------- delays

#if defined(HYBRIDMF_DELAYS) && !defined(HYBRIDMF_EMULATE)

// Sleeps at one of 32 calls, for 16 ns to 8 us. With `lanes`, each lane decides for itself.
__device__ __forceinline__ void delay(bool lanes = false) {
    unsigned time;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(time)::"memory");
    unsigned mixed = (time ^ (lanes ? threadIdx.x : threadIdx.x / WARP) * 0x9e3779b9u) * 0x85ebca6bu + blockIdx.x + HYBRIDMF_DELAYS;
    mixed = (mixed ^ mixed >> 15) * 0x2c1b3c6du;
    mixed ^= mixed >> 13;
    if (mixed % 32 == 0) __nanosleep(16u << (mixed >> 8) % 10);
}

template <class T> __device__ __forceinline__ T after_delay(T value) {
    delay();
    return value;
}

#define __syncthreads() (delay(), __syncthreads(), delay())
#define __syncthreads_or(value) after_delay(__syncthreads_or(after_delay(value)))
#define __syncwarp(...) (delay(true), __syncwarp(__VA_ARGS__), delay())
#define atomicAdd(...) (delay(true), atomicAdd(__VA_ARGS__))
#define atomicMax(...) (delay(true), atomicMax(__VA_ARGS__))
#define atomicOr(...) (delay(true), atomicOr(__VA_ARGS__))

#else

__device__ __forceinline__ void delay() {}

#endif

// ---------------------------------------------------------------------------------------------- weights of entries

// Weight of y y^T in A_u beyond the Gram matrix, and of y in b_u, of one entry (`Objective` in Python).
struct EntryWeight {
    real outer;   // explicit: 1; implicit: c - unobserved_weight
    real linear;  // explicit: r - offset; implicit: c p, with RESIDUAL less outer times the offset
};

__device__ __forceinline__ EntryWeight entry_weight(real rating, real offset, real alpha, real unobserved_weight) {
    if (IMPLICIT) {
        const real confidence = real(1) + alpha * (rating < 0 ? -rating : rating), outer = confidence - unobserved_weight;
        const real target = rating > 0 ? confidence : real(0);
        return {outer, RESIDUAL ? target - outer * offset : target};
    }
    return {real(1), rating - offset};
}

// ---------------------------------------------------------------------------------------------- warps

template <class T> __device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}

__device__ __forceinline__ float warp_largest(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
}

// Returns the value, but hides its origin from the compiler: addresses derived from it are not hoisted out of a long loop, where
// they would occupy registers or be spilled.
__device__ __forceinline__ int fresh(int value) {
#ifndef HYBRIDMF_EMULATE
    asm volatile("" : "+r"(value));
#endif
    return value;
}

// Prefetches the 128-byte line at `address` into the L2 cache.
__device__ __forceinline__ void prefetch(const void* address) {
#ifndef HYBRIDMF_EMULATE
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// A copy that the compiler keeps in a separate register: it cannot derive that the lane's number is below 32.
__device__ __forceinline__ unsigned copy_of(unsigned value, int lane) { return value | unsigned(lane) >> 5; }

__device__ __forceinline__ int lane_number() {
#ifdef HYBRIDMF_EMULATE
    return threadIdx.x % WARP;
#else
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
#endif
}

// ---------------------------------------------------------------------------------------------- shared memory

#ifndef HYBRIDMF_EMULATE
extern __shared__ __align__(32) float4 dynamic_shared[];
template <class T> __device__ __forceinline__ T* shared_memory() { return reinterpret_cast<T*>(dynamic_shared); }
#endif

// ---------------------------------------------------------------------------------------------- loads

// Loads a value from global memory if `valid`, without a branch, into the register that holds it. For a condition in C++, the
// compiler loads into another register and copies it at once, and the copy waits for the load. Stays behind barriers of the warp.
template <class T> __device__ __forceinline__ void load_if(bool valid, T& value, const T* source) {
    static_assert(sizeof(T) == 4, "values have 32 bits");
#if defined(HYBRIDMF_EMULATE)
    if (valid) value = *source;
#else
    unsigned bits;
    memcpy(&bits, &value, 4);
    asm volatile("{ .reg .pred valid;\n setp.ne.b32 valid, %2, 0;\n @valid ld.global.b32 %0, [%1]; }"
                 : "+r"(bits)
                 : "l"(source), "r"(int(valid))
                 : "memory");
    memcpy(&value, &bits, 4);
#endif
}

// ---------------------------------------------------------------------------------------------- asynchronous copies

// Copies 16 bytes from global to shared memory, both aligned to 16. If `valid` is false, writes zeros and does not read `source`.
__device__ __forceinline__ void copy_async_16(void* target, const void* source, bool valid) {
    delay();
#if defined(HYBRIDMF_EMULATE)
    emulator::copy_16(target, source, valid);
#elif HAS_ASYNC_COPY
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
    asm volatile("{ .reg .pred skip;\n setp.eq.b32 skip, %2, 0;\n cp.async.cg.shared.global [%0], [%1], 16, skip; }" ::"r"(address),
                 "l"(source), "r"(int(valid))
                 : "memory");
#else
    *static_cast<float4*>(target) = valid ? *static_cast<const float4*>(source) : make_float4(0, 0, 0, 0);
#endif
}

// Copies 16 bytes of row `row` to shared memory, or zeros if it is negative. `first`: their place in row 0; rows are STRIDE bytes
// apart. One multiplication per address: the compiler would need three instructions.
template <unsigned STRIDE> __device__ __forceinline__ void copy_row_async_16(void* target, const void* first, int row) {
#if !defined(HYBRIDMF_EMULATE) && HAS_ASYNC_COPY
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
    asm volatile("{ .reg .pred skip;\n .reg .b64 source;\n setp.lt.s32 skip, %1, 0;\n mad.wide.u32 source, %1, %3, %2;\n"
                 " cp.async.cg.shared.global [%0], [source], 16, skip; }" ::"r"(address), "r"(row), "l"(first), "n"(STRIDE)
                 : "memory");
#else
    copy_async_16(target, static_cast<const char*>(first) + unsigned(row) * (unsigned long long)STRIDE, row >= 0);
#endif
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void copy_commit() {
#if defined(HYBRIDMF_EMULATE)
    emulator::copy_commit();
#elif HAS_ASYNC_COPY
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's latest groups are in flight.
template <int PENDING> __device__ __forceinline__ void copy_wait() {
    delay();
#if defined(HYBRIDMF_EMULATE)
    emulator::copy_wait(PENDING);
#elif HAS_ASYNC_COPY
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
    delay();
}

// ---------------------------------------------------------------------------------------------- gates

// A gate in shared memory: one warp signals another warp of its block that work is ready, or that memory is free, without a block
// barrier. The gate opens once per piece of work, when all lanes have arrived. A warp that passes sees what they wrote before, and
// what they read before has been read: mbarriers release and acquire.
// A gate knows its openings modulo two: a wait for opening t begins after opening t - 1 and ends before opening t + 1. The kernel
// says why. Turing counts the openings.
struct alignas(8) Gate {
#if defined(HYBRIDMF_EMULATE) || HAS_ASYNC_COPY
#ifdef HYBRIDMF_EMULATE
    emulator::MBarrier barrier;
#else
    unsigned long long barrier;

    __device__ __forceinline__ unsigned address() const { return static_cast<unsigned>(__cvta_generic_to_shared(&barrier)); }
#endif

    // Initializes the gate. Called by one thread, before a block barrier.
    __device__ __forceinline__ void make() {
#ifdef HYBRIDMF_EMULATE
        barrier.make(WARP);
#else
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(WARP) : "memory");
#endif
    }

    // Called by all lanes of a warp, for the `times`-th time.
    __device__ __forceinline__ void open(int, int) {
        delay();
#ifdef HYBRIDMF_EMULATE
        barrier.arrive();
#else
        asm volatile("{ .reg .b64 phase; mbarrier.arrive.shared.b64 phase, [%0]; }" ::"r"(address()) : "memory");
#endif
        delay();
    }

    // Whether the gate has been opened for the `times`-th time.
    __device__ __forceinline__ bool is_open(int times) {
#ifdef HYBRIDMF_EMULATE
        return barrier.test((times - 1) & 1);
#else
        unsigned found;
        asm volatile(
            "{ .reg .pred open; mbarrier.test_wait.parity.shared.b64 open, [%1], %2; selp.u32 %0, 1, 0, open; }"
            : "=r"(found) : "r"(address()), "r"((times - 1) & 1) : "memory");
        return found;
#endif
    }

    // Each lane waits on its own: lanes can pass at different times, so warp-wide operations need __syncwarp first.
    __device__ __forceinline__ void wait(int times) {
        delay();
#ifdef HYBRIDMF_EMULATE
        barrier.wait((times - 1) & 1);
#else
        while (!is_open(times)) {}
#endif
        delay();
    }
#else
    int opened, unused;

    __device__ __forceinline__ unsigned address() const { return static_cast<unsigned>(__cvta_generic_to_shared(&opened)); }

    __device__ __forceinline__ void make() { opened = 0; }

    __device__ __forceinline__ void open(int times, int lane) {
        __syncwarp();
        if (lane == 0) asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(address()), "r"(times) : "memory");
    }

    __device__ __forceinline__ bool is_open(int times) const {
        int value;
        asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(address()) : "memory");
        return value >= times;
    }

    __device__ __forceinline__ void wait(int times) const {
        while (!is_open(times)) {}
    }
#endif
};
