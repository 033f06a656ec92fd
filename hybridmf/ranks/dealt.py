"""Ratings in memory that several GPUs upload, check and transpose together, each its share of the users.

A GPU uploads the rows of the users that it will solve, and transposes them. Each range of items of this transpose goes
to the GPU that will solve these items. A GPU that has its items from all ranges of users transposes twice: first into
the order of users, then into that of its items. So each GPU holds and sends its share only, and the arrays are those of
a transposition on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ..device.cuda import Array, Device
from ..gpu.intake import uploaded
from ..gpu.matrix import DeviceMatrix
from ..plan.grid import even_bounds
from .transport.communicator import Communicator


@dataclass(frozen=True)
class Dealt:
    """A canonical CSR matrix of which each GPU has a range of rows, or until they are sent by `block`, of columns."""

    shape: tuple[int, int]
    indptr: np.ndarray  # int64 array, shape (n_rows + 1,): Of the whole matrix, on the host
    parts: list[DeviceMatrix]  # by rank
    bounds: np.ndarray  # int64 array, shape (ranks + 1,): Rank r has the users ``bounds[r] ... bounds[r + 1] - 1``
    by_item: bool = False  # whether rows are items, so that each GPU has a range of columns

    @property
    def nnz(self) -> int:
        return int(self.indptr[-1])

    @property
    def degrees(self) -> np.ndarray:
        return np.diff(self.indptr)

    def block(self, device: Device, communicator: Communicator, bounds: np.ndarray) -> DeviceMatrix:
        """The rows ``bounds[r] ... bounds[r + 1] - 1`` that rank r solves; all ranks call it together, once."""
        (rank, size), n_users = (communicator.rank, communicator.size), self.shape[1]
        if not self.by_item:
            assert np.array_equal(bounds, self.bounds)
            return self.parts[rank]
        pointers = [part.indptr[bounds[rank] : bounds[rank + 1] + 1] for part in self.parts]
        entries = self._exchanged(device, communicator, bounds, [int(pointer[-1] - pointer[0]) for pointer in pointers])
        # the items of one range of users after those of another: a user has its items in one of these ranges
        indptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.concatenate([*map(np.diff, pointers)]))))
        n_items = len(pointers[rank]) - 1
        shape = (size * n_items, n_users)
        by_user = DeviceMatrix(shape, indptr, device.upload(indptr), *entries, entries[1].dtype).transposed(device)
        del entries
        items = by_user.indices
        items %= np.int32(max(1, n_items))
        return replace(by_user, shape=(n_users, n_items)).transposed(device)

    def _exchanged(
        self, device: Device, communicator: Communicator, bounds: np.ndarray, sizes: list[int]
    ) -> tuple[Array, Array]:
        """Users and values of the own items, `sizes` of them from each rank, in the order of ranks."""
        rank, size = communicator.rank, communicator.size
        own, ends = self._taken(rank), np.cumsum([0, *sizes]).tolist()
        users, values = device.empty(ends[-1], np.int32), device.empty(ends[-1], own.dtype)
        numbers = own.indices
        numbers += np.int32(self.bounds[rank])  # of users in the whole matrix
        for step in range(size):
            to, source = (rank + step) % size, (rank - step) % size
            sent, here = slice(*own.indptr[bounds[to : to + 2]].tolist()), slice(ends[source], ends[source + 1])
            users[here] = communicator.sendrecv(numbers[sent], to, source, users[here])
            values[here] = communicator.sendrecv(own.data[sent], to, source, values[here])
        return users, values

    def _taken(self, rank: int) -> DeviceMatrix:
        """Take the arrays of a part, whose memory is free once they are sent; `indptr` stays for other ranks."""
        part = self.parts[rank]
        assert part.indices is not None  # not taken before
        self.parts[rank] = replace(part, starts=None, indices=None, data=None)
        return part


def deal(
    devices: Sequence[Device],
    shape: tuple[int, int],
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    row_cost: float,
) -> tuple[Dealt, Dealt] | None:
    """Ratings by user and by item on several GPUs, by rank; None unless the matrix is canonical; see `uploaded`."""
    n_users, n_items = shape
    bounds = even_bounds(np.diff(indptr), len(devices), row_cost)

    def part(rank: int) -> tuple[DeviceMatrix, DeviceMatrix] | None:
        device, own = devices[rank], indptr[bounds[rank] : bounds[rank + 1] + 1]
        entries = slice(int(own[0]), int(own[-1]))
        with device.active():
            found = uploaded(device, (len(own) - 1, n_items), own - own[0], indices[entries], data[entries])
            return None if found is None else (found, found.transposed(device))

    with ThreadPoolExecutor(len(devices), thread_name_prefix="hybridmf-upload") as threads:
        found = list(threads.map(part, range(len(devices))))
    parts = [each for each in found if each is not None]
    if len(parts) < len(devices):
        return None
    rows, columns = [user_items for user_items, _ in parts], [item_users for _, item_users in parts]
    by_item = np.sum([part.indptr for part in columns], axis=0)
    return Dealt(shape, indptr, rows, bounds), Dealt((n_items, n_users), by_item, columns, bounds, by_item=True)
