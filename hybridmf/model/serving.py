"""Use of a fitted model: recommendations, neighbours, predictions, fold-in of new rows, updates.

It depends on positions and on `Learned` only, so all estimators and backends share it.
"""

from __future__ import annotations

import html
import logging
import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

import numpy as np
import scipy.sparse as sp

from ..core.frames import check_kind, kind_of
from ..core.objective import Side, scoring_rows
from ..core.sparse import keep_entries, transposed
from ..core.system import needed
from ..core.table import html_facts
from ..core.validate import (
    MAX_N,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_range,
    check_shape,
    csr_arrays,
    one_column,
    one_row,
)
from ..data.align import IN_ORDER, UNKNOWN, align, labels_of
from ..data.features import Features
from ..data.labels import look_up
from ..data.store import Store
from ..data.wide import is_wide
from ..errors import DeviceMemoryError, RatingsError
from ..plan.types import Plan
from ..ratings import Ratings, as_ratings, is_pairs
from .described import described_rows, explained, rows_described
from .early_stopping import LOWER_IS_BETTER
from .engine import engine_for
from .estimator import Estimator, check_columns, not_fitted, numeric_matrix, transformed
from .explain import Explanation, contributions, training_row
from .learned import Learned, pattern
from .ranking import Request, blank_mask, fold_in, neighbours, predicted, requested
from .requests import (
    Asked,
    Unknown,
    choose,
    given_rows,
    is_history,
    is_single,
    labelled,
    names_of,
    pairs_of,
    positions_of,
    read_history,
    rows_of_strangers,
    shown,
)
from .tables import file_format, to_file, to_frame
from .updates import updated, updated_axis, updated_labels, with_factors

logger = logging.getLogger("hybridmf")


