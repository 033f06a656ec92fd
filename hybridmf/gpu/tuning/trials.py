"""Trials of the tuner: a kernel runs on drawn ratings as in a fit, and its results are checked before it is timed.

`Trial` is the same for all kernels. A function for each family of kernels puts data on the device and returns the
`KernelRun` that differs: how to launch a configuration, and the error of its results against float64 NumPy on a few
rows.
"""

from __future__ import annotations

import collections
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp

from ...core.objective import SIDES, Objective, Side, Terms
from ...core.sparse import transposed
from ...core.validate import csr_arrays, make_csr
from ...datasets import _stars
from ...device.cuda import Array, Device
from ...formats import reorder
from ...plan import ccd_gpu
from ...plan.als_gpu import gpu_plan
from ...plan.fused import table_width
from ...plan.make import make_plan
from ...plan.tables import Facts
from ...plan.types import Settings
from .. import ccd, sgd, topk
from ..assembly import Cleared, RowKernels
from ..factors import DeviceFactors, GpuFactors
from ..half import HalfSweep

RESIDUAL_TOLERANCE = {"float32": 3e-5, "bf16": 2e-2}
"""Tolerated |Ax - b| / (|A| |x| + |b|); a millionth of it in float64."""

REGULARIZATION = 0.05

TIMED_ROWS = 128
"""Rows that the trial of MSGD times: the longest."""

KEPT_HALVES = 6
"""Half sweeps of a side that stay on the device: BALS has one for each size of tiles."""


@dataclass(frozen=True)
class TimedRun:
    """A timed run.

    Attributes
    ----------
    run, prepare : callable
        The timed function, and an untimed one that runs before it.
    flops : float
        Useful multiplications and additions.
    """

    run: Callable[[], Any]
    prepare: Callable[[], Any] | None = None
    flops: float = 0.0


@dataclass(frozen=True)
class KernelRun:
    """A run of a kernel over data on the device, for any configuration.

    Attributes
    ----------
    name : str
        In records: the side, if both sides are timed.
    launch : callable
        Takes a configuration.
    error : callable
        Error of the results of the last launch against float64 NumPy.
    flops : float
        Useful multiplications and additions.
    reset : callable
        Restores the inputs and invalidates the results of another configuration, before each launch.
    check : callable, optional
        Replaces `launch` before `error`.
    """

    name: str
    launch: Callable[[Any], Any]
    error: Callable[[], float]
    flops: float
    reset: Callable[[], Any] | None = None
    check: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Trial:
    """The work of a kernel, and the tolerated error of its results."""

    works: Sequence[KernelRun]
    tolerance: float

    def error(self, config: Any) -> float:
        """Largest error of a configuration; runs all work at least once."""
        errors = [0.0]
        for work in self.works:
            if work.reset is not None:
                work.reset()
            (work.check or work.launch)(config)
            errors.append(work.error())
        return float(np.max(errors))  # NaN stays

    def parts(self, config: Any) -> dict[str, TimedRun]:
        """Runs to time with a configuration, by name."""
        return {
            work.name: TimedRun(functools.partial(work.launch, config), work.reset, work.flops) for work in self.works
        }


# ---------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Sample:
    """Ratings that trials work on.

    Attributes
    ----------
    user_items, item_users : csr_array, float32
    name : str
        Name in records.
    """

    user_items: sp.csr_array
    item_users: sp.csr_array
    name: str

    @classmethod
    def draw(cls, n_users: int = 138_493, n_items: int = 27_278, nnz: int = 12_000_000, seed: int = 0) -> Sample:
        """Log-normal user degrees, Zipf items: the sizes of MovieLens 20M, and enough entries to keep a GPU busy.

        Pairs drawn twice are kept once.
        """
        matrix = _stars(n_users, n_items, nnz, np.random.default_rng(seed)).user_items
        return cls(matrix, transposed(matrix), f"{n_users} x {n_items}, {matrix.nnz} entries, seed {seed}")

    def side(self, side: Side, itemsize: int = 4) -> sp.csr_array:
        """The ratings by the rows of a side."""
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
    """Random factors of the size that fits reach: around 1 / sqrt(rank), zeros in the padding."""
    table = np.zeros((n, width), dtype=dtype)
    table[:, :rank] = np.random.default_rng(seed).standard_normal((n, rank), dtype=np.float32) / math.sqrt(rank)
    return table


def handful(degrees: np.ndarray, count: int = 5) -> np.ndarray:
    """Positions of the longest row, of the shortest with entries, and of some between."""
    order = np.argsort(-degrees, kind="stable")[: int(np.count_nonzero(degrees))]
    return np.unique(order[np.linspace(0, len(order) - 1, count).astype(int)])


