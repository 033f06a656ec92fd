"""The command line: ``hybridmf demo | fit | recommend | info | convert``.

Commands are thin: they turn options into calls of the library and results into text. Exit codes: 0, 2 for the user's
mistakes (one line on stderr; ``--debug`` shows the traceback), 130 after Ctrl-C.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, TextIO

import click
import numpy as np
import scipy.io
import scipy.sparse as sp

from . import _validate, dispatch, formats
from ._version import __version__
from .demo import format_table, run_demo
from .errors import HybridMFError
from .metrics import PopularityRecommender, evaluate
from .ratings import Ratings, _open_bytes, _reading, _write_atomically, split

USER_MISTAKES = (HybridMFError, ValueError, TypeError, OSError, ImportError)
"""What the library raises for input it cannot use; anything else is a bug and keeps its traceback."""

BLOCK_USERS = 8_192
"""Users `recommend` asks the model for at a time, so that --all-users needs no list of everything."""

TITLE_SEPARATORS = ("::", "\t", "|", ";", ",")
DEBUG = "hybridmf.debug"


# --------------------------------------------------------------------------------------------- errors, common options


class _Commands(click.Group):
    """A group that turns the library's errors into one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            raise click.exceptions.Exit(130) from None
        except BrokenPipeError:  # click ends quietly
            raise
        except USER_MISTAKES as error:
            if ctx.meta.get(DEBUG):
                raise
            click.echo(f"Error: {_one_line(error)}", err=True)
            raise click.exceptions.Exit(2) from None


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[DEBUG] = value or ctx.meta.get(DEBUG, False)


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show tracebacks of errors."
)
existing_file = click.Path(exists=True, dir_okay=False)


def ratings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how a ratings file is to be read; they arrive as keyword arguments of `read_ratings`."""
    options = (
        click.option("--separator", help='Between fields: ",", "::", "\\t" or "tab", ...  [default: found out]'),
        click.option("--header/--no-header", default=None, help="Whether line 1 has names.  [default: found out]"),
        click.option("--user", "user_column", default="0", help="Column of users, a name or a number from 0."),
        click.option("--item", "item_column", default="1", help="Column of items."),
        click.option("--value", "value_column", default="2", help='Column of values; "none": every value is 1.'),
        click.option(
            "--duplicates",
            type=click.Choice(_validate.MERGE_RULES),
            default="error",
            show_default=True,
            help="What to do with a pair that occurs twice.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_ratings(
    path: str,
    *,
    separator: str | None = None,
    header: bool | None = None,
    user_column: str = "0",
    item_column: str = "1",
    value_column: str = "2",
    duplicates: str = "error",
) -> Ratings:
    """`Ratings.from_file` with options as the command line has them."""
    return Ratings.from_file(
        path,
        separator=_separator(separator),
        header="auto" if header is None else header,
        user=_column(user_column),
        item=_column(item_column),
        value=None if value_column.lower() == "none" else _column(value_column),
        duplicates=duplicates,
    )


def _separator(text: str | None) -> str | None:
    """A tab is hard to type in a shell, so it may be spelled out."""
    return {"tab": "\t", "\\t": "\t", "space": " "}.get(text, text) if text else None


def _column(text: str) -> int | str:
    return int(text) if text.isdigit() else text


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="hybridmf")
@debug_option
def main() -> None:
    """Matrix factorization for recommenders.

    New here? Run "hybridmf demo": it needs no data and takes less than a minute. With ratings of your own:

    \b
      hybridmf fit ratings.csv -o model.safetensors
      hybridmf recommend model.safetensors --user 42
    """
