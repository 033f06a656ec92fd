/* kernels_portable.c - the kernels of kernels_impl.h for any processor: 16-byte vectors (SSE2, NEON) or scalars. */
#include "kernels.h"

#define HMF_BYTES 16   /* of a vector register */
#define HMF_USERS 2    /* users x columns vectors of scores stay in the 16 registers */
#define HMF_COLUMNS 4

#define REAL float
#define TYPE f
#include "kernels_impl.h"
#define REAL double
#define TYPE d
#include "kernels_impl.h"

const hmf_kernel_table hmf_table_portable = {
    "portable", dot_f, dot_d, dot_fd, axpy_f, axpy_d, syr_f, syr_d, score_f, score_d,
};
