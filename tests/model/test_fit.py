"""One Fit: what a fit in one process does, ranks do, with all ratings on each, with a store, and with some entries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmf as hmf
from hybridmf.errors import DeviceLostError
from hybridmf.model import fit as one_fit
from hybridmf.ranks.su_als import RankALS
from hybridmf.ranks.transport.threads import run_ranks
from support.ranks import entries, fit_rank
from support.ratings import planted
from support.served_models import make

TRAIN, HELD = hmf.split(planted(), 0.3, random_state=1)
LOOSE = {"factors": 4, "regularization": 0.05, "iterations": 25}
"""The best iteration is one of the first."""


class Way:
    """Fits a model to `TRAIN`, or to other ratings; returns it as the first rank has it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.alone, self.folder = name, name == "one process", folder

    def __call__(self, build: Callable[[], Any], ratings: Any = TRAIN, **options: Any) -> Any:
        if self.alone:
            return build().fit(ratings, **options)
        if self.name == "entries":
            return run_ranks(2, lambda c: fit_rank(build(), entries(ratings, c.rank, 2), c, **options), timeout=30)[0]
        given = hmf.convert(ratings, self.folder / "store", slab_bytes=1500) if self.name == "store" else ratings
        return run_ranks(2, lambda c: hmf.scale.fit(build(), given, c, **options), timeout=30)[0]


