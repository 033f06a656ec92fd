"""Rating matrices in published shapes, drawn on a GPU: a hundred million entries take seconds there."""

from __future__ import annotations

from typing import Any

import numpy as np
from published import published_pairs

from hybridmf.datasets import SHAPES, shape_of

# users, items, entries, sigma of the log-normal user degrees, exponent and shift of the Zipf item popularity
GPU_SHAPES = {
    "netflix": (480_189, 17_770, 99_072_112, 0.85, 1.0, 65.0),
    "ml-20m": (138_493, 27_278, 20_000_263, 1.1, 0.9, 20.0),
    "yahoo-r1": (1_948_882, 98_212, 115_248_575, 1.0, 0.85, 30.0),
    "msd": (1_019_318, 384_546, 48_373_586, 0.75, 0.75, 20.0),
    "shop": (1_000_000, 600_000, 8_000_000, 1.0, 0.8, 20.0),
    "ml-1m": (6_040, 3_706, 1_000_209, 1.0, 0.9, 20.0),
}


def synthetic_gpu(shape: str, *, seed: int = 0, rank: int = 8, implicit: bool = False) -> Any:
    """CSR of a published shape: log-normal user degrees, Zipf item popularity, planted low rank plus noise.

    Explicit: ratings 1 to 5. Implicit: counts with a power-law tail. Returns a SciPy csr_array, float32 and int32.
    """
    import cupy as cp

    m, n, nnz, sigma, exponent, shift = GPU_SHAPES[shape]
    rng = np.random.default_rng(seed)
    activity = rng.lognormal(0.0, sigma, m)
    popularity = 1.0 / (np.arange(n) + shift) ** exponent
    edges = cp.asarray(np.cumsum(popularity / popularity.sum()))
    names = cp.asarray(rng.permutation(n))
    random = cp.random.default_rng(seed)
    keys = cp.empty(0, dtype=cp.int64)
    for _ in range(6):  # duplicates are dropped and drawn again, a few times
        missing = int((nnz - len(keys)) * (1.02 if len(keys) else 1.0))
        if missing < nnz // 1000:
            break
        counts = rng.multinomial(missing, activity / activity.sum())
        users = cp.repeat(cp.arange(m), counts.tolist()) if m < 10_000 else _repeat(cp, counts)
        items = names[cp.minimum(cp.searchsorted(edges, random.random(len(users))), n - 1)]
        keys = cp.unique(cp.concatenate([keys, users * n + items]))
        del users, items
    return _valued(cp, random, keys, m, n, rank, implicit)


def tasteful_gpu(shape: str, *, seed: int = 0, groups: int = 20, favourites: int = 4) -> Any:
    """Counts with tastes: items are in groups, and four in five of a user's entries fall into the user's favourites.

    Degrees as in `synthetic_gpu`; pairs drawn twice are merged. Without tastes, the pairs are independent of the
    ratings, and the implicit objective is close to its minimum after two iterations.
    """
    import cupy as cp

    m, n, nnz, sigma, exponent, shift = GPU_SHAPES[shape]
    rng = np.random.default_rng(seed)
    random = cp.random.default_rng(seed)
    activity = rng.lognormal(0.0, sigma, m)
    users = _repeat(cp, rng.multinomial(int(1.12 * nnz), activity / activity.sum()))
    liked, size = cp.asarray(rng.integers(0, groups, (m, favourites))), n // groups
    choice = (random.random(len(users)) * favourites).astype(cp.int64)
    anywhere = (random.random(len(users)) * groups).astype(cp.int64)
    group = cp.where(random.random(len(users)) < 0.8, liked[users, choice], anywhere)
    del choice, anywhere
    popularity = 1.0 / (np.arange(size) + shift / groups) ** exponent
    edges = cp.asarray(np.cumsum(popularity / popularity.sum()))
    within = cp.minimum(cp.searchsorted(edges, random.random(len(users))), size - 1)
    keys = cp.unique(users * n + cp.asarray(rng.permutation(n))[group * size + within])
    del users, group, within
    return _valued(cp, random, keys, m, n, 8, True)


def _valued(cp: Any, random: Any, keys: Any, m: int, n: int, rank: int, implicit: bool) -> Any:
    """CSR of pairs ``user * n + item``, ascending, with planted values."""
    import scipy.sparse as sp

    users, items = keys // n, keys % n
    del keys
    taste = random.standard_normal((m, rank), dtype=cp.float32)
    kind = random.standard_normal((n, rank), dtype=cp.float32)
    score = cp.zeros(len(users), dtype=cp.float32)
    for k in range(rank):
        score += taste[users, k] * kind[items, k]
    score /= np.sqrt(rank)
    noise = random.standard_normal(len(users), dtype=cp.float32)
    values = cp.floor(cp.exp(score + noise)) + 1 if implicit else cp.clip(cp.rint(3.5 + score + 0.5 * noise), 1, 5)
    indptr = np.concatenate(([0], np.cumsum(cp.asnumpy(cp.bincount(users, minlength=m)))))
    matrix = sp.csr_array((m, n), dtype=np.float32)
    matrix.data, matrix.indices, matrix.indptr = cp.asnumpy(values), cp.asnumpy(items.astype(cp.int32)), indptr
    del users, items, score, noise, values
    cp.get_default_memory_pool().free_all_blocks()
    return matrix


def published_gpu(shape: str, *, scale: float = 1.0, seed: int = 0, implicit: bool = False) -> Any:
    """CSR of a shape with its published degrees (`published.published_degrees`), values as in `synthetic_gpu`."""
    import cupy as cp

    assert shape in SHAPES
    m, n, _ = shape_of(shape, scale)
    random = cp.random.default_rng(seed)
    pairs = published_pairs(cp, random, shape, scale, np.random.default_rng(seed))
    return _valued(cp, random, pairs, m, n, 8, implicit)


def _repeat(cp: Any, counts: np.ndarray) -> Any:
    """Each row's number, repeated by its degree (cupy.repeat requires a list)."""
    starts = cp.asarray(np.concatenate(([0], np.cumsum(counts)))[:-1])
    marks = cp.zeros(int(counts.sum()) + 1, dtype=cp.int64)
    cp.add.at(marks, starts, 1)
    return cp.cumsum(marks[:-1]) - 1
