"""Ties, zeros and dislikes mean the same on a GPU as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from support.devices import serve_cuda


@pytest.fixture
def gpu(device, monkeypatch):
    """The device as "cuda", which serves every request, also small ones."""
    monkeypatch.setattr("hybridmf.model.engine.GPU_SCORES", 0)
    return serve_cuda(device, monkeypatch)


def both(make, ask):
    """The answers of models fitted on the CPU and on the GPU."""
    return [ask(make(device=name, random_state=0, iterations=2, regularization=0.1)) for name in ("cpu", "cuda")]


def counts(seed: int = 0) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    return sp.csr_array((rng.random((12, 9)) < 0.5) * rng.integers(1, 6, (12, 9)).astype(float))


@pytest.mark.usefixtures("gpu")
def test_equal_items_are_ranked_by_position_and_the_query_first():
    items = np.random.default_rng(1).normal(size=(9, 4))
    items[3:8] = items[3]

    def make(**options):
        return hmf.ExplicitALS(4, biases=False, init=(None, items), **options).fit(counts(), freeze="item")

    users = np.arange(12)
    np.testing.assert_array_equal(*both(make, lambda m: m.recommend(users, filter_already_liked_items=False, N=9)[0]))
    first, other = both(make, lambda m: m.similar_items(6, 3)[0].tolist())
    assert first == other == [6, 3, 4]


@pytest.mark.usefixtures("gpu")
def test_a_stored_zero_is_unseen_and_a_rated_zero_is_not_cold():
    rows = counts()
    rows.data[::4] = 0
    explicit = sp.csr_array((np.array([0.0, 0, 3]), np.array([0, 1, 2]), np.array([0, 2, 3])), shape=(2, 3))
    new = sp.csr_array((np.array([0.0, 1]), np.array([1, 2]), np.array([0, 2])), shape=(1, 9))
    fits = {"implicit": lambda **o: hmf.ImplicitALS(4, alpha=2.0, **o).fit(rows)}
    fits["explicit"] = lambda **o: hmf.ExplicitALS(3, biases=False, **o).fit(explicit)
    for ours, theirs in (
        both(fits["implicit"], lambda m: m.recommend(np.arange(12), N=9)),
        both(fits["implicit"], lambda m: m.recommend_new(new, N=9)),
        both(fits["explicit"], lambda m: m.recommend([0, 1], N=3, filter_already_liked_items=False)),
    ):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-3, atol=1e-4)
    seen = both(fits["implicit"], lambda m: m.recommend_new(new, N=9)[0])[1]
    assert 1 in seen and 2 not in seen


@pytest.mark.usefixtures("gpu")
def test_dislikes_do_not_make_an_item_popular():
    rows = counts()
    rows.data[rows.indices == 0] *= -1
    answers = both(
        lambda **o: hmf.ImplicitALS(4, alpha=2.0, **o).fit(rows), lambda m: m.recommend_new(sp.csr_array((1, 9)), N=9)
    )
    np.testing.assert_array_equal(*(ids for ids, _ in answers))
    assert 0 not in answers[1][0].ravel()[:8]
