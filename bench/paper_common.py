"""What the scripts that measure the papers' evidence again share: data, lines, and pages rendered from the lines alone.

A script measures and appends JSON lines to bench/results/<name>.jsonl (`note`); with ``--render`` it measures nothing
and writes tables between the markers ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` of docs/evidence/<page>.md, and
plots beside it. The same lines give the same bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
import scipy.sparse as sp

from hybridmf import datasets
from hybridmf.formats import reorder, transpose

EVIDENCE = common.ROOT / "docs" / "evidence"

Line = dict[str, Any]

# ------------------------------------------------------------------------------------------ data


def draw(shape: str, *, scale: float = 1.0, implicit: bool = False, seed: int = 0) -> sp.csr_array:
    """Ratings of a shape with its published degrees; drawn on a GPU where there is one, which takes seconds."""
    from hybridmf.errors import DeviceError
    from hybridmf.gpu.device import CudaDevice, open_device

    try:
        on_gpu = isinstance(open_device(), CudaDevice)
    except DeviceError:
        on_gpu = False
    if on_gpu:
        from gpu_data import published_gpu

        return published_gpu(shape, scale=scale, seed=seed, implicit=implicit)
    feedback: Any = "implicit" if implicit else "explicit"
    return datasets.synthetic(shape, feedback=feedback, scale=scale, seed=seed, degrees="published").user_items


@dataclass(frozen=True)
class Drawn:
    """Ratings of a shape in both orientations (the attributes `gpu.Sweeps` wants of its data).

    Attributes
    ----------
    name : str
    scale : float
    user, item : csr_array
    """

    name: str
    scale: float
    user: sp.csr_array
    item: sp.csr_array

    @classmethod
    def of(cls, shape: str, *, scale: float = 1.0, implicit: bool = False) -> Drawn:
        """Draw a shape."""
        user = draw(shape, scale=scale, implicit=implicit)
        return cls(shape, scale, user, transpose(user))

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return len(self.user.data)

    @cached_property
    def by_degree(self) -> sp.csr_array:
        """The users' matrix with rows and columns by degree."""
        return reorder(self.user).matrix

    @property
    def line(self) -> Line:
        """What every measurement says of its data."""
        return {"shape": self.name, "scale": self.scale, "size": list(self.user.shape), "nnz": self.nnz}


def histogram(degrees: np.ndarray) -> list[list[int]]:
    """Rows by degree, in bins from each power of two to the next: [smallest degree, rows]; empty bins are left out."""
    bins = np.bincount(np.frexp(degrees[degrees > 0].astype(np.float64))[1] - 1)
    return [[1 << power, int(rows)] for power, rows in enumerate(bins) if rows]


def degree_summary(degrees: np.ndarray) -> Line:
    """How many entries rows have; mean of all rows, the others of those with entries."""
    filled = degrees[degrees > 0]
    return {
        "rows": len(degrees),
        "used": len(filled),
        "single": int(np.count_nonzero(degrees == 1)),
        "shortest": int(filled.min()),
        "median": float(np.median(filled)),
        "mean": float(degrees.mean()),
        "longest": int(filled.max()),
        "histogram": histogram(degrees),
    }


def distribution(data: Drawn) -> Line:
    """Entries of users and items as drawn, and what is published of them."""
    published = datasets.PUBLISHED.get(data.name, datasets.Published())
    facts = {side: vars(getattr(published, side)) for side in ("users", "items")}
    return data.line | {
        "users": degree_summary(np.diff(data.user.indptr)),
        "items": degree_summary(np.diff(data.item.indptr)),
        "published": facts | {"source": published.source},
    }


# ------------------------------------------------------------------------------------------ measuring


