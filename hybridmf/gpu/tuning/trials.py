"""Trials of the tuner: a kernel runs on drawn ratings as in a fit, and its results are checked before it is timed.

`als_trial` puts data on the device, and has for each side how to launch a configuration, and the error of its results
against float64 NumPy on a few rows.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp

from ...core.objective import SIDES, Objective, Side
from ...core.sparse import transposed
from ...core.validate import csr_arrays, make_csr
from ...datasets import _stars
from ...device.cuda import Array, Device
from ...formats import reorder
from ...plan.als import ALS
from ...plan.als_gpu import gpu_plan
from ...plan.fused import table_width
from ...plan.make import make_plan
from ...plan.solver import Given
from ...plan.tables import Facts
from ...plan.types import Settings
from ..assembly import Cleared
from ..factors import DeviceFactors, GpuFactors
from ..fused import RowKernels
from ..half import HalfSweep

RESIDUAL_TOLERANCE = {"float32": 3e-5, "bf16": 2e-2}  # maximum |Ax - b| / (|A| |x| + |b|); a millionth of it in float64
REGULARIZATION = 0.05
KEPT_HALVES = 6  # maximum half sweeps of a side on the device; BALS has one for each size of tiles


@dataclass(frozen=True)
class TimedRun:
    """A timed run."""

    # run, prepare: the timed function, and an untimed one that runs before it
    run: Callable[[], Any]
    prepare: Callable[[], Any] | None = None
    flops: float = 0.0  # useful multiplications and additions


@dataclass(frozen=True)
class Trial:
    """The work of a kernel, and the tolerated error of its results."""

    errors: Sequence[Callable[[Any], float]]  # run a configuration; return the error against float64 NumPy
    runs: Mapping[str, Callable[[Any], TimedRun]]  # by name, the run of a configuration
    tolerance: float

    def error(self, config: Any) -> float:
        """Largest error of a configuration; runs all work at least once."""
        return float(np.max([0.0, *(error(config) for error in self.errors)]))  # NaN stays

    def parts(self, config: Any) -> dict[str, TimedRun]:
        return {name: run(config) for name, run in self.runs.items()}


# ---------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Sample:
    """Ratings that trials work on."""

    user_items: sp.csr_array
    item_users: sp.csr_array
    name: str  # name in records

    @classmethod
    def draw(cls, n_users: int = 138_493, n_items: int = 27_278, nnz: int = 12_000_000, seed: int = 0) -> Sample:
        """Log-normal user degrees, Zipf items: the sizes of MovieLens 20M, and enough entries to keep a GPU busy.

        Pairs drawn twice are kept once.
        """
        matrix = _stars(n_users, n_items, nnz, np.random.default_rng(seed)).user_items
        return cls(matrix, transposed(matrix), f"{n_users} x {n_items}, {matrix.nnz} entries, seed {seed}")

    def side(self, side: Side, itemsize: int = 4) -> sp.csr_array:
        return in_dtype(self.user_items if side == "user" else self.item_users, itemsize)

    @functools.cached_property
    def by_degree(self) -> dict[Side, sp.csr_array]:
        """The ratings by the rows of each side, both sides ordered by degree."""
        ordered = reorder(self.user_items).matrix
        return {"user": ordered, "item": transposed(ordered)}


def in_dtype(matrix: sp.csr_array, itemsize: int) -> sp.csr_array:
    """Convert the values of a matrix; SciPy's astype may also widen the indices."""
    indptr, indices, values = csr_arrays(matrix)
    return make_csr(indptr, indices, values.astype(f"f{itemsize}", copy=False), matrix.shape)


def random_table(n: int, rank: int, width: int, dtype: Any, seed: int) -> np.ndarray:
    """Random factors of about the size of learned ones, 1 / sqrt(rank), with zeros in the padding."""
    table = np.zeros((n, width), dtype=dtype)
    table[:, :rank] = np.random.default_rng(seed).standard_normal((n, rank), dtype=np.float32) / math.sqrt(rank)
    return table


def handful(degrees: np.ndarray, count: int = 5) -> np.ndarray:
    """Positions of the longest row, of the shortest one with entries, and of some in between."""
    order = np.argsort(-degrees, kind="stable")[: int(np.count_nonzero(degrees))]
    return np.unique(order[np.linspace(0, len(order) - 1, count).astype(int)])


def row_entries(matrix: sp.csr_array, row: int) -> tuple[np.ndarray, np.ndarray]:
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return matrix.indices[part], matrix.data[part].astype(np.float64)


