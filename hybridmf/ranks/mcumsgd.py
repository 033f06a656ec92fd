"""MSGD on several ranks (Li et al. 2017, MCUMSGD, Alg. 4 and 5.3): each rank owns users, and items rotate.

Users and items are split into as many ranges as there are ranks, with even numbers of entries. Rank q owns users q. In
step l of an epoch it holds items ``j = (q + l) mod p``, which it then sends to rank q - 1. There are two orders of
updates:

- "passes", ours, the default. Items rotate twice. In steps 0 ... p - 1 a rank updates the items that it holds from
  its own users' ratings; in steps p - 1 ... 2 p - 2 it updates its users, while items are sent.
- "blocks", Alg. 4 as printed. Items rotate once. In each of p steps a rank updates the items that it holds, sends them,
  and meanwhile updates its users.

Both process the same entries. With "passes" an epoch is one of MSGD on one device (Alg. 1) in which each row starts at
a different entry: users are updated from items that all ranks' users have updated. With "blocks" they are updated from
items that the same users have updated last, and an item with many entries keeps little of the others' updates: ranges
of users learn separate factors, and the loss falls less per epoch.

No two ranks hold the same row at a time, so factors depend only on the order and the number of ranks.

A rank runs on the CPU or on a GPU, over any communicator (`hybridmf.ranks.transport.communicator`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, PerSide, Side, State, Terms, other_side
from ..core.sparse import rows_of, transposed
from ..core.validate import csr_arrays
from ..cpu.als import aligned_zeros, objective_value
from ..cpu.sgd import Copies, RowSweeps, starting_state, sums_width
from ..data.fingerprint import fingerprint
from ..device.cuda import Device
from ..errors import CommunicatorError
from ..gpu import sgd as gpu_sgd
from ..gpu.factors import DeviceFactors, to_device
from ..gpu.sgd import FactorRows, Msgd, TrainingLoss
from ..plan.partition import even_bounds
from ..plan.sgd import LONG_ROW, RISE, SgdMethod, diverged, stored_width, terms_at
from ..plan.types import BATCH_FLOPS, Plan
from .group import RankGroup, open_rank
from .joined import JoinedFactors
from .transport.communicator import Array, Communicator, LocalCommunicator, check_agreement

SHORTEST_LONG_ROW = 1024
"""Rows up to this length never get a separate thread block: its setup takes as long as processing the row."""


# ---------------------------------------------------------------------------------------------- shares


@dataclass(frozen=True)
class Bounds:
    """Ranges of users and of items, one of each per rank.

    Attributes
    ----------
    user, item : int64 array, shape (n_ranks + 1,)
    """

    user: np.ndarray
    item: np.ndarray

    @classmethod
    def even(cls, user_items: sp.csr_array, size: int) -> Bounds:
        """Ranges with about equal numbers of entries."""
        degrees = np.bincount(user_items.indices, minlength=user_items.shape[1])
        return cls(even_bounds(np.diff(user_items.indptr), size), even_bounds(degrees, size))

    def range_of(self, side: Side, rank: int) -> tuple[int, int]:
        """First row of a range and the one after the last."""
        bounds = self.user if side == "user" else self.item
        return int(bounds[rank]), int(bounds[rank + 1])


GridBlock = dict[Side, sp.csr_array]
"""Ratings of one range of users and one of items, by the rows of either side; rows and columns count from 0."""


def cut_share(user_items: sp.csr_array, bounds: Bounds, rank: int, num_threads: int) -> list[GridBlock]:
    """The ratings of a rank's users, one block for each range of items."""
    by_item = transposed(rows_of(user_items, *bounds.range_of("user", rank)), num_threads)
    blocks: list[GridBlock] = []
    for other in range(len(bounds.item) - 1):
        items = rows_of(by_item, *bounds.range_of("item", other))
        blocks.append({"user": transposed(items, num_threads), "item": items})
    return blocks


