"""cuMF's evidence again (Tan, Cao, Fong, HPDC 2016): figs. 6 to 8 and table 3.

    python bench/paper_cumf.py                                 on the CPU: ML-1M shape, f = 32; a minute on 2 cores
    python bench/paper_cumf.py --device cuda                   Netflix's shape, f = 100
    python bench/paper_cumf.py --device cuda --profile full    sparser shapes as well, and more ranks
    python bench/paper_cumf.py --render                        docs/evidence/cumf.md from bench/results/paper_cumf.jsonl

Tasks: "convergence" (fig. 6), test RMSE over seconds of MO-ALS with cuMF's assembly, of our own ALS, and of SGD over
blocks on the CPU, which is LIBMF's algorithm, and of LIBMF where it is installed (NOMAD is not at hand); "switches"
(figs. 7 and 8), the same with the sums of MO-ALS in registers or in global memory, and with or without the read-only
path, each of them for as many iterations; "cost" (table 3), the seconds of Get_Hermitian and of Batch_Solve over f
beside the operations that the table counts. On the CPU there are no such switches, and the two phases of a half sweep
run in one kernel: their shares are found from two fits that differ in the number of ratings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import paper_common
import rivals
from gpu import elapsed_ms, mark, release
from paper_common import Line, Recorder
from paper_race import (
    Split,
    draw_race,
    held_out_rmse,
    iterate,
    make_solver,
    race,
    race_libmf,
    race_table,
    synchronize,
    usual,
)

import hybridmf as hmf
from hybridmf.core.objective import SIDES, Side, other_side
from hybridmf.gpu import half

NAME = "paper_cumf"
LAMBDA = 0.05
"""Table 5 of the paper, Netflix; scaled by the number of ratings as there (eq. 1)."""


@dataclass(frozen=True)
class Profile:
    """What is measured on what.

    Attributes
    ----------
    shapes : tuple of (str, float)
        Name and scale.
    factors : int
        The paper's f = 100, less on a CPU.
    ranks : tuple of int
        Of the cost model.
    iterations : int
        Of ALS; SGD runs three times as many epochs.
    seconds : float
        A method's clock.
    repeats : int
    budget : float
        Seconds of the whole command.
    """

    shapes: tuple[tuple[str, float], ...]
    factors: int
    ranks: tuple[int, ...]
    iterations: int
    seconds: float
    repeats: int
    budget: float


PROFILES = {
    ("cpu", "quick"): Profile((("ml-1m", 1.0),), 32, (16, 32, 64), 10, 10.0, 3, 150.0),
    ("cpu", "full"): Profile((("ml-20m", 1.0), ("msd", 0.5)), 100, (16, 32, 64, 100, 128), 12, 15.0, 2, 240.0),
    ("cuda", "quick"): Profile((("netflix", 1.0),), 100, (5, 10, 16, 32, 64, 100, 128), 10, 6.0, 2, 110.0),
    ("cuda", "full"): Profile(
        (("netflix", 1.0), ("yahoo-music", 1.0)),
        100,
        (5, 10, 16, 32, 64, 100, 128, 200),
        15,
        60.0,
        5,
        900.0,
    ),
}

# ------------------------------------------------------------------------------------------ fig. 6


def contestants(device: str, f: int, iterations: int, threads: int) -> dict[str, tuple[Any, int]]:
    """Method to (model, iterations)."""
    als: dict[str, Any] = {"regularization": LAMBDA, "device": device, "random_state": 0, "num_threads": threads}
    sgd = als | {"device": "cpu"}
    exact = {
        "cuda": {
            "MO-ALS": {"assembly": "mo_als"},
            "MO-ALS, CG 6": {"assembly": "mo_als", "solver": "cg", "cg_steps": 6},
        },
        "cpu": {"ALS, Level-3 BLAS": {"assembly": "blas3"}},
    }[device]  # fmt: skip
    ours = {"ours": {}, "ours, balanced": {"balance": True}}
    found: dict[str, tuple[Any, int]] = {
        name: (hmf.ExplicitALS(f, biases=False, **als, **options), iterations)
        for name, options in (exact | ours).items()
    }
    found["SGD, blocks, RPCS (LIBMF's method), CPU"] = (
        hmf.SGD(f, biases=False, **sgd, schedule="blocks", rate_schedule="rpcs", deterministic=False), 3 * iterations
    )  # fmt: skip
    found["SGD, blocks, our defaults, CPU"] = (hmf.SGD(f, biases=False, **sgd, schedule="blocks"), 3 * iterations)
    if device == "cuda":
        gpu_sgd = {key: value for key, value in als.items() if key != "num_threads"}
        found["batch-Hogwild, GPU"] = (hmf.SGD(f, biases=False, **gpu_sgd, schedule="batch_hogwild"), 3 * iterations)
    return found


def run_convergence(recorder: Recorder, device: Any, data: Split, profile: Profile, threads: int) -> None:
    """Each method from the same initial factors."""
    name = "cpu" if device is None else "cuda"
    for method, (model, iterations) in contestants(name, profile.factors, profile.iterations, threads).items():
        if recorder.has_time(f"convergence, {data.name}, {method}"):
            with recorder.case(f"convergence, {data.name}, {method}"):
                found = race(model, data, iterations, profile.seconds)
                show(method, found)
                recorder.note("convergence", data.line | {"factors": profile.factors, "method": method} | found)
            if device is not None:
                release(device)
    case = f"convergence, {data.name}, LIBMF"
    if rivals.installed("libmf") and recorder.has_time(case):
        with recorder.case(case):
            found = race_libmf(data, profile.factors, LAMBDA, threads, profile.seconds)
            show("LIBMF", found)
            recorder.note("convergence", data.line | {"factors": profile.factors, "method": "LIBMF, CPU"} | found)


def show(method: str, found: Line) -> None:
    """A line on the terminal."""
    lowest = min(found["rmse"], default=float("nan"))
    click.echo(f"{method:42s} {usual(found['seconds']):9.4f} s / iteration, test RMSE {lowest:.4f}")


# ------------------------------------------------------------------------------------------ figs. 7 and 8

SWITCHES = {
    "registers, read-only": "mo_als",
    "registers": "mo_als_uncached",
    "read-only": "mo_als_global",
    "neither": "mo_als_plain",
}
"""Name to assembly."""


@dataclass
class Assembly:
    """How long the assemblies of MO-ALS take."""

    device: Any
    marks: list[tuple[Any, Any]] = field(default_factory=list)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Fits call this one meanwhile."""
        originals = dict(half.SEGMENT_SUMS)

        def timed(sum_segments: Callable[..., None], *arguments: Any) -> None:
            start = mark(self.device)
            sum_segments(*arguments)
            self.marks.append((start, mark(self.device)))

        half.SEGMENT_SUMS.update({name: functools.partial(timed, each) for name, each in originals.items()})
        try:
            yield
        finally:
            half.SEGMENT_SUMS.update(originals)

    def milliseconds(self) -> float:
        """What all assemblies since the last call took."""
        total = sum(elapsed_ms(start, end) for start, end in self.marks)
        self.marks.clear()
        return total


