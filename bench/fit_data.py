"""Training and held-out ratings of published shapes, drawn in parallel: a hundred million entries in seconds.

Users' degrees are log-normal and items' popularity falls like Zipf's law. Explicit values are 1 to 5, of rank 8 plus
noise; implicit feedback has tastes: four in five entries of a user fall into 4 of 20 groups of items.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from hybridmf.core.system import available_cores
from hybridmf.core.validate import index_pointer_dtype


@dataclass(frozen=True)
class Shape:
    """A published shape; `even` draws equally many entries for each user, over all items alike."""

    users: int
    items: int
    entries: int
    sigma: float = 1.0  # of the logarithm of users' degrees
    exponent: float = 0.9  # of the popularity of items
    shift: float = 20.0
    even: bool = False


SHAPES = {
    "ml100k": Shape(943, 1_682, 100_000),
    "ml1m": Shape(6_040, 3_706, 1_000_209),
    "ml20m": Shape(138_493, 27_278, 20_000_263, sigma=1.1),
    "netflix": Shape(480_189, 17_770, 99_072_112, sigma=0.85, exponent=1.0, shift=65.0),
    "millionsong": Shape(1_019_318, 384_546, 48_373_586, sigma=0.75, exponent=0.75),
    "2e9": Shape(5_000_000, 500_000, 2_200_000_000, even=True),
}

HELD_OUT = 0.02
"""Share of the entries that are held out."""

BLOCK_ENTRIES = 1 << 21
"""Entries that one thread draws at a time."""

RANK, GROUPS, LIKED = 8, 20, 4


class Split(NamedTuple):
    """Ratings to learn from, and held-out ones of the same shape (none of them where `Shape.even`)."""

    train: sp.csr_array
    test: sp.csr_array


@dataclass(frozen=True)
class _Source:
    """What blocks of users are drawn from."""

    shape: Shape
    implicit: bool
    seed: int
    degrees: np.ndarray  # (users,)
    edges: np.ndarray  # (items,) cumulated popularity, by rank
    names: np.ndarray  # (items,) item of each rank
    kinds: np.ndarray  # (items, RANK)


def draw(name: str, *, implicit: bool, seed: int = 0, threads: int | None = None) -> Split:
    """The ratings of a shape: the same bits for any number of threads."""
    shape = SHAPES[name]
    rng = np.random.default_rng(seed)
    degrees = np.full(shape.users, shape.entries // shape.users)
    if not shape.even:
        activity = rng.lognormal(0.0, shape.sigma, shape.users)
        # more than that, as users draw popular items twice; no more than half of all items each
        twice = 1.3 if implicit else 1.1
        expected = shape.entries / (1 - HELD_OUT) * twice * activity / activity.sum()
        degrees = np.clip(np.rint(expected), 1, shape.items // 2).astype(np.int64)
    popularity = 1.0 / (np.arange(shape.items) + shape.shift) ** shape.exponent
    kinds = rng.standard_normal((shape.items, RANK), dtype=np.float32)
    source = _Source(
        shape, implicit, seed, degrees, np.cumsum(popularity / popularity.sum()), rng.permutation(shape.items), kinds
    )
    ends = np.cumsum(degrees)
    cuts = np.unique(np.searchsorted(ends, np.arange(BLOCK_ENTRIES, ends[-1], BLOCK_ENTRIES)))
    starts = np.concatenate(([0], cuts, [shape.users]))
    block = partial(_even_block if shape.even else _block, source)
    with ThreadPoolExecutor(threads or available_cores()) as pool:
        parts = list(pool.map(block, starts[:-1], starts[1:]))
        return Split(*(_stacked(pool, [part[k] for part in parts], shape) for k in range(len(Split._fields))))


_Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Degrees of some users, and their items and values, one user after the other."""


def _block(source: _Source, first: int, last: int) -> tuple[_Part, _Part]:
    """Training and held-out entries of the users from `first` to before `last`."""
    shape, rng = source.shape, np.random.default_rng((source.seed, first))
    users = np.repeat(np.arange(last - first), source.degrees[first:last])
    ranks = np.searchsorted(source.edges, rng.random(len(users), dtype=np.float32)).clip(max=shape.items - 1)
    if source.implicit:  # neighbours in popularity belong to different groups
        liked = rng.integers(0, GROUPS, (last - first, LIKED))
        group = liked[users, rng.integers(0, LIKED, len(users))]
        own = rng.random(len(users), dtype=np.float32) < 0.8
        ranks = np.where(own, np.minimum(ranks // GROUPS * GROUPS + group, shape.items - 1), ranks)
    keys = users * shape.items + source.names[ranks]
    keys.sort()
    keys = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
    users, items = keys // shape.items, (keys % shape.items).astype(np.int32)
    if source.implicit:
        values = np.floor(np.exp(rng.standard_exponential(len(items), dtype=np.float32) / 2))
    else:
        tastes = rng.standard_normal((last - first, RANK), dtype=np.float32)
        score = np.einsum("ij,ij->i", tastes[users], source.kinds[items]) / np.float32(np.sqrt(RANK))
        noise = rng.standard_normal(len(items), dtype=np.float32)
        values = np.clip(np.rint(3.5 + score + 0.5 * noise), 1, 5).astype(np.float32)
    held_out = rng.random(len(items), dtype=np.float32) < HELD_OUT
    train, test = (
        (np.bincount(users[mask], minlength=last - first), items[mask], values[mask]) for mask in (~held_out, held_out)
    )
    return train, test


def _even_block(source: _Source, first: int, last: int) -> tuple[_Part, _Part]:
    """A user's j-th item is one of the j-th stretch of items: ascending, and none twice."""
    rng = np.random.default_rng((source.seed, first))
    degree = int(source.degrees[0])
    width = source.shape.items // degree
    items = rng.integers(0, width, (last - first, degree), dtype=np.int32)
    items += np.arange(degree, dtype=np.int32) * np.int32(width)
    values = rng.integers(1, 6, items.size, dtype=np.uint8).astype(np.float32)
    nothing = np.zeros(last - first, np.int64), np.empty(0, np.int32), np.empty(0, np.float32)
    return (source.degrees[first:last], items.ravel(), values), nothing


def _stacked(pool: ThreadPoolExecutor, parts: list[_Part], shape: Shape) -> sp.csr_array:
    """One matrix of consecutive users; parts are freed once they are copied."""
    degrees = np.concatenate([part[0] for part in parts])
    pointer = np.concatenate(([0], np.cumsum(degrees, dtype=np.int64)))
    ends = np.concatenate(([0], np.cumsum([len(part[1]) for part in parts])))
    matrix = sp.csr_array((shape.users, shape.items), dtype=np.float32)
    matrix.indices, matrix.data = np.empty(ends[-1], np.int32), np.empty(ends[-1], np.float32)
    matrix.indptr = pointer.astype(index_pointer_dtype(int(ends[-1])))

    def copy(k: int) -> None:
        _, items, values = parts[k]
        matrix.indices[ends[k] : ends[k + 1]], matrix.data[ends[k] : ends[k + 1]] = items, values
        parts[k] = (degrees[:0], items[:0].copy(), values[:0].copy())

    list(pool.map(copy, range(len(parts))))
    return matrix
