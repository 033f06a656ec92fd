"""A non-personalized baseline that recommends the most popular items to all users."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Side
from ..core.sparse import entry_rows, rows_or_empty, take_rows
from ..core.validate import as_csr, check_bool, check_choice, check_nonempty, check_real, from_triplets
from ..data.align import labels_of
from ..plan.memory import check_answer
from ..ratings import as_ratings, is_pairs
from .estimator import not_fitted
from .learned import Labelled, count_items, likes_of
from .requests import Asked, Unknown, given_rows, is_single, pairs_of, positions_of, shown


@dataclass(frozen=True)
class Popularity(Labelled):
    """The result of a fit as one value: see the attributes of `PopularityRecommender`, and `Learned`."""

    seen: sp.csr_array
    item_counts: np.ndarray
    item_likes: np.ndarray
    item_means: np.ndarray
    global_mean: float
    scores: np.ndarray  # by which items are ranked
    user_ids: np.ndarray | None
    item_ids: np.ndarray | None
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def count(self, side: Side) -> int:
        return int(self.seen.shape[SIDES.index(side)])

    def entries(self, given: Any, name: str, *, repeats: bool = False) -> sp.csr_array:
        """See `Labelled`; repeated entries are an error."""
        return as_csr(given, name=name)


def popularity_of(seen: sp.csr_array, likes: np.ndarray) -> PopularityRecommender:
    """The baseline of a fit for rankings, from the pattern of its entries and the positive entries of each item."""
    popular = PopularityRecommender()
    means = np.where(likes > 0, 1.0, 0.0)
    popular._state = Popularity(seen, likes, likes, means, 1.0, likes, None, None)
    return popular


class PopularityRecommender:
    """Non-personalized baseline: recommends the same items to all users and predicts each item's damped mean.

    A useful factor model must beat this baseline under the same `evaluate`. Each call uses one fit as a whole, also
    while another thread fits again.

    Parameters
    ----------
    damping : float
        Number of virtual ratings at the global mean added to each item; at least 0.
    rank_by : {"count", "mean"}
        Recommend the items with the most positive entries, or with the highest damped mean.
    """

    _state: Popularity  # set by fit

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
        user_items = as_ratings(user_items, "user_items")
        matrix = as_csr(user_items)
        check_nonempty(matrix, "user_items")
        user_ids, item_ids = labels_of(user_items) or (None, None)
        counts = count_items(matrix)
        likes = likes_of([matrix], counts)
        likes = counts if likes is None else likes
        sums = np.bincount(matrix.indices, weights=matrix.data, minlength=matrix.shape[1])
        global_mean = float(matrix.data.mean(dtype=np.float64))
        weight = counts + damping
        means = np.full(matrix.shape[1], global_mean)
        np.divide(sums + damping * global_mean, weight, out=means, where=weight > 0)
        scores = means if by_mean else likes
        self._state = Popularity(matrix, counts, likes, means, global_mean, scores, user_ids, item_ids)
        return self

    def _fitted(self) -> Popularity:
        """The state, which each public method takes once."""
        try:
            return self._state
        except AttributeError:
            raise not_fitted("this PopularityRecommender is not fitted; call fit(user_items) first") from None

    @property
    def n_users(self) -> int:
        """Number of users."""
        return self._fitted().shape[0]

    @property
    def n_items(self) -> int:
        """Number of items."""
        return self._fitted().shape[1]

    @property
    def user_ids_(self) -> np.ndarray | None:
        """Label of each user of the training `Ratings`, or None."""
        return self._fitted().user_ids

    @property
    def item_ids_(self) -> np.ndarray | None:
        """Label of each item, or None."""
        return self._fitted().item_ids

    @property
    def item_counts_(self) -> np.ndarray:
        """Entries (users) of each item: int64 array, shape (n_items,)."""
        return self._fitted().item_counts

    @property
    def item_likes_(self) -> np.ndarray:
        """Positive entries of each item, int64 array, shape (n_items,): negative ones are dislikes, zeros none."""
        return self._fitted().item_likes

    @property
    def item_means_(self) -> np.ndarray:
        """Damped mean of each item, float64 array, shape (n_items,).

        ``(sum + damping * global_mean) / (count + damping)``; the global mean if the denominator is 0.
        """
        return self._fitted().item_means

    @property
    def global_mean_(self) -> float:
        """Mean of all values."""
        return self._fitted().global_mean

    @property
    def user_factors(self) -> np.ndarray:
        """Ones, float32 array, shape (n_users, 1); times `item_factors`, they are the scores, for ``auc``."""
        return np.ones((self.n_users, 1), dtype=np.float32)

    @property
    def item_factors(self) -> np.ndarray:
        """Likes or means, by which items are ranked: float32 array, shape (n_items, 1)."""
        return self._fitted().scores.astype(np.float32)[:, None]

    @property
    def cold_users_(self) -> np.ndarray:
        """Users without training entries: bool array, shape (n_users,)."""
        return np.diff(self._fitted().seen.indptr) == 0

    def recommend(
        self,
        userid: Any,
        user_items: Any = None,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        items: Any = None,
        *,
        labels: bool = False,
        unknown: str = "error",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank candidate items by their number of positive entries, or their mean; ties by lower position.

        Parameters
        ----------
        userid : int or integer array, shape (n,)
            Positions of users, or with ``labels=True`` their labels.
        user_items : Ratings or sparse matrix, shape (n, n_items), optional
            Row j holds the items seen by ``userid[j]``; labelled ratings are aligned by label. Default: the rows of the
            training matrix.
        N : int
            At least 1.
        filter_already_liked_items : bool
            Exclude the entries of `user_items`.
        filter_items, items, labels, unknown
            As for `recommend` of the estimators: items to exclude, candidates, whether ids are labels, and the
            treatment of ids that are unknown.

        Returns
        -------
        ids : int32 array, shape (n, N), or (N,) for a single user
            -1 if fewer than N items are left. With ``labels=True`` an object array of labels, with None in place of -1.
        scores : float32 array of the same shape
            Numbers of positive entries, or means; -inf where the id is -1.

        Raises
        ------
        NotFittedError
            `fit` was not called.
        TypeError, ValueError, UnknownLabelError
            An id is unknown, N < 1, or `user_items` does not have a row for each user.
        MemoryBudgetError
            N results for each user do not fit in memory.
        """
        state = self._fitted()
        asked = Asked(N, filter_already_liked_items, filter_items, items, "popular", labels, unknown)
        users = positions_of(state, "user", "userid", userid, asked.by_label, asked.unknown)
        rows_of = partial(given_rows, state, users, unknown=asked.unknown.of_entries)
        candidates = asked.candidates(state, len(users), rows_of)
        asked.unknown.report()
        seen, absent = candidates.denied, asked.unknown.absent(users)
        if asked.filter_liked:
            take = take_rows if absent is None else rows_or_empty
            liked = take(state.seen, users) if user_items is None else rows_of("user_items", user_items)
            seen = liked if seen is None else union(seen, liked)
        shared, itemsize = candidates.shared, np.dtype(np.float32).itemsize
        if candidates.allowed is not None:
            check_answer(len(users), asked.N, state.shape[1], itemsize)
            rows, found = candidates.pairs(seen)
            ids, scores = best_pairs(rows, found, state.scores[found].astype(np.float32), len(users), asked.N)
        else:
            allowed = np.ones(state.shape[1], dtype=bool) if shared is None else shared
            check_answer(len(users), asked.N, int(np.count_nonzero(allowed)), itemsize)
            ids, scores = rank_by_count(state.scores, allowed, seen, len(users), asked.N)
        if absent is not None and asked.unknown.rule == "drop":
            ids[absent], scores[absent] = -1, -np.inf
        return shown(state, "item", ids, scores, asked.by_label, is_single(userid, asked.by_label))

    def predict(self, users: Any, items: Any = None, *, labels: bool = False, unknown: str = "error") -> np.ndarray:
        """Damped item mean for each pair, float32 of shape (n,).

        Parameters
        ----------
        users, items : int or integer array, shape (n,); or a table of pairs as `users` alone
            Positions, or labels, broadcast against each other; predictions do not depend on the user.
        labels, unknown
            As for `predict` of the estimators. Unknown items have the global mean under "popular"; unknown users do
            not matter then.

        Raises
        ------
        NotFittedError
            `fit` was not called.
        TypeError, ValueError, UnknownLabelError
            An id is unknown, or the lengths differ.
        """
        state, by_label, strangers = self._fitted(), check_bool("labels", labels), Unknown.check(unknown)
        if items is None and not is_pairs(users):
            raise ValueError("predict takes users and items, or a table of pairs (a data frame, ratings.entries)")
        users, items = pairs_of(state, users, items, by_label, strangers)
        strangers.report()
        found = state.item_means[np.maximum(items, 0)].astype(np.float32)
        found[items < 0] = state.global_mean
        if strangers.rule == "drop":
            found[(users < 0) | (items < 0)] = np.nan
        return found


