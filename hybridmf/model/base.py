"""Base class of the estimators: validation of input, `fit`, and saving."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Objective, PerSide, Side, State, default_lambdas
from ..core.triplets import refuse_triplets
from ..core.validate import (
    as_csr,
    check_bool,
    check_choice,
    check_int,
    check_nonempty,
    refuse_gpu,
    seed_of,
    without_mask,
)
from ..data import fingerprint
from ..data import labels as data_labels
from ..data.align import Labels, labels_of
from ..data.store import Store, StoreMatrix
from ..data.wide import is_wide, without_rows
from ..errors import DeviceError, RatingsError
from ..plan import dispatch
from ..plan.als import ALS
from ..plan.make import NOTHING, check_memory, make_plan, plan_for
from ..plan.solver import Solver
from ..plan.start import Init, Start, check_init, initial_state
from ..plan.types import Method, Plan, Settings
from ..ratings import Ratings, as_ratings
from . import checkpoint as checkpoints
from . import files as _io
from .early_stopping import EarlyStopping, check_early_stopping
from .estimator import numeric_matrix
from .late import LateMatrix, late_matrix
from .learned import Learned, likes_of, pattern, summary_of
from .loop import FitLoop, Observers, Progress, Record, check_validation
from .prepared import PreparedRatings, prepared_for
from .serving import ServingMixin
from .stopwatch import Stopwatch
from .training import TrainingData
from .warm_start import factors_from
from .weights import in_units, weighted_entries

logger = logging.getLogger("hybridmf")

COLLAPSED = 1e-3
"""Contribution of factors to predictions, relative to the scale of the ratings, below which they count as zero."""

SAMPLED_ROWS = 10_000
"""About the number of rows that stand for all factors of a side."""


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

    _keeps_first_rows = False
    """Whether rows without entries keep their factors of `init` until they are solved, as those of `implicit` do."""

    def _objective(self, spread: float = 1.0, degrees: Mapping[Side, np.ndarray] | None = None) -> Objective:
        """Objective by the current parameters, for ratings of this standard deviation and these degrees.

        A fitted model uses the objective of its fit instead.
        """
        raise NotImplementedError

    def _method(self) -> Method | None:
        """Optimization method with its hyperparameters; None for ALS, whose hyperparameters are settings."""
        return None

    def _settings(self) -> Settings:
        method = self._method()
        names = SETTINGS if method is None else SETTINGS - vars(method).keys()
        return Settings.check(
            method=method, **{name: getattr(self, name) for name in self._defaults() if name in names}
        )

    def _solver(self, plan: Plan, objective: Objective, ratings: TrainingData, state: State, completed: int) -> Solver:
        """The solver; `state` is the result of `completed` iterations."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ input

    def _source(self, given: Any) -> PreparedRatings | None:
        """Prepared ratings of a fit, if it gets these or ratings on a GPU; None for other ratings."""
        return prepared_for(given, self._settings().dtype, self._objective().is_implicit)

    def _check_matrix(self, matrix: Any, name: str = "user_items") -> sp.csr_array | StoreMatrix:
        """Training data as canonical CSR, or as a store; explicit zeros are dropped for implicit feedback."""
        if isinstance(matrix, Store) and self._reads_slabs:
            return StoreMatrix(matrix, "user", self._settings().dtype, self._objective().is_implicit)
        if not sp.issparse(matrix) and not isinstance(matrix, (Ratings, Store)):
            refuse_gpu(matrix, name)
            refuse_triplets(matrix, name)  # by names of columns, which check_array drops
            plain = without_mask(matrix, name)
            matrix = numeric_matrix(self, plain, name)
        return as_csr(matrix, name=name, dtype=self._settings().dtype, drop_zeros=self._objective().is_implicit)

    def _late_matrix(self, matrix: Any) -> LateMatrix | None:
        """Training data for a GPU that a thread checks, if they are large; None for other ones."""
        settings = self._settings()
        if settings.device == "cpu" or (settings.method or ALS).kind != "als":
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
    ) -> Any:
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
            Present for scikit-learn.
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
        weights : Ratings, or sparse or dense matrix, shape (n_users, n_items), optional
            Confidence c > 0 of each entry of `user_items`, in place of ``1 + alpha |r|`` (`ImplicitALS` only); the
            signs of `user_items` remain the preferences. Labelled weights are aligned by label. Only the fit uses them:
            `transform` and other fold-in, and ``objective(matrix)``, use ``1 + alpha |r|``.

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
        stopwatch = Stopwatch()
        objective = self._objective()
        settings, iterations = fit_settings(self, freeze)
        frozen = settings.frozen
        observers = Observers(
            callback=callback, show_progress=show_progress, early_stopping=check_early_stopping(early_stopping)
        )
        if observers.early_stopping is not None and validation is None:
            raise ValueError("early_stopping measures held-out entries: pass them as validation")
        source = self._source(user_items)
        columns = user_items
        user_items = as_ratings(user_items if source is None else source, "user_items")
        validation, weights = as_ratings(validation, "validation"), as_ratings(weights, "weights")
        check_labels(labels_of(user_items))
        plain = source is None and weights is None and checkpoint is None and resume_from is None
        late = self._late_matrix(user_items) if plain else None
        matrix: Any = late
        if late is None:
            matrix = self._check_matrix(user_items) if source is None else source.user_items
        check_nonempty(matrix, "user_items")
        init = self._init(matrix.shape, labels_of(user_items), frozen)
        entries: Any = matrix
        unit: float | None = None
        if weights is not None:
            entries, unit = weighted_entries(matrix, labels_of(user_items), weights, objective)
            source = None  # its values on a GPU are those that the weights replace
        stopwatch.lap("check")
        held = NOTHING if source is None else source.held
        plan = plan_for(entries, objective if unit is None else in_units(objective, unit), settings, held)
        check_memory(plan)
        stopwatch.lap("plan")
        if late is not None and not plan.ratings_on_device:
            entries = matrix = late.checked
        held_out = check_validation(validation, labels_of(user_items), matrix.shape, objective, unknown)
        where = None if checkpoint is None else checkpoints.prepare(checkpoint, resume_from)
        data = ""
        if where or resume_from is not None:
            data = data_identity(fingerprint.fingerprint(entries), unit)
        resumed = None if resume_from is None else checkpoints.read(resume_from, self, data, mapped=plan.offloaded)
        if resumed:
            check_frozen(resumed.state, init, frozen)
        stopwatch.lap("check")

        logger.info("plan:\n%s", plan)
        ratings = self._training_data(entries, plan, source)
        stopwatch.lap("convert")
        log_empty_rows(*ratings.degrees.values())
        check_preferences(objective, ratings.values.value_range)
        objective = self._objective(ratings.spread(objective), ratings.degrees).for_shape(matrix.shape)
        state = resumed.state if resumed else self._initial_state(ratings, plan, objective, init)
        completed = int(resumed.summary["n_iter"]) if resumed else 0
        seed_bits = self._seed_bits(resumed.summary.get("seed_bits") if resumed else None)
        solved = objective if unit is None else in_units(objective, unit)
        solver = self._solver(_seeded(plan, seed_bits), solved, ratings, state, completed)
        with closing(solver):  # ends threads and connections of ranks, however the fit ends
            progress = Progress(completed, list(resumed.summary["history"]) if resumed else [])
            if where is not None:
                writer = checkpoints.Writer(where, {"data": data, "seed_bits": seed_bits}, completed)
                progress = replace(progress, writer=writer)
            loop = FitLoop(
                self,
                solver,
                self._learner(user_items, matrix, objective, plan, ratings, weighted=weights is not None),
                _columns(columns if is_wide(columns) else user_items, matrix.shape),
                replace(observers, validation=held_out, unit=unit or 1.0),
                stopwatch,
                progress,
            )
            del state, resumed, init  # frees the initial factors after the first sweep
            stopwatch.lap("set up")
            loop.run(iterations)
        assert loop.learned is not None
        _warn_of_collapse(loop.learned, ratings.scale(objective), ratings.spread(objective), matrix.nnz)
        dispatch.remember(plan)
        stopwatch.lap("finish")
        self.timings_ = stopwatch.seconds
        return self

    def _learner(
        self, given: Any, matrix: Any, objective: Objective, plan: Plan, ratings: TrainingData, *, weighted: bool
    ) -> Callable[[State], Learned]:
        """Function from a state to `Learned`, for a fit on `given`, validated as `matrix`."""
        user_ids, item_ids = labels_of(given) or (None, None)
        learn = partial(
            Learned,
            objective,
            plan,
            total=summary_of(matrix).total if weighted else ratings.values.total,
            user_ids=user_ids,
            item_ids=item_ids,
            params=_io.jsonable(self.get_params(deep=False)),
            item_counts=ratings.degrees["item"],
            value_range=None if objective.is_implicit else ratings.values.value_range,
            frame_kind=getattr(given, "frame_kind", None),
        )

        @functools.cache
        def kept() -> dict[str, Any]:  # by the first half sweep a late check of the matrix is done, or nearly
            seen = getattr(matrix, "seen", None) if ratings.seen is None else ratings.seen
            values = None if weighted or isinstance(matrix, StoreMatrix) else matrix.data
            return {"seen": pattern(matrix) if seen is None else seen, "values": values, "item_likes": likes()}

        def likes() -> np.ndarray | None:
            low = (ratings.values.value_range or (1.0, 1.0))[0]
            if low > 0:
                return None
            return likes_of(
                matrix.matrices() if isinstance(matrix, StoreMatrix) else (matrix,), ratings.degrees["item"]
            )

        return lambda state: learn(state, **kept())

    def _seed_bits(self, kept: int | None) -> int | None:
        """Seed of random numbers in iterations: from a checkpoint, else by `random_state`; None if none are drawn."""
        return None

    def _training_data(
        self, matrix: sp.csr_array | StoreMatrix, plan: Plan, source: PreparedRatings | None
    ) -> TrainingData:
        """The ratings in both orientations, where the solver of the plan reads them; `source` if they are prepared."""
        return TrainingData.on_host(matrix, plan, source)

    def _initial_state(
        self, ratings: TrainingData, plan: Plan, objective: Objective, init: Init | None = None
    ) -> State:
        """Initial state of a fit; `init`, as checked, is computed if not given."""
        scale, seed = ratings.scale(objective), seed_of(self.random_state)
        init = init or self._init(ratings.shape)
        return self._first_state(ratings.degrees, plan, objective, ratings.mean, scale, seed, init)

    def _first_state(
        self,
        degrees: Mapping[Side, np.ndarray],
        plan: Plan,
        objective: Objective,
        mean: float,
        scale: float,
        seed: int,
        init: Init,
    ) -> State:
        """Initial state for ratings of these degrees, this mean and this scale."""
        start = replace(self._start(objective, scale), signed=init.signed, num_threads=plan.num_threads)
        counts = (degrees["user"], degrees["item"])
        drawn = initial_state(*counts, plan.factors, plan.dtype, objective, mean, seed, start)
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
        init = check_init(
            given,
            shape,
            settings.factors,
            settings.dtype,
            biases=self._objective().biases,
            nonnegative=bool(getattr(self, "nonnegative", False)),
        )
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
        metadata = _io.model_metadata(type(self).__name__, learned)
        tensors = _io.lasting_tensors(learned, include_seen=check_bool("include_seen", include_seen))
        tensors |= _io.state_tensors(learned.state)
        _io.save_model(path, metadata, tensors)

    def _restore(self, content: _io.ModelFile) -> Any:
        """Restore the state from a model file."""
        shape = (len(content.state.user), len(content.state.item))
        objective, settings = content.objective(self._objective().for_shape(shape)), self._settings()
        nnz = int(content.summary.get("nnz", 0))
        plan = plan_to_serve(objective, settings, shape, nnz)
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
                content.frame_kind,
                content.values,
                content.item_likes,
                int(content.summary["n_iter"]),
                list(content.summary["history"]),
            )
        )
        self.n_features_in_ = shape[1]
        return self


