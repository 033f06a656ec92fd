"""The C kernel table (kernels.h), and the two types that every kernel supports."""

ctypedef fused real:
    float
    double


from libc.stdint cimport int32_t, uint32_t, uint64_t


cdef extern from "kernels.h" nogil:
    enum:
        HMF_PANEL
        HMF_PAD
        HMF_SYSTEMS
        HMF_LANES
        HMF_LANES_RANK

    ctypedef struct hmf_rows:
        Py_ssize_t n
        Py_ssize_t width
        Py_ssize_t stride
        const void* fixed
        const int32_t* columns

    ctypedef struct hmf_kernel_table:
        const char* name
        float (*dot_f)(Py_ssize_t n, const float* a, const float* b) noexcept nogil
        double (*dot_d)(Py_ssize_t n, const double* a, const double* b) noexcept nogil
        double (*dot_fd)(Py_ssize_t n, const float* a, const float* b) noexcept nogil
        void (*axpy_f)(Py_ssize_t n, float alpha, const float* x, float* y) noexcept nogil
        void (*axpy_d)(Py_ssize_t n, double alpha, const double* x, double* y) noexcept nogil
        void (*syr_f)(Py_ssize_t n, float alpha, const float* x, float* a) noexcept nogil
        void (*syr_d)(Py_ssize_t n, double alpha, const double* x, double* a) noexcept nogil
        void (*score_f)(Py_ssize_t n_users, Py_ssize_t f, const float* users, Py_ssize_t apart,
                        const float* panel, float* out, Py_ssize_t stride) noexcept nogil
        void (*score_d)(Py_ssize_t n_users, Py_ssize_t f, const double* users, Py_ssize_t apart,
                        const double* panel, double* out, Py_ssize_t stride) noexcept nogil
        void (*syrk_upper_f)(Py_ssize_t n, Py_ssize_t ld, const float* v, float sign,
                             float* a) noexcept nogil
        void (*syrk_upper_d)(Py_ssize_t n, Py_ssize_t ld, const double* v, double sign,
                             double* a) noexcept nogil
        Py_ssize_t (*weigh_f)(Py_ssize_t n, const float* ratings, float alpha, float unobserved, float sign,
                              float* root, float* target) noexcept nogil
        Py_ssize_t (*weigh_d)(Py_ssize_t n, const double* ratings, double alpha, double unobserved, double sign,
                              double* root, double* target) noexcept nogil
        void (*gather_f)(const hmf_rows* rows, Py_ssize_t n_ahead, Py_ssize_t ld, const float* root,
                         const float* target, float* v, float* b) noexcept nogil
        void (*cholesky_f)(int count, Py_ssize_t rank, float** a, float** b, float epsilon, float* work, float** x,
                           Py_ssize_t* status) noexcept nogil
        Py_ssize_t lanes_rank_f
        Py_ssize_t lanes_rank_d
        void (*cholesky_lanes_f)(int count, Py_ssize_t rank, float** a, float** b, float epsilon, float* work,
                                 float** x, Py_ssize_t* status) noexcept nogil
        void (*products_f)(const hmf_rows* rows, const float* root, float shift, float ridge,
                           Py_ssize_t ld, float* a) noexcept nogil
        void (*sum_rows_f)(const hmf_rows* rows, const float* coefficient, float* out) noexcept nogil
        void (*prefetch_rows_f)(const hmf_rows* rows) noexcept nogil
        void (*apply_f)(const hmf_rows* rows, const float* weight, const float* target, float sign, const float* p,
                        float* out) noexcept nogil
        void (*gather_d)(const hmf_rows* rows, Py_ssize_t n_ahead, Py_ssize_t ld, const double* root,
                         const double* target, double* v, double* b) noexcept nogil
        void (*cholesky_d)(int count, Py_ssize_t rank, double** a, double** b, double epsilon, double* work, double** x,
                           Py_ssize_t* status) noexcept nogil
        void (*cholesky_lanes_d)(int count, Py_ssize_t rank, double** a, double** b, double epsilon, double* work,
                                 double** x, Py_ssize_t* status) noexcept nogil
        void (*products_d)(const hmf_rows* rows, const double* root, double shift, double ridge,
                           Py_ssize_t ld, double* a) noexcept nogil
        void (*sum_rows_d)(const hmf_rows* rows, const double* coefficient, double* out) noexcept nogil
        void (*prefetch_rows_d)(const hmf_rows* rows) noexcept nogil
        void (*apply_d)(const hmf_rows* rows, const double* weight, const double* target, double sign, const double* p,
                        double* out) noexcept nogil
        void (*combine_f)(Py_ssize_t n, Py_ssize_t rank, const float* rows, const float* coefficient,
                          float* out) noexcept nogil
        void (*combine_d)(Py_ssize_t n, Py_ssize_t rank, const double* rows, const double* coefficient,
                          double* out) noexcept nogil
        void (*draw)(Py_ssize_t n, uint64_t key, uint64_t row, uint32_t side, int low, float scale,
                     float* out) noexcept nogil
        Py_ssize_t (*first_at_least_f)(Py_ssize_t n, const float* scores, float threshold,
                                       Py_ssize_t start) noexcept nogil
        Py_ssize_t (*first_at_least_d)(Py_ssize_t n, const double* scores, double threshold,
                                       Py_ssize_t start) noexcept nogil

    void HMF_PREFETCH(const void* address) noexcept


