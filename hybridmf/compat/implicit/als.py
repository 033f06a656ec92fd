"""`implicit.als.AlternatingLeastSquares` on the solvers of this library.

Its confidence is ``c = alpha r`` where this library has ``1 + alpha r``. Both minimize the same sum once it is divided
by some k below the smallest confidence: an entry then has the value ``alpha r / k - 1``, other pairs the weight 1 / k,
and lambda becomes lambda / k (docs/methods.md, Objectives of other libraries). Users are solved before items: the fit
works on the transpose, with the sides exchanged. So the factors are those of `implicit` for the same seed, up to
rounding.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse as sp

from ...als import ImplicitALS
from ...core.objective import Factors, Objective, Side, other_side
from ...core.sparse import RowColumns
from ...core.validate import as_csr, check_bool, check_int, one_row
from ...errors import RatingsError
from ...formats import transpose
from ...model.base import plan_to_serve
from ...model.engine import Engine, engine_for
from ...model.estimator import not_fitted
from ...model.ranking import itself_first
from ...model.recommenders import NOTHING_LEFT
from ...plan.solver import Given

FIRST_LENGTH = 0.01  # initial factors are uniform between 0 and this

_Served = SimpleNamespace  # in pickles of earlier versions


@dataclass(eq=False, repr=False)
class AlternatingLeastSquares:
    """Alternating least squares with the parameters, methods and results of `implicit`.

    For the same `random_state`, factors and recommendations are those of `implicit` 0.7, up to rounding.

    Parameters
    ----------
    factors : int
    regularization : float
        lambda; not scaled by the number of entries.
    alpha : float
        An entry r has the confidence ``alpha * r``, other pairs have 1.
    dtype : numpy dtype
        float32 or float64.
    use_native : bool
        Without effect.
    use_cg : bool
        Three conjugate gradient steps for each row (attribute `cg_steps`) in place of the exact solution.
    use_gpu : bool, optional
        Default: the device with the shortest predicted time.
    iterations : int
    calculate_training_loss : bool
        Compute the loss after each iteration, for `callback`.
    num_threads : int
        0: all cores. The result does not depend on it.
    random_state : int, numpy Generator or None

    Attributes
    ----------
    user_factors, item_factors : array, shape (n_users, factors) and (n_items, factors), or None before the fit
        May be set before a fit, which then continues from them.
    """

    factors: int = 100
    regularization: float = 0.01
    alpha: float = 1.0
    dtype: Any = np.float32
    use_native: bool = True
    use_cg: bool = True
    use_gpu: bool | None = None
    iterations: int = 15
    calculate_training_loss: bool = False
    num_threads: int = 0
    random_state: Any = None

    def __post_init__(self) -> None:
        self.dtype = np.dtype(self.dtype)
        self.cg_steps = 3
        self.user_factors: Any = None
        self.item_factors: Any = None
        self._scale = 1.0
        self._nnz = 0
        self._derived: dict[Side, tuple[Any, dict[Any, Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_derived": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "_sides"}, _derived={})

    # ------------------------------------------------------------------------------------------------ fit

    def fit(
        self,
        user_items: Any,
        show_progress: bool = True,
        callback: Callable[[int, float, float | None], Any] | None = None,
    ) -> None:
        """Learn the factors of a matrix of confidences.

        Parameters
        ----------
        user_items : sparse matrix or Ratings, shape (n_users, n_items)
            Negative entries are dislikes.
        show_progress : bool
        callback : callable, optional
            Called as ``callback(iteration, seconds, loss)`` after each iteration, counted from 0.

        Raises
        ------
        TypeError, ValueError
            A hyperparameter is out of range, or an entry is 0 (a confidence of 0, which `implicit` takes).
        """
        confidence = self._confidence(user_items, "user_items")
        self._draw(confidence.shape)
        sizes = np.abs(confidence.data)
        smallest = float(sizes.min(initial=np.inf))
        self._scale = 1.0 if smallest > 1.5 else smallest / 2
        total = confidence.shape[0] * confidence.shape[1] - confidence.nnz + float(sizes.sum(dtype=np.float64))
        self._nnz = confidence.nnz
        model = self._estimator(init=(self.item_factors, self.user_factors))
        model._keeps_first_rows = True

        def observe(_: Any, record: dict[str, float]) -> None:
            loss = self._scale * record["objective"] / total if self.calculate_training_loss else None
            if callback is not None:
                callback(int(record["iteration"]) - 1, record["seconds"], loss)

        watched = callback is not None or self.calculate_training_loss
        model.fit(
            transpose(self._converted(confidence, self._scale)),
            callback=observe if watched else None,
            show_progress=check_bool("show_progress", show_progress),
        )
        self.user_factors, self.item_factors = np.array(model.item_factors_), np.array(model.user_factors_)

    def _confidence(self, matrix: Any, name: str) -> sp.csr_array:
        """``alpha r`` of each entry."""
        matrix = as_csr(matrix, name=name, dtype=self.dtype)
        if self.alpha != 1:
            matrix = sp.csr_array((self.alpha * matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
        if not matrix.data.all():
            zeros = np.count_nonzero(matrix.data == 0)
            raise RatingsError(
                f"{name} has {zeros} entries with a confidence of 0, which says that nothing is known of a pair, while "
                f"pairs without an entry count as seen and not liked; call {name}.eliminate_zeros() to make them those"
            )
        return matrix

    def _converted(self, confidence: sp.csr_array, scale: float) -> sp.csr_array:
        """Values of this library's objective, in which all weights are divided by `scale`."""
        values = np.sign(confidence.data) * (np.abs(confidence.data) / scale - 1)
        return sp.csr_array((values.astype(self.dtype), confidence.indices, confidence.indptr), shape=confidence.shape)

    def _draw(self, shape: tuple[int, int]) -> None:
        """Initial factors of each side that has none."""
        rank = check_int("factors", self.factors, 1)
        generator = np.random.default_rng(self.random_state)
        for side, count in zip(("user", "item"), shape, strict=True):
            name = f"{side}_factors"
            if getattr(self, name) is None:
                setattr(self, name, generator.random((count, rank), dtype=self.dtype) * FIRST_LENGTH)

    def _estimator(self, scale: float | None = None, **options: Any) -> ImplicitALS:
        scale = self._scale if scale is None else scale
        device = {None: "auto", True: "cuda", False: "cpu"}[self.use_gpu]
        return ImplicitALS(
            factors=self.factors,
            regularization=self.regularization / scale,
            alpha=1.0,
            unobserved_weight=1 / scale,
            iterations=self.iterations,
            solver="cg" if self.use_cg else "cholesky",
            cg_steps=self.cg_steps,
            device=device,
            dtype=self.dtype.name,
            num_threads=self.num_threads or None,
            **options,
        )

    # ------------------------------------------------------------------------------------------------ factors

    def _factors(self, side: Side) -> Any:
        factors = getattr(self, f"{side}_factors")
        if factors is None:
            raise not_fitted("this AlternatingLeastSquares has no factors; call fit(user_items) first")
        return factors

    def _cached(self, side: Side, factors: Any, key: Any, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, once for these factors of a side: other threads may replace those of the model."""
        known = self._derived.get(side)
        if known is None or known[0] is not factors:
            known = self._derived[side] = factors, {}
        derived = known[1]
        if key not in derived:
            derived[key] = compute()
        return derived[key]

    def _engine(self, scores: float = np.inf) -> Engine:
        items = self._factors("item")
        shape = len(self._factors("user")), len(items)
        model, nnz = self._estimator(), self._nnz or sum(shape)  # files do not have it; serving depends on it little
        plan = self._cached(
            "item", items, ("plan", shape), lambda: plan_to_serve(model._objective(), model._settings(), shape, nnz)
        )
        return engine_for(plan, scores)

    def _fold_in(self, fixed_side: Side, ids: Any, rows: Any, name: str) -> np.ndarray:
        """Exact factors of rows of confidences, or of the row of one id, given those of the other side."""
        confidence = self._confidence(_check_rows(ids, rows, name), name)
        smallest = float(np.abs(confidence.data).min(initial=np.inf))
        scale = self._scale if smallest > self._scale else smallest / 2
        objective: Objective = self._estimator(scale)._objective()
        engine, fixed = self._engine(), self._factors(fixed_side)
        side, factors, key = other_side(fixed_side), Factors(fixed), ("gram", engine.name, objective)
        gram = self._cached(fixed_side, fixed, key, lambda: engine.gram(side, factors, objective))
        converted = self._converted(confidence, scale)
        found = np.array(engine.fold_in(side, converted, objective, Given(factors, 0.0, gram=gram)).matrix)
        return found[0] if np.ndim(ids) == 0 else found

    def recalculate_user(self, userid: Any, user_items: Any) -> np.ndarray:
        """Exact factors of users with these rows, shape (n, factors), or (factors,) for one user; nothing changes."""
        return self._fold_in("item", userid, user_items, "user_items")

    def recalculate_item(self, itemid: Any, item_users: Any) -> np.ndarray:
        """Exact factors of items with these rows, shape (n, factors), or (factors,) for one item; nothing changes."""
        return self._fold_in("user", itemid, item_users, "item_users")

    def partial_fit_users(self, userids: Any, user_items: Any) -> None:
        """Replace the factors of users, or append users, by the exact factors of these rows."""
        self.user_factors = self._replaced("user", userids, self.recalculate_user(np.atleast_1d(userids), user_items))

    def partial_fit_items(self, itemids: Any, item_users: Any) -> None:
        """Replace the factors of items, or append items, by the exact factors of these rows of items x users."""
        self.item_factors = self._replaced("item", itemids, self.recalculate_item(np.atleast_1d(itemids), item_users))

    def _replaced(self, side: Side, ids: Any, factors: np.ndarray) -> np.ndarray:
        ids = np.atleast_1d(ids)
        old = self._factors(side)
        replaced = np.zeros((max(len(old), int(ids.max(initial=-1)) + 1), self.factors), dtype=self.dtype)
        replaced[: len(old)] = old
        replaced[ids] = factors
        return replaced

    # ------------------------------------------------------------------------------------------------ top N

    def recommend(
        self,
        userid: Any,
        user_items: Any,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        recalculate_user: bool = False,
        items: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The N items with the highest scores for each user.

        Parameters
        ----------
        userid : int or int array, shape (n,)
        user_items : sparse matrix, shape (n, n_items)
            A row for each user of `userid`. May be None if nothing is filtered or recalculated.
        N : int
        filter_already_liked_items : bool
        filter_items : int array, optional
            Items to leave out.
        recalculate_user : bool
            Use factors computed of `user_items`.
        items : int array, optional
            Candidates; not together with `filter_items`.

        Returns
        -------
        ids, scores : array, shape (N,) for one user, else (n, N)
            Where fewer than N items are left, those that were to be left out follow, with the smallest float32 as
            their score; lists have at most n_items columns.

        Raises
        ------
        TypeError, ValueError, IndexError
        """
        liked = check_bool("filter_already_liked_items", filter_already_liked_items)
        seen = None
        if liked or recalculate_user:
            if not sp.issparse(user_items):
                raise ValueError("user_items needs to be a CSR sparse matrix, to filter what users have or recalculate")
            user_items = _check_rows(userid, user_items, "user_items")
            seen = as_csr(user_items, name="user_items") if liked else None
        rows = self._factors("user")
        users = self.recalculate_user(userid, user_items) if recalculate_user else rows[_positions(userid, len(rows))]
        allowed = _candidates(items, filter_items, len(self._factors("item")), "items")
        found = self._top("item", np.atleast_2d(users), N, seen, allowed, items is not None, normalized=False)
        return (found[0][0], found[1][0]) if np.ndim(userid) == 0 else found

    def similar_items(
        self,
        itemid: Any,
        N: int = 10,
        recalculate_item: bool = False,
        item_users: Any = None,
        filter_items: Any = None,
        items: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The N items with the highest cosine to each item, itself first; arguments and results as for `recommend`."""
        query = self.recalculate_item(itemid, item_users) if recalculate_item else None
        return self._similar("item", itemid, N, items, filter_items, query)

    def similar_users(
        self, userid: Any, N: int = 10, filter_users: Any = None, users: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The N users with the highest cosine to each user, itself first; see `similar_items`."""
        return self._similar("user", userid, N, users, filter_users, None)

    def _similar(
        self, side: Side, ids: Any, N: int, chosen: Any, left_out: Any, query: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = self._factors(side)
        own = None if query is not None else np.atleast_1d(_positions(ids, len(rows)))
        queries = np.atleast_2d(_normalized(rows[_positions(ids, len(rows))] if query is None else query))
        allowed = _candidates(chosen, left_out, len(rows), f"{side}s")
        found = self._top(side, queries, N, None, allowed, chosen is not None, normalized=True)
        if own is not None and found[0].shape[1]:
            inside = np.flatnonzero(queries.any(axis=1) & (allowed is None or np.isin(own, allowed)))
            first = itself_first(found[0][inside], found[1][inside], queries[inside], own[inside])
            found[0][inside], found[1][inside] = first
        return (found[0][0], found[1][0]) if np.ndim(ids) == 0 else found

    def _top(
        self,
        side: Side,
        queries: np.ndarray,
        N: int,
        seen: sp.csr_array | None,
        allowed: np.ndarray | None,
        shortened: bool,
        normalized: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The N best rows of `side` among those `allowed`; `shortened`: no more columns than these."""
        rows = self._factors(side)
        engine = self._engine(float(len(queries)) * rows.size)
        pool = np.arange(len(rows)) if allowed is None or not shortened else allowed
        N = min(check_int("N", N, 1), len(pool))
        laid = _normalized if normalized else np.ascontiguousarray
        packed = self._cached(side, rows, (engine.name, normalized), lambda: engine.pack(laid(rows)))
        excluded = None if seen is None else RowColumns.of(seen)
        ids, scores = engine.top_k(np.ascontiguousarray(queries), packed, N, excluded, allowed)
        for row in np.flatnonzero((ids < 0).any(axis=1)):
            missing = ids[row] < 0
            others = np.setdiff1d(pool, ids[row])
            ids[row, missing], scores[row, missing] = others[: np.count_nonzero(missing)], NOTHING_LEFT
        return ids, scores

    # ------------------------------------------------------------------------------------------------ explanations

    def explain(
        self, userid: int, user_items: Any, itemid: int, user_weights: Any = None, N: int = 10
    ) -> tuple[float, list[tuple[int, float]], Any]:
        """Score of an item for a user as a sum over the items of the user (Hu, Koren and Volinsky 2008, section 5).

        Parameters
        ----------
        userid : int
        user_items : sparse matrix, shape (n_users, n_items)
            Of all users.
        itemid : int
        user_weights : tuple, optional
            The third result of an earlier call for this user.
        N : int

        Returns
        -------
        score : float
        contributions : list of (item, contribution)
            The N largest, best first.
        user_weights : tuple
        """
        factors = self._factors("item")
        items = np.asarray(factors, dtype=np.float64)
        row = self._confidence(sp.csr_array(user_items)[[userid]], "user_items")
        if user_weights is None:
            gram = self._cached("item", factors, "square", lambda: items.T @ items)
            chosen, weights = items[row.indices], np.abs(row.data) - 1
            matrix = gram + self.regularization * np.eye(self.factors) + (chosen.T * weights) @ chosen
            user_weights = scipy.linalg.cho_factor(matrix)
        weighted = scipy.linalg.cho_solve(user_weights, items[itemid])
        liked = row.data > 0
        parts = row.data[liked] * (items[row.indices[liked]] @ weighted)
        best = np.argsort(-parts, kind="stable")[:N]
        pairs = zip(row.indices[liked][best].tolist(), parts[best].tolist(), strict=True)
        return float(parts.sum()), list(pairs), user_weights

    # ------------------------------------------------------------------------------------------------ files

    def save(self, fileobj_or_path: Any) -> None:
        """Write the model as an npz file, which `implicit` loads, too; a `random_state` only if it is an integer."""
        names = ["user_factors", "item_factors", "regularization", "factors", "num_threads", "iterations", "use_native"]
        names += ["use_cg", "cg_steps", "calculate_training_loss", "random_state", "alpha"]
        content = {name: getattr(self, name) for name in names} | {"dtype": self.dtype.name}
        if not isinstance(self.random_state, numbers.Integral):
            del content["random_state"]  # a generator would be a pickle, which `load` refuses
        np.savez(fileobj_or_path, **{name: value for name, value in content.items() if value is not None})

    @classmethod
    def load(cls, fileobj_or_path: Any) -> AlternatingLeastSquares:
        """Read a model that `save` wrote, or `implicit`."""
        if isinstance(fileobj_or_path, (str, os.PathLike)) and not os.fspath(fileobj_or_path).endswith(".npz"):
            fileobj_or_path = os.fspath(fileobj_or_path) + ".npz"
        model = cls()
        with np.load(fileobj_or_path, allow_pickle=False) as content:
            for name, value in content.items():
                plain = value if value.ndim else value.item()
                setattr(model, name, np.dtype(plain) if name == "dtype" else plain)
        return model


def _check_rows(ids: Any, rows: Any, name: str) -> Any:
    """The rows, where there is one for each id; a one-dimensional sparse array is a row."""
    rows = one_row(rows)
    count = 1 if np.ndim(ids) == 0 else len(ids)
    if rows is None or rows.shape[0] != count:
        got = "None" if rows is None else f"{rows.shape[0]} rows"
        raise ValueError(f"{name} must contain 1 row for each of the {count} ids, got {got}; pass {name}[ids]")
    return rows


def _positions(ids: Any, count: int) -> Any:
    positions = np.asarray(ids)
    if positions.size and (positions.min() < 0 or positions.max() >= count):
        raise IndexError(f"ids must be between 0 and {count - 1}, got {positions.min()} to {positions.max()}")
    return ids


def _candidates(chosen: Any, left_out: Any, count: int, name: str) -> np.ndarray | None:
    """Positions that may be found, ascending; None for all."""
    if chosen is not None and left_out is not None and len(left_out):
        raise ValueError(f"Can't set both {name} and filter_{name}")
    if chosen is not None:
        return np.unique(_positions(np.asarray(chosen, dtype=np.int64), count))
    if left_out is None:
        return None
    return np.setdiff1d(np.arange(count), np.asarray(left_out, dtype=np.int64))


def _normalized(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths == 0, 1, lengths), dtype=rows.dtype)
