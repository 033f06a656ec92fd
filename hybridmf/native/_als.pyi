from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridmf.native.arguments import Rows, Systems, Tiles, Weights

_Real = TypeVar("_Real", np.float32, np.float64)  # one type for all arrays of a call

RANK1: int
BLAS3: int
SIMD: int
GEMM: int

OK: int
NON_FINITE: int
NEGATIVE_CURVATURE: int
UNFINISHED: int

GATHER_ROWS: int
OWN_CHOLESKY_RANK: int
LONG_ROW: int
SEGMENTS: int

def instruction_set() -> str: ...
def can_run(name: str) -> bool: ...
def use_blas(addresses: dict[str, int] | None) -> None: ...
def gram(factors: NDArray[_Real], n_threads: int, blas: bool = ...) -> NDArray[np.float64]: ...
def padded_rank(rank: int) -> int: ...
def workspace_size(rank: int, itemsize: int) -> int: ...
def subspace_workspace_size(rank: int, block: int, itemsize: int, longest: int) -> int: ...
def bals_workspace_size(rank: int, itemsize: int, tile_rows: int, tile_cols: int) -> int: ...
def cholesky_rows(
    out: NDArray[_Real],
    systems: Systems,
    rows: Rows,
    order: NDArray[np.int64],
    status: NDArray[np.int32],
    workspace: NDArray[_Real],
    assembly: int,
) -> None: ...
def inverse_root(matrix: NDArray[np.float64], epsilon: float) -> NDArray[np.float64] | None: ...
def panels(matrix: NDArray[_Real]) -> tuple[NDArray[_Real], NDArray[np.int64]]: ...
def times_panels(
    out: NDArray[_Real],
    rows: NDArray[_Real],
    packed: NDArray[_Real],
    spans: NDArray[np.int64],
    status: NDArray[np.int32],
    n_threads: int,
) -> None: ...
def long_row_waves(indptr: NDArray[np.int64], rows: NDArray[np.int64]) -> list[NDArray[np.int64]]: ...
def cholesky_long_rows(
    out: NDArray[_Real],
    systems: Systems,
    rows: Rows,
    order: NDArray[np.int64],
    segments: NDArray[np.int64],
    status: NDArray[np.int32],
    partial: NDArray[_Real],
    workspace: NDArray[_Real],
) -> None: ...
def cg_rows(
    out: NDArray[_Real],
    systems: Systems,
    rows: Rows,
    order: NDArray[np.int64],
    status: NDArray[np.int32],
    workspace: NDArray[_Real],
    n_steps: int,
    form_from: int,
) -> None: ...
def nonnegative_rows(
    out: NDArray[_Real],
    systems: Systems,
    rows: Rows,
    order: NDArray[np.int64],
    status: NDArray[np.int32],
    workspace: NDArray[_Real],
    bounded: int,
) -> None: ...
def subspace_rows(
    out: NDArray[_Real],
    systems: Systems,
    rows: Rows,
    order: NDArray[np.int64],
    status: NDArray[np.int32],
    workspace: NDArray[_Real],
    block: int,
) -> None: ...
def cholesky_bals(
    out: NDArray[_Real],
    systems: Systems,
    tiles: Tiles,
    blocks: NDArray[np.int64],
    status: NDArray[np.int32],
    workspace: NDArray[_Real],
) -> None: ...
def predict_pairs(
    user_factors: NDArray[_Real],
    item_factors: NDArray[_Real],
    users: NDArray[np.int64],
    items: NDArray[np.int64],
    n_threads: int,
) -> NDArray[np.float64]: ...
def row_losses(
    row_factors: NDArray[_Real],
    column_factors: NDArray[_Real],
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    ratings: NDArray[_Real],
    offsets: tuple[NDArray[np.float64], NDArray[np.float64]],
    how: Weights,
    n_threads: int,
    entry_weights: NDArray[_Real] | None = ...,
) -> NDArray[np.float64]: ...
