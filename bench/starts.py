"""Initial factors of ALS, SGD and CCD++: objective and held-out quality after each iteration, start by start.

    python bench/starts.py --data FOLDER                     all models; real sets in FOLDER/ml-100k, ml-1m and
                                                             lastfm-2k, and synthetic shapes: 30 minutes on one core
    python bench/starts.py --model "explicit, biases" --set "netflix x 0.04"
    python bench/starts.py --report                          the table of docs/methods.md from the lines measured last

A tenth of the entries is held out. "normal" is the absolute value of normal numbers; "x root of degree" makes the
length of a row proportional to the root of its number of entries, with the same mean square. ALS draws the users only.
Times depend on the iterations alone, so none is measured.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from biases import compact, triplets
from common import RESULTS, record

import hybridmf as hmf
from hybridmf.core.validate import as_csr
from hybridmf.datasets import synthetic
from hybridmf.model.learned import scale_of

FACTORS = 32
ITERATIONS = 16
SEEDS = (0, 1)
RELEVANT = 4.0
SHAPES = ("ml-20m x 0.08", "netflix x 0.04", "yahoo-songs x 0.06")

STARTS: dict[str, tuple[str, float, bool]] = {
    "normal": ("normal", 1.0, False),
    "nonnegative": ("nonnegative", 1.0, False),
    "nonnegative, x 0.1": ("nonnegative", 0.1, False),
    "nonnegative, x root of degree": ("nonnegative", 1.0, True),
    "signed": ("signed", 1.0, False),
    "signed, x 0.1": ("signed", 0.1, False),
    "signed, x root of degree": ("signed", 1.0, True),
}
"""Distribution, length relative to 1 (implicit) or to half the root of the ratings' scale, and whether by degree."""

MODELS: dict[str, Callable[..., Any]] = {
    "implicit": lambda **options: hmf.ImplicitALS(regularization=5.0, **options),
    "explicit": lambda **options: hmf.ExplicitALS(regularization=0.05, biases=False, **options),
    "explicit, biases": lambda **options: hmf.ExplicitALS(regularization=0.05, **options),
    "SGD": lambda **options: hmf.SGD(regularization=0.05, biases=False, **options),
    "CCD": lambda **options: hmf.CCD(regularization=0.05, biases=False, **options),
}

VARIANTS: dict[str, dict[str, Any]] = {"": {}, "balance": {"balance": True}, "cg": {"solver": "cg"}}
"""Of ALS; the exact solver alone is measured with all seeds."""

Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- data


def explicit(name: str, folder: Path | None) -> sp.csr_array:
    """Ratings of a set."""
    if " x " in name:
        shape, scale = name.split(" x ")
        return synthetic(shape, scale=float(scale)).user_items
    return compact(triplets(folder, name))


def implicit(name: str, folder: Path | None) -> sp.csr_array:
    """Logarithms of play counts, good ratings, or synthetic counts."""
    if " x " in name:
        shape, scale = name.split(" x ")
        return synthetic(shape, feedback="implicit", scale=float(scale)).user_items
    if name == "lastfm-2k":
        text = gzip.decompress((folder / name / "user_artists.dat.gz").read_bytes()).decode()
        matrix = compact(np.array(text.split()[3:], dtype=np.int64).reshape(-1, 3))
        matrix.data = np.log1p(matrix.data)
        return matrix
    matrix = compact(triplets(folder, name))
    matrix.data = (matrix.data >= RELEVANT).astype(np.float32)
    matrix.eliminate_zeros()
    return matrix


def sets_of(model: str) -> tuple[str, ...]:
    """Sets that a model is measured on."""
    real = ("ml-100k", "ml-1m")
    return ("lastfm-2k", *real, *SHAPES) if model == "implicit" else (*real, *SHAPES)


# ------------------------------------------------------------------------------------------------------ measurement


def drawn(start: str, degrees: np.ndarray, unit: float, seed: int) -> np.ndarray:
    """Initial factors of one side; float32, shape (n, FACTORS)."""
    kind, length, by_degree = STARTS[start]
    rng = np.random.default_rng([seed, len(degrees)])
    if kind == "normal":
        numbers = np.abs(rng.standard_normal((len(degrees), FACTORS)))
    else:
        numbers = math.sqrt(3) * rng.uniform(-1.0 if kind == "signed" else 0.0, 1.0, (len(degrees), FACTORS))
    lengths = np.full(len(degrees), unit * length / math.sqrt(FACTORS))
    if by_degree:
        lengths *= np.sqrt(degrees / degrees[degrees > 0].mean())
    return (numbers * lengths[:, None]).astype(np.float32)


