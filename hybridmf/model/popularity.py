"""A non-personalized baseline that recommends the most popular items to all users."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.sparse import entry_rows, take_rows
from ..core.validate import (
    MAX_N,
    as_csr,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_nonempty,
    check_real,
    check_shape,
)
from ..data.align import align_rows, labels_of
from ..plan.memory import check_answer
from ..ratings import as_ratings
from .estimator import not_fitted
from .learned import count_items, likes_of


class PopularityRecommender:
    """Non-personalized baseline: recommends the same items to all users and predicts each item's damped mean.

    A useful factor model must beat this baseline under the same `evaluate`.

    Parameters
    ----------
    damping : float
        Number of virtual ratings at the global mean added to each item; at least 0.
    rank_by : {"count", "mean"}
        Recommend the items with the most positive entries, or with the highest damped mean.

    Attributes
    ----------
    n_users, n_items : int
    user_ids_, item_ids_ : array or None
        Labels of the training `Ratings`.
    item_counts_ : int64 array, shape (n_items,)
        Entries (users) of each item.
    item_likes_ : int64 array, shape (n_items,)
        Positive entries of each item: negative ones are dislikes, and zeros no preference.
    item_means_ : float64 array, shape (n_items,)
        ``(sum + damping * global_mean) / (count + damping)``; the global mean if the denominator is 0.
    global_mean_ : float
    user_factors, item_factors : float32 array, shape (n, 1)
        1 and the likes or the mean, whose product is the score, for ``auc``.
    """

    def __init__(self, *, damping: float = 5.0, rank_by: str = "count") -> None:
        self.damping = damping
        self.rank_by = rank_by

    def fit(self, user_items: Any) -> PopularityRecommender:
        """Count the entries of each item and average their values.

        Parameters
        ----------
        user_items : Ratings or sparse matrix, shape (n_users, n_items)

        Returns
        -------
        self

        Raises
        ------
        RatingsError
            There is no user, no item or no entry, or the matrix is invalid.
        TypeError, ValueError
            `damping` is not a real number >= 0, or `rank_by` is unknown.
        """
        by_mean = check_choice("rank_by", self.rank_by, ("count", "mean")) == "mean"
        damping = check_real("damping", self.damping, 0.0)
        user_items = as_ratings(user_items)
        matrix = as_csr(user_items)
        check_nonempty(matrix, "user_items")
        self.n_users, self.n_items = matrix.shape
        labels = labels_of(user_items) or (None, None)
        self.user_ids_: np.ndarray | None = labels[0]
        self.item_ids_: np.ndarray | None = labels[1]
        self._user_items = matrix
        self.item_counts_ = count_items(matrix)
        likes = likes_of([matrix], self.item_counts_)
        self.item_likes_ = self.item_counts_ if likes is None else likes
        sums = np.bincount(matrix.indices, weights=matrix.data, minlength=self.n_items)
        self.global_mean_ = float(matrix.data.mean(dtype=np.float64))
        weight = self.item_counts_ + damping
        self.item_means_ = np.full(self.n_items, self.global_mean_)
        np.divide(sums + damping * self.global_mean_, weight, out=self.item_means_, where=weight > 0)
        self.user_factors = np.ones((self.n_users, 1), dtype=np.float32)
        self._item_scores = self.item_means_ if by_mean else self.item_likes_
        self.item_factors = self._item_scores.astype(np.float32)[:, None]
        return self

    def recommend(
        self,
        userid: Any,
        user_items: Any = None,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        items: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank candidate items by their number of positive entries, or their mean; ties by lower position.

        Parameters
        ----------
        userid : int or integer array, shape (n,)
            Positions of users.
        user_items : Ratings or sparse matrix, shape (n, n_items), optional
            Row j holds the items seen by ``userid[j]``; labelled ratings are aligned by label. Default: the rows of the
            training matrix.
        N : int
            At least 1.
        filter_already_liked_items : bool
            Exclude the entries of `user_items`.
        filter_items : integer array, optional
            Items to exclude for all users.
        items : integer array, optional
            Candidates; default: all items.

        Returns
        -------
        ids : int32 array, shape (n, N), or (N,) for a single user
            -1 if fewer than N items are left.
        scores : float32 array of the same shape
            Numbers of positive entries, or means; -inf where the id is -1.

        Raises
        ------
        NotFittedError
            `fit` was not called.
        TypeError, ValueError
            A position is out of range, N < 1, or `user_items` does not have a row for each user.
        MemoryBudgetError
            N results for each user do not fit in memory.
        """
        self._check_fitted()
        users = check_ids("userid", userid, self.n_users, "n_users")
        N = check_int("N", N, 1, MAX_N)
        allowed = allowed_items(self.n_items, items, filter_items)
        seen = None
        if check_bool("filter_already_liked_items", filter_already_liked_items):
            seen = self._rows_seen(user_items, users)
        check_answer(len(users), N, int(np.count_nonzero(allowed)), np.dtype(np.float32).itemsize)
        ids, scores = rank_by_count(self._item_scores, allowed, seen, len(users), N)
        return (ids[0], scores[0]) if np.ndim(userid) == 0 else (ids, scores)

    def predict(self, users: Any, items: Any) -> np.ndarray:
        """Damped item mean for each pair, float32 of shape (n,).

        Parameters
        ----------
        users, items : integer array, shape (n,)
            Positions; predictions do not depend on the user.

        Raises
        ------
        NotFittedError
            `fit` was not called.
        TypeError, ValueError
            A position is out of range, or the lengths differ.
        """
        self._check_fitted()
        users = check_ids("users", users, self.n_users, "n_users")
        items = check_ids("items", items, self.n_items, "n_items")
        if len(users) != len(items):
            raise ValueError(f"users has {len(users)} positions and items has {len(items)}; expected pairs")
        return self.item_means_[items].astype(np.float32)

    @property
    def cold_users_(self) -> np.ndarray:
        """Users without training entries: bool array, shape (n_users,)."""
        self._check_fitted()
        return np.diff(self._user_items.indptr) == 0

    def _check_fitted(self) -> None:
        if "item_counts_" not in vars(self):
            raise not_fitted("this PopularityRecommender is not fitted; call fit(user_items) first")

    def _rows_seen(self, user_items: Any, users: np.ndarray) -> sp.csr_array:
        if user_items is None:
            return take_rows(self._user_items, users)
        labels = (self.user_ids_, self.item_ids_)
        rows = align_rows(as_csr(user_items), user_items, users, labels, self.n_users)
        check_shape("user_items", rows, (len(users), self.n_items), ("number of users asked for", "n_items"))
        return rows


