"""Iterations of solvers, as a fit runs them."""

from __future__ import annotations

from hybridmf.plan.solver import Solver


def iterate(solver: Solver, times: int = 1) -> None:
    for _ in range(times):
        for step in solver.sweep():
            solver.keep(step, solver.solve(step))
