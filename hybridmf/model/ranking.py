"""Top-N of users or rows given by their factors: candidates, seen items, rows without factors.

Everything here reads one `Learned`, so an answer never mixes the factors of two fits, and what is computed of them once
is kept with them.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Side, other_side, scoring_rows
from ..core.sparse import take_rows
from ..plan.memory import check_answer
from .engine import Engine, engine_for
from .learned import Learned
from .popularity import rank_by_count
from .requests import Candidates

logger = logging.getLogger("hybridmf")


def rank(
    learned: Learned, users: Factors, N: int, seen: sp.csr_array | None, candidates: Candidates, cold_users: str
) -> tuple[np.ndarray, np.ndarray]:
    """The N best items of each row of `users`; see `ServingMixin.recommend`.

    Parameters
    ----------
    learned : Learned
    users : Factors
        Of users of the model, or folded in.
    N : int
    seen : csr_array, shape (len(users), n_items), or None
        Entries to exclude.
    candidates : Candidates
    cold_users : {"popular", "mask"}

    Returns
    -------
    ids : int32 array, shape (len(users), N)
    scores : float array, shape (len(users), N)

    Raises
    ------
    MemoryBudgetError
    """
    n_items, allowed = len(learned.state.item), candidates.shared
    n_allowed = n_items if allowed is None else int(np.count_nonzero(allowed))
    check_answer(len(users), N, n_allowed, learned.state.item.matrix.itemsize)
    engine = engine_for(learned.plan, float(len(users)) * n_items * learned.plan.rank)
    ids, scores = engine.top_k(
        scoring_rows(users, "user", learned.state.mean),
        _packed_items(learned, engine),
        N,
        seen,
        None if allowed is None else _with_factors(learned, allowed),
    )
    cold = users.blank_rows()
    if len(cold):
        _rank_cold(learned, ids, scores, cold, None if seen is None else take_rows(seen, cold), allowed, cold_users)
    return ids, scores


def _rank_cold(
    learned: Learned,
    ids: np.ndarray,
    scores: np.ndarray,
    cold: np.ndarray,
    seen: sp.csr_array | None,
    allowed: np.ndarray | None,
    cold_users: str,
) -> None:
    """Replace rows `cold` of a result in place: zero factors give no ranking, biases do."""
    if cold_users == "popular" and learned.state.user.bias is not None:
        return
    ids[cold], scores[cold] = -1, -np.inf
    counts = learned.item_counts
    if cold_users == "mask":
        return
    if counts is None:
        logger.warning(
            "the model was saved without the number of entries of its items, so users without factors get no "
            "recommendations (%d here); fit it again",
            len(cold),
        )
        return
    shown = counts > 0 if allowed is None else allowed & (counts > 0)
    kept = min(ids.shape[1], len(counts))
    ids[cold, :kept], scores[cold, :kept] = rank_by_count(counts, shown, seen, len(cold), kept)


def _packed_items(learned: Learned, engine: Engine) -> Any:
    """Items with factors, in the layout of `engine`."""

    def pack() -> Any:
        return engine.pack(scoring_rows(learned.state.item, "item", learned.state.mean), _with_factors(learned))

    return learned.cached(("scoring items", engine.name), pack)


def _with_factors(learned: Learned, allowed: np.ndarray | None = None) -> np.ndarray | None:
    """Positions of the allowed items that have factors; None if these are all items."""
    warm = learned.cached("warm items", lambda: ~blank_mask(learned, "item"))
    return None if allowed is None and warm.all() else np.flatnonzero(warm if allowed is None else warm & allowed)


def blank_mask(learned: Learned, side: Side) -> np.ndarray:
    """Which rows of a side have no factors, bool."""
    factors = learned.state.side(side)
    blank = np.zeros(len(factors), dtype=bool)
    blank[factors.blank_rows()] = True
    return blank


# ----------------------------------------------------------------------------------------------------- neighbours


def neighbours(learned: Learned, side: Side, positions: np.ndarray, N: int) -> tuple[np.ndarray, np.ndarray]:
    """The N rows of a side whose factors have the highest cosine with each row of `positions`, itself first."""
    factors = Factors(learned.state.side(side).matrix)  # biases do not measure similarity
    normalized = learned.cached(("normalized", side), lambda: _normalized(factors.matrix))
    check_answer(len(positions), N, len(normalized), normalized.itemsize)
    engine = engine_for(learned.plan, float(len(positions)) * normalized.size)

    def pack() -> Any:
        blank = factors.blank_rows()
        return engine.pack(normalized, np.setdiff1d(np.arange(len(factors)), blank) if len(blank) else None)

    packed = learned.cached(("normalized", side, engine.name), pack)
    found, scores = engine.top_k(normalized[positions], packed, N, None, None)
    _itself_first(found, scores, positions)
    blank = factors.blank_rows(positions)
    found[blank], scores[blank] = -1, -np.inf
    return found, scores


def _normalized(factors: np.ndarray) -> np.ndarray:
    """Rows of length 1; zero rows stay zero. In float64: squares of small float32 factors underflow."""
    wide = factors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.ascontiguousarray(wide / np.where(lengths == 0, 1, lengths), dtype=factors.dtype)


def _itself_first(found: np.ndarray, scores: np.ndarray, positions: np.ndarray) -> None:
    """Move each query to the front of its neighbours, in place, if ties or zero factors ranked others before it."""
    for row in np.flatnonzero(found[:, 0] != positions):
        place = np.flatnonzero(found[row] == positions[row])
        last = int(place[0]) if place.size else found.shape[1] - 1
        own = scores[row, last] if place.size else 0
        found[row, 1 : last + 1] = found[row, :last].copy()
        scores[row, 1 : last + 1] = scores[row, :last].copy()
        found[row, 0], scores[row, 0] = positions[row], own


# -------------------------------------------------------------------------------------------------------- fold-in


def fold_in(learned: Learned, side: Side, matrix: sp.csr_array) -> Factors:
    """Exact factors of new rows of `side`, given the factors of the other side."""
    fixed = learned.state.side(other_side(side))
    engine = engine_for(learned.plan)
    # independent of the rows, and most of the work for a few rows
    gram = learned.cached(("gram", side, engine.name), lambda: engine.gram(fixed, learned.objective))
    return engine.fold_in(side, matrix, learned.objective, fixed, learned.state.mean, gram)
