/* kernels.c - choice of the kernel table; each call queries the processor, which is cheap. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

/* Best first. */
static const hmf_kernel_table *const tables[] = {
#ifdef HMF_X86
    &hmf_table_avx512, &hmf_table_avx2,
#endif
#ifdef HMF_NEON
    &hmf_table_neon,
#endif
    &hmf_table_portable,
};
enum { N_TABLES = sizeof tables / sizeof tables[0] };

static int can_run(const hmf_kernel_table *table) {
#ifdef HMF_X86
    __builtin_cpu_init();
    if (table == &hmf_table_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (table == &hmf_table_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    (void)table;
    return 1; /* every AArch64 processor has NEON */
}

const hmf_kernel_table *hmf_kernels_named(const char *name) {
    for (int i = 0; i < N_TABLES; i++)
        if (strcmp(tables[i]->name, name) == 0) return can_run(tables[i]) ? tables[i] : NULL;
    return NULL;
}

const hmf_kernel_table *hmf_kernels(void) {
    const char *wanted = getenv("HYBRIDMF_ISA");
    const hmf_kernel_table *table = wanted && *wanted ? hmf_kernels_named(wanted) : NULL;
    for (int i = 0; !table; i++)
        if (can_run(tables[i])) table = tables[i];
    return table;
}
