"""Figures in prose have lines; every table and figure of the papers has a row with lines or a reason."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "bench"))
figures = importlib.import_module("figures")
freshness = importlib.import_module("freshness")

PAPERS = Path(os.environ.get("HYBRIDMF_TEST_DATA", ROOT.parent / "shared" / "data")).parent / "papers"


@pytest.fixture(scope="module")
def results():
    return freshness.results()


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_figure_in_prose_has_a_line(page, results):
    """`python bench/figures.py` names them all, and lists the stale ones."""
    report = figures.Report()
    figures.check_page(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"), results, report)
    assert report.missing == []


# ---------------------------------------------------------------------------------------------------- the check itself

LINES = {"some": [{"task": "a", "ms": 20.04, "date": "1", "commit": "x"},
                  {"task": "a", "ms": 10.02, "date": "2", "commit": "y"},
                  {"task": "b", "seconds": {"ours": 0.5, "theirs": 4.0}, "date": "2", "commit": "y"}],
         "quoted": [{"kind": "quoted", "rival": "r", "value": 250, "unit": "ms"}]}  # fmt: skip


def missing(text):
    report = figures.Report()
    figures.check_page("page", text, LINES, report)
    return [entry.partition(": ")[2] for entry in report.missing]


@pytest.mark.parametrize(("text", "expected"), [
    ("It takes 10.0 ms.<!-- lines: some task=a -->", []),
    ("It takes 10.1 ms.<!-- lines: some task=a -->", ["10.1 ms has no line"]),
    ("It took 20.0 ms.<!-- lines: some task=a -->", []),  # of an older run
    ("It is 8 times as fast (3.5 s less).<!-- lines: some task=b -->", []),
    ("It is 7 times as fast.<!-- lines: some task=b -->", ["7 times has no line"]),
    ("It takes 0.5 to 4 s.<!-- lines: some task=b -->", []),
    ("It takes 0.5 to 3 s.<!-- lines: some task=b -->", ["3 s has no line"]),
    ("It takes 11 % of it.<!-- lines: some task=b -->", ["11 % has no line"]),
    ("It takes 12.5 % of it.<!-- lines: some task=b -->", []),
    ("Theirs takes 250 ms.<!-- lines: quoted rival=r -->", []),
    ("In the paper 2.5 times.<!-- given: 2.5 times -->", []),
    ("It takes 3 ms.<!-- lines: some task=c -->", ["no line fits 'some task=c'", "3 ms has no line"]),
    ("| a | 10.0 ms | <!-- lines: some task=a -->\n| b | 10.0 ms |", ["10.0 ms has no line"]),
    ("- 10.0 ms<!-- lines: some task=a -->\n- 0.5 s", ["0.5 s has no line"]),
    ("<!-- lines: some task=a -->\n\nIt takes 10.0 ms.", []),
    ("With f = 32 to 128, in a matrix of 480,189 x 17,770, at `0.5 s`.", []),
    ("# What the paper claims\n\n7 times\n\n## More\n\n8 ms\n\n# Then\n\n9 ms", ["9 ms has no line"]),
    ("```bash\nsleep 7 s\n```\n", []),
    ("<!-- begin t -->\n| a | ms | gain |\n|-|-|-|\n| x | 7.25 | 3.0 % |\n<!-- end t -->\n\n7.3 ms, 3 %, 7 times.",
     ["7 times has no line"]),
])  # fmt: skip
def test_figures_are_found_and_checked(text, expected):
    assert missing(text) == expected


def test_stale_lines_are_listed_and_do_not_fail():
    report = figures.Report()
    figures.check_page("page", "It takes 10.0 ms.<!-- lines: some task=a -->", LINES, report)
    assert report.missing == []
    assert report.stale == ["page:1: some task=a: no hash"]
    report = figures.Report()
    figures.check_page("page", "It took 20.0 ms.<!-- lines: some task=a -->", LINES, report)
    assert report.missing == []
    assert report.stale[1:] == ["page:1: 20.0 ms: only an older line has it"]
    report = figures.Report()
    figures.check_page("page", "It took 20.0 ms.<!-- lines: some task=a date=1 -->", LINES, report)
    assert report.stale == ["page:1: some task=a date=1: no hash"]


# ---------------------------------------------------------------------------------------------------- the papers' items


@pytest.fixture
def evidence():
    pytest.importorskip("tomllib")  # Python 3.11
    return importlib.import_module("evidence")


def test_every_table_and_figure_of_the_papers_has_a_row(evidence):
    items, built = evidence.load()
    rows = [(item["paper"], item["item"]) for item in items] + [
        (p, name) for p, found in built.items() for name in found
    ]
    assert len(rows) == len(set(rows))
    assert set(rows) == evidence.expected()
    assert len(items) == 43


@pytest.mark.skipif(not PAPERS.exists(), reason="the papers are not beside the checkout")
def test_the_papers_have_as_many_figures_and_tables(evidence):
    names = {"BALS": "000", "Gates": "001", "cuMF": "003", "MSGD": "004"}
    for paper, prefix in names.items():
        text = next(PAPERS.glob(f"{prefix}*.txt")).read_text(encoding="utf-8")
        captions = set(re.findall(r"^Fig(?:ure|\.) (\d+)[.:]", text, flags=re.MULTILINE))
        tables = set(re.findall(r"^(?:Table|TABLE) (\d+|I)\b(?! (?:lists|indicates|shows))", text, flags=re.MULTILINE))
        assert (len(captions), len(tables)) == evidence.PUBLISHED[paper], paper


def test_items_have_lines_or_a_reason_and_figures_with_lines(evidence, results):
    items, _ = evidence.load()
    assert evidence.problems(items, results) == []


def test_a_problem_of_an_item_is_named(evidence, results):
    good = evidence.load()[0][0]
    for change, expected in (
        ({"lines": ["paper_bals task=none"]}, "no line fits 'paper_bals task=none'"),
        ({"lines": []}, "no lines"),
        ({"verdict": "differs", "why": ""}, "no reason (why)"),
        ({"covers": "part", "missing": ""}, "what is missing?"),
        ({"verdict": "maybe"}, "verdict 'maybe'"),
        ({"ours": "it takes 123.456 ms"}, "123.456 ms has no line"),
    ):
        assert any(expected in text for text in evidence.problems([good | change], results)), expected


def test_the_page_is_what_the_data_file_says(evidence, tmp_path):
    index = (evidence.FOLDER / "index.md").read_text(encoding="utf-8")
    from paper_common import fill

    (tmp_path / "index.md").write_text(index)
    fill(Path(tmp_path / "index.md"), evidence.sections())
    assert (tmp_path / "index.md").read_text() == index


def test_rendered_pages_are_what_the_lines_say(tmp_path, monkeypatch):
    """docs/performance.md, bench/FIGURES.md and the quoted figures; test_evidence.py has the papers' pages."""
    performance, quoted = importlib.import_module("performance"), importlib.import_module("quoted")
    pages = [*performance.PAGES, quoted.PAGE]
    copies = [tmp_path / page.name for page in pages]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(performance, "PAGES", copies[:-1])
    monkeypatch.setattr(quoted, "PAGE", copies[-1])
    performance.render()
    quoted.render()
    for page, copy in zip(pages, copies, strict=True):
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_quoted_lines_have_their_provenance(results):
    for line in results["quoted"]:
        assert {
            "kind",
            "rival",
            "source",
            "task",
            "value",
            "unit",
            "settings",
            "how",
            "gpu",
            "date",
            "repeatable",
        } <= set(line)
        if line["repeatable"] == "from source only":
            assert {"driver", "cuda", "cupy"} <= set(line["gpu"])


def test_performance_is_short():
    assert len((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()) <= 350


def test_pages_end_with_a_picture_drawn_from_the_lines(tmp_path, results):
    takeaways = importlib.import_module("takeaways")
    takeaways.draw(tmp_path, results)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {f"takeaway-{name}.svg" for name in takeaways.PICTURES}
    for name in takeaways.PICTURES:
        page = (ROOT / "docs" / "evidence" / f"{name}.md").read_text(encoding="utf-8")
        assert f"(takeaway-{name}.svg)" in page.partition("## What to take from it")[2]
        assert (ROOT / "docs" / "evidence" / f"takeaway-{name}.svg").exists()
