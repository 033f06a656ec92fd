"""Thread counts that are safe after a fork.

GNU OpenMP keeps its threads between regions. A forked child loses them, and a region with more than one thread would
never end; so if the parent has used threads, the child runs one. All compiled modules share the process's thread pool,
and therefore this module, which holds its state.
"""

cdef extern from *:
    """
    static int hmf_threads_used = 0, hmf_threads_lost = 0;
    #if defined(_OPENMP) && !defined(_WIN32)
    #include <pthread.h>
    static void hmf_in_child(void) { hmf_threads_lost |= hmf_threads_used; }
    static void hmf_watch_forks(void) { pthread_atfork(NULL, NULL, hmf_in_child); }
    #else
    static void hmf_watch_forks(void) {}
    #endif
    """
    int hmf_threads_used
    int hmf_threads_lost
    void hmf_watch_forks() noexcept nogil


cdef int hmf_usable_threads(int wanted) noexcept nogil:
    """`wanted`, or 1 if the process lost its OpenMP threads in a fork."""
    global hmf_threads_used
    if hmf_threads_lost:
        return 1
    if wanted > 1:
        hmf_threads_used = 1
    return wanted


hmf_watch_forks()
