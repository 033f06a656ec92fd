"""ALS on several devices as one solver: a thread for each rank, driven by the fit loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State
from ..core.regression import SideFeatures, parted
from ..core.sparse import stacked
from ..data.slabs import as_orientation
from ..data.store import StoreMatrix
from ..plan.grid import Grid, RankLayout
from ..plan.ordering import reordered
from ..plan.solver import SWEEP_ORDER, Alternating, Choose
from ..plan.types import Plan
from . import gpu_rank
from .cpu_rank import CpuWorker
from .dealt import Dealt
from .gpu_rank import GpuWorker
from .group import JoinedFactors, RankGroup
from .su_als import Block, RankALS, Worker, rank_plan
from .transport.communicator import Communicator
from .transport.messages import add_in_order

MakeWorker = Callable[[Any], tuple[Communicator, Worker]]
"""Makes the communicator and the worker of a rank, from the communicator of its thread."""


class MultiALS(Alternating):
    """Alternating least squares over the devices of a plan; see `hybridmf.ranks.su_als`.

    Ratings are in memory, in a store from which each rank reads its own rows, or `Dealt` to the GPUs. `grids` and
    workers are those of the plan by default, and `topology`, the socket of each rank for ``reduction="two_phase"``, is
    read from the driver. `features` are of all rows of a side, in the order of the input.
    """

    def __init__(
        self,
        user_items: sp.csr_array | StoreMatrix | Dealt,
        item_users: sp.csr_array | StoreMatrix | Dealt,
        objective: Objective,
        plan: Plan,
        state: State,
        *,
        grids: Mapping[Side, Grid] | None = None,
        make_worker: MakeWorker | None = None,
        topology: Sequence[int] | None = None,
        features: Mapping[Side, SideFeatures] | None = None,
    ) -> None:
        self.objective, self.plan, self.mean = objective, plan, state.mean
        if plan.scale is not None:
            plan.scale.check_served(len(plan.devices))
        self.order, found = reordered(user_items, item_users, plan.reorder, plan.num_threads)
        matrices = {side: as_orientation(found[side]) for side in SIDES}
        degrees = {side: matrices[side].degrees for side in SIDES}
        self.layout = RankLayout.even(degrees, grids or plan.grids, plan.row_cost)
        inward = {side: self.order.inward(side, state.side(side)) for side in SIDES}
        if topology is None and plan.reduction == "two_phase":
            topology = gpu_rank.sockets(plan.devices)
        self.group = RankGroup(self.layout.size)
        to_worker = make_worker or self._worker

        def make(control: Communicator, opened: Callable[[Communicator], None]) -> RankALS:
            communicator, worker = to_worker(control)
            opened(communicator)
            rank = control.rank
            own = {side: inward[side].part(slice(*self.layout.own(side, rank))) for side in SIDES}
            blocks = {side: self._block(side, matrices[side], communicator, worker) for side in SIDES}
            first = State(own["user"], own["item"], state.mean)
            return RankALS(
                communicator,
                self.layout,
                blocks,
                objective,
                rank_plan(plan),
                first,
                worker,
                order=self.order,
                topology=topology,
                one_matrix=not any(isinstance(matrix, StoreMatrix) for matrix in matrices.values()),
                features=features,
            )

        self.ranks: list[RankALS] = self.group.open(make)

    def _worker(self, control: Communicator) -> tuple[Communicator, Worker]:
        if self.plan.gpu is None:
            return control, CpuWorker(rank_plan(self.plan).num_threads)
        return gpu_rank.gpu_worker(self.plan.devices, control)

    def _block(self, side: Side, matrix: Any, communicator: Communicator, worker: Worker) -> Block:
        """Entries of a rank while `side` is solved."""
        if not isinstance(matrix, Dealt):
            return self.layout.cut(side, communicator.rank, matrix)
        assert isinstance(worker, GpuWorker)
        with worker.active():
            return matrix.block(worker.device, communicator, self.layout.bounds[side])

    @property
    def state(self) -> State:
        """Factors of the last completed half sweep, in the order of the input."""
        vectors: dict[Side, Factors] = {}
        for side, prior in self.ranks[0].regressions.items():  # without the ranks, which may have failed
            if self.ranks[0].pulls(side):
                sums = add_in_order([rank.host_sums(side) for rank in self.ranks])
                vectors[side] = parted(prior.vectors(sums).astype(self.plan.dtype), self.plan.factors)
        users, items = (
            JoinedFactors([rank.completed(side, vectors.get(side)) for rank in self.ranks], self.order.names(side))
            for side in SIDES
        )
        return State(users, items, self.mean, vectors)

    def solve(self, side: Side) -> list[Any]:
        # within a sweep the users follow the items; their basis does not change in between
        follows = self.solving is not None and (side == SWEEP_ORDER[0] or (self.continues and not self.plan.balance))
        return self.group.solve(side, follows)

    def keep(self, side: Side, solved: list[Any]) -> None:
        for rank, factors in zip(self.ranks, solved, strict=True):
            rank.keep(side, factors)

    def balance(self) -> None:
        balanced = self.group.run(lambda control: self.ranks[control.rank].balanced())
        for rank, own in zip(self.ranks, balanced, strict=True):
            rank.own = own

    def rows(self, side: Side, choose: Choose) -> tuple[np.ndarray, sp.csr_array] | None:
        degrees = [rank.degrees[side] for rank in self.ranks]
        at, ends = choose(np.concatenate(degrees)), np.cumsum([0, *map(len, degrees)])
        if any(rank.splits_rows(side) for rank in self.ranks):
            return None
        numbers, parts = [], []
        for rank, (first, last) in zip(self.ranks, pairwise(ends.tolist()), strict=True):
            own, entries = rank.own_rows(side, at[(at >= first) & (at < last)] - first)
            numbers.append(own)
            parts.append(entries)
        return np.concatenate(numbers), stacked(parts)

    def objective_value(self) -> float:
        return float(self.group.run(lambda control: self.ranks[control.rank].objective_value())[0])

    def close(self) -> None:
        """End the threads and connections of the ranks; `state` stays readable. A second call does nothing."""
        self.group.close()
