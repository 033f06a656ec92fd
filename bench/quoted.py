"""Figures of other code that was measured once, outside of these scripts: bench/results/quoted.jsonl.

The kernels of cuMF, BALS, Gates (as published with BALS) and cuMF_SGD exist as source only, so no script runs them
beside ours. A line has `kind` "quoted" and all that is known: the source with its commit, the settings, how the time
was taken, the GPU and the versions. Pages render these figures in italics, as quoted; no headline and no ratio uses
them, because ratios need the same run.
"""

from __future__ import annotations

import json
from typing import Any

import freshness

Line = dict[str, Any]


def lines(**where: Any) -> list[Line]:
    """Quoted lines with these fields.

    Raises
    ------
    LookupError
        There is none.
    """
    path = freshness.RESULTS / "quoted.jsonl"
    found = [json.loads(text) for text in path.read_text().splitlines() if text]
    kept = [line for line in found if all(line.get(key) == value for key, value in where.items())]
    if not kept:
        raise LookupError(f"bench/results/quoted.jsonl has no line with {where}")
    return kept


def figure(line: Line) -> str:
    """A quoted figure as pages show it, such as *250*."""
    value = line["value"]
    return f"*{value:,}*"


def provenance(line: Line) -> str:
    """Where a figure comes from, in one sentence without its end."""
    gpu = line["gpu"]
    versions = [f"{name} {gpu[key]}" for name, key in (("driver", "driver"), ("CUDA", "cuda"), ("CuPy", "cupy"))
                if key in gpu]  # fmt: skip
    return ", ".join([line["source"], line["settings"], line["how"], gpu["name"], *versions, line["date"]])
