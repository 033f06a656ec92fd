"""The benchmark of searches, bench/search.py."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from click.testing import CliRunner

import hybridmf as hmf
from support.checkout import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import search

    return search


def test_what_is_left_out(bench, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "irspack" else object())
    chosen, left_out = bench.methods_here((), "cpu")
    assert chosen == ["hmf.search", "hmf.search, the same space", "Optuna, hybridmf", "Optuna, implicit"]
    assert left_out == {"irspack's tuner": "irspack not installed", "Optuna, implicit on a GPU": "runs on a GPU"}
    chosen, left_out = bench.methods_here((), "cuda")
    assert chosen == ["hmf.search", "hmf.search, the same space", "Optuna, hybridmf", "Optuna, implicit on a GPU"]
    assert left_out["Optuna, implicit"] == "runs on the CPU"
    assert bench.methods_here(("Optuna, implicit",), "cuda")[0] == ["Optuna, implicit"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench.methods_here((), "cuda")[0][-1] == "random, hybridmf"


def test_the_table_divides_by_the_time_of_the_search(bench):
    traces = {"hmf.search": [(1.0, 0.5), (2.0, 0.999)], "Optuna, hybridmf": [(1.0, 0.2), (9.0, 1.0)]}
    lines = {("a", 0, name): {"trace": trace, "seconds": 10.0} for name, trace in traces.items()}
    text = bench.comparison(lines | {("a", 0, "random, hybridmf"): {"trace": [(1.0, 0.3)], "seconds": 10.0}})
    assert "| a | hmf.search | 0.9990 | 2 | 1 of 1 | 4.5 x |" in text
    assert "| a | random, hybridmf | 0.3000 | > 10 | 0 of 1 |  |" in text


def test_a_budget_is_kept_and_says_what_it_leaves_out(bench, monkeypatch):
    small = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.02, seed=0)
    lines: list[dict[str, object]] = []
    given: list[float] = []

    def slow(train, validation, seconds, seed, device):
        given.append(seconds)
        clock[0] += 3.0
        return [(1.0, 0.5)]

    clock = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(bench, "ratings_of", lambda name, data: small)
    monkeypatch.setattr(bench, "record", lambda file, line: lines.append(line))
    monkeypatch.setattr(bench, "METHODS", {"hmf.search": slow, "random, hybridmf": slow})
    arguments = ["--set", "ml-20m, synthetic", "--budget", "8", "--seeds", "2"]
    done = CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    np.testing.assert_allclose(given, [2.0, 5 / 3, 1.0])
    assert "the budget of 8 s leaves out [('ml-20m, synthetic', 1, 'random, hybridmf')]" in done.output
    assert "| hmf.search | 0.5000 | 1 | 2 of 2 | 1.0 x |" in done.output and len(lines) == 3


def test_a_library_that_fails_is_named_and_the_others_go_on(bench, monkeypatch):
    small = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.02, seed=0)

    def fails(*_):
        raise ValueError("no such option")

    monkeypatch.setattr(bench, "ratings_of", lambda name, data: small)
    monkeypatch.setattr(bench, "record", lambda file, line: None)
    monkeypatch.setattr(bench, "NEEDS", {"other": ()})
    monkeypatch.setattr(bench, "METHODS", {"other": fails, "hmf.search": lambda *_: [(1.0, 0.5)]})
    arguments = ["--set", "ml-20m, synthetic", "--seeds", "1"]
    done = CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    assert "seed 0 other failed: ValueError: no such option" in done.output
    assert "| hmf.search | 0.5000 | 1 | 1 of 1 |" in done.output
    monkeypatch.setattr(bench, "METHODS", {"hmf.search": fails})
    with pytest.raises(ValueError, match="no such option"):
        CliRunner().invoke(bench.main, arguments, catch_exceptions=False)


def test_values_of_a_sample_are_measured_again_on_all_users(bench, monkeypatch):
    small = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.02, seed=0).binarize()
    train, validation = (part.user_items for part in hmf.split(small, 0.2, random_state=0))
    model = hmf.ImplicitALS(8, device="cpu", iterations=3)
    rungs = ((0.3, 10), (0.5, 20), (1.0, 30))
    monkeypatch.setitem(vars(importlib.import_module("hybridmf.search")), "RUNGS", rungs)
    found = hmf.search(train, validation, model=model, trials=12, random_state=0)
    trace = bench.trace_of(found, model, train, validation)
    assert len(trace) >= 1 and sorted(trace) == trace
    best = max((each for each in found.trials if each.state == "complete"), key=lambda each: each.value)
    seed = found.best.random_state
    again = hmf.ImplicitALS(device="cpu", iterations=3, random_state=seed, **best.params).fit(train)
    assert trace[-1] == (best.finished, bench.value_of(again, train, validation)) != (best.finished, best.value)
