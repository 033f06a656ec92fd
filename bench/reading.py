"""Reading a CSV file of ratings, beside pandas and polars, which only parse it, in turn in one process.

    python bench/reading.py                      5M rows of user, item, rating
    python bench/reading.py --rows 1000000

Seconds, and seconds of processor time, which other programs disturb less. "without pyarrow" is what users without the
extra `fast-io` get.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import pandas as pd
import polars as pl
from common import alternate, median, record

import hybridmf as hmf
from hybridmf.data import arrow_text

USERS, ITEMS = 138_493, 26_744
"""Those of ML-20M."""


def write_ratings(path: Path, rows: int, *, labels: bool) -> None:
    """Distinct pairs of users and items in random order, and ratings in steps of a half."""
    random = np.random.default_rng(0)
    pairs = random.choice(USERS * ITEMS, rows, replace=False, shuffle=True)
    frame = pl.DataFrame(
        {"userId": pairs // ITEMS + 1, "movieId": pairs % ITEMS + 1, "rating": random.integers(1, 11, rows) / 2}
    )
    if labels:
        frame = frame.with_columns(
            pl.format("u{}", "userId").alias("userId"), pl.format("i{}", "movieId").alias("movieId")
        )
    frame.write_csv(path)


def without_pyarrow(path: Path) -> Any:
    with mock.patch.object(arrow_text, "SMALLEST", float("inf")):
        return hmf.Ratings.from_file(path)


def measured(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds, and median seconds of all cores together, of each run."""
    cores: dict[str, list[float]] = {name: [] for name in runs}

    def timed(name: str) -> None:
        started = time.process_time()
        runs[name]()
        cores[name].append(time.process_time() - started)

    seconds = alternate({name: lambda name=name: timed(name) for name in runs}, repeats)
    return {name: {"seconds": median(seconds[name]), "cpu": median(cores[name][1:])} for name in runs}


@click.command()
@click.option("--rows", default=5_000_000, show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(rows: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for labels in (False, True):
            path = Path(folder) / "ratings.csv"
            write_ratings(path, rows, labels=labels)
            expected, found = without_pyarrow(path), hmf.Ratings.from_file(path)
            assert found.shape == expected.shape and (found.user_items != expected.user_items).nnz == 0
            runs = {
                "pandas.read_csv": lambda path=path: pd.read_csv(path),
                "polars.read_csv": lambda path=path: pl.read_csv(path),
                "Ratings.from_file": lambda path=path: hmf.Ratings.from_file(path),
                "without pyarrow": lambda path=path: without_pyarrow(path),
            }
            kind = "strings" if labels else "integers"
            results = measured(runs, repeats)
            for name, result in results.items():
                ratio = result["cpu"] / results["pandas.read_csv"]["cpu"]
                click.echo(
                    f"{kind:10}{name:20}{result['seconds']:8.2f} s{result['cpu']:8.2f} CPU s{ratio:8.1f} x pandas"
                )
            record("reading", {"bench": "reading", "ids": kind, "rows": rows, "results": results})


if __name__ == "__main__":
    main()