# ---------------------------------------------------------------------------------------------- backends


class Backend(Protocol):
    """The device of a rank; `work` is a working copy of a range of rows."""

    def active(self) -> AbstractContextManager[None]:
        """Context of all computation."""

    def hold(self, factors: Factors) -> Factors:
        """Move factors to where they stay between epochs."""

    def copies(self, factors: Factors) -> Any:
        """Working copy of a range of rows."""

    def arrays(self, work: Any) -> list[Array]:
        """Arrays of a range of items that ranks exchange."""

    def likes(self, rows: int) -> list[np.ndarray]:
        """Arrays with the shapes and dtypes of `arrays`, for a range of `rows` rows."""

    def arrived(self, arrays: Sequence[Array]) -> Any:
        """Working copy of a received range of items."""

    def move(self, block: int, side: Side, work: dict[Side, Any], terms: Terms) -> Iterator[None]:
        """Update the rows of a side from the ratings of a block; yields where it may be stopped."""

    def factors(self, work: Any) -> Factors:
        """Convert a working copy to factors; `work` must not be used afterwards."""

    def epoch_result(self, *sides: Factors) -> tuple[float, bool]:
        """Wait for the epoch; return its training loss, and whether all of `sides` is finite.

        The loss is half the squared errors of all updates since the last call, because an epoch processes every entry
        twice.
        """

    def loss(self, block: int, users: Factors, items: Factors, mean: float) -> float:
        """Squared errors of the ratings of a block."""

    def penalty(self, side: Side, factors: Factors, degrees: np.ndarray) -> float:
        """Penalty of the rows of a range."""


class CpuBackend:
    """A rank on the CPU.

    Parameters
    ----------
    blocks : list of GridBlock
    objective : Objective
    plan : Plan
        `num_threads` is the number of this rank.
    """

    def __init__(self, blocks: list[GridBlock], objective: Objective, plan: Plan) -> None:
        assert isinstance(plan.method, SgdMethod)
        self.blocks, self.plan = blocks, plan
        self.loss_alone = replace(objective, regularization=PerSide(0, 0), bias_regularization=PerSide(0, 0))
        self.objective = objective
        self.sums_width = sums_width(plan.method, plan.factors)
        self.sweeps = [_row_sweeps(block, plan) for block in blocks]
        self._items: Copies | None = None
        self._losses: list[float] = []

    def active(self) -> AbstractContextManager[None]:
        """Ignore overflow, which is checked at the end of an epoch."""
        return np.errstate(over="ignore", invalid="ignore")

    def hold(self, factors: Factors) -> Factors:
        """Return the factors unchanged."""
        return factors

    def copies(self, factors: Factors) -> Copies:
        """See `Backend`."""
        return Copies(factors, self.sums_width, self.plan.num_threads)

    def _names(self) -> list[str]:
        names = ["matrix"] + ["bias"] * self.objective.biases
        if self.sums_width:
            names += ["squares"] + ["bias_squares"] * self.objective.biases
        return names

    def arrays(self, work: Copies) -> list[np.ndarray]:
        """Factors, biases and sums of squares."""
        self._items = work
        return [getattr(work.rows, name) for name in self._names()]

    def likes(self, rows: int) -> list[np.ndarray]:
        """See `Backend`."""
        assert self._items is not None
        sent = self.arrays(self._items)
        return [np.empty((rows, *array.shape[1:]), dtype=array.dtype) for array in sent]

    def arrived(self, arrays: Sequence[np.ndarray]) -> Copies:
        """See `Backend`."""
        work = copy.copy(self._items)
        assert work is not None
        received: dict[str, Any] = {}
        for name, array in zip(self._names(), arrays, strict=True):
            received[name] = aligned_zeros(array.shape, array.dtype)
            received[name][...] = array
        work.rows = work.rows._replace(**received)
        return work

    def move(self, block: int, side: Side, work: dict[Side, Copies], terms: Terms) -> Iterator[None]:
        """See `Backend`; yields after each kernel call."""
        sweeps = self.sweeps[block]
        if sweeps is not None:
            for loss in sweeps.one_pass(side, work, terms):
                self._losses.append(loss)
                yield

    def factors(self, work: Copies) -> Factors:
        """See `Backend`."""
        return work.factors()

    def epoch_result(self, *sides: Factors) -> tuple[float, bool]:
        """See `Backend`."""
        losses, self._losses = self._losses, []
        return float(np.sum(losses)), self.is_finite(*sides)

    def is_finite(self, *sides: Factors) -> bool:
        """Whether no element is infinite or NaN."""
        arrays = [array for factors in sides for array in (factors.matrix, factors.bias) if array is not None]
        return all(math.isfinite(float(array.sum(dtype=np.float64))) for array in arrays)

    def loss(self, block: int, users: Factors, items: Factors, mean: float) -> float:
        """See `Backend`."""
        matrix = self.blocks[block]["user"]
        if not matrix.nnz:
            return 0.0
        unused, state = [np.zeros(n, dtype=np.int64) for n in matrix.shape], State(users, items, mean)
        return objective_value(self.loss_alone, csr_arrays(matrix), state, unused[0], unused[1], self.plan.num_threads)

    def penalty(self, side: Side, factors: Factors, degrees: np.ndarray) -> float:
        """See `Backend`."""
        return self.objective.penalty(side, factors.matrix, degrees, factors.bias)


