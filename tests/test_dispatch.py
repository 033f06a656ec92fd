"""The cost model against recorded measurements and its laws, the file of measured constants, and the choice."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from click.testing import CliRunner
from conftest import planted
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.cli import main
from hybridmf.core import cache as _cache
from hybridmf.datasets import SHAPES
from hybridmf.device.cuda import DeviceSpec
from hybridmf.errors import DeviceError
from hybridmf.plan import cost as _cost
from hybridmf.plan import dispatch, types
from hybridmf.plan import machine as _machine
from hybridmf.plan.cost import Warmth, cost_of
from hybridmf.plan.machine import CpuRates, GpuRates, Machine, rate_at, seconds_at
from hybridmf.plan.types import Facts
from hybridmf.tools import calibrate as _calibrate

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
H200 = DeviceSpec("NVIDIA H200", 0, (9, 0), 132, 227 * 1024, 60 << 20, 141 * GIB, 140 * GIB)
T4 = DeviceSpec("Tesla T4", 0, (7, 5), 40, 64 * 1024, 4 << 20, 16 * GIB, 15 * GIB)
WARM = Warmth(started=True, compiled=True)
LOADED = Warmth(started=True, compiled=True, loaded=True)
NETFLIX = {"shape": (480_189, 17_770), "nnz": 99_072_112}
SMALL = {"shape": (300, 200), "nnz": 5000}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees what another one has measured, compiled or started."""
    monkeypatch.setenv("HYBRIDMF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "_started", set())
    monkeypatch.setattr(dispatch, "_loaded", set())
    _machine.machine_at.cache_clear()
    yield
    _machine.machine_at.cache_clear()


def built_in(instruction_set: str = "avx512") -> Machine:
    """Built-in constants of the processors whose measurements are recorded, whatever runs this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_machine._als, "instruction_set", lambda: instruction_set)
        return _machine.built_in()


def plan_of(model: Any, spec: DeviceSpec | None = None, **sizes: Any) -> Any:
    """The plan of a fit, with a GPU of ours or none."""
    reason = "pretended" if spec else "no GPU: pretended"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "find_gpu", lambda device: (None if device == "cpu" else spec, reason))
        return hmf.plan(model=model, **sizes)


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "bench" / "results" / f"{name}.jsonl").read_text().splitlines()]


# -------------------------------------------------------------------------------------- against recorded measurements


def gpu_cases() -> dict[tuple[Any, ...], tuple[Any, float, str]]:
    """Model, measured seconds and shape of each recorded iteration on an H200, by what was measured."""
    cases = {}
    for line in recorded("gpu"):
        name, f = line["name"], line["factors"]
        if line["task"] == "als":
            cls = hmf.ImplicitALS if name.startswith("implicit") else hmf.ExplicitALS
            solver = {"solver": "cg", "cg_steps": 6} if "CG 6" in name else {}
            model = cls(f, device="cuda", precision=name.split()[-1], **solver)
        elif line["task"] == "sgd":
            half = {"precision": "float16"} if "float16" in name else {}
            model = hmf.SGD(f, device="cuda", schedule=name.split()[0].rstrip(","), **half)
        elif line["task"] == "ccd":
            model = hmf.CCD(f, device="cuda")
        else:
            continue
        if getattr(model, "precision", "float32") not in GpuRates().precision or line["shape"] not in SHAPES:
            continue
        cases[line["task"], name, line["shape"], f] = (model, line["ms"] / 1e3, line["shape"])
    return cases


def cpu_cases() -> dict[tuple[Any, ...], tuple[Any, float, str, int]]:
    """Model, measured seconds, shape and entries; of a case measured again, the fastest (others shared the machine)."""
    cases: dict[tuple[Any, ...], tuple[Any, float, str, int]] = {}
    for line in recorded("cpu"):
        cls = hmf.ImplicitALS if "implicit" in line["task"] else hmf.ExplicitALS
        if "to within" in line["task"] or line["shape"] not in SHAPES or "nnz" not in line:
            continue
        for name, seconds in line.get("seconds_per_iteration", {}).items():
            options = {"num_threads": int(name) if name.isdigit() else line.get("threads")}
            if name in ("simd", "bals", "blas3"):
                options["assembly"] = name
            elif name in ("cg", "subspace"):
                options["solver"] = name
            elif not name.isdigit():  # a peer
                continue
            key = (line["task"], line["shape"], line["factors"], name)
            if key not in cases or seconds < cases[key][1]:
                model = cls(line["factors"], device="cpu", **options)
                cases[key] = (model, seconds, line["shape"], line["nnz"])
    return cases


@pytest.mark.parametrize("case", gpu_cases().items(), ids=lambda case: " ".join(map(str, case[0])))
def test_recorded_iterations_on_an_h200_are_predicted(case):
    _, (model, seconds, shape) = case
    plan = plan_of(model, H200, shape=SHAPES[shape][:2], nnz=SHAPES[shape][2])
    assert cost_of(plan, built_in()).iteration == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("case", cpu_cases().items(), ids=lambda case: " ".join(map(str, case[0])))
def test_recorded_iterations_on_cpus_are_predicted(case):
    (_, _, _, name), (model, seconds, shape, nnz) = case
    plan = plan_of(model, shape=SHAPES[shape][:2], nnz=nnz)
    # published assemblies are one multiple of ours, whatever the rank
    tolerance = 0.45 if name in ("blas3", "bals") else 0.25
    assert cost_of(plan, built_in()).iteration == pytest.approx(seconds, rel=tolerance)


def test_the_fastest_recorded_way_is_predicted_to_be_the_fastest():
    """Of each recorded choice (an assembly on the CPU; a precision on the GPU), or one within 10 % of it."""
    groups: dict[Any, dict[Any, tuple[float, float]]] = {}
    for (task, shape, f, name), (model, seconds, _, nnz) in cpu_cases().items():
        if name in ("simd", "bals", "blas3"):
            predicted = cost_of(plan_of(model, shape=SHAPES[shape][:2], nnz=nnz), built_in()).iteration
            groups.setdefault((task, shape, f), {})[name] = (predicted, seconds)
    for (task, name, shape, f), (model, seconds, _) in gpu_cases().items():
        if task == "als":
            plan = plan_of(model, H200, shape=SHAPES[shape][:2], nnz=SHAPES[shape][2])
            group = (name.split()[0], model.solver, shape, f)
            groups.setdefault(group, {})[name] = (cost_of(plan, built_in()).iteration, seconds)
    choices = [ways for ways in groups.values() if len(ways) > 1]
    right = [min(ways.values())[1] <= 1.1 * min(seconds for _, seconds in ways.values()) for ways in choices]
    assert len(choices) >= 9
    assert np.mean(right) >= 0.95


def test_the_devices_of_recorded_fits_are_chosen_right():
    """bench/dispatch.py's lines: the measured best, or within 10 % of it, in 95 % of cases."""
    if not (ROOT / "bench" / "results" / "dispatch.jsonl").exists():
        pytest.skip("bench/dispatch.py has not been run yet")
    bench = load_bench()
    runs = [(line, fits) for line, fits in bench.read_runs() if line["spec"] is not None]
    if not runs:
        pytest.skip("bench/dispatch.py has not been run on a machine with a GPU yet")
    line, fits = runs[-1]
    lost = bench.choices(fits, bench.machine_of(line), bench.spec_of(line))
    wrong = [words for share, words in lost if share > bench.TOLERANCE]
    assert len(lost) >= 100
    assert len(wrong) <= (1 - bench.REQUIRED) * len(lost), "\n".join(wrong)


def load_bench() -> Any:
    folder = str(ROOT / "bench")
    sys.path.insert(0, folder)
    try:
        return __import__("dispatch")
    finally:
        sys.path.remove(folder)
        sys.modules.pop("dispatch", None)


def test_the_benchmark_repeats_short_fits():
    bench = load_bench()
    assert bench.enough([2.0]) and not bench.enough([0.5]) and bench.enough([0.5, 0.4])
    assert not bench.enough([0.2]) and not bench.enough([0.2, 0.2]) and bench.enough([0.2, 0.2, 0.2])
    assert not bench.enough([0.001] * 9) and bench.enough([0.001] * 10)
    assert not bench.enough([0.4, 0.01])  # the first was a stall
    found = bench.measure(bench.model_of("MSGD", 8, "cpu"), planted(), iterations=3)
    assert set(found) == {"seconds_per_iteration", "setup_seconds"} and min(found.values()) > 0


def test_the_benchmark_covers_what_it_promises():
    bench = load_bench()
    for shapes, _ in bench.GRIDS.values():
        for shape, scale, ranks in shapes:
            assert shape in SHAPES and 0 < scale <= 1
            both, only_cpu = (list(bench.cases(ranks, gpu, assemblies=False)) for gpu in (True, False))
            assert [case for case in both if case[2] == "cpu"] == only_cpu
            assert len(both) == 2 * len(only_cpu) and {case[0] for case in both} <= set(bench.MODELS)
    published = {case[2:] for case in bench.cases(bench.FULL, gpu=True, assemblies=True) if case[3] != "auto"}
    assert published == {(device, name) for device, names in bench.ASSEMBLIES.items() for name in names}


def test_the_benchmark_leaves_out_runs_with_other_constants(tmp_path, monkeypatch):
    bench = load_bench()
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    assert list(bench.read_runs()) == []
    now = {"task": "machine", "run": "now", "cpu": asdict(CpuRates()), "gpu": asdict(GpuRates()), "gpu_identity": {}}
    then = now | {"run": "then", "cpu": {"serial": 0.1}}
    lines = [then, {"task": "fit", "run": "then"}, now, {"task": "fit", "run": "now", "model": "MSGD"}]
    (tmp_path / "dispatch.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    ((machine, fits),) = bench.read_runs()
    assert fits == lines[-1:]
    assert bench.machine_of(machine) == Machine(source="recorded")


def test_the_benchmark_judges_choices(monkeypatch):
    """On times that its own predictions make true, no choice is wrong; on their opposite, all are."""
    bench = load_bench()
    machine = built_in()
    fits = []
    for name in bench.MODELS:
        for device in ("cpu", "cuda"):
            line = {
                "model": name, "factors": 64, "device": device, "assembly_asked": "auto", "threads": 16, "shape": "x",
                "scale": 1.0, "n_users": 138_493, "n_items": 27_278, "nnz": 20_000_263,
                "facts": {"longest_user": 3000, "longest_item": 60_000, "empty": 0},
            }  # fmt: skip
            cost = bench.cost(line, machine, H200)
            fits.append(line | {"seconds_per_iteration": cost.iteration, "setup_seconds": sum(cost.setup.values())})
    lost = bench.choices(fits, machine, H200)
    assert len(lost) == len(bench.MODELS) * len(bench.ITERATIONS)
    assert all(share == 0 for share, _ in lost)
    for line in fits:
        line["seconds_per_iteration"] = 1.0 if line["device"] == "cuda" else 1e-3
        line["setup_seconds"] = 0.0
    assert max(share for share, _ in bench.choices(fits, machine, H200)) == pytest.approx(999)


# ------------------------------------------------------------------------------------------------------------- laws

MODELS = st.sampled_from(
    [
        (hmf.ExplicitALS, {"biases": False}), (hmf.ImplicitALS, {}), (hmf.ImplicitALS, {"solver": "cg"}), (hmf.SGD, {}),
        (hmf.ExplicitALS, {"biases": False, "solver": "cg"}), (hmf.CCD, {}), (hmf.ImplicitALS, {"dtype": "float64"}),
    ]
)  # fmt: skip
LAWFUL = settings(deadline=None, max_examples=60, database=None)


def seconds_of(model: Any, device: str, shape: tuple[int, int], nnz: int, factors: int, **options: Any) -> float:
    cls, given_options = model
    spec = H200 if device == "cuda" else None
    plan = plan_of(cls(factors, device=device, **given_options, **options), spec, shape=shape, nnz=nnz)
    return cost_of(plan, built_in(), WARM).total(10)


@LAWFUL
@given(
    MODELS, st.sampled_from(["cpu", "cuda"]), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 300),
    st.integers(1, 100), st.floats(1.0, 1000.0),
)  # fmt: skip
def test_more_work_is_never_predicted_to_be_faster(model, device, users, items, factors, entries, times):
    nnz = min(entries * max(users, items), users * items)
    shape = (users, items)
    base = seconds_of(model, device, shape, nnz, factors)
    slack = 1 - 1e-9
    more = min(int(nnz * times), users * items)
    assert seconds_of(model, device, shape, more, factors) >= base * slack
    assert seconds_of(model, device, shape, nnz, min(512, int(factors * (1 + times / 300)) + 1)) >= base * slack
    assert seconds_of(model, device, (users * 2, items), nnz, factors) >= base * slack


@LAWFUL
@given(st.integers(1, 512), st.integers(1, 511))
def test_more_threads_are_never_predicted_to_be_slower(factors, threads):
    fewer, more = (
        seconds_of((hmf.ImplicitALS, {}), "cpu", (50_000, 3000), 10**6, factors, num_threads=count)
        for count in (threads, threads + 1)
    )
    assert more <= fewer


@LAWFUL
@given(st.lists(st.tuples(st.floats(1e9, 1e12), st.floats(1.1, 3.0)), min_size=1, max_size=5), st.data())
def test_noisy_rates_never_make_more_factors_faster(anchors, data):
    f, curve = 8.0, []
    for rate, step in anchors:
        curve.append((f, rate))
        f *= step
    low, high = sorted(data.draw(st.tuples(st.floats(1, 600), st.floats(1, 600))))
    for work in (lambda f: f * (f + 1), lambda f: f**3 / 3 + 2 * f * f, lambda f: 8 * f):
        assert seconds_at(tuple(curve), work, low) <= seconds_at(tuple(curve), work, high) * (1 + 1e-9)


def test_rates_between_anchors():
    curve = ((16.0, 1e9), (64.0, 4e9))
    assert rate_at(curve, 32) == pytest.approx(2e9)
    assert rate_at(curve, 8) == pytest.approx(0.5e9)
    assert rate_at(curve, 500) == 4e9


def test_a_longer_column_delays_msgd_and_empty_rows_cost_nothing():
    model = hmf.SGD(32, device="cpu", num_threads=16)
    plan = plan_of(model, shape=(10_000, 1000), nnz=10**6)
    even, uneven = (
        cost_of(plan.changed(facts=Facts(200, longest)), built_in()).iteration for longest in (2000, 900_000)
    )
    assert uneven > 4 * even
    on_gpu = plan_of(hmf.SGD(32, device="cuda"), H200, shape=(10_000, 1000), nnz=10**6)
    assert (
        cost_of(on_gpu.changed(facts=Facts(200, 900_000)), built_in()).iteration
        > 4 * cost_of(on_gpu.changed(facts=Facts(200, 2000)), built_in()).iteration
    )
    # longer rows are solved several entries at a time
    alone, solved = (
        cost_of(on_gpu.changed(facts=Facts(200, _cost.CHAIN * times)), built_in()).iteration for times in (1, 10)
    )
    gained = _cost.CHAIN * (10 * GpuRates().solved_update - GpuRates().serial_update)
    assert solved - alone == pytest.approx(gained, rel=1e-6)
    sparse = plan_of(hmf.CCD(8, device="cpu"), shape=(10**6, 10**6), nnz=1000)
    assert cost_of(sparse, built_in()).iteration < 0.05  # 1,000 entries are in 2,000 rows at most
    als = plan_of(hmf.ExplicitALS(32, biases=False, device="cpu"), shape=(10**6, 1000), nnz=10**6)
    assert cost_of(als.changed(facts=Facts(9, 9, 900_000)), built_in()).iteration < cost_of(als, built_in()).iteration


def test_degrees_are_counted(monkeypatch):
    monkeypatch.setattr(types, "PIECE", 7)
    matrix = planted()
    users, items = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    assert Facts.of(matrix) == Facts(users.max(), 0, np.sum(users == 0))
    assert Facts.of(matrix, items=True) == Facts(users.max(), items.max(), np.sum(users == 0) + np.sum(items == 0))
    assert hmf.plan(matrix, hmf.SGD(device="cpu")).facts.longest_item == items.max()


def test_set_up_says_what_it_is_made_of():
    machine = built_in()
    cold, warm = (
        cost_of(plan_of(hmf.ExplicitALS(64, biases=False, device="cuda"), H200, **NETFLIX), machine, warmth).setup
        for warmth in (Warmth(), WARM)
    )
    assert set(cold) == {"input and start", "transfer", "layouts", "fit", "kernels", "start"}
    assert cold["kernels"] == machine.gpu.compile["fused"] and warm["kernels"] == machine.gpu.load
    assert "start" not in warm
    again = cost_of(plan_of(hmf.ExplicitALS(64, biases=False, device="cuda"), H200, **NETFLIX), machine, LOADED).setup
    assert again == warm | {"kernels": 0.0}
    on_cpu = {
        name: cost_of(plan_of(model, **NETFLIX), machine).setup
        for name, model in {
            "als": hmf.ExplicitALS(biases=False, device="cpu"),
            "tiles": hmf.ExplicitALS(biases=False, device="cpu", assembly="bals", reorder=True),
            "blocks": hmf.SGD(device="cpu", schedule="blocks"),
        }.items()
    }
    assert set(on_cpu["als"]) == {"input and start"}
    assert set(on_cpu["tiles"]) == {"input and start", "tiles", "reorder"}
    assert set(on_cpu["blocks"]) == {"input and start", "schedule"}
    tiles = cost_of(
        plan_of(hmf.ExplicitALS(biases=False, device="cuda", assembly="bals"), H200, **NETFLIX), machine
    ).setup
    assert tiles["tiles"] > 0


def test_a_smaller_gpu_is_predicted_to_be_slower():
    plans = [
        plan_of(hmf.ExplicitALS(64, biases=False, device="cuda", assembly="mo_als"), spec, **NETFLIX)
        for spec in (H200, T4)
    ]
    large, small = (cost_of(plan, built_in()).iteration for plan in plans)
    assert small == pytest.approx(large * 132 / 40 * 2, rel=0.1)
    measured = Machine(gpu=replace(GpuRates(), launch=1.0), gpu_name="Tesla T4")
    assert measured.gpu_rates("Tesla T4", 40, (7, 5)).launch == 1.0


@pytest.mark.parametrize("instruction_set", ["avx2", "portable"])
def test_built_in_rates_follow_the_instruction_set(instruction_set):
    plan = plan_of(hmf.ImplicitALS(64, device="cpu"), shape=(1000, 1000), nnz=10**6)
    assert cost_of(plan, built_in(instruction_set)).iteration > 1.4 * cost_of(plan, built_in()).iteration


# --------------------------------------------------------------------------------------------------------- the choice


def test_auto_takes_what_is_predicted_to_be_done_first(caplog):
    caplog.set_level(logging.INFO, "hybridmf")
    for sizes in (SMALL, NETFLIX):
        for model in (hmf.ExplicitALS(64, biases=False), hmf.ImplicitALS(64, solver="cg"), hmf.SGD(64), hmf.CCD(16)):
            plan = plan_of(model, H200, **sizes)
            rivals = {one.device: one.total_seconds for one in plan.estimates if one.asked and one.assembly in
                      ("", "simd", "fused")}  # fmt: skip
            assert set(rivals) == {"cpu", "cuda:0"}
            assert plan.device == min(rivals, key=rivals.get)
            assert plan.device == ("cpu" if sizes is SMALL else "cuda:0")
            chosen = plan.estimates[0]
            assert chosen.chosen and chosen.device == plan.device and chosen.feasible
            assert types.seconds_text(chosen.total_seconds) in plan.reason
            assert sum(one.chosen for one in plan.estimates) == 1
    assert "device='auto' chose the CPU: 15 iterations in about" in caplog.text


def test_compiled_kernels_and_more_iterations_turn_the_choice(tmp_path):
    sizes = {"shape": (138_493, 27_278), "nnz": 20_000_263}
    model = hmf.ImplicitALS(64, num_threads=16, iterations=15)
    assert plan_of(model, H200, **sizes).device == "cpu"
    assert plan_of(hmf.ImplicitALS(64, num_threads=16, iterations=200), H200, **sizes).device == "cuda:0"
    on_gpu = plan_of(hmf.ImplicitALS(64, num_threads=16, device="cuda"), H200, **sizes)
    assert on_gpu.estimates[0].setup_seconds > GpuRates().compile["fused"]
    dispatch.remember(on_gpu)
    assert plan_of(model, H200, **sizes).device == "cuda:0"
    again = plan_of(hmf.ImplicitALS(64, num_threads=16, device="cuda"), H200, **sizes).estimates[0]
    dispatch._started.clear()
    dispatch._loaded.clear()  # another process: the kernels lie on disk, the GPU has to be started
    warm = plan_of(hmf.ImplicitALS(64, num_threads=16, device="cuda"), H200, **sizes).estimates[0]
    assert warm.setup_seconds == pytest.approx(
        on_gpu.estimates[0].setup_seconds - GpuRates().compile["fused"] + GpuRates().load
    )
    assert again.setup_seconds == pytest.approx(warm.setup_seconds - GpuRates().load - GpuRates().start)
    other_rank = plan_of(hmf.ImplicitALS(65, num_threads=16, device="cuda"), H200, **sizes).estimates[0]
    assert other_rank.setup_seconds > GpuRates().compile["fused"]


def test_what_is_compiled_need_not_be_noted(tmp_path, monkeypatch, caplog):
    plan = plan_of(hmf.ExplicitALS(64, biases=False, device="cuda"), H200, **SMALL)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYBRIDMF_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.DEBUG, "hybridmf"):
        dispatch.remember(plan)
    assert "cannot note" in caplog.text
    dispatch.remember(plan_of(hmf.ExplicitALS(64, biases=False, device="cpu"), **SMALL))
    assert dispatch._started == {"cuda:0"}


