"""The C kernel table of CCD++ (ccd_kernels.h)."""

from libc.stdint cimport int32_t


cdef extern from "ccd_kernels.h" nogil:
    ctypedef struct hmf_ccd_entries:
        Py_ssize_t n
        const int32_t* columns
        void* e
        void* kept

    ctypedef struct hmf_ccd_table:
        void (*residual_f)(Py_ssize_t n, Py_ssize_t rank, const float* x, const float* fixed, const int32_t* columns,
                           const float* ratings, float* out) noexcept nogil
        void (*residual_d)(Py_ssize_t n, Py_ssize_t rank, const double* x, const double* fixed, const int32_t* columns,
                           const double* ratings, double* out) noexcept nogil
        void (*accumulate_f)(const hmf_ccd_entries* entries, int terms, const float* pairs, float p, float q,
                             double* sums) noexcept nogil
        void (*accumulate_d)(const hmf_ccd_entries* entries, int terms, const double* pairs, double p, double q,
                             double* sums) noexcept nogil
        void (*subtract_f)(Py_ssize_t n, float x, const float* b, float* e) noexcept nogil
        void (*subtract_d)(Py_ssize_t n, double x, const double* b, double* e) noexcept nogil
