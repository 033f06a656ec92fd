"""Test RMSE over seconds of several methods on the same ratings: what cuMF (figs. 6 to 8) and MSGD (fig. 14) show.

Every method starts from the initial factors of a fit. Its clock runs during iterations only: set-up is reported
separately, and the clock stops while the test error is computed. On a GPU a discarded solver runs one iteration first,
so that compilation does not count.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import paper_common
import rivals
import scipy.sparse as sp
from common import iterate as iterate
from paper_common import Line

import hybridmf as hmf
from hybridmf.core.objective import Factors, State
from hybridmf.core.validate import as_csr
from hybridmf.errors import DivergedError
from hybridmf.formats import transpose
from hybridmf.model.training import LocalRatings
from hybridmf.plan.make import make_plan
from hybridmf.plan.solver import Solver

HELD_OUT = 0.01
"""Share of the ratings that is held out: a million of Netflix's, as many as its probe set has."""

PIECE = 1 << 18
"""Ratings whose error is computed at a time."""


@dataclass(frozen=True)
class Split:
    """Training ratings in both orientations and held-out ones (the attributes that `gpu.Sweeps` reads).

    Attributes
    ----------
    name : str
    scale : float
    user, item : csr_array
    test : coo_array
    """

    name: str
    scale: float
    user: sp.csr_array
    item: sp.csr_array
    test: sp.coo_array

    @classmethod
    def of(cls, shape: str, scale: float = 1.0) -> Split:
        """Draw a shape and hold out a part."""
        started = time.perf_counter()
        train, test = hmf.split(paper_common.draw(shape, scale=scale), HELD_OUT, 0)
        split = cls(shape, scale, train, transpose(train), test.tocoo())
        click.echo(f"{shape} x {scale:g}: {split.nnz:,} ratings to train on, in {time.perf_counter() - started:.0f} s")
        return split

    @property
    def nnz(self) -> int:
        """Number of training ratings."""
        return len(self.user.data)

    @property
    def line(self) -> Line:
        """What every measurement says of its data."""
        return {"shape": self.name, "scale": self.scale, "size": list(self.user.shape), "nnz": self.nnz}


def make_solver(model: Any, data: Split) -> Solver:
    """The solver of a fit, before its first iteration."""
    objective = model._objective()
    plan = make_plan(objective, model._settings(), data.user.shape, data.nnz)
    user_items = data.user if data.user.dtype == plan.dtype else as_csr(data.user, dtype=plan.dtype)
    ratings = LocalRatings(model, user_items).on_host(plan)
    state = model._initial_state(ratings, plan, objective)
    solver: Solver = model._solver(plan, objective, ratings, state, 0)
    return solver


def synchronize(solver: Any) -> None:
    """Wait for the GPU of a solver, if it has one."""
    if hasattr(solver.state.user, "table"):
        solver.state.user.device.synchronize()


def held_out_rmse(state: State, test: sp.coo_array) -> float:
    """Root of the mean squared error on held-out ratings, where the factors are; of a model without biases."""
    upload, tables = _tables(state)
    total = 0.0
    for start in range(0, test.nnz, PIECE):
        part = slice(start, start + PIECE)
        users, items, ratings = (upload(array[part]) for array in (test.row, test.col, test.data))
        scores = (tables[0][users] * tables[1][items]).sum(axis=1)
        total += float(((ratings - scores) ** 2).sum(dtype=np.float64))
    return float(np.sqrt(total / test.nnz))


def _tables(state: State) -> tuple[Any, tuple[Any, Any]]:
    """How arrays get to where the factors are, and these; zeros that pad rows on a GPU add nothing."""
    if hasattr(state.user, "table"):
        return state.user.device.upload, (state.user.table, state.item.table)
    return np.asarray, (state.user.matrix, state.item.matrix)