def fit_settings(model: Any, freeze: Any) -> tuple[Settings, int]:
    """Settings and iterations of a fit that keeps one side, if any; one iteration if that finds the minimum.

    Raises
    ------
    TypeError, ValueError
    """
    frozen: Side | None = None if freeze is None else check_choice("freeze", freeze, SIDES)
    settings, iterations = replace(model._settings(), frozen=frozen), check_int("iterations", model.iterations, 1)
    if frozen is not None and model._is_exact():
        return replace(settings, iterations=1), 1
    return settings, iterations


def data_identity(fingerprint: str, unit: float | None) -> str:
    """Fields of a checkpoint about the ratings: their fingerprint, and the unit of their weights."""
    return fingerprint if unit is None else f"{fingerprint}-{unit!r}"


def check_frozen(state: State, init: Init, frozen: Side | None) -> None:
    """Raise an error if the frozen factors of a checkpoint differ from those of `init`."""
    if frozen is not None and not np.array_equal(state.side(frozen).matrix, init.given[frozen].matrix):
        raise ValueError(
            f"resume_from holds other {frozen} factors than init, and freeze={frozen!r} keeps those of init; resume "
            "with the init of that run, or start a new one"
        )


def check_preferences(objective: Objective, value_range: tuple[float, float] | None) -> None:
    """Refuse implicit feedback without a positive value: it has no preferences, only dislikes.

    Raises
    ------
    RatingsError
    """
    if objective.is_implicit and value_range is not None and value_range[1] <= 0:
        raise RatingsError(
            f"user_items has no value above 0 (the largest is {value_range[1]:g}): in implicit feedback positive "
            "values are preferences and negative ones dislikes; for ratings of any sign use ExplicitALS"
        )


