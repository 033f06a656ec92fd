"""Rates of reductions between GPUs by the ways in which they can be computed, alone and beside kernels (cuMF 4.2).

    python bench/reductions.py                     1 GB of partial sums on each of 2, 3, 4 GPUs, as far as there are
    python bench/reductions.py --gpus 4 --rows 4000000

Each GPU has partial sums of all rows and gets the sums of its own, as in a half sweep whose fixed side is split. Ways:

- "copies, one pair": GPU 0 copies a part to GPU 1, the others are idle; "copies, all pairs": every GPU copies a part to
  every other one at the same time. Without NCCL and without additions: what the links can do.
- "reduce-scatter": one call of NCCL, for equal parts; "reduces": a group of one reduction to each GPU, as fits call
  NCCL for parts of different sizes; "exchange": every part is sent to its owner, who adds them (`ordered`).
- "to one GPU": all sums on GPU 0 (the baseline of cuMF); "all-gather": the reverse of a reduce-scatter.

A rate is the bytes that a GPU must send, divided by the time of the slowest GPU. Each way is timed on idle GPUs, then
beside matrix products that occupy all multiprocessors, as the kernels of the next sums do. `links` are the bytes that
each link of GPU 0 has sent and received meanwhile, from the driver's counters, where it has any.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np
from common import median, record

from hybridmf.device.cuda import device_count, open_device
from hybridmf.ranks.transport.nccl import NcclCommunicator
from hybridmf.ranks.transport.threads import run_ranks

WIDTH = 5120
"""Floats of a row: the upper triangle of a system of 100 unknowns and its right-hand side, about."""

BUSY = 4096
"""Order of the matrices whose products keep a GPU busy."""

PRODUCTS = 60
"""Products of a measurement, of 2 to 3 ms each."""

REPEATS = 5

Run = Callable[[], Any]


class Ways:
    """The ways of one rank, over arrays of its GPU."""

    def __init__(self, control: Any, rows: int) -> None:
        self.control, self.rank, self.size = control, control.rank, control.size
        self.device = open_device(f"cuda:{self.rank}")
        with self.device.active():
            self.nccl = NcclCommunicator(control, self.rank)
            self.in_order = NcclCommunicator(control.split(0), self.rank, ordered=True)
            self.rows = rows // self.size * self.size
            self.sums = self.device.zeros((self.rows, WIDTH), np.float32)
            self.part = self.device.zeros((self.rows // self.size, WIDTH), np.float32)
            self.factor, self.product = (self.device.zeros((BUSY, BUSY), np.float32) for _ in range(2))
            self.aside: Any = self.device._cupy.cuda.Stream(non_blocking=True)
        self.even = [self.rows // self.size] * self.size
        self.uneven = [self.even[0] + (1 if rank == 0 else -1 if rank == 1 else 0) for rank in range(self.size)]

    def copies(self, targets: dict[tuple[int, int], Any], pairs: list[tuple[int, int]]) -> Run:
        """Copies of a part from this GPU to those that pairs name."""
        own = [pair for pair in pairs if pair[0] == self.rank]

        def run() -> None:
            for pair in own:
                part = self.sums[: self.even[0]]
                self.device.wait(self.device.fetch(targets[pair], part, [self.device.record()]))

        return run

    def all(self, targets: dict[tuple[int, int], Any]) -> dict[str, tuple[Run, float]]:
        """Each way, and the bytes that a GPU must send."""
        part, others = self.part.nbytes, self.size - 1
        pairs = [(a, b) for a in range(self.size) for b in range(self.size) if a != b]
        return {
            "copies, one pair": (self.copies(targets, [(0, 1)]), part),
            "copies, all pairs": (self.copies(targets, pairs), part * others),
            "reduce-scatter": (lambda: self.nccl.reduce_scatter(self.sums, self.even), part * others),
            "reduces": (lambda: self.nccl.reduce_scatter(self.sums, self.uneven), part * others),
            "exchange": (lambda: self.in_order.reduce_scatter(self.sums, self.even), part * others),
            "to one GPU": (
                lambda: self.nccl.reduce_scatter(self.sums, [self.rows] + [0] * others),
                self.sums.nbytes,
            ),
            "all-gather": (lambda: self.nccl.allgatherv(self.part, self.even), part * others),
        }

    def seconds(self, run: Run, busy: bool) -> float:
        """Median time of the slowest GPU."""
        times = []
        for _ in range(REPEATS + 1):
            self.control.barrier()
            with self.device.active():
                started = time.perf_counter()
                if busy:
                    with self._busy() as side:
                        with side:
                            run()
                            done = self.device.record()
                        self.device.health.wait(done)
                else:
                    run()
                    self.device.synchronize()
                spent = np.array([time.perf_counter() - started])
                self.device.synchronize()
            times.append(float(self.control.allgatherv(spent, [1] * self.size).max()))
        return median(times[1:])

    @contextlib.contextmanager
    def _busy(self) -> Iterator[Any]:
        """Launch products for longer than a reduction takes; the context has a stream beside them."""
        import cupy

        for _ in range(PRODUCTS):
            cupy.matmul(self.factor, self.factor, out=self.product)
        yield self.aside


def link_bytes(gpu: int) -> list[tuple[int, int]] | None:
    """Bytes that each link of a GPU has sent and received so far; None without counters."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "nvlink", "-gt", "d", "-i", str(gpu)], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found: dict[int, dict[str, int]] = {}
    for link, way, kilobytes in re.findall(r"Link (\d+): Data (Tx|Rx): (\d+) KiB", text):
        found.setdefault(int(link), {})[way] = int(kilobytes) << 10
    return [(found[link].get("Tx", 0), found[link].get("Rx", 0)) for link in sorted(found)] or None


