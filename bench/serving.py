"""Serving one user at a time: latency on an idle and a busy machine, memory of several processes, a small server.

    python bench/serving.py                     all tasks: a minute
    python bench/serving.py --task latency      seconds of one call: p50 and p99, and processor time, beside `implicit`
    python bench/serving.py --task memory       memory of processes that read, map or inherit a model
    python bench/serving.py --task server       requests to the server of docs/serving.md, over the loopback interface

The data have the shape of MovieLens 1M. "Busy" means one process for each core that computes all the time. The server
needs fastapi and uvicorn; it is left out where they are missing. Every process that a task starts ends with it.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from common import ROOT, record, synthetic_counts

import hybridmf as hmf

FACTORS = 64
CALLS = 2000
CLIENTS, REQUESTS = 4, 250
DEADLINE = 60.0
"""Seconds after which a task gives up on a process of its own."""


# ----------------------------------------------------------------------------------------------------------- latency


def timed(call: Callable[[int], Any], users: list[int]) -> dict[str, float]:
    """Microseconds of a call: median, 99th percentile, and processor time of all threads."""
    for user in users[:50]:
        call(user)
    seconds, spent = [], time.process_time()
    for user in users:
        started = time.perf_counter()
        call(user)
        seconds.append(time.perf_counter() - started)
    spent = (time.process_time() - spent) / len(users)
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"p50": round(1e6 * p50, 1), "p99": round(1e6 * p99, 1), "cpu": round(1e6 * spent, 1)}


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute, for DEADLINE seconds at most."""
    script = f"import time\nend = time.monotonic() + {DEADLINE}\nwhile time.monotonic() < end: pass"
    started = [subprocess.Popen([sys.executable, "-S", "-c", script]) for _ in range(processes)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def peer(matrix: sp.csr_array, model: hmf.ImplicitALS) -> Callable[[int], Any] | None:
    """`recommend` of the library implicit with the same factors; None where it is not installed."""
    if not importlib.util.find_spec("implicit"):
        return None
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import implicit

    theirs = implicit.als.AlternatingLeastSquares(factors=FACTORS, use_gpu=False, num_threads=os.cpu_count())
    theirs.user_factors, theirs.item_factors = model.user_factors.copy(), model.item_factors.copy()
    rows = sp.csr_matrix((matrix.data.copy(), matrix.indices.copy(), matrix.indptr.copy()), shape=matrix.shape)
    return lambda user: theirs.recommend(user, rows[user], N=10)


def check(model: hmf.ImplicitALS, matrix: sp.csr_array, user: int) -> None:
    """Raise unless the answer is that of a full sort."""
    scores = model.item_factors @ model.user_factors[user]
    scores[matrix.indices[matrix.indptr[user] : matrix.indptr[user + 1]]] = -np.inf
    if not np.allclose(np.sort(scores)[::-1][:10], model.recommend(user)[1], atol=1e-5):
        raise click.ClickException(f"recommend({user}) is not the full sort")


def latency(matrix: sp.csr_array, model: hmf.ImplicitALS) -> None:
    """Measure one call after the other."""
    users = np.random.default_rng(0).integers(0, model.n_users, CALLS).tolist()
    started = time.perf_counter()
    model.recommend(users[0])
    first = time.perf_counter() - started
    for user in users[:20]:
        check(model, matrix, user)
    histories = {user: matrix.indices[slice(*matrix.indptr[user : user + 2])][:20].tolist() for user in users}
    calls: dict[str, Callable[[int], Any] | None] = {
        "recommend(user)": model.recommend,
        "recommend(user, filter_items=[3, 5, 7])": lambda user: model.recommend(user, filter_items=[3, 5, 7]),
        "recommend_new(20 items)": lambda user: model.recommend_new(histories[user]),
        "similar_items(item)": lambda user: model.similar_items(user % model.n_items),
        "implicit: recommend(user, rows[user])": peer(matrix, model),
    }
    print(f"\nfirst call {1e3 * first:.1f} ms; then microseconds\n")
    print(f"{'':40} {'p50':>8} {'p99':>8} {'cpu':>8}   busy: {'p50':>8} {'p99':>8} {'cpu':>8}")
    for name, call in calls.items():
        if call is None:
            continue
        idle = timed(call, users)
        with busy(os.cpu_count() or 1):
            loaded = timed(call, users)
        shown = [f"{measured[key]:8.0f}" for measured in (idle, loaded) for key in ("p50", "p99", "cpu")]
        print(f"{name:40} {' '.join(shown[:3])}         {' '.join(shown[3:])}")
        shape, threads = [model.n_users, model.n_items, FACTORS], model.plan_.num_threads
        line = {"benchmark": "serving", "task": "latency", "call": name, "shape": shape, "threads": threads}
        record("serving", line | {"first_call_ms": round(1e3 * first, 2), "idle_us": idle, "busy_us": loaded})


# ------------------------------------------------------------------------------------------------------------ memory

SERVE = """
import gc, os, sys
import hybridmf as hmf

def memory():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return sizes["Pss"]

path, how = sys.argv[1:]
hmf.ImplicitALS  # what an import takes is no part of the model
forked, loaded = how.startswith("forked"), not how.endswith("nothing")
if loaded:
    model = hmf.load(path, mapped=how == "mapped")
    model.recommend(0)
if forked:
    gc.freeze()
    for _ in range(2):
        if not os.fork():
            break
if loaded:
    model.recommend(1)
os.write(1, b"ready\\n")  # in one piece: forked processes share the pipe
os.read(0, 1)  # a byte for each of them; nothing once the script has ended
os.write(1, b"%d\\n" % memory())
os.read(0, 1)
"""


def _together(path: Path, how: str) -> list[int]:
    """KiB of three processes that serve at the same time, each with its share of the pages that several have."""
    count = 1 if how.startswith("forked") else 3
    command = [sys.executable, "-c", SERVE, str(path), how]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(count)]
    timer = threading.Timer(DEADLINE, lambda: [process.stdin.close() for process in processes])
    timer.start()
    lines = 3 // count
    try:
        for process in processes:
            for _ in range(lines):
                process.stdout.readline()
        for process in processes:
            process.stdin.write("\n" * lines)
            process.stdin.flush()
        sizes = [int(process.stdout.readline()) for process in processes for _ in range(lines)]
    finally:
        timer.cancel()
        for process in processes:
            process.stdin.close()
            process.wait()
    return sizes


