"""Accuracy of the cost model's predictions for fits, and how often device="auto" selects the measured best.

    python bench/dispatch.py                     the grid on all devices: under 5 minutes on 16 cores and a GPU
    python bench/dispatch.py --profile quick     fewer and smaller cases: under 3 minutes on 2 cores
    python bench/dispatch.py --report            tables from bench/results/dispatch.jsonl; measures nothing

Each case is a fit of its own on each device, several times where it is short. Of each part the fastest counts: of all
iterations but the first, of first iterations, and of what is around them. Threads of a shared machine wait for others
now and then, and that is no property of a method. On a GPU the same fit comes once before, so that its kernels are
compiled and loaded; what that adds is recorded. One measurement stands for fits of 1, 5, 15 and 50 iterations: set-up
and that many iterations. Predictions are those of constants measured at the start of the run (`tools.calibrate`),
which are recorded, and of the built-in ones; a report scales the built-in ones by the speeds that a run has recorded.

The choice is right if the device with the shortest prediction is the measured best, or within 10 % of it.
"""

from __future__ import annotations

import importlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import click
import numpy as np
from common import RESULTS, record

import hybridmf as hmf
from hybridmf import datasets
from hybridmf.device.cuda import DeviceSpec
from hybridmf.plan import cost as _cost
from hybridmf.plan import dispatch, types
from hybridmf.plan import machine as _machine
from hybridmf.plan.machine import Machine
from hybridmf.tools.calibrate import RANKS, calibrate

ITERATIONS = (1, 5, 15, 50)
"""Numbers of iterations that one measurement represents."""

MEASURED, MEASURED_LONG = 4, 2
"""Iterations of each measured fit; where one is predicted to take more than LONG seconds."""

LONG = 0.25

FITS, SHORT_FIT, LONG_FIT, SPENT = (3, 10), 0.3, 0.8, 0.15
"""Times that a fit of less than SHORT_FIT seconds is repeated: at least, and at most as long as all together have not
taken SPENT seconds. Longer ones are measured twice, those of LONG_FIT seconds once."""

DUAL_FROM = "2026-11-21"
"""Date of the first runs whose fits have rows in the dual form."""

TOLERANCE = 0.10
REQUIRED = 0.95
"""Share of right choices, all runs together."""

MODELS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "explicit exact": (hmf.ExplicitALS, {"biases": False}),
    "implicit exact": (hmf.ImplicitALS, {}),
    "explicit CG 3": (hmf.ExplicitALS, {"biases": False, "solver": "cg"}),
    "implicit CG 3": (hmf.ImplicitALS, {"solver": "cg"}),
    "MSGD": (hmf.SGD, {"biases": False}),
    "CCD++": (hmf.CCD, {"biases": False}),
}

FULL = {
    "explicit exact": (8, 32, 64, 128),
    "implicit exact": (32, 64, 128),
    "explicit CG 3": (64,),
    "implicit CG 3": (32, 128),
    "MSGD": (32, 128),
    "CCD++": (16, 64),
}
WIDE = FULL | {"explicit exact": (8, 32, 64, 128, 256)}
LARGE = {
    "explicit exact": (64, 128),
    "implicit exact": (64,),
    "implicit CG 3": (128,),
    "MSGD": (32, 128),
    "CCD++": (16, 64),
}
QUICK = {
    "explicit exact": (8, 32, 64, 128),
    "implicit exact": (64,),
    "explicit CG 3": (64,),
    "implicit CG 3": (64,),
    "MSGD": (32, 128),
    "CCD++": (16,),
}

Ranks = dict[str, tuple[int, ...]]

GRIDS: dict[str, tuple[tuple[tuple[str, float, Ranks], ...], float]] = {
    "quick": (
        tuple(
            (name, scale, QUICK) for name, scale in (("ml-1m", 0.1), ("epinions", 0.5), ("ml-1m", 1), ("ml-10m", 0.4))
        ),
        150.0,
    ),
    "full": (
        (
            # large and small problems alternate, so that a run cut short has both
            ("ml-1m", 1.0, WIDE),
            ("ml-20m", 1.0, LARGE),
            ("ml-1m", 0.1, WIDE),
            ("ml-10m", 1.0, FULL),
            ("ml-1m", 0.4, WIDE),
            ("ml-20m", 0.4, FULL),
            ("epinions", 1.0, FULL),
            ("msd", 0.2, FULL),
        ),
        300.0,
    ),
}
"""Shapes, their scales and ranks by model, and seconds after which no further case is begun."""

