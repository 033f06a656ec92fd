"""Regular delimited text through pyarrow's multi-threaded CSV reader, where pyarrow is installed.

Both readers here yield the same as those of `text`, or decline with None as soon as a block has content that the two
could read differently. `text` then reads the file from its beginning, so results and messages are always its own.
"""

from __future__ import annotations

import csv
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.files import open_bytes
from . import lines
from ._spelling import spelled_plainly
from .labels import MAX_VALUE
from .layout import TextLayout, TimedChunk

BLOCK_BYTES = 1 << 24
"""Text parsed at a time: bounds memory whatever the file's size."""

MEMORY = 256 << 20
"""Memory limit of a conversion from which pyarrow reads: its library, its pool and its blocks take about 100 MiB."""

TASK_BYTES = 1 << 21
"""Text that one thread parses at a time."""

SMALLEST = 1 << 20
"""Bytes of a file below which importing pyarrow takes longer than reading."""

_UNIT = b"\x1f"
"""ASCII's unit separator, which stands for separators that are longer than a byte: pyarrow takes one byte."""

_CONTROL = re.compile(rb"[\x0b\x0c\x1c-\x1f]")
_PLAIN_NAME = re.compile(r'"[^"]*"|[^"]*')


class _Irregular(Exception):
    """The other readers could read the text differently."""


_DECLINED = (_Irregular, OSError, EOFError, zlib.error)  # the latter for damaged gzip files


def integer_chunks(layout: TextLayout, size: int = BLOCK_BYTES, *, narrow: bool = False) -> Iterator[TimedChunk | None]:
    """Users, items (int64) and values (float64) of `size` bytes after others; None to decline.

    `narrow`: users and items are int32 as long as all fit, which takes less time to parse.
    """
    try:
        for table in _tables(layout, size, integers=True, narrow=narrow):
            users, items = (table[place].to_numpy() for place in (layout.user, layout.item))
            yield users, items, _values(table, layout), *_times(table, layout)
    except _DECLINED:
        yield None


def label_chunks(
    layout: TextLayout, user_table: dict[str, int], item_table: dict[str, int], size: int = BLOCK_BYTES
) -> Iterator[TimedChunk | None]:
    """Codes (int32) of users and items and values (float64) of `size` bytes after others; None to decline.

    The tables get the code of each new label: labels count in the order of their first appearance.
    """
    try:
        for table in _tables(layout, size, integers=False):
            users, items = _codes(table[layout.user], user_table), _codes(table[layout.item], item_table)
            yield users, items, _values(table, layout), *_times(table, layout)
    except _DECLINED:
        yield None


def _values(table: dict[int, Any], layout: TextLayout) -> np.ndarray:
    return np.ones(len(table[layout.user])) if layout.value is None else _numbers(table[layout.value])


def _times(table: dict[int, Any], layout: TextLayout) -> tuple[np.ndarray, ...]:
    if not layout.times:
        return ()
    assert layout.columns.time is not None
    column = table[layout.columns.time]
    return (column.to_numpy() if layout.times == "dates" else _numbers(column),)


def _numbers(column: Any) -> np.ndarray:
    numbers: np.ndarray = column.to_numpy()
    if not np.all(np.abs(numbers) <= MAX_VALUE):
        raise _Irregular
    return numbers


def _codes(column: Any, table: dict[str, int]) -> np.ndarray:
    """Codes of a column whose chunks share a dictionary."""
    labels = column.chunk(0).dictionary.to_pylist()
    if "" in labels or list(map(str.strip, labels)) != labels:
        raise _Irregular
    codes = np.fromiter((table.setdefault(label, len(table)) for label in labels), np.int32, len(labels))
    return codes[np.concatenate([chunk.indices.to_numpy() for chunk in column.chunks])]


# -------------------------------------------------------------------------------------------------------------- blocks


def _tables(layout: TextLayout, size: int, *, integers: bool, narrow: bool = False) -> Iterator[dict[int, Any]]:
    """Columns of users, items, values and times, by their places, of each block of whole lines below the header."""
    if layout.encoding != "utf-8-sig" or os.path.getsize(layout.path) < SMALLEST:
        raise _Irregular
    header = layout.header
    with open_bytes(layout.path, layout.on_read) as stream:
        for block in _blocks(stream, size):
            _check_block(block, layout)
            start = _below_header(block, layout.separator) if header else 0
            header = header and not start
            content = block[start:]
            if content and not content.isspace():
                content, delimiter = _one_byte_delimiter(content, layout.separator)
                if integers and not spelled_plainly(content, delimiter):
                    raise _Irregular
                table = _parse(content, delimiter, layout, "int32") if narrow else None
                narrow = table is not None
                table = table or _parse(content, delimiter, layout, "int64" if integers else "labels")
                if table is None:
                    raise _Irregular
                yield table


