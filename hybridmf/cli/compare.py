"""``hybridmf compare``: methods and devices side by side."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..compare import FEEDBACK, default_models
from ..compare import compare as run_compare
from ..data.readers import part_paths
from ..datasets import SHAPES
from . import sources
from .options import Options, check_folder, device_list, make_command, plot_option, refuse_overwriting


@make_command(
    "compare",
    "hybridmf compare demo",
    "hybridmf compare ratings.dat --method als --method sgd-blocks --factors 32 --json report.json",
    "hybridmf compare netflix --method als --factors 100 --iterations 5 --plot report.png",
)
@click.argument("ratings", metavar="RATINGS")
@click.option(
    "--feedback", type=click.Choice(FEEDBACK), default="explicit", show_default=True,
    help="explicit: values are ratings to predict. implicit: values are counts or likes, items are ranked.",
)  # fmt: skip
@click.option(
    "--method", "methods", multiple=True, metavar="NAME",
    help="One of those above; repeat it for several.  [default: all for the feedback]",
)  # fmt: skip
@click.option(
    "--device", "devices", multiple=True,
    help="cpu, cuda, cuda:N, or several as cuda:0,cuda:1; repeat it.  [default: cpu and cuda]",
)  # fmt: skip
@click.option("--factors", type=int, default=64, show_default=True, help="Rank.")
@click.option("--iterations", type=int, default=10, show_default=True, help="Iterations of each method.")
@click.option("--test-size", type=float, default=0.1, show_default=True, help="Share held out to evaluate; 0: none.")
@click.option(
    "--scale", type=float, default=1.0, show_default=True,
    help="Scale of the sides of a synthetic shape, up to 1: 0.1 draws a hundredth of its ratings.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True)
@sources.where_option
@click.option("--json", "json_file", type=click.Path(dir_okay=False), callback=check_folder, help="Report as JSON.")
@plot_option("Picture of seconds and quality")
@sources.ratings_options
@click.option("--quiet", is_flag=True, help="No progress bar.")
def command(options: Options) -> None:
    """Compare methods and devices on the same ratings, from the same initial factors.

    RATINGS is a file, a pattern or a store (as for "hybridmf fit"), "demo", or the name of a synthetic shape: ml-1m,
    ml-10m, ml-20m, netflix, yahoo-r1, sls, rucci, msd, epinions, eachmovie, yahoo-songs, yahoo-music. Without a GPU
    the methods of the CPU are compared. The exit code is 1 if two devices disagree on the objective of a method.

    \b
    als                exact alternating least squares
    als-cg             the same with 3 conjugate gradient steps per row
    als-subspace       the same, 32 coordinates at a time (implicit)
    sgd-blocks         stochastic gradient descent, blocks without conflicts (CPU)
    sgd-hogwild        the same without synchronization (CPU)
    sgd-msgd           the same, items and users in turn
    sgd-batch-hogwild  runs of ratings without synchronization (GPU)
    ccd                cyclic coordinate descent, CCD++
    """  # noqa: D301 (click wants the backspace itself before a paragraph that keeps its lines)
    name, feedback, methods = options.ratings, options.feedback, options.methods
    for output in (options.json_file, options.plot):
        refuse_overwriting(output, *sources.files_of(name))
    models = default_models(feedback, options.factors, options.iterations)
    unknown = [method for method in methods if method not in models]
    if unknown:
        raise click.UsageError(f"--method {unknown[0]} is unknown for {feedback} feedback; known: {', '.join(models)}")
    started = time.perf_counter()
    ratings: Any = name
    if name == "demo" or name in SHAPES:
        if options.where:
            raise click.UsageError(f"--where filters rows of a file, and {name} is drawn from a seed; leave it out")
        sources.refuse_reading_options(f"{name} is drawn from a seed")
    elif os.path.exists(name) or part_paths(name):
        ratings = sources.read_ratings(name, show_progress=not options.quiet)
    read_seconds = time.perf_counter() - started
    result = run_compare(
        ratings,  # a name that is no file and no shape is refused here
        {name: model for name, model in models.items() if not methods or name in methods},
        devices=[device_list(device) for device in options.devices] or ("cpu", "cuda"),
        feedback=feedback,
        test_size=options.test_size,
        scale=options.scale,
        seed=options.seed,
        show_progress=not options.quiet,
    )
    if ratings is not name:
        result = replace(result, name=Path(name).name, load_seconds=read_seconds)
    click.echo(str(result))
    if options.json_file is not None:
        result.to_json(options.json_file)
    if options.plot is not None:
        result.plot(options.plot)
    if not result.agree:
        raise click.exceptions.Exit(1)
