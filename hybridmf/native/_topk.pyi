from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

_Real = TypeVar("_Real", np.float32, np.float64)  # one type for all arrays of a call

class _PackedItems(Protocol):
    packed: NDArray[Any]  # see `pack`
    ids: NDArray[np.int32]  # (n_items,) in packed order
    block_norms: NDArray[np.float64]  # (n_blocks,) largest norm of the items of each block, falling

class _Seen(Protocol):
    @property
    def first(self) -> NDArray[np.int64]: ...  # (n_users,) where the items of each user to leave out begin
    @property
    def last(self) -> NDArray[np.int64]: ...  # (n_users,) and end
    @property
    def columns(self) -> NDArray[np.int32]: ...  # empty: nothing is left out

def pack(items: NDArray[_Real], order: NDArray[np.int64], n_threads: int) -> NDArray[_Real]: ...
def norms(rows: NDArray[_Real]) -> NDArray[np.float64]: ...
def block_items() -> int: ...
def top_k(
    users: NDArray[_Real],
    items: _PackedItems,
    seen: _Seen,
    n: int,
    n_threads: int,
) -> tuple[NDArray[np.int32], NDArray[_Real]]: ...
