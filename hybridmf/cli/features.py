"""Features of items and users from files, as options of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from ..core.objective import SIDES, Side
from ..data.features import Features
from ..errors import RatingsError
from .options import Options, with_options
from .sources import existing_file, spelled_separator

NAMES = ("item_features", "item_feature_columns", "user_features", "user_feature_columns", "tag_separator")
"""Parameters of `features_options`."""


def features_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option(
        "--tag-separator", metavar="TEXT", help='Between the tags in a field of these files, such as "|".'
    )(command)
    for side, columns in (("user", "age, country"), ("item", "genres, year")):  # help lists the last first
        command = with_options(
            command,
            click.option(
                f"--{side}-features", type=existing_file,
                help=f"File with a row for each {side}: id, {columns}, ... (CSV with names in line 1, Parquet).",
            ),
            click.option(
                f"--{side}-feature-columns", metavar="NAME,...", help="Its columns to use.  [default: all but the id]"
            ),
        )  # fmt: skip
    return command


def _with_options(text: str, side: Side) -> str:
    """A message of the library with options in place of arguments."""
    text = re.sub(r"; categories=\[.*?\] takes.*$", "", text)
    text = re.sub(r"pass label=.*$", f"name it {side}_id in line 1", text, flags=re.DOTALL)
    text = re.sub(r"\bcolumns=('[^']*')?", f"--{side}-feature-columns", text)
    return text.replace("separator='|'", "--tag-separator '|'").replace("separator=", "--tag-separator")


def features_of(options: Options) -> dict[str, Features]:
    """Arguments of `fit` from the files and columns of each side."""
    files = {side: getattr(options, f"{side}_features") for side in SIDES[::-1]}
    columns = {side: getattr(options, f"{side}_feature_columns") for side in files}
    for side, path in files.items():
        if path is None and columns[side] is not None:
            raise click.UsageError(f"--{side}-feature-columns needs --{side}-features FILE")
    found = {}
    for side, path in files.items():
        if path is None:
            continue
        chosen = None if columns[side] is None else [name.strip() for name in columns[side].split(",")]
        try:
            found[f"{side}_features"] = Features._of_side(path, side, chosen, spelled_separator(options.tag_separator))
        except (RatingsError, TypeError) as error:  # whose advice is arguments of Features.from_file
            raise type(error)(_with_options(str(error), side)) from error
    if options.tag_separator is not None and not found:
        raise click.UsageError("--tag-separator needs --item-features FILE or --user-features FILE")
    return found


def include_cold_option(text: str) -> Callable[..., Any]:
    return click.option("--include-cold", is_flag=True, help=text)


def check_include_cold(model: Any, include_cold: bool) -> None:
    """Refuse --include-cold for a model that has no features of items, where it would change nothing."""
    if include_cold and "item" not in model._learned.features:
        raise click.UsageError(
            "--include-cold ranks items by their features, and the model has none; fit it with --item-features FILE, "
            "or leave it out"
        )
