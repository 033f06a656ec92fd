"""Compilation of kernels on threads: what a fit waits for before what may be needed later, each program once."""

from __future__ import annotations

import atexit
import heapq
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

logger = logging.getLogger("hybridmf")

LONG_COMPILATION = 0.5  # seconds of waiting for the compiler after which a fit logs it

Program: TypeAlias = "tuple[str, str, tuple[str, ...]]"
"""Source text, kernel and constants: the arguments of `Device.kernel`."""

NOW, SOON, LATER = range(3)
"""Order of compilation: somebody waits; the fit at hand needs it; only a later call needs it."""


class Compiler:
    """Results of `compile`, by program.

    Its threads are daemons and end when nothing is left to compile. When the interpreter exits, programs that have not
    begun are dropped, and those under way are completed: NVRTC must not run while its library is unloaded.
    `workers`: maximum number of threads; at most half of them compile what is needed later.
    `name`: of the device, for the log.
    """

    def __init__(self, compile: Callable[[str, str, tuple[str, ...]], Any], workers: int, name: str) -> None:
        self._compile, self._workers, self._name = compile, workers, name
        self._lock, self._pid, self._closed = threading.Lock(), os.getpid(), False
        self._results: dict[Program, Future[Any]] = {}
        self._untouched: set[Program] = set()
        self._queue: list[tuple[int, int, Program]] = []  # a heap; a program may be there more than once
        self._count = self._later = 0
        self._threads: set[threading.Thread] = set()
        _COMPILERS.add(self)

    def ahead(self, programs: Iterable[Program], later: bool = False) -> None:
        """Start to compile programs; `later`: only a later call needs them. Errors are raised by `result`."""
        with self._lock:
            for program in programs:
                self._add(program, LATER if later else SOON)

    def result(self, program: Program) -> Any:
        """Wait for the result of a program; its error is raised once, and the next call compiles again."""
        with self._lock:
            known = None if self._closed else self._add(program, NOW)
        if known is None:
            return self._compile(*program)
        if wait([known], timeout=LONG_COMPILATION).not_done:
            logger.info("compiling kernels for %s, once per machine: later fits find them on disk", self._name)
        try:
            return known.result()
        except Exception:
            with self._lock:
                if self._results.get(program) is known:
                    del self._results[program]
            raise

    def _add(self, program: Program, when: int) -> Future[Any]:
        known = self._results.get(program)
        if known is None:
            known = self._results[program] = Future()
            self._untouched.add(program)
        elif when == LATER or program not in self._untouched:
            return known
        heapq.heappush(self._queue, (when, self._count, program))
        self._count += 1
        if len(self._threads) < self._workers:  # each has a program under way, or is about to take one
            thread = threading.Thread(target=self._work, name="hybridmf-compiler", daemon=True)
            self._threads.add(thread)
            thread.start()
        return known

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            when, program = taken
            result = self._results[program]
            try:
                result.set_result(self._compile(*program))
            except BaseException as error:  # raised where the program is used
                result.set_exception(error)
            with self._lock:
                self._later -= when == LATER

    def _take(self) -> tuple[int, Program] | None:
        """The next program; None ends the thread."""
        with self._lock:
            while self._queue:
                when, _, program = self._queue[0]
                if when == LATER and self._later >= max(1, self._workers // 2):
                    break  # the threads that compile such programs go on with this one
                heapq.heappop(self._queue)
                if program in self._untouched:
                    self._untouched.remove(program)
                    self._later += when == LATER
                    return when, program
            self._threads.discard(threading.current_thread())
            return None

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest; later results are compiled by the calling thread."""
        if os.getpid() != self._pid:  # forked: the threads are those of the parent, and so may be the lock
            return
        with self._lock:
            self._closed = True
            self._queue.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()


_COMPILERS: weakref.WeakSet[Compiler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for compiler in list(_COMPILERS):
        compiler.close()
