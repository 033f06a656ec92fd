"""Figures of what the tuner measured, from its JSON lines alone: Gates fig. 13, BALS figs. 13 and 14."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]

COLORS = ("#c03a2b", "#2c6fad", "#3a8f4d", "#b8860b", "#7a4fa3", "#2aa198", "#d0689a", "#5b5b5b")
MARKERS = "oDs^vP*X"


def read_lines(path: Path) -> list[Line]:
    """Lines of a JSON lines file.

    Raises
    ------
    ValueError
        A line is no JSON object; the message says which.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number}: no JSON object")
        lines.append(line)
    return lines


def make_figure(width: float, height: float) -> Any:
    """An empty figure.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "hybridmf[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def clouds(lines: Iterable[Line]) -> dict[str, Any]:
    """GFLOP/s of all configurations over the rank, one figure for each kernel and kind of facts (Gates fig. 13).

    Gray lines join the ranks of one configuration. What was fastest at some rank has a color; a ring marks what was
    chosen.

    Returns
    -------
    dict of str to matplotlib figure
        By a name for a file.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("bench") == "tune" and line["status"] == "timed":
            kinds = [f"{key}-{value}" for key, value in line["facts"].items() if key not in ("rank", "ld", "padded")]
            groups.setdefault("-".join([line["kernel"], *kinds]), []).append(line)
    return {name: _cloud(name, group) for name, group in groups.items()}


def _cloud(name: str, lines: list[Line]) -> Any:
    parts = list(lines[0]["gflops"])
    figure = make_figure(5.5 * len(parts), 4.5)
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
    """Values of a configuration in a few characters."""
    return "(" + ", ".join(str(int(value)) for value in config.values()) + ")"


def best_at_some_rank(lines: Iterable[Line], part: str) -> list[str]:
    """Configurations that no other beats at some rank, in the order of these ranks."""
    best: dict[int, Line] = {}
    for line in lines:
        known = best.get(line["factors"])
        if known is None or line["gflops"][part] > known["gflops"][part]:
            best[line["factors"]] = line
    return list(dict.fromkeys(config_text(best[f]["config"]) for f in sorted(best)))


def heat_maps(lines: Iterable[Line]) -> dict[str, Any]:
    """GFLOP/s over height and width of BALS tiles, one figure for each data set, kernel and rank (BALS figs. 13, 14).

    Rows and columns as they come and by degree stand beside each other on one scale; what Gates' kernel reaches on the
    same data is named.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("bench") == "tiles":
            groups.setdefault(f"tiles-{line['variant']}-{line['shape']}-{line['factors']}", []).append(line)
    return {name: _heat_map(name, group) for name, group in groups.items()}


def _heat_map(name: str, lines: list[Line]) -> Any:
    orders = list(dict.fromkeys(line["order"] for line in lines))
    rates = [line["gflops"] for line in lines]
    figure = make_figure(5.2 * len(orders), 4.2)
    image = None
    for axes, order in zip(np.atleast_1d(figure.subplots(1, len(orders))), orders, strict=True):
        group = [line for line in lines if line["order"] == order]
        heights, widths, grid = as_grid(group)
        image = axes.imshow(grid, origin="lower", aspect="auto", cmap="jet", vmin=min(rates), vmax=max(rates))
        axes.set_xticks(range(len(heights)), [str(value) for value in heights], rotation=90, fontsize=6)
        axes.set_yticks(range(len(widths)), [str(value) for value in widths], fontsize=6)
        gates = group[0].get("gates_gflops")
        beside = f"; Gates' kernel {gates:,.0f}" if gates else ""
        axes.set(title=f"{order}: best {np.nanmax(grid):,.0f}{beside}", xlabel="xb (rows)", ylabel="yb (columns)")
    figure.colorbar(image, ax=figure.axes, label="GFLOP/s")
    figure.suptitle(name)
    return figure


def as_grid(lines: Sequence[Line]) -> tuple[list[int], list[int], np.ndarray]:
    """(heights, widths, GFLOP/s of shape (n_widths, n_heights)); NaN where nothing was measured."""
    heights = sorted({line["tile_rows"] for line in lines})
    widths = sorted({line["tile_cols"] for line in lines})
    grid = np.full((len(widths), len(heights)), np.nan)
    for line in lines:
        grid[widths.index(line["tile_cols"]), heights.index(line["tile_rows"])] = line["gflops"]
    return heights, widths, grid


def save_all(figures: dict[str, Any], folder: Path) -> list[Path]:
    """Write figures as SVG files; their paths."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "hybridmf"}):  # the same bytes for the same lines
        for name, figure in figures.items():
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
    return paths
