"""Which sources the lines of bench/results/ depend on, and which lines are older than these sources.

    python bench/freshness.py            how many lines of each file and task are fresh, and why others are not
    python bench/freshness.py --changed  also the sources that changed since the commit of the newest line

`CODE` declares the code path of each script: the library's files that decide its figures and the generators of its
data. Every line carries the hash of these files (`code_sha256`) and whether they were committed (`clean`). A line is
fresh while the hash is that of the tree. The scripts themselves are not part of it, because they also render pages.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"

Line = Mapping[str, Any]
Patterns = tuple[str, ...]

# ------------------------------------------------------------------------------------------ code paths

KERNELS_CPU: Patterns = ("hybridmf/native/_kernels.p*", "hybridmf/native/kernels*")

ALS_CPU: Patterns = (*KERNELS_CPU, "hybridmf/native/_als.pyx", "hybridmf/cpu/als.py", "hybridmf/plan/als.py",
                     "hybridmf/plan/row_forms.py", "hybridmf/core/balance.py")  # fmt: skip

SGD_CPU: Patterns = (*KERNELS_CPU, "hybridmf/native/_sgd.pyx", "hybridmf/native/sgd_impl.h", "hybridmf/cpu/sgd.py",
                     "hybridmf/plan/sgd.py", "hybridmf/plan/ordering.py")  # fmt: skip

CCD_CPU: Patterns = ("hybridmf/native/_ccd.pyx", "hybridmf/native/ccd_*", "hybridmf/cpu/ccd.py", "hybridmf/plan/ccd.py")

TOP_K_CPU: Patterns = (*KERNELS_CPU, "hybridmf/native/_topk.pyx", "hybridmf/cpu/topk.py")

TILES: Patterns = ("hybridmf/_formats.pyx", "hybridmf/formats.py")

LAUNCH: Patterns = ("cuda/common.cuh", "cuda/arrays.cu", "hybridmf/gpu/launch.py", "hybridmf/gpu/arrays.py",
                    "hybridmf/device/cuda.py")  # fmt: skip

SYSTEMS_GPU: Patterns = (*LAUNCH, "cuda/tensor.cuh", "cuda/fragments.cuh", "cuda/system.cuh", "cuda/cholesky*.cu",
                         "hybridmf/gpu/systems.py", "hybridmf/gpu/cholesky_any.py")  # fmt: skip

ALS_GPU: Patterns = (
    *SYSTEMS_GPU, "cuda/fused_als.cu", "cuda/warpgroup_sums.cu", "cuda/dual_rows.cu", "cuda/basis.cu", "cuda/gram.cu",
    "cuda/split.cu", "cuda/rows.cu", "cuda/cg_any.cu", "cuda/complete.cu", "hybridmf/gpu/fused.py",
    "hybridmf/gpu/half.py", "hybridmf/gpu/dual.py", "hybridmf/gpu/gram.py", "hybridmf/gpu/rows.py",
    "hybridmf/gpu/subspace.py", "hybridmf/plan/als_gpu.py", "hybridmf/plan/fused.py", "hybridmf/plan/row_forms.py",
)  # fmt: skip

ASSEMBLIES_GPU: Patterns = (
    *LAUNCH, *TILES, "cuda/sparse_syrk*.cu", "cuda/mo_als*.cu", "cuda/bals*.cu", "hybridmf/gpu/sparse_syrk*.py",
    "hybridmf/gpu/mo_als*.py", "hybridmf/gpu/bals*.py", "hybridmf/gpu/assembly.py", "hybridmf/plan/assemblies.py",
)  # fmt: skip
"""The assemblies of Gates, cuMF and BALS."""

SGD_GPU: Patterns = (*LAUNCH, "cuda/sgd.cuh", "cuda/msgd*.cu", "cuda/batch_hogwild.cu", "hybridmf/gpu/sgd*.py",
                     "hybridmf/plan/sgd.py", "hybridmf/plan/ordering.py")  # fmt: skip

CCD_GPU: Patterns = (*LAUNCH, "cuda/ccd.cu", "hybridmf/gpu/ccd.py", "hybridmf/plan/ccd_gpu.py")

TOP_K_GPU: Patterns = (*LAUNCH, "cuda/tensor.cuh", "cuda/top_k.cu", "hybridmf/gpu/topk.py")

SET_UP_GPU: Patterns = ("cuda/transpose.cu", "cuda/draw.cu", "hybridmf/gpu/intake.py", "hybridmf/gpu/matrix.py",
                        "hybridmf/gpu/draw.py", "hybridmf/device/copier.py")  # fmt: skip

STREAMS: Patterns = ("hybridmf/gpu/stream.py", "hybridmf/gpu/offloaded.py", "hybridmf/data/store.py",
                     "hybridmf/data/slabs.py")  # fmt: skip

RANKS: Patterns = ("hybridmf/ranks/*.py", "hybridmf/ranks/transport/*.py")

FITS: Patterns = ("hybridmf/model/fit.py", "hybridmf/model/training.py", "hybridmf/model/loop.py")

PLANNER: Patterns = ("hybridmf/plan/half_sweep.py", "hybridmf/plan/partitions.py", "hybridmf/plan/grid.py",
                     "hybridmf/plan/cost.py", "hybridmf/plan/memory.py", "hybridmf/plan/machine.py")  # fmt: skip

FEATURES: Patterns = ("hybridmf/data/features.py", "hybridmf/core/regression.py")

SHAPES: Patterns = ("hybridmf/datasets.py",)
PUBLISHED: Patterns = (*SHAPES, "bench/published.py")
DRAWN_GPU: Patterns = ("bench/gpu_data.py",)
PUBLISHED_GPU: Patterns = (*PUBLISHED, *DRAWN_GPU)

CODE: dict[str, Patterns | dict[str, Patterns]] = {
    "biases": (*ALS_CPU, *SGD_CPU, *SHAPES),
    "checkpoints": ("hybridmf/model/checkpoint.py", *FITS, *ALS_GPU, *SHAPES),
    "cold": (*ALS_GPU, *TOP_K_GPU, *SET_UP_GPU, *FITS, "hybridmf/device/compiler.py", "hybridmf/search.py", *SHAPES),
    "cpu": {
        "": (*ALS_CPU, *SHAPES),
        "top 10, filtered": (*TOP_K_CPU, *SHAPES),
    },
    "defaults": (*ALS_CPU, *SGD_CPU, *CCD_CPU, *FITS),
    "dispatch": {"": (*ALS_CPU, *ALS_GPU, *SGD_CPU, *SGD_GPU, *CCD_CPU, *CCD_GPU, "hybridmf/plan/cost.py", *SHAPES)},
    "features": {"": (*FITS, *ALS_CPU, *FEATURES), "cuda": (*FITS, *ALS_GPU, *FEATURES, *SHAPES)},
    "fit": {"": (*FITS, *ALS_CPU, *SHAPES), "cuda": (*FITS, *ALS_GPU, *SET_UP_GPU, *SHAPES)},
    "gpu": {
        "": (*ALS_GPU, *DRAWN_GPU),
        "cholesky": SYSTEMS_GPU,
        "syrk": (*ASSEMBLIES_GPU, *DRAWN_GPU),
        "bals": (*ASSEMBLIES_GPU, *DRAWN_GPU),
        "precision": (*ALS_GPU, *ASSEMBLIES_GPU, *DRAWN_GPU),
        "topk": (*TOP_K_GPU, *DRAWN_GPU),
        "set-up": (*SET_UP_GPU, *DRAWN_GPU),
        "sgd": (*SGD_GPU, *DRAWN_GPU),
        "ccd": (*CCD_GPU, *DRAWN_GPU),
    },
    "layouts": {"": TILES, "reorder": (*TILES, *ALS_CPU)},
    "mcumsgd": (
        *SGD_GPU,
        "hybridmf/plan/epochs.py",
        "hybridmf/ranks/mcumsgd.py",
        "hybridmf/ranks/group.py",
        "hybridmf/ranks/transport/peers.py",
        *PUBLISHED_GPU,
    ),
    "out_of_core": {"": (*STREAMS, *ALS_GPU, *SHAPES), "cpu": (*STREAMS, *ALS_CPU, *SHAPES)},
    "paper_bals": {
        "": (*ASSEMBLIES_GPU, *SYSTEMS_GPU, *PUBLISHED_GPU),
        "popularity": PUBLISHED,
        "distribution": PUBLISHED_GPU,
        "vacancies": (*TILES, *PUBLISHED_GPU),
        "methods": (*ASSEMBLIES_GPU, *ALS_GPU, *SGD_GPU, *CCD_GPU, *PUBLISHED_GPU),
        "assemblies": (*ASSEMBLIES_GPU, *ALS_GPU, *PUBLISHED_GPU),
        "cpu": (*ALS_CPU, *TILES, *SGD_CPU, *CCD_CPU, *PUBLISHED),
    },
    "paper_cumf": {
        "": (*ASSEMBLIES_GPU, *SYSTEMS_GPU, *PUBLISHED_GPU),
        "convergence": (*ASSEMBLIES_GPU, *ALS_GPU, *SGD_GPU, *SGD_CPU, *PUBLISHED_GPU),
        "cpu": (*ALS_CPU, *SGD_CPU, *PUBLISHED),
    },
    "paper_gates": {
        "": (*ASSEMBLIES_GPU, *ALS_GPU, *PUBLISHED_GPU),
        "distribution": PUBLISHED_GPU,
        "sparsity": PUBLISHED,
        "cpu": (*ALS_CPU, *PUBLISHED),
    },
    "paper_msgd": {
        "": (*SGD_GPU, *PUBLISHED_GPU),
        "reduction": ("bench/msgd_blocks.cu", *PUBLISHED_GPU),
        "ordering": ("bench/msgd_blocks.cu", *SGD_GPU, *PUBLISHED_GPU),
        "occupancy": ("bench/msgd_blocks.cu", *SGD_GPU),
        "speedup": ("bench/msgd_blocks.cu", *SGD_GPU, *SGD_CPU, *PUBLISHED_GPU),
        "convergence": (*SGD_GPU, *SGD_CPU, *CCD_CPU, *CCD_GPU, *ALS_CPU, *ALS_GPU, *PUBLISHED_GPU),
        "cpu": (*SGD_CPU, *CCD_CPU, *ALS_CPU, *PUBLISHED),
    },
    "quoted": (),
    "reading": ("hybridmf/data/readers.py", "hybridmf/data/text.py", "hybridmf/data/arrow_text.py"),
    "reductions": RANKS,
    "scale": (*RANKS, *ALS_GPU, *PLANNER, *PUBLISHED_GPU),
    "scale_planner": PLANNER,
    "search": ("hybridmf/search.py", *ALS_CPU),
    "serving": ("hybridmf/model/serving.py", "hybridmf/model/requests.py", *TOP_K_CPU),
    "sgd": (*SGD_CPU, *CCD_CPU, *ALS_CPU, *SHAPES),
    "starts": ("hybridmf/plan/start.py", *ALS_CPU, *SGD_CPU, *CCD_CPU),
    "tune": ASSEMBLIES_GPU,
    "tuning": (*ASSEMBLIES_GPU, *PUBLISHED_GPU),
    "walk": (*LAUNCH, "cuda/sgd.cuh", "cuda/msgd*.cu", *PUBLISHED_GPU),
}
"""By file of results: files of the code path. Where tasks or devices differ, by task, else by device, else by ""."""

WHOLE: Patterns = ("hybridmf/**/*.py", "hybridmf/**/*.pyx", "hybridmf/**/*.h", "hybridmf/**/*.c", "cuda/*")
"""The code path of a script that declares none."""


def code_of(file: str, line: Line) -> Patterns:
    """Patterns of the files that the figures of a line depend on."""
    declared = CODE.get(file, WHOLE)
    if isinstance(declared, tuple):
        return declared
    task = str(line.get("task"))
    return declared.get(task) or declared.get(_device(line), declared[""])


def _device(line: Line) -> str:
    device = str(line.get("device", ""))
    return "cuda" if device.startswith("cuda") else device


@functools.cache
def code_sha256(patterns: Patterns) -> str:
    """sha256 of the names and contents of the files of a code path, sorted by name."""
    digest = hashlib.sha256()
    for name in files(patterns):
        content = (ROOT / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def files(patterns: Patterns) -> tuple[str, ...]:
    """Files of a code path, relative to the root, sorted.

    Raises
    ------
    ValueError
        A pattern fits no file: a declaration must follow when files move.
    """
    found: set[str] = set()
    for pattern in patterns:
        paths = [p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern) if p.is_file() and p.suffix != ".so"]
        if not paths:
            raise ValueError(f"bench/freshness.py: {pattern!r} fits no file; mend CODE")
        found.update(paths)
    return tuple(sorted(found))


@functools.cache
def is_clean(patterns: Patterns) -> bool | None:
    """Whether the files of a code path are those of the commit; None outside of a repository."""
    command = ["git", "status", "--porcelain", "--", *files(patterns)]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # git is not installed
        return None
    return None if run.returncode else not run.stdout.strip()


def stamp(file: str, line: Line) -> dict[str, Any]:
    """What a new line records of its sources."""
    patterns = code_of(file, line)
    return {"code_sha256": code_sha256(patterns), "clean": is_clean(patterns)}


# ------------------------------------------------------------------------------------------ state of a line

FRESH = "fresh"


def state(file: str, line: Line) -> str:
    """A line against the tree: "fresh", "quoted", "uncommitted", "older sources" or "no hash" (older lines)."""
    if line.get("kind") == "quoted":
        return "quoted"
    if "code_sha256" not in line:
        return "no hash"
    if line["code_sha256"] != code_sha256(code_of(file, line)):
        return "older sources"
    return "uncommitted" if line.get("clean") is False else FRESH


def results() -> dict[str, list[dict[str, Any]]]:
    """All lines by file."""
    return {path.stem: [json.loads(text) for text in path.read_text().splitlines() if text]
            for path in sorted(RESULTS.glob("*.jsonl"))}  # fmt: skip


def newest_commit(lines: Iterable[Line]) -> str:
    """The commit of the last line that has one."""
    return next((str(line["commit"]) for line in reversed(list(lines)) if line.get("commit")), "")


def changed(file: str, lines: list[Line]) -> list[str]:
    """Files of the code path that differ from those at the commit of the newest line."""
    commit = newest_commit(lines)
    command = ["git", "diff", "--name-only", commit, "--", *files(code_of(file, lines[-1]))]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


def main(arguments: list[str]) -> None:
    """Print the table."""
    for file, lines in results().items():
        tasks: dict[str, list[Line]] = {}
        for line in lines:
            tasks.setdefault(str(line.get("task") or line.get("what") or "-"), []).append(line)
        for task, group in tasks.items():
            states = Counter(state(file, line) for line in group)
            counts = ", ".join(f"{count} {name}" for name, count in states.items())
            print(f"{file:15} {task:40.40} newest {group[-1].get('date', ''):10}  {counts}")
            if "--changed" in arguments and states.get("older sources", 0) + states.get("no hash", 0):
                for name in changed(file, group):
                    print(f"{'':15}   {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
