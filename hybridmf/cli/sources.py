"""Sources of ratings: a file with the options for reading it, or a store, which needs none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from ..core.files import FORMATS
from ..core.validate import MERGE_RULES
from ..data.labels import MISSING
from ..data.layout import FileOptions
from ..data.readers import file_columns, number_of, part_paths
from ..data.store import Store
from ..ratings import Ratings
from .options import with_options

existing_file = click.Path(exists=True, dir_okay=False)


class RatingsPath(click.Path):
    """A file of ratings, a folder, or a pattern that matches files."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-" and not os.path.exists(value):
            self.fail("'-' is no file; /dev/stdin takes standard input redirected from a file (< FILE)", param, ctx)
        try:
            return value if part_paths(value) else super().convert(value, param, ctx)
        except FileNotFoundError as error:
            self.fail(f"{error.strerror} {value!r}", param, ctx)


ratings_path = RatingsPath(exists=True)

Source = str | list[str]  # a file, a pattern or a folder; or several, whose files are read as one


def one_source(paths: tuple[str, ...]) -> Source:
    """The path of a command's argument, or the list of several, which are no stores."""
    if len(paths) > 1 and (stores := list(filter(is_store, paths))):
        raise click.UsageError(f"{stores[0]} is a store, which is not read with other files; give it alone")
    return paths[0] if len(paths) == 1 else list(paths)


def files_of(*sources: Source | None) -> list[str]:
    """The paths of all files, for `refuse_overwriting`."""
    return [path for source in sources if source for path in part_paths(source) or [str(source)]]


def name_of(source: Source) -> str:
    return source if isinstance(source, str) else f"{source[0]} and {len(source) - 1} more"


def _column(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def spelled_separator(text: str | None) -> str | None:
    """Translate names of separators that are hard to type in a shell."""
    return {"tab": "\t", "\\t": "\t", "space": " "}.get(text, text) if text else None


TRANSLATED: dict[str, Callable[[Any], Any]] = {
    "separator": spelled_separator,
    "header": lambda given: "auto" if given is None else given,
    "user": _column,
    "item": _column,
    "value": lambda given: None if given.lower() == "none" else _column(given),
    "timestamp": lambda given: None if given.lower() == "none" else _column(given),
    "quote": lambda given: None if given.lower() == "none" else given,
}
"""Arguments of `Ratings.from_file` from the values of their options; others are taken as they are."""

RATINGS_OPTIONS: dict[str, dict[str, Any]] = {
    "format": {
        "type": click.Choice(FORMATS), "default": "auto",
        "help": 'Of RATINGS; "lists": each line has a user, then all items of the user.',
    },
    "separator": {"help": 'Between fields: ",", "::", "\\t" or "tab", ...  [default: detected]'},
    "header": {"default": None, "help": "Whether line 1 has names.  [default: detected]"},
    "user": {
        "default": "auto",
        "help": "Column of users: its name, or a number from 0; auto: by the names in the header, else 0.",
    },
    "item": {"default": "auto", "help": "Column of items; auto: by name, else 1."},
    "value": {"default": "auto", "help": 'Column of values; auto: by name, else 2; "none": each is 1.'},
    "timestamp": {"default": "auto", "help": 'Column of times; auto: by name; "none": no times.'},
    "encoding": {"help": "Of text.  [default: UTF-8]"},
    "duplicates": {
        "type": click.Choice(MERGE_RULES), "default": "error", "help": "What to do with a pair that occurs twice.",
    },
    "missing": {
        "type": click.Choice(MISSING), "default": "error",
        "help": "What to do with entries whose user or item is empty, NULL, None, NA, nan or \\N.",
    },
    "quote": {
        "default": "auto",
        "help": 'Mark around fields, which may then span lines; "none": marks are text; auto: \'"\', within a line.',
    },
    "escape": {"help": "Character before a quotation mark or separator that belongs to a field."},
}  # fmt: skip
"""By the arguments of `Ratings.from_file`."""

READING = {"Reading": ("where", *RATINGS_OPTIONS)}
"""Heading of `ratings_options` and `where_option` in the help of a command that has many other options."""


def ratings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option(
            "--header/--no-header" if name == "header" else f"--{name}",
            show_default=about.get("default") is not None,
            **about,
        )
        for name, about in RATINGS_OPTIONS.items()
    ]
    return with_options(command, *options)


def reading_arguments() -> dict[str, Any]:
    """Arguments of `Ratings.from_file` and `convert` by the options of the running command."""
    given = click.get_current_context().params
    options = {name: given[name] for name in RATINGS_OPTIONS if name in given}
    return {name: TRANSLATED[name](value) if name in TRANSLATED else value for name, value in options.items()}


def read_ratings(path: Source, *, show_progress: bool = True, weight: str | None = None) -> Ratings:
    """Ratings in memory: of files, read as the running command's options say, or of a store; `weight`: a column."""
    where = click.get_current_context().params.get("where", ())
    if is_store(path):
        if where:
            raise click.UsageError(f"--where filters rows of a file, and {path} is a store; convert the rows you need")
        return open_store(path).to_ratings()
    options = reading_arguments() | {"weight": None if weight is None else _column(weight)}
    return Ratings.from_file(path, where=row_filters(where), show_progress=show_progress, **options)


where_option = click.option(
    "--where", multiple=True, metavar="COLUMN=VALUE[,VALUE...]",
    help="Read only rows with this value, or one of these, in a column (name, or number from 0); may be repeated.",
)  # fmt: skip


def row_filters(given: tuple[str, ...]) -> dict[int | str, list[Any]] | None:
    """Argument ``where=`` of `Ratings.from_file`; a number is given as such and as text: 4 matches 4.0 and "4"."""
    filters: dict[int | str, list[Any]] = {}
    for text in given:
        column, equals, values = text.partition("=")
        if not equals or not column:
            raise click.UsageError(f"--where takes COLUMN=VALUE, got {text!r}")
        for value in map(str.strip, values.split(",")):
            number = number_of(value)
            filters.setdefault(_column(column), []).extend([value] if number is None else [value, number])
    return filters or None


def is_store(path: Source) -> bool:
    """Whether a path is a folder other than one of Parquet files, which is read as a file."""
    return isinstance(path, str) and os.path.isdir(path) and part_paths(path) is None


def column_facts(source: Source, weight: str | None = None) -> dict[str, str]:
    """The "columns" that `read_ratings` uses, of the first of several files; none for stores and files without them."""
    if is_store(source):
        return {}
    arguments = reading_arguments() | {"weight": None if weight is None else _column(weight)}
    del arguments["timestamp"]
    columns = file_columns(files_of(source)[0], FileOptions(**arguments))
    return {} if columns is None else {"columns": str(columns)}


def open_store(path: Source) -> Store:
    """Open a store; options that say how a file is read are refused."""
    store = Store.open(str(path))
    refuse_reading_options(f"{path} is a store")
    return store


def refuse_reading_options(why: str) -> None:
    """Refuse options of `ratings_options` that would have no effect in the running command."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in RATINGS_OPTIONS and context.get_parameter_source(option.name) is not ParameterSource.DEFAULT:
            spelled = option.secondary_opts if context.params[option.name] is False else option.opts
            raise click.UsageError(f"{spelled[0]} says how a file of ratings is read, and {why}; leave it out")
