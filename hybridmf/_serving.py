"""What a fitted model does: recommend, find neighbours, predict, fold in new rows, take updates.

Works on positions and on the learned State only, so every estimator and every backend shares it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.utils.validation import check_is_fitted

from ._objective import Factors, Objective, Side, State
from ._plan import Plan
from ._sparse import as_ones, keep_entries, take_rows
from ._validate import as_csr, check_bool, check_choice, check_ids, check_int, check_shape, csr_arrays
from .cpu import _als
from .cpu.als import HalfSweep, objective_value, weighted_gram
from .cpu.topk import PackedItems, top_k
from .errors import RatingsError
from .formats import transpose


def _normalized(factors: np.ndarray) -> np.ndarray:
    """Rows of length 1; zero rows stay zero."""
    lengths = np.linalg.norm(factors, axis=1, keepdims=True)
    return factors / np.where(lengths == 0, 1, lengths)


def _pattern(matrix: sp.csr_array) -> sp.csr_array:
    """Return the entries of a matrix as ones of one byte each; shares the index arrays."""
    return as_ones(matrix, np.int8)


class ServingMixin:
    """Recommendations, similarities, predictions, fold-in and updates of a fitted factor model."""

    # set by fit
    _state: State
    _seen: sp.csr_array | None
    _cache: dict[str, Any]
    plan_: Plan
    user_ids_: np.ndarray | None
    item_ids_: np.ndarray | None
    n_features_in_: int

    def _objective(self) -> Objective:
        raise NotImplementedError

    def _check_matrix(self, matrix: Any, name: str = "user_items") -> sp.csr_array:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- what was learned

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_state")

    @property
    def user_factors_(self) -> np.ndarray:
        """User factors, shape (n_users, factors), in the dtype of the computation."""
        check_is_fitted(self)
        return self._state.user.matrix

    @property
    def item_factors_(self) -> np.ndarray:
        """Item factors, shape (n_items, factors), in the dtype of the computation."""
        check_is_fitted(self)
        return self._state.item.matrix

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
        return self._state.user.bias

    @property
    def item_bias_(self) -> np.ndarray | None:
        """Item biases, shape (n_items,), or None for a model without biases."""
        check_is_fitted(self)
        return self._state.item.bias

    @property
    def mean_(self) -> float:
        """Mean training rating (mu); 0 for a model without biases."""
        check_is_fitted(self)
        return self._state.mean

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

    # ------------------------------------------------------------------------------------------------ top N

    def _scoring_factors(self, side: Side, rows: np.ndarray | None = None) -> np.ndarray:
        """Rows whose inner products are the scores: factors, with mean and biases as two more columns if there are any."""
        factors = self._state.side(side)
        matrix = factors.matrix if rows is None else factors.matrix[rows]
        if factors.bias is None:
            return matrix
        bias = factors.bias if rows is None else factors.bias[rows]
        ones = np.ones(len(matrix), dtype=matrix.dtype)
        pair = (bias + matrix.dtype.type(self._state.mean), ones) if side == "user" else (ones, bias)
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
        N = check_int("N", N, 1)
        seen = None
        if check_bool("filter_already_liked_items", filter_already_liked_items):
            seen = self._seen_rows(users, user_items)
        elif user_items is not None:
            self._seen_rows(users, user_items)  # judged all the same: a wrong matrix is a mistake worth hearing of
        threads = self.plan_.num_threads
        ids, scores = top_k(
            self._scoring_factors("user", users),
            self._cached("scoring_items", lambda: PackedItems(self._scoring_factors("item"), None, threads)),
            N,
            seen=seen,
            candidates=self._candidates(items, filter_items),
            num_threads=threads,
        )
        return (ids[0], scores[0]) if np.ndim(userid) == 0 else (ids, scores)

    def _seen_rows(self, users: np.ndarray, user_items: Any) -> sp.csr_array:
        if user_items is None:
            if self._seen is None:
                raise ValueError(
                    "this model was saved without what its users have seen: pass user_items, "
                    "or filter_already_liked_items=False"
                )
            return take_rows(self._seen, users)
        matrix = as_csr(user_items, dtype=np.float32)
        if matrix.shape[0] == self.n_users != len(users):
            matrix = matrix[users]
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
        threads = self.plan_.num_threads
        packed = self._cached(
            f"normalized_{side}", lambda: PackedItems(_normalized(self._state.side(side).matrix), None, threads)
        )
        factors = packed.items
        positions = check_ids(name, ids, len(factors), f"n_{side}s")
        found, scores = top_k(factors[positions], packed, check_int("N", N, 1), num_threads=threads)
        return (found[0], scores[0]) if np.ndim(ids) == 0 else (found, scores)

    def _cached(self, key: str, compute: Any) -> Any:
        """A derived array, computed at first need; a new State empties the cache."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

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
            return self._best_unseen(users)
        user_ids = check_ids("users", users, self.n_users, "n_users")
        item_ids = check_ids("items", items, self.n_items, "n_items")
        if len(user_ids) != len(item_ids) and 1 not in (len(user_ids), len(item_ids)):
            raise ValueError(f"users has {len(user_ids)} ids and items has {len(item_ids)}; expected as many of each")
        user_ids, item_ids = (np.ascontiguousarray(ids) for ids in np.broadcast_arrays(user_ids, item_ids))
        state = self._state
        values = _als.predict_pairs(state.user.matrix, state.item.matrix, user_ids, item_ids, self.plan_.num_threads)
        if state.user.bias is not None and state.item.bias is not None:
            values += state.mean + state.user.bias[user_ids] + state.item.bias[item_ids]
        return values[0] if np.ndim(users) == 0 and np.ndim(items) == 0 else values

    def _best_unseen(self, rows: Any) -> np.ndarray:
        matrix = self._new_rows(rows, "users")
        ids, _ = self._serving_for(matrix).recommend(np.arange(matrix.shape[0]), N=1)
        return ids[:, 0]

    # ------------------------------------------------------------------------------------------------ fold-in

    def _new_rows(self, rows: Any, name: str = "user_items") -> sp.csr_array:
        """Rows over the model's items, validated; messages name both axes."""
        matrix = self._check_matrix(rows, name)
        if matrix.shape[1] != self.n_features_in_:
            n, shape = self.n_features_in_, matrix.shape
            hint = f"; rows are users and columns are items: pass {name}.T" if shape[0] == n else ""
            raise RatingsError(
                f"X has {shape[1]} features, but {type(self).__name__} is expecting {n} features as input: "
                f"{name} has shape {shape}, expected (n_rows, n_items={n}){hint}"
            )
        return matrix

    def _fold_in(self, side: Side, matrix: sp.csr_array) -> Factors:
        """Exact factors of new rows of `side` for the factors of the other one."""
        fixed = self._state.side("item" if side == "user" else "user")
        objective = self._objective()
        assembly = "simd" if self.plan_.assembly == "bals" else self.plan_.assembly
        plan = self.plan_.for_fold_in(assembly)
        gram = None
        if objective.is_implicit:  # the same for every row, and most of the work for a few rows
            gram = self._cached(
                f"gram_for_{side}", lambda: weighted_gram(fixed.matrix, objective, self.plan_.num_threads)
            )
        return HalfSweep(side, matrix, objective, plan).solve(fixed, self._state.mean, gram=gram)

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
        matrix = self._check_matrix(user_items)
        check_shape("user_items", matrix, (self.n_users, self.n_items), ("n_users", "n_items"))
        csr = csr_arrays(matrix)
        item_degrees = np.bincount(csr[1], minlength=self.n_items)
        return objective_value(
            self._objective(), csr, self._state, np.diff(csr[0]), item_degrees, self.plan_.num_threads
        )

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
        size = max(self.n_users, int(positions.max()) + 1)
        names = _extended_labels("user", self.user_ids_, positions, size, labels)
        solved = self._fold_in("user", matrix)
        self._state = self._state.with_side("user", self._state.user.put(positions, solved, size))
        if self._seen is not None:
            self._seen = _replace_rows(self._seen, positions, matrix, size)
        self.user_ids_ = names
        self._cache = {}
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
        matrix = self._check_matrix(cols, "cols")
        check_shape("cols", matrix, (self.n_users, len(positions)), ("n_users", "n_ids"))
        rows = transpose(matrix, num_threads=self.plan_.num_threads)
        size = max(self.n_items, int(positions.max()) + 1)
        names = _extended_labels("item", self.item_ids_, positions, size, labels)
        solved = self._fold_in("item", rows)
        self._state = self._state.with_side("item", self._state.item.put(positions, solved, size))
        if self._seen is not None:
            by_item = _replace_rows(_pattern(transpose(self._seen)), positions, rows, size)
            self._seen = _pattern(transpose(by_item))
        self.item_ids_ = names
        self.n_features_in_ = size
        self._cache = {}
        return self

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
        if users == "training" or (users == "auto" and self._are_training_users(matrix)):
            check_shape("user_items", matrix, (self.n_users, self.n_items), ("n_users", "n_items"))
            return self._held_out_score(self, matrix)
        shown, hidden = _hide_every_fifth(matrix)
        return self._held_out_score(self._serving_for(shown), hidden)

    def _are_training_users(self, matrix: sp.csr_array) -> bool:
        if matrix.shape[0] != self.n_users:
            return False
        if self._seen is None:
            return True
        known = _pattern(matrix).multiply(self._seen).nnz
        return known in (0, matrix.nnz)

    def _serving_for(self, rows: sp.csr_array) -> Any:
        """A model like this one whose users are the given new rows."""
        model = object.__new__(type(self))
        model.__dict__.update(self.__dict__)
        model._state = self._state.with_side("user", self._fold_in("user", rows))
        model._seen = _pattern(rows)
        model._cache = {}
        return model

    def _held_out_score(self, model: Any, held_out: sp.csr_array) -> float:
        from .metrics import evaluate

        metric = "ndcg@10" if self._objective().is_implicit else "rmse"
        value = evaluate(model, held_out, metrics=(metric,))[metric]
        return value if metric != "rmse" else -value


