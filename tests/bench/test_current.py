"""Which lines of a case the pages show, bench/current.py."""

from __future__ import annotations

import sys

import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import current
import freshness


@pytest.fixture(autouse=True)
def states(monkeypatch):
    """Lines say of themselves whether they are older."""
    monkeypatch.setattr(freshness, "state", lambda file, line: "older sources" if line.get("old") else freshness.FRESH)


def line(number, isa="avx512", gpu=None, **fields):
    """A line; its number tells which it is."""
    made = {"n": number, "f": 64, "machine": {"cores": 2, "instruction_set": isa}}
    return made | ({"gpu": gpu} if gpu else {}) | fields


def numbers(lines):
    return [each["n"] for each in lines]


def test_a_current_line_is_shown_even_if_an_older_one_is_newer():
    lines = [line(0, old=True), line(1), line(2), line(3, old=True)]
    assert numbers(current.of_cases("cpu", lines, "f")) == [2]
    assert numbers(current.best_first("cpu", lines)) == [2, 1, 3, 0]


def test_an_older_line_is_shown_only_where_its_case_has_no_current_one():
    lines = [
        line(0, f=32, old=True),
        line(1, f=32, old=True),
        line(2, old=True),
        line(3, "avx2"),
        line(4, gpu="G", old=True),
    ]
    # the second of two older ones; avx2 alone at 64; a GPU is another case than a CPU
    assert numbers(current.of_cases("cpu", lines, "f")) == [1, 3, 4]
    assert numbers(current.of_cases("cpu", [line(0), line(1, "avx2")], "f")) == [0, 1]


def test_a_table_of_one_kind_takes_the_one_with_most_current_cases_then_the_newest():
    first = [line(0, gpu={"name": "A"}), line(1, gpu={"name": "A"}, f=32)]
    assert numbers(current.of_one_kind("gpu", [*first, line(2, gpu="B")], "f")) == [0, 1]
    assert numbers(current.of_one_kind("gpu", [*first, line(2, gpu="B"), line(3, gpu="B", f=32)], "f")) == [2, 3]
    older = [each | {"old": True} for each in first]
    assert numbers(current.of_one_kind("gpu", [*older, line(2, gpu="B")], "f")) == [2]
    assert current.of_one_kind("gpu", [], "f") == []


def test_numbers_of_a_ratio_are_of_one_run():
    runs = [
        line(2 * k + i, what=what, date=date, old=date == "3")
        for k, date in enumerate("123")
        for i, what in enumerate("ab")
    ]
    assert numbers(current.together("fit", runs, "what", "ba")) == [3, 2]  # the newest run is older code
    assert numbers(current.together("fit", runs[4:], "what", "ab")) == [4, 5]
    with pytest.raises(LookupError, match="no run has what"):
        current.together("fit", [runs[0], runs[3]], "what", "ab")


def test_several_numbers_of_gpus_are_of_the_run_with_most_of_them():
    runs = [line(0, gpus=1, date="1"), line(1, gpus=4, date="1"), line(2, gpus=1, date="2")]
    runs += [line(10 + count, gpus=count, date="3", old=True) for count in (1, 2, 4)]
    assert {count: each["n"] for count, each in current.fullest("scale", runs, "gpus").items()} == {1: 0, 4: 1}
    assert current.fullest("scale", runs[3:], "gpus").keys() == {1, 2, 4}


def test_nothing_is_read_that_was_measured():
    import shown

    noted = set()
    lines = [shown.traced(line(k, seconds={"simd": 0.5}, old=not k), ("cpu", k), noted) for k in range(2)]
    current.of_one_kind("cpu", lines, "f")
    assert current.names(lines[0], "seconds") == {"simd"} and not noted


def test_early_fits_on_a_gpu_name_none():
    assert current.kind(line(0, what="hybridmf, cuda")) == "NVIDIA H200"
    assert current.kind(line(0, what="implicit, cpu (3 CG steps)")) == "2 cores (AVX-512)"
    assert current.kind(line(0, gpu={"name": "A"})) == "A"
