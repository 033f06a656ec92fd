"""The C kernels, linked into this module alone: other modules cimport the functions here, which return tables of them.

The tables are those of this processor, or of the instruction set that HYBRIDMF_ISA names; see kernels.h.
"""

from hybridmf.native.ccd_kernels cimport hmf_ccd_table
from hybridmf.native.kernels cimport hmf_kernel_table


cdef extern from "kernels.h" nogil:
    const hmf_kernel_table* chosen "hmf_kernels"() noexcept
    const hmf_kernel_table* named "hmf_kernels_named"(const char* name) noexcept


cdef extern from "ccd_kernels.h" nogil:
    const hmf_ccd_table* chosen_of_ccd "hmf_ccd_kernels"() noexcept


cdef const hmf_kernel_table* hmf_kernels() noexcept nogil:
    return chosen()


cdef const hmf_kernel_table* hmf_kernels_named(const char* name) noexcept nogil:
    """NULL unless the table exists and this processor can run it."""
    return named(name)


cdef const hmf_ccd_table* hmf_ccd_kernels() noexcept nogil:
    return chosen_of_ccd()
