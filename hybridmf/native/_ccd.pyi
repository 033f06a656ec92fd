from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

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
    rows: NDArray[_Real],
    fixed: NDArray[_Real],
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    ratings: NDArray[_Real],
    out: NDArray[_Real],
    groups: NDArray[np.int64],
    segments: NDArray[np.int64],
    n_threads: int,
) -> None: ...
def update(
    coordinates: NDArray[_Real],
    own: NDArray[_Real],
    pairs: NDArray[_Real],
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    e: NDArray[_Real],
    weights: NDArray[_Real],
    ridge: NDArray[np.float64],
    pending: NDArray[_Real],
    following: NDArray[_Real],
    groups: NDArray[np.int64],
    segments: NDArray[np.int64],
    workspace: NDArray[_Real],
    terms: int,
    nonnegative: bool,
    n_threads: int,
) -> None: ...
