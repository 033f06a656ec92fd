"""ALS on one GPU: half sweeps for a plan, and the solver that alternates them."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.balance import balancing
from ..core.objective import SIDES, Factors, Objective, Side, State, other_side
from ..data.slabs import RangeSlabs
from ..data.store import StoreMatrix
from ..device.cuda import Device
from ..plan.fused import table_width
from ..plan.ordering import reordered
from ..plan.precision import PrecisionCheck
from ..plan.solver import Alternating, Choose
from ..plan.types import Plan
from .factors import Copiers, GpuFactors, HostTables, to_device, to_host
from .half import HalfSweep, objective_value
from .matrix import DeviceMatrix
from .offloaded import HostHalf
from .stream import Pipeline, StreamedHalf, slabs_of
from .subspace import SubspaceHalf


class HalfSweeps:
    """Makes the half sweeps of a fit on a GPU, for the placement of ratings and factors in the plan; owns shared state.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        self.device, self.copiers = device, Copiers(device)
        self.pipeline: Pipeline | None = None
        self._last: Any = None  # the last streamed half sweep made

    def factors(self, factors: Factors, plan: Plan, tables: HostTables | None = None) -> GpuFactors:
        """Move factors to where the plan keeps them between half sweeps; `tables` hold offloaded ones."""
        width = table_width(plan.rank, plan.dtype)
        return to_host(factors, width, tables) if plan.offloaded else to_device(self.device, factors, width)

    def make(
        self,
        side: Side,
        block: sp.csr_array | DeviceMatrix | RangeSlabs | StoreMatrix,
        objective: Objective,
        plan: Plan,
        names: np.ndarray | None = None,
        tables: HostTables | None = None,
    ) -> HalfSweep | StreamedHalf:
        """The half sweep over some rows.

        Parameters
        ----------
        side, objective, plan, names
            As for `HalfSweep`.
        block : csr_array, DeviceMatrix, RangeSlabs or StoreMatrix
        tables : HostTables, optional
            For the solved factors, if they are offloaded.
        """
        device = self.device
        if plan.offloaded:
            return HostHalf(device, side, slabs_of(block, side, plan), objective, plan, self.copiers, names, tables)
        if isinstance(block, sp.csr_array | DeviceMatrix) and not plan.streamed:
            kind = SubspaceHalf if plan.solver == "subspace" else HalfSweep
            return kind(device, side, block, objective, plan, names)
        slabs = slabs_of(block, side, plan)
        pipeline = None if plan.resident else self.entries(plan, slabs.dtype)
        half = StreamedHalf(device, side, slabs, objective, plan, pipeline, names)
        self.link(half)
        return half

    def entries(self, plan: Plan, dtype: Any) -> Pipeline:
        """The pipeline that loads the entries of both half sweeps."""
        if self.pipeline is None:
            longest = plan.slab
            if plan.scale is not None:
                longest = max(plan.scale.slab(side) // plan.grids[side].splits for side in SIDES)
            self.pipeline = Pipeline(self.device, longest, dtype)
        return self.pipeline

    def link(self, half: Any) -> None:
        """Start to load the entries of each half sweep while the other one ends."""
        if self._last is not None and self._last.side != half.side and half.plan.frozen is None:
            half.following, self._last.following = self._last.transfers, half.transfers
        self._last = half

    def close(self) -> None:
        """Stop loading."""
        if self.pipeline is not None:
            self.pipeline.close()


class GpuALS(Alternating):
    """Alternating least squares on one GPU: owns the layouts and the current factors.

    The plan places ratings (on the device, on the host, in a store) and factors.

    Parameters
    ----------
    device : Device
    user_items, item_users : csr_array, DeviceMatrix or StoreMatrix
        The ratings in both orientations, in memory, on the device or in a store.
    objective : Objective
    plan : Plan
    state : State
        Initial factors and mean.
    """

    def __init__(
        self,
        device: Device,
        user_items: sp.csr_array | DeviceMatrix | StoreMatrix,
        item_users: sp.csr_array | DeviceMatrix | StoreMatrix,
        objective: Objective,
        plan: Plan,
        state: State,
    ) -> None:
        self.device, self.objective, self.plan, self.mean = device, objective, plan, state.mean
        self.order, matrices = reordered(user_items, item_users, plan.reorder, plan.num_threads)
        self._half_sweeps = HalfSweeps(device)
        self.halves: dict[Side, Any] = {}
        self.inward: dict[Side, Any] = {}
        for side in SIDES:
            tables = HostTables.of(side, plan, plan.dtype) if plan.offloaded else None
            self.halves[side] = self._half_sweeps.make(
                side, matrices[side], objective, plan, self.order.names(side), tables=tables
            )
            self.inward[side] = self._half_sweeps.factors(self.order.inward(side, state.side(side)), plan, tables)
        self.check_precision = PrecisionCheck(objective, plan, self.halves)

    @property
    def pipeline(self) -> Pipeline | None:
        """Loads slabs of ratings; None if ratings are not streamed, or factors are offloaded."""
        return self._half_sweeps.pipeline

    @property
    def state(self) -> State:
        """Factors of the last completed half sweep, in the order of the input."""
        users, items = (self.order.outward(side, self.inward[side]) for side in SIDES)
        return State(users, items, self.mean)

    def update(self, side: Side) -> None:
        """One half sweep: solve `side` for the factors of the other; the state changes only once it is complete."""
        half, fixed = self.halves[side], self.inward[other_side(side)]
        with self.device.active():
            *_, (solved, status) = half.launches(fixed, self.mean, self.inward[side])
            half.check(solved, status)
            self.check_precision(side, fixed)
        self.inward[side] = solved

    def rows(self, side: Side, choose: Choose) -> tuple[np.ndarray, sp.csr_array]:
        """See `Alternating.rows`; slabs are no longer loaded ahead."""
        self.close()  # its thread reads the same slabs
        half = self.halves[side]
        at = choose(half.degrees)
        with self.device.active():
            return self.order.entries(side, at, half.row_entries(at))

    def balance(self) -> None:
        """Transform both sides to the basis of least penalty; predictions stay the same."""
        with self.device.active():
            users, items = map(self._penalty_gram, SIDES)
            bases = zip(SIDES, balancing(users, items), strict=True)
            # after a failure neither side has changed
            self.inward = {side: self.inward[side].times(self._half_sweeps.copiers, basis) for side, basis in bases}

    def _penalty_gram(self, side: Side) -> np.ndarray:
        """``sum_u s_u x_u x_u^T`` times lambda relative to that of items; float64, on the host."""
        factors = self.inward[side]
        gram: np.ndarray = factors.exact_gram(self.device, self.halves[side].scale)
        return self.objective.share(side) * gram[: factors.factors, : factors.factors]

    def objective_value(self) -> float:
        """The objective at the current factors, sums in float64."""
        half, degrees = self.halves["user"], self.halves["item"].degrees
        return objective_value(half, self.inward["user"], self.inward["item"], self.mean, degrees)

    def close(self) -> None:
        """Stop loading; `state` stays readable."""
        self._half_sweeps.close()
