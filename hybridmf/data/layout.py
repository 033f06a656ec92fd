"""Properties of delimited text that are detected before it is read: encoding, separator, header and columns."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..core.files import open_bytes
from .columns import Columns

Chunk = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Users, items and values of some entries."""

TimedChunk = tuple[np.ndarray, ...]
"""The same, and the times of these entries if the layout has `times`."""


@dataclass(frozen=True)
class TextLayout:
    """Properties of a text file that are detected before it is read."""

    path: str
    encoding: str
    comment: str | None
    separator: str
    header: bool
    n_fields: int
    user: int
    item: int
    value: int | None
    integer_ids: bool  # of the first entry: try the fast path
    columns: Columns
    times: str = ""  # "integers", "numbers" or "dates": kind of the column of times, if it is read with the others
    on_read: Callable[[int], object] | None = None  # called with the bytes of the file read so far
    times_required: bool = False  # by an argument: times that cannot be read are an error
    quote: str | None = "auto"
    escape: str | None = None

    @property
    def quote_mark(self) -> str | None:
        """Character that begins a quoted field; None if fields are never quoted."""
        if len(self.separator) > 1 or self.separator == " ":
            return None
        return '"' if self.quote == "auto" else self.quote

    @property
    def marks(self) -> tuple[str, ...]:
        """Characters of text that only the csv module reads."""
        return tuple(filter(None, (self.quote_mark, self.escape)))

    def open(self) -> io.TextIOWrapper:
        """Open the file as text."""
        return open_text(self.path, self.encoding, self.on_read)


def open_text(path: str, encoding: str, on_read: Callable[[int], object] | None = None) -> io.TextIOWrapper:
    """Open a plain or gzipped file as text."""
    return io.TextIOWrapper(open_bytes(path, on_read), encoding=encoding)
