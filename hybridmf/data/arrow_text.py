"""Regular delimited text through pyarrow's multi-threaded CSV reader, if pyarrow is installed.

The chunks are those of `text`, or it declines with None as soon as a block has content that both
could read differently. `text` then reads the file from its beginning, so results and messages are always those of
`text`.
"""

from __future__ import annotations

import csv
import os
import re
import zlib
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import numpy as np

from ..core.files import open_bytes
from ..core.frames import import_before_arrow
from . import lines
from ._spelling import only_in_pairs, spelled_plainly
from .labels import MAX_VALUE
from .layout import TextLayout, TimedChunk

BLOCK_BYTES = 1 << 23
"""Bytes parsed at a time, to bound memory for any file. Twice as much takes a tenth longer, because of new pages."""

MEMORY = 256 << 20
"""Minimum memory limit of a conversion that uses pyarrow: library, memory pool and blocks take about 100 MiB."""

TASK_BYTES = 1 << 20  # bytes that one thread parses at a time
SMALLEST = 1 << 20  # bytes of a file below which importing pyarrow takes longer than reading
_UNIT = b"\x1f"  # ASCII's unit separator, which replaces separators longer than one byte, the limit of pyarrow

_CONTROL = re.compile(rb"[\x0b\x0c\x1c-\x1f]")
_PLAIN_NAME = re.compile(r'"[^"]*"|[^"]*')


class _Irregular(Exception):
    """The other readers could read the text differently."""


_DECLINED = (_Irregular, OSError, EOFError, zlib.error)  # the latter for damaged gzip files


def chunks(
    layout: TextLayout,
    user_table: dict[str, int] | None = None,
    item_table: dict[str, int] | None = None,
    size: int = BLOCK_BYTES,
    *,
    narrow: bool = False,
) -> Iterator[TimedChunk | None]:
    """Users, items, values (float64) and times in blocks of `size` bytes; None to decline.

    Without tables, ids are integers: int64, or if `narrow` int32 as long as all fit, which is faster to parse. Labels
    enter the tables, empty at first, with codes (int32) in the order of their first appearance.
    """
    plain = methodcaller("to_numpy")
    of_users, of_items = (plain if table is None else codes_into(table) for table in (user_table, item_table))
    try:
        for table in _tables(layout, size, integers=user_table is None, narrow=narrow):
            yield of_users(table[layout.user]), of_items(table[layout.item]), *_values_and_times(table, layout)
    except _DECLINED:
        yield None


def _values_and_times(table: dict[int, Any], layout: TextLayout) -> Iterator[np.ndarray]:
    yield np.ones(len(table[layout.user])) if layout.value is None else _numbers(table[layout.value])
    if layout.times:
        column = table[layout.columns.time]  # type: ignore[index]
        yield _numbers(column) if layout.times == "numbers" else column.to_numpy()


def _numbers(column: Any) -> np.ndarray:
    numbers: np.ndarray = column.to_numpy()
    if not max(-numbers.min(initial=0), numbers.max(initial=0)) <= MAX_VALUE:  # also for NaN
        raise _Irregular
    return numbers


def codes_into(table: dict[str, int]) -> Callable[[Any], np.ndarray]:
    """Function from columns of strings, one after another, to codes (int32); new labels are added to the table."""
    known: Any = None

    def codes(column: Any) -> np.ndarray:
        import pyarrow as pa
        import pyarrow.compute as pc

        nonlocal known
        known = pa.array([], column.type) if known is None else known
        found = pc.index_in(column, value_set=known)
        if found.null_count:
            new = pc.unique(column.filter(pc.is_null(found)))
            added = new.to_pylist()
            if "" in added or list(map(str.strip, added)) != added:
                raise _Irregular
            table.update(zip(added, range(len(known), len(known) + len(new)), strict=True))
            known = pa.concat_arrays([known, new])
            found = pc.index_in(column, value_set=known)
        return np.asarray(found.to_numpy())

    return codes


def coded_strings(series: Any) -> tuple[np.ndarray, list[str]] | None:
    """Codes (int32) of strings of narwhals without nulls, and labels as they appear; None where pyarrow cannot."""
    import_before_arrow()
    try:
        import pyarrow as pa

        strings = series.to_arrow()
        chunks = strings.chunks if isinstance(strings, pa.ChunkedArray) else [strings]  # pandas 3 has several
        encoded = pa.concat_arrays([chunk.cast(pa.large_string()) for chunk in chunks]).dictionary_encode()
    except (ImportError, ValueError, TypeError, NotImplementedError):  # ValueError: lone surrogates
        return None
    return encoded.indices.to_numpy(), encoded.dictionary.to_pylist()


