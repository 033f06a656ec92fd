"""BALS (Chen, Fang, Liu, Yang, IEEE TPDS 2021) measured again: tables 1 to 4, figures 2, 3, 5, 9 to 15.

    python bench/paper_bals.py                                    CPU, quick: small shapes, 2 threads, about a minute
    python bench/paper_bals.py --device cpu --profile full --threads 16
    python bench/paper_bals.py --device cuda --profile full       one GPU
    python bench/paper_bals.py --render                           docs/evidence/bals.md and its plots from the lines

Tasks: "popularity" (fig. 3), "distribution" (table 1, fig. 5), "vacancies" (table 3's shares), "orders" (table 3's
benefit of skipping, on a GPU, and table 4), "steps" (fig. 2), "parameters" (fig. 9, on a GPU), "assemblies" (figs. 10
and 15), "tiles" (figs. 13 and 14), "methods" (figs. 11 and 12, table 2).

Data have the published sizes, and degrees fitted to the published figures (`bench/published.py`); on a
GPU machine they are drawn there. Answers are checked against float64 before anything is timed. On a GPU "orders",
"tiles" and "steps" time the users' normal equations alone, "assemblies" whole iterations; on a CPU all but "steps" time
whole half sweeps or iterations, since one kernel assembles and solves.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import common
import numpy as np
import paper_common as paper
import rivals
from paper_common import Drawn, Line, Recorder

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective
from hybridmf.core.validate import make_csr
from hybridmf.cpu.als import HalfSweep
from hybridmf.formats import BalsMatrix
from hybridmf.gpu import bals, cholesky_any
from hybridmf.plan import assemblies as plan_assemblies
from hybridmf.plan.als import ALS
from hybridmf.plan.make import make_plan
from hybridmf.plan.types import Plan, Settings

NAME = "paper_bals"

LAMBDA = 0.05

OBJECTIVE = Objective.explicit(LAMBDA, "count", False)

RANK = 32
"""The papers' tables 3 and 4 and heat maps have f = 32."""

PUBLISHED_TILE = (256, 384)
"""The best that the paper found after reordering (section 6.5)."""

TILES = ((256, 192), (256, 384), (1280, 192), (1280, 384))
"""Tiles for which vacancies are counted; the paper does not state those of its table 3."""

ORDERS = ("given", "by degree")

SIX = {"ml-10m": 1.0, "ml-20m": 1.0, "netflix": 1.0, "yahoo-r1": 1.0, "sls": 1.0, "rucci": 1.0}

FITTING = SIX | {"netflix": 0.4, "yahoo-r1": 0.4}
"""The six with at most 20 million entries."""


@dataclass(frozen=True)
class Work:
    """What a task runs on: shapes with their scales, ranks, tiles or other sizes."""

    shapes: dict[str, float]
    factors: tuple[int, ...] = (RANK,)
    heights: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    iterations: dict[str, int] = field(default_factory=dict)


SOME = {"ml-20m": 1.0, "netflix": 1.0}

WIDE_TILE_ROWS = 1280
"""Rows of a tile in figure 9."""

PARAMETERS = ((48, 8, 2), (96, 8, 2), (192, 8, 2), (192, 8, 4), (96, 16, 4), (192, 16, 2), (192, 16, 4), (96, 32, 4),
              (192, 32, 4), (192, 32, 8))  # fmt: skip
"""(yb, nb, dx = dy) of figure 9."""

POPULARITY_POINTS = 120
"""Columns of which figure 3 has the number of entries."""

PROFILES: dict[tuple[str, str], dict[str, tuple[Work, ...]]] = {
    ("cpu", "quick"): {
        "popularity": (Work({"ml-1m": 1.0}),),
        "distribution": (Work({"ml-1m": 1.0, "ml-10m": 0.3}),),
        "vacancies": (Work({"ml-1m": 1.0, "ml-10m": 0.3}),),
        "orders": (Work({"ml-1m": 1.0, "ml-10m": 0.3}),),
        "steps": (Work({"ml-1m": 1.0}, (16, 32, 64)),),
        "parameters": (),
        "assemblies": (Work({"ml-1m": 1.0}, (10, 32, 64)),),
        "tiles": (Work({"ml-1m": 1.0}, (RANK,), (16, 64, 256), (128, 512, 2048)),),
        "methods": (Work({"ml-1m": 1.0}, (32,), iterations={"ALS": 8, "CCD++": 15, "SGD": 20}),),
    },
    ("cpu", "full"): {
        "popularity": (Work({"netflix": 0.4}),),
        "distribution": (Work(FITTING), Work({"netflix": 1.0, "yahoo-r1": 1.0})),
        "vacancies": (Work(FITTING), Work({"netflix": 1.0, "yahoo-r1": 1.0})),
        "orders": (Work(FITTING),),
        "steps": (Work({"ml-1m": 1.0}, (10, 16, 32, 64, 100)),),
        "parameters": (),
        "assemblies": (Work({"ml-10m": 1.0}, (8, 10, 16, 32, 48, 64, 80, 96, 100)),),
        "tiles": (Work({"ml-10m": 1.0}, (RANK,), (16, 32, 64, 128, 256, 512), (128, 256, 512, 1024, 2048, 4096)),),
        "methods": (Work({"ml-1m": 1.0}, (8, 16, 32, 64, 96), iterations={"ALS": 12, "CCD++": 30, "SGD": 40}),),
    },
    ("cuda", "quick"): {
        "popularity": (Work({"ml-20m": 1.0}),),
        "distribution": (Work({"ml-20m": 1.0}),),
        "vacancies": (Work({"ml-20m": 1.0}),),
        "orders": (Work({"ml-20m": 1.0}),),
        "steps": (Work({"ml-20m": 1.0}, (32, 64)),),
        "parameters": (Work({"ml-20m": 1.0}, (64,)),),
        "assemblies": (Work({"ml-20m": 1.0}, (32, 64)),),
        "tiles": (Work({"ml-20m": 1.0}, (RANK,), (256, 1280), (192, 384)),),
        "methods": (Work({"ml-1m": 1.0}, (32,), iterations={"ALS": 8, "CCD++": 15, "SGD": 20}),),
    },
    ("cuda", "full"): {
        "popularity": (Work({"netflix": 1.0}),),
        "distribution": (Work({"netflix": 1.0, "yahoo-r1": 1.0}),),
        "vacancies": (Work({"netflix": 1.0, "yahoo-r1": 1.0}),),
        "orders": (Work(SOME | SIX),),
        "steps": (Work({"netflix": 1.0}, (10, 16, 32, 64, 100)),),
        "parameters": (Work({"netflix": 1.0}, (64,)),),
        "assemblies": (
            Work({"ml-20m": 1.0}, (8, 16, 32, 64, 100)),
            Work({"netflix": 1.0}, (8, 16, 32, 64, 100)),
            Work({"ml-10m": 1.0, "yahoo-r1": 1.0, "sls": 1.0, "rucci": 1.0}, (8, 16, 32, 64, 100)),
        ),
        "tiles": (
            Work({"ml-20m": 1.0}, (RANK,), (256, 768, 1280, 2816, 5376), (144, 192, 288, 384)),
            Work({"ml-10m": 1.0, "sls": 1.0, "rucci": 1.0}, (RANK,), (256, 768, 1280, 2816), (144, 192, 384)),
            Work({"netflix": 1.0, "yahoo-r1": 1.0}, (RANK,), (256, 768, 1280, 2816), (192, 384)),
        ),
        "methods": (
            Work({"ml-20m": 1.0}, (32, 128), iterations={"ALS": 10, "CCD++": 25, "SGD": 30}),
            Work(
                {shape: 1.0 for shape in SIX if shape != "ml-20m"}, (32,), iterations={"ALS": 8, "CCD++": 25, "SGD": 30}
            ),
            Work({"netflix": 1.0}, (128,), iterations={"ALS": 8, "CCD++": 25, "SGD": 40}),
            Work(
                {shape: 1.0 for shape in SIX if shape not in SOME},
                (8, 16, 64, 96),
                iterations={"ALS": 8, "CCD++": 25, "SGD": 30},
            ),
            Work(SOME, (8, 16, 64, 96), iterations={"ALS": 8, "CCD++": 25, "SGD": 30}),
        ),
    },
}
"""What each task runs on, by device and profile; what fits on a CPU's memory and needs no GPU is left to the CPU."""

