"""ALS on several devices as one solver: a thread for each rank, driven by the fit loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Objective, Side, State, part_of
from ..core.sparse import transposed
from ..data.slabs import ColumnSlabs, RangeSlabs
from ..data.store import StoreMatrix
from ..errors import CommunicatorError
from ..formats import Reordered, reorder
from ..plan.grid import Grid, Layout
from ..plan.solver import Alternating
from ..plan.types import Plan
from .cpu_rank import CpuWorker
from .joined import JoinedFactors
from .su_als import Block, RankALS, ReductionName, Worker, rank_plan
from .transport.communicator import Communicator
from .transport.threads import RankThreads

logger = logging.getLogger("hybridmf")

MakeWorker = Callable[[Communicator], tuple[Communicator, Worker]]
"""What a rank's thread communicates and computes with, from the communicator of the threads."""


class MultiALS(Alternating):
    """Alternating least squares over the devices of a plan; see `hybridmf.ranks.su_als`.

    Parameters
    ----------
    user_items, item_users : csr_array or StoreMatrix
        The ratings in both orientations, in memory or in a store, of which each rank reads its own rows.
    objective : Objective
    plan : Plan
        Of several devices; its `scale` says in which waves ratings are streamed, and may be `ScalePlan.on` of the one
        that was made for another number of GPUs.
    state : State
        Where to start.
    grids : dict of side to Grid, optional
        Default: those of the plan.
    reduction : {"scatter", "two_phase", "root"}
        How partial systems are added up.
    make_worker : callable, optional
        Default: what the names of the devices say.
    topology : sequence of int, optional
        Socket of each rank, for ``reduction="two_phase"``. Default: read from the driver.

    Raises
    ------
    DeviceError
        A device cannot be served.
    DeviceMemoryError
        A rank has no room for its part.
    ValueError
        A partition that no fit serves.
    """

    def __init__(
        self,
        user_items: sp.csr_array | StoreMatrix,
        item_users: sp.csr_array | StoreMatrix,
        objective: Objective,
        plan: Plan,
        state: State,
        *,
        grids: Mapping[Side, Grid] | None = None,
        reduction: ReductionName = "scatter",
        make_worker: MakeWorker | None = None,
        topology: Sequence[int] | None = None,
    ) -> None:
        self.objective, self.plan, self.mean = objective, plan, state.mean
        if plan.scale is not None:
            plan.scale.check_served(len(plan.devices))
        self._reordered: Reordered | None = None
        if plan.reorder != "none":
            axes = {"rows": plan.reorder in ("rows", "both"), "cols": plan.reorder in ("columns", "both")}
            self._reordered = reorder(user_items, **axes, num_threads=plan.num_threads)
            user_items = self._reordered.matrix
            item_users = transposed(user_items, plan.num_threads)
        matrices: dict[Side, sp.csr_array | StoreMatrix] = {"user": user_items, "item": item_users}
        degrees = {side: np.diff(matrices[side].indptr) for side in SIDES}
        self.layout = Layout.even(degrees, grids or plan.grids, plan.row_cost)
        inward = {side: state.side(side).on_host() for side in SIDES}
        for side in SIDES:
            order = self._order(side)
            if order is not None:
                inward[side] = inward[side].take(order)
        known_topology = self._topology(reduction, topology)
        self.threads = RankThreads(self.layout.size)
        to_worker = make_worker or worker_maker(plan, self.threads)
        opened: dict[int, Communicator] = {}
        self._opened, self._closed = opened, False

        def make(threads: Communicator) -> RankALS:
            communicator, worker = to_worker(threads)
            rank = threads.rank
            opened[rank] = communicator
            own = {side: part_of(inward[side], *self.layout.own(side, rank)) for side in SIDES}
            return RankALS(
                communicator,
                self.layout,
                {side: block_of(self.layout, side, rank, matrices[side], plan) for side in SIDES},
                objective,
                rank_plan(plan),
                State(own["user"], own["item"], state.mean),
                worker,
                names={side: self._names(side, rank) for side in SIDES},
                reduction=reduction,
                topology=known_topology,
            )

        self.ranks: list[RankALS] = []
        try:
            self.ranks = self._run(make)
            self._together = self._sides_together()
        except BaseException:
            self.close()
            raise

    def _order(self, side: Side) -> np.ndarray | None:
        if self._reordered is None:
            return None
        return self._reordered.row_order if side == "user" else self._reordered.col_order

    def _names(self, side: Side, rank: int) -> np.ndarray:
        first, last = self.layout.own(side, rank)
        order = self._order(side)
        return np.arange(first, last, dtype=np.int64) if order is None else order[first:last].astype(np.int64)

    def _topology(self, reduction: str, given: Sequence[int] | None) -> list[int] | None:
        if given is not None or reduction != "two_phase":
            return None if given is None else list(given)
        from .gpu_rank import sockets

        return sockets(self.plan.devices)

    def _run(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run on all ranks; the first failure comes out as it was raised, and stops them all."""
        self._check_open()
        return self.threads.run(function)

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorError("the ranks were closed; make another solver")

    def _sides_together(self) -> set[Side]:
        """Half sweeps that one thread launches for all ranks."""
        if self.plan.gpu is None:
            return set()
        from . import together

        return {side for side in SIDES if together.is_served(self.ranks, side)}

    def _solve_together(self, side: Side) -> list[Any]:
        from . import together

        self._check_open()
        with self.threads.in_their_place():
            return together.solve(self.ranks, side)

    @property
    def state(self) -> State:
        """Factors of the last completed half sweep, in the order of the input."""
        users, items = (JoinedFactors([rank.own[side] for rank in self.ranks], self._order(side)) for side in SIDES)
        return State(users, items, self.mean)

    def update(self, side: Side) -> None:
        """One half sweep; the state changes only once it is complete on all ranks."""
        if side in self._together:
            solved = self._solve_together(side)
        else:
            solved = self._run(lambda threads: self.ranks[threads.rank].solve(side))
        for rank, factors in zip(self.ranks, solved, strict=True):
            rank.own[side] = factors

    def balance(self) -> None:
        """Change both sides to the basis of least penalty; the same predictions."""
        balanced = self._run(lambda threads: self.ranks[threads.rank].balanced())
        for rank, own in zip(self.ranks, balanced, strict=True):
            rank.own = own

    def objective_value(self) -> float:
        """The objective at the current factors, sums in float64."""
        return float(self._run(lambda threads: self.ranks[threads.rank].objective_value())[0])

    def close(self) -> None:
        """End the threads and connections of the ranks; `state` stays readable. Closing once more does nothing."""
        if self._closed:
            return
        try:
            if self.threads.stopping.is_set():
                for communicator in self._opened.values():  # a rank may wait in one of them for another that is gone
                    communicator.abort("the fit has ended")
                for rank in self.ranks:
                    rank.worker.close()
            else:
                self._run(lambda threads: _close_rank(self.ranks[threads.rank], self._opened[threads.rank]))
        except CommunicatorError as error:
            logger.warning("ranks did not end well: %s", error)
        finally:
            self._closed = True
            self.threads.close()


def block_of(layout: Layout, side: Side, rank: int, matrix: sp.csr_array | StoreMatrix, plan: Plan) -> Block:
    """A rank's entries while `side` is solved: cut out of ratings in memory, or where to read them.

    Raises
    ------
    ValueError
        A store whose slabs are worked with as they are, and a grid in which ranks share rows.
    """
    if not isinstance(matrix, StoreMatrix):
        return layout.cut(side, rank, matrix)
    grid = layout.grids[side]
    if grid.splits == 1:
        return RangeSlabs(matrix, *layout.own(side, rank))
    if plan.resident:
        raise ValueError(
            f"a store is read row by row, and a grid of {grid.splits} x {grid.groups} splits the rows of {side}s; use "
            f"1 x {grid.size}, or load it: store.to_ratings()"
        )
    return ColumnSlabs(matrix, layout.ranges(side, rank), layout.columns(side, rank))


def _close_rank(rank: RankALS, communicator: Communicator) -> None:
    """Close what a rank has connected, on its thread."""
    rank.close()
    communicator.close()


def worker_maker(plan: Plan, threads: RankThreads) -> MakeWorker:
    """Workers on the devices of a plan."""
    if plan.gpu is None:

        def check() -> None:
            if threads.stopping.is_set():
                raise CommunicatorError("another rank has failed, or the fit was stopped")

        return lambda communicator: (communicator, CpuWorker(check))
    from .gpu_rank import gpu_worker

    return lambda communicator: gpu_worker(plan.devices, communicator)