def residual(A: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    norm = np.linalg.norm
    return float(norm(A @ x - b) / (norm(A, 2) * norm(x) + norm(b)))


# ---------------------------------------------------------------------------------------------------- ALS


class TrialHalf(HalfSweep):
    """A half sweep of a fit, whose kernels have a configuration under trial."""

    changes: Mapping[str, Any] = MappingProxyType({})  # fields of the kernels

    def kernels_for(self, fixed: GpuFactors, cleared: Cleared | None = None) -> RowKernels:
        kernels: Any = super().kernels_for(fixed, cleared)
        return replace(kernels, **self.changes)

    def assemble(self, fixed: DeviceFactors) -> None:
        """Launch the sums of all rows alone."""
        kernels, entries = self.kernels_for(fixed), self.entries(self.indices, self.ratings, fixed, 0.0)
        operand = kernels.operand(fixed.table)
        for batch in self.batches:
            with self.batches.fitting(batch):
                kernels.assemble(kernels.empty(len(batch.segments)), operand, entries, batch.segments)

    def first_batch(self, fixed: DeviceFactors) -> tuple[Any, ...]:
        """Launch the sums of the first batch; return the arguments that solve it."""
        kernels, entries = self.kernels_for(fixed), self.entries(self.indices, self.ratings, fixed, 0.0)
        operand = kernels.operand(fixed.table)
        batch = next(iter(self.batches))
        sums = kernels.empty(len(batch.segments))
        kernels.assemble(sums, operand, entries, batch.segments)
        return self.systems(Cleared(self.device, len(self)), None, None), sums, batch.slots, batch.rows, entries


def als_trial(
    device: Device, sample: Sample, facts: Facts, *, assembly: str, timed: Literal["all", "sums", "solve"],
    solver: str = "cholesky",
) -> Trial:  # fmt: skip
    """Half sweeps of an explicit fit, checked as a whole; `timed` are its kernels with the configuration."""
    rank, itemsize, precision = facts["rank"], facts.get("itemsize", 4), facts.get("precision", "float32")
    solver = facts.get("solver", solver)
    objective, steps = Objective.explicit(REGULARIZATION, "count", False), 6 if solver == "cg" else 1
    settings = Settings.check(
        factors=rank,
        dtype=f"float{8 * itemsize}",
        num_threads=None,
        device="cpu",
        solver=solver,
        cg_steps=steps,
        row_form="primal",
        method=ALS,
    )

    def work(side: Side) -> tuple[Callable[[Any], float], Callable[[Any], TimedRun]]:
        matrix = in_dtype(sample.by_degree[side], itemsize) if assembly == "bals" else sample.side(side, itemsize)
        base = make_plan(objective, settings, matrix.shape, matrix.nnz)
        plan = gpu_plan(base.changed(assembly=assembly, precision=precision), settings, objective, device.spec)
        table = random_table(matrix.shape[1], rank, table_width(rank, plan.dtype), plan.dtype, 1)
        fixed = DeviceFactors(device, device.upload(table), rank, None)
        degrees = np.diff(matrix.indptr)
        solved: list[Array] = []
        prepared: list[Any] = []

        @functools.lru_cache(KEPT_HALVES)
        def half_of(*tile: int) -> TrialHalf:
            return TrialHalf(device, side, matrix, objective, plan.changed(tile_rows=tile[0], tile_cols=tile[1]))

        def half(config: Any, cg_steps: int = steps) -> TrialHalf:
            found = half_of(*getattr(config, "matrix_tile", (0, 0)))
            found.changes = {"solver_config" if timed == "solve" else "config": config, "cg_steps": cg_steps}
            return found

        def error(config: Any) -> float:
            reset()  # restores the inputs, and invalidates the results of another configuration
            # conjugate gradients run to convergence, so that the residual checks the systems
            launches = half(config, 4 * rank if solver == "cg" else 1).steps(Given(fixed, 0.0))
            solved.extend(launched[0].table for launched in launches if launched is not None)
            scale, errors = objective.row_scale(side, degrees), [0.0 if solved else math.nan]
            for row in handful(degrees) if solved else ():
                columns, ratings = row_entries(matrix, row)
                y = table[columns, :rank].astype(np.float64)
                A = y.T @ y + float(scale[row]) * REGULARIZATION * np.eye(rank)
                x = device.download(solved[0][row : row + 1])[0, :rank].astype(np.float64)
                errors.append(residual(A, x, y.T @ ratings))
            return float(np.max(errors))

        def launch(config: Any) -> None:
            if timed == "all":
                collections.deque(half(config).steps(Given(fixed, 0.0)), maxlen=0)
            elif timed == "sums":
                half(config).assemble(fixed)
            else:
                half(config).kernels_for(fixed).solve(*prepared[0])

        def reset() -> None:
            solved.clear()
            if timed == "solve":
                prepared[:] = [half(None).first_batch(fixed)]

        rows = len(half(None).first_batch(fixed)[3]) if timed == "solve" else np.count_nonzero(degrees)
        sums = 0.0 if timed == "solve" else float(matrix.nnz) * rank * (rank + 1)
        each = 2.0 * (steps + 1) * rank**2 if solver == "cg" else rank**3 / 3 + 2 * rank**2
        flops = sums + (0 if timed == "sums" else rows * each)
        return error, lambda config: TimedRun(functools.partial(launch, config), reset, flops)

    errors, runs = zip(*map(work, SIDES), strict=True)
    tolerance = RESIDUAL_TOLERANCE[precision] * (1 if itemsize == 4 else 1e-6)
    return Trial(errors, dict(zip(SIDES, runs, strict=True)), tolerance)
