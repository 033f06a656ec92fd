"""A control compares the code of two trees: equal results in equal time, and which code paths that covers."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import controls
import freshness
from controls import Case

from hybridmf import datasets
from hybridmf.formats import transpose

CASE = Case("ml-10m", "CCD", {"factors": 4, "device": "cpu"}, iterations=2)
RACE = Case("ml-10m", "SGD", {"factors": 4, "device": "cpu", "biases": False, "schedule": "hogwild"}, 2, races=True)


def runs(seconds, sha256="a"):
    return [{"seconds": [each, 2 * each], "sha256": sha256} for each in seconds]


@pytest.mark.parametrize(
    ("old", "new", "equal", "passed"),
    [
        (runs([1.0, 1.2]), runs([1.3, 1.02]), True, True),
        (runs([1.0]), runs([1.04]), True, False),
        (runs([1.04]), runs([1.0]), True, False),  # faster is not the same either
        (runs([1.0]), runs([1.0], "b"), False, False),
        (runs([1.0]), [{"error": "ValueError: x"}], False, False),
        ([], runs([1.0]), False, False),
    ],
)
def test_a_case_passes_with_equal_results_in_equal_seconds(old, new, equal, passed):
    line = controls.compare(CASE, old, new)
    assert (line["equal"], line["passed"]) == (equal, passed)


def test_races_are_compared_by_their_error():
    old, near, far = ([{"seconds": [1.0], "rmse": rmse}] for rmse in (0.9, 0.905, 0.92))
    assert controls.compare(RACE, old, near)["passed"]
    assert not controls.compare(RACE, old, far)["passed"]


def test_ratings_keep_their_types_on_the_way_to_a_process(monkeypatch, tmp_path):
    import paper_common

    monkeypatch.setattr(paper_common, "draw", lambda shape: datasets.synthetic("ml-1m", scale=0.05).user_items)
    controls._draw("ml-1m", tmp_path)
    indptr = np.load(tmp_path / "ml-1m-user-indptr.npy")
    np.save(tmp_path / "ml-1m-user-indptr.npy", indptr.astype(np.int64))  # as those drawn on a GPU
    matrix, item_users = (controls._load(tmp_path / f"ml-1m-{side}") for side in ("user", "item"))
    assert (matrix.indices.dtype, matrix.data.dtype) == (np.int32, np.float32)
    assert item_users.shape == matrix.shape[::-1] and abs(item_users.T - matrix).sum() == 0


@pytest.mark.parametrize("case", [CASE, RACE, Case("x", "ExplicitALS", {"factors": 4, "device": "cpu"}, 2, "top_k")])
def test_a_case_is_measured_on_the_cpu(case):
    matrix = datasets.synthetic("ml-1m", scale=0.05).user_items
    first, second = (controls.measure(case, matrix, transpose(matrix)) for _ in range(2))
    assert len(first["seconds"]) == 2
    assert first["rmse"] < 3 if case.races else first["sha256"] == second["sha256"]


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_half_sweeps_are_measured_by_events(gpu, monkeypatch):
    """Their results are those of the first iterations, however many more are timed."""
    matrix = datasets.synthetic("ml-1m", scale=0.02).user_items
    for options in ({}, {"assembly": "sparse_syrk"}):
        case = Case("x", "ALS, implicit", {"factors": 4, **options}, 2, "events")
        monkeypatch.setattr(controls, "STEADY_MS", 0)
        first = controls.measure(case, matrix, transpose(matrix))
        assert len(first["seconds"]) == 2 and min(first["seconds"]) > 0
        monkeypatch.setattr(controls, "STEADY_MS", 3e3 * min(first["seconds"]))
        second = controls.measure(case, matrix, transpose(matrix))
        assert len(second["seconds"]) > 2
        assert first["sha256"] == second["sha256"]


def test_a_path_needs_the_parts_that_measure_as_its_lines_do():
    passed = {"als", "sgd", "assemblies by events"}
    assert controls.of_clock(passed, by_events=False) == {"als", "sgd"}
    assert controls.of_clock(passed, by_events=True) == {"assemblies", "sgd"}


def test_paths_that_are_measured_by_events_exist():
    names = {f"{file} {key}" for file in freshness.CODE for key in freshness.code_paths(file)}
    assert names >= freshness.BY_EVENTS | freshness.BY_RESULTS


def test_seconds_of_what_is_no_figure_may_differ():
    slow = controls.compare(Case("x", "draws", {}, timed=False), runs([1.0]), runs([2.0]))
    assert slow["passed"] and slow["ratio"] == 2.0


class Timer:
    """In place of a process of a tree: a case takes half as long again in new processes until the third."""

    asked: ClassVar[list[tuple[str, str]]] = []
    started: ClassVar[list[str]] = []
    ends_after = 1000

    def __init__(self, tree, *arguments):
        self.tree = "new" if tree == ROOT else "old"
        self.started.append(self.tree)

    def measure(self, name):
        self.asked.append((self.tree, name))
        if len(self.asked) > self.ends_after:
            controls._terminate()
        slow = self.tree == "new" and name == "top-k-cpu:0" and len(self.started) < 4
        return {"seconds": [1.5 if slow else 1.0], "sha256": "a"}

    def close(self):
        self.started.append("closed")


@pytest.fixture
def timer(monkeypatch):
    made = type("Timer", (Timer,), {"asked": [], "started": []})
    monkeypatch.setattr(controls, "Process", made)
    return made


def test_a_case_runs_in_both_trees_in_turn_and_again_if_it_differs_by_time_alone(timer, tmp_path):
    found = controls.run_parts(tmp_path, ["ccd-cpu", "top-k-cpu"], tmp_path, 60.0)
    turns = lambda name: [(tree, name) for tree in ("old", "new", "new", "old")]  # noqa: E731
    assert timer.asked == [*turns("ccd-cpu:0"), *turns("top-k-cpu:0"), *turns("top-k-cpu:0")]
    assert timer.started == ["old", "new", "closed", "closed"] * 2
    assert [line["passed"] for part in found.values() for line in part] == [True, True]
    timer.asked.clear()
    controls.run_parts(tmp_path, ["data"], tmp_path, 60.0)
    assert timer.asked == [("old", "data:0"), ("new", "data:0")]  # its seconds are no figure
    timer.asked.clear()
    found = controls.run_parts(tmp_path, ["top-k-cpu"], tmp_path, -1.0)
    assert not timer.asked and not found["top-k-cpu"][0]["passed"]


def test_turns_before_a_sigterm_count(timer, tmp_path):
    timer.ends_after = 2
    found = controls.run_parts(tmp_path, ["ccd-cpu", "top-k-cpu"], tmp_path, 60.0)
    assert len(timer.asked) == 3 and found["ccd-cpu"][0]["passed"] and not found["top-k-cpu"][0]["passed"]
    assert timer.started.count("closed") == 2


def test_a_process_measures_the_cases_that_it_is_asked_for(tmp_path):
    matrix = datasets.synthetic("ml-1m", scale=0.05).user_items
    controls.save(matrix, tmp_path / "ml-10m")
    process = controls.Process(ROOT, "--serve", "--folder", str(tmp_path))
    try:
        first, other, second = (process.measure(name) for name in ("ccd-cpu:0", "data:0", "ccd-cpu:0"))
        assert first["sha256"] == second["sha256"] and len(first["seconds"]) == 10
        assert "FileNotFoundError" in other["error"]  # of another shape, which is not there
        process._process.kill()
        assert process.measure("ccd-cpu:0") == {"error": "its process ended"}
    finally:
        process.close()


def test_a_code_path_is_covered_if_its_differing_files_are_of_parts_that_passed(monkeypatch):
    patterns = (*freshness.SGD_CPU, "hybridmf/cpu/ccd.py")
    changed: set[str] = set()

    def forms_of(patterns, root=None):
        return {name: f"{name in changed and root is None}" for name in freshness.files(patterns)}

    monkeypatch.setattr(freshness, "forms_of", forms_of)
    covered = lambda passed: controls.is_covered(patterns, patterns, ROOT, passed)  # noqa: E731
    assert not covered({"sgd-cpu"})  # nothing differs
    changed.add("hybridmf/cpu/sgd.py")
    assert covered({"sgd-cpu"})
    assert not covered({"sgd", "als-cpu"})
    changed.add("hybridmf/cpu/ccd.py")  # of no part that is inside
    assert not covered({"sgd-cpu"})


def test_a_control_of_searches_compares_their_trials_without_their_seconds():
    matrix = datasets.synthetic("ml-1m", feedback="implicit", scale=0.02, seed=0).user_items
    case = Case("ml-1m", "search", {"trials": 2}, 2, "searches")
    first, again, other = (
        controls.measure(replace(case, options={"trials": trials}), matrix, matrix) for trials in (2, 2, 1)
    )
    assert first["sha256"] == again["sha256"] != other["sha256"] and len(first["seconds"]) == 2


def test_equal_results_are_enough_where_figures_are_no_times(monkeypatch):
    asked = {}

    def is_covered(earlier, patterns, old, passed, before):
        asked[patterns] = passed
        return False

    monkeypatch.setattr(controls, "is_covered", is_covered)
    controls.covers(ROOT, {"data"}, {"data", "tiles"})
    assert asked[freshness.CODE["paper_bals"]["vacancies"]] == {"data", "tiles"}
    assert asked[freshness.CODE["layouts"][""]] == {"data"}
    controls.covers(ROOT, {"data"}, {"data", "tiles", "sgd"})
    assert asked[freshness.CODE["paper_bals"][""]] == {"data", "tiles"}  # CUDA events have no seconds of the host


def test_every_part_has_cases_and_files():
    assert set(controls.CASES) == set(controls.PARTS)
    for part in controls.PARTS:
        assert controls.CASES[part] and controls.files_of(part, freshness)
        for case in controls.CASES[part]:
            assert case.run in controls.MEASURES


def test_files_that_only_the_other_tree_has_belong_to_its_part(monkeypatch):
    before = types.SimpleNamespace(CCD_CPU=(*freshness.CCD_CPU, "hybridmf/cpu/sgd.py"))  # as if that were gone now
    patterns, earlier = freshness.CCD_CPU, before.CCD_CPU

    def forms_of(patterns, root=None):
        return dict.fromkeys(freshness.files(patterns), "same")

    monkeypatch.setattr(freshness, "forms_of", forms_of)
    assert controls.is_covered(earlier, patterns, ROOT, {"ccd-cpu"}, before)
    assert not controls.is_covered(earlier, patterns, ROOT, set(), before)
    assert not controls.is_covered(earlier, patterns, ROOT, {"ccd-cpu"})  # of no part


def test_the_page_names_each_control(monkeypatch):
    import evidence

    line = {"date": "2026-11-27", "gpu": "H200", "from": {"commit": "a" * 40}, "to": {"commit": "b" * 40},
            "passed": ["als"], "ratios": [0.99, 1.01], "cases": {"als": [], "sgd": []}}  # fmt: skip
    monkeypatch.setattr(freshness, "controls", lambda: (line,))
    row = evidence.controls().splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "2026-11-27", "H200", "`aaaaaaaaa`", "`bbbbbbbbb`", "als", "0.990 to 1.010", "sgd"
    ]  # fmt: skip
