"""Use of a fitted model: recommendations, neighbours, predictions, fold-in of new rows, updates.

It depends on positions and on `Learned` only, so all estimators and backends share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Factors, Side, scoring_rows
from ..core.sparse import keep_entries, take_rows, transposed
from ..core.system import available_memory
from ..core.triplets import refuse_triplets
from ..core.validate import (
    MAX_N,
    as_csr,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_range,
    check_shape,
    csr_arrays,
    make_csr,
    without_mask,
)
from ..data.align import IN_ORDER, align, align_rows, labels_of
from ..data.labels import check_storable_labels
from ..data.store import Store, StoredSeen
from ..errors import DeviceMemoryError, MemoryBudgetError, RatingsError, UnknownLabelError
from ..native import _als
from ..plan.memory import check_answer
from ..plan.types import Plan
from ..ratings import Ratings
from .engine import Engine, engine_for
from .estimator import Estimator, check_columns, check_is_fitted, numeric_matrix
from .learned import Learned, count_items, pattern, transposed_pattern
from .popularity import allowed_items, rank_by_count

logger = logging.getLogger("hybridmf")

COLD_USERS = ("popular", "mask")
"""Values of ``cold_users=`` of `recommend`."""


def _normalized(factors: np.ndarray) -> np.ndarray:
    """Rows of length 1; zero rows stay zero. In float64: squares of small float32 factors underflow."""
    wide = factors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.ascontiguousarray(wide / np.where(lengths == 0, 1, lengths), dtype=factors.dtype)


class ServingMixin(Estimator):
    """Recommendations, similarities, predictions, fold-in and updates of a fitted factor model."""

    _recommends_in_blocks = True  # `recommend` never holds the scores of all items for all users
    _learned: Learned  # set by fit and load
    _cache: dict[str, Any]  # arrays derived from it
    n_features_in_: int

    # ------------------------------------------------------------------------------------------- what was learned

    def __sklearn_is_fitted__(self) -> bool:
        return "_learned" in vars(self)

    @property
    def user_factors_(self) -> np.ndarray:
        """User factors, shape (n_users, factors), in the dtype of the computation.

        A view: writing to its values changes the model, setting its shape does not.
        """
        check_is_fitted(self)
        return self._learned.state.user.matrix.view()

    @property
    def item_factors_(self) -> np.ndarray:
        """Item factors, shape (n_items, factors), in the dtype of the computation; a view as `user_factors_`."""
        check_is_fitted(self)
        return self._learned.state.item.matrix.view()

    @property
    def user_factors(self) -> np.ndarray:
        """User factors, float32, C order, shape (n_users, factors), whatever computed them."""
        return np.ascontiguousarray(self.user_factors_, dtype=np.float32)

    @property
    def item_factors(self) -> np.ndarray:
        """Item factors, float32, C order, shape (n_items, factors), whatever computed them."""
        return np.ascontiguousarray(self.item_factors_, dtype=np.float32)

    @property
    def user_bias_(self) -> np.ndarray | None:
        """User biases, shape (n_users,), or None for a model without biases."""
        check_is_fitted(self)
        bias = self._learned.state.user.bias
        return None if bias is None else bias.view()

    @property
    def item_bias_(self) -> np.ndarray | None:
        """Item biases, shape (n_items,), or None for a model without biases."""
        check_is_fitted(self)
        bias = self._learned.state.item.bias
        return None if bias is None else bias.view()

    @property
    def mean_(self) -> float:
        """Mean training rating (mu); 0 for a model without biases."""
        check_is_fitted(self)
        return self._learned.state.mean

    @property
    def plan_(self) -> Plan:
        """Every size and choice of the fit."""
        check_is_fitted(self)
        return self._learned.plan

    @property
    def device_(self) -> str:
        """Device of the fit; several devices are joined by a plus."""
        return self.plan_.device_name

    @property
    def user_ids_(self) -> np.ndarray | None:
        """Label of each user, or None for a model fitted on positions."""
        check_is_fitted(self)
        return self._learned.user_ids

    @property
    def item_ids_(self) -> np.ndarray | None:
        """Label of each item, or None for a model fitted on positions."""
        check_is_fitted(self)
        return self._learned.item_ids

    @property
    def cold_users_(self) -> np.ndarray:
        """Users without factors, usually because they have no training entries: bool array, shape (n_users,)."""
        return self._blank_rows("user")

    @property
    def cold_items_(self) -> np.ndarray:
        """Items without factors, usually because they have no training entries: bool array, shape (n_items,)."""
        return self._blank_rows("item")

    def _blank_rows(self, side: Side) -> np.ndarray:
        check_is_fitted(self)
        factors = self._learned.state.side(side)
        blank = np.zeros(len(factors), dtype=bool)
        blank[factors.blank_rows()] = True
        return blank

    @property
    def n_users(self) -> int:
        """Number of users the model has factors for."""
        return len(self.user_factors_)

    @property
    def n_items(self) -> int:
        """Number of items the model has factors for."""
        return len(self.item_factors_)

    @property
    def _n_features_out(self) -> int:
        return self.item_factors_.shape[1] + (self.user_bias_ is not None)

    def _learn(self, learned: Learned) -> None:
        """Replace the learned state and discard everything derived from the old one."""
        self._learned, self._cache = learned, {}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        return state | {"_cache": {}} if "_cache" in state else state

    # ------------------------------------------------------------------------------------------------ top N

    def _scoring_factors(self, side: Side, rows: np.ndarray | None = None) -> np.ndarray:
        """Rows whose inner products are the scores, all of them or those given; see `scoring_rows`."""
        state = self._learned.state
        factors = state.side(side)
        return scoring_rows(factors if rows is None else factors.take(rows), side, state.mean)

    def recommend(
        self,
        userid: Any,
        user_items: Any = None,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        items: Any = None,
        cold_users: str = "popular",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Recommend the N items with the highest scores to each user.

        Items without training entries are not recommended: they have no factors, so their score of 0 is meaningless.

        Parameters
        ----------
        userid : int or int array, shape (n,)
            Positions of users (``Ratings.user_index`` maps labels to positions).
        user_items : Ratings or sparse matrix, shape (n, n_items), optional
            Items seen by each user of `userid`, one row per user in the same order. A matrix with all n_users rows is
            indexed by `userid`; labelled ratings are aligned by label. Default: the training entries of the model.
        N : int
            Number of items for each user.
        filter_already_liked_items : bool
            Exclude the items that the user has seen.
        filter_items : int array, optional
            Items to exclude for all users.
        items : int array, optional
            Candidates; default: all items.
        cold_users : {"popular", "mask"}
            Result for users without training entries, whose factors are zero (`cold_users_`). "popular" ranks by the
            item biases of a model with biases, else by the number of training entries. "mask" returns no items.

        Returns
        -------
        ids : int32 array, shape (N,) for one user, (n, N) for several
            Best first, ties by lower position; -1 if fewer than N items are left.
        scores : float array, same shape
            For cold users of a model without biases, the numbers of training entries; -inf where ids is -1.

        Raises
        ------
        NotFittedError, TypeError, ValueError
        MemoryBudgetError
            N results for each user do not fit in memory.
        """
        check_is_fitted(self)
        users = check_ids("userid", userid, self.n_users, "n_users")
        N = check_int("N", N, 1, MAX_N)
        seen = None
        if check_bool("filter_already_liked_items", filter_already_liked_items):
            seen = self._seen_rows(users, user_items)
        elif user_items is not None:
            self._seen_rows(users, user_items)  # validated even if unused
        check_choice("cold_users", cold_users, COLD_USERS)
        allowed = None if items is None and filter_items is None else allowed_items(self.n_items, items, filter_items)
        n_allowed = self.n_items if allowed is None else int(np.count_nonzero(allowed))
        check_answer(len(users), N, n_allowed, self.item_factors_.itemsize)
        engine = engine_for(self.plan_, float(len(users)) * self.n_items * self.plan_.rank)
        candidates = None if allowed is None else self._with_factors(allowed)
        ids, scores = engine.top_k(
            self._scoring_factors("user", users), self._packed_items(engine), N, seen, candidates
        )
        cold = self._learned.state.user.blank_rows(users)
        if len(cold):
            self._rank_cold(ids, scores, cold, None if seen is None else take_rows(seen, cold), allowed, cold_users)
        return (ids[0], scores[0]) if np.ndim(userid) == 0 else (ids, scores)

    def _rank_cold(
        self,
        ids: np.ndarray,
        scores: np.ndarray,
        cold: np.ndarray,
        seen: sp.csr_array | None,
        allowed: np.ndarray | None,
        cold_users: str,
    ) -> None:
        """Replace rows `cold` of a result in place: zero factors give no ranking, biases do."""
        biased = self._learned.state.user.bias is not None
        if cold_users == "popular" and biased:
            return
        ids[cold], scores[cold] = -1, -np.inf
        counts = self._learned.item_counts
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
        kept = min(ids.shape[1], self.n_items)
        ids[cold, :kept], scores[cold, :kept] = rank_by_count(counts, shown, seen, len(cold), kept)

    def _packed_items(self, engine: Engine) -> Any:
        """Items with factors, in the layout of `engine`."""

        def pack() -> Any:
            return engine.pack(self._scoring_factors("item"), self._with_factors())

        return self._cached(f"scoring_items on {engine.name}", pack)

    def _with_factors(self, allowed: np.ndarray | None = None) -> np.ndarray | None:
        """Positions of the allowed items that have factors; None if these are all items."""
        warm = self._cached("warm items", lambda: ~self.cold_items_)
        return None if allowed is None and warm.all() else np.flatnonzero(warm if allowed is None else warm & allowed)

    def _seen_rows(self, users: np.ndarray, user_items: Any) -> sp.csr_array:
        if user_items is None:
            if self._learned.seen is None:
                raise ValueError(
                    "this model was saved without what its users have seen: pass user_items, "
                    "or filter_already_liked_items=False"
                )
            seen = self._learned.seen
            return seen.take_rows(users) if isinstance(seen, StoredSeen) else take_rows(seen, users)
        labels = (self.user_ids_, self.item_ids_)
        matrix = align_rows(as_csr(user_items, dtype=np.float32), user_items, users, labels, self.n_users)
        check_shape("user_items", matrix, (len(users), self.n_items), ("n_userids", "n_items"))
        return matrix

    def similar_items(self, itemid: Any, N: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """Find the N items with the highest cosine similarity of factors to `itemid`, which comes first itself.

        Parameters
        ----------
        itemid : int or int array, shape (n,)
        N : int

        Returns
        -------
        ids : int32 array, shape (N,) or (n, N)
            Items with factors only; -1 if fewer than N are left, and for an item without factors (no training entries).
        scores : float array, same shape
            Cosine similarities; -inf where ids is -1.
        """
        return self._similar("item", "itemid", itemid, N)

    def similar_users(self, userid: Any, N: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """Find the N users with the highest cosine similarity of factors to `userid`; see `similar_items`."""
        return self._similar("user", "userid", userid, N)

    def _similar(self, side: Side, name: str, ids: Any, N: int) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self)
        factors = Factors(self._learned.state.side(side).matrix)  # biases do not measure similarity
        normalized = self._cached(f"normalized {side} factors", lambda: _normalized(factors.matrix))
        positions = check_ids(name, ids, len(normalized), f"n_{side}s")
        N = check_int("N", N, 1, MAX_N)
        check_answer(len(positions), N, len(normalized), normalized.itemsize)
        engine = engine_for(self.plan_, float(len(positions)) * normalized.size)

        def pack() -> Any:
            blank = factors.blank_rows()
            return engine.pack(normalized, np.setdiff1d(np.arange(len(factors)), blank) if len(blank) else None)

        packed = self._cached(f"normalized {side} factors on {engine.name}", pack)
        found, scores = engine.top_k(normalized[positions], packed, N, None, None)
        _itself_first(found, scores, positions)
        blank = factors.blank_rows(positions)
        found[blank], scores[blank] = -1, -np.inf
        return (found[0], scores[0]) if np.ndim(ids) == 0 else (found, scores)

    def _cached(self, key: str, compute: Callable[[], Any]) -> Any:
        """A derived array, computed at first use."""
        cache = self._cache
        if key not in cache:
            cache[key] = compute()
        return cache[key]

    # ------------------------------------------------------------------------------------------------ predictions

    def predict(
        self, users: Any, items: Any = None, *, clip: Literal["auto", False] | tuple[float, float] = "auto"
    ) -> np.ndarray:
        """Predict values of (user, item) pairs; for a matrix of rows, the best item for each row.

        Parameters
        ----------
        users : int or int array, shape (n_pairs,); or a matrix, shape (n_rows, n_items), when `items` is None
        items : int or int array, shape (n_pairs,), optional
            Broadcast against `users`.
        clip : {"auto", False} or (low, high)
            "auto" clips predicted ratings to the range of the training values. It does not clip predictions of implicit
            feedback, nor those of model files written before the range was stored. False clips nothing; a pair clips to
            that range. Rankings do not depend on it.

        Returns
        -------
        float array, shape (n_pairs,) (a scalar for two scalars)
            ``mu + b_u + b_i + x_u.y_i``; for implicit feedback the predicted preference ``x_u.y_i``.
        int32 array, shape (n_rows,)
            If `items` is None: each row is folded in, and the best item that it does not contain is returned, -1 if it
            contains all items. scikit-learn uses this form.
        """
        check_is_fitted(self)
        limits = self._clip_limits(clip)
        if items is None:
            if not sp.issparse(users) and not isinstance(users, (Ratings, Store)) and np.ndim(users) < 2:
                raise ValueError(
                    f"Expected 2D array, got {np.ndim(users)}D array instead: predict(users, items) takes ids of both, "
                    "predict(matrix) rows of ratings. Reshape your data (array.reshape(1, -1): one row) or pass items"
                )
            return self._best_unseen(users)
        user_ids = check_ids("users", users, self.n_users, "n_users")
        item_ids = check_ids("items", items, self.n_items, "n_items")
        if len(user_ids) != len(item_ids) and 1 not in (len(user_ids), len(item_ids)):
            raise ValueError(f"users has {len(user_ids)} ids and items has {len(item_ids)}; expected as many of each")
        user_ids, item_ids = (np.ascontiguousarray(ids) for ids in np.broadcast_arrays(user_ids, item_ids))
        state = self._learned.state
        values = _als.predict_pairs(state.user.matrix, state.item.matrix, user_ids, item_ids, self.plan_.num_threads)
        if state.user.bias is not None and state.item.bias is not None:
            values += state.mean + state.user.bias[user_ids] + state.item.bias[item_ids]
        if limits is not None:
            np.clip(values, *limits, out=values)
        return values[0] if np.ndim(users) == 0 and np.ndim(items) == 0 else values

    def _clip_limits(self, clip: Any) -> tuple[float, float] | None:
        """Limits of predictions, from the argument `clip` of `predict`."""
        if isinstance(clip, str) and clip == "auto":
            return self._learned.value_range
        return None if clip is False else check_range("clip", clip, '"auto", False or a pair (low, high)')

    def _best_unseen(self, rows: Any) -> np.ndarray:
        matrix = self._new_rows(rows, "users")
        ids, _ = self._serving_for(matrix).recommend(np.arange(matrix.shape[0]), N=1)
        return ids[:, 0]

    # ------------------------------------------------------------------------------------------------ fold-in

    def _rows(
        self,
        rows: Any,
        name: str = "user_items",
        users: Any = IN_ORDER,
        unknown: str | None = None,
        owner: str = "the model",
    ) -> sp.csr_array:
        """A matrix for the kernels of the fitted model: in its dtype, with labelled ratings in the order of `users`."""
        learned = self._learned
        matrix = rows
        if not sp.issparse(rows) and not isinstance(rows, (Ratings, Store)):
            refuse_triplets(rows, name)  # by column names, which check_array drops
            plain = without_mask(rows, name)
            matrix = numeric_matrix(self, plain, name)
        matrix = as_csr(
            matrix, name=name, dtype=learned.state.user.matrix.dtype, drop_zeros=learned.objective.is_implicit
        )
        return align(matrix, labels_of(rows), (users, learned.item_ids), name=name, unknown=unknown, owner=owner)[0]

    def _new_rows(self, rows: Any, name: str = "user_items", **options: Any) -> sp.csr_array:
        """Rows over the model's items, validated; messages name both axes. `options` are those of `_rows`."""
        matrix = self._rows(rows, name, **options)
        if matrix.shape[1] != self.n_items:
            n, shape = self.n_items, matrix.shape
            hint = f"; rows are users and columns are items: pass {name}.T" if shape[0] == n else ""
            raise RatingsError(
                f"X has {shape[1]} features, but {type(self).__name__} is expecting {n} features as input: "
                f"{name} has shape {shape}, expected (n_rows, n_items={n}){hint}"
            )
        if not sp.issparse(rows) and not isinstance(rows, (Ratings, Store)):
            check_columns(self, rows)
        return matrix

    def _training_rows(self, rows: Any, unknown: str) -> sp.csr_array:
        """A matrix whose rows are the training users, with labelled ratings reordered to match."""
        matrix = self._rows(rows, users=self.user_ids_, unknown=unknown)
        check_shape("user_items", matrix, (self.n_users, self.n_items), ("n_users", "n_items"))
        return matrix

    def _fold_in(self, side: Side, matrix: sp.csr_array) -> Factors:
        """Exact factors of new rows of `side`, given the factors of the other side."""
        learned = self._learned
        fixed = learned.state.side("item" if side == "user" else "user")
        engine = engine_for(learned.plan)
        # independent of the rows, and most of the work for a few rows
        gram = self._cached(f"gram for {side} on {engine.name}", lambda: engine.gram(fixed, learned.objective))
        return engine.fold_in(side, matrix, learned.objective, fixed, learned.state.mean, gram)

    def transform(self, user_items: Any) -> np.ndarray:
        """Compute factors of new rows with the exact solver (fold-in); a training row gets its training factors.

        Parameters
        ----------
        user_items : Ratings, or sparse or dense matrix, shape (n_rows, n_items)
            Labelled items are aligned by label.

        Returns
        -------
        float array, shape (n_rows, factors), or (n_rows, factors + 1) for a model with biases
            In the dtype of the computation. The last column of a model with biases is the row's bias, so the
            predictions of ``rows = model.transform(user_items)`` are ``rows[:, :-1] @ model.item_factors_.T +
            rows[:, -1:] + model.item_bias_ + model.mean_``; without biases, ``rows @ model.item_factors_.T``.
        """
        return super().transform(user_items)

    def _factors_of(self, user_items: Any) -> np.ndarray:
        check_is_fitted(self)
        factors = self._fold_in("user", self._new_rows(user_items))
        return factors.matrix if factors.bias is None else np.column_stack((factors.matrix, factors.bias))

    def objective(self, user_items: Any, *, unknown: str = "error") -> float:
        """Evaluate the objective of the model on given data, in float64.

        The methods page has the formulas for explicit and implicit feedback.

        Parameters
        ----------
        user_items : Ratings, or sparse or dense matrix, shape (n_users, n_items)
            Labelled ratings are aligned by label.
        unknown : {"error", "drop"}
            Treatment of labelled entries whose user or item is unknown to the model.

        Returns
        -------
        float
        """
        check_is_fitted(self)
        matrix = self._training_rows(user_items, unknown)
        engine = engine_for(self.plan_)
        try:
            return engine.objective_value(self._learned.objective, matrix, self._learned.state)
        except DeviceMemoryError as error:  # ratings that the fit streamed to a GPU do not fit on it
            logger.info("%s; the CPU computes the objective", error)
            on_cpu = engine_for(self.plan_.changed(gpu=None))
            return on_cpu.objective_value(self._learned.objective, matrix, self._learned.state)

    # ------------------------------------------------------------------------------------------------ updates

    def partial_fit_users(self, ids: Any, rows: Any, *, labels: Any = None) -> Any:
        """Update or add users by folding in their rows; item factors do not change.

        Parameters
        ----------
        ids : int or int array, shape (n,)
            Positions. Positions >= n_users add users (skipped positions get zero factors).
        rows : Ratings, or sparse or dense matrix, shape (n, n_items)
            All entries of each of these users, in the order of `ids`; labelled ratings are aligned by label.
        labels : array, shape (n,), optional
            Labels of new users, required if the model has labels.

        Returns
        -------
        self
        """
        check_is_fitted(self)
        positions, names = self._updated_labels("user", ids, labels)
        wanted = _updated_axis("rows", rows, 0, positions, names)
        matrix = self._new_rows(rows, "rows", users=wanted, owner="the model or to ids")
        check_shape("rows", matrix, (len(positions), self.n_items), ("n_ids", "n_items"))
        self._update("user", positions, matrix, names)
        return self

    def partial_fit_items(self, ids: Any, cols: Any, *, labels: Any = None) -> Any:
        """Update or add items by folding in their columns; user factors do not change.

        Parameters
        ----------
        ids : int or int array, shape (n,)
            Positions. Positions >= n_items add items.
        cols : Ratings, or sparse or dense matrix, shape (n_users, n)
            All entries of each of these items, as columns in the order of `ids`; labelled ratings are aligned by label.
        labels : array, shape (n,), optional
            Labels of new items, required if the model has labels.

        Returns
        -------
        self
        """
        check_is_fitted(self)
        positions, names = self._updated_labels("item", ids, labels)
        learned = self._learned
        matrix = as_csr(
            cols, name="cols", dtype=learned.state.user.matrix.dtype, drop_zeros=learned.objective.is_implicit
        )
        want = (learned.user_ids, _updated_axis("cols", cols, 1, positions, names))
        matrix, _ = align(matrix, labels_of(cols), want, name="cols", unknown=None, owner="the model or to ids")
        check_shape("cols", matrix, (self.n_users, len(positions)), ("n_users", "n_ids"))
        grown = positions.max() >= self.n_items
        self._update("item", positions, transposed(matrix, self.plan_.num_threads), names)
        self.n_features_in_ = self.n_items
        if grown:
            self.__dict__.pop("feature_names_in_", None)  # the new columns have no names
        return self

    def _updated_labels(self, side: Side, ids: Any, labels: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Positions of an update, and the labels of all rows after it."""
        positions = _update_positions("ids", ids)
        known = self._learned.state.side(side)
        size = max(len(known), int(positions.max()) + 1)
        free, needed = available_memory(), size * (known.matrix.shape[1] * known.matrix.itemsize + 16)
        if free is not None and needed > free:
            raise MemoryBudgetError(
                f"ids has {positions.max()}, so the model would need {size} {side}s and {needed / 2**20:,.0f} MiB; "
                f"{free / 2**20:,.0f} MiB are free. Positions are counted from 0: is the id a label?"
            )
        old = self._learned.user_ids if side == "user" else self._learned.item_ids
        return positions, _extended_labels(side, old, positions, size, labels)

    def _update(self, side: Side, positions: np.ndarray, rows: sp.csr_array, names: np.ndarray | None) -> None:
        """Fold rows in and store them at their positions; nothing is replaced until all results are computed."""
        learned = self._learned
        known = learned.state.side(side)
        size = max(len(known), int(positions.max()) + 1)
        factors = known.put(positions, self._fold_in(side, rows), size)
        seen = learned.seen_matrix()
        if seen is not None:
            by_row = seen if side == "user" else transposed_pattern(seen)
            by_row = _replace_rows(by_row, positions, rows, size)
            seen = by_row if side == "user" else transposed_pattern(by_row)
        counts = _updated_counts(learned, side, positions, rows, seen)
        self._learn(learned.with_side(side, factors, seen, names, counts).widened(rows.data))

    # ------------------------------------------------------------------------------------------------ score

    def score(self, user_items: Any, y: Any = None, *, users: str = "auto", unknown: str = "error") -> float:
        """Score predictions of held-out entries; higher is better.

        Parameters
        ----------
        user_items : Ratings or matrix, shape (n_rows, n_items)
            Held-out entries.
        y : ignored
        users : {"auto", "training", "new"}
            "training": row u holds held-out entries of training user u. "new": rows are new users, as in
            cross-validation over rows; every fifth entry of a row is hidden (at least one of two or more), the others
            are folded in, and the hidden entries are predicted. "auto": training users if there are n_users rows and
            their entries are all inside or all outside the training data, else new users. Labelled ratings belong to
            training users if all of their users do; under ``unknown="drop"``, if any of them does.
        unknown : {"error", "drop"}
            Treatment of labelled entries whose item, or training user, is unknown to the model.

        Returns
        -------
        float
            Explicit feedback: minus the RMSE. Implicit feedback: NDCG@10.
        """
        check_is_fitted(self)
        check_choice("users", users, ("auto", "training", "new"))
        matrix = self._new_rows(user_items, unknown=unknown)
        if users == "training" or (users == "auto" and self._are_training_users(user_items, matrix, unknown)):
            matrix = self._training_rows(user_items, unknown)
            # training entries are ranked among all items, held-out entries among unseen items
            fitted_on = self._learned.is_training_data(matrix)
            return self._held_out_score(self, matrix, sp.csr_array(matrix.shape, dtype=np.int8) if fitted_on else None)
        shown, hidden = _hide_every_fifth(matrix)
        return self._held_out_score(self._serving_for(shown), hidden)

    def _are_training_users(self, given: Any, matrix: sp.csr_array, unknown: str) -> bool:
        learned, have = self._learned, labels_of(given)
        if have is not None and have[0] is not None and learned.user_ids is not None:
            theirs, ours = set(have[0].tolist()), set(learned.user_ids.tolist())
            return bool(theirs & ours) if unknown == "drop" else theirs <= ours
        if matrix.shape != learned.shape:
            return False
        return learned.is_training_data(matrix) or not learned.overlaps(matrix)

    def _serving_for(self, rows: sp.csr_array) -> Any:
        """A copy of this model whose users are the given new rows."""
        model = object.__new__(type(self))
        model.__dict__.update(self.__dict__)
        state = self._learned.state.with_side("user", self._fold_in("user", rows))
        model._learn(replace(self._learned, state=state, seen=pattern(rows), total=None, user_ids=None))
        return model

    def _held_out_score(self, model: Any, held_out: sp.csr_array, seen: sp.csr_array | None = None) -> float:
        from ..metrics import evaluate

        metric = self._validation_metric()
        value = evaluate(model, held_out, train=seen, metrics=(metric,))[metric]
        return value if metric != "rmse" else -value

    def _validation_metric(self) -> str:
        return "ndcg@10" if self._learned.objective.is_implicit else "rmse"


def _itself_first(found: np.ndarray, scores: np.ndarray, positions: np.ndarray) -> None:
    """Move each query to the front of its neighbours, in place, if ties or zero factors ranked others before it."""
    for row in np.flatnonzero(found[:, 0] != positions):
        place = np.flatnonzero(found[row] == positions[row])
        last = int(place[0]) if place.size else found.shape[1] - 1
        own = scores[row, last] if place.size else 0
        found[row, 1 : last + 1] = found[row, :last].copy()
        scores[row, 1 : last + 1] = scores[row, :last].copy()
        found[row, 0], scores[row, 0] = positions[row], own


def _update_positions(name: str, ids: Any) -> np.ndarray:
    positions = check_ids(name, ids, 2**31 - 1, "2**31 - 1")
    if positions.size == 0:
        raise ValueError(f"{name} is empty; give at least one position")
    values, counts = np.unique(positions, return_counts=True)
    if np.any(counts > 1):
        raise ValueError(f"{name} has {values[counts > 1][0]} more than once; give each position once")
    return positions


def _updated_axis(name: str, given: Any, axis: int, positions: np.ndarray, names: np.ndarray | None) -> Any:
    """Labels to align the updated rows (axis 0) or columns (axis 1) with; without labels they keep the order of ids.

    Raises
    ------
    UnknownLabelError
        Labelled ratings have no row for one of the ids, which would lose its factors silently.
    """
    have = labels_of(given)
    if have is None or have[axis] is None:
        return IN_ORDER
    if names is None:
        return None  # `align` raises
    wanted = names[positions]
    given_labels = set(have[axis].tolist())
    missing = [label for label in wanted.tolist() if label not in given_labels]
    if missing:
        raise UnknownLabelError(
            f"{name} does not have {len(missing)} of {len(positions)} {SIDES[axis]}s that ids names, such as "
            f"{missing[0]!r}; give entries of each of them, or leave it out of ids"
        )
    return wanted


def _updated_counts(
    learned: Learned, side: Side, positions: np.ndarray, rows: sp.csr_array, seen: sp.csr_array | None
) -> np.ndarray | None:
    """Entries of each item after an update; without `seen`, old entries of replaced users still count."""
    if seen is not None:
        return count_items(seen)
    counts = learned.item_counts
    if counts is None:
        return None
    if side == "user":
        added = take_rows(rows, np.flatnonzero(positions >= len(learned.state.user)))
        return counts + count_items(added)
    grown = np.zeros(max(len(counts), int(positions.max()) + 1), dtype=np.int64)
    grown[: len(counts)] = counts
    grown[positions] = np.diff(rows.indptr)
    return grown


def _extended_labels(side: str, known: Any, positions: np.ndarray, size: int, labels: Any) -> np.ndarray | None:
    """Labels after adding positions up to `size`; each label keeps its type."""
    if known is None:
        if labels is not None:
            raise ValueError(f"labels were given, but this model's {side}s have none (it was fitted on positions)")
        return None
    plain = known.tolist()
    if labels is None:
        if size == len(plain):
            return known
        raise ValueError(
            f"ids adds {side}s up to position {size - 1} and this model's {side}s have labels; pass labels= for them"
        )
    given = _plain_list(labels)
    if len(given) != len(positions):
        raise ValueError(f"labels has {len(given)} elements; expected one for each of {len(positions)} ids")
    missing = sorted(set(range(len(plain), size)) - set(positions.tolist()))
    if missing:
        raise ValueError(f"ids skips position {missing[0]}, which would have no label; add positions without gaps")
    check_storable_labels("labels", given)
    extended = plain + [None] * (size - len(plain))
    for position, label in zip(positions.tolist(), given, strict=True):
        if position < len(plain) and label != plain[position]:
            raise ValueError(
                f"labels says {label!r} for position {position}, whose label is {plain[position]!r}; "
                "labels of known positions cannot change"
            )
        extended[position] = label
    if len(set(extended)) != size:
        raise ValueError("labels repeats a label; each position needs a label of its own")
    return _as_labels(extended, known)


def _plain_list(labels: Any) -> list[Any]:
    """Labels as Python objects; a single value, including a tuple, is one label."""
    if isinstance(labels, np.ndarray):
        return np.atleast_1d(labels).tolist()
    items = list(labels) if isinstance(labels, (list, range)) else [labels]
    return [item.item() if isinstance(item, np.generic) else item for item in items]


def _as_labels(labels: list[Any], like: np.ndarray) -> np.ndarray:
    """An array with the kind of dtype of `like` if that changes no label, else with dtype object."""
    kinds = {type(label) for label in labels}
    if like.dtype.kind != "O" and len(kinds) == 1:
        array = np.array(labels)
        if array.ndim == 1 and array.tolist() == labels:
            return array
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def _replace_rows(seen: sp.csr_array, positions: np.ndarray, rows: sp.csr_array, size: int) -> sp.csr_array:
    """`seen` with `size` rows, those at `positions` replaced by the entries of `rows`; gaps are empty."""
    old_ptr, old_ids, _ = csr_arrays(seen)
    new_ptr, new_ids, _ = csr_arrays(rows)
    indices = np.concatenate((old_ids, new_ids))
    pointer = np.concatenate((old_ptr, new_ptr[1:] + old_ptr[-1], [len(indices)]))  # the last row is empty
    stacked = make_csr(pointer, indices, np.ones(len(indices), dtype=np.int8), (len(pointer) - 1, seen.shape[1]))
    source = np.full(size, len(pointer) - 2, dtype=np.int64)
    source[: seen.shape[0]] = np.arange(seen.shape[0])
    source[positions] = seen.shape[0] + np.arange(len(positions))
    return pattern(take_rows(stacked, source))


def _hide_every_fifth(matrix: sp.csr_array) -> tuple[sp.csr_array, sp.csr_array]:
    """Split each row's entries into shown and hidden ones: the last of every five, at least one of two or more."""
    indptr, indices, _ = csr_arrays(matrix)
    degrees = np.diff(indptr)
    # by a fixed shuffle of the columns, since popular items may come first in their order
    shuffled = np.random.default_rng(0).permutation(matrix.shape[1])[indices]
    rows = np.repeat(np.arange(matrix.shape[0]), degrees)
    order = np.lexsort((shuffled, rows))
    rank_in_row = np.empty(len(indices), dtype=np.int64)
    rank_in_row[order] = np.arange(len(indices)) - np.repeat(indptr[:-1], degrees)
    length = np.repeat(degrees, degrees)
    hidden = (rank_in_row % 5 == 4) | ((length >= 2) & (length < 5) & (rank_in_row == length - 1))
    if not hidden.any():
        raise RatingsError("user_items has no row with two or more entries; no entry can be hidden and predicted")
    return keep_entries(matrix, ~hidden), keep_entries(matrix, hidden)
