"""The search of hyperparameters: shared trials that continue, budgets, spaces, failures, popularity."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import loguniform, randint

import hybridmf as hmf
from hybridmf import _formats
from hybridmf.gpu import topk
from hybridmf.gpu.factors import DeviceFactors
from hybridmf.metrics import PopularityRecommender
from hybridmf.model.fit import Fit, Options
from hybridmf.model.training import LocalRatings
from hybridmf.plan.precision import PrecisionCheck
from hybridmf.search import (
    RUNGS,
    Searcher,
    _parts,
    default_space,
    expected_improvement,
    given_space,
    parse_seconds,
    quiet,
    with_likely,
)
from support.ratings import planted


@pytest.fixture(scope="module")
def plays() -> hmf.Ratings:
    """Counts whose values matter little."""
    return hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.03, seed=0)


@pytest.fixture(scope="module")
def few() -> hmf.Ratings:
    """Few rows, for kernels that are emulated."""
    return hmf.Ratings.from_matrix(planted(40, 30, 0.3))


@pytest.fixture(scope="module")
def stars() -> hmf.Ratings:
    return hmf.datasets.synthetic("ml-1m", scale=0.02, seed=0)


def told(result: hmf.SearchResult) -> list[Any]:
    return [(trial.params, trial.iterations, trial.users, trial.value, trial.state) for trial in result.trials]


def test_a_number_of_trials_and_a_seed_decide_everything(plays):
    one, again, other = (hmf.search(plays, trials=8, random_state=seed) for seed in (0, 0, 1))
    assert told(one) == told(again) != told(other)
    assert len(one.trials) <= 8
    np.testing.assert_array_equal(one.best.item_factors_, again.best.item_factors_)


def test_the_best_is_the_best_complete_trial_and_no_worse_than_the_default_and_popularity(plays):
    found = hmf.search(plays, trials=14, random_state=0)
    complete = [trial.value for trial in found.trials if trial.state == "complete"]
    assert found.best_value == max(complete) >= found.default_value == found.trials[0].value
    assert found.best_value >= found.popularity_value
    assert {trial.state for trial in found.trials} == {"complete", "stopped"}
    assert 0 < sum(trial.iterations for trial in found.trials) < 10 * len(found.trials)
    assert found.seconds >= max(trial.finished for trial in found.trials) > 0


@pytest.mark.parametrize(
    ("model", "metric"),
    [
        (hmf.ImplicitALS(8), "ndcg@10"),
        (hmf.ImplicitALS(16, solver="subspace", block_size=8), "ndcg@10"),
        (hmf.ExplicitALS(8), "rmse"),
        (hmf.SGD(8), "rmse"),
        (hmf.SGD(8, rate_schedule="adagrad"), "rmse"),
        (hmf.CCD(8), "rmse"),
    ],
)
def test_trials_that_continue_are_those_that_never_stopped(model, metric, plays, stars):
    ratings = plays if metric == "ndcg@10" else stars
    train, validation = hmf.split(ratings, 0.2, 0)
    found = hmf.search(train, validation, model=model.set_params(random_state=3), trials=4, random_state=0)
    for trial in found.trials:
        if trial.state == "complete":
            alone = type(model)(**model.get_params()).set_params(**trial.params).fit(train)
            value = hmf.evaluate(alone, validation, train=train, metrics=metric)[metric]
            assert trial.value == pytest.approx(value, rel=1e-6)


def test_the_winner_is_fitted_on_all_ratings(plays):
    train, validation = hmf.split(plays, 0.2, 0)
    found = hmf.search(train, validation, trials=4, random_state=0)
    plain = hmf.search(plays, trials=4, random_state=0)
    for result in (found, plain):
        assert result.best._learned.seen.nnz == plays.nnz
        named = result.best.get_params()
        assert all(named[name] == value for name, value in result.best_params.items())
        again = eval(result.code(), {"hmf": hmf, "ratings": plays})
        np.testing.assert_array_equal(again.item_factors_, result.best.item_factors_)
    twice = hmf.split(validation, 0.5, 0)[0]  # entries in both parts are not added up
    both = hmf.Ratings(sp.csr_array(train.user_items + twice.user_items), train.user_ids, train.item_ids)
    assert hmf.search(both, validation, trials=2, random_state=0).best._learned.seen.nnz == plays.nnz


def test_ratings_of_zero_stay_in_the_fit_on_all_ratings():
    centred = hmf.datasets.synthetic("ml-1m", scale=0.05, seed=0).user_items.copy()
    centred.data -= 3
    assert np.any(centred.data == 0)
    train, validation = hmf.split(hmf.Ratings(centred), 0.1, 0)
    found = hmf.search(train, validation, model=hmf.ExplicitALS(8), trials=2, random_state=0)
    assert found.best._learned.seen.nnz == centred.nnz
    again = eval(found.code(), {"hmf": hmf, "ratings": hmf.Ratings(centred)})
    np.testing.assert_array_equal(again.item_factors_, found.best.item_factors_)


def test_numpy_values_in_a_space_give_code_that_runs():
    stars = hmf.datasets.synthetic("ml-1m", scale=0.05, seed=0)
    space = {"factors": [np.int64(8)]}
    found = hmf.search(stars, model=hmf.ExplicitALS(dtype=np.float64), space=space, trials=2, random_state=0)
    assert type(found.best_params["factors"]) is int
    again = eval(found.code(), {"hmf": hmf, "ratings": stars})
    np.testing.assert_array_equal(again.item_factors_, found.best.item_factors_)


def test_a_space_that_is_no_dict_is_an_error(plays):
    with pytest.raises(TypeError, match=r"space must be a dict such as .* got 'x'"):
        hmf.search(plays, space="x")


def test_labels_of_the_validation_set_decide_and_not_positions(plays):
    train, validation = hmf.split(plays, 0.2, 0)
    names = [f"user {k}" for k in range(train.shape[0])]
    train, validation = (hmf.Ratings(each.user_items, user_ids=names) for each in (train, validation))
    order = np.random.default_rng(0).permutation(len(names))
    shuffled = hmf.Ratings(sp.csr_array(validation.user_items[order]), user_ids=validation.user_ids[order])
    one, other = (hmf.search(train, each, trials=3, random_state=0) for each in (validation, shuffled))
    assert told(one) == told(other)
    strange = hmf.Ratings(validation.user_items, user_ids=["x", *names[1:]])
    with pytest.raises(hmf.errors.UnknownLabelError, match="validation"):
        hmf.search(train, strange, trials=2)


def test_without_a_validation_set_the_latest_entries_are_held_out(monkeypatch):
    calls = []
    real = hmf.search.__globals__["split"]
    monkeypatch.setitem(
        hmf.search.__globals__, "split", lambda *args, **named: calls.append(named) or real(*args, **named)
    )
    rng = np.random.default_rng(0)
    users, items = np.divmod(rng.choice(40 * 30, 500, replace=False), 30)
    for times, by in ((rng.random(500), "last"), (None, "random")):
        ratings = hmf.Ratings.from_coo(users, items, timestamps=times)
        hmf.search(ratings, model=hmf.ImplicitALS(4), trials=2, random_state=0)
        assert calls.pop()["by"] == by


@pytest.mark.parametrize("alpha", [0.0, 3.0])
@pytest.mark.parametrize("counted", [True, False])
def test_first_settings_of_a_given_space_are_likely_ones(alpha, counted, plays):
    """A space of lambda is searched first where the default space, which knows its scale, is."""
    matrix, scaled = plays.binarize().user_items, 1 + alpha
    usual = default_space(hmf.ImplicitALS(), hmf.PreparedRatings(matrix))
    strengths = usual.params({"strength": 1.0, "unobserved_weight": 0.1, "nu": 1.0})["regularization"]
    given: dict[str, Any] = {"regularization_scaling": "count", "count_unobserved": counted, "alpha": alpha}
    model = hmf.ImplicitALS(8, **given)
    space = given_space(
        {"unobserved_weight": loguniform(1e-3, 30), "regularization": loguniform(1e-6, 1e3)}, model
    )  # fmt: skip
    likely = with_likely(space, model, hmf.PreparedRatings(matrix)).likely
    assert likely is not None
    for u in (np.array([0.0, 0.0]), np.array([0.5, 0.5]), np.array([1.0, 1.0])):
        found = space.at(likely(u))
        weight = found["unobserved_weight"] / scaled
        assert weight == pytest.approx(0.03 * (1 / 0.03) ** u[0], rel=1e-3)
        if counted and alpha == 0:  # as the default space scales
            strength = 1.7 * (6 / 1.7) ** u[1] * weight**0.5
            same = usual.params({"strength": strength, "unobserved_weight": weight, "nu": 1.0})
            assert found["regularization"] == pytest.approx(same["regularization"], rel=1e-3)
    ends = [space.at(likely(np.array([0.5, u])))["regularization"] for u in (0.0, 1.0)]
    assert ends[1] / ends[0] == pytest.approx(6 / 1.7, rel=1e-3) and (not counted or ends[0] < 6 * scaled * strengths)


def test_aligned_coordinates_are_those_of_the_default_space(plays):
    """With lambda as with its multiple, in units of their ranges; the scale of lambda is a constant."""
    prepared = hmf.PreparedRatings(plays.binarize())
    usual = with_likely(default_space(hmf.ImplicitALS(), prepared), hmf.ImplicitALS(), prepared)
    model = hmf.ImplicitALS(regularization_scaling="count", count_unobserved=True, alpha=0.0)
    given = given_space({"regularization": loguniform(1e-9, 1e3), "unobserved_weight": loguniform(1e-3, 2)}, model)
    given = with_likely(given, model, prepared)
    assert usual.aligned is not None and given.aligned is not None
    points = np.column_stack([np.random.default_rng(0).random((40, 2)), np.full(40, 0.9)])  # strength, weight; nu = 1
    placed = [
        [given.dimensions[name].cdf(usual.at(point)[name]) for name in ("regularization", "unobserved_weight")]
        for point in points
    ]
    found, expected = given.aligned(np.array(placed)), usual.aligned(points)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], atol=1e-3)
    np.testing.assert_allclose(np.diff(found[:, 0] - expected[:, 0]), 0, atol=0.01)
    np.testing.assert_array_equal(expected[:, 2], points[:, 2])
    ends = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    lambdas, weights = (given.aligned(ends)[each] - given.aligned(ends)[0] for each in (1, 2))
    np.testing.assert_allclose(lambdas, [np.log(1e12) / np.log(100), 0], atol=1e-6)
    np.testing.assert_allclose(weights[1], np.log(2000) / np.log(200), rtol=1e-6)


@pytest.mark.parametrize(
    "space",
    [
        {"regularization": loguniform(0.1, 1)},
        {"regularization": [0.0, 1.0], "unobserved_weight": loguniform(0.1, 1)},
        {"regularization": [(1.0, 2.0), 1.0], "unobserved_weight": [0.1, 0.2]},
        {"regularization": [1.0, 2.0], "unobserved_weight": [0.1, 0.2], "regularization_scaling": [0.0, 1.0]},
    ],
)
def test_other_spaces_have_no_aligned_coordinates(space, plays):
    model = hmf.ImplicitALS()
    assert with_likely(given_space(space, model), model, hmf.PreparedRatings(plays)).aligned is None


def test_lists_of_any_order_have_aligned_coordinates(plays):
    model = hmf.ImplicitALS(regularization_scaling="count", count_unobserved=True)
    for weights in ([0.01, 1.0, 0.1], [0.01, 0.1, 1.0]):
        space = given_space({"unobserved_weight": weights, "regularization": [2.0, 1.0]}, model)
        laid = with_likely(space, model, hmf.PreparedRatings(plays)).aligned
        assert laid is not None
        places = np.array([[(weights.index(each) + 0.5) / 3, 0.1] for each in (0.01, 0.1, 1.0)])
        if weights[1] == 1.0:
            first = laid(places)
    np.testing.assert_allclose(laid(places), first)


def test_likely_settings_are_of_the_space(plays):
    matrix = plays.user_items
    lists = given_space({"regularization": [1e-9, 2.0, 1e9], "unobserved_weight": [0.1, 7.0]}, hmf.ImplicitALS())
    likely = with_likely(lists, hmf.ImplicitALS(alpha=0.0), hmf.PreparedRatings(matrix)).likely
    assert likely is not None
    assert lists.at(likely(np.array([0.9, 0.9]))) == {"regularization": 2.0, "unobserved_weight": 0.1}
    far = given_space({"regularization": loguniform(1e6, 1e8)}, hmf.ImplicitALS())
    likely = with_likely(far, hmf.ImplicitALS(), hmf.PreparedRatings(matrix)).likely
    assert likely is not None and likely(np.array([0.3])) == [0.3]  # left as drawn
    for space, model in (
        (far, hmf.ExplicitALS()),
        (given_space({"solver": ["cg"]}, hmf.ImplicitALS()), hmf.ImplicitALS()),
    ):
        assert with_likely(space, model, hmf.PreparedRatings(matrix)).likely is None
    usual = default_space(hmf.ImplicitALS(), hmf.PreparedRatings(matrix))
    likely = with_likely(usual, hmf.ImplicitALS(), hmf.PreparedRatings(matrix)).likely
    assert likely is not None
    points = np.random.default_rng(0).random((20, len(usual.dimensions)))
    assert {usual.at(likely(point))["regularization_scaling"] for point in points} == {0.5, 1.0}


def test_the_first_round_is_of_likely_settings_and_the_models_own(plays, monkeypatch):
    points = []
    monkeypatch.setattr(Searcher, "_drawn", lambda searcher, *args: points.append(args) or iter(()))
    found = hmf.search(plays, model=hmf.ImplicitALS(8), random_state=0, budget="20s")
    assert callable(points[0][3]) and all(len(args) == 3 for args in points[1:])
    assert found.trials[0].state == "complete" and found.default_value == found.best_value


def test_a_space_of_lists_and_distributions(plays):
    space = {"regularization": loguniform(0.5, 20), "unobserved_weight": [0.05, 0.2], "alpha": [0.0], "factors": [8, 4]}
    found = hmf.search(plays, space=space, trials=16, random_state=0)
    assert found.trials[0].params == {"factors": 4}
    for trial in found.trials[1:]:
        if len(trial.params) > 1:
            assert 0.5 <= trial.params["regularization"] <= 20
            assert trial.params["unobserved_weight"] in (0.05, 0.2) and trial.params["alpha"] == 0
    ranks = [trial.params["factors"] for trial in found.trials]
    assert set(ranks) <= {4, 8} and ranks == sorted(ranks)
    ranks_only = hmf.search(plays, space={"factors": [4, 8]}, trials=6, random_state=0)
    assert {trial.params["factors"] for trial in ranks_only.trials} == {4, 8}
    assert "regularization" in ranks_only.trials[1].params


def test_a_metric_of_the_caller(plays):
    """Which a search by the same metric of the library agrees with, and one that is undefined names itself."""

    def found_any(rankings: np.ndarray, relevant: Any) -> np.ndarray:
        rows = np.split(relevant.indices, relevant.indptr[1:-1])
        return np.array([float(np.isin(row, ranking).any()) for row, ranking in zip(rows, rankings, strict=True)])

    given: dict[str, Any] = {"model": hmf.ImplicitALS(8), "trials": 12, "random_state": 0}
    own, usual = (hmf.search(plays, metric=metric, **given) for metric in (found_any, "hit_rate@10"))
    assert own.metric == "found_any" and told(own) == told(usual)
    assert own.popularity_value == usual.popularity_value
    with pytest.raises(ValueError, match=r"all \d+ trials failed; .*metric 'shapeless' must return one value"):
        hmf.search(plays, metric=shapeless, **given)
    shapeless.__name__ = "ndcg@10"
    with pytest.raises(ValueError, match="'ndcg@10' is a function with the name of a metric of evaluate"):
        hmf.search(plays, metric=shapeless, **given)


def shapeless(rankings: np.ndarray, relevant: Any) -> np.ndarray:
    return np.zeros(3)


def test_long_lists_of_numbers_are_checked_by_their_ends(monkeypatch):
    checked: list[Any] = []
    monkeypatch.setattr(
        sys.modules["hybridmf.search"], "_check_value", lambda model, name, value: checked.append(value)
    )
    given_space({"regularization": np.linspace(5, 0.1, 1000)}, hmf.ImplicitALS())
    assert checked == [0.1, 5.0]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="regularization must be finite, got nan"):
        given_space({"regularization": [1.0, float("nan"), 2.0]}, hmf.ImplicitALS())


def test_parameters_of_the_given_estimator_stay(plays):
    found = hmf.search(plays, model=hmf.ImplicitALS(8, regularization=2.0, solver="cg"), trials=6, random_state=0)
    assert all("regularization" not in trial.params and trial.params["factors"] == 8 for trial in found.trials)
    assert found.best.regularization == 2.0 and found.best.solver == "cg"


@pytest.mark.parametrize("nu", [0.0, 0.5, 1.0])
def test_a_strength_has_about_the_same_effect_with_each_power(nu, plays):
    """Penalties of all rows add up to those of the default lambda."""
    matrix = plays.user_items
    space = default_space(hmf.ImplicitALS(), hmf.PreparedRatings(matrix))
    drawn = {"strength": 1.0, "unobserved_weight": 0.1, "nu": nu, "alpha": 1e-3}
    found = space.params(drawn)
    counts = (
        np.diff(matrix.indptr) + 0.1 * matrix.shape[1],
        np.bincount(matrix.indices, minlength=matrix.shape[1]) + 0.1 * matrix.shape[0],
    )
    mean = np.prod([np.mean(each**nu) for each in counts]) ** 0.5
    plain = hmf.ImplicitALS(4, iterations=1).fit(plays).regularization_
    assert found["regularization"] * mean == pytest.approx(plain, rel=1e-3)
    assert space.at(space.first) == space.params(drawn | {"nu": 0.0})


def test_a_trial_that_fails_is_recorded_and_the_others_go_on(stars):
    model = hmf.ExplicitALS(16, biases=False)
    found = hmf.search(stars, model=model, space={"regularization": [0.0, 0.1, 0.3]}, trials=8, random_state=0)
    failed = [trial for trial in found.trials if trial.state == "failed"]
    assert len(failed) == 1 and len(found.trials) == 4  # the model's own, and the three of the space, once each
    assert all("not positive definite" in trial.reason and trial.value is None for trial in failed)
    model = hmf.ExplicitALS(16, biases=False, regularization=0.0)
    with pytest.raises(ValueError, match=r"all \d+ trials failed; the first one: NotPositiveDefiniteError"):
        hmf.search(stars, model=model, space={"cg_steps": [3, 4]}, trials=3, random_state=0)


def test_settings_are_first_compared_at_half_the_rank(plays, monkeypatch):
    ranks = []
    fitted = Searcher._fitted

    def watched(searcher, trial, iterations):
        ranks.append((trial.number, trial.params["factors"]))
        if trial.number == 3 and trial.params["factors"] == 16:
            raise ValueError("not at this rank")
        return fitted(searcher, trial, iterations)

    monkeypatch.setattr(Searcher, "_fitted", watched)
    found = hmf.search(plays, model=hmf.ImplicitALS(32), trials=16, random_state=0)
    assert ranks[:4] == [(0, 16), (1, 16), (2, 16), (3, 16)] and {(0, 32), (3, 32)} <= set(ranks)
    assert all(trial.params["factors"] == 32 for trial in found.trials if trial.iterations > 3)
    assert {trial.params["factors"] for trial in found.trials if trial.iterations == 3} >= {16}
    assert found.best_params["factors"] == 32 and found.trials[3].state != "failed"
    assert {factors for _, factors in ranks} == {16, 32}
    ranks.clear()
    hmf.search(plays, model=hmf.ImplicitALS(32, solver="subspace"), trials=8, random_state=0)
    assert {factors for _, factors in ranks} == {32}


def test_trials_on_a_gpu_share_one_upload(few, gpu, monkeypatch):
    sources, place = [], LocalRatings.place
    monkeypatch.setattr(LocalRatings, "place", lambda it, plan: sources.append(it.prepared) or place(it, plan))
    model = hmf.ImplicitALS(iterations=3, device="cuda")
    hmf.search(few, model=model, space={"factors": [4]}, trials=3, random_state=0)
    assert sources[:-1] == [sources[0]] * (len(sources) - 1)
    assert len(sources) > 3 and sources[0].device == "cuda:0" and sources[-1] is None  # all ratings


def test_settings_are_fitted_whole_where_partial_fits_are_not_cheap(few, gpu, monkeypatch):
    """By the plan's prediction: the launches and Python of a trial against its iterations."""
    module, search = sys.modules["hybridmf.search"], hmf.search

    def found(device: str = "cuda", rank: int = 8) -> hmf.SearchResult:
        model = hmf.ImplicitALS(iterations=3, device=device)
        return search(few, model=model, space={"factors": [rank]}, trials=5, random_state=0)

    whole = found()
    assert [trial.iterations for trial in whole.trials] == [3] * 5 and told(found()) == told(whole)
    assert all(trial.state == "complete" and trial.params["factors"] == 8 for trial in whole.trials)
    finished = sorted(whole.trials, key=lambda trial: trial.finished)
    assert [trial.number for trial in finished] == [1, 2, 3, 4, 0]  # the best guess first, the model's own last
    _, likely, stronger = (trial.params for trial in whole.trials[:3])
    assert stronger["regularization"] == pytest.approx(3 * likely["regularization"], rel=1e-3)
    assert likely | {"regularization": 0} == stronger | {"regularization": 0}
    ratings = hmf.split(few, 0.1, int(np.random.default_rng(0).integers(2**31, size=2)[1]))
    again = hmf.ImplicitALS(iterations=3, device="cuda", random_state=int(np.random.default_rng(0).integers(2**31)))
    for trial in whole.trials[:2]:
        value = hmf.evaluate(again.set_params(**trial.params).fit(ratings[0]), ratings[1], metrics="ndcg@10")
        assert value["ndcg@10"] == trial.value
    monkeypatch.setattr(module, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(module, "ROW_SECONDS", 0.0)
    monkeypatch.setattr(module, "LEAST_RANK", 4)
    halved = found()
    assert {(trial.iterations, trial.params["factors"]) for trial in halved.trials} >= {(1, 4)}
    searched = found("cpu", 32)
    monkeypatch.undo()
    assert told(found("cpu", 32)) == told(searched)


@pytest.mark.parametrize("own", [False, True], ids=["outside the space", "in it"])
def test_the_models_own_setting_waits_for_proposals(own, few, gpu):
    space = {"unobserved_weight": loguniform(0.01, 1), "regularization": loguniform(0.1, 10)}
    space = {"factors": [4]} if own else space
    model = hmf.ImplicitALS(4, iterations=1, device="cuda")
    for trials, place in ((4, 3), (16, 11)):
        found = hmf.search(few, model=model, space=space, trials=trials, random_state=0)
        finished = sorted(found.trials, key=lambda trial: trial.finished)
        assert [trial.number for trial in finished].index(0) == place and found.default_value == found.trials[0].value


def test_whole_trials_on_a_gpu_leave_their_users_there(few, gpu, monkeypatch):
    brought, copied = [], DeviceFactors._brought
    monkeypatch.setattr(DeviceFactors, "_brought", lambda factors: brought.append(len(factors)) or copied(factors))
    train, validation = hmf.split(few, 0.2, 0)
    checks = []
    is_canonical = _formats.is_canonical
    monkeypatch.setattr(
        _formats, "is_canonical", lambda *given: checks.append(len(given[1]) == train.nnz) or is_canonical(*given)
    )
    model = hmf.ImplicitALS(iterations=3, device="cuda")
    hmf.search(train.user_items, validation, model=model, space={"factors": [8]}, trials=5, random_state=0)
    users, items = train.shape
    assert brought.count(items) == 6 and brought.count(users) == 1  # that of the last fit
    assert sum(checks) <= 8


def test_trials_are_ranked_where_their_factors_are(few, gpu, monkeypatch):
    """Items of trials do not leave a GPU that serves them, and what users have seen is copied there once."""
    brought, copied, kept = [], DeviceFactors._brought, []
    monkeypatch.setattr(DeviceFactors, "_brought", lambda factors: brought.append(len(factors)) or copied(factors))
    model = hmf.ImplicitALS(iterations=3, device="cuda")
    train, validation = hmf.split(few, 0.2, 0)
    options = {"model": model, "space": {"factors": [8]}, "trials": 5, "random_state": 0}
    by_cpu = hmf.search(train, validation, **options)
    monkeypatch.setattr("hybridmf.model.engine.GPU_SCORES", 0)
    monkeypatch.setattr("hybridmf.model.engine.HELD_SCORES", 0)
    ranked = topk.top_k
    monkeypatch.setattr(topk, "top_k", lambda *given, **how: kept.append(how["copies"]) or ranked(*given, **how))
    brought.clear()
    by_gpu = hmf.search(train, validation, **options)
    assert told(by_gpu) == told(by_cpu) and sorted(brought) == sorted(train.shape)  # those of the last fit
    assert len(kept) == 5 and len({id(each) for each in kept}) == 1 and list(kept[0]) == [gpu]


def test_factors_that_stay_on_the_device_are_those_of_a_fit(few, backend):
    usual = hmf.ImplicitALS(8, iterations=2, device=backend, random_state=0).fit(few)
    model = hmf.ImplicitALS(8, iterations=2, device=backend, random_state=0)
    stays = Fit(model, LocalRatings(model, few), Options(on_device=True)).run()
    for found, expected in zip(stays.recommend(np.arange(20)), usual.recommend(np.arange(20)), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(stays.user_factors, usual.user_factors)
    np.testing.assert_array_equal(stays.item_factors, usual.item_factors)


def test_brief_trials_run_side_by_side_and_depend_on_the_seed_only(few, gpu, monkeypatch):
    """Whatever the order in which they end; one by one where there is no time or memory for two, or with own code."""
    module, fitted, free = sys.modules["hybridmf.search"], Searcher._fitted, threading.Event()
    running, most = set(), []
    late: list[int] = []

    def watched(searcher, trial, iterations):
        running.add(trial.number)
        most.append(len(running))
        if late and trial.number in late:
            free.wait(0.2)
        found = fitted(searcher, trial, iterations)
        running.discard(trial.number)
        return found

    def found(**options: Any) -> Any:
        most.clear()
        model, given = hmf.ImplicitALS(4, iterations=1, device="cuda"), {"space": {"factors": [4]}, "trials": 10}
        return told(hmf.search(few, model=model, random_state=0, **given | options))

    monkeypatch.setattr(Searcher, "_fitted", watched)
    first = found()
    assert max(most) == 2
    late[:] = [6, 8]  # which now end after those that begin later
    assert found() == first
    late[:] = [7]
    assert found() == first and most[: module.IN_TURN] == [1] * module.IN_TURN
    late.clear()
    found(metric=lambda ranked, *_: np.zeros(len(ranked)), trials=7)
    assert max(most) == 1
    monkeypatch.setattr(module, "BRIEF", 0.0)
    assert found() != first and max(most) == 1
    found(space={"regularization": [(0.1, 0.2), (0.2, 0.1)]}, trials=3)  # pairs have no triple


def test_points_with_the_same_values_of_lists_are_the_same_for_proposals(plays):
    space = given_space({"nonnegative": [False, True], "regularization": loguniform(0.01, 10)}, hmf.ImplicitALS(4))
    laid = space.laid(np.array([[0.1, 0.5], [0.4, 0.5], [0.6, 0.5], [1.0, 0.5]]))
    np.testing.assert_array_equal(laid[:, 0], [0.25, 0.25, 0.75, 0.75])
    assert (laid[:, 1] == 0.5).all()
    usual = default_space(hmf.ImplicitALS(4), hmf.PreparedRatings(plays))
    aligned = with_likely(usual, hmf.ImplicitALS(4), hmf.PreparedRatings(plays))
    points = np.random.default_rng(0).random((5, len(aligned.dimensions)))
    np.testing.assert_array_equal(aligned.laid(points)[:, :2], aligned.aligned(points)[:, :2])


def test_expected_improvement_is_that_of_draws():
    """Of a Gaussian process: where the values rise, more than where they are known or fall."""
    points = np.linspace(0, 0.6, 7)[:, None]
    found = expected_improvement(points, points[:, 0], np.array([[0.7], [0.6], [0.3], [0.0], [0.9]]))
    assert found[0] > found[1] > found[2] > found[3] - 1e-12 and (found >= 0).all()
    flat = expected_improvement(points, np.zeros(7), np.array([[1.0], [0.3]]))
    assert np.isfinite(flat).all() and flat[0] > flat[1]  # unknown before known


def test_a_value_that_is_not_known_yet_counts_as_expected():
    points, places = np.array([[0.0], [0.2], [0.4], [0.6]]), np.linspace(0, 1, 11)[:, None]
    values = np.array([0.1, 0.3, 0.4, np.nan])
    beside = expected_improvement(points, values, places)
    without = expected_improvement(points[:3], values[:3], places)
    assert beside[6] < 0.5 * without[6] and np.isfinite(beside).all()  # nothing to learn there
    other = expected_improvement(points, np.array([0.1, 0.3, 0.4, 0.0]), places)
    assert not np.allclose(beside, other)


def test_far_below_the_best_differences_matter_less(few):
    """So a cliff beside the best settings does not hide the slope towards them."""
    points, places = np.linspace(0, 0.9, 7)[:, None], np.linspace(0, 1, 101)[:, None]
    values = np.array([0.5, 0.7, 0.85, 0.95, 1.0, 0.97, 0.05])
    lower = values - np.array([0, 0, 0, 0, 0, 0, 5.0])
    best = [places[np.argmax(expected_improvement(points, each, places)), 0] for each in (values, lower)]
    assert best == pytest.approx([best[0]] * 2, abs=0.05) and 0.5 < best[0] < 0.75


def test_proposals_find_a_maximum_and_end(few, gpu, monkeypatch):
    """Of a function of lambda alone, which fits would take long to show; some settings fail."""
    module = sys.modules["hybridmf.search"]
    space = {"regularization": loguniform(0.01, 100), "factors": [8]}

    def value(searcher: Searcher, model: Any, users: int = 0) -> float:
        strength = getattr(model, "regularization", None)
        if strength is not None and strength > 30:
            raise hmf.errors.NonFiniteError("too strong")
        return 0.1 if strength is None else 1 - np.log10(strength / 20) ** 2

    monkeypatch.setattr(Searcher, "_fitted", lambda searcher, trial, iterations: hmf.ImplicitALS(**trial.params))
    monkeypatch.setattr(Searcher, "measured", value)
    model = hmf.ImplicitALS(8, device="cuda", regularization=0.01)
    found = hmf.search(few.binarize(), model=model, space=space, trials=60, random_state=0)
    assert 17 < found.best_params["regularization"] < 24
    assert module.PROPOSED_IDLE < len(found.trials) < 60
    assert {trial.state for trial in found.trials} == {"complete", "failed"}


def test_kernels_of_the_next_ranks_are_compiled_while_trials_run(few, gpu, monkeypatch):
    order: list[Any] = []

    def noted(programs, later=False):
        order.extend((later, *each) for each in programs)

    monkeypatch.setitem(vars(sys.modules["hybridmf.search"]), "available_cores", lambda: 4)
    monkeypatch.setattr(gpu, "compile_ahead", noted)
    ranks = [4, 6, 10]
    hmf.search(few, space={"factors": ranks}, trials=1, device="cuda", random_state=0)
    found = [(later, int(rank)) for later, _, name, constants in order for rank in ranks
            if name == "solve_rows" and {f"RANK={rank}", "ARITHMETIC=0"} <= set(constants)]  # fmt: skip
    first = next(k for k, each in enumerate(found) if each[0])
    assert found[:first] == [(False, 4)] * first and found[first] == (True, 6)
    assert (True, 10) not in found  # one rank ahead for four cores


def test_a_trial_that_has_failed_does_not_go_on(plays, monkeypatch):
    """Also the first one, whose later rungs would succeed here."""
    measured, calls = Searcher.measured, iter(range(100))

    def failing(self: Searcher, *args: Any) -> float:
        if next(calls) in (0, 1):  # at half the rank and the whole one
            raise hmf.errors.NonFiniteError("once")
        return measured(self, *args)

    monkeypatch.setattr(Searcher, "measured", failing)
    found = hmf.search(plays, trials=6, random_state=0)
    first = found.trials[0]
    assert (first.state, first.value, first.reason) == ("failed", None, "NonFiniteError: once")
    assert found.default_value is None and "failed" in str(found)


def test_popularity_wins_where_there_are_no_tastes(caplog):
    rng = np.random.default_rng(0)
    likes = sp.csr_array((rng.random((400, 60)) < 0.6 / np.sqrt(1 + np.arange(60))).astype(float))
    model = hmf.ImplicitALS(8, regularization=1e-3)
    found = hmf.search(likes, model=model, space={"alpha": [1.0, 5.0]}, trials=4, random_state=0)
    assert isinstance(found.best, PopularityRecommender) and found.best_params == {}
    assert found.best_value == found.popularity_value > found.default_value
    assert "is better than popularity" in caplog.text
    assert isinstance(eval(found.code(), {"hmf": hmf, "ratings": likes}), PopularityRecommender)


def test_ctrl_c_returns_what_was_found(plays, monkeypatch):
    measured = Searcher.measured
    calls = iter(range(100))

    def interrupted(self: Searcher, *args: Any) -> float:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return measured(self, *args)

    monkeypatch.setattr(Searcher, "measured", interrupted)
    found = hmf.search(plays, trials=20, random_state=0)
    assert found.interrupted and found.default_value is None and len(found.trials) == 6  # no trial is complete
    assert found.best_value == max(trial.value or 0 for trial in found.trials) and "not complete" in str(found)
    assert found.best.factors == found.best_params["factors"] == 64 and found.best.iterations == 10
    calls = iter([5])
    with pytest.raises(KeyboardInterrupt):
        hmf.search(plays, trials=20)


def test_fits_of_trials_do_not_log(plays, caplog):
    caplog.set_level(logging.INFO, "hybridmf")
    with pytest.raises(ValueError, match="no ranking"):
        hmf.search(plays, plays.user_items * -1, trials=3)
    hmf.search(plays, trials=9, random_state=0)
    assert "shrunk" not in caplog.text
    hmf.ImplicitALS(4, regularization=1e4, iterations=1).fit(plays)
    assert "shrunk" in caplog.text


def test_results_as_table_lines_and_html(plays, tmp_path: Path):
    pytest.importorskip("pandas")
    found = hmf.search(plays, trials=6, random_state=0)
    frame = found.to_frame()
    assert list(frame["number"]) == list(range(len(found.trials)))
    lines = [json.loads(line) for line in found.to_json_lines(tmp_path / "trials.jsonl").splitlines()]
    assert (tmp_path / "trials.jsonl").read_text() == found.to_json_lines()
    assert [line["value"] for line in lines] == [trial.value for trial in found.trials]
    assert f"{found.best_value:.4f}" in found._repr_html_() and f"{found.best_value:.4f}" in str(found)
    assert "Trial(" not in repr(found) and "_rank" not in repr(found.trials[0])


def test_a_picture(plays, tmp_path: Path):
    pytest.importorskip("matplotlib")
    found = hmf.search(plays, trials=5, random_state=0)
    figure = found.plot(tmp_path / "search.png")
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert "regularization" in labels and labels[-1] == "seconds"
    alpha = figure.axes[labels.index("alpha")].xaxis  # from 0 on, so logarithmic but for its first part
    assert alpha.get_scale() == "symlog" and 0 in alpha.get_majorticklocs() and min(alpha.get_majorticklocs()) >= 0
    assert (tmp_path / "search.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("2min", 120), ("1.5 h", 5400), ("7", 7), ("1 minute", 60), (".5 hours", 1800), (3, 3)],
)
def test_budgets(text, seconds):
    assert parse_seconds("budget", text) == seconds


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": "soon"}, ValueError, 'budget must be a time such as "90s"'),
        ({"budget": -1}, ValueError, "budget"),
        ({"budget": 1e-4}, ValueError, "one trial takes about"),
        ({"trials": 0}, ValueError, "trials"),
        ({"metric": "accuracy@3"}, ValueError, "metric must be one of .ndcg@k.*mrr@k.*hit_rate@k.*'accuracy@3'"),
        ({"metric": "rmse"}, ValueError, "models of implicit feedback rank"),
        ({"metric": "coverage@10"}, ValueError, "not one to search by"),
        ({"metric": ["ndcg@5"]}, TypeError, "metric must be one name"),
        ({"model": "als"}, ValueError, "model must be one of 'implicit', 'explicit'"),
        ({"model": hmf.ImplicitALS}, TypeError, r"make one: ImplicitALS\(\)"),
        (
            {"space": {"lambda": [1]}},
            ValueError,
            "space has 'lambda', which is no parameter to search; known are alpha",
        ),
        ({"space": {"alpha": []}}, TypeError, "must be a list of values or a distribution"),
        ({"space": {"alpha": loguniform}}, TypeError, r"without parameters; give them, as in loguniform"),
        ({"space": {"alpha": np.ones((2, 2))}}, TypeError, "must be a list of values or a distribution"),
        ({"space": {"alpha": 3.0}}, TypeError, "must be a list of values or a distribution"),
        ({"space": {"alpha": [-1.0]}}, ValueError, r"space\['alpha'\]: alpha must be"),
        ({"space": {"factors": randint(8, 64)}}, TypeError, "must be a list of ranks"),
        ({"space": {"factors": [0]}}, ValueError, r"space\['factors'\]: factors must satisfy 1 <= factors"),
        ({"space": {"iterations": [3]}}, ValueError, "no parameter to search"),
    ],
)
def test_bad_arguments(options, error, message, plays, monkeypatch):
    monkeypatch.setattr(Searcher, "advance", lambda *_: pytest.fail("fitted"))
    with pytest.raises(error, match=message):
        hmf.search(plays, **{"trials": 3} | options if "budget" not in options else options)


