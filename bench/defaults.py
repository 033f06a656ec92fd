"""The defaults of all estimators, compared with simple baselines and a small search, on real sets and synthetic shapes.

    python bench/defaults.py --data FOLDER            MovieLens 100K and 1M and Last.fm 2K in ml-100k, ml-1m and
                                                      lastfm-2k of FOLDER, synthetic shapes: 2 minutes on one core
    python bench/defaults.py --data FOLDER --set "ml-100k likes" --trials 5 --factors 16
    python bench/defaults.py --report                 the tables of docs/tuning.md from the lines measured last

Implicit feedback: a fifth of the entries is the test part, a tenth of the rest the validation part; fits see neither.
The search draws settings from a fixed seed and keeps the one with the best NDCG@10 on the validation part. Recall@20
and NDCG@10 are those of the test part, among the items that a user has neither in the training nor in the validation
part. The path is ``alpha=0, unobserved_weight=0.1`` with values of `regularization`. The search draws alpha, the
unobserved weight, nu (as Rendle et al. 2022) and lambda; on sets without values alpha is 0, because it is redundant
there.

Explicit feedback: RMSE on a held-out tenth, the mean over splits. lambda is a multiple of the standard deviation times
``144 ** (1 - nu)``, with the multiples `MULTIPLES` and nu 1 or 0.5. "Damped means" is the mean plus biases of users and
items, each damped by 5 ratings.

Leave one out: for each set, the constants that are best on the other sets (the least sum of logarithms of measures,
each relative to the best of its set), and their result on the set left out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import biases
import click
import numpy as np
import scipy.sparse as sp
from common import RESULTS, record
from common import shop as plain_shop

import hybridmf as hmf
from hybridmf.core.objective import PerSide, default_lambdas

Row = dict[str, Any]

PATH = (1.0, 3.0, 5.0, 7.0, 10.0, 14.0, 20.0)
"""Values of `regularization`, the default among them, with the other weights as by default."""

CHOICES = (5.0, 7.0, 10.0)
"""Values from which leaving one out chooses."""

RANKS = (16, 64, 128)
"""Ranks at which the defaults are compared."""

METRICS = ("recall@20", "ndcg@10")

MULTIPLES = (0.05, 0.07, 0.1, 0.12, 0.15, 0.2)
"""Values of lambda in standard deviations of the ratings for nu = 1; 12 times that for nu = 0.5."""

SPLITS = 2


# ------------------------------------------------------------------------------------------------------------- data


def stars(folder: Path, name: str) -> hmf.Ratings:
    """Ratings of a MovieLens set."""
    file = "u.data.gz" if name == "ml-100k" else "ratings_no_timestamps.dat.gz"
    return hmf.Ratings.from_file(folder / name / file)


def thinned(ratings: hmf.Ratings, share: float) -> hmf.Ratings:
    """A random share of the entries."""
    return hmf.split(ratings, test_size=share, random_state=7)[1]


def plays(folder: Path) -> hmf.Ratings:
    """Play counts of Last.fm 2K."""
    return hmf.Ratings.from_file(folder / "lastfm-2k" / "user_artists.dat.gz")


def shop(users: int, items: int, entries: int, *, tastes: float, zipf: float, groups: int) -> hmf.Ratings:
    """Purchases of a shop, with minutes of use as values.

    A share `tastes` of a user's entries is in 3 groups of items that the user likes, the others are anywhere; within
    both, popularity follows Zipf's law.
    """
    rng = np.random.default_rng(0)
    activity, popularity = rng.lognormal(0, 0.9, users), rng.permutation((np.arange(items) + 5.0) ** -zipf)
    drawn = int(1.3 * entries)  # some pairs are drawn twice
    rows = rng.choice(users, drawn, p=activity / activity.sum())
    columns = rng.choice(items, drawn, p=popularity / popularity.sum())
    wanted = rng.integers(groups, size=(users, 3))[rows, rng.integers(3, size=drawn)]
    wanted[rng.random(drawn) >= tastes] = -1
    for group in range(groups):
        (those,) = np.nonzero(wanted == group)
        own = np.arange(group, items, groups)
        columns[those] = rng.choice(own, len(those), p=popularity[own] / popularity[own].sum())
    pairs = rng.permutation(np.unique(rows.astype(np.int64) * items + columns))[:entries]
    minutes = np.ceil(rng.lognormal(3, 1.5, len(pairs))).astype(np.float32)
    return hmf.Ratings.from_coo(pairs // items, pairs % items, minutes, shape=(users, items))


SETS: dict[str, Callable[[Path], hmf.Ratings]] = {
    "ml-100k likes": lambda folder: stars(folder, "ml-100k").binarize(4),
    "ml-1m likes": lambda folder: stars(folder, "ml-1m").binarize(4),
    "ml-1m likes, a third": lambda folder: thinned(stars(folder, "ml-1m").binarize(4), 0.33),
    "ml-1m likes, a tenth": lambda folder: thinned(stars(folder, "ml-1m").binarize(4), 0.1),
    "ml-100k stars": lambda folder: stars(folder, "ml-100k"),
    "lastfm-2k heard": lambda folder: plays(folder).binarize(),
    "lastfm-2k log plays": lambda folder: plays(folder).log_weight(),
    "lastfm-2k plays": plays,
    "dense shop": lambda _: shop(4_000, 1_200, 100_000, tastes=0.6, zipf=1.3, groups=20),
    "sparse shop": lambda _: shop(12_000, 7_000, 100_000, tastes=0.8, zipf=0.8, groups=30),
    "sparse shop, no tastes": lambda _: hmf.Ratings.from_matrix(plain_shop(12_000, 7_000, 100_000)),
}
"""Implicit feedback."""


def half_stars(folder: Path) -> sp.csr_array:
    """As many users and ratings as FilmTrust, on its scale of 0.5 to 4."""
    matrix = biases.filmtrust_like(folder)
    matrix.data = np.clip(np.rint(2 * matrix.data) / 2, 0.5, 4).astype(np.float32)
    return matrix


def few_a_user(folder: Path, count: int = 20) -> sp.csr_array:
    """MovieLens 1M with so many ratings of each user; a tenth is held out, so that 18 remain, as in goodbooks."""
    rows = biases.triplets(folder, "ml-1m")
    rows = rows[np.random.default_rng(7).permutation(len(rows))]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    first = np.searchsorted(rows[:, 0], rows[:, 0])
    return biases.compact(rows[np.arange(len(rows)) - first < count])


def jokes(users: int = 1_500, items: int = 100) -> sp.csr_array:
    """Ratings of -10 to 10 with the density and the spread of Jester: biases, 4 tastes and noise."""
    rng = np.random.default_rng(0)
    read = np.clip(1.1 * rng.beta(1.2, 1, size=items), 0.15, 1)
    rows, columns = np.nonzero(rng.random((users, items)) < 0.75 * read)
    tastes = (rng.normal(size=(users, 4))[rows] * rng.normal(size=(items, 4))[columns]).sum(axis=1)
    bias = rng.normal(0, 2.4, users)[rows] + rng.normal(0, 1.5, items)[columns]
    values = np.clip(0.9 + bias + 1.15 * tastes + rng.normal(0, 3.6, len(rows)), -10, 10)
    return sp.csr_array((values.astype(np.float32), (rows, columns)), shape=(users, items))


EXPLICIT_SETS: dict[str, Callable[[Path], sp.csr_array]] = {
    "ml-100k": biases.SETS["ml-100k"],
    "ml-1m": biases.SETS["ml-1m"],
    "610 users of ml-1m": biases.small_like,
    "0.5 to 4, sparse": half_stars,
    "18 ratings a user": few_a_user,
    "-10 to 10, dense": lambda _: jokes(),
}


# -------------------------------------------------------------------------------------------------- implicit feedback


class Parts:
    """Training, validation and test part of a set."""

    def __init__(self, ratings: hmf.Ratings) -> None:
        self.known, self.test = hmf.split(ratings, test_size=0.2, random_state=0)
        self.train, self.validation = hmf.split(self.known, test_size=0.1, random_state=1)
        self.binary = bool(np.all(ratings.user_items.data == 1))

    def measures(self, model: Any) -> Row:
        """Measures of the test part, and the measure of the validation part that selects."""
        test = hmf.evaluate(model, self.test, train=self.known, metrics=METRICS)
        chosen_by = hmf.evaluate(model, self.validation, train=self.train, metrics="ndcg@10")["ndcg@10"]
        return {name: round(test[name], 4) for name in METRICS} | {"validation": round(chosen_by, 4)}


def fitted(parts: Parts, options: Row, factors: int, iterations: int) -> Row:
    """One fit on one thread, and its measures."""
    model = hmf.ImplicitALS(
        factors=factors, iterations=iterations, device="cpu", num_threads=1, random_state=0, **options
    )
    return options | parts.measures(model.fit(parts.train))


def draws(parts: Parts, trials: int) -> Iterator[Row]:
    """Settings of the search."""
    rng = np.random.default_rng(0)
    users, items = parts.train.user_items.shape
    nnz = parts.train.user_items.nnz
    for _ in range(trials):
        alpha, weight, penalty = 10 ** rng.uniform((-2, -2.5, -2), (1, 0, 2))
        nu = float(rng.choice((0.0, 0.5, 1.0)))
        # s of a row with as many entries as the mean: penalties of all nu are alike in size
        usual = ((nnz / users + weight * items) * (nnz / items + weight * users)) ** (nu / 2)
        alpha = 0.0 if parts.binary else alpha
        options = {"regularization": penalty / usual, "unobserved_weight": weight, "alpha": alpha}
        options = {name: float(f"{value:.2g}") for name, value in options.items()}
        yield options | ({"regularization_scaling": nu, "count_unobserved": True} if nu else {})


def measured(parts: Parts, factors: int, iterations: int, trials: int) -> Row:
    """Popularity, the defaults and the former ones at each rank, the path and the search."""
    popular = hmf.metrics.PopularityRecommender().fit(parts.train)
    former = {"regularization": 0.01, "alpha": 1.0, "unobserved_weight": 1.0}
    weights = {"alpha": 0.0, "unobserved_weight": 0.1}
    return {
        "popularity": parts.measures(popular),
        "default": {str(rank): fitted(parts, {}, rank, iterations) for rank in RANKS},
        "former": {str(rank): fitted(parts, former, rank, iterations) for rank in RANKS},
        "path": [fitted(parts, weights | {"regularization": value}, factors, iterations) for value in PATH],
        "search": [fitted(parts, options, factors, iterations) for options in draws(parts, trials)],
    }


# -------------------------------------------------------------------------------------------------- explicit feedback


def errors(matrix: sp.csr_array) -> Row:
    """RMSE of the baseline, the defaults and the grid, means over splits."""
    runs: dict[str, list[float]] = {}
    for seed in range(SPLITS):
        train, test = hmf.split(matrix, test_size=0.1, random_state=seed)
        entries, spread = test.tocoo(), float(train.data.std(dtype=np.float64))

        def note(name: str, model: Any, train: Any = train, test: Any = test, seed: int = seed) -> None:
            model.set_params(device="cpu", num_threads=1, random_state=seed)
            runs.setdefault(name, []).append(-model.fit(train).score(test))

        mean, users, items = biases.damped_baseline(train)
        means = mean + users[entries.row] + items[entries.col]
        runs.setdefault("damped means", []).append(hmf.metrics.rmse(entries.data, means))
        for cls in (hmf.ExplicitALS, hmf.SGD, hmf.CCD):
            note(cls.__name__, cls())
        note("ExplicitALS without biases", hmf.ExplicitALS(biases=False))
        note("former ExplicitALS", hmf.ExplicitALS(regularization=0.05, regularization_scaling="count"))
        note("former SGD", hmf.SGD(regularization=0.05, biases=False))
        for multiple in MULTIPLES:
            for nu in (1.0, 0.5):
                lambda_ = default_lambdas(PerSide(nu, nu), spread, multiple).user
                model = hmf.ExplicitALS(regularization=lambda_, regularization_scaling=nu)
                note(f"ALS {nu:g} {multiple:g}", model)
            note(f"plain 1 {multiple:g}", hmf.ExplicitALS(regularization=multiple * spread, biases=False))
            note(f"SGD 1 {multiple:g}", hmf.SGD(regularization=multiple * spread))
    return {name: round(float(np.mean(values)), 4) for name, values in runs.items()}


# ------------------------------------------------------------------------------------------------------------ report


def left_one_out(table: dict[str, dict[Any, float]]) -> dict[str, Any]:
    """For each set, the column with the least sum of logarithms over the other sets; columns hold costs."""
    logs = {name: {column: math.log(cost / min(row.values())) for column, cost in row.items()}
            for name, row in table.items()}  # fmt: skip
    return {
        name: min(row, key=lambda column: sum(logs[other][column] for other in table if other != name))
        for name, row in table.items()
    }


def settings_of(row: Row) -> str:
    """The parameters of a row that differ from the defaults."""
    return ", ".join(f"{name}={value}" for name, value in row.items() if name not in (*METRICS, "validation"))


def table(*header: str) -> None:
    """Print the head of a table."""
    print("\n| " + " | ".join(header) + " |\n" + "| --- " * len(header) + "|")


def report_implicit(lines: dict[str, Row]) -> None:
    """Print the tables of implicit feedback."""
    print("\nRecall@20 / NDCG@10 of implicit feedback")
    table("set", "popularity", "former default", "default", "best of the search", "its settings")
    for name, line in lines.items():
        best, rank = max(line["search"], key=lambda row: row["validation"]), str(line["factors"])
        rows = (line["popularity"], line["former"][rank], line["default"][rank], best)
        shown = [f"{row['recall@20']:.3f} / {row['ndcg@10']:.3f}" for row in rows]
        print(f"| {name} | " + " | ".join([*shown, settings_of(best)]) + " |")
    costs = {name: {row["regularization"]: 1 / row["ndcg@10"] for row in line["path"] if row["regularization"]
                    in CHOICES} for name, line in lines.items()}  # fmt: skip
    chosen = left_one_out(costs)
    print("\nNDCG@10 by `regularization`, with alpha 0 and unobserved weight 0.1; and the value that the others choose")
    table("set", *(f"{value:g}" for value in PATH), "chosen")
    for name, line in lines.items():
        print(f"| {name} | " + " | ".join(f"{row['ndcg@10']:.3f}" for row in line["path"]) + f" | {chosen[name]:g} |")
    print("\nNDCG@10 at 16, 64 and 128 factors")
    table("set", "former default", "default")
    for name, line in lines.items():
        cells = [
            ", ".join(f"{line[kind][str(rank)]['ndcg@10']:.3f}" for rank in RANKS) for kind in ("former", "default")
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def report_explicit(lines: dict[str, Row]) -> None:
    """Print the tables of explicit feedback."""
    grids = {
        kind: {name: {key: rmse for key, rmse in line["rmse"].items() if key.startswith(f"{kind} ")}
               for name, line in lines.items()} for kind in ("ALS", "plain", "SGD")
    }  # fmt: skip
    chosen = {kind: left_one_out(grid) for kind, grid in grids.items()}
    columns = {
        "ALS": ("damped means", "former ExplicitALS", "ExplicitALS", "CCD"),
        "plain": ("ExplicitALS without biases",),
        "SGD": ("former SGD", "SGD"),
    }
    print("\nRMSE of explicit feedback; best of the grid, and what the other sets choose (nu, multiple): its RMSE")
    table("set", *(name for names in columns.values() for name in (*names, "best of the grid", "chosen")))
    for name, line in lines.items():
        cells = []
        for kind, names in columns.items():
            grid, choice = grids[kind][name], chosen[kind][name]
            cells += [f"{line['rmse'][column]:.4f}" for column in names]
            cells += [f"{min(grid.values()):.4f}", f"{choice.split(' ', 1)[1]}: {grid[choice]:.4f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


def newest(sets: dict[str, Any]) -> dict[str, Row]:
    """The line of each set that was measured last."""
    found = {line["set"]: line for line in map(json.loads, (RESULTS / "defaults.jsonl").read_text().splitlines())}
    return {name: found[name] for name in sets if name in found}


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with ml-100k, ml-1m and lastfm-2k.")
@click.option("--set", "names", multiple=True, type=click.Choice((*EXPLICIT_SETS, *SETS)), help="Only these sets.")
@click.option("--factors", default=64, show_default=True, help="Of the path and the search.")
@click.option("--iterations", default=8, show_default=True, help="Of implicit models.")
@click.option("--trials", default=15, show_default=True, help="Settings of the search.")
@click.option("--report", "only_report", is_flag=True, help="Measure nothing.")
def main(
    data: Path | None, names: tuple[str, ...], factors: int, iterations: int, trials: int, only_report: bool
) -> None:
    """Measure and print."""
    for name in () if only_report else names or (*EXPLICIT_SETS, *SETS):
        if data is None:
            raise click.UsageError(f"{name} needs --data FOLDER")
        start = time.process_time()
        line: Row = {"benchmark": "defaults", "set": name}
        if name in EXPLICIT_SETS:
            matrix = EXPLICIT_SETS[name](data)
            line |= {"shape": [*matrix.shape, matrix.nnz], "rmse": errors(matrix)}
        else:
            parts = Parts(SETS[name](data))
            line |= {"shape": [*parts.train.user_items.shape, parts.train.user_items.nnz]}
            line |= {"factors": factors, "iterations": iterations} | measured(parts, factors, iterations, trials)
        record("defaults", line | {"cpu_seconds": round(time.process_time() - start, 1)})
        print(name, flush=True)
    report_implicit(newest(SETS))
    report_explicit(newest(EXPLICIT_SETS))


if __name__ == "__main__":
    main()
