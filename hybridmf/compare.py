"""Compares methods and devices on the same ratings, from the same initial factors."""

from __future__ import annotations

import html
import itertools
import json
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from .als import ExplicitALS, ImplicitALS
from .ccd import CCD
from .core.files import write_atomically
from .core.frames import pandas_frame
from .core.objective import Objective
from .core.progress import progress_bar
from .core.system import system_bytes
from .core.table import format_table, html_table
from .core.validate import check_bool, check_choice, check_int, check_real
from .data.store import Store
from .datasets import SHAPES, synthetic
from .errors import DeviceError, MemoryBudgetError
from .metrics import Evaluation, Interval, PopularityRecommender, evaluate
from .model.base import FactorModel
from .model.early_stopping import LOWER_IS_BETTER
from .model.estimator import unfitted
from .model.stopwatch import BEFORE
from .plan import dispatch, types
from .plan.sgd import SgdMethod
from .plan.types import Plan
from .ratings import Ratings, split
from .sgd import SGD
from .tools.preview import plan as make_plan

METRICS = {"explicit": "rmse", "implicit": "ndcg@10"}
FEEDBACK = tuple(METRICS)

BASELINES = {"explicit": "mean rating of each item", "implicit": "most popular items"}
"""Predictions and recommendations of `PopularityRecommender`."""

TOLERANCE = 1e-3
"""Relative difference of the objective beyond which two devices disagree: rounding over some iterations is far less."""

RACING = ("hogwild", "batch_hogwild")  # schedules of SGD with races between threads: two runs on one device differ

RACING_TOLERANCE = 2e-2

CPU_PRODUCT, GPU_PRODUCT = 1536, 8192
"""Rows and columns of the matrices whose product measures the peak rate of a device."""

Table = tuple[list[str], list[list[str]], str]  # header, rows and alignment of the columns
Case = tuple[str, str, FactorModel, Plan]  # method, device, and the model with its plan

LEGEND = """\
Lower is better for seconds, objective and RMSE; higher for NDCG. An iteration is a different amount of work in each
method: compare methods by quality over time, devices by seconds per iteration. speedup: over the slowest row. of gemm:
share of the rate of a float32 matrix product on the device. objective: the loss that a method minimizes, on the
training part."""

LEGEND_OF_SCORES = """\
95 %: bootstrap over users. The difference to the baseline compares both user by user; if its interval contains 0, the
method is no better than the baseline, or the test part is too small to tell."""

LEGEND_OF_PHASES = """\
peak: additional memory of the fit (memory that the process reused does not count). planned: memory by the plan."""


