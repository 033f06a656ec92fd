"""Checks that every measured figure in prose has a line in bench/results/, and lists the figures that are stale.

    python bench/figures.py            fails for a figure without a line; lists stale figures, which does not fail
    python bench/figures.py --stale    lists every stale line as well

Checked are README.md, docs/performance.md, docs/systems.md and docs/evidence/*.md, without code blocks and without the
sections on a paper's claims. Tables between the markers of a section are rendered from lines. A
figure is a number with a unit of time, rate, share or ratio (`UNIT`). Each must be, as rounded there,

- a number of a rendered table of the same page;
- a number of the lines that a comment of its paragraph or table row names, or a ratio or difference of two of them:
  ``<!-- lines: gpu task=als shape=netflix gpu.name~H200; fit shape=ml20m -->``, a file and fields, ``=`` for equal and
  ``~`` for contained. A figure that only lines before the newest run (with a current line, if any) have is stale,
  unless `date` or `commit` is a field. ``table NAME`` stands for the numbers of a rendered table of the page;
- a figure that a comment gives: ``<!-- given: 2.5 times, 1 % -->``, which is not ours (a paper's, a tolerance).
"""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import current
import freshness

ROOT = freshness.ROOT

Line = dict[str, Any]


def pages() -> list[Path]:
    """The pages whose figures are checked."""
    docs = ROOT / "docs"
    return [ROOT / "README.md", docs / "performance.md", docs / "systems.md", *sorted((docs / "evidence").glob("*.md"))]


# ------------------------------------------------------------------------------------------ figures of a text

NUMBER = r"(?<![\w.,@])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
UNIT = (
    r"(?:ms|ns|µs|s|seconds|microseconds|hours|h|%|x(?! ?\d)|times|GB/s|TB/s|GFLOP/s|TFLOP/s|"
    r"(?:million )?(?:users|entries|rows)(?: / s| a second| per second))(?![\w/])"
)
LINK = r",? (?:and|to|or|against|instead of|beside|of) |, | / |/|-"
CHAIN = re.compile(rf"({NUMBER})((?:(?:{LINK}){NUMBER})*) ?({UNIT})")

SETTING = rf"\b\w+ = {NUMBER}(?:(?:,? (?:and|to|or) |, | / ){NUMBER}(?! ?(?:{UNIT})))*"
"""A parameter, such as f = 32 to 128."""

RATIOS = {"x", "times", "%"}
"""Units of figures that may be ratios."""


@dataclass(frozen=True)
class Figure:
    """A number with its unit; `chained` numbers share the unit that follows the last one."""

    text: str
    unit: str

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text.replace(",", ""))

    @property
    def rounding(self) -> float:
        """Half a unit of the last digit that is written; of integers, zeros at the end count as rounded."""
        mantissa, _, exponent = self.text.replace(",", "").partition("e")
        scale = 10.0 ** int(exponent or 0)
        if "." in mantissa:
            return scale * 0.5 * 10.0 ** -len(mantissa.partition(".")[2])
        zeros = len(mantissa) - len(mantissa.rstrip("0")) if mantissa.strip("0") else 0
        return scale * min(0.5 * 10.0**zeros, 0.05 * float(mantissa or 1) or 0.5)

    def is_near(self, value: float) -> bool:
        """Whether a measured value rounds to this figure."""
        return abs(value - self.value) <= self.rounding * 1.001

    def __str__(self) -> str:
        return f"{self.text} {self.unit}"


def figures_of(text: str) -> list[Figure]:
    """Numbers with units, those of a chain such as "1.2 to 1.5 times" each."""
    found = []
    for match in CHAIN.finditer(text):
        numbers = [match[1], *re.findall(NUMBER, match[2])]
        found += [Figure(number, match[3]) for number in numbers]
    return found


# ------------------------------------------------------------------------------------------ blocks of a page

CLAIMS = re.compile(r"^#+ (What the papers? claims?|How to measure again)\b")
COMMENT = re.compile(r"<!-- (lines|given): (.*?) -->", re.DOTALL)


