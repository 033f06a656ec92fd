"""One fit by several processes: each rank runs `fit_rank` with its share of the ratings (cuMF 4.2 over nodes).

It corresponds to a fit on several devices of one process by threads (`multi_als`). The launcher of the ranks (a batch
system, Dask) provides a communicator for each.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Objective, Side, State
from ..core.validate import seed_of
from ..errors import CommunicatorError, RatingsError
from ..model import checkpoint as checkpoints
from ..model import files as _io
from ..model.base import (
    FactorModel,
    check_frozen,
    check_labels,
    check_preferences,
    data_identity,
    fit_settings,
    log_empty_rows,
)
from ..model.learned import Learned
from ..model.loop import FitLoop, Observers, Progress, Record, check_validation
from ..model.stopwatch import Stopwatch
from ..model.weights import in_units
from ..plan.grid import RankLayout
from ..plan.make import check_memory, make_plan
from ..plan.memory import rank_bytes
from ..plan.start import DrawnFactors
from ..plan.types import DegreeFacts, Plan
from ..ranks.cpu_rank import CpuWorker
from ..ranks.shares import RankBlocks, RankRatings
from ..ranks.su_als import RankALS, Worker
from ..ranks.transport.communicator import Communicator, gather

logger = logging.getLogger("hybridmf")


class RankOptions(NamedTuple):
    """Set-up of a rank's part of a fit.

    Attributes
    ----------
    device : {"cpu", "cuda:N"}
        Device of this rank.
    num_threads : int, optional
        Threads of this rank. Default: the parameter of the model.
    validation, checkpoint, resume_from, unknown
        As for ``fit`` of a model. Only those of the first rank are used.
    freeze : {"user", "item"}, optional
        As for ``fit`` of a model.
    """

    device: str = "cpu"
    num_threads: int | None = None
    validation: Any = None
    checkpoint: Any = None
    resume_from: str | os.PathLike[str] | None = None
    unknown: str = "error"
    freeze: Side | None = None


def fit_rank(
    model: Any,
    ratings: RankRatings,
    communicator: Communicator,
    options: RankOptions | None = None,
    observers: Observers | None = None,
    stopwatch: Stopwatch | None = None,
) -> Any:
    """Fit a model together with the other ranks; all ranks call it with the same arguments.

    Parameters
    ----------
    model : ImplicitALS or ExplicitALS
        Unfitted, with the same parameters on all ranks; its `device` is ignored.
    ratings : RankRatings
        The ratings of this rank.
    communicator : Communicator
        Communicator for NumPy arrays.
    options : RankOptions, optional
    observers : Observers, optional
        Callback, progress bar and recorded objective; only those of the first rank are used.
    stopwatch : Stopwatch, optional
        A running stopwatch, if the fit has an earlier part.

    Returns
    -------
    model or None
        The fitted model on the first rank; None on the others.

    Raises
    ------
    Exception
        An error on this rank, unchanged.
    DeviceMemoryError, MemoryBudgetError
        The part of this rank does not fit in memory; raised before any work.
    CommunicatorError
        Another rank has failed; the message names the cause.
    """
    stopwatch = Stopwatch() if stopwatch is None else stopwatch
    first = communicator.rank == 0
    try:
        options = options or RankOptions()
        if not first:
            observers, options = None, options._replace(validation=None)
        fit = _RankFit(model, ratings, communicator, observers or Observers(), stopwatch, options)
        with fit:
            fit.run()
    except BaseException as error:
        communicator.abort(f"rank {communicator.rank} failed: {type(error).__name__}: {error}")
        raise
    if not first:
        return None
    stopwatch.lap("finish")
    model.timings_ = stopwatch.seconds
    return model


def check_model(model: Any) -> None:
    """Reject objects other than estimators before ranks are started.

    Raises
    ------
    TypeError
    """
    if not isinstance(model, FactorModel):
        hint = f"; make one: {model.__name__}()" if isinstance(model, type) else ""
        raise TypeError(f"model must be an estimator such as ImplicitALS(factors=64), got {model!r}{hint}")


class _Together:
    """`Ranks` of a fit by several processes, for `FitLoop`."""

    alone = False

    def __init__(self, communicator: Communicator, layout: RankLayout) -> None:
        self.communicator, self.layout = communicator, layout
        self.first = communicator.rank == 0

    def agreed(self, answer: bool) -> bool:
        """The answer of the first rank."""
        return bool(self.communicator.broadcast(np.array([answer], dtype=np.int64))[0])

    def gather(self, solver: RankALS) -> State | None:
        """Gather all factors on the first rank from their owners."""
        users, items = (self._gather_side(side, solver.own[side].on_host()) for side in SIDES)
        return None if users is None or items is None else State(users, items, solver.mean)

    def _gather_side(self, side: Side, own: Factors) -> Factors | None:
        counts = self.layout.counts(side, range(self.communicator.size))
        matrix = gather(self.communicator, np.ascontiguousarray(own.matrix), counts)
        bias = None if own.bias is None else gather(self.communicator, np.ascontiguousarray(own.bias), counts)
        return None if matrix is None else Factors(matrix, bias)


class _RankFit:
    """One rank's part of a fit."""

    def __init__(
        self,
        model: Any,
        ratings: RankRatings,
        communicator: Communicator,
        observers: Observers,
        stopwatch: Stopwatch,
        options: RankOptions,
    ) -> None:
        self.model, self.ratings, self.communicator = model, ratings, communicator
        self.first = communicator.rank == 0
        self.objective: Objective = model._objective()
        self.settings, self.iterations = fit_settings(model, options.freeze)
        labels = (ratings.user_ids, ratings.item_ids)
        check_labels(labels)
        self.init = model._init(ratings.shape, labels, self.settings.frozen)
        held_out = check_validation(options.validation, labels, ratings.shape, self.objective, options.unknown)
        degrees = ratings.degrees(communicator)
        stopwatch.lap("check")
        self.plan = self._plan(options, degrees)
        stopwatch.lap("plan")
        streamed = bool(self.plan.streamed)
        self.cut = RankBlocks(communicator, ratings, degrees, self.plan.grids, self.plan.row_cost, streamed)
        self.plan = self.plan.changed(nnz=self.cut.nnz)
        if not self.cut.nnz:
            raise RatingsError("the ratings have no entries: there is nothing to fit")
        check_preferences(self.objective, self.cut.value_range)
        self.scale = self.cut.scale(communicator, self.objective)
        spread = self.cut.scale(communicator, replace(self.objective, biases=True))
        self.item_likes = self.cut.item_likes(communicator, ratings)
        self.objective = model._objective(spread, self.cut.degrees).for_shape(ratings.shape)
        stopwatch.lap("convert")
        self.history: list[Record] = []
        self.writer: checkpoints.Writer | None = None
        state = self._start(options.checkpoint, options.resume_from)
        if self.first:
            logger.info("plan:\n%s", self.plan)
            log_empty_rows(self.cut.degrees["user"], self.cut.degrees["item"])
        own = State(self._own("user", state), self._own("item", state), state.mean)
        self.moves, worker = _worker(self.plan, options.device, communicator)
        solved = self.objective if ratings.unit is None else in_units(self.objective, ratings.unit)
        self.solver = RankALS(self.moves, self.cut.layout, self.cut.blocks, solved, self.plan, own, worker)
        self.ranks = _Together(communicator, self.cut.layout)
        self.observers = replace(observers, validation=held_out, unit=ratings.unit or 1.0, seen=self._seen(held_out))
        stopwatch.lap("set up")
        self.stopwatch = stopwatch

    def __enter__(self) -> _RankFit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.solver.close()
        else:
            self.moves.abort(f"rank {self.communicator.rank} failed: {kind.__name__}: {error}")
            self.solver.stop()
        if self.moves is not self.communicator:
            self.moves.close()

    def run(self) -> None:
        """Run the remaining iterations."""
        columns = np.broadcast_to(np.float32(0), self.ratings.shape)
        FitLoop(
            self.model,
            self.solver,
            self._learner(),
            columns,
            self.observers,
            self.stopwatch,
            Progress(self.completed, self.history, self.writer),
            self.ranks,
        ).run(self.iterations)

    # ------------------------------------------------------------------------------------------------ set-up

    def _plan(self, options: RankOptions, degrees: Mapping[Side, np.ndarray]) -> Plan:
        """The plan of this rank, equal on all ranks: they agree on choices that depend on a machine."""
        size, device, settings = self.communicator.size, options.device, self.settings
        if settings.method is not None:
            raise ValueError(
                f"model: {type(self.model).__name__} is not served by ranks; fit ImplicitALS or ExplicitALS"
            )
        ranks = replace(settings, device=(device,) * size)
        facts, nnz = DegreeFacts.of_degrees(degrees["user"], degrees["item"]), int(degrees["user"].sum())
        mapped = self.ratings.slab if device == "cpu" else None
        plan = make_plan(self.objective, ranks, self.ratings.shape, nnz, facts, mapped)
        if plan.streamed and self.ratings.slab is not None:  # data that exceed the GPUs need not be on the host either
            plan = make_plan(self.objective, ranks, self.ratings.shape, nnz, facts, self.ratings.slab)
        if plan.reorder != "none":
            if settings.reorder not in ("auto", "none"):
                raise ValueError(f"reorder={settings.reorder!r} is not served by ranks; use reorder='none'")
            plan = plan.changed(reorder="none")
        threads = plan.num_threads if options.num_threads is None else options.num_threads
        plan = plan.changed(devices=(device,) * size if size > 1 else (), num_threads=threads)
        if plan.gpu is None:
            plan = plan.changed(bytes=rank_bytes(plan, size))
        check_memory(plan)
        splits = [plan.grids[side].splits for side in SIDES]
        self._agree(splits, "grids of {} splits")
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

    def _start(self, checkpoint: Any, resume_from: Any) -> State:
        """Initial state: drawn factors, or those of the checkpoint read by the first rank."""
        communicator = self.communicator
        data = ""
        if checkpoint is not None or resume_from is not None:
            data = data_identity(self.cut.fingerprint(communicator), self.ratings.unit)
        resumed = None
        if self.first and checkpoint is not None:
            where = checkpoints.prepare(checkpoint, resume_from)
        if self.first and resume_from is not None:
            resumed = checkpoints.read(resume_from, self.model, data)
            check_frozen(resumed.state, self.init, self.settings.frozen)
            self.history = list(resumed.summary["history"])
        completed = np.array([int(resumed.summary["n_iter"]) if resumed else 0], dtype=np.int64)
        self.completed = int(communicator.broadcast(completed)[0])
        if self.first and checkpoint is not None:
            self.writer = checkpoints.Writer(where, {"data": data, "seed_bits": None}, self.completed)
        if resume_from is None:
            return self._initial_state()
        return self._broadcast_state(resumed.state if resumed else None)

    def _initial_state(self) -> State:
        """Initial factors, the same as in a fit by one process; each rank draws its own rows."""
        seed = np.array([seed_of(self.model.random_state) if self.first else 0], dtype=np.int64)
        return self.model._first_state(
            self.cut.degrees,
            self.plan,
            self.objective,
            self.cut.total / self.cut.nnz,
            self.scale,
            int(self.communicator.broadcast(seed)[0]),
            self.init,
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

    def _own(self, side: Side, state: State) -> Factors:
        """The rows owned by this rank: not drawn yet, or copies, so that the rest of the state can be freed."""
        own = state.side(side).part(slice(*self.cut.layout.own(side, self.communicator.rank)))
        if isinstance(own, DrawnFactors):
            return own
        return Factors(own.matrix.copy(), None if own.bias is None else own.bias.copy())

    def _seen(self, held_out: sp.csr_array | None) -> sp.csr_array | None:
        """Training entries of the users evaluated after each iteration, on the first rank."""
        if not self.ranks.agreed(held_out is not None and self.objective.is_implicit):
            return None
        wanted = np.zeros(self.ratings.shape[0], dtype=np.int64)
        if held_out is not None:
            wanted[:] = np.diff(held_out.indptr) > 0
        wanted = self.communicator.broadcast(wanted)
        return self.cut.rows_of_users(self.communicator, self.ratings, wanted.astype(bool))

    def _learner(self) -> Callable[[State], Learned]:
        """Function from a state to `Learned`."""
        return partial(
            Learned,
            self.objective,
            self.plan,
            seen=None,
            total=self.cut.total if self.ratings.unit is None else self.ratings.total,
            user_ids=self.ratings.user_ids,
            item_ids=self.ratings.item_ids,
            params=_io.jsonable(self.model.get_params(deep=False)),
            item_counts=self.cut.degrees["item"].astype(np.int64),
            value_range=None if self.objective.is_implicit else self.cut.value_range,
            item_likes=self.item_likes,
        )


def _worker(plan: Plan, device: str, communicator: Communicator) -> tuple[Communicator, Worker]:
    """Communicator for arrays and worker on the device; all ranks call it together."""
    if plan.gpu is None:

        def check() -> None:
            if communicator.cause:
                raise CommunicatorError(communicator.cause)

        return communicator, CpuWorker(plan.num_threads, check)
    from ..ranks.gpu_rank import gpu_worker

    return gpu_worker((device,) * communicator.size, communicator)
