"""The estimators' common half: checking input, the fit loop and its services, saving."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_array
from sklearn.utils.validation import check_is_fitted, validate_data

from ..core.objective import Objective, State, initial_state
from ..core.progress import progress_bar
from ..core.sparse import transposed
from ..core.triplets import refuse_triplets
from ..core.validate import (
    as_csr,
    check_bool,
    check_choice,
    check_int,
    check_nonempty,
    check_rng,
    check_shape,
    without_mask,
)
from ..data import fingerprint
from ..data import labels as data_labels
from ..data.align import UNKNOWN, Labels, align, labels_of
from ..data.store import Store, StoreMatrix
from ..errors import DeviceError, RatingsError
from ..plan import dispatch
from ..plan.make import check_memory, make_plan, plan_for
from ..plan.solver import Solver
from ..plan.types import Plan, Settings
from ..ratings import Ratings
from . import checkpoint as checkpoints
from . import files as _io
from .learned import Learned, pattern, range_of, scale_of, total_of
from .serving import ServingMixin

logger = logging.getLogger("hybridmf")

COLLAPSED = 1e-3
"""What factors add to predictions, relative to the scale of the ratings, below which they are as good as zero."""

USUAL_RATIO = {False: 0.0135, True: 0.045}
"""The default lambda of 0.05 over the scale of ratings of 1 to 5 stars, without biases and with them."""

Record = dict[str, float]
"""One iteration of ``history_``."""


class FactorModel(ServingMixin, BaseEstimator):
    """Base of the estimators. Subclasses name the objective, the settings and the solver."""

    iterations: int
    random_state: Any

    _reads_slabs = False
    """Whether the solvers read a `Store` slab by slab; others get all of it in memory."""

    _first_square = 0.25
    """Mean squared length of initial factors, relative to the scale of explicit ratings. What remains of longer ones in
    rows of few entries is noise; the items' first pass over shorter ones makes items so long that steps of SGD
    overshoot."""

    n_iter_: int
    history_: list[Record]
    timings_: dict[str, float]

    def _objective(self, spread: float = 1.0) -> Objective:
        """What the current parameters say to minimize on ratings of this standard deviation.

        A fitted model goes by what it has learned.
        """
        raise NotImplementedError

    def _settings(self) -> Settings:
        raise NotImplementedError

    def _solver(
        self, plan: Plan, objective: Objective, user_items: Any, item_users: Any, state: State, completed: int
    ) -> Solver:
        """The backend; `completed` iterations lie behind `state`."""
        raise NotImplementedError

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = []  # factors have the dtype of the model, not of the input
        return tags

    # ------------------------------------------------------------------------------------------------ input

    def _check_matrix(self, matrix: Any, name: str = "user_items") -> sp.csr_array | StoreMatrix:
        """Training data as canonical CSR, or as a store; explicit zeros are dropped for implicit feedback."""
        if isinstance(matrix, Store) and self._reads_slabs:
            return StoreMatrix(matrix, "user", self._settings().dtype, self._objective().is_implicit)
        if not sp.issparse(matrix) and not isinstance(matrix, (Ratings, Store)):
            refuse_triplets(matrix, name)  # by names of columns, which check_array drops
            plain = without_mask(matrix, name)
            matrix = check_array(plain, dtype="numeric", input_name=name, estimator=self)
        return as_csr(matrix, name=name, dtype=self._settings().dtype, drop_zeros=self._objective().is_implicit)

    # ------------------------------------------------------------------------------------------------ fit

    def fit(
        self,
        user_items: Any,
        y: Any = None,
        *,
        validation: Any = None,
        callback: Callable[[Any, Record], Any] | None = None,
        show_progress: bool = False,
        checkpoint: str | os.PathLike[str] | checkpoints.Checkpoint | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        unknown: str = "error",
    ) -> Any:
        """Learn user and item factors.

        Parameters
        ----------
        user_items : Ratings, Store, or sparse or dense matrix, shape (n_users, n_items)
            Zeros and masked cells of a dense matrix are absent entries. The fit works on a copy, so a matrix may change
            meanwhile; Ratings, whose arrays are read-only, are not copied. A store is read slab by slab by ALS, with
            the same result as in memory, and loaded by the other models.
        y : ignored
            For scikit-learn's sake.
        validation : Ratings or matrix, shape (n_users, n_items), optional
            Held-out entries: each iteration's RMSE (explicit) or NDCG@10 (implicit) goes into ``history_``. Labelled
            ratings go by the labels of `user_items`.
        callback : callable, optional
            Called as ``callback(model, record)`` after each iteration, `model` usable as it is; returning True
            stops the fit.
        show_progress : bool
            A progress bar on standard error, where that is a terminal, or in a notebook. Elsewhere nothing is drawn:
            the objective of each iteration goes to the logger ``hybridmf``, level INFO.
        checkpoint : path-like or hybridmf.Checkpoint, optional
            Folder that gets a checkpoint after each iteration, written in the background while training goes on (the
            newest two are kept); or a `Checkpoint` that says how often. On return the last iteration is on the disk. A
            write that fails is logged and tried again after the next iteration.
        resume_from : path-like, optional
            Checkpoint, or folder of them, to continue from; the same data and objective are required. `iterations`
            counts those that it has behind it; if it has more, the model is that of the checkpoint, with a warning.
        unknown : {"error", "drop"}
            What becomes of labelled entries of `validation` whose user or item `user_items` does not have.

        Returns
        -------
        self
            With ``history_``: one dict an iteration with ``iteration`` and ``seconds``, and, where a validation set, a
            callback or a progress bar looks on, ``objective`` and the validation metric; and ``timings_``: seconds
            before the first iteration, to "check" the input, "convert" it (transpose) and "set up" the solver
            (layouts, initial factors, transfer to a GPU).

        Raises
        ------
        TypeError, ValueError
            A hyperparameter out of range; ratings that cannot be used; labels that a model file cannot hold.
        DeviceError, MemoryBudgetError, FileExistsError
            Before any work; the last for a `checkpoint` folder in which another run left checkpoints.
        NotPositiveDefiniteError, NonFiniteError, KeyboardInterrupt
            During the work; the model keeps the factors of the last completed half sweep.
        """
        objective, settings = self._objective(), self._settings()
        iterations = check_int("iterations", self.iterations, 1)
        check_bool("show_progress", show_progress)
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable, got {type(callback).__name__}")
        started = time.perf_counter()
        check_labels(labels_of(user_items))
        matrix = self._check_matrix(user_items)
        check_nonempty(matrix, "user_items")
        checked = time.perf_counter()
        stored = isinstance(matrix, StoreMatrix)
        plan = plan_for(matrix, objective, settings)
        check_memory(plan)
        validation = _check_validation(validation, user_items, matrix.shape, objective, unknown)
        where = None if checkpoint is None else checkpoints.prepare(checkpoint, resume_from)
        data = ""
        if where or resume_from is not None:
            data = fingerprint.fingerprint(matrix)
        resumed = None if resume_from is None else checkpoints.read(resume_from, self, data, mapped=plan.factors_away)

        logger.info("plan:\n%s", plan)
        converting = time.perf_counter()
        item_users = matrix.transposed() if stored else transposed(matrix, plan.num_threads)
        converted = time.perf_counter()
        user_counts, item_counts = np.diff(matrix.indptr), np.diff(item_users.indptr).astype(np.int64)
        log_empty_rows(user_counts, item_counts)
        scale = scale_of(matrix, objective)
        objective = self._objective(scale)
        state = resumed.state if resumed else self._initial_state(matrix, item_users, plan, objective, scale)
        completed = int(resumed.summary["n_iter"]) if resumed else 0
        seed_bits = self._seed_bits(resumed.summary.get("seed_bits") if resumed else None)
        solver = self._solver(_seeded(plan, seed_bits), objective, matrix, item_users, state, completed)
        ready = time.perf_counter()
        with closing(solver):  # threads and connections of several ranks end with the fit, however it ends
            learned = self._learned_from(user_items, matrix, objective, plan, state, item_counts)
            extra = {"data": data, "seed_bits": seed_bits}
            writer = None if where is None else checkpoints.Writer(where, extra, completed)
            run = _Run(self, solver, learned, user_items, validation, callback, writer)
            if resumed:
                run.resume(completed, list(resumed.summary["history"]))
            del state, learned, resumed  # the factors a fit starts from need not outlive its first sweep
            run.sweep(iterations, show_progress)
        if not objective.is_implicit:
            _warn_of_collapse(self._learned, scale, matrix.nnz)
        dispatch.remember(plan)
        self.timings_ = {
            "check": checked - started,
            "convert": converted - converting,
            "set up": ready - converted,
        }
        return self

    def _learned_from(
        self, given: Any, matrix: Any, objective: Objective, plan: Plan, state: State, item_counts: np.ndarray
    ) -> Learned:
        """What is known before the first iteration of a fit on `given`, `matrix` once checked."""
        user_ids, item_ids = labels_of(given) or (None, None)
        return Learned(
            objective,
            plan,
            state,
            pattern(matrix),
            total_of(matrix),
            user_ids,
            item_ids,
            _io.jsonable(self.get_params(deep=False)),
            item_counts,
            range_of(matrix, objective),
        )

    def _seed_bits(self, kept: int | None) -> int | None:
        """What iterations draw from: as a checkpoint has it, else by `random_state`; None where nothing is drawn."""
        return None

    def _initial_state(
        self, matrix: Any, item_users: Any, plan: Plan, objective: Objective, scale: float | None = None
    ) -> State:
        """Where a fit starts; `scale` is that of the ratings, computed if it is not given."""
        scale = scale_of(matrix, objective) if scale is None else scale
        return initial_state(
            np.diff(matrix.indptr),
            np.diff(item_users.indptr),
            plan.factors,
            matrix.dtype.type,
            objective,
            total_of(matrix) / matrix.nnz,
            check_rng(self.random_state),
            self._first_length(objective, scale),
        )

    def _first_length(self, objective: Objective, scale: float) -> float:
        """Mean squared length of initial factors: in proportion to explicit ratings, about 1 for implicit feedback."""
        return 1.0 if objective.is_implicit else self._first_square * scale

    # ------------------------------------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str], *, include_seen: bool = True) -> None:
        """Write the fitted model as one safetensors file, atomically; ``hybridmf.load(path)`` reads it.

        Parameters
        ----------
        path : path-like
        include_seen : bool
            Store which items each user has seen (4 bytes an entry), so that ``recommend`` can leave them out.
        """
        check_is_fitted(self)
        metadata = _io.model_metadata(self)
        tensors = _io.lasting_tensors(self, include_seen=check_bool("include_seen", include_seen))
        tensors |= _io.state_tensors(self._learned.state)
        _io.write_atomically(path, lambda file: _io.write_model(file, metadata, tensors))

    def _restore(self, content: _io.ModelFile) -> Any:
        """Take over what a model file holds."""
        objective, settings = content.objective(self._objective()), self._settings()
        shape = (len(content.state.user), len(content.state.item))
        nnz = int(content.summary.get("nnz", 0))
        plan = _plan_to_serve(objective, settings, shape, nnz)
        self._learn(
            Learned(
                objective,
                plan,
                content.state,
                content.seen,
                content.summary["total"],
                content.user_ids,
                content.item_ids,
                _io.jsonable(self.get_params(deep=False)),
                content.item_counts,
                content.value_range,
            )
        )
        self.n_iter_, self.history_ = int(content.summary["n_iter"]), list(content.summary["history"])
        self.n_features_in_ = shape[1]
        return self


def _warn_of_collapse(learned: Learned, scale: float, nnz: int) -> None:
    """Log a warning where factors have shrunk to nothing beside ratings of this scale; `nnz` is their number."""
    objective, zeros = learned.objective, not learned.total
    users, items = (_root_mean_square(side.matrix) for side in (learned.state.user, learned.state.item))
    if not objective.regularization or users * items >= COLLAPSED * scale or (zeros and not users * items):
        return
    degree = nnz / math.sqrt(max(1, learned.shape[0] * learned.shape[1]))
    usual = USUAL_RATIO[objective.biases] * scale * degree ** (1 - objective.scaling)
    logger.warning(
        "the factors have shrunk to nothing: they add less than %g %% of the ratings' scale (%.3g) to predictions. "
        "regularization=%g is too strong for ratings of this scale; try regularization=%.1g",
        100 * COLLAPSED,
        scale,
        objective.regularization,
        min(usual, objective.regularization / 10),
    )


def _root_mean_square(factors: np.ndarray) -> float:
    """Of the lengths of the rows that are not zero; that of products is at most both sides' multiplied."""
    squares = np.einsum("ij,ij->i", factors, factors)
    return math.sqrt(float(squares.sum(dtype=np.float64)) / max(1, int(np.count_nonzero(squares))))


