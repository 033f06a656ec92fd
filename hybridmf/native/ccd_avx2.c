/* ccd_avx2.c - the kernels of ccd_impl.h for processors with AVX2 and FMA; chosen at run time. */
#include "ccd_kernels.h"

#ifdef HMF_X86
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define HMF_BYTES 32 /* of a vector register */

#define REAL float
#define TYPE f
#define HMF_WIDE 1
#include "ccd_impl.h"
#define REAL double
#define TYPE d
#define HMF_WIDE 0
#include "ccd_impl.h"

const hmf_ccd_table hmf_ccd_avx2 = {
    "avx2", residual_f, residual_d, accumulate_f, accumulate_d, subtract_f, subtract_d,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
