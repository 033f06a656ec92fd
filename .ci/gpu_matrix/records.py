"""Fragments, one JSON file for each part that ran, and the record that they add up to."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = "not run"
TOOLS = ("memcheck", "racecheck", "initcheck")
PARTS = {("matrix", False): "matrix", ("netflix", False): "netflix", ("matrix", True): "delays",
         ("netflix", True): "netflix-delays"}  # fmt: skip
"""Names of parts, by the set of cases and whether there are delays."""


class Stale(Exception):
    """Fragments of other kernels."""


def cuda_sha256() -> str:
    """Hash of the files in cuda/, in the order of their names."""
    files = sorted((ROOT / "cuda").iterdir(), key=lambda path: path.name.encode())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files if path.is_file())).hexdigest()


def stamp() -> dict[str, Any]:
    """Where and with which kernels a part ran."""
    import cupy

    from hybridmf.device.cuda import open_device

    return {
        "date": datetime.date.today().isoformat(),
        "device": open_device().spec.name,
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "cuda_sha256": cuda_sha256(),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file at once, for readers at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def read_fragments(paths: Iterable[Path], sha256: str) -> list[dict[str, Any]]:
    """The fragments of these kernels.

    Raises
    ------
    Stale
        A fragment is of others.
    """
    found = {path: json.loads(path.read_text()) for path in paths}
    stale = [str(path) for path, fragment in found.items() if fragment["cuda_sha256"] != sha256]
    if stale:
        raise Stale(f"the kernels have changed since these parts ran: {', '.join(stale)}; run them again")
    return list(found.values())


def drop_stale(folder: Path, sha256: str) -> list[Path]:
    """Delete the fragments of other kernels from a folder; which ones."""
    stale = [path for path in sorted(folder.glob("*.json")) if json.loads(path.read_text())["cuda_sha256"] != sha256]
    for path in stale:
        path.unlink()
    return stale


def assemble(fragments: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of some parts; of the others it says that they did not run."""
    if not fragments:
        raise ValueError("no fragments: nothing has run")
    by_part = {fragment["part"]: fragment for fragment in fragments}
    tests, tools = by_part.get("tests", {}), by_part.get("sanitizers", {})
    record = {
        "date": max(fragment["date"] for fragment in fragments),
        **{key: _joined(fragments, key) for key in ("device", "cuda", "cupy")},
        "pytest": tests.get("pytest", NOT_RUN),
        "lost_gpu": tests.get("lost_gpu", NOT_RUN),
        "several_gpus": tests.get("several_gpus", NOT_RUN),
        "sanitizer": {tool: tools.get("sanitizer", {}).get(tool, NOT_RUN) for tool in TOOLS},
        "cuda_sha256": fragments[0]["cuda_sha256"],
    }
    for name in PARTS.values():
        parts = [fragment for fragment in fragments if fragment.get("set") == name]
        record[name.replace("-", "_")] = _summary(parts) if parts else NOT_RUN
    return record


def _joined(fragments: list[dict[str, Any]], key: str) -> Any:
    """The value that all fragments have; if they differ, all values."""
    values = list(dict.fromkeys(fragment[key] for fragment in fragments))
    return values[0] if len(values) == 1 else ", ".join(map(str, values))


def _summary(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Cases that ran, ranks by the rest of the name, with the worst figure of the check; failures; what did not run."""
    cases: dict[str, dict[str, Any]] = {}
    for part in parts:  # a case that ran in one part and not in another ran
        cases |= {name: case for name, case in part["cases"].items() if name not in cases or case["status"] != NOT_RUN}
    ran = {name: case for name, case in cases.items() if case["status"] != NOT_RUN}
    good = {name: case for name, case in ran.items() if case["status"] == "ok"}
    missing = sorted(_parts_expected(parts) - {part["part"] for part in parts})
    return {
        "cases": len(ran),
        "processes": parts[0].get("processes"),
        "fits": parts[0].get("fits"),
        "failed": [f"{name}: {case['status']}: {case['detail']}" for name, case in ran.items() if name not in good],
        "not_run": [*_by_label(cases.keys() - ran.keys()), *(f"part {part}" for part in missing)],
        "passed": _by_label(good, good),
        "seconds": round(sum(part["seconds"] for part in parts)),
    }


def _parts_expected(parts: list[dict[str, Any]]) -> set[str]:
    """Names of all parts of the sets, by the division of those that ran, if all have the same."""
    divisions = {part["parts"] for part in parts}
    if len(divisions) > 1 or divisions == {1}:
        return set()
    (division,) = divisions
    return {f"{parts[0]['set']}:{number}/{division}" for number in range(1, division + 1)}


def _by_label(names: Iterable[str], cases: dict[str, Any] | None = None) -> list[str]:
    """One line for all ranks of a label, and the largest figure of their checks."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = re.fullmatch(r"(.*) f=(\d+)", name)
        label, rank = (match[1], int(match[2])) if match else (name, 0)
        found.setdefault(label, []).append((rank, name))
    lines = []
    for label, ranks in sorted(found.items()):
        figures = [cases[name]["figure"] for _, name in ranks if cases and "figure" in cases[name]]
        worst = f" (at most {max(figures):.2g})" if figures else ""
        lines.append(f"{label}: {' '.join(str(rank) for rank, _ in sorted(ranks))}{worst}")
    return lines
