"""Searches of hyperparameters: seconds to within 1 % of the best validation NDCG@10, beside other libraries.

    python bench/search.py --data FOLDER                          Last.fm 2K, ML-1M, synthetic ML-20M; 5 x 60 s each
    python bench/search.py --data FOLDER --set lastfm-2k --seconds 20 --seeds 1
    python bench/search.py --set "ml-20m, synthetic" --device cuda      all seeds within 400 s
    python bench/search.py --data FOLDER --found                  what a search finds: 60 s on each of seven sets
    python bench/search.py --report                               the tables of docs/tuning.md, from the newest lines

A fifth of the entries is held out for validation; values count by their sign only. All models have 64 factors and are
exact (but for those of implicit on a GPU), and all values are NDCG@10 of the same users with held-out entries, 10,000
of them at most. The space has lambda and the weight of unobserved pairs, with nu = 1 as in irspack's own tuner, which
prunes and evaluates by itself, and nu = 0 for `implicit`, which has no other. "hmf.search" alone searches its default
space, which is larger. So the best is that of all searches of a set but this one; a column has seconds to within 1 % of
the best of all. A run that does not get there counts with the time that it had, and the median is then a lower bound.

All seeds of a method run before the next method, ours first, so what ends early lacks whole searches of the last ones.
With `--budget`, the searches share the time that is left: 3 s for each of ours, the rest evenly for the others, about
30 s on a GPU, where 400 s is the default. What does not begin in time is named. Libraries that are not installed, and
on a GPU those that run on the CPU, are left out, which the lines say ("left_out"); a library that fails is named.
Without Optuna, random settings of the same space take its place. On a GPU, a fit at each rank comes first, so no search
waits for the compiler.
implicit 0.7.3's solver for GPUs needs rmm-cu13 and librmm-cu13 26.4, which it is built against; later ones lack symbols
that it links to, and it then says that no CUDA extension has been built.

What a search finds is measured on a fifth of the entries that it has not seen, beside the defaults and popularity (for
RMSE: damped means of the items), with `hmf.search(known, budget=60)` and nothing else set.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from checkpoints import gpu_stamp_of
from common import RESULTS, median, record
from defaults import SETS as SHOPS
from defaults import stars
from scipy.stats import loguniform

import hybridmf as hmf
from hybridmf.core.sparse import entry_rows, keep_entries

FACTORS = 64
WITHIN = 0.99
VALIDATION_USERS = 10_000
"""The search evaluates as many at most; the others get the same ones."""

SETS = ("lastfm-2k", "ml-1m", "ml-20m, synthetic")
FILES = {"lastfm-2k": "lastfm-2k/user_artists.dat.gz", "ml-1m": "ml-1m/ratings_no_timestamps.dat.gz"}

FOUND = {
    "ml-100k likes": "implicit",
    "ml-1m likes": "implicit",
    "lastfm-2k heard": "implicit",
    "dense shop": "implicit",
    "sparse shop": "implicit",
    "ml-100k stars": "explicit",
    "ml-1m stars": "explicit",
}
"""Models of the sets whose searches are reported."""

Trace = list[tuple[float, float]]
"""Seconds from the start and value of each evaluation on all users."""


def cores() -> int:
    """Cores of this process, as `taskset` gives them."""
    return len(os.sched_getaffinity(0))


def ratings_of(name: str, data: Path) -> hmf.Ratings:
    """A set without its values."""
    if name not in FILES:
        return hmf.datasets.synthetic("ml-20m", feedback="implicit", seed=0).binarize()
    return hmf.Ratings.from_file(data / FILES[name]).binarize()


def parts_of(name: str, data: Path) -> tuple[sp.csr_array, sp.csr_array]:
    """Four fifths of the entries, and the rest of them; of `VALIDATION_USERS` users at most."""
    known, held_out = hmf.split(ratings_of(name, data), 0.2, random_state=0)
    rest = held_out.user_items
    users = np.random.default_rng(0).permutation(np.flatnonzero(np.diff(rest.indptr)))[:VALIDATION_USERS]
    chosen = np.zeros(rest.shape[0], dtype=bool)
    chosen[users] = True
    return known.user_items, keep_entries(rest, chosen[entry_rows(rest)])


def value_of(model: Any, train: sp.csr_array, validation: sp.csr_array) -> float:
    """NDCG@10 on all validation users."""
    return float(hmf.evaluate(model, validation, train=train, metrics="ndcg@10")["ndcg@10"])


def trace_of(found: hmf.SearchResult) -> Trace:
    """Whole trials in the order of their ends."""
    whole = [each for each in found.trials if each.state == "complete" and each.value is not None]
    return sorted((each.finished, float(each.value or 0.0)) for each in whole)


def ours(train: sp.csr_array, validation: sp.csr_array, seconds: float, seed: int, device: str) -> Trace:
    """hmf.search at one rank."""
    space = {"factors": [FACTORS]}
    found = hmf.search(train, validation, space=space, budget=seconds, device=device, random_state=seed)
    return trace_of(found)


def ours_in_the_same_space(
    train: sp.csr_array, validation: sp.csr_array, seconds: float, seed: int, device: str
) -> Trace:
    """hmf.search over what Optuna and irspack draw."""
    weights: dict[str, Any] = {"alpha": 0.0, "regularization_scaling": "count", "count_unobserved": True}
    model = hmf.ImplicitALS(FACTORS, device=device, **weights)
    space = {"unobserved_weight": loguniform(3e-3, 1), "regularization": loguniform(1e-4, 1e-1)}
    found = hmf.search(train, validation, model=model, space=space, budget=seconds, random_state=seed)
    return trace_of(found)


def optuna_study(objective: Callable[[Any], float], seconds: float, seed: int) -> Trace:
    """The values of a study with the sampler TPE."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    started, trace, errors = time.perf_counter(), [], []

    def traced(trial: Any) -> float:
        try:
            value = objective(trial)
        except Exception as error:  # this setting diverges
            errors.append(error)
            raise optuna.TrialPruned from error
        trace.append((time.perf_counter() - started, value))
        return value

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(traced, timeout=seconds)
    if errors and not trace:
        raise errors[0]
    return trace


