"""Solvers of SGD on the CPU, and comparisons of their states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hybridmf.core.objective import Objective, State
from hybridmf.core.validate import as_csr
from hybridmf.cpu.sgd import CpuEpochs
from hybridmf.formats import transpose
from hybridmf.plan.epochs import EpochSolver, degrees_of
from hybridmf.plan.make import make_plan
from hybridmf.plan.sgd import SgdMethod
from hybridmf.plan.start import initial_state
from hybridmf.plan.types import Settings


def method_of(
    schedule="msgd", deterministic=True, rate_schedule="power", learning_rate=0.05, decay=None, scale=1.0
) -> SgdMethod:
    method = SgdMethod.check(schedule, "mixed", rate_schedule, learning_rate, decay, deterministic)
    return replace(method, seed_bits=7, scale=scale)


def solver_of(
    matrix, method, rank, *, biases=False, threads=1, completed=0, regularization=0.05, state=None, **changes
) -> EpochSolver:
    """A solver on the CPU."""
    matrix = as_csr(matrix, dtype=matrix.dtype)
    objective = Objective.explicit(regularization, "count", biases)
    checked = Settings.check(
        factors=rank, dtype=matrix.dtype, num_threads=threads, device="cpu", iterations=1, method=method
    )
    plan = make_plan(objective, checked, matrix.shape, matrix.nnz).changed(**changes)
    if state is None:
        degrees = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
        mean = float(matrix.data.mean())
        state = initial_state(*degrees, rank, matrix.dtype.type, objective, mean, 0)
    block = {"user": matrix, "item": transpose(matrix)}
    kernels = CpuEpochs([block], objective, plan)
    return EpochSolver(kernels, objective, plan, state, degrees_of(block), completed)


def arrays(state: State) -> list[np.ndarray]:
    """Every array of a state."""
    sides = [state.user, state.item, *(side.squares for side in (state.user, state.item) if side.squares)]
    return [array for side in sides for array in (side.matrix, side.bias) if array is not None]


def relative_error(state: State, expected: State) -> float:
    pairs = list(zip(arrays(state), arrays(expected), strict=True))
    return max(float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in pairs)


def assert_same_bits(state: State, expected: State) -> None:
    for ours, theirs in zip(arrays(state), arrays(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