def race(model: Any, data: Split, iterations: int, seconds: float = float("inf")) -> Line:
    """Seconds and test RMSE of each iteration, until `seconds` are spent.

    Returns
    -------
    dict
        "set_up_s", "seconds" (of each iteration), "rmse" (after each), "start_rmse", "diverged" (the message, or None).
    """
    diverged = None
    started = time.perf_counter()
    solver = make_solver(model, data)
    synchronize(solver)
    set_up = time.perf_counter() - started
    start = held_out_rmse(solver.state, data.test)
    if solver.plan.gpu is not None:  # kernels are compiled
        with contextlib.suppress(DivergedError):  # reported when it is measured
            iterate(solver)
        solver = make_solver(model, data)
    spent: list[float] = []
    errors: list[float] = []
    while len(spent) < iterations and sum(spent) < seconds:
        synchronize(solver)
        started = time.perf_counter()
        try:
            iterate(solver)
        except DivergedError as error:
            diverged = str(error)
            break
        synchronize(solver)
        spent.append(time.perf_counter() - started)
        errors.append(held_out_rmse(solver.state, data.test))
    return {"set_up_s": set_up, "start_rmse": start, "seconds": spent, "rmse": errors, "diverged": diverged}


LIBMF_EPOCHS = (2, 4, 8, 16)


def race_libmf(data: Split, factors: int, regularization: float, threads: int, seconds: float = float("inf")) -> Line:
    """As `race`, of LIBMF itself, which fits as a whole: a fit for each number of epochs, from its own random start.

    An epoch's seconds are those between two fits; what a fit takes besides is set-up. "epochs": before each point.
    """
    library = rivals.Libmf(data.user, factors, regularization, threads)
    clock: list[float] = []
    errors: list[float] = []
    for epochs in LIBMF_EPOCHS:
        started = time.perf_counter()
        library.fit(epochs)
        clock.append(time.perf_counter() - started)
        users, items = map(Factors, library.factors())
        errors.append(held_out_rmse(State(users, items), data.test))
        if clock[-1] > seconds and len(clock) > 1:
            break
    done = LIBMF_EPOCHS[: len(clock)]
    epoch = (clock[-1] - clock[0]) / (done[-1] - done[0])
    spent = [epoch * (now - before) for before, now in itertools.pairwise((0, *done))]
    set_up = max(clock[0] - done[0] * epoch, 0.0)
    return {"set_up_s": set_up, "start_rmse": None, "seconds": spent, "rmse": errors, "diverged": None, "epochs": done}


# ------------------------------------------------------------------------------------------ what pages show


def seconds_to(line: Line, rmse: float) -> float | None:
    """Seconds of iterations until a test RMSE was reached."""
    for number, error in enumerate(line["rmse"], 1):
        if error <= rmse:
            return float(sum(line["seconds"][:number]))
    return None


def usual(seconds: Sequence[float]) -> float:
    """Median of an iteration."""
    return float(np.median(seconds)) if len(seconds) else float("nan")


def race_table(lines: Sequence[Line], slack: float = 1.01) -> str:
    """One row a method; the aim is the best RMSE of the exact methods of a race, times `slack`."""
    rows = []
    best = min((min(line["rmse"]) for line in lines if line["rmse"]), default=float("nan"))
    for line in lines:
        reached = seconds_to(line, slack * best)
        lowest = f"{min(line['rmse']):.4f}" if line["rmse"] else "diverged"
        epochs = line["epochs"][-1] if "epochs" in line else len(line["seconds"])
        iteration = sum(line["seconds"]) / epochs if "epochs" in line else usual(line["seconds"])
        rows.append(
            [line["method"], epochs, f"{iteration:.4g}", lowest,
             "-" if reached is None else f"{reached:.3g}", f"{line['set_up_s']:.2g}"]
        )  # fmt: skip
    header = ["method", "iterations", "s / iteration", "lowest test RMSE", f"s to {slack * best:.4f}", "set-up, s"]
    return paper_common.table(header, rows)


def draw_race(path: Path, groups: Sequence[tuple[str, Sequence[Line]]], key: str = "method") -> None:
    """Test RMSE over seconds, a panel for each (title, lines)."""
    with paper_common.figure(path, 4.2 * max(1, len(groups)), 3.4) as drawing:
        panels = drawing.subplots(1, max(1, len(groups)), squeeze=False)[0]
        for panel, (title, lines) in zip(panels, groups, strict=False):
            for line in lines:
                if line["rmse"]:
                    panel.plot(np.cumsum(line["seconds"]), line["rmse"], marker=".", markersize=3, label=line[key])
            panel.set_xscale("log")
            panel.set_title(title, fontsize=8)
            panel.set_xlabel("seconds of iterations")
            panel.set_ylabel("test RMSE")
            if lines:
                panel.legend(fontsize=6)
