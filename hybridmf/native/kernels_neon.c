/* kernels_neon.c - the kernels of kernels_impl.h for AArch64, whose 32 registers of 16 bytes hold larger tiles than those
 * of kernels_portable.c. Tested under emulation; the speed is not measured. */
#include "kernels.h"

#ifdef HMF_NEON
#include <float.h>
#include <math.h>
#include <string.h>

#define HMF_BYTES 16   /* of a vector register */
#define HMF_USERS 6    /* users x columns vectors of scores fit in the 32 registers */
#define HMF_COLUMNS 4
#define HMF_SYRK_ROWS 8     /* the same for tiles of a symmetric update */
#define HMF_SYRK_COLUMNS 3
#define HMF_PRODUCT_ROWS 4  /* rows x 4 inner products at a time */

#define REAL float
#define INTEGER int32_t /* of its width */
#define TYPE f
#define HMF_SQRT sqrtf
#define HMF_HUGE FLT_MAX
#include "kernels_impl.h"
#define REAL double
#define INTEGER int64_t
#define TYPE d
#define HMF_SQRT sqrt
#define HMF_HUGE DBL_MAX
#include "kernels_impl.h"

const hmf_kernel_table hmf_table_neon = {
    "neon", dot_f, dot_d, dot_fd, axpy_f, axpy_d, syr_f, syr_d, score_f, score_d,
    syrk_upper_f, syrk_upper_d, weigh_f, weigh_d, gather_f, gather_d, cholesky_f, cholesky_d,
    LANES_RANK_f, LANES_RANK_d, cholesky_lanes_f, cholesky_lanes_d,
    products_f, products_d, sum_rows_f, sum_rows_d, prefetch_rows_f, prefetch_rows_d, apply_f, apply_d, combine_f, combine_d, draw, first_at_least_f, first_at_least_d,
    sgd_entries_f, sgd_entries_d, sgd_rows_f, sgd_rows_d,
};
#endif
