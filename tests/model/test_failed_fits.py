"""Fits that are interrupted, stopped, refused or fail: what the model is afterwards."""

from __future__ import annotations

import importlib
import signal

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.exceptions import NotFittedError

import hybridmf as hmf
from hybridmf.core.objective import State
from hybridmf.cpu.als import HalfSweep
from hybridmf.errors import MemoryBudgetError, NonFiniteError, NotPositiveDefiniteError, RatingsError
from support.messages import says
from support.ratings import planted
from support.served_models import assert_same, fitted, labelled, make, snapshot

# ---------------------------------------------------------------------------------------------------- cut-short fits


def half_states(kind: str, monkeypatch, **options) -> list[State]:
    """The state after each completed half sweep of an uninterrupted fit; the first is the initial one."""
    states, keep = [], hmf.als.RankALS.keep

    def recorded(self, side, solved):
        if not states:
            states.append(self.state)
        keep(self, side, solved)
        states.append(self.state)

    with monkeypatch.context() as patch:
        patch.setattr(hmf.als.RankALS, "keep", recorded)
        make(kind, **options).fit(planted())
    return states


def interrupt_at(monkeypatch, k: int, error: BaseException) -> None:
    """Let the k-th half sweep (from 1) fail in its middle: after the kernels ran, before anything is stored."""
    steps, count = HalfSweep.steps, [0]

    def failing(self, *args, **kwargs):
        count[0] += 1
        for launched in steps(self, *args, **kwargs):
            if launched is not None and count[0] == k:
                launched[0].matrix[:] = np.nan
                raise error
            yield launched

    monkeypatch.setattr(HalfSweep, "steps", failing)


@pytest.mark.parametrize("kind", ["explicit", "biases", "implicit"])
@pytest.mark.parametrize("k", [2, 3, 4, 5, 6])
def test_ctrl_c_keeps_the_last_completed_half_sweep(kind, k, monkeypatch, tmp_path):
    options = {"reorder": "both"} if kind == "biases" else {"solver": "cg"} if kind == "implicit" else {}
    states = half_states(kind, monkeypatch, **options)
    model = make(kind, **options)
    with monkeypatch.context() as patch:
        interrupt_at(patch, k, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            model.fit(planted())
    expected = states[k - 1]
    for side in ("user", "item"):
        np.testing.assert_array_equal(model._learned.state.side(side).matrix, expected.side(side).matrix)
    assert model.n_iter_ == (k - 1) // 2
    assert [record["iteration"] for record in model.history_] == list(range(1, (k - 1) // 2 + 1))
    model.save(tmp_path / "model")
    assert_same(snapshot(model), snapshot(hmf.load(tmp_path / "model")) | {"sizes": snapshot(model)["sizes"]})
    assert model.fit(planted()).n_iter_ == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), NonFiniteError("x")])
def test_a_first_fit_that_fails_at_once_leaves_an_unfitted_model(error, monkeypatch):
    model = make()
    interrupt_at(monkeypatch, 1, error)
    with pytest.raises(type(error)):
        model.fit(planted())
    with pytest.raises(NotFittedError):
        model.recommend(0)


@pytest.mark.parametrize("stop", ["callback", "signal"])
def test_ctrl_c_in_a_callback_keeps_the_iteration(stop):
    def callback(model, record):
        assert model.recommend([0, 1])[0].shape == (2, 10)  # usable as it is
        assert record is model.history_[-1]
        if record["iteration"] == 2:
            if stop == "signal":
                signal.raise_signal(signal.SIGINT)
            raise KeyboardInterrupt

    model = make(iterations=5)
    with pytest.raises(KeyboardInterrupt):
        model.fit(planted(), callback=callback)
    assert model.n_iter_ == len(model.history_) == 2
    np.testing.assert_array_equal(model.user_factors_, fitted(iterations=2).user_factors_)


def test_a_callback_stops_the_fit_by_returning_true():
    seen = []
    model = make(iterations=9).fit(planted(), callback=lambda m, r: seen.append((m, r)) or len(seen) == 3)
    assert model.n_iter_ == len(seen) == 3
    assert seen[0][0] is model
    assert make(iterations=3).fit(planted(), callback=lambda m, r: "yes").n_iter_ == 3  # only True counts