@dataclass
class Block:
    """A paragraph, a list entry or the row of a table, with what its comments name."""

    place: str
    text: str
    selectors: list[str] = field(default_factory=list)
    given: str = ""

    @classmethod
    def of(cls, place: str, text: str) -> Block:
        """Split off the comments."""
        block = cls(place, re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL))
        for kind, content in COMMENT.findall(text):
            if kind == "given":
                block.given += f", {content}"
            else:
                block.selectors += [part.strip() for part in content.replace("\n", " ").split(";")]
        return block

    @property
    def figures(self) -> list[Figure]:
        """Figures outside of code."""
        prose = " ".join(re.sub(r"`[^`]*`", " ", self.text).replace("*", "").split())
        return figures_of(re.sub(SETTING, " ", prose))


def blocks_of(name: str, text: str) -> Iterator[Block]:
    """What is checked of a page; a comment on lines of its own belongs to what follows."""
    text = re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^( *)```.*?^ *```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    skipped, pending, number = 0, "", 1
    for part in re.split(r"(\n(?:[ \t]*\n)+)", text):
        start, number = number, number + part.count("\n")
        if not part.strip():
            continue
        level = len(part) - len(part.lstrip("#")) if part.startswith("#") else 0
        if level and (not skipped or level <= skipped):
            skipped = level if CLAIMS.match(part) else 0
        if skipped or level:
            continue
        if not re.sub(r"<!--.*?-->", "", part, flags=re.DOTALL).strip():
            pending += part
            continue
        for offset, piece in _pieces(part):
            yield Block.of(f"{name}:{start + offset}", pending + piece)
        pending = ""


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _pieces(part: str) -> Iterator[tuple[int, str]]:
    """Rows of a table and entries of a list, each with the number of lines before it."""
    lines = part.split("\n")
    starts = [i for i, line in enumerate(lines) if not i or line.startswith("|") or re.match(r" *[-*] ", line)]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        yield start, "\n".join(lines[start:end])


# ------------------------------------------------------------------------------------------ numbers of lines


def matches(line: Line, term: str) -> bool:
    """Whether a field of a line, such as ``gpu.name``, has (=) or contains (~) a value."""
    key, sign, wanted = re.split(r"([=~])", term, maxsplit=1)
    value: Any = line
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if sign == "~":
        return wanted in str(value)
    return str(value) == wanted or (isinstance(value, float) and f"{value:g}" == wanted)


def select(results: dict[str, list[Line]], selector: str, *, newest: bool = True) -> list[Line]:
    """Lines of a selector: of the newest run with a current line, unless `newest` is off or it names date or commit.

    Raises
    ------
    LookupError
        There is none.
    """
    file, *terms = shlex.split(selector)
    found = [line for line in results.get(file, []) if all(matches(line, term) for term in terms)]
    if not found:
        raise LookupError(f"no line fits {selector!r}")
    if newest and file != "quoted" and not any(term.startswith(("date", "commit")) for term in terms):
        best = current.best_first(file, found)[0]
        last = best.get("date"), best.get("commit")
        found = [line for line in found if (line.get("date"), line.get("commit")) == last]
    return found


ABOUT = {"machine", "versions", "gpu", "nnz", "size", "shape", "date", "repeats", "threads", "published", "histogram",
         "scale", "facts", "rows", "learning_rate", "versions_of_rivals", "wanted"}  # fmt: skip
"""Fields of a line that are no measurement."""