def test_every_way_is_estimated():
    plan = plan_of(hmf.ImplicitALS(64), H200, **NETFLIX)
    ways = {(one.device, one.assembly, one.solver, one.precision) for one in plan.estimates}
    assert len(ways) == len(plan.estimates) == 3 + 3 + 2 * 5 + 3 * 2
    assert {one.assembly for one in plan.estimates if one.device == "cpu"} == {"simd", "rank1", "blas3", "bals"}
    assert {one.precision for one in plan.estimates if one.device != "cpu"} == {
        "float32", "bf16x3", "tf32", "bf16", "float16",
    }  # fmt: skip
    for one in plan.estimates:
        assert one.total_seconds == pytest.approx(one.setup_seconds + 15 * one.seconds_per_iteration)
        assert one.bytes > 0 and one.seconds_per_iteration > 0
        assert one.asked == (one.solver == "cholesky" and one.precision == "float32")
    named = plan_of(hmf.ImplicitALS(64, assembly="bals"), H200, **NETFLIX)
    assert {one.assembly for one in named.estimates if one.asked} == {"bals"}


def test_a_gpu_without_the_memory_is_not_feasible():
    full = replace(H200, free_bytes=5_000_000)
    plan = plan_of(hmf.ImplicitALS(64), full, **NETFLIX)
    assert plan.device == "cpu" and "are free" in plan.reason
    on_gpu = [one for one in plan.estimates if one.device == "cuda:0"]
    assert on_gpu and not any(one.feasible for one in on_gpu)
    assert "are free" in str(on_gpu[0])


