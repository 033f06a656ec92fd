"""Non-negative rows that coordinate descent leaves unfinished: SciPy's active-set method, in float64."""

from __future__ import annotations

import logging

import numpy as np

logger = logging.getLogger("hybridmf")


def finished(
    matrix: np.ndarray, right: np.ndarray, before: np.ndarray, bounded: int
) -> tuple[np.ndarray, float, float]:
    """The minimum of ``x.A x / 2 - b.x``, its value, and by how much that is lower than the value of `before`.

    Nearly singular systems, with a small penalty and more coordinates than entries, take descent more sweeps than it
    has. They are few, and the method of Lawson and Hanson (1974) ends at the exact minimum. `before` is the solution so
    far, and the result where nothing lower is found.
    """
    given = value(matrix, right, before.astype(np.float64))
    try:
        found = minimum(matrix, right, bounded).astype(before.dtype)
    except RuntimeError as error:  # of SciPy, at its limit of steps
        logger.warning("a nonnegative row is not at its minimum (%s); increase regularization", error)
        return before, given, 0.0
    least = value(matrix, right, found.astype(np.float64))
    return (found, least, given - least) if least < given else (before, given, 0.0)


def minimum(matrix: np.ndarray, right: np.ndarray, bounded: int) -> np.ndarray:
    """Minimize x.A x / 2 - b.x, A positive semidefinite, the first `bounded` coordinates (all, or all but one) >= 0."""
    from scipy.optimize import nnls  # here: few models are non-negative, and it takes longer than most fits

    free = bounded < len(right) and matrix[-1, -1] > 0
    inner, b = matrix[:bounded, :bounded], right[:bounded]
    if free:  # eliminated: it is the minimum for the others
        column = matrix[:bounded, -1] / matrix[-1, -1]
        inner, b = inner - np.outer(column, matrix[:bounded, -1]), b - column * right[-1]
    values, vectors = np.linalg.eigh(inner)
    kept = values > len(values) * np.finfo(np.float64).eps * max(values[-1], 0)
    root = np.sqrt(values[kept])[:, None] * vectors[:, kept].T
    x = np.zeros(len(right))
    if len(root):
        x[:bounded] = nnls(root, (vectors[:, kept].T @ b) / np.sqrt(values[kept]), maxiter=100 * len(b))[0]
    if free:
        x[-1] = right[-1] / matrix[-1, -1] - column @ x[:bounded]
    return x


def value(matrix: np.ndarray, right: np.ndarray, x: np.ndarray) -> float:
    """``x.A x / 2 - b.x``."""
    return float(x @ matrix @ x / 2 - right @ x)
