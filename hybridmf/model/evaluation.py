"""Results of `hybridmf.evaluate`: metrics, their values for each user, and bootstrap intervals over users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.frames import pandas_frame
from ..core.table import format_table, html_table
from ..core.validate import check_int, check_real
from ..data.labels import places_among

GROUPS = 10_000
"""Maximum number of users that are resampled one by one. More users are divided at random into this many groups, whose
sums are resampled: the distribution of the result is the same, and the cost does not grow with the number of users."""

RESAMPLES = 1_000

BATCH = 50  # resamples at a time, each an index for every group


class Interval(NamedTuple):
    """A mean over users, or a difference of two, with the bounds of its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


class Evaluation(dict[str, float]):
    """Metrics by name, as returned by `evaluate`: a dict with further attributes.

    Attributes
    ----------
    n_users : int
        Evaluated users: those with a relevant test item; if only rmse and mae are requested, those with a test entry.
    n_cold_users : int or None
        Evaluated users without training entries; None if neither the model nor `train` determines them.
    n_dropped : int
        Test entries dropped by ``unknown="drop"``.
    users : int64 array, shape (n,)
        Positions of the users with a test entry, ascending.
    user_ids : array, shape (n,), or None
        Labels of `users`; None if the model has none.
    n_entries : int64 array, shape (n,)
        Test entries of each of them.
    per_user : dict of str to float64 array, shape (n,)
        Value of each metric for each of `users`, NaN where it is not defined; rmse and mae are those of the user's
        entries. ``coverage@k`` is a property of all lists together and has none.
    apart : Parts
        Under ``include_cold=True``, the metrics but ``auc`` of parts of the test entries, where there are relevant
        ones: "warm items" are ranked among those with training entries, as `recommend` does by default, "cold items"
        among all, "cold items among cold" among those without training entries; "warm users" and "cold users". Empty
        otherwise.
    """

    n_users: int = 0
    n_cold_users: int | None = None
    n_dropped: int = 0
    users: np.ndarray
    user_ids: np.ndarray | None = None
    n_entries: np.ndarray
    per_user: dict[str, np.ndarray]
    apart: Parts

    def interval(
        self, metric: str, level: float = 0.95, *, n_resamples: int = RESAMPLES, random_state: int = 0
    ) -> Interval:
        """Confidence interval of a metric, by the percentile bootstrap over users (Efron and Tibshirani 1993).

        Parameters
        ----------
        metric : str
            One of `per_user`.
        level : float
            Between 0 and 1.
        n_resamples, random_state : int

        Returns
        -------
        Interval

        Raises
        ------
        TypeError, ValueError
            A metric without values for each user, fewer than two users, or a `level` out of range.
        """
        values, weights = self._values(metric)
        return _bootstrap(metric, [values], weights, level, n_resamples, random_state)

    def difference(
        self,
        other: Mapping[str, float],
        metric: str,
        level: float = 0.95,
        *,
        n_resamples: int = RESAMPLES,
        random_state: int = 0,
    ) -> Interval:
        """A metric minus that of another model, with its confidence interval by the paired bootstrap.

        Each resample draws users and takes the values of both evaluations for them, so properties of a user that affect
        both cancel out. If the interval does not contain 0, the models differ at this level.

        Parameters
        ----------
        other : Evaluation
            Of another model on the same test entries and users, who are paired by label where both have labels.
        metric, level, n_resamples, random_state
            As for `interval`.

        Returns
        -------
        Interval

        Raises
        ------
        TypeError, ValueError
            As for `interval`; also if `other` is not of the same users and test entries.
        """
        if not isinstance(other, Evaluation):
            raise TypeError(f"other must be an Evaluation, as evaluate returns it, got {type(other).__name__}")
        ours, weights = self._values(metric)
        theirs, _ = other._values(metric)
        order = self._order_in(other)
        if order is None:
            raise ValueError(
                f"other was evaluated on {len(other.users)} users and {other.n_entries.sum()} test entries, this on "
                f"{len(self.users)} and {self.n_entries.sum()}; a paired difference needs the same ones"
            )
        return _bootstrap(metric, [ours, theirs[order]], weights, level, n_resamples, random_state)

    def _order_in(self, other: Evaluation) -> np.ndarray | None:
        """Place of each user in another evaluation; None unless it has the same users with as many entries."""
        ours, theirs = self.users, other.users
        if self.user_ids is not None and other.user_ids is not None:
            ours, theirs = self.user_ids, other.user_ids
        order = places_among(theirs, ours)
        same = (
            len(theirs) == len(ours) and np.all(order >= 0) and np.array_equal(self.n_entries, other.n_entries[order])
        )
        return order if same else None

    def _repr_html_(self) -> str:
        found = html_table(["metric", "value"], [[name, f"{value:.4f}"] for name, value in self.items()], "<>")
        cold = f", {self.n_cold_users:,} of them cold" if self.n_cold_users else ""
        apart = self.apart._repr_html_() if getattr(self, "apart", None) else ""
        return f"{found}<p>{self.n_users:,} users{cold}</p>{apart}"

    def _values(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Terms of each user and their weights, whose weighted mean gives the metric."""
        if metric not in self.per_user:
            known = ", ".join(self.per_user) or "none"
            raise ValueError(f"metric {metric!r} has no values for each user here; those that have: {known}")
        values = self.per_user[metric]
        if metric in ("rmse", "mae"):
            return (values**2 if metric == "rmse" else values), self.n_entries.astype(np.float64)
        return values, np.ones(len(values))


class Evaluations(dict[str, Evaluation]):
    """An `Evaluation` for each of several models on the same users and test entries, as returned by `evaluate`.

    ``print`` shows a table: each metric with its 95 % interval and, below, the difference to the first model with that
    of the paired bootstrap, which decides whether two models differ.
    """

    @property
    def apart(self) -> dict[str, Evaluations]:
        """`Evaluation.apart` of all models, by part."""
        parts = dict.fromkeys(part for found in self.values() for part in found.apart)
        return {
            part: Evaluations({name: found.apart[part] for name, found in self.items() if part in found.apart})
            for part in parts
        }

    def to_frame(self) -> Any:
        """A pandas data frame with one row for each model (or part) and metric.

        It has the value and, for models, the difference to the first one, with the bounds of their 95 % intervals; for
        parts the number of users.

        Raises
        ------
        ImportError
            pandas is not installed.
        """
        return pandas_frame(list(self._records()), "read the values, a dict")

    def _records(self) -> Iterator[dict[str, Any]]:
        names = ("low", "high", "difference", "difference_low", "difference_high")
        for name, metric, value, interval, difference in self._rows():
            bounds = (*_bounds(interval)[1:], *_bounds(difference))
            yield {"model": name, "metric": metric, "value": value} | dict(zip(names, bounds, strict=True))

    def _rows(self, compared: bool = True) -> Iterator[tuple[str, str, float, Interval | None, Interval | None]]:
        """Name, metric, value, interval, and if `compared` difference to the first model; None where there is none."""
        first: Any = next(iter(self.values()), None)
        for name, found in self.items():
            for metric, value in found.items():
                enough = metric in found.per_user and np.count_nonzero(~np.isnan(found.per_user[metric])) > 1
                differs = compared and enough and found is not first and found._order_in(first) is not None
                difference = found.difference(first, metric) if differs else None
                yield name, metric, value, found.interval(metric) if enough else None, difference

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        """Header, rows and alignment of the columns; one model has no differences."""
        width = 4 if len(self) > 1 else 3
        rows = [
            [name, metric, f"{value:.4f}" if interval is None else str(interval), "" if over is None else str(over)]
            for name, metric, value, interval, over in self._rows()
        ]
        header = ["model", "metric", "value (95 % interval)", f"over {next(iter(self))}"]
        return header[:width], [row[:width] for row in rows], "<<>>"[:width]

    def __str__(self) -> str:
        return format_table(*self._table(), indent=0)

    def _repr_html_(self) -> str:
        return html_table(*self._table())


class Parts(Evaluations):
    """An `Evaluation` for each of several parts of the test entries (`Evaluation.apart`); ``print`` shows a table."""

    def _records(self) -> Iterator[dict[str, Any]]:
        for part, metric, value, interval, _ in self._rows(compared=False):
            _, low, high = _bounds(interval)
            row = {"part": part, "metric": metric, "value": value, "low": low, "high": high}
            yield row | {"n_users": self[part].n_users}

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        rows = [
            [part, metric, f"{value:.4f}" if interval is None else str(interval), f"{self[part].n_users:,}"]
            for part, metric, value, interval, _ in self._rows(compared=False)
        ]
        return ["part", "metric", "value (95 % interval)", "users"], rows, "<<>>"


def _bounds(interval: Interval | None) -> Interval:
    return Interval(np.nan, np.nan, np.nan) if interval is None else interval


def _bootstrap(
    metric: str, terms: list[np.ndarray], weights: np.ndarray, level: float, n_resamples: int, random_state: int
) -> Interval:
    """Interval of the weighted mean of ``terms[0]``, or of its difference to that of ``terms[1]``."""
    level = check_real("level", level, 0.0, strict=True)
    if level >= 1:
        raise ValueError(f"level must satisfy 0 < level < 1, got {level:g}")
    n_resamples = check_int("n_resamples", n_resamples, 1)
    defined = ~np.any(np.isnan(terms), axis=0)
    if np.count_nonzero(defined) < 2:
        raise ValueError(f"{metric} is defined for {np.count_nonzero(defined)} users; an interval needs at least two")
    generator = np.random.default_rng(check_int("random_state", random_state, 0))
    sums = _grouped(np.stack([*(weights * each for each in terms), weights])[:, defined], generator)
    finish = np.sqrt if metric == "rmse" else np.asarray

    def statistic(totals: np.ndarray) -> np.ndarray:
        means = finish(totals[:-1] / totals[-1])
        return means[0] if len(means) == 1 else means[0] - means[1]

    found = [
        statistic(_resampled(sums, min(BATCH, n_resamples - done), generator)) for done in range(0, n_resamples, BATCH)
    ]
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(statistic(sums.sum(axis=1))), float(low), float(high))


def _grouped(rows: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Columns, summed up in `GROUPS` random groups of equal size where there are more of them."""
    n = rows.shape[1]
    if n <= GROUPS:
        return rows
    starts = np.linspace(0, n, GROUPS, endpoint=False).astype(np.int64)
    return np.add.reduceat(rows[:, generator.permutation(n)], starts, axis=1)


def _resampled(sums: np.ndarray, n_resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Sums over as many columns as there are, drawn with replacement: shape (len(sums), n_resamples)."""
    n = sums.shape[1]
    drawn = generator.integers(0, n, (n_resamples, n))
    return np.stack([row[drawn].sum(axis=1) for row in sums])


def as_evaluation(values: Mapping[str, float], **attributes: Any) -> Evaluation:
    """An `Evaluation` with its attributes."""
    found = Evaluation(values)
    vars(found).update({"apart": Parts()} | attributes)
    return found
