"""Text with one line per user: the user, then all items of the user; the files of LightGCN, NGCF and others."""

from __future__ import annotations

import functools
import io
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..core.files import reading
from ..errors import RatingsError
from .columns import AUTO
from .labels import Entries
from .layout import Chunk, FileOptions, open_text
from .lines import Lines, pieces_of
from .text import (
    NOTHING,
    check_text_options,
    first_lines,
    sorted_labels,
    text_encoding,
    typed_labels,
)

_TOKEN = re.compile(r"[^\s,]+")

BLOCK_ENTRIES = 1 << 20
"""Entries collected at a time."""


@dataclass(frozen=True)
class ListLayout:
    """Format of the lines; without a separator they are split at commas and white space."""

    path: str
    encoding: str
    comment: str | None
    separator: str | None
    header: bool

    def open(self) -> io.TextIOWrapper:
        """Open the file as text."""
        return open_text(self.path, self.encoding)

    def split(self, line: str) -> list[str]:
        """User and items of a line, without surrounding white space."""
        if self.separator in (None, " "):
            return _TOKEN.findall(line) if self.separator is None else line.split()
        fields = map(str.strip, line.split(self.separator))
        return [field for field in fields if field]


def list_layout(path: str, head: bytes, options: FileOptions) -> ListLayout:
    """Check the options of a file of lists, which has no columns."""
    for name, selector in zip(("user", "item", "value"), options.selectors, strict=True):
        if selector != AUTO and not (name == "value" and selector is None):
            raise ValueError(
                f'{name}={selector!r} names a column, and lines of format="lists" have none: they hold a user, then '
                f"the user's items; leave {name}= out"
            )
    check_text_options(options.separator, options.comment)
    codec = text_encoding(path, head, options.encoding)
    first_lines(path, codec, options.comment)
    return ListLayout(path, codec, options.comment, options.separator, options.header is True)


def read_lists(layout: ListLayout, missing: str = "error") -> Entries:
    """Entries of all lines, each with the value 1; labels as for `hybridmf.data.text.read_text`."""
    user_table: dict[str, int] = {}
    item_table: dict[str, int] = {}
    parts = list(list_chunks(layout, user_table, item_table))
    users, items, values = (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else NOTHING
    if not len(users):
        raise RatingsError(f"{layout.path} holds no ratings: no line has an item after its user")
    (users, user_ids), (items, item_ids) = (
        sorted_labels(codes, list(table)) for codes, table in ((users, user_table), (items, item_table))
    )
    shape = (len(user_ids), len(item_ids))
    where = functools.partial(lines_of_lists, layout)
    found = Entries(users, items, values, user_ids, item_ids, shape, layout.path, where)
    return typed_labels(found.without_missing(missing), found)


def list_chunks(
    layout: ListLayout, user_table: dict[str, int], item_table: dict[str, int], size: int = BLOCK_ENTRIES
) -> Iterator[Chunk]:
    """Codes (int32) of users and items, and values (float64), in chunks of whole lines with at least `size` entries.

    The last chunk may be smaller. New labels enter the tables with codes in the order of their first appearance. A user
    without items has no code.
    """
    users, items = array("i"), array("i")
    for _, fields in _records(layout):
        if len(fields) > 1:
            user = user_table.setdefault(fields[0], len(user_table))
            users.extend([user] * (len(fields) - 1))
            items.extend([item_table.setdefault(item, len(item_table)) for item in fields[1:]])
        if len(users) >= size:
            yield _chunk(users, items)
            users, items = array("i"), array("i")
    if users:
        yield _chunk(users, items)


def _chunk(users: array, items: array) -> Chunk:
    return np.array(users, dtype=np.int32), np.array(items, dtype=np.int32), np.ones(len(users))


def _records(layout: ListLayout) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of each line below the header."""
    with reading(layout.path, layout.encoding), layout.open() as stream:
        lines = Lines(pieces_of(stream), layout.path, layout.comment)
        for k, line in enumerate(lines):
            if k or not layout.header:
                yield lines.last, layout.split(line)


def lines_of_lists(layout: ListLayout, first: int, second: int) -> str:
    """Text that says where two entries are in the file."""
    found, count = [], 0
    for number, fields in _records(layout):
        after = count + max(len(fields) - 1, 0)
        found += [number for entry in (first, second) if count <= entry < after]
        count = after
    return f"line {found[0]}" if found[0] == found[1] else f"lines {found[0]} and {found[1]}"
