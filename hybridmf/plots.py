"""Pictures of fits, ratings, rankings and comparisons with matplotlib (extra ``plot``).

Each function draws into the axes given as `ax`, or into a new figure, and returns the axes; ``ax.figure.savefig(path)``
writes the picture. Without matplotlib, it raises an ImportError. pyplot is not used: nothing global changes.
"""

from __future__ import annotations

import functools
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from . import formats
from .core.files import write_atomically
from .core.sparse import entry_rows
from .core.validate import as_csr, check_int
from .data.store import Store
from .metrics import PopularityRecommender, evaluate
from .model.early_stopping import LOWER_IS_BETTER
from .ratings import Ratings, as_ratings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2c6fad", "#c03a2b", "#3a8f4d", "#b8860b", "#7a4fa3", "#5b5b5b")

POINTS = 1_000  # ranks of a curve of `degrees`; on a logarithmic axis, more are indistinguishable
CELLS = 400  # maximum number of rows and columns of an image of `occupancy`; a cell may cover several tiles


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; an ImportError names the package to install."""
    try:
        figure: Figure = _figure_class()(figsize=(width, height), layout="constrained")
    except ImportError as error:
        raise ImportError('plot needs matplotlib: pip install "hybridmf[plot]"') from error
    return figure


@functools.cache
def _figure_class() -> Any:
    """matplotlib's `Figure`, which notebooks show: they know how only where pyplot is in use."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, format="png", dpi=110)
            return content.getvalue()

        def __reduce__(self) -> Any:  # as a plain figure: pickle finds no class of a function
            state: list[Any] = list(super().__reduce__())[2:]
            return (Figure.__new__, (Figure,), *state)

    return ShownFigure


