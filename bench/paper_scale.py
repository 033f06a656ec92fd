"""Several GPUs: cuMF's figs. 9 to 11 and section 4.2, MSGD's fig. 17, and what the planner predicts.

    python bench/paper_scale.py --planner      fig. 11 on paper: bench/results/scale_planner.jsonl; no GPU needed
    python bench/paper_scale.py --render       docs/evidence/multi-gpu.md and its plots from the lines

What is measured on GPUs comes from scale.py (figs. 9 and 10, section 4.2) and mcumsgd.py (fig. 17); of each case
a current line counts, if there is any (current.py). Of cuMF's large problems (its table 5, fig. 11) the planner says
what H200s would do: predictions, not measurements. A machine's host memory decides between host and disk; both are
given where it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import current
import numpy as np
import paper_common as paper
from common import record
from paper_common import Line

import hybridmf as hmf
from hybridmf.core.objective import SIDES
from hybridmf.plan.half_sweep import HalfPlan, priced
from hybridmf.plan.machine import H200
from hybridmf.plan.partitions import ScalePlan, plan_scale
from hybridmf.plan.types import Plan


@dataclass(frozen=True)
class Large:
    """One of the problems of cuMF's section 5.5.

    Attributes
    ----------
    shape : (n_users, n_items)
    nnz, factors : int
    cumf : str
        Seconds of an iteration on four GK210, in words.
    cumf_seconds : float
    original : str
        Of the system that the problem is from.
    """

    shape: tuple[int, int]
    nnz: int
    factors: int
    cumf: str
    cumf_seconds: float
    original: str


PROBLEMS = {
    "SparkALS": Large((660_000_000, 2_400_000), 3_500_000_000, 10, "24 s", 24.0, "240 s, 50 nodes"),
    "Factorbird": Large((229_000_000, 195_000_000), 38_500_000_000, 5, "92 s", 92.0, "563 s, 50 nodes"),
    "Facebook": Large((1_056_000_000, 48_000_000), 112_000_000_000, 16, "746 s", 746.0, "not published"),
    "Facebook, f = 100": Large((1_056_000_000, 48_000_000), 112_000_000_000, 100, "3.8 h", 3.8 * 3600, "not attempted"),
}
GPUS = (1, 4, 8)
HOSTS = {"2 TB": 2 * 10**12, "4 TB": 4 * 10**12}

PUBLISHED = {"scaling": (4, 3.8), "mcumsgd": (2, 70 / 50)}
"""GPUs and speed-up over one: Netflix (cuMF, section 5.4); 70 times one core over 50 times (MSGD, section 7)."""

WITHIN = (0.15, 0.30)
"""Relative errors of predictions that are counted."""

# ------------------------------------------------------------------------------------------ the planner


def places(plan: ScalePlan) -> str:
    """Where things are, in words."""
    halves = [f"{side}s p = {half.parts}, q = {half.batches} ({half.fixed})" for side, half in plan.halves.items()]
    return f"ratings on {plan.ratings}, factors on {plan.factors}; {', '.join(halves)}"


def kernels(shape: tuple[int, int], nnz: int, factors: int, implicit: bool = False, row_form: str = "primal") -> Plan:
    """Sizes and kernels of a fit on H200s."""
    options = {"factors": factors, "row_form": row_form}
    model: Any = hmf.ImplicitALS(**options) if implicit else hmf.ExplicitALS(biases=False, **options)
    return hmf.plan(shape=shape, nnz=nnz, model=model, gpus=1, gpu_memory="100TB").plan


def planned() -> list[Line]:
    """A line for each problem, number of GPUs and host memory that makes a difference."""
    found = []
    for name, large in PROBLEMS.items():
        for gpus in GPUS:
            on_h200s = partial(plan_scale, kernels(large.shape, large.nnz, large.factors), gpus, machine=H200)
            plans = {host: on_h200s(host_bytes=size) for host, size in HOSTS.items()}
            accepted = {host: on_h200s(host_bytes=size, model_parallel_only=True) for host, size in HOSTS.items()}
            if len({(plan.ratings, plan.seconds) for plan in plans.values()}) == 1:
                plans = {"2 TB": plans["2 TB"]}
            for host, plan in plans.items():
                line = {"bench": "planner", "problem": name, "host_memory": host, "places": places(plan)}
                line |= {"shape": list(large.shape), "nnz": large.nnz, "factors": large.factors}
                line |= {"gpus": gpus, "seconds": plan.seconds, "bytes_per_gpu": plan.bytes_per_gpu}
                line["refused"] = refusal(plan, gpus)
                if line["refused"]:
                    line["accepted_seconds"] = accepted[host].seconds
                found.append(line | {"cumf": large.cumf, "cumf_seconds": large.cumf_seconds})
    return found


def refusal(plan: ScalePlan, gpus: int) -> str:
    """Why a fit refuses a plan; empty if it accepts it."""
    try:
        plan.check_served(gpus)
    except ValueError as error:
        return str(error).partition(":")[0]
    return ""


def seconds_text(seconds: float) -> str:
    """Three digits, or whole seconds of long ones."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


