"""Arguments that the kernels of stochastic gradient descent share; native/_sgd.pyx has a C struct for each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class WorkingRows(NamedTuple):
    """Factors of one side that the kernels update in place."""

    matrix: np.ndarray  # float (n, ld): rows padded with zeros to whole cache lines, and aligned to one
    bias: np.ndarray  # float (n,), or (0,) without biases
    squares: np.ndarray  # float (n, ld) with AdaGrad, (n, 2) with RPCS, else (0, 0): sums of squared steps
    bias_squares: np.ndarray  # float (n,) or (0,)
    shared_rank: int = 0  # with RPCS the number of factors, which share the two sums of their row; else 0


class BothSides(NamedTuple):
    """Rows of both sides, for kernels that update both rows of an entry."""

    user: WorkingRows
    item: WorkingRows


class EntryList(NamedTuple):
    """Entries in the order of their updates."""

    # users, items: int32 (n,)
    users: np.ndarray
    items: np.ndarray
    ratings: np.ndarray  # float (n,)


class EntryBlocks(NamedTuple):
    """Entries of a grid of blocks, block by block, in the order of their updates within each."""

    entries: EntryList
    pointer: np.ndarray  # int64 (grid * grid + 1,): first entry of block (p, q) at ``pointer[p * grid + q]``


class UpdateRows(NamedTuple):
    """Entries of each row of the side that is updated, starts[row] <= k < ends[row], in the order of its updates."""

    # starts, ends: int64 (n_rows,)
    starts: np.ndarray
    ends: np.ndarray
    columns: np.ndarray  # int32 (nnz,): rows of the fixed side
    ratings: np.ndarray  # float (nnz,)
