"""The estimators as scikit-learn sees them: its own checks, searches, pipelines, clones, frames."""

from __future__ import annotations

import inspect

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, Normalizer
from sklearn.utils.estimator_checks import parametrize_with_checks

import hybridmf as hmf
from support.ratings import planted

SMALL = {"factors": 2, "iterations": 1, "num_threads": 1}
EXACT = (hmf.ExplicitALS, hmf.ImplicitALS)
"""Estimators whose users end exact for the items, as fold-in makes new ones."""
ESTIMATORS = (*EXACT, hmf.CCD)


@pytest.mark.exhaustive
@parametrize_with_checks(
    [
        hmf.CCD(**SMALL, inner_iterations=2, nonnegative=True, dtype="float64", regularization_scaling=0.5),
        hmf.CCD(factors=4, iterations=2, nonnegative=True),
        hmf.ExplicitALS(**SMALL, biases=True, solver="cg"),
        hmf.ExplicitALS(**SMALL, biases=True, assembly="bals", dtype="float64"),
        hmf.ExplicitALS(factors=4, iterations=2, biases=True, bias_regularization=0.0),
        hmf.ImplicitALS(factors=4, iterations=2, solver="cg"),
        hmf.SGD(**SMALL, schedule="blocks", rate_schedule="adagrad", dtype="float64"),
        hmf.SGD(
            factors=4, iterations=2, schedule="blocks", rate_schedule="geometric", biases=True, deterministic=False
        ),
        hmf.SGD(**SMALL, schedule="hogwild", biases=True),
    ]
)
def test_scikit_learn_checks_of_other_settings(estimator, check):
    check(estimator)


def search(cls, matrix, cv, **grid):
    grid = grid or {"regularization": [0.01, 30.0], "factors": [2, 4]}
    model = cls(iterations=2, random_state=0, device="cpu", num_threads=1)
    return GridSearchCV(model, grid, cv=cv, error_score="raise").fit(matrix)


@pytest.mark.parametrize(("cls", "cv"), [*((cls, 2) for cls in ESTIMATORS), (hmf.ExplicitALS, 3)])
def test_grid_search(cls, cv):
    matrix = planted(density=0.4)
    found = {layout: search(cls, layout(matrix), cv) for layout in (sp.csr_array, sp.csr_matrix, sp.csr_array.toarray)}
    scores = [one.cv_results_["mean_test_score"] for one in found.values()]
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(scores[0], scores[2])
    assert len(np.unique(scores[0])) >= 3
    for one in found.values():
        assert one.best_score_ == scores[0].max()
        assert one.best_estimator_.n_users == matrix.shape[0]
        assert one.predict(one.best_estimator_._learned.seen.astype(np.float32)).shape == (matrix.shape[0],)
    if cls is hmf.ExplicitALS:
        assert found[sp.csr_array].best_params_["regularization"] < 30


def test_search_scores_are_those_of_new_users():
    """A fold's rows are other users than the training rows, whatever the sizes of the folds."""
    matrix = planted(density=0.4)
    for cv in (2, 3):
        scores = cross_val_score(hmf.ExplicitALS(biases=False, **SMALL, random_state=0), matrix, cv=cv)
        for score, (train, test) in zip(scores, KFold(cv).split(matrix), strict=True):
            model = hmf.ExplicitALS(biases=False, **SMALL, random_state=0).fit(matrix[train])
            assert score == model.score(matrix[test], users="new")


def test_search_scores_of_dense_ratings_are_those_of_new_users():
    matrix = np.random.default_rng(0).integers(1, 6, (40, 12)).astype(float)
    score = cross_val_score(hmf.ExplicitALS(biases=False, **SMALL, random_state=0), matrix, cv=2)[0]
    model = hmf.ExplicitALS(biases=False, **SMALL, random_state=0).fit(matrix[20:])
    assert score == model.score(matrix[:20], users="new")


