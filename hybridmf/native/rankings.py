"""Arguments of the kernel of ranking metrics."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RankingMetrics(NamedTuple):
    """Metrics that `hybridmf.native._rankings.measure` computes of each user's list."""

    n_items: int
    # int32 (n_metrics,): PRECISION, RECALL, AVERAGE_PRECISION, NDCG, RECIPROCAL_RANK, HIT_RATE or NOVELTY
    kinds: np.ndarray
    cuts: np.ndarray  # int64 (n_metrics,): ranks that count, at least 1
    discounts: np.ndarray  # float64 (max(n_columns, longest row),) or up to the longest cut: weights of the ranks
    # float64 (n_items,), or empty without NOVELTY: averaged by NOVELTY over the items of a list
    information: np.ndarray
    shown_cuts: np.ndarray  # int64 (n_shown,)
    # uint8 (n_shown, n_items): the kernel sets row k to 1 at each item among some user's first ``shown_cuts[k]``
    shown: np.ndarray
