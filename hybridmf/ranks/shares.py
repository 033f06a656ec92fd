"""Distribution of the ratings over ranks: what each rank starts with, and the blocks that it computes with.

A rank has all ratings (`WholeRatings`), reads its rows from a store (`StoredRatings`), or starts with arbitrary
entries, which are then sent to the ranks that solve their rows (`SharedEntries`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Objective, Side, other_side, rating_scale
from ..core.sparse import ValueSummary, transposed
from ..core.validate import from_triplets, make_csr
from ..data.fingerprint import Checksum, checksum_of, fingerprint, join_checksums, join_fingerprints
from ..data.slabs import InMemory, Orientation
from ..data.store import Store, StoreMatrix
from ..errors import CommunicatorError, DuplicateEntriesError
from ..plan.grid import Grid, RankLayout
from .transport.communicator import Communicator, gather

FINGERPRINT_BYTES = 96
"""Bytes of the buffer that sends a fingerprint to the other ranks."""


def check_same_data(communicator: Communicator, identity: str) -> None:
    """Compare an identifier of the data over all ranks, such as `checkpoint.fingerprint`."""
    own = np.zeros((1, FINGERPRINT_BYTES), dtype=np.uint8)
    text = identity.encode()[:FINGERPRINT_BYTES]
    own[0, : len(text)] = np.frombuffer(text, dtype=np.uint8)
    found = [bytes(row).rstrip(b"\0").decode() for row in communicator.allgatherv(own, [1] * communicator.size)]
    for rank, other in enumerate(found):
        if other != found[0]:
            raise CommunicatorError(
                f"rank {rank} has other data than rank 0: {other} and {found[0]} (users x items - entries - checksum); "
                "give all ranks the same ratings"
            )


class RankRatings:
    """The ratings of one rank, by default ones that every rank has or can read. All ranks call the methods together."""

    shape: tuple[int, int]
    matrix: sp.csr_array | StoreMatrix | None = None  # all ratings, if this rank has them or can read them
    user_ids: np.ndarray | None = None  # labels, if the first rank has them
    item_ids: np.ndarray | None = None
    slab: int | None = None  # entries of the largest slab, if the ratings are in a store
    # unit of the confidences if values stand for weights; see `hybridmf.model.weights.weighted_entries`
    unit: float | None = None
    total: float = 0.0  # sum of the values before they stood for weights, if they do
    _identity: str  # of the data, equal on all ranks
    _sides: Mapping[Side, Orientation]

    def degrees(self, communicator: Communicator) -> dict[Side, np.ndarray]:
        """Entries of each row of both sides on all ranks, for even shares; repeated pairs may count twice."""
        check_same_data(communicator, self._identity)
        return {side: self._sides[side].degrees.astype(np.int64, copy=False) for side in SIDES}

    def block(self, communicator: Communicator, layout: RankLayout, side: Side, streamed: bool = False) -> Orientation:
        """Entries of this rank while `side` is solved, as by `RankLayout.cut`; in memory, unless they are streamed."""
        part = layout.cut(side, communicator.rank, self._sides[side])
        return part if streamed else part.load()


class WholeRatings(RankRatings):
    """Ratings in memory, a canonical csr_array of shape (n_users, n_items), that are complete on every rank."""

    def __init__(
        self,
        matrix: sp.csr_array,
        user_ids: np.ndarray | None = None,
        item_ids: np.ndarray | None = None,
        unit: float | None = None,
        total: float = 0.0,
    ) -> None:
        self.shape, self.matrix, self.unit, self.total = matrix.shape, matrix, unit, total
        self.user_ids, self.item_ids = user_ids, item_ids
        self._identity = fingerprint(matrix)
        self._sides = {"user": InMemory(matrix), "item": InMemory(transposed(matrix))}


class StoredRatings(RankRatings):
    """Ratings in a store that every rank can read; each rank maps the slabs with its rows."""

    def __init__(self, store: Store, dtype: Any, drop_zeros: bool) -> None:
        users = StoreMatrix(store, "user", dtype, drop_zeros)
        self.shape, self.matrix = store.shape, users
        self.user_ids, self.item_ids = store.user_ids, store.item_ids
        self._sides = {"user": users, "item": users.transposed()}
        self.slab = users.largest_slab
        self.total, self.value_range = users.total, users.value_range
        self._identity = f"store {store.checksum}"


class SharedEntries(RankRatings):
    """Entries of the ratings, distributed over ranks in any way; `users` and `items` are positions.

    `drop_zeros` also drops entries whose duplicates, on the same or on different ranks, add up to 0.
    """

    def __init__(
        self,
        users: np.ndarray,
        items: np.ndarray,
        values: np.ndarray,
        shape: tuple[int, int],
        *,
        dtype: Any = np.float32,
        drop_zeros: bool = False,
        duplicates: str = "error",
        labels: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
    ) -> None:
        self.shape, (self.user_ids, self.item_ids) = shape, labels
        self._how = {"dtype": dtype, "drop_zeros": drop_zeros, "duplicates": duplicates}
        self._at: dict[Side, np.ndarray] = {"user": users, "item": items}
        self._values = np.asarray(values, dtype=np.float64)

    def degrees(self, communicator: Communicator) -> dict[Side, np.ndarray]:
        own = {side: np.bincount(self._at[side], minlength=n) for side, n in zip(SIDES, self.shape, strict=True)}
        return {side: communicator.allreduce(counts.astype(np.int64)) for side, counts in own.items()}

    def block(self, communicator: Communicator, layout: RankLayout, side: Side, streamed: bool = False) -> Orientation:
        """Send entries to the ranks that need them."""
        rank, grid, other = communicator.rank, layout.grids[side], other_side(side)
        rows, columns = self._at[side], self._at[other]
        dest = owners(layout.bounds[other], columns) // grid.groups * grid.groups
        dest += owners(layout.bounds[side], rows) % grid.groups
        rows, columns, values = exchange(communicator, dest, [rows, columns, self._values])

        ranges = layout.ranges(side, rank)
        starts = np.concatenate(([0], np.cumsum([last - first for first, last in ranges])))
        member = owners(layout.bounds[side], rows) // grid.groups
        firsts = np.array([first for first, _ in ranges])
        local = starts[member] + rows - firsts[member]
        first, last = layout.columns(side, rank)
        self._check_pairs(side, rows, columns)
        return InMemory(from_triplets(local, columns - first, values, (int(starts[-1]), last - first), **self._how))

    def _check_pairs(self, side: Side, rows: np.ndarray, columns: np.ndarray) -> None:
        """Raise for a pair that occurs more than once, if that is an error, with its ids in the whole matrix."""
        if self._how["duplicates"] != "error":
            return
        order = np.lexsort((columns, rows))
        same = np.flatnonzero((np.diff(rows[order]) == 0) & (np.diff(columns[order]) == 0))
        if not same.size:
            return
        pair = {side: int(rows[order[same[0]]]), other_side(side): int(columns[order[same[0]]])}
        user, item = (_name(ids, pair[each]) for each, ids in (("user", self.user_ids), ("item", self.item_ids)))  # type: ignore[index]
        raise DuplicateEntriesError(
            f"ratings have user {user}, item {item} more than once ({same.size} such repeats on this rank); "
            'say what to do with them: duplicates="sum", "mean" or "max"'
        )


def _name(ids: np.ndarray | None, position: int) -> str:
    return str(position) if ids is None else repr(ids[position : position + 1].tolist()[0])


def owners(bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Owner of each row: rank r owns rows ``bounds[r] ... bounds[r + 1] - 1``."""
    return np.searchsorted(bounds[1:], rows, side="right")


