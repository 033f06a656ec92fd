"""The iterations of a fit and the work after each of them: one loop for local and for distributed fits.

A fit in one process runs one `FitLoop`, for all devices of its solver. In a fit by several processes each rank runs
one; `Ranks` is the interface to the other ranks. Only the first rank has the model, the observers and the checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, State
from ..core.progress import progress_bar
from ..core.sparse import entry_rows
from ..core.validate import as_csr, check_bool, check_choice, check_nonempty, check_shape
from ..data.align import UNKNOWN, Labels, align, labels_of
from ..device.health import hurry
from ..errors import DeviceError, DeviceLostError, RatingsError
from ..metrics import _measure, _warn_of_overlap
from ..plan.solver import Solver
from . import checkpoint as checkpoints
from .early_stopping import EarlyStopping, Watch
from .estimator import take_columns
from .exactness import finished_users
from .learned import Learned
from .popularity import popularity_of
from .stopwatch import Stopwatch

logger = logging.getLogger("hybridmf")

AS_BEFORE = "The model is as it was before the fit"

COMPARED_USERS = 4000
"""Most users by whom a fitted model is compared with popularity; all would take longer than a short fit on a GPU."""

Record: TypeAlias = dict[str, float]
"""One iteration of ``history_``."""

Callback: TypeAlias = Callable[[Any, Record], Any]


class Ranks(Protocol):
    """Interface of one process to the other processes of a fit; its methods are collective."""

    first: bool
    """Whether this process has the model, its observers and its checkpoints."""

    alone: bool
    """Whether it is the only process: it updates the model after every half sweep, so the model is always usable."""

    def agreed(self, answer: bool) -> bool:
        """The answer of the first rank, on all ranks."""

    def gather(self, solver: Any) -> State | None:
        """The factors of all rows on the first rank; None on the others."""


class OneProcess:
    """`Ranks` of a fit in one process."""

    first = alone = True

    def agreed(self, answer: bool) -> bool:
        """The answer."""
        return answer

    def gather(self, solver: Solver) -> State:
        """The state of the solver."""
        return solver.state


@dataclass(frozen=True)
class Observers:
    """Evaluations and callbacks after each iteration.

    Attributes
    ----------
    validation : csr_array, shape (n_users, n_items), or None
        Held-out entries, in the positions of the training data.
    seen : csr_array, shape (n_users, n_items), or None
        Training entries of the users of `validation`, if the model does not have them.
    callback : callable or None
    show_progress : bool
    track_objective : bool
        Compute the objective even without observers.
    early_stopping : EarlyStopping or None
        Needs `validation`.
    unit : float
        Factor of the solver's objective in records.

    Raises
    ------
    TypeError
    """

    validation: sp.csr_array | None = None
    seen: sp.csr_array | None = None
    callback: Callback | None = None
    show_progress: bool = False
    track_objective: bool = False
    early_stopping: EarlyStopping | None = None
    unit: float = 1.0

    def __post_init__(self) -> None:
        check_bool("show_progress", self.show_progress)
        check_bool("track_objective", self.track_objective)
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback must be callable, got {type(self.callback).__name__}")

    @property
    def need_model(self) -> bool:
        """Whether observers use the model after each iteration."""
        return self.validation is not None or self.callback is not None

    @property
    def need_objective(self) -> bool:
        """Whether records contain the objective."""
        return self.track_objective or self.show_progress or self.need_model


@dataclass(frozen=True)
class Progress:
    """Completed part of a fit that continues, and where it is saved.

    Attributes
    ----------
    completed : int
        Iterations of the checkpoint that the fit resumes from.
    history : list of dict
        Records of these iterations.
    writer : Writer or None
        Writer of checkpoints, on the first rank.
    """

    completed: int = 0
    history: list[Record] = field(default_factory=list)
    writer: checkpoints.Writer | None = None


class FitLoop:
    """One fit in progress.

    Parameters
    ----------
    model : FactorModel
    solver : Solver
    learn : callable
        Function from a state to `Learned`.
    columns : array or data frame
        Object that scikit-learn reads the number and names of features from.
    observers : Observers
        Only those of the first rank are used.
    stopwatch : Stopwatch
    progress : Progress
    ranks : Ranks, optional
        Default: one process.
    """

    def __init__(
        self,
        model: Any,
        solver: Solver,
        learn: Callable[[State], Learned],
        columns: Any,
        observers: Observers,
        stopwatch: Stopwatch,
        progress: Progress,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.solver, self.learn, self.columns = model, solver, learn, columns
        self.observers, self.stopwatch = observers, stopwatch
        self.completed, self.history, self.writer = progress.completed, progress.history, progress.writer
        self.ranks: Ranks = OneProcess() if ranks is None else ranks
        self.learned: Learned | None = None
        rule = observers.early_stopping
        self.watch = None if rule is None else Watch(rule)
        # whether the model lacks the current factors, and whether these are of an incomplete iteration; as on all ranks
        self.stale, self.partial = self.completed > 0, False
        self.work = ""  # of the solver, for messages
        agreed = self.ranks.agreed
        self.needs_model, self.needs_objective = agreed(observers.need_model), agreed(observers.need_objective)
        self.saves, self.calls_back = agreed(self.writer is not None), agreed(observers.callback is not None)

    def run(self, iterations: int) -> None:
        """Iterate until `iterations` are complete or the callback stops the fit."""
        name, shown = type(self.model).__name__, self.observers.show_progress
        bar = progress_bar(iterations, shown, initial=self.completed, desc=name)
        with checkpoints.writing(self.writer):
            try:
                for iteration in range(self.completed + 1, iterations + 1):
                    self.stopwatch.lap("observe")
                    self.work = f"iteration {iteration}"
                    for _ in self.solver.sweep():
                        self.stale = self.partial = True
                    self.completed, self.partial = iteration, False
                    self.work = f"the evaluation of iteration {iteration}"
                    record: Record = {"iteration": iteration, "seconds": self.stopwatch.lap("iterations")}
                    self.history.append(record)
                    self._observe(record, bar)
                    if self._asked_to_stop(record):
                        break
            except BaseException as error:
                self._end(bar)
                self._rescue(error)
                raise
            self._end(bar)
            try:
                self._finish()
            except DeviceLostError as error:
                error.during(self._work())
                error.kept = self._keep_what_is_on_host()
                raise
        if self.watch is not None:
            self._restore_best(self.watch)
        if self.learned is not None:
            with self.model._lock:
                found = finished_users(self.learned, self.solver)
                if found is not None and self.model._learned is self.learned:
                    self.learned = found
                    self.model._learn(found)
        if self.learned is not None and self.observers.validation is not None:
            self._warn_if_below_popularity(self.learned, self.observers.validation)

    def _end(self, bar: Any) -> None:
        """End the iterations."""
        bar.close()
        self.stopwatch.lap("observe")

    def _observe(self, record: Record, bar: Any) -> None:
        """Run all work after an iteration except the callback."""
        if self._model_is_needed():
            self._update_model()
        if self.needs_objective:
            record["objective"] = self.observers.unit * self.solver.objective_value()
        if self.observers.validation is not None:
            record |= self._validate(self.observers.validation)
        if self.observers.need_objective:
            self._report(record, bar)
        bar.update()
        if self.writer is not None and not self.stale:
            self.writer.offer(self.model)

    def _model_is_needed(self) -> bool:
        """Whether to update the model after this iteration; the same on all ranks."""
        if self.needs_model:
            return True
        due = self.writer is not None and self.writer.due(self.completed)
        return self.saves and self.ranks.agreed(due)

    def _validate(self, validation: sp.csr_array) -> Record:
        names, everybody = [self.model._validation_metric()], np.arange(validation.shape[0])
        if self.watch is not None:
            self.watch.metric = self.watch.rule.metric or names[0]
            names += [self.watch.metric] if self.watch.metric not in names else []
        return dict(_measure(self.model, validation, self.observers.seen, tuple(names), everybody))

    def _report(self, record: Record, bar: Any) -> None:
        values = {name: f"{value:.5g}" for name, value in record.items() if name not in ("iteration", "seconds")}
        bar.set_postfix(values)
        if bar.disable:
            said = ", ".join(f"{name} {value}" for name, value in values.items())
            logger.info("iteration %d of %d: %s", self.completed, bar.total, said)

    def _asked_to_stop(self, record: Record) -> bool:
        ends = False
        if self.watch is not None and self.learned is not None:
            ends = self.watch.see(self.completed, record[self.watch.metric], self.learned)
            if ends:
                logger.info("no better %s for %d iterations", self.watch.metric, self.completed - self.watch.iteration)
        return self._callback_stops(record) or ends

    def _callback_stops(self, record: Record) -> bool:
        if not self.calls_back:
            return False
        answer = None if self.observers.callback is None else self.observers.callback(self.model, record)
        stops = self.ranks.agreed(isinstance(answer, (bool, np.bool_)) and bool(answer))
        if stops and self.ranks.first:
            logger.info("callback stopped the fit after iteration %d", self.completed)
        return stops

    def _restore_best(self, watch: Watch) -> None:
        """Give the model the factors of the best iteration."""
        if watch.learned is not None and watch.iteration < self.completed:
            logger.info(
                "factors of iteration %d of %d: %s %.5g", watch.iteration, self.completed, watch.metric, watch.value
            )
            self.learned = replace(watch.learned, n_iter=watch.iteration, history=self.history)
            self.model._learn(self.learned)

    def _warn_if_below_popularity(self, learned: Learned, validation: sp.csr_array) -> None:
        """Log a warning if an implicit model ranks held-out entries worse than the most popular items do."""
        seen, likes = learned.seen if self.observers.seen is None else self.observers.seen, learned.popularity
        metric = self.model._validation_metric()
        if not learned.objective.is_implicit or likes is None or not isinstance(seen, sp.csr_array):
            return  # a store is not read again
        users = np.unique(entry_rows(validation)[validation.data > 0])
        users = users[:: max(1, -(-len(users) // COMPARED_USERS))]
        ours, theirs = (
            _measure(model, validation, seen, (metric,), users)[metric]
            for model in (self.model, popularity_of(seen, likes))
        )
        if ours < theirs:
            logger.warning(
                "%s of %d users of the validation set is %.4f, and recommending the most popular items reaches %.4f: "
                "increase regularization (now %s) with alpha=%g and unobserved_weight=%g, or recommend by popularity",
                metric,
                len(users),
                ours,
                theirs,
                learned.objective.regularization,
                learned.objective.alpha,
                learned.objective.unobserved_weight,
            )

    def _update_model(self, *, on_host: bool = False) -> None:
        """Update the model with the current factors; the first time, create its `Learned`.

        `on_host`: copy the factors to the host first, so that a failure leaves the model as it is.
        """
        state = self.ranks.gather(self.solver)
        if state is not None and on_host:
            state = state.on_host()
        self.stale = False
        if state is None:
            return
        first = self.learned is None
        if first:
            take_columns(self.model, self.columns)
        named = vars(self.model).get("feature_names_in_") if self.learned is None else self.learned.feature_names
        # a list of its own, since `self.history` grows; this releases the previous state
        self.learned = replace(
            self.learn(state), n_iter=self.completed, history=list(self.history), feature_names=named
        )
        if first and self.observers.validation is not None:
            seen = self.learned.seen if self.observers.seen is None else self.observers.seen
            _warn_of_overlap("validation", self.observers.validation, seen if isinstance(seen, sp.csr_array) else None)
        self.model._learn(self.learned)

    def _finish(self, *, on_host: bool = False) -> None:
        """Update the model, copy the factors to the host, and write the last checkpoint."""
        if self.stale:
            self._update_model(on_host=on_host)
        if self.learned is not None:
            with self.model._lock:  # an update by another thread, or by the callback, stays
                if self.model._learned is self.learned:
                    self.learned = replace(self.learned, state=self.learned.state.on_host())
                    self.model._learn(self.learned)
        if self.writer is not None and self.learned is not None and not self.partial:
            self.writer.finish(self.model)

    # ------------------------------------------------------------------------------------------------ failures

    def _rescue(self, error: BaseException) -> None:
        """Leave a usable model after a failure: the last completed half sweep, or if a GPU is lost, the host's copy."""
        if isinstance(error, KeyboardInterrupt):
            hurry()
        work = self._work()
        if isinstance(error, DeviceLostError):
            error.during(work)
        if not self.ranks.alone:
            return
        level, why = logging.INFO, f"stopped while computing {work}"
        try:
            self._finish(on_host=True)
            kept = AS_BEFORE if self.learned is None else "The model has the last completed half sweep"
        except DeviceError as failure:
            if isinstance(failure, DeviceLostError):
                failure.during(work)
            level, why, kept = logging.WARNING, str(failure), self._keep_what_is_on_host()
        if isinstance(error, DeviceLostError):
            error.kept = kept
        else:
            logger.log(level, "%s. %s", why, kept)

    def _work(self) -> str:
        """The work of the solver, for messages."""
        side = getattr(self.solver, "solving", None)
        return self.work if side is None else f"the {side} factors of {self.work}"

    def _keep_what_is_on_host(self) -> str:
        """Give the model the last factors on the host, without the GPU; returns a sentence that names them."""
        saved = "" if self.writer is None else f"; checkpoints are in {str(self.writer.checkpoint.folder)!r}"
        if self.learned is None:
            return f"{AS_BEFORE}{saved}"
        with self.model._lock:
            if self.model._learned is not self.learned:
                return f"The model is as the callback left it{saved}"
            try:
                self.learned = replace(self.learned, state=self.learned.state.on_host())
            except DeviceError:
                self.model._forget()
                return f"The model is not fitted: no factors of this fit are on the host{saved}"
            self.model._learn(self.learned)
        return f"The model has the factors of iteration {self.learned.n_iter}, which were on the host{saved}"


def check_validation(
    validation: Any, labels: Labels | None, shape: tuple[int, int], objective: Objective, unknown: str
) -> sp.csr_array | None:
    """Held-out entries in the positions of the training data, aligned by label if both have labels.

    Parameters
    ----------
    validation : Ratings or matrix or None
    labels : (array, array) or None
        Labels of the training data.
    shape : (n_users, n_items)
        Shape of the training data.
    objective : Objective
    unknown : {"error", "drop"}
        Treatment of entries whose user or item is not in the training data.

    Raises
    ------
    RatingsError, UnknownLabelError, ValueError
    """
    check_choice("unknown", unknown, UNKNOWN)
    if validation is None:
        return None
    matrix = as_csr(validation, name="validation")
    matrix, _ = align(
        matrix,
        labels_of(validation),
        labels or (None, None),
        name="validation",
        unknown=unknown,
        owner="the training data",
    )
    check_shape("validation", matrix, shape, ("n_users", "n_items"))
    check_nonempty(matrix, "validation")
    if objective.is_implicit and not np.any(matrix.data > 0):
        raise RatingsError("validation has no positive entry, so no ranking can be evaluated; leave it out")
    return matrix
