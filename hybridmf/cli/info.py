"""``hybridmf info``: this installation, a model, ratings or a store."""

from __future__ import annotations

import os
from typing import Any

import click

from ..model.load import load
from ..tools.config import config
from .options import debug_option, examples
from .report import file_size, label_text, pairs, ratings_facts, store_facts
from .sources import columns_text, open_store, ratings_options, read_ratings, refuse_reading_options


@click.command("info", epilog=examples("hybridmf info", "hybridmf info model.safetensors", "hybridmf info ratings.csv"))
@click.argument("file", required=False, type=click.Path(exists=True))
@ratings_options
@debug_option
def command(file: str | None, **options: Any) -> None:
    """Describe this installation, a model, a file of ratings or a store."""
    if file is None:
        refuse_reading_options("none is given")
        click.echo(pairs(_installation()))
    elif os.path.isdir(file):
        click.echo(pairs(store_facts(open_store(file))))
    elif _is_model(file):
        refuse_reading_options(f"{file} is a model")
        click.echo(pairs(_model_facts(load(file), file)))
    else:
        facts = ratings_facts(read_ratings(file, **options))
        columns = columns_text(file, **options)
        click.echo(pairs(({} if columns is None else {"columns": columns}) | facts))


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
        "file": f"{path} ({file_size(path)})",
        "users": f"{model.n_users:,}, {label_text(model.user_ids_)}",
        "items": f"{model.n_items:,}, {label_text(model.item_ids_)}",
        "trained on": f"{model.plan_.nnz:,} ratings, {model.n_iter_} iterations",
    }
    record = model.history_[model.n_iter_ - 1] if len(model.history_) >= model.n_iter_ else {}
    facts |= {name: f"{value:,.6g}" for name, value in record.items() if name not in ("iteration", "seconds")}
    facts["seen items"] = "stored" if model._learned.seen is not None else "not stored (recommend needs --ratings)"
    return facts | {name: value for name, value in model.get_params().items() if value is not None}
