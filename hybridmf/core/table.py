"""Text tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def format_table(header: Sequence[str], rows: Iterable[Sequence[Any]], align: str, indent: int = 2) -> str:
    """Text columns under a ruled header; `align` has ``"<"`` or ``">"`` for each column."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = ("  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)) for row in cells)
    return "\n".join((" " * indent + line).rstrip() for line in lines)
