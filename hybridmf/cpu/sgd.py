"""SGD on the CPU: the schedules, and their kernels on copies of the factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np

from .. import _formats
from ..core.objective import Factors, Objective, Side, State, Terms, other_side
from ..core.sparse import entry_rows
from ..core.system import round_up
from ..core.validate import csr_arrays
from ..native import _sgd
from ..native.arguments import BothSides, EntryBlocks, EntryList, UpdateRows, WorkingRows
from ..plan.epochs import GridBlock, passes_of, sums_width
from ..plan.sgd import SgdMethod
from ..plan.types import BATCH_FLOPS, Plan
from .als import CACHE_LINE, aligned_zeros, losses_of_rows

BLOCK_ENTRIES = 4096
"""Average entries of a block: about 20 microseconds of work, much more than the cost of taking a block."""

MAX_GRID = 128  # rows and columns of the grid: as many threads can work at a time; half as many stay busy
MSGD_TASKS = 512  # number of tasks of about equal work; more tasks than threads, so that idle time at the end is short


WorkingCopies = dict[Side, WorkingRows]  # working copies of both sides


Record = Callable[[np.ndarray], bool]
"""Takes the losses of a kernel call; False: the epoch has diverged, and its other calls are not needed."""


def _calls(plan: Plan) -> int:
    """Kernel calls of an epoch; Python handles Ctrl-C between two of them."""
    return max(1, math.ceil(plan.flops_per_iteration / plan.batch_flops))


class RowSweeps:
    """MSGD (Alg. 1): update the rows of a side from their entries, with the other side fixed."""

    def __init__(self, matrices: GridBlock, plan: Plan) -> None:
        self.plan = plan
        self.csr = {side: csr_arrays(matrix) for side, matrix in matrices.items()}
        self.order = {side: _formats.degree_order(csr[0]) for side, csr in self.csr.items()}
        self.cuts = {side: self._cuts(side) for side in self.csr}

    def _cuts(self, side: Side) -> np.ndarray:
        """Bounds of tasks, rows of `order` of about equal work: longest rows first, without empty rows."""
        degrees = np.diff(self.csr[side][0])[self.order[side]]
        entries = np.cumsum(degrees)
        inner = np.searchsorted(entries, entries[-1] * np.arange(1, MSGD_TASKS) / MSGD_TASKS) + 1
        return np.unique(np.concatenate([[0], inner, [np.count_nonzero(degrees)]]))

    def move(self, side: Side | None, work: WorkingCopies, terms: Terms, epoch: int, record: Record) -> None:
        assert side is not None
        moved, fixed = work[side], work[other_side(side)]
        indptr, columns, ratings = self.csr[side]
        entries, order, cuts = UpdateRows(indptr[:-1], indptr[1:], columns, ratings), self.order[side], self.cuts[side]
        for tasks in np.array_split(np.arange(len(cuts) - 1), min(_calls(self.plan), len(cuts) - 1)):
            losses = np.zeros(len(tasks))
            bounds = cuts[tasks[0] : tasks[-1] + 2]
            _sgd.rows(moved, fixed, entries, order, bounds, terms, losses, self.plan.num_threads)
            if not record(losses):
                return


class Stretches:
    """Hogwild!: entries in an order drawn once; each thread takes a consecutive range."""

    def __init__(self, matrices: GridBlock, plan: Plan) -> None:
        assert isinstance(plan.method, SgdMethod)
        self.plan, user_items = plan, matrices["user"]
        order = plan.method.rng().permutation(user_items.nnz)
        users = entry_rows(user_items).astype(np.int32, copy=False)[order]
        self.entries = EntryList(users, user_items.indices[order], user_items.data[order])

    def move(self, side: Side | None, work: WorkingCopies, terms: Terms, epoch: int, record: Record) -> None:
        n, calls, threads = len(self.entries.users), _calls(self.plan), self.plan.num_threads
        for call in range(calls):
            taken = slice(n * call // calls, n * (call + 1) // calls)
            losses = np.zeros(threads)
            _sgd.entries(
                BothSides(**work), EntryList(*(array[taken] for array in self.entries)), terms, losses, threads
            )
            if not record(losses):
                return


class Blocks:
    """A grid of blocks: users and items in random order, so that its rows and columns have equal work.

    DSGD (`deterministic`): the blocks of shuffled diagonals; equivalent to processing one diagonal after the other.
    FPSGD: any block that the epoch has not processed yet and whose row and column are free.
    """

    grid: int  # rows and columns of the grid; independent of the number of threads, and so are results
    seen: np.ndarray
    """FPSGD: position of each block in the order of the last epoch, 1, 2, ...; int32, shape (grid * grid,)."""

    def __init__(self, matrices: GridBlock, plan: Plan) -> None:
        assert isinstance(plan.method, SgdMethod)
        self.plan, self.method, user_items = plan, plan.method, matrices["user"]
        self.grid = max(1, min(math.isqrt(user_items.nnz // BLOCK_ENTRIES), MAX_GRID, *user_items.shape))
        indptr, indices, data = csr_arrays(user_items)
        rng = self.method.rng()
        user_order, user_cuts = self._deal_rows(np.diff(indptr), rng)
        item_order, item_cuts = self._deal_rows(np.bincount(indices, minlength=user_items.shape[1]), rng)
        item_block = np.empty(user_items.shape[1], dtype=np.int32)
        item_block[item_order] = np.repeat(np.arange(self.grid, dtype=np.int32), np.diff(item_cuts))
        entries = EntryList(np.empty_like(indices), np.empty_like(indices), np.empty_like(data))
        threads = plan.num_threads
        pointer = _sgd.deal(entries, indptr, indices, data, user_order, user_cuts, item_block, threads)
        self.blocks = EntryBlocks(entries, pointer)

    def _deal_rows(self, degrees: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return rows in random order, and the bounds of parts with about equal numbers of entries."""
        order = rng.permutation(len(degrees))
        entries = np.cumsum(degrees[order])
        inner = np.searchsorted(entries, entries[-1] * np.arange(1, self.grid) / self.grid)
        return order, np.concatenate([[0], inner, [len(order)]]).astype(np.int64)

    def shifts(self, epoch: int) -> np.ndarray:
        """Diagonals of the grid in the order of the epoch: (p, (p + shift) % grid) for all p."""
        return self.method.rng(epoch).permutation(self.grid)

    def move(self, side: Side | None, work: WorkingCopies, terms: Terms, epoch: int, record: Record) -> None:
        both, calls, threads = BothSides(**work), _calls(self.plan), self.plan.num_threads
        if self.method.deterministic:
            for shifts in np.array_split(self.shifts(epoch), min(calls, self.grid)):
                losses = np.zeros((self.grid, self.grid))
                _sgd.diagonals(both, self.blocks, shifts, terms, losses, threads)
                if not record(losses):
                    return
            return
        self.seen, rng = np.zeros(self.grid**2, dtype=np.int32), self.method.rng(epoch)
        quota = math.ceil(self.grid**2 / calls)
        while not self.seen.all():
            losses, seed = np.zeros((self.grid, self.grid)), int(rng.integers(2**63))
            _sgd.free_blocks(both, self.blocks, self.seen, quota, seed, terms, losses, threads)
            if not record(losses):
                return


