"""How a file is read: the arguments, and what is detected before: encoding, separator, header and columns of text."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.files import FORMATS, open_bytes, read_head, sniff_format
from ..core.validate import MERGE_RULES, check_bool, check_choice
from .columns import AUTO, Columns
from .labels import MISSING

Chunk = tuple[np.ndarray, np.ndarray, np.ndarray]  # users, items and values of some entries
TimedChunk = tuple[np.ndarray, ...]  # the same, and the times of these entries if the layout has `times`
Where = Mapping[Any, Any]  # row filters: a value, several, or a function, by column


@dataclass(frozen=True)
class FileOptions:
    """Arguments of `Ratings.from_file`, by its names."""

    format: str = AUTO
    separator: str | None = None
    header: bool | str = AUTO
    user: int | str = AUTO
    item: int | str = AUTO
    value: int | str | None = AUTO
    duplicates: str = "error"
    encoding: str | None = None
    comment: str | None = "#"
    quote: str | None = AUTO
    escape: str | None = None
    missing: str = "error"
    timestamp: int | str | None = None
    where: Where | None = None
    show_progress: bool = False
    weight: int | str | None = None

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)
        check_choice("duplicates", self.duplicates, MERGE_RULES)
        check_choice("header", self.header, (AUTO, True, False))
        check_choice("missing", self.missing, MISSING)
        check_bool("show_progress", self.show_progress)
        _check_text_options(self)
        if self.where is not None and not isinstance(self.where, Mapping):
            raise TypeError(
                f'where must be a mapping from columns to values, such as {{"behavior": "play"}}, got {self.where!r} '
                f"of type {type(self.where).__name__}"
            )
        where = {
            column: list(wanted) if isinstance(wanted, Iterable) and not isinstance(wanted, (str, bytes)) else wanted
            for column, wanted in (self.where or {}).items()
        }
        object.__setattr__(self, "where", where or None)

    @property
    def selectors(self) -> tuple[Any, Any, Any]:
        return self.user, self.item, self.value

    def detect(self, path: str) -> tuple[bytes, str]:
        """The first bytes of a file, and its format."""
        head = read_head(path)
        return head, sniff_format(path, head) if self.format == AUTO else self.format


def _check_text_options(options: FileOptions) -> None:
    separator = options.separator
    if separator is not None and not isinstance(separator, str):
        raise TypeError(f"separator must be a string or None, got {separator!r}")
    if separator is not None and (not separator or set(separator) & set('\r\n"')):
        raise ValueError(f"separator must be a string without quotes and line ends, got {separator!r}")
    if options.comment is not None and not isinstance(options.comment, str):
        raise TypeError(f"comment must be the text that comments begin with, or None, got {options.comment!r}")
    for name, also in (("quote", ", None or auto"), ("escape", " or None")):
        value = getattr(options, name)
        unset = value is None or (name == "quote" and value == AUTO)
        if not unset and (not isinstance(value, str) or len(value) != 1 or value.isspace()):
            raise ValueError(f"{name} must be one character{also}, got {value!r}")


@dataclass(frozen=True)
class TextLayout:
    """Properties of a text file that are detected before it is read."""

    path: str
    options: FileOptions
    encoding: str
    separator: str
    header: bool
    n_fields: int
    columns: Columns
    user: int
    item: int
    value: int | None
    integer_ids: bool  # of the first entry: try the fast path
    times: str = ""  # "integers", "numbers" or "dates": kind of the column of times, if it is read with the others
    on_read: Callable[[int], object] | None = None  # called with the bytes of the file read so far

    @property
    def quote_mark(self) -> str | None:
        """Character that begins a quoted field; None if fields are never quoted."""
        if len(self.separator) > 1 or self.separator == " ":
            return None
        return '"' if self.options.quote == AUTO else self.options.quote

    @property
    def marks(self) -> tuple[str, ...]:
        """Characters of text that only the csv module reads."""
        return tuple(filter(None, (self.quote_mark, self.options.escape)))

    def open(self) -> io.TextIOWrapper:
        return open_text(self.path, self.encoding, self.on_read)


def open_text(path: str, encoding: str, on_read: Callable[[int], object] | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_bytes(path, on_read), encoding=encoding)
