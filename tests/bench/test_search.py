"""The benchmark of searches, bench/search.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_the_table_divides_by_the_time_of_the_search_in_the_same_space(bench):
    traces = {
        "hmf.search": [(1.0, 0.5), (2.0, 2.0)],
        "hmf.search, the same space": [(1.0, 0.5), (2.0, 0.999)],
        "Optuna, hybridmf": [(1.0, 0.2), (9.0, 1.0)],
        "Optuna, implicit": [(1.0, 0.3)],
    }
    lines = {("a", 0, name): {"trace": trace, "seconds": 10.0} for name, trace in traces.items()}
    text = bench.comparison(lines)
    assert "| a | hmf.search | 2.0000 | 2 | 1 of 1 |  | 2 |" in text
    assert "| a | hmf.search, the same space | 0.9990 | 2 | 1 of 1 |  | > 10 |" in text
    assert "| a | Optuna, hybridmf | 1.0000 | 9 | 1 of 1 | 4.5 x | > 10 |" in text
    assert "| a | Optuna, implicit | 0.3000 | > 10 | 0 of 1 | > 5.0 x | > 10 |" in text


def test_a_median_of_runs_that_ended_too_early_is_a_lower_bound(bench):
    def middle(*runs):
        lines = [{"trace": [] if reached is None else [(reached, 1.0)], "seconds": had} for reached, had in runs]
        return str(bench.median_time(lines, 1.0))

    assert middle((1, 9), (2, 9), (3, 9)) == "2"
    assert middle((1, 9), (2, 9), (None, 9)) == "2"
    assert middle((1, 9), (2, 9), (None, 0.5)) == "> 1"  # it may have taken longer than 2
    assert middle((1, 9), (None, 5), (None, 9)) == "> 5"


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
    assert "| hmf.search | 0.5000 | 1 | 2 of 2 |" in done.output
    expected = [("hmf.search", 0), ("hmf.search", 1), ("random, hybridmf", 0)]  # what is left out is of one method
    assert [(line["method"], line["seed"]) for line in lines] == expected
    runs = [("a", 0, name) for name in ("hmf.search", "hmf.search, the same space", "x", "y")]
    assert bench.share_of("x", 26.0, runs) == 10.0 and bench.share_of("hmf.search", 26.0, runs) == 3.0


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


def test_all_searches_evaluate_the_same_users(bench, monkeypatch):
    small = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.02, seed=0)
    monkeypatch.setattr(bench, "ratings_of", lambda name, data: small)
    monkeypatch.setattr(bench, "VALIDATION_USERS", 30)
    train, validation = bench.parts_of("ml-1m", Path())
    assert np.count_nonzero(np.diff(validation.indptr)) == 30 and validation.shape == train.shape
    assert (train + validation).nnz == train.nnz + validation.nnz
    model = hmf.ImplicitALS(8, device="cpu", iterations=3)
    found = hmf.search(train, validation, model=model, trials=12, random_state=0)
    whole = {each.finished: each for each in found.trials if each.state == "complete"}
    trace = bench.trace_of(found)
    assert [seconds for seconds, _ in trace] == sorted(whole)
    again = model.set_params(random_state=found.best.random_state, **whole[trace[-1][0]].params).fit(train)
    assert bench.value_of(again, train, validation) == trace[-1][1]


def test_implicit_on_a_gpu_gets_confidences_it_can_write_and_is_ranked_as_ours(bench, monkeypatch):
    """A stand-in for its solver, which needs a GPU: exact fits of the same objective."""

    class Solver:
        def __init__(self, factors, regularization, iterations, random_state):
            assert random_state  # of which 0 would be the clock
            self.of = als.AlternatingLeastSquares(
                factors, regularization, iterations=iterations, random_state=random_state, use_cg=False, use_gpu=False
            )

        def fit(self, liked, show_progress):
            for array, kind in ((liked.data, np.float32), (liked.indices, np.int32), (liked.indptr, np.int32)):
                assert array.dtype == kind and array.flags.writeable
            self.of.fit(liked)
            self.user_factors, self.item_factors = (
                SimpleNamespace(to_numpy=lambda array=array: array)
                for array in (self.of.user_factors, self.of.item_factors)
            )

    from hybridmf.compat.implicit import als

    monkeypatch.setitem(sys.modules, "implicit", ModuleType("implicit"))
    monkeypatch.setitem(sys.modules, "implicit.gpu", ModuleType("implicit.gpu"))
    monkeypatch.setitem(sys.modules, "implicit.gpu.als", SimpleNamespace(AlternatingLeastSquares=Solver))
    chosen = {"unobserved_weight": 0.1, "regularization": 7.0}
    trial = SimpleNamespace(suggest_float=lambda name, low, high, log: chosen[name])

    def optuna_study(objective, seconds, seed):
        return [(1.0, objective(trial))]

    monkeypatch.setattr(bench, "optuna_study", optuna_study)
    small = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.05, seed=0).binarize()
    train, validation = (part.user_items for part in hmf.split(small, 0.2, random_state=0))
    ((_, value),) = bench.optuna_implicit_on_a_gpu(train, validation, 1.0, 0, "cuda")
    model = hmf.ImplicitALS(bench.FACTORS, alpha=0.0, iterations=10, random_state=0, **chosen)
    assert value == pytest.approx(bench.value_of(model.fit(train), train, validation), rel=0.05)


def test_a_study_goes_on_after_a_setting_that_fails(bench):
    pytest.importorskip("optuna")
    calls: list[float] = []

    def objective(trial):
        calls.append(trial.suggest_float("x", 0, 1))
        if len(calls) == 1:
            raise ValueError("diverged")
        return calls[-1]

    trace = bench.optuna_study(objective, 0.2, 0)
    assert [value for _, value in trace] == calls[1:]

    def fails(trial):
        raise ValueError("read-only")

    with pytest.raises(ValueError, match="read-only"):
        bench.optuna_study(fails, 0.05, 0)
