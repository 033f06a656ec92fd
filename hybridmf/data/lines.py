"""Lines of text in bounded memory: a line has at most `MAX_LINE` characters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TextIO

from ..errors import RatingsError

MAX_LINE = 1 << 24  # maximum characters of a line: entries, and lists of a user's items, are far shorter


def bounded_lines(stream: TextIO) -> Iterator[str]:
    """The rest of a stream, line by line; of a line that is too long, the beginning."""
    return iter(functools.partial(stream.readline, MAX_LINE + 1), "")


def line_blocks(stream: TextIO, path: str, size: int) -> Iterator[tuple[int, str]]:
    """Number of the first line, and text, of blocks of whole lines, `size` characters and more; none of blank lines."""
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

    def __init__(self, lines: Iterable[str], path: str, comment: str | None, number: int = 1) -> None:
        self.lines, self.path, self.comment = enumerate(lines, number), path, comment
        self.last = 0
        self.start()

    def start(self) -> None:
        self.number, self.text = 0, ""

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        while True:
            self.last, line = next(self.lines)
            if len(line) > MAX_LINE:
                raise long_line(self.path, self.last)
            if not line.isspace() and not (self.comment and line.lstrip().startswith(self.comment)):
                if not self.number:
                    self.number, self.text = self.last, line
                return line
