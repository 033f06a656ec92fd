"""Recommendations as tables (user, rank, item, score): data frames, Arrow and Parquet files, made block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from ..core.files import write_atomically
from ..core.frames import make_frame
from ..core.progress import progress_bar
from ..core.system import needed
from ..core.validate import check_path
from ..data.transforms import labels_at
from .ranking import Request

BLOCK_USERS = 16_384  # users of a block: enough to fill a GPU, and the row group of a Parquet file

FILES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
"""Formats of files by the end of their name."""


def _blocks(request: Request, show_progress: bool) -> Iterator[tuple[np.ndarray, ...]]:
    """(places in the request's users, ranks from 1, positions of items, scores) of `BLOCK_USERS` users after others."""
    count = len(request.users)
    with progress_bar(count, show_progress, desc="recommend", unit="user") as bar:
        for start in range(0, count, BLOCK_USERS):
            stop = min(start + BLOCK_USERS, count)
            ids, scores = request.answer(start, stop)
            found = ids >= 0
            ranks = np.broadcast_to(np.arange(1, ids.shape[1] + 1, dtype=np.int32), ids.shape)
            rows = np.repeat(np.arange(start, stop), np.count_nonzero(found, axis=1))
            yield rows, ranks[found], ids[found], scores[found]
            bar.update(stop - start)


def to_frame(request: Request, names: np.ndarray, kind: str, show_progress: bool) -> Any:
    """Data frame with the columns user, rank, item and score; `names` are those of the request's users."""
    empty = (np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
    rows, ranks, items, scores = map(np.concatenate, zip(empty, *_blocks(request, show_progress), strict=True))
    items = labels_at(request.learned.item_ids, items) if request.asked.by_label else items
    return make_frame({"user": labels_at(names, rows), "rank": ranks, "item": items, "score": scores}, kind)


def file_format(path: Any) -> str:
    ending = os.path.splitext(check_path("path", path))[1].lower()
    if ending not in FILES:
        raise ValueError(f"path must end in one of {', '.join(FILES)}, got {os.fspath(path)!r}")
    needed("pyarrow", f"writing {os.fspath(path)} needs pyarrow", "pyarrow")
    return FILES[ending]


def to_file(request: Request, names: np.ndarray, path: Any, show_progress: bool) -> None:
    """Write the columns user, rank, item and score block by block; the file appears when it is complete."""
    format = file_format(path)
    write_atomically(path, lambda stream: _write(request, names, format, stream, show_progress))


def _write(request: Request, names: np.ndarray, format: str, stream: BinaryIO, show_progress: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    learned, by_label = request.learned, request.asked.by_label
    ids = learned.item_ids
    items = pa.array(np.arange(learned.shape[1], dtype=np.int32) if ids is None or not by_label else ids)
    users = pa.array(names if by_label and learned.user_ids is not None else names.astype(np.int32))
    score = pa.from_numpy_dtype(learned.state.item.matrix.dtype)
    fields = [("user", users.type), ("rank", pa.int32()), ("item", items.type), ("score", score)]
    schema = pa.schema(fields)
    writer = pq.ParquetWriter(stream, schema) if format == "parquet" else pa.ipc.new_file(stream, schema)
    with writer:
        for rows, ranks, found, scores in _blocks(request, show_progress):
            columns = [users.take(pa.array(rows)), ranks, items.take(pa.array(found)), scores]
            writer.write_table(pa.table(columns, schema=schema))
