"""SGD on the CPU beside LIBMF, and CCD++ beside exact ALS: seconds to an equal test RMSE, set-up included.

    python bench/sgd.py                          quick: ML-1M shape, f = 32
    python bench/sgd.py --profile full           ML-10M shape, f = 32, 64, 128
    python bench/sgd.py --ratings ratings.dat --factors 32 --factors 64 --factors 128     the same on a file

A tenth of the ratings is held out. LIBMF's test RMSE after its default 20 epochs, at the best of the rates
given to it, sets the target; every method then runs as few iterations as bring it there, and whole fits from the
library's own input format to factors are timed in turn. The same lambda for everybody: LIBMF and our SGD pay it once
an entry, which is regularization_scaling="count" of ExplicitALS and CCD. "s / epoch" is the difference between a fit of
that many epochs and one of a single epoch, over the epochs between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import rivals
import scipy.sparse as sp
from common import SHAPES, alternate, median, record, synthetic
from cpu import Contestant, _seconds, libmf_rebuilt, versions

import hybridmf as hmf
from hybridmf.core.objective import Objective
from hybridmf.model.learned import scale_of

LAMBDA = 0.05
LIBMF_RATES = (0.1, 0.15)
"""Its default, and one that got to a good objective faster."""

EPOCHS = 20
GIVE_UP = 40
"""Iterations after which a method is not waited for any longer."""

SLACK = 1.001
"""A test RMSE within a thousandth of the target has reached it: as much as one run differs from the next."""

PROFILES: dict[str, tuple[str, tuple[int, ...], int]] = {
    "quick": ("ml-1m", (32,), 3),
    "full": ("ml-10m", (32, 64, 128), 3),
}


class TestError:
    """Test RMSE of anybody's factors."""

    def __init__(self, held_out: sp.csr_array) -> None:
        entries = held_out.tocoo()
        self.users, self.items, self.ratings = entries.row, entries.col, entries.data.astype(np.float64)

    def loss(self, factors: tuple[np.ndarray, np.ndarray]) -> float:
        """Root of the mean squared error, in float64."""
        users, items = factors
        total = 0.0
        for start in range(0, len(self.ratings), 1 << 18):
            part = slice(start, start + (1 << 18))
            scores = np.einsum("ij,ij->i", users[self.users[part]], items[self.items[part]], dtype=np.float64)
            total += float(((self.ratings[part] - scores) ** 2).sum())
        return float(np.sqrt(total / len(self.ratings)))


class Fit:
    """One of our estimators, fitted as users fit it."""

    def __init__(self, matrix: sp.csr_array, make: Any) -> None:
        self.matrix, self.make = matrix, make
        self.model: Any = None

    def fit(self, iterations: int) -> Fit:
        """A whole fit."""
        self.model = self.make(iterations).fit(self.matrix)
        return self

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """User and item factors."""
        return self.model.user_factors, self.model.item_factors


def contestants(matrix: sp.csr_array, f: int, threads: int) -> dict[str, Contestant]:
    """Ours first."""
    common: dict[str, Any] = {
        "regularization": LAMBDA, "num_threads": threads, "device": "cpu", "random_state": 0,
    }  # fmt: skip

    def sgd(**options: Any) -> Contestant:
        return Contestant(
            Fit(matrix, lambda n: hmf.SGD(f, biases=False, **common, **options, iterations=n)).fit, give_up=GIVE_UP
        )

    raw = scale_of(matrix, Objective.explicit(LAMBDA, "count", False))  # turns rates of the ratings' unit into ours
    ways = {
        "ours, blocks, power": sgd(schedule="blocks"),
        "ours, blocks, rate 0.05": sgd(schedule="blocks", learning_rate=0.05 * raw),
        "ours, blocks, RPCS": sgd(schedule="blocks", rate_schedule="rpcs"),
        "ours, blocks, AdaGrad": sgd(schedule="blocks", rate_schedule="adagrad"),
        "ours, msgd, power": sgd(schedule="msgd"),
        "ours, CCD++": Contestant(
            Fit(matrix, lambda n: hmf.CCD(f, biases=False, **common, iterations=n)).fit, give_up=GIVE_UP
        ),
        "ours, ALS": Contestant(
            Fit(matrix, lambda n: hmf.ExplicitALS(f, biases=False, **common, iterations=n)).fit, give_up=GIVE_UP
        ),
    }
    if rivals.installed("libmf"):
        for rate in LIBMF_RATES:
            ways[f"LIBMF, rate {rate:g}"] = Contestant(
                rivals.Libmf(matrix, f, LAMBDA, threads, rate).fit, give_up=GIVE_UP
            )
    return ways


