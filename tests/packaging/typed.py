"""What a type checker and an editor know of a program that uses hybridmf: `mypy tests/packaging/typed.py` checks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np

import hybridmf
from hybridmf import CCD, SGD, ExplicitALS, Features, ImplicitALS, Plan, Ratings, k_fold, leave_k_out, load, split

Model = ExplicitALS | ImplicitALS | SGD | CCD


class Frame:
    """The members by which type checkers and narwhals recognize a data frame."""

    columns: list[str]
    join: Any
    drop: Any

    def __len__(self) -> int:
        return 0


def program() -> None:
    """Never called."""
    ratings = assert_type(Ratings.from_file("ratings.csv"), Ratings)
    assert_type(split(ratings, 0.1), tuple[Ratings, Ratings])
    assert_type(ratings.split(0.1), tuple[Ratings, Ratings])
    assert_type(leave_k_out(ratings), tuple[Ratings, Ratings])
    assert_type(split(Frame(), by="time"), tuple[Ratings, Ratings])
    assert_type(split(np.eye(3)), tuple[Any, Any])
    assert_type(leave_k_out(Frame()), tuple[Ratings, Ratings])
    assert_type(k_fold(Frame()), Iterator[tuple[Ratings, Ratings]])
    assert_type(k_fold(ratings), Iterator[tuple[Ratings, Ratings]])
    assert_type(ImplicitALS(factors=8).fit(ratings), ImplicitALS)
    assert_type(SGD().fit(ratings).partial_fit_users(0, ratings), SGD)
    assert_type(ExplicitALS().fit(ratings).set_factors(), ExplicitALS)
    assert_type(load("model.safetensors"), Model)
    assert_type(load("model.safetensors").n_users, int)
    features = assert_type(Features.from_frame(Frame(), separator="|"), Features)
    model = ImplicitALS().fit(ratings, item_features=features)
    assert_type(hybridmf.plan(ratings, model), Plan)
    assert_type(hybridmf.search(ratings, budget="1 min").best_params, dict[str, Any])
    assert_type(hybridmf.evaluate(model, ratings), hybridmf.metrics.Evaluation)
    assert_type(hybridmf.compare(ratings), hybridmf.Comparison)
    assert_type(hybridmf.ann.AnnIndex, type[hybridmf.ann.AnnIndex])
    # mistakes are found: mypy reports a comment that hides none
    model.user_factor_  # type: ignore[attr-defined]
    model.recommend(0, n=10)  # type: ignore[call-arg]
    ImplicitALS(factor=8)  # type: ignore[call-arg]
