"""Whole fits, by part: the time from a matrix, or from a file, to a model that recommends.

    python bench/fit.py                               every case with up to 5e7 entries, without CPU fits of large ones
    python bench/fit.py --profile full                all cases, on every device
    python bench/fit.py --case ml20m --devices cpu,cuda,cuda:0+cuda:1 --no-rivals
    python bench/fit.py --plot docs/_static/whole-fits.svg   draws the recorded warm fits, measures nothing

A case is a shape, a feedback, a rank and a number of iterations (`CASES`). For each device it is fitted once to warm up
("first") and then `--repeats` times; the median fit is recorded with its `timings_`, the share of its wall time that
these account for, the first recommendation, and the time of `evaluate`. "cold" fits run in a process of their own, with
an empty folder of compiled kernels: import, read (from a CSV file), fit, first recommendation. A "search" fits several
lambdas, each from the matrix, and all from one `PreparedRatings`, which it makes. Rivals fit the same matrix. All
factors are evaluated alike: the objective of `hybridmf` (docs/methods.md), NDCG@10 of up to 20,000 users or the RMSE of
held-out entries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import current
import freshness
import numpy as np
import rivals
import scipy.sparse as sp
from common import alternate, median, record
from fit_data import Split, draw
from paper_common import figure

import hybridmf as hmf
from hybridmf.core.objective import Factors, State
from hybridmf.core.sparse import RowColumns
from hybridmf.core.validate import csr_arrays
from hybridmf.cpu.als import objective_value
from hybridmf.cpu.topk import top_k
from hybridmf.native import _als

JUDGED_USERS = 20_000
CPU_QUICK_WORK = 1e12
"""Multiply-adds of the normal equations of a fit up to which the quick profile makes it on a CPU."""


@dataclass(frozen=True)
class Case:
    """A fit of a shape."""

    shape: str
    feedback: str
    factors: int
    iterations: int

    @property
    def name(self) -> str:
        """Shape, feedback and sizes."""
        return f"{self.shape} {self.feedback} f={self.factors}, {self.iterations} iterations"

    def model(self, device: Any, strength: float = 1.0) -> Any:
        """An estimator of the case, with so many times its lambda."""
        options: dict[str, Any] = {"factors": self.factors, "iterations": self.iterations, "random_state": 0}
        if self.feedback == "implicit":
            return hmf.ImplicitALS(regularization=0.01 * strength, alpha=1.0, device=device, **options)
        return hmf.ExplicitALS(regularization=0.05 * strength, biases=False, device=device, **options)


CASES = (
    Case("ml100k", "implicit", 64, 15),
    Case("ml1m", "implicit", 128, 10),
    Case("ml1m", "explicit", 64, 15),
    Case("ml20m", "implicit", 64, 10),
    Case("netflix", "implicit", 64, 6),
    Case("netflix", "explicit", 100, 12),
    Case("millionsong", "implicit", 128, 6),
    Case("2e9", "explicit", 16, 2),
)
SEARCHED = ("ml100k", "ml20m", "netflix", "millionsong")
"""Shapes of whose first case several lambdas are fitted."""

STRENGTHS = (0.1, 1.0, 10.0, 100.0)
"""Lambdas of a search, in that of the case."""

COLD = ("ml100k", "ml1m", "ml20m")
"""Shapes whose first case is also fitted in a process of its own, from a matrix and from a file."""


# ------------------------------------------------------------------------------------------------------------- judging


def judge(case: Case, data: Split, sides: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Objective on the training entries, and the metric of the held-out ones; nothing where there are none."""
    if not data.test.nnz:
        return {}
    users, items = (np.ascontiguousarray(side, dtype=np.float32) for side in sides)
    objective = case.model("cpu")._objective()
    degrees = np.diff(data.train.indptr), np.bincount(data.train.indices, minlength=data.train.shape[1])
    threads = hmf.config()["threads"]
    state = State(Factors(users), Factors(items))
    found = {"objective": objective_value(objective, csr_arrays(data.train), state, *degrees, threads)}
    if case.feedback == "explicit":
        rows = np.repeat(np.arange(len(users), dtype=np.int64), np.diff(data.test.indptr))
        predicted = _als.predict_pairs(users, items, rows, data.test.indices.astype(np.int64), threads)
        return found | {"rmse": hmf.metrics.rmse(data.test.data, predicted)}
    ranked = _Ranked(users, items, data.train)
    with_test = np.flatnonzero(np.diff(data.test.indptr))
    some = np.random.default_rng(0).permutation(with_test)[:JUDGED_USERS]
    return found | {"ndcg@10": hmf.evaluate(ranked, data.test, metrics="ndcg@10", users=some)["ndcg@10"]}