def run(shape: str, ratings: hmf.Ratings, f: int, threads: int, repeats: int) -> None:
    """One table."""
    train, test = hmf.split(ratings, test_size=0.1, random_state=0)
    matrix, judge = train.user_items, TestError(test.user_items)
    ways = contestants(matrix, f, threads)
    rated = [name for name in ways if name.startswith("LIBMF")] or ["ours, blocks, power"]
    target = SLACK * min(judge.loss(ways[name].fit(EPOCHS).factors()) for name in rated)
    counts = {name: each.iterations_to(target, judge) for name, each in ways.items()}
    runs = {name: lambda each=ways[name], count=count: each.fit(count) for name, count in counts.items() if count}
    seconds = alternate({name: lambda each=each: float(_seconds(each)) for name, each in runs.items()}, repeats)
    rival = min((median(values) for name, values in seconds.items() if name.startswith("LIBMF")), default=None)
    reached = {name: ways[name].objectives[count] for name, count in counts.items() if count}
    click.echo(f"\n{shape}, f = {f}, {threads} threads, {matrix.nnz:,} ratings; test RMSE of {target:.4f}")
    click.echo(f"{'':28s} epochs  s / epoch  seconds  fastest rival / this  test RMSE")
    for name, count in counts.items():
        if count is None:
            best = min(ways[name].objectives.values())
            click.echo(f"{name:28s} not within {max(ways[name].objectives)} epochs: {best:.4f}")
            continue
        ratio = f"{rival / median(seconds[name]):21.2f}" if rival else " " * 21
        each = median(ways[name].step_seconds)
        click.echo(f"{name:28s} {count:6d} {each:10.4f} {median(seconds[name]):8.3f} {ratio} {reached[name]:10.4f}")
    record(
        "sgd",
        {
            "bench": "sgd", "task": "seconds to equal test RMSE", "shape": shape, "nnz": int(matrix.nnz), "factors": f,
            "threads": threads, "target": target, "epochs": counts, "test_rmse": reached,
            "seconds": {name: median(values) for name, values in seconds.items()},
            "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
            "seconds_per_epoch": {name: median(each.step_seconds) for name, each in ways.items() if each.step_seconds},
            "rmse_by_epochs": {name: each.objectives for name, each in ways.items()},
            "versions_of_rivals": versions(), "libmf_rebuilt": libmf_rebuilt(),
        },
    )  # fmt: skip


@click.command(help=__doc__)
@click.option("--profile", type=click.Choice(list(PROFILES)), default="quick", show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)))
@click.option("--ratings", type=click.Path(exists=True, dir_okay=False), help="A file in place of a shape.")
@click.option("--factors", type=int, multiple=True)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--repeats", type=click.IntRange(1))
def main(
    profile: str, shape: str | None, ratings: str | None, factors: tuple[int, ...], threads: int, repeats: int | None
) -> None:
    where, ranks, times = PROFILES[profile]
    name = Path(ratings).parent.name if ratings else shape or where
    given = hmf.Ratings.from_file(ratings) if ratings else hmf.Ratings.from_matrix(synthetic(name))
    for f in factors or ranks:
        run(name, given, f, threads, repeats or times)


if __name__ == "__main__":
    main()
