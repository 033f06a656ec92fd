"""Non-negative rows that coordinate descent leaves unfinished: SciPy's active-set method, in float64."""

from __future__ import annotations

import logging

import numpy as np

from ..native.systems import Rows, Systems

logger = logging.getLogger("hybridmf")


def finish_rows(out: np.ndarray, systems: Systems, rows: Rows, unfinished: np.ndarray, bounded: int) -> None:
    """Replace rows by their minima, where these are lower.

    Nearly singular systems, with a small penalty and more coordinates than entries, take descent more sweeps than it
    has. They are few, and the method of Lawson and Hanson (1974) ends at the exact minimum.

    Parameters
    ----------
    out : float array, shape (n_rows, rank)
        Solutions so far; changed in place.
    systems : Systems
    rows : Rows
    unfinished : int array, shape (n,)
        Positions of rows.
    bounded : int
        The first coordinates, which must not be negative.
    """
    for row in unfinished:
        matrix, right = _system(systems, rows, int(row))
        before = out[row].astype(np.float64)
        try:
            found = minimum(matrix, right, bounded).astype(out.dtype).astype(np.float64)
        except RuntimeError as error:  # of SciPy, at its limit of steps
            logger.warning("a nonnegative row is not at its minimum (%s); increase regularization", error)
            continue
        if _value(matrix, right, found) < _value(matrix, right, before):
            out[row] = found


def minimum(matrix: np.ndarray, right: np.ndarray, bounded: int) -> np.ndarray:
    """Minimize x.A x / 2 - b.x, the first `bounded` coordinates >= 0.

    Parameters
    ----------
    matrix : float64 array, shape (rank, rank)
        Symmetric, positive semidefinite.
    right : float64 array, shape (rank,)
    bounded : int
        `rank`, or one less: the last coordinate is then free.
    """
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


def _system(systems: Systems, rows: Rows, row: int) -> tuple[np.ndarray, np.ndarray]:
    """A and b of a row, float64."""
    begin, end = rows.indptr[row : row + 2]
    columns, ratings = rows.indices[begin:end], rows.ratings[begin:end].astype(np.float64)
    design = systems.fixed[columns].astype(np.float64)
    rank = design.shape[1]
    if systems.implicit:
        confidence = 1 + systems.alpha * np.abs(ratings)
        matrix = systems.gram[:rank, :rank] + (design.T * (confidence - systems.unobserved)) @ design
        right = design.T @ np.where(ratings > 0, confidence, 0)
    else:
        offsets = systems.offsets[columns] if len(systems.offsets) else 0.0
        matrix, right = design.T @ design, design.T @ (ratings - offsets)
    matrix[np.diag_indices(rank)] += systems.ridge.astype(np.float64) * rows.scale[row]
    return matrix, right


def _value(matrix: np.ndarray, right: np.ndarray, x: np.ndarray) -> float:
    return float(x @ matrix @ x / 2 - right @ x)
