"""SGD and CCD++ on one GPU: epochs of batch-Hogwild and MSGD, outer iterations of CCD++, and the RMSE they reach.

    python bench/gpu_updates.py                    quick: the figures of docs/performance.md, about 2 minutes on an H200
    python bench/gpu_updates.py --profile full     more ranks, both precisions, all orderings
    python bench/gpu_updates.py --task ccd

Times are CUDA events around whole epochs as a fit runs them (copies of the factors and the check for divergence
included), medians after a warm-up. The first MSGD pass is checked against float64 NumPy, entry by entry, on a handful
of items; CCD++ by its objective, which must not rise and must be what the kernels of ALS compute from the same factors;
every method by its train RMSE after a number of iterations from the initial factors of a fit. "of floor" is the time
that the bytes named in `hogwild_floor`, `msgd_floor` and `ccd_floor` take at the measured rates, over the time.
cuMF_SGD's kernel was measured on an H200 and the same data earlier.
"""

from __future__ import annotations

import time
from typing import Any

import click
import numpy as np
from common import iterate
from gpu import COPY_TBPS, HEADER, Data, Row, Session, gather_ms, objective_value, release, timed
from gpu_data import GPU_SHAPES

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Objective
from hybridmf.device.cuda import open_device
from hybridmf.errors import DeviceError
from hybridmf.gpu.half import HalfSweep
from hybridmf.model.training import LocalRatings
from hybridmf.plan.epochs import terms_at
from hybridmf.plan.make import make_plan
from hybridmf.plan.sgd import RUN
from hybridmf.plan.solver import Solver

LAMBDA = 0.05
QUALITY = {"SGD": 20, "CCD": 10}
"""Iterations after which the train RMSE is reported."""

PASS_TOLERANCE = 2e-4
"""Of factors after one MSGD pass over thousands of entries in float32, of the largest one."""

CASES: dict[str, dict[str, list[tuple[str, int, dict[str, Any]]]]] = {
    "quick": {
        "sgd": [
            ("netflix", 128, {"schedule": "batch_hogwild", "precision": "float16"}),
            ("netflix", 128, {"schedule": "msgd"}),
            ("netflix", 128, {"schedule": "msgd", "precision": "float16"}),
        ],
        "ccd": [("netflix", 40, {})],
    },
    "full": {
        "sgd": [
            *(
                ("netflix", f, {"schedule": "batch_hogwild", "precision": p})
                for f, p in ((32, "float16"), (64, "float16"), (128, "float16"), (128, "float32"))
            ),
            *(("netflix", f, {"schedule": "msgd"}) for f in (32, 64, 128)),
            ("netflix", 128, {"schedule": "msgd", "precision": "float16"}),
            *(("netflix", 128, {"schedule": "msgd", "ordering": o}) for o in ("user", "item")),
        ],
        "ccd": [("netflix", f, o) for f in (40, 100) for o in ({}, {"inner_iterations": 3})],
    },
}  # fmt: skip


def make_solver(model: hmf.SGD | hmf.CCD, data: Data) -> Solver:
    """The solver of a fit, before its first iteration."""
    objective: Objective = model._objective()
    plan = make_plan(objective, model._settings(), data.user.shape, data.nnz)
    ratings = LocalRatings(model, data.user).on_host(plan)
    state = model._initial_state(ratings, plan, objective)
    return model._solver(plan, objective, ratings, state, 0)


def rmse(session: Session, data: Data, solver: Solver) -> float:
    """Train RMSE by the kernels of ALS."""
    return float(np.sqrt(judged(session, data, solver, 0.0) / data.nnz))


def judged(session: Session, data: Data, solver: Solver, regularization: float) -> float:
    """The explicit objective of a solver's factors by the kernels of ALS."""
    state: Any = solver.state
    model = hmf.ExplicitALS(state.user.matrix.shape[1], biases=False, regularization=regularization, device="cuda")
    objective = model._objective()
    plan = make_plan(objective, model._settings(), data.user.shape, data.nnz)
    half = HalfSweep(session.device, "user", data.user, objective, plan)
    factors = {side: state.side(side) for side in SIDES}
    return objective_value(half, factors, {"user": half.degrees, "item": np.diff(data.item.indptr)})


# ------------------------------------------------------------------------------------------ SGD


def hogwild_floor(data: Data, f: int, itemsize: int) -> float:
    """Milliseconds on an H200: rows of the smaller side are read and written once an entry in L2, held rows once a run.

    Runs of crowded rows have it the other way round; their share is not known here.
    """
    smaller = min(data.user.shape)
    memory = data.nnz * (8 + 2 * f * itemsize / RUN) / (COPY_TBPS * 1e9)
    return memory + 2 * itemsize / 4 * gather_ms(data.nnz, smaller, f)


def msgd_floor(data: Data, f: int, itemsize: int) -> float:
    """Milliseconds on an H200: each pass gathers the fixed side's rows once an entry."""
    gathers = sum(gather_ms(data.nnz, n, f) for n in data.user.shape)
    return itemsize / 4 * gathers + 2 * 8 * data.nnz / (COPY_TBPS * 1e9)