def test_what_the_cpu_does_not_serve_goes_to_the_gpu():
    plan = plan_of(hmf.ExplicitALS(8, biases=False, solver="cg", assembly="bals"), H200, **SMALL)
    assert plan.device == "cuda:0"
    assert "the CPU does not serve this: assembly='bals' is for solver='cholesky'" in plan.reason
    with pytest.raises(ValueError, match="assembly='bals' is for solver='cholesky'"):
        plan_of(hmf.ExplicitALS(8, biases=False, solver="cg", assembly="bals"), **SMALL)


def test_without_a_gpu_it_says_so_and_costs_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    model = hmf.ExplicitALS(4, biases=False, iterations=2, random_state=0).fit(planted())
    assert model.plan_.reason.startswith("no GPU: CuPy is not installed")
    assert {one.device for one in model.plan_.estimates} == {"cpu"}
    assert not _cache.cache_dir().exists()


def test_estimates_do_not_tell_plans_apart():
    plan = plan_of(hmf.ExplicitALS(8, biases=False, device="cpu"), **SMALL)
    assert plan == plan.changed(estimates=())


def test_a_printed_plan_shows_the_estimates():
    text = str(plan_of(hmf.ImplicitALS(64), H200, **NETFLIX))
    lines = [line for line in text.splitlines() if line.startswith("estimate")]
    assert lines[0].startswith("estimate  cuda:0 cholesky, fused: ")
    assert " set-up + " in lines[0] and " an iteration; " in lines[0] and lines[0].endswith(" MiB")
    assert any(line.startswith("estimate  cpu cholesky, simd: ") for line in lines)
    assert lines[-1].startswith("estimate  otherwise cuda:0 cg, ")
    assert "there is a GPU: 15 iterations in about " in text
    assert len(plan_of(hmf.CCD(8, device="cpu"), **SMALL).estimates) == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5e-6, "2.5 us"), (0.01234, "12.3 ms"), (1.5, "1.5 s"), (12345.6, "12,346 s")]
)
def test_seconds_in_words(seconds, text):
    assert types.seconds_text(seconds) == text


