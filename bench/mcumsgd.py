"""SGD on several GPUs (MCUMSGD, MSGD Alg. 4 and fig. 17): milliseconds an epoch on 1, 2, 4, and the RMSE reached.

    python bench/mcumsgd.py                                   Netflix and Yahoo R1 shape, f = 64 and 128
    python bench/mcumsgd.py --shape netflix --factors 128 --ranks 1,2 --long-row 2048
    python bench/mcumsgd.py --compare                         all variants on Netflix's shape, f = 128, 2 and 4 GPUs

"one GPU" is the solver of `device="cuda:0"`. Before anything is timed, GPU ranks are compared with CPU ranks on a small
shape, with popular items: they update in the same order. Another number of ranks begins rows' walks elsewhere: the
RMSEs are reported beside the times. Where one is no lower than at the start, or of "passes" more than 5 % above that of
one GPU after as many epochs (six or more), the exit code is 1. Times are from before the first launch to after the last
rank has finished, the median of the epochs after a warm-up. "balance" is the mean over the largest of the entries that
ranks have in a step, averaged over the steps of an epoch: no speed-up can be more than that many times the ranks. Data:
gpu_data.py.

Variants: the order ("passes", "blocks": see hybridmf/ranks/mcumsgd.py); long rows beside the others (two streams) or
before them (one); entries from which a row is long, half and double those of the rule; without popular items: all
rotate (--rotating), or other rules for them (--walk); such lines are not recorded. "popular" is the number of popular
items and their part of the entries. "set-up" begins with the matrix and ends before the first launch of an epoch, with
a late check of the matrix still running, as in a fit; epochs wait for it. It is followed by three parts of it, the last
two of the slowest rank: ratings to the GPUs with their check and transposition, cuts of its share, and its kernels.
One more epoch shows where the time goes: milliseconds of the passes over items and users
on the GPU (the mean of the ranks), of all that lies between them there (waits and exchanges), of the updates of popular
items (the mean of the ranks, which are beside the others), and how long the slowest rank takes in Python until all is
launched.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import scipy.sparse as sp
from common import iterate, record
from gpu_data import GPU_SHAPES, synthetic_gpu

import hybridmf as hmf
from hybridmf.device.cuda import device_count
from hybridmf.device.recording import current_recording
from hybridmf.formats import transpose
from hybridmf.gpu import sgd as gpu_sgd
from hybridmf.model.training import LocalRatings
from hybridmf.plan.make import make_plan
from hybridmf.plan.sgd import ORDERS
from hybridmf.ranks import dealt, mcumsgd
from hybridmf.ranks.mcumsgd import MultiSGD

SAMPLE = 1 << 20
"""Entries whose errors give the RMSE."""

WARM_UP = 2
"""Epochs that are not timed."""

NEAR, SETTLED = 1.05, 6
"""RMSE of "passes" relative to that of one GPU, at most; epochs until when it falls so fast that this says nothing."""


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
        """Of a solver's state on the sample, in float64."""
        users, items, ratings = self.sample
        state, squares = solver.state.on_host(), 0.0
        for start in range(0, len(ratings), 1 << 17):
            part = slice(start, start + (1 << 17))
            scores = np.einsum(
                "ij,ij->i", state.user.matrix[users[part]], state.item.matrix[items[part]], dtype=np.float64
            )
            squares += float(((ratings[part] - scores) ** 2).sum())
        return float(np.sqrt(squares / len(ratings)))


@dataclass(frozen=True)
class Variant:
    """How an epoch is spread; 0 ranks: the solver of one GPU."""

    ranks: int
    order: str = "passes"
    beside: bool = True
    long_row: int | None = None
    popular: bool = True
    walk: int = mcumsgd.WALK


