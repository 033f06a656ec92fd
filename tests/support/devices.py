"""Devices that tests run on, in place of the one that ``device="cuda"`` means, and specifications of GPUs."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from hybridmf.core.objective import Objective
from hybridmf.device import cuda
from hybridmf.device.cuda import DeviceSpec
from hybridmf.errors import DeviceError, DeviceMemoryError
from hybridmf.plan import types
from hybridmf.plan.als import ALS
from hybridmf.plan.als_gpu import gpu_plan
from hybridmf.plan.make import make_plan
from hybridmf.plan.types import DegreeFacts, Settings
from support import emulated


def open_or_skip(name: str) -> Any:
    """The emulated device, or the GPU; the test is skipped where there is none."""
    if name == "emulated":
        if emulated.compiler() is None:
            pytest.skip("no C++ compiler to run kernels on the CPU with")
        return emulated.EmulatedDevice()
    try:
        return cuda.open_device()
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")


on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
"""For problems too large to emulate."""


def serve_cuda(device, monkeypatch):
    """Make ``device="cuda"`` mean `device`."""
    if device.spec.name == "emulated":
        monkeypatch.setattr("hybridmf.device.cuda.open_device", lambda name="cuda": device)
    return device


def limit_memory(device, monkeypatch, largest: int) -> None:
    """Let allocations of more than `largest` bytes fail from here on, as where other programs hold the memory."""

    def limited(original):
        def allocate(shape, dtype):
            if np.prod(shape) * np.dtype(dtype).itemsize > largest:
                raise DeviceMemoryError(f"{device.spec.name} is out of memory")
            return original(shape, dtype)

        return allocate

    for name in ("empty", "zeros"):
        monkeypatch.setattr(device, name, limited(getattr(device, name)))


GIB = 1 << 30
SPECS = {
    75: DeviceSpec("T4", 0, (7, 5), 40, 64 * 1024, 4 << 20, 16 * GIB, 15 * GIB),
    80: DeviceSpec("A100", 0, (8, 0), 108, 163 * 1024, 40 << 20, 80 * GIB, 79 * GIB),
    86: DeviceSpec("A40", 0, (8, 6), 84, 99 * 1024, 6 << 20, 48 * GIB, 47 * GIB),
    90: DeviceSpec("H200", 0, (9, 0), 132, 227 * 1024, 60 << 20, 141 * GIB, 140 * GIB),
    100: DeviceSpec("B200", 0, (10, 0), 148, 227 * 1024, 126 << 20, 180 * GIB, 179 * GIB),
    120: DeviceSpec("RTX PRO 6000", 0, (12, 0), 188, 99 * 1024, 128 << 20, 96 * GIB, 95 * GIB),
}
"""What the launchers ask of one GPU of each architecture, by compute capability."""

NETFLIX = ((480_189, 17_770), 99_072_112)


def plan_of(free: int, slab: int | None = None, facts: DegreeFacts | None = None, **options: Any) -> types.Plan:
    spec = DeviceSpec("H200", 0, (9, 0), 132, 227 * 1024, 60 << 20, 141 << 30, free)
    settings = Settings.check(
        **({"factors": 64, "dtype": "float32", "num_threads": 1, "device": "cuda", "method": ALS} | options)
    )
    objective = Objective.implicit(0.1, "none", 1.0, 1.0)
    base = make_plan(
        objective,
        Settings.check(factors=64, dtype="float32", num_threads=1, device="cpu", method=ALS),
        *NETFLIX,
        slab=slab,
    )
    base = base.changed(
        dual_sides=(), assembly=settings.assembly, reorder="none" if slab else settings.reorder, facts=facts
    )
    return gpu_plan(base.changed(solver=settings.planned_solver, notes=()), settings, objective, spec)


class Tracked:
    """Bytes of a device's arrays that are alive, and the most there were."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = self.peak = 0
        original = device.empty

        def empty(shape: Any, dtype: Any) -> np.ndarray:
            array: np.ndarray = original(shape, dtype)
            owner: Any = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            self.alive += array.nbytes
            self.peak = max(self.peak, self.alive)
            weakref.finalize(owner, self._gone, array.nbytes)
            return array

        monkeypatch.setattr(device, "empty", empty)

    def _gone(self, size: int) -> None:
        self.alive -= size