ASSEMBLIES = {"cpu": ("bals", "blas3"), "cuda": ("sparse_syrk", "mo_als", "bals")}
"""Published assemblies, measured at rank 64 beside ours, on one shape."""

ASSEMBLIES_ON = ("ml-1m", 1.0)

TOO_LONG = 2.0
"""Predicted seconds of an iteration that is left out."""


# ----------------------------------------------------------------------------------------------------- measurements


def cases(ranks: Ranks, gpu: bool, assemblies: bool) -> Iterator[tuple[str, int, str, str]]:
    """(model, factors, device, assembly) of one shape."""
    devices = ("cpu", "cuda") if gpu else ("cpu",)
    for name, factors in ranks.items():
        for f in factors:
            for device in devices:
                yield name, f, device, "auto"
                if assemblies and name == "explicit exact" and f == 64:
                    for assembly in ASSEMBLIES[device]:
                        yield name, f, device, assembly


def model_of(name: str, factors: int, device: str, assembly: str = "auto", **options: Any) -> Any:
    """The estimator of a case."""
    cls, given = MODELS[name]
    if assembly != "auto":
        options["assembly"] = assembly
    return cls(factors, device=device, random_state=0, **given, **options)


def time_fits(model: Any, matrix: Any, enough: Callable[[list[float]], bool]) -> tuple[float, float]:
    """Seconds of an iteration, and of what is around iterations: of each part, the fastest of several fits.

    Fits until `enough` of the seconds of each fit so far. The first iteration of each warms up: what it takes longer
    belongs to the second part.
    """
    totals: list[float] = []
    firsts, others, around = [], [], []
    while not totals or not enough(totals):
        started = time.perf_counter()
        model.fit(matrix)
        totals.append(time.perf_counter() - started)
        first, *rest = [line["seconds"] for line in model.history_]
        firsts.append(first)
        others += rest
        around.append(totals[-1] - first - sum(rest))
    return min(others), min(around) + max(0.0, min(firsts) - min(others))


def measure(model: Any, matrix: Any, iterations: int = MEASURED) -> dict[str, float]:
    """Seconds of a fit: an iteration, and all that is not iterations; and of what a first fit adds to it on a GPU."""
    model.set_params(iterations=iterations)
    started = time.perf_counter()
    if model.device != "cpu":
        model.fit(matrix)
    cold = time.perf_counter() - started
    iteration, setup = time_fits(model, matrix, enough)
    found = {"seconds_per_iteration": iteration, "setup_seconds": setup}
    if model.device != "cpu":
        found["first_fit_adds"] = max(0.0, cold - setup - iterations * iteration)
    return found


def enough(totals: list[float]) -> bool:
    """Whether a fit has been repeated often enough."""
    least, most = FITS
    if min(totals) >= SHORT_FIT:
        return len(totals) > 1 or totals[0] >= LONG_FIT
    return len(totals) >= least and (sum(totals) >= SPENT or len(totals) >= most)


