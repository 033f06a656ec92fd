"""OpenMP's thread queries, or one thread where the build has no OpenMP; and one thread in a forked child.

GNU OpenMP keeps its threads between regions. In a child made by fork they are gone, and a region with more than one
thread would wait for them for ever; so a child whose parent had used them stays with one.
"""

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

    static int hmf_threads_used = 0, hmf_threads_lost = 0;
    #if defined(_OPENMP) && !defined(_WIN32)
    #include <pthread.h>
    static void hmf_in_child(void) { hmf_threads_lost = hmf_threads_used; }
    static void hmf_watch_forks(void) { pthread_atfork(NULL, NULL, hmf_in_child); }
    #else
    static void hmf_watch_forks(void) {}
    #endif
    static inline int hmf_usable_threads(int wanted) {
        if (hmf_threads_lost) return 1;
        if (wanted > 1) hmf_threads_used = 1;
        return wanted;
    }
    """
    int hmf_max_threads() noexcept nogil
    int hmf_thread_id() noexcept nogil
    void hmf_watch_forks() noexcept nogil
    int hmf_usable_threads(int wanted) noexcept nogil