Schedule: TypeAlias = RowSweeps | Stretches | Blocks
"""The order of updates in an epoch, in kernel calls of bounded length; `move` makes one pass, in place."""


class CpuEpochs:
    """SGD on the CPU, as `hybridmf.plan.epochs.EpochKernels`; working copies are `WorkingRows`.

    `blocks`: one; a rank has several. `plan`: `num_threads` is the number of this rank.
    """

    def __init__(self, blocks: list[GridBlock], objective: Objective, plan: Plan) -> None:
        assert isinstance(plan.method, SgdMethod)
        self.blocks, self.objective, self.plan = blocks, objective, plan
        self.sums_width = sums_width(plan.method, plan.factors)
        alone, share = len(blocks) == 1, plan.changed(batch_flops=BATCH_FLOPS * plan.num_threads)
        kinds: dict[str, type[Schedule]] = {"msgd": RowSweeps, "hogwild": Stretches, "blocks": Blocks}
        make = kinds[plan.method.schedule]
        self.schedules: list[Schedule | None] = [
            make(block, plan if alone else share.changed(nnz=block["user"].nnz)) if block["user"].nnz else None
            for block in blocks
        ]
        self.passes = passes_of(plan.method)
        self._losses: list[float] = []

    def active(self) -> AbstractContextManager[None]:
        """Ignore overflow, which is checked at the end of an epoch."""
        return np.errstate(over="ignore", invalid="ignore")

    def hold(self, factors: Factors) -> Factors:
        """Draw initial factors; others are on the host."""
        return factors.on_host()

    def copies(self, factors: Factors) -> WorkingRows:
        """Rows padded with zeros to whole cache lines, so kernels need no remainder loop."""
        rank, n, dtype = self.plan.factors, len(factors), factors.matrix.dtype
        nothing = np.empty(0, dtype)
        bias = nothing if factors.bias is None else factors.bias.copy()
        squares, bias_squares, shared = np.empty((0, 0), dtype), nothing, False
        if self.sums_width:
            sums = factors.squares or Factors(np.zeros((n, self.sums_width), dtype))
            shared = self.sums_width != rank
            squares = sums.matrix.copy() if shared else self._padded(sums.matrix)
            bias_squares = np.zeros(len(bias), dtype) if sums.bias is None else sums.bias.copy()
        return WorkingRows(self._padded(factors.matrix), bias, squares, bias_squares, rank if shared else 0)

    def _padded(self, matrix: np.ndarray) -> np.ndarray:
        line = CACHE_LINE // matrix.itemsize
        out = aligned_zeros((len(matrix), round_up(matrix.shape[1], line)), matrix.dtype)
        _sgd.copy_rows(out, np.ascontiguousarray(matrix), self.plan.num_threads)
        return out

    def _whole(self, matrix: np.ndarray) -> np.ndarray:
        if matrix.shape[1] == self.plan.factors:
            return matrix
        out = np.empty((len(matrix), self.plan.factors), dtype=matrix.dtype)
        _sgd.copy_rows(out, matrix, self.plan.num_threads)
        return out

    fixed = copies

    def move(
        self, block: int, side: Side | None, work: WorkingCopies, terms: Terms, epoch: int, between: Callable[[], None]
    ) -> None:
        def record(losses: np.ndarray) -> bool:
            between()
            self._losses.append(float(losses.sum()))
            return math.isfinite(self._losses[-1])

        schedule = self.schedules[block]
        if schedule is not None:
            schedule.move(side, work, terms, epoch, record)

    def factors(self, work: WorkingRows) -> Factors:
        squares, biases = None, self.objective.biases
        if len(work.squares):
            sums = work.squares if work.shared_rank else self._whole(work.squares)
            squares = Factors(sums, work.bias_squares if biases else None)
        return Factors(self._whole(work.matrix), work.bias if biases else None, squares)

    def begin_result(self, *sides: Factors) -> Callable[[], tuple[float, bool]]:
        """See `EpochKernels`; MSGD processes every entry twice."""
        losses, self._losses = self._losses, []
        result = float(np.sum(losses)) / len(self.passes), all(map(self.is_finite, sides))
        return lambda: result

    def is_finite(self, factors: Factors) -> bool:
        bias_is_finite = factors.bias is None or bool(np.isfinite(factors.bias).all())
        return bias_is_finite and _sgd.all_finite(factors.matrix, self.plan.num_threads)

    def loss(self, block: int, users: Factors, items: Factors, mean: float) -> float:
        matrix, state = self.blocks[block]["user"], State(users, items, mean)
        if not matrix.nnz:
            return 0.0
        return float(losses_of_rows(self.objective, csr_arrays(matrix), state, self.plan.num_threads).sum())

    def penalty(self, side: Side, factors: Factors, degrees: np.ndarray) -> float:
        return self.objective.penalty(side, factors.matrix, degrees, factors.bias)

    # ------------------------------------------------------------------------------------------------ exchange

    def arrays(self, work: WorkingRows) -> list[np.ndarray]:
        """Arrays of working copies that ranks exchange: factors, biases and sums of squares."""
        return [getattr(work, name) for name in self._names()]

    def arrived(self, work: WorkingRows, arrays: Sequence[np.ndarray]) -> WorkingRows:
        received: dict[str, Any] = {}
        for name, array in zip(self._names(), arrays, strict=True):
            received[name] = aligned_zeros(array.shape, array.dtype)
            received[name][...] = array
        return work._replace(**received)

    def places(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def merged(self, work: WorkingRows, other: WorkingRows, places: np.ndarray) -> WorkingRows:
        pairs = zip(self.arrays(work), self.arrays(other), strict=True)
        return self.arrived(work, [np.concatenate(pair)[places] for pair in pairs])

    def _names(self) -> list[str]:
        names = ["matrix"] + ["bias"] * self.objective.biases
        if self.sums_width:
            names += ["squares"] + ["bias_squares"] * self.objective.biases
        return names
