"""MSGD's walk of long rows on a GPU: nanoseconds an entry of the longest row, for ways to cut it into chunks.

    python bench/walk.py                                           f = 32, 64, 128 in float32; under 40 s on an H200
    python bench/walk.py --factors 128 --config 16,5,10 --config 32,4,9
    python bench/walk.py --rows 1 --repeats 9

Rows are as long as the items of Netflix: one of 230,000 entries alone; the longest 132; all of at least 16,384 entries,
whose lengths fall by Zipf's law. A row's entries are spread evenly over 480,189 users, with random factors of either
side. A configuration is "chunk,helpers,slots" (see `BlockedConfig`). Each answer is compared with that of the kernel
`centralized` on the same input, which walks one entry at a time and is timed, too; one that differs by more than
rounding is not timed, and the exit code is 1. Times are CUDA events, medians after a warm-up. With many rows it is the
time of all of them over the entries of the longest: what that would have to take if it alone counted.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from common import record
from gpu import gpu_stamp, timed

from hybridmf.core.objective import Terms
from hybridmf.device.cuda import Array, Device, DeviceSpec, open_device
from hybridmf.errors import DeviceError
from hybridmf.gpu.launch import get_kernel
from hybridmf.gpu.sgd import Bins, BlockedConfig, FactorRows, MsgdKernels, Operands, Walk

USERS = 480_189
LONGEST = 230_000
SHORTEST = 16_384
COUNTS = (1, 132, 1000)
"""Rows that are walked at a time."""

TERMS = Terms(rate=0.005, regularization=0.05, mean=3.5, bias_rate=0.005, bias_regularization=0.1)
TOLERANCE = 2e-4
"""Of a moved row in float32, after up to 230,000 updates in another order of sums, relative to its largest value."""

CONFIGS = (
    (16, 3, 6), (16, 3, 10), (16, 5, 10), (16, 5, 14), (16, 6, 18), (16, 7, 18), (16, 9, 18), (8, 5, 14), (8, 7, 18),
)  # fmt: skip
"""Chunk, helpers, slots."""


@dataclass(frozen=True)
class Problem:
    """Rows to walk, the longest first, and the users' factors."""

    device: Device
    lengths: np.ndarray
    start: np.ndarray
    fixed: FactorRows
    walk: Walk

    @classmethod
    def draw(cls, device: Device, factors: int, count: int, users: int = USERS, longest: int = LONGEST) -> Problem:
        """From a seed."""
        lengths, indices, ratings = draw_entries(count, users, longest)
        bounds = device.upload(np.concatenate(([0], np.cumsum(lengths))))
        walk = Walk(device.upload(indices), device.upload(ratings), bounds[None, :-1], bounds[None, 1:])
        fixed = FactorRows(device.upload(random_rows(users, factors)))
        return cls(device, lengths, random_rows(count, factors), fixed, walk)

    @functools.cached_property
    def tasks(self) -> Array:
        """All rows."""
        return self.device.upload(np.arange(len(self.lengths), dtype=np.int32))

    def moved(self) -> FactorRows:
        """The rows as they are before the walk."""
        return FactorRows(self.device.upload(self.start))

    def move(self, rows: FactorRows, config: BlockedConfig | None) -> Array:
        """Walk all rows, by `centralized` where there is no configuration; the losses."""
        kernels, out = MsgdKernels(self.device, config), self.device.empty((1, len(self.lengths)), np.float64)
        operands = Operands(self.device, rows, self.fixed, TERMS)
        if config is None:
            launches = kernels.centralized(operands, self.walk, self.tasks, out)
        else:
            first = self.device.upload(np.arange(len(self.lengths) + 1, dtype=np.int32))
            launches = kernels.blocked(operands, self.walk, Bins(self.tasks, first), out)
        with self.device.active():
            for launch in launches:
                launch()
        return out[0]

    @functools.cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and losses of `centralized`."""
        return self.answer(None)

    def answer(self, config: BlockedConfig | None) -> tuple[np.ndarray, np.ndarray]:
        """Rows and losses after one walk."""
        rows = self.moved()
        losses = self.device.download(self.move(rows, config))
        return self.device.download(rows.matrix), losses

    def error(self, config: BlockedConfig) -> float:
        """Largest difference to `centralized`, of rows and of losses, relative to the largest value of either."""
        pairs = zip(self.answer(config), self.expected, strict=True)
        return max(float(np.abs(found - wanted).max() / np.abs(wanted).max()) for found, wanted in pairs)


@functools.cache
def draw_entries(count: int, users: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths of rows; users, ascending in each row, and ratings, row by row."""
    rng = np.random.default_rng(0)
    lengths = falling_lengths(count, longest)
    indices = np.empty(lengths.sum(), dtype=np.int32)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        places = np.arange(length) + rng.random(length)
        indices[end - length : end] = np.minimum(places * (users / length), users - 1)
    return lengths, indices, rng.integers(1, 6, len(indices), dtype=np.int8).astype(np.float32)


def falling_lengths(count: int, longest: int, total: int = COUNTS[-1]) -> np.ndarray:
    """The first of `total` lengths that fall by Zipf's law, with a shift by which the last one is `SHORTEST`."""
    shift = (total - 1) / (LONGEST / SHORTEST - 1)
    return np.maximum((longest / (1 + np.arange(count) / shift)).astype(np.int64), 1)


