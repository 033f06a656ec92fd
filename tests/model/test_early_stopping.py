"""early_stopping=: when a fit stops, and which factors it leaves."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.model import loop
from hybridmf.model.early_stopping import Watch, check_early_stopping
from support.messages import says
from support.ratings import planted
from support.served_models import fitted, make

TRAIN, HELD = hmf.split(planted(), 0.3, random_state=1)


def overfitting(kind="explicit", **options):
    """A fit whose best iteration is one of the first."""
    loose = {"factors": 4, "regularization": 0.05, "iterations": 25}
    return make(kind, **(loose | options))


@pytest.mark.parametrize("metric", [None, "mae", "ndcg@5"])
def test_the_best_factors_are_restored(metric):
    rule = hmf.EarlyStopping(patience=2, metric=metric)
    model = overfitting().fit(TRAIN, validation=HELD, early_stopping=rule)
    name = metric or "rmse"
    values = [record[name] for record in model.history_]
    best = 1 + int(np.argmax(values) if "@" in name else np.argmin(values))
    assert model.n_iter_ == best and len(model.history_) == best + 2 < 25
    assert all("rmse" in record for record in model.history_)
    straight = overfitting(iterations=best).fit(TRAIN)
    np.testing.assert_array_equal(model.user_factors_, straight.user_factors_)
    np.testing.assert_array_equal(model.item_factors_, straight.item_factors_)
    assert hmf.evaluate(model, HELD, train=TRAIN, metrics=(name,))[name] == pytest.approx(values[best - 1])
    np.testing.assert_array_equal(model.recommend(3)[0], straight.recommend(3)[0])


@pytest.mark.parametrize("kind", ["implicit", "biases"])
def test_the_best_factors_are_restored_after_the_last_iteration_too(kind, caplog):
    model = overfitting(kind, iterations=8)
    with caplog.at_level(logging.INFO, logger="hybridmf"):
        model.fit(TRAIN, validation=HELD, early_stopping=50)
    metric = model._validation_metric()
    values = np.array([record[metric] for record in model.history_])
    best = 1 + int(values.argmax() if "@" in metric else values.argmin())
    assert len(values) == 8 and model.n_iter_ == best
    np.testing.assert_array_equal(model.user_factors_, overfitting(kind, iterations=best).fit(TRAIN).user_factors_)
    assert (f"factors of iteration {best} of 8: {metric}" in caplog.text) is (best < 8)


@pytest.mark.parametrize("backend", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_on_a_gpu(backend):
    model = overfitting("implicit", iterations=6, factors=4, device="cuda")
    model.fit(TRAIN, validation=HELD, early_stopping={"patience": 1})
    straight = overfitting("implicit", iterations=model.n_iter_, factors=4, device="cuda").fit(TRAIN)
    assert len(model.history_) == model.n_iter_ + 1
    np.testing.assert_array_equal(model.user_factors_, straight.user_factors_)


@pytest.mark.parametrize("cls", [hmf.SGD, hmf.CCD])
def test_sgd_and_ccd_restore_the_best_factors(cls):
    options = {"factors": 8, "regularization": 1e-4, "random_state": 0, "device": "cpu", "num_threads": 1}
    model = cls(iterations=40, **options).fit(TRAIN, validation=HELD, early_stopping=2)
    straight = cls(iterations=model.n_iter_, **options).fit(TRAIN)
    np.testing.assert_array_equal(model.item_factors_, straight.item_factors_)
    assert len(model.history_) in (40, model.n_iter_ + 2)


def test_improvements_that_are_too_small_do_not_count():
    learned = fitted()._learned
    watch = Watch(hmf.EarlyStopping(patience=2, min_delta=0.1), "ndcg@10")
    stops = [watch.see(k + 1, value, learned) for k, value in enumerate([0.2, 0.25, 0.31, 0.40, 0.35])]
    assert stops == [False, False, False, False, True] and watch.iteration == 3
    down = Watch(hmf.EarlyStopping(patience=1), "rmse")
    assert [down.see(k + 1, value, learned) for k, value in enumerate([1.0, 0.9, 0.9])] == [False, False, True]
    assert down.iteration == 2


def test_checkpoints_hold_the_last_iteration(tmp_path, monkeypatch):
    values = iter([3.0, 2.0, 2.5, 2.5])
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_measure", lambda *_: {"rmse": next(values)})
        model = overfitting(iterations=4).fit(TRAIN, validation=HELD, early_stopping=50, checkpoint=tmp_path / "run")
    assert model.n_iter_ == 2
    np.testing.assert_array_equal(model.user_factors_, overfitting(iterations=2).fit(TRAIN).user_factors_)
    more = overfitting(iterations=5).fit(TRAIN, resume_from=tmp_path / "run")
    np.testing.assert_array_equal(more.user_factors_, overfitting(iterations=5).fit(TRAIN).user_factors_)
    model.save(tmp_path / "model")
    assert hmf.load(tmp_path / "model").n_iter_ == 2


def test_a_callback_may_stop_earlier():
    stop = {"callback": lambda _, record: record["iteration"] == 2}
    model = overfitting().fit(TRAIN, validation=HELD, early_stopping=9, **stop)
    assert len(model.history_) == 2


def test_a_callback_sees_every_iteration_that_was_run():
    """The one after which early stopping ends the fit, too, with its factors."""
    seen = []
    model = overfitting().fit(
        TRAIN,
        validation=HELD,
        early_stopping=2,
        callback=lambda model, record: seen.append((record["iteration"], model.n_iter_)),
    )
    assert seen == [(record["iteration"],) * 2 for record in model.history_]
    assert model.n_iter_ < len(seen) < model.iterations


@pytest.mark.parametrize(
    ("given", "kind", "parts"),
    [
        (0, ValueError, ("early_stopping must satisfy early_stopping >= 1",)),
        ("ndcg@10", TypeError, ("early_stopping must be an integer",)),
        ({"patience": 0}, ValueError, ("patience must satisfy patience >= 1",)),
        ({"metric": "auc"}, ValueError, ("metric must be rmse, mae, ndcg@k",)),
        ({"min_delta": -1.0}, ValueError, ("min_delta must be >= 0",)),
        ({"rounds": 3}, TypeError, ("rounds",)),
    ],
)
def test_rules_that_cannot_be_used(given, kind, parts):
    with pytest.raises(kind, match=says(*parts)):
        overfitting().fit(TRAIN, validation=HELD, early_stopping=given)


def test_a_validation_set_is_needed():
    with pytest.raises(ValueError, match="early_stopping measures held-out entries: pass them as validation"):
        overfitting().fit(TRAIN, early_stopping=True)
    assert check_early_stopping(False) is None is check_early_stopping(None)
    assert check_early_stopping(True) == hmf.EarlyStopping(patience=3)