@pytest.fixture(params=["one process", "whole", "store", "entries"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    return Way(request.param, tmp_path)


@pytest.mark.parametrize(("kind", "metric"), [("explicit", None), ("biases", "mae"), ("implicit", "ndcg@5")])
def test_early_stopping_restores_the_best_iteration(way: Way, kind: str, metric: str | None) -> None:
    rule = hmf.EarlyStopping(patience=2, metric=metric)
    model = way(lambda: make(kind, **LOOSE), validation=HELD, early_stopping=rule)
    values = [record[metric or "rmse"] for record in model.history_]
    best = 1 + int(np.argmax(values) if metric == "ndcg@5" else np.argmin(values))
    assert model.n_iter_ == best and len(model.history_) == best + 2 < 25
    straight = make(kind, **LOOSE | {"iterations": best}).fit(TRAIN)
    np.testing.assert_allclose(model.user_factors, straight.user_factors, rtol=1e-4, atol=1e-5)


def test_early_stopping_needs_held_out_entries(way: Way) -> None:
    with pytest.raises(ValueError, match="early_stopping measures held-out entries: pass them as validation"):
        way(lambda: make("explicit"), early_stopping=2)


@pytest.mark.parametrize("kind", ["explicit", "implicit"])
def test_a_collapse_is_warned_of_once(way: Way, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    way(lambda: make(kind, regularization=1e5, iterations=1))
    assert sum("the factors have shrunk to" in message for message in caplog.messages) == 1


def test_equal_ratings_are_warned_of(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    ones = TRAIN.copy()
    ones.data[:] = 1
    way(lambda: make("explicit", iterations=1), ones)
    assert sum(f"all {ones.nnz} ratings are 1, so there is nothing" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("kind", ["explicit", "implicit"])
def test_held_out_entries_of_the_training_are_warned_of(way: Way, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    way(lambda: make(kind, iterations=1), validation=planted())
    found = sum("entries are training entries" in message for message in caplog.messages)
    assert found == (0 if way.name == "store" and kind == "explicit" else 1)  # a store is not read again for RMSE


def test_a_model_below_popularity_is_warned_of(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    """Its factors are noise."""
    way(lambda: make("implicit", regularization=1e3, iterations=1), validation=HELD)
    assert sum("recommending the most popular items reaches" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("kind", ["biases", "implicit"])
def test_the_model_has_what_recommend_and_explain_need(way: Way, kind: str) -> None:
    alone, model = make(kind).fit(TRAIN), way(lambda: make(kind))
    if way.name == "entries":
        with pytest.raises(ValueError, match="user_items"):
            model.recommend([3, 7])
        return
    for ours, theirs in zip(model.recommend([3, 7]), alone.recommend([3, 7]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    if way.name == "store":
        with pytest.raises(ValueError, match="it was fitted on a store"):
            model.explain(3, 7)
        return
    ours, theirs = model.explain(3, 7), alone.explain(3, 7)
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    np.testing.assert_allclose(ours.contributions, theirs.contributions, rtol=1e-3, atol=1e-5)
    assert ours.score == pytest.approx(theirs.score, rel=1e-4)


def test_the_plan_is_remembered(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each rank, whose machine has compiled the kernels."""
    plans: list[Any] = []
    monkeypatch.setattr(one_fit.dispatch, "remember", plans.append)
    model = way(lambda: make("explicit"))
    assert len(plans) == (1 if way.alone else 2)
    assert all(plan == model.plan_ for plan in plans)


def test_the_validation_set_may_be_a_frame(way: Way) -> None:
    pd = pytest.importorskip("pandas")
    triplets = HELD.tocoo()
    frame = pd.DataFrame({"user": triplets.row, "item": triplets.col, "rating": triplets.data})
    if way.alone:
        frame = hmf.Ratings.from_frame(frame)
    labelled = hmf.Ratings.from_matrix(TRAIN, user_ids=np.arange(60), item_ids=np.arange(40))
    if way.name == "entries":
        pytest.skip("these entries have no labels")
    model = way(lambda: make("explicit", iterations=2), labelled, validation=frame)
    expected = make("explicit", iterations=2).fit(TRAIN, validation=HELD)
    assert [record["rmse"] for record in model.history_] == pytest.approx(
        [record["rmse"] for record in expected.history_]
    )


@pytest.mark.parametrize("error", [ZeroDivisionError, DeviceLostError])
def test_a_failure_leaves_what_is_on_the_host(
    way: Way,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After two observed iterations; alone, the model also has the half sweep after them."""
    made, solve = [], RankALS.solve

    def build() -> Any:
        made.append(make("explicit", iterations=5))
        return made[-1]

    def fail(solver: RankALS, side: Any) -> Any:
        if solver.rank == 0 and getattr(solver, "halves_done", 0) == 5:  # the users of the third iteration
            raise error(
                {"device": "cuda:0", "reason": "as told", "work": ""} if error is DeviceLostError else "as told"
            )
        vars(solver)["halves_done"] = getattr(solver, "halves_done", 0) + 1
        return solve(solver, side)

    monkeypatch.setattr(RankALS, "solve", fail)
    with caplog.at_level(logging.INFO, logger="hybridmf"), pytest.raises(error) as raised:
        way(build, validation=HELD)
    model = next(model for model in made if hasattr(model, "user_factors_"))
    expected = make("explicit", iterations=2).fit(TRAIN)
    np.testing.assert_allclose(model.user_factors_, expected.user_factors_, rtol=1e-4, atol=1e-5)
    assert model.n_iter_ == 2
    kept = "last completed half sweep" if way.alone else "factors of iteration 2, which were on the host"
    said = str(raised.value) + caplog.text
    assert "the user factors of iteration 3" in said and kept in said


def test_frames_name_the_columns_of_a_model(way: Way) -> None:
    pd = pytest.importorskip("pandas")
    if way.name in ("store", "entries"):
        pytest.skip("these ratings are no frame")
    frame = pd.DataFrame(TRAIN.toarray(), columns=[f"item {k}" for k in range(40)])
    model, expected = way(lambda: make("implicit"), frame), make("implicit").fit(frame)
    assert model.feature_names_in_.tolist() == expected.feature_names_in_.tolist() == list(frame.columns)
    pd.testing.assert_frame_equal(
        model.recommend_table([1, 2])[["user", "item"]], expected.recommend_table([1, 2])[["user", "item"]]
    )
