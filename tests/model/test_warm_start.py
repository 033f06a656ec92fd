"""Fits that start from another model, or keep the factors of one side."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator

import hybridmf as hmf
from hybridmf.core.validate import as_csr
from hybridmf.ranks.transport.threads import run_ranks
from support import reference
from support.ratings import planted
from support.stores import SLAB

MATRIX = planted(60, 40, 0.3)
OPTIONS = {"factors": 4, "random_state": 0, "dtype": "float64", "iterations": 2}
IMPLICIT = hmf.ImplicitALS(**OPTIONS, device="cpu", alpha=3.0)
EXPLICIT = hmf.ExplicitALS(**OPTIONS, device="cpu", regularization=0.1)
CCD = hmf.CCD(**OPTIONS, device="cpu", regularization=0.1, biases=True)


def labelled(rows, columns) -> hmf.Ratings:
    """Some rows and columns of the matrix; users are named u0, u1, ..., items i0, i1, ..."""
    part = MATRIX[rows][:, columns]
    return hmf.Ratings.from_matrix(part, user_ids=[f"u{k}" for k in rows], item_ids=[f"i{k}" for k in columns])


EARLIER = labelled(range(50), range(35))
SHUFFLED = np.random.default_rng(1).permutation(60), np.random.default_rng(2).permutation(40)
LATER = labelled(*SHUFFLED)


def started(model, ratings):
    """The initial factors of a fit."""
    found = []
    original = model._initial_state
    model._initial_state = lambda *args: found.append(original(*args).on_host()) or found[0]
    model.fit(ratings)
    return found[0]


@pytest.mark.parametrize("model", [EXPLICIT, CCD, IMPLICIT], ids=lambda model: type(model).__name__)
def test_rows_are_matched_by_label_and_new_ones_drawn(model, caplog):
    caplog.set_level(logging.INFO, logger="hybridmf")
    earlier = clone(model).fit(EARLIER)
    state = started(clone(model).set_params(init=earlier), LATER)
    drawn = started(clone(model), LATER)
    for side, order in zip(("user", "item"), SHUFFLED, strict=True):
        if side == "item" and model is not CCD:
            continue  # exact ALS solves items before it reads them
        theirs = earlier._learned.state.side(side)
        for place, name in enumerate(order):
            row = state.side(side).matrix[place]
            known = name < len(theirs) and theirs.matrix[name].any()
            np.testing.assert_array_equal(row, (theirs.matrix[name] if known else drawn.side(side).matrix[place]))
            if known and theirs.bias is not None:
                assert state.side(side).bias[place] == theirs.bias[name]
    assert "init: factors of 49 of 60 users and 34 of 40 items are those of the model" in caplog.text


def test_a_model_as_init_continues_its_fit(backend):
    for model in (IMPLICIT, EXPLICIT):
        long = clone(model).set_params(iterations=5).fit(LATER)
        short = clone(model).set_params(iterations=3).fit(LATER)
        warm = clone(model).set_params(init=short, device=backend).fit(LATER)
        np.testing.assert_allclose(warm.user_factors_, long.user_factors_, rtol=1e-7, atol=1e-9)
        assert short.n_iter_ == 3  # and is as it was


def test_a_model_continues_itself():
    model = clone(EXPLICIT).fit(MATRIX)
    long = clone(EXPLICIT).set_params(iterations=4).fit(MATRIX)
    model.set_params(init=model).fit(MATRIX)
    np.testing.assert_allclose(model.user_factors_, long.user_factors_, rtol=1e-9)
    assert "init=..." in repr(model)


def test_files_clones_and_ranks(tmp_path):
    earlier = clone(EXPLICIT).fit(EARLIER)
    warm = clone(EXPLICIT).set_params(init=earlier).fit(LATER)
    warm.save(tmp_path / "model")
    assert hmf.load(tmp_path / "model").init is None
    again = clone(clone(EXPLICIT).set_params(init=FrozenEstimator(earlier))).fit(LATER)
    np.testing.assert_array_equal(again.user_factors_, warm.user_factors_)
    with pytest.raises(ValueError, match=r"init is a model that is not fitted.*FrozenEstimator"):
        clone(warm).fit(LATER)
    model = clone(EXPLICIT).set_params(init=FrozenEstimator(earlier))
    first, *_ = run_ranks(2, lambda communicator: hmf.scale.fit(clone(model), LATER, communicator))
    np.testing.assert_allclose(first.user_factors_, warm.user_factors_, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("init", "ratings", "message"),
    [
        (clone(IMPLICIT).set_params(factors=3).fit(MATRIX), MATRIX, "a model of 3 factors, and this one has factors=4"),
        (clone(IMPLICIT).fit(MATRIX), MATRIX[:50], "user_items has 50 users and the model given as init 60"),
        (clone(IMPLICIT).fit(MATRIX), LATER, "has user labels and the model given as init only positions"),
        (clone(IMPLICIT).fit(EARLIER), labelled(range(50, 60), range(35, 40)), "factors of none of these users and"),
        (clone(EXPLICIT).fit(MATRIX), MATRIX, "init has biases, and the model has none"),
    ],
)
def test_models_that_do_not_fit_are_refused(init, ratings, message):
    with pytest.raises(ValueError, match=message):
        clone(IMPLICIT).set_params(init=FrozenEstimator(init)).fit(ratings)


# ------------------------------------------------------------------------------------------------------ frozen sides


@pytest.mark.parametrize("freeze", ["user", "item"])
@pytest.mark.parametrize("model", [IMPLICIT, EXPLICIT], ids=lambda model: type(model).__name__)
def test_one_side_is_solved_for_the_other(model, freeze, backend):
    known = clone(model).fit(MATRIX)._learned.state.on_host()
    matrix = as_csr(MATRIX[::-1].copy(), dtype=np.float64)
    empty = matrix.copy().tolil()
    empty[3], empty[:, 5] = 0, 0
    matrix = as_csr(sp.csr_array(empty), dtype=np.float64)
    given = tuple(known.side(side).matrix if side == freeze else None for side in ("user", "item"))
    given += tuple(known.side(side).bias if side == freeze else None for side in ("user", "item"))
    init = given if model is EXPLICIT else given[:2]
    fitted = clone(model).set_params(init=init, device=backend).fit(matrix, freeze=freeze, callback=lambda m, r: None)
    state, objective = fitted._learned.state, fitted._learned.objective
    np.testing.assert_array_equal(state.side(freeze).matrix, known.side(freeze).matrix)  # rows without entries as well
    other = "item" if freeze == "user" else "user"
    rows = matrix if other == "user" else matrix.T.tocsr()
    expected = reference.half_sweep(rows, known.side(freeze), state.mean, objective, other)
    np.testing.assert_allclose(state.side(other).matrix, expected.matrix, rtol=1e-7, atol=1e-9)
    if model is EXPLICIT:
        np.testing.assert_array_equal(state.side(freeze).bias, known.side(freeze).bias)
        np.testing.assert_allclose(state.side(other).bias, expected.bias, rtol=1e-7, atol=1e-9)
    assert fitted.n_iter_ == 1  # a second half sweep would find the same
    assert f"{freeze} factors are frozen" in str(fitted.plan_)
    value = reference.objective_value(matrix, state, objective)
    assert fitted.history_[-1]["objective"] == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize("freeze", ["user", "item"])
def test_ccd_keeps_a_side(freeze, backend):
    matrix = planted(30, 20, 0.5)
    known = clone(CCD).set_params(regularization=0.5).fit(matrix)
    model = clone(known).set_params(init=FrozenEstimator(known), device=backend, iterations=15)
    model.fit(2 * matrix, freeze=freeze)
    ours, theirs = model._learned.state, known._learned.state
    np.testing.assert_array_equal(ours.side(freeze).matrix, theirs.side(freeze).matrix)
    np.testing.assert_array_equal(ours.side(freeze).bias, theirs.side(freeze).bias)
    other = "item" if freeze == "user" else "user"
    rows = as_csr(2 * matrix if other == "user" else 2 * matrix.T, dtype=np.float64)
    exact = reference.half_sweep(rows, theirs.side(freeze), ours.mean, model._learned.objective, other)
    np.testing.assert_allclose(ours.side(other).matrix, exact.matrix, rtol=1e-4, atol=1e-5)


def test_approximate_solvers_and_several_devices_continue():
    known = clone(IMPLICIT).fit(MATRIX)
    exact = clone(IMPLICIT).set_params(init=FrozenEstimator(known)).fit(2 * MATRIX, freeze="item")
    for options in ({"solver": "cg"}, {"solver": "subspace", "block_size": 2}, {"device": ["cpu", "cpu"]}):
        model = clone(IMPLICIT).set_params(init=FrozenEstimator(known), iterations=80, **options)
        model.fit(2 * MATRIX, freeze="item")
        assert model.n_iter_ == (1 if "device" in options else 80)
        np.testing.assert_array_equal(model.item_factors_, known.item_factors_)
        np.testing.assert_allclose(model.user_factors_, exact.user_factors_, rtol=1e-4, atol=1e-6)


def test_several_gpus_keep_a_side(gpus):
    matrix = planted(30, 20, 0.3)
    known = clone(IMPLICIT).fit(matrix)
    model = clone(IMPLICIT).set_params(init=FrozenEstimator(known), device=gpus(2), solver="cg", iterations=20)
    model.fit(2 * matrix, freeze="item")
    exact = clone(IMPLICIT).set_params(init=FrozenEstimator(known)).fit(2 * matrix, freeze="item")
    np.testing.assert_allclose(model.user_factors_, exact.user_factors_, rtol=1e-4, atol=1e-6)


def test_a_store_keeps_a_side(tmp_path, backend):
    store = hmf.convert(hmf.Ratings.from_matrix(MATRIX), tmp_path / "store", slab_bytes=SLAB)
    known = clone(IMPLICIT).fit(MATRIX)
    options = {"init": FrozenEstimator(known), "solver": "cg", "device": backend, "iterations": 3}
    streamed = clone(IMPLICIT).set_params(**options).fit(store, freeze="user")
    memory = clone(IMPLICIT).set_params(**options).fit(MATRIX, freeze="user")
    np.testing.assert_allclose(streamed.item_factors_, memory.item_factors_, rtol=1e-9, atol=1e-11)


def test_a_resumed_fit_keeps_the_factors_of_init(tmp_path):
    known, other = (clone(IMPLICIT).set_params(random_state=seed).fit(MATRIX) for seed in (0, 1))
    model = clone(IMPLICIT).set_params(init=FrozenEstimator(known), solver="cg")
    model.fit(2 * MATRIX, freeze="item", checkpoint=tmp_path)
    more = clone(model).set_params(iterations=3).fit(2 * MATRIX, freeze="item", resume_from=tmp_path)
    straight = clone(model).set_params(iterations=3).fit(2 * MATRIX, freeze="item")
    np.testing.assert_array_equal(more.user_factors_, straight.user_factors_)
    with pytest.raises(ValueError, match="resume_from holds other item factors than init"):
        model.set_params(init=FrozenEstimator(other)).fit(2 * MATRIX, freeze="item", resume_from=tmp_path)


@pytest.mark.parametrize(
    ("model", "freeze", "message"),
    [
        (IMPLICIT, "both", "freeze must be one of 'user', 'item'"),
        (IMPLICIT, "item", r"init has none; use init=model, or init=\(None, item_factors\)"),
        (clone(IMPLICIT).set_params(init=(np.ones((60, 4)), None)), "item", "init has none"),
        (clone(IMPLICIT).set_params(init=(np.ones((60, 4)), None), balance=True), "user", "balance=True changes"),
        (hmf.SGD(4, init=(np.ones((60, 4)), None)), "user", "freeze='user' does not apply to SGD"),
    ],
)
def test_bad_requests_are_refused(model, freeze, message):
    with pytest.raises(ValueError, match=message):
        model.fit(MATRIX, freeze=freeze)


def test_a_frozen_side_has_no_new_rows():
    earlier = FrozenEstimator(clone(IMPLICIT).fit(EARLIER))
    with pytest.raises(ValueError, match=r"freeze='item' needs factors of every item.*none of 5 of 40 \('i3\d', "):
        clone(IMPLICIT).set_params(init=earlier).fit(LATER, freeze="item")
