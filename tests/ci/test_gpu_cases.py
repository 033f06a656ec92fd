"""Fits at real shapes, .ci/gpu_cases.py: its cases, its oracle, its watchdog and its record; all without a GPU."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest

from hybridmf.plan import sgd, types
from support.checkout import ROOT

sys.path.append(str(ROOT / ".ci"))
import gpu_cases
from gpu_matrix import cases, check, data, oracle, pool, records
from gpu_matrix.cases import Case

# ------------------------------------------------------------------------------------------------- cases


def options_of(name: str) -> set[object]:
    return {case.options.get(name) for case in cases.matrix()} - {None}


def test_the_cases_cover_what_the_library_offers():
    on_cpu = {name: set(values) for name, values in cases.NOT_ON_A_GPU.items()}
    assert options_of("precision") == set(types.PRECISIONS) == set(cases.PRECISIONS)
    assert options_of("assembly") | {"auto", "fused"} == set(types.ASSEMBLIES) - on_cpu["assembly"]
    assert options_of("solver") | {"cholesky"} == set(types.SOLVERS)
    assert options_of("dtype") | {"float32"} == set(types.DTYPES)
    assert options_of("row_form") | {"auto"} == set(types.ROW_FORMS)
    assert options_of("schedule") == set(sgd.SCHEDULES) - on_cpu["schedule"] == set(sgd.GPU_SCHEDULES)
    assert options_of("ordering") | {"mixed"} == set(sgd.ORDERINGS)
    assert options_of("rate_schedule") | {"power"} == set(sgd.RATE_SCHEDULES) - on_cpu["rate_schedule"]
    assert options_of("rate_schedule") | {"power"} == set(sgd.GPU_RATE_SCHEDULES)


def test_every_precision_meets_every_rank_and_model():
    found = {(case.model, case.options["precision"], case.factors) for case in cases.matrix() if case.family == "exact"
             and set(case.options) == {"precision"} and case.data == "ml-20m"}  # fmt: skip
    for model in cases.MODELS:
        fused = {rank for rank in cases.RANKS if rank + (model == "biased") <= 128}
        for precision in cases.PRECISIONS:
            ranks = {rank for kind, each, rank in found if (kind, each) == (model, precision)}
            assert ranks == (set(cases.RANKS) if precision == "float32" else fused)


@pytest.mark.parametrize("which", sorted(cases.SETS))
def test_names_are_unique_and_parts_add_up(which):
    names = [case.name for case in cases.SETS[which]()]
    assert len(names) == len(set(names))
    for parts in (1, 2, 3):
        divided = [cases.part_of(cases.SETS[which](), number, parts) for number in range(1, parts + 1)]
        assert sorted(case.name for part in divided for case in part) == sorted(names)
        costs = [sum(case.cost for case in part) for part in divided]
        assert max(costs) < 1.25 * min(costs)


def test_netflix_has_the_borders_of_the_warpgroup_kernel():
    unknowns = {case.factors + case.biases for case in cases.netflix()}
    assert unknowns == {96, 97, 112, 113, 127, 128}
    assert {(case.fits, case.iterations) for case in cases.netflix()} == {(10, 10)}


def test_a_case_survives_the_pipe():
    for case in cases.matrix():
        assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case


# ------------------------------------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    data.prepare(str(folder), ["ml-20m"], "cpu", 0.005)
    data.prepare(str(folder), ["shop"], "cpu", 0.01)  # some of whose items have no entries
    return check.Bench(folder, "cpu")


def on_the_cpu(case: Case) -> Case:
    options = {name: value for name, value in case.options.items() if name not in ("precision", "assembly")}
    if options.get("row_form") == "dual" and case.model == "implicit":
        options.pop("row_form")
    return dataclasses.replace(case, options=options)


EXACT = {on_the_cpu(case).name: on_the_cpu(case) for case in cases.matrix() if case.check != "objective"}


@pytest.mark.parametrize(
    "name", [name for name in EXACT if name.endswith((" f=8", " f=33")) and ("ml-20m" in name or " f=8" in name)]
)
def test_right_factors_pass(bench, name):
    result = check.run_case(bench, EXACT[name])
    assert result["status"] == "ok", result
    assert result["figure"] < 1e-5 and len(result["sha256"]) == 64


def test_the_oracle_is_the_librarys_objective(bench):
    for model in ("implicit", "biased"):
        case = Case("exact", "ml-20m", model, 8)
        fitted = check.make_model(case, "cpu").fit(bench.given(case))
        theirs = fitted.objective(bench.matrix("ml-20m").rows("user", case.feedback))
        assert check.objective(bench, case, check.learned(fitted)) == pytest.approx(theirs, rel=1e-5)


def test_an_objective_from_some_entries(bench, monkeypatch):
    case = Case("exact", "shop", "biased", 8)
    fitted, _, _ = check.fit(bench, case)
    whole = check.objective(bench, case, fitted)
    monkeypatch.setattr(oracle, "SAMPLED_ENTRIES", 4_000)
    monkeypatch.setattr(oracle, "CHUNK", 1_000)
    assert check.objective(bench, case, fitted) == pytest.approx(whole, rel=0.1)


def damaged(array: np.ndarray, how: str) -> np.ndarray:
    """A copy in which rows that every check reads are wrong."""
    array = array.copy()
    if how == "one factor of every row":
        array[:, 0] *= 1.001
    elif how == "rows swapped":
        array = array[::-1].copy()
    elif how == "not a number":
        array[len(array) // 2, 0] = np.nan
    return array


@pytest.fixture(
    scope="module",
    params=[
        ("implicit", {}),
        ("explicit", {"nonnegative": True}),
        ("biased", {"dtype": "float64"}),
        ("biased", {"precision": "bf16x3"}),
    ],
    ids=lambda given: " ".join(map(str, (given[0], *given[1]))),
)
def right(bench, request):
    """A case, and an answer that passes its check."""
    case = Case("exact", "ml-20m", request.param[0], 8, request.param[1])
    answer = check.fit(bench, on_the_cpu(case), watched=True)
    check.check_answer(bench, case, answer)
    return case, answer


@pytest.mark.parametrize("how", ["one factor of every row", "rows swapped", "not a number"])
@pytest.mark.parametrize("side", ["user", "item"])
def test_wrong_factors_fail(bench, right, how, side):
    case, (last, first, before) = right
    wrong = dataclasses.replace(last, factors=last.factors | {side: damaged(last.factors[side], how)})
    with pytest.raises(check.Failure, match="backward error" if how != "not a number" else "not finite"):
        check.check_answer(bench, case, (wrong, first, before))


def test_one_wrong_value_of_one_checked_row_fails(bench):
    case = Case("exact", "ml-20m", "biased", 8)
    last, first, before = check.fit(bench, case, watched=True)
    row = int(np.argmax(bench.lengths("ml-20m")["user"]))
    users = last.factors["user"].copy()
    users[row, 3] += 1e-3
    with pytest.raises(check.Failure, match=rf"user {row} "):
        check.check_answer(
            bench, case, (dataclasses.replace(last, factors=last.factors | {"user": users}), first, before)
        )
    users = last.factors["user"].copy()
    longest = oracle.chosen_rows(bench.lengths("ml-20m")["user"], case.name)[:2]
    users[longest] = users[longest[::-1]]
    with pytest.raises(check.Failure, match="so have 2 of"):
        check.check_answer(
            bench, case, (dataclasses.replace(last, factors=last.factors | {"user": users}), first, before)
        )


def test_factors_of_empty_rows_must_be_zero(bench):
    case = Case("exact", "shop", "implicit", 8)
    last, first, before = check.fit(bench, case, watched=True)
    empty = np.flatnonzero(bench.lengths("shop")["item"] == 0)
    assert len(empty)
    items = last.factors["item"].copy()
    items[empty[0], 0] = 1e-3
    with pytest.raises(check.Failure, match=r"\(0 entries\)"):
        check.check_answer(
            bench, case, (dataclasses.replace(last, factors=last.factors | {"item": items}), first, before)
        )


@pytest.mark.parametrize(
    "case",
    [
        Case("cg", "ml-20m", "implicit", 8, {"solver": "cg"}, 4, 2, "objective", cases.CG_LIMITS),
        Case("sgd", "ml-20m", "sgd", 8, {"schedule": "msgd"}, 4, 2, "objective", (0.8, 2.5), False),
        Case("ccd", "ml-20m", "ccd", 8, {"nonnegative": True}, 4, 2, "objective", cases.CCD_LIMITS, False),
    ],
    ids=lambda case: case.family,
)
def test_objectives_are_compared_with_the_exact_solvers(bench, case):
    found = check.run_case(bench, case)
    assert found["status"] == "ok", found
    last, first, _ = check.fit(bench, case, watched=True)
    zeros = dataclasses.replace(last, factors={side: 0 * each for side, each in last.factors.items()})
    for wrong in (zeros, first):
        with pytest.raises(check.Failure, match="objective"):
            check.check_answer(bench, case, (wrong, first, None))


def test_fits_must_repeat_their_bits(bench, monkeypatch):
    case, made = Case("exact", "shop", "biased", 8), iter([0, 0, 1, 1])
    make = check.make_model
    monkeypatch.setattr(check, "make_model", lambda *given: make(*given).set_params(random_state=next(made)))
    assert check.run_case(bench, case)["status"] == "ok"
    assert check.run_case(bench, case)["status"] == "ok"
    made = iter([0, 1])
    result = check.run_case(bench, case)
    assert result["status"] == "failed" and "fit 2 has other bits than the first" in result["detail"]


def test_fits_with_delays_must_have_the_bits_of_those_without(bench):
    case = Case("exact", "shop", "biased", 8)
    bits = check.run_case(bench, case)["sha256"]
    again = check.run_case(bench, case, bits)
    assert again["status"] == "ok" and "figure" not in again
    other = check.run_case(bench, case, "0" * 64)
    assert other["status"] == "failed" and "other bits than without delays" in other["detail"]


# ------------------------------------------------------------------------------------------------- watchdog


FAKE = [sys.executable, str(ROOT / "tests" / "support" / "gpu_cases.py")]


def fakes(family: str, count: int = 1, seconds: float = 30.0) -> list[Case]:
    return [Case(family, "shop", "implicit", 1 + k, seconds=seconds) for k in range(count)]


def test_a_hang_and_a_crash_are_named_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(pool, "START_SECONDS", 0.0)
    lines, saved = [], []
    groups = [
        [*fakes("hang", seconds=1.0), *fakes("after the hang", 2)],
        [*fakes("abort"), *fakes("after the crash", 2)],
        [*fakes("error"), *fakes("after the error", 2)],
        fakes("good", 5),
        fakes("wrong"),
    ]
    results = pool.Pool(FAKE, 3, report=lines.append, saved=saved.append).run(groups)
    status = {name.split(" implicit")[0]: result["status"] for name, result in results.items()}
    assert len(results) == 15 == len(saved[-1])
    assert status == {
        "hang": "hang",
        "abort": "crash",
        "error": "failed",
        "wrong": "failed",
        **dict.fromkeys(("after the hang", "after the crash", "after the error", "good"), "ok"),
    }
    hang = results["hang implicit shop f=1"]
    assert "waits for ever" in hang["detail"] and isinstance(hang["beside"], list)
    assert "died with -6" in results["abort implicit shop f=1"]["detail"]
    assert any(line.startswith("HANG hang implicit shop f=1") for line in lines)


def test_what_runs_beside_a_hang_is_named(monkeypatch):
    monkeypatch.setattr(pool, "START_SECONDS", 0.0)
    groups = [fakes("hang", seconds=1.0), fakes("slow", 2)]
    results = pool.Pool(FAKE, 2, report=lambda line: None).run(groups)
    assert [name.split()[0] for name in results["hang implicit shop f=1"]["beside"]] == ["slow"]


def test_what_time_does_not_suffice_for_is_not_run(monkeypatch):
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.0)
    results = pool.Pool(FAKE, 1, report=lambda line: None, limit_seconds=0.3).run([fakes("slow", 3)])
    assert [result["status"] for result in results.values()] == ["not run"] * 3
    assert any("cut after" in result.get("detail", "") for result in results.values())


def test_free_processes_take_over_half_of_a_group():
    results = pool.Pool(FAKE, 4, report=lambda line: None).run([fakes("slow", 4), fakes("good")])
    assert {result["status"] for result in results.values()} == {"ok"}
    slow = {result["process"] for name, result in results.items() if name.startswith("slow")}
    assert len(slow) > 1


# ------------------------------------------------------------------------------------------------- record


def fragment(part: str, sha256: str = "a", **fields) -> dict:
    common = {"part": part, "date": "2026-01-02", "device": "H100", "cuda": 13020, "cupy": "14", "cuda_sha256": sha256}
    return common | fields


def of_cases(part: str, found: dict, parts: int = 1) -> dict:
    name = part.split(":")[0]
    return fragment(part, set=name, parts=parts, processes=8, fits=2, seconds=10.0, cases=found)


def test_fragments_add_up_to_a_record():
    good = {"status": "ok", "figure": 1.5e-6}
    record = records.assemble([
        fragment("tests", pytest="9 passed", several_gpus="not run: one GPU"),
        fragment("sanitizers", sanitizer={"memcheck": "0 errors", "racecheck": "0 hazards", "initcheck": "0 errors"}),
        of_cases("matrix:1/2", {"exact cg shop f=8": good, "exact cg shop f=97": good | {"figure": 2e-6}}, 2),
        of_cases("delays", {"a f=8": {"status": "hang", "detail": "no answer"}, "b f=8": {"status": "not run"}}),
    ])  # fmt: skip
    assert record["pytest"] == "9 passed" and record["sanitizer"]["racecheck"] == "0 hazards"
    assert (record["device"], record["cuda_sha256"]) == ("H100", "a")
    assert record["matrix"] == {
        "cases": 2,
        "processes": 8,
        "fits": 2,
        "failed": [],
        "not_run": ["part matrix:2/2"],
        "passed": ["exact cg shop: 8 97 (at most 2e-06)"],
        "seconds": 10,
    }
    assert record["delays"]["failed"] == ["a f=8: hang: no answer"] and record["delays"]["not_run"] == ["b: 8"]
    assert record["netflix"] == record["netflix_delays"] == "not run"


def test_a_record_of_all_cases_is_short():
    found = {case.name: {"status": "ok", "figure": 1.23e-6} for case in cases.matrix()}
    record = records.assemble([of_cases("matrix", found), of_cases("delays", found)])
    assert len(json.dumps(record, indent=2)) < 100_000
    assert record["matrix"]["cases"] == len(found)


@pytest.fixture
def called(monkeypatch):
    """The command line, whose cases run in processes of their own."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_cases.py", *map(str, arguments)])
        return gpu_cases.main()

    return call


