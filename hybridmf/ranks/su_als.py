"""SU-ALS: alternating least squares by ranks, one program on every rank (cuMF Algorithm 3); one device is one rank.

`hybridmf.plan.grid` describes which rank owns and sums which rows. A half sweep on a grid of one split is model
parallel: each rank gathers the whole fixed side and solves its own rows as one device would. With more splits a rank
sums the contribution of its part of the fixed side to the systems of its group's rows (lines 9-11), batch by batch; a
reduce-scatter adds the sums of the group (lines 13-16), and each rank completes and solves the rows it owns (line 17).
If ratings do not stay on the devices, the entries of a batch load while the one before is processed.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import scipy.sparse as sp

from ..core.balance import balancing
from ..core.objective import SIDES, Factors, Objective, Side, State, other_side
from ..core.regression import Regression, SideFeatures, filled, joined, parted
from ..data.slabs import InMemory, Orientation, as_orientation, slab_bounds, slab_entries
from ..errors import CommunicatorError, RatingsError
from ..gpu.matrix import DeviceMatrix
from ..plan.fused import table_width
from ..plan.grid import Grid, RankLayout
from ..plan.half_sweep import SLAB_BUFFERS
from ..plan.ordering import Ordering, reordered
from ..plan.partitions import ScalePlan, check_rank
from ..plan.precision import PrecisionCheck
from ..plan.solver import Alternating, Choose, Given
from ..plan.start import DrawnFactors
from ..plan.types import Plan
from .batches import BatchedRows, Ranges, batch_entries, batch_rows, bounded_batches, even_batches
from .reduction import Reduction, make_reduction
from .transport.communicator import Communicator, Single, first_differing

ROOM = 0.9  # maximum share of a GPU's memory for both sides if the next fixed side is gathered ahead

Block: TypeAlias = Orientation | DeviceMatrix  # entries of a rank: those of its own rows, or of a group's rows


class WholeRows(NamedTuple):
    """The rows of a side that a rank solves alone."""

    side: Side
    block: Any  # a `Block`
    objective: Objective
    plan: Plan
    names: np.ndarray | None  # number of each row in error messages; default: its position
    described: bool = False  # whether rows have features, so that the half sweep may get their pull
    weights: np.ndarray | None = None  # of explicit entries


class Worker(Protocol):
    """The device of a rank: `hybridmf.ranks.cpu_rank.CpuWorker`, `hybridmf.ranks.gpu_rank.GpuWorker`.

    It has its own type of factors, and arrays on its device; its communicator sends these and NumPy's arrays. Only GPUs
    split the fixed side, with the methods `blank`, `gram`, `partial` and `overlap` of `GpuWorker`.
    """

    gathers_ahead: bool = False
    """Whether `solve` of a half sweep calls `then` before new factors are complete: ranks exchange them meanwhile."""

    def active(self) -> AbstractContextManager[None]:
        """A rank does all its work in this context."""
        return nullcontext()

    def own(self, side: Side, factors: Factors, plan: Plan) -> Any:
        """Move factors to where the plan keeps them."""

    def exact_gram(self, factors: Any, weights: Any = None) -> np.ndarray:
        """``F^T diag(weights) F`` in float64, at least (factors, factors); `weights` as in a half sweep's `scale`."""

    def times(self, factors: Any, basis: np.ndarray) -> Any:
        """Factors in another basis."""

    def penalty(self, objective: Objective, side: Side, factors: Any, degrees: np.ndarray) -> float:
        """Penalty of own rows in float64."""

    def total(self, loss: float, unobserved: float, penalties: tuple[float, float]) -> float:
        """The objective from its parts, in the order in which the device's serving adds them."""

    def whole(self, rows: WholeRows) -> Any:
        """A half sweep over complete rows: `hybridmf.cpu.als.HalfSweep`, `hybridmf.gpu.half.GpuHalf`."""

    def regression(self, plan: Plan) -> Callable[..., Regression]:
        """Makes the regression of own rows on features from the arguments of `Regression`."""

    def close(self) -> None:
        """Stop background work; no half sweep is running."""
        return None


