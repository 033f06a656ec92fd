"""The ratings of a fit by several ranks: each plans, holds and solves its share of the rows (cuMF 4.2 over nodes)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State, rating_scale
from ..core.sparse import ValueSummary
from ..core.validate import make_csr
from ..data.features import Features
from ..data.fingerprint import Checksum, checksum_of, join_checksums, join_fingerprints
from ..data.slabs import Orientation
from ..data.store import StoreMatrix
from ..errors import CommunicatorError, RatingsError
from ..plan.grid import Grid, RankLayout
from ..plan.make import check_memory, make_plan
from ..plan.memory import rank_bytes
from ..plan.start import DrawnFactors
from ..plan.types import DegreeFacts, Plan, Settings
from ..ranks.cpu_rank import CpuWorker
from ..ranks.shares import RankRatings, StoredRatings
from ..ranks.su_als import RankALS, Worker
from ..ranks.transport.communicator import Communicator, agreed, gather
from .learned import likes_of, pattern
from .training import described_by, side_features, sizes_of


@contextmanager
def aborting(communicator: Communicator) -> Iterator[None]:
    """A failure in this context stops all ranks, with its cause."""
    try:
        yield
    except BaseException as error:
        communicator.abort(f"rank {communicator.rank} failed: {type(error).__name__}: {error}")
        raise


class RankedRatings:
    """The source of a `hybridmf.model.fit.Fit` of ALS on several ranks, which make one and call its methods together.

    `device` is that of this rank, "cpu" or "cuda:N", and replaces the device of the model; `num_threads` are this
    rank's, by default those of the model.
    """

    frame_kind: str | None = None
    nnz: int  # as the next of all ranks, set by `cut`
    total: float

    def __init__(
        self,
        model: Any,
        ratings: RankRatings,
        communicator: Communicator,
        device: str = "cpu",
        num_threads: int | None = None,
        features: dict[Side, Features] | None = None,
    ) -> None:
        self.features = features or {}
        self.model, self.ratings, self.communicator = model, ratings, communicator
        self.device, self.num_threads = device, num_threads
        self.shape, self.unit, self.labels = ratings.shape, ratings.unit, (ratings.user_ids, ratings.item_ids)
        self.columns = np.broadcast_to(np.float32(0), ratings.shape)
        self.degrees = ratings.degrees(communicator)

    # ------------------------------------------------------------------------------------------------ plan

    def plan(self, objective: Objective, settings: Settings) -> Plan:
        """The plan of this rank, equal on all ranks: they agree on choices that depend on a machine."""
        size, device = self.communicator.size, self.device
        if settings.method.kind != "als":
            raise ValueError(
                f"model: {type(self.model).__name__} is not served by ranks; fit ImplicitALS or ExplicitALS"
            )
        of_ranks = replace(settings, device=(device,) * size, features=sizes_of(self.features))
        users, items = self.degrees["user"], self.degrees["item"]
        facts, nnz = DegreeFacts.of_degrees(users, items), int(users.sum())
        mapped = self.ratings.slab if device == "cpu" else None
        plan = make_plan(objective, of_ranks, self.shape, nnz, facts, mapped)
        if plan.streamed and self.ratings.slab is not None:  # data that exceed the GPUs need not be on the host either
            plan = make_plan(objective, of_ranks, self.shape, nnz, facts, self.ratings.slab)
        if plan.reorder != "none":
            if settings.reorder not in ("auto", "none"):
                raise ValueError(f"reorder={settings.reorder!r} is not served by ranks; use reorder='none'")
            plan = plan.changed(reorder="none")
        threads = plan.num_threads if self.num_threads is None else self.num_threads
        plan = plan.changed(devices=(device,) * size if size > 1 else (), num_threads=threads)
        if plan.gpu is None:
            plan = plan.changed(bytes=rank_bytes(plan, size))
        check_memory(plan)
        self._agree([plan.grids[side].splits for side in SIDES], "grids of {} splits")
        batches = [0] * len(SIDES)
        if plan.scale is not None and plan.streamed and not plan.resident:
            batches = [plan.scale.slab(side) if plan.grids[side].splits > 1 else 0 for side in SIDES]
        self._agree(batches, "batches of {} entries")
        slots = self.communicator.allgatherv(np.array([plan.batch_slots], dtype=np.int64), [1] * size)
        return plan.changed(batch_slots=int(slots.min()))

    def _agree(self, sizes: list[int], what: str) -> None:
        """Raise if the plan of this rank differs from that of the first one."""
        first = self.communicator.broadcast(np.array(sizes, dtype=np.int64)).tolist()
        if sizes != first:
            raise CommunicatorError(
                f"rank {self.communicator.rank} plans {what.format(sizes)} and rank 0 of {first}: "
                "their GPUs or hosts have different free memory, or only one is calibrated; set gpu_memory_limit to "
                "the smallest free memory, or remove the calibration"
            )

    # ------------------------------------------------------------------------------------------------ place

    def place(self, plan: Plan) -> Plan:
        """Bring the blocks of this rank to it; the plan then has the number of entries without repeated pairs."""
        self.cut(plan.grids, plan.row_cost, bool(plan.streamed))
        if not self.nnz:
            raise RatingsError("the ratings have no entries: there is nothing to fit")
        self.mean, objective = self.total / self.nnz, self.model._objective()
        scale, spread = self._scale(objective), self._scale(replace(objective, biases=True))
        self.scale, self.spread = (lambda objective: scale), (lambda objective: spread)
        self._item_likes: np.ndarray | None = None
        if (self.value_range or (1.0, 1.0))[0] <= 0:
            parts = self._own_users().matrices()
            self._item_likes = likes_of(parts, self.degrees["item"], self.communicator.allreduce)
        if self.unit is not None:
            self.total = self.ratings.total
        return plan.changed(nnz=self.nnz)

    def cut(self, grids: Mapping[Side, Grid], row_cost: float, streamed: bool) -> None:
        """Bring the entries of this rank to it, in memory unless they are streamed from a store.

        Degrees, total and range of the values are then those of all ranks, repeated pairs merged.
        """
        ratings, ranks = self.ratings, self.communicator
        self.layout, self._streamed = RankLayout.even(self.degrees, grids, row_cost), streamed
        self.blocks = {side: ratings.block(ranks, self.layout, side, streamed) for side in SIDES}
        self._checksum: Checksum | None = None
        self._squares: float | None = None
        if isinstance(ratings, StoredRatings) and streamed:
            self.total, self.value_range = ratings.total, ratings.value_range
        else:
            rows = self._own_users().load().csr  # each entry once, in the order of the whole matrix
            items = np.bincount(rows.indices, minlength=self.shape[1]).astype(np.int64)
            counts = self.layout.counts("user", range(ranks.size))
            users = ranks.allgatherv(np.diff(rows.indptr).astype(np.int64), counts)
            self.degrees = {"user": users, "item": ranks.allreduce(items)}
            own = ValueSummary.of([rows.data])
            self.total = float(ranks.allreduce(np.array([own.total]))[0])
            extremes = ranks.allgatherv(np.array([own.value_range or (np.inf, -np.inf)]), [1] * ranks.size)
            low, high = float(extremes[:, 0].min()), float(extremes[:, 1].max())
            self.value_range = (low, high) if low <= high else None
            self._checksum, self._squares = checksum_of(rows), own.squares
        self.nnz = int(self.degrees["user"].sum())

    def _own_users(self) -> Orientation:
        """Complete rows of the users that this rank owns; one slab in memory, unless they are streamed."""
        if self.layout.grids["user"].splits == 1:
            return self.blocks["user"]
        alone = RankLayout(self.layout.bounds, dict.fromkeys(SIDES, Grid(1, self.communicator.size)))
        return self.ratings.block(self.communicator, alone, "user", self._streamed)

    def _scale(self, objective: Objective) -> float:
        """Scale that standardizes all ratings; streamed ratings are read for it."""
        if objective.is_implicit:
            return 1.0
        if self._squares is None:
            self._squares = ValueSummary.of(rows.data for rows in self._own_users().matrices()).squares
        squares = float(self.communicator.allreduce(np.array([self._squares]))[0])
        return rating_scale(self.total, squares, self.nnz, objective.biases)

    def fingerprint(self) -> str:
        """`hybridmf.data.fingerprint` of all ratings, and of features; streamed ratings are read for it."""
        if self._checksum is None:
            users = self._own_users()
            self._checksum = join_checksums(map(checksum_of, users.matrices()), users.dtype.itemsize)
        ranks, own = self.communicator, np.array([self._checksum], dtype=np.int64)
        checksums = ranks.allgatherv(own, [1] * ranks.size).tolist()
        indptr = np.concatenate(([0], np.cumsum(self.degrees["user"])))
        found = join_fingerprints(indptr, checksums, self.shape)
        return "-".join((found, *described_by(self.model, self.features)))

    # ------------------------------------------------------------------------------------------------ solver

    def shared(self, state: State | None, plan: Plan, objective: Objective) -> State:
        """The state of the first rank, on all ranks."""
        dtype, sides = np.dtype(plan.dtype), []
        for side, n in zip(SIDES, self.shape, strict=True):
            blank = Factors(np.zeros((n, plan.factors), dtype), np.zeros(n, dtype))
            factors = blank if state is None else state.side(side)
            matrix, bias = self.communicator.broadcast(factors.matrix), None
            if objective.biases:
                bias = self.communicator.broadcast(np.zeros(n, dtype) if factors.bias is None else factors.bias)
            sides.append(Factors(matrix, bias))
        mean = np.array([0.0 if state is None else state.mean])
        return State(sides[0], sides[1], float(self.communicator.broadcast(mean)[0]))

    def solver(self, plan: Plan, objective: Objective, state: State, completed: int) -> RankALS:
        own = State(self._own("user", state), self._own("item", state), state.mean)
        self.arrays, worker = _worker(plan, self.device, self.communicator)
        with aborting(self.arrays):
            features = side_features(self.model, self.features)
            return RankALS(self.arrays, self.layout, self.blocks, objective, plan, own, worker, features=features)

    @contextmanager
    def closing(self, solver: RankALS) -> Iterator[None]:
        """Context of the solver, which ends its worker and the connections between devices."""
        try:
            with aborting(self.arrays):
                yield
        except BaseException:
            solver.stop()
            raise
        else:
            solver.close()
        finally:
            if self.arrays is not self.communicator:
                self.arrays.close()

    def _own(self, side: Side, state: State) -> Factors:
        """The rows owned by this rank: not drawn yet, or copies, so that the rest of the state can be freed."""
        own = state.side(side).part(slice(*self.layout.own(side, self.communicator.rank)))
        if isinstance(own, DrawnFactors):
            return own
        return Factors(own.matrix.copy(), None if own.bias is None else own.bias.copy())

    def gathered(self, solver: RankALS) -> State | None:
        """The factors of all rows on the first rank, from their owners; None on the others."""
        with solver.worker.active():
            vectors = solver.vectors()
            own = {side: solver.completed(side, vectors.get(side)).on_host() for side in SIDES}
        users, items = (self._gathered(side, own[side]) for side in SIDES)
        return None if users is None or items is None else State(users, items, solver.mean, vectors)

    def _gathered(self, side: Side, own: Factors) -> Factors | None:
        counts = self.layout.counts(side, range(self.communicator.size))
        matrix, bias = gather(self.communicator, np.ascontiguousarray(own.matrix), counts), own.bias
        bias = None if bias is None else gather(self.communicator, np.ascontiguousarray(bias), counts)
        return None if matrix is None else Factors(matrix, bias)

    # ------------------------------------------------------------------------------------------------ the model

    def seen_by(self, held_out: sp.csr_array | None, objective: Objective) -> sp.csr_array | None:
        """Training entries of the users of the validation set, on the first rank, if the model lacks them.

        A store is read for them only where the metric needs them.
        """
        here = self.ratings.matrix
        needed = held_out is not None and (here is None or (objective.is_implicit and isinstance(here, StoreMatrix)))
        if not agreed(self.communicator, needed):
            return None
        wanted = np.zeros(self.shape[0], dtype=np.int64)
        if held_out is not None:
            wanted[:] = np.diff(held_out.indptr) > 0
        return self.rows_of_users(self.communicator.broadcast(wanted).astype(bool))

    def rows_of_users(self, wanted: np.ndarray) -> sp.csr_array | None:
        """Entries of the users of a mask on the first rank, each int8 1, and no others; None on the other ranks."""
        found, at = [np.empty(0, dtype=np.int32)], self.layout.own("user", self.communicator.rank)[0]
        for rows in self._own_users().matrices():
            here = wanted[at : at + rows.shape[0]]
            found.append(rows.indices[np.repeat(here, np.diff(rows.indptr))])
            at += rows.shape[0]
        indptr = np.concatenate(([0], np.cumsum(np.where(wanted, self.degrees["user"], 0))))
        counts = np.diff(indptr[self.layout.bounds["user"]]).tolist()
        indices = gather(self.communicator, np.concatenate(found), counts)
        if indices is None:
            return None
        return make_csr(indptr, indices, np.ones(len(indices), dtype=np.int8), self.shape)

    def kept(self) -> dict[str, Any]:
        """What the model of the first rank keeps of the entries: all of them if this rank has all."""
        here = self.ratings.matrix
        values = None if here is None or isinstance(here, StoreMatrix) or self.unit is not None else here.data
        return {"seen": None if here is None else pattern(here), "values": values, "item_likes": self._item_likes}


def _worker(plan: Plan, device: str, communicator: Communicator) -> tuple[Communicator, Worker]:
    """Communicator for arrays and worker on the device; all ranks call it together."""
    if plan.gpu is None:
        return communicator, CpuWorker(plan.num_threads)
    from ..ranks.gpu_rank import gpu_worker

    return gpu_worker((device,) * communicator.size, communicator)