def check_pass(session: Session, data: Data, model: hmf.SGD, f: int) -> float:
    """Error of the item pass of the first MSGD epoch on a few items, whose updates are repeated in float64."""
    solver = make_solver(model, data)
    rate = terms_at(solver.method, solver.objective, 0.0, 0).rate  # type: ignore[attr-defined]
    start = solver.state
    read = np.float16 if model.precision == "float16" else np.float32
    users, items = start.user.matrix.astype(read).astype(np.float64), start.item.matrix.astype(np.float64)
    iterate(solver)
    moved = solver.state.item.matrix
    degrees = np.diff(data.item.indptr)
    order = np.argsort(-degrees, kind="stable")
    chosen = order[np.linspace(0, np.count_nonzero(degrees) - 1, 6).astype(int)]
    worst = 0.0
    for item in chosen:
        part = slice(data.item.indptr[item], data.item.indptr[item + 1])
        v = items[item].copy()
        for user, rating in zip(data.item.indices[part], data.item.data[part], strict=True):
            v = (1 - rate * LAMBDA) * v + rate * (float(rating) - v @ users[user]) * users[user]
        worst = max(worst, float(np.abs(moved[item] - v).max() / np.abs(v).max()))
    return session.require(worst, PASS_TOLERANCE)


def run_sgd(session: Session, profile: str, shape: str | None) -> None:
    """Epochs."""
    for where, f, options in CASES[profile]["sgd"]:
        if shape in (None, where):
            name = " ".join(str(value) for value in options.values())
            with session.case(f"sgd {where} {f} {name}"):
                measure_sgd(session, where, f, options, name)
            release(session.device)


def measure_sgd(session: Session, shape: str, f: int, options: dict[str, Any], name: str) -> None:
    """Check, time and judge one schedule."""
    data = session.data(shape)
    model = hmf.SGD(
        f, biases=False, regularization=LAMBDA, device="cuda", random_state=0, iterations=QUALITY["SGD"], **options
    )
    hogwild = options["schedule"] == "batch_hogwild"
    error = None if hogwild else check_pass(session, data, model, f)
    started = time.perf_counter()
    solver = make_solver(model, data)
    session.device.synchronize()
    set_up = time.perf_counter() - started
    times = [ms for (ms,) in timed(session.device, [lambda: iterate(solver)], session.repeats)]
    for _ in range(QUALITY["SGD"] - session.repeats - 1):
        iterate(solver)
    itemsize = 2 if options.get("precision") == "float16" else 4
    session.report(
        Row(
            "sgd", f"{name}, epoch", shape, f, times,
            flops=(8.0 if hogwild else 10.0) * data.nnz * f,
            gathered=(4.0 if hogwild else 2.0) * itemsize * data.nnz * f,
            floor_ms=hogwild_floor(data, f, itemsize) if hogwild else msgd_floor(data, f, itemsize),
            error=error,
            more={f"rmse_after_{QUALITY['SGD']}": rmse(session, data, solver), "set_up_s": set_up,
                  "learning_rate": solver.method.learning_rate},  # type: ignore[attr-defined]
        )
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ CCD++


def ccd_floor(data: Data, f: int, inner: int) -> float:
    """Milliseconds on an H200: both copies of the residual are read and written once a factor, with indices of 2 bytes.

    Further inner iterations only read.
    """
    per_entry = 2 * (2 + 4 + 4) + (inner - 1) * 2 * (2 + 4)
    return f * data.nnz * per_entry / (COPY_TBPS * 1e9)


def run_ccd(session: Session, profile: str, shape: str | None) -> None:
    """Outer iterations."""
    for where, f, options in CASES[profile]["ccd"]:
        if shape in (None, where):
            with session.case(f"ccd {where} {f} {options}"):
                measure_ccd(session, where, f, options)
            release(session.device)


def measure_ccd(session: Session, shape: str, f: int, options: dict[str, Any]) -> None:
    """Check, time and judge CCD++."""
    data, inner = session.data(shape), options.get("inner_iterations", 1)
    model = hmf.CCD(f, biases=False, regularization=LAMBDA, device="cuda", random_state=0, **options)
    started = time.perf_counter()
    solver = make_solver(model, data)
    session.device.synchronize()
    set_up = time.perf_counter() - started
    objectives = []
    for _ in range(3):
        iterate(solver)
        objectives.append(solver.objective_value())
    if not objectives[0] >= objectives[1] >= objectives[2]:
        raise RuntimeError(f"the objective of CCD++ rose: {objectives}")
    error = session.require(abs(judged(session, data, solver, LAMBDA) / objectives[-1] - 1), 1e-5)
    times = [ms for (ms,) in timed(session.device, [lambda: iterate(solver)], session.repeats)]
    for _ in range(QUALITY["CCD"] - 3 - session.repeats - 1):
        iterate(solver)
    session.report(
        Row(
            "ccd", f"outer iteration, {inner} inner", shape, f, times,
            flops=model._settings().method.flops_per_iteration(solver.plan),  # type: ignore[attr-defined, union-attr]
            gathered=ccd_floor(data, f, inner) * COPY_TBPS * 1e9, floor_ms=ccd_floor(data, f, inner), error=error,
            more={f"rmse_after_{QUALITY['CCD']}": rmse(session, data, solver), "set_up_s": set_up},
        )
    )  # fmt: skip


TASKS = {"sgd": run_sgd, "ccd": run_ccd}


@click.command(help=__doc__)
@click.option("--profile", type=click.Choice(list(CASES)), default="quick", show_default=True)
@click.option("--task", type=click.Choice(list(TASKS)), multiple=True, help="Default: all.")
@click.option("--shape", type=click.Choice(list(GPU_SHAPES)), help="Only this shape.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def main(profile: str, task: tuple[str, ...], shape: str | None, repeats: int) -> None:
    try:
        session = Session(open_device(), repeats)
    except DeviceError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{session.device.spec}\n{HEADER}")
    for name in task or TASKS:
        with session.case(name):
            TASKS[name](session, profile, shape)
    if session.failures:
        raise SystemExit("\n".join(["", "not measured:", *session.failures]))


if __name__ == "__main__":
    main()
