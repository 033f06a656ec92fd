from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Real = TypeVar("_Real", np.float32, np.float64)  # one type for all arrays of a call

def top_k(
    users: NDArray[_Real],
    items: NDArray[_Real],
    seen_ptr: NDArray[np.int64],
    seen: NDArray[np.int32],
    n: int,
    n_threads: int,
) -> tuple[NDArray[np.int32], NDArray[_Real]]: ...
