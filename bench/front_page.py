"""The picture of the front page, drawn from recorded lines: hybridmf beside other libraries, bars from zero.

    python bench/front_page.py docs/_static/front-page.svg

Three panels are iterations of ALS on two cores (bench/cpu.py), the fourth is a whole fit on a GPU (bench/fit.py). Each
shows the newest line that has a rival; all bars of a panel are of one run or of one kind of GPU. Nothing is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from common import RESULTS
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


def lines_of(name: str) -> list[dict[str, Any]]:
    """All recorded lines of a benchmark, oldest first."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def cpu_panel(task: str) -> Panel:
    """An iteration on two cores: the default kernel and the rivals of the newest line."""
    line = [
        each for each in lines_of("cpu")
        if each["task"] == task and each["shape"] == "ml-10m" and each["factors"] == 64 and each["threads"] == 2
        and len(set(each["seconds_per_iteration"]) & {"implicit", "lenskit", "cmfrec"}) > 0
    ][-1]  # fmt: skip
    found = {OURS.get(name, name): seconds for name, seconds in line["seconds_per_iteration"].items()
             if name not in ("blas3", "bals", "rank1")}  # fmt: skip
    return CPU_PANELS[task], "seconds of an iteration on 2 CPU cores,\nshape of MovieLens 10M, 64 factors", found


def gpu_panel() -> Panel:
    """A whole fit: the newest line of each library on the kind of GPU that both ran on; early lines are of an H200."""
    newest: dict[tuple[str, str], float] = {}
    for line in lines_of("fit"):
        if (line["shape"], line["feedback"]) == ("ml20m", "implicit") and line["what"] in GPU_FITS:
            newest[line.get("gpu", "NVIDIA H200"), GPU_FITS[line["what"]]] = line["seconds"]
    gpu = next(gpu for gpu, library in newest if library != "hybridmf")
    found = {library: seconds for (other, library), seconds in newest.items() if other == gpu}
    unit = (
        f"seconds of 10 iterations on one {gpu.removeprefix('NVIDIA ')}, shape of MovieLens 20M,\n"
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