def _blocks(stream: Any, size: int) -> Iterator[bytes]:
    """Whole lines, without a byte order mark; a line that is longer than any that is read here is cut."""
    block = stream.read(size).removeprefix(b"\xef\xbb\xbf")
    while block:
        yield block if block.endswith(b"\n") else block + stream.readline(_longest_line() + 1)
        block = stream.read(size)


def _longest_line() -> int:
    """Bytes of a line that both the csv module and `lines` always accept."""
    return min(csv.field_size_limit(), lines.MAX_LINE)


def _check_block(block: bytes, layout: TextLayout) -> None:
    """Reject text whose lines are no entries, or that other readers reject."""
    if b"\0" in block or (layout.comment and layout.comment.encode(errors="surrogatepass") in block):
        raise _Irregular
    if not block.isascii():
        _decode(block)
    start, longest = 0, _longest_line()
    while len(block) - start > longest:
        start = block.rfind(b"\n", start, start + longest) + 1
        if not start:
            raise _Irregular


def _decode(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise _Irregular from error


def _below_header(block: bytes, separator: str) -> int:
    """Where the line after the header begins; 0 if all lines are blank."""
    start = 0
    while start < len(block):
        end = block.find(b"\n", start) + 1 or len(block)
        line = _decode(block[start:end]).rstrip("\r\n")
        if "\r" in line or not all(map(_PLAIN_NAME.fullmatch, line.split(separator))):
            raise _Irregular  # the header may end earlier or later
        if line.strip():
            return end
        start = end
    return 0


def _one_byte_delimiter(block: bytes, separator: str) -> tuple[bytes, bytes]:
    """The block with one byte between fields, and that byte."""
    mark = separator.encode(errors="surrogatepass")
    if separator == " ":
        return block, _blank_of(block)
    if (_UNIT if len(mark) > 1 else b'"') in block or (len(separator) == 1 < len(mark)):
        raise _Irregular
    return (block.replace(mark, _UNIT), _UNIT) if len(mark) > 1 else (block, mark)


def _blank_of(block: bytes) -> bytes:
    """The byte, blank or tab, that stands once between fields and nowhere else."""
    blank, other = (b"\t", b" ") if b"\t" in block else (b" ", b"\t")
    edges = (blank + blank, blank + b"\n", blank + b"\r", b"\n" + blank, b"\r" + blank)
    if (
        not block.isascii()
        or other in block
        or _CONTROL.search(block)
        or any(edge in block for edge in edges)
        or block.startswith(blank)
        or block.endswith(blank)
    ):
        raise _Irregular
    return blank


def _parse(block: bytes, delimiter: bytes, layout: TextLayout, kind: str) -> dict[int, Any] | None:
    """The columns of a block, with ids of a kind ("int32", "int64", "labels"); None if they are of another."""
    try:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv
    except ImportError as error:
        raise _Irregular from error
    ids = pa.dictionary(pa.int32(), pa.string()) if kind == "labels" else getattr(pa, kind)()
    kinds = {layout.user: ids, layout.item: ids, layout.value: pa.float64()}
    if layout.times:
        kinds[layout.columns.time] = pa.timestamp("ns") if layout.times == "dates" else pa.float64()
    used = {place: str(place) for place in range(layout.n_fields) if place in kinds}
    try:
        table = arrow_csv.read_csv(
            pa.py_buffer(block),
            arrow_csv.ReadOptions(column_names=list(map(str, range(layout.n_fields))), block_size=TASK_BYTES),
            arrow_csv.ParseOptions(delimiter=delimiter.decode(), quote_char=False),
            arrow_csv.ConvertOptions(
                column_types={name: kinds[place] for place, name in used.items()},
                include_columns=list(used.values()),
                null_values=[],
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowException:
        return None
    return dict(zip(used, table.unify_dictionaries().columns, strict=True))
