"""``hybridmf info``: this installation, a model, ratings or a store."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from ..model.load import load
from ..plots import degrees, save
from ..tools.config import config
from . import sources
from .options import Options, make_command, plot_option, refuse_overwriting
from .report import facts_text, file_size, label_text, pairs, ratings_facts


@make_command("info", "hybridmf info", "hybridmf info model.safetensors", "hybridmf info ratings.csv --json")
@click.argument("file", required=False, type=sources.ratings_path)
@sources.where_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON object of numbers.")
@plot_option("Picture of the ratings of each user and item, of a file of ratings or a store")
@sources.ratings_options
def command(options: Options) -> None:
    """Describe this installation, a model, a file of ratings or a store."""
    file, plot = options.file, options.plot
    refuse_overwriting(plot, *sources.files_of(file))
    if plot and (file is None or (not sources.is_store(file) and _is_model(file))):
        raise click.UsageError("--plot draws the entries of a file of ratings or a store; leave it out")
    if options.where and (file is None or sources.is_store(file) or _is_model(file)):
        raise click.UsageError("--where filters rows of a file of ratings; leave it out")
    ratings: Any = None
    if file is None:
        sources.refuse_reading_options("none is given")
        facts, text = config(), _installation_text
    elif _is_model(file):
        sources.refuse_reading_options(f"{file} is a model")
        facts, text = _model_facts(load(file), file), _model_text
    else:
        ratings = sources.open_store(file) if sources.is_store(file) else sources.read_ratings(file)
        facts, text = sources.column_facts(file) | ratings_facts(ratings), facts_text
    if plot is not None:
        save(degrees(ratings).figure, plot)
    click.echo(json.dumps(facts, indent=2, ensure_ascii=False, default=str) if options.as_json else text(facts))


def _installation_text(facts: dict[str, Any]) -> str:
    shown = dict(facts)
    memory = shown.pop("memory_available")
    gpu, reason, cupy = shown.pop("gpu"), shown.pop("gpu_reason"), shown.pop("cupy")
    shown["blas"] = "; ".join(shown["blas"]) or "none found"
    shown["memory free"] = "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"
    shown["CuPy"] = cupy or "not installed"
    shown["GPU"] = gpu or f"none: {reason}"
    return pairs({name.replace("_", " "): value for name, value in shown.items()})


def _is_model(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    # A safetensors file starts with 8 bytes of length and a JSON object.
    with open(path, "rb") as stream:
        head = stream.read(9)
    return path.endswith(".safetensors") or head[8:] == b"{"


def _model_facts(model: Any, path: str) -> dict[str, Any]:
    return {
        "model": type(model).__name__,
        "file": path,
        "users": model.n_users,
        "items": model.n_items,
        "user_labels": None if model.user_ids is None else model.user_ids[:3].tolist(),
        "item_labels": None if model.item_ids is None else model.item_ids[:3].tolist(),
        "ratings": model.plan_.nnz,
        "iterations": model.n_iter_,
        "history": model.history_,
        "seen_items": model._learned.seen is not None,
        "parameters": model.get_params(),
    }


def _model_text(facts: dict[str, Any]) -> str:
    shown = {
        "model": facts["model"],
        "file": f"{facts['file']} ({file_size(facts['file'])})",
        "users": f"{facts['users']:,}, {label_text(facts['user_labels'])}",
        "items": f"{facts['items']:,}, {label_text(facts['item_labels'])}",
        "trained on": f"{facts['ratings']:,} ratings, {facts['iterations']} iterations",
    }
    record = facts["history"][facts["iterations"] - 1] if len(facts["history"]) >= facts["iterations"] else {}
    shown |= {name: f"{value:,.6g}" for name, value in record.items() if name not in ("iteration", "seconds")}
    shown["seen items"] = "stored" if facts["seen_items"] else "not stored (recommend needs --ratings)"
    return pairs(shown | {name: value for name, value in facts["parameters"].items() if value is not None})
