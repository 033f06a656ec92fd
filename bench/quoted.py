"""Figures of other code that was measured once, outside of these scripts: bench/results/quoted.jsonl.

The kernels of cuMF, BALS, Gates (as published with BALS) and cuMF_SGD exist as source only, so no script runs them
beside ours. A line has `kind` "quoted" and all that is known: the source with its commit, the settings, how the time
was taken, the GPU and the versions. Pages show these figures in italics; no headline and no ratio uses them, because a
ratio needs one run. `python bench/quoted.py` writes docs/evidence/quoted.md.
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


PAGE = freshness.ROOT / "docs" / "evidence" / "quoted.md"


def render() -> None:
    """Write the table of docs/evidence/quoted.md, and what is known about each source."""
    from paper_common import fill, table

    rows, sources = [], dict[str, list[Line]]()
    for line in lines():
        what = f"{line['task']}, {line['shape']}" + (", by degree" if line.get("order") == "by degree" else "")
        rows.append([line["rival"], what, line["factors"], line["settings"], f"{figure(line)} {line['unit']}"])
        sources.setdefault(provenance(line), []).append(line)
    known = [f"- {', '.join(dict.fromkeys(line['rival'] for line in group))}: {text}." for text, group in
             sources.items()]  # fmt: skip
    figures = table(["code", "what", "f", "settings", "quoted"], rows)
    fill(PAGE, {"quoted": figures, "sources": "\n".join(known)})


def provenance(line: Line) -> str:
    """What is known about the measurement of a figure."""
    gpu = line["gpu"]
    versions = [f"{name} {gpu[key]}" for name, key in (("driver", "driver"), ("CUDA", "cuda"), ("CuPy", "cupy"))
                if key in gpu]  # fmt: skip
    return "; ".join([line["source"], line["how"], ", ".join([gpu["name"], *versions]), line["date"],
                      line["repeatable"]])  # fmt: skip


if __name__ == "__main__":
    render()