@dataclass(frozen=True)
class Start:
    """Where all variants start: the same factors."""

    data: Data
    factors: int

    @cached_property
    def model(self) -> Any:
        """An estimator of one GPU."""
        return hmf.SGD(factors=self.factors, regularization=0.05, biases=False, device="cuda:0", random_state=0)

    @cached_property
    def state(self) -> Any:
        """Initial factors."""
        objective = self.model._objective()
        plan = make_plan(objective, self.model._settings(), self.data.user.shape, self.data.user.nnz)
        return self.model._initial_state(LocalRatings(self.model, self.data.user).on_host(plan), plan, objective)

    def solver(self, devices: Any, variant: Variant) -> Any:
        """The solver of a fit, before its first epoch."""
        order = variant.order
        model, data = (
            hmf.SGD(
                factors=self.factors, regularization=0.05, biases=False, order=order, device=devices, random_state=0
            ),
            self.data,
        )
        objective = model._objective()
        plan = make_plan(objective, model._settings(), data.user.shape, data.user.nnz)
        ratings = model._source(model, data.user, late=True)
        ratings.place(plan)
        if isinstance(devices, list):
            plan = model._standardized(plan, objective, ratings.scale(objective))
            options = {"long_row": variant.long_row, "beside": variant.beside}
            return MultiSGD(ratings.user_items, ratings.item_users, objective, plan, self.state, 0, **options)
        solver = model._solver(plan, objective, ratings, self.state, 0)
        solver.kernels.schedules[0].beside = variant.beside
        return solver


def epochs(solver: Any, count: int) -> list[float]:
    """Seconds of each epoch."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        iterate(solver)
        seconds.append(time.perf_counter() - started)
    return seconds


@dataclass(frozen=True)
class Mark:
    """A pass of a rank: side, events of the GPU around it, and when Python had launched it, in each epoch."""

    side: str
    begin: Any
    end: Any
    launched: list[float]

    def milliseconds(self, since: Mark | None = None) -> float:
        """From its begin, or that of another, to its end."""
        import cupy

        return float(cupy.cuda.get_elapsed_time((since or self).begin, self.end))


def passes_of_an_epoch(solver: Any) -> dict[str, float]:
    """Where the time of one more epoch goes; see the top."""
    import cupy

    ranks = solver.ranks if isinstance(solver, MultiSGD) else [solver]
    marks: list[list[Mark]] = [[] for _ in ranks]
    for own, rank in zip(marks, ranks, strict=True):
        for block, msgd in enumerate(rank.kernels.schedules):
            is_popular = 1 < len(ranks) < block
            msgd.launch_pass = _marked(msgd.device, msgd.launch_pass, own, cupy.cuda, is_popular)
    if isinstance(solver, MultiSGD):
        solver._recording = None
        epochs(solver, 1)  # is recorded with its marks; the next one repeats them
    started = time.perf_counter()
    epochs(solver, 1)
    found: dict[str, float] = {"launch": max(own[-1].launched[-1] for own in marks) - started}
    found["launch"] *= 1e3
    for side in ("item", "user", "popular"):
        found[side] = statistics.mean(sum(mark.milliseconds() for mark in own if mark.side == side) for own in marks)
    marks = [[mark for mark in own if mark.side != "popular"] for own in marks]
    spans = [own[-1].milliseconds(since=own[0]) for own in marks]
    return found | {"between": statistics.mean(spans) - found["item"] - found["user"]}


def _marked(
    device: Any, launch_pass: Callable[..., None], marks: list[Mark], cuda: Any, is_popular: bool
) -> Callable[..., None]:
    def call(function: Callable[..., Any], *arguments: Any) -> None:
        """Now, and in repeats of the epoch that is being recorded."""
        function(*arguments)
        if (recording := current_recording()) is not None:
            recording.add(device, function, arguments)

    def marked(side: str, *operands: Any) -> None:
        name = "popular" if is_popular and side == "item" else side
        mark, stream = Mark(name, cuda.Event(), cuda.Event(), []), cuda.get_current_stream()
        call(mark.begin.record, stream)
        launch_pass(side, *operands)
        call(mark.end.record, stream)
        call(lambda: mark.launched.append(time.perf_counter()))
        marks.append(mark)

    return marked


def check(ranks: int, order: str) -> float:
    """Largest difference between factors of GPU ranks and of CPU ranks after three epochs, relative to the largest."""
    start, variant = Start(Data.draw("ml-1m"), 32), Variant(ranks, order)
    with patch.object(mcumsgd, "MIN_POPULAR", 1000):
        ours, theirs = (start.solver([name.format(k) for k in range(ranks)], variant) for name in ("cuda:{}", "cpu"))
    assert order == "blocks" or len(ours.ranks[0].popular)
    for solver in (ours, theirs):
        epochs(solver, 3)
    pairs = [
        (getattr(ours.state.on_host(), side).matrix, getattr(theirs.state, side).matrix) for side in ("user", "item")
    ]
    ours.close()
    theirs.close()
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def balance(solver: Any) -> float:
    """See the top."""
    ranks = solver.size
    counts = [[bounds["user"][-1] for bounds in rank.kernels._indptr] for rank in solver.ranks]
    steps = [[counts[q][(q + step) % ranks] for q in range(ranks)] for step in range(ranks)]
    return float(sum(np.mean(step) for step in steps) / sum(max(step) for step in steps))


@contextmanager
def part_timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Context in which the seconds of each call of a function are noted."""
    given, seconds = getattr(owner, name), []

    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = given(*arguments, **options)
        seconds.append(time.perf_counter() - started)
        return result

    with patch.object(owner, name, timed):
        yield seconds


