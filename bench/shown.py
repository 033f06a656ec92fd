"""Which lines the pages show, and how many of these are fresh: by page, then those that are not.

    python bench/shown.py             the table, then each older line: its case, machine and state, and who shows it
    python bench/shown.py --unused    lines that nothing shows, by file and date

The scripts that render pages and pictures run, without writing; a line counts as shown if they read a measured number
of it. Lines that the comments of prose select (`figures.py`) count, too.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import current
import figures
import freshness
from matplotlib.figure import Figure

Shown = dict[str, set[tuple[str, int]]]
"""By page: file and number of each line."""

DOCS = freshness.ROOT / "docs"

RENDERERS: dict[str, Callable[[Any], object]] = {
    "paper_bals": lambda script: script.render(DOCS / "evidence"),
    "paper_gates": lambda script: script.render(DOCS / "evidence"),
    "paper_cumf": lambda script: script.render(DOCS / "evidence"),
    "paper_msgd": lambda script: script.render(DOCS / "evidence"),
    "paper_scale": lambda script: script.render(DOCS / "evidence"),
    "performance": lambda script: script.render(),
    "fit": lambda script: script.draw_fits(DOCS / "_static" / "whole-fits.svg"),
    "front_page": lambda script: script.draw(
        DOCS / "_static" / "front-page.svg", [*map(script.cpu_panel, script.CPU_PANELS), script.gpu_panel()]
    ),
    "takeaways": lambda script: script.draw(DOCS / "evidence", freshness.results()),
}
"""By script: what renders its pages."""


class Traced(dict[str, Any]):
    """A line that notes when a measured number of it is read."""

    place: tuple[str, int]
    noted: set[tuple[str, int]]

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key not in figures.ABOUT and _is_measured(value):
            self.noted.add(self.place)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """As that of a dict."""
        try:
            return self[key]
        except KeyError:
            return default

    def __or__(self, other: Any) -> Any:
        return traced({**self, **other}, self.place, self.noted)


def traced(line: dict[str, Any], place: tuple[str, int], noted: set[tuple[str, int]]) -> Traced:
    """A line that notes in `noted`."""
    made = Traced(line)
    made.place, made.noted = place, noted
    return made


def _is_measured(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_measured, value.values()))
    return any(map(_is_measured, value)) if isinstance(value, list) else isinstance(value, float)


@contextmanager
def reading() -> Iterator[set[tuple[str, int]]]:
    """The lines that are read meanwhile; nothing is written or drawn."""
    places = {text: (path.stem, number) for path in freshness.RESULTS.glob("*.jsonl")
              for number, text in enumerate(path.read_text().splitlines())}  # fmt: skip
    noted: set[tuple[str, int]] = set()
    loads, read_text = json.loads, Path.read_text

    def load(text: Any, *arguments: Any, **options: Any) -> Any:
        found, place = loads(text, *arguments, **options), places.get(text) if isinstance(text, str) else None
        return traced(found, place, noted) if place else found

    def read(path: Path, *arguments: Any, **options: Any) -> str:
        """Nothing of a picture that was never drawn."""
        return read_text(path, *arguments, **options) if path.exists() else ""

    with (
        mock.patch.object(json, "loads", load),
        mock.patch.object(Path, "read_text", read),
        mock.patch.object(Path, "write_text"),
        mock.patch.object(Figure, "savefig"),
    ):
        yield noted


def shown() -> Shown:
    """Lines of every page: those of tables and pictures by script, those of prose by page."""
    found: Shown = {}
    for name, render in RENDERERS.items():
        script = importlib.import_module(name)
        with reading() as noted:
            render(script)
        found[f"bench/{name}.py"] = noted
    results = freshness.results()
    numbers = {id(line): (file, number) for file, lines in results.items() for number, line in enumerate(lines)}
    for page in figures.pages():
        name = page.relative_to(freshness.ROOT).as_posix()
        selectors = [each for block in figures.blocks_of(name, page.read_text(encoding="utf-8"))
                     for each in block.selectors if not each.startswith("table ")]  # fmt: skip
        found[name] = {numbers[id(line)] for each in selectors for line in figures.select(results, each)}
    return found


def main(arguments: list[str]) -> None:
    """Print."""
    found, results = shown(), freshness.results()
    states = {(file, number): freshness.state(file, line) for file, lines in results.items()
              for number, line in enumerate(lines)}  # fmt: skip
    print("| shown by | lines | fresh | by control | quoted | older |\n|---|---:|---:|---:|---:|---:|")
    for page, places in (found | {"all": set().union(*found.values())}).items():
        counts = Counter(states[place] for place in places)
        fresh = counts[freshness.FRESH] + counts[freshness.UNCHECKED]
        told = [len(places), fresh, counts[freshness.CONTROLLED], counts["quoted"] + counts["control"]]
        print(f"| {page} | {' | '.join(map(str, [*told, told[0] - sum(told[1:])]))} |")
    used: set[tuple[str, int]] = set().union(*found.values())
    if "--unused" in arguments:
        unused = states.keys() - used
        groups = Counter((file, task_of(results[file][number]), *origin_of(results[file][number]), states[file, number])
                         for file, number in unused)  # fmt: skip
        print(*(f"{' '.join(key)}: {count}" for key, count in sorted(groups.items())), sep="\n")
        return
    for file, number in sorted(used):
        line, state = results[file][number], states[file, number]
        if state not in freshness.CURRENT | {"quoted", "control"}:
            case = [f"{key}={line[key]}" for key in CASE if line.get(key) is not None]
            where = current.kind(line) if "machine" in line else current.card(line)
            pages = ", ".join(sorted(Path(page).name for page, places in found.items() if (file, number) in places))
            about = ", ".join(each for each in (*case, where, *origin_of(line), state) if each)
            print(f"{file} {number}: {task_of(line)}: {about} ({pages})")


CASE = ("set", "name", "shape", "feedback", "factors", "method", "variant", "gpus", "ranks", "order", "reduction",
        "limit", "ids", "rows", "from", "threads")  # fmt: skip
"""Fields that tell which command renews a line."""


def task_of(line: dict[str, Any]) -> str:
    """What a line measured."""
    return str(line.get("task") or line.get("what") or line.get("case") or "-")


def origin_of(line: dict[str, Any]) -> tuple[str, str]:
    """Date and commit."""
    return str(line.get("date") or ""), str(line.get("commit") or "")[:9]


if __name__ == "__main__":
    main(sys.argv[1:])
