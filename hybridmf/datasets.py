"""Synthetic ratings in the shapes of published data sets, drawn from a seed: for comparisons and benchmarks.

Two distributions of entries over users and items: one for all shapes (log-normal users, Zipf items), and one fitted to
the published properties of each shape (`PUBLISHED`): its longest row and column, how many users and items occur.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from scipy.special import ndtri

from .core.validate import check_choice, check_int, check_real
from .ratings import Ratings

SHAPES: dict[str, tuple[int, int, int]] = {
    "epinions": (49_290, 139_738, 664_824),
    "ml-1m": (6_040, 3_706, 1_000_209),
    "ml-10m": (71_567, 65_133, 9_000_000),
    "ml-20m": (138_493, 27_278, 20_000_263),
    "netflix": (480_189, 17_770, 99_072_112),
    "yahoo-r1": (1_948_882, 98_212, 115_248_575),
    "sls": (1_748_122, 62_729, 6_804_304),
    "rucci": (1_977_885, 109_900, 7_791_168),
    "msd": (1_019_318, 384_546, 48_373_586),
    "eachmovie": (1_623, 61_265, 2_811_717),
    "yahoo-songs": (130_558, 136_736, 49_770_695),
}
"""Users, items and entries as published: BALS table 1; Gates et al. table I (Million Song Dataset, EachMovie, whose
rows are the films, Yahoo! Song); MovieLens README (1M); Massa and Avesani 2007 (Epinions)."""

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
    """Published degrees of rows or columns.

    Attributes
    ----------
    used : int, optional
        Rows with entries; the others are ids that do not occur. Default: all.
    shortest : int
        Entries of the shortest row with entries.
    longest : int, optional
    single : int, optional
        Rows with exactly one entry, where `longest` is not known.
    balance : float, optional
        KONECT's balanced inequality ratio P, where `longest` is known: the longest rows, a share P of all, have the
        share 1 - P of the entries.
    even : bool
        All rows have about the same number of entries.
    """

    used: int | None = None
    shortest: int = 1
    longest: int | None = None
    single: int | None = None
    balance: float | None = None
    even: bool = False


@dataclass(frozen=True)
class Published:
    """Published properties of a data set beyond its shape.

    Attributes
    ----------
    users, items : Degrees
    entries : int, optional
        Of the matrix that `users` and `items` describe; default: that of `SHAPES`.
    source : str
    """

    users: Degrees = Degrees()
    items: Degrees = Degrees()
    entries: int | None = None
    source: str = "means only"


PUBLISHED: dict[str, Published] = {
    "ml-1m": Published(
        Degrees(shortest=20, longest=2_314, balance=0.296), Degrees(longest=3_428, balance=0.258), source="KONECT"
    ),
    "ml-10m": Published(  # four fifths of the ratings, as in BALS table 1
        Degrees(69_878, 16, 5_887, balance=0.281),
        Degrees(10_677, 1, 27_891, balance=0.174),
        8_000_044,
        "BALS table 1; KONECT, times 0.8",
    ),
    "ml-20m": Published(  # the balance of a log-normal distribution with the published Gini coefficient of 0.903
        Degrees(shortest=20, longest=9_254),
        Degrees(26_744, 1, 67_310, balance=0.120),
        source="MovieLens README; LensKit codex",
    ),
    "netflix": Published(
        Degrees(longest=17_653, balance=0.267), Degrees(shortest=3, longest=232_944, balance=0.148), source="KONECT"
    ),
    "yahoo-r1": Published(Degrees(single=197_277), source="BALS section 3.2: rows with one entry"),
    "sls": Published(Degrees(even=True), Degrees(even=True), source="BALS section 6.5: evenly distributed"),
    "rucci": Published(Degrees(even=True), Degrees(even=True), source="BALS section 6.5: evenly distributed"),
    "msd": Published(
        Degrees(shortest=10, longest=4_400), Degrees(longest=110_479), source="Taste Profile subset of the MSD"
    ),
}
"""For other shapes, only the sizes are published."""

PIECE = 1 << 20
"""Entries scored at a time; the gathered tastes of 100 million entries would take gigabytes."""


def shape_of(name: object, scale: object = 1.0) -> tuple[int, int, int]:
    """Users, items and entries of a shape; both sides are scaled equally, which keeps the density.

    Raises
    ------
    ValueError
        An unknown name (the known ones are listed), or a scale outside (0, 1].
    """
    m, n, nnz = SHAPES[check_choice("shape", name, tuple(SHAPES))]
    factor = check_real("scale", scale, 0.0, strict=True)
    if factor > 1:
        raise ValueError(f"scale must be at most 1, got {factor:g}")
    return max(2, round(m * factor)), max(2, round(n * factor)), max(4, round(nnz * factor**2))


def synthetic(
    shape: str,
    *,
    feedback: Literal["explicit", "implicit"] = "explicit",
    scale: float = 1.0,
    seed: int = 0,
    degrees: Literal["common", "published"] = "common",
) -> Ratings:
    """Ratings 1 to 5, or counts, of a published shape.

    Users' degrees are log-normal and items' popularity follows Zipf's law, or both are fitted to the published
    properties of the shape. Explicit ratings have rank 8 plus noise. Implicit feedback has tastes: each item belongs to
    one of 20 groups, four in five of a user's entries fall into 4 groups the user likes, and counts follow a power law.
    Repeated pairs are merged, so there are somewhat fewer entries than published.

    Parameters
    ----------
    shape : str
        A key of `SHAPES`.
    feedback : {"explicit", "implicit"}
    scale : float
        0.1 draws a tenth of the users and items, and a hundredth of the entries.
    seed : int
    degrees : {"common", "published"}
        "common": one distribution for all shapes. "published": log-normal degrees of users and popularity of items that
        have the shape's published mean and maximum (`PUBLISHED`). Repeated pairs are redrawn, so that the number of
        entries is within a per cent of the published one. Implicit feedback then has no tastes; its counts follow the
        same law.

    Returns
    -------
    Ratings
        Without labels.

    Raises
    ------
    ValueError
        An unknown shape, feedback or kind of degrees; a scale outside (0, 1].

    Examples
    --------
    >>> from hybridmf.datasets import synthetic
    >>> synthetic("ml-1m", scale=0.1).shape
    (604, 371)
    """
    m, n, nnz = shape_of(shape, scale)
    rng = np.random.default_rng(check_int("seed", seed, 0))
    implicit = check_choice("feedback", feedback, ("explicit", "implicit")) == "implicit"
    if check_choice("degrees", degrees, ("common", "published")) == "published":
        users, popularity = published_degrees(shape, scale, rng)
        pairs = draw_pairs(np, rng, users, popularity)
        if implicit:
            return _ratings(pairs // n, pairs % n, _plays(len(pairs), rng), (m, n))
        return _rate(pairs, m, n, rng)
    if implicit:
        return _counts(m, n, nnz, rng)
    return _stars(m, n, nnz, rng)


# ------------------------------------------------------------------------------------------------- published degrees


def published_degrees(shape: str, scale: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Entries of each user, and weights of the items, as far as they are published (`PUBLISHED`), in random order.

    Returns
    -------
    users : int64 array, shape (m,)
    items : float64 array, shape (n,)
        For `draw_pairs`.
    """
    m, n, nnz = shape_of(shape, scale)
    facts = PUBLISHED.get(shape, Published())
    entries = nnz if facts.entries is None else max(4, round(facts.entries * scale**2))
    users = _fitted(m, entries, n, _scaled(facts.users, scale), FITTED_SIGMA["users"])
    users = np.minimum(np.rint(users), facts.items.used or n)
    items = _fitted(n, entries, m, _scaled(facts.items, scale), FITTED_SIGMA["items"])
    return rng.permutation(users.astype(np.int64)), rng.permutation(_weights(users, items))


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
    """Degrees at some places, longest first, each standing for some rows.

    Attributes
    ----------
    places : float64 array
        Shares of the rows before them.
    sizes : array
        Rows each stands for.
    total, base, room : int
        Entries of all rows; what every row has, and what none exceeds.
    """

    places: np.ndarray
    sizes: np.ndarray
    total: int
    base: int
    room: int

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

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    random : Generator
        Of that module.
    users : int64 array, shape (m,)
        Entries of each user.
    items : float64 array, shape (n,)
        Weights.

    Returns
    -------
    int64 array of `xp`, shape (nnz,)
        ``user * n + item``, ascending; a few in a thousand fewer than requested.
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