def test_validation_users_without_entries(plays):
    with pytest.raises(ValueError, match=r"validation of shape .* has no entries, so nothing can be evaluated"):
        hmf.search(plays.user_items, sp.csr_array(plays.shape), trials=2)


def test_ratings_that_no_implicit_model_can_rank(plays):
    with pytest.raises(ValueError, match=r"validation has no positive entry.* for explicit models"):
        hmf.search(plays.with_values(-np.ones(plays.nnz)), trials=2)


@pytest.mark.parametrize("model", ["implicit", "explicit"])
def test_validation_entries_that_are_in_train_do_not_count(model, plays, caplog):
    train, validation = hmf.split(plays, 0.2, 0)
    with pytest.raises(ValueError, match=r"all \d+ entries of validation are in train as well"):
        hmf.search(train, train, model=model, trials=2)
    both = hmf.Ratings(
        sp.csr_array(train.user_items[:, :50] @ sp.eye_array(50, train.shape[1]) + validation.user_items)
    )
    one, other = (hmf.search(train, each, model=model, trials=2, random_state=0) for each in (validation, both))
    assert told(one) == told(other)
    assert "of validation are in train as well, and do not count" in caplog.text


def test_weights_of_entries_count_in_trials_and_in_the_last_fit(plays):
    weights = np.random.default_rng(0).uniform(0.2, 5, plays.nnz)
    weighted = plays.with_weights(weights)
    one, other = (hmf.search(each, model=hmf.ImplicitALS(8), trials=3, random_state=0) for each in (plays, weighted))
    assert one.trials[0].value != other.trials[0].value
    again = eval(other.code(), {"hmf": hmf, "ratings": weighted})
    np.testing.assert_array_equal(again.item_factors_, other.best.item_factors_)


