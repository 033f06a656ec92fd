"""The benchmark of the defaults, bench/defaults.py, and the tables that the documentation shows of it."""

from __future__ import annotations

import numpy as np
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
    for sets, report, tables in (
        (bench.SETS, bench.report_implicit, 3),
        (bench.EXPLICIT_SETS, bench.report_explicit, 1),
    ):
        lines = bench.newest(sets)
        assert lines.keys() == sets.keys()
        report(lines)
        compare_with(page, capsys.readouterr().out, tables * len(lines))


def compare_with(page, text, count):
    printed = [line for line in text.splitlines() if line.startswith("| ")]
    figures = [line.split(" | ", 1)[1] for line in printed if not line.startswith(("| set", "| ---"))]
    assert len(figures) == count
    for shown in figures:
        numbers = shown.split(" | regularization=")[0]  # the page writes settings in words
        assert any(numbers in line for line in page), shown


def test_the_search_has_settings_of_the_model(bench):
    parts = bench.Parts(hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.03, seed=0))
    draws = list(bench.draws(parts, 4))
    assert draws == list(bench.draws(parts, 4))  # a fixed seed
    for options in draws:
        row = bench.fitted(parts, options, factors=2, iterations=1)
        assert row.keys() == {*options, *bench.METRICS, "validation"} and 0 <= row["ndcg@10"] <= 1


def test_constants_are_chosen_by_the_other_sets(bench):
    costs = {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 1.0, "y": 1.1}, "c": {"x": 3.0, "y": 1.0}}
    assert bench.left_one_out(costs) == {"a": "y", "b": "y", "c": "x"}


def test_shapes_have_the_scales_and_densities_they_stand_for(bench):
    jokes = bench.jokes()
    assert -10 <= jokes.data.min() < -9 and 9 < jokes.data.max() <= 10 and jokes.nnz > 0.3 * np.prod(jokes.shape)
    shop = bench.shop(500, 200, 2000, tastes=0.5, zipf=1.0, groups=5)
    assert shop.shape == (500, 200) and shop.nnz == 2000 and shop.user_items.data.min() >= 1
