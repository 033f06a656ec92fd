"""Fits on a GPU whose factors stay on the host."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np

from hybridmf.core.objective import SIDES
from hybridmf.model.training import LocalRatings
from hybridmf.plan.half_sweep import HalfPlan, half_bytes, priced
from hybridmf.plan.machine import H200
from hybridmf.plan.make import make_plan
from hybridmf.plan.partitions import ScalePlan
from hybridmf.plan.types import Plan
from hybridmf.ranks.su_als import RankALS
from support.half_sweeps import FITS
from support.ranks import one_device
from support.ratings import planted


def assert_same_fit(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(one.user_factors, other.user_factors)
    np.testing.assert_array_equal(one.item_factors, other.item_factors)
    if one.user_bias_ is not None:
        np.testing.assert_array_equal(one.user_bias_, other.user_bias_)
        np.testing.assert_array_equal(one.item_bias_, other.item_bias_)
    assert [each["objective"] for each in one.history_] == [each["objective"] for each in other.history_]


MATRIX = planted(50, 30, 0.8)

HOST_LIMIT = 10_000
"""Too little for the factors of MATRIX beside what a half sweep needs, enough for either side alone."""

TURNS_LIMIT = 7_000
"""Too little for the users as a fixed side."""


def partitioned(plan: Plan, parts: dict[str, int], batches: dict[str, int], buffers: int = 2) -> Plan:
    """The plan with factors on the host, in so many parts and row parts."""
    gpus, places = max(1, len(plan.devices)), ("host", "host")
    halves = {}
    for side in SIDES:
        half = HalfPlan(side, parts[side], batches[side], gpus, *places, split=False, buffers=buffers)
        halves[side] = priced(plan, replace(half, bytes=half_bytes(plan, half)), H200)
    scale = ScalePlan(plan, H200, gpus, 1 << 30, halves)
    return plan.changed(scale=scale, streamed="host", slab=max(map(scale.slab, SIDES)))


def solver(kind: str, device: Any, parts: int, batches: int, data: Any = MATRIX, **options: Any) -> RankALS:
    cls, given = FITS[kind]
    sizes = {name: options.pop(name) for name in ("segment", "buffers") if name in options}
    model = cls(**(given | {"random_state": 0, "device": "cuda"} | options))
    matrix = model._check_matrix(data)
    plan = make_plan(model._objective(), model._settings(), matrix.shape, matrix.nnz)
    plan = plan.changed(segment=sizes.get("segment", plan.segment))
    plan = partitioned(plan, *(dict.fromkeys(SIDES, count) for count in (parts, batches)), sizes.get("buffers", 2))
    ratings = LocalRatings(model, data).on_host(plan)
    state = model._initial_state(ratings, plan, model._objective())
    return one_device(ratings.user_items, ratings.item_users, model._objective(), plan, state, device=device)


def fitted(kind: str, data: Any, **options: Any) -> Any:
    cls, given = FITS[kind]
    model = cls(**(given | {"iterations": 2, "random_state": 0, "device": "cuda"} | options))
    return model.fit(data, callback=lambda model, record: None)


def no_threads() -> bool:
    return not [one for one in threading.enumerate() if one.name.startswith(("hybridmf-slabs", "hybridmf-solutions"))]
