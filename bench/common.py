"""Code shared by all benchmarks: seeded data in published shapes, timing of alternatives side by side, JSON lines."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import freshness
import numpy as np
import scipy
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf import datasets
from hybridmf.datasets import SHAPES as SHAPES
from hybridmf.plan.solver import Solver

ROOT = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("HYBRIDMF_BENCH_RESULTS", ROOT / "bench" / "results"))
"""Where measurements go; the variable keeps those of a trial out of the repository."""


def synthetic(shape: str, *, seed: int = 0, scale: float = 1.0) -> sp.csr_array:
    """Ratings 1..5 of a published shape (`hybridmf.datasets.synthetic`), float32."""
    return datasets.synthetic(shape, seed=seed, scale=scale).user_items


def synthetic_counts(shape: str, *, seed: int = 0) -> sp.csr_array:
    """Implicit feedback of a published shape, float32.

    With tastes: without them, the pairs are independent of the ratings, and the implicit objective is close to its
    minimum after two iterations.
    """
    return datasets.synthetic(shape, feedback="implicit", seed=seed).user_items


def shop(users: int = 100_000, items: int = 60_000, entries: int = 800_000, *, seed: int = 0) -> sp.csr_array:
    """Feedback of a shop, float32: few entries a row (log-normal users, Zipf items with exponent 0.8), values 1..5."""
    rng = np.random.default_rng(seed)
    activity, popularity = rng.lognormal(0, 1, users), np.arange(1, items + 1) ** -0.8
    drawn = int(1.15 * entries)  # some pairs are drawn twice
    rows = rng.choice(users, drawn, p=activity / activity.sum())
    columns = rng.choice(items, drawn, p=rng.permutation(popularity / popularity.sum()))
    pairs = rng.permutation(np.unique(rows.astype(np.int64) * items + columns))[:entries]
    values = rng.integers(1, 6, len(pairs)).astype(np.float32)
    where = ((pairs // items).astype(np.int32), (pairs % items).astype(np.int32))
    matrix = sp.csr_array((values, where), shape=(users, items))
    matrix.sort_indices()
    return matrix


def iterate(solver: Solver) -> None:
    """One iteration, as a fit runs it."""
    for step in solver.sweep():
        solver.keep(step, solver.solve(step))


def alternate(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn (A B C A B C ...) after one warm-up, so that drift hits all alike.

    A run that returns a float has timed itself (peers that only fit as a whole: differences of fits).
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            answer = run()
            elapsed = time.perf_counter() - started
            if repeat:
                seconds[name].append(answer if isinstance(answer, float) else elapsed)
    return seconds


def median(values: list[float]) -> float:
    """Median of measured seconds."""
    return statistics.median(values)


def sgemm_rate(threads: int, size: int = 3000) -> float:
    """GFLOP/s of a float32 matrix product, the ceiling other rates are compared with."""
    from threadpoolctl import threadpool_limits

    a = np.ones((size, size), np.float32)
    with threadpool_limits(threads, user_api="blas"):
        a @ a
        best = min(_seconds(lambda: a @ a) for _ in range(3))
    return 2 * size**3 / best / 1e9


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@functools.cache
def sources_sha256() -> str:
    """sha256 of the library's source files, concatenated in path order: which code a figure belongs to."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "hybridmf").rglob("*")):
        if path.suffix in (".py", ".pyx", ".pxd", ".h") or path.name.startswith(("kernels", "ccd_")):
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@functools.cache
def commit() -> str:
    """Commit of the checkout, empty outside of one."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def processor() -> str:
    """Model name of the processor, empty if the system does not report it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def record(file: str, line: dict[str, Any]) -> None:
    """Append one measurement with machine, versions and sources to bench/results/<file>.jsonl.

    `cores` are those that this process may use: `taskset` keeps measurements apart that run side by side.
    """
    stamp = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "instruction_set": hmf.config()["instruction_set"],
        },
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "hybridmf": hmf.__version__,
        },
        "commit": commit(),
        "sources_sha256": sources_sha256(),
        **freshness.stamp(file, line),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / f"{file}.jsonl", "a") as out:
        out.write(json.dumps(line | stamp, separators=(",", ":")) + "\n")  # lines of many points are a tenth shorter
