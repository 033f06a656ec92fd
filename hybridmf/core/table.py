"""Tables: of text, and of HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


def format_table(header: Sequence[str], rows: Iterable[Sequence[Any]], align: str, indent: int = 2) -> str:
    """Text columns under a ruled header; `align` has ``"<"`` or ``">"`` for each column."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = ("  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)) for row in cells)
    return "\n".join((" " * indent + line).rstrip() for line in lines)


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "") -> str:
    """The same as an HTML table, as `_repr_html_` returns it; without `align`, all columns are left-aligned."""
    align = align or "<" * len(header)

    def row(kind: str, cells: Sequence[Any]) -> str:
        styles = ("left" if side == "<" else "right" for side in align)
        texts = (
            f'<{kind} style="text-align: {style}">{html.escape(str(cell))}</{kind}>'
            for style, cell in zip(styles, cells, strict=True)
        )
        return f"<tr>{''.join(texts)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<table><thead>{row('th', header)}</thead><tbody>{body}</tbody></table>"


def html_facts(title: str, facts: Iterable[tuple[str, Any]]) -> str:
    """A title and names with their values, in two columns of HTML; None and "" are left out."""
    rows = (
        f'<tr><th style="text-align: left">{html.escape(name)}</th>'
        f'<td style="text-align: left">{html.escape(str(value))}</td></tr>'
        for name, value in facts
        if value not in (None, "")
    )
    return f"<p><strong>{html.escape(title)}</strong></p><table><tbody>{''.join(rows)}</tbody></table>"
