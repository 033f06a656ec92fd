"""Renders the tables of docs/performance.md and FIGURES.md from the lines: `python bench/performance.py`.

A table shows a current line of each case, if there is any (current.py). A ratio has both numbers from one run.
Figures of other code that no script runs are quoted (quoted.py), in italics, and have no ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import current
import freshness
import quoted
from current import card, names, processor, run_of
from paper_common import fill, table

PAGES = (freshness.ROOT / "docs" / "performance.md", freshness.ROOT / "bench" / "FIGURES.md")

SHAPES = {
    "netflix": "Netflix", "ml20m": "ML-20M", "ml-20m": "ML-20M", "ml1m": "ML-1M", "ml-1m": "ML-1M",
    "ml-10m": "ML-10M", "ml100k": "ML-100K", "msd": "Million Song", "millionsong": "Million Song", "shop": "shop",
    "2e9": "5M x 500k", "epinions": "Epinions", "MovieLens-1M": "MovieLens 1M (real)",
}  # fmt: skip

Line = dict[str, Any]
Rows = list[list[object]]

# ------------------------------------------------------------------------------------------ lines


def lines(file: str, **where: Any) -> list[Line]:
    """Lines of a file with these fields, oldest first."""
    found = freshness.results(f"{file}.jsonl").get(file, [])
    return [line for line in found if all(line.get(k) == v for k, v in where.items())]


def best(file: str, **where: Any) -> Line:
    """The newest current line with these fields, else the newest one."""
    return current.best_first(file, lines(file, **where))[0]


def together(file: str, whats: Sequence[str], **where: Any) -> list[Line]:
    """Lines of one run that has all of these (`what`), in this order."""
    return current.together(file, lines(file, **where), "what", whats)


def shape(line: Line) -> str:
    """Name of the data of a line."""
    return SHAPES.get(str(line["shape"]), str(line["shape"]))


def seconds(value: float) -> str:
    """Seconds with three significant digits below ten."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def ms(value: float) -> str:
    """Milliseconds with three significant digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


# ------------------------------------------------------------------------------------------ headlines


def headlines() -> str:
    """What is fastest where, each beside a rival of the same run; settings that are not the defaults are named."""
    rows: Rows = []
    ours, theirs = together("fit", OF_GPUS, shape="ml20m", feedback="implicit")
    rows.append(_headline("whole fit, ML-20M, implicit, f = 64, 10 iterations", card(ours),
                          ours["seconds"], "`implicit` on the GPU, CG", theirs["seconds"]))  # fmt: skip
    for case in (("netflix", "implicit", 64, 6), ("millionsong", "implicit", 128, 6)):
        line = {_case(line): line for line in _fits("hybridmf, cuda")}[case]
        rows.append(_headline(f"whole fit, {_name(line)}", card(line), line["seconds"]))
    rows += _time_headlines()
    for task, rival in (("explicit exact", "lenskit"), ("implicit exact", "irspack")):
        line = _cpu(task, "ml-10m", 64)
        of = line["seconds_per_iteration"]
        name = f"iteration, ML-10M, {task.replace(' ', ', ')}, f = 64"
        rows.append(_headline(name, processor(line), of["simd"], _rival(rival), of[rival]))
    line = best("cpu", task="top 10, filtered")
    of = line["seconds"]
    rows.append(_headline("top 10 of 27,278 items for 138,493 users", processor(line), of["hybridmf"], "`implicit`",
                          of["implicit"]))  # fmt: skip
    return table(["what", "hardware", "hybridmf, s", "other library", "its s", "times"], rows)


def _headline(what: str, where: str, ours: float, rival: str = "", theirs: float | None = None) -> list[object]:
    tail = [rival, seconds(theirs), times(theirs / ours)] if theirs else ["", "", ""]
    return [what, where, seconds(ours), *tail]


def _time_headlines() -> Rows:
    rows: Rows = []
    explicit = best("cpu", task="explicit, seconds to within 1% of the best objective")
    of = explicit["seconds"]
    rival = _fastest(of)
    for name, key in (
        ("`balance=True`, CG 3 steps", "ours, CG 3 balanced"),
        ("exact, the default solver", "ours, exact"),
    ):
        what = f"fit to within 1 % of the best objective, {shape(explicit)}, explicit, f = 64, {name}"
        rows.append(_headline(what, processor(explicit), of[key], rival, of[rival]))
    implicit = best("cpu", task="implicit, seconds to within 2% of the best objective")
    of = implicit["seconds"]
    rival = _fastest(of)
    for name, key in (("CG 2 steps", "ours, CG 2"), ("exact, the default solver", "ours, exact")):
        what = f"fit to within 2 % of the best objective, {shape(implicit)}, implicit, f = 64, {name}"
        rows.append(_headline(what, processor(implicit), of[key], rival, of[rival]))
    sgd = best("sgd", shape="MovieLens-1M", factors=64)
    of = sgd["seconds"]
    rows.append(_headline("fit to LIBMF's test RMSE, MovieLens 1M, SGD, f = 64", processor(sgd),
                          of["ours, blocks, power"], "LIBMF", of["LIBMF, rate 0.1"]))  # fmt: skip
    return rows


def _fastest(of: dict[str, float]) -> str:
    """The fastest of the other libraries."""
    return min((name for name in of if not name.startswith("ours")), key=of.__getitem__)


def _rival(name: str) -> str:
    return {"lenskit": "LensKit", "implicit": "`implicit`"}.get(name, name)


def _cpu(task: str, where: str, factors: int) -> Line:
    """The line with the rival that a task is compared with."""
    rival = "lenskit" if task.startswith("explicit exact") else "cmfrec" if task.startswith("explicit") else "irspack"
    found = current.best_first("cpu", lines("cpu", task=task, shape=where, factors=factors))
    return next(line for line in found if rival in names(line, "seconds_per_iteration"))


# ------------------------------------------------------------------------------------------ whole fits

FITS = [("ml1m", "implicit", 128, 10), ("ml20m", "implicit", 64, 10), ("netflix", "implicit", 64, 6),
        ("netflix", "explicit", 100, 12), ("millionsong", "implicit", 128, 6)]  # fmt: skip


OF_GPUS = ("hybridmf, cuda", "implicit, gpu (3 CG steps)")


def _case(line: Line) -> tuple[Any, ...]:
    return tuple(line[key] for key in ("shape", "feedback", "factors", "iterations"))


def _name(line: Line) -> str:
    return f"{shape(line)}, {line['feedback']}, f = {line['factors']}, {line['iterations']} iterations"


def _fits(*whats: str) -> list[Line]:
    """The fits of `FITS` on one kind of GPU."""
    found = [line for line in lines("fit") if line["what"] in whats and _case(line) in FITS]
    return current.of_one_kind("fit", found, "what", "shape", "feedback")


def fits() -> str:
    """Whole fits on one and two GPUs."""
    rows: Rows = []
    whats = ("hybridmf, cuda", "hybridmf, cuda:0+cuda:1")
    chosen = {(_case(line), line["what"]): line for line in _fits(*whats)}
    for case in FITS:
        of_case = [line for line in lines("fit") if _case(line) == case]
        one, two = (chosen.get((case, what)) for what in whats)
        if two:
            beside = [line for line in of_case if line["what"] == whats[0] and run_of(line) == run_of(two)]
            one, two = (beside[-1], two) if beside else (one, None)
        if not one:
            continue
        iterations = one["parts"]["iterations"]
        parts = (one["seconds"], iterations, one["seconds"] - iterations)
        row: list[object] = [_name(one), f"{one['nnz'] / 1e6:.1f}e6", *map(seconds, parts)]
        row += [seconds(two["seconds"]), times(one["seconds"] / two["seconds"])] if two else ["", ""]
        rows.append(row)
    header = ["whole fit", "entries", "one GPU, s", "iterations", "set-up", "two GPUs, s", "times"]
    return f"**{card(next(iter(chosen.values())))}**\n\n{table(header, rows)}"


def rivals() -> str:
    """Whole fits of all libraries in a run that has implicit's GPU code, and in one on a CPU."""
    rows: Rows = []
    for which in ("ml20m", "ml1m"):
        rows += _fits_of(together("fit", OF_GPUS, shape=which, feedback="implicit")[0])
    cpu = best("fit", what="lenskit, cpu")
    for kind in ("implicit", "explicit"):
        rows += _fits_of(next(line for line in lines("fit", what="hybridmf, cpu", feedback=kind)
                              if run_of(line) == run_of(cpu)))  # fmt: skip
    return table(["fit", "machine", "library", "seconds", "objective", "NDCG@10 / RMSE"], rows)


