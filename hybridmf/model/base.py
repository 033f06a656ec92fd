"""Base class of the estimators: validation of input, `fit`, and saving."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, BinaryIO, Self

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Objective, PerSide, Side, State
from ..core.validate import as_csr, check_bool, seed_of
from ..data.align import Labels
from ..data.store import Store, StoreMatrix
from ..errors import DeviceError
from ..plan.als import ALS
from ..plan.make import make_plan
from ..plan.solver import Solver
from ..plan.start import Init, Start, check_init, initial_state
from ..plan.types import Method, Plan, Settings
from . import checkpoint as checkpoints
from . import files as _io
from .early_stopping import EarlyStopping
from .estimator import numeric_matrix
from .fit import Fit, Options
from .late import LateMatrix, late_matrix
from .learned import Learned
from .loop import Record
from .serving import ServingMixin
from .stopwatch import Stopwatch
from .training import LocalRatings
from .warm_start import factors_from

logger = logging.getLogger("hybridmf")

SETTINGS = frozenset(each.name for each in fields(Settings))
"""Parameters of estimators that a plan reads."""


@dataclass(eq=False, repr=False)
class FactorModel(ServingMixin):
    """Base of the estimators. Subclasses define the objective and the solver.

    The fields of an estimator and of its bases are the parameters of its constructor: the one table of them.
    """

    factors: int = 64
    _: KW_ONLY
    regularization: float | tuple[float, float] | None = None
    iterations: int = 15
    device: str | Sequence[str] = "auto"
    dtype: Any = "float32"
    num_threads: int | None = None
    random_state: Any = None
    init: Any = None
    gpu_memory_limit: str | int | None = None

    _reads_slabs = False
    """Whether the solvers read a `Store` slab by slab; for other solvers it is loaded into memory."""

    _first_length = 0.5
    """Length of initial factors, relative to the root of the scale of explicit ratings. Longer factors leave noise in
    rows with few entries; with shorter ones, the first pass makes item factors so long that SGD steps overshoot."""

    _source = LocalRatings  # places the ratings of a fit in this process

    _serves_features = False
    """Whether `fit` has features."""

    _keeps_first_rows = False
    """Whether rows without entries keep their factors of `init` until they are solved, as those of `implicit` do."""

    def _objective(self, spread: float = 1.0, degrees: Mapping[Side, np.ndarray] | None = None) -> Objective:
        """Objective by the current parameters, for ratings of this standard deviation and these degrees.

        A fitted model uses the objective of its fit instead.
        """
        raise NotImplementedError

    def _feature_weights(self) -> PerSide:
        """Checked weights of the vectors of features."""
        return PerSide(1.0, 1.0)

    def _method(self) -> Method:
        """Optimization method with its hyperparameters; those of ALS are settings."""
        return ALS

    def _settings(self) -> Settings:
        method = self._method()
        names = SETTINGS - vars(method).keys()
        return Settings.check(
            method=method, **{name: getattr(self, name) for name in self._defaults() if name in names}
        )

    def _solver(self, plan: Plan, objective: Objective, ratings: LocalRatings, state: State, completed: int) -> Solver:
        """The solver; `state` is the result of `completed` iterations."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ input

    def _check_matrix(self, matrix: Any, name: str = "user_items") -> sp.csr_array | StoreMatrix:
        """Training data as canonical CSR, or as a store; explicit zeros are dropped for implicit feedback."""
        if isinstance(matrix, Store) and self._reads_slabs:
            return StoreMatrix(matrix, "user", self._settings().dtype, self._objective().is_implicit)
        matrix = numeric_matrix(self, matrix, name)
        return as_csr(matrix, name=name, dtype=self._settings().dtype, drop_zeros=self._objective().is_implicit)

    def _late_matrix(self, matrix: Any) -> LateMatrix | None:
        """Training data for a GPU that a thread checks, if they are large; None for other ones."""
        settings = self._settings()
        several = isinstance(settings.device, tuple) and settings.device[0] != "cpu"
        if settings.device == "cpu" or not (several or settings.method.kind == "als"):
            return None
        return late_matrix(matrix, "user_items", settings.dtype, self._objective().is_implicit)

    # ------------------------------------------------------------------------------------------------ fit

    @property
    def regularization_(self) -> float | tuple[float, float]:
        """lambda of the fit, also where `regularization` is None; a pair if users and items have different ones."""
        return _one_or_pair(self._fitted().objective.regularization)

    @property
    def regularization_scaling_(self) -> float | tuple[float, float]:
        """The power nu of the fit, 0 for "none" and 1 for "count"; a pair if users and items have different ones."""
        return _one_or_pair(self._fitted().objective.scaling)

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
        early_stopping: EarlyStopping | int | bool | None = None,
        freeze: Side | None = None,
        weights: Any = None,
        validation_users: int | None = None,
        validate_every: int = 1,
        item_features: Any = None,
        user_features: Any = None,
    ) -> Self:
        """Learn user and item factors.

        Parameters
        ----------
        user_items : Ratings, Store, or sparse or dense matrix, shape (n_users, n_items); or a data frame
            Or `PreparedRatings`, for several fits of the same ratings; or a sparse matrix of CuPy. A frame with columns
            of users and items is read by `Ratings.from_frame`, here and in all other methods, and a wide one (a pivot
            table) by `Ratings.from_matrix`: its index and columns are labels.
            Zeros and masked cells of a dense matrix are absent entries. The fit copies a matrix, so later changes to it
            have no effect; Ratings are read-only and not copied. ALS reads a store slab by slab, with the same result
            as in memory; other models load it.
        y : ignored
            Present for scikit-learn. Ratings and sparse matrices are refused: held-out entries are `validation`.
        validation : Ratings or matrix, shape (n_users, n_items), optional
            Held-out entries, whose RMSE (explicit) or NDCG@10 (implicit) is recorded in ``history_`` after each
            iteration. If the most popular items reach a higher NDCG@10 than the model, a warning is logged. Labelled
            ratings are aligned with `user_items` by label.
        callback : callable, optional
            Called as ``callback(model, record)`` after each iteration with a usable model; returning True stops the
            fit.
        show_progress : bool
            Show a progress bar on standard error if that is a terminal, or in a notebook. Otherwise the objective of
            each iteration is logged to ``hybridmf`` at level INFO.
        checkpoint : path-like or hybridmf.Checkpoint, optional
            Folder for checkpoints, written in the background after each iteration (the newest two are kept); or a
            `Checkpoint` with other intervals. The last iteration is on disk when `fit` returns. A failed write is
            logged and retried after the next iteration.
        resume_from : path-like, optional
            Checkpoint, or folder of checkpoints, to continue from. Data and objective must be the same. `iterations`
            includes the iterations of the checkpoint; if the checkpoint has more, its model is returned with a warning.
        unknown : {"error", "drop"}
            Treatment of labelled entries of `validation` whose user or item is not in `user_items`.
        early_stopping : EarlyStopping, int or bool, optional
            Stop when a metric of `validation` has not improved for some iterations (an integer: that many; True: 3),
            and restore the factors of the best iteration, also if all iterations were run. ``n_iter_`` is then the best
            iteration, and ``history_`` has all of them. Checkpoints hold the last iteration, not the best; a resumed
            fit selects the best of its own iterations.
        freeze : {"user", "item"}, optional
            Keep the factors (and biases) of one side from `init`, and solve only the other side; an exact solver then
            runs a single iteration. Rows of the frozen side without entries also keep their factors. For ALS and CCD.
        weights : Ratings, matrix, shape (n_users, n_items), or array, shape (nnz,), optional
            Weight > 0 of each entry of `user_items`, for ALS; an array has the order of the entries of Ratings or of a
            CSR matrix. `ImplicitALS`: the confidence c, in place of ``1 + alpha |r|``; the signs of `user_items` remain
            the preferences. `ExplicitALS`: what multiplies the squared error, and the mean mu is weighted;
            on one device, and on a GPU with ``solver="cholesky"``. Labelled weights are aligned by label. Ratings with
            weights of their own (`Ratings.with_weights`) multiply: ``w (1 + alpha |r|)`` for implicit feedback. Only
            the fit uses weights: `transform` and other fold-in, and ``objective(matrix)``, have none.
        validation_users : int, optional
            Evaluate so many users of `validation`, drawn at random, the same ones in each iteration and each fit.
            Default: all.
        validate_every : int
            Evaluate `validation` after every so many iterations and after the last one; `early_stopping`, whose
            patience counts all iterations, sees these values only.
        item_features, user_features : Features, data frame, or sparse or dense matrix, optional
            What is known of items and users, a row for each, aligned with `user_items` by label; a matrix without
            labels has a row for each item (user), in their order. A frame is read by `Features.from_frame`: numbers,
            categories and lists of tags. Rows are pulled to what their features say (`item_feature_weight`), and those
            without entries have factors by their features alone. Labels that `user_items` lacks are further items
            (users) of the model. Not with a `Store`, ``nonnegative=True``, SGD and CCD.

        Returns
        -------
        self
            Attribute ``history_`` has one dict for each iteration with ``iteration`` and ``seconds``, and, given a
            validation set, a callback or a progress bar, ``objective`` and the validation metric. ``timings_`` has the
            seconds of each part of the fit, which add up to its total time: "check" (input, checkpoint to resume from),
            "plan", "convert" (transpose, and transfer to a GPU that does it), "set up" (layouts, initial factors),
            "iterations", "observe" (objective, validation, callback, queueing checkpoints) and "finish" (factors to the
            host, last checkpoint).

        Raises
        ------
        TypeError, ValueError
            A hyperparameter is out of range, ratings are invalid, or a model file cannot hold the labels. RatingsError
            if `init` is a model whose users or items cannot be matched.
        DeviceError, MemoryBudgetError, FileExistsError
            Raised before any work; the last one if the `checkpoint` folder has checkpoints of another run.
        NotPositiveDefiniteError, NonFiniteError, KeyboardInterrupt
            Raised during the work; the model keeps the factors of the last completed half sweep.
        DeviceLostError
            A GPU failed; the model keeps the last factors that were on the host, and the message names them.
        """
        if hasattr(y, "user_items") or sp.issparse(y):
            raise TypeError("y is ignored, and ratings there are more likely held-out entries: pass validation=")
        stopwatch = Stopwatch()
        options = Options(
            validation, callback, show_progress, checkpoint, resume_from, unknown, early_stopping, freeze,
            validation_users, validate_every,
        )  # fmt: skip
        late = checkpoint is None and resume_from is None
        given: dict[Side, Any] = {"user": user_features, "item": item_features}
        features = {side: value for side, value in given.items() if value is not None}
        source = self._source(self, user_items, weights, late=late, features=features)
        Fit(self, source, options, stopwatch=stopwatch).run()
        return self

    def _seed_bits(self, kept: int | None) -> int | None:
        """Seed of random numbers in iterations: from a checkpoint, else by `random_state`; None if none are drawn."""
        return None

    def _initial_state(
        self, ratings: Any, plan: Plan, objective: Objective, init: Init | None = None, seed: int | None = None
    ) -> State:
        """Initial state of a fit to placed ratings; `init`, as checked, and the seed are computed if not given."""
        init = init or self._init(ratings.shape)
        start = self._start(objective, ratings.scale(objective))
        start = replace(start, signed=init.signed, num_threads=plan.num_threads)
        degrees, seed = ratings.degrees, seed_of(self.random_state) if seed is None else seed
        drawn = initial_state(
            degrees["user"], degrees["item"], plan.factors, plan.dtype, objective, ratings.mean, seed, start
        )
        kept = SIDES if self._keeps_first_rows else (plan.frozen,)
        return init.placed(drawn, degrees, self._sides_read(plan.frozen), kept)

    def _init(self, shape: tuple[int, int], labels: Labels | None = None, frozen: Side | None = None) -> Init:
        """The checked `init` for ratings of this shape and these labels."""
        settings, given = self._settings(), self.init
        given = getattr(given, "estimator", given)  # of scikit-learn's FrozenEstimator, which clones keep as it is
        new: dict[Side, np.ndarray] = {}
        if isinstance(given, FactorModel):
            if not given.__sklearn_is_fitted__():
                raise ValueError(
                    "init is a model that is not fitted; fit it first. scikit-learn's clone copies models without "
                    "their fit: give init=FrozenEstimator(model) to GridSearchCV and the like"
                )
            given, new = factors_from(given._learned, labels, shape, settings.factors, frozen)
        if isinstance(given, (tuple, list)) and any(hasattr(each, "iloc") for each in given):
            raise TypeError("init has a frame, whose index is not matched: pass to_numpy() in the order of the ratings")
        biases, nonnegative = self._objective().biases, bool(getattr(self, "nonnegative", False))
        init = check_init(given, shape, settings.factors, settings.dtype, biases=biases, nonnegative=nonnegative)
        if frozen is not None and frozen not in init.given:
            raise ValueError(
                f"freeze={frozen!r} keeps the {frozen} factors that init gives, and init has none; use init=model, or "
                f"init={'(user_factors, None)' if frozen == 'user' else '(None, item_factors)'}"
            )
        return replace(init, new=new)

    def _sides_read(self, frozen: Side | None = None) -> tuple[Side, ...]:
        """Sides whose initial factors the first iteration reads."""
        return SIDES

    def _is_exact(self) -> bool:
        """Whether a half sweep finds the minimum over one side, so that a second one would find it again."""
        return False

    def _start(self, objective: Objective, scale: float) -> Start:
        """How initial factors are distributed; factors of explicit ratings grow with the root of their scale."""
        return Start(1.0 if objective.is_implicit else self._first_length * math.sqrt(scale))

    # ------------------------------------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str] | BinaryIO, *, include_seen: bool = True) -> None:
        """Write the fitted model as one safetensors file, atomically; ``hybridmf.load(path)`` reads it.

        A model of a subclass is read as one of its class in this library.

        Parameters
        ----------
        path : path-like or binary file
            A new or a regular file, which keeps its permissions; other kinds are refused. To an open file, such as
            ``io.BytesIO()``, the model is written from its position on, and not atomically.
        include_seen : bool
            Store the items seen by each user (4 bytes an entry), so that ``recommend`` can exclude them, and their
            values (none if all are equal, a byte for up to 256 distinct ones, else 4 or 8), for ``explain``.

        Raises
        ------
        NotFittedError, TypeError
        OSError
            `path` is a folder, device, pipe or socket, or cannot be written.
        """
        learned = self._fitted()
        ours = next(each for each in type(self).__mro__ if each.__module__.startswith("hybridmf."))
        metadata = _io.model_metadata(ours.__name__, learned)
        tensors = _io.lasting_tensors(learned, include_seen=check_bool("include_seen", include_seen))
        _io.save_model(path, metadata, tensors | _io.state_tensors(learned.state))

    def _restore(self, content: _io.ModelFile) -> Any:
        shape = (len(content.state.user), len(content.state.item))
        objective, settings = content.objective(self._objective().for_shape(shape)), self._settings()
        plan = plan_to_serve(objective, settings, shape, int(content.summary.get("nnz", 0)))
        params = _io.jsonable(self.get_params(deep=False))
        self._learn(Learned(objective, plan, params=params, **content.learned))
        self.n_features_in_ = shape[1]
        return self


def _one_or_pair(values: PerSide) -> float | tuple[float, float]:
    """A number for both sides, or one for users and one for items."""
    return values.user if values.user == values.item else (values.user, values.item)


def check_model(model: Any, example: str = "ImplicitALS") -> None:
    if not isinstance(model, FactorModel):
        hint = f"; make one: {model.__name__}()" if isinstance(model, type) else ""
        raise TypeError(f"model must be an estimator such as {example}(factors=64), got {model!r}{hint}")


def plan_to_serve(objective: Objective, settings: Settings, shape: tuple[int, int], nnz: int) -> Plan:
    """The plan for serving a model, which may have been fitted on a device that is missing here."""
    settings = replace(settings, reduction="auto")  # serving reduces nothing
    try:
        return make_plan(objective, settings, shape, nnz)
    except DeviceError as error:
        logger.warning("%s; the loaded model is served without it", error)
    # settings of the fit that need a GPU do not matter: new rows are solved exactly
    anywhere = replace(settings, device="auto", assembly="auto", precision="float32", method=ALS)
    return make_plan(objective, anywhere, shape, nnz)