def test_train_scores_of_implicit_feedback():
    model = hmf.ImplicitALS(**SMALL, random_state=0)
    found = GridSearchCV(model, {"alpha": [1.0, 9.0]}, cv=2, return_train_score=True).fit(planted(density=0.4))
    assert (found.cv_results_["mean_train_score"] > 0).all()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("factors", np.array([2, 3])),
        ("regularization", np.logspace(-2, 0, 3)),
        ("biases", np.array([True, False])),
        ("solver", np.array(["cholesky", "cg"])),
        ("reorder", np.array([True, False])),
    ],
)
def test_grids_of_numpy_values(name, values):
    found = search(hmf.ExplicitALS, planted(), 2, **{name: values})
    assert np.isfinite(found.cv_results_["mean_test_score"]).all()


@pytest.mark.parametrize("cls", ESTIMATORS)
@pytest.mark.parametrize("layout", [sp.csr_array, sp.csr_array.toarray])
def test_pipeline_with_preprocessing(cls, layout):
    matrix = layout(planted())
    model = cls(factors=3, iterations=3, random_state=0, device="cpu", num_threads=1)
    for step in (MaxAbsScaler(), Normalizer(), FunctionTransformer(lambda X: X * 2)):
        pipeline = make_pipeline(step, clone(model)).fit(matrix)
        expected = clone(model).fit(step.fit_transform(matrix))
        factors = pipeline.transform(matrix)
        np.testing.assert_array_equal(factors, expected.transform(step.transform(matrix)))
        np.testing.assert_array_equal(pipeline.predict(matrix), expected.predict(step.transform(matrix)))
        if cls in EXACT:
            np.testing.assert_array_equal(factors[:, :3], expected.user_factors_)
            np.testing.assert_array_equal(pipeline.predict(matrix), expected.recommend(np.arange(60), N=1)[0][:, 0])
        assert pipeline.score(matrix) == expected.score(step.transform(matrix))
        assert list(pipeline[-1:].get_feature_names_out()) == [
            f"{cls.__name__.lower()}{k}" for k in range(factors.shape[1])
        ]


def test_pipeline_in_a_search():
    pipeline = make_pipeline(MaxAbsScaler(), hmf.ExplicitALS(biases=False, **SMALL, random_state=0))
    found = GridSearchCV(pipeline, {"explicitals__regularization": [0.01, 50.0]}, cv=3).fit(planted())
    assert len(set(found.cv_results_["mean_test_score"])) == 2


@pytest.mark.parametrize("cls", ESTIMATORS)
def test_pandas_output(cls):
    frame = pd.DataFrame(planted().toarray(), columns=[f"i{k}" for k in range(40)], index=[f"u{k}" for k in range(60)])
    model = cls(factors=3, iterations=2, random_state=0, num_threads=1).set_output(transform="pandas")
    for factors in (model.fit_transform(frame), model.transform(frame)):
        assert isinstance(factors, pd.DataFrame)
        width = 3 if model.user_bias_ is None else 4  # the bias comes last
        assert list(factors.columns) == [f"{cls.__name__.lower()}{k}" for k in range(width)]
        assert list(factors.index) == list(frame.index)
        np.testing.assert_array_equal(factors.to_numpy(), model.transform(planted()).to_numpy())
        if cls in EXACT:
            np.testing.assert_array_equal(factors.to_numpy()[:, :3], model.user_factors_)
    assert isinstance(model.set_output(transform="default").transform(frame), np.ndarray)
    assert model.transform(planted()).shape == (60, width)


@pytest.mark.parametrize("cls", [hmf.ExplicitALS, hmf.ImplicitALS, hmf.SGD, hmf.CCD])
def test_editors_show_the_parameters_of_the_constructor(cls):
    class Derived(cls):
        def __init__(self, one=1):
            super().__init__()

    own = inspect.signature(cls.__init__).parameters
    assert list(inspect.signature(cls).parameters.items()) == list(own.items())[1:]
    assert list(inspect.signature(Derived).parameters) == ["one"]


def test_y_is_ignored():
    model = hmf.ExplicitALS(biases=False, **SMALL, random_state=0).fit(planted())
    np.testing.assert_array_equal(clone(model).fit_transform(planted(), np.zeros(60)), model.user_factors_)


def test_there_is_no_partial_fit():
    for cls in ESTIMATORS:
        assert not hasattr(cls, "partial_fit")
