"""The command line, through click's test runner and as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

import hybridmf as hmf
from hybridmf.cli import main
from support.checkout import ROOT


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refuse(*arguments: object) -> str:
    """The message of a user's mistake: exit code 2, one line, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    last = result.output.rstrip("\n").split("\n")[-1]
    assert last.startswith("Error: "), result.output
    return last


def start(*arguments: object, **options: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "hybridmf", *map(str, arguments)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def load_model(folder: Path):
    return hmf.load(folder / "model.safetensors")


def raising(error: BaseException):
    def function(*_, **__):
        raise error

    return function


# ----------------------------------------------------------------------------------------------------------- info


def facts(text: str) -> dict[str, str]:
    return dict(re.split(r"  +", line, maxsplit=1) for line in text.strip().split("\n"))
