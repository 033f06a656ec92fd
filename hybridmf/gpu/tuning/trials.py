"""Trials of the tuner: each runs a kernel as in a half sweep, pass or epoch of a fit, and checks its results.

A trial owns arrays on the device and takes any configuration of its kernel. Before timing, results are compared with
float64 NumPy on a few rows, or update by update.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from ...core import reference
from ...core.objective import SIDES, Factors, Objective, Side, State, Terms
from ...core.sparse import transposed
from ...core.validate import csr_arrays, make_csr
from ...datasets import _degrees, _popularity
from ...device.cuda import Array, Device
from ...formats import BalsMatrix, reorder
from ...plan import ccd_gpu
from ...plan import fused as plan_fused
from ...plan.fused import table_width
from .. import bals, ccd, cholesky_any, fused, sgd, topk
from ..assembly import Systems
from ..half import Pieces
from ..launch import DeviceEntries
from ..sparse_syrk import sparse_syrk
from .spaces import Candidate, Facts, bals_tile

SEGMENT = 2048
"""Entries of a segment of the published assemblies, as in a plan."""

BATCH_BYTES = 2 << 30
"""Maximum size of the systems of a trial, as in a plan; also at most a quarter of the free memory."""

SUMS_TOLERANCE = 2e-5
"""Tolerated error of a float32 sum, relative to the largest element; a millionth of that for float64."""

RESIDUAL_TOLERANCE = {"float32": 3e-5, "bf16": 2e-2}
"""Tolerated |Ax - b| / (|A| |x| + |b|)."""

REGULARIZATION = 0.05


@dataclass(frozen=True)
class Part:
    """One of the runs that a trial consists of.

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


class Trial(Protocol):
    """The work of a kernel."""

    tolerance: float

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """Runs to time with a configuration, by name ("user" and "item" if both sides are timed)."""

    def error(self, candidate: Candidate) -> float:
        """Error of the results against float64 NumPy; runs each part at least once."""


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
    memory: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def draw(cls, n_users: int = 138_493, n_items: int = 27_278, nnz: int = 12_000_000, seed: int = 0) -> Sample:
        """Log-normal user degrees, Zipf items: the sizes of MovieLens 20M, and enough entries to keep a GPU busy.

        Pairs drawn twice are kept once.
        """
        rng = np.random.default_rng(seed)
        users = np.repeat(np.arange(n_users), _degrees(n_users, nnz, rng))
        edges = np.cumsum(_popularity(n_items))
        places = np.searchsorted(edges, rng.random(len(users)) * edges[-1])
        items = rng.permutation(n_items)[np.minimum(places, n_items - 1)]
        pairs = np.unique(users.astype(np.int64) * n_items + items)
        values = rng.integers(1, 6, len(pairs)).astype(np.float32)
        indptr = np.searchsorted(pairs, np.arange(n_users + 1, dtype=np.int64) * n_items)
        matrix = make_csr(indptr, (pairs % n_items).astype(np.int32), values, (n_users, n_items))
        return cls(matrix, transposed(matrix), f"{n_users} x {n_items}, {len(pairs)} entries, seed {seed}")

    def side(self, side: Side, itemsize: int = 4) -> sp.csr_array:
        """The ratings by the rows of a side."""
        matrix = self.user_items if side == "user" else self.item_users
        return in_dtype(matrix, f"f{itemsize}")


def in_dtype(matrix: sp.csr_array, dtype: Any) -> sp.csr_array:
    """Convert the values of a matrix; SciPy's astype may also widen the indices."""
    indptr, indices, values = csr_arrays(matrix)
    return make_csr(indptr, indices, values.astype(dtype, copy=False), matrix.shape)


def random_table(n: int, rank: int, width: int, dtype: Any, seed: int) -> np.ndarray:
    """Random factors of the size that fits reach: around 1 / sqrt(rank), zeros in the padding."""
    table = np.zeros((n, width), dtype=dtype)
    table[:, :rank] = np.random.default_rng(seed).standard_normal((n, rank), dtype=np.float32) / math.sqrt(rank)
    return table


