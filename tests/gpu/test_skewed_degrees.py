"""Ratings whose degrees are far from even, on a GPU that has no room for them: memory is as planned, bits as ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import SIDES
from hybridmf.errors import DeviceMemoryError
from hybridmf.plan import fused as plan_fused
from hybridmf.plan.als_gpu import STREAM_SLAB
from hybridmf.plan.fused import gram_bytes
from hybridmf.plan.half_sweep import SLAB_BUFFERS, HalfPlan, batch_entries, half_bytes, slots_at_once
from hybridmf.plan.partitions import plan_host_ranks
from hybridmf.plan.types import DegreeFacts
from hybridmf.ranks import group
from support.cost_model import kernels_of
from support.devices import NETFLIX, Tracked, plan_of
from support.half_sweeps import FITS
from support.marks import exhaustive

pytestmark = pytest.mark.usefixtures("tiny_gpu")

ROWS, COLUMNS, LONG = 16, 160, 7


def skewed(name: str) -> sp.csr_array:
    """Ratings of ROWS users, as the name says."""
    degrees = np.zeros(ROWS, dtype=int)
    if name == "one row":  # nine tenths of all
        degrees[:] = 1
        degrees[LONG] = 9 * ROWS
    elif name == "half empty":
        degrees[::2] = 32
    elif name == "last rows":
        degrees[-4:] = 156
    elif name == "power law":
        degrees = np.random.default_rng(1).permutation((156 / (1 + np.arange(ROWS))).astype(int))
    rng = np.random.default_rng(0)
    indices = np.concatenate([np.sort(rng.choice(COLUMNS, count, replace=False)) for count in degrees.tolist()])
    values = rng.integers(1, 6, len(indices)).astype(np.float32)
    return sp.csr_array((values, indices, np.concatenate(([0], np.cumsum(degrees)))), shape=(ROWS, COLUMNS))


def fitted(kind: str, matrix: Any, **options: Any) -> Any:
    cls, given = FITS[kind]
    return cls(**(given | {"iterations": 1, "random_state": 0, "device": "cuda"} | options)).fit(matrix)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows have several segments."""
    monkeypatch.setattr(plan_fused, "SEGMENT", 64)