# ------------------------------------------------------------------------------------------ lines


def measured(name: str, task: Callable[[Line], str]) -> list[Line]:
    """Lines of a file of results, with their task and GPU as `paper.select` reads them."""
    return [line | {"task": task(line), "gpu": {"name": line["gpu"]}} for line in paper.read_lines(name)]


def scale_task(line: Line) -> str:
    """Which section shows a line of scale.jsonl."""
    if "reduction" in line:
        return "reduction"
    if "limit" in line:
        return "streamed"
    if line["shape"].startswith("hugewiki"):
        return "hugewiki"
    return "scaling" if line["shape"] in ("netflix", "yahoo-music") else "short"  # bench/FIGURES.md has these


CASE = ("shape", "factors", "gpus", "reduction", "limit")
"""The fields that identify a line of scale.jsonl."""


def data_of(line: Line) -> str:
    """Shape, entries and rank."""
    return f"{line['shape']}, {line['nnz'] / 1e6:,.0f} million entries, f = {line['factors']}"


def grid_of(line: Line, side: str) -> str:
    """p x q of a half sweep."""
    p, q = line["grids"][side]
    return f"{p} x {q}"


def grouped(lines: Iterable[Line], key: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    """Lines by a key, in order of first appearance."""
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


# ------------------------------------------------------------------------------------------ figs. 9, 10, section 4.2


def scaling_part(name: str, folder: Path, hardware: str, lines: Sequence[Line]) -> str:
    """Half sweeps and iterations by the number of GPUs, and the speed-up over one in the same run."""
    rows = []
    for line in sorted(lines, key=lambda line: (data_of(line), line["gpus"])):
        halves = [f"{1e3 * line['halves'][side]:.1f} ({grid_of(line, side)})" for side in ("user", "item")]
        spent = f"{1e3 * line['seconds']:.1f}"
        difference = line.get("objective_difference")
        speedup = f"{line['speedup']:.2f}" if "speedup" in line else "-"
        rows.append([data_of(line), line["gpus"], *halves, spent, speedup, f"{difference:.0e}" if difference else "0"])
    header = ["", "GPUs", "users, ms (grid)", "items, ms (grid)", "iteration, ms", "times one GPU",
              "objective, from one GPU's"]  # fmt: skip
    parts = [paper.table(header, rows)]
    curves = {data: group for data, group in grouped(lines, data_of).items() if len({x["gpus"] for x in group}) > 1}
    if curves:
        file = f"multi-gpu-{name}-{paper.slug(hardware)}.svg"
        draw_speedups(folder / file, curves, "speedup", PUBLISHED.get(name))
        parts.append(paper.picture(file, "Speed-up over one GPU"))
    return "\n\n".join(parts)


def draw_speedups(path: Path, curves: dict[str, list[Line]], key: str, published: tuple[int, float] | None) -> None:
    """Speed-up over the number of GPUs, one curve a problem; a star at what the paper has."""
    with paper.figure(path, 5.0, 3.2) as drawing:
        panel = drawing.subplots()
        most = 1
        for data, lines in curves.items():
            points = sorted((line["gpus"], line[key]) for line in lines if key in line)
            panel.plot(*zip(*points, strict=True), marker=".", label=data)
            most = max(most, points[-1][0])
        panel.plot([1, most], [1, most], "k--", linewidth=0.5, label="linear")
        if published is not None:
            panel.plot(*published, "k*", label=f"the paper: {published[1]:.2g}")
            most = max(most, published[0])
        panel.set_xticks(range(1, most + 1))
        panel.set_xlim(0.8, most + 0.2)
        panel.set_xlabel("GPUs")
        panel.set_ylabel("times one GPU")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)


REDUCTIONS = {"scatter": "on all GPUs at a time", "two_phase": "in two phases", "root": "on one GPU"}