def measure(control: Any, rows: int, targets: dict[tuple[int, int], Any]) -> list[dict[str, Any]]:
    """The lines of one rank; all ranks have the same."""
    ways = Ways(control, rows)
    for rank in range(control.size):  # memory for what this GPU receives by copies
        if rank != control.rank:
            targets[rank, control.rank] = ways.device.zeros(ways.part.shape, np.float32)
    control.barrier()
    lines = []
    for name, (run, sent) in ways.all(targets).items():
        for busy in (False, True):
            before = link_bytes(0) if control.rank == 0 else None
            seconds = ways.seconds(run, busy)
            after = link_bytes(0) if control.rank == 0 else None
            line = {"bench": "reductions", "gpus": control.size, "gpu": ways.device.spec.name, "way": name}
            line |= {"busy": busy, "bytes": sent, "seconds": seconds, "rate": sent / seconds}
            if before is not None and after is not None:
                line["links"] = [[b[k] - a[k] for k in (0, 1)] for a, b in zip(before, after, strict=True)]
                line["calls"] = REPEATS + 1
            lines.append(line)
    for communicator in (ways.in_order, ways.nccl):
        with ways.device.active():
            communicator.close()
    return lines


@click.command(help=__doc__)
@click.option("--gpus", "counts", multiple=True, type=int, help="Repeat it.  [default: 2, 3, 4 as far as there are]")
@click.option("--rows", type=int, default=50_000, show_default=True, help="Of the partial sums, 20 KB each.")
def main(counts: tuple[int, ...], rows: int) -> None:
    there = device_count()
    for count in [count for count in counts or (2, 3, 4) if count <= there]:
        targets: dict[tuple[int, int], Any] = {}
        lines = run_ranks(count, lambda control: measure(control, rows, targets))[0]  # noqa: B023
        for line in lines:
            links = [f"{(sent + received) / line['calls'] / 1e6:.0f}" for sent, received in line.get("links", [])]
            click.echo(
                f"{count} GPUs, {line['way']:18s} {'beside products' if line['busy'] else 'alone':16s} "
                f"{1e3 * line['seconds']:7.2f} ms, {line['rate'] / 1e9:6.1f} GB/s a GPU"
                + (f"; MB a call by link of GPU 0: {', '.join(links)}" if links else "")
            )
            record("reductions", line)


if __name__ == "__main__":
    main()
