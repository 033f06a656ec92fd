"""Initial factors that users choose: by name, or arrays of an earlier fit."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.base import clone

import hybridmf as hmf
from hybridmf.ranks.transport.threads import run_ranks
from support.ratings import planted

RATINGS = planted(60, 40, 0.3)
OPTIONS = {"factors": 4, "random_state": 0}


def implicit(**options):
    return hmf.ImplicitALS(**OPTIONS | {"device": "cpu", "alpha": 3.0, "dtype": "float64"} | options)


def explicit(**options):
    return hmf.ExplicitALS(**OPTIONS | {"device": "cpu", "dtype": "float64", "regularization": 0.1} | options)


def factors_of(model):
    return model.user_factors_, model.item_factors_


def state_of(model):
    return (*factors_of(model), model.user_bias_, model.item_bias_)


def test_a_warm_start_continues_where_the_earlier_fit_stopped():
    """Of exact ALS, user factors (and biases) are all that the next iteration reads."""
    for make, taken in ((implicit, factors_of), (explicit, state_of)):
        long, short = make(iterations=9).fit(RATINGS), make(iterations=6).fit(RATINGS)
        users, _, *biases = taken(short)
        for items in (None, np.full((40, 4), 1e6)):
            known = (users, items) if not biases else (users, items, biases[0], None if items is None else biases[1])
            warm = make(iterations=3, init=known).fit(RATINGS)
            np.testing.assert_allclose(warm.user_factors_, long.user_factors_, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(warm.item_factors_, long.item_factors_, rtol=1e-9, atol=1e-11)
    cold = explicit(iterations=3).fit(RATINGS)
    assert warm.objective(RATINGS) < cold.objective(RATINGS)


@pytest.mark.parametrize(
    "options", [{"solver": "cg", "cg_steps": 1}, {"solver": "subspace", "block_size": 2}, {"balance": True}]
)
def test_other_solvers_start_from_both_sides(options):
    long, short = (implicit(iterations=n, **options).fit(RATINGS) for n in (5, 3))
    users, items = factors_of(short)
    warm = implicit(iterations=2, init=(users, items), **options).fit(RATINGS)
    np.testing.assert_allclose(warm.user_factors_, long.user_factors_, rtol=1e-9, atol=1e-11)
    other = implicit(iterations=2, init=(users, 3 * items), **options).fit(RATINGS)
    assert np.abs(other.user_factors_ - warm.user_factors_).max() > 1e-6


@pytest.mark.parametrize("cls", [hmf.SGD, hmf.CCD])
def test_sgd_and_ccd_start_from_both_sides(cls):
    options = OPTIONS | {"device": "cpu", "dtype": "float64", "biases": True}
    more = {"rate_schedule": "constant"} if cls is hmf.SGD else {}
    long, short = (cls(iterations=n, **options, **more).fit(RATINGS) for n in (5, 3))
    warm = cls(iterations=2, init=state_of(short), **options, **more).fit(RATINGS)
    for ours, theirs in zip(state_of(warm), state_of(long), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)
    drawn = cls(iterations=2, init=(None, short.item_factors_), **options, **more).fit(RATINGS)
    assert np.isfinite(drawn.user_factors_).all() and drawn.user_factors_.any()


@pytest.mark.parametrize("signed", [False, True])
def test_names(signed):
    drawn = []
    init = "signed" if signed else "nonnegative"
    model = implicit(init=init, iterations=1)
    original = model._initial_state
    model._initial_state = lambda *args: drawn.append(original(*args)) or drawn[0]
    model.fit(RATINGS)
    assert (drawn[0].user.matrix.min() < 0) == signed
    if not signed:
        np.testing.assert_array_equal(model.user_factors, implicit(iterations=1).fit(RATINGS).user_factors)


def test_rows_without_entries_stay_zero_and_arrays_are_not_touched():
    matrix = RATINGS.copy().tolil()
    matrix[3] = 0
    given = np.ones((60, 4), np.float32), np.ones((40, 4), np.float32)
    sgd = hmf.SGD(**OPTIONS, device="cpu", iterations=2, init=given).fit(sp.csr_array(matrix))
    assert not sgd.user_factors[3].any() and sgd.user_factors[2].any()
    assert all((array == 1).all() for array in given)


@pytest.mark.parametrize("kind", [implicit, explicit])
def test_devices_agree(kind, backend):
    known = state_of(kind(iterations=2).fit(RATINGS))
    known = known[:2] if kind is implicit else known
    expected = kind(iterations=2, init=known).fit(RATINGS)
    several = [backend] * 2 if backend == "cpu" else backend
    found = kind(iterations=2, init=known, device=several).fit(RATINGS)
    np.testing.assert_allclose(found.user_factors_, expected.user_factors_, rtol=1e-6, atol=1e-8)


def test_ranks_take_their_own_rows():
    known = state_of(explicit(iterations=2).fit(RATINGS))
    expected = explicit(iterations=2, init=known).fit(RATINGS)

    def rank(communicator):
        return hmf.scale.fit(explicit(iterations=2, init=known), RATINGS, communicator)

    first, *_ = run_ranks(3, rank)
    np.testing.assert_allclose(first.user_factors_, expected.user_factors_, rtol=1e-9, atol=1e-11)


def test_clones_files_and_checkpoints(tmp_path):
    known = factors_of(implicit(iterations=2).fit(RATINGS))
    model = implicit(iterations=2, init=known)
    assert model.get_params()["init"] is known and "init" in repr(model)
    copy = clone(model).fit(RATINGS, checkpoint=tmp_path / "run")
    np.testing.assert_array_equal(copy.user_factors_, model.fit(RATINGS).user_factors_)
    copy.save(tmp_path / "model")
    loaded = hmf.load(tmp_path / "model")
    assert loaded.init is None and json.dumps(loaded.get_params())
    resumed = implicit(iterations=4).fit(RATINGS, resume_from=tmp_path / "run")
    more = implicit(iterations=4, init=known).fit(RATINGS)
    np.testing.assert_array_equal(resumed.user_factors_, more.user_factors_)


USERS, ITEMS = np.ones((60, 4)), np.ones((40, 4))
WRONG = USERS.copy()
WRONG[5, 2] = np.nan


@pytest.mark.parametrize(
    ("init", "error", "message"),
    [
        ("uniform", ValueError, "init must be one of 'nonnegative', 'signed'"),
        (USERS, TypeError, "init must be None.*got a value of type ndarray"),
        ((USERS,), TypeError, "got 1 values"),
        ((None, None), ValueError, "neither user_factors nor item_factors"),
        ((None, ITEMS), ValueError, "item_factors only, which the exact solver replaces"),
        ((ITEMS, USERS), ValueError, r"user_factors has shape \(40, 4\), expected \(60, 4\)"),
        ((USERS, ITEMS[:, :3]), ValueError, r"item_factors has shape \(40, 3\), expected \(40, 4\)"),
        ((WRONG, None), ValueError, r"user_factors has the value nan at \[5, 2\]; expected numbers that are finite"),
        ((USERS * 1e300, None), ValueError, r"value 1e\+300 at \[0, 0\]; expected numbers that are finite in float32"),
        ((USERS * 1j, None), TypeError, "user_factors must be an array of real numbers, got ndarray of complex128"),
        ((sp.csr_array(USERS), None), TypeError, "array of real numbers, got csr_array of object"),
        ((USERS, ITEMS, np.ones(60), np.ones(40)), ValueError, "init has biases, and the model has none"),
    ],
)
def test_bad_values_are_refused(init, error, message):
    with pytest.raises(error, match=message):
        implicit(dtype="float32", init=init).fit(RATINGS)


def test_bad_biases_and_signs_are_refused():
    with pytest.raises(ValueError, match=r"user_bias has shape \(3,\), expected \(60,\)"):
        explicit(init=(USERS, ITEMS, np.ones(3), np.ones(40))).fit(RATINGS)
    with pytest.raises(ValueError, match="init has item_bias without item_factors"):
        explicit(init=(USERS, None, None, np.ones(40))).fit(RATINGS)
    with pytest.raises(ValueError, match='init="signed" contradicts nonnegative=True'):
        hmf.CCD(4, nonnegative=True, init="signed").fit(RATINGS)
    with pytest.raises(ValueError, match="item_factors has negative elements, and nonnegative=True"):
        hmf.CCD(4, nonnegative=True, init=(USERS, -ITEMS)).fit(RATINGS)


def test_frames_of_factors_are_refused():
    """Their index may name the rows in another order."""
    frame = pd.DataFrame(np.ones((3, 2)), index=[2, 1, 0])
    with pytest.raises(TypeError, match="init has a frame, whose index is not matched"):
        hmf.ExplicitALS(2, init=(frame, None), device="cpu").fit(np.eye(3))


@pytest.mark.parametrize("held_out", [hmf.Ratings(np.eye(3)), sp.eye_array(3, format="csr")])
def test_ratings_in_the_place_of_y_are_refused(held_out):
    with pytest.raises(TypeError, match=r"y is ignored.*validation="):
        hmf.ExplicitALS(2, device="cpu").fit(np.eye(3), held_out)