def _fits_of(first: Line) -> Rows:
    run = {line["what"]: line for line in lines("fit", shape=first["shape"], feedback=first["feedback"])
           if run_of(line) == run_of(first) and line.get("objective")}  # fmt: skip
    return [[_name(first), processor(line), line["what"], seconds(line["seconds"]), f"{line['objective']:.4g}",
             f"{line.get('ndcg@10') or line.get('rmse') or 0:.4f}"]
            for line in sorted(run.values(), key=lambda line: float(line["seconds"]))]  # fmt: skip


def cold() -> str:
    """A cold process, from the import to the first recommendation."""
    rows: Rows = []
    whats = [f"hybridmf, cuda, cold, matrix, kernels {kernels}" for kernels in ("compiled", "none")]
    found = current.of_one_kind("fit", (line for line in lines("fit") if line["what"] in whats), "what", "shape")
    of = {(line["shape"], line["what"]): line for line in found}
    for which in ("ml20m", "ml1m"):
        of_shape = [of[which, what] for what in whats if (which, what) in of]
        if len(of_shape) == len(whats):
            name = f"{shape(of_shape[0])}, {of_shape[0]['feedback']}, f = {of_shape[0]['factors']}"
            rows.append([name, *(f"{line['seconds']:.1f}" for line in of_shape)])
    return f"**{card(found[-1])}**\n\n{table(['fit', 'kernels in the disk cache, s', 'no kernels, s'], rows)}"


