"""Text with one line per user: the user, then all items of the user; the files of LightGCN, NGCF and others."""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..core.files import reading
from ..errors import RatingsError
from .columns import AUTO
from .labels import Entries
from .layout import Chunk, FileOptions, open_text
from .lines import Lines, bounded_lines
from .text import first_lines, joined_labels, text_encoding, typed_labels

_TOKEN = re.compile(r"[^\s,]+")

BLOCK_ENTRIES = 1 << 20  # entries collected at a time


def list_options(path: str, head: bytes, options: FileOptions) -> FileOptions:
    """The options of a file of lists, which has no columns, with its encoding."""
    for name, selector in zip(("user", "item", "value"), options.selectors, strict=True):
        if selector != AUTO and not (name == "value" and selector is None):
            raise ValueError(
                f'{name}={selector!r} names a column, and lines of format="lists" have none: they hold a user, then '
                f"the user's items; leave {name}= out"
            )
    codec = text_encoding(path, head, options.encoding)
    first_lines(path, codec, options.comment)
    return replace(options, encoding=codec)


def read_lists(path: str, options: FileOptions) -> Entries:
    """Entries of all lines, each with the value 1; labels as for `hybridmf.data.text.read_text`."""
    (users, user_ids), (items, item_ids), values = joined_labels(functools.partial(list_chunks, path, options))
    if not len(users):
        raise RatingsError(f"{path} holds no ratings: no line has an item after its user")
    where = functools.partial(lines_of_lists, path, options)
    found = Entries(users, items, values, user_ids, item_ids, (len(user_ids), len(item_ids)), path, where)
    return typed_labels(found.without_missing(options.missing), found)


def list_chunks(
    path: str, options: FileOptions, user_table: dict[str, int], item_table: dict[str, int], size: int = BLOCK_ENTRIES
) -> Iterator[Chunk]:
    """Codes (int32) of users and items, and values, of whole lines, at least `size` entries; as by `record_chunks`."""
    users, items = array("i"), array("i")
    for _, fields in _records(path, options):
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


def _records(path: str, options: FileOptions) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of each line below the header."""
    encoding, separator = options.encoding or "utf-8-sig", options.separator
    with reading(path, encoding), open_text(path, encoding) as stream:
        lines = Lines(bounded_lines(stream), path, options.comment)
        for k, line in enumerate(lines):
            if k or options.header is not True:
                if separator is None:  # commas and white space
                    yield lines.last, _TOKEN.findall(line)
                else:
                    fields = line.split(None if separator == " " else separator)
                    yield lines.last, [field for field in map(str.strip, fields) if field]


def lines_of_lists(path: str, options: FileOptions, first: int, second: int) -> str:
    """Text that says where two entries are in the file."""
    found, count = [], 0
    for number, fields in _records(path, options):
        after = count + max(len(fields) - 1, 0)
        found += [number for entry in (first, second) if count <= entry < after]
        count = after
    return f"line {found[0]}" if found[0] == found[1] else f"lines {found[0]} and {found[1]}"
