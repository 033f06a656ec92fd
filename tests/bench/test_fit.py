"""The benchmark of whole fits, bench/fit.py, and its data."""

from __future__ import annotations

import json

import numpy as np
import pytest

from support.checkout import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import fit

    return fit


def test_data_are_the_same_for_any_number_of_threads(bench, monkeypatch):
    import fit_data

    monkeypatch.setattr(fit_data, "BLOCK_ENTRIES", 10_000)
    for implicit in (False, True):
        one, three = (fit_data.draw("ml100k", implicit=implicit, threads=threads) for threads in (1, 3))
        for a, b in zip(one, three, strict=True):
            assert a.shape == (943, 1682) and np.array_equal(a.toarray(), b.toarray()) and a.has_canonical_format
        assert 80_000 < one.train.nnz < 120_000 and 0.015 < one.test.nnz / one.train.nnz < 0.025
        assert not one.train.multiply(one.test).nnz


def test_even_data_have_no_repeats(bench, monkeypatch):
    import fit_data

    monkeypatch.setitem(fit_data.SHAPES, "even", fit_data.Shape(50, 100, 500, even=True))
    train, test = fit_data.draw("even", implicit=False)
    assert np.diff(train.indptr).tolist() == [10] * 50 and not test.nnz and train.has_canonical_format


def test_a_fit_is_recorded_by_part_and_beside_rivals(bench, monkeypatch, tmp_path):
    import common
    import fit_data

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for name in ("tiny", "other"):
        monkeypatch.setitem(fit_data.SHAPES, name, fit_data.Shape(60, 90, 900))
    monkeypatch.setattr(bench.rivals, "installed", lambda name: False)
    monkeypatch.setattr(bench, "CASES", (bench.Case("tiny", "implicit", 4, 2), bench.Case("other", "explicit", 4, 2)))
    monkeypatch.setattr(bench, "COLD", ("other",))
    monkeypatch.setattr(bench, "SEARCHED", ("tiny",))
    for case in bench.CASES:
        bench.run_case(case, ["cpu"], "quick", 1, with_rivals=True, with_cold=True, with_search=True)
    lines = list(map(json.loads, (tmp_path / "fit.jsonl").read_text().splitlines()))
    searches = [line for line in lines if "lambdas" in line["what"]]
    assert [line["what"].split(", ")[-1] for line in searches] == ["each from the matrix", "prepared once"]
    assert all(line["shape"] == "tiny" and line["seconds"] > 0 for line in searches)
    lines = [line for line in lines if line not in searches]
    assert [line["shape"] for line in lines] == ["tiny", "other"]
    assert lines[0]["objective"] > 0 < lines[0]["evaluate_all"] and 0 < lines[0]["ndcg@10"] <= 1
    assert lines[1]["rmse"] > 0 and sum(lines[1]["parts"].values()) <= lines[1]["seconds"]