def objectives() -> str:
    """Seconds to a good objective on the CPU."""
    parts = []
    for task in ("explicit, seconds to within 1% of the best objective",
                 "implicit, seconds to within 2% of the best objective"):  # fmt: skip
        line = best("cpu", task=task)
        of = line["seconds"]
        fastest = of[_fastest(of)]
        rows: Rows = [[name.replace("ours", "hybridmf").replace(" balanced", ", `balance=True`"),
                       line["iterations"][name], f"{line['seconds_per_iteration'][name]:.2f}", seconds(of[name]),
                       times(fastest / of[name])] for name in sorted(of, key=of.__getitem__)]  # fmt: skip
        header = ["method", "iterations", "s / iteration", "seconds", "fastest rival / this"]
        parts.append(f"**{task.replace('1%', '1 %').replace('2%', '2 %')}**, {shape(line)}, {processor(line)}, "
                     f"{line['nnz']:,} entries\n\n{table(header, rows)}")  # fmt: skip
    return "\n\n".join(parts)


def short_rows() -> str:
    """Exact ALS with rows shorter than the rank."""
    rows: Rows = []
    found = [line for line in lines("cpu", task="implicit, short rows")
             if names(line, "seconds_per_iteration") >= {"irspack", "implicit"}]  # fmt: skip
    for line in current.of_cases("cpu", found, "factors"):
        of = line["seconds_per_iteration"]
        rows.append([processor(line), line["factors"], *(seconds(of[name]) for name in ("auto", "primal", "irspack",
                     "implicit")), times(min(of["irspack"], of["implicit"]) / of["auto"])])  # fmt: skip
    header = ["machine", "f", "hybridmf, exact, s", "primal form only", "irspack, CG", "`implicit`, CG",
              "fastest rival / this"]  # fmt: skip
    return table(header, rows)


def sgd() -> str:
    """Seconds to LIBMF's test RMSE at one rank."""
    return sgd_ranks((64,))


def sgd_more() -> str:
    """The same at the other ranks."""
    return sgd_ranks((32, 128))


def sgd_ranks(ranks: Sequence[int]) -> str:
    """Seconds to LIBMF's test RMSE."""
    rows: Rows = []
    found = (line for line in lines("sgd", shape="MovieLens-1M") if line["factors"] in ranks)
    for line in current.of_one_kind("sgd", found, "factors"):
        of = line["seconds"]
        for name in sorted(of, key=of.__getitem__):
            rows.append([line["factors"], f"{line['target']:.4f}", name.replace("ours", "hybridmf"),
                         line["epochs"][name], f"{line['seconds_per_epoch'][name]:.4f}", seconds(of[name]),
                         times(of["LIBMF, rate 0.1"] / of[name])])  # fmt: skip
    return table(["f", "RMSE", "method", "epochs", "s / epoch", "seconds", "LIBMF / this"], rows)


