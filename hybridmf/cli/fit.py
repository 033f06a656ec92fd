"""``hybridmf fit``: train, measure on held-out ratings, save."""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import Any

import click

from ..als import ExplicitALS, ImplicitALS
from ..core import validate as _validate
from ..core.table import format_table
from ..data.store import Store
from ..errors import MemoryBudgetError
from ..metrics import PopularityRecommender, evaluate
from ..model.checkpoint import Checkpoint, has_checkpoints
from ..plan.types import ASSEMBLIES, DTYPES, PRECISIONS, SOLVERS
from ..ratings import Ratings, split
from ..tools.preview import plan
from .options import debug_option, device_list, examples, output_option, refuse_overwriting
from .report import file_size
from .sources import columns_text, open_store, ratings_options, read_ratings

MODELS: dict[str, type[ExplicitALS] | type[ImplicitALS]] = {"explicit": ExplicitALS, "implicit": ImplicitALS}
METRICS = {"explicit": ("rmse",), "implicit": ("ndcg@10", "precision@10")}
HYPERPARAMETERS = (
    "factors", "regularization", "iterations", "solver", "assembly", "balance", "device", "precision", "dtype",
    "num_threads",
)  # fmt: skip
BASELINES = {"explicit": "mean rating of each item", "implicit": "most popular items"}


