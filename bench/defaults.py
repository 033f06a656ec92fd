"""The defaults of `ImplicitALS` compared with popularity and a small search, on real sets.

    python bench/defaults.py --data FOLDER            MovieLens 100K and 1M and Last.fm 2K in ml-100k, ml-1m and
                                                      lastfm-2k of FOLDER: 10 minutes on one core
    python bench/defaults.py --data FOLDER --set "ml-100k likes" --trials 5 --factors 16
    python bench/defaults.py --report                 the tables of docs/tuning.md from the lines measured last

A fifth of the entries is the test part, a tenth of the rest the validation part; fits see neither. The search draws
settings from a fixed seed and keeps the one with the best NDCG@10 on the validation part. Recall@20 and NDCG@10 are
those of the test part, among the items that a user has neither in the training nor in the validation part.

The path is the default with other values of `regularization`. Candidates are settings that could be defaults, at
several ranks; c is the mean confidence 1 + alpha |r| of the entries. The search draws alpha, the unobserved weight, nu
(as Rendle et al. 2022) and lambda; on sets without values alpha is 0, because it is redundant there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from common import RESULTS, record

import hybridmf as hmf

Row = dict[str, Any]

PATH = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Values of `regularization`, that of the default among them, with all else as by default."""

RANKS = (16, 64, 128)
"""Ranks at which candidates are compared."""

METRICS = ("recall@20", "ndcg@10")


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


SETS: dict[str, Any] = {
    "ml-100k likes": lambda folder: stars(folder, "ml-100k").binarize(4),
    "ml-1m likes": lambda folder: stars(folder, "ml-1m").binarize(4),
    "ml-1m likes, a tenth": lambda folder: thinned(stars(folder, "ml-1m").binarize(4), 0.1),
    "ml-100k stars": lambda folder: stars(folder, "ml-100k"),
    "lastfm-2k heard": lambda folder: plays(folder).binarize(),
    "lastfm-2k log plays": lambda folder: plays(folder).log_weight(),
    "lastfm-2k plays": plays,
}


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


# ---------------------------------------------------------------------------------------------------------- measures


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


def candidates(parts: Parts) -> dict[str, Row]:
    """Settings that could be defaults."""
    confidence = 1 + float(np.abs(parts.train.user_items.data).mean())
    scaled = {"unobserved_weight": 0.1, "regularization_scaling": "count", "count_unobserved": True}
    return {
        "default": {},
        "lambda = 10": {"regularization": 10.0},
        "lambda = 5 c": {"regularization": 5 * confidence},
        "scaled, lambda = c / 100": scaled | {"regularization": confidence / 100},
    }


def measured(parts: Parts, factors: int, iterations: int, trials: int) -> Row:
    """Popularity, the path, the candidates and the search."""
    popular = hmf.metrics.PopularityRecommender().fit(parts.train)
    return {
        "popularity": parts.measures(popular),
        "path": [fitted(parts, {"regularization": value}, factors, iterations) for value in PATH],
        "candidates": [
            {"name": name, "factors": rank} | fitted(parts, options, rank, iterations)
            for rank in RANKS
            for name, options in candidates(parts).items()
        ],
        "search": [fitted(parts, options, factors, iterations) for options in draws(parts, trials)],
    }


# ------------------------------------------------------------------------------------------------------------ report


def settings_of(row: Row) -> str:
    """The parameters of a row that differ from the defaults."""
    return ", ".join(f"{name}={value}" for name, value in row.items() if name not in (*METRICS, "validation"))


def report(lines: dict[str, Row]) -> None:
    """Print the tables."""
    print("Recall@20 / NDCG@10\n\n| set | popularity | default | best of the search | its settings |")
    print("| --- " * 5 + "|")
    for name, line in lines.items():
        best = max(line["search"], key=lambda row: row["validation"])
        rows = (line["popularity"], line["path"][0], best)
        shown = [f"{row['recall@20']:.3f} / {row['ndcg@10']:.3f}" for row in rows]
        print(f"| {name} | " + " | ".join([*shown, settings_of(best)]) + " |")
    print("\nNDCG@10 by `regularization`\n\n| set | " + " | ".join(f"{value:g}" for value in PATH) + " |")
    print("| --- " * (len(PATH) + 1) + "|")
    for name, line in lines.items():
        print(f"| {name} | " + " | ".join(f"{row['ndcg@10']:.3f}" for row in line["path"]) + " |")
    print("\nNDCG@10 of candidates at each rank\n")
    names = list(dict.fromkeys(row["name"] for line in lines.values() for row in line["candidates"]))
    print("| set | " + " | ".join(names) + " |")
    print("| --- " * (len(names) + 1) + "|")
    for set_name, line in lines.items():
        cells = [
            ", ".join(f"{row['ndcg@10']:.3f}" for row in line["candidates"] if row["name"] == name) for name in names
        ]
        print(f"| {set_name} | " + " | ".join(cells) + " |")


def newest() -> dict[str, Row]:
    """The line of each set that was measured last."""
    found = {line["set"]: line for line in map(json.loads, (RESULTS / "defaults.jsonl").read_text().splitlines())}
    return {name: found[name] for name in SETS if name in found}


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with ml-100k, ml-1m and lastfm-2k.")
@click.option("--set", "names", multiple=True, type=click.Choice(tuple(SETS)), help="Only these sets.")
@click.option("--factors", default=64, show_default=True)
@click.option("--iterations", default=8, show_default=True)
@click.option("--trials", default=20, show_default=True, help="Settings of the search.")
@click.option("--report", "only_report", is_flag=True, help="Measure nothing.")
def main(
    data: Path | None, names: tuple[str, ...], factors: int, iterations: int, trials: int, only_report: bool
) -> None:
    """Measure and print."""
    for name in () if only_report else names or tuple(SETS):
        if data is None:
            raise click.UsageError(f"{name} needs --data FOLDER")
        start = time.process_time()
        parts = Parts(SETS[name](data))
        rows = measured(parts, factors, iterations, trials)
        shape = [*parts.train.user_items.shape, parts.train.user_items.nnz]
        line = {"benchmark": "defaults", "set": name, "shape": shape, "factors": factors, "iterations": iterations}
        record("defaults", line | {"cpu_seconds": round(time.process_time() - start, 1)} | rows)
        print(name, flush=True)
    report(newest())


if __name__ == "__main__":
    main()