def union(left: sp.csr_array, right: sp.csr_array) -> sp.csr_array:
    rows = np.concatenate([entry_rows(part) for part in (left, right)])
    columns = np.concatenate([part.indices for part in (left, right)])
    return from_triplets(rows, columns, np.ones(len(rows)), left.shape, duplicates="first")


def best_pairs(
    rows: np.ndarray, items: np.ndarray, scores: np.ndarray, n_rows: int, N: int
) -> tuple[np.ndarray, np.ndarray]:
    """The N items of each row with the highest scores, of pairs (row, item), and these scores; shape (n_rows, N).

    Ties are in order of position; -1 and -inf where a row has fewer items.
    """
    order = np.lexsort((items, -scores, rows))
    rows, items, scores = rows[order], items[order], scores[order]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    best = place < N
    ids: np.ndarray = np.full((n_rows, N), -1, dtype=np.int32)
    values: np.ndarray = np.full((n_rows, N), -np.inf, dtype=scores.dtype)
    ids[rows[best], place[best]], values[rows[best], place[best]] = items[best], scores[best]
    return ids, values


def rank_by_count(
    counts: np.ndarray, allowed: np.ndarray, seen: sp.csr_array | None, n_users: int, N: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rank the `allowed` items (a mask) by descending count, for users without factors; without entries of `seen`.

    Items and counts have the shape (n_users, N). Ties are in order of position; -1 and -inf where fewer items are left.
    """
    order, longest = np.flatnonzero(allowed), 0 if seen is None else int(np.diff(seen.indptr).max(initial=0))
    if N + longest < len(order):  # nothing behind these places is shown
        least = np.partition(counts[order], len(order) - N - longest)[len(order) - N - longest]
        order = order[counts[order] >= least]
    order = order[np.argsort(-counts[order], kind="stable")]
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
        place_of = np.full(n_items, -1, dtype=np.int64)
        place_of[order] = np.arange(len(order))
        rows, places = entry_rows(seen), place_of[seen.indices]
        rows, places = rows[places >= 0], places[places >= 0]  # seen items that are not candidates do not matter
        start = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=n_users))))
        stride = n_items + N
        keys = np.sort(rows * stride + places)
        keys -= np.arange(len(keys)) - start[rows]  # sorting changed the order within rows only
        wanted = np.arange(n_users, dtype=np.int64)[:, None] * stride + np.arange(N)
        place += np.searchsorted(keys, wanted, side="right") - start[:-1, None]
    ids = np.full((n_users, N), -1, dtype=np.int32)
    left = place < len(order)
    ids[left] = order[place[left]]
    return ids
