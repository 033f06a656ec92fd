"""The basis of least penalty: its algebra, and fits that change to it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridmf as hmf
from hybridmf.core.balance import balancing
from hybridmf.model.training import LocalRatings
from hybridmf.plan.make import make_plan
from support.half_sweeps import FITS, SMALL
from support.ratings import planted
from support.solvers import iterate


def random_grams(rank: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sides = [rng.standard_normal((rows, rank)) * 10.0 ** rng.uniform(-1, 1, rank) for _ in range(2)]
    return sides[0].T @ sides[0], sides[1].T @ sides[1]


@settings(max_examples=25)
@given(rank=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_both_sides_reach_the_same_gram_matrix(rank, seed):
    """Where the penalty is stationary, ``G A G = H B H``; and it is least there."""
    users, items = random_grams(rank, 3 * rank, seed)
    basis, inverse = balancing(users, items)
    np.testing.assert_allclose(basis @ inverse, np.eye(rank), atol=1e-6)
    ours, theirs = basis @ users @ basis, inverse @ items @ inverse
    np.testing.assert_allclose(ours, theirs, atol=1e-6 * np.abs(ours).max())
    least = np.trace(ours) + np.trace(theirs)
    assert least <= (np.trace(users) + np.trace(items)) * (1 + 1e-9)
    rng = np.random.default_rng(seed + 1)
    other = basis @ (np.eye(rank) + 0.1 * rng.standard_normal((rank, rank)))
    back = np.linalg.inv(other)
    assert np.trace(other.T @ users @ other) + np.trace(back @ items @ back.T) >= least * (1 - 1e-6)


def test_a_side_that_lacks_directions_leaves_finite_bases():
    users, items = random_grams(6, 3, 0)
    for basis in balancing(users, items):
        assert np.isfinite(basis).all()


@pytest.mark.parametrize("fill", [0.0, np.nan, np.inf])
def test_a_side_without_factors_changes_nothing(fill):
    users, _ = random_grams(3, 9, 0)
    for basis in (*balancing(users, np.full((3, 3), fill)), *balancing(np.full((3, 3), fill), users)):
        np.testing.assert_array_equal(basis, np.eye(3))


def solver_of(model: hmf.ExplicitALS | hmf.ImplicitALS, matrix: sp.csr_array):
    matrix = model._check_matrix(matrix)
    plan = make_plan(model._objective(), model._settings(), matrix.shape, matrix.nnz)
    ratings = LocalRatings(model, matrix).on_host(plan)
    state = model._initial_state(ratings, plan, model._objective())
    return model._solver(plan, model._objective(), ratings, state, 0)


@pytest.mark.parametrize("reorder", ["none", "both"])
@pytest.mark.parametrize("name", FITS)
def test_predictions_stay_and_the_penalty_falls(backend, name, reorder):
    cls, options = FITS[name]
    solver = solver_of(cls(device=backend, random_state=0, reorder=reorder, **options), SMALL)
    iterate(solver)
    before, objective = solver.state.on_host(), solver.objective_value()
    solver.balance()
    after = solver.state.on_host()
    products = [state.user.matrix @ state.item.matrix.T for state in (before, after)]
    np.testing.assert_allclose(products[1], products[0], atol=3e-6 * np.abs(products[0]).max())
    assert not np.allclose(after.user.matrix, before.user.matrix, rtol=1e-3)
    assert solver.objective_value() < objective
    if before.user.bias is not None:
        np.testing.assert_array_equal(after.user.bias, before.user.bias)


def test_rows_count_as_the_penalty_counts_them():
    """The balanced sides have the same ``sum_u s_u x_u x_u^T``, with s of the objective."""
    matrix = planted(60, 25, 0.3)
    for scaling in ("count", "none", 0.5):
        model = hmf.ExplicitALS(
            3, biases=False, regularization_scaling=scaling, device="cpu", dtype="float64", random_state=0
        )
        solver = solver_of(model, matrix)
        solver.update("item")
        solver.balance()
        grams = [
            (state.matrix * model._objective().row_scale("user", degrees)[:, None]).T @ state.matrix
            for state, degrees in (
                (solver.state.user, np.diff(matrix.indptr)),
                (solver.state.item, np.bincount(matrix.indices, minlength=matrix.shape[1])),
            )
        ]
        np.testing.assert_allclose(grams[0], grams[1], rtol=1e-8, atol=1e-10)


def test_backends_agree(backend):
    fits = [
        hmf.ExplicitALS(7, biases=False, balance=True, iterations=4, random_state=0, device=on).fit(SMALL)
        for on in ("cpu", backend)
    ]
    np.testing.assert_allclose(fits[1].user_factors, fits[0].user_factors, atol=2e-4)


def test_fewer_iterations_reach_a_lower_objective():
    matrix = planted(300, 200, 0.2)
    options = {"factors": 8, "regularization": 0.1, "device": "cpu", "random_state": 0}
    plain = hmf.ExplicitALS(biases=False, **options, iterations=12).fit(matrix)
    balanced = hmf.ExplicitALS(biases=False, **options, iterations=4, balance=True).fit(matrix)
    assert balanced.objective(matrix) < plain.objective(matrix)
    assert "balanced" in str(balanced.plan_)
    np.testing.assert_allclose(balanced.transform(matrix), balanced.user_factors_, rtol=1e-5, atol=1e-6)


def test_threads_and_resuming_change_no_bit(tmp_path):
    matrix, options = planted(300, 200, 0.2), {"factors": 6, "balance": True, "device": "cpu", "random_state": 0}
    whole = [
        hmf.ExplicitALS(biases=False, **options, iterations=4, num_threads=threads).fit(matrix) for threads in (1, 3)
    ]
    np.testing.assert_array_equal(whole[0].user_factors, whole[1].user_factors)
    hmf.ExplicitALS(biases=False, **options, iterations=2).fit(matrix, checkpoint=tmp_path)
    resumed = hmf.ExplicitALS(biases=False, **options, iterations=4).fit(matrix, resume_from=tmp_path)
    np.testing.assert_array_equal(resumed.user_factors, whole[0].user_factors)


def test_balance_is_validated():
    with pytest.raises(TypeError, match="balance"):
        hmf.ExplicitALS(biases=False, balance="yes").fit(SMALL)