def measure(start: Start, variant: Variant, count: int) -> dict[str, Any]:
    """One line: milliseconds, where they go, and the RMSE."""
    data, ranks = start.data, variant.ranks
    fewest = mcumsgd.MIN_POPULAR if variant.popular else float("inf")
    dealing, cutting = part_timed(dealt, "deal"), part_timed(mcumsgd, "cut_dealt")
    making = part_timed(gpu_sgd.GpuEpochs, "__init__")
    rule = patch.multiple(mcumsgd, MIN_POPULAR=fewest, WALK=variant.walk)
    with rule, dealing as deals, cutting as cuts, making as kernels:
        started = time.perf_counter()
        solver = start.solver([f"cuda:{rank}" for rank in range(ranks)] if ranks else "cuda:0", variant)
        set_up = time.perf_counter() - started
    for thread in threading.enumerate():
        if thread.name.startswith("hybridmf-check"):
            thread.join()
    popular = solver.ranks[0].popular if ranks else []
    seconds = epochs(solver, WARM_UP + count)[WARM_UP:]
    line = {
        "bench": "mcumsgd",
        "shape": data.shape,
        "users": data.user.shape[0],
        "items": data.user.shape[1],
        "nnz": int(data.user.nnz),
        "factors": start.factors,
        "ranks": ranks,
        "order": variant.order,
        "streams": 1 + variant.beside,
        "long_row": solver.ranks[0].kernels.long_row if ranks else gpu_sgd.LONG_ROW,
        "ms": 1e3 * statistics.median(seconds),
        "ms_all": [round(1e3 * value, 3) for value in seconds],
        "popular": len(popular),
        "popular_part": round(float(np.diff(data.item.indptr)[popular].sum()) / data.user.nnz, 4) if ranks else 0.0,
        "set_up_s": round(set_up, 3),
        "set_up_parts_s": [round(max(part, default=0.0), 3) for part in (deals, cuts, kernels)],
        "epochs": WARM_UP + count,
        "rmse": data.rmse(solver),
        "balance": balance(solver) if ranks else 1.0,
        "ms_passes": {name: round(value, 3) for name, value in passes_of_an_epoch(solver).items()},
    }
    if ranks:
        solver.close()
    return line


def variants(
    numbers: list[int],
    orders: tuple[str, ...],
    long_rows: tuple[int, ...],
    one: bool,
    rotating: bool = False,
    walks: tuple[int, ...] = (),
) -> Iterator[Variant]:
    """What is measured; the solver of one GPU comes first."""
    yield Variant(0)
    if one:
        yield Variant(0, beside=False)
    for ranks in numbers:
        for order in orders:
            for long_row, walk in product(long_rows or (None,), walks or (mcumsgd.WALK,)):
                yield Variant(ranks, order, long_row=long_row, walk=walk)
        if one:
            yield Variant(ranks, beside=False)
        if rotating and ranks > 1:
            yield Variant(ranks, popular=False)