# ------------------------------------------------------------------------------------------ the CPU

TASKS = ("explicit exact", "implicit exact", "implicit CG, 3 steps", "implicit iALS++, 32", "explicit CG, 3 steps")
RIVALS = ("lenskit", "irspack", "implicit", "cmfrec", "buffalo", "LIBMF", "rusket", "daal4py")
OURS = {"explicit exact": "simd", "implicit exact": "simd", "implicit iALS++, 32": "subspace"}


def cpu() -> str:
    """Iterations beside the fastest rival, of each kind of machine, task and rank."""
    rows: Rows = []
    for task in TASKS:
        found = [line for line in lines("cpu", task=task, shape="ml-10m")
                 if names(line, "seconds_per_iteration") & set(RIVALS)]  # fmt: skip
        shown = current.current_if_any("cpu", current.of_cases("cpu", found, "factors"))
        for line in sorted(shown, key=lambda line: int(line["factors"])):
            of, ours = line["seconds_per_iteration"], OURS.get(task, "cg")
            others = {name: value for name, value in of.items() if name in RIVALS}
            rival = min(others, key=others.__getitem__)
            rate = line["gflops"][ours] / line["sgemm_gflops"] if line.get("gflops") else None
            rows.append([processor(line), task, line["factors"], seconds(of[ours]), _rival(rival),
                         seconds(others[rival]), times(others[rival] / of[ours]), f"{rate:.0%}" if rate else "",
                         line["date"]])  # fmt: skip
    header = ["machine", "task", "f", "hybridmf, s", "fastest rival", "its s", "times", "of sgemm", "measured"]
    return table(header, rows)


def threads() -> str:
    """Scaling over threads."""
    every = current.current_if_any("cpu", lines("cpu", task="scaling, implicit exact"))
    found = current.of_one_kind("cpu", every, "shape", "factors")
    counts = list(found[-1]["seconds_per_iteration"])
    rows: Rows = [[shape(line), line["factors"], *(seconds(line["seconds_per_iteration"][n]) for n in counts),
                   times(line["speedup"][counts[-1]])] for line in found]  # fmt: skip
    header = ["shape", "f", *(f"{n} threads, s" for n in counts), f"{counts[-1]} against 1"]
    return f"**{found[-1]['machine']['processor']}, {processor(found[-1])}**\n\n{table(header, rows)}"


def top_k() -> str:
    """Top 10 of all users on the CPU."""
    line = best("cpu", task="top 10, filtered")
    users = 138_493
    rows: Rows = [[name, seconds(value), f"{users / value:,.0f}"] for name, value in line["seconds"].items()]
    return table(["", "seconds", "users / s"], rows)


def layouts() -> str:
    """Layouts beside SciPy."""
    line = current.best_first("layouts", (line for line in lines("layouts") if "ratio_to_tocsc" in line))[0]
    rows: Rows = [[name, seconds(value), times(line["ratio_to_tocsc"][name])] for name, value in
                  line["seconds"].items()]  # fmt: skip
    return table(["", "seconds", "times tocsc"], rows)


def order() -> str:
    """Speed-up from degree order."""
    rows: Rows = []
    for line in current.of_one_kind("layouts", lines("layouts", task="reorder"), "shape", "factors"):
        of, gain = line["seconds_per_iteration"], line["gain_of_order"]
        rows.append([shape(line), line["factors"], f"{of['simd']:.3f}", times(gain["simd"]), f"{of['bals']:.3f}",
                     times(gain["bals"])])  # fmt: skip
    header = ["shape", "f", "simd, s", "by degree, speed-up", "bals, s", "by degree, speed-up"]
    return table(header, rows)


# ------------------------------------------------------------------------------------------ one GPU

SETTLED = ("Netflix", "Million Song", "shop")


