"""What a fitted model does: recommend, find neighbours, predict, fold in new rows, take updates.

Works on positions and on what was `Learned` only, so every estimator and every backend shares it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, validate_data

from ..core.objective import Factors, Side
from ..core.sparse import keep_entries, take_rows
from ..core.system import available_memory
from ..core.validate import (
    MAX_N,
    as_csr,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_shape,
    csr_arrays,
    make_csr,
)
from ..data.store import Store, StoredSeen
from ..errors import DeviceMemoryError, MemoryBudgetError, RatingsError
from ..formats import transpose
from ..native import _als
from ..plan.types import Plan
from ..ratings import Ratings
from .engine import engine_for
from .learned import Learned, align, pattern

logger = logging.getLogger("hybridmf")


def _normalized(factors: np.ndarray) -> np.ndarray:
    """Rows of length 1; zero rows stay zero. In float64: squares of small float32 factors underflow."""
    wide = factors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.ascontiguousarray(wide / np.where(lengths == 0, 1, lengths), dtype=factors.dtype)


class ServingMixin(ClassNamePrefixFeaturesOutMixin, TransformerMixin):
    """Recommendations, similarities, predictions, fold-in and updates of a fitted factor model."""

    _learned: Learned  # set by fit and load
    _cache: dict[str, Any]  # what was derived from it
    n_features_in_: int

    # ------------------------------------------------------------------------------------------- what was learned

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_learned")

    @property
    def user_factors_(self) -> np.ndarray:
        """User factors, shape (n_users, factors), in the dtype of the computation."""
        check_is_fitted(self)
        return self._learned.state.user.matrix

    @property
    def item_factors_(self) -> np.ndarray:
        """Item factors, shape (n_items, factors), in the dtype of the computation."""
        check_is_fitted(self)
        return self._learned.state.item.matrix

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
        return self._learned.state.user.bias

    @property
    def item_bias_(self) -> np.ndarray | None:
        """Item biases, shape (n_items,), or None for a model without biases."""
        check_is_fitted(self)
        return self._learned.state.item.bias

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
        """Device the fit ran on; several with a plus between them."""
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
    def n_users(self) -> int:
        """Number of users the model has factors for."""
        return len(self.user_factors_)

    @property
    def n_items(self) -> int:
        """Number of items the model has factors for."""
        return len(self.item_factors_)

    @property
    def _n_features_out(self) -> int:
        return self.item_factors_.shape[1]

    def _learn(self, learned: Learned) -> None:
        """Take over a new state; everything derived from the old one goes."""
        self._learned, self._cache = learned, {}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        return state | {"_cache": {}} if "_cache" in state else state

    # ------------------------------------------------------------------------------------------------ top N

    def _scoring_factors(self, side: Side, rows: np.ndarray | None = None) -> np.ndarray:
        """Rows whose inner products are the scores: factors; mean and biases, if any, as two more columns."""
        factors = self._learned.state.side(side)
        matrix = factors.matrix if rows is None else factors.matrix[rows]
        if factors.bias is None:
            return matrix
        bias = factors.bias if rows is None else factors.bias[rows]
        ones = np.ones(len(matrix), dtype=matrix.dtype)
        pair = (bias + matrix.dtype.type(self._learned.state.mean), ones) if side == "user" else (ones, bias)
        return np.column_stack((matrix, *pair))

    def recommend(
        self,
        userid: Any,
        user_items: Any = None,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        items: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The N items each user scores highest.

        Parameters
        ----------
        userid : int or int array, shape (n,)
            Positions of users (``Ratings.user_index`` turns labels into positions).
        user_items : sparse matrix, shape (n, n_items), optional
            What each user of `userid` has seen, row by row in the order of `userid`; a matrix with all n_users rows
            is indexed by `userid`. Default: the entries the model was fitted on.
        N : int
            How many.
        filter_already_liked_items : bool
            Leave out what the user has seen.
        filter_items : int array, optional
            Items to leave out for everybody.
        items : int array, optional
            Only these items take part.

        Returns
        -------
        ids : int32 array, shape (N,) for one user, (n, N) for several
            Best first, ties by lower position; -1 where fewer than N items are left.
        scores : float array, same shape
            -inf where ids is -1.

        Raises
        ------
        NotFittedError, TypeError, ValueError
        """
        check_is_fitted(self)
        users = check_ids("userid", userid, self.n_users, "n_users")
        N = check_int("N", N, 1, MAX_N)
        seen = None
        if check_bool("filter_already_liked_items", filter_already_liked_items):
            seen = self._seen_rows(users, user_items)
        elif user_items is not None:
            self._seen_rows(users, user_items)  # judged all the same: a wrong matrix is a mistake worth hearing of
        engine = engine_for(self.plan_, float(len(users)) * self.n_items * self.plan_.rank)
        ids, scores = engine.top_k(
            self._scoring_factors("user", users),
            self._cached(f"scoring_items on {engine.name}", lambda: engine.pack(self._scoring_factors("item"))),
            N,
            seen,
            self._candidates(items, filter_items),
        )
        return (ids[0], scores[0]) if np.ndim(userid) == 0 else (ids, scores)

    def _seen_rows(self, users: np.ndarray, user_items: Any) -> sp.csr_array:
        if user_items is None:
            if self._learned.seen is None:
                raise ValueError(
                    "this model was saved without what its users have seen: pass user_items, "
                    "or filter_already_liked_items=False"
                )
            seen = self._learned.seen
            return seen.take_rows(users) if isinstance(seen, StoredSeen) else take_rows(seen, users)
        matrix = as_csr(user_items, dtype=np.float32)
        if isinstance(user_items, (Ratings, Store)):
            matrix = align(matrix, 1, user_items.item_ids, self.item_ids_, "item")
        if matrix.shape[0] == self.n_users != len(users):
            matrix = take_rows(matrix, users)
        check_shape("user_items", matrix, (len(users), self.n_items), ("n_userids", "n_items"))
        return matrix

    def _candidates(self, items: Any, filter_items: Any) -> np.ndarray | None:
        if items is None and filter_items is None:
            return None
        keep = np.full(self.n_items, items is None)
        if items is not None:
            keep[check_ids("items", items, self.n_items, "n_items")] = True
        if filter_items is not None:
            keep[check_ids("filter_items", filter_items, self.n_items, "n_items")] = False
        return np.flatnonzero(keep)

    def similar_items(self, itemid: Any, N: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """The N items whose factors have the highest cosine with those of `itemid`, which comes first itself.

        Parameters
        ----------
        itemid : int or int array, shape (n,)
        N : int

        Returns
        -------
        ids : int32 array, shape (N,) or (n, N)
        scores : float array, same shape
            Cosines; 0 for items without entries.
        """
        return self._similar("item", "itemid", itemid, N)

    def similar_users(self, userid: Any, N: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """The N users whose factors have the highest cosine with those of `userid`; see `similar_items`."""
        return self._similar("user", "userid", userid, N)

    def _similar(self, side: Side, name: str, ids: Any, N: int) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self)
        normalized = self._cached(
            f"normalized {side} factors", lambda: _normalized(self._learned.state.side(side).matrix)
        )
        positions = check_ids(name, ids, len(normalized), f"n_{side}s")
        engine = engine_for(self.plan_, float(len(positions)) * normalized.size)
        packed = self._cached(f"normalized {side} factors on {engine.name}", lambda: engine.pack(normalized))
        found, scores = engine.top_k(normalized[positions], packed, check_int("N", N, 1, MAX_N), None, None)
        _itself_first(found, scores, positions)
        return (found[0], scores[0]) if np.ndim(ids) == 0 else (found, scores)

    def _cached(self, key: str, compute: Callable[[], Any]) -> Any:
        """A derived array, computed at first need."""
        cache = self._cache
        if key not in cache:
            cache[key] = compute()
        return cache[key]

    # ------------------------------------------------------------------------------------------------ predictions

    def predict(self, users: Any, items: Any = None) -> np.ndarray:
        """Predicted values of (user, item) pairs; or, for a matrix of rows, the one item to recommend to each.

        Parameters
        ----------
        users : int or int array, shape (n_pairs,); or a matrix, shape (n_rows, n_items), when `items` is None
        items : int or int array, shape (n_pairs,), optional
            Broadcast against `users`.

        Returns
        -------
        float array, shape (n_pairs,) (a scalar for two scalars)
            ``mu + b_u + b_i + x_u.y_i``; for implicit feedback the predicted preference ``x_u.y_i``.
        int32 array, shape (n_rows,)
            With `items` None: rows are folded in, and the best item that a row does not contain is returned, -1 where
            it contains all. This is the form scikit-learn calls.
        """
        check_is_fitted(self)
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
        return values[0] if np.ndim(users) == 0 and np.ndim(items) == 0 else values

    def _best_unseen(self, rows: Any) -> np.ndarray:
        matrix = self._new_rows(rows, "users")
        ids, _ = self._serving_for(matrix).recommend(np.arange(matrix.shape[0]), N=1)
        return ids[:, 0]

    # ------------------------------------------------------------------------------------------------ fold-in

    def _rows(self, rows: Any, name: str = "user_items") -> sp.csr_array:
        """A matrix as the fitted model's kernels take it: its dtype, its items; labelled ratings by label."""
        learned = self._learned
        matrix = rows
        if not sp.issparse(rows) and not isinstance(rows, (Ratings, Store)):
            matrix = check_array(rows, dtype="numeric", input_name=name, estimator=self)
        matrix = as_csr(
            matrix, name=name, dtype=learned.state.user.matrix.dtype, drop_zeros=learned.objective.is_implicit
        )
        if isinstance(rows, (Ratings, Store)):
            matrix = align(matrix, 1, rows.item_ids, learned.item_ids, "item")
        return matrix

    def _new_rows(self, rows: Any, name: str = "user_items") -> sp.csr_array:
        """Rows over the model's items, validated; messages name both axes."""
        matrix = self._rows(rows, name)
        if matrix.shape[1] != self.n_items:
            n, shape = self.n_items, matrix.shape
            hint = f"; rows are users and columns are items: pass {name}.T" if shape[0] == n else ""
            raise RatingsError(
                f"X has {shape[1]} features, but {type(self).__name__} is expecting {n} features as input: "
                f"{name} has shape {shape}, expected (n_rows, n_items={n}){hint}"
            )
        if not sp.issparse(rows) and not isinstance(rows, (Ratings, Store)):
            validate_data(self, rows, skip_check_array=True, reset=False)  # names of a frame's columns
        return matrix

    def _training_rows(self, rows: Any) -> sp.csr_array:
        """A matrix whose rows are the training users, labelled ratings brought into their order."""
        matrix = self._rows(rows)
        if isinstance(rows, (Ratings, Store)):
            matrix = align(matrix, 0, rows.user_ids, self.user_ids_, "user")
        check_shape("user_items", matrix, (self.n_users, self.n_items), ("n_users", "n_items"))
        return matrix

    def _fold_in(self, side: Side, matrix: sp.csr_array) -> Factors:
        """Exact factors of new rows of `side` for the factors of the other one."""
        learned = self._learned
        fixed = learned.state.side("item" if side == "user" else "user")
        engine = engine_for(learned.plan)
        # the same for every row, and most of the work for a few rows
        gram = self._cached(f"gram for {side} on {engine.name}", lambda: engine.gram(fixed, learned.objective))
        return engine.fold_in(side, matrix, learned.objective, fixed, learned.state.mean, gram)

    def transform(self, user_items: Any) -> np.ndarray:
        """Factors of new rows by the exact solver (fold-in); a training row gets its training factors.

        Parameters
        ----------
        user_items : sparse or dense matrix, shape (n_rows, n_items)

        Returns
        -------
        float array, shape (n_rows, factors)
            In the dtype of the computation. A biased model's row biases are not part of it.
        """
        check_is_fitted(self)
        return self._fold_in("user", self._new_rows(user_items)).matrix

    def objective(self, user_items: Any) -> float:
        """The objective the model minimizes, at its factors, on given data (DESIGN: explicit or implicit), in float64.

        Parameters
        ----------
        user_items : sparse or dense matrix, shape (n_users, n_items)

        Returns
        -------
        float
        """
        check_is_fitted(self)
        matrix = self._training_rows(user_items)
        engine = engine_for(self.plan_)
        try:
            return engine.objective_value(self._learned.objective, matrix, self._learned.state)
        except DeviceMemoryError as error:  # ratings that were streamed to a GPU do not fit on it
            logger.info("%s; the CPU computes the objective", error)
            on_cpu = engine_for(replace(self.plan_, gpu=None))
            return on_cpu.objective_value(self._learned.objective, matrix, self._learned.state)

    # ------------------------------------------------------------------------------------------------ updates

    def partial_fit_users(self, ids: Any, rows: Any, *, labels: Any = None) -> Any:
        """Replace the factors of some users, or add users, by folding in their rows; item factors stay.

        Parameters
        ----------
        ids : int or int array, shape (n,)
            Positions; those from n_users on are new (positions left out in between get zero factors).
        rows : sparse or dense matrix, shape (n, n_items)
            All entries of each of these users.
        labels : array, shape (n,), optional
            Labels of new users, needed where the model has labels.

        Returns
        -------
        self
        """
        check_is_fitted(self)
        positions = _update_positions("ids", ids)
        matrix = self._new_rows(rows, "rows")
        check_shape("rows", matrix, (len(positions), self.n_items), ("n_ids", "n_items"))
        self._update("user", positions, matrix, labels)
        return self

    def partial_fit_items(self, ids: Any, cols: Any, *, labels: Any = None) -> Any:
        """Replace the factors of some items, or add items, by folding in their columns; user factors stay.

        Parameters
        ----------
        ids : int or int array, shape (n,)
            Positions; those from n_items on are new.
        cols : sparse or dense matrix, shape (n_users, n)
            All entries of each of these items, as columns.
        labels : array, shape (n,), optional
            Labels of new items, needed where the model has labels.

        Returns
        -------
        self
        """
        check_is_fitted(self)
        positions = _update_positions("ids", ids)
        learned = self._learned
        matrix = as_csr(
            cols, name="cols", dtype=learned.state.user.matrix.dtype, drop_zeros=learned.objective.is_implicit
        )
        check_shape("cols", matrix, (self.n_users, len(positions)), ("n_users", "n_ids"))
        grown = positions.max() >= self.n_items
        self._update("item", positions, transpose(matrix, num_threads=self.plan_.num_threads), labels)
        self.n_features_in_ = self.n_items
        if grown and hasattr(self, "feature_names_in_"):
            del self.feature_names_in_  # the new columns have no names
        return self

    def _update(self, side: Side, positions: np.ndarray, rows: sp.csr_array, labels: Any) -> None:
        """Fold rows in and put them at their positions; everything is computed before anything is replaced."""
        learned = self._learned
        known = learned.state.side(side)
        size = max(len(known), int(positions.max()) + 1)
        free, needed = available_memory(), size * (known.matrix.shape[1] * known.matrix.itemsize + 16)
        if free is not None and needed > free:
            raise MemoryBudgetError(
                f"ids has {positions.max()}, so the model would need {size} {side}s and {needed / 2**20:,.0f} MiB; "
                f"{free / 2**20:,.0f} MiB are free. Positions are counted from 0: is the id a label?"
            )
        old_labels = learned.user_ids if side == "user" else learned.item_ids
        names = _extended_labels(side, old_labels, positions, size, labels)
        factors = known.put(positions, self._fold_in(side, rows), size)
        seen = learned.seen_matrix()
        if seen is not None:
            by_row = seen if side == "user" else pattern(transpose(seen))
            by_row = _replace_rows(by_row, positions, rows, size)
            seen = by_row if side == "user" else pattern(transpose(by_row))
        self._learn(learned.with_side(side, factors, seen, names))

    # ------------------------------------------------------------------------------------------------ score

    def score(self, user_items: Any, y: Any = None, *, users: str = "auto") -> float:
        """How well held-out entries are predicted; higher is better.

        Parameters
        ----------
        user_items : Ratings or matrix, shape (n_rows, n_items)
            Held-out entries.
        y : ignored
        users : {"auto", "training", "new"}
            "training": row u holds held-out entries of training user u. "new": rows are new users; every fifth entry
            of a row is hidden (at least one of a row with two or more), the others are folded in, and the hidden ones
            are predicted, which is what cross-validation over rows needs. "auto": training users if there are n_users
            rows whose entries are all in the training data or all outside it, else new users.

        Returns
        -------
        float
            Explicit feedback: minus the RMSE. Implicit feedback: NDCG@10.
        """
        check_is_fitted(self)
        check_choice("users", users, ("auto", "training", "new"))
        matrix = self._new_rows(user_items)
        if users == "training" or (users == "auto" and self._are_training_users(user_items, matrix)):
            matrix = self._training_rows(user_items)
            # entries the model was fitted on are looked for among all items, held-out ones among those not seen
            fitted_on = self._learned.is_training_data(matrix)
            return self._held_out_score(self, matrix, sp.csr_array(matrix.shape, dtype=np.int8) if fitted_on else None)
        shown, hidden = _hide_every_fifth(matrix)
        return self._held_out_score(self._serving_for(shown), hidden)

    def _are_training_users(self, given: Any, matrix: sp.csr_array) -> bool:
        learned = self._learned
        if isinstance(given, (Ratings, Store)) and given.user_ids is not None and learned.user_ids is not None:
            return set(given.user_ids.tolist()) <= set(learned.user_ids.tolist())
        if matrix.shape != learned.shape:
            return False
        return learned.is_training_data(matrix) or not learned.overlaps(matrix)

    def _serving_for(self, rows: sp.csr_array) -> Any:
        """A model like this one whose users are the given new rows."""
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
    """Put each query first among its neighbours, in place, where ties or zero factors ranked others before it."""
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


def _extended_labels(side: str, known: Any, positions: np.ndarray, size: int, labels: Any) -> np.ndarray | None:
    """Labels after positions up to `size` were added; each keeps its type."""
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
    """Labels as Python objects; a single one, a tuple included, is one label."""
    if isinstance(labels, np.ndarray):
        return np.atleast_1d(labels).tolist()
    items = list(labels) if isinstance(labels, (list, range)) else [labels]
    return [item.item() if isinstance(item, np.generic) else item for item in items]


def _as_labels(labels: list[Any], like: np.ndarray) -> np.ndarray:
    """An array of the kind of `like` if that changes no label, else of objects."""
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
    # by a fixed shuffle of the columns, not by their order, in which popular items may come first
    shuffled = np.random.default_rng(0).permutation(matrix.shape[1])[indices]
    rows = np.repeat(np.arange(matrix.shape[0]), degrees)
    order = np.lexsort((shuffled, rows))
    rank_in_row = np.empty(len(indices), dtype=np.int64)
    rank_in_row[order] = np.arange(len(indices)) - np.repeat(indptr[:-1], degrees)
    length = np.repeat(degrees, degrees)
    hidden = (rank_in_row % 5 == 4) | ((length >= 2) & (length < 5) & (rank_in_row == length - 1))
    if not hidden.any():
        raise RatingsError("user_items has no row with two or more entries; nothing can be hidden and predicted")
    return keep_entries(matrix, ~hidden), keep_entries(matrix, hidden)
