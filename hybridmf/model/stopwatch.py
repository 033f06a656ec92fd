"""Time of each part of a fit: ``timings_``."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter as clock

BEFORE = ("check", "plan", "convert", "set up")  # parts before the first iteration
PARTS = (*BEFORE, "iterations", "observe", "finish")  # all parts of a fit, in order


class Stopwatch:
    """Seconds of each of `PARTS` of a fit, which add up to the time since the start."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = clock()

    def lap(self, part: str) -> float:
        """Add the time since the last call (or the start) to a part, and return it."""
        now = clock()
        elapsed, self._last = now - self._last, now
        self.seconds[part] += elapsed
        return elapsed

    def split(self, part: str, measured: Mapping[str, float]) -> None:
        """Distribute time measured by another process within one part over the parts that it belongs to."""
        self.seconds[part] -= sum(measured.values())
        for name, seconds in measured.items():
            self.seconds[name] += seconds
