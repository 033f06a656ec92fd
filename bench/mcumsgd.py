"""SGD on several GPUs (MCUMSGD, MSGD Alg. 4 and fig. 17): milliseconds an epoch on 1, 2, 4, and the RMSE reached.

    python bench/mcumsgd.py                                   Netflix and Yahoo R1 shape, f = 64 and 128
    python bench/mcumsgd.py --shape netflix --factors 128 --ranks 1,2 --long-row 2048

"one GPU" is the solver of `device="cuda:0"`. Before anything is timed, GPU ranks are compared with CPU ranks on a small
shape: they update in the same order. Another number of ranks is another order, with another path to the minimum: the
RMSEs are reported beside the times; one that is no lower than at the start makes the exit code 1. Times are from before
the first launch to after the last rank has finished, the median of the epochs after a warm-up. "balance" is the mean
over the largest of the entries that ranks have in a step, averaged over the steps of an epoch: no speed-up can be more
than that many times the ranks. Data: gpu_data.py.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
from common import record
from gpu_data import GPU_SHAPES, synthetic_gpu

import hybridmf as hmf
from hybridmf._plan import make_plan
from hybridmf.formats import transpose
from hybridmf.gpu import sgd as gpu_sgd
from hybridmf.gpu.device import device_count
from hybridmf.scale.mcumsgd import Bounds, MultiSGD

SAMPLE = 1 << 20
"""Entries whose errors give the RMSE."""


@dataclass(frozen=True)
class Data:
    """Ratings in both orientations, and a sample of them."""

    shape: str
    user: sp.csr_array
    item: sp.csr_array
    sample: tuple[np.ndarray, np.ndarray, np.ndarray]

    @classmethod
    def draw(cls, shape: str) -> Data:
        """From the seed of the shape."""
        matrix = synthetic_gpu(shape)
        places = np.sort(np.random.default_rng(0).choice(matrix.nnz, min(SAMPLE, matrix.nnz), replace=False))
        users = np.searchsorted(matrix.indptr, places, side="right") - 1
        sample = users, matrix.indices[places], matrix.data[places].astype(np.float64)
        return cls(shape, matrix, transpose(matrix), sample)

    def rmse(self, solver: Any) -> float:
        """On the sample, in float64."""
        users, items, ratings = self.sample
        state, squares = solver.state.on_host(), 0.0
        for start in range(0, len(ratings), 1 << 17):
            part = slice(start, start + (1 << 17))
            scores = np.einsum(
                "ij,ij->i", state.user.matrix[users[part]], state.item.matrix[items[part]], dtype=np.float64
            )
            squares += float(((ratings[part] - scores) ** 2).sum())
        return float(np.sqrt(squares / len(ratings)))


def solver_of(data: Data, factors: int, device: Any, long_row: int | None = None) -> Any:
    """The solver of a fit, before its first epoch."""
    model = hmf.SGD(factors=factors, device=device, random_state=0)
    objective = model._objective()
    plan = make_plan(objective, model._settings(), data.user.shape, data.user.nnz)
    state = model._initial_state(data.user, data.item, plan, objective)
    if long_row is not None and isinstance(device, list):
        return MultiSGD(data.user, data.item, objective, plan, state, 0, long_row=long_row)
    return model._solver(plan, data.user, data.item, state, 0)


def epochs(solver: Any, count: int) -> list[float]:
    """Seconds of each epoch."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        for _ in solver.sweep():
            pass
        seconds.append(time.perf_counter() - started)
    return seconds


def check(ranks: int) -> float:
    """Largest difference between factors of GPU ranks and of CPU ranks after three epochs, relative to the largest."""
    data = Data.draw("ml-1m")
    ours, theirs = (solver_of(data, 32, [name.format(k) for k in range(ranks)]) for name in ("cuda:{}", "cpu"))
    for solver in (ours, theirs):
        epochs(solver, 3)
    pairs = [
        (getattr(ours.state.on_host(), side).matrix, getattr(theirs.state, side).matrix) for side in ("user", "item")
    ]
    ours.close()
    theirs.close()
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def balance(data: Data, ranks: int) -> float:
    """See the top."""
    bounds = Bounds.even(data.user, ranks)
    of_user = np.repeat(np.arange(ranks), np.diff(data.user.indptr[bounds.user]))
    of_item = np.searchsorted(bounds.item, data.user.indices, side="right") - 1
    counts = np.bincount(of_user * ranks + of_item, minlength=ranks * ranks).reshape(ranks, ranks)
    steps = [[counts[q, (q + step) % ranks] for q in range(ranks)] for step in range(ranks)]
    return float(sum(np.mean(step) for step in steps) / sum(max(step) for step in steps))


