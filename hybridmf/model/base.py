"""The estimators' common half: checking input, the fit loop and its services, saving."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_array
from sklearn.utils.validation import check_is_fitted

from ..core.objective import Objective, State, initial_state
from ..core.sparse import transposed
from ..core.triplets import refuse_triplets
from ..core.validate import (
    as_csr,
    check_bool,
    check_int,
    check_nonempty,
    check_rng,
    without_mask,
)
from ..data import fingerprint
from ..data import labels as data_labels
from ..data.align import Labels, labels_of
from ..data.store import Store, StoreMatrix
from ..errors import DeviceError
from ..plan import dispatch
from ..plan.make import check_memory, make_plan, plan_for
from ..plan.solver import Solver
from ..plan.types import Plan, Settings
from ..ratings import Ratings
from . import checkpoint as checkpoints
from . import files as _io
from .learned import Learned, pattern, range_of, scale_of, total_of
from .loop import FitLoop, Observers, Record, check_validation
from .serving import ServingMixin
from .stopwatch import Stopwatch

logger = logging.getLogger("hybridmf")

COLLAPSED = 1e-3
"""What factors add to predictions, relative to the scale of the ratings, below which they are as good as zero."""

USUAL_RATIO = {False: 0.0135, True: 0.045}
"""The default lambda of 0.05 over the scale of ratings of 1 to 5 stars, without biases and with them."""


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
            callback or a progress bar looks on, ``objective`` and the validation metric; and ``timings_``: seconds of
            each part of the fit, which add up to all of it: "check" (input, checkpoint to resume from), "plan",
            "convert" (transpose), "set up" (layouts, initial factors, transfer to a GPU), "iterations", "observe"
            (objective, validation, callback, checkpoints handed over) and "finish" (factors to the host, last
            checkpoint).

        Raises
        ------
        TypeError, ValueError
            A hyperparameter out of range; ratings that cannot be used; labels that a model file cannot hold.
        DeviceError, MemoryBudgetError, FileExistsError
            Before any work; the last for a `checkpoint` folder in which another run left checkpoints.
        NotPositiveDefiniteError, NonFiniteError, KeyboardInterrupt
            During the work; the model keeps the factors of the last completed half sweep.
        """
        stopwatch = Stopwatch()
        objective, settings = self._objective(), self._settings()
        iterations = check_int("iterations", self.iterations, 1)
        observers = Observers(callback=callback, show_progress=show_progress)
        check_labels(labels_of(user_items))
        matrix = self._check_matrix(user_items)
        check_nonempty(matrix, "user_items")
        stopwatch.lap("check")
        plan = plan_for(matrix, objective, settings)
        check_memory(plan)
        stopwatch.lap("plan")
        held_out = check_validation(validation, labels_of(user_items), matrix.shape, objective, unknown)
        where = None if checkpoint is None else checkpoints.prepare(checkpoint, resume_from)
        data = ""
        if where or resume_from is not None:
            data = fingerprint.fingerprint(matrix)
        resumed = None if resume_from is None else checkpoints.read(resume_from, self, data, mapped=plan.offloaded)
        stopwatch.lap("check")

        logger.info("plan:\n%s", plan)
        item_users = matrix.transposed() if isinstance(matrix, StoreMatrix) else transposed(matrix, plan.num_threads)
        stopwatch.lap("convert")
        user_counts, item_counts = np.diff(matrix.indptr), np.diff(item_users.indptr).astype(np.int64)
        log_empty_rows(user_counts, item_counts)
        scale = scale_of(matrix, objective)
        objective = self._objective(scale)
        state = resumed.state if resumed else self._initial_state(matrix, item_users, plan, objective, scale)
        completed = int(resumed.summary["n_iter"]) if resumed else 0
        seed_bits = self._seed_bits(resumed.summary.get("seed_bits") if resumed else None)
        solver = self._solver(_seeded(plan, seed_bits), objective, matrix, item_users, state, completed)
        with closing(solver):  # threads and connections of several ranks end with the fit, however it ends
            writer = None
            if where is not None:
                writer = checkpoints.Writer(where, {"data": data, "seed_bits": seed_bits}, completed)
            loop = FitLoop(
                self,
                solver,
                self._learner(user_items, matrix, objective, plan, item_counts),
                _columns(user_items, matrix.shape),
                replace(observers, validation=held_out),
                stopwatch,
                writer=writer,
                completed=completed,
                history=list(resumed.summary["history"]) if resumed else None,
            )
            del state, resumed  # the factors a fit starts from need not outlive its first sweep
            stopwatch.lap("set up")
            loop.run(iterations)
        if not objective.is_implicit:
            _warn_of_collapse(self._learned, scale, matrix.nnz)
        dispatch.remember(plan)
        stopwatch.lap("finish")
        self.timings_ = stopwatch.seconds
        return self

    def _learner(
        self, given: Any, matrix: Any, objective: Objective, plan: Plan, item_counts: np.ndarray
    ) -> Callable[[State], Learned]:
        """What a fit on `given`, `matrix` once checked, learns with a state."""
        user_ids, item_ids = labels_of(given) or (None, None)
        return partial(
            Learned,
            objective,
            plan,
            seen=pattern(matrix),
            total=total_of(matrix),
            user_ids=user_ids,
            item_ids=item_ids,
            params=_io.jsonable(self.get_params(deep=False)),
            item_counts=item_counts,
            value_range=range_of(matrix, objective),
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
    return plan if seed_bits is None else plan.changed(method=replace(method, seed_bits=seed_bits))


def _columns(given: Any, shape: tuple[int, int]) -> Any:
    """What scikit-learn takes the number of features and their names from: a frame or array itself, else its shape."""
    if sp.issparse(given) or isinstance(given, (Ratings, Store)):
        return np.broadcast_to(np.float32(0), shape)
    return given


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
