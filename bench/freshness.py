"""Which sources the lines of bench/results/ depend on, and which lines are older than these sources.

    python bench/freshness.py            how many lines of each file and task are fresh, and why others are not
    python bench/freshness.py --changed  also the sources that changed since the commit of the newest line

`CODE` declares the code path of each script: the library's files that decide its figures and the generators of its
data. Every line carries the hash of the code of these files (`code_form_sha256`) and whether they were committed
(`clean`; null: unknown). The hash ignores comments, docstrings, annotations and layout (`form`). A line is fresh while
the hash is that of the tree, or while a control (`controls.py`) says that the code of the line and that of the tree
took the same time in one run, with equal results. The scripts themselves are not part of it, because they also render
pages. Lines until 27 November 2026 also have the hash of the bytes (`code_sha256`); their `code_form_sha256` is that of
the files of their commit, if the hash of the bytes, or the earlier `sources_sha256`, is that commit's. So are those of
scales and reductions until 28 November, which had ranks/mcumsgd.py in their code path.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
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

CCD_GPU: Patterns = (*LAUNCH, "cuda/ccd.cu", "hybridmf/gpu/ccd.py", "hybridmf/plan/ccd.py")

TOP_K_GPU: Patterns = (*LAUNCH, "cuda/tensor.cuh", "cuda/top_k.cu", "hybridmf/gpu/topk.py")

SET_UP_GPU: Patterns = ("cuda/transpose.cu", "cuda/draw.cu", "hybridmf/gpu/intake.py", "hybridmf/gpu/matrix.py",
                        "hybridmf/gpu/factors.py", "hybridmf/device/copier.py")  # fmt: skip

STREAMS: Patterns = ("hybridmf/gpu/stream.py", "hybridmf/gpu/offloaded.py", "hybridmf/data/store.py",
                     "hybridmf/data/slabs.py")  # fmt: skip

RANKS: Patterns = ("hybridmf/ranks/[!m]*.py", "hybridmf/ranks/multi_als.py", "hybridmf/ranks/transport/*.py")

MCUMSGD: Patterns = ("hybridmf/plan/epochs.py", "hybridmf/ranks/mcumsgd.py", "hybridmf/ranks/group.py",
                     "hybridmf/ranks/transport/peers.py")  # fmt: skip

FITS: Patterns = ("hybridmf/model/fit.py", "hybridmf/model/training.py", "hybridmf/model/loop.py")

PLANNER: Patterns = ("hybridmf/plan/half_sweep.py", "hybridmf/plan/partitions.py", "hybridmf/plan/grid.py",
                     "hybridmf/plan/cost.py", "hybridmf/plan/memory.py", "hybridmf/plan/machine.py")  # fmt: skip

FEATURES: Patterns = ("hybridmf/data/features.py", "hybridmf/core/regression.py")

SEARCH: Patterns = ("hybridmf/search.py",)

SHAPES: Patterns = ("hybridmf/datasets.py",)
PUBLISHED: Patterns = (*SHAPES, "bench/published.py")
DRAWN_GPU: Patterns = ("bench/gpu_data.py",)
PUBLISHED_GPU: Patterns = (*PUBLISHED, *DRAWN_GPU)

CODE: dict[str, Patterns | dict[str, Patterns]] = {
    "biases": (*ALS_CPU, *SGD_CPU, *SHAPES),
    "checkpoints": ("hybridmf/model/checkpoint.py", *FITS, *ALS_GPU, *SHAPES),
    "cold": (
        *(*ALS_GPU, *TOP_K_GPU, *SET_UP_GPU, *FITS, *SHAPES),
        *("hybridmf/device/compiler.py", "hybridmf/device/ready.py", *SEARCH),
    ),
    "controls": (),
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
    "mcumsgd": (*SGD_GPU, *MCUMSGD, *PUBLISHED_GPU),
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
    "search": {"": (*SEARCH, *ALS_CPU), "cuda": (*SEARCH, *ALS_GPU, *SET_UP_GPU, *TOP_K_GPU, *SHAPES)},
    "serving": ("hybridmf/model/serving.py", "hybridmf/model/requests.py", *TOP_K_CPU),
    "sgd": (*SGD_CPU, *CCD_CPU, *ALS_CPU, *SHAPES),
    "starts": ("hybridmf/plan/start.py", *ALS_CPU, *SGD_CPU, *CCD_CPU),
    "tune": ASSEMBLIES_GPU,
    "tuning": (*ASSEMBLIES_GPU, *PUBLISHED_GPU),
    "walk": (*LAUNCH, "cuda/sgd.cuh", "cuda/msgd*.cu", *PUBLISHED_GPU),
}
"""By file of results: files of the code path. Where tasks or devices differ, by task, else by device, else by ""."""

BY_EVENTS = {"gpu ", "gpu syrk", "gpu bals", "gpu precision", "paper_bals ", "paper_bals assemblies", "paper_cumf ",
             "paper_gates "}  # fmt: skip
"""Code paths ("FILE PATH", `path_of`) of ALS whose seconds are those of CUDA events, without the host's."""