def test_fragments_of_other_kernels_are_refused(tmp_path, called, capsys):
    old, new = (fragment(name, sha) for name, sha in (("tests", "a"), ("sanitizers", records.cuda_sha256())))
    for each in (old, new):
        records.write_json(tmp_path / f"{each['part']}.json", each)
    assert called("assemble", tmp_path / "record", *tmp_path.glob("*.json")) == 1
    assert "tests.json; run them again" in capsys.readouterr().err
    assert not (tmp_path / "record").exists()
    assert called("prune", tmp_path) == 0 and "dropped" in capsys.readouterr().out
    assert called("assemble", tmp_path / "record", *tmp_path.glob("*.json")) == 0
    record = json.loads((tmp_path / "record").read_text())
    assert record["pytest"] == "not run" and record["cuda_sha256"] == records.cuda_sha256()


def test_parts_from_the_command_line(tmp_path, called, capfd):
    options = [
        "--device",
        "cpu",
        "--scale",
        0.01,
        "--processes",
        1,
        "--folder",
        tmp_path,
        "--only",
        r"^cg .*shop f=16$",
    ]
    assert called("run", "matrix", *options) == 0, capfd.readouterr()
    plain = json.loads((tmp_path / "matrix.json").read_text())
    assert [case["status"] for case in plain["cases"].values()] == ["ok"] * 3
    # the CPU ignores delays: the bits are those of the fragment
    assert called("run", "matrix", "--delays", 3, *options) == 0, capfd.readouterr()
    delayed = json.loads((tmp_path / "delays.json").read_text())
    assert (delayed["set"], delayed["delays"]) == ("delays", 3)
    assert {name: case["sha256"] for name, case in delayed["cases"].items()} == {
        name: case["sha256"] for name, case in plain["cases"].items()
    }