@dataclass(frozen=True)
class Run:
    """One method on one device.

    Attributes
    ----------
    method, device : str
    plan : Plan
    seconds : tuple of float
        Time of each iteration.
    phases : dict of str to float
        Seconds of a whole fit: "check" (validation of the input), "plan", "convert" (the transpose), "set up" (layouts;
        on a GPU also the transfer), "compile" (the excess of the first iteration over the median of the others),
        "solve" and "finish" (factors to the host).
    objective : tuple of float
        After each iteration.
    metric : str
    scores : tuple of float
        The metric on held-out entries after each iteration; for implicit feedback after the last iteration only.
    interval : Interval or None
        The last score with its 95 % confidence interval; None without held-out entries of two users.
    difference : Interval or None
        The last score minus that of the baseline, with its 95 % interval by the paired bootstrap.
    peak_bytes : int or None
        Peak of the additional memory of the fit; None if the system does not report it.
    gflops, of_ceiling : float
        Useful work per second in GFLOP/s, and as a share of the rate of a float32 matrix product on the same device.
    bytes_per_second : float
        Factors and residuals gathered and written per second, by the counts of the papers.
    minimized : Objective or None
        With the weights of the fit: values of different objectives are not comparable.
    """

    method: str
    device: str
    plan: Plan
    seconds: tuple[float, ...]
    phases: dict[str, float]
    objective: tuple[float, ...]
    metric: str
    scores: tuple[float, ...]
    peak_bytes: int | None
    gflops: float
    of_ceiling: float
    bytes_per_second: float
    interval: Interval | None = None
    difference: Interval | None = None
    minimized: Objective | None = None

    @property
    def per_iteration(self) -> float:
        """Median seconds of an iteration, without the first one if there are several."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Fastest and slowest of the same iterations."""
        counted = self.seconds[1:] or self.seconds
        return min(counted), max(counted)

    @property
    def title(self) -> str:
        """Method and device as text."""
        return f"{self.method} on {self.device}"

    def seconds_to(self, rmse: float, slack: float = 1.01) -> float | None:
        """Seconds from the start of the fit to a held-out RMSE of at most `slack` times `rmse`; None if never reached.

        Also None for implicit feedback, whose ranking is evaluated after the last iteration only.
        """
        if len(self.scores) != len(self.seconds):
            return None
        reached = [number for number, score in enumerate(self.scores, 1) if score <= slack * rmse]
        return self.before_first + sum(self.seconds[: reached[0]]) if reached else None

    @property
    def _sign(self) -> int:
        """1 where higher scores are better, -1 where lower ones are."""
        return -1 if self.metric in LOWER_IS_BETTER else 1

    @property
    def beats_the_baseline(self) -> bool:
        """Whether the interval of the difference is on the better side of 0."""
        return self.difference is not None and min(self._sign * bound for bound in self.difference[1:]) > 0

    def is_ahead_of(self, baseline: Baseline) -> bool:
        """Whether the last score is better than that of the baseline, significantly or not."""
        return bool(self.scores) and self._sign * (self.scores[-1] - baseline.score) > 0

    @property
    def before_first(self) -> float:
        """Seconds before the first iteration, including the compilation of kernels."""
        return sum(self.phases[phase] for phase in BEFORE)

    def as_dict(self) -> dict[str, Any]:
        """Fields for JSON and data frames."""
        return {
            "method": self.method,
            "device": self.device,
            "seconds_per_iteration": self.per_iteration,
            "fastest": self.spread[0],
            "slowest": self.spread[1],
            **{f"seconds_{phase.replace(' ', '_')}": seconds for phase, seconds in self.phases.items()},
            "objective": self.objective[-1],
            self.metric: self.scores[-1] if self.scores else None,
            **_bounds(self.metric, self.interval),
            "minus_baseline": None if self.difference is None else self.difference.value,
            **_bounds("minus_baseline", self.difference),
            "peak_bytes": self.peak_bytes,
            "planned_bytes": self.plan.total_bytes,
            "gflops": self.gflops,
            "of_ceiling": self.of_ceiling,
            "gigabytes_per_second": self.bytes_per_second / 1e9,
        }


def _bounds(name: str, interval: Interval | None) -> dict[str, float | None]:
    low, high = (None, None) if interval is None else interval[1:]
    return {f"{name}_low": low, f"{name}_high": high}


