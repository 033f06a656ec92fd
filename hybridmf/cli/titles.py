"""Titles of items, from text whose first two fields are id and title."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..data.feature_columns import read_rows
from .options import Options, with_options
from .report import names_of
from .sources import existing_file, spelled_separator


def titles_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return with_options(
        command,
        click.option(
            "--titles", "titles_file", type=existing_file, help="Text file of item id, title, ...; may be gzipped."
        ),
        click.option("--titles-separator", help='Between its fields: ",", "::", "|", "tab".  [default: detected]'),
        click.option("--titles-encoding", help="[default: UTF-8, else latin-1]"),
    )


def titles_of(model: Any, options: Options) -> dict[str, str] | None:
    """Titles by item id, None without a file; a warning on stderr if it has no item of the model."""
    if options.titles_file is None:
        return None
    titles = read_titles(options.titles_file, spelled_separator(options.titles_separator), options.titles_encoding)
    names = names_of(model, "item")
    if not any(str(name) in titles for name in names):
        click.echo(
            f"Warning: none of the ids in {options.titles_file} is an item of the model, such as {names[0]}; "
            f"the file has {next(iter(titles))!r}",
            err=True,
        )
    return titles


def read_titles(path: str, separator: str | None = None, encoding: str | None = None) -> dict[str, str]:
    """Titles by item id from text whose first two fields these are; separator and encoding as for `read_rows`."""
    way_out = "give --titles-separator"
    try:
        rows, mark = read_rows(path, separator, encoding, "lines of item id and title", way_out)
    except LookupError as error:
        raise ValueError(f"--titles-encoding: {error}") from None
    titles = {}
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            entry = f"entry {number} ({row[0][:60]!r})"
            raise ValueError(f"{path}: {entry} has no title after the separator {mark!r}; {way_out}")
        titles[row[0].strip()] = row[1].strip()
    return titles
