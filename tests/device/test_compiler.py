"""Order, number, failures and end of compilations; the compiler of kernels is a function of the test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hybridmf.device.compiler import Compiler, Program

TIMEOUT = 20


def program(name: str) -> Program:
    return "source", name, ()


class Gated:
    """Compiles to the name of the kernel, once the test opens the gate; notes the order and the threads at a time."""

    def __init__(self, workers: int) -> None:
        self.gate, self.lock, self.begun = threading.Event(), threading.Lock(), []
        self.running = self.most = 0
        self.compiler = Compiler(self, workers, "Fake")

    def __call__(self, source: str, name: str, constants: tuple[str, ...]) -> Any:
        with self.lock:
            self.begun.append(name)
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.gate.wait(TIMEOUT)
        with self.lock:
            self.running -= 1
        if name.startswith("bad"):
            raise ValueError(name)
        return name

    def begins(self, *names: str) -> None:
        wait_for(lambda: len(self.begun) == len(names))
        assert set(self.begun) == set(names)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_a_fit_needs_comes_before_what_is_needed_later() -> None:
    gated = Gated(1)
    gated.compiler.ahead([program("first")])
    gated.begins("first")
    gated.compiler.ahead([program("later"), program("both")], later=True)
    gated.compiler.ahead([program("soon"), program("both")])
    waiting = threading.Thread(target=gated.compiler.result, args=(program("now"),))
    waiting.start()
    wait_for(lambda: program("now") in gated.compiler._results)
    gated.gate.set()
    waiting.join(TIMEOUT)
    assert gated.compiler.result(program("later")) == "later"
    assert gated.begun == ["first", "now", "soon", "both", "later"]  # each once


def test_threads_are_limited_and_end() -> None:
    gated = Gated(4)
    gated.compiler.ahead([program(f"later {k}") for k in range(9)], later=True)
    gated.begins("later 0", "later 1")  # half of the threads
    gated.compiler.ahead([program(f"soon {k}") for k in range(9)])
    gated.begins("later 0", "later 1", "soon 0", "soon 1")
    assert len(gated.compiler._threads) <= 4
    gated.gate.set()
    assert [gated.compiler.result(program(f"later {k}")) for k in (8, 0)] == ["later 8", "later 0"]
    assert gated.most == 4 and len(gated.begun) == 18
    wait_for(lambda: not gated.compiler._threads)


def test_an_error_is_raised_where_the_program_is_used_and_it_is_compiled_again() -> None:
    gated = Gated(2)
    gated.gate.set()
    gated.compiler.ahead([program("bad"), program("good")], later=True)
    assert gated.compiler.result(program("good")) == "good"
    for times in (1, 2):
        with pytest.raises(ValueError, match="bad"):
            gated.compiler.result(program("bad"))
        assert gated.begun.count("bad") == times


def test_closing_drops_what_has_not_begun() -> None:
    gated = Gated(1)
    gated.compiler.ahead([program("begun"), program("dropped")])
    gated.begins("begun")
    threading.Timer(0.02, gated.gate.set).start()
    gated.compiler.close()
    assert not gated.running and gated.begun == ["begun"]
    assert gated.compiler.result(program("after")) == "after"  # by this thread


SCRIPT = """
import os, sys, time
from hybridmf.device.compiler import Compiler
def compile(source, name, constants):
    print("begun", flush=True)
    time.sleep(0.2)
    print("done", flush=True)
compiler = Compiler(compile, 1, "Fake")
compiler.ahead([("", "a", ()), ("", "b", ())], later=True)
time.sleep(0.1)
if sys.argv[1] == "fork" and not os.fork():
    compiler._lock.acquire()  # as if a thread of the parent held it
    sys.exit()
"""


@pytest.mark.parametrize("how", ["exit", "fork"])
def test_the_interpreter_exits_after_what_is_under_way(how: str) -> None:
    """A child process has no threads of its parent to wait for."""
    if how == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork")
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["begun", "done"], "")
