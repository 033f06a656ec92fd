"""Synthetic ratings in the shapes of published data sets, drawn from a seed: for comparisons and benchmarks."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

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
    "yahoo-music": (1_000_990, 624_961, 252_800_275),
}
"""Users, items and entries as published: BALS table 1; Gates et al. table I (Million Song Dataset, EachMovie, whose
rows are the films, Yahoo! Song); cuMF table 5 (YahooMusic: KDD Cup 2011, track 1); MovieLens README (1M); Massa and
Avesani 2007 (Epinions)."""

PIECE = 1 << 20  # entries scored at a time; the gathered tastes of 100 million entries would take gigabytes


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
) -> Ratings:
    """Ratings 1 to 5, or counts, of a published shape.

    Users' degrees are log-normal and items' popularity follows Zipf's law. Explicit ratings have rank 8 plus noise.
    Implicit feedback has tastes: each item belongs to one of 20 groups, four in five of a user's entries fall into 4
    groups the user likes, and counts follow a power law. Repeated pairs are merged, so there are somewhat fewer entries
    than published.

    Parameters
    ----------
    shape : str
        A key of `SHAPES`.
    feedback : {"explicit", "implicit"}
    scale : float
        0.1 draws a tenth of the users and items, and a hundredth of the entries.
    seed : int

    Returns
    -------
    Ratings
        Without labels.

    Raises
    ------
    ValueError
        An unknown shape or feedback; a scale outside (0, 1].

    Examples
    --------
    >>> from hybridmf.datasets import synthetic
    >>> synthetic("ml-1m", scale=0.1).shape
    (604, 371)
    """
    m, n, nnz = shape_of(shape, scale)
    rng = np.random.default_rng(check_int("seed", seed, 0))
    implicit = check_choice("feedback", feedback, ("explicit", "implicit")) == "implicit"
    return _counts(m, n, nnz, rng) if implicit else _stars(m, n, nnz, rng)


def _distinct(xp: Any, numbers: Any) -> Any:
    """The distinct ones, ascending; NumPy's `unique` hashes, which takes 20 times as long for numbers like these."""
    numbers = xp.sort(numbers)
    first = xp.ones(len(numbers), dtype=bool)
    first[1:] = numbers[1:] != numbers[:-1]
    return numbers[first]


def _degrees(m: int, nnz: int, rng: np.random.Generator) -> np.ndarray:
    activity = rng.lognormal(0.0, 1.1, m)
    return np.asarray(rng.multinomial(nnz, activity / activity.sum()))


def _popularity(n: int) -> np.ndarray:
    return np.asarray(1.0 / (np.arange(n) + 20.0) ** 0.9)


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
    return Ratings.from_coo(users, items, np.clip(np.rint(score), 1, 5), shape=(m, n))


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
    return Ratings.from_coo(pairs // n, pairs % n, _plays(len(pairs), rng), shape=(m, n))


def _plays(number: int, rng: np.random.Generator) -> np.ndarray:
    """Counts with a power-law tail, float32."""
    return np.asarray(np.minimum(rng.zipf(2.0, number), 100), dtype=np.float32)