def _value_of_fit(
    train: sp.csr_array, validation: sp.csr_array, seed: int, device: str, weight: float, penalty: float
) -> float:
    """NDCG@10 of a whole fit of hybridmf, which reads the matrix."""
    model = hmf.ImplicitALS(
        FACTORS,
        alpha=0.0,
        unobserved_weight=weight,
        regularization=penalty,
        regularization_scaling="count",
        count_unobserved=True,
        device=device,
        random_state=seed,
    )
    return value_of(model.fit(train), train, validation)


def random_hybridmf(train: sp.csr_array, validation: sp.csr_array, seconds: float, seed: int, device: str) -> Trace:
    """Whole fits of hybridmf at random settings."""
    rng, started, trace = np.random.default_rng(seed), time.perf_counter(), []
    while time.perf_counter() - started < seconds:
        weight, penalty = (float(np.exp(rng.uniform(*np.log(ends)))) for ends in ((3e-3, 1), (1e-4, 1e-1)))
        value = _value_of_fit(train, validation, seed, device, weight, penalty)
        trace.append((time.perf_counter() - started, value))
    return trace


def optuna_hybridmf(train: sp.csr_array, validation: sp.csr_array, seconds: float, seed: int, device: str) -> Trace:
    """Optuna over whole fits of hybridmf, each of which reads the matrix."""

    def objective(trial: Any) -> float:
        weight = trial.suggest_float("unobserved_weight", 3e-3, 1, log=True)
        penalty = trial.suggest_float("regularization", 1e-4, 1e-1, log=True)
        return _value_of_fit(train, validation, seed, device, weight, penalty)

    return optuna_study(objective, seconds, seed)


def optuna_implicit(train: sp.csr_array, validation: sp.csr_array, seconds: float, seed: int, _: str) -> Trace:
    """Optuna over fits of implicit: confidence 1 / w and lambda / w are our weight w and lambda."""
    from implicit.cpu.als import AlternatingLeastSquares
    from threadpoolctl import threadpool_limits

    liked = sp.csr_matrix(train)

    def objective(trial: Any) -> float:
        weight = trial.suggest_float("unobserved_weight", 3e-3, 1, log=True)
        penalty = trial.suggest_float("regularization", 0.3, 100, log=True)
        model = AlternatingLeastSquares(
            FACTORS, regularization=penalty / weight, alpha=1 / weight, iterations=10, use_cg=False, random_state=seed
        )
        model.fit(liked, show_progress=False)
        return value_of(model, train, validation)

    with threadpool_limits(1, user_api="blas"):
        return optuna_study(objective, seconds, seed)


