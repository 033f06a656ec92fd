"""The picture at the end of each paper's page, drawn from the lines: when the method is the right one today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import current
import figures
from paper_common import figure

Line = dict[str, Any]
Results = dict[str, list[Line]]


def bars(path: Path, names: Sequence[str], values: Sequence[float | None], label: str) -> None:
    """Horizontal bars with their values; None is a method that never got there."""
    with figure(path, 7.0, 0.5 + 0.3 * len(names)) as drawing:
        panel = drawing.subplots()
        panel.barh(range(len(names)), [value or 0 for value in values])
        panel.set_yticks(range(len(names)), names)
        panel.invert_yaxis()
        panel.set_xlabel(label)
        for place, value in enumerate(values):
            panel.text(value or 0, place, f" {value:.3g}" if value else " not reached", va="center", fontsize=8)
        panel.margins(x=0.15)


def draw_bals(path: Path, results: Results) -> None:
    """Iterations on Netflix's shape, relative to the fused kernel."""
    lines = figures.select(results, "paper_bals task=assemblies shape=netflix")
    of = {(line["method"], line["factors"]): line["seconds"] for line in lines}
    ranks = sorted({factors for _, factors in of})
    every = [(method, factors) for factors in ranks for method in ("fused", "mo_als", "sparse_syrk", "bals")]
    cases = [case for case in every if case in of and ("fused", case[1]) in of]
    values = [_seconds(of[case]) / _seconds(of["fused", case[1]]) for case in cases]
    bars(path, [f"{method}, f = {factors}" for method, factors in cases], values, "times the default (fused)")


def _seconds(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


def draw_cumf(path: Path, results: Results) -> None:
    """Seconds of iterations on Netflix's shape to within 1 % of the best test RMSE of all methods."""
    lines = [line for line in figures.select(results, "paper_cumf task=convergence shape=netflix") if line["rmse"]]
    target = 1.01 * min(min(line["rmse"]) for line in lines)
    bars(path, [line["method"] for line in lines], [_until(line, target) for line in lines], "seconds")


def _until(line: Line, target: float) -> float | None:
    clock = accumulate(line["seconds"])
    return next((now for now, rmse in zip(clock, line["rmse"], strict=False) if rmse <= target), None)


def draw_gates(path: Path, results: Results) -> None:
    """Iterations on Netflix's shape over the rank: 16 cores and one GPU."""
    lines = figures.select(results, "paper_gates task=iteration shape=netflix scale=1 device=cuda")
    lines += figures.select(results, "paper_gates task=iteration shape=netflix scale=1 device=cpu")
    with figure(path, 7.0, 3.2) as drawing:
        panel = drawing.subplots()
        for method in dict.fromkeys(line["method"] for line in lines):
            points = sorted(
                (line["factors"], 1e3 * _seconds(line["seconds"])) for line in lines if line["method"] == method
            )
            panel.plot(*zip(*points, strict=True), "o-", label=method)
        panel.set_yscale("log")
        panel.set_xlabel("f")
        panel.set_ylabel("ms of an iteration")
        panel.legend(fontsize=7)


def draw_msgd(path: Path, results: Results) -> None:
    """Lowest test RMSE of each method at its best learning rate, over the seconds of its iterations."""
    lines = figures.select(results, "paper_msgd task=convergence shape=ml-20m")
    lines = sorted((line for line in lines if line["rmse"]), key=lambda line: -min(line["rmse"]))
    lines = list({line["method"]: line for line in lines}.values())
    with figure(path, 7.0, 3.4) as drawing:
        panel = drawing.subplots()
        for line in lines:
            at = sum(line["seconds"]), min(line["rmse"])
            panel.plot(*at, "o")
            panel.annotate(f" {line['method']} ({len(line['seconds'])})", at, fontsize=7)
        panel.set_xscale("log")
        panel.set_xlabel("seconds of all iterations (their number)")
        panel.set_ylabel("lowest test RMSE")
        panel.margins(x=0.25)


def draw_multi_gpu(path: Path, results: Results) -> None:
    """Times as fast as one GPU, of each method on one kind of GPU."""

    def case_of(line: Line) -> tuple[str, int, int]:
        return line["shape"], line["factors"], line["gpus"]

    names: list[str] = []
    values: list[float | None] = []
    scale = [line for line in results["scale"] if "reduction" not in line and "limit" not in line]
    scale = current.of_one_kind("scale", scale, "shape", "factors", "gpus")
    epochs = figures.select(results, "mcumsgd shape=netflix factors=128 order=passes", newest=False)
    epochs = current.of_one_kind("mcumsgd", epochs, "ranks", "streams", "long_row")
    for shape, factors in (("netflix", 100), ("msd", 128), ("msd", 64), ("shop", 64)):
        for count in (2, 4):
            names.append(f"ALS, {shape}, f = {factors}, {count} GPUs")
            values.append(next((line["speedup"] for line in scale if case_of(line) == (shape, factors, count)), None))
    for count in (2, 4):
        names.append(f"MCUMSGD, netflix, f = 128, {count} GPUs")
        values.append(max((line["speed_up"] for line in epochs if line["ranks"] == count), default=None))
    bars(path, names, values, f"times one GPU (ALS: {current.card(scale[-1])}; MCUMSGD: {current.card(epochs[-1])})")


PICTURES: dict[str, Callable[[Path, Results], None]] = {
    "bals": draw_bals, "cumf": draw_cumf, "gates": draw_gates, "msgd": draw_msgd, "multi-gpu": draw_multi_gpu,
}  # fmt: skip


def draw(folder: Path, results: Results) -> None:
    """All pictures."""
    for name, draw_one in PICTURES.items():
        draw_one(folder / f"takeaway-{name}.svg", results)
