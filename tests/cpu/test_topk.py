"""Top-K against a full sort of the dense scores."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridmf.core.sparse import RowColumns
from hybridmf.cpu.topk import PackedItems, top_k
from hybridmf.native import _als, _topk
from hybridmf.plan.memory import WORK_OF_A_THREAD, threads_for
from support import reference


def integer_factors(rows: int, rank: int, seed: int, dtype=np.float32) -> np.ndarray:
    """Small integers: scores are exact in every order of summation, and ties are frequent."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, rank)).astype(dtype)


@settings(max_examples=80)
@given(
    st.integers(1, 70), st.integers(1, 600), st.integers(1, 9), st.integers(1, 40), st.integers(0, 10**6),
    st.booleans(), st.booleans(), st.sampled_from([1, 2, 3]), st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_top_k_is_the_stable_sort(n_users, n_items, rank, n, seed, filtered, subset, threads, dtype):
    rng = np.random.default_rng(seed)
    users, items = integer_factors(n_users, rank, seed, dtype), integer_factors(n_items, rank, seed + 1, dtype)
    seen = sp.csr_array((rng.random((n_users, n_items)) < 0.3).astype(np.int8)) if filtered else None
    candidates = np.flatnonzero(rng.random(n_items) < 0.5) if subset else None
    excluded = None if seen is None else RowColumns.of(seen)
    ids, scores = top_k(users, items, n, seen=excluded, candidates=candidates, num_threads=threads)
    left_out = np.zeros((n_users, n_items)) if seen is None else seen.toarray()
    if candidates is not None:
        left_out[:, np.setdiff1d(np.arange(n_items), candidates)] = 1
    expected_ids, expected_scores = reference.top_k(users @ items.T, n, sp.coo_array(left_out))
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)
    assert ids.dtype == np.int32
    assert scores.dtype == dtype


@pytest.mark.parametrize("n_items", [1, 31, 32, 33, 255, 256, 257, 513])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 255, 256, 257, 600])
def test_block_and_panel_edges(n_items, n):
    users, items = integer_factors(49, 5, 0), integer_factors(n_items, 5, 1)
    ids, scores = top_k(users, items, n, num_threads=2)
    expected_ids, expected_scores = reference.top_k(users @ items.T, n)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)


def test_scores_do_not_depend_on_batch_thread_or_candidates():
    """Real-valued factors: the same (user, item) has the same bits wherever it is computed."""
    rng = np.random.default_rng(0)
    users = rng.normal(size=(101, 33)).astype(np.float32)
    items = rng.normal(size=(700, 33)).astype(np.float32)
    ids, scores = top_k(users, items, 20, num_threads=2)
    for user in (0, 13, 47, 48, 100):
        alone = top_k(users[user : user + 1], items, 20, num_threads=1)
        np.testing.assert_array_equal(alone[0][0], ids[user])
        np.testing.assert_array_equal(alone[1][0], scores[user])
        chosen = top_k(users[user : user + 1], items, 20, candidates=np.sort(ids[user]), num_threads=3)
        np.testing.assert_array_equal(chosen[1][0], scores[user])
    np.testing.assert_allclose(scores, np.take_along_axis(users @ items.T, ids, axis=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon", "portable"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_instruction_set(name, dtype, monkeypatch):
    if not _als.can_run(name):
        pytest.skip(f"this processor cannot run {name} kernels")
    monkeypatch.setenv("HYBRIDMF_ISA", name)
    for rank in (1, 2, 15, 64, 65):
        users, items = integer_factors(50, rank, 0, dtype), integer_factors(300, rank, 1, dtype)
        ids, scores = top_k(users, items, 9, num_threads=2)
        expected_ids, expected_scores = reference.top_k(users @ items.T, 9)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_array_equal(scores, expected_scores)


@pytest.mark.parametrize("scale", [1e-170, 1e-150, 1e150])
def test_tiny_and_huge_factors_are_not_pruned(scale):
    rng = np.random.default_rng(0)
    users, items = rng.normal(size=(20, 4)), rng.normal(size=(600, 4)) * scale
    ids, _ = top_k(users, items, 10)
    np.testing.assert_array_equal(ids, reference.top_k(users @ items.T, 10)[0])


def test_no_remaining_items_and_no_users():
    users, items = integer_factors(3, 4, 0), integer_factors(5, 4, 1)
    ids, scores = top_k(users, items, 2, seen=RowColumns.of(sp.csr_array(np.ones((3, 5), np.int8))))
    assert (ids == -1).all()
    assert np.isneginf(scores).all()
    ids, scores = top_k(users, items, 2, candidates=np.empty(0, dtype=np.int64))
    assert (ids == -1).all()
    ids, scores = top_k(users[:0], items, 2)
    assert ids.shape == scores.shape == (0, 2)


def test_seen_items_of_some_rows_of_a_matrix():
    users, items = integer_factors(30, 6, 0), integer_factors(300, 6, 1)
    seen = sp.csr_array(np.random.default_rng(2).random((30, 300)) < 0.2, dtype=np.int8)
    rows = np.array([7, 29, 7, 0])
    found = top_k(users[rows], items, 20, seen=RowColumns.of(seen, rows))
    expected = reference.top_k(users[rows] @ items.T, 20, sp.coo_array(seen[rows]))
    np.testing.assert_array_equal(found[0], expected[0])


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("work", "parts", "wanted", "threads"),
    [
        (0, 0, 8, 1),
        (WORK_OF_A_THREAD - 1, 1000, 8, 1),
        (3 * WORK_OF_A_THREAD, 1000, 8, 3),
        (1e15, 1000, 8, 8),
        (1e15, 5, 8, 5),
        (1e15, 1, 8, 1),
        (1e15, 1000, 1, 1),
    ],
)
def test_threads_follow_the_work(work, parts, wanted, threads):
    assert threads_for(work, parts, wanted) == threads


def test_few_users_are_served_by_the_calling_thread(monkeypatch):
    asked, kernel = [], _topk.top_k
    monkeypatch.setattr(_topk, "top_k", lambda *given: (asked.append(given[-1]), kernel(*given))[1])
    items = PackedItems(integer_factors(5000, 64, 1), None, 8)
    for n_users in (1, 2, 12, 1000):
        top_k(integer_factors(n_users, 64, 0), items, 3, num_threads=8)
    assert asked == [1, 1, 1, 8]
