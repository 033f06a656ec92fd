"""``hybridmf search``: find the hyperparameters that are best for a file of ratings, and save the model."""

from __future__ import annotations

import json
from typing import Any

import click

from ..metrics import PopularityRecommender
from ..ratings import split
from ..search import check_metric, parse_seconds, search
from . import sources
from .features import NAMES, features_of, features_options
from .fit import check_meets, check_weights, read_and_say, save_model, share_of, silent
from .hyperparameters import SECTIONS, make_model, model_options
from .options import Options, check_folder, make_command, output_option, plot_option, refuse_overwriting
from .report import file_size


@make_command(
    "search",
    "hybridmf search ratings.csv -o best.safetensors --model implicit --metric ndcg@20 --budget 2min",
    "hybridmf search ratings.csv -o best.safetensors --budget 60s --validation held-out.csv",
    "hybridmf search plays.tsv.gz -o best.safetensors --model implicit --trials 40 --plot trials.png",
    sections=SECTIONS | {"Features": NAMES} | sources.READING,
)
@click.argument("ratings_files", metavar="RATINGS...", nargs=-1, required=True, type=sources.ratings_path)
@output_option("Model file (safetensors).", required=True)
@model_options
@click.option("--metric", metavar="NAME", help="ndcg@K, recall@K, map@K, ..., rmse or mae.  [default: rmse; ndcg@10]")
@click.option("--budget", metavar="TIME", help='For everything, as "90s", "2min" or "1h".  [default: 2min]')
@click.option(
    "--trials", type=click.IntRange(1), metavar="N",
    help="At most N trials; without --budget, a seed decides everything.",
)  # fmt: skip
@click.option(
    "--validation", metavar="SHARE|NUMBER|FILE",
    help="Ratings to select by: held out, or of a file.  [default: a tenth, by time if there are timestamps]",
)  # fmt: skip
@click.option("--weights", metavar="COLUMN", help="Weight of the squared error of each rating (explicit only).")
@features_options
@click.option("--seed", type=int, default=0, show_default=True, help="Of the split, the settings and the factors.")
@sources.where_option
@plot_option("Picture of the metric over each parameter and over seconds")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object, and nothing else.")
@click.option(
    "--lines", type=click.Path(dir_okay=False), callback=check_folder, help="File for one JSON object for each trial."
)
@sources.ratings_options
@click.option("--quiet", is_flag=True, help="No progress line: results only.")
def command(options: Options) -> None:
    """Find the hyperparameters that are best for a file of ratings, and save the model.

    Many settings are fitted for a few iterations, the best of them longer and at higher ranks. The winner, which is
    compared with the defaults and with popularity, is fitted on all ratings. Ctrl-C ends the search and keeps the best.

    Hyperparameters that are given, as in "hybridmf fit", are kept; without any, lambda, the weights and the rank are
    searched.
    """
    source, validation, weights = sources.one_source(options.ratings_files), options.validation, options.weights
    share = share_of(validation)
    held_out_file = validation if share is None else None
    for written in (options.output, options.plot, options.lines):
        refuse_overwriting(
            written, *sources.files_of(source, held_out_file, options.item_features, options.user_features)
        )
    model = make_model(options)
    check_metric(options.metric, model, "--metric")
    check_weights(options, source)
    if weights is not None and (options.kind == "implicit" or validation is not None):
        raise click.UsageError(
            f"--weights {weights}: a search has weights for --model explicit and without --validation, whose "
            "ratings have none; leave one out"
        )
    features: dict[str, Any] = features_of(options)
    quiet = options.quiet or options.as_json
    say = silent if quiet else click.echo
    seconds = None if options.budget is None else parse_seconds("--budget", options.budget)
    ratings = sources.read_ratings(source) if sources.is_store(source) else read_and_say(source, say, quiet, weights)
    train, held_out = ratings, None
    if share is not None:
        train, held_out = split(ratings, share, options.seed, by="random" if ratings.timestamps is None else "last")
    elif validation is not None:
        held_out = sources.read_ratings(validation, show_progress=not quiet)
        check_meets("--validation", validation, held_out, ratings, sources.name_of(source))
    if options.kind == "explicit" and options.value == "none" and not quiet:
        click.echo("Every value is 1 or a count (--value none), which --model explicit predicts; to rank items, add "
                   "--model implicit.", err=True)  # fmt: skip
    if held_out is None or share is not None:
        part = "a tenth" if share is None else f"{share:g} of the ratings" if share < 1 else f"{share:g} ratings"
        which = "drawn at random" if ratings.timestamps is None else "the last ones of each user"
        say(f"Held out to select by: {part}, {which}.")
    found = search(
        train, held_out, model=model, metric=options.metric, budget=seconds, trials=options.trials,
        random_state=options.seed, show_progress=not quiet, unknown="drop", **features,
    )  # fmt: skip
    if options.lines is not None:
        found.to_json_lines(options.lines)
    if options.plot is not None:
        found.plot(options.plot)
    if isinstance(found.best, PopularityRecommender):
        raise ValueError(
            "no trial is better than the most popular items (for rmse and mae: the means of the items), so no model is "
            f"saved; recommend these, or search longer (--budget, --trials): {found}"
        )
    save_model(found.best, options.output)
    if options.as_json:
        facts: dict[str, Any] = {
            "file": options.output,
            "model": type(found.best).__name__,
            "params": found.best_params,
            "metric": found.metric,
            "value": found.best_value,
            "default": found.default_value,
            "popularity": found.popularity_value,
            "trials": len(found.trials),
            "seconds": found.seconds,
            "code": found.code(),
        }
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"{found}.\n{found.code()}\nSaved {options.output} ({file_size(options.output)}).")
