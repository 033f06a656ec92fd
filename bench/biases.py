"""Gains of biases, their penalty and clipping: RMSE on held-out ratings, each method tuned in the same way.

    python bench/biases.py --data FOLDER              MovieLens 100K and 1M in FOLDER/ml-100k and FOLDER/ml-1m,
                                                      sparse subsamples of 1M, synthetic shapes: 30 minutes on one core
    python bench/biases.py --set filmtrust-like       one of them
    python bench/biases.py --report                   the tables of docs/choosing.md from the lines measured last

A tenth of the entries is held out, and each method uses its best rank and lambda on these entries. This bias is the
same for all methods and smaller than the differences shown. "baseline" is mu + b_u + b_i with both damped by 5 entries,
and "residuals" is `ExplicitALS` without biases on what the baseline leaves. Ranking counts a held-out rating of 4 or 5
as relevant.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from common import RESULTS, record

import hybridmf as hmf
from hybridmf import metrics
from hybridmf.datasets import synthetic


@dataclass(frozen=True)
class Grid:
    """What is tried: ranks; lambdas for each nu, the power of a row's entries that multiplies it; lambda_b / lambda."""

    ranks: tuple[int, ...]
    lambdas: dict[float, tuple[float, ...]]
    rules: tuple[float, ...]

    def settings(self) -> Iterator[tuple[float, int, float]]:
        """(nu, rank, lambda), one after the other."""
        for nu, lambdas in self.lambdas.items():
            for rank, value in product(self.ranks, lambdas):
                yield nu, rank, value


GRID = Grid(
    (8, 16, 64),
    {
        1.0: (0.065, 0.1, 0.15, 0.25, 0.4),
        0.5: (0.6, 1.0, 1.5, 2.5, 4.0),
        0.0: (6.0, 12.0, 20.0, 32.0),
    },
    (0.0, 0.5, 1.0, 2.0),
)
NARROW = Grid((16, 24, 64), {1.0: (0.05, 0.065, 0.08), 0.5: (0.9, 1.1), 0.0: (12.0, 16.0)}, (0.0, 1.0))
"""For the set whose fits take seconds."""

RANKING = ((0.0, 24.0, 20.0), (0.0, 30.0, 30.0), (0.25, 6.5, 10.0))
"""(nu, lambda, lambda_b / lambda) that favour the top of the list over RMSE."""

DAMPING = 5.0
ITERATIONS = 15
RELEVANT = 4.0

Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- data


def triplets(folder: Path, name: str) -> np.ndarray:
    """(user, item, rating) rows of a MovieLens set; int64, shape (nnz, 3)."""
    if name == "ml-100k":
        return np.loadtxt(folder / "ml-100k" / "u.data.gz", dtype=np.int64)[:, :3]
    text = gzip.decompress((folder / "ml-1m" / "ratings_no_timestamps.dat.gz").read_bytes()).decode()
    return np.array(text.replace("::", " ").split(), dtype=np.int64).reshape(-1, 3)