def _plan_to_serve(objective: Objective, settings: Settings, shape: tuple[int, int], nnz: int) -> Plan:
    """The plan of a fit that may not be possible here: a model fitted on a GPU is of use without one."""
    settings = replace(settings, reduction="auto")  # nothing is added up any more
    try:
        return make_plan(objective, settings, shape, nnz)
    except DeviceError as error:
        logger.warning("%s; the loaded model is served without it", error)
    # what only some GPU has was for the fit; new rows are solved exactly, whatever the method was
    anywhere = replace(settings, device="auto", assembly="auto", precision="float32", method=None)
    return make_plan(objective, anywhere, shape, nnz)


def _seeded(plan: Plan, seed_bits: int | None) -> Plan:
    method: Any = plan.method
    return plan if seed_bits is None else replace(plan, method=replace(method, seed_bits=seed_bits))


def check_labels(labels: Labels | None) -> None:
    """Refuse labels that no model file can hold before the fit, not when it is saved.

    Raises
    ------
    TypeError
    """
    for name, ids in zip(("user_ids", "item_ids"), labels or (), strict=False):
        data_labels.check_storable_labels(name, ids)


def log_empty_rows(user_counts: np.ndarray, item_counts: np.ndarray) -> None:
    """Log how many rows of each side have no entries, and so get no factors."""
    users, items = (int(np.count_nonzero(counts == 0)) for counts in (user_counts, item_counts))
    logger.info("%d of %d users and %d of %d items have no entries", users, len(user_counts), items, len(item_counts))


