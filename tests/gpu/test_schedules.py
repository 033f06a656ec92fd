"""Answers of kernels do not depend on the schedule of their threads, and known faults of synchronization are found."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from hybridmf.device import cuda
from support import emulated, known_races, races
from support.emulated import EmulatedDevice
from support.kernel_cases import BY_DESIGN, CASES
from support.known_races import KNOWN
from support.marks import exhaustive

if emulated.compiler() is None:
    pytest.skip("no C++ compiler to run kernels on the CPU with", allow_module_level=True)

USUAL = ("warpgroups", "top-5-filtered", "pieces", "systems-20", "sgd-msgd-33-mixed-float32-biases")
"""Starts of the names of cases for every run; all others take minutes, mostly to compile."""

SEEDS = 40

needs_detector = pytest.mark.skipif(races.library() is None, reason="no ThreadSanitizer of gcc")


def usual(name: str) -> bool:
    return name.startswith(USUAL)


def bits_of(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    device = EmulatedDevice(seed=seed, multiprocessors=1)
    monkeypatch.setattr(cuda, "open_device", lambda name="cuda": device)
    return [np.ascontiguousarray(array).tobytes() for array in CASES[name]()]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (name, seed) if usual(name) and seed < 3 else exhaustive(name, seed)
        for name in CASES
        if not name.startswith(BY_DESIGN)
        for seed in (1, 2, 3, 4)
    ],
)
def test_schedules_change_no_bits(name, seed, monkeypatch):
    assert bits_of(name, seed, monkeypatch) == bits_of(name, 0, monkeypatch)


@pytest.mark.parametrize("name", KNOWN)
def test_right_samples_are_right_in_every_schedule(name):
    assert all(known_races.is_right(name, broken=False, seed=seed) for seed in range(SEEDS))


@pytest.mark.parametrize("name", KNOWN)
def test_schedules_find_faults(name):
    answers = [known_races.is_right(name, broken=True, seed=seed) for seed in range(SEEDS)]
    assert all(answers) != KNOWN[name].by_schedule


def test_a_deadlock_is_an_error():
    source = """
    extern "C" __global__ void stuck(int* out) {
        if (threadIdx.x < 32) emulator::arrive(1, 64, true);
        out[threadIdx.x] = 1;
    }
    """
    device = EmulatedDevice()
    with pytest.raises(RuntimeError, match=r"emulator, stuck: deadlock: all threads of block 0 wait"):
        device.kernel(source, "stuck", ())((1,), (64,), (device.zeros(64, np.int32),), 0)


def test_a_seed_repeats_its_schedule():
    source = """
    extern "C" __global__ void order(int* out, int* next) { out[atomicAdd(next, 1)] = threadIdx.x; }
    """

    def order(seed: int) -> list[int]:
        device = EmulatedDevice(seed=seed)
        out = device.zeros(64, np.int32)
        device.kernel(source, "order", ())((1,), (64,), (out, device.zeros(1, np.int32)), 0)
        return list(out)

    assert order(0) == list(range(64))
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(64))


def reports(broken: bool) -> set[str]:
    """Samples of which ThreadSanitizer reports a race."""
    started, environment = races.command(["-m", "support.known_races", str(int(broken)), "4"])
    done = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=300)
    assert "sample exempt_total" in done.stderr, done.stderr[-2000:]
    found, name = set(), ""
    for line in done.stderr.splitlines():
        sample = re.match(r"sample (\w+)", line)
        name = sample[1] if sample else name
        if "WARNING: ThreadSanitizer: data race" in line:
            found.add(name)
    assert bool(done.returncode) == bool(found)
    return found


@pytest.mark.exhaustive
@needs_detector
def test_races_are_found_without_an_unlucky_schedule():
    assert reports(broken=True) == {name for name, sample in KNOWN.items() if sample.by_races}


@pytest.mark.exhaustive
@needs_detector
def test_right_samples_have_no_races():
    assert reports(broken=False) == set()
