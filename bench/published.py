"""Synthetic ratings whose degrees are fitted to what is published of a data set (`PUBLISHED`).

That is the longest row and column, how many users and items occur, how evenly the entries are distributed, and how the
ids of items follow their popularity, or neighbouring rows have neighbouring columns (fitted to BALS' table 3). Explicit
values are those of `hybridmf.datasets.synthetic`; implicit feedback has no tastes, and its counts follow the same law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import ndtri

import hybridmf as hmf
from hybridmf.datasets import _distinct, _plays, _rate, shape_of

FITTED_SIGMA = {"users": 1.1, "items": 1.6}
"""Standard deviation of the logarithm of a side's degrees if only their mean is published."""

QUANTILES = 3000
"""Number of points at which a distribution of degrees is fitted."""

DENSE = 8
"""Rows with more than 1 / DENSE of all columns are drawn without replacement; drawing again would take many rounds."""

GROUPS = 24
"""Groups of users of similar degree, for whom repetition reduces an item's popularity by the same share."""

ROUNDS = 20
"""Maximum number of rounds that redraw repeated pairs; most shapes need half as many."""


@dataclass(frozen=True)
class Degrees:
    """Published degrees of rows or columns."""

    used: int | None = None  # rows with entries; the others are ids that do not occur. Default: all
    shortest: int = 1  # entries of the shortest row with entries
    longest: int | None = None
    single: int | None = None  # rows with exactly one entry, where `longest` is not known
    balance: float | None = None
    """KONECT's balanced inequality ratio P, where `longest` is known: the longest rows, a share P of all, have the
    share 1 - P of the entries."""
    even: bool = False  # all rows have about the same number of entries
    popularity: float = 0.0
    """How much ids follow popularity, popular ones first: 0 for a random order, 1 for the order of degrees."""
    late: float = 0.0  # of the ids with entries, the share that lies in the gaps after the others


@dataclass(frozen=True)
class Published:
    """Published properties of a data set beyond its shape."""

    users: Degrees = Degrees()
    items: Degrees = Degrees()
    entries: int | None = None  # of the matrix that `users` and `items` describe; default: that of `SHAPES`
    band: float | None = None
    """Where neighbouring rows have neighbouring columns: width of the band, relative to the number of columns."""
    source: str = "means only"


PUBLISHED: dict[str, Published] = {
    "ml-1m": Published(
        Degrees(shortest=20, longest=2_314, balance=0.296), Degrees(longest=3_428, balance=0.258), source="KONECT"
    ),
    "ml-10m": Published(  # four fifths of the ratings, as in BALS table 1
        Degrees(69_878, 16, 5_887, balance=0.281),
        Degrees(10_677, 1, 27_891, balance=0.174, popularity=0.8, late=0.32),
        8_000_044,
        source="BALS tables 1 and 3; KONECT, times 0.8",
    ),
    "ml-20m": Published(  # the balance of a log-normal distribution with the published Gini coefficient of 0.903
        Degrees(shortest=20, longest=9_254),
        Degrees(26_744, 1, 67_310, balance=0.120, popularity=0.9),
        source="MovieLens README; LensKit codex; BALS table 3",
    ),
    "netflix": Published(
        Degrees(longest=17_653, balance=0.267),
        Degrees(shortest=3, longest=232_944, balance=0.148, popularity=0.2),
        source="KONECT; BALS table 3",
    ),
    "yahoo-r1": Published(Degrees(single=197_277), source="BALS section 3.2: rows with one entry"),
    "sls": Published(Degrees(even=True), Degrees(even=True), band=1.4, source="BALS section 6.5, table 3"),
    "rucci": Published(Degrees(even=True), Degrees(even=True), band=0.31, source="BALS section 6.5, table 3"),
    "msd": Published(
        Degrees(shortest=10, longest=4_400), Degrees(longest=110_479), source="Taste Profile subset of the MSD"
    ),
}
"""For other shapes, only the sizes are published."""