def memory(model: hmf.ImplicitALS, path: Path) -> None:
    """Memory of three processes that serve one file."""
    if not os.path.exists("/proc/self/smaps_rollup"):
        return
    print(f"\nmodel file {path.stat().st_size / 2**20:.1f} MiB; MiB of three processes, without that of the import\n")
    nothing = {how: sum(_together(path, how)) for how in ("nothing", "forked nothing")}
    for how in ("read", "mapped", "forked"):
        together = (sum(_together(path, how)) - nothing["forked nothing" if how == "forked" else "nothing"]) / 1024
        print(f"{how:8} {together:8.1f}")
        line = {"benchmark": "serving", "task": "memory", "how": how, "processes": 3, "mib": round(together, 1)}
        record("serving", line | {"file_mib": round(path.stat().st_size / 2**20, 1)})


# ------------------------------------------------------------------------------------------------------------ server


def example() -> str:
    """The server of docs/serving.md."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "FastAPI(" in block)


def _client(port: int, users: list[int], seconds: list[float], failures: list[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    for user in users:
        started = time.perf_counter()
        connection.request("GET", f"/users/{user}/items")
        answer = connection.getresponse()
        body = answer.read()
        seconds.append(time.perf_counter() - started)
        if answer.status != 200:
            failures.append(body.decode())
    connection.close()


def _await(port: int, process: subprocess.Popen[Any]) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise click.ClickException("the server did not start")


def server(model: hmf.ImplicitALS, folder: Path) -> None:
    """Requests of several clients at a time."""
    if not all(map(importlib.util.find_spec, ("fastapi", "uvicorn"))):
        print("\nserver: left out (pip install fastapi uvicorn)")
        return
    model.save(folder / "model.safetensors")
    (folder / "served.py").write_text(example())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "served:app", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        _await(port, process)
        users = np.random.default_rng(1).integers(0, model.n_users, (CLIENTS, REQUESTS)).tolist()
        seconds: list[float] = []
        failures: list[str] = []
        threads = [threading.Thread(target=_client, args=(port, some, seconds, failures)) for some in users]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        elapsed = time.perf_counter() - started
    finally:
        process.terminate()
        process.wait(DEADLINE)
    if failures or len(seconds) != CLIENTS * REQUESTS:
        raise click.ClickException(f"{len(seconds)} answers, {len(failures)} failures: {failures[:1]}")
    p50, p99 = np.percentile(seconds, (50, 99))
    rate = len(seconds) / elapsed
    print(f"\nserver, {CLIENTS} clients: {rate:.0f} requests/s, p50 {1e3 * p50:.2f} ms, p99 {1e3 * p99:.2f} ms")
    measured = {"requests_per_s": round(rate), "p50_ms": round(1e3 * p50, 3), "p99_ms": round(1e3 * p99, 3)}
    line = {"benchmark": "serving", "task": "server", "clients": CLIENTS, "requests": len(seconds)}
    record("serving", line | measured)


@click.command()
@click.option("--task", "tasks", multiple=True, type=click.Choice(("latency", "memory", "server")))
@click.option("--scale", default=1.0, show_default=True, help="Share of the users and items of MovieLens 1M.")
def main(tasks: tuple[str, ...], scale: float) -> None:
    """Measure and print."""
    matrix = (
        synthetic_counts("ml-1m")
        if scale == 1
        else hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=scale, seed=0).user_items
    )
    model = hmf.ImplicitALS(factors=FACTORS, regularization=0.01, iterations=2, device="cpu", random_state=0).fit(
        matrix
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        model.save(path)
        for task in tasks or ("latency", "memory", "server"):
            if task == "latency":
                latency(matrix, hmf.load(path))
            elif task == "memory":
                memory(model, path)
            else:
                server(model, Path(folder))


if __name__ == "__main__":
    main()