def optuna_implicit_on_a_gpu(train: sp.csr_array, validation: sp.csr_array, seconds: float, seed: int, _: str) -> Trace:
    """The same with implicit's solver for GPUs, which is not exact: three steps of conjugate gradients.

    Its fit does not use `alpha`, so the values are the confidences. Rankings are ours, of its factors.
    """
    from implicit.gpu.als import AlternatingLeastSquares

    from hybridmf.compat.implicit import als

    # implicit takes int32 and float32 arrays that can be written
    arrays = (train.data.astype(np.float32), train.indices.astype(np.int32), train.indptr.astype(np.int32))
    liked = sp.csr_matrix(arrays, shape=train.shape)

    def objective(trial: Any) -> float:
        weight = trial.suggest_float("unobserved_weight", 3e-3, 1, log=True)
        penalty = trial.suggest_float("regularization", 0.3, 100, log=True)
        liked.data[:] = 1 / weight
        # a seed of 0 would be the clock
        model = AlternatingLeastSquares(FACTORS, regularization=penalty / weight, iterations=10, random_state=seed + 1)
        model.fit(liked, show_progress=False)
        ranked = als.AlternatingLeastSquares(FACTORS)
        ranked.user_factors, ranked.item_factors = model.user_factors.to_numpy(), model.item_factors.to_numpy()
        return value_of(ranked, train, validation)

    return optuna_study(objective, seconds, seed)


def irspack_tune(train: sp.csr_array, validation: sp.csr_array, seconds: float, seed: int, _: str) -> Trace:
    """irspack's own tuner, with pruning; its values are those of its evaluator, which the last line compares."""
    import optuna
    from irspack import Evaluator, IALSRecommender

    logging.getLogger("irspack").setLevel(logging.WARNING)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    evaluator = Evaluator(sp.csr_matrix(validation), cutoff=10, target_metric="ndcg", n_threads=cores())
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=seed))
    started = time.time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        IALSRecommender.tune(
            sp.csr_matrix(train),
            evaluator,
            study=study,
            n_trials=10_000,
            timeout=math.ceil(seconds),
            n_components=FACTORS,
            solver_type="CHOLESKY",
            n_threads=cores(),
            logger=logging.getLogger("irspack"),
        )
    complete = [each for each in study.trials if each.value is not None and each.datetime_complete is not None]
    return [(each.datetime_complete.timestamp() - started, -each.value) for each in complete]


METHODS: dict[str, Callable[..., Trace]] = {
    "hmf.search": ours,
    "hmf.search, the same space": ours_in_the_same_space,
    "Optuna, hybridmf": optuna_hybridmf,
    "random, hybridmf": random_hybridmf,
    "Optuna, implicit": optuna_implicit,
    "Optuna, implicit on a GPU": optuna_implicit_on_a_gpu,
    "irspack's tuner": irspack_tune,
}

LARGER, SAME = "hmf.search", "hmf.search, the same space"
"""The search of the default space, and the one that the others are compared with."""

RANDOM = "random, hybridmf"
"""In place of Optuna where that is not installed."""

OWN_SECONDS = 3.0
"""Of one of our own searches where a budget is shared; the others get the rest evenly."""

NEEDS = {
    "Optuna, hybridmf": ("optuna",),
    "Optuna, implicit": ("optuna", "implicit", "threadpoolctl"),
    "Optuna, implicit on a GPU": ("optuna", "implicit", "rmm"),
    "irspack's tuner": ("optuna", "irspack"),
}
"""Packages of methods."""

ON_CPU = ("Optuna, implicit", "irspack's tuner")
ON_GPU = ("Optuna, implicit on a GPU",)

BUDGET_OF_GPU = 400.0

LEAST_SECONDS = 0.2
"""Of a search: a shorter one would fit nothing."""


