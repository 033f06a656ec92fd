from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Real = TypeVar("_Real", np.float32, np.float64)  # one type for all arrays of a call

def pack(items: NDArray[_Real], order: NDArray[np.int64], n_threads: int) -> NDArray[_Real]: ...
def block_items() -> int: ...
def top_k(
    users: NDArray[_Real],
    user_norms: NDArray[np.float64],
    packed: NDArray[_Real],
    item_ids: NDArray[np.int32],
    block_norms: NDArray[np.float64],
    seen_ptr: NDArray[np.int64],
    seen: NDArray[np.int32],
    n: int,
    n_threads: int,
) -> tuple[NDArray[np.int32], NDArray[_Real]]: ...
