from typing import Any

import numpy as np
from numpy.typing import NDArray

PRECISION: int
RECALL: int
AVERAGE_PRECISION: int
NDCG: int
RECIPROCAL_RANK: int
HIT_RATE: int
NOVELTY: int

def measure(
    recommended: NDArray[Any],
    rows: NDArray[np.int64],
    relevant: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]],
    n_items: int,
    kinds: NDArray[np.int32],
    cuts: NDArray[np.int64],
    discounts: NDArray[np.float64],
    information: NDArray[np.float64],
    shown_cuts: NDArray[np.int64],
    shown: NDArray[np.uint8],
    num_threads: int,
) -> NDArray[np.float64] | None: ...