CPU_ASSEMBLIES = {"simd": "ours (simd)", "bals": "BALS tiles", "blas3": "Gates, Level 3", "rank1": "Gates, Level 2"}
GPU_ASSEMBLIES = {"fused": "ours (fused)", "bals": "BALS", "bals_local": "BALS, the paper's mapping",
                  "sparse_syrk": "Gates", "sparse_syrk_published": "Gates, as printed", "mo_als": "cuMF"}  # fmt: skip


@dataclass
class Bench:
    """State of all tasks."""

    recorder: Recorder
    threads: int
    repeats: int
    device: Any = None
    wanted: tuple[str, ...] = ()

    def methods(self, names: Collection[str]) -> list[str]:
        """Those that are asked for, in the order in which they are asked for; all if none are."""
        return [name for name in self.wanted or names if name in names]

    @property
    def kind(self) -> str:
        """Where it runs."""
        return "cpu" if self.device is None else "cuda"

    def note(self, task: str, line: Line) -> None:
        """Record a line and show it in short."""
        self.recorder.note(task, line | ({"threads": self.threads} if self.device is None else {}))
        hidden = ("users", "items", "published", "runs")
        shown = {key: value for key, value in line.items() if key not in hidden}
        click.echo(f"{task:13s} " + ", ".join(f"{key} {brief(value)}" for key, value in shown.items()))


def brief(value: Any) -> str:
    """A value in a few characters."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {brief(each)}" for key, each in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------ data alone


def run_distribution(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 5, and table 1 as drawn."""
    bench.note("distribution", paper.distribution(data))


