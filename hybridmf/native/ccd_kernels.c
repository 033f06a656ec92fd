/* ccd_kernels.c - CCD++ follows the choice of kernels.c. */
#include "ccd_kernels.h"

#include "kernels.h"

const hmf_ccd_table *hmf_ccd_kernels(void) {
    const hmf_kernel_table *table = hmf_kernels();
    if (table == &hmf_table_avx512) return &hmf_ccd_avx512;
    if (table == &hmf_table_avx2) return &hmf_ccd_avx2;
    return &hmf_ccd_portable;
}
