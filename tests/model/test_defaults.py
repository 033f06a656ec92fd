"""Defaults that follow the ratings: the same models in any unit, kept by files, and compared with popularity."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone

import hybridmf as hmf
from hybridmf.compare import default_models
from hybridmf.core import objective as objectives
from hybridmf.core.validate import as_csr
from hybridmf.errors import ModelFileError
from hybridmf.ranks.shares import WholeRatings
from hybridmf.ranks.transport.threads import run_ranks
from support.ranks import fit_rank
from support.ratings import planted

COMMON = {"factors": 3, "iterations": 3, "random_state": 0, "device": "cpu", "num_threads": 1}
EXPLICIT = {"als": hmf.ExplicitALS, "ccd": hmf.CCD, "sgd": hmf.SGD}
RATINGS = planted(40, 30, 0.4)
STD = float(RATINGS.data.std(dtype=np.float64))


def times(matrix: sp.csr_array, factor: float) -> sp.csr_array:
    """The ratings in another unit, in float64."""
    return sp.csr_array((matrix.data.astype(np.float64) * factor, matrix.indices, matrix.indptr), shape=matrix.shape)


# --------------------------------------------------------------------------------------------------- explicit ratings


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(sorted(EXPLICIT)), biases=st.booleans(), factor=st.floats(1e-4, 1e4))
def test_predictions_have_the_unit_of_the_ratings(kind, biases, factor):
    one, other = (
        EXPLICIT[kind](**COMMON, biases=biases, dtype="float64").fit(each) for each in (RATINGS, times(RATINGS, factor))
    )
    assert other.regularization_ == pytest.approx(factor * one.regularization_, rel=1e-12)
    users, items = RATINGS.nonzero()
    expected = one.predict(users, items, clip=False)
    np.testing.assert_allclose(other.predict(users, items, clip=False) / factor, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cls", "options", "multiple", "nu"),
    [
        (hmf.ExplicitALS, {}, 1.2, 0.5),
        (hmf.ExplicitALS, {"biases": False}, 0.1, 1.0),
        (hmf.ExplicitALS, {"regularization_scaling": "count"}, 0.1, 1.0),
        (hmf.ExplicitALS, {"regularization_scaling": "none"}, 14.4, 0.0),
        (hmf.CCD, {}, 1.2, 0.5),
        (hmf.SGD, {}, 0.05, 1.0),
        (hmf.SGD, {"biases": False}, 0.05, 1.0),
    ],
)
def test_lambda_is_a_multiple_of_the_standard_deviation(cls, options, multiple, nu):
    model = cls(**COMMON, **options).fit(RATINGS)
    assert model.regularization is None and model.regularization_ == pytest.approx(multiple * STD, rel=1e-6)
    assert model.regularization_scaling_ == nu
    assert (model.user_bias_ is None) == (options.get("biases") is False)


def test_each_side_has_the_lambda_of_its_power():
    model = hmf.ExplicitALS(**COMMON, regularization_scaling=("count", 0.5)).fit(RATINGS)
    assert model.regularization_ == pytest.approx((0.1 * STD, 1.2 * STD), rel=1e-6)
    assert model.regularization_scaling_ == (1.0, 0.5)


@pytest.mark.parametrize(("value", "spread"), [(4.0, 4.0), (-3.0, 3.0), (0.0, 1.0)])
@pytest.mark.parametrize("cls", EXPLICIT.values())
def test_equal_ratings_fall_back_to_their_root_mean_square(cls, value, spread):
    equal = sp.csr_array((np.full(RATINGS.nnz, value), RATINGS.indices, RATINGS.indptr), shape=RATINGS.shape)
    multiple = 0.05 if cls is hmf.SGD else 1.2
    assert cls(**COMMON).fit(equal).regularization_ == pytest.approx(multiple * spread)


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.CCD])
def test_a_given_lambda_keeps_the_scaling_by_count(cls):
    given = cls(**COMMON, regularization=0.05).fit(RATINGS)
    whole = cls(**COMMON, regularization=0.05, regularization_scaling="count", biases=True).fit(RATINGS)
    np.testing.assert_array_equal(given.user_factors, whole.user_factors)
    assert (given.regularization_, given.regularization_scaling_) == (0.05, 1.0)


def test_clones_and_grids_see_the_default():
    model = clone(hmf.ExplicitALS(**COMMON).fit(RATINGS))
    assert model.get_params()["regularization"] is None and "regularization" not in repr(model)
    assert model.set_params(regularization=0.3).fit(RATINGS).regularization_ == 0.3
    assert all(model.biases for model in default_models("explicit").values())


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.ImplicitALS])
def test_ranks_and_devices_find_the_same_lambda(cls):
    alone, two = (cls(**COMMON | {"device": device}).fit(RATINGS) for device in ("cpu", ["cpu", "cpu"]))

    def run(communicator):
        ratings = WholeRatings(as_csr(RATINGS, dtype=np.dtype(np.float32)))
        return fit_rank(cls(**COMMON), ratings, communicator)

    ranks = run_ranks(2, run, timeout=60)[0]
    assert two.regularization_ == alone.regularization_ == pytest.approx(ranks.regularization_, rel=1e-12)


# -------------------------------------------------------------------------------------------------- implicit feedback


@settings(max_examples=8, deadline=None)
@given(factor=st.floats(1e-3, 1e5))
def test_the_unit_of_counts_does_not_matter(factor):
    one, other = (hmf.ImplicitALS(**COMMON).fit(each) for each in (RATINGS, times(RATINGS, factor)))
    np.testing.assert_array_equal(one.user_factors, other.user_factors)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, (7.0, 0.0, 0.1)),
        ({"alpha": 2.0}, (0.01, 2.0, 1.0)),
        ({"regularization": 3.0}, (3.0, 1.0, 1.0)),
        ({"unobserved_weight": 0.5}, (0.01, 1.0, 0.5)),
        ({"regularization_scaling": "count"}, (0.01, 1.0, 1.0)),
    ],
)
def test_weights_left_out_beside_others_are_the_usual_ones(options, weights):
    model = hmf.ImplicitALS(**COMMON, **options).fit(planted(200, 150, 0.4))
    assert (model.regularization_, model.alpha_, model.unobserved_weight_) == weights


def test_small_data_get_a_smaller_lambda():
    model = hmf.ImplicitALS(**COMMON).fit(RATINGS)
    counts = [np.count_nonzero(RATINGS.toarray(), axis=axis).astype(float) for axis in (0, 1)]
    largest = math.prod(np.linalg.norm(each) for each in counts) / RATINGS.nnz
    assert model.regularization_ == pytest.approx(largest / 2) and model.regularization_ < 7
    assert np.abs(model.user_factors).max() > 0.1


def test_a_model_below_popularity_is_reported(caplog):
    train, held_out = hmf.split(hmf.datasets.synthetic("epinions", feedback="implicit", scale=0.03), random_state=0)
    options = COMMON | {"factors": 32}
    with caplog.at_level(logging.WARNING, "hybridmf"):
        below = hmf.ImplicitALS(**options, regularization=1e-4).fit(train, validation=held_out)
    popular = hmf.metrics.PopularityRecommender().fit(train)
    reached = hmf.evaluate(popular, held_out, train=train, metrics="ndcg@10")["ndcg@10"]
    assert (
        f"of the validation set is {below.history_[-1]['ndcg@10']:.4f}, and recommending the most popular items "
        f"reaches {reached:.4f}: increase regularization (now 0.0001) with alpha=1 and unobserved_weight=1"
    ) in caplog.text
    caplog.clear()
    train, held_out = hmf.split(hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.1), random_state=0)
    with caplog.at_level(logging.WARNING, "hybridmf"):
        hmf.ImplicitALS(**options).fit(train, validation=held_out)
        hmf.ExplicitALS(**options).fit(train, validation=held_out)
    assert "popular" not in caplog.text


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("cls", [*EXPLICIT.values(), hmf.ImplicitALS])
def test_files_keep_the_defaults_of_the_fit(cls, tmp_path, monkeypatch):
    model = cls(**COMMON).fit(RATINGS)
    model.save(tmp_path / "model")
    monkeypatch.setattr(objectives, "USUAL_DEGREE", 50)
    monkeypatch.setattr(objectives, "DEFAULT_IMPLICIT", {"regularization": 1.0, "alpha": 3.0, "unobserved_weight": 0.5})
    loaded = hmf.load(tmp_path / "model")
    assert loaded.regularization is None and loaded._learned.objective == model._learned.objective
    np.testing.assert_array_equal(loaded.transform(RATINGS), model.transform(RATINGS))


def test_a_checkpoint_of_the_same_objective_is_resumed(tmp_path):
    hmf.ExplicitALS(**COMMON, regularization=0.05, regularization_scaling="count").fit(RATINGS, checkpoint=tmp_path)
    options = COMMON | {"iterations": 5}
    assert hmf.ExplicitALS(**options, regularization=0.05).fit(RATINGS, resume_from=tmp_path).n_iter_ == 5
    with pytest.raises(
        ModelFileError, match=r"was written with regularization=0\.05, this model has regularization=None"
    ):
        hmf.ExplicitALS(**options, regularization_scaling="count").fit(RATINGS, resume_from=tmp_path)


def test_a_fit_with_defaults_is_resumed(tmp_path):
    hmf.ExplicitALS(**COMMON).fit(RATINGS, checkpoint=tmp_path)
    options = COMMON | {"iterations": 5}
    resumed = hmf.ExplicitALS(**options).fit(RATINGS, resume_from=tmp_path)
    np.testing.assert_array_equal(resumed.user_factors, hmf.ExplicitALS(**options).fit(RATINGS).user_factors)