def check_picture(path: str | os.PathLike[str]) -> None:
    """Raise, before any work, unless matplotlib is installed and can write a picture under this name."""
    canvas = new_figure(1, 1).canvas
    ending = os.path.splitext(path)[1].lower().removeprefix(".")
    if ending not in canvas.get_supported_filetypes():
        known = ", ".join(f".{each}" for each in sorted(canvas.get_supported_filetypes()))
        raise ValueError(f"{os.fspath(path)} has no ending of a picture format; endings: {known}")


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure, atomically; the ending of `path` selects the format."""
    check_picture(path)
    content = io.BytesIO()
    figure.savefig(content, format=os.path.splitext(path)[1].lower().removeprefix("."), dpi=150)
    write_atomically(path, content.getvalue())


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    axes = new_figure(6.4, 4.2).subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


# ------------------------------------------------------------------------------------------------------------- a fit


def training(model: Any, *, metric: str | None = None, ax: Any = None) -> Axes:
    """Objective, and a metric of the validation set, over the iterations of a fit; the chosen iteration is marked.

    Parameters
    ----------
    model : fitted estimator
        Its ``history_`` has the objective if the fit had a validation set, a callback or a progress bar.
    metric : str, optional
        Default: the last that was recorded, which is that of ``early_stopping=``.
    ax : matplotlib axes, optional
        Axes of the objective; the metric gets an axis on its right side.

    Raises
    ------
    ValueError
        ``history_`` has no objective, or not this metric.
    """
    history = model.history_
    recorded = [name for name in history[-1] if name not in ("iteration", "seconds", "objective")]
    if "objective" not in history[-1]:
        raise ValueError(
            "history_ has no objective: fit with validation=, with callback= (such as print) or with a progress bar"
        )
    if metric is not None and metric not in recorded:
        raise ValueError(f"metric {metric!r} is not in history_, which has {', '.join(recorded) or 'no metric'}")
    ax = _axes(ax)
    kept = [record for record in history if "objective" in record]  # records from before a resume may lack it
    iterations = [record["iteration"] for record in kept]
    ax.plot(iterations, [record["objective"] for record in kept], color=COLORS[0], marker=".", label="objective")
    ax.set_xlabel("iteration")
    ax.set_ylabel("objective", color=COLORS[0])
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.axvline(model.n_iter_, color="0.6", linestyle="--", zorder=0, label=f"chosen: iteration {model.n_iter_}")
    lines = list(ax.lines)
    if recorded:
        lines.insert(1, _metric_beside(ax, metric or recorded[-1], kept, model.n_iter_))
    # above the axes, since curves may cross every corner
    ax.legend(lines, [line.get_label() for line in lines], loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return ax


def _metric_beside(ax: Any, metric: str, records: Sequence[Mapping[str, float]], chosen: int) -> Any:
    """The curve of a metric on an axis of its own, with a ring at the chosen iteration."""
    beside = ax.twinx()
    beside.spines["top"].set_visible(False)
    points = [(record["iteration"], record[metric]) for record in records if metric in record]
    (line,) = beside.plot(*zip(*points, strict=True), color=COLORS[1], marker=".", label=metric.upper())
    at = dict(points)
    if chosen in at:
        beside.plot([chosen], [at[chosen]], color=COLORS[1], marker="o", markersize=9, fillstyle="none")
    better = "lower" if metric in LOWER_IS_BETTER else "higher"
    beside.set_ylabel(f"validation {metric.upper()} ({better} is better)", color=COLORS[1])
    return line


# ----------------------------------------------------------------------------------------------------------- ratings


def degrees(ratings: Any, *, ax: Any = None) -> Axes:
    """Entries of each user and of each item, in descending order, on logarithmic axes.

    Parameters
    ----------
    ratings : Ratings, Store, sparse matrix or data frame
    ax : matplotlib axes, optional

    Raises
    ------
    TypeError, RatingsError
        `ratings` are no ratings.
    """
    ax = _axes(ax)
    for color, (side, counts) in zip(COLORS, entry_counts(ratings).items(), strict=False):
        ordered = np.sort(counts[counts > 0])[::-1]
        empty = len(counts) - len(ordered)
        label = f"{len(counts):,} {side}s" + (f", {empty:,} of them without entries" if empty else "")
        ranks = np.unique(np.geomspace(1, max(len(ordered), 1), POINTS).astype(np.int64))[: len(ordered)]
        ax.plot(ranks, ordered[ranks - 1], color=color, label=label, drawstyle="steps-post")
    ax.set(xscale="log", yscale="log", xlabel="rank of the user or item", ylabel="entries", ylim=(0.8, None))
    ax.legend(frameon=False)
    return ax


def entry_counts(ratings: Any) -> dict[str, np.ndarray]:
    """Entries of each user and of each item, as `degrees` draws them."""
    ratings = as_ratings(ratings)
    if isinstance(ratings, Store):
        return {"user": ratings.degrees("user"), "item": ratings.degrees("item")}
    matrix = ratings.user_items if isinstance(ratings, Ratings) else as_csr(ratings, name="ratings")
    return {"user": np.diff(matrix.indptr), "item": np.bincount(matrix.indices, minlength=matrix.shape[1])}


def occupancy(ratings: Any, tile_rows: int = 256, tile_cols: int = 192, *, ax: Any = None) -> Any:
    """Entries of each BALS tile, as the ratings are and with users and items sorted by their entries (BALS 4.4).

    Dense corners are where tiles pay off. The titles have the share of vacant tiles and the reuse factor, the entries
    that each loaded column serves.

    Parameters
    ----------
    ratings : Ratings, sparse matrix or data frame
    tile_rows, tile_cols : int
        As for `BalsMatrix.from_csr`.
    ax : pair of matplotlib axes, optional

    Returns
    -------
    array of two matplotlib axes

    Raises
    ------
    TypeError, ValueError, RatingsError
    """
    matrix = as_csr(as_ratings(ratings), name="ratings")
    tile_rows, tile_cols = check_int("tile_rows", tile_rows, 1), check_int("tile_cols", tile_cols, 1)
    axes = new_figure(9.5, 4.6).subplots(1, 2) if ax is None else np.asarray(ax)
    if axes.shape != (2,):
        raise ValueError(f"ax must be two axes, before and after reordering, got shape {axes.shape}")
    both = {"as read": matrix, "sorted by degree": formats.reorder(matrix).matrix}
    images = [_entries_per_tile(each, tile_rows, tile_cols) for each in both.values()]
    from matplotlib.colors import LogNorm

    scale = LogNorm(min(image[image > 0].min(initial=1) for image in images), max(image.max() for image in images))
    for axes_of_one, (name, each), image in zip(axes, both.items(), images, strict=True):
        found = formats.BalsMatrix.from_csr(each, tile_rows, tile_cols).statistics()
        shown = axes_of_one.imshow(
            np.ma.masked_equal(image, 0), norm=scale, aspect="auto", interpolation="none", cmap="viridis",
            extent=(0, each.shape[1], each.shape[0], 0),
        )  # fmt: skip
        facts = f"{found['vacant_tile_share']:.0%} of tiles vacant, reuse {found['reuse_factor']:.2f}"
        axes_of_one.set(title=f"{name}\n{facts}", xlabel="item", ylabel="user")
    axes[1].figure.colorbar(shown, ax=list(axes), label=f"entries per tile of {tile_rows} x {tile_cols}")
    return axes


def _entries_per_tile(matrix: sp.csr_array, tile_rows: int, tile_cols: int) -> np.ndarray:
    """Mean number of entries of the tiles in each cell of an image of at most CELLS x CELLS."""
    tiles = [-(-size // tile) for size, tile in zip(matrix.shape, (tile_rows, tile_cols), strict=True)]
    merged = [-(-count // CELLS) for count in tiles]
    cells = [-(-count // many) for count, many in zip(tiles, merged, strict=True)]
    rows, columns = entry_rows(matrix) // (tile_rows * merged[0]), matrix.indices // (tile_cols * merged[1])
    sums = np.bincount(rows * np.int64(cells[1]) + columns, minlength=cells[0] * cells[1])
    per_cell = [
        np.minimum(many, count - many * np.arange(n)) for count, many, n in zip(tiles, merged, cells, strict=True)
    ]
    image: np.ndarray = sums.reshape(cells) / np.outer(*per_cell)
    return image


# ---------------------------------------------------------------------------------------------------------- rankings


def recall_curves(
    models: Any,
    test: Any,
    train: Any,
    *,
    k: int = 50,
    relevance_threshold: float | None = None,
    unknown: str = "error",
    ax: Any = None,
) -> Axes:
    """Recall@1 to Recall@k of models, against the most popular items.

    Parameters
    ----------
    models : model, or dict of str to model
        As for `evaluate`; a dict names the curves.
    test, train, relevance_threshold, unknown
        As for `evaluate`; the baseline is fitted on `train`.
    k : int
        Longest list.
    ax : matplotlib axes, optional

    Raises
    ------
    TypeError, ValueError
        As for `evaluate`.
    """
    named = dict(models) if isinstance(models, Mapping) else {type(models).__name__: models}
    ks = np.arange(1, check_int("k", k, 1) + 1)
    names = [f"recall@{each}" for each in ks]
    options: dict[str, Any] = {"relevance_threshold": relevance_threshold, "unknown": unknown, "metrics": names}
    ax = _axes(ax)
    popular = PopularityRecommender().fit(train)
    for place, (name, model) in enumerate({**named, "most popular items": popular}.items()):
        found = evaluate(model, test, train=train, **options)
        style = {"color": "0.5", "linestyle": "--"} if model is popular else {"color": COLORS[place % len(COLORS)]}
        ax.plot(ks, [found[each] for each in names], label=name, **style)
    ax.set(xlabel="k", ylabel="recall@k", xlim=(0, k), ylim=(0, None))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(frameon=False)
    return ax


# ------------------------------------------------------------------------------------------------------- comparisons


def bars(result: Any, *, ax: Any = None) -> Axes:
    """Seconds per iteration of each run of a `Comparison`, as bars that start at zero.

    Parameters
    ----------
    result : Comparison
    ax : matplotlib axes, optional
    """
    ax = _axes(ax)
    names = [f"{run.method}\n{run.device}" for run in result.runs]
    seconds = [run.per_iteration for run in result.runs]
    drawn = ax.barh(names[::-1], seconds[::-1], color=COLORS[0])
    ax.bar_label(drawn, [f" {each:#.2g}" for each in seconds[::-1]], fontsize="small")
    ax.set(xlabel="seconds per iteration", xlim=(0, 1.12 * max(seconds)))
    return ax


def score_bars(result: Any, *, ax: Any = None) -> Axes:
    """Held-out metric of each run of a `Comparison` with its 95 % interval, and the baseline; bars start at zero.

    Parameters
    ----------
    result : Comparison
        With held-out entries.
    ax : matplotlib axes, optional

    Raises
    ------
    ValueError
        `result` has no held-out entries.
    """
    if result.baseline is None:
        raise ValueError("result has no held-out entries; compare with test_size > 0")
    ax = _axes(ax)
    rows = [(f"{run.method}\n{run.device}", run.scores[-1], run.interval, COLORS[0]) for run in result.runs]
    rows.append((textwrap.fill(result.baseline.name, 14), result.baseline.score, result.baseline.interval, "0.6"))
    for name, score, interval, color in rows[::-1]:
        reach = None if interval is None else [[max(0.0, score - interval.low)], [max(0.0, interval.high - score)]]
        ax.barh([name], [score], xerr=reach, color=color, ecolor="black", capsize=3)
    better = "lower" if result.baseline.metric in LOWER_IS_BETTER else "higher"
    ax.set(xlabel=f"held-out {result.baseline.metric.upper()} ({better} is better)", xlim=(0, None))
    return ax


def curves(result: Any, *, ax: Any = None) -> Axes:
    """Held-out RMSE of each run of a `Comparison` over seconds; the objective where rankings are compared.

    Parameters
    ----------
    result : Comparison
    ax : matplotlib axes, optional
    """
    ax = _axes(ax)
    by_score = all(len(run.scores) == len(run.seconds) for run in result.runs)
    for place, run in enumerate(result.runs):
        values = run.scores if by_score else run.objective
        style = {"color": COLORS[place % len(COLORS)], "linestyle": "-" if place < len(COLORS) else "--"}
        ax.plot(run.before_first + np.cumsum(run.seconds), values, marker=".", label=run.title, **style)
    if by_score and result.baseline is not None:
        ax.axhline(result.baseline.score, color="0.6", linestyle="--", zorder=0, label=result.baseline.name)
    ax.set(xscale="log", xlabel="seconds, set-up included", ylabel="held-out RMSE" if by_score else "objective")
    from matplotlib.ticker import LogLocator

    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")  # within a decade, matplotlib would label these, too
    ax.legend(fontsize="small", frameon=False)
    return ax


# ------------------------------------------------------------------------------------------------------------ a search


def trials(result: Any) -> Figure:
    """The metric of the trials of a search over each parameter and over seconds; complete trials are filled.

    Parameters
    ----------
    result : SearchResult
    """
    shown = [trial for trial in result.trials if trial.value is not None]
    varied = {name: None for trial in shown for name in trial.params}
    simple = "item means" if result.metric in LOWER_IS_BETTER else "popularity"
    names = [name for name in varied if len({repr(trial.params.get(name)) for trial in shown}) > 1]
    columns, rows = min(3, len(names) + 1), -(-(len(names) + 1) // 3)
    figure = new_figure(3.2 * columns, 2.8 * rows)
    for place, name in enumerate([*names, "seconds"], 1):
        ax = figure.add_subplot(rows, columns, place)
        points = [(trial.finished if name == "seconds" else trial.params.get(name), trial) for trial in shown]
        points = [(each, trial) for each, trial in points if each is not None]
        numbers = [each for each, _ in points if isinstance(each, (int, float)) and not isinstance(each, bool)]
        given = [each if len(numbers) == len(points) else str(each) for each, _ in points]
        faces = [COLORS[0] if trial.state == "complete" else "none" for _, trial in points]
        ax.scatter(given, [trial.value for _, trial in points], facecolors=faces, edgecolors=COLORS[0], s=18)
        positive = [each for each in numbers if each > 0]
        if len(numbers) == len(points) and positive and max(positive) > 20 * min(positive):
            if len(positive) == len(numbers):
                ax.set_xscale("log")
            else:
                ax.set_xscale("symlog", linthresh=min(positive))
        ax.set(xlabel=name, ylabel=result.metric if (place - 1) % columns == 0 else "")
        ax.axhline(result.popularity_value, color="0.6", linestyle="--", zorder=0, label=simple)
    best = np.maximum.accumulate if result.metric not in LOWER_IS_BETTER else np.minimum.accumulate
    complete = sorted((trial.finished, trial.value) for trial in shown if trial.state == "complete")
    times, scores = zip(*complete, strict=True) if complete else ((), ())
    ax.step(times, best(scores), where="post", color=COLORS[0], label="best so far")
    ax.legend(fontsize="small", frameon=False)
    return figure