def reduction_part(hardware: str, lines: Sequence[Line]) -> str:
    """Ways to add up partial systems, and how many times as fast as on one GPU an iteration is."""
    rows = []
    for (data, gpus), group in grouped(lines, lambda line: (data_of(line), line["gpus"])).items():
        found = {line["reduction"]: line for line in group}
        root = found.get("root")
        for name, text in REDUCTIONS.items():
            if name in found:
                line = found[name]
                spent = [f"{1e3 * line['halves'][side]:.1f}" for side in ("user", "item")]
                ratio = f"{root['seconds'] / line['seconds']:.2f}" if root else "-"
                rows.append([data, gpus, text, *spent, f"{1e3 * line['seconds']:.1f}", ratio])
    header = ["", "GPUs", "added up", "users, ms", "items, ms", "iteration, ms", "times as fast as on one GPU"]
    return paper.table(header, rows)


def streamed_part(hardware: str, lines: Sequence[Line]) -> str:
    """Iterations of GPUs without room for everything, and what the planner said of them."""
    rows = []
    for line in sorted(lines, key=lambda line: (data_of(line), line["gpus"], -(line["limit"] or 0))):
        halves = [f"{1e3 * line['halves'][side]:.0f} ({grid_of(line, side)})" for side in ("user", "item")]
        places = f"{line['ratings']} / {line['factors_on']}"
        times = f"{1e3 * line['seconds']:.0f}", f"{1e3 * line['predicted']:.0f}"
        limit = f"{line['limit']:g}" if line["limit"] else "-"
        rows.append([data_of(line), line["gpus"], limit, places, *halves, *times])
    header = ["", "GPUs", "GB of each", "ratings / factors on", "users, ms (grid)", "items, ms (grid)", "iteration, ms",
              "predicted, ms"]  # fmt: skip
    return paper.table(header, rows)


# ------------------------------------------------------------------------------------------ predictions


def prediction_part(folder: Path, hardware: str, lines: Sequence[Line]) -> str:
    """Every case of scale.jsonl beside what the planner said of it, and how many are near."""
    rows = []
    for line in sorted(lines, key=lambda line: (data_of(line), line["gpus"])):
        grids = ", ".join(f"{side}s {grid_of(line, side)}" for side in ("user", "item"))
        if "reduction" in line:
            grids += f", added up {REDUCTIONS[line['reduction']]}"
        ratio = line["predicted"] / line["seconds"]
        times = f"{1e3 * line['seconds']:.1f}", f"{1e3 * line['predicted']:.1f}"
        rows.append([data_of(line), line["gpus"], grids, *times, f"{ratio:.2f}"])
    header = ["", "GPUs", "grids", "measured, ms", "predicted, ms", "predicted / measured"]
    iterations = [line["predicted"] / line["seconds"] for line in lines]
    halves = [line["predicted_halves"][side] / line["halves"][side] for line in lines for side in line["halves"]]
    file = f"multi-gpu-prediction-{paper.slug(hardware)}.svg"
    draw_predictions(folder / file, lines)
    told = f"{near(iterations, 'iterations')} {near(halves, 'half sweeps')}"
    return "\n\n".join([paper.table(header, rows), told, paper.picture(file, "Predicted against measured")])


EARLIER_KERNELS = replace(
    H200,
    gpu=replace(
        H200.gpu,
        assembly=((32, 3.0e13), (64, 4.8e13), (100, 4.6e13), (128, 5.5e13)),
        solve=((32, 3.5e12), (64, 6.4e12), (100, 5.6e12), (128, 5.3e12), (256, 1.46e13), (512, 1.8e13)),
    ),
)
"""An H200 with the kernels that ran in lines before `FASTER_FROM`."""

FASTER_FROM = "2026-11-26"
"""Date of the first lines with the kernels of the built-in rates."""


def prediction(line: Line) -> Line:
    """What the planner says of the case of a line, with the rates of the kernels that ran."""
    form = "auto" if line.get("dual_sides") else "primal"
    shape = (line["users"], line["items"])
    plan = kernels(shape, line["nnz"], line["factors"], line.get("implicit", False), form)
    plans = {side: HalfPlan(side, *line["grids"][side], line["gpus"]) for side in SIDES}
    if line.get("ratings", "device") != "device":
        waves = {side: plan.grid.groups * line["waves"][side] for side, plan in plans.items()}
        plans = {side: replace(half, ratings=line["ratings"], batches=waves[side]) for side, half in plans.items()}
    machine = EARLIER_KERNELS if line["date"] < FASTER_FROM else H200
    halves = {side: priced(plan, plans[side], machine).total for side in SIDES}
    return {"task": "prediction", "predicted_halves": halves, "predicted": sum(halves.values())}


def near(ratios: Sequence[float], what: str) -> str:
    """How many predictions are within the limits, in words."""
    errors = np.abs(np.array(ratios) - 1)
    counts = [int(np.count_nonzero(errors <= limit)) for limit in WITHIN]
    texts = [f"{n} ({n / len(errors):.0%}) within {limit:.0%}" for n, limit in zip(counts, WITHIN, strict=True)]
    return f"Of {len(errors)} {what}, {' and '.join(texts)}."