class ServingMixin(Estimator):
    """Recommendations, similarities, predictions, fold-in and updates of a fitted factor model."""

    _recommends_in_blocks = True  # `recommend` never holds the scores of all items for all users
    _learned: Learned  # set by fit and load
    n_features_in_: int
    timings_: dict[str, float]
    feature_names_in_: np.ndarray  # only of models fitted on frames

    # --------------------------------------------------------------------------------------------- learned state

    def __sklearn_is_fitted__(self) -> bool:
        return "_learned" in vars(self)

    def _repr_html_(self) -> str:
        if not self.__sklearn_is_fitted__():
            return f"<p>{html.escape(repr(self))}, not fitted</p>"
        learned = self._fitted()
        factors = f"{learned.state.item.matrix.shape[1]} in {learned.state.item.matrix.dtype}"
        last = learned.history[learned.n_iter - 1] if 0 < learned.n_iter <= len(learned.history) else {}
        measured = {name: f"{value:.6g}" for name, value in last.items() if name not in ("iteration", "seconds")}
        seconds = sum(vars(self).get("timings_", {}).values())
        facts = {
            "users, items": " x ".join(f"{n:,}" for n in learned.shape),
            "factors": factors + (", biases" if learned.state.item.bias is not None else ""),
            "iterations": learned.n_iter,
            "device": learned.plan.device_name,
            "seconds": f"{seconds:.3g}" if seconds else "",
        }
        return html_facts(textwrap.shorten(repr(self), 400, placeholder=" ..."), (facts | measured).items())

    def _fitted(self) -> Learned:
        """The learned state. Each public method takes it once and passes it on: a later one may be of another fit."""
        try:
            return self._learned
        except AttributeError:
            raise not_fitted(
                f"This {type(self).__name__} instance is not fitted yet. Call 'fit' with appropriate arguments before "
                "using this estimator."
            ) from None

    def _holding(self, learned: Learned | None = None) -> Any:
        """A copy of the model with a state (default: the present one) that no fit or update of this model replaces."""
        learned = self._fitted() if learned is None else learned
        model = type(self).__new__(type(self))
        vars(model).update(vars(self))
        model._learned, model.n_features_in_ = learned, learned.shape[1]
        vars(model).pop("feature_names_in_", None)
        if learned.feature_names is not None:
            model.feature_names_in_ = learned.feature_names
        return model

    @property
    def user_factors_(self) -> np.ndarray:
        """User factors, shape (n_users, factors), in the dtype of the computation; read-only: see `set_factors`."""
        return _read_only(self._fitted().state.user.matrix)

    @property
    def item_factors_(self) -> np.ndarray:
        """Item factors, shape (n_items, factors), in the dtype of the computation; read-only: see `set_factors`."""
        return _read_only(self._fitted().state.item.matrix)

    @property
    def user_factors(self) -> np.ndarray:
        """User factors, float32, C order, shape (n_users, factors), for every device and dtype; read-only."""
        return _read_only(np.ascontiguousarray(self.user_factors_, dtype=np.float32))

    @property
    def item_factors(self) -> np.ndarray:
        """Item factors, float32, C order, shape (n_items, factors), for every device and dtype; read-only."""
        return _read_only(np.ascontiguousarray(self.item_factors_, dtype=np.float32))

    @property
    def user_bias_(self) -> np.ndarray | None:
        """User biases, shape (n_users,), or None for a model without biases; read-only."""
        return _read_only(self._fitted().state.user.bias)

    @property
    def item_bias_(self) -> np.ndarray | None:
        """Item biases, shape (n_items,), or None for a model without biases; read-only."""
        return _read_only(self._fitted().state.item.bias)

    @property
    def user_features_(self) -> Features | None:
        """Features of the users, a row for each user of the model; None for a fit without."""
        return self._features_of("user")

    @property
    def item_features_(self) -> Features | None:
        """Features of the items, a row for each item of the model; None for a fit without."""
        return self._features_of("item")

    def _features_of(self, side: Side) -> Features | None:
        known = self._fitted().features.get(side)
        return None if known is None else known.features

    @property
    def user_feature_vectors_(self) -> np.ndarray | None:
        """Vectors of the features of users, shape (n_features, factors), or None; read-only."""
        return self._vectors_of("user")

    @property
    def item_feature_vectors_(self) -> np.ndarray | None:
        """Vectors of the features of items, shape (n_features, factors), or None; read-only.

        An item without entries has the sum of the vectors of its features as its factors.
        """
        return self._vectors_of("item")

    def _vectors_of(self, side: Side) -> np.ndarray | None:
        vectors = self._fitted().state.vectors.get(side)
        return None if vectors is None else _read_only(vectors.matrix)

    @property
    def mean_(self) -> float:
        """Mean training rating (mu); 0 for a model without biases."""
        return self._fitted().state.mean

    @property
    def plan_(self) -> Plan:
        """Every size and choice of the fit."""
        return self._fitted().plan

    @property
    def device_(self) -> str:
        """Device of the fit; several devices are joined by a plus."""
        return self.plan_.device_name

    @property
    def user_ids_(self) -> np.ndarray | None:
        """Label of each user, or None for a model fitted on positions; read-only."""
        return _read_only(self._fitted().user_ids)

    @property
    def item_ids_(self) -> np.ndarray | None:
        """Label of each item, or None for a model fitted on positions; read-only."""
        return _read_only(self._fitted().item_ids)

    user_ids, item_ids = user_ids_, item_ids_  # as of `Ratings`

    def user_index(self, labels: Any) -> Any:
        """Positions of users; see `Ratings.user_index`."""
        return self._index("user", labels)

    def item_index(self, labels: Any) -> Any:
        """Positions of items; see `Ratings.item_index`."""
        return self._index("item", labels)

    def _index(self, side: Side, labels: Any) -> Any:
        learned = self._fitted()
        ids = learned.labels(side)
        return look_up(side, labels, ids, learned.label_table(side), len(learned.state.side(side)))

    @property
    def cold_users_(self) -> np.ndarray:
        """Users without factors: bool array, shape (n_users,).

        They have no training entries; in implicit feedback, no positive ones.
        """
        return blank_mask(self._fitted(), "user")

    @property
    def cold_items_(self) -> np.ndarray:
        """Items without factors, which are never recommended: bool array, shape (n_items,).

        They have no training entries; in implicit feedback, no positive ones.
        """
        return blank_mask(self._fitted(), "item")

    @property
    def item_counts_(self) -> np.ndarray | None:
        """Training entries of each item, int64, shape (n_items,); None for files of models that lack them."""
        return _read_only(self._fitted().item_counts)

    @property
    def n_users(self) -> int:
        """Number of users the model has factors for."""
        return len(self._fitted().state.user)

    @property
    def n_items(self) -> int:
        """Number of items the model has factors for."""
        return len(self._fitted().state.item)

    @property
    def _n_features_out(self) -> int:
        items = self._fitted().state.item
        return items.matrix.shape[1] + (items.bias is not None)

    @property
    def n_iter_(self) -> int:
        """Iterations of the fit; with early stopping, the best one."""
        return self._fitted().n_iter

    @property
    def history_(self) -> list[dict[str, Any]]:
        """Record of each iteration; see `fit`."""
        return self._fitted().history

    def _learn(self, learned: Learned) -> None:
        """Replace the learned state, and with it everything derived from the old one."""
        with self._lock:
            self._learned = learned

    def _forget(self) -> None:
        """Remove the result of a fit."""
        with self._lock:
            vars(self).pop("_learned", None)

    # ------------------------------------------------------------------------------------------------ top N

    def recommend(
        self,
        userid: Any,
        user_items: Any = None,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        items: Any = None,
        cold_users: str = "popular",
        *,
        recalculate_user: bool = False,
        labels: bool = False,
        unknown: str = "error",
        include_cold: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Recommend the N items with the highest scores to each user.

        Items without training entries are not recommended: they have no factors, so their score of 0 is meaningless;
        those with features only have factors, by which ``include_cold=True`` ranks them.

        Parameters
        ----------
        userid : int or int array, shape (n,)
            Positions of users, or with ``labels=True`` their labels.
        user_items : Ratings or sparse matrix, shape (n, n_items), optional
            Items seen by each user of `userid`, one row per user in the same order, also where these are all users. A
            matrix with all n_users rows is indexed by `userid` if that names another number of users; labelled ratings
            are aligned by label. Explicit zeros are no entries of implicit feedback. Default: the training entries of
            the model.
        N : int
            Number of items for each user.
        filter_already_liked_items : bool
            Exclude the items that the user has seen.
        filter_items : int array; or list of n of them, or matrix, shape (n, n_items), optional
            Items to exclude for all users; or for each user, as lists or as the entries of rows.
        items : int array; or list of n of them, or matrix, shape (n, n_items), optional
            Candidates of all users, or of each user; default: all items.
        cold_users : {"popular", "mask"}
            Result for users without training entries, whose factors are zero (`cold_users_`). "popular" ranks by the
            item biases of a model with biases, else by the number of positive training entries. "mask" returns no
            items.
        recalculate_user : bool
            Rank by factors computed from the rows of `user_items` (fold-in) instead of the trained factors. The model
            does not change. `userid` may then have positions >= n_users, of users who are not in the model.
        labels : bool
            `userid`, `items` and `filter_items` are labels, and labels are returned. A side without labels has
            positions.
        unknown : {"error", "drop", "popular"}
            Treatment of ids that the model does not have (labels, or positions behind the last). Under both others,
            unknown items of `items`, `filter_items` and labelled ratings are left out, and a warning is logged with the
            number of ids. The row of an unknown user has no items under "drop"; under "popular", those of a cold user.
        include_cold : bool
            Rank items that have features and no training entries, too; by default they are left out, also of `items`.

        Returns
        -------
        ids : int32 array, shape (N,) for one user, (n, N) for several
            Best first, ties by lower position; -1 if fewer than N items are left. With ``labels=True`` an object array
            of labels, with None in place of -1.
        scores : float array, same shape
            For cold users of a model without biases, the numbers of positive training entries; -inf where ids is -1.

        Raises
        ------
        NotFittedError, TypeError, ValueError
        MemoryBudgetError
            N results for each user do not fit in memory.
        """
        learned, user_items = self._fitted(), as_ratings(user_items, "user_items")
        asked = Asked(N, filter_already_liked_items, filter_items, items, cold_users, labels, unknown, include_cold)
        by_label = asked.by_label
        recalculated = check_bool("recalculate_user", recalculate_user)
        if recalculated and user_items is None:
            raise ValueError("recalculate_user=True computes factors of rows of user_items; pass user_items")
        if recalculated and not by_label and (labels_of(user_items) or (None,))[0] is None:
            users = check_ids("userid", userid, 2**31 - 1, "2**31 - 1")
        else:
            users = positions_of(learned, "user", "userid", userid, by_label, asked.unknown)
        ids, scores = requested(learned, users, user_items, asked, recalculated).answer(0, len(users))
        return shown(learned, "item", ids, scores, by_label, is_single(userid, by_label))

    def recommend_table(
        self,
        userid: Any = None,
        user_items: Any = None,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        items: Any = None,
        cold_users: str = "popular",
        *,
        labels: bool = True,
        unknown: str = "error",
        backend: str | None = None,
        show_progress: bool = False,
        path: str | os.PathLike[str] | None = None,
        include_cold: bool = False,
    ) -> Any:
        """Recommendations as a data frame, or a Parquet or Arrow file, with one row for each of them.

        Users are served block by block, so no users x items matrix exists.

        Parameters
        ----------
        userid : label or vector of labels, optional
            Default: all users. A pandas or polars Series gets a frame of its library.
        user_items, N, filter_already_liked_items, filter_items, items, cold_users
            As for `recommend`.
        labels : bool
            Users and items are labels, in the arguments and in the frame; False: positions.
        unknown : {"error", "drop", "popular"}
            As for `recommend`; "drop" leaves unknown users without rows.
        backend : {"pandas", "polars", "pyarrow"}, optional
            Library of the frame. Default: that of `userid`, else of the frame that the ratings of the fit came from,
            else the first of the three that is installed.
        show_progress : bool
            Show a progress bar on standard error if that is a terminal, or in a notebook.
        path : path-like, optional
            File that ends in ``.parquet`` or ``.pq``; or, for Arrow's IPC format, in ``.arrow``, ``.feather`` or
            ``.ipc``. It is written block by block under a temporary name and appears when it is complete. Default: a
            frame is returned.
        include_cold : bool
            As for `recommend`.

        Returns
        -------
        frame, or None if a file was written
            Columns ``user``, ``rank`` (from 1), ``item`` and ``score``; users with fewer than N items have fewer rows.

        Raises
        ------
        NotFittedError, TypeError, ValueError, UnknownLabelError, ImportError, OSError, MemoryBudgetError
        """
        learned, show_progress = self._fitted(), check_bool("show_progress", show_progress)
        asked = Asked(N, filter_already_liked_items, filter_items, items, cold_users, labels, unknown, include_cold)
        if path is None:
            kind = check_kind("backend", backend, kind_of(userid), learned.frame_kind)
        else:
            file_format(path)
        users = np.arange(learned.shape[0])
        if userid is not None:
            users = positions_of(learned, "user", "userid", userid, asked.by_label, asked.unknown)
        request = requested(learned, users, user_items, asked)
        names = names_of(learned, "user", "userid", users, asked)
        if path is None:
            return to_frame(request, names, kind, show_progress)
        return to_file(request, names, path, show_progress)

    def recommend_all(
        self,
        path: str | os.PathLike[str] | None = None,
        user_items: Any = None,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        items: Any = None,
        cold_users: str = "popular",
        *,
        labels: bool = True,
        unknown: str = "error",
        backend: str | None = None,
        show_progress: bool = False,
        include_cold: bool = False,
    ) -> Any:
        """Recommendations for all users, to a Parquet or Arrow file, or as the data frame of `recommend_table`.

        Parameters
        ----------
        path, labels, unknown, backend, show_progress, include_cold
            As for `recommend_table`.
        user_items, N, filter_already_liked_items, filter_items, items, cold_users
            As for `recommend`.

        Returns
        -------
        frame, or None if a file was written

        Raises
        ------
        NotFittedError, TypeError, ValueError, UnknownLabelError, ImportError, OSError, MemoryBudgetError
        """
        return self.recommend_table(
            None, user_items, N, filter_already_liked_items, filter_items, items, cold_users,
            labels=labels, unknown=unknown, backend=backend, show_progress=show_progress, path=path,
            include_cold=include_cold,
        )  # fmt: skip

    def recommend_new(
        self,
        rows: Any,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Any = None,
        items: Any = None,
        cold_users: str = "popular",
        *,
        labels: bool = False,
        unknown: str = "error",
        include_cold: bool = False,
        features: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Recommend the N best items to users who are not in the model, from their history.

        Their factors are computed with the exact solver (fold-in). The model does not change, so any number of threads
        may call this method.

        Parameters
        ----------
        rows : sequence of items, mapping {item: value}, a list of these, or a matrix, shape (n, n_items)
            One user's items; a list of them for several users; or Ratings or a sparse or dense matrix with one row for
            each user. Labelled ratings are aligned by label. Models of explicit feedback need values; for implicit
            feedback, repeated items add up. The users of a data frame of entries are in the order of
            ``Ratings.from_frame(rows).user_ids``.
        N, filter_already_liked_items, filter_items, items, cold_users
            As for `recommend`; an empty history is that of a cold user.
        labels : bool
            Items of `rows`, `items` and `filter_items` are labels, and labels are returned. Default: positions.
        unknown : {"error", "drop", "popular"}
            Treatment of items that the model does not have, in all arguments. "drop" leaves them out and logs a warning
            with their number; a user whose history has no other items is a cold user. "popular" is the same.
        include_cold : bool
            As for `recommend`.
        features : frame, mapping, Features or matrix, optional
            Features of the users, for a model fitted with `user_features`: see `Features.encode`. Users without a
            history are recommended what their features say. Rows are matched by label where `rows` has labels of users
            (`Ratings`, a data frame), else they are in the order of `rows`.

        Returns
        -------
        ids : int32 array, shape (N,) for the items of one user, (n, N) for a list or a matrix
            Best first; -1 if fewer than N items are left. With ``labels=True`` an object array of labels, with None
            in place of -1.
        scores : float array, same shape

        Raises
        ------
        NotFittedError, TypeError, ValueError, RatingsError, UnknownLabelError, MemoryBudgetError
        """
        learned = self._fitted()
        asked = Asked(N, filter_already_liked_items, filter_items, items, cold_users, labels, unknown, include_cold)
        names: np.ndarray | None = None
        if is_history(rows):
            matrix, single = read_history(learned, rows, asked.by_label, asked.unknown)
        else:
            names = _names_of_rows(rows, "rows")
            matrix = self._new_rows(learned, rows, "rows", unknown=asked.unknown.of_entries)
            single = one_row(rows) is not rows
        n_rows = matrix.shape[0]
        rows_of = partial(rows_of_strangers, learned, n_rows, unknown=asked.unknown.of_entries)
        candidates = asked.candidates(learned, n_rows, rows_of)
        asked.unknown.report()
        described = None if features is None else described_rows(learned, "user", features, names, n_rows)
        factors = fold_in(learned, "user", matrix, described)
        seen = matrix if asked.filter_liked else None
        ids, scores = Request(learned, np.arange(n_rows), asked, seen, candidates, factors).answer(0, n_rows)
        return shown(learned, "item", ids, scores, asked.by_label, single)

    def similar_items(
        self,
        itemid: Any,
        N: int = 10,
        *,
        items: Any = None,
        filter_items: Any = None,
        labels: bool = False,
        unknown: str = "error",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the N items with the highest cosine similarity of factors to `itemid`, which comes first itself.

        Parameters
        ----------
        itemid : int or int array, shape (n,)
        N : int
        items : int array, optional
            Candidates; default: all items. `itemid` comes first only if it is one of them.
        filter_items : int array, optional
            Items to exclude.
        labels : bool
            `itemid`, `items` and `filter_items` are labels, and labels are returned.
        unknown : {"error", "drop"}
            Treatment of items that the model does not have, in all arguments. "drop" leaves unknown candidates out,
            gives an unknown `itemid` no neighbours, and logs a warning with their number.

        Returns
        -------
        ids : int32 array, shape (N,) or (n, N)
            Items with factors only; -1 if fewer than N are left, and for an item without factors (no training entries).
            With ``labels=True`` an object array of labels, with None in place of -1.
        scores : float array, same shape
            Cosine similarities; -inf where ids is -1.
        """
        return self._similar("item", itemid, N, {"items": items, "filter_items": filter_items}, labels, unknown)

    def similar_users(
        self,
        userid: Any,
        N: int = 10,
        *,
        users: Any = None,
        filter_users: Any = None,
        labels: bool = False,
        unknown: str = "error",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the N users with the highest cosine similarity of factors to `userid`; see `similar_items`."""
        return self._similar("user", userid, N, {"users": users, "filter_users": filter_users}, labels, unknown)

    def _similar(
        self, side: Side, ids: Any, N: int, chosen: dict[str, Any], labels: bool, unknown: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """`chosen` are the candidates and what to exclude, by the names of their arguments."""
        learned, by_label, strangers = self._fitted(), check_bool("labels", labels), Unknown.check(unknown, UNKNOWN)
        queries = positions_of(learned, side, f"{side}id", ids, by_label, strangers)
        allowed: np.ndarray | None = None
        for name, given in chosen.items():
            if given is not None:
                allowed = np.full(learned.count(side), name.startswith("filter_")) if allowed is None else allowed
                choose(allowed, learned, side, name, given, by_label, strangers)
        strangers.report()
        absent = strangers.absent(queries)
        queries = queries if absent is None else np.maximum(queries, 0)
        found, scores = neighbours(learned, side, queries, check_int("N", N, 1, MAX_N), allowed)
        if absent is not None:
            found[absent], scores[absent] = -1, -np.inf
        return shown(learned, side, found, scores, by_label, is_single(ids, by_label))

    def explain(
        self, userid: Any, itemid: Any, user_items: Any = None, N: int = 10, *, labels: bool = False
    ) -> Explanation:
        """Explain a recommendation: the score of an item as a sum over the entries of the user.

        Given the item factors, the factors of a user are a linear function of the user's entries, and so is each score
        (Hu, Koren and Volinsky 2008, section 5).

        Parameters
        ----------
        userid, itemid : int
            Positions, or with ``labels=True`` labels.
        user_items : Ratings or matrix, optional
            Row of the user, or ratings of all users. Default: the training entries.
        N : int
            Number of entries to return.
        labels : bool
            `userid` and `itemid` are labels, and labels are returned.

        Returns
        -------
        Explanation
            ``score``, of which ``baseline`` is the mean and the item's bias of a model with biases; ``ids``, the N
            items of the history with the largest contributions, best first, and ``contributions``. Fewer than N where
            the history is shorter. The sum of all contributions and the baseline is the score; it is that of
            ``recommend`` and ``predict(clip=False)`` where the user's factors are the exact solution for these entries.
            ``item_features`` and ``user_features`` name the features among the reasons, of a model that has some.

        Raises
        ------
        NotFittedError, TypeError, ValueError, UnknownLabelError
        """
        learned, by_label = self._fitted(), check_bool("labels", labels)
        user = positions_of(learned, "user", "userid", userid, by_label)
        item = positions_of(learned, "item", "itemid", itemid, by_label)
        if not is_single(userid, by_label) or not is_single(itemid, by_label):
            raise ValueError("explain takes one user and one item; call it for each pair")
        N = check_int("N", N, 1, MAX_N)
        if user_items is not None:
            row = given_rows(learned, user, "user_items", user_items)
        else:
            row = training_row(learned, int(user[0]))
        return contributions(learned, row, int(item[0]), N, by_label, rows_described(learned, "user", user))

    # ------------------------------------------------------------------------------------------------ vectors

    def to_torch(self) -> tuple[Any, Any]:
        """Copies of the factors as PyTorch tensors on the CPU; PyTorch has no read-only ones.

        Returns
        -------
        user_factors, item_factors : torch.Tensor, shapes (n_users, factors) and (n_items, factors)
            In the dtype of the computation. `set_factors` takes them back after changes.

        Raises
        ------
        NotFittedError
        ImportError
            PyTorch is not installed.
        """
        state = self._fitted().state
        torch = needed("torch", "to_torch needs PyTorch", "torch")
        return torch.from_dlpack(state.user.matrix.copy()), torch.from_dlpack(state.item.matrix.copy())

    def export_items(self, *, labels: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Vectors for an index of maximal inner products: their products with those of `export_users` are the scores.

        Parameters
        ----------
        labels : bool
            Return labels of the items; False, or for a model without labels: their positions.

        Returns
        -------
        vectors : float32 array, shape (n, d)
            Of the items with factors; d is `factors`, and two more for a model with biases.
        ids : array, shape (n,)
            Labels, or int64 positions.

        Raises
        ------
        NotFittedError, TypeError
        """
        learned, by_label = self._fitted(), check_bool("labels", labels)
        return _exported(learned, "item", np.flatnonzero(~blank_mask(learned, "item")), by_label)

    def export_users(self, userid: Any = None, *, labels: bool = False) -> np.ndarray:
        """Vectors of users, to search an index of the vectors of `export_items`.

        Parameters
        ----------
        userid : int or int array, shape (n,), optional
            Positions; default: all users.
        labels : bool
            `userid` is labels.

        Returns
        -------
        float32 array, shape (n, d), or (d,) for one user

        Raises
        ------
        NotFittedError, TypeError, ValueError, UnknownLabelError
        """
        learned, by_label = self._fitted(), check_bool("labels", labels)
        if userid is None:
            return _exported(learned, "user", np.arange(learned.shape[0]), False)[0]
        users = positions_of(learned, "user", "userid", userid, by_label)
        vectors, _ = _exported(learned, "user", users, False)
        return vectors[0] if is_single(userid, by_label) else vectors

    # ------------------------------------------------------------------------------------------------ predictions

    def predict(
        self,
        users: Any,
        items: Any = None,
        *,
        clip: Literal["auto", False] | tuple[float, float] = "auto",
        labels: bool = False,
        unknown: str = "error",
    ) -> np.ndarray:
        """Predict values of (user, item) pairs; for a matrix of rows, the best item for each row.

        Parameters
        ----------
        users : int or int array, shape (n_pairs,); or, if `items` is None, a table of pairs or a matrix
            A table of pairs is a data frame with columns of users and items, as `Ratings.from_frame` recognizes them,
            or ``ratings.entries``. It has one row for each pair, and its ids are labels where it has labels. A matrix
            has shape (n_rows, n_items).
        items : int or int array, shape (n_pairs,), optional
            Broadcast against `users`.
        clip : {"auto", False} or (low, high)
            "auto" clips predicted ratings to the range of the training values. It does not clip predictions of implicit
            feedback, nor those of model files written before the range was stored. False clips nothing; a pair clips to
            that range. Rankings do not depend on it.
        labels : bool
            `users` and `items` are labels; the best items of a matrix are returned as labels.
        unknown : {"error", "drop", "popular"}
            Treatment of ids that the model does not have. Under both others, a warning is logged with the number of
            pairs. "drop" predicts NaN, so that predictions match the pairs. "popular" predicts what is known without
            the unknown row: the mean rating plus the bias of the known row, or the mean alone in models without
            biases (NaN where a model file lacks it); for implicit feedback, the share of the users who like the item,
            and 0 for an unknown item. For a matrix, unknown items of labelled rows are left out.

        Returns
        -------
        float array, shape (n_pairs,) (a scalar for two scalars)
            ``mu + b_u + b_i + x_u.y_i``; for implicit feedback the predicted preference ``x_u.y_i``.
        int32 array, shape (n_rows,)
            If `users` is a matrix: each row is folded in, and the best item that it does not contain is returned, -1 if
            it contains all items. scikit-learn uses this form.

        Raises
        ------
        NotFittedError, TypeError, ValueError, RatingsError, UnknownLabelError
        """
        learned, by_label, strangers = self._fitted(), check_bool("labels", labels), Unknown.check(unknown)
        limits = learned.value_range
        if not (isinstance(clip, str) and clip == "auto"):
            limits = None if clip is False else check_range("clip", clip, '"auto", False or a pair (low, high)')
        if items is None and not is_pairs(users):
            if not sp.issparse(users) and not isinstance(users, (Ratings, Store)) and np.ndim(users) < 2:
                raise ValueError(
                    f"Expected 2D array, got {np.ndim(users)}D array instead: predict(users, items) takes ids of both, "
                    "predict(matrix) rows of ratings. Reshape your data (array.reshape(1, -1): one row) or pass items"
                )
            self._check_names(learned, users)
            rows = self._new_rows(learned, users, "users", unknown=strangers.of_entries)
            best = self._serving_for(learned, rows).recommend(np.arange(rows.shape[0]), N=1)[0][:, 0]
            return labelled(learned, "item", best) if by_label else best
        user_ids, item_ids = pairs_of(learned, users, items, by_label, strangers)
        strangers.report()
        values = predicted(learned, user_ids, item_ids, strangers.rule)
        if limits is not None:
            np.clip(values, *limits, out=values)
        return values[0] if items is not None and is_single(users, by_label) and is_single(items, by_label) else values

    # ------------------------------------------------------------------------------------------------ fold-in

    def _rows(self, learned: Learned, rows: Any, name: str, users: Any, **how: Any) -> sp.csr_array:
        """A matrix for the kernels of the fitted model: in its dtype, with labelled ratings in the order of `users`.

        `how` are ``unknown`` and ``owner`` of `align`.
        """
        matrix = learned.entries(numeric_matrix(self, rows, name), name, repeats=users is IN_ORDER)
        return align(matrix, labels_of(rows), (users, learned.item_ids), name=name, **{"unknown": None} | how)[0]

    def _new_rows(
        self, learned: Learned, rows: Any, name: str = "user_items", users: Any = IN_ORDER, **how: Any
    ) -> sp.csr_array:
        """Rows over the model's items, validated; messages name both axes. `how` is that of `_rows`."""
        rows = one_row(as_ratings(rows, name, users=users is not IN_ORDER))
        matrix, n = self._rows(learned, rows, name, users, **how), learned.shape[1]
        if matrix.shape[1] != n:
            shape = matrix.shape
            hint = f"; rows are users and columns are items: pass {name}.T" if shape[0] == n else ""
            raise RatingsError(
                f"X has {shape[1]} features, but {type(self).__name__} is expecting {n} features as input: "
                f"{name} has shape {shape}, expected (n_rows, n_items={n}){hint}"
            )
        if not sp.issparse(rows) and not isinstance(rows, (Ratings, Store)):
            check_columns(self._holding(learned), rows)
        return matrix

    def _check_names(self, learned: Learned, rows: Any) -> None:
        """Compare the columns of a frame with those of the fit as scikit-learn does; other methods align them."""
        if learned.feature_names is not None and is_wide(rows):
            check_columns(self._holding(learned), rows)

    def _training_rows(self, learned: Learned, rows: Any, unknown: str) -> sp.csr_array:
        """A matrix whose rows are the training users, with labelled ratings reordered to match."""
        rows = one_row(as_ratings(rows, "user_items"))
        matrix = self._rows(learned, rows, "user_items", learned.user_ids, unknown=unknown)
        check_shape("user_items", matrix, learned.shape, ("n_users", "n_items"))
        return matrix

    def transform(self, user_items: Any, features: Any = None) -> np.ndarray:
        """Compute factors of new rows with the exact solver (fold-in); a training row gets its training factors.

        Parameters
        ----------
        user_items : Ratings, or sparse or dense matrix, shape (n_rows, n_items)
            Labelled items are aligned by label. The rows of a data frame of entries are its users in the order of
            ``Ratings.from_frame(user_items).user_ids``.
        features : frame, mapping, Features or matrix, optional
            Features of the rows, as for `recommend_new`. The result is then an array, whatever `set_output` says.

        Returns
        -------
        float array, shape (n_rows, factors), or (n_rows, factors + 1) for a model with biases
            In the dtype of the computation. The last column of a model with biases is the row's bias, so the
            predictions of ``rows = model.transform(user_items)`` are ``rows[:, :-1] @ model.item_factors_.T +
            rows[:, -1:] + model.item_bias_ + model.mean_``; without biases, ``rows @ model.item_factors_.T``.
        """
        return transformed(self._holding(), user_items) if features is None else self._factors_of(user_items, features)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the columns of `transform`: the name of the class in small letters, and a number."""
        from sklearn.base import ClassNamePrefixFeaturesOutMixin

        return ClassNamePrefixFeaturesOutMixin.get_feature_names_out(self._holding(), input_features)

    def _factors_of(self, user_items: Any, features: Any = None) -> np.ndarray:
        learned = self._fitted()
        self._check_names(learned, user_items)
        matrix, described = self._new_rows(learned, user_items), None
        if features is not None:
            names = _names_of_rows(user_items, "user_items")
            described = described_rows(learned, "user", features, names, matrix.shape[0])
        factors = fold_in(learned, "user", matrix, described)
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
        learned = self._fitted()
        matrix = self._training_rows(learned, user_items, unknown)
        engine, state = engine_for(learned.plan), learned.state
        if learned.features:
            state = replace(state, user=learned.solved("user"), item=learned.solved("item"))
        try:
            value = engine.objective_value(learned.objective, matrix, state)
        except DeviceMemoryError as error:  # ratings that the fit streamed to a GPU do not fit on it
            logger.info("%s; the CPU computes the objective", error)
            on_cpu = engine_for(learned.plan.changed(gpu=None))
            value = on_cpu.objective_value(learned.objective, matrix, state)
        return value + sum(explained(learned, side, matrix) for side in learned.features)

    # ------------------------------------------------------------------------------------------------ updates

    def partial_fit_users(self, ids: Any, rows: Any, *, labels: Any = None, features: Any = None) -> Self:
        """Update or add users by folding in their rows; item factors do not change.

        Parameters
        ----------
        ids : int or int array, shape (n,)
            Positions. Positions >= n_users add users (skipped positions get zero factors). With ``labels=True``,
            labels: known ones are updated, and unknown ones are added in their order.
        rows : Ratings, or sparse or dense matrix, shape (n, n_items)
            All entries of each of these users, in the order of `ids`; labelled ratings are aligned by label.
        labels : True, or array, shape (n,), optional
            True: `ids` are labels (of a model without labels, positions). An array: labels of users at the positions
            `ids`, required for new users of a model with labels.
        features : frame, mapping, Features or matrix, optional
            Features of these users, of a model fitted with `user_features`, matched by label if both have labels, else
            in the order of `ids`: see `Features.encode`. Default: those that the model has.

        Returns
        -------
        self
        """
        rows = as_ratings(rows, "rows")
        with self._lock:
            learned = self._fitted()
            positions, names = updated_labels(learned, "user", ids, labels)
            wanted = updated_axis("rows", rows, 0, positions, names)
            matrix = self._new_rows(learned, rows, "rows", users=wanted, owner="the model or to ids")
            check_shape("rows", matrix, (len(positions), learned.shape[1]), ("n_ids", "n_items"))
            self._learn(updated(learned, "user", positions, matrix, names, features))
        return self

    def partial_fit_items(self, ids: Any, cols: Any, *, labels: Any = None, features: Any = None) -> Self:
        """Update or add items by folding in their columns; user factors do not change.

        Parameters
        ----------
        ids : int or int array, shape (n,)
            Positions or labels of items, as for `partial_fit_users`.
        cols : Ratings, or sparse or dense matrix, shape (n_users, n)
            All entries of each of these items, as columns in the order of `ids`; labelled ratings are aligned by label.
        labels, features
            As for `partial_fit_users`. An item without entries in `cols` has the factors of its features.

        Returns
        -------
        self
        """
        cols = as_ratings(cols, "cols")
        with self._lock:
            learned = self._fitted()
            positions, names = updated_labels(learned, "item", ids, labels)
            matrix = learned.entries(one_column(cols), "cols")
            want = (learned.user_ids, updated_axis("cols", cols, 1, positions, names))
            matrix, _ = align(matrix, labels_of(cols), want, name="cols", unknown=None, owner="the model or to ids")
            check_shape("cols", matrix, (learned.shape[0], len(positions)), ("n_users", "n_ids"))
            rows = transposed(matrix, learned.plan.num_threads)
            grown = updated(learned, "item", positions, rows, names, features)
            self._learn(grown)
            self.n_features_in_ = grown.shape[1]
            if grown.feature_names is None:
                vars(self).pop("feature_names_in_", None)  # the new columns have no names
        return self

    def set_factors(
        self, user_factors: Any = None, item_factors: Any = None, *, user_bias: Any = None, item_bias: Any = None
    ) -> Self:
        """Replace the factors of all users or all items, for example by edited copies of `user_factors_`.

        Every later call uses them, `save` included; calls in progress keep the old ones. What is not given stays as it
        is, and so do the training entries.

        Parameters
        ----------
        user_factors : float array, shape (n_users, factors), optional
            Copied in the dtype of the computation. To add users, use `partial_fit_users`.
        item_factors : float array, shape (n_items, factors), optional
        user_bias : float array, shape (n_users,), optional
            For models with biases.
        item_bias : float array, shape (n_items,), optional

        Returns
        -------
        self

        Raises
        ------
        NotFittedError
        TypeError, ValueError
            No array is given; or one has another shape, values that are not finite or, in a nonnegative model, negative
            factors.
        """
        with self._lock:
            given: dict[Side, tuple[Any, Any]] = {"user": (user_factors, user_bias), "item": (item_factors, item_bias)}
            self._learn(with_factors(self._fitted(), given))
        return self

    # ------------------------------------------------------------------------------------------------ score

    def score(
        self,
        user_items: Any,
        y: Any = None,
        *,
        users: str = "auto",
        unknown: str = "error",
        metric: str | Callable[..., Any] | None = None,
    ) -> float:
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
        metric : str or callable, optional
            A metric of `evaluate`. Default: "rmse" for explicit feedback, "ndcg@10" for implicit.

        Returns
        -------
        float
            The metric; "rmse" and "mae" with a minus.
        """
        learned = self._fitted()
        check_choice("users", users, ("auto", "training", "new"))
        self._check_names(learned, user_items)
        user_items = as_ratings(user_items, "user_items")
        named = _has_labels_of_training_users(learned, user_items, unknown)
        training = users == "training" or (users == "auto" and bool(named))
        if named is None or not training:  # else aligned once, below: it reports what it leaves out
            matrix = self._new_rows(learned, user_items, unknown=unknown)
            if users == "auto" and named is None and matrix.shape == learned.shape:  # all or none are known
                training = learned.is_training_data(matrix) or not learned.overlaps(matrix)
        if training:
            matrix = self._training_rows(learned, user_items, unknown)
            # training entries are ranked among all items, held-out entries among unseen items
            seen = sp.csr_array(matrix.shape, dtype=np.int8) if learned.is_training_data(matrix) else None
            return _held_out_score(self._holding(learned), matrix, metric, seen)
        shown, hidden = _hide_every_fifth(matrix)
        return _held_out_score(self._serving_for(learned, shown), hidden, metric)

    def _serving_for(self, learned: Learned, rows: sp.csr_array) -> Any:
        """A copy of this model whose users are the given new rows."""
        state = learned.state.with_side("user", fold_in(learned, "user", rows))
        features = {side: known for side, known in learned.features.items() if side == "item"}
        changed: dict[str, Any] = {"total": None, "user_ids": None, "values": rows.data, "features": features}
        return self._holding(replace(learned, state=state, seen=pattern(rows), **changed))

    def _validation_metric(self) -> str:
        return "ndcg@10" if self._fitted().objective.is_implicit else "rmse"


def _held_out_score(model: Any, held_out: sp.csr_array, metric: Any, seen: sp.csr_array | None = None) -> float:
    from ..metrics import evaluate

    metric = model._validation_metric() if metric is None else metric
    ((name, value),) = evaluate(model, held_out, train=seen, metrics=(metric,)).items()
    return -value if name in LOWER_IS_BETTER else value


def _has_labels_of_training_users(learned: Learned, given: Any, unknown: str) -> bool | None:
    """Whether labelled rows are of training users: all of them, or under "drop" any; None without labels."""
    have = labels_of(given)
    if have is None or have[0] is None or learned.user_ids is None:
        return None
    theirs, ours = set(have[0].tolist()), set(learned.user_ids.tolist())
    return bool(theirs & ours) if unknown == "drop" else theirs <= ours


_Array = TypeVar("_Array", np.ndarray, "np.ndarray | None")


def _read_only(array: _Array) -> _Array:
    """A view that cannot be written to, since what serving derived from the values would not follow; None for None."""
    if array is None:
        return None
    view = array.view()
    view.flags.writeable = False
    return view


def _exported(learned: Learned, side: Side, rows: np.ndarray, by_label: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scoring rows of a side, and their labels or positions."""
    vectors = scoring_rows(learned.state.side(side).take(rows), side, learned.state.mean)
    ids = learned.labels(side)
    return np.ascontiguousarray(vectors, dtype=np.float32), ids[rows] if by_label and ids is not None else rows


def _names_of_rows(rows: Any, name: str) -> np.ndarray | None:
    """Labels of the users of rows, None where these have none."""
    return (labels_of(as_ratings(rows, name, users=False)) or (None,))[0]


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
