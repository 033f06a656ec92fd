"""Figures of the tuner's measurements, drawn from its records (Gates fig. 13)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..plots import new_figure

Line = dict[str, Any]

COLORS = ("#c03a2b", "#2c6fad", "#3a8f4d", "#b8860b", "#7a4fa3", "#2aa198", "#d0689a", "#5b5b5b")
MARKERS = "oDs^vP*X"


def clouds(lines: Iterable[Line]) -> dict[str, Any]:
    """GFLOP/s of all configurations over the rank, one figure for each kernel and kind of facts (Gates fig. 13).

    Gray lines connect the ranks of one configuration. Configurations that are fastest at some rank have a color; a ring
    marks the chosen one.

    The result: by file name, without suffix.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("bench") == "tune" and line["status"] == "timed":
            kinds = [f"{key}-{value}" for key, value in line["facts"].items() if key not in ("rank", "ld", "padded")]
            groups.setdefault("-".join([line["kernel"], *kinds]), []).append(line)
    return {name: _cloud(name, group) for name, group in groups.items()}


def _cloud(name: str, lines: list[Line]) -> Any:
    parts = list(lines[0]["gflops"])
    figure = new_figure(5.5 * len(parts), 4.5)
    configs: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["factors"]):
        configs.setdefault(config_text(line["config"]), []).append(line)
    for axes, part in zip(np.atleast_1d(figure.subplots(1, len(parts))), parts, strict=True):
        for group in configs.values():
            axes.plot(*_points(group, part), color="0.8", linewidth=0.7, marker=".", markersize=2, zorder=1)
        for place, text in enumerate(best_at_some_rank(lines, part)):
            style = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place // len(COLORS) % len(MARKERS)]}
            axes.plot(*_points(configs[text], part), **style, linewidth=1.2, markersize=5, label=text, zorder=2)
        chosen = [line for line in lines if line["winner"]]
        rings = {"facecolors": "none", "edgecolors": "black", "s": 90, "zorder": 3}
        axes.scatter(*_points(chosen, part), **rings)
        axes.set(title=part, xlabel="f", ylabel="GFLOP/s", ylim=(0, None))
        axes.legend(fontsize=6, loc="lower right")
    figure.suptitle(name)
    return figure


def _points(lines: Sequence[Line], part: str) -> tuple[list[int], list[float]]:
    return [line["factors"] for line in lines], [line["gflops"][part] for line in lines]


def config_text(config: dict[str, Any]) -> str:
    return "(" + ", ".join(str(int(value)) for value in config.values()) + ")"


def best_at_some_rank(lines: Iterable[Line], part: str) -> list[str]:
    """Configurations that are fastest at some rank, in the order of these ranks."""
    best: dict[int, Line] = {}
    for line in lines:
        known = best.get(line["factors"])
        if known is None or line["gflops"][part] > known["gflops"][part]:
            best[line["factors"]] = line
    return list(dict.fromkeys(config_text(best[f]["config"]) for f in sorted(best)))


def save_all(figures: dict[str, Any], folder: Path) -> list[Path]:
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "hybridmf"}):  # reproducible files
        for name, figure in figures.items():
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
    return paths
