"""Search of hyperparameters; its trials share the prepared ratings and continue where they stopped.

Successive halving (Jamieson and Talwalkar 2016): settings are fitted for a few iterations at half of a low rank and
evaluated on a few validation users; the best third continues at that rank to more iterations and more users. Where a
fit of a few iterations costs about as much as a whole one, as of small ratings on a GPU, each setting is fitted whole
instead, and a Gaussian process of the values proposes the next one (Jones, Schonlau and Welch 1998). Then the best
setting and its neighbours are fitted at higher ranks, as long as that helps.
"""

from __future__ import annotations

import contextlib
import functools
import html
import importlib
import itertools
import json
import logging
import math
import os
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
from scipy.stats import loguniform, norm, qmc, rv_continuous, rv_discrete

from .als import ExplicitALS, ImplicitALS
from .core.files import write_atomically
from .core.frames import pandas_frame
from .core.logs import quiet
from .core.objective import SIDES, Objective, Side, default_implicit_lambda
from .core.progress import progress_bar
from .core.sparse import RowColumns, entries_in, entry_rows, keep_entries, take_rows
from .core.system import available_cores
from .core.table import html_table
from .core.validate import as_csr, check_choice, check_int, check_nonempty, check_real, check_rng, make_csr
from .cpu.als import single_threaded_blas
from .data.align import align, labels_of
from .data.features import Features, align_features
from .errors import HybridMFError
from .metrics import Metric, _checked_metrics, _checked_names, _measure
from .model.base import FactorModel
from .model.early_stopping import LOWER_IS_BETTER, refuse_error
from .model.estimator import unfitted
from .model.fit import Fit, Options
from .model.loop import check_validation
from .model.popularity import PopularityRecommender
from .model.prepared import PreparedRatings
from .model.recommenders import WithSeen
from .model.training import LocalRatings, check_serves_features, compile_ahead
from .plan.make import plan_for
from .plan.types import Plan
from .ratings import Ratings, as_ratings, split
from .sgd import SGD

logger = logging.getLogger("hybridmf")

spread_over = functools.cache(loguniform)  # SciPy takes milliseconds to make one

RUNGS = ((0.3, 1000), (0.5, 2000), (1.0, 10_000))
"""Share of the iterations, and the number of validation users, of each rung.

The first rung has half the rank: its order of the settings is closer to that of whole fits than the order after a
fifth of the iterations at the whole rank, in about half the time (Last.fm 2K, ML-1M).
"""

LEAST_RANK = 16
"""Least rank of the first rung."""

KEPT = 3
"""One trial of so many reaches the next rung."""

DRAWN = 9
"""Trials on the first rung of a bracket."""

PATIENCE = 2
"""Brackets in a row without a gain, after which the exploration ends."""

GAIN = 2e-3
"""Relative improvement below which a bracket or a higher rank counts as none."""

LADDER = (64, 128, 256, 512, 1024)
"""Ranks of the default space; settings are compared at the first one."""

CHEAP = 0.35
"""Largest cost of a trial on the first rung, relative to a whole one, at which trials start there."""

TRIAL_SECONDS = 5e-3
"""Of a trial on a GPU beside its iterations, for launches and Python."""

ROW_SECONDS = 1e-7
"""The same for each user and each item: tables, copies, evaluation."""

AT_A_TIME, BRIEF = 2, 1.0
"""Whole trials on a GPU at a time, and seconds of a longer one, which takes turns: tables, copies and the evaluation
of one take the host while another's iterations take the GPU."""

IN_TURN = 5
"""Whole trials that do not begin before the one before has a value, which tells most where there are few."""

LAMBDAS = ("strength", "regularization")
"""Names of the coordinate of lambda in default spaces and in those of callers."""

STRONGER = 3.0
"""Factor of lambda of the second whole trial; the first one has the middle of the likely settings."""

PROPOSED_IDLE = 18
"""Proposals in a row without a gain, after which those of a rank end."""

CLOSE = 1.0
"""Distance from the best value, relative to that of the median, within which differences of values count fully."""

MODELLED = 100
"""Whole trials that the proposals depend on, the newest ones."""

PLACES = 512
"""Places anywhere, and as many beside the best, among which the next proposal is."""

LENGTH, LENGTHS = 0.6, (0.3, 2.5)
"""Length scale of the process for each coordinate, first and limits."""

LIKELY_WEIGHTS = (0.03, 1.0)
"""Unobserved weights of the first settings."""

LIKELY_STRENGTHS = (1.7, 6.0)
"""lambda of the first settings, relative to its default times the root of the unobserved weight.

The best of a grid of 105 settings on each of two forms of MovieLens 100K and three shops are in these ranges, and so
are those of Last.fm 2K and MovieLens 1M, which had no part in the choice.
"""

SPANS = (math.log(100), math.log(200))
"""Units of the logarithms of lambda and of the unobserved weight in `Space.aligned`: their ranges by default."""

RIDGE = 0.25
"""Power of the unobserved weight with which the best lambda, relative to its default, grows."""

WEIGHTS = 9
"""Unobserved weights between whose penalties others are interpolated."""

REDRAWN = 50
"""Draws until a new setting is found; a space of few lists may have been tried as a whole."""

AT_FIRST_RANK = 0.5
"""Share of the budget that is spent at the first rank at most."""

WIDTHS = (0.2, 0.1, 0.05, 0.025)
"""Standard deviation of neighbours of the best point of the unit cube, bracket by bracket."""

BUDGET = "2min"

CORES_A_RANK = 4
"""Cores for each rank whose kernels are compiled ahead; each has four that take the compiler longer than 0.5 s."""

BY = '"ndcg@k", "recall@k", "precision@k", "map@k", "mrr@k", "hit_rate@k", "rmse" or "mae"'
"""Metrics to search by."""

MODELS: dict[str, type[FactorModel]] = {"implicit": ImplicitALS, "explicit": ExplicitALS}

NOT_SEARCHED = ("device", "init", "iterations", "random_state", "num_threads", "gpu_memory_limit")


