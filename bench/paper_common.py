"""Code shared by the scripts that repeat the papers' measurements: data, lines, and pages rendered from lines.

A script measures and appends JSON lines to bench/results/<name>.jsonl (`note`); with ``--render`` it measures nothing
and writes tables between the markers ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` of docs/evidence/<page>.md, and
plots beside it. The same lines give the same bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
import common
import current
import numpy as np
import published
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.errors import DeviceError
from hybridmf.formats import reorder, transpose
from hybridmf.plan import assemblies as plan_assemblies

EVIDENCE = common.ROOT / "docs" / "evidence"

Line = dict[str, Any]

# ------------------------------------------------------------------------------------------ data


def draw(shape: str, *, scale: float = 1.0, implicit: bool = False, seed: int = 0) -> sp.csr_array:
    """Ratings of a shape with its published degrees; drawn on a GPU where there is one, which takes seconds."""
    from hybridmf.device.cuda import CudaDevice, open_device

    try:
        on_gpu = isinstance(open_device(), CudaDevice)
    except DeviceError:
        on_gpu = False
    if on_gpu:
        from gpu_data import published_gpu

        return published_gpu(shape, scale=scale, seed=seed, implicit=implicit)
    return published.published(shape, implicit=implicit, scale=scale, seed=seed)


@dataclass(frozen=True)
class Drawn:
    """Ratings of a shape in both orientations (the attributes that `gpu.Sweeps` reads).

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
        """Fields of every measurement about its data."""
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
    """Degrees of users and items as drawn, and the published figures."""
    known = published.PUBLISHED.get(data.name, published.Published())
    facts = {side: vars(getattr(known, side)) for side in ("users", "items")}
    return data.line | {
        "users": degree_summary(np.diff(data.user.indptr)),
        "items": degree_summary(np.diff(data.item.indptr)),
        "published": facts | {"source": known.source},
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
    budget: float = math.inf
    stamp: Line = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def begin(cls, name: str, device: str, budget: float | None) -> tuple[Recorder, Any]:
        """(recorder, GPU): its lines name the device; there is None on the CPU.

        Parameters
        ----------
        name : str
        device : {"cpu", "cuda"}
        budget : float or None
            No limit.

        Raises
        ------
        click.ClickException
            There is no GPU.
        """
        opened = open_gpu() if device == "cuda" else None
        stamp: Line = {"device": device}
        if opened is not None:
            import gpu

            stamp |= gpu.gpu_stamp(opened)
        return cls(name, math.inf if budget is None else budget, stamp), opened

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
        if self.seconds_left > 0:
            return True
        self.problems.append(f"{name}: left out, the budget of {self.budget:g} s is spent")
        return False

    @property
    def seconds_left(self) -> float:
        """Of the budget."""
        return self.budget - (time.perf_counter() - self.started)

    def finish(self) -> None:
        """Name the missing cases; the exit code is 1 if there are any."""
        click.echo(f"{time.perf_counter() - self.started:.0f} s")
        if self.problems:
            raise SystemExit("\n".join(["", "not measured:", *self.problems]))


def open_gpu() -> Any:
    """The GPU.

    Raises
    ------
    click.ClickException
        There is none.
    """
    from hybridmf.device.cuda import open_device

    try:
        return open_device("cuda")
    except DeviceError as error:
        raise click.ClickException(f"--device cuda: {error}") from error


class Work(Protocol):
    """Problems of a task: shapes with their scales, and options of the task."""

    @property
    def shapes(self) -> dict[str, float]:
        """Name to scale."""


AnyWork = TypeVar("AnyWork", bound=Work)


def run_works(
    recorder: Recorder, works: Mapping[str, Sequence[AnyWork]], tasks: Sequence[str], shapes: Sequence[str],
    run: Callable[[str, Drawn, AnyWork], None], *, implicit: bool = False,
) -> None:  # fmt: skip
    """Every task on every shape that it is for; a shape is drawn once.

    The first work of each task comes before the second of any, so that a budget leaves out what matters least.

    Parameters
    ----------
    recorder : Recorder
    works : dict of str to works
        By task, what matters most first.
    tasks : sequence of str
    shapes : sequence of str
        Only these; all if there are none.
    run : callable
        ``(task, data, work)``.
    implicit : bool
        Which ratings are drawn.
    """
    turns = list(itertools.zip_longest(*([(task, work) for work in works[task]] for task in tasks)))
    wanted = [_shapes_of(turn, shapes) for turn in turns]
    kept: dict[tuple[str, float], Drawn] = {}
    for place, turn in enumerate(turns):
        for shape, scale in wanted[place]:
            if not recorder.has_time(shape):
                continue
            data = kept.pop((shape, scale), None) or _drawn(shape, scale, implicit)
            for task, work in filter(None, turn):
                if work.shapes.get(shape) == scale and recorder.has_time(f"{task}, {shape}"):
                    with recorder.case(f"{task}, {shape}"):
                        run(task, data, work)
            if any((shape, scale) in later for later in wanted[place + 1 :]):
                kept[shape, scale] = data


def _shapes_of(turn: Iterable[tuple[str, Work] | None], shapes: Sequence[str]) -> list[tuple[str, float]]:
    """(shape, scale) of some works, each once; of these shapes alone if there are any."""
    items = dict.fromkeys(item for _, work in filter(None, turn) for item in work.shapes.items())
    return [(shape, scale) for shape, scale in items if not shapes or shape in shapes]


def _drawn(shape: str, scale: float, implicit: bool) -> Drawn:
    started = time.perf_counter()
    data = Drawn.of(shape, scale=scale, implicit=implicit)
    size = f"{data.user.shape[0]:,} x {data.user.shape[1]:,}"
    seconds = time.perf_counter() - started
    click.echo(f"{shape}, scale {scale:g}: {size}, {data.nnz:,} entries, in {seconds:.0f} s")
    return data


def compile_ahead(device: Any, ranks: Iterable[int], methods: Sequence[str], *, implicit: bool) -> None:
    """Compile the kernels of assemblies in float32 on all cores: the compiler runs unlocked.

    Parameters
    ----------
    device : Device
    ranks : iterable of int
    methods : sequence of {"fused", "sparse_syrk", "sparse_syrk_published", "mo_als", "bals", "bals_local"}
    implicit : bool
    """
    from hybridmf.gpu.bals import BalsLocalConfig
    from hybridmf.gpu.fused import FusedKernels
    from hybridmf.gpu.launch import get_kernel
    from hybridmf.gpu.mo_als import MoAlsConfig
    from hybridmf.gpu.sparse_syrk import PublishedSyrkConfig, SyrkConfig
    from hybridmf.plan.fused import FusedConfig

    entries = {"REAL": np.dtype(np.float32), "IMPLICIT": implicit, "HAS_OFFSETS": False}
    ranks, spec = sorted(ranks, reverse=True), device.spec  # the largest take longest
    configs: list[tuple[str, Any]] = []
    for rank in ranks:
        if "sparse_syrk" in methods:
            configs.append(("sparse_syrk", SyrkConfig.default(rank, 4, spec)))
        if "sparse_syrk_published" in methods:
            configs.append(("sparse_syrk_published", PublishedSyrkConfig.default(rank, 4, spec)))
        if "mo_als" in methods:
            configs.append(("mo_als", MoAlsConfig.default(rank, 4, spec)))
        if "bals" in methods:
            width = plan_assemblies.bals_tile_sizes(rank, 4, spec)[1]
            configs.append(("bals", plan_assemblies.BalsConfig.default(rank, 4, spec, tile_cols=width)))
        if "bals_local" in methods:
            rows, width = plan_assemblies.bals_tile_sizes(rank, 4, spec, local=True)
            configs.append(("bals", BalsLocalConfig.default(rank, 4, spec, tile_rows=rows, tile_cols=width)))

    def compile_one(job: tuple[str, Any]) -> None:
        name, config = job
        get_kernel(device, f"{name}.cu", name, **config.constants, **entries)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, configs))
    if "fused" in methods:
        for rank in ranks:
            for precision in ("float32", "float32_wide"):  # which one, the factors decide
                config = FusedConfig.default(rank, spec)
                device.compile_ahead(FusedKernels(device, config, precision).programs(implicit, False))


