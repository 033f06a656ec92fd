"""Weights of entries and features of rows in plans: memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import hybridmf as hmf
from hybridmf.core import system
from hybridmf.device import cuda as devices
from hybridmf.errors import MemoryBudgetError
from hybridmf.plan.extras import equation_bytes
from hybridmf.plan.half_sweep import BATCH_BYTES, slot_bytes
from hybridmf.plan.make import check_memory, make_plan
from hybridmf.plan.types import Plan
from support.cost_model import GIB, H200

pytestmark = pytest.mark.usefixtures("forget_devices")

SHAPE, NNZ = (480_000, 18_000), 99_000_000


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plan of a fit with weights or features on an H200 or the CPU."""
    monkeypatch.setattr(devices, "open_device", lambda name: SimpleNamespace(spec=H200))

    def make(
        cls: Any = hmf.ExplicitALS, device: str = "cuda", weighted: bool = False, features: Any = (), **more: Any
    ) -> Plan:
        biases = {"biases": False} if cls is hmf.ExplicitALS else {}
        model = cls(64, device=device, num_threads=1, **biases, **more)
        settings = replace(model._settings(), weighted=weighted, features=tuple(features))
        return make_plan(model._objective(), settings, SHAPE, NNZ)

    return make


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_and_features_are_a_part_of_the_memory(plan: Any, device: str) -> None:
    plain, itemsize = plan(device=device, row_form="primal"), 4
    weighted = plan(device=device, weighted=True, row_form="primal")
    assert weighted.bytes["weights"] == (2 if device == "cpu" else 4) * NNZ * itemsize
    assert weighted.total_bytes == plain.total_bytes + weighted.bytes["weights"]
    featured = plan(device=device, features=[("item", 1000, 54_000)], row_form="primal")
    assert featured.bytes["features"] > 2 * 54_000 * 8 + 1000**2 * 4
    more = plan(device=device, features=[("item", 2000, 54_000)], row_form="primal")
    assert more.bytes["features"] - featured.bytes["features"] > 3 * 1000**2 * 4


def test_what_features_add_to_sums_is_counted_where_solutions_do_not_take_its_place(plan: Any) -> None:
    features = [("user", 10, 480_000)]
    exact, cg = (plan(features=features, solver=solver) for solver in ("cholesky", "cg"))
    assert cg.bytes["features"] - exact.bytes["features"] == SHAPE[0] * 64 * 4
    # CG adds it to sums in memory, for which there are slots: one batch of rows for each BATCH_BYTES
    plain = plan(solver="cg")
    assert plain.batch_slots == 2 * (NNZ // plain.segment) + 1
    assert cg.batch_slots == BATCH_BYTES // slot_bytes(cg) > plain.batch_slots


def test_features_take_the_primal_form_on_a_gpu(plan: Any) -> None:
    assert plan(hmf.ImplicitALS).dual_sides == ("user", "item")
    assert plan(hmf.ImplicitALS, features=[("item", 10, 100)]).dual_sides == ("user",)
    assert plan(features=[("item", 10, 100)], device="cpu").dual_sides == ("user", "item")
    with pytest.raises(ValueError, match='row_form="dual" does not apply on a GPU with features; use row_form="auto"'):
        plan(features=[("item", 10, 100)], row_form="dual")
    assert plan(device="auto", row_form="dual").device == "cuda:0"
    elsewhere = plan(features=[("item", 10, 100)], device="auto", row_form="dual")
    assert elsewhere.device == "cpu" and elsewhere.reason.startswith('row_form="dual" does not apply on a GPU')


def test_weights_have_the_cpu_and_the_given_order(plan: Any) -> None:
    weighted = plan(weighted=True, device="auto")
    assert (weighted.device, weighted.reorder) == ("cpu", "none")
    assert plan(weighted=True).dual_sides == ()
    for options, reason in (
        ({"gpu_memory_limit": 2_600_000_000}, "need ratings and factors in the memory of the GPU"),
        ({"device": "cpu", "assembly": "bals"}, 'assembly="bals" has none'),
        ({"solver": "cg"}, "solver='cg' has none on a GPU"),
    ):
        with pytest.raises(ValueError, match=f"weights of explicit ratings: .*{reason}.*; use device="):
            plan(weighted=True, **options)


def test_equations_of_features_have_to_fit_on_the_host(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "available_memory", lambda: 20 * GIB)
    check_memory(plan(features=[("item", 20_000, 100)]))
    assert equation_bytes(40_000) > 20 * GIB
    with pytest.raises(MemoryBudgetError, match=r"item_features has 40,000 features, .* leave out rare features"):
        check_memory(plan(features=[("item", 40_000, 100)]))