def _warn_of_collapse(learned: Learned, scale: float, spread: float, nnz: int) -> None:
    """Log a warning if `nnz` equal ratings leave nothing to learn, or factors are almost zero relative to `scale`."""
    objective, zeros = learned.objective, not learned.total
    low, high = learned.value_range or (0.0, 1.0)
    if low == high and nnz > 1:
        logger.warning(
            "all %d ratings are %g, so there is nothing to predict; for likes, clicks and purchases use ImplicitALS "
            "(hybridmf fit --model implicit)",
            nnz,
            low,
        )
        return
    users, items = (_root_mean_square(side.matrix) for side in (learned.state.user, learned.state.item))
    strength = math.sqrt(math.prod(objective.regularization))  # predictions depend on the product
    if not strength or users * items >= COLLAPSED * scale or (zeros and not users * items):
        return
    if objective.is_implicit:
        logger.warning(
            "the factors have shrunk to nothing: scores are below %g on average, and recommendations little more than "
            "the most popular items. regularization=%s is too strong here; lower it%s",
            COLLAPSED,
            objective.regularization,
            ", or increase alpha" if objective.alpha else "",
        )
        return
    usual = math.sqrt(math.prod(default_lambdas(objective.scaling, spread)))
    logger.warning(
        "the factors have shrunk to zero: they add less than %g %% of the ratings' scale (%.3g) to predictions. "
        "regularization=%s is too strong for ratings of this scale; try regularization=%.1g",
        100 * COLLAPSED,
        scale,
        objective.regularization,
        min(usual, strength / 10),
    )