def test_weights_of_a_validation_set_count_in_the_last_fit(plays):
    """In another order of the users, with unknown items and entries that are in train as well."""
    weighted = plays.with_weights(np.random.default_rng(0).uniform(0.2, 5, plays.nnz))
    labels = [f"u{k}" for k in range(plays.n_users)], [f"i{k}" for k in range(plays.n_items)]
    train, validation = hmf.split(weighted, 0.2, 0)
    order = np.random.default_rng(1).permutation(plays.n_users)
    coo = validation.user_items.tocoo()
    given = hmf.Ratings.from_coo(
        [*(labels[0][k] for k in coo.row), "u0", labels[0][train.user_items.tocoo().row[0]]],
        [*(labels[1][k] for k in coo.col), "new", labels[1][train.user_items.indices[0]]],
        [*coo.data, 1.0, 9.0], user_ids=[labels[0][k] for k in order], item_ids=[*labels[1], "new"],
        weights=[*validation.weights, 1.0, 7.0],
    )  # fmt: skip
    labelled = [hmf.Ratings(part.user_items, *labels).with_weights(part.weights) for part in (train, weighted)]
    found = hmf.search(labelled[0], given, model=hmf.ImplicitALS(8), trials=2, random_state=0, unknown="drop")
    again = eval(found.code(), {"hmf": hmf, "ratings": labelled[1]})
    np.testing.assert_array_equal(again.item_factors_, found.best.item_factors_)
    plain = labelled[0].with_weights(None)
    other = hmf.search(plain, given, model=hmf.ImplicitALS(8), trials=2, random_state=0, unknown="drop")
    assert other.trials[0].value != found.trials[0].value
    assert not np.array_equal(other.best.item_factors_, found.best.item_factors_)


