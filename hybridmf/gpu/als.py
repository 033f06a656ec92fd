"""The GPU's ALS: what a half sweep needs, and the solver that alternates two; the twin of `hybridmf.cpu.als`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.balance import balancing
from ..core.objective import SIDES, AwayFactors, Factors, Objective, Side, State, other_side
from ..core.sparse import transposed
from ..core.system import ceil_div, round_up
from ..core.validate import csr_arrays
from ..device.cuda import Array, Device
from ..errors import DeviceMemoryError
from ..formats import Reordered, reorder, tiled
from ..native.status import SINGULAR_PIVOT, check_status
from ..plan import fused as plan_fused
from ..plan.fused import BLOCK, FusedConfig, table_width
from ..plan.solver import Alternating
from ..plan.types import Plan
from . import assemblies, cholesky_any, fused, losses
from .fused import Systems
from .launch import Entries
from .rows import RowRange, read_range, widen_range

logger = logging.getLogger("hybridmf")

GRAM_ROWS = 4096
"""Rows whose products cuBLAS adds up in float32; the sums of such pieces are added in float64."""

GRAM_BYTES = 64 << 20
"""Of such pieces that are multiplied at a time: CuPy copies what it multiplies in stacks, which no plan counts."""

EXACT_ROWS = 65536
"""Rows that are widened to float64 at a time, where the Gram matrix is wanted in float64."""

LOSS_ROWS = 2048
"""Entries one warp sums the losses of."""


class DeviceFactors(AwayFactors):
    """Factors on a device; they come to the host when somebody looks.

    Parameters
    ----------
    device : Device
    table : float array, shape (n, width)
        Factors, a constant 1 where the model has biases, zeros up to the width.
    factors : int
        Columns that are factors.
    device_bias : float array, shape (n,), or None
    range : RowRange or None
        Of the table's rows; None until somebody has looked.
    """

    def __init__(
        self, device: Device, table: Array, factors: int, device_bias: Array | None, range: RowRange | None = None
    ) -> None:
        self.keep(device=device, table=table, factors=factors, device_bias=device_bias, range=range)

    device: Device
    table: Array
    factors: int
    device_bias: Array | None
    range: RowRange | None

    def look(self, status: Array | None = None) -> bool:
        """Find the range of the rows; whether any of `status` is not 0. Waits for the device, once."""
        return self.seen(self.begin_look(status))

    def begin_look(self, status: Array | None = None) -> Callable[[], np.ndarray]:
        """Launch what `look` waits for; for `seen`. What is launched after it is not waited for."""
        found = self.device.zeros(3, np.uint32)
        if self.has_range:
            widen_range(self.device, found, self.table, status)
        elif status is not None:
            found[2] = status.any()
        return self.device.begin_download(found)

    def seen(self, found: Callable[[], np.ndarray]) -> bool:
        """Wait for what `begin_look` has launched."""
        known, failed = read_range(found())
        if self.has_range:
            self.keep(range=known)
        return failed

    @property
    def has_range(self) -> bool:
        """Only the fused kernels, which are float32, ask for the range."""
        return bool(self.table.dtype == np.float32)

    def _brought(self) -> Factors:
        bias = None if self.device_bias is None else self.device.download(self.device_bias)
        matrix = self.device.download(self.table)
        if matrix.shape[1] != self.factors:
            matrix = np.ascontiguousarray(matrix[:, : self.factors])
        return Factors(matrix, bias)

    def __len__(self) -> int:
        return len(self.table)


def to_device(device: Device, factors: Factors, width: int) -> DeviceFactors:
    """Factors as a table of `width` columns on a device."""
    if isinstance(factors, DeviceFactors) and factors.device is device and factors.table.shape[1] == width:
        return factors
    table = np.empty((len(factors), width), dtype=factors.matrix.dtype)
    fill_table(table, factors)
    bias = None if factors.bias is None else device.upload(factors.bias)
    return DeviceFactors(device, device.upload(table), factors.matrix.shape[1], bias)


def fill_table(table: np.ndarray, factors: Factors) -> None:
    """Write factors, a constant 1 where there are biases, and zeros up to the table's width."""
    rank = factors.matrix.shape[1]
    table[:, :rank] = factors.matrix
    table[:, rank:] = 0
    if factors.bias is not None:
        table[:, rank] = 1