def _distinct(xp: Any, numbers: Any) -> Any:
    """The distinct ones, ascending; NumPy's `unique` hashes, which takes 20 times as long for numbers like these."""
    numbers = xp.sort(numbers)
    first = xp.ones(len(numbers), dtype=bool)
    first[1:] = numbers[1:] != numbers[:-1]
    return numbers[first]


# --------------------------------------------------------------------------------------------- common degrees, values


def _degrees(m: int, nnz: int, rng: np.random.Generator) -> np.ndarray:
    activity = rng.lognormal(0.0, 1.1, m)
    drawn: np.ndarray = rng.multinomial(nnz, activity / activity.sum())
    return drawn


def _popularity(n: int) -> np.ndarray:
    popularity: np.ndarray = 1.0 / (np.arange(n) + 20.0) ** 0.9
    return popularity


def _stars(m: int, n: int, nnz: int, rng: np.random.Generator, rank: int = 8) -> Ratings:
    users = np.repeat(np.arange(m), _degrees(m, nnz, rng))
    popularity = _popularity(n)
    edges = np.cumsum(popularity / popularity.sum())
    items = rng.permutation(n)[np.minimum(np.searchsorted(edges, rng.random(nnz)), n - 1)]
    return _rate(_distinct(np, users.astype(np.int64) * n + items), m, n, rng, rank)


