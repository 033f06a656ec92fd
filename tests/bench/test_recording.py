"""The commands of bench/RECORDING.md are those that the scripts take."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import sys

import click
import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "bench"))

COMMANDS = sorted(
    set(
        re.findall(
            r"^(?:timeout \d+ )?\S*python (bench/[^;`\n]*)$", (ROOT / "bench" / "RECORDING.md").read_text(), re.M
        )
    )
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses_and_its_function_takes_the_options(command):
    script, *arguments = shlex.split(command.replace("FOLDER", str(ROOT)))
    main = importlib.import_module(script.removeprefix("bench/").removesuffix(".py")).main
    if not isinstance(main, click.Command):  # takes the list of arguments
        return
    context = main.make_context(script, arguments)
    inspect.signature(main.callback).bind(**context.params)
