"""Recommendations as tables (user, rank, item, score): data frames, Arrow and Parquet files, made block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import scipy.sparse as sp

from ..core.files import write_atomically
from ..core.frames import make_frame
from ..core.progress import progress_bar
from ..core.sparse import RowColumns
from ..core.validate import check_path
from ..data.store import StoredSeen
from .learned import Learned
from .ranking import answer, rows_of_users, seen_in_training
from .requests import Asked, Candidates

BLOCK_USERS = 16_384
"""Users of a block: enough to fill a GPU, and the row group of a Parquet file."""

FILES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
"""Formats of files by the end of their name."""


class Block(NamedTuple):
    """Recommendations of some users, without gaps: rows of the request, ranks from 1, positions of items, scores."""

    rows: np.ndarray
    ranks: np.ndarray
    items: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class Request:
    """Users, and the items that may be recommended to them."""

    learned: Learned
    users: np.ndarray  # positions, int64; -1 for users who are unknown to the model
    names: np.ndarray  # users as they are named in the table
    asked: Asked
    seen: sp.csr_array | StoredSeen | None
    """Entries to exclude: rows in the order of `users`, or of all users by position if it is that of `learned`."""
    candidates: Candidates

    def blocks(self, show_progress: bool) -> Iterator[Block]:
        """Recommendations of `BLOCK_USERS` users after others."""
        with progress_bar(len(self.users), show_progress, desc="recommend", unit="user") as bar:
            for start in range(0, len(self.users), BLOCK_USERS):
                stop = min(start + BLOCK_USERS, len(self.users))
                yield self._block(start, stop)
                bar.update(stop - start)

    def _block(self, start: int, stop: int) -> Block:
        learned, users, N = self.learned, self.users[start:stop], self.asked.N
        absent = self.asked.unknown.absent(users)
        seen: RowColumns | None = None
        if self.seen is not None and self.seen is learned.seen:
            seen = seen_in_training(self.seen, users, absent)
        elif self.seen is not None:
            seen = RowColumns.of(self.seen, np.arange(start, stop))
        factors = rows_of_users(learned, users, absent)
        ids, scores = answer(learned, factors, self.asked, seen, self.candidates.of_users(start, stop), absent)
        found = ids >= 0
        ranks = np.broadcast_to(np.arange(1, N + 1, dtype=np.int32), ids.shape)
        rows = np.repeat(np.arange(start, stop), np.count_nonzero(found, axis=1))
        return Block(rows, ranks[found], ids[found], scores[found])


def to_frame(request: Request, kind: str, show_progress: bool) -> Any:
    """Data frame with the columns user, rank, item and score."""
    parts = list(request.blocks(show_progress))
    empty = Block(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
    whole = Block(*map(np.concatenate, zip(*(parts or [empty]), strict=True)))
    users = _names(request.names, whole.rows)
    items = _names(request.learned.item_ids, whole.items) if request.asked.by_label else whole.items
    return make_frame({"user": users, "rank": whole.ranks, "item": items, "score": whole.scores}, kind)


def _names(ids: np.ndarray | None, positions: np.ndarray) -> np.ndarray:
    """Labels of positions; strings as objects, which share memory where they repeat."""
    if ids is None:
        return positions
    return ids.astype(object)[positions] if ids.dtype.kind == "U" else ids[positions]


def file_format(path: Any) -> str:
    """Format of a file by its name."""
    ending = os.path.splitext(check_path("path", path))[1].lower()
    if ending not in FILES:
        raise ValueError(f"path must end in one of {', '.join(FILES)}, got {os.fspath(path)!r}")
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(f"writing {os.fspath(path)} needs pyarrow: pip install pyarrow") from error
    return FILES[ending]


def to_file(request: Request, path: Any, show_progress: bool) -> None:
    """Write the columns user, rank, item and score block by block; the file appears when it is complete."""
    format = file_format(path)
    write_atomically(path, lambda stream: _write(request, format, stream, show_progress))


def _write(request: Request, format: str, stream: BinaryIO, show_progress: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    learned, by_label = request.learned, request.asked.by_label
    ids = learned.item_ids
    items = pa.array(np.arange(learned.shape[1], dtype=np.int32) if ids is None or not by_label else ids)
    users = pa.array(request.names if by_label and learned.user_ids is not None else request.names.astype(np.int32))
    score = pa.from_numpy_dtype(learned.state.item.matrix.dtype)
    fields = [("user", users.type), ("rank", pa.int32()), ("item", items.type), ("score", score)]
    schema = pa.schema(fields)
    writer = pq.ParquetWriter(stream, schema) if format == "parquet" else pa.ipc.new_file(stream, schema)
    with writer:
        for block in request.blocks(show_progress):
            columns = [users.take(pa.array(block.rows)), block.ranks, items.take(pa.array(block.items))]
            writer.write_table(pa.table([*columns, block.scores], schema=schema))