@pytest.mark.parametrize(
    ("name", "kind", "options", "limit", "on_host", "side"),
    [
        ("one row", "explicit", {}, 15_000, True, "user"),
        ("one row", "explicit", {}, 15_000, True, "item"),
        ("half empty", "explicit", {}, 23_500, False, "user"),
        ("half empty", "biases", {"assembly": "sparse_syrk"}, 25_500, False, "item"),
        ("last rows", "implicit", {}, 43_000, False, "user"),
        ("last rows", "explicit", {}, 17_000, True, "item"),
        ("power law", "biases", {}, 35_000, False, "user"),
        ("power law", "implicit", {"solver": "cg"}, 24_500, True, "item"),
    ],
)
def test_memory_stays_within_the_plan(
    name: str,
    kind: str,
    options: dict[str, Any],
    limit: int,
    on_host: bool,
    side: str,
    gpu: Any,
    short_segments: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if gpu.spec.name != "emulated":
        pytest.skip("the pool of a GPU keeps what was given back")
    monkeypatch.setattr(plan_fused, "gram_bytes", gram_bytes)
    matrix = skewed(name) if side == "user" else skewed(name).T.tocsr()
    tracked = Tracked(gpu, monkeypatch)
    model = fitted(kind, matrix, gpu_memory_limit=limit, **options)
    plan = model.plan_
    assert (plan.streamed, plan.factors_on_host) == ("host", on_host)
    assert tracked.peak <= plan.total_bytes <= limit


@pytest.mark.parametrize(("name", "limit", "on_host"), [("last rows", 30_500, False), ("one row", 13_500, True)])
def test_memory_of_several_gpus_stays_within_the_plan(
    name: str,
    limit: int,
    on_host: bool,
    gpus: Any,
    short_segments: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = gpus(2)
    devices = list(map(group.open_device, names))
    if devices[0].spec.name != "emulated":
        pytest.skip("the pool of a GPU keeps what was given back")
    tracked = [Tracked(device, monkeypatch) for device in devices]
    plan = fitted("explicit", skewed(name), device=names, gpu_memory_limit=limit).plan_
    assert (plan.streamed, plan.factors_on_host) == ("host", on_host)
    assert max(each.peak for each in tracked) <= plan.total_bytes <= limit


@pytest.mark.parametrize(
    ("name", "kind", "limit"),
    [
        ("one row", "implicit", 23_600),
        ("one row", "biases", 25_000),
        ("last rows", "explicit", 30_000),
        exhaustive("one row", "explicit", 23_600),
        exhaustive("last rows", "implicit", 30_000),
        exhaustive("last rows", "biases", 32_000),
    ],
)
def test_the_bits_of_long_rows_are_those_of_a_fit_that_holds_all(name: str, kind: str, limit: int, gpu: Any) -> None:
    """Solutions of slabs are written where they stay, and rows longer than other slabs have slabs of their own."""
    streamed = fitted(kind, skewed(name), gpu_memory_limit=limit)
    whole = fitted(kind, skewed(name), row_form="primal")
    assert (streamed.plan_.streamed, whole.plan_.streamed) == ("host", "")
    halves = streamed.plan_.scale.halves.values() if streamed.plan_.factors_on_host else ()
    assert all(half.turns == 1 for half in halves)  # parts of rows would be added in another order
    np.testing.assert_array_equal(streamed.user_factors, whole.user_factors)
    np.testing.assert_array_equal(streamed.item_factors, whole.item_factors)


@pytest.mark.parametrize("side", SIDES)
def test_a_row_that_is_too_long_is_named(side: str, gpu: Any, short_segments: None) -> None:
    matrix = skewed("one row") if side == "user" else skewed("one row").T.tocsr()
    message = rf"a row is never cut, so that slabs which hold {side} {LONG} with its 144 entries take .* leave some of"
    with pytest.raises(DeviceMemoryError, match=message):
        fitted("explicit", matrix, gpu_memory_limit=8_000)
    assert not getattr(gpu, "launches", ())  # a device that counts them is emulated
    with pytest.raises(DeviceMemoryError) as found:  # which has no slabs
        fitted("explicit", matrix, gpu_memory_limit=8_000, reorder="both")
    assert "never cut" not in str(found.value)


def test_items_are_counted_where_a_plan_depends_on_it(gpu: Any, tmp_path: Any) -> None:
    matrix = skewed("last rows").T.tocsr()  # 160 users, of which an item can have no more
    items = np.bincount(matrix.indices, minlength=matrix.shape[1])
    for data, limit, counted in (
        (matrix, None, False),
        (matrix, 31_000, False),  # slabs are longer than any item may be
        (matrix, 27_000, True),
        (matrix, 20_000, True),  # factors on the host
        (hmf.convert(matrix, tmp_path / "store"), None, True),  # which knows them
    ):
        plan = hmf.plan(data, hmf.ExplicitALS(biases=False, factors=7, device="cuda", gpu_memory_limit=limit))
        facts = plan.facts
        assert facts.longest_user == 4 and facts.positions[0] >= 0
        assert (facts.longest_item, facts.positions[1]) == ((items.max(), items.argmax()) if counted else (0, -1))
        assert counted or plan.slab == 0 or plan.slab >= len(np.diff(matrix.indptr))


def test_plans_have_room_for_the_longest_row() -> None:
    entries = NETFLIX[1] // 3
    for free, on_host in ((1300 << 20, False), (1000 << 20, True)):
        even = plan_of(free)
        skewed_plan = plan_of(free, facts=DegreeFacts(10, entries, positions=(0, 5)))
        assert not even.factors_on_host and skewed_plan.factors_on_host == on_host
        assert skewed_plan.total_bytes <= free
        assert even.slab <= STREAM_SLAB < entries <= skewed_plan.slab
        assert skewed_plan.bytes["ratings"] >= SLAB_BUFFERS * entries * 8
        assert skewed_plan.batch_slots * skewed_plan.segment >= entries or skewed_plan.factors_on_host


def test_parts_of_rows_are_as_long_as_the_longest_row() -> None:
    even = kernels_of((1000, 600), 40_000, 10, segment=64)
    even = even.changed(gpu=replace(even.gpu, free_bytes=8 * 4400))
    problem = even.changed(facts=DegreeFacts(0, 30_000))
    half = HalfPlan("item", 1, 8, 1, "host", "host")
    assert (batch_entries(even, "item", 8), batch_entries(problem, "item", 8)) == (5000, 30_000)
    assert batch_entries(problem, "user", 8) == 5000
    sizes, less = (half_bytes(each, half) for each in (problem, even))
    assert sizes["ratings"] == 3 * 30_000 * 8 and less["ratings"] == 3 * 5000 * 8
    assert slots_at_once(problem, half) == -(-30_000 // 64) > slots_at_once(even, half)
    plan = plan_host_ranks(problem, 1, 3 * 10**6, "host", 1000)
    assert plan is not None and plan.slab("item") >= 30_000
    assert plan_host_ranks(problem, 1, 3 * 30_000 * 8, "host", 1000) is None
    assert plan_host_ranks(even, 1, 3 * 30_000 * 8, "host", 1000) is not None
