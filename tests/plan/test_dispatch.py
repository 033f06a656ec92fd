"""The choice of the device."""

from __future__ import annotations

import logging
import pickle
import sys
from dataclasses import replace

import pytest

import hybridmf as hmf
from hybridmf.core import cache as _cache
from hybridmf.device import ready
from hybridmf.plan import dispatch, types
from hybridmf.plan.machine import GpuRates
from support.cost_model import H200, NETFLIX, plan_of
from support.ratings import planted

pytestmark = pytest.mark.usefixtures("own_cache")

SMALL = {"shape": (300, 200), "nnz": 5000}

# --------------------------------------------------------------------------------------------------------- the choice


def test_auto_selects_the_device_with_the_shortest_prediction(caplog):
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
    model = hmf.ImplicitALS(64, num_threads=16, iterations=6)
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


def test_kernels_of_the_package_turn_the_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(ready, "FOLDER", tmp_path)
    monkeypatch.setenv(ready.READY_KERNELS, "1")
    sizes = {"shape": (138_493, 27_278), "nnz": 20_000_263}
    model = hmf.ImplicitALS(64, num_threads=16, iterations=6)
    on_gpu = plan_of(hmf.ImplicitALS(64, num_threads=16, device="cuda"), H200, **sizes)
    ready.plans_of((9, 0)).write_text(f"{'0' * 16}\n{dispatch.signature_of(on_gpu)}")
    assert plan_of(model, H200, **sizes).device == "cuda:0"
    other_rank = hmf.ImplicitALS(65, num_threads=16, iterations=6)
    assert plan_of(other_rank, H200, **sizes).device == "cpu"
    monkeypatch.setenv(ready.READY_KERNELS, "0")
    assert plan_of(model, H200, **sizes).device == "cpu"


def test_compiled_kernels_need_no_record(tmp_path, monkeypatch, caplog):
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
    assert len(ways) == len(plan.estimates) == 3 + 3 + 3 * 5 + 3 * 2
    assert {one.assembly for one in plan.estimates if one.device == "cpu"} == {"simd", "rank1", "blas3", "bals"}
    assert {one.precision for one in plan.estimates if one.device != "cpu"} == {
        "float32", "bf16x3", "tf32", "bf16", "float16",
    }  # fmt: skip
    for one in plan.estimates:
        assert one.total_seconds == pytest.approx(one.setup_seconds + 10 * one.seconds_per_iteration)
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


def test_features_that_the_cpu_lacks_select_the_gpu():
    plan = plan_of(hmf.ExplicitALS(8, biases=False, solver="cg", assembly="bals"), H200, **SMALL)
    assert plan.device == "cuda:0"
    assert "the CPU does not serve this: assembly='bals' is for solver='cholesky'" in plan.reason
    with pytest.raises(ValueError, match="assembly='bals' is for solver='cholesky'"):
        plan_of(hmf.ExplicitALS(8, biases=False, solver="cg", assembly="bals"), **SMALL)


def test_without_a_gpu_the_reason_is_reported_at_no_cost(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    model = hmf.ExplicitALS(4, biases=False, iterations=2, random_state=0).fit(planted())
    assert model.plan_.reason.startswith("no GPU: CuPy is not installed")
    assert {one.device for one in model.plan_.estimates} == {"cpu"}
    assert not _cache.cache_dir().exists()


def test_estimates_do_not_distinguish_plans():
    plan = plan_of(hmf.ExplicitALS(8, biases=False, device="cpu"), **SMALL)
    assert plan == plan.changed(decisive=(), alternatives=None) and plan.estimates


def test_a_fit_prices_only_candidates_for_the_choice(monkeypatch):
    """The plan of each device; the alternatives when they are read, as if this process had done nothing since."""
    priced, cost_of = [], dispatch._cost.cost_of
    monkeypatch.setattr(dispatch._cost, "cost_of", lambda *given: priced.append(given[0]) or cost_of(*given))
    plan = plan_of(hmf.ImplicitALS(64), H200, **NETFLIX)
    assert [one.device for one in priced] == ["cpu", "cuda:0"]
    estimates = pickle.loads(pickle.dumps(plan)).estimates
    assert len(estimates) > 10 and len(priced) > 20
    dispatch.remember(plan)
    assert plan.estimates == estimates
    priced.clear()
    assert len(plan.estimates) > 10 and not priced  # once
    plan_of(hmf.ImplicitALS(64, device="cpu"), **NETFLIX)
    assert [one.device for one in priced] == ["cpu"]


def test_a_printed_plan_shows_the_estimates():
    text = str(plan_of(hmf.ImplicitALS(64), H200, **NETFLIX))
    lines = [line for line in text.splitlines() if line.startswith("estimate")]
    assert lines[0].startswith("estimate  cuda:0 cholesky, fused: ")
    assert " set-up + " in lines[0] and " an iteration; " in lines[0] and lines[0].endswith(" MiB")
    assert any(line.startswith("estimate  cpu cholesky, simd: ") for line in lines)
    assert lines[-1].startswith("estimate  otherwise cuda:0 cg, ")
    assert "there is a GPU: 10 iterations in about " in text
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
