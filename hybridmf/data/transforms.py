"""Methods of `Ratings` that return new ratings, and the views that scikit-learn splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import scipy.sparse as sp

from ..core.frames import check_kind, make_frame
from ..core.sparse import entry_rows, keep_entries, take_rows
from ..core.validate import check_int, check_real, from_triplets, make_csr
from ..errors import RatingsError

Self = TypeVar("Self", bound="Transforms")


class EntryView(Generic[Self]):
    """Entries of ratings as samples: an index selects entries, and the result is `Ratings` of the same shape.

    Attributes
    ----------
    ratings : Ratings
    shape : (int,)
        Number of entries.
    """

    def __init__(self, ratings: Self) -> None:
        self.ratings = ratings

    @property
    def shape(self) -> tuple[int]:
        """(nnz,)."""
        return (int(self.ratings.user_items.nnz),)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, entries: Any) -> Self:
        mask = np.zeros(len(self), dtype=bool)
        mask[_axis_key(entries)] = True
        return self.ratings._keep(mask)


class Transforms:
    """Selection, values, weights and export of ratings; the base of `hybridmf.Ratings`."""

    user_items: sp.csr_array
    user_ids: np.ndarray | None
    item_ids: np.ndarray | None
    timestamps: np.ndarray | None
    frame_kind: str | None

    def _of(
        self: Self,
        matrix: sp.csr_array,
        timestamps: np.ndarray | None,
        user_ids: np.ndarray | None = None,
        item_ids: np.ndarray | None = None,
    ) -> Self:
        raise NotImplementedError

    def _keep(self: Self, mask: np.ndarray) -> Self:
        """The entries where `mask`, shape (nnz,), is true; the shape does not change."""
        times = None if self.timestamps is None else self.timestamps[mask]
        return self._of(keep_entries(self.user_items, mask), times)

    # ------------------------------------------------------------------------------------------------- selection

    def __len__(self) -> int:
        """Number of users."""
        return int(self.user_items.shape[0])

    def __getitem__(self: Self, rows: Any) -> Self:
        """Ratings of some users, by position: integers, a slice or a mask; all items stay.

        Users without labels are renumbered.
        """
        positions = np.ascontiguousarray(np.atleast_1d(np.arange(len(self))[_axis_key(rows)]))
        entries = _entries_of_rows(self.user_items, positions)
        times = None if self.timestamps is None else self.timestamps[entries]
        ids = None if self.user_ids is None else self.user_ids[positions]
        return self._of(take_rows(self.user_items, positions), times, ids)

    @property
    def entries(self: Self) -> EntryView[Self]:
        """The entries as samples, for scikit-learn's splitters: ``GridSearchCV(...).fit(ratings.entries)``."""
        return EntryView(self)

    def k_core(self: Self, k: int, item_k: int | None = None) -> Self:
        """The largest part in which each user has at least k entries and each item at least `item_k`.

        Parameters
        ----------
        k : int
        item_k : int, optional
            Default: k.

        Returns
        -------
        Ratings
            Without the other users and items. Users and items without labels get their former positions as labels.

        Raises
        ------
        TypeError, ValueError
        RatingsError
            Nothing is left.
        """
        k = check_int("k", k, 1)
        item_k = k if item_k is None else check_int("item_k", item_k, 1)
        rows, columns = entry_rows(self.user_items), self.user_items.indices
        n_users, n_items = self.user_items.shape
        mask = np.ones(len(columns), dtype=bool)
        while True:
            users = np.bincount(rows[mask], minlength=n_users) >= k
            items = np.bincount(columns[mask], minlength=n_items) >= item_k
            kept = mask & users[rows] & items[columns]
            if np.array_equal(kept, mask):
                break
            mask = kept
        if not mask.any():
            raise RatingsError(f"no user and item have k={k} and item_k={item_k} entries among each other")
        part = self._keep(mask)
        matrix = take_rows(part.user_items, np.flatnonzero(users))
        places = (np.cumsum(items) - 1).astype(np.int32)
        matrix = make_csr(matrix.indptr, places[matrix.indices], matrix.data, (matrix.shape[0], int(items.sum())))
        ids = [
            np.flatnonzero(used) if labels is None else labels[used]
            for used, labels in ((users, self.user_ids), (items, self.item_ids))
        ]
        return self._of(matrix, part.timestamps, *ids)

    # --------------------------------------------------------------------------------------------------- values

    def with_values(self: Self, values: Callable[[np.ndarray], Any] | Any) -> Self:
        """The same entries with other values.

        Parameters
        ----------
        values : callable, or array of shape (nnz,)
            A function of the values, such as ``np.log1p``; or values in the order of ``user_items.data``.

        Returns
        -------
        Ratings

        Raises
        ------
        RatingsError
            Not one finite value for each entry.
        """
        old = self.user_items
        new = np.asarray(values(old.data.copy()) if callable(values) else values)
        if new.shape != old.data.shape:
            raise RatingsError(f"values has shape {new.shape}; expected one value for each of {old.nnz} entries")
        checked = from_triplets(entry_rows(old), old.indices, new, old.shape, name="values")
        return self._of(checked, self.timestamps)

    def binarize(self: Self, threshold: float | None = None) -> Self:
        """Entries of at least `threshold` (default: more than 0) with the value 1; all others are dropped."""
        data = self.user_items.data
        # as float32, like the values
        mask = data > 0 if threshold is None else data >= np.float32(check_real("threshold", threshold))
        return self._keep(mask).with_values(np.ones_like)

    def log_weight(self: Self, scale: float = 1.0) -> Self:
        """Values log(1 + value / scale): the confidence of Hu, Koren and Volinsky (2008), with their epsilon as scale.

        Parameters
        ----------
        scale : float
            More than 0.
        """
        scale = check_real("scale", scale, 0.0, strict=True)
        return self.with_values(np.log1p(self._weights() / scale))

    def tfidf_weight(self: Self) -> Self:
        """Square root of each value times the inverse frequency of its item, as `implicit` computes it.

        Users are documents and items are terms: log(n_users / (1 + entries of the item)), at least 0.
        """
        return self.with_values(np.sqrt(self._weights()) * self._rarity())

    def bm25_weight(self: Self, K1: float = 100.0, B: float = 0.8) -> Self:
        """Okapi BM25 weights, as `implicit` computes them: large counts saturate, and frequent items weigh less.

        Parameters
        ----------
        K1 : float
            Value at which half of the saturation is reached, for a user with an average sum of values.
        B : float
            Normalization by the sum of each user's values, from 0 (none) to 1.

        Notes
        -----
        Users are documents and items are terms. implicit's examples call its function with a matrix of items x users.
        """
        K1, B = check_real("K1", K1, 0.0), check_real("B", B, 0.0)
        if B > 1:
            raise ValueError(f"B must be <= 1, got {B:g}")
        values, rows = self._weights(), entry_rows(self.user_items)
        sums = np.bincount(rows, weights=values, minlength=len(self))
        length = 1.0 - B + B * sums / (sums.mean() or 1.0)
        divisor = K1 * length[rows] + values
        weights = np.divide(values * (K1 + 1.0), divisor, out=np.zeros_like(values), where=divisor > 0)
        return self.with_values(weights * self._rarity())

    def _weights(self) -> np.ndarray:
        """Values in float64, none of them negative."""
        values = self.user_items.data.astype(np.float64)
        if len(values) and values.min() < 0:
            raise RatingsError(f"weights are of counts; the smallest value is {values.min():g}, expected >= 0")
        return values

    def _rarity(self) -> np.ndarray:
        """Inverse frequency of the item of each entry."""
        counts = np.bincount(self.user_items.indices, minlength=self.user_items.shape[1])
        rarity = np.maximum(np.log(max(1, len(self))) - np.log1p(counts), 0.0)  # negative values would mean dislike
        return np.asarray(rarity[self.user_items.indices])

    # ---------------------------------------------------------------------------------------------------- export

    def to_frame(self, backend: str | None = None) -> Any:
        """Data frame with the columns user, item, value and, if they are known, timestamp; one row for each entry.

        Parameters
        ----------
        backend : {"pandas", "polars", "pyarrow"}, optional
            Default: the library of the frame that the ratings came from, else the first that is installed.

        Raises
        ------
        ImportError, ValueError
        """
        kind = check_kind("backend", backend, self.frame_kind)
        matrix = self.user_items
        columns = {
            "user": _taken(self.user_ids, entry_rows(matrix)),
            "item": _taken(self.item_ids, matrix.indices),
            "value": matrix.data,
        }
        if self.timestamps is not None:
            columns["timestamp"] = self.timestamps
        return make_frame({name: np.array(column) for name, column in columns.items()}, kind)


def _taken(ids: np.ndarray | None, positions: np.ndarray) -> np.ndarray:
    """Labels of positions; strings as objects, so that repeated ones share memory."""
    if ids is None:
        return positions
    return ids.astype(object)[positions] if ids.dtype.kind == "U" else ids[positions]


def _axis_key(key: Any) -> Any:
    """Key of the first axis; scikit-learn passes ``(rows, ...)``."""
    if isinstance(key, tuple):
        if len(key) == 2 and key[1] is Ellipsis:
            return key[0]
        raise TypeError("ratings are indexed by users alone: integers, a slice or a mask")
    return list(key) if isinstance(key, range) else key


def _entries_of_rows(matrix: sp.csr_array, rows: np.ndarray) -> np.ndarray:
    """Indices of the entries of `rows`, row by row."""
    places = make_csr(matrix.indptr, matrix.indices, np.arange(matrix.nnz, dtype=np.float64), matrix.shape)  # exact
    return take_rows(places, rows).data.astype(np.int64)