def draw_predictions(path: Path, lines: Sequence[Line]) -> None:
    """Predicted over measured milliseconds, both axes logarithmic; bands of the errors that are counted."""
    with paper.figure(path, 4.6, 4.0) as drawing:
        panel = drawing.subplots()
        kinds: dict[str, Callable[[Line], tuple[float, float]]] = {
            "iteration": lambda line: (line["seconds"], line["predicted"]),
            "users": lambda line: (line["halves"]["user"], line["predicted_halves"]["user"]),
            "items": lambda line: (line["halves"]["item"], line["predicted_halves"]["item"]),
        }
        for marker, (kind, times) in zip("o^v", kinds.items(), strict=True):
            points = 1e3 * np.array([times(line) for line in lines])
            panel.loglog(*points.T, marker, markersize=4, label=kind)
        ends = np.array([panel.get_xlim()[0], panel.get_xlim()[1]])
        panel.loglog(ends, ends, "k-", linewidth=0.5)
        for limit, shade in zip(WITHIN, ("0.75", "0.9"), strict=True):
            band = (1 - limit) * ends, (1 + limit) * ends
            panel.fill_between(ends, *band, color=shade, zorder=-limit, label=f"within {limit:.0%}")
        panel.set_xlabel("measured, ms")
        panel.set_ylabel("predicted, ms")
        panel.legend(fontsize=7)


# ------------------------------------------------------------------------------------------ fig. 11


def large_part(folder: Path, lines: Sequence[Line]) -> str:
    """cuMF's large problems: its seconds, those of the original systems, and the planner's for H200s."""
    if not lines:
        return ""
    rows = [
        [line["problem"], PROBLEMS[line["problem"]].original, line["cumf"], line["gpus"], line["host_memory"],
         seconds_text(line["seconds"]), fit_of(line), line["places"]]
        for line in lines
    ]  # fmt: skip
    header = ["problem", "original", "cuMF, 4 GK210", "GPUs", "host memory", "predicted", "of a fit", "plan"]
    draw_large(folder / "multi-gpu-large.svg", lines)
    return f"{paper.table(header, rows)}\n\n{paper.picture('multi-gpu-large.svg', 'Seconds of an iteration')}"


def fit_of(line: Line) -> str:
    """The prediction of a fit: that of the plan, or of the model-parallel one if fits refuse the plan."""
    return f"refused; {seconds_text(line['accepted_seconds'])}" if line.get("refused") else "the same"


def draw_large(path: Path, lines: Sequence[Line]) -> None:
    """Seconds of an iteration: cuMF's, and the planner's on each number of GPUs with the larger host memory."""
    names = list(dict.fromkeys(line["problem"] for line in lines))
    series = {"cuMF, 4 GK210": {name: PROBLEMS[name].cumf_seconds for name in names}}
    for line in lines:  # the larger host memory comes last
        series.setdefault(f"{line['gpus']} x H200, predicted", {})[line["problem"]] = line["seconds"]
    with paper.figure(path, 7.0, 3.2) as drawing:
        panel = drawing.subplots()
        width = 0.8 / len(series)
        for place, (text, seconds) in enumerate(series.items()):
            at = np.arange(len(names)) + (place - (len(series) - 1) / 2) * width
            panel.bar(at, [seconds.get(name, np.nan) for name in names], width, label=text)
        panel.set_yscale("log")
        panel.set_xticks(range(len(names)), names, fontsize=8)
        panel.set_ylabel("seconds of an iteration")
        panel.legend(fontsize=7)


# ------------------------------------------------------------------------------------------ MSGD fig. 17


def epoch_case(line: Line) -> Line:
    """The fields that identify a line of mcumsgd.jsonl: data, and distribution of an epoch. Older lines lack some."""
    usual = {"order": "passes", "streams": 2 if line["ranks"] else 1}
    return usual | {
        key: line[key] for key in ("shape", "factors", "ranks", "order", "streams", "long_row") if key in line
    }