def fitted(model: str, parts: tuple[Any, Any], start: str, seed: int, variant: dict[str, Any], both: bool) -> Row:
    """Objective and quality after each iteration."""
    train, test = parts
    one = MODELS[model](factors=FACTORS, iterations=ITERATIONS, device="cpu", num_threads=1, **variant)
    unit = 1.0 if model == "implicit" else 0.5 * math.sqrt(scale_of(train, one._objective()))
    users = drawn(start, np.diff(train.indptr), unit, seed)
    items = drawn(start, np.bincount(train.indices, minlength=train.shape[1]), unit, seed + 100)
    if not both:
        items = None if model not in ("SGD", "CCD") else np.zeros_like(items)
    metrics = ("ndcg@10", "recall@20") if model == "implicit" else ("rmse",)
    values: dict[str, list[float]] = {name: [] for name in ("objective", *metrics)}

    def observe(fitted: Any, iteration: Row) -> None:
        values["objective"].append(float(iteration["objective"]))
        for name, value in hmf.evaluate(fitted, test, metrics=metrics).items():
            values[name].append(round(float(value), 5))

    one.set_params(init=(users, items)).fit(train, callback=observe)
    return {"start": start, "seed": seed, **values}


def measured(model: str, matrix: sp.csr_array) -> Iterator[Row]:
    """All starts and variants."""
    parts = hmf.split(as_csr(matrix, dtype="float32"), test_size=0.1, random_state=0)
    als = model not in ("SGD", "CCD")
    for variant, options in VARIANTS.items() if als else [("", {})]:
        for seed in SEEDS if not variant else SEEDS[:1]:
            for start in STARTS:
                for both in (False,) if als else (True,) if model == "SGD" else (True, False):
                    row = fitted(model, parts, start, seed, options, both)
                    yield {"variant": variant or ("" if als or both else "items zero"), **row}


# ----------------------------------------------------------------------------------------------------------- report


def newest() -> dict[tuple[str, str], Row]:
    """The line of each model and set that was measured last."""
    lines = map(json.loads, (RESULTS / "starts.jsonl").read_text().splitlines())
    return {(line["model"], line["set"]): line for line in lines}


def relative(rows: list[Row], metric: str) -> dict[tuple[str, str], np.ndarray]:
    """The metric after each iteration in percent of the best that any start reaches, averaged over seeds."""
    best = (min if metric in ("rmse", "objective") else max)(value for row in rows for value in row[metric])
    found: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        found.setdefault((row["variant"], row["start"]), []).append(100 * np.array(row[metric]) / best)
    return {key: np.mean(values, axis=0) for key, values in found.items()}


def report() -> None:
    """Print, per model and start, the mean over the sets of objective and quality after some iterations."""
    lines = newest()
    for model in MODELS:
        chosen = [line for (name, _), line in lines.items() if name == model]
        if not chosen:
            continue
        metric = "ndcg@10" if model == "implicit" else "rmse"
        quality = [relative(line["rows"], metric) for line in chosen]
        objective = [relative(line["rows"], "objective") for line in chosen]
        after = (1, 2, 3, 4, 6, 8, 12, 16)
        print(f"\n{model}: {', '.join(line['set'] for line in chosen)}\n")
        print("| start | " + " | ".join(f"{k}" for k in after) + " | within 1 % of the best objective after |")
        print("|---" * (len(after) + 2) + "|")
        for key in quality[0]:
            mean = np.mean([each[key] for each in quality], axis=0)
            soon = [int(np.argmax(each[key] <= 101)) + 1 if (each[key] <= 101).any() else 99 for each in objective]
            name = ": ".join(filter(None, key))
            cells = [f"{mean[k - 1]:.1f}" for k in after]
            print(f"| {name} | " + " | ".join(cells) + f" | {', '.join('-' if k == 99 else str(k) for k in soon)} |")


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with ml-100k, ml-1m and lastfm-2k.")
@click.option("--model", "models", multiple=True, type=click.Choice(tuple(MODELS)), help="Only these models.")
@click.option("--set", "names", multiple=True, help="Only these sets.")
@click.option("--report", "only_report", is_flag=True, help="Measure nothing.")
def main(data: Path | None, models: tuple[str, ...], names: tuple[str, ...], only_report: bool) -> None:
    """Measure and print."""
    for model in () if only_report else models or tuple(MODELS):
        for name in sets_of(model):
            if names and name not in names:
                continue
            if data is None and " x " not in name:
                raise click.UsageError(f"{name} needs --data FOLDER")
            matrix = (implicit if model == "implicit" else explicit)(name, data)
            rows = list(measured(model, matrix))
            shape = [*matrix.shape, matrix.nnz]
            sizes = {"shape": shape, "factors": FACTORS, "iterations": ITERATIONS}
            record("starts", {"benchmark": "starts", "model": model, "set": name, **sizes, "rows": rows})
            print(model, name, flush=True)
    report()


if __name__ == "__main__":
    main()
