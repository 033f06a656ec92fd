"""Lines of text in bounded memory: lines have at most `MAX_LINE` characters, and blank lines are counted in bulk."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import TextIO

from ..errors import RatingsError

MAX_LINE = 1 << 24
"""Maximum characters of a line: entries, and lists of a user's items, are far shorter."""

PIECE = 1 << 16
"""Characters read at a time while lines are numbered."""

_CONTENT = re.compile(r"\S")


def pieces_of(stream: TextIO) -> Iterator[str]:
    """The rest of a stream, `PIECE` characters at a time."""
    return iter(functools.partial(stream.read, PIECE), "")


def numbered_lines(pieces: Iterable[str], path: str, number: int = 1) -> Iterator[tuple[int, str]]:
    """Number, from that of the first line on, and text with its end of each line that is not blank."""
    rest = ""  # begins line `number`
    for piece in pieces:
        text, start, end = rest + piece, 0, piece.rfind("\n") + 1
        end += len(rest) if end else 0
        while found := _CONTENT.search(text, start, end):
            begin = max(text.rfind("\n", start, found.start()) + 1, start)
            number += text.count("\n", start, begin)
            start = text.find("\n", begin) + 1
            yield number, text[begin:start]
            number += 1
        number += text.count("\n", start, end)
        rest = text[end:]
        if len(rest) > MAX_LINE:
            raise long_line(path, number)
    if rest.strip():
        yield number, rest


def line_blocks(stream: TextIO, path: str, size: int) -> Iterator[tuple[int, str]]:
    """Number of the first line, and text, of blocks of whole lines: `size` characters and the rest of a line.

    Blocks of blank lines are omitted.
    """
    number = 1
    while block := stream.read(size):
        if not block.endswith("\n"):
            rest = stream.readline(MAX_LINE + 1)
            if len(rest) > MAX_LINE:
                raise long_line(path, number + block.count("\n"))
            block += rest
        if not block.isspace():
            yield number, block
        number += block.count("\n")


def long_line(path: str, number: int) -> RatingsError:
    return RatingsError(
        f"{path}, line {number} has more than {MAX_LINE:,} characters; expected one entry, or one user, in each line"
    )


class Lines:
    """Iterator over lines with content; has the number and text of the first line of the current record."""

    def __init__(self, pieces: Iterable[str], path: str, comment: str | None, number: int = 1) -> None:
        self.lines, self.comment = numbered_lines(pieces, path, number), comment
        self.last = 0
        self.start()

    def start(self) -> None:
        """Begin a new record."""
        self.number, self.text = 0, ""

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        while True:
            self.last, line = next(self.lines)
            if not (self.comment and line.lstrip().startswith(self.comment)):
                if not self.number:
                    self.number, self.text = self.last, line
                return line
