"""One loop for every kind of fit: validation, callbacks, progress and timings are those of a fit in one process."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf import scale
from hybridmf.errors import CommunicatorError, RatingsError, UnknownLabelError
from hybridmf.model import fit, ranked, stopwatch, training
from hybridmf.model.checkpoint import Writer
from hybridmf.model.loop import FitLoop
from hybridmf.model.stopwatch import PARTS, Stopwatch
from hybridmf.ranks.shares import WholeRatings
from hybridmf.ranks.su_als import RankALS
from hybridmf.ranks.transport.communicator import Single
from hybridmf.ranks.transport.threads import run_ranks
from support.marks import exhaustive
from support.ratings import planted

SMALL = {"factors": 3, "iterations": 4, "random_state": 0, "device": "cpu", "num_threads": 1}
KINDS = {
    "explicit": lambda **o: hmf.ExplicitALS(**SMALL | {"biases": False} | o),
    "biases": lambda **o: hmf.ExplicitALS(**SMALL | o),
    "implicit": lambda **o: hmf.ImplicitALS(**SMALL | {"alpha": 3.0} | o),
}
USERS, ITEMS = [f"u{k}" for k in range(60)], [f"i{k}" for k in range(40)]
TRAIN, TEST = hmf.split(hmf.Ratings.from_matrix(planted(), user_ids=USERS, item_ids=ITEMS), random_state=0)


def together(size: int, make: Any, ratings: Any = TRAIN, **options: Any) -> Any:
    """The model of the first rank."""
    models = run_ranks(size, lambda ranks: hmf.scale.fit(make(), ratings, ranks, **options), timeout=30)
    assert all(model is None for model in models[1:])
    return models[0]


def measured(model: Any) -> list[dict[str, float]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in model.history_]


@pytest.mark.parametrize("observed", [False, True])
def test_the_model_is_updated_where_it_is_needed(observed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work between half sweeps leaves a GPU idle."""
    updates, update = [], FitLoop._update_model
    monkeypatch.setattr(
        FitLoop, "_update_model", lambda loop, **how: (updates.append(loop.completed), update(loop, **how))[1]
    )
    KINDS["explicit"]().fit(TRAIN, callback=(lambda model, record: None) if observed else None)
    assert updates == ([1, 2, 3, 4] if observed else [4])


