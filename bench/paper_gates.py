"""Gates, Anzt, Kurzak, Dongarra (IEEE Big Data 2015) measured again: figures 11, 12, 14 to 17 (13: paper_tuning.py).

    python bench/paper_gates.py                                   CPU, quick: small shapes, about a minute
    python bench/paper_gates.py --device cpu --profile full --threads 1,2,4,8,16
    python bench/paper_gates.py --device cuda --profile full      one GPU
    python bench/paper_gates.py --task scaling --blas .../libmkl_rt.so.3    with another BLAS in place of SciPy's
    python bench/paper_gates.py --render                          docs/evidence/gates.md and its plots from the lines

Tasks: "sparsity" (fig. 11), "distribution" (fig. 12), "scaling" (figs. 14 and 15: parallel scaling on 1 to N cores),
"iteration" (fig. 16: a full implicit iteration over the rank; fig. 17, speedups, follows from its lines).

Implicit feedback with alpha = 1 and lambda = 0.01 on data of the published sizes (`hybridmf.datasets`). Methods: their
Level-2 and Level-3 ALS_CORE ("rank1", "blas3_published", and with syrk in place of gemm "blas3") and ours ("simd") on
the CPU; their batched sparse-syrk, Cholesky and solve, as printed ("sparse_syrk_published") and as we write it
("sparse_syrk"), and ours ("fused") on a GPU; the library implicit, exact and with 3 steps of CG; Spark MLlib where
pyspark and Java are installed, by the difference of two fits. Spark's penalty is lambda times the row's entries, which
takes the same time. GraphLab and Mahout cannot be installed any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import itertools
import os
import shutil
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import paper_common as paper
import rivals
from paper_common import Drawn, Line, Recorder

import hybridmf as hmf
from hybridmf.native import _als

NAME = "paper_gates"

LAMBDA, ALPHA = 0.01, 1.0

SLACK = 1e-4
"""Share of the objective that an exact half sweep may still gain after an iteration of an exact method."""

LARGE = {"netflix": 1.0, "msd": 1.0, "yahoo-songs": 1.0}

SMALLER = {"netflix": 0.2, "msd": 0.3, "yahoo-songs": 0.3}
"""The three with about 4 million entries."""


@dataclass(frozen=True)
class Work:
    """What a task runs on: shapes with their scales and ranks, and methods."""

    shapes: dict[str, float]
    factors: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()


BLAS_METHODS = ("rank1", "blas3", "blas3_published")
"""Methods that call BLAS or LAPACK for each row."""

OURS = ("simd", "blas3", "blas3_published")
CPU_METHODS = (*OURS, "implicit CG 3", "implicit exact", "spark")
GPU_METHODS = ("fused", "sparse_syrk", "sparse_syrk_published")

SPARSITY_ROWS = 2000
"""Rows of figure 11."""

SPARSITY_CELLS = (16, 24)
"""Rows and columns of cells in which its entries are counted."""

PROFILES: dict[tuple[str, str], dict[str, list[Work]]] = {
    ("cpu", "quick"): {
        "sparsity": [Work({"msd": 0.2})],
        "distribution": [Work({"eachmovie": 1.0, "msd": 0.2})],
        "scaling": [
            Work({"eachmovie": 0.5}, (96,), (*OURS, "implicit exact")),
            Work({"netflix": 0.1, "msd": 0.1}, (64,), OURS),
        ],
        "iteration": [Work({"netflix": 0.1, "msd": 0.1}, (10, 32, 64), CPU_METHODS[:-1])],
    },
    ("cpu", "full"): {
        "sparsity": [Work({"msd": 1.0})],
        "distribution": [Work({"eachmovie": 1.0} | SMALLER)],
        "scaling": [
            Work({"eachmovie": 1.0}, (96,), OURS),
            Work(LARGE, (64,), ("simd",)),
            Work(LARGE, (64,), ("blas3_published",)),
            Work({"eachmovie": 1.0}, (96,), ("implicit exact",)),
        ],
        "iteration": [
            Work(LARGE, (10, 16, 32, 48, 64, 80, 100), ("simd",)),
            Work(LARGE, (32, 64, 96), ("blas3_published",)),
            Work(LARGE, (64,), ("rank1", "blas3", "implicit CG 3", "implicit exact")),
        ],
    },
    ("cuda", "quick"): {
        "sparsity": [Work({"msd": 0.1})],
        "distribution": [Work({"eachmovie": 1.0})],
        "scaling": [],
        "iteration": [Work({"netflix": 0.1, "msd": 0.1}, (10, 32, 64), GPU_METHODS)],
    },
    ("cuda", "full"): {
        "sparsity": [Work({"msd": 1.0})],
        "distribution": [Work({"eachmovie": 1.0} | LARGE)],
        "scaling": [],
        "iteration": [
            Work(LARGE, (10, 16, 32, 48, 64, 80, 100), GPU_METHODS),
        ],
    },
}
"""What each task runs on, by device and profile; what matters least comes last, for the sake of a budget."""


@dataclass
class Bench:
    """What all tasks need."""

    recorder: Recorder
    threads: tuple[int, ...]
    repeats: int
    device: Any = None
    spark: Spark | None = None
    blas: str = ""  # the library in place of SciPy's BLAS
    started: list[Any] = field(default_factory=list)
    judges: dict[tuple[str, float, int], rivals.Judge] = field(default_factory=dict)
    checked: set[tuple[str, float, int, str]] = field(default_factory=set)

    def note(self, task: str, line: Line) -> None:
        """Record a line and show it in short."""
        self.recorder.note(task, line)
        if "seconds" in line:
            seconds = line["seconds"]["median"]
            threads = f"{line['threads']:3d} threads" if line.get("threads") else ""
            where = f"{task:12s} {paper.label(line):18s} f = {line['factors']:3d} {line['method']:16s}"
            click.echo(f"{where} {threads} {seconds:9.4f} s")


# ------------------------------------------------------------------------------------------ methods on a CPU


def our_model(f: int, threads: int, **options: Any) -> hmf.ImplicitALS:
    """Our estimator on the CPU."""
    return hmf.ImplicitALS(
        f, regularization=LAMBDA, alpha=ALPHA, num_threads=threads, device="cpu", random_state=0, **options
    )


def prepare(bench: Bench, method: str, data: Drawn, f: int, threads: int) -> Callable[[], Any] | None:
    """A full iteration of a method, None if the method is not installed.

    A function that returns a float has timed itself.
    """
    if method == "spark":
        return None if bench.spark is None else partial(bench.spark.seconds_per_iteration, data, f, threads)
    if method.startswith("implicit"):
        if not rivals.installed("implicit"):
            return None
        solver: Any = rivals.Implicit(data.user, f, LAMBDA, ALPHA, threads, use_cg="CG" in method)
    else:
        solver = rivals.Ours(our_model(f, threads, assembly=method), data.user)
    bench.started.append(solver)
    return solver.step


def check_exact(bench: Bench, data: Drawn, f: int) -> None:
    """After an iteration of each exact method an exact half sweep of ours must gain next to nothing.

    Raises
    ------
    AssertionError
        It does: some method does not minimize the objective.
    """
    exact = [each for each in bench.started if isinstance(each, rivals.Ours) or not each.options.get("cg_steps")]
    key = (data.name, data.scale, f)
    if exact and key not in bench.judges:
        bench.judges.clear()
        bench.judges[key] = rivals.Judge(our_model(f, bench.threads[-1]), data.user)
    for solver in exact:
        slack = bench.judges[key].slack(solver.factors())
        assert slack <= SLACK, (type(solver).__name__, slack)


def measure(bench: Bench, data: Drawn, f: int, threads: int, method: str) -> Line | None:
    """Seconds of an iteration: as many after the first as `PATIENCE` allows, at least `FEWEST`."""
    bench.started.clear()
    run = prepare(bench, method, data, f, threads)
    if run is None:
        return None
    started = time.perf_counter()
    first = run()  # warm-up, and how long to expect
    values = [first if isinstance(first, float) else time.perf_counter() - started]
    if not isinstance(first, float):
        least = 1 if values[0] > LONG else FEWEST
        for _ in range(max(least, min(bench.repeats, int(PATIENCE / values.pop())))):
            started = time.perf_counter()
            run()
            values.append(time.perf_counter() - started)
    case = (data.name, data.scale, f, method)
    if case not in bench.checked:  # the number of threads makes no other factors
        check_exact(bench, data, f)
        bench.checked.add(case)
    bench.started.clear()
    gc.collect()
    return paper.spread(values) | {"repeats": len(values)}


PATIENCE = 2.5
"""Seconds that all iterations after the first may take, if they are more than the fewest."""

FEWEST = 2
"""Iterations after the first that are timed however long they take."""

LONG = 30.0
"""Seconds of the first from which one more is enough."""


class Spark:
    """Spark MLlib's implicit ALS: seconds of an iteration by the difference of two fits, after one that is not timed.

    Needs pyspark and Java. Ratings go through a Parquet file, which Spark caches before anything is timed.
    """

    ITERATIONS = (1, 3)

    @staticmethod
    def installed() -> bool:
        """Whether pyspark, pyarrow and Java are there."""
        found = [importlib.util.find_spec(name) is not None for name in ("pyspark", "pyarrow")]
        return all(found) and shutil.which("java") is not None

    def seconds_per_iteration(self, data: Drawn, f: int, threads: int) -> float:
        """Difference of fits of 1 and 3 iterations, over 2."""
        from pyspark.ml.recommendation import ALS

        with self._session(threads) as session, tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ratings.parquet"
            write_parquet(path, data)
            frame = session.read.parquet(str(path)).repartition(threads).cache()
            frame.count()
            seconds = []
            for iterations in (self.ITERATIONS[0], *self.ITERATIONS):  # the first one meets Java's compiler
                als = ALS(
                    rank=f, maxIter=iterations, regParam=LAMBDA, alpha=ALPHA, implicitPrefs=True, userCol="user",
                    itemCol="item", ratingCol="rating", numUserBlocks=threads, numItemBlocks=threads, seed=0,
                )  # fmt: skip
                started = time.perf_counter()
                model = als.fit(frame)
                model.itemFactors.count()
                seconds.append(time.perf_counter() - started)
        few, many = self.ITERATIONS
        return max(1e-9, (seconds[2] - seconds[1]) / (many - few))

    @contextlib.contextmanager
    def _session(self, threads: int) -> Iterator[Any]:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(f"local[{threads}]").config("spark.driver.memory", "8g")
        session = builder.config("spark.ui.enabled", "false").getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        try:
            yield session
        finally:
            session.stop()


def write_parquet(path: Path, data: Drawn) -> None:
    """Ratings as three columns."""
    import pyarrow as pa
    from pyarrow import parquet

    coo = data.user.tocoo()
    columns = {"user": coo.row.astype(np.int32), "item": coo.col.astype(np.int32), "rating": coo.data}
    parquet.write_table(pa.table(columns), path)


# ------------------------------------------------------------------------------------------ tasks


def run_sparsity(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 11: entries of the first rows, with items numbered in the order in which users first meet them."""
    first = data.user[:SPARSITY_ROWS]
    _, met, names = np.unique(first.indices, return_index=True, return_inverse=True)
    places = np.empty(len(met), np.int64)
    places[np.argsort(met)] = np.arange(len(met))
    rows = np.repeat(np.arange(first.shape[0]), np.diff(first.indptr))
    sizes = first.shape[0], len(met)
    cells, _, _ = np.histogram2d(rows, places[names], bins=SPARSITY_CELLS, range=[[0, size] for size in sizes])
    line = {"rows": sizes[0], "columns": sizes[1], "entries": int(first.nnz), "cells": cells.astype(int).tolist()}
    bench.recorder.note("sparsity", data.line | line)
    click.echo(f"sparsity     {paper.label(data.line)}: {first.nnz:,} entries in {sizes[0]:,} x {sizes[1]:,}")


