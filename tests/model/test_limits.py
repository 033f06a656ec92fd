"""Numbers that are allowed and too large all the same: answers beyond memory, weights beyond a type."""

from __future__ import annotations

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.core.validate import MAX_N
from hybridmf.errors import MemoryBudgetError, NonFiniteError
from hybridmf.metrics import PopularityRecommender
from hybridmf.native._als import NON_FINITE
from hybridmf.native.status import check_status
from hybridmf.plan.memory import check_answer
from support.ratings import planted

ALS = (hmf.ExplicitALS, hmf.ImplicitALS)


@pytest.fixture(scope="module")
def model():
    return hmf.ImplicitALS(factors=2, iterations=1, device="cpu", random_state=0).fit(planted())


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: 1 << 30)


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.usefixtures("little_memory")
def test_an_answer_beyond_memory_is_refused(model):
    popular = PopularityRecommender().fit(planted())
    for ask, n_items in (
        (lambda: model.recommend(0, N=MAX_N), 40),
        (lambda: model.recommend(0, N=MAX_N, items=[3, 5]), 2),
        (lambda: model.similar_items(0, N=MAX_N), 40),
        (lambda: model.similar_users(0, N=MAX_N), 60),
        (lambda: popular.recommend(0, N=MAX_N), 40),
    ):
        with pytest.raises(
            MemoryBudgetError, match=rf"N=2,147,483,647 results for each of 1 rows.*N={n_items} holds all"
        ):
            ask()
    with pytest.raises(MemoryBudgetError, match="for each of 60 rows takes"):
        model.recommend(np.arange(60), N=10**7)


@pytest.mark.usefixtures("little_memory")
def test_rows_beyond_memory_are_refused_though_n_is_not():
    check_answer(10**6, 100, 1000, 4)
    with pytest.raises(MemoryBudgetError, match="ask for fewer of them at a time"):
        check_answer(10**7, 100, 1000, 4)


def test_memory_is_checked_for_large_results_only(monkeypatch):
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: pytest.fail("read"))
    check_answer(1000, 1000, 50, 4)


def test_unknown_free_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr("hybridmf.core.validate.available_memory", lambda: None)
    check_answer(10**9, 100, 1000, 4)


@pytest.mark.parametrize("n", [40, 41, 1000])
def test_places_beyond_the_items_are_gaps(model, n):
    popular = PopularityRecommender().fit(planted())
    warm = np.flatnonzero(~model.cold_items_).tolist()
    for ids, scores in (
        model.recommend([0, 1], N=n, filter_already_liked_items=False),
        model.similar_items([0, 1], N=n),
        popular.recommend([0, 1], N=n, filter_already_liked_items=False),
    ):
        assert ids.shape == scores.shape == (2, n)
        shown = [sorted(set(row) - {-1}) for row in ids.tolist()]
        assert all(row in (warm, list(range(40))) for row in shown)
        assert np.all(ids[:, 40:] == -1)
        np.testing.assert_array_equal(scores == -np.inf, ids == -1)


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("cls", [*ALS, hmf.CCD])
def test_a_penalty_beyond_the_type_is_refused(cls):
    tiny = cls(factors=2, iterations=1, regularization=1e300, device="cpu")
    with pytest.raises(
        ValueError, match=r"regularization must be at most 3.40282e\+38, the largest float32, got 1e\+300"
    ):
        tiny.fit(planted())
    assert tiny.set_params(dtype="float64").fit(planted()).n_iter_ == 1


@pytest.mark.parametrize(
    ("cls", "name"),
    [(hmf.ImplicitALS, "alpha"), (hmf.ImplicitALS, "unobserved_weight"), (hmf.ExplicitALS, "bias_regularization")],
)
def test_other_weights_beyond_the_type_are_refused(cls, name):
    more = {"biases": True} if cls is hmf.ExplicitALS else {}
    with pytest.raises(ValueError, match=f"{name} must be at most"):
        cls(factors=2, device="cpu", **{name: 1e39}, **more).fit(planted())


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (hmf.ExplicitALS(regularization=1e38), r"scale the ratings down, lower regularization \(now 1e\+38\), or use"),
        (hmf.ExplicitALS(biases=True, bias_regularization=1e30), r"lower bias_regularization \(now 1e\+30\), or use"),
        (hmf.ImplicitALS(alpha=1e30), r"lower alpha \(now 1e\+30\), or use"),
        (hmf.ImplicitALS(unobserved_weight=1e30), r"lower unobserved_weight \(now 1e\+30\), or use"),
        (hmf.ImplicitALS(), "scale the ratings down, lower alpha, or use"),
        (hmf.ExplicitALS(), "scale the ratings down, or use"),
    ],
)
def test_the_advice_names_what_overflowed(model, advice):
    with pytest.raises(NonFiniteError, match=advice + " dtype='float64'"):
        check_status(np.array([0, NON_FINITE], dtype=np.int32), "user", model._objective())


def test_a_penalty_that_overflows_in_the_sums_is_named():
    with pytest.raises(NonFiniteError, match=r"lower regularization \(now 1e\+38\)"):
        hmf.ExplicitALS(factors=2, iterations=1, regularization=1e38, device="cpu").fit(planted())