def _check_validation(
    validation: Any, user_items: Any, shape: tuple[int, int], objective: Objective, unknown: str
) -> sp.csr_array | None:
    """Held-out entries over the training rows and columns, by label where both have labels."""
    check_choice("unknown", unknown, UNKNOWN)
    if validation is None:
        return None
    matrix = as_csr(validation, name="validation")
    want = labels_of(user_items) or (None, None)
    matrix, _ = align(
        matrix, labels_of(validation), want, name="validation", unknown=unknown, owner="the training data"
    )
    check_shape("validation", matrix, shape, ("n_users", "n_items"))
    check_nonempty(matrix, "validation")
    if objective.is_implicit and not np.any(matrix.data > 0):
        raise RatingsError("validation has no positive entry, so no ranking can be measured; leave it out")
    return matrix


class _Run:
    """One fit in progress: sweeps, and what looks on after each of them."""

    def __init__(
        self,
        model: FactorModel,
        solver: Solver,
        learned: Learned,
        given: Any,
        validation: sp.csr_array | None,
        callback: Callable[[Any, Record], Any] | None,
        writer: checkpoints.Writer | None,
    ) -> None:
        self.model, self.solver, self.learned, self.given = model, solver, learned, given
        self.validation, self.callback = validation, callback
        self.writer = writer
        self.completed = 0
        self.whole = False  # whether the model has the state that iteration `completed` ended with
        self.history: list[Record] = []

    def resume(self, completed: int, history: list[Record]) -> None:
        """Count the iterations of a checkpoint as done."""
        self.completed, self.history, self.whole = completed, history, True
        self._adopt()

    def sweep(self, iterations: int, show_progress: bool) -> None:
        """Sweep up to `iterations`; whatever ends it, the model has the last completed half sweep."""
        observed = show_progress or self.validation is not None or self.callback is not None
        bar = progress_bar(iterations, show_progress, initial=self.completed, desc=type(self.model).__name__)
        with checkpoints.writing(self.writer):
            try:
                self._iterate(iterations, observed, bar)
            finally:
                bar.close()
                self._settle()
                if self.writer is not None and self.whole:
                    self.writer.finish(self.model)

    def _iterate(self, iterations: int, observed: bool, bar: Any) -> None:
        for iteration in range(self.completed + 1, iterations + 1):
            seconds = self._one_sweep()
            self.completed = iteration
            record: Record = {"iteration": iteration, "seconds": seconds}
            self.history.append(record)
            self._adopt()
            self.whole = True
            if observed:
                self._observe(record)
                values = {k: f"{v:.5g}" for k, v in record.items() if k not in ("iteration", "seconds")}
                bar.set_postfix(values)
                if bar.disable:
                    said = ", ".join(f"{name} {value}" for name, value in values.items())
                    logger.info("iteration %d of %d: %s", iteration, iterations, said)
            bar.update()
            if self.writer is not None:
                self.writer.offer(self.model)
            if self._asked_to_stop(record):
                logger.info("callback stopped the fit after iteration %d", iteration)
                break

    def _settle(self) -> None:
        """Bring the factors to the host: a fitted model holds no memory of a device."""
        if hasattr(self.model, "_learned") and self.model._learned is self.learned:
            self.learned = replace(self.learned, state=self.learned.state.on_host())
            self.model._learn(self.learned)

    def _one_sweep(self) -> float:
        started = time.perf_counter()
        for _ in self.solver.sweep():
            self.whole = False
            # so that an interruption or a failure from here on finds the model usable
            self._adopt()
        return time.perf_counter() - started

    def _adopt(self) -> None:
        """Make the solver's state the model's; the first time, with all that goes with it."""
        model = self.model
        named = not sp.issparse(self.given) and not isinstance(self.given, (Ratings, Store))
        if not hasattr(model, "_learned") or model._learned.plan is not self.learned.plan:
            shaped = self.given if named else np.broadcast_to(np.float32(0), self.learned.shape)
            validate_data(model, shaped, skip_check_array=True, reset=True)
        self.learned = replace(self.learned, state=self.solver.state)  # the state before it may go
        model._learn(self.learned)
        model.n_iter_, model.history_ = self.completed, self.history

    def _asked_to_stop(self, record: Record) -> bool:
        if self.callback is None:
            return False
        answer = self.callback(self.model, record)
        return isinstance(answer, (bool, np.bool_)) and bool(answer)

    def _observe(self, record: Record) -> None:
        record["objective"] = self.solver.objective_value()
        if self.validation is not None:
            from ..metrics import _measure

            metric, everybody = self.model._validation_metric(), np.arange(self.validation.shape[0])
            record[metric] = _measure(self.model, self.validation, None, (metric,), everybody)[metric]
