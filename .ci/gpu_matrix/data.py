"""The data sets: drawn once, kept in a folder, mapped by every process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from hybridmf.datasets import SHAPES

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from published import draw_pairs, published_degrees

SHOP = (200_000, 120_000, 1_600_000)
"""Users, items and entries of a shop: few entries a row."""

TASTES = 8
PARTS = ("indptr", "indices", "explicit", "implicit")


@dataclass(frozen=True)
class Matrix:
    """A data set in both orientations, in mapped files; values of both kinds of feedback for one pattern.

    Attributes
    ----------
    folder : Path
    shape : (int, int)
    """

    folder: Path
    shape: tuple[int, int]

    def rows(self, side: str, feedback: str) -> sp.csr_array:
        """The ratings, a row for each row of `side`; shares memory with the files."""
        indptr, indices, values = (self._part(side, name) for name in ("indptr", "indices", feedback))
        matrix = sp.csr_array(self.shape if side == "user" else self.shape[::-1], dtype=values.dtype)
        matrix.indptr, matrix.indices, matrix.data = indptr, indices, values
        return matrix

    def _part(self, side: str, name: str) -> np.ndarray:
        found: np.ndarray = np.load(self.folder / f"{side}-{name}.npy", mmap_mode="r")
        return found

    def digest(self) -> str:
        """Which data these are: sha256 of the user-major files."""
        digest = hashlib.sha256()
        for name in PARTS:
            digest.update(self._part("user", name))
        return digest.hexdigest()[:16]


def open_matrix(folder: Path, name: str) -> Matrix:
    """A data set that `write_matrix` has written."""
    shape = np.load(folder / name / "shape.npy").tolist()
    return Matrix(folder / name, (shape[0], shape[1]))


def write_matrix(folder: Path, name: str, drawn: tuple[Any, Any, Any, tuple[int, int]], host: Callable) -> None:
    """Write pairs ``user * n + item``, ascending, with their stars and counts, in both orientations."""
    pairs, stars, counts, shape = drawn
    target = folder / name
    target.mkdir(parents=True)
    users, items = pairs // shape[1], pairs % shape[1]
    by_item = (items * shape[0] + users).argsort()
    for side, rows, columns, order in (("user", users, items, None), ("item", items, users, by_item)):
        values = [columns.astype(np.int32), stars, counts]
        values = [host(each if order is None else each[order]) for each in values]
        size = shape[0] if side == "user" else shape[1]
        degrees = np.bincount(host(rows), minlength=size)
        arrays = [np.concatenate(([0], np.cumsum(degrees))), *values]
        for part, array in zip(PARTS, arrays, strict=True):
            np.save(target / f"{side}-{part}.npy", array)
    np.save(target / "shape.npy", np.array(shape))


def draw(xp: Any, name: str, scale: float = 1.0, seed: int = 0) -> tuple[Any, Any, Any, tuple[int, int]]:
    """Pairs, ratings 1 to 5 and counts of a data set, by NumPy or CuPy; `scale` shrinks both sides.

    Degrees are the published ones: the longest item of ML-20M's shape has 67,310 entries, Netflix's 232,944.
    """
    rng, random = np.random.default_rng(seed), xp.random.default_rng(seed)
    users, items = _shop(scale, rng) if name == "shop" else published_degrees(name, scale, rng)
    pairs = draw_pairs(xp, random, users, items)
    shape = (len(users), len(items))
    score = xp.zeros(len(pairs), dtype=np.float32)
    for _ in range(TASTES):
        tastes = [random.standard_normal(size, dtype=np.float32) for size in shape]
        score += tastes[0][pairs // shape[1]] * tastes[1][pairs % shape[1]]
    score = score / np.float32(np.sqrt(TASTES)) + random.standard_normal(len(pairs), dtype=np.float32) / 2
    stars = xp.clip(xp.rint(score + np.float32(3.5)), 1, 5).astype(np.float32)
    counts = (xp.floor(xp.exp(score)) + 1).astype(np.float32)
    return pairs, stars, counts, shape


def _shop(scale: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Entries of each user, log-normal, and weights of the items by Zipf's law; some users have none."""
    m, n, nnz = round(SHOP[0] * scale), round(SHOP[1] * scale), round(SHOP[2] * scale)
    activity = rng.lognormal(0.0, 1.0, m)
    return rng.multinomial(nnz, activity / activity.sum()), rng.permutation(np.arange(1, n + 1) ** -0.8)


def prepare(folder: str, names: list[str], device: str, scale: float = 1.0) -> None:
    """Draw and write data sets; on the GPU a hundred million entries take seconds."""
    if device == "cpu":
        xp, host = np, np.asarray
    else:
        import cupy

        xp, host = cupy, cupy.asnumpy
    for name in names:
        assert name == "shop" or name in SHAPES
        write_matrix(Path(folder), name, draw(xp, name, scale), host)
