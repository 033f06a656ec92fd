"""Whether factors are right, by NumPy in float64 and the formulas of docs/methods.md; nothing here asks the library."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

RANDOM_ROWS, LONGEST_ROWS, EMPTY_ROWS = 300, 20, 20

POWER_STEPS = 3
"""Steps towards the largest eigenvalue of a system: they end below it, which makes the check a little stricter."""

SAMPLED_ENTRIES = 2_500_000
"""Entries that stand for all in an objective: every k-th, so that all rows but short ones count."""

CHUNK = 1 << 16
"""Entries scored at a time."""

OTHER = {"user": "item", "item": "user"}


@dataclass(frozen=True)
class Fitted:
    """Factors and biases by side, and the mean rating."""

    factors: dict[str, np.ndarray]
    bias: dict[str, np.ndarray | None]
    mean: float

    def arrays(self) -> list[np.ndarray]:
        """All arrays."""
        return [array for array in (*self.factors.values(), *self.bias.values()) if array is not None]


@dataclass(frozen=True)
class Problem:
    """The objective.

    Attributes
    ----------
    implicit : bool
    regularization, bias_regularization : float
    power : float
        Exponent of a row's number of entries in its penalty.
    alpha, unobserved_weight : float
    nonnegative : bool
    """

    implicit: bool
    regularization: float
    bias_regularization: float
    power: float
    alpha: float = 1.0
    unobserved_weight: float = 1.0
    nonnegative: bool = False

    @classmethod
    def of(cls, implicit: bool, parameters: dict[str, Any]) -> Problem:
        """By the parameters of a model and the defaults that docs/methods.md states."""
        scaling = parameters.get("regularization_scaling", "none" if implicit else "count")
        return cls(
            implicit,
            parameters["regularization"],
            parameters.get("bias_regularization", 0.0),
            {"none": 0.0, "count": 1.0}[scaling],
            unobserved_weight=parameters.get("unobserved_weight", 1.0),
            nonnegative=parameters.get("nonnegative", False),
        )


def chosen_rows(lengths: np.ndarray, name: str) -> np.ndarray:
    """The longest rows, random ones (others for each name), and a few empty ones."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    filled, empty = np.flatnonzero(lengths), np.flatnonzero(lengths == 0)
    longest = filled[np.argsort(lengths[filled], kind="stable")[-LONGEST_ROWS:]]
    drawn = rng.choice(filled, min(RANDOM_ROWS, len(filled)), replace=False)
    return np.unique(np.concatenate([longest, drawn, empty[:EMPTY_ROWS]]))