def compile_bals(device: Any, configs: Iterable[Any]) -> None:
    """Compile the BALS kernels of these configurations (explicit, no offsets) on all cores."""
    from hybridmf.gpu.launch import get_kernel

    def compile_one(config: Any) -> None:
        entries = {"REAL": np.dtype(np.float32), "IMPLICIT": False, "HAS_OFFSETS": False}
        get_kernel(device, "bals.cu", "bals", **config.constants, **entries)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, configs))


def spread(values: Sequence[float]) -> Line:
    """Median, smallest and largest of repeats."""
    return {"median": common.median(list(values)), "least": min(values), "most": max(values)}


# ------------------------------------------------------------------------------------------ command line

Command = TypeVar("Command", bound=Callable[..., Any])


def timed_iteration(
    device: Any, data: Drawn, feedback: str, f: int, method: str, repeats: int
) -> tuple[Any, float, Line]:
    """Half sweeps of an assembly on a GPU, their error beside float64, and the spread of the seconds of iterations."""
    import gpu

    sweeps = gpu.Sweeps.start(device, data, feedback, f, assembly=method)
    error = gpu.check_sweeps(sweeps)
    if not error <= gpu.TOLERANCES["float32"]:
        raise gpu.WrongAnswerError(f"error {error:.2e}")
    rounds = gpu.timed(device, [partial(sweeps.solve, side) for side in ("item", "user")], repeats)
    seconds = {key: value / 1e3 for key, value in spread([sum(times) for times in rounds]).items()}
    return sweeps, error, seconds | {"repeats": len(rounds)}


