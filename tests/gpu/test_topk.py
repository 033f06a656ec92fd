"""Top-K on a GPU against a full sort of the dense scores, and against the CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.core.sparse import RowColumns
from hybridmf.cpu import topk as cpu
from hybridmf.errors import DeviceMemoryError
from hybridmf.gpu import topk
from hybridmf.gpu.launch import kernel_folder
from hybridmf.gpu.topk import PackedItems, top_k, top_k_on_device
from support import emulated, reference
from support.builds import builds_of
from support.marks import exhaustive


def integer_factors(rows: int, rank: int, seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Small integers: scores are exact in every order of summation, and ties are frequent."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, rank)).astype(dtype)


def real_factors(rows: int, rank: int, seed: int, dtype: Any = np.float32, spread: float = 0.5) -> np.ndarray:
    """Normal factors times log-normal lengths."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(rows, rank)) * rng.lognormal(sigma=spread, size=(rows, 1))).astype(dtype)


def random_seen(n_users: int, n_items: int, seed: int, density: float = 0.3) -> sp.csr_array:
    return sp.csr_array((np.random.default_rng(seed).random((n_users, n_items)) < density).astype(np.int8))


def check_equal(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def check_close(
    found: tuple[np.ndarray, np.ndarray], users: np.ndarray, items: np.ndarray, seen: sp.csr_array | None = None
) -> None:
    """Equal to the sort of float64 scores up to ties by rounding: a few times rank eps |x| |y|."""
    ids, scores = found
    exact = users.astype(np.float64) @ items.astype(np.float64).T
    _, best = reference.top_k(exact, ids.shape[1], seen)
    there = ids >= 0
    np.testing.assert_array_equal(there, np.isfinite(best))
    assert all(len(set(row[row >= 0].tolist())) == (row >= 0).sum() for row in ids)
    lengths = np.linalg.norm(users, axis=1)[:, None] * np.linalg.norm(items, axis=1).max(initial=0)
    tolerance = 2 * users.shape[1] * np.finfo(items.dtype).eps * np.broadcast_to(lengths, ids.shape)[there]
    assert (np.abs(scores[there] - best[there]) <= tolerance).all()
    of_ids = np.take_along_axis(exact, np.where(there, ids, 0), axis=1)[there]
    assert (np.abs(scores[there] - of_ids) <= tolerance).all()
    assert (scores[:, 1:] <= scores[:, :-1]).all()
    if seen is not None:
        assert not np.take_along_axis(seen.toarray(), np.where(there, ids, 0), axis=1)[there].any()


@settings(max_examples=20)
@given(
    st.integers(1, 20), st.integers(1, 300), st.integers(1, 9), st.integers(1, 32), st.integers(0, 10**6),
    st.booleans(), st.booleans(), st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_top_k_is_the_stable_sort_and_the_cpus(device, n_users, n_items, rank, n, seed, filtered, subset, dtype):
    rng = np.random.default_rng(seed)
    users, items = integer_factors(n_users, rank, seed, dtype), integer_factors(n_items, rank, seed + 1, dtype)
    seen = random_seen(n_users, n_items, seed) if filtered else None
    candidates = np.flatnonzero(rng.random(n_items) < 0.5) if subset else None
    found = top_k(device, users, items, n, seen=seen, candidates=candidates)
    left_out = np.zeros((n_users, n_items)) if seen is None else seen.toarray()
    if candidates is not None:
        left_out[:, np.setdiff1d(np.arange(n_items), candidates)] = 1
    check_equal(found, reference.top_k(users @ items.T, n, sp.coo_array(left_out)))
    excluded = None if seen is None else RowColumns.of(seen)
    check_equal(found, cpu.top_k(users, items, n, seen=excluded, candidates=candidates))
    assert found[0].dtype == np.int32
    assert found[1].dtype == dtype


@pytest.mark.parametrize("rank", [1, 7, 33, exhaustive(100), 128])
def test_ranks(device, rank):
    users, items = real_factors(9, rank, 0), real_factors(300, rank, 1)
    seen = random_seen(9, 300, 2)
    check_close(top_k(device, users, items, 10, seen=seen), users, items, seen)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rank", "of_users", "of_items"), [(7, 1.0, 1.0), (40, 1e-18, 1e-18), (7, 1e18, 1e15)])
def test_products_of_bytes_change_nothing(device, rank, of_users, of_items, dtype):
    users = (real_factors(12, rank, 0, np.float64) * of_users).astype(dtype)
    items = (real_factors(200, rank, 1, np.float64) * of_items).astype(dtype)
    users[3], items[100:164], items[5] = 0, 0, 1e4 * items[5]
    items[:, 2] *= 30  # one factor outweighs the others: little is left of them in a byte
    seen = random_seen(12, 200, 2)
    longer = top_k(device, users, items, 100, seen=seen)
    for n in (1, 10, 60):
        found = [top_k(device, users, PackedItems(device, items, in_bytes=b), n, seen=seen) for b in (False, True)]
        check_equal(*found)
        check_equal(found[0], tuple(part[:, :n] for part in longer))


def test_bytes_where_they_pay(device, monkeypatch):
    """Many groups, whose factors are of like size."""
    monkeypatch.setattr(topk, "BYTE_GROUPS", 8)
    items = real_factors(300, 64, 0)
    assert PackedItems(device, items).config.in_bytes
    assert not PackedItems(device, items[:, :40].copy()).config.in_bytes
    items[:, 0] = 100.0
    assert not PackedItems(device, items).config.in_bytes
    monkeypatch.setattr(device, "spec", replace(device.spec, capability=(7, 5)))
    assert not PackedItems(device, real_factors(300, 64, 0)).config.in_bytes


@pytest.mark.parametrize("rank", [8, 16, 31, 32, 63, 64, 65, 127, 144, 200, 256, 257, 512, 520])
def test_more_ranks_and_users(device, rank):
    if device.spec.name == "emulated":
        pytest.skip("compiles for minutes")
    users, items = real_factors(700, rank, 0), real_factors(9000, rank, 1)
    seen = random_seen(700, 9000, 2, 0.02)
    found = top_k(device, users, items, 10, seen=seen)
    check_close(found, users, items, seen)
    longer = top_k(device, users, items, 200, seen=seen)
    check_equal(found, (longer[0][:, :10], longer[1][:, :10]))


@pytest.mark.parametrize("users_per_warp", [16, 32])
def test_tiles_of_larger_ranks(device, users_per_warp, monkeypatch):
    """Ranks beyond 128 and 256 have fewer users a warp; tried on a rank that the emulator is quick with."""
    users, items = real_factors(70, 7, 0), real_factors(300, 7, 1)
    seen = random_seen(70, 300, 2)
    expected = top_k(device, users, items, 10, seen=seen)
    chosen = classmethod(lambda cls, padded, in_bytes=False: cls(padded, users_per_warp, 1, in_bytes))
    monkeypatch.setattr(topk.GroupMaxConfig, "rule", chosen)
    check_equal(top_k(device, users, items, 10, seen=seen), expected)
    check_close(expected, users, items, seen)


@pytest.mark.parametrize("filtered", [False, True])
def test_any_n(device, filtered):
    users, items = real_factors(5, 7, 3), real_factors(300, 7, 4)
    seen = random_seen(5, 300, 5) if filtered else None
    packed = PackedItems(device, items)
    longest = top_k(device, users, packed, 301, seen=seen)  # whole rows of scores: the same bits
    check_close(longest, users, items, seen)
    for n in (1, 10, 32, 33, 128, 129, 256, 300):
        check_equal(top_k(device, users, packed, n, seen=seen), (longest[0][:, :n], longest[1][:, :n]))


@pytest.mark.parametrize("n_items", [1, 31, 32, 33, 255, 256, 257, 513])
@pytest.mark.parametrize("n", [1, 127, 600])
def test_group_and_octet_edges(device, n_items, n):
    users, items = integer_factors(5, 5, 0), integer_factors(n_items, 5, 1)
    check_equal(top_k(device, users, items, n), reference.top_k(users @ items.T, n))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_list_longer_than_shared_memory(device, dtype, monkeypatch):
    monkeypatch.setattr(topk, "SORTED_IN_SHARED", 1024)
    users, items = integer_factors(2, 3, 0, dtype), integer_factors(300, 3, 1, dtype)
    seen = random_seen(2, 300, 2, 0.05)
    for n in (130, 300):
        check_equal(top_k(device, users, items, n, seen=seen), reference.top_k(users @ items.T, n, seen))


def test_all_of_many_items(device):
    if device.spec.name == "emulated":
        pytest.skip("takes minutes")
    users, items = integer_factors(300, 9, 0), integer_factors(20_000, 9, 1)
    seen = random_seen(300, 20_000, 2, 0.05)
    for n in (1000, 5000, 20_000):
        check_equal(top_k(device, users, items, n, seen=seen), reference.top_k(users @ items.T, n, seen))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_closer_than_float16_tells_apart(device, dtype):
    rng = np.random.default_rng(0)
    users = rng.normal(size=(6, 12)).astype(dtype)
    items = (rng.normal(size=12) + 1e-4 * rng.normal(size=(600, 12))).astype(dtype)
    users[0] = items[0]
    found = top_k(device, users, items, 10)
    check_close(found, users, items)
    check_equal(found, tuple(part[:, :10] for part in top_k(device, users, items, 150)))


def test_ties_go_to_the_lower_item(device):
    users, items = np.ones((3, 4), np.float32), np.ones((1000, 4), np.float32)
    seen = sp.csr_array(np.array([[0] * 1000, [1] * 7 + [0] * 993, [0, 1] * 500], dtype=np.int8))
    for n in (5, 130):
        check_equal(top_k(device, users, items, n, seen=seen), reference.top_k(users @ items.T, n, seen))


def test_zero_factors(device):
    """A user without factors gets the lowest unseen items, an item without factors scores 0."""
    users, items = real_factors(4, 7, 0), real_factors(200, 7, 1)
    users[[0, 2]] = 0
    items[::3] = 0
    seen = random_seen(4, 200, 2)
    candidates = np.arange(3, 180, 2)
    for n in (10, 100, 150):
        check_close(top_k(device, users, items, n, seen=seen), users, items, seen)
        check_equal(
            top_k(device, users[[0, 2]], items, n, seen=seen[[0, 2]], candidates=candidates),
            cpu.top_k(users[[0, 2]], items, n, seen=RowColumns.of(seen, np.array([0, 2])), candidates=candidates),
        )


@pytest.mark.parametrize("n", [2, 200])
def test_no_remaining_items_and_no_users(device, n):
    users, items = integer_factors(3, 4, 0), integer_factors(300, 4, 1)
    everything = np.ones((3, 300), np.int8)
    everything[1, [2, 250]] = 0
    ids, scores = top_k(device, users, items, n, seen=sp.csr_array(everything))
    assert (ids[[0, 2]] == -1).all()
    assert np.isneginf(scores[[0, 2]]).all()
    assert set(ids[1, :2]) == {2, 250}
    ids, scores = top_k(device, users, items, n, candidates=np.empty(0, dtype=np.int64))
    assert ids.shape == (3, n)
    assert (ids == -1).all()
    assert np.isneginf(scores).all()
    ids, scores = top_k(device, users[:0], items, n)
    assert ids.shape == scores.shape == (0, n)
    packed = PackedItems(device, items, np.empty(0, dtype=np.int64))
    ids = device.download(top_k_on_device(device, device.upload(users), packed, n)[0])
    assert (ids == -1).all()
    assert top_k_on_device(device, device.upload(users), packed, 0)[0].shape == (3, 0)


@pytest.mark.parametrize(
    ("dtype", "of_users", "of_items"),
    [
        (np.float64, 1.0, 1e-170),
        (np.float64, 1e-150, 1e-100),
        (np.float64, 1e150, 1e150),
        (np.float32, 1e18, 1e18),
        (np.float32, 1e-18, 1e-18),
        (np.float32, 1e30, 1e-30),
        (np.float32, 1e-30, 1e-12),  # scores are subnormal
    ],
)
def test_tiny_and_huge_factors(device, dtype, of_users, of_items):
    users = (real_factors(6, 4, 0, np.float64) * of_users).astype(dtype)
    items = (real_factors(600, 4, 1, np.float64) * of_items).astype(dtype)
    found = top_k(device, users, items, 10)
    check_equal(found, tuple(part[:, :10] for part in top_k(device, users, items, 150)))
    # scores in float64, rounded once: what underflows ties, as it does on the device
    exact = (users.astype(np.longdouble) @ items.astype(np.longdouble).T).astype(np.float64)
    best = np.sort(exact, axis=1)[:, ::-1][:, :10]
    # CuPy compiles with -ftz=true: what is below float32's normal numbers is zero on a GPU
    tiny = 20 * np.finfo(np.float32).tiny if dtype == np.float32 else 0
    np.testing.assert_allclose(found[1], best, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=tiny)


def test_norms_of_very_different_size(device):
    """Items whose factors are lost in float16, and one that outweighs all others, which its users have seen."""
    users, items = real_factors(4, 7, 0), real_factors(400, 7, 1)
    items[7] *= 1e12
    items[100:200] *= 1e-20
    seen = np.zeros((4, 400), np.int8)
    seen[1:, 7] = 1
    found = top_k(device, users, items, 10, seen=sp.csr_array(seen))
    check_equal(found, tuple(part[:, :10] for part in top_k(device, users, items, 150, seen=sp.csr_array(seen))))


def test_candidates(device):
    users, items = real_factors(5, 7, 0), real_factors(500, 7, 1)
    candidates = np.flatnonzero(np.random.default_rng(2).random(500) < 0.2)
    seen = random_seen(5, 500, 3, 0.5)
    packed = PackedItems(device, items)
    for n in (10, len(candidates) + 5):
        found = top_k(device, users, packed, n, candidates=candidates, seen=seen)
        others = np.ones((5, 500), np.int8)
        others[:, candidates] = 0
        everybody = sp.csr_array(np.maximum(others, seen.toarray()))
        check_close(found, users, items, everybody)
        check_equal(found, top_k(device, users, PackedItems(device, items, candidates), n, seen=seen))


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounds_hold_and_prune(device, dtype, in_bytes):
    """The largest score of each group lies within its slack, and most groups are pruned where norms fall."""
    rank, n = 12, 10
    users, items = real_factors(8, rank, 0, dtype), real_factors(4500, rank, 1, dtype, spread=1.5)
    users[3] = 0
    seen = random_seen(8, 4500, 2, 0.02)
    packed = PackedItems(device, items, in_bytes=in_bytes)
    rows = (device.upload(seen.indptr.astype(np.int64)), device.upload(seen.indices))
    bounds = topk._bound_groups(packed, device.upload(users), rows, n)
    words, stored, limits = map(device.download, bounds)
    assert limits[3] == 0
    assert limits.mean() < 0.8 * packed.n_groups
    order, groups = device.download(packed.ids), device.download(packed.groups)
    scores = np.where(seen.toarray(), -np.inf, users.astype(np.float64) @ items.astype(np.float64).T)[:, order]
    scores = np.pad(scores, ((0, 0), (0, packed.n_groups * 32 - 4500)), constant_values=-np.inf)
    scaling = stored[:, 3:].astype(int)  # 256 exponent + multiplier
    largest = scores.reshape(8, -1, 32).max(axis=2) * np.ldexp(scaling & 255, -(scaling >> 8)) * packed.scale
    slack = stored[:, 1:2] * groups[:, 0] + stored[:, 2:3] * groups[:, 1]
    there = np.arange(packed.n_groups) < limits[:, None]
    approximate = words.view(np.float32)
    np.testing.assert_array_equal(np.isneginf(approximate[there]), np.isneginf(largest[there]))
    finite = there & np.isfinite(largest)
    assert (np.abs(approximate - largest)[finite] <= slack[finite]).all()
    relative = np.median(slack[finite] / (stored[:, :1] * groups[:, 0])[finite])
    assert relative < (0.03 if in_bytes else 2e-3)  # or nothing would be left out
    found = top_k(device, users, packed, n, seen=seen)
    check_close(found, users, items, seen)
    check_equal(found, top_k(device, users, packed, n, seen=seen))


def test_batches_and_reruns_give_equal_bits(device, monkeypatch):
    users, items = real_factors(45, 7, 0), real_factors(200, 7, 1)
    seen = random_seen(45, 200, 2)
    packed = PackedItems(device, items)
    for n in (10, 140):
        whole = top_k(device, users, packed, n, seen=seen)
        check_equal(top_k(device, users, packed, n, seen=seen), whole)
        with monkeypatch.context() as patch:
            patch.setattr(topk, "LARGEST_BATCH", 17)
            check_equal(top_k(device, users, packed, n, seen=seen), whole)
            rows = device.upload(seen.indptr.astype(np.int64)), device.upload(seen.indices)
            found = top_k_on_device(device, device.upload(users), packed, n, *rows)
            check_equal(tuple(device.download(array) for array in found), whole)
        alone = top_k(device, users[41:42], packed, n, seen=seen[[41]])
        check_equal(alone, (whole[0][41:42], whole[1][41:42]))


def test_out_of_memory_halves_the_batch(device, monkeypatch):
    if device.spec.name != "emulated":
        pytest.skip("acted out on the emulated device")
    users, items = real_factors(40, 7, 0), real_factors(400, 7, 1)
    packed = PackedItems(device, items)
    for n in (10, 140):
        whole = top_k(device, users, packed, n)
        users_on_device = device.upload(users)
        results = users.shape[0] * n * 4
        monkeypatch.setattr(device, "limit", 5 * (packed.n_groups * 4 if n == 10 else 512 * 4))
        check_equal(top_k(device, users, packed, n), whole)
        monkeypatch.setattr(device, "limit", max(results, 4 * 512 * 4))  # the result fits, not all of the workspace
        launches = len(device.launches)
        found = top_k_on_device(device, users_on_device, packed, n)
        check_equal(tuple(device.download(array) for array in found), whole)
        assert len(device.launches) > launches
        monkeypatch.setattr(device, "limit", 16)
        with pytest.raises(DeviceMemoryError):
            top_k(device, users, packed, n)
        monkeypatch.setattr(device, "limit", None)


def test_items_on_the_device(device):
    users, items = real_factors(3, 7, 0), real_factors(100, 7, 1)
    packed = PackedItems(device, device.upload(items))
    check_equal(top_k(device, users, packed, 5), top_k(device, users, items, 5))
    # users of another dtype become the items'
    check_equal(top_k(device, users.astype(np.float64), packed, 5), top_k(device, users, items, 5))


def test_a_device_that_cannot_hold_the_tiles(device, monkeypatch):
    """Whole rows of scores serve every rank and every device."""
    users, items = real_factors(3, 7, 0), real_factors(100, 7, 1)
    expected = top_k(device, users, items, 5)
    monkeypatch.setattr(topk, "LARGEST_PADDED", 0)
    packed = PackedItems(device, items)
    assert packed.halves is None
    check_equal(top_k(device, users, packed, 5), expected)


def test_ranks_beyond_the_tiles(device):
    users, items = real_factors(3, 520, 0), real_factors(40, 520, 1)
    packed = PackedItems(device, items)
    assert packed.halves is None
    check_close(top_k(device, users, packed, 5), users, items)


def test_wrong_arguments(device):
    users, items = real_factors(3, 7, 0), real_factors(100, 7, 1)
    with pytest.raises(TypeError, match="items must be float32 or float64"):
        PackedItems(device, items.astype(np.int32))
    with pytest.raises(TypeError, match="items must be float32 or float64"):
        PackedItems(device, items[0])
    packed, on_device = PackedItems(device, items), device.upload(users)
    with pytest.raises(TypeError, match="users must be float32"):
        top_k_on_device(device, device.upload(users.astype(np.float64)), packed, 5)
    with pytest.raises(TypeError, match="users is a"):
        top_k_on_device(device, [users], packed, 5)
    pointer, ids = device.upload(np.zeros(4, np.int64)), device.upload(np.zeros(0, np.int32))
    with pytest.raises(TypeError, match="belong together"):
        top_k_on_device(device, on_device, packed, 5, pointer)
    with pytest.raises(TypeError, match="seen_ptr must be int64"):
        top_k_on_device(device, on_device, packed, 5, pointer[:3], ids)
    with pytest.raises(TypeError, match="seen_ids must be int32"):
        top_k_on_device(device, on_device, packed, 5, pointer, pointer)


def test_builds_name_kernels_of_the_file():
    text = (kernel_folder() / topk.SOURCE).read_text()
    builds = list(builds_of(topk, emulated.EmulatedDevice().spec))
    assert {file for file, _, _ in builds} == {topk.SOURCE}
    assert all(f"\n{name}(" in text or f" {name}(" in text for _, name, _ in builds)
    assert {constants["PADDED"] for _, name, constants in builds if name == "group_max"} >= {16, 64, 112, 128, 512}


@pytest.mark.parametrize("n", [10, 100])
@pytest.mark.parametrize(("rank", "in_bytes"), [(7, False), (64, True), (600, False)])
def test_programs_are_those_of_calls(device, monkeypatch, rank, in_bytes, n):
    monkeypatch.setattr(topk, "BYTE_GROUPS", 1 if in_bytes else topk.BYTE_GROUPS)
    used, kernel = [], device.kernel
    monkeypatch.setattr(device, "kernel", lambda *key: used.append(key) or kernel(*key))
    rng = np.random.default_rng(0)
    users, items = (rng.normal(size=(count, rank)).astype(np.float32) for count in (2, 500))
    seen = sp.csr_array((rng.random((2, 500)) < 0.1).astype(np.float32))
    topk.top_k(device, users, items, n, seen=seen)
    ahead = topk.programs(device.spec, rank, np.float32, 500, n)
    assert set(used) <= set(ahead) and len(set(ahead)) - len(set(used)) == in_bytes  # bytes or not depends on the items
