"""What a type checker and an editor know of a program that uses hybridmf: `mypy tests/packaging/typed.py` checks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

from hybridmf import CCD, SGD, ExplicitALS, ImplicitALS, Ratings, k_fold, leave_k_out, load, split

Model = ExplicitALS | ImplicitALS | SGD | CCD


def program() -> None:
    """Never called."""
    ratings = assert_type(Ratings.from_file("ratings.csv"), Ratings)
    assert_type(split(ratings, 0.1), tuple[Ratings, Ratings])
    assert_type(ratings.split(0.1), tuple[Ratings, Ratings])
    assert_type(leave_k_out(ratings), tuple[Ratings, Ratings])
    assert_type(k_fold(ratings), Iterator[tuple[Ratings, Ratings]])
    assert_type(ImplicitALS(factors=8).fit(ratings), ImplicitALS)
    assert_type(SGD().fit(ratings).partial_fit_users(0, ratings), SGD)
    assert_type(ExplicitALS().fit(ratings).set_factors(), ExplicitALS)
    assert_type(load("model.safetensors"), Model)
    assert_type(load("model.safetensors").n_users, int)
