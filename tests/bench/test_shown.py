"""Which lines of bench/results/ the pages show."""

from __future__ import annotations

import json
import sys

import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import freshness
import paper_common
import shown


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Three lines of a file of results."""
    monkeypatch.setattr(freshness, "RESULTS", tmp_path)
    texts = [json.dumps({"task": "t", "factors": f, "seconds": {"simd": f / 3}}) for f in (32, 64, 128)]
    (tmp_path / "cpu.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return lambda: freshness.results()["cpu"]


def test_a_line_is_shown_if_a_measured_number_of_it_is_read(lines, tmp_path):
    with shown.reading() as noted:
        first, second, third = lines()
        assert first["factors"] == 32 and first.get("task") == "t" and first.get("none") is None
        assert noted == set()
        assert second["seconds"]["simd"] == 64 / 3
        assert (third | {"more": 1.0}).get("seconds") == {"simd": 128 / 3}
        (tmp_path / "page.md").write_text("not written")
        with paper_common.figure(tmp_path / "new.svg", 1.0, 1.0) as drawing:  # of a machine without a picture so far
            drawing.subplots()
    assert noted == {("cpu", 1), ("cpu", 2)}
    assert not (tmp_path / "page.md").exists()
    lines()[0]["seconds"]  # outside
    assert len(noted) == 2


def test_lines_that_prose_selects_are_shown_by_its_page(monkeypatch):
    monkeypatch.setattr(shown, "RENDERERS", {})
    found = shown.shown()
    assert any(file == "cold" for file, _ in found["docs/performance.md"])


def test_the_table_counts_states_and_names_what_is_older(monkeypatch, capsys):
    monkeypatch.setattr(shown, "shown", lambda: {"a.md": {("cpu", 0), ("quoted", 0)}, "b.md": {("cpu", 0)}})
    older = {"task": "t", "shape": "s", "factors": 32, "date": "2026-11-27", "commit": "0123456789ab"}
    older |= {"machine": {"cores": 2, "instruction_set": "avx512"}}
    monkeypatch.setattr(freshness, "results", lambda: {"cpu": [older, {"task": "u"}], "quoted": [{}]})
    monkeypatch.setattr(freshness, "state", lambda file, line: "no hash" if file == "cpu" else "quoted")
    shown.main([])
    told = capsys.readouterr().out
    assert "| a.md | 2 | 0 | 0 | 1 | 1 |" in told and "| all | 2 | 0 | 0 | 1 | 1 |" in told
    case = "cpu 0: t: shape=s, factors=32, 2 cores (AVX-512), 2026-11-27, 012345678, no hash (a.md, b.md)"
    assert case in told.splitlines()
    shown.main(["--unused"])
    assert "cpu u   no hash: 1" in capsys.readouterr().out
