"""Methods of `Ratings` that return new ratings, and the views that scikit-learn splits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from typing import Any, Generic, TypeVar

import numpy as np
import scipy.sparse as sp

from ..core.frames import check_kind, make_frame
from ..core.sparse import entry_rows, keep_entries, take_rows
from ..core.validate import check_int, check_real, from_triplets, make_csr
from ..errors import RatingsError
from .labels import as_weights
from .text import parse_dates

Self = TypeVar("Self", bound="Transforms")

LEAST_DECAY = 1e-6
"""Least factor of `time_decay`, which keeps the weights of entries of any age in the range of float32."""


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
    weights: np.ndarray | None
    frame_kind: str | None

    def _of(
        self: Self,
        matrix: sp.csr_array,
        entries: np.ndarray | None = None,
        user_ids: np.ndarray | None = None,
        item_ids: np.ndarray | None = None,
    ) -> Self:
        """Ratings of a matrix with the times and weights of these `entries`, a mask or indices; None: of all."""
        raise NotImplementedError

    def _keep(self: Self, mask: np.ndarray) -> Self:
        """The entries where `mask`, shape (nnz,), is true; the shape does not change."""
        return self._of(keep_entries(self.user_items, mask), mask)

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
        ids = None if self.user_ids is None else self.user_ids[positions]
        return self._of(take_rows(self.user_items, positions), entries, ids)

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
        return part._of(matrix, None, *ids)

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
        return self._of(checked)

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
        return self.with_values(np.log1p(self._counts() / scale))

    def tfidf_weight(self: Self) -> Self:
        """Square root of each value times the inverse frequency of its item, as `implicit` computes it.

        Users are documents and items are terms: log(n_users / (1 + entries of the item)), at least 0.
        """
        return self.with_values(np.sqrt(self._counts()) * self._rarity())

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
        values, rows = self._counts(), entry_rows(self.user_items)
        sums = np.bincount(rows, weights=values, minlength=len(self))
        length = 1.0 - B + B * sums / (sums.mean() or 1.0)
        divisor = K1 * length[rows] + values
        weights = np.divide(values * (K1 + 1.0), divisor, out=np.zeros_like(values), where=divisor > 0)
        return self.with_values(weights * self._rarity())

    def _counts(self) -> np.ndarray:
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

    # --------------------------------------------------------------------------------------------------- weights

    def with_weights(self: Self, weights: Any) -> Self:
        """The same entries with other weights, which multiply their squared errors in a fit.

        Parameters
        ----------
        weights : array of shape (nnz,), or None
            Finite and more than 0, in the order of ``user_items.data``: by user, then by item. None: all entries weigh
            the same. `from_coo` takes weights in the order of its triplets, `from_frame` a column of them.

        Returns
        -------
        Ratings

        Raises
        ------
        RatingsError, TypeError
            Not one finite number above 0 for each entry.
        """
        ratings = self._of(self.user_items)
        ratings.weights = None if weights is None else as_weights(weights, self.user_items.nnz)
        return ratings

    def time_decay(self: Self, half_life: Any, *, now: Any = None) -> Self:
        """Weights that halve with each `half_life` of age: ``0.5 ** ((now - timestamp) / half_life)``.

        Values stay as they are: an old rating of 2 is still a 2, and counts less. Weights that the ratings have already
        are multiplied. (Koren 2009 fits such decays; `log_weight` and `bm25_weight` change values.)

        Parameters
        ----------
        half_life : float or timedelta
            Age at which an entry counts half, in the unit of `timestamps`: seconds for Unix times. For dates, a
            timedelta of Python, NumPy or pandas.
        now : timestamp, optional
            Time at which the age is 0; default: the latest timestamp. Of dates, a date, or text such as "2026-11-23".

        Returns
        -------
        Ratings
            An entry weighs at least a millionth, whatever its age.

        Raises
        ------
        ValueError, TypeError
            No timestamps, entries after `now`, or a `half_life` that is not more than 0 or has another unit.

        Examples
        --------
        >>> import hybridmf as hmf
        >>> ratings = hmf.Ratings.from_coo([0, 0, 1], [0, 1, 1], [5, 3, 4], timestamps=[0, 10, 20])
        >>> ratings.time_decay(half_life=10).weights
        array([0.25, 0.5 , 1.  ], dtype=float32)
        """
        if self.timestamps is None:
            raise ValueError(
                "time_decay needs the time of each entry, and ratings has none; read them with timestamp= (from_file, "
                "from_frame) or timestamps= (from_coo)"
            )
        decay = np.exp2(-ages_of(self.timestamps, half_life, now))
        weights = np.maximum(decay, LEAST_DECAY) * (1.0 if self.weights is None else self.weights)
        return self.with_weights(weights)

    # ---------------------------------------------------------------------------------------------------- export

    def to_frame(self, backend: str | None = None) -> Any:
        """Data frame with the columns user, item, value and, if known, timestamp and weight; one row for each entry.

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
        if self.weights is not None:
            columns["weight"] = self.weights
        return make_frame({name: np.array(column) for name, column in columns.items()}, kind)


def ages_of(times: np.ndarray, half_life: Any, now: Any) -> np.ndarray:
    """Ages in half-lives, float64."""
    if not len(times):
        return np.zeros(0)
    if times.dtype.kind == "M":
        if not isinstance(half_life, (timedelta, np.timedelta64)):
            raise TypeError(
                f"half_life must be a timedelta, since timestamps are dates, got {half_life!r} of type "
                f"{type(half_life).__name__}; for example numpy.timedelta64(30, 'D')"
            )
        unit = np.timedelta64(1, "us")
        try:
            length = float(np.timedelta64(half_life) / unit)
        except TypeError as error:  # of months and years
            raise TypeError(f"half_life must have a fixed length, such as days, got {half_life!r}") from error
        check_real("half_life in microseconds", length, 0.0, strict=True)
        latest = times.max() if now is None else _date(now)
        ages = (latest.astype("M8[us]") - times.astype("M8[us]")) / unit
    else:
        if isinstance(half_life, (timedelta, np.timedelta64)):
            raise TypeError(
                f"half_life must be a number in the unit of timestamps, which are numbers, got {half_life!r}; for Unix "
                "times, its seconds"
            )
        if are_calendar_dates(times):
            raise ValueError(
                f"timestamps are numbers that look like dates ({times.min()} to {times.max()}), whose differences are "
                "no ages: convert them, such as pandas.to_datetime(column.astype(str)), before from_frame or from_coo"
            )
        length = check_real("half_life", half_life, 0.0, strict=True)
        latest = times.max() if now is None else check_real("now", now)
        ages = (latest - times).astype(np.float64)
    later = int(np.count_nonzero(ages < 0))
    if later:
        raise ValueError(
            f"now={now!r} is before {later:,} of {len(times):,} timestamps, the latest of which is {times.max()}"
        )
    return np.asarray(ages / length)


def are_calendar_dates(times: np.ndarray) -> bool:
    """Whether numbers are all dates such as 20240105, of 1900 to 2099."""
    if times.dtype.kind != "i" or times.min() < 19_000_101 or times.max() > 20_991_231:
        return False
    month, day = times // 100 % 100, times % 100
    return bool(np.all((month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)))


def _date(now: Any) -> np.datetime64:
    """A date, or its text, in UTC."""
    try:
        if not isinstance(now, (np.datetime64, date, str)):
            raise TypeError(f"type {type(now).__name__}")
        return now if isinstance(now, np.datetime64) else parse_dates([now])[0]
    except (TypeError, ValueError) as error:
        raise TypeError(f"now must be a date, since timestamps are dates, got {now!r} ({error})") from error


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
