"""Number of threads for requests to a fitted model, by their amount of work."""

from __future__ import annotations

WORK_OF_A_THREAD = 1 << 22
"""Multiply-adds per thread; they take 0.2 to 0.5 ms.

A thread of the pool starts within 5 to 50 microseconds on an idle machine. If all cores are busy it waits for a time
slice of the scheduler, milliseconds, and spinning then costs as much processor time as the work."""


def threads_for(work: float, parts: int, num_threads: int) -> int:
    """Threads for `work` multiply-adds in `parts` separate parts, at most `num_threads`."""
    return max(1, min(num_threads, parts, int(work / WORK_OF_A_THREAD)))
