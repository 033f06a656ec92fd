from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridmf.native.arguments import Change, ResidualRows

_Real = TypeVar("_Real", np.float32, np.float64)  # one type for all arrays of a call

KEEP: int
ADD_BACK: int
CATCH_UP: int

LONG_ROW: int
SEGMENT: int
GROUP_ENTRIES: int
ROW_COST: int

def schedule(indptr: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def residual(
    factors: NDArray[_Real],
    fixed: NDArray[_Real],
    rows: ResidualRows,
    ratings: NDArray[_Real],
    n_threads: int,
) -> None: ...
def update(
    coordinates: NDArray[_Real],
    own: NDArray[_Real],
    pairs: NDArray[_Real],
    rows: ResidualRows,
    change: Change,
    ridge: NDArray[np.float64],
    nonnegative: bool,
    workspace: NDArray[_Real],
) -> None: ...