def mcumsgd_part(folder: Path, hardware: str, lines: Sequence[Line]) -> str:
    """Epochs of MCUMSGD by the number of GPUs, beside the solver of one."""
    rows = []
    for line in sorted(lines, key=lambda line: (data_of(line), line["ranks"])):
        who = f"{line['ranks']} by MCUMSGD" if line["ranks"] else "1"
        way = [line.get("order", "-") if line["ranks"] else "-", line.get("streams", "-"), f"{line['long_row']:,}"]
        passes = line.get("ms_passes")
        spent = " / ".join(f"{passes[name]:.1f}" for name in ("item", "user", "between")) if passes else "-"
        times = f"{line['ms']:.1f}", spent, f"{line['speed_up']:.2f}"
        rmse = f"{line['rmse']:.4f} ({line['epochs']})"
        rows.append([data_of(line), who, *way, *times, f"{line['balance']:.2f}", rmse])
    header = ["", "GPUs", "order", "streams", "long rows from", "epoch, ms", "items / users / between, ms",
              "times one GPU", "balance", "RMSE (epochs)"]  # fmt: skip
    parts = [paper.table(header, rows)]
    curves = grouped(fastest(of_newest_run(lines)), lambda line: f"{data_of(line)}, {epoch_case(line)['order']}")
    curves = {name: group for name, group in curves.items() if max(line["gpus"] for line in group) > 1}
    if curves:
        file = f"multi-gpu-mcumsgd-{paper.slug(hardware)}.svg"
        draw_speedups(folder / file, curves, "speed_up", PUBLISHED["mcumsgd"])
        parts.append(paper.picture(file, "Speed-up of MCUMSGD over one GPU, the fastest variant of each order"))
    else:
        parts.append(f"On several GPUs: {paper.NOT_MEASURED[0].lower()}{paper.NOT_MEASURED[1:]}")
    return "\n\n".join(parts)


def of_newest_run(lines: Sequence[Line]) -> list[Line]:
    """Of each data the lines of several GPUs with the newest one's kernels, beside one GPU of the same run."""
    kept: list[Line] = []
    for group in grouped(lines, data_of).values():
        newest = max(group, key=lambda line: str(line.get("date")))
        kept += [line for line in group if line.get("commit") == newest.get("commit")]
    return kept


def fastest(lines: Sequence[Line]) -> list[Line]:
    """Of MCUMSGD's lines the fastest of each data, order and number of GPUs."""
    several = [line | {"gpus": line["ranks"]} for line in lines if line["ranks"]]
    groups = grouped(several, lambda line: (data_of(line), epoch_case(line)["order"], line["ranks"]))
    return [min(group, key=lambda line: line["ms"]) for group in groups.values()]


# ------------------------------------------------------------------------------------------ the page


def render(folder: Path) -> None:
    """Write the sections of multi-gpu.md and its plots from the lines."""
    lines = current.current_if_any("scale", measured("scale", scale_task))
    # the planner models this reduction only, and its rates are those of H200s
    on_h200s = [
        line | prediction(line)
        for line in lines
        if line.get("reduction", "scatter") == "scatter" and "limit" not in line and "H100" not in current.card(line)
    ]
    epochs = [line | {"case": epoch_case(line)} for line in measured("mcumsgd", lambda line: "mcumsgd")]
    plans = {(line["problem"], line["gpus"], line["host_memory"]): line for line in paper.read_lines("scale_planner")}
    parts: dict[str, tuple[Callable[[str, list[Line]], str], list[Line]]] = {
        "scaling": (partial(scaling_part, "scaling", folder), paper.select(lines, "scaling", *CASE)),
        "hugewiki": (partial(scaling_part, "hugewiki", folder), paper.select(lines, "hugewiki", *CASE)),
        "reduction": (reduction_part, paper.select(lines, "reduction", *CASE)),
        "streamed": (streamed_part, paper.select(lines, "streamed", *CASE)),
        "mcumsgd": (partial(mcumsgd_part, folder), paper.select(epochs, "mcumsgd", "case")),
        "prediction": (partial(prediction_part, folder), paper.select(on_h200s, "prediction", *CASE)),
    }  # fmt: skip
    made = {name: paper.sections(paper.by_hardware(group), part) for name, (part, group) in parts.items()}
    paper.fill(folder / "multi-gpu.md", made | {"large": large_part(folder, list(plans.values()))})


@click.command(help=__doc__)
@click.option("--planner", is_flag=True, help="Record the planner's predictions for cuMF's large problems.")
@click.option("--render", "wanted", is_flag=True, help="Write the page from the lines.")
def main(planner: bool, wanted: bool) -> None:
    if not planner and not wanted:
        raise click.UsageError("--planner, --render or both must be given")
    for line in planned() if planner else ():
        record("scale_planner", line)
        gpus = f"{line['gpus']} H200, host {line['host_memory']}"
        click.echo(f"{line['problem']:18s} {gpus:20s} {seconds_text(line['seconds']):>9s}  {line['places']}")
    if wanted:
        render(paper.EVIDENCE)


if __name__ == "__main__":
    main()