def methods_here(wanted: tuple[str, ...], device: str) -> tuple[list[str], dict[str, str]]:
    """The methods to measure, and why the others are left out."""
    left_out = {}
    for name in wanted or METHODS:
        missing = [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
        if missing:
            left_out[name] = f"{', '.join(missing)} not installed"
        elif not wanted and name in ON_CPU and device != "cpu":
            left_out[name] = "runs on the CPU"
        elif not wanted and name in ON_GPU and device == "cpu":
            left_out[name] = "runs on a GPU"
    chosen = [name for name in wanted or METHODS if name not in left_out]
    if not wanted and "Optuna, hybridmf" in chosen:
        chosen.remove(RANDOM)
    return chosen, left_out


def seconds_to(trace: Trace, target: float) -> float | None:
    """Seconds until a value reaches the target; None if none does."""
    return next((seconds for seconds, value in sorted(trace) if value >= target), None)


def find(name: str, data: Path, device: str, seconds: float, seed: int) -> dict[str, Any]:
    """What a search finds on a set, on entries that it has not seen."""
    kind = FOUND[name]
    ratings = stars(data, "ml-1m") if name == "ml-1m stars" else SHOPS[name](data)
    metric = "rmse" if kind == "explicit" else "ndcg@10"
    known, test = hmf.split(ratings, 0.2, random_state=seed)
    found = hmf.search(known, model=kind, budget=seconds, device=device, random_state=seed)
    usual = {"implicit": hmf.ImplicitALS, "explicit": hmf.ExplicitALS}[kind](device=device, random_state=seed)
    models = {
        "popularity": hmf.metrics.PopularityRecommender().fit(known),
        "defaults": usual.fit(known),
        "search": found.best,
    }
    values = {each: hmf.evaluate(model, test, train=known, metrics=metric)[metric] for each, model in models.items()}
    settings = {key: value for key, value in found.best_params.items() if key != "count_unobserved"}
    return {"metric": metric, "trials": len(found.trials), "took": found.seconds, "settings": settings, **values}


def report_found(lines: list[dict[str, Any]]) -> str:
    """The newest line of each set and device."""
    newest = {(line["set"], line["device"]): line for line in lines}
    rows = [
        "| set | metric | popularity | defaults | search | its settings | trials | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, device), line in newest.items():
        settings = ", ".join(f"{key}={value}" for key, value in line["settings"].items()) or "popularity"
        values = " | ".join(f"{line[each]:.4f}" for each in ("popularity", "defaults", "search"))
        shown = name if device == "cpu" else f"{name}, GPU"
        rows.append(f"| {shown} | {line['metric']} | {values} | {settings} | {line['trials']} | {line['took']:.0f} |")
    return "\n".join(rows)


def report() -> str:
    """Median seconds of the lines measured last, and the best values; then what searches find."""
    newest: dict[tuple[str, int, str], dict[str, Any]] = {}
    recorded = [json.loads(text) for text in (RESULTS / "search.jsonl").read_text().splitlines()]
    for line in recorded:
        if "trace" in line:
            where = f"{line.get('threads', line['machine']['cores'])} cores" if line["device"] == "cpu" else "GPU"
            shown = f"{line['set']}, {where}"
            newest[shown, line["seed"], line["method"]] = line
    return "\n".join([comparison(newest), "", report_found([line for line in recorded if "settings" in line])])


def comparison(newest: dict[tuple[str, int, str], dict[str, Any]]) -> str:
    """The table of lines by set, seed and method."""
    rows = [
        "| set | search | best NDCG@10 | median seconds to within 1 % | runs that reach it | times those of hmf.search "
        "in the same space | to within 1 % of the best of all |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(key[0] for key in newest):
        of_set = {key: line for key, line in newest.items() if key[0] == name}
        by_method = {each: [line for key, line in of_set.items() if key[2] == each] for each in METHODS}
        by_method = {method: lines for method, lines in by_method.items() if lines}
        bests = {method: [max((value for _, value in line["trace"]), default=math.nan) for line in lines]
                 for method, lines in by_method.items()}  # fmt: skip
        of_all = np.nanmax([best for each in bests.values() for best in each])
        of_space = np.nanmax([best for method, each in bests.items() for best in each if method != LARGER] or [of_all])
        middles = {method: median_time(lines, WITHIN * of_space) for method, lines in by_method.items()}
        for method, lines in by_method.items():
            middle, ours = middles[method], middles.get(SAME)
            ratio = "" if ours is None or ours.lower or method in (SAME, LARGER) else middle.over(ours)
            best, reached = f"{np.nanmedian(bests[method]):.4f}", f"{middle.reached} of {len(lines)}"
            cells = (name, method, best, middle, reached, ratio, median_time(lines, WITHIN * of_all))
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


@dataclass(frozen=True)
class MedianTime:
    """Median seconds to a target; `lower`: the true one is larger, since runs ended before they reached it."""

    seconds: float
    lower: bool
    reached: int

    def __str__(self) -> str:
        return f"{'> ' if self.lower else ''}{self.seconds:.3g}"

    def over(self, other: MedianTime) -> str:
        """How many times as long."""
        return f"{'> ' if self.lower else ''}{self.seconds / other.seconds:.1f} x"


def median_time(lines: list[dict[str, Any]], target: float) -> MedianTime:
    """The median over runs, of which those that do not reach the target count with the time that they had."""
    found = [seconds_to([tuple(each) for each in line["trace"]], target) for line in lines]
    ended = [line["seconds"] for line, seconds in zip(lines, found, strict=True) if seconds is None]
    reached = [seconds for seconds in found if seconds is not None]
    middle = median(ended + reached)
    return MedianTime(middle, any(seconds <= middle for seconds in ended), len(reached))


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--data", type=click.Path(path_type=Path), help="Folder with lastfm-2k and ml-1m.")
@click.option("--set", "sets", multiple=True, type=click.Choice((*SETS, *FOUND)))
@click.option("--method", "methods", multiple=True, type=click.Choice(list(METHODS)))
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Of each search.")
@click.option("--seeds", type=int, default=5, show_default=True)
@click.option("--budget", type=float, help="Seconds of all searches together.  [default on a GPU: 400]")
@click.option("--first-seed", type=int, default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of hybridmf's searches.")
@click.option("--found", "finds", is_flag=True, help="What a search finds, in place of the comparison.")
@click.option("--report", "reports", is_flag=True)
def main(
    data: Path | None,
    sets: tuple[str, ...],
    methods: tuple[str, ...],
    seconds: float,
    seeds: int,
    budget: float | None,
    first_seed: int,
    device: str,
    finds: bool,
    reports: bool,
) -> None:
    if reports:
        click.echo(report())
        return
    if data is None and (finds or any(name in FILES for name in sets or SETS)):
        raise click.UsageError("give --data FOLDER")
    started, data = time.perf_counter(), data or Path()
    logging.getLogger("hybridmf").setLevel(logging.ERROR)
    if finds:
        for name in sets or FOUND:
            line = find(name, data, device, seconds, 0)
            click.echo(f"{name}: {line}")
            record(
                "search",
                {"bench": "search", "set": name, "device": device, "threads": cores(), "seconds": seconds} | line,
            )
        return
    budget = BUDGET_OF_GPU if budget is None and device != "cpu" else budget
    chosen, left_out = methods_here(methods, device)
    for method, why in left_out.items():
        click.echo(f"{method}: left out, {why}")
    runs = [(name, seed, method) for name in sets or SETS for method in chosen for seed in range(seeds)]
    newest: dict[tuple[str, int, str], dict[str, Any]] = {}
    parts: dict[str, tuple[sp.csr_array, sp.csr_array]] = {}
    for number, (name, seed, method) in enumerate(runs):
        if name not in parts:
            parts = {name: parts_of(name, data)}
            if device != "cpu":
                warm_up(*parts[name], device)
        seed += first_seed
        of_each = seconds
        if budget is not None:
            of_each = min(seconds, share_of(method, budget - (time.perf_counter() - started), runs[number:]))
            if of_each < LEAST_SECONDS:
                click.echo(f"the budget of {budget:g} s leaves out {runs[number:]}")
                break
        try:
            trace = METHODS[method](*parts[name], of_each, seed, device)
        except Exception as error:
            if method not in NEEDS:
                raise
            click.echo(f"{name} seed {seed} {method} failed: {type(error).__name__}: {error}")
            continue
        best = max((value for _, value in trace), default=math.nan)
        click.echo(f"{name} seed {seed} {method}: {len(trace)} values in {of_each:.1f} s, best {best:.4f}")
        line = {
            "threads": cores(),
            "bench": "search",
            "set": name,
            "seed": seed,
            "method": method,
            "seconds": round(of_each, 3),
            "device": device,
            "left_out": left_out,
            "factors": FACTORS,
            "trace": np.round(trace, 5).tolist(),
        }
        record("search", line | gpu_stamp_of(device))
        if trace:
            newest[name, seed, method] = line
    if newest:
        click.echo(comparison(newest))


def share_of(method: str, left: float, runs: list[tuple[str, int, str]]) -> float:
    """Seconds of the next of these runs."""
    own = sum(each in (LARGER, SAME) for _, _, each in runs)
    of_own = min(OWN_SECONDS, left / len(runs))
    return of_own if method in (LARGER, SAME) else (left - own * of_own) / (len(runs) - own)


def warm_up(train: sp.csr_array, validation: sp.csr_array, device: str) -> None:
    """Compile the kernels of all searches."""
    for factors in (FACTORS // 2, FACTORS):
        value_of(hmf.ImplicitALS(factors, iterations=1, device=device, random_state=0).fit(train), train, validation)


if __name__ == "__main__":
    main()
