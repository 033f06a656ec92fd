/* kernels_avx2.c - the kernels of kernels_impl.h for processors with AVX2 and FMA; chosen at run time. */
#include "kernels.h"

#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define HMF_TARGETED 1
#endif
#define HMF_BYTES 32   /* of a vector register */
#define HMF_USERS 3    /* users x columns vectors of scores stay in the 16 registers */
#define HMF_COLUMNS 4

#define REAL float
#define TYPE f
#include "kernels_impl.h"
#define REAL double
#define TYPE d
#include "kernels_impl.h"

const hmf_kernel_table hmf_table_avx2 = {
    "avx2", dot_f, dot_d, dot_fd, axpy_f, axpy_d, syr_f, syr_d, score_f, score_d,
};

#if defined(HMF_TARGETED) && defined(__clang__)
#pragma clang attribute pop
#endif
