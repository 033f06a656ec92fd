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
from .ranking import rank
from .requests import Candidates

BLOCK_USERS = 16_384
"""Users of a block: enough to fill a GPU, and the row group of a Parquet file."""

FILES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
"""Formats of files by the end of their name."""


class Block(NamedTuple):
    """Recommendations of some users, without gaps: positions of users and items, ranks from 1, and scores."""

    users: np.ndarray
    ranks: np.ndarray
    items: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class Request:
    """Users, and the items that may be recommended to them.

    Attributes
    ----------
    learned : Learned
    users : int64 array, shape (n,)
    N : int
    seen : csr_array, shape (n, n_items), StoredSeen or None
        Entries to exclude: rows in the order of `users`, or of all users by position if it is that of `learned`.
    candidates : Candidates
    cold_users : {"popular", "mask"}
    """

    learned: Learned
    users: np.ndarray
    N: int
    seen: sp.csr_array | StoredSeen | None
    candidates: Candidates
    cold_users: str

    def blocks(self, show_progress: bool) -> Iterator[Block]:
        """Recommendations of `BLOCK_USERS` users after others."""
        with progress_bar(len(self.users), show_progress, desc="recommend", unit="user") as bar:
            for start in range(0, len(self.users), BLOCK_USERS):
                stop = min(start + BLOCK_USERS, len(self.users))
                yield self._block(start, stop)
                bar.update(stop - start)

    def _block(self, start: int, stop: int) -> Block:
        learned, users = self.learned, self.users[start:stop]
        seen: RowColumns | None = None
        if isinstance(self.seen, StoredSeen):
            seen = RowColumns.of(self.seen.take_rows(users))
        elif self.seen is not None:
            seen = RowColumns.of(self.seen, users if self.seen is learned.seen else np.arange(start, stop))
        factors = learned.state.user.take(users)
        candidates = self.candidates.of_users(start, stop)
        ids, scores = rank(learned, factors, self.N, seen, candidates, self.cold_users)
        found = ids >= 0
        ranks = np.broadcast_to(np.arange(1, self.N + 1, dtype=np.int32), ids.shape)
        return Block(np.repeat(users, np.count_nonzero(found, axis=1)), ranks[found], ids[found], scores[found])


def to_frame(request: Request, by_label: bool, kind: str, show_progress: bool) -> Any:
    """Data frame with the columns user, rank, item and score."""
    parts = list(request.blocks(show_progress))
    empty = Block(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
    whole = Block(*map(np.concatenate, zip(*(parts or [empty]), strict=True)))
    users, items = whole.users, whole.items
    if by_label:
        users, items = _names(request.learned.user_ids, users), _names(request.learned.item_ids, items)
    return make_frame({"user": users, "rank": whole.ranks, "item": items, "score": whole.scores}, kind)


def _names(ids: np.ndarray | None, positions: np.ndarray) -> np.ndarray:
    """Labels of positions; strings as objects, which share memory where they repeat."""
    if ids is None:
        return positions
    return ids.astype(object)[positions] if ids.dtype.kind == "U" else ids[positions]


def file_format(path: Any) -> str:
    """Format of a file by its name.

    Raises
    ------
    ValueError, TypeError
        The end of the name is none of `FILES`.
    ImportError
        pyarrow, which writes both formats, is not installed.
    """
    ending = os.path.splitext(check_path("path", path))[1].lower()
    if ending not in FILES:
        raise ValueError(f"path must end in one of {', '.join(FILES)}, got {os.fspath(path)!r}")
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(f"writing {os.fspath(path)} needs pyarrow: pip install pyarrow") from error
    return FILES[ending]


def to_file(request: Request, by_label: bool, path: Any, show_progress: bool) -> None:
    """Write the columns user, rank, item and score block by block; the file appears when it is complete."""
    format = file_format(path)
    write_atomically(path, lambda stream: _write(request, by_label, format, stream, show_progress))


def _write(request: Request, by_label: bool, format: str, stream: BinaryIO, show_progress: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    learned = request.learned
    names = [
        pa.array(np.arange(count, dtype=np.int32) if ids is None or not by_label else ids)
        for ids, count in zip((learned.user_ids, learned.item_ids), learned.shape, strict=True)
    ]
    score = pa.from_numpy_dtype(learned.state.item.matrix.dtype)
    fields = [("user", names[0].type), ("rank", pa.int32()), ("item", names[1].type), ("score", score)]
    schema = pa.schema(fields)
    writer = pq.ParquetWriter(stream, schema) if format == "parquet" else pa.ipc.new_file(stream, schema)
    with writer:
        for block in request.blocks(show_progress):
            columns = [names[0].take(pa.array(block.users)), block.ranks, names[1].take(pa.array(block.items))]
            writer.write_table(pa.table([*columns, block.scores], schema=schema))