# -------------------------------------------------------------------------------------------------------------- blocks


def _tables(layout: TextLayout, size: int, *, integers: bool, narrow: bool = False) -> Iterator[dict[int, Any]]:
    """Columns of users, items, values and times, by position, of each block of whole lines after the header."""
    if layout.encoding != "utf-8-sig" or os.path.getsize(layout.path) < SMALLEST:
        raise _Irregular
    header = layout.header
    with open_bytes(layout.path, layout.on_read) as stream:
        for block in _blocks(stream, size):
            _check_block(block, layout)
            if layout.times == "integers" and not integers and (b"0x" in block or b"0X" in block):
                raise _Irregular  # pyarrow reads hexadecimal numbers
            start = _below_header(block, layout.separator) if header else 0
            header = header and not start
            content = block[start:]
            if content and not content.isspace():
                content, delimiter, apart = _one_byte_delimiter(content, layout)
                if integers and not spelled_plainly(content, delimiter):
                    raise _Irregular
                table = _parse(content, delimiter, apart, layout, "int32") if narrow else None
                narrow = table is not None
                table = table or _parse(content, delimiter, apart, layout, "int64" if integers else "labels")
                if table is None:
                    raise _Irregular
                yield table


def _blocks(stream: Any, size: int) -> Iterator[bytes]:
    """Blocks of whole lines, without a byte order mark; lines too long for this reader are cut."""
    block = stream.read(size).removeprefix(b"\xef\xbb\xbf")
    while block:
        yield block if block.endswith(b"\n") else block + stream.readline(_longest_line() + 1)
        block = stream.read(size)


def _longest_line() -> int:
    """Largest line in bytes that both the csv module and `lines` always accept."""
    return min(csv.field_size_limit(), lines.MAX_LINE)


def _check_block(block: bytes, layout: TextLayout) -> None:
    """Reject text with lines that are not entries, or that other readers reject."""
    if b"\0" in block or (layout.options.comment and layout.options.comment.encode(errors="surrogatepass") in block):
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
    """Start of the line after the header; 0 if all lines are blank."""
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


def _one_byte_delimiter(block: bytes, layout: TextLayout) -> tuple[bytes, bytes, int]:
    """The block with one-byte delimiters, the delimiter, and the number of delimiters between two fields."""
    separator, mark = layout.separator, layout.separator.encode(errors="surrogatepass")
    if separator == " ":
        return block, _blank_of(block), 1
    if len(mark) == 2 and mark[:1] == mark[1:] and only_in_pairs(block, mark[:1]):
        return block, mark[:1], 2  # an empty field between two others
    reserved = [_UNIT] if len(mark) > 1 else [each.encode(errors="surrogatepass") for each in layout.marks]
    if any(each in block for each in reserved) or (len(separator) == 1 < len(mark)):
        raise _Irregular
    return (block.replace(mark, _UNIT), _UNIT, 1) if len(mark) > 1 else (block, mark, 1)


def _blank_of(block: bytes) -> bytes:
    """The delimiter, blank or tab, which occurs once between fields and nowhere else."""
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


def _parse(block: bytes, delimiter: bytes, apart: int, layout: TextLayout, kind: str) -> dict[int, Any] | None:
    """Columns of a block, ids as "int32", "int64" or "labels", else None; `apart`: delimiters between two fields."""
    import_before_arrow()
    try:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv
    except ImportError as error:
        raise _Irregular from error
    ids = pa.string() if kind == "labels" else getattr(pa, kind)()
    kinds = {layout.user: ids, layout.item: ids, layout.value: pa.float64()}
    if layout.times:
        kinds[layout.columns.time] = {"integers": pa.int64(), "numbers": pa.float64(), "dates": pa.timestamp("us")}[
            layout.times
        ]
    used = {place: str(place * apart) for place in range(layout.n_fields) if place in kinds}
    n_columns = (layout.n_fields - 1) * apart + 1
    try:
        table = arrow_csv.read_csv(
            pa.py_buffer(block),
            arrow_csv.ReadOptions(column_names=list(map(str, range(n_columns))), block_size=TASK_BYTES),
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
    return dict(zip(used, table.columns, strict=True))
