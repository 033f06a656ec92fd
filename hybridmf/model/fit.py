"""One fit, in one process or on several ranks: check, plan, place, start, loop.

Where the ratings are is the business of their source: `hybridmf.model.training.LocalRatings` has all of them in this
process, `hybridmf.model.ranked.RankedRatings` a share on each rank of a communicator. Everything else is the same for
`fit` of a model, `hybridmf.scale.fit` and `hybridmf.dask.fit`: all ranks run the same `Fit`, and the first of them has
the model, the observers and the checkpoints.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.objective import SIDES, Objective, State, default_lambdas
from ..core.validate import check_bool, check_choice, check_int, seed_of
from ..data.align import UNKNOWN
from ..data.labels import check_storable_labels
from ..errors import RatingsError
from ..plan import dispatch
from ..plan.types import Plan, Settings
from ..ranks.transport.communicator import Communicator, Single, agreed
from . import checkpoint as checkpoints
from .early_stopping import check_early_stopping, refuse_error
from .files import ModelFile, jsonable
from .learned import Learned, LearnedFeatures
from .loop import FitLoop, check_validation
from .stopwatch import Stopwatch
from .weights import in_units

logger = logging.getLogger("hybridmf")

COLLAPSED = 1e-3
"""Contribution of factors to predictions, relative to the scale of the ratings, below which they count as zero."""

SAMPLED_ROWS = 10_000  # about the number of rows that stand for all factors of a side


@dataclass(frozen=True)
class Options:
    """Arguments that all fits share; `hybridmf.model.base.FactorModel.fit` documents them."""

    validation: Any = None
    callback: Callable[[Any, dict[str, float]], Any] | None = None
    show_progress: bool = False
    checkpoint: Any = None
    resume_from: str | os.PathLike[str] | None = None
    unknown: str = "error"
    early_stopping: Any = None
    freeze: Any = None
    validation_users: int | None = None
    validate_every: int = 1
    track_objective: bool = False  # compute the objective even without observers
    continued: Any = None
    """A model of the same ratings and parameters whose iterations these continue, as a checkpoint's would."""
    on_device: bool = False
    """Leave the factors where the solver has them, until they are read; no warning if they are almost zero."""

    def __post_init__(self) -> None:
        check_bool("show_progress", self.show_progress)
        check_bool("track_objective", self.track_objective)
        check_choice("unknown", self.unknown, UNKNOWN)
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback must be callable, got {type(self.callback).__name__}")
        for name in ("validation_users", "validate_every"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, 1)
        if self.validation is None and (self.validation_users is not None or self.validate_every != 1):
            raise ValueError("validation_users and validate_every belong to held-out entries: pass them as validation")
        object.__setattr__(self, "early_stopping", check_early_stopping(self.early_stopping))
        if self.early_stopping is not None and self.validation is None:
            raise ValueError("early_stopping measures held-out entries: pass them as validation")

    def settings(self, model: Any) -> Settings:
        """Settings of a fit that keeps one side, if any; one iteration if that finds the minimum."""
        frozen = None if self.freeze is None else check_choice("freeze", self.freeze, SIDES)
        settings: Settings = replace(model._settings(), frozen=frozen)
        return replace(settings, iterations=1) if frozen is not None and model._is_exact() else settings

    def on(self, rank: int) -> Options:
        """The options of a rank: only the first one is observed."""
        if rank == 0:
            return self
        return Options(checkpoint=self.checkpoint, resume_from=self.resume_from, freeze=self.freeze)