def _root_mean_square(factors: np.ndarray) -> float:
    """Root mean square length of the nonzero rows; for inner products, the product of both sides' is a bound."""
    sample = factors[:: max(1, len(factors) // SAMPLED_ROWS)]
    squares = np.einsum("ij,ij->i", sample, sample)
    return math.sqrt(float(squares.sum(dtype=np.float64)) / max(1, int(np.count_nonzero(squares))))


def _one_or_pair(values: PerSide) -> float | tuple[float, float]:
    """A number for both sides, or one for users and one for items."""
    return values.user if values.user == values.item else (values.user, values.item)


def plan_to_serve(objective: Objective, settings: Settings, shape: tuple[int, int], nnz: int) -> Plan:
    """The plan for serving a model, which may have been fitted on a device that is missing here."""
    settings = replace(settings, reduction="auto")  # serving reduces nothing
    try:
        return make_plan(objective, settings, shape, nnz)
    except DeviceError as error:
        logger.warning("%s; the loaded model is served without it", error)
    # settings of the fit that need a GPU do not matter: new rows are solved exactly
    anywhere = replace(settings, device="auto", assembly="auto", precision="float32", method=None)
    return make_plan(objective, anywhere, shape, nnz)


def _seeded(plan: Plan, seed_bits: int | None) -> Plan:
    method: Any = plan.method
    return plan if seed_bits is None else plan.changed(method=replace(method, seed_bits=seed_bits))


def _columns(given: Any, shape: tuple[int, int]) -> Any:
    """Object that scikit-learn reads the number and names of features from: an array, or the columns of a frame."""
    if is_wide(given):
        return without_rows(given)
    if sp.issparse(given) or isinstance(given, (Ratings, Store)):
        return np.broadcast_to(np.float32(0), shape)
    return given


def check_labels(labels: Labels | None) -> None:
    """Reject labels that a model file cannot hold, before the fit.

    Raises
    ------
    TypeError
    """
    for name, ids in zip(("user_ids", "item_ids"), labels or (), strict=False):
        data_labels.check_storable_labels(name, ids)


def log_empty_rows(user_counts: np.ndarray, item_counts: np.ndarray) -> None:
    """Log the number of rows without entries, and therefore without factors, of each side."""
    users, items = (int(np.count_nonzero(counts == 0)) for counts in (user_counts, item_counts))
    logger.info("%d of %d users and %d of %d items have no entries", users, len(user_counts), items, len(item_counts))