def run_distribution(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 12."""
    bench.note("distribution", paper.distribution(data))


def run_scaling(bench: Bench, data: Drawn, work: Work) -> None:
    """Figures 14 and 15."""
    for f, method, threads in itertools.product(work.factors, work.methods, bench.threads):
        timed_case(bench, "scaling", data, f, threads, method)


def run_iteration(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 16 on the most threads that are asked for."""
    for f, method in itertools.product(work.factors, work.methods):
        timed_case(bench, "iteration", data, f, bench.threads[-1], method)


def timed_case(bench: Bench, task: str, data: Drawn, f: int, threads: int, method: str) -> None:
    """One line, if the method is installed and there is time."""
    name = f"{task}, {data.name}, f = {f}, {method}, {threads} threads"
    if not bench.recorder.has_time(name):
        return
    with bench.recorder.case(name):
        seconds = measure(bench, data, f, threads, method)
        if seconds is not None:
            named = f"{method}, {bench.blas}" if bench.blas and method in BLAS_METHODS else method
            line = {"factors": f, "method": named, "threads": threads, "seconds": seconds}
            bench.note(task, data.line | line | {"gflops": flops(data, f) / seconds["median"] / 1e9})


def flops(data: Drawn, f: int) -> float:
    """Useful work of an exact implicit iteration."""
    rows = sum(int(np.count_nonzero(np.diff(matrix.indptr))) for matrix in (data.user, data.item))
    grams = 2.0 * sum(data.user.shape) * f * f
    return 2.0 * data.nnz * f * (f + 1) + rows * (f**3 / 3 + 2.0 * f * f) + grams


def run_gpu_iteration(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 16 on a GPU: factors and ratings on the device."""
    paper.compile_ahead(bench.device, work.factors, work.methods, implicit=True)
    for f, method in itertools.product(work.factors, work.methods):
        name = f"iteration, {data.name}, f = {f}, {method}"
        if not bench.recorder.has_time(name):
            continue
        with bench.recorder.case(name):
            _, error, seconds = paper.timed_iteration(bench.device, data, "implicit", f, method, bench.repeats)
            line = {"factors": f, "method": method, "threads": None, "seconds": seconds, "error": error}
            bench.note("iteration", data.line | line | {"gflops": flops(data, f) / seconds["median"] / 1e9})


Task = Callable[[Bench, Drawn, Work], None]

TASKS: dict[str, dict[str, Task]] = {
    "sparsity": {"cpu": run_sparsity, "cuda": run_sparsity},
    "distribution": {"cpu": run_distribution, "cuda": run_distribution},
    "scaling": {"cpu": run_scaling},
    "iteration": {"cpu": run_iteration, "cuda": run_gpu_iteration},
}


# ------------------------------------------------------------------------------------------ the page


def render_sparsity(lines: list[Line], folder: Path) -> str:
    """Figure 11, of the largest scale that was drawn."""
    if not lines:
        return ""
    (line,) = paper.largest(lines)
    file = "gates-sparsity.svg"
    cells = np.array(line["cells"], dtype=np.float64)
    with paper.figure(folder / file, 6.0, 3.0) as drawing:
        panel = drawing.subplots()
        shown = panel.pcolormesh(
            np.linspace(0, line["columns"], cells.shape[1] + 1), np.linspace(0, line["rows"], cells.shape[0] + 1),
            np.ma.masked_equal(cells, 0), cmap="viridis_r", norm="log",
        )  # fmt: skip
        panel.invert_yaxis()
        panel.set_xlabel("items, in the order in which users first meet them")
        panel.set_ylabel("users")
        drawing.colorbar(shown, ax=panel, label="entries")
    share = 100 * cells[:, : cells.shape[1] // 10].sum() / line["entries"]
    text = (
        f"The first {line['rows']:,} users of {paper.label(line)} have {line['entries']:,} entries in "
        f"{line['columns']:,} items. A tenth of these items, those met first, have {share:.0f} % of the entries."
    )
    return f"{text}\n\n{paper.picture(file, 'Entries of the first rows')}"


def render_distribution(lines: list[Line], folder: Path) -> str:
    """Figure 12, of the largest scale that was drawn of each shape."""
    file, sides = folder / "gates-distribution.svg", ("users", "items")
    return paper.distribution_part(lines, file, sides, "Rows and columns by number of entries")


def render_scaling(lines: list[Line], folder: Path) -> str:
    """Figures 14 and 15: seconds and speedups over threads."""

    def body(name: str, group: list[Line]) -> str:
        counts = sorted({line["threads"] for line in group})
        found = {(*case_of(line), line["threads"]): line["seconds"]["median"] for line in group}
        rows = []
        for case in dict.fromkeys(case_of(line) for line in group):
            times = [found.get((*case, count)) for count in counts]
            base = times[0]
            cells = [f"{t:.3f} ({base / t:.1f} x)" if t and base else "-" for t in times]
            rows.append([f"{case[0]}, f = {case[1]}, {case[2]}", *cells])
        file = f"gates-scaling-{paper.slug(name)}.svg"
        draw_scaling(folder / file, group)
        header = ["seconds of an iteration", *(f"{count} threads" for count in counts)]
        return f"{paper.table(header, rows)}\n\n{paper.picture(file, 'Time over threads, and speedups')}"

    return paper.sections(paper.by_hardware(lines), body)


def case_of(line: Line) -> tuple[str, int, str]:
    """What a curve is of."""
    return paper.label(line), line["factors"], line["method"]


def draw_scaling(path: Path, lines: list[Line]) -> None:
    """Left as figure 14, right as figure 15."""
    with paper.figure(path, 9.0, 3.4) as drawing:
        left, right = drawing.subplots(1, 2)
        for case in dict.fromkeys(case_of(line) for line in lines):
            points = sorted((line["threads"], line["seconds"]["median"]) for line in lines if case_of(line) == case)
            threads, seconds = np.array(points).T
            (curve,) = left.loglog(threads, seconds, marker=".", label=f"{case[0]}, f = {case[1]}, {case[2]}")
            left.loglog(threads, seconds[0] * threads[0] / threads, "--", color=curve.get_color(), linewidth=0.5)
            right.plot(threads, seconds[0] * threads[0] / seconds, marker=".", color=curve.get_color())
        counts = sorted({line["threads"] for line in lines})
        most = counts[-1]
        left.set_xticks(counts, counts)
        left.minorticks_off()
        right.plot([1, most], [1, most], "k--", linewidth=0.5)
        for panel, text in ((left, "seconds of an iteration"), (right, "parallel speedup")):
            panel.set_xlabel("threads")
            panel.set_ylabel(text)
        left.legend(fontsize=6)


def render_iteration(lines: list[Line], folder: Path) -> str:
    """Figure 16: time of an iteration over the rank, all hardware in one table a shape."""
    places = dict.fromkeys(where for _, where in map(series_of, lines))
    letters = dict(zip(places, string.ascii_uppercase, strict=False))
    parts = ["; ".join(f"{letter}: {where}" for where, letter in letters.items()) + "."]
    for shape in dict.fromkeys(paper.label(line) for line in lines):
        those = [line for line in lines if paper.label(line) == shape]
        series = dict.fromkeys(series_of(line) for line in those)
        found = {(line["factors"], series_of(line)): line["seconds"] for line in those}
        rows = []
        for f in sorted({line["factors"] for line in those}):
            times = [found.get((f, each)) for each in series]
            rows.append([f, *(milliseconds(t) if t else "-" for t in times)])
        file = f"gates-iteration-{paper.slug(shape)}.svg"
        draw_iterations(folder / file, those)
        header = [f"{shape}: f", *(f"{method}, {letters[where]}, ms" for method, where in series)]
        parts.append(f"{paper.table(header, rows)}\n\n{paper.picture(file, f'Time of an iteration, {shape}')}")
    return "\n\n".join(parts) if lines else ""


def milliseconds(seconds: Line) -> str:
    """Median of the repeats and half of their range, in per cent; a single measurement says so."""
    median = seconds["median"]
    if "repeats" not in seconds:
        return f"{1e3 * median:,.1f}"
    spread = 50 * (seconds["most"] - seconds["least"]) / median
    return f"{1e3 * median:,.1f} ± {spread:.0f} %" if seconds["repeats"] > 1 else f"{1e3 * median:,.1f} (one)"


def series_of(line: Line) -> tuple[str, str]:
    """Method, and where and on how many threads it ran."""
    where = paper.hardware(line)
    return line["method"], f"{where}, {line['threads']} threads" if line["threads"] else where


def draw_iterations(path: Path, lines: list[Line]) -> None:
    """Time over the rank, logarithmic and linear, as the paper has it."""
    with paper.figure(path, 9.0, 3.4) as drawing:
        for panel, scale in zip(drawing.subplots(1, 2), ("log", "linear"), strict=True):
            for each in dict.fromkeys(series_of(line) for line in lines):
                points = sorted((x["factors"], x["seconds"]["median"]) for x in lines if series_of(x) == each)
                panel.plot(*zip(*points, strict=True), marker=".", label=", ".join(each))
            panel.set_yscale(scale)
            panel.set_xlabel("f")
            panel.set_ylabel("seconds of an iteration")
        drawing.axes[0].legend(fontsize=5)


def render_speedups(lines: list[Line], folder: Path) -> str:
    """Figure 17: how many times faster than each other method the GPU's two are, on the same shape and rank."""
    gpu_lines = [line for line in lines if line["device"] == "cuda"]
    measured = {line["method"] for line in gpu_lines}
    methods = [method for method in GPU_METHODS if method in measured]
    rows = []
    for other in dict.fromkeys(series_of(line) for line in lines if line["device"] == "cpu"):
        cpu = {(paper.label(x), x["factors"]): x["seconds"]["median"] for x in lines if series_of(x) == other}
        cells = []
        for method in methods:
            ratios = [
                cpu[key] / line["seconds"]["median"]
                for line in gpu_lines
                if line["method"] == method and (key := (paper.label(line), line["factors"])) in cpu
            ]
            mean = float(np.exp(np.mean(np.log(ratios)))) if ratios else None
            cells.append(f"{min(ratios):.1f} to {max(ratios):.1f}, mean {mean:.1f}" if ratios else "-")
        rows.append([", ".join(other), *cells])
    if not gpu_lines or not rows:
        return ""
    where = " and ".join(paper.by_hardware(gpu_lines))
    header = [f"speedup of {where} over", *methods]
    return paper.table(header, rows)


KEYS = {
    "sparsity": ("shape",),
    "distribution": ("shape", "scale"),
    "scaling": ("shape", "scale", "factors", "method", "threads"),
    "iteration": ("shape", "scale", "factors", "method", "threads"),
}
"""The fields that identify a line of a task."""

RENDERERS: dict[str, tuple[str, Callable[[list[Line], Path], str]]] = {
    "sparsity": ("sparsity", render_sparsity),
    "distribution": ("distribution", render_distribution),
    "scaling": ("scaling", render_scaling),
    "iteration": ("iteration", render_iteration),
    "speedups": ("iteration", render_speedups),
}
"""The task whose lines a section is made of."""


def render(folder: Path) -> None:
    """Write the sections of gates.md and its plots from the lines."""
    lines = paper.read_lines(NAME)
    made = {name: draw(paper.select(lines, task, *KEYS[task]), folder) for name, (task, draw) in RENDERERS.items()}
    paper.fill(folder / "gates.md", made)


# ------------------------------------------------------------------------------------------ command line


def thread_counts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Counts of "1,2,4", ascending; powers of two up to all cores if nothing is asked for."""
    if value is None:
        cores = hmf.config()["cores"]
        return tuple(sorted({count for count in (1, 2, 4, 8, 16, 32, 64) if count < cores} | {cores}))
    try:
        return tuple(sorted({int(count) for count in value.split(",")}))
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, got {value!r}") from None


def use_blas(context: click.Context, parameter: click.Parameter, path: str | None) -> str:
    """Let the methods that call BLAS use this library, one thread a call; its name."""
    if path is None:
        return ""
    os.environ["MKL_THREADING_LAYER"] = "SEQUENTIAL"  # MKL's default needs its OpenMP
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise click.BadParameter(str(error)) from None
    names = [kind + name for kind in "sd" for name in ("syrk", "gemm", "potrf", "potrs")]
    addresses = {name: ctypes.cast(getattr(library, f"{name}_"), ctypes.c_void_p).value or 0 for name in names}
    _als.use_blas(addresses)
    return "MKL" if "mkl" in Path(path).name else Path(path).name


@click.command(help=__doc__)
@paper.options(TASKS, render)
@paper.shapes_options
@click.option("--threads", callback=thread_counts, help="Such as 1,2,4. Default: powers of two and all cores.")
@click.option("--blas", callback=use_blas, help="Path of a shared library with BLAS and LAPACK, such as MKL's mkl_rt.")
@click.option("--spark/--no-spark", "with_spark", default=False, help="Add Spark MLlib, if installed.")
def main(
    device: str, profile: str, tasks: tuple[str, ...], budget: float | None, shapes: tuple[str, ...],
    factors: tuple[int, ...], methods: tuple[str, ...], repeats: int, threads: tuple[int, ...], blas: str,
    with_spark: bool,
) -> None:  # fmt: skip
    recorder, opened = Recorder.begin(NAME, device, budget)
    spark = Spark() if with_spark and Spark.installed() else None
    if with_spark and spark is None:
        recorder.problems.append("spark: pyspark, pyarrow and Java are not all installed")
    bench = Bench(recorder, threads, repeats, opened, spark, blas)

    def run(task: str, data: Drawn, work: Work) -> None:
        chosen = tuple(f for f in work.factors if f in factors or not factors)
        wanted = tuple(method for method in work.methods if method in methods or not methods)
        TASKS[task][device](bench, data, replace(work, factors=chosen, methods=wanted))

    works = works_of(device, profile, with_spark)
    paper.run_works(recorder, works, tasks or tuple(TASKS), shapes, run, implicit=True)
    recorder.finish()


def works_of(device: str, profile: str, with_spark: bool) -> dict[str, list[Work]]:
    """What runs; Spark joins the iterations of the shapes in part, and the scaling of EachMovie's."""
    works = PROFILES[device, profile]
    if not with_spark or device != "cpu":
        return works
    shapes = {shape: scale for work in works["iteration"] for shape, scale in work.shapes.items() if scale < 1}
    scaling = replace(works["scaling"][0], methods=("spark",))
    return works | {
        "scaling": [*works["scaling"], scaling],
        "iteration": [*works["iteration"], Work(shapes, (64,), ("spark",))],
    }


if __name__ == "__main__":
    main()
