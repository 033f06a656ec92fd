"""Measuring links, on emulated devices whose copies and collectives take a known time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.errors import DeviceError
from hybridmf.plan import machine as machines
from hybridmf.plan.machine import LinkRates, Machine
from hybridmf.tools import calibrate as _calibrate
from support.cost_model import H200, plan_of
from support.emulated import EmulatedCopier, EmulatedDevice

FETCHED, GATHERED = 2.0, 0.5
"""Rates relative to that of uploads, and of an all-gather relative to that of a reduce-scatter."""


class Clock(threading.local):
    """The time of each rank."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedCopier(EmulatedCopier):
    def __init__(self, clock: Clock, rate: float) -> None:
        self.clock, self.rate = clock, rate

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        super().copy(target, source)
        self.clock.now += source.nbytes / self.rate

    def fetch(self, target: np.ndarray, source: np.ndarray) -> None:
        super().fetch(target, source)
        self.clock.now += source.nbytes / (FETCHED * self.rate)


class TimedArray(np.ndarray):
    """Writing to it takes time."""

    clock: Clock

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.clock.now += 2 * self.nbytes / 1e12


class TimedDevice(EmulatedDevice):
    def __init__(self, clock: Clock, rate: float) -> None:
        super().__init__(memory_bytes=1 << 20)
        self.clock, self.rate = clock, rate

    def copier(self) -> EmulatedCopier:
        return TimedCopier(self.clock, self.rate)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        array = super().zeros(shape, dtype).view(TimedArray)
        array.clock = self.clock
        return array


class TimedCommunicator:
    """Collectives at a rate."""

    def __init__(self, control: Any, clock: Clock, rate: float) -> None:
        self.control, self.clock, self.rate, self.closed = control, clock, rate, False

    def reduce_scatter(self, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        self.clock.now += array.nbytes * (1 - 1 / len(counts)) / self.rate
        return array

    def allgatherv(self, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        self.clock.now += array.nbytes * (len(counts) - 1) / (GATHERED * self.rate)
        return array

    def close(self) -> None:
        self.control.barrier()
        self.closed = True


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], LinkRates]:
    """``timed(rates)``: measure the links of as many GPUs with these rates."""

    def measure(rates: Sequence[float]) -> LinkRates:
        clock = Clock()
        monkeypatch.setattr(_calibrate, "clock", clock)
        names = [f"cuda:{index}" for index in range(len(rates))]
        devices = {name: TimedDevice(clock, rate) for name, rate in zip(names, rates, strict=True)}
        monkeypatch.setattr(_calibrate, "open_device", devices.__getitem__)
        communicators: list[TimedCommunicator] = []

        def open_rank(name: str, control: Any) -> Any:
            communicators.append(TimedCommunicator(control, clock, devices[name].rate / control.size))
            return communicators[-1], devices[name]

        monkeypatch.setattr(_calibrate, "open_rank", open_rank)
        found = _calibrate.measure_links(names, LinkRates(), lambda text: None)
        assert all(one.closed for one in communicators)
        return found

    return measure


def test_one_gpu_has_copies_and_the_known_collectives(timed: Any) -> None:
    found = timed([1e9])
    assert (found.pinned_bytes, found.fetch_bytes, found.copy_bytes) == pytest.approx((1e9, 2e9, 1e12))
    assert (found.reduce_scatter, found.all_gather) == (LinkRates.reduce_scatter, LinkRates.all_gather)


def test_the_slowest_of_several_gpus_counts(timed: Any) -> None:
    found = timed([4e9, 1e9, 4e9, 4e9])
    assert found.pinned_bytes == pytest.approx(1e9)
    assert found.reduce_scatter == (pytest.approx((2.0, 5e8)), pytest.approx((4.0, 2.5e8)))
    assert found.all_gather == pytest.approx(GATHERED * 2.5e8)
    kept = ("disk_bytes", "collective", "rank", "slab")
    assert all(getattr(found, name) == getattr(LinkRates, name) for name in kept)


def test_without_nccl_the_collectives_stay_as_they_are(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, control: Any) -> Any:
        raise DeviceError("there is no NCCL")

    timed([1e9, 1e9])
    monkeypatch.setattr(_calibrate, "open_rank", none)
    said: list[str] = []
    found = _calibrate.measure_links(["cuda:0", "cuda:1"], LinkRates(), said.append)
    copies = {name: getattr(found, name) for name in ("pinned_bytes", "fetch_bytes", "copy_bytes")}
    assert found == replace(LinkRates(), **copies) and copies["pinned_bytes"] == pytest.approx(1e9)
    assert said[-1] == "links between GPUs are not measured: there is no NCCL"


@pytest.mark.usefixtures("own_cache")
def test_a_measured_link_changes_a_plan() -> None:
    """Ratings come to a small GPU over the bus: where that is slow, the CPU takes less time."""
    small = replace(H200, memory_bytes=1 << 30, free_bytes=1 << 30)
    model = hmf.ExplicitALS(64, biases=False, iterations=100)
    sizes = {"shape": (480_189, 17_770), "nnz": 99_072_112}
    before = plan_of(model, small, **sizes)
    assert (before.device, before.streamed) == ("cuda:0", "host")
    machines.save(Machine(links=replace(LinkRates(), pinned_bytes=1e7), gpu_name=small.name), {"name": small.name})
    assert plan_of(model, small, **sizes).device == "cpu"


@pytest.mark.usefixtures("own_cache")
def test_a_slow_way_back_costs_where_factors_are_offloaded() -> None:
    def iteration() -> float:
        return hmf.plan(shape=(10**9, 10**6), nnz=10**11, factors=100, gpus=1, gpu_memory="80GB").seconds

    before = iteration()
    machines.save(Machine(links=replace(LinkRates(), fetch_bytes=5.5e8), gpu_name=H200.name), {"name": H200.name})
    assert iteration() > 2 * before
