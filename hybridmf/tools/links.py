"""Measures the links of a machine: copies between host and GPUs, and NCCL's collectives between GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from ..device.cuda import Device, open_device
from ..errors import CommunicatorError, DeviceError
from ..plan.machine import LinkRates
from ..ranks.group import open_rank
from ..ranks.transport.threads import ThreadCommunicator, run_ranks

COPY_BYTES, COLLECTIVE_BYTES = 256 << 20, 1 << 30
"""Bytes of arrays, at most an eighth of the free memory: a copy over a PCIe 5 bus, or a collective over NVLink, takes
5 ms."""

WIDTH = 1024
"""Columns of the arrays of collectives."""

COUNTS = (2, 4, 8, 16)
"""Numbers of GPUs for which collectives are measured, if available."""

REPEATS = 4
"""Runs of a measurement; the fastest counts."""

clock = time.perf_counter


def measure_links(names: Sequence[str], links: LinkRates, say: Callable[[str], Any]) -> LinkRates:
    """Measure the links of some GPUs with all of them active, as in a fit; the slowest GPU counts.

    `names`: devices. `links`: constants that are not measured: files, launches, and NCCL with one GPU or if
    it does not work. `say`: called with a description of each measurement.
    """
    say("links: copies between host and GPU")
    copies = run_ranks(len(names), lambda control: _copy_rates(control, open_device(names[control.rank])))
    pinned, fetched, copied = np.min(copies, axis=0).tolist()
    links = replace(links, pinned_bytes=pinned, fetch_bytes=fetched, copy_bytes=copied)
    counts = [count for count in COUNTS if count <= len(names)]
    if counts:
        say(f"links: collectives of {', '.join(map(str, counts))} GPUs")
    reduced = []
    for count in counts:
        try:
            rates = run_ranks(count, lambda control: _collective_rates(control, names[control.rank]))
        except (DeviceError, CommunicatorError) as error:
            say(f"links between GPUs are not measured: {error}")
            return links
        scattered, gathered = np.min(rates, axis=0).tolist()
        reduced.append((float(count), scattered))
        links = replace(links, reduce_scatter=tuple(reduced), all_gather=gathered)
    return links


def _fastest(control: ThreadCommunicator, run: Callable[[], Any], settle: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few runs that all ranks start together."""
    best = math.inf
    for _ in range(REPEATS):
        control.barrier()
        started = clock()
        run()
        settle()
        best = min(best, clock() - started)
    return best


def _copy_rates(control: ThreadCommunicator, device: Device) -> tuple[float, float, float]:
    """Bytes/s from page-locked memory to the device, back, and within it (read and written)."""
    host = np.ones(min(COPY_BYTES, device.free_bytes() // 8) // 4, np.float32)
    with device.active():
        copier = device.copier()
        copier.pin(host)
        array, other = device.empty(len(host), np.float32), device.zeros(len(host), np.float32)
        device.synchronize()

        def copy() -> None:
            other[...] = array

        to_device = _fastest(control, lambda: copier.copy(array, host), copier.synchronize)
        to_host = _fastest(control, lambda: copier.fetch(host, array), copier.synchronize)
        within = _fastest(control, copy, device.synchronize)
    return host.nbytes / to_device, host.nbytes / to_host, 2 * host.nbytes / within


def _collective_rates(control: ThreadCommunicator, name: str) -> tuple[float, float]:
    """Bytes/s that a GPU sends in a reduce-scatter, and receives in an all-gather."""
    communicator, device = open_rank(name, control)
    assert device is not None
    with closing(communicator), device.active():
        count = control.size
        rows = max(1, min(COLLECTIVE_BYTES, device.free_bytes() // 8) // (4 * WIDTH * count))
        counts, moved = [rows] * count, 4 * WIDTH * rows * (count - 1)
        whole, part = (device.zeros((n, WIDTH), np.float32) for n in (rows * count, rows))
        scattered = _fastest(control, lambda: communicator.reduce_scatter(whole, counts), device.synchronize)
        gathered = _fastest(control, lambda: communicator.allgatherv(part, counts), device.synchronize)
        return moved / scattered, moved / gathered