@dataclass
class Recorder:
    """Appends lines, keeps to a budget of seconds, and remembers what failed or was left out.

    Attributes
    ----------
    name : str
        Of the script and of its file of results.
    budget : float
        Seconds after which no further case is begun.
    stamp : dict
        What each line says beside what `common.record` adds: device, GPU.
    """

    name: str
    budget: float = float("inf")
    stamp: Line = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def note(self, task: str, line: Line) -> None:
        """Append a line."""
        whole = {"bench": self.name, "task": task} | line | self.stamp
        try:
            common.record(self.name, whole)
        except FileNotFoundError as error:  # git is not installed: the line must not be lost
            click.echo(f"not recorded ({error}): {json.dumps(whole)}")

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """A case that fails is named at the end, and the others are measured nevertheless."""
        try:
            yield
        except Exception as error:
            self.problems.append(f"{name}: {type(error).__name__}: {error}")
            click.echo(f"FAILED {self.problems[-1]}")

    def has_time(self, name: str) -> bool:
        """Whether a case may begin; it is named at the end if not."""
        if time.perf_counter() - self.started < self.budget:
            return True
        self.problems.append(f"{name}: left out, the budget of {self.budget:g} s is spent")
        return False

    def finish(self) -> None:
        """Name what is missing; the exit code is 1 if anything is."""
        click.echo(f"{time.perf_counter() - self.started:.0f} s")
        if self.problems:
            raise SystemExit("\n".join(["", "not measured:", *self.problems]))


def compile_ahead(device: Any, ranks: Iterable[int], methods: Sequence[str], *, implicit: bool) -> None:
    """Compile the kernels of assemblies in float32 on all cores: the compiler runs unlocked.

    Parameters
    ----------
    device : Device
    ranks : iterable of int
    methods : sequence of {"fused", "sparse_syrk", "mo_als", "bals"}
    implicit : bool
    """
    import gpu

    from hybridmf.gpu import assemblies
    from hybridmf.gpu.launch import get_kernel

    entries = {"REAL": np.dtype(np.float32), "IMPLICIT": implicit, "HAS_OFFSETS": False}
    ranks, spec = sorted(ranks, reverse=True), device.spec  # the largest take longest
    configs: list[tuple[str, Any, Line]] = []
    for rank in ranks:
        if "sparse_syrk" in methods:
            configs.append(("sparse_syrk", assemblies.SyrkConfig.default(rank, 4, spec), {}))
        if "mo_als" in methods:
            switches = {"READ_ONLY": True, "REGISTERS": True}
            configs.append(("mo_als", assemblies.MoAlsConfig.default(rank, 4, spec), switches))
        if "bals" in methods:
            width = assemblies.bals_tile_sizes(rank, 4, spec)[1]
            configs.append(("bals", assemblies.BalsConfig.default(rank, 4, spec, tile_cols=width), {}))

    def compile_one(job: tuple[str, Any, Line]) -> None:
        name, config, switches = job
        get_kernel(device, f"{name}.cu", name, **config.constants, **entries, **switches)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, configs))
    if "fused" in methods:
        feedback = "implicit" if implicit else "explicit"
        gpu.compile_ahead(device, {(rank, feedback, "float32", "cholesky") for rank in ranks})


def spread(values: Sequence[float]) -> Line:
    """Median, smallest and largest of repeats."""
    return {"median": common.median(list(values)), "least": min(values), "most": max(values)}


# ------------------------------------------------------------------------------------------ lines


def read_lines(name: str) -> list[Line]:
    """All lines of a file of results; none if it does not exist."""
    path = common.RESULTS / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines() if text]


def hardware(line: Line) -> str:
    """What a line was measured on."""
    machine = line["machine"]
    if "gpu" in line:
        return str(line["gpu"]["name"])
    return f"{machine['processor']}, {machine['cores']} cores ({machine['instruction_set']})"


def select(lines: Iterable[Line], task: str, *keys: str) -> list[Line]:
    """Lines of a task, the last one of each combination of keys and hardware, in order of first appearance."""
    found: dict[Hashable, Line] = {}
    for line in lines:
        if line["task"] == task:
            found[(hardware(line), *(json.dumps(line.get(key)) for key in keys))] = line
    return list(found.values())


def by_hardware(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines by what they were measured on, in order of first appearance."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(hardware(line), []).append(line)
    return groups


def label(line: Line) -> str:
    """Shape, and its scale if it is not whole."""
    return str(line["shape"]) if line["scale"] == 1 else f"{line['shape']} x {line['scale']:g}"


# ------------------------------------------------------------------------------------------ pages


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, marks, *rows))


