"""Models of other libraries, and ready lists of items, in the form that `hybridmf.evaluate` needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.validate import refuse_masked
from ..data.align import Labels, labels_of

NOTHING_LEFT = np.finfo(np.float32).min
"""Score from which `implicit` repeats items that were to be left out, because nothing else is left."""


class OtherModel:
    """A model with `recommend` but without sizes and labels, which are those of the ratings that it was fitted on.

    Its ``recommend(users, rows, N=, filter_already_liked_items=)`` returns item positions, or these and scores.
    """

    def __init__(self, model: Any, ratings: Any) -> None:
        self.model = model
        self.n_users, self.n_items = ratings.shape
        labels: Labels = labels_of(ratings) or (None, None)
        self.user_ids_, self.item_ids_ = labels
        for name, count in (("user_factors", self.n_users), ("item_factors", self.n_items)):
            if not hasattr(model, name):
                continue
            factors = getattr(model, name)
            if factors is None:
                raise ValueError(f"this {type(model).__name__} has no {name}; fit it first")
            if factors.shape[0] != count:
                raise ValueError(
                    f"{name} of {type(model).__name__} have {factors.shape[0]} rows, and train has shape "
                    f"{ratings.shape}; pass the matrix that it was fitted on"
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def user_factors(self) -> Any:
        """Factors of the model, on the host."""
        return _on_host(self.model.user_factors)

    @property
    def item_factors(self) -> Any:
        """Factors of the model, on the host."""
        return _on_host(self.model.item_factors)

    def recommend(self, users: np.ndarray, user_items: Any, N: int, filter_already_liked_items: bool) -> Any:
        """Items and scores; -1 where the model has nothing left."""
        rows = sp.csr_matrix(user_items)  # the type that implicit requires
        found = self.model.recommend(users, rows, N=N, filter_already_liked_items=filter_already_liked_items)
        if not isinstance(found, tuple):
            return found, None
        ids, scores = found
        return np.where(np.asarray(scores) > NOTHING_LEFT, ids, -1), scores


class ReadyLists:
    """Item positions of each user, best first and -1 for none, in place of a model; shape (n_users, k)."""

    def __init__(self, ids: Any, ratings: Any) -> None:
        refuse_masked("model", ids)
        ids = np.asarray(ids)
        self.n_users, self.n_items = ratings.shape
        labels: Labels = labels_of(ratings) or (None, None)
        self.user_ids_, self.item_ids_ = labels
        if ids.ndim != 2 or len(ids) != self.n_users:
            raise ValueError(
                f"model is an array of shape {ids.shape}; expected positions of items, (n_users={self.n_users}, k): a "
                "row for each user of train, or of test without train"
            )
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(
                f"model is an array of dtype {ids.dtype}; expected positions of items, integers: "
                "ratings.item_index(labels) gives those of labels"
            )
        self._ids = ids

    def recommend(self, users: np.ndarray, user_items: Any, N: int, filter_already_liked_items: bool) -> Any:
        """The lists of `users` as they are."""
        return self._ids[users, :N], None


def _on_host(factors: Any) -> Any:
    return factors.to_numpy() if hasattr(factors, "to_numpy") else factors