class _Ranked:
    """Factors as a model that recommends."""

    def __init__(self, users: np.ndarray, items: np.ndarray, seen: sp.csr_array) -> None:
        self.users, self.items, self.seen = users, items, seen
        self.n_users, self.n_items = len(users), len(items)

    def recommend(self, userid: Any, user_items: Any = None, N: int = 10, **options: Any) -> Any:
        threads = hmf.config()["threads"]
        seen = RowColumns.of(self.seen[userid])
        return top_k(self.users[userid], self.items, N, seen=seen, num_threads=threads)


# ------------------------------------------------------------------------------------------------------------ our fits


def fit_once(case: Case, matrix: sp.csr_array, device: Any) -> tuple[Any, float]:
    model = case.model(device)
    started = time.perf_counter()
    model.fit(matrix)
    return model, time.perf_counter() - started


def ours(case: Case, data: Split, device: Any, repeats: int) -> dict[str, Any]:
    """The first fit in this process, the median of further ones with its parts, and first uses of its model."""
    model, first = fit_once(case, data.train, device)
    fits = [fit_once(case, data.train, device) for _ in range(repeats)]
    seconds = sorted(elapsed for _, elapsed in fits)
    model, elapsed = min(fits, key=lambda fit: abs(fit[1] - seconds[len(seconds) // 2]))
    result: dict[str, Any] = {
        "seconds": elapsed,
        "seconds_min": seconds[0],
        "seconds_first": first,
        "parts": model.timings_,
        "accounted": sum(model.timings_.values()) / elapsed,
        "device": model.device_,
        "recommend_first": _seconds(lambda: model.recommend(0)),
    }
    if case.feedback == "implicit" and data.test.nnz:
        everybody = np.arange(data.train.shape[0])
        result["recommend_all"] = [_seconds(lambda: model.recommend(everybody)) for _ in range(2)][-1]
        metrics = ["ndcg@10", "recall@10"]
        result["evaluate_all"] = median([_seconds(lambda: hmf.evaluate(model, data.test, metrics=metrics))
                                         for _ in range(2)])  # fmt: skip
    return result | judge(case, data, (model.user_factors, model.item_factors))


def search(case: Case, data: Split, device: str, repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fits with several lambdas, each from the matrix and all from one object, in turn; medians."""

    def from_matrix() -> list[Any]:
        return [case.model(device, strength).fit(data.train) for strength in STRENGTHS]

    def prepared_once() -> list[Any]:
        prepared = hmf.PreparedRatings(data.train, device=device)
        return [case.model(device, strength).fit(prepared) for strength in STRENGTHS]

    one, other = (
        case.model(device).fit(given) for given in (data.train, hmf.PreparedRatings(data.train, device=device))
    )
    if not np.array_equal(one.user_factors, other.user_factors):
        raise click.ClickException(f"{case.name}: prepared ratings lead to other factors")
    ways = {"each from the matrix": from_matrix, "prepared once": prepared_once}
    for way, seconds in alternate(ways, repeats).items():
        yield f"hybridmf, {device}, {len(STRENGTHS)} lambdas, {way}", {"seconds": median(seconds)}


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------------ cold fits


def cold(case: Case, data: Split, device: Any, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A fit in a process of its own: from a matrix, then from a CSV file; each with no compiled kernels and with."""
    paths = _written(data.train, folder)
    for source, path in paths.items():
        cache = tempfile.mkdtemp(dir=folder)
        for kernels in ("none", "compiled") if hmf.config()["gpu"] else ("compiled",):
            task = {"case": asdict(case), "device": device, "source": source, "path": str(path)}
            environment = os.environ | {"CUPY_CACHE_DIR": cache, "HYBRIDMF_READY_KERNELS": "0"}
            command = [sys.executable, "-c", WORKER, json.dumps(task)]
            started = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                raise click.ClickException(f"the process of {case.name} failed:\n{done.stderr[-2000:]}")
            result = json.loads(done.stdout.splitlines()[-1])
            yield f"cold, {source}, kernels {kernels}", result | {"process": time.perf_counter() - started}


def _written(matrix: sp.csr_array, folder: Path) -> dict[str, Path]:
    """The matrix as SciPy saves it, and as a CSV file of all entries in random order."""
    archive, text = folder / "matrix.npz", folder / "ratings.csv"
    sp.save_npz(archive, matrix, compressed=False)
    coo = matrix.tocoo()
    order = np.random.default_rng(0).permutation(matrix.nnz)
    columns = {"user": coo.row[order], "item": coo.col[order], "rating": coo.data[order].astype(np.int64)}
    try:
        import pyarrow as pa
        from pyarrow import csv
    except ImportError:
        np.savetxt(text, np.column_stack(list(columns.values())), fmt="%d", delimiter=",")
    else:
        csv.write_csv(pa.table(columns), text)
    return {"matrix": archive, "file": text}


WORKER = """
import json, sys, time
task = json.loads(sys.argv[1])
matrix = None
if task["source"] == "matrix":
    import scipy.sparse
    matrix = scipy.sparse.load_npz(task["path"]).tocsr()
laps, last = {}, time.perf_counter()
def lap(name):
    global last
    now = time.perf_counter()
    laps[name], last = now - last, now
import hybridmf as hmf
hmf.ImplicitALS, hmf.Ratings
lap("import")
if matrix is None:
    matrix = hmf.Ratings.from_file(task["path"])
    lap("read")
case = task["case"]
kind = hmf.ImplicitALS if case["feedback"] == "implicit" else hmf.ExplicitALS
model = kind(factors=case["factors"], iterations=case["iterations"], device=task["device"], random_state=0)
model.fit(matrix)
lap("fit")
model.recommend(0)
lap("recommend_first")
laps |= {"seconds": sum(laps.values()), "parts": model.timings_, "device": model.device_}
laps |= {"imported": {name: name in sys.modules for name in ("cupy", "pandas", "pyarrow", "scipy.stats", "sklearn")}}
print(json.dumps(laps))
"""


# --------------------------------------------------------------------------------------------------------------- rivals


Fitted = tuple[np.ndarray, np.ndarray]
Fit = Callable[[], Fitted]


def rival_fits(case: Case, matrix: sp.csr_array, threads: int, gpu: bool) -> Iterator[tuple[str, Fit]]:
    """Whole fits of the same objective by other libraries, from the matrix to factors on the host."""
    if case.feedback == "implicit":
        if rivals.installed("implicit"):
            yield "implicit, cpu (3 CG steps)", lambda: _implicit(case, matrix, threads, use_gpu=False)
            if gpu and _implicit_has_gpu():
                _implicit(replace(case, iterations=1), matrix, threads, use_gpu=True)  # starts CUDA and its libraries
                yield "implicit, gpu (3 CG steps)", lambda: _implicit(case, matrix, threads, use_gpu=True)
        if rivals.installed("irspack"):
            yield (
                "irspack, cpu (3 CG steps)",
                lambda: _stepped(case, rivals.Irspack(matrix, case.factors, 0.01, 1.0, threads, "CG")),
            )
        if rivals.installed("rusket"):
            yield (
                "rusket, cpu (3 CG steps)",
                lambda: rivals.Rusket(matrix, case.factors, 0.01, 1.0, threads, True).fit(case.iterations).factors(),
            )
        return
    if rivals.installed("lenskit") and rivals.installed("pandas"):
        data = rivals.LenskitData(matrix)
        yield "lenskit, cpu", lambda: _stepped(case, rivals.Lenskit(data, case.factors, 0.05))
    if rivals.installed("cmfrec"):
        yield (
            "cmfrec, cpu (3 CG steps)",
            lambda: rivals.Cmfrec(matrix, case.factors, 0.05, threads, use_cg=True).fit(case.iterations).factors(),
        )


def _implicit_has_gpu() -> bool:
    try:
        from implicit import gpu
    except ImportError:
        return False
    return bool(gpu.HAS_CUDA)


def _implicit(case: Case, matrix: sp.csr_array, threads: int, use_gpu: bool) -> Fitted:
    from implicit.als import AlternatingLeastSquares

    confidence = sp.csr_matrix((1 + matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AlternatingLeastSquares(
            factors=case.factors, regularization=0.01, alpha=1.0, iterations=case.iterations, use_gpu=use_gpu,
            num_threads=0 if use_gpu else threads, random_state=0,
        )  # fmt: skip
        model.fit(confidence, show_progress=False)
    users, items = model.user_factors, model.item_factors
    return (users.to_numpy(), items.to_numpy()) if use_gpu else (users, items)


def _stepped(case: Case, rival: Any) -> Fitted:
    for _ in range(case.iterations):
        rival.step()
    factors: Fitted = rival.factors()
    return factors


# ------------------------------------------------------------------------------------------------------------- the runs


def devices_here() -> list[Any]:
    """The CPU, one GPU and two of them, as far as they are there."""
    if hmf.config()["gpu"] is None:
        return ["cpu"]
    from hybridmf.device.cuda import device_count

    return ["cpu", "cuda", ["cuda:0", "cuda:1"]] if device_count() > 1 else ["cpu", "cuda"]


def runs_here(case: Case, data: Split, device: Any, profile: str) -> bool:
    work = data.train.nnz * case.factors**2 * case.iterations
    if device == "cpu":
        return profile == "full" or work <= CPU_QUICK_WORK
    return isinstance(device, str) or data.train.nnz > 10**7


def report(case: Case, what: str, result: dict[str, Any], common: dict[str, Any]) -> None:
    quality = "".join(f"  {name} {result[name]:.5g}" for name in ("objective", "ndcg@10", "rmse") if name in result)
    parts = "  ".join(f"{name} {seconds:.3f}" for name, seconds in result.get("parts", {}).items())
    more = [f"{name} {result[name]:.3f}"
            for name in ("seconds_first", "import", "read", "recommend_first", "recommend_all", "evaluate_all")
            if name in result]  # fmt: skip
    click.echo(f"{case.name:50}{what:38}{result['seconds']:9.3f} s{quality}")
    for text in (parts, "  ".join(more)):
        if text:
            click.echo(f"{'':50}  {text}")
    record("fit", {"bench": "fit", "what": what} | asdict(case) | common | result)


def case_of(line: dict[str, Any]) -> Case:
    """The case of a line."""
    return Case(*(line[name] for name in ("shape", "feedback", "factors", "iterations")))


def draw_fits(path: Path) -> None:
    """Seconds from a matrix to a model: a line of each warm fit (current.py), one bar each, on a logarithmic axis.

    Only fits on machines with a GPU, which have 16 cores or more.
    """
    lines = [line for line in freshness.results("fit.jsonl")["fit"] if line["machine"]["cores"] >= 16
             and "cold" not in line["what"] and "lambdas" not in line["what"]]  # fmt: skip
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    cases = {case: [line for line in lines if case == case_of(line)] for case in CASES}
    lines = [line for found in cases.values() for line in current.current_if_any("fit", found)]
    for line in reversed(current.best_first("fit", lines)):  # the best last
        case = case_of(line)
        what = line["what"].removesuffix(":0") if "+" not in line["what"] else line["what"]
        newest[case.name, what] = line
    bars = [(f"{case.name}\n{what}; {_hardware(line)}", line["seconds"]) for case in CASES
            for (name, what), line in newest.items() if name == case.name]  # fmt: skip
    with figure(path, 8.0, 0.55 + 0.42 * len(bars)) as drawing:
        axes = drawing.subplots()
        labels, seconds = zip(*reversed(bars), strict=True)
        ours = ["#2b6cb0" if "hybridmf" in label else "#a0aec0" for label in labels]
        axes.barh(labels, seconds, color=ours)
        axes.bar_label(axes.containers[0], [f" {each:.2g} s" for each in seconds])
        axes.set_xscale("log")
        axes.set_xlim(0.02, 3 * max(seconds))
        axes.set_xlabel("seconds from a SciPy matrix to a model, warm")


def _hardware(line: dict[str, Any]) -> str:
    """What a fit ran on: the GPU, or the number of cores."""
    on_gpu = "cuda" in (line.get("device") or line["what"]) or "gpu" in line["what"]
    return current.card(line).split()[1] if on_gpu else f"{line['machine']['cores']} cores"


@click.command()
@click.option("--profile", type=click.Choice(["quick", "full"]), default="quick", show_default=True)
@click.option("--case", "wanted", default="", help="Shapes, separated by commas; default: those of the profile.")
@click.option("--feedback", type=click.Choice(["both", "implicit", "explicit"]), default="both", show_default=True)
@click.option("--devices", default="", help='Separated by commas, as "cpu,cuda,cuda:0+cuda:1"; default: all there are.')
@click.option("--repeats", default=3, show_default=True)
@click.option("--rivals/--no-rivals", "with_rivals", default=True, show_default=True)
@click.option("--cold/--no-cold", "with_cold", default=True, show_default=True)
@click.option("--search/--no-search", "with_search", default=True, show_default=True)
@click.option("--budget", type=float, help="Seconds after which no further case begins.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the recorded fits into this SVG file, and stop.")
def main(
    profile: str, wanted: str, feedback: str, devices: str, repeats: int, with_rivals: bool, with_cold: bool,
    with_search: bool, budget: float | None, plot: Path | None,
) -> None:  # fmt: skip
    """Whole fits by part, beside other libraries."""
    if plot is not None:
        draw_fits(plot)
        return
    started = time.perf_counter()
    given = [each.split("+") if "+" in each else each for each in devices.split(",")] if devices else devices_here()
    for case in CASES:
        small = profile == "full" or case.shape != "2e9"
        if (case.shape not in wanted.split(",")) if wanted else not small:
            continue
        if feedback not in ("both", case.feedback) or (budget and time.perf_counter() - started > budget):
            continue
        run_case(case, given, profile, repeats, with_rivals, with_cold, with_search)


def run_case(
    case: Case, devices: list[Any], profile: str, repeats: int, with_rivals: bool, with_cold: bool, with_search: bool
) -> None:
    """Draw the ratings of a case, fit them on each device, cold and warm, and beside rivals."""
    began = time.perf_counter()
    data = draw(case.shape, implicit=case.feedback == "implicit")
    common: dict[str, Any] = {"nnz": data.train.nnz, "profile": profile, "draw_seconds": time.perf_counter() - began}
    if hmf.config()["gpu"] is not None:
        from hybridmf.device.cuda import open_device

        common["gpu"] = open_device().spec.name
    click.echo(f"{case.name}: {data.train.nnz:,} entries, drawn in {common['draw_seconds']:.1f} s")
    for device in devices:
        if runs_here(case, data, device, profile):
            result = ours(case, data, device, repeats)
            report(case, f"hybridmf, {device if isinstance(device, str) else '+'.join(device)}", result, common)
    first = case == next(each for each in CASES if each.shape == case.shape)
    if with_search and case.shape in SEARCHED and first:
        for device in devices:
            if isinstance(device, str) and runs_here(case, data, device, profile):
                for what, result in search(case, data, device, repeats):
                    report(case, what, result, common)
    if with_cold and case.shape in COLD and first:
        with tempfile.TemporaryDirectory() as folder:
            for device in ("auto", *(each for each in devices if isinstance(each, str))):
                if device != "cpu" and (device != "auto" or case.shape == "ml100k"):
                    for what, result in cold(case, data, device, Path(folder)):
                        report(case, f"hybridmf, {device}, {what}", result, common)
    if with_rivals and case.shape != "2e9":
        gpu = any(device != "cpu" for device in devices)
        work = data.train.nnz * case.factors**2 * case.iterations
        for name, fit in rival_fits(case, data.train, hmf.config()["threads"], gpu):
            if profile == "full" or ", gpu" in name or work <= CPU_QUICK_WORK:
                began = time.perf_counter()
                sides = fit()
                report(case, name, {"seconds": time.perf_counter() - began} | judge(case, data, sides), common)


if __name__ == "__main__":
    main()
