"""Options of commands that fit for the model and its hyperparameters, from the estimators' fields and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, TypeAlias

import click

from ..als import ExplicitALS, ImplicitALS
from ..ccd import CCD
from ..core.validate import check_int
from ..sgd import SGD
from ..tools.preview import plan
from .options import Options, device_list, one_or_pair, with_options

Model: TypeAlias = ExplicitALS | ImplicitALS | SGD | CCD
MODELS: dict[tuple[str, str], type[Model]] = {
    ("explicit", "als"): ExplicitALS,
    ("implicit", "als"): ImplicitALS,
    ("explicit", "sgd"): SGD,
    ("explicit", "ccd"): CCD,
}

METRICS = {"explicit": ("rmse",), "implicit": ("ndcg@10", "precision@10")}  # metrics of held-out ratings

OWN_OPTIONS = ("init", "random_state")
"""Parameters whose options, ``--init`` and ``--seed``, mean more than the parameter."""

SECTIONS = {
    "Model": (
        "regularization_scaling", "alpha", "unobserved_weight", "count_unobserved", "biases", "bias_regularization",
        "nonnegative", "item_feature_weight", "user_feature_weight", "init", "freeze", "weights",
    ),
    "Solver and precision": (
        "solver", "cg_steps", "block_size", "balance", "precision", "dtype", "num_threads", "gpu_memory_limit",
    ),
    "SGD and CCD++": ("learning_rate", "decay", "rate_schedule", "schedule", "deterministic", "inner_iterations"),
    "Variants of the papers": ("assembly", "reorder", "row_form", "reduction", "ordering", "order"),
}  # fmt: skip
"""Headings in the help of commands that fit; what everybody sets stands under none of them."""

TYPES: dict[str, Any] = {
    "int": int,
    "int | None": int,
    "float": float,
    "float | None": float,
    "float | tuple[float, float] | None": one_or_pair(),
    "Scaling | tuple[Scaling, Scaling] | None": one_or_pair("none", "count"),
}
"""Types of options by the annotations of the fields; others are text."""

METAVARS = {
    "regularization": "LAMBDA[,LAMBDA]",
    "regularization_scaling": "none|count|POWER[,...]",
    "bias_regularization": "LAMBDA_B[,LAMBDA_B]",
    "device": "auto|cpu|cuda|cuda:N[,...]",
    "gpu_memory_limit": "BYTES",
}
"""How values are written in a shell, where that is not as in Python."""

DECIDED_LATER = {
    "regularization": "a multiple of the standard deviation of explicit ratings; 7 if implicit",
    "regularization_scaling": "0.5 with the default lambda of explicit ratings, else count; none if implicit",
    "bias_regularization": "lambda / standard deviation of the ratings",
    "alpha": "0, or 1 with another weight",
    "unobserved_weight": "0.1, or 1 with another weight, then with lambda 0.01",
    "learning_rate": "by the rate schedule",
    "gpu_memory_limit": "the free memory",
    "num_threads": "all cores",
}
"""What a default of None stands for."""


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--model``, ``--method``, and options for all parameters of all estimators; None where they are not given."""
    kind = click.option(
        "--model", "kind", type=click.Choice(list(METRICS)), default="explicit", show_default=True,
        help="explicit: values are ratings to predict. implicit: values are counts or likes, items are ranked.",
    )  # fmt: skip
    method = click.option(
        "--method", type=click.Choice(["als", "sgd", "ccd"]), default="als", show_default=True,
        help="Alternating least squares, stochastic gradient descent or CCD++; the last two are explicit.",
    )  # fmt: skip
    return with_options(command, kind, method, *map(_option, HYPERPARAMETERS))


