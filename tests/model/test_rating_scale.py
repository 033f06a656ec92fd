"""Ratings in other units: the same models in these units, for every explicit method and on every backend."""

from __future__ import annotations

import logging
import math
from itertools import product

import numpy as np
import pytest
import scipy.sparse as sp

import hybridmf as hmf
from hybridmf.core.objective import SCALES, Objective, rating_scale
from hybridmf.errors import RatingsError
from hybridmf.model.learned import scale_of
from hybridmf.plan.sgd import BIASED_RATES, DEFAULT_RATES, RATE_SCHEDULES
from support.devices import serve_cuda
from support.messages import says
from support.ratings import planted

COMMON = {"factors": 5, "iterations": 4, "random_state": 0, "num_threads": 2}
IMPLICIT = COMMON | {"device": "cpu"}
SMALL = planted(24, 16, 0.4)
SCHEDULES = ["msgd", "blocks", "hogwild"]


def scaled(matrix, factor: float, shift: float = 0.0):
    """Ratings times a factor, plus a shift."""
    out = matrix.astype(np.float64)
    out.data = out.data * factor + shift
    return out


def fit(cls, matrix, factor: float = 1.0, shift: float = 0.0, **given):
    """A model of scaled ratings, lambda scaled with them; lambda_b follows by itself."""
    given = COMMON | {"device": "cpu", "regularization": 0.05} | given
    given["regularization"] *= factor
    return cls(**given).fit(scaled(matrix, factor, shift))


def assert_scaled(model, base, factor: float, rtol: float) -> None:
    """Factors grow with the root of the ratings' factor, biases with the factor."""
    root = math.sqrt(factor)
    for name in ("user_factors_", "item_factors_"):
        ours, theirs = getattr(model, name) / root, getattr(base, name)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * np.abs(theirs).max())
    for ours, theirs in ((model.user_bias_, base.user_bias_), (model.item_bias_, base.item_bias_)):
        if theirs is not None:
            np.testing.assert_allclose(ours / factor, theirs, rtol=rtol, atol=rtol * np.abs(theirs).max())


# ------------------------------------------------------------------------------------------------ the scale itself


def test_scale():
    values = np.array([1.0, 2.0, 3.0, 6.0])
    sums = values.sum(), (values**2).sum(), 4
    assert rating_scale(*sums, biases=False) == math.sqrt(12.5)
    assert rating_scale(*sums, biases=True) == pytest.approx(values.std(), rel=1e-15)
    assert rating_scale(0.0, 0.0, 3, biases=True) == rating_scale(0.0, 0.0, 3, biases=False) == 1
    assert rating_scale(20.0, 100.0, 4, biases=True) == 5  # all are 5
    assert rating_scale(1e200, math.inf, 4, biases=False) == SCALES[1]
    assert rating_scale(1e-40, 1e-80, 1, biases=False) == SCALES[0]


@pytest.mark.parametrize("biases", [False, True])
def test_scale_of_a_store(biases, tmp_path):
    """A store has the bits of the same ratings in memory."""
    matrix = planted(300, 200, 0.5)
    store = hmf.convert(hmf.Ratings.from_matrix(matrix), tmp_path / "store", slab_bytes=1 << 16)
    given = {"factors": 3, "iterations": 1, "device": "cpu", "random_state": 0, "biases": biases}
    stored, in_memory = (hmf.ExplicitALS(**given).fit(each) for each in (store, matrix))
    np.testing.assert_allclose(stored.user_factors, in_memory.user_factors, rtol=1e-5, atol=1e-6)
    explicit, implicit = Objective.explicit(0.1, "count", biases), Objective.implicit(0.1, "none", 1.0, 1.0)
    slabs = hmf.ExplicitALS(**given)._check_matrix(store)
    assert scale_of(slabs, explicit) == scale_of(slabs.transposed(), explicit) == scale_of(matrix, explicit)
    assert scale_of(matrix, implicit) == 1


# ------------------------------------------------------------------------------------------------ SGD


@pytest.mark.parametrize(
    ("schedule", "rate_schedule", "biases"),
    [
        *(("msgd", rate_schedule, biases) for rate_schedule in RATE_SCHEDULES for biases in (False, True)),
        *((schedule, rate_schedule, True) for schedule in SCHEDULES[1:] for rate_schedule in RATE_SCHEDULES),
        *((schedule, RATE_SCHEDULES[0], False) for schedule in SCHEDULES[1:]),
    ],
)
def test_sgd_is_equivariant(schedule, rate_schedule, biases):
    """To every factor up to rounding, to powers of 4 bit for bit; with the default learning rates."""
    given = {"schedule": schedule, "rate_schedule": rate_schedule, "biases": biases, "num_threads": 1}
    base = fit(hmf.SGD, SMALL, **given)
    assert_scaled(fit(hmf.SGD, SMALL, 1 / 64, **given), base, 1 / 64, 0.0)
    for factor in (0.01, 1000.0):
        model = fit(hmf.SGD, SMALL, factor, **given)
        assert_scaled(model, base, factor, 1e-4)
        assert model.objective(scaled(SMALL, factor)) == pytest.approx(factor**2 * base.objective(SMALL), rel=1e-4)
    if biases:
        assert_scaled(fit(hmf.SGD, SMALL, 20.0, 100.0, **given), base, 20.0, 1e-3)