def _update_positions(name: str, ids: Any) -> np.ndarray:
    positions = check_ids(name, ids, 2**31 - 1, "2**31 - 1")
    if positions.size == 0:
        raise ValueError(f"{name} is empty; give at least one position")
    values, counts = np.unique(positions, return_counts=True)
    if np.any(counts > 1):
        raise ValueError(f"{name} has {values[counts > 1][0]} more than once; give each position once")
    return positions


def _extended_labels(side: str, known: Any, positions: np.ndarray, size: int, labels: Any) -> np.ndarray | None:
    """Labels after positions up to `size` were added."""
    if known is None or size == len(known):
        if labels is not None and known is None:
            raise ValueError(f"labels were given, but this model's {side}s have none (it was fitted on positions)")
        return known
    if labels is None:
        raise ValueError(
            f"ids adds {side}s up to position {size - 1} and this model's {side}s have labels; pass labels= for them"
        )
    labels = list(np.atleast_1d(labels))
    if len(labels) != len(positions):
        raise ValueError(f"labels has {len(labels)} elements; expected one for each of {len(positions)} ids")
    missing = sorted(set(range(len(known), size)) - set(positions.tolist()))
    if missing:
        raise ValueError(f"ids skips position {missing[0]}, which would have no label; add positions without gaps")
    extended = list(known) + [None] * (size - len(known))
    for position, label in zip(positions.tolist(), labels, strict=True):
        extended[position] = label
    if len(set(extended)) != size:
        raise ValueError("labels repeats a label; each position needs a label of its own")
    return np.array(extended, dtype=known.dtype if known.dtype.kind != "U" else None)