def row_errors(
    problem: Problem, ratings: sp.csr_array, side: str, solved: Fitted, fixed: Fitted, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Backward error of each of `rows` of `side`, solved for the other side as `fixed` has it, and effective entries.

    ``|A x - b| / (|A| |x| + |b|)``. With a constraint, the part of the gradient ``A x - b`` that a step within the
    constraint could reduce takes the place of the residual. The effective number of entries with weights w is
    ``(sum w)^2 / sum w^2``. Both float64, shape (len(rows),).
    """
    other = OTHER[side]
    table, gram = fixed.factors[other], None
    if problem.implicit:
        wide = table.astype(np.float64)
        gram = problem.unobserved_weight * (wide.T @ wide)
        del wide
    errors, counts = np.empty(len(rows)), np.zeros(len(rows))
    for k, row in enumerate(rows):
        entries = slice(ratings.indptr[row], ratings.indptr[row + 1])
        columns, values = np.asarray(ratings.indices[entries]), ratings.data[entries].astype(np.float64)
        x = solved.factors[side][row].astype(np.float64)
        bias = solved.bias[side]
        x = x if bias is None else np.append(x, np.float64(bias[row]))
        errors[k], counts[k] = _row_error(problem, columns, values, x, table, fixed.bias[other], fixed.mean, gram)
    return np.where(np.isfinite(errors), errors, np.inf), counts


def _row_error(
    problem: Problem,
    columns: np.ndarray,
    values: np.ndarray,
    x: np.ndarray,
    table: np.ndarray,
    offsets: np.ndarray | None,
    mean: float,
    gram: np.ndarray | None,
) -> tuple[float, float]:
    """The error of one row and its effective entries; a row without entries has zero factors."""
    if not len(columns):
        return float(np.abs(x).max()), 0.0
    Y, count = table[columns].astype(np.float64), float(len(columns)) ** problem.power
    ridge = np.full(len(x), problem.regularization * count)
    weights, target = np.ones(len(columns)), values
    if gram is not None:
        confidence = 1 + problem.alpha * np.abs(values)
        weights, target = confidence - problem.unobserved_weight, confidence * (values > 0)
    elif offsets is not None:
        Y, ridge[-1] = np.column_stack([Y, np.ones(len(Y))]), problem.bias_regularization * count
        target = values - mean - offsets[columns].astype(np.float64)

    def multiply(v: np.ndarray) -> np.ndarray:
        product = Y.T @ (weights * (Y @ v)) + ridge * v
        return product if gram is None else product + gram @ v

    b = Y.T @ target
    gradient = multiply(x) - b
    # offsets cancel most of a rating: rounding the difference is no error of the solution
    rounding = np.finfo(table.dtype).eps * np.linalg.norm(np.abs(Y).T @ (np.abs(values) + np.abs(values - target)))
    norm = _norm(multiply, b if b.any() else np.ones(len(x)))
    scale = norm * np.linalg.norm(x) + np.linalg.norm(b)
    if problem.nonnegative:
        gradient = _reducible(gradient, x, table.shape[1], scale)
    residual = np.linalg.norm(gradient) - (rounding if offsets is not None else 0.0)
    effective = float(weights.sum() ** 2 / (weights**2).sum()) if weights.any() else 1.0
    return float(np.maximum(residual, 0.0) / (scale or 1.0)), effective


def _norm(multiply: Any, v: np.ndarray) -> float:
    """About the largest eigenvalue of a positive definite matrix, from below."""
    found = 0.0
    for _ in range(POWER_STEPS):
        v = v / np.linalg.norm(v)
        v = multiply(v)
        found = float(np.linalg.norm(v))
    return found


def _reducible(gradient: np.ndarray, x: np.ndarray, factors: int, scale: float) -> np.ndarray:
    """The gradient without coordinates at the bound that point out of it; a negative coordinate is an error itself."""
    bounded = np.arange(len(x)) < factors  # a bias may be negative
    if (x[bounded] < 0).any():
        return np.full(len(x), np.inf)
    return np.where(bounded & (x == 0), np.minimum(gradient, 0.0), gradient)


def objective(problem: Problem, ratings: sp.csr_array, lengths: dict[str, np.ndarray], fitted: Fitted) -> float:
    """The objective in float64; unobserved pairs through the Gram matrices. `ratings`: by users.

    Of many entries, only every k-th is read, the same ones for any factors.
    """
    step = -(-ratings.nnz // SAMPLED_ENTRIES)
    chunks = [slice(first, first + CHUNK * step, step) for first in range(0, ratings.nnz, CHUNK * step)]
    with ThreadPoolExecutor(2) as threads:
        total = step * sum(threads.map(lambda chunk: _loss(problem, ratings, fitted, chunk), chunks))
    if problem.implicit:
        grams = [(wide := table.astype(np.float64)).T @ wide for table in fitted.factors.values()]
        total += problem.unobserved_weight * float(np.sum(grams[0] * grams[1]))
    for side, table in fitted.factors.items():
        squares = problem.regularization * np.einsum("ij,ij->i", table, table, dtype=np.float64)
        bias = fitted.bias[side]
        if bias is not None:
            squares += problem.bias_regularization * np.float64(bias) ** 2
        total += float(squares @ np.maximum(lengths[side], 1).astype(np.float64) ** problem.power)
    return total


def _loss(problem: Problem, ratings: sp.csr_array, fitted: Fitted, chunk: slice) -> float:
    """Loss of some entries; factors are multiplied in their own type and added up in float64 pieces."""
    columns, values = np.asarray(ratings.indices[chunk]), ratings.data[chunk].astype(np.float64)
    entries = np.arange(*chunk.indices(ratings.nnz))
    rows = np.searchsorted(ratings.indptr, entries, side="right") - 1
    users, items = fitted.factors["user"], fitted.factors["item"]
    score = np.zeros(len(rows))
    for begin in range(0, users.shape[1], 32):
        part = slice(begin, begin + 32)
        score += np.einsum("ij,ij->i", users[rows, part], items[columns, part])
    if problem.implicit:
        confidence = 1 + problem.alpha * np.abs(values)
        error = confidence * ((values > 0) - score) ** 2 - problem.unobserved_weight * score**2
        return float(error.sum())
    user_bias, item_bias = fitted.bias["user"], fitted.bias["item"]
    if user_bias is not None and item_bias is not None:
        score += fitted.mean + user_bias[rows].astype(np.float64) + item_bias[columns]
    return float(((values - score) ** 2).sum())
