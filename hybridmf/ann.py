"""Approximate top-N by indexes of other libraries, faiss and usearch (extra ``ann``), over the inner products.

Up to a hundred thousand items, exact `recommend` takes less time than an index (docs/interop.md has figures); indexes
suit more items, and systems that already use one. The index receives the vectors unchanged; an additional column that
makes all norms equal is needed only by indexes that support only L2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .core.system import needed
from .core.validate import MAX_N, check_bool, check_ids, check_int
from .model.ranking import seen_by
from .model.serving import ServingMixin

Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""Function of queries, shape (n, rank), and k: places of vectors, -1 for none, and inner products, shape (n, k)."""


class AnnIndex:
    """Recommendations of a fitted model through an index of its item vectors.

    `faiss_index` and `usearch_index` create it; for other libraries, build it from ``model.export_items()``.

    Parameters
    ----------
    model : fitted estimator
    search : callable
        ``search(queries, k)`` returns the places of the k vectors with the largest inner products, best first, -1 for
        none, and these products; places are rows of ``model.export_items()``.
    index : object
        Kept as the attribute `index`, to save it or to change its parameters.

    Attributes
    ----------
    index : object
    """

    def __init__(self, model: ServingMixin, search: Search, index: Any = None) -> None:
        self.index = index
        self._search = search
        self._model, self._items = model, model._fitted().state.item
        self._positions = model.export_items(labels=False)[1]

    def recommend(
        self, userid: Any, user_items: Any = None, N: int = 10, filter_already_liked_items: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """The N items with the highest scores among those that the index finds.

        The search requests N items plus the number of seen items, and then removes the seen ones.

        Parameters
        ----------
        userid : int or int array, shape (n,)
            Positions of users.
        user_items : Ratings or sparse matrix, shape (n, n_items), optional
            Items seen by each user, as for `recommend` of the model. Default: its training entries.
        N : int
        filter_already_liked_items : bool

        Returns
        -------
        ids : int32 array, shape (N,) for one user, (n, N) for several
            -1 if fewer than N items are found, and for users without factors.
        scores : float32 array, same shape

        Raises
        ------
        TypeError, ValueError
            Also if the vectors of the items have changed since the index was made, by `fit` or `partial_fit_items`.
        """
        model = self._model._holding()
        if model._fitted().state.item is not self._items:
            raise ValueError("the items of the model have changed since this index was made; make another one of it")
        users = check_ids("userid", userid, model.n_users, "n_users")
        N = check_int("N", N, 1, MAX_N)
        ids = np.full((len(users), N), -1, dtype=np.int32)
        scores = np.full((len(users), N), -np.inf, dtype=np.float32)
        seen = None
        if check_bool("filter_already_liked_items", filter_already_liked_items):
            seen = seen_by(model._fitted(), users, user_items)
        queries = model.export_users(users)
        warm = np.flatnonzero(~model.cold_users_[users])
        more = np.zeros(len(users), dtype=np.int64) if seen is None else np.diff(seen.indptr)
        # users with similar numbers of seen items form a group, so that one with thousands does not slow down all
        asked = np.minimum(N + 2 ** np.ceil(np.log2(more + 1)).astype(np.int64) - 1, len(self._positions))
        for k in np.unique(asked[warm]):
            rows = warm[asked[warm] == k]
            places, products = self._search(np.ascontiguousarray(queries[rows]), int(k))
            found = np.where(places >= 0, self._positions[places], -1)
            for row, items, values in zip(rows, found, products, strict=True):
                kept = items >= 0
                if seen is not None:
                    kept &= ~np.isin(items, seen.indices[seen.indptr[row] : seen.indptr[row + 1]])
                best = np.flatnonzero(kept)[:N]
                ids[row, : len(best)], scores[row, : len(best)] = items[best], values[best]
        return (ids[0], scores[0]) if np.ndim(userid) == 0 else (ids, scores)

    def recall(self, userid: Any, N: int = 10) -> float:
        """Share of the N best items, by ``model.recommend``, that the index finds, over some users.

        Parameters
        ----------
        userid : int array, shape (n,)
        N : int
        """
        users = check_ids("userid", userid, self._model.n_users, "n_users")
        exact, _ = self._model.recommend(users, N=N, cold_users="mask")
        found, _ = self.recommend(users, N=N)
        hits = [len(np.intersect1d(a[a >= 0], b)) for a, b in zip(exact, found, strict=True)]
        return sum(hits) / max(1, int(np.count_nonzero(exact >= 0)))


def faiss_index(
    model: ServingMixin,
    *,
    neighbors: int = 32,
    construction: int = 200,
    search: int = 200,
    num_threads: int | None = None,
) -> AnnIndex:
    """An HNSW index of faiss over the items.

    Parameters
    ----------
    model : fitted estimator
    neighbors, construction, search : int
        faiss's M, efConstruction and efSearch: larger values have a higher recall and take longer.
    num_threads : int, optional
        Default: that of faiss. faiss has one number of threads for the whole process, which this sets.

    Raises
    ------
    ImportError
        faiss is not installed.
    """
    faiss = needed("faiss", "faiss_index needs faiss", '"hybridmf[ann]"')
    if num_threads is not None:
        faiss.omp_set_num_threads(check_int("num_threads", num_threads, 1))
    vectors, _ = model.export_items(labels=False)
    index = faiss.IndexHNSWFlat(vectors.shape[1], check_int("neighbors", neighbors, 2), faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = check_int("construction", construction, 1)
    index.hnsw.efSearch = check_int("search", search, 1)
    index.add(vectors)

    def find(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        products, places = index.search(queries, k)
        return places, products

    return AnnIndex(model, find, index)


def usearch_index(
    model: ServingMixin, *, neighbors: int = 32, construction: int = 200, search: int = 200, num_threads: int = 0
) -> AnnIndex:
    """An HNSW index of usearch over the items.

    Parameters
    ----------
    model : fitted estimator
    neighbors, construction, search : int
        usearch's connectivity, expansion_add and expansion_search: larger values have a higher recall and take longer.
    num_threads : int
        0: all cores.

    Raises
    ------
    ImportError
        usearch is not installed.
    """
    usearch = needed("usearch.index", "usearch_index needs usearch", '"hybridmf[ann]"')
    num_threads = check_int("num_threads", num_threads, 0)
    vectors, _ = model.export_items(labels=False)
    index = usearch.Index(
        ndim=vectors.shape[1],
        metric="ip",
        dtype="f32",
        connectivity=check_int("neighbors", neighbors, 2),
        expansion_add=check_int("construction", construction, 1),
        expansion_search=check_int("search", search, 1),
    )
    index.add(np.arange(len(vectors)), vectors, threads=num_threads)

    def find(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        index.expansion_search = max(search, k)
        found = index.search(queries, k, threads=num_threads)
        places, products = np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, dtype=np.float32)
        keys, distances = np.atleast_2d(found.keys), np.atleast_2d(found.distances)
        filled = np.arange(keys.shape[1]) < np.atleast_1d(np.asarray(getattr(found, "counts", keys.shape[1])))[:, None]
        places[:, : keys.shape[1]] = np.where(filled, keys.astype(np.int64), -1)
        products[:, : keys.shape[1]] = np.where(filled, 1 - distances, -np.inf)
        return places, products

    return AnnIndex(model, find, index)
