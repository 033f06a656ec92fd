"""Distribution of the ratings over ranks: what each rank starts with, and how it gets the entries that it needs.

A rank has all ratings (`WholeRatings`), reads its rows from a store (`StoredRatings`), or starts with arbitrary
entries, which are then sent to the ranks that solve their rows (`SharedEntries`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..core.objective import SIDES, Side, other_side
from ..core.sparse import transposed
from ..core.validate import from_triplets
from ..data.fingerprint import fingerprint
from ..data.labels import label_of
from ..data.slabs import InMemory, Orientation
from ..data.store import Store, StoreMatrix
from ..errors import CommunicatorError, DuplicateEntriesError
from ..plan.grid import RankLayout
from .transport.communicator import Communicator

FINGERPRINT_BYTES = 96  # bytes of the buffer that sends a fingerprint to the other ranks


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
        pair: dict[Side, int] = {side: int(rows[order[same[0]]]), other_side(side): int(columns[order[same[0]]])}
        user, item = label_of(self.user_ids, pair["user"]), label_of(self.item_ids, pair["item"])
        raise DuplicateEntriesError(
            f"ratings have user {user}, item {item} more than once ({same.size} such repeats on this rank); "
            'say what to do with them: duplicates="sum", "mean" or "max"'
        )


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
