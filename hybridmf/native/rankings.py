"""Arguments of the kernel of ranking metrics."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RankingMetrics(NamedTuple):
    """Metrics that `hybridmf.native._rankings.measure` computes of each user's list.

    Attributes
    ----------
    n_items : int
    kinds : int32 array, shape (n_metrics,)
        PRECISION, RECALL, AVERAGE_PRECISION, NDCG, RECIPROCAL_RANK, HIT_RATE or NOVELTY.
    cuts : int64 array, shape (n_metrics,)
        Ranks that count, at least 1.
    discounts : float64 array, shape (max(n_columns, longest row),) or up to the longest cut
        Weights of the ranks.
    information : float64 array, shape (n_items,), or empty without NOVELTY
        Averaged by NOVELTY over the items of a list.
    shown_cuts : int64 array, shape (n_shown,)
    shown : uint8 array, shape (n_shown, n_items)
        The kernel sets row k to 1 at each item among some user's first ``shown_cuts[k]``.
    """

    n_items: int
    kinds: np.ndarray
    cuts: np.ndarray
    discounts: np.ndarray
    information: np.ndarray
    shown_cuts: np.ndarray
    shown: np.ndarray
