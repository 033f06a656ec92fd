"""Arguments that the kernels of CCD++ share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ResidualRows(NamedTuple):
    """Residual of one side's rows as CSR, and its schedule.

    Attributes
    ----------
    indptr : int64 array, shape (n_rows + 1,)
    indices : int32 array, shape (nnz,)
    residual : float array, shape (nnz,)
        Kernels write to it.
    weights : float array, shape (nnz,) or (0,)
        Of squared errors.
    groups, segments : int64 array
        All or a part of those of `hybridmf.native._ccd.schedule`.
    """

    indptr: np.ndarray
    indices: np.ndarray
    residual: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    segments: np.ndarray


class Change(NamedTuple):
    """How an update changes the residual; see `hybridmf.native._ccd.update`.

    Attributes
    ----------
    terms : int
        KEEP, ADD_BACK or CATCH_UP of `hybridmf.native._ccd`.
    pending : float array, shape (n_rows,) or (0,)
        With CATCH_UP the coordinates of the product to subtract.
    following : float array, shape (n_rows,) or (0,)
        In the last update of a factor the coordinates of the next one.
    """

    terms: int
    pending: np.ndarray
    following: np.ndarray
