"""Titles of items, from text whose first two fields are id and title."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import click

from ..core.files import open_bytes, reading
from .options import Options, with_options
from .report import names_of
from .sources import existing_file, spelled_separator

TITLE_SEPARATORS = ("::", "\t", "|", ";", ",")


def titles_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that name a file of titles."""
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
    names = names_of(model.item_ids_, model.n_items)
    if not any(str(name) in titles for name in names):
        click.echo(
            f"Warning: none of the ids in {options.titles_file} is an item of the model, such as {names[0]}; "
            f"the file has {next(iter(titles))!r}",
            err=True,
        )
    return titles


def read_titles(path: str, separator: str | None = None, encoding: str | None = None) -> dict[str, str]:
    """Titles by item id from text, maybe gzipped, whose first two fields are id and title; a header is allowed.

    By default the separator is the one of TITLE_SEPARATORS that comes first in the first line, and the encoding UTF-8,
    or latin-1 for what is not valid UTF-8 (MovieLens).
    """
    with reading(path, encoding or "latin-1"), open_bytes(path) as stream:
        content = stream.read()
        try:
            text = content.decode(encoding or "utf-8-sig")
        except LookupError as error:
            raise ValueError(f"--titles-encoding: {error}") from None
        except UnicodeDecodeError:
            if encoding is not None:
                raise
            text = content.decode("latin-1")
    lines = [line for line in io.StringIO(text, newline=None).read().split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; expected lines of item id and title")
    if separator is None:
        present = [mark for mark in TITLE_SEPARATORS if mark in lines[0]]
        if not present:
            raise ValueError(f"{path} has no separator between id and title in its first line; give --titles-separator")
        separator = min(present, key=lines[0].index)
    # Quotes mean something in CSV; elsewhere they are part of a title ("Weird Al" Yankovic).
    try:
        rows = list(csv.reader(lines, delimiter=separator)) if separator in (",", ";") else None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error
    titles = {}
    for number, row in enumerate(rows or [line.split(separator) for line in lines], 1):
        if len(row) < 2:
            raise ValueError(
                f"{path}: entry {number} ({row[0][:60]!r}) has no title after the separator {separator!r}; "
                "give --titles-separator"
            )
        titles[row[0].strip()] = row[1].strip()
    return titles