def some_users(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of so many users."""
    chosen = rng.choice(np.unique(rows[:, 0]), count, replace=False)
    return rows[np.isin(rows[:, 0], chosen)]


def compact(rows: np.ndarray) -> sp.csr_array:
    """The matrix of the users and items that occur."""
    (users, items) = (np.unique(rows[:, axis], return_inverse=True)[1] for axis in (0, 1))
    return sp.csr_array((rows[:, 2].astype(np.float32), (users, items)))


def small_like(folder: Path) -> sp.csr_array:
    """As many users and ratings as MovieLens-small."""
    return compact(some_users(triplets(folder, "ml-1m"), 610, np.random.default_rng(7)))


def filmtrust_like(folder: Path) -> sp.csr_array:
    """As many users and ratings as FilmTrust, on its scale of 0.8 to 4."""
    rng = np.random.default_rng(7)
    rows = some_users(triplets(folder, "ml-1m"), 1508, rng)
    matrix = compact(rows[rng.choice(len(rows), 35_500, replace=False)])
    matrix.data *= np.float32(0.8)
    return matrix


SETS: dict[str, Any] = {
    "ml-100k": lambda folder: compact(triplets(folder, "ml-100k")),
    "ml-1m": lambda folder: compact(triplets(folder, "ml-1m")),
    "ml-small-like": small_like,
    "filmtrust-like": filmtrust_like,
    "epinions x 0.1": lambda _: synthetic("epinions", scale=0.1).user_items,
    "ml-20m x 0.04": lambda _: synthetic("ml-20m", scale=0.04).user_items,
}


# ---------------------------------------------------------------------------------------------------------- methods


class HeldOut:
    """Training and held-out entries of a set, and the measures of methods."""

    def __init__(self, matrix: sp.csr_array) -> None:
        self.train, self.test = hmf.split(matrix, test_size=0.1, random_state=0)
        entries = self.test.tocoo()
        self.users, self.items, self.ratings = entries.row, entries.col, entries.data.astype(np.float64)
        self.range = (float(self.train.data.min()), float(self.train.data.max()))

    def errors(self, predicted: np.ndarray) -> Row:
        """RMSE with predictions clipped to the training range, and without."""
        clipped = np.clip(predicted, *self.range)
        return {"rmse": metrics.rmse(self.ratings, clipped), "unclipped": metrics.rmse(self.ratings, predicted)}

    def ndcg(self, model: Any) -> float:
        """NDCG@10 with good ratings as relevant."""
        found = hmf.evaluate(
            model, self.test, train=self.train, metrics=("ndcg@10",), relevance_threshold=min(RELEVANT, self.range[1])
        )
        return float(found["ndcg@10"])


def damped_baseline(matrix: sp.csr_array) -> tuple[float, np.ndarray, np.ndarray]:
    """mu, b_u and b_i: sums of the residuals of the others, divided by the number of entries plus five."""
    users, items = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), matrix.indices
    mean, user_bias, item_bias = float(matrix.data.mean()), np.zeros(matrix.shape[0]), np.zeros(matrix.shape[1])
    for _ in range(5):
        for own, other, rows, columns in (
            (item_bias, user_bias, items, users),
            (user_bias, item_bias, users, items),
        ):
            left = matrix.data - mean - other[columns]
            own[:] = np.bincount(rows, left, len(own)) / (np.bincount(rows, minlength=len(own)) + DAMPING)
    return mean, user_bias, item_bias


def als(nu: float, **options: Any) -> Any:
    """`ExplicitALS` on one thread."""
    return hmf.ExplicitALS(
        regularization_scaling=nu, iterations=ITERATIONS, device="cpu", num_threads=1, random_state=0, **options
    )


def fitted(data: HeldOut, method: str, nu: float, options: dict[str, Any], *, rank: bool) -> Row:
    """One fit of `ExplicitALS` and its measures."""
    model = als(nu, **options).fit(data.train)
    predicted = model.predict(data.users, data.items, clip=False)
    row = {"method": method, "nu": nu, **options, **data.errors(predicted)}
    return row | ({"ndcg": data.ndcg(model)} if rank else {})


def baseline_and_residuals(data: HeldOut, grid: Grid) -> Iterator[Row]:
    """The damped baseline, and ALS on its residuals."""
    mean, user_bias, item_bias = damped_baseline(data.train)
    base = mean + user_bias[data.users] + item_bias[data.items]
    yield {"method": "baseline", **data.errors(base)}
    left = data.train.copy()
    owners = np.repeat(np.arange(left.shape[0]), np.diff(left.indptr))
    left.data -= (mean + user_bias[owners] + item_bias[left.indices]).astype(np.float32)
    for nu, factors, value in grid.settings():
        options = {"factors": factors, "regularization": value, "biases": False}
        tastes = als(nu, **options).fit(left).predict(data.users, data.items, clip=False)
        yield {"method": "residuals", "nu": nu, **options, **data.errors(base + tastes)}


def measured(data: HeldOut, grid: Grid, *, rank: bool) -> Iterator[Row]:
    """All methods over their settings."""
    for biases in (False, True):
        yield fitted(data, "defaults", 1.0, {"biases": biases, "regularization": 0.05}, rank=False)
    yield from baseline_and_residuals(data, grid)
    for nu, factors, value in grid.settings():
        options = {"factors": factors, "regularization": value}
        yield fitted(data, "plain", nu, options | {"biases": False}, rank=False)
        for rule in grid.rules:
            chosen = {"biases": True, "bias_regularization": rule * value}
            yield fitted(data, f"biases, {rule:g} lambda", nu, options | chosen, rank=rank)
    if rank:
        yield {"method": "popularity", "ndcg": data.ndcg(metrics.PopularityRecommender().fit(data.train))}
        for nu, value, rule in RANKING:
            chosen = {"factors": 32, "regularization": value, "biases": True, "bias_regularization": rule * value}
            yield fitted(data, "ranking", nu, chosen, rank=True)


# ----------------------------------------------------------------------------------------------------------- report


def best(rows: list[Row], method: str, nu: float) -> Row | None:
    """The row of a method with the least RMSE; the baseline has no nu."""
    found = [row for row in rows if row["method"] == method and row.get("nu", nu) == nu]
    return min(found, key=lambda row: row["rmse"], default=None)


def shown(row: Row | None) -> str:
    """RMSE, with rank and lambda."""
    if row is None:
        return "-"
    where = f" ({row['factors']}, {row['regularization']:g})" if "factors" in row else ""
    return f"{row['rmse']:.4f}{where}"


def report(lines: dict[str, dict[str, Any]]) -> None:
    """Print the tables."""
    methods = ["baseline", "residuals", "plain", *(f"biases, {rule:g} lambda" for rule in GRID.rules)]
    for nu in GRID.lambdas:
        print(f"\nRMSE, clipped (rank, lambda); nu = {nu:g}\n")
        print("| set | " + " | ".join(methods) + " |")
        print("|---" * (len(methods) + 1) + "|")
        for name, line in lines.items():
            cells = [shown(best(line["rows"], method, nu)) for method in methods]
            print(f"| {name} | " + " | ".join(cells) + " |")
    print("\n| set | defaults, clipped | unclipped | biases, clipped | unclipped |\n|---|---|---|---|---|")
    for name, line in lines.items():
        rows = [row for row in line["rows"] if row["method"] == "defaults"]
        cells = [f"{row[key]:.4f}" for row in rows for key in ("rmse", "unclipped")]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name, line in lines.items():
        ranked = sorted((row for row in line["rows"] if "ndcg" in row), key=lambda row: -row["ndcg"])
        for row in ranked[:8] + [row for row in ranked if row["method"] == "popularity"]:
            print(name, {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})


def newest() -> dict[str, dict[str, Any]]:
    """The line of each set that was measured last."""
    found = {line["set"]: line for line in map(json.loads, (RESULTS / "biases.jsonl").read_text().splitlines())}
    return {name: found[name] for name in SETS if name in found}


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with ml-100k and ml-1m.")
@click.option("--set", "names", multiple=True, type=click.Choice(tuple(SETS)), help="Only these sets.")
@click.option("--report", "only_report", is_flag=True, help="Measure nothing.")
def main(data: Path | None, names: tuple[str, ...], only_report: bool) -> None:
    """Measure and print."""
    for name in () if only_report else names or tuple(SETS):
        synthetic_set = " x " in name
        if data is None and not synthetic_set:
            raise click.UsageError(f"{name} needs --data FOLDER")
        held_out = HeldOut(SETS[name](data))
        rows = [
            {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
            for row in measured(held_out, NARROW if name == "ml-1m" else GRID, rank=name == "ml-1m")
        ]
        shape = [*held_out.train.shape, held_out.train.nnz]
        record("biases", {"benchmark": "biases", "set": name, "shape": shape, "iterations": ITERATIONS, "rows": rows})
        print(name, flush=True)
    report(newest())


if __name__ == "__main__":
    main()