def test_the_last_fit_has_the_entries_of_both_parts(stars):
    """Zeros are ratings, and entries without weights weigh 1."""
    zeros = np.where(np.arange(stars.nnz) % 7 == 0, 0, stars.user_items.data)
    given = hmf.Ratings.from_coo(*stars.user_items.tocoo().coords, zeros, shape=stars.shape)
    weights = np.random.default_rng(0).uniform(0.2, 5, stars.nnz)
    plain, weighted = (hmf.split(each, 0.3, 0) for each in (given, given.with_weights(weights)))
    for parts in itertools.product((plain[0], weighted[0]), (plain[1], weighted[1])):
        everything, _, _ = _parts(*parts, hmf.ExplicitALS(), "error", 0)
        found, expected = everything(), hmf.Ratings.concat(parts)
        for name in ("indptr", "indices", "data"):
            np.testing.assert_array_equal(getattr(found.user_items, name), getattr(expected.user_items, name))
        np.testing.assert_array_equal(found.weights, expected.weights)


def test_nothing_to_select_by_is_a_warning(caplog):
    apart = hmf.Ratings(sp.csr_array(np.kron(np.eye(3), np.ones((1, 20)))))  # no item has two users
    hmf.search(apart, model=hmf.ImplicitALS(4), trials=2, random_state=0)
    assert "ndcg@10 is 0 for all 2 trials and for popularity" in caplog.text


