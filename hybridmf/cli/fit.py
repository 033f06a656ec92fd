"""``hybridmf fit``: train, measure on held-out ratings, save."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from ..compare import BASELINES
from ..core.objective import SIDES
from ..core.table import format_table
from ..core.validate import check_int
from ..data.readers import part_paths
from ..data.splits import WAYS
from ..data.store import Store
from ..errors import MemoryBudgetError
from ..metrics import Evaluation, PopularityRecommender, evaluate
from ..model.checkpoint import Checkpoint, has_checkpoints
from ..model.early_stopping import EarlyStopping
from ..model.load import load
from ..plan.start import STARTS
from ..plots import save, training
from ..ratings import Ratings, split
from ..tools.preview import plan
from . import sources
from .features import NAMES, features_of, features_options
from .hyperparameters import METRICS, SECTIONS, Model, make_model, model_options
from .options import Options, make_command, output_option, plot_option, refuse_overwriting, share_or_number
from .report import file_size

MORE = {
    "Features": NAMES,
    "Evaluation and validation": (
        "test_size", "test_file", "split_by", "validation", "validation_users", "validate_every", "patience", "metric",
        "plot",
    ),
    "Long runs": ("checkpoint", "checkpoint_every", "resume"),
}  # fmt: skip
"""Further headings in the help."""


@make_command(
    "fit",
    "hybridmf fit ratings.dat -o model.safetensors --factors 32 --test-size 0.1",
    "hybridmf fit 2025.csv 2026.csv -o model.safetensors",
    "hybridmf fit plays.tsv.gz -o model.safetensors --model implicit --alpha 0.01",
    "hybridmf fit ratings.csv -o model.safetensors --user userId --item movieId --value rating",
    sections=SECTIONS | MORE | sources.READING,
)
@click.argument("ratings_files", metavar="RATINGS...", nargs=-1, required=True, type=sources.ratings_path)
@output_option("Model file (safetensors).", required=True)
@model_options
@click.option(
    "--init", metavar="MODEL|nonnegative|signed",
    help="Initial factors: those of a saved model, by label, or random ones.  [default: nonnegative]",
)  # fmt: skip
@click.option(
    "--freeze", type=click.Choice(SIDES), help="Keep the factors of this side from --init MODEL; solve the other."
)
@click.option(
    "--weights", metavar="COLUMN",
    help="Weight of each rating: of its squared error, or its confidence in place of 1 + alpha x value (implicit).",
)  # fmt: skip
@features_options
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the split and the initial factors.")
@click.option(
    "--test-size", type=float, default=0.1, show_default=True,
    help="Share (below 1) or number of ratings held out for the evaluation; 0 trains on everything.",
)  # fmt: skip
@click.option("--test", "test_file", type=sources.ratings_path, help="Ratings to evaluate on, in place of --test-size.")
@click.option(
    "--validation", metavar="SHARE|NUMBER|FILE",
    help="Ratings to measure after each iteration: held out of the training, or of a file.",
)  # fmt: skip
@click.option(
    "--validation-users", type=int, metavar="N", help="Measure --validation by so many users.  [default: all]"
)
@click.option("--validate-every", type=int, metavar="N", help="Measure it after every N iterations.  [default: 1]")
@click.option(
    "--split-by", type=click.Choice(WAYS), default="random", show_default=True,
    help="Ratings to hold out: any ratings, all of some users or items, the latest, or the last of each user.",
)  # fmt: skip
@click.option(
    "--patience", type=int, metavar="N", help="Stop after N iterations without a better --validation; keep the best."
)
@click.option("--metric", metavar="NAME", help="Of --patience: rmse, mae, ndcg@K, recall@K, ...")
@sources.where_option
@plot_option("Picture of the objective, and the metric of --validation, after each iteration")
@click.option("--json", "as_json", is_flag=True, help="Print results as one JSON object, and nothing else.")
@click.option("--checkpoint", metavar="DIR", help="Folder for a checkpoint after each iteration.")
@click.option("--checkpoint-every", type=int, metavar="N", help="After every N iterations.  [default: 1]")
@click.option("--resume", is_flag=True, help="Resume from the newest checkpoint, if there is one.")
@sources.ratings_options
@click.option("--quiet", is_flag=True, help="No progress bar and no plan: results only.")
def command(options: Options) -> None:
    """Train a model on a file of ratings and save it.

    RATINGS is delimited text (CSV, TSV, "::" and others, also gzipped), MatrixMarket, .npz or Parquet; or a store
    that "hybridmf convert" made, which is read slab by slab with --test-size 0 and loaded into memory otherwise. The
    model file is written only on success. Several files, a pattern in quotation marks ("logs/*.csv") and a folder of
    Parquet files are read as one.
    """
    source, output, plot = sources.one_source(options.ratings_files), options.output, options.plot
    init_file = options.init if options.init not in STARTS else None
    read_files = sources.files_of(source, options.test_file, init_file, options.item_features, options.user_features)
    refuse_overwriting(output, *read_files)
    refuse_overwriting(plot, *read_files, output)
    quiet = options.quiet or options.as_json
    say = silent if quiet else click.echo
    saving = _checkpoint_options(options)
    model = make_model(options)
    if options.freeze is not None and init_file is None:
        raise click.UsageError(f"--freeze {options.freeze} keeps the factors of a model: name it with --init MODEL")
    check_weights(options, source)
    model.init = options.init if init_file is None else load(init_file)
    features: dict[str, Any] = features_of(options)
    test_size, share = _test_size(options), share_of(options.validation)
    watching = _watching(options)
    ratings: Any
    if not sources.is_store(source):
        ratings = read_and_say(source, say, quiet, options.weights)
    elif options.where:
        raise click.UsageError(f"--where filters rows of a file, and {source} is a store; leave it out")
    else:
        ratings = sources.open_store(source)
        n_users, n_items = ratings.shape
        say(f"Opened {source}: {n_users:,} users, {n_items:,} items, {ratings.nnz:,} ratings.")
        if test_size != 0 or share is not None:
            ratings = ratings.to_ratings()
    held: dict[str, Any] = {"random_state": options.seed, "by": options.split_by}
    train, test = (ratings, None) if test_size == 0 else split(ratings, test_size, **held)
    if test is not None:
        say(f"Held out {test.nnz:,} ratings, training on {train.nnz:,}.")
    elif options.test_file is not None:
        test = sources.read_ratings(options.test_file, show_progress=not quiet)
        check_meets("--test", options.test_file, test, ratings, sources.name_of(source))
        say(f"Read {options.test_file}: {test.nnz:,} ratings to evaluate on.")
    if share is not None:
        train, watching["validation"] = split(train, share, **held)
        say(f"Held out {watching['validation'].nnz:,} ratings for validation, training on {train.nnz:,}.")
    elif options.validation is not None:
        held_out = sources.read_ratings(options.validation, show_progress=not quiet)
        check_meets("--validation", options.validation, held_out, ratings, sources.name_of(source))
        watching |= {"validation": held_out, "unknown": "drop"}
    say(f"\nPlan\n{textwrap.indent(str(plan(train, model)), '  ')}\n")
    for argument, table in features.items():
        say(f"{argument.replace('_', ' ').capitalize()}: {len(table.names):,} of {len(table):,} {argument[:4]}s.")
    if options.resume:
        folder = options.checkpoint
        say(f"Going on from {folder}.\n" if "resume_from" in saving else f"No checkpoint in {folder} yet.\n")
    if plot is not None:
        watching["callback"] = lambda *_: None  # with one, the history has the objective
    if options.weights is not None and options.kind == "implicit":  # confidences, not factors of 1 + alpha x value
        train, watching["weights"] = train.with_weights(None), train.weights
    model.fit(train, show_progress=not quiet, freeze=options.freeze, **features, **saving, **watching)
    if not options.as_json:
        click.echo(_training_summary(model))
    found = None if test is None else _evaluations(options, model, train, test)
    if found is not None and not options.as_json:
        click.echo(found if isinstance(found, str) else _held_out_summary(options.kind, found))
    save_model(model, output)
    if plot is not None:
        save(training(model).figure, plot)
    if options.as_json:
        click.echo(json.dumps(_report(model, train, found, output), indent=2))
        return
    whole = ""
    if train is not ratings:
        ways = ["--test-size 0"] * bool(test_size) + ["leaving out --validation"] * bool(share)
        take = "take" if len(ways) > 1 else "takes"
        whole = f", trained on {train.nnz:,} of {ratings.nnz:,} ratings ({' and '.join(ways)} {take} all)"
    click.echo(f"Saved {output} ({file_size(output)}){whole}.")


def check_weights(options: Options, source: sources.Source) -> None:
    """Refuse a column of weights where there are no columns or no weights."""
    if options.weights is None:
        return
    if sources.is_store(source):
        raise click.UsageError(
            f"--weights {options.weights} names a column of a file of ratings, and {source} is a store"
        )
    if options.method != "als":
        raise click.UsageError(f"--weights {options.weights}: only --method als has weights of ratings; leave it out")


def silent(_: str) -> None:
    """Print nothing."""


def check_meets(option: str, file: str, held: Ratings, ratings: Any, name: str) -> None:
    """Refuse, before anything is fitted, held-out ratings whose users or items are all unknown to the ratings."""
    theirs, ours = (held.user_ids, held.item_ids), (ratings.user_ids, ratings.item_ids)
    for side, have, want in zip(SIDES, theirs, ours, strict=True):
        if have is None or want is None or not len(have) or not set(have.tolist()).isdisjoint(want.tolist()):
            continue
        one = "an item" if side == "item" else "a user"
        raise click.UsageError(
            f"{option} {file}: none of its {len(have):,} {side}s, such as {have[:1].tolist()[0]!r}, is {one} of "
            f"{name}, such as {want[:1].tolist()[0]!r}; write the {side}s of both files alike, or name their columns "
            "with --user and --item"
        )


def _test_size(options: Options) -> float | int:
    """Share or number to hold out; 0 for none."""
    if options.test_file is None:
        return share_or_number("--test-size", options.test_size)
    source = click.get_current_context().get_parameter_source("test_size")
    if source is not ParameterSource.DEFAULT and options.test_size:
        raise click.UsageError(
            "--test FILE and --test-size both select the ratings to evaluate on; choose one of them, or --test-size 0"
        )
    return 0


def share_of(validation: str | None) -> float | int | None:
    """Share or number of ratings for validation; None where a file is named, or nothing."""
    if validation is None:
        return None
    try:
        value = float(validation)
    except ValueError:
        if not os.path.exists(validation) and not part_paths(validation):
            raise click.UsageError(f"--validation {validation!r} is neither a number nor a file") from None
        return None
    if not value > 0:
        raise click.UsageError(f"--validation must be a share or a number above 0, got {validation}")
    return share_or_number("--validation", value)


def _watching(options: Options) -> dict[str, Any]:
    """Options of `fit` about validation and early stopping."""
    found: dict[str, Any] = {}
    if options.patience is not None or options.metric is not None:
        if options.validation is None or options.patience is None:
            raise click.UsageError("--patience needs --validation, and --metric needs --patience")
        found["early_stopping"] = EarlyStopping(options.patience, options.metric)
    for name in ("validation_users", "validate_every"):
        if (value := getattr(options, name)) is not None:
            option = f"--{name.replace('_', '-')}"
            found[name] = check_int(option, value, 1)
            if options.validation is None:
                raise click.UsageError(f"{option} needs --validation")
    return found


def read_and_say(source: sources.Source, say: Callable[[str], Any], quiet: bool, weight: str | None) -> Ratings:
    """Read ratings, with a column of weights if there is one, and report their sizes, the time and the columns."""
    started = time.perf_counter()
    ratings = sources.read_ratings(source, show_progress=not quiet, weight=weight)
    seconds = time.perf_counter() - started
    n_users, n_items = ratings.shape
    found = f"{n_users:,} users, {n_items:,} items, {ratings.nnz:,} ratings"
    say(f"Read {sources.name_of(source)} in {seconds:.2f} s: {found}.")
    for columns in sources.column_facts(source, weight).values():
        say(f"Columns: {columns}.")
    return ratings


def save_model(model: Any, output: str) -> None:
    """Save a model; elsewhere if that fails, since the training may have taken hours."""
    try:
        _save_what_fits(model, output)
    except OSError as error:
        rescued = os.path.join(tempfile.mkdtemp(prefix="hybridmf-"), os.path.basename(output))
        _save_what_fits(model, rescued)
        text = f"{error.strerror or error}; the model was saved as {rescued} instead"
        raise OSError(error.errno, text, output) from error


def _save_what_fits(model: Any, output: str) -> None:
    """Save a model; without seen items if those of a store exceed the memory."""
    try:
        model.save(output)
    except MemoryBudgetError as error:
        click.echo(f"Saved without seen items: {error}", err=True)
        model.save(output, include_seen=False)


def _training_summary(model: Model) -> str:
    seconds = sum(record["seconds"] for record in model.history_)
    text = f"{len(model.history_)} iterations in {seconds:.2f} s, {seconds / len(model.history_):.3g} s each"
    objective = model.history_[model.n_iter_ - 1].get("objective")
    text += "." if objective is None else f"; objective {objective:,.6g}."
    return text if model.n_iter_ == len(model.history_) else f"{text} The best iteration is {model.n_iter_}."


def _evaluations(options: Options, model: Any, train: Any, test: Ratings) -> dict[str, Evaluation] | str:
    """Metrics of the model and of the baseline on held-out ratings; or why there are none."""
    seen = train.to_ratings() if isinstance(train, Store) else train
    both = {type(model).__name__: model, BASELINES[options.kind]: PopularityRecommender().fit(seen)}
    how: dict[str, Any] = {"metrics": METRICS[options.kind], "include_cold": options.split_by == "item"}
    try:
        return evaluate(both, test, train=seen, unknown="drop", **how)
    except ValueError as error:  # keep the model even if the test part cannot be evaluated
        return f"Not evaluated: {error}"


def _held_out_summary(kind: str, found: dict[str, Evaluation]) -> str:
    ours = next(iter(found.values()))
    notes = f"{ours.n_cold_users:,} of these users have no training ratings.\n" if ours.n_cold_users else ""
    if ours.n_dropped:
        notes += f"{ours.n_dropped:,} ratings of users or items without training ratings are left out.\n"
    rows = [[name, *(f"{value:.4f}" for value in values.values())] for name, values in found.items()]
    header = ["model", *(name.upper() if "@" not in name else name for name in METRICS[kind])]
    table = format_table(header, rows, "<" + ">" * len(METRICS[kind]))
    return f"\nOn the held-out ratings ({'lower' if kind == 'explicit' else 'higher'} is better)\n\n{table}\n{notes}"


def _report(model: Model, train: Any, found: dict[str, Evaluation] | str | None, output: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": type(model).__name__,
        "file": output,
        "users": model.n_users,
        "items": model.n_items,
        "ratings": train.nnz,
        "iterations": model.n_iter_,
        "seconds": sum(record["seconds"] for record in model.history_),
        "history": model.history_,
    }
    if isinstance(found, dict):
        facts["metrics"], facts["baseline"] = (dict(values) for values in found.values())
    elif found is not None:
        facts["metrics"] = None
    return facts


def _checkpoint_options(options: Options) -> dict[str, Any]:
    """Options of `fit` about checkpoints; the same command starts a run and, after an interruption, continues it."""
    folder, every = options.checkpoint, options.checkpoint_every
    if folder is None:
        if options.resume or every is not None:
            raise click.UsageError(f"{'--resume' if options.resume else '--checkpoint-every'} needs --checkpoint DIR")
        return {}
    found = has_checkpoints(folder)
    if found and not options.resume:
        raise click.UsageError(
            f"--checkpoint {folder} holds checkpoints of an earlier run; add --resume to continue it, or name another"
        )
    every = 1 if every is None else check_int("--checkpoint-every", every, 1)
    return {"checkpoint": Checkpoint(folder, every=every)} | ({"resume_from": folder} if found else {})
