/* ccd_portable.c - the kernels of ccd_impl.h for any processor: 16-byte vectors (SSE2, NEON) or scalars. */
#include "ccd_kernels.h"

#include <string.h>

#define HMF_BYTES 16 /* of a vector register */

#define REAL float
#define TYPE f
#define HMF_WIDE 1
#include "ccd_impl.h"
#define REAL double
#define TYPE d
#define HMF_WIDE 0
#include "ccd_impl.h"

const hmf_ccd_table hmf_ccd_portable = {
    "portable", residual_f, residual_d, accumulate_f, accumulate_d, subtract_f, subtract_d,
};