def weighted_gram(device: Device, table: Array, rank: int, objective: Objective) -> Array | None:
    """``unobserved_weight F^T F``, shape (rank, rank) padded with zeros to whole blocks; None for explicit feedback."""
    if not objective.is_implicit:
        return None
    return padded_gram(device, gram_sum(device, table), rank, table.dtype, objective)


def gram_sum(device: Device, table: Array) -> Any:
    """``F^T F`` of a table, sums of products in float32 added up in float64; shape (width, width)."""
    n, width = table.shape
    rows = max(GRAM_ROWS, ceil_div(n, 64))
    at_once = rows * max(1, GRAM_BYTES // (rows * width * table.dtype.itemsize))
    whole = n // rows * rows
    total: Any = 0.0
    for first, last in pairwise([*range(0, whole, at_once), whole, n]):
        part = table[first:last]
        if part.nbytes > GRAM_BYTES:  # one piece
            total = total + device.matmul(part.T, part).astype(np.float64)
        elif len(part):
            stack = part.reshape(max(1, len(part) // rows), -1, width)
            total = total + device.matmul(stack.transpose(0, 2, 1), stack).sum(axis=0, dtype=np.float64)
    return total


def padded_gram(device: Device, total: Array, rank: int, dtype: Any, objective: Objective) -> Array:
    """What systems are completed with, of a sum of `gram_sum`."""
    side = round_up(rank, BLOCK)
    gram = device.zeros((side, side), dtype)
    gram[:rank, :rank] = (objective.unobserved_weight * total)[:rank, :rank]
    return gram


def exact_gram(device: Device, table: Array, weights: Array | None = None) -> np.ndarray:
    """``F^T diag(weights) F`` of a table in float64, shape (width, width), on the host."""
    total = np.zeros((table.shape[1], table.shape[1]))
    for start in range(0, len(table), EXACT_ROWS):
        part = table[start : start + EXACT_ROWS].astype(np.float64)
        weighted = part if weights is None else part * weights[start : start + EXACT_ROWS, None]
        total += device.download(device.matmul(part.T, weighted))
    return total


@dataclass(frozen=True)
class Pieces:
    """Rows cut into segments: row k has the slots ``slots[k] ... slots[k + 1] - 1``.

    Attributes
    ----------
    rows : int32 array, shape (n,)
    slots : int64 array, shape (n + 1,)
    segments : int64 array, shape (n_slots, 3)
        (slot, begin, end).
    """

    rows: np.ndarray
    slots: np.ndarray
    segments: np.ndarray

    @classmethod
    def cut(cls, indptr: np.ndarray, rows: np.ndarray, longest: int) -> Pieces:
        """Segments of at most `longest` entries."""
        begins, ends = indptr[rows], indptr[rows + 1]
        counts = np.maximum(1, -(-(ends - begins) // longest))
        slots = np.concatenate(([0], np.cumsum(counts)))
        place = np.arange(slots[-1]) - np.repeat(slots[:-1], counts)
        begin = np.repeat(begins, counts) + place * longest
        end = np.minimum(begin + longest, np.repeat(ends, counts))
        segments = np.column_stack((np.arange(slots[-1]), begin, end)).astype(np.int64)
        return cls(rows.astype(np.int32), slots.astype(np.int64), segments)

    @property
    def packed(self) -> np.ndarray:
        """Segments, slots and rows, two in a number, one after the other; int64."""
        rows = np.zeros(ceil_div(len(self.rows), 2), np.int64)
        rows.view(np.int32)[: len(self.rows)] = self.rows
        return np.concatenate((self.segments.reshape(-1), self.slots, rows))

    def batches(self, slots: int) -> Iterator[Pieces]:
        """Consecutive rows with at most `slots` slots together (a single row may have more)."""
        start = 0
        while start < len(self.rows):
            stop = int(np.searchsorted(self.slots, self.slots[start] + slots, side="right")) - 1
            stop = min(max(stop, start + 1), len(self.rows))
            first, last = self.slots[start], self.slots[stop]
            segments = self.segments[first:last].copy()
            segments[:, 0] -= first
            yield Pieces(self.rows[start:stop], self.slots[start : stop + 1] - first, segments)
            start = stop


@dataclass(frozen=True)
class Batch:
    """Pieces on a device.

    Attributes
    ----------
    rows, slots, segments : arrays
        As in `Pieces`.
    """

    rows: Array
    slots: Array
    segments: Array

    @classmethod
    def upload(cls, upload: Callable[[np.ndarray], Array], parts: Iterable[Pieces]) -> list[Batch]:
        """The same on a device, all by one copy: of small ones, hundreds would take as long as the kernels."""
        parts = list(parts)
        packed = [part.packed for part in parts]
        whole = upload(np.concatenate([np.zeros(0, np.int64), *packed]))
        bounds = np.cumsum([0, *map(len, packed)])
        return [
            cls._unpacked(whole[first:last], part) for (first, last), part in zip(pairwise(bounds), parts, strict=True)
        ]

    @classmethod
    def _unpacked(cls, packed: Array, pieces: Pieces) -> Batch:
        n, after = len(pieces.rows), pieces.segments.size
        rows = packed[after + n + 1 :].view(np.int32)[:n]
        return cls(rows, packed[after : after + n + 1], packed[:after].reshape(-1, 3))


class HalfSweep:
    """One half of a sweep on a device: solves every row of `side` for the fixed factors of the other side.

    Parameters
    ----------
    device : Device
    side : {"user", "item"}
        The side that is solved; for messages.
    matrix : csr_array, shape (n_rows, n_fixed)
    objective : Objective
    plan : Plan
    names : int64 array, shape (n_rows,), optional
        What errors call each row, if not by its position in `matrix`.
    roots : (float, float), optional
        `range_of_roots` of all ratings, where `matrix` is a slab of them.
    """

    keeps_batches = True
    """Whether pieces of long rows stay on the device: 36 bytes each."""

    def __init__(
        self,
        device: Device,
        side: Side,
        matrix: sp.csr_array,
        objective: Objective,
        plan: Plan,
        names: np.ndarray | None = None,
        roots: tuple[float, float] | None = None,
    ) -> None:
        self.device, self.side, self.objective, self.plan, self.names = device, side, objective, plan, names
        indptr, indices, ratings = csr_arrays(matrix)
        self.dtype = matrix.dtype
        self.degrees = np.diff(indptr)
        self.width = table_width(plan.rank, self.dtype)
        self.indptr = device.upload(np.asarray(indptr, dtype=np.int64))
        self.indices, self.ratings = self._hold(indices, ratings)
        self.scale = device.upload(objective.row_scale(self.degrees).astype(self.dtype))
        self.ridge = device.upload(objective.ridge(plan.factors, plan.rank).astype(self.dtype))
        self.roots = roots or range_of_roots(objective, ratings)
        order = np.argsort(-self.degrees, kind="stable")
        order = order[: int(np.count_nonzero(self.degrees))]
        n_long = len(order) if self._sums_apart() else int(np.count_nonzero(self.degrees > plan.segment))
        self.long = Pieces.cut(np.asarray(indptr, dtype=np.int64), order[:n_long], plan.segment)
        self.short = device.upload(order[n_long:].astype(np.int32))
        self.batch_slots = plan.batch_slots
        self.config: FusedConfig | None = None  # of the fused kernels; None: the default
        self._all_batches: list[Batch] | None = None
        self.tiles = None
        if plan.assembly == "bals":
            bals = tiled(matrix, plan.tile_rows, plan.tile_cols, plan.num_threads)
            self.tiles = assemblies.upload_tiles(device, bals)

    def __len__(self) -> int:
        return len(self.degrees)

    def _sums_apart(self) -> bool:
        """Whether sums of all rows go through memory before they are solved, not only those of long ones."""
        return self.plan.assembly != "fused" or self.plan.rank >= plan_fused.SOLVED_APART

    def _hold(self, indices: np.ndarray, ratings: np.ndarray) -> tuple[Array, Array]:
        """The entries on the device."""
        return self.device.upload(indices), self.device.upload(ratings)

    def solve(
        self,
        fixed: DeviceFactors,
        mean: float,
        start: DeviceFactors | None = None,
        gram: Array | None = None,
        then: Callable[[DeviceFactors], DeviceFactors] | None = None,
    ) -> DeviceFactors:
        """New factors of the side; nothing that came in is written to.

        Parameters
        ----------
        then : callable, optional
            Called with the new factors when everything is launched and nothing is known to have succeeded; returns the
            factors that the next half sweep works with.

        Raises
        ------
        NotPositiveDefiniteError, NonFiniteError
        DeviceMemoryError
            Not even the smallest batch fits.
        """
        with self.device.active():
            return self._solve(fixed, mean, start, gram, then)

    def _solve(
        self,
        fixed: DeviceFactors,
        mean: float,
        start: DeviceFactors | None,
        gram: Array | None,
        then: Callable[[DeviceFactors], DeviceFactors] | None,
    ) -> DeviceFactors:
        launches = self.launches(fixed, mean, start, gram)
        try:
            while True:
                next(launches)
        except StopIteration as launched:
            solved, status = launched.value
        self.judge(status, solved if then is None else then(solved))
        return solved

    def launches(
        self,
        fixed: DeviceFactors,
        mean: float,
        start: DeviceFactors | None = None,
        gram: Array | None = None,
    ) -> Generator[None, None, tuple[DeviceFactors, Array]]:
        """Launch what `solve` does, step by step; (new factors, the status of each row), which are not waited for.

        One thread that has several devices can have all of them begin before it goes on with any: the first step ends
        with the first kernel that takes long.
        """
        plan = self.plan
        if gram is None:
            gram = weighted_gram(self.device, fixed.table, plan.rank, self.objective)
        # first asked for when there are sums to solve: until these are launched the device has nothing to do
        systems = functools.cache(functools.partial(self._begun, start, gram))
        entries = self._entries(fixed, mean)
        if plan.assembly == "fused":
            yield from self._solve_fused(systems, fixed, entries)
        elif plan.assembly == "bals":
            yield from self._solve_tiles(systems(), fixed.table, entries)
        else:
            yield from self._solve_batches(systems, fixed.table, entries)
        return self._unpack(systems().solutions), systems().status

    def _begun(self, start: DeviceFactors | None, gram: Array | None) -> Systems:
        """Where solutions go, begun where approximate solvers begin."""
        plan, device = self.plan, self.device
        solutions, status = self._results()
        if plan.solver != "cholesky" and start is not None:
            solutions[...] = start.table
            if start.device_bias is not None:
                solutions[:, plan.factors] = start.device_bias
            if not self.degrees.all():
                solutions[device.upload(np.flatnonzero(self.degrees == 0))] = 0
        return Systems(solutions, status, gram, self.ridge, self.scale)

    def _results(self) -> tuple[Array, Array]:
        """Zeros, where solutions and the status of each row go."""
        return self.device.zeros((len(self), self.width), self.dtype), self.device.zeros(len(self), np.int32)

    def judge(self, status: Array, solved: DeviceFactors) -> None:
        """Raise what went wrong in a row; what the next half sweep wants to know of `solved` is found on the way."""
        if solved.look(status):
            self.check(status)

    def check(self, status: Array) -> None:
        """Raise what went wrong in a row."""
        check_status(self.device.download(status), self.side, self.objective, self.names)

    def _entries(self, fixed: DeviceFactors, mean: float) -> Entries:
        offsets = None
        if self.objective.biases and fixed.device_bias is not None:
            offsets = fixed.device_bias + self.dtype.type(mean)
        return Entries(
            self.indices,
            self.ratings,
            offsets,
            self.objective.is_implicit,
            self.objective.alpha,
            self.objective.unobserved_weight,
        )

    def _unpack(self, solutions: Array) -> DeviceFactors:
        """Solutions as a table of factors; the last coordinate of a biased model becomes its bias."""
        factors = self.plan.factors
        if not self.objective.biases:
            return DeviceFactors(self.device, solutions, factors, None)
        bias = solutions[:, factors].copy()
        solutions[:, factors] = 1
        return DeviceFactors(self.device, solutions, factors, bias)

    @property
    def epsilon(self) -> float:
        """Pivots at or below this part of their diagonal element are all rounding."""
        return SINGULAR_PIVOT * float(np.finfo(self.dtype).eps)

    # ------------------------------------------------------------------------------------------------ ours

    def _fused_config(self) -> FusedConfig:
        if self.config is None:
            plan = self.plan
            self.config = FusedConfig.default(plan.rank, self.device.spec, plan.precision, plan.solver)
        return self.config

    def _solve_fused(
        self, systems: Callable[[], Systems], fixed: DeviceFactors, entries: Entries
    ) -> Generator[None, None, None]:
        table, config, method = fixed.table, self._fused_config(), self._method(fixed)

        def one_batch(batch: Batch) -> Iterator[None]:
            device = self.device
            partials = device.empty((len(batch.segments), config.partial_floats), np.float32)
            fused.assemble_segments(device, partials, table, entries, batch.segments, config, method)
            yield
            fused.solve_partials(device, systems(), partials, batch.slots, batch.rows, entries, config, method)

        yield from self._in_batches(one_batch)  # rows longer than a segment, or all
        fused.solve_rows(self.device, systems(), table, entries, self.indptr, self.short, config, method)

    def _matrices(self, n_slots: int) -> tuple[Array, Array]:
        rank = self.plan.rank
        return self.device.empty((n_slots, rank, rank), self.dtype), self.device.empty((n_slots, rank), self.dtype)

    def _method(self, fixed: DeviceFactors) -> fused.Method:
        """Solver and arithmetic, with the scale that float16 parts need for these factors and weights."""
        plan, (smallest, largest) = self.plan, self.roots
        precision, scale = plan.precision, 1.0
        if precision == "float32":
            if fixed.range is None:
                fixed.look()
            rows = fixed.range
            assert rows is not None
            if largest * rows.largest > fused.WIDEST * smallest * rows.least:
                precision = "float32_wide"
            else:
                scale = fused.entry_scale(rows.largest, largest)
        return fused.Method(precision, plan.solver, self.epsilon, plan.cg_steps, scale)

    def _in_batches(self, one_batch: Callable[[Batch], Iterator[None]]) -> Generator[None, None, None]:
        """Work through the long rows; where memory runs out, with batches half as large from there on."""
        done = 0
        while done < len(self.long.rows):
            try:
                for batch in self._batches(done):
                    yield from one_batch(batch)
                    done += len(batch.rows)
                    yield
            except DeviceMemoryError:
                slots = min(self.batch_slots, int(self.long.slots[-1] - self.long.slots[done]))
                if slots <= 1:
                    raise
                self._take_fewer(slots // 2)

    def _batches(self, done: int) -> list[Batch]:
        """Batches from long row `done` on; those of all rows may stay on the device from one sweep to the next."""
        if not done and self._all_batches is not None:
            return self._all_batches
        batches = Batch.upload(self._upload, _rest(self.long, done).batches(self.batch_slots))
        if not done and self.keeps_batches:
            self._all_batches = batches
        return batches

    def _upload(self, array: np.ndarray) -> Array:
        """An array that a batch needs, on the device."""
        return self.device.upload(array)

    def _take_fewer(self, slots: int) -> None:
        self.batch_slots, self._all_batches = slots, None
        logger.warning("%s is out of memory: batches of %d systems from here on", self.device.spec.name, slots)

    # ------------------------------------------------------------------------------------------------ published

    def _solve_batches(
        self, systems: Callable[[], Systems], table: Array, entries: Entries
    ) -> Generator[None, None, None]:
        plan, assemble = self.plan, published(self.plan)

        def one_batch(batch: Batch) -> Iterator[None]:
            matrices, rhs = self._matrices(len(batch.segments))
            assemble(self.device, matrices, rhs, table, entries, batch.segments, plan.rank)
            yield
            self._finish(systems(), matrices, rhs, batch.slots, batch.rows)

        yield from self._in_batches(one_batch)

    def _solve_tiles(self, systems: Systems, table: Array, entries: Entries) -> Iterator[None]:
        plan = self.plan
        blocks = ceil_div(len(self), plan.tile_rows)
        first = 0
        while first < blocks:
            count = min(max(1, self.batch_slots // plan.tile_rows), blocks - first)
            try:
                self._solve_row_blocks(systems, table, entries, first, count)
                first += count
                yield
            except DeviceMemoryError:
                if count == 1:
                    raise
                self._take_fewer(count // 2 * plan.tile_rows)

    def _solve_row_blocks(self, systems: Systems, table: Array, entries: Entries, first: int, count: int) -> None:
        """Rows of `count` rows of tiles from row of tiles `first` on."""
        plan, device, rank, tiles = self.plan, self.device, self.plan.rank, self.tiles
        assert tiles is not None
        rows = np.arange(first * plan.tile_rows, min((first + count) * plan.tile_rows, len(self)))
        matrices, rhs = self._matrices(len(rows))
        variant: assemblies.Variant = "local" if plan.variant == "local" else "chip"
        size = (plan.tile_rows, plan.tile_cols)
        assemblies.bals(device, matrices, rhs, table, entries, tiles, first, count, rank, *size, variant=variant)
        filled = np.flatnonzero(self.degrees[rows])
        # a row without entries has sums of zeros, which the row before it takes along as if they were its own
        if len(filled):
            slots = device.upload(np.append(filled, len(rows)).astype(np.int64))
            self._finish(systems, matrices, rhs, slots, device.upload(rows[filled].astype(np.int32)))

    def _finish(self, systems: Systems, matrices: Array, rhs: Array, slots: Array, rows: Array) -> None:
        """Complete the systems of a batch and solve them."""
        plan, device = self.plan, self.device
        gram = None if systems.gram is None else systems.gram[: plan.rank, : plan.rank].copy()
        cholesky_any.complete(device, matrices, rhs, slots, gram, systems.ridge, systems.scale[rows])
        arrays = (systems.solutions, systems.status, matrices, rhs, slots, rows)
        if plan.solver == "cg":
            cholesky_any.cg_solve(device, *arrays, plan.cg_steps)
        else:
            cholesky_any.cholesky_solve(device, *arrays, self.epsilon)


SWITCHES: dict[str, dict[str, Any]] = {
    "": {},
    "global": {"registers": False},
    "uncached": {"read_only": False},
    "plain": {"registers": False, "read_only": False},
}
"""Of `assemblies.mo_als`, by variant."""


def published(plan: Plan) -> Callable[..., None]:
    """The published kernel that sums segments of rows."""
    if plan.assembly == "sparse_syrk":
        return assemblies.sparse_syrk
    return functools.partial(assemblies.mo_als, **SWITCHES[plan.variant])


def range_of_roots(objective: Objective, ratings: np.ndarray) -> tuple[float, float]:
    """Smallest and largest root of the weight that an entry has beyond the Gram matrix; zeros do not count."""
    if not objective.is_implicit or not len(ratings):
        return 1.0, 1.0
    sizes = np.abs(ratings)
    ends = np.array([sizes.min(), sizes.max()], dtype=np.float64)
    weights = 1 + objective.alpha * ends - objective.unobserved_weight
    # unobserved_weight 1 leaves alpha |r|: the smallest rating decides
    smallest, largest = np.sqrt(np.maximum(weights, 0))
    return (float(smallest) if smallest > 0 else float(largest)), max(float(largest), np.finfo(np.float32).tiny)


def _rest(pieces: Pieces, done: int) -> Pieces:
    first = pieces.slots[done]
    segments = pieces.segments[first:].copy()
    segments[:, 0] -= first
    return Pieces(pieces.rows[done:], pieces.slots[done:] - first, segments)


class GpuALS(Alternating):
    """Alternating least squares on one GPU: owns the layouts and the current factors.

    Parameters
    ----------
    device : Device
    user_items, item_users : csr_array
        The ratings in both orientations.
    objective : Objective
    plan : Plan
    state : State
        Where to start.
    """

    def __init__(
        self,
        device: Device,
        user_items: sp.csr_array,
        item_users: sp.csr_array,
        objective: Objective,
        plan: Plan,
        state: State,
    ) -> None:
        self.device, self.objective, self.plan = device, objective, plan
        self._reordered: Reordered | None = None
        if plan.reorder != "none":
            axes = {"rows": plan.reorder in ("rows", "both"), "cols": plan.reorder in ("columns", "both")}
            self._reordered = reorder(user_items, **axes, num_threads=plan.num_threads)
            user_items = self._reordered.matrix
            item_users = transposed(user_items, plan.num_threads)
        matrices = {"user": user_items, "item": item_users}
        self.halves = {
            side: HalfSweep(device, side, matrices[side], objective, plan, self._order(side)) for side in SIDES
        }
        width = table_width(plan.rank, user_items.dtype)
        self.inward: dict[Side, DeviceFactors] = {}
        for side in SIDES:
            order, factors = self._order(side), state.side(side)
            self.inward[side] = to_device(device, factors if order is None else factors.take(order), width)
        self.mean = state.mean

    def _order(self, side: Side) -> np.ndarray | None:
        if self._reordered is None:
            return None
        return self._reordered.row_order if side == "user" else self._reordered.col_order

    @property
    def state(self) -> State:
        """Factors of the last completed half sweep, in the order of the input."""
        return State(self._outward("user"), self._outward("item"), self.mean)

    def _outward(self, side: Side) -> Factors:
        order, factors = self._order(side), self.inward[side]
        if order is None:
            return factors
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        with self.device.active():
            at = self.device.upload(inverse)
            bias = None if factors.device_bias is None else factors.device_bias[at]
            return DeviceFactors(self.device, factors.table[at], factors.factors, bias)

    def update(self, side: Side) -> None:
        """One half sweep: solve `side` for the factors of the other; the state changes only once it is complete."""
        solved = self.halves[side].solve(self.inward[other_side(side)], self.mean, self.inward[side])
        self.inward[side] = solved

    def balance(self) -> None:
        """Change both sides to the basis of least penalty; the same predictions."""
        with self.device.active():
            users, items = map(self._penalty_gram, SIDES)
            for side, basis in zip(SIDES, balancing(users, items), strict=True):
                old = self.inward[side]
                table = old.table.copy()
                on_device = self.device.upload(basis.astype(table.dtype))
                table[:, : old.factors] = self.device.matmul(old.table[:, : old.factors], on_device)
                self.inward[side] = DeviceFactors(self.device, table, old.factors, old.device_bias)

    def _penalty_gram(self, side: Side) -> np.ndarray:
        """``sum_u s_u x_u x_u^T`` in float64 on the host, shape (factors, factors)."""
        factors = self.inward[side]
        gram = exact_gram(self.device, factors.table, self.halves[side].scale)
        return gram[: factors.factors, : factors.factors]

    def objective_value(self) -> float:
        """The objective at the current factors, sums in float64."""
        item_degrees = self.halves["item"].degrees
        return objective_value(self.halves["user"], self.inward["user"], self.inward["item"], self.mean, item_degrees)


def objective_value(
    half: HalfSweep, users: DeviceFactors, items: DeviceFactors, mean: float, item_degrees: np.ndarray
) -> float:
    """The objective at O(nnz f + (m + n) f^2), losses and sums in float64; `half` is the users' half sweep."""
    with half.device.active():
        return _objective_value(half, users, items, mean, item_degrees)


def _objective_value(
    half: HalfSweep, users: DeviceFactors, items: DeviceFactors, mean: float, item_degrees: np.ndarray
) -> float:
    total = float(entry_losses(half, users, items, mean).sum())
    return total + unobserved_and_penalty(half, users, items, half.degrees, item_degrees)


def entry_losses(half: HalfSweep, users: DeviceFactors, items: DeviceFactors, mean: float) -> np.ndarray:
    """Losses of pieces of rows, in the order of the rows; float64 on the host."""
    return segment_losses(half, users, items, mean, loss_segments(half))


def loss_segments(half: HalfSweep) -> Array:
    """Pieces of rows that losses are summed of: (user, begin, end)."""
    return row_segments(half.device, half.device.download(half.indptr))


def row_segments(device: Device, indptr: np.ndarray) -> Array:
    """The same of rows that begin and end where `indptr` says."""
    pieces = Pieces.cut(indptr, np.flatnonzero(np.diff(indptr)), LOSS_ROWS)
    owners = np.repeat(pieces.rows, np.diff(pieces.slots))
    return device.upload(np.column_stack((owners, pieces.segments[:, 1:])).astype(np.int64))


def segment_losses(
    half: HalfSweep, users: DeviceFactors, items: DeviceFactors, mean: float, segments: Array
) -> np.ndarray:
    """Losses of segments of the entries of a half sweep; float64 on the host."""
    objective = half.objective
    entries = Entries(
        half.indices,
        half.ratings,
        items.device_bias,
        objective.is_implicit,
        objective.alpha,
        objective.unobserved_weight,
    )
    offsets = None if users.device_bias is None else users.device_bias + users.table.dtype.type(mean)
    return losses.segment_losses(half.device, users.table, items.table, entries, offsets, segments, half.plan.factors)


def unobserved_and_penalty(
    half: Any, users: DeviceFactors, items: DeviceFactors, user_degrees: np.ndarray, item_degrees: np.ndarray
) -> float:
    """What the objective has beside the losses of entries; `half` says device and objective."""
    device, objective, sides = half.device, half.objective, (users, items)
    grams = [exact_gram(device, side.table) for side in sides] if objective.is_implicit else []
    penalties = [
        penalty(device, objective, side, degrees)
        for side, degrees in zip(sides, (user_degrees, item_degrees), strict=True)
    ]
    return unobserved_loss(objective, grams) + sum(penalties)


def unobserved_loss(objective: Objective, grams: Sequence[np.ndarray]) -> float:
    """Loss of all pairs as if none were observed, from both sides' Gram matrices; 0 for explicit feedback (no Gram)."""
    return objective.unobserved_weight * float(np.sum(grams[0] * grams[1])) if objective.is_implicit else 0.0


def penalty(device: Device, objective: Objective, factors: DeviceFactors, degrees: np.ndarray) -> float:
    """`Objective.penalty` of one side on a device."""
    squares = losses.row_squares(device, factors.table, factors.factors)
    bias = None if factors.device_bias is None else device.download(factors.device_bias)
    return objective.penalty_of_squares(squares, degrees, bias)
