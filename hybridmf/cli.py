"""The command line: ``hybridmf demo | compare | fit | recommend | info | tune | convert``.

Commands are thin: they turn options into calls of the library and results into text. Exit codes: 0, 2 for the user's
mistakes (one line on stderr; ``--debug`` shows the traceback), 130 after Ctrl-C.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import click
import numpy as np
import scipy.io
import scipy.sparse as sp

from . import _validate, formats
from ._config import config
from ._files import open_bytes, reading, write_atomically
from ._io import load
from ._plan import ASSEMBLIES, DTYPES, PRECISIONS, SOLVERS
from ._preview import plan
from ._table import format_table
from ._version import __version__
from .als import ExplicitALS, ImplicitALS
from .compare import FEEDBACK, default_models
from .compare import compare as run_compare
from .datasets import SHAPES
from .demo import run_demo
from .errors import DeviceError, HybridMFError, MemoryBudgetError
from .metrics import PopularityRecommender, evaluate
from .ratings import Ratings, split
from .scale.checkpoint import Checkpoint, has_checkpoints
from .scale.convert import convert as convert_to_store
from .scale.store import MANIFEST, Store

USER_MISTAKES = (HybridMFError, ValueError, TypeError, OSError, ImportError)
"""What the library raises for input it cannot use; anything else is a bug and keeps its traceback."""

BLOCK_USERS = 8_192
"""Users `recommend` asks the model for at a time, so that --all-users needs no list of everything."""

TITLE_SEPARATORS = ("::", "\t", "|", ";", ",")
DEBUG = "hybridmf.debug"


# --------------------------------------------------------------------------------------------- errors, common options


class _Commands(click.Group):
    """A group that turns the library's errors into one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            raise click.exceptions.Exit(130) from None
        except BrokenPipeError:  # click ends quietly
            raise
        except USER_MISTAKES as error:
            if ctx.meta.get(DEBUG):
                raise
            click.echo(f"Error: {_one_line(error)}", err=True)
            raise click.exceptions.Exit(2) from None


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[DEBUG] = value or ctx.meta.get(DEBUG, False)


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show tracebacks of errors."
)
existing_file = click.Path(exists=True, dir_okay=False)