def run_switches(recorder: Recorder, device: Any, data: Split, profile: Profile, threads: int) -> None:
    """Iterations of MO-ALS in each of the four combinations; they compute the same, so that one RMSE curve serves all.

    Raises
    ------
    RuntimeError
        Two combinations come to different errors.
    """
    if device is None:
        return
    reference: list[float] = []
    for name, chosen in SWITCHES.items():
        if recorder.has_time(f"switches, {data.name}, {name}"):
            with recorder.case(f"switches, {data.name}, {name}"):
                line = measure_switch(device, data, profile, chosen, reference)
                recorder.note("switches", data.line | {"factors": profile.factors, "variant": name} | line)
                click.echo(f"{name:42s} {usual(line['seconds']):9.4f} s / iteration, sums {line['assembly_ms']:.1f} ms")
            release(device)


def measure_switch(device: Any, data: Split, profile: Profile, chosen: str, reference: list[float]) -> Line:
    """Seconds and error of iterations of one combination; `reference` is the error after each of the first one's."""
    model = hmf.ExplicitALS(
        profile.factors, biases=False, regularization=LAMBDA, device="cuda", assembly=chosen, random_state=0
    )
    assembly = Assembly(device)
    with assembly.used():
        iterate(make_solver(model, data))  # compiles
        solver: Any = make_solver(model, data)
        assembly.milliseconds()
        seconds, errors, sums = [], [], []
        for _ in range(profile.iterations):
            synchronize(solver)
            start = mark(device)
            iterate(solver)
            seconds.append(elapsed_ms(start, mark(device)) / 1e3)
            sums.append(assembly.milliseconds())
            errors.append(held_out_rmse(solver.state, data.test))
    if not reference:
        reference.extend(errors)
    if not np.allclose(errors, reference[: len(errors)], rtol=1e-3):
        raise RuntimeError(f"test RMSE {errors} where the first combination has {reference[: len(errors)]}")
    return {"seconds": seconds, "rmse": errors, "assembly_ms": float(np.median(sums)), "assembly": chosen}


# ------------------------------------------------------------------------------------------ table 3