def test_an_unknown_instruction_set_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setenv("HYBRIDMF_ISA", "mmx")
    plan_of(hmf.ExplicitALS(8, biases=False, device="cpu"), **SMALL)
    assert len([one for one in caplog.records if "HYBRIDMF_ISA" in one.message]) == 1


# ------------------------------------------------------------------------------------------------ measured constants


def measured() -> Machine:
    return Machine(replace(CpuRates(), serial=0.125), replace(GpuRates(), start=2.5), "measured on a day", "Some GPU")


def test_measured_constants_are_kept_and_used():
    assert _machine.machine() == _machine.built_in()
    path = _machine.save(measured(), {"name": "Some GPU", "driver": 13020})
    assert path == _machine.calibration_file()
    assert _machine.machine() == measured()
    plan = plan_of(hmf.ExplicitALS(64, biases=False, device="cpu", num_threads=8), **NETFLIX)
    assert plan.estimates[0].seconds_per_iteration == cost_of(plan, measured()).iteration
    assert json.loads(path.read_text())["identity"] == _machine.identity()
    assert set(_machine.identity()) == {"processor", "cores", "instruction_set", "hybridmf"}
    again = replace(measured(), source="measured again")
    os.utime(_machine.save(again, {"name": "Some GPU"}), ns=(1, 1))
    assert _machine.machine() == again


