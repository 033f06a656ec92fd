"""Plans on pretended GPUs, and the recorded measurements that the cost model is compared with."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

import hybridmf as hmf
from hybridmf.device.cuda import DeviceSpec
from hybridmf.plan import dispatch
from hybridmf.plan import machine as _machine
from hybridmf.plan.als_gpu import plan_on_h200s
from hybridmf.plan.cost import Warmth
from hybridmf.plan.machine import CpuRates, GpuRates, LinkRates, Machine
from hybridmf.plan.make import undecided
from hybridmf.plan.types import DegreeFacts, Plan
from support.checkout import ROOT

GIB = 1 << 30
H200 = DeviceSpec("NVIDIA H200", 0, (9, 0), 132, 227 * 1024, 60 << 20, 141 * GIB, 140 * GIB)

WARM = Warmth(started=True, compiled=True)
LOADED = Warmth(started=True, compiled=True, loaded=True)
NETFLIX = {"shape": (480_189, 17_770), "nnz": 99_072_112}


def built_in(instruction_set: str = "avx512") -> Machine:
    """Built-in constants of the processors whose measurements are recorded, whatever runs this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_machine._als, "instruction_set", lambda: instruction_set)
        return _machine.built_in()


def plan_of(model: Any, spec: DeviceSpec | None = None, **sizes: Any) -> Any:
    """The plan of a fit, with a GPU of ours or none."""
    reason = "pretended" if spec else "no GPU: pretended"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "find_gpu", lambda device: (None if device == "cpu" else spec, reason))
        return hmf.plan(model=model, **sizes)


def kernels_of(
    shape: tuple[int, int],
    nnz: int,
    factors: int,
    dtype: str = "float32",
    longest: tuple[int, int] = (0, 0),
    **more: Any,
) -> Plan:
    """The plan for H200s of which partitions are made: explicit feedback in the primal form."""
    model = hmf.ExplicitALS(factors, biases=False, dtype=dtype, row_form="primal")
    objective, settings = model._objective(), model._settings()
    plan = plan_on_h200s(undecided(objective, settings, shape, nnz), settings, objective, 1)
    return plan.changed(facts=DegreeFacts(*longest), **more)


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "bench" / "results" / f"{name}.jsonl").read_text().splitlines()]


def load_bench() -> Any:
    folder = str(ROOT / "bench")
    sys.path.insert(0, folder)
    try:
        return __import__("dispatch")
    finally:
        sys.path.remove(folder)
        sys.modules.pop("dispatch", None)


# ------------------------------------------------------------------------------------------------ measured constants


def measured() -> Machine:
    rates = replace(CpuRates(), serial=0.125), replace(GpuRates(), start=2.5), replace(LinkRates(), pinned_bytes=1e10)
    return Machine(*rates, source="measured on a day", gpu_name="Some GPU")