def gpu() -> str:
    """Iterations of ALS."""
    rows: Rows = []
    found = current.of_one_kind("gpu", lines("gpu", task="als"), "shape", "factors", "name")
    for line in sorted(found, key=lambda line: (SETTLED.index(shape(line)) if shape(line) in SETTLED else 9,
                                                line["name"].split()[0], line["factors"])):  # fmt: skip
        halves = f"{ms(line['item_ms'])} + {ms(line['user_ms'])}"
        rows.append([shape(line), line["name"], line["factors"], ms(line["ms"]), halves, f"{line['tflops']:.1f}",
                     line["date"]])  # fmt: skip
    header = ["shape", "task", "f", "ms", "items + users, ms", "TFLOP/s", "measured"]
    return f"**{card(found[-1])}**\n\n{table(header, rows)}"


def precision() -> str:
    """Error and speed of each precision."""
    rows: Rows = []
    found = current.of_one_kind("gpu", lines("gpu", task="precision"), "name")
    for line in found:
        kind, _, precision_ = line["name"].partition(" user half sweep, ")
        rows.append([precision_, kind, ms(line["ms"]), f"{line['largest_error']:.1e}", f"{line['median_error']:.1e}"])
    return f"**{card(found[-1])}**\n\n{table(['precision', 'feedback', 'ms', 'largest error', 'median error'], rows)}"


def subspace() -> str:
    """iALS++ beside the exact solver."""
    rows: Rows = []
    found = current.of_one_kind("gpu", lines("gpu", task="subspace"), "shape", "factors", "name")
    exact: dict[tuple[str, int], float] = {}
    for line in found:
        case = shape(line), line["factors"]
        if not line.get("rival_ms"):
            exact[case] = line["ms"]
            continue
        reached = line["iterations_to"]
        rows.append([*case, ms(exact[case]), line["name"].rpartition(" ")[2], ms(line["ms"]),
                     times(exact[case] / line["ms"]), reached[2], reached[5]])  # fmt: skip
    header = ["shape", "f", "exact, ms", "`block_size`", "ms", "times", "iterations to 3 exact ones", "to 6"]
    return f"**{card(found[-1])}**\n\n{table(header, rows)}"


def assemblies() -> str:
    """The papers' assemblies of the users' normal equations."""
    every = [*lines("gpu", task="syrk"), *lines("gpu", task="bals")]
    found = current.of_one_kind("gpu", every, "name", "factors")
    kernels = list(dict.fromkeys(line["name"].rpartition(", ")[0] for line in found))
    cases = [(f, o) for f in (32, 64) for o in ("given", "by degree")]
    of = {(line["name"], line["factors"]): ms(line["ms"]) for line in found}
    rows: Rows = [[f"`{name}`", *(of.get((f"{name}, {o}", f), "") for f, o in cases)] for name in kernels]
    for rival, tile in (("Gates' kernel, as published with BALS", None), ("BALS's kernel", [256, 192]),
                        ("BALS's kernel", [768, 384])):  # fmt: skip
        lines_ = {(q["factors"], q["order"]): quoted.figure(q) for q in
                  quoted.lines(rival=rival, shape="netflix", tile=tile)}  # fmt: skip
        name = rival if tile is None else f"{rival}, tiles of {tile[0]} x {tile[1]}"
        rows.append([f"{name} (quoted)", *(lines_.get(case, "") for case in cases)])
    header = ["assembly, ms", "f = 32", "f = 32, by degree", "f = 64", "f = 64, by degree"]
    return f"**{card(found[-1])}**, Netflix's shape\n\n{table(header, rows)}"


def cholesky() -> str:
    """Batched Cholesky beside torch and cuSolverDx."""
    rows: Rows = []
    found = current.of_one_kind("gpu", lines("gpu", task="cholesky"), "factors")
    for line in sorted(found, key=lambda line: int(line["factors"])):
        dx, torch = line.get("cusolverdx_ms"), line.get("rival_ms")
        rows.append([line["factors"], f"{line['systems']:,}", ms(line["ms"]), ms(dx) if dx else "",
                     times(dx / line["ms"]) if dx else "", ms(torch) if torch else "",
                     times(torch / line["ms"]) if torch else ""])  # fmt: skip
    header = ["f", "systems", "hybridmf, ms", "cuSolverDx, ms", "times", "torch, ms", "times"]
    return f"**{card(found[-1])}**\n\n{table(header, rows)}"