def handful(degrees: np.ndarray, count: int = 5) -> np.ndarray:
    """Positions of the longest row, of the shortest with entries, and of some between."""
    order = np.argsort(-degrees, kind="stable")[: int(np.count_nonzero(degrees))]
    return np.unique(order[np.linspace(0, len(order) - 1, count).astype(int)])


def subset(matrix: sp.csr_array, most: int) -> sp.csr_array:
    """Every k-th row, at most `most` of them."""
    if matrix.shape[0] <= most:
        return matrix
    chosen = matrix[np.linspace(0, matrix.shape[0] - 1, most).astype(int)]
    return make_csr(chosen.indptr, chosen.indices.astype(np.int32, copy=False), chosen.data, chosen.shape)


def system_limit(device: Device, rank: int, itemsize: int) -> int:
    """Systems that a trial may have in memory."""
    return max(1, min(BATCH_BYTES, device.free_bytes() // 4) // (rank * (rank + 1) * itemsize))


# ---------------------------------------------------------------------------------------------------- assemblies


class AssemblySample:
    """Rows of one side for a published assembly, and the outputs for their systems."""

    def __init__(self, device: Device, matrix: sp.csr_array, rank: int, itemsize: int) -> None:
        self.device, self.rank = device, rank
        self.dtype = np.dtype(f"f{itemsize}")
        self.matrix = subset(matrix, max(1, system_limit(device, rank, itemsize) // 2))
        indptr, indices, ratings = csr_arrays(self.matrix)
        self.degrees = np.diff(indptr)
        width = table_width(rank, self.dtype)
        self.table = random_table(matrix.shape[1], rank, width, self.dtype, 1)
        self.factors = device.upload(self.table)
        self.entries = DeviceEntries(device.upload(indices), device.upload(ratings.astype(self.dtype, copy=False)))
        order = np.argsort(-self.degrees, kind="stable")[: int(np.count_nonzero(self.degrees))]
        self.pieces = Pieces.cut(np.asarray(indptr, dtype=np.int64), order, SEGMENT)
        self.segments = device.upload(self.pieces.segments)
        self.flops = float(len(indices)) * rank * (rank + 1)

    @functools.cached_property
    def outputs(self) -> tuple[Array, Array]:
        """(matrices, rhs), one slot per segment."""
        return self._empty(len(self.pieces.segments))

    @functools.cached_property
    def row_outputs(self) -> tuple[Array, Array]:
        """(matrices, rhs), one slot per row."""
        return self._empty(len(self.degrees))

    def _empty(self, n: int) -> tuple[Array, Array]:
        shape = (self.rank, self.rank)
        return self.device.empty((n, *shape), self.dtype), self.device.empty((n, self.rank), self.dtype)

    def clear(self, outputs: tuple[Array, Array]) -> None:
        """Overwrite results of another configuration, which must not pass the check."""
        for array in outputs:
            array[...] = np.nan

    def error(self, outputs: tuple[Array, Array], by_row: bool) -> float:
        """Largest error over a few rows, relative to the largest element of each."""
        worst = 0.0
        for row in handful(self.degrees):
            A, b = (self._download(array, row, by_row) for array in outputs)
            part = slice(self.matrix.indptr[row], self.matrix.indptr[row + 1])
            y = self.table[self.matrix.indices[part], : self.rank].astype(np.float64)
            r = self.matrix.data[part].astype(np.float64)
            wanted, right = y.T @ y, y.T @ r
            errors = (
                np.abs(np.tril(A - wanted)).max() / np.abs(wanted).max(),
                np.abs(b - right).max() / np.abs(right).max(),
            )
            worst = float(np.max([worst, *errors]))  # NaN stays
        return worst

    def _download(self, array: Array, row: int, by_row: bool) -> np.ndarray:
        if by_row:
            return self.device.download(array[row : row + 1]).sum(axis=0, dtype=np.float64)
        place = int(np.flatnonzero(self.pieces.rows == row)[0])
        first, last = self.pieces.slots[place], self.pieces.slots[place + 1]
        return self.device.download(array[first:last]).sum(axis=0, dtype=np.float64)


class SyrkTrial:
    """`sparse_syrk` over the rows of both sides."""

    def __init__(self, device: Device, sample: Sample, facts: Facts) -> None:
        self.device = device
        self.rank, itemsize = facts["rank"], facts["itemsize"]
        self.sides = {side: AssemblySample(device, sample.side(side, itemsize), self.rank, itemsize) for side in SIDES}
        self.tolerance = SUMS_TOLERANCE * (1 if itemsize == 4 else 1e-6)

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """See `Trial`."""
        return {
            side: Part(functools.partial(self._run, sums, candidate.config), None, sums.flops)
            for side, sums in self.sides.items()
        }

    def _run(self, sums: AssemblySample, config: Any) -> None:
        sparse_syrk(self.device, sums.outputs, sums.factors, sums.entries, sums.segments, config)

    def error(self, candidate: Candidate) -> float:
        """See `Trial`."""
        worst = 0.0
        for sums in self.sides.values():
            sums.clear(sums.outputs)
            self._run(sums, candidate.config)
            worst = float(np.max([worst, sums.error(sums.outputs, by_row=False)]))
        return worst


class BalsTrial:
    """`bals` over the rows of both sides, ordered by degree as in a fit."""

    def __init__(self, device: Device, sample: Sample, facts: Facts) -> None:
        self.device, self.rank = device, facts["rank"]
        self.itemsize = facts["itemsize"]
        if "by degree" not in sample.memory:
            by_degree = reorder(sample.user_items).matrix
            sample.memory["by degree"] = {"user": by_degree, "item": transposed(by_degree)}
        matrices = sample.memory["by degree"]
        self.sides: dict[Side, AssemblySample] = {}
        for side in SIDES:
            matrix = in_dtype(matrices[side], f"f{self.itemsize}")
            self.sides[side] = AssemblySample(device, matrix, self.rank, self.itemsize)
        self.tolerance = SUMS_TOLERANCE * (1 if self.itemsize == 4 else 1e-6)
        self._tiles: dict[tuple[Side, tuple[int, int]], bals.BalsTiles] = {}

    def tiles(self, side: Side, size: tuple[int, int]) -> bals.BalsTiles:
        """Tiles of a size on the device; the last few are kept."""
        key = (side, size)
        if key not in self._tiles:
            while len(self._tiles) >= 8:
                del self._tiles[next(iter(self._tiles))]
            self._tiles[key] = bals.upload_tiles(self.device, BalsMatrix.from_csr(self.sides[side].matrix, *size))
        return self._tiles[key]

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """See `Trial`; tiles are built before and not timed."""
        size = bals_tile(candidate)
        return {
            side: Part(functools.partial(self._run, side, size, candidate.config), None, sums.flops)
            for side, sums in self.sides.items()
        }

    def _run(self, side: Side, size: tuple[int, int], config: Any) -> None:
        sums, tiles = self.sides[side], self.tiles(side, size)
        blocks = bals.RowBlocks.of(tiles, 0, -(-len(sums.degrees) // size[0]))
        bals.bals(self.device, sums.row_outputs, sums.factors, sums.entries, tiles, blocks, config)

    def error(self, candidate: Candidate) -> float:
        """See `Trial`."""
        size, worst = bals_tile(candidate), 0.0
        for side, sums in self.sides.items():
            sums.clear(sums.row_outputs)
            self._run(side, size, candidate.config)
            worst = float(np.max([worst, sums.error(sums.row_outputs, by_row=True)]))
        return worst


class FusedSide:
    """Rows of one side whose systems the fused kernels assemble and solve."""

    def __init__(self, device: Device, matrix: sp.csr_array, facts: Facts) -> None:
        self.device, self.rank = device, facts["rank"]
        self.matrix = matrix
        indptr, indices, ratings = csr_arrays(matrix)
        self.degrees, width = np.diff(indptr), table_width(self.rank, np.float32)
        self.table = random_table(matrix.shape[1], self.rank, width, np.float32, 1)
        self.factors, self.indptr = device.upload(self.table), device.upload(np.asarray(indptr, dtype=np.int64))
        self.entries = DeviceEntries(device.upload(indices), device.upload(ratings))
        objective = Objective("explicit", REGULARIZATION, 1.0)
        self.scale = objective.row_scale(self.degrees).astype(np.float32)
        n = len(self.degrees)
        self.systems = Systems(
            solutions=device.zeros((n, width), np.float32),
            status=device.zeros(n, np.int32),
            gram=None,
            ridge=device.upload(np.full(self.rank, REGULARIZATION, np.float32)),
            scale=device.upload(self.scale),
        )
        order = np.argsort(-self.degrees, kind="stable")[: int(np.count_nonzero(self.degrees))]
        at_once = self.rank < plan_fused.SOLVED_APART
        n_long = int(np.count_nonzero(self.degrees > plan_fused.SEGMENT)) if at_once else len(order)
        self.short = device.upload(order[n_long:].astype(np.int32))
        pieces = Pieces.cut(np.asarray(indptr, dtype=np.int64), order[:n_long], plan_fused.SEGMENT)
        most = max(1, min(BATCH_BYTES, device.free_bytes() // 4) // (4 * plan_fused.partial_floats(self.rank)))
        self.batches = [tuple(map(device.upload, (b.rows, b.slots, b.segments))) for b in pieces.batches(most)]
        longest = max((len(batch[2]) for batch in self.batches), default=0)
        self.partials = device.empty((longest, plan_fused.partial_floats(self.rank)), np.float32)
        steps = 6 if facts["solver"] == "cg" else 1
        scale = fused.entry_scale(float(np.abs(self.table).max()), 1.0) if facts["precision"] == "float32" else 1.0
        usual = plan_fused.FusedConfig.rule(self.rank)
        self.kernels = fused.FusedKernels(device, usual, facts["precision"], facts["solver"], 0.0, steps, scale)
        solve = 2.0 * (steps + 1) * self.rank**2 if facts["solver"] == "cg" else self.rank**3 / 3 + 2 * self.rank**2
        self.flops = float(len(indices)) * self.rank * (self.rank + 1) + len(order) * solve

    def run(self, config: Any, **changes: Any) -> None:
        """Solve all rows."""
        kernels, systems, entries = replace(self.kernels, config=config, **changes), self.systems, self.entries
        for rows, slots, segments in self.batches:
            partials = (self.partials[: len(segments)],)
            kernels.assemble(partials, self.factors, entries, segments)
            kernels.solve(systems, partials, slots, rows, entries)
        kernels.solve_rows(systems, self.factors, entries, self.indptr, self.short)

    def clear(self) -> None:
        """Overwrite results of another configuration, which must not pass the check nor serve as a warm start."""
        self.systems.solutions[...] = 0

    def error(self) -> float:
        """Largest residual over a few rows."""
        worst = 0.0
        for row in handful(self.degrees):
            part = slice(self.matrix.indptr[row], self.matrix.indptr[row + 1])
            y = self.table[self.matrix.indices[part], : self.rank].astype(np.float64)
            A = y.T @ y + float(self.scale[row]) * REGULARIZATION * np.eye(self.rank)
            b = y.T @ self.matrix.data[part].astype(np.float64)
            x = self.device.download(self.systems.solutions[row : row + 1])[0, : self.rank].astype(np.float64)
            worst = float(np.max([worst, residual(A, x, b)]))
        return worst


class FusedTrial:
    """The fused kernels over the rows of both sides."""

    def __init__(self, device: Device, sample: Sample, facts: Facts) -> None:
        self.sides = {side: FusedSide(device, sample.side(side), facts) for side in SIDES}
        self.tolerance = RESIDUAL_TOLERANCE[facts["precision"]]

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """See `Trial`."""
        return {
            side: Part(functools.partial(rows.run, candidate.config), rows.clear, rows.flops)
            for side, rows in self.sides.items()
        }

    def error(self, candidate: Candidate) -> float:
        """See `Trial`; conjugate gradients run to convergence, so that the residual checks the systems."""
        worst = 0.0
        for rows in self.sides.values():
            rows.clear()
            steps = 4 * rows.rank if rows.kernels.solver == "cg" else rows.kernels.cg_steps
            rows.run(candidate.config, cg_steps=steps)
            worst = float(np.max([worst, rows.error()]))
        return worst


def residual(A: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    """|Ax - b| / (|A| |x| + |b|)."""
    norm = np.linalg.norm
    return float(norm(A @ x - b) / (norm(A, 2) * norm(x) + norm(b)))


# ---------------------------------------------------------------------------------------------------- solvers


class SystemsTrial:
    """Cholesky or conjugate gradients of a batch of systems in global memory."""

    distinct = 1024
    """Number of random systems; the others are copies of them."""

    most = 32768
    """Systems of a batch."""

    def __init__(self, kernel: str, device: Device, sample: Sample, facts: Facts) -> None:
        self.kernel, self.device, self.rank = kernel, device, facts["rank"]
        dtype = np.dtype(f"f{facts.get('itemsize', 4)}")
        self.dtype = dtype
        n = max(1, min(self.most, system_limit(device, self.rank, dtype.itemsize) // 2))
        rng = np.random.default_rng(0)
        rows = rng.standard_normal((min(n, self.distinct), self.rank, self.rank))
        self.systems = (rows @ rows.transpose(0, 2, 1) / self.rank + 0.5 * np.eye(self.rank)).astype(dtype)
        self.right = rng.standard_normal((n, self.rank)).astype(dtype)
        few = device.upload(self.systems)
        self.original = few[device.upload(np.arange(n) % len(rows))]
        self.rhs = device.upload(self.right)
        self.matrices = device.empty((n, self.rank, self.rank), dtype)
        self.solutions = device.zeros((n, self.rank), dtype)
        self.status = device.zeros(n, np.int32)
        self.slots, self.rows = device.upload(np.arange(n + 1)), device.upload(np.arange(n, dtype=np.int32))
        self.tolerance = 3e-5 if dtype.itemsize == 4 else 1e-12
        self.n = n

    def _prepare(self) -> None:
        self.matrices[...] = self.original
        self.solutions[...] = 0

    def _run(self, config: Any, steps: int) -> None:
        arrays = (self.solutions, self.status, (self.matrices, self.rhs), self.slots, self.rows)
        if self.kernel == "cg_any":
            cholesky_any.cg_solve(self.device, *arrays, steps, config)
        else:
            cholesky_any.cholesky_solve(self.device, *arrays, 0.0, config)

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """See `Trial`."""
        f = self.rank
        flops = self.n * (2.0 * 4 * f * f if self.kernel == "cg_any" else f**3 / 3 + 2.0 * f * f)
        return {"systems": Part(functools.partial(self._run, candidate.config, 3), self._prepare, flops)}

    def error(self, candidate: Candidate) -> float:
        """See `Trial`."""
        self._prepare()
        self._run(candidate.config, 4 * self.rank)
        worst = 0.0
        for place in np.unique(np.linspace(0, self.n - 1, 5).astype(int)):
            x = self.device.download(self.solutions[place : place + 1])[0].astype(np.float64)
            A = self.systems[place % len(self.systems)].astype(np.float64)
            worst = float(np.max([worst, residual(A, x, self.right[place].astype(np.float64))]))
        return worst


# ---------------------------------------------------------------------------------------------------- SGD


class BlockedTrial:
    """MSGD's passes over the longest item rows; the check processes shorter rows, update by update."""

    rate = 0.005
    longest = 128
    """Number of timed rows."""

    def __init__(self, device: Device, sample: Sample, facts: Facts) -> None:
        self.device, self.ld = device, facts["ld"]
        self.dtype = np.dtype(f"f{facts['itemsize']}")
        self.matrix = sample.side("item", facts["itemsize"])
        degrees = np.diff(self.matrix.indptr)
        order = np.argsort(-degrees, kind="stable")
        self.long = device.upload(order[: self.longest].astype(np.int32))
        moderate = np.flatnonzero((degrees > 0) & (degrees <= 600))
        self.checked = moderate[np.argsort(-degrees[moderate], kind="stable")][:4].astype(np.int32)
        if not len(self.checked):
            raise ValueError("the sample has no item with 1 to 600 entries to check the kernel msgd with")
        self.tables = [random_table(n, self.ld, self.ld, self.dtype, seed) for seed, n in enumerate(self.matrix.shape)]
        self.fixed = sgd.Rows(device.upload(self.tables[1]))
        self.moved = sgd.Rows(device.upload(self.tables[0]))
        self.walk = sgd.Walk.upload(device, self.matrix)
        self.terms = Terms(self.rate, REGULARIZATION, 0.0, self.rate, REGULARIZATION)
        self.tolerance = 2e-4 if self.dtype.itemsize == 4 else 1e-10
        self.flops = 8.0 * self.ld * float(degrees[order[: self.longest]].sum())

    def _walk(self, tasks: Array, config: Any) -> None:
        sgd.blocked(self.device, self.moved, self.fixed, self.walk, tasks, self.terms, config)

    def _prepare(self) -> None:
        self.moved = sgd.Rows(self.device.upload(self.tables[0]))

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """See `Trial`."""
        run = functools.partial(self._walk, self.long, candidate.config)
        return {"item": Part(run, self._prepare, self.flops)}

    def error(self, candidate: Candidate) -> float:
        """See `Trial`."""
        self._prepare()
        self._walk(self.device.upload(self.checked), candidate.config)
        worst = 0.0
        for row in self.checked:
            found = self.device.download(self.moved.matrix[int(row) : int(row) + 1])[0]
            wanted = self._walked(int(row))
            worst = float(np.max([worst, np.abs(found - wanted).max() / np.abs(wanted).max()]))
        return worst

    def _walked(self, row: int) -> np.ndarray:
        v, users = self.tables[0][row].astype(np.float64), self.tables[1]
        part = slice(self.matrix.indptr[row], self.matrix.indptr[row + 1])
        for user, rating in zip(self.matrix.indices[part], self.matrix.data[part].astype(float), strict=True):
            u = users[user].astype(np.float64)
            v = (1 - self.rate * REGULARIZATION) * v + self.rate * (rating - v @ u) * u
        return v


class HogwildTrial:
    """Epochs of batch-Hogwild.

    The check has two parts: one worker on a few entries, update by update; and all workers, whose squared errors in the
    third epoch may be at most 2 % above those of the rule's configuration (the first that is tried).
    """

    rate = 0.005
    epochs = 3
    allowed_rise = 0.02

    def __init__(self, device: Device, sample: Sample, facts: Facts) -> None:
        self.device, self.ld, self.biases = device, facts["ld"], facts["biases"]
        self.stored = np.dtype(f"f{facts['itemsize']}")
        self.held: Side = "user" if sample.user_items.shape[0] >= sample.user_items.shape[1] else "item"
        self.matrix = sample.side(self.held)
        self.mean = float(self.matrix.data.mean(dtype=np.float64))
        self.walk = sgd.Walk.upload(device, self.matrix)
        self.terms = Terms(self.rate, REGULARIZATION, self.mean, self.rate, REGULARIZATION)
        self.work: tuple[sgd.Rows, sgd.Rows] | None = None
        self._runs: dict[int, Array] = {}
        self.small = subset(self.matrix, 12)
        self.tolerance = 5e-5 if self.stored.itemsize == 4 else 5e-2
        self.ruled_loss: float | None = None

    def runs(self, longest: int) -> Array:
        """Shuffled runs of the whole sample on the device."""
        if longest not in self._runs:
            rng = np.random.default_rng(0)
            self._runs[longest] = self.device.upload(sgd.make_runs(self.matrix.indptr, rng, longest))
        return self._runs[longest]

    def _start(self, shape: tuple[int, int]) -> tuple[sgd.Rows, sgd.Rows]:
        return self._rows(shape[0], 0), self._rows(shape[1], 1)

    def _rows(self, n: int, seed: int) -> sgd.Rows:
        table = self.device.upload(random_table(n, self.ld, self.ld, self.stored, seed))
        return sgd.Rows(table, self.device.zeros(n, np.float32) if self.biases else None)

    def _epoch(self, config: Any) -> Array:
        runs = self.runs(config.run)
        held, walked = self.work or self._start(self.matrix.shape)
        self.work = held, walked
        return sgd.batch_hogwild(self.device, held, walked, self.walk, runs, self.terms, config.limited(len(runs)))

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """See `Trial`."""
        flops = 8.0 * self.ld * float(len(self.matrix.data))
        self.runs(candidate.config.run)  # uploads runs before timing
        return {"epoch": Part(functools.partial(self._epoch, candidate.config), None, flops)}

    def error(self, candidate: Candidate) -> float:
        """See `Trial`."""
        return float(np.max([self._of_one_worker(candidate.config), self._of_all_workers(candidate.config)]))

    def _of_one_worker(self, config: Any) -> float:
        runs = sgd.make_runs(self.small.indptr, np.random.default_rng(0), config.run)[:40]
        held, walked = self._start(self.small.shape)
        start = [self.device.download(rows.matrix).astype(np.float32) for rows in (held, walked)]
        walk = sgd.Walk.upload(self.device, self.small)
        one = replace(config, n_workers=1)
        sgd.batch_hogwild(self.device, held, walked, walk, self.device.upload(runs), self.terms, one)
        owners, counts = runs[:, 1] >> 32, runs[:, 1] & 0xFFFFFFFF
        places = np.concatenate([np.arange(b, b + n) for b, n in zip(runs[:, 0], counts, strict=True)])
        order = np.repeat(owners, counts), self.small.indices[places], self.small.data[places]
        biases = [np.zeros(len(table), np.float32) if self.biases else None for table in start]
        state = State(Factors(start[0], biases[0]), Factors(start[1], biases[1]), self.mean)
        wanted = reference.sgd_entries(*order, state, self.terms)
        pairs = zip((held, walked), (wanted.user, wanted.item), strict=True)
        errors = [
            np.abs(self.device.download(rows.matrix) - want.matrix).max() / np.abs(want.matrix).max()
            for rows, want in pairs
        ]
        return float(np.max(errors))

    def _of_all_workers(self, config: Any) -> float:
        """The tolerance, scaled by the used part of the allowed rise."""
        self.work = self._start(self.matrix.shape)
        for _ in range(self.epochs):
            errors = self._epoch(config)
        loss = float(self.device.download(errors).sum())
        if self.ruled_loss is None:
            self.ruled_loss = loss
        rise = loss / self.ruled_loss - 1
        return self.tolerance * max(0.0, rise / self.allowed_rise) if math.isfinite(loss) else math.nan


# ---------------------------------------------------------------------------------------------------- CCD++, top-K


class CcdTrial:
    """One side's pass of CCD++ over a factor, vectors in shared memory; checks the ridge regressions of some rows."""

    def __init__(self, device: Device, sample: Sample, facts: Facts) -> None:
        self.device, self.vectors = device, facts["vectors"]
        self.dtype = np.dtype(f"f{facts['itemsize']}")
        self.side: Side = "item" if self.vectors == ccd_gpu.VECTORS["item"] else "user"
        self.matrix = sample.side(self.side, facts["itemsize"])
        self.degrees = np.diff(self.matrix.indptr)
        self.objective = Objective("explicit", REGULARIZATION, 1.0)
        rng = np.random.default_rng(0)
        # fixed side: previous factor, this one, its new values; own side: previous factor, this one
        self.fixed = [self._vector(rng, self.matrix.shape[1]) for _ in range(3)]
        if self.vectors == 2:
            self.fixed[2] = self.fixed[1]
        self.own = [self._vector(rng, self.matrix.shape[0]) for _ in range(2)]
        self.on_device = [device.upload(vector) for vector in (*self.fixed, *self.own)]
        self.solved = device.zeros(len(self.own[0]), self.dtype)
        self._entries: dict[int, ccd.CcdEntries] = {}
        self.tolerance = 1e-4 if self.dtype.itemsize == 4 else 1e-12

    def _vector(self, rng: np.random.Generator, n: int) -> np.ndarray:
        vector = np.zeros(ccd_gpu.padded(n, self.dtype), dtype=self.dtype)
        vector[:n] = 0.3 * rng.standard_normal(n)
        return vector

    def entries(self, config: ccd_gpu.StagedConfig) -> ccd.CcdEntries:
        """The sample in the layout of a configuration; the residual equals the ratings."""
        layout = ccd_gpu.CcdConfig.staged_as(config, self.matrix.shape[1], self.vectors, self.dtype, self.device.spec)
        if config.segment not in self._entries:
            self._entries[config.segment] = ccd.CcdEntries(self.device, self.matrix, self.objective, layout)
        entries = copy.copy(self._entries[config.segment])  # the layout does not depend on threads
        entries.config, entries._kernels = layout, {}
        return entries

    def _run(self, config: ccd_gpu.StagedConfig, pending: bool) -> None:
        before, old, new, own_before, own_old = self.on_device
        fixed, own = ccd.Vectors(before, old, new), ccd.Vectors(own_before, own_old, own_old)
        mode = ccd.PassMode(self.vectors, pending, False)
        ccd.rank_one(self.solved, self.entries(config), fixed, own, mode)

    def _reset(self, config: ccd_gpu.StagedConfig) -> None:
        entries = self.entries(config)
        entries.residuals[...] = entries.ratings

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """See `Trial`; residuals are reset, so that values do not grow over many passes."""
        config = candidate.config
        flops = 10.0 * float(len(self.matrix.data))
        prepare = functools.partial(self._reset, config)
        return {self.side: Part(functools.partial(self._run, config, True), prepare, flops)}

    def error(self, candidate: Candidate) -> float:
        """See `Trial`."""
        self._reset(candidate.config)
        self.solved[...] = np.nan
        self._run(candidate.config, True)
        penalty = REGULARIZATION * self.objective.row_scale(self.degrees)
        (p, q, c), (a, b) = ([v.astype(np.float64) for v in vectors] for vectors in (self.fixed, self.own))
        solved = self.device.download(self.solved)
        worst = 0.0
        for row in handful(self.degrees, 9):
            part = slice(self.matrix.indptr[row], self.matrix.indptr[row + 1])
            at, r = self.matrix.indices[part], self.matrix.data[part].astype(np.float64)
            e = r - a[row] * p[at] + b[row] * q[at]
            wanted = float(e @ c[at]) / (penalty[row] + float(c[at] @ c[at]))
            size = float(np.abs(e) @ np.abs(c[at])) / (penalty[row] + float(c[at] @ c[at]))
            worst = float(np.max([worst, abs(solved[row] - wanted) / max(size, 1e-30)]))
        return worst


class TopKTrial:
    """Top 10 of random users among the items of the sample."""

    wanted = 10

    def __init__(self, device: Device, sample: Sample, facts: Facts, n_users: int = 65536) -> None:
        self.device, rank = device, facts["padded"]
        n_users, n_items = min(n_users, sample.user_items.shape[0]), sample.user_items.shape[1]
        rng = np.random.default_rng(0)
        self.users = random_table(n_users, rank, rank, np.float32, 0)
        norms = rng.lognormal(0.0, 0.5, n_items).astype(np.float32)
        self.items = random_table(n_items, rank, rank, np.float32, 1) * norms[:, None]
        self.on_device = device.upload(self.users)
        self.packed = topk.PackedItems(device, self.items)
        self.tolerance = 1e-5
        self.flops = 2.0 * n_users * n_items * rank

    def _run(self, config: Any) -> tuple[Array, Array]:
        self.packed.config = config
        return topk.top_k_on_device(self.device, self.on_device, self.packed, min(self.wanted, len(self.items)))

    def parts(self, candidate: Candidate) -> dict[str, Part]:
        """See `Trial`."""
        return {"users": Part(functools.partial(self._run, candidate.config), None, self.flops)}

    def error(self, candidate: Candidate) -> float:
        """See `Trial`."""
        ids, scores = (self.device.download(array) for array in self._run(candidate.config))
        worst = 0.0
        for user in np.unique(np.linspace(0, len(self.users) - 1, 7).astype(int)):
            exact = self.items.astype(np.float64) @ self.users[user].astype(np.float64)
            best = np.sort(exact)[::-1][: ids.shape[1]]
            errors = np.abs([scores[user] - exact[ids[user]], exact[ids[user]] - best])
            worst = float(np.max([worst, errors.max() / np.abs(exact).max()]))
        return worst


MAKERS: dict[str, Callable[[Device, Sample, Facts], Trial]] = {
    "fused": FusedTrial,
    "sparse_syrk": SyrkTrial,
    "bals": BalsTrial,
    "cholesky_tiles": functools.partial(SystemsTrial, "cholesky_tiles"),
    "cholesky_any": functools.partial(SystemsTrial, "cholesky_any"),
    "cg_any": functools.partial(SystemsTrial, "cg_any"),
    "msgd": BlockedTrial,
    "batch_hogwild": HogwildTrial,
    "ccd": CcdTrial,
    "top_k": TopKTrial,
}
"""The trial of each kernel of `spaces.SPACES`."""