@dataclass(frozen=True)
class Baseline:
    """The baseline of the methods: `PopularityRecommender` on the same ratings."""

    name: str
    metric: str
    score: float  # the metric on held-out entries
    interval: Interval | None = None  # the score with its 95 % confidence interval

    def as_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {"name": self.name, self.metric: self.score, **_bounds(self.metric, self.interval)}


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; ``print`` shows the table.

    Attributes
    ----------
    name : str
        Name of the data.
    shape : (int, int)
    nnz : int
        Training entries.
    load_seconds : float
        Time to read or generate the ratings.
    runs : tuple of Run
    skipped : tuple of str
        Combinations that did not run, with the reason.
    disagreements : tuple of str
        Devices whose objectives differ by more than the tolerance.
    factor_differences : dict
        Keyed by (method, device): the largest difference from the factors of the method's first device, relative to
        the largest factor.
    baseline : Baseline or None
        None without held-out entries.
    """

    name: str
    shape: tuple[int, int]
    nnz: int
    load_seconds: float
    runs: tuple[Run, ...]
    skipped: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()
    factor_differences: dict[tuple[str, str], float] = field(default_factory=dict)
    baseline: Baseline | None = None

    @property
    def agree(self) -> bool:
        """Whether all devices reached the same objective, within the tolerance."""
        return not self.disagreements

    def __str__(self) -> str:
        notes = [textwrap.fill(note, 120, subsequent_indent="  ", break_on_hyphens=False) for note in self._notes()]
        tables = [part for table, legend in self._tables() for part in (format_table(*table, indent=0), legend)]
        parts = [self._head(), *tables, self._verdict(), "\n".join(notes)]
        return "\n\n".join(part for part in parts if part)

    def _repr_html_(self) -> str:
        head, verdict = html.escape(self._head()), html.escape(self._verdict())
        tables = "".join(f"{html_table(*table)}<p>{html.escape(legend)}</p>" for table, legend in self._tables())
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return f"<p><strong>{head}</strong></p>{tables}<p>{verdict}</p>{notes}"

    def _head(self) -> str:
        m, n = self.shape
        size = f"{m:,} users x {n:,} items, {self.nnz:,} training entries"
        return f"{self.name}: {size}, loaded in {self.load_seconds:.2f} s"

    def _notes(self) -> list[str]:
        left_out = [f"Left out: {each}" for each in self.skipped]
        return left_out + [f"DISAGREEMENT: {each}" for each in self.disagreements]

    def _tables(self) -> list[tuple[Table, str]]:
        scores = [] if self.baseline is None else [(self._held_out(self.baseline), LEGEND_OF_SCORES)]
        return [(self._speeds(), LEGEND), *scores, (self._phases(), LEGEND_OF_PHASES)]

    def _verdict(self) -> str:
        """The best methods of the tables, in sentences."""
        fastest = min(self.runs, key=lambda run: run.per_iteration)
        lowest = min(self.runs, key=lambda run: run.objective[-1])
        lines = [f"Shortest iteration: {fastest.title}, {_seconds(fastest.per_iteration)} s."]
        if all(run.minimized == lowest.minimized for run in self.runs):
            lines.append(f"Lowest objective: {lowest.title}, {_amount(lowest.objective[-1])}.")
        if self.baseline is not None:
            even = [run for run in self.runs if not run.beats_the_baseline]
            lost = [run.title for run in even if not run.is_ahead_of(self.baseline)]
            open_ones = [run.title for run in even if run.is_ahead_of(self.baseline)]
            if lost:
                lines.append(f"No better than the {self.baseline.name} with these settings: {', '.join(lost)}.")
            if open_ones:
                lines.append(
                    f"Better than the {self.baseline.name}, but by less than the test part can tell: "
                    f"{', '.join(open_ones)}."
                )
        scored = [run for run in self.runs if run.scores]
        if scored:
            best = max(scored, key=lambda run: run._sign * run.scores[-1])
            metric = best.metric.upper()
            lines.append(f"Best held-out {metric}: {best.title}, {best.scores[-1]:.4f}.")
            reached = [(run.seconds_to(best.scores[-1]), run.title) for run in self.runs]
            soonest = min(((seconds, name) for seconds, name in reached if seconds is not None), default=None)
            if soonest is not None:
                lines.append(
                    f"First within 1 % of that {metric}: {soonest[1]}, {_seconds(soonest[0])} s, set-up included."
                )
        return "\n".join(lines)

    def _table(self, heading: str, columns: Mapping[str, Callable[[Run], str]]) -> Table:
        """One row for each run: its method, its device and the cells of some columns."""
        rows = [[run.method, run.device, *(cell(run) for cell in columns.values())] for run in self.runs]
        return [heading, "device", *columns], rows, "<<" + ">" * len(columns)

    def _speeds(self) -> Table:
        slowest, differ = max(run.per_iteration for run in self.runs), self.factor_differences
        columns: dict[str, Callable[[Run], str]] = {
            "s / iteration": lambda run: _seconds(run.per_iteration),
            "fastest - slowest": lambda run: " - ".join(map(_seconds, run.spread)),
            "speedup": lambda run: f"{slowest / run.per_iteration:.1f} x",
            "GFLOP/s": lambda run: f"{run.gflops:,.1f}",
            "of gemm": lambda run: f"{run.of_ceiling:.0%}",
            "GB/s": lambda run: f"{run.bytes_per_second / 1e9:,.1f}",
            "objective": lambda run: _amount(run.objective[-1]),
            self.runs[0].metric.upper(): lambda run: f"{run.scores[-1]:.4f}" if run.scores else "-",
        }
        if differ:  # from another device
            columns["factors differ"] = lambda run: (
                f"{differ[run.method, run.device]:.1e}" if (run.method, run.device) in differ else "-"
            )
        return self._table("method", columns)

    def _held_out(self, baseline: Baseline) -> Table:
        """Scores with their intervals, and the baseline in the last row."""
        columns: dict[str, Callable[[Run], str]] = {
            baseline.metric.upper(): lambda run: f"{run.scores[-1]:.4f}",
            "95 %": lambda run: _range(run.interval),
            "minus the baseline (95 %)": lambda run: (
                "-" if run.difference is None else "{:+.4f} ({:+.4f} to {:+.4f})".format(*run.difference)
            ),
        }
        header, rows, align = self._table("held out", columns)
        rows.append([baseline.name, "", f"{baseline.score:.4f}", _range(baseline.interval), ""])
        return header, rows, align

    def _phases(self) -> Table:
        def seconds_of(phase: str) -> Callable[[Run], str]:
            return lambda run: _seconds(run.phases.get(phase, 0.0))

        names = dict.fromkeys(phase for run in self.runs for phase, seconds in run.phases.items() if seconds)
        columns: dict[str, Callable[[Run], str]] = {
            **{name: seconds_of(name) for name in names},
            "all": lambda run: _seconds(sum(run.phases.values())),
            "peak MiB": lambda run: "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:,.0f}",
            "planned MiB": lambda run: f"{run.plan.total_bytes / 2**20:,.0f}",
        }
        return self._table("seconds of a whole fit", columns)

    def to_frame(self) -> Any:
        """A pandas data frame with one row for each run; an ImportError without pandas."""
        return pandas_frame([run.as_dict() for run in self.runs], "use to_json()")

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return everything as JSON; if `path` is given, also write it to a file, atomically."""
        runs = [
            run.as_dict()
            | {"seconds": run.seconds, "objectives": run.objective, "scores": run.scores, "plan": str(run.plan)}
            | {"factors_differ": self.factor_differences.get((run.method, run.device))}
            for run in self.runs
        ]
        content = {
            "name": self.name,
            "shape": self.shape,
            "nnz": self.nnz,
            "load_seconds": self.load_seconds,
            "runs": runs,
            "baseline": None if self.baseline is None else self.baseline.as_dict(),
            "skipped": self.skipped,
            "disagreements": self.disagreements,
        }
        text = json.dumps(content, indent=2)
        if path is not None:
            write_atomically(path, text.encode())
        return text

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Bars of seconds per iteration and of the held-out metric, and quality over seconds, as a matplotlib figure.

        `hybridmf.plots` has each of them alone: `bars`, `score_bars` and `curves`; it raises an ImportError without
        matplotlib.

        Parameters
        ----------
        path : path-like, optional
            File to write the figure to; the suffix selects the format.
        """
        from . import plots

        drawn = [plots.bars, *([] if self.baseline is None else [plots.score_bars]), plots.curves]
        figure = plots.new_figure(5 * len(drawn), 1.6 + 0.5 * max(6, len(self.runs)))
        for draw, ax in zip(drawn, figure.subplots(1, len(drawn)), strict=True):
            draw(self, ax=ax)
            ax.spines[["top", "right"]].set_visible(False)
        figure.suptitle(self.name)
        if path is not None:
            plots.save(figure, path)
        return figure


def _amount(value: float) -> str:
    return f"{value:,.0f}" if 1e5 <= value < 1e12 else f"{value:,.6g}"


def _range(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.low:.4f} - {interval.high:.4f}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0995 or value == 0 else f"{value:#.2g}"


# ------------------------------------------------------------------------------------------------------- what to run


def default_models(feedback: str, factors: int = 64, iterations: int = 10) -> dict[str, FactorModel]:
    """Default methods of a comparison: exact and approximate ones of each family that supports the feedback.

    All have their defaults, as `hybridmf fit` does, so explicit ones fit biases. ALS and CCD++ minimize the same
    objective; the lambda of SGD differs.
    """
    common: dict[str, Any] = {"factors": factors, "iterations": iterations, "random_state": 0}
    if feedback == "implicit":
        return {
            "als": ImplicitALS(**common),
            "als-cg": ImplicitALS(**common, solver="cg"),
            "als-subspace": ImplicitALS(**common, solver="subspace"),
        }
    return {
        "als": ExplicitALS(**common),
        "als-cg": ExplicitALS(**common, solver="cg"),
        "sgd-blocks": SGD(**common, schedule="blocks"),
        "sgd-hogwild": SGD(**common, schedule="hogwild"),
        "sgd-msgd": SGD(**common, schedule="msgd"),
        "sgd-batch-hogwild": SGD(**common, schedule="batch_hogwild"),
        "ccd": CCD(**common),
    }


def _name_of(model: FactorModel) -> str:
    """Class, and the parameters that distinguish methods of one class."""
    params = model.get_params(deep=False)
    words = [
        str(params[key])
        for key in ("solver", "schedule", "assembly")
        if key in params and params[key] not in ("auto", "cholesky")
    ]
    return ", ".join([type(model).__name__, *words])


def _named(models: Any) -> dict[str, FactorModel]:
    """The models by name; none for the default ones."""
    if models is None:
        return {}
    listed = [models] if isinstance(models, FactorModel) else models
    pairs = listed.items() if isinstance(listed, Mapping) else ((None, model) for model in listed)
    named: dict[str, FactorModel] = {}
    for name, model in pairs:
        if not isinstance(model, FactorModel):
            hint = f"; make one: {model.__name__}()" if isinstance(model, type) else ""
            raise TypeError(f"models must be estimators such as ExplicitALS(factors=64), got {model!r}{hint}")
        name = _name_of(model) if name is None else str(name)
        if name in named:
            raise ValueError(f"two models are called {name!r}; pass a dict that names them")
        named[name] = model
    if not named:
        raise ValueError("models is empty; pass an estimator, a list or dict of them, or None for the default ones")
    return named


def _ratings(given: Any, feedback: str, scale: float, seed: int) -> tuple[str, Ratings]:
    """(name, ratings) from the name of a shape, a file or an object."""
    if isinstance(given, Ratings):
        return "ratings", given
    if isinstance(given, Store):
        return given.path.name, given.to_ratings()
    if isinstance(given, (str, os.PathLike)):
        if isinstance(given, str) and given in SHAPES:
            name = given if scale == 1 else f"{given} x {scale:g}"
            return f"{name} (synthetic, {feedback})", synthetic(given, feedback=feedback, scale=scale, seed=seed)  # type: ignore[arg-type]
        if given == "demo":
            from .tools import demo

            ratings = demo.generate(seed=seed).ratings()
            return "invented films", demo.keep_liked(ratings) if feedback == "implicit" else ratings
        if not Path(given).exists():
            raise ValueError(f"{str(given)!r} is neither a file nor a known shape; shapes: demo, {', '.join(SHAPES)}")
        if Path(given).is_dir():
            return Path(given).name, Store.open(given).to_ratings()
        return Path(given).name, Ratings.from_file(given)
    return "matrix", Ratings.from_matrix(given)


def _feedback_of(models: Iterable[FactorModel], feedback: str | None) -> str:
    if feedback is not None:
        return str(check_choice("feedback", feedback, FEEDBACK))
    kinds = {model._objective().feedback for model in models}
    if len(kinds) > 1:
        raise ValueError("models of explicit and of implicit feedback minimize different sums; compare them separately")
    return kinds.pop() if kinds else "explicit"


# ------------------------------------------------------------------------------------------------------------ running


def _memory_meter(device: Any) -> Callable[[], int | None]:
    """A function for the peak of additional memory so far, on a GPU that of its calls; None if it is unknown."""
    if device is not None:
        free = [device.free_bytes()]

        def on_device() -> int:
            free.append(device.free_bytes())
            return int(free[0] - min(free))

        return on_device
    before = system_bytes("/proc/self/status", "VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark (Linux)
    except OSError:
        return lambda: None

    def on_host() -> int | None:
        peak = system_bytes("/proc/self/status", "VmHWM")
        return None if peak is None or before is None else max(0, peak - before)

    return on_host


def _ceiling(plan: Plan, device: Any) -> float:
    """GFLOP/s of a float32 matrix product on the device of a plan."""
    from threadpoolctl import threadpool_limits

    size = CPU_PRODUCT if device is None else GPU_PRODUCT
    a = np.ones((size, size), np.float32)
    if device is not None:
        a = device.upload(a)

    def product() -> float:
        started = time.perf_counter()
        if device is None:
            a @ a
        else:
            device.matmul(a, a)
            device.synchronize()
        return time.perf_counter() - started

    with threadpool_limits(plan.num_threads, user_api="blas"):
        return 2 * size**3 / min(product() for _ in range(4)) / 1e9


def _run(
    case: Case, train: Ratings, test: Ratings | None, bar: Any
) -> tuple[Run, tuple[np.ndarray, np.ndarray], list[Evaluation]]:
    """Fit once and evaluate after each iteration, which does not count in the times; factors and evaluations."""
    name, device, model, plan = case
    metric, opened = METRICS[model._objective().feedback], None
    if plan.gpu is not None:
        from .device.cuda import open_device

        opened = open_device(plan.device)
    ceiling = _ceiling(plan, opened) * (1 if opened is None else max(1, len(plan.devices)))
    memory = _memory_meter(opened)
    objective: list[float] = []
    found: list[Evaluation] = []

    def observe(fitted: Any, record: dict[str, float]) -> None:
        memory()
        objective.append(record["objective"])
        if test is not None and metric == "rmse":
            found.append(evaluate(fitted, test, metrics=(metric,)))
        bar.update()
        bar.set_postfix_str(f"{record['seconds']:.3g} s / iteration")

    bar.set_description(f"{name} on {device}")
    model.fit(train, callback=observe)
    peak = memory()
    if test is not None and metric != "rmse":
        found.append(evaluate(model, test, train=train, metrics=(metric,)))
    seconds = tuple(record["seconds"] for record in model.history_)
    usual = median(seconds[1:] or seconds)
    extra = max(0.0, seconds[0] - usual) if opened is not None else 0.0
    before = {part: model.timings_[part] for part in BEFORE}
    phases = {**before, "compile": extra, "solve": sum(seconds) - extra, "finish": model.timings_["finish"]}
    plan = model.plan_
    rate = plan.flops_per_iteration / usual / 1e9
    run = Run(
        name, plan.device_name, plan, seconds, phases, tuple(objective), metric, tuple(each[metric] for each in found),
        peak, rate, rate / ceiling, plan.bytes_per_iteration / usual, minimized=model._fitted().objective,
    )  # fmt: skip
    return run, (model.user_factors_, model.item_factors_), found


def compare(
    user_items: Any,
    models: Any = None,
    *,
    devices: Sequence[str | Sequence[str]] = ("cpu", "cuda"),
    feedback: str | None = None,
    iterations: int | None = None,
    test_size: float = 0.1,
    scale: float = 1.0,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    show_progress: bool = False,
) -> Comparison:
    """Fit each model on each device from the same initial factors, and report time and quality.

    Parameters
    ----------
    user_items : Ratings, Store, matrix, path-like or str
        Ratings, a file of them, the folder of a store, "demo", or the name of a synthetic shape
        (`hybridmf.datasets.SHAPES`). A store is loaded into memory for the split.
    models : estimator, list or dict of estimators, optional
        Their `device` is replaced. Default: methods for the feedback, see `default_models`.
    devices : sequence of str or list of str
        "cpu", "cuda", "cuda:N", or a list of devices that fit one model together. Missing devices, and methods that a
        device does not support, are skipped and reported; if no combination is left, an error is raised.
    feedback : {"explicit", "implicit"}, optional
        Type of the ratings. Default: the feedback of the models, else "explicit".
    iterations : int, optional
        Iterations of each model. Default: the models' own.
    test_size : float
        Share of held-out entries; 0 holds out none.
    scale : float
        Scale of a synthetic shape: see `hybridmf.datasets.synthetic`.
    seed : int
        Seed of the split, of synthetic ratings, and of models without a `random_state`.
    tolerance : float
        Relative difference of the objective beyond which two devices disagree on one method.
    show_progress : bool
        Show a progress bar on standard error.

    Raises
    ------
    TypeError, ValueError
        Unknown names (the message lists the known ones), models of different feedback, or invalid ratings.
    DeviceError
        No method runs on any of the devices.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> model = hmf.ExplicitALS(factors=4, iterations=2)
    >>> result = hmf.compare("ml-1m", model, devices=["cpu"], scale=0.1)
    >>> result.runs[0].device
    'cpu'
    """
    named = _named(models)
    kind = _feedback_of(named.values(), feedback)
    wanted = [types.check_device(device) for device in ([devices] if isinstance(devices, str) else devices)]
    test_size = check_real("test_size", test_size, 0.0)
    seed, scale = check_int("seed", seed, 0), check_real("scale", scale, 0.0, strict=True)
    check_bool("show_progress", show_progress)
    started = time.perf_counter()
    name, ratings = _ratings(user_items, kind, scale, seed)
    loaded = time.perf_counter() - started
    train, test = (ratings, None) if test_size == 0 else split(ratings, test_size=test_size, random_state=seed)

    cases, skipped = _cases(named or default_models(kind), wanted, iterations, seed, train)
    runs: list[Run] = []
    evaluations: list[list[Evaluation]] = []
    first: dict[str, tuple[Run, tuple[np.ndarray, np.ndarray]]] = {}
    differences: dict[tuple[str, str], float] = {}
    disagreements: list[str] = []
    with progress_bar(sum(model.iterations for _, _, model, _ in cases), show_progress) as bar:
        for case in cases:
            try:
                run, factors, found = _run(case, train, test, bar)
            except (DeviceError, MemoryBudgetError) as error:
                skipped.append(f"{case[0]} on {case[1]}: {error}")
                continue
            runs.append(run)
            evaluations.append(found)
            reference, theirs = first.setdefault(run.method, (run, factors))
            if reference is not run:
                differences[run.method, run.device] = max(map(_difference, factors, theirs))
                disagreements += _disagreement(run, reference, tolerance)
    if not runs:
        raise DeviceError("nothing ran: " + "; ".join(skipped))
    metric, baseline = METRICS[kind], None
    if test is not None:
        popular = evaluate(PopularityRecommender().fit(train), test, train=train, metrics=(metric,))
        baseline = Baseline(BASELINES[kind], metric, popular[metric])
        if popular.n_users > 1:
            baseline = replace(baseline, interval=popular.interval(metric))
            runs = [
                replace(run, interval=found[-1].interval(metric), difference=found[-1].difference(popular, metric))
                for run, found in zip(runs, evaluations, strict=True)
            ]
    return Comparison(
        name, train.shape, train.nnz, loaded, tuple(runs), tuple(skipped), tuple(disagreements), differences, baseline
    )


def _cases(
    named: dict[str, FactorModel],
    devices: Sequence[str | tuple[str, ...]],
    iterations: int | None,
    seed: int,
    train: Ratings,
) -> tuple[list[Case], list[str]]:
    """(runs, reasons for skipped combinations), decided from plans before any work."""
    cases, skipped, present = [], [], []
    for device in devices:
        ranks = (device,) if isinstance(device, str) else device
        try:
            for rank in ranks:
                dispatch.find_gpu(rank)
            present.append(("+".join(ranks), device if isinstance(device, str) else list(device)))
        except DeviceError as error:
            skipped.append(f"{'+'.join(ranks)}: {error}")
    for (method, model), (name, given) in itertools.product(named.items(), present):
        one = unfitted(model, device=given)
        if iterations is not None:
            one.set_params(iterations=iterations)
        if one.random_state is None:
            one.set_params(random_state=seed)
        try:
            cases.append((method, name, one, make_plan(train, one)))
        except (DeviceError, ValueError) as error:
            skipped.append(f"{method} on {name}: {error}")
    return cases, skipped


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of factors, relative to the largest factor."""
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), np.finfo(np.float32).tiny))


def _disagreement(run: Run, reference: Run, tolerance: float) -> list[str]:
    """A message if the objectives of a method differ by more than rounding explains."""
    # races, or the number of ranks, change the order of SGD's updates
    method = run.plan.method
    by_order = isinstance(method, SgdMethod) and (method.schedule in RACING or run.plan.devices)
    allowed = max(tolerance, RACING_TOLERANCE) if by_order else tolerance
    ours, theirs = run.objective[-1], reference.objective[-1]
    if abs(ours - theirs) <= allowed * abs(theirs):
        return []
    return [
        f"{run.method}: the objective is {ours:.6g} on {run.device} and {theirs:.6g} on {reference.device}, "
        f"{abs(ours - theirs) / abs(theirs):.1e} apart where {allowed:.0e} is allowed"
    ]
