"""Kernels on the emulator under ThreadSanitizer: unsynchronized accesses are found without an unlucky schedule.

``python -m support.races [case ...]`` runs cases of `support.kernel_cases` whose names start so, all without arguments;
it starts itself again with ThreadSanitizer's library, and fails if that reports a race. .ci/races runs them all.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support import emulated

TESTS = Path(__file__).parents[1]

OPTIONS = {
    "ignore_noninstrumented_modules": 1,  # NumPy's and Python's own calls of memcpy
    "report_signal_unsafe": 0,
    "history_size": 2,  # more costs memory for each thread of a block
    "suppress_equal_addresses": 0,  # blocks use the same memory one after another
}


def library() -> str | None:
    """ThreadSanitizer's library of gcc, if there is one."""
    compiler = emulated.compiler()
    if compiler is None or "clang" in compiler:
        return None
    found = subprocess.run([compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


def command(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a Python process that looks for races."""
    # ThreadSanitizer wants its part of the address space for itself
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    preloaded = ["env", f"LD_PRELOAD={library()}", f"TSAN_OPTIONS={':'.join(f'{k}={v}' for k, v in OPTIONS.items())}"]
    environment = {
        **os.environ,
        emulated.RACES: "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return [*fixed, *preloaded, sys.executable, *arguments], environment


def run_cases(prefixes: Sequence[str]) -> None:
    """Run cases in this process, which ThreadSanitizer watches."""
    from hybridmf.device import cuda

    device = emulated.EmulatedDevice(multiprocessors=1)
    cuda.open_device = lambda name="cuda": device  # type: ignore[assignment,misc]
    from support import kernel_cases

    kernel_cases.ratings = functools.partial(kernel_cases.ratings, 20, 150)  # smaller: each access costs time
    for name, case in kernel_cases.CASES.items():
        if name.startswith(tuple(prefixes)):
            begun = time.perf_counter()
            sys.stderr.write(f"{name}\n")
            case()
            sys.stderr.write(f"{name}: {time.perf_counter() - begun:.1f} s\n")


def main(prefixes: Sequence[str]) -> int:
    """Run cases in another process."""
    started, environment = command(["-m", "support.races", "--here", *(prefixes or [""])])
    return subprocess.run(started, env=environment).returncode


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        run_cases(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
