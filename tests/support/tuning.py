"""Tables, entries and recorded lines of the tuner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridmf.device.cuda import DeviceSpec
from hybridmf.gpu.tuning.trials import Sample
from hybridmf.plan.tables import Entry, Gpu, Table

GIB = 1 << 30
H200 = DeviceSpec("NVIDIA H200", 0, (9, 0), 132, 227 << 10, 60 << 20, 141 * GIB, 140 * GIB)

SAMPLE = Sample.draw(60, 40, 700)


def table(entries: list[Entry], spec: DeviceSpec = H200, **changes: Any) -> Table:
    return replace(Table(Gpu.of(spec), tuple(entries)), **changes)


def entry(kernel: str = "sparse_syrk", facts: dict[str, Any] | None = None, **config: int) -> Entry:
    return Entry(kernel, facts or {"rank": 64, "itemsize": 4}, config or SYRK, 1.0, 1.5, 9)


SYRK = {"nb": 32, "kb": 16, "dx": 4, "dy": 4, "dz": 2, "stages": 2, "unroll": 1, "blocks_per_sm": 4}
OTHER = SYRK | {"kb": 32}

FACTS = {"rank": 64, "itemsize": 4}


def cloud_line(factors: int, nb: int, user: float, winner: bool = False, **changes: Any) -> dict[str, Any]:
    line = {"bench": "tune", "kernel": "sparse_syrk", "factors": factors, "facts": {"rank": factors, "itemsize": 4}}
    line |= {"config": {"nb": nb, "kb": 8}, "winner": winner, "status": "timed"}
    return line | {"gflops": {"user": user, "item": 2 * user}} | changes