def published(shape: str, *, implicit: bool = False, scale: float = 1.0, seed: int = 0) -> sp.csr_array:
    """Ratings 1 to 5, or counts, of a published shape; repeated pairs are redrawn.

    The number of entries is within a per cent of the published one.
    """
    m, n, _ = shape_of(shape, scale)
    rng = np.random.default_rng(seed)
    pairs = published_pairs(np, rng, shape, scale, rng)
    if implicit:
        return hmf.Ratings.from_coo(pairs // n, pairs % n, _plays(len(pairs), rng), shape=(m, n)).user_items
    return _rate(pairs, m, n, rng).user_items


def published_pairs(xp: Any, random: Any, shape: str, scale: float, rng: np.random.Generator) -> Any:
    """Distinct pairs ``user * n + item`` of a published shape, ascending; `xp` and `random` as for `draw_pairs`."""
    facts = PUBLISHED.get(shape, Published())
    m, n, nnz = shape_of(shape, scale)
    if facts.band is not None:
        return _distinct(xp, xp.asarray(_banded(m, n, nnz, facts.band, rng)))
    users, items = published_degrees(shape, scale, rng)
    return _every_item(xp, rng, draw_pairs(xp, random, users, items), items, _scaled(facts.items, scale).used)


def _banded(m: int, n: int, nnz: int, width: float, rng: np.random.Generator) -> np.ndarray:
    """Pairs of a matrix with even rows and columns around its diagonal, in any order, some twice.

    Every column has the same number of places. The places are put into the order of the columns, moved by random
    distances of up to `width` columns' share, and given to the entries of the rows in turn.
    """
    degrees = rng.permutation(np.diff(np.rint(np.linspace(0, nnz, m + 1)).astype(np.int64)))
    places = np.arange(nnz)
    columns = np.empty(nnz, np.int64)
    columns[np.argsort(places + width * nnz * rng.random(nnz))] = places * n // nnz
    return np.repeat(np.arange(m), degrees) * n + columns


def _every_item(xp: Any, rng: np.random.Generator, pairs: Any, weights: np.ndarray, used: int | None) -> Any:
    """One entry more for items that were not drawn, until as many items have entries as are published."""
    n = len(weights)
    degrees = xp.bincount(pairs % n, minlength=n)
    unused = xp.flatnonzero((degrees == 0) & (xp.asarray(weights) > 0))
    missing = min(len(unused), max(0, int(used or 0) - n + int((degrees == 0).sum())))
    users = pairs[xp.asarray(rng.integers(0, len(pairs), missing))] // n
    return _distinct(xp, xp.concatenate([pairs, users * n + unused[:missing]])) if missing else pairs


def published_degrees(shape: str, scale: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Entries of each user, in random order, and weights of the items, as far as they are published (`PUBLISHED`).

    `users`: int64 array, shape (m,). `items` (float64 array, shape (n,)): for `draw_pairs`.
    """
    m, n, nnz = shape_of(shape, scale)
    facts = PUBLISHED.get(shape, Published())
    entries = nnz if facts.entries is None else max(4, round(facts.entries * scale**2))
    users = _fitted(m, entries, n, _scaled(facts.users, scale), FITTED_SIGMA["users"])
    users = np.minimum(np.rint(users), facts.items.used or n)
    items = _fitted(n, entries, m, _scaled(facts.items, scale), FITTED_SIGMA["items"])
    return rng.permutation(users.astype(np.int64)), _in_order_of_ids(_weights(users, items), facts.items, rng)


def _in_order_of_ids(weights: np.ndarray, facts: Degrees, rng: np.random.Generator) -> np.ndarray:
    """Weights, of the most popular item first, by id: ids follow popularity as far as `facts` says."""
    if not facts.popularity and not facts.late:
        return rng.permutation(weights)
    filled = np.flatnonzero(weights > 0)
    places = (np.arange(len(filled)) + 0.5) / len(filled)
    noise = math.sqrt(1 - facts.popularity**2) * rng.standard_normal(len(filled))
    sequence = filled[np.argsort(facts.popularity * ndtri(places) + noise)]
    early = round((1 - facts.late) * len(filled))
    end = early if facts.late else len(weights)
    front = np.sort(rng.choice(end, early, replace=False))
    back = end + np.sort(rng.choice(len(weights) - end, len(filled) - early, replace=False))
    ordered = np.zeros(len(weights))
    ordered[np.concatenate([front, back])] = weights[sequence]
    return ordered


def _weights(users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Weights with which items get their degrees if no user has an item twice; shape (n,).

    A user who draws until d items are distinct has item c with probability ``1 - exp(-t_d w_c)``, where t_d makes these
    sum up to d. Users of like degree are taken together; t and w are found in turn.
    """
    groups = np.array_split(np.sort(users[users > 0]), GROUPS)
    sizes = np.array([len(group) for group in groups if len(group)], dtype=np.float64)
    means = np.array([group.mean() for group in groups if len(group)])
    weights, draws = items / items.sum(), means.copy()
    filled = weights > 0
    for _ in range(10):
        for _ in range(2):
            draws *= means / -np.expm1(-draws[:, None] * weights[filled]).sum(axis=1)
        reached = sizes @ -np.expm1(-draws[:, None] * weights[filled])
        weights[filled] *= items[filled] / reached
    return weights


def _scaled(facts: Degrees, scale: float) -> Degrees:
    """Published properties for a matrix whose sides and rows are `scale` times as long, with the same density."""

    def times(value: int | None) -> int | None:
        return None if value is None else max(1, round(value * scale))

    longest = None if facts.longest is None else max(2, round(facts.longest * scale))
    return replace(facts, used=times(facts.used), shortest=times(facts.shortest) or 1, longest=longest,
                   single=times(facts.single))  # fmt: skip


def _fitted(count: int, total: int, room: int, facts: Degrees, sigma: float) -> np.ndarray:
    """Degrees of `count` rows with `room` columns that sum up to about `total`, longest first, float64, shape (count,).

    ``shortest - 1 + exp(mu + sigma g(z))`` at the quantiles z of the normal distribution, with ``g(z) = z``, or
    ``(1 - exp(-c z)) / c`` where the balance is published, too: real popularity has a longer tail of rare items than a
    log-normal distribution with the same longest. sigma and c are found by bisection.
    """
    used = min(count, facts.used or count)
    result = np.zeros(count)
    if facts.even:  # whole numbers around the mean
        result[:used] = np.diff(np.rint(np.linspace(0, total, used + 1)))
        return result
    ranks = np.unique(np.geomspace(1, used, QUANTILES).astype(np.int64)) - 1
    sizes = np.diff(np.append(ranks, used))
    coarse = _Quantiles((ranks + sizes / 2) / used, sizes, total, min(facts.shortest - 1, total // used), room)
    curve = 0.0
    if facts.longest is not None and facts.balance is not None:
        curve = _bisect(partial(coarse.is_too_even, facts), -0.3, 3.0)
    fine = replace(coarse, places=(np.arange(used) + 0.5) / used, sizes=np.ones(used))
    result[:used] = fine.degrees(coarse.sigma(facts, curve, sigma), curve)
    return result


@dataclass(frozen=True)
class _Quantiles:
    """Degrees at some places, longest first, each standing for some rows."""

    places: np.ndarray  # shares of the rows before them
    sizes: np.ndarray  # rows each stands for
    total: int
    base: int
    room: int  # entries of all rows; what every row has, and what none exceeds

    def degrees(self, sigma: float, curve: float) -> np.ndarray:
        """Degrees that sum up to the total, but for those that are cut at the room."""
        z = -ndtri(self.places)
        bent = sigma * (z if abs(curve) < 1e-9 else -np.expm1(-curve * z) / curve)
        grown = np.exp(bent - bent[0])
        share = (self.total - self.base * self.sizes.sum()) / (self.sizes @ grown)
        fitted: np.ndarray = np.minimum(self.base + share * grown, self.room)
        return fitted

    def sigma(self, facts: Degrees, curve: float, default: float) -> float:
        """The spread with the published longest row, or number of rows with one entry."""
        if facts.longest is not None:
            longest = facts.longest
            return _bisect(lambda sigma: bool(self.degrees(sigma, curve)[0] < longest), 0.0, 20.0)
        if facts.single is not None:
            single = facts.single
            return _bisect(lambda sigma: bool(self.sizes @ (self.degrees(sigma, curve) < 1.5) < single), 0.0, 20.0)
        return default

    def is_too_even(self, facts: Degrees, curve: float) -> bool:
        """Whether a larger curve would come nearer to the published balance; not where the longest is out of reach."""
        assert facts.longest is not None and facts.balance is not None
        sigma = self.sigma(facts, curve, 0.0)
        reached = bool(self.degrees(sigma, curve)[0] > 0.99 * min(facts.longest, self.room))
        return reached and self.balance(sigma, curve) > facts.balance

    def balance(self, sigma: float, curve: float) -> float:
        """The share P of the longest rows that have the share 1 - P of the entries."""
        entries = self.sizes * self.degrees(sigma, curve)
        rows = np.cumsum(self.sizes) / self.sizes.sum()
        return float(np.interp(1.0, rows + np.cumsum(entries) / entries.sum(), rows))


def _bisect(is_below: Any, low: float, high: float) -> float:
    """Where `is_below` turns false."""
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def draw_pairs(xp: Any, random: Any, users: np.ndarray, items: np.ndarray) -> Any:
    """Distinct (user, item) pairs: the requested number for each user, items by their weights.

    `xp`: NumPy or CuPy. `random`: of that module. `users` (int64 array, shape (m,)): entries of each user. `items`
    (float64 array, shape (n,)): weights. The result (int64 array of `xp`, shape (nnz,)): ``user * n + item``,
    ascending; a few in a thousand fewer than requested.
    """
    n = len(items)
    wanted = xp.asarray(np.minimum(users, np.count_nonzero(items)))
    dense = xp.asarray(np.flatnonzero(users > n // DENSE))
    weights = xp.asarray(items)
    pairs = _without_replacement(xp, random, dense, wanted[dense], weights)
    missing = wanted.copy()
    missing[dense] = 0
    edges = xp.cumsum(weights / weights.sum())
    numbers = xp.arange(len(wanted))
    for _ in range(ROUNDS):
        total = int(missing.sum())
        if total <= int(wanted.sum()) // 2000:
            break
        ends = xp.cumsum(missing)
        owners = xp.searchsorted(ends, xp.arange(total), side="right")
        chosen = xp.minimum(xp.searchsorted(edges, random.random(total)), n - 1)
        pairs = _distinct(xp, xp.concatenate([pairs, numbers[owners] * n + chosen]))
        missing = wanted - xp.bincount(pairs // n, minlength=len(wanted))
    return pairs


def _without_replacement(xp: Any, random: Any, rows: Any, counts: Any, weights: Any) -> Any:
    """Columns of a few long rows: those with the largest ``log(weight) + Gumbel noise``, a row at a time."""
    n = len(weights)
    logs = xp.log(xp.maximum(weights, 1e-300))
    found = [xp.empty(0, dtype=np.int64)]
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        noise = -xp.log(-xp.log(xp.maximum(random.random(n), 1e-300)))
        found.append(row * n + xp.argpartition(logs + noise, n - count)[n - count :])
    return _distinct(xp, xp.concatenate(found))
