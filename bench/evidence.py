"""Writes docs/evidence/index.md from evidence.toml: every table and figure of the papers, and our verdict.

python bench/evidence.py           the page, and the pictures at the end of each paper's page
python bench/evidence.py --check   names items whose lines do not exist, whose figures no line has, or that are stale
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import freshness
import takeaways

DATA = Path(__file__).parent / "evidence.toml"
FOLDER = freshness.ROOT / "docs" / "evidence"

PUBLISHED = {"BALS": (15, 4), "Gates": (17, 1), "cuMF": (11, 5), "MSGD": (17, 1)}
"""Figures and tables of each paper."""

VERDICTS = ("agrees", "differs", "not measurable here")

Item = dict[str, Any]


def load() -> tuple[list[Item], dict[str, dict[str, str]]]:
    """Measured items, and by paper the items that show a method."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return data["item"], data["built"]


def expected() -> set[tuple[str, str]]:
    """(paper, item) of every table and figure. Gates numbers its only table in Roman."""
    names = set()
    for paper, (figures_, tables) in PUBLISHED.items():
        names |= {(paper, f"Fig. {number}") for number in range(1, figures_ + 1)}
        names |= {(paper, f"Table {'I' if paper == 'Gates' else number}") for number in range(1, tables + 1)}
    return names


# ------------------------------------------------------------------------------------------ check


def problems(items: Sequence[Item], results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What is wrong with items: fields, selectors that fit no line, figures that neither lines nor the page have."""
    found = []
    for item in items:
        name = f"{item['paper']}, {item['item']}"
        if item["verdict"] not in VERDICTS or item["covers"] not in ("all", "part", "nothing"):
            found.append(f"{name}: verdict {item['verdict']!r}, covers {item['covers']!r}")
        if item["verdict"] != "agrees" and not item.get("why"):
            found.append(f"{name}: no reason (why)")
        if item["covers"] != "all" and not item.get("missing"):
            found.append(f"{name}: what is missing?")
        if item["covers"] != "nothing" and not item.get("lines"):
            found.append(f"{name}: no lines")
        lines = []
        for selector in item.get("lines", []):
            try:
                lines += figures.select(results, selector, newest=False)
            except LookupError as error:
                found.append(f"{name}: {error}")
        page = (FOLDER / item["page"].partition("#")[0]).read_text(encoding="utf-8")
        every, ratios = figures.table_numbers(page)
        values = [number for line in lines for number in figures.numbers(line)]
        given = {str(figure) for figure in figures.figures_of(item.get("given", ""))}
        for figure in figures.figures_of(item["ours"]):
            near = any(figure.is_near(value) for value in (ratios if figure.unit in figures.RATIOS else every))
            if not near and str(figure) not in given and not figures.is_backed(figure, values):
                found.append(f"{name}: {figure} has no line")
    return found


def stale(items: Sequence[Item], results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Items with lines that are not fresh."""
    found = []
    for item in items:
        states: Counter[str] = Counter()
        for selector in item.get("lines", []):
            file = selector.split()[0]
            states.update(freshness.state(file, line) for line in figures.select(results, selector))
        if set(states) - freshness.CURRENT:
            counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            found.append(f"{item['paper']}, {item['item']}: {counts}")
    return found


# ------------------------------------------------------------------------------------------ page


def sections() -> dict[str, str]:
    """Parts of the page."""
    from paper_common import table

    items, built = load()
    rows = [[item["paper"], f"[{item['item']}]({item['page']})", item["what"], item["theirs"], item["ours"],
             verdict_of(item)] for item in items]  # fmt: skip
    methods = [[paper, name, where] for paper, found in built.items() for name, where in found.items()]
    return {
        "counts": counts(items),
        "items": table(["paper", "item", "subject", "theirs", "ours", "verdict"], rows).replace("---:", "---"),
        "controls": controls(),
        "methods": table(["paper", "item", "where it is here"], methods).replace("---:", "---"),
    }


def _without_time(cases: list[dict[str, Any]]) -> str:
    if any("error" in case for case in cases):
        return " (did not run)"
    return "" if all(case["equal"] for case in cases) else " (other results)"


def controls() -> str:
    """What each control measured: the commit of earlier lines beside a later one."""
    from paper_common import table

    rows = []
    for line in freshness.controls():
        failed = [
            part + _without_time(line["cases"][part]) for part in sorted(set(line["cases"]) - set(line["passed"]))
        ]
        commits = (f"`{line[side]['commit'][:9]}`" for side in ("from", "to"))
        low, high = line["ratios"]
        rows.append([line["date"], line["gpu"], *commits, ", ".join(line["passed"]) or "-", f"{low:.3f} to {high:.3f}",
                     ", ".join(failed) or "-"])  # fmt: skip
    header = [
        "date",
        "GPU",
        "lines of",
        "beside",
        "equal results in equal time",
        "new / old seconds",
        "not in equal time",
    ]
    return table(header, rows).replace("---:", "---") if rows else ""


def verdict_of(item: Item) -> str:
    """Verdict, reason and what is missing."""
    text = f"**{item['verdict']}**"
    text += f" because {item['why']}" if item["verdict"] == "differs" else f": {item['why']}" if item.get("why") else ""
    text += f". Missing: {item['missing']}" if item.get("missing") else ""
    return text + (f". Not available: {item['unavailable']}" if item.get("unavailable") else "")


def counts(items: Sequence[Item]) -> str:
    """How many items are covered, and the verdicts."""
    covers = Counter(item["covers"] for item in items)
    verdicts = Counter(item["verdict"] for item in items)
    but_for = sum(item["covers"] == "all" and "unavailable" in item for item in items)
    return (
        f"Of {len(items)} tables and figures with data, {covers['all']} are repeated as a whole ({but_for} of them but "
        f"for systems or data that are not available), {covers['part']} in part and {covers['nothing']} not at all. "
        f"{verdicts['agrees']} agree, {verdicts['differs']} differ, and "
        f"{verdicts['not measurable here']} cannot be measured here."
    )


def main(arguments: Sequence[str]) -> int:
    """Write or check; the exit code is 1 for a problem."""
    items, _ = load()
    results = freshness.results()
    if "--check" not in arguments:
        from paper_common import fill

        fill(FOLDER / "index.md", sections())
        takeaways.draw(FOLDER, results)
    else:
        print(*(f"stale  {text}" for text in stale(items, results)), sep="\n")
    found = problems(items, results)
    print(*(f"PROBLEM  {text}" for text in found), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
