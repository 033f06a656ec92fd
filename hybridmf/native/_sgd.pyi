from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridmf.core.objective import Terms
from hybridmf.native.arguments import BothSides, EntryBlocks, EntryList, UpdateRows, WorkingRows

_Real = TypeVar("_Real", np.float32, np.float64)  # one type for all arrays of a call

def rows(
    moved: WorkingRows,
    fixed: WorkingRows,
    entries: UpdateRows,
    order: NDArray[np.int64],
    cuts: NDArray[np.int64],
    terms: Terms,
    losses: NDArray[np.float64],
    n_threads: int,
) -> None: ...
def entries(
    sides: BothSides, entries: EntryList, terms: Terms, losses: NDArray[np.float64], n_threads: int
) -> None: ...
def deal(
    out: EntryList,
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[_Real],
    user_order: NDArray[np.int64],
    user_cuts: NDArray[np.int64],
    item_block: NDArray[np.int32],
    n_threads: int,
) -> NDArray[np.int64]: ...
def diagonals(
    sides: BothSides,
    blocks: EntryBlocks,
    shifts: NDArray[np.int64],
    terms: Terms,
    losses: NDArray[np.float64],
    n_threads: int,
) -> None: ...
def free_blocks(
    sides: BothSides,
    blocks: EntryBlocks,
    seen: NDArray[np.int32],
    quota: int,
    seed: int,
    terms: Terms,
    losses: NDArray[np.float64],
    n_threads: int,
) -> None: ...
def copy_rows(out: NDArray[_Real], rows: NDArray[_Real], n_threads: int) -> bool: ...
def all_finite(rows: NDArray[_Real], n_threads: int) -> bool: ...
