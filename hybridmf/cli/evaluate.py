"""``hybridmf evaluate``: metrics of a saved model on a file of ratings."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ..metrics import Evaluation, Interval, PopularityRecommender, evaluate
from ..model.load import load
from ..plots import recall_curves, save
from . import sources
from .features import check_include_cold, include_cold_option
from .hyperparameters import METRICS
from .options import Options, make_command, plot_option, refuse_overwriting
from .recommend import seen_matrix


@make_command(
    "evaluate",
    "hybridmf evaluate model.safetensors test.csv",
    "hybridmf evaluate model.safetensors test.csv --train train.csv --metric recall@20 --metric auc --json",
)
@click.argument("model_file", metavar="MODEL", type=sources.existing_file)
@click.argument("test_files", metavar="TEST...", nargs=-1, required=True, type=sources.ratings_path)
@click.option(
    "--train", "train_file", type=sources.ratings_path,
    help="Ratings the model was trained on: they are not recommended, and a baseline is fitted on them. "
    "[default: those in the model, without a baseline]",
)  # fmt: skip
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME",
    help="ndcg@K, precision@K, recall@K, map@K, mrr@K, hit_rate@K, novelty@K, coverage@K, auc, rmse or mae; may be "
    "repeated.  [default: by the model]",
)  # fmt: skip
@click.option("--relevance-threshold", type=float, help="Least rating of a relevant item.  [default: above 0]")
@include_cold_option("Also rank items that have features and no training ratings; warm and cold items apart.")
@sources.where_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
@plot_option("Picture of Recall@1 to Recall@50 against the most popular items, with --train")
@sources.ratings_options
def command(options: Options) -> None:
    """Evaluate a trained model on held-out ratings.

    Metrics come with their 95 % intervals, by the bootstrap over users; the difference to the baseline is paired.

    Users and items are matched by label; ratings of those that the model does not have are left out. The options for
    columns and separators hold for both files.
    """
    train_file, plot, include_cold = options.train_file, options.plot, options.include_cold
    test_source = sources.one_source(options.test_files)
    refuse_overwriting(plot, options.model_file, *sources.files_of(test_source, train_file))
    if plot is not None and train_file is None:
        raise click.UsageError("--plot compares with the most popular items of --train FILE; give it")
    model = load(options.model_file)
    check_include_cold(model, include_cold)
    kind = "implicit" if model._learned.objective.is_implicit else "explicit"
    names = tuple(dict.fromkeys(options.metrics)) or METRICS[kind]
    test = seen_matrix(model, sources.read_ratings(test_source), sources.name_of(test_source))
    train = None
    models: dict[str, Any] = {}  # the first one is what others are compared with
    if train_file is not None:
        train = seen_matrix(model, sources.read_ratings(train_file), train_file)
        models["popularity"] = PopularityRecommender().fit(train)
    models[type(model).__name__] = model
    how: dict[str, Any] = {"train": train, "relevance_threshold": options.relevance_threshold}
    found = evaluate(models, test, metrics=names, include_cold=include_cold, **how)
    if plot is not None:
        save(recall_curves(model, test, **how).figure, plot)
    *baseline, ours = found.values()
    if options.as_json:
        facts: dict[str, Any] = {"model": type(model).__name__, "users": ours.n_users, "cold_users": ours.n_cold_users}
        facts |= {"metrics": dict(ours), "intervals": _intervals(ours, ours.interval)}
        if include_cold:
            facts["apart"] = {part: {"users": each.n_users, **each} for part, each in ours.apart.items()}
        if baseline:
            facts["baseline"] = dict(baseline[0])
            facts["minus_baseline"] = _intervals(ours, partial(ours.difference, baseline[0]))
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(found)
    cold = f", {ours.n_cold_users:,} of them without training ratings" if ours.n_cold_users else ""
    click.echo(f"\n{ours.n_users:,} users{cold}.")
    if include_cold:
        click.echo(f"\n{ours.apart}")


def _intervals(values: Evaluation, interval: Callable[[str], Interval]) -> dict[str, list[float]]:
    """Bounds of the metrics that have values for each of several users."""
    return {name: list(interval(name)[1:]) for name in values.per_user if values.n_users > 1}