def all_variants(numbers: list[int]) -> Iterator[Variant]:
    """Of --compare: one thing other than usual at a time."""
    yield from variants(numbers, ORDERS, (), True, True)
    for ranks in numbers:
        rule = gpu_sgd.long_row_of(ranks)
        yield Variant(ranks, long_row=rule // 2)
        yield Variant(ranks, long_row=rule * 2)


def gpu_names() -> list[str]:
    from hybridmf.device.cuda import open_device

    return [open_device(f"cuda:{index}").spec.name for index in range(device_count())]


HEADER = (
    f"{'shape':10} {'f':>4} {'GPUs':>5} {'order':>7} {'streams':>7} {'long row':>8} {'ms':>9} {'speed-up':>9} "
    f"{'popular':>11} {'balance':>8} {'RMSE':>8} {'set-up s':>23} {'items':>7} {'users':>7} {'between':>8} "
    f"{'popular':>8} {'launch':>7}"
)


def print_line(line: dict[str, Any], sound: bool) -> None:
    """A row of the table."""
    passes = line["ms_passes"]
    popular = f"{line['popular']} {100 * line['popular_part']:.1f} %"
    set_up = f"{line['set_up_s']:.2f} ({', '.join(f'{part:.2f}' for part in line['set_up_parts_s'])})"
    print(
        f"{line['shape']:10} {line['factors']:4d} {line['ranks'] or 'one':>5} {line['order']:>7} {line['streams']:7d} "
        f"{line['long_row']:8d} {line['ms']:9.2f} {line['speed_up']:9.2f} {popular:>11} {line['balance']:8.2f} "
        f"{line['rmse']:8.4f} {set_up:>23} {passes['item']:7.2f} {passes['user']:7.2f} {passes['between']:8.2f} "
        f"{passes['popular']:8.2f} "
        f"{passes['launch']:7.2f}" + ("" if sound else "  WRONG"),
        flush=True,
    )


def is_sound(line: dict[str, Any]) -> bool:
    """Whether the RMSE is what it should be; see the top."""
    comparable = line["order"] == "passes" and line["epochs"] >= SETTLED
    return bool(line["rmse"] < (NEAR * line["rmse_of_one"] if comparable else line["rmse_before"]))


@click.command(help=__doc__)
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice(list(GPU_SHAPES)), help="default: netflix, yahoo-r1"
)
@click.option("--factors", multiple=True, type=int, help="default: 64 and 128")
@click.option("--ranks", default=None, help="numbers of GPUs; those that are not there are left out; default: 1,2,4")
@click.option("--epochs", "count", default=5, help="timed")
@click.option("--order", "orders", multiple=True, type=click.Choice(ORDERS), help="default: passes")
@click.option(
    "--long-row", "long_rows", multiple=True, type=int, help="entries from which a row has a block of its own"
)
@click.option("--one-stream", is_flag=True, help="on one GPU and on several with the other number of streams, too")
@click.option("--rotating", is_flag=True, help="on several GPUs without popular items, too")
@click.option(
    "--walk", "walks", multiple=True, type=int, help="WALK of ranks/mcumsgd.py; the fewer, the fewer are popular"
)
@click.option("--compare", is_flag=True, help="all variants; by default Netflix's shape, f = 128, 2 and 4 GPUs")
def main(
    shapes: tuple[str, ...],
    factors: tuple[int, ...],
    ranks: str | None,
    count: int,
    orders: tuple[str, ...],
    long_rows: tuple[int, ...],
    one_stream: bool,
    rotating: bool,
    walks: tuple[int, ...],
    compare: bool,
) -> None:
    names = gpu_names()
    wanted = ranks or ("2,4" if compare else "1,2,4")
    numbers = [number for number in map(int, wanted.split(",")) if number <= len(names)]
    orders = ORDERS if compare else orders or ("passes",)
    for number, order in ((number, order) for number in numbers if number > 1 for order in orders):
        difference = check(number, order)
        print(f"{number} GPUs beside {number} CPU ranks, {order}: factors differ by {difference:.1e}")
        if difference > 1e-3:
            raise SystemExit(f"wrong answer on {number} GPUs")
    chosen = list(
        all_variants(numbers) if compare else variants(numbers, orders, long_rows, one_stream, rotating, walks)
    )
    failed = False
    print(HEADER)
    for shape in shapes or (("netflix",) if compare else ("netflix", "yahoo-r1")):
        data = Data.draw(shape)
        for f in factors or ((128,) if compare else (64, 128)):
            start = Start(data, f)
            facts: dict[str, Any] = {"gpu": names[0], "rmse_before": data.rmse(start)}
            for variant in chosen:
                line = measure(start, variant, count)
                if "rmse_of_one" not in facts:
                    facts |= {"ms_of_one": line["ms"], "rmse_of_one": line["rmse"]}
                line |= facts | {"speed_up": facts["ms_of_one"] / line["ms"]}
                sound = is_sound(line)
                failed |= not sound
                print_line(line, sound)
                if sound and variant.popular and variant.walk == mcumsgd.WALK:
                    record("mcumsgd", line)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
