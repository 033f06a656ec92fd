"""The command line: ``hybridmf demo | compare | fit | recommend | info | tune | convert``.

A module a command; `options`, `sources` and `report` are what they share. Commands are thin: they turn options into
calls of the library and results into text. Exit codes: 0, 2 for the user's mistakes (one line on stderr; ``--debug``
shows the traceback), 130 after Ctrl-C.
"""

from __future__ import annotations

import click

from .._version import __version__
from . import compare, convert, demo, fit, info, recommend, tune
from .options import Commands, debug_option, examples


@click.group(
    cls=Commands,
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


for each in (demo, fit, compare, recommend, info, tune, convert):
    main.add_command(each.command)
