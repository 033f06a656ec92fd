"""What every benchmark shares: seeded data in published shapes, timing of alternatives side by side, JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import scipy.sparse as sp

import hybridmf as hmf

ROOT = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("HYBRIDMF_BENCH_RESULTS", ROOT / "bench" / "results"))
"""Where measurements go; the variable keeps those of a trial out of the repository."""

# users, items, entries as published (BALS table 1; MovieLens 1M: README of the data set; Epinions: Massa and Avesani
# 2007, trust-aware recommender systems: wide, with few entries a row)
SHAPES = {
    "epinions": (49_290, 139_738, 664_824),
    "ml-1m": (6_040, 3_706, 1_000_209),
    "ml-10m": (71_567, 65_133, 9_000_000),
    "ml-20m": (138_493, 27_278, 20_000_263),
}


def synthetic(shape: str, *, seed: int = 0, rank: int = 8) -> sp.csr_array:
    """Ratings 1..5 of a published shape: log-normal user degrees, Zipf item popularity, planted low rank plus noise.

    Duplicate draws are merged, so a little fewer entries than published are left.
    """
    m, n, nnz = SHAPES[shape]
    rng = np.random.default_rng(seed)
    activity = rng.lognormal(0.0, 1.1, m)
    popularity = 1.0 / (np.arange(n) + 20.0) ** 0.9
    users = np.repeat(np.arange(m), rng.multinomial(nnz, activity / activity.sum()))
    edges = np.cumsum(popularity / popularity.sum())
    items = rng.permutation(n)[np.minimum(np.searchsorted(edges, rng.random(nnz)), n - 1)]
    pairs = np.unique(users.astype(np.int64) * n + items)
    users, items = pairs // n, pairs % n
    taste, kind = rng.normal(size=(m, rank)).astype(np.float32), rng.normal(size=(n, rank)).astype(np.float32)
    score = np.empty(len(pairs), dtype=np.float32)
    for start in range(0, len(pairs), 1 << 20):  # in pieces: the gathered factors of 20M pairs would take gigabytes
        part = slice(start, start + (1 << 20))
        score[part] = np.einsum("ij,ij->i", taste[users[part]], kind[items[part]])
    score = 3.5 + score / np.sqrt(rank) + rng.normal(scale=0.5, size=len(pairs)).astype(np.float32)
    return hmf.Ratings.from_coo(users, items, np.clip(np.rint(score), 1, 5), shape=(m, n)).user_items


def synthetic_counts(shape: str, *, seed: int = 0, groups: int = 20, favourites: int = 4) -> sp.csr_array:
    """Implicit feedback of a published shape: degrees as in `synthetic`, planted tastes, power-law counts.

    Each item belongs to a group; a user draws four in five items from the user's favourite groups. `synthetic` plants
    structure in the ratings only: who sees what says nothing there, so that an implicit objective is near its best
    after two iterations.
    """
    m, n, nnz = SHAPES[shape]
    rng = np.random.default_rng(seed)
    activity = rng.lognormal(0.0, 1.1, m)
    popularity = rng.permutation(1.0 / (np.arange(n) + 20.0) ** 0.9)  # items lie in order of their group
    users = np.repeat(np.arange(m), rng.multinomial(nnz, activity / activity.sum()))
    edges = np.concatenate([[0.0], np.cumsum(popularity)])
    bounds = edges[np.linspace(0, n, groups + 1).astype(int)]
    liked = rng.integers(groups, size=(m, favourites), dtype=np.int32)
    group = liked[users, rng.integers(favourites, size=nnz)]
    low, high = bounds[group], bounds[group + 1]
    anywhere = rng.random(nnz) < 0.2
    low[anywhere], high[anywhere] = 0.0, edges[-1]
    items = np.minimum(np.searchsorted(edges, low + rng.random(nnz) * (high - low), side="right") - 1, n - 1)
    pairs = np.unique(users.astype(np.int64) * n + rng.permutation(n)[items])
    counts = np.minimum(rng.zipf(2.0, len(pairs)), 100).astype(np.float32)
    return hmf.Ratings.from_coo(pairs // n, pairs % n, counts, shape=(m, n)).user_items


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


def sources_sha256() -> str:
    """sha256 of the library's source files, concatenated in path order: which code a figure belongs to."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "hybridmf").rglob("*")):
        if path.suffix in (".py", ".pyx", ".pxd", ".h") or path.name.startswith("kernels"):
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def processor() -> str:
    """Model name of the processor, where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def record(file: str, line: dict[str, Any]) -> None:
    """Append one measurement with machine, versions and sources to bench/results/<file>.jsonl."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    stamp = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "instruction_set": hmf.config()["instruction_set"],
        },
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "hybridmf": hmf.__version__,
        },
        "commit": commit.stdout.strip(),
        "sources_sha256": sources_sha256(),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / f"{file}.jsonl", "a") as out:
        out.write(json.dumps(line | stamp) + "\n")
