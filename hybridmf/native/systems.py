"""Arguments that the kernels of ALS share; native/_als.pyx has a C struct for each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Systems(NamedTuple):
    """Parts that all systems of a half sweep share."""

    fixed: np.ndarray  # float (n_fixed, rank): rows that the systems are built from
    offsets: np.ndarray  # float (n_fixed,) or (0,): subtracted from the ratings
    # float (rank, rank) or (0, 0): Gram matrix times the unobserved weight. Assemblies "simd" and "bals" and conjugate
    # gradients take it zero-padded to multiples of `padded_rank`
    gram: np.ndarray
    ridge: np.ndarray  # float (rank,): lambda; lambda_b for a bias
    implicit: bool
    # alpha, unobserved: confidence per unit of feedback, and of pairs without an entry
    alpha: float
    unobserved: float
    dual_up_to: int  # entries of the longest row in the dual form; 0 for none
    bias_square: float  # lambda / lambda_b if the last column of `fixed` belongs to a bias, else 0; for the dual form
    epsilon: float  # pivots at or below this share of their diagonal element count as zero


class Weights(NamedTuple):
    """Parameters of the entries' weights."""

    implicit: bool
    # alpha, unobserved: confidence per unit of feedback, and of pairs without an entry
    alpha: float
    unobserved: float


class Rows(NamedTuple):
    """All rows of the target side, as CSR."""

    indptr: np.ndarray  # int64 (n_rows + 1,)
    indices: np.ndarray  # int32 (nnz,)
    ratings: np.ndarray  # float (nnz,)
    scale: np.ndarray  # float64 (n_rows,): factor of the penalty of each row
    pull: np.ndarray | None = None  # float (n_rows, rank): right-hand sides before the entries
    weights: np.ndarray | None = None  # float (nnz,): of explicit entries


class Tiles(NamedTuple):
    """All rows of the target side, in the BALS format; see `hybridmf.formats.BalsMatrix`."""

    values: np.ndarray  # float (nnz,)
    # tile_colidx, seg_colidx: int32
    tile_colidx: np.ndarray
    # tile_ptr, seg_ptr: int64
    tile_ptr: np.ndarray
    seg_colidx: np.ndarray
    seg_ptr: np.ndarray
    tile_rows: int
    tile_cols: int
    scale: np.ndarray  # float64 (n_rows,): factor of the penalty of each row
    pull: np.ndarray | None = None  # float (n_rows, rank): right-hand sides before the entries
