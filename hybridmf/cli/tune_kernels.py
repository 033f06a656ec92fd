"""``hybridmf tune-kernels``: measure kernels, or the machine for the cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import DeviceError
from ..plan.types import DTYPES
from .options import Options, check_folder, make_command, output_option


@make_command(
    "tune-kernels",
    "hybridmf tune-kernels",
    "hybridmf tune-kernels --kernel fused --factors 50,80 --budget 60",
    "hybridmf tune-kernels --calibrate",
    "hybridmf tune-kernels --compile --factors 64",
)
@click.option(
    "--calibrate", is_flag=True, help="Measure this machine for the cost model instead; one or two minutes with a GPU."
)
@click.option(
    "--compile", "compile_only", is_flag=True,
    help="Compile the kernels of ALS for --factors instead, once per machine, so that no fit compiles them.",
)  # fmt: skip
@click.option(
    "--kernel", "kernels", multiple=True, metavar="NAME", help="Only this kernel; repeatable.  [default: all]"
)
@click.option("--factors", default="32,64,100,128", show_default=True, help="Ranks, separated by commas.")
@click.option("--dtype", metavar="|".join(DTYPES), default="float32", show_default=True)
@click.option("--budget", type=float, default=300.0, show_default=True, help="Seconds for all kernels together.")
@click.option("--most", type=int, help="Configurations of each kernel and rank.  [default: as the budget allows]")
@output_option("Table of the fastest (JSON).  [default: the user's cache folder, from which fits read it]")
@click.option("--lines", type=click.Path(dir_okay=False), callback=check_folder, help="Append all measurements there.")
@click.option("--plot", type=click.Path(file_okay=False), help="Folder for plots of them (needs matplotlib).")
def command(options: Options) -> None:
    """Measure this machine and keep the results in the user's cache directory.

    Finds the fastest configuration of each kernel on this machine's GPU, for all fits that follow: each is compiled,
    its answer checked, and timed. Results are kept even if the command is interrupted.

    With --calibrate: the rates of cores, GPU and links by which plans pick the device and the partition of each fit.

    With --compile, nothing is measured. Fits and recommendations with these numbers of factors find their kernels on
    disk, in CuPy's cache (CUPY_CACHE_DIR), as on a fresh machine or in the image of a container.
    """
    if options.calibrate and options.compile_only:
        raise click.UsageError("--calibrate and --compile are two tasks; give one of them")
    if options.calibrate:
        from ..plan.machine import constants_text
        from ..tools.calibrate import calibrate_and_save

        machine, path = calibrate_and_save(lambda text: click.echo(text, err=True))
        click.echo(f"{constants_text(machine)}\nkept in {path}")
    elif options.compile_only:
        from ..tools.prepare import compile_kernels

        compile_kernels(_ranks(options.factors), click.echo)
    else:
        _run_tuning(options)


def _run_tuning(options: Options) -> None:
    from ..device.cuda import open_device
    from ..gpu.tuning.tune import Tuner, stamp, table_of
    from ..plan import tables
    from ..plots import new_figure
    from ..tools.tuning_plots import clouds, save_all

    ranks = _ranks(options.factors)
    if options.plot is not None:
        new_figure(1, 1)  # matplotlib may be missing: say so before minutes of work
    try:
        device = open_device()
    except DeviceError as error:
        raise DeviceError(
            f"tune-kernels needs a GPU, and none can be used here: {error}. (with --calibrate, it works without one)"
        ) from error
    gpu = tables.Gpu.of(device.spec)
    path = tables.user_file(device.spec) if options.output is None else Path(options.output)
    tuner = Tuner(device, budget=options.budget, most=options.most, table=tables.stored(path, gpu))
    jobs = tuner.run(options.kernels or None, ranks, dtype=options.dtype)
    tables.store(tables.Table(gpu), path)  # fails before the work if the file cannot be written
    click.echo(f"{device.spec}: drawing ratings, then {options.budget:g} s", err=True)
    measured: list[dict[str, Any]] = []
    for job in jobs:
        click.echo(job.summary())
        tables.store(table_of(device, [job]), path)
        records = [line | stamp(device) for line in job.lines()]
        measured += records
        if options.lines is not None:
            with open(options.lines, "a", encoding="utf-8") as out:
                out.writelines(json.dumps(line) + "\n" for line in records)
    click.echo(f"kept in {path}")
    if options.plot is not None:
        for figure in save_all(clouds(measured), Path(options.plot)):
            click.echo(f"drawn: {figure}")


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--factors must be numbers with commas between, such as 32,64; got {text!r}") from None