def run_popularity(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 3: entries of columns as they come and sorted, at evenly spaced places."""
    counts = np.diff(data.item.indptr)
    places = np.unique(np.linspace(0, len(counts) - 1, POPULARITY_POINTS).astype(np.int64))
    line = {"places": places.tolist(), "given": counts[places].tolist(),
            "sorted": np.sort(counts)[::-1][places].tolist()}  # fmt: skip
    bench.recorder.note("popularity", data.line | line)
    click.echo(f"popularity    {data.name}: {counts.max():,} entries at most, median {np.median(counts):,.0f}")


def run_vacancies(bench: Bench, data: Drawn, work: Work) -> None:
    """The shares of table 3."""
    for order, matrix in ordered(data).items():
        for tile in TILES:
            found = BalsMatrix.from_csr(matrix, *tile, num_threads=bench.threads).statistics()
            line = {"order": order, "tile": list(tile)} | {key: float(value) for key, value in found.items()}
            bench.note("vacancies", data.line | line)


def ordered(data: Drawn) -> dict[str, Any]:
    """The users' matrix as it comes and with rows and columns by degree."""
    return {"given": data.user, "by degree": data.by_degree}


# ------------------------------------------------------------------------------------------ on a CPU


def cpu_plan(bench: Bench, shape: tuple[int, int], nnz: int, factors: int, **options: Any) -> Plan:
    """The plan of a fit on the CPU."""
    asked: dict[str, Any] = {
        "factors": factors,
        "dtype": "float32",
        "num_threads": bench.threads,
        "device": "cpu",
        "method": ALS,
    }
    return make_plan(OBJECTIVE, Settings.check(**asked, **options), shape, nnz)


def half_sweep(bench: Bench, matrix: Any, factors: int, tile: tuple[int, int] | None = None, **options: Any) -> Any:
    """The users' half sweep from fixed random factors, as a function; returns what it solved."""
    plan = cpu_plan(bench, matrix.shape, matrix.nnz, factors, **options)
    if tile is not None:
        plan = plan.changed(tile_rows=tile[0], tile_cols=tile[1])
    half = HalfSweep("user", matrix, OBJECTIVE, plan)
    fixed = Factors(random_factors(matrix.shape[1], factors))
    return lambda: half.solve(fixed, 0.0).matrix


def random_factors(rows: int, factors: int) -> np.ndarray:
    """Positive, so that sums over entries do not cancel; float32."""
    values = np.abs(np.random.default_rng(0).standard_normal((rows, factors), dtype=np.float32))
    scaled: np.ndarray = values / np.float32(np.sqrt(factors))
    return scaled


def timed_alike(runs: dict[str, Callable[[], np.ndarray]], repeats: int, tolerance: float = 1e-3) -> dict[str, Line]:
    """Seconds of runs that must give the same answer, in turn.

    Raises
    ------
    AssertionError
        They do not.
    """
    answers = {name: run() for name, run in runs.items()}
    first = next(iter(answers.values()))
    size = float(np.abs(first).max())
    worst = {name: float(np.abs(answer - first).max()) / size for name, answer in answers.items()}
    assert max(worst.values()) <= tolerance, worst
    return {name: paper.spread(values) for name, values in common.alternate(runs, repeats).items()}


def iteration(bench: Bench, matrix: Any, factors: int, **options: Any) -> Callable[[], Any]:
    """A full iteration of ALS on the CPU."""
    model = hmf.ExplicitALS(
        factors, biases=False, regularization=LAMBDA, regularization_scaling="count", num_threads=bench.threads,
        device="cpu", random_state=0, **options,
    )  # fmt: skip
    return rivals.Ours(model, matrix).step


def cpu_orders(bench: Bench, data: Drawn, work: Work) -> None:
    """Table 4 on the CPU: an iteration on tiles and on CSR, as it comes and by degree."""
    for f in work.factors:
        runs = {
            (method, order): iteration(bench, data.user, f, assembly=method, reorder=how)
            for method in ("bals", "simd")
            for order, how in zip(ORDERS, ("none", "both"), strict=True)
        }
        seconds = common.alternate({" ".join(key): run for key, run in runs.items()}, bench.repeats)
        for key in runs:
            line = {"factors": f, "method": key[0], "order": key[1], "seconds": paper.spread(seconds[" ".join(key)])}
            bench.note("orders", data.line | line)


def cpu_steps(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 2 on one thread: all of a half sweep, right-hand sides as a sparse product, solves of the same rows."""
    alone = replace(bench, threads=1)
    users = data.user
    first = users.indptr[:-1][np.diff(users.indptr) > 0]
    one_each = make_csr(
        np.concatenate(([0], np.cumsum(np.diff(users.indptr) > 0))), users.indices[first], users.data[first],
        users.shape,
    )  # fmt: skip
    for f in work.factors:
        for method in ("simd", "blas3"):
            table = random_factors(users.shape[1], f)
            runs = {
                "all": half_sweep(alone, users, f, assembly=method),
                "rhs": lambda table=table: users @ table,
                "solve": half_sweep(alone, one_each, f, assembly=method),
            }
            found = {name: paper.spread(v) for name, v in common.alternate(runs, bench.repeats).items()}
            rhs, solve = found["rhs"]["median"], found["solve"]["median"]
            steps = {"matrices": max(0.0, found["all"]["median"] - rhs - solve), "rhs": rhs, "solve": solve}
            alone.note("steps", data.line | {"factors": f, "method": method, "seconds": steps, "spread": found})


def cpu_assemblies(bench: Bench, data: Drawn, work: Work) -> None:
    """Figures 10 and 15 on the CPU: users' half sweeps of each assembly over the rank."""
    for f in work.factors:
        if not bench.recorder.has_time(f"assemblies, {data.name}, f = {f}"):
            return
        runs = {name: half_sweep(bench, data.user, f, assembly=name) for name in CPU_ASSEMBLIES}
        for name, seconds in timed_alike(runs, bench.repeats).items():
            rate = flops(data.user, f) / seconds["median"] / 1e9
            line = {"factors": f, "method": name, "seconds": seconds, "gflops": rate}
            bench.note("assemblies", data.line | line)


def flops(matrix: Any, f: int, *, solves: bool = True) -> float:
    """Useful work of a half sweep, or of its sums alone."""
    rows = int(np.count_nonzero(np.diff(matrix.indptr)))
    return float(matrix.nnz) * f * (f + 1) + (rows * (f**3 / 3 + 2.0 * f * f) if solves else 0.0)


def cpu_tiles(bench: Bench, data: Drawn, work: Work) -> None:
    """Figures 13 and 14 on the CPU."""
    for order, matrix in ordered(data).items():
        for f in work.factors:
            runs = {"simd": half_sweep(bench, matrix, f, assembly="simd")}
            for height, width in itertools.product(work.heights, work.widths):
                runs[f"{height} x {width}"] = half_sweep(bench, matrix, f, (height, width), assembly="bals")
            for name, seconds in timed_alike(runs, bench.repeats).items():
                tile = None if name == "simd" else [int(side) for side in name.split(" x ")]
                method = "simd" if tile is None else "bals"
                line = {"factors": f, "method": method, "order": order, "tile": tile, "seconds": seconds,
                        "gflops": flops(matrix, f) / seconds["median"] / 1e9}  # fmt: skip
                bench.note("tiles", data.line | line)


# ------------------------------------------------------------------------------------------ on a GPU


def gpu_runner(bench: Bench, matrix: Any, factors: int) -> Any:
    """`gpu.Hermitians` of a matrix: the users' normal equations by any published kernel, and their check."""
    import gpu

    return gpu.Hermitians.prepare(bench.device, matrix, factors)


def tiles_step(
    prepared: Any, tile: tuple[int, int], variant: Any, *, skip_vacant: bool = True
) -> tuple[Callable[[], None], Line]:
    """The BALS kernel on tiles of a size; what the tiles are like."""
    tiles, more = prepared._tiled(tile)
    rows = prepared.matrix.shape[0]
    out = prepared.matrices[:rows], prepared.rhs[:rows]
    blocks, device, entries = bals.RowBlocks.of(tiles, 0, -(-rows // tile[0])), prepared.device, prepared.entries

    def run() -> None:
        bals.bals(device, out, prepared.table, entries, blocks, variant, tiles=tiles, skip_vacant=skip_vacant)

    return run, more


def gpu_time(bench: Bench, prepared: Any, run: Callable[[], None], tiled: bool) -> Line:
    """Milliseconds of a kernel whose sums are right.

    Raises
    ------
    gpu.WrongAnswerError
    """
    import gpu

    for array in (prepared.matrices, prepared.rhs):
        array.fill(np.nan)  # what another kernel left must not pass for an answer
    bench.device.synchronize()
    run()
    error = prepared.error(tiled)
    if not error <= gpu.SUMS_TOLERANCE:
        raise gpu.WrongAnswerError(f"error {error:.2e}")
    times = [each[0] for each in gpu.timed(bench.device, [run], bench.repeats)]
    return {name: value / 1e3 for name, value in paper.spread(times).items()}


def gpu_orders(bench: Bench, data: Drawn, work: Work) -> None:
    """Tables 3 and 4: users' sums by each kernel, by order, with and without passing over vacant tiles."""
    for f, (order, matrix) in itertools.product(work.factors, ordered(data).items()):
        prepared = gpu_runner(bench, matrix, f)
        own = plan_assemblies.bals_tile_sizes(f, 4, bench.device.spec)
        printed = prepared.in_order()
        cases: dict[str, Callable[[], tuple[Callable[[], None], Line]]] = {
            "sparse_syrk": partial(prepared.by_rows, "sparse_syrk"),
            "sparse_syrk_published": printed.as_printed,
            "bals local": partial(tiles_step, prepared, PUBLISHED_TILE, "local"),
            "bals local, all tiles": partial(tiles_step, prepared, PUBLISHED_TILE, "local", skip_vacant=False),
            "bals chip": partial(tiles_step, prepared, own, "chip"),
        }
        for method, prepare in cases.items():
            with bench.recorder.case(f"orders, {data.name}, {method}, {order}"):
                run, more = prepare()
                whole = printed if method == "sparse_syrk_published" else prepared
                seconds = gpu_time(bench, whole, run, method.startswith("bals"))
                line = {"factors": f, "method": method, "order": order, "seconds": seconds,
                        "gflops": flops(matrix, f, solves=False) / seconds["median"] / 1e9}  # fmt: skip
                bench.note("orders", data.line | line | {key: more[key] for key in ("tile", "reuse") if key in more})
            if method != "bals local":
                prepared.tiles.clear()


def gpu_steps(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 2: matrices alone, with right-hand sides in the same pass, right-hand sides as a sparse product, solves.

    Our kernel has no matrices alone: its pass counts as them.
    """
    import gpu

    for f, method in itertools.product(work.factors, ("sparse_syrk", "sparse_syrk_published")):
        with bench.recorder.case(f"steps, {data.name}, f = {f}, {method}"):
            prepared = gpu_runner(bench, data.user, f)
            if method == "sparse_syrk":
                alone = together = prepared.by_rows(method)[0]
            else:
                prepared = prepared.in_order()
                alone, together = (prepared.as_printed(with_rhs=with_rhs)[0] for with_rhs in (False, True))
            solve, solutions = systems_step(bench, prepared)
            product = product_step(bench, prepared)
            together()
            solve()
            error = solution_error(prepared, bench.device.download(solutions))
            if not error <= gpu.TOLERANCES["float32"]:
                raise gpu.WrongAnswerError(f"error {error:.2e}")
            rounds = gpu.timed(bench.device, [alone, product, together, solve], bench.repeats)
            times = [common.median(list(each)) / 1e3 for each in zip(*rounds, strict=True)]
            steps = dict(zip(("matrices", "rhs", "together", "solve"), times, strict=True))
            line = {"factors": f, "method": method, "together": steps.pop("together"), "seconds": steps, "error": error}
            bench.note("steps", data.line | line)


def gpu_parameters(bench: Bench, data: Drawn, work: Work) -> None:
    """Figure 9: the paper's mapping over (yb, nb, dx, dy) on tiles of 1280 rows."""
    for f in work.factors:
        prepared = gpu_runner(bench, data.user, f)
        configs = {
            (width, nb, side): bals.BalsLocalConfig(
                f, 4, WIDE_TILE_ROWS, width, nb, side, side, min(1024 // side**2, 256)
            )
            for width, nb, side in PARAMETERS
        }
        fitting = {key: each for key, each in configs.items() if each.shared_bytes <= bench.device.spec.shared_bytes}
        paper.compile_bals(bench.device, fitting.values())
        for (width, nb, side), config in fitting.items():
            case = f"parameters, {data.name}, f = {f}, ({width}, {nb}, {side}, {side})"
            if not bench.recorder.has_time(case):
                return
            with bench.recorder.case(case):
                run, _ = tiles_step(prepared, (WIDE_TILE_ROWS, width), config)
                seconds = gpu_time(bench, prepared, run, True)
                line = {"factors": f, "parameters": [width, nb, side, side], "sums": config.sums,
                        "in_registers": config.in_registers, "seconds": seconds}  # fmt: skip
                bench.note("parameters", data.line | line)


def systems_step(bench: Bench, prepared: Any) -> tuple[Callable[[], None], Any]:
    """Adds the penalty to the sums and solves the systems; where the solutions go."""
    device, pieces, f = bench.device, prepared.pieces, prepared.factors
    count = len(pieces.segments)
    sums = prepared.matrices[:count], prepared.rhs[:count]
    slots, rows = device.upload(pieces.slots), device.upload(pieces.rows)
    degrees = np.diff(prepared.matrix.indptr)
    scale = device.upload(degrees[pieces.rows].astype(np.float32))
    ridge = device.upload(np.full(f, LAMBDA, np.float32))
    solutions = device.zeros((len(degrees), prepared.table.shape[1]), np.float32)
    status = device.zeros(len(degrees), np.int32)

    def run() -> None:
        cholesky_any.complete(device, *sums, slots, None, ridge, scale)
        cholesky_any.cholesky_solve(device, solutions, status, sums, slots, rows, 4.8e-7)

    return run, solutions


def product_step(bench: Bench, prepared: Any) -> Callable[[], Any]:
    """All right-hand sides as one product of the sparse ratings with the factors: cuSPARSE, or SciPy where emulated."""
    import gpu

    matrix, f = prepared.matrix, prepared.factors
    if gpu.array_module(bench.device) is np:
        return lambda: matrix @ prepared.table[:, :f]
    import cupy
    from cupyx.scipy import sparse

    indptr = cupy.asarray(matrix.indptr.astype(np.int32))  # cuSPARSE through CuPy has 32-bit pointers
    ratings = sparse.csr_matrix((prepared.entries.ratings, prepared.entries.indices, indptr), shape=matrix.shape)
    factors = cupy.asfortranarray(prepared.table[:, :f])
    return lambda: ratings @ factors


def solution_error(prepared: Any, solutions: np.ndarray) -> float:
    """Largest residual of a handful of rows."""
    import gpu

    matrix, f = prepared.matrix, prepared.factors
    errors = []
    for row in gpu.handful(np.diff(matrix.indptr)):
        A, b = gpu.normal_equations(matrix, row, prepared.host_table[:, :f], OBJECTIVE, None)
        errors.append(gpu.residual(A, solutions[row, :f].astype(np.float64), b))
    return float(np.max(errors))


def gpu_assemblies(bench: Bench, data: Drawn, work: Work) -> None:
    """Figures 10 and 15: full iterations over the rank."""
    methods = bench.methods(GPU_ASSEMBLIES)
    paper.compile_ahead(bench.device, work.factors, methods, implicit=False)
    size = plan_assemblies.bals_tile_sizes(max(work.factors, default=RANK), 4, bench.device.spec, local=True)
    with kept_tiles(size):
        for f, method in itertools.product(work.factors, methods):
            case = f"assemblies, {data.name}, f = {f}, {method}"
            if bench.recorder.has_time(case):
                with bench.recorder.case(case):
                    gpu_assembly(bench, data, f, method)


def gpu_assembly(bench: Bench, data: Drawn, f: int, method: str) -> None:
    """An iteration of one assembly at one rank."""
    sweeps, error, seconds = paper.timed_iteration(bench.device, data, "explicit", f, method, bench.repeats)
    work_done = sweeps.flops("item") + sweeps.flops("user")
    line = {"factors": f, "method": method, "seconds": seconds, "error": error,
            "gflops": work_done / seconds["median"] / 1e9}  # fmt: skip
    bench.note("assemblies", data.line | line)


@contextmanager
def kept_tiles(size: tuple[int, int]) -> Iterator[None]:
    """Tiles of this size, that of the paper's mapping at every rank, are built once: it takes longer than all else."""
    from hybridmf.gpu import half

    build, upload = half.tiled, bals.upload_tiles
    built: dict[tuple[int, int], BalsMatrix] = {}
    uploaded: dict[int, Any] = {}

    def tiled_once(csr: Any, rows: int, cols: int, threads: int) -> BalsMatrix:
        if (rows, cols) != size:
            return build(csr, rows, cols, threads)
        key = csr.data.ctypes.data, csr.nnz
        if key not in built:
            built[key] = build(csr, rows, cols, threads)
        return built[key]

    def upload_once(device: Any, matrix: BalsMatrix) -> Any:
        if all(matrix is not each for each in built.values()):
            return upload(device, matrix)
        if id(matrix) not in uploaded:
            uploaded[id(matrix)] = upload(device, matrix)
        return uploaded[id(matrix)]

    with mock.patch.object(half, "tiled", tiled_once), mock.patch.object(bals, "upload_tiles", upload_once):
        yield


def gpu_tiles(bench: Bench, data: Drawn, work: Work) -> None:
    """Figures 13 and 14: users' sums over the size of the tiles, in the paper's mapping; Gates' kernel beside it."""
    for f, (order, matrix) in itertools.product(work.factors, ordered(data).items()):
        prepared = gpu_runner(bench, matrix, f)
        done = flops(matrix, f, solves=False)

        def measure(method: str, tile: tuple[int, int] | None, step: Any, order: str = order, f: int = f,
                    prepared: Any = prepared, done: float = done) -> None:  # fmt: skip
            with bench.recorder.case(f"tiles, {data.name}, {method}, {order}, {tile}"):
                run, more = step()
                seconds = gpu_time(bench, prepared, run, tile is not None)
                line = {"factors": f, "method": method, "order": order, "tile": tile and list(tile),
                        "seconds": seconds, "gflops": done / seconds["median"] / 1e9}  # fmt: skip
                bench.note("tiles", data.line | line | ({"reuse": more["reuse"]} if tile else {}))
            prepared.tiles.clear()

        measure("sparse_syrk", None, partial(prepared.by_rows, "sparse_syrk"))
        own = plan_assemblies.bals_tile_sizes(f, 4, bench.device.spec)
        measure("bals chip", own, partial(tiles_step, prepared, own, "chip"))
        grid = list(itertools.product(work.heights, work.widths))
        sizes = ({"tile_rows": height, "tile_cols": width} for height, width in grid)
        local = [bals.BalsLocalConfig.default(f, 4, bench.device.spec, **size) for size in sizes]
        paper.compile_bals(bench.device, local)
        for tile in grid:
            if bench.recorder.has_time(f"tiles, {data.name}, {order}, {tile}"):
                measure("bals local", tile, partial(tiles_step, prepared, tile, "local"))


# ------------------------------------------------------------------------------------------ on either


MANY = 50_000_000
"""Entries from which a hundredth is enough to hold out; errors of a tenth would take most of the time."""


def run_methods(bench: Bench, data: Drawn, work: Work) -> None:
    """Figures 11 and 12: held-out RMSE over time of ALS on tiles, CCD++ and SGD, as `hmf.compare` measures it."""
    ratings = hmf.Ratings.from_matrix(data.user)
    for f in work.factors:
        if not bench.recorder.has_time(f"methods, {data.name}, f = {f}"):
            return
        with bench.recorder.case(f"methods, {data.name}, f = {f}"):
            if bench.device is not None:  # compiles, outside of all clocks
                for model in methods(bench, f, dict.fromkeys(work.iterations, 1)).values():
                    model.fit(ratings)
            held_out = 0.1 if data.nnz < MANY else 0.01
            found = methods(bench, f, work.iterations)
            result = hmf.compare(ratings, found, devices=[bench.kind], test_size=held_out)
            told = json.loads(result.to_json())
            runs = [{key: run[key] for key in ("method", "seconds", "scores", "objective")} for run in told["runs"]]
            line = {"factors": f, "runs": runs, "skipped": told["skipped"], "held_out": held_out}
            bench.note("methods", data.line | line)


def methods(bench: Bench, f: int, iterations: dict[str, int]) -> dict[str, Any]:
    """Each family as the paper has it: the same lambda, ALS-WR's penalty."""
    same: dict[str, Any] = {"factors": f, "regularization": LAMBDA, "biases": False, "random_state": 0}
    if bench.device is None:
        same["num_threads"] = bench.threads
    schedule: Any = "blocks" if bench.device is None else "batch_hogwild"
    return {
        "ALS, BALS tiles": hmf.ExplicitALS(**same, iterations=iterations["ALS"], assembly="bals"),
        "ALS, ours": hmf.ExplicitALS(**same, iterations=iterations["ALS"]),
        "CCD++": hmf.CCD(**same, iterations=iterations["CCD++"]),
        f"SGD, {schedule}": hmf.SGD(**same, iterations=iterations["SGD"], schedule=schedule),
    }


Task = Callable[[Bench, Drawn, Work], None]

TASKS: dict[str, dict[str, Task]] = {
    "popularity": {"cpu": run_popularity, "cuda": run_popularity},
    "distribution": {"cpu": run_distribution, "cuda": run_distribution},
    "vacancies": {"cpu": run_vacancies, "cuda": run_vacancies},
    "orders": {"cpu": cpu_orders, "cuda": gpu_orders},
    "steps": {"cpu": cpu_steps, "cuda": gpu_steps},
    "parameters": {"cuda": gpu_parameters},
    "assemblies": {"cpu": cpu_assemblies, "cuda": gpu_assemblies},
    "tiles": {"cpu": cpu_tiles, "cuda": gpu_tiles},
    "methods": {"cpu": run_methods, "cuda": run_methods},
}


# ------------------------------------------------------------------------------------------ the page

PAPER_TABLE_3 = {
    "ml-10m": ("43.67 / 49.44 (93.1)", "87.92 / 7.82 (95.7)", "11.88", "16.22"),
    "ml-20m": ("18.30 / 63.85 (82.2)", "27.81 / 57.36 (85.2)", "7.51", "0.25"),
    "netflix": ("2.38 / 24.10 (26.5)", "0.59 / 69.59 (70.2)", "0", "0.15"),
    "yahoo-r1": ("52.28 / 45.73 (98.0)", "81.13 / 17.31 (98.4)", "23.65", "7.13"),
    "sls": ("26.35 / 71.85 (98.2)", "19.35 / 79.07 (98.4)", "9.04", "13.31"),
    "rucci": ("72.32 / 26.92 (99.2)", "72.95 / 26.29 (99.2)", "60.37", "41.60"),
}
"""Per cent of vacant tiles / segments before and after reordering; per cent gained by skipping before and after."""

PAPER_TABLE_4 = {
    "ml-10m": "23.68 / 19.87 / 14.67", "ml-20m": "11.72 / 11.92 / 14.07", "netflix": "- / 8.96 / 10.55",
    "yahoo-r1": "- / 5.87 / 20.38", "sls": "- / 1.29 / 0.63", "rucci": "- / 2.02 / 0.18",
}  # fmt: skip
"""Per cent gained by reordering on K20C / TITAN X / TITAN RTX. The text at hand is damaged: what is not legible of the
first has a dash; the other two have the averages that the paper states (8.32 and 10.08)."""


def render_distribution(lines: list[Line], folder: Path) -> str:
    """Table 1 and figure 5, of the largest scale that was drawn of each shape."""
    return paper.distribution_part(lines, folder / "bals-distribution.svg", ("users",), "Users by number of entries")


def render_vacancies(lines: list[Line], folder: Path) -> str:
    """Shares of vacant tiles / segments by order and tile, beside table 3."""
    found = {(paper.label(line), tuple(line["tile"]), line["order"]): line for line in lines}
    rows = []
    for name, shape in dict.fromkeys((paper.label(line), line["shape"]) for line in lines):
        paper_says = PAPER_TABLE_3.get(shape, ("-", "-"))
        rows.append([f"{name}, paper", "?", *paper_says[:2], "", ""])
        for tile in dict.fromkeys(key[1] for key in found if key[0] == name):
            both = [found.get((name, tile, order)) for order in ORDERS]
            shares = [vacant(line) if line else "-" for line in both]
            reuse = [f"{line['reuse_factor']:.2f}" if line else "-" for line in both]
            rows.append([name, f"{tile[0]} x {tile[1]}", *shares, *reuse])
    header = ["", "tile", "as it comes: tiles / segments vacant (both), %", "by degree", "reuse as it comes",
              "by degree"]  # fmt: skip
    return paper.table(header, rows) if rows else ""


def vacant(line: Line) -> str:
    """Vacant tiles, and vacant segments outside them, of all; and both together, which is what rows leave empty."""
    tiles, segments = 100 * line["vacant_tile_share"], 100 * line["vacant_segment_share"]
    return f"{tiles:.2f} / {segments:.2f} ({tiles + segments:.1f})"


def render_orders(lines: list[Line], folder: Path) -> str:
    """Gains of the degree order and of passing over vacant tiles."""

    def body(_: str, group: list[Line]) -> str:
        found = {(paper.label(line), line["method"], line["order"]): line["seconds"]["median"] for line in group}
        methods = list(dict.fromkeys(line["method"] for line in group))
        rows = []
        for name, shape in dict.fromkeys((paper.label(line), line["shape"]) for line in group):
            cells = []
            for method in methods:
                times = [found.get((name, method, order)) for order in ORDERS]
                cells.append(f"{1e3 * times[0]:.2f} / {1e3 * times[1]:.2f} ({gain(times[0], times[1])})"
                             if times[0] and times[1] else "-")  # fmt: skip
            rows.append([name, *cells, *skipping(found, name), PAPER_TABLE_4.get(shape, "-"),
                         " / ".join(PAPER_TABLE_3.get(shape, ("", "", "-", "-"))[2:])])  # fmt: skip
        header = ["ms as it comes / by degree (gain)", *methods, "gain of skipping, as it comes / by degree",
                  "paper: gain of order, K20C / X / RTX, %", "paper: gain of skipping, %"]  # fmt: skip
        return paper.table(header, rows)

    return paper.sections(paper.by_hardware(lines), body)


def gain(before: float, after: float) -> str:
    """How much faster, in per cent."""
    return f"{100 * (before / after - 1):+.1f} %"


def skipping(found: dict[tuple[str, str, str], float], name: str) -> list[str]:
    """What passing over vacant tiles gains, in both orders."""
    pairs = [[found.get((name, f"bals local{rest}", order)) for rest in (", all tiles", "")] for order in ORDERS]
    return [" / ".join(gain(pair[0], pair[1]) if pair[0] and pair[1] else "-" for pair in pairs)]


def render_steps(lines: list[Line], folder: Path) -> str:
    """Shares of the three steps; one bar for each rank."""
    if not lines:
        return ""

    def body(name: str, group: list[Line]) -> str:
        rows = []
        for line in group:
            steps = line["seconds"]
            total = sum(steps.values())
            shares = [f"{1e3 * steps[key]:.2f} ({steps[key] / total:.0%})" for key in ("matrices", "rhs", "solve")]
            together = f"{1e3 * line['together']:.2f}" if "together" in line else "-"
            rows.append([f"{paper.label(line)}, {line['method']}", line["factors"], *shares, together])
        file = f"bals-steps-{paper.slug(name)}.svg"
        draw_steps(folder / file, group)
        header = ["ms (share)", "f", "S1 matrices", "S2 right-hand sides", "S3 solves", "S1 and S2 in one pass"]
        return f"{paper.table(header, rows)}\n\n{paper.picture(file, 'Shares of the three steps')}"

    return paper.sections(paper.by_hardware(lines), body)


def render_popularity(lines: list[Line], folder: Path) -> str:
    """Figure 3, of the largest scale that was drawn."""
    chosen = paper.largest(lines)
    if not chosen:
        return ""
    file = "bals-popularity.svg"
    with paper.figure(folder / file, 3.2 * len(chosen), 2.6) as drawing:
        for panel, line in zip(drawing.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
            panel.vlines(line["places"], 0, line["given"], linewidth=1, label="as it comes")
            panel.plot(line["places"], line["sorted"], color="C3", label="by degree")
            panel.set_title(paper.label(line), fontsize=8)
            panel.set_xlabel("items")
            panel.set_ylabel("entries")
            panel.legend(fontsize=7)
    return paper.picture(file, "Entries of items")


def render_parameters(lines: list[Line], folder: Path) -> str:
    """Figure 9: milliseconds by (yb, nb, dx, dy), best first."""

    def body(name: str, group: list[Line]) -> str:
        rows = [
            [f"{paper.label(line)}, {line['factors']}", ", ".join(map(str, line["parameters"])),
             f"{1e3 * line['seconds']['median']:.1f}", f"{line['sums']:,}",
             "registers" if line["in_registers"] else "local memory"]
            for line in sorted(group, key=lambda line: line["seconds"]["median"])
        ]  # fmt: skip
        return paper.table(["f", "yb, nb, dx, dy", "ms", "sums of a thread", "in"], rows)

    return paper.sections(paper.by_hardware(lines), body)


def draw_steps(path: Path, lines: list[Line]) -> None:
    """Stacked bars."""
    with paper.figure(path, 7.0, 2.6) as drawing:
        panel = drawing.subplots()
        names = [f"{line['method']}\nf = {line['factors']}" for line in lines]
        below = np.zeros(len(lines))
        for key, text in (("matrices", "S1 matrices"), ("rhs", "S2 right-hand sides"), ("solve", "S3 solves")):
            shares = np.array([line["seconds"][key] / sum(line["seconds"].values()) for line in lines])
            panel.bar(names, shares, bottom=below, label=text)
            below += shares
        panel.set_ylabel("share of the time")
        panel.tick_params(axis="x", labelsize=6)
        panel.legend(fontsize="small", loc="lower right")


def render_assemblies(lines: list[Line], folder: Path) -> str:
    """Milliseconds and rates of each assembly over the rank."""

    def body(name: str, group: list[Line]) -> str:
        parts = []
        for shape in dict.fromkeys(paper.label(line) for line in group):
            those = [line for line in group if paper.label(line) == shape]
            methods = list(dict.fromkeys(line["method"] for line in those))
            found = {(line["factors"], line["method"]): line for line in those}
            rows = []
            for f in sorted({line["factors"] for line in those}):
                cells = [found.get((f, method)) for method in methods]
                texts = [f"{1e3 * c['seconds']['median']:.1f} ({c['gflops']:,.0f})" if c else "-" for c in cells]
                rows.append([f, *texts])
            file = f"bals-assemblies-{paper.slug(shape)}-{paper.slug(name)}.svg"
            draw_curves(folder / file, those)
            header = [f"{shape}: f", *(f"{method}, ms (GFLOP/s)" for method in methods)]
            parts.append(f"{paper.table(header, rows)}\n\n{paper.picture(file, f'Rates over the rank, {shape}')}")
        return "\n\n".join(parts)

    return paper.sections(paper.by_hardware(lines), body)


def draw_curves(path: Path, lines: list[Line]) -> None:
    """Rate over the rank, one curve a method."""
    with paper.figure(path, 6.0, 3.0) as drawing:
        panel = drawing.subplots()
        for method in dict.fromkeys(line["method"] for line in lines):
            points = sorted((line["factors"], line["gflops"]) for line in lines if line["method"] == method)
            panel.plot(*zip(*points, strict=True), marker=".", label=method)
        panel.set_xlabel("f")
        panel.set_ylabel("GFLOP/s, useful work")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="small")


def render_tiles(lines: list[Line], folder: Path) -> str:
    """Heat maps over the size of tiles, in both orders, and the best of each."""

    def body(name: str, group: list[Line]) -> str:
        parts = []
        for shape in dict.fromkeys(paper.label(line) for line in group):
            those = [line for line in group if paper.label(line) == shape]
            file = f"bals-tiles-{paper.slug(shape)}-{paper.slug(name)}.svg"
            draw_heat_maps(folder / file, those)
            rows = []
            for order in ORDERS:
                for method in dict.fromkeys(line["method"] for line in those):
                    mine = [line for line in those if line["order"] == order and line["method"] == method]
                    if mine:
                        best = max(mine, key=lambda line: line["gflops"])
                        worst = min(line["gflops"] for line in mine)
                        tile = " x ".join(map(str, best["tile"])) if best["tile"] else "-"
                        rows.append([f"{method}, {order}", tile, f"{best['gflops']:,.0f}", f"{worst:,.0f}"])
            header = [f"{shape}, f = {those[0]['factors']}", "best tile", "its GFLOP/s", "worst GFLOP/s"]
            parts.append(f"{paper.table(header, rows)}\n\n{paper.picture(file, f'Rates over tile sizes, {shape}')}")
        return "\n\n".join(parts)

    return paper.sections(paper.by_hardware(lines), body)


def draw_heat_maps(path: Path, lines: list[Line]) -> None:
    """One map an order; what has no tiles of that sort is named in the title."""
    grids = [line for line in lines if line["method"] in ("bals", "bals local")]
    heights = sorted({line["tile"][0] for line in grids})
    widths = sorted({line["tile"][1] for line in grids})
    rates = [line["gflops"] for line in grids]
    with paper.figure(path, 9.0, 3.2) as drawing:
        for panel, order in zip(drawing.subplots(1, 2), ORDERS, strict=True):
            values = np.full((len(widths), len(heights)), np.nan)
            for line in grids:
                if line["order"] == order:
                    values[widths.index(line["tile"][1]), heights.index(line["tile"][0])] = line["gflops"]
            shown = panel.pcolormesh(values, cmap="RdYlBu_r", vmin=min(rates), vmax=max(rates))
            for (row, column), value in np.ndenumerate(values):
                if np.isfinite(value):
                    panel.text(column + 0.5, row + 0.5, f"{value:,.0f}", ha="center", va="center", fontsize=6)
            panel.set_xticks(np.arange(len(heights)) + 0.5, heights, fontsize=7)
            panel.set_yticks(np.arange(len(widths)) + 0.5, widths, fontsize=7)
            panel.set_xlabel("tile height xb")
            panel.set_ylabel("tile width yb")
            others = [line for line in lines if line not in grids and line["order"] == order]
            beside = ", ".join(f"{line['method']} {line['gflops']:,.0f}" for line in others)
            panel.set_title(f"{order}; beside it: {beside}" if beside else order, fontsize=8)
            drawing.colorbar(shown, ax=panel, label="GFLOP/s")


def render_methods(lines: list[Line], folder: Path) -> str:
    """Seconds to the same held-out RMSE, and RMSE over time."""

    def body(name: str, group: list[Line]) -> str:
        rows = []
        for line in group:
            line["runs"] = [run for run in line["runs"] if run["scores"]]  # one that diverged at once has none
            target = SAME_RMSE * max(min(run["scores"]) for run in line["runs"])
            cells = [seconds_to(run, target) for run in line["runs"]]
            base = cells[0][0]
            texts = [f"{s:.3g} ({n})" + (f", {s / base:.2f} x" if k else "") for k, (s, n) in enumerate(cells)]
            rows.append([paper.label(line), line["factors"], f"{target:.4f}", *texts])
        file = f"bals-methods-{paper.slug(name)}.svg"
        shown = max(group, key=lambda line: (line["shape"] == "netflix", line["factors"]))  # as figure 12
        draw_convergence(folder / file, shown)
        header = ["", "f", "RMSE", *(f"{run['method']}: s (iterations)" for run in shown["runs"])]
        alt = f"RMSE over time, {paper.label(shown)}, f = {shown['factors']}"
        return f"{paper.table(header, rows)}\n\n{paper.picture(file, alt)}"

    return paper.sections(paper.by_hardware(lines), body)


SAME_RMSE = 1.002
"""All methods are timed to this many times the RMSE that the one which ends highest reaches."""


def seconds_to(run: Line, target: float) -> tuple[float, int]:
    """Seconds, and iterations, to an RMSE that the run reaches."""
    reached = next(k for k, score in enumerate(run["scores"]) if score <= target)
    return float(np.cumsum(run["seconds"])[reached]), reached + 1


def draw_convergence(path: Path, line: Line) -> None:
    """Held-out RMSE over seconds of iterations."""
    with paper.figure(path, 6.0, 3.2) as drawing:
        panel = drawing.subplots()
        for run in line["runs"]:
            panel.plot(np.cumsum(run["seconds"]), run["scores"], marker=".", label=run["method"])
        panel.set_xscale("log")
        panel.set_xlabel("seconds of iterations")
        panel.set_ylabel("held-out RMSE")
        panel.legend(fontsize="small")


RENDERERS: dict[str, tuple[Callable[[list[Line], Path], str], tuple[str, ...]]] = {
    "popularity": (render_popularity, ("shape", "scale")),
    "distribution": (render_distribution, ("shape", "scale")),
    "vacancies": (render_vacancies, ("shape", "scale", "order", "tile")),
    "orders": (render_orders, ("shape", "scale", "factors", "threads", "method", "order")),
    "steps": (render_steps, ("shape", "scale", "factors", "method")),
    "parameters": (render_parameters, ("shape", "scale", "factors", "parameters")),
    "assemblies": (render_assemblies, ("shape", "scale", "factors", "threads", "method")),
    "tiles": (render_tiles, ("shape", "scale", "factors", "threads", "method", "order", "tile")),
    "methods": (render_methods, ("shape", "scale", "factors", "threads")),
}
"""How each task's lines become a section, and the fields that identify a line."""


def render(folder: Path) -> None:
    """Write the sections of bals.md and its plots from the lines."""
    lines = paper.read_lines(NAME)
    made = {task: draw(paper.select(lines, task, *keys), folder) for task, (draw, keys) in RENDERERS.items()}
    paper.fill(folder / "bals.md", made)


# ------------------------------------------------------------------------------------------ command line


@click.command(help=__doc__)
@paper.options(TASKS, render)
@paper.shapes_options
@paper.threads_option
def main(
    device: str, profile: str, tasks: tuple[str, ...], budget: float | None, shapes: tuple[str, ...],
    factors: tuple[int, ...], methods: tuple[str, ...], repeats: int, threads: int,
) -> None:  # fmt: skip
    recorder, opened = Recorder.begin(NAME, device, budget)
    bench = Bench(recorder, threads, repeats, opened, methods)

    def run(task: str, data: Drawn, work: Work) -> None:
        chosen = tuple(f for f in work.factors if f in factors or not factors)
        TASKS[task][device](bench, data, replace(work, factors=chosen))

    paper.run_works(recorder, PROFILES[device, profile], tasks or tuple(TASKS), shapes, run)
    recorder.finish()


if __name__ == "__main__":
    main()