def _rate(pairs: np.ndarray, m: int, n: int, rng: np.random.Generator, rank: int = 8) -> Ratings:
    """Ratings 1 to 5 of pairs ``user * n + item``: planted low rank plus noise."""
    users, items = pairs // n, pairs % n
    taste, kind = rng.normal(size=(m, rank)).astype(np.float32), rng.normal(size=(n, rank)).astype(np.float32)
    score = np.empty(len(pairs), dtype=np.float32)
    for start in range(0, len(pairs), PIECE):
        part = slice(start, start + PIECE)
        score[part] = np.einsum("ij,ij->i", taste[users[part]], kind[items[part]])
    score = 3.5 + score / np.sqrt(rank) + rng.normal(scale=0.5, size=len(pairs)).astype(np.float32)
    return _ratings(users, items, np.clip(np.rint(score), 1, 5), (m, n))


def _counts(m: int, n: int, nnz: int, rng: np.random.Generator, groups: int = 20, favourites: int = 4) -> Ratings:
    degrees = _degrees(m, nnz, rng)
    popularity = rng.permutation(_popularity(n))  # items lie in order of their group
    users = np.repeat(np.arange(m), degrees)
    edges = np.concatenate([[0.0], np.cumsum(popularity)])
    bounds = edges[np.linspace(0, n, groups + 1).astype(int)]
    liked = rng.integers(groups, size=(m, favourites), dtype=np.int32)
    group = liked[users, rng.integers(favourites, size=nnz)]
    low, high = bounds[group], bounds[group + 1]
    anywhere = rng.random(nnz) < 0.2
    low[anywhere], high[anywhere] = 0.0, edges[-1]
    items = np.minimum(np.searchsorted(edges, low + rng.random(nnz) * (high - low), side="right") - 1, n - 1)
    pairs = _distinct(np, users.astype(np.int64) * n + rng.permutation(n)[items])
    return _ratings(pairs // n, pairs % n, _plays(len(pairs), rng), (m, n))


def _plays(number: int, rng: np.random.Generator) -> np.ndarray:
    """Counts with a power-law tail, float32."""
    counts: np.ndarray = np.minimum(rng.zipf(2.0, number), 100).astype(np.float32)
    return counts


def _ratings(users: Any, items: Any, values: np.ndarray, shape: tuple[int, int]) -> Ratings:
    return Ratings.from_coo(users, items, values, shape=shape)
