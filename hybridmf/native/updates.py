"""Arguments that the kernels of stochastic gradient descent share; native/_sgd.pyx has a C struct for each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class WorkingRows(NamedTuple):
    """Factors of one side that the kernels update in place.

    Attributes
    ----------
    matrix : float array, shape (n, ld)
        Rows padded with zeros to whole cache lines, and aligned to one.
    bias : float array, shape (n,), or (0,) without biases
    squares : float array, shape (n, ld) with AdaGrad, (n, 2) with RPCS, else (0, 0)
        Sums of squared steps.
    bias_squares : float array, shape (n,) or (0,)
    shared_rank : int
        With RPCS the number of factors, which share the two sums of their row; else 0.
    """

    matrix: np.ndarray
    bias: np.ndarray
    squares: np.ndarray
    bias_squares: np.ndarray
    shared_rank: int = 0


class BothSides(NamedTuple):
    """Rows of both sides, for kernels that update both rows of an entry."""

    user: WorkingRows
    item: WorkingRows


class EntryList(NamedTuple):
    """Entries in the order of their updates.

    Attributes
    ----------
    users, items : int32 array, shape (n,)
    ratings : float array, shape (n,)
    """

    users: np.ndarray
    items: np.ndarray
    ratings: np.ndarray


class EntryBlocks(NamedTuple):
    """Entries of a grid of blocks, block by block, in the order of their updates within each.

    Attributes
    ----------
    entries : EntryList
    pointer : int64 array, shape (grid * grid + 1,)
        First entry of block (p, q) at ``pointer[p * grid + q]``.
    """

    entries: EntryList
    pointer: np.ndarray


class UpdateRows(NamedTuple):
    """Entries of each row of the side that is updated, starts[row] <= k < ends[row], in the order of its updates.

    Attributes
    ----------
    starts, ends : int64 array, shape (n_rows,)
    columns : int32 array, shape (nnz,)
        Rows of the fixed side.
    ratings : float array, shape (nnz,)
    """

    starts: np.ndarray
    ends: np.ndarray
    columns: np.ndarray
    ratings: np.ndarray