def row_entries(matrix: sp.csr_array, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns and float64 values of a row."""
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return matrix.indices[part], matrix.data[part].astype(np.float64)


def residual(A: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    """|Ax - b| / (|A| |x| + |b|)."""
    norm = np.linalg.norm
    return float(norm(A @ x - b) / (norm(A, 2) * norm(x) + norm(b)))


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, relative to the largest element."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


# ---------------------------------------------------------------------------------------------------- ALS


class TrialHalf(HalfSweep):
    """A half sweep of a fit, whose kernels have a configuration under trial."""

    changes: Mapping[str, Any] = MappingProxyType({})
    """Fields of the kernels."""

    def kernels_for(self, fixed: GpuFactors, cleared: Cleared | None = None) -> RowKernels:
        """See `HalfSweep`."""
        kernels: Any = super().kernels_for(fixed, cleared)
        return replace(kernels, **self.changes)

    def assemble(self, fixed: DeviceFactors) -> None:
        """Launch the sums of all rows alone."""
        (kernels, operand), entries = self.prepared(fixed), self._entries(fixed, 0.0)
        for batch in self.batches:
            with self.batches.fitting(batch):
                kernels.assemble(kernels.empty(len(batch.segments)), operand, entries, batch.segments)

    def first_batch(self, fixed: DeviceFactors) -> tuple[Any, ...]:
        """Launch the sums of the first batch; return the arguments that solve it."""
        (kernels, operand), entries = self.prepared(fixed), self._entries(fixed, 0.0)
        batch = next(iter(self.batches))
        sums = kernels.empty(len(batch.segments))
        kernels.assemble(sums, operand, entries, batch.segments)
        return self._systems(None, None), sums, batch.slots, batch.rows, entries


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
    )

    def work(side: Side) -> KernelRun:
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

        def check(config: Any) -> None:
            # conjugate gradients run to convergence, so that the residual checks the systems
            launches = half(config, 4 * rank if solver == "cg" else 1).launches(fixed, 0.0)
            solved.extend(launched[0].table for launched in launches if launched is not None)

        def launch(config: Any) -> None:
            if timed == "all":
                collections.deque(half(config).launches(fixed, 0.0), maxlen=0)
            elif timed == "sums":
                half(config).assemble(fixed)
            else:
                half(config).kernels_for(fixed).solve(*prepared[0])

        def reset() -> None:
            solved.clear()
            if timed == "solve":
                prepared[:] = [half(None).first_batch(fixed)]

        def error() -> float:
            scale, errors = objective.row_scale(side, degrees), [0.0 if solved else math.nan]
            for row in handful(degrees) if solved else ():
                columns, ratings = row_entries(matrix, row)
                y = table[columns, :rank].astype(np.float64)
                A = y.T @ y + float(scale[row]) * REGULARIZATION * np.eye(rank)
                x = device.download(solved[0][row : row + 1])[0, :rank].astype(np.float64)
                errors.append(residual(A, x, y.T @ ratings))
            return float(np.max(errors))

        rows = len(half(None).first_batch(fixed)[3]) if timed == "solve" else np.count_nonzero(degrees)
        sums = 0.0 if timed == "solve" else float(matrix.nnz) * rank * (rank + 1)
        each = 2.0 * (steps + 1) * rank**2 if solver == "cg" else rank**3 / 3 + 2 * rank**2
        return KernelRun(side, launch, error, sums + (0 if timed == "sums" else rows * each), reset, check)

    return Trial([work(side) for side in SIDES], RESIDUAL_TOLERANCE[precision] * (1 if itemsize == 4 else 1e-6))


# ---------------------------------------------------------------------------------------------------- SGD, CCD++


def msgd_trial(device: Device, sample: Sample, facts: Facts) -> Trial:
    """MSGD's passes over the longest item rows; the check processes shorter rows, update by update."""
    ld, itemsize, rate = facts["ld"], facts["itemsize"], 0.005
    matrix = sample.side("item", itemsize)
    degrees = np.diff(matrix.indptr)
    order = np.argsort(-degrees, kind="stable")
    checked = order[(degrees[order] > 0) & (degrees[order] <= 600)][:4]
    if not len(checked):
        raise ValueError("the sample has no item with 1 to 600 entries to check the kernel msgd with")
    items, users = (random_table(n, ld, ld, f"f{itemsize}", seed) for seed, n in enumerate(matrix.shape))
    start, fixed = device.upload(items), sgd.FactorRows(device.upload(users))
    moved, walk = sgd.FactorRows(device.upload(items)), sgd.Walk.upload(device, matrix)
    terms = Terms(rate, REGULARIZATION, 0.0, rate, REGULARIZATION)
    tasks = {"timed": order[:TIMED_ROWS], "checked": checked}
    uploaded = {name: device.upload(rows.astype(np.int32)) for name, rows in tasks.items()}

    def reset() -> None:
        moved.matrix[...] = start

    def launch(config: Any, rows: str = "timed") -> None:
        sgd.blocked(device, moved, fixed, walk, uploaded[rows], terms, config)

    def updated(row: int) -> np.ndarray:
        v = items[row].astype(np.float64)
        for user, rating in zip(*row_entries(matrix, row), strict=True):
            u = users[user].astype(np.float64)
            v = (1 - rate * REGULARIZATION) * v + rate * (rating - v @ u) * u
        return v

    def error() -> float:
        found = {row: device.download(moved.matrix[row : row + 1])[0] for row in checked.tolist()}
        return float(np.max([relative(v, updated(row)) for row, v in found.items()]))

    flops = 8.0 * ld * float(degrees[tasks["timed"]].sum())
    work = KernelRun("item", launch, error, flops, reset, functools.partial(launch, rows="checked"))
    return Trial([work], 2e-4 if itemsize == 4 else 1e-10)


def ccd_trial(device: Device, sample: Sample, facts: Facts) -> Trial:
    """One side's pass of CCD++ over a factor, vectors in shared memory; checks the ridge regressions of some rows."""
    vectors, dtype = facts["vectors"], np.dtype(f"f{facts['itemsize']}")
    side: Side = "item" if vectors == ccd_gpu.VECTORS["item"] else "user"
    matrix = sample.side(side, dtype.itemsize)
    n_rows, n_fixed = matrix.shape
    degrees, rng = np.diff(matrix.indptr), np.random.default_rng(0)
    objective = Objective.explicit(REGULARIZATION, "count", False)

    def vector(n: int) -> np.ndarray:
        values = np.zeros(ccd_gpu.padded(n, dtype), dtype=dtype)
        values[:n] = 0.3 * rng.standard_normal(n)
        return values

    p, q, c = (vector(n_fixed) for _ in range(3))  # the fixed side's previous factor, this one, and its new values
    c = q if vectors == 2 else c
    a, b = (vector(n_rows) for _ in range(2))  # the updated side's previous factor, and this one
    fixed = ccd.Vectors(*(device.upload(values) for values in (p, q, c)))
    own = ccd.Vectors(*(device.upload(values) for values in (a, b, b)))
    solved = device.zeros(len(a), dtype)

    layouts: dict[int, ccd.CcdEntries] = {}

    def launch(config: ccd_gpu.StagedConfig) -> None:
        staged = ccd_gpu.CcdConfig.staged_as(config, n_fixed, vectors, dtype, device.spec)
        if config.segment not in layouts:
            layouts[config.segment] = ccd.CcdEntries(device, side, matrix, objective, staged)
            reset()
        entries = copy.copy(layouts[config.segment])  # the layout does not depend on threads
        entries.config, entries._kernels = staged, {}
        ccd.rank_one(solved, entries, fixed, own, ccd.PassMode(vectors, True, False))

    def reset() -> None:
        solved[...] = np.nan
        for entries in layouts.values():
            entries.residuals[...] = entries.ratings

    def error() -> float:
        found, errors = device.download(solved), []
        penalty = REGULARIZATION * objective.row_scale(side, degrees)
        for row in handful(degrees, 9):
            at, r = row_entries(matrix, row)
            old, added, new = (values[at].astype(np.float64) for values in (p, q, c))
            e = r - float(a[row]) * old + float(b[row]) * added
            scale = penalty[row] + float(new @ new)
            size = float(np.abs(e) @ np.abs(new)) / scale
            errors.append(abs(found[row] - float(e @ new) / scale) / max(size, 1e-30))
        return float(np.max(errors))

    work = KernelRun(side, launch, error, 10.0 * float(matrix.nnz), reset)
    return Trial([work], 1e-4 if dtype.itemsize == 4 else 1e-12)


# ---------------------------------------------------------------------------------------------------- top-K


def topk_trial(device: Device, sample: Sample, facts: Facts, n_users: int = 65536) -> Trial:
    """Top 10 of random users among the items of the sample."""
    rank, (rows, n_items) = facts["padded"], sample.user_items.shape
    users = random_table(min(n_users, rows), rank, rank, np.float32, 0)
    norms = np.random.default_rng(0).lognormal(0.0, 0.5, n_items).astype(np.float32)
    items = random_table(n_items, rank, rank, np.float32, 1) * norms[:, None]
    on_device, packed = device.upload(users), topk.PackedItems(device, items, in_bytes=facts["in_bytes"])
    found: list[Array] = []

    def launch(config: Any) -> None:
        packed.config = config
        found[:] = topk.top_k_on_device(device, on_device, packed, min(10, n_items))

    def error() -> float:
        ids, scores = map(device.download, found)
        errors = []
        for user in np.unique(np.linspace(0, len(users) - 1, 7).astype(int)):
            exact = items.astype(np.float64) @ users[user].astype(np.float64)
            best = np.sort(exact)[::-1][: ids.shape[1]]
            wrong = np.abs([scores[user] - exact[ids[user]], exact[ids[user]] - best])
            errors.append(wrong.max() / np.abs(exact).max())
        return float(np.max(errors))

    return Trial([KernelRun("users", launch, error, 2.0 * len(users) * n_items * rank)], 1e-5)
