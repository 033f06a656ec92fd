"""What every estimator derived from `FactorModel` does, whatever its method and its device."""

from __future__ import annotations

import pickle
import re
import unittest
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from ..model.base import FactorModel
from ..model.load import load
from ..ratings import Ratings

refuses = unittest.TestCase().assertRaisesRegex
"""``with refuses(error, pattern):``; pytest is not needed to import this module."""

BAD_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "factors": (0, -1, 2.5, "8", True),
    "iterations": (0, -1, 1.5, "x"),
    "regularization": (-0.1, np.nan, np.inf, "x"),
    "dtype": ("int8", "float16", 7),
    "device": ("tpu", 3, "cuda:x"),
    "num_threads": (-1, 0.5, "x"),
    "random_state": (-1, "x", 0.5),
    "biases": ("x", 2),
    "nonnegative": ("x", 2),
}
"""Values that `fit` refuses, by parameter; only those that an estimator has are tried."""


class EstimatorContract:
    """Tests of an estimator, to be inherited by a test class.

    ::

        class TestMyMethod(EstimatorContract):
            estimator = MyMethod
            options = {"factors": 8, "biases": True}

    The methods ``test_...`` use pytest's fixture `tmp_path` and nothing else of pytest. A subclass with fixtures of its
    own may set the attributes below, such as `device`, for each test. Files hold models of this library's classes
    only, so an estimator outside of it sets ``test_models_survive_files = None``.

    Attributes
    ----------
    estimator : type
        The class derived from `FactorModel`.
    options : dict
        Parameters of the estimator, in addition to small sizes and a seed.
    device : str
        Passed to the estimator; "cpu" by default.
    exact : bool
        Whether a fit ends with user factors that minimize the objective for the item factors, so that folding in the
        training rows returns them, and whether the objective falls in every iteration. Otherwise it only falls from
        the first iteration to the last.
    """

    estimator: ClassVar[type[FactorModel]]
    options: ClassVar[dict[str, Any]] = {}
    device: str = "cpu"
    exact: bool = True

    EMPTY_USER, EMPTY_ITEM = 30, 13  # rows of `ratings` without entries

    def make(self, **options: Any) -> Any:
        """An estimator that is not fitted."""
        sizes: dict[str, Any] = {
            "factors": 4,
            "iterations": 3,
            "random_state": 0,
            "device": self.device,
            "num_threads": 1,
        }
        return self.estimator(**(sizes | self.options | options))

    def ratings(self) -> sp.csr_array:
        """Ratings from 1 to 5 of 60 users and 40 items, a fifth observed, that follow factors of rank 3."""
        rng = np.random.default_rng(0)
        scores: Any = 3 + rng.normal(size=(60, 3)) @ rng.normal(size=(40, 3)).T + rng.normal(scale=0.2, size=(60, 40))
        scores = np.clip(scores, 1, 5).astype(np.float32) * (rng.random((60, 40)) < 0.2)
        scores[self.EMPTY_USER] = scores[:, self.EMPTY_ITEM] = 0
        return sp.csr_array(scores)

    def fitted(self, **options: Any) -> Any:
        """An estimator fitted to `ratings`."""
        return self.make(**options).fit(self.ratings())

    # ----------------------------------------------------------------------------------------------- parameters

    def test_the_constructor_only_stores(self) -> None:
        """scikit-learn's clones and searches rest on it."""
        nonsense: dict[str, Any] = {name: object() for name in self.make().get_params()}
        assert self.estimator(**nonsense).get_params() == nonsense

    def test_clones_have_the_same_parameters(self) -> None:
        """And `set_params` refuses unknown names."""
        model = self.make(random_state=np.random.default_rng(0)).set_params(iterations=4)
        copied, original = clone(model).get_params(), model.get_params()
        assert copied.pop("random_state") is not original.pop("random_state")
        assert copied == original and copied["iterations"] == 4
        with refuses(ValueError, "Invalid parameter 'lambda_'"):
            model.set_params(lambda_=3)
        with refuses(TypeError, "positional"):
            self.estimator(7, 0.3)  # type: ignore[call-arg]

    def test_bad_parameters_are_refused_by_name(self) -> None:
        """When `fit` is called."""
        for name in self.make().get_params().keys() & BAD_PARAMETERS.keys():
            for value in BAD_PARAMETERS[name]:
                with refuses((ValueError, TypeError), name):
                    self.fitted(**{name: value})

    def test_scikit_learns_checks(self) -> None:
        """All of `sklearn.utils.estimator_checks.check_estimator`."""
        from sklearn.utils.estimator_checks import check_estimator

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not inherit from `sklearn.base.BaseEstimator`")
            check_estimator(self.make(factors=2, iterations=1), on_skip=None)

    # ----------------------------------------------------------------------------------------------- input

    def test_every_container_gives_the_same_model(self) -> None:
        """Whatever the layout of a matrix and the order of its entries; `y` is ignored."""
        matrix, expected = self.ratings(), self.fitted()
        dense, order = matrix.toarray(), np.random.default_rng(0).permutation(matrix.nnz)
        rows, columns = matrix.nonzero()
        shuffled = sp.coo_array((matrix.data[order], (rows[order], columns[order])), shape=matrix.shape)
        for other in (
            sp.csr_matrix(matrix), sp.csc_array(matrix), shuffled, sp.coo_matrix(matrix), dense, dense.tolist(),
            np.asfortranarray(dense), dense.astype(object), matrix.astype(np.float64), Ratings.from_matrix(matrix),
        ):  # fmt: skip
            model = self.make()
            assert model.fit(other, np.zeros(60)) is model
            same_model(model, expected)

    def test_a_fit_owns_its_ratings(self) -> None:
        """It does not change the caller's arrays, and later changes of these do not reach the model."""
        matrix = self.ratings()
        arrays = (matrix.data, matrix.indices, matrix.indptr)
        before = [array.copy() for array in arrays]
        model = self.make().fit(matrix)
        for array, original in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, original)
        matrix.data[:], matrix.indices[:] = 7, matrix.indices[::-1].copy()
        same_model(model, self.fitted())

    def test_bad_ratings_are_refused(self) -> None:
        """Values that are not finite, empty and misshapen matrices, indices out of range."""
        for value in (np.nan, np.inf):
            matrix = self.ratings()
            matrix.data[5] = value
            for bad in (matrix, matrix.toarray()):
                with refuses(ValueError, "user_items .*NaN|user_items .*inf"):
                    self.make().fit(bad)
        for index in (40, -1):
            matrix = self.ratings()
            matrix.indices[5] = index
            with refuses(ValueError, f"user_items .*{index}"):
                self.make().fit(matrix)
        for shape in ((0, 5), (5, 0), (4, 5)):
            with refuses(ValueError, f"user_items .*shape {re.escape(str(shape))}"):
                self.make().fit(sp.csr_array(shape))
        for other in (np.ones(5), "ratings", None):
            with refuses((ValueError, TypeError), "."):
                self.make().fit(other)

    # ----------------------------------------------------------------------------------------------- results

    def test_a_fit_learns_factors(self) -> None:
        """Finite float32 arrays in C order, one record for each iteration."""
        model = self.make().fit(self.ratings(), callback=lambda model, record: None)
        assert (model.n_users, model.n_items, model.n_iter_) == (60, 40, 3)
        for factors, shape in ((model.user_factors, (60, 4)), (model.item_factors, (40, 4))):
            assert factors.shape == shape and factors.dtype == np.float32 and factors.flags.c_contiguous
            assert np.isfinite(factors).all() and factors.any()
        assert [record["iteration"] for record in model.history_] == [1, 2, 3]
        assert (model.device_ == "cpu") == (self.device == "cpu")

    def test_the_objective_falls(self) -> None:
        """In every iteration if the method is exact."""
        model = self.make(iterations=6).fit(self.ratings(), callback=lambda model, record: None)
        losses = [record["objective"] for record in model.history_]
        compared = losses if self.exact else [losses[0], losses[-1]]
        for before, after in pairwise(compared):
            assert after <= before * (1 + 1e-5), losses
        np.testing.assert_allclose(model.objective(self.ratings()), losses[-1], rtol=1e-4)

    def test_a_seed_repeats_the_bits(self) -> None:
        """In another object, in the same one and with more threads; another seed gives other factors."""
        model = self.fitted()
        state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 (it is the caller's)
        same_model(model, self.fitted())
        same_model(model, self.fitted(num_threads=3))
        same_model(self.fitted(random_state=1).set_params(random_state=0).fit(self.ratings()), model)
        assert not np.array_equal(self.fitted(random_state=1).item_factors_, model.item_factors_)
        np.testing.assert_equal(np.random.get_state(legacy=False)["state"], state)  # noqa: NPY002

    def test_rows_without_entries_have_zero_factors(self) -> None:
        """And zero biases: they are cold."""
        model = self.fitted()
        assert not model.user_factors_[self.EMPTY_USER].any() and not model.item_factors_[self.EMPTY_ITEM].any()
        if model.user_bias_ is not None:
            assert model.user_bias_[self.EMPTY_USER] == model.item_bias_[self.EMPTY_ITEM] == 0
        assert np.flatnonzero(model.cold_users_).tolist() == [self.EMPTY_USER]
        assert np.flatnonzero(model.cold_items_).tolist() == [self.EMPTY_ITEM]

    def test_a_callback_stops_a_fit(self) -> None:
        """With the factors of that iteration."""
        model = self.make().fit(self.ratings(), callback=lambda model, record: record["iteration"] == 2)
        assert model.n_iter_ == 2
        same_model(model, self.fitted(iterations=2))

    def test_a_fit_starts_from_given_factors(self) -> None:
        """Arrays of the right shapes, which stay as they are, or a fitted model."""
        given = tuple(np.abs(np.random.default_rng(5).normal(size=(n, 4))).astype(np.float32) for n in (60, 40))
        copies = [array.copy() for array in given]
        model = self.fitted(init=given)
        for array, copied in zip(given, copies, strict=True):
            np.testing.assert_array_equal(array, copied)
        assert not np.array_equal(model.item_factors_, self.fitted().item_factors_)
        assert self.fitted(init=model).objective(self.ratings()) < model.objective(self.ratings()) * (1 + 1e-5)
        with refuses(ValueError, "init"):
            self.fitted(init=given[::-1])

    # ----------------------------------------------------------------------------------------------- answers

    def test_recommendations_are_the_best_predictions(self) -> None:
        """Of items that a user has not rated, by descending score."""
        model, matrix, users = self.fitted(), self.ratings(), np.arange(60)
        scores = np.array([model.predict(user, np.arange(40), clip=False) for user in users])
        warm = np.delete(users, self.EMPTY_USER)
        ids, found = model.recommend(warm, N=5)
        np.testing.assert_allclose(found, np.take_along_axis(scores[warm], ids, 1), rtol=1e-4, atol=1e-4)
        assert (np.diff(found, axis=1) <= 0).all()
        scores[matrix.nonzero()] = -np.inf
        scores[:, self.EMPTY_ITEM] = -np.inf  # an item without ratings is not recommended
        np.testing.assert_allclose(found, -np.sort(-scores[warm], axis=1)[:, :5], rtol=1e-4, atol=1e-4)
        one, _ = model.recommend(int(warm[3]), N=5)
        np.testing.assert_array_equal(one, ids[3])

    def test_new_users_are_those_of_the_fit(self) -> None:
        """Folding in the training rows returns the factors, if the method is exact."""
        model, matrix = self.fitted(), self.ratings()
        rows = model.transform(matrix)
        expected = model.user_factors_ if model.user_bias_ is None else np.c_[model.user_factors_, model.user_bias_]
        assert rows.shape == expected.shape
        if self.exact:
            np.testing.assert_allclose(rows, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(model.transform(matrix[:5]), rows[:5])
        ids, scores = model.recommend_new(matrix[:5], N=3)
        products = rows[:5, :4] @ model.item_factors_.T
        if model.item_bias_ is not None:
            products += rows[:5, 4:] + model.item_bias_ + model.mean_
        np.testing.assert_allclose(scores, np.take_along_axis(products, ids, 1), rtol=1e-4, atol=1e-4)

    def test_models_survive_files(self, tmp_path: Path) -> None:
        """Saved and pickled ones give the same answers and have the same parameters."""
        model, matrix = self.fitted(), self.ratings()
        model.save(tmp_path / "model")
        for other in (load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
            same_model(other, model)
            assert type(other) is type(model) and other.get_params() == model.get_params()
            np.testing.assert_array_equal(other.recommend(np.arange(5)), model.recommend(np.arange(5)))
            np.testing.assert_array_equal(other.transform(matrix), model.transform(matrix))

    def test_a_resumed_fit_ends_with_the_same_bits(self, tmp_path: Path) -> None:
        """As one that was not interrupted."""
        self.make(iterations=2).fit(self.ratings(), checkpoint=tmp_path)
        resumed = self.make(iterations=4).fit(self.ratings(), resume_from=tmp_path)
        assert resumed.n_iter_ == 4
        same_model(resumed, self.fitted(iterations=4))

    def test_a_model_that_is_not_fitted_says_so(self, tmp_path: Path) -> None:
        """Whatever is asked of it."""
        model, rows = self.make(), self.ratings()
        questions: list[Callable[[], Any]] = [
            lambda: model.recommend(0), lambda: model.recommend_new(rows), lambda: model.predict(0, 0),
            lambda: model.transform(rows), lambda: model.similar_items(0), lambda: model.score(rows),
            lambda: model.save(tmp_path / "model"), lambda: model.user_factors_,
        ]  # fmt: skip
        for question in questions:
            with refuses(NotFittedError, type(model).__name__):
                question()


def same_model(left: Any, right: Any) -> None:
    """Check that two models have the same bits."""
    for name in ("user_factors_", "item_factors_", "user_bias_", "item_bias_"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
