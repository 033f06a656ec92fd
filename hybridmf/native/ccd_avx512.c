/* ccd_avx512.c - the kernels of ccd_impl.h for processors with AVX-512 (F, DQ, VL, BW); chosen at run time. */
#include "ccd_kernels.h"

#ifdef HMF_X86
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma,prefer-vector-width=512")
#endif
#define HMF_BYTES 64 /* of a vector register */

#define REAL float
#define TYPE f
#define HMF_WIDE 1
#include "ccd_impl.h"
#define REAL double
#define TYPE d
#define HMF_WIDE 0
#include "ccd_impl.h"

const hmf_ccd_table hmf_ccd_avx512 = {
    "avx512", residual_f, residual_d, accumulate_f, accumulate_d, subtract_f, subtract_d,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
