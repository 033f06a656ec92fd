"""SGD on the CPU: the schedules, and the solver that runs epochs on copies of the factors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from .. import _formats
from ..core.objective import Factors, Objective, Side, State, Terms, other_side
from ..core.sparse import entry_rows
from ..core.validate import csr_arrays
from ..errors import ModelFileError
from ..native import _sgd
from ..native.updates import BothSides, EntryBlocks, EntryList, UpdateRows, WorkingRows
from ..plan.sgd import RISE, SgdMethod, diverged, terms_at
from ..plan.solver import SWEEP_ORDER, Unconnected
from ..plan.types import Plan
from .als import CACHE_LINE, aligned_zeros, objective_value

BLOCK_ENTRIES = 4096
"""Average entries of a block: about 20 microseconds of work, much more than the cost of taking a block."""

MAX_GRID = 128
"""Rows and columns of the grid: as many threads can work at a time; half as many stay busy."""

MSGD_PIECES = 512
"""Number of tasks of about equal work; more tasks than threads, so that idle time at the end is short."""


class Copies:
    """Working copies of one side: rows padded with zeros to whole cache lines, so that kernels need no remainder loop.

    Attributes
    ----------
    rows : WorkingRows
    """

    def __init__(self, factors: Factors, sums_width: int, num_threads: int) -> None:
        self.rank, self.num_threads = factors.matrix.shape[1], num_threads
        dtype, n = factors.matrix.dtype, len(factors)
        self.has_bias = factors.bias is not None
        bias = np.empty(0, dtype) if factors.bias is None else factors.bias.copy()
        squares, bias_squares, shared = np.empty((0, 0), dtype), np.empty(0, dtype), False
        if sums_width:
            sums = factors.squares or Factors(np.zeros((n, sums_width), dtype))
            shared = sums_width != self.rank
            squares = sums.matrix.copy() if shared else self._padded(sums.matrix)
            bias_squares = np.zeros(len(bias), dtype) if sums.bias is None else sums.bias.copy()
        matrix = self._padded(factors.matrix)
        self.rows = WorkingRows(matrix, bias, squares, bias_squares, self.rank if shared else 0)

    def _padded(self, matrix: np.ndarray) -> np.ndarray:
        line = CACHE_LINE // matrix.itemsize
        out = aligned_zeros((len(matrix), -(-self.rank // line) * line), matrix.dtype)
        _sgd.copy_rows(out, np.ascontiguousarray(matrix), self.num_threads)
        return out

    def _whole(self, matrix: np.ndarray) -> np.ndarray:
        if matrix.shape[1] == self.rank:
            return matrix
        out = np.empty((len(matrix), self.rank), dtype=matrix.dtype)
        _sgd.copy_rows(out, matrix, self.num_threads)
        return out

    def is_finite(self) -> bool:
        """Whether no factor and no bias is infinite or NaN."""
        return _sgd.all_finite(self.rows.matrix, self.num_threads) and bool(np.isfinite(self.rows.bias).all())

    def factors(self) -> Factors:
        """Return the copies as factors of a state; the copies must not be used afterwards."""
        rows, squares = self.rows, None
        if len(rows.squares):
            sums = rows.squares if rows.shared_rank else self._whole(rows.squares)
            squares = Factors(sums, rows.bias_squares if self.has_bias else None)
        return Factors(self._whole(rows.matrix), rows.bias if self.has_bias else None, squares)


WorkingCopies = dict[Side, Copies]
"""Working copies of both sides."""


def _both(work: WorkingCopies) -> BothSides:
    return BothSides(work["user"].rows, work["item"].rows)


class Schedule(Protocol):
    """The order of updates in an epoch, in kernel calls of bounded length."""

    def run(self, work: WorkingCopies, terms: Terms, epoch: int) -> Iterator[float]:
        """Run epoch `epoch` on `work`, in place; yields the training loss of each kernel call."""


def _calls(plan: Plan) -> int:
    """Kernel calls of an epoch; Python handles Ctrl-C between two of them."""
    return max(1, math.ceil(plan.flops_per_iteration / plan.batch_flops))


class RowSweeps:
    """MSGD (Alg. 1): update the items from their entries with the users fixed, then the users with the items fixed.

    Parameters
    ----------
    matrices : dict of csr_array
        The ratings by the rows of each side.
    plan : Plan
    """

    def __init__(self, matrices: dict[Side, sp.csr_array], plan: Plan) -> None:
        self.plan = plan
        self.csr = {side: csr_arrays(matrix) for side, matrix in matrices.items()}
        self.order = {side: _formats.degree_order(csr[0]) for side, csr in self.csr.items()}
        self.cuts = {side: self._cuts(side) for side in self.csr}

    def _cuts(self, side: Side) -> np.ndarray:
        """Bounds of pieces of `order` of about equal work: longest rows first, without empty rows."""
        degrees = np.diff(self.csr[side][0])[self.order[side]]
        entries = np.cumsum(degrees)
        inner = np.searchsorted(entries, entries[-1] * np.arange(1, MSGD_PIECES) / MSGD_PIECES) + 1
        return np.unique(np.concatenate([[0], inner, [np.count_nonzero(degrees)]]))

    def run(self, work: WorkingCopies, terms: Terms, epoch: int) -> Iterator[float]:
        """See `Schedule`."""
        for side in SWEEP_ORDER:
            yield from self.one_pass(side, work, terms)

    def one_pass(self, side: Side, work: WorkingCopies, terms: Terms) -> Iterator[float]:
        """Update the rows of a side; yield half of the loss, because an epoch processes every entry twice."""
        moved, fixed = work[side].rows, work[other_side(side)].rows
        indptr, columns, ratings = self.csr[side]
        entries, order, cuts = UpdateRows(indptr[:-1], indptr[1:], columns, ratings), self.order[side], self.cuts[side]
        for pieces in np.array_split(np.arange(len(cuts) - 1), min(_calls(self.plan), len(cuts) - 1)):
            losses = np.zeros(len(pieces))
            part = cuts[pieces[0] : pieces[-1] + 2]
            _sgd.rows(moved, fixed, entries, order, part, terms, losses, self.plan.num_threads)
            yield float(losses.sum()) / 2


class Stretches:
    """Hogwild!: entries in an order drawn once; each thread takes a consecutive range.

    Parameters
    ----------
    user_items : csr_array
    plan : Plan
    method : SgdMethod
    """

    def __init__(self, user_items: sp.csr_array, plan: Plan, method: SgdMethod) -> None:
        self.plan = plan
        order = method.rng().permutation(user_items.nnz)
        users = entry_rows(user_items).astype(np.int32, copy=False)[order]
        self.entries = EntryList(users, user_items.indices[order], user_items.data[order])

    def run(self, work: WorkingCopies, terms: Terms, epoch: int) -> Iterator[float]:
        """See `Schedule`."""
        n, calls, threads = len(self.entries.users), _calls(self.plan), self.plan.num_threads
        for call in range(calls):
            part = slice(n * call // calls, n * (call + 1) // calls)
            losses = np.zeros(threads)
            _sgd.entries(_both(work), EntryList(*(array[part] for array in self.entries)), terms, losses, threads)
            yield float(losses.sum())


class Blocks:
    """A grid of blocks (DSGD, FPSGD): users and items in random order, so that its rows and columns have equal work.

    Parameters
    ----------
    user_items : csr_array
    plan : Plan
    method : SgdMethod

    Attributes
    ----------
    grid : int
        Rows and columns of the grid; independent of the number of threads, and so are results.
    blocks : EntryBlocks
    """

    def __init__(self, user_items: sp.csr_array, plan: Plan, method: SgdMethod) -> None:
        self.plan, self.method = plan, method
        self.grid = max(1, min(math.isqrt(user_items.nnz // BLOCK_ENTRIES), MAX_GRID, *user_items.shape))
        indptr, indices, data = csr_arrays(user_items)
        rng = method.rng()
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

    def _call(self, kernel: Any, work: WorkingCopies, terms: Terms, *how: Any) -> float:
        losses = np.zeros((self.grid, self.grid))
        kernel(_both(work), self.blocks, *how, terms, losses, self.plan.num_threads)
        return float(losses.sum())


class Diagonals(Blocks):
    """DSGD: the blocks of shuffled diagonals; equivalent to processing one diagonal after the other."""

    def run(self, work: WorkingCopies, terms: Terms, epoch: int) -> Iterator[float]:
        """See `Schedule`."""
        for shifts in np.array_split(self.shifts(epoch), min(_calls(self.plan), self.grid)):
            yield self._call(_sgd.diagonals, work, terms, shifts)


class FreeBlocks(Blocks):
    """FPSGD: any block that the epoch has not processed yet and whose row and column are free.

    Attributes
    ----------
    seen : int32 array, shape (grid * grid,)
        Position of each block in the order of the last epoch: 1, 2, ...
    """

    def run(self, work: WorkingCopies, terms: Terms, epoch: int) -> Iterator[float]:
        """See `Schedule`."""
        self.seen = np.zeros(self.grid**2, dtype=np.int32)
        rng = self.method.rng(epoch)
        quota = math.ceil(self.grid**2 / _calls(self.plan))
        while not self.seen.all():
            seed = int(rng.integers(2**63))
            yield self._call(_sgd.free_blocks, work, terms, self.seen, quota, seed)


def _schedule(user_items: sp.csr_array, item_users: sp.csr_array, plan: Plan, method: SgdMethod) -> Schedule:
    if method.schedule == "msgd":
        return RowSweeps({"user": user_items, "item": item_users}, plan)
    if method.schedule == "hogwild":
        return Stretches(user_items, plan, method)
    return (Diagonals if method.deterministic else FreeBlocks)(user_items, plan, method)


def sums_width(method: SgdMethod, factors: int) -> int:
    """Number of sums of squared steps per row."""
    return {"adagrad": factors, "rpcs": 2}.get(method.rate_schedule, 0)


def starting_state(state: State, method: SgdMethod, factors: int, completed: int) -> State:
    """Return the state with the sums of squares that the method continues from, or without any.

    Raises
    ------
    ModelFileError
        AdaGrad or RPCS resumes from a state without its sums of squares.
    """
    width = sums_width(method, factors)
    if not width:
        users, items = (
            side if side.squares is None else replace(side, squares=None) for side in (state.user, state.item)
        )
        return State(users, items, state.mean)
    if completed and (state.user.squares is None or state.user.squares.matrix.shape[1] != width):
        raise ModelFileError(
            f"the checkpoint holds no sums of squares that rate_schedule={method.rate_schedule!r} could "
            "continue from; start anew, or resume with another rate_schedule"
        )
    return state


class CpuSGD(Unconnected):
    """Stochastic gradient descent on the CPU: owns the order of the entries and the current factors.

    Parameters
    ----------
    user_items, item_users : csr_array
        The ratings in both orientations.
    objective : Objective
    plan : Plan
        Its method is an `SgdMethod`.
    state : State
        Initial factors and mean.
    completed : int
        Completed epochs that led to `state`.

    Raises
    ------
    ModelFileError
        AdaGrad resumes from a state without sums of squares.
    """

    def __init__(
        self,
        user_items: sp.csr_array,
        item_users: sp.csr_array,
        objective: Objective,
        plan: Plan,
        state: State,
        completed: int,
    ) -> None:
        assert isinstance(plan.method, SgdMethod)
        self.objective, self.plan, self.method = objective, plan, plan.method
        self.csr, self.item_degrees = csr_arrays(user_items), np.diff(item_users.indptr)
        self.sums_width = sums_width(self.method, plan.factors)
        self.state = starting_state(state, self.method, plan.factors, completed)
        self.epoch, self.best = completed, math.inf
        self.schedule = _schedule(user_items, item_users, plan, self.method)

    def sweep(self) -> Iterator[None]:
        """Run one epoch on copies; the state changes once the epoch is complete and finite.

        Raises
        ------
        DivergedError
        """
        threads = self.plan.num_threads
        work: WorkingCopies = {
            "user": Copies(self.state.user, self.sums_width, threads),
            "item": Copies(self.state.item, self.sums_width, threads),
        }
        terms = terms_at(self.method, self.objective, self.state.mean, self.epoch)
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is checked here
            loss = math.fsum(self._checked(self.schedule.run(work, terms, self.epoch)))
            if not (work["user"].is_finite() and work["item"].is_finite()):
                self._fail("factors became infinite or NaN")
        if loss > RISE * self.best:
            self._fail(f"the sum of squared errors rose from {self.best:.4g} to {loss:.4g}")
        self.best = min(self.best, loss)
        self.state = State(work["user"].factors(), work["item"].factors(), self.state.mean)
        self.epoch += 1
        yield

    def _checked(self, losses: Iterator[float]) -> Iterator[float]:
        for loss in losses:
            if not math.isfinite(loss):
                self._fail("errors became infinite or NaN")
            yield loss

    def _fail(self, what: str) -> None:
        raise diverged(what, self.method, self.epoch)

    def objective_value(self) -> float:
        """The objective at the current factors, in float64."""
        degrees = np.diff(self.csr[0])
        return objective_value(self.objective, self.csr, self.state, degrees, self.item_degrees, self.plan.num_threads)
