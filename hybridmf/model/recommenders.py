"""Models of other libraries, and ready lists of items, in the form that `hybridmf.evaluate` needs."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.sparse import RowColumns, take_rows
from ..core.validate import refuse_masked
from ..data.align import Labels, labels_of
from .ranking import rank
from .requests import Candidates

NOT_RANKED = -2
"""Takes the place of items of users who were not ranked yet."""

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
        found = getattr(self.model, name)
        return found.to_numpy() if hasattr(found, "to_numpy") else found  # factors on a GPU

    def recommend(
        self, users: np.ndarray, user_items: Any, N: int, filter_already_liked_items: bool, **candidates: Any
    ) -> Any:
        """Items and scores; -1 where the model has nothing left. `candidates`: ``items=``, if the model takes it."""
        rows = sp.csr_matrix(user_items)  # the type that implicit requires
        options = {"filter_already_liked_items": filter_already_liked_items, **candidates}
        found = self.model.recommend(users, rows, N=N, **options)
        if not isinstance(found, tuple):
            return found, None
        ids, scores = found
        return np.where(np.asarray(scores) > NOTHING_LEFT, ids, -1), scores


class WithSeen:
    """A model of this library that ranks the same users as others, whose seen items were taken out of a matrix once."""

    def __init__(self, model: Any, seen: RowColumns) -> None:
        self.model, self.seen = model, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def recommend(self, users: np.ndarray, user_items: None, N: int, filter_already_liked_items: bool) -> Any:
        """The lists of `users`, which are those of `seen`."""
        learned = self.model._fitted()
        return rank(learned, learned.state.user.take(users), N, self.seen, Candidates(), "popular")


class Listed:
    """A model that ranks each user once, with items that have no training entries, or among some `items` alone."""

    def __init__(self, model: Any, items: np.ndarray | None = None) -> None:
        self.model, self._ids = model, np.empty((0, 0), dtype=np.int64)
        self._candidates: dict[str, Any] = {} if items is None else {"items": items}
        if getattr(model, "item_features_", None) is not None:
            self._candidates["include_cold"] = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def among(self, items: np.ndarray) -> Listed | None:
        """The same model, with these items only; None if it does not take them."""
        recommend = self.model.model.recommend if isinstance(self.model, OtherModel) else self.model.recommend
        return Listed(self.model, items) if "items" in inspect.signature(recommend).parameters else None

    def recommend(self, users: np.ndarray, user_items: Any, N: int, filter_already_liked_items: bool) -> Any:
        """The lists of `users`; N is the same in all calls."""
        if not self._ids.size:
            self._ids = np.full((self.n_users, N), NOT_RANKED)
        new = self._ids[users, 0] == NOT_RANKED
        if new.any():
            rows = None if user_items is None else take_rows(user_items, np.flatnonzero(new))
            options = {"filter_already_liked_items": filter_already_liked_items, **self._candidates}
            ids = np.asarray(self.model.recommend(users[new], user_items=rows, N=N, **options)[0])
            self._ids[users[new]] = -1
            self._ids[users[new], : ids.shape[1]] = ids
        return self._ids[users], None


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
