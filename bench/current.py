"""Which lines a page shows: of each case a current one, if there is any.

A line is current if it is fresh or a control says so (`freshness.CURRENT`). An older line is shown only where no kind
of machine has a current line of its case; of several that may be shown, the newest is. Nothing here reads a measured
number, because `shown.py` takes a line whose numbers are read for one that is shown.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import freshness

Line = dict[str, Any]


def is_current(file: str, line: Line) -> bool:
    """Whether the figures of a line are those of the tree."""
    return freshness.state(file, line) in freshness.CURRENT


def card(line: Line) -> str:
    """The GPU that a line was measured on; empty for a CPU. The first whole fits name none; it was an H200."""
    gpu, what = line.get("gpu"), str(line.get("what"))
    name = gpu.get("name") if isinstance(gpu, Mapping) else gpu
    return str(name or ("NVIDIA H200" if "cuda" in what or ", gpu" in what else ""))


def processor(line: Line) -> str:
    """Cores and instructions of a line's machine."""
    machine = line["machine"]
    return f"{machine['cores']} cores ({machine['instruction_set'].upper().replace('AVX5', 'AVX-5')})"


def kind(line: Line) -> str:
    """The GPU, or cores and instructions."""
    return card(line) or processor(line)


def names(line: Line, key: str) -> set[str]:
    """The names under which a field has numbers, without reading one."""
    return set(dict.__getitem__(line, key))


def best_first(file: str, lines: Iterable[Line]) -> list[Line]:
    """Current lines, then older ones; the newest first."""
    return sorted(lines, key=lambda line: is_current(file, line))[::-1]


def current_if_any(file: str, lines: Iterable[Line]) -> list[Line]:
    """Those that are current, or all of them if none is."""
    lines = list(lines)
    return [line for line in lines if is_current(file, line)] or lines


def of_cases(file: str, lines: Iterable[Line], *keys: str, kind: Callable[[Line], str] = kind) -> list[Line]:
    """The line to show of each case and kind of machine, in order of first appearance.

    The values of `keys` make a case, and whether it ran on a GPU.
    """
    found: dict[tuple[Hashable, str], Line] = {}
    have_current: set[Hashable] = set()
    for line in lines:
        case = (bool(card(line)), *(json.dumps(line.get(key)) for key in keys))
        place = case, kind(line)
        if is_current(file, line):
            have_current.add(case)
            found[place] = line
        elif place not in found or not is_current(file, found[place]):
            found[place] = line
    return [line for (case, _), line in found.items() if case not in have_current or is_current(file, line)]


def of_one_kind(file: str, lines: Iterable[Line], *keys: str) -> list[Line]:
    """Those of `of_cases` of one kind of machine: with most current cases, then most cases, then the newest line."""
    lines = list(lines)
    found = of_cases(file, lines, *keys)
    ages = {id(line): age for age, line in enumerate(lines)}
    groups: dict[str, list[Line]] = {}
    for line in found:
        groups.setdefault(kind(line), []).append(line)

    def score(group: list[Line]) -> tuple[int, int, int]:
        return sum(is_current(file, line) for line in group), len(group), max(ages[id(line)] for line in group)

    return max(groups.values(), key=score, default=[])


def run_of(line: Line) -> tuple[Any, ...]:
    """What lines of one run have in common."""
    return line.get("date"), line.get("commit"), str(line.get("machine")), card(line)


def together(file: str, lines: Iterable[Line], key: str, values: Iterable[Any]) -> list[Line]:
    """The lines of one run that has these values of `key`, in their order: the newest whose lines are current, if any.

    Raises
    ------
    LookupError
        No run has all of them: there is no ratio without a common run.
    """
    runs: dict[tuple[Any, ...], dict[Any, Line]] = {}
    for line in lines:
        runs.setdefault(run_of(line), {})[line[key]] = line
    wanted = list(values)
    whole = [[run[value] for value in wanted] for run in runs.values() if run.keys() >= set(wanted)]
    if not whole:
        raise LookupError(f"{file}: no run has {key} = {wanted}")
    return max(reversed(whole), key=lambda run: all(is_current(file, line) for line in run))


def fullest(file: str, lines: Iterable[Line], key: str) -> dict[Any, Line]:
    """By values of `key` the lines of the run that has most of them: current ones if there are any, else older ones."""
    ordered = best_first(file, lines)
    state = is_current(file, ordered[0])
    kept = itertools.takewhile(lambda line: is_current(file, line) == state, ordered)
    runs: dict[tuple[Any, ...], dict[Any, Line]] = {}
    for line in kept:
        runs.setdefault(run_of(line), {}).setdefault(line[key], line)
    return max(runs.values(), key=len)