@pytest.mark.parametrize("biases", [False, True])
def test_sgd_of_several_ranks_is_equivariant(biases):
    given = {"device": ["cpu", "cpu"], "biases": biases}
    base = fit(hmf.SGD, SMALL, **given)
    assert_scaled(fit(hmf.SGD, SMALL, 16.0, **given), base, 16.0, 0.0)
    assert_scaled(fit(hmf.SGD, SMALL, 1000.0, **given), base, 1000.0, 1e-4)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("schedule", ["msgd", "batch_hogwild"])
def test_sgd_on_a_gpu_is_equivariant(device, schedule, biases, monkeypatch):
    serve_cuda(device, monkeypatch)
    if schedule == "batch_hogwild" and device.spec.name != "emulated":
        pytest.skip("no two runs agree")
    given = {"device": "cuda", "schedule": schedule, "biases": biases, "iterations": 2}
    base = fit(hmf.SGD, SMALL, **given)
    assert_scaled(fit(hmf.SGD, SMALL, 16.0, **given), base, 16.0, 0.0)
    assert_scaled(fit(hmf.SGD, SMALL, 1000.0, **given), base, 1000.0, 1e-4)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rate_schedule", RATE_SCHEDULES)
def test_sgd_learns_in_any_unit(rate_schedule, biases):
    """Default learning rates, no word of the unit; before, ratings times 20 diverged."""
    matrix = planted(90, 60, 0.4)
    for factor, shift in ((0.01, 0.0), (1000.0, 0.0), (1.0, 100.0)):
        if shift and not biases:
            continue
        given = {"rate_schedule": rate_schedule, "biases": biases, "iterations": 20}
        model = fit(hmf.SGD, matrix, factor, shift, **given)
        errors = model.predict(*matrix.nonzero()) - scaled(matrix, factor, shift).data
        assert np.sqrt(np.mean(errors**2)) < 0.8 * factor * matrix.data.std()


@pytest.mark.parametrize(
    ("value", "rate_schedule", "biases"),
    [
        *product((0.0, 5.0), RATE_SCHEDULES, (False, True)),
        *product((-3.0,), RATE_SCHEDULES[:1], (False, True)),
    ],
)
def test_sgd_of_equal_ratings(value, rate_schedule, biases):
    matrix = sp.csr_array((np.full(SMALL.nnz, value), SMALL.indices, SMALL.indptr), shape=SMALL.shape)
    given = COMMON | {"iterations": 20, "rate_schedule": rate_schedule, "biases": biases}
    model = hmf.SGD(**given, device="cpu").fit(matrix)
    assert np.isfinite(model.user_factors).all()
    assert np.isfinite(model.item_factors).all()
    if biases:
        errors = model.predict(*SMALL.nonzero()) - value
        assert np.sqrt(np.mean(errors**2)) < 0.1 * max(1, abs(value))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scales_without_room_are_refused(factor, dtype):
    with pytest.raises(RatingsError, match=rf"SGD in {dtype} takes .* divide ratings and regularization by"):
        fit(hmf.SGD, SMALL, factor, dtype=dtype)


@pytest.mark.parametrize("rate_schedule", RATE_SCHEDULES)
@pytest.mark.parametrize(("factor", "dtype"), [(1e8, "float32"), (1e-8, "float32"), (1e24, "float64")])
def test_extreme_scales_with_room(factor, dtype, rate_schedule):
    given = {"rate_schedule": rate_schedule, "dtype": dtype, "biases": True}
    assert_scaled(fit(hmf.SGD, SMALL, factor, **given), fit(hmf.SGD, SMALL, **given), factor, 1e-3)


def test_a_resumed_fit_has_the_same_unit(tmp_path):
    matrix = scaled(SMALL, 20.0)
    given = COMMON | {"device": "cpu", "biases": True, "rate_schedule": "rpcs"}
    whole = hmf.SGD(**given).fit(matrix)
    hmf.SGD(**given | {"iterations": 2}).fit(matrix, checkpoint=tmp_path)
    resumed = hmf.SGD(**given).fit(matrix, resume_from=tmp_path)
    np.testing.assert_array_equal(resumed.user_factors, whole.user_factors)