def spoil(**changes: Any) -> Any:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        for name, value in changes.items():
            content[name] = content[name] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.write_text('{"format": 2, "identity'), "it is not JSON"),
        (lambda path: path.write_bytes(b"\xff\x00\x12"), "it is not JSON"),
        (lambda path: path.write_text(""), "it is not JSON"),
        (lambda path: path.write_text("[1, 2]"), "its format is None"),
        (lambda path: path.write_text('{"format": 2}'), "'identity'"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
        (spoil(format=1), "its format is 1, this version reads 2"),
        (spoil(identity={"processor": "Z80"}), "other hardware or another version (processor 'Z80', not "),
        (spoil(identity={"cores": 1024}), "(cores 1024, not "),
        (spoil(identity={"instruction_set": "mmx"}), "(instruction_set 'mmx', not "),
        (spoil(identity={"hybridmf": "99.0"}), "(hybridmf '99.0', not "),
        (spoil(cpu={"new": 1.0}), "its constants are not those of this version (new)"),
        (spoil(cpu={"serial": -1.0}), "its constant serial is -1.0"),
        (spoil(cpu={"row": "fast"}), "its constant row is 'fast'"),
        (spoil(cpu={"row": True}), "its constant row is True"),
        (spoil(cpu={"row": float("nan")}), "its constant row is nan"),
        (spoil(cpu={"solve": []}), "its constant solve is []"),
        (spoil(cpu={"solve": [[64, 1e9], [32, 1e9]]}), "its constant solve is [[64"),
        (spoil(gpu={"sgd": {"msgd": [[64, 0.0]]}}), "its constant sgd is [[64"),
        (spoil(gpu="nothing"), "its constants are not those"),
        (spoil(cpu=7), "not iterable"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(change, why, caplog):
    path = _machine.save(measured(), {"name": "Some GPU"})
    change(path)
    for _ in range(3):
        assert _machine.machine() == _machine.built_in()
    (warning,) = [one.message for one in caplog.records]
    assert "is ignored, built-in constants are used: " in warning and "`hybridmf tune --calibrate`" in warning
    assert why in warning
    if path.is_file():
        _machine.save(measured(), {"name": "Some GPU"})  # measured anew
        assert _machine.machine() == measured()


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYBRIDMF_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.raises(
        OSError, match=r"constants cannot be kept in .*set HYBRIDMF_CACHE_DIR to a folder you can write"
    ):
        _machine.save(measured())
    assert _machine.machine() == _machine.built_in()
    monkeypatch.setattr(_calibrate, "calibrate", lambda **_: pytest.fail("measured before it looked"))
    with pytest.raises(OSError, match="constants cannot be kept"):
        _calibrate.calibrate_and_save()


def test_the_users_cache_is_the_default(monkeypatch):
    monkeypatch.delenv("HYBRIDMF_CACHE_DIR")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, appauthor: f"there/{name}")
    assert _machine.calibration_file() == Path("there/hybridmf/machine.json")


def test_a_processor_has_a_name(monkeypatch):
    assert _machine.processor()

    def unreadable(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr("builtins.open", unreadable)
    assert _machine.processor()


# ---------------------------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("size", [(12, 20, 4), (5, 6, 6), (7, 3, 1)])
def test_problems_have_rows_of_one_length(size):
    rows, columns, degree = size
    matrix = _calibrate.regular(*size)
    assert matrix.shape == (rows, columns)
    assert np.all(np.diff(matrix.indptr) == degree)
    assert sp.csr_array(matrix).has_canonical_format
    assert matrix.data.min() >= 1 and matrix.data.max() <= 5 and matrix.dtype == np.float32


def test_entries_and_rows_are_told_apart():
    problems = _calibrate.regular(400, 400, 50), _calibrate.regular(600, 600, 4)
    times = [2 * one.nnz * 3e-9 + sum(one.shape) * 7e-7 for one in problems]
    assert _calibrate.entry_and_row((times[0], times[1]), problems) == pytest.approx((3e-9, 7e-7))
    noisy = _calibrate.entry_and_row((1e-9, 1.0), problems)
    assert min(noisy) > 0
    assert min(_calibrate.entry_and_row((1.0, 1e-9), problems)) > 0


TRUE_CPU = CpuRates(
    assembly=((8, 1e10), (16, 3e10), (32, 5e10), (64, 9e10), (128, 1e11)),
    solve=((8, 1e9), (16, 2e9), (32, 8e9), (64, 2e10), (128, 6e10)),
    cg=((8, 8e9), (16, 1e10), (32, 2e10), (64, 3e10), (128, 4e10)), subspace=3e10, ccd_entry=2e-9, ccd_row=5e-8,
    serial=0.07, sgd_row=2e-8, region=2e-7, gather_bytes=1e14, cached_bytes=1e14, sweep=1e-5, gram=4e-5, fresh=2e-9,
    draw=2e-8, fit=5e-3,
    slower={"simd": 1.0, "bals": 2.5, "blas3": 4, "rank1": 8},
    sgd=dict.fromkeys(("msgd", "hogwild", "blocks"), ((8, 8e9), (16, 1e10), (32, 2e10), (64, 3e10), (128, 4e10))),
)  # fmt: skip
TRUE_GPU = replace(
    GpuRates(), gather_bytes=1e18, cached_bytes=1e18, serial_update=0.0, solved_update=0.0, launch=5e-6,
    sweep={"als": 1e-4, "sgd": 2e-4, "ccd": 3e-4}, gram=5e-5, ccd=2e12, ccd_row=5e-10, load=0.2,
    fit={"als": 2e-3, "sgd": 1e-3, "ccd": 4e-3},
    row_setup=2e-7, factor_setup=3e-9, upload_bytes=1e15,
)  # fmt: skip


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose fits take exactly what the cost model says, with constants of ours and small problems."""
    machine = Machine(cpu=TRUE_CPU, gpu=TRUE_GPU)
    spec: list[DeviceSpec | None] = [H200]
    monkeypatch.setattr(dispatch, "find_gpu", lambda device: (None if device == "cpu" else spec[0], "simulated"))
    monkeypatch.setattr(_calibrate, "GPU_LONG", (4000, 4000, 200))
    monkeypatch.setattr(_calibrate, "GPU_SHORT", (40_000, 40_000, 4))
    monkeypatch.setattr(_calibrate, "GPU_LONG_WIDE", (1000, 1000, 200))
    monkeypatch.setattr(_calibrate, "GPU_SHORT_WIDE", (4000, 4000, 4))
    monkeypatch.setattr(_calibrate, "available_cores", lambda: 8)

    def cost(model: Any, matrix: sp.csr_array) -> Any:
        return cost_of(hmf.plan(matrix, model), machine, LOADED)

    def on_cpu(model: Any, matrix: sp.csr_array) -> Any:
        found = cost(model, matrix)
        return _calibrate.Fit(found.iteration, sum(found.setup.values()), 0.0)

    def compiling(_: Any, model: Any, matrix: sp.csr_array) -> tuple[float, float]:
        found = (cost_of(hmf.plan(matrix, model), machine, warmth) for warmth in (Warmth(), Warmth(compiled=True)))
        compiled, loaded = (one.setup["kernels"] for one in found)
        return compiled, loaded

    def fit(model: Any, matrix: sp.csr_array) -> Any:
        found = cost(model, matrix)
        setup = sum(found.setup.values())
        # the first fit on the GPU starts it
        before, started["gpu"] = setup + (0.0 if started["gpu"] else machine.gpu.start), True
        return _calibrate.Fit(found.iteration, setup, before)

    started = {"gpu": False}
    monkeypatch.setattr(_calibrate, "iteration_seconds", lambda model, matrix: cost(model, matrix).iteration)
    monkeypatch.setattr(
        _calibrate, "_fit", lambda model, matrix: fit(model, matrix) if model.device != "cpu" else on_cpu(model, matrix)
    )
    monkeypatch.setattr(_calibrate, "_compile_seconds", compiling)
    fake = SimpleNamespace(upload=lambda array: array, synchronize=lambda: None)
    monkeypatch.setattr(_calibrate, "open_device", lambda name: fake)
    monkeypatch.setattr(_calibrate, "_gpu_identity", lambda found: {"name": found.name, "driver": 1})
    return machine


def test_calibration_finds_the_constants_of_a_simulated_machine(simulated):
    said: list[str] = []
    machine, identity = _calibrate.calibrate(say=said.append)
    assert identity == {"name": "NVIDIA H200", "driver": 1} and machine.gpu_name == "NVIDIA H200"
    assert machine.source.startswith("measured on 20")
    for name in ("assembly", "solve", "cg"):
        np.testing.assert_allclose(getattr(machine.cpu, name), getattr(TRUE_CPU, name), rtol=0.02, err_msg=name)
    np.testing.assert_allclose(machine.cpu.sgd["msgd"], TRUE_CPU.sgd["msgd"], rtol=0.1)
    for name in ("subspace", "ccd_entry", "ccd_row", "serial"):
        assert getattr(machine.cpu, name) == pytest.approx(getattr(TRUE_CPU, name), rel=0.02), name
    assert machine.cpu.slower == pytest.approx(TRUE_CPU.slower, rel=0.02)
    for name in ("region", "sweep", "gram", "draw", "fit", "fresh"):
        assert getattr(machine.cpu, name) == pytest.approx(getattr(TRUE_CPU, name), rel=0.1), name
    # rows take part of the time that the curve is made of
    assert machine.cpu.sgd_row == pytest.approx(TRUE_CPU.sgd_row, rel=0.15)
    found, true = machine.gpu, TRUE_GPU
    np.testing.assert_allclose(found.assembly, true.assembly, rtol=0.05)
    np.testing.assert_allclose(found.solve[:5], true.solve[:5], rtol=0.05)
    for name in ("sparse_syrk", "mo_als", "bals"):
        for f, rate in found.published[name]:
            assert rate == pytest.approx(rate_at(true.published[name], f), rel=0.1)
    for name, curve in found.sgd.items():
        np.testing.assert_allclose(curve, true.sgd[name], rtol=0.05)
    assert found.ccd == pytest.approx(true.ccd, rel=0.05)
    for name in ("ccd_row", "launch", "gram", "factor_setup", "row_setup", "load", "start"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1), name
    for name in ("sweep", "fit", "entry_setup", "compile"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1), name
    assert any("NVIDIA H200" in line for line in said)


def test_without_a_gpu_the_cores_are_measured(simulated, monkeypatch):
    monkeypatch.setattr(dispatch, "find_gpu", lambda device: (None, "there is none"))
    said: list[str] = []
    machine, identity = _calibrate.calibrate(say=said.append)
    assert identity == {} and machine.gpu == GpuRates() and machine.gpu_name == ""
    assert said[-1] == "no GPU is measured: there is none"
    monkeypatch.setattr(_calibrate, "available_cores", lambda: 1)
    assert _calibrate.calibrate(gpu=False)[0].cpu.serial == CpuRates.serial


def test_a_fit_is_timed():
    model = hmf.ExplicitALS(4, biases=False, iterations=3, device="cpu", random_state=0)
    assert 0 < _calibrate.iteration_seconds(model, planted()) <= max(one["seconds"] for one in model.history_[1:])
    found = _calibrate._fit(model, planted())
    assert found.iteration > 0 and found.setup > 0 and found.before > 0
    assert found.iteration <= min(one["seconds"] for one in model.history_[1:])


def test_the_fastest_of_several_fits_counts(monkeypatch):
    """Of each part: one fit waits as a whole, others in an iteration; the first iteration of each warms up."""
    fits = iter([(9.0, [2.0, 1.0, 1.0]), (7.5, [2.0, 1.0, 3.0]), (5.5, [3.0, 1.5, 0.5])])
    clock = [0.0]

    class Model:
        def fit(self, matrix: Any) -> None:
            total, seconds = next(fits)
            clock[0] += total
            self.history_ = [{"seconds": one} for one in seconds]
            self.timings_ = {"check": 0.25, "set up": total / 4}

    monkeypatch.setattr(_calibrate.time, "perf_counter", lambda: clock[0])
    told: list[list[float]] = []
    model: Any = Model()
    found = _calibrate.time_fits(model, planted(), lambda totals: told.append(list(totals)) or len(totals) == 3)
    assert found == _calibrate.Fit(iteration=0.5, setup=0.5 + 1.5, before=2.5)
    assert told == [[9.0], [9.0, 7.5], [9.0, 7.5, 5.5]]


def test_programs_are_compiled_anew_once():
    compiled: list[tuple[str, str, tuple[str, ...]]] = []
    device: Any = SimpleNamespace(_kernels={("old", "a", ()): None}, _compile=lambda *key: compiled.append(key))

    class Model:
        def fit(self, matrix: Any) -> None:
            device._kernels |= dict.fromkeys([("one", "a", ("X=1",)), ("one", "b", ("X=1",)), ("two", "a", ("X=1",))])

    model: Any = Model()
    assert min(_calibrate._compile_seconds(device, model, planted())) > 0
    # compiled, then found on disk
    assert sorted(source.split("\n// ")[0] for source, _, _ in compiled) == ["one", "one", "two", "two"]
    assert len(set(compiled)) == 2
    assert all(len(source) > 30 for source, _, _ in compiled)  # CuPy has no such text
    assert _calibrate._compile_seconds(device, model, planted()) == (None, None)


def test_the_command_measures_keeps_and_shows(simulated, monkeypatch):
    result = CliRunner().invoke(main, ["tune", "--calibrate"])
    assert result.exit_code == 0, result.output
    for part in (
        "source measured on",
        "cpu assembly",
        "gpu solve",
        "gpu sgd",
        "msgd",
        f"kept in {_machine.calibration_file()}",
    ):
        assert part in result.output
    assert _machine.machine().gpu_name == "NVIDIA H200"


def test_the_command_says_where_it_cannot_write(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYBRIDMF_CACHE_DIR", str(tmp_path / "file"))
    result = CliRunner().invoke(main, ["tune", "--calibrate"])
    assert result.exit_code == 2
    assert "set HYBRIDMF_CACHE_DIR" in result.output


@pytest.mark.gpu
def test_calibration_on_a_gpu(monkeypatch):
    try:
        spec = dispatch.find_gpu("cuda")[0]
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    monkeypatch.setattr(_calibrate, "CPU_RANKS", (16, 32))
    monkeypatch.setattr(_calibrate, "GPU_RANKS", (32, 64))
    monkeypatch.setattr(_calibrate, "GPU_LONG", (10_000, 10_000, 200))
    monkeypatch.setattr(_calibrate, "GPU_SHORT", (100_000, 100_000, 4))
    machine, path = _calibrate.calibrate_and_save()
    assert machine.gpu_name == spec.name
    assert _machine.machine() == machine, path
    assert 1e11 < rate_at(machine.gpu.assembly, 64) < 1e16  # a difference of times, which other work beside it spoils
    assert all(seconds > 1e-5 for seconds in machine.gpu.sweep.values())  # of a GPU that others may use, too
    assert all(seconds >= 1e-4 for seconds in machine.gpu.fit.values())
    assert 0 < machine.gpu.load < max(machine.gpu.compile.values())
    assert machine.cpu.draw > 1e-10 and 1e-4 < machine.cpu.fit < 1.0
    assert 1e8 < machine.gpu.upload_bytes < 1e12


@pytest.mark.gpu
def test_a_gpu_fit_is_remembered():
    try:
        dispatch.find_gpu("cuda")
    except DeviceError as error:
        pytest.skip(f"no GPU: {error}")
    model = hmf.ExplicitALS(8, biases=False, iterations=1, device="cuda", random_state=0)
    first = hmf.plan(planted(), model).estimates[0]
    model.fit(planted())
    assert hmf.plan(planted(), model).estimates[0].setup_seconds < first.setup_seconds
