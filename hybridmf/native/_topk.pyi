from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

_Real = TypeVar("_Real", np.float32, np.float64)  # one type for all arrays of a call

class _PackedItems(Protocol):
    packed: NDArray[Any]  # see `pack`
    ids: NDArray[np.int32]  # (n_items,) in packed order
    block_norms: NDArray[np.float64]  # (n_blocks,) largest norm of the items of each block, falling

def pack(items: NDArray[_Real], order: NDArray[np.int64], n_threads: int) -> NDArray[_Real]: ...
def block_items() -> int: ...
def top_k(
    users: NDArray[_Real],
    user_norms: NDArray[np.float64],
    items: _PackedItems,
    seen_ptr: NDArray[np.int64],
    seen: NDArray[np.int32],
    n: int,
    n_threads: int,
) -> tuple[NDArray[np.int32], NDArray[_Real]]: ...