def test_default_rates_go_with_biases():
    for rate_schedule in RATE_SCHEDULES:
        for biases, rates in ((False, DEFAULT_RATES), (True, BIASED_RATES)):
            method = hmf.SGD(rate_schedule=rate_schedule, biases=biases)._settings().method
            assert method.learning_rate == rates[rate_schedule]


# ------------------------------------------------------------------------------------------------ ALS and CCD++


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (hmf.ExplicitALS, {}),
        (hmf.ExplicitALS, {"biases": True}),
        (hmf.ExplicitALS, {"solver": "cg", "biases": False, "regularization_scaling": "none", "regularization": 0.5}),
        (hmf.CCD, {}),
        (hmf.CCD, {"nonnegative": True, "inner_iterations": 2}),
    ],
)
def test_other_methods_are_equivariant(cls, given):
    base = fit(cls, SMALL, dtype="float64", **given)
    for factor in (0.01, 16.0, 1000.0):
        assert_scaled(fit(cls, SMALL, factor, dtype="float64", **given), base, factor, 1e-6)


# ------------------------------------------------------------------------------------------------ collapse


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.SGD, hmf.CCD])
def test_factors_that_shrink_to_zero_are_reported(cls, biases, caplog):
    """A lambda for stars on ratings a hundredth as large: zero factors are the minimum."""
    matrix = planted(60, 40, 0.5)
    given = COMMON | {"device": "cpu", "iterations": 15, "biases": biases}
    with caplog.at_level(logging.WARNING, "hybridmf"):
        cls(**given, regularization=0.05).fit(scaled(matrix, 0.005))
    assert "factors have shrunk to zero" in caplog.text
    assert "regularization=0.05 is too strong for ratings of this scale; try regularization=" in caplog.text
    suggested = float(caplog.text.split("try regularization=")[1].split()[0])
    caplog.clear()
    for factor, regularization in ((0.005, suggested), (1.0, 0.05)):
        with caplog.at_level(logging.WARNING, "hybridmf"):
            cls(**given | {"regularization": regularization}).fit(scaled(matrix, factor))
    assert "shrunk" not in caplog.text


def test_zero_ratings_are_equal_ratings(caplog):
    zeros = sp.csr_array((np.zeros(SMALL.nnz), SMALL.indices, SMALL.indptr), shape=SMALL.shape)
    with caplog.at_level(logging.WARNING, "hybridmf"):
        hmf.ExplicitALS(**COMMON, device="cpu").fit(zeros)
    assert "ratings are 0, so there is nothing to predict" in caplog.text and "shrunk" not in caplog.text


def test_implicit_factors_that_shrink_to_nothing_are_named(caplog):
    with caplog.at_level(logging.WARNING, "hybridmf"):
        hmf.ImplicitALS(regularization=1e4, **IMPLICIT).fit(planted(60, 40, 0.5))
    assert "factors have shrunk to nothing" in caplog.text and "regularization=10000 is too strong" in caplog.text
    assert "lower it, or increase alpha" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hybridmf"):
        hmf.ImplicitALS(regularization=1e4, **IMPLICIT | {"alpha": 0.0}).fit(planted(60, 40, 0.5))
    assert caplog.text.rstrip().endswith("is too strong here; lower it")  # alpha of 0 is a choice
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hybridmf"):
        hmf.ImplicitALS(regularization=0.01, **IMPLICIT).fit(planted(60, 40, 0.5))
    assert not caplog.text


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.SGD, hmf.CCD])
def test_equal_ratings_are_named(cls, caplog):
    """Likes that were taken for ratings: the error of predictions is 0, and the model says nothing."""
    with caplog.at_level(logging.WARNING, "hybridmf"):
        cls(factors=2, iterations=2, device="cpu", random_state=0).fit(planted(60, 40, 0.5) > 0)
    assert "ratings are 1, so there is nothing to predict" in caplog.text and "use ImplicitALS" in caplog.text


def test_implicit_feedback_without_a_preference_is_refused():
    dislikes = -planted(60, 40, 0.5)
    for given in (dislikes, hmf.Ratings(dislikes), hmf.PreparedRatings(dislikes)):
        with pytest.raises(RatingsError, match=says("user_items has no value above 0 (the largest is -0.5)")):
            hmf.ImplicitALS(**IMPLICIT).fit(given)
    dislikes.data[0] = 1
    assert hmf.ImplicitALS(regularization=0.01, **IMPLICIT).fit(dislikes).predict(0, dislikes.indices[0]) > 0.1