def make_model(options: Options) -> Model:
    """The estimator by the options of a command, which are validated here, before a large file is read."""
    kind, method = options.kind, options.method
    given = {name: getattr(options, name) for name in HYPERPARAMETERS}
    if (kind, method) not in MODELS:
        raise click.UsageError(
            f"--method {method} is for explicit ratings; leave out --model {kind}, or take --method als"
        )
    for name, owner in (("alpha", "implicit"), ("biases", "explicit"), ("bias_regularization", "explicit")):
        if given[name] is not None and kind != owner:
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} belongs to --model {owner}; this is --model {kind}")
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen.keys() - _fields(MODELS[kind, method]).keys():
        raise click.UsageError(
            f"--{name.replace('_', '-')} is no parameter of {MODELS[kind, method].__name__} (--model {kind} --method "
            f"{method}); leave it out"
        )
    if "device" in chosen:
        chosen["device"] = device_list(chosen["device"])
    model = MODELS[kind, method](random_state=check_int("--seed", options.seed, 0), **chosen)
    check_int("iterations", model.iterations, 1)
    plan(shape=(1, 1), nnz=1, model=model)
    return model


def _fields(model: type[Model]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(model) if field.init and field.name not in OWN_OPTIONS}


HYPERPARAMETERS = tuple(dict.fromkeys(name for model in MODELS.values() for name in _fields(model)))


def _option(name: str) -> Callable[..., Any]:
    owners = {key: _fields(model)[name] for key, model in MODELS.items() if name in _fields(model)}
    field = next(iter(owners.values()))
    kind, about = next((found for key in owners if (found := _documented(MODELS[key]).get(name))), ("", ""))
    about = re.sub(r'`*(\w+)="(\w+)"`*', lambda found: f"--{found[1].replace('_', '-')} {found[2]}", about)
    text = f"{about}{_scope(set(owners))}".replace("`", "")
    default = _default_text(name, owners)
    option = f"--{name.replace('_', '-')}"
    if field.type == "bool":
        flags = f"{option}/--no-{option[2:]}" if field.default else option
        return click.option(flags, is_flag=True, default=None, help=f"{text}.{default if field.default else ''}")
    choices = re.findall(r'(?<=")[\w:]+(?=")|\.\.\.', kind.partition("{")[2].partition("}")[0])
    metavar = METAVARS.get(name, "|".join(choices) or None)
    return click.option(option, type=TYPES.get(str(field.type), str), metavar=metavar, help=f"{text}.{default}")


def _scope(owners: set[tuple[str, str]]) -> str:
    """The models that have a parameter, unless all have it."""
    if owners == set(MODELS):
        return ""
    kinds = {kind for kind, _ in owners}
    if len(kinds) == 1 and owners == {key for key in MODELS if key[0] in kinds}:
        return f" ({kinds.pop()} only)"
    return f" ({', '.join(sorted({method for _, method in owners}))})"


def _default_text(name: str, owners: dict[tuple[str, str], Field[Any]]) -> str:
    values: dict[Any, list[str]] = {}
    for key, field in owners.items():
        values.setdefault(field.default, []).append(key[0] if key[1] == "als" else key[1])
    first, *others = values
    if first is None:
        return f"  [default: {DECIDED_LATER[name]}]" if name in DECIDED_LATER else ""
    shown = f"--{name.replace('_', '-')}" if first is True else first
    return "  [default: " + "; ".join([str(shown), *(f"{each} {', '.join(values[each])}" for each in others)]) + "]"


def _documented(model: type[Model]) -> dict[str, tuple[str, str]]:
    """Type and first sentence of each parameter that the docstring of a class describes."""
    section = inspect.cleandoc(model.__doc__ or "").partition("Parameters\n----------\n")[2]
    section = re.split(r"\n\n\w+\n-{3,}\n", section)[0]
    found: dict[str, tuple[str, str]] = {}
    for names, kind, text in re.findall(r"^(\w[\w, ]*) : (.*)((?:\n    .*|\n)*)", section, re.MULTILINE):
        paragraph = " ".join(text.strip().split("\n\n")[0].split())
        sentence = re.split(r'\.(?=\s+[A-Z`"]|$)', paragraph)[0].rstrip(":")
        found |= dict.fromkeys(names.split(", "), (kind, sentence))
    return found
