from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import RankingMetrics

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
    metrics: RankingMetrics,
    num_threads: int,
) -> NDArray[np.float64] | None: ...