def predicted(nnz: int, rows: int, f: int) -> Line:
    """Multiplications of a half sweep as table 3 counts them."""
    return {"hermitian": nnz * f * (f + 1) / 2, "rhs": nnz + nnz * f + 2 * rows * f, "solve": rows * f**3}


def run_cost(recorder: Recorder, device: Any, data: Split, profile: Profile, threads: int) -> None:
    """The two phases of half sweeps over f."""
    for f in profile.ranks:
        for side in SIDES:
            if recorder.has_time(f"cost, {data.name}, {f}, {side}"):
                with recorder.case(f"cost, {data.name}, {f}, {side}"):
                    measure = measure_phases_gpu if device is not None else measure_phases_cpu
                    found = measure(device, data, f, side, profile.repeats, threads)
                    rows = int(np.count_nonzero(np.diff(getattr(data, side).indptr)))
                    counts = predicted(data.nnz, rows, f)
                    line = {"factors": f, "side": side, "rows": rows, "predicted": counts} | found
                    recorder.note("cost", data.line | line)
                    click.echo(
                        f"f = {f:4d}, {side:4s}: get_hermitian {found['hermitian_ms']:9.2f} ms, "
                        f"batch_solve {found['solve_ms']:9.2f} ms"
                    )
                if device is not None:
                    release(device)


def measure_phases_gpu(device: Any, data: Split, f: int, side: Side, repeats: int, threads: int) -> Line:
    """Assembly of MO-ALS and all the rest of a half sweep: completion and Cholesky."""
    model = hmf.ExplicitALS(f, biases=False, regularization=LAMBDA, device="cuda", assembly="mo_als", random_state=0)
    assembly = Assembly(device)
    with assembly.used():
        solver: Any = make_solver(model, data)
        half, fixed = solver.halves[side], solver.state.side(other_side(side))
        sums, wholes = [], []
        for repeat in range(repeats + 1):
            assembly.milliseconds()
            start = mark(device)
            half.solve(fixed, 0.0)
            whole = elapsed_ms(start, mark(device))
            if repeat:
                sums.append(assembly.milliseconds())
                wholes.append(whole)
    hermitian, whole = float(np.median(sums)), float(np.median(wholes))
    memory = {"batch_slots": solver.plan.batch_slots, "planned_batch_bytes": solver.plan.bytes.get("systems")}
    return {"hermitian_ms": hermitian, "solve_ms": whole - hermitian} | memory


def measure_phases_cpu(device: Any, data: Split, f: int, side: Side, repeats: int, threads: int) -> Line:
    """Half sweeps over all ratings and over a quarter of them: what changes with their number is Get_Hermitian's."""
    from hybridmf.formats import transpose

    some, _ = hmf.split(data.user, 0.75, 0)
    fewer = Split(data.name, data.scale, some, transpose(some), data.test)
    model = hmf.ExplicitALS(f, biases=False, regularization=LAMBDA, device="cpu", random_state=0, num_threads=threads)
    solvers: list[Any] = [make_solver(model, each) for each in (data, fewer)]

    def solve(solver: Any) -> Callable[[], Any]:
        return lambda: solver.halves[side].solve(solver.state.side(other_side(side)), 0.0)

    from common import alternate, median

    seconds = alternate({"all": solve(solvers[0]), "quarter": solve(solvers[1])}, repeats)
    all_ms, some_ms = (1e3 * median(seconds[name]) for name in ("all", "quarter"))
    hermitian = (all_ms - some_ms) * data.nnz / (data.nnz - fewer.nnz)
    return {"hermitian_ms": hermitian, "solve_ms": max(0.0, all_ms - hermitian)}


# ------------------------------------------------------------------------------------------ the page


def render(folder: Path) -> None:
    """Tables and plots of cumf.md."""
    lines = paper_common.read_lines(NAME)
    made = {}
    for task, (part, *keys) in PARTS.items():
        groups = paper_common.by_hardware(paper_common.select(lines, task, "shape", "scale", "factors", *keys))
        made[task] = paper_common.sections(groups, partial(part, folder))
    paper_common.fill(folder / "cumf.md", made)


