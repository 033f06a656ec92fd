"""ALS on several GPUs beside one: seconds per half sweep and iteration, equal answers, and what the planner predicted.

    python bench/scale.py                              Netflix shape, f = 100, on 1, 2 and 4 GPUs: model parallel
    python bench/scale.py --shape yahoo-music          the same of another shape
    python bench/scale.py --task hugewiki              Hugewiki's shape, items data parallel; --fraction of its entries
    python bench/scale.py --task reduction             sums added up in parallel, in two phases and on one GPU
    python bench/scale.py --task short --factors 128   implicit feedback with few entries a row, the dual form's: the
                                                       Million Song Dataset's shape and a shop's
    python bench/scale.py --task streamed --factors 32 --fraction 0.15 --limit 12 --limit 9
                                                       Hugewiki's shape where a GPU may use so many GB

Each line of bench/results/scale.jsonl is one number of GPUs: after a warm-up median seconds of each half sweep alone
and of iterations as a fit runs them, of which all but the last begin the next one early; the speed-up over one GPU
in the same run, the objective and its difference from that of one GPU after as many sweeps from the same factors, and
the planner's prediction. Hugewiki's shape is drawn on a GPU from a seed: Poisson user degrees with log-normal means,
Zipf item popularity, planted low rank plus noise.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from common import SHAPES, iterate, median, record
from gpu_data import GPU_SHAPES, published_gpu, synthetic_gpu

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Factors, Side, State
from hybridmf.core.sparse import csr_of
from hybridmf.device.cuda import CudaDevice, device_count, open_device
from hybridmf.formats import transpose
from hybridmf.plan.grid import Grid
from hybridmf.plan.half_sweep import HalfPlan, priced
from hybridmf.plan.machine import H200
from hybridmf.plan.make import make_plan
from hybridmf.plan.types import Plan
from hybridmf.ranks.gpu_rank import GpuWorker
from hybridmf.ranks.multi_als import MultiALS
from hybridmf.ranks.su_als import RankALS, one_device

HUGEWIKI = (50_082_603, 39_780, 3_100_000_000)
"""Users, items and entries (cuMF, table 5)."""

TASKS = ("netflix", "short", "hugewiki", "reduction", "streamed")
USERS_AT_A_TIME = 2_000_000
AGREE = 1e-3
"""Relative difference of the objectives of one and of several GPUs: rounding over some sweeps."""


def hugewiki(fraction: float, seed: int) -> sp.csr_array:
    """Ratings of Hugewiki's shape with a fraction of its entries."""
    import cupy as cp

    m, n, nnz = HUGEWIKI
    random = cp.random.default_rng(seed)
    popularity = 1.0 / (np.arange(n) + 100.0) ** 0.9
    edges = cp.asarray(np.cumsum(popularity / popularity.sum()))
    names = cp.asarray(np.random.default_rng(seed).permutation(n))
    kinds = random.standard_normal((n, 4), dtype=cp.float32)
    mean, sigma = nnz * fraction / m, 0.9
    space = int(nnz * fraction * 1.02) + 10**6
    indices, ratings = np.empty(space, np.int32), np.empty(space, np.float32)
    degrees, filled = np.empty(m, np.int64), 0
    for first in range(0, m, USERS_AT_A_TIME):
        count = min(USERS_AT_A_TIME, m - first)
        means = mean * cp.exp(sigma * random.standard_normal(count) - sigma**2 / 2)
        drawn = random.poisson(cp.minimum(means, 5000.0))
        ends = cp.cumsum(drawn)
        total = int(ends[-1])
        marks = cp.zeros(total + 1, dtype=cp.int32)
        cp.add.at(marks, ends, 1)
        users = cp.cumsum(marks[:total], dtype=cp.int64)
        items = names[cp.minimum(cp.searchsorted(edges, random.random(total)), n - 1)]
        keys = cp.unique(users * n + items)  # duplicates go
        users, items = keys // n, (keys % n).astype(cp.int32)
        tastes = random.standard_normal((count, 4), dtype=cp.float32)
        score = sum(tastes[users, k] * kinds[items, k] for k in range(4)) / 2
        noise = random.standard_normal(len(keys), dtype=cp.float32)
        values = cp.clip(cp.rint(3.5 + score + 0.5 * noise), 1, 5).astype(cp.float32)
        end = filled + len(keys)
        indices[filled:end], ratings[filled:end] = cp.asnumpy(items), cp.asnumpy(values)
        degrees[first : first + count] = cp.asnumpy(cp.bincount(users, minlength=count))
        filled = end
        del users, items, keys, tastes, score, noise, values, marks, ends, drawn, means
    cp.get_default_memory_pool().free_all_blocks()
    indptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(degrees)))
    return csr_of(indptr, indices[:filled], ratings[:filled], n)


