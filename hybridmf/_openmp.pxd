"""OpenMP's thread queries; one thread in builds without OpenMP and in forked children."""

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    static inline int hmf_max_threads(void) { return omp_get_max_threads(); }
    static inline int hmf_thread_id(void) { return omp_get_thread_num(); }
    #else
    static inline int hmf_max_threads(void) { return 1; }
    static inline int hmf_thread_id(void) { return 0; }
    #endif
    """
    int hmf_max_threads() noexcept nogil
    int hmf_thread_id() noexcept nogil

cdef int hmf_usable_threads(int wanted) noexcept nogil
