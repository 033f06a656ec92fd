/* kernels.c - choice of the kernel table; each call queries the processor, which is cheap. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
#define HMF_X86 1
#endif

static int can_run(const hmf_kernel_table *table) {
#ifdef HMF_X86
    __builtin_cpu_init();
    if (table == &hmf_table_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (table == &hmf_table_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return table == &hmf_table_portable;
}

const hmf_kernel_table *hmf_kernels_named(const char *name) {
    const hmf_kernel_table *tables[] = {&hmf_table_avx512, &hmf_table_avx2, &hmf_table_portable};
    for (int i = 0; i < 3; i++)
        if (strcmp(tables[i]->name, name) == 0) return can_run(tables[i]) ? tables[i] : NULL;
    return NULL;
}

const hmf_kernel_table *hmf_kernels(void) {
    const char *wanted = getenv("HYBRIDMF_ISA");
    const hmf_kernel_table *table = wanted && *wanted ? hmf_kernels_named(wanted) : NULL;
    if (table) return table;
    if (can_run(&hmf_table_avx512)) return &hmf_table_avx512;
    if (can_run(&hmf_table_avx2)) return &hmf_table_avx2;
    return &hmf_table_portable;
}
