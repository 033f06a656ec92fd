"""The estimators' common half: checking input, the fit loop and its services, saving."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_array
from sklearn.utils.validation import check_is_fitted, validate_data
from tqdm.auto import tqdm

from . import _io
from ._objective import Objective, Side, State, initial_state
from ._plan import Plan, Settings, check_memory, make_plan
from ._serving import ServingMixin, _pattern
from ._validate import as_csr, check_bool, check_int, check_nonempty, check_rng, check_shape
from .formats import transpose
from .scale import checkpoint as checkpoints

logger = logging.getLogger("hybridmf")

Record = dict[str, float]
"""One iteration of ``history_``."""

SWEEP_ORDER: tuple[Side, Side] = ("item", "user")
"""Items first: the user factors a fit ends with are then exact for its item factors, so fold-in reproduces them."""


class Solver(Protocol):
    """What a backend provides: half sweeps over a state it owns."""

    state: State

    def update(self, side: Side) -> None:
        """Solve one side; `state` changes only once the half sweep is complete."""

    def objective_value(self) -> float:
        """The objective at the current state."""


class FactorModel(ServingMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Base of the estimators. Subclasses name the objective, the settings and the solver."""

    iterations: int
    random_state: Any

    n_iter_: int
    history_: list[Record]
    device_: str

    def _settings(self) -> Settings:
        raise NotImplementedError

    def _solver(self, plan: Plan, user_items: sp.csr_array, item_users: sp.csr_array, state: State) -> Solver:
        raise NotImplementedError

    def _validation_metric(self) -> str:
        return "ndcg@10" if self._objective().is_implicit else "rmse"

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = []  # factors have the dtype of the model, not of the input
        return tags

    # ------------------------------------------------------------------------------------------------ input

    def _check_matrix(self, matrix: Any, name: str = "user_items") -> sp.csr_array:
        """Canonical CSR of the model's dtype; explicit zeros are dropped for implicit feedback."""
        matrix = getattr(matrix, "user_items", matrix)
        if not sp.issparse(matrix):
            matrix = check_array(matrix, dtype="numeric", input_name=name, estimator=self)
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
        checkpoint: str | os.PathLike[str] | None = None,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Learn user and item factors.

        Parameters
        ----------
        user_items : Ratings, or sparse or dense matrix, shape (n_users, n_items)
            Zeros of a dense matrix are absent entries.
        y : ignored
            For scikit-learn's sake.
        validation : Ratings or matrix, shape (n_users, n_items), optional
            Held-out entries: each iteration's RMSE (explicit) or NDCG@10 (implicit) goes into ``history_``.
        callback : callable, optional
            Called as ``callback(model, record)`` after each iteration, `model` usable as it is; returning True
            stops the fit.
        show_progress : bool
            A progress bar on standard error.
        checkpoint : path-like, optional
            Folder that gets a checkpoint after each iteration (the newest two are kept).
        resume_from : path-like, optional
            Checkpoint, or folder of them, to continue from; the same data and objective are required.

        Returns
        -------
        self
            With ``history_``: one dict an iteration with ``iteration`` and ``seconds``, and, where a validation set, a
            callback or a progress bar looks on, ``objective`` and the validation metric.

        Raises
        ------
        TypeError, ValueError
            A hyperparameter out of range; ratings that cannot be used.
        DeviceError, MemoryBudgetError
            Before any work.
        NotPositiveDefiniteError, NonFiniteError, KeyboardInterrupt
            During the work; the model keeps the factors of the last completed half sweep.
        """
        objective, settings = self._objective(), self._settings()
        iterations = check_int("iterations", self.iterations, 1)
        check_bool("show_progress", show_progress)
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable, got {type(callback).__name__}")
        matrix = self._check_matrix(user_items)
        check_nonempty(matrix, "user_items")
        plan = make_plan(objective, settings, matrix.shape, matrix.nnz)
        check_memory(plan)
        if validation is not None:
            validation = as_csr(validation, name="validation")
            check_shape("validation", validation, matrix.shape, ("n_users", "n_items"))
            check_nonempty(validation, "validation")
        folder = None if checkpoint is None else checkpoints.prepare(checkpoint)
        data = checkpoints.fingerprint(matrix) if folder or resume_from is not None else ""
        resumed = None if resume_from is None else checkpoints.read(resume_from, self, data)

        logger.info("plan:\n%s", plan)
        item_users = transpose(matrix, num_threads=plan.num_threads)
        state = resumed.state if resumed else self._initial_state(matrix, item_users, plan, objective)
        solver = self._solver(plan, matrix, item_users, state)
        self._register(user_items, matrix, plan)
        done = int(resumed.summary["n_iter"]) if resumed else 0
        run = _Run(self, solver, validation, callback, folder, data)
        run.history = list(resumed.summary["history"]) if resumed else []
        if resumed:
            self._adopt(state, done, run.history)
        run.sweep(done, iterations, show_progress)
        return self

    def _initial_state(
        self, matrix: sp.csr_array, item_users: sp.csr_array, plan: Plan, objective: Objective
    ) -> State:
        return initial_state(
            np.diff(matrix.indptr),
            np.diff(item_users.indptr),
            plan.factors,
            matrix.dtype.type,
            objective,
            float(matrix.data.mean(dtype=np.float64)),
            check_rng(self.random_state),
        )

    def _register(self, given: Any, matrix: sp.csr_array, plan: Plan) -> None:
        """What the model keeps of its input besides factors."""
        named = not (sp.issparse(given) or hasattr(given, "user_items"))
        validate_data(self, given if named else matrix, skip_check_array=True, reset=True)
        self.user_ids_ = getattr(given, "user_ids", None)
        self.item_ids_ = getattr(given, "item_ids", None)
        self.plan_, self.device_ = plan, plan.device
        self._seen = _pattern(matrix)

    def _adopt(self, state: State, n_iter: int, history: list[Record]) -> None:
        self._state, self.n_iter_, self.history_ = state, n_iter, history
        self._cache = {}

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
        _io.write_atomically(path, _io.encode_model(self, include_seen=check_bool("include_seen", include_seen)))

    def _restore(self, content: _io.ModelFile) -> Any:
        """Take over what a model file holds."""
        objective, settings = self._objective(), self._settings()
        shape = (len(content.state.user), len(content.state.item))
        self.plan_ = make_plan(objective, settings, shape, int(content.summary.get("nnz", 0)))
        self.device_ = self.plan_.device
        self.user_ids_, self.item_ids_ = content.user_ids, content.item_ids
        self._seen = content.seen
        self.n_features_in_ = shape[1]
        self._adopt(content.state, int(content.summary["n_iter"]), list(content.summary["history"]))
        return self


class _Run:
    """One fit in progress: sweeps, and what looks on after each of them."""

    def __init__(
        self,
        model: FactorModel,
        solver: Solver,
        validation: sp.csr_array | None,
        callback: Callable[[Any, Record], Any] | None,
        folder: Path | None,
        data: str,
    ) -> None:
        self.model, self.solver = model, solver
        self.validation, self.callback = validation, callback
        self.folder, self.data = folder, data
        self.history: list[Record] = []

    def sweep(self, done: int, iterations: int, show_progress: bool) -> None:
        """Iterations ``done + 1 .. iterations``; whatever ends them, the model has the last completed half sweep."""
        observed = show_progress or self.validation is not None or self.callback is not None
        bar = tqdm(
            total=iterations, initial=done, disable=not show_progress, desc=type(self.model).__name__, unit="iteration"
        )
        completed = done
        try:
            for iteration in range(done + 1, iterations + 1):
                seconds = self._one_sweep(completed)
                completed = iteration
                record: Record = {"iteration": iteration, "seconds": seconds}
                self.history.append(record)
                self.model._adopt(self.solver.state, completed, self.history)
                if observed:
                    self._observe(record)
                    bar.set_postfix({k: f"{v:.5g}" for k, v in record.items() if k not in ("iteration", "seconds")})
                bar.update()
                if self.folder is not None:
                    checkpoints.write(self.folder, self.model, self.data)
                if self.callback is not None and self.callback(self.model, record) is True:
                    logger.info("callback stopped the fit after iteration %d", iteration)
                    break
        finally:
            bar.close()

    def _one_sweep(self, completed: int) -> float:
        started = time.perf_counter()
        for side in SWEEP_ORDER:
            self.solver.update(side)
            # after every half sweep, so that an interruption or a failure in the next one finds the model usable
            self.model._adopt(self.solver.state, completed, self.history)
        return time.perf_counter() - started

    def _observe(self, record: Record) -> None:
        record["objective"] = self.solver.objective_value()
        if self.validation is not None:
            from .metrics import evaluate

            metric = self.model._validation_metric()
            record[metric] = evaluate(self.model, self.validation, metrics=(metric,))[metric]
