from hybridmf.native.ccd_kernels cimport hmf_ccd_table
from hybridmf.native.kernels cimport hmf_kernel_table

cdef const hmf_kernel_table* hmf_kernels() noexcept nogil
cdef const hmf_kernel_table* hmf_kernels_named(const char* name) noexcept nogil
cdef const hmf_ccd_table* hmf_ccd_kernels() noexcept nogil