def numbers(value: Any) -> Iterator[float]:
    """Every number in a line, of nested fields and lists as well."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in ABOUT:
                yield from numbers(inner)
    else:
        yield from numbers_of_list(value)


def numbers_of_list(values: Iterable[Any]) -> Iterator[float]:
    """The numbers of a list, and the median of a list of repeats."""
    found = [number for value in values for number in numbers(value)]
    yield from found
    if found:
        yield sorted(found)[len(found) // 2]


SCALES = (1.0, 1e3, 1e-3, 1e6, 1e-6, 1e9, 1e-9, 1e-12, 100.0)
"""Between the units of lines and those of prose."""


def is_backed(figure: Figure, values: list[float]) -> bool:
    """Whether a figure is one of the values, or a ratio or difference of two."""
    if any(figure.is_near(value * scale) for value in values for scale in SCALES):
        return True
    if figure.unit not in RATIOS:
        pairs = itertools.combinations(values, 2)
        return any(figure.is_near(abs(a - b) * scale) for a, b in pairs for scale in SCALES[:3])
    ratios = [abs(a / b) for a, b in itertools.permutations([value for value in values if value], 2)]
    shares = [100 * one for ratio in ratios for one in (ratio, abs(1 - ratio))]
    return any(figure.is_near(one) for one in (shares if figure.unit == "%" else ratios))


def numbers_of_section(text: str, name: str) -> list[float]:
    """Numbers of one rendered part of a page."""
    body = text.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]
    return [_number(number) for number in re.findall(NUMBER, body)]


RATIO_COLUMN = re.compile(r"times|%|gain|speed|ratio|share|balance|reuse|faster| / |against")
RATIO_CELL = re.compile(rf"({NUMBER}) ?(?:x\b|times|%)")


def table_numbers(text: str) -> tuple[list[float], list[float]]:
    """Numbers of a page's rendered parts: all, and those that are ratios or shares by their column or unit."""
    every: list[float] = []
    ratios: list[float] = []
    for _, body in re.findall(r"<!-- begin ([\w-]+) -->(.*?)<!-- end \1 -->", text, flags=re.DOTALL):
        header: list[str] = []
        for line in body.splitlines():
            cells = line.strip().strip("|").split("|") if line.startswith("|") else []
            header = (header or cells) if cells else []
            every += map(_number, re.findall(NUMBER, line))
            ratios += map(_number, RATIO_CELL.findall(line))
            for name, cell in zip(header, cells, strict=False):
                is_ratio = RATIO_COLUMN.search(name) or header[0].strip().startswith("speed")
                ratios += map(_number, re.findall(NUMBER, cell) if is_ratio else [])
    return every, ratios


def _number(text: str) -> float:
    return float(text.replace(",", ""))


# ------------------------------------------------------------------------------------------ check


@dataclass
class Report:
    """Figures without a line, and stale ones, each with its place."""

    missing: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


def check_page(name: str, text: str, results: dict[str, list[Line]], report: Report) -> None:
    """Add what is wrong on a page."""
    every, ratios = table_numbers(text)
    for block in blocks_of(name, text):
        recent, older = _values(block, text, results, report)
        given = figures_of(block.given + " ")
        for figure in block.figures:
            if any((one.value, one.unit) == (figure.value, figure.unit) for one in given):
                continue
            if any(figure.is_near(value) for value in (ratios if figure.unit in RATIOS else every)):
                continue
            if is_backed(figure, recent):
                continue
            if is_backed(figure, older):
                report.stale.append(f"{block.place}: {figure}: only an older line has it")
            else:
                report.missing.append(f"{block.place}: {figure} has no line")


def _values(block: Block, text: str, results: dict[str, list[Line]], report: Report) -> tuple[list[float], list[float]]:
    """Numbers that the selectors of a block name: of the newest runs, and of all."""
    recent: list[float] = []
    older: list[float] = []
    for selector in block.selectors:
        if selector.startswith("table "):
            recent += numbers_of_section(text, selector.split()[1])
            continue
        try:
            found = select(results, selector)
        except LookupError as error:
            report.missing.append(f"{block.place}: {error}")
            continue
        recent += [number for line in found for number in numbers(line)]
        older += [number for line in select(results, selector, newest=False) for number in numbers(line)]
        states = {freshness.state(selector.split()[0], line) for line in found} - freshness.CURRENT
        if states:
            report.stale.append(f"{block.place}: {selector}: {', '.join(sorted(states))}")
    return recent, older


def main(arguments: list[str]) -> int:
    """Check all pages; the exit code is 1 for a figure without a line."""
    results = freshness.results()
    report = Report()
    for page in pages():
        check_page(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"), results, report)
    print(*(f"stale  {text}" for text in report.stale), sep="\n")
    if "--stale" in arguments:
        freshness.main([])
    print(*(f"MISSING  {text}" for text in report.missing), sep="\n")
    return 1 if report.missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
