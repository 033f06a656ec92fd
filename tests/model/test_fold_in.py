"""Factors of new rows: the exact solution for given factors of the other side."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from hybridmf.errors import NotPositiveDefiniteError, RatingsError
from support import reference
from support.messages import says
from support.ratings import planted
from support.served_models import KINDS, N_ITEMS, fitted, labelled, make, outcome, user_rows

INEXACT = ({"solver": "cg"}, {"solver": "subspace", "block_size": 2})

# ----------------------------------------------------------------------------------------------------------- transform


EXACT = [{}, {"assembly": "rank1"}, {"assembly": "blas3"}, {"num_threads": 1}]
SOME_KINDS = ("explicit", "biases", "implicit64")
"""Without and with biases, implicit feedback, both types; others differ from them in one of these alone."""
NEARLY = [{"assembly": "bals"}, {"reorder": "both"}, {"reorder": True}]


@pytest.mark.parametrize(("kind", "options"), [*product(KINDS, EXACT[:1]), *product(SOME_KINDS, EXACT[1:])])
def test_training_rows_fold_to_their_training_factors(kind, options):
    model = fitted(kind, **options)
    rows = user_rows(model)
    np.testing.assert_array_equal(model.transform(planted()), rows)
    np.testing.assert_array_equal(model.transform(planted()[[5, 5, 2]]), rows[[5, 5, 2]])
    np.testing.assert_array_equal(model.transform(planted().toarray()), rows)
    assert model.transform(planted()).dtype == model.user_factors_.dtype


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("options", NEARLY)
def test_training_rows_fold_to_their_training_factors_up_to_rounding(kind, options):
    model = fitted(kind, **options)
    np.testing.assert_allclose(model.transform(planted()), user_rows(model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fold_in_is_the_reference(kind):
    model, rows = fitted(kind), planted(9, N_ITEMS, seed=3)
    state, objective = model._learned.state, model._learned.objective
    expected = reference.half_sweep(rows, state.item, state.mean, objective)
    found = model.transform(rows)
    np.testing.assert_allclose(found[:, :4], expected.matrix, rtol=2e-3, atol=2e-3)
    if expected.bias is not None:
        np.testing.assert_allclose(found[:, 4], expected.bias, rtol=2e-3, atol=2e-3)
        model.partial_fit_users(np.arange(9), rows)
        np.testing.assert_allclose(model.user_bias_[:9], expected.bias, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", INEXACT)
def test_models_of_inexact_solvers_fold_in_exactly(options):
    model = fitted("implicit64", **options)
    expected = reference.half_sweep(planted(), model._learned.state.item, 0.0, model._learned.objective)
    np.testing.assert_allclose(model.transform(planted()), expected.matrix, rtol=1e-8, atol=1e-10)


def test_rows_without_entries_fold_to_zero():
    for kind in KINDS:
        model = fitted(kind)
        width = 4 + (model.user_bias_ is not None)
        np.testing.assert_array_equal(model.transform(sp.csr_array((2, N_ITEMS))), np.zeros((2, width)))
        assert model.transform(sp.csr_array((0, N_ITEMS))).shape == (0, width)


def test_explicit_zeros_of_sparse_rows_are_ratings_for_explicit_feedback_only():
    rows = planted()[[3]]
    with_zero = sp.csr_array(rows + sp.csr_array(([1.0], ([0], [0])), shape=rows.shape))
    with_zero.data[0] = 0
    explicit, implicit = fitted("explicit"), fitted("implicit")
    assert not np.array_equal(explicit.transform(with_zero), explicit.transform(rows))
    np.testing.assert_array_equal(implicit.transform(with_zero), implicit.transform(with_zero.toarray()))


@pytest.mark.parametrize("method", ["transform", "predict", "score"])
def test_wrong_orientation_names_both_axes_and_the_transpose(method):
    name = "users" if method == "predict" else "user_items"
    expected = says(f"{name} has shape (40, 60), expected (n_rows, n_items=40)", "rows are users and columns are items",
                    f"pass {name}.T")  # fmt: skip
    for matrix in (planted().T, planted().T.toarray()):
        with pytest.raises(RatingsError, match=expected):
            getattr(fitted(), method)(matrix)
    with pytest.raises(RatingsError, match=r"expected \(n_rows, n_items=40\)$"):
        getattr(fitted(), method)(np.ones((3, 7)))


def test_a_row_that_cannot_be_folded_in_is_named():
    model = fitted("explicit64")
    model.set_params(regularization=0.0).fit(sp.csr_array(np.random.default_rng(0).random((20, 20)) + 0.5))
    rows = np.zeros((3, 20))
    rows[:2], rows[2, :2] = 1.0, 1.0
    with pytest.raises(NotPositiveDefiniteError, match=says("user 2 are not positive definite", "(now 0)")) as caught:
        model.transform(rows)
    assert (caught.value.side, caught.value.row) == ("user", 2)


def test_feature_names_of_a_data_frame():
    frame = pd.DataFrame(planted().toarray(), columns=[f"i{k}" for k in range(N_ITEMS)])
    model = make().fit(frame)
    np.testing.assert_array_equal(model.transform(frame), make().fit(planted()).user_factors_)
    assert list(model.feature_names_in_) == list(frame.columns)
    assert model.get_feature_names_out().tolist() == [f"explicitals{k}" for k in range(4)]


def test_a_frame_with_other_columns_is_refused():
    frame = pd.DataFrame(planted().toarray(), columns=[f"i{k}" for k in range(N_ITEMS)])
    with pytest.raises(ValueError, match="feature names"):
        make().fit(frame).transform(frame[frame.columns[::-1]])


def test_a_frame_may_have_a_column_called_user_items():
    make(iterations=1).fit(pd.DataFrame(planted().toarray(), columns=["user_items", *map(str, range(1, N_ITEMS))]))


@pytest.mark.parametrize("method", ["transform", "score", "objective", "validation"])
def test_ratings_with_other_labels_are_refused_or_aligned(method):
    order = np.random.default_rng(0).permutation(N_ITEMS)
    same, other = labelled(), labelled(planted()[:, order], items=[f"i{k}" for k in order])
    model = make("explicit64").fit(same)

    def result(ratings):
        if method == "validation":
            return make("explicit64").fit(same, validation=ratings).history_[-1]["rmse"]
        return getattr(model, method)(ratings)

    found = outcome(lambda: result(other))
    if isinstance(found, ValueError):
        assert "item" in str(found)
    else:
        np.testing.assert_allclose(found, result(same), rtol=1e-6)