class Fit:
    """One fit of a model to the ratings of a source; all ranks of the communicator make one and run it together."""

    def __init__(
        self,
        model: Any,
        source: Any,
        options: Options,
        communicator: Communicator | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.model, self.source = model, source
        self.communicator = Single() if communicator is None else communicator
        self.first = self.communicator.rank == 0
        self.options = options.on(self.communicator.rank)
        self.stopwatch = Stopwatch() if stopwatch is None else stopwatch

    def run(self) -> Any:
        """The fitted model, on the first rank; None on the others."""
        watch, source = self.stopwatch, self.source
        self.check()
        watch.lap("check")
        plan = source.plan(self.objective, self.settings)
        if self.first:
            logger.info("plan:\n%s", plan)
        watch.lap("plan")
        plan = source.place(plan)
        watch.lap("convert")
        state = self.start(plan)
        solver = source.solver(
            self.seeded(plan), in_units(self.objective, source.unit), state=state, completed=self.completed
        )
        del state  # frees the initial factors after the first sweep
        with source.closing(solver):
            loop = FitLoop(self, solver, self._learner(plan))
            watch.lap("set up")
            with loop.running(self.settings.iterations):
                for iteration in loop.iterations():
                    for step in solver.sweep():
                        solver.keep(step, solver.solve(step))
                        loop.changed()
                    if loop.completes(iteration):
                        break
        dispatch.remember(plan)
        if not self.first:
            return None
        if not self.options.on_device:
            warn_of_collapse(loop.learned, source.scale(self.objective), source.spread(self.objective), plan.nnz)
        watch.lap("finish")
        self.model.timings_ = watch.seconds
        return self.model

    def check(self) -> None:
        """Everything that can fail before the plan."""
        model, source, options = self.model, self.source, self.options
        model._feature_weights()  # validated even if unused
        self.objective: Objective = model._objective()
        self.settings = options.settings(model)
        check_labels(source.labels)
        rule = options.early_stopping
        if rule is not None and rule.metric is not None and self.objective.is_implicit:
            refuse_error("early_stopping: metric", rule.metric)
        self.init = model._init(source.shape, source.labels, self.settings.frozen)
        self.held_out = check_validation(
            options.validation, source.labels, source.shape, self.objective, options.unknown
        )
        self.folder = None
        if self.first and options.checkpoint is not None:
            self.folder = checkpoints.prepare(options.checkpoint, options.resume_from)

    def start(self, plan: Plan) -> State:
        """The initial state, or that of a checkpoint, and the objective for these ratings."""
        model, source = self.model, self.source
        resumed, data = self._resumed(plan)
        summary: dict[str, Any] = {"n_iter": 0, "history": []} if resumed is None else resumed.summary
        if self.options.continued is not None:
            known = self.options.continued._learned
            summary = {"n_iter": known.n_iter, "history": known.history}
        self.completed, self.history = agreed(self.communicator, int(summary["n_iter"])), list(summary["history"])
        if self.first:
            log_empty_rows(*(source.degrees[side] for side in SIDES))
        check_preferences(self.objective, source.value_range)
        spread = source.spread(self.objective)
        self.objective = model._objective(spread, source.degrees).for_shape(source.shape)
        if self.options.continued is not None:
            state: State = known.state
        elif self.options.resume_from is None:
            seed = agreed(self.communicator, seed_of(model.random_state) if self.first else 0)
            state = model._initial_state(source, plan, self.objective, self.init, seed)
        else:
            state = source.shared(None if resumed is None else resumed.state, plan, self.objective)
        self.seed_bits = model._seed_bits(summary.get("seed_bits"))
        self.writer = None
        if self.folder is not None:
            kept = {"data": data, "seed_bits": self.seed_bits}
            self.writer = checkpoints.Writer(self.folder, kept, self.completed)
        self.init = None  # holds arrays
        return state

    def seeded(self, plan: Plan) -> Plan:
        """The plan with the seed of random numbers in iterations, for methods that draw them."""
        method: Any = plan.method
        return plan if self.seed_bits is None else plan.changed(method=replace(method, seed_bits=self.seed_bits))

    def _resumed(self, plan: Plan) -> tuple[ModelFile | None, str]:
        """The checkpoint to resume from, on the first rank, and the identity of the ratings."""
        resume_from, unit = self.options.resume_from, self.source.unit
        if self.options.checkpoint is None and resume_from is None:
            return None, ""
        data = self.source.fingerprint()
        data = data if unit is None else f"{data}-{unit!r}"
        resumed, frozen = None, self.settings.frozen
        if self.first and resume_from is not None:
            resumed = checkpoints.read(resume_from, self.model, data, mapped=plan.offloaded)
            ours = {} if frozen is None else {frozen: self.init.given[frozen].matrix}
            if any(not np.array_equal(resumed.state.side(side).matrix, matrix) for side, matrix in ours.items()):
                raise ValueError(
                    f"resume_from holds other {frozen} factors than init, and freeze={frozen!r} keeps those of init; "
                    "resume with the init of that run, or start a new one"
                )
        self.stopwatch.lap("check")
        return resumed, data

    def _learner(self, plan: Plan) -> Callable[[State], Learned]:
        source, objective = self.source, self.objective
        user_ids, item_ids = source.labels or (None, None)
        learn = functools.partial(
            Learned,
            objective,
            plan,
            total=source.total,
            user_ids=user_ids,
            item_ids=item_ids,
            params=jsonable(self.model.get_params(deep=False)),
            item_counts=source.degrees["item"],
            value_range=None if objective.is_implicit else source.value_range,
            frame_kind=source.frame_kind,
        )
        # by the first half sweep a late check of the matrix is done, or nearly
        kept: Callable[[], dict[str, Any]] = functools.cache(lambda: source.kept() | self._features())
        return lambda state: learn(state, **kept())

    def _features(self) -> dict[str, Any]:
        source, found = self.source, {}
        for side, features in source.features.items():
            described = np.diff(features.matrix.indptr) > 0
            cold = np.flatnonzero(described & (source.degrees[side] == 0))
            cold = cold[:0] if side == self.settings.frozen else cold
            found[side] = LearnedFeatures(features, self.model._feature_weights().of(side), cold)
        return {"features": found}


def check_labels(labels: Any) -> None:
    """Reject labels that a model file cannot hold, before the fit."""
    for name, ids in zip(("user_ids", "item_ids"), labels or (), strict=False):
        check_storable_labels(name, ids)


def check_preferences(objective: Objective, value_range: tuple[float, float] | None) -> None:
    """Refuse implicit feedback without a positive value: it has no preferences, only dislikes."""
    if objective.is_implicit and value_range is not None and value_range[1] <= 0:
        raise RatingsError(
            f"user_items has no value above 0 (the largest is {value_range[1]:g}): in implicit feedback positive "
            "values are preferences and negative ones dislikes; for ratings of any sign use ExplicitALS"
        )


def log_empty_rows(user_counts: np.ndarray, item_counts: np.ndarray) -> None:
    """Log the number of rows without entries, and therefore without factors, of each side."""
    users, items = (int(np.count_nonzero(counts == 0)) for counts in (user_counts, item_counts))
    logger.info("%d of %d users and %d of %d items have no entries", users, len(user_counts), items, len(item_counts))


def warn_of_collapse(learned: Learned | None, scale: float, spread: float, nnz: int) -> None:
    """Log a warning if `nnz` equal ratings leave nothing to learn, or factors are almost zero relative to `scale`."""
    assert learned is not None
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
