"""Shared by the commands: --debug, options, and paths that are checked before any work."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import click

from ..core.files import permissions_of

DEBUG = "hybridmf.debug"

Options: TypeAlias = SimpleNamespace  # values of a command's options and arguments by the names of its parameters


def with_options(command: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    """A command with options, which its help lists in this order."""
    for option in reversed(options):
        command = option(command)
    return command


class _Sectioned(click.Command):
    """A command whose help lists options under headings: `sections` has the names of parameters by heading."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of each section, and those of none under "Options", which comes first."""
        records = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        elsewhere = {name for names in self.sections.values() for name in names}
        usual = [name for name in records if name not in elsewhere]
        for heading, names in {"Options": usual, **self.sections}.items():
            with formatter.section(heading):
                formatter.write_dl([records[name] for name in names if name in records])


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[DEBUG] = value or ctx.meta.get(DEBUG, False)


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show tracebacks of errors."
)


def examples(*lines: str) -> str:
    r"""Text for the end of a command's help; \b keeps click from reflowing it."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def make_command(
    name: str, *lines: str, sections: Mapping[str, Sequence[str]] | None = None
) -> Callable[[Callable[[Options], None]], click.Command]:
    """A command from a function of its options, with ``--debug``; its help ends with `lines` as examples."""

    def made(run: Callable[[Options], None]) -> click.Command:
        @functools.wraps(run)
        def call(**given: Any) -> None:
            run(Options(**given))

        kind: dict[str, Any] = {} if sections is None else {"cls": _Sectioned, "sections": sections}
        return debug_option(click.command(name, epilog=examples(*lines), **kind)(call))

    return made


def check_folder(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Reject an unusable output path before any work."""
    if path in ("", "-"):
        raise click.BadParameter(f"{path!r} is no file, and nothing is written to standard output; give a name")
    if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        raise click.BadParameter(f"the folder {os.path.dirname(path)!r} does not exist")
    if path is not None and not os.path.isdir(path):
        try:
            permissions_of(path)
        except FileExistsError as error:
            raise click.BadParameter(str(error)) from error
    return path


def refuse_overwriting(output: str | None, *inputs: str | None) -> None:
    """An output that is one of the inputs, or lies in a store that is one, would destroy it."""
    from ..data.manifest import MANIFEST  # imports NumPy, which the help does without

    for path in inputs:
        if not output or not path or not os.path.exists(path):
            continue
        store = os.path.exists(os.path.join(path, MANIFEST))
        what, other = ("store", "folder") if store else ("file", "name")
        if os.path.exists(output) and os.path.samefile(output, path):
            raise click.UsageError(f"the output {output!r} is a {what} that is read; give another {other}")
        if store and Path(path).resolve() in Path(output).resolve().parents:
            raise click.UsageError(f"the output {output!r} lies in the store that is read; give another folder")


def output_option(text: str, *, required: bool = False) -> Callable[..., Any]:
    """``-o FILE``, validated immediately; commands write it only on success."""
    kind = click.Path(dir_okay=False, writable=True)
    return click.option("-o", "--output", type=kind, callback=check_folder, required=required, help=text)


def refuse_ending(output: str | None, endings: Iterable[str], otherwise: str) -> None:
    """Refuse an output whose name promises another content; `otherwise` is the way to write it all the same."""
    ending = os.path.splitext(output or "")[1].lower()
    if ending not in endings:
        known = ", ".join(filter(None, endings))
        raise click.UsageError(
            f"-o {output} ends in {ending}, of which no file is written; end it in one of {known}, or {otherwise}"
        )


def check_plot(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """`check_folder` of a picture, which matplotlib must be able to write."""
    if check_folder(context, parameter, path) is not None:
        from ..plots import check_picture

        assert path is not None
        check_picture(path)
    return path


def plot_option(text: str) -> Callable[..., Any]:
    kind = click.Path(dir_okay=False, writable=True)
    return click.option("--plot", type=kind, callback=check_plot, help=f"{text} (needs matplotlib).")


def share_or_number(name: str, value: float) -> float | int:
    if value >= 1 and not float(value).is_integer():
        raise click.UsageError(f"{name} must be a share below 1 or a whole number, got {value:g}")
    return int(value) if value >= 1 else value


def one_or_pair(*names: str) -> Callable[[str], Any]:
    """A type of options: a number or one of some names, or a pair of users' and items' with a comma between them."""

    def one(text: str) -> str | float:
        return text if text in names else float(text)

    def convert(given: str) -> Any:
        parts = given.split(",")
        if len(parts) > 2:
            raise click.BadParameter(f"{given!r} has {len(parts)} values; expected one, or two: USERS,ITEMS")
        try:
            values = tuple(one(part.strip()) for part in parts)
        except ValueError:
            what = ", ".join((*names, "a number"))
            raise click.BadParameter(f"{given!r} is not {what}, or two of these: USERS,ITEMS") from None
        return values if len(values) > 1 else values[0]

    return convert


def device_list(text: str) -> str | list[str]:
    """One device, or several with commas between them."""
    return text.split(",") if "," in text else text