def allowed_items(n_items: int, items: Any, filter_items: Any) -> np.ndarray:
    """Mask of the candidates: `items` (None: all) without `filter_items`."""
    allowed = np.full(n_items, items is None)
    if items is not None:
        allowed[check_ids("items", items, n_items, "n_items")] = True
    if filter_items is not None:
        allowed[check_ids("filter_items", filter_items, n_items, "n_items")] = False
    return allowed


def rank_by_count(
    counts: np.ndarray, allowed: np.ndarray, seen: sp.csr_array | None, n_users: int, N: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rank items by descending count, for users without factors.

    Parameters
    ----------
    counts : array of numbers, shape (n_items,)
    allowed : bool array, shape (n_items,)
        Candidates.
    seen : csr_array, shape (n_users, n_items), or None
        Entries to exclude.
    n_users, N : int

    Returns
    -------
    ids : int32 array, shape (n_users, N)
        Ties in order of position; -1 where fewer than N items are left.
    scores : float32 array, shape (n_users, N)
        The counts; -inf where ids is -1.
    """
    order = np.argsort(-counts, kind="stable")
    order = order[allowed[order]]
    found = _first_unseen(order, seen, n_users, min(N, len(order)), len(counts))
    scores = np.where(found >= 0, counts.astype(np.float32)[found], np.float32(-np.inf))
    gap = ((0, 0), (0, N - found.shape[1]))
    return np.pad(found, gap, constant_values=-1), np.pad(scores, gap, constant_values=-np.inf)


def _first_unseen(order: np.ndarray, seen: sp.csr_array | None, n_users: int, N: int, n_items: int) -> np.ndarray:
    """Take the first N elements of `order` outside each row of `seen`: int32, shape (n_users, N), padded with -1.

    Let s_0 < s_1 < ... be the places of a user's seen items in `order`. Before the j-th unseen place lie those seen
    items with s_i - i <= j, and these differences never fall with i: so a binary search finds the place, for all users
    at once and without a row of n_items each.
    """
    place = np.tile(np.arange(N, dtype=np.int64), (n_users, 1))
    if seen is not None:
        place += _count_seen_before(order, seen, N, n_items)
    ids = np.full((n_users, N), -1, dtype=np.int32)
    left = place < len(order)
    ids[left] = order[place[left]]
    return ids


def _count_seen_before(order: np.ndarray, seen: sp.csr_array, N: int, n_items: int) -> np.ndarray:
    place_of = np.full(n_items, -1, dtype=np.int64)
    place_of[order] = np.arange(len(order))
    rows, places = entry_rows(seen), place_of[seen.indices]
    rows, places = rows[places >= 0], places[places >= 0]  # seen items that are not candidates do not matter
    start = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=seen.shape[0]))))
    stride = n_items + N
    keys = np.sort(rows * stride + places)
    keys -= np.arange(len(keys)) - start[rows]  # sorting changed the order within rows only
    wanted = np.arange(seen.shape[0], dtype=np.int64)[:, None] * stride + np.arange(N)
    return np.searchsorted(keys, wanted, side="right") - start[:-1, None]
