from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Real = TypeVar("_Real", np.float32, np.float64)

def draw_rows(
    out: NDArray[_Real],
    scales: NDArray[np.float32],
    rows: NDArray[np.int64] | int,
    key: int,
    side: int,
    signed: bool,
    n_threads: int,
    isa: str | None = None,
) -> None: ...