def _row_sweeps(block: GridBlock, plan: Plan) -> RowSweeps | None:
    if not block["user"].nnz:
        return None
    return RowSweeps(block, plan.changed(nnz=block["user"].nnz, batch_flops=BATCH_FLOPS * plan.num_threads))


def long_row_of(ranks: int) -> int:
    """Default number of entries, in a block of ratings, from which a row gets a separate thread block.

    In a block of ratings the longest row has about 1 / ranks of its entries, so the threshold falls with the ranks.
    """
    return max(min(SHORTEST_LONG_ROW, LONG_ROW), LONG_ROW // ranks)


class GpuBackend:
    """A rank on a GPU.

    Parameters
    ----------
    device : Device
    blocks : list of GridBlock
    objective : Objective
    plan : Plan
    long_row : int, optional
        Entries of a row, in a block of ratings, from which it gets a thread block. Default: `long_row_of`.
    beside : bool
        See `hybridmf.gpu.sgd.Msgd`.
    """

    def __init__(
        self,
        device: Device,
        blocks: list[GridBlock],
        objective: Objective,
        plan: Plan,
        long_row: int | None = None,
        beside: bool = True,
    ) -> None:
        assert isinstance(plan.method, SgdMethod)
        self.device, self.objective, self.plan = device, objective, plan
        self.dtype = blocks[0]["user"].dtype
        self.long_row = long_row = long_row_of(len(blocks)) if long_row is None else long_row
        self.epochs = [
            Msgd(device, block, plan.method.ordering, plan.factors, long_row, beside, len(blocks))
            if block["user"].nnz
            else None
            for block in blocks
        ]
        # for all passes of an epoch, added up once
        sizes = {
            (block, side): epoch.n_losses(side)
            for block, epoch in enumerate(self.epochs)
            if epoch is not None
            for side in SIDES
        }
        ends = np.cumsum(list(sizes.values()), dtype=np.int64).tolist()
        self._sums = device.zeros(ends[-1] if ends else 0, np.float64)
        self._sums_of = {key: self._sums[end - sizes[key] : end] for key, end in zip(sizes, ends, strict=True)}
        self.losses = [
            None
            if epoch is None
            else TrainingLoss(device, epoch.walks, {side: block[side].indptr for side in SIDES}, plan.factors)
            for epoch, block in zip(self.epochs, blocks, strict=True)
        ]

    def active(self) -> AbstractContextManager[None]:
        """Make the device current."""
        return self.device.active()

    def hold(self, factors: Factors) -> DeviceFactors:
        """Copy the factors to a table on the device."""
        return to_device(self.device, factors, stored_width(self.plan.rank, self.dtype))

    def copies(self, factors: Factors) -> FactorRows:
        """See `Backend`."""
        assert isinstance(factors, DeviceFactors)
        return gpu_sgd.working_rows(factors, self.plan.factors, self.dtype)

    def arrays(self, work: FactorRows) -> list[Array]:
        """Factors and biases."""
        return [work.matrix] if work.bias is None else [work.matrix, work.bias]

    def likes(self, rows: int) -> list[np.ndarray]:
        """See `Backend`; only their shapes are used."""
        width = stored_width(self.plan.factors, self.dtype)
        likes = [np.empty((rows, width), dtype=self.dtype)]
        return likes + [np.empty(rows, dtype=self.dtype)] * self.objective.biases

    def arrived(self, arrays: Sequence[Array]) -> FactorRows:
        """See `Backend`."""
        return FactorRows(*arrays)

    def move(self, block: int, side: Side, work: dict[Side, FactorRows], terms: Terms) -> Iterator[None]:
        """See `Backend`; launches without waiting."""
        msgd = self.epochs[block]
        if msgd is not None:
            sums = self._sums_of[block, side]
            msgd.launch_pass(side, work[side], work[other_side(side)], terms, sums)
            yield

    def factors(self, work: FactorRows) -> DeviceFactors:
        """See `Backend`."""
        return gpu_sgd.table_of(self.device, work, self.plan, self.dtype)

    def epoch_result(self, *sides: Factors) -> tuple[float, bool]:
        """See `Backend`; waits for the device."""
        on_device = [factors for factors in sides if isinstance(factors, DeviceFactors)]
        return gpu_sgd.epoch_result(self.device, self._sums.sum(keepdims=True) / 2, *on_device)

    def loss(self, block: int, users: Factors, items: Factors, mean: float) -> float:
        """See `Backend`."""
        assert isinstance(users, DeviceFactors) and isinstance(items, DeviceFactors)
        loss = self.losses[block]
        return 0.0 if loss is None else loss.at({"user": users, "item": items}, mean)

    def penalty(self, side: Side, factors: Factors, degrees: np.ndarray) -> float:
        """See `Backend`."""
        assert isinstance(factors, DeviceFactors)
        return gpu_sgd.penalty(side, factors, self.objective, degrees)


# ---------------------------------------------------------------------------------------------- one rank


class RankSGD:
    """One rank of SGD on several; every rank makes one and calls the same methods.

    Parameters
    ----------
    communicator : Communicator
    user_items : csr_array, shape (n_users, n_items)
        The ratings, equal on all ranks; a rank keeps those of its users.
    objective : Objective
    plan : Plan
        Its method is an `SgdMethod` of schedule "msgd" with the order; `num_threads` is the number of this rank.
    state : State
        Initial factors of all users and items, equal on all ranks.
    completed : int
        Completed epochs that led to `state`.
    make_backend : callable
        Maps ``(blocks, objective, plan)`` to this rank's device. Default: the CPU.
    agreed : bool
        Skip the check that all ranks have the same arguments.

    Attributes
    ----------
    factors : dict of Factors
        This rank's users and own items after the last complete epoch.

    Raises
    ------
    CommunicatorError
        Ranks have different ratings, parameters or factors.
    ModelFileError
        AdaGrad or RPCS resumes from a state without its sums of squares.
    """

    backend: Backend

    def __init__(
        self,
        communicator: Communicator,
        user_items: sp.csr_array,
        objective: Objective,
        plan: Plan,
        state: State,
        completed: int = 0,
        *,
        make_backend: Callable[[list[GridBlock], Objective, Plan], Backend] = CpuBackend,
        agreed: bool = False,
    ) -> None:
        assert isinstance(plan.method, SgdMethod)
        self.communicator, self.objective, self.method = communicator, objective, plan.method
        self.rank, self.size = communicator.rank, communicator.size
        if not agreed:
            first = [state.side(side).part(slice(1)).matrix.tobytes() for side in SIDES]
            facts = {"data": fingerprint(user_items), "objective": objective, "method": plan.method, "state": first}
            check_agreement(communicator, facts | {"number of completed epochs": completed})
        state = starting_state(state, plan.method, plan.factors, completed)
        self.bounds = Bounds.even(user_items, self.size)
        blocks = cut_share(user_items, self.bounds, self.rank, plan.num_threads)
        item_degrees = np.bincount(user_items.indices, minlength=user_items.shape[1])
        self.degrees: dict[Side, np.ndarray] = {
            "user": np.diff(user_items.indptr)[slice(*self.bounds.range_of("user", self.rank))],
            "item": item_degrees[slice(*self.bounds.range_of("item", self.rank))],
        }
        self.backend = make_backend(blocks, objective, plan)
        with self.backend.active():
            self.factors: dict[Side, Factors] = {
                side: self.backend.hold(state.side(side).part(slice(*self.bounds.range_of(side, self.rank))))
                for side in SIDES
            }
        self.mean, self.epoch, self.best = state.mean, completed, math.inf

    def sweep(self) -> dict[Side, Factors]:
        """Run one epoch; return `factors`, which change on all ranks or, after a failure, on none.

        Raises
        ------
        DivergedError
            On all ranks.
        CommunicatorError
            Another rank has failed.
        """
        with self.backend.active():
            new, loss, is_finite = self._epoch()
            # this rank's launches are complete: a failure of NCCL on any rank is raised here
            sums = self.communicator.allreduce(np.array([loss, not is_finite], dtype=np.float64))
        total = float(sums[0])
        if not math.isfinite(total):
            raise diverged("errors became infinite or NaN", self.method, self.epoch)
        if sums[1]:
            raise diverged("factors became infinite or NaN", self.method, self.epoch)
        if total > RISE * self.best:
            what = f"the sum of squared errors rose from {self.best:.4g} to {total:.4g}"
            raise diverged(what, self.method, self.epoch)
        self.best, self.factors = min(self.best, total), new
        self.epoch += 1
        return new

    def _epoch(self) -> tuple[dict[Side, Factors], float, bool]:
        terms = terms_at(self.method, self.objective, self.mean, self.epoch)
        work = {side: self.backend.copies(self.factors[side]) for side in SIDES}
        own, last = work["item"], self._last_step()
        for step in range(last + 1):
            block = (self.rank + step) % self.size
            if step < self.size:
                self._move(block, "item", work, terms)
            arrives = self._send(work["item"], (block + 1) % self.size) if step < last else None
            if step in self._user_steps():
                self._move(block, "user", work, terms)
            if arrives is not None:
                work["item"] = self.backend.arrived(arrives())
                if step + 1 == self.size:  # this rank's own items have returned, updated by all ranks
                    own = work["item"]
        new: dict[Side, Factors] = {"user": self.backend.factors(work.pop("user")), "item": self.backend.factors(own)}
        return new, *self.backend.epoch_result(*new.values())

    def _user_steps(self) -> range:
        """Steps that update the users; steps 0 to p - 1 update the items."""
        first = self.size - 1 if self.method.order == "passes" else 0
        return range(first, first + self.size)

    def _last_step(self) -> int:
        """The step after which all updates are done; this rank's own items returned in step p."""
        return max(self._user_steps()[-1], self.size if self.size > 1 else 0)

    def _move(self, block: int, side: Side, work: dict[Side, Any], terms: Terms) -> None:
        for _ in self.backend.move(block, side, work, terms):
            if self.communicator.cause:  # a pass may be long
                raise CommunicatorError(self.communicator.cause)

    def _send(self, items: Any, following: int) -> Callable[[], list[Array]]:
        """Start to send items to rank q - 1 and to receive those of range `following` from rank q + 1."""
        first, last = self.bounds.range_of("item", following)
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        sent = self.backend.arrays(items)
        return self.communicator.start_sendrecv(sent, before, after, self.backend.likes(last - first))

    def close(self) -> None:
        """Do nothing: a rank holds no resources."""

    def stop(self) -> None:
        """Do nothing: there is no background work."""

    def objective_value(self) -> float:
        """The objective at the current factors of all ranks, in float64."""
        with self.backend.active():
            items = self._all_items()
            users, mean = self.factors["user"], self.mean
            own = sum(self.backend.loss(block, users, items[block], mean) for block in range(self.size))
            own += sum(self.backend.penalty(side, self.factors[side], self.degrees[side]) for side in SIDES)
        return float(self.communicator.allreduce(np.array([own]))[0])

    def _all_items(self) -> list[Factors]:
        """Gather all ranges of items."""
        own = self.factors["item"]
        if self.size == 1:  # this communicator may not support arrays of a device
            return [own]
        counts = np.diff(self.bounds.item).tolist()
        whole = [self.communicator.allgatherv(array, counts) for array in own.arrays]
        ranges = [slice(*self.bounds.range_of("item", rank)) for rank in range(self.size)]
        return [own.with_arrays([array[rows] for array in whole]) for rows in ranges]


# ---------------------------------------------------------------------------------------------- all ranks


class MultiSGD:
    """SGD on several devices of this machine, driven from one thread; a `hybridmf.plan.solver.Solver`.

    Parameters
    ----------
    user_items, item_users : csr_array
        The ratings in both orientations.
    objective : Objective
    plan : Plan
        `devices` has one device per rank; CPU ranks share `num_threads`.
    state : State
        Initial factors and mean.
    completed : int
        Completed epochs that led to `state`.
    long_row, beside
        For GPUs; see `GpuBackend`.

    Raises
    ------
    ModelFileError
        AdaGrad or RPCS resumes from a state without its sums of squares.
    """

    def __init__(
        self,
        user_items: sp.csr_array,
        item_users: sp.csr_array,
        objective: Objective,
        plan: Plan,
        state: State,
        completed: int,
        *,
        long_row: int | None = None,
        beside: bool = True,
    ) -> None:
        size = len(plan.devices)
        self.mean, self.group = state.mean, RankGroup(size)
        own_plan = plan.changed(num_threads=max(1, plan.num_threads // size))

        def make(control: LocalCommunicator, opened: Callable[[Communicator], None]) -> RankSGD:
            communicator, device = open_rank(plan.devices[control.rank], control)
            opened(communicator)
            make_backend: Callable[..., Backend] = CpuBackend
            if device is not None:
                make_backend = partial(GpuBackend, device, long_row=long_row, beside=beside)
            return RankSGD(
                communicator,
                user_items,
                objective,
                own_plan,
                state,
                completed,
                make_backend=make_backend,
                agreed=True,  # all ranks get the same objects
            )

        self.ranks: list[RankSGD] = self.group.open(make)
        self.state = state

    def sweep(self) -> Iterator[None]:
        """Run one epoch on all ranks; the state changes once all have completed it.

        Raises
        ------
        DivergedError
        Exception
            The error of the first rank that failed.
        """
        parts = self.group.run(lambda control: self.ranks[control.rank].sweep())
        users, items = (JoinedFactors([part[side] for part in parts]) for side in SIDES)
        self.state = State(users, items, self.mean)
        yield

    def objective_value(self) -> float:
        """The objective at the current factors, in float64."""
        return self.group.run(lambda control: self.ranks[control.rank].objective_value())[0]

    def close(self) -> None:
        """End the threads and connections. A second call does nothing."""
        self.group.close()
