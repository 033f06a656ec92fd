"""Where the plan takes the dual form, and what it predicts for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import hybridmf as hmf
from hybridmf.core.objective import SIDES
from hybridmf.plan.cost import cost_of
from hybridmf.plan.half_sweep import HalfPlan
from hybridmf.plan.row_forms import DUAL_SHARE, GPU_SIZES, check_row_form, dual_up_to
from support.cost_model import H200, built_in, plan_of

SHOP = {"shape": (100_000, 60_000), "nnz": 800_000}
DENSE = {"shape": (6000, 4000), "nnz": 5_000_000}


def plan(model: Any = hmf.ImplicitALS, sizes: Any = None, **options: Any) -> Any:
    return plan_of(model(64, device="cpu", **options), **(SHOP if sizes is None else sizes))


def test_short_rows_take_the_dual_form() -> None:
    for model in (hmf.ImplicitALS, hmf.ExplicitALS):
        auto = plan(model)
        assert auto.dual_sides == ("user", "item")
        assert dual_up_to(auto, "user") == int(DUAL_SHARE * auto.rank)
        assert dual_up_to(plan(model, row_form="dual"), "item") == auto.rank
        assert dual_up_to(plan(model, row_form="primal"), "item") == 0
        for other in ({"solver": "cg"}, {"assembly": "bals"}):
            assert dual_up_to(plan(model, **other), "user") == 0


def test_a_basis_is_changed_where_that_pays() -> None:
    assert plan(sizes=DENSE).dual_sides == ()
    assert plan(hmf.ExplicitALS, sizes=DENSE).dual_sides == ("user", "item")  # needs no change of basis
    few_items = plan(sizes={"shape": (1_000_000, 500), "nnz": 5_000_000})
    assert few_items.dual_sides == ("user",)


def test_each_side_by_its_own_penalty() -> None:
    assert plan(regularization_scaling=(0.5, "none")).dual_sides == ("item",)
    assert plan(hmf.ExplicitALS, regularization=(0.1, 0)).dual_sides == ("user",)


def test_the_prediction_includes_cheaper_rows() -> None:
    for model in (hmf.ImplicitALS, hmf.ExplicitALS):
        seconds = {form: cost_of(plan(model, row_form=form), built_in()).iteration for form in ("auto", "primal")}
        assert 1.5 < seconds["primal"] / seconds["auto"] < 10


def test_memory_counts_the_fixed_side_in_another_basis() -> None:
    primal, auto = plan(row_form="primal").bytes, plan().bytes
    assert auto["basis"] == 100_000 * 64 * 4
    assert sum(auto.values()) - sum(primal.values()) == auto["basis"]
    assert "basis" not in plan(hmf.ExplicitALS).bytes


def test_a_gpu_has_the_dual_form_where_it_holds_everything() -> None:
    auto = plan_of(hmf.ImplicitALS(64, device="cuda"), H200, **SHOP)
    assert auto.dual_sides == ("user", "item")
    assert dual_up_to(auto, "user") == int(DUAL_SHARE * 64)
    dual = plan_of(hmf.ImplicitALS(100, device="cuda", row_form="dual"), H200, **SHOP)
    assert dual_up_to(dual, "item") == GPU_SIZES[-1]
    primal = plan_of(hmf.ImplicitALS(64, device="cuda", row_form="primal"), H200, **SHOP)
    assert (primal.dual_sides, dual_up_to(primal, "user")) == ((), 0)
    assert auto.bytes["basis"] > 0 and "basis" not in primal.bytes
    for options in ({"solver": "cg"}, {"assembly": "sparse_syrk"}, {"dtype": "float64"}, {"regularization": 0.0}):
        assert plan_of(hmf.ImplicitALS(64, device="cuda", **options), H200, **SHOP).dual_sides == ()
        with pytest.raises(ValueError, match=r'row_form="dual" does not apply: .*row_form="auto"'):
            plan_of(hmf.ImplicitALS(64, device="cuda", row_form="dual", **options), H200, **SHOP)


def test_several_gpus_take_the_dual_form_where_each_has_the_whole_fixed_side() -> None:
    devices = ["cuda:0", "cuda:1"]
    one, two = (plan_of(hmf.ImplicitALS(64, device=where), H200, **SHOP) for where in ("cuda", devices))
    for side in SIDES:
        assert dual_up_to(two, side) == dual_up_to(one, side) == int(DUAL_SHARE * 64)
    assert 0 < two.bytes["basis"] <= one.bytes["basis"]
    assert two.total_bytes <= H200.free_bytes
    split = two.changed(scale=replace(two.scale, halves={side: HalfPlan(side, 2, 1, 2) for side in SIDES}))
    assert dual_up_to(split, "user") == 0
    with pytest.raises(ValueError, match="all entries of a row on one GPU"):
        check_row_form(split.changed(row_form="dual"), hmf.ImplicitALS(64)._objective())
    with pytest.raises(ValueError, match="in the memory of the GPUs"):
        plan_of(hmf.ImplicitALS(64, device=devices, row_form="dual", gpu_memory_limit="120 MB"), H200, **SHOP)
