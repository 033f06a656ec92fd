"""Arguments that the kernels of CCD++ share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ResidualRows(NamedTuple):
    """Residual of one side's rows as CSR, and its schedule."""

    indptr: np.ndarray  # int64 (n_rows + 1,)
    indices: np.ndarray  # int32 (nnz,)
    residual: np.ndarray  # float (nnz,): kernels write to it
    weights: np.ndarray  # float (nnz,) or (0,): of squared errors
    # groups, segments: int64: all or a part of those of `hybridmf.native._ccd.schedule`
    groups: np.ndarray
    segments: np.ndarray


class Change(NamedTuple):
    """How an update changes the residual; see `hybridmf.native._ccd.update`."""

    terms: int  # KEEP, ADD_BACK or CATCH_UP of `hybridmf.native._ccd`
    pending: np.ndarray  # float (n_rows,) or (0,): with CATCH_UP the coordinates of the product to subtract
    following: np.ndarray  # float (n_rows,) or (0,): in the last update of a factor the coordinates of the next one
