"""``hybridmf demo``."""

from __future__ import annotations

import click

from ..tools.demo import run_demo
from .options import Options, make_command


@make_command("demo", "hybridmf demo --seed 7")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the data and the models; at least 0.")
@click.option("--quick", is_flag=True, help="Fewer people and films.")
def command(options: Options) -> None:
    """Train on generated film ratings and report the results.

    The data are generated with planted taste, so the report can say whether the models found it: held-out accuracy
    against a baseline, and recommendations with titles.
    """
    run_demo(click.echo, seed=options.seed, quick=options.quick)