def top_k_gpu() -> str:
    """Top 10 of all users on a GPU."""
    rows: Rows = []
    found = current.of_one_kind("gpu", lines("gpu", task="topk", factors=128), "shape", "name")
    for line in found:
        kind = line["name"].removeprefix("top 10 filtered, ")
        rows.append([f"{line['items']:,}", kind, ms(line["ms"]), f"{line['users_per_second'] / 1e6:.1f}"])
    return f"**{card(found[-1])}**, f = 128\n\n{table(['items', 'factors', 'ms', 'million users / s'], rows)}"


def updates() -> str:
    """Epochs of SGD and iterations of CCD++ on a GPU."""
    rows: Rows = []
    every = [line for line in [*lines("gpu", task="sgd"), *lines("gpu", task="ccd")]
             if "inner" not in line["name"] or "1 inner" in line["name"]]  # fmt: skip
    found = current.of_one_kind("gpu", every, "task", "name", "factors")
    for line in sorted(found, key=lambda line: (line["task"] == "ccd", line["name"], line["factors"])):
        rmse = next((f"{value:.4f} ({key.rpartition('_')[2]})" for key, value in line.items()
                     if key.startswith("rmse_after")), "")  # fmt: skip
        name = line["name"] if line["task"] == "sgd" else f"CCD++, {line['name']}"
        rows.append([name, line["factors"], ms(line["ms"]), rmse, line["date"]])
    header = ["method", "f", "ms", "train RMSE (after)", "measured"]
    return f"**{card(found[-1])}**, Netflix's shape\n\n{table(header, rows)}"


def streamed() -> str:
    """Ratings from the host and from a store."""
    rows: Rows = []
    for line in current.of_cases("out_of_core", lines("out_of_core", task="out of core", shape="netflix"), "from"):
        rows.append([processor(line), line["from"], ms(sorted(line["ms"])[len(line["ms"]) // 2]),
                     times(line["ratio"]), line["date"]])  # fmt: skip
    return table(["machine of the GPU", "ratings from", "ms", "times those in its memory", "measured"], rows)


def short_gpus() -> str:
    """Short rows on several GPUs: of each data one run."""
    rows: Rows = []
    found = [line for line in lines("scale") if line.get("implicit") and line["shape"] in ("msd", "shop")]
    on = card(current.of_one_kind("scale", found, "shape", "factors", "gpus")[-1])
    found = [line for line in found if card(line) == on]
    for where, factors in dict.fromkeys((line["shape"], line["factors"]) for line in found):
        of_data = [line for line in found if (line["shape"], line["factors"]) == (where, factors)]
        of = {count: line["seconds"] for count, line in current.fullest("scale", of_data, "gpus").items()}
        ratios = [times(of[1] / of[n]) if {1, n} <= of.keys() else "" for n in (2, 4)]
        rows.append([SHAPES[where], factors, *(ms(1e3 * of[n]) if n in of else "" for n in (1, 2, 4)), *ratios])
    header = ["shape", "f", "one, ms", "two", "four", "two, times one", "four, times one"]
    return f"**{on}**\n\n{table(header, rows)}"


def reading() -> str:
    """Reading a file."""
    rows: Rows = []
    for line in current.of_cases("reading", lines("reading"), "rows", "ids"):
        for name, value in line["results"].items():
            rows.append([f"{line['rows']:,}", line["ids"], processor(line), name, seconds(value["seconds"]),
                         seconds(value["cpu"])])  # fmt: skip
    return table(["rows", "ids", "machine", "reader", "seconds", "CPU seconds"], rows)


SECTIONS: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (
        headlines, fits, rivals, cold, short_gpus, objectives, reading, short_rows, sgd, sgd_more, cpu, threads, top_k,
        layouts, order, gpu, precision, subspace, assemblies, cholesky, top_k_gpu, updates, streamed,
    )
}  # fmt: skip


def render() -> None:
    """Write the tables into the pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fill(page, {name: section() for name, section in SECTIONS.items() if f"<!-- begin {name} -->" in text})


if __name__ == "__main__":
    render()
