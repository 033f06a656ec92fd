"""Arguments that the kernels of ALS share; native/_als.pyx has a C struct for each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Systems(NamedTuple):
    """Parts that all systems of a half sweep share.

    Attributes
    ----------
    fixed : float array, shape (n_fixed, rank)
        Rows that the systems are built from.
    offsets : float array, shape (n_fixed,) or (0,)
        Subtracted from the ratings.
    gram : float array, shape (rank, rank) or (0, 0)
        Gram matrix times the unobserved weight. Assemblies "simd" and "bals" and conjugate gradients take it
        zero-padded to multiples of `padded_rank`.
    ridge : float array, shape (rank,)
        lambda; lambda_b for a bias.
    implicit : bool
    alpha, unobserved : float
        Confidence per unit of feedback, and of pairs without an entry.
    dual_up_to : int
        Entries of the longest row in the dual form; 0 for none.
    bias_square : float
        lambda / lambda_b if the last column of `fixed` belongs to a bias, else 0; for the dual form.
    epsilon : float
        Pivots at or below this share of their diagonal element count as zero.
    """

    fixed: np.ndarray
    offsets: np.ndarray
    gram: np.ndarray
    ridge: np.ndarray
    implicit: bool
    alpha: float
    unobserved: float
    dual_up_to: int
    bias_square: float
    epsilon: float


class Weights(NamedTuple):
    """Parameters of the entries' weights.

    Attributes
    ----------
    implicit : bool
    alpha, unobserved : float
        Confidence per unit of feedback, and of pairs without an entry.
    """

    implicit: bool
    alpha: float
    unobserved: float


class Rows(NamedTuple):
    """All rows of the target side, as CSR.

    Attributes
    ----------
    indptr : int64 array, shape (n_rows + 1,)
    indices : int32 array, shape (nnz,)
    ratings : float array, shape (nnz,)
    scale : float64 array, shape (n_rows,)
        Factor of the penalty of each row.
    """

    indptr: np.ndarray
    indices: np.ndarray
    ratings: np.ndarray
    scale: np.ndarray


class Tiles(NamedTuple):
    """All rows of the target side, in the BALS format; see `hybridmf.formats.BalsMatrix`.

    Attributes
    ----------
    values : float array, shape (nnz,)
    tile_colidx, seg_colidx : int32 array
    tile_ptr, seg_ptr : int64 array
    tile_rows, tile_cols : int
    scale : float64 array, shape (n_rows,)
        Factor of the penalty of each row.
    """

    values: np.ndarray
    tile_colidx: np.ndarray
    tile_ptr: np.ndarray
    seg_colidx: np.ndarray
    seg_ptr: np.ndarray
    tile_rows: int
    tile_cols: int
    scale: np.ndarray