BY_RESULTS = {"paper_bals vacancies", "paper_bals distribution", "paper_bals popularity", "paper_gates distribution",
              "paper_gates sparsity"}  # fmt: skip
"""Code paths whose figures are no times: equal results are enough."""

WHOLE: Patterns = ("hybridmf/**/*.py", "hybridmf/**/*.pyx", "hybridmf/**/*.h", "hybridmf/**/*.c", "cuda/*")
"""The code path of a script that declares none."""


def code_of(file: str, line: Line) -> Patterns:
    """Patterns of the files that the figures of a line depend on."""
    return code_paths(file)[path_of(file, line)] if file in CODE else WHOLE


def path_of(file: str, line: Line) -> str:
    """Which code path of a file of results a line is of: its task, its device or ""."""
    paths = code_paths(file) if file in CODE else {}
    return next((key for key in (str(line.get("task")), _device(line)) if key in paths), "")


def code_paths(file: str) -> dict[str, Patterns]:
    """Code paths that a file of results declares, by task or device."""
    declared = CODE[file]
    return declared if isinstance(declared, dict) else {"": declared}


def _device(line: Line) -> str:
    device = str(line.get("device", ""))
    return "cuda" if device.startswith("cuda") else device


@functools.cache
def code_hash(patterns: Patterns, root: Path | None = None) -> str:
    """sha256 of the names and forms of the files of a code path in a tree (default: this one), sorted by name."""
    forms = forms_of(patterns, root)
    return hashlib.sha256("".join(f"{name} {form}\n" for name, form in forms.items()).encode()).hexdigest()


def forms_of(patterns: Patterns, root: Path | None = None) -> dict[str, str]:
    """sha256 of the form of each file of a code path."""
    return {name: _form_hash((root or ROOT) / name) for name in files(patterns, root)}


@functools.cache
def _form_hash(path: Path) -> str:
    return hashlib.sha256(form(path.name, path.read_text(encoding="utf-8")).encode()).hexdigest()


@functools.cache
def files(patterns: Patterns, root: Path | None = None) -> tuple[str, ...]:
    """Files of a code path, relative to the root, sorted.

    Raises
    ------
    ValueError
        A pattern fits no file: a declaration must follow when files move.
    """
    root, found = root or ROOT, set()
    for pattern in patterns:
        paths = [p.relative_to(root).as_posix() for p in root.glob(pattern) if p.is_file() and p.suffix != ".so"]
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
    return {"code_form_sha256": code_hash(patterns), "clean": is_clean(patterns)}


# ------------------------------------------------------------------------------------------ form of a file


def form(name: str, text: str) -> str:
    """What of a source can change a figure: no comments, docstrings, annotations of types, or layout.

    Python as its syntax tree, the same in Python 3.11 to 3.14; Cython, C and CUDA as tokens.
    """
    if name.endswith((".py", ".pyi")):
        return _tree(ast.parse(text))
    return _tokens(text, CYTHON if name.endswith((".pyx", ".pxd", ".pxi")) else C)


TYPES = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
"""Fields of a syntax tree that no answer depends on; `ctx` follows from the place, `kind` is the prefix u."""


def _tree(node: object) -> str:
    """A node as nested names and values; empty fields are left out, because they differ between versions of Python."""
    if isinstance(node, list):
        return "[" + " ".join(_tree(each) for each in node if not _is_mute(each)) + "]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {name: getattr(node, name, None) for name in node._fields if name not in TYPES}
    if isinstance(node, ast.JoinedStr):  # Python 3.12.1 ends a format with ""
        fields["values"] = [each for each in node.values if getattr(each, "value", None) != ""]
    parts = [f"{name}={_tree(value)}" for name, value in fields.items() if value is not None and value != []]
    return " ".join([f"({type(node).__name__}", *parts]) + ")"


def _is_mute(node: object) -> bool:
    """A docstring, or imports for annotations alone."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not node.orelse
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


OPERATORS = r"\+\+|--|<<=?|>>=?|[-+*/%&|^<>=!]=|&&|\|\||->|::"
QUOTED = r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*\'"""
C = re.compile(rf"(?P<drop>//[^\n]*|/\*.*?\*/|\\\n)|{QUOTED}|\n *#|[\w.]+|{OPERATORS}|\S|\n", re.DOTALL)
CYTHON = re.compile(rf'''(?P<drop>\#[^\n]*|\\\n)|""".*?"""|{QUOTED}|[\w.]+|{OPERATORS}|\S|\n[ ]*''', re.DOTALL)