@functools.lru_cache(maxsize=4)
def random_rows(n: int, factors: int) -> np.ndarray:
    """Rows of length about 1."""
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, factors), dtype=np.float32) / np.float32(np.sqrt(factors))


def candidates(factors: int, spec: DeviceSpec, chosen: tuple[tuple[int, int, int], ...]) -> list[BlockedConfig]:
    """The rule's configuration first, and those that fit in a block's shared memory."""
    rule = BlockedConfig.rule(factors, 4, spec)
    configs = [BlockedConfig(factors, 4, *sizes) for sizes in chosen or CONFIGS]
    return list(dict.fromkeys([rule, *(one for one in configs if one.shared_bytes <= spec.shared_bytes)]))


def compile_ahead(device: Device, configs: list[BlockedConfig]) -> None:
    """On all cores; the compiler runs unlocked, and one kernel stands for the whole file."""
    types = {"REAL": np.dtype(np.float32), "HAS_BIASES": False}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda config: get_kernel(device, "msgd.cu", "blocked", **types, **config.constants), configs))


def measure(problem: Problem, config: BlockedConfig | None, repeats: int) -> dict[str, Any]:
    """What one configuration takes."""
    rows = problem.moved()
    times = [ms for (ms,) in timed(problem.device, [lambda: problem.move(rows, config)], repeats)]
    ms, entries = statistics.median(times), float(problem.lengths.sum())
    return {
        "ms": ms, "spread": [min(times), max(times)], "ns_per_entry": 1e6 * ms / float(problem.lengths[0]),
        "gathered_tbps": 4 * problem.start.shape[1] * entries / ms / 1e9,
    }  # fmt: skip


def sizes(config: BlockedConfig) -> dict[str, int]:
    """What a configuration is called in results."""
    return {name: getattr(config, name) for name in ("chunk", "helpers", "slots", "shared_bytes")}


def name_of(config: BlockedConfig | None) -> str:
    """What it is called in the table."""
    return f"chunk {config.chunk}, {config.helpers} helpers, {config.slots} slots" if config else "centralized"


def run(device: Device, problem: Problem, configs: list[BlockedConfig], repeats: int) -> list[str]:
    """All configurations on one problem, recorded as one line; what was wrong."""
    wrong, cases = [], []
    lengths, factors = problem.lengths, problem.start.shape[1]
    for config in (None, *configs):
        where = f"f {factors:4d}  rows {len(lengths):5d}  {name_of(config):32s}"
        error = None if config is None else problem.error(config)
        if error is not None and not error <= TOLERANCE:
            wrong.append(f"{where} error {error:.2e}")
            click.echo(f"{where} WRONG: error {error:.2e}")
            continue
        case = measure(problem, config, repeats)
        cases.append((sizes(config) if config else {"kernel": "centralized"}) | case | {"error": error})
        rates = f"{case['ms']:9.3f} ms {case['ns_per_entry']:8.2f} ns/entry {case['gathered_tbps']:6.2f} TB/s"
        click.echo(f"{where} {rates}" + (f"  error {error:.1e}" if error is not None else ""))
    line = {"bench": "walk", "factors": factors, "rows": len(lengths), "longest": int(lengths[0])}
    counts = {"entries": int(lengths.sum()), "repeats": repeats, "wrong": wrong, "cases": cases}
    record("walk", line | counts | gpu_stamp(device))
    return wrong


def sizes_of(text: str) -> tuple[int, int, int]:
    """Chunk, helpers and slots."""
    try:
        chunk, helpers, slots = map(int, text.split(","))
    except ValueError:
        raise click.BadParameter(f"expected chunk,helpers,slots such as 16,5,10; got {text!r}") from None
    return chunk, helpers, slots


@click.command(help=__doc__)
@click.option("--factors", type=int, multiple=True, default=(128, 64, 32), show_default=True)
@click.option("--rows", type=click.IntRange(1, COUNTS[-1]), multiple=True, default=COUNTS, show_default=True)
@click.option("--config", multiple=True, help="chunk,helpers,slots; default: all that are promising.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--scale", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Of users and entries.")
def main(factors: tuple[int, ...], rows: tuple[int, ...], config: tuple[str, ...], repeats: int, scale: float) -> None:
    try:
        device = open_device()
    except DeviceError as error:
        raise click.ClickException(str(error)) from error
    started, wrong = time.perf_counter(), []
    chosen = tuple(map(sizes_of, config))
    for f in factors:
        configs = candidates(f, device.spec, chosen)
        compile_ahead(device, configs)
        click.echo(f"-- f = {f}: {len(configs)} programs; {time.perf_counter() - started:.0f} s since the start")
        for count in rows:
            problem = Problem.draw(device, f, count, max(1, int(USERS * scale)), max(1, int(LONGEST * scale)))
            wrong += run(device, problem, configs, repeats)
    click.echo(f"-- {time.perf_counter() - started:.0f} s")
    if wrong:
        raise SystemExit("\n".join(["", "wrong answers:", *wrong]))


if __name__ == "__main__":
    main()
