"""The command line: ``hybridmf demo | compare | fit | search | evaluate | recommend | similar | info | ...``.

One module per command; they share `options`, `sources` and `report`. Commands are thin: they turn options into
calls of the library and results into text. A command's module, and NumPy and SciPy with it, is imported when the
command runs. Exit codes: 0, 2 for the user's mistakes (one line on stderr; ``--debug`` shows the traceback), 130
after Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from importlib import import_module
from typing import Any

import click

from .._version import __version__
from ..core.logs import filtered_log
from ..errors import HybridMFError
from .options import DEBUG, debug_option, examples

COMMANDS = {
    "compare": "Compare methods and devices on the same ratings, from the same initial factors.",
    "convert": "Convert ratings to another format and print statistics.",
    "demo": "Train on generated film ratings and report the results.",
    "evaluate": "Evaluate a trained model on held-out ratings.",
    "fit": "Train a model on a file of ratings and save it.",
    "info": "Describe this installation, a model, a file of ratings or a store.",
    "recommend": "Recommend items to users of a trained model.",
    "search": "Find the hyperparameters that are best for a file of ratings, and save the model.",
    "similar": "Find the items, or users, that are most similar to others by the cosine of their factors.",
    "tune-kernels": "Measure this machine and keep the results in the user's cache directory.",
}
"""First sentence of each command's help: the group shows it without importing the command."""


RENAMED = {"tune": "tune-kernels"}  # new names of commands; the old ones still work, with a note


USER_MISTAKES = (HybridMFError, ValueError, TypeError, OSError, ImportError)
"""Exceptions of the library for unusable input; any other exception is a bug and keeps its traceback."""

_READING = re.compile(
    "format|separator|header|user|item|value|timestamp|where|duplicates|missing|quote|escape|encoding|weight"
)
"""Arguments of `Ratings.from_file` whose options have the same names; that of "weight" is --weights."""

_ARGUMENT = re.compile(
    r"""(?<![\w"'-])(?P<name>[a-z_]+)=(?:(?P<q>["'])(?P<text>.+?)(?P=q)|(?P<plain>None|True|False|\d+)|(?![\w"'{]))"""
)
"""An argument in a message of the library, with or without a value."""


class _Commands(click.Group):
    """Commands that are imported when they run; errors of the library become one line on stderr."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """A command by its name, also by a former one."""
        if args[0] in RENAMED:
            click.echo(f"hybridmf {args[0]} is called hybridmf {RENAMED[args[0]]} now.", err=True)
            args = [RENAMED[args[0]], *args[1:]]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; exit codes are those of `hybridmf.cli`."""

        def translate(record: logging.LogRecord) -> bool:
            record.msg, record.args = self._with_options(ctx, record.getMessage()), ()
            return True

        try:
            with filtered_log(translate):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            raise click.exceptions.Exit(130) from None
        except BrokenPipeError:  # click ends quietly
            raise
        except USER_MISTAKES as error:
            if ctx.meta.get(DEBUG):
                raise
            click.echo(f"Error: {self._with_options(ctx, _one_line(error))}", err=True)
            raise click.exceptions.Exit(2) from None

    def _with_options(self, ctx: click.Context, text: str) -> str:
        """A message of the library with arguments as options of the command: duplicates="sum" as --duplicates sum."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        options = {name for param in getattr(command, "params", ()) for name in param.opts if name.startswith("--")}

        def spelled(found: re.Match[str]) -> str:
            name = "weights" if found["name"] == "weight" else found["name"].replace("_", "-")
            option, value = f"--{name}", found["text"] or found["plain"] or ""
            if option not in options or not _READING.fullmatch(found["name"]):
                return found[0]
            if found["name"] == "header" and value in ("True", "False"):
                return "--header" if value == "True" else "--no-header"
            value = shlex.quote(value) if found["text"] else value.lower()
            return f"{option} {value}" if value else option

        return _ARGUMENT.sub(spelled, text)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=examples("hybridmf fit ratings.csv -o model.safetensors", "hybridmf recommend model.safetensors --user 42"),
)
@click.version_option(__version__, prog_name="hybridmf")
@debug_option
def main() -> None:
    """Matrix factorization for recommenders.

    New here? "hybridmf demo" needs no data and takes less than a minute.

    "hybridmf COMMAND --help" explains a command and gives examples.
    """