class Case:
    """One problem, fitted by any number of GPUs from the same factors."""

    def __init__(self, name: str, matrix: sp.csr_array, factors: int, implicit: bool = False) -> None:
        self.name, self.matrix, self.factors, self.implicit = name, matrix, factors, implicit
        started = time.perf_counter()
        self.item_users = transpose(matrix, num_threads=os.cpu_count() or 1)
        click.echo(f"transposed {matrix.nnz:,} entries in {time.perf_counter() - started:.1f} s")
        rng = np.random.default_rng(0)
        items = np.abs(rng.standard_normal((matrix.shape[1], factors), dtype=np.float32)) / np.float32(factors**0.5)
        items[np.diff(self.item_users.indptr) == 0] = 0
        # users are solved first: what they start from does not matter
        self.state = State(Factors(np.zeros((matrix.shape[0], factors), np.float32)), Factors(items))
        self.one: dict[str, float] = {}

    def solver(
        self, gpus: int, grids: Any = None, reduction: Any = "scatter", limit: float | None = None
    ) -> RankALS | MultiALS:
        """The solver on so many GPUs; `limit`: gigabytes that each may use."""
        names = [f"cuda:{k}" for k in range(gpus)]
        memory = None if limit is None else int(limit * 1e9)
        options = {"device": names if gpus > 1 else names[0], "gpu_memory_limit": memory, "factors": self.factors}
        model: Any = hmf.ImplicitALS(**options)
        if not self.implicit:
            model = hmf.ExplicitALS(biases=False, regularization=0.05, **options)
        plan = make_plan(model._objective(), model._settings(), self.matrix.shape, self.matrix.nnz)
        arguments = (self.matrix, self.item_users, model._objective(), plan, self.state)
        if gpus == 1:
            given = one_device(self.matrix, self.item_users, plan, self.state)
            return RankALS(worker=GpuWorker(open_device("cuda:0")), objective=model._objective(), **given)
        topology = [k * 2 // gpus for k in range(gpus)] if reduction == "two_phase" else None
        plan = arguments[3].changed(reduction="parallel" if reduction == "scatter" else reduction)
        return MultiALS(*arguments[:3], plan, *arguments[4:], grids=grids, topology=topology)

    def run(self, gpus: int, sweeps: int, **more: Any) -> dict[str, Any]:
        """Sweeps, timed one half at a time and then as a whole; users first."""
        _free()
        started = time.perf_counter()
        solver = self.solver(gpus, **more)
        set_up = time.perf_counter() - started
        devices = [open_device(f"cuda:{k}") for k in range(gpus)]  # to open one asks the driver for its free memory
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(sweeps):
            for side in SIDES:
                seconds[side].append(_timed(solver, [side], devices))
        whole = _iterations(solver, sweeps, devices)
        objective = solver.objective_value()
        solver.close()
        halves = {side: median(seconds[side][1:]) for side in SIDES}
        line = {
            "bench": "scale", "shape": self.name, "users": self.matrix.shape[0], "items": self.matrix.shape[1],
            "nnz": int(self.matrix.nnz), "factors": self.factors, "gpus": gpus, "gpu": open_device("cuda:0").spec.name,
            "implicit": self.implicit, "dual_sides": list(solver.plan.dual_sides),
            "seconds": median(whole), "halves": halves,
            "spread": {side: [min(seconds[side][1:]), max(seconds[side][1:])] for side in SIDES},
            "spread_iteration": [min(whole), max(whole)],
            "set_up_seconds": set_up, "objective": objective, "sweeps": 2 * sweeps,
        }  # fmt: skip
        line |= self._prediction(solver, gpus)
        if more.get("limit") is not None:
            line |= {"limit": more["limit"]} | _places(solver.plan)
        if gpus == 1:
            self.one = {"seconds": line["seconds"], "objective": objective}
        if self.one:
            line["speedup"] = self.one["seconds"] / line["seconds"]
            line["objective_difference"] = abs(objective - self.one["objective"]) / self.one["objective"]
        return line

    def _prediction(self, solver: Any, gpus: int) -> dict[str, Any]:
        grids = {side: Grid(1, 1) for side in SIDES} if gpus == 1 else dict(solver.layout.grids)
        halves = {
            side: priced(solver.plan, HalfPlan(side, grid.splits, grid.groups, gpus), H200).total
            for side, grid in grids.items()
        }
        return {
            "grids": {side: [grid.splits, grid.groups] for side, grid in grids.items()},
            "predicted_halves": halves,
            "predicted": sum(halves.values()),
        }


def _places(plan: Plan) -> dict[str, Any]:
    """Where the planner has put ratings and factors, and what it says of an iteration."""
    assert plan.scale is not None
    halves = {side: half.total for side, half in plan.scale.halves.items()}
    waves = {side: half.waves for side, half in plan.scale.halves.items()}
    turns = {side: half.turns for side, half in plan.scale.halves.items()}
    places = {"ratings": plan.scale.ratings, "factors_on": plan.scale.factors, "waves": waves, "turns": turns}
    return places | {"predicted_halves": halves, "predicted": plan.scale.seconds}


def _timed(solver: Any, sides: Sequence[Side], devices: list[CudaDevice]) -> float:
    """Seconds until these half sweeps are done, one after the other as in a fit."""
    started = time.perf_counter()
    for side in sides:
        solver.update(side)
    for device in devices:
        device.synchronize()
    return time.perf_counter() - started


def _iterations(solver: Any, sweeps: int, devices: list[CudaDevice]) -> list[float]:
    """Seconds of each iteration of a fit, from the end of the one before, as the fit sees it."""
    ends = [time.perf_counter()]
    for sweep in range(sweeps):
        solver.continues = sweep < sweeps - 1
        iterate(solver)
        if not solver.continues:
            for device in devices:
                device.synchronize()
        ends.append(time.perf_counter())
    return np.diff(ends).tolist()


def _free() -> None:
    import cupy as cp

    gc.collect()
    for k in range(cp.cuda.runtime.getDeviceCount()):
        with cp.cuda.Device(k):
            cp.get_default_memory_pool().free_all_blocks()


def _say(line: dict[str, Any]) -> None:
    halves = ", ".join(f"{side}s {1e3 * seconds:.1f} ms" for side, seconds in line["halves"].items())
    grids = ", ".join(f"{side}s {p} x {q}" for side, (p, q) in line["grids"].items())
    click.echo(
        f"{line['shape']:<10} {line['gpus']} GPUs ({grids}; {line.get('reduction', 'scatter')}): "
        f"{1e3 * line['seconds']:.1f} ms ({halves}), predicted {1e3 * line['predicted']:.1f} ms, "
        f"x {line.get('speedup', 1):.2f}, {_place(line)}objective {line['objective']:.7g} "
        f"({line.get('objective_difference', 0):.1e} from one GPU), set-up {line['set_up_seconds']:.1f} s"
    )


def _place(line: dict[str, Any]) -> str:
    return f"ratings on {line['ratings']} and factors on {line['factors_on']}, " if "ratings" in line else ""


def _keep(line: dict[str, Any]) -> None:
    _say(line)
    record("scale", line)
    if line.get("objective_difference", 0.0) > AGREE:
        raise click.ClickException(f"the objective differs by {line['objective_difference']:.1e} from one GPU's")


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--task", type=click.Choice(TASKS), default="netflix", show_default=True)
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), default="netflix", show_default=True, help="Of --task netflix."
)
@click.option("--gpus", "counts", multiple=True, type=int, help="Repeat it.  [default: 1, 2, 4 as far as there are]")
@click.option("--factors", type=int, default=100, show_default=True)
@click.option("--fraction", type=float, default=0.25, show_default=True, help="Of Hugewiki's entries.")
@click.option("--limit", "limits", multiple=True, type=float, help="Of --task streamed: GB of each GPU; repeat it.")
@click.option("--sweeps", type=int, default=8, show_default=True, help="Of each kind; the first one warms up.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(
    task: str,
    shape: str,
    counts: tuple[int, ...],
    factors: int,
    fraction: float,
    limits: tuple[float, ...],
    sweeps: int,
    seed: int,
) -> None:
    there = device_count()
    used = [count for count in counts or (1, 2, 4) if count <= there]
    started = time.perf_counter()
    if task == "short":
        for short in ("msd", "shop"):
            case = Case(short, synthetic_gpu(short, seed=seed, implicit=True), factors, implicit=True)
            for count in used:
                _keep(case.run(count, sweeps))
        return
    if task in ("hugewiki", "streamed"):
        case = Case(f"hugewiki x {fraction:g}", hugewiki(fraction, seed), factors)
    else:
        drawn = synthetic_gpu(shape, seed=seed) if shape in GPU_SHAPES else published_gpu(shape, seed=seed)
        case = Case(shape, drawn, factors)
    click.echo(f"{case.matrix.nnz:,} entries ready after {time.perf_counter() - started:.1f} s")
    if task == "reduction":
        _reductions(case, max(used), sweeps)
        return
    if task == "streamed":
        _keep(case.run(1, sweeps) | {"limit": None, "ratings": "device", "factors_on": "device"})
        for limit in limits:
            _keep(case.run(max(used), sweeps, limit=limit))
        return
    for count in used:
        ways: list[dict[str, Grid] | None] = [None]
        if count > 1:
            ways = [{side: Grid(1, count) for side in SIDES}]
            if task == "hugewiki":  # the planner's: items data parallel
                ways = [{"user": Grid(1, count), "item": Grid(count, 1)}]
        for grids in ways:
            _keep(case.run(count, sweeps, grids=grids))


def _reductions(case: Case, gpus: int, sweeps: int) -> None:
    """Both half sweeps with a split fixed side: the users' 480,189 systems are 14 GB to add up."""
    _keep(case.run(1, sweeps))
    grids = {side: Grid(gpus, 1) for side in SIDES}
    seconds = {}
    for reduction in ("scatter", "two_phase", "root"):
        line = case.run(gpus, sweeps, grids=grids, reduction=reduction) | {"reduction": reduction}
        seconds[reduction] = line["seconds"]
        _keep(line)
    click.echo(f"in parallel {seconds['root'] / seconds['scatter']:.2f} x as fast as on one GPU (cuMF: 1.7)")


if __name__ == "__main__":
    main()
