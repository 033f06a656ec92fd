"""Textbook metrics of predictions and rankings, and `evaluate` for any model.

Every ranking metric is a vector with one value for each user, NaN for users without a relevant item; `mean_over_users`
averages the other values. docs/evaluation.md has the formulas.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
import scipy.sparse as sp

from .core.sparse import as_ones, entries_in, entry_rows, keep_entries, take_rows, without_zeros
from .core.validate import (
    as_csr,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_real,
    check_rng,
    check_shape,
    check_threads,
    csr_arrays,
    refuse_masked,
)
from .data.align import align, labels_of
from .data.labels import refuse_other_index
from .errors import NonFiniteError
from .model.early_stopping import refuse_error
from .model.evaluation import Evaluation as Evaluation
from .model.evaluation import Evaluations as Evaluations
from .model.evaluation import Interval as Interval
from .model.evaluation import Parts as Parts
from .model.evaluation import as_evaluation
from .model.learned import count_items
from .model.popularity import PopularityRecommender as PopularityRecommender
from .model.recommenders import Listed, OtherModel, ReadyLists
from .native import _rankings
from .native.arguments import RankingMetrics
from .plan.memory import threads_for
from .ratings import as_ratings

BLOCK_USERS = 16_384
"""Users in each call of `recommend` of a model that may store the scores of all items for each user."""

BLOCK_RESULTS = 1 << 25
"""Results (8 to 12 bytes each) in each call of a model that stores nothing else per user; its engine gets all work at
once."""

BLOCK_ENTRIES = 1 << 22  # entries in each call of `predict`, at some 40 bytes each
PLACE_WORK = 64  # multiply-adds that take as long as a place of a ranking

AUC_BLOCK_BYTES = 64 << 20  # bytes of float32 scores, shape (block, n_items), that `auc` holds at a time

Metric: TypeAlias = Callable[[np.ndarray, sp.csr_array], Any]
"""The values of each user by rankings, shape (n_users, k), and relevant items, CSR of shape (n_users, n_items)."""

_RANKING: Mapping[str, int] = {
    "ndcg": _rankings.NDCG,
    "precision": _rankings.PRECISION,
    "recall": _rankings.RECALL,
    "map": _rankings.AVERAGE_PRECISION,
    "mrr": _rankings.RECIPROCAL_RANK,
    "hit_rate": _rankings.HIT_RATE,
    "novelty": _rankings.NOVELTY,
}
"""Kernels of the metrics of each user, by the names that `evaluate` gives them before ``@k``."""

_AXES = ("n_users", "n_items")

_Metric = TypeVar("_Metric", bound=Callable[..., np.ndarray])

logger = logging.getLogger("hybridmf")


# ------------------------------------------------------------------------------------------------ predicted values


def rmse(truth: Any, predicted: Any) -> float:
    """Root of the mean squared error, accumulated in float64.

    Parameters
    ----------
    truth, predicted : real array, shape (n,), n >= 1

    Raises
    ------
    ValueError
        No values, different lengths or indexes of pandas series, arrays that are not vectors, or a value that is NaN,
        infinite or masked.
    TypeError
        Values that are not real numbers.
    """
    return float(np.sqrt(np.mean(np.square(_differences(truth, predicted)))))


def mae(truth: Any, predicted: Any) -> float:
    """Mean absolute error, accumulated in float64; arguments, result and errors as for `rmse`."""
    return float(np.mean(np.abs(_differences(truth, predicted))))


def _differences(truth: Any, predicted: Any) -> np.ndarray:
    refuse_other_index(truth=truth, predicted=predicted)
    truth, predicted = _finite_vector("truth", truth), _finite_vector("predicted", predicted)
    if len(truth) != len(predicted):
        raise ValueError(
            f"truth has {len(truth)} values and predicted has {len(predicted)}; each prediction needs its true value"
        )
    if len(truth) == 0:
        raise ValueError("truth and predicted are empty; an error can be averaged over at least one value only")
    return predicted - truth


def _finite_vector(name: str, given: Any) -> np.ndarray:
    refuse_masked(name, given)
    if (dtype := np.asarray(given).dtype).kind not in "fiubO":
        raise TypeError(f"{name} must be real numbers, got dtype {dtype}")
    values = np.asarray(given, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name} must be a vector, got an array of shape {values.shape}; pass {name}.ravel()")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        more = f" (and {bad.size - 1} more such values)" if bad.size > 1 else ""
        raise ValueError(
            f"{name} has the value {values[bad[0]]} at position {bad[0]}{more}; errors are averages of finite values: "
            "leave such pairs out"
        )
    return values


# -------------------------------------------------------------------------------------------------------- rankings


def precision_at_k(recommended: Any, relevant: Any, k: int) -> np.ndarray:
    """Relevant items among the first k, divided by k (also where fewer than k items are recommended or exist).

    Equals ``ir_measures.P@k``.

    Parameters
    ----------
    recommended : integer array, shape (n_users, n_columns)
        Item positions, best first; -1 means no recommendation and is never a hit. Only the first k columns are read;
        columns missing up to k count as -1.
    relevant : CSR matrix, shape (n_users, n_items)
        Entries > 0 are the relevant items; all others are not. A Ratings or any other matrix is converted.
    k : int
        At least 1.

    Returns
    -------
    float64 array, shape (n_users,)
        In [0, 1]; NaN for users without a relevant item.

    Raises
    ------
    TypeError
        `recommended` or `k` is not of integers.
    ValueError
        Shapes disagree, an item position is out of range, a user is recommended an item twice, or k < 1.
    """
    return _per_user("precision", recommended, relevant, k)


def _like_precision(metric: _Metric) -> _Metric:
    """Complete a docstring with the arguments, the result and the errors, which are those of `precision_at_k`."""
    if metric.__doc__ and precision_at_k.__doc__:  # python -OO removes both
        _, title, sections = inspect.cleandoc(precision_at_k.__doc__).partition("Parameters\n")
        metric.__doc__ = f"{inspect.cleandoc(metric.__doc__)}\n\n{title}{sections}"
    return metric


@_like_precision
def recall_at_k(recommended: Any, relevant: Any, k: int) -> np.ndarray:
    """Relevant items among the first k, divided by the number of the user's relevant items (not by at most k).

    Equals ``ir_measures.R@k``.
    """
    return _per_user("recall", recommended, relevant, k)


@_like_precision
def map_at_k(recommended: Any, relevant: Any, k: int) -> np.ndarray:
    """Average precision: the sum of precision@r over the ranks r <= k of hits, divided by the number of relevant items.

    Equals ``ir_measures.AP@k`` (trec_eval's ``map_cut_k``), which divides by *all* relevant items of the user: with
    more than k of them the best possible value is k / n_relevant. Some libraries divide by min(k, n_relevant) instead.
    """
    return _per_user("map", recommended, relevant, k)


def ndcg_at_k(recommended: Any, relevant: Any, k: int, gains: str = "binary") -> np.ndarray:
    """Discounted cumulative gain (gain / log2(r + 1) summed over ranks r <= k), divided by that of the ideal ranking.

    ``gains="binary"`` equals ``ir_measures.nDCG@k`` with relevance 1 for each relevant item. ``gains="value"`` takes
    the positive values of `relevant` as gains as they are (linear, no 2**value - 1) and equals ``ir_measures.nDCG@k``
    (``dcg="log2"``, the default) with the values as relevance labels, which ir-measures requires to be integers.

    Parameters
    ----------
    recommended, relevant, k
        As for `precision_at_k`.
    gains : {"binary", "value"}

    Returns
    -------
    float64 array, shape (n_users,)
        In [0, 1]; 1 for an ideal ranking; NaN for users without a relevant item.

    Raises
    ------
    TypeError, ValueError
        As for `precision_at_k`; also for an unknown `gains`.
    """
    check_choice("gains", gains, ("binary", "value"))
    return _per_user("ndcg", recommended, relevant, k, gains)


@_like_precision
def mrr_at_k(recommended: Any, relevant: Any, k: int) -> np.ndarray:
    """Reciprocal rank: 1 over the rank of the first relevant item among the first k, 0 without one.

    Equals ``ir_measures.RR@k``; its mean over users is the MRR.
    """
    return _per_user("mrr", recommended, relevant, k)


@_like_precision
def hit_rate_at_k(recommended: Any, relevant: Any, k: int) -> np.ndarray:
    """Whether a relevant item is among the first k, as 1 or 0.

    Equals ``ir_measures.Success@k``.
    """
    return _per_user("hit_rate", recommended, relevant, k)


def novelty_at_k(recommended: Any, train: Any, k: int) -> np.ndarray:
    """Mean self-information of the first k items: -log2 of the share of users who have the item (Zhou et al. 2010).

    Parameters
    ----------
    recommended : integer array, shape (n_users, n_columns)
        As for `precision_at_k`.
    train : CSR matrix, shape (n_users, n_items)
        Its entries are the items that users have. An item without users counts as one with a single user.
    k : int
        At least 1.

    Returns
    -------
    float64 array, shape (n_users,)
        In bits: 0 for items that everybody has. NaN for users without a recommended item.

    Raises
    ------
    TypeError, ValueError
        As for `precision_at_k`.
    """
    k = check_int("k", k, 1)
    train = as_csr(train, name="train")
    recommended = _as_rankings(recommended, train.shape[0], k)
    information = _information(count_items(train), train.shape[0])
    everybody = np.arange(train.shape[0])
    return _ranking_values(recommended, everybody, train, [(_RANKING["novelty"], k)], information)[0]


def coverage_at_k(recommended: Any, n_items: int, k: int) -> float:
    """Share of all items that are among the first k of some user.

    Parameters
    ----------
    recommended : integer array, shape (n_users, n_columns)
        As for `precision_at_k`.
    n_items : int
        Number of all items, at least 1.
    k : int
        At least 1.

    Returns
    -------
    float
        In [0, 1].

    Raises
    ------
    TypeError, ValueError
        As for `precision_at_k`.
    """
    k, n_items = check_int("k", k, 1), check_int("n_items", n_items, 1)
    refuse_masked("recommended", recommended)
    n_users = len(recommended)
    nothing = sp.csr_array((n_users, n_items), dtype=np.float32)
    shown = np.zeros((1, n_items), dtype=np.uint8)
    _ranking_values(_as_rankings(recommended, n_users, k), np.arange(n_users), nothing, [], None, [k], shown)
    return float(shown.mean())


def mean_over_users(values: Any) -> float:
    """Mean of a per-user metric over the users for whom it is defined (not NaN).

    Parameters
    ----------
    values : float array, shape (n_users,)

    Raises
    ------
    ValueError
        All values are NaN, or `values` is empty.
    """
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    if values.size == 0:
        raise ValueError("values has no user with a relevant item (all NaN, or empty); there is nothing to average")
    return float(values.mean())


def _per_user(metric: str, recommended: Any, relevant: Any, k: int, gains: str = "binary") -> np.ndarray:
    k = check_int("k", k, 1)
    relevant = as_csr(relevant, name="relevant")
    relevant = keep_entries(relevant, relevant.data > 0)
    if gains == "binary":
        relevant = as_ones(relevant, np.float32)
    recommended = _as_rankings(recommended, relevant.shape[0], k)
    return _ranking_values(recommended, np.arange(relevant.shape[0]), relevant, [(_RANKING[metric], k)])[0]


def _ranking_values(
    recommended: np.ndarray,
    rows: np.ndarray,
    relevant: sp.csr_array,
    cuts: Sequence[tuple[int, int]],
    information: np.ndarray | None = None,
    shown_cuts: Sequence[int] = (),
    shown: np.ndarray | None = None,
) -> np.ndarray:
    """Values of metrics, shape (n_metrics, n_users), by their kinds and cuts; `rows` are those of each user.

    Items among the first ``shown_cuts[k]`` of some user are marked in ``shown[k]``, uint8.
    """
    n_items = relevant.shape[1]
    longest = max(recommended.shape[1], n_items)
    ranks = np.arange(min(longest, max((k for _, k in cuts), default=0)))  # from 0
    metrics = RankingMetrics(
        n_items,
        np.array([kind for kind, _ in cuts], dtype=np.int32),
        np.array([k for _, k in cuts], dtype=np.int64),
        1.0 / np.log2(ranks + 2.0),
        np.empty(0) if information is None else information,
        np.array(shown_cuts, dtype=np.int64),
        np.empty((0, n_items), dtype=np.uint8) if shown is None else shown,
    )
    threads = threads_for(PLACE_WORK * recommended.size, len(recommended), check_threads(None))
    values = _rankings.measure(recommended, rows, csr_arrays(relevant), metrics, threads)
    if values is None:
        raise _no_ranking(recommended, n_items)
    return values


def _information(item_counts: np.ndarray, n_users: int) -> np.ndarray:
    """Bits of each item that `item_counts` of the users have."""
    return np.log2(n_users) - np.log2(np.maximum(item_counts, 1))


def _as_rankings(recommended: Any, n_users: int, k: int) -> np.ndarray:
    """The first k columns, int32 or int64, C order."""
    refuse_masked("recommended", recommended)
    recommended = np.asarray(recommended)
    if recommended.ndim != 2 or recommended.shape[0] != n_users:
        raise ValueError(
            f"recommended has shape {recommended.shape}; expected (n_users={n_users}, k), "
            "a row of item positions for each row of relevant"
        )
    if not np.issubdtype(recommended.dtype, np.integer):
        raise TypeError(f"recommended must be integers (item positions, -1 for none), got dtype {recommended.dtype}")
    dtype = np.int32 if recommended.dtype == np.int32 else np.int64
    return np.ascontiguousarray(recommended[:, :k], dtype=dtype)


def _no_ranking(recommended: np.ndarray, n_items: int) -> ValueError:
    """The error for the first id that is no item, or else for the first that repeats."""
    outside = (recommended < -1) | (recommended >= n_items)
    if np.any(outside):
        row, column = np.argwhere(outside)[0]
        return ValueError(
            f"recommended has {recommended[row, column]} for user {row} at rank {column + 1}; "
            f"expected 0 <= item < n_items={n_items}, or -1 for no recommendation"
        )
    in_order = np.sort(recommended, axis=1)
    row, column = np.argwhere((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0))[0]
    return ValueError(
        f"recommended has item {in_order[row, column]} twice for user {row}; a ranking holds each item once at most"
    )


# ------------------------------------------------------------------------------------------------------------- AUC


def auc(
    user_factors: Any,
    item_factors: Any,
    relevant: Any,
    seen: Any = None,
    *,
    item_bias: Any = None,
    block_bytes: int = AUC_BLOCK_BYTES,
) -> np.ndarray:
    """Probability that a relevant item scores above an irrelevant one, both unseen by the user; ties count half.

    The score is ``user_factors[u] @ item_factors[i] + item_bias[i]`` in float32 (terms that depend on the user only do
    not change the order). Per user this is scikit-learn's ``roc_auc_score``; ir-measures has no counterpart. Users are
    processed in blocks, so no (n_users, n_items) array is allocated.

    Parameters
    ----------
    user_factors : float array, shape (n_users, factors)
    item_factors : float array, shape (n_items, factors)
    relevant : CSR matrix, shape (n_users, n_items)
        Entries > 0 are the relevant items.
    seen : CSR matrix, shape (n_users, n_items), optional
        Items to exclude for each user, relevant or not. None excludes nothing.
    item_bias : float array, shape (n_items,), optional
    block_bytes : int
        Memory of one block of scores; a block has at least one user.

    Returns
    -------
    float64 array, shape (n_users,)
        In [0, 1]; NaN for users without a relevant or without an irrelevant unseen item.

    Raises
    ------
    ValueError
        Shapes disagree.
    NonFiniteError
        A score is NaN or infinite.
    """
    relevant = as_csr(relevant, name="relevant")
    relevant = keep_entries(relevant, relevant.data > 0)
    if seen is not None:
        seen = as_csr(seen, name="seen")
        check_shape("seen", seen, relevant.shape, _AXES)
    users, items, bias = _checked_factors(user_factors, item_factors, item_bias, relevant.shape)
    block = max(1, check_int("block_bytes", block_bytes, 1) // max(1, 4 * len(items)))
    values = np.full(relevant.shape[0], np.nan)
    for rows in _blocks(np.flatnonzero(np.diff(relevant.indptr)), block):
        scores = _scores(users[rows], items, bias, rows)
        values[rows] = _auc_of_scores(
            scores, take_rows(relevant, rows), None if seen is None else take_rows(seen, rows)
        )
    return values


def _checked_factors(
    user_factors: Any, item_factors: Any, item_bias: Any, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    users, items = np.asarray(user_factors, dtype=np.float32), np.asarray(item_factors, dtype=np.float32)
    for name, factors in (("user_factors", users), ("item_factors", items)):
        if factors.ndim != 2:
            raise ValueError(f"{name} must have shape (n, factors), got {factors.shape}")
    check_shape("user_factors", users, (shape[0], None), ("n_users", "factors"))
    check_shape("item_factors", items, (shape[1], users.shape[1]), ("n_items", "factors"))
    if item_bias is None:
        return users, items, None
    bias = np.asarray(item_bias, dtype=np.float32)
    if bias.shape != (shape[1],):
        raise ValueError(f"item_bias has shape {bias.shape}; expected (n_items={shape[1]},)")
    return users, items, bias


def _scores(users: np.ndarray, items: np.ndarray, bias: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # checked below, with a message that names the user
        scores = users @ items.T
        if bias is not None:
            scores += bias
        # The sum of a row is not finite if one of its scores is not; only then is each score checked.
        suspects = np.flatnonzero(~np.isfinite(scores.sum(axis=1)))
    for k in suspects:
        if not np.all(np.isfinite(scores[k])):
            raise NonFiniteError(
                f"scores of user {rows[k]} are not finite; the factors hold NaN, infinite or too large values: "
                "fit again with more regularization"
            )
    return scores


def _auc_of_scores(scores: np.ndarray, relevant: sp.csr_array, seen: sp.csr_array | None) -> np.ndarray:
    """AUC of each row; overwrites `scores`, float32 of shape (block, n_items)."""
    n_rows, n_items = scores.shape
    n_unseen = np.full(n_rows, n_items, dtype=np.int64)
    if seen is not None:
        scores[entry_rows(seen), seen.indices] = np.inf  # sorts behind every score; no score is infinite
        n_unseen -= np.diff(seen.indptr)
    rows = entry_rows(relevant)
    values = scores[rows, relevant.indices]
    unseen = values < np.inf
    rows, values = rows[unseen], values[unseen]
    scores.sort(axis=1)
    bounds, below = np.searchsorted(rows, np.arange(n_rows + 1)), np.empty(len(rows))
    for row, in_order in enumerate(scores):  # items below plus half of those equal, the item itself among them
        own = slice(bounds[row], bounds[row + 1])
        below[own] = 0.5 * (in_order.searchsorted(values[own]) + in_order.searchsorted(values[own], "right"))
    n_relevant = np.bincount(rows, minlength=n_rows).astype(np.float64)
    # Relevant items among themselves: each pair adds 1 in total and each item with itself a half, n**2 / 2 in all.
    wins = np.bincount(rows, weights=below, minlength=n_rows) - 0.5 * n_relevant**2
    pairs = n_relevant * (n_unseen - n_relevant)
    pairs[pairs == 0] = np.nan
    return wins / pairs


# -------------------------------------------------------------------------------------------------------- evaluate

_RANKING_NAME = re.compile(rf"({'|'.join(_RANKING)}|coverage)@([1-9][0-9]*)")
_ERRORS: Mapping[str, Callable[[Any, Any], float]] = {"rmse": rmse, "mae": mae}


@overload
def evaluate(
    model: Mapping[str, Any],
    test: Any,
    *,
    train: Any = ...,
    metrics: Any = ...,
    users: Any = ...,
    sample: int | None = ...,
    random_state: Any = ...,
    relevance_threshold: float | None = ...,
    block_users: int | None = ...,
    unknown: str = ...,
    include_cold: bool = ...,
) -> Evaluations: ...


@overload
def evaluate(
    model: Any,
    test: Any,
    *,
    train: Any = ...,
    metrics: Any = ...,
    users: Any = ...,
    sample: int | None = ...,
    random_state: Any = ...,
    relevance_threshold: float | None = ...,
    block_users: int | None = ...,
    unknown: str = ...,
    include_cold: bool = ...,
) -> Evaluation: ...


def evaluate(
    model: Any,
    test: Any,
    *,
    train: Any = None,
    metrics: str | Metric | Sequence[str | Metric] = ("ndcg@10", "precision@10", "recall@10", "map@10"),
    users: Any = None,
    sample: int | None = None,
    random_state: Any = 0,
    relevance_threshold: float | None = None,
    block_users: int | None = None,
    unknown: str = "error",
    include_cold: bool = False,
) -> Evaluation | Evaluations:
    """Evaluate a fitted model on held-out entries.

    Ranking metrics average over the users with a relevant test item; ``ndcg@k`` uses binary gains. ``rmse`` and
    ``mae`` compare ``model.predict`` with every test entry, including zeros.

    Parameters
    ----------
    model : fitted estimator or PopularityRecommender, other model, or integer array, shape (n_users, k)
        Must have, depending on the metrics, `recommend`, `predict`, or `user_factors`, `item_factors` and optionally
        `item_bias_` (for ``auc``). Optional attributes are `n_users` and `n_items`, its labels `user_ids_` and
        `item_ids_`, and `cold_users_`, the mask of users without training entries. A model without `n_users`, such as
        one of the library `implicit`, has the users and items of `train`, which its
        ``recommend(users, rows_of_train, N=, filter_already_liked_items=True)`` excludes. An array has item
        positions of each user, best first, -1 for none, in the positions of `train`, else of `test`; they are taken as
        they are, with items of `train`. A dict of such models by name is evaluated model by model, on the same users.
    test : Ratings or sparse matrix, shape (n_users, n_items)
        Held-out entries. Labelled ratings are aligned with the model by label, in any order; a plain matrix uses the
        positions of the model.
    train : Ratings or sparse matrix, shape (n_users, n_items), optional
        Items seen by the users, which are not recommended and which ``auc`` excludes. Default: `recommend` filters by
        the training data of the model; ``auc`` requires `train`. An item in both `train` and `test` counts as relevant
        but cannot be recommended, so keep the two disjoint, as `split` does; a warning is logged otherwise. Labels are
        as for `test`.
    metrics : sequence of str or callable, or one of these
        ``"ndcg@k"``, ``"precision@k"``, ``"recall@k"``, ``"map@k"``, ``"mrr@k"``, ``"hit_rate@k"``, ``"novelty@k"``,
        ``"coverage@k"`` for any k >= 1, ``"auc"``, ``"rmse"``, ``"mae"``. Novelty needs `train`, or a model of this
        library. A function is called as ``metric(rankings, relevant)`` for blocks of users, with item positions, shape
        (n, k), best first, -1 for none, and relevant test items, CSR of shape (n, n_items) with values 1; it returns
        one value for each user, NaN where it is not defined. k is its attribute ``k``, 10 without one, and the name of
        the result its ``__name__``.
    users : integer array or "warm", optional
        Positions of the users to evaluate, each counted once. "warm" selects the users with training entries,
        determined by `cold_users_` of the model if present, else by `train`. Default: all users.
    sample : int, optional
        Evaluate so many users, drawn at random from those that count (all if there are fewer).
    random_state : int, Generator or None
        Of the sample; by default, equal calls draw the same users.
    relevance_threshold : float, optional
        Test entries >= this value (as float32, like the values) are relevant. Default: entries > 0.
    block_users : int, optional
        Users in each call of the model. Default: for models of this library as many as memory allows, which lets a
        GPU take all work at once; for others 16,384 in calls of `recommend`.
    unknown : {"error", "drop"}
        Treatment of labelled entries whose user or item is unknown to the model.
    include_cold : bool
        Also rank items without training entries, by ``recommend(include_cold=True)`` of models with features, and
        report warm and cold items and users apart (`Evaluation.apart`). Needs training entries of the model, or
        `train`.

    Returns
    -------
    Evaluation
        A dict with one value for each name in `metrics`, in that order. Its attributes count the users and entries
        behind the values and hold the values of each user; its methods `interval` and `difference` give confidence
        intervals. For a dict of models, `Evaluations`: an `Evaluation` for each of them, printed as a table.

    Raises
    ------
    UnknownLabelError
        `test` or `train` has entries of unknown users or items under ``unknown="error"``, or no other entries.
    TypeError
        `model` is not a fitted model or lacks attributes that the metrics need, or an argument has the wrong type.
    ValueError
        Unknown metric, "rmse" or "mae" of a model of implicit feedback, whose scores are no ratings, shapes that do not
        match the model, models of different users under `users` or `sample`, labels on one side only, no relevant test
        item or no test entry for these users, relevant test items that are all training entries, ``auc`` without
        `train`, or ``users="warm"`` if the cold users are unknown.
    """
    test, train = as_ratings(test, "test"), as_ratings(train, "train")
    if isinstance(model, Mapping):
        if not model or not all(isinstance(name, str) for name in model):
            raise TypeError(f"model must have a model for each name, got a dict with keys {list(model)}")
        if isinstance(random_state, np.random.Generator):
            random_state = int(random_state.integers(2**31))
        if sample is not None or not (users is None or isinstance(users, str)):
            _refuse_other_users({name: _adapted(each, test, train) for name, each in model.items()})
        options = {"train": train, "metrics": metrics, "users": users, "sample": sample, "random_state": random_state}
        options |= {"relevance_threshold": relevance_threshold, "block_users": block_users, "unknown": unknown}
        options["include_cold"] = include_cold
        return Evaluations({name: evaluate(each, test, **options) for name, each in model.items()})
    own, names = _checked_metrics(metrics)
    model = _adapted(model, test, train)
    _check_model(model, names)
    learned = getattr(model, "_learned", None)
    if learned is not None and learned.objective.is_implicit:
        for name in names:
            refuse_error("metric", name)
    if block_users is not None:
        block_users = check_int("block_users", block_users, 1)
    test, dropped = _checked_like(model, test, "test", unknown)
    if train is not None:
        train, _ = _checked_like(model, train, "train", unknown)
        if learned is not None and learned.objective.is_implicit:
            train = without_zeros(train)  # as the fit does
    elif "auc" in names:
        raise ValueError('metric "auc" needs train=, the matrix the model was fitted on: its items are left out')
    cold = getattr(model, "cold_users_", None)
    if cold is not None:
        cold = np.asarray(cold, dtype=bool)  # another library's model may have a list or numbers
    elif train is not None:
        cold = np.diff(train.indptr) == 0
    users = _checked_users(users, model.n_users, cold)
    if sample is not None:
        rankings = bool(own) or any(name not in _ERRORS for name in names)
        users = _sampled(users, test, relevance_threshold if rankings else -np.inf, sample, random_state)
    if any(name.startswith("novelty") for name in names) and _item_counts(model, train) is None:
        raise ValueError('metric "novelty@k" needs train=: the model does not have the number of entries of its items')
    if check_bool("include_cold", include_cold) and _item_counts(model, train) is None:
        raise ValueError("include_cold=True needs train=: the model does not say which items have training entries")
    measured = Listed(model) if include_cold and not isinstance(model, ReadyLists) else model
    how = (relevance_threshold, block_users, cold, own)
    found = _measure(measured, test, train, names, users, *how)
    found.n_dropped = dropped
    if include_cold:
        found.apart = _apart(measured, test, train, names, users, *how)
    ids = getattr(model, "user_ids_", None)
    if isinstance(ids, np.ndarray):  # other libraries name something else so
        for each in (found, *found.apart.values()):
            each.user_ids = ids[each.users]
    if not isinstance(model, ReadyLists):
        _warn_of_overlap("test", test, _training_entries(model, train))
    if found.n_cold_users:
        logger.info("%d of %d evaluated users have no training entries", found.n_cold_users, found.n_users)
    return found


def scorer(metric: str | Metric) -> Callable[..., float]:
    """A metric for ``scoring=`` of scikit-learn, by ``score(X, metric=)`` of the estimator.

    Parameters
    ----------
    metric : str or callable
        A metric of `evaluate`. "rmse" and "mae" get a minus, so higher is better.

    Returns
    -------
    callable
        Called as ``scorer(estimator, X)``, also for a pipeline that ends in an estimator of this library.

    Raises
    ------
    ValueError
        Unknown metric.

    Examples
    --------
    >>> import hybridmf as hmf
    >>> from sklearn.model_selection import cross_val_score
    >>> plays = hmf.datasets.synthetic("ml-1m", feedback="implicit", scale=0.02, seed=0)
    >>> scoring = hmf.metrics.scorer("recall@20")
    >>> scores = cross_val_score(hmf.ImplicitALS(4), plays, cv=3, scoring=scoring)
    >>> scores.shape
    (3,)
    """
    _checked_metrics(metric)
    return functools.partial(_score, metric=metric)


def _score(estimator: Any, X: Any, y: Any = None, *, metric: str | Metric) -> float:
    *before, (_, last) = getattr(estimator, "steps", [("", estimator)])
    for _, step in before:
        X = step.transform(X)
    return float(last.score(X, metric=metric))


def _measure(
    model: Any,
    test: sp.csr_array,
    train: sp.csr_array | None,
    names: Sequence[str],
    users: np.ndarray,
    relevance_threshold: float | None = None,
    block_users: int | None = None,
    cold: np.ndarray | None = None,
    own: Mapping[str, Metric] = MappingProxyType({}),
) -> Evaluation:
    """`evaluate` for validated arguments; `names` are all metrics in order, `own` the caller's functions among them."""
    with_entries = users[np.diff(test.indptr)[users] > 0]
    counted, n_entries = with_entries, np.diff(test.indptr)[with_entries].astype(np.int64)
    values: dict[str, float] = {}
    per_user: dict[str, np.ndarray] = {}
    if any(name in _ERRORS for name in names):
        values, per_user = _evaluate_errors(model, test, counted, len(users), block_users)
    if any(name not in _ERRORS for name in names):
        relevant = _relevant_entries(test, relevance_threshold)
        counted = users[np.diff(relevant.indptr)[users] > 0]
        if not len(counted):
            wanted = "> 0" if relevance_threshold is None else f">= relevance_threshold={relevance_threshold:g}"
            raise ValueError(
                f"test has no relevant entry (value {wanted}) for any of the {len(users)} users; "
                "pass other test entries, other users or another relevance_threshold"
            )
        cuts = {name: match for name in names if (match := _RANKING_NAME.fullmatch(name))}
        shares, ranked = _evaluate_rankings(model, relevant, train, counted, cuts, own, block_users)
        if "auc" in names:
            ranked["auc"] = _evaluate_auc(model, relevant, train, counted)
        values |= shares | {name: mean_over_users(each) for name, each in ranked.items()}
        of_hits = [name for name, match in cuts.items() if match[1] not in ("novelty", "coverage")]
        nothing_found = of_hits and not any(values[name] for name in of_hits) and not isinstance(model, ReadyLists)
        if nothing_found and _only_training_entries(model, relevant, train, counted):
            raise ValueError(
                f"all {take_rows(relevant, counted).nnz} relevant entries of test are training entries, which are not "
                f"recommended, so {of_hits[0]} is 0 for any model; hold out entries before the fit (hybridmf.split)"
            )
        place = np.searchsorted(with_entries, counted)
        for name, each in ranked.items():
            per_user[name] = np.full(len(with_entries), np.nan)
            per_user[name][place] = each
    return as_evaluation(
        {name: values[name] for name in names},
        n_users=len(counted),
        n_cold_users=None if cold is None else int(np.count_nonzero(cold[counted])),
        users=with_entries,
        n_entries=n_entries,
        per_user={name: per_user[name] for name in names if name in per_user},
    )


def _apart(
    model: Any,
    test: sp.csr_array,
    train: sp.csr_array | None,
    names: Sequence[str],
    users: np.ndarray,
    relevance_threshold: float | None,
    block_users: int | None,
    cold: np.ndarray | None,
    own: Mapping[str, Metric],
) -> Parts:
    """`_measure` of warm and cold items and users, where test has relevant entries of them."""
    counts = _item_counts(model, train)
    assert counts is not None
    is_cold = counts[test.indices] == 0
    of_cold = keep_entries(test, is_cold)
    of_warm = keep_entries(test, ~is_cold)

    def among(items: np.ndarray) -> Any:
        return model.among(np.flatnonzero(items)) if isinstance(model, Listed) and items.any() else None

    parts = {"warm items": (among(counts > 0) or model, of_warm, users), "cold items": (model, of_cold, users)}
    if (only_cold := among(counts == 0)) is not None:
        parts["cold items among cold"] = (only_cold, of_cold, users)
    if cold is not None:
        parts["warm users"], parts["cold users"] = (model, test, users[~cold[users]]), (model, test, users[cold[users]])
    names = [name for name in names if name != "auc"]  # whose irrelevant items would be relevant ones of other parts
    ranked = any(name not in _ERRORS for name in names)
    found = {}
    for part, (ranking, entries, of) in parts.items():
        relevant = _relevant_entries(entries, relevance_threshold) if ranked else entries
        if names and not (ranked and _only_training_entries(model, relevant, train, of)):
            found[part] = _measure(ranking, entries, train, names, of, relevance_threshold, block_users, cold, own)
    return Parts(found)


def _adapted(model: Any, test: Any, train: Any) -> Any:
    """The model; with the users and items of the ratings if it has none of its own."""
    if not isinstance(model, np.ndarray) and hasattr(model, "__dlpack__"):
        model = np.from_dlpack(model)
    learned = getattr(model, "_learned", None)
    if learned is not None:
        return model._holding(learned)  # one state for all blocks of users
    if isinstance(model, PopularityRecommender):
        return copy.copy(model)  # with one state, too
    if isinstance(model, (np.ndarray, list, tuple)):
        return ReadyLists(model, _with_shape("test", test) if train is None else _with_shape("train", train))
    known = isinstance(model, (type, PopularityRecommender)) or _has(model, "n_users")
    if known or not callable(getattr(model, "recommend", None)):
        return model
    if train is None:
        raise ValueError(
            f"{type(model).__name__} does not store the items seen by its users: pass train=, the matrix that it was "
            "fitted on; its items are left out"
        )
    return OtherModel(model, _with_shape("train", train))


def _refuse_other_users(models: Mapping[str, Any]) -> None:
    """Refuse models for which equal positions are different users."""
    (first, ids), *others = ((name, getattr(model, "user_ids_", None)) for name, model in models.items())
    for name, theirs in others:
        if ids is not None and theirs is not None and not np.array_equal(ids, theirs):
            raise ValueError(
                f"users and sample select users by position, and models {first!r} and {name!r} have different users or "
                "another order of them; fit both on ratings with the same users, or evaluate all of them"
            )


def _with_shape(name: str, given: Any) -> Any:
    return as_csr(given, name=name) if labels_of(given) is None else given


def _check_model(model: Any, names: Sequence[str]) -> None:
    """Raise TypeError unless `model` is fitted and has the methods that the metrics need."""
    if isinstance(model, type):
        raise TypeError(f"model is the class {model.__name__}; make one and fit it: {model.__name__}().fit(train)")
    needed = ["n_users", "n_items"]
    needed += ["predict"] if any(name in _ERRORS for name in names) else []
    needed += ["recommend"] if any(_RANKING_NAME.fullmatch(name) for name in names) else []
    missing = [name for name in needed if not _has(model, name)]
    if missing:
        hint = ", once it is fitted: call fit(train) first" if hasattr(model, "fit") else ""
        raise TypeError(
            f"model must be a fitted estimator, a PopularityRecommender, or another object with "
            f"{', '.join(needed)}; {_name_of(model)} has no {', '.join(missing)}{hint}"
        )


def _name_of(model: Any) -> str:
    if isinstance(model, ReadyLists):
        return "an array"
    return type(model.model if isinstance(model, OtherModel) else model).__name__


def _has(model: Any, name: str) -> bool:
    try:
        getattr(model, name)
    except AttributeError as error:
        if isinstance(error, ValueError):  # scikit-learn's NotFittedError, whose message says how to fix it
            raise
        return False
    return True


def _checked_users(users: Any, n_users: int, cold: np.ndarray | None) -> np.ndarray:
    """Positions of the users to evaluate, ascending."""
    if users is None:
        return np.arange(n_users)
    if not isinstance(users, str):
        return np.unique(check_ids("users", users, n_users, "n_users"))
    if users != "warm":
        raise ValueError(f'users must be "warm", positions of users, or None, got {users!r}')
    if cold is None:
        raise ValueError(
            'users="warm" needs a model with cold_users_, or train=, the matrix the model was fitted on: nothing says '
            "which users have training entries"
        )
    return np.flatnonzero(~cold)


def _checked_metrics(metrics: Any) -> tuple[dict[str, Metric], tuple[str, ...]]:
    """The caller's functions by their names, and all names in order."""
    listed = [metrics] if isinstance(metrics, str) or callable(metrics) else list(metrics)
    own = {str(getattr(each, "__name__", type(each).__name__)): each for each in listed if callable(each)}
    for name, metric in own.items():
        check_int(f"k of metric {name!r}", getattr(metric, "k", 10), 1)
    names = [str(getattr(each, "__name__", type(each).__name__)) if callable(each) else each for each in listed]
    if known := [name for name in own if _is_known(name)]:
        raise ValueError(
            f"{known[0]!r} is a function with the name of a metric of evaluate; pass the name, or rename it"
        )
    twice = [name for name in own if names.count(name) > 1]
    if twice:
        raise ValueError(f"metrics has {twice[0]!r} more than once; give each function a __name__ of its own")
    _checked_names([name for name in names if name not in own])
    return own, tuple(names)


def _sampled(
    users: np.ndarray, test: sp.csr_array, threshold: float | None, sample: Any, random_state: Any
) -> np.ndarray:
    """Ascending positions of so many of the users with a relevant entry, drawn at random."""
    sample = check_int("sample", sample, 1)
    relevant = test.data > 0 if threshold is None else test.data >= np.float32(threshold)
    counted = np.intersect1d(users, entry_rows(test)[relevant])
    return np.sort(check_rng(random_state).permutation(counted)[:sample]) if len(counted) else users


def _is_known(name: str) -> bool:
    return name == "auc" or name in _ERRORS or _RANKING_NAME.fullmatch(name) is not None


def _checked_names(metrics: Sequence[str]) -> tuple[str, ...]:
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in names:
        if not isinstance(name, str) or not _is_known(name):
            known = ", ".join(["rmse", "mae", "auc", *(f"{kind}@k" for kind in (*_RANKING, "coverage"))])
            raise ValueError(f'metrics has {name!r}; known are {known} (k a positive integer, as in "ndcg@10")')
    return names


def _checked_like(model: Any, given: Any, name: str, unknown: str) -> tuple[sp.csr_array, int]:
    """A matrix in the positions of the model, aligned by label if it has labels, and the number of dropped entries."""
    labels = getattr(model, "user_ids_", None), getattr(model, "item_ids_", None)
    matrix, dropped = align(as_csr(given, name=name), labels_of(given), labels, name=name, unknown=unknown)
    check_shape(name, matrix, (model.n_users, model.n_items), _AXES)
    return matrix, dropped


def _relevant_entries(test: sp.csr_array, threshold: float | None) -> sp.csr_array:
    """Pick the relevant test entries and give each the value 1."""
    if threshold is None:
        relevant = keep_entries(test, test.data > 0)
    else:
        # Values are float32: 0.7 read from a file is a little below the double 0.7 and has to count as 0.7.
        relevant = keep_entries(test, test.data >= np.float32(check_real("relevance_threshold", threshold)))
    return as_ones(relevant, np.float32)


def _training_entries(model: Any, train: sp.csr_array | None) -> sp.csr_array | None:
    """`train`, or the training entries in the memory of a model of this library."""
    seen = getattr(getattr(model, "_learned", None), "seen", None) if train is None else train
    return seen if isinstance(seen, sp.csr_array) else None


def _warn_of_overlap(name: str, held_out: sp.csr_array, seen: sp.csr_array | None) -> None:
    """Log a warning if entries of `held_out`, the argument `name`, are training entries; None: unknown."""
    common = 0 if seen is None else int(np.count_nonzero(entries_in(held_out, seen)))
    if common:
        logger.warning(
            "%s: %d of %d entries are training entries. Errors of these are training errors, and ranking metrics count "
            "them as misses, since they are not recommended; hold out entries before the fit (hybridmf.split)",
            name,
            common,
            held_out.nnz,
        )


def _only_training_entries(model: Any, relevant: sp.csr_array, train: sp.csr_array | None, users: np.ndarray) -> bool:
    """Whether all relevant entries of some users are known to be training entries."""
    seen = _training_entries(model, train)
    return seen is not None and bool(np.all(entries_in(take_rows(relevant, users), take_rows(seen, users))))


def _evaluate_errors(
    model: Any, test: sp.csr_array, users: np.ndarray, n_users: int, block_users: int | None
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Errors over the entries of `users`, those of the `n_users` users that have entries; and those of each user."""
    truth, predicted = [], []
    for block in _entry_blocks(test, users, block_users):
        entries = take_rows(test, block)
        truth.append(entries.data)
        predicted.append(np.asarray(model.predict(block[entry_rows(entries)], entries.indices)))
    if not truth:
        raise ValueError(f"test has no entry for any of the {n_users} users; rmse and mae need at least one")
    arrays = np.concatenate(truth), np.concatenate(predicted)
    values = {name: error(*arrays) for name, error in _ERRORS.items()}
    difference = _differences(*arrays)
    counts = np.diff(test.indptr)[users]
    rows = np.repeat(np.arange(len(users)), counts)
    squares, sizes = (np.bincount(rows, each, len(users)) / counts for each in (difference**2, np.abs(difference)))
    return values, {"rmse": np.sqrt(squares), "mae": sizes}


def _entry_blocks(test: sp.csr_array, users: np.ndarray, block_users: int | None) -> Iterator[np.ndarray]:
    """Users in blocks of `block_users`, or else of about `BLOCK_ENTRIES` entries."""
    if block_users is not None:
        return _blocks(users, block_users)
    ends = np.cumsum(np.diff(test.indptr)[users], dtype=np.int64)
    cuts = np.searchsorted(ends, np.arange(BLOCK_ENTRIES, ends[-1] if len(ends) else 0, BLOCK_ENTRIES), side="right")
    return (block for block in np.split(users, np.unique(cuts)) if len(block))


def _evaluate_rankings(
    model: Any,
    relevant: sp.csr_array,
    train: sp.csr_array | None,
    users: np.ndarray,
    cuts: Mapping[str, re.Match[str]],
    own: Mapping[str, Metric],
    block_users: int | None,
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of all lists together, and those of each user."""
    if not cuts and not own:
        return {}, {}
    of_lists = {name: int(match[2]) for name, match in cuts.items() if match[1] == "coverage"}
    wanted = {name: (_RANKING[match[1]], int(match[2])) for name, match in cuts.items() if name not in of_lists}
    information = None
    if any(kind == _RANKING["novelty"] for kind, _ in wanted.values()):
        counts = _item_counts(model, train)
        assert counts is not None
        information = _information(counts, model.n_users)
    shown = np.zeros((len(of_lists), model.n_items), dtype=np.uint8)
    # Lists longer than the number of items would only add padding.
    lengths = {name: min(getattr(metric, "k", 10), model.n_items) for name, metric in own.items()}
    longest = min(max([int(match[2]) for match in cuts.values()] + list(lengths.values())), model.n_items)
    values = []
    if block_users is None:
        of_ours = getattr(model, "_recommends_in_blocks", False)
        block_users = max(BLOCK_USERS, BLOCK_RESULTS // longest) if of_ours else BLOCK_USERS
    for block in _blocks(users, block_users):
        rows = None if train is None else take_rows(train, block)
        ids, _ = model.recommend(block, user_items=rows, N=longest, filter_already_liked_items=True)
        lists = _as_rankings(ids, len(block), longest)
        ours = _ranking_values(
            lists, block, relevant, list(wanted.values()), information, list(of_lists.values()), shown
        )
        theirs = [_own_values(name, own[name], lists[:, :k], take_rows(relevant, block)) for name, k in lengths.items()]
        values.append(np.concatenate([ours, *(each[None] for each in theirs)]))
    covered = dict(zip(of_lists, shown.mean(axis=1).tolist(), strict=True))
    return covered, dict(zip([*wanted, *own], np.concatenate(values, axis=1), strict=True))


def _own_values(name: str, metric: Metric, rankings: np.ndarray, relevant: sp.csr_array) -> np.ndarray:
    values = np.asarray(metric(rankings, relevant), dtype=np.float64)
    if values.shape != rankings.shape[:1]:
        raise ValueError(
            f"metric {name!r} must return one value for each of the {len(rankings)} users, got shape {values.shape}"
        )
    return values


def _item_counts(model: Any, train: sp.csr_array | None) -> np.ndarray | None:
    """Training entries of each item, by `train`, else by the model; None if neither has them."""
    if train is not None:
        return count_items(train)
    counts = getattr(model, "item_counts_", None)
    return None if counts is None else np.asarray(counts)


def _evaluate_auc(model: Any, relevant: sp.csr_array, train: sp.csr_array, users: np.ndarray) -> np.ndarray:
    if getattr(model, "user_factors", None) is None or getattr(model, "item_factors", None) is None:
        raise TypeError(
            f'metric "auc" needs a model with user_factors and item_factors; {_name_of(model)} has none: '
            "leave auc out, or call hybridmf.metrics.auc with factors"
        )
    chosen = np.zeros(relevant.shape[0], dtype=bool)
    chosen[users] = True
    relevant = keep_entries(relevant, chosen[entry_rows(relevant)])
    bias = getattr(model, "item_bias_", None)
    values = auc(model.user_factors, model.item_factors, relevant, train, item_bias=bias)
    if np.all(np.isnan(values)):
        raise ValueError(
            "test has no user with both a relevant and an irrelevant item outside train, so auc is not defined; "
            "check that train does not contain test"
        )
    return values[users]


def _blocks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