def options(tasks: Iterable[str], render: Callable[[Path], None]) -> Callable[[Command], Command]:
    """What every script takes: --device, --profile, --task, --budget, and --render, which ends it.

    Parameters
    ----------
    tasks : iterable of str
        Names of tasks; the command gets those that are asked for as `tasks`.
    render : callable
        Writes the page from the lines, into the folder that it is given.
    """

    def write_page(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
        if asked:
            render(EVIDENCE)
            context.exit()

    return _all_of(
        click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
        click.option("--profile", type=click.Choice(["quick", "full"]), default="quick", show_default=True),
        click.option("--task", "tasks", type=click.Choice(list(tasks)), multiple=True, help="Default: all."),
        click.option(
            "--budget", type=click.FloatRange(min=0, min_open=True),
            help="Seconds after which no further case begins.",
        ),
        click.option(
            "--render", is_flag=True, is_eager=True, expose_value=False, callback=write_page,
            help="Write the page from the lines; measure nothing.",
        ),
    )  # fmt: skip


def shapes_options(command: Command) -> Command:
    """For scripts whose tasks have shapes of their own: --shape, --factors and --method, several times; --repeats."""
    return _all_of(
        click.option("--factors", type=click.IntRange(1), multiple=True, help="Only these of the profile's."),
        click.option("--method", "methods", multiple=True, help="Only these of the task's."),
        click.option(
            "--shape", "shapes", type=click.Choice(list(common.SHAPES)), multiple=True,
            help="Only these of the profile's.",
        ),
        click.option("--repeats", type=click.IntRange(1), default=3, show_default=True),
    )(command)  # fmt: skip


def data_options(command: Command) -> Command:
    """For scripts whose tasks share their data: --shape, --scale and --factors in place of the profile's."""
    return _all_of(
        click.option("--shape", type=click.Choice(list(common.SHAPES)), help="In place of the profile's."),
        click.option("--scale", type=float, default=1.0, show_default=True, help="Of --shape."),
        click.option("--factors", type=click.IntRange(1), help="In place of the profile's."),
    )(command)


def threads_option(command: Command) -> Command:
    """--threads; all cores by default."""
    cores = hmf.config()["cores"]
    return click.option("--threads", type=click.IntRange(1), default=cores, help="Of the CPU.  [default: all cores]")(
        command
    )


def _all_of(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


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
    """Lines of a task, one of each combination of keys and hardware (`current.of_cases`)."""
    found = [line for line in lines if line["task"] == task]
    return current.of_cases(str(found[0].get("bench")) if found else "", found, *keys, kind=hardware)


def by_hardware(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines by what they were measured on, in order of first appearance."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(hardware(line), []).append(line)
    return groups


def label(line: Line) -> str:
    """Shape, and its scale if it is not whole."""
    return str(line["shape"]) if line["scale"] == 1 else f"{line['shape']} x {line['scale']:g}"


def largest(lines: Sequence[Line]) -> list[Line]:
    """Of each shape the lines of the largest scale."""
    scales: dict[str, float] = {}
    for line in lines:
        scales[line["shape"]] = max(scales.get(line["shape"], 0.0), line["scale"])
    kept = {label(line): line for line in lines if line["scale"] == scales[line["shape"]]}
    return list(kept.values())


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


def distribution_part(lines: Sequence[Line], file: Path, sides: Sequence[str], alt: str) -> str:
    """Table and histograms (of `sides`) of the largest scale that was drawn of each shape."""
    chosen = largest(lines)
    if not chosen:
        return ""
    draw_histograms(file, chosen, sides)
    return f"{distribution_table(chosen, ('users', 'items'))}\n\n{picture(file.name, alt)}"


def distribution_table(lines: Sequence[Line], sides: Sequence[str]) -> str:
    """Sizes and degrees as drawn; in brackets the published figures that were fitted."""
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
