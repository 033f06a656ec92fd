"""The benchmark of the defaults, bench/defaults.py, and the tables that the documentation shows of it."""

from __future__ import annotations

import pytest

import hybridmf as hmf
from support.checkout import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import defaults

    return defaults


def test_the_tuning_page_shows_the_recorded_figures(bench, capsys):
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8").splitlines()
    lines = bench.newest()
    assert lines.keys() == bench.SETS.keys()
    bench.report(lines)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    figures = [line.split(" | ", 1)[1] for line in printed if not line.startswith(("| set", "| ---"))]
    assert len(figures) == 3 * len(lines)
    for shown in figures:
        numbers = shown.split(" | regularization=")[0]  # the page writes settings in words
        assert any(numbers in line for line in page), shown


def test_search_and_candidates_are_settings_of_the_model(bench):
    parts = bench.Parts(hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.03, seed=0))
    draws = list(bench.draws(parts, 4))
    assert draws == list(bench.draws(parts, 4))  # a fixed seed
    for options in (*draws, *bench.candidates(parts).values()):
        row = bench.fitted(parts, options, factors=2, iterations=1)
        assert row.keys() == {*options, *bench.METRICS, "validation"} and 0 <= row["ndcg@10"] <= 1
