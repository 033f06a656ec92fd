"""One fit by many processes: each rank runs this with its share of the ratings (cuMF 4.2 over nodes).

What a fit on several devices of one process does by threads (`multi_als`) is here a program for each rank: whoever
starts the ranks (a batch system, Dask) gives each a communicator.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from ..core.objective import SIDES, Factors, Objective, Side, State, initial_state
from ..core.validate import check_int, check_rng
from ..errors import CommunicatorError, RatingsError
from ..model import checkpoint as checkpoints
from ..model import files as _io
from ..model.base import FactorModel, check_labels, log_empty_rows
from ..model.learned import Learned
from ..plan.make import check_memory, make_plan
from ..plan.memory import rank_bytes
from ..plan.types import Facts, Plan
from ..ranks.cpu_rank import CpuWorker
from ..ranks.shares import Cut, RankRatings
from ..ranks.su_als import RankALS, Worker
from ..ranks.transport.communicator import Communicator

logger = logging.getLogger("hybridmf")

Record = dict[str, float]


def fit_rank(
    model: Any,
    ratings: RankRatings,
    communicator: Communicator,
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    checkpoint: Any = None,
    resume_from: str | os.PathLike[str] | None = None,
    track_objective: bool = False,
    on_iteration: Callable[[Record], Any] | None = None,
) -> Any:
    """Fit a model together with the other ranks; all call it with equal arguments.

    Parameters
    ----------
    model : ImplicitALS or ExplicitALS
        Unfitted, with the same parameters on all ranks; its `device` is not looked at.
    ratings : RankRatings
        What this rank has of them.
    communicator : Communicator
        For NumPy arrays.
    device : {"cpu", "cuda:N"}
        Where this rank computes.
    num_threads : int, optional
        Of this rank. Default: what the model says, each rank.
    checkpoint : path-like or Checkpoint, optional
        The first rank writes there.
    resume_from : path-like, optional
        Read by the first rank.
    track_objective : bool
        Put the objective of each iteration into ``history_``.
    on_iteration : callable, optional
        Called on the first rank with each iteration's record.

    Returns
    -------
    model or None
        The fitted model on the first rank; None on the others.

    Raises
    ------
    Exception
        What went wrong on this rank, unchanged.
    DeviceMemoryError, MemoryBudgetError
        Before any work, on a rank that has no room for its part.
    CommunicatorError
        Something went wrong on another; the message has it.
    """
    try:
        with _Fit(model, ratings, communicator, device, num_threads, checkpoint, resume_from) as run:
            run.iterate(track_objective, on_iteration)
            return run.finish()
    except BaseException as error:
        communicator.abort(f"rank {communicator.rank} failed: {type(error).__name__}: {error}")
        raise


def check_model(model: Any) -> None:
    """Refuse what is no estimator before ranks are started for it.

    Raises
    ------
    TypeError
    """
    if not isinstance(model, FactorModel):
        hint = f"; make one: {model.__name__}()" if isinstance(model, type) else ""
        raise TypeError(f"model must be an estimator such as ImplicitALS(factors=64), got {model!r}{hint}")


class _Fit:
    """One rank's part of a fit."""

    def __init__(
        self,
        model: Any,
        ratings: RankRatings,
        communicator: Communicator,
        device: str,
        num_threads: int | None,
        checkpoint: Any,
        resume_from: Any,
    ) -> None:
        self.model, self.ratings, self.communicator = model, ratings, communicator
        self.first = communicator.rank == 0
        self.objective: Objective = model._objective()
        self.iterations = check_int("iterations", model.iterations, 1)
        check_labels((ratings.user_ids, ratings.item_ids))
        degrees = ratings.degrees(communicator)
        self.plan = self._plan(device, num_threads, degrees)
        streamed = bool(self.plan.streamed)
        self.cut = Cut(communicator, ratings, degrees, self.plan.grids, self.plan.row_cost, streamed)
        self.plan = replace(self.plan, nnz=self.cut.nnz)
        if not self.cut.nnz:
            raise RatingsError("the ratings have no entries: there is nothing to fit")
        self.scale = self.cut.scale(communicator, self.objective)
        self.objective = model._objective(self.scale)
        self.history: list[Record] = []
        self.writer: checkpoints.Writer | None = None
        state = self._start(checkpoint, resume_from)
        if self.first:
            logger.info("plan:\n%s", self.plan)
            log_empty_rows(self.cut.degrees["user"], self.cut.degrees["item"])
        users, items = (_rows(state.side(side), *self.cut.layout.own(side, communicator.rank)) for side in SIDES)
        own = State(users, items, state.mean)
        self.moves, worker = _worker(self.plan, device, communicator)
        self.solver = RankALS(self.moves, self.cut.layout, self.cut.blocks, self.objective, self.plan, own, worker)

    def __enter__(self) -> _Fit:
        if self.writer is not None:
            self.writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.writer is not None:
                self.writer.__exit__(kind, error, trace)
        finally:
            if kind is None:
                self.solver.close()
            else:
                self.moves.abort(f"rank {self.communicator.rank} failed: {kind.__name__}: {error}")
            if self.moves is not self.communicator:
                self.moves.close()

    # ------------------------------------------------------------------------------------------------ set-up

    def _plan(self, device: str, num_threads: int | None, degrees: Mapping[Side, np.ndarray]) -> Plan:
        """The plan of this rank, alike on all: what depends on a machine is agreed on."""
        size, settings = self.communicator.size, self.model._settings()
        if settings.method is not None:
            raise ValueError(
                f"model: {type(self.model).__name__} is not served by ranks; fit ImplicitALS or ExplicitALS"
            )
        ranks = replace(settings, device=(device,) * size)
        facts, nnz = Facts.of_degrees(degrees["user"], degrees["item"]), int(degrees["user"].sum())
        mapped = self.ratings.slab if device == "cpu" else None
        plan = make_plan(self.objective, ranks, self.ratings.shape, nnz, facts, mapped)
        if plan.streamed and self.ratings.slab is not None:  # what GPUs have no room for need not be on the host either
            plan = make_plan(self.objective, ranks, self.ratings.shape, nnz, facts, self.ratings.slab)
        if plan.reorder != "none":
            if settings.reorder not in ("auto", "none"):
                raise ValueError(f"reorder={settings.reorder!r} is not served by ranks; use reorder='none'")
            plan = replace(plan, reorder="none")
        threads = plan.num_threads if num_threads is None else num_threads
        plan = replace(plan, devices=(device,) * size if size > 1 else (), num_threads=threads)
        if plan.gpu is None:
            plan = replace(plan, bytes=rank_bytes(plan, size))
        check_memory(plan)
        splits = [plan.grids[side].splits for side in SIDES]
        self._agree(splits, "grids of {} splits")
        batches = [0] * len(SIDES)
        if plan.scale is not None and plan.streamed and not plan.resident:
            batches = [plan.scale.slab(side) if plan.grids[side].splits > 1 else 0 for side in SIDES]
        self._agree(batches, "batches of {} entries")
        slots = self.communicator.allgatherv(np.array([plan.batch_slots], dtype=np.int64), [1] * size)
        return replace(plan, batch_slots=int(slots.min()))

    def _agree(self, sizes: list[int], what: str) -> None:
        """Refuse to go on where this rank plans otherwise than the first one."""
        first = self.communicator.broadcast(np.array(sizes, dtype=np.int64)).tolist()
        if sizes != first:
            raise CommunicatorError(
                f"rank {self.communicator.rank} plans {what.format(sizes)} and rank 0 of {first}: "
                "their GPUs, or their hosts, have different memory free; set gpu_memory_limit to what the least has"
            )

    def _start(self, checkpoint: Any, resume_from: Any) -> State:
        """Where to start: initial factors, or those of the checkpoint that the first rank reads."""
        communicator = self.communicator
        data = self.cut.fingerprint(communicator) if checkpoint is not None or resume_from is not None else ""
        resumed = None
        if self.first and checkpoint is not None:
            where = checkpoints.prepare(checkpoint, resume_from)
        if self.first and resume_from is not None:
            resumed = checkpoints.read(resume_from, self.model, data)
            self.history = list(resumed.summary["history"])
        completed = np.array([int(resumed.summary["n_iter"]) if resumed else 0], dtype=np.int64)
        self.completed = int(communicator.broadcast(completed)[0])
        if self.first and checkpoint is not None:
            self.writer = checkpoints.Writer(where, {"data": data, "seed_bits": None}, self.completed)
        if resume_from is None:
            return self._initial_state()
        return self._broadcast_state(resumed.state if resumed else None)

    def _initial_state(self) -> State:
        """The factors that a fit in one process starts from; all ranks draw the same."""
        seed = self.model.random_state
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
            drawn = check_rng(seed).integers(np.iinfo(np.int64).max) if self.first else 0
            seed = int(self.communicator.broadcast(np.array([drawn], dtype=np.int64))[0])
        return initial_state(
            self.cut.degrees["user"],
            self.cut.degrees["item"],
            self.plan.factors,
            np.dtype(self.plan.dtype).type,
            self.objective,
            self.cut.total / self.cut.nnz,
            check_rng(seed),
            self.model._first_length(self.objective, self.scale),
        )

    def _broadcast_state(self, state: State | None) -> State:
        dtype, sides = np.dtype(self.plan.dtype), []
        for side in SIDES:
            n = len(self.cut.degrees[side])
            blank = Factors(np.zeros((n, self.plan.factors), dtype), np.zeros(n, dtype))
            factors = blank if state is None else state.side(side)
            matrix = self.communicator.broadcast(factors.matrix)
            bias = None
            if self.objective.biases:
                bias = self.communicator.broadcast(factors.bias if factors.bias is not None else np.zeros(n, dtype))
            sides.append(Factors(matrix, bias))
        mean = np.array([0.0 if state is None else state.mean])
        return State(sides[0], sides[1], float(self.communicator.broadcast(mean)[0]))

    # ------------------------------------------------------------------------------------------------ iterations

    def iterate(self, track_objective: bool, on_iteration: Callable[[Record], Any] | None) -> None:
        """The iterations that are left."""
        for iteration in range(self.completed + 1, self.iterations + 1):
            started = time.perf_counter()
            for _ in self.solver.sweep():
                pass
            self.moves.barrier()  # an iteration counts once it is complete on all ranks
            self.completed = iteration
            record: Record = {"iteration": iteration, "seconds": time.perf_counter() - started}
            if track_objective:
                record["objective"] = self.solver.objective_value()
            self.history.append(record)
            if self.first and on_iteration is not None:
                on_iteration(record)
            self._save_if_due()

    def _save_if_due(self) -> None:
        due = self.writer is not None and self.writer.due(self.completed)
        if int(self.communicator.broadcast(np.array([due], dtype=np.int64))[0]):
            state = self._gather()
            if self.writer is not None and state is not None:
                self._adopt(state)
                self.writer.offer(self.model)

    def finish(self) -> Any:
        """The model on the first rank, None on the others."""
        state = self._gather()
        if state is None:
            return None
        self._adopt(state)
        if self.writer is not None:
            self.writer.finish(self.model)
        return self.model

    def _gather(self) -> State | None:
        """All factors, on the first rank."""
        sides = [self._gather_side(side) for side in SIDES]
        if sides[0] is None or sides[1] is None:
            return None
        return State(sides[0], sides[1], self.solver.mean)

    def _gather_side(self, side: Side) -> Factors | None:
        own = self.solver.own[side].on_host()
        counts = self.cut.layout.counts(side, range(self.communicator.size))
        matrix = gather(self.communicator, np.ascontiguousarray(own.matrix), counts)
        bias = None if own.bias is None else gather(self.communicator, np.ascontiguousarray(own.bias), counts)
        return None if matrix is None else Factors(matrix, bias)

    def _adopt(self, state: State) -> None:
        model, ratings = self.model, self.ratings
        labels = (ratings.user_ids, ratings.item_ids)
        params = _io.jsonable(model.get_params(deep=False))
        counts = self.cut.degrees["item"].astype(np.int64)
        values = None if self.objective.is_implicit else self.cut.value_range
        learned = Learned(self.objective, self.plan, state, None, self.cut.total, *labels, params, counts, values)
        model._learn(learned)
        model.n_iter_, model.history_ = self.completed, self.history
        model.n_features_in_ = ratings.shape[1]


def gather(communicator: Communicator, array: np.ndarray, counts: list[int]) -> np.ndarray | None:
    """All ranks' rows one after the other, on the first rank; None on the others."""
    nothing = np.empty(0, dtype=array.dtype)
    if communicator.rank:
        communicator.sendrecv(array, 0, 0, nothing)
        return None
    parts = [array]
    for rank in range(1, communicator.size):
        like = np.empty((counts[rank], *array.shape[1:]), dtype=array.dtype)
        parts.append(communicator.sendrecv(nothing, rank, rank, like))
    return np.concatenate(parts)


def _rows(factors: Factors, first: int, last: int) -> Factors:
    bias = None if factors.bias is None else factors.bias[first:last].copy()
    return Factors(factors.matrix[first:last].copy(), bias)


def _worker(plan: Plan, device: str, communicator: Communicator) -> tuple[Communicator, Worker]:
    """What moves arrays and where they are computed with; all ranks call it together."""
    if plan.gpu is None:

        def check() -> None:
            cause = getattr(communicator, "cause", "")
            if cause:
                raise CommunicatorError(cause)

        return communicator, CpuWorker(check)
    from ..ranks.gpu_rank import gpu_worker

    return gpu_worker((device,) * communicator.size, communicator)
