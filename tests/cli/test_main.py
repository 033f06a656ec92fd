"""The group of commands: help, errors, signals, the documented options."""

from __future__ import annotations

import re
import signal
import sys

import pytest

import hybridmf as hmf
from hybridmf import cli
from support.checkout import ROOT
from support.command_line import raising, refuse, run, start, succeed

COMMANDS = ("demo", "fit", "evaluate", "compare", "recommend", "similar", "info", "search", "tune-kernels", "convert")

# ------------------------------------------------------------------------------------------------------ the group


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    output = succeed(command, "--help")
    assert f"hybridmf {command}" in output.split("Examples:")[1]
    assert "--debug" in output
    assert succeed(command, "-h") == output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_marks_of_its_source(command):
    output = succeed(command, "--help")
    assert not any(mark in output for mark in ("\\b", "\b", "noqa"))


def test_help_of_compare_lists_each_method_on_a_line():
    listed = re.findall(r"^  (als|als-cg|als-subspace|sgd-[a-z-]+|ccd)  ", succeed("compare", "--help"), re.MULTILINE)
    sgd = [f"sgd-{schedule}" for schedule in ("blocks", "hogwild", "msgd", "batch-hogwild")]
    assert listed == ["als", "als-cg", "als-subspace", *sgd, "ccd"]


def test_help_of_the_group_names_all_commands_and_nothing_else():
    commands = re.findall(r"^  ([a-z-]+)  ", succeed("--help").split("Commands:")[1], re.MULTILINE)
    assert sorted(commands) == sorted(COMMANDS)


def test_a_former_name_of_a_command_works_and_says_so():
    output = succeed("tune", "--help")
    assert "hybridmf tune is called hybridmf tune-kernels now." in output
    assert succeed("tune-kernels", "--help") in output


def test_help_of_fit_and_search_has_headings():
    """What everybody sets comes first, and no option twice."""
    for command in ("fit", "search"):
        first, *others = re.split(r"\n\n(?=[A-Z][\w +]+:\n)", succeed(command, "--help").partition("Options:")[2])
        assert "--factors" in first and "--device" in first and "--assembly" not in first
        assert [text.split(":")[0] for text in others[:2]] == ["Model", "Solver and precision"]
        options = [
            name for text in (first, *others) for name in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)
        ]
        assert len(options) == len(set(options)) > 40


def test_help_of_the_group_repeats_the_commands_help():
    for name, text in cli.COMMANDS.items():
        assert " ".join(succeed(name, "--help").split("\n\n")[1].split()).startswith(text), name


def test_version_as_a_process():
    process = start("--version")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (0, f"hybridmf, version {hmf.__version__}", "")


@pytest.mark.parametrize("error", [ValueError("no\ngood"), TypeError("no good"), hmf.errors.DeviceError("no good")])
def test_a_library_error_is_one_line(monkeypatch, error):
    monkeypatch.setattr("hybridmf.cli.demo.run_demo", raising(error))
    assert refuse("demo") == "Error: no good"


def test_an_error_without_a_message_is_named(monkeypatch):
    monkeypatch.setattr("hybridmf.cli.demo.run_demo", raising(ValueError()))
    assert refuse("demo") == "Error: ValueError"


def test_a_file_error_names_the_file(monkeypatch):
    monkeypatch.setattr("hybridmf.cli.demo.run_demo", raising(PermissionError(13, "Permission denied", "some/file")))
    assert refuse("demo") == "Error: some/file: Permission denied"


@pytest.mark.parametrize("arguments", [("--debug", "demo"), ("demo", "--debug")])
def test_debug_shows_the_traceback(monkeypatch, arguments):
    monkeypatch.setattr("hybridmf.cli.demo.run_demo", raising(ValueError("no good")))
    assert isinstance(run(*arguments).exception, ValueError)


def test_a_bug_is_distinguished_from_a_user_error(monkeypatch):
    monkeypatch.setattr("hybridmf.cli.demo.run_demo", raising(RuntimeError("a bug")))
    result = run("demo")
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


def test_interruption_exits_130(monkeypatch):
    monkeypatch.setattr("hybridmf.cli.demo.run_demo", raising(KeyboardInterrupt()))
    result = run("demo")
    assert result.exit_code == 130
    assert result.output.strip() == "Interrupted."


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_while_training_leaves_no_file(folder, tmp_path):
    process = start("fit", folder / "ratings.csv", "-o", tmp_path / "m.safetensors", "--iterations", 10**6)
    line = next(line for line in iter(process.stdout.readline, "") if "memory" in line)  # the end of the plan
    assert line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("Interrupted.\n")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_no_error(folder):
    process = start("recommend", folder / "model.safetensors", "--all-users")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(timeout=60)


# ----------------------------------------------------------------------------------------------------------- docs


def test_documentation_names_real_options_and_commands():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    helps = {command: succeed(command, "--help") for command in COMMANDS}
    assert set(re.findall(r"^## ([a-z-]+)$", text, re.MULTILINE)) == set(COMMANDS)
    for command in COMMANDS:
        section = text.split(f"\n## {command}\n")[1].split("\n## ")[0]
        options = set(
            re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", re.sub(r"```text.*?```", "", section, flags=re.DOTALL))
        )
        unknown = {option for option in options if option not in helps[command]}
        assert not unknown, (command, unknown)
