"""Top-N of users or rows given by their factors: candidates, seen items, rows without factors.

All functions read one `Learned`, so a result never mixes the factors of two fits, and derived values are stored with
their factors.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from ..core.objective import Factors, Side, other_side, scoring_rows
from ..core.regression import filled, parted
from ..core.sparse import RowColumns, keep_entries, take_rows, transposed
from ..core.validate import make_csr
from ..data.store import StoredSeen
from ..errors import NonFiniteError, NotPositiveDefiniteError
from ..native import _als
from ..plan.memory import check_answer, threads_for
from ..plan.solver import Given
from ..plan.types import NONNEGATIVE
from .described import predicted_rows, pull_of
from .engine import Engine, engine_for
from .exactness import warn_of_fold_in
from .learned import Learned
from .popularity import best_pairs, rank_by_count, union
from .requests import Asked, Candidates, given_rows

logger = logging.getLogger("hybridmf")


def rank(
    learned: Learned, users: Factors, N: int, seen: RowColumns | None, candidates: Candidates, cold_users: str
) -> tuple[np.ndarray, np.ndarray]:
    """The N best items of each row of `users`, of the model or folded in, but those `seen`; see `recommend`.

    Items (int32) and scores have the shape (len(users), N).
    """
    if candidates.allowed is not None:
        return _rank_lists(learned, users, N, seen, candidates, cold_users)
    include_cold = candidates.include_cold
    if candidates.denied is not None:
        denied = candidates.denied
        seen = RowColumns.of(denied if seen is None else union(seen.matrix(), denied))
    n_items, allowed, chosen = len(learned.state.item), candidates.shared, None
    n_allowed = n_items if allowed is None else int(np.count_nonzero(allowed))
    if allowed is not None:
        excluded = RowColumns.none(len(users), n_items) if seen is None else seen
        if excluded.n_entries + len(users) * (n_items - n_allowed) <= n_allowed:
            seen = excluded.with_columns(np.flatnonzero(~allowed))  # a few items: faster than packing all others
        else:
            chosen = _with_factors(learned, allowed, include_cold)
    check_answer(len(users), N, n_allowed, learned.state.item.form[0].itemsize)
    work = float(len(users)) * n_items * learned.plan.rank
    engine = engine_for(learned.plan, work, learned.state.item.held_by() is not None)
    rows, packed = scoring_rows(users, "user", learned.state.mean), _packed_items(learned, engine, include_cold)
    ids, scores = engine.top_k(rows, packed, N, seen, chosen)
    cold = users.blank_rows()
    if len(cold):
        _rank_cold(learned, ids, scores, cold, None if seen is None else seen.take(cold).matrix(), allowed, cold_users)
    return ids, scores


class Request(NamedTuple):
    """Users, and the items that may be recommended to them."""

    learned: Learned
    users: np.ndarray  # positions, int64; -1 for users who are unknown to the model
    asked: Asked
    seen: Any
    """Entries to exclude: rows in the order of `users`, or of all users by position if it is that of `learned`."""
    candidates: Candidates
    factors: Factors | None = None
    """Of all `users`, folded in; default: those of the model."""

    def answer(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """`rank` for some of the users. The factors of those who are unknown to the model are zero."""
        learned, _, asked, seen, candidates, factors = self
        users = self.users[start:stop]
        absent, some = asked.unknown.absent(users), len(users) < len(self.users)
        if seen is learned.seen and seen is not None:
            seen = seen_in_training(seen, users, absent)
        elif seen is not None:
            seen = RowColumns.of(seen, np.arange(start, stop) if some else None)
        if some:
            candidates = candidates.of_users(start, stop)
        factors = rows_of_users(learned, users, absent) if factors is None else factors
        if absent is None:
            return rank(learned, factors, asked.N, seen, candidates, asked.cold_users)
        popular = asked.unknown.rule == "popular"
        ids, scores = rank(learned, factors, asked.N, seen, candidates, "popular" if popular else asked.cold_users)
        empty = absent
        if popular:
            empty = np.zeros(len(users), dtype=bool)
            if asked.cold_users == "mask":
                empty[factors.blank_rows()] = True
                empty &= ~absent
        ids[empty], scores[empty] = -1, -np.inf
        return ids, scores


def requested(
    learned: Learned, users: np.ndarray, user_items: Any, asked: Asked, recalculated: bool = False
) -> Request:
    """A recommendation whose arguments are checked; `recalculated`: by factors of the rows of `user_items`."""
    rows_of = partial(given_rows, learned, users, unknown=asked.unknown.of_entries)
    candidates = asked.candidates(learned, len(users), rows_of)
    asked.unknown.report()
    seen: Any = None
    if user_items is not None:
        seen = rows_of("user_items", user_items)  # validated even if unused
    elif asked.filter_liked:
        seen = _all_seen(learned)
    factors = fold_in(learned, "user", seen) if recalculated else None
    return Request(learned, users, asked, seen if asked.filter_liked else None, candidates, factors)


def seen_by(learned: Learned, users: np.ndarray, user_items: Any = None) -> sp.csr_array:
    """Items that users have seen, a row for each: of `user_items`, as `recommend` takes it, else of the training."""
    if user_items is None:
        return seen_in_training(_all_seen(learned), users, None).matrix()
    return given_rows(learned, users, "user_items", user_items)


def _all_seen(learned: Learned) -> sp.csr_array | StoredSeen:
    """Items that users have seen in the training data."""
    if learned.seen is None:
        raise ValueError(
            "this model was saved without seen items: pass user_items, or filter_already_liked_items=False"
        )
    return learned.seen


def rows_of_users(learned: Learned, users: np.ndarray, absent: np.ndarray | None) -> Factors:
    """Factors of users; those of unknown ones, of a mask, are zero."""
    if absent is None:
        return learned.state.user.take(users)
    taken = learned.state.user.take(np.maximum(users, 0))
    for array in taken.arrays:
        array[absent] = 0
    return taken


def seen_in_training(seen: sp.csr_array | StoredSeen, users: np.ndarray, absent: np.ndarray | None) -> RowColumns:
    """Training entries of users; unknown ones, of a mask, have none."""
    places = users if absent is None else np.maximum(users, 0)
    rows = RowColumns.of(seen.take_rows(places)) if isinstance(seen, StoredSeen) else RowColumns.of(seen, places)
    return rows if absent is None else rows.without_rows(absent)


def _rank_lists(
    learned: Learned, users: Factors, N: int, seen: RowColumns | None, candidates: Candidates, cold_users: str
) -> tuple[np.ndarray, np.ndarray]:
    """`rank` among a list of candidates for each user, whose scores alone are computed, on the CPU."""
    assert candidates.allowed is not None
    dtype, longest = learned.state.item.matrix.dtype, int(np.diff(candidates.allowed.indptr).max(initial=0))
    check_answer(len(users), N, longest, dtype.itemsize)
    rows, items = candidates.pairs(None if seen is None else seen.matrix(), candidates.denied)
    scored = _scoring_items(learned)
    user_rows = scoring_rows(users, "user", learned.state.mean)
    threads = threads_for(len(rows) * scored.shape[1], len(rows), learned.plan.num_threads)
    scores = _als.predict_pairs(user_rows, scored, rows, items, threads).astype(dtype)
    shown = ~_unranked_items(learned, candidates.include_cold)[items]
    by_count = np.zeros(len(users), dtype=bool)
    if cold_users == "mask" or learned.state.user.bias is None:
        by_count[users.blank_rows()] = True
    if by_count.any():
        cold = by_count[rows]
        counts = learned.popularity
        if counts is None or cold_users == "mask":
            counts = np.zeros(len(scored))
        scores[cold], shown[cold] = counts[items[cold]], counts[items[cold]] > 0
    return best_pairs(rows[shown], items[shown], scores[shown], len(users), N)


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
    counts = learned.popularity
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


def _packed_items(learned: Learned, engine: Engine, include_cold: bool = False) -> Any:
    """Items with factors, in the layout of `engine`."""

    def pack() -> Any:
        held = learned.state.item.held_by(engine.device)
        return engine.pack(
            _scoring_items(learned) if held is None else held, _with_factors(learned, None, include_cold)
        )

    return learned.cached(("scoring items", engine.name, include_cold and bool(learned.features)), pack)


def _scoring_items(learned: Learned) -> np.ndarray:
    return learned.cached("scoring rows of items", lambda: scoring_rows(learned.state.item, "item", learned.state.mean))


def _unranked_items(learned: Learned, include_cold: bool = False) -> np.ndarray:
    """Which items are never recommended, bool: those without factors and, by default, those with features only."""
    described = None if include_cold else learned.features.get("item")

    def unranked() -> np.ndarray:
        mask = blank_mask(learned, "item")
        if described is not None:
            mask[described.cold] = True
        return mask

    return learned.cached(("unranked items", described is None), unranked)


def _with_factors(learned: Learned, allowed: np.ndarray | None = None, include_cold: bool = False) -> np.ndarray | None:
    """Positions of the allowed items that are ranked; None if these are all items."""
    warm = ~_unranked_items(learned, include_cold)
    return None if allowed is None and warm.all() else np.flatnonzero(warm if allowed is None else warm & allowed)


def blank_mask(learned: Learned, side: Side) -> np.ndarray:
    """Which rows of a side have no factors, bool.

    Zero factors may be the solution of a row of explicit feedback with entries, such as ratings of 0: then the row has
    factors. In implicit feedback they are those of a row without a positive entry, which nothing recommends.
    """
    factors = learned.state.side(side)
    blank = np.zeros(len(factors), dtype=bool)
    places = factors.blank_rows()
    blank[places] = True
    if len(places) and not learned.objective.is_implicit:
        blank[_solved_by_zero(learned, side, blank)] = False
    return blank


def _solved_by_zero(learned: Learned, side: Side, blank: np.ndarray) -> np.ndarray:
    """Rows with entries, among those without factors, whose solution is zero; none if their ratings are unknown."""
    if learned.values is None or not isinstance(learned.seen, sp.csr_array):
        return np.empty(0, np.int64)
    matrix = make_csr(learned.seen.indptr, learned.seen.indices, learned.values, learned.seen.shape)
    if side == "item":
        matrix = transposed(keep_entries(matrix, blank[matrix.indices]))
    rated = np.flatnonzero(blank & (np.diff(matrix.indptr) > 0))
    if not len(rated):
        return rated
    try:  # of rows that came with an update of the other side, zero factors are no solution
        return rated[fold_in(learned, side, take_rows(matrix, rated)).blank_rows()]
    except (NotPositiveDefiniteError, NonFiniteError):
        return np.empty(0, np.int64)


# ---------------------------------------------------------------------------------------------------- predictions


def predicted(learned: Learned, users: np.ndarray, items: np.ndarray, unknown: str) -> np.ndarray:
    """Values of pairs of positions (-1 for unknown ones) without clipping; see `ServingMixin.predict`."""
    state, plan = learned.state, learned.plan
    if unknown != "error":
        no_user, no_item = users < 0, items < 0
        users, items = np.maximum(users, 0), np.maximum(items, 0)
    threads = threads_for(len(users) * plan.factors, len(users), plan.num_threads)
    values: np.ndarray = _als.predict_pairs(state.user.matrix, state.item.matrix, users, items, threads)
    if state.user.bias is not None and state.item.bias is not None:
        values += state.mean + state.user.bias[users] + state.item.bias[items]
    if unknown != "error" and (absent := no_user | no_item).any():
        values[absent] = np.nan
        if unknown == "popular":
            known = (users[absent], items[absent], ~no_user[absent], ~no_item[absent])
            values[absent] = _without_factors(learned, *known)
    return values


def _without_factors(
    learned: Learned, users: np.ndarray, items: np.ndarray, user_known: np.ndarray, item_known: np.ndarray
) -> np.ndarray:
    """Predictions of pairs of which the model does not know both: means, biases, and shares of users who like items."""
    user, item = learned.state.user, learned.state.item
    if learned.objective.is_implicit:
        likes = learned.popularity
        shares = np.full(len(items), np.nan) if likes is None else likes[items] / learned.shape[0]
        return np.where(item_known, shares, 0.0)
    if user.bias is not None and item.bias is not None:
        return (
            learned.state.mean + np.where(user_known, user.bias[users], 0) + np.where(item_known, item.bias[items], 0)
        )
    return np.full(len(users), _mean_rating(learned))


def _mean_rating(learned: Learned) -> float:
    """Mean of the training ratings; NaN where neither they nor their sum are stored."""
    if learned.values is not None and len(learned.values):
        return float(learned.values.mean(dtype=np.float64))
    return np.nan if learned.total is None or learned.seen is None else learned.total / learned.seen.nnz


# ----------------------------------------------------------------------------------------------------- neighbours


def neighbours(
    learned: Learned, side: Side, positions: np.ndarray, N: int, allowed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The N rows of a side whose factors have the highest cosine with each row of `positions`, itself first.

    Under a mask of `allowed` rows, a row comes first itself only if it is allowed.
    """
    factors = Factors(learned.state.side(side).matrix)  # biases do not measure similarity
    normalized = learned.cached(("normalized", side), lambda: _normalized(factors.matrix))
    check_answer(len(positions), N, len(normalized), normalized.itemsize)
    engine = engine_for(learned.plan, float(len(positions)) * normalized.size)

    def pack() -> Any:
        blank = factors.blank_rows()
        return engine.pack(normalized, np.setdiff1d(np.arange(len(factors)), blank) if len(blank) else None)

    packed = learned.cached(("normalized", side, engine.name), pack)
    candidates = None if allowed is None else np.setdiff1d(np.flatnonzero(allowed), factors.blank_rows())
    queries = normalized[positions]
    found, scores = engine.top_k(queries, packed, N, None, candidates)
    inside = np.arange(len(positions)) if allowed is None else np.flatnonzero(allowed[positions])
    found[inside], scores[inside] = itself_first(found[inside], scores[inside], queries[inside], positions[inside])
    blank = factors.blank_rows(positions)
    found[blank], scores[blank] = -1, -np.inf
    return found, scores