@click.command(
    "fit",
    epilog=examples(
        "hybridmf fit ratings.dat -o model.safetensors --factors 32 --test-size 0.1",
        "hybridmf fit plays.tsv.gz -o model.safetensors --model implicit --alpha 0.01",
        "hybridmf fit ratings.csv -o model.safetensors --user userId --item movieId --value rating",
    ),
)
@click.argument("ratings_file", metavar="RATINGS", type=click.Path(exists=True))
@output_option("Where the model goes (safetensors).", required=True)
@click.option(
    "--model", "kind", type=click.Choice(list(MODELS)), default="explicit", show_default=True,
    help="explicit: values are ratings to predict. implicit: values are counts or likes, items are ranked.",
)  # fmt: skip
@click.option("--factors", type=int, help="Rank.  [default: 64]")
@click.option("--regularization", type=float, help="Lambda.  [default: 0.05 explicit, 0.01 implicit]")
@click.option("--alpha", type=float, help="Confidence per unit of feedback (implicit only).  [default: 1]")
@click.option("--biases/--no-biases", default=None, help="User and item biases (explicit only).  [default: --biases]")
@click.option(
    "--bias-regularization", type=float, metavar="LAMBDA_B",
    help="Penalty of squared biases (explicit only); 0: none.  [default: Lambda / std of the ratings]",
)  # fmt: skip
@click.option("--iterations", type=int, help="Full sweeps.  [default: 15 explicit, 10 implicit]")
@click.option("--solver", metavar="|".join(SOLVERS), help="Exact, or approximate and faster.  [default: cholesky]")
@click.option("--assembly", metavar="|".join(ASSEMBLIES), help="Kernels that build the equations.  [default: auto]")
@click.option(
    "--balance", is_flag=True, default=None, help="Change basis before each sweep: fewer sweeps to the minimum."
)
@click.option(
    "--device", metavar="auto|cpu|cuda|cuda:N", help="Where to compute; several: cuda:0,cuda:1.  [default: auto]"
)
@click.option("--precision", metavar="|".join(PRECISIONS), help="Products on a GPU.  [default: float32]")
@click.option("--dtype", metavar="|".join(DTYPES), help="Precision of the factors.  [default: float32]")
@click.option("--num-threads", type=int, help="[default: all cores]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the split and the initial factors.")
@click.option(
    "--test-size", type=float, default=0.1, show_default=True,
    help="Share (below 1) or number of ratings held out for the evaluation; 0 trains on everything.",
)  # fmt: skip
@click.option("--checkpoint", metavar="DIR", help="Folder for a checkpoint after each iteration.")
@click.option("--checkpoint-every", type=int, metavar="N", help="After every N iterations.  [default: 1]")
@click.option("--resume", is_flag=True, help="Resume from the newest checkpoint, if there is one.")
@ratings_options
@click.option("--quiet", is_flag=True, help="No progress bar and no plan: results only.")
@debug_option
def command(
    ratings_file: str,
    output: str,
    kind: str,
    alpha: float | None,
    biases: bool | None,
    bias_regularization: float | None,
    seed: int,
    test_size: float,
    checkpoint: str | None,
    checkpoint_every: int | None,
    resume: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Train a model on a file of ratings and save it.

    RATINGS is delimited text (CSV, TSV, "::" and others, also gzipped), MatrixMarket, .npz or Parquet; or a store
    that "hybridmf convert" made, which is read slab by slab with --test-size 0 and loaded into memory otherwise. The
    model file is written only if all went well.
    """
    refuse_overwriting(output, ratings_file)
    say = _silent if quiet else click.echo
    saving = _checkpoint_options(checkpoint, checkpoint_every, resume)
    hyperparameters = {name: options.pop(name) for name in HYPERPARAMETERS}
    hyperparameters |= {"alpha": alpha, "biases": biases, "bias_regularization": bias_regularization}
    model = _make_model(kind, hyperparameters, seed)
    ratings: Any
    if os.path.isdir(ratings_file):
        ratings = _open_and_say(ratings_file, load=test_size != 0, say=say)
    else:
        ratings = _read_and_say(ratings_file, options, say, quiet)
    train, test = (ratings, None) if test_size == 0 else split(ratings, _share_or_number(test_size), random_state=seed)
    if test is not None:
        say(f"Held out {test.nnz:,} ratings, training on {train.nnz:,}.")
    say(f"\nPlan\n{textwrap.indent(str(plan(train, model)), '  ')}\n")
    if resume:
        say(f"Going on from {checkpoint}.\n" if "resume_from" in saving else f"No checkpoint in {checkpoint} yet.\n")
    model.fit(train, show_progress=not quiet, **saving)
    click.echo(_training_summary(model))
    if test is not None:
        click.echo(_held_out_summary(kind, model, train, test))
    _save(model, output)
    whole = "" if test is None else f", trained on {train.nnz:,} of {ratings.nnz:,} ratings (--test-size 0 takes all)"
    click.echo(f"Saved {output} ({file_size(output)}){whole}.")


def _silent(_: str) -> None:
    pass


def _make_model(kind: str, given: dict[str, Any], seed: int) -> ExplicitALS | ImplicitALS:
    """Make the estimator; its options are judged here, before a large file is read."""
    for name, owner in (("alpha", "implicit"), ("biases", "explicit"), ("bias_regularization", "explicit")):
        if given[name] is not None and kind != owner:
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} belongs to --model {owner}; this is --model {kind}")
    chosen = {name: value for name, value in given.items() if value is not None}
    if "device" in chosen:
        chosen["device"] = device_list(chosen["device"])
    model = MODELS[kind](random_state=_validate.check_int("--seed", seed, 0), **chosen)
    _validate.check_int("iterations", model.iterations, 1)
    plan(shape=(1, 1), nnz=1, model=model)
    return model


def _read_and_say(path: str, options: dict[str, Any], say: Callable[[str], Any], quiet: bool) -> Ratings:
    started = time.perf_counter()
    ratings = read_ratings(path, show_progress=not quiet, **options)
    seconds = time.perf_counter() - started
    n_users, n_items = ratings.shape
    say(f"Read {path} in {seconds:.2f} s: {n_users:,} users, {n_items:,} items, {ratings.nnz:,} ratings.")
    columns = columns_text(path, **options)
    if columns is not None:
        say(f"Columns: {columns}.")
    return ratings


def _open_and_say(path: str, load: bool, say: Callable[[str], Any]) -> Ratings | Store:
    store = open_store(path)
    n_users, n_items = store.shape
    say(f"Opened {path}: {n_users:,} users, {n_items:,} items, {store.nnz:,} ratings.")
    return store.to_ratings() if load else store


def _save(model: Any, output: str) -> None:
    """Save a model; elsewhere if that fails, since the training may have taken hours."""
    try:
        _save_what_fits(model, output)
    except OSError as error:
        rescued = os.path.join(tempfile.mkdtemp(prefix="hybridmf-"), os.path.basename(output))
        _save_what_fits(model, rescued)
        text = f"{error.strerror or error}; the model was saved as {rescued} instead"
        raise OSError(error.errno, text, output) from error


def _save_what_fits(model: Any, output: str) -> None:
    """Save a model; without what users have seen where a store has more of that than memory."""
    try:
        model.save(output)
    except MemoryBudgetError as error:
        click.echo(f"Saved without what users have seen: {error}")
        model.save(output, include_seen=False)


def _share_or_number(test_size: float) -> float | int:
    return int(test_size) if test_size >= 1 and test_size.is_integer() else test_size


def _training_summary(model: ExplicitALS | ImplicitALS) -> str:
    seconds = sum(record["seconds"] for record in model.history_)
    text = f"{model.n_iter_} iterations in {seconds:.2f} s, {seconds / model.n_iter_:.3g} s each"
    objective = model.history_[-1].get("objective")
    return text + ("." if objective is None else f"; objective {objective:,.6g}.")


def _held_out_summary(kind: str, model: Any, train: Ratings, test: Ratings) -> str:
    """Compare the model with the baseline on held-out ratings, as a table."""
    try:
        ours, baseline = (
            evaluate(each, test, train=train, metrics=METRICS[kind])
            for each in (model, PopularityRecommender().fit(train))
        )
    except ValueError as error:  # a test part nothing can be measured with is no reason to lose the model
        return f"Not evaluated: {error}"
    cold = f"{ours.n_cold_users:,} of these users have no training ratings.\n" if ours.n_cold_users else ""
    rows = [
        [name, *(f"{value:.4f}" for value in values.values())]
        for name, values in ((type(model).__name__, ours), (BASELINES[kind], baseline))
    ]
    better = "lower" if kind == "explicit" else "higher"
    return (
        f"\nOn the held-out ratings ({better} is better)\n\n"
        + format_table(
            ["model", *(name.upper() if "@" not in name else name for name in METRICS[kind])],
            rows,
            "<" + ">" * len(METRICS[kind]),
        )
        + f"\n{cold}"
    )


def _checkpoint_options(folder: str | None, every: int | None, resume: bool) -> dict[str, Any]:
    """What `fit` is told about checkpoints; judged before a large file is read.

    A first run has nothing to resume from: the same command serves it and every one after an interruption.
    """
    if folder is None:
        if resume or every is not None:
            raise click.UsageError(f"{'--resume' if resume else '--checkpoint-every'} needs --checkpoint DIR")
        return {}
    found = has_checkpoints(folder)
    if found and not resume:
        raise click.UsageError(
            f"--checkpoint {folder} holds checkpoints of an earlier run; add --resume to continue it, or name another"
        )
    options: dict[str, Any] = {
        "checkpoint": Checkpoint(
            folder, every=1 if every is None else _validate.check_int("--checkpoint-every", every, 1)
        )
    }
    return options | ({"resume_from": folder} if found else {})
