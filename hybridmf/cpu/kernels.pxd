"""The C kernel table (kernels.h), and the two types every kernel comes in."""

ctypedef fused real:
    float
    double


cdef extern from "kernels.h" nogil:
    enum:
        HMF_PANEL

    ctypedef struct hmf_kernel_table:
        const char* name
        float (*dot_f)(Py_ssize_t n, const float* a, const float* b) noexcept nogil
        double (*dot_d)(Py_ssize_t n, const double* a, const double* b) noexcept nogil
        double (*dot_fd)(Py_ssize_t n, const float* a, const float* b) noexcept nogil
        void (*axpy_f)(Py_ssize_t n, float alpha, const float* x, float* y) noexcept nogil
        void (*axpy_d)(Py_ssize_t n, double alpha, const double* x, double* y) noexcept nogil
        void (*syr_f)(Py_ssize_t n, float alpha, const float* x, float* a) noexcept nogil
        void (*syr_d)(Py_ssize_t n, double alpha, const double* x, double* a) noexcept nogil
        void (*score_f)(Py_ssize_t n_users, Py_ssize_t f, const float* users, const float* panel, float* out,
                        Py_ssize_t stride) noexcept nogil
        void (*score_d)(Py_ssize_t n_users, Py_ssize_t f, const double* users, const double* panel, double* out,
                        Py_ssize_t stride) noexcept nogil

    const hmf_kernel_table* hmf_kernels() noexcept
    const hmf_kernel_table* hmf_kernels_named(const char* name) noexcept


cdef inline real dot(const hmf_kernel_table* table, Py_ssize_t n, const real* a, const real* b) noexcept nogil:
    if real is float:
        return table.dot_f(n, a, b)
    else:
        return table.dot_d(n, a, b)


cdef inline double dot_exact(const hmf_kernel_table* table, Py_ssize_t n, const real* a, const real* b) noexcept nogil:
    """Products and sum in double, whatever the type of the factors."""
    if real is float:
        return table.dot_fd(n, a, b)
    else:
        return table.dot_d(n, a, b)


cdef inline void axpy(const hmf_kernel_table* table, Py_ssize_t n, real alpha, const real* x, real* y) noexcept nogil:
    if real is float:
        table.axpy_f(n, alpha, x, y)
    else:
        table.axpy_d(n, alpha, x, y)


cdef inline void syr(const hmf_kernel_table* table, Py_ssize_t n, real alpha, const real* x, real* a) noexcept nogil:
    if real is float:
        table.syr_f(n, alpha, x, a)
    else:
        table.syr_d(n, alpha, x, a)


cdef inline void score(const hmf_kernel_table* table, Py_ssize_t n_users, Py_ssize_t f, const real* users,
                       const real* panel, real* out, Py_ssize_t stride) noexcept nogil:
    if real is float:
        table.score_f(n_users, f, users, panel, out, stride)
    else:
        table.score_d(n_users, f, users, panel, out, stride)
