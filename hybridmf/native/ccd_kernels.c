/* ccd_kernels.c - CCD++ follows the choice of kernels.c. */
#include "ccd_kernels.h"

const hmf_ccd_table *hmf_ccd_kernels(void) {
#ifdef HMF_X86
    const hmf_kernel_table *table = hmf_kernels();
    if (table == &hmf_table_avx512) return &hmf_ccd_avx512;
    if (table == &hmf_table_avx2) return &hmf_ccd_avx2;
#endif
    return &hmf_ccd_portable; /* with NEON, too: these kernels have no tiles that more registers would widen */
}