def percent(share: float) -> str:
    """0.1234 as 12.3 %."""
    return f"{100 * share:.1f} %"


def fill(page: Path, sections: dict[str, str]) -> None:
    """Replace what stands between the markers of each section.

    Raises
    ------
    SystemExit
        The page lacks the markers of a section.
    """
    text = page.read_text(encoding="utf-8")
    for name, body in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{page.name} must have {begin} and {end}, once each")
        head, rest = text.split(begin)
        tail = rest.split(end)[1]
        text = f"{head}{begin}\n\n{body or NOT_MEASURED}\n\n{end}{tail}"
    page.write_text(text, encoding="utf-8")


NOT_MEASURED = "Not measured yet."


def picture(name: str, alt: str) -> str:
    """The Markdown of a plot beside the page."""
    return f"![{alt}]({name})"


@contextmanager
def figure(path: Path, width: float = 8.0, height: float = 4.0) -> Iterator[Any]:
    """A matplotlib figure that is saved as SVG, the same bytes each time."""
    import matplotlib
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {"svg.hashsalt": "hybridmf", "svg.fonttype": "none", "font.size": 9, "path.simplify": True}
    with matplotlib.rc_context(settings):
        drawing = Figure(figsize=(width, height), layout="constrained")
        yield drawing
        drawing.savefig(path, format="svg", metadata={"Date": None})
    # matplotlib leaves blanks at the ends of lines, which a checkout may strip
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def draw_histograms(path: Path, lines: Sequence[Line], sides: Sequence[str]) -> None:
    """Rows by number of entries, one panel a shape and side, both axes logarithmic."""
    with figure(path, 2.4 * len(lines), 2.2 * len(sides)) as drawing:
        panels = drawing.subplots(len(sides), len(lines), squeeze=False)
        for column, line in enumerate(lines):
            for row, side in enumerate(sides):
                panel, facts = panels[row][column], line[side]
                lows = [low for low, _ in facts["histogram"]]
                panel.bar(lows, [rows for _, rows in facts["histogram"]], [0.9 * low for low in lows], align="edge")
                panel.set_xscale("log")
                panel.set_yscale("log")
                panel.minorticks_off()
                panel.set_title(f"{label(line)}, {side}", fontsize=8)
                panel.set_xlabel("entries", fontsize=8)
                panel.text(
                    0.97, 0.95,
                    f"min {facts['shortest']:,}\nmedian {facts['median']:,.0f}\nmean {facts['mean']:,.1f}\n"
                    f"max {facts['longest']:,}",
                    transform=panel.transAxes, ha="right", va="top", fontsize=7,
                )  # fmt: skip


def distribution_table(lines: Sequence[Line], sides: Sequence[str]) -> str:
    """Sizes and degrees as drawn; in brackets what is published and was fitted."""
    rows = []
    for line in lines:
        for side in sides:
            facts, published = line[side], line["published"][side]
            longest = f" ({published['longest']:,})" if published["longest"] else ""
            single = f" ({published['single']:,})" if published["single"] else ""
            rows.append(
                [
                    f"{label(line)}, {side}", f"{facts['rows']:,}", f"{facts['used']:,}", f"{line['nnz']:,}",
                    f"{facts['single']:,}{single}", f"{facts['shortest']:,}", f"{facts['median']:,.0f}",
                    f"{facts['mean']:,.1f}", f"{facts['longest']:,}{longest}",
                ]
            )  # fmt: skip
    header = ["", "rows", "with entries", "entries", "with one", "shortest", "median", "mean", "longest"]
    return table(header, rows)


def sections(groups: dict[str, list[Line]], body: Callable[[str, list[Line]], str]) -> str:
    """One part for each hardware, under its name."""
    return "\n\n".join(f"**{name}**\n\n{body(name, lines)}" for name, lines in groups.items())


def slug(name: str) -> str:
    """A name as part of a file name."""
    kept = "".join(character if character.isalnum() else "-" for character in name.lower())
    return "-".join(part for part in kept.split("-") if part)