def run(profile: str) -> None:
    """Measure the machine and the grid, and record a line each."""
    shapes, limit = GRIDS[profile]
    started = time.perf_counter()
    spec, reason = dispatch.find_gpu("auto")
    click.echo(f"GPU: {spec or reason}")
    machine, gpu = calibrate(say=click.echo)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
    record(
        "dispatch",
        {"bench": "dispatch", "task": "machine", "run": stamp, "cpu": asdict(machine.cpu), "gpu": asdict(machine.gpu)}
        | {"links": asdict(machine.links), "gpu_identity": gpu, "profile": profile}
        | {"spec": None if spec is None else asdict(spec)},
    )
    click.echo(f"constants measured after {time.perf_counter() - started:.0f} s")
    for shape, scale, ranks in shapes:
        matrix = datasets.synthetic(shape, scale=scale).user_items
        click.echo(f"{shape} x {scale}: {matrix.shape[0]:,} x {matrix.shape[1]:,}, {matrix.nnz:,} entries")
        facts = types.DegreeFacts.of(matrix, items=True)
        for name, f, device, assembly in cases(ranks, spec is not None, (shape, scale) == ASSEMBLIES_ON):
            if time.perf_counter() - started > limit:
                click.echo("time is up: the rest is left out")
                return
            model = model_of(name, f, device, assembly)
            plan = hmf.plan(matrix, model)
            line = {
                "bench": "dispatch",
                "task": "fit",
                "run": stamp,
                "model": name,
                "assembly_asked": assembly,
                "shape": shape,
                "scale": scale,
                "n_users": plan.n_users,
                "n_items": plan.n_items,
                "nnz": plan.nnz,
                "facts": asdict(facts),
                "factors": f,
                "threads": plan.num_threads,
                "device": device,
                "assembly": plan.method.names(plan)[0],
            }
            predicted = cost(line, machine, spec)
            if predicted.iteration > TOO_LONG:
                continue
            line |= measure(model, matrix, MEASURED if predicted.iteration < LONG else MEASURED_LONG)
            ratio = predicted.iteration / line["seconds_per_iteration"]
            line["predicted"] = {
                kind: {"seconds_per_iteration": one.iteration, "setup_seconds": sum(one.setup.values())}
                for kind, one in (("measured", predicted), ("built-in", cost(line, _machine.H200, spec)))
            }
            record("dispatch", line)
            click.echo(
                f"  {name:15s} f={f:<4d}{device:5s}{line['assembly']:12s}"
                f"{line['seconds_per_iteration'] * 1e3:10.2f} ms an iteration, predicted {ratio:5.2f} x;"
                f" set-up {line['setup_seconds'] * 1e3:8.1f} ms, predicted "
                f"{line['predicted']['measured']['setup_seconds'] * 1e3:8.1f}"
            )


# ------------------------------------------------------------------------------------------------------ predictions


def cost(line: dict[str, Any], machine: Machine, spec: DeviceSpec | None) -> _cost.Cost:
    """What the model predicts for a recorded case in a process whose GPU is warm."""
    options = {"num_threads": line["threads"]}
    if "exact" in line["model"] and line["run"] < DUAL_FROM:
        options["row_form"] = "primal"
    model = model_of(line["model"], line["factors"], line["device"], line["assembly_asked"], **options)
    found = (spec if line["device"] == "cuda" else None, "recorded")
    with mock.patch.object(importlib.import_module("hybridmf.plan.dispatch"), "find_gpu", return_value=found):
        plan = hmf.plan(shape=(line["n_users"], line["n_items"]), nnz=line["nnz"], model=model)
    facts = types.DegreeFacts(**line["facts"])
    return _cost.cost_of(plan.changed(facts=facts), machine, _cost.Warmth(started=True, compiled=True, loaded=True))


def machine_of(line: dict[str, Any]) -> Machine:
    """The constants that calibration measures: the built-in ones scaled by the speeds of a run, its idle iterations.

    Earlier calibrations measured more; the median of their rates is the speed.
    """
    known, cpu, gpu = _machine.H200, line["cpu"], line["gpu"]
    speed_of = {
        name: np.median(
            [
                _machine.rate_at(measured[kind], f) / _machine.rate_at(getattr(rates, kind), f)
                for kind in ("assembly", "solve")
                for f in RANKS
            ]
        )
        for name, measured, rates in (("cpu", cpu, known.cpu), ("gpu", gpu, known.gpu))
    }
    idle = gpu["sweep"]["als"] / known.gpu.sweep["als"]
    return Machine(
        cpu=replace(known.cpu.scaled(speed_of["cpu"]), serial=cpu["serial"], sweep=cpu["sweep"]),
        gpu=replace(
            known.gpu.sped_up(speed_of["gpu"]), sweep={kind: idle * spent for kind, spent in known.gpu.sweep.items()}
        ),
        source="recorded",
        gpu_name=line["gpu_identity"].get("name", ""),
    )


def spec_of(line: dict[str, Any]) -> DeviceSpec | None:
    """The GPU a run has recorded."""
    if line["spec"] is None:
        return None
    return DeviceSpec(**(line["spec"] | {"capability": tuple(line["spec"]["capability"])}))