def test_a_callback_may_return_a_numpy_boolean():
    assert make(iterations=9).fit(planted(), callback=lambda m, r: np.float64(1) > 0).n_iter_ == 1


def not_positive_definite_users() -> sp.csr_array:
    """User 13 has one entry, items have many: without a penalty the item half sweep succeeds and the user one fails."""
    dense = np.random.default_rng(0).random((40, 20)) + 0.5
    dense[13, 1:] = 0
    return sp.csr_array(dense)


@pytest.mark.parametrize("options", [{}, {"assembly": "bals"}, {"reorder": "rows"}, {"assembly": "rank1"}])
def test_a_singular_row_is_named_and_earlier_factors_are_kept(options):
    model = make("explicit64", regularization=0.0, **options)
    with pytest.raises(NotPositiveDefiniteError, match=says("user 13 are not positive definite (leading minor",
                                                            "increase regularization (now 0)")) as caught:  # fmt: skip
        model.fit(not_positive_definite_users())
    assert (caught.value.side, caught.value.row) == ("user", 13)
    assert 1 <= caught.value.minor <= 4
    assert model.n_iter_ == 0
    assert model.history_ == []
    assert model.recommend(13)[0].shape == (10,)
    assert np.isfinite(model.item_factors_).all()


def test_overflow_in_a_later_sweep_keeps_the_earlier_one():
    calls = []
    model = make(iterations=4)
    with pytest.raises(ZeroDivisionError):
        model.fit(planted(), callback=lambda m, r: calls.append(1) or (1 / 0 if len(calls) == 2 else None))
    np.testing.assert_array_equal(model.user_factors_, fitted(iterations=2).user_factors_)


@pytest.mark.parametrize(
    ("change", "ratings", "kind"),
    [
        ({"factors": 0}, planted(), ValueError),
        ({"device": "cuda"}, planted(), RuntimeError),
        ({"random_state": -1}, planted(), ValueError),
        ({}, planted() * np.nan, RatingsError),
        ({}, sp.csr_array((5, 5)), RatingsError),
    ],
)
def test_a_refused_refit_leaves_the_old_model_intact(change, ratings, kind):
    model = make().fit(labelled())
    before = snapshot(model)
    with pytest.raises(kind):
        model.set_params(**change).fit(ratings)
    model.set_params(factors=4, device="cpu", random_state=0)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("shape", [(60, 40), (25, 70)])
def test_a_refit_that_fails_in_its_first_half_sweep_leaves_the_old_model_intact(shape, monkeypatch):
    model = make().fit(labelled())
    before = snapshot(model)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            model.fit(labelled(planted(*shape, seed=6), users=[f"other {k}" for k in range(shape[0])]))
    assert_same(before, snapshot(model))


def test_a_refit_replaces_everything():
    model = make().fit(labelled())
    model.recommend(0)
    model.similar_items(0)
    other = planted(25, 30, seed=6)
    assert_same(snapshot(make().fit(other)), snapshot(model.fit(other)))
    assert model.user_ids_ is None


def test_memory_is_checked_before_the_work(monkeypatch):
    model = fitted()
    before = snapshot(model)
    monkeypatch.setattr(importlib.import_module("hybridmf.core.system"), "available_memory", lambda: 1000)
    with pytest.raises(MemoryBudgetError, match=says("the fit needs about", "are free", "use fewer factors")) as caught:
        model.fit(planted())
    assert isinstance(caught.value, MemoryError)
    assert_same(before, snapshot(model))
    monkeypatch.setattr(
        importlib.import_module("hybridmf.core.system"), "available_memory", lambda: None
    )  # a system without this information
    assert model.fit(planted()).n_iter_ == 3


def test_validation_without_relevant_entries_is_refused_by_name_before_the_work():
    model = make("implicit")
    with pytest.raises(ValueError, match="validation"):
        model.fit(planted(), validation=-planted())
    assert not hasattr(model, "n_iter_")
