"""Kernels of emulator/samples.cu, right and wrong, and what finds the faults of the wrong ones.

As a script, runs all of them under ThreadSanitizer: ``python -m support.known_races`` in `support.races.command`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridmf.gpu.launch import kernel_folder
from support.emulated import EmulatedDevice

SAMPLES = Path(__file__).parent / "emulator" / "samples.cu"

CHUNKS = 40
ROUNDS = 6
THREADS = 256

SQUARES = sum(k * k for k in range(CHUNKS))


@dataclass(frozen=True)
class Sample:
    """A kernel of samples.cu.

    Attributes
    ----------
    fault : str
        The fault of the wrong one.
    by_schedule, by_races : bool
        Whether random schedules give wrong answers or a deadlock, and whether ThreadSanitizer reports it.
    launch : callable
        Runs a kernel on a device; returns whether the answer is right.
    """

    fault: str
    by_schedule: bool
    by_races: bool
    launch: Callable[[EmulatedDevice, Callable[..., None]], bool]


def _chunks(device: EmulatedDevice, kernel: Callable[..., None]) -> bool:
    out = device.zeros(THREADS // 2, np.int64)
    kernel((1,), (THREADS,), (out, np.int32(CHUNKS)), 0)
    return bool((out == SQUARES).all())


def _exchange(device: EmulatedDevice, kernel: Callable[..., None]) -> bool:
    out = device.zeros(THREADS, np.int64)
    kernel((1,), (THREADS,), (out, np.int32(ROUNDS)), 0)
    return bool((out == np.arange(THREADS)).all())


def _copies(device: EmulatedDevice, kernel: Callable[..., None]) -> bool:
    rows = np.arange(4 * ROUNDS * THREADS, dtype=np.int32).reshape(ROUNDS, THREADS, 4)
    out, given = device.zeros(THREADS, np.int64), device.upload(rows)
    kernel((1,), (THREADS,), (out, given, np.int32(ROUNDS)), 0)
    right = np.arange(1, ROUNDS + 1) @ rows[:, :, 0].astype(np.int64)
    return bool((out == right).all() or (out == right[::-1]).all())


def _products(device: EmulatedDevice, kernel: Callable[..., None]) -> bool:
    out = device.zeros(32, np.int64)
    kernel((1,), (64,), (out, np.int32(CHUNKS)), 0)
    return bool((out == sum((k + 1) * k for k in range(CHUNKS))).all())


def _flag(device: EmulatedDevice, kernel: Callable[..., None]) -> bool:
    out, value, ready = device.zeros(1, np.int64), device.zeros(1, np.int32), device.zeros(1, np.int32)
    kernel((2,), (32,), (out, value, ready), 0)
    return bool(out[0] == 42)


def _total(device: EmulatedDevice, kernel: Callable[..., None]) -> bool:
    out, total = device.zeros(1, np.int64), device.zeros(1, np.int32)
    kernel((2,), (32,), (out, total), 0)
    return bool(total[0] == 64)


KNOWN = {
    "named_barriers": Sample("six buffers, four fetching warps, a pair of named barriers each", True, False, _chunks),
    "phases": Sample("more fetching warps than buffers, mbarriers with parity", True, True, _chunks),
    "warp_exchange": Sample("a missing __syncwarp", True, True, _exchange),
    "shuffled_exchange": Sample("a shuffle in place of __syncwarp", False, True, _exchange),
    "block_exchange": Sample("a missing __syncthreads", True, True, _exchange),
    "copies": Sample("a wait for one copy group too few", True, True, _copies),
    "shared_copies": Sample("copies waited for behind the barrier", True, True, _copies),
    "products": Sample("a buffer freed before the products that read it", True, True, _products),
    "flag": Sample("a flag without a fence", False, True, _flag),
    "total": Sample("an addition that is not atomic", False, True, _total),
    "exempt_total": Sample("the same in a function that is exempt", False, False, _total),
}


def source() -> str:
    """The text of samples.cu with its header."""
    common = (kernel_folder() / "common.cuh").read_text().replace("#pragma once", "")
    return SAMPLES.read_text().replace('#include "common.cuh"', common)


def is_right(name: str, broken: bool, seed: int) -> bool:
    """Whether a kernel gives the right answer in the schedule of a seed."""
    device = EmulatedDevice(seed=seed)
    kernel = device.kernel(source(), name, (f"BROKEN={int(broken)}",))
    try:
        return KNOWN[name].launch(device, kernel)
    except RuntimeError as error:
        if "emulator" not in str(error):
            raise
        return False  # a deadlock


def main(broken: bool, seeds: int) -> None:
    """Run all kernels; ThreadSanitizer's reports between the lines tell of which one they are."""
    for name in KNOWN:
        for seed in range(seeds):
            sys.stderr.write(f"sample {name}\n")
            is_right(name, broken, seed)


if __name__ == "__main__":
    main(bool(int(sys.argv[1])), int(sys.argv[2]))