def one_device(user_items: Any, item_users: Any, plan: Plan, state: State) -> dict[str, Any]:
    """Arguments of `RankALS` for the rank that has all rows of both orientations (csr_array or Block).

    Rows are in the order that the plan asks for.
    """
    order, matrices = reordered(user_items, item_users, plan.reorder, plan.num_threads)
    blocks = {side: as_orientation(matrices[side]) for side in SIDES}
    bounds = {side: np.array([0, blocks[side].shape[0]]) for side in SIDES}
    layout = RankLayout(bounds, dict.fromkeys(SIDES, Grid(1, 1)))
    users, items = (order.inward(side, state.side(side)) for side in SIDES)
    first = State(users, items, state.mean)
    common = {"communicator": Single(), "layout": layout, "plan": plan}
    return common | {"blocks": blocks, "state": first, "order": order}


class RankALS(Alternating):
    """One rank of ALS; every rank makes one, and all call its methods together.

    `layout`, `plan`: the same on all ranks, but for `num_threads` and `gpu`.
    `blocks`: `RankLayout.cut` of both orientations of the ratings.
    `state`: initial factors of the rows this rank owns, on the host.
    `order`: of all rows. Default: that of the input.
    `topology`: socket of each rank, for ``reduction="two_phase"``.
    `one_matrix`: whether the blocks of all ranks were cut from the same ratings in memory: their entries are not
    compared then.
    `features`: of all rows of a side, in the order of the input.
    `weights`: of explicit entries, in the order of the blocks; for a single rank.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: RankLayout,
        blocks: Mapping[Side, Block],
        objective: Objective,
        plan: Plan,
        state: State,
        worker: Worker,
        *,
        order: Ordering | None = None,
        topology: Sequence[int] | None = None,
        one_matrix: bool = False,
        features: Mapping[Side, SideFeatures] | None = None,
        weights: Mapping[Side, np.ndarray] | None = None,
    ) -> None:
        self.communicator, self.layout, self.objective, self.plan = communicator, layout, objective, plan
        self.worker: Any = worker
        self.mean, self.order = state.mean, order or Ordering()
        self.rank, self.alone = communicator.rank, layout.size == 1
        self.incomplete = not self.alone
        self._weights, self._features = weights or {}, features or {}
        self._known_sums: dict[Side, tuple[Any, Any]] = {}
        if communicator.size != layout.size:
            raise ValueError(f"the layout is of {layout.size} ranks, the communicator of {communicator.size}")
        with worker.active():
            self._check_alike(blocks, one_matrix)
            self._split_communicators(topology)
            self.degrees = {side: self._whole_degrees(side, blocks[side]) for side in SIDES}
            self._ranges = {side: self._ranges_of(side) for side in SIDES}
            self.batches = {side: self._batches(side) for side in SIDES}
            if plan.scale is not None and not self.alone:
                check_rank(plan.scale, layout, self.rank, self._entries_at_a_time(blocks, plan.scale))
            drawn = {side: isinstance(state.side(side), DrawnFactors) for side in SIDES}
            self.regressions: dict[Side, Regression] = {}
            for side, each in self._features.items():
                scale = objective.row_scale(side, self.degrees[side])
                given = (each, self.names(side), scale, self.degrees[side], self._sum)
                self.regressions[side] = worker.regression(plan)(*given)
            self._pulled = {side: not drawn[side] for side in self.regressions}  # whether own factors say anything
            self.own = {side: worker.own(side, self._warm(side, state.side(side)), plan) for side in SIDES}
            self.halves = {side: self._half(side, blocks[side]) for side in SIDES}
            whole = {side: half for side, half in self.halves.items() if not self.splits_rows(side)}
            self.check_precision = PrecisionCheck(objective, plan, whole)
            ahead = worker.gathers_ahead and has_room_for_both(plan) and plan.frozen is None
            self.gathers_ahead = not self.alone and self._sum(np.array([int(ahead)]))[0] == layout.size
        self._ahead: tuple[Side, Any, Any] | None = None  # (half sweep, own fixed factors, gathered factors)

    # ------------------------------------------------------------------------------------------------ set-up

    def _check_alike(self, blocks: Mapping[Side, Block], one_matrix: bool) -> None:
        """Check that all ranks have the same plan, and blocks of the same ratings in both orientations."""
        if self.alone:
            return
        for side in SIDES:
            rows = sum(last - first for first, last in self.layout.ranges(side, self.rank))
            first, last = self.layout.columns(side, self.rank)
            if blocks[side].shape != (rows, last - first):
                raise RatingsError(
                    f"the {side} block of rank {self.rank} has shape {blocks[side].shape}, the layout says "
                    f"{(rows, last - first)}; cut it with RankLayout.cut"
                )
        other = first_differing(self.communicator, self._description())
        if other is not None:
            raise CommunicatorError(
                f"rank {other} has another layout, objective or plan than rank 0; give all ranks the same"
            )
        if one_matrix:
            return
        sums = np.stack([self._checksum(side, blocks[side]) for side in SIDES])
        users, items = self.communicator.allreduce(sums)
        if not np.array_equal(users, items):
            raise CommunicatorError(
                "the ranks' blocks are not of the same ratings: entries by user and by item differ "
                f"({int(users[0]):,} and {int(items[0]):,} of them); one rank has read different data"
            )

    def _description(self) -> object:
        """What all ranks have in common."""
        layout, plan = self.layout, self.plan
        bounds = [layout.bounds[side].tolist() for side in SIDES]
        kernels = (plan.solver, plan.cg_steps, plan.assembly, plan.precision, plan.dual_sides)
        slabs = [plan.scale.slab(side) for side in SIDES if plan.scale and self._splits_streamed(side)]
        choices = (plan.factors, plan.dtype, *kernels, plan.batch_slots, plan.reduction, *slabs)
        features = [
            (side, each.weight, zlib.crc32(each.matrix.indices.tobytes()), zlib.crc32(each.matrix.data.tobytes()))
            for side, each in self._features.items()
        ]
        grids = [layout.grids[side] for side in SIDES]
        return bounds, grids, asdict(self.objective), choices, self.mean, features

    def _checksum(self, side: Side, block: Block) -> np.ndarray:
        """Number of entries and sums over them of user, item and the value's bits: the same in both orientations.

        Slabs are only counted: the sums would require reading the store, which has its own checksums.
        """
        if not isinstance(block, InMemory):
            return np.array([block.nnz, 0, 0, 0], dtype=np.int64)
        csr, rows, n = block.csr, np.int64(0), 0
        for first, last in self.layout.ranges(side, self.rank):
            degrees = np.diff(csr.indptr[n : n + last - first + 1]).astype(np.int64)
            rows, n = rows + degrees @ np.arange(first, last, dtype=np.int64), n + last - first
        first_column = self.layout.columns(side, self.rank)[0]
        columns = csr.indices.sum(dtype=np.int64) + np.int64(first_column) * len(csr.indices)
        bits = np.ascontiguousarray(csr.data).view(np.int32).sum(dtype=np.int64)
        by_side = (rows, columns) if side == "user" else (columns, rows)
        return np.array([len(csr.indices), *by_side, bits], dtype=np.int64)

    def _split_communicators(self, topology: Sequence[int] | None) -> None:
        """Make communicators of the ranks with the same part of a fixed side, and of those that sum the same rows."""
        self._made: list[Communicator] = []
        self._holders: dict[Side, Communicator | None] = {}
        self._members: dict[Side, Communicator | None] = {}
        self._reductions: dict[Side, Reduction] = {}
        for side in SIDES:
            grid = self.layout.grids[side]
            if side == "item" and grid == self.layout.grids["user"]:
                for groups in (self._holders, self._members):
                    groups[side] = groups["user"]
            else:
                self._holders[side] = self._group(grid.groups, grid.split_of(self.rank))
                self._members[side] = self._group(grid.splits, grid.group_of(self.rank))
            members = self._members[side]
            if members is not None:
                sockets = None if topology is None else [topology[r] for r in grid.members(grid.group_of(self.rank))]
                self._reductions[side] = make_reduction(self.plan.reduction, members, sockets)

    def _group(self, size: int, color: int) -> Communicator | None:
        """Communicator of the `size` ranks of one color; None for a single rank."""
        if size == 1:
            return None
        if size == self.layout.size:
            return self.communicator
        self._made.append(self.communicator.split(color))
        return self._made[-1]

    def _entries_at_a_time(self, blocks: Mapping[Side, Block], scale: ScalePlan) -> dict[Side, int]:
        """Entries on this rank's GPU in each half sweep: of both orientations, or of the longest waves or batches."""
        if scale.ratings == "device":
            return dict.fromkeys(SIDES, sum(int(block.nnz) for block in blocks.values()))
        loaded = {}
        for side, block in blocks.items():
            if self.splits_rows(side):
                waves = batch_entries(self.batches[side], block.degrees)
            else:
                bounds = slab_bounds(block.degrees, scale.slab(side), scale.slab_rows(side))
                waves = slab_entries(bounds, block.degrees)
            loaded[side] = SLAB_BUFFERS * int(waves.max(initial=0))
        if scale.factors == "device":  # both half sweeps share buffers
            return dict.fromkeys(SIDES, max(loaded.values()))
        return loaded

    def _whole_degrees(self, side: Side, block: Block) -> np.ndarray:
        """Entries of each own row on all ranks, which weighted-lambda regularization needs (cuMF eq. 1)."""
        local = block.degrees.astype(np.int64, copy=False)
        members = self._members[side]
        if members is None:
            return local
        return members.reduce_scatter(local, self._member_counts(side))

    def _half(self, side: Side, block: Block) -> Any:
        arguments, own = (side, block, self.objective, self.plan), self.names(side)
        if not self.splits_rows(side):
            rows = WholeRows(*arguments, own, side in self.regressions, self._weights.get(side))
            return self.worker.whole(rows)
        assert own is not None
        degrees, members, reduction = self.degrees[side], self._members[side], self._reductions[side]
        if members is not None and reduction.everything_here is not None:
            counts = self._member_counts(side)
            own, degrees = members.allgatherv(own, counts), members.allgatherv(degrees, counts)
            if not reduction.everything_here:
                own, degrees = own[:0], degrees[:0]
        return self.worker.partial(*arguments, BatchedRows(own, degrees, self.batches[side], self._solved(side)))

    # ------------------------------------------------------------------------------------------------ features

    def _warm(self, side: Side, factors: Factors) -> Factors:
        """Initial factors without those of rows that have features only: they are no part of the objective."""
        prior = self.regressions.get(side)
        if prior is None or isinstance(factors, DrawnFactors) or side == self.plan.frozen:
            return factors
        return filled(factors, prior.cold, Factors(*(np.zeros_like(array[prior.cold]) for array in factors.arrays)))

    def _sums(self, side: Side) -> Any:
        """Sums of all ranks that the vectors of a side's features follow from, for the present factors."""
        own, known = self.own[side], self._known_sums.get(side)
        if known is None or known[0] is not own:
            known = own, self._sum(self.regressions[side].sums(own))
            self._known_sums[side] = known
        return known[1]

    def _vectors(self, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of the features of a side for the present factors, and the sums that they come from; float64."""
        prior = self.regressions[side]
        sums = prior.on_host(self._sums(side))
        return prior.vectors(sums), sums

    def host_sums(self, side: Side) -> np.ndarray:
        with self.worker.active():
            prior = self.regressions[side]
            return prior.on_host(prior.sums(self.own[side]))

    def pulls(self, side: Side) -> bool:
        """Whether rows of a side are pulled to their features: not while its first factors are drawn."""
        return self._pulled.get(side, False)

    def _pull(self, side: Side) -> Any:
        """What features add to the right-hand sides of own rows."""
        if not self.pulls(side):
            return None
        plan = self.plan
        ridge = self.objective.ridge(side, plan.factors, plan.rank)
        pull = self.regressions[side].pull(self._sums(side), ridge)
        return np.ascontiguousarray(pull, dtype=plan.dtype) if plan.gpu is None else pull

    def vectors(self) -> dict[Side, Factors]:
        """Vectors of the features of both sides; all ranks call it together."""
        rank, dtype = self.plan.factors, self.plan.dtype
        sides = [side for side in self.regressions if self.pulls(side)]
        return {side: parted(self._vectors(side)[0].astype(dtype), rank) for side in sides}

    def completed(self, side: Side, vectors: Factors | None) -> Any:
        """Own factors, where those of rows with features only follow from the vectors of features."""
        own, prior = self.own[side], self.regressions.get(side)
        if vectors is None or prior is None or not len(prior.cold) or side == self.plan.frozen:
            return own
        new = prior.predicted(joined(vectors).astype(np.float64))[prior.cold].astype(self.plan.dtype)
        return filled(own, prior.cold, parted(new, self.plan.factors))

    def _explained(self, side: Side) -> float:
        """By how much features lower the penalty of a side, over all ranks."""
        if not self.pulls(side):
            return 0.0
        vectors, sums = self._vectors(side)
        ridge = self.objective.ridge(side, self.plan.factors, self.plan.rank)
        return float(np.einsum("ij,ij,j->", vectors, sums, ridge))

    def names(self, side: Side) -> np.ndarray | None:
        """Row of the input of each own row, int64; None if they are all rows in the order of the input."""
        (first, last), names = self.layout.own(side, self.rank), self.order.names(side)
        if names is not None:
            return names[first:last].astype(np.int64)
        return None if self.alone else np.arange(first, last, dtype=np.int64)

    def _member_counts(self, side: Side) -> list[int]:
        """Rows of `side` that each rank of this rank's group owns."""
        return [last - first for first, last in self.layout.ranges(side, self.rank)]

    def _splits_streamed(self, side: Side) -> bool:
        """Whether rows of `side` are summed batch by batch while their entries load from the host."""
        streams = self.plan.streamed != "" and not self.plan.resident
        return streams and self.splits_rows(side)

    def _ranges_of(self, side: Side) -> list[Ranges]:
        """For each batch, the range of each member's own rows in the order of the group; empty for a single rank."""
        splits, members, counts = self.layout.grids[side].splits, self._members[side], self._member_counts(side)
        if members is None:
            return []
        rows = batch_rows(self.plan, splits, max(counts))
        if not self._splits_streamed(side):
            return even_batches(counts, rows)
        assert self.plan.scale is not None
        most, degrees = self.plan.scale.slab(side), self.degrees[side]
        own = slab_bounds(degrees, max(1, most // splits), rows)
        cuts = members.allgatherv(np.array([len(own)], dtype=np.int64), [1] * splits).tolist()
        bounds = members.allgatherv(own, cuts)
        entries = members.allgatherv(slab_entries(own, degrees), [count - 1 for count in cuts])
        ends = np.cumsum(cuts)
        return bounded_batches(
            np.split(bounds, ends[:-1]), np.split(entries, (ends - np.arange(1, splits + 1))[:-1]), most
        )

    def _batches(self, side: Side) -> list[Ranges]:
        """Rows of the block in each batch, in the order of the reduction."""
        if not self._ranges[side]:
            return []
        counts, order = self._member_counts(side), self._reductions[side].order
        starts = np.cumsum([0, *counts]).tolist()
        return [[(starts[k] + ranges[k][0], starts[k] + ranges[k][1]) for k in order] for ranges in self._ranges[side]]

    def _solved(self, side: Side) -> list[Ranges]:
        """The rows of each batch that this rank solves."""
        everything_here = self._reductions[side].everything_here
        if everything_here is None:
            mine = self.layout.grids[side].split_of(self.rank)
            return [[ranges[mine]] for ranges in self._ranges[side]]
        return [batch if everything_here else [] for batch in self.batches[side]]

    # ------------------------------------------------------------------------------------------------ half sweeps

    @property
    def state(self) -> State:
        """Factors of the rows that this rank owns; of all rows, in the order of the input, if it is the only one."""
        vectors = self.vectors()
        own = {side: self.completed(side, vectors.get(side)) for side in SIDES}
        users, items = (self.order.outward(side, own[side]) if self.alone else own[side] for side in SIDES)
        return State(users, items, self.mean, vectors)

    def rows(self, side: Side, choose: Choose) -> tuple[np.ndarray, sp.csr_array] | None:
        return None if self.splits_rows(side) else self.own_rows(side, choose(self.degrees[side]))

    def splits_rows(self, side: Side) -> bool:
        return self.layout.grids[side].splits > 1

    def own_rows(self, side: Side, at: np.ndarray) -> tuple[np.ndarray, sp.csr_array]:
        """Numbers and entries of own rows, in the order of the input; slabs are no longer loaded ahead."""
        self.worker.close()  # its thread reads the same slabs
        names = self.names(side)
        with self.worker.active():
            _, rows = self.order.entries(side, at, self.halves[side].row_entries(at))
        return at if names is None else names[at], rows

    def keep(self, side: Side, solved: Any) -> None:
        self.own[side] = solved
        if side in self._pulled:
            self._pulled[side] = True

    def solve(self, side: Side) -> Any:
        """New factors of own rows of `side`, once all ranks have theirs; the state does not change."""
        with self.worker.active():
            if self.splits_rows(side):
                solved = self._solve_split(side)
            else:
                # each rank has the whole fixed side: its Gram matrix has the bits of a fit on one device
                half, fixed, launched = self.halves[side], self._gathered(side), (None, None)
                with closing(half.steps(Given(fixed, self.mean, self.own[side], pull=self._pull(side)))) as steps:
                    for step in steps:
                        launched = step
                        if self.communicator.cause:  # another rank has failed, or the fit was stopped
                            raise CommunicatorError(self.communicator.cause)
                solved, status = launched
                half.check(self._gather_ahead(side, solved), status)
                if self.rank == 0:  # has its share of the longest rows, and one warning is enough
                    self.check_precision(side, fixed)
            self.communicator.barrier()  # failures of other ranks are raised here at the latest
            return solved

    def _gathered(self, side: Side) -> Any:
        """Gather the part of the fixed side that this rank needs while `side` is solved."""
        known = self.ahead(side)
        return self._gather(side, self.own[other_side(side)]) if known is None else known

    def ahead(self, side: Side) -> Any:
        """Factors gathered ahead for the half sweep of `side`; None without any, or if own factors changed since."""
        if self._ahead is not None:
            half, own, gathered = self._ahead
            if half == side and own is self.own[other_side(side)]:
                return gathered
        return None

    def forget_ahead(self) -> None:
        """Release factors gathered ahead; a half sweep that needs them later gathers them again."""
        self._ahead = None

    def keep_ahead(self, side: Side, own: Any, gathered: Any) -> None:
        """Keep factors gathered for the next half sweep, that of `side`, and the own factors of the other side."""
        self._ahead = (side, own, gathered)

    def _gather(self, side: Side, fixed: Any) -> Any:
        communicator = self._holders[side]
        if communicator is None:
            return fixed
        grid = self.layout.grids[side]
        counts = self.layout.counts(other_side(side), grid.holders(grid.split_of(self.rank)))
        arrays = [communicator.allgatherv(array, counts) for array in fixed.arrays]
        return fixed.with_arrays(arrays)

    def _gather_ahead(self, side: Side, solved: Any) -> Any:
        """Gather new factors of `side`, which are still being computed, for the next half sweep, if there is room."""
        if not self.gathers_ahead:
            return solved
        following = other_side(side)
        gathered = self._gather(following, solved)
        self.keep_ahead(following, solved, gathered)
        return gathered

    def _solve_split(self, side: Side) -> Any:
        half, reduction = self.halves[side], self._reductions[side]
        gram = self.worker.gram(self.own[other_side(side)], self.objective, self.plan)
        if gram is not None:
            gram = self.communicator.allreduce(gram)
        half.start(Given(self._gathered(side), self.mean, self._start(side), gram))
        overlap = self.worker.overlap
        with closing(half):
            for batch, sums, mark, counts in self._assembled(side, half, overlap):
                with overlap.after(mark):
                    mine = tuple(reduction.reduce(array, counts) for array in sums)
                # previous sums are kept until now: the reduction stream must not overwrite sums that are being solved
                half.finish(batch, mine)
                del sums
        return self._returned(side, half)

    def _start(self, side: Side) -> Any:
        """Warm start of the iterative solvers: own rows, or the rows of all members if one rank solves them."""
        own, members = self.own[side], self._members[side]
        everything_here = self._reductions[side].everything_here
        if everything_here is None or members is None:
            return own
        counts = self._member_counts(side)
        arrays = [members.allgatherv(array, counts) for array in own.arrays]
        return own.with_arrays(arrays if everything_here else [array[:0] for array in arrays])

    def _assembled(self, side: Side, half: Any, overlap: Any) -> Iterator[tuple[int, Any, Any, list[int]]]:
        """The sums of each batch, once the next one is assembled, which its reduction overlaps."""
        before: list[Any] = []
        for batch, ranges in enumerate(self.batches[side]):
            sums = half.assemble(batch)
            item = batch, sums, overlap.assembled(), [last - first for first, last in ranges]
            if before:
                yield before.pop()
            before.append(item)
            del item
        yield from before

    def _returned(self, side: Side, half: Any) -> Any:
        """Own rows of the solution, sent by the root if one rank solves the rows of all members."""
        members, everything_here = self._members[side], self._reductions[side].everything_here
        if members is None or everything_here is None:
            return half.result(functools.partial(self._gather_ahead, side))
        counts = self._member_counts(side)
        own, first = self.own[side], sum(counts[: members.rank])
        if everything_here:
            arrays = half.result().arrays
        else:
            arrays = [self.worker.blank(array, sum(counts)) for array in own.arrays]
        rows = slice(first, first + counts[members.rank])
        return own.with_arrays([members.broadcast(array)[rows].copy() for array in arrays])

    # ------------------------------------------------------------------------------------------------ over all ranks

    def balance(self) -> None:
        self.own = self.balanced()

    def balanced(self) -> dict[Side, Any]:
        """Own factors in the basis of least penalty; the state does not change."""
        with self.worker.active():
            users, items = (self._penalty_gram(side) for side in SIDES)
            bases = balancing(users, items)
            if not self.alone:  # the same bits on all ranks, independent of their LAPACK
                bases = tuple(self.communicator.broadcast(np.ascontiguousarray(basis)) for basis in bases)
            return {side: self._times(side, basis) for side, basis in zip(SIDES, bases, strict=True)}

    def _times(self, side: Side, basis: np.ndarray) -> Any:
        own = self.own[side]
        if not self.alone or self.plan.gpu is not None:
            return self.worker.times(own, basis)
        # in the order of the input: BLAS may round a row by its place
        return self.order.inward(side, self.worker.times(self.order.outward(side, own), basis))

    def _penalty_gram(self, side: Side) -> np.ndarray:
        """``sum_u s_u x_u x_u^T`` times lambda relative to that of items."""
        own, factors = self.own[side], self.plan.factors
        if self.splits_rows(side):  # a half sweep may have the rows of other ranks, too
            scale = own.beside(self.objective.row_scale(side, self.degrees[side]))
        else:
            scale = self.halves[side].scale
        gram = self._sum(np.ascontiguousarray(self.worker.exact_gram(own, scale)[:factors, :factors]))
        if self.pulls(side):
            vectors, sums = self._vectors(side)
            gram = gram - vectors[:, :factors].T @ sums[:, :factors]
        return self.objective.share(side) * gram

    def _sum(self, array: np.ndarray) -> np.ndarray:
        return array if self.alone else self.communicator.allreduce(array)

    def objective_value(self) -> float:
        """The objective at the current factors, the same on all ranks; sums in float64."""
        worker, unobserved = self.worker, 0.0
        with worker.active():
            parts = [self._losses()]
            parts += [worker.penalty(self.objective, side, self.own[side], self.degrees[side]) for side in SIDES]
            loss, users, items = self._sum(np.array(parts)).tolist()
            users, items = users - self._explained("user"), items - self._explained("item")
            if self.objective.is_implicit:
                grams = [self._sum(worker.exact_gram(self.own[side])) for side in SIDES]
                unobserved = self.objective.unobserved_weight * float(np.sum(grams[0] * grams[1]))
        return worker.total(loss, unobserved, (users, items))

    def _losses(self) -> float:
        half, items = self.halves["user"], self._gathered("user")
        if not self.splits_rows("user"):
            return float(half.losses(self.own["user"], items, self.mean).sum())
        return float(half.loss(self._users(), items, self.mean))

    def _users(self) -> Iterator[tuple[tuple[int, int], Any]]:
        """Rows of the users' block in the order of their entries, with factors from their owners."""
        members = self._members["user"]
        assert members is not None
        for batch, ranges in zip(self.batches["user"], self._ranges["user"], strict=True):
            for rows, k in zip(batch, self._reductions["user"].order, strict=True):
                if rows[0] < rows[1]:
                    yield rows, self._from_member(members, k, slice(*ranges[k]))

    def _from_member(self, members: Communicator, root: int, rows: slice) -> Any:
        """Factors of some users that a member of the group owns."""
        own = self.own["user"]
        arrays = own.arrays
        if members.rank == root:
            arrays = [array[rows] for array in arrays]
        else:
            arrays = [self.worker.blank(array, rows.stop - rows.start) for array in arrays]
        return own.with_arrays([members.broadcast(array, root) for array in arrays])

    def stop(self) -> None:
        self.worker.close()

    def close(self) -> None:
        """Close the communicators made here, but not the given one, and stop background work of the worker."""
        self.worker.close()
        for reduction in self._reductions.values():
            reduction.close()
        for communicator in self._made:
            communicator.close()


def has_room_for_both(plan: Plan) -> bool:
    """Whether a GPU has memory for both gathered sides beside the needs of a half sweep.

    And once more for its own rows: the next half sweep is launched before those of the last one are the state.
    """
    if plan.gpu is None or plan.scale is None or plan.offloaded:
        return False
    both = (plan.n_users + plan.n_items) * table_width(plan.rank, plan.dtype) * plan.itemsize
    return plan.scale.bytes_per_gpu + both * (1 + 1 / len(plan.devices)) <= ROOM * plan.gpu.free_bytes


def rank_plan(plan: Plan) -> Plan:
    """The plan of one rank: its share of the threads."""
    ranks = max(1, len(plan.devices))
    return plan.changed(num_threads=max(1, plan.num_threads // ranks))