def test_code_of_a_model_with_initial_factors(plays):
    first = hmf.ImplicitALS(8, random_state=0).fit(plays)
    found = hmf.search(plays, model=hmf.ImplicitALS(8, init=first), trials=3, random_state=0)
    again = eval(found.code(), {"hmf": hmf, "ratings": plays, "init": first})
    np.testing.assert_array_equal(again.item_factors_, found.best.item_factors_)


def test_trials_silence_the_fits_of_their_thread_only(caplog):
    with quiet():
        logging.getLogger("hybridmf").warning("of a trial")
        thread = threading.Thread(target=logging.getLogger("hybridmf").warning, args=("of another thread",))
        thread.start()
        thread.join()
    assert caplog.messages == ["of another thread"]


def test_a_real_set(data_dir):
    """Better than the defaults, and also on entries that the search has not seen."""
    ratings = hmf.Ratings.from_file(data_dir / "lastfm-2k" / "user_artists.dat.gz")
    known, test = hmf.split(ratings, 0.2, 0)
    found = hmf.search(known, model=hmf.ImplicitALS(32, iterations=6), trials=24, random_state=0)
    default = hmf.ImplicitALS(32, iterations=6, random_state=0).fit(known)
    ours, theirs = (hmf.evaluate(each, test, train=known, metrics="ndcg@10") for each in (found.best, default))
    assert found.best_value > found.default_value > found.popularity_value
    assert ours["ndcg@10"] > theirs["ndcg@10"]
    assert max(trial.users for trial in found.trials) <= RUNGS[-1][1]