def _normalized(factors: np.ndarray) -> np.ndarray:
    """Rows of length 1; zero rows stay zero. In float64: squares of small float32 factors underflow."""
    wide = factors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.ascontiguousarray(wide / np.where(lengths == 0, 1, lengths), dtype=factors.dtype)


def itself_first(
    found: np.ndarray, scores: np.ndarray, queries: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours with each query in front, also where ties or rounding ranked others before it, or left it out.

    `found` and `scores`, shape (n, N), by descending score, change in place. Queries are rows of length 1.
    """
    for row in np.flatnonzero(found[:, 0] != positions):
        place = np.flatnonzero(found[row] == positions[row])
        last = int(place[0]) if place.size else found.shape[1] - 1
        own = max(queries[row] @ queries[row], scores[row, 0])  # scores never rise
        found[row, 1 : last + 1] = found[row, :last].copy()
        scores[row, 1 : last + 1] = scores[row, :last].copy()
        found[row, 0], scores[row, 0] = positions[row], own
    return found, scores


# -------------------------------------------------------------------------------------------------------- fold-in


def fold_in(learned: Learned, side: Side, matrix: sp.csr_array, features: sp.csr_array | None = None) -> Factors:
    """Exact factors of new rows of `side`, given the factors of the other side; `features`: those of the rows.

    A row without entries then has the factors of its features.
    """
    fixed, plan, pull = learned.solved(other_side(side)), learned.plan, None
    # kernels of a GPU do not finish nearly singular nonnegative rows, and have no pull
    if plan.gpu is not None and (plan.solver == NONNEGATIVE or features is not None):
        plan = plan.changed(gpu=None)
    engine = engine_for(plan)
    # independent of the rows; for a few rows, this is most of the work
    gram = learned.cached(("gram", side, engine.name), lambda: engine.gram(side, fixed, learned.objective))
    if features is not None:
        predicted, degrees = predicted_rows(learned, side, features), np.diff(matrix.indptr)
        pull = np.ascontiguousarray(pull_of(learned, side, predicted, degrees), dtype=fixed.matrix.dtype)
    found = engine.fold_in(side, matrix, learned.objective, Given(fixed, learned.state.mean, gram=gram, pull=pull))
    warn_of_fold_in(learned, side, matrix)
    if features is None:
        return found
    alone = np.flatnonzero(degrees == 0)
    return filled(found, alone, parted(predicted[alone].astype(fixed.matrix.dtype), plan.factors))