@dataclass
class Trial:
    """One setting of a search, fitted and evaluated as far as it was promising.

    Attributes
    ----------
    number : int
        Position in the order of starts; 0 has the parameters of the given model.
    params : dict
        Searched parameters of the estimator; "factors" is the rank at which `value` was measured.
    iterations : int
        Completed iterations at this rank.
    users : int
        Validation users of the last evaluation.
    value : float or None
        The metric of these users after these iterations; None if the trial failed or did not begin.
    seconds : float
        Time of its fits and evaluations.
    finished : float
        Seconds from the start of the search to the end of the last evaluation.
    state : {"complete", "stopped", "failed"}
        "complete": evaluated after all iterations. "stopped": others were better, or the budget was used up.
    reason : str
        Why it failed.
    """

    number: int
    params: dict[str, Any]
    iterations: int = 0
    users: int = 0
    value: float | None = None
    seconds: float = 0.0
    finished: float = 0.0
    state: str = "stopped"
    reason: str = ""
    _point: np.ndarray | None = field(default=None, repr=False)
    _model: Any = field(default=None, repr=False)
    _rank: int = field(default=0, repr=False)
    _rung: int = field(default=-1, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The attributes, and the parameters by their names."""
        names = ("iterations", "users", "value", "seconds", "finished", "state", "reason")
        return {"number": self.number} | self.params | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SearchResult:
    """Result of `search`.

    Attributes
    ----------
    best : estimator or PopularityRecommender
        The winner, fitted on all ratings: those of training and validation.
    best_params : dict
        Its searched parameters; empty if popularity wins.
    best_value : float
        Its metric on the validation users, before the fit on all ratings.
    metric : str
    default_value, popularity_value : float or None
        The same metric of the given model with its own parameters, at the lowest rank of the space (None if it failed
        or Ctrl-C came before its end), and of the most popular items (for "rmse" and "mae": of the damped means of the
        items).
    trials : tuple of Trial
        In the order of their starts.
    seconds : float
        Time of the search and the last fit.
    interrupted : bool
        Whether Ctrl-C ended the search.
    """

    best: Any
    best_params: dict[str, Any]
    best_value: float
    metric: str
    default_value: float | None
    popularity_value: float
    trials: tuple[Trial, ...] = field(repr=False)
    seconds: float
    interrupted: bool = False

    def __str__(self) -> str:
        simple, one = _baseline(self.metric), len(self.trials) == 1
        settings = ", ".join(f"{name}={value!r}" for name, value in self.best_params.items()) or simple
        unknown = "failed" if self.trials[0].state == "failed" else "not complete"
        default = unknown if self.default_value is None else f"{self.default_value:.4f}"
        gain = "" if self.best_value != self.default_value else ", which no other setting improves"
        return (
            f"{self.metric} {self.best_value:.4f} with {settings}{gain} (without search: {default}, {simple}: "
            f"{self.popularity_value:.4f}); {len(self.trials)} trial{'s' * (not one)} in {self.seconds:.1f} s"
        )

    def to_frame(self) -> Any:
        """A pandas data frame with one row for each trial; an ImportError without pandas."""
        return pandas_frame([trial.as_dict() for trial in self.trials], "use to_json_lines()")

    def to_json_lines(self, path: str | os.PathLike[str] | None = None) -> str:
        """One JSON object for each trial, one a line; if `path` is given, also written to a file, atomically."""
        text = "".join(json.dumps(trial.as_dict(), default=_plain) + "\n" for trial in self.trials)
        if path is not None:
            write_atomically(path, text.encode())
        return text

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """The metric over each parameter and over seconds: `hybridmf.plots.trials`, saved if `path` is given."""
        from . import plots

        figure = plots.trials(self)
        if path is not None:
            plots.save(figure, path)
        return figure

    def code(self) -> str:
        """Python code that makes the winner and fits it on `ratings`; `init` there is that of the searched model."""
        if isinstance(self.best, PopularityRecommender):
            return "hmf.metrics.PopularityRecommender().fit(ratings)"
        given = _given(self.best)
        texts = {name: "init" if name == "init" else repr(_literal(value)) for name, value in given.items()}
        arguments = ", ".join(f"{name}={text}" for name, text in texts.items())
        sides = self.best._fitted().features
        features = "".join(f", {side}_features={side}_features" for side in sides)
        return f"hmf.{type(self.best).__name__}({arguments}).fit(ratings{features})"

    def _repr_html_(self) -> str:
        values = ["" if trial.value is None else f"{trial.value:.4f}" for trial in self.trials]
        rows = [
            [trial.number, trial.params, trial.iterations, trial.users, value, trial.state]
            for trial, value in zip(self.trials, values, strict=True)
        ]
        head = ["trial", "parameters", "iterations", "users", self.metric, "state"]
        return f"<p>{html.escape(str(self))}</p>{html_table(head, rows, '><>>><')}"


def _plain(value: Any) -> Any:
    """A NumPy scalar as a Python number."""
    return value.item() if isinstance(value, np.generic) else value


def _literal(value: Any) -> Any:
    """A value whose repr is Python code: types of NumPy by their names."""
    return np.dtype(value).name if isinstance(value, (type, np.dtype)) else _plain(value)


def _given(model: Any) -> dict[str, Any]:
    """The parameters of an estimator that differ from the defaults of its class."""
    usual = type(model)().get_params()
    given = {name: value for name, value in model.get_params().items() if value is not usual[name]}
    return {
        name: value for name, value in given.items() if type(value) is not type(usual[name]) or value != usual[name]
    }


# ------------------------------------------------------------------------------------------------------- the space


class Distribution(Protocol):
    """A distribution of scipy.stats."""

    def ppf(self, q: float) -> Any:
        """The quantile."""

    def cdf(self, x: float) -> Any:
        """The probability of values up to x."""


Values = Distribution | Sequence[Any]
"""The values of a parameter."""


def value_at(values: Values, u: float) -> Any:
    """The value at a place in [0, 1]."""
    if isinstance(values, Sequence):
        return values[min(int(u * len(values)), len(values) - 1)]
    found = values.ppf(min(max(u, 1e-9), 1 - 1e-9))
    return int(found) if hasattr(values, "pmf") else float(found)


def values_at(values: Values, places: np.ndarray) -> np.ndarray:
    """The values at places in [0, 1]."""
    if isinstance(values, Sequence):
        return np.array(values)[np.minimum((places * len(values)).astype(np.int64), len(values) - 1)]
    return np.asarray(values.ppf(np.clip(places, 1e-9, 1 - 1e-9)))


def place_of(values: Values, value: Any) -> float:
    """The place of a value."""
    return (values.index(value) + 0.5) / len(values) if isinstance(values, Sequence) else float(values.cdf(value))


@dataclass(frozen=True)
class Space:
    """Parameters as functions of points of the unit cube.

    Attributes
    ----------
    ranks : list of int
        Ascending.
    dimensions : dict
        Values by the name of each coordinate.
    first : array, shape (number of coordinates,), or None
        Point of the given model's own parameters.
    params : callable
        Parameters of an estimator by the values of the coordinates.
    likely : callable or None
        Moves a point to the part of the cube where the best settings of other ratings are.
    aligned : callable or None
        Coordinates of points in which the best lambda depends little on the weight of unobserved pairs.
    """

    ranks: list[int]
    dimensions: dict[str, Values]
    first: np.ndarray | None = None
    params: Callable[[dict[str, Any]], dict[str, Any]] = dict
    likely: Callable[[np.ndarray], np.ndarray] | None = None
    aligned: Callable[[np.ndarray], np.ndarray] | None = None

    def at(self, point: np.ndarray) -> dict[str, Any]:
        """Parameters of an estimator at a point."""
        return self.params(
            {name: value_at(values, u) for (name, values), u in zip(self.dimensions.items(), point, strict=True)}
        )

    def laid(self, points: np.ndarray) -> np.ndarray:
        """Coordinates in which points are alike if their values are."""
        found = points.copy()
        for column, values in zip(found.T, self.dimensions.values(), strict=True):
            if isinstance(values, Sequence):
                column[:] = (np.minimum(np.floor(column * len(values)), len(values) - 1) + 0.5) / len(values)
        return found if self.aligned is None else self.aligned(found)


def given_space(space: Mapping[str, Any], model: FactorModel) -> Space:
    """The caller's space, each of whose values the estimator accepts."""
    known = [name for name in model.get_params() if name not in NOT_SEARCHED]
    if not isinstance(space, Mapping):
        raise TypeError(f'space must be a dict such as {{"regularization": [0.1, 1, 10]}}, got {space!r}')
    dimensions: dict[str, Values] = {}
    for name, values in space.items():
        if name not in known:
            raise ValueError(f"space has {name!r}, which is no parameter to search; known are {', '.join(known)}")
        if isinstance(values, np.ndarray) and values.ndim == 1:
            values = values.tolist()
        if name == "factors" and hasattr(values, "ppf"):
            raise TypeError("space['factors'] must be a list of ranks, which are searched from the lowest on")
        if isinstance(values, (rv_continuous, rv_discrete)):
            raise TypeError(
                f"space[{name!r}] is a family of distributions without parameters; give them, as in loguniform(0.01, 1)"
            )
        if hasattr(values, "ppf"):
            edges = [value_at(values, 0.0), value_at(values, 1.0)]
        elif isinstance(values, Sequence) and not isinstance(values, (str, bytes)) and len(values):
            edges = values = [_plain(value) for value in values]
        else:
            raise TypeError(
                f"space[{name!r}] must be a list of values or a distribution of scipy.stats, such as "
                f"loguniform(0.01, 1), got {values!r}"
            )
        if all(type(edge) is float for edge in edges) and np.isfinite(edges).all():  # one of many would take long
            edges = [min(edges), max(edges)]
        for edge in edges:
            _check_value(model, name, edge)
        dimensions[name] = values
    ranks = dimensions.pop("factors", [model.factors])
    assert isinstance(ranks, Sequence)
    return Space(sorted(set(ranks)), dimensions)


def _check_value(model: FactorModel, name: str, value: Any) -> None:
    try:
        changed = unfitted(model, **{name: value})
        changed._settings()
        changed._objective()
    except (TypeError, ValueError) as error:
        if name in str(error):  # other messages are about combinations, which another parameter of the space may mend
            raise type(error)(f"space[{name!r}]: {error}") from error


def default_ranks(model: FactorModel, shape: tuple[int, int]) -> list[int]:
    """Ranks of the default space, or that of the model."""
    if "factors" in _given(model) or model.init is not None:  # which has this rank
        return [model.factors]
    return [rank for rank in LADDER if rank <= max(LADDER[0], min(shape) // 2)]


def default_space(model: FactorModel, prepared: PreparedRatings) -> Space:
    """The space of a model for ratings; parameters that differ from the defaults of its class stay as they are.

    lambda is a multiple, the coordinate "strength", of the default lambda. With the power nu, the penalty of a row is
    its count to that power times lambda: lambda is divided by the mean of these factors, so a multiple has about the
    same effect with each nu.
    """
    fixed = [name for name in _given(model) if name not in NOT_SEARCHED]
    implicit, matrix, degrees = isinstance(model, ImplicitALS), prepared.user_items, prepared.degrees
    ends = prepared.values.ends  # of absolute values
    dimensions: dict[str, Values] = {"strength": spread_over(0.1, 10) if implicit else spread_over(0.2, 5)}
    if implicit:
        dimensions |= {"unobserved_weight": spread_over(5e-3, 1), "nu": [0.0, 0.5, 1.0]}
        dimensions |= {"alpha": spread_over(1e-3, 1)} if ends[0] != ends[1] else {}
    elif not isinstance(model, SGD):
        dimensions["nu"] = [0.5, 1.0]
    usual = {"strength": 1.0, "unobserved_weight": 0.1, "nu": 0.0 if implicit else 0.5, "alpha": 1e-3}
    of = {"strength": "regularization", "nu": "regularization_scaling"}
    dimensions = {name: values for name, values in dimensions.items() if of.get(name, name) not in fixed}
    weights = [*of.values(), "alpha", "unobserved_weight", "count_unobserved"]
    first = None
    if not set(weights) & set(fixed):
        first = np.array([place_of(values, usual[name]) for name, values in dimensions.items()])
    own = model.get_params()
    usual_lambda = default_implicit_lambda(degrees)["regularization"] if implicit else 0.0

    def implicit_params(drawn: dict[str, Any]) -> dict[str, Any]:
        values = usual | {name: own[name] for name in fixed if name in usual} | drawn
        weight, nu = values["unobserved_weight"], values["nu"]
        counts = [degrees[side] + weight * size for side, size in zip(SIDES, matrix.shape[::-1], strict=True)]
        factor = math.sqrt(math.prod(float(np.mean(count**nu)) for count in counts))
        found = {
            "regularization": _short(values["strength"] * usual_lambda / factor),
            "unobserved_weight": _short(weight),
            "alpha": _short(values["alpha"]) if values["alpha"] >= 0.01 else 0.0,
            "regularization_scaling": nu,
            "count_unobserved": nu > 0,
        }
        return {name: value for name, value in found.items() if name not in fixed}

    spread = 1.0
    if not implicit:
        spread = float(np.std(matrix.data)) or float(np.sqrt(np.mean(matrix.data**2))) or 1.0

    def explicit_params(drawn: dict[str, Any]) -> dict[str, Any]:
        nu = drawn.get("nu", 1.0)
        found: dict[str, Any] = {}
        if "strength" in drawn:
            at_nu_1 = 0.05 if isinstance(model, SGD) else 0.1
            found["regularization"] = _short(drawn["strength"] * at_nu_1 * 144 ** (1 - nu) * spread)
        return found | ({"regularization_scaling": nu} if "nu" in drawn else {})

    return Space(
        default_ranks(model, matrix.shape), dimensions, first, implicit_params if implicit else explicit_params
    )


def with_likely(space: Space, model: FactorModel, prepared: PreparedRatings) -> Space:
    """A space whose first settings are near those that are best for other implicit feedback."""
    names = list(space.dimensions)
    lambda_name = next((name for name in LAMBDAS if name in names), "")
    if not isinstance(model, ImplicitALS) or not lambda_name:
        return space
    degrees, shape = prepared.degrees, prepared.shape
    usual, values = default_implicit_lambda(degrees)["regularization"], prepared.user_items.data
    low, high = prepared.values.value_range or (0.0, 0.0)
    mean = high if low == high else float(np.mean(values if low >= 0 else np.abs(values)))

    def move(point: np.ndarray, name: str, value: float) -> None:
        place = near(space.dimensions[name], value)
        if 0 < place < 1:  # else the space is elsewhere
            point[names.index(name)] = place

    def likely(point: np.ndarray) -> np.ndarray:
        drawn, point = dict(zip(names, point, strict=True)), point.copy()
        if "nu" in names:
            point[names.index("nu")] = (1 + 2 * drawn["nu"]) / 3  # 0.5 or 1: 0 is never better by 1 %
        objective = unfitted(model, **space.at(point))._objective(1.0, degrees)
        confidence = 1 + objective.alpha * mean
        if "unobserved_weight" in names:
            move(point, "unobserved_weight", confidence * between(LIKELY_WEIGHTS, drawn["unobserved_weight"]))
            objective = unfitted(model, **space.at(point))._objective(1.0, degrees)
        strength = between(LIKELY_STRENGTHS, drawn[lambda_name])
        strength *= math.sqrt(objective.unobserved_weight * confidence)  # equal for equal multiples of all weights
        if lambda_name == "regularization":
            strength *= usual / penalty_factor(objective)
        move(point, lambda_name, strength)
        return point

    def penalty_factor(objective: Objective) -> float:
        counted = objective.for_shape((shape[0], shape[1]))
        factors = [np.mean((degrees[side] + counted.added.of(side)) ** counted.scaling.of(side)) for side in SIDES]
        return math.sqrt(math.prod(float(factor) for factor in factors))

    @functools.cache
    def penalties() -> tuple[np.ndarray, np.ndarray]:
        known = np.log(values_at(space.dimensions["unobserved_weight"], np.linspace(0, 1, 100)))
        weights = np.linspace(known.min(), known.max(), WEIGHTS)
        models = [unfitted(model, unobserved_weight=float(weight)) for weight in np.exp(weights)]
        return weights, np.log([penalty_factor(each._objective(1.0, degrees)) for each in models])

    def aligned(points: np.ndarray) -> np.ndarray:
        pair = [names.index(name) for name in (lambda_name, "unobserved_weight")]
        strengths, weights = (np.log(values_at(space.dimensions[names[each]], points[:, each])) for each in pair)
        if lambda_name == "regularization":
            strengths += np.interp(weights, *penalties())
        found = points.copy()
        found[:, pair] = np.stack([strengths - RIDGE * weights, weights], axis=1) / SPANS
        return found

    fixed = not {"regularization_scaling", "count_unobserved"} & set(names)
    both = [space.dimensions.get(name, ()) for name in (lambda_name, "unobserved_weight")]
    return replace(space, likely=likely, aligned=aligned if fixed and all(map(are_positive, both)) else None)


def are_positive(values: Values) -> bool:
    """Whether all of them are numbers above 0."""
    if isinstance(values, Sequence):
        return len(values) > 0 and all(isinstance(each, (int, float)) and each > 0 for each in values)
    return bool(values_at(values, np.zeros(1))[0] > 0)


def between(ends: tuple[float, float], u: float) -> float:
    """A value between two others, on a logarithmic scale."""
    return float(ends[0] * (ends[1] / ends[0]) ** u)


def near(values: Values, value: float) -> float:
    """The place of a value, or of the nearest one of a list of numbers; 0 if there is none."""
    if not isinstance(values, Sequence):
        return place_of(values, value)
    numbers = [each for each in values if isinstance(each, (int, float)) and each > 0]
    if not numbers:
        return 0.0
    return place_of(values, min(numbers, key=lambda each: abs(math.log(each / value))))


def _with_feature_weights(space: Space, model: FactorModel, features: Mapping[Side, Any]) -> Space:
    """A default space in which weights of the features of some sides are searched, too."""
    names = [f"{side}_feature_weight" for side in features if f"{side}_feature_weight" not in _given(model)]
    added: dict[str, Values] = {name: loguniform(0.03, 30) for name in names}
    first = space.first
    if first is not None:
        first = np.array([*first, *(place_of(values, 1.0) for values in added.values())])

    def params(drawn: dict[str, Any]) -> dict[str, Any]:
        others = {name: value for name, value in drawn.items() if name not in added}
        return space.params(others) | {name: _short(drawn[name]) for name in added}

    return replace(space, dimensions=space.dimensions | added, first=first, params=params)


def _features_of(ratings: Ratings, model: FactorModel, given: Mapping[Side, Any]) -> dict[Side, Features]:
    """Features of the users and items of the ratings alone: those without entries have no part in a trial."""
    found: dict[Side, Features] = {}
    if given:
        check_serves_features(model, given)
    for side, value in given.items():
        n_rows = ratings.shape[SIDES.index(side)]
        labels = ratings.user_ids if side == "user" else ratings.item_ids
        aligned = align_features(f"{side}_features", value, labels, n_rows)
        if len(aligned) > n_rows:
            aligned = Features(aligned.matrix[:n_rows], aligned.names, labels)
        found[side] = aligned
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")


# ------------------------------------------------------------------------------------------------------ the search


@dataclass
class Budget:
    """Seconds and trials of a search.

    Attributes
    ----------
    seconds, trials
        Limits; None for none.
    reserved : float
        Seconds of the last fit, on all ratings.
    """

    seconds: float | None
    trials: int | None
    reserved: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def has_time(self, seconds: float, share: float = 1.0) -> bool:
        """Whether so many seconds are left of this share of the budget."""
        return self.seconds is None or self.spent + seconds + self.reserved < share * self.seconds

    def has_trial(self, started: int, share: float = 1.0) -> bool:
        """Whether another trial may start after so many."""
        return self.trials is None or started < math.ceil(share * self.trials)


class Searcher:
    """One search in progress."""

    def __init__(
        self,
        model: FactorModel,
        prepared: PreparedRatings,
        validation: sp.csr_array,
        space: Space,
        metric: str,
        budget: Budget,
        rng: np.random.Generator,
        report: Callable[[Searcher], Any],
        features: Mapping[Side, Features] | None = None,
        own: Mapping[str, Metric] | None = None,
    ) -> None:
        self.features, self.own = features or {}, own or {}  # `own`: the caller's metric
        self.model, self.prepared, self.validation, self.space = model, prepared, validation, space
        self.metric, self.budget, self.rng, self.report = metric, budget, rng, report
        self.sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
        self.points = qmc.Sobol(len(space.dimensions), seed=rng) if space.dimensions else None
        counted = validation.data > 0 if metric not in LOWER_IS_BETTER else np.ones(validation.nnz, dtype=bool)
        entries = np.diff(keep_entries(validation, counted).indptr)
        self.users = rng.permutation(np.flatnonzero(entries))
        if len(self.users) > RUNGS[-1][1]:  # the others have no part in any evaluation
            evaluated = np.sort(self.users[: RUNGS[-1][1]])
            part, pointer = take_rows(validation, evaluated), np.zeros(validation.shape[0] + 1, np.int64)
            pointer[evaluated + 1] = np.diff(part.indptr)
            self.validation = make_csr(np.cumsum(pointer), part.indices, part.data, validation.shape)
        self.trials: list[Trial] = []
        self.best: Trial | None = None
        self._running: deque[tuple[Trial, Future[None]]] = deque()
        self._starts: dict[int, bool] = {}
        self._seen: dict[int, RowColumns] = {}

    def run(self) -> None:
        """All stages, until the budget is used up or nothing gets better."""
        if self.points is not None and self._is_whole(self.space.ranks[0]):  # import it while the first trials run
            threading.Thread(target=importlib.import_module, args=("sklearn.gaussian_process",), daemon=True).start()
        self._compile_ranks(0)
        own = self.start(self.space.ranks[0], self.space.first, {})
        if self.points is None:
            self._complete(own)
        else:
            self._explore(own)
        self._climb()
        if self.points is not None:
            self._refine()

    def measured(self, model: Any, users: int = RUNGS[-1][1]) -> float:
        """The metric of the first of the validation users, which are in random order."""
        chosen = np.sort(self.users[:users])
        learned = getattr(model, "_learned", None)
        if learned is not None:
            if users not in self._seen:  # the same entries in all trials
                self._seen[users] = RowColumns.of(learned.seen, chosen)
            model = WithSeen(model, self._seen[users])
        return float(_measure(model, self.validation, None, (self.metric,), chosen, own=self.own)[self.metric])

    # ---------------------------------------------------------------------------------------------------- trials

    def start(self, rank: int, point: np.ndarray | None, params: Mapping[str, Any] | None = None) -> Trial:
        """A new trial, by a point or by the given parameters."""
        found = self.space.at(point) if params is None and point is not None else dict(params or {})
        self.trials.append(Trial(len(self.trials), found | {"factors": rank}, _point=point, _rank=rank))
        return self.trials[-1]

    def _rank_at(self, trial: Trial, rung: int) -> int:
        """The rank of a trial on a rung."""
        return trial._rank if rung else self._first_rank(trial._rank)

    def _first_rank(self, rank: int) -> int:
        """The rank on the first rung."""
        half = rank // 2
        if half < LEAST_RANK or self.model.init is not None or getattr(self.model, "solver", "") == "subspace":
            return rank
        return half

    def advance(self, trial: Trial, rung: int, whole: bool = False) -> bool:
        """Fit a trial up to the iterations of a rung, evaluate and record it; returns whether it did not fail.

        `whole`: not at half the rank, at which something may be impossible.
        """
        self._run(trial, rung, whole)
        return self._record(trial, rung)

    def _run(self, trial: Trial, rung: int, whole: bool = False) -> None:
        """What may run on a thread beside another trial."""
        share, users = RUNGS[rung]
        iterations, users = max(1, math.ceil(share * self.model.iterations)), min(users, len(self.users))
        started = time.perf_counter()
        rank = trial._rank if whole else self._rank_at(trial, rung)
        if rank != trial.params["factors"]:
            trial.params, trial.iterations, trial._model = trial.params | {"factors": rank}, 0, None
        try:
            with quiet():
                if iterations > trial.iterations or trial._model is None:
                    trial._model = self._fitted(trial, iterations)
                trial.iterations, trial.users, trial.value = iterations, users, self.measured(trial._model, users)
                trial._rung = rung
            if not math.isfinite(trial.value):
                raise ArithmeticError(f"{self.metric} is {trial.value}")
        except (HybridMFError, ArithmeticError, MemoryError, ValueError) as error:
            if rank != trial._rank:
                return self._run(trial, rung, whole=True)
            trial.state, trial.value, trial._model = "failed", None, None
            trial.reason = f"{type(error).__name__}: {error}"
            logger.info("trial %d failed: %s", trial.number, trial.reason)
        if rung == len(RUNGS) - 1:
            trial._model = None
        trial.finished = self.budget.spent
        trial.seconds += time.perf_counter() - started

    def _record(self, trial: Trial, rung: int) -> bool:
        """Note a trial that has run; returns whether it did not fail."""
        if trial.value is not None and rung == len(RUNGS) - 1:
            trial.state = "complete"
            if self.best is None or self._order(trial) < self._order(self.best):
                self.best = trial
        self.budget.reserved = self._seconds_at_the_end()
        self.report(self)
        return trial.state != "failed"

    def _seconds_at_the_end(self) -> float:
        """Estimated seconds of the last fit and, until it is complete, of the model's own parameters."""
        own, later = self.trials[0], [trial for trial in self.trials[1:] if trial.value is not None]
        if own.state != "stopped":
            return 0.0 if self.best is None else self.best.seconds
        # the first trial may have waited for a compiler
        whole = [
            trial.seconds * (trial._rank / trial.params["factors"]) ** 2 * self.model.iterations / trial.iterations
            for trial in later
        ]
        return 2 * min(whole, default=0.0)

    def furthest(self) -> Trial | None:
        """The best of the trials with most iterations, at its whole rank; None if there is none."""
        known = [trial for trial in self.trials if trial.value is not None]
        if self.best is not None or not known:
            return self.best
        found = min(known, key=lambda trial: (-trial._rung, self._order(trial)))
        return replace(found, params=found.params | {"factors": found._rank})

    def _fitted(self, trial: Trial, iterations: int) -> Any:
        """A trial's model after so many iterations; it goes on where it stopped."""
        model = unfitted(self.model, **trial.params | {"iterations": iterations})
        source = LocalRatings(model, self.prepared, features=self.features)
        whole = trial._model is None and iterations == self.model.iterations
        return Fit(model, source, Options(continued=trial._model, on_device=whole)).run()

    def _is_whole(self, rank: int) -> bool:
        """Whether trials of a rank are fitted whole at once: on a GPU, if those of the first rung would not be cheap.

        By the predictions of the plan, not by a clock: trials depend on the seed only.
        """
        if rank not in self._starts:
            self._starts[rank] = self._cost_of_start(rank) > CHEAP
        return self._starts[rank]

    def _cost_of_start(self, rank: int) -> float:
        """Predicted cost of a trial on the first rung, relative to a whole one; on the CPU, all are in its iterations.

        0 where there is no prediction.
        """
        if not self.prepared.held.size:
            return 0.0
        seconds = []
        beside = TRIAL_SECONDS + ROW_SECONDS * sum(self.prepared.shape)
        with contextlib.suppress(HybridMFError, ValueError):  # a trial of this rank says what is wrong
            for factors, share in ((self._first_rank(rank), RUNGS[0][0]), (rank, 1.0)):
                plan = self._plan(unfitted(self.model, factors=factors))
                if plan.gpu is None or not plan.decisive:
                    return 0.0
                iterations = max(1, math.ceil(share * self.model.iterations))
                seconds.append(beside + iterations * plan.decisive[0].seconds_per_iteration)
        return seconds[0] / seconds[1] if len(seconds) == 2 else 0.0

    def _plan(self, model: FactorModel) -> Plan:
        """The plan of the fit of a trial."""
        source = LocalRatings(model, self.prepared, features=self.features)
        return source.plan(model._objective(), model._settings())

    def _order(self, trial: Trial) -> float:
        """Lower is better."""
        assert trial.value is not None
        return -self.sign * trial.value

    def _bracket(self, trials: Iterable[Trial], first: int = 0) -> None:
        """Successive halving from a rung on."""
        alive = [trial for trial in trials if self.advance(trial, first)]
        for rung in range(first + 1, len(RUNGS)):
            alive.sort(key=self._order)
            for dropped in alive[max(1, len(alive) // KEPT) :]:
                dropped._model = None
            growth = RUNGS[rung][0] / RUNGS[rung - 1][0]
            alive = [
                trial
                for trial in alive[: max(1, len(alive) // KEPT)]
                if self.budget.has_time(growth * (trial._rank / trial.params["factors"]) ** 2 * trial.seconds)
                and self.advance(trial, rung)
            ]

    # ---------------------------------------------------------------------------------------------------- stages

    def _explore(self, own: Trial) -> None:
        """Brackets at the lowest rank, later ones closer around the best; the model's own parameters are in the first.

        These are fitted to the end after this bracket, so the best of it is known sooner.
        """
        share = AT_FIRST_RANK if len(self.space.ranks) > 1 else 1.0
        rank = self.space.ranks[0]
        if self._is_whole(rank):
            self._explore_whole(own, share)
            return
        self._bracket(itertools.chain([own], self._drawn(rank, None, share, self.space.likely, DRAWN - 1)))
        self._complete(own)
        self._brackets(rank, WIDTHS[:-1], share)

    def _explore_whole(self, own: Trial, share: float) -> None:
        """Whole trials at the lowest rank: the middle of the likely settings, the same with more penalty, proposals.

        The model's own setting comes first if no others are likely, else after some proposals, which need fewer trials
        without it.
        """
        rank = self.space.ranks[0]
        if self.space.likely is None:
            self._complete(own)
            self._propose(rank, share, first=self._drawn(rank, None, share, number=1))
        else:
            self._propose(rank, share, self._likely(rank, share), DRAWN + 2)
            self._complete(own)
            self._propose(rank, share)

    def _likely(self, rank: int, share: float) -> Iterator[Trial]:
        """The middle of the likely settings, and the same with more penalty."""
        assert self.space.likely is not None
        point, names = self.space.likely(np.full(len(self.space.dimensions), 0.5)), list(self.space.dimensions)
        if self.budget.has_trial(len(self.trials), share):
            yield self.start(rank, point)
        column = next(k for k, name in enumerate(names) if name in LAMBDAS)
        values, stronger = self.space.dimensions[names[column]], point.copy()
        middle = value_at(values, point[column])
        if isinstance(middle, (int, float)) and middle > 0:
            stronger[column] = near(values, STRONGER * middle)
            if self.budget.has_trial(len(self.trials), share) and self._is_new(stronger, rank):
                yield self.start(rank, stronger)

    def _propose(self, rank: int, share: float = 1.0, first: Iterable[Trial] = (), most: float = math.inf) -> None:
        """Whole trials: some given ones, then where the values so far make a gain likely.

        Brief ones run side by side. The next one is made when the one before the last is recorded, in the order of
        starts, so the search depends on the seed only.
        """
        trials = itertools.chain(first, self._proposals(rank, share, len(self.trials) + most))
        with single_threaded_blas(), ThreadPoolExecutor(AT_A_TIME) as threads:  # BLAS's take longer than the systems
            if not self._is_brief(rank):
                for trial in trials:
                    self._complete(trial)
                return
            for trial in trials:
                self._running.append((trial, threads.submit(self._run, trial, len(RUNGS) - 1)))
                while len(self._running) == AT_A_TIME or (self._running and len(self.trials) <= IN_TURN):
                    self._collect()
            while self._running:
                self._collect()

    def _collect(self) -> None:
        """Wait for the first of the running trials."""
        trial, done = self._running.popleft()
        done.result()
        self._record(trial, len(RUNGS) - 1)

    def _is_brief(self, rank: int) -> bool:
        """Whether whole trials of a rank leave a GPU time and memory for another one beside them, as predicted.

        A caller's metric runs on one thread.
        """
        with contextlib.suppress(HybridMFError, ValueError):  # a trial of this rank says what is wrong
            plan = self._plan(unfitted(self.model, factors=rank))
            if plan.gpu is not None and plan.decisive and self.prepared.held.size and not self.own:
                seconds = self.model.iterations * plan.decisive[0].seconds_per_iteration
                return seconds < BRIEF and plan.gpu.free_bytes >= 2 * AT_A_TIME * plan.total_bytes
        return False

    def _proposals(self, rank: int, share: float, end: float) -> Iterator[Trial]:
        """New trials with the greatest expected improvement, until `PROPOSED_IDLE` of them gain nothing."""
        idle, reached = 0, self.best
        while idle < PROPOSED_IDLE and len(self.trials) < end and self.budget.has_trial(len(self.trials), share):
            if not self.budget.has_time(max(trial.seconds for trial in self.trials[-AT_A_TIME:]), share):
                return
            point = self._proposed(rank)
            if point is None:
                return
            yield self.start(rank, point)
            idle, reached = (0, self.best) if self._has_gained(reached) else (idle + 1, reached)

    def _proposed(self, rank: int) -> np.ndarray | None:
        """The point of new parameters with the greatest expected improvement; None if there seems to be none."""
        known = [trial for trial in self.trials if trial._point is not None and trial._rank == rank][-MODELLED:]
        running = {trial.number for trial, _ in self._running}  # whose values may be there, or not yet
        values = [-self._order(trial) for trial in known if trial.value is not None and trial.number not in running]
        places = self.rng.random((2 * PLACES, len(self.space.dimensions)))
        if values:
            worst, centre = min(values), self.best._point if self.best is not None else None
            if centre is not None:
                near = self.rng.choice(WIDTHS, (PLACES, 1)) * self.rng.normal(size=(PLACES, len(centre)))
                places[PLACES:] = np.clip(centre + near, 0, 1)
            points = np.array([trial._point for trial in known])
            of = {trial.number: worst if trial.value is None else -self._order(trial) for trial in known}
            found = np.array([np.nan if number in running else value for number, value in of.items()])
            laid = self.space.laid
            places = places[np.argsort(-expected_improvement(laid(points), found, laid(places)), kind="stable")]
        return next((point for point in places if self._is_new(point, rank)), None)

    def _is_new(self, point: np.ndarray, rank: int) -> bool:
        """Whether no trial of a rank has the parameters of a point."""
        found = self.space.at(point) | {"factors": rank}
        return all(trial.params | {"factors": trial._rank} != found for trial in self.trials)

    def _complete(self, trial: Trial) -> None:
        """Fit a trial to the end, unless it fails."""
        if trial.state == "stopped":
            self.advance(trial, len(RUNGS) - 1)

    def _brackets(
        self, rank: int, widths: Iterable[float | None], share: float = 1.0, patience: int = PATIENCE
    ) -> None:
        """Brackets around the best, or anywhere, until the share of the budget is used up or they gain nothing."""
        idle = 0
        for width in widths:
            before, tried = self.best, len(self.trials)
            self._bracket(self._drawn(rank, width, share))
            idle = 0 if self._has_gained(before) else idle + 1
            if idle == patience or len(self.trials) == tried:
                return

    def _drawn(
        self,
        rank: int,
        width: float | None,
        share: float,
        likely: Callable[[np.ndarray], np.ndarray] | None = None,
        number: int = DRAWN,
    ) -> Iterator[Trial]:
        """The trials of a bracket: neighbours of the best, and every third anywhere; without a width, all anywhere."""
        for k in range(number):
            if not self.budget.has_trial(len(self.trials), share):
                return
            if not self.budget.has_time(self.trials[-1].seconds, share):
                return
            centre = None if width is None or self.best is None or k % 3 == 2 else self.best._point
            trial = self._new(rank, centre, width or 0.0, likely)
            if trial is None:
                return
            yield trial

    def _new(
        self,
        rank: int,
        centre: np.ndarray | None,
        width: float,
        likely: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Trial | None:
        """A trial beside a point, or anywhere, whose parameters are new; None if there seems to be none."""
        assert self.points is not None
        for _ in range(REDRAWN):
            if centre is None:
                point = self.points.random(1)[0]
                point = point if likely is None else likely(point)
            else:
                point = np.clip(centre + width * self.rng.normal(size=len(centre)), 0, 1)
            if self._is_new(point, rank):
                return self.start(rank, point)
        return None

    def _neighbours(self, best: Trial, rank: int, width: float, number: int, cost: float = 1.0) -> Iterator[Trial]:
        """Trials beside the best, each of which takes `cost` times its seconds."""
        for _ in range(number if best._point is not None and len(best._point) else 0):
            if not (self.budget.has_trial(len(self.trials)) and self.budget.has_time(cost * best.seconds)):
                return
            trial = self._new(rank, best._point, width)
            if trial is None:
                return
            yield trial

    def _climb(self) -> None:
        """The best parameters and two neighbours at higher ranks, as long as these are better."""
        for number, rank in enumerate(self.space.ranks[1:], 1):
            best = self.best
            if best is None:
                return
            # systems are solved in rank^3, and formed in rank^2
            cost = (rank / best.params["factors"]) ** 2
            if not (self.budget.has_trial(len(self.trials)) and self.budget.has_time(2 * cost * best.seconds)):
                return
            same = self.start(rank, best._point, best.params)
            self._compile_ranks(number)
            first = len(RUNGS) - 1 if self._is_whole(rank) else 1
            self._bracket(iter([same, *self._neighbours(best, rank, WIDTHS[-1], 2, 3 * cost)]), first)
            if not self._has_gained(best):
                return

    def _compile_ranks(self, number: int) -> None:
        """Start to compile the kernels of a rank, and of the next ones while its trials run; with ratings on a GPU."""
        if not self.prepared.held.size:
            return
        ahead = max(1, available_cores() // CORES_A_RANK)
        for k, rank in enumerate(self.space.ranks[number : number + 1 + ahead]):
            model = unfitted(self.model, factors=rank)
            with contextlib.suppress(HybridMFError, ValueError):  # a trial of this rank says what is wrong
                compile_ahead(self._plan(model), later=k > 0)

    def _refine(self) -> None:
        """Brackets ever closer around the best, at its rank, then anywhere, and again; or proposals there."""
        if self.best is not None and self._is_whole(self.best._rank):
            self._propose(self.best._rank)
        elif self.best is not None:
            widths = (*WIDTHS[1:], None, WIDTHS[0])
            self._brackets(self.best._rank, itertools.cycle(widths), patience=len(widths))

    def _has_gained(self, before: Trial | None) -> bool:
        if self.best is None or before is None:
            return self.best is not before
        return self._order(before) - self._order(self.best) > GAIN * abs(self._order(before))


def expected_improvement(points: np.ndarray, values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Expected gain over the greatest value at some places, by a Gaussian process through the values at some points.

    `points`, shape (n, d), and `places`, shape (m, d), are in the unit cube. The process is that of the logarithms of
    the distances from the greatest value, and expects the worst one far from all points. A value that is NaN, since it
    is not known yet, counts as expected.
    """
    # slow to import, and on a GPU alone
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    known = np.isfinite(values)
    top = values[known].max()
    unit = CLOSE * (top - np.median(values[known])) or 1.0
    heights = -np.log1p((top - values) / unit)
    lowest, spread = heights[known].min(), heights[known].std() or 1.0
    heights = (heights - lowest) / spread
    process = GaussianProcessRegressor(Matern(np.full(points.shape[1], LENGTH), LENGTHS, nu=2.5), alpha=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length at its limit
        process.fit(points[known], heights[known])
        if not known.all():
            heights[~known] = process.predict(points[~known])
            process = GaussianProcessRegressor(process.kernel_, alpha=1e-3, optimizer=None).fit(points, heights)
        means, deviations = process.predict(places, return_std=True)
    deviations = np.maximum(deviations, np.finfo(np.float64).tiny)
    gains = (means - heights.max()) / deviations
    improvement: np.ndarray = deviations * (gains * norm.cdf(gains) + norm.pdf(gains))
    return improvement


def search(
    train: Any,
    validation: Any = None,
    *,
    model: str | FactorModel = "implicit",
    space: Mapping[str, Any] | None = None,
    metric: str | Metric | None = None,
    budget: str | float | None = None,
    trials: int | None = None,
    device: str | Sequence[str] = "auto",
    random_state: Any = None,
    show_progress: bool = False,
    unknown: str = "error",
    item_features: Any = None,
    user_features: Any = None,
) -> SearchResult:
    """Find the hyperparameters with the best metric on held-out entries, and fit them on all ratings.

    Settings are drawn at a low rank, and by successive halving the best of them get more iterations and are evaluated
    on more of the validation users; the first comparison has half the rank. On a GPU, settings are fitted whole at once
    where that costs little more, and a model of their values proposes the next ones. The best one and its neighbours
    are then fitted at higher ranks, as long as that helps. Trials share the checked, transposed and (on a GPU) uploaded
    ratings, and continue where they stopped. The given model with its own parameters is trial 0; the others of
    implicit feedback begin near the best settings of other data, as far as the space allows. Popularity is compared
    with the best.

    Parameters
    ----------
    train : Ratings, data frame, or sparse or dense matrix, shape (n_users, n_items)
        Or `PreparedRatings`, together with `validation`.
    validation : Ratings or matrix, shape (n_users, n_items), optional
        Held-out entries, aligned by label. Default: a tenth of the entries of `train`, the last ones of each user if
        they have timestamps, else drawn at random. Weights of its entries count in the last fit.
    model : {"implicit", "explicit"} or estimator
        `ImplicitALS()`, `ExplicitALS()`, or an estimator that is not fitted. Parameters of an estimator that differ
        from the defaults of its class are kept unless `space` names them.
    space : dict, optional
        By the name of each parameter, a list of values or a distribution of scipy.stats, such as
        ``{"regularization": loguniform(0.01, 10), "factors": [32, 64, 128]}``. The values of "factors" are searched
        from the lowest on; named alone, they leave the others as by default: lambda, nu and, of `ImplicitALS`, the
        weights, at 64 factors, then 128 to 1024.
    metric : str or callable, optional
        A metric of `evaluate`: "ndcg@10" by default for implicit feedback, "rmse" for explicit. A function of rankings,
        as `evaluate` calls it; higher is better.
    budget : str or float, optional
        Time for everything: "90s", "2min", "1h" or seconds; "2min" if neither this nor `trials` is given. The search
        ends earlier if it finds nothing better.
    trials : int, optional
        Number of trials at most. With `trials` alone, the result depends on `random_state` only, not on time.
    device : str or list of str
        As for the estimators; ignored if `model` is an estimator, which has its own.
    random_state : int, Generator or None
        Of the split, the settings and the fits.
    show_progress : bool
        Show a line with the number of trials and the best value.
    unknown : {"error", "drop"}
        Treatment of entries of `validation` whose user or item is not in `train`.
    item_features, user_features : Features, data frame or matrix, optional
        As for ``fit``. The default space then has `item_feature_weight` (`user_feature_weight`). Trials rank items
        with entries; the last fit has those that have features only, too.

    Returns
    -------
    SearchResult
        After Ctrl-C, what was found until then.

    Raises
    ------
    RatingsError, UnknownLabelError, TypeError, ValueError
        Invalid ratings or arguments; no validation user with entries; a budget too small for one trial, by the
        prediction of the plan; or all trials failed, with the reason of the first.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> plays = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.02, seed=0)
    >>> found = hmf.search(plays, trials=6, random_state=0)
    >>> len(found.trials)
    6
    >>> found.best_value >= found.default_value
    True
    """
    estimator = _estimator(model, device)
    name = check_metric(metric, estimator)
    limits = _limits(budget, trials)
    rng = check_rng(random_state)
    if estimator.random_state is None:
        estimator = unfitted(estimator, random_state=int(rng.integers(2**31)))
    given_features: dict[Side, Any] = {"user": user_features, "item": item_features}
    features = {side: value for side, value in given_features.items() if value is not None}
    everything, ratings, held_out = _parts(train, validation, estimator, unknown, int(rng.integers(2**31)))
    chosen = None if space is None else given_space(space, estimator)
    ranks = default_ranks(estimator, ratings.shape) if chosen is None else chosen.ranks
    prepared = _prepared(ratings, unfitted(estimator, factors=ranks[0]), limits)
    with single_threaded_blas():  # whose threads take longer than products of degrees
        if chosen is None or not chosen.dimensions:
            usual = _with_feature_weights(default_space(estimator, prepared), estimator, features)
            chosen = replace(usual, ranks=ranks)
        chosen = with_likely(chosen, estimator, prepared)
    bar = progress_bar(limits.trials or 0, show_progress, unit="trial", desc="search")

    def report(searcher: Searcher) -> None:
        bar.n = len(searcher.trials)
        if searcher.best is not None:
            bar.set_postfix({name: f"{searcher.best.value:.4f}"} | searcher.best.params, refresh=False)
        bar.refresh()

    described = _features_of(prepared.ratings, estimator, features)
    own = {name: metric} if callable(metric) else {}
    searcher = Searcher(estimator, prepared, held_out, chosen, name, limits, rng, report, described, own)
    interrupted = False
    with bar:
        try:
            searcher.run()
        except KeyboardInterrupt:
            if searcher.furthest() is None:
                raise
            interrupted = True
            logger.warning("search interrupted: the best of %d trials is fitted on all ratings", len(searcher.trials))
    best, tried = searcher.furthest(), searcher.trials
    if best is None or best.value is None:
        reason = next((trial.reason for trial in tried if trial.reason), "no trial was complete")
        raise ValueError(f"all {len(tried)} trials failed; the first one: {reason}")
    for trial in tried:
        trial._model = None
    default = tried[0].value if tried[0].state == "complete" else None
    popularity = searcher.measured(PopularityRecommender().fit(prepared.ratings))  # after the first answers
    final: Any = unfitted(estimator, **best.params)
    params, value = best.params, best.value
    if searcher.sign * popularity > searcher.sign * value:
        logger.warning(
            "no trial of %d is better than %s: %s %.4f, %.4f", len(tried), _baseline(name), name, value, popularity
        )
        final, params, value = PopularityRecommender(), {}, popularity
    if not value and not popularity and searcher.sign > 0:
        logger.warning(
            "%s is 0 for all %d trials and for popularity, so nothing was selected: validation has too few entries, or "
            "train too few of their items", name, len(tried),
        )  # fmt: skip
    known = {} if isinstance(final, PopularityRecommender) else features
    final.fit(everything(), **{f"{side}_features": value for side, value in known.items()})
    return SearchResult(final, params, value, name, default, popularity, tuple(tried), limits.spent, interrupted)


def _baseline(metric: str) -> str:
    """What `PopularityRecommender` predicts for a metric."""
    return "item means" if metric in LOWER_IS_BETTER else "popularity"


def _estimator(model: Any, device: Any) -> FactorModel:
    if isinstance(model, str):
        return MODELS[check_choice("model", model, tuple(MODELS))](device=device)
    if not isinstance(model, FactorModel):
        hint = f"; make one: {model.__name__}()" if isinstance(model, type) else ""
        raise TypeError(
            f'model must be "implicit", "explicit" or an estimator such as ImplicitALS(), got {model!r}{hint}'
        )
    return unfitted(model)


def check_metric(metric: Any, model: FactorModel, argument: str = "metric") -> str:
    """The name of a metric to search by, or the default of the model."""
    implicit = isinstance(model, ImplicitALS)
    if metric is None:
        return "ndcg@10" if implicit else "rmse"
    if not isinstance(metric, str) and not callable(metric):
        raise TypeError(f'{argument} must be one name such as "ndcg@10" or a function, got {metric!r}')
    if callable(metric):
        return _checked_metrics(metric)[1][0]
    try:
        (name,) = _checked_names(metric)
    except ValueError:
        raise ValueError(f"{argument} must be one of {BY}, got {metric!r}") from None
    if implicit:
        refuse_error(argument, name)
    if name.startswith(("novelty", "coverage")) or name == "auc":
        raise ValueError(f"{argument} {name!r} is not one to search by; use {BY}")
    return name


def _limits(budget: Any, trials: Any) -> Budget:
    trials = None if trials is None else check_int("trials", trials, 1)
    if budget is None and trials is not None:
        return Budget(None, trials)
    return Budget(parse_seconds("budget", BUDGET if budget is None else budget), trials)


def parse_seconds(name: str, value: Any) -> float:
    """Seconds of a number or a text such as "90s", "2min", "1.5 h"."""
    units = {"s": 1, "m": 60, "h": 3600}
    named = r"\s*(\d+\.?\d*|\.\d+)\s*(|s|sec|seconds?|m|min|minutes?|h|hours?)\s*"
    match = re.fullmatch(named, value.lower()) if isinstance(value, str) else None
    if isinstance(value, str) and match is None:
        raise ValueError(f'{name} must be a time such as "90s", "2min", "1h" or a number of seconds, got {value!r}')
    return check_real(name, float(match[1]) * units[match[2][:1] or "s"] if match else value, 0.0, strict=True)


def _parts(
    train: Any, validation: Any, model: FactorModel, unknown: str, seed: int
) -> tuple[Callable[[], Any], Any, sp.csr_array]:
    """A function that returns all ratings; those of training; and held-out entries in their positions."""
    given = as_ratings(train, "train")
    ratings = given if isinstance(given, Ratings) else Ratings._checked(as_csr(given, name="train"))
    check_nonempty(ratings.user_items, "train")
    labels = ratings.user_ids, ratings.item_ids
    if validation is None:
        known, validation = split(ratings, 0.1, seed, by="random" if ratings.timestamps is None else "last")
        held_out = check_validation(validation, labels, ratings.shape, model._objective(), unknown)
        assert held_out is not None
        return lambda: given, known, held_out
    validation = as_ratings(validation, "validation")
    held_out = check_validation(validation, labels, ratings.shape, model._objective(), unknown)
    assert held_out is not None
    new = ~entries_in(held_out, ratings.user_items)
    if not np.any(new & (held_out.data > 0 if isinstance(model, ImplicitALS) else True)):
        raise ValueError(
            f"all {held_out.nnz} entries of validation are in train as well, so there is nothing to select by; give "
            "entries that train lacks (hybridmf.split), or leave validation out"
        )
    if not np.all(new):
        logger.warning(
            "%d of %d entries of validation are in train as well, and do not count", np.count_nonzero(~new), len(new)
        )
    weights = _weights_of(validation, labels)
    held_out = keep_entries(held_out, new)

    def everything() -> Ratings:  # as by `Ratings.concat`, which sorts all entries
        matrix = ratings.user_items
        at = np.searchsorted(*(entry_rows(part) * matrix.shape[1] + part.indices for part in (matrix, held_out)))
        indices, data = np.insert(matrix.indices, at, held_out.indices), np.insert(matrix.data, at, held_out.data)
        both = Ratings._checked(make_csr(matrix.indptr + held_out.indptr, indices, data, matrix.shape), *labels)
        both.frame_kind = ratings.frame_kind
        if weights is not None or ratings.weights is not None:
            known = np.ones(matrix.nnz, np.float32) if ratings.weights is None else ratings.weights
            both = both.with_weights(np.insert(known, at, 1.0 if weights is None else weights[new]))
        return both

    return everything, train if isinstance(train, PreparedRatings) else ratings, held_out


def _weights_of(validation: Any, labels: tuple[Any, Any]) -> np.ndarray | None:
    """Weights of held-out entries in the order of `check_validation`, whose log they do not repeat."""
    if getattr(validation, "weights", None) is None:
        return None
    entries = validation.user_items
    weighted = make_csr(entries.indptr, entries.indices, validation.weights, entries.shape)
    with quiet():
        aligned, _ = align(weighted, labels_of(validation), labels, name="validation", unknown="drop")
    found: np.ndarray = aligned.data
    return found


def _prepared(ratings: Any, model: FactorModel, limits: Budget) -> PreparedRatings:
    """The training ratings where the fits read them; refuses a budget that is too small for one trial."""
    settings = model._settings()
    plan = plan_for(ratings.user_items, model._objective(), settings)
    needed = plan.decisive[0].total_seconds if plan.decisive else 0.0
    if limits.seconds is not None and needed > limits.seconds:
        raise ValueError(
            f"budget is {limits.seconds:g} s, and one trial takes about {needed:.3g} s ({settings.factors} factors, "
            f"{settings.iterations} iterations); give a larger budget, a lower rank, or a model with fewer iterations"
        )
    if isinstance(ratings, PreparedRatings):
        return ratings
    on_one = len(plan.devices) <= 1 and plan.ratings_on_device
    return PreparedRatings(ratings, device=plan.device if on_one else "cpu", dtype=settings.dtype)