def _tokens(text: str, language: re.Pattern[str]) -> str:
    """Tokens with one blank between them, without comments and docstrings.

    Of line ends, C keeps those of directives, Cython those before a statement, with the indentation.
    """
    found: list[str] = []
    directive, depth = False, 0
    for match in language.finditer("\n" + text):
        token = match[0]
        if match["drop"] is not None:
            continue
        if token.startswith("\n") and language is C:
            if directive or token.strip():
                found.append("\n")
            directive = bool(token.strip())
            found += ["#"] if directive else []
        elif token.startswith("\n"):
            if found and found[-1].startswith("\n"):
                found[-1] = token  # an empty line
            elif not depth:
                found.append(token)
        elif not (token.startswith('"""') and (not found or found[-1].startswith("\n"))):
            depth += (token in "([{") - (token in ")]}")
            found.append(token)
    return " ".join(found)


# ------------------------------------------------------------------------------------------ state of a line

FRESH = "fresh"
UNCHECKED = "fresh, clean unknown"
CONTROLLED = "fresh by control"

CURRENT = {FRESH, UNCHECKED, CONTROLLED}
"""States of lines whose figures are those of the tree."""


def state(file: str, line: Line) -> str:
    """A line against the tree, in words: "fresh", "older sources" and so on; "no hash" stands for older lines."""
    if line.get("kind") in ("quoted", "control"):
        return str(line["kind"])
    if "code_form_sha256" not in line:
        return "no hash"
    if line.get("clean") is False:
        return "uncommitted" if line["code_form_sha256"] == code_hash(code_of(file, line)) else "older sources"
    if line["code_form_sha256"] == code_hash(code_of(file, line)):
        return FRESH if line.get("clean") else UNCHECKED
    return CONTROLLED if controls_of(file, line) else "older sources"


@functools.cache
def controls() -> tuple[dict[str, Any], ...]:
    """Lines of controls: each names pairs of hashes whose code measured alike, by "FILE PATH" (`path_of`)."""
    path = RESULTS / "controls.jsonl"
    return tuple(json.loads(text) for text in path.read_text().splitlines() if text) if path.exists() else ()


def controls_of(file: str, line: Line) -> list[dict[str, Any]]:
    """The controls that lead from the code of a line to that of the tree, in turn; none if they do not."""
    name, aim = f"{file} {path_of(file, line)}", code_hash(code_of(file, line))
    ways = {str(line["code_form_sha256"]): list[dict[str, Any]]()}
    for _ in controls():
        for control in controls():
            before, after = control["covers"].get(name, (None, None))
            if before in ways and after not in ways:
                ways[after] = [*ways[before], control]
    return ways.get(aim, [])


def results(files: str = "*.jsonl") -> dict[str, list[dict[str, Any]]]:
    """All lines by file, of the files of a pattern."""
    return {path.stem: [json.loads(text) for text in path.read_text().splitlines() if text]
            for path in sorted(RESULTS.glob(files))}  # fmt: skip


def newest_commit(lines: Iterable[Line]) -> str:
    """The commit of the last line that has one."""
    return next((str(line["commit"]) for line in reversed(list(lines)) if line.get("commit")), "")


def changed(file: str, lines: list[Line]) -> list[str]:
    """Files of the code path that differ from those at the commit of the newest line."""
    commit = newest_commit(lines)
    command = ["git", "diff", "--name-only", commit, "--", *files(code_of(file, lines[-1]))]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


def _control_name(control: Line) -> str:
    low, high = control["ratios"]
    return (f"control of {control['date']}, {control['gpu']}: {control['from']['commit'][:9]} as "
            f"{control['to']['commit'][:9] or 'the tree'}, ratios {low:.3f} to {high:.3f}")  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the table."""
    for file, lines in results().items():
        tasks: dict[str, list[Line]] = {}
        for line in lines:
            tasks.setdefault(str(line.get("task") or line.get("what") or "-"), []).append(line)
        for task, group in tasks.items():
            states = Counter(state(file, line) for line in group)
            counts = ", ".join(f"{count} {name}" for name, count in states.items())
            used = {_control_name(each) for line in group if state(file, line) == CONTROLLED
                    for each in controls_of(file, line)}  # fmt: skip
            counts += f" ({'; '.join(sorted(used))})" if used else ""
            print(f"{file:15} {task:40.40} newest {group[-1].get('date', ''):10}  {counts}")
            if "--changed" in arguments and states.get("older sources", 0) + states.get("no hash", 0):
                for name in changed(file, group):
                    print(f"{'':15}   {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