def test_weights_of_features_are_searched():
    ratings = hmf.Ratings.from_matrix(planted(60, 40, 0.4), item_ids=[f"film {k}" for k in range(40)])
    rng = np.random.default_rng(2)
    features = hmf.Features(rng.random((42, 3)), names=list("abc"), labels=[f"film {k}" for k in range(42)])
    model = hmf.ImplicitALS(iterations=3, device="cpu")
    found = hmf.search(ratings, model=model, trials=4, random_state=0, item_features=features)
    assert any("item_feature_weight" in trial.params for trial in found.trials)
    assert all(trial.state != "failed" for trial in found.trials)
    assert len(found.best.item_factors) == 42 and found.best.item_factors[-2:].any(axis=1).all()
    assert "item_features=item_features" in found.code()
    named = hmf.search(
        ratings,
        model=model,
        space={"item_feature_weight": [0.1, 10.0]},
        trials=2,
        random_state=0,
        item_features=features,
    )
    assert {trial.params.get("item_feature_weight") for trial in named.trials} & {0.1, 10.0}
    with pytest.raises(ValueError, match="SGD has no features"):
        hmf.search(ratings, model=hmf.SGD(device="cpu"), trials=2, item_features=features)


def test_checks_whose_warnings_nobody_reads_are_left_out(plays, monkeypatch):
    checked: list[str] = []
    monkeypatch.setattr(PrecisionCheck, "_longest", lambda check, side: checked.append(side))
    model = hmf.ImplicitALS(4, iterations=1, device="cpu")
    with quiet():
        model.fit(plays)
    assert not checked
    model.fit(plays)
    assert checked == ["item", "user"]