cdef inline real dot(const hmf_kernel_table* table, Py_ssize_t n, const real* a, const real* b) noexcept nogil:
    if real is float:
        return table.dot_f(n, a, b)
    else:
        return table.dot_d(n, a, b)


cdef inline double dot_exact(const hmf_kernel_table* table, Py_ssize_t n, const real* a, const real* b) noexcept nogil:
    """Products and sum in double, for factors of either type."""
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
                       Py_ssize_t apart, const real* panel, real* out, Py_ssize_t stride) noexcept nogil:
    if real is float:
        table.score_f(n_users, f, users, apart, panel, out, stride)
    else:
        table.score_d(n_users, f, users, apart, panel, out, stride)


cdef inline void syrk_upper(const hmf_kernel_table* table, Py_ssize_t n, Py_ssize_t ld, const real* v, real sign,
                            real* a) noexcept nogil:
    if real is float:
        table.syrk_upper_f(n, ld, v, sign, a)
    else:
        table.syrk_upper_d(n, ld, v, sign, a)


cdef inline Py_ssize_t weigh(const hmf_kernel_table* table, Py_ssize_t n, const real* ratings, real alpha,
                             real unobserved, real sign, real* root, real* target) noexcept nogil:
    if real is float:
        return table.weigh_f(n, ratings, alpha, unobserved, sign, root, target)
    else:
        return table.weigh_d(n, ratings, alpha, unobserved, sign, root, target)


cdef inline void gather(const hmf_kernel_table* table, const hmf_rows* rows, Py_ssize_t n_ahead, Py_ssize_t ld,
                        const real* root, const real* target, real* v, real* b) noexcept nogil:
    if real is float:
        table.gather_f(rows, n_ahead, ld, root, target, v, b)
    else:
        table.gather_d(rows, n_ahead, ld, root, target, v, b)


cdef inline void cholesky(const hmf_kernel_table* table, int count, Py_ssize_t rank, real** a, real** b, real epsilon,
                          real* work, real** x, Py_ssize_t* status) noexcept nogil:
    if real is float:
        table.cholesky_f(count, rank, a, b, epsilon, work, x, status)
    else:
        table.cholesky_d(count, rank, a, b, epsilon, work, x, status)


cdef inline void cholesky_lanes(const hmf_kernel_table* table, int count, Py_ssize_t rank, real** a, real** b,
                                real epsilon, real* work, real** x, Py_ssize_t* status) noexcept nogil:
    if real is float:
        table.cholesky_lanes_f(count, rank, a, b, epsilon, work, x, status)
    else:
        table.cholesky_lanes_d(count, rank, a, b, epsilon, work, x, status)


cdef inline void apply_rows(const hmf_kernel_table* table, const hmf_rows* rows, const real* weight,
                            const real* target, real sign, const real* p, real* out) noexcept nogil:
    if real is float:
        table.apply_f(rows, weight, target, sign, p, out)
    else:
        table.apply_d(rows, weight, target, sign, p, out)


cdef inline Py_ssize_t first_at_least(const hmf_kernel_table* table, Py_ssize_t n, const real* scores, real threshold,
                                      Py_ssize_t start) noexcept nogil:
    if real is float:
        return table.first_at_least_f(n, scores, threshold, start)
    else:
        return table.first_at_least_d(n, scores, threshold, start)


cdef inline void combine(const hmf_kernel_table* table, Py_ssize_t n, Py_ssize_t rank, const real* rows,
                         const real* coefficient, real* out) noexcept nogil:
    if real is float:
        table.combine_f(n, rank, rows, coefficient, out)
    else:
        table.combine_d(n, rank, rows, coefficient, out)


cdef inline void products(const hmf_kernel_table* table, const hmf_rows* rows, const real* root,
                          real shift, real ridge, Py_ssize_t ld, real* a) noexcept nogil:
    if real is float:
        table.products_f(rows, root, shift, ridge, ld, a)
    else:
        table.products_d(rows, root, shift, ridge, ld, a)


cdef inline void sum_rows(const hmf_kernel_table* table, const hmf_rows* rows, const real* coefficient,
                          real* out) noexcept nogil:
    if real is float:
        table.sum_rows_f(rows, coefficient, out)
    else:
        table.sum_rows_d(rows, coefficient, out)
