"""The iterations of a fit and the work after each of them, in one process or on several ranks.

Each rank of a fit has one `FitLoop`, and all of them call its methods together. Only the first rank has the model, the
observers and the checkpoints: it gathers the factors when one of these needs them, and decides for all when to stop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from ..core.objective import Objective, State
from ..core.progress import progress_bar
from ..core.sparse import entry_rows
from ..core.validate import as_csr, check_shape
from ..data.align import Labels, align, labels_of
from ..device.health import hurry
from ..errors import DeviceError, DeviceLostError, RatingsError
from ..metrics import _measure, _warn_of_overlap
from ..plan.solver import Solver
from ..ranks.transport.communicator import agreed
from ..ratings import as_ratings
from .early_stopping import Watch
from .estimator import take_columns
from .exactness import finished_users
from .learned import Learned
from .popularity import popularity_of

logger = logging.getLogger("hybridmf")

AS_BEFORE = "The model is as it was before the fit"

COMPARED_USERS = 4000
"""Most users by whom a fitted model is compared with popularity; all would take longer than a short fit on a GPU."""

Record: TypeAlias = dict[str, float]  # one iteration of ``history_``

Callback: TypeAlias = Callable[[Any, Record], Any]


class FitLoop:
    """The iterations of one fit on one rank.

    `fit` is the `hybridmf.model.fit.Fit` of this rank after its start; `learn` makes the `Learned` of a state.
    """

    def __init__(self, fit: Any, solver: Solver, learn: Callable[[State], Learned]) -> None:
        self.model, self.source, self.solver, self.learn = fit.model, fit.source, solver, learn
        self.options, self.communicator, self.stopwatch = fit.options, fit.communicator, fit.stopwatch
        self.completed, self.history, self.writer = fit.completed, fit.history, fit.writer
        self.validation: sp.csr_array | None = fit.held_out
        self.seen = fit.source.seen_by(fit.held_out, fit.objective)  # of the validation users, if the model lacks them
        self.learned: Learned | None = None
        options, rule, communicator = fit.options, fit.options.early_stopping, fit.communicator
        self.watch = None if rule is None else Watch(rule)
        # whether the model lacks the current factors, and whether these are of an incomplete iteration; as on all ranks
        self.stale, self.partial = fit.completed > 0, False
        self.work = ""  # of the solver, for messages
        calls_back = options.callback is not None
        self.reports = options.track_objective or options.show_progress or calls_back
        self.calls_back, self.needs_objective, self.saves, self.may_stop = (
            bool(agreed(communicator, answer))
            for answer in (calls_back, self.reports, fit.writer is not None, calls_back or rule is not None)
        )
        self.validates_every = agreed(communicator, 0 if self.validation is None else options.validate_every)

    def iterations(self) -> Iterator[int]:
        for iteration in range(self.completed + 1, self.bar.total + 1):
            self.stopwatch.lap("observe")
            self.work = f"iteration {iteration}"
            self.solver.continues = iteration < self.bar.total and not self.may_stop
            yield iteration

    def changed(self) -> None:
        """A half sweep has changed the factors."""
        self.stale = self.partial = True

    def completes(self, iteration: int) -> bool:
        """Observe an iteration that is complete; returns whether it is the last one."""
        self.completed, self.partial = iteration, False
        self.work = f"the evaluation of iteration {iteration}"
        record: Record = {"iteration": iteration, "seconds": self.stopwatch.lap("iterations")}
        self.history.append(record)
        self._observe(record)
        return self._asked_to_stop(record)

    @contextmanager
    def running(self, iterations: int) -> Iterator[None]:
        """The context of the iterations; its end completes the model and the checkpoints, also after a failure."""
        shown = self.options.show_progress
        self.bar = progress_bar(iterations, shown, initial=self.completed, desc=type(self.model).__name__)
        with self.writer or nullcontext():
            try:
                yield
            except BaseException as error:
                self._end()
                self._rescue(error)
                raise
            self._end()
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
        if self.learned is not None and self.validation is not None:
            self._warn_if_below_popularity(self.learned, self.validation)

    def _end(self) -> None:
        self.bar.close()
        self.stopwatch.lap("observe")

    def _observe(self, record: Record) -> None:
        """Run all work after an iteration except the callback."""
        if self._model_is_needed():
            self._update_model()
        validates = self._validates()
        if self.needs_objective or validates:
            record["objective"] = (self.source.unit or 1.0) * self.solver.objective_value()
        if self.validation is not None and validates:
            record |= self._validate(self.validation)
        if self.reports or (self.validation is not None and validates):
            self._report(record)
        self.bar.update()
        if self.writer is not None and not self.stale:
            self.writer.offer(self.model)

    def _model_is_needed(self) -> bool:
        """Whether to update the model after this iteration; the same on all ranks."""
        if self.calls_back or self._validates():
            return True
        due = self.writer is not None and self.writer.due(self.completed)
        return self.saves and bool(agreed(self.communicator, due))

    def _validates(self) -> bool:
        """Whether the validation set is evaluated after this iteration; the same on all ranks."""
        every, last = self.validates_every, self.completed == self.bar.total
        return bool(every) and (last or self.completed % every == 0)

    @functools.cached_property
    def _users(self) -> np.ndarray:
        """Ascending positions of the validation users: all, or so many drawn at random, the same ones in each fit."""
        assert self.validation is not None
        number, errors = self.options.validation_users, self.model._validation_metric() == "rmse"
        if number is None:
            return np.arange(self.validation.shape[0])
        users = np.unique(entry_rows(self.validation)[errors | (self.validation.data > 0)])
        return np.sort(np.random.default_rng(0).permutation(users)[:number])

    def _validate(self, validation: sp.csr_array) -> Record:
        names = [self.model._validation_metric()]
        if self.watch is not None:
            self.watch.metric = self.watch.rule.metric or names[0]
            names += [self.watch.metric] if self.watch.metric not in names else []
        return dict(_measure(self.model, validation, self.seen, tuple(names), self._users))

    def _report(self, record: Record) -> None:
        values = {name: f"{value:.5g}" for name, value in record.items() if name not in ("iteration", "seconds")}
        self.bar.set_postfix(values)
        if self.bar.disable:
            said = ", ".join(f"{name} {value}" for name, value in values.items())
            logger.info("iteration %d of %d: %s", self.completed, self.bar.total, said)

    def _asked_to_stop(self, record: Record) -> bool:
        """Whether early stopping or the callback ends the fit on all ranks; the first one decides."""
        if not self.may_stop:
            return False
        ends = False
        if self.watch is not None and self.watch.metric in record and self.learned is not None:
            ends = self.watch.see(self.completed, record[self.watch.metric], self.learned)
            if ends:
                logger.info("no better %s for %d iterations", self.watch.metric, self.completed - self.watch.iteration)
        answer = None if self.options.callback is None else self.options.callback(self.model, record)
        if isinstance(answer, (bool, np.bool_)) and answer:
            logger.info("callback stopped the fit after iteration %d", self.completed)
            ends = True
        return bool(agreed(self.communicator, ends))

    def _restore_best(self, watch: Watch) -> None:
        if watch.learned is not None and watch.iteration < self.completed:
            logger.info(
                "factors of iteration %d of %d: %s %.5g", watch.iteration, self.completed, watch.metric, watch.value
            )
            self.learned = replace(watch.learned, n_iter=watch.iteration, history=self.history)
            self.model._learn(self.learned)

    def _warn_if_below_popularity(self, learned: Learned, validation: sp.csr_array) -> None:
        """Log a warning if an implicit model ranks held-out entries worse than the most popular items do."""
        seen, likes = learned.seen if self.seen is None else self.seen, learned.popularity
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
        state = self.source.gathered(self.solver)
        if state is not None and on_host:
            state = state.on_host()
        self.stale = False
        if state is None:
            return
        first = self.learned is None
        if first:
            take_columns(self.model, self.source.columns)
        named = vars(self.model).get("feature_names_in_") if self.learned is None else self.learned.feature_names
        # a list of its own, since `self.history` grows; this releases the previous state
        self.learned = replace(
            self.learn(state), n_iter=self.completed, history=list(self.history), feature_names=named
        )
        if first and self.validation is not None:
            seen = self.learned.seen if self.seen is None else self.seen
            _warn_of_overlap("validation", self.validation, seen if isinstance(seen, sp.csr_array) else None)
        self.model._learn(self.learned)

    def _finish(self, *, on_host: bool = False) -> None:
        """Update the model, copy the factors to the host, and write the last checkpoint."""
        if self.stale:
            self._update_model(on_host=on_host)
        if self.learned is not None and not self.options.on_device:
            self._to_host(self.learned)
        if self.writer is not None and self.learned is not None and not self.partial:
            self.writer.finish(self.model)

    def _to_host(self, learned: Learned) -> bool:
        """Bring the factors of the model to the host, unless another thread, or the callback, has given it others."""
        with self.model._lock:
            if self.model._learned is not learned:
                return False
            self.learned = replace(learned, state=learned.state.on_host())
            self.model._learn(self.learned)
            return True

    # ------------------------------------------------------------------------------------------------ failures

    def _rescue(self, error: BaseException) -> None:
        """Leave a usable model after a failure: the last completed half sweep, or what is on the host.

        The other ranks may have failed, so that their factors cannot be gathered.
        """
        if isinstance(error, KeyboardInterrupt):
            hurry()
        work = self._work()
        if isinstance(error, DeviceLostError):
            error.during(work)
        if self.communicator.rank:
            return
        level, why = logging.INFO, f"stopped while computing {work}"
        try:
            if self.communicator.size > 1:
                kept = self._keep_what_is_on_host()
            else:
                self._finish(on_host=True)
                kept = AS_BEFORE if self.learned is None else "The model has the last completed half sweep"
        except DeviceError as failure:
            if isinstance(failure, DeviceLostError):
                failure.during(work)
            level, why, kept = logging.WARNING, str(failure), self._keep_what_is_on_host()
        if self.writer is not None and (level == logging.WARNING or isinstance(error, DeviceLostError)):
            kept += f"; checkpoints are in {str(self.writer.checkpoint.folder)!r}"
        if isinstance(error, DeviceLostError):
            error.kept = kept
        else:
            logger.log(level, "%s. %s", why, kept)

    def _work(self) -> str:
        side = getattr(self.solver, "solving", None)
        return self.work if side is None else f"the {side} factors of {self.work}"

    def _keep_what_is_on_host(self) -> str:
        """Give the model the last factors on the host, without the GPU; returns a sentence that names them."""
        if self.learned is None:
            return AS_BEFORE
        with self.model._lock:
            try:
                if not self._to_host(self.learned):
                    return "The model is as the callback left it"
            except DeviceError:
                self.model._forget()
                return "The model is not fitted: no factors of this fit are on the host"
        return f"The model has the factors of iteration {self.learned.n_iter}, which were on the host"


def check_validation(
    validation: Any, labels: Labels | None, shape: tuple[int, int], objective: Objective, unknown: str
) -> sp.csr_array | None:
    """Held-out entries in the positions of the training data, aligned by label if both have labels.

    `labels` and `shape` are those of the training data; `unknown` is the treatment of entries whose user or item is not
    in them.
    """
    if validation is None:
        return None
    validation = as_ratings(validation, "validation")
    matrix, have, want = as_csr(validation, name="validation"), labels_of(validation), labels or (None, None)
    matrix, _ = align(matrix, have, want, name="validation", unknown=unknown, owner="the training data")
    check_shape("validation", matrix, shape, ("n_users", "n_items"))
    if not matrix.nnz:
        raise RatingsError(
            f"validation of shape {matrix.shape} has no entries, so nothing can be evaluated; give held-out ratings, "
            "or leave it out"
        )
    if objective.is_implicit and not np.any(matrix.data > 0):
        raise RatingsError(
            "validation has no positive entry, so no ranking can be evaluated; give entries that are positive, or "
            "leave it out; ratings of which none is positive are for explicit models"
        )
    return matrix