def by_data(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines by shape and rank."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        m, n = line["size"]
        title = f"{paper_common.label(line)}, {m:,} x {n:,}, {line['nnz']:,} ratings"
        groups.setdefault(f"{title}, f = {line['factors']}" if "side" not in line else title, []).append(line)
    return groups


def convergence_part(folder: Path, hardware: str, lines: list[Line]) -> str:
    """Tables and the plot of fig. 6."""
    groups = by_data(lines)
    name = f"cumf-convergence-{paper_common.slug(hardware)}.svg"
    draw_race(folder / name, [(title.split(",")[0], group) for title, group in groups.items()])
    tables = [f"{title}:\n\n{race_table(group)}" for title, group in groups.items()]
    return "\n\n".join([*tables, paper_common.picture(name, "Test RMSE over seconds")])


def switches_part(folder: Path, hardware: str, lines: list[Line]) -> str:
    """Tables and the plot of figs. 7 and 8."""
    parts = []
    curves = []
    for title, group in by_data(lines).items():
        usuals = {line["variant"]: usual(settled(line)) for line in group}
        base = usuals.get("registers, read-only", float("nan"))
        rows = [
            [line["variant"], f"{1e3 * usuals[line['variant']]:.1f}", f"{line['assembly_ms']:.1f}",
             relative(usuals[line["variant"]] / base, len(settled(line)))]
            for line in group
        ]  # fmt: skip
        header = ["sums in / factors by", "ms / iteration", "of which sums", "time beyond the first (iterations)"]
        parts.append(f"{title}:\n\n{paper_common.table(header, rows)}")
        errors = max((line["rmse"] for line in group), key=len)
        curves.append(
            (title.split(",")[0],
             [{"rmse": errors, "seconds": [usuals[line["variant"]]] * len(errors), "method": line["variant"]}
              for line in group])
        )  # fmt: skip
    name = f"cumf-switches-{paper_common.slug(hardware)}.svg"
    draw_race(folder / name, curves)
    return "\n\n".join(
        [*parts, paper_common.picture(name, "Test RMSE over seconds with and without the optimizations")]
    )


def settled(line: Line) -> Sequence[float]:
    """Seconds of the iterations after the first, which is slower."""
    seconds: Sequence[float] = line["seconds"]
    return seconds[1:] or seconds


def relative(ratio: float, repeats: int) -> str:
    """A ratio of times: per cent where it is near 1, as the paper's gains are."""
    return f"{100 * (ratio - 1):+.2f} % ({repeats})" if ratio < 1.2 else f"{ratio:.2f} x ({repeats})"


def cost_part(folder: Path, hardware: str, lines: list[Line]) -> str:
    """Predicted and measured shares, and the rates that the counts mean."""
    parts = []
    for title, group in by_data(lines).items():
        rows = []
        for line in group:
            counts = line["predicted"]
            sums = counts["hermitian"] + counts["rhs"]
            hermitian, solve = line["hermitian_ms"], line["solve_ms"]
            rows.append(
                [f"{line['side']}s", line["factors"], f"{hermitian:.2f}", f"{solve:.2f}",
                 rate(sums, hermitian), rate(counts["solve"], solve),
                 paper_common.percent(sums / (sums + counts["solve"])),
                 paper_common.percent(hermitian / (hermitian + solve))]
            )  # fmt: skip
        header = ["side", "f", "Get_Hermitian, ms", "Batch_Solve, ms", "G mult/s", "G mult/s", "share by table 3",
                  "share of time"]  # fmt: skip
        parts.append(f"{title}:\n\n{paper_common.table(header, rows)}")
    return "\n\n".join(parts)


def rate(operations: float, ms: float) -> str:
    """Thousand million operations a second; "-" if the time is not above that of an empty measurement."""
    return f"{operations / ms / 1e6:,.0f}" if ms > 0 else "-"


PARTS: dict[str, tuple[Any, ...]] = {
    "convergence": (convergence_part, "method"),
    "switches": (switches_part, "variant"),
    "cost": (cost_part, "side"),
}
"""How each task's lines become a section, and the fields that identify a line beside data and rank."""

# ------------------------------------------------------------------------------------------ command

TASKS = {"convergence": run_convergence, "switches": run_switches, "cost": run_cost}


@click.command(help=__doc__)
@paper_common.options(TASKS, render)
@paper_common.data_options
@paper_common.threads_option
def main(
    device: str, profile: str, tasks: tuple[str, ...], budget: float | None, shape: str | None, scale: float,
    factors: int | None, threads: int,
) -> None:  # fmt: skip
    chosen = PROFILES[device, profile]
    if shape:
        chosen = replace(chosen, shapes=((shape, scale),))
    if factors:
        chosen = replace(chosen, factors=factors, ranks=(factors,))
    recorder, opened = Recorder.begin(NAME, device, budget or chosen.budget)
    for where, size in chosen.shapes:
        if recorder.has_time(where):
            data = Split.of(where, size)
            for task in tasks or TASKS:
                TASKS[task](recorder, opened, data, chosen, threads)
    recorder.finish()


if __name__ == "__main__":
    main()
