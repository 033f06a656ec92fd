"""Half sweeps of ALS on any device, and the bounds of their errors against float64."""

from __future__ import annotations

import numpy as np

import hybridmf as hmf
from hybridmf.core.objective import Factors, Objective
from hybridmf.core.validate import as_csr
from hybridmf.cpu import als as cpu
from hybridmf.data.slabs import InMemory
from hybridmf.device.cuda import Array, Device
from hybridmf.gpu.factors import to_device
from hybridmf.gpu.half import HalfSweep
from hybridmf.gpu.rows import RowRange, read_range, widen_range
from hybridmf.plan.als import ALS
from hybridmf.plan.als_gpu import gpu_plan
from hybridmf.plan.make import make_plan
from hybridmf.plan.types import Settings
from hybridmf.ranks.gpu_rank import GpuWorker
from hybridmf.ranks.su_als import WholeRows
from support import reference
from support.ratings import planted

OBJECTIVES = {
    "explicit": Objective("explicit", 0.05, 1.0),
    "explicit-ridge": Objective("explicit", 0.3, 0.0),
    "explicit-half-count": Objective("explicit", 0.1, 0.5),
    "explicit-biases": Objective("explicit", 0.05, 1.0, biases=True),
    "explicit-damped": Objective("explicit", 0.05, 1.0, biases=True, bias_regularization=0.3),
    "explicit-damped-ridge": Objective("explicit", 0.3, 0.0, biases=True, bias_regularization=0.3),
    "explicit-damped-half-count": Objective("explicit", 0.1, 0.5, biases=True, bias_regularization=0.3),
    "implicit": Objective("implicit", 0.01, 0.0, alpha=3.0),
    "implicit-count": Objective("implicit", 0.01, 1.0, alpha=40.0),
    "implicit-light": Objective("implicit", 0.1, 0.0, alpha=1.0, unobserved_weight=0.1),
    # unobserved_weight above 1 + alpha |r| makes the weights of the gathered rows negative
    "implicit-heavy": Objective("implicit", 0.1, 0.0, alpha=0.5, unobserved_weight=3.0),
    "implicit-unweighted": Objective("implicit", 0.1, 0.0, alpha=2.0, unobserved_weight=0.0),
}


def plan_for(objective: Objective, shape, nnz: int, *, rank: int, tiles: tuple[int, int] | None = None, **given):
    options = {
        "factors": rank, "solver": "cholesky", "cg_steps": 3, "assembly": "auto", "reorder": "none",
        "precision": "float32", "dtype": "float32", "num_threads": 2, "device": "cpu", "block_size": 32, "method": ALS,
    }  # fmt: skip
    plan = make_plan(objective, Settings.check(**(options | given)), shape, nnz)
    return plan if tiles is None else plan.changed(tile_rows=tiles[0], tile_cols=tiles[1])


def random_factors(rows: int, rank: int, dtype, biases: bool = False, seed: int = 1) -> Factors:
    rng = np.random.default_rng(seed)
    matrix = (rng.normal(size=(rows, rank)) / np.sqrt(rank)).astype(dtype)
    return Factors(matrix, rng.normal(size=rows).astype(dtype) if biases else None)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def dense_system(matrix, row: int, fixed: Factors, mean: float, objective: Objective):
    """(A, b) of one row in float64, the bias last."""
    columns = matrix.indices[slice(*matrix.indptr[row : row + 2])]
    values = matrix.data[slice(*matrix.indptr[row : row + 2])].astype(float)
    rank = fixed.matrix.shape[1]
    design = fixed.matrix.astype(float)
    confidence, target = reference._weights(objective, values)
    if objective.biases:
        design = np.column_stack([design, np.ones(len(design))])
        target = target - mean - fixed.bias[columns]
    weight = np.full(len(design), objective.unobserved_weight if objective.is_implicit else 0.0)
    weight[columns] = confidence
    ridge = np.full(design.shape[1], objective.regularization.user * len(columns) ** objective.scaling.user)
    ridge[rank:] = objective.bias_regularization.user * len(columns) ** objective.scaling.user
    return design.T @ (weight[:, None] * design) + np.diag(ridge), design[columns].T @ (confidence * target)


RANK = 7
"""What most problems here have, so that few kernels are compiled."""

BACKWARD_ERROR = {"float32": 2.0**-20, "bf16x3": 2.0**-14, "tf32": 2.0**-10, "float16": 2.0**-10, "bf16": 2.0**-7}
"""Largest ``|A x - b| / (|A| |x|)`` of a row by precision: a few units in the last place of what is multiplied."""

FITS = {
    "implicit": (hmf.ImplicitALS, {"factors": RANK, "alpha": 3.0, "regularization": 0.1}),
    "explicit": (hmf.ExplicitALS, {"biases": False, "factors": RANK}),
    "biases": (hmf.ExplicitALS, {"factors": RANK - 1, "biases": True}),
}

SMALL = planted(24, 16, 0.4)
"""What whole fits here are of; user 12 and item 5 have no entries."""


SETTINGS = tuple(Settings.__dataclass_fields__)


