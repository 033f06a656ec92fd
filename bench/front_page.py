"""The picture of the front page, drawn from recorded lines: hybridmf beside other libraries, bars from zero.

    python bench/front_page.py docs/_static/front-page.svg

Three panels are iterations of ALS on two cores (bench/cpu.py), the fourth is a whole fit on a GPU (bench/fit.py). Each
shows a line that has a rival, a current one if there is any (current.py); all bars of a panel are of one run. Nothing
is measured.
"""

from __future__ import annotations

from pathlib import Path

import click
import current
import performance
from paper_common import figure

CPU_PANELS = {
    "implicit exact": "Implicit feedback, exact",
    "implicit CG, 3 steps": "Implicit feedback, conjugate gradients",
    "explicit exact": "Explicit ratings, exact",
}
"""Tasks of bench/cpu.py and their titles."""

GPU_FITS = {"hybridmf, cuda": "hybridmf", "implicit, gpu (3 CG steps)": "implicit"}
"""Fits of bench/fit.py and their libraries."""

OURS = {"simd": "hybridmf", "cg": "hybridmf"}
COLORS = {"hybridmf": "#2b6cb0"}

Panel = tuple[str, str, dict[str, float]]


def cpu_panel(task: str) -> Panel:
    """An iteration on two cores: the default kernel and its rivals, on the kind of processor that has most panels."""
    lines = [
        line for line in performance.lines("cpu", shape="ml-10m", factors=64, threads=2)
        if line["task"] in CPU_PANELS
        and current.names(line, "seconds_per_iteration") & {"implicit", "lenskit", "cmfrec"}
    ]  # fmt: skip
    alike = {line["task"]: line for line in current.of_one_kind("cpu", lines, "task")}
    line = alike.get(task) or current.best_first("cpu", [line for line in lines if line["task"] == task])[0]
    found = {OURS.get(name, name): seconds for name, seconds in line["seconds_per_iteration"].items()
             if name not in ("blas3", "bals", "rank1")}  # fmt: skip
    return CPU_PANELS[task], "seconds of an iteration on 2 CPU cores,\nshape of MovieLens 10M, 64 factors", found


def gpu_panel() -> Panel:
    """A whole fit by both libraries in one run."""
    lines = performance.together("fit", list(GPU_FITS), shape="ml20m", feedback="implicit")
    found = {GPU_FITS[line["what"]]: line["seconds"] for line in lines}
    unit = (
        f"seconds of 10 iterations on one {current.card(lines[0]).split()[1]}, shape of MovieLens 20M,\n"
        "64 factors; hybridmf exact, implicit with 3 CG steps"
    )
    return "Implicit feedback, whole fit on a GPU", unit, found


def draw(path: Path, panels: list[Panel]) -> None:
    """Four panels, each with its own axis from zero and the seconds at the bars."""
    with figure(path, 8.4, 4.6) as drawing:
        drawing.patch.set_facecolor("white")
        drawing.get_layout_engine().set(h_pad=0.1)
        for axes, (title, unit, found) in zip(drawing.subplots(2, 2).flat, panels, strict=True):
            libraries = sorted(found, key=lambda each: found[each], reverse=True)
            bars = axes.barh(
                libraries,
                [found[each] for each in libraries],
                color=[COLORS.get(each, "#a0aec0") for each in libraries],
            )
            axes.bar_label(bars, [f" {found[each]:.2f} s" for each in libraries])
            axes.set_xlim(0, 1.2 * max(found.values()))
            axes.set_title(title, fontsize=10, fontweight="bold")
            axes.set_xlabel(unit, fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def main(path: Path) -> None:
    """Draw the picture into an SVG file."""
    draw(path, [*map(cpu_panel, CPU_PANELS), gpu_panel()])


if __name__ == "__main__":
    main()