def _replace_rows(seen: sp.csr_array, positions: np.ndarray, rows: sp.csr_array, size: int) -> sp.csr_array:
    """`seen` with `size` rows, those at `positions` replaced by the pattern of `rows`."""
    source = np.arange(size)
    source[seen.shape[0] :] = -1
    source[positions] = seen.shape[0] + np.arange(len(positions))
    stacked = sp.vstack([seen, _pattern(rows), sp.csr_array((1, seen.shape[1]), dtype=np.int8)], format="csr")
    source[source < 0] = stacked.shape[0] - 1  # a gap: a row without entries
    return _pattern(sp.csr_array(stacked[source]))


def _hide_every_fifth(matrix: sp.csr_array) -> tuple[sp.csr_array, sp.csr_array]:
    """Split each row's entries into shown and hidden ones: the last of every five, at least one of two or more."""
    indptr, indices, _ = csr_arrays(matrix)
    degrees = np.diff(indptr)
    rank_in_row = np.arange(len(indices)) - np.repeat(indptr[:-1], degrees)
    short = np.repeat((degrees >= 2) & (degrees < 5), degrees)
    last = rank_in_row == np.repeat(degrees - 1, degrees)
    hidden = (rank_in_row % 5 == 4) | (short & last)
    if not hidden.any():
        raise RatingsError("user_items has no row with two or more entries; nothing can be hidden and predicted")
    return keep_entries(matrix, ~hidden), keep_entries(matrix, hidden)