def measure(data: Data, factors: int, ranks: int, count: int, long_row: int | None) -> dict[str, Any]:
    """One line: milliseconds and RMSE on so many GPUs; 0 ranks: the solver of one GPU."""
    device = [f"cuda:{rank}" for rank in range(ranks)] if ranks else "cuda:0"
    started = time.perf_counter()
    solver = solver_of(data, factors, device, long_row)
    set_up = time.perf_counter() - started
    before = data.rmse(solver)
    seconds = epochs(solver, count + 2)[2:]
    line = {
        "bench": "mcumsgd",
        "shape": data.shape,
        "users": data.user.shape[0],
        "items": data.user.shape[1],
        "nnz": int(data.user.nnz),
        "factors": factors,
        "ranks": ranks,
        "long_row": long_row or (gpu_sgd.LONG_ROW if ranks < 2 else solver.workers[0].backend.long_row),
        "ms": 1e3 * statistics.median(seconds),
        "ms_all": [round(1e3 * value, 3) for value in seconds],
        "set_up_s": round(set_up, 3),
        "epochs": count + 2,
        "rmse_before": before,
        "rmse": data.rmse(solver),
        "balance": balance(data, ranks) if ranks else 1.0,
    }
    if ranks:
        solver.close()
    return line


def gpu_names() -> list[str]:
    from hybridmf.gpu.device import open_device

    return [open_device(f"cuda:{index}").spec.name for index in range(device_count())]


@click.command(help=__doc__)
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice(list(GPU_SHAPES)), help="default: netflix, yahoo-r1"
)
@click.option("--factors", multiple=True, type=int, help="default: 64 and 128")
@click.option("--ranks", default="1,2,4", help="numbers of GPUs; those that are not there are left out")
@click.option("--epochs", "count", default=10, help="timed")
@click.option("--long-row", default=None, type=int, help="entries from which a row has a block of its own")
def main(shapes: tuple[str, ...], factors: tuple[int, ...], ranks: str, count: int, long_row: int | None) -> None:
    names = gpu_names()
    numbers = [number for number in map(int, ranks.split(",")) if number <= len(names)]
    for number in numbers:
        if number > 1:
            difference = check(number)
            print(f"{number} GPUs beside {number} CPU ranks: factors differ by {difference:.1e}")
            if difference > 1e-3:
                raise SystemExit(f"wrong answer on {number} GPUs")
    failed = False
    print(f"{'shape':10} {'f':>4} {'GPUs':>5} {'ms':>9} {'speed-up':>9} {'balance':>8} {'RMSE':>8} {'set-up s':>9}")
    for shape in shapes or ("netflix", "yahoo-r1"):
        data = Data.draw(shape)
        for f in factors or (64, 128):
            alone = measure(data, f, 0, count, None)
            for line in [alone, *(measure(data, f, number, count, long_row) for number in numbers)]:
                line |= {"gpu": names[0], "speed_up": alone["ms"] / line["ms"], "rmse_of_one": alone["rmse"]}
                # the order of updates is another one, so is the path to the minimum; what has diverged is wrong
                sound = line["rmse"] < line["rmse_before"]
                failed |= not sound
                print(
                    f"{shape:10} {f:4d} {line['ranks'] or 'one':>5} {line['ms']:9.2f} {line['speed_up']:9.2f} "
                    f"{line['balance']:8.2f} {line['rmse']:8.4f} {line['set_up_s']:9.1f}"
                    + ("" if sound else "  WRONG"),
                    flush=True,
                )
                if sound:
                    record("mcumsgd", line)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
