from typing import Any

import numpy as np
from numpy.typing import NDArray

SORTED_UNIQUE: int
SORTED_DUPLICATES: int
UNSORTED: int

_CSR = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]

def max_threads() -> int: ...
def copied(source: NDArray[np.uint8], target: NDArray[np.uint8], num_threads: int | None = ...) -> None: ...
def has_zeros(data: NDArray[Any], num_threads: int | None = None) -> bool: ...
def is_canonical(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[Any],
    n_cols: int,
    num_threads: int | None = ...,
) -> bool: ...
def row_order_status(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], num_threads: int | None = ...
) -> tuple[int, int]: ...
def summarize(values: NDArray[Any], piece: int, num_threads: int | None = ...) -> NDArray[np.float64]: ...
def by_column(
    rows: NDArray[np.int32],
    columns: NDArray[np.int32],
    data: NDArray[Any],
    n_cols: int,
    num_threads: int | None = ...,
    wide: bool = ...,
) -> _CSR: ...
def transpose(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[Any],
    n_cols: int,
    num_threads: int | None = ...,
    wide: bool = ...,
) -> _CSR: ...
def degree_order(indptr: NDArray[np.int64]) -> NDArray[np.int64]: ...
def take_rows(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[Any],
    order: NDArray[np.int64],
    num_threads: int | None = ...,
) -> _CSR: ...
def common_entries(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    other_indptr: NDArray[np.int64],
    other_indices: NDArray[np.int32],
    num_threads: int | None = ...,
) -> NDArray[np.bool_]: ...
def build_bals(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[Any],
    n_cols: int,
    tile: tuple[int, int],
    seg_ptr: NDArray[Any],
    tile_ptr: NDArray[Any],
    num_threads: int | None = ...,
) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]: ...
def bals_to_csr(
    values: NDArray[Any],
    seg_colidx: NDArray[np.int32],
    tile_colidx: NDArray[np.int32],
    seg_ptr: NDArray[Any],
    tile_ptr: NDArray[Any],
    shape: tuple[int, int],
    tile: tuple[int, int],
    num_threads: int | None = ...,
) -> _CSR: ...
def bals_vacancies(seg_ptr: NDArray[Any], tile_ptr: NDArray[Any], n_rows: int, tile_rows: int) -> tuple[int, int]: ...