@pytest.mark.parametrize("completed", [0, 1, 2, 3])
def test_a_failure_leaves_the_last_half_sweep(completed: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors are in the model; a checkpoint has those of the last iteration."""
    halves: list[str] = []
    alone = RankALS.keep

    def keep(solver: RankALS, side: Any, solved: Any) -> None:
        if len(halves) == completed:
            raise MemoryError("no room")
        alone(solver, side, solved)
        halves.append(side)
        states.append(solver.state)

    states: list[Any] = []
    monkeypatch.setattr(RankALS, "keep", keep)
    model = KINDS["explicit"]()
    with pytest.raises(MemoryError, match="no room"):
        model.fit(TRAIN, checkpoint=tmp_path)
    if not completed:
        assert not hasattr(model, "user_factors_") and not list(tmp_path.glob("*.safetensors"))
        return
    np.testing.assert_array_equal(model.item_factors_, states[-1].item.matrix)
    np.testing.assert_array_equal(model.user_factors_, states[-1].user.matrix)
    assert model.n_iter_ == len(model.history_) == completed // 2


# -------------------------------------------------------------------------------------------------------- observers


@pytest.mark.parametrize(
    ("kind", "size"),
    [*((kind, 3) for kind in KINDS), ("explicit", 1), exhaustive("biases", 1), exhaustive("implicit", 1)],
)
def test_ranks_measure_what_one_process_measures(kind, size, tmp_path):
    expected = measured(KINDS[kind]().fit(TRAIN, validation=TEST))
    metric = "ndcg@10" if kind == "implicit" else "rmse"
    assert [list(record) for record in expected] == [["iteration", "objective", metric]] * 4
    store = hmf.convert(TRAIN, tmp_path / "store", slab_bytes=1500)
    for ratings in (TRAIN, store):
        found = measured(together(size, KINDS[kind], ratings, validation=TEST))
        assert [list(record) for record in found] == [list(record) for record in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_several_devices_measure_what_one_measures():
    expected = measured(KINDS["implicit"]().fit(TRAIN, validation=TEST))
    found = measured(KINDS["implicit"](device=["cpu", "cpu"]).fit(TRAIN, validation=TEST))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("kind", ["explicit", "implicit"])
@pytest.mark.parametrize("size", [1, 2])
def test_validation_of_some_users_after_some_iterations(kind, size):
    metric = {"explicit": "rmse", "implicit": "ndcg@10"}[kind]
    options = {"validation": TEST, "validation_users": 12, "validate_every": 2}

    def fitted(**observers: Any) -> Any:
        if size == 1:
            return KINDS[kind](iterations=5).fit(TRAIN, **observers)
        return together(size, lambda: KINDS[kind](iterations=5), **observers)

    model = fitted(**options)
    assert [record["iteration"] for record in model.history_ if metric in record] == [2, 4, 5]
    assert all(("objective" in record) == (metric in record) for record in model.history_)
    whole = fitted(validation=TEST)
    assert model.history_[-1][metric] != whole.history_[-1][metric]
    found = hmf.evaluate(model, TEST, train=TRAIN, metrics=metric)
    users = found.users[found.per_user[metric] == found.per_user[metric]]
    drawn = np.sort(np.random.default_rng(0).permutation(users)[:12])
    sampled = hmf.evaluate(model, TEST, train=TRAIN, metrics=metric, users=drawn)[metric]
    assert model.history_[-1][metric] == pytest.approx(sampled, rel=1e-6)
    np.testing.assert_array_equal(model.user_factors_, whole.user_factors_)


def test_early_stopping_sees_the_iterations_that_are_evaluated():
    model = KINDS["implicit"](iterations=30, factors=16).fit(TRAIN, validation=TEST, validate_every=3, early_stopping=4)
    values = {record["iteration"]: record["ndcg@10"] for record in model.history_ if "ndcg@10" in record}
    assert set(values) == set(range(3, len(model.history_) + 1, 3)) and len(model.history_) < 30
    assert model.n_iter_ == max(values, key=values.__getitem__)
    assert len(model.history_) >= model.n_iter_ + 4


@pytest.mark.parametrize("option", [{"validation_users": 5}, {"validate_every": 2}])
def test_options_of_a_validation_need_one(option):
    with pytest.raises(ValueError, match="belong to held-out entries: pass them as validation"):
        KINDS["explicit"]().fit(TRAIN, **option)
    with pytest.raises((TypeError, ValueError), match=next(iter(option))):
        KINDS["explicit"]().fit(TRAIN, validation=TEST, **{next(iter(option)): 0})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_callback_stops_all_ranks(size):
    seen = []

    def stop(model, record):
        seen.append((model.n_iter_, record["iteration"], len(model.history_), model.user_factors.shape))
        return np.True_ if record["iteration"] == 2 else None

    model = together(size, KINDS["explicit"], callback=stop)
    assert seen == [(1, 1, 1, (60, 3)), (2, 2, 2, (60, 3))]  # once an iteration, on the first rank
    assert model.n_iter_ == 2
    np.testing.assert_array_equal(model.user_factors, KINDS["explicit"](iterations=2).fit(TRAIN).user_factors)


def test_only_the_first_rank_is_observed():
    """The observers of the other ranks do not count: no rank waits for an answer that never comes."""
    called = []

    def run(ranks):
        own = {"callback": lambda *_: called.append(ranks.rank), "validation": TEST} if ranks.rank else {}
        return hmf.scale.fit(KINDS["implicit"](), TRAIN, ranks, **own)

    model = run_ranks(2, run, timeout=30)[0]
    assert not called and set(model.history_[-1]) == {"iteration", "seconds"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_of_a_callback_stops_all_ranks(error):
    causes = []

    def fail(model, record):
        raise error("enough")

    def run(ranks):
        try:
            hmf.scale.fit(KINDS["explicit"](), TRAIN, ranks, callback=fail)
        except BaseException as raised:
            causes.append((ranks.rank, type(raised), str(raised)))
            raise

    with pytest.raises(error, match="enough"):
        run_ranks(2, run, timeout=30)
    assert sorted(causes)[0][:2] == (0, error)
    assert sorted(causes)[1][1] is CommunicatorError and "enough" in sorted(causes)[1][2]


def test_ranks_refuse_observers_as_a_fit_does():
    with pytest.raises(TypeError, match="callback must be callable, got int"):
        together(2, KINDS["explicit"], callback=3)
    with pytest.raises(TypeError, match="show_progress"):
        together(1, KINDS["explicit"], show_progress=3)
    with pytest.raises(TypeError, match="track_objective"):
        together(1, KINDS["explicit"], track_objective=3)
    with pytest.raises(RatingsError, match="validation has no positive entry"):
        together(2, KINDS["implicit"], validation=-TRAIN.user_items)


def test_ranks_match_the_validation_set_by_label():
    strangers = hmf.Ratings.from_coo(["u1", "nobody"], ["i2", "i3"], [5.0, 1.0])
    with pytest.raises(UnknownLabelError, match="nobody"):
        together(2, KINDS["explicit"], validation=strangers)
    expected = measured(KINDS["explicit"]().fit(TRAIN, validation=strangers, unknown="drop"))
    found = measured(together(2, KINDS["explicit"], validation=strangers, unknown="drop"))
    assert [record["rmse"] for record in found] == pytest.approx([record["rmse"] for record in expected])


def test_ranks_show_one_bar_or_log(monkeypatch, caplog):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    together(2, KINDS["explicit"], show_progress=True)
    assert sys.stderr.getvalue().count("100%") == 1 and "objective=" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, logger="hybridmf"):
        together(2, KINDS["explicit"], show_progress=True)
    assert sum(message.startswith("iteration 4 of 4: objective ") for message in caplog.messages) == 1


def test_ranks_write_checkpoints_by_the_schedule(tmp_path, monkeypatch):
    """Where the model has the factors of each iteration anyway, and where only the schedule asks for them."""
    take, taken = Writer._take, []
    monkeypatch.setattr(Writer, "_take", lambda self, *given: taken.append(given[1].n_iter) or take(self, *given))
    for name, own in (("observed", {"validation": TEST}), ("alone", {})):
        taken.clear()
        together(2, KINDS["explicit"], checkpoint=hmf.Checkpoint(tmp_path / name, every=2), **own)
        assert taken == [2, 4]
        resumed = KINDS["explicit"](iterations=5).fit(TRAIN, resume_from=tmp_path / name)
        np.testing.assert_array_equal(resumed.user_factors, KINDS["explicit"](iterations=5).fit(TRAIN).user_factors)


def test_ranks_that_have_nothing_left_to_do_return_the_checkpoint(tmp_path):
    expected = together(2, KINDS["explicit"], checkpoint=tmp_path)
    model = together(2, KINDS["explicit"], resume_from=tmp_path, validation=TEST)
    np.testing.assert_array_equal(model.user_factors, expected.user_factors)
    assert model.n_iter_ == 4 and model.timings_["iterations"] == 0


# ---------------------------------------------------------------------------------------------------------- timings


class Clock:
    """A fake clock that advances only in the named steps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.patch = 0.0, patch
        patch.setattr(stopwatch, "clock", lambda: self.now)

    def takes(self, owner: Any, name: str, seconds: float) -> None:
        original = getattr(owner, name)

        def slowly(*arguments: Any, **options: Any) -> Any:
            self.now += seconds
            return original(*arguments, **options)

        self.patch.setattr(owner, name, slowly)


def test_every_second_of_a_fit_belongs_to_a_part(monkeypatch, tmp_path):
    clock = Clock(monkeypatch)
    for owner, name, seconds in (
        (fit, "check_labels", 1.0),
        (training, "check_nonempty", 2.0),
        (training, "plan_for", 10.0),
        (training.fingerprint, "fingerprint", 4.0),
        (training, "transposed", 100.0),
        (fit, "log_empty_rows", 200.0),
        (RankALS, "__init__", 400.0),
        (RankALS, "solve", 1e3),
        (RankALS, "objective_value", 1e4),
        (Writer, "offer", 2e4),
        (Writer, "finish", 1e6),
        (RankALS, "close", 2e6),
        (fit.dispatch, "remember", 4e6),
    ):
        clock.takes(owner, name, seconds)

    def callback(model: Any, record: Any) -> None:
        clock.now += 1e5
        assert record["seconds"] == 2e3

    model = KINDS["explicit"]().fit(TRAIN, callback=callback, checkpoint=tmp_path)
    assert model.timings_ == {
        "check": 7.0, "plan": 10.0, "convert": 100.0, "set up": 600.0,
        "iterations": 8e3, "observe": 5.2e5, "finish": 7e6,
    }  # fmt: skip
    assert list(model.timings_) == list(PARTS) and sum(model.timings_.values()) == clock.now


def test_every_second_of_a_rank_belongs_to_a_part(monkeypatch):
    clock = Clock(monkeypatch)
    for owner, name, seconds in (
        (scale, "_device", 1.0),
        (scale, "_source", 2.0),
        (WholeRatings, "degrees", 4.0),
        (ranked, "make_plan", 10.0),
        (ranked.RankedRatings, "cut", 100.0),
        (hmf.ExplicitALS, "_initial_state", 200.0),
        (RankALS, "__init__", 400.0),
        (RankALS, "solve", 1e3),
        (RankALS, "objective_value", 1e4),
        (RankALS, "close", 1e6),
    ):
        clock.takes(owner, name, seconds)
    model = hmf.scale.fit(KINDS["explicit"](), TRAIN, Single(), track_objective=True)
    assert model.timings_ == {
        "check": 7.0, "plan": 10.0, "convert": 100.0, "set up": 600.0,
        "iterations": 8e3, "observe": 4e4, "finish": 1e6,
    }  # fmt: skip
    assert sum(model.timings_.values()) == clock.now


def test_parts_that_another_process_measured_are_moved(monkeypatch):
    clock = Clock(monkeypatch)
    watch, there = Stopwatch(), Stopwatch()
    clock.now = 3.0
    assert (watch.lap("check"), there.lap("plan")) == (3.0, 3.0)
    clock.now = 10.0
    watch.lap("finish")
    watch.split("finish", there.seconds)
    assert (watch.seconds["check"], watch.seconds["plan"], watch.seconds["finish"]) == (3.0, 3.0, 4.0)
    assert sum(watch.seconds.values()) == 10.0


def test_all_fits_have_the_same_parts(tmp_path):
    store = hmf.convert(sp.csr_array(planted()), tmp_path / "store", slab_bytes=1500)
    for model in (
        KINDS["implicit"]().fit(store),
        KINDS["explicit"](device=["cpu", "cpu"]).fit(TRAIN),
        hmf.SGD(**SMALL).fit(TRAIN),
        hmf.CCD(**SMALL).fit(TRAIN),
        together(2, KINDS["biases"]),
    ):
        assert list(model.timings_) == list(PARTS) and min(model.timings_.values()) >= 0
        seconds = sum(record["seconds"] for record in model.history_)
        assert model.timings_["iterations"] == pytest.approx(seconds)