def plan_on(device, objective: Objective, matrix, rank: int, dtype="float32", **changes):
    """Plan of a half sweep: choices a user has, and sizes (segment, batch_slots, tile_rows, tile_cols) to replace."""
    base = plan_for(objective, matrix.shape, matrix.nnz, rank=rank, dtype=dtype)
    wanted = {"assembly": "auto"} | {name: changes.pop(name) for name in SETTINGS if name in changes}
    given = {name: getattr(base, name) for name in SETTINGS if hasattr(base, name)}
    settings = Settings.check(**(given | {"device": "cuda", "iterations": 1, "factors": rank, "method": ALS} | wanted))
    chosen = {
        name: getattr(settings, name)
        for name in ("assembly", "precision", "cg_steps", "block_size", "reorder", "row_form")
    }
    base = base.changed(**chosen, solver=settings.planned_solver)
    return gpu_plan(base, settings, objective, device.spec).changed(**changes)


class Problem:
    """A half sweep: rows, fixed factors, objective; solved by a device, the CPU, NumPy in float32 and in float64."""

    def __init__(self, matrix, objective: Objective, rank: int = RANK, dtype="float32", fixed=None) -> None:
        self.matrix = as_csr(matrix, dtype=dtype, drop_zeros=objective.is_implicit)
        self.objective, self.rank, self.dtype = objective, rank, dtype
        self.fixed = fixed or random_factors(matrix.shape[1], rank, dtype, objective.biases)
        self.mean = float(self.matrix.data.mean()) if objective.biases else 0.0

    def half(self, device, **changes) -> HalfSweep:
        plan = plan_on(device, self.objective, self.matrix, self.rank, self.dtype, **changes)
        return GpuWorker(device).whole(WholeRows("user", InMemory(self.matrix), self.objective, plan, None))

    def solve(self, device, start: Factors | None = None, **changes) -> Factors:
        half = self.half(device, **changes)
        first = None if start is None else to_device(device, start, half.width)
        return half.solve(to_device(device, self.fixed, half.width), self.mean, first)

    def on_cpu(self) -> Factors:
        plan = plan_for(self.objective, self.matrix.shape, self.matrix.nnz, rank=self.rank, dtype=self.dtype)
        return cpu.HalfSweep("user", self.matrix, self.objective, plan).solve(self.fixed, self.mean)

    def exact(self) -> Factors:
        return reference.half_sweep(self.matrix.astype(np.float64), self.fixed, self.mean, self.objective)

    def plain(self) -> Factors:
        """Normal equations in float32 as they come, solved by LAPACK."""
        solved = [self._plain_row(row) for row in range(self.matrix.shape[0])]
        rows = np.array(solved)
        return Factors(rows[:, : self.rank], rows[:, self.rank] if self.objective.biases else None)

    def _plain_row(self, row: int) -> np.ndarray:
        objective, real = self.objective, np.float32
        span = slice(*self.matrix.indptr[row : row + 2])
        columns, ratings = self.matrix.indices[span], self.matrix.data[span].astype(real)
        design = self.fixed.matrix.astype(real)
        confidence, target = (part.astype(real) for part in reference._weights(objective, ratings))
        if objective.biases:
            target = target - real(self.mean) - self.fixed.bias[columns].astype(real)
            design = np.column_stack([design, np.ones(len(design), real)])
        if not len(columns):
            return np.zeros(design.shape[1], real)
        observed, ground = design[columns], real(objective.unobserved_weight if objective.is_implicit else 0)
        ridge = np.full(design.shape[1], objective.regularization.user * len(columns) ** objective.scaling.user, real)
        ridge[self.rank :] = objective.bias_regularization.user * len(columns) ** objective.scaling.user
        A = ground * (design.T @ design) + observed.T @ ((confidence - ground)[:, None] * observed) + np.diag(ridge)
        return np.linalg.solve(A, observed.T @ (confidence * target))


def joined(factors: Factors) -> np.ndarray:
    """Factors with their bias as the last column, float64."""
    columns = [factors.matrix] if factors.bias is None else [factors.matrix, factors.bias[:, None]]
    return np.hstack(columns).astype(np.float64)


def row_errors(actual: Factors, exact: Factors) -> np.ndarray:
    """Relative error of each row that is not zero; rows that are must be zero."""
    got, want = joined(actual), joined(exact)
    lengths = np.linalg.norm(want, axis=1)
    assert not got[lengths == 0].any()
    return np.linalg.norm(got - want, axis=1)[lengths > 0] / lengths[lengths > 0]


def check_solution(problem: Problem, solved: Factors) -> None:
    """Float64 to rounding; float32 to what plain float32 NumPy loses, more where a row has one entry and a bias."""
    errors, eps = row_errors(solved, problem.exact()), np.finfo(problem.dtype).eps
    limit = 1e-9 if problem.dtype == "float64" else 16 * row_errors(problem.plain(), problem.exact()).max() + 16 * eps
    assert errors.max() < limit, f"error {errors.max():.1e}, limit {limit:.1e}, errors of rows {errors}"


def row_range(device: Device, table: Array, status: Array | None = None) -> tuple[RowRange, bool]:
    """The range of a table's rows, and whether any status is not 0."""
    found = device.zeros(3, np.uint32)
    widen_range(device, found, table, status)
    return read_range(device.download(found))
