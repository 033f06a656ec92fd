"""Thread counts that are safe after a fork.

GNU OpenMP keeps its threads between regions. In a child made by fork they are gone, and a region with more than one
thread would never end; so a child whose parent had used them runs one thread. This is a separate module because the
threads belong to the process: all compiled modules share one pool, and therefore its state.
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
    """`wanted`, or 1 where the process's OpenMP threads were lost in a fork."""
    global hmf_threads_used
    if hmf_threads_lost:
        return 1
    if wanted > 1:
        hmf_threads_used = 1
    return wanted


hmf_watch_forks()
