"""Small fitted models of each kind, and comparisons of their answers."""

from __future__ import annotations

import copy
import functools

import numpy as np

import hybridmf as hmf
from support.ratings import planted

M, N_ITEMS = 60, 40
EMPTY_USER, EMPTY_ITEM = M // 2, N_ITEMS // 3  # of `planted()`
KINDS = {
    "explicit": (hmf.ExplicitALS, {"biases": False}),
    "biases": (hmf.ExplicitALS, {"biases": True}),
    "implicit": (hmf.ImplicitALS, {"alpha": 3.0}),
    "explicit64": (hmf.ExplicitALS, {"biases": False, "dtype": "float64"}),
    "implicit64": (hmf.ImplicitALS, {"dtype": "float64"}),
    "biases64": (hmf.ExplicitALS, {"biases": True, "dtype": "float64"}),
}


def make(kind: str = "explicit", **options):
    cls, own = KINDS[kind]
    common = {"factors": 4, "iterations": 3, "random_state": 0, "device": "cpu", "num_threads": 1}
    return cls(**(common | own | options))


@functools.cache
def _fit_once(kind: str, options: tuple):
    return make(kind, **dict(options)).fit(planted())


def fitted(kind: str = "explicit", **options):
    """A model of `planted()`, fitted once for all tests; each gets a copy of its own."""
    return copy.deepcopy(_fit_once(kind, tuple(sorted(options.items()))))


def labelled(matrix=None, users=None, items=None) -> hmf.Ratings:
    matrix = planted() if matrix is None else matrix
    users = [f"u{k}" for k in range(matrix.shape[0])] if users is None else users
    items = [f"i{k}" for k in range(matrix.shape[1])] if items is None else items
    return hmf.Ratings.from_matrix(matrix, user_ids=users, item_ids=items)


def snapshot(model) -> dict:
    """Everything a user can see of a fitted model."""
    everything = [np.arange(model.n_users)]
    return {
        "factors": (model.user_factors_.copy(), model.item_factors_.copy()),
        "top": model.recommend(*everything, N=5),
        "labels": (model.user_ids_, model.item_ids_),
        "sizes": (model.n_features_in_, model.n_iter_, len(model.history_), model.plan_, model.device_),
        "fold-in": model.transform(planted(7, model.n_items, seed=5)),
    }


def user_rows(model) -> np.ndarray:
    """User factors, and biases as a last column: what `transform` has for them."""
    return model.user_factors_ if model.user_bias_ is None else np.column_stack((model.user_factors_, model.user_bias_))


def outcome(call):
    """What a call returns, or the error it raises."""
    try:
        return call()
    except Exception as error:
        return error


def assert_same(left: dict, right: dict) -> None:
    for key in left:
        np.testing.assert_equal(left[key], right[key], err_msg=key)