def read_runs() -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each run: the line of its machine, and those of its fits."""
    path = RESULTS / "dispatch.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    for machine in (line for line in lines if line["task"] == "machine"):
        yield machine, [line for line in lines if line["task"] == "fit" and line["run"] == machine["run"]]


def choices(fits: Iterable[dict[str, Any]], machine: Machine, spec: DeviceSpec | None) -> list[tuple[float, str]]:
    """For each case that both devices ran, and each number of iterations: seconds lost by the choice, as a share."""
    pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in fits:
        if line["assembly_asked"] == "auto":
            pairs[line["shape"], line["scale"], line["model"], line["factors"]][line["device"]] = line
    lost = []
    for key, pair in pairs.items():
        if len(pair) < 2:
            continue
        predicted = {device: cost(line, machine, spec) for device, line in pair.items()}
        for count in ITERATIONS:
            measured = {
                device: line["setup_seconds"] + count * line["seconds_per_iteration"] for device, line in pair.items()
            }
            chosen = min(predicted, key=lambda device: predicted[device].total(count))
            lost.append((measured[chosen] / min(measured.values()) - 1, f"{key} x {count}: chose {chosen}, {measured}"))
    return lost


def wrong_choices() -> tuple[list[str], int]:
    """Wrong choices in all recorded runs with a GPU, as text, and the number of choices."""
    lost = [
        one
        for line, fits in read_runs()
        if line["spec"] is not None
        for one in choices(fits, machine_of(line), spec_of(line))
    ]
    return [words for share, words in lost if share > TOLERANCE], len(lost)


def report() -> None:
    """Accuracy of the predictions, and of the choices, of all recorded runs, as the tables of docs/dispatch.md."""
    runs = list(read_runs())
    if not runs:
        click.echo("no run is recorded: measure one without --report")
    for machine_line, fits in runs:
        spec = spec_of(machine_line)
        hardware = f"{machine_line['machine']['processor']}, {machine_line['machine']['cores']} cores"
        click.echo(f"\n{hardware}{', ' + spec.name if spec else ''} ({machine_line['date']}, {len(fits)} fits)\n")
        click.echo("| model | device | fits | predicted / measured, scaled constants | built-in constants |")
        click.echo("| --- | --- | --- | --- | --- |")
        groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for line in fits:
            groups[line["model"], line["device"]].append(line)
        for (model, device), lines in groups.items():
            cells = [_spread(lines, machine, spec) for machine in (machine_of(machine_line), _machine.H200)]
            click.echo(f"| {model} | {device} | {len(lines)} | {cells[0]} | {cells[1]} |")
        for name, machine in (("scaled", machine_of(machine_line)), ("built-in", _machine.H200)):
            lost = choices(fits, machine, spec)
            if lost:
                right = sum(share <= TOLERANCE for share, _ in lost)
                click.echo(f"\nconstants {name}: {right} of {len(lost)} choices right ({right / len(lost):.1%})")
                for share, words in sorted(lost, reverse=True)[:10]:
                    if share > TOLERANCE:
                        click.echo(f"  {share:+.0%}: {words}")


def _spread(lines: list[dict[str, Any]], machine: Machine, spec: DeviceSpec | None) -> str:
    """Median and the middle four fifths of predicted over measured seconds of an iteration."""
    ratios = [cost(line, machine, spec).iteration / line["seconds_per_iteration"] for line in lines]
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@click.command()
@click.option("--profile", type=click.Choice(tuple(GRIDS)), default="full", show_default=True)
@click.option("--report", "only_report", is_flag=True, help="Measure nothing.")
def main(profile: str, only_report: bool) -> None:
    """Measure, record, report; exit code 1 if too many choices of recorded runs are wrong."""
    if not only_report:
        run(profile)
    report()
    wrong, count = wrong_choices()
    if count:
        click.echo(f"\n{count - len(wrong)} of {count} choices right ({1 - len(wrong) / count:.1%})")
    raise SystemExit(len(wrong) > (1 - REQUIRED) * count)


if __name__ == "__main__":
    main()
