"""Arguments of the kernels: ALS, SGD, CCD++, ranking metrics; the .pyx files have a C struct for each."""

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


class ResidualRows(NamedTuple):
    """Residual of one side's rows as CSR, and its schedule."""

    indptr: np.ndarray  # int64 (n_rows + 1,)
    indices: np.ndarray  # int32 (nnz,)
    residual: np.ndarray  # float (nnz,): kernels write to it
    # groups, segments: int64: all or a part of those of `hybridmf.native._ccd.schedule`
    groups: np.ndarray
    segments: np.ndarray


class Change(NamedTuple):
    """How an update changes the residual; see `hybridmf.native._ccd.update`."""

    terms: int  # KEEP, ADD_BACK or CATCH_UP of `hybridmf.native._ccd`
    pending: np.ndarray  # float (n_rows,) or (0,): with CATCH_UP the coordinates of the product to subtract
    following: np.ndarray  # float (n_rows,) or (0,): in the last update of a factor the coordinates of the next one


class RankingMetrics(NamedTuple):
    """Metrics that `hybridmf.native._rankings.measure` computes of each user's list."""

    n_items: int
    # int32 (n_metrics,): PRECISION, RECALL, AVERAGE_PRECISION, NDCG, RECIPROCAL_RANK, HIT_RATE or NOVELTY
    kinds: np.ndarray
    cuts: np.ndarray  # int64 (n_metrics,): ranks that count, at least 1
    discounts: np.ndarray  # float64 (max(n_columns, longest row),) or up to the longest cut: weights of the ranks
    # float64 (n_items,), or empty without NOVELTY: averaged by NOVELTY over the items of a list
    information: np.ndarray
    shown_cuts: np.ndarray  # int64 (n_shown,)
    # uint8 (n_shown, n_items): the kernel sets row k to 1 at each item among some user's first ``shown_cuts[k]``
    shown: np.ndarray