def examples(*lines: str) -> str:
    r"""Text for the end of a command's help; \b keeps click from reflowing it."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def ratings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how a ratings file is to be read; they arrive as keyword arguments of `read_ratings`."""
    options = (
        click.option("--separator", help='Between fields: ",", "::", "\\t" or "tab", ...  [default: found out]'),
        click.option("--header/--no-header", default=None, help="Whether line 1 has names.  [default: found out]"),
        click.option(
            "--user",
            "user_column",
            default="0",
            show_default=True,
            help="Column of users: its name, or a number from 0.",
        ),
        click.option("--item", "item_column", default="1", show_default=True, help="Column of items."),
        click.option(
            "--value", "value_column", default="2", show_default=True, help='Column of values; "none": each is 1.'
        ),
        click.option(
            "--duplicates",
            type=click.Choice(_validate.MERGE_RULES),
            default="error",
            show_default=True,
            help="What to do with a pair that occurs twice.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_ratings(path: str, **options: Any) -> Ratings:
    """`Ratings.from_file` with options as the command line has them."""
    return Ratings.from_file(path, **_reading(**options))


def _reading(
    *,
    separator: str | None = None,
    header: bool | None = None,
    user_column: str = "0",
    item_column: str = "1",
    value_column: str = "2",
    duplicates: str = "error",
) -> dict[str, Any]:
    """Arguments of `Ratings.from_file` and `convert` for options of the command line."""
    return {
        "separator": _separator(separator),
        "header": "auto" if header is None else header,
        "user": _column(user_column),
        "item": _column(item_column),
        "value": None if value_column.lower() == "none" else _column(value_column),
        "duplicates": duplicates,
    }


def _separator(text: str | None) -> str | None:
    """Let a separator that is hard to type in a shell be spelled out."""
    return {"tab": "\t", "\\t": "\t", "space": " "}.get(text, text) if text else None


def _column(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _check_folder(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse an output path that cannot work before any work is done for it."""
    if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        raise click.BadParameter(f"the folder {os.path.dirname(path)!r} does not exist")
    return path


def _check_folder_above(ctx: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """`_check_folder` of what may be a folder itself."""
    _check_folder(ctx, parameter, None if path is None else path.rstrip("/" + os.sep))
    return path


def refuse_overwriting(output: str | None, *inputs: str | None) -> None:
    """An output that is one of the inputs would destroy it."""
    for path in inputs:
        if output and path and os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path):
            raise click.UsageError(f"the output {output!r} is a file that is read; give another name")
        is_store = output and path and os.path.exists(os.path.join(path, MANIFEST))
        if is_store and os.path.samefile(os.path.dirname(output or "") or ".", path or ""):
            raise click.UsageError(f"the output {output!r} lies in the store that is read; give another folder")


def output_option(text: str, *, required: bool = False) -> Callable[..., Any]:
    """``-o FILE``, judged at once; commands write it only when all went well."""
    kind = click.Path(dir_okay=False, writable=True)
    return click.option("-o", "--output", type=kind, callback=_check_folder, required=required, help=text)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=examples("hybridmf fit ratings.csv -o model.safetensors", "hybridmf recommend model.safetensors --user 42"),
)
@click.version_option(__version__, prog_name="hybridmf")
@debug_option
def main() -> None:
    """Matrix factorization for recommenders.

    New here? "hybridmf demo" needs no data and takes less than a minute.

    "hybridmf COMMAND --help" explains a command and gives examples.
    """


# ---------------------------------------------------------------------------------------------------------------- demo


@main.command(epilog=examples("hybridmf demo --seed 7"))
@click.option("--seed", type=int, default=0, show_default=True, help="Of the data and the models; at least 0.")
@click.option("--quick", is_flag=True, help="Fewer people and films.")
@debug_option
def demo(seed: int, quick: bool) -> None:
    """Train on invented film ratings and show what comes out.

    The data are generated with planted taste, so the report can say whether the models found it: held-out accuracy
    against a baseline, recommendations with titles, and the speed of each method on this machine.
    """
    run_demo(click.echo, seed=seed, quick=quick)


# ------------------------------------------------------------------------------------------------------------- compare


@main.command(
    epilog=examples(
        "hybridmf compare demo",
        "hybridmf compare ratings.dat --method als --method sgd-blocks --factors 32 --json report.json",
        "hybridmf compare netflix --method als --factors 100 --iterations 5 --plot report.png",
    )
)
@click.argument("ratings", metavar="RATINGS")
@click.option(
    "--feedback", type=click.Choice(FEEDBACK), default="explicit", show_default=True,
    help="explicit: values are ratings to predict. implicit: values are counts or likes, items are ranked.",
)  # fmt: skip
@click.option(
    "--method", "methods", multiple=True, metavar="NAME",
    help="One of those above; repeat it for several.  [default: all that serve the feedback]",
)  # fmt: skip
@click.option(
    "--device", "devices", multiple=True,
    help="cpu, cuda, cuda:N, or several as cuda:0,cuda:1; repeat it.  [default: cpu and cuda]",
)  # fmt: skip
@click.option("--factors", type=int, default=64, show_default=True, help="Rank.")
@click.option("--iterations", type=int, default=10, show_default=True, help="Of each method.")
@click.option("--test-size", type=float, default=0.1, show_default=True, help="Share held out to measure on; 0: none.")
@click.option(
    "--scale",
    type=float,
    default=1.0,
    show_default=True,
    help="Of the sides of a synthetic shape, up to 1: 0.1 draws a hundredth of its ratings.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), callback=_check_folder, help="Report as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False), callback=_check_folder, help="Figure (needs matplotlib).")
@ratings_options
@click.option("--quiet", is_flag=True, help="No progress bar.")
@debug_option
def compare(
    ratings: str,
    feedback: str,
    methods: tuple[str, ...],
    devices: tuple[str, ...],
    factors: int,
    iterations: int,
    test_size: float,
    scale: float,
    seed: int,
    json_file: str | None,
    plot: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    r"""Compare methods and devices on the same ratings, from the same initial factors.

    RATINGS is a file (as for "hybridmf fit"), "demo", or the name of a synthetic shape: ml-1m, ml-10m, ml-20m, netflix,
    yahoo-r1, sls, rucci, msd, epinions, eachmovie, yahoo-songs. Without a GPU the methods of the CPU are compared. The
    exit code is 1 if two devices disagree on the objective of a method.

    \b
    als                exact alternating least squares
    als-cg             the same with 3 conjugate gradient steps a row
    als-subspace       the same, 32 coordinates at a time (implicit)
    sgd-blocks         stochastic gradient descent, blocks without conflicts (CPU)
    sgd-hogwild        the same without looking out for conflicts (CPU)
    sgd-msgd           the same, items and users in turn
    sgd-batch-hogwild  runs of ratings without looking out (GPU)
    ccd                cyclic coordinate descent, CCD++
    """
    refuse_overwriting(json_file, ratings)
    refuse_overwriting(plot, ratings)
    models = default_models(feedback, factors, iterations)
    unknown = [method for method in methods if method not in models]
    if unknown:
        raise click.UsageError(f"--method {unknown[0]} is unknown for {feedback} feedback; known: {', '.join(models)}")
    started = time.perf_counter()
    given = ratings if ratings == "demo" or ratings in SHAPES else _file_or_shape(ratings, options)
    read_seconds = time.perf_counter() - started
    result = run_compare(
        given,
        {name: model for name, model in models.items() if not methods or name in methods},
        devices=[device_list(device) for device in devices] or ("cpu", "cuda"),
        feedback=feedback,
        test_size=test_size,
        scale=scale,
        seed=seed,
        show_progress=not quiet,
    )
    if given is not ratings:
        result = replace(result, name=os.path.basename(ratings), load_seconds=read_seconds)
    click.echo(str(result))
    if json_file is not None:
        result.to_json(json_file)
    if plot is not None:
        result.plot(plot)
    if not result.agree:
        raise click.exceptions.Exit(1)


def _file_or_shape(path: str, options: dict[str, Any]) -> Ratings:
    if not os.path.exists(path):
        raise click.UsageError(f"{path!r} is neither a file nor a known shape; shapes: demo, {', '.join(SHAPES)}")
    return read_ratings(path, **options)


# ----------------------------------------------------------------------------------------------------------------- fit

MODELS: dict[str, type[ExplicitALS] | type[ImplicitALS]] = {"explicit": ExplicitALS, "implicit": ImplicitALS}
METRICS = {"explicit": ("rmse",), "implicit": ("ndcg@10", "precision@10")}
HYPERPARAMETERS = (
    "factors", "regularization", "iterations", "solver", "assembly", "balance", "device", "precision", "dtype",
    "num_threads",
)  # fmt: skip
BASELINES = {"explicit": "mean rating of each item", "implicit": "most popular items"}


@main.command(
    epilog=examples(
        "hybridmf fit ratings.dat -o model.safetensors --factors 32 --test-size 0.1",
        "hybridmf fit plays.tsv.gz -o model.safetensors --model implicit --alpha 0.01",
        "hybridmf fit ratings.csv -o model.safetensors --user userId --item movieId --value rating",
    )
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
@click.option("--biases", is_flag=True, help="Fit user and item biases (explicit only).")
@click.option("--iterations", type=int, help="Full sweeps.  [default: 15]")
@click.option("--solver", metavar="|".join(SOLVERS), help="Exact, or approximate and faster.  [default: cholesky]")
@click.option("--assembly", metavar="|".join(ASSEMBLIES), help="How equations are built.  [default: auto]")
@click.option(
    "--balance", is_flag=True, default=None, help="Near the minimum in fewer sweeps: change basis before each."
)
@click.option(
    "--device", metavar="auto|cpu|cuda|cuda:N", help="Where to compute; several: cuda:0,cuda:1.  [default: auto]"
)
@click.option("--precision", metavar="|".join(PRECISIONS), help="Products on a GPU.  [default: float32]")
@click.option("--dtype", metavar="|".join(DTYPES), help="Precision of the factors.  [default: float32]")
@click.option("--num-threads", type=int, help="[default: all cores]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the split and the initial factors.")
@click.option(
    "--test-size", type=float, default=0.1, show_default=True,
    help="Share (below 1) or number of ratings held out to measure with; 0 trains on everything.",
)  # fmt: skip
@click.option("--checkpoint", metavar="DIR", help="Folder that gets a checkpoint after each iteration.")
@click.option("--checkpoint-every", type=int, metavar="N", help="After every N iterations.  [default: 1]")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint, if there is one.")
@ratings_options
@click.option("--quiet", is_flag=True, help="No output but errors.")
@debug_option
def fit(
    ratings_file: str,
    output: str,
    kind: str,
    alpha: float | None,
    biases: bool,
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
    model = _make_model(kind, hyperparameters | {"alpha": alpha, "biases": biases or None}, seed)
    ratings: Any
    if os.path.isdir(ratings_file):
        ratings = _open_and_say(ratings_file, load=test_size != 0, say=say)
    else:
        ratings = _read_and_say(ratings_file, options, say)
    train, test = (ratings, None) if test_size == 0 else split(ratings, _share_or_number(test_size), random_state=seed)
    if test is not None:
        say(f"Held out {test.nnz:,} ratings, training on {train.nnz:,}.")
    say(f"\nPlan\n{textwrap.indent(str(plan(train, model)), '  ')}\n")
    if resume:
        say(f"Going on from {checkpoint}.\n" if "resume_from" in saving else f"No checkpoint in {checkpoint} yet.\n")
    model.fit(train, show_progress=not quiet, **saving)
    say(_training_summary(model))
    if test is not None:
        say(_held_out_summary(kind, model, train, test))
    _save(model, output, say)
    whole = "" if test is None else f", trained on {train.nnz:,} of {ratings.nnz:,} ratings (--test-size 0 takes all)"
    say(f"Saved {output} ({_file_size(output)}){whole}.")


def device_list(text: str) -> str | list[str]:
    """One device, or several with commas between them."""
    return text.split(",") if "," in text else text


def _silent(_: str) -> None:
    pass


def _make_model(kind: str, given: dict[str, Any], seed: int) -> ExplicitALS | ImplicitALS:
    """Make the estimator; its options are judged here, before a large file is read."""
    for name, owner in (("alpha", "implicit"), ("biases", "explicit")):
        if given[name] is not None and kind != owner:
            raise click.UsageError(f"--{name} belongs to --model {owner}; this is --model {kind}")
    chosen = {name: value for name, value in given.items() if value is not None}
    if "device" in chosen:
        chosen["device"] = device_list(chosen["device"])
    model = MODELS[kind](random_state=_validate.check_int("--seed", seed, 0), **chosen)
    _validate.check_int("iterations", model.iterations, 1)
    plan(shape=(1, 1), nnz=1, model=model)
    return model


def _read_and_say(path: str, options: dict[str, Any], say: Callable[[str], Any]) -> Ratings:
    started = time.perf_counter()
    ratings = read_ratings(path, **options)
    seconds = time.perf_counter() - started
    n_users, n_items = ratings.shape
    say(f"Read {path} in {seconds:.2f} s: {n_users:,} users, {n_items:,} items, {ratings.nnz:,} ratings.")
    return ratings


def _open_and_say(path: str, load: bool, say: Callable[[str], Any]) -> Ratings | Store:
    store = Store.open(path)
    n_users, n_items = store.shape
    say(f"Opened {path}: {n_users:,} users, {n_items:,} items, {store.nnz:,} ratings.")
    return store.to_ratings() if load else store


def _save(model: Any, output: str, say: Callable[[str], Any]) -> None:
    """Save a model; without what users have seen where a store has more of that than memory."""
    try:
        model.save(output)
    except MemoryBudgetError as error:
        say(f"Saved without what users have seen: {error}")
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
        + "\n"
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


def _file_size(path: str) -> str:
    size = os.path.getsize(path)
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


# ----------------------------------------------------------------------------------------------------------- recommend

Recommendations = Iterator[tuple[Any, list[tuple[Any, float]]]]
"""(user label, [(item label, score), ...]) of one user after the other."""


@main.command(
    epilog=examples(
        "hybridmf recommend model.safetensors --user 42 --user 7 --titles movies.dat",
        "hybridmf recommend model.safetensors --all-users -N 20 --format csv -o top20.csv",
    )
)
@click.argument("model_file", metavar="MODEL", type=existing_file)
@click.option("--user", "users", multiple=True, metavar="LABEL", help="Whom to recommend to; may be repeated.")
@click.option("--all-users", is_flag=True, help="Everybody the model knows.")
@click.option("-N", "count", type=int, default=10, show_default=True, help="Recommendations for each user.")
@click.option("--include-seen", is_flag=True, help="Also recommend what a user already has.")
@click.option(
    "--ratings", "ratings_file", type=existing_file,
    help="What users have seen, in place of the ratings the model was trained on.",
)  # fmt: skip
@click.option("--titles", "titles_file", type=existing_file, help="Text file of item id, title, ...; may be gzipped.")
@click.option("--titles-separator", help='Between its fields: ",", "::", "|", "tab".  [default: found out]')
@click.option("--titles-encoding", help="[default: UTF-8, else latin-1]")
@click.option("--format", "layout", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@output_option("Write there, not to the terminal.")
@debug_option
def recommend(
    model_file: str,
    users: tuple[str, ...],
    all_users: bool,
    count: int,
    include_seen: bool,
    ratings_file: str | None,
    titles_file: str | None,
    titles_separator: str | None,
    titles_encoding: str | None,
    layout: str,
    output: str | None,
) -> None:
    """Recommend items to users of a trained model.

    Users and items go by the labels of the ratings file, or by positions from 0 where that had none. Items a user has
    already rated are left out.
    """
    if bool(users) == all_users:
        raise click.UsageError("say for whom: either --user LABEL (once or more) or --all-users")
    if include_seen and ratings_file:
        raise click.UsageError("--include-seen leaves nothing out, so --ratings has no use; choose one of them")
    refuse_overwriting(output, model_file, ratings_file, titles_file)
    model = load(model_file)
    positions = np.arange(model.n_users) if all_users else find_users(model, users)
    seen = None if ratings_file is None else seen_matrix(model, Ratings.from_file(ratings_file), ratings_file)
    titles = None
    if titles_file is not None:
        titles = read_titles(titles_file, _separator(titles_separator), titles_encoding)
        _warn_if_strangers(titles, model, titles_file)
    found = recommendations(model, positions, _validate.check_int("-N", count, 1), include_seen, seen)
    with_output(output, lambda stream: WRITERS[layout](stream, found, titles))


def _names(ids: np.ndarray | None, count: int) -> list[Any]:
    """Labels as Python objects; positions where there are none."""
    return list(range(count)) if ids is None else ids.tolist()


def find_users(model: Any, labels: Iterable[str]) -> np.ndarray:
    """Positions of users given as text, whatever type their labels have."""
    names = _names(model.user_ids_, model.n_users)
    table = {str(name): position for position, name in enumerate(names)}
    unknown = [label for label in labels if label not in table]
    if unknown:
        what = "users" if model.user_ids_ is not None else "users by position (it has no labels)"
        some = ", ".join(map(str, names[:3]))
        raise ValueError(f"unknown user {', '.join(unknown)}; the model knows {len(names):,} {what}, such as {some}")
    return np.array([table[label] for label in labels], dtype=np.int64)


def seen_matrix(model: Any, ratings: Ratings, source: str) -> sp.csr_array:
    """Bring `ratings` to the positions of `model`: csr_array, shape (n_users, n_items), without strangers."""
    users = _translation(model.user_ids_, model.n_users, ratings.user_ids, ratings.n_users, "user", source)
    items = _translation(model.item_ids_, model.n_items, ratings.item_ids, ratings.n_items, "item", source)
    coo = ratings.user_items.tocoo()
    rows, columns = users[coo.row], items[coo.col]
    known = (rows >= 0) & (columns >= 0)
    ones = np.ones(np.count_nonzero(known), dtype=np.float32)
    return sp.csr_array((ones, (rows[known], columns[known])), shape=(model.n_users, model.n_items))


def _translation(
    ours: np.ndarray | None, our_count: int, theirs: np.ndarray | None, their_count: int, side: str, source: str
) -> np.ndarray:
    """Find the model's position of each of their positions, -1 for strangers."""
    if (ours is None) != (theirs is None):
        have, lack = ("the model", source) if theirs is None else (source, "the model")
        raise ValueError(
            f"{have} has {side} labels and {lack} only positions, so they cannot be matched; use a file of the same "
            "format as the one the model was trained on"
        )
    table = {str(name): position for position, name in enumerate(_names(ours, our_count))}
    found = np.array([table.get(str(name), -1) for name in _names(theirs, their_count)], dtype=np.int64)
    if not np.any(found >= 0):
        raise ValueError(f"none of the {their_count:,} {side}s of {source} is known to the model")
    return found


def recommendations(
    model: Any, positions: np.ndarray, count: int, include_seen: bool, seen: sp.csr_array | None
) -> Recommendations:
    """Best items of each user, in blocks of users, by label."""
    user_names, item_names = _names(model.user_ids_, model.n_users), _names(model.item_ids_, model.n_items)
    for start in range(0, len(positions), BLOCK_USERS):
        block = positions[start : start + BLOCK_USERS]
        rows = None if seen is None else seen[block]
        ids, scores = model.recommend(block, rows, N=count, filter_already_liked_items=not include_seen)
        for user, items, values in zip(block.tolist(), ids.tolist(), scores.tolist(), strict=True):
            best = [(item_names[item], value) for item, value in zip(items, values, strict=True) if item >= 0]
            yield user_names[user], best


def read_titles(path: str, separator: str | None = None, encoding: str | None = None) -> dict[str, str]:
    """Titles by item id from text whose first two fields are id and title; a header does no harm.

    Parameters
    ----------
    path : str
        May be gzipped.
    separator : str, optional
        Default: the one of TITLE_SEPARATORS that comes first in the first line.
    encoding : str, optional
        Default: UTF-8, and latin-1 for what is not valid UTF-8 (MovieLens).

    Returns
    -------
    dict of str to str

    Raises
    ------
    RatingsError
        A corrupt gzip file, or bytes that are not in `encoding`.
    ValueError
        An empty file, an unknown encoding, no separator, or a line of one field.
    """
    text = _decode(path, encoding)
    lines = [line for line in io.StringIO(text, newline=None).read().split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; expected lines of item id and title")
    if separator is None:
        present = [mark for mark in TITLE_SEPARATORS if mark in lines[0]]
        if not present:
            raise ValueError(f"{path} has no separator between id and title in its first line; say --titles-separator")
        separator = min(present, key=lines[0].index)
    titles = {}
    for number, row in enumerate(_split_lines(lines, separator, path), 1):
        if len(row) < 2:
            raise ValueError(
                f"{path}: entry {number} ({row[0][:60]!r}) has no title after the separator {separator!r}; "
                "say --titles-separator"
            )
        titles[row[0].strip()] = row[1].strip()
    return titles


def _split_lines(lines: list[str], separator: str, path: str) -> Iterator[list[str]]:
    # Quotes mean something in CSV; elsewhere they are part of a title ("Weird Al" Yankovic).
    if separator not in (",", ";"):
        yield from (line.split(separator) for line in lines)
        return
    try:
        yield from csv.reader(lines, delimiter=separator)
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error


def _decode(path: str, encoding: str | None) -> str:
    with reading(path, encoding or "latin-1"):
        with open_bytes(path) as stream:
            content = stream.read()
        if encoding is not None:
            try:
                return content.decode(encoding)
            except LookupError as error:
                raise ValueError(f"--titles-encoding: {error}") from None
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError:
            return content.decode("latin-1")


def _warn_if_strangers(titles: dict[str, str], model: Any, path: str) -> None:
    names = _names(model.item_ids_, model.n_items)
    if not any(str(name) in titles for name in names):
        click.echo(
            f"Warning: none of the ids in {path} is an item of the model, such as {names[0]}; "
            f"the file has {next(iter(titles))!r}",
            err=True,
        )


def _write_tables(stream: TextIO, found: Recommendations, titles: dict[str, str] | None) -> None:
    header, align = ["rank", "item", "score"], ">>>"
    for user, best in found:
        rows = [[rank, item, f"{score:.3f}"] for rank, (item, score) in enumerate(best, 1)]
        if titles is not None:
            header, align = ["rank", "item", "score", "title"], ">>><"
            rows = [[*row, titles.get(str(row[1]), "")] for row in rows]
        body = format_table(header, rows, align) if rows else "  nothing left to recommend"
        stream.write(f"user {user}\n{body}\n\n")


def _write_csv(stream: TextIO, found: Recommendations, titles: dict[str, str] | None) -> None:
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["user", "rank", "item", "score"] + (["title"] if titles is not None else []))
    for user, best in found:
        for rank, (item, score) in enumerate(best, 1):
            title = [titles.get(str(item), "")] if titles is not None else []
            writer.writerow([user, rank, item, f"{score:.7g}", *title])


def _write_json(stream: TextIO, found: Recommendations, titles: dict[str, str] | None) -> None:
    lines = ",\n  "
    stream.write("[")
    for number, (user, best) in enumerate(found):
        entries = [{"item": item, "score": float(f"{score:.7g}")} for item, score in best]
        if titles is not None:
            entries = [entry | {"title": titles.get(str(entry["item"]))} for entry in entries]
        text = json.dumps({"user": user, "recommendations": entries}, ensure_ascii=False)
        stream.write((lines if number else "\n  ") + text)
    stream.write("\n]\n")


WRITERS: dict[str, Callable[[TextIO, Recommendations, dict[str, str] | None], None]] = {
    "table": _write_tables,
    "csv": _write_csv,
    "json": _write_json,
}


def with_output(path: str | None, write: Callable[[TextIO], Any]) -> None:
    """Let `write` fill standard output, or a file that appears only once it is complete."""
    if path is None:
        write(sys.stdout)
        sys.stdout.flush()  # here, where a reader who has gone away ends the command quietly
        return

    def write_text(stream: BinaryIO) -> None:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        write(text)
        text.flush()
        text.detach()  # `stream` is the caller's to close

    write_atomically(path, write_text)


# ---------------------------------------------------------------------------------------------------------------- info


@main.command(epilog=examples("hybridmf info", "hybridmf info model.safetensors", "hybridmf info ratings.csv"))
@click.argument("file", required=False, type=click.Path(exists=True))
@ratings_options
@debug_option
def info(file: str | None, **options: Any) -> None:
    """Describe this installation, a model, a file of ratings or a store."""
    if file is None:
        click.echo(_pairs(_installation()))
    elif os.path.isdir(file):
        click.echo(_pairs(store_facts(Store.open(file))))
    elif _is_model(file):
        click.echo(_pairs(_model_facts(load(file), file)))
    else:
        click.echo(_pairs(ratings_facts(read_ratings(file, **options))))


def _pairs(facts: dict[str, Any]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())


def _installation() -> dict[str, Any]:
    facts = config()
    memory = facts.pop("memory_available")
    gpu, reason, cupy = facts.pop("gpu"), facts.pop("gpu_reason"), facts.pop("cupy")
    facts["blas"] = "; ".join(facts["blas"]) or "none found"
    facts["memory free"] = "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"
    facts["CuPy"] = cupy or "not installed"
    facts["GPU"] = reason if gpu else f"none: {reason}"
    return {name.replace("_", " "): value for name, value in facts.items()}


def _is_model(path: str) -> bool:
    # A safetensors file starts with 8 bytes of length and a JSON object.
    with open(path, "rb") as stream:
        head = stream.read(9)
    return path.endswith(".safetensors") or head[8:] == b"{"


def _model_facts(model: Any, path: str) -> dict[str, Any]:
    facts = {
        "model": type(model).__name__,
        "file": f"{path} ({_file_size(path)})",
        "users": f"{model.n_users:,}, {_label_text(model.user_ids_)}",
        "items": f"{model.n_items:,}, {_label_text(model.item_ids_)}",
        "trained on": f"{model.plan_.nnz:,} ratings, {model.n_iter_} iterations",
    }
    record = model.history_[-1] if model.history_ else {}
    facts |= {name: f"{value:,.6g}" for name, value in record.items() if name not in ("iteration", "seconds")}
    facts["seen items"] = "stored" if model._learned.seen is not None else "not stored (recommend needs --ratings)"
    return facts | {name: value for name, value in model.get_params().items() if value is not None}


def _label_text(ids: np.ndarray | None) -> str:
    return "positions" if ids is None else f"labels such as {', '.join(map(str, ids[:3].tolist()))}"


def ratings_facts(ratings: Ratings) -> dict[str, Any]:
    """Sizes, density, values and degrees of ratings, as text by name."""
    n_users, n_items = ratings.shape
    matrix = ratings.user_items
    facts = {
        "users": f"{n_users:,}, {_label_text(ratings.user_ids)}",
        "items": f"{n_items:,}, {_label_text(ratings.item_ids)}",
        "ratings": f"{ratings.nnz:,}",
        "density": f"{ratings.nnz / max(n_users * n_items, 1):.3%}",
    }
    if ratings.nnz:
        data = matrix.data
        facts["values"] = f"{data.min():g} to {data.max():g}, mean {data.mean(dtype=np.float64):.4g}"
    facts["ratings per user"] = _degree_text(np.diff(matrix.indptr))
    facts["ratings per item"] = _degree_text(np.bincount(matrix.indices, minlength=n_items))
    return facts


def store_facts(store: Store) -> dict[str, Any]:
    """Sizes, degrees and slabs of a store, as text by name; entries are not read."""
    n_users, n_items = store.shape
    return {
        "users": f"{n_users:,}, {_label_text(store.user_ids)}",
        "items": f"{n_items:,}, {_label_text(store.item_ids)}",
        "ratings": f"{store.nnz:,}",
        "density": f"{store.nnz / max(n_users * n_items, 1):.3%}",
        "ratings per user": _degree_text(store.degrees("user")),
        "ratings per item": _degree_text(store.degrees("item")),
        "slabs": f"{len(store.slabs('user')):,} of users, {len(store.slabs('item')):,} of items",
        "bytes": f"{store.nbytes / 1e6:,.1f} MB",
    }


def _degree_text(degrees: np.ndarray) -> str:
    if not len(degrees):
        return "none"
    return (
        f"min {degrees.min():,}, median {np.median(degrees):,g}, mean {degrees.mean():,.1f}, max {degrees.max():,}; "
        f"{np.count_nonzero(degrees == 0):,} empty"
    )


# ---------------------------------------------------------------------------------------------------------------- tune


@main.command(
    epilog=examples(
        "hybridmf tune", "hybridmf tune --kernel fused --factors 50,80 --budget 60", "hybridmf tune --calibrate"
    )
)
@click.option(
    "--calibrate", is_flag=True, help="Measure this machine for the cost model instead; a minute or two with a GPU."
)
@click.option("--kernel", "kernels", multiple=True, metavar="NAME", help="Only this one; repeat it.  [default: all]")
@click.option("--factors", default="32,64,100,128", show_default=True, help="Ranks, with commas between.")
@click.option("--dtype", metavar="|".join(DTYPES), default="float32", show_default=True)
@click.option("--budget", type=float, default=300.0, show_default=True, help="Seconds, for all together.")
@click.option("--most", type=int, help="Configurations of each kernel and rank.  [default: as the budget allows]")
@output_option("Table of the fastest (JSON).  [default: where fits look for it, in the user's cache folder]")
@click.option("--lines", type=click.Path(dir_okay=False), callback=_check_folder, help="Append all measurements there.")
@click.option("--plot", type=click.Path(file_okay=False), help="Folder for figures of them (needs matplotlib).")
@debug_option
def tune(calibrate: bool, **options: Any) -> None:
    """Measure this machine and keep what is found in the user's cache directory.

    Finds the fastest configuration of each kernel on this machine's GPU, for all fits that follow: each is compiled,
    its answer checked, and timed. What is found is kept even if the command is interrupted.

    With --calibrate: the rates of cores and GPU by which device="auto" picks the device of each fit.
    """
    if calibrate:
        _run_calibration()
    else:
        _run_tuning(**options)


def _run_calibration() -> None:
    from ._calibrate import calibrate_and_save
    from ._machine import constants_text

    machine, path = calibrate_and_save(lambda text: click.echo(text, err=True))
    click.echo(f"{constants_text(machine)}\nkept in {path}")


def _run_tuning(
    kernels: tuple[str, ...], factors: str, dtype: str, budget: float, most: int | None, output: str | None,
    lines: str | None, plot: str | None,
) -> None:  # fmt: skip
    from .gpu import tables, tune_plots
    from .gpu import tune as tuner
    from .gpu.device import open_device

    ranks = _ranks(factors)
    if plot is not None:
        tune_plots.make_figure(1, 1)  # matplotlib may be missing: say so before minutes of work
    try:
        device = open_device()
    except DeviceError as error:
        raise DeviceError(
            f"tune measures kernels on a GPU, and none can be used here: {error}. (tune --calibrate works without one)"
        ) from error
    gpu = tables.Gpu.of(device.spec)
    path = tables.user_file(device.spec) if output is None else Path(output)
    there = tables.stored(path, gpu)
    jobs = tuner.tune(device, kernels or None, ranks, dtype=dtype, budget=budget, most=most, table=there)
    tables.store(tables.Table(gpu), path)  # a place that cannot be written is told at once
    click.echo(f"{device.spec}: drawing ratings, then {budget:g} s", err=True)
    measured: list[dict[str, Any]] = []
    for job in jobs:
        click.echo(job.summary())
        tables.store(tuner.table_of(device, [job]), path)
        records = [line | tuner.stamp(device) for line in job.lines()]
        measured += records
        if lines is not None:
            with open(lines, "a", encoding="utf-8") as out:
                out.writelines(json.dumps(line) + "\n" for line in records)
    click.echo(f"kept in {path}")
    if plot is not None:
        for figure in tune_plots.save_all(tune_plots.clouds(measured), Path(plot)):
            click.echo(f"drawn: {figure}")


def _ranks(text: str) -> list[int]:
    """Numbers with commas between."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--factors must be numbers with commas between, such as 32,64; got {text!r}") from None


# ------------------------------------------------------------------------------------------------------------- convert


@main.command(
    epilog=examples(
        "hybridmf convert ratings.dat ratings.npz",
        "hybridmf convert ratings.csv.gz ratings.mtx",
        "hybridmf convert ratings.npz --to bals-stats --tile-rows 512",
        "hybridmf convert ratings.csv.gz store/ --memory-limit 4GB",
    )
)
@click.argument("ratings_file", metavar="RATINGS", type=existing_file)
@click.argument("out", required=False, type=click.Path(writable=True), callback=_check_folder_above)
@click.option(
    "--to", "target", type=click.Choice(["npz", "mtx", "csv", "bals-stats", "store"]),
    help="Format of OUT; bals-stats writes the statistics as JSON.  [default: by the ending of OUT; store: a folder]",
)  # fmt: skip
@click.option("--slab-bytes", default="64MiB", show_default=True, help="Size of a slab of a store.")
@click.option("--memory-limit", default="1GiB", show_default=True, help="For ratings on their way into a store.")
@click.option("--overwrite", is_flag=True, help="Replace a store that is there.")
@click.option("--tile-rows", type=int, default=256, show_default=True, help="Height of a BALS tile.")
@click.option("--tile-cols", type=int, default=192, show_default=True, help="Width of a BALS tile.")
@click.option("--num-threads", type=int, help="[default: all cores]")
@ratings_options
@click.option("--quiet", is_flag=True, help="No statistics.")
@debug_option
def convert(
    ratings_file: str,
    out: str | None,
    target: str | None,
    tile_rows: int,
    tile_cols: int,
    num_threads: int | None,
    slab_bytes: str,
    memory_limit: str,
    overwrite: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Convert ratings to another format and print statistics.

    A folder as OUT becomes a store, from which ALS is fitted slab by slab: text, MatrixMarket and Parquet files may be
    larger than memory, and a conversion that was stopped goes on when it is started again. npz and csv keep the labels
    of users and items; mtx has positions only (its rows are the users in sorted order).
    The statistics tell what BALS tiles would save on these ratings, as they are and reordered by degree.
    """
    refuse_overwriting(out, ratings_file)
    target = target or _format_of(out)
    if out is None and target != "bals-stats":
        raise click.UsageError("name a file OUT to write, or say --to bals-stats for statistics only")
    if target == "store":
        assert out is not None
        sizes: dict[str, Any] = {"slab_bytes": slab_bytes, "memory_limit": memory_limit, "overwrite": overwrite}
        store = convert_to_store(ratings_file, out, **sizes, **_reading(**options))
        if not quiet:
            click.echo(_pairs(store_facts(store)))
        return
    if out is not None and os.path.isdir(out):
        raise click.UsageError(f"{out} is a folder, which can only become a store; give the name of a file")
    ratings = read_ratings(ratings_file, **options)
    statistics = {}
    if not quiet or target == "bals-stats":
        statistics = bals_statistics(ratings.user_items, tile_rows, tile_cols, num_threads)
    if out is not None:
        _write_ratings(ratings, out, target, statistics)
    if not quiet:
        click.echo(_pairs(ratings_facts(ratings)))
        click.echo(f"\nBALS tiles of {tile_rows} x {tile_cols}\n\n{_bals_table(statistics)}")
        if out is not None:
            click.echo(f"\nWrote {out} ({_file_size(out)}).")


def _format_of(out: str | None) -> str:
    if out is None:
        return ""
    if out.endswith(("/", os.sep)) or os.path.isdir(out):
        return "store"
    endings = {".npz": "npz", ".mtx": "mtx", ".mtx.gz": "mtx", ".csv": "csv", ".csv.gz": "csv", ".json": "bals-stats"}
    for ending, target in endings.items():
        if out.lower().endswith(ending):
            return target
    raise click.UsageError(f"the ending of {out} says no format; choose one of {', '.join(endings)}, or say --to")


def bals_statistics(
    matrix: sp.csr_array, tile_rows: int, tile_cols: int, num_threads: int | None
) -> dict[str, dict[str, float]]:
    """`BalsMatrix.statistics` of the matrix as it is and with rows and columns sorted by degree."""
    reordered = formats.reorder(matrix, num_threads=num_threads).matrix
    return {
        name: formats.BalsMatrix.from_csr(each, tile_rows, tile_cols, num_threads).statistics()
        for name, each in (("as read", matrix), ("reordered", reordered))
    }


def _bals_table(statistics: dict[str, dict[str, float]]) -> str:
    def cells(values: dict[str, float]) -> list[str]:
        return [
            f"{values['tiles']:,}",
            f"{values['vacant_tiles']:,} ({values['vacant_tile_share']:.1%})",
            f"{values['segments']:,}",
            f"{values['vacant_segments']:,} ({values['vacant_segment_share']:.1%})",
            f"{values['reuse_factor']:.2f}",
            f"{values['bals_bytes'] / 1e6:,.1f}",
            f"{values['csr_bytes'] / 1e6:,.1f}",
        ]

    names = [
        "tiles",
        "vacant tiles",
        "segments (rows of tiles)",
        "vacant segments in other tiles",
        "reuse factor (ratings per loaded column)",
        "megabytes as BALS",
        "megabytes as CSR",
    ]
    rows = zip(names, *map(cells, statistics.values()), strict=True)
    return format_table(["", *statistics], rows, "<>>")


def _write_ratings(ratings: Ratings, out: str, target: str, statistics: dict[str, dict[str, float]]) -> None:
    if target == "npz":
        ratings.save(out)
    elif target == "bals-stats":
        with_output(out, lambda stream: stream.write(json.dumps(statistics, indent=2) + "\n"))
    else:
        write = _write_csv_ratings if target == "csv" else _write_matrix_market
        write_atomically(out, lambda stream: _maybe_gzipped(stream, out, lambda target: write(target, ratings)))


def _maybe_gzipped(stream: BinaryIO, name: str, write: Callable[[BinaryIO], Any]) -> None:
    if not name.lower().endswith(".gz"):
        write(stream)
        return
    with gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0) as packed:  # the same bytes for the same data
        write(cast(BinaryIO, packed))


def _write_csv_ratings(stream: BinaryIO, ratings: Ratings) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    text.write("user,item,rating\n")
    # Quoting all text keeps a label such as "#1 fan" from being read as a comment.
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    users, items = _names(ratings.user_ids, ratings.n_users), _names(ratings.item_ids, ratings.n_items)
    matrix = ratings.user_items
    for position, user in enumerate(users):
        row = slice(matrix.indptr[position], matrix.indptr[position + 1])
        pairs = zip(matrix.indices[row].tolist(), matrix.data[row].tolist(), strict=True)
        writer.writerows((user, items[item], _short_number(value)) for item, value in pairs)
    text.flush()
    text.detach()


def _short_number(value: float) -> float | int:
    return int(value) if value.is_integer() else float(f"{value:.9g}")  # 9 digits keep a float32


def _write_matrix_market(stream: BinaryIO, ratings: Ratings) -> None:
    scipy.io.mmwrite(stream, ratings.user_items, field="real", precision=9)