def exchange(communicator: Communicator, dest: np.ndarray, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Send entry k of each array to rank ``dest[k]``; received entries are in the order of their source ranks."""
    rank, size = communicator.rank, communicator.size
    order = np.argsort(dest, kind="stable")
    bounds = np.concatenate(([0], np.cumsum(np.bincount(dest, minlength=size)))).astype(np.int64)
    counts = communicator.allgatherv(np.diff(bounds)[None], [1] * size)  # from, to
    received: list[list[np.ndarray]] = [[] for _ in arrays]
    for array, out in zip(arrays, received, strict=True):
        array = array[order]
        arrived = {rank: array[bounds[rank] : bounds[rank + 1]]}
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            like = np.empty(int(counts[source, rank]), dtype=array.dtype)
            arrived[source] = communicator.sendrecv(array[bounds[to] : bounds[to + 1]], to, source, like)
        out += [arrived[source] for source in range(size)]
    return [np.concatenate(arrived) for arrived in received]


class RankBlocks:
    """The ratings of a rank during a fit, in memory unless they are streamed from a store.

    Degrees, total and range of the values are those of all ranks, repeated pairs merged.
    """

    def __init__(
        self,
        communicator: Communicator,
        ratings: RankRatings,
        degrees: Mapping[Side, np.ndarray],
        grids: Mapping[Side, Grid],
        row_cost: float,
        streamed: bool = False,
    ) -> None:
        self.layout = RankLayout.even(degrees, grids, row_cost)
        self._communicator, self._ratings, self._streamed = communicator, ratings, streamed
        self.blocks = {side: ratings.block(communicator, self.layout, side, streamed) for side in SIDES}
        self._checksum: Checksum | None = None
        self._squares: float | None = None
        if isinstance(ratings, StoredRatings) and streamed:
            self.degrees, self.total, self.value_range = dict(degrees), ratings.total, ratings.value_range
            self.nnz = int(self.degrees["user"].sum())
            return
        rows = self._own_users().load().csr  # each entry once, in the order of the whole matrix
        counts = self.layout.counts("user", range(communicator.size))
        n_items = ratings.shape[1]
        self.degrees = {
            "user": communicator.allgatherv(np.diff(rows.indptr).astype(np.int64), counts),
            "item": communicator.allreduce(np.bincount(rows.indices, minlength=n_items).astype(np.int64)),
        }
        self.nnz = int(self.degrees["user"].sum())
        own = ValueSummary.of([rows.data])
        self.total = float(communicator.allreduce(np.array([own.total]))[0])
        extremes = np.array([own.value_range or (np.inf, -np.inf)])
        extremes = communicator.allgatherv(extremes, [1] * communicator.size)
        low, high = float(extremes[:, 0].min()), float(extremes[:, 1].max())
        self.value_range = (low, high) if low <= high else None
        self._checksum, self._squares = checksum_of(rows), own.squares

    def _own_users(self) -> Orientation:
        """Complete rows of the users that this rank owns; one slab in memory, unless they are streamed."""
        if self.layout.grids["user"].splits == 1:
            return self.blocks["user"]
        alone = RankLayout(self.layout.bounds, dict.fromkeys(SIDES, Grid(1, self._communicator.size)))
        return self._ratings.block(self._communicator, alone, "user", self._streamed)

    def rows_of_users(self, wanted: np.ndarray) -> sp.csr_array | None:
        """Entries of the users of a mask on the first rank, each int8 1, and no others; None on the other ranks."""
        found, at = [np.empty(0, dtype=np.int32)], self.layout.own("user", self._communicator.rank)[0]
        for rows in self._own_users().matrices():
            here = wanted[at : at + rows.shape[0]]
            found.append(rows.indices[np.repeat(here, np.diff(rows.indptr))])
            at += rows.shape[0]
        degrees = np.where(wanted, self.degrees["user"], 0)
        indptr = np.concatenate(([0], np.cumsum(degrees)))
        indices = gather(
            self._communicator, np.concatenate(found), np.diff(indptr[self.layout.bounds["user"]]).tolist()
        )
        if indices is None:
            return None
        return make_csr(indptr, indices, np.ones(len(indices), dtype=np.int8), self._ratings.shape)

    def item_likes(self) -> np.ndarray | None:
        """Positive entries of each item on all ranks, int64; None if all entries are positive."""
        if self.value_range is None or self.value_range[0] > 0:
            return None
        likes = np.zeros(self._ratings.shape[1], dtype=np.int64)
        for part in self._own_users().matrices():
            likes += np.bincount(part.indices[part.data > 0], minlength=len(likes))
        return self._communicator.allreduce(likes)

    def scale(self, objective: Objective) -> float:
        """Scale that standardizes all ratings; streamed ratings are read for it."""
        if objective.is_implicit:
            return 1.0
        if self._squares is None:
            self._squares = ValueSummary.of(rows.data for rows in self._own_users().matrices()).squares
        squares = float(self._communicator.allreduce(np.array([self._squares]))[0])
        return rating_scale(self.total, squares, self.nnz, objective.biases)

    def fingerprint(self) -> str:
        """`checkpoint.fingerprint` of the whole matrix; streamed ratings are read for it."""
        if self._checksum is None:
            users = self._own_users()
            self._checksum = join_checksums(map(checksum_of, users.matrices()), users.dtype.itemsize)
        own = np.array([self._checksum], dtype=np.int64)
        checksums = self._communicator.allgatherv(own, [1] * self._communicator.size).tolist()
        indptr = np.concatenate(([0], np.cumsum(self.degrees["user"])))
        return join_fingerprints(indptr, checksums, self._ratings.shape)
